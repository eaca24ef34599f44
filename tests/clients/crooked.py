"""Networks and daemons that misbehave: a proxy that cuts, stalls or changes bytes, and a daemon that lies."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from forebay.kvstore import wire
from forebay.kvstore.address import parse_address
from forebay.kvstore.wire import HEADER, Kind, decode_request, encode_frame

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset


class Proxy:
    """Between a client and a daemon on TCP. Counts bytes both ways; at `at` bytes of one way it does what `fault` says.

    fault: "cut" ends the connection by a reset, "stall" forwards nothing more on it, "flip" changes a bit and goes on. Which
    connection it happens to: the first on which so many bytes have come.
    """

    def __init__(self, daemon: str, *, fault: str = "", to_client: bool = True, at: int = 0) -> None:
        self._daemon = parse_address(daemon)
        self.fault, self.to_client, self.at = fault, to_client, at
        self.happened = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._ended = False
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            daemon = socket.create_connection(self._daemon)  # type: ignore[arg-type]
            self._open += [client, daemon]
            thread = threading.Thread(target=self._forward, args=(client, daemon), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket, daemon: socket.socket) -> None:
        passed = 0
        with client, daemon, contextlib.suppress(OSError, ValueError):
            while not self._ended:
                for source in select.select([client, daemon], [], [], 0.1)[0]:
                    data = bytearray(source.recv(1 << 16))
                    if not data:
                        return
                    counts = (source is daemon) == self.to_client and self.fault and not self.happened.is_set()
                    if counts and passed + len(data) > self.at:
                        self.happened.set()
                        here = self.at - passed
                        if self.fault == "flip":
                            data[here] ^= 1 << (self.at % 8)
                        else:
                            (client if source is daemon else daemon).sendall(data[:here])
                            if self.fault == "stall":
                                while not self._ended:
                                    select.select([], [], [], 0.05)
                            for end in (client, daemon):
                                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                            return
                    passed += len(data) if counts else 0
                    (client if source is daemon else daemon).sendall(data)

    def close(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def lying_daemon(answer: Callable[[int, Any], bytes]) -> Iterator[str]:
    """A daemon whose every answer is made up: `answer(request id, request)` is what it sends. Yields its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            had = b""
            while data := sock.recv(1 << 16):
                had += data
                while len(had) >= HEADER.size and len(had) >= HEADER.size + HEADER.unpack_from(had)[0]:
                    length, _, kind, _, number = HEADER.unpack_from(had)
                    body, had = had[HEADER.size : HEADER.size + length], had[HEADER.size + length :]
                    if kind == Kind.REQUEST:
                        sock.sendall(answer(number, decode_request(body)))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                threading.Thread(target=serve, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def truthful(number: int, request: Any, namespace: bytes) -> bytes:
    """What a lying daemon says truly, so that it is listened to."""
    if isinstance(request, wire.Hello):
        reply: Any = wire.HelloReply(b"s" * 16, b"e" * 16, "default/net", False, 1 << 20, 0, 1 << 26)
    else:
        assert isinstance(request, wire.Open)
        reply = wire.OpenReply(1, namespace)
    return encode_frame(Kind.REPLY, number, reply)
