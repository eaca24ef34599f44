"""A directory as a whole: who owns it, which format it has, whether it was left in order.

Covers the lock, `forebay-ssd.json` (identity and format) and `state.json` (the clean mark). Always true: a directory that
is another daemon's, another host's or a newer format's is refused with a message and not touched; nothing found in a
directory is ever wiped to make it usable.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forebay.tiers.ssd import tombstones
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.layout import (
    FORMAT_VERSION,
    MAX_SEGMENT_BYTES,
    MIN_SEGMENT_BYTES,
    PAGE,
    DirectoryId,
)

IDENTITY_NAME: Final = "forebay-ssd.json"
STATE_NAME: Final = "state.json"
LOCK_NAME: Final = "lock"
SEGMENTS_NAME: Final = "segments"
INDEX_NAME: Final = "index"
TOMBSTONES_NAME: Final = "deleted.log"
_FORMAT: Final = "forebay-ssd"


class DirectoryRefused(Exception):
    """The directory can't be used, and it says why and what to do. Nothing in it was changed."""


class DirectoryInUse(DirectoryRefused):
    """Another process holds it."""


@dataclass(frozen=True)
class Home:
    """One directory that this process has locked."""

    path: Path
    id: DirectoryId
    segment_bytes: int
    lock_fd: int

    @property
    def index(self) -> Path:
        return self.path / INDEX_NAME

    @property
    def segments(self) -> Path:
        return self.path / SEGMENTS_NAME

    @property
    def tombstones(self) -> Path:
        return self.path / TOMBSTONES_NAME

    @property
    def segment_pages(self) -> int:
        return self.segment_bytes // PAGE

    def segment(self, number: int) -> Path:
        return self.segments / f"{number:08d}.seg"

    def segment_numbers(self, files: Files) -> list[int]:
        """Segment files of full size. A shorter one is no segment: its making, or the file, was cut off."""
        found = []
        for name in files.names(self.segments):
            stem, _, suffix = name.partition(".")
            named = suffix == "seg" and len(stem) == 8 and stem.isdigit()
            if named and files.size(self.segments / name) == self.segment_bytes:
                found.append(int(stem))
        return sorted(found)


@dataclass(frozen=True)
class State:
    """How the directory was left. boot: the machine's boot id; unclean_starts: starts in a row without a clean stop."""

    boot: str
    clean: bool
    unclean_starts: int


def claim(path: Path, files: Files, segment_bytes: int, *, host: str | None = None) -> Home:
    """Lock a directory, and format it if it has never been one of ours. `segment_bytes` counts only then.

    Raises: DirectoryRefused, OSError.
    """
    files.mkdir(path)
    lock_fd = lock(path, files)
    try:
        if IDENTITY_NAME not in files.names(path):
            _format(path, files, segment_bytes, host or host_id())
        id_, size = read_identity(path, files, host or host_id())
        files.mkdir(path / SEGMENTS_NAME)
        return Home(path, id_, size, lock_fd)
    except BaseException:
        files.close(lock_fd)
        raise


def lock(path: Path, files: Files) -> int:
    """Take the directory's lock; it is let go with the descriptor, also by a kill. Raises: DirectoryInUse, OSError."""
    fd = files.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        owner = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
        files.close(fd)
        if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise DirectoryInUse(f"{path} is in use by process {owner or 'unknown'}: one daemon a directory") from exc
    try:
        os.pwrite(fd, f"{os.getpid()}".ljust(16).encode(), 0)
    except OSError:
        pass  # a full disk: the lock holds without its owner's name
    return fd


def read_identity(path: Path, files: Files, host: str) -> tuple[DirectoryId, int]:
    """(identity, segment_bytes). Raises: DirectoryRefused, OSError."""
    try:
        found: dict[str, Any] = json.loads(files.read_file(path / IDENTITY_NAME))
        version, raw = int(found["version"]), bytes.fromhex(found["id"])
        size, owner, format_ = int(found["segment_bytes"]), str(found["host"]), str(found["format"])
    except (ValueError, KeyError, TypeError) as exc:
        raise DirectoryRefused(
            f"{path}/{IDENTITY_NAME} can't be read: restore it, or move the directory's files away"
        ) from exc
    if format_ != _FORMAT or version > FORMAT_VERSION:
        raise DirectoryRefused(
            f"{path} has format {format_} version {version}, this Forebay reads {_FORMAT} up to {FORMAT_VERSION}: "
            "use the newer Forebay, or another directory"
        )
    if owner != host:
        raise DirectoryRefused(
            f"{path} belongs to another host ({owner}, this is {host}): use another directory, or take it over with "
            "`forebay fsck --adopt` once that host no longer uses it"
        )
    if len(raw) != 16 or not MIN_SEGMENT_BYTES <= size <= MAX_SEGMENT_BYTES or size % PAGE:
        raise DirectoryRefused(f"{path}/{IDENTITY_NAME} has impossible values: restore it, or move the files away")
    return DirectoryId.of(raw), size


def adopt(path: Path, files: Files) -> None:
    """Make another host's directory this one's. The caller holds the lock. Raises: OSError, ValueError."""
    found = json.loads(files.read_file(path / IDENTITY_NAME))
    found["host"] = host_id()
    files.replace_file(path / IDENTITY_NAME, json.dumps(found, indent=1).encode())


def _format(path: Path, files: Files, segment_bytes: int, host: str) -> None:
    ours = (SEGMENTS_NAME, INDEX_NAME)
    if left := [name for name in ours if name in files.names(path) and files.names(path / name)]:
        raise DirectoryRefused(f"{path} has {' and '.join(left)} but no {IDENTITY_NAME}: restore it, or move them away")
    raw = os.urandom(16)
    tombstones.create(path / TOMBSTONES_NAME, DirectoryId.of(raw), files)
    files.mkdir(path / SEGMENTS_NAME)
    identity = {
        "format": _FORMAT,
        "version": FORMAT_VERSION,
        "id": raw.hex(),
        "host": host,
        "segment_bytes": segment_bytes,
    }
    files.replace_file(path / IDENTITY_NAME, json.dumps(identity, indent=1).encode())


def read_state(path: Path, files: Files) -> State | None:
    """How it was left; None if that can't be told."""
    try:
        found = json.loads(files.read_file(path / STATE_NAME))
        return State(str(found["boot"]), found["clean"] is True, int(found["unclean_starts"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_state(path: Path, files: Files, state: State) -> None:
    """Raises: OSError."""
    files.replace_file(path / STATE_NAME, json.dumps(vars(state)).encode())


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def host_id() -> str:
    """What tells hosts apart: the machine id, or the host's name where there is none."""
    try:
        return Path("/etc/machine-id").read_text().strip() or socket.gethostname()
    except OSError:
        return socket.gethostname()
