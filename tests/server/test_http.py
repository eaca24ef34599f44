"""The HTTP door: its routes, its bounds, and errors that stay JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from forebay.kvstore.errors import BadRequest, Draining, UnknownHandle
from forebay.server import http

from .fakes import FakeDaemon

NAMESPACE = "ab" * 16
KEY = "01" * 16


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
async def door(daemon: FakeDaemon) -> AsyncIterator[http.HttpDoor]:
    door = http.HttpDoor(daemon)
    await door.start()
    yield door
    await door.stop()


@pytest.fixture
async def client(door: http.HttpDoor) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(door.url) as session:
        yield session


async def ask(client: aiohttp.ClientSession, path: str, method: str = "GET", **options: Any) -> tuple[int, Any]:
    async with client.request(method, path, **options) as response:
        assert response.content_type == "application/json", await response.text()
        return response.status, json.loads(await response.read())


async def test_stats_are_the_daemons_own(client: aiohttp.ClientSession, daemon: FakeDaemon) -> None:
    assert await ask(client, "/v1/stats") == (200, daemon.numbers)


async def test_health_and_readiness_are_told_apart_and_give_reasons(
    client: aiohttp.ClientSession, daemon: FakeDaemon
) -> None:
    assert (await ask(client, "/healthz"))[0] == 200
    assert (await ask(client, "/readyz"))[0] == 200
    daemon.state = {"ok": True, "ready": False, "reasons": ["draining"]}
    assert (await ask(client, "/healthz"))[0] == 200
    status, body = await ask(client, "/readyz")
    assert (status, body["reasons"]) == (503, ["draining"])
    daemon.state = {"ok": False, "ready": False, "reasons": ["quarantine full"]}
    status, body = await ask(client, "/healthz")
    assert (status, body["reasons"]) == (503, ["quarantine full"])


async def test_metrics_are_in_prometheus_text(client: aiohttp.ClientSession) -> None:
    async with client.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'forebay_tier_hits_total{tier="ram"} 7.0' in await response.text()


async def test_explain_passes_namespace_and_keys_on(client: aiohttp.ClientSession, daemon: FakeDaemon) -> None:
    status, body = await ask(client, f"/v1/explain?namespace={NAMESPACE.upper()}&keys={KEY},{NAMESPACE}")
    assert status == 200
    assert body == {
        "namespace": NAMESPACE,
        "objects": [{"key": KEY, "state": "absent"}, {"key": NAMESPACE, "state": "absent"}],
    }
    assert daemon.asked == [(NAMESPACE, [KEY, NAMESPACE])]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("", "namespace is not 32 hex digits"),
        (f"namespace={NAMESPACE}", "keys is not 32 hex digits"),
        (f"namespace=abcd&keys={KEY}", "namespace is not"),
        (f"namespace={NAMESPACE}&keys={KEY},zz", "keys is not"),
        (f"namespace={NAMESPACE}&keys={KEY[:-1]} ", "is not 32 hex digits"),
        (f"namespace={NAMESPACE}&keys={KEY}&key={KEY}", "unknown parameter 'key'"),
        (f"namespace={NAMESPACE}&keys={','.join([KEY] * 1025)}", "at most 1024"),
    ],
)
async def test_explain_says_what_is_wrong_with_a_question(
    client: aiohttp.ClientSession, daemon: FakeDaemon, query: str, words: str
) -> None:
    status, body = await ask(client, f"/v1/explain?{query}")
    assert status == 400 and body["error"]["code"] == "bad_request"
    assert words in body["error"]["message"]
    assert daemon.asked == []


async def test_explain_takes_its_full_number_of_keys(client: aiohttp.ClientSession) -> None:
    status, body = await ask(client, f"/v1/explain?namespace={NAMESPACE}&keys={','.join([KEY] * 1024)}")
    assert status == 200 and len(body["objects"]) == 1024


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequest("no"), 400, "bad_request"),
        (UnknownHandle("no"), 404, "unknown_handle"),
        (Draining("no"), 503, "draining"),
        (TimeoutError(), 504, "timeout"),
    ],
)
async def test_errors_of_the_daemon_keep_their_code(
    client: aiohttp.ClientSession, daemon: FakeDaemon, error: Exception, status: int, code: str
) -> None:
    daemon.fail = error
    found, body = await ask(client, f"/v1/explain?namespace={NAMESPACE}&keys={KEY}")
    assert (found, body["error"]["code"]) == (status, code)


async def test_a_failing_handler_fails_one_request_and_shows_no_details(
    client: aiohttp.ClientSession, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.fail = RuntimeError("a secret detail")
    with caplog.at_level(logging.ERROR):
        status, body = await ask(client, "/v1/stats")
    assert (status, body["error"]["code"]) == (500, "daemon_fault")
    assert "secret" not in json.dumps(body)
    assert "http request failed" in caplog.text
    daemon.fail = None
    assert (await ask(client, "/v1/stats"))[0] == 200


async def test_an_unknown_path_is_a_json_error_that_lists_the_known_ones(client: aiohttp.ClientSession) -> None:
    status, body = await ask(client, "/v1/nothing")
    assert (status, body["error"]["code"]) == (404, "not_found")
    assert "/v1/stats" in body["error"]["message"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_a_wrong_method_is_a_json_error_with_allow(client: aiohttp.ClientSession, method: str) -> None:
    async with client.request(method, "/v1/stats", data=b"x") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "GET,HEAD"
        assert json.loads(await response.read())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("host", ["127.0.0.1:7090", "localhost:9", "[::1]:7090", "127.8.8.8", "forebay.localhost"])
async def test_a_request_under_a_loopback_name_is_answered(client: aiohttp.ClientSession, host: str) -> None:
    assert (await ask(client, "/v1/stats", headers={"Host": host}))[0] == 200


@pytest.mark.parametrize("host", ["evil.example:7090", "10.0.0.1", "[2001:db8::1]:7090", "localhost.evil.example"])
async def test_a_request_under_a_foreign_name_is_refused(client: aiohttp.ClientSession, host: str) -> None:
    status, body = await ask(client, "/v1/stats", headers={"Host": host})
    assert (status, body["error"]["code"]) == (403, "foreign_host")


async def test_a_request_line_without_end_is_refused_and_the_door_stays_open(
    door: http.HttpDoor, client: aiohttp.ClientSession
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    writer.write(b"GET /v1/stats?" + b"x" * (http.MAX_LINE_BYTES + 1) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"400"
    writer.close()
    with contextlib.suppress(ConnectionError):  # closed by the door with our bytes unread
        await writer.wait_closed()
    assert (await ask(client, "/v1/stats"))[0] == 200


async def test_a_taken_port_is_an_os_error_and_stop_is_idempotent(door: http.HttpDoor, daemon: FakeDaemon) -> None:
    second = http.HttpDoor(daemon, port=door.port)
    with pytest.raises(OSError, match=rf"{door.url}.*--http-port"):
        await second.start()
    await second.stop()
    await door.stop()
    await door.stop()
