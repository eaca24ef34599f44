"""`forebay bench index`: what the index costs at 10^4, 10^5 and 10^6 blocks.

Match and acquire are timed at the client, over the socket, for 8,192 keys of which none, half or all are there. Eviction is
timed inside, one block a call, on a ram tier in this process. Memory, collection pauses and the loop's lag are the daemon's:
private (anonymous) memory less that of an empty daemon, a full collection, and the lag while one client works without a pause
(beside it, two, which with the daemon are more than two cores can run at once).
"""

from __future__ import annotations

import multiprocessing
import time
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
    percentile,
    rounded,
)
from forebay.clients import Client, Namespace
from forebay.kvstore.identity import PUBLIC_SECRET, namespace_id
from forebay.kvstore.objects import ObjectLayout
from forebay.tiers.ram import RamTier

MIB: Final = 1 << 20
KEYS: Final = 8192
_PAYLOAD: Final = 256
_BLOCK_TOKENS: Final = 4
_LOAD_S: Final = 6.0


def _batch(chain: list[bytes], hit: int, rng: np.random.Generator) -> list[bytes]:
    """KEYS keys: the first `hit` of a stored chain, then keys that nobody stored."""
    absent = rng.bytes(16 * (KEYS - hit))
    return chain[:hit] + [absent[i : i + 16] for i in range(0, len(absent), 16)]


