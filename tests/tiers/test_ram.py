"""The ram tier: writers of parts, quarantine, memory that changes hands, and how much one call may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from forebay.kvstore.errors import TierClosed, TierFull, TierTimeout
from forebay.kvstore.index import ABSENT, RowArray, Table
from forebay.kvstore.tier import ObjectKey
from forebay.kvstore.wire import SlotStatus
from forebay.tiers import ram as ram_module
from forebay.tiers.ram import RamDomain, RamTier, stride_of

EXTENT = 64 << 10
SMALL, LARGE = 4000, 16_000  # 16 and 4 slots an extent
NAMESPACE = b"n" * 16
WRITABLE, PRESENT, PENDING, REFUSED = (bytes([each]) for each in SlotStatus)


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., RamTier]]:
    made: list[RamTier] = []

    def one(extents: int = 4, **options: Any) -> RamTier:
        options.setdefault("available", lambda: 1 << 40)
        options.setdefault("extent_bytes", EXTENT)
        made.append(RamTier(capacity_bytes=extents * options["extent_bytes"], **options))
        return made[-1]

    yield one
    for tier in made:
        if not tier.closed:
            tier.audit()
        await tier.aclose()


@pytest.fixture
def tier(make: Callable[..., RamTier]) -> RamTier:
    return make()


@pytest.fixture
def domain(tier: RamTier) -> RamDomain:
    return tier.domain("d")


@pytest.fixture
def small(domain: RamDomain) -> Table:
    return domain.table(NAMESPACE, 0, SMALL)


@pytest.fixture
def large(domain: RamDomain) -> Table:
    return domain.table(NAMESPACE, 1, LARGE)


def keys(start: int, count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") * 4 for number in range(start, start + count)]


async def store(domain: RamDomain, table: Table, start: int, count: int, parent: bytes = NAMESPACE) -> bytes:
    """Store a run as the daemon does; returns the statuses."""
    if not domain.ready_for(table, count):
        await domain.make_room(table, count)
    got = domain.allocate(table, keys(start, count), parent)
    domain.commit(table, got.rows[got.rows >= 0])
    return got.statuses


def rows_of(domain: RamDomain, table: Table, start: int, count: int) -> RowArray:
    return domain.find_leading(table, keys(start, count))


# --- strides and accounts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "stride"), [(1, 512), (513, 576), (65_535, 65_536), (65_537, 69_632), (1 << 20, 1 << 20)]
)
def test_large_objects_lie_on_pages_and_small_ones_on_cache_lines(size: int, stride: int) -> None:
    assert stride_of(size) == stride


async def test_every_byte_is_free_cached_allocated_or_quarantined(
    tier: RamTier, domain: RamDomain, small: Table
) -> None:
    await store(domain, small, 0, 5)
    writing = domain.allocate(small, keys(100, 3), NAMESPACE).rows
    domain.detach(writing.item(0))
    stride = stride_of(SMALL)
    account = tier.accounting()
    assert (account.cached, account.allocated, account.quarantined) == (5 * stride, 2 * stride, stride)
    assert account.free == account.total - 8 * stride
    for row in writing.tolist()[1:]:
        domain.abort(row)
    domain.free_detached(writing.item(0))
    assert tier.accounting().free == account.total - 5 * stride


async def test_a_tier_smaller_than_an_extent_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="raise ram_bytes"):
        RamTier(capacity_bytes=EXTENT - 1, extent_bytes=EXTENT)


async def test_an_object_larger_than_an_extent_can_never_fit(domain: RamDomain) -> None:
    with pytest.raises(TierFull, match="raise extent_bytes"):
        domain.table(NAMESPACE, 9, EXTENT + 1)


async def test_a_namespace_has_objects_of_one_size(domain: RamDomain, small: Table) -> None:
    assert domain.table(NAMESPACE, 0, SMALL) is small
    with pytest.raises(ValueError, match="4000"):
        domain.table(NAMESPACE, 0, SMALL + 1)


async def test_a_closed_tier_refuses_everything_and_gives_back_quietly(domain: RamDomain, small: Table) -> None:
    await store(domain, small, 0, 1)
    loan = domain.borrow(ObjectKey(NAMESPACE, keys(0, 1)[0]))
    room = domain.reserve(ObjectKey(NAMESPACE, keys(9, 1)[0]), SMALL)
    assert loan is not None and room is not None
    await domain.aclose()
    for call in (
        lambda: domain.borrow(ObjectKey(NAMESPACE, keys(0, 1)[0])),
        lambda: domain.reserve(ObjectKey(NAMESPACE, keys(8, 1)[0]), SMALL),
        lambda: domain.allocate(small, keys(7, 1), NAMESPACE),
        room.commit,
    ):
        with pytest.raises(TierClosed):
            call()
    with pytest.raises(TierClosed):
        await domain.delete(ObjectKey(NAMESPACE, keys(0, 1)[0]))
    loan.release()
    room.abort()


# --- eviction ---------------------------------------------------------------------------------------------------------------


async def test_what_is_evicted_is_told_by_table_and_reason(make: Callable[..., RamTier]) -> None:
    told: list[tuple[int, bytes, str]] = []
    tier = make(1, on_gone=lambda table, gone, why: told.extend((table.number, key, why) for key in gone))
    domain = tier.domain("d")
    table = domain.table(NAMESPACE, 0, SMALL)
    await store(domain, table, 0, 16)
    await store(domain, table, 100, 2)
    await domain.delete(ObjectKey(NAMESPACE, keys(0, 1)[0]))
    domain.drop_corrupt(ObjectKey(NAMESPACE, keys(1, 1)[0]))
    assert told == [
        (0, *keys(15, 1), "evicted"),
        (0, *keys(14, 1), "evicted"),
        (0, *keys(0, 1), "deleted"),
        (0, *keys(1, 1), "corrupt"),
    ]
    counters = tier.counters
    assert (counters.evicted, counters.evicted_dirty, counters.deleted, counters.corrupt) == (2, 2, 1, 1)


async def test_a_run_that_grows_does_not_evict_its_own_beginning(make: Callable[..., RamTier]) -> None:
    domain = make(1).domain("d")
    table = domain.table(NAMESPACE, 0, SMALL)
    await store(domain, table, 0, 10)
    await store(domain, table, 100, 6)
    statuses = await store(domain, table, 0, 16)
    assert statuses == PRESENT * 10 + WRITABLE * 6 and len(rows_of(domain, table, 0, 16)) == 16
    assert await store(domain, table, 0, 20) == PRESENT * 16 + REFUSED * 4
    assert await store(domain, table, 20, 4, keys(15, 1)[0]) == REFUSED * 4 or table.get(keys(15, 1)[0]) != ABSENT


async def test_one_call_looks_at_no_more_than_so_many_leased_objects_and_the_next_goes_on(
    make: Callable[..., RamTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram_module, "_LUMP", 8)
    monkeypatch.setattr(ram_module, "_FRUITLESS_LOOKS", 4)
    domain = make(1, extent_bytes=1 << 20).domain("d")
    table = domain.table(NAMESPACE, 0, 500)
    busy = 2 * (1 + 3 * 8) + 5
    await store(domain, table, 0, busy)
    await store(domain, table, 10_000, (1 << 20) // 512 - busy)
    leased = rows_of(domain, table, 0, busy)
    domain.lease(leased)
    size_class = domain.classes[512]
    assert [domain.evict(size_class) for _ in range(4)] == [0, 0, 1, 1]
    domain.unlease(leased)
    domain.evict(size_class, 3)
    assert len(rows_of(domain, table, 0, busy)) == busy - 3, "the oldest are the next again"


async def test_a_prefix_used_in_part_still_goes_leaf_first(make: Callable[..., RamTier]) -> None:
    domain = make(1).domain("d")
    table = domain.table(NAMESPACE, 0, SMALL)
    await store(domain, table, 0, 16)
    domain.touch(table, rows_of(domain, table, 0, 16)[8:])  # heads are older than tails now
    await store(domain, table, 100, 4)
    assert len(rows_of(domain, table, 0, 16)) == 12


# --- several writers --------------------------------------------------------------------------------------------------------

BOTH = 0b11


def part(domain: RamDomain, table: Table, parts: int, count: int = 1) -> tuple[bytes, RowArray]:
    got = domain.allocate(table, keys(0, count), NAMESPACE, parts=parts, full_mask=BOTH)
    return got.statuses, got.rows


async def test_an_object_is_visible_when_the_last_of_its_parts_is_committed(domain: RamDomain, small: Table) -> None:
    await domain.make_room(small, 1)
    one, rows = part(domain, small, 0b01)
    other, same = part(domain, small, 0b10)
    assert (one, other) == (WRITABLE, WRITABLE) and rows.tolist() == same.tolist()
    assert part(domain, small, 0b10)[0] == PENDING == part(domain, small, 0)[0]
    assert domain.commit(small, rows, parts=0b01, full_mask=BOTH) == 0 and small.get(keys(0, 1)[0]) == ABSENT
    assert part(domain, small, 0b01)[0] == PRESENT, "what is whole need not be written again"
    assert domain.commit(small, rows, parts=0b10, full_mask=BOTH) == 1 and small.get(keys(0, 1)[0]) == rows.item(0)


@pytest.mark.parametrize("whole", [0b01, 0b10])
async def test_a_whole_object_does_not_join_one_that_waits_for_a_part(
    domain: RamDomain, small: Table, whole: int
) -> None:
    await domain.make_room(small, 1)
    rows = part(domain, small, whole)[1]
    key = ObjectKey(small.namespace, keys(0, 1)[0], small.group)
    with pytest.raises(TierTimeout):
        await domain.put(key, bytes(small.object_bytes), timeout_s=1.0)
    assert domain.commit(small, rows, parts=whole, full_mask=BOTH) == 0
    with pytest.raises(TierTimeout):
        await domain.put(key, bytes(small.object_bytes), timeout_s=1.0)
    domain.tier.audit()
    rest = part(domain, small, BOTH ^ whole)[1]
    assert domain.commit(small, rest, parts=BOTH ^ whole, full_mask=BOTH) == 1


async def test_a_part_given_up_can_be_written_by_another(domain: RamDomain, small: Table) -> None:
    await domain.make_room(small, 1)
    rows = part(domain, small, 0b01)[1]
    part(domain, small, 0b10)
    domain.commit(small, rows, parts=0b01, full_mask=BOTH)
    domain.abort(rows.item(0), parts=0b10, full_mask=BOTH)
    again = part(domain, small, 0b10)
    assert again[0] == WRITABLE and again[1].tolist() == rows.tolist()
    assert domain.commit(small, rows, parts=0b10, full_mask=BOTH) == 1


@pytest.mark.parametrize("end", ["commit", "abort", "vanish"])
async def test_a_co_writer_that_vanishes_takes_the_object_but_not_the_others_memory(
    tier: RamTier, domain: RamDomain, small: Table, end: str
) -> None:
    await domain.make_room(small, 1)
    row = part(domain, small, 0b01)[1].item(0)
    part(domain, small, 0b10)
    domain.detach(row)  # the first writer's session ended
    domain.free_detached(row)  # and its process
    assert tier.quarantined_bytes == stride_of(SMALL), "the second may still write there"
    match end:
        case "commit":
            assert domain.commit(small, np.array([row]), parts=0b10, full_mask=BOTH) == 0
        case "abort":
            domain.abort(row, parts=0b10, full_mask=BOTH)
        case "vanish":
            domain.detach(row)
            assert tier.quarantined_bytes == stride_of(SMALL)
            domain.free_detached(row)
    assert tier.quarantined_bytes == 0 == tier.allocated_bytes
    assert part(domain, small, 0)[0] == WRITABLE


async def test_objects_whose_other_parts_never_come_are_evicted_in_turn(make: Callable[..., RamTier]) -> None:
    tier = make(1)
    domain = tier.domain("d")
    table = domain.table(NAMESPACE, 0, SMALL)
    await domain.make_room(table, 16)
    rows = part(domain, table, 0b01, 16)[1]
    domain.commit(table, rows, parts=0b01, full_mask=BOTH)
    assert await store(domain, table, 100, 10) == WRITABLE * 10
    assert tier.allocated_bytes == 6 * stride_of(SMALL)


# --- memory changes hands ------------------------------------------------------------------------------------------------


async def test_a_new_models_small_batches_get_memory_that_another_model_filled(
    domain: RamDomain, small: Table, large: Table
) -> None:
    await store(domain, small, 0, 64)
    assert domain.tier.pool.made == 4
    assert await store(domain, large, 1000, 2) == WRITABLE * 2


async def test_what_an_evacuation_throws_out_is_the_oldest_and_what_it_moves_keeps_its_bytes(
    domain: RamDomain, small: Table, large: Table
) -> None:
    for start in range(0, 64, 8):
        await store(domain, small, start, 8)
    for start in range(0, 64, 8):
        for row in rows_of(domain, small, start, 8).tolist():
            domain.object_view(row)[:] = row.to_bytes(4, "big") * (SMALL // 4)
    written = {key: small.get(key) for key in small}
    for start in (0, 16, 32, 48):  # half of every extent is young
        domain.touch(small, rows_of(domain, small, start, 8))
    await store(domain, large, 1000, 1)
    assert domain.tier.counters.evacuations == 1 and domain.tier.counters.evicted == 16
    for start in (0, 16, 32, 48):
        rows = rows_of(domain, small, start, 8)
        assert len(rows) == 8, "a young object was thrown out"
        for key, row in zip(keys(start, 8), rows.tolist(), strict=True):
            assert domain.object_view(row) == written[key].to_bytes(4, "big") * (SMALL // 4)


async def test_an_extent_with_leases_drains_and_changes_hands_when_they_end(
    domain: RamDomain, small: Table, large: Table
) -> None:
    await store(domain, small, 0, 64)
    leased = rows_of(domain, small, 0, 64)[::16]  # one in every extent
    domain.lease(leased)
    assert await store(domain, large, 1000, 1) == REFUSED
    for row in leased.tolist():
        assert small.get(domain.tier.index.key_of(row)) == row
    domain.unlease(leased)
    assert await store(domain, large, 1000, 1) == WRITABLE


async def test_pinned_objects_are_left_alone(domain: RamDomain, small: Table, large: Table) -> None:
    await store(domain, small, 0, 64)
    pinned = rows_of(domain, small, 0, 64)[5:48]
    domain.pin(pinned)
    before = domain.tier.index.locations_of(pinned)
    assert await store(domain, large, 1000, 4) == WRITABLE * 4
    assert await store(domain, large, 2000, 4) == WRITABLE * 4
    assert domain.tier.index.locations_of(pinned) == before
    domain.unpin(pinned)


async def test_an_evacuation_left_halfway_is_gone_on_with(domain: RamDomain, small: Table, large: Table) -> None:
    await store(domain, small, 0, 64)
    making = asyncio.create_task(domain.make_room(large, 4))
    for _ in range(6):
        await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    domain.tier.audit()
    assert await store(domain, large, 1000, 4) == WRITABLE * 4


async def test_an_evacuation_does_one_object_between_two_turns_of_the_loop(
    domain: RamDomain, small: Table, large: Table
) -> None:
    await store(domain, small, 0, 64)
    counters = domain.tier.counters
    before = 0
    for _ in domain.tier.evacuator.steps(domain.tier.class_of_table[large.number]):
        done = counters.evicted + counters.moved
        assert done - before <= 2, "one to make room, one that moves into it"
        before = done
    assert counters.evacuations == 1


@pytest.mark.parametrize("mapped", [False, True])
async def test_memory_never_reaches_another_domain_with_what_was_in_it(tier: RamTier, mapped: bool) -> None:
    one, other = tier.domain("one"), tier.domain("other")
    theirs, ours = one.table(NAMESPACE, 0, SMALL), other.table(NAMESPACE, 0, LARGE)
    await store(one, theirs, 0, 64)
    for row in rows_of(one, theirs, 0, 64).tolist():
        one.object_view(row)[:] = b"\xee" * SMALL
    numbers = set(one.extents)
    if mapped:
        for extent in one.extents.values():
            extent.mapped_by.add("client")
    first = await store(other, ours, 0, 1)
    if mapped:
        assert first == REFUSED and tier.accounting().retired == EXTENT, "retired, but its client still has the memory"
        assert one.newly_retired == list(tier.retired)
        for number in list(tier.retired):
            tier.unmapped(number, "client")
        first = await store(other, ours, 0, 1)
    assert first == WRITABLE
    assert not set(other.extents) & numbers
    for extent in other.extents.values():
        assert not any(extent.memory), "another domain's bytes"


async def test_a_read_only_domain_gives_its_memory_back_too(tier: RamTier) -> None:
    one, other = tier.domain("one", read_only=True), tier.domain("other")
    await store(one, one.table(NAMESPACE, 0, SMALL), 0, 64)
    assert await store(other, other.table(NAMESPACE, 0, LARGE), 0, 4) == WRITABLE * 4


async def test_classes_in_steady_use_do_not_empty_each_others_extents_in_turns(
    domain: RamDomain, small: Table, large: Table
) -> None:
    await store(domain, small, 0, 32)
    await store(domain, large, 1000, 8)
    for turn in range(1, 60):
        await store(domain, small, turn * 32, 4)
        await store(domain, large, 100_000 + turn * 8, 1)
    assert domain.tier.counters.evacuations <= 6


async def test_a_machine_short_of_memory_evicts_instead_of_growing(make: Callable[..., RamTier]) -> None:
    left = 1 << 40
    tier = make(4, available=lambda: left, reserve_bytes=1 << 20)
    domain = tier.domain("d")
    table = domain.table(NAMESPACE, 0, SMALL)
    await store(domain, table, 0, 16)
    left = 1 << 20
    assert await store(domain, table, 100, 8) == WRITABLE * 8
    assert tier.pool.made == 1 and tier.counters.evicted == 8 and tier.pool.refused_growth > 0


async def test_a_long_run_stored_in_pieces_is_evicted_from_its_tail_and_refuses_nothing(
    make: Callable[..., RamTier],
) -> None:
    domain = make(1, extent_bytes=4 << 20).domain("d")
    table = domain.table(NAMESPACE, 0, 500)
    slots = (4 << 20) // 512
    for start in range(0, slots, 128):  # the head is older than the tail
        await store(domain, table, start, 128, keys(start - 1, 1)[0] if start else NAMESPACE)
    for start in range(20_000, 20_000 + slots // 2, 128):
        assert await store(domain, table, start, 128) == WRITABLE * 128
    assert rows_of(domain, table, 0, slots // 2).tolist() and len(rows_of(domain, table, 0, slots)) == slots // 2
