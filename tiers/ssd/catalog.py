"""The index of one directory: which object lies where, in LMDB. A cache of the truth, which the segments hold.

Covers look-ups, the table of segments and write transactions; decides nothing. Always true: an entry counts only while its
segment has the entry's generation, so a whole segment is forgotten by changing one number; look-ups take microseconds and
any thread may make them; only one thread writes.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb

from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.layout import DirectoryId, Place

_PLACE = struct.Struct("<IIQIHxx")
_KEY = struct.Struct(">16s16sH")
_SEGMENT = struct.Struct("<QBxxxIQ")
_NUMBER = struct.Struct(">I")
_IDENTITY: Final = b"directory"
_VERSION: Final = b"version"
_CATALOG_VERSION: Final = 1

# LMDB's meta page: 16 bytes of page header, then MDB_meta (lmdb 0.9, the same in 1.0 up to these fields).
_META = struct.Struct("<IIQQ48s48sQQ")
_META_OFFSET: Final = 16
_LMDB_MAGIC: Final = 0xBEEFC0DE


class SegmentState(IntEnum):
    """FREE: holds nothing. OPEN: records are appended. SEALED: ends in its table of contents."""

    FREE = 0
    OPEN = 1
    SEALED = 2


class SegmentRow(NamedTuple):
    """What the index says of a segment. records, data_bytes: what it held when it was sealed."""

    generation: int
    state: SegmentState
    records: int = 0
    data_bytes: int = 0


class BadCatalog(Exception):
    """The index can't be used as it is: damaged, cut off, or another directory's."""


class Catalog:
    """An open index."""

    def __init__(self, env: lmdb.Environment, files: Files) -> None:
        self._env, self._files = env, files
        self.objects: Any = env.open_db(b"objects")
        self.segment_table: Any = env.open_db(b"segments")
        self._meta: Any = env.open_db(b"meta")

    @classmethod
    def open(cls, folder: Path, directory: DirectoryId, files: Files, map_bytes: int, *, create: bool) -> Catalog:
        """Open or create. Raises: BadCatalog, OSError."""
        if not create:
            check_size(folder, files)
        try:
            files.mkdir(folder)
            # readahead off: look-ups are by hash, and what lies beside one is of no use.
            env = lmdb.open(str(folder), map_size=map_bytes, max_dbs=3, max_spare_txns=16, readahead=False)
            catalog = cls(env, files)
            with catalog.write() as batch:
                batch.claim(directory, create=create)
        except lmdb.Error as exc:
            raise BadCatalog(f"the index does not open: {exc}") from exc
        return catalog

    def close(self) -> None:
        self._env.close()

    def copy(self, folder: Path) -> None:
        """Write a new index with what this one leads to, and nothing of its free pages. Raises: OSError."""
        self._files.mkdir(folder)
        try:
            self._env.copy(str(folder), compact=True)
        except lmdb.Error as exc:
            raise _as_os_error(exc) from exc
        fd = self._files.open(folder / "data.mdb", os.O_RDWR)
        try:
            self._files.fdatasync(fd)
        finally:
            self._files.close(fd)

    @property
    def entries(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self.objects)["entries"])

    def find(self, key: ObjectKey) -> Place | None:
        """Where the index says that the object lies."""
        with self._env.begin(db=self.objects) as txn:
            raw = txn.get(_KEY.pack(*key[:2], key.group))
        return None if raw is None else Place(*_PLACE.unpack(raw))

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Several look-ups in one transaction."""
        with self._env.begin(db=self.objects) as txn:
            yield Reader(txn)

    def segments(self) -> dict[int, SegmentRow]:
        with self._env.begin(db=self.segment_table) as txn:
            return {_NUMBER.unpack(key)[0]: _segment_row(raw) for key, raw in txn.cursor()}

    def places(self) -> Iterator[tuple[ObjectKey, Place]]:
        """Every entry, in the order of keys, in one transaction."""
        with self._env.begin(db=self.objects) as txn:
            for key, raw in txn.cursor():
                namespace, block, group = _KEY.unpack(key)
                yield ObjectKey(namespace, block, group), Place(*_PLACE.unpack(raw))

    @contextmanager
    def write(self) -> Iterator[Batch]:
        """One write transaction, durable when the block ends; nothing of it happened if the block raises.

        Raises: OSError (ENOSPC where the index or its disk is full).
        """
        txn = self._env.begin(write=True)
        try:
            yield Batch(txn, self)
            self._files.commit(txn.commit)
        except lmdb.MapFullError as exc:
            txn.abort()
            raise OSError(28, "the index has reached its largest size") from exc
        except lmdb.Error as exc:
            txn.abort()
            raise _as_os_error(exc) from exc
        except BaseException:
            txn.abort()
            raise