def _lookups(namespace: Namespace, chains: list[list[bytes]], samples: int) -> dict[str, Any]:
    """Milliseconds of match, and of match and acquire, by hit depth."""
    rng = np.random.default_rng(11)
    found: dict[str, Any] = {"match_ms": {}, "match_acquire_ms": {}}
    for name, depth in (("none", 0), ("half", KEYS // 2), ("all", KEYS)):
        match_ms, both_ms = [], []
        with collector_off():
            for _ in range(samples):
                chain = chains[int(rng.integers(len(chains)))]
                keys = _batch(chain, depth, rng)
                began_s = time.perf_counter()
                matched = namespace.match(keys).blocks
                between_s = time.perf_counter()
                with namespace.acquire(keys) as lease:
                    leased = len(lease)
                ended_s = time.perf_counter()
                if (matched, leased) != (depth, depth):
                    raise RuntimeError(f"{depth} keys are there, match found {matched} and acquire {leased}")
                match_ms.append(1e3 * (between_s - began_s))
                both_ms.append(1e3 * (ended_s - began_s))
        found["match_ms"][name], found["match_acquire_ms"][name] = match_ms, both_ms
    return found


def _evictions(blocks: int, samples: int) -> list[float]:
    """Microseconds of single evictions from a full tier of that many blocks."""
    facts = facts_for(_PAYLOAD, block_tokens=_BLOCK_TOKENS)
    namespace = namespace_id(facts, tenant="bench", secret=PUBLIC_SECRET)
    tier = RamTier(capacity_bytes=blocks * 1024 + 64 * MIB)
    domain = tier.domain("bench")
    table = domain.table(namespace, 0, ObjectLayout.of(facts).object_bytes)
    rng = np.random.default_rng(blocks)
    chain_length = 1024
    chains = []
    for start in range(0, blocks, chain_length):
        count = min(chain_length, blocks - start)
        flat = rng.bytes(16 * count)
        keys = [flat[i : i + 16] for i in range(0, len(flat), 16)]
        domain.commit(table, domain.allocate(table, keys, namespace, blocking=True).rows)
        chains.append(keys)
    # Prefixes of some chains have been used since, as in a daemon that has served a while.
    for number in rng.integers(0, len(chains), len(chains) // 4):
        chain = chains[int(number)]
        domain.touch(table, table.find(chain[: int(rng.integers(1, len(chain) + 1))]))
    size_class = tier.class_of_table[table.number]
    took: list[float] = []
    with collector_off():
        for _ in range(min(samples, blocks // 2)):
            began_s = time.perf_counter()
            evicted = domain.evict(size_class)
            took.append(1e6 * (time.perf_counter() - began_s))
            if not evicted:
                raise RuntimeError("nothing could be evicted from a full tier without leases")
    domain.close_memory()
    return took


def _load(socket: Path, label: str, seed: int, blocks: int, stop: Any) -> None:
    """A client that puts new chains and matches and acquires them again."""
    with Client(socket, timeout_s=60.0) as client:
        facts = facts_for(_PAYLOAD, block_tokens=_BLOCK_TOKENS, label=label)
        namespace = client.open(facts)
        rng = np.random.default_rng(seed)
        payload = bytes(namespace.layout().payload_bytes)
        while not stop.is_set():
            tokens = rng.integers(0, 150_000, blocks * _BLOCK_TOKENS, dtype=np.uint32)
            keys = namespace.keys(tokens)
            namespace.put(keys, tokens, [payload] * blocks)
            namespace.match(keys)
            with namespace.acquire(keys, tokens):
                pass


def _lag(daemon: BenchDaemon, clients: int, load_s: float) -> dict[str, float]:
    """The loop's lag while so many clients work without a pause. From two on, two cores are too few for all."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    others = [
        context.Process(target=_load, args=(daemon.socket, f"load-{clients}", seed, 2048, stop), daemon=True)
        for seed in range(clients)
    ]
    for other in others:
        other.start()
    try:
        time.sleep(1.5)
        daemon.ask("lag")
        time.sleep(load_s)
        found: dict[str, float] = daemon.ask("lag")
    finally:
        stop.set()
        for other in others:
            other.join(20)
    return found


def _one_size(blocks: int, samples: int, load_s: float) -> dict[str, Any]:
    facts = facts_for(_PAYLOAD, block_tokens=_BLOCK_TOKENS, label="index")
    with bench_daemon(blocks * 1024 + 256 * MIB) as daemon:
        daemon.client().close()
        daemon.ask("gc")
        empty = daemon.ask("memory")
        with daemon.client() as client:
            chains = [keys for _, keys in fill_index(client, facts, blocks, KEYS, seed=blocks)]
            gc_ms = daemon.ask("gc")
            bytes_per_block = (daemon.ask("memory") - empty) / blocks
            whole = [chain for chain in chains if len(chain) == KEYS]
            found = _lookups(client.open(facts), whole, samples)
            lag = {clients: _lag(daemon, clients, load_s) for clients in (1, 2)}
    return {**found, "gc_pause_ms": gc_ms, "bytes_per_block": bytes_per_block, "lag": lag}


def run(quick: bool = False, rounds: int = 1000) -> dict[str, Any]:
    """Measure. Returns the figures (the worst over sizes and hit depths), each size's own, then raw samples."""
    sizes = (10_000, 20_000) if quick else (10_000, 100_000, 1_000_000)
    samples = 20 if quick else -(-rounds // 3)
    by_size: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for blocks in sizes:
        found = details[str(blocks)] = _one_size(blocks, samples, 1.0 if quick else _LOAD_S)
        found["evict_us"] = _evictions(blocks, 500 if quick else 20_000)
        matches = [sample for part in found["match_ms"].values() for sample in part]
        acquires = [sample for part in found["match_acquire_ms"].values() for sample in part]
        by_size[str(blocks)] = rounded(
            {
                "match_p99_ms": percentile(matches, 0.99),
                "match_acquire_p99_ms": percentile(acquires, 0.99),
                "evict_p50_us": percentile(found["evict_us"], 0.5),
                "evict_p99_us": percentile(found["evict_us"], 0.99),
                "bytes_per_block": found["bytes_per_block"],
                "gc_pause_ms": found["gc_pause_ms"],
                "loop_lag_p99_ms": found["lag"][1]["p99_ms"],
                "loop_lag_max_ms": found["lag"][1]["max_ms"],
                "loop_lag_two_clients_p99_ms": found["lag"][2]["p99_ms"],
            }
        )
    figures = {
        name: max(size[name] for size in by_size.values())
        for name in ("match_p99_ms", "match_acquire_p99_ms", "evict_p99_us", "gc_pause_ms", "loop_lag_p99_ms")
    }
    # Fixed costs, a few megabytes, say nothing about a block: the largest index does.
    figures["bytes_per_block"] = by_size[str(sizes[-1])]["bytes_per_block"]
    figures["evict_p99_ratio"] = by_size[str(sizes[-1])]["evict_p99_us"] / by_size[str(sizes[0])]["evict_p99_us"]
    return {**rounded(figures), "quick": quick, "by_blocks": by_size, "machine": machine(), "details": details}
