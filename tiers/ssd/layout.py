"""What lies on the disk, byte by byte: segments, records, tables of contents. docs/reference/disk-format.md tells it all.

Covers packing and checking only; opens no file. Always true: nothing read back is returned before its checksum, its
directory's identity and its bounds were checked; every checksum is seeded with the directory's id, so that bytes inside a
payload can't pass for a structure, nor one directory's files for another's.

A segment file: header page, records, table of contents, footer page. A record: 128 bytes of header, the object behind it
(`data_offset` 128) or on the next page (`data_offset` 4096, so that it can be written straight from page-aligned memory).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.kvstore.tier import Buffer, ObjectKey

PAGE: Final = 4096
"""Unit of places, and what O_DIRECT needs addresses, offsets and lengths to be a multiple of."""

FORMAT_VERSION: Final = 1
"""Of everything below. A newer Forebay reads older versions; an older one refuses newer ones."""

RECORD_BYTES: Final = 128
ENTRY_BYTES: Final = 64
# Entries of a table handled in one array operation: some 0.5 ms, for which no other thread runs.
_CHUNK: Final = 512
MIN_SEGMENT_BYTES: Final = 8 * PAGE
MAX_SEGMENT_BYTES: Final = 1 << 30

_RECORD = struct.Struct("<4sHHIIIIQ16s16sQ48xQ")
_SEGMENT = struct.Struct("<4sHHIIQ16s16xQ")
_FOOTER = struct.Struct("<4sHHIIQIIQ16sQ")
_RECORD_MAGIC: Final = b"FBR1"
_SEGMENT_MAGIC: Final = b"FBSG"
_FOOTER_MAGIC: Final = b"FBTC"

_ENTRY = np.dtype(
    [
        ("namespace", "V16"),
        ("block", "V16"),
        ("group", "<u2"),
        ("data_offset", "<u2"),
        ("page", "<u4"),
        ("length", "<u4"),
        ("zero", "<u4"),
        ("xxh3", "<u8"),
        ("zero2", "<u8"),
    ]
)


class DirectoryId(NamedTuple):
    """Identity of one directory: 16 random bytes, and the checksum seed that follows from them."""

    raw: bytes
    seed: int

    @classmethod
    def of(cls, raw: bytes) -> DirectoryId:
        return cls(raw, xxhash.xxh3_64_intdigest(raw))


class Place(NamedTuple):
    """Where an object lies. Valid only while the segment has this generation.

    page: of the record's header, in the segment. length: of the object, bytes. data_offset: of the object in its record.
    """

    segment: int
    generation: int
    page: int
    length: int
    data_offset: int

    @property
    def pages(self) -> int:
        return pages_of(self.data_offset + self.length)


class Record(NamedTuple):
    """An object's record: what its header says. `xxh3`: of the object's bytes."""

    key: ObjectKey
    place: Place
    xxh3: int


class SegmentHeader(NamedTuple):
    """First page of a segment. An `empty` one holds nothing, whatever its other pages say."""

    segment: int
    pages: int
    generation: int
    empty: bool


def pages_of(size: int) -> int:
    return -(-size // PAGE)


def data_checksum(data: Buffer) -> int:
    return xxhash.xxh3_64_intdigest(data)


def toc_pages(entries: int) -> int:
    """Pages of a table of contents, with its footer."""
    return pages_of(entries * ENTRY_BYTES) + 1


# --- records -------------------------------------------------------------------------------------------------------


def pack_record(record: Record, directory: DirectoryId) -> bytes:
    """The 128 bytes in front of an object."""
    key, place = record.key, record.place
    body = _RECORD.pack(
        _RECORD_MAGIC,
        FORMAT_VERSION,
        key.group,
        place.data_offset,
        place.length,
        place.segment,
        place.page,
        place.generation,
        key.namespace,
        key.block,
        record.xxh3,
        0,
    )
    return body[:-8] + _digest(body[:-8], directory)


def unpack_record(raw: Buffer, directory: DirectoryId, segment_pages: int) -> Record | None:
    """The record whose header starts `raw`. None if there is none of this directory that fits into its segment."""
    head = bytes(raw[:RECORD_BYTES])
    if head[:4] != _RECORD_MAGIC or head[-8:] != _digest(head[:-8], directory):
        return None
    _, version, group, data_offset, length, segment, page, generation, namespace, block, xxh3, _ = _RECORD.unpack(head)
    place = Place(segment, generation, page, length, data_offset)
    if version > FORMAT_VERSION or not fits(place, segment_pages):
        return None
    return Record(ObjectKey(namespace, block, group), place, xxh3)


def fits(place: Place, segment_pages: int) -> bool:
    """Whether a place read from disk lies within its segment: after the header page, before the footer page."""
    return (
        place.data_offset in (RECORD_BYTES, PAGE)
        and place.length > 0
        and place.page >= 1
        and place.page + place.pages < segment_pages
    )


# --- segments ------------------------------------------------------------------------------------------------------


def pack_segment(header: SegmentHeader, directory: DirectoryId) -> bytes:
    """A segment's first page."""
    body = _SEGMENT.pack(
        _SEGMENT_MAGIC,
        FORMAT_VERSION,
        int(header.empty),
        header.segment,
        header.pages,
        header.generation,
        directory.raw,
        0,
    )
    return (body[:-8] + _digest(body[:-8], directory)).ljust(PAGE, b"\0")


