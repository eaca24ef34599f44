"""The session door on TCP: listening, TLS handshakes, and peers that connect and then say nothing.

Hands each connection to the daemon once it may speak frames; what it says is server/door.py's. Always true: a peer that hasn't
introduced itself by its deadline is dropped, whatever it sends; peers that are still shaking hands count against the bound.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from forebay.kvstore.address import keep_alive
from forebay.kvstore.tls import Stream, TlsSocket, server_context
from forebay.server.accepting import Accepting

log = logging.getLogger("forebay.netdoor")


class TcpListener:
    """Listens on one address. `accepted` gets each peer once its handshake is over, and when it must have introduced itself."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        certificate: Path | None,
        key: Path | None,
        handshake_s: float,
        may_accept: Callable[[int], bool],
        accepted: Callable[[Stream, float], None],
    ) -> None:
        """
        Args:
            certificate, key: PEM files; without them the door speaks plain TCP.
            may_accept: whether there is room for one more, given how many are shaking hands.
        Raises: OSError: certificate or key can't be used.
        """
        self._host, self._port = host, port
        self._context = server_context(certificate, key) if certificate is not None and key is not None else None
        self._handshake_s = handshake_s
        self._may_accept = may_accept
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._accepting: Accepting | None = None
        self._shaking: set[_Handshake] = set()
        self.port = -1

    def start(self) -> None:
        """Raises: OSError: the address is taken, or none of this machine's."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((self._host, self._port))
        except BaseException:
            sock.close()
            raise
        self.port = sock.getsockname()[1]
        self._accepting = Accepting(sock, self._connected)

    def _connected(self, peer: socket.socket) -> None:
        if not self._may_accept(len(self._shaking)):
            peer.close()
            return
        keep_alive(peer)
        deadline_s = self._loop.time() + self._handshake_s
        if self._context is None:
            self._accepted(peer, deadline_s)
        else:
            self._shaking.add(_Handshake(self, TlsSocket(peer, self._context), deadline_s))

    def shaken(self, handshake: _Handshake, sock: TlsSocket | None) -> None:
        """A handshake has ended; `sock` is None where it failed."""
        self._shaking.discard(handshake)
        if sock is not None:
            self._accepted(sock, handshake.deadline_s)

    def stop(self) -> None:
        """Stop listening and drop whom nobody has accepted yet. Idempotent."""
        for handshake in list(self._shaking):
            handshake.fail()
        if self._accepting is not None:
            self._accepting.close()
            self._accepting = None


class _Handshake:
    """One peer's TLS handshake, step by step."""

    def __init__(self, listener: TcpListener, sock: TlsSocket, deadline_s: float) -> None:
        self._listener = listener
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.deadline_s = deadline_s
        self._late = self._loop.call_at(deadline_s, self.fail)
        self._loop.call_soon(self._step)

    def _step(self) -> None:
        if self._sock.fileno() < 0:
            return
        self._forget()
        try:
            wanted = self._sock.handshake()
        except (OSError, ssl.SSLError, ValueError) as exc:
            log.warning("TLS handshake failed", extra={"why": type(exc).__name__})
            self.fail()
            return
        if wanted == "read":
            self._loop.add_reader(self._sock.fileno(), self._step)
        elif wanted == "write":
            self._loop.add_writer(self._sock.fileno(), self._step)
        else:
            self._late.cancel()
            self._listener.shaken(self, self._sock)

    def _forget(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())

    def fail(self) -> None:
        self._late.cancel()
        if self._sock.fileno() >= 0:
            self._forget()
            self._sock.close()
        self._listener.shaken(self, None)
