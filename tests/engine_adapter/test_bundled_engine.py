"""The whole engine over a daemon: warm answers are the cold ones bit by bit, and a daemon in trouble fails no request."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.clients import Client, Namespace
from forebay.embedded import EmbeddedDaemon
from forebay.engine.async_engine import AsyncEngine
from forebay.engine.config import EngineConfig
from forebay.engine.llm import LLM
from forebay.engine.outputs import RequestOutput
from forebay.engine.params import SamplingParams
from forebay.engine_adapter.bundled import ForebayPrefixStore, connect, namespace_facts
from forebay.kvstore.cost import PrefillModel
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.plan import Plan, plan
from tests.daemon_process import MIB, DaemonProcess, eventually, serving
from tests.engine.tiny import tiny_model

BT = 8
CONFIG = EngineConfig(precision="fp64", block_tokens=BT, pool_blocks=96, step_tokens=64, max_sequences=16)
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=5, logprobs=4, ignore_eos=True)


def eager(runs: Any, estimates: Any, prefill: PrefillModel, **given: Any) -> Plan:
    """The real planner on a slow engine: computing a tiny model is quicker than any load."""
    return plan(runs, estimates, PrefillModel(t0=0.0, a=1.0, b=0.0), **given)


def facts(precision: Any = "fp64", dtype: torch.dtype = torch.float64) -> NamespaceFacts:
    model = tiny_model()
    return namespace_facts(
        model.config, weights_digest=b"tiny", precision=precision, kv_dtype=dtype, block_tokens=BT,
        head_groups=model.config.kv_heads,
    )  # fmt: skip


def open_store(where: Path | str, **options: Any) -> ForebayPrefixStore:
    prior = PrefillModel(t0=0.0, a=0.01, b=0.0)
    return connect(where, facts(), **({"prior": prior, "planner": eager, "backoff_s": 0.05} | options))


@contextmanager
def llm(where: Path | str | None, **options: Any) -> Iterator[tuple[LLM, ForebayPrefixStore | None]]:
    store = open_store(where, **options) if where is not None else None
    with LLM(tiny_model(), config=CONFIG, store=store) as engine:
        yield engine, store
        if store is not None:
            assert store.wait_stored(10)
            all_counted(store)
        engine.core.step()
        engine.core.check_idle()


def all_counted(store: ForebayPrefixStore) -> dict[str, float]:
    eventually(lambda: store.stats()["loading"], lambda loading: loading == 0)
    counters: dict[str, float] = store.stats()["counters"]
    return counters


def prompts(seed: int, count: int = 6) -> list[list[int]]:
    """Some that share a beginning, some that end on a block's end."""
    rng = random.Random(seed)
    common = rng.choices(range(3, 128), k=45)
    return [common + rng.choices(range(3, 128), k=rng.choice([1, 3, 11, 19])) for _ in range(count)]


def same(cold: list[RequestOutput], warm: list[RequestOutput]) -> bool:
    """Equal tokens, and log-probabilities as far as chunks of other shapes round alike in fp64."""

    def told(output: RequestOutput) -> list[float]:
        return [value for one in output.logprobs or () for value in (one.logprob, *(some for _, some in one.top))]

    pairs = list(zip(cold, warm, strict=True))
    return all(
        one.token_ids == other.token_ids and told(one) == pytest.approx(told(other), abs=1e-9) for one, other in pairs
    )


def cold(seed: int) -> list[RequestOutput]:
    with llm(None) as (engine, _):
        return engine.generate(prompts(seed), PARAMS)


def fill(where: Path | str, seed: int, **options: Any) -> list[bytes]:
    """Another engine computes the prompts. Returns the keys of all their blocks."""
    with llm(where, **options) as (engine, store):
        assert store is not None
        assert same(cold(seed), engine.generate(prompts(seed), PARAMS))
        assert store.wait_stored(10)
        return [key for ids in prompts(seed) for key in store.keys(ids)]


def check_warm(where: Path | str, seed: int, tier: str, **options: Any) -> None:
    """A fresh engine gives the cold answers from what `tier` has."""
    with llm(where, **options) as (engine, store):
        assert store is not None
        warm = engine.generate(prompts(seed), PARAMS)
        assert same(cold(seed), warm)
        assert sum(output.cached_tokens.store for output in warm) >= 5 * BT
        assert all_counted(store)[f"loaded_blocks_{tier}"] >= 5


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("daemon"), tcp=True)


def test_warm_is_cold_from_ram(running: DaemonProcess) -> None:
    fill(running.socket, 1)
    check_warm(running.socket, 1, "ram")
    running.at_base()


