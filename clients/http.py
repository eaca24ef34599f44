"""`HttpClient`: blocks over HTTP, for where neither the daemon's socket nor its TCP door can be reached.

Standard library only. Any number of threads may use one client; each call takes a connection of its own and gives it back.
Always true: every call ends by its deadline; what came over the network is compared with key, namespace, tokens and checksums
before it counts; a doubt is a shorter run.
"""

from __future__ import annotations

import functools
import http.client
import json
import select
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from forebay.clients.copying import targets_of
from forebay.clients.keying import Keying
from forebay.clients.results import Match, PutResult, TierRun
from forebay.clients.writing import Run
from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.errors import (
    PROTOCOL_ERRORS,
    ClientClosed,
    DaemonTimeout,
    DaemonUnavailable,
    ProtocolError,
    UnknownHandle,
)
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import TokenIds, token_words
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.secretfile import token_from_environment
from forebay.kvstore.tier import Buffer, WritableBuffer

T = TypeVar("T")
_OCTETS: Final = "application/octet-stream"
_JSON: Final = "application/json"
_MAX_ANSWER_BYTES: Final = 64 << 20
_IDLE_CONNECTIONS: Final = 8
_PIECE: Final = 1 << 20
_SMALL_BYTES: Final = 64 << 10
_BATCH_BYTES: Final = 64 << 20  # of objects in one request
_BATCH_OBJECTS: Final = 4096


