"""How soon a daemon serves from its disk after a kill -9: part of `forebay bench ssd`.

A directory is filled with records of one page each, written straight into segment files and indexed from them; a daemon adds
a run of real blocks to it and is killed. Then: seconds from the start of the next daemon's process to the first block that
a client has in its hands, verified.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.bench_support import BenchDaemon, facts_for
from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd import recovery
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import Home, State, boot_id, claim, write_state
from forebay.tiers.ssd.layout import (
    PAGE,
    RECORD_BYTES,
    Place,
    Record,
    SegmentHeader,
    data_checksum,
    pack_record,
    pack_segment,
    pack_toc,
    toc_pages,
)
from forebay.tiers.ssd.tier import DEFAULT_SEGMENT_BYTES

_OBJECT_BYTES: Final = 1024
_REAL: Final = 64
_PAYLOAD: Final = 256
_STARTS: Final = 3


def restart(folder: Path, blocks: int) -> dict[str, Any]:
    """Fill, kill, start: several times, and where we may, as many times with the page cache emptied."""
    capacity = fill(folder / "ssd", blocks) + 8 * DEFAULT_SEGMENT_BYTES
    settings = {"ssd_bytes": capacity, "ssd_dirs": str(folder / "ssd"), "ssd_scrub_bytes_per_s": 0}
    found: dict[str, Any] = {"blocks": blocks, "first_hit_s": [], "first_hit_cold_s": [], "ready_s": []}
    daemon = BenchDaemon(folder, 64 << 20, **settings)
    try:
        with daemon.client() as client:
            space = client.open(facts_for(_PAYLOAD, block_tokens=4, label="restart"))
            tokens = np.arange(_REAL * 4, dtype=np.uint32)
            keys = space.keys(tokens)
            space.put(keys, tokens, [bytes([index]) * _PAYLOAD for index in range(_REAL)])
            if space.flush(keys, timeout_s=60).durable != _REAL:
                raise RuntimeError("the run of blocks did not get to the disk")
            found["objects_on_disk"] = client.stats()["tiers"]["ssd"]["objects"]
        for name in ("first_hit_s", "first_hit_cold_s"):
            for _ in range(_STARTS):
                daemon.kill()
                if name == "first_hit_cold_s" and not _empty_page_cache():
                    break
                began_s = time.perf_counter()
                daemon = BenchDaemon(folder, 64 << 20, **settings)
                ready_s = time.perf_counter()
                with daemon.client() as client:
                    space = client.open(facts_for(_PAYLOAD, block_tokens=4, label="restart"))
                    with space.acquire(keys[:1], tokens[:4], wait_s=30.0) as lease:
                        if [bytes(view) for view in lease.views] != [bytes(_PAYLOAD)] or lease.verify() != 1:
                            raise RuntimeError("the block did not come back")
                found[name].append(time.perf_counter() - began_s)
                found["ready_s"].append(ready_s - began_s)
    finally:
        daemon.stop()
    return found


def fill(folder: Path, blocks: int) -> int:
    """Records of one page each, in sealed segments, with an index. Returns the bytes of the segments."""
    files = Files()
    home = claim(folder, files, DEFAULT_SEGMENT_BYTES)
    try:
        left, number = blocks, 0
        while left:
            per_segment = next(
                n for n in range(home.segment_pages, 0, -1) if 1 + n + toc_pages(n) <= home.segment_pages
            )
            count = min(left, per_segment)
            _write_segment(home, files, number, count)
            left, number = left - count, number + 1
    finally:
        files.close(home.lock_fd)
    recovery.in_child("rebuild", folder)
    write_state(folder, files, State(boot_id(), clean=True, unclean_starts=0))
    return number * home.segment_bytes


def _write_segment(home: Home, files: Files, number: int, count: int) -> None:
    header = SegmentHeader(number, home.segment_pages, number + 1, empty=False)
    records: list[Record] = []
    fd = files.open(home.segment(number), os.O_RDWR | os.O_CREAT)
    try:
        files.fallocate(fd, home.segment_bytes)
        files.write_all(fd, [pack_segment(header, home.id)], 0)
        pages = bytearray()
        for record, data in _records(header, count):
            records.append(record)
            pages += (pack_record(record, home.id) + data).ljust(PAGE, b"\0")
        files.write_all(fd, [pages], PAGE)
        table, footer = pack_toc(records, header, 1 + count, home.id)
        files.write_all(fd, [table], (1 + count) * PAGE)
        files.write_all(fd, [footer], (home.segment_pages - 1) * PAGE)
        files.fdatasync(fd)
    finally:
        files.close(fd)


def _records(header: SegmentHeader, count: int) -> Iterator[tuple[Record, bytes]]:
    noise = np.random.default_rng(header.segment).bytes(_OBJECT_BYTES + 16 * count)
    data = noise[:_OBJECT_BYTES]
    checksum = data_checksum(data)
    for index in range(count):
        at = _OBJECT_BYTES + 16 * index
        place = Place(header.segment, header.generation, 1 + index, _OBJECT_BYTES, RECORD_BYTES)
        yield Record(ObjectKey(bytes(16), noise[at : at + 16]), place, checksum), data


def _empty_page_cache() -> bool:
    """Have the kernel drop what it cached. False where this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
