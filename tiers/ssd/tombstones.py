"""The log of deletions of one directory: records that must not come back when the index is rebuilt from the segments.

An entry names a record by segment, generation and page, so it says nothing about a later record of the same key, and is
worthless once the segment has been emptied. Always true: an entry is durable before the delete it stands for is confirmed;
a log that is missing or damaged in the middle is noticed (`TombstonesLost`), for without it nothing may be rebuilt.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.layout import FORMAT_VERSION, DirectoryId, Place

_HEADER = struct.Struct("<4sHxx16sQ")
_ENTRY = struct.Struct("<IIQQQ")
_MAGIC: Final = b"FBTL"
_COMPACT_FROM: Final = 32_768  # entries: 1 MiB of log


class TombstonesLost(Exception):
    """The log is missing or damaged: deleted objects could come back."""


class Tombstone(NamedTuple):
    segment: int
    generation: int
    page: int


class Tombstones:
    """The open log. One thread appends."""

    def __init__(self, path: Path, directory: DirectoryId, files: Files) -> None:
        """Open it. Raises: TombstonesLost, OSError."""
        self._path, self._directory, self._files = path, directory, files
        self.entries, self._count = read(path, directory, files)
        self._fd = files.open(path, os.O_WRONLY)
        self.written_bytes = 0

    def append(self, places: Iterable[Place]) -> None:
        """Durably add deletions. Raises: OSError; then none of them counts, and the next append overwrites them."""
        stones = [Tombstone(place.segment, place.generation, place.page) for place in places]
        if not stones:
            return
        raw = b"".join(_pack(stone, self._directory) for stone in stones)
        self._files.write_all(self._fd, [raw], _HEADER.size + self._count * _ENTRY.size)
        self._files.fdatasync(self._fd)
        self.written_bytes += len(raw)
        self._count += len(stones)
        self.entries.update(stones)

    def compact(self, current: Callable[[Tombstone], bool]) -> None:
        """Once it is long, keep only entries whose segment may still hold the record (`current`). Raises: OSError."""
        if self._count < _COMPACT_FROM:
            return
        kept = {stone for stone in self.entries if current(stone)}
        if len(kept) * 2 > self._count:
            return
        self._files.replace_file(self._path, _whole(kept, self._directory))
        self._files.close(self._fd)
        self._fd = self._files.open(self._path, os.O_WRONLY)
        self.entries, self._count = kept, len(kept)

    def close(self) -> None:
        self._files.close(self._fd)


def create(path: Path, directory: DirectoryId, files: Files) -> None:
    """An empty log."""
    files.replace_file(path, _whole((), directory))


def read(path: Path, directory: DirectoryId, files: Files) -> tuple[set[Tombstone], int]:
    """All entries, and how many the log has. Raises: TombstonesLost, OSError.

    A damaged last entry is a write that was cut off: its delete was never confirmed.
    """
    try:
        raw = files.read_file(path)
    except FileNotFoundError as exc:
        raise TombstonesLost("the log of deletions is missing") from exc
    header = raw[: _HEADER.size]
    if header != _header(directory):
        raise TombstonesLost("the log of deletions is not this directory's, or its head is damaged")
    stones: set[Tombstone] = set()
    bad_at: int | None = None
    for index, at in enumerate(range(_HEADER.size, len(raw) - _ENTRY.size + 1, _ENTRY.size)):
        entry = raw[at : at + _ENTRY.size]
        segment, page, generation, _, digest = _ENTRY.unpack(entry)
        good = digest == xxhash.xxh3_64_intdigest(entry[:-8], directory.seed)
        if good and bad_at is not None:
            raise TombstonesLost(f"the log of deletions is damaged at entry {bad_at}")
        if good:
            stones.add(Tombstone(segment, generation, page))
        elif bad_at is None:
            bad_at = index
    return stones, (len(raw) - _HEADER.size) // _ENTRY.size if bad_at is None else bad_at


def _pack(stone: Tombstone, directory: DirectoryId) -> bytes:
    body = _ENTRY.pack(stone.segment, stone.page, stone.generation, 0, 0)[:-8]
    return body + xxhash.xxh3_64_intdigest(body, directory.seed).to_bytes(8, "little")


def _header(directory: DirectoryId) -> bytes:
    body = _HEADER.pack(_MAGIC, FORMAT_VERSION, directory.raw, 0)[:-8]
    return body + xxhash.xxh3_64_intdigest(body, directory.seed).to_bytes(8, "little")


def _whole(stones: Iterable[Tombstone], directory: DirectoryId) -> bytes:
    return _header(directory) + b"".join(_pack(stone, directory) for stone in stones)
