"""Tenants get even shares of the daemon's loop, however many sockets and long batches one of them has. No real times."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from forebay.server.rounds import SHARE_S, Rounds
from tests.kvstore.fakes import settle


async def until(done: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if done():
            return
        await asyncio.sleep(0)
    raise AssertionError("not after 10,000 turns of the loop")


class Socket:
    """Sockets whose frames never end; a turn of theirs takes `cost_s`."""

    def __init__(self, rounds: Rounds, owner: str, cost_s: float, log: list[str], turns: int) -> None:
        self.rounds, self.owner, self.cost_s, self.log, self.left = rounds, owner, cost_s, log, turns
        rounds.join(owner)

    def resume(self) -> None:
        if self.left and self.rounds.may_begin(self.owner, self.resume):
            self.left -= 1
            self.log.append(self.owner)
            self.rounds.spent(self.owner, self.cost_s)
            asyncio.get_running_loop().call_soon(self.resume)


async def test_one_socket_gets_as_many_turns_as_sixty_four_of_another_tenant() -> None:
    rounds, log = Rounds(), list[str]()
    sockets = [Socket(rounds, "flood", SHARE_S, log, 10) for _ in range(64)] + [
        Socket(rounds, "calm", SHARE_S, log, 10)
    ]
    for socket in sockets:
        socket.resume()
    await until(lambda: not sockets[-1].left)
    assert log.count("flood") <= log.count("calm") + 2
    await until(lambda: not any(socket.left for socket in sockets))  # nobody is forgotten
    assert Counter(log) == {"flood": 640, "calm": 10}


async def test_sockets_of_one_tenant_take_turns_with_one_another() -> None:
    rounds, log = Rounds(), list[str]()
    rounds.join("calm")
    sockets = [Socket(rounds, "flood", SHARE_S / 2, log, 20) for _ in range(8)]
    for socket in sockets:
        socket.resume()
    await until(lambda: len(log) >= 80)
    left = [socket.left for socket in sockets]
    assert max(left) - min(left) <= 1


async def test_a_tenant_alone_is_never_held_back() -> None:
    rounds, log = Rounds(), list[str]()
    sockets = [Socket(rounds, "only", 10 * SHARE_S, log, 2) for _ in range(8)]
    for socket in sockets:
        socket.resume()
    assert len(log) == 8
    await asyncio.sleep(0)
    assert len(log) == 16
    rounds.join("other")
    for socket in sockets:
        socket.left = 1
        socket.resume()
    assert len(log) == 17  # the first spent the share
    rounds.leave("other")
    await settle()
    assert len(log) == 24


async def test_long_batches_of_a_tenant_go_on_one_chunk_a_round() -> None:
    rounds, log = Rounds(), list[str]()
    for owner in ("flood", "calm"):
        rounds.join(owner)

    async def batch(owner: str) -> None:
        for _ in range(5):
            await rounds.turn(owner)
            log.append(owner)

    flood = [asyncio.create_task(batch("flood")) for _ in range(20)]
    await settle()
    before = len(log)
    await asyncio.create_task(batch("calm"))
    assert log[before:].count("flood") <= 7
    flood[0].cancel()  # while it waits: the others go on
    await asyncio.gather(*flood, return_exceptions=True)
    assert Counter(log)["calm"] == 5 and log.count("flood") >= 19 * 5


@given(
    sockets=st.lists(
        st.tuples(st.sampled_from("abcd"), st.floats(0.05, 3), st.integers(1, 6)), min_size=1, max_size=30
    ),
)
def test_nobody_waits_for_ever_and_no_tenant_passes_its_share_by_more_than_a_turn(
    sockets: list[tuple[str, float, int]],
) -> None:
    async def run() -> None:
        rounds, log = Rounds(), list[str]()
        rounds.join("one more")
        made = [Socket(rounds, owner, cost * SHARE_S, log, turns) for owner, cost, turns in sockets]
        for socket in made:
            socket.resume()
        budget = 1 + sum(turns for _, _, turns in sockets)
        for _ in range(3 * budget):
            before = {owner: sum(s.left * s.cost_s for s in made if s.owner == owner) for owner in "abcd"}
            await asyncio.sleep(0)
            for owner, left_s in before.items():
                mine = [s for s in made if s.owner == owner]
                spent_s = left_s - sum(s.left * s.cost_s for s in mine)
                # Two rounds may touch within one step of a test that is itself a step of the loop.
                assert spent_s <= 2 * (SHARE_S + max((s.cost_s for s in mine), default=0.0))
        assert not any(s.left for s in made)

    asyncio.run(run())
