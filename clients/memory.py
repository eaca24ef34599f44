"""The daemon's shared memory as one session maps it: extents, the board of generations, and looks into many objects at once.

Covers mapping, unmapping, address arithmetic and the vectorised identity check. Sends nothing. Always true: what is read is
mapped read-only; the writable mapping is never inherited by a forked child, whose copies nobody could wait for.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.pages import populate
from forebay.kvstore.wire import LOCATION_DTYPE

Words = npt.NDArray[np.uint64]
_LINE_WORDS: Final = 8
# Of a header's first line, which is where every object begins.
_KEY_WORDS: Final = slice(2, 4)
_NAMESPACE_WORDS: Final = slice(6, 8)


class MapWatcher(Protocol):
    """Told of every mapping that is read from, so that it can be registered with a device. Any thread may call it."""

    def mapped(self, address: int, size_bytes: int) -> None: ...

    def unmapping(self, address: int) -> None:
        """The mapping is about to go."""


class MappedExtent:
    """One extent, mapped for reading once something is read, and for writing once something is written.

    Two mappings, so that a consumer's stray write to a view is a fault in its own process, not another block's damage.
    """

    def __init__(self, number: int, descriptor: int, size_bytes: int, watcher: MapWatcher | None = None) -> None:
        """`descriptor` belongs to this object from now on."""
        self.number = number
        self._watcher = watcher
        self.size_bytes = size_bytes
        self._fd = descriptor
        self._readable: mmap.mmap | None = None
        self._writable: mmap.mmap | None = None
        self.memory = memoryview(b"")
        self.words: Words = np.empty(0, np.uint64)
        self.read_address = 0
        self.writable_memory = memoryview(b"")
        self.write_address = 0

    def map_readable(self) -> None:
        if self._readable is None:
            mapped = mmap.mmap(self._fd, self.size_bytes, prot=mmap.PROT_READ)
            self.words = np.frombuffer(mapped, np.uint64)
            self.read_address = self.words.ctypes.data
            populate(self.read_address, self.size_bytes)
            self.memory = memoryview(mapped)
            self._readable = mapped
            if self._watcher is not None:
                self._watcher.mapped(self.read_address, self.size_bytes)

    def map_writable(self) -> None:
        """Raises: PermissionError in a read-only domain."""
        if self._writable is None:
            mapped = mmap.mmap(self._fd, self.size_bytes)
            mapped.madvise(mmap.MADV_DONTFORK)
            self.write_address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            populate(self.write_address, self.size_bytes)
            self.writable_memory = memoryview(mapped)
            self._writable = mapped

    def close(self) -> bool:
        """Unmap. False while a view of it is held elsewhere: its memory goes with that view."""
        self.words = np.empty(0, np.uint64)
        if self._watcher is not None and self._readable is not None:
            self._watcher.unmapping(self.read_address)
        whole = True
        for view, mapped in ((self.memory, self._readable), (self.writable_memory, self._writable)):
            try:
                view.release()
                if mapped is not None:
                    mapped.close()
            except BufferError:
                whole = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return whole


class SharedMemory:
    """Everything one session has mapped."""

    def __init__(
        self, *, board: int, board_bytes: int, extent_bytes: int, read_only: bool, watcher: MapWatcher | None = None
    ) -> None:
        """`board`: the board's descriptor, owned by this object from now on."""
        self._watcher = watcher
        self.extent_bytes = extent_bytes
        self.read_only = read_only
        self._board_map = mmap.mmap(board, board_bytes, prot=mmap.PROT_READ)
        os.close(board)
        self.generations: Words = np.frombuffer(self._board_map, np.uint64)
        self.extents: dict[int, MappedExtent] = {}
        self.lock = threading.Lock()

    def unknown(self, places: npt.NDArray[np.void]) -> list[int]:
        """Extents that places lie in and that this session doesn't have yet."""
        return [number for number in distinct_extents(places) if number not in self.extents]

    def add(self, number: int, descriptor: int) -> None:
        with self.lock:
            if number in self.extents:
                os.close(descriptor)  # another thread was quicker
            else:
                self.extents[number] = MappedExtent(number, descriptor, self.extent_bytes, self._watcher)

    def map(self, places: npt.NDArray[np.void], *, writable: bool) -> None:
        """Map the extents that places lie in. Raises: PermissionError: writable in a read-only domain."""
        with self.lock:
            for number in distinct_extents(places):
                extent = self.extents[number]
                if writable:
                    extent.map_writable()
                else:
                    extent.map_readable()

    def drop(self, numbers: list[int]) -> list[int]:
        """Unmap retired extents. Returns those that are unmapped now."""
        dropped = []
        with self.lock:
            for number in numbers:
                extent = self.extents.pop(number, None)
                if extent is None or extent.close():
                    dropped.append(number)
        return dropped

    def by_extent(self, places: npt.NDArray[np.void]) -> Iterator[tuple[MappedExtent, npt.NDArray[np.intp] | slice]]:
        """Positions in `places`, grouped by their extent; all of them, without a copy of anything, where there is but one."""
        distinct = distinct_extents(places)
        if len(distinct) == 1:
            yield self.extents[distinct[0]], slice(None)
            return
        for number in distinct:
            yield self.extents[number], np.flatnonzero(places["extent"] == number)

    def gather(self, places: npt.NDArray[np.void], words: npt.NDArray[np.int64]) -> Words:
        """The u64 at these word offsets of every object, [places, words]."""
        out = np.empty((len(places), len(words)), np.uint64)
        first = places["offset"].astype(np.int64) >> 3
        for extent, positions in self.by_extent(places):
            out[positions] = extent.words.take(first[positions][:, None] + words)
        return out

    def _first_lines(self, places: npt.NDArray[np.void]) -> Words:
        """The first 64 bytes of every object, [places, 8]."""
        first = places["offset"].astype(np.int64) // (8 * _LINE_WORDS)
        out = np.empty((len(places), _LINE_WORDS), np.uint64)
        for extent, positions in self.by_extent(places):
            out[positions] = extent.words.reshape(-1, _LINE_WORDS).take(first[positions], axis=0)
        return out

    def current(self, places: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Whether each place still holds what it held when it was given out. Ask after the copy."""
        current: npt.NDArray[np.bool_] = self.generations[places["board"]] == places["generation"]
        return current

    def leading_good(
        self,
        places: npt.NDArray[np.void],
        keys: bytes,
        namespace: bytes,
        layout: ObjectLayout,
        token_words: npt.NDArray[np.uint32] | None,
    ) -> int:
        """How many leading objects are what was asked for: key, namespace, tokens (if given) and generation."""
        if not len(places):
            return 0
        lines = self._first_lines(places)
        same = [
            lines[:, _KEY_WORDS] == np.frombuffer(keys, np.uint64).reshape(-1, 2)[: len(places)],
            lines[:, _NAMESPACE_WORDS] == np.frombuffer(namespace, np.uint64),
        ]
        if token_words is not None:
            count = (layout.block_tokens + 1) // 2
            where = layout.tokens_offset // 8 + np.arange(count)
            found = self.gather(places, where).view(np.uint32).reshape(len(places), 2 * count)
            expected = token_words[: len(places) * layout.block_tokens].reshape(len(places), layout.block_tokens)
            same.append(found[:, : layout.block_tokens] == expected)
        good = self.current(places)
        if good.all() and all(each.all() for each in same):  # without the axis, which costs 15 times as much
            return len(places)
        for each in same:
            good &= each.all(axis=1)
        return int(good.argmin())

    def close(self) -> None:
        """Unmap all. What a view still holds goes with that view."""
        self.generations = np.empty(0, np.uint64)
        self.drop(list(self.extents))
        try:
            self._board_map.close()
        except BufferError:
            pass


class NoMemory(SharedMemory):
    """Of a session over TCP: nothing is mapped, and payload travels inline."""

    def __init__(self) -> None:
        self.extent_bytes = 0
        self.read_only = True
        self.generations = np.empty(0, np.uint64)
        self.extents = {}
        self.lock = threading.Lock()

    def close(self) -> None:
        pass


def distinct_extents(places: npt.NDArray[np.void]) -> list[int]:
    """Extents that places lie in. Runs lie side by side mostly, so only the changes are looked at, not every place sorted."""
    numbers = places["extent"]
    if not len(numbers):
        return []
    changes = numbers[1:][numbers[1:] != numbers[:-1]]
    return list(dict.fromkeys([int(numbers[0]), *changes.tolist()]))


def read_places(locations: bytes) -> npt.NDArray[np.void]:
    """The daemon's locations, [objects] of LOCATION_DTYPE."""
    return np.frombuffer(locations, LOCATION_DTYPE)
