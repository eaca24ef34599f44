"""Guards of the ssd tier."""

from __future__ import annotations

from typing import Any

from tests.faults.guards.registry import off, put


@off("index commit")
def index_commit() -> None:
    from forebay.tiers.ssd.catalog import Batch

    put(Batch, "put", lambda self, key, place: None)


@off("log of deletions")
def log_of_deletions() -> None:
    from forebay.tiers.ssd.tombstones import Tombstones

    put(Tombstones, "append", lambda self, places: None)


@off("format version")
def format_version() -> None:
    from forebay.tiers.ssd import home

    put(home, "FORMAT_VERSION", 1000)


@off("index size check")
def index_size_check() -> None:
    from forebay.tiers.ssd import catalog, directory

    put(directory, "check_size", lambda folder, files: None)
    put(catalog, "check_size", lambda folder, files: None)


@off("emptying segments")
def emptying_segments() -> None:
    from forebay.tiers.ssd.reclaim import Reclaimer

    put(Reclaimer, "_needed", lambda self: False)


@off("failed writes given up")
def failed_writes_given_up() -> None:
    from forebay.tiers.ssd.recordio import RecordIo

    real = RecordIo.write

    def write(self: Any, fd: int, record: Any, data: memoryview) -> None:
        try:
            real(self, fd, record, data)
        except OSError:
            return

    put(RecordIo, "write", write)


@off("record header check")
def record_header_check() -> None:
    from forebay.tiers.ssd.layout import Record
    from forebay.tiers.ssd.recordio import RecordIo

    real = RecordIo.read

    def read(self: Any, fd: int, key: Any, place: Any, out: Any) -> Any:
        return real(self, fd, key, place, out) or Record(key, place, 0)

    put(RecordIo, "read", read)


@off("directory lock")
def directory_lock() -> None:
    import fcntl

    put(fcntl, "flock", lambda fd, operation: None)
