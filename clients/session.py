"""Sessions: connecting, introducing, reconnecting after the daemon's end, and what outlives a session.

Covers the client's state and the shape of operations: generators that yield what must be waited for. clients/blocking.py runs
them on a blocking transport, clients/aio.py on the event loop; neither repeats any of this. Always true: nothing found by an
operation outlives the daemon life it came from; memory of an ended life is unmapped when its last holder lets go, and only
then is the daemon told that its copies have stopped.
"""

from __future__ import annotations

import mmap
import os
import ssl
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from forebay.clients.copying import CopyThreads, default_copy_threads
from forebay.clients.memory import MapWatcher, NoMemory, SharedMemory, distinct_extents
from forebay.clients.network import Network
from forebay.clients.transport import Pending, Transport
from forebay.kvstore import wire
from forebay.kvstore.address import TcpAddress, default_socket_path, parse_address
from forebay.kvstore.errors import ClientClosed, ClientError, DaemonUnavailable, UsedAfterFork
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.pages import address_of, back_with_memory
from forebay.kvstore.secretfile import token_from_environment
from forebay.kvstore.tls import client_context

T = TypeVar("T")
_RETRY_CONNECT_S: Final = 0.05
_MAX_RETRY_CONNECT_S: Final = 1.0
_SPARE_BYTES: Final = 512 << 20  # a buffer up to this size is kept for the next lease
MAX_LANES: Final = 4  # connections of one client that carry payload at the same time


class Sent(NamedTuple):
    """A step that waits: for the reply of a request that was sent."""

    transport: Transport
    pending: Pending
    deadline_s: float


class Connect(NamedTuple):
    """A step that waits: for a connection to the daemon."""

    timeout_s: float


class Turn(NamedTuple):
    """A step that waits: until one more connection may carry payload. `ClientCore.give_lane` ends the turn."""

    deadline_s: float


Op: TypeAlias = Generator[Sent | Connect | Turn, Any, T]


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


@dataclass(eq=False)
class Lane:
    """A connection of its own for payload, used by one operation at a time, so that a long transfer holds up nothing else."""

    life: Life
    handles: dict[bytes, int] = field(default_factory=dict)  # by namespace id

    @property
    def transport(self) -> Transport:
        return self.life.transport


class Spare:
    """Memory for copied leases: the last one's is kept, since fresh memory is slow to come by."""

    def __init__(self) -> None:
        self._kept: mmap.mmap | None = None
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> mmap.mmap:
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and len(kept) >= size_bytes:
            return kept
        fresh = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        back_with_memory(address_of(memoryview(fresh)), len(fresh))
        return fresh

    def give(self, memory: mmap.mmap) -> None:
        """Nothing looks at it any more."""
        if len(memory) <= _SPARE_BYTES:
            self._kept = memory


class Turns(Protocol):
    """A semaphore of threads or of an event loop."""

    def release(self) -> None: ...


