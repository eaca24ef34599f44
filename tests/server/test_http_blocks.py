"""Blocks over HTTP, with a real daemon: what is put comes back, and what is wrong is refused and leaves nothing."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.clients import Client
from forebay.kvstore import wire
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import block_keys, token_words
from forebay.kvstore.objects import ObjectLayout
from forebay.server import http_bodies
from tests.daemon_process import (
    MIB,
    WAIT_S,
    DaemonProcess,
    RawSession,
    eventually,
    facts_of,
    payload_of,
    serving,
    tokens_of,
)

FACTS = facts_of()
LAYOUT = ObjectLayout.of(FACTS)
JSON, MSGPACK, OCTETS = http_bodies.JSON, http_bodies.MSGPACK, http_bodies.OCTETS


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(
        tmp_path_factory.mktemp("http"),
        lower="plain",
        http_port=0,
        max_uncommitted_bytes_per_session=4 * LAYOUT.object_bytes,
    )


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    yield running
    running.at_base()


def http_port(daemon: DaemonProcess) -> int:
    return int(daemon.stats()["http_url"].rpartition(":")[2])


@pytest.fixture(scope="module")
def port(running: DaemonProcess) -> int:
    return http_port(running)


@pytest.fixture
async def http(daemon: DaemonProcess, port: int) -> Any:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session


class Prompt:
    """A prompt's blocks under a namespace of its own."""

    def __init__(self, seed: int, blocks: int, namespace: bytes) -> None:
        self.namespace = namespace
        self.tokens = tokens_of(seed, blocks)
        self.keys = block_keys(namespace, self.tokens, FACTS.block_tokens)
        self.payloads = [payload_of(namespace, key, LAYOUT.payload_bytes) for key in self.keys]

    def words(self, block: int) -> bytes:
        size = FACTS.block_tokens
        return token_words(self.tokens[block * size : (block + 1) * size]).tobytes()

    def object(self, block: int, **changes: Any) -> bytes:
        view = bytearray(LAYOUT.object_bytes)
        view[LAYOUT.header_bytes :] = self.payloads[block]
        fields: dict[str, Any] = {
            "key": self.keys[block],
            "parent": self.keys[block - 1] if block else self.namespace,
            "namespace": self.namespace,
            "position": block * FACTS.block_tokens,
            "token_ids": self.words(block),
            "checksums": LAYOUT.part_checksums(self.payloads[block]),
            "created_ns": time.time_ns(),
        }
        LAYOUT.write_header(view, **(fields | changes))
        return bytes(view)


def json_facts(facts: NamespaceFacts) -> dict[str, Any]:
    fields = {name: getattr(facts, name) for name in facts.__dataclass_fields__ if name != "groups"}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}


async def call(http: aiohttp.ClientSession, method: str, path: str, **options: Any) -> tuple[int, Any]:
    async with http.request(method, path, **options) as response:
        body = await response.read()
        if response.content_type == OCTETS:
            return response.status, body
        decode = msgspec.msgpack.decode if response.content_type == MSGPACK else json.loads
        return response.status, decode(body)


async def opened(http: aiohttp.ClientSession, salt: bytes) -> bytes:
    data = facts_of(salt=salt).encode()
    status, body = await call(http, "POST", "/v1/namespaces", data=data, headers={"Content-Type": OCTETS})
    assert status == 200
    return bytes.fromhex(body["namespace"])


@pytest.fixture
async def prompt(http: aiohttp.ClientSession, request: pytest.FixtureRequest) -> Prompt:
    return Prompt(len(request.node.name), 4, await opened(http, request.node.name.encode()))


def at(prompt: Prompt, rest: str) -> str:
    return f"/v1/namespaces/{prompt.namespace.hex()}/{rest}"


async def put(http: aiohttp.ClientSession, prompt: Prompt, block: int, data: bytes | None = None) -> tuple[int, Any]:
    path = at(prompt, f"objects/{prompt.keys[block].hex()}")
    data = prompt.object(block) if data is None else data
    return await call(http, "PUT", path, data=data, headers={"Content-Type": OCTETS})


async def stored(http: aiohttp.ClientSession, prompt: Prompt) -> int:
    status, body = await call(http, "POST", at(prompt, "match"), json={"keys": [key.hex() for key in prompt.keys]})
    assert status == 200
    return int(body["blocks"])


# --- what comes back --------------------------------------------------------------------------------------------------


