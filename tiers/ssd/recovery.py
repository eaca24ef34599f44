"""Finding out what a directory holds from its segments alone, and whether its index can be trusted.

`check`, `rebuild` and `look`, a check that changes nothing, run in a child process (`python -m forebay.tiers.ssd.recovery
check|rebuild|look DIR`): reading a damaged index can end the process that does it, and rebuilding a large one would hold up a
daemon's other threads. Always true: a rebuilt index leads only to records that a table of contents or their own checksum
vouches for, and to none that was deleted; without the log of deletions it leads nowhere.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from forebay.tiers.ssd import tombstones
from forebay.tiers.ssd.catalog import BadCatalog, Catalog, SegmentRow, SegmentState, map_bytes_for, remove_catalog
from forebay.tiers.ssd.files import Files, is_full
from forebay.tiers.ssd.home import INDEX_NAME, Home, host_id, read_identity
from forebay.tiers.ssd.layout import (
    PAGE,
    DirectoryId,
    Record,
    SegmentHeader,
    data_checksum,
    fits,
    pack_segment,
    pages_of,
    unpack_footer,
    unpack_record,
    unpack_segment,
    unpack_toc,
)
from forebay.tiers.ssd.recordio import aligned_buffer
from forebay.tiers.ssd.tombstones import Tombstone, Tombstones, TombstonesLost

log = logging.getLogger(__name__)

_STEP_PAGES: Final = 256
_COMMIT_EVERY: Final = 20_000
_FRESH_INDEX: Final = INDEX_NAME + ".new"


# --- one segment ----------------------------------------------------------------------------------------------------


def read_header(files: Files, fd: int, directory: DirectoryId) -> SegmentHeader | None:
    """A segment's header, None if there is none of this directory. Raises: OSError."""
    page = aligned_buffer(PAGE)
    got = files.read_up_to(fd, [page], 0)
    return unpack_segment(page[:got], directory)


def read_toc(files: Files, fd: int, header: SegmentHeader, directory: DirectoryId) -> list[Record] | None:
    """The table of contents of a sealed segment. None: it has none, or a damaged one. Raises: OSError."""
    page = aligned_buffer(PAGE)
    got = files.read_up_to(fd, [page], (header.pages - 1) * PAGE)
    footer = unpack_footer(page[:got], header, directory)
    if footer is None:
        return None
    table = aligned_buffer(footer.bytes)
    got = files.read_up_to(fd, [table[: pages_of(footer.bytes) * PAGE]], footer.page * PAGE) if footer.entries else 0
    return unpack_toc(table[:got], footer, header, directory)


def walk(files: Files, fd: int, header: SegmentHeader, directory: DirectoryId) -> Iterator[Record]:
    """The records of a segment by their own headers. A page that starts none is skipped: a torn write is a hole, not the
    end. Raises: OSError."""
    buffer = aligned_buffer(_STEP_PAGES * PAGE)
    page, base, got = 1, 0, 0
    while page < header.pages:
        if not base <= page < base + got:
            base = page
            got = files.read_up_to(fd, [buffer[: min(_STEP_PAGES, header.pages - page) * PAGE]], page * PAGE) // PAGE
            if not got:
                return
        at = (page - base) * PAGE
        record = unpack_record(buffer[at : at + PAGE], directory, header.pages)
        place = None if record is None else record.place
        if record is not None and place is not None and place[:3] == (header.segment, header.generation, page):
            yield record
            page += place.pages
        else:
            page += 1


def sound(files: Files, fd: int, record: Record) -> bool:
    """Whether a record's object has its checksum. Raises: OSError."""
    place = record.place
    buffer = aligned_buffer(place.pages * PAGE)
    if files.read_up_to(fd, [buffer], place.page * PAGE) != place.pages * PAGE:
        return False
    return data_checksum(buffer[place.data_offset : place.data_offset + place.length]) == record.xxh3


# --- the index ------------------------------------------------------------------------------------------------------


@dataclass
class Checked:
    """What a walk of the index found. stale: entries of segments emptied since, harmless."""

    entries: int = 0
    stale: int = 0
    trouble: str = ""


