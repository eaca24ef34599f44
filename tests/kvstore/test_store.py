"""The store over several tiers: verified reads, one load per object, copies within bounds, deletes that win."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from forebay.kvstore.channel import ChannelPolicy, TierChannel
from forebay.kvstore.errors import TierClosed, TierFull
from forebay.kvstore.store import DrainResult, FlushResult, Store, StorePolicy
from forebay.kvstore.tier import Borrow, Buffer, ObjectKey, Tier, WritableBuffer
from forebay.kvstore.writebehind import ByteBudget, CopyQueue
from forebay.tiers.memory import MemoryTier
from forebay.tiers.wrappers import Fault, Faulty, Wrapper
from tests.contract.tier_contract import NAMESPACE, SIZE, balanced, forge, key_of, read, reserved_bytes, seal, verify
from tests.kvstore.fakes import DeafTier, FakeTime, GatedTier, settle

BLOCKS = [key_of(index).block for index in range(64)]


def memory(name: str = "first", room_for: int = 16) -> MemoryTier:
    return MemoryTier(name, room_for * SIZE)


def make_store(first: Tier, *lower: Tier | TierChannel, seal: Any = seal, verify: Any = verify, **policy: Any) -> Store:
    """A store that copies nothing by itself unless told to, with short retries."""
    policy = {"write_policy": "write_back", "retry_s": 0.005, **policy}
    channels = [each if isinstance(each, TierChannel) else TierChannel(each) for each in lower]
    return Store(first, channels, verify=verify, seal=seal, settings=StorePolicy(**policy))


async def fill(tier: Tier, *indexes: int) -> None:
    for index in indexes:
        await tier.put(key_of(index), forge(key_of(index)), timeout_s=1.0)


async def get(store: Store, index: int, timeout_s: float = 5.0) -> bytes | None:
    out = bytearray(SIZE)
    size = await store.get_into(key_of(index), out, timeout_s=timeout_s)
    return None if size is None else bytes(out[:size])


async def load(store: Store, blocks: Sequence[bytes], timeout_s: float = 5.0) -> int:
    return await store.load(NAMESPACE, 0, blocks, SIZE, timeout_s)


async def until(condition: Any) -> None:
    """Wait for background work; a wait in vain ends after 20 s."""
    async with asyncio.timeout(20.0):
        while not condition():  # noqa: ASYNC110 - what is waited for is often that nothing happens any more
            await asyncio.sleep(0.001)


class CountedTier(MemoryTier):
    """Counts reads by object."""

    def __init__(self, name: str = "lower") -> None:
        super().__init__(name, 64 * SIZE)
        self.reads: list[ObjectKey] = []

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        self.reads.append(key)
        await asyncio.sleep(0)
        return await super().get_into(key, out, timeout_s=timeout_s)


class AskedTier(Wrapper):
    """A tier that must be asked with I/O."""

    def __init__(self, inner: MemoryTier, answer_s: float = 0.0) -> None:
        super().__init__(inner)
        self._memory, self._answer_s = inner, answer_s
        del self.leading_run, self.reserve, self.borrow  # type: ignore[attr-defined]

    async def probe(self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float) -> int:
        await asyncio.sleep(self._answer_s)
        return self._memory.leading_run(namespace, group, blocks)


class SlotlessTier(Wrapper):
    """A fast tier without memory to fill in place."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        del self.reserve, self.borrow  # type: ignore[attr-defined]


class ReadOnlyLender(MemoryTier):
    """Lends its objects read-only."""

    def borrow(self, key: ObjectKey) -> Borrow | None:
        loan = super().borrow(key)
        if loan is not None:
            loan.view = loan.view.toreadonly()
        return loan


# --- reading ---------------------------------------------------------------------------------------------------------


async def test_an_object_in_a_lower_tier_is_served_and_promoted() -> None:
    first, lower = memory(), CountedTier()
    await fill(lower, 1)
    store = make_store(first, lower)
    assert await get(store, 1) == forge(key_of(1))
    assert await read(first, key_of(1)) == forge(key_of(1))
    assert await get(store, 1) == forge(key_of(1))
    assert len(lower.reads) == 1
    assert store.stats()["loaded"] == store.stats()["get_first_hits"] == 1


@pytest.mark.parametrize("fault", [Fault.FLIP_BIT, Fault.REFUSE, Fault.BREAK])
async def test_damage_and_trouble_in_one_tier_are_counted_and_the_next_one_serves(fault: Fault) -> None:
    first, ill, well = memory(), Faulty(memory("ill")), memory("well")
    await fill(ill, 1)
    await fill(well, 1)
    store = make_store(first, ill, well)
    ill.arm("get_into", fault)
    assert await get(store, 1) == forge(key_of(1))
    stats = store.stats()
    assert stats["load_corrupt" if fault is Fault.FLIP_BIT else "load_trouble"] == 1
    assert (await read(ill, key_of(1)) is None) == (fault is Fault.FLIP_BIT)  # damaged: deleted; in trouble: left


