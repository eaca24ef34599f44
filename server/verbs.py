"""What each verb of the session protocol does.

Covers one session's requests, from `hello` to its end. Frames and sockets are server/door.py's, liveness is
server/sessions.py's, memory is tiers/ram.py's, tiers below RAM are the store's. Always true: every wait has the request's own
deadline; a long batch gives the loop back after each chunk; a request that fails or is cancelled leaves nothing held.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from forebay.kvstore import wire
from forebay.kvstore.errors import (
    BadRequest,
    Draining,
    NotIntroduced,
    OverLimit,
    UnknownHandle,
    VersionMismatch,
)
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.index import ABSENT, RowArray, Table
from forebay.kvstore.keys import KEY_BYTES
from forebay.server.blocks import make_namespace
from forebay.server.door import Answer, Connection
from forebay.server.inline import LOCAL_ONLY, REMOTE_ONLY, InlineVerbs, finished, refuse
from forebay.server.purge import purge, scope_of
from forebay.server.sessions import Allocation, Lease, Namespace, Session
from forebay.tiers.extents import Extent

if TYPE_CHECKING:
    from forebay.server.daemon import Daemon

log = logging.getLogger("forebay.verbs")

# Keys looked up before the loop gets its turn: at most half a millisecond, where every key costs a look-up of its own.
CHUNK: Final = 1024
ALLOCATE_CHUNK: Final = 128  # an object that must evict another costs about 5 us
WRITE_THROUGH_S: Final = 2.0  # a slow tier must not hold a writer for longer
MAX_HANDLES: Final = 4096
MAX_ENGINE_ID: Final = 256
MAX_ORPHANS: Final = 64  # ended sessions of one process that still map memory: each costs a descriptor
MAX_PREFETCHES: Final = 64  # of one session at once; their keys are kept while they run
MAX_WAIT_S: Final = 3600.0


def _first_blocks(runs: Sequence[tuple[str, int]], count: int, ram: str) -> list[tuple[str, int]]:
    """The first `count` blocks of runs by tier, without those that RAM had."""
    found: list[tuple[str, int]] = []
    for tier, blocks in runs:
        taken = min(blocks, count)
        count -= taken
        if taken and tier != ram:
            found.append((tier, taken))
    return found


def _check_distinct(rows: RowArray) -> None:
    """Raises: BadRequest. A repeated key would be counted once a chunk and given back once in all."""
    if (rows[1:] > rows[:-1]).all():
        return
    ordered = np.sort(rows)  # not np.unique, which hashes: [M] 720 us for 8,192 rows, and sorting 38
    if (ordered[1:] == ordered[:-1]).any():
        raise BadRequest("a key stands twice in one acquire: give each object once")


class SessionVerbs:
    """Handles one connection's requests."""

    def __init__(self, daemon: Daemon, connection: Connection) -> None:
        self._daemon = daemon
        self._connection = connection
        self._session: Session | None = None
        self._allocating = asyncio.Lock()
        self._methods: dict[type, Callable[[Any], Answer | Coroutine[Any, Any, Answer]]] = {
            wire.Settle: self._settle,
            wire.Open: self._open,
            wire.CloseHandle: self._close_handle,
            wire.MapExtents: self._map,
            wire.Unmapped: self._unmapped,
            wire.Match: self._match,
            wire.Acquire: self._acquire,
            wire.Attach: self._attach,
            wire.Release: self._release,
            wire.Prefetch: self._prefetch,
            wire.Allocate: self._allocate,
            wire.Write: self._write,
            wire.Commit: self._commit,
            wire.Abort: self._abort,
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
            wire.Expire: self._expire,
            wire.Delete: self._delete,
            wire.Purge: self._purge,
            wire.Flush: self._flush,
            wire.Report: self._report,
            wire.Stats: self._stats,
            wire.Explain: self._explain,
        }
        inline = InlineVerbs(self, connection)
        self._methods |= {wire.Get: inline.get, wire.Put: inline.put, wire.Fill: inline.fill}
        self._methods |= dict.fromkeys(LOCAL_ONLY if connection.peer.remote else REMOTE_ONLY, refuse)

    @property
    def session(self) -> Session:
        if self._session is None:
            raise NotIntroduced("the first verb of a session is hello")
        return self._session

    def handle(self, request: wire.AnyRequest) -> Answer | Coroutine[Any, Any, Answer]:
        verb = str(type(request).__struct_config__.tag)
        self._daemon.verb_counts[verb] += 1
        self._daemon.busy_poll.request_came()
        if isinstance(request, wire.Hello):
            return self._hello(request)
        if self._session is None:
            raise NotIntroduced(f"the first verb of a session is hello, not {verb}")
        self._session.principal.check_verb(verb)
        return self._methods[type(request)](request)

    def closed(self) -> None:
        self._daemon.disconnected(self._connection)
        if self._session is not None:
            self._daemon.registry.end(self._session)

    # --- introduction and namespaces ------------------------------------------------------------------------------

    def _hello(self, request: wire.Hello) -> Answer:
        daemon, settings = self._daemon, self._daemon.settings
        if self._session is not None:
            raise NotIntroduced("this session has said hello already")
        if not request.version_min <= wire.PROTOCOL_VERSION <= request.version_max:
            raise VersionMismatch(
                f"the client speaks protocol versions {request.version_min} to {request.version_max}, this daemon "
                f"{wire.PROTOCOL_VERSION}: upgrade the older side"
            )
        principal = daemon.access.authenticate(request.token, unix=not self._connection.peer.remote)
        if daemon.draining:
            raise Draining("the daemon is shutting down")
        if len(daemon.registry.sessions) >= settings.max_sessions:
            raise OverLimit(f"{settings.max_sessions} sessions are open: close some, or raise max_sessions")
        if len(request.engine_id) > MAX_ENGINE_ID:
            raise BadRequest(f"an engine id has at most {MAX_ENGINE_ID} characters, not {len(request.engine_id)}")
        peer = self._connection.peer
        if daemon.registry.orphans_of(peer.pid, besides=request.previous) >= MAX_ORPHANS:
            raise OverLimit(
                f"this process left {MAX_ORPHANS} sessions whose memory it may still touch: settle them first"
            )
        domain = daemon.domain_of(principal.tenant, None if peer.remote else peer.uid)
        session = Session(
            id=os.urandom(16),
            engine_id=request.engine_id,
            rank=request.rank,
            pid=peer.pid,
            uid=peer.uid,
            pidfd=None if peer.remote else self._connection.open_pidfd(),
            domain=domain,
            close=self._connection.close,
            principal=principal,
            remote=peer.remote,
        )
        self._session = session
        daemon.registry.add(session)
        daemon.registry.settle(session, request.previous)
        log.info(
            "session opened",
            extra={
                "pid": peer.pid,
                "engine": request.engine_id[:64],
                "rank": request.rank,
                "domain": domain.domain_name,
                "principal": principal.name,
            },
        )
        self._connection.introduced(principal.tenant)
        reply = wire.HelloReply(
            session=session.id,
            boot_epoch=daemon.boot_epoch,
            domain=domain.domain_name,
            read_only=domain.read_only or "write" not in principal.rights,
            extent_bytes=settings.extent_bytes,
            board_bytes=0 if peer.remote else domain.board.size_bytes,
            max_frame_bytes=settings.max_frame_bytes,
        )
        return reply if peer.remote else (reply, [domain.board.fd])

    def _settle(self, request: wire.Settle) -> Answer:
        return wire.Done(self._daemon.registry.settle(self.session, request.previous))

    def _open(self, request: wire.Open) -> Answer:
        session = self.session
        if len(session.handles) >= MAX_HANDLES:
            raise OverLimit(f"a session has at most {MAX_HANDLES} handles: close those that are not used")
        facts = NamespaceFacts.decode(request.facts)
        namespace_id = self._daemon.namespace_id(facts, session.principal.tenant)
        namespace = make_namespace(session.domain, namespace_id, facts)
        session.last_handle += 1
        session.handles[session.last_handle] = namespace
        self._daemon.note_namespace(session.domain, namespace)
        return wire.OpenReply(session.last_handle, namespace_id)

    def _close_handle(self, request: wire.CloseHandle) -> Answer:
        return wire.Done(int(self.session.handles.pop(request.handle, None) is not None))

    def _resolve(self, handle: int, group: int) -> tuple[Namespace, Table]:
        namespace = self.session.handles.get(handle)
        if namespace is None:
            raise UnknownHandle(f"no namespace handle {handle} in this session: open the namespace first")
        if not 0 <= group < len(namespace.tables):
            raise UnknownHandle(f"no group {group}: the namespace declares {len(namespace.tables)}")
        return namespace, namespace.tables[group]

    # --- memory ---------------------------------------------------------------------------------------------------

    def _map(self, request: wire.MapExtents) -> Answer:
        session = self.session
        extents: list[Extent] = []
        for number in request.extents[:64]:
            extent = session.domain.extents.get(number)
            if extent is None:
                continue  # retired meanwhile: the client treats what lay there as a miss
            extent.mapped_by.add(session)
            extents.append(extent)
        writes = "write" in session.principal.rights
        descriptors = [extent.fd if writes else extent.fd_to_read() for extent in extents]
        return wire.MapReply([extent.number for extent in extents]), descriptors

    def _unmapped(self, request: wire.Unmapped) -> Answer:
        session = self.session
        for number in request.extents:
            extent = session.domain.extents.get(number)
            if extent is not None:
                extent.mapped_by.discard(session)
            session.domain.tier.unmapped(number, session)
        return wire.Done(len(request.extents))

    def _retired(self) -> list[int]:
        """Extents dropped since this session was last told."""
        session = self.session
        news = session.domain.newly_retired[session.retired_told :]
        session.retired_told += len(news)
        return news

    # --- looking up ---------------------------------------------------------------------------------------------------

    def _match(self, request: wire.Match) -> Answer | Coroutine[Any, Any, Answer]:
        namespace, table = self._resolve(request.handle, request.group)
        in_ram = table.leading_run(wire.FlatKeys(request.keys))
        if in_ram == wire.count_keys(request.keys) or not self._daemon.lower:
            self._daemon.ceiling.asked_for(request.keys, in_ram)
            return wire.MatchReply([(self.session.domain.name, in_ram)] if in_ram else [], self._daemon.estimates())
        return self._match_below(namespace, request.group, wire.split_keys(request.keys))

    async def _match_below(self, namespace: Namespace, group: int, keys: list[bytes]) -> Answer:
        runs = await self._daemon.store_of(self.session.domain).match(
            namespace.id, group, keys, timeout_s=self._daemon.probe_timeout_s
        )
        self._daemon.ceiling.asked_for(b"".join(keys), sum(run.blocks for run in runs))
        return wire.MatchReply([(name, count) for name, count in runs], self._daemon.estimates())

    def _acquire(self, request: wire.Acquire) -> Answer | Coroutine[Any, Any, Answer]:
        namespace, table = self._resolve(request.handle, request.group)
        if request.shares < 1:
            raise BadRequest("a lease has at least one share")
        if self._daemon.draining:
            raise Draining("the daemon is shutting down: compute instead of loading")
        count = wire.count_keys(request.keys)
        session = self.session
        self._daemon.right_of_way.loaded(session.engine)
        self._check_quarantine()
        limit = self._daemon.settings.max_leased_blocks_per_session
        if session.leased_blocks + count > limit:
            raise OverLimit(f"leases of this session would pass {limit} blocks: release some")
        if count > CHUNK:
            return self._acquire_long(request, namespace, table, count)
        rows, missing = session.domain.find_some_leading(table, request.keys)
        if missing and request.wait_ms and self._daemon.lower:
            return self._acquire_long(request, namespace, table, count)
        _check_distinct(rows)
        session.domain.lease(rows)
        return self._leased(table, rows, request.shares, [])

    def _acquire_long(
        self, request: wire.Acquire, namespace: Namespace, table: Table, count: int
    ) -> Coroutine[Any, Any, Answer]:
        # The blocks count from now on, so that requests running side by side can't pass the limit together.
        self.session.leased_blocks += count
        return self._acquire_by_chunks(request, namespace, table, count)

    async def _acquire_by_chunks(self, request: wire.Acquire, namespace: Namespace, table: Table, count: int) -> Answer:
        domain, tenant = self.session.domain, self.session.principal.tenant
        held: list[RowArray] = []
        loaded: list[tuple[str, int]] = []
        deadline_s = time.monotonic() + min(request.wait_ms / 1000, MAX_WAIT_S)
        try:
            done = 0
            if self._daemon.rounds.contended:
                await self._daemon.rounds.turn(tenant)
            while done < count:
                rows, missing = domain.find_some_leading(table, request.keys, done, CHUNK)
                domain.lease(rows)
                held.append(rows)
                done += len(rows)
                if not missing:
                    await self._daemon.rounds.turn(tenant)
                    continue
                left_s = deadline_s - time.monotonic()
                if not self._daemon.lower or left_s <= 0:
                    break
                store = self._daemon.store_of(domain)
                below = wire.split_keys(request.keys[KEY_BYTES * done :])
                sources = store.leading_run(namespace.id, request.group, below)
                arrived = await store.load(namespace.id, request.group, below, table.object_bytes, left_s)
                if not arrived:
                    break
                loaded.extend(_first_blocks(sources, arrived, domain.name))
                # Nothing evicts them before the next await, so they are leased here and not on the next turn.
                rows = domain.find_leading(table, below[:arrived])
                domain.lease(rows)
                held.append(rows)
                done += len(rows)
            rows = np.concatenate(held) if held else np.empty(0, np.int64)
            _check_distinct(rows)
        except BaseException:
            for rows in held:
                domain.unlease(rows)
            raise
        finally:
            self.session.leased_blocks -= count
        return self._leased(table, rows, request.shares, loaded)

    def _leased(self, table: Table, rows: RowArray, shares: int, loaded: list[tuple[str, int]]) -> Answer:
        """File leased rows and answer with their places."""
        session, daemon = self.session, self._daemon
        daemon.hits += len(rows)
        if not len(rows):
            return wire.AcquireReply(0, b"", [], self._retired())
        session.domain.touch(table, rows)
        lease = daemon.registry.lease(session, table, rows, shares, daemon.hold_deadline_s())
        locations = session.domain.tier.index.locations_of(rows)
        return wire.AcquireReply(lease.number, locations, loaded, self._retired())

    def _attach(self, request: wire.Attach) -> Answer:
        lease: Lease = self._daemon.registry.join(self.session, request.lease)
        locations = self.session.domain.tier.index.locations_of(lease.rows)
        return wire.AcquireReply(lease.number, locations, [], self._retired())

    def _release(self, request: wire.Release) -> Answer:
        return wire.Done(self._daemon.registry.release(self.session, request.lease))

    def _prefetch(self, request: wire.Prefetch) -> Answer:
        namespace, table = self._resolve(request.handle, request.group)
        keys = wire.split_keys(request.keys)
        in_ram = table.leading_run(keys)
        if in_ram == len(keys) or not self._daemon.lower:
            return wire.PrefetchReply(0, 0)
        if self.session.prefetches >= MAX_PREFETCHES:
            raise OverLimit(f"{MAX_PREFETCHES} prefetches of this session run already: wait for their notices")
        self.session.prefetches += 1
        ticket = self._daemon.registry.number()
        timeout_s = min(request.timeout_ms / 1000, MAX_WAIT_S)
        self._daemon.background(self._prefetched(ticket, namespace, request.group, table, keys, timeout_s))
        return wire.PrefetchReply(ticket, len(keys) - in_ram)

    async def _prefetched(
        self, ticket: int, namespace: Namespace, group: int, table: Table, keys: list[bytes], timeout_s: float
    ) -> None:
        domain = self.session.domain
        try:
            await self._daemon.store_of(domain).load(namespace.id, group, keys, table.object_bytes, timeout_s)
        finally:
            self.session.prefetches -= 1
            domain.board.count_completion()
            self._connection.notice(ticket, wire.Loaded(table.leading_run(keys)))

    # --- writing ------------------------------------------------------------------------------------------------------

    def _allocate(self, request: wire.Allocate) -> Answer | Coroutine[Any, Any, Answer]:
        namespace, table = self._resolve(request.handle, request.group)
        keys = wire.split_keys(request.keys)
        session, daemon = self.session, self._daemon
        parent = request.parent or namespace.id
        layout = namespace.layouts[request.group]
        if request.parts and self.session.remote:
            raise BadRequest("over TCP an object is written whole: leave parts out")
        if len(parent) != KEY_BYTES:
            raise BadRequest(f"parent key has {len(parent)} bytes, not {KEY_BYTES}")
        parts_count = len(layout.part_bytes)
        if request.parts and (request.parts < 0 or request.parts >> parts_count):
            raise BadRequest(f"parts mask {request.parts:#x} names parts beyond the {parts_count} of the namespace")
        if daemon.draining:
            raise Draining("the daemon is shutting down: nothing new is stored")
        self._check_quarantine()
        need = len(keys) * table.object_bytes
        limit = daemon.settings.max_uncommitted_bytes_per_session
        if session.uncommitted_bytes + need > limit:
            raise OverLimit(f"uncommitted objects of this session would pass {limit} bytes: commit some first")
        tenant = session.principal.tenant
        of_tenant = daemon.settings.tenant(tenant).uncommitted_bytes
        if of_tenant is not None and daemon.registry.uncommitted_bytes_of(tenant) + need > of_tenant:
            raise OverLimit(f"uncommitted objects of tenant {tenant} would pass {of_tenant} bytes: commit some first")
        # The bytes count from now on, so that requests running side by side can't pass the limit together.
        session.uncommitted_bytes += need
        domain = session.domain
        if daemon.right_of_way.gives_way(session.engine):
            return self._allocate_in_turn(request, namespace, table, keys, parent, need)
        if len(keys) <= ALLOCATE_CHUNK and domain.ready_for(table, len(keys)) and not self._allocating.locked():
            return self._allocate_chunk(request, namespace, table, keys, parent, need)
        return self._allocate_long(request, namespace, table, keys, parent, need)

    def _allocate_chunk(
        self, request: wire.Allocate, namespace: Namespace, table: Table, keys: list[bytes], parent: bytes, need: int
    ) -> Answer:
        try:
            got = self.session.domain.allocate(
                table, keys, parent, parts=request.parts, full_mask=self._full_mask(namespace, request.group)
            )
        except BaseException:
            self.session.uncommitted_bytes -= need
            raise
        return self._allocated(request, namespace, keys, parent, need, got.statuses, got.rows)

    async def _allocate_in_turn(
        self, request: wire.Allocate, namespace: Namespace, table: Table, keys: list[bytes], parent: bytes, need: int
    ) -> Answer:
        try:
            turn = await self._daemon.right_of_way.turn(self.session.principal.tenant, need)
        except BaseException:
            self.session.uncommitted_bytes -= need
            raise
        allocation: Allocation | None = None
        try:
            answer: Answer = await self._allocate_long(request, namespace, table, keys, parent, need)
            reply = answer[0] if isinstance(answer, tuple) else answer
            assert isinstance(reply, wire.AllocateReply)
            allocation = self.session.allocations.get(reply.allocation)
            return answer
        finally:
            if allocation is None:
                turn.end()
            else:
                allocation.turn = turn

    async def _allocate_long(
        self, request: wire.Allocate, namespace: Namespace, table: Table, keys: list[bytes], parent: bytes, need: int
    ) -> Answer:
        domain, tenant = self.session.domain, self.session.principal.tenant
        full_mask = self._full_mask(namespace, request.group)
        statuses: list[bytes] = []
        granted: list[RowArray] = []
        above = parent
        try:
            if len(set(keys)) != len(keys):
                raise BadRequest("a key stands twice in one allocate: give each object once")
            # One after the other: parts of a run that took turns would lie scattered, each in want of its parent.
            async with self._allocating:
                await domain.make_room(table, len(keys))
                if self._daemon.rounds.contended:
                    await self._daemon.rounds.turn(tenant)
                for start in range(0, len(keys), ALLOCATE_CHUNK):
                    chunk = keys[start : start + ALLOCATE_CHUNK]
                    got = domain.allocate(table, chunk, above, parts=request.parts, full_mask=full_mask)
                    statuses.append(got.statuses)
                    granted.append(got.rows)
                    above = chunk[-1]
                    await self._daemon.rounds.turn(tenant)
        except BaseException:
            for rows in granted:
                for row in rows[rows >= 0].tolist():
                    domain.abort(row, parts=request.parts, full_mask=full_mask)
            self.session.uncommitted_bytes -= need
            raise
        rows = np.concatenate(granted) if granted else np.empty(0, np.int64)
        return self._allocated(request, namespace, keys, parent, need, b"".join(statuses), rows)

    @staticmethod
    def _full_mask(namespace: Namespace, group: int) -> int:
        return (1 << len(namespace.layouts[group].part_bytes)) - 1

    def _allocated(
        self,
        request: wire.Allocate,
        namespace: Namespace,
        keys: list[bytes],
        parent: bytes,
        need: int,
        statuses: bytes,
        rows: RowArray,
    ) -> Answer:
        session, daemon = self.session, self._daemon
        writable = statuses.count(wire.SlotStatus.WRITABLE)
        used = writable * namespace.tables[request.group].object_bytes
        session.uncommitted_bytes -= need - used
        if not writable:
            return wire.AllocateReply(0, statuses, b"", self._retired())
        allocation = Allocation(
            number=daemon.registry.number(),
            namespace=namespace,
            group=request.group,
            rows=rows,
            keys=keys,
            parent=parent,
            parts=request.parts,
            size_bytes=used,
            deadline_s=daemon.hold_deadline_s(),
        )
        session.allocations[allocation.number] = allocation
        index = session.domain.tier.index
        if writable == len(rows):
            return wire.AllocateReply(allocation.number, statuses, index.locations_of(rows), self._retired())
        places = np.zeros(len(rows), wire.LOCATION_DTYPE)
        places[rows >= 0] = index.locations[rows[rows >= 0]]
        return wire.AllocateReply(allocation.number, statuses, places.tobytes(), self._retired())

    def _check_quarantine(self) -> None:
        """Raises: OverLimit: this process is one of those that fill the quarantine, and gets nothing more to leave there."""
        daemon = self._daemon
        if daemon.quarantine_is_full and daemon.registry.quarantined_bytes(self.session.pid):
            raise OverLimit("this process left sessions whose copies may go on: settle them before it holds more")

    def _allocation(self, number: int) -> Allocation:
        allocation = self.session.allocations.get(number)
        if allocation is None:
            raise UnknownHandle(f"no allocation {number} in this session (committed, aborted, or never made)")
        if allocation.filling:
            raise BadRequest(f"allocation {number} is being filled or committed")
        return allocation

    def _write(self, request: wire.Write) -> Answer:
        allocation = self._allocation(request.allocation)
        layout = allocation.namespace.layouts[allocation.group]
        if not 0 <= request.index < len(allocation.rows) or allocation.rows[request.index] == ABSENT:
            raise BadRequest(f"object {request.index} of allocation {request.allocation} is not writable")
        end = request.offset + len(request.data)
        if request.offset < 0 or end > layout.object_bytes:
            raise BadRequest(f"bytes {request.offset} to {end} lie outside an object of {layout.object_bytes} bytes")
        view = self.session.domain.object_view(int(allocation.rows[request.index]))
        view[request.offset : end] = request.data
        return wire.Done(len(request.data))

    def _commit(self, request: wire.Commit) -> Answer | Coroutine[Any, Any, Answer]:
        allocation = self._allocation(request.allocation)
        if len(request.written) != len(allocation.rows):
            raise BadRequest(
                f"commit names {len(request.written)} objects, allocation {request.allocation} has {len(allocation.rows)}"
            )
        written = np.frombuffer(request.written, np.uint8) != 0
        granted = allocation.rows >= 0
        if (written & ~granted).any():
            raise BadRequest("commit names an object that this session was not given to write")
        if len(written) > ALLOCATE_CHUNK:
            allocation.filling = True  # here, for the session's next request may come before the first step
            return self._commit_long(allocation, written)
        shown = self._commit_chunk(allocation, written, 0)
        return self._committed(allocation, written, shown)

    async def _commit_long(self, allocation: Allocation, written: npt.NDArray[np.bool_]) -> Answer:
        """What is committed leaves the allocation at once, so that a session that ends meanwhile gives back just the rest."""
        shown = 0
        for start in range(0, len(written), ALLOCATE_CHUNK):
            shown += self._commit_chunk(allocation, written[start : start + ALLOCATE_CHUNK], start)
            await self._daemon.rounds.turn(self.session.principal.tenant)
        answer: Answer = await finished(self._committed(allocation, written, shown))
        return answer

    def _commit_chunk(self, allocation: Allocation, written: npt.NDArray[np.bool_], start: int) -> int:
        """Show some of an allocation's objects and abort the others. Returns how many are visible now."""
        rows = allocation.rows[start : start + len(written)]
        shows = written & (not allocation.purged)
        shown = self._show(allocation, start + np.flatnonzero(shows))
        for row in rows[(rows >= 0) & ~shows].tolist():
            self._abort_row(allocation, row)
        rows[:] = ABSENT
        return shown

    def _committed(
        self, allocation: Allocation, written: npt.NDArray[np.bool_], shown: int
    ) -> Answer | Coroutine[Any, Any, Answer]:
        self._drop(allocation)
        if shown and self._daemon.lower and self._daemon.settings.write_policy == "write_through":
            return self._write_through(allocation, np.flatnonzero(written), shown)
        return wire.Done(shown)

    async def _write_through(self, allocation: Allocation, positions: RowArray, shown: int) -> Answer:
        """Answer when the objects are below RAM, or the tiers' own deadline has passed: they are visible either way."""
        table = allocation.namespace.tables[allocation.group]
        keys = [self._daemon.object_key(table, allocation.keys[i]) for i in positions.tolist()]
        await self._daemon.flush(self.session.domain, keys, WRITE_THROUGH_S)
        return wire.Done(shown)

    def _show(self, allocation: Allocation, positions: RowArray) -> int:
        domain = self.session.domain
        table = allocation.namespace.tables[allocation.group]
        full_mask = self._full_mask(allocation.namespace, allocation.group)
        rows = allocation.rows[positions]
        shown = domain.commit(table, rows, parts=allocation.parts, full_mask=full_mask)
        self._daemon.stored += shown
        if self._daemon.lower and shown:
            store = self._daemon.store_of(domain)
            start = int(allocation.namespace.layouts[allocation.group].block_tokens)
            for position in positions.tolist():
                above = allocation.keys[position - 1] if position else allocation.parent
                store.note_committed(
                    self._daemon.object_key(table, allocation.keys[position]),
                    parent=above,
                    size_bytes=table.object_bytes,
                    score=float(position * start),
                )
        return shown

    def _drop(self, allocation: Allocation) -> None:
        """It is committed or given up."""
        del self.session.allocations[allocation.number]
        self.session.uncommitted_bytes -= allocation.size_bytes
        if allocation.turn is not None:
            allocation.turn.end()

    def _abort_row(self, allocation: Allocation, row: int) -> None:
        full_mask = self._full_mask(allocation.namespace, allocation.group)
        self.session.domain.abort(row, parts=allocation.parts, full_mask=full_mask)

    def _abort(self, request: wire.Abort) -> Answer:
        allocation = self._allocation(request.allocation)
        self._drop(allocation)
        rows = allocation.rows[allocation.rows >= 0].tolist()
        for row in rows:
            self._abort_row(allocation, row)
        return wire.Done(len(rows))

    # --- keeping and forgetting -----------------------------------------------------------------------------------------

    def _present(self, handle: int, group: int, keys: bytes) -> RowArray:
        _, table = self._resolve(handle, group)
        rows = table.find(wire.split_keys(keys))
        return np.unique(rows[rows >= 0])  # a key that stands twice counts once, in pin as in unpin

    def _pin(self, request: wire.Pin) -> Answer:
        rows = self._present(request.handle, request.group, request.keys)
        self._daemon.check_pins(rows)
        if request.for_ms:
            self._daemon.expiries.pin(self.session.domain, rows, request.for_ms / 1e3)
        else:
            self.session.domain.pin(rows)
        return wire.Done(len(rows))

    def _unpin(self, request: wire.Unpin) -> Answer:
        return wire.Done(self.session.domain.unpin(self._present(request.handle, request.group, request.keys)))

    async def _expire(self, request: wire.Expire) -> Answer:
        _, table = self._resolve(request.handle, request.group)
        keys = [self._daemon.object_key(table, key) for key in wire.split_keys(request.keys)]
        await self._daemon.expiries.forget_after(self.session.domain, keys, request.after_ms / 1e3)
        return wire.Done(len(keys))

    async def _purge(self, request: wire.Purge) -> Answer:
        if request.older_than_ms < 0:
            raise BadRequest("older_than_ms is not negative")
        session = self.session
        scope = scope_of(self._daemon, session.principal, None if session.remote else session.uid, request.tenant)
        work = purge(self._daemon, scope, request.namespaces, request.older_than_ms / 1e3)
        done = await asyncio.shield(self._daemon.background(work))
        return wire.PurgeReply(done.objects, list(done.unlisted))

    async def _delete(self, request: wire.Delete) -> Answer:
        _, table = self._resolve(request.handle, request.group)
        keys = [self._daemon.object_key(table, key) for key in wire.split_keys(request.keys)]
        return wire.Done(await self._daemon.delete(self.session.domain, keys))

    async def _flush(self, request: wire.Flush) -> Answer:
        _, table = self._resolve(request.handle, request.group)
        keys = [self._daemon.object_key(table, key) for key in wire.split_keys(request.keys)]
        timeout_s = min(request.timeout_ms / 1000, MAX_WAIT_S)
        return wire.FlushReply(*await self._daemon.flush(self.session.domain, keys, timeout_s))

    # --- telling --------------------------------------------------------------------------------------------------------

    def _report(self, request: wire.Report) -> Answer:
        # The daemon takes the speed of its memory from "load": over the network it would be the network's.
        kind = "load_over_network" if request.kind == "load" and self.session.remote else request.kind
        self._daemon.reports.add(kind, request.values)
        return wire.Done(1)

    def _stats(self, request: wire.Stats) -> Answer:
        return wire.StatsReply(self._daemon.stats())

    def _explain(self, request: wire.Explain) -> Answer:
        _, table = self._resolve(request.handle, request.group)
        keys: Sequence[bytes] = wire.split_keys(request.keys)
        if len(keys) > self._daemon.max_explain_keys:
            raise BadRequest(f"explain takes at most {self._daemon.max_explain_keys} keys at once, not {len(keys)}")
        return wire.ExplainReply(self._daemon.explain_blocks(self.session.domain, table, keys))
