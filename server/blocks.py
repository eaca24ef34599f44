"""Objects by value: what doors do whose clients map no memory and keep no session.

Covers namespaces by their id, the leading run lent out for as long as its bytes are being sent, objects received into places
and shown only when they are whole and right. Knows no HTTP. Always true: an object becomes visible only if its key follows
from its parent and tokens, its header names this namespace, and every part has its checksum; a request that fails or is
cancelled leaves no lease and no place behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from forebay.kvstore.errors import BadRequest, Draining, ObjectTooLarge, OverLimit, TierFull, UnknownHandle
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.index import RowArray, Table
from forebay.kvstore.keys import KEY_BYTES, block_keys
from forebay.kvstore.objects import Header, ObjectLayout
from forebay.kvstore.wire import SlotStatus
from forebay.server.auth import Principal
from forebay.server.purge import Purged, purge, scope_of
from forebay.server.sessions import Namespace
from forebay.tiers.ram import RamDomain

if TYPE_CHECKING:
    from forebay.server.daemon import Daemon

MAX_NAMESPACES: Final = 4096  # of one trust domain, opened by doors without sessions
VERIFY_IN_THREAD_BYTES: Final = 2 << 20  # 0.2 ms of hashing


@dataclass(eq=False)
class Receiving:
    """A place that one object is written into. `view` is header and payload; `commit` shows it."""

    view: memoryview
    row: RowArray
    table: Table
    purged: bool = False  # since it was made, a purge came over its namespace


class Lent:
    """The leading run of a request, leased. `loaded`: how many of its `blocks` came from below RAM. Close it in the end."""

    def __init__(self, domain: RamDomain, rows: RowArray, object_bytes: int, loaded: int) -> None:
        self.blocks = len(rows)
        self.object_bytes = object_bytes
        self.loaded = loaded
        self._domain = domain
        self._left = rows
        domain.lease(rows)

    def __iter__(self) -> Iterator[memoryview]:
        """Each object's bytes, once. An object's lease ends with the last reference to them, wherever that is.

        A transport keeps what it could not send at once for as long as it takes; nothing else tells when it is done.
        """
        while len(self._left):
            row = self._left[:1]
            view = self._domain.object_view(int(row[0]))
            array = (ctypes.c_char * len(view)).from_buffer(view)
            weakref.finalize(array, self._domain.unlease, row).atexit = False
            self._left = self._left[1:]
            yield memoryview(array).cast("B").toreadonly()

    def close(self) -> None:
        """End the leases of objects that were not drawn. Idempotent."""
        left, self._left = self._left, self._left[:0]
        self._domain.unlease(left)


class Blocks:
    """A daemon's objects for callers without a session. Event loop only."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._opened: dict[str, int] = {}
        self._receiving_bytes: dict[str, int] = {}
        self.receiving: set[Receiving] = set()
        self.bytes_in = 0
        self.bytes_out = 0

    # --- namespaces -------------------------------------------------------------------------------------------------

    def domain(self, principal: Principal) -> RamDomain:
        """The trust domain of a caller from the network."""
        return self._daemon.domain_of(principal.tenant, None)

    def open(self, principal: Principal, facts: NamespaceFacts) -> Namespace:
        """Name a namespace. Raises: OverLimit, ObjectTooLarge, AccessDenied."""
        domain = self.domain(principal)
        number = self._daemon.namespace_id(facts, principal.tenant)
        known = self._daemon.namespaces.get((domain.domain_name, number))
        if known is not None:
            return known
        count = self._opened.get(domain.domain_name, 0)
        if count >= MAX_NAMESPACES:
            raise OverLimit(f"{MAX_NAMESPACES} namespaces were opened here already: is a salt new with every request?")
        namespace = make_namespace(domain, number, facts)
        self._opened[domain.domain_name] = count + 1
        self._daemon.note_namespace(domain, namespace)
        return namespace

    def namespace(self, principal: Principal, number: bytes) -> Namespace:
        """A namespace that was opened in the caller's domain. Raises: UnknownHandle."""
        found = self._daemon.namespaces.get((self.domain(principal).domain_name, number))
        if found is None:
            raise UnknownHandle("no such namespace here since this daemon started: open it with its facts")
        return found

    @staticmethod
    def table(namespace: Namespace, group: int) -> Table:
        if not 0 <= group < len(namespace.tables):
            raise UnknownHandle(f"no group {group}: the namespace declares {len(namespace.tables)}")
        return namespace.tables[group]

    # --- reading ----------------------------------------------------------------------------------------------------

    async def match(
        self, principal: Principal, namespace: Namespace, group: int, keys: Sequence[bytes]
    ) -> list[tuple[str, int]]:
        """The leading run by tier."""
        domain, table = self.domain(principal), self.table(namespace, group)
        in_ram = table.leading_run(keys)
        if in_ram == len(keys) or not self._daemon.lower:
            self._daemon.ceiling.asked_for(b"".join(keys), in_ram)
            return [(domain.name, in_ram)] if in_ram else []
        runs = await self._daemon.store_of(domain).match(
            namespace.id, group, keys, timeout_s=self._daemon.probe_timeout_s
        )
        self._daemon.ceiling.asked_for(b"".join(keys), sum(run.blocks for run in runs))
        return [(name, count) for name, count in runs]

    def estimates(self) -> dict[str, tuple[float, float, int, float, bool]]:
        """Present costs of loading from each tier, as in the reply of the verb `match`."""
        return self._daemon.estimates()

    async def lend(
        self, principal: Principal, namespace: Namespace, group: int, keys: Sequence[bytes], wait_s: float
    ) -> Lent:
        """Keep the leading run from eviction while its views are alive; what lies below RAM is loaded for `wait_s` at most.

        Raises: Draining.
        """
        self._daemon.right_of_way.loaded(("http", principal.name))
        if self._daemon.draining:
            raise Draining("the daemon is shutting down: compute instead of loading")
        domain, table = self.domain(principal), self.table(namespace, group)
        rows = domain.find_leading(table, keys)
        in_ram = len(rows)
        if in_ram < len(keys) and wait_s > 0 and self._daemon.lower:
            count = await self._daemon.store_of(domain).load(namespace.id, group, keys, table.object_bytes, wait_s)
            rows = domain.find_leading(table, keys[:count])
        lent = Lent(domain, rows, table.object_bytes, max(0, len(rows) - in_ram))
        domain.touch(table, rows)
        self._daemon.hits += len(rows)
        self.bytes_out += len(rows) * table.object_bytes
        return lent

    # --- writing ----------------------------------------------------------------------------------------------------

    @contextmanager
    def place(
        self, principal: Principal, namespace: Namespace, group: int, key: bytes, parent: bytes
    ) -> Iterator[Receiving | SlotStatus]:
        """A place for one object while the block lasts, or why there is none. Not committed in it, it is given back.

        Call `make_room` before. Raises: OverLimit, Draining.
        """
        if self._daemon.draining:
            raise Draining("the daemon is shutting down: nothing new is stored")
        domain, table = self.domain(principal), self.table(namespace, group)
        limit = self._daemon.settings.max_uncommitted_bytes_per_session
        held = self._receiving_bytes.get(domain.domain_name, 0)
        if held + table.object_bytes > limit:
            raise OverLimit(f"objects on their way in would pass {limit} bytes: send fewer at a time")
        got = domain.allocate(table, [key], parent)
        status = SlotStatus(got.statuses[0])
        if status is not SlotStatus.WRITABLE:
            yield status
            return
        self._receiving_bytes[domain.domain_name] = held + table.object_bytes
        receiving = Receiving(domain.object_view(int(got.rows[0])), got.rows, table)
        self.receiving.add(receiving)
        try:
            yield receiving
        finally:
            self.receiving.discard(receiving)
            receiving.view.release()
            self._receiving_bytes[domain.domain_name] -= table.object_bytes
            if len(receiving.row):
                domain.abort(int(receiving.row[0]))

    @asynccontextmanager
    async def in_turn(self, principal: Principal, size_bytes: int) -> AsyncIterator[None]:
        """Take a turn to receive so many bytes, if engines load at present."""
        way = self._daemon.right_of_way
        if not way.gives_way(("http", principal.name)):
            yield
            return
        turn = await way.turn(principal.tenant, size_bytes)
        try:
            yield
        finally:
            turn.end()

    async def make_room(self, principal: Principal, namespace: Namespace, group: int, count: int) -> None:
        """Do beforehand, without holding the loop, what places for `count` objects will need."""
        await self.domain(principal).make_room(self.table(namespace, group), count)

    async def commit(
        self, principal: Principal, namespace: Namespace, receiving: Receiving, header: Header, *, seen: bool
    ) -> None:
        """Show a received object, once it is found to be right.

        Args:
            seen: its parts were hashed here already, when the header was made.
        Raises: BadRequest: it is not what its header says.
        """
        layout = namespace.layouts[receiving.table.group]
        if not seen:
            trouble = await self._trouble(layout, receiving.view, header.key, namespace.id)
            if trouble is not None:
                raise BadRequest(f"the object was not stored: its {trouble} is wrong")
        if receiving.purged:
            raise BadRequest("the namespace was purged while the object was on its way: nothing was stored")
        domain, table, daemon = self.domain(principal), receiving.table, self._daemon
        row, receiving.row = receiving.row, receiving.row[:0]
        domain.commit(table, row)
        daemon.stored += 1
        self.bytes_in += table.object_bytes
        if daemon.lower:
            daemon.store_of(domain).note_committed(
                daemon.object_key(table, header.key),
                parent=header.parent,
                size_bytes=table.object_bytes,
                score=float(header.position),
            )

    @staticmethod
    async def _trouble(layout: ObjectLayout, view: memoryview, key: bytes, namespace: bytes) -> str | None:
        if len(view) < VERIFY_IN_THREAD_BYTES:
            return layout.verify_object(view, key=key, namespace=namespace)
        return await asyncio.to_thread(layout.verify_object, view, key=key, namespace=namespace)

    async def delete(self, principal: Principal, namespace: Namespace, group: int, keys: Sequence[bytes]) -> int:
        table = self.table(namespace, group)
        wanted = [self._daemon.object_key(table, key) for key in keys]
        return await self._daemon.delete(self.domain(principal), wanted)

    def pin(self, principal: Principal, namespace: Namespace, group: int, keys: Sequence[bytes], seconds: float) -> int:
        """Keep blocks in RAM for some time. Returns how many of the keys are there. Raises: OverLimit, BadRequest."""
        rows = self.table(namespace, group).find(keys)
        rows = np.unique(rows[rows >= 0])
        self._daemon.check_pins(rows)
        self._daemon.expiries.pin(self.domain(principal), rows, seconds)
        return len(rows)

    async def expire(
        self, principal: Principal, namespace: Namespace, group: int, keys: Sequence[bytes], seconds: float
    ) -> int:
        """Forget blocks on all tiers after some time. Raises: OverLimit, BadRequest."""
        table = self.table(namespace, group)
        wanted = [self._daemon.object_key(table, key) for key in keys]
        await self._daemon.expiries.forget_after(self.domain(principal), wanted, seconds)
        return len(keys)

    async def purge(
        self, principal: Principal, namespaces: Sequence[bytes], older_than_s: float, tenant: str
    ) -> Purged:
        """Forget whole namespaces, or what in them is older. Raises: Forbidden, UnknownHandle."""
        scope = scope_of(self._daemon, principal, None, tenant)
        return await asyncio.shield(self._daemon.background(purge(self._daemon, scope, namespaces, older_than_s)))

    def stats(self) -> dict[str, int]:
        return {
            "bytes_in_total": self.bytes_in,
            "bytes_out_total": self.bytes_out,
            "receiving_bytes": sum(self._receiving_bytes.values()),
        }


