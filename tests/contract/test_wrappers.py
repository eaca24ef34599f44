"""Wrapped tiers keep the laws of the tier inside, show its abilities and no others, and do what they are named for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from forebay.kvstore.errors import TierFull, TierTimeout, TierUnavailable
from forebay.kvstore.tier import SupportsListing, SupportsPresence, SupportsProbe, SupportsSlots, Tier
from forebay.tiers.memory import MemoryTier
from forebay.tiers.wrappers import Fault, Faulty, Metered, Throttled, Wrapper
from tests.contract.test_memory import MemoryMedium
from tests.contract.tier_contract import ROOM_FOR, SIZE, TierContract, forge, key_of, read


class WrappedContract(TierContract):
    @pytest.fixture
    def raw(self, tier: Wrapper) -> MemoryMedium:
        inner: Tier = tier
        while isinstance(inner, Wrapper):
            inner = inner.inner
        assert isinstance(inner, MemoryTier)
        return MemoryMedium(inner)


class TestThrottledMemoryTier(WrappedContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return Throttled(MemoryTier("memory", ROOM_FOR * SIZE), latency_s=1e-5, bandwidth_bytes_per_s=1e9)


class TestStackedMemoryTier(WrappedContract):
    @pytest.fixture
    def tier(self) -> Tier:
        return Metered(Faulty(Throttled(MemoryTier("memory", ROOM_FOR * SIZE))))


class ProbedTier(MemoryTier):
    """A tier that must be asked with I/O."""

    leading_run = None  # type: ignore[assignment]

    async def probe(self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float) -> int:
        return MemoryTier.leading_run(self, namespace, group, blocks)


class PlainTier:
    """The four calls and nothing else."""

    name, capacity_bytes = "plain", 1

    async def put(self, key: object, data: object, *, timeout_s: float) -> None: ...
    async def get_into(self, key: object, out: object, *, timeout_s: float) -> int | None: ...
    async def delete(self, key: object) -> bool:
        return False

    async def aclose(self) -> None: ...


class FakeTime:
    """A clock that only sleeping moves."""

    now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("wrapper", [Wrapper, Throttled, Faulty, Metered])
def test_a_wrapper_has_the_abilities_of_the_tier_inside_and_no_others(wrapper: type[Wrapper]) -> None:
    abilities = (SupportsPresence, SupportsProbe, SupportsListing, SupportsSlots)
    for inner in (MemoryTier("memory", 1), PlainTier()):
        wrapped = wrapper(inner)
        assert isinstance(wrapped, Tier)
        assert [isinstance(wrapped, each) for each in abilities] == [isinstance(inner, each) for each in abilities]
    assert isinstance(wrapper(ProbedTier("probed", 1)), SupportsProbe)


async def test_throttled_calls_queue_for_the_device() -> None:
    time = FakeTime()
    tier = Throttled(
        MemoryTier("memory", ROOM_FOR * SIZE),
        latency_s=0.5,
        bandwidth_bytes_per_s=SIZE,
        clock=time.clock,
        sleep=time.sleep,
    )
    await tier.put(key_of(1), forge(key_of(1)), timeout_s=10.0)
    assert time.now_s == 1.5  # half a second of latency, a second of transfer
    await read(tier, key_of(1))
    assert time.now_s == 3.0


async def test_a_throttled_put_that_runs_out_of_time_stores_nothing() -> None:
    time = FakeTime()
    tier = Throttled(MemoryTier("memory", ROOM_FOR * SIZE), latency_s=9.0, clock=time.clock, sleep=time.sleep)
    with pytest.raises(TierTimeout):
        await tier.put(key_of(1), forge(key_of(1)), timeout_s=1.0)
    assert time.now_s == 1.0
    assert await read(tier.inner, key_of(1)) is None


async def test_an_armed_fault_happens_once() -> None:
    tier = Faulty(MemoryTier("memory", ROOM_FOR * SIZE))
    key = key_of(1)
    tier.arm("put", Fault.REFUSE)
    with pytest.raises(TierUnavailable):
        await tier.put(key, forge(key), timeout_s=1.0)
    tier.arm("put", Fault.FULL)
    with pytest.raises(TierFull):
        await tier.put(key, forge(key), timeout_s=1.0)
    assert await read(tier, key) is None
    tier.arm("put", Fault.LOSE_ANSWER)
    with pytest.raises(TierUnavailable):
        await tier.put(key, forge(key), timeout_s=1.0)
    assert await read(tier, key) == forge(key)
    tier.arm("get_into", Fault.FLIP_BIT)
    damaged = await read(tier, key)
    assert damaged is not None
    differing = sum((a ^ b).bit_count() for a, b in zip(damaged, forge(key), strict=True))
    assert differing == 1 and await read(tier, key) == forge(key)
    assert sum(tier.injected.values()) == 4


async def test_a_hanging_call_ends_only_by_cancellation() -> None:
    tier = Faulty(MemoryTier("memory", ROOM_FOR * SIZE))
    tier.arm("get_into", Fault.HANG)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await tier.get_into(key_of(1), bytearray(SIZE), timeout_s=0.0)


def test_a_fault_that_a_call_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError):
        Faulty(MemoryTier("memory", 1)).arm("put", Fault.FLIP_BIT)


async def test_random_faults_replay_from_their_seed() -> None:
    async def story(seed: int) -> list[str]:
        tier = Faulty(MemoryTier("memory", ROOM_FOR * SIZE), seed=seed, rates={Fault.REFUSE: 0.3, Fault.BREAK: 0.1})
        told = []
        for index in range(60):
            try:
                await tier.put(key_of(index % 4), b"x", timeout_s=1.0)
                told.append("ok")
            except (TierUnavailable, RuntimeError) as trouble:
                told.append(type(trouble).__name__)
        return told

    assert await story(7) == await story(7) != await story(8)
    assert set(await story(7)) == {"ok", "TierUnavailable", "RuntimeError"}


async def test_metered_counts_calls_bytes_misses_and_errors() -> None:
    faulty = Faulty(MemoryTier("memory", ROOM_FOR * SIZE))
    tier = Metered(faulty)
    await tier.put(key_of(1), forge(key_of(1)), timeout_s=1.0)
    await read(tier, key_of(1))
    await read(tier, key_of(2))
    faulty.down = True
    with pytest.raises(TierUnavailable):
        await read(tier, key_of(1))
    get, put = tier.meters["get_into"], tier.meters["put"]
    assert (put.calls, put.bytes) == (1, SIZE)
    assert (get.calls, get.bytes, get.misses, get.errors["TierUnavailable"]) == (3, SIZE, 1, 1)