async def test_an_object_put_is_found_and_comes_back_byte_for_byte(http: aiohttp.ClientSession, prompt: Prompt) -> None:
    for block in range(4):
        assert await put(http, prompt, block) == (201, {"key": prompt.keys[block].hex(), "status": "stored"})
    assert await stored(http, prompt) == 4
    for block, key in enumerate(prompt.keys):
        status, body = await call(http, "GET", at(prompt, f"objects/{key.hex()}"))
        assert status == 200
        assert LAYOUT.verify_object(body, key=key, namespace=prompt.namespace, token_ids=prompt.words(block)) is None
        assert body[LAYOUT.header_bytes :] == prompt.payloads[block]
        status, body = await call(http, "GET", at(prompt, f"objects/{key.hex()}?part=payload"))
        assert (status, body) == (200, prompt.payloads[block])
    assert await put(http, prompt, 0) == (200, {"key": prompt.keys[0].hex(), "status": "present"})


async def test_a_run_goes_and_comes_in_one_request_and_ends_at_the_first_hole(
    http: aiohttp.ClientSession, prompt: Prompt
) -> None:
    data = b"".join(prompt.object(block) for block in range(3))
    status, body = await call(http, "POST", at(prompt, "objects"), data=data, headers={"Content-Type": OCTETS})
    assert (status, body) == (200, {"stored": 3, "present": 0, "pending": 0, "refused": 0})
    wanted = {"keys": [key.hex() for key in prompt.keys]}
    async with http.post(at(prompt, "get"), json=wanted) as response:
        assert response.headers["Forebay-Blocks"] == "3"
        found = await response.read()
    size = LAYOUT.object_bytes
    assert [found[i * size : (i + 1) * size][LAYOUT.header_bytes :] for i in range(3)] == prompt.payloads[:3]
    await call(http, "DELETE", at(prompt, f"objects/{prompt.keys[1].hex()}"))
    async with http.post(at(prompt, "get"), json=wanted) as response:
        assert response.headers["Forebay-Blocks"] == "1" and len(await response.read()) == size
    await call(http, "POST", at(prompt, "delete"), json=wanted)
    async with http.post(at(prompt, "get"), json=wanted) as response:
        assert response.headers["Forebay-Blocks"] == "0" and await response.read() == b""


async def test_blocks_of_tokens_and_payload_get_their_keys_and_headers_from_the_daemon(
    http: aiohttp.ClientSession, prompt: Prompt
) -> None:
    headers = {"Content-Type": OCTETS}
    pieces = [prompt.words(block) + prompt.payloads[block] for block in range(4)]
    status, body = await call(http, "POST", at(prompt, "blocks"), data=b"".join(pieces[:2]), headers=headers)
    assert status == 200 and body["stored"] == 2
    assert body["keys"] == [key.hex() for key in prompt.keys[:2]]
    rest = at(prompt, f"blocks?start_block=2&parent={prompt.keys[1].hex()}")
    status, body = await call(http, "POST", rest, data=b"".join(pieces[2:]), headers=headers)
    assert body["keys"] == [key.hex() for key in prompt.keys[2:]]
    for block, key in enumerate(prompt.keys):
        _, found = await call(http, "GET", at(prompt, f"objects/{key.hex()}"))
        assert LAYOUT.verify_object(found, key=key, namespace=prompt.namespace, token_ids=prompt.words(block)) is None
        assert LAYOUT.read_header(found).position == block * FACTS.block_tokens
        assert found[LAYOUT.header_bytes :] == prompt.payloads[block]


async def test_json_and_msgpack_say_the_same(http: aiohttp.ClientSession, prompt: Prompt) -> None:
    await put(http, prompt, 0)
    facts = facts_of(salt=b"json")
    _, by_json = await call(http, "POST", "/v1/namespaces", json=json_facts(facts))
    headers = {"Content-Type": MSGPACK}
    packed = msgspec.msgpack.encode({name: getattr(facts, name) for name in ("salt", *json_facts(FACTS))})
    _, by_msgpack = await call(http, "POST", "/v1/namespaces", data=packed, headers=headers)
    assert by_msgpack["namespace"].hex() == by_json["namespace"]
    assert by_msgpack["groups"] == by_json["groups"]
    assert by_json["groups"][0]["object_bytes"] == LAYOUT.object_bytes
    words = token_words(prompt.tokens).tobytes()
    _, listed = await call(http, "POST", at(prompt, "keys"), json={"token_ids": prompt.tokens})
    packed = msgspec.msgpack.encode({"token_ids": words})
    _, flat = await call(http, "POST", at(prompt, "keys"), data=packed, headers=headers)
    assert flat["keys"] == prompt.keys and listed["keys"] == [key.hex() for key in prompt.keys]
    packed = msgspec.msgpack.encode({"keys": b"".join(prompt.keys)})
    _, runs = await call(http, "POST", at(prompt, "match"), data=packed, headers=headers)
    assert (runs["blocks"], runs["runs"], set(runs["estimates"])) == (1, [["ram", 1]], {"ram", "below"})


