"""Evacuation: a size class that needs memory gets an extent from the class that keeps the oldest objects.

Covers when that is right, which extent, and emptying it while others read and write. Slots, moves and eviction are
tiers/ram.py's. Always true: only objects that nobody leases, pins or writes are moved or evicted; an extent changes hands only
when it is empty; one step of work is one object or one look at some thousands of slots.

Leases are everywhere, so an extent with none is rare. A chosen extent therefore *drains*: its free slots are not given out,
what is unheld moves at once to slots of its own class, freed by evicting that class's oldest (what is lost is what LRU would
have chosen, not what happened to lie there), and the rest follows as its leases end.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from forebay.kvstore.index import State

if TYPE_CHECKING:
    from forebay.tiers.extents import Extent
    from forebay.tiers.ram import RamDomain, RamTier, SizeClass

_AGE_MARGIN: Final = 17 / 16  # classes in steady use must not take turns at emptying each other's extents
_EXTENTS_A_DRAIN: Final = 12  # one extent in so many may drain at a time: its free slots serve nobody meanwhile
_CHECKS_AN_EXTENT: Final = 16  # the ages of other classes are looked at so often while a class evicts an extent's worth
_FRUITLESS_STEPS: Final = 256  # then another extent's turn: here a lease is long
_CANDIDATES: Final = 64
_RESTING: Final = 8
_SLOTS_A_STEP: Final = 4096


@dataclass(eq=False)
class _Drain:
    """An extent on its way out of its class."""

    size_class: SizeClass
    extent: Extent
    stepping: bool = False
    fruitless: int = 0


class Evacuator:
    """Moves extents between the size classes of one ram tier."""

    def __init__(self, tier: RamTier) -> None:
        self._tier = tier
        self._drains: list[_Drain] = []
        self._resting: deque[int] = deque(maxlen=_RESTING)  # extents that did not become empty lately
        self.done = 0

    @property
    def _limit(self) -> int:
        """Extents that may be on their way at a time."""
        return max(1, self._tier.pool.made // _EXTENTS_A_DRAIN)

    def wanted(self, taker: SizeClass) -> bool:
        """Whether `taker` should get another class's memory rather than evict its own."""
        if taker.extents and taker.evictions_until_check > 0:
            return False
        if self._drains or self._unused(taker) or self._givers(taker):
            return True
        self._look_away(taker)
        return False

    def _look_away(self, taker: SizeClass) -> None:
        taker.evictions_until_check = taker.slots_per_extent // _CHECKS_AN_EXTENT

    def _domains(self, taker: SizeClass) -> list[RamDomain]:
        """Domains whose memory `taker` could get."""
        # Another domain's memory comes once its clients have unmapped it: until then more of it would be emptied in vain.
        waits = len(self._tier.retired) >= self._limit
        quota = taker.domain.quota
        own = None if taker.domain.may_grow or quota is None else quota.domains  # at its end: from its own tenant only
        return [
            domain
            for domain in self._tier.domains.values()
            if domain is taker.domain or not (waits or (own is not None and domain not in own))
        ]

    def _others(self, taker: SizeClass) -> list[SizeClass]:
        return [
            other
            for domain in self._domains(taker)
            for other in domain.classes.values()
            if other is not taker and other.extents
        ]

    def _givers(self, taker: SizeClass) -> list[SizeClass]:
        """Classes with older objects than `taker`'s next victim, oldest first. All that have memory, if it has none."""
        now = self._tier.clock.now
        age = (now - taker.policy.oldest_stamp()) * _AGE_MARGIN if taker.extents else -1
        others = [(now - other.policy.oldest_stamp(), other) for other in self._others(taker)]
        return [other for other_age, other in sorted(others, key=lambda pair: -pair[0]) if other_age > age]

    def _unused(self, taker: SizeClass) -> tuple[RamDomain, SizeClass | None, Extent] | None:
        """An extent that serves nobody, and the class that has it, if any. Of other domains' rather one that no client maps."""
        found: list[tuple[RamDomain, SizeClass | None, Extent]] = [
            (domain, None, extent)
            for domain in self._domains(taker)
            if domain is not taker.domain
            for extent in domain.spare
        ]
        found += (
            (other.domain, other, extent)
            for other in self._others(taker)
            for extent in other.open.values()
            if extent.free_count == extent.slot_count
        )
        return min(found, key=lambda it: it[0] is not taker.domain and bool(it[2].mapped_by), default=None)

    def steps(self, taker: SizeClass) -> Generator[None, None, None]:
        """Work until an extent is empty (`done` grows) or only waiting is left. May be left between any two steps."""
        self._look_away(taker)
        unused = self._unused(taker)
        if unused is not None:
            self._hand_over(*unused, taker)
            return
        for drain in self._drains.copy():
            if (yield from self._go_on(drain, taker)):
                return
        while len(self._drains) < self._limit:
            begun = yield from self._begin(taker)
            if begun is None or (yield from self._go_on(begun, taker)):
                return

    def _go_on(self, drain: _Drain, taker: SizeClass) -> Generator[None, None, bool]:
        """Returns whether the extent is empty and on its way to `taker`."""
        if drain.stepping or drain not in self._drains:
            return False  # somebody else works on it
        drain.stepping = True
        try:
            yield from self._empty(drain)
        finally:
            drain.stepping = False
        extent, size_class = drain.extent, drain.size_class
        if extent.free_count == extent.slot_count:
            self._drains.remove(drain)
            extent.draining = False
            self._resting.clear()
            self._hand_over(size_class.domain, size_class, extent, taker)
            return True
        if drain.fruitless > _FRUITLESS_STEPS:
            self._give_up(drain)
        return False

    def _hand_over(self, owner: RamDomain, giver: SizeClass | None, extent: Extent, taker: SizeClass) -> None:
        self.done += 1
        self._tier.counters.evacuations += 1
        taker.evictions_until_check = 0
        owner.release_extent(giver, extent, to_others=owner is not taker.domain)

    def _begin(self, taker: SizeClass) -> Generator[None, None, _Drain | None]:
        for giver in self._givers(taker):
            extent = yield from self._cheapest(giver)
            if extent is not None and not extent.draining and extent in giver.extents:
                extent.draining = True
                giver.open.pop(extent.number, None)
                self._drains.append(_Drain(giver, extent))
                return self._drains[-1]
        self._resting.clear()
        taker.evictions_until_check = taker.slots_per_extent
        return None

    def _give_up(self, drain: _Drain) -> None:
        self._drains.remove(drain)
        self._resting.append(drain.extent.number)
        drain.extent.draining = False
        drain.size_class.domain.reopen(drain.extent)

    def _cheapest(self, giver: SizeClass) -> Generator[None, None, Extent | None]:
        """Of the extents with most free slots, the first with nothing to wait for, or else that with least."""
        free = [each for each in giver.extents if not each.draining and each.number not in self._resting]
        best: tuple[int, Extent] | None = None
        for extent in heapq.nlargest(_CANDIDATES, free, key=lambda each: each.free_count):
            held = yield from self._held(extent)
            if held == 0:
                return extent
            if held is not None and (best is None or held < best[0]):
                best = (held, extent)
        return None if best is None else best[1]

    def _held(self, extent: Extent) -> Generator[None, None, int | None]:
        """How many objects must be waited for. None: something in it may stay for long (pinned or quarantined)."""
        index, held = self._tier.index, 0
        for start in range(0, extent.slot_count, _SLOTS_A_STEP):
            rows = extent.rows(start, start + _SLOTS_A_STEP)
            rows = rows[rows >= 0]
            states = index.state[rows]
            if index.pins[rows].any() or (states == State.DETACHED).any():
                return None
            held += int(np.count_nonzero((index.refs[rows] != 0) | (states != State.VISIBLE)))
            yield
        return held

    def _empty(self, drain: _Drain) -> Generator[None, None, None]:
        """Move or evict all of the extent's objects that nobody holds."""
        index, extent, size_class = self._tier.index, drain.extent, drain.size_class
        domain = size_class.domain
        drain.fruitless += 1
        for slot in np.flatnonzero(extent.rows() >= 0).tolist():
            while True:
                row = extent.row(slot)
                if row < 0 or index.refs.item(row) | index.pins.item(row):
                    break
                if index.state.item(row) != State.VISIBLE:
                    if not domain.drop_unfinished(row):
                        break
                elif size_class.open:
                    domain.move(size_class, row)
                elif not domain.evict(size_class):
                    return
                drain.fruitless = 0
                yield
                if self._tier.closed or drain not in self._drains:
                    return