def test_warm_is_cold_over_tcp(running: DaemonProcess) -> None:
    fill(running.tcp, 2, token=running.token)
    check_warm(running.tcp, 2, "ram", token=running.token)
    running.at_base()


def test_warm_is_cold_from_ssd_after_a_kill(tmp_path: Path) -> None:
    ssd = {"ssd_bytes": 256 * MIB, "ssd_dirs": str(tmp_path / "ssd"), "ssd_reserve_bytes": 0}
    with DaemonProcess(tmp_path, **ssd) as daemon:
        keys = fill(daemon.socket, 3)
        with Client(daemon.socket) as client:
            flushed = client.open(facts()).flush(list(dict.fromkeys(keys)))
            assert not flushed.missing and not flushed.failed
        daemon.kill()
        daemon.start()
        check_warm(daemon.socket, 3, "ssd")


def test_warm_is_cold_from_an_embedded_store(tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "ram_bytes": 16 * MIB,
        "extent_bytes": MIB,
        "memory_reserve_bytes": 0,
        "ssd_reserve_bytes": 0,
    }
    small |= {"ssd_bytes": 256 * MIB, "ssd_dirs": str(tmp_path / "ssd"), "drain_s": 10.0}
    with EmbeddedDaemon(**small) as daemon:
        fill(daemon.socket, 4)
        check_warm(daemon.socket, 4, "ram")
    with EmbeddedDaemon(**small) as daemon:
        check_warm(daemon.socket, 4, "ssd")


def test_a_salt_keeps_requests_apart_in_pool_and_store(running: DaemonProcess) -> None:
    ids = [prompts(5)[0]]
    mine = SamplingParams(max_tokens=4, temperature=0.0, cache_salt=b"mine")
    with llm(running.socket) as (engine, _):
        engine.generate(ids, mine)
        assert engine.generate(ids, SamplingParams(max_tokens=4, temperature=0.0))[0].cached_tokens.total == 0
    with llm(running.socket) as (engine, _):
        yours = SamplingParams(max_tokens=4, temperature=0.0, cache_salt=b"yours")
        assert engine.generate(ids, yours)[0].cached_tokens.total == 0
        assert engine.generate(ids, mine)[0].cached_tokens.store > 0
    running.at_base()


def test_holes_are_computed_and_the_answer_is_the_cold_one(running: DaemonProcess) -> None:
    fill(running.socket, 6)
    with llm(running.socket) as (engine, store), Client(running.socket) as client:
        assert store is not None
        keys = store.keys(prompts(6)[0])
        namespace = client.open(facts())
        match = Deleting(store, namespace, keys[2:3])
        warm = engine.generate(prompts(6), PARAMS)
        assert match.deleted == 1
        assert same(cold(6), warm)
        assert all_counted(store)["load_holes_blocks"]
        assert warm[0].cached_tokens.store >= 4 * BT  # what lies behind the hole was used, too
    running.at_base()


class Deleting:
    """Deletes blocks between a store's first match and its load."""

    def __init__(self, store: ForebayPrefixStore, namespace: Any, keys: list[bytes]) -> None:
        self.deleted = 0
        load = store.load

        def first_delete(*given: Any) -> Any:
            self.deleted += namespace.delete(keys)
            return load(*given)

        store.load = first_delete  # type: ignore[method-assign]


