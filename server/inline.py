"""Verbs for peers that share no memory: `get`, `put` and `fill`, whose payload travels inline.

They stand on `acquire`, `allocate`, `commit` and `abort` of server/verbs.py, so limits and accounts are the same. Always true:
what a peer sends becomes visible only when its header names the right key, parent and namespace and every part has the checksum
that the header gives; a connection that ends in mid-payload leaves nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Final

from forebay.kvstore import wire
from forebay.kvstore.errors import BadRequest
from forebay.kvstore.payload import Arriving, Place
from forebay.kvstore.wire import SlotStatus
from forebay.server.door import Answer, Connection, Objects
from forebay.server.sessions import Allocation

if TYPE_CHECKING:
    from forebay.server.verbs import SessionVerbs

_WRITTEN: Final = bytes(status == SlotStatus.WRITABLE for status in range(256))
# What needs memory that both sides map. `allocate` and `abort` stay: they say what is worth sending.
LOCAL_ONLY: Final = (wire.MapExtents, wire.Unmapped, wire.Acquire, wire.Attach, wire.Release, wire.Write, wire.Commit)
REMOTE_ONLY: Final = (wire.Get, wire.Put, wire.Fill)


def refuse(request: wire.Request[Any]) -> Answer:
    """Raises: BadRequest: the verb is not for this kind of connection."""
    verb = str(type(request).__struct_config__.tag)
    if isinstance(request, REMOTE_ONLY):
        raise BadRequest(f"{verb} is for TCP: on this machine use acquire, allocate and commit, which copy less")
    raise BadRequest(f"{verb} is for clients on this machine, which share its memory: over TCP use get, put and fill")


async def finished(answer: Answer | Coroutine[Any, Any, Answer]) -> Any:
    return await answer if inspect.iscoroutine(answer) else answer


class InlineVerbs:
    """What a session's `get`, `put` and `fill` do."""

    def __init__(self, verbs: SessionVerbs, connection: Connection) -> None:
        self._verbs = verbs
        self._connection = connection

    # --- get ------------------------------------------------------------------------------------------------------

    def get(self, request: wire.Get) -> Answer | Coroutine[Any, Any, Answer]:
        acquired = self._verbs._acquire(wire.Acquire(request.handle, request.group, request.keys, request.wait_ms))
        if inspect.iscoroutine(acquired):
            return self._get_later(request, acquired)
        return self._sending(request, acquired)

    async def _get_later(self, request: wire.Get, acquired: Coroutine[Any, Any, Answer]) -> Answer:
        return self._sending(request, await acquired)

    def _sending(self, request: wire.Get, acquired: Any) -> Answer:
        session = self._verbs.session
        size = self._verbs._resolve(request.handle, request.group)[1].object_bytes
        if not acquired.lease:
            return wire.GetReply(0, size, acquired.loaded)
        lease = session.leases[acquired.lease]
        domain = session.domain

        def views() -> Iterator[memoryview]:
            for row in lease.rows.tolist():
                yield domain.object_view(row)

        def ended() -> None:
            if lease.number in session.leases:  # else the session has ended, and the lease with it
                self._verbs._daemon.registry.release(session, lease.number)

        count = len(lease.rows)
        return wire.GetReply(count, size, acquired.loaded), Objects(count, size, views(), ended)

    # --- put ------------------------------------------------------------------------------------------------------

    async def put(self, request: wire.Put) -> Answer:
        count = len(wire.split_keys(request.keys))
        size = self._verbs._resolve(request.handle, request.group)[1].object_bytes
        if request.payload_bytes != count * size:
            raise BadRequest(f"{count} objects of {size} bytes are {count * size} bytes, not {request.payload_bytes}")
        asked = wire.Allocate(request.handle, request.group, request.keys, request.parent)
        reply: wire.AllocateReply = await finished(self._verbs._allocate(asked))
        if not reply.allocation:
            incoming = self._connection.incoming
            if incoming is not None:
                incoming.refuse()
            return wire.PutReply(0, reply.statuses)
        return wire.PutReply(await self._receive(reply.allocation, every=True), reply.statuses)

    async def fill(self, request: wire.Fill) -> Answer:
        allocation = self._verbs._allocation(request.allocation)
        if request.payload_bytes != allocation.size_bytes:
            raise BadRequest(
                f"the writable objects of this allocation are {allocation.size_bytes} bytes, not {request.payload_bytes}"
            )
        return wire.Done(await self._receive(request.allocation, every=False))

    async def _receive(self, number: int, *, every: bool) -> int:
        """Take the payload of an allocation's writable objects (`every`: of the others, too), check it, make it visible.

        Returns: objects that became visible.
        """
        allocation, incoming = self._verbs._allocation(number), self._connection.incoming
        allocation.filling = True  # nobody else may end it and give its places to others
        try:
            if incoming is None:
                raise BadRequest("no payload follows")
            arriving = self._places(allocation, every=every)
            await incoming.accept(arriving)
            if arriving.trouble is not None:
                raise BadRequest(
                    f"nothing was stored: the payload of object {arriving.good} is not what its header and the request say "
                    f"({arriving.trouble})"
                )
        except BaseException:
            allocation.filling = False
            if number in self._verbs.session.allocations:  # else the session has ended, and given all back
                self._verbs._abort(wire.Abort(number))
            raise
        allocation.filling = False
        written = bytes(row >= 0 for row in allocation.rows.tolist())
        done: wire.Done = await finished(self._verbs._commit(wire.Commit(number, written)))
        return done.count

    def _places(self, allocation: Allocation, *, every: bool) -> Arriving:
        domain = self._verbs.session.domain
        layout = allocation.namespace.layouts[allocation.group]
        header = layout.header_bytes
        places: list[Place | None] = []
        above = allocation.parent
        for row, key in zip(allocation.rows.tolist(), allocation.keys, strict=True):
            if row >= 0:
                view = domain.object_view(row)
                places.append(Place(view[:header], view[header:], key, above))
            elif every:
                places.append(None)
            above = key
        return Arriving(layout, allocation.namespace.id, places)
