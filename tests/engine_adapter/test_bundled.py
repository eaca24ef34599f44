"""The bundled engine's prefix store against a real daemon: what comes back is what went in, or nothing does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.clients import Client, Namespace
from forebay.engine.config import RopeScaling
from forebay.engine.prefix import EngineLoad, Timings
from forebay.engine_adapter.bundled import connect
from forebay.engine_adapter.bundled import store as module
from forebay.kvstore.cost import PrefillModel
from forebay.kvstore.errors import InvariantViolation
from tests.daemon_process import ROOT, DaemonProcess, eventually, serving
from tests.engine_adapter.bundled_tools import BT, CONFIG, SLOW, Engine, engine, facts, new_pool, prompt, settled

DOORS = ["unix", "tcp", "http"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("daemon"), tcp=True, http_port=0, lower="yes")


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    yield running
    running.at_base()  # no lease, no uncommitted byte is left behind


def door(daemon: DaemonProcess, name: str) -> dict[str, Any]:
    if name == "unix":
        return {"where": daemon.socket}
    return {"where": daemon.tcp if name == "tcp" else daemon.stats()["http_url"], "token": daemon.token}


@pytest.mark.parametrize("name", DOORS)
def test_blocks_stored_by_another_process_come_back_byte_by_byte(daemon: DaemonProcess, name: str) -> None:
    seed = 10 + DOORS.index(name)
    command = [sys.executable, "-m", "tests.engine_adapter.bundled_tools", str(daemon.socket), str(seed), "9"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    ids = prompt(seed, 9)
    with engine(**door(daemon, name)) as reader:
        keys, found = reader.store.keys(ids), reader.match(ids)
        assert found.load_blocks == 9
        slots = [40, 3, 5, 60, 7, 8, 9, 10, 11]
        assert reader.load(found, 0, slots) == [True] * 9
        assert all(reader.holds(slot, key) for slot, key in zip(slots, keys, strict=True))
        untouched = [slot for slot in range(64) if slot not in slots]
        assert not reader.pool[untouched].any()
        assert reader.store.stats()["counters"]["loaded_blocks_ram"] == 9


@pytest.mark.parametrize("name", DOORS)
def test_blocks_stored_by_any_door_are_found_by_another(daemon: DaemonProcess, name: str) -> None:
    ids = prompt(20 + DOORS.index(name), 5)
    with engine(**door(daemon, name)) as writer, engine(daemon.socket) as reader:
        keys = writer.keep(ids)
        assert reader.load(reader.match(ids), 0, range(5)) == [True] * 5
        assert all(reader.holds(slot, key) for slot, key in enumerate(keys))
        writer.keep(ids)
        assert writer.store.stats()["counters"]["already_present_blocks"] == 5


def test_the_last_token_of_a_prompt_is_always_left_to_compute(daemon: DaemonProcess) -> None:
    ids = prompt(30, 4)
    with engine(daemon.socket) as one:
        one.keep(ids)
        assert one.match(ids).load_blocks == 4
        assert one.match(ids[:-1]).load_blocks == 3
        assert one.match(ids[:BT]).load_blocks == 0


def test_blocks_below_ram_are_brought_up_verified_and_counted_by_their_tier(daemon: DaemonProcess) -> None:
    ids = prompt(31, 6)
    with engine(daemon.socket) as one, Client(daemon.socket) as client:
        keys = one.keep(ids)
        namespace = client.open(one.store.facts)
        assert namespace.flush(keys).durable == 6
        evict(namespace, keys)
        found = one.match(ids)
        assert found.load_blocks == 6 and set(found.tiers) == {"below"}
        assert one.load(found, 0, range(20, 26)) == [True] * 6
        assert all(one.holds(20 + i, key) for i, key in enumerate(keys))
        assert one.store.stats()["counters"]["loaded_blocks_below"] == 6


def evict(namespace: Namespace, keys: list[bytes]) -> None:
    """Push blocks out of RAM by storing others, until none of these is there."""
    size, count = namespace.layout().payload_bytes, 256
    for seed in range(100):
        ids = prompt(1000 + seed, count)[:-1]
        others = namespace.keys(ids)
        namespace.put(others, ids, [bytes(size)] * count)
        if all(run.tier != "ram" for run in namespace.match(keys).runs):
            return
    pytest.fail("never evicted")


def test_engines_that_load_the_same_blocks_at_once_cost_the_lower_tier_one_load(tmp_path: Path) -> None:
    ids = prompt(43, 6)
    with DaemonProcess(tmp_path, lower="slow") as slow, ExitStack() as stack:
        engines = [stack.enter_context(engine(slow.socket)) for _ in range(3)]
        with Client(slow.socket) as client:
            keys = engines[0].keep(ids)
            namespace = client.open(engines[0].store.facts)
            assert namespace.flush(keys, timeout_s=10).durable == 6
            evict(namespace, keys)
        before = slow.stats()["tiers"]["below"]["loads"]
        plans = [one.match(ids) for one in engines]
        assert all(set(found.tiers) == {"below"} for found in plans)
        loads = [one.store.load(found, 0, range(6)) for one, found in zip(engines, plans, strict=True)]
        assert all(settled(load, 6) == [True] * 6 for load in loads)
        assert all(one.holds(slot, key) for one in engines for slot, key in enumerate(keys))
        assert slow.stats()["tiers"]["below"]["loads"] - before == 6


def test_a_hole_is_reported_and_what_lies_behind_it_is_loaded_all_the_same(daemon: DaemonProcess) -> None:
    ids = prompt(32, 8)
    with engine(daemon.socket) as one, Client(daemon.socket) as client:
        keys = one.keep(ids)
        found = one.match(ids)
        assert client.open(one.store.facts).delete(keys[3:4]) == 1
        one.pool.zero_()
        assert one.load(found, 0, range(8)) == [True] * 3 + [False] + [True] * 4
        assert all(one.holds(slot, key) for slot, key in enumerate(keys) if slot != 3)
        assert not one.pool[3].any()
        assert one.store.stats()["counters"]["load_holes_blocks"] == 1


def test_what_is_resident_is_neither_looked_for_nor_loaded(daemon: DaemonProcess) -> None:
    ids = prompt(33, 8)
    with engine(daemon.socket) as one, Client(daemon.socket) as client:
        keys = one.keep(ids)
        client.open(one.store.facts).delete(keys[:2])  # what the engine has need not be in the store
        found = one.match(ids, resident=2)
        assert found.load_blocks == 8 and found.plan is not None and found.plan.load_blocks == 6
        assert one.load(found, 2, range(30, 36)) == [True] * 6
        assert all(one.holds(28 + i, keys[i]) for i in range(2, 8))
        assert one.match(ids, resident=8).load_blocks == 0
        one.keep(ids)
        # The engine lost its own first blocks since: they are loaded with the others.
        assert one.load(found, 0, range(40, 48)) == [True] * 8


def test_later_blocks_continue_the_chain_of_earlier_ones(daemon: DaemonProcess) -> None:
    ids = prompt(34, 7)
    with engine(daemon.socket) as one:
        one.keep(ids[: 3 * BT])
        keys = one.keep(ids, first=3)
        assert one.match(ids).load_blocks == 7
        assert one.load(one.match(ids), 0, range(10, 17)) == [True] * 7
        assert all(one.holds(10 + i, key) for i, key in enumerate(keys))


def test_a_cache_salt_keeps_equal_prompts_apart(daemon: DaemonProcess) -> None:
    ids = prompt(35, 4)
    with engine(daemon.socket) as one:
        salted = one.keep(ids, salt=b"mine")
        assert not set(salted) & set(one.store.keys(ids)) and not set(salted) & set(one.store.keys(ids, b"yours"))
        assert one.match(ids).load_blocks == 0
        assert one.match(ids, salt=b"yours").load_blocks == 0
        assert one.match(ids, salt=b"mine").load_blocks == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_digest": b"v" * 32},
        {"precision": "int8"},
        {"attention": "other"},
        {"salt": b"s"},
        {"config": replace(CONFIG, rope_theta=1e6)},
        {"config": replace(CONFIG, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192))},
        {"config": replace(CONFIG, norm_eps=1e-6)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_fact_is_another_namespace(daemon: DaemonProcess, changes: dict[str, Any]) -> None:
    ids = prompt(36, 4)
    with engine(daemon.socket) as one, engine(daemon.socket, facts=facts(**changes)) as other:
        one.keep(ids)
        assert one.match(ids).load_blocks == 4
        assert other.match(ids).load_blocks == 0


def test_another_kv_dtype_is_another_namespace_and_keeps_its_bytes(daemon: DaemonProcess) -> None:
    ids = prompt(37, 4)
    bf16 = {"facts": facts(kv_dtype=torch.bfloat16), "pool": new_pool(dtype=torch.bfloat16)}
    with engine(daemon.socket) as one, engine(daemon.socket, **bf16) as other:
        one.keep(ids)
        assert other.match(ids).load_blocks == 0
        keys = other.keep(ids)
        assert other.load(other.match(ids), 0, range(9, 13)) == [True] * 4
        assert all(other.holds(9 + i, key) for i, key in enumerate(keys))


def test_a_label_or_a_limit_is_no_identity() -> None:
    assert facts(config=replace(CONFIG, context_tokens=8, eos_token_ids=(1, 2))) == facts()


def test_an_answer_is_given_once_and_asked_anew(daemon: DaemonProcess) -> None:
    ids = prompt(38, 3)
    with engine(daemon.socket) as one:
        assert one.match(ids).load_blocks == 0
        one.keep(ids)
        assert one.match(ids).load_blocks == 3


def test_an_answer_that_was_left_lying_is_asked_anew(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(44, 3)
    with engine(daemon.socket) as one:
        keys, load = one.store.keys(ids), EngineLoad(0, 0, len(ids), 0)
        assert one.store.match(keys, ids, load) is None  # by a request that goes away
        eventually(lambda: one.store._asked[(keys[-1], len(keys))].found, lambda found: found is not None)
        one.keep(ids)
        monkeypatch.setattr(module, "_STALE_S", -1.0)
        assert one.store.match(keys, ids, load) is None
        monkeypatch.undo()
        assert one.match(ids).load_blocks == 3


def test_loading_during_others_computing_costs_nothing(daemon: DaemonProcess) -> None:
    ids = prompt(39, 4)
    quick = PrefillModel(t0=0.0, a=2e-6, b=0.0)  # computes 4 blocks in 64 us, less than a load's first byte takes
    with engine(daemon.socket, prior=quick) as one:
        one.keep(ids)
        assert one.match(ids).load_blocks == 0
        assert one.match(ids, waiting=100_000).load_blocks == 4


def test_reports_move_the_model_and_reach_the_daemon(daemon: DaemonProcess) -> None:
    with engine(daemon.socket, prior=SLOW) as one:
        before = daemon.stats()["reports"].get("prefill", {}).get("reports_total", 0)
        one.store.report(Timings(prefill=tuple((0, 256, 256 * 1e-3) for _ in range(20))))
        eventually(
            lambda: daemon.stats()["reports"].get("prefill", {}).get("reports_total", 0), lambda n: n == before + 20
        )
        assert one.store.prefill.predict(0, 256) == pytest.approx(0.256, rel=0.2)


def test_a_queue_that_is_full_drops_and_counts_and_never_waits(daemon: DaemonProcess) -> None:
    with engine(daemon.socket, queue_bytes=1) as one:
        keys = one.store.keys(ids := prompt(40, 60))
        stores = [one.store.store(keys, ids, i, [i]) for i in range(60)]
        assert one.store.wait_stored(10)
        assert all(store.done for store in stores)
        counters = one.store.stats()["counters"]
        assert counters["store_dropped_blocks"] and counters["store_dropped_blocks"] + counters["stored_blocks"] == 60


def test_a_pool_of_another_shape_is_refused() -> None:
    store = connect("/nowhere/at/all.sock", facts(), prior=SLOW)
    try:
        with pytest.raises(ValueError, match="no block"):
            store.attach(new_pool()[..., :8].contiguous())
        with pytest.raises(ValueError, match="gaps"):
            store.attach(new_pool()[:, :, :, :, ::2])
    finally:
        store.close()


def test_blocks_outside_the_plan_are_refused(daemon: DaemonProcess) -> None:
    ids = prompt(41, 4)
    with engine(daemon.socket) as one:
        one.keep(ids)
        found = one.match(ids, resident=1)
        with pytest.raises(InvariantViolation):
            one.store.load(found, 3, range(2))


def test_a_match_nobody_fetches_is_forgotten(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ASKED", 4)
    with engine(daemon.socket) as one:
        for seed in range(50, 70):
            ids = prompt(seed, 1)
            one.store.match(one.store.keys(ids), ids, EngineLoad(0, 0, len(ids), 0))
        assert len(one.store._asked) == 4


def test_a_closed_store_holds_nothing(daemon: DaemonProcess) -> None:
    ids = prompt(42, 4)
    with engine(daemon.socket) as one:
        one.keep(ids)
    assert isinstance(one, Engine)
    daemon.at_base()
