"""Copies of the first tier's objects to lower tiers: what waits, in which order, within which budget.

Covers the queue of objects that only the first tier has, the write budget, and the copy itself (single flight per
object). When to wait for a copy is decided by the store. Always true: what leaves memory was verified and sealed just
before; a copy that a delete overtook is erased; the queue is bounded, and what it drops is counted.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from forebay.kvstore.channel import TierBusy, TierChannel
from forebay.kvstore.deletion import Deletions
from forebay.kvstore.errors import TierError, TierFull
from forebay.kvstore.fasttier import FastTier, Held
from forebay.kvstore.gate import Owner, Turns
from forebay.kvstore.ledger import Ledger
from forebay.kvstore.tier import ObjectKey

logger = logging.getLogger(__name__)

_NEXT_TURN_S = 0.001

Seal = Callable[[memoryview], None]  # fills in what an object needs outside memory (its header's checksum)


class Copy(enum.Enum):
    """How a copy ended."""

    DURABLE = "durable"  # a lower tier has it
    GONE = "gone"  # no longer in the first tier, or damaged there
    REFUSED = "refused"  # no lower tier has room: asking again won't help
    TROUBLE = "trouble"  # no lower tier could take it just now


@dataclass(slots=True)
class _Waiting:
    size: int
    score: float
    parent: bytes | None
    attempts: int = 0
    ticket: int | None = None  # its entry in the heap; None: taken, being copied


class CopyQueue:
    """Objects that only the first tier has, best score first, but never a child before its waiting parents.

    Scores grow with the position in a sequence, yet a block without those before it is worth nothing: so when the best
    one is taken, its waiting ancestors go first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[ObjectKey, _Waiting] = {}
        self._heap: list[tuple[float, int, ObjectKey]] = []
        self._chain: list[ObjectKey] = []  # next from the end: the ancestors of the last pick, oldest last, then itself
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: ObjectKey) -> bool:
        return key in self._waiting

    def size_of(self, key: ObjectKey) -> int | None:
        waiting = self._waiting.get(key)
        return None if waiting is None else waiting.size

    def add(self, key: ObjectKey, size: int, parent: bytes | None, score: float) -> bool:
        """Returns False if there are too many already."""
        if key in self._waiting:
            return True
        if len(self._waiting) >= self._limit:
            return False
        self._waiting[key] = _Waiting(size, score, parent)
        self._push(key, self._waiting[key])
        return True

    def put_back(self, key: ObjectKey, attempts_limit: int) -> bool:
        """Queue again what `pop` gave. Returns False, and forgets it, after `attempts_limit` times."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return True
        waiting.attempts += 1
        if waiting.attempts >= attempts_limit:
            del self._waiting[key]
            return False
        self._push(key, waiting)
        return True

    def discard(self, key: ObjectKey) -> None:
        self._waiting.pop(key, None)

    def pop(self) -> ObjectKey | None:
        """The next object to copy. It stays counted as waiting until `discard`, or `put_back` queues it again."""
        while True:
            while self._chain:
                key = self._chain.pop()
                if self._take(key):
                    return key
            best = self._best()
            if best is None:
                return None
            self._chain.append(best)
            while True:
                parent = self._waiting[self._chain[-1]].parent
                ancestor = None if parent is None else self._chain[-1]._replace(block=parent)
                above = None if ancestor is None else self._waiting.get(ancestor)
                # A parent cycle can't come from honest hashing, but a caller's word is no proof: stop at the limit.
                if ancestor is None or above is None or above.ticket is None or len(self._chain) > len(self._waiting):
                    break
                self._chain.append(ancestor)

    def _best(self) -> ObjectKey | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_live(entry):
                return entry[2]
        return None

    def _is_live(self, entry: tuple[float, int, ObjectKey]) -> bool:
        waiting = self._waiting.get(entry[2])
        return waiting is not None and waiting.ticket == entry[1]

    def _take(self, key: ObjectKey) -> bool:
        waiting = self._waiting.get(key)
        if waiting is None or waiting.ticket is None:
            return False
        waiting.ticket = None
        return True

    def _push(self, key: ObjectKey, waiting: _Waiting) -> None:
        waiting.ticket = next(self._tickets)
        heapq.heappush(self._heap, (-waiting.score, waiting.ticket, key))
        if len(self._heap) > 2 * len(self._waiting) + 64:  # mostly entries of objects that no longer wait
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)


class ByteBudget:
    """A token bucket that may go into debt once, so that an object larger than the burst is still let through.

    Stores of several owners may share one: owners then take turns, one object a turn.


    Raises: ValueError if the rate is not positive (write policy "off" is how to copy nothing).
    """

    def __init__(
        self,
        bytes_per_s: float,
        burst_bytes: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"a budget of {bytes_per_s} bytes/s would never copy anything")
        self._rate, self._burst = bytes_per_s, burst_bytes
        self._clock, self._sleep = clock, sleep
        self._level = burst_bytes
        self._at_s = clock()
        self._turns: Turns[object] = Turns()

    async def solvent(self, owner: Owner = None) -> None:
        """Wait until the budget is out of debt and it is this owner's turn. `spend` before you wait for anything else."""
        ticket = object()
        self._turns.add(owner, ticket)
        try:
            while (debt := -self._refill()) > 1 or self._turns.first() is not ticket:
                # Out of debt yet not first: the first is about to wake from the same sleep.
                await self._sleep(max(debt / self._rate, _NEXT_TURN_S))
            self._turns.pop()
        except asyncio.CancelledError:
            self._turns.discard(owner, ticket)
            raise

    def spend(self, size: int) -> None:
        self._level = self._refill() - size

    def _refill(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._at_s) * self._rate, self._burst)
        self._at_s = now
        return self._level