def unpack_segment(raw: Buffer, directory: DirectoryId) -> SegmentHeader | None:
    """The header that starts `raw`; None if it is none of this directory."""
    head = bytes(raw[: _SEGMENT.size])
    if len(head) < _SEGMENT.size or head[:4] != _SEGMENT_MAGIC or head[-8:] != _digest(head[:-8], directory):
        return None
    _, version, empty, segment, pages, generation, raw_id, _ = _SEGMENT.unpack(head)
    if version > FORMAT_VERSION or raw_id != directory.raw:
        return None
    return SegmentHeader(segment, pages, generation, bool(empty))


# --- tables of contents --------------------------------------------------------------------------------------------


def pack_toc(
    records: Sequence[Record], header: SegmentHeader, page: int, directory: DirectoryId
) -> tuple[bytes, bytes]:
    """(table in whole pages, to lie at `page`; footer page, the segment's last)."""
    entries = b"".join(_pack_entries(records[at : at + _CHUNK]) for at in range(0, len(records), _CHUNK))
    body = _FOOTER.pack(
        _FOOTER_MAGIC,
        FORMAT_VERSION,
        0,
        header.segment,
        page,
        header.generation,
        len(records),
        0,
        xxhash.xxh3_64_intdigest(entries, directory.seed),
        directory.raw,
        0,
    )
    footer = (body[:-8] + _digest(body[:-8], directory)).ljust(PAGE, b"\0")
    return entries.ljust(pages_of(len(entries)) * PAGE, b"\0"), footer


def _pack_entries(records: Sequence[Record]) -> bytes:
    rows = [
        (key.namespace, key.block, key.group, place.data_offset, place.page, place.length, 0, xxh3, 0)
        for key, place, xxh3 in records
    ]
    return np.array(rows, _ENTRY).tobytes()


class Footer(NamedTuple):
    """Where a sealed segment's table of contents lies."""

    page: int
    entries: int
    xxh3: int

    @property
    def bytes(self) -> int:
        return self.entries * ENTRY_BYTES


def unpack_footer(raw: Buffer, header: SegmentHeader, directory: DirectoryId) -> Footer | None:
    """The footer that starts `raw`, if it is that of this segment in this generation."""
    head = bytes(raw[: _FOOTER.size])
    if len(head) < _FOOTER.size or head[:4] != _FOOTER_MAGIC or head[-8:] != _digest(head[:-8], directory):
        return None
    _, version, _, segment, page, generation, entries, _, xxh3, raw_id, _ = _FOOTER.unpack(head)
    footer = Footer(page, entries, xxh3)
    ours = version <= FORMAT_VERSION and raw_id == directory.raw
    same = (segment, generation) == (header.segment, header.generation)
    inside = page >= 1 and page + pages_of(footer.bytes) < header.pages
    return footer if ours and same and inside else None


def unpack_toc(raw: Buffer, footer: Footer, header: SegmentHeader, directory: DirectoryId) -> list[Record] | None:
    """The records of a table of contents. None if it is damaged; entries that can't be right are left out."""
    entries = bytes(raw[: footer.bytes])
    if len(entries) != footer.bytes or xxhash.xxh3_64_intdigest(entries, directory.seed) != footer.xxh3:
        return None
    table = np.frombuffer(entries, _ENTRY)
    return [record for at in range(0, len(table), _CHUNK) for record in _sane(table[at : at + _CHUNK], header)]


def _sane(table: npt.NDArray[np.void], header: SegmentHeader) -> Iterator[Record]:
    for namespace, block, group, data_offset, page, length, _, xxh3, _ in table.tolist():
        place = Place(header.segment, header.generation, page, length, data_offset)
        if fits(place, header.pages):
            yield Record(ObjectKey(bytes(namespace), bytes(block), group), place, xxh3)


def _digest(body: bytes, directory: DirectoryId) -> bytes:
    return xxhash.xxh3_64_intdigest(body, directory.seed).to_bytes(8, "little")
