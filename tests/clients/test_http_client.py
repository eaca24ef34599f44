"""`HttpClient`: what it stores it finds again, what it can't trust is a shorter run, and every call ends."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import HttpClient, HttpNamespace
from forebay.kvstore.errors import AccessDenied, ClientClosed, DaemonTimeout, DaemonUnavailable, Forbidden
from forebay.server import auth
from tests.daemon_process import DaemonProcess, facts_of, payload_of, serving, tokens_of


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("http"), http_port=0)


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    yield running
    running.at_base()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[HttpClient]:
    with HttpClient(daemon.stats()["http_url"]) as client:
        yield client


def filled(space: HttpNamespace, seed: int, blocks: int) -> tuple[list[bytes], list[int], list[bytes]]:
    tokens = tokens_of(seed, blocks)
    keys = space.keys(tokens)
    payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
    assert space.put(keys, tokens, payloads).stored == blocks
    return keys, tokens, payloads


def test_what_is_put_is_matched_and_comes_back_and_is_deleted(client: HttpClient) -> None:
    space = client.open(facts_of(salt=b"all"))
    keys, tokens, payloads = filled(space, 1, 8)
    again = space.put(keys, tokens, payloads)
    assert (again.stored, again.present) == (0, 8)
    assert space.match(keys).blocks == 8 and space.match(keys).estimates["ram"].healthy
    size = space.layout().payload_bytes
    out = bytearray(8 * size)
    assert space.get_into(keys, out, tokens) == 8
    assert out == b"".join(payloads)
    more = tokens_of(2, 2)
    tail = space.keys(more, parent=keys[-1])
    assert space.put(tail, more, payloads[:2], keys[-1], 8).stored == 2
    assert space.get_into(tail, [bytearray(size), bytearray(size)], more) == 2
    assert space.delete(keys[3:4]) == 1
    assert space.get_into(keys, out) == 3
    assert client.stats()["http"]["bytes_in_total"] > 0
    space.delete([*keys, *tail])


def test_no_keys_are_a_miss_and_no_error(client: HttpClient) -> None:
    space = client.open(facts_of(salt=b"none"))
    assert space.match([]).blocks == space.delete([]) == space.get_into([], bytearray()) == 0
    assert space.explain([]) == []


def test_other_tokens_than_the_stored_ones_end_the_run(client: HttpClient) -> None:
    space = client.open(facts_of(salt=b"tokens"))
    keys, tokens, _ = filled(space, 1, 4)
    out = bytearray(4 * space.layout().payload_bytes)
    wrong = list(tokens)
    wrong[space.facts.block_tokens * 2] ^= 1
    assert space.get_into(keys, out, wrong) == 2
    space.delete(keys)


def test_threads_share_a_client(client: HttpClient) -> None:
    space = client.open(facts_of(salt=b"threads"))
    done: list[int] = []

    def work(seed: int) -> None:
        keys, tokens, payloads = filled(space, seed, 6)
        out = bytearray(6 * space.layout().payload_bytes)
        assert space.get_into(keys, out, tokens) == 6 and out == b"".join(payloads)
        done.append(space.delete(keys))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert done == [6] * 6


def test_a_restarted_daemon_is_told_the_facts_again(tmp_path: Path) -> None:
    for daemon in serving(tmp_path, http_port=0):
        url = daemon.stats()["http_url"]
        port = int(url.rpartition(":")[2])
        daemon._settings["http_port"] = port  # the same one in its next life
        with HttpClient(url) as client:
            space = client.open(facts_of())
            keys, tokens, payloads = filled(space, 1, 2)
            daemon.kill()
            with pytest.raises(DaemonUnavailable):
                space.match(keys)
            daemon.start()
            assert space.match(keys).blocks == 0
            assert space.put(keys, tokens, payloads).stored == 2


def test_a_token_decides_what_may_be_done(tmp_path: Path) -> None:
    tokens = {right: auth.new_token() for right in ("read", "write")}
    (tmp_path / "secret").write_bytes(auth.new_secret())
    (tmp_path / "secret").chmod(0o600)
    table = {
        right: {"tenant": "acme", "token_sha256": auth.token_digest(token).hex(), "rights": [right]}
        for right, token in tokens.items()
    }
    admin = auth.new_token()
    table["admin"] = {"tenant": "default", "token_sha256": auth.token_digest(admin).hex(), "rights": ["admin"]}
    tenants = {"acme": {"secret_file": str(tmp_path / "secret")}}
    with DaemonProcess(tmp_path, http_port=0, credentials=table, tenants=tenants, unix_rights=["admin"]) as daemon:
        url = daemon.stats()["http_url"]
        with pytest.raises(AccessDenied), HttpClient(url, token="") as nobody:
            nobody.open(facts_of())
        with HttpClient(url, token=tokens["write"]) as writer, HttpClient(url, token=tokens["read"]) as reader:
            space = writer.open(facts_of())
            keys, words, payloads = filled(space, 1, 3)
            out = bytearray(3 * space.layout().payload_bytes)
            with pytest.raises(Forbidden, match="the right to read"):
                space.get_into(keys, out)
            seen = reader.open(facts_of())
            assert seen.id == space.id and seen.get_into(keys, out, words) == 3 and out == b"".join(payloads)
            for refused in (lambda: seen.delete(keys), lambda: seen.put(keys, words, payloads), reader.stats):
                with pytest.raises(Forbidden):
                    refused()
        with HttpClient(url, token=admin) as operator:
            assert operator.stats()["http"]["bytes_out_total"] > 0
        assert f"acme/{os.getuid()}" in {row["domain"] for row in daemon.stats()["tiers"]["ram"]["classes"]}
        assert not any(token in daemon.log for token in (*tokens.values(), admin))


# --- servers that are not what they should be ---------------------------------------------------------------------------


class Lying(http.server.BaseHTTPRequestHandler):
    """Answers `open` rightly and `get` with what the test says."""

    protocol_version = "HTTP/1.1"
    namespace = b"n" * 16
    blocks, data, length = "1", b"", None

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        opened = json.dumps({"namespace": self.namespace.hex()}).encode()
        body = self.data if self.path.endswith("/get") else opened
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) if self.length is None else self.length))
        self.send_header("Forebay-Blocks", self.blocks)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.length is not None

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def liar() -> Iterator[tuple[HttpNamespace, type[Lying]]]:
    handler = type("Handler", (Lying,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with HttpClient(f"http://127.0.0.1:{server.server_port}", timeout_s=5) as client:
            yield client.open(facts_of()), handler
        server.shutdown()
        thread.join(10)


def test_what_a_lying_server_sends_is_no_hit(liar: tuple[HttpNamespace, type[Lying]]) -> None:
    space, handler = liar
    layout, tokens = space.layout(), tokens_of(1, 1)
    (key,) = space.keys(tokens)
    good = bytearray(layout.object_bytes)
    good[layout.header_bytes :] = payload_of(space.id, key, layout.payload_bytes)
    checksums = layout.part_checksums(memoryview(good)[layout.header_bytes :])

    def header(**changes: Any) -> bytes:
        fields: dict[str, Any] = {"key": key, "parent": None, "namespace": space.id, "position": 0, "token_ids": tokens}
        layout.write_header(good, **(fields | {"checksums": checksums, "created_ns": 0} | changes))
        return bytes(good)

    out = bytearray(layout.payload_bytes)
    for data in (
        header(key=b"k" * 16),
        header(namespace=b"o" * 16),
        header(token_ids=tokens_of(2, 1)),
        header(checksums=[1, 2]),
        bytes(layout.object_bytes),
    ):
        handler.data = data
        assert space.get_into([key], out, tokens) == 0
    handler.data = header()
    assert space.get_into([key], out, tokens) == 1
    handler.data, handler.length = header()[:-1], layout.object_bytes  # type: ignore[assignment]
    with pytest.raises(DaemonUnavailable):
        space.get_into([key], out, tokens)
    handler.data, handler.length, handler.blocks = header() * 2, None, "2"
    assert space.get_into([key], out, tokens) == 1


def test_a_silent_server_ends_the_call_by_its_deadline() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client,
    ):
        began_s = time.monotonic()
        with pytest.raises(DaemonTimeout):
            client.open(facts_of(), timeout_s=0.2)
        assert time.monotonic() - began_s < 5


def test_an_address_that_is_none_and_a_closed_client_are_told(daemon: DaemonProcess) -> None:
    for url in ("127.0.0.1:1", "ftp://x", "http://", "http://x/path"):
        with pytest.raises(ValueError, match="not an address"):
            HttpClient(url)
    client = HttpClient(daemon.stats()["http_url"])
    client.close()
    with pytest.raises(ClientClosed):
        client.open(facts_of())
