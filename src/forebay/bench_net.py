"""`forebay bench net`: a client and a daemon in two processes, talking over TCP on this machine, against bare sockets.

Ratios are to two processes that move the same bytes in the same batches of the same object size through blocking sockets,
each object verified by its receiver with the same hash, in the same rounds in alternating order. Sources and targets roll over
ranges of 1 GiB, so that no buffer stays in a cache. Puts carry fresh random bytes, once into free memory and once evicting; the
figure is the lower of the two medians.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import xxhash

from forebay.bench_http import bare_http
from forebay.bench_local import MIB, Buffers
from forebay.bench_support import BenchDaemon, bench_daemon, facts_for, machine, median, rounded
from forebay.clients import Client, HttpClient, HttpNamespace, Namespace
from forebay.kvstore.address import keep_alive

_RANGE_BYTES: Final = 1 << 30
_BLOCK_TOKENS: Final = 16
_ASK: Final = struct.Struct("<cQQ")  # what, first byte of the range, objects
_DIGEST: Final = struct.Struct("<Q")
_digest = xxhash.xxh3_64_intdigest


class BarePeer:
    """The other end of the comparison: objects, each behind its hash, through a blocking socket."""

    def __init__(self, sock: socket.socket, view: memoryview, size: int) -> None:
        keep_alive(sock)
        self._sock = sock
        self._view = view
        self._size = size
        self._head = memoryview(bytearray(_DIGEST.size))

    def ask(self, what: bytes, start: int, count: int) -> None:
        self._sock.sendall(_ASK.pack(what, start, count))

    def send(self, start: int, count: int, digests: list[int] | None = None) -> None:
        """`digests`: known already, as a cache knows those of what it stores; else each is made before its object goes."""
        for number in range(count):
            at = start + number * self._size
            payload = self._view[at : at + self._size]
            digest = _digest(payload) if digests is None else digests[at // self._size]
            left = [memoryview(_DIGEST.pack(digest)), payload]
            while left:
                sent = self._sock.sendmsg(left)
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if left:
                    left[0] = left[0][sent:]

    def receive(self, start: int, count: int) -> None:
        for number in range(count):
            at = start + number * self._size
            payload = self._view[at : at + self._size]
            self.read(self._head)
            self.read(payload)
            if _digest(payload) != _DIGEST.unpack(self._head)[0]:
                raise RuntimeError("a bare socket gave other bytes than were sent")

    def read(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            count = self._sock.recv_into(view[got:])
            if not count:
                raise EOFError
            got += count


def _serve_bare(port: Any, size: int, range_bytes: int) -> None:
    """The serving process: keeps a range of memory, sends from it ("g") and receives into it ("p")."""
    buffers = Buffers(range_bytes)
    digests = [_digest(buffers.view[at : at + size]) for at in range(0, range_bytes, size)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port.send(listener.getsockname()[1])
        sock, _ = listener.accept()
    with sock:
        out, into = BarePeer(sock, buffers.view, size), BarePeer(sock, buffers.target_view, size)
        question = memoryview(bytearray(_ASK.size))
        while True:
            try:
                into.read(question)
            except EOFError:
                return
            what, start, count = _ASK.unpack(question)
            if what == b"g":
                out.send(start, count, digests)
            else:
                into.receive(start, count)
                sock.sendall(b"k")


@contextmanager
def bare_peer(buffers: Buffers, size: int) -> Iterator[tuple[Callable[[int, int], float], Callable[[int, int], float]]]:
    """Seconds of a get and of a put of `count` objects from byte `start` on, through bare sockets."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_bare, args=(there, size, buffers.size), daemon=True)
    process.start()
    with socket.create_connection(("127.0.0.1", here.recv())) as sock:
        out, into = BarePeer(sock, buffers.view, size), BarePeer(sock, buffers.target_view, size)

        def get_s(start: int, count: int) -> float:
            began_s = time.perf_counter()
            into.ask(b"g", start, count)
            into.receive(start, count)
            return time.perf_counter() - began_s

        def put_s(start: int, count: int) -> float:
            began_s = time.perf_counter()
            out.ask(b"p", start, count)
            out.send(start, count)
            out.read(memoryview(bytearray(1)))
            return time.perf_counter() - began_s

        yield get_s, put_s
    process.join(10)


def compare(
    ours: Callable[[int, int], float],
    bare: Callable[[int, int], float],
    *,
    rounds: int,
    region: int,
    buffers: Buffers,
    prepare: Callable[[int], None] = lambda start: None,
) -> dict[str, Any]:
    """Seconds of `ours(round, start of its region)` beside `bare(same)`, who begins alternating."""
    samples: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(rounds):
        start = number * region % buffers.size
        prepare(start)
        both = [("ours", ours), ("bare", bare)]
        for name, operate in both if number % 2 else both[::-1]:
            samples[name].append(operate(number, start))
    return {
        "ratio": median([b / o for b, o in zip(samples["bare"], samples["ours"], strict=True)]),
        "GBps": region / median(samples["ours"]) / 1e9,
        "bare_GBps": region / median(samples["bare"]) / 1e9,
        "samples_s": samples,
    }


