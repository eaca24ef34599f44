"""Emptying the oldest segment, so that there is always one to write to; what was read lately is copied out of it first.

Oldest first with a second chance is close to least recently used, and needs no order on disk. Always true: a segment is
written again only after no read of it is in flight, its header on disk says that it is empty, and the index has forgotten
its entries, each durably and in this order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from forebay.tiers.ssd.catalog import Catalog, SegmentRow, SegmentState
from forebay.tiers.ssd.committer import Committer
from forebay.tiers.ssd.files import Files, is_full
from forebay.tiers.ssd.home import Home
from forebay.tiers.ssd.layout import PAGE, Record, SegmentHeader, data_checksum, pack_segment
from forebay.tiers.ssd.recordio import RecordIo, aligned_buffer
from forebay.tiers.ssd.recovery import read_toc, walk
from forebay.tiers.ssd.segments import NoRoom, Segment, SegmentTable

log = logging.getLogger(__name__)

_KEPT_SHARE: Final = 0.5  # of a segment: more would write the same bytes again and again
_REMOVE_AT_ONCE: Final = 256
_READERS_S: Final = 10.0
_IDLE_S: Final = 1.0


class Reclaimer:
    """One directory's thread that keeps empty segments at hand."""

    def __init__(
        self,
        home: Home,
        files: Files,
        catalog: Catalog,
        table: SegmentTable,
        io: RecordIo,
        committer: Committer,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._home, self._files, self._catalog, self._table = home, files, catalog, table
        self._io, self._committer, self._failed = io, committer, failed
        self._stop = False
        self.emptied = 0
        self.kept = 0
        self.kept_bytes = 0
        self.evicted = 0
        self._thread = threading.Thread(target=self._run, name="ssd-reclaim", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        self._stop = True
        self._table.wanted.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop:
                self._table.wanted.wait(_IDLE_S)
                self._table.wanted.clear()
                try:
                    while not self._stop and self._needed():
                        if not self.empty_one():
                            break
                except OSError as exc:
                    if not is_full(exc):
                        raise
                    time.sleep(0.01)  # the index has no room to change in; its readers go on
        except OSError as exc:
            self._failed(exc)
        except Exception as exc:
            log.exception("emptying a segment failed in a way that no error of the disk explains")
            self._failed(exc)

    def _needed(self) -> bool:
        table = self._table
        with table.lock:
            return table.spare() < table.spare_wanted or len(table.segments) > table.limit

    def empty_one(self) -> bool:
        """Returns whether a segment was emptied, or an empty one beyond the limit removed. Raises: OSError."""
        surplus = self._table.take_surplus()
        if surplus is not None:
            self._remove(surplus)
            return True
        segment = self._table.oldest_sealed()
        if segment is None:
            return False
        records = self._records(segment)
        self._keep_best(segment, records)
        if not self._table.kill(segment, timeout_s=_READERS_S):
            return False
        number, old, generation = segment.number, segment.generation, self._table.next_generation()
        try:
            self._stamp(segment, generation)
            for start in range(0, len(records), _REMOVE_AT_ONCE):
                with self._catalog.write() as batch:
                    removed = [
                        batch.remove_at(record.key, number, old) for record in records[start : start + _REMOVE_AT_ONCE]
                    ]
                self.evicted += sum(removed)
            with self._catalog.write() as batch:
                batch.set_segment(number, SegmentRow(generation, SegmentState.FREE))
        except BaseException:
            self._table.revive(segment)  # what the index still knows of it is still there
            raise
        self._committer.first(lambda: self._forget_moves(number, old))
        self._table.emptied(segment, generation)
        self.emptied += 1
        return True

    def _remove(self, segment: Segment) -> None:
        with self._catalog.write() as batch:
            batch.drop_segment(segment.number)
        self._files.unlink(self._home.segment(segment.number))
        self._table.forget(segment)

    def _records(self, segment: Segment) -> list[Record]:
        header = SegmentHeader(segment.number, self._table.pages, segment.generation, empty=False)
        fd = self._table.fd_of(segment)
        found = read_toc(self._files, fd, header, self._home.id)
        if found is None:
            log.warning("a table of contents is damaged: its segment is walked", extra={"segment": segment.number})
            found = list(walk(self._files, fd, header, self._home.id))
        return found

    def _keep_best(self, segment: Segment, records: Sequence[Record]) -> None:
        with self._table.lock:
            hits = dict(segment.hits)
        wanted = sorted((each for each in records if each.place.page in hits), key=lambda each: -hits[each.place.page])
        left = int(_KEPT_SHARE * sum(each.place.length for each in records))
        moves: list[Future[bool]] = []
        for record in wanted:
            left -= record.place.length
            if left < 0 or self._stop:
                break
            move = self._copy_out(segment, record)
            if move is None:
                break
            moves.append(move)
        for move in moves:
            try:
                self.kept += move.result(timeout=60.0)
            except OSError as exc:
                if not is_full(exc):
                    raise

    def _copy_out(self, segment: Segment, record: Record) -> Future[bool] | None:
        """Copy one object into the open segment. None: there is no room for it."""
        old = record.place
        if self._catalog.find(record.key) != old:
            done: Future[bool] = Future()
            done.set_result(False)
            return done
        data = aligned_buffer(old.length)[: old.length]
        found = self._io.read(self._table.fd_of(segment), record.key, old, data)
        if found is None or data_checksum(data) != found.xxh3:
            return self._committer.delete(record.key, only_from=old)
        try:
            place = self._table.reserve(old.length, self._io.data_offset(data), deadline_s=time.monotonic(), kept=True)
        except NoRoom:
            return None
        new = Record(record.key, place, found.xxh3)
        try:
            self._io.write(self._table.fd_of(self._table.segments[place.segment]), new, data)
        except OSError:
            self._committer.give_up(new)
            raise
        self.kept_bytes += place.pages * PAGE
        return self._committer.move(new, old)

    def _stamp(self, segment: Segment, generation: int) -> None:
        """Have the header on disk say that the segment is empty: the log of deletions need not cover it any more."""
        page = aligned_buffer(PAGE)
        page[:] = pack_segment(SegmentHeader(segment.number, self._table.pages, generation, empty=True), self._home.id)
        fd = self._table.fd_of(segment)
        self._files.write_all(fd, [page], 0)
        self._files.fdatasync(fd)

    def _forget_moves(self, number: int, generation: int) -> None:
        moved = self._committer.moved
        for key in [key for key, place in moved.items() if place[:2] == (number, generation)]:
            del moved[key]