async def test_every_copy_damaged_is_a_miss_that_explain_explains() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    await fill(lower, 1)
    store = make_store(first, lower)
    lower.arm("get_into", Fault.FLIP_BIT)
    assert await get(store, 1) is None
    assert store.explain(key_of(1))["gone"] == "corrupt in lower: checksum"
    assert balanced(first) and not reserved_bytes(first)


async def test_an_object_longer_than_out_is_the_callers_mistake_on_any_tier() -> None:
    for tiers in ((memory(), memory("lower")), (memory("lower"), memory())):
        await fill(tiers[1], 1)
        with pytest.raises(ValueError):
            await make_store(*tiers).get_into(key_of(1), bytearray(SIZE - 1), timeout_s=1.0)


async def test_a_shorter_object_is_read_with_its_own_length() -> None:
    first, lower = memory(), memory("lower")
    await lower.put(key_of(1), forge(key_of(1), 100), timeout_s=1.0)
    store = make_store(first, lower)
    assert await get(store, 1) == forge(key_of(1), 100) == await read(first, key_of(1))


async def test_a_first_tier_without_room_still_lets_a_reader_read() -> None:
    first, lower = memory(room_for=1), memory("lower")
    await fill(first, 1)
    await fill(lower, 2)
    loan = first.borrow(key_of(1))
    store = make_store(first, lower)
    assert await get(store, 2) == forge(key_of(2))
    assert store.stats()["load_no_room"] == 1 and loan is not None


async def test_trouble_in_the_first_tier_is_a_miss_there() -> None:
    first, lower = Faulty(memory()), memory("lower")
    await fill(lower, 1)
    store = make_store(first, lower)
    first.arm("get_into", Fault.REFUSE)
    assert await get(store, 1) == forge(key_of(1))
    assert store.stats()["first_trouble"] == 1


async def test_a_get_ends_by_its_deadline() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    await fill(lower, 1)
    store = make_store(first, lower)
    lower.arm("get_into", Fault.HANG)
    assert await get(store, 1, timeout_s=0.01) is None
    assert store.stats()["load_deadline"] == 1
    await store.aclose(1.0)
    assert balanced(first) and not reserved_bytes(first)


def test_the_first_tier_must_know_what_it_holds() -> None:
    with pytest.raises(ValueError, match="presence"):
        make_store(AskedTier(memory()))


# --- runs ------------------------------------------------------------------------------------------------------------


async def test_the_leading_run_is_split_over_the_tiers_in_order() -> None:
    first, second, third = memory(), memory("second"), memory("third")
    store = make_store(first, second, third)
    await fill(first, 0, 1, 6)
    await fill(second, 1, 2, 3)
    await fill(third, 0, 1, 2, 3, 4, 5, 8)
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == [("first", 2), ("second", 2), ("third", 2), ("first", 1)]
    assert store.leading_run(NAMESPACE, 0, BLOCKS[9:]) == []  # a hole at the start
    assert store.leading_run(NAMESPACE, 1, BLOCKS) == store.leading_run(NAMESPACE, 0, []) == []


async def test_match_asks_tiers_that_answer_only_with_io() -> None:
    first, asked, known = memory(), memory("asked"), memory("known")
    await fill(first, 0, 1)
    await fill(asked, 2, 3)
    await fill(known, 4)
    store = make_store(first, AskedTier(asked), known)
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == [("first", 2)]
    runs = await store.match(NAMESPACE, 0, BLOCKS, timeout_s=5.0)
    assert runs == [("first", 2), ("asked", 2), ("known", 1)]
    assert await load(store, BLOCKS) == 5


async def test_a_tier_that_does_not_answer_in_time_holds_nothing() -> None:
    first = memory()
    await fill(first, 0)
    slow = memory("slow")
    await fill(slow, 1)
    store = make_store(first, AskedTier(slow, answer_s=2.0))
    assert await store.match(NAMESPACE, 0, BLOCKS, timeout_s=0.01) == [("first", 1)]
    assert store.stats()["probe_trouble"] == 1


async def test_load_brings_the_whole_run_into_the_first_tier() -> None:
    first, second, third = memory(), memory("second"), memory("third")
    await fill(first, 1)
    await fill(second, 0, 3)
    await fill(third, 2, 5)
    store = make_store(first, second, third)
    assert await load(store, BLOCKS) == 4
    assert first.leading_run(NAMESPACE, 0, BLOCKS) == 4
    assert balanced(first) and not reserved_bytes(first)


