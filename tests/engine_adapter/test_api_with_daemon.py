"""The engine's API over a real daemon: what `forebay engine serve --store` connects, and a daemon killed under load."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from forebay.engine.api.keys import ApiKeys
from forebay.engine.api.server import ApiServer
from forebay.engine.async_engine import AsyncEngine
from forebay.engine.config import EngineConfig
from forebay.engine.loading import LoadedModel, load_model
from forebay.engine_adapter.bundled import connect, namespace_facts
from forebay.kvstore.cost import PrefillModel
from forebay.kvstore.plan import Plan, plan
from tests.daemon_process import DaemonProcess, eventually
from tests.engine.api.model_folder import save_tiny_model
from tests.engine.api.served import Served
from tests.engine_adapter.bundled_tools import SLOW

CLIENTS, KILLS, PREFIXES = 64, 4, 64
CONFIG = EngineConfig(precision="fp32", block_tokens=16, pool_blocks=160, max_sequences=24, threads=1)


def eager(runs: Any, estimates: Any, prefill: PrefillModel, **facts: Any) -> Plan:
    """The real planner on a slow engine: computing a tiny model is quicker than any load."""
    return plan(runs, estimates, SLOW, **facts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def prompts() -> list[str]:
    """Two for each of many prefixes of some ten blocks, which don't fit in the pool together."""
    shared = [f"{i} {'one two three four ' * 45}" for i in range(PREFIXES)]
    return [f"{prefix} moves {end}" for end in range(2) for prefix in shared]


async def ask(client: openai.AsyncOpenAI, prompt: str, stream: bool) -> str:
    about: dict[str, Any] = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    about["extra_body"] = {"ignore_eos": True}
    if not stream:
        return (await client.completions.create(**about)).choices[0].text
    chunks = await client.completions.create(stream=True, **about)
    return "".join([chunk.choices[0].text async for chunk in chunks])


async def expected(loaded: LoadedModel) -> dict[str, str]:
    """Each prompt's answer by an engine without a store."""
    engine = AsyncEngine(loaded.model, loaded.tokenizer, CONFIG)
    server = ApiServer(engine, loaded.tokenizer, model="tiny", keys=ApiKeys())
    await server.start()
    try:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            texts = await asyncio.gather(*(ask(client, prompt, False) for prompt in prompts()))
    finally:
        await server.stop()
        await engine.close()
    return dict(zip(prompts(), texts, strict=True))


async def test_no_request_fails_while_the_daemon_is_killed_and_restarted_under_64_clients(
    folder: Path, tmp_path: Path
) -> None:
    loaded = load_model(folder, "fp32")
    answers = await expected(loaded)
    facts = namespace_facts(
        loaded.config, weights_digest=loaded.weights_digest, precision="fp32", kv_dtype=loaded.model.kv_dtype,
        block_tokens=CONFIG.block_tokens, head_groups=loaded.config.kv_heads,
    )  # fmt: skip
    with DaemonProcess(tmp_path) as daemon:
        store = connect(daemon.socket, facts, prior=SLOW, planner=eager, backoff_s=0.05)
        engine = AsyncEngine(loaded.model, loaded.tokenizer, CONFIG, store)
        server = ApiServer(engine, loaded.tokenizer, model="tiny", keys=ApiKeys(), store_stats=store.stats)
        await server.start()
        over, progress = asyncio.Event(), asyncio.Semaphore(0)
        asked = 0

        async def client_of(number: int, client: openai.AsyncOpenAI) -> None:
            nonlocal asked
            while not over.is_set():
                prompt = prompts()[(number + 7 * asked) % len(answers)]
                assert await ask(client, prompt, stream=asked % 2 == 0) == answers[prompt]
                asked += 1
                progress.release()

        def daemon_is_used() -> None:
            """Wait until the engine has found it, and loads from it."""
            before = store.stats()["counters"]["loaded_blocks_ram"]
            eventually(daemon.stats, lambda stats: stats["tiers"]["ram"]["objects"] > 0)
            eventually(lambda: store.stats()["counters"]["loaded_blocks_ram"], lambda count: count > before)

        async def trouble() -> None:
            for life in range(1 + KILLS):
                if life:
                    await asyncio.to_thread(daemon.kill)
                    await asyncio.sleep(0.3)
                    await asyncio.to_thread(daemon.start)
                for _ in range(2 * CLIENTS):
                    await progress.acquire()
                await asyncio.to_thread(daemon_is_used)
            over.set()

        try:
            async with (
                openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60) as client,
                asyncio.TaskGroup() as group,
            ):
                for number in range(CLIENTS):
                    group.create_task(client_of(number, client))
                group.create_task(trouble())
            # The store reads the last blocks for a moment after the last answer.
            await asyncio.to_thread(
                eventually, lambda: engine.stats().blocks, lambda blocks: not blocks.used + blocks.held
            )
            await engine.check_idle()
            stats, counters = engine.stats(), store.stats()["counters"]
        finally:
            await server.stop()
            await engine.close()
        assert stats.counters.finished["stop"] + stats.counters.finished["length"] == asked >= 2 * CLIENTS * KILLS
        assert stats.counters.cached_store_tokens > 0 and counters["loaded_blocks_ram"] > 0
        daemon.at_base()


@pytest.mark.parametrize("how", ["socket", "tcp", "auto", "embedded"])
def test_serve_stores_where_it_is_told_to(how: str, folder: Path, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "one two three four " * 60, "max_tokens": 2}
    with DaemonProcess(tmp_path, tcp=True) as daemon:
        where = {"socket": str(daemon.socket), "tcp": daemon.tcp}.get(how, how)
        environ = {"FOREBAY_SOCKET": str(daemon.socket)} if how == "auto" else {"FOREBAY_TOKEN": daemon.token}
        if how == "embedded":
            environ = {"FOREBAY_RAM_BYTES": "32MiB", "FOREBAY_EXTENT_BYTES": "1MiB"}
        options = ("--store", where, "--precision", "fp32", "--block-tokens", "16", "--pool-bytes", "16MiB")
        with Served(folder, tmp_path, *options, environ=environ) as served:
            assert served.post("/v1/completions", body)[0] == 200
            assert served.at_rest()["forebay_engine_store_stored_blocks_total"] >= 15
            assert (daemon.stats()["tiers"]["ram"]["objects"] > 0) == (how != "embedded")
            daemon.kill()
            assert served.post("/v1/completions", body | {"prompt": "another " * 60})[0] == 200
            served.at_rest()
            assert served.stop() == 0
