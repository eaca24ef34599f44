"""Group commits: the one thread that changes which objects a directory holds.

It takes all that waits at once: data durable first, then the log of deletions, then one index transaction, then the
answers. Always true: changes of one key happen in the order they were asked for; a record that is on disk and not in the
index is in the log of deletions, so that rebuilding the index from the segments brings back nothing that was deleted.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd.catalog import Batch, Catalog, SegmentRow, SegmentState
from forebay.tiers.ssd.files import Files, is_full
from forebay.tiers.ssd.home import Home
from forebay.tiers.ssd.layout import PAGE, Place, Record, SegmentHeader, pack_toc
from forebay.tiers.ssd.recordio import aligned_buffer
from forebay.tiers.ssd.segments import Segment, SegmentTable
from forebay.tiers.ssd.tombstones import Tombstone, Tombstones

log = logging.getLogger(__name__)

_BATCH_LIMIT: Final = 512
# While further records are being written a commit of puts waits for them, up to so many bytes or seconds: each commit costs
# two or three flushes of the disk, whatever it holds.
_ENOUGH_BYTES: Final = 32 << 20
_LINGER_S: Final = 0.025


@dataclass(eq=False)
class _Change:
    """One thing to commit, and who waits for it (the answer: whether it changed what the directory holds)."""

    key: ObjectKey
    record: Record | None = None  # put: becomes the key's object, unless it has one
    only_from: Place | None = None  # put or delete only if this is where the key's object lies
    delete: bool = False
    drop: bool = False  # the record's place is given up
    done: Future[bool] = field(default_factory=Future)
    result: bool = False

    @property
    def weight(self) -> int:
        """Bytes towards a commit that waits for no more. A put's own; anything else is enough by itself."""
        return _ENOUGH_BYTES if self.record is None or self.drop else self.record.place.length


