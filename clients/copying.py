"""Payloads in and out of shared memory, many blocks at once, checksummed while they are warm.

Covers the two loops that everything else is measured by. Which places, whose lease and what a checksum must be is
clients/namespace.py's. Always true: a large copy runs without the GIL; a small one keeps it, because giving it up costs more
than the copy's time is worth to others ([M] 64 KiB: 9 us to copy, 1.7 us for address and call, 0.5 us as a slice).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.clients.memory import SharedMemory
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.pages import address_of
from forebay.kvstore.tier import Buffer, WritableBuffer

_KEEP_GIL_BYTES: Final = 256 << 10
_digest = xxhash.xxh3_64_intdigest


def copy_in(
    memory: SharedMemory,
    layout: ObjectLayout,
    places: npt.NDArray[np.void],
    payloads: Sequence[Buffer],
) -> list[list[int]]:
    """Copy payloads behind the headers of their places, [places] both. Returns the part checksums of each."""
    size, ranges = layout.payload_bytes, layout.part_ranges
    starts = (places["offset"].astype(np.int64) + layout.header_bytes).tolist()
    numbers = places["extent"].tolist()
    extents = memory.extents
    checksums: list[list[int]] = []
    for payload, number, start in zip(payloads, numbers, starts, strict=True):
        if size < _KEEP_GIL_BYTES:
            extents[number].writable_memory[start : start + size] = _as_bytes(payload)
        else:
            source = payload if isinstance(payload, bytes) else address_of(payload)
            ctypes.memmove(extents[number].write_address + start, source, size)
        checksums.append([_digest(payload)] if len(ranges) == 1 else _parts(payload, ranges))
    return checksums


def copy_out(
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
    for i, (number, start) in enumerate(zip(numbers, starts, strict=True)):
        target = targets[i]
        if size < _KEEP_GIL_BYTES:
            target[:] = extents[number].memory[start : start + size]
        else:
            ctypes.memmove(address_of(target), extents[number].read_address + start, size)
        if checksums is not None:
            found = [_digest(target)] if len(ranges) == 1 else _parts(target, ranges)
            if found != checksums[i]:
                return i
    return len(places)


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
