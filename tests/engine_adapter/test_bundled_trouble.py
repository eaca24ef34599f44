"""The bundled engine's prefix store while its daemon is absent, dies, stands still or lies: counted misses, bounded waits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.clients import Client, Lease, Namespace
from forebay.engine.prefix import EngineLoad, Load
from forebay.engine_adapter.bundled import loading
from forebay.engine_adapter.bundled.pool import Expected, HostPool
from forebay.kvstore.cost import PrefillModel
from forebay.kvstore.secretfile import write_secret_file
from forebay.server import auth
from tests.daemon_process import DaemonProcess, eventually, serving
from tests.engine_adapter.bundled_tools import BT, CONFIG, Engine, engine, facts, prompt, settled

BRISK = PrefillModel(t0=0.0, a=0.005, b=0.0)  # 8 blocks in 0.32 s, so a load is waited for that long


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("daemon"), tcp=True)


@pytest.fixture(params=["unix", "tcp"])
def door(running: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    yield {"where": running.socket} if request.param == "unix" else {"where": running.tcp, "token": running.token}
    if running.process.poll() is not None:
        running.start()
    running.at_base()


@contextmanager
def stopped(daemon: DaemonProcess) -> Iterator[None]:
    daemon.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.signal(signal.SIGCONT)


def found_again(one: Engine, ids: list[int], blocks: int) -> None:
    eventually(lambda: one.match(ids).load_blocks, lambda found: found == blocks)


class Pause:
    """Holds up the copy of the n-th block, in the middle of it, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._left, fill = block, HostPool.fill

        def slow_fill(pool: HostPool, slot: int, payload: memoryview, expected: Expected | None) -> bool:
            self._left -= 1
            if self._left == 0:
                pool.view(slot)[: pool.block_bytes // 2] = bytes(pool.block_bytes // 2)
                self.reached.set()
                self.go_on.wait(10)
            return fill(pool, slot, payload, expected)

        monkeypatch.setattr(HostPool, "fill", slow_fill)


def test_a_daemon_that_was_never_there_costs_nothing_and_is_found_when_it_comes(tmp_path: Path) -> None:
    ids = prompt(1, 4)
    with engine(tmp_path / "d.sock") as one:
        keys = one.store.keys(ids)
        assert one.match(ids).load_blocks == 0
        assert one.store.store(keys, ids, 0, range(4)).done  # it was just found absent
        stats = one.store.stats()
        assert stats["away"] and any("DaemonUnavailable" in name for name in stats["reasons"])
        with DaemonProcess(tmp_path) as late:
            eventually(lambda: one.store.stats()["away"], lambda away: not away)
            assert one.keep(ids) == keys  # made before a daemon was known, and right
            found_again(one, ids, 4)
            late.audit()


def test_another_tenant_is_served_also_under_keys_made_before_it_was_known(tmp_path: Path) -> None:
    write_secret_file(tmp_path / "secret", auth.new_secret())
    rights = {"tenant": "acme", "token_sha256": auth.token_digest("t").hex(), "rights": ["read", "write"]}
    options: dict[str, Any] = {"tenants": {"acme": {"secret_file": str(tmp_path / "secret")}}}
    ids = prompt(12, 4)
    with engine(tmp_path / "d.sock", token="t") as early:
        early.store.keys(ids)
        with DaemonProcess(tmp_path, credentials={"a": rights}, **options) as daemon:
            eventually(lambda: early.keep(ids) and early.match(ids).load_blocks, lambda found: found == 4)
            assert early.load(early.match(ids), 0, range(4)) == [True] * 4
            with engine(daemon.socket, token="t") as late:
                eventually(lambda: late.store._link.namespace_id != early.store._key_root, bool)
                assert late.keep(ids) != early.store.keys(ids)  # made after the daemon had told its id
                assert late.match(ids).load_blocks == 4


def test_cancel_returns_only_when_no_copy_can_write_any_more(
    running: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(2, 8)
    with engine(running.socket) as one:
        one.keep(ids)
        found = one.match(ids)
        pause = Pause(monkeypatch, block=3)
        load = one.store.load(found, 0, range(20, 28))
        assert pause.reached.wait(10)
        threading.Timer(0.2, pause.go_on.set).start()
        load.cancel()
        before = one.pool.clone()
        time.sleep(0.5)
        assert torch.equal(one.pool, before)
        assert not one.pool[23:28].any()  # nor was anything begun after it
        load.cancel()
        assert None not in [load.ready(i) for i in range(8)]


def test_cancels_at_any_moment_leave_slots_alone(running: DaemonProcess) -> None:
    ids = prompt(3, 60)
    with engine(running.socket, queue_bytes=1 << 30) as one:
        one.keep(ids)
        for round_ in range(60):
            found = one.match(ids)
            one.pool.zero_()
            load = one.store.load(found, 0, range(60))
            time.sleep(round_ * 5e-5)
            load.cancel()
            one.pool.fill_(7.0)  # the engine's next use of these slots
            time.sleep(1e-3)
            assert bool((one.pool == 7.0).all()), f"written after cancel in round {round_}"


def test_a_daemon_killed_in_the_middle_of_a_load_leaves_right_blocks_or_holes(
    running: DaemonProcess, door: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(4, 8)
    monkeypatch.setattr(loading, "_FIRST_PIECE_BYTES", 1)  # pieces of 1, 2, 4 blocks
    with engine(**door) as one:
        keys = one.keep(ids)
        found = one.match(ids)
        one.pool.zero_()
        pause = Pause(monkeypatch, block=2)
        load = one.store.load(found, 0, range(8))
        assert pause.reached.wait(10)
        running.kill()
        pause.go_on.set()
        came = settled(load, 8)
        assert came[0] and not all(came)
        assert all(one.holds(slot, keys[slot]) for slot in range(8) if came[slot])
        eventually(lambda: one.store.stats()["counters"].get("loaded_blocks_ram"), lambda told: told == sum(came))
        one.match(ids)  # a miss, or it is away: no exception and no wait either way
        running.start()
        eventually(lambda: one.store.stats()["away"], lambda away: not away)
        eventually(lambda: one.keep(ids) and one.match(ids).load_blocks, lambda found: found == 8)


def test_a_daemon_that_stands_still_in_the_middle_of_a_load_is_waited_for_until_the_deadline(
    running: DaemonProcess, door: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(5, 8)
    monkeypatch.setattr(loading, "_FIRST_PIECE_BYTES", 1)
    with engine(**door, prior=BRISK) as one:
        keys = one.keep(ids)
        found = one.match(ids)
        one.pool.zero_()
        pause = Pause(monkeypatch, block=2)
        load = one.store.load(found, 0, range(8))
        assert pause.reached.wait(10)
        with stopped(running):
            pause.go_on.set()
            began_s = time.monotonic()
            came = settled(load, 8)
            assert time.monotonic() - began_s < 2.0 and load.deadline - began_s < 1.0
            assert came[0] and not all(came)
            assert all(one.holds(slot, keys[slot]) for slot in range(8) if came[slot])
        found_again(one, ids, 8)
        assert one.load(one.match(ids), 0, range(8)) == [True] * 8


def test_a_daemon_that_stands_still_costs_one_bounded_miss_and_then_none(
    running: DaemonProcess, door: dict[str, Any]
) -> None:
    ids = prompt(6, 4)
    with engine(**door, prior=BRISK, backoff_s=30.0) as one:
        keys = one.keep(ids)
        load = EngineLoad(0, 0, len(ids), 0)
        with stopped(running):
            assert one.store.match(keys, ids, load) is None  # not known, and not waited for
            assert one.match(ids).load_blocks == 0
            assert one.store.stats()["reasons"]["miss_DaemonTimeout"]
            assert one.store.match(keys, ids, load) is not None  # at once, without a question
            assert one.store.store(keys, ids, 0, range(4)).done
        counters = one.store.stats()["counters"]
        assert counters["miss_DaemonTimeout"] == 1 and counters["miss_away"] == 1
        assert counters["store_dropped_blocks"] == 4


def test_a_stored_block_that_lost_its_bytes_is_a_hole(running: DaemonProcess) -> None:
    ids = prompt(7, 4)
    with engine(running.socket, verify="always") as one, Client(running.socket) as client:
        keys = one.keep(ids)
        namespace = client.open(one.store.facts)
        with namespace.acquire(keys[2:3]) as lease:
            place = lease.places[0]
            memory = lease._life.memory  # type: ignore[union-attr]
            memory.map(lease.places, writable=True)
            memory.extents[int(place["extent"])].writable_memory[int(place["offset"]) + 4096] ^= 1
        one.pool.zero_()
        assert one.load(one.match(ids), 0, range(4)) == [True, True, False, True]
        assert one.store.stats()["counters"]["load_corrupt_blocks"] == 1


def test_blocks_taken_from_under_the_copy_are_holes(running: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(8, 4)
    with engine(running.socket) as one:
        one.keep(ids)
        found = one.match(ids)
        monkeypatch.setattr(Lease, "valid", lambda lease: False)
        assert not any(one.load(found, 0, range(4)))
        assert one.store.stats()["counters"]["load_lost_blocks"]


def test_whatever_a_call_raises_is_a_counted_miss(running: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(9, 4)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug")

    with engine(running.socket) as one:
        keys = one.keep(ids)
        found = one.match(ids)
        for verb in ("match", "acquire", "put"):
            monkeypatch.setattr(Namespace, verb, broken)
        assert one.match(ids).load_blocks == 0
        assert one.load(found, 0, range(4)) == [False] * 4
        stored = one.store.store(keys, ids, 0, range(4))
        eventually(lambda: stored.done, bool)
        counters = one.store.stats()["counters"]
        assert [counters[f"{what}_RuntimeError"] for what in ("miss", "load", "store")] == [1, 1, 1]


def test_closing_in_the_middle_of_a_load_stops_it(running: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(10, 8)
    load: Load
    with engine(running.socket) as one:
        one.keep(ids)
        pause = Pause(monkeypatch, block=2)
        load = one.store.load(one.match(ids), 0, range(20, 28))
        assert pause.reached.wait(10)
        threading.Timer(0.1, pause.go_on.set).start()
    assert None not in [load.ready(i) for i in range(8)]
    running.at_base()


def test_large_blocks_come_back_over_every_door(running: DaemonProcess, door: dict[str, Any]) -> None:
    wide = torch.zeros(8, 2, CONFIG.layers, 2, BT, 1, 2048)  # 512 KiB a block: copied without the GIL
    ids = prompt(11, 7)
    with engine(**door, facts=facts(config=replace(CONFIG, head_dim=2048)), pool=wide, queue_bytes=1 << 30) as one:
        keys = one.keep(ids)
        one.pool.zero_()
        assert one.load(one.match(ids), 0, range(7)) == [True] * 7
        assert all(one.holds(slot, key) for slot, key in enumerate(keys))
