"""What ends by itself: pins for some time, and objects with a time to live.

Always true: the clock is given, so a test can turn it; what is kept here is bounded; a pin that ends touches only the object
that it was made for, even if its place has another one by now. Times to live are kept in a log too, where a tier below RAM
outlasts the daemon (server/expiry_log.py); pins hold memory alone, and end with it.
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
from forebay.server.expiry_log import Entry, ExpiryLog
from forebay.tiers.ram import RamDomain

MAX_SECONDS: Final = 30 * 86_400.0
MAX_BLOCKS: Final = 1 << 18  # that wait for their time, of all callers
_SPARE_ENTRIES: Final = 1024  # that ended, before the log is written anew

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

    def __init__(
        self,
        forget: Forget,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._forget = forget
        self._clock = clock
        self._unix_clock = unix_clock
        self._log: ExpiryLog | None = None
        self._logged = 0  # entries in the log
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

    async def forget_after(self, domain: RamDomain, keys: Sequence[ObjectKey], seconds: float) -> None:
        """Delete objects from all tiers `seconds` from now, also by a daemon that starts meanwhile.

        Raises: BadRequest, OverLimit.
        """
        self._check(len(keys), seconds)
        self._forget_later(domain, keys, seconds)
        if self._log is None or not keys:
            return
        if self._logged >= 2 * len(self._due) + _SPARE_ENTRIES:
            await self._rewrite_log(self._log)
        else:
            self._logged += 1
            await self._log.append(Entry(self._unix_clock() + seconds, domain.domain_name, list(keys)))

    async def resume(self, log: ExpiryLog, domain_named: Callable[[str], RamDomain]) -> None:
        """Go on with the times of an earlier daemon, and keep the log from now on."""
        now_s = self._unix_clock()
        for entry in await log.read():
            self._forget_later(domain_named(entry.domain), entry.keys, entry.at_s - now_s)
        self._log = log
        await self._rewrite_log(log)

    async def _rewrite_log(self, log: ExpiryLog) -> None:
        offset_s = self._unix_clock() - self._clock()
        entries = [
            Entry(due.at_s + offset_s, due.domain.domain_name, list(due.keys)) for due in self._due if len(due.keys)
        ]
        self._logged = len(entries)
        await log.rewrite(entries)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _forget_later(self, domain: RamDomain, keys: Sequence[ObjectKey], seconds: float) -> None:
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
