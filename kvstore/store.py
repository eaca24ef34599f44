"""The store: one fast tier in front of any list of lower tiers, as one place that keeps objects.

Covers reading through (promotion on a hit), the leading run over all tiers, write policies, deletes that win, and why
an object is not there. Loads are in kvstore/loader.py, copies in writebehind.py, deletes in deletion.py, each tier's
deadlines and health in channel.py. One store a trust domain; channels are shared by all stores. For one event loop.
Always true: no byte is returned that was not verified since it left memory; trouble in a tier is a counted miss;
nothing waits without a deadline.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from forebay.kvstore.channel import TierChannel
from forebay.kvstore.deletion import Deletions
from forebay.kvstore.errors import TierClosed, TierError, TierFull
from forebay.kvstore.fasttier import FastTier
from forebay.kvstore.gate import Owner
from forebay.kvstore.ledger import Ledger
from forebay.kvstore.loader import Flight, Loaded, Loader, Verify
from forebay.kvstore.tier import Borrow, Buffer, ObjectKey, Tier, WritableBuffer
from forebay.kvstore.writebehind import ByteBudget, Copy, Seal, WriteBehind

WritePolicy = Literal["clean_ahead", "write_through", "write_back", "off"]

# A run that changes tiers more often than this ends there: each change costs a question to every tier.
_RUNS_LIMIT = 64


@dataclass(frozen=True, kw_only=True)
class StorePolicy:
    """How a store behaves.

    write_policy: "clean_ahead": the background copies new objects down within `copy_bytes_per_s`, best score first;
        "write_through": `put` returns after the copy; "write_back": copied only by `flush`, `demote` and `aclose`;
        "off": lower tiers are only read.
    copy_bytes_per_s, copy_burst_bytes: budget of clean_ahead.
    copy_queue: objects that may wait to be copied; more are not tracked (and counted).
    copy_attempts, retry_s: a copy that met trouble is tried this often, this far apart.
    load_timeout_s, store_timeout_s: deadlines of one call to a lower tier.
    loads_in_flight: objects being loaded at once; load_window: of them, started ahead by one caller; flush_window: copies
        started ahead by one flush.
    verify_in_thread_bytes: objects from this size on are checksummed in a thread (2 MiB: about 0.2 ms at 10 GB/s).
    explain_entries: objects whose last event is remembered.
    """

    write_policy: WritePolicy = "clean_ahead"
    copy_bytes_per_s: float = 256 * 2**20
    copy_burst_bytes: float = 64 * 2**20
    copy_queue: int = 65_536
    copy_workers: int = 2
    copy_attempts: int = 5
    retry_s: float = 1.0
    load_timeout_s: float = 5.0
    store_timeout_s: float = 10.0
    loads_in_flight: int = 64
    load_window: int = 32
    flush_window: int = 64
    verify_in_thread_bytes: int = 2 * 2**20
    explain_entries: int = 16_384
    deletes_owed: int = 65_536


class TierRun(NamedTuple):
    """`blocks` blocks in a row that `tier` holds."""

    tier: str
    blocks: int


class FlushResult(NamedTuple):
    """Of the objects asked for: in a lower tier; in no tier; only in the first tier, and not copied in time (or there is
    no lower tier to copy to)."""

    durable: int
    missing: int
    failed: int


class DrainResult(NamedTuple):
    """Objects copied while closing, and left in the first tier alone."""

    copied: int
    left: int


class Store:
    """One trust domain's objects over all tiers.

    Args:
        first: the fast tier; answers presence from memory (SupportsPresence), better with slots (SupportsSlots).
        lower: channels to the slower tiers, fastest first.
        verify: what is wrong with an object's bytes, None if nothing (kvstore.objects.verify_object).
        seal: completes an object's header before it leaves memory (kvstore.objects.seal_header).
        owner: whose turns its calls to the lower tiers take: a tenant.
        copy_budget: of bytes that `clean_ahead` copies, shared with other stores; None: one of its own, as `settings` say.
    """

    def __init__(
        self,
        first: Tier,
        lower: Sequence[TierChannel],
        *,
        verify: Verify,
        seal: Seal,
        settings: StorePolicy | None = None,
        owner: Owner = None,
        copy_budget: ByteBudget | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        policy = settings or StorePolicy()
        self._policy = policy
        self._clock, self._sleep, self._owner = clock, sleep, owner
        self._lower = tuple(lower)
        self._fast = FastTier(first)
        self._ledger = Ledger(policy.explain_entries)
        self._deletions = Deletions(
            self._lower,
            self._ledger,
            retry_s=policy.retry_s,
            owed_limit=policy.deletes_owed,
            timeout_s=policy.store_timeout_s,
            sleep=sleep,
            owner=owner,
        )
        self._loader = Loader(
            self._fast,
            self._lower,
            self._deletions,
            self._ledger,
            verify,
            in_flight_limit=policy.loads_in_flight,
            timeout_s=policy.load_timeout_s,
            thread_bytes=policy.verify_in_thread_bytes,
            owner=owner,
        )
        ahead = policy.write_policy == "clean_ahead"
        if ahead and copy_budget is None:
            copy_budget = ByteBudget(policy.copy_bytes_per_s, policy.copy_burst_bytes, clock, sleep)
        self._copies = WriteBehind(
            self._fast,
            self._lower,
            self._deletions,
            self._ledger,
            self._loader.verify,
            seal,
            queue_limit=policy.copy_queue,
            timeout_s=policy.store_timeout_s,
            retry_s=policy.retry_s,
            attempts_limit=policy.copy_attempts,
            budget=copy_budget if ahead else None,
            sleep=sleep,
            owner=owner,
        )
        self._closed = False

    # --- what is where --------------------------------------------------------------------------------------------

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> list[TierRun]:
        """The leading run that tiers hold by their own memory, each block with the fastest tier that has it.

        Tiers that must be asked with I/O are left out: `match` asks them too.
        """
        runs: list[TierRun] = []
        self._extend(runs, namespace, group, blocks, 0)
        return runs

    async def match(self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float) -> list[TierRun]:
        """As `leading_run`, and asks the tiers that answer only with I/O, for at most `timeout_s` seconds in all.

        A tier that doesn't answer in time counts as holding nothing.
        """
        deadline_s = self._clock() + timeout_s
        runs: list[TierRun] = []
        position = self._extend(runs, namespace, group, blocks, 0)
        while position < len(blocks) and len(runs) < _RUNS_LIMIT:
            rest = blocks[position:]
            for channel in self._lower:
                if channel.answers_from_memory or not channel.answers_probes or not channel.healthy:
                    continue
                try:
                    left_s = max(deadline_s - self._clock(), 0.0)
                    run = await channel.probe(namespace, group, rest, timeout_s=left_s, owner=self._owner)
                except TierError:
                    self._ledger.count("probe_trouble")
                    continue
                run = self._deletions.cut(channel, namespace, group, rest, run)
                if run:
                    _append(runs, channel.name, run)
                    position = self._extend(runs, namespace, group, blocks, position + run)
                    break
            else:
                break
        return runs

    def _extend(self, runs: list[TierRun], namespace: bytes, group: int, blocks: Sequence[bytes], position: int) -> int:
        """Append the runs from `position` on, as far as memory knows. Returns where they end."""
        while position < len(blocks) and len(runs) < _RUNS_LIMIT:
            rest = blocks[position:] if position else blocks
            tier, run = self._fast.name, self._fast.leading_run(namespace, group, rest)
            for channel in self._lower:
                if run:
                    break
                found = channel.leading_run(namespace, group, rest)
                tier, run = channel.name, self._deletions.cut(channel, namespace, group, rest, found)
            if not run:
                break
            _append(runs, tier, run)
            position += run
        return position

    def is_clean(self, key: ObjectKey) -> bool:
        """Whether a lower tier is known to hold the object, so that evicting it from the first loses nothing."""
        return self._copies.is_durable(key)

    def explain(self, key: ObjectKey) -> dict[str, Any]:
        """Which tiers hold an object, what is under way with it, and if it is gone, why as far as is remembered."""
        holders = [self._fast.name] if self._fast.holds(key) else []
        for channel in self._lower:
            if not self._deletions.owes(channel, key) and channel.leading_run(key.namespace, key.group, (key.block,)):
                holders.append(channel.name)
        last = self._ledger.last(key)
        gone = None
        if not holders:
            # Evictions happen inside a tier, unseen: an object that was fine when last seen was evicted.
            gone = "never stored" if last is None else "evicted" if last in ("stored", "loaded", "copied") else last
        return {
            "tiers": holders,
            "unasked": [each.name for each in self._lower if not each.answers_from_memory],
            "waits_to_be_copied": key in self._copies.queue,
            "copying": self._copies.copying(key),
            "loading": self._loader.loading(key),
            "last": last,
            "gone": gone,
        }

    def stats(self) -> dict[str, float]:
        """Counters by name (kvstore/ledger.py) and gauges. Those of a tier are with its channel."""
        return {
            **self._ledger.counters,
            "copies_waiting": len(self._copies.queue),
            "deletes_outstanding": self._deletions.owed,
        }

    # --- reading --------------------------------------------------------------------------------------------------

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        """Copy an object into `out`: from the first tier, or from a lower one, verified and promoted.

        Returns: its length, or None: not here, or not in `timeout_s` seconds, or every copy of it was damaged.
        Raises: ValueError if `out` is shorter than the object; TierClosed after `aclose`.
        """
        self._check_open(key)
        self._ledger.count("gets")
        deadline_s = self._clock() + timeout_s
        for _ in range(2):  # a second time when a load of somebody else's that we joined did not serve us
            found = await self._get_first(key, out, max(deadline_s - self._clock(), 0.0))
            if found is not None:
                return found
            if not self._lower:
                break
            flight, led = self._loader.start(key, len(out), exact=False)
            loaded = await self._landed(flight, deadline_s)
            if loaded is not None and loaded.data is not None and len(loaded.data) <= len(out):
                memoryview(out)[: len(loaded.data)] = loaded.data
                return len(loaded.data)
            if led and loaded is not None and loaded.too_small:
                raise ValueError(f"out has {len(out)} bytes, the object in {loaded.tier} more")
            if led and loaded is None:
                break
        self._ledger.count("get_misses")
        return None

    async def _get_first(self, key: ObjectKey, out: WritableBuffer, timeout_s: float) -> int | None:
        try:
            found = await self._fast.tier.get_into(key, out, timeout_s=timeout_s)
        except TierClosed:
            raise
        except TierError:
            self._ledger.count("first_trouble")
            return None
        if found is not None:
            self._ledger.count("get_first_hits")
        return found

    async def load(
        self, namespace: bytes, group: int, blocks: Sequence[bytes], layout_bytes: int, timeout_s: float
    ) -> int:
        """Bring the leading run into the first tier, each object of `layout_bytes` bytes.

        Ends at the first block that no tier can give, whole and in time. Returns how many leading blocks the first tier
        now holds; nothing evicts them before the caller's next await. Loads still under way at the deadline go on.
        """
        self._check_open(None)
        held = self._fast.leading_run(namespace, group, blocks)
        if held == len(blocks) or not self._lower:
            return held
        deadline_s = self._clock() + timeout_s
        if all(channel.answers_from_memory or channel.answers_probes for channel in self._lower):
            runs = await self.match(namespace, group, blocks, timeout_s=timeout_s)
            blocks = blocks[: sum(run.blocks for run in runs)]
        with _Pins(self._fast) as pins:  # or the run's end would push out its beginning
            ahead: deque[tuple[ObjectKey, Flight | None]] = deque()
            started = 0
            for index in range(len(blocks)):
                while started < len(blocks) and len(ahead) < self._policy.load_window:
                    key = ObjectKey(namespace, blocks[started], group)
                    flight = None
                    if not pins.pin(key):
                        parent = blocks[started - 1] if started else None
                        flight, _ = self._loader.start(key, layout_bytes, exact=True, parent=parent)
                        flight.when_visible.append(functools.partial(pins.pin, key))
                    ahead.append((key, flight))
                    started += 1
                key, flight = ahead.popleft()
                if flight is not None and (await self._landed(flight, deadline_s) is None or not pins.pin(key)):
                    return index  # a hole, too late, or more than fits
                if index % 256 == 255:
                    await asyncio.sleep(0)
            return len(blocks)

    async def _landed(self, flight: Flight, deadline_s: float) -> Loaded | None:
        """Wait for a load, not longer than the deadline and without ever cancelling it: others may wait too."""
        await asyncio.wait((flight.task,), timeout=max(deadline_s - self._clock(), 0.0))
        if not flight.task.done():
            self._ledger.count("load_deadline")
            return None
        return None if flight.task.cancelled() else flight.task.result()

    # --- writing --------------------------------------------------------------------------------------------------

    async def put(
        self, key: ObjectKey, data: Buffer, parent: bytes | None = None, *, score: float = 0.0, timeout_s: float = 5.0
    ) -> None:
        """Store a copy of a whole object. With write_through it is in a lower tier, too, if that was possible in time.

        Raises: TierFull if neither the first nor, where writing is allowed, a lower tier has room. Other errors of the
        first tier as Tier.put.
        """
        self._check_open(key)
        size = memoryview(data).nbytes
        deadline_s = self._clock() + timeout_s
        self._ledger.count("puts")
        self._ledger.count("put_bytes", size)
        flight = self._loader.flight(key)
        if flight is not None:  # it has the object's place in the first tier: what it brings is the same object
            await self._landed(flight, deadline_s)
        try:
            await self._fast.put(key, data, parent=parent, timeout_s=max(deadline_s - self._clock(), 0.0))
        except TierFull as full:
            await self._spill(key, data, full, deadline_s)
            return
        self.note_committed(key, parent, size, score)
        if self._policy.write_policy == "write_through" and key in self._copies.queue:
            await asyncio.wait((self._copies.copy(key, size),), timeout=max(deadline_s - self._clock(), 0.0))

    def note_committed(self, key: ObjectKey, parent: bytes | None, size_bytes: int, score: float) -> None:
        """An object became visible in the first tier: by `put`, or by a writer that committed it there in place.

        `score`: its worth per byte; the best are copied down first (parents before their children). Needs a running
        event loop.
        """
        self._ledger.note(key, "stored")
        policy = self._policy.write_policy
        if policy == "off" or not self._lower or self._closed:
            return
        self._copies.note(key, size_bytes, parent, score)
        if policy != "write_back":
            self._copies.start(self._policy.copy_workers)

    async def _spill(self, key: ObjectKey, data: Buffer, full: TierFull, deadline_s: float) -> None:
        if self._policy.write_policy == "off" or not self._lower:
            raise full
        left_s = max(deadline_s - self._clock(), 0.0)
        if not await self._copies.spill(key, memoryview(bytearray(data)), timeout_s=left_s):
            raise full
        self._ledger.count("put_spilled")

    async def flush(self, keys: Sequence[ObjectKey], *, timeout_s: float) -> FlushResult:
        """Wait until the objects are in a lower tier, copying those that are not."""
        deadline_s = self._clock() + timeout_s
        return _sum_up([ended async for _, ended in self._flush_each(keys, deadline_s)])

    async def demote(self, keys: Sequence[ObjectKey], *, timeout_s: float) -> FlushResult:
        """Copy the objects to a lower tier, then drop from the first tier those that are safe there."""
        deadline_s = self._clock() + timeout_s
        all_ended = []
        async for key, ended in self._flush_each(keys, deadline_s):
            all_ended.append(ended)
            if ended is Copy.DURABLE:
                await self._fast.tier.delete(key)
        return _sum_up(all_ended)

    async def _flush_each(self, keys: Sequence[ObjectKey], deadline_s: float) -> AsyncIterator[tuple[ObjectKey, Copy]]:
        # A window that moves on with each answer: waiting for whole batches would leave the tier idle at each one's end.
        loop, ahead = asyncio.get_running_loop(), deque[tuple[ObjectKey, asyncio.Task[Copy]]]()
        left = iter(keys)
        try:
            while True:
                for key in itertools.islice(left, self._policy.flush_window - len(ahead)):
                    ahead.append((key, loop.create_task(self._flush_one(key, deadline_s))))
                if not ahead:
                    return
                key, task = ahead.popleft()
                try:
                    ended = await task
                except BaseException:
                    task.cancel()
                    raise
                yield key, ended
        finally:
            for _, task in ahead:
                task.cancel()

    async def _flush_one(self, key: ObjectKey, deadline_s: float) -> Copy:
        while True:
            if self._copies.is_durable(key):
                return Copy.DURABLE
            if not self._fast.holds(key):
                return Copy.GONE
            if self._policy.write_policy == "off" or not self._lower:
                return Copy.REFUSED
            task = self._copies.copy(key, self._copies.queue.size_of(key) or 0)
            await asyncio.wait((task,), timeout=max(deadline_s - self._clock(), 0.0))
            if not task.done():
                return Copy.TROUBLE
            ended = Copy.GONE if task.cancelled() else task.result()
            if ended is not Copy.TROUBLE or deadline_s - self._clock() < self._policy.retry_s:
                return ended
            await self._sleep(self._policy.retry_s)

    async def delete(self, keys: Sequence[ObjectKey], *, timeout_s: float = 5.0) -> int:
        """Forget objects on all tiers. Returns how many were in one.

        Loads and copies in flight don't bring them back. A lower tier that can't be reached owes the delete: its copy
        is not served meanwhile, and it is asked again until it agrees (`deletes_outstanding`). Trouble in the first
        tier is raised.
        """
        deadline_s = self._clock() + timeout_s
        found: set[ObjectKey] = set()
        with self._deletions.under_way(keys):
            first_trouble: TierError | None = None
            for position, key in enumerate(keys):
                if position % 256 == 255:
                    await asyncio.sleep(0)  # a tier in memory never waits, and a batch may be of millions
                self._copies.forget(key)
                self._ledger.note(key, "deleted")
                try:
                    if await self._fast.tier.delete(key):
                        found.add(key)
                except TierError as trouble:  # raised in the end: the lower tiers come first
                    self._ledger.count("first_trouble")
                    first_trouble = trouble
            for channel in self._lower:
                for start in range(0, len(keys), self._policy.load_window):
                    some = keys[start : start + self._policy.load_window]
                    left_s = max(deadline_s - self._clock(), 0.0)
                    erased = await asyncio.gather(
                        *(self._deletions.erase(channel, key, timeout_s=left_s) for key in some)
                    )
                    found.update(key for key, was_there in zip(some, erased, strict=True) if was_there)
        self._ledger.count("deletes", len(keys))
        if first_trouble is not None:
            raise first_trouble
        return len(found)

    async def aclose(self, deadline_s: float) -> DrainResult:
        """Copy down what only the first tier has, for at most `deadline_s` seconds, and end all background work.

        Closes neither the first tier nor the channels: their owner does. Idempotent.
        """
        before = self._ledger.counters["copied"]
        if not self._closed and self._policy.write_policy != "off" and self._lower:
            self._closed = True
            draining = asyncio.get_running_loop().create_task(self._copies.drain())
            await asyncio.wait((draining,), timeout=deadline_s)
            draining.cancel()
            await asyncio.wait((draining,))
        self._closed = True
        await self._copies.stop()
        await self._loader.aclose()
        await self._deletions.aclose()
        return DrainResult(self._ledger.counters["copied"] - before, len(self._copies.queue))

    def _check_open(self, key: ObjectKey | None) -> None:
        if self._closed:
            raise TierClosed("the store is closed", tier=self._fast.name, key=key)


class _Pins:
    """Objects kept in the first tier until the block ends."""

    def __init__(self, fast: FastTier) -> None:
        self._fast = fast
        self._pins: dict[ObjectKey, Borrow] | None = {}

    def pin(self, key: ObjectKey) -> bool:
        """Returns whether the object is here (and, unless the block has ended, stays)."""
        if self._pins is None:
            return self._fast.holds(key)
        if key not in self._pins:
            pin = self._fast.pin(key)
            if pin is None:
                return False
            self._pins[key] = pin
        return True

    def __enter__(self) -> _Pins:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pins, self._pins = self._pins, None
        for pin in (pins or {}).values():
            pin.release()


def _sum_up(ended: Sequence[Copy]) -> FlushResult:
    durable, missing = ended.count(Copy.DURABLE), ended.count(Copy.GONE)
    return FlushResult(durable, missing, len(ended) - durable - missing)


def _append(runs: list[TierRun], tier: str, blocks: int) -> None:
    if runs and runs[-1].tier == tier:
        blocks += runs.pop().blocks
    runs.append(TierRun(tier, blocks))
