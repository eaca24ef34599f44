"""Writing blocks: runs, their headers, and places that the caller fills itself.

Asking the daemon for places is clients/namespace.py's, copying clients/copying.py's. Always true: a header is written after
its payload's checksums are known, and a commit is sent after the header.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forebay.clients.memory import SharedMemory, read_places
from forebay.clients.results import PutResult, Slot, tally
from forebay.clients.session import ClientCore, Life, Op, Sent
from forebay.kvstore import wire
from forebay.kvstore.errors import ClientError, EpochEnded
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.tier import WritableBuffer
from forebay.kvstore.wire import SlotStatus


class AllocationCore:
    """Places for objects of a run that this client fills and then commits. Ends by commit, or by abort at the block's end."""

    def __init__(self, core: ClientCore, life: Life, reply: wire.AllocateReply, run: Run) -> None:
        self._core = core
        self._life: Life | None = life
        self._reply = reply
        self._run = run
        self.statuses = [SlotStatus(status) for status in reply.statuses]
        self._places = read_places(reply.locations)
        self.slots = [
            Slot(i, status, self._view(life, i) if status == SlotStatus.WRITABLE else None)
            for i, status in enumerate(self.statuses)
        ]
        life.hold()

    def _view(self, life: Life, i: int) -> memoryview:
        extent = life.memory.extents[int(self._places["extent"][i])]
        at = int(self._places["offset"][i])
        return extent.writable_memory[at + self._run.layout.header_bytes : at + self._run.layout.object_bytes]

    def commit_slots(self, indices: Sequence[int] | None = None, *, timeout_s: float | None = None) -> Op[PutResult]:
        """Make the slots' objects visible: all writable ones, or those of `indices`; the rest is given back.

        Raises: EpochEnded if the session that gave the places has ended; ValueError after commit or abort; BufferError while
        something still uses a slot's buffer (the allocation goes on: drop that and commit again).
        """
        life = self._life
        if life is None:
            raise ValueError("this allocation has ended already")
        self._core.check_usable()
        self._close_views()
        wanted = set(range(len(self.slots)) if indices is None else indices)
        writing = [i for i, status in enumerate(self.statuses) if status == SlotStatus.WRITABLE and i in wanted]
        try:
            if life.transport.closed:
                raise EpochEnded("the session that gave these places has ended: nothing was stored")
            checksums = [self._run.layout.part_checksums(self._view(life, i)) for i in writing]
            self._run.write_headers(life.memory, self._places, writing, checksums)
            written = bytearray(len(self.slots))
            for i in writing:
                written[i] = 1
            request = wire.Commit(self._reply.allocation, bytes(written))
            if self._reply.allocation:
                deadline_s = self._core.deadline(timeout_s)
                reply: wire.Done = yield Sent(life.transport, life.transport.start(request, deadline_s), deadline_s)
                stored = reply.count
            else:
                stored = 0
        finally:
            self._finish(life)
        return tally(self._reply.statuses, stored)

    def abort(self) -> None:
        """Give all places back. Idempotent; sends and doesn't wait. Raises: BufferError as `commit`."""
        life = self._life
        if life is None:
            return
        self._close_views()  # before the daemon may give the places to others
        try:
            if self._reply.allocation and not life.transport.closed:
                life.transport.start(wire.Abort(self._reply.allocation)).abandoned = True
        except ClientError:
            pass
        finally:
            self._finish(life)

    def _close_views(self) -> None:
        for slot in self.slots:
            if slot.view is not None:
                slot.view.release()
                slot.view = None

    def _finish(self, life: Life) -> None:
        self._life = None
        self._core.let_go(life)


@dataclass(frozen=True)
class Run:
    """Blocks of one run that are about to be written."""

    namespace: bytes
    layout: ObjectLayout
    keys: Sequence[bytes]
    parent: bytes | None  # key before the first; None at the root
    start_block: int
    tokens: bytes  # u32le, of all blocks

    def part(self, start: int, end: int) -> Run:
        stride = 4 * self.layout.block_tokens
        return Run(
            self.namespace,
            self.layout,
            self.keys[start:end],
            self.keys[start - 1] if start else self.parent,
            self.start_block + start,
            self.tokens[start * stride : end * stride],
        )

    def header_into(self, view: WritableBuffer, i: int, checksums: Sequence[int], created_ns: int) -> None:
        """Write the header of the i-th block to the start of `view`."""
        stride = 4 * self.layout.block_tokens
        self.layout.write_header(
            view,
            key=self.keys[i],
            parent=self.keys[i - 1] if i else self.parent,
            namespace=self.namespace,
            position=(self.start_block + i) * self.layout.block_tokens,
            token_ids=self.tokens[i * stride : (i + 1) * stride],
            checksums=checksums,
            created_ns=created_ns,
        )

    def headers(self) -> npt.NDArray[np.uint8]:
        """Headers of all blocks but for their checksums, [keys, header_bytes]."""
        rows = np.empty((len(self.keys), self.layout.header_bytes), np.uint8)
        self.layout.write_headers(
            rows,
            keys=self.keys,
            parent=self.parent,
            namespace=self.namespace,
            position=self.start_block * self.layout.block_tokens,
            token_ids=np.frombuffer(self.tokens, "<u4"),
            checksums=np.zeros((len(self.keys), len(self.layout.part_bytes)), np.uint64),
            created_ns=time.time_ns(),
        )
        return rows

    def write_headers(
        self,
        memory: SharedMemory,
        places: npt.NDArray[np.void],
        positions: Sequence[int],
        checksums: Sequence[Sequence[int]],
    ) -> None:
        """Write the headers of the blocks at `positions` to their places, [keys]."""
        created_ns = time.time_ns()
        size, extents = self.layout.header_bytes, memory.extents
        numbers, offsets = places["extent"].tolist(), places["offset"].tolist()
        for i, sums in zip(positions, checksums, strict=True):
            at = offsets[i]
            self.header_into(extents[numbers[i]].writable_memory[at : at + size], i, sums, created_ns)