async def test_a_loaded_object_knows_its_parent() -> None:
    first, lower = memory(room_for=4), memory("lower")
    await fill(lower, 0, 1, 2, 3)
    store = make_store(first, lower)
    assert await load(store, BLOCKS) == 4
    await store.put(key_of(9), forge(key_of(9)))
    assert first.leading_run(NAMESPACE, 0, BLOCKS) == 3  # the leaf went, not the oldest


@pytest.mark.parametrize("fault", [Fault.FLIP_BIT, Fault.REFUSE, Fault.BREAK])
async def test_a_run_ends_at_the_object_that_no_tier_can_give_whole(fault: Fault) -> None:
    first, lower = memory(), Faulty(memory("lower"))
    await fill(lower, *range(8))
    store = make_store(first, lower, load_window=1)
    assert await load(store, BLOCKS[:2]) == 2
    lower.arm("get_into", fault)
    assert await load(store, BLOCKS) == 2
    assert first.leading_run(NAMESPACE, 0, BLOCKS[:3]) == 2
    assert balanced(first) and not reserved_bytes(first)


async def test_an_object_that_its_tier_only_claims_to_hold_is_a_hole() -> None:
    class Stale(MemoryTier):
        def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
            return len(blocks)

    first, stale = memory(), Stale("stale", 64 * SIZE)
    await fill(stale, 0, 1)
    store = make_store(first, stale, load_window=1)
    assert await load(store, BLOCKS) == 2
    assert store.stats()["load_missing"] == 1


async def test_an_object_of_another_size_than_its_namespaces_is_corrupt() -> None:
    first, lower = memory(), memory("lower")
    for index, size in enumerate((SIZE + 1, SIZE)):
        await lower.put(key_of(index), forge(key_of(index), size), timeout_s=1.0)
    store = make_store(first, lower)
    assert await load(store, BLOCKS[:2]) == 0
    assert store.stats()["load_corrupt"] == 1 and lower.leading_run(NAMESPACE, 0, BLOCKS[:1]) == 0


async def test_however_many_ask_an_object_is_loaded_once() -> None:
    first, lower = memory(), CountedTier()
    await fill(lower, *range(8))
    store = make_store(first, lower)
    answers = await asyncio.gather(*(load(store, BLOCKS) for _ in range(50)), *(get(store, 3) for _ in range(10)))
    assert answers == [8] * 50 + [forge(key_of(3))] * 10
    assert sorted(lower.reads) == [key_of(index) for index in range(8)]


async def test_a_caller_that_gives_up_does_not_end_the_load_for_the_others() -> None:
    first, lower = memory(), GatedTier()
    await MemoryTier.put(lower, key_of(0), forge(key_of(0)), timeout_s=1.0)
    store = make_store(first, lower)
    leader, joiner, late = (asyncio.create_task(load(store, BLOCKS[:1], timeout)) for timeout in (5.0, 5.0, 0.01))
    await settle()
    leader.cancel()
    assert await late == 0
    lower.go.release()
    assert await joiner == 1 and leader.cancelled()
    assert store.stats()["loads_started"] == 1


async def test_a_run_larger_than_the_first_tier_loads_as_far_as_it_fits() -> None:
    first, lower = memory(room_for=4), memory("lower", 64)
    await fill(lower, *range(12))
    await fill(first, 50, 51, 52, 53)
    store = make_store(first, lower, load_window=3)
    assert await load(store, BLOCKS[:12]) == 4
    assert first.leading_run(NAMESPACE, 0, BLOCKS) == 4, "its end must not push out its beginning"
    assert balanced(first) and not reserved_bytes(first)
    await fill(first, 60, 61, 62, 63)  # nothing stays pinned
    assert first.leading_run(NAMESPACE, 0, BLOCKS[60:]) == 4


async def test_a_load_goes_on_after_its_callers_deadline() -> None:
    first, lower = memory(), GatedTier()
    for index in range(3):
        await MemoryTier.put(lower, key_of(index), forge(key_of(index)), timeout_s=1.0)
    store = make_store(first, lower)
    lower.go.release()
    assert await load(store, BLOCKS[:3], timeout_s=0.02) == 1
    for _ in range(2):
        lower.go.release()
    await until(lambda: first.leading_run(NAMESPACE, 0, BLOCKS) == 3)


