"""Who goes next where many wait: turns by owner, and the gate in front of a tier's calls.

Covers the order alone; what a call does is the channel's. An owner is whoever may not hold others up: a tenant. Always
true: with n owners waiting each of them is served within n grants, however many calls another one has waiting.
"""

from __future__ import annotations

import asyncio
import enum
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
Owner = Hashable


class Turns(Generic[T]):
    """What waits, given out round robin by owner, and in the order in which it came within one owner."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Owner, deque[T]] = OrderedDict()  # none is empty; the first is served next
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, owner: Owner) -> int:
        """How many wait for this owner."""
        return len(self._queues.get(owner, ()))

    def add(self, owner: Owner, item: T) -> None:
        self._queues.setdefault(owner, deque()).append(item)
        self._count += 1

    def first(self) -> T:
        """What `pop` gives next. Raises: LookupError: nothing waits."""
        if not self._queues:
            raise LookupError("nothing waits")
        return next(iter(self._queues.values()))[0]

    def pop(self) -> T:
        """Raises: LookupError: nothing waits."""
        item = self.first()
        owner, queue = next(iter(self._queues.items()))
        queue.popleft()
        self._queues.move_to_end(owner)
        self._dropped(owner)
        return item

    def pop_newest_of_longest(self, owner: Owner) -> T | None:
        """Take the newest item of whoever has most waiting, so that `owner` may add one; None if that evens nothing out."""
        longest = max(self._queues, key=self.of, default=None)
        if self.of(longest) <= self.of(owner) + 1:
            return None
        item = self._queues[longest].pop()
        self._dropped(longest)
        return item

    def discard(self, owner: Owner, item: T) -> bool:
        """Returns whether it was waiting."""
        queue = self._queues.get(owner)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        self._dropped(owner)
        return True

    def _dropped(self, owner: Owner) -> None:
        self._count -= 1
        if not self._queues[owner]:
            del self._queues[owner]


class Lane(enum.Enum):
    LOAD = "load"
    STORE = "store"


class Gate:
    """Lets calls in: at most `limit`, at most `store_limit` of them stores, waiting loads before waiting stores."""

    def __init__(self, limit: int, store_limit: int) -> None:
        self._limits = {Lane.LOAD: limit, Lane.STORE: min(store_limit, limit)}
        self._limit = limit
        self._running = dict.fromkeys(Lane, 0)
        self._queues: dict[Lane, Turns[asyncio.Future[bool]]] = {lane: Turns() for lane in Lane}

    @property
    def running(self) -> int:
        return sum(self._running.values())

    def waiting(self, lane: Lane) -> int:
        return len(self._queues[lane])

    def try_enter(self, lane: Lane) -> bool:
        if any(self._queues.values()) or not self._has_room(lane):
            return False
        self._running[lane] += 1
        return True

    async def enter(self, lane: Lane, owner: Owner) -> bool:
        """Wait for a turn. False: this call gave its place in the queue to another owner's, and is not let in."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queues[lane].add(owner, turn)
        self._admit()
        try:
            return await turn
        except asyncio.CancelledError:
            if not self._queues[lane].discard(owner, turn) and not turn.cancelled() and turn.result():
                self.leave(lane)  # let in and cancelled in the same loop step
            raise

    def make_way(self, lane: Lane, owner: Owner) -> bool:
        """Of a full queue, turn away the newest call of whoever has most there. Returns whether `owner` may wait now."""
        turn = self._queues[lane].pop_newest_of_longest(owner)
        if turn is not None and not turn.done():
            turn.set_result(False)
        return turn is not None

    def leave(self, lane: Lane) -> None:
        self._running[lane] -= 1
        self._admit()

    def _has_room(self, lane: Lane) -> bool:
        return self.running < self._limit and self._running[lane] < self._limits[lane]

    def _admit(self) -> None:
        for lane in (Lane.LOAD, Lane.STORE):
            queue = self._queues[lane]
            while queue and self._has_room(lane):
                turn = queue.pop()
                if not turn.done():
                    self._running[lane] += 1
                    turn.set_result(True)