def make_namespace(domain: RamDomain, number: bytes, facts: NamespaceFacts) -> Namespace:
    """Layouts and tables of a namespace in a domain. Raises: ObjectTooLarge."""
    layouts = tuple(ObjectLayout.of(facts, group) for group in range(len(facts.groups)))
    try:
        tables = tuple(domain.table(number, layout.group, layout.object_bytes) for layout in layouts)
    except TierFull as exc:
        raise ObjectTooLarge(str(exc)) from exc
    return Namespace(number, facts, layouts, tables)


def check_header(facts: NamespaceFacts, namespace: bytes, header: Header, *, extras: bytes = b"") -> None:
    """Whether a header is one that the block's key follows from.

    Raises: BadRequest: another namespace, a position that is no block's, or a key that the tokens don't give.
    """
    if header.namespace != namespace:
        raise BadRequest("the object's header names another namespace")
    if header.position % facts.block_tokens:
        raise BadRequest(
            f"position {header.position} is not at a block's start: blocks have {facts.block_tokens} tokens"
        )
    if (header.position == 0) != (header.parent == namespace):
        raise BadRequest("the first block of a prefix, and no other, has the namespace id as its parent")
    if header.created_ns > time.time_ns() + 300_000_000_000:
        raise BadRequest("the object's header was made more than five minutes in the future: set this host's clock")
    (key,) = block_keys(
        namespace,
        np.array(header.token_ids, np.uint32),
        facts.block_tokens,
        algorithm=facts.hash_algorithm,
        extras={0: extras} if extras else None,
        parent=header.parent,
    )
    if key != header.key:
        raise BadRequest("the object's key does not follow from its parent and tokens")


def check_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise BadRequest(f"a key has {KEY_BYTES} bytes, not {len(key)}")
    return key
