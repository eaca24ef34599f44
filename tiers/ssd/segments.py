"""The segments of one directory in memory: states, room for the next record, who reads what.

Covers allocation and counting; reads and writes no records. Always true, under one lock: records go to one open segment
at a time, each to pages of its own; a segment is sealed only when nothing is being written to it any more, and emptied
only when nobody reads it any more.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from forebay.tiers.ssd.catalog import Catalog, SegmentRow, SegmentState
from forebay.tiers.ssd.files import Files, is_full
from forebay.tiers.ssd.home import Home
from forebay.tiers.ssd.layout import PAGE, Place, Record, SegmentHeader, pack_segment, pages_of, toc_pages
from forebay.tiers.ssd.recordio import aligned_buffer

log = logging.getLogger(__name__)

_GROW_AGAIN_S: Final = 30.0
_SMALL: Final = 6  # segments: with fewer, none is set aside


class NoRoom(Exception):
    """No segment has room, and none could be emptied in time."""


class Segment:
    """One segment file. Fields change under the table's lock only."""

    def __init__(self, number: int, row: SegmentRow) -> None:
        self.number = number
        self.generation = row.generation
        self.state = row.state
        self.data_bytes = row.data_bytes
        self.record_count = row.records
        self.fd = -1
        self.direct = True
        self.tail_page = 1
        self.allocated = 0  # records that were given pages
        self.pending = 0  # of them, not yet committed or given up
        self.records: list[Record] = []  # committed, while it is open
        self.full = False
        self.dying = False
        self.readers = 0
        self.hits: dict[int, int] = {}  # page of a record: when it was last read, by a counter
        self.dead: set[int] = set()  # pages of records that were deleted or moved
        self.stamped_generation = row.generation  # what its header on disk says, once that is known to be written

    @property
    def row(self) -> SegmentRow:
        return SegmentRow(self.generation, self.state, self.record_count, self.data_bytes)