async def test_a_tier_that_writes_after_its_deadline_never_writes_into_another_object() -> None:
    first, deaf, other = memory(room_for=2), DeafTier(), memory("other")
    await MemoryTier.put(deaf, key_of(0), bytes(SIZE), timeout_s=1.0)
    await fill(other, 0)
    store = make_store(first, TierChannel(deaf, policy=ChannelPolicy(settle_s=0.001)), other, load_timeout_s=0.01)
    assert await load(store, BLOCKS[:1]) == 0
    assert first.accounting()["reserved"] == SIZE  # its room waits for the late write
    await fill(first, 1)
    with pytest.raises(TierFull):
        first.reserve(key_of(2), 2 * SIZE)
    deaf.go.set()
    await settle()
    assert balanced(first) and not reserved_bytes(first)
    assert await read(first, key_of(1)) == forge(key_of(1))
    assert await get(store, 0) == forge(key_of(0))  # from the other tier, now that there is room


async def test_a_tier_that_keeps_damaging_objects_is_no_longer_asked() -> None:
    first, lower = memory(room_for=32), memory("lower", 32)
    await fill(lower, *range(32))
    for damaged in lower._objects.values():
        damaged.data[0] ^= 1
    store = make_store(first, lower)
    for index in range(32):
        if index == 3:
            lower._objects[key_of(3)].data[0] ^= 1  # one sound object among them: the count starts again
        assert await get(store, index) == (forge(key_of(3)) if index == 3 else None)
    assert store.stats()["load_corrupt"] == 3 + 5  # then its breaker opened
    await store._lower[0].aclose()


async def test_a_bug_in_a_check_is_counted_and_ends_as_a_miss() -> None:
    def broken(key: ObjectKey, view: memoryview) -> str | None:
        raise KeyError("a bug")

    first, lower = memory(), memory("lower")
    await fill(lower, 0)
    store = make_store(first, lower, verify=broken)
    assert await load(store, BLOCKS[:1]) == 0
    assert store.stats()["background_errors"] == 1
    assert balanced(first) and not reserved_bytes(first)
    await store._lower[0].aclose()


async def test_a_large_object_is_checked_off_the_event_loop() -> None:
    first, lower = memory(), memory("lower")
    await fill(lower, 0, 1)
    lower._objects[key_of(1)].data[9] ^= 1
    store = make_store(first, lower, verify_in_thread_bytes=SIZE)
    assert await load(store, BLOCKS[:2]) == 1 and store.stats()["load_corrupt"] == 1


async def test_a_first_tier_without_slots_works_through_a_scratch_buffer() -> None:
    first, lower = SlotlessTier(memory()), memory("lower")
    await fill(lower, 0, 1)
    store = make_store(first, lower)
    assert await load(store, BLOCKS) == 2
    await store.put(key_of(2), forge(key_of(2)), parent=BLOCKS[1])
    assert await store.flush([key_of(2)], timeout_s=5.0) == FlushResult(1, 0, 0)
    assert await read(lower, key_of(2)) == forge(key_of(2))


# --- writing ---------------------------------------------------------------------------------------------------------


async def test_clean_ahead_copies_in_the_background() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower, write_policy="clean_ahead")
    for index in range(5):
        await store.put(key_of(index), forge(key_of(index)))
    await until(lambda: lower.leading_run(NAMESPACE, 0, BLOCKS) == 5)
    await until(lambda: store.stats()["copies_waiting"] == 0)
    assert all(store.is_clean(key_of(index)) for index in range(5)) and not store.is_clean(key_of(9))
    assert store.stats()["copied"] == 5 and store.stats()["copied_bytes"] == 5 * SIZE
    await store.aclose(1.0)


async def test_an_object_committed_in_place_is_copied_too() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower, write_policy="clean_ahead")
    await fill(first, 0)
    store.note_committed(key_of(0), None, SIZE, 1.0)
    await until(lambda: store.is_clean(key_of(0)))
    await store.aclose(1.0)


async def test_what_a_lower_tier_already_has_is_not_copied_again() -> None:
    first, lower = memory(), memory("lower")
    await fill(lower, 0)
    store = make_store(first, lower, write_policy="clean_ahead")
    await store.put(key_of(0), forge(key_of(0)))
    assert store.stats()["copies_waiting"] == 0


async def test_clean_ahead_keeps_to_its_write_budget() -> None:
    time = FakeTime()
    first, lower = memory(), memory("lower")
    settings = StorePolicy(copy_bytes_per_s=SIZE, copy_burst_bytes=SIZE, copy_workers=1)
    store = Store(
        first, [TierChannel(lower)], verify=verify, seal=seal, settings=settings, clock=time.clock, sleep=time.sleep
    )
    for index in range(8):
        await store.put(key_of(index), forge(key_of(index)))
    await settle()
    assert store.stats()["copied"] == 2  # the burst, and one in debt
    for seconds in range(1, 4):
        await time.pass_by(1.0)
        assert store.stats()["copied"] == 2 + seconds
    assert await store.aclose(5.0) == DrainResult(copied=3, left=0)  # closing has its own deadline instead


