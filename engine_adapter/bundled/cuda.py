"""A pool in GPU memory: copies on streams of their own, straight from the daemon's shared memory where it is registered.

Covers what differs from a pool in host memory; loads, deadlines and cancel are the same. Written to torch's API and tested on
the CPU with stand-ins for streams; it has not run on a GPU yet. Always true: a slot is reported after its copy has ended on the
device, so a pass launched later reads it; the engine synchronises after each pass, so a slot it gave away isn't read any more.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch

from forebay.engine_adapter.bundled.pool import Expected, checked
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.pages import address_of

_log = logging.getLogger(__name__)

# cudaHostRegisterPortable | cudaHostRegisterReadOnly: the client maps for reading what it reads from.
_REGISTER_FLAGS: Final = 0x01 | 0x08


class RegisteredExtents:
    """Registers the client's mappings with the device (`MapWatcher` in clients/memory.py), so that it reads them by DMA.

    What can't be registered is copied through the driver's own buffers instead: slower, and counted in `refused`.
    """

    def __init__(self, runtime: Any = None) -> None:
        """`runtime`: the CUDA runtime, as torch.cuda.cudart() gives it."""
        self._runtime = torch.cuda.cudart() if runtime is None else runtime  # type: ignore[no-untyped-call]
        self._registered: set[int] = set()
        self._lock = threading.Lock()
        self.refused = 0

    def mapped(self, address: int, size_bytes: int) -> None:
        status = int(self._runtime.cudaHostRegister(address, size_bytes, _REGISTER_FLAGS))
        with self._lock:
            if status == 0:
                self._registered.add(address)
                return
            self.refused += 1
        _log.warning("shared memory could not be registered with the GPU", extra={"status": status})

    def unmapping(self, address: int) -> None:
        with self._lock:
            if address not in self._registered:
                return
            self._registered.discard(address)
        self._runtime.cudaHostUnregister(address)


class CudaPool:
    """See pool.SlotMemory."""

    def __init__(self, pool: torch.Tensor, layout: ObjectLayout) -> None:
        """Raises: ValueError: a slot isn't a payload of this layout."""
        self.blocks, self.block_bytes = checked(pool, layout)
        self._slots = pool.view(torch.uint8).reshape(self.blocks, self.block_bytes)
        # Two, so that a store waits behind no load.
        self._in, self._out = (torch.cuda.Stream(pool.device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._staging = torch.empty(0, dtype=torch.uint8)

    def fill(self, slot: int, payload: memoryview, expected: Expected | None) -> bool:
        # Checked where it lies: the lease's generation, looked at after the copy, says that it did not change in between.
        if expected is not None and not expected.hold(payload):
            return False
        # A buffer at the address, since torch warns of memory that may only be read; it is only read here.
        memory = (ctypes.c_char * self.block_bytes).from_address(address_of(payload))
        with torch.cuda.stream(self._in):
            self._slots[slot].copy_(torch.frombuffer(memory, dtype=torch.uint8), non_blocking=True)
        self._in.synchronize()
        return True

    def payloads(self, slots: Sequence[int]) -> list[memoryview]:
        if self._staging.numel() < len(slots) * self.block_bytes:
            self._staging = _pinned(len(slots) * self.block_bytes)
        rows = self._staging[: len(slots) * self.block_bytes].view(len(slots), self.block_bytes)
        with torch.cuda.stream(self._out):
            for row, slot in zip(rows, slots, strict=True):
                row.copy_(self._slots[slot], non_blocking=True)
        self._out.synchronize()
        return [row.numpy().data for row in rows]


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
