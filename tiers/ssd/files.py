"""The one seam between the ssd tier and the operating system: every system call on its files goes through here.

Tests put a `Files` of their own in its place, which fails, cuts short, tears or ends the process at call number n. Always
true: calls behave as those of `os`, with the same errors; a call that moves bytes lets other threads run.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from forebay.kvstore.tier import Buffer, WritableBuffer

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSES_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class ShortWrite(OSError):
    """The system wrote less than it was given, again and again."""


class Files:
    """System calls. Stateless; for any thread."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def open_direct(self, path: Path, flags: int) -> tuple[int, bool]:
        """Open past the page cache where the filesystem can, else through it. Returns: descriptor, which of the two."""
        try:
            return self.open(path, flags | os.O_DIRECT), True
        except OSError as exc:
            if exc.errno not in _REFUSES_DIRECT:
                raise
            return self.open(path, flags), False

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[WritableBuffer], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync_folder(self, path: Path) -> None:
        """Make names in a folder durable: without it a power cut can lose the name, not just the data."""
        fd = self.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            self.close(fd)

    def fallocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def size(self, path: Path) -> int:
        return os.stat(path).st_size

    def names(self, path: Path) -> list[str]:
        return os.listdir(path)

    def mkdir(self, path: Path) -> None:
        """With its parents; no error if it is there."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def read_file(self, path: Path) -> bytes:
        return path.read_bytes()

    def free_bytes(self, path: Path) -> tuple[int, int]:
        """(what an ordinary user may still write to the filesystem, its size)."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def device(self, path: Path) -> int:
        """The filesystem that a path lies on, or would lie on if it were made."""
        while not path.exists() and path != path.parent:
            path = path.parent
        return os.stat(path).st_dev

    def commit(self, commit: Callable[[], None]) -> None:
        """The index library's own commit: many system calls that can't be told apart from here."""
        commit()

    # --- built from the above -------------------------------------------------------------------------------------

    def write_all(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all of it, or raise. A short write is carried on: the rest then says why (disk full, quota, ...)."""
        left = [memoryview(each).cast("B") for each in buffers]
        for _ in range(64):
            done = self.pwritev(fd, left, offset)
            offset += done
            while left and done >= left[0].nbytes:
                done -= left.pop(0).nbytes
            if not left:
                return
            left[0] = left[0][done:]
        raise ShortWrite(errno.EIO, "the system keeps writing less than it is given")

    def read_up_to(self, fd: int, buffers: Sequence[WritableBuffer], offset: int) -> int:
        """Read until the buffers are full or the file ends. Returns the bytes read."""
        left = [memoryview(each).cast("B") for each in buffers]
        total = 0
        while left:
            done = self.preadv(fd, left, offset + total)
            if not done:
                break
            total += done
            while left and done >= left[0].nbytes:
                done -= left.pop(0).nbytes
            if left and done:
                left[0] = left[0][done:]
        return total

    def replace_file(self, path: Path, data: bytes) -> None:
        """Durably put `data` in the place of a small file: it is the old one or the new one, never a mixture."""
        new = path.with_name(path.name + ".new")
        fd = self.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.write_all(fd, [data], 0)
            self.fdatasync(fd)
        finally:
            self.close(fd)
        self.rename(new, path)
        self.fsync_folder(path.parent)


def is_full(exc: OSError) -> bool:
    """Whether an error says that there is no room, rather than that the medium is broken."""
    return exc.errno in NO_SPACE
