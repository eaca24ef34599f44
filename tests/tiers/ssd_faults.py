"""System calls that fail, tear or end the process where a test says so; and what ssd tests share."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from forebay.kvstore.tier import Buffer, WritableBuffer
from forebay.tiers.ssd import SsdTier, recovery
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import Home, host_id, read_identity
from forebay.tiers.ssd.layout import PAGE

T = TypeVar("T")
SEGMENT = 8 * PAGE
KILLED = 77

Plan = Callable[[str, int], "str | int | None"]
"""(verb, number of the call) -> nothing, an errno, or "short", "torn", "exit", "torn-exit", "flip", "vanish"."""


class FaultyFiles(Files):
    """Asks its plan before each call. Thread-safe; `calls` counts all of them, `trace` remembers their verbs."""

    def __init__(self, plan: Plan = lambda verb, number: None) -> None:
        self.plan = plan
        self.calls = 0
        self.trace: list[str] = []
        self.injected = 0
        self._lock = threading.Lock()

    def _ask(self, verb: str) -> str | None:
        with self._lock:
            number = self.calls
            self.calls += 1
            self.trace.append(verb)
            fault = self.plan(verb, number)
            self.injected += fault is not None
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        if fault == "exit":
            os._exit(KILLED)
        return fault

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        self._ask("open")
        return super().open(path, flags, mode)

    def preadv(self, fd: int, buffers: Sequence[WritableBuffer], offset: int) -> int:
        self._ask("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        fault = self._ask("pwritev")
        if fault is None:
            return super().pwritev(fd, buffers, offset)
        if fault == "flip":
            return self._flipped(fd, buffers, offset)
        whole = memoryview(b"".join(bytes(each) for each in buffers))
        half = whole[: max(len(whole) // 2 // PAGE * PAGE, min(len(whole), PAGE))]
        done = self._plain(fd, half, offset)
        if fault == "torn-exit":
            os._exit(KILLED)
        if fault == "torn":
            raise OSError(errno.EIO, "torn write")
        return done

    def _flipped(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = bytearray(b"".join(bytes(each) for each in buffers))
        data[len(data) // 3] ^= 4
        return self._plain(fd, data, offset)

    @staticmethod
    def _plain(fd: int, data: Buffer, offset: int) -> int:
        """Write through the page cache: these bytes are in no aligned memory."""
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            return os.pwrite(other, data, offset)
        finally:
            os.close(other)

    def fdatasync(self, fd: int) -> None:
        self._ask("fdatasync")
        super().fdatasync(fd)

    def fsync_folder(self, path: Path) -> None:
        self._ask("fsync_folder")
        super().fsync_folder(path)

    def fallocate(self, fd: int, size: int) -> None:
        self._ask("fallocate")
        super().fallocate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        self._ask("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._ask("unlink")
        super().unlink(path)

    def commit(self, commit: Callable[[], None]) -> None:
        self._ask("commit")
        super().commit(commit)
        self._ask("committed")


def once(verb: str, fault: str | int, *, skip: int = 0) -> Plan:
    """A plan: the first call of a verb, after `skip` others of it, has the fault."""
    seen = [0]

    def plan(asked: str, number: int) -> str | int | None:
        if asked != verb:
            return None
        seen[0] += 1
        return fault if seen[0] == skip + 1 else None

    return plan


def always(*verbs: str, fault: int) -> Plan:
    return lambda asked, number: fault if asked in verbs else None


def settled(tier: SsdTier) -> SsdTier:
    """Wait until no directory's index is being checked or rebuilt any more."""
    deadline_s = time.monotonic() + 20.0
    while any("ing the index" in reason for reason in tier.health()):
        assert time.monotonic() < deadline_s, tier.health()
        time.sleep(0.002)
    return tier


def home_of(folder: Path, host: str | None = None) -> Home:
    id_, size = read_identity(folder, Files(), host or host_id())
    return Home(folder, id_, size, -1)


def in_process(verb: str, path: Path, host: str | None = None) -> dict[str, Any]:
    """`recovery.in_child` without the child: for tests whose index is sound enough to be read."""
    home = home_of(path, host)
    if verb == "rebuild":
        return asdict(recovery.rebuild(home, Files()))
    checked = recovery.check(home, Files())
    if checked.trouble:
        raise recovery.ChildFailed(checked.trouble)
    return asdict(checked)
