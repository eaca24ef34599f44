"""Extents: sealed memory of fixed size, slots by number, and a pool that grows within budget and reserve."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forebay.tiers import extents
from forebay.tiers.extents import Board, Extent, ExtentPool, forbid_new_writable_mappings

MIB = 1 << 20


@pytest.fixture
def extent() -> Iterator[Extent]:
    made = Extent(1, MIB)
    made.fault_in()
    yield made
    if made.fd >= 0:
        made.close()


def test_no_holder_of_an_extent_can_shrink_or_grow_it(extent: Extent) -> None:
    for size in (0, MIB // 2, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(extent.fd, size)


def test_an_extent_has_all_its_memory_before_it_is_used(extent: Extent) -> None:
    assert os.fstat(extent.fd).st_blocks * 512 == MIB


def test_a_read_only_domains_extent_can_be_mapped_for_reading_alone(extent: Extent) -> None:
    forbid_new_writable_mappings(extent.fd)
    with pytest.raises(PermissionError):
        mmap.mmap(extent.fd, MIB)
    extent.memory[:5] = b"bytes"  # the daemon's own mapping was made before
    with mmap.mmap(extent.fd, MIB, prot=mmap.PROT_READ) as seen:
        assert seen[:5] == b"bytes"


def test_a_board_can_be_written_by_its_maker_alone() -> None:
    board = Board(4, 16)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(board.fd, board.size_bytes)
        board.generations[3] = 7
        board.count_completion()
        with mmap.mmap(board.fd, board.size_bytes, prot=mmap.PROT_READ) as seen:
            words = np.frombuffer(seen, np.uint64).tolist()
        assert words[3] == 7 and words[board.counter_index] == 1
    finally:
        board.close()


@given(stride=st.sampled_from([512, 1000, 4096, 300_000, MIB]), data=st.data())
def test_slots_are_given_out_once_and_taken_back_in_any_order(stride: int, data: st.DataObject) -> None:
    extent = Extent(1, MIB)
    try:
        extent.format(stride)
        taken: set[int] = set()
        for _ in range(data.draw(st.integers(1, 8))):
            count = data.draw(st.integers(0, extent.slot_count + 2))
            slots = extent.take(count).tolist()
            assert len(slots) == min(count, extent.slot_count - len(taken)) and not taken & set(slots)
            assert all(0 <= slot * stride <= MIB - stride for slot in slots)
            taken |= set(slots)
            back = data.draw(st.lists(st.sampled_from(sorted(taken)), unique=True)) if taken else []
            extent.give(np.array(back, np.int64))
            taken -= set(back)
            assert extent.free_count == extent.slot_count - len(taken)
    finally:
        extent.close()


def test_fresh_slots_lie_side_by_side(extent: Extent) -> None:
    extent.format(4096)
    assert extent.take(5).tolist() == [0, 1, 2, 3, 4] and extent.take(2).tolist() == [5, 6]


def test_an_extent_closed_while_a_view_of_it_is_held_keeps_that_view_alive(extent: Extent) -> None:
    view = extent.memory[:4]
    view[:] = b"kept"
    extent.close()
    assert bytes(view) == b"kept"


# --- the pool ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pools() -> AsyncIterator[Callable[..., ExtentPool]]:
    made: list[ExtentPool] = []

    def make(count: int = 3, *, available: Callable[[], int] = lambda: 1 << 40, reserve_bytes: int = 0) -> ExtentPool:
        made.append(
            ExtentPool(capacity_bytes=count * MIB, extent_bytes=MIB, reserve_bytes=reserve_bytes, available=available)
        )
        return made[-1]

    yield make
    for pool in made:
        await pool.aclose()


async def test_a_pool_grows_to_its_budget_and_no_further(pools: Callable[..., ExtentPool]) -> None:
    pool = pools(3)
    await pool.grow(10)
    assert len(pool.ready) == pool.made == 3
    taken = [pool.take(grow=True) for _ in range(3)]
    assert None not in taken and pool.take(grow=True) is None
    assert len({extent.number for extent in taken if extent is not None}) == 3
    for extent in taken:
        assert extent is not None
        extent.close()


async def test_many_growing_at_once_stay_within_the_budget(pools: Callable[..., ExtentPool]) -> None:
    pool = pools(3)
    await asyncio.gather(*(pool.grow(want) for want in (1, 2, 3, 3, 9)))
    assert len(pool.ready) == pool.made == 3


async def test_a_pool_leaves_the_machine_its_reserve(pools: Callable[..., ExtentPool]) -> None:
    left = 5 * MIB
    pool = pools(3, available=lambda: left, reserve_bytes=4 * MIB)
    await pool.grow(1)
    assert pool.made == 1  # 4 MiB are left then
    left = 4 * MIB
    await pool.grow(3)
    assert pool.made == 1 and pool.refused_growth == 1
    assert pool.take(grow=True) is not None and pool.take(grow=True) is None


def _full(fd: int, data: memoryview, at: int) -> int:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("refuse", [_full, lambda fd, data, at: len(data) - 1], ids=["refused", "short"])
async def test_a_machine_without_memory_is_counted_and_no_error(
    pools: Callable[..., ExtentPool], monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int, memoryview, int], int]
) -> None:
    monkeypatch.setattr(extents.os, "pwrite", refuse)
    pool = pools(3)
    await pool.grow(1)
    assert pool.take(grow=True) is None
    assert pool.made == 0 and pool.refused_growth == 2
    monkeypatch.undo()
    await pool.grow(1)
    assert pool.made == 1  # a machine that has memory again is asked again


async def test_a_growth_left_halfway_closes_its_extent_only_when_its_thread_has_stopped(
    pools: Callable[..., ExtentPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    descriptors: list[int] = []

    def wait(fd: int, data: memoryview, at: int) -> int:
        descriptors.append(fd)
        begun.set()
        go_on.wait(10)
        return len(data)

    monkeypatch.setattr(extents.os, "pwrite", wait)
    pool = pools(3)
    growing = asyncio.create_task(pool.grow(1))
    await asyncio.to_thread(begun.wait, 10)
    assert pool._growing is not None
    pool._growing.cancel()
    await growing
    os.fstat(descriptors[0])  # still open: the thread is in the middle of it
    go_on.set()
    while pool._making:  # noqa: ASYNC110 - a plain counter
        await asyncio.sleep(0.001)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
    assert pool.made == 0


async def test_a_closed_pool_grows_no_more(pools: Callable[..., ExtentPool]) -> None:
    pool = pools(3)
    await pool.grow(2)
    await pool.aclose()
    await pool.grow(3)
    assert pool.made == 0 and not pool.ready and pool.take(grow=True) is None
