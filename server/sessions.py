"""Sessions and what they hold: namespaces, leases, allocations; and the orphans that a session leaves when it ends.

Covers liveness: memory that a vanished client may still touch is kept out of use until its process is gone (pidfd) or has
said on a new session that its copies have stopped. Knows nothing of frames or verbs. Always true: a lease or allocation has
one owner, a session or an orphan; a lease never ends by time alone, its session does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.kvstore.errors import UnknownHandle
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.index import RowArray, Table
from forebay.kvstore.objects import ObjectLayout
from forebay.server.auth import LOCAL, Principal
from forebay.server.right_of_way import Turn
from forebay.tiers.ram import RamDomain

log = logging.getLogger("forebay.sessions")


@dataclass(frozen=True)
class Namespace:
    """An opened namespace: layouts and tables by group."""

    id: bytes
    facts: NamespaceFacts
    layouts: tuple[ObjectLayout, ...]
    tables: tuple[Table, ...]


@dataclass
class Lease:
    """Rows kept from eviction for readers."""

    number: int
    table: Table
    rows: RowArray
    shares: int
    deadline_s: float


@dataclass
class Allocation:
    """Places given to a writer, by their position in its request; ABSENT where it writes nothing."""

    number: int
    namespace: Namespace
    group: int
    rows: RowArray
    keys: list[bytes]
    parent: bytes
    parts: int
    size_bytes: int
    deadline_s: float
    purged: bool = False  # since it was made, a purge came over its namespace: it is not shown
    filling: bool = False  # its payload is on its way from the network, or it is being committed
    turn: Turn | None = None  # to copy, where stores give way to loads


@dataclass
class Session:
    """One engine process's session. `connection` is what `end` closes."""

    id: bytes
    engine_id: str
    rank: int
    pid: int
    uid: int
    pidfd: int | None
    domain: RamDomain
    close: Callable[[], None]
    principal: Principal = LOCAL
    remote: bool = False  # over TCP: it maps no memory, so its end settles all that it held
    started_s: float = field(default_factory=time.monotonic)
    handles: dict[int, Namespace] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)  # leases of other sessions, read here by `attach`
    allocations: dict[int, Allocation] = field(default_factory=dict)
    leased_blocks: int = 0
    uncommitted_bytes: int = 0
    last_handle: int = 0
    prefetches: int = 0  # that run now
    retired_told: int = 0  # how many of the domain's retired extents this session was told of

    @property
    def engine(self) -> Hashable:
        """Who copies: the process on this machine; from elsewhere, where one engine has several sessions, who it says it is."""
        return ("remote", self.principal.name, self.engine_id) if self.remote else self.pid

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass
class Orphan:
    """What an ended session's process may still touch."""

    session: bytes
    pid: int
    uid: int
    pidfd: int | None
    domain: RamDomain
    leases: list[Lease]
    detached: RowArray  # rows of its allocations
    lease_bytes: int
    detached_bytes: int
    extents: list[int]  # that it had mapped


@dataclass
class LivenessCounters:
    """What happened to sessions, since start."""

    sessions: int = 0
    ended_by_deadline: int = 0
    orphaned: int = 0
    settled_by_exit: int = 0
    settled_by_client: int = 0