async def test_a_copy_in_a_tier_that_cannot_be_asked_from_memory_is_remembered_until_its_delete() -> None:
    first, lower = memory(), AskedTier(memory("asked"))
    store = make_store(first, lower)
    await store.put(key_of(0), forge(key_of(0)))
    assert not store.is_clean(key_of(0))
    assert await store.flush([key_of(0)], timeout_s=5.0) == FlushResult(1, 0, 0)
    assert store.is_clean(key_of(0))
    await store.delete([key_of(0)])
    assert not store.is_clean(key_of(0))


async def test_write_through_returns_when_a_lower_tier_has_it() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower, write_policy="write_through")
    await store.put(key_of(0), forge(key_of(0)))
    assert await read(lower, key_of(0)) == forge(key_of(0))
    await store.aclose(1.0)


async def test_write_through_never_waits_longer_than_the_put_may() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    store = make_store(first, lower, write_policy="write_through")
    lower.arm("put", Fault.HANG)
    await store.put(key_of(0), forge(key_of(0)), timeout_s=0.01)
    assert await get(store, 0) == forge(key_of(0)) and not store.is_clean(key_of(0))
    await store.aclose(0.01)


async def test_write_back_copies_only_when_asked() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower, write_policy="write_back")
    for index in range(4):
        await store.put(key_of(index), forge(key_of(index)))
    await settle()
    assert not list(lower.keys())
    assert await store.flush([key_of(0), key_of(9)], timeout_s=5.0) == FlushResult(1, 1, 0)
    assert await store.demote([key_of(1)], timeout_s=5.0) == FlushResult(1, 0, 0)
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == [("first", 1), ("lower", 1), ("first", 2)]
    assert await store.aclose(5.0) == DrainResult(copied=2, left=0)


async def test_off_writes_nothing_down() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower, write_policy="off")
    await store.put(key_of(0), forge(key_of(0)))
    assert await store.flush([key_of(0)], timeout_s=1.0) == FlushResult(0, 0, 1)
    assert await store.aclose(1.0) == DrainResult(0, 0) and not list(lower.keys())


async def test_without_a_lower_tier_a_flush_says_that_nothing_is_durable() -> None:
    store = make_store(memory())
    await store.put(key_of(0), forge(key_of(0)))
    assert await store.flush([key_of(0), key_of(1)], timeout_s=1.0) == FlushResult(durable=0, missing=1, failed=1)


@pytest.mark.parametrize("kind", [MemoryTier, ReadOnlyLender])
async def test_what_leaves_memory_is_sealed(kind: type[MemoryTier]) -> None:
    def mark(view: memoryview) -> None:
        view[-1] = 0x77

    first, lower = kind("first", 16 * SIZE), memory("lower")
    store = make_store(first, lower, seal=mark)
    await store.put(key_of(0), forge(key_of(0)))
    await store.flush([key_of(0)], timeout_s=5.0)
    assert await read(lower, key_of(0)) == forge(key_of(0))[:-1] + b"\x77"
    assert not reserved_bytes(first)


async def test_damage_in_memory_is_found_before_it_spreads() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower)
    await store.put(key_of(0), forge(key_of(0)))
    first._objects[key_of(0)].data[100] ^= 1
    assert await store.flush([key_of(0)], timeout_s=5.0) == FlushResult(0, 1, 0)
    assert store.stats()["copy_corrupt"] == 1 and not list(lower.keys()) and not list(first.keys())
    assert "corrupt in first" in store.explain(key_of(0))["gone"]


async def test_a_full_tier_passes_a_copy_on_to_the_next() -> None:
    first, full, lower = memory(), Faulty(memory("full")), memory("lower")
    store = make_store(first, full, lower)
    full.arm("put", Fault.FULL)
    await store.put(key_of(0), forge(key_of(0)))
    assert await store.flush([key_of(0)], timeout_s=5.0) == FlushResult(1, 0, 0)
    assert await read(lower, key_of(0)) == forge(key_of(0)) and store.stats()["copy_full"] == 1


async def test_a_flush_tries_again_while_it_has_time() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    store = make_store(first, lower)
    lower.arm("put", Fault.REFUSE, times=2)
    await store.put(key_of(0), forge(key_of(0)))
    assert await store.flush([key_of(0)], timeout_s=5.0) == FlushResult(1, 0, 0)
    lower.down = True
    await store.put(key_of(1), forge(key_of(1)))
    assert await store.flush([key_of(1)], timeout_s=0.02) == FlushResult(0, 0, 1)
    await store._lower[0].aclose()


async def test_a_lost_answer_is_repeated_and_harmless() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    store = make_store(first, lower)
    lower.arm("put", Fault.LOSE_ANSWER)
    await store.put(key_of(0), forge(key_of(0)))
    assert await store.flush([key_of(0)], timeout_s=5.0) == FlushResult(1, 0, 0)
    assert await read(lower, key_of(0)) == forge(key_of(0))