class SegmentTable:
    """All segments of a directory. For any thread."""

    def __init__(self, home: Home, files: Files, catalog: Catalog, limit: int, reserve_bytes: int) -> None:
        self._home, self._files, self._catalog = home, files, catalog
        self._reserve_bytes = reserve_bytes
        self.limit = limit
        self.pages = home.segment_pages
        self.lock = threading.Condition()
        self.wanted = threading.Event()  # somebody needs an empty segment, or soon will
        self.segments: dict[int, Segment] = {}
        self.sealable: Callable[[Segment], None] = lambda segment: None  # told when an open segment can be sealed
        self.direct = True
        # One for what is put, one for what is kept when a segment is emptied: emptying must not wait for itself, and what
        # was worth keeping once will be looked at again together.
        self._open: dict[bool, Segment | None] = {False: None, True: None}
        self._opening = {False: False, True: False}
        self._closed = False
        self._ticks = itertools.count(1)
        self._grow_failed_s = -1e9
        rows, there = catalog.segments(), set(home.segment_numbers(files))
        for number, row in rows.items():
            if number in there:
                self.segments[number] = Segment(number, row)
        for number in there - rows.keys():  # made, and the process ended before it was used
            self.segments[number] = Segment(number, SegmentRow(0, SegmentState.FREE))
        self._generation = max((row.generation for row in rows.values()), default=0)
        # A segment whose file is gone or cut off: forget it, and with it all entries that lead there.
        self.missing = sorted(rows.keys() - there)

    # --- room -----------------------------------------------------------------------------------------------------

    def fits(self, pages: int) -> bool:
        """Whether a record of so many pages could lie in any segment."""
        return 1 + pages + toc_pages(1) <= self.pages

    def reserve(self, length: int, data_offset: int, *, deadline_s: float, kept: bool = False) -> Place:
        """Pages for one record. The caller writes it, then sees that `settle` is called. Raises: NoRoom, OSError.

        kept: for an object out of a segment that is being emptied.
        """
        pages = pages_of(data_offset + length)
        while True:
            with self.lock:
                while self._opening[kept] and not self._closed:
                    if not self.lock.wait(max(deadline_s - time.monotonic(), 0.0)):
                        raise NoRoom("no segment was opened in time")
                if self._closed:
                    raise NoRoom("the directory is closing")
                segment = self._open[kept]
                if segment is not None:
                    if segment.tail_page + pages + toc_pages(segment.allocated + 1) <= self.pages:
                        place = Place(segment.number, segment.generation, segment.tail_page, length, data_offset)
                        segment.tail_page += pages
                        segment.allocated += 1
                        segment.pending += 1
                        return place
                    self._close_open(kept, segment)
                self._opening[kept] = True
            opened: Segment | None = None
            try:
                opened = self._open_next(deadline_s, kept)
            finally:
                with self.lock:
                    self._opening[kept] = False
                    self._open[kept] = opened
                    self.lock.notify_all()

    def settle(self, record: Record, *, committed: bool) -> None:
        """A reserved place was committed, or given up."""
        with self.lock:
            segment = self.segments[record.place.segment]
            segment.pending -= 1
            if committed:
                segment.records.append(record)
                segment.data_bytes += record.place.length
                segment.record_count += 1
            if segment.full and not segment.pending:
                self.sealable(segment)

    def close_open(self) -> None:
        """Take no more records; the open segment is sealed as soon as what is being written to it is settled."""
        with self.lock:
            self._closed = True
            for kept, segment in self._open.items():
                if segment is not None:
                    self._close_open(kept, segment)
            self.lock.notify_all()

    def _close_open(self, kept: bool, segment: Segment) -> None:
        self._open[kept] = None
        segment.full = True
        if not segment.pending:
            self.sealable(segment)

    def _open_next(self, deadline_s: float, kept: bool) -> Segment:
        segment = self._take_free(deadline_s, kept)
        generation = self.next_generation()
        try:
            with self._catalog.write() as batch:
                batch.set_segment(segment.number, SegmentRow(generation, SegmentState.OPEN))
            fd = self.fd_of(segment)
            header = SegmentHeader(segment.number, self.pages, generation, empty=False)
            page = aligned_buffer(PAGE)
            page[:] = pack_segment(header, self._home.id)
            self._files.write_all(fd, [page], 0)
            # Before any record: or after a power cut an old header could vouch for pages that are new.
            self._files.fdatasync(fd)
        except BaseException:
            with self.lock:
                segment.state = SegmentState.FREE
            raise
        with self.lock:
            segment.generation = segment.stamped_generation = generation
            segment.state = SegmentState.OPEN
            segment.tail_page, segment.allocated, segment.pending = 1, 0, 0
            segment.records, segment.record_count, segment.data_bytes = [], 0, 0
            segment.full = segment.dying = False
            segment.hits, segment.dead = {}, set()
        return segment

    def _take_free(self, deadline_s: float, kept: bool) -> Segment:
        """An empty segment, taken out of the free ones: an old one, a new file, or one that is emptied for us."""
        while True:
            with self.lock:
                leave = 0 if kept or self._count() < _SMALL else 1
                found = next((each for each in self.segments.values() if each.state is SegmentState.FREE), None)
                allowed = self.spare() > leave
                if found is not None and allowed and len(self.segments) <= self.limit:
                    found.state = SegmentState.OPEN
                if self.spare() < self.spare_wanted:
                    self.wanted.set()
                if found is not None and found.state is SegmentState.OPEN:
                    return found
                may_grow = (
                    allowed
                    and len(self.segments) < self.limit
                    and time.monotonic() - self._grow_failed_s > _GROW_AGAIN_S
                )
                number = next(n for n in itertools.count() if n not in self.segments)
            if may_grow and self._make(number):
                continue
            with self.lock:
                self.wanted.set()
                if self._closed or not self.segments:
                    raise NoRoom("there is no segment, and the disk has no room for one")
                told = self.lock.wait(max(min(deadline_s - time.monotonic(), 0.5), 0.0))
                if not told and time.monotonic() >= deadline_s:
                    raise NoRoom("no segment was emptied in time")

    def _make(self, number: int) -> bool:
        """A new segment file, with all its blocks. False: the disk has no room for it."""
        path = self._home.segment(number)
        try:
            if self._files.free_bytes(self._home.path)[0] < self._home.segment_bytes + self._reserve_bytes:
                raise OSError(28, "the reserve of free space is reached")
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT)
            try:
                self._files.fallocate(fd, self._home.segment_bytes)
            except OSError:
                self._files.unlink(path)
                raise
            finally:
                self._files.close(fd)
            self._files.fsync_folder(self._home.segments)
        except OSError as exc:
            if not is_full(exc):
                raise
            log.warning("no room on disk for another segment", extra={"segments": len(self.segments)})
            with self.lock:
                self._grow_failed_s = time.monotonic()
            return False
        with self.lock:
            self.segments[number] = Segment(number, SegmentRow(0, SegmentState.FREE))
        return True

    @property
    def spare_wanted(self) -> int:
        """Below this many spare ones, segments are emptied."""
        return 1 if self._count() < _SMALL else 3

    def spare(self) -> int:
        """Empty segments at hand, made or still to be made. Under the lock."""
        free = sum(each.state is SegmentState.FREE for each in self.segments.values())
        return free + max(self._count() - len(self.segments), 0)

    def _count(self) -> int:
        """How many segments there are, or can be made as far as the disk had room when last tried."""
        growing = time.monotonic() - self._grow_failed_s > _GROW_AGAIN_S
        return self.limit if growing else min(self.limit, len(self.segments))

    def next_generation(self) -> int:
        with self.lock:
            self._generation += 1
            return self._generation

    # --- reading --------------------------------------------------------------------------------------------------

    def current(self, place: Place) -> bool:
        """Whether what the index says of a place still holds. Without the lock: a hint that `reading` confirms."""
        segment = self.segments.get(place.segment)
        return segment is not None and segment.generation == place.generation and not segment.dying

    def current_or_dying(self, place: Place) -> bool:
        """Whether the segment still has the place's generation, also while it is being emptied."""
        segment = self.segments.get(place.segment)
        return segment is not None and segment.generation == place.generation

    @contextmanager
    def reading(self, place: Place, *, hit: bool = True) -> Iterator[int | None]:
        """The descriptor to read a place from, which keeps its segment from being emptied. None: it is gone."""
        with self.lock:
            segment = self.segments.get(place.segment)
            if segment is None or segment.generation != place.generation or segment.dying:
                segment = None
            else:
                segment.readers += 1
                if hit:
                    segment.hits[place.page] = next(self._ticks)
        if segment is None:
            yield None
            return
        try:
            yield self.fd_of(segment)
        finally:
            with self.lock:
                segment.readers -= 1
                if segment.dying and not segment.readers:
                    self.lock.notify_all()

    def hit(self, place: Place) -> None:
        """The object is wanted, though nobody read it here: it was stored again."""
        with self.lock:
            segment = self.segments.get(place.segment)
            if segment is not None and segment.generation == place.generation:
                segment.hits[place.page] = next(self._ticks)

    def mark_dead(self, place: Place) -> None:
        with self.lock:
            segment = self.segments.get(place.segment)
            if segment is not None and segment.generation == place.generation:
                segment.dead.add(place.page)

    def fd_of(self, segment: Segment) -> int:
        """Its descriptor, opened when first needed. Raises: OSError."""
        if segment.fd < 0:
            fd, direct = self._files.open_direct(self._home.segment(segment.number), os.O_RDWR)
            with self.lock:
                if segment.fd < 0:
                    segment.fd, segment.direct = fd, direct
                    self.direct = self.direct and direct
                    return fd
            self._files.close(fd)
        return segment.fd

    # --- emptying -------------------------------------------------------------------------------------------------

    def oldest_sealed(self) -> Segment | None:
        """The segment to empty next: one with nothing left in it, else the one written longest ago."""
        with self.lock:
            sealed = [each for each in self.segments.values() if each.state is SegmentState.SEALED and not each.dying]
        dead = [each for each in sealed if each.record_count and len(each.dead) >= each.record_count]
        return min(dead or sealed, key=lambda each: each.generation, default=None)

    def kill(self, segment: Segment, *, timeout_s: float) -> bool:
        """No new reads; wait for those in flight. False, and alive again, if they take too long."""
        with self.lock:
            segment.dying = True
            if self.lock.wait_for(lambda: not segment.readers, timeout_s):
                return True
            segment.dying = False
            return False

    def revive(self, segment: Segment) -> None:
        """Emptying it failed: it is read as before, and tried again later."""
        with self.lock:
            segment.dying = False

    def take_surplus(self) -> Segment | None:
        """An empty segment beyond the limit, for its file to be removed."""
        with self.lock:
            if len(self.segments) <= self.limit:
                return None
            free = [each for each in self.segments.values() if each.state is SegmentState.FREE]
            if free:
                free[-1].state = SegmentState.OPEN
                return free[-1]
            return None

    def emptied(self, segment: Segment, generation: int) -> None:
        """It holds nothing any more and may be written again."""
        with self.lock:
            segment.generation = segment.stamped_generation = generation
            segment.state, segment.dying = SegmentState.FREE, False
            segment.records, segment.record_count, segment.data_bytes = [], 0, 0
            segment.hits, segment.dead = {}, set()
            self.lock.notify_all()

    def forget(self, segment: Segment) -> None:
        """Its file was removed."""
        with self.lock:
            del self.segments[segment.number]
            if segment.fd >= 0:
                self._files.close(segment.fd)
                segment.fd = -1
            self.lock.notify_all()

    def close(self) -> None:
        """Close all descriptors. Nobody reads or writes any more."""
        with self.lock:
            for segment in self.segments.values():
                if segment.fd >= 0:
                    self._files.close(segment.fd)
                    segment.fd = -1
