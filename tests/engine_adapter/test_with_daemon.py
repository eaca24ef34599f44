"""Prefix reuse through a real daemon process: two engines, a killed daemon, a daemon that stands still."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import Client
from forebay.engine_adapter.transformers import PrefixReuse
from forebay.kvstore.cost import PrefillModel
from forebay.kvstore.plan import Plan, plan
from tests.daemon_process import DaemonProcess, serving
from tests.engine_adapter.models import qwen

BT = 8


def eager(runs: Any, estimates: Any, prefill: PrefillModel, **facts: Any) -> Plan:
    """The real planner on a slow engine: computing a tiny model is quicker than any load."""
    return plan(runs, estimates, PrefillModel(t0=0.0, a=1.0, b=0.0), **facts)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("daemon"), tcp=True)


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    yield running
    running.at_base()  # no lease, no uncommitted byte is left behind


@pytest.fixture(params=["unix", "tcp"])
def open_engine(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes engines whose clients come by the Unix socket, or over TCP."""
    where: dict[str, Any] = {"socket_path": daemon.socket}
    if request.param == "tcp":
        where = {"socket_path": daemon.tcp, "token": daemon.token}
    with ExitStack() as stack:

        def make(forebay: bool = True, **options: Any) -> PrefixReuse:
            client = stack.enter_context(Client(**where)) if forebay else None
            return stack.enter_context(PrefixReuse(qwen(), client, block_tokens=BT, planner=eager, **options))

        yield make


def prompt(seed: int, tokens: int = 100) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=tokens)


def run(engine: PrefixReuse, ids: list[int]) -> Any:
    result = engine.generate(ids, 10, stop_tokens=())
    assert engine.wait_stored(30)
    return result


@pytest.mark.parametrize("verify", ["loaded", "always"])
def test_a_prefix_outlives_the_engine_that_computed_it(
    verify: str, open_engine: Any, request: pytest.FixtureRequest
) -> None:
    ids = prompt(sum(request.node.name.encode()))
    cold = run(open_engine(forebay=False), ids)
    with open_engine() as writer:
        assert run(writer, ids).tokens == cold.tokens
        assert writer.counters["stored"] == 13  # 100 prompt tokens and 9 of the answer's 10
    warm = run(open_engine(verify=verify), ids)
    assert warm.reuse.tokens == 96 and warm.reuse.tiers == {"ram": 12}
    assert warm.tokens == cold.tokens


def test_the_next_turn_reuses_the_answer(open_engine: Any, request: pytest.FixtureRequest) -> None:
    ids = prompt(sum(request.node.name.encode()), 50)
    turn = ids + run(open_engine(), ids).tokens + prompt(4, 6)
    warm = run(open_engine(), turn)
    assert warm.reuse.tokens == 56
    assert warm.tokens == run(open_engine(forebay=False), turn).tokens


def test_reports_arrive_at_the_daemon(open_engine: Any, daemon: DaemonProcess) -> None:
    engine = open_engine()
    before = daemon.stats()["reports"].get("prefill", {}).get("reports_total", 0)
    run(engine, prompt(5))
    assert daemon.stats()["reports"]["prefill"]["reports_total"] == before + 1


def test_a_killed_daemon_is_a_miss_and_its_successor_is_filled_again(open_engine: Any, daemon: DaemonProcess) -> None:
    now = [0.0]
    engine = open_engine(clock=lambda: now[0])
    ids = prompt(6)
    cold = run(engine, ids)
    daemon.kill()
    gone = run(engine, ids)
    assert gone.tokens == cold.tokens and gone.reuse.tokens == 0 and gone.reuse.miss == "DaemonUnavailable"
    daemon.start()
    for _ in range(100):  # the client has a pause of its own between attempts
        now[0] += 100.0
        again = run(engine, ids)
        assert again.tokens == cold.tokens
        if again.reuse.tokens == 96:
            break
    else:
        pytest.fail(f"never served again: {again.reuse}, {engine.counters}")


def test_a_daemon_that_stands_still_costs_a_bounded_wait(open_engine: Any, daemon: DaemonProcess) -> None:
    engine = open_engine(clock=lambda: 0.0)
    ids = prompt(7)
    cold = run(engine, ids)
    daemon.signal(signal.SIGSTOP)
    try:
        still = run(engine, ids)
        assert still.tokens == cold.tokens and still.reuse.miss == "DaemonTimeout"
        assert run(engine, ids).reuse.miss == "backing_off"
    finally:
        daemon.signal(signal.SIGCONT)


def test_a_store_too_small_for_the_prompt_still_gives_right_answers(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ram_bytes=1 << 20) as small, Client(small.socket) as client:
        model = qwen(head_dim=64, max_position_embeddings=4096)
        with PrefixReuse(model, client, block_tokens=BT, planner=eager) as engine, PrefixReuse(model, None) as off:
            for seed in (8, 9, 8):
                ids = prompt(seed, 800)  # 2.4 MB of KV, room for 1 MiB
                assert run(engine, ids).tokens == off.generate(ids, 10, stop_tokens=()).tokens
            assert engine.counters["store_refused"] and not engine.counters["store_DaemonTimeout"]
        small.audit()