class WriteBehind:
    """The copies of one store."""

    def __init__(
        self,
        fast: FastTier,
        lower: Sequence[TierChannel],
        deletions: Deletions,
        ledger: Ledger,
        verify: Callable[[ObjectKey, memoryview], Awaitable[str | None]],
        seal: Seal,
        *,
        queue_limit: int,
        timeout_s: float,
        retry_s: float,
        attempts_limit: int,
        budget: ByteBudget | None,
        sleep: Callable[[float], Awaitable[None]],
        owner: Owner,
    ) -> None:
        self._fast, self._lower, self._deletions, self._ledger = fast, lower, deletions, ledger
        self._verify, self._seal = verify, seal
        self._queue_limit, self._timeout_s, self._retry_s, self._owner = queue_limit, timeout_s, retry_s, owner
        self._attempts_limit, self._budget, self._sleep = attempts_limit, budget, sleep
        self.queue = CopyQueue(queue_limit)
        self._copies: dict[ObjectKey, asyncio.Task[Copy]] = {}
        self._durable: OrderedDict[ObjectKey, None] = OrderedDict()  # copies in tiers that can't be asked from memory
        self._wake = asyncio.Event()
        self._workers: list[asyncio.Task[None]] = []

    def start(self, workers: int) -> None:
        """Copy in the background from now on. Needs a running loop; does nothing the second time."""
        if not self._workers:
            loop = asyncio.get_running_loop()
            self._workers = [loop.create_task(self._work()) for _ in range(workers)]

    def note(self, key: ObjectKey, size: int, parent: bytes | None, score: float) -> None:
        """An object became visible in the first tier."""
        if self.is_durable(key):
            return
        if self.queue.add(key, size, parent, score):
            self._wake.set()
        else:
            self._ledger.count("copy_not_tracked")

    def is_durable(self, key: ObjectKey) -> bool:
        """Whether a lower tier is known to hold the object."""
        for channel in self._lower:
            if self._deletions.owes(channel, key):
                continue
            if channel.leading_run(key.namespace, key.group, (key.block,)) == 1:
                return True
        return key in self._durable

    def copying(self, key: ObjectKey) -> bool:
        return key in self._copies

    def copy(self, key: ObjectKey, size: int) -> asyncio.Task[Copy]:
        """Copy an object down, or join the copy under way. The task never raises but when cancelled."""
        task = self._copies.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._copy(key, size))
            self._copies[key] = task
            task.add_done_callback(lambda _: self._copies.pop(key, None))
        return task

    def forget(self, key: ObjectKey) -> None:
        """The object is being deleted: end its copy. If that lands all the same, its watch has it erased."""
        self.queue.discard(key)
        self._durable.pop(key, None)
        task = self._copies.get(key)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """End the background copies; what was queued stays queued."""
        tasks = [*self._workers, *self._copies.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def drain(self) -> None:
        """Copy all that waits, without a budget, until done or cancelled."""
        for worker in self._workers:
            worker.cancel()
        while self._reachable() and (key := self.queue.pop()) is not None:
            await self._copy_queued(key)
        if self._copies:  # begun by the workers
            await asyncio.wait(self._copies.values())

    async def spill(self, key: ObjectKey, view: memoryview, *, timeout_s: float) -> bool:
        """Write an object that the first tier has no room for. `view` is sealed in place. Returns whether it is safe."""
        watch = self._deletions.watch(key)
        held = Held(view, watch.close)
        try:
            if await self._verify(key, view) is not None:
                self._ledger.count("copy_corrupt")
                return False
            self._seal(view)
            for channel in self._lower:
                ended = await self._put(channel, key, held, lambda: watch.deleted, timeout_s)
                if ended is Copy.DURABLE and not watch.deleted:
                    self._copied(channel, key, view.nbytes)
                    return True
            return False
        finally:
            held.close()

    # --- background -----------------------------------------------------------------------------------------------

    def _reachable(self) -> bool:
        return any(channel.healthy for channel in self._lower)

    async def _work(self) -> None:
        while True:
            try:
                await self._wake.wait()
                if not self._reachable():  # an outage must not use up the objects' attempts
                    await self._sleep(self._retry_s)
                    continue
                if self._budget is not None:
                    await self._budget.solvent(self._owner)  # before picking, so that the best one of then is picked
                key = self.queue.pop()
                if key is None:
                    self._wake.clear()
                elif await self._copy_queued(key) is Copy.TROUBLE:
                    await self._sleep(self._retry_s)
            except Exception:
                self._ledger.count("background_errors")
                logger.exception("the copy worker stumbled")
                await self._sleep(self._retry_s)

    async def _copy_queued(self, key: ObjectKey) -> Copy:
        size = self.queue.size_of(key) or 0
        if self._budget is not None:
            self._budget.spend(size)
        task = self.copy(key, size)
        await asyncio.wait((task,))
        ended = Copy.GONE if task.cancelled() else task.result()
        if ended is not Copy.TROUBLE:
            self.queue.discard(key)
        elif self.queue.put_back(key, self._attempts_limit):
            self._ledger.count("copy_retried")
            self._wake.set()
        else:
            self._ledger.count("copy_given_up")
            self._ledger.note(key, "not copied: every try failed")
        return ended

    async def _copy(self, key: ObjectKey, size: int) -> Copy:
        tried: list[TierChannel] = []
        try:
            return await self._copy_out(key, size, tried)
        except Exception:
            self._ledger.count("background_errors")
            logger.exception("a copy failed in a way that no tier's error explains")
            if tried:
                tried[-1].trip("a copy to it failed unexpectedly")
            return Copy.REFUSED

    async def _copy_out(self, key: ObjectKey, size: int, tried: list[TierChannel]) -> Copy:
        try:
            loan = await self._fast.read(key, size, timeout_s=self._timeout_s)
        except (TierError, ValueError):
            self._ledger.count("first_trouble")
            return Copy.GONE
        if loan is None:
            self._ledger.count("copy_gone")
            self.queue.discard(key)
            return Copy.GONE
        watch = self._deletions.watch(key)

        def free() -> None:
            loan.release()
            watch.close()

        held = Held(loan.view, free)
        try:
            if not await self._make_fit(key, held):
                return Copy.GONE
            ended = Copy.REFUSED
            for channel in self._lower:
                tried.append(channel)
                if watch.deleted:
                    return Copy.GONE
                ended_here = await self._put(channel, key, held, lambda: watch.deleted, self._timeout_s)
                if ended_here is Copy.DURABLE:  # a delete that came meanwhile would have cancelled this task
                    self._copied(channel, key, held.view.nbytes)
                    return Copy.DURABLE
                if ended_here is Copy.TROUBLE:
                    ended = Copy.TROUBLE
            return ended
        finally:
            held.close()

    async def _make_fit(self, key: ObjectKey, held: Held) -> bool:
        """Verify and seal. False: it was damaged in memory, and is now dropped."""
        reason = await self._verify(key, held.view)
        if reason is not None:
            self._ledger.count("copy_corrupt")
            self._ledger.note(key, f"corrupt in {self._fast.name}: {reason}")
            logger.error("an object is damaged in %s (%s): dropped, not copied", self._fast.name, reason)
            self.queue.discard(key)
            await self._fast.tier.delete(key)
            return False
        if held.view.readonly:  # a tier that lends read-only keeps its unsealed bytes; the copy is sealed
            held.view = memoryview(bytearray(held.view))
        self._seal(held.view)
        return True

    async def _put(
        self, channel: TierChannel, key: ObjectKey, held: Held, deleted: Callable[[], bool], timeout_s: float
    ) -> Copy:
        if self._deletions.owes(channel, key):
            return Copy.TROUBLE  # first let the old delete happen, or it would hit the new copy

        def settled() -> None:
            held.leave()
            if deleted():  # whatever this put did, it did it too late
                self._deletions.owe(channel, key)

        held.enter()
        try:
            await channel.put(key, held.view, timeout_s=timeout_s, release=settled, owner=self._owner)
        except TierFull:
            self._ledger.count("copy_full")
            return Copy.REFUSED
        except TierBusy:
            self._ledger.count("copy_busy")
            return Copy.TROUBLE
        except TierError:
            self._ledger.count("copy_trouble")
            return Copy.TROUBLE
        return Copy.DURABLE

    def _copied(self, channel: TierChannel, key: ObjectKey, size: int) -> None:
        self.queue.discard(key)
        self._ledger.count("copied")
        self._ledger.count("copied_bytes", size)
        self._ledger.note(key, "copied")
        self._fast.mark_clean(key)
        if not channel.answers_from_memory:
            self._durable[key] = None
            if len(self._durable) > self._queue_limit:
                self._durable.popitem(last=False)
