"""What ends by itself: pins for some time, and objects with a time to live.

Always true: the clock is given, so a test can turn it; what is kept here is bounded; a pin that ends touches only the object
that it was made for, even if its place has another one by now. Kept in memory: a daemon that starts anew knows no times.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.kvstore.errors import BadRequest, OverLimit
from forebay.kvstore.index import RowArray, State
from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ram import RamDomain

MAX_SECONDS: Final = 30 * 86_400.0
MAX_BLOCKS: Final = 1 << 18  # that wait for their time, of all callers

Forget: TypeAlias = Callable[[RamDomain, Sequence[ObjectKey]], Awaitable[int]]


class _Due(NamedTuple):
    at_s: float
    number: int
    domain: RamDomain
    rows: RowArray  # pinned; empty for a time to live
    generations: npt.NDArray[np.uint64]
    keys: Sequence[ObjectKey]


class Expiries:
    """Pins and objects by the time at which they end. Event loop only."""

    def __init__(self, forget: Forget, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._forget = forget
        self._clock = clock
        self._due: list[_Due] = []
        self._numbers = itertools.count()
        self._blocks = 0
        self.expired_pins = 0
        self.expired_objects = 0

    def pin(self, domain: RamDomain, rows: RowArray, seconds: float) -> None:
        """Pin rows, [rows], that are visible now, and unpin them `seconds` later. Raises: BadRequest, OverLimit."""
        self._check(len(rows), seconds)
        domain.pin(rows)
        self._push(seconds, domain, rows, domain.tier.index.generation[rows].copy(), ())

    def forget_after(self, domain: RamDomain, keys: Sequence[ObjectKey], seconds: float) -> None:
        """Delete objects from all tiers `seconds` from now. Raises: BadRequest, OverLimit."""
        self._check(len(keys), seconds)
        self._push(seconds, domain, np.empty(0, np.int64), np.empty(0, np.uint64), keys)

    def _check(self, count: int, seconds: float) -> None:
        if not 0 < seconds <= MAX_SECONDS:
            raise BadRequest(f"a time is more than 0 and at most {MAX_SECONDS:.0f} seconds")
        if self._blocks + count > MAX_BLOCKS:
            raise OverLimit(f"{MAX_BLOCKS} blocks have a time already: let some end first")

    def _push(
        self,
        seconds: float,
        domain: RamDomain,
        rows: RowArray,
        generations: npt.NDArray[np.uint64],
        keys: Sequence[ObjectKey],
    ) -> None:
        self._blocks += len(rows) + len(keys)
        heapq.heappush(self._due, _Due(self._clock() + seconds, next(self._numbers), domain, rows, generations, keys))

    async def tick(self) -> None:
        """End what is due."""
        now_s = self._clock()
        while self._due and self._due[0].at_s <= now_s:
            due = heapq.heappop(self._due)
            self._blocks -= len(due.rows) + len(due.keys)
            if len(due.rows):
                index = due.domain.tier.index
                same = (index.generation[due.rows] == due.generations) & (index.state[due.rows] == State.VISIBLE)
                self.expired_pins += due.domain.unpin(due.rows[same])
            else:
                self.expired_objects += await self._forget(due.domain, due.keys)

    def stats(self) -> dict[str, int]:
        return {
            "waiting_blocks": self._blocks,
            "expired_pins_total": self.expired_pins,
            "expired_objects_total": self.expired_objects,
        }
