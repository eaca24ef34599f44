"""What a client does, apart from waiting: each operation once, as a generator that yields what must be waited for.

Covers sessions and reconnecting, namespaces, leases, allocations, copies and checks. clients/blocking.py runs the generators
on a blocking transport, clients/aio.py on the event loop; neither repeats any of this. Always true: nothing found by an
operation outlives the daemon life it came from; a view is readable only while its lease is held; a doubt about bytes is a miss.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from forebay.clients.copying import copy_in, copy_out, targets_of
from forebay.clients.memory import SharedMemory, distinct_extents, read_places
from forebay.clients.transport import Pending, Transport
from forebay.kvstore import wire
from forebay.kvstore.address import default_socket_path
from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.errors import (
    ClientClosed,
    ClientError,
    DaemonUnavailable,
    EpochEnded,
    UsedAfterFork,
)
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import TokenIds, block_keys, token_words
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.tier import Buffer, WritableBuffer
from forebay.kvstore.wire import SlotStatus

T = TypeVar("T")
_TOUCH_BYTES: Final = 8 << 20  # of payload in one allocate: the daemon makes room for the next while this one is copied
# Objects in one allocate: so many the daemon answers at once, without giving others a turn, and in order.
_CHUNK_OBJECTS: Final = 128
_ASKED_AHEAD: Final = 3
# Statuses of an allocate -> bytes of its commit: what was writable is written.
_WRITTEN: Final = bytes(status == SlotStatus.WRITABLE for status in range(256))
_RETRY_CONNECT_S: Final = 0.05
_MAX_RETRY_CONNECT_S: Final = 1.0


class Sent(NamedTuple):
    """A step that waits: for the reply of a request that was sent."""

    transport: Transport
    pending: Pending
    deadline_s: float


class Connect(NamedTuple):
    """A step that waits: for a connection to the daemon."""

    timeout_s: float


Op: TypeAlias = Generator[Sent | Connect, Any, T]


class TierRun(NamedTuple):
    """`blocks` blocks in a row that `tier` holds."""

    tier: str
    blocks: int


@dataclass(frozen=True)
class Match:
    """The leading present run of a batch of keys, and what loading from each tier costs now."""

    blocks: int
    runs: tuple[TierRun, ...]
    estimates: Mapping[str, TierEstimate]


@dataclass(frozen=True)
class PutResult:
    """Objects stored by this call; there already; being written by another session; refused for lack of room."""

    stored: int = 0
    present: int = 0
    pending: int = 0
    refused: int = 0


@dataclass(frozen=True)
class FlushResult:
    """Objects that a lower tier has; that no tier has; that only RAM has."""

    durable: int
    missing: int
    failed: int


@dataclass(eq=False)
class Life:
    """One session with one daemon life. `holders`: leases, allocations and copies that may still touch its memory."""

    transport: Transport
    session: bytes
    boot_epoch: bytes
    domain: str
    memory: SharedMemory
    holders: int = 0
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self) -> None:
        with self.lock:
            self.holders += 1

    def drop(self) -> bool:
        """One holder less. True when the life has ended and this was its last."""
        with self.lock:
            self.holders -= 1
            return self.ended and self.holders == 0


class ClientCore:
    """State of a client. Subclasses connect a transport and run operations."""

    def __init__(
        self,
        socket_path: Path | str | None = None,
        *,
        engine_id: str = "",
        rank: int = 0,
        token: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        """
        Args:
            socket_path: the daemon's Unix socket; default as `forebay serve` chooses it.
            engine_id: sessions of one engine may share leases; rank: its rank in the engine.
            timeout_s: deadline of every call that names none.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: a call needs some time")
        self.path = Path(socket_path) if socket_path is not None else default_socket_path()
        self.engine_id = engine_id
        self.rank = rank
        self.timeout_s = timeout_s
        self.counters: Counter[str] = Counter()
        self._token = token or ""
        self._pid = os.getpid()
        self._life: Life | None = None
        self._closed = False
        self._to_settle: list[bytes] = []  # ended sessions whose copies have all stopped
        self._state = threading.Lock()
        self._retry_at_s = 0.0
        self._retry_wait_s = _RETRY_CONNECT_S
        self._last_error: ClientError | None = None

    # --- sessions -------------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        if self._closed:
            raise ClientClosed("this client was closed: open a new one")
        if os.getpid() != self._pid:
            raise UsedAfterFork("this client was made before fork(): open a new one in the child")

    @property
    def boot_epoch(self) -> bytes:
        """The daemon life this client talks to; b"" while there is none."""
        life = self._life
        return life.boot_epoch if life is not None and not life.transport.closed else b""

    @property
    def domain(self) -> str:
        """The trust domain that the daemon put this client in."""
        return self._life.domain if self._life is not None else ""

    def live(self, deadline_s: float) -> Op[Life]:
        """The session, opened anew when the last one has ended.

        After a failed attempt further ones fail at once for a while, so that a dead daemon costs an engine nothing.
        """
        self.check_usable()
        life = self._life
        if life is not None:
            if not life.transport.closed:
                return life
            self._end(life)
        if self._last_error is not None and time.monotonic() < self._retry_at_s:
            raise DaemonUnavailable(f"{self._last_error} (next attempt soon)")
        try:
            life = yield from self._introduce(deadline_s)
        except ClientError as exc:
            self._last_error = exc
            self._retry_at_s = time.monotonic() + self._retry_wait_s
            self._retry_wait_s = min(_MAX_RETRY_CONNECT_S, 2 * self._retry_wait_s)
            raise
        self._last_error = None
        self._retry_wait_s = _RETRY_CONNECT_S
        with self._state:
            other = self._life
            if other is not None and not other.transport.closed:
                spare, life = life, other  # another thread was quicker
                spare.transport.close()
                spare.memory.close()
            else:
                self._life = life
        return life

    def _introduce(self, deadline_s: float) -> Op[Life]:
        transport: Transport = yield Connect(max(1e-3, deadline_s - time.monotonic()))
        with self._state:
            settled, self._to_settle = self._to_settle, []
        try:
            hello = wire.Hello(
                wire.PROTOCOL_VERSION, wire.PROTOCOL_VERSION, self._token, self.engine_id, self.rank, settled
            )
            pending = transport.start(hello, deadline_s)
            reply: wire.HelloReply = yield Sent(transport, pending, deadline_s)
            if len(pending.descriptors) != 1:
                raise DaemonUnavailable("the daemon sent no board of generations")
            memory = SharedMemory(
                board=pending.descriptors[0],
                board_bytes=reply.board_bytes,
                extent_bytes=reply.extent_bytes,
                read_only=reply.read_only,
            )
        except BaseException:
            with self._state:
                self._to_settle.extend(settled)  # said again next time: settling twice is harmless
            transport.close()
            raise
        return Life(transport, reply.session, reply.boot_epoch, reply.domain, memory)

    def _end(self, life: Life) -> None:
        """A session has ended: unmap what it mapped as soon as its last copy ends."""
        with self._state:
            if self._life is life:
                self._life = None
        with life.lock:
            first, life.ended = not life.ended, True
            idle = life.holders == 0
        if first and idle:
            self.finished(life)

    def let_go(self, life: Life) -> None:
        """One holder less; the last one of a life that has ended unmaps it, without waiting for the next call."""
        if life.drop():
            self.finished(life)
        elif life.transport.closed:
            self._end(life)

    def finished(self, life: Life) -> None:
        """Nothing touches an ended life's memory any more."""
        life.memory.close()
        with self._state:
            self._to_settle.append(life.session)
            now = self._life
        if now is not None and not now.transport.closed:
            try:
                with self._state:
                    settled, self._to_settle = self._to_settle, []
                now.transport.start(wire.Settle(settled)).abandoned = True
            except ClientError:
                with self._state:
                    self._to_settle.extend(settled)

    def shut(self) -> None:
        """Close now. What still is leased ends with the session. Idempotent."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        life = self._life
        if life is not None:
            with life.lock:
                idle = life.holders == 0
            if idle and not life.transport.closed:
                # Unmapped and said so: the daemon need not keep anything for this process.
                extents = list(life.memory.extents)
                life.memory.close()
                try:
                    life.transport.start(wire.Unmapped(extents)).abandoned = True
                except ClientError:
                    pass
            life.transport.close()
            self._end(life)

    def deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def call(self, request: wire.Request[T], timeout_s: float | None = None) -> Op[T]:
        """One request that needs no namespace."""
        deadline_s = self.deadline(timeout_s)
        life = yield from self.live(deadline_s)
        reply: T = yield Sent(life.transport, life.transport.start(request, deadline_s), deadline_s)
        return reply

    def open_facts(self, facts: NamespaceFacts, deadline_s: float) -> Op[tuple[Life, wire.OpenReply]]:
        life = yield from self.live(deadline_s)
        reply: wire.OpenReply = yield Sent(
            life.transport, life.transport.start(wire.Open(facts.encode()), deadline_s), deadline_s
        )
        return life, reply

    def read_stats(self, *, timeout_s: float | None = None) -> Op[dict[str, Any]]:
        """What the daemon has done and holds, as nested numbers."""
        reply = yield from self.call(wire.Stats(), timeout_s)
        return reply.stats

    def map_extents(self, life: Life, places: npt.NDArray[np.void], deadline_s: float) -> Op[int]:
        """Get the extents that places lie in. Returns for how many leading places: one may be retired meanwhile."""
        unknown = life.memory.unknown(places)
        while unknown:
            pending = life.transport.start(wire.MapExtents(unknown[:64]), deadline_s)
            reply: wire.MapReply = yield Sent(life.transport, pending, deadline_s)
            if len(pending.descriptors) != len(reply.extents):
                raise DaemonUnavailable("the daemon sent fewer descriptors than extents")
            for number, descriptor in zip(reply.extents, pending.descriptors, strict=True):
                life.memory.add(number, descriptor)
            unknown = unknown[64:]
        missing = [number for number in distinct_extents(places) if number not in life.memory.extents]
        return int(np.isin(places["extent"], missing).argmax()) if missing else len(places)

    def drop_retired(self, life: Life, retired: list[int]) -> None:
        if retired:
            dropped = life.memory.drop(retired)
            life.transport.start(wire.Unmapped(dropped)).abandoned = True


class Lease:
    """Leading blocks of a run, kept from eviction, readable in place. Use as a context manager, plain or async.

    After `release` (or the block's end) its views raise ValueError when touched, instead of showing other blocks' bytes.
    An array or tensor made over a view doesn't keep the lease: copy what must outlive it.
    """

    def __init__(
        self,
        core: ClientCore,
        life: Life | None,
        number: int,
        places: npt.NDArray[np.void],
        layout: ObjectLayout,
        loaded: Sequence[TierRun],
    ) -> None:
        self._core = core
        self._life = life
        self._number = number
        self._layout = layout
        self._views: list[memoryview] | None = None
        self.places = places
        self.loaded = tuple(loaded)  # blocks that came from below RAM for this lease
        if life is not None:
            life.hold()

    def __len__(self) -> int:
        return len(self.places)

    @property
    def views(self) -> list[memoryview]:
        """Payload of each block, read-only, in RAM. Raises: ValueError after `release`."""
        if self._views is None:
            if self._life is None:
                if len(self.places):
                    raise ValueError("this lease was released")
                return []
            # The loops run in C: a third of the time of a comprehension, and views are half of what an acquire costs.
            offsets = self.places["offset"]
            starts = (offsets + np.uint64(self._layout.header_bytes)).tolist()
            ends = (offsets + np.uint64(self._layout.object_bytes)).tolist()
            extents = self._life.memory.extents
            distinct = distinct_extents(self.places)
            views: list[memoryview]
            if len(distinct) == 1:
                views = list(map(extents[distinct[0]].memory.__getitem__, map(slice, starts, ends)))
            else:
                memories = [extents[number].memory for number in self.places["extent"].tolist()]
                views = list(map(memoryview.__getitem__, memories, map(slice, starts, ends)))
            self._views = views
        return self._views

    def valid(self) -> bool:
        """Whether all blocks still lay where this lease says. Ask after copying: False means the copy is a miss."""
        life = self._life
        if life is None or life.transport.closed:
            return False
        return bool(life.memory.current(self.places).all())

    def verify(self) -> int:
        """How many leading blocks have the part checksums that their writer gave them. Reads every byte."""
        for i, (view, expected) in enumerate(zip(self.views, self.checksums(), strict=True)):
            for (start, end), checksum in zip(self._layout.part_ranges, expected, strict=True):
                if xxhash.xxh3_64_intdigest(view[start:end]) != checksum:
                    self._core.counters["corrupt"] += 1
                    return i
        return len(self)

    def checksums(self) -> list[list[int]]:
        """XXH3-64 of each part of each block, from the headers."""
        if self._life is None:
            return []
        where = self._layout.checksums_offset // 8 + np.arange(len(self._layout.part_bytes))
        found: list[list[int]] = self._life.memory.gather(self.places, where).tolist()
        return found

    @property
    def tiers(self) -> list[str]:
        """Where each block came from."""
        below = [run.tier for run in self.loaded for _ in range(run.blocks)]
        return ["ram"] * (len(self) - len(below)) + below

    def release(self) -> None:
        """Give the blocks back. Idempotent; sends and doesn't wait.

        Raises: BufferError: something still uses a view's buffer. The lease is held on; drop that and release again.
        """
        life = self._life
        if life is None:
            return
        deque(map(memoryview.release, self._views or ()), maxlen=0)
        self._life = self._views = None
        try:
            if not life.transport.closed:
                life.transport.start(wire.Release(self._number)).abandoned = True
        except ClientError:
            pass  # the session has ended, and its leases with it
        finally:
            self._core.let_go(life)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.release()


@dataclass
class Slot:
    """One object of an allocation. `view`: its payload, writable, or None where the status is not WRITABLE."""

    index: int
    status: SlotStatus
    view: memoryview | None


class AllocationCore:
    """Places for objects of a run that this client fills and then commits. Ends by commit, or by abort at the block's end."""

    def __init__(self, space: NamespaceCore, life: Life, reply: wire.AllocateReply, run: Run) -> None:
        self._space = space
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
        self._space.core.check_usable()
        self._close_views()
        wanted = set(range(len(self.slots)) if indices is None else indices)
        writing = [i for i, status in enumerate(self.statuses) if status == SlotStatus.WRITABLE and i in wanted]
        try:
            if life.transport.closed:
                raise EpochEnded("the session that gave these places has ended: nothing was stored")
            checksums = [self._run.layout.part_checksums(self._view(life, i)) for i in writing]
            self._run.write_headers(life.memory, self._places, np.array(writing, np.int64), checksums)
            written = bytearray(len(self.slots))
            for i in writing:
                written[i] = 1
            request = wire.Commit(self._reply.allocation, bytes(written))
            if self._reply.allocation:
                deadline_s = self._space.core.deadline(timeout_s)
                reply: wire.Done = yield Sent(life.transport, life.transport.start(request, deadline_s), deadline_s)
                stored = reply.count
            else:
                stored = 0
        finally:
            self._finish(life)
        return _tally(self._reply.statuses, stored)

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
        self._space.core.let_go(life)


def _tally(statuses: bytes, stored: int) -> PutResult:
    return PutResult(
        stored,
        statuses.count(SlotStatus.PRESENT),
        statuses.count(SlotStatus.PENDING),
        statuses.count(SlotStatus.REFUSED),
    )


@dataclass(frozen=True)
class Run:
    """Blocks of one run that are about to be written."""

    namespace: bytes
    layout: ObjectLayout
    keys: Sequence[bytes]
    parent: bytes | None  # key before the first; None at the root
    start_block: int
    words: npt.NDArray[np.uint32]  # [keys * block_tokens]

    def part(self, start: int, end: int) -> Run:
        tokens = self.layout.block_tokens
        return Run(
            self.namespace,
            self.layout,
            self.keys[start:end],
            self.keys[start - 1] if start else self.parent,
            self.start_block + start,
            self.words[start * tokens : end * tokens],
        )

    def headers(self, positions: npt.NDArray[np.int64], checksums: Sequence[Sequence[int]]) -> npt.NDArray[np.uint8]:
        """Headers of the blocks at `positions`, uint8 [positions, header_bytes]."""
        all_checksums = np.zeros((len(self.keys), len(self.layout.part_bytes)), np.uint64)
        if len(positions):
            all_checksums[positions] = checksums
        out = np.empty((len(self.keys), self.layout.header_bytes), np.uint8)
        self.layout.write_headers(
            out,
            keys=self.keys,
            parent=self.parent,
            namespace=self.namespace,
            position=self.start_block * self.layout.block_tokens,
            token_ids=self.words,
            checksums=all_checksums,
            created_ns=time.time_ns(),
        )
        return out[positions]

    def write_headers(
        self,
        memory: SharedMemory,
        places: npt.NDArray[np.void],
        positions: npt.NDArray[np.int64],
        checksums: Sequence[Sequence[int]],
    ) -> None:
        if len(positions):
            headers = self.headers(positions, checksums)
            memory.scatter(places[positions], headers.view(np.uint64))


class NamespaceCore:
    """Operations on one opened namespace. It survives a restart of the daemon by opening itself again."""

    def __init__(self, core: ClientCore, facts: NamespaceFacts, life: Life, reply: wire.OpenReply) -> None:
        self.core = core
        self.facts = facts
        self.id = reply.namespace
        self._opened: tuple[Life, int] | None = (life, reply.handle)
        self._layouts = tuple(ObjectLayout.of(facts, group) for group in range(len(facts.groups)))

    def layout(self, group: int = 0) -> ObjectLayout:
        """Sizes and offsets of a group's objects."""
        if not 0 <= group < len(self._layouts):
            raise ValueError(f"no group {group}: the namespace declares {len(self._layouts)}")
        return self._layouts[group]

    def keys(
        self, token_ids: TokenIds, extras: Mapping[int, bytes] | None = None, *, parent: bytes | None = None
    ) -> list[bytes]:
        """Keys of the full blocks of a prompt."""
        return block_keys(
            self.id,
            token_ids,
            self.facts.block_tokens,
            algorithm=self.facts.hash_algorithm,
            extras=extras,
            parent=parent,
        )

    def _live(self, deadline_s: float) -> Op[tuple[Life, int]]:
        """The session, and the handle of this namespace in it."""
        life = yield from self.core.live(deadline_s)
        opened = self._opened
        if opened is None or opened[0] is not life:
            life, reply = yield from self.core.open_facts(self.facts, deadline_s)
            if reply.namespace != self.id:
                # Another tenant or secret: keys made so far mean nothing there.
                raise EpochEnded("the daemon gives this namespace another id now: open it again and make new keys")
            self._opened = opened = (life, reply.handle)
        return opened

    def _call(self, make: Callable[[int], wire.Request[T]], timeout_s: float | None) -> Op[T]:
        """One request on this namespace's handle."""
        deadline_s = self.core.deadline(timeout_s)
        life, handle = yield from self._live(deadline_s)
        reply: T = yield Sent(life.transport, life.transport.start(make(handle), deadline_s), deadline_s)
        return reply

    # --- reading ----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[Match]:
        """The leading run that any tier holds. May count past a block deleted or damaged in its middle; `acquire` won't."""
        flat = b"".join(keys)
        reply = yield from self._call(lambda handle: wire.Match(handle, group, flat), timeout_s)
        runs = tuple(TierRun(tier, blocks) for tier, blocks in reply.runs)
        estimates = {name: TierEstimate(*values) for name, values in reply.estimates.items()}
        return Match(sum(run.blocks for run in runs), runs, estimates)

    def lease(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds | None = None,
        group: int = 0,
        *,
        wait_s: float = 0.0,
        shares: int = 1,
        timeout_s: float | None = None,
    ) -> Op[Lease]:
        """Lease the leading run that is in RAM, or gets there from lower tiers within `wait_s`.

        Keys, namespace and (if given) token ids are compared with every block's header: the first that differs ends the run.
        An empty lease is a miss.
        """
        flat = b"".join(keys)
        layout = self.layout(group)
        words = token_words(token_ids) if token_ids is not None else None
        if words is not None and len(words) < len(keys) * layout.block_tokens:
            raise ValueError(f"{len(keys)} blocks have {len(keys) * layout.block_tokens} tokens, not {len(words)}")
        deadline_s = self.core.deadline(timeout_s)
        life, handle = yield from self._live(deadline_s)
        request = wire.Acquire(handle, group, flat, int(wait_s * 1000), shares)
        reply: wire.AcquireReply = yield Sent(life.transport, life.transport.start(request, deadline_s), deadline_s)
        return (yield from self._open_lease(life, reply, flat, layout, words, deadline_s))

    def _open_lease(
        self,
        life: Life,
        reply: wire.AcquireReply,
        flat: bytes,
        layout: ObjectLayout,
        words: npt.NDArray[np.uint32] | None,
        deadline_s: float,
    ) -> Op[Lease]:
        places = read_places(reply.locations)
        loaded = [TierRun(tier, blocks) for tier, blocks in reply.loaded]
        self.core.drop_retired(life, reply.retired)
        if not reply.lease:
            return Lease(self.core, None, 0, places, layout, loaded)
        lease = Lease(self.core, life, reply.lease, places, layout, loaded)
        try:
            mapped = yield from self.core.map_extents(life, places, deadline_s)
            life.memory.map(places[:mapped], writable=False)
            good = life.memory.leading_good(places[:mapped], flat, self.id, layout, words)
            if good < len(places):
                self.core.counters["doubted"] += len(places) - good
                lease.places = places[:good]
        except BaseException:
            lease.release()
            raise
        return lease

    def copy_payloads(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[WritableBuffer] | WritableBuffer,
        token_ids: TokenIds | None = None,
        group: int = 0,
        *,
        verify: bool = True,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Op[int]:
        """Copy payloads of the leading run into `buffers`: one buffer a block, or one for all, side by side.

        Returns: how many leading blocks were copied, and with `verify` hold the checksums of their writer. Bytes of later
        buffers are undefined.
        """
        layout = self.layout(group)
        targets = targets_of(buffers, len(keys), layout.payload_bytes)
        lease = yield from self.lease(keys, token_ids, group, wait_s=wait_s, timeout_s=timeout_s)
        with lease:
            life = lease._life
            if life is None:
                return 0
            checksums = lease.checksums() if verify else None
            copied = copy_out(life.memory, layout, lease.places, targets, checksums)
            if copied < len(lease):
                self.core.counters["corrupt"] += 1
            current = life.memory.current(lease.places[:copied])
            if life.transport.closed or not current.all():
                self.core.counters["changed"] += 1
                return 0 if life.transport.closed else int(current.argmin())
            return copied

    def start_loading(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[int]:
        """Ask the daemon to bring the leading run into RAM. Returns how many blocks are to be loaded."""
        flat = b"".join(keys)
        wait_ms = int(1000 * (self.core.timeout_s if timeout_s is None else timeout_s))
        reply = yield from self._call(lambda handle: wire.Prefetch(handle, group, flat, wait_ms), timeout_s)
        return reply.loading

    # --- writing ----------------------------------------------------------------------------------------------------

    def _run(
        self, keys: Sequence[bytes], token_ids: TokenIds, parent: bytes | None, start_block: int, group: int
    ) -> Run:
        layout = self.layout(group)
        words = token_words(token_ids)
        if len(words) < len(keys) * layout.block_tokens:
            raise ValueError(f"{len(keys)} blocks have {len(keys) * layout.block_tokens} tokens, not {len(words)}")
        return Run(self.id, layout, keys, parent, start_block, words[: len(keys) * layout.block_tokens])

    def _prepare_places(self, life: Life, reply: wire.AllocateReply, deadline_s: float) -> Op[npt.NDArray[np.void]]:
        """Map the places of an allocation for writing."""
        self.core.drop_retired(life, reply.retired)
        places = read_places(reply.locations)
        if len(places):
            writable = places[np.frombuffer(reply.statuses, np.uint8) == SlotStatus.WRITABLE]
            if (yield from self.core.map_extents(life, writable, deadline_s)) < len(writable):
                raise DaemonUnavailable("the daemon gave places that it does not share")
            if not life.memory.read_only:
                life.memory.map(writable, writable=True)
        return places

    def reserve(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Op[tuple[Life, wire.AllocateReply, Run]]:
        """Places for blocks that the caller fills itself."""
        run = self._run(keys, token_ids, parent, start_block, group)
        deadline_s = self.core.deadline(timeout_s)
        life, handle = yield from self._live(deadline_s)
        if life.memory.read_only:
            raise PermissionError("this trust domain is read-only for its clients: use put, which writes by the socket")
        reply: wire.AllocateReply = yield Sent(
            life.transport, _ask_places(life, handle, run, group, deadline_s), deadline_s
        )
        try:
            yield from self._prepare_places(life, reply, deadline_s)
        except BaseException:
            if reply.allocation and not life.transport.closed:
                life.transport.start(wire.Abort(reply.allocation)).abandoned = True
            raise
        return life, reply, run

    def store(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        payloads: Sequence[Buffer],
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Op[PutResult]:
        """Store a run of blocks: one copy into shared memory, checksummed while warm.

        Args:
            payloads: one buffer of layout.payload_bytes for each key.
            parent: key of the block before the first (None at the root); start_block: index of the first block.
        """
        run = self._run(keys, token_ids, parent, start_block, group)
        if len(payloads) != len(keys):
            raise ValueError(f"{len(keys)} keys need as many payloads, not {len(payloads)}")
        for payload in payloads:
            size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
            if size != run.layout.payload_bytes:
                raise ValueError(f"a payload of this namespace has {run.layout.payload_bytes} bytes, not {size}")
        deadline_s = self.core.deadline(timeout_s)
        life, handle = yield from self._live(deadline_s)
        step = max(1, min(_CHUNK_OBJECTS, _TOUCH_BYTES // max(1, run.layout.object_bytes)))
        chunks = [(start, run.part(start, start + step)) for start in range(0, len(keys), step)]
        asked: list[Pending] = []
        commits: list[Pending] = []
        statuses: list[bytes] = []
        life.hold()
        unfinished: dict[int, wire.AllocateReply] = {}
        try:
            for number, (start, chunk) in enumerate(chunks):
                # The next chunks' places are asked for before this one is copied: making room costs no waiting.
                while len(asked) < min(number + _ASKED_AHEAD, len(chunks)):
                    asked.append(_ask_places(life, handle, chunks[len(asked)][1], group, deadline_s))
                reply: wire.AllocateReply = yield Sent(life.transport, asked[number], deadline_s)
                statuses.append(reply.statuses)
                if not reply.allocation:
                    continue
                unfinished[reply.allocation] = reply
                places = yield from self._prepare_places(life, reply, deadline_s)
                written = reply.statuses.translate(_WRITTEN)
                writable = np.flatnonzero(np.frombuffer(written, np.uint8)).tolist()
                if life.memory.read_only:
                    yield from self._write_by_socket(life, reply, chunk, writable, payloads, start, deadline_s)
                else:
                    positions = np.array(writable, np.int64)
                    sources = [payloads[start + i] for i in writable]
                    checksums = copy_in(life.memory, chunk.layout, places[positions], sources)
                    chunk.write_headers(life.memory, places, positions, checksums)
                commits.append(life.transport.start(wire.Commit(reply.allocation, written), deadline_s))
                del unfinished[reply.allocation]
            stored = 0
            for commit in commits:
                done: wire.Done = yield Sent(life.transport, commit, deadline_s)
                stored += done.count
        finally:
            for pending in asked[len(statuses) :]:
                pending.abandoned = True
                if pending.done and pending.error is None and pending.reply.allocation:
                    unfinished[pending.reply.allocation] = pending.reply
            for allocation in unfinished:
                if not life.transport.closed:
                    life.transport.start(wire.Abort(allocation)).abandoned = True
            self.core.let_go(life)
        return _tally(b"".join(statuses), stored)

    def _write_by_socket(
        self,
        life: Life,
        reply: wire.AllocateReply,
        chunk: Run,
        writable: Sequence[int],
        payloads: Sequence[Buffer],
        start: int,
        deadline_s: float,
    ) -> Op[None]:
        """For read-only domains: the daemon copies what this client may not map writable."""
        checksums = [chunk.layout.part_checksums(payloads[start + i]) for i in writable]
        headers = chunk.headers(np.array(writable, np.int64), checksums)
        for header, i in zip(headers, writable, strict=True):
            data = header.tobytes() + bytes(payloads[start + i])
            for at in range(0, len(data), _TOUCH_BYTES):
                request = wire.Write(reply.allocation, i, at, data[at : at + _TOUCH_BYTES])
                yield Sent(life.transport, life.transport.start(request, deadline_s), deadline_s)

    # --- keeping, forgetting, telling ---------------------------------------------------------------------------------

    def keep(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[int]:
        """Keep blocks in RAM until `unpin`, once for each call. Returns how many of the keys are there."""
        flat = b"".join(keys)
        return (yield from self._call(lambda handle: wire.Pin(handle, group, flat), timeout_s)).count

    def unkeep(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[int]:
        """Undo one `pin`. Returns how many of the keys were pinned."""
        flat = b"".join(keys)
        return (yield from self._call(lambda handle: wire.Unpin(handle, group, flat), timeout_s)).count

    def make_durable(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[FlushResult]:
        """Wait until the blocks are in a tier below RAM."""
        flat = b"".join(keys)
        wait_ms = int(1000 * (self.core.timeout_s if timeout_s is None else timeout_s))
        reply = yield from self._call(lambda handle: wire.Flush(handle, group, flat, wait_ms), timeout_s)
        return FlushResult(reply.durable, reply.missing, reply.failed)

    def forget(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[int]:
        """Delete blocks on all tiers. Returns how many were found."""
        flat = b"".join(keys)
        return (yield from self._call(lambda handle: wire.Delete(handle, group, flat), timeout_s)).count

    def ask_why(
        self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None
    ) -> Op[list[dict[str, Any]]]:
        """For each key: which tiers hold the block, or why none does."""
        flat = b"".join(keys)
        return (yield from self._call(lambda handle: wire.Explain(handle, group, flat), timeout_s)).blocks

    def tell(self, kind: str, /, *, timeout_s: float | None = None, **values: float) -> Op[None]:
        """Report numbers the engine measured, e.g. tell("load", bytes=..., seconds=...)."""
        deadline_s = self.core.deadline(timeout_s)
        life = yield from self.core.live(deadline_s)
        yield Sent(life.transport, life.transport.start(wire.Report(kind, values), deadline_s), deadline_s)


def _ask_places(life: Life, handle: int, run: Run, group: int, deadline_s: float) -> Pending:
    return life.transport.start(wire.Allocate(handle, group, b"".join(run.keys), run.parent or b""), deadline_s)
