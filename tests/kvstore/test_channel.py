"""The channel bounds everything: time, queues, and how long a broken tier is believed in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from forebay.kvstore.breaker import Breaker, BreakerPolicy, BreakerState
from forebay.kvstore.channel import ChannelPolicy, TierBusy, TierChannel
from forebay.kvstore.errors import (
    BlockCorrupt,
    TierClosed,
    TierFull,
    TierTimeout,
    TierUnavailable,
)
from forebay.kvstore.gate import Gate, Lane
from forebay.kvstore.measure import LoadMeter
from forebay.kvstore.tier import ObjectKey, WritableBuffer
from forebay.tiers.memory import MemoryTier
from forebay.tiers.wrappers import Fault, Faulty
from tests.contract.tier_contract import NAMESPACE, SIZE, forge, key_of
from tests.kvstore.fakes import DeafTier, FakeTime, GatedTier, settle


def faulty_channel(time: FakeTime | None = None, **policy: float) -> tuple[TierChannel, Faulty]:
    faulty = Faulty(MemoryTier("memory", 64 * SIZE))
    time = time or FakeTime()
    breaker = BreakerPolicy(open_after_failures=3, probe_after_s=1.0, probe_max_s=8.0)
    settings = ChannelPolicy(breaker=breaker, fair_timeout_s=0.0, **policy)  # type: ignore[arg-type]
    return TierChannel(faulty, policy=settings, clock=time.clock, sleep=time.sleep), faulty


async def get(channel: TierChannel, index: int, timeout_s: float = 5.0) -> int | None:
    return await channel.get_into(key_of(index), bytearray(SIZE), timeout_s=timeout_s)


async def break_open(channel: TierChannel, faulty: Faulty) -> None:
    faulty.arm("get_into", Fault.REFUSE, times=3)
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            await get(channel, 1)


# --- deadlines -------------------------------------------------------------------------------------------------------


async def test_a_tier_that_ignores_its_timeout_is_cut_off() -> None:
    channel, faulty = faulty_channel()
    for call in ("get_into", "put", "delete"):
        faulty.arm(call, Fault.HANG)
    with pytest.raises(TierTimeout):
        await get(channel, 1, timeout_s=0.01)
    with pytest.raises(TierTimeout):
        await channel.put(key_of(1), b"x", timeout_s=0.01)
    with pytest.raises(TierTimeout):
        await channel.delete(key_of(1), timeout_s=0.01)
    assert channel.stats()["timeouts"] == 3 and channel.stats()["stuck"] == 0
    assert channel.stats()["running"] == channel.stats()["outstanding_bytes"] == 0
    await channel.aclose()


async def test_a_call_that_goes_on_after_its_deadline_keeps_its_buffer_until_it_ends() -> None:
    tier = DeafTier()
    await MemoryTier.put(tier, key_of(1), forge(key_of(1)), timeout_s=1.0)
    channel = TierChannel(tier, policy=ChannelPolicy(settle_s=0.01))
    out, released = bytearray(SIZE), []
    with pytest.raises(TierTimeout):
        await channel.get_into(key_of(1), out, timeout_s=0.01, release=lambda: released.append(bytes(out)))
    assert not released and channel.stats()["stuck"] == 1 and channel.stats()["running"] == 1
    tier.go.set()
    await settle()
    assert released == [forge(key_of(1))]  # once, and only after the late write
    assert channel.stats()["running"] == 0


async def test_release_comes_exactly_once_before_the_call_ends() -> None:
    released: list[int] = []

    def release() -> None:
        released.append(1)

    channel, faulty = faulty_channel()
    await channel.put(key_of(1), forge(key_of(1)), timeout_s=1.0)
    faulty.arm("get_into", Fault.REFUSE)
    faulty.arm("get_into", Fault.HANG)
    for expected in (TierUnavailable, TierTimeout, None):
        released.clear()
        try:
            await channel.get_into(key_of(1), bytearray(SIZE), timeout_s=0.01, release=release)
        except (TierUnavailable, TierTimeout) as trouble:
            assert isinstance(trouble, expected or ())
        assert released == [1]
    await channel.aclose()
    with pytest.raises(TierClosed):
        await channel.get_into(key_of(1), bytearray(SIZE), timeout_s=1.0, release=release)
    assert released == [1, 1]


async def test_a_cancelled_call_is_cancelled_at_once_and_gives_everything_back() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=1))
    calls = [asyncio.create_task(get(channel, index)) for index in range(3)]  # one runs, two wait
    await settle()
    assert channel.stats()["loads_waiting"] == 2
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    await settle()
    stats = channel.stats()
    assert stats["running"] == stats["loads_waiting"] == stats["outstanding_bytes"] == 0
    tier.go.release()
    assert await get(channel, 1) is None


# --- queues ----------------------------------------------------------------------------------------------------------


async def test_loads_go_before_stores() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=1, store_concurrency=1))
    calls = [asyncio.create_task(channel.put(key_of(0), b"x", timeout_s=5.0))]
    await settle()
    for index in (1, 2):
        calls.append(asyncio.create_task(channel.put(key_of(index), b"x", timeout_s=5.0)))
    for index in (3, 4):
        calls.append(asyncio.create_task(get(channel, index)))  # type: ignore[arg-type]
    for _ in calls:
        await settle()
        tier.go.release()
    await asyncio.gather(*calls)
    assert tier.began == ["put 0", "get 3", "get 4", "put 1", "put 2"]


async def test_stores_never_take_all_places() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=3, store_concurrency=2))
    calls = [asyncio.create_task(channel.put(key_of(index), b"x", timeout_s=5.0)) for index in range(3)]
    await settle()
    calls.append(asyncio.create_task(get(channel, 9)))  # type: ignore[arg-type]
    await settle()
    assert tier.began == ["put 0", "put 1", "get 9"]
    for _ in calls:
        tier.go.release()
    await asyncio.gather(*calls)


async def test_a_full_store_queue_drops_and_counts_and_never_blocks() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=1, store_concurrency=1, store_queue=2))
    calls = [asyncio.create_task(channel.put(key_of(index), b"x", timeout_s=5.0)) for index in range(3)]
    await settle()
    for index in range(3, 6):
        with pytest.raises(TierBusy):
            await channel.put(key_of(index), b"x", timeout_s=5.0)
    assert channel.stats()["stores_dropped"] == 3 and channel.healthy
    for _ in calls:
        tier.go.release()
    await asyncio.gather(*calls)


async def test_waiting_for_a_turn_has_a_deadline_and_is_no_fault_of_the_tier() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=1, fair_timeout_s=0.0))
    running = asyncio.create_task(get(channel, 1))
    await settle()
    for _ in range(10):
        with pytest.raises(TierTimeout):
            await get(channel, 2, timeout_s=0.001)
    assert channel.stats()["queue_timeouts"] == 10 and channel.healthy
    tier.go.release()
    await running


# --- breaker ---------------------------------------------------------------------------------------------------------


async def test_a_failing_tier_is_no_longer_asked_until_a_probe_passes() -> None:
    time = FakeTime()
    channel, faulty = faulty_channel(time)
    await channel.put(key_of(1), forge(key_of(1)), timeout_s=1.0)
    faulty.down = True
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            await get(channel, 1)
    assert not channel.healthy and not channel.estimate().healthy
    asked = sum(faulty.injected.values())
    with pytest.raises(TierUnavailable):
        await get(channel, 1)
    assert channel.leading_run(NAMESPACE, 0, [key_of(1).block]) == 0
    assert sum(faulty.injected.values()) == asked, "an open breaker must not touch the tier"
    await time.pass_by(1.0)  # a probe, which fails: the next one comes after twice the time
    assert sum(faulty.injected.values()) == asked + 1 and not channel.healthy
    faulty.down = False
    await time.pass_by(1.0)
    assert not channel.healthy
    await time.pass_by(1.0)
    assert channel.healthy and await get(channel, 1) == SIZE
    assert channel.leading_run(NAMESPACE, 0, [key_of(1).block]) == 1


async def test_calls_that_wait_when_the_breaker_opens_are_not_sent() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=1))
    calls = [asyncio.create_task(get(channel, index)) for index in range(3)]
    await settle()
    channel.trip("a test")
    tier.go.release()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert ended[0] is None and [type(each) for each in ended[1:]] == [TierUnavailable] * 2
    assert tier.began == ["get 0"] and channel.stats()["running"] == 0
    await channel.aclose()


async def test_a_turn_given_to_a_call_that_was_just_cancelled_is_passed_on() -> None:
    gate = Gate(1, 1)
    assert gate.try_enter(Lane.LOAD)
    first, second = asyncio.create_task(gate.enter(Lane.LOAD, "a")), asyncio.create_task(gate.enter(Lane.STORE, "a"))
    await settle()
    gate.leave(Lane.LOAD)  # it is the first's turn, and before it can notice it is cancelled
    first.cancel()
    await second
    assert gate.running == 1 and gate.waiting(Lane.LOAD) == 0


async def test_a_hanging_probe_does_not_hang_the_breaker() -> None:
    time = FakeTime()
    channel, faulty = faulty_channel(time, probe_timeout_s=0.01)
    await break_open(channel, faulty)
    faulty.arm("get_into", Fault.HANG)
    await time.pass_by(1.0)
    await asyncio.sleep(0.03)
    await time.pass_by(2.0)
    assert channel.healthy and channel.stats()["breaker_probes"] == 2


async def test_every_kind_of_trouble_counts_and_facts_do_not() -> None:
    for fault in (Fault.REFUSE, Fault.BREAK, Fault.HANG, Fault.LOSE_ANSWER):
        channel, faulty = faulty_channel()
        faulty.arm("get_into", fault, times=3)
        for _ in range(3):
            with pytest.raises((TierUnavailable, TierTimeout)):
                await get(channel, 1, timeout_s=0.01)
        assert not channel.healthy, fault
        await channel.aclose()
    channel, faulty = faulty_channel()
    faulty.arm("put", Fault.FULL, times=9)
    for _ in range(9):
        with pytest.raises(TierFull):
            await channel.put(key_of(1), b"x", timeout_s=1.0)
    await channel.put(key_of(1), b"xx", timeout_s=1.0)
    for _ in range(9):
        with pytest.raises(ValueError):
            await channel.get_into(key_of(1), bytearray(1), timeout_s=1.0)
        assert await get(channel, 3) is None
    assert channel.healthy and channel.stats()["full"] == 9


async def test_an_error_of_no_tier_family_is_translated_with_its_cause() -> None:
    channel, faulty = faulty_channel()
    faulty.arm("get_into", Fault.BREAK)
    with pytest.raises(TierUnavailable) as caught:
        await get(channel, 1)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert channel.stats()["unexpected_errors"] == 1


async def test_an_answer_of_the_wrong_type_or_size_is_trouble_not_data() -> None:
    class Nonsense(MemoryTier):
        answer: object = None

        async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
            return self.answer  # type: ignore[return-value]

        def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
            return self.answer  # type: ignore[return-value]

    tier = Nonsense("memory", 1)
    channel = TierChannel(tier)
    for answer in (-1, SIZE + 1, "whole"):
        tier.answer = answer
        with pytest.raises(TierUnavailable):
            await get(channel, 1)
        tier.answer = answer if answer != SIZE + 1 else 2
        assert channel.leading_run(NAMESPACE, 0, [key_of(1).block]) == 0
    await channel.aclose()


async def test_a_tier_that_keeps_damaging_objects_is_taken_out_of_use() -> None:
    channel, _ = faulty_channel()
    for _ in range(3):
        channel.report_corrupt()
    assert not channel.healthy and channel.stats()["corrupt"] == 3
    await channel.aclose()


async def test_corruption_that_the_tier_reports_passes_through() -> None:
    class Checking(MemoryTier):
        async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
            raise BlockCorrupt("checksum", tier=self.name, key=key)

    channel = TierChannel(Checking("memory", 1))
    with pytest.raises(BlockCorrupt):
        await get(channel, 1)
    assert channel.stats()["corrupt"] == 1


async def test_a_short_deadline_is_not_held_against_the_tier() -> None:
    faulty = Faulty(MemoryTier("memory", SIZE))
    channel = TierChannel(faulty, policy=ChannelPolicy(fair_timeout_s=1.0))
    faulty.arm("get_into", Fault.HANG, times=20)
    for _ in range(20):
        with pytest.raises(TierTimeout):
            await get(channel, 1, timeout_s=0.001)
    assert channel.healthy


def test_the_breaker_opens_on_a_failure_rate_too() -> None:
    time = FakeTime()
    breaker = Breaker(BreakerPolicy(open_after_failures=5, open_at_rate=0.5, window=16), time.clock)
    for _ in range(3):
        breaker.success()
        breaker.failure()
    assert breaker.closed  # 6 calls are too few to judge by
    breaker.success()
    breaker.failure()
    assert not breaker.closed


def test_the_wait_for_a_probe_doubles_and_only_real_traffic_resets_it() -> None:
    time = FakeTime()
    breaker = Breaker(BreakerPolicy(open_after_failures=2, probe_after_s=1.0, probe_max_s=4.0), time.clock)
    waits = []
    for _ in range(4):  # each time a probe passes, then the traffic fails again
        breaker.success()
        breaker.failure()
        breaker.success()
        breaker.failure()
        breaker.failure()
        waits.append(breaker.probe_at_s - time.now_s)
        assert not breaker.begin_probe()
        time.now_s = breaker.probe_at_s
        assert breaker.begin_probe() and breaker.state is BreakerState.HALF_OPEN
        assert not breaker.begin_probe(), "one probe at a time"
        breaker.success()
        assert breaker.closed
    assert waits == [1.0, 2.0, 4.0, 4.0]
    breaker.success()
    breaker.success()
    breaker.trip()
    assert breaker.probe_at_s - time.now_s == 1.0


def test_a_cancelled_probe_is_no_verdict() -> None:
    time = FakeTime()
    breaker = Breaker(BreakerPolicy(), time.clock)
    breaker.trip()
    time.now_s = breaker.probe_at_s
    assert breaker.begin_probe()
    breaker.abandon()
    assert not breaker.closed and breaker.begin_probe()


# --- measured costs --------------------------------------------------------------------------------------------------


def test_costs_are_the_prior_until_something_was_measured() -> None:
    meter = LoadMeter(prior_latency_s=0.5, prior_bandwidth_bytes_per_s=7.0)
    assert (meter.latency_s(0.5), meter.bandwidth_bytes_per_s(4096)) == (0.5, 7.0)


def test_latency_and_bandwidth_of_a_device_are_told_apart() -> None:
    meter = LoadMeter(prior_latency_s=0.5, prior_bandwidth_bytes_per_s=7.0)
    for _ in range(50):
        meter.record(0, 0.001, 1)
        meter.record(2**20, 0.001 + 2**20 / 1e9, 1)
        meter.record(2**16, 0.001 + 2**16 / 2e8, 1)
    assert meter.latency_s(0.5) == pytest.approx(0.001)
    assert meter.bandwidth_bytes_per_s(2**20) == pytest.approx(1e9, rel=0.01)
    assert meter.bandwidth_bytes_per_s(2**16) == pytest.approx(2e8, rel=0.4)  # the floor under short transfers
    assert meter.bandwidth_bytes_per_s(2**21) == meter.bandwidth_bytes_per_s(2**20)


def test_calls_side_by_side_add_up_to_the_devices_bandwidth() -> None:
    meter = LoadMeter(prior_latency_s=0.0, prior_bandwidth_bytes_per_s=7.0)
    for _ in range(50):
        meter.record(2**20, 4 * 2**20 / 1e9, 4)
    assert meter.bandwidth_bytes_per_s() == pytest.approx(1e9)


def test_latency_quantiles_follow_the_last_calls() -> None:
    meter = LoadMeter(prior_latency_s=0.0, prior_bandwidth_bytes_per_s=1.0)
    for index in range(1000):
        meter.record(0, 9.0 if index < 872 else 0.1 if index % 10 == 0 else 0.001, 1)
    assert meter.latency_s(0.5) == 0.001 and meter.latency_s(0.95) == 0.1


async def test_the_estimate_shows_what_waits() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=2))
    calls = [asyncio.create_task(get(channel, index)) for index in range(5)]
    await settle()
    assert channel.estimate().queued_bytes == 5 * SIZE and channel.estimate().healthy
    for _ in calls:
        tier.go.release()
    await asyncio.gather(*calls)
    assert channel.estimate().queued_bytes == 0