async def test_an_outage_costs_no_copy_when_the_tier_comes_back() -> None:
    time = FakeTime()
    first, lower = memory(), Faulty(memory("lower"))
    channel = TierChannel(lower, clock=time.clock, sleep=time.sleep)
    store = make_store(first, channel, write_policy="clean_ahead", retry_s=0.001)
    lower.down = True
    for index in range(4):
        await store.put(key_of(index), forge(key_of(index)))
    await until(lambda: not channel.healthy)
    await asyncio.sleep(0.05)  # dozens of retries, had it tried
    lower.down = False
    await time.pass_by(60.0)
    await until(lambda: lower.leading_run(NAMESPACE, 0, BLOCKS) == 4)  # type: ignore[attr-defined]
    await store.aclose(1.0)


async def test_a_put_without_room_goes_to_a_lower_tier() -> None:
    first, lower = memory(room_for=1), memory("lower")
    store = make_store(first, lower)
    await store.put(key_of(0), forge(key_of(0)))
    loan = first.borrow(key_of(0))
    await store.put(key_of(1), forge(key_of(1)))
    assert store.leading_run(NAMESPACE, 0, BLOCKS[:2]) == [("first", 1), ("lower", 1)] and loan is not None
    assert store.stats()["put_spilled"] == 1
    with pytest.raises(TierFull):
        await make_store(first).put(key_of(2), forge(key_of(2)))


async def test_more_objects_than_the_copy_queue_holds_are_counted_and_never_block() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower, copy_queue=2)
    for index in range(5):
        await store.put(key_of(index), forge(key_of(index)))
    assert store.stats()["copy_not_tracked"] == 3 and store.stats()["copies_waiting"] == 2
    assert await store.flush([key_of(index) for index in range(5)], timeout_s=5.0) == FlushResult(5, 0, 0)


def test_the_best_is_copied_first_but_never_before_its_parents() -> None:
    queue = CopyQueue(limit=100)
    for index in range(4):  # a chain whose value grows with position
        queue.add(key_of(index), SIZE, BLOCKS[index - 1] if index else None, score=float(index))
    queue.add(key_of(10), SIZE, None, score=2.5)
    queue.add(key_of(11), SIZE, BLOCKS[50], score=9.0)  # its parent doesn't wait
    order = [queue.pop() for _ in range(7)]
    assert order == [key_of(11), key_of(0), key_of(1), key_of(2), key_of(3), key_of(10), None]
    assert len(queue) == 6  # taken ones wait until they are discarded
    assert queue.put_back(key_of(10), attempts_limit=2) and queue.pop() == key_of(10)
    assert not queue.put_back(key_of(10), attempts_limit=2) and key_of(10) not in queue


def test_a_cycle_of_parents_does_not_hang_the_copy_queue() -> None:
    queue = CopyQueue(limit=100)
    queue.add(key_of(0), SIZE, BLOCKS[1], 1.0)
    queue.add(key_of(1), SIZE, BLOCKS[0], 2.0)
    assert {queue.pop(), queue.pop()} == {key_of(0), key_of(1)} and queue.pop() is None


def test_the_copy_queue_forgets_its_discarded_entries() -> None:
    queue = CopyQueue(limit=10)
    for index in range(1000):
        queue.add(key_of(index), SIZE, None, float(-index))
        queue.discard(key_of(index))
    assert len(queue._heap) < 100


async def test_the_write_budget_holds_over_time() -> None:
    time = FakeTime()
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.now_s += seconds

    budget = ByteBudget(100.0, 50.0, time.clock, sleep)
    start_s = time.now_s
    for _ in range(20):
        await budget.solvent()
        budget.spend(60)
    allowed = 50 + 60 + 100 * (time.now_s - start_s)  # burst, one debt, and the rate
    assert allowed >= 20 * 60 and slept
    with pytest.raises(ValueError):
        ByteBudget(0, 1, time.clock, sleep)


# --- deleting --------------------------------------------------------------------------------------------------------


async def test_a_deleted_object_is_gone_from_every_tier() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower)
    for index in range(3):
        await store.put(key_of(index), forge(key_of(index)))
    await store.flush([key_of(0), key_of(1)], timeout_s=5.0)
    await first.delete(key_of(1))
    assert await store.delete([key_of(0), key_of(1), key_of(9)]) == 2
    assert list(first.keys()) == [key_of(2)] and not list(lower.keys())
    assert await get(store, 0) is None and store.explain(key_of(0))["gone"] == "deleted"
    await store.put(key_of(0), forge(key_of(0)))
    assert await get(store, 0) == forge(key_of(0))


