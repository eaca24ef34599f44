"""A listening socket on the event loop, of whichever door.

Binds nothing itself. Always true: a process that is out of descriptors goes on, and accepts again when it has some.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger("forebay.door")

BACKLOG: Final = 128
_A_TURN: Final = 16  # then what is connected already gets its turn
_LOOK_AGAIN_S: Final = 0.5


class Accepting:
    """Hands each peer to `accepted`, non-blocking, until closed."""

    def __init__(self, sock: socket.socket, accepted: Callable[[socket.socket], None]) -> None:
        """`sock` is bound, and this object's from now on. Raises: OSError; the socket is closed then."""
        self._sock, self._accepted = sock, accepted
        self._loop = asyncio.get_running_loop()
        self._closed = False
        try:
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        self._watch()

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_A_TURN):
            try:
                peer, _ = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                # Out of descriptors, most likely: look again soon instead of spinning on a readable listener.
                log.error("accept failed: %s", exc.strerror)
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(_LOOK_AGAIN_S, self._watch)
                return
            peer.setblocking(False)
            self._accepted(peer)

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