class Registry:
    """All sessions, leases and orphans of a daemon. Event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.sessions: dict[bytes, Session] = {}
        self.lease_owner: dict[int, Session] = {}
        self.orphans: dict[bytes, Orphan] = {}
        self.counters = LivenessCounters()
        self._last_number = 0

    def number(self) -> int:
        self._last_number += 1
        return self._last_number

    def add(self, session: Session) -> None:
        self.sessions[session.id] = session
        self.counters.sessions += 1
        if session.pidfd is not None:
            # A forked child may keep the socket open after its parent's death: the process decides, not the socket.
            self._loop.add_reader(session.pidfd, session.close)

    # --- leases -------------------------------------------------------------------------------------------------

    def lease(self, session: Session, table: Table, rows: RowArray, shares: int, deadline_s: float) -> Lease:
        """File rows that are leased in the tier already under a new id of this session."""
        lease = Lease(self.number(), table, rows, shares, deadline_s)
        session.leases[lease.number] = lease
        session.leased_blocks += len(rows)
        self.lease_owner[lease.number] = session
        return lease

    def join(self, session: Session, number: int) -> Lease:
        """Another session of the same engine and domain reads under a lease.

        Raises: UnknownHandle.
        """
        owner = self.lease_owner.get(number)
        if owner is None or owner.engine_id != session.engine_id or owner.domain is not session.domain:
            raise UnknownHandle(f"no lease {number} of engine {session.engine_id!r} in this trust domain")
        session.joined.add(number)
        return owner.leases[number]

    def release(self, session: Session, number: int) -> int:
        """Give back one share. Returns the shares left. Raises: UnknownHandle."""
        owner = self.lease_owner.get(number)
        joined = number in session.joined
        session.joined.discard(number)
        if owner is None or (owner is not session and not joined):
            raise UnknownHandle(f"this session holds no share of lease {number}")
        lease = owner.leases[number]
        lease.shares -= 1
        if lease.shares <= 0:
            self._drop_lease(owner, lease)
        return max(0, lease.shares)

    def _drop_lease(self, owner: Session, lease: Lease) -> None:
        del owner.leases[lease.number]
        del self.lease_owner[lease.number]
        owner.leased_blocks -= len(lease.rows)
        owner.domain.unlease(lease.rows)

    # --- ends ---------------------------------------------------------------------------------------------------

    def overdue(self, now_s: float) -> list[Session]:
        """Sessions that hold a lease or an allocation past its deadline."""
        # Filed in the order of their deadlines, so the first of each tells: a session may hold 10^5 leases.
        late = []
        for session in self.sessions.values():
            lease, allocation = (
                next(iter(session.leases.values()), None),
                next(iter(session.allocations.values()), None),
            )
            if (lease and lease.deadline_s < now_s) or (allocation and allocation.deadline_s < now_s):
                late.append(session)
        return late

    def end(self, session: Session) -> None:
        """The session's socket has closed. Free what it held, or keep it as an orphan while its process lives."""
        del self.sessions[session.id]
        if session.pidfd is not None:
            self._loop.remove_reader(session.pidfd)
        for lease in session.leases.values():
            del self.lease_owner[lease.number]
        detached = []
        for allocation in session.allocations.values():
            for row in allocation.rows[allocation.rows >= 0].tolist():
                session.domain.detach(row)
                detached.append(row)
        tier, domain = session.domain.tier, session.domain
        stride = tier.class_of_table
        orphan = Orphan(
            session=session.id,
            pid=session.pid,
            uid=session.uid,
            pidfd=session.pidfd,
            domain=domain,
            leases=list(session.leases.values()),
            detached=np.array(detached, np.int64),
            lease_bytes=sum(len(held.rows) * stride[held.table.number].stride for held in session.leases.values()),
            detached_bytes=sum(stride[tier.index.table.item(row)].stride for row in detached),
            extents=[extent.number for extent in domain.extents.values() if session in extent.mapped_by]
            + [number for number, extent in tier.retired.items() if session in extent.mapped_by],
        )
        self._transfer_mappings(session, orphan.session)
        if session.remote or self._process_is_gone(session.pidfd):
            self._settle(orphan)
            session.leases.clear()  # whoever still sends from them, or fills places, finds nothing to give back
            session.allocations.clear()
            return
        if not (orphan.leases or detached or orphan.extents):
            self._close_pidfd(orphan)
            return
        if orphan.leases or detached:
            self.counters.orphaned += 1
            log.warning(
                "session ended with copies that may go on: its memory is quarantined",
                extra={"pid": session.pid, "quarantined_bytes": orphan.lease_bytes + orphan.detached_bytes},
            )
        self.orphans[orphan.session] = orphan
        if orphan.pidfd is not None:
            self._loop.add_reader(orphan.pidfd, self._process_exited, orphan)

    def _transfer_mappings(self, session: Session, orphan: bytes) -> None:
        for extent in (*session.domain.extents.values(), *session.domain.tier.retired.values()):
            if session in extent.mapped_by:
                extent.mapped_by.discard(session)
                extent.mapped_by.add(orphan)

    @staticmethod
    def _process_is_gone(pidfd: int | None) -> bool:
        if pidfd is None:
            return False
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def _process_exited(self, orphan: Orphan) -> None:
        self._loop.remove_reader(orphan.pidfd)  # type: ignore[arg-type]
        if self.orphans.pop(orphan.session, None) is not None:
            self.counters.settled_by_exit += bool(orphan.leases or len(orphan.detached))
            self._settle(orphan)

    def settle(self, session: Session, previous: list[bytes]) -> int:
        """A process says that copies of its earlier sessions have stopped. Returns how many orphans ended by it."""
        count = 0
        for ended in previous:
            orphan = self.orphans.get(ended)
            if orphan is None or orphan.pid != session.pid or orphan.uid != session.uid:
                continue  # settled already, or not this process's to settle
            del self.orphans[ended]
            if orphan.pidfd is not None:
                self._loop.remove_reader(orphan.pidfd)
            self.counters.settled_by_client += bool(orphan.leases or len(orphan.detached))
            self._settle(orphan)
            count += 1
        return count

    def _settle(self, orphan: Orphan) -> None:
        """Nothing can touch the orphan's memory any more."""
        for lease in orphan.leases:
            orphan.domain.unlease(lease.rows)
        for row in orphan.detached.tolist():
            orphan.domain.free_detached(row)
        for number in orphan.extents:
            extent = orphan.domain.extents.get(number)
            if extent is not None:
                extent.mapped_by.discard(orphan.session)
            orphan.domain.tier.unmapped(number, orphan.session)
        self._close_pidfd(orphan)

    @staticmethod
    def _close_pidfd(orphan: Orphan) -> None:
        if orphan.pidfd is not None:
            os.close(orphan.pidfd)
            orphan.pidfd = None

    def close(self) -> None:
        """The daemon ends, and its memory with it: watch no process any more."""
        for orphan in self.orphans.values():
            if orphan.pidfd is not None:
                self._loop.remove_reader(orphan.pidfd)
            self._close_pidfd(orphan)
        self.orphans.clear()

    def orphans_of(self, pid: int, *, besides: Sequence[bytes] = ()) -> int:
        """How many orphans a process has that it doesn't settle by naming them in `besides`."""
        named = frozenset(besides)
        return sum(orphan.pid == pid and orphan.session not in named for orphan in self.orphans.values())

    def quarantined_bytes(self, pid: int | None = None) -> int:
        """Bytes that orphans (of one process, if given) keep out of use."""
        return sum(
            orphan.lease_bytes + orphan.detached_bytes
            for orphan in self.orphans.values()
            if pid is None or orphan.pid == pid
        )

    def uncommitted_bytes_of(self, tenant: str) -> int:
        """Bytes that all sessions of a tenant hold allocated and not yet committed."""
        return sum(each.uncommitted_bytes for each in self.sessions.values() if each.principal.tenant == tenant)

    def stats(self) -> dict[str, Any]:
        return {
            "open": len(self.sessions),
            "leases": len(self.lease_owner),
            "leased_blocks": sum(session.leased_blocks for session in self.sessions.values()),
            "uncommitted_bytes": sum(session.uncommitted_bytes for session in self.sessions.values()),
            "orphans": len(self.orphans),
            "quarantined_bytes": self.quarantined_bytes(),
            "opened_total": self.counters.sessions,
            "ended_by_deadline_total": self.counters.ended_by_deadline,
            "orphaned_total": self.counters.orphaned,
            "settled_by_exit_total": self.counters.settled_by_exit,
            "settled_by_client_total": self.counters.settled_by_client,
        }
