"""Peers that send what no client would: the daemon stays quick, small and correct for everybody else."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.kvstore import wire
from forebay.kvstore.errors import OverLimit
from forebay.kvstore.wire import HEADER, Kind
from tests.daemon_process import MIB, DaemonProcess, RawSession, eventually, facts_of, serving

ITEMS = 8 << 20
MANY = b"\xdd" + ITEMS.to_bytes(4, "big")  # msgpack's head of an array of so many
SOON_S = 4.0  # a daemon that looked at every item took 5 s and more


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path)


def memory_mib(daemon: DaemonProcess, name: str = "VmRSS") -> int:
    """Memory of the daemon's process; VmHWM: the most it ever had."""
    for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) // 1024
    raise AssertionError(name)


@pytest.mark.parametrize(
    "body",
    [
        MANY + b"\x90" * ITEMS,
        b"\x92\xa8unmapped" + MANY + b"\x01" * ITEMS,
        b"\x92\xa3map" + MANY + b"\x01" * ITEMS,
        b"\x92\xa6settle" + MANY + b"\xc4\x00" * ITEMS,
        b"\x93\xa6report\xa4load\xdf" + ITEMS.to_bytes(4, "big") + b"\xa1b\x01" * ITEMS,
    ],
    ids=["no verb", "unmapped", "map", "settle", "report"],
)
def test_millions_of_items_in_one_frame_cost_neither_time_nor_memory(daemon: DaemonProcess, body: bytes) -> None:
    with RawSession(daemon.socket) as session:
        session.hello()
        before = memory_mib(daemon)
        started_s = time.monotonic()
        session.send_body(body)
        frame = session.receive()
        assert frame is not None
        assert wire.decode_error(frame[2]).code == "malformed_frame"
        assert time.monotonic() - started_s < SOON_S
        assert session.ended()
    assert memory_mib(daemon, "VmHWM") < before + 3 * len(body) / MIB + 32
    daemon.at_base()


def test_a_header_takes_no_memory_for_a_body_that_does_not_come(daemon: DaemonProcess) -> None:
    before = memory_mib(daemon)
    sessions = [RawSession(daemon.socket) for _ in range(16)]
    for session in sessions:
        session.sock.sendall(HEADER.pack(64 << 20, wire.PROTOCOL_VERSION, Kind.REQUEST, 0, 7) + b"\x92")
    daemon.stats()
    for session in sessions:
        session.sock.sendall(b"\xa5")  # a second arrival: now the daemon knows how much is to come
    daemon.stats()
    assert memory_mib(daemon) < before + 64
    for session in sessions:
        session.close()
    eventually(daemon.descriptors, lambda count: count < 40)
    daemon.at_base()


def store(session: RawSession, handle: int, keys: bytes) -> list[int]:
    """Store objects whose payload does not matter. Returns the extents that they lie in."""
    got = session.call(wire.Allocate(handle, 0, keys))
    session.call(wire.Commit(got.allocation, bytes(status == wire.SlotStatus.WRITABLE for status in got.statuses)))
    return sorted(set(np.frombuffer(got.locations, wire.LOCATION_DTYPE)["extent"].tolist()))


def test_a_peer_that_reads_no_descriptors_has_few_on_their_way(daemon: DaemonProcess) -> None:
    # The kernel bounds those of all sockets together: whoever leaves thousands unread shuts the others out.
    keys = np.random.default_rng(1).bytes(16 * 600)
    with RawSession(daemon.socket) as deaf, RawSession(daemon.socket) as other:
        deaf.hello()
        extents = store(deaf, deaf.open(facts_of()).handle, keys)
        assert len(extents) >= 9
        asked = 40
        for _ in range(asked):
            deaf.send(wire.MapExtents(extents))
        other.hello()
        assert other.call(wire.MapExtents(extents)).extents == extents
        assert select.select([deaf.sock], [], [], 10)[0]
        deaf.sock.setblocking(False)
        arrived = 0
        with pytest.raises(BlockingIOError):
            while deaf.receive() is not None:
                arrived += 1
        assert 1 <= arrived <= 64 // len(extents)
        deaf.sock.settimeout(10)
        for _ in range(asked - arrived):  # whoever reads gets all
            assert deaf.answer(wire.MapReply).extents == extents
        assert len(deaf.descriptors) == 1 + asked * len(extents)
        for session in (deaf, other):
            session.call(wire.Unmapped(extents))
    daemon.at_base()


