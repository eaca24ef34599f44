"""The registry of sessions by itself: shares, ends, orphans, descriptors. Real processes: tests/faults/test_orphans.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from forebay.kvstore.errors import UnknownHandle
from forebay.kvstore.index import RowArray, Table
from forebay.server.sessions import Allocation, Registry, Session
from forebay.tiers.ram import RamTier

NAMESPACE = b"n" * 16
MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@dataclass
class World:
    """A ram tier, a registry with a clock of its own, and processes that sessions belong to."""

    tier: RamTier = field(default_factory=lambda: RamTier(capacity_bytes=4 * MIB, extent_bytes=MIB))
    now_s: float = 0.0
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = Registry(clock=lambda: self.now_s)
        self.domain = self.tier.domain("default/0")
        self.table: Table = self.domain.table(NAMESPACE, 0, 16 << 10)

    def process(self) -> subprocess.Popen[bytes]:
        self.processes.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return self.processes[-1]

    def session(self, pid: int | None = None, engine_id: str = "engine") -> Session:
        pid = os.getpid() if pid is None else pid
        session = Session(os.urandom(16), engine_id, 0, pid, 0, os.pidfd_open(pid), self.domain, close=lambda: None)
        self.registry.add(session)
        return session

    def allocate(self, session: Session, first: int, count: int = 4) -> Allocation:
        keys = [key(number) for number in range(first, first + count)]
        got = self.domain.allocate(self.table, keys, NAMESPACE, blocking=True)
        number = self.registry.number()
        allocation = Allocation(number, None, 0, got.rows, keys, NAMESPACE, 0, 0, self.now_s + 60)  # type: ignore[arg-type]
        session.allocations[number] = allocation
        return allocation

    def stored(self, session: Session, first: int, count: int = 4) -> RowArray:
        allocation = self.allocate(session, first, count)
        del session.allocations[allocation.number]
        self.domain.commit(self.table, allocation.rows)
        return allocation.rows

    def lease(self, session: Session, rows: RowArray, shares: int = 1) -> int:
        self.domain.lease(rows)
        return self.registry.lease(session, self.table, rows, shares, self.now_s + 60).number

    def held(self) -> tuple[int, int]:
        """(references, quarantined bytes) in the tier."""
        index = self.tier.index
        return int(index.refs[: index.high_water].sum()), self.tier.accounting().quarantined


@pytest.fixture
async def world() -> AsyncIterator[World]:
    descriptors = len(os.listdir("/proc/self/fd"))
    world = World()
    yield world
    for session in list(world.registry.sessions.values()):
        world.registry.end(session)
        session.pid = -1
    for orphan in list(world.registry.orphans):
        found = world.registry.orphans[orphan]
        settler = Session(os.urandom(16), "", 0, found.pid, found.uid, None, world.domain, close=lambda: None)
        world.registry.settle(settler, [orphan])
    world.tier.audit()
    assert world.held() == (0, 0)
    for process in world.processes:
        process.kill()
        process.communicate()
    await world.tier.aclose()
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_a_session_without_anything_ends_without_a_trace(world: World) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        world.registry.end(world.session())
    assert not world.registry.orphans and len(os.listdir("/proc/self/fd")) == before


async def test_leases_and_allocations_of_a_living_process_become_an_orphan_and_end_with_its_word(world: World) -> None:
    session = world.session()
    rows = world.stored(session, 0)
    world.lease(session, rows)
    world.allocate(session, 100)
    world.registry.end(session)
    stride = world.tier.class_of_table[0].stride
    assert world.registry.quarantined_bytes() == 8 * stride
    assert world.held() == (4, 4 * stride)
    later = world.session()
    assert world.registry.settle(later, [session.id, session.id, b"unknown"]) == 1
    assert world.held() == (0, 0) and world.registry.quarantined_bytes() == 0
    assert world.registry.counters.settled_by_client == 1


async def test_only_the_process_that_left_it_settles_an_orphan(world: World) -> None:
    session = world.session()
    world.allocate(session, 0)
    world.registry.end(session)
    other = world.session(world.process().pid)
    assert world.registry.settle(other, [session.id]) == 0
    stranger = world.session()
    stranger.uid = 1
    assert world.registry.settle(stranger, [session.id]) == 0
    assert world.held()[1] > 0


async def test_what_a_dead_process_held_is_free_at_once(world: World) -> None:
    process = world.process()
    session = world.session(process.pid)
    world.lease(session, world.stored(session, 0))
    world.allocate(session, 100)
    process.kill()
    process.wait()
    world.registry.end(session)
    assert world.held() == (0, 0) and not world.registry.orphans


async def test_objects_deleted_while_an_orphan_leases_them_are_free_when_it_settles(world: World) -> None:
    session = world.session()
    rows = world.stored(session, 0)
    world.lease(session, rows)
    world.lease(session, rows[:2])
    world.registry.end(session)
    for row in rows.tolist():
        world.domain.remove(row, "deleted")
    world.tier.audit()
    assert world.held()[1] == 4 * world.tier.class_of_table[0].stride
    world.registry.settle(world.session(), [session.id])
    assert world.held() == (0, 0)
    assert world.tier.accounting().cached == 0


async def test_a_share_is_released_by_each_who_has_one_and_by_nobody_else(world: World) -> None:
    owner, rank, stranger = world.session(), world.session(), world.session(engine_id="other")
    number = world.lease(owner, world.stored(owner, 0), shares=2)
    with pytest.raises(UnknownHandle):
        world.registry.join(stranger, number)
    with pytest.raises(UnknownHandle):
        world.registry.release(rank, number)
    world.registry.join(rank, number)
    assert world.registry.release(rank, number) == 1
    with pytest.raises(UnknownHandle):
        world.registry.release(rank, number)
    assert world.registry.release(owner, number) == 0 and world.held() == (0, 0)


async def test_a_joined_lease_ends_with_its_owner_and_the_joiner_keeps_no_trace_of_it(world: World) -> None:
    owner, rank = world.session(), world.session()
    number = world.lease(owner, world.stored(owner, 0), shares=2)
    world.registry.join(rank, number)
    world.registry.release(owner, number)
    world.registry.release(owner, number)
    with pytest.raises(UnknownHandle):
        world.registry.release(rank, number)
    assert not rank.joined


async def test_sessions_past_a_deadline_are_named_by_their_oldest_hold(world: World) -> None:
    one, two, three = world.session(), world.session(), world.session()
    rows = world.stored(one, 0)
    first = world.lease(one, rows)
    world.allocate(two, 100)
    world.now_s = 50.0
    world.lease(one, rows)
    assert world.registry.overdue(59.0) == []
    assert world.registry.overdue(61.0) == [one, two]
    world.registry.release(one, first)
    assert world.registry.overdue(61.0) == [two]
    assert three not in world.registry.overdue(1e9)


async def test_orphans_are_counted_by_process(world: World) -> None:
    session = world.session()
    world.allocate(session, 0)
    world.registry.end(session)
    assert world.registry.orphans_of(session.pid) == 1
    assert world.registry.orphans_of(session.pid, besides=[session.id]) == 0
    assert world.registry.orphans_of(1) == 0
    stats: dict[str, Any] = world.registry.stats()
    assert stats["orphans"] == 1 and stats["orphaned_total"] == 1
    assert np.isclose(stats["quarantined_bytes"], world.registry.quarantined_bytes(session.pid))