async def test_a_delete_during_a_load_wins() -> None:
    first, lower = memory(), GatedTier()
    await MemoryTier.put(lower, key_of(0), forge(key_of(0)), timeout_s=1.0)
    store = make_store(first, lower)
    loading = asyncio.create_task(load(store, BLOCKS[:1]))
    await settle()
    await store.delete([key_of(0)])
    lower.go.release()
    assert await loading == 0
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == [] and store.stats()["load_deleted"] == 1
    assert balanced(first) and not reserved_bytes(first)


async def test_an_object_deleted_while_it_loads_is_not_visible_for_a_moment() -> None:
    class Watched(MemoryTier):
        def _insert(self, *args: Any) -> None:
            raise AssertionError("visible after its delete")

    first, lower = Watched("first", 4 * SIZE), GatedTier()
    await MemoryTier.put(lower, key_of(0), forge(key_of(0)), timeout_s=1.0)
    store = make_store(first, lower)
    loading = asyncio.create_task(load(store, BLOCKS[:1]))
    await settle()
    await store.delete([key_of(0)])
    lower.go.release()
    assert await loading == 0 and store.stats()["background_errors"] == 0


async def test_a_delete_during_a_promotion_wins() -> None:
    class SlowPut(MemoryTier):
        async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
            await super().put(key, data, timeout_s=timeout_s)
            await asyncio.sleep(0.01)

    first, lower = SlowPut("first", 4 * SIZE), memory("lower")
    await fill(lower, 0)
    store = make_store(first, lower)
    getting = asyncio.create_task(get(store, 0))
    await until(lambda: first.leading_run(NAMESPACE, 0, BLOCKS[:1]))
    await first.delete(key_of(0))  # as if the delete had looked just before
    with store._deletions.under_way([key_of(0)]):
        await fill(first, 0)
        await getting
    assert not list(first.keys())


