"""The ram tier: objects in shared memory that engines on this node map.

Covers size classes, slots, eviction and the byte accounts. Extents come from tiers/extents.py and change their class in
tiers/evacuation.py; rows and links are kvstore/index.py's, order of eviction is kvstore/policy.py's; sessions, leases by id
and liveness are the server's.
Always true: free + cached + allocated + quarantined bytes = memory of the tier; a slot is handed out again only after its
generation on the board has changed.

One `RamTier` a daemon; one `RamDomain` a trust domain, and that is what passes the Tier contract. All calls belong to one
thread, the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from forebay.kvstore.errors import BlockCorrupt, InvariantViolation, TierClosed, TierFull, TierTimeout
from forebay.kvstore.index import ABSENT, UNLIMITED, Index, RowArray, State, Table
from forebay.kvstore.policy import Clock, LeafFirstLru
from forebay.kvstore.tier import Borrow, Buffer, ObjectKey, Reservation, WritableBuffer
from forebay.kvstore.wire import SlotStatus
from forebay.tiers.evacuation import Evacuator
from forebay.tiers.extents import (
    MIN_SLOT_BYTES,
    Board,
    Extent,
    ExtentPool,
    available_memory_bytes,
    forbid_new_seals,
    forbid_new_writable_mappings,
)

Places: TypeAlias = list[tuple[Extent, npt.NDArray[np.int64]]]
_PAGE: Final = 4096
_LARGE_OBJECT: Final = 64 << 10
_ALL_PARTS: Final = -1  # a mask with every bit: whoever writes whole objects need not know how many parts they have
_FEW: Final = 4  # rows up to which plain Python beats array calls
_LUMP: Final = 1024  # rows looked at together when those before could not go: 0.1 ms
_FRUITLESS_LOOKS: Final = 16  # then eviction gives up for this call: what it parked need not be looked at again

np.unique(np.zeros(1, np.int64))  # its first call imports numpy.ma: 18 ms that no event loop should pay


def _until_absent(rows: RowArray) -> tuple[RowArray, bool]:
    missing = rows < 0
    return (rows[: int(missing.argmax())], True) if missing.any() else (rows, False)


def stride_of(object_bytes: int) -> int:
    """Bytes between slots: whole pages for large objects (direct I/O, DMA), 64-byte lines for small ones."""
    unit = _PAGE if object_bytes >= _LARGE_OBJECT else 64
    return max(MIN_SLOT_BYTES, -(-object_bytes // unit) * unit)


@dataclass
class RamCounters:
    """What happened to objects, since start."""

    evicted: int = 0
    evicted_dirty: int = 0  # of these: the only copy
    evicted_unused: int = 0  # of these: stored and never hit
    moved: int = 0  # relocated by an evacuation
    evacuations: int = 0
    refused: int = 0  # objects of an allocate that found no room
    corrupt: int = 0
    deleted: int = 0


class SizeClass:
    """Slots of one stride in one domain."""

    __slots__ = ("domain", "evictions_until_check", "extents", "open", "policy", "stride")

    def __init__(self, domain: RamDomain, stride: int) -> None:
        index = domain.tier.index
        self.domain = domain
        self.stride = stride
        self.policy = LeafFirstLru(index.stamp, index.parked, domain.tier.clock)
        self.extents: list[Extent] = []
        self.open: dict[int, Extent] = {}  # by number: those whose free slots may be given out; the last is next
        self.evictions_until_check = 0  # see tiers/evacuation.py

    @property
    def free_slots(self) -> int:
        return sum(extent.free_count for extent in self.open.values())

    @property
    def slots_per_extent(self) -> int:
        return self.domain.tier.extent_bytes // self.stride


@dataclass
class Allocation:
    """Answer to `allocate`: statuses, one byte an object, and rows, ABSENT where the caller writes nothing."""

    statuses: bytes
    rows: RowArray
    table: Table


@dataclass
class _Parts:
    """Progress of an object that several sessions write: bit masks of the parts taken and whole, and how many still write.

    With nobody writing it waits for the writers of its other parts, and is evicted in turn if they don't come.
    """

    owned: int
    done: int = 0
    writers: int = 1


@dataclass(frozen=True)
class Accounting:
    """Bytes of the tier by state. `retired` is memory of dropped extents that some client still maps."""

    total: int
    free: int
    cached: int
    allocated: int
    quarantined: int
    retired: int


class Quota:
    """Memory that a tenant's domains may take together, in whole extents. At its end they evict their own, and grow no more."""

    def __init__(self, max_extents: int) -> None:
        self.max_extents = max(1, max_extents)
        self.domains: list[RamDomain] = []

    @property
    def left(self) -> int:
        return self.max_extents - sum(len(domain.extents) for domain in self.domains)