def check(home: Home, files: Files) -> Checked:
    """Copy the index, and put the copy in its place if it agrees with itself and with the heads of the segments.

    A copy, since a walk sees no damage in the list of free pages, which the first writer would meet; a copy has none. Where
    there is no room for one, the index itself is walked. Raises: BadCatalog, OSError.
    """
    fresh = home.path / _FRESH_INDEX
    if not _copied(home, files, fresh):
        return look_through(home, files, home.index)
    found = look_through(home, files, fresh)
    if found.trouble:
        remove_catalog(fresh)
    else:
        _replace_index(home, files, fresh)
    return found


def _copied(home: Home, files: Files, fresh: Path) -> bool:
    """Copy the index. Returns whether there was room."""
    remove_catalog(fresh)
    catalog = Catalog.open(home.index, home.id, files, map_bytes_for(0), create=False)
    try:
        catalog.copy(fresh)
    except OSError as exc:
        remove_catalog(fresh)
        if not is_full(exc):
            raise
        return False
    finally:
        catalog.close()
    return True


def look_through(home: Home, files: Files, index: Path) -> Checked:
    """Walk the whole of an index and compare it with the heads of the segments. Raises: BadCatalog, OSError."""
    found = Checked()
    catalog = Catalog.open(index, home.id, files, map_bytes_for(0), create=False)
    try:
        rows = catalog.segments()
        for number in home.segment_numbers(files):
            row = rows.get(number)
            if row is None or row.state is SegmentState.FREE:
                continue
            fd = files.open(home.segment(number), os.O_RDONLY)
            try:
                header = read_header(files, fd, home.id)
            finally:
                files.close(fd)
            stamped = header is not None and header.empty and header.generation > row.generation
            if header is None or header.segment != number or (header.generation != row.generation and not stamped):
                found.trouble = f"segment {number} is not the one that the index knows"
        limit = catalog.entries
        for _, place in catalog.places():
            found.entries += 1
            if found.entries > limit:  # pages that lead to each other in a circle
                found.trouble = "the index has more entries than it counts"
                break
            row = rows.get(place.segment)
            if row is None or row.generation != place.generation:
                found.stale += 1
            elif not fits(place, home.segment_pages):
                found.trouble = "an entry leads out of its segment"
        return found
    finally:
        catalog.close()


@dataclass
class Rebuilt:
    """What a rebuild found. lost_segments: with records that nothing vouches for any more."""

    entries: int = 0
    deleted: int = 0
    segments: int = 0
    walked: int = 0
    lost_segments: int = 0
    dropped_all: bool = False


def rebuild(home: Home, files: Files, progress: Callable[[int, int], None] = lambda done, total: None) -> Rebuilt:
    """Make a new index from the segments and put it in the old one's place. Raises: OSError."""
    found = Rebuilt()
    new = home.path / _FRESH_INDEX
    remove_catalog(new)
    numbers = home.segment_numbers(files)
    headers = {number: _header_of(home, files, number) for number in numbers}
    try:
        stones = Tombstones(home.tombstones, home.id, files)
    except TombstonesLost as exc:
        log.error("the log of deletions is lost: nothing of this directory is served", extra={"reason": str(exc)})
        found.dropped_all = True
        _empty_all(home, files, headers)
        tombstones.create(home.tombstones, home.id, files)
        stones = Tombstones(home.tombstones, home.id, files)
        headers = {number: _header_of(home, files, number) for number in numbers}
    catalog = Catalog.open(new, home.id, files, map_bytes_for(len(numbers) * home.segment_bytes), create=True)
    try:
        used = [(header.generation, number) for number, header in headers.items() if header and not header.empty]
        with catalog.write() as batch:
            for number, header in headers.items():
                if header is None or header.empty:
                    found.lost_segments += header is None
                    batch.set_segment(number, SegmentRow(header.generation if header else 0, SegmentState.FREE))
        for done, (_, number) in enumerate(sorted(used)):
            progress(done, len(used))
            header = headers[number]
            assert header is not None
            _add_segment(home, files, catalog, header, stones, found)
    finally:
        catalog.close()
        stones.close()
    _replace_index(home, files, new)
    return found


