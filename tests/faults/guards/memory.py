"""Guards of memory: who may touch it, what a reader checks of it, and when it is seen and reused."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.guards.registry import off, put


@off("object verification", quick=True)
def verify_object() -> None:
    from forebay.kvstore.objects import ObjectLayout

    put(ObjectLayout, "verify_object", lambda self, view, **names: None)


@off("generations")
def generations() -> None:
    import numpy as np

    from forebay.clients.memory import SharedMemory

    put(SharedMemory, "current", lambda self, places: np.ones(len(places), bool))


@off("boot epoch")
def epoch() -> None:
    from forebay.clients.lease import Lease

    put(Lease, "valid", lambda self: self._life is not None)


@off("no fork of writable memory")
def no_fork() -> None:
    put(mmap, "MADV_DONTFORK", mmap.MADV_NORMAL)


@off("size seals")
def size_seals() -> None:
    put(fcntl, "F_SEAL_SHRINK", 0)
    put(fcntl, "F_SEAL_GROW", 0)


@off("write seal")
def write_seal() -> None:
    from forebay.tiers import ram

    put(ram, "forbid_new_writable_mappings", lambda fd: None)


@off("checksum on read")
def checksum_on_read() -> None:
    from forebay.clients.lease import Lease

    put(Lease, "verify", len)


@off("anonymous memory")
def anonymous_memory() -> None:
    from forebay.server.daemon import Daemon

    init, control = Daemon.__init__, fcntl.fcntl

    def named(folder: Path, name: str) -> int:
        return os.open(folder / f"{name}-{os.getpid()}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def __init__(self: Any, settings: Any, **rest: Any) -> None:
        put(os, "memfd_create", lambda name, flags: named(settings.socket.parent, name))
        init(self, settings, **rest)

    put(Daemon, "__init__", __init__)
    put(fcntl, "fcntl", lambda fd, command, *rest: 0 if command == fcntl.F_ADD_SEALS else control(fd, command, *rest))


@off("eviction")
def eviction() -> None:
    from forebay.tiers.ram import RamDomain

    put(RamDomain, "evict", lambda self, size_class, count=1: 0)


@off("visible by commit alone")
def visible_by_commit() -> None:
    from forebay.tiers.ram import RamDomain

    def abort(self: Any, row: int, **parts: int) -> None:
        self.commit(self.tier.index.tables[self.tier.index.table.item(row)], np.array([row]), **parts)

    put(RamDomain, "abort", abort)