async def test_what_left_ram_is_loaded_from_below_when_waited_for(
    http: aiohttp.ClientSession, daemon: DaemonProcess
) -> None:
    namespace = await opened(http, b"below")
    prompts = [Prompt(seed, 16, namespace) for seed in range(70)]  # 18 MiB through 16
    for prompt in prompts:
        data = b"".join(prompt.object(block) for block in range(16))
        _, body = await call(http, "POST", at(prompt, "objects"), data=data, headers={"Content-Type": OCTETS})
        assert body["stored"] == 16
    eventually(daemon.stats, lambda stats: stats["stores"]["default/net"]["copies_waiting"] == 0)
    first = prompts[0]
    _, runs = await call(http, "POST", at(first, "match"), json={"keys": [key.hex() for key in first.keys]})
    assert runs["blocks"] == 16 and runs["runs"][-1][0] == "below"
    wanted = {"keys": [key.hex() for key in first.keys], "wait_ms": 5000}
    async with http.post(at(first, "get"), json=wanted) as response:
        assert response.headers["Forebay-Blocks"] == "16" and int(response.headers["Forebay-Loaded"]) > 0
        found = await response.read()
    payloads = [found[i * LAYOUT.object_bytes :][LAYOUT.header_bytes : LAYOUT.object_bytes] for i in range(16)]
    assert payloads == first.payloads


# --- what is refused ----------------------------------------------------------------------------------------------------


async def test_nothing_that_is_wrong_becomes_visible(http: aiohttp.ClientSession, prompt: Prompt) -> None:
    flipped = bytearray(prompt.object(0))
    flipped[-1] ^= 1
    other = prompt.words(1)
    wrong: list[tuple[bytes, str]] = [
        (bytes(flipped), "checksum"),
        (prompt.object(0, token_ids=other), "does not follow"),
        (prompt.object(0, namespace=b"n" * 16), "another namespace"),
        (prompt.object(0, parent=b"p" * 16), "first block"),
        (prompt.object(0, position=1), "block's start"),
        (prompt.object(0, key=prompt.keys[1]), "another key than the path"),
        (prompt.object(0, created_ns=time.time_ns() + 10**12), "future"),
        (prompt.object(0)[:-1], "ends inside a payload"),
        (prompt.object(0)[:50], "ends inside a header"),
        (b"", "empty"),
        (b"x" * LAYOUT.object_bytes, "no header"),
    ]
    for data, words in wrong:
        status, body = await put(http, prompt, 0, data)
        assert status == 400 and words in body["error"]["message"], words
    status, body = await put(http, prompt, 1, prompt.object(1, parent=prompt.namespace))
    assert status == 400
    assert await stored(http, prompt) == 0
    assert (await call(http, "GET", at(prompt, f"objects/{prompt.keys[0].hex()}")))[0] == 404


async def test_extras_are_part_of_the_key_that_is_checked(http: aiohttp.ClientSession, prompt: Prompt) -> None:
    (key,) = block_keys(prompt.namespace, prompt.tokens[: FACTS.block_tokens], FACTS.block_tokens, extras={0: b"image"})
    data = prompt.object(0, key=key)
    path = at(prompt, f"objects/{key.hex()}")
    headers = {"Content-Type": OCTETS}
    assert (await call(http, "PUT", path, data=data, headers=headers))[0] == 400
    assert (await call(http, "PUT", f"{path}?extras={b'image'.hex()}", data=data, headers=headers))[0] == 201


