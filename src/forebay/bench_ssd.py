"""`forebay bench ssd`: the ssd tier beside fio, on the same filesystem, and how soon a killed daemon serves from it again.

Each round moves one region by fio, by the tier alone and through a whole daemon (from RAM to disk by `flush`, from disk into
leased RAM by `acquire`), who begins alternating. Ratios are payload bytes per second over fio's, medians over rounds. All write
over extents that were written before, past the page cache. Reads of the tier are verified, writes are durable and committed.
fio has as many requests under way as its best of a few tries. Its writes are measured with a sync every 32 MiB, about as often
as the tier commits (`write_ratio`), and without any (`write_ratio_unsynced`): then they need only reach the disk's own cache.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.bench_restart import restart
from forebay.bench_support import bench_daemon, facts_for, machine, median, rounded
from forebay.clients import Namespace
from forebay.kvstore.errors import ForebayError
from forebay.kvstore.objects import ObjectLayout, seal
from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd import SsdTier

MIB: Final = 1 << 20
GIB: Final = 1 << 30
_BLOCK_TOKENS: Final = 16
_NAMESPACE: Final = b"forebay bench ns"
_TIMEOUT_S: Final = 60.0
_PUTS_AT_ONCE: Final = 32  # as the daemon's channel lets through
_GETS_AT_ONCE: Final = 32
_DEPTHS: Final = (("psync", 1), ("libaio", 8), ("libaio", 32))


class Fio:
    """fio on one file of the set's size."""

    def __init__(self, path: Path, size: int) -> None:
        if shutil.which("fio") is None:
            raise ForebayError("fio is not installed: apt-get install fio")
        self._path, self._size = path, size
        self.version = subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()
        self.depth: dict[str, tuple[str, int]] = {}

    def prepare(self, region: int) -> dict[str, Any]:
        """Write the file twice over, then find the best depth for each direction."""
        for _ in range(2):
            self.bytes_per_s("write", 0, self._size, "libaio", 8)
        tried: dict[str, Any] = {}
        for verb in ("write", "read"):
            found = {}
            for index, (engine, depth) in enumerate(_DEPTHS):
                found[f"{engine}-{depth}"] = self.bytes_per_s(verb, index * region % self._size, region, engine, depth)
            best = max(found, key=lambda name: found[name])
            self.depth[verb] = next(each for each in _DEPTHS if f"{each[0]}-{each[1]}" == best)
            tried[verb] = found
        return tried

    def bytes_per_s(
        self, verb: str, offset: int, size: int, engine: str = "", depth: int = 0, *, sync_every: int = 0
    ) -> float:
        if not engine:
            engine, depth = self.depth[verb]
        command = ["fio", "--name=forebay", f"--filename={self._path}", f"--rw={verb}", "--bs=1M", "--direct=1"]
        command += [f"--ioengine={engine}", f"--iodepth={depth}", f"--size={size}", f"--offset={offset}"]
        command += [f"--fdatasync={sync_every}", "--output-format=json", "--fallocate=none", "--refill_buffers=0"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"])


class TierAlone:
    """The tier in this process, with objects of 1 MiB in page-aligned memory, as the ram tier has them."""

    def __init__(self, folder: Path, capacity: int, count: int, payload: int) -> None:
        self.layout = ObjectLayout.of(facts_for(payload, block_tokens=_BLOCK_TOKENS))
        self._count, self._payload = count, payload
        stride = -(-self.layout.object_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = memoryview(mmap.mmap(-1, count * stride))
        np.frombuffer(self._memory, np.uint64)[:] = np.random.default_rng(1).integers(
            0, 1 << 63, len(self._memory) // 8, dtype=np.uint64
        )
        self._slots = [self._memory[at : at + self.layout.object_bytes] for at in range(0, count * stride, stride)]
        for slot in self._slots:
            self._head(slot, bytes(16))
        self.tier = SsdTier(capacity, [folder])

    def _head(self, slot: memoryview, key: bytes) -> None:
        self.layout.write_header(
            slot,
            key=key,
            parent=None,
            namespace=_NAMESPACE,
            position=0,
            token_ids=bytes(4 * _BLOCK_TOKENS),
            checksums=self.layout.part_checksums(slot[self.layout.header_bytes :]),
            created_ns=1,
        )
        seal(slot)

    def keys(self, number: int) -> list[ObjectKey]:
        return [ObjectKey(_NAMESPACE, (number << 32 | index).to_bytes(8, "big") * 2) for index in range(self._count)]

    def label(self, number: int) -> None:
        """Give the objects in memory the keys of a region. Not timed: an engine has done it long before."""
        for key, slot in zip(self.keys(number), self._slots, strict=True):
            self._head(slot, key.block)

    async def write_s(self, number: int) -> float:
        return await self._all(self.keys(number), _PUTS_AT_ONCE, self._put)

    async def read_s(self, number: int) -> float:
        return await self._all(self.keys(number), _GETS_AT_ONCE, self._get)

    async def _put(self, key: ObjectKey, slot: memoryview) -> None:
        await self.tier.put(key, slot, timeout_s=_TIMEOUT_S)

    async def _get(self, key: ObjectKey, slot: memoryview) -> None:
        found = await self.tier.get_into(key, slot, timeout_s=_TIMEOUT_S)
        trouble = "missing" if found is None else self.layout.verify_object(slot, key=key.block, namespace=_NAMESPACE)
        if trouble is not None:
            raise RuntimeError(f"an object read back is wrong: {trouble}")

    async def _all(self, keys: list[ObjectKey], at_once: int, act: Callable[..., Any]) -> float:
        work = iter(list(zip(keys, self._slots, strict=True)))

        async def worker() -> None:
            for key, slot in work:
                await act(key, slot)

        began_s = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        return time.perf_counter() - began_s


class WholeDaemon:
    """Regions of blocks through a client: into RAM, flushed to disk, and loaded into RAM again."""

    def __init__(self, space: Namespace, count: int, payload: int) -> None:
        self._space, self._count, self._payload = space, count, payload
        self._source = memoryview(os.urandom(MIB) * (payload // MIB or 1))[:payload]

    def _run(self, number: int) -> tuple[Any, list[bytes]]:
        tokens = np.random.default_rng(number).integers(0, 150_000, self._count * _BLOCK_TOKENS, dtype=np.uint32)
        return tokens, self._space.keys(tokens)

    def write_s(self, number: int) -> float:
        tokens, keys = self._run(number)
        put = self._space.put(keys, tokens, [self._source] * self._count, timeout_s=_TIMEOUT_S)
        began_s = time.perf_counter()
        flushed = self._space.flush(keys, timeout_s=_TIMEOUT_S)
        took_s = time.perf_counter() - began_s
        if (put.stored, flushed.durable) != (self._count, self._count):
            raise RuntimeError(f"stored {put}, flushed {flushed}")
        return took_s

    def read_s(self, number: int) -> float:
        tokens, keys = self._run(number)
        began_s = time.perf_counter()
        with self._space.acquire(keys, tokens, wait_s=_TIMEOUT_S, timeout_s=_TIMEOUT_S) as lease:
            took_s = time.perf_counter() - began_s
            if len(lease) != self._count:
                raise RuntimeError(f"{len(lease)} of {self._count} blocks came back")
        return took_s


def _rounds(
    fio: Fio, alone: TierAlone, daemon: WholeDaemon, rounds: int, regions: int, region: int
) -> dict[str, list[float]]:
    """bytes/s of each way in each round. Region numbers only ever grow, so that nothing written is there already."""
    samples: dict[str, list[float]] = {}
    loop = asyncio.new_event_loop()

    def tier_write(number: int) -> float:
        alone.label(number)
        return region / loop.run_until_complete(alone.write_s(number))

    for number in range(regions):  # fill everything twice over: from here on extents are only rewritten
        tier_write(number)
        daemon.write_s(number)
    at = regions
    for number in range(rounds):
        offset = number % regions * region
        here = at + number
        # No longer in RAM, and surely on disk: what was read stays there longer than what was written a little later.
        old = here - 2
        ways: list[tuple[str, Callable[[], float]]] = [
            ("fio_write_unsynced", lambda offset=offset: fio.bytes_per_s("write", offset, region)),  # type: ignore[misc]
            ("fio_write", lambda offset=offset: fio.bytes_per_s("write", offset, region, sync_every=32)),  # type: ignore[misc]
            ("tier_write", lambda here=here: tier_write(here)),  # type: ignore[misc]
            ("daemon_write", lambda here=here: region / daemon.write_s(here)),  # type: ignore[misc]
            ("fio_read", lambda offset=offset: fio.bytes_per_s("read", offset, region)),  # type: ignore[misc]
            ("tier_read", lambda old=old: region / loop.run_until_complete(alone.read_s(old))),  # type: ignore[misc]
            ("daemon_read", lambda old=old: region / daemon.read_s(old)),  # type: ignore[misc]
        ]
        writes, reads = ways[:4], ways[4:]
        for part in (writes, reads):
            for name, act in part if number % 2 else reversed(part):
                samples.setdefault(name, []).append(act())
    loop.run_until_complete(alone.tier.aclose())
    loop.close()
    return samples


def run(
    quick: bool = False,
    rounds: int = 7,
    size_gib: int = 8,
    blocks: int = 1_000_000,
    directory: Path | None = None,
) -> dict[str, Any]:
    """Measure. Returns the figures under the names that docs and README use, then details with raw samples.

    Raises: ForebayError where fio is missing.
    """
    rounds, blocks = (2, 20_000) if quick else (rounds, blocks)
    size, regions = (64 * MIB, 4) if quick else (size_gib * GIB, 8)
    region = size // regions
    payload = MIB
    count = region // payload
    parent = directory or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=parent) as name:
        folder = Path(name)
        restarted = restart(folder / "restart", blocks)
        fio = Fio(folder / "fio", size)
        tried = fio.prepare(region)
        capacity = size + size // 16 + 64 * MIB  # records are a little longer than their payload
        alone = TierAlone(folder / "alone", capacity, count, payload)
        ram = -(-(region + region // 2 + 128 * MIB) // (64 * MIB)) * 64 * MIB
        options = {"ssd_bytes": capacity, "ssd_dirs": str(folder / "daemon"), "ssd_scrub_bytes_per_s": 0}
        with bench_daemon(ram, write_policy="write_back", **options) as daemon:
            daemon.ask("prefault")
            with daemon.client() as client:
                space = client.open(facts_for(payload, block_tokens=_BLOCK_TOKENS))
                whole = WholeDaemon(space, count, payload)
                samples = _rounds(fio, alone, whole, rounds, regions, region)
                stats = client.stats()["tiers"]["ssd"]
        direct = stats["directories"]["0"]["direct_io"]
    figures: dict[str, Any] = {}
    for verb in ("read", "write"):
        raw = samples[f"fio_{verb}"]
        for way, name in (("tier", f"{verb}_ratio"), ("daemon", f"daemon_{verb}_ratio")):
            ours = samples[f"{way}_{verb}"]
            figures[name] = median([own / base for own, base in zip(ours, raw, strict=True)])
    for way, name in (("tier", "write_ratio_unsynced"), ("daemon", "daemon_write_ratio_unsynced")):
        pairs = zip(samples[f"{way}_write"], samples["fio_write_unsynced"], strict=True)
        figures[name] = median([own / base for own, base in pairs])
    figures |= {f"{name}_GBps": median(found) / 1e9 for name, found in samples.items()}
    figures |= {
        "restart_first_hit_s": median(restarted["first_hit_s"]),
        "restart_first_hit_cold_s": median(restarted["first_hit_cold_s"]) if restarted["first_hit_cold_s"] else None,
        "write_amplification": stats["write_amplification"],
    }
    return {
        **rounded(figures),
        "quick": quick,
        "direct_io": bool(direct),
        "size_bytes": size,
        "region_bytes": region,
        "payload_bytes": payload,
        "machine": {**machine(), "fio": fio.version, "disk": _filesystem(parent)},
        "details": {"samples_bytes_per_s": samples, "fio_depths": tried, "restart": restarted},
    }


def _filesystem(path: Path) -> str:
    """Type and source of the filesystem that a path is on."""
    best = ("", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        source, mount, kind = line.split()[:3]
        if path.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {source}")
    return best[1]
