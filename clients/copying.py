"""Payloads in and out of shared memory, many blocks at once, checksummed while they are warm.

Covers the two loops that everything else is measured by. Which places, whose lease and what a checksum must be is
clients/namespace.py's. Always true: a large copy runs without the GIL, and many of them on several threads; a small one keeps
it, because giving it up costs more than the copy's time is worth to others ([M] 64 KiB: 9 us to copy, 1.7 us for address and
call, 0.5 us as a slice). When a call returns or raises, no thread of it copies any more.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from operator import itemgetter
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.clients.memory import SharedMemory
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.pages import address_of
from forebay.kvstore.tier import Buffer, WritableBuffer

T = TypeVar("T")
_KEEP_GIL_BYTES: Final = 256 << 10
_WORTH_SHARING_BYTES: Final = 4 << 20  # in all: waking a thread takes some 50 us, copying a quarter of this 100
_RANGE_BYTES: Final = 1 << 20  # that a thread takes at a time
_digest = xxhash.xxh3_64_intdigest


def default_copy_threads() -> int:
    """Two where there are two cores: one thread reaches half or less of what memory gives ([M] 9.3 against 14.7 GB/s)."""
    return min(2, len(os.sched_getaffinity(0)))


class CopyThreads:
    """Shares large copies between the calling thread and some of its own, started when first needed."""

    def __init__(self, threads: int) -> None:
        """`threads`: how many copy at once, the caller's included."""
        if threads < 1:
            raise ValueError(f"copy_threads is {threads}: somebody has to copy")
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def share(self, count: int, size: int, work: Callable[[int, int], T]) -> list[tuple[int, T]]:
        """Call `work(start, end)` for ranges that make up `count` blocks of `size` bytes.

        Returns (start, result) in order. Whoever is free takes the next range, so that one thread that the machine holds up
        doesn't hold up all.
        """
        if size < _KEEP_GIL_BYTES or count * size < _WORTH_SHARING_BYTES or self._threads == 1:
            return [(0, work(0, count))]
        step = max(1, _RANGE_BYTES // size)
        starts = iter(range(0, count, step))  # `next` on it is one step of the interpreter, so no lock is needed

        def take() -> list[tuple[int, T]]:
            return [(start, work(start, min(start + step, count))) for start in starts]

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="forebay-copy")
            others = [self._pool.submit(take) for _ in range(self._threads - 1)]
        try:
            done = take()
        finally:
            wait(others)  # also when our own piece failed: the buffers are the caller's again when this returns
        for other in others:
            done += other.result()
        return sorted(done, key=itemgetter(0))

    def close(self) -> None:
        """End the threads once they have finished what they copy. Idempotent; a later copy starts them again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


def copy_in(
    threads: CopyThreads,
    memory: SharedMemory,
    layout: ObjectLayout,
    places: npt.NDArray[np.void],
    payloads: Sequence[Buffer],
    headers: npt.NDArray[np.uint8],
) -> None:
    """Copy payloads and then headers, whose checksums are filled in, to their places, [places] each.

    A header goes in right after its payload: [M] 0.6 us so, and 2 us for one whose pages have left the caches.
    """
    size, head, ranges = layout.payload_bytes, layout.header_bytes, layout.part_ranges
    offsets, numbers, extents = places["offset"].tolist(), places["extent"].tolist(), memory.extents
    put_sums, sums_at = struct.Struct(f"<{len(ranges)}Q").pack_into, layout.checksums_offset
    heads = headers.reshape(-1).data

    def copy(first: int, end: int) -> None:
        for i in range(first, end):
            payload, at, extent = payloads[i], offsets[i], extents[numbers[i]]
            if size < _KEEP_GIL_BYTES:
                extent.writable_memory[at + head : at + head + size] = _as_bytes(payload)
            else:
                source = payload if isinstance(payload, bytes) else address_of(payload)
                ctypes.memmove(extent.write_address + at + head, source, size)
            digests = [_digest(payload)] if len(ranges) == 1 else _parts(payload, ranges)
            put_sums(heads, i * head + sums_at, *digests)
            extent.writable_memory[at : at + head] = heads[i * head : i * head + head]

    threads.share(len(numbers), size, copy)


def copy_out(
    threads: CopyThreads,
    memory: SharedMemory,
    layout: ObjectLayout,
    places: npt.NDArray[np.void],
    targets: Sequence[memoryview],
    checksums: Sequence[Sequence[int]] | None,
) -> int:
    """Copy payloads of places into `targets`, byte views of layout.payload_bytes.

    Returns how many leading ones are good: with `checksums`, the first that differs ends it.
    """
    size, ranges = layout.payload_bytes, layout.part_ranges
    starts = (places["offset"].astype(np.int64) + layout.header_bytes).tolist()
    numbers = places["extent"].tolist()
    extents = memory.extents

    def copy(first: int, end: int) -> int:
        for i in range(first, end):
            target, number, start = targets[i], numbers[i], starts[i]
            if size < _KEEP_GIL_BYTES:
                target[:] = extents[number].memory[start : start + size]
            else:
                ctypes.memmove(address_of(target), extents[number].read_address + start, size)
            if checksums is not None:
                found = [_digest(target)] if len(ranges) == 1 else _parts(target, ranges)
                if found != checksums[i]:
                    return i
        return end

    count, good = len(numbers), 0
    for start, stopped in threads.share(count, size, copy):
        if start != good:
            break  # the range before it has a block that differs
        good = stopped
    return good


def targets_of(buffers: Sequence[WritableBuffer] | WritableBuffer, count: int, size: int) -> list[memoryview]:
    """A byte view for each block, of exactly `size`. Raises: ValueError: too few, too small, or read-only."""
    views: list[memoryview]
    if isinstance(buffers, (bytearray, memoryview)):
        whole = memoryview(buffers).cast("B")
        if whole.nbytes < count * size:
            raise ValueError(f"one buffer for {count} blocks needs {count * size} bytes, not {whole.nbytes}")
        views = list(
            map(whole.__getitem__, map(slice, range(0, count * size, size), range(size, count * size + 1, size)))
        )
    else:
        if len(buffers) < count:
            raise ValueError(f"{count} keys need as many buffers, not {len(buffers)}")
        views = [memoryview(buffer).cast("B")[:size] for buffer in buffers[:count]]
    for view in views:
        if len(view) < size or view.readonly:
            raise ValueError(f"a block needs a writable buffer of {size} bytes, not {len(view)}")
    return views


def _as_bytes(payload: Buffer) -> Buffer:
    """Assigning a slice wants equal formats."""
    return payload.cast("B") if isinstance(payload, memoryview) and payload.format != "B" else payload


def _parts(payload: Buffer, ranges: Sequence[tuple[int, int]]) -> list[int]:
    view = memoryview(payload).cast("B")
    return [_digest(view[start:end]) for start, end in ranges]
