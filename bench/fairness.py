"""What a tenant that stores in a loop does to another tenant's loads.

    python bench/fairness.py [--seconds S] [--rounds N] [--threads N] [--json FILE]

One daemon, two tenants. The calm one loads a prompt of 16 blocks of 64 KiB, verified, every 2 ms; beside it four processes do,
in turn, nothing ("alone"), copies and checksums in their own memory without Forebay ("busy_cores": what the machine's cores
and memory alone cost), stores of another tenant as fast as they go ("flood"), and the same stores as the calm tenant's own
("own_flood": no turns by tenant then). Conditions are interleaved; a load that finds fewer blocks than 16 ends the run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from forebay.bench_support import bench_daemon, facts_for, machine, percentile, rounded, tell
from forebay.clients import Client
from forebay.kvstore.secretfile import write_secret_file
from forebay.server import auth

MIB: Final = 1 << 20
CONDITIONS: Final = ("alone", "busy_cores", "flood", "own_flood")
_IDLE, _SPIN, _FLOOD, _OWN = range(4)
_PROCESSES: Final = 4
_BLOCKS: Final = 16
_PAYLOAD: Final = 64 << 10
_PROMPTS: Final = 8
_PACE_S: Final = 0.002


def _disturb(socket: str, tokens: dict[str, str], mode: Any, stores: Any, ready: Any, number: int) -> None:
    """One of a process's threads: does what `mode` says until it is negative."""
    rng = np.random.default_rng(number)
    source = rng.integers(0, 256, _BLOCKS * _PAYLOAD, dtype=np.uint8)
    target = np.empty_like(source)
    with Client(socket, token=tokens["flood"]) as other, Client(socket, token=tokens["calm"]) as own:
        spaces = {_FLOOD: other.open(facts_for(_PAYLOAD)), _OWN: own.open(facts_for(_PAYLOAD))}
        payloads = [source[start : start + _PAYLOAD] for start in range(0, len(source), _PAYLOAD)]
        with ready.get_lock():
            ready.value += 1
        while (what := mode.value) >= 0:
            if what == _IDLE:
                time.sleep(0.005)
            elif what == _SPIN:
                target[:] = source
                xxhash.xxh3_64_intdigest(target)
            else:
                words = rng.integers(0, 1 << 31, _BLOCKS * 16).tolist()
                stored = spaces[what].put(spaces[what].keys(words), words, payloads).stored
                with stores.get_lock():
                    stores.value += stored


def _disturber(
    socket: str, tokens: dict[str, str], mode: Any, stores: Any, ready: Any, number: int, threads: int
) -> None:
    running = [
        threading.Thread(target=_disturb, args=(socket, tokens, mode, stores, ready, number * 1000 + each))
        for each in range(threads)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def _measure(socket: str, tokens: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    mode, stores, ready = context.Value("i", _IDLE), context.Value("q", 0), context.Value("i", 0)
    samples: dict[str, list[float]] = {name: [] for name in CONDITIONS}
    stored = dict.fromkeys(CONDITIONS, 0)
    others = [
        context.Process(
            target=_disturber, args=(socket, tokens, mode, stores, ready, number, options.threads), daemon=True
        )
        for number in range(_PROCESSES)
    ]
    for other in others:
        other.start()
    try:
        with Client(socket, token=tokens["calm"], timeout_s=60.0) as client:
            space = client.open(facts_for(_PAYLOAD))
            rng = np.random.default_rng(7)
            prompts = [rng.integers(0, 1 << 31, _BLOCKS * 16).tolist() for _ in range(_PROMPTS)]
            keys = [space.keys(prompt) for prompt in prompts]
            for prompt, own in zip(prompts, keys, strict=True):
                space.put(own, prompt, [rng.bytes(_PAYLOAD) for _ in own])
            while ready.value < options.threads * _PROCESSES:
                time.sleep(0.05)
            out = bytearray(_BLOCKS * _PAYLOAD)
            for turn in range(options.rounds):
                for step in range(len(CONDITIONS)):
                    what = (turn + step) % len(CONDITIONS)
                    before = stores.value
                    mode.value = what
                    time.sleep(0.3)
                    until_s = time.perf_counter() + options.seconds
                    number = 0
                    while (began_s := time.perf_counter()) < until_s:
                        found = space.get_into(keys[number % _PROMPTS], out, prompts[number % _PROMPTS])
                        samples[CONDITIONS[what]].append(time.perf_counter() - began_s)
                        if found != _BLOCKS:
                            raise RuntimeError(f"{CONDITIONS[what]}: a load found {found} of {_BLOCKS} blocks")
                        number += 1
                        time.sleep(_PACE_S)
                    mode.value = _IDLE
                    time.sleep(0.1)
                    stored[CONDITIONS[what]] += stores.value - before
    finally:
        mode.value = -1
        for other in others:
            other.join(10)
    return {"samples": samples, "stored": stored}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    tokens = {tenant: auth.new_token() for tenant in ("calm", "flood")}
    with tempfile.TemporaryDirectory(prefix="forebay-fairness-") as folder:
        tenants: dict[str, dict[str, Any]] = {}
        for tenant in tokens:
            write_secret_file(Path(folder) / tenant, auth.new_secret())
            tenants[tenant] = {"secret_file": str(Path(folder) / tenant)}
        tenants["flood"]["ram_bytes"] = 256 * MIB
        credentials = {
            tenant: {
                "tenant": tenant,
                "token_sha256": auth.token_digest(token).hex(),
                "rights": ["read", "write"],
            }
            for tenant, token in tokens.items()
        }
        with bench_daemon(1024 * MIB, max_sessions=1024, credentials=credentials, tenants=tenants) as daemon:
            found = _measure(str(daemon.socket), tokens, options)
    samples = found["samples"]
    p50, p99 = ({name: 1e3 * percentile(took, share) for name, took in samples.items()} for share in (0.5, 0.99))
    result: dict[str, Any] = {}
    for name in CONDITIONS:
        result[f"{name}_p50_ms"], result[f"{name}_p99_ms"] = p50[name], p99[name]
    for name in CONDITIONS[1:]:
        result[f"{name}_p99_ratio"] = p99[name] / p99["alone"]
    result["flood_stored_blocks_per_s"] = found["stored"]["flood"] / (options.rounds * (options.seconds + 0.4))
    return rounded(result) | {
        "loads": {name: len(took) for name, took in samples.items()},
        "processes": _PROCESSES,
        "threads": options.threads,
        "machine": machine(),
        "details": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each condition in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="sessions of each of the four processes")
    parser.add_argument("--json", type=Path, help="write the result with raw samples there")
    options = parser.parse_args()
    result = measure(options)
    tell(result, options.json)


if __name__ == "__main__":
    main()
