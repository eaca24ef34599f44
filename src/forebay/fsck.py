"""`forebay fsck`: whether an ssd directory is sound, and making it so.

Reads every record of every segment and compares index, tables of contents and log of deletions with them. Always true: it
refuses a directory that a daemon holds; without `repair` it changes nothing; a repair only ever forgets, never invents.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from forebay.kvstore.errors import ForebayError
from forebay.tiers.ssd import recovery, tombstones
from forebay.tiers.ssd.catalog import BadCatalog, Catalog, SegmentRow, SegmentState, check_size, map_bytes_for
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import (
    IDENTITY_NAME,
    DirectoryRefused,
    Home,
    State,
    adopt,
    boot_id,
    host_id,
    lock,
    read_identity,
    write_state,
)
from forebay.tiers.ssd.layout import Record
from forebay.tiers.ssd.tombstones import Tombstone, TombstonesLost

Progress = Callable[[int, int], None]
_MOVING: Final = ".moving"


class NotChecked(ForebayError):
    """The directory can't be checked: in use, not ours, or unreadable."""


@dataclass
class Report:
    """What was found in one directory. problems: what is wrong, a line each; repaired: what was done about it; left: what a
    look after the repair still found."""

    directory: str
    segments: int = 0
    records: int = 0
    record_bytes: int = 0
    damaged_records: int = 0
    deleted_records: int = 0
    index_entries: int = 0
    problems: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems or (bool(self.repaired) and not self.left)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sound": self.sound}


def check(path: Path, *, repair: bool = False, take_over: bool = False, progress: Progress = lambda *_: None) -> Report:
    """Check one directory. `take_over`: make another host's directory this one's first. Raises: NotChecked."""
    files = Files()
    if not (path / IDENTITY_NAME).is_file():
        raise NotChecked(f"{path} is no ssd directory: it has no {IDENTITY_NAME}")
    try:
        with _locked(path, files):
            if take_over:
                adopt(path, files)
            id_, segment_bytes = read_identity(path, files, host_id())
            home = Home(path, id_, segment_bytes, -1)
            report = Report(str(path))
            bad = _look(home, files, report, progress)
            if repair and report.problems:
                if _rename(home, files, report):
                    bad = _look(home, files, Report(str(path)), progress)
                _repair(home, files, bad, report)
                again = Report(str(path))
                _look(home, files, again, progress)
                report.left = again.problems
            return report
    except (DirectoryRefused, OSError) as exc:
        raise NotChecked(str(exc)) from exc


@contextmanager
def _locked(path: Path, files: Files) -> Any:
    fd = lock(path, files)
    try:
        yield
    finally:
        files.close(fd)


def _look(home: Home, files: Files, report: Report, progress: Progress) -> list[Record]:
    """Fill the report. Returns the records whose objects are damaged."""
    rows = _index(home, files, report)
    stones: set[Tombstone] = set()
    try:
        stones, _ = tombstones.read(home.tombstones, home.id, files)
    except TombstonesLost as exc:
        report.problems.append(f"{exc}: a repair drops all objects, since deleted ones could be among them")
    alive: dict[tuple[int, int, int], Record] = {}
    bad: list[Record] = []
    numbers = home.segment_numbers(files)
    for done, number in enumerate(numbers):
        progress(done, len(numbers))
        for record in _segment(home, files, number, rows, report):
            if Tombstone(*record.place[:3]) in stones:
                report.deleted_records += 1
                continue
            alive[record.place[:3]] = record
            report.records += 1
            report.record_bytes += record.place.length
            if not _sound(home, files, record):
                bad.append(record)
    progress(len(numbers), len(numbers))
    report.segments, report.damaged_records = len(numbers), len(bad)
    if bad:
        report.problems.append(f"{len(bad)} objects are damaged")
    if rows is not None:
        _compare(home, files, rows, alive, report)
    return bad


def _index(home: Home, files: Files, report: Report) -> dict[int, SegmentRow] | None:
    try:
        check_size(home.index, files)
        found = recovery.in_child("look", home.path)  # not here: a damaged index ends the process that reads it
        report.index_entries = int(str(found["entries"])) - int(str(found["stale"]))
        catalog = Catalog.open(home.index, home.id, files, map_bytes_for(0), create=False)
    except (BadCatalog, recovery.ChildFailed) as exc:
        report.problems.append(f"the index can't be used: {exc}")
        return None
    try:
        return catalog.segments()
    finally:
        catalog.close()