class Moves:
    """Puts and gets of one namespace, by the range of the buffers that they move."""

    def __init__(
        self, namespace: Namespace | HttpNamespace, buffers: Buffers, payload: int, region: int, rounds: int
    ) -> None:
        self.namespace = namespace
        self._buffers = buffers
        self._payload, self._region, self._rounds = payload, region, rounds
        self._count = region // payload
        self._rng = np.random.default_rng(payload)
        self.stored: list[tuple[np.ndarray[Any, Any], list[bytes]]] = []

    def put_s(self, number: int, start: int) -> float:
        """New keys each time."""
        tokens = self._rng.integers(0, 150_000, self._count * _BLOCK_TOKENS, dtype=np.uint32)
        keys = self.namespace.keys(tokens)
        payloads = [
            self._buffers.view[at : at + self._payload] for at in range(start, start + self._region, self._payload)
        ]
        began_s = time.perf_counter()
        result = self.namespace.put(keys, tokens, payloads)
        took_s = time.perf_counter() - began_s
        visible = self.namespace.match(keys).blocks
        if (result.stored, visible) != (self._count, self._count):
            raise RuntimeError(f"put stored {result}, {visible} of {self._count} are visible")
        self.stored.append((tokens, keys))
        return took_s

    def get_s(self, number: int, start: int) -> float:
        """What was stored last first."""
        tokens, keys = self.stored[-1 - number % self._rounds]
        target = self._buffers.target_view[start : start + self._region]
        began_s = time.perf_counter()
        copied = self.namespace.get_into(keys, target, tokens)
        took_s = time.perf_counter() - began_s
        if copied != self._count:
            raise RuntimeError(
                f"get {number} copied {copied} of {self._count} blocks: {self.namespace.explain(keys[copied : copied + 1])}"
            )
        return took_s


def _door(
    client: Client | HttpClient,
    daemon: BenchDaemon,
    bare_get_s: Callable[[int, int], float],
    bare_put_s: Callable[[int, int], float],
    buffers: Buffers,
    payload: int,
    region: int,
    rounds: int,
) -> dict[str, Any]:
    """One door of the daemon beside its bare counterpart."""
    count = region // payload
    namespace = client.open(facts_for(payload, block_tokens=_BLOCK_TOKENS, label="net"))
    moves = Moves(namespace, buffers, payload, region, rounds)
    rng = np.random.default_rng(5)

    def against(ours: Callable[[int, int], float], bare: Callable[[int, int], float], *, fresh: bool) -> dict[str, Any]:
        return compare(
            ours,
            lambda number, start: bare(start, count),
            rounds=rounds,
            region=region,
            buffers=buffers,
            prepare=(lambda start: buffers.refresh(start, region, rng)) if fresh else lambda start: None,
        )

    for number in range(2):  # connections are open, buffers known, and the daemon's memory was written once
        moves.put_s(number, 0)
        bare_put_s(0, count)
    namespace.delete([key for _, keys in moves.stored for key in keys], timeout_s=60)
    moves.stored.clear()
    before = client.stats()["tiers"]["ram"]["counters"]["evicted"]
    daemon.ask("lag")  # from here on
    found = {
        "put_free": against(moves.put_s, bare_put_s, fresh=True),
        "get": against(moves.get_s, bare_get_s, fresh=False),
        "put_evicting": against(moves.put_s, bare_put_s, fresh=True),
    }
    found["evicted"] = client.stats()["tiers"]["ram"]["counters"]["evicted"] - before
    found["loop_lag"] = daemon.ask("lag")
    namespace.delete([key for _, keys in moves.stored for key in keys], timeout_s=60)
    return found


def _tcp(daemon: BenchDaemon, buffers: Buffers, payload: int, region: int, rounds: int) -> dict[str, Any]:
    address = f"tcp://127.0.0.1:{daemon.ask('tcp_port')}"
    with Client(address, timeout_s=60.0) as client, bare_peer(buffers, payload) as bare:
        return _door(client, daemon, *bare, buffers, payload, region, rounds)


def _http(daemon: BenchDaemon, buffers: Buffers, payload: int, region: int, rounds: int) -> dict[str, Any]:
    with daemon.client() as local:
        url = local.stats()["http_url"]
    with HttpClient(url, timeout_s=60.0) as client, bare_http(buffers, payload) as bare:
        return _door(client, daemon, *bare, buffers, payload, region, rounds)


def run(quick: bool = False, rounds: int = 15, size_mib: int = 128) -> dict[str, Any]:
    """Measure. Returns the figures under the names that docs and README use, then details with raw samples."""
    rounds = 3 if quick else rounds
    region = (8 if quick else size_mib) * MIB
    buffers = Buffers(64 * MIB if quick else _RANGE_BYTES)
    # Room for one set of rounds and what lies beside the payloads; the second set must evict.
    ram = -(-(rounds + 2) * region * 11 // 10 // (64 * MIB)) * 64 * MIB
    with bench_daemon(ram, tcp_port=0, http_port=0) as daemon:
        extents = daemon.ask("prefault")
        found = _tcp(daemon, buffers, MIB, region, rounds) | {"extents": extents}
        http = _http(daemon, buffers, MIB, region, rounds)
    figures = {
        "tcp_get_ratio": found["get"]["ratio"],
        "tcp_put_ratio": min(found["put_free"]["ratio"], found["put_evicting"]["ratio"]),
        "tcp_get_GBps": found["get"]["GBps"],
        "tcp_put_GBps": found["put_free"]["GBps"],
        "http_get_ratio": http["get"]["ratio"],
        "http_put_ratio": min(http["put_free"]["ratio"], http["put_evicting"]["ratio"]),
        "http_get_GBps": http["get"]["GBps"],
        "http_put_GBps": http["put_free"]["GBps"],
    }
    return {**rounded(figures), "quick": quick, "machine": machine(), "details": {"tcp": found, "http": http}}
