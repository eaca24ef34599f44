"""The ram tier's random life against an oracle that may forget but never lie.

Two trust domains, three object sizes, runs that share prefixes; leases, pins, writers that finish, give up or vanish, objects
written in two parts by two writers, deletes, mappings, evacuations left between any two steps, a machine short of memory. After
every step: the accounts, recomputed from the slots, hold; what is found under a key is what was last committed there; leased
bytes don't change; references are those of the leases. In the end everything is given back. The machine must fail on variants
of the tier that break one of these promises.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.kvstore.errors import BlockCorrupt, InvariantViolation, TierFull, TierTimeout
from forebay.kvstore.index import ABSENT, Index, RowArray, State, Table
from forebay.kvstore.tier import ObjectKey
from forebay.kvstore.wire import SlotStatus
from forebay.tiers import ram
from forebay.tiers.ram import RamDomain, RamTier, SizeClass

T = TypeVar("T")

EXTENT = 8 << 10
EXTENTS = 5
SIZES = (1000, 3000, 6000)  # 8, 2 and 1 slots an extent
NODES = 31  # blocks form a binary tree: the run of node n ends in n, and n's parent is n // 2

nodes = st.integers(1, NODES)


def block(node: int) -> bytes:
    return bytes([node * 7 % 256]) + node.to_bytes(15, "little")


def run_of(node: int) -> list[bytes]:
    """The keys from the root to a node."""
    return [block(node >> shift) for shift in range(node.bit_length() - 1, -1, -1)]


def content(serial: int, size: int) -> bytes:
    return (serial.to_bytes(8, "little") * (size // 8 + 1))[:size]


@dataclass
class Writing:
    """Rows that a writer was given. `parts`: its bit mask, 0 for whole objects."""

    domain: RamDomain
    table: Table
    keys: list[bytes]
    rows: list[int]
    parts: int
    vanished: bool = False

    @property
    def how(self) -> dict[str, int]:
        return {"parts": self.parts, "full_mask": 3}


@dataclass
class Reading:
    domain: RamDomain
    table: Table
    keys: list[bytes]
    rows: RowArray
    views: list[memoryview]
    expected: list[bytes]


@dataclass
class Glance:
    """A reader without a lease: its bytes are good while the board shows the generation it was told."""

    domain: RamDomain
    board: int
    generation: int
    view: memoryview
    expected: bytes


class RamMachine(RuleBasedStateMachine):
    tier_type: ClassVar[type[RamTier]] = RamTier

    @initialize(read_only=st.booleans())
    def begin(self, read_only: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.scarce = False
        self.tier = self.tier_type(
            capacity_bytes=EXTENTS * EXTENT,
            extent_bytes=EXTENT,
            available=lambda: 0 if self.scarce else 1 << 40,
            on_gone=self._gone,
        )
        domains = [self.tier.domain("a"), self.tier.domain("b", read_only=read_only)]
        self.places = [
            (domain, domain.table(bytes([number]) * 16, group, size))
            for number, domain in enumerate(domains)
            for group, size in enumerate(SIZES)
        ]
        self.holds: dict[tuple[int, bytes], bytes] = {}  # by table number and key: committed, and seen ever since
        self.parents: dict[tuple[int, bytes], bytes] = {}
        self.rewritten: set[tuple[int, bytes]] = set()  # keys allocated while an older object of theirs was detached
        self.writing: list[Writing] = []
        self.reading: list[Reading] = []
        self.glances: deque[Glance] = deque(maxlen=60)
        self.pins: Counter[tuple[int, bytes]] = Counter()
        self.half_done: list[Generator[None, None, None]] = []
        self.serial = 0

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    def _gone(self, table: Table, keys: list[bytes], why: str) -> None:
        for key in keys:
            assert (table.number, key) in self.holds, "what was never committed has gone"
            if why != "evicted":
                continue
            assert not self.pins[table.number, key], "a pinned object was evicted"
            if (table.number, key) not in self.rewritten:
                for child, parent in self.parents.items():
                    assert parent != key or child[0] != table.number or child[1] in keys or not self._sees(child), (
                        "a parent was evicted before its child"
                    )

    def _sees(self, place: tuple[int, bytes]) -> bool:
        return self.tier.index.tables[place[0]].get(place[1]) != ABSENT

    # --- writing ----------------------------------------------------------------------------------------------------

    def _allocate(self, where: int, keys: list[bytes], parent: bytes, parts: int) -> Writing:
        domain, table = self.places[where]
        index = self.tier.index
        for row in np.flatnonzero(index.state[: index.high_water] == State.DETACHED).tolist():
            if index.table.item(row) == table.number and index.key_of(row) in keys:
                self.rewritten.add((table.number, index.key_of(row)))
        got = domain.allocate(table, keys, parent, parts=parts, full_mask=3)
        given = [(i, key, row) for i, (key, row) in enumerate(zip(keys, got.rows.tolist(), strict=True)) if row >= 0]
        for i, key, row in given:
            assert got.statuses[i] == SlotStatus.WRITABLE
            assert table.get(key) == ABSENT, "a visible object was given out to be written"
            if row not in domain._parts or domain._parts[row].writers == 1:
                self.parents[table.number, key] = keys[i - 1] if i else parent
        for _, key, _ in given:
            if self._descends_from_itself(table.number, key):
                self.parents[table.number, key] = table.namespace  # strange parents close a ring, which the tier cuts
        for key, status in zip(keys, got.statuses, strict=True):
            if status == SlotStatus.PRESENT and not parts:
                assert table.get(key) != ABSENT, "an object was called present and is not"
        writing = Writing(domain, table, [key for _, key, _ in given], [row for _, _, row in given], parts)
        if given:
            self.writing.append(writing)
        return writing

    def _descends_from_itself(self, number: int, key: bytes) -> bool:
        above = key
        for _ in range(2 * NODES):
            above = self.parents.get((number, above), b"")
            if above == key:
                return True
        return False

    def _write(self, writing: Writing) -> list[bytes]:
        """Fill the places. Both writers of an object write the same bytes, each its half."""
        written = []
        size = writing.table.object_bytes
        for key, row in zip(writing.keys, writing.rows, strict=True):
            self.serial += 1
            data = content(hash((writing.table.number, key)) % 2**32 if writing.parts else self.serial, size)
            begin, end = {0: (0, size), 1: (0, size // 2), 2: (size // 2, size), 3: (0, size)}[writing.parts]
            writing.domain.object_view(row)[begin:end] = data[begin:end]
            written.append(data)
        return written

    def _finish(self, writing: Writing, how: str) -> None:
        domain, table = writing.domain, writing.table
        if how == "commit":
            written = self._write(writing)
            shown = domain.commit(table, np.array(writing.rows, np.int64), **writing.how)
            assert shown == len(writing.rows) or writing.parts
            for key, data, row in zip(writing.keys, written, writing.rows, strict=True):
                if table.get(key) == row:
                    self.holds[table.number, key] = data
                    self._glance(domain, row, data)
                else:
                    assert writing.parts, "a whole object was committed and not found"
        elif how == "abort":
            for row in writing.rows:
                domain.abort(row, **writing.how)
        else:
            for row in writing.rows:
                domain.detach(row)
            writing.vanished = True
            return
        self.writing.remove(writing)

    @rule(
        where=st.integers(0, 5),
        node=nodes,
        skip=st.integers(0, 2),
        parts=st.sampled_from([0, 0, 0, 1, 2, 3]),
        how=st.sampled_from(["commit", "commit", "abort", "vanish", "later"]),
        prepared=st.booleans(),
    )
    def store(self, where: int, node: int, skip: int, parts: int, how: str, prepared: bool) -> None:
        domain, table = self.places[where]
        keys = run_of(node)
        skip = min(skip, len(keys) - 1)
        parent = keys[skip - 1] if skip else table.namespace
        if prepared and not domain.ready_for(table, len(keys) - skip):
            self.run(domain.make_room(table, len(keys) - skip))
        writing = self._allocate(where, keys[skip:], parent, parts)
        if how != "later" and writing.rows:
            self._finish(writing, how)

    @rule(where=st.integers(0, 5), step=st.integers(1, 4))
    def store_many(self, where: int, step: int) -> None:
        for node in range(NODES, NODES // 2, -step):
            self.store(where=where, node=node, skip=0, parts=0, how="commit", prepared=True)

    @rule(where=st.integers(0, 5), node=nodes, above=nodes)
    def store_under_a_strange_parent(self, where: int, node: int, above: int) -> None:
        if node != above:
            writing = self._allocate(where, [block(node)], block(above), 0)
            if writing.rows:
                self._finish(writing, "commit")

    @rule(where=st.integers(0, 5), node=nodes)
    def a_run_with_a_repeated_key_is_refused(self, where: int, node: int) -> None:
        domain, table = self.places[where]
        for keys, parent in (([block(node)] * 2, table.namespace), (run_of(node), block(node))):
            with pytest.raises(ValueError, match="twice"):
                domain.allocate(table, keys, parent)

    @precondition(lambda self: any(not each.vanished for each in self.writing))
    @rule(data=st.data(), how=st.sampled_from(["commit", "commit", "abort", "vanish"]))
    def finish(self, data: Any, how: str) -> None:
        self._finish(data.draw(st.sampled_from([each for each in self.writing if not each.vanished])), how)

    @precondition(lambda self: any(each.vanished for each in self.writing))
    @rule(data=st.data())
    def a_vanished_writer_is_known_to_have_stopped(self, data: Any) -> None:
        writing = data.draw(st.sampled_from([each for each in self.writing if each.vanished]))
        self._write(writing)  # its copies went on until now, and hit nobody
        for row in writing.rows:
            writing.domain.free_detached(row)
        self.writing.remove(writing)

    # --- reading and keeping ------------------------------------------------------------------------------------------

    @rule(where=st.integers(0, 5), node=nodes)
    def lease(self, where: int, node: int) -> None:
        domain, table = self.places[where]
        rows = domain.find_leading(table, run_of(node))
        if len(rows):
            domain.lease(rows)
            domain.touch(table, rows)
            views = [domain.object_view(row) for row in rows.tolist()]
            keys = run_of(node)[: len(rows)]
            self.reading.append(
                Reading(domain, table, keys, rows, views, [self.holds[table.number, key] for key in keys])
            )

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        lease = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        lease.domain.unlease(lease.rows)

    @rule(where=st.integers(0, 5), node=nodes)
    def read_without_a_lease(self, where: int, node: int) -> None:
        domain, table = self.places[where]
        row = table.get(block(node))
        if row != ABSENT:
            self._glance(domain, row, self.holds[table.number, block(node)])

    def _glance(self, domain: RamDomain, row: int, expected: bytes) -> None:
        index = self.tier.index
        told = index.board.item(row), index.generation.item(row)
        self.glances.append(Glance(domain, *told, domain.object_view(row), expected))

    @rule(where=st.integers(0, 5), node=nodes)
    def pin(self, where: int, node: int) -> None:
        domain, table = self.places[where]
        row = table.get(block(node))
        if row != ABSENT and sum(self.pins.values()) < 4:
            domain.pin(np.array([row], np.int64))
            self.pins[table.number, block(node)] += 1

    @precondition(lambda self: self.pins.total())
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        place = data.draw(st.sampled_from(sorted(self.pins.elements())))
        domain, table = self.places[place[0]]
        assert domain.unpin(np.array([table.get(place[1])], np.int64)) == 1, "a pinned object was gone"
        self.pins[place] -= 1

    @rule(where=st.integers(0, 5), node=nodes, corrupt=st.booleans())
    def delete(self, where: int, node: int, corrupt: bool) -> None:
        domain, table = self.places[where]
        key = ObjectKey(table.namespace, block(node), table.group)
        here = table.get(block(node)) != ABSENT
        if corrupt:
            assert isinstance(domain.drop_corrupt(key), BlockCorrupt)
        else:
            assert self.run(domain.delete(key)) == here
        assert table.get(block(node)) == ABSENT
        self.holds.pop((table.number, block(node)), None)
        self.pins.pop((table.number, block(node)), None)

    @rule(where=st.integers(0, 5), node=nodes)
    def put_and_get_as_a_tier(self, where: int, node: int) -> None:
        domain, table = self.places[where]
        key = ObjectKey(table.namespace, block(node), table.group)
        self.serial += 1
        data = content(self.serial, table.object_bytes)
        here = table.get(block(node))
        try:
            self.run(domain.put(key, data, timeout_s=1.0))
        except TierFull:
            assert here == ABSENT and (self._something_is_held() or self.scarce), "full of nothing"
            return
        except TierTimeout:
            assert table.get(block(node)) == ABSENT and block(node) in table.hidden
            return
        if here == ABSENT:
            self.holds[table.number, block(node)] = data
            self.parents[table.number, block(node)] = table.namespace
            if any(self.tier.index.key_of(row) == block(node) for row in self._detached(table)):
                self.rewritten.add((table.number, block(node)))
        out = bytearray(table.object_bytes)
        assert self.run(domain.get_into(key, out, timeout_s=1.0)) == len(out)
        assert out == self.holds[table.number, block(node)]

    # --- memory -----------------------------------------------------------------------------------------------------

    @rule(where=st.integers(0, 5), count=st.integers(1, 20))
    def make_room(self, where: int, count: int) -> None:
        domain, table = self.places[where]
        self.run(domain.make_room(table, count))

    @rule(where=st.integers(0, 5), count=st.integers(1, 8))
    def evict(self, where: int, count: int) -> None:
        domain, table = self.places[where]
        domain.evict(self.tier.class_of_table[table.number], count)

    @precondition(lambda self: len(self.half_done) < 3)
    @rule(where=st.integers(0, 5))
    def begin_an_evacuation(self, where: int) -> None:
        self.half_done.append(self.tier.evacuator.steps(self.tier.class_of_table[where]))

    @precondition(lambda self: self.half_done)
    @rule(data=st.data(), steps=st.integers(1, 20), left=st.booleans())
    def go_on_evacuating(self, data: Any, steps: int, left: bool) -> None:
        work = data.draw(st.sampled_from(self.half_done))
        ended = left
        for _ in range(steps):
            if next(work, "ended") == "ended":
                ended = True
                break
        if ended:
            work.close()
            self.half_done.remove(work)

    @rule(where=st.integers(0, 5))
    def a_client_maps_all_extents(self, where: int) -> None:
        for extent in self.places[where][0].extents.values():
            extent.mapped_by.add("client")

    @rule()
    def all_clients_unmap_what_was_retired(self) -> None:
        for number in list(self.tier.retired):
            self.tier.unmapped(number, "client")

    @rule(scarce=st.booleans())
    def the_machine_is_short_of_memory(self, scarce: bool) -> None:
        self.scarce = scarce

    def _something_is_held(self) -> bool:
        """Whether memory is kept for a reason that a caller must wait for."""
        return bool(self.reading or self.writing or self.pins.total() or self.tier.retired or self.half_done)

    @precondition(lambda self: not self._something_is_held() and not self.scarce)
    @rule(where=st.integers(0, 5))
    def with_nothing_held_there_is_room(self, where: int) -> None:
        domain, table = self.places[where]
        if not domain.ready_for(table, 1):
            self.run(domain.make_room(table, 1))
        self.serial += 1
        key = self.serial.to_bytes(16, "big")
        got = domain.allocate(table, [key], table.namespace)
        if got.statuses == bytes([SlotStatus.WRITABLE]):
            domain.abort(got.rows.item(0))
        else:
            assert self.tier.retired, "memory that nobody holds was refused"

    # --- laws -------------------------------------------------------------------------------------------------------

    def _detached(self, table: Table) -> list[int]:
        index = self.tier.index
        rows = np.flatnonzero(index.state[: index.high_water] == State.DETACHED).tolist()
        return [row for row in rows if index.table.item(row) == table.number]

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.tier.audit()
        account = self.tier.accounting()
        parts = (account.free, account.cached, account.allocated, account.quarantined, account.retired)
        assert sum(parts) == account.total <= self.tier.capacity_bytes and min(parts) >= 0
        self._check_contents()
        self._check_leases()

    def _check_contents(self) -> None:
        index = self.tier.index
        seen = set()
        for domain, table in self.places:
            for key in table:
                row = table.get(key)
                seen.add((table.number, key))
                assert (table.number, key) in self.holds, "an object came from nowhere, or back from the dead"
                assert domain.object_view(row) == self.holds[table.number, key], "wrong bytes"
                generation = index.generation.item(row)
                assert domain.board.generations[index.board.item(row)] == generation, "a good place looks stale"
        for place in self.holds.keys() - seen:
            assert not self.pins[place], "a pinned object has gone"
            del self.holds[place]  # forgotten, and so for good

    def _check_leases(self) -> None:
        index = self.tier.index
        refs: Counter[int] = Counter()
        for lease in self.reading:
            refs.update(lease.rows.tolist())
            for view, expected, row, key in zip(
                lease.views, lease.expected, lease.rows.tolist(), lease.keys, strict=True
            ):
                assert view == expected, "leased bytes changed"
                assert lease.domain.object_view(row) == expected, "a leased object was moved"
                deleted = index.state.item(row) == State.DETACHED
                assert deleted or lease.table.get(key) == row, "a leased object was evicted"
                shown = lease.domain.board.generations[index.board.item(row)]
                assert shown == (0 if deleted else index.generation.item(row)), "the board says otherwise"
        for glance in self.glances:
            if glance.domain.board.generations[glance.board] == glance.generation:
                assert glance.view == glance.expected, "bytes changed under an unchanged generation"
        held = np.flatnonzero(index.refs[: index.high_water]).tolist()
        assert {row: index.refs.item(row) for row in held} == dict(refs), "references are not those of the leases"

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        try:
            self._give_everything_back()
        finally:
            self.run(self.tier.aclose())
            self.loop.close()

    def _give_everything_back(self) -> None:
        for work in self.half_done:
            work.close()
        for lease in self.reading:
            lease.domain.unlease(lease.rows)
        for writing in self.writing:
            for row in writing.rows:
                if writing.vanished:
                    writing.domain.free_detached(row)
                else:
                    writing.domain.abort(row, **writing.how)
        index = self.tier.index
        assert not index.refs.any(), "references are left"
        assert not self.tier.quarantined_bytes, "quarantined memory is left"
        for domain, table in self.places:
            for key in list(table):
                domain.remove(table.get(key), "deleted")
            domain.evict(self.tier.class_of_table[table.number], 1000)  # objects whose other parts never came
        self.tier.audit()
        assert not self.tier.cached_bytes and not self.tier.allocated_bytes, "memory is left"
        assert index.free_rows == index.max_rows and not index.ghosts, "rows are left"


def short(examples: int, steps: int = 40) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        print_blob=True,
    )


def test_the_ram_tier_may_forget_but_never_lies() -> None:
    run_state_machine_as_test(RamMachine, settings=short(100))


@pytest.mark.slow
def test_the_ram_tier_may_forget_but_never_lies_for_long() -> None:
    run_state_machine_as_test(RamMachine, settings=short(250, 60))


# --- the machine has teeth -------------------------------------------------------------------------------------------


def _evicts_leased(self: Index, row: int) -> bool:
    return bool(self.children.item(row) == 0 and self.state.item(row) == State.VISIBLE)


def _evicts_parents(self: Index, row: int) -> bool:
    return bool((self.refs.item(row) | self.pins.item(row)) == 0 and self.state.item(row) == State.VISIBLE)


_unlease = RamDomain.unlease
_place = RamDomain._place


def _frees_vanished(self: RamDomain, row: int) -> None:
    """Gives the place of a vanished writer to the next one."""
    if self.tier.index.state.item(row) == State.WRITING:
        self._free_writing(row)


def _loses_unlease(self: RamDomain, rows: RowArray) -> None:
    """Gives back all references but the last."""
    _unlease(self, rows[:-1])


def _reuses_generations(self: RamDomain, size_class: SizeClass, rows: RowArray, places: Any) -> None:
    """Gives every object the same generation."""
    _place(self, size_class, rows, places)
    self.tier.index.generation[rows] = 7
    self.board.generations[self.tier.index.board[rows]] = 7


def _moves_nothing(address: int, source: int, size: int) -> None:
    """A copy that does not happen."""


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Index, "evictable", _evicts_leased),
        (Index, "evictable", _evicts_parents),
        (RamDomain, "detach", _frees_vanished),
        (RamDomain, "unlease", _loses_unlease),
        (RamDomain, "_place", _reuses_generations),
        (ram.ctypes, "memmove", _moves_nothing),
    ],
    ids=["leased-evicted", "parents-first", "no-quarantine", "reference-leak", "same-generation", "lost-copy"],
)
def test_the_machine_fails_on_a_tier_that_breaks_a_promise(
    owner: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    # Finding it is enough; making it small takes long and helps nobody here.
    found = settings(short(400), phases=(Phase.generate,), print_blob=False, database=None)
    with pytest.raises((AssertionError, InvariantViolation, IndexError, KeyError)):
        run_state_machine_as_test(RamMachine, settings=found)