def _segment(home: Home, files: Files, number: int, rows: dict[int, SegmentRow] | None, report: Report) -> list[Record]:
    fd = files.open(home.segment(number), os.O_RDONLY)
    try:
        header = recovery.read_header(files, fd, home.id)
        row = None if rows is None else rows.get(number)
        if header is None:
            if row is not None and row.state is not SegmentState.FREE:
                report.problems.append(f"segment {number} has no readable head")
            return []
        if (header.segment, header.pages) != (number, home.segment_pages):
            report.problems.append(f"segment {number} is another segment's file")
            return []
        if header.empty:
            return []
        records = recovery.read_toc(files, fd, header, home.id)
        if records is None:
            if row is not None and row.state is SegmentState.SEALED:
                report.problems.append(f"segment {number} has a damaged table of contents")
            records = list(recovery.walk(files, fd, header, home.id))
        return records
    finally:
        files.close(fd)


def _sound(home: Home, files: Files, record: Record) -> bool:
    fd = files.open(home.segment(record.place.segment), os.O_RDONLY)
    try:
        return recovery.sound(files, fd, record)
    finally:
        files.close(fd)


def _compare(
    home: Home, files: Files, rows: dict[int, SegmentRow], alive: dict[tuple[int, int, int], Record], report: Report
) -> None:
    catalog = Catalog.open(home.index, home.id, files, map_bytes_for(0), create=False)
    astray = 0
    try:
        for key, place in catalog.places():
            row = rows.get(place.segment)
            if row is None or row.generation != place.generation:
                continue
            record = alive.get(place[:3])
            astray += record is None or record.key != key
    finally:
        catalog.close()
    if astray:
        report.problems.append(f"{astray} entries of the index lead to no record")


def _rename(home: Home, files: Files, report: Report) -> int:
    """Give segment files that stand under another's number their own name again. Returns how many. Raises: OSError."""
    for name in files.names(home.segments):
        path = home.segments / name
        if path.suffix == _MOVING and not path.with_suffix(".seg").exists():  # a repair was killed here
            files.rename(path, path.with_suffix(".seg"))
    claims: dict[int, list[int]] = {}
    for number in home.segment_numbers(files):
        fd = files.open(home.segment(number), os.O_RDONLY)
        try:
            header = recovery.read_header(files, fd, home.id)
        finally:
            files.close(fd)
        claims.setdefault(number if header is None else header.segment, []).append(number)
    held = {number for numbers in claims.values() for number in numbers}
    moves = {numbers[0]: own for own, numbers in claims.items() if len(numbers) == 1 and numbers[0] != own}
    # Whose right place is held by a file that stays goes nowhere: there it would take the place of that one.
    while blocked := [number for number, own in moves.items() if own in held and own not in moves]:
        for number in blocked:
            del moves[number]
    for number in moves:
        files.rename(home.segment(number), home.segment(number).with_suffix(_MOVING))
    for number, own in moves.items():
        files.rename(home.segment(number).with_suffix(_MOVING), home.segment(own))
    files.fsync_folder(home.segments)
    if moves:
        report.repaired.append(f"{len(moves)} segment files got their own names again")
    return len(moves)


def _repair(home: Home, files: Files, bad: list[Record], report: Report) -> None:
    """Bury what is damaged, then make the index anew. Raises: NotChecked, OSError."""
    try:
        stones = tombstones.Tombstones(home.tombstones, home.id, files)
        try:
            stones.append(record.place for record in bad)
        finally:
            stones.close()
        if bad:
            report.repaired.append(f"{len(bad)} damaged objects were dropped")
    except TombstonesLost:
        report.repaired.append("all objects were dropped")  # by the rebuild
    try:
        found = recovery.in_child("rebuild", home.path)
    except recovery.ChildFailed as exc:
        raise NotChecked(str(exc)) from exc
    write_state(home.path, files, State(boot_id(), clean=True, unclean_starts=0))
    report.repaired.append(f"the index was made anew: {found['entries']} objects in {found['segments']} segments")