class HttpClient:
    """A client of one daemon's HTTP door."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:7090",
        *,
        token: str | None = None,
        timeout_s: float = 5.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            url: http:// or https://, host and port.
            token: credentials; None takes FOREBAY_TOKEN, or what the file FOREBAY_TOKEN_FILE holds.
            timeout_s: deadline of every call that names none.
            tls: for https; None checks certificates as the system does.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"{url!r} is not an address such as http://127.0.0.1:7090")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: a call needs some time")
        self.url = url
        self.timeout_s = timeout_s
        self._address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        token = token_from_environment() if token is None else token
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._idle: list[http.client.HTTPConnection] = []
        self._state = threading.Lock()
        self._closed = False

    def open(self, facts: NamespaceFacts, *, timeout_s: float | None = None) -> HttpNamespace:
        """Open a namespace. The daemon gives it its id, from the facts and this client's tenant."""
        said = self.ask("POST", "/v1/namespaces", facts.encode(), _OCTETS, timeout_s=timeout_s)
        return HttpNamespace(self, facts, bytes.fromhex(said["namespace"]))

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the daemon has done and holds, as nested numbers. For operators."""
        return self.ask("GET", "/v1/stats", timeout_s=timeout_s)

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        content_type: str = _JSON,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """One request with a small body and a JSON answer.

        Raises: DaemonUnavailable, DaemonTimeout, ClientClosed, or what the daemon answered (ProtocolError).
        """
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.request(method, path, [data], len(data), content_type, timeout_s) as answer:
            found: dict[str, Any] = json.loads(answer.read_all())
            return found

    @contextmanager
    def request(
        self,
        method: str,
        path: str,
        pieces: Iterable[Buffer],
        size: int,
        content_type: str,
        timeout_s: float | None,
    ) -> Iterator[Answer]:
        """One request; `pieces` are its body of `size` bytes, drawn as they are sent. Raises: as `ask`."""
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        connection, fresh = self._take(deadline_s)
        whole = False
        try:
            if not fresh and _has_news(connection):
                # The daemon has closed a connection that was kept: nothing is lost but the way there.
                connection.close()
                connection, _ = self._take(deadline_s, fresh=True)
            response = self._send(connection, method, path, pieces, size, content_type, deadline_s)
            answer = Answer(connection, response, deadline_s)
            if response.status >= 400:
                raise _refusal(response.status, answer.read_all())
            yield answer
            whole = response.isclosed()
        except TimeoutError as exc:
            raise DaemonTimeout("the daemon did not answer within the call's deadline") from exc
        except (OSError, http.client.HTTPException) as exc:
            raise DaemonUnavailable(f"no daemon answers at {self.url}: {exc}") from exc
        finally:
            self._give(connection, keep=whole)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        pieces: Iterable[Buffer],
        size: int,
        content_type: str,
        deadline_s: float,
    ) -> http.client.HTTPResponse:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in self._headers.items():
            connection.putheader(name, value)
        if method in ("POST", "PUT"):
            connection.putheader("Content-Type", content_type)
            connection.putheader("Content-Length", str(size))
        if size <= _SMALL_BYTES:  # one segment with the head
            connection.endheaders(b"".join(pieces))
        else:
            connection.endheaders()
            for piece in pieces:
                view = memoryview(piece).cast("B")
                for at in range(0, len(view), _PIECE):
                    _time_left(connection, deadline_s)
                    connection.send(view[at : at + _PIECE])
        _time_left(connection, deadline_s)
        return connection.getresponse()

    def _take(self, deadline_s: float, *, fresh: bool = False) -> tuple[http.client.HTTPConnection, bool]:
        with self._state:
            if self._closed:
                raise ClientClosed("this client was closed: open a new one")
            found = self._idle.pop() if self._idle and not fresh else None
        if found is not None:
            _time_left(found, deadline_s)
            return found, False
        left_s = max(1e-3, deadline_s - time.monotonic())
        host, port = self._address
        if self._tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=left_s, context=self._tls), True
        return http.client.HTTPConnection(host, port, timeout=left_s), True

    def _give(self, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        with self._state:
            if keep and not self._closed and connection.sock is not None and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Idempotent."""
        with self._state:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> HttpClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Answer:
    """A response that is read into memory of the caller's."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, deadline_s: float
    ) -> None:
        self._connection, self._response, self._deadline_s = connection, response, deadline_s

    def header(self, name: str) -> str:
        return self._response.getheader(name, "")

    def read_into(self, view: memoryview) -> None:
        """Fill `view`. Raises: DaemonUnavailable if the answer ends before; TimeoutError."""
        done = 0
        while done < len(view):
            _time_left(self._connection, self._deadline_s)
            count = self._response.readinto(view[done : done + _PIECE])
            if not count:
                raise DaemonUnavailable("the daemon's answer ended before its time")
            done += count

    def read_all(self) -> bytes:
        _time_left(self._connection, self._deadline_s)
        found = self._response.read(_MAX_ANSWER_BYTES + 1)
        if len(found) > _MAX_ANSWER_BYTES:
            raise DaemonUnavailable(f"the daemon's answer is longer than {_MAX_ANSWER_BYTES} bytes")
        self._response.read()
        return found


class HttpNamespace(Keying):
    """One namespace over HTTP. It survives a restart of the daemon by opening itself again."""

    def __init__(self, client: HttpClient, facts: NamespaceFacts, number: bytes) -> None:
        super().__init__(facts, number)
        self.client = client

    def match(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Match:
        """The leading run that any tier holds. May count past a block deleted or damaged in its middle."""
        if not keys:
            return Match(0, (), {})
        said = self._ask("match", _keyed(keys, group), timeout_s)
        runs = tuple(TierRun(str(tier), int(blocks)) for tier, blocks in said["runs"])
        estimates = {str(name): TierEstimate(*values) for name, values in said["estimates"].items()}
        return Match(int(said["blocks"]), runs, estimates)

    def delete(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> int:
        """Delete blocks on all tiers. Returns how many were found."""
        return int(self._ask("delete", _keyed(keys, group), timeout_s)["deleted"]) if keys else 0

    def explain(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """For each of at most 1,024 keys: which tiers hold the block, or why none does."""
        if not keys:
            return []
        path = f"/v1/explain?namespace={self.id.hex()}&keys={','.join(key.hex() for key in keys)}"
        found: list[dict[str, Any]] = self.client.ask("GET", path, timeout_s=timeout_s)["objects"]
        return found

    def get_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[WritableBuffer] | WritableBuffer,
        token_ids: TokenIds | None = None,
        group: int = 0,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> int:
        """Copy payloads of the leading run into `buffers`: one buffer a block, or one for all, side by side.

        Returns: how many leading blocks came and are right. Bytes of later buffers are undefined.
        """
        layout = self.layout(group)
        targets = [memoryview(target).cast("B") for target in targets_of(buffers, len(keys), layout.payload_bytes)]
        words = None if token_ids is None else token_words(token_ids).tobytes()
        if words is not None and len(words) < 4 * layout.block_tokens * len(keys):
            raise ValueError(f"{len(keys)} blocks have {len(keys) * layout.block_tokens} tokens, not {len(words) // 4}")
        step = max(1, min(_BATCH_OBJECTS, _BATCH_BYTES // layout.object_bytes))
        deadline_s = time.monotonic() + (self.client.timeout_s if timeout_s is None else timeout_s)
        for start in range(0, len(keys), step):
            some = slice(start, min(start + step, len(keys)))
            tokens = None if words is None else words[4 * layout.block_tokens * start :]
            left_s = max(1e-3, deadline_s - time.monotonic())
            got = self._get_batch(keys[some], targets[some], tokens, group, wait_s, left_s)
            if got < some.stop - start:
                return start + got
        return len(keys)

    def _get_batch(
        self,
        keys: Sequence[bytes],
        targets: Sequence[memoryview],
        words: bytes | None,
        group: int,
        wait_s: float,
        timeout_s: float,
    ) -> int:
        layout, header = self.layout(group), bytearray(self.layout(group).header_bytes)
        question = json.dumps({**_keyed(keys, group), "wait_ms": 1000 * wait_s}).encode()

        def read() -> int:
            path = self._path("get")
            with self.client.request("POST", path, [question], len(question), _JSON, timeout_s) as answer:
                blocks = int(answer.header("Forebay-Blocks") or 0)
                good = min(blocks, len(keys))
                for index in range(min(blocks, len(keys))):
                    answer.read_into(memoryview(header))
                    answer.read_into(targets[index])
                    tokens = None if words is None else words[4 * layout.block_tokens * index :]
                    if index < good and self._trouble(layout, header, targets[index], keys[index], tokens):
                        good = index
                answer.read_all()
                return good

        return self._again(read, timeout_s)

    def _trouble(
        self, layout: ObjectLayout, header: bytearray, payload: memoryview, key: bytes, words: bytes | None
    ) -> bool:
        try:
            found = layout.read_header(header)
        except ValueError:
            return True
        expected = None if words is None else words[: 4 * layout.block_tokens]
        return (
            found.key != key
            or found.namespace != self.id
            or (expected is not None and bytes(header[layout.tokens_offset :][: len(expected)]) != expected)
            or list(found.checksums) != layout.part_checksums(payload)
        )

    def put(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        payloads: Sequence[Buffer],
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Store a run of blocks, each with checksums made here.

        Args:
            payloads: one buffer of layout.payload_bytes for each key.
            parent: key of the block before the first (None at the root); start_block: index of the first block.
        """
        layout = self.layout(group)
        words = token_words(token_ids)
        if len(payloads) != len(keys) or len(words) < len(keys) * layout.block_tokens:
            raise ValueError(f"{len(keys)} keys need as many payloads, and {len(keys) * layout.block_tokens} tokens")
        if (start_block == 0) != (parent is None):
            raise ValueError("from start_block on, and only then, give the parent's key")
        deadline_s = time.monotonic() + (self.client.timeout_s if timeout_s is None else timeout_s)
        step = max(1, min(_BATCH_OBJECTS, _BATCH_BYTES // layout.object_bytes))
        counts = dict.fromkeys(("stored", "present", "pending", "refused"), 0)

        run = Run(self.id, layout, keys, parent, start_block, words[: len(keys) * layout.block_tokens].tobytes())

        def pieces(start: int, end: int) -> Iterator[Buffer]:
            for index in range(start, end):
                header = bytearray(layout.header_bytes)
                run.header_into(header, index, layout.part_checksums(payloads[index]), time.time_ns())
                yield header
                yield payloads[index]

        def write(start: int, end: int, left_s: float) -> dict[str, Any]:
            path, size = self._path(f"objects?group={group}"), (end - start) * layout.object_bytes
            with self.client.request("POST", path, pieces(start, end), size, _OCTETS, left_s) as answer:
                found: dict[str, Any] = json.loads(answer.read_all())
                return found

        for start in range(0, len(keys), step):
            left_s = max(1e-3, deadline_s - time.monotonic())
            said = self._again(functools.partial(write, start, min(start + step, len(keys)), left_s), left_s)
            for name in counts:
                counts[name] += int(said[name])
        return PutResult(**counts)

    def _path(self, rest: str) -> str:
        return f"/v1/namespaces/{self.id.hex()}/{rest}"

    def _ask(self, rest: str, table: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        return self._again(lambda: self.client.ask("POST", self._path(rest), table, timeout_s=timeout_s), timeout_s)

    def _again(self, operate: Callable[[], T], timeout_s: float | None) -> T:
        """Once more after opening the namespace again, when the daemon was restarted in between."""
        try:
            return operate()
        except UnknownHandle:
            if self.client.open(self.facts, timeout_s=timeout_s).id != self.id:
                raise
            return operate()


def _keyed(keys: Sequence[bytes], group: int) -> dict[str, Any]:
    return {"keys": [key.hex() for key in keys], "group": group}


def _has_news(connection: http.client.HTTPConnection) -> bool:
    """Whether a connection that waits for a request has something to read: its end, most likely."""
    poller = select.poll()
    if connection.sock is None:
        return True
    poller.register(connection.sock.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def _time_left(connection: http.client.HTTPConnection, deadline_s: float) -> None:
    """Let the next operation on the socket take what is left. Raises: TimeoutError."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.timeout = left_s
    if connection.sock is not None:
        connection.sock.settimeout(left_s)


def _refusal(status: int, body: bytes) -> ProtocolError:
    """The error that an answer stands for."""
    try:
        error = json.loads(body)["error"]
        code, message = str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return ProtocolError(f"HTTP status {status} without a readable error")
    return PROTOCOL_ERRORS.get(code, ProtocolError)(message)
