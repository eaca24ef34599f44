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
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.wire import LOCATION_DTYPE

Words = npt.NDArray[np.uint64]
_KEY_WORD: Final = 2  # of a header: bytes 16..31
_NAMESPACE_WORD: Final = 6  # bytes 48..63


class MappedExtent:
    """One extent, mapped for reading, and for writing once something is written."""

    __slots__ = (
        "_fd",
        "_readable",
        "_writable",
        "address",
        "memory",
        "number",
        "size_bytes",
        "words",
        "writable_memory",
    )

    def __init__(self, number: int, descriptor: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self._fd = descriptor
        # Populated at once: 16,384 page faults taken one by one, in the first copies, cost ten times as much.
        self._readable = mmap.mmap(
            descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
        )
        self.memory = memoryview(self._readable)
        self.words: Words = np.frombuffer(self._readable, np.uint64)
        self._writable: mmap.mmap | None = None
        self.writable_memory = memoryview(b"")
        self.address = 0

    def map_writable(self) -> None:
        """Map for writing, too. Raises: PermissionError in a read-only domain."""
        if self._writable is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._writable = mmap.mmap(self._fd, self.size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._writable.madvise(mmap.MADV_DONTFORK)
            self.writable_memory = memoryview(self._writable)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._writable))

    def close(self) -> bool:
        """Unmap. False while a view of it is held elsewhere: its memory goes with that view."""
        self.words = np.empty(0, np.uint64)
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

    def __init__(self, *, board: int, board_bytes: int, extent_bytes: int, read_only: bool) -> None:
        """`board`: the board's descriptor, owned by this object from now on."""
        self.extent_bytes = extent_bytes
        self.read_only = read_only
        self._board_map = mmap.mmap(board, board_bytes, prot=mmap.PROT_READ)
        os.close(board)
        self.generations: Words = np.frombuffer(self._board_map, np.uint64)
        self.extents: dict[int, MappedExtent] = {}
        self.lock = threading.Lock()

    def unknown(self, places: npt.NDArray[np.void]) -> list[int]:
        """Extents that places lie in and that are not mapped yet."""
        return [number for number in np.unique(places["extent"]).tolist() if number not in self.extents]

    def add(self, number: int, descriptor: int) -> None:
        with self.lock:
            if number in self.extents:
                os.close(descriptor)  # another thread was quicker
            else:
                self.extents[number] = MappedExtent(number, descriptor, self.extent_bytes)

    def drop(self, numbers: list[int]) -> list[int]:
        """Unmap retired extents. Returns those that are unmapped now."""
        dropped = []
        with self.lock:
            for number in numbers:
                extent = self.extents.pop(number, None)
                if extent is None or extent.close():
                    dropped.append(number)
        return dropped

    def by_extent(self, places: npt.NDArray[np.void]) -> Iterator[tuple[MappedExtent, npt.NDArray[np.intp]]]:
        """Positions in `places`, grouped by their extent."""
        numbers = places["extent"]
        if len(numbers) and (numbers == numbers[0]).all():
            yield self.extents[int(numbers[0])], np.arange(len(numbers))
            return
        for number in np.unique(numbers).tolist():
            yield self.extents[number], np.flatnonzero(numbers == number)

    def gather(self, places: npt.NDArray[np.void], first_byte: int, words: int) -> Words:
        """`words` u64 of every object from `first_byte` of its header on, [places, words]. Offsets are multiples of 8."""
        out = np.empty((len(places), words), np.uint64)
        steps = np.arange(words, dtype=np.int64)
        for extent, positions in self.by_extent(places):
            first = (places["offset"][positions].astype(np.int64) + first_byte) >> 3
            out[positions] = extent.words[first[:, None] + steps]
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
        head = self.gather(places, 0, _NAMESPACE_WORD + 2)
        wanted = np.frombuffer(keys, np.uint64).reshape(-1, 2)[: len(places)]
        good = (head[:, _KEY_WORD : _KEY_WORD + 2] == wanted).all(axis=1)
        good &= (head[:, _NAMESPACE_WORD:] == np.frombuffer(namespace, np.uint64)).all(axis=1)
        if token_words is not None:
            count = (layout.block_tokens + 1) // 2
            found = self.gather(places, layout.tokens_offset, count).view(np.uint32).reshape(len(places), 2 * count)
            expected = token_words[: len(places) * layout.block_tokens].reshape(len(places), layout.block_tokens)
            good &= (found[:, : layout.block_tokens] == expected).all(axis=1)
        good &= self.current(places)
        return len(good) if good.all() else int(good.argmin())

    def close(self) -> None:
        """Unmap all. What a view still holds goes with that view."""
        self.generations = np.empty(0, np.uint64)
        self.drop(list(self.extents))
        try:
            self._board_map.close()
        except BufferError:
            pass


def read_places(locations: bytes) -> npt.NDArray[np.void]:
    """The daemon's locations, [objects] of LOCATION_DTYPE."""
    return np.frombuffer(locations, LOCATION_DTYPE)