class SlowToDelete(GatedTier):
    """Calls go at once; deletes wait to be let go."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(99):
            self.go.release()
        self.go_delete = asyncio.Event()

    async def delete(self, key: ObjectKey) -> bool:
        await self.go_delete.wait()
        return await super().delete(key)


async def test_nothing_is_loaded_or_copied_while_its_delete_is_under_way() -> None:
    first, lower = memory(), SlowToDelete()
    await fill(lower, 0)
    store = make_store(first, lower)
    lower.began.clear()
    deleting = asyncio.create_task(store.delete([key_of(0), key_of(1)]))
    await settle()
    assert await get(store, 0) is None  # the lower tier still has it
    await store.put(key_of(1), forge(key_of(1)))  # comes after the delete, so it stays
    assert (await store.flush([key_of(1)], timeout_s=0.01)).durable == 0
    assert lower.began == []
    lower.go_delete.set()
    assert await deleting == 1
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == [] and await get(store, 1) == forge(key_of(1))
    assert await store.flush([key_of(1)], timeout_s=5.0) == FlushResult(1, 0, 0)


async def test_a_delete_during_a_copy_wins() -> None:
    first, lower = memory(), GatedTier()
    store = make_store(first, lower)
    await store.put(key_of(0), forge(key_of(0)))
    flushing = asyncio.create_task(store.flush([key_of(0)], timeout_s=5.0))
    await settle()
    assert lower.began
    await store.delete([key_of(0)])
    lower.go.release()
    await settle()
    assert await flushing == FlushResult(0, 1, 0)
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == [] and not list(lower.keys())
    assert not reserved_bytes(first)


async def test_a_delete_wins_at_every_step_of_a_copy() -> None:
    for steps in range(25):
        first, lower = memory(), memory("lower")
        store = make_store(first, lower)
        await store.put(key_of(0), forge(key_of(0)))
        flushing = asyncio.create_task(store.flush([key_of(0)], timeout_s=5.0))
        for _ in range(steps):
            await asyncio.sleep(0)
        await store.delete([key_of(0)])
        assert store.leading_run(NAMESPACE, 0, BLOCKS) == []
        await flushing
        await until(lambda store=store: store.stats()["deletes_outstanding"] == 0)
        assert not list(first.keys()) and not list(lower.keys()) and not reserved_bytes(first), steps


async def test_a_copy_that_lands_after_its_delete_is_erased() -> None:
    first, deaf = memory(), DeafTier()
    store = make_store(first, TierChannel(deaf, policy=ChannelPolicy(settle_s=0.001)))
    await store.put(key_of(0), forge(key_of(0)))
    flushing = asyncio.create_task(store.flush([key_of(0)], timeout_s=0.02))
    await settle()
    await store.delete([key_of(0)])
    await flushing
    assert first.accounting()["quarantined"] == SIZE  # the tier still reads it
    deaf.go.set()
    await settle()
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == []
    await until(lambda: store.stats()["deletes_outstanding"] == 0)
    assert not list(deaf.keys()) and not reserved_bytes(first)


async def test_a_tier_that_cannot_be_reached_owes_the_delete_and_serves_nothing_meanwhile() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    await fill(lower, 0, 1, 2)
    store = make_store(first, lower, retry_s=0.001)
    lower.arm("delete", Fault.REFUSE, times=3)
    await store.delete([key_of(1)])
    assert store.stats()["deletes_outstanding"] == 1
    assert store.leading_run(NAMESPACE, 0, BLOCKS) == [("lower", 1)]
    assert await load(store, BLOCKS) == 1 and await get(store, 1) is None
    await until(lambda: store.stats()["deletes_outstanding"] == 0)
    assert await read(lower, key_of(1)) is None


async def test_an_object_stored_again_after_its_delete_stays() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    await fill(lower, 0)
    store = make_store(first, lower, retry_s=0.001)
    lower.arm("delete", Fault.REFUSE, times=2)
    await store.delete([key_of(0)])
    await store.put(key_of(0), forge(key_of(0)))
    assert await store.flush([key_of(0)], timeout_s=5.0) == FlushResult(1, 0, 0)
    await until(lambda: store.stats()["deletes_outstanding"] == 0)
    assert await read(lower, key_of(0)) == forge(key_of(0))


# --- ends ------------------------------------------------------------------------------------------------------------


async def test_closing_says_what_was_copied_and_what_was_left() -> None:
    first, lower = memory(), memory("lower")
    store = make_store(first, lower)
    for index in range(3):
        await store.put(key_of(index), forge(key_of(index)))
    assert await store.aclose(5.0) == DrainResult(copied=3, left=0)
    assert await store.aclose(5.0) == DrainResult(copied=0, left=0)
    for call in (get(store, 0), load(store, BLOCKS), store.put(key_of(5), b"x")):
        with pytest.raises(TierClosed):
            await call
    await first.get_into(key_of(0), bytearray(SIZE), timeout_s=1.0)  # the tiers are their owners' to close


async def test_closing_ends_by_its_deadline() -> None:
    first, lower = memory(), Faulty(memory("lower"))
    store = make_store(first, lower)
    for index in range(3):
        await store.put(key_of(index), forge(key_of(index)))
    lower.arm("put", Fault.HANG, times=9)
    drained = await store.aclose(0.01)
    assert drained == DrainResult(copied=0, left=3)
    assert balanced(first) and not reserved_bytes(first)


async def test_closing_in_the_middle_leaks_nothing() -> None:
    first, lower = memory(), GatedTier()
    for index in range(4):
        await MemoryTier.put(lower, key_of(index), forge(key_of(index)), timeout_s=1.0)
    store = make_store(first, lower, write_policy="clean_ahead")
    await store.put(key_of(9), forge(key_of(9)))
    loading = asyncio.create_task(load(store, BLOCKS[:4]))
    await settle()
    assert first.accounting()["reserved"] > 0
    await store.aclose(0.01)
    assert await loading == 0
    await settle()
    assert balanced(first) and not reserved_bytes(first)
    assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} == set()


async def test_cancellation_passes_through_every_call() -> None:
    first, lower = memory(), GatedTier()
    await MemoryTier.put(lower, key_of(0), forge(key_of(0)), timeout_s=1.0)
    store = make_store(first, lower, write_policy="write_through")
    calls = [
        asyncio.create_task(get(store, 0)),
        asyncio.create_task(load(store, BLOCKS[:1])),
        asyncio.create_task(store.put(key_of(1), forge(key_of(1)))),
        asyncio.create_task(store.flush([key_of(1)], timeout_s=5.0)),
    ]
    await settle()
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    await store.aclose(0.01)
    assert balanced(first) and not reserved_bytes(first)


async def test_explain_tells_where_an_object_is_or_why_it_is_not() -> None:
    first, lower = memory(room_for=2), memory("lower")
    store = make_store(first, lower)
    for index in range(3):
        await store.put(key_of(index), forge(key_of(index)))
    assert store.explain(key_of(2))["tiers"] == ["first"] and store.explain(key_of(2))["waits_to_be_copied"]
    assert store.explain(key_of(0))["gone"] == "evicted"
    assert store.explain(key_of(9))["gone"] == "never stored"
    await store.flush([key_of(2)], timeout_s=5.0)
    told = store.explain(key_of(2))
    assert told["tiers"] == ["first", "lower"] and told["gone"] is None and not told["waits_to_be_copied"]


async def test_what_is_remembered_for_explain_is_bounded() -> None:
    store = make_store(memory(), explain_entries=4)
    for index in range(16):
        await store.put(key_of(index), forge(key_of(index)))
    assert len(store._ledger._last) == 4