def _replace_index(home: Home, files: Files, new: Path) -> None:
    old = home.path / (INDEX_NAME + ".old")
    remove_catalog(old)
    if INDEX_NAME in files.names(home.path):
        files.rename(home.index, old)
    files.rename(new, home.index)
    files.fsync_folder(home.path)
    remove_catalog(old)


def _header_of(home: Home, files: Files, number: int) -> SegmentHeader | None:
    fd = files.open(home.segment(number), os.O_RDONLY)
    try:
        header = read_header(files, fd, home.id)
    finally:
        files.close(fd)
    right = header is not None and (header.segment, header.pages) == (number, home.segment_pages)
    return header if right else None


def _empty_all(home: Home, files: Files, headers: dict[int, SegmentHeader | None]) -> None:
    generation = max((header.generation for header in headers.values() if header), default=0)
    for number in headers:
        generation += 1
        fd = files.open(home.segment(number), os.O_RDWR)
        try:
            files.write_all(
                fd, [pack_segment(SegmentHeader(number, home.segment_pages, generation, empty=True), home.id)], 0
            )
            files.fdatasync(fd)
        finally:
            files.close(fd)


def _add_segment(
    home: Home, files: Files, catalog: Catalog, header: SegmentHeader, stones: Tombstones, found: Rebuilt
) -> None:
    fd = files.open(home.segment(header.segment), os.O_RDONLY)
    try:
        records = read_toc(files, fd, header, home.id)
        state = SegmentState.SEALED
        if records is None:  # it was open, or its table is damaged: then only whole records count
            state = SegmentState.OPEN
            records = [each for each in walk(files, fd, header, home.id) if sound(files, fd, each)]
            found.walked += 1
    finally:
        files.close(fd)
    deleted = stones.entries
    alive = [each for each in records if Tombstone(*each.place[:3]) not in deleted]
    found.deleted += len(records) - len(alive)
    for start in range(0, max(len(alive), 1), _COMMIT_EVERY):
        losers = []
        with catalog.write() as batch:
            for record in alive[start : start + _COMMIT_EVERY]:
                older = batch.find(record.key)
                if older is not None:  # moved, and the process ended before its old segment was emptied
                    losers.append(older)
                batch.put(record.key, record.place)
            stones.append(losers)
            size = sum(each.place.length for each in alive)
            batch.set_segment(header.segment, SegmentRow(header.generation, state, len(alive), size))
        found.entries += len(alive[start : start + _COMMIT_EVERY]) - len(losers)
    found.segments += 1


# --- in a child process ---------------------------------------------------------------------------------------------


class ChildFailed(Exception):
    """The child process died, or said that it can't."""


def check_timeout_s(path: Path) -> float:
    """How long a check of this directory's index may take: 15 s, and what reading it at 10 MB/s takes."""
    try:
        return 15.0 + (path / INDEX_NAME / "data.mdb").stat().st_size / 1e7
    except OSError:
        return 15.0


def in_child(verb: str, path: Path, *, timeout_s: float | None = None) -> dict[str, object]:
    """Run `check`, `look` or `rebuild` on a locked directory in a process of its own. Raises: ChildFailed.

    A check that takes much longer than reading the index does is one that a damaged index holds; then a rebuild is due.
    """
    if timeout_s is None:
        timeout_s = 3600.0 if verb == "rebuild" else check_timeout_s(path)
    command = [sys.executable, "-m", "forebay.tiers.ssd.recovery", verb, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ChildFailed(f"{verb} could not be run: {exc}") from exc
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        why = f"ended by signal {-done.returncode}" if done.returncode < 0 else said[-1] if said else "no answer"
        raise ChildFailed(f"{verb} of the index: {why}")
    found: dict[str, object] = json.loads(lines[-1])
    return found


def main(verb: str, path: Path) -> None:
    """The child. Its parent holds the directory's lock."""
    files = Files()
    id_, segment_bytes = read_identity(path, files, host_id())
    home = Home(path, id_, segment_bytes, -1)
    if verb in ("check", "look"):
        checked = check(home, files) if verb == "check" else look_through(home, files, home.index)
        if checked.trouble:
            raise BadCatalog(checked.trouble)
        print(json.dumps(asdict(checked)))
    else:
        print(json.dumps(asdict(rebuild(home, files))))


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except (BadCatalog, OSError) as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
