"""Batched put and get through Forebay and what people use instead: Mooncake Store and Redis, side by side.

    python bench/peers.py [--quick] [--json FILE]

One run, rounds interleaved, who begins rotating. Each peer's client is a process of its own with a source region of fresh
random bytes and a target region, both touched before; put stores the source in objects of one size under new keys, get fetches
them into the target. Only the call is timed; afterwards the target is compared with the source on all sides. Forebay's get also
verifies checksums and token ids inside the time, as it does for everyone.

Mooncake runs as its documentation proposes for one machine: a store daemon with shared-memory clients, whose buffers lie in the
store's own pool, and a pure client over TCP. Redis listens on a Unix socket, with hiredis. All have room for every object, so
that nobody evicts.

Needs `pip install forebay[peers]` and, from Debian, redis-server and Mooncake's libraries (docs/performance.md). A peer that
can't be started is reported with the reason, never left out silently.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from forebay.bench_support import bench_daemon, facts_for, machine, median, rounded
from forebay.clients import Client

KIB: Final = 1 << 10
MIB: Final = 1 << 20
SIZES: Final = {"64KiB": 64 * KIB, "256KiB": 256 * KIB, "1MiB": MIB, "4MiB": 4 * MIB}
_START_S: Final = 60.0
_CALL_S: Final = 120.0
_BLOCK_TOKENS: Final = 16


class Missing(Exception):
    """A peer that can't be run here, and why."""


class Side(Protocol):
    """One peer's client, in its own process. `source` and `target` are its regions, [bytes] uint8 each."""

    source: np.ndarray[Any, np.dtype[np.uint8]]
    target: np.ndarray[Any, np.dtype[np.uint8]]

    def prepare(self, size: int, count: int, seed: int) -> None:
        """Name `count` objects of `size` bytes that put and get are about."""

    def put(self) -> None: ...

    def get(self) -> None: ...

    def clear(self) -> None:
        """Forget the objects."""


