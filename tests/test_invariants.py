"""The invariants of docs/architecture.md that the ram tier keeps, each once, on real shared memory.

A failure of a random life prints its seed.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from forebay.kvstore.index import ABSENT, State, Table
from forebay.kvstore.wire import SlotStatus
from forebay.tiers.ram import RamDomain, RamTier

EXTENT = 1 << 20
SIZE = 60_000  # 17 slots an extent
NAMESPACE = b"n" * 16


def key(run: int, block: int) -> bytes:
    # Spread over the shards as a hash would be.
    return bytes([(37 * run + 101 * block) % 256]) + run.to_bytes(7, "little") + block.to_bytes(8, "little")


def chain(run: int, blocks: int, start: int = 0) -> list[bytes]:
    return [key(run, block) for block in range(start, start + blocks)]


@pytest.fixture
async def tier() -> AsyncIterator[RamTier]:
    tier = RamTier(capacity_bytes=4 * EXTENT, extent_bytes=EXTENT)
    yield tier
    await tier.aclose()


def store(domain: RamDomain, table: Table, keys: list[bytes], fill: int | None = None) -> int:
    """Store a chain from its root on. Returns how many objects became visible."""
    got = domain.allocate(table, keys, NAMESPACE, blocking=True)
    rows = got.rows[got.rows >= 0]
    if fill is not None:
        for row in rows.tolist():
            view = domain.object_view(row)
            view[:] = bytes([fill]) * len(view)
    return domain.commit(table, rows)


def content(domain: RamDomain, table: Table, block: bytes) -> bytes:
    return bytes(domain.object_view(table.get(block)))


async def test_1_a_visible_object_never_changes_when_it_is_stored_again_or_moved(tier: RamTier) -> None:
    domain = tier.domain("a")
    table = domain.table(NAMESPACE, 0, SIZE)
    small = domain.table(NAMESPACE, 1, 600)
    keys = chain(1, 40)
    for i, block in enumerate(keys):
        got = domain.allocate(table, [block], keys[i - 1] if i else NAMESPACE, blocking=True)
        domain.object_view(int(got.rows[0]))[:] = bytes([i]) * SIZE
        domain.commit(table, got.rows)
    again = domain.allocate(table, keys, NAMESPACE, blocking=True)
    assert again.statuses == bytes([SlotStatus.PRESENT]) * 40 and (again.rows == ABSENT).all()

    before = {block: _place(tier, table, block) for block in keys}
    moved: list[bytes] = []
    for run in range(2, 60):  # another size class grows until it takes an extent over
        await domain.make_room(small, 200)
        store(domain, small, chain(run, 200))
        moved = [block for block in keys if table.get(block) != ABSENT and _place(tier, table, block) != before[block]]
        if moved:
            break
    assert moved and tier.counters.moved > 0
    for i, block in enumerate(keys):
        if table.get(block) != ABSENT:
            assert content(domain, table, block) == bytes([i]) * SIZE
    for block in moved:  # whoever was told the old place finds out
        old = np.frombuffer(before[block], np.uint64)
        assert domain.board.generations[np.frombuffer(before[block], np.uint32)[1]] != old[2]
    tier.audit()


def _place(tier: RamTier, table: Table, block: bytes) -> bytes:
    return tier.index.locations_of(np.array([table.get(block)]))


async def test_2_nothing_is_visible_before_all_its_parts_are_committed(tier: RamTier) -> None:
    domain = tier.domain("a")
    table = domain.table(NAMESPACE, 0, SIZE)
    keys = chain(1, 3)
    first = domain.allocate(table, keys, NAMESPACE, parts=0b01, full_mask=0b11, blocking=True)
    second = domain.allocate(table, keys, NAMESPACE, parts=0b10, full_mask=0b11, blocking=True)
    assert (first.rows == second.rows).all()  # two ranks, one place
    assert table.leading_run(keys) == 0 and (table.find(keys) == ABSENT).all()
    assert domain.commit(table, first.rows, parts=0b01, full_mask=0b11) == 0
    assert table.leading_run(keys) == 0
    assert domain.commit(table, second.rows, parts=0b10, full_mask=0b11) == 3
    assert table.leading_run(keys) == 3

    abandoned = domain.allocate(table, chain(2, 3), NAMESPACE, blocking=True)
    for row in abandoned.rows.tolist():
        domain.detach(row)  # its writer vanished
    assert table.leading_run(chain(2, 3)) == 0
    tier.audit()


async def test_3_a_hole_ends_the_run(tier: RamTier) -> None:
    domain = tier.domain("a")
    table = domain.table(NAMESPACE, 0, SIZE)
    keys = chain(1, 9)
    store(domain, table, keys)
    domain.remove(table.get(keys[4]), "deleted")
    assert len(domain.find_leading(table, keys)) == 4
    tier.audit()


@pytest.mark.parametrize("seed", range(3))
async def test_3_what_eviction_leaves_is_closed_under_prefixes(tier: RamTier, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    domain = tier.domain("a")
    table = domain.table(NAMESPACE, 0, SIZE)
    for _ in range(120):
        run = chance.randrange(12)
        keys = chain(run, chance.randrange(1, 16))
        store(domain, table, keys)
        other = chain(chance.randrange(12), chance.randrange(1, 16))
        domain.touch(table, domain.find_leading(table, other))
        for each in range(12):
            present = table.find(chain(each, 16)) >= 0
            assert not (present[1:] & ~present[:-1]).any(), f"seed {seed}: run {each} has a child without its parent"
    assert tier.counters.evicted > 0
    tier.audit()


@pytest.mark.parametrize("keep", ["lease", "pin"])
async def test_4_leased_and_pinned_objects_are_not_evicted(tier: RamTier, keep: str) -> None:
    domain = tier.domain("a")
    table = domain.table(NAMESPACE, 0, SIZE)
    kept = chain(1, 20)
    store(domain, table, kept, fill=7)
    rows = table.find(kept)
    domain.lease(rows) if keep == "lease" else domain.pin(rows)
    for run in range(2, 30):
        store(domain, table, chain(run, 10), fill=9)
    assert (table.find(kept) == rows).all()
    assert all(content(domain, table, block) == bytes([7]) * SIZE for block in kept)
    domain.unlease(rows) if keep == "lease" else domain.unpin(rows)
    for run in range(30, 60):
        store(domain, table, chain(run, 10))
    assert (table.find(kept) == ABSENT).all()
    assert not tier.index.refs.any() and not tier.index.pins.any()
    tier.audit()


@pytest.mark.parametrize("seed", range(4))
async def test_5_the_accounts_balance_through_a_random_life(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    tier = RamTier(capacity_bytes=4 * EXTENT, extent_bytes=EXTENT)
    places = [
        (tier.domain(name), name, group, size) for name in "ab" for group, size in enumerate((SIZE, 5000, 200_000))
    ]
    tables = [(domain, domain.table(NAMESPACE, group, size)) for domain, _, group, size in places]
    open_rows: list[tuple[RamDomain, Table, list[int]]] = []
    detached: list[tuple[RamDomain, int]] = []
    leases: list[tuple[RamDomain, np.ndarray]] = []
    for _ in range(400):
        domain, table = chance.choice(tables)
        match chance.randrange(7):
            case 0 | 1:
                got = domain.allocate(
                    table, chain(chance.randrange(9), chance.randrange(1, 12)), NAMESPACE, blocking=True
                )
                open_rows.append((domain, table, got.rows[got.rows >= 0].tolist()))
            case 2 | 3 if open_rows:
                domain, table, rows = open_rows.pop(chance.randrange(len(open_rows)))
                cut = chance.randrange(len(rows) + 1)
                domain.commit(table, np.array(rows[:cut], np.int64))
                for row in rows[cut:]:
                    if chance.random() < 0.5:
                        domain.abort(row)
                    else:
                        domain.detach(row)
                        detached.append((domain, row))
            case 4:
                found = domain.find_leading(table, chain(chance.randrange(9), 12))
                domain.lease(found)
                leases.append((domain, found))
            case 5 if leases:
                domain, found = leases.pop(chance.randrange(len(leases)))
                domain.unlease(found)
            case 6:
                row = table.get(key(chance.randrange(9), chance.randrange(12)))
                if row != ABSENT and chance.random() < 0.3:
                    domain.remove(row, "deleted")
                if detached and chance.random() < 0.5:
                    owner, row = detached.pop(chance.randrange(len(detached)))
                    owner.free_detached(row)
        tier.audit()
        bytes_of = tier.accounting()
        parts = (bytes_of.free, bytes_of.cached, bytes_of.allocated, bytes_of.quarantined, bytes_of.retired)
        assert min(parts) >= 0 and sum(parts) == bytes_of.total <= tier.capacity_bytes, f"seed {seed}: {bytes_of}"
    for domain, _, rows in open_rows:
        for row in rows:
            domain.abort(row)
    for domain, row in detached:
        domain.free_detached(row)
    for domain, found in leases:
        domain.unlease(found)
    tier.audit()
    at_rest = tier.accounting()
    assert at_rest.allocated == at_rest.quarantined == 0 and not tier.index.refs.any()
    assert not (tier.index.state == State.DETACHED).any()
    await tier.aclose()
