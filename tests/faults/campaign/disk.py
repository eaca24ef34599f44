"""A disk that fails, by a seed: system calls that refuse, stop half-way or hang; and damage to what lies on it.

A disk that lies does more: it says yes to a write that it tears or spoils, and reads what was never written there. Always true:
lies are about segment files; what happens to anything else is an error or a delay, or is done while nobody has the directory
open.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forebay.kvstore.tier import Buffer, WritableBuffer
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.layout import PAGE
from tests.faults.campaign.tally import Tally

_HANG_S = 0.06

# Kinds by how often: an error takes a directory out of use for a while, so that the others would hardly be met.
LIES = {"bit flip", "truncation", "swapped file", "torn write"}
READ_FAULTS = ("bit flip",) * 3 + ("truncation",) * 5 + ("swapped file",) * 5 + ("I/O error", "hang")
WRITE_FAULTS = ("bit flip",) * 2 + ("short write",) * 6 + ("torn write",) * 6 + ("no space", "I/O error", "hang")
SYNC_FAULTS = ("I/O error", "hang", "hang")
COMMIT_FAULTS = ("I/O error", "no space", "no space", "hang", "hang")


class FailingFiles(Files):
    """System calls of which each fails with probability `rate`, in a way that its kind of call can fail."""

    def __init__(self, seed: int, tally: Tally, *, lies: bool) -> None:
        self.rate = 0.0
        self._lies = lies
        self._rng = random.Random(seed)
        self._tally = tally
        self._lock = threading.Lock()
        self._segments: dict[int, Path] = {}  # descriptors of segment files

    def _draw(self, kinds: Sequence[str], rate: float = 1.0) -> str | None:
        with self._lock:
            if self._rng.random() >= self.rate * rate:
                return None
            kind = self._rng.choice(kinds)
        return kind if self._lies or kind not in LIES else None

    def _act(self, kind: str | None) -> str | None:
        """Hangs and errors, which are alike for all calls. Returns a kind that is left to the call itself."""
        if kind == "hang":
            self._tally.fire(kind)
            time.sleep(_HANG_S)
        elif kind in ("I/O error", "no space"):
            self._tally.fire(kind)
            number = errno.EIO if kind == "I/O error" else errno.ENOSPC
            raise OSError(number, os.strerror(number))
        else:
            return kind
        return None

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if path.suffix == ".seg":
            with self._lock:
                self._segments[fd] = path
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._segments.pop(fd, None)
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[WritableBuffer], offset: int) -> int:
        kind = self._act(self._draw(READ_FAULTS)) if fd in self._segments else None
        if kind == "truncation":
            self._tally.fire(kind)
            return 0
        if kind == "swapped file" and (other := self._other(fd)) is not None:
            self._tally.fire(kind)
            return super().preadv(other, buffers, offset)
        done = super().preadv(fd, buffers, offset)
        if kind == "bit flip" and done:
            self._tally.fire(kind)
            self._flip([memoryview(each).cast("B") for each in buffers], done)
        return done

    def _other(self, fd: int) -> int | None:
        with self._lock:
            others = [each for each, path in self._segments.items() if path != self._segments.get(fd)]
            return self._rng.choice(others) if others else None

    def _flip(self, views: Sequence[memoryview], size: int) -> None:
        with self._lock:
            at, bit = self._rng.randrange(size), 1 << self._rng.randrange(8)
        for view in views:
            if at < len(view):
                view[at] ^= bit
                return
            at -= len(view)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        on_segment = fd in self._segments
        kind = self._act(self._draw(WRITE_FAULTS) if on_segment else self._draw(COMMIT_FAULTS, 0.15))
        if kind is None:
            return super().pwritev(fd, buffers, offset)
        data = bytearray().join(bytes(each) for each in buffers)
        self._tally.fire(kind)
        whole = len(data)
        if kind == "bit flip":
            self._flip([memoryview(data)], whole)
        else:
            data = data[: max(whole // 2 // 512 * 512, 1)]
        # Through the page cache: these bytes are in no aligned memory.
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            done = os.pwrite(other, data, offset)
        finally:
            os.close(other)
        return done if kind == "short write" else whole

    def fdatasync(self, fd: int) -> None:
        self._act(self._draw(SYNC_FAULTS, 0.15))
        super().fdatasync(fd)

    def fallocate(self, fd: int, size: int) -> None:
        self._act(self._draw(("no space",)))
        super().fallocate(fd, size)

    def commit(self, commit: Callable[[], None]) -> None:
        self._act(self._draw(COMMIT_FAULTS, 0.15))
        super().commit(commit)


# --- damage to a directory that nobody has open -----------------------------------------------------------------------


def damage(folder: Path, rng: random.Random, tally: Tally, *, keep_index: Path, lies: bool) -> bool:
    """Damage a closed directory's index, and where the disk lies its segment files. `keep_index`: where an old index is kept.

    Returns: whether the index is now an old one.
    """
    tally.fire("damaged index")
    how = rng.choice((_cut_index, _tear_index, _old_index, _lose_index, _doubt_state))
    how(folder, rng, keep_index)
    segments = sorted((folder / "segments").glob("*.seg")) if lies else []
    if segments and rng.random() < 0.5:
        _flip_at_rest(rng.choice(segments), rng, tally)
    if segments and rng.random() < 0.05:
        size = (path := rng.choice(segments)).stat().st_size
        os.truncate(path, rng.randrange(size))
        tally.fire("truncation")
    if len(segments) > 1 and rng.random() < 0.1:
        one, two = rng.sample(segments, 2)
        spare = one.with_suffix(".swap")
        one.rename(spare)
        two.rename(one)
        spare.rename(two)
        tally.fire("swapped file", 2)
    return how is _old_index


def save_index(folder: Path, keep: Path) -> None:
    """Keep a copy of a closed directory's index, to be put back when it is old."""
    shutil.rmtree(keep, ignore_errors=True)
    if (folder / "index").exists():
        shutil.copytree(folder / "index", keep)


def _flip_at_rest(path: Path, rng: random.Random, tally: Tally) -> None:
    at = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    tally.fire("bit flip")


def _cut_index(folder: Path, rng: random.Random, keep: Path) -> None:
    index = folder / "index" / "data.mdb"
    os.truncate(index, rng.randrange(index.stat().st_size))


def _tear_index(folder: Path, rng: random.Random, keep: Path) -> None:
    """Some pages hold anything, and the directory was left as by a power cut."""
    index = folder / "index" / "data.mdb"
    with index.open("r+b") as file:
        for _ in range(rng.randint(1, 3)):
            file.seek(rng.randrange(max(index.stat().st_size // PAGE, 1)) * PAGE)
            file.write(rng.randbytes(rng.choice((64, 512, PAGE))))
    _doubt_state(folder, rng, keep)


def _old_index(folder: Path, rng: random.Random, keep: Path) -> None:
    """The index of an earlier time, as after a restore, and the directory left as by a power cut."""
    if keep.exists():
        shutil.rmtree(folder / "index", ignore_errors=True)
        shutil.copytree(keep, folder / "index")
    _doubt_state(folder, rng, keep)


def _lose_index(folder: Path, rng: random.Random, keep: Path) -> None:
    shutil.rmtree(folder / "index", ignore_errors=True)


def _doubt_state(folder: Path, rng: random.Random, keep: Path) -> None:
    (folder / "state.json").write_text(
        rng.choice(("", "{}", '{"boot": "another", "clean": false, "unclean_starts": 0}'))
    )