@pytest.mark.parametrize("trouble", ["kill", "stall"])
def test_a_daemon_in_trouble_under_load_fails_no_request(tmp_path: Path, trouble: str) -> None:
    asked = [ids for seed in range(4) for ids in prompts(seed, 3)]
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with llm(None) as (engine, _):
        expected = [output.token_ids for output in engine.generate(asked, greedy)]

    async def run(daemon: DaemonProcess, store: ForebayPrefixStore) -> int:
        served = AsyncEngine(tiny_model(), config=CONFIG, store=store)
        quiet, answered = asyncio.Event(), 0

        async def client(turn: int) -> None:
            nonlocal answered
            while not quiet.is_set():
                turn = (turn + 1) % len(asked)
                tokens: tuple[int, ...] = ()
                async for output in served.generate(asked[turn], greedy):  # raises what fails a request
                    tokens += output.token_ids
                assert tokens == expected[turn]
                answered += 1
                if turn % 4 == 0:
                    await served.clear_cache()  # so that later ones ask the store again

        async def disturb() -> None:
            for _ in range(3):
                await asyncio.sleep(0.3)
                if trouble == "kill":
                    await asyncio.to_thread(daemon.kill)
                    await asyncio.sleep(0.1)
                    await asyncio.to_thread(daemon.start)
                else:
                    daemon.signal(signal.SIGSTOP)
                    await asyncio.sleep(0.3)
                    daemon.signal(signal.SIGCONT)
            await asyncio.sleep(0.3)
            quiet.set()

        await asyncio.gather(disturb(), *(client(first) for first in range(8)))
        await asyncio.to_thread(store.wait_stored, 10)
        await asyncio.sleep(0.05)
        await served.check_idle()
        assert served.healthy
        await served.close()
        return answered

    with DaemonProcess(tmp_path) as daemon:
        store = open_store(daemon.socket)
        assert asyncio.run(run(daemon, store)) > 50
        counters = store.stats()["counters"]
        assert counters["loads"] and any("Daemon" in name for name in counters), counters
        daemon.at_base()


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With so little RAM that blocks of earlier lives are mostly on disk."""
    folder = tmp_path_factory.mktemp("layered")
    ssd = {"ssd_bytes": 512 * MIB, "ssd_dirs": str(folder / "ssd"), "ssd_reserve_bytes": 0}
    yield from serving(folder, tcp=True, ram_bytes=2 * MIB, **ssd)


def push_out(space: Namespace, rng: random.Random) -> None:
    """Store so many other blocks that RAM has room for no older ones."""
    layout = space.layout()
    count = 4 * MIB // layout.object_bytes
    ids = rng.choices(range(1 << 20), k=count * layout.block_tokens)
    space.put(space.keys(ids), ids, [bytes(layout.payload_bytes)] * count)


def a_life(daemon: DaemonProcess, seed: int) -> Counter[str]:
    """A random engine computes random prompts; another one, over another door, gives the answers of one that has no store.

    Returns what its store counted.
    """
    rng = random.Random(seed)
    model = tiny_model(rng.choice(["qwen2", "qwen3", "llama"]), seed)
    size = rng.choice([4, 8, 16])
    common = rng.choices(range(3, 128), k=rng.randrange(3 * size, 60))
    asked = [
        common[: rng.randrange(1, len(common) + 1)] + rng.choices(range(3, 128), k=rng.randrange(1, 30))
        for _ in range(6)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randrange(1, 20),
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=rng.randrange(1 << 40),
            ignore_eos=rng.random() < 0.5,
        )
        for _ in asked
    ]

    def config(roomy: bool = False) -> EngineConfig:
        most = max(len(ids) for ids in asked) + 20
        blocks = 400 if roomy else -(-most // size) + rng.randrange(2, 40)
        steps, together = rng.choice([7, 32, 512]), rng.choice([1, 3, 16])
        return EngineConfig("fp64", size, pool_blocks=blocks, step_tokens=steps, max_sequences=together)

    names = namespace_facts(
        model.config, weights_digest=str(seed).encode(), precision="fp64", kv_dtype=torch.float64, block_tokens=size,
        head_groups=model.config.kv_heads,
    )  # fmt: skip

    def store() -> ForebayPrefixStore:
        where, token = rng.choice([(daemon.socket, None), (daemon.tcp, daemon.token)])
        return connect(where, names, prior=PrefillModel(t0=0.0, a=0.01, b=0.0), planner=eager, token=token)

    with LLM(model, config=config(roomy=True)) as plain:
        expected = [plain.generate([ids], [each])[0].token_ids for ids, each in zip(asked, params, strict=True)]
    first = store()
    with LLM(model, config=config(), store=first) as engine:
        some = rng.sample(range(6), 3)
        engine.generate([asked[i] for i in some], [params[i] for i in some])
        assert first.wait_stored(10)
        keys = list(dict.fromkeys(key for i in some for key in first.keys(asked[i])))
    with Client(daemon.socket) as client:
        space = client.open(names)
        space.flush(keys)
        if rng.random() < 0.3 and keys:
            space.delete([rng.choice(keys)])
        if rng.random() < 0.5:
            push_out(space, rng)
    again = store()
    with LLM(model, config=config(), store=again) as engine:
        warm = engine.generate(asked, params)
        assert [output.token_ids for output in warm] == expected, f"seed {seed}"
        assert again.wait_stored(10)
        engine.core.step()
        engine.core.check_idle()
    return Counter(all_counted(again))


@pytest.mark.parametrize("lives", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_random_engines_answer_warm_as_cold(layered: DaemonProcess, lives: int) -> None:
    seed = int(os.environ.get("FOREBAY_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"replay with FOREBAY_SEED={seed}")
    counted: Counter[str] = Counter()
    for life in range(lives):
        counted += a_life(layered, seed + life)
    assert counted["loaded_blocks_ram"] + counted["loaded_blocks_ssd"] > lives
    if lives > 100:  # of RAM and disk both, or the test has lost its point
        assert counted["loaded_blocks_ssd"] > 10 and counted["loaded_blocks_ram"] > 10 and counted["load_holes_blocks"]
    layered.audit()