class RamTier:
    """The memory of one daemon, shared by its trust domains."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        extent_bytes: int = 64 << 20,
        reserve_bytes: int = 0,
        name: str = "ram",
        available: Callable[[], int] = available_memory_bytes,
        on_gone: Callable[[Table, list[bytes], str], None] | None = None,
    ) -> None:
        """
        Args:
            capacity_bytes: budget; rounded down to whole extents.
            reserve_bytes: memory that growth leaves to the machine.
            on_gone: told of objects of one table that left: (table, keys, "evicted" | "corrupt" | "deleted").
        """
        if capacity_bytes < extent_bytes:
            raise ValueError(
                f"ram of {capacity_bytes} bytes is less than one extent of {extent_bytes}: raise ram_bytes"
            )
        self.name = name
        self.extent_bytes = extent_bytes
        self.pool = ExtentPool(
            capacity_bytes=capacity_bytes,
            extent_bytes=extent_bytes,
            reserve_bytes=reserve_bytes,
            available=available,
            name=name,
        )
        self.capacity_bytes = self.pool.max_extents * extent_bytes
        slots = self.capacity_bytes // MIN_SLOT_BYTES
        # A ghost needs a child with a place, so there are never more ghosts than places.
        self.index = Index(2 * slots + 1024, on_leaf=self._on_leaf, on_low=self._on_low)
        self.clock = Clock()
        self.counters = RamCounters()
        self.domains: dict[str, RamDomain] = {}
        self.class_of_table: list[SizeClass] = []
        self.on_gone = on_gone
        self.cached_bytes = 0
        self.allocated_bytes = 0
        self.quarantined_bytes = 0
        self.pinned_bytes = 0  # of the cached ones
        self.retired: dict[int, Extent] = {}  # by extent number: dropped, but mapped by some client
        self.evacuator = Evacuator(self)
        self._next_generation = 1
        self.closed = False

    def domain(self, name: str, *, read_only: bool = False, quota: Quota | None = None) -> RamDomain:
        """The trust domain of that name, made on first use."""
        found = self.domains.get(name)
        if found is None:
            found = self.domains[name] = RamDomain(self, name, read_only=read_only, quota=quota)
            if quota is not None:
                quota.domains.append(found)
        return found

    def take_generations(self, count: int) -> int:
        first = self._next_generation
        self._next_generation += count
        return first

    def _on_leaf(self, row: int) -> None:
        if self.index.evictable(row):
            self.class_of_table[self.index.table.item(row)].policy.unpark(row)

    def _on_low(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # no loop is held up
        loop.run_in_executor(None, self.index.back_ahead)

    def bytes_of(self, rows: RowArray) -> int:
        """Memory that rows' places take."""
        return sum(self.class_of_table[number].stride for number in self.index.table[rows].tolist())

    def tell_gone(self, rows: RowArray, why: str) -> None:
        if self.on_gone is not None:
            numbers = self.index.table[rows]
            for number in dict.fromkeys(numbers.tolist()):
                self.on_gone(self.index.tables[number], self.index.key[rows[numbers == number]].tolist(), why)

    def tell_one_gone(self, row: int, why: str) -> None:
        if self.on_gone is not None:
            self.on_gone(self.index.tables[self.index.table.item(row)], [self.index.key_of(row)], why)

    def accounting(self) -> Accounting:
        in_use = self.pool.made * self.extent_bytes - len(self.retired) * self.extent_bytes
        return Accounting(
            total=self.pool.made * self.extent_bytes,
            free=in_use - self.cached_bytes - self.allocated_bytes - self.quarantined_bytes,
            cached=self.cached_bytes,
            allocated=self.allocated_bytes,
            quarantined=self.quarantined_bytes,
            retired=len(self.retired) * self.extent_bytes,
        )

    def stats(self) -> dict[str, Any]:
        classes = [
            {
                "domain": domain.domain_name,
                "stride_bytes": stride,
                "extents": len(c.extents),
                "free_slots": c.free_slots,
            }
            for domain in self.domains.values()
            for stride, c in domain.classes.items()
        ]
        return {
            "capacity_bytes": self.capacity_bytes,
            "bytes": asdict(self.accounting()),
            "objects": sum(table.visible for table in self.index.tables),
            "ghosts": self.index.ghosts,
            "refused_growth_total": self.pool.refused_growth,
            "counters": asdict(self.counters),
            "classes": classes,
        }

    def audit(self) -> None:
        """Recompute the accounts from the slots themselves. Raises InvariantViolation. O(memory): for tests."""
        self.index.check()
        pinned = 0
        seen = dict.fromkeys(State, 0)
        extents = 0
        for domain in self.domains.values():
            extents += len(domain.spare)
            for size_class in domain.classes.values():
                for extent in size_class.extents:
                    extents += 1
                    held = extent.rows()
                    used = np.flatnonzero(held >= 0)
                    if len(used) + extent.free_count != extent.slot_count:
                        raise InvariantViolation(f"extent {extent.number}: used and free slots don't add up")
                    rows = held[used].astype(np.int64)
                    if (
                        len(rows)
                        and (self.index.offset[rows] != used.astype(np.uint64) * np.uint64(extent.stride)).any()
                    ):
                        raise InvariantViolation(f"extent {extent.number}: a row's place is not the slot that names it")
                    pinned += int(np.count_nonzero(self.index.pins[rows])) * size_class.stride
                    for state in State:
                        seen[state] += int(np.count_nonzero(self.index.state[rows] == state)) * size_class.stride
        if (seen[State.VISIBLE], seen[State.WRITING], seen[State.DETACHED]) != (
            self.cached_bytes,
            self.allocated_bytes,
            self.quarantined_bytes,
        ):
            raise InvariantViolation(f"byte accounts differ from the slots: {seen}, {self.accounting()}")
        if pinned != self.pinned_bytes:
            raise InvariantViolation(f"{pinned} bytes are pinned, the account says {self.pinned_bytes}")
        if seen[State.FREE] or seen[State.GHOST]:
            raise InvariantViolation("a slot belongs to a row that has no place")
        if extents + len(self.pool.ready) + len(self.retired) != self.pool.made:
            raise InvariantViolation("extents are missing from the account")

    def unmapped(self, number: int, session: object) -> None:
        """A session (or its process, by ending) gave up a mapping; a retired extent goes with its last one."""
        extent = self.retired.get(number)
        if extent is not None:
            extent.mapped_by.discard(session)
            if not extent.mapped_by:
                del self.retired[number]
                self.pool.forget()

    async def aclose(self) -> None:
        """Stop growing and release all memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        await self.pool.aclose()
        for domain in self.domains.values():
            domain.close_memory()
        self.domains.clear()


class RamDomain:
    """One trust domain's objects. A Tier; also SupportsPresence, SupportsListing and SupportsSlots."""

    def __init__(self, tier: RamTier, name: str, *, read_only: bool, quota: Quota | None = None) -> None:
        self.tier = tier
        self.quota = quota
        self.name = tier.name
        self.domain_name = name
        self.read_only = read_only
        self.capacity_bytes = tier.capacity_bytes
        # Twice the budget's extents: retired ones keep their position until no client maps them.
        self.board = Board(2 * tier.pool.max_extents + 16, tier.extent_bytes // MIN_SLOT_BYTES)
        self.tables: dict[tuple[bytes, int], Table] = {}
        self.classes: dict[int, SizeClass] = {}
        self.extents: dict[int, Extent] = {}
        self.spare: list[Extent] = []  # empty, known to this domain's clients: for this domain only
        self.newly_retired: list[int] = []  # every number retired while some client mapped it
        self._parts: dict[int, _Parts] = {}

    # --- tables and memory ------------------------------------------------------------------------------------------

    def table(self, namespace: bytes, group: int, object_bytes: int) -> Table:
        """The table of a namespace's group, made on first use.

        Raises: ValueError if it exists for another object size; TierFull if such an object can never fit; TierClosed.
        """
        self._check_open()
        found = self.tables.get((namespace, group))
        stride = stride_of(object_bytes)
        if stride > self.tier.extent_bytes:
            raise TierFull(
                f"an object of {object_bytes} bytes does not fit an extent of {self.tier.extent_bytes}: raise extent_bytes",
                tier=self.name,
                need_bytes=object_bytes,
                free_bytes=self.tier.extent_bytes,
            )
        if found is None:
            found = self.tables[(namespace, group)] = self.tier.index.add_table(namespace, group, object_bytes)
            if stride not in self.classes:
                self.classes[stride] = SizeClass(self, stride)
            self.tier.class_of_table.append(self.classes[stride])
        elif found.object_bytes != object_bytes:
            raise ValueError(f"objects of this namespace have {found.object_bytes} bytes, not {object_bytes}")
        return found

    def _check_open(self, key: ObjectKey | None = None) -> None:
        if self.tier.closed:
            raise TierClosed("the ram tier is closed", tier=self.name, key=key)

    def object_view(self, row: int) -> memoryview:
        """The bytes of a row's place, header and payload, writable."""
        index = self.tier.index
        offset = index.offset.item(row)
        size = self.tier.index.tables[index.table.item(row)].object_bytes
        return self.extents[index.extent.item(row)].memory[offset : offset + size]

    def _adopt(self, size_class: SizeClass, extent: Extent) -> None:
        if extent.position < 0:
            extent.position = self.board.take_position()
            extent.board_base = extent.position * self.board.slots_per_position
            if self.read_only:
                forbid_new_writable_mappings(extent.fd)
            else:
                forbid_new_seals(extent.fd)
        self.extents[extent.number] = extent
        extent.format(size_class.stride)
        size_class.extents.append(extent)
        size_class.open[extent.number] = extent

    def release_extent(self, size_class: SizeClass | None, extent: Extent, *, to_others: bool) -> None:
        """An empty extent leaves its class (None: the spare ones), for this domain's spare or, if others want it, the system.

        Never to another domain as it is: it holds this domain's bytes, and clients of this domain may keep it mapped.
        """
        if size_class is None:
            self.spare.remove(extent)
        else:
            size_class.extents.remove(extent)
            size_class.open.pop(extent.number, None)
        if not to_others:
            self.spare.append(extent)
            return
        del self.extents[extent.number]
        self.board.give_position(extent.position)
        extent.close()
        if extent.mapped_by:
            self.newly_retired.append(extent.number)
            self.tier.retired[extent.number] = extent
        else:
            self.tier.pool.forget()

    def close_memory(self) -> None:
        for extent in self.extents.values():
            extent.close()
        self.extents.clear()
        self.board.close()

    # --- writing ----------------------------------------------------------------------------------------------------

    @property
    def may_grow(self) -> bool:
        """Whether the quota, if there is one, leaves room for another extent."""
        return self.quota is None or self.quota.left > 0

    def ready_for(self, table: Table, count: int) -> bool:
        """Whether `make_room` would change nothing for an `allocate` of `count` objects."""
        size_class = self.tier.class_of_table[table.number]
        if size_class.free_slots >= count:
            return True
        pool = self.tier.pool
        grown = not self.spare and ((not pool.ready and pool.made >= pool.max_extents) or not self.may_grow)
        return grown and not self.tier.evacuator.wanted(size_class)

    async def make_room(self, table: Table, count: int) -> None:
        """Do beforehand, without blocking the loop, what `allocate` of `count` objects would need: grow or evacuate."""
        size_class = self.tier.class_of_table[table.number]
        slots, pool, evacuator = size_class.slots_per_extent, self.tier.pool, self.tier.evacuator
        while True:
            short = count - size_class.free_slots - len(self.spare) * slots
            if short <= 0:
                return
            if self.may_grow:
                await pool.grow(-(-short // slots))
                if len(pool.ready) * slots >= short:
                    return
            if not evacuator.wanted(size_class):
                return
            before = evacuator.done
            with contextlib.closing(evacuator.steps(size_class)) as steps:
                for _ in steps:
                    await asyncio.sleep(0)
            if evacuator.done == before:
                return

    def allocate(
        self,
        table: Table,
        keys: Sequence[bytes],
        parent: bytes,
        *,
        parts: int = 0,
        full_mask: int = _ALL_PARTS,
        blocking: bool = False,
    ) -> Allocation:
        """Give writable places to those of a run's objects that are neither here nor being written.

        Args:
            keys: block keys of a run, in prefix order. `parent`: key before the first; the namespace id for the root.
            parts: bit mask of the parts that the caller will write, 0 for all; `full_mask`: all of them.
            blocking: may make and evacuate extents on the spot, which takes milliseconds.
        """
        self._check_open()
        distinct = set(keys)
        if len(distinct) != len(keys) or parent in distinct:
            raise ValueError("a key stands twice in one run (or is its parent): give each object once")
        index = self.tier.index
        size_class = self.tier.class_of_table[table.number]
        wanted = parts or full_mask
        rows = table.find(keys)
        granted = np.full(len(keys), ABSENT, np.int64)
        statuses = np.full(len(keys), SlotStatus.PRESENT, np.uint8)
        new = np.flatnonzero(rows < 0)
        if table.hidden:
            new = np.array(
                [i for i in new.tolist() if not self._join(table, keys[i], i, rows, wanted, granted, statuses)],
                np.int64,
            )
        held = rows[rows >= 0]
        above = table.get(parent)
        if above != ABSENT:
            held = np.append(held, above)
        if len(held):
            index.refs[held] += 1  # the run that is extended must not be evicted to make room for its extension
        try:
            places = self._take_places(size_class, min(len(new), index.free_rows - 1), blocking=blocking)
            room = sum(len(slots) for _, slots in places)
            if room < len(new):
                statuses[new[room:]] = SlotStatus.REFUSED
                self.tier.counters.refused += len(new) - room
                new = new[:room]
            if room:
                ghosts = index.ghosts
                fresh = index.begin(table, [keys[i] for i in new.tolist()], index.take_rows(room))
                self._place(size_class, fresh, places)
                rows[new] = granted[new] = fresh
                statuses[new] = SlotStatus.WRITABLE
                above_new = np.where(new > 0, rows[new - 1], ABSENT)
                if new[0] == 0:
                    above_new[0] = index.parent_row(table, parent)
                adopted = fresh[index.children[fresh] != 0] if ghosts else fresh[:0]  # were ghosts
                index.link(fresh, above_new)
                index.cut_cycles(adopted)
                if wanted != full_mask:
                    self._parts.update((row, _Parts(owned=wanted)) for row in fresh.tolist())
                self.tier.allocated_bytes += size_class.stride * room
        finally:
            if len(held):
                index.refs[held] -= 1
                self._unpark(held)
        return Allocation(statuses.tobytes(), granted, table)

    def _join(
        self,
        table: Table,
        key: bytes,
        i: int,
        rows: RowArray,
        wanted: int,
        granted: RowArray,
        statuses: npt.NDArray[np.uint8],
    ) -> bool:
        """Whether somebody is writing this object already; if they leave parts to us, we write those in the same place."""
        row = table.hidden.get(key, ABSENT)
        if not self._is_writing(row):
            return False
        rows[i] = row
        shared = self._parts.get(row)
        if shared is not None and not wanted & ~shared.done:
            return True  # these parts are whole
        if shared is None or shared.owned & wanted:
            statuses[i] = SlotStatus.PENDING
        else:
            if not shared.writers:
                self.tier.class_of_table[table.number].policy.forget(row)
            shared.writers += 1
            shared.owned |= wanted
            granted[i] = row
            statuses[i] = SlotStatus.WRITABLE
        return True

    def _is_writing(self, row: int) -> bool:
        return row != ABSENT and self.tier.index.state.item(row) == State.WRITING

    def _place(self, size_class: SizeClass, rows: RowArray, places: Places) -> None:
        """Put rows into slots, [rows] in all, each under a new generation."""
        index = self.tier.index
        generation = self.tier.take_generations(len(rows))
        generations = np.arange(generation, generation + len(rows), dtype=np.uint64)
        index.generation[rows] = generations
        start = 0
        for extent, slots in places:
            part = slice(start, start + len(slots))
            start += len(slots)
            boards = extent.board_base + slots
            index.extent[rows[part]] = extent.number
            index.offset[rows[part]] = slots * size_class.stride
            index.board[rows[part]] = boards
            extent.hold(slots, rows[part])
            self.board.generations[boards] = generations[part]

    def commit(self, table: Table, rows: RowArray, *, parts: int = 0, full_mask: int = _ALL_PARTS) -> int:
        """Objects (or the caller's parts of them) are whole. Returns how many became visible. Raises: TierClosed."""
        self._check_open()
        index = self.tier.index
        size_class = self.tier.class_of_table[table.number]
        whole = rows
        if self._parts:
            whole = np.array(
                [row for row in rows.tolist() if self._part_done(row, parts or full_mask, full_mask)], np.int64
            )
        index.show(table, whole)
        size_class.policy.touch(whole)
        size = size_class.stride * len(whole)
        self.tier.allocated_bytes -= size
        self.tier.cached_bytes += size
        return len(whole)

    def _part_done(self, row: int, parts: int, full_mask: int) -> bool:
        shared = self._parts.get(row)
        if shared is None:
            return True
        if self.tier.index.state.item(row) == State.DETACHED:
            self.free_detached(row)
            return False
        shared.writers -= 1
        shared.done |= parts
        if shared.done != full_mask:
            self._leave_waiting(row, shared)
            return False
        del self._parts[row]
        return True

    def _leave_waiting(self, row: int, shared: _Parts) -> None:
        """Without a writer, an object that lacks parts grows old as a whole one does."""
        if not shared.writers:
            self.tier.class_of_table[self.tier.index.table.item(row)].policy.touch(np.array([row], np.int64))

    def abort(self, row: int, *, parts: int = 0, full_mask: int = _ALL_PARTS) -> None:
        """The caller writes nothing (more) of this object and has stopped touching it."""
        if self.tier.closed:
            return
        shared = self._parts.get(row)
        if shared is not None:
            if self.tier.index.state.item(row) == State.DETACHED:
                self.free_detached(row)
                return
            shared.writers -= 1
            shared.owned &= ~(parts or full_mask)
            if shared.owned:
                self._leave_waiting(row, shared)
                return
        self._free_writing(row)

    def _is_unfinished(self, row: int) -> bool:
        shared = self._parts.get(row)
        return shared is not None and not shared.writers and not self.tier.index.refs.item(row)

    def drop_unfinished(self, row: int) -> bool:
        """Forget an object that nobody writes, and whose other parts have not come. Returns whether it is one."""
        if not self._is_unfinished(row):
            return False
        self.tier.class_of_table[self.tier.index.table.item(row)].policy.forget(row)
        self._free_writing(row)
        return True

    def _free_writing(self, row: int) -> None:
        self._parts.pop(row, None)
        self.tier.allocated_bytes -= self.tier.class_of_table[self.tier.index.table.item(row)].stride
        self._free_place(row)

    def detach(self, row: int) -> None:
        """A writer vanished while it may still copy: nobody finds the object, nobody gets its place, until `free_detached`.

        Where others write other parts of it, each of them must end (`free_detached`, `commit` or `abort`) first.
        """
        if self.tier.closed or self.tier.index.state.item(row) == State.DETACHED:
            return  # another of its writers vanished before
        stride = self.tier.class_of_table[self.tier.index.table.item(row)].stride
        self.tier.index.detach(row)
        self.tier.allocated_bytes -= stride
        self.tier.quarantined_bytes += stride

    def free_detached(self, row: int) -> None:
        """One who could still touch the place has stopped; with the last of them it is free."""
        if self.tier.closed:
            return
        shared = self._parts.get(row)
        if shared is not None:
            shared.writers -= 1
            if shared.writers:
                return
            del self._parts[row]
        self.tier.quarantined_bytes -= self.tier.class_of_table[self.tier.index.table.item(row)].stride
        self._free_place(row)

    # --- reading ----------------------------------------------------------------------------------------------------

    def find_leading(self, table: Table, keys: Sequence[bytes]) -> RowArray:
        """Rows of the leading visible run."""
        return _until_absent(table.find(keys))[0]

    def find_some_leading(
        self, table: Table, keys: bytes, start: int = 0, effort: int = UNLIMITED
    ) -> tuple[RowArray, bool]:
        """The same for keys side by side from the `start`-th on, and no more than `effort` (see `Table.find_part`) allows.

        Returns: the rows, and whether the run ends there because a key is not here.
        """
        return _until_absent(table.find_part(keys, start, effort))

    def lease(self, rows: RowArray) -> None:
        """Keep rows from eviction and reuse until `unlease` with the same rows."""
        self.tier.index.refs[rows] += 1

    def touch(self, table: Table, rows: RowArray) -> None:
        """Rows of a run were used, in prefix order."""
        if self.tier.quarantined_bytes:  # some may have been deleted since the caller leased them
            rows = rows[self.tier.index.state[rows] == State.VISIBLE]
        self.tier.index.hits[rows] += 1
        self.tier.class_of_table[table.number].policy.touch(rows)

    def unlease(self, rows: RowArray) -> None:
        if self.tier.closed:
            return
        index = self.tier.index
        index.refs[rows] -= 1
        detached = rows[index.state[rows] == State.DETACHED]
        for row in np.unique(detached).tolist():  # deleted while leased
            if index.refs.item(row) == 0 and index.state.item(row) == State.DETACHED:
                self.free_detached(row)
        self._unpark(rows)

    def _unpark(self, rows: RowArray) -> None:
        index = self.tier.index
        parked = rows[index.parked[rows] != 0]
        for row in parked.tolist():
            if index.evictable(row) or self._is_unfinished(row):
                self.tier.class_of_table[index.table.item(row)].policy.unpark(row)

    def pin(self, rows: RowArray) -> None:
        fresh = rows[self.tier.index.pins[rows] == 0]
        self.tier.index.pins[rows] += 1
        self.tier.pinned_bytes += self.tier.bytes_of(fresh)

    def unpin(self, rows: RowArray) -> int:
        """Returns how many of the rows were pinned."""
        pinned = rows[self.tier.index.pins[rows] > 0]
        self.tier.index.pins[pinned] -= 1
        self.tier.pinned_bytes -= self.tier.bytes_of(pinned[self.tier.index.pins[pinned] == 0])
        self._unpark(pinned)
        return len(pinned)

    def remove(self, row: int, why: str) -> None:
        """Forget a visible object now (deleted, damaged). Its place is freed when the last lease on it ends."""
        index, tier = self.tier.index, self.tier
        table = index.tables[index.table.item(row)]
        tier.tell_gone(np.array([row], np.int64), why)
        size_class = tier.class_of_table[table.number]
        size_class.policy.forget(row)
        if index.pins.item(row):
            index.pins[row] = 0
            tier.pinned_bytes -= size_class.stride
        tier.cached_bytes -= size_class.stride
        if index.refs.item(row):
            index.detach(row)
            self.board.generations[index.board.item(row)] = (
                0  # a reader that checks learns of it, others keep their bytes
            )
            tier.quarantined_bytes += size_class.stride
        else:
            self._free_place(row)

    # --- eviction and evacuation ------------------------------------------------------------------------------------

    def _free_place(self, row: int) -> None:
        """Give one row's slot back. The row goes too, or stays as a ghost."""
        index = self.tier.index
        if index.state.item(row) != State.DETACHED:
            index.detach(row)
        self._free_slot(row)
        index.drop(row)

    def _free_slot(self, row: int) -> None:
        index = self.tier.index
        extent = self.extents[index.extent.item(row)]
        self.board.generations[index.board.item(row)] = 0
        extent.give_one(index.offset.item(row) // extent.stride)
        self.reopen(extent)

    def _free_slots(self, places: npt.NDArray[np.void]) -> None:
        """Give slots back, by their locations."""
        self.board.generations[places["board"]] = 0
        numbers = places["extent"]
        slots = places["offset"].astype(np.int64)
        distinct = dict.fromkeys(numbers.tolist())
        for number in distinct:
            extent = self.extents[number]
            extent.give((slots if len(distinct) == 1 else slots[numbers == number]) // extent.stride)
            self.reopen(extent)

    def reopen(self, extent: Extent) -> None:
        """Give out the extent's free slots (again)."""
        size_class = self.classes[extent.stride]
        if extent.free_count and not extent.draining:
            size_class.open.setdefault(extent.number, extent)

    def evict(self, size_class: SizeClass, count: int = 1) -> int:
        """Evict the policy's next victims. Returns how many: fewer if what is left is leased, pinned or above such."""
        policy = size_class.policy
        gone, fruitless, lump = 0, 0, count
        if count <= _FEW:  # one by one, as long as that goes well
            while gone < count and (row := policy.pop()) >= 0 and self._evict_one(size_class, row):
                gone += 1
        while gone < count and fruitless < _FRUITLESS_LOOKS:
            rows = policy.take(lump)
            if not len(rows):
                break
            need = count - gone
            if len(rows) == 1 and need > _FEW:
                # A run stored in pieces: its head is older than its tail and waited, parked, for the tail to go.
                rows = self.tier.index.line_above(rows.item(0), need)
            if _FEW < len(rows) <= need and self._evict_family(size_class, rows):
                gone += len(rows)
                continue
            before = gone
            if len(rows) > _FEW:
                rows = self._park_busy(size_class, rows)
            gone += sum([self._evict_one(size_class, row) for row in rows[:need].tolist()])
            for row in rows[need:].tolist():
                policy.park(row)
                policy.unpark(row)  # not needed: back in its rank
            fruitless += gone == before
            lump = _LUMP if gone == before else count - gone  # a long run of heads, say: look at more at once
        return gone

    def _park_busy(self, size_class: SizeClass, rows: RowArray) -> RowArray:
        """Park those rows that are held or have children, at once. Returns the others."""
        index = self.tier.index
        busy = (index.refs[rows] | index.pins[rows] | index.children[rows]) != 0
        busy &= index.state[rows] == State.VISIBLE
        size_class.policy.park_all(rows[busy])
        free: RowArray = rows[~busy]
        return free

    def _evict_one(self, size_class: SizeClass, row: int) -> bool:
        """Evict a row if it may go, else park it."""
        index, policy, tier = self.tier.index, size_class.policy, self.tier
        if not index.evictable(row):
            if self.drop_unfinished(row):
                return True
            policy.park(row)
            return False
        policy.forget(row)
        index.unlink(row)
        tier.counters.evicted += 1
        tier.counters.evicted_dirty += index.clean.item(row) == 0
        tier.counters.evicted_unused += index.hits.item(row) == 0
        tier.cached_bytes -= size_class.stride
        tier.tell_one_gone(row, "evicted")
        self._free_slot(row)
        index.erase_one(row)
        return True

    def _evict_family(self, size_class: SizeClass, rows: RowArray) -> bool:
        """Evict rows at once if all may go together: the usual case, since a run's blocks lie in the order tail to head."""
        tier = self.tier
        lines = tier.index.erase_family(rows)
        if lines is None:
            return False
        size_class.policy.forget_all(rows)
        tier.counters.evicted += len(rows)
        tier.counters.evicted_dirty += len(rows) - int(np.count_nonzero(lines["clean"]))
        tier.counters.evicted_unused += len(rows) - int(np.count_nonzero(lines["hits"]))
        tier.cached_bytes -= size_class.stride * len(rows)
        tier.tell_gone(rows, "evicted")
        self._free_slots(lines["location"])
        return True

    def _take_places(self, size_class: SizeClass, count: int, *, blocking: bool) -> Places:
        """Up to `count` slots: free ones, then those of new extents, then by eviction."""
        places: Places = []
        while count > 0:
            if size_class.open:
                extent, slots = self._take_slots(size_class, count)
                places.append((extent, slots))
                count -= len(slots)
                continue
            more = None
            if self.spare:
                more = self.spare.pop()
            elif self.may_grow:
                more = self.tier.pool.take(grow=blocking)
            if more is not None:
                self._adopt(size_class, more)
                continue
            evicted = self.evict(size_class, count)
            size_class.evictions_until_check -= evicted
            if not evicted:
                size_class.evictions_until_check = 0
                if not (blocking and self._evacuate_now(size_class)):
                    break
        return places

    def _take_slots(self, size_class: SizeClass, count: int) -> tuple[Extent, npt.NDArray[np.int64]]:
        """At least one and at most `count` slots of a class that has an open extent."""
        extent = next(reversed(size_class.open.values()))
        slots = extent.take(count)
        if not extent.free_count:
            del size_class.open[extent.number]
        return extent, slots

    def _evacuate_now(self, size_class: SizeClass) -> bool:
        evacuator = self.tier.evacuator
        before = evacuator.done
        if evacuator.wanted(size_class):
            for _ in evacuator.steps(size_class):
                pass
        return evacuator.done > before

    def move(self, size_class: SizeClass, row: int) -> None:
        """Copy a visible, unheld object to an open extent's slot and free its own."""
        index = self.tier.index
        extent, offset = self.extents[index.extent.item(row)], index.offset.item(row)
        target, slots = self._take_slots(size_class, 1)
        size = index.tables[index.table.item(row)].object_bytes
        ctypes.memmove(target.address + slots.item(0) * target.stride, extent.address + offset, size)
        self.board.generations[index.board.item(row)] = 0
        self._place(size_class, np.array([row], np.int64), [(target, slots)])
        extent.give(np.array([offset // extent.stride], np.int64))
        self.tier.counters.moved += 1

    # --- Tier, SupportsPresence, SupportsListing, SupportsSlots -----------------------------------------------------

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        """Exact, where `Table.leading_run` may count past a hole: the store must not take a hole for a hit."""
        table = self.tables.get((namespace, group))
        return 0 if table is None else len(self.find_leading(table, blocks[: table.leading_run(blocks)]))

    def keys(self) -> Iterator[ObjectKey]:
        for (namespace, group), table in list(self.tables.items()):
            for key in table:
                yield ObjectKey(namespace, key, group)

    def _row(self, key: ObjectKey) -> int:
        self._check_open(key)
        table = self.tables.get((key.namespace, key.group))
        return table.get(key.block) if table is not None else ABSENT

    def reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        table = self.table(key.namespace, key.group, size_bytes)
        got = self.allocate(table, [key.block], parent if parent is not None else key.namespace, blocking=True)
        status = got.statuses[0]
        if status == SlotStatus.REFUSED:
            raise TierFull("everything here is leased", tier=self.name, key=key, need_bytes=size_bytes, free_bytes=0)
        return _RamReservation(self, got) if status == SlotStatus.WRITABLE else None

    def borrow(self, key: ObjectKey) -> Borrow | None:
        row = self._row(key)
        if row == ABSENT:
            return None
        rows = np.array([row], np.int64)
        self.lease(rows)
        return _RamBorrow(self, rows)

    def mark_clean(self, key: ObjectKey) -> None:
        row = self._row(key)
        if row != ABSENT:
            self.tier.index.clean[row] = 1

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        size = len(data) if isinstance(data, (bytes, bytearray)) else data.nbytes
        await self.make_room(self.table(key.namespace, key.group, size), 1)
        reservation = self.reserve(key, size)
        if reservation is None:
            row = self._row(key)
            if row == ABSENT:
                raise TierTimeout("another writer has not finished this object", tier=self.name, key=key)
            self.touch(self.tables[(key.namespace, key.group)], np.array([row], np.int64))
            return
        try:
            reservation.view[:] = memoryview(data).cast("B")
            reservation.commit()
        finally:
            reservation.abort()

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        borrow = self.borrow(key)
        if borrow is None:
            return None
        try:
            size = len(borrow.view)
            target = memoryview(out).cast("B")
            if len(target) < size:
                raise ValueError(f"buffer of {len(target)} bytes is shorter than the object of {size}")
            target[:size] = borrow.view
            return size
        finally:
            borrow.release()

    async def delete(self, key: ObjectKey) -> bool:
        row = self._row(key)
        if row == ABSENT:
            return False
        self.tier.counters.deleted += 1
        self.remove(row, "deleted")
        return True

    async def aclose(self) -> None:
        await self.tier.aclose()

    def drop_corrupt(self, key: ObjectKey) -> BlockCorrupt:
        """Forget an object whose bytes failed a check; returns the error to raise or count."""
        row = self._row(key)
        if row != ABSENT:
            self.tier.counters.corrupt += 1
            self.remove(row, "corrupt")
        return BlockCorrupt("the object's bytes failed their check and were dropped", tier=self.name, key=key)


class _RamReservation:
    def __init__(self, domain: RamDomain, allocation: Allocation) -> None:
        self._domain = domain
        self._allocation: Allocation | None = allocation
        self.view = domain.object_view(int(allocation.rows[0]))

    def commit(self) -> None:
        if self._allocation is None:
            raise InvariantViolation("a reservation was committed after it had ended")
        self._domain.commit(self._allocation.table, self._allocation.rows)
        self._allocation = None
        self.view.release()

    def abort(self) -> None:
        if self._allocation is not None:
            self._domain.abort(int(self._allocation.rows[0]))
            self._allocation = None
            self.view.release()


@dataclass
class _RamBorrow:
    _domain: RamDomain
    _rows: RowArray
    view: memoryview = field(init=False)
    _released: bool = False

    def __post_init__(self) -> None:
        self.view = self._domain.object_view(int(self._rows[0]))

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.view.release()
            self._domain.unlease(self._rows)