def _region(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    region = np.empty(size, np.uint8)
    region[:] = 1
    return region


class Forebay:
    def __init__(self, region: int, where: dict[str, Any]) -> None:
        self.source, self.target = _region(region), _region(region)
        self._client = Client(Path(where["socket"]), timeout_s=_CALL_S)

    def prepare(self, size: int, count: int, seed: int) -> None:
        self._namespace = self._client.open(facts_for(size, block_tokens=_BLOCK_TOKENS, label=f"peers-{size}"))
        rng = np.random.default_rng(seed)
        self._tokens = rng.integers(0, 150_000, count * _BLOCK_TOKENS, dtype=np.uint32)
        self._keys = self._namespace.keys(self._tokens)
        view = memoryview(self.source)
        self._payloads = [view[i * size : (i + 1) * size] for i in range(count)]
        self._into = memoryview(self.target)[: count * size]

    def put(self) -> None:
        stored = self._namespace.put(self._keys, self._tokens, self._payloads).stored
        if stored != len(self._keys):
            raise RuntimeError(f"{stored} of {len(self._keys)} stored")

    def get(self) -> None:
        copied = self._namespace.get_into(self._keys, self._into, self._tokens)
        if copied != len(self._keys):
            raise RuntimeError(f"{copied} of {len(self._keys)} found")

    def clear(self) -> None:
        self._namespace.delete(self._keys)


class Mooncake:
    """`shared`: a client whose regions lie in the store daemon's pool; otherwise a pure client over TCP."""

    def __init__(self, region: int, where: dict[str, Any], *, shared: bool) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        if shared:
            trouble = self._store.setup_dummy(2 * region + 64 * MIB, 64 * MIB, where["client"])
            addresses = [self._store.alloc_from_mem_pool(region) for _ in range(2)]
            self.source, self.target = (_array_at(address, region) for address in addresses)
        else:
            here = f"127.0.0.1:{_free_port()}"
            trouble = self._store.setup(here, where["metadata"], 0, 64 * MIB, "tcp", "", where["master"])
            self.source, self.target = _region(region), _region(region)
            addresses = [self.source.ctypes.data, self.target.ctypes.data]
        if trouble:
            raise RuntimeError(f"Mooncake's client set-up answers {trouble}")
        for address in addresses:
            if self._store.register_buffer(address, region):
                raise RuntimeError("Mooncake registers no buffer")
        self.source[:] = 1
        self.target[:] = 1
        self._addresses = addresses
        self._name = "shared" if shared else "tcp"  # both are clients of one store
        self._last: list[str] = []

    def prepare(self, size: int, count: int, seed: int) -> None:
        self._keys = [f"peers-{self._name}-{seed}-{size}-{i}" for i in range(count)]
        self._sizes = [size] * count
        self._from = [self._addresses[0] + i * size for i in range(count)]
        self._to = [self._addresses[1] + i * size for i in range(count)]

    def put(self) -> None:
        _check(self._store.batch_put_from(self._keys, self._from, self._sizes), lambda code: code == 0)

    def get(self) -> None:
        _check(self._store.batch_get_into(self._keys, self._to, self._sizes), lambda code: code == self._sizes[0])

    def clear(self) -> None:
        # What was read is leased for a while, and a removal of it is refused: those of the round before go first.
        deadline_s = time.monotonic() + _CALL_S
        left, self._last = self._last, self._keys
        while left and time.monotonic() < deadline_s:
            left = [key for key in left if self._store.remove(key) not in (0, _MOONCAKE_NOT_FOUND)]
            if left:
                time.sleep(0.05)
        if left:
            raise RuntimeError(f"Mooncake keeps {len(left)} objects that were removed")


_MOONCAKE_NOT_FOUND: Final = -704


class Redis:
    def __init__(self, region: int, where: dict[str, Any]) -> None:
        import redis

        self.source, self.target = _region(region), _region(region)
        self._redis = redis.Redis(unix_socket_path=where["socket"], socket_timeout=_CALL_S)

    def prepare(self, size: int, count: int, seed: int) -> None:
        self._keys = [f"peers-{seed}-{size}-{i}" for i in range(count)]
        self._size = size
        view = memoryview(self.source)
        self._payloads = [view[i * size : (i + 1) * size] for i in range(count)]

    def put(self) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for key, payload in zip(self._keys, self._payloads, strict=True):
                pipe.set(key, payload)
            if not all(pipe.execute()):
                raise RuntimeError("Redis refused an object")

    def get(self) -> None:
        target, size = memoryview(self.target), self._size
        for i, value in enumerate(self._redis.mget(self._keys)):
            if value is None:
                raise RuntimeError("Redis lost an object")
            target[i * size : (i + 1) * size] = value

    def clear(self) -> None:
        self._redis.delete(*self._keys)


def _array_at(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import ctypes

    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)


def _check(codes: Sequence[int], good: Callable[[int], bool]) -> None:
    bad = [code for code in codes if not good(code)]
    if bad:
        raise RuntimeError(f"Mooncake answers {bad[0]} for {len(bad)} of {len(codes)} objects")


SIDES: Final[dict[str, Callable[[int, dict[str, Any]], Side]]] = {
    "forebay": Forebay,
    "mooncake shared memory": lambda region, where: Mooncake(region, where, shared=True),
    "mooncake tcp": lambda region, where: Mooncake(region, where, shared=False),
    "redis": Redis,
}


def _serve_side(name: str, region: int, where: dict[str, Any], pipe: Connection) -> None:
    """A client's process: put or get a batch whenever asked, and say how long the call took."""
    try:
        side = SIDES[name](region, where)
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            size, count, seed = asked
            rng = np.random.default_rng(seed)
            used = count * size
            side.source[:used].view(np.uint64)[:] = rng.integers(0, 1 << 63, used // 8, dtype=np.uint64)
            side.target[:used] = 0
            side.prepare(size, count, seed)
            began_s = time.perf_counter()
            side.put()
            between_s = time.perf_counter()
            side.get()
            ended_s = time.perf_counter()
            if not np.array_equal(side.source[:used], side.target[:used]):
                raise RuntimeError(f"{name} gave other bytes than were stored")
            side.clear()
            pipe.send((between_s - began_s, ended_s - between_s))
    except BaseException as exc:
        pipe.send(exc)
        raise


class Process:
    """A server process, ended with its group's end."""

    def __init__(self, arguments: Sequence[str], log: Path, **environment: str) -> None:
        self._log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                arguments, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )

    def until(self, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _START_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                tail = self._log.read_text(errors="replace").strip().splitlines()[-3:]
                raise Missing(f"{Path(str(self._process.args[0])).name} does not start: {' / '.join(tail)}")  # type: ignore[index]
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _listens(port: int) -> Callable[[], bool]:
    def look() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
            return True
        return False

    return look


def _program(name: str, hint: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise Missing(f"{name} is not installed: {hint}")
    return found


def _start_redis(stack: ExitStack, folder: Path, memory: int) -> dict[str, Any]:
    program = _program("redis-server", "apt-get install redis-server")
    path = folder / "redis.sock"
    arguments = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    process = Process([*arguments, "--maxmemory", str(memory), "--dir", str(folder)], folder / "redis.log")
    stack.callback(process.stop)
    process.until(path.exists)
    return {"socket": str(path)}


def _start_mooncake(stack: ExitStack, folder: Path, memory: int) -> dict[str, Any]:
    hint = "pip install forebay[peers]"
    # Without this every process announces the machine's first network interface.
    here = {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}
    os.environ.update(here)
    rpc, meta, metrics, client = (_free_port() for _ in range(4))
    master = Process(
        [
            _program("mooncake_master", hint),
            *("--rpc_address", "127.0.0.1", "--rpc_port", str(rpc), "--metrics_port", str(metrics)),
            "--enable_http_metadata_server=true",
            *("--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={meta}"),
            "--default_kv_lease_ttl=3000",
        ],
        folder / "mooncake_master.log",
    )
    stack.callback(master.stop)
    master.until(lambda: _listens(rpc)() and _listens(meta)())
    metadata, address = f"http://127.0.0.1:{meta}/metadata", f"127.0.0.1:{rpc}"
    store = Process(
        [
            _program("mooncake_client", hint),
            *("-host", "127.0.0.1", "-port", str(client), "-protocol", "tcp", "-threads", "2"),
            *("-global_segment_size", f"{memory >> 20} MB", "-local_buffer_size", "512 MB"),
            *("-master_server_address", address, "-metadata_server", metadata),
        ],
        folder / "mooncake_client.log",
    )
    stack.callback(store.stop)
    store.until(_listens(client))
    return {"client": f"127.0.0.1:{client}", "metadata": metadata, "master": address}


def _start_side(stack: ExitStack, name: str, region: int, where: dict[str, Any]) -> Connection:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve_side, args=(name, region, where, theirs), daemon=True
    )
    process.start()
    theirs.close()

    def stop() -> None:
        with suppress(OSError):
            ours.send(None)
        process.join(10)
        process.kill()

    stack.callback(stop)
    _answer(name, ours)
    return ours


def _answer(name: str, pipe: Connection) -> Any:
    try:
        if not pipe.poll(2 * _CALL_S):
            raise Missing(f"{name}: no answer in {2 * _CALL_S:g} s")
        answer = pipe.recv()
    except EOFError as exc:
        raise Missing(f"{name}: its client process ended") from exc
    if isinstance(answer, BaseException):
        raise Missing(f"{name}: {answer}") from answer
    return answer


def run(rounds: int, region: int, console: Console) -> dict[str, Any]:
    missing: dict[str, str] = {}
    sides: dict[str, Connection] = {}
    memory = 6 * region + 512 * MIB
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-peers-")))
        daemon = stack.enter_context(bench_daemon(memory, ssd_bytes=0) if _has_ssd() else bench_daemon(memory))
        daemon.ask("prefault")
        servers: dict[str, Callable[[], dict[str, Any]]] = {
            "forebay": lambda: {"socket": str(daemon.socket)},
            "mooncake": lambda: _start_mooncake(stack, folder, memory),
            "redis": lambda: _start_redis(stack, folder, memory),
        }
        for server, start in servers.items():
            names = [name for name in SIDES if name.split()[0] == server]
            try:
                where = start()
                for name in names:
                    sides[name] = _start_side(stack, name, region, where)
            except Missing as exc:
                missing.update((name, str(exc)) for name in names if name not in sides)
        details = _measure(sides, missing, rounds, region, console)
    figures: dict[str, Any] = {}
    for size, by_side in details.items():
        for name, found in by_side.items():
            for verb in ("put", "get"):
                figures[f"{verb}_{size}_{name.replace(' ', '_')}_GBps"] = region / median(found[verb]) / 1e9
        for verb in ("put", "get"):
            others = [median(found[verb]) for name, found in by_side.items() if name != "forebay"]
            if others and "forebay" in by_side:
                figures[f"{verb}_{size}_ahead_of_best_peer"] = min(others) / median(by_side["forebay"][verb])
    return {
        **rounded(figures),
        "missing": missing,
        "rounds": rounds,
        "region_bytes": region,
        "versions": _versions(),
        "machine": machine(),
        "details": details,
    }


def _has_ssd() -> bool:
    from forebay.server.settings import Settings

    return "ssd_bytes" in Settings.model_fields


def _measure(
    sides: dict[str, Connection], missing: dict[str, str], rounds: int, region: int, console: Console
) -> dict[str, dict[str, dict[str, list[float]]]]:
    details: dict[str, dict[str, dict[str, list[float]]]] = {
        size: {name: {"put": [], "get": []} for name in sides} for size in SIZES
    }
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("rounds", total=len(SIZES) * (rounds + 1))
        for label, size in SIZES.items():
            for number in range(rounds + 1):
                order = list(sides)
                turn = number % max(1, len(order))
                for name in order[turn:] + order[:turn]:
                    try:
                        sides[name].send((size, region // size, number))
                        put_s, get_s = _answer(name, sides[name])
                    except (Missing, OSError) as exc:
                        missing[name] = f"at {label}, round {number}: {exc}"
                        del sides[name]
                        continue
                    if number:  # the first round warms memory, connections and mappings of all of them
                        details[label][name]["put"].append(put_s)
                        details[label][name]["get"].append(get_s)
                progress.advance(task)
    return {size: {name: found for name, found in by.items() if found["put"]} for size, by in details.items()}


def _versions() -> dict[str, str]:
    found = {}
    for package in ("mooncake-transfer-engine-non-cuda", "redis", "hiredis"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    server = shutil.which("redis-server")
    if server:
        told = subprocess.run([server, "--version"], capture_output=True, text=True, check=False).stdout
        found["redis-server"] = told.split("v=")[-1].split()[0] if "v=" in told else told.strip()
    return found


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(title="GB/s, median of rounds")
    names = [name for name in SIDES if name not in found["missing"]]
    for heading in ("", *names, "Forebay / best peer"):
        table.add_column(heading, justify="right")
    for size in SIZES:
        for verb in ("put", "get"):
            cells = [found.get(f"{verb}_{size}_{name.replace(' ', '_')}_GBps") for name in names]
            ahead = found.get(f"{verb}_{size}_ahead_of_best_peer")
            table.add_row(
                f"{verb} {size}",
                *("" if cell is None else f"{cell:.2f}" for cell in cells),
                "" if ahead is None else f"{ahead:.2f}",
            )
    console.print(table)
    for name, why in found["missing"].items():
        console.print(f"[yellow]not measured:[/] {name}: {why}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds of small batches: does it run, not how fast")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds a size (default %(default)s)")
    parser.add_argument("--region-mib", type=int, default=256, help="bytes a batch, in MiB (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write figures and raw samples to this file")
    options = parser.parse_args()
    console = Console(stderr=True)
    rounds, region = (2, 16 * MIB) if options.quick else (options.rounds, options.region_mib * MIB)
    found = run(rounds, region, console)
    _show(found, console)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        console.print(f"written to {options.json}")
    return 0 if not found["missing"] else 1


if __name__ == "__main__":
    sys.exit(main())