@pytest.mark.parametrize(
    ("method", "rest", "options", "status", "words"),
    [
        ("POST", "match", {"json": {}}, 400, "give keys"),
        ("POST", "match", {"json": {"keys": []}}, 400, "1 to 65536"),
        ("POST", "match", {"json": {"keys": ["zz"]}}, 400, "not 32 hex digits"),
        ("POST", "match", {"json": {"keys": ["00" * 16], "group": 1}}, 404, "no group 1"),
        ("POST", "match", {"json": {"keys": ["00" * 16], "grp": 1}}, 400, "unknown name 'grp'"),
        ("POST", "match", {"json": [1]}, 400, "not a map"),
        ("POST", "match", {"data": b"{", "headers": {"Content-Type": JSON}}, 400, "is not application/json"),
        ("POST", "match", {"data": b"\xc1", "headers": {"Content-Type": MSGPACK}}, 400, "is not application/msgpack"),
        ("POST", "match", {"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "send Content-Type"),
        (
            "POST",
            "match",
            {"data": io.BytesIO(bytes(5 << 20)), "headers": {"Content-Type": JSON}},
            413,
            "over the limit",
        ),
        ("POST", "keys", {"json": {"token_ids": [-1]}}, 400, "integers within"),
        ("POST", "keys", {"json": {"token_ids": "hello"}}, 400, "a list of integers"),
        ("POST", "get", {"json": {"keys": ["00" * 16], "wait_ms": -1}}, 400, "wait_ms"),
        ("POST", "blocks?start_block=1", {"data": b"", "headers": {"Content-Type": OCTETS}}, 400, "give parent"),
        ("POST", "blocks", {"data": b"x", "headers": {"Content-Type": OCTETS}}, 400, "token ids"),
        ("GET", "objects/zz", {}, 400, "key is not 32 hex digits"),
        ("GET", f"objects/{'00' * 16}?part=head", {}, 400, "object or payload"),
        ("POST", "objects/x/y", {}, 404, "no such path"),
        ("DELETE", "match", {}, 405, "takes POST"),
    ],
)
async def test_a_wrong_request_is_told_what_is_wrong(
    http: aiohttp.ClientSession,
    prompt: Prompt,
    method: str,
    rest: str,
    options: dict[str, Any],
    status: int,
    words: str,
) -> None:
    found, body = await call(http, method, at(prompt, rest), **options)
    assert (found, words in body["error"]["message"]) == (status, True), body


async def test_a_namespace_that_nobody_opened_is_unknown(http: aiohttp.ClientSession) -> None:
    status, body = await call(http, "POST", f"/v1/namespaces/{'ab' * 16}/match", json={"keys": ["00" * 16]})
    assert (status, body["error"]["code"]) == (404, "unknown_handle")


@pytest.mark.parametrize("change", [{"kv_dtype": "int3"}, {"layers": "2"}, {"layers": 0}, {"more": 1}, {"rope": "zz"}])
async def test_facts_that_make_no_sense_are_refused(http: aiohttp.ClientSession, change: dict[str, Any]) -> None:
    status, body = await call(http, "POST", "/v1/namespaces", json=json_facts(FACTS) | change)
    assert status == 400, body


async def test_the_domain_of_this_door_is_apart_from_that_of_local_engines(
    http: aiohttp.ClientSession, daemon: DaemonProcess, prompt: Prompt
) -> None:
    """Anyone on this machine may ask without a token: not for what another user's engine stored."""
    with Client(daemon.socket) as client:
        space = client.open(facts_of(salt=b"apart"))
        tokens = tokens_of(1, 2)
        keys = space.keys(tokens)
        assert space.put(keys, tokens, [payload_of(space.id, key, LAYOUT.payload_bytes) for key in keys]).stored == 2
        assert await opened(http, b"apart") == space.id
        path = f"/v1/namespaces/{space.id.hex()}"
        assert (await call(http, "GET", f"{path}/objects/{keys[0].hex()}"))[0] == 404
        space.delete(keys)


# --- cut, slow and hostile peers ----------------------------------------------------------------------------------------


def raw(port: int, data: bytes, *, wait: bool = False) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(data)
        return sock.recv(65536) if wait else b""


async def test_a_put_cut_in_the_middle_leaves_neither_object_nor_place(
    http: aiohttp.ClientSession, daemon: DaemonProcess, prompt: Prompt, port: int
) -> None:
    data = prompt.object(0)
    head = (
        f"PUT {at(prompt, 'objects/' + prompt.keys[0].hex())} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {OCTETS}\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode()
    for cut in (0, 10, LAYOUT.header_bytes, LAYOUT.header_bytes + 1, len(data) - 1):
        raw(port, head + data[:cut])
    eventually(daemon.stats, lambda stats: stats["http"]["receiving_bytes"] == 0)
    assert await stored(http, prompt) == 0
    # A connection that was cut before the daemon looked at it begins, and ends, only now: its place is pending meanwhile.
    deadline_s = time.monotonic() + WAIT_S
    while (status := (await put(http, prompt, 0))[0]) == 409 and time.monotonic() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert status == 201


async def test_uploads_that_wait_are_bounded_and_told_so(
    http: aiohttp.ClientSession, daemon: DaemonProcess, prompt: Prompt, port: int
) -> None:
    waiting = []
    for block in range(4):
        data = prompt.object(block)
        path = at(prompt, "objects/" + prompt.keys[block].hex())
        head = (
            f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {OCTETS}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        sock.sendall(head.encode() + data[:-1])
        waiting.append((sock, data))
        if block == 0:
            eventually(daemon.stats, lambda stats: stats["http"]["receiving_bytes"] > 0)
            assert (await put(http, prompt, 0))[0] == 409  # another request writes it
    eventually(daemon.stats, lambda stats: stats["http"]["receiving_bytes"] == 4 * LAYOUT.object_bytes)
    other = Prompt(99, 1, prompt.namespace)
    status, body = await put(http, other, 0)
    assert (status, body["error"]["code"]) == (429, "over_limit")
    for sock, data in waiting:
        sock.sendall(data[-1:])
        assert b"201" in sock.recv(65536)
        sock.close()
    assert await stored(http, prompt) == 4
    assert (await put(http, other, 0))[0] == 201


async def test_a_reader_that_goes_away_leaves_no_lease(
    http: aiohttp.ClientSession, daemon: DaemonProcess, port: int
) -> None:
    namespace = await opened(http, b"gone")
    prompt = Prompt(5, 256, namespace)
    for start in range(0, 256, 32):
        data = b"".join(prompt.object(block) for block in range(start, start + 32))
        await call(http, "POST", at(prompt, "objects"), data=data, headers={"Content-Type": OCTETS})
    body = json.dumps({"keys": [key.hex() for key in prompt.keys]}).encode()
    head = (
        f"POST {at(prompt, 'get')} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    for _ in range(3):
        assert raw(port, head + body, wait=True).startswith(b"HTTP/1.1 200")
    _, done = await call(http, "POST", at(prompt, "delete"), json={"keys": [key.hex() for key in prompt.keys]})
    assert done["deleted"] == 256
    # With a lease left, a deleted object's place would stay in quarantine.
    eventually(daemon.stats, lambda stats: stats["tiers"]["ram"]["bytes"]["quarantined"] == 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_upset_the_door(daemon: DaemonProcess, port: int, data: st.DataObject) -> None:
    space = "0" * 32
    path = data.draw(
        st.sampled_from(
            [
                "/v1/namespaces",
                f"/v1/namespaces/{space}/get",
                f"/v1/namespaces/{space}/objects/{space}",
                "/v1/explain?x",
            ]
        )
    )
    method = data.draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "\x00"]))
    kind = data.draw(st.sampled_from([JSON, MSGPACK, OCTETS, "text/plain", ""]))
    table = st.dictionaries(
        st.sampled_from(["keys", "group", "layers", "groups", "token_ids", "x"]),
        st.integers(-(1 << 63), (1 << 63) - 1) | st.binary(),
    )
    body = data.draw(st.binary(max_size=300) | st.builds(msgspec.msgpack.encode, table))
    length = data.draw(st.sampled_from([len(body), len(body) + 1, 0, -1]))
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    raw(port, head.encode() + body)
    with RawSession(daemon.socket) as session:  # still there, and well
        session.hello()
        assert session.call(wire.Stats()).stats["health"]["ok"]


def test_the_door_has_logged_no_fault_and_no_text(daemon: DaemonProcess) -> None:
    assert "http request failed" not in daemon.log, daemon.log
    assert "Traceback" not in daemon.log, daemon.log


def test_an_object_of_many_megabytes_goes_through_in_pieces(tmp_path: Path) -> None:
    facts = facts_of(layers=32, kv_heads=8, head_dim=128, block_tokens=64)  # 8 MiB
    layout = ObjectLayout.of(facts)
    for daemon in serving(tmp_path, http_port=0, ram_bytes=64 * MIB, extent_bytes=16 * MIB):
        port = http_port(daemon)

        def ask(method: str, path: str, body: bytes | None = None, port: int = port) -> bytes:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{path}", body, {"Content-Type": OCTETS}, method=method
            )
            with urllib.request.urlopen(request, timeout=20) as response:
                return bytes(response.read())

        space = json.loads(ask("POST", "/v1/namespaces", facts.encode()))["namespace"]
        tokens = np.arange(64, dtype="<u4")
        payload = payload_of(b"big", b"one", layout.payload_bytes)
        (key,) = json.loads(ask("POST", f"/v1/namespaces/{space}/blocks", tokens.tobytes() + payload))["keys"]
        assert ask("GET", f"/v1/namespaces/{space}/objects/{key}?part=payload") == payload
