"""A client of protocol version 1, kept as the bytes it sent, is served by every later daemon.

`tests/vectors/session-1.json` holds one session: each request's frame and what came back. The test sends the frames as they are
and compares what a client reads in the answers. Made anew only for a new protocol version, under a new name:
`python -m tests.server.test_old_clients FILE` (never over a file that a release was tested with).
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.daemon_process import DaemonProcess, serving

RECORDED = Path(__file__).parents[1] / "vectors" / "session-1.json"
HEADER = struct.Struct("<IBBHI")  # written out here: an old client doesn't learn from the new code
REPLY, ERROR = 2, 3
# Fields that differ from daemon to daemon: identities, sizes of its memory, places in it, measurements.
VARIES = {
    "hello": {0, 1, 4, 5, 6},
    "match": {1},
    "acquire": {1},
    "attach": {1},
    "allocate": {2},
    "stats": {0},
    "explain": {0},
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path)


def exchange(sock: socket.socket, frame: bytes) -> tuple[int, int, Any]:
    """Send one frame as it is. Returns kind, request id and body of the answer."""
    sock.sendall(frame)
    head = receive(sock, HEADER.size)
    length, version, kind, reserved, request = HEADER.unpack(head)
    assert (version, reserved) == (1, 0)
    return kind, request, msgspec.msgpack.decode(receive(sock, length))


def receive(sock: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part, _, _, _ = sock.recvmsg(
            count - len(parts), 1024
        )  # descriptors that come along are closed with the message
        assert part, "the daemon closed the session"
        parts += part
    return parts


def fixed(verb: str, body: list[Any]) -> list[Any]:
    """What of a reply must be the same with every daemon."""
    return [None if i in VARIES.get(verb, ()) else field for i, field in enumerate(body)]


def test_a_client_of_version_1_is_served(daemon: DaemonProcess) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert len(recorded) > 15
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(str(daemon.socket))
        for step in recorded:
            kind, request, body = exchange(sock, bytes.fromhex(step["frame"]))
            where = f"{step['verb']}, request {step['request']}: {body}"
            assert (kind, request) == (REPLY, step["request"]), where
            was = msgspec.msgpack.decode(bytes.fromhex(step["body"]))
            # A reply may grow at its end: old clients ignore fields that they don't know.
            assert len(body) >= len(was), where
            assert fixed(step["verb"], body[: len(was)]) == fixed(step["verb"], was), where
            assert [type(field) for field in body[: len(was)]] == [type(field) for field in was], where
    daemon.at_base()


def record(path: Path) -> None:
    """Make the file, with the present code."""
    from forebay.kvstore import wire
    from forebay.kvstore.identity import PUBLIC_SECRET, namespace_id
    from forebay.kvstore.keys import block_keys
    from forebay.kvstore.objects import ObjectLayout
    from tests.daemon_process import facts_of, payload_of

    facts = facts_of()
    space, layout = namespace_id(facts, tenant="default", secret=PUBLIC_SECRET), ObjectLayout.of(facts)
    tokens = list(range(3 * layout.block_tokens))
    keys = block_keys(space, tokens, layout.block_tokens, algorithm=facts.hash_algorithm)
    flat = b"".join(keys)
    requests: list[wire.Request[Any]] = [
        wire.Hello(1, 1, "", "an engine", 0),
        wire.Open(facts.encode()),
        wire.Match(1, 0, flat),
        wire.Acquire(1, 0, flat),
        wire.Allocate(1, 0, flat),
    ]
    for i, key in enumerate(keys):
        payload = payload_of(space, key, layout.payload_bytes)
        header = bytearray(layout.header_bytes)
        layout.write_header(
            header,
            key=key,
            parent=keys[i - 1] if i else None,
            namespace=space,
            position=i * layout.block_tokens,
            token_ids=tokens[i * layout.block_tokens : (i + 1) * layout.block_tokens],
            checksums=layout.part_checksums(payload),
            created_ns=1_700_000_000_000_000_000,
        )
        requests.append(wire.Write(1, i, 0, bytes(header) + payload))
    requests += [
        wire.Commit(1, b"\1\1\1"),
        wire.Match(1, 0, flat),
        wire.Allocate(1, 0, flat),
        wire.Acquire(1, 0, flat),
        wire.Attach(2),
        wire.Release(2),
        wire.Pin(1, 0, flat),
        wire.Unpin(1, 0, flat),
        wire.Prefetch(1, 0, flat, 100),
        wire.Flush(1, 0, flat, 100),
        wire.Explain(1, 0, flat),
        wire.Report("prefill", {"tokens": 48.0, "seconds": 0.5, "cached": 0.0}),
        wire.Stats(),
        wire.Delete(1, 0, flat),
        wire.Match(1, 0, flat),
        wire.CloseHandle(1),
    ]
    steps = []
    with (
        tempfile.TemporaryDirectory() as folder,
        DaemonProcess(Path(folder)) as daemon,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
    ):
        sock.connect(str(daemon.socket))
        for number, request in enumerate(requests, 1):
            frame = wire.encode_frame(wire.Kind.REQUEST, number, request)
            kind, _, body = exchange(sock, frame)
            assert kind == REPLY, (request, body)
            verb = str(type(request).__struct_config__.tag)
            body = [{} if i in VARIES.get(verb, ()) and isinstance(f, dict) else f for i, f in enumerate(body)]
            raw = msgspec.msgpack.encode(body).hex()
            steps.append({"verb": verb, "request": number, "frame": frame.hex(), "body": raw})
    path.write_text(json.dumps(steps, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
