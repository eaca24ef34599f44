"""Loads before stores: while one engine loads, what other engines store goes in turns instead of all at once.

A store's copy and its checksum run in the engine's own process, where the daemon can't slow them: it can only wait before it
gives places. So while an engine has loaded lately, every other engine's `allocate` takes a turn, as many at once as half the
cores, and after each turn the cores are left alone for as long as it took. Turns go round robin by tenant. Always true: without
another engine's load in the last RECENT_S nothing waits; no wait is longer than MAX_WAIT_S; a writer that never commits keeps
its turn for as long as its copy may take, not for ever.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Hashable
from typing import Final

from forebay.kvstore.gate import Turns

RECENT_S: Final = 0.25  # an engine under load loads every few milliseconds; a gap longer than this is idle
MAX_WAIT_S: Final = 1.0
# A turn ends with its commit, and at the latest when a copy at this speed would have ended.
_SLOWEST_BYTES_PER_S: Final = 500e6
_LEAST_TURN_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.02
Engine = Hashable


class Turn:
    """The right to copy what was allocated. `end` it when that is committed or given up."""

    def __init__(self, ended: Callable[[Turn], None], began_s: float) -> None:
        self._ended = ended
        self.began_s = began_s
        self.limit: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Idempotent."""
        if self.limit is not None:
            self.limit.cancel()
            self.limit = None
            self._ended(self)


class RightOfWay:
    """Of one daemon. Event loop only."""

    def __init__(self, *, at_once: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_once = at_once or max(1, len(os.sched_getaffinity(0)) // 2)
        self._clock = clock
        self._last: tuple[Engine, float] = (None, -1e9)  # the newest load
        self._before: tuple[Engine, float] = (None, -1e9)  # the newest one of another engine
        self._running = 0
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self.waits = 0  # stores that had to wait, since start

    def loaded(self, engine: Engine) -> None:
        """This engine is loading."""
        if engine != self._last[0]:
            self._before = self._last
        self._last = (engine, self._clock())

    def gives_way(self, engine: Engine) -> bool:
        """Whether this engine's stores take turns now."""
        _, when_s = self._last if self._last[0] != engine else self._before
        return self._clock() - when_s < RECENT_S

    @property
    def busy(self) -> int:
        """Turns that run, or whose pause does."""
        return self._running

    async def turn(self, tenant: str, size_bytes: int) -> Turn:
        """Wait for a turn to store so many bytes, at most MAX_WAIT_S."""
        if self._running >= self._at_once:
            self.waits += 1
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(tenant, granted)
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await granted
            except TimeoutError:
                if granted.cancelled():  # else one was given in the same step
                    self._running += 1  # late, and so without one: its copy counts all the same
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._next()  # given a turn and cancelled in the same step
                raise
            finally:
                self._waiting.discard(tenant, granted)
        else:
            self._running += 1
        turn = Turn(self._ended, self._clock())
        longest_s = max(_LEAST_TURN_S, size_bytes / _SLOWEST_BYTES_PER_S)
        turn.limit = asyncio.get_running_loop().call_later(longest_s, turn.end)
        return turn

    def stats(self) -> dict[str, int]:
        return {"waiting": len(self._waiting), "waits_total": self.waits}

    def _ended(self, turn: Turn) -> None:
        took_s = self._clock() - turn.began_s
        asyncio.get_running_loop().call_later(min(took_s, _LONGEST_PAUSE_S), self._next)

    def _next(self) -> None:
        """A turn and its pause are over: it goes to who waits, if anybody does."""
        self._running -= 1
        while self._waiting and self._running < self._at_once:
            granted = self._waiting.pop()
            if not granted.done():
                self._running += 1
                granted.set_result(None)
