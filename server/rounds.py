"""Rounds of the event loop: in each, every tenant gets about the same time for its frames, however many sockets it has.

Covers whose frames are read when; a socket's own turn is kvstore/framing.py's. HTTP requests are not counted. Always true:
with one tenant connected nothing is held back; of several, each that waits is served in every round.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from forebay.kvstore.gate import Owner, Turns

SHARE_S: Final = 0.0003  # of one owner in one round; the frame that passes it is finished


class Rounds:
    """One event loop's. A round is a turn of the loop: what is ready, then a poll for what came on sockets meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._members: Counter[Owner] = Counter()
        self._spent_s: dict[Owner, float] = {}
        self._turns: Turns[tuple[Owner, Callable[[], None]]] = Turns()
        self._waiting: set[Callable[[], None]] = set()
        self._granted: Callable[[], None] | None = None
        self._scheduled = False

    def join(self, owner: Owner) -> None:
        """A connection of this owner is open."""
        self._members[owner] += 1

    def leave(self, owner: Owner) -> None:
        self._members[owner] -= 1
        if not self._members[owner]:
            del self._members[owner]

    @property
    def contended(self) -> bool:
        """Whether several owners are connected, so that one may be in another's way."""
        return len(self._members) > 1

    def may_begin(self, owner: Owner, resume: Callable[[], None]) -> bool:
        """Whether this owner's socket may be read now. If not, `resume` is called when it may; it asks again."""
        if resume == self._granted:
            return True
        if not self._turns.of(owner) and (not self.contended or self._spent_s.get(owner, 0.0) < SHARE_S):
            return True
        if resume not in self._waiting:
            self._waiting.add(resume)
            self._wait(owner, resume)
        return False

    def spent(self, owner: Owner, seconds: float) -> None:
        """This owner's frames took so long."""
        if self.contended:
            self._spent_s[owner] = self._spent_s.get(owner, 0.0) + seconds
            self._schedule()

    async def turn(self, owner: Owner) -> None:
        """Let others go on, between chunks of a long batch, which counts as its owner's whole share of a round."""
        if not self.contended and not self._turns.of(owner):
            await asyncio.sleep(0)
            return
        turn: asyncio.Future[None] = self._loop.create_future()

        def go() -> None:
            if not turn.done():
                self._spent_s[owner] = SHARE_S
                turn.set_result(None)

        self._wait(owner, go)
        await turn

    def _wait(self, owner: Owner, go: Callable[[], None]) -> None:
        self._turns.add(owner, (owner, go))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._round)

    def _round(self) -> None:
        self._scheduled = False
        self._spent_s.clear()
        try:
            for _ in range(len(self._turns)):
                owner, go = self._turns.pop()
                if self._spent_s.get(owner, 0.0) >= SHARE_S:
                    self._turns.add(owner, (owner, go))  # all of an owner's go round, so their order stays
                    continue
                self._waiting.discard(go)
                self._granted = go
                go()
        finally:
            self._granted = None
            if self._turns:
                self._schedule()