def test_a_peer_that_goes_with_descriptors_unread_is_noticed(daemon: DaemonProcess) -> None:
    keys = np.random.default_rng(1).bytes(16 * 600)
    with RawSession(daemon.socket) as keeper:
        keeper.hello()
        extents = store(keeper, keeper.open(facts_of()).handle, keys)
        before = daemon.descriptors()
        for _ in range(3):
            with RawSession(daemon.socket) as deaf:
                deaf.hello()
                for _ in range(40):
                    deaf.send(wire.MapExtents(extents))
                deaf.send(wire.Unmapped(extents))
        eventually(daemon.descriptors, lambda count: count <= before)
        daemon.at_base(others=1)


def test_the_http_door_takes_no_descriptors_from_the_session_door(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, http_port=0) as daemon, contextlib.ExitStack() as held:
        before = daemon.descriptors()
        port = int(daemon.stats()["http_url"].rsplit(":", 1)[1])
        for _ in range(300):
            idle = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        assert daemon.descriptors() < before + 80
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(100).startswith(b"HTTP/1.1 200")
        held.close()
        eventually(daemon.descriptors, lambda count: count <= before + 2)


@pytest.mark.parametrize("make", [wire.Delete, lambda *at: wire.Flush(*at, 1000)], ids=["delete", "flush"])
def test_a_batch_of_very_many_keys_gives_others_their_turn(daemon: DaemonProcess, make: Any) -> None:
    with RawSession(daemon.socket) as many, RawSession(daemon.socket) as other:
        many.hello()
        other.hello()
        handle = many.open(facts_of()).handle
        many.send(make(handle, 0, np.random.default_rng(1).bytes(16 << 17)))
        turns = 0
        many.sock.setblocking(False)
        while turns < 100_000:
            other.call(wire.Settle([]))
            turns += 1
            with contextlib.suppress(BlockingIOError):
                many.receive()
                break
        assert turns > 10, "others had hardly a turn before the batch was done"


def test_leases_asked_for_side_by_side_keep_to_the_limit_together(tmp_path: Path) -> None:
    keys = np.random.default_rng(1).bytes(16 * 1500)
    with (
        DaemonProcess(tmp_path, ram_bytes=64 * MIB, max_leased_blocks_per_session=2000) as daemon,
        RawSession(daemon.socket) as session,
    ):
        session.hello()
        handle = session.open(facts_of()).handle
        store(session, handle, keys)
        for _ in range(8):
            session.send(wire.Acquire(handle, 0, keys))
        leases = []
        for _ in range(8):
            with contextlib.suppress(OverLimit):
                leases.append(session.answer(wire.AcquireReply).lease)
        assert len(leases) == 1
        session.call(wire.Release(leases[0]))
        again = session.call(wire.Acquire(handle, 0, keys))
        session.call(wire.Release(again.lease))
        daemon.at_base(others=1)


def test_a_session_that_ends_in_the_middle_of_a_long_commit_leaves_nothing_held(daemon: DaemonProcess) -> None:
    ended: list[bytes] = []

    def orphans() -> int:
        with RawSession(daemon.socket) as session:
            session.hello(previous=ended)  # settles what has ended; the daemon may not know of the last one yet
        found: int = daemon.stats()["sessions"]["orphans"]
        return found

    for number in range(8):
        keys = np.random.default_rng(100 + number).bytes(16 * 600)
        with RawSession(daemon.socket) as session:
            ended.append(session.hello().session)
            handle = session.open(facts_of()).handle
            made = session.call(wire.Allocate(handle, 0, keys))
            session.send(wire.Commit(made.allocation, b"\1" * 300 + b"\0" * 300))
            if number % 2:
                session.send(wire.Abort(made.allocation))  # it is being committed: refused, or too late
                frames = sorted(frame for frame in (session.receive(), session.receive()) if frame is not None)
                assert [kind for kind, _, _ in frames] == [Kind.REPLY, Kind.ERROR]
                assert msgspec.msgpack.decode(frames[0][2], type=wire.Done).count == 300
        eventually(lambda: daemon.stats()["sessions"]["open"], lambda count: count == 1)
        assert eventually(orphans, lambda count: not count) == 0
    daemon.at_base()
