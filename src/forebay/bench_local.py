"""`forebay bench local`: a client and a daemon in two processes on this machine, against memmove.

Ratios are to a one-thread memmove of the same bytes in the same object size, between two pre-faulted buffers of 1 GiB, taken
in the same rounds in alternating order; the rate of one memmove over a whole region, which glibc does with non-temporal
stores, is given beside it. Every put writes new keys with fresh random bytes, once into free memory and once evicting; the
figure is the lower of the two medians.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.bench_support import (
    BenchDaemon,
    bench_daemon,
    collector_off,
    facts_for,
    fill_index,
    machine,
    median,
    percentile,
    rounded,
)
from forebay.clients import Client, Namespace

MIB: Final = 1 << 20
GIB: Final = 1 << 30
_BUFFER_BYTES: Final = GIB
_BLOCK_TOKENS: Final = 16
_SMALL_PAYLOAD: Final = 256
_BUSY_KEYS: Final = 8192
# Times that puts go through all memory before anything is measured. A virtual machine's host goes on arranging memory that was
# just touched: [M] one pass after the first touch a copy of 1 MiB took 0.2 to 0.5 ms, three passes later 0.1.
_SETTLING_PASSES: Final = 3


class Buffers:
    """Two pre-faulted buffers of 1 GiB: the source of puts and memmoves, and the memmoves' target."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.source = mmap.mmap(-1, size)
        self.target = mmap.mmap(-1, size)
        self.source_array = np.frombuffer(self.source, np.uint64)
        self.source_array[:] = np.random.default_rng(1).integers(0, 1 << 63, size // 8, dtype=np.uint64)
        np.frombuffer(self.target, np.uint8)[:] = 1
        self.view = memoryview(self.source)
        self.target_view = memoryview(self.target)
        self.from_address = ctypes.addressof(ctypes.c_char.from_buffer(self.source))
        self.to_address = ctypes.addressof(ctypes.c_char.from_buffer(self.target))

    def refresh(self, start: int, size: int, rng: np.random.Generator) -> None:
        """Fresh random bytes in a region of the source."""
        words = self.source_array[start // 8 : (start + size) // 8]
        words[:] = rng.integers(0, 1 << 63, len(words), dtype=np.uint64)

    def memmove_s(self, start: int, size: int, step: int) -> float:
        began_s = time.perf_counter()
        for at in range(start, start + size, step):
            ctypes.memmove(self.to_address + at, self.from_address + at, step)
        return time.perf_counter() - began_s


def _compare(
    buffers: Buffers,
    rounds: int,
    region: int,
    payload: int,
    operate: Callable[[int, int], float],
    *,
    fresh: np.random.Generator | None = None,
) -> dict[str, Any]:
    """Seconds of `operate(round, start of its region)` beside memmove of the same region, who begins alternating."""
    moves, ours, whole = [], [], []
    for number in range(rounds):
        start = number * region % buffers.size
        if fresh is not None:
            buffers.refresh(start, region, fresh)
        if number % 2:
            ours.append(operate(number, start))
            moves.append(buffers.memmove_s(start, region, payload))
        else:
            moves.append(buffers.memmove_s(start, region, payload))
            ours.append(operate(number, start))
        whole.append(buffers.memmove_s(start, region, region))
    return {
        "ratio": median([move / own for move, own in zip(moves, ours, strict=True)]),
        "ratio_to_whole": median([move / own for move, own in zip(whole, ours, strict=True)]),
        "GBps": region / median(ours) / 1e9,
        "memmove_GBps": region / median(moves) / 1e9,
        "memmove_whole_GBps": region / median(whole) / 1e9,
        "samples_s": {"ours": ours, "memmove": moves, "memmove_whole": whole},
    }


def _moves(daemon: BenchDaemon, buffers: Buffers, payload: int, rounds: int, region: int) -> dict[str, Any]:
    """Put and get of one object size, in batches of `region` bytes."""
    count = region // payload
    rng = np.random.default_rng(payload)
    stored: list[tuple[np.ndarray[Any, Any], list[bytes]]] = []
    with daemon.client() as client:
        namespace = client.open(facts_for(payload, block_tokens=_BLOCK_TOKENS, label=f"moves-{payload}"))

        def put_s(number: int, start: int) -> float:
            tokens = rng.integers(0, 150_000, count * _BLOCK_TOKENS, dtype=np.uint32)
            keys = namespace.keys(tokens)
            payloads = [buffers.view[at : at + payload] for at in range(start, start + region, payload)]
            began_s = time.perf_counter()
            result = namespace.put(keys, tokens, payloads)
            visible = namespace.match(keys).blocks
            took_s = time.perf_counter() - began_s
            if (result.stored, visible) != (count, count):
                raise RuntimeError(f"put stored {result}, {visible} of {count} are visible")
            stored.append((tokens, keys))
            return took_s

        def get_s(number: int, start: int, *, verify: bool) -> float:
            tokens, keys = stored[-1 - number % rounds]
            target = buffers.target_view[start : start + region]
            began_s = time.perf_counter()
            copied = namespace.get_into(keys, target, tokens, verify=verify)
            took_s = time.perf_counter() - began_s
            if copied != count:
                raise RuntimeError(f"get copied {copied} of {count} blocks")
            return took_s

        # Once through all memory, for writing and for reading: what an engine pays when it meets an extent for the first
        # time is a figure of its own.
        first = _compare(buffers, rounds + 1, region, payload, put_s, fresh=rng)
        for _ in range(_SETTLING_PASSES):
            for number in range(rounds + 1):
                put_s(number, number * region % buffers.size)
        namespace.delete([key for _, keys in stored for key in keys], timeout_s=60)
        stored.clear()
        found = {
            "put_first_touch": first,
            "put_free": _compare(buffers, rounds, region, payload, put_s, fresh=rng),
            "put_evicting": _compare(buffers, rounds, region, payload, put_s, fresh=rng),
            "get_first_touch": _compare(buffers, rounds, region, payload, partial(get_s, verify=True)),
            "get": _compare(buffers, rounds, region, payload, partial(get_s, verify=True)),
            "get_unverified": _compare(buffers, rounds, region, payload, partial(get_s, verify=False)),
        }
        ram = client.stats()["tiers"]["ram"]
        found["evicted"] = ram["counters"]["evicted"]
        namespace.delete([key for _, keys in stored for key in keys], timeout_s=60)
    return found


def _acquires(daemon: BenchDaemon, blocks: int, chain: int, batches: int) -> dict[str, Any]:
    """Blocks acquired a second: random prefixes of random chains, no batch twice, each with its views, and released."""
    with daemon.client() as client:
        facts = facts_for(_SMALL_PAYLOAD, block_tokens=4, label=f"acquire-{blocks}")
        chains = fill_index(client, facts, blocks, chain, seed=blocks)
        namespace = client.open(facts)
        rng = np.random.default_rng(7)
        # Each length of each chain at most once, and long enough to be a prompt: a quarter of the chain or more.
        choices = rng.permutation(len(chains) * (chain - chain // 4))[:batches]
        plan = [(int(c) % len(chains), chain // 4 + int(c) // len(chains)) for c in choices]
        wanted = [chains[number][1][:length] for number, length in plan]
        took: list[float] = []
        with collector_off():
            for keys in wanted:
                began_s = time.perf_counter()
                with namespace.acquire(keys) as lease:
                    views = lease.views
                took.append(time.perf_counter() - began_s)
                if len(views) != len(keys):
                    raise RuntimeError(f"acquired {len(views)} of {len(keys)} blocks")
        lengths = [len(keys) for keys in wanted]
        return {
            "blocks_per_s": sum(lengths) / sum(took),
            "median_blocks_per_s": median([length / s for length, s in zip(lengths, took, strict=True)]),
            "batches": len(wanted),
            "samples": {"blocks": lengths, "seconds": took},
        }


def _busy(socket: Path, facts_payload: int, keys: list[bytes], stop: Any) -> None:
    """Another client: matches and acquires 8,192 keys in a loop."""
    with Client(socket, timeout_s=60.0) as client:
        namespace = client.open(facts_for(facts_payload, block_tokens=4, label="rtt"))
        while not stop.is_set():
            namespace.match(keys)
            with namespace.acquire(keys):
                pass


def _round_trips(namespace: Namespace, key: bytes, count: int) -> list[float]:
    samples = []
    with collector_off():
        for _ in range(count):
            began_s = time.perf_counter()
            namespace.match([key])
            samples.append(time.perf_counter() - began_s)
    return samples


def _latency(daemon: BenchDaemon, count: int) -> dict[str, Any]:
    """Round trips of one key, alone and beside a busy client."""
    with daemon.client() as client:
        facts = facts_for(_SMALL_PAYLOAD, block_tokens=4, label="rtt")
        chains = fill_index(client, facts, _BUSY_KEYS, _BUSY_KEYS, seed=3)
        namespace = client.open(facts)
        keys = chains[0][1]
        _round_trips(namespace, keys[0], 200)
        alone = _round_trips(namespace, keys[0], count)
        context = multiprocessing.get_context("spawn")
        stop = context.Event()
        other = context.Process(target=_busy, args=(daemon.socket, _SMALL_PAYLOAD, keys, stop), daemon=True)
        other.start()
        try:
            while client.stats()["verbs"].get("acquire", {"requests_total": 0})["requests_total"] < 20:
                time.sleep(0.01)  # until it is up and running
            busy = _round_trips(namespace, keys[0], count)
        finally:
            stop.set()
            other.join(10)
    return {
        "p50_us": 1e6 * percentile(alone, 0.5),
        "p99_us": 1e6 * percentile(alone, 0.99),
        "busy_p50_us": 1e6 * percentile(busy, 0.5),
        "busy_p99_us": 1e6 * percentile(busy, 0.99),
        "samples_us": {"alone": [round(1e6 * s, 1) for s in alone], "busy": [round(1e6 * s, 1) for s in busy]},
    }


def run(quick: bool = False, rounds: int = 15, size_mib: int = 256) -> dict[str, Any]:
    """Measure. Returns the figures under the names that docs and README use, then details with raw samples."""
    rounds = 3 if quick else rounds
    region = (8 if quick else size_mib) * MIB
    buffers = Buffers(max(region, 64 * MIB if quick else _BUFFER_BYTES))
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    # Room for one set of rounds and what lies beside the payloads; the second set must evict.
    ram = -(-(rounds + 2) * region * 11 // 10 // (64 * MIB)) * 64 * MIB
    for name, payload in (("1MiB", MIB), ("64KiB", 64 << 10)):
        with bench_daemon(ram) as daemon:
            daemon.ask("prefault")
            found = details[name] = _moves(daemon, buffers, payload, rounds, region)
        figures[f"put_ratio_{name}"] = min(found["put_free"]["ratio"], found["put_evicting"]["ratio"])
        figures[f"get_ratio_{name}"] = found["get"]["ratio"]
        figures[f"get_unverified_ratio_{name}"] = found["get_unverified"]["ratio"]
    for name, blocks, chain, batches in (("1e4", 10_000, 2_500, 400), ("1e6", 1_000_000, 8_192, 400)):
        if quick:
            blocks, chain, batches = min(blocks, 20_000), 2_500, 20
        with bench_daemon(blocks * 1024 + 128 * MIB) as daemon:
            found = details[f"acquire_{name}"] = _acquires(daemon, blocks, chain, batches)
        figures[f"acquire_blocks_per_s_{name}"] = found["blocks_per_s"]
    with bench_daemon(128 * MIB) as daemon:
        found = details["rtt"] = _latency(daemon, 500 if quick else 5_000)
    figures["rtt_p50_us"], figures["rtt_p99_busy_us"] = found["p50_us"], found["busy_p99_us"]
    return {**rounded(figures), "quick": quick, "machine": machine(), "details": details}
