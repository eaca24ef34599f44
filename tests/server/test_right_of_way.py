"""Stores give way to other engines' loads, in turns, and never for ever."""

from __future__ import annotations

import asyncio

import pytest

from forebay.server import right_of_way
from forebay.server.right_of_way import RECENT_S, RightOfWay, Turn


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_only_another_engines_recent_load_makes_stores_wait() -> None:
    clock = Clock()
    way = RightOfWay(clock=clock)
    assert not way.gives_way("writer")
    way.loaded("writer")
    assert not way.gives_way("writer"), "its own load is no reason to slow its own stores"
    way.loaded("reader")
    way.loaded("writer")
    assert way.gives_way("writer"), "the reader's load is recent, whoever loaded last"
    assert way.gives_way("reader")
    clock.now += RECENT_S
    assert not way.gives_way("writer")


async def test_turns_are_limited_and_go_round_robin_by_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right_of_way, "_LEAST_TURN_S", 60.0)
    way, served = RightOfWay(at_once=1), list[str]()
    running = most = 0

    async def store(tenant: str) -> None:
        nonlocal running, most
        turn = await way.turn(tenant, 1)
        running, served[len(served) :] = running + 1, [tenant]
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        turn.end()

    async with asyncio.TaskGroup() as group:
        for tenant in ["flood"] * 20 + ["other"] * 3:
            group.create_task(store(tenant))
    assert most == 1
    assert sorted(served) == ["flood"] * 20 + ["other"] * 3
    assert served[:7].count("other") == 3, served
    assert way.stats() == {"waiting": 0, "waits_total": 22}


async def test_a_writer_that_never_commits_keeps_nobody_waiting_for_ever() -> None:
    way = RightOfWay(at_once=1)
    await way.turn("tenant", 1)  # and nothing more of it
    async with asyncio.timeout(10):
        (await way.turn("tenant", 1)).end()


async def test_a_wait_ends_even_if_no_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right_of_way, "_LEAST_TURN_S", 60.0)
    monkeypatch.setattr(right_of_way, "MAX_WAIT_S", 0.01)
    way = RightOfWay(at_once=1)
    first = await way.turn("tenant", 1)
    late = await way.turn("tenant", 1)  # without the first one's end
    for turn in (first, first, late):
        turn.end()  # a second end counts nothing
    await drained(way)


async def test_a_turn_that_comes_in_the_step_in_which_the_wait_ends_counts_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(right_of_way, "_LEAST_TURN_S", 60.0)
    monkeypatch.setattr(right_of_way, "MAX_WAIT_S", 0.0)  # runs out in the step after the wait begins
    way = RightOfWay(at_once=1)
    await way.turn("tenant", 1)
    late = asyncio.create_task(way.turn("tenant", 1))
    await asyncio.sleep(0)
    way._next()  # the first one's turn and pause end now
    (await late).end()
    await drained(way)


async def test_a_waiter_that_goes_away_takes_no_turn_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right_of_way, "_LEAST_TURN_S", 60.0)
    way = RightOfWay(at_once=1)
    first = await way.turn("tenant", 1)
    waiting = [asyncio.create_task(way.turn("tenant", 1)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    first.end()
    turns: list[Turn] = []
    for task in waiting[1:]:
        turns.append(await asyncio.wait_for(task, 10))
        turns[-1].end()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    await drained(way)


async def drained(way: RightOfWay) -> None:
    """All turns are free again: as many as there are can be had at once, without a wait."""
    waits = way.waits
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if not way.busy:
            break
    (await way.turn("tenant", 1)).end()
    assert way.waits == waits
