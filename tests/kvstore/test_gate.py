"""Owners take turns: whoever floods a queue waits behind itself, and nobody else does."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.channel import ChannelPolicy, TierBusy, TierChannel
from forebay.kvstore.gate import Gate, Lane, Turns
from forebay.kvstore.writebehind import ByteBudget
from tests.contract.tier_contract import key_of
from tests.kvstore.fakes import FakeTime, GatedTier, settle


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=200))
def test_every_waiting_owner_is_served_within_as_many_grants_as_owners_wait(steps: list[int | None]) -> None:
    turns: Turns[tuple[int, int]] = Turns()
    waiting: list[tuple[int, int]] = []
    rivals: dict[int, set[int]] = {}  # by owner: who else waited at some time since it was served last
    grants: Counter[int] = Counter()  # by owner: grants since then
    for number, owner in enumerate([*steps, *[None] * len(steps)]):
        if owner is not None:
            turns.add(owner, (owner, number))
            waiting.append((owner, number))
        elif waiting:
            got = turns.pop()
            assert got == next(item for item in waiting if item[0] == got[0])  # in order within an owner
            waiting.remove(got)
            grants.update({each for each, _ in waiting})
            grants[got[0]] = 0
            rivals[got[0]] = set()
        owners = {each for each, _ in waiting}
        for each in owners:
            rivals.setdefault(each, set()).update(owners - {each})
            assert grants[each] <= len(rivals[each])
        assert len(turns) == len(waiting) and sum(turns.of(each) for each in owners) == len(waiting)
    assert not turns


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.integers(1, 8))
def test_a_full_queue_evens_out_whoever_came_first(calls: list[tuple[int, bool]], bound: int) -> None:
    turns: Turns[tuple[int, int]] = Turns()
    for number, (owner, leaves) in enumerate(calls):
        if leaves and turns:
            turns.pop()
        if len(turns) < bound:
            turns.add(owner, (owner, number))
            continue
        before = {each: turns.of(each) for each in range(4)}
        gone = turns.pop_newest_of_longest(owner)
        if gone is None:
            assert max(before.values()) <= before[owner] + 1
        else:
            assert before[gone[0]] == max(before.values()) > before[owner] + 1
            turns.add(owner, (owner, number))
        assert len(turns) == bound


async def test_one_load_of_another_tenant_waits_for_one_grant_not_for_the_flood() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=1))
    calls = []
    for index in range(50):
        calls.append(asyncio.create_task(channel.get_into(key_of(index), bytearray(1), timeout_s=5.0, owner="flood")))
    await settle()
    calls.append(asyncio.create_task(channel.get_into(key_of(99), bytearray(1), timeout_s=5.0, owner="calm")))
    for _ in calls:
        await settle()
        tier.go.release()
    await asyncio.gather(*calls)
    # One runs, and the flood's next was first in line before the other came.
    assert tier.began.index("get 99") <= 2


async def test_a_flood_of_stores_gives_up_its_own_place_in_a_full_queue() -> None:
    tier = GatedTier()
    channel = TierChannel(tier, policy=ChannelPolicy(concurrency=1, store_concurrency=1, store_queue=4))

    def put(index: int, owner: str) -> asyncio.Task[None]:
        return asyncio.create_task(channel.put(key_of(index), b"x", timeout_s=5.0, owner=owner))

    flood = [put(index, "flood") for index in range(5)]  # one runs, four wait
    await settle()
    calm = [put(index, "calm") for index in (10, 11, 12)]
    await settle()
    # The newest two of the flood made way; the third would have left the flood with fewer than the other.
    assert [type(call.exception()) for call in flood[3:]] == [TierBusy, TierBusy]
    assert type(calm[2].exception()) is TierBusy
    assert channel.stats()["stores_dropped"] == 3 and channel.stats()["stores_waiting"] == 4
    with pytest.raises(TierBusy):
        await put(20, "flood")
    for _ in range(5):
        tier.go.release()
    await asyncio.gather(*flood[:3], *calm[:2])
    assert channel.stats()["running"] == channel.stats()["outstanding_bytes"] == 0 and channel.healthy


async def test_a_call_that_made_way_and_was_cancelled_in_the_same_step_gives_back_no_place_twice() -> None:
    gate = Gate(1, 1)
    assert gate.try_enter(Lane.LOAD)
    waiting = [asyncio.create_task(gate.enter(Lane.LOAD, "flood")) for _ in range(2)]
    await settle()
    assert gate.make_way(Lane.LOAD, "calm")
    waiting[1].cancel()
    await asyncio.wait(waiting[1:])
    assert gate.running == 1 and gate.waiting(Lane.LOAD) == 1
    gate.leave(Lane.LOAD)
    assert await waiting[0] and gate.running == 1


async def test_copies_of_owners_share_the_budget_however_many_of_one_wait() -> None:
    time = FakeTime()
    budget = ByteBudget(100.0, 100.0, time.clock, time.sleep)
    copied: Counter[str] = Counter()

    async def work(owner: str) -> None:
        while copied.total() < 60:
            await budget.solvent(owner)
            budget.spend(100)
            copied[owner] += 1

    workers = [asyncio.create_task(work("flood")) for _ in range(32)] + [asyncio.create_task(work("calm"))]
    start_s = time.now_s
    while copied.total() < 60:
        await time.pass_by(0.5)
    assert abs(copied["calm"] - copied["flood"]) <= 3  # one worker got as much as thirty-two
    assert time.now_s - start_s >= 57  # and the rate holds over both together
    for worker in workers:
        worker.cancel()
    await asyncio.wait(workers)
