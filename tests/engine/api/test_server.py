"""The server over an engine that fails, waits and stalls on demand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from forebay.engine import errors
from forebay.engine.api import streaming
from forebay.engine.api.keys import ApiKeys, is_loopback
from forebay.engine.api.server import ApiServer
from forebay.engine.tokenizer import load_tokenizer
from forebay.engine.weights import open_weights
from tests.engine.api.fake_engine import FakeEngine
from tests.engine.api.model_folder import save_tiny_model

BODY: dict[str, Any] = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4}
STORE = {"counters": {"loaded_blocks_ssd": 5, "load_s": 0.5}, "away": False, "reasons": {"x": "words are no samples"}}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def server(engine: FakeEngine, model_folder: Path) -> AsyncIterator[ApiServer]:
    tokenizer = load_tokenizer(model_folder, open_weights(model_folder))
    server = ApiServer(engine, tokenizer, model="m", keys=ApiKeys(), store_stats=lambda: STORE)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def ask(client: aiohttp.ClientSession, **change: Any) -> tuple[int, Any]:
    async with client.post("/v1/completions", json=BODY | change) as response:
        return response.status, await response.json()


async def events(client: aiohttp.ClientSession, **change: Any) -> list[Any]:
    async with client.post("/v1/completions", json=BODY | {"stream": True} | change) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) if line.startswith("data") else line for line in lines[:-2]]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (errors.BadLogits(3), 500, "bad_logits"),
        (errors.StepFailed("a secret"), 500, None),
        (errors.PoolExhausted("a secret"), 500, None),
        (errors.EngineClosed("a secret"), 500, "engine_stopped"),
        (errors.QueueFull(5, 5), 429, "rate_limit_exceeded"),
        (errors.PromptTooLong(9, 5, "pool"), 400, "context_length_exceeded"),
        (errors.BadPrompt("ids"), 400, None),
    ],
)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_failure_before_the_first_token_has_its_status_in_a_stream_too(
    engine: FakeEngine,
    client: aiohttp.ClientSession,
    failure: errors.EngineError,
    status: int,
    code: str | None,
    n: int,
) -> None:
    engine.fail = failure
    for stream in (False, True):
        found, body = await ask(client, stream=stream, n=n)
        assert found == status and body["error"]["code"] == code and "secret" not in body["error"]["message"]
    assert engine.open == 0


async def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(
    engine: FakeEngine, client: aiohttp.ClientSession
) -> None:
    engine.fail, engine.fail_after = errors.BadLogits(3), 2
    said = await events(client)
    assert [event["choices"][0]["text"] for event in said[:-1]] == ["ü", "x"]
    assert said[-1]["error"]["code"] == "bad_logits" and said[-1]["error"]["type"] == "server_error"
    assert engine.open == 0


async def test_a_silence_is_filled_with_comments(
    engine: FakeEngine, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    engine.pace_s = 0.3
    said = await events(client, max_tokens=1)
    assert said.count(": still working") >= 3 and said[-1]["choices"][0]["text"] == "ü"


async def test_a_client_that_does_not_read_is_given_up(
    engine: FakeEngine, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "WRITE_S", 0.2)
    engine.limit_tokens = 1 << 30
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]), limit=1024)
    body = json.dumps(BODY | {"stream": True, "max_tokens": 1 << 20, "return_token_ids": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"\r\n")
    for _ in range(1000):
        if engine.open == 0:
            break
        await asyncio.sleep(0.02)
    assert engine.open == 0
    writer.close()


async def test_usage_says_where_the_prefix_came_from(client: aiohttp.ClientSession) -> None:
    usage = (await ask(client))[1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 48}
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)
    assert usage["forebay"]["pool_tokens"] == 16 and usage["forebay"]["store_tokens"] == 32
    assert usage["forebay"]["first_token_s"] == 0.25


async def test_fields_beyond_openais_reach_the_engine(engine: FakeEngine, client: aiohttp.ClientSession) -> None:
    wanted = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "stop_token_ids": [7]}
    wanted |= {"min_tokens": 2, "cache_salt": "ü", "cache_load": False, "cache_store": False}
    assert (await ask(client, **wanted))[0] == 200
    (asked,) = engine.asked
    assert (asked.top_k, asked.min_p, asked.repetition_penalty, asked.ignore_eos) == (5, 0.1, 1.1, True)
    assert (asked.stop_token_ids, asked.min_tokens, asked.cache_salt) == ((7,), 2, "ü".encode())
    assert (asked.load, asked.store) == (False, False)


async def test_metrics_are_the_engines_own_numbers_and_the_stores(
    engine: FakeEngine, client: aiohttp.ClientSession
) -> None:
    await ask(client)
    await ask(client, model="other")
    async with client.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    for sample in (
        "forebay_engine_blocks_cached 4.0",
        "# TYPE forebay_engine_pool_blocks gauge\nforebay_engine_pool_blocks 10.0",
        "forebay_engine_steps_total 7.0",
        "forebay_engine_prefill_seconds_total 1.5",
        'forebay_engine_requests_total{finish_reason="stop"} 3.0',
        "forebay_engine_store_loaded_blocks_ssd_total 5.0",
        "forebay_engine_store_load_seconds_total 0.5",
        "forebay_engine_store_away 0.0",
        'forebay_engine_http_answers_total{route="/v1/completions",status="404"} 1.0',
        'forebay_engine_time_to_first_token_seconds_bucket{le="0.25"} 1.0',
        "forebay_engine_request_seconds_count 1.0",
    ):
        assert f"{sample}\n" in text
    assert "words" not in text


async def test_health_tells_a_failed_engine_and_a_draining_server(
    engine: FakeEngine, server: ApiServer, client: aiohttp.ClientSession
) -> None:
    async def health() -> tuple[int, Any]:
        async with client.get("/health") as response:
            return response.status, (await response.json())["status"]

    assert await health() == (200, "ok")
    engine.healthy = False
    assert await health() == (503, "failed")
    engine.healthy, engine.pace_s = True, 0.1
    last = asyncio.create_task(ask(client))
    await asyncio.sleep(0.1)
    assert not await server.drain(0.01)
    assert await health() == (503, "draining")
    assert (await ask(client))[0] == 503
    assert await server.drain(5) and (await last)[0] == 200


async def test_a_failing_handler_fails_one_request_and_shows_no_details(
    engine: FakeEngine, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "generate", None)
    status, body = await ask(client)
    assert status == 500 and body["error"]["type"] == "server_error" and "NoneType" not in body["error"]["message"]
    assert "request failed" in caplog.text


async def test_a_model_whose_chat_template_is_broken_refuses_chats_by_name(
    engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path / "m")
    (model / "chat_template.jinja").write_text("{% for %}")
    server = ApiServer(engine, load_tokenizer(model, open_weights(model)), model="m", keys=ApiKeys())
    await server.start()
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    async with aiohttp.ClientSession(server.url) as client, client.post("/v1/chat/completions", json=chat) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "no_chat_template")
    await server.stop()
    assert not caplog.records


@pytest.mark.parametrize("key", ["short", "x" * 513, "has a space in it", "überlang-genug-aber"])
def test_a_key_that_is_no_secret_or_no_header_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(ValueError, match="an API key has") as caught:
        ApiKeys([key])
    assert key not in str(caught.value)


def test_loopback_is_known_by_address_not_by_looks() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "localhost", "a.localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "", "10.0.0.1", "127.0.0.1.evil.example", "localhost.evil"]))