class Committer:
    """Commits for one directory. `failed` is told of an error after which the directory must be opened anew."""

    def __init__(
        self,
        home: Home,
        files: Files,
        catalog: Catalog,
        tombstones: Tombstones,
        table: SegmentTable,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._home, self._files, self._catalog = home, files, catalog
        self._tombstones, self._table, self._failed = tombstones, table, failed
        self._queue: queue.SimpleQueue[_Change | Segment | Callable[[], None] | None] = queue.SimpleQueue()
        self._unsealed: list[Segment] = []
        self._unlogged: list[Place] = []  # given up, and not yet in the log for want of room on disk
        self.moved: dict[ObjectKey, Place] = {}  # copied out of a segment that is not yet emptied: the old places
        self._hidden: Counter[ObjectKey] = Counter()
        self._hidden_lock = threading.Lock()
        self._broken: BaseException | None = None
        self._ended = False
        self._coming = 0  # records that are being written
        self.commits = 0
        self.written_bytes = 0
        table.sealable = self._queue.put
        self._thread = threading.Thread(target=self._run, name="ssd-commit", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hides(self, key: ObjectKey) -> bool:
        """Whether a delete of it is under way: from its asking on, the object is not there."""
        return key in self._hidden

    def first(self, job: Callable[[], None]) -> None:
        """Run something on the commit thread, in its turn."""
        self._queue.put(job)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """A record is being written inside, which is given up there or put afterwards."""
        with self._hidden_lock:
            self._coming += 1
        try:
            yield
        finally:
            with self._hidden_lock:
                self._coming -= 1

    def put(self, record: Record) -> Future[bool]:
        """The record is written: make it the key's object. Answers False if the key has one."""
        return self._ask(_Change(record.key, record))

    def move(self, record: Record, old: Place) -> Future[bool]:
        """As `put`, for the copy of an object that must still lie at `old`."""
        return self._ask(_Change(record.key, record, only_from=old))

    def give_up(self, record: Record) -> Future[bool]:
        """The record may or may not be written, and nobody wants it any more."""
        return self._ask(_Change(record.key, record, drop=True))

    def delete(self, key: ObjectKey, only_from: Place | None = None) -> Future[bool]:
        """Forget the key's object, durably (`only_from`: if it lies there). Answers whether there was one."""
        with self._hidden_lock:
            self._hidden[key] += 1
        return self._ask(_Change(key, only_from=only_from, delete=True))

    def close(self, timeout_s: float) -> bool:
        """Commit what waits, then end. Returns whether it ended in time."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _ask(self, change: _Change) -> Future[bool]:
        change.done.set_running_or_notify_cancel()  # nobody can cancel it now: the thread answers also who gave up
        with self._hidden_lock:
            if not self._ended:
                self._queue.put(change)
                return change.done
        self._answer(change, OSError(errno.EBADF, "the directory was closed"))
        return change.done

    # --- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended = False
        while not ended:
            changes: list[_Change] = []
            others: list[Segment | Callable[[], None]] = []
            work = self._queue.get()
            lingers_until_s, weight = time.monotonic() + _LINGER_S, 0
            while True:
                if work is None:
                    ended = True
                elif isinstance(work, _Change):
                    changes.append(work)
                    weight += work.weight
                else:
                    others.append(work)
                    break  # what was asked for before it comes first
                if len(changes) >= _BATCH_LIMIT or ended:
                    break
                try:
                    work = self._next(lingers_until_s if weight < _ENOUGH_BYTES else 0.0)
                except queue.Empty:
                    break
            if changes:
                self._commit(changes)
            for other in others:
                self._do(other)
        with self._hidden_lock:
            self._ended = True
        while not self._queue.empty():  # asked for too late
            work = self._queue.get_nowait()
            if isinstance(work, _Change):
                self._answer(work, OSError(errno.EBADF, "the directory was closed"))

    def _next(self, lingers_until_s: float) -> _Change | Segment | Callable[[], None] | None:
        """What waits, or comes until then while records are being written. Raises: queue.Empty."""
        left_s = lingers_until_s - time.monotonic() if self._coming else 0.0
        return self._queue.get(timeout=left_s) if left_s > 0 else self._queue.get_nowait()

    def _do(self, work: Segment | Callable[[], None]) -> None:
        if self._broken is not None:
            return
        try:
            if isinstance(work, Segment):
                self.seal(work, work.records)
            else:
                work()
        except OSError as exc:
            if isinstance(work, Segment) and is_full(exc):
                self._unsealed.append(work)  # after the next commit there may be room
            else:
                self._break(exc)
        except Exception as exc:
            log.exception("a job of the commit thread failed")
            self._break(exc)

    def _break(self, exc: BaseException) -> None:
        self._broken = exc
        self._failed(exc)

    def _commit(self, changes: Sequence[_Change]) -> None:
        error: BaseException | None = self._broken
        if error is None:
            try:
                self._try_commit(changes)
            except OSError as exc:
                error = exc
                if not is_full(exc):
                    self._break(exc)
            except BaseException as exc:
                log.exception("a commit failed in a way that no error of the disk explains")
                error = exc
                self._break(exc)
        for change in changes:
            self._answer(change, error)

    def _answer(self, change: _Change, error: BaseException | None) -> None:
        if change.delete:
            with self._hidden_lock:
                self._hidden[change.key] -= 1
                if not self._hidden[change.key]:
                    del self._hidden[change.key]
        if change.record is not None:
            self._table.settle(change.record, committed=error is None and change.result and not change.drop)
            if error is not None:
                self._unlogged.append(change.record.place)
        if error is None:
            change.done.set_result(change.result)
        else:
            change.done.set_exception(error)

    def _try_commit(self, changes: Sequence[_Change]) -> None:
        for number in {each.record.place.segment for each in changes if each.record is not None and not each.drop}:
            self._files.fdatasync(self._table.fd_of(self._table.segments[number]))
        buried = list(self._unlogged)
        unmoved: list[ObjectKey] = []
        moved: dict[ObjectKey, Place] = {}
        with self._catalog.write() as batch:
            for change in changes:
                self._apply(change, batch, buried, moved, unmoved)
            self._tombstones.append(buried)  # before the index forgets them, and durable before anybody is answered
        self._unlogged.clear()
        for segment in self._unsealed:
            self._queue.put(segment)
        self._unsealed.clear()
        self.moved.update(moved)
        for place in (*buried, *moved.values()):
            self._table.mark_dead(place)
        for key in unmoved:
            self.moved.pop(key, None)
        self.commits += 1
        self._tombstones.compact(self._may_hold)

    def _apply(
        self,
        change: _Change,
        batch: Batch,
        buried: list[Place],
        moved: dict[ObjectKey, Place],
        unmoved: list[ObjectKey],
    ) -> None:
        key, record = change.key, change.record
        if change.drop and record is not None:
            buried.append(record.place)
            return
        held = batch.find(key)
        if held is not None and not self._table.current_or_dying(held):
            held = None
        if record is not None:
            change.result = held == change.only_from  # an ordinary put: the key has no object
            if not change.result:
                buried.append(record.place)
                return
            batch.put(key, record.place)
            if held is not None:
                moved[key] = held
        elif held is not None and change.only_from in (None, held):
            change.result = True
            batch.remove(key)
            buried.append(held)
            for old in (moved.get(key), self.moved.get(key)):
                if old is not None:
                    buried.append(old)
            unmoved.append(key)

    def _may_hold(self, stone: Tombstone) -> bool:
        segment = self._table.segments.get(stone.segment)
        return segment is not None and segment.stamped_generation == stone.generation

    def seal(self, segment: Segment, records: Sequence[Record]) -> None:
        """Write the table of contents behind the records, then say so in the index. Raises: OSError."""
        header = SegmentHeader(segment.number, self._table.pages, segment.generation, empty=False)
        ordered = sorted(
            (each for each in records if each.place.page not in segment.dead), key=lambda each: each.place.page
        )
        page = max(segment.tail_page, 1)
        table, footer = pack_toc(ordered, header, page, self._home.id)
        fd = self._table.fd_of(segment)
        if table:
            buffer = aligned_buffer(len(table))
            buffer[:] = table
            self._files.write_all(fd, [buffer], page * PAGE)
        last = aligned_buffer(PAGE)
        last[:] = footer
        self._files.write_all(fd, [last], (self._table.pages - 1) * PAGE)
        self._files.fdatasync(fd)
        self.written_bytes += len(table) + PAGE
        size = sum(each.place.length for each in ordered)
        with self._catalog.write() as batch:
            row = SegmentRow(segment.generation, SegmentState.SEALED, len(ordered), size)
            batch.set_segment(segment.number, row)
        with self._table.lock:
            segment.state = SegmentState.SEALED
            segment.record_count, segment.data_bytes, segment.records = len(ordered), size, []
            self._table.lock.notify_all()