class ClientCore:
    """State of a client. Subclasses connect a transport and run operations."""

    _turns: Turns  # of operations that move payload over TCP

    def __init__(
        self,
        socket_path: Path | str | None = None,
        *,
        engine_id: str = "",
        rank: int = 0,
        token: str | None = None,
        tls: bool | str | Path | ssl.SSLContext | None = None,
        timeout_s: float = 5.0,
        copy_threads: int | None = None,
        watcher: MapWatcher | None = None,
    ) -> None:
        """
        Args:
            socket_path: the daemon's Unix socket, or "tcp://host:port"; default as `forebay serve` chooses it.
            token: credentials; None takes FOREBAY_TOKEN, or what the file FOREBAY_TOKEN_FILE holds.
            engine_id: sessions of one engine may share leases; rank: its rank in the engine.
            tls: over TCP: True trusts the system's authorities, a path those of a PEM file; or a context of your own.
            timeout_s: deadline of every call that names none.
            copy_threads: threads that share the copying of large blocks, the caller's included; default 2.
            watcher: told of shared memory as it is mapped and unmapped, such as to register it with a GPU.
        Raises: ValueError: no such address, or TLS on a Unix socket; OSError: the PEM file can't be read.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}: a call needs some time")
        self.address = parse_address(socket_path) if socket_path is not None else default_socket_path()
        self.remote = isinstance(self.address, TcpAddress)
        if tls and not self.remote:
            raise ValueError("TLS is for TCP: a Unix socket leaves this machine by no wire")
        self.tls = client_context(tls) if tls else None
        self.engine_id = engine_id
        self.rank = rank
        self.timeout_s = timeout_s
        self.copy_threads = CopyThreads(default_copy_threads() if copy_threads is None else copy_threads)
        self.counters: Counter[str] = Counter()
        self._watcher = watcher
        self._token = token_from_environment() if token is None else token
        self._pid = os.getpid()
        self._life: Life | None = None
        self._closed = False
        self._to_settle: list[bytes] = []  # ended sessions whose copies have all stopped
        self._state = threading.Lock()
        self._retry_at_s = 0.0
        self._retry_wait_s = _RETRY_CONNECT_S
        self._last_error: ClientError | None = None
        self._lanes: list[Lane] = []  # idle
        self.spare = Spare()
        self.network = Network()  # as measured over TCP

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
            if not life.transport.hung_up():
                return life
            life.transport.close()
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
            memory = self._map_board(pending, reply)
        except BaseException:
            with self._state:
                self._to_settle.extend(settled)  # said again next time: settling twice is harmless
            transport.close()
            raise
        return Life(transport, reply.session, reply.boot_epoch, reply.domain, memory)

    def _map_board(self, pending: Pending, reply: wire.HelloReply) -> SharedMemory:
        if self.remote:
            return NoMemory()
        if len(pending.descriptors) != 1:
            raise DaemonUnavailable("the daemon sent no board of generations")
        return SharedMemory(
            board=pending.descriptors[0],
            board_bytes=reply.board_bytes,
            extent_bytes=reply.extent_bytes,
            read_only=reply.read_only,
            watcher=self._watcher,
        )

    def take_lane(self, deadline_s: float) -> Op[Lane]:
        """A connection for payload: an idle one, or a new one. Give it back by `give_lane`."""
        yield Turn(deadline_s)
        try:
            with self._state:
                while self._lanes:
                    lane = self._lanes.pop()
                    if not lane.transport.closed and lane.life.boot_epoch == self.boot_epoch:
                        return lane
                    lane.transport.close()
            return Lane((yield from self._introduce(deadline_s)))
        except BaseException:
            self._turns.release()
            raise

    def give_lane(self, lane: Lane, *, clean: bool) -> None:
        """`clean`: nothing is under way on it. One that isn't is closed, which ends at the daemon whatever it was doing.

        The idle ones go with it: if the daemon has ended, so have they, and each would fail a call of its own.
        """
        self._turns.release()
        ended = [lane]
        with self._state:
            if clean and not self._closed and not lane.transport.closed:
                self._lanes.append(lane)
                return
            ended += self._lanes
            self._lanes = []
        for each in ended:
            each.transport.close()

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
        if self.remote:
            return  # the daemon has settled all at the session's end: nothing was shared
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
        self.copy_threads.close()
        with self._state:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.transport.close()
        life = self._life
        if life is not None:
            with life.lock:
                idle = life.holders == 0
            if idle and not life.transport.closed and not self.remote:
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

    def forget_all(
        self,
        namespaces: Sequence[bytes] = (),
        *,
        older_than_s: float = 0.0,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> Op[tuple[int, list[str]]]:
        """Forget whole namespaces, by their ids, on all tiers; none given: everything of this client's tenant.

        Args:
            older_than_s: only what was stored longer ago.
            tenant: another one's, for operators.
        Returns: objects forgotten, and the tiers that can't list what they hold: there only what RAM knew is gone.
        """
        request = wire.Purge(list(namespaces), int(1000 * older_than_s), tenant)
        reply = yield from self.call(request, timeout_s)
        return reply.objects, reply.unlisted

    def map_extents(self, life: Life, places: npt.NDArray[np.void], deadline_s: float) -> Op[int]:
        """Get the extents that places lie in. Returns for how many leading places: one may be retired meanwhile."""
        unknown = life.memory.unknown(places)
        if not unknown:
            return len(places)
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
