"""Moves records between memory and segment files, past the page cache, copying only what is not page-aligned.

Objects of 64 KiB and more lie page-aligned in shared memory and go to the disk and back in place, but for their last,
partly filled page. Everything else passes through a thread's own aligned buffer. Always true: a read fills at most
`length` bytes of the caller's buffer, and nothing of it is believed that the record's header doesn't confirm.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Final

from forebay.kvstore.pages import address_of
from forebay.kvstore.tier import Buffer, ObjectKey, WritableBuffer
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.layout import (
    PAGE,
    RECORD_BYTES,
    DirectoryId,
    Place,
    Record,
    pack_record,
    unpack_record,
)

# 1 MiB: larger steps only cost memory, a buffer a thread.
_BOUNCE_BYTES: Final = 1 << 20
_DIRECT_FROM_BYTES: Final = 64 << 10


class Bounce(threading.local):
    """A page-aligned buffer a thread, with two pages behind it for headers and tails."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _BOUNCE_BYTES + 2 * PAGE)
        whole = memoryview(self._map)
        self.body = whole[:_BOUNCE_BYTES]
        self.head = whole[_BOUNCE_BYTES : _BOUNCE_BYTES + PAGE]
        self.tail = whole[_BOUNCE_BYTES + PAGE :]


class RecordIo:
    """Reads and writes records of one directory. For any thread."""

    def __init__(self, files: Files, directory: DirectoryId, segment_pages: int) -> None:
        self._files, self._directory, self._segment_pages = files, directory, segment_pages
        self._bounce = Bounce()

    @staticmethod
    def data_offset(data: memoryview) -> int:
        """Where in its record an object should lie, by how it lies in memory."""
        direct = data.nbytes >= _DIRECT_FROM_BYTES and address_of(data) % PAGE == 0
        return PAGE if direct else RECORD_BYTES

    def write(self, fd: int, record: Record, data: memoryview) -> None:
        """Write a record at its place. Raises: OSError; then the place holds anything."""
        head = pack_record(record, self._directory)
        at, offset = record.place.page * PAGE, record.place.data_offset
        if offset == PAGE and address_of(data) % PAGE == 0:
            self._write_in_place(fd, head, data, at)
        else:
            self._write_copied(fd, head, offset, data, at)

    def _write_in_place(self, fd: int, head: bytes, data: memoryview, at: int) -> None:
        bounce = self._bounce
        bounce.head[:RECORD_BYTES] = head
        bounce.head[RECORD_BYTES:] = bytes(PAGE - RECORD_BYTES)
        whole = data.nbytes - data.nbytes % PAGE
        buffers: list[Buffer] = [bounce.head, data[:whole]]
        if rest := data.nbytes - whole:
            bounce.tail[:rest] = data[whole:]
            bounce.tail[rest:] = bytes(PAGE - rest)
            buffers.append(bounce.tail)
        self._files.write_all(fd, buffers, at)

    def _write_copied(self, fd: int, head: bytes, offset: int, data: memoryview, at: int) -> None:
        body = self._bounce.body
        body[:RECORD_BYTES] = head
        body[RECORD_BYTES:offset] = bytes(offset - RECORD_BYTES)
        filled, taken = offset, 0
        while True:
            step = min(data.nbytes - taken, body.nbytes - filled)
            _copy(body[filled : filled + step], data[taken : taken + step])
            filled, taken = filled + step, taken + step
            end = -(-filled // PAGE) * PAGE
            body[filled:end] = bytes(end - filled)
            self._files.write_all(fd, [body[:end]], at)
            if taken == data.nbytes:
                return
            at, filled = at + end, 0

    def read(self, fd: int, key: ObjectKey, place: Place, out: WritableBuffer) -> Record | None:
        """Read the object at a place into the first `place.length` bytes of `out`.

        Returns: its record. None: something else lies there (or the file ends before); `out` then holds anything.
        Raises: OSError.
        """
        view = memoryview(out)[: place.length]
        in_place = place.data_offset == PAGE and address_of(view) % PAGE == 0
        read = self._read_in_place if in_place else self._read_copied
        head = read(fd, view, place)
        record = None if head is None else unpack_record(head, self._directory, self._segment_pages)
        return record if record is not None and record.place == place and record.key == key else None

    def _read_in_place(self, fd: int, view: memoryview, place: Place) -> bytes | None:
        bounce = self._bounce
        whole = view.nbytes - view.nbytes % PAGE
        buffers: list[WritableBuffer] = [bounce.head, view[:whole]]
        rest = view.nbytes - whole
        if rest:
            buffers.append(bounce.tail)
        if self._files.read_up_to(fd, buffers, place.page * PAGE) != place.pages * PAGE:
            return None
        if rest:
            view[whole:] = bounce.tail[:rest]
        return bytes(bounce.head[:RECORD_BYTES])

    def _read_copied(self, fd: int, view: memoryview, place: Place) -> bytes | None:
        body = self._bounce.body
        at, left, filled, skip = place.page * PAGE, place.pages * PAGE, 0, place.data_offset
        head: bytes | None = None
        while left:
            step = min(left, body.nbytes)
            if self._files.read_up_to(fd, [body[:step]], at) != step:
                return None
            if head is None:
                head = bytes(body[:RECORD_BYTES])
            size = min(step - skip, view.nbytes - filled)
            _copy(view[filled : filled + size], body[skip : skip + size])
            at, left, filled, skip = at + step, left - step, filled + size, 0
        return head


def aligned_buffer(size: int) -> memoryview:
    """Page-aligned memory of at least `size` bytes, for reads and writes past the page cache."""
    return memoryview(mmap.mmap(-1, max(PAGE, -(-size // PAGE) * PAGE)))


def _copy(target: memoryview, source: memoryview) -> None:
    if target.nbytes >= _DIRECT_FROM_BYTES:  # lets other threads run meanwhile; a slice assignment doesn't
        ctypes.memmove(address_of(target), address_of(source), target.nbytes)
    else:
        target[:] = source
