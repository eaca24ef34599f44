"""Extents: the shared memory of the ram tier, one sealed memfd each, and the boards of generations beside them.

Covers making, mapping, sealing and retiring them, and the pool that grows in steps while the machine has memory to spare.
What lies in an extent is tiers/ram.py's business. Always true: an extent's memory never goes to another trust domain; a
board is writable by the daemon alone.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from forebay.kvstore.pages import populate

_F_SEAL_FUTURE_WRITE: Final = 0x10
# So that a stop is near, and not smaller: between steps the thread wants the interpreter, and on a machine whose cores are all
# at work the event loop may then wait for milliseconds until it gets it back.
_STEP_BYTES: Final = 8 << 20
_ZEROS: Final = memoryview(bytes(_STEP_BYTES))
MIN_SLOT_BYTES: Final = 512


def available_memory_bytes() -> int:
    """Memory that may still be taken: the smaller of MemAvailable and what the cgroup leaves."""
    available = 1 << 62
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    cgroup = _cgroup_headroom_bytes()
    return available if cgroup is None else min(available, cgroup)


def _cgroup_headroom_bytes() -> int | None:
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            if limit == "max":
                return None
            return max(0, int(limit) - int(Path(usage_file).read_text()))
        except (OSError, ValueError):
            continue
    return None


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A memfd of fixed size: no holder can shrink it under another's mapping (SIGBUS) or grow it past the budget."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)  # who is given a descriptor to read with, can't open it anew to write
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def forbid_new_writable_mappings(fd: int) -> None:
    """From now on `fd` can be mapped for reading only; mappings made before, the daemon's, stay writable."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def forbid_new_seals(fd: int) -> None:
    """No client can seal the memory against the others of its domain."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


class Extent:
    """One memfd, cut into slots of one stride while a size class uses it."""

    __slots__ = (
        "_fd_to_read", "_given", "_given_top", "_inverted", "_taken", "address", "board_base", "draining", "fd",
        "free_count", "map", "mapped_by", "memory", "number", "position", "size_bytes", "slot_count", "stride",
    )  # fmt: skip

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number = number  # never used twice in a daemon's life
        self.size_bytes = size_bytes
        self.fd = sealed_memfd(f"forebay-extent-{number}", size_bytes)
        self._fd_to_read = -1
        self.map: mmap.mmap | None = None
        self.memory = memoryview(b"")
        self.address = 0
        self.position = -1
        self.board_base = 0
        self.stride = 0
        self.slot_count = 0
        self.free_count = 0
        # Each slot's row, all bits inverted: memory fresh from the system, which is zero, says that a slot is free, and no
        # page of it is touched before its slots are ([M] 3 ms of page faults for 131,072 slots).
        self._inverted: npt.NDArray[np.int32] = np.empty(0, np.int32)
        self._taken = 0  # slots from here on were never taken
        self._given: npt.NDArray[np.int32] = np.empty(0, np.int32)  # stack of those that came back
        self._given_top = 0
        self.draining = False  # on its way out of its class: its free slots are not given out
        self.mapped_by: set[object] = set()

    def fault_in(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Give the extent its pages, in steps. Runs in a thread, without the GIL. Returns False on stop.

        By writing zeros through the descriptor: a write is refused with an error where a fault would be answered with SIGBUS,
        and unlike a fault it doesn't keep the process from mapping and unmapping other memory meanwhile ([M] 64 MiB take
        20 ms either way, and where a virtual machine must get them from its host 200 ms).

        Raises: OSError (ENOSPC, ENOMEM) when the machine has no more memory for it.
        """
        self.map = mmap.mmap(self.fd, self.size_bytes)
        self.memory = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for start in range(0, self.size_bytes, _STEP_BYTES):
            if stop():
                return False
            size = min(_STEP_BYTES, self.size_bytes - start)
            if os.pwrite(self.fd, _ZEROS[:size], start) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        populate(self.address, self.size_bytes)
        return True

    def fd_to_read(self) -> int:
        """A descriptor of the same memory that can't be mapped writable, for clients without the right to write."""
        if self._fd_to_read < 0:
            self._fd_to_read = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self._fd_to_read

    def format(self, stride: int) -> None:
        """Cut the (empty) extent into slots of `stride` bytes."""
        self.stride = stride
        self.slot_count = self.free_count = self.size_bytes // stride
        self._inverted = np.zeros(self.slot_count, np.int32)
        self._given = np.empty(self.slot_count, np.int32)
        self._taken = self._given_top = 0

    def rows(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int32]:
        """Rows that slots hold, [slots], -1 where a slot is free."""
        return ~self._inverted[start:stop]

    def row(self, slot: int) -> int:
        """The row that a slot holds, -1 if it is free."""
        return ~self._inverted.item(slot)

    def hold(self, slots: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> None:
        """Slots that were taken hold these rows, [slots]."""
        self._inverted[slots] = ~rows

    def take(self, count: int) -> npt.NDArray[np.int64]:
        """Up to `count` free slots: those that came back last, then fresh ones, in ascending order so that batches lie side
        by side."""
        count = min(count, self.free_count)
        back = min(count, self._given_top)
        slots = np.empty(count, np.int64)
        slots[:back] = self._given[self._given_top - back : self._given_top][::-1]
        slots[back:] = np.arange(self._taken, self._taken + count - back)
        self._given_top -= back
        self._taken += count - back
        self.free_count -= count
        return slots

    def give(self, slots: npt.NDArray[np.int64]) -> None:
        """Take slots back."""
        self._inverted[slots] = 0
        self._given[self._given_top : self._given_top + len(slots)] = slots[::-1]
        self._given_top += len(slots)
        self.free_count += len(slots)

    def give_one(self, slot: int) -> None:
        """`give` for one slot, without the cost of arrays."""
        self._inverted[slot] = 0
        self._given[self._given_top] = slot
        self._given_top += 1
        self.free_count += 1

    def close(self) -> None:
        """Unmap and close. Clients that still map it keep the memory alive, which is why retired bytes are counted."""
        if self.map is not None:
            try:
                self.memory.release()
                self.map.close()
            except BufferError:
                pass  # a view of it is still held in this process; the map goes with the view
            self.map = None
        os.close(self.fd)
        self.fd = -1
        if self._fd_to_read >= 0:
            os.close(self._fd_to_read)
            self._fd_to_read = -1


class Board:
    """Generations of all slots of one trust domain, in memory that clients map read-only.

    Layout: u64 a slot; the slots of the extent at position p start at p * slots_per_position. Sparse: pages that no slot uses
    take no memory. Entry 0 of the last page is the completion counter that clients may poll without a system call.
    """

    def __init__(self, positions: int, slots_per_position: int) -> None:
        self.slots_per_position = slots_per_position
        self.positions = positions
        self.counter_index = positions * slots_per_position
        self.size_bytes = self.counter_index * 8 + mmap.PAGESIZE
        self.fd = sealed_memfd("forebay-board", self.size_bytes)
        self._map = mmap.mmap(self.fd, self.size_bytes)
        forbid_new_writable_mappings(self.fd)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64)
        self._free_positions = list(range(positions - 1, -1, -1))

    def take_position(self) -> int:
        return self._free_positions.pop()

    def give_position(self, position: int) -> None:
        self._free_positions.append(position)

    def count_completion(self) -> None:
        self.generations[self.counter_index] += 1

    def close(self) -> None:
        self.generations = np.empty(0, np.uint64)
        self._map.close()
        os.close(self.fd)


