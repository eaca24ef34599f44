"""One directory in use: its parts wired together, from opening to closing.

Covers what happens on a start (trust the index, check it, or rebuild it) and the calls that the tier makes. Always true: a
directory that was left in order, or by a process that was killed since this machine started, opens without reading what it
holds; after a power cut or with doubts its index is checked in a child process first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lmdb

from forebay.kvstore.tier import ObjectKey, WritableBuffer
from forebay.tiers.ssd import recovery, tombstones
from forebay.tiers.ssd.catalog import BadCatalog, Catalog, Reader, SegmentState, check_size, map_bytes_for
from forebay.tiers.ssd.committer import Committer
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import Home, State, boot_id, claim, read_state, write_state
from forebay.tiers.ssd.layout import PAGE, Place, Record, data_checksum, pages_of
from forebay.tiers.ssd.reclaim import Reclaimer
from forebay.tiers.ssd.recordio import RecordIo
from forebay.tiers.ssd.scrub import Scrubber
from forebay.tiers.ssd.segments import Segment, SegmentTable
from forebay.tiers.ssd.tombstones import Tombstones, TombstonesLost

log = logging.getLogger(__name__)

# A process that dies again and again right after its start may die of its index: then that is checked, too.
UNCLEAN_STARTS_LIMIT: Final = 8
_LINEAR: Final = 32
_CLOSE_S: Final = 20.0
SUSPECT: Final = 1000  # unclean starts: the index is known to be in doubt
CONDEMNED: Final = 2 * SUSPECT  # the index was seen to be damaged, where a check may not look: it is made anew
_DAMAGE: Final = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.PanicError)


class DirectoryDown(Exception):
    """The directory is closed or has failed."""


class TooLarge(Exception):
    """The object fits into no segment."""


@dataclass(frozen=True)
class DirectoryOptions:
    """capacity_bytes: of this directory. segment_bytes: if it is new. reserve_bytes: of free disk, left to others."""

    capacity_bytes: int
    segment_bytes: int
    reserve_bytes: int = 0
    scrub_bytes_per_s: float = 0.0


class Directory:
    """An open directory. For any thread."""

    def __init__(
        self,
        home: Home,
        files: Files,
        catalog: Catalog,
        stones: Tombstones,
        options: DirectoryOptions,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.home, self._files, self._catalog, self._stones = home, files, catalog, stones
        self._told_failed = failed
        free, _ = files.free_bytes(home.path)
        held = len(home.segment_numbers(files)) * home.segment_bytes
        usable = min(options.capacity_bytes, held + max(free - options.reserve_bytes, 0))
        self.table = SegmentTable(home, files, catalog, usable // home.segment_bytes, options.reserve_bytes)
        self._io = RecordIo(files, home.id, home.segment_pages)
        self.committer = Committer(home, files, catalog, stones, self.table, self._fail)
        self.reclaimer = Reclaimer(home, files, catalog, self.table, self._io, self.committer, self._fail)
        self.scrubber = Scrubber(home, files, self.table, self.committer, options.scrub_bytes_per_s, self._fail)
        self._lookups = threading.Lock()
        self._idle = threading.Condition()
        self._users = 0
        self._closing = False
        self._closed = False
        self.record_bytes = 0
        self.data_bytes = 0
        self.opened_s = time.monotonic()

    # --- opening and closing --------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        path: Path,
        files: Files,
        options: DirectoryOptions,
        failed: Callable[[BaseException], None],
        *,
        host: str | None = None,
        telling: Callable[[str], None] = lambda doing: None,
        child: Callable[[str, Path], dict[str, object]] = recovery.in_child,
    ) -> Directory:
        """Open a directory, new or old; may take long where its index must be checked or rebuilt (`telling` says so).

        Raises: DirectoryRefused, ChildFailed, OSError.
        """
        home = claim(path, files, options.segment_bytes, host=host)
        try:
            state = read_state(path, files)
            catalog, stones = _open_index(home, files, options, state, telling, child)
            starts = 0 if state is None or state.clean else state.unclean_starts + 1
            write_state(path, files, State(boot_id(), clean=False, unclean_starts=min(starts, SUSPECT)))
            directory = cls(home, files, catalog, stones, options, failed)
        except BaseException:
            files.close(home.lock_fd)
            raise
        directory._start()
        return directory

    def _start(self) -> None:
        if self.table.missing:
            log.warning("segment files are missing or cut off", extra={"segments": len(self.table.missing)})
            with self._catalog.write() as batch:
                for number in self.table.missing:
                    batch.drop_segment(number)
        for segment in list(self.table.segments.values()):
            if segment.state is SegmentState.OPEN:  # the process was killed
                # Before any delete: what lies there and is not in the index must not come back by a rebuild.
                self.committer.first(lambda segment=segment: self._seal_left_open(segment))  # type: ignore[misc]
        self.committer.start()
        self.reclaimer.start()
        self.scrubber.start()

    def _seal_left_open(self, segment: Segment) -> None:
        fd = self.table.fd_of(segment)
        header = recovery.read_header(self._files, fd, self.home.id)
        indexed: list[Record] = []
        lost: list[Place] = []
        if header is not None and (header.segment, header.generation) == (segment.number, segment.generation):
            for record in recovery.walk(self._files, fd, header, self.home.id):
                if self._catalog.find(record.key) == record.place:
                    indexed.append(record)
                else:
                    lost.append(record.place)
        self._stones.append(lost)
        with self.table.lock:
            segment.tail_page = max((each.place.page + each.place.pages for each in indexed), default=1)
            segment.full = True
        self.committer.seal(segment, indexed)

    def close(self, timeout_s: float = _CLOSE_S, *, clean: bool = True) -> bool:
        """Finish and let go. Returns False where threads hang in the disk: then the lock stays with them."""
        with self._lookups:
            if self._closed:
                return True
        deadline_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(deadline_s - time.monotonic(), 0.0)

        with self._idle:
            self._closing = True
        self.table.close_open()
        with self._idle:  # a descriptor that is closed under a call may by then be another file's
            unused = self._idle.wait_for(lambda: not self._users, left_s())
        ended = unused & self.scrubber.close(left_s()) & self.reclaimer.close(left_s()) & self.committer.close(left_s())
        if not ended:
            log.error("the disk does not answer: its threads are left behind", extra={"path": str(self.home.path)})
            return False
        with self._lookups:
            self._closed = True
            self._catalog.close()
        try:
            self._stones.close()
            self.table.close()
            if clean:
                write_state(self.home.path, self._files, State(boot_id(), clean=True, unclean_starts=0))
        except OSError as exc:
            log.warning("closing met an error", extra={"path": str(self.home.path), "errno": exc.errno})
        finally:
            self._files.close(self.home.lock_fd)
        return True

    def _fail(self, exc: BaseException) -> None:
        trouble = exc if isinstance(exc, lmdb.Error) else exc.__cause__
        if isinstance(trouble, lmdb.Error):
            self._suspect(CONDEMNED if isinstance(trouble, _DAMAGE) else SUSPECT)
        self._told_failed(exc)

    def _suspect(self, unclean_starts: int) -> None:
        """Have the index checked, or made anew, before it is used again."""
        try:
            write_state(self.home.path, self._files, State("", clean=False, unclean_starts=unclean_starts))
        except OSError:
            log.warning("the doubt about the index could not be noted", extra={"path": str(self.home.path)})

    def note_stable(self) -> None:
        """It has served for a while: the next start need not fear its index. Raises: OSError."""
        write_state(self.home.path, self._files, State(boot_id(), clean=False, unclean_starts=0))

    # --- looking --------------------------------------------------------------------------------------------------

    def find(self, key: ObjectKey) -> Place | None:
        """Where the object lies, if it is here. Raises: DirectoryDown."""
        with self._lookups:
            self._check()
            place = self._looked_up(key)
        return place if place is not None and self._counts(key, place) else None

    def _looked_up(self, key: ObjectKey) -> Place | None:
        try:
            return self._catalog.find(key)
        except lmdb.Error as exc:
            self._fail(exc)
            raise DirectoryDown(str(exc)) from exc

    def _counts(self, key: ObjectKey, place: Place) -> bool:
        return self.table.current(place) and not self.committer.hides(key)

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        """How many leading blocks are here; exact up to 32, above it bisects. Raises: DirectoryDown."""
        with self._lookups:
            self._check()
            try:
                with self._catalog.reading() as reader:
                    return leading(len(blocks), lambda index: self._has(reader, namespace, group, blocks[index]))
            except lmdb.Error as exc:
                self._fail(exc)
                raise DirectoryDown(str(exc)) from exc

    def _has(self, reader: Reader, namespace: bytes, group: int, block: bytes) -> bool:
        place = reader.find(namespace, block, group)
        return place is not None and self._counts(ObjectKey(namespace, block, group), place)

    def keys(self) -> Iterable[ObjectKey]:
        """All objects, in no order. Raises: DirectoryDown."""
        with self._using():  # not the lock of look-ups: this takes seconds where there are millions
            return [key for key, place in self._catalog.places() if self._counts(key, place)]

    def _check(self) -> None:
        if self._closed:
            raise DirectoryDown(f"{self.home.path} is closed")

    # --- moving bytes, on a worker's thread -----------------------------------------------------------------------

    def write(self, key: ObjectKey, data: memoryview, deadline_s: float) -> Future[bool]:
        """Write an object and ask for its commit; what is returned is that commit.

        Raises: TooLarge, NoRoom, DirectoryDown, OSError.
        """
        with self._using():
            with self.committer.expecting():
                record = self._write(key, data, deadline_s)
            return self.committer.put(record)

    def _write(self, key: ObjectKey, data: memoryview, deadline_s: float) -> Record:
        offset = self._io.data_offset(data)
        pages = pages_of(offset + data.nbytes)
        if not self.table.fits(pages):
            raise TooLarge(f"{data.nbytes} bytes, and a segment has {self.home.segment_bytes}")
        place = self.table.reserve(data.nbytes, offset, deadline_s=deadline_s)
        record = Record(key, place, 0)
        try:
            record = Record(key, place, data_checksum(data))
            self._io.write(self.table.fd_of(self.table.segments[place.segment]), record, data)
        except BaseException:
            self.committer.give_up(record)
            raise
        self.record_bytes += pages * PAGE
        self.data_bytes += data.nbytes
        return record

    def read(self, key: ObjectKey, place: Place, out: WritableBuffer) -> bool | None:
        """Read the object at a place. None: it was evicted since it was looked up. False: something else lies there.

        Raises: DirectoryDown, OSError.
        """
        with self._using(), self.table.reading(place) as fd:
            if fd is None:
                return None
            return self._io.read(fd, key, place, out) is not None

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._idle:
            if self._closing:
                raise DirectoryDown(f"{self.home.path} is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._idle:
                self._users -= 1
                if not self._users:
                    self._idle.notify_all()

    def stats(self) -> dict[str, Any]:
        table = self.table
        with self._lookups:
            entries = 0 if self._closed else self._catalog.entries
        with table.lock:
            by_state = {
                f"segments_{state.name.lower()}": sum(each.state is state for each in table.segments.values())
                for state in SegmentState
            }
        written = (
            self.record_bytes + self.reclaimer.kept_bytes + self.committer.written_bytes + self._stones.written_bytes
        )
        return {
            "objects": entries,
            "capacity_bytes": table.limit * self.home.segment_bytes,
            "segment_bytes": self.home.segment_bytes,
            **by_state,
            "direct_io": int(table.direct),
            "counters": {
                "object_bytes_written": self.data_bytes,
                "device_bytes_written": written,
                "commits": self.committer.commits,
                "segments_emptied": self.reclaimer.emptied,
                "evicted": self.reclaimer.evicted,
                "kept": self.reclaimer.kept,
                "scrubbed_bytes": self.scrubber.scrubbed_bytes,
                "scrub_passes": self.scrubber.passes,
                "scrub_damaged": self.scrubber.damaged,
            },
        }


def leading(count: int, has: Callable[[int], bool]) -> int:
    """Length of the leading run of `count` things: asked one by one while few, by bisection beyond."""
    for index in range(min(count, _LINEAR)):
        if not has(index):
            return index
    low, high = min(count, _LINEAR), count
    while low < high:
        middle = (low + high) // 2
        if has(middle):
            low = middle + 1
        else:
            high = middle
    return low


def _open_index(
    home: Home,
    files: Files,
    options: DirectoryOptions,
    state: State | None,
    telling: Callable[[str], None],
    child: Callable[[str, Path], dict[str, object]],
) -> tuple[Catalog, Tombstones]:
    """The index and the log of deletions, checked and rebuilt as far as there is doubt."""
    map_bytes = map_bytes_for(options.capacity_bytes)
    new = home.index.name not in files.names(home.path)
    if new and not home.segment_numbers(files):
        try:
            return (
                Catalog.open(home.index, home.id, files, map_bytes, create=True),
                Tombstones(home.tombstones, home.id, files),
            )
        except TombstonesLost:
            tombstones.create(home.tombstones, home.id, files)
    same_life = state is not None and (state.clean or state.boot == boot_id())
    trusted = same_life and state is not None and state.unclean_starts < UNCLEAN_STARTS_LIMIT and not new
    try:
        if state is not None and state.unclean_starts >= CONDEMNED:
            raise BadCatalog("a transaction met damage in it")
        if not new:
            check_size(home.index, files)
        if not trusted and not new:
            telling("checking the index")
            child("check", home.path)
        catalog = Catalog.open(home.index, home.id, files, map_bytes, create=new and not home.segment_numbers(files))
    except (BadCatalog, recovery.ChildFailed) as exc:
        return _rebuilt(home, files, map_bytes, str(exc), telling, child)
    try:
        return catalog, Tombstones(home.tombstones, home.id, files)
    except TombstonesLost as exc:
        catalog.close()
        return _rebuilt(home, files, map_bytes, str(exc), telling, child)


def _rebuilt(
    home: Home,
    files: Files,
    map_bytes: int,
    why: str,
    telling: Callable[[str], None],
    child: Callable[[str, Path], dict[str, object]],
) -> tuple[Catalog, Tombstones]:
    log.warning("the index is rebuilt from the segments", extra={"path": str(home.path), "reason": why})
    telling("rebuilding the index")
    found = child("rebuild", home.path)
    log.info("the index is rebuilt", extra={name: value for name, value in found.items() if name != "dropped_all"})
    catalog = Catalog.open(home.index, home.id, files, map_bytes, create=False)
    return catalog, Tombstones(home.tombstones, home.id, files)