class Reader:
    """Look-ups inside one transaction."""

    def __init__(self, txn: lmdb.Transaction) -> None:
        self._txn = txn

    def find(self, namespace: bytes, block: bytes, group: int) -> Place | None:
        raw = self._txn.get(_KEY.pack(namespace, block, group))
        return None if raw is None else Place(*_PLACE.unpack(raw))


class Batch:
    """Changes of one write transaction; reads see the changes before them."""

    def __init__(self, txn: lmdb.Transaction, catalog: Catalog) -> None:
        self._txn, self._catalog = txn, catalog

    def find(self, key: ObjectKey) -> Place | None:
        raw = self._txn.get(_KEY.pack(*key[:2], key.group), db=self._catalog.objects)
        return None if raw is None else Place(*_PLACE.unpack(raw))

    def put(self, key: ObjectKey, place: Place) -> None:
        self._txn.put(_KEY.pack(*key[:2], key.group), _PLACE.pack(*place), db=self._catalog.objects)

    def remove(self, key: ObjectKey) -> None:
        self._txn.delete(_KEY.pack(*key[:2], key.group), db=self._catalog.objects)

    def remove_at(self, key: ObjectKey, segment: int, generation: int) -> bool:
        """Remove an entry if it still leads into this segment. Returns whether it did."""
        place = self.find(key)
        if place is None or place[:2] != (segment, generation):
            return False
        self.remove(key)
        return True

    def set_segment(self, number: int, row: SegmentRow) -> None:
        self._txn.put(_NUMBER.pack(number), _SEGMENT.pack(*row), db=self._catalog.segment_table)

    def drop_segment(self, number: int) -> None:
        self._txn.delete(_NUMBER.pack(number), db=self._catalog.segment_table)

    def claim(self, directory: DirectoryId, *, create: bool) -> None:
        """Check that the index is this directory's, or make a new one so. Raises: BadCatalog."""
        meta = self._catalog._meta
        version = self._txn.get(_VERSION, db=meta)
        if version is None and create:
            self._txn.put(_VERSION, _NUMBER.pack(_CATALOG_VERSION), db=meta)
            self._txn.put(_IDENTITY, directory.raw, db=meta)
        elif version is None or _NUMBER.unpack(version)[0] > _CATALOG_VERSION:
            raise BadCatalog("the index is of another version")
        elif self._txn.get(_IDENTITY, db=meta) != directory.raw:
            raise BadCatalog("the index belongs to another directory")


def check_size(folder: Path, files: Files) -> None:
    """Whether the index file is as long as its own head says, without mapping it: reading a mapped page that is not there
    would end the process (SIGBUS) instead of raising.

    Raises: BadCatalog.
    """
    path = folder / "data.mdb"
    try:
        size = files.size(path)
        fd = files.open(path, os.O_RDONLY)
    except OSError as exc:
        raise BadCatalog(f"the index can't be opened: {exc.strerror}") from exc
    try:
        head = bytearray(2 * 65536)
        got = files.read_up_to(fd, [head], 0)
    finally:
        files.close(fd)
    metas = [found for at in _meta_offsets(bytes(head[:got])) if (found := _meta(bytes(head[:got]), at)) is not None]
    if not metas:
        raise BadCatalog("the index has no readable head")
    page_bytes, last_page = max(metas, key=lambda meta: meta[2])[:2]
    if size < (last_page + 1) * page_bytes:
        raise BadCatalog(f"the index is cut off: {size} bytes of {(last_page + 1) * page_bytes}")


def _meta_offsets(head: bytes) -> Iterable[int]:
    first = _meta(head, 0)
    return (0,) if first is None else (0, first[0])


def _meta(head: bytes, at: int) -> tuple[int, int, int] | None:
    """(page size, last page, transaction) of the meta page at an offset."""
    raw = head[at + _META_OFFSET : at + _META_OFFSET + _META.size]
    if len(raw) < _META.size:
        return None
    magic, _, _, _, free_db, _, last_page, transaction = _META.unpack(raw)
    page_bytes = int.from_bytes(free_db[:4], "little")
    if magic != _LMDB_MAGIC or not 512 <= page_bytes <= 65536:
        return None
    return page_bytes, last_page, transaction


def remove_catalog(folder: Path) -> None:
    """Delete an index that is no longer used."""
    shutil.rmtree(folder, ignore_errors=True)


def map_bytes_for(capacity_bytes: int) -> int:
    """Address space for the index: room for objects of one page each, never memory or disk by itself."""
    return max(1 << 28, capacity_bytes // 4096 * 256)


def _segment_row(raw: bytes) -> SegmentRow:
    generation, state, records, data_bytes = _SEGMENT.unpack(raw)
    return SegmentRow(generation, SegmentState(state), records, data_bytes)


def _as_os_error(exc: lmdb.Error) -> OSError:
    text = str(exc)
    number = 28 if "No space" in text or (isinstance(exc, lmdb.DiskError) and "space" in text) else 5
    return OSError(number, f"the index refused a transaction: {text}")
