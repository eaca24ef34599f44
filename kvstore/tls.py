"""TLS sockets with the few methods that frames and payloads need of a socket, so that nobody else cares which kind it is.

Covers non-blocking reads and writes over TLS, the handshake step by step, and contexts for both sides. Always true: a call
that can't go on raises `BlockingIOError`, as a plain socket does; a peer that ends without a TLS goodbye is an end.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

_RECORD_BYTES: Final = 16 << 10


class TlsSocket:
    """A connected socket under TLS, non-blocking."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_hostname: str | None = None) -> None:
        """Takes `sock` over. `server_hostname` is given on the connecting side. Finish with `handshake`."""
        sock.setblocking(False)
        self._tls = context.wrap_socket(
            sock,
            server_side=server_hostname is None,
            server_hostname=server_hostname,
            do_handshake_on_connect=False,
            suppress_ragged_eofs=True,
        )

    def handshake(self) -> str:
        """One step. Returns "" when done, else "read" or "write": what to wait for. Raises: OSError (ssl.SSLError)."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return "read"
        except ssl.SSLWantWriteError:
            return "write"
        return ""

    def pending(self) -> int:
        """Bytes that are decrypted already: no event of the socket will tell of them."""
        return self._tls.pending()

    def recv_into(self, buffer: memoryview) -> int:
        return self.recvmsg_into([buffer])[0]

    def recvmsg_into(self, buffers: Sequence[memoryview], *_: Any) -> tuple[int, list[Any], int, None]:
        """Fill buffers one after the other as far as bytes are there. TLS gives one record a call, so it asks again."""
        total = 0
        for buffer in buffers:
            at = 0
            while at < len(buffer):
                try:
                    count = self._tls.recv_into(buffer[at:])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if total:
                        return total, [], 0, None
                    raise BlockingIOError from None
                if not count:
                    return total, [], 0, None
                at += count
                total += count
        return total, [], 0, None

    def send(self, data: bytes | memoryview) -> int:
        try:
            return self._tls.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLZeroReturnError as exc:
            raise BrokenPipeError from exc

    def sendmsg(self, buffers: Sequence[bytes | memoryview], *_: Any) -> int:
        """Send buffers one after the other as far as there is room."""
        total = 0
        for buffer in buffers:
            try:
                count = self.send(buffer)
            except BlockingIOError:
                if total:
                    return total
                raise
            total += count
            if count < len(buffer):
                return total
        return total

    def fileno(self) -> int:
        return self._tls.fileno()

    def setblocking(self, flag: bool) -> None:
        if flag:
            raise ValueError("a TLS socket is used without blocking only")

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return self._tls.getsockopt(level, option, size)

    def shutdown(self, how: int) -> None:
        self._tls.shutdown(how)

    def close(self) -> None:
        self._tls.close()


Stream: TypeAlias = socket.socket | TlsSocket


def pending_bytes(sock: Stream) -> int:
    """Bytes received already that no event will tell of."""
    return sock.pending() if isinstance(sock, TlsSocket) else 0


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """For a listener. Raises: OSError (ssl.SSLError among them): a file can't be read, or the two don't belong together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


def client_context(authority: bool | str | Path | ssl.SSLContext) -> ssl.SSLContext:
    """For a client: True trusts the system's authorities, a path a PEM file's; a context is taken as it is.

    Raises: OSError: the file can't be read.
    """
    if isinstance(authority, ssl.SSLContext):
        return authority
    context = ssl.create_default_context(cafile=None if authority is True else str(authority))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