class ExtentPool:
    """Makes extents up to a budget, ahead of need, while the machine keeps a reserve."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        extent_bytes: int,
        reserve_bytes: int,
        available: Callable[[], int] = available_memory_bytes,
        ahead: int = 2,
        name: str = "ram",
    ) -> None:
        self.extent_bytes = extent_bytes
        self.max_extents = max(1, capacity_bytes // extent_bytes)
        self.reserve_bytes = reserve_bytes
        self.ahead = ahead
        self.name = name
        self._available = available
        self.ready: list[Extent] = []
        self._making = 0  # extents on their way
        self.made = 0  # extents that hold memory now: ready, in use, or retired but still mapped by someone
        self._next_number = 1
        self._growing: asyncio.Task[None] | None = None
        self.closed = False
        self.refused_growth = 0  # times the machine had no memory to spare

    def _may_grow(self) -> bool:
        if self.closed or self.made + self._making >= self.max_extents:
            return False
        if self._available() - self.extent_bytes < self.reserve_bytes:
            self.refused_growth += 1
            return False
        return True

    def _new(self) -> Extent:
        extent = Extent(self._next_number, self.extent_bytes)
        self._next_number += 1
        self._making += 1
        return extent

    def _end_making(self, extent: Extent, *, whole: bool) -> None:
        self._making -= 1
        if whole:
            self.made += 1
        else:
            extent.close()

    def take(self, *, grow: bool) -> Extent | None:
        """A ready extent; with `grow`, one made on the spot (blocks 15 ms and more for 64 MiB: not on an event loop)."""
        if self.ready:
            return self.ready.pop()
        if not grow or not self._may_grow():
            return None
        extent = self._new()
        try:
            extent.fault_in()
        except OSError:
            self._end_making(extent, whole=False)
            self.refused_growth += 1
            return None
        self._end_making(extent, whole=True)
        return extent

    async def grow(self, want: int) -> None:
        """Have `want` extents ready if budget and machine allow; joins growth that is already running."""
        while len(self.ready) < want and not self.closed:
            if self._growing is None:
                if not self._may_grow():
                    return
                self._growing = asyncio.create_task(self._grow_one(), name="forebay-grow")
            task = self._growing
            await asyncio.wait({task})
            if self._growing is task:
                self._growing = None
            if task.cancelled() or task.exception() is not None:
                self.refused_growth += 1
                return

    async def _grow_one(self) -> None:
        extent = self._new()
        left = threading.Event()
        making = asyncio.get_running_loop().run_in_executor(None, extent.fault_in, lambda: self.closed or left.is_set())
        try:
            whole = await asyncio.shield(making)
        except asyncio.CancelledError:
            # The thread goes on for a step: closing the extent under it would have it write to memory that is gone.
            left.set()

            def end(done: asyncio.Future[bool]) -> None:
                if not done.cancelled():
                    done.exception()  # nobody else will ask
                self._end_making(extent, whole=False)

            making.add_done_callback(end)
            raise
        except BaseException:
            self._end_making(extent, whole=False)
            raise
        whole = whole and not self.closed
        self._end_making(extent, whole=whole)
        if whole:
            self.ready.append(extent)

    def forget(self, extent_bytes_released: int = 1) -> None:
        """A retired extent's memory has gone back to the system."""
        self.made -= extent_bytes_released

    async def aclose(self) -> None:
        self.closed = True
        if self._growing is not None:
            await asyncio.wait({self._growing})
        while self.ready:
            self.ready.pop().close()
            self.made -= 1
