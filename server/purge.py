"""Purge: forget whole namespaces, a tenant, or what is older than some age, on all tiers.

Covers which objects are meant, in RAM and in lower tiers that can list, and writers that are at it. Single keys are
`delete`'s. Always true: what a purge has forgotten doesn't come back: loads and copies in flight are fenced by the stores'
deletions, and what was allocated before a purge without an age is not shown when it is committed after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from forebay.kvstore.channel import TierChannel
from forebay.kvstore.errors import BlockCorrupt, TierError, UnknownHandle
from forebay.kvstore.index import Table
from forebay.kvstore.objects import CREATED_OFFSET
from forebay.kvstore.tier import ObjectKey, SupportsListing
from forebay.server.auth import Principal
from forebay.server.sessions import Namespace
from forebay.tiers.ram import RamDomain

if TYPE_CHECKING:
    from forebay.server.daemon import Daemon

log = logging.getLogger("forebay.purge")

_BATCH: Final = 1024
_LOOKS: Final = 512  # headers read before others get their turn
_READ_S: Final = 5.0
_FIRST_READ_BYTES: Final = 1 << 20
_MAX_READ_BYTES: Final = 1 << 30
_PASSES: Final = 3  # over what lower tiers list: a copy that began before the purge may land during the first


@dataclass(frozen=True)
class Purged:
    """What a purge did. `unlisted`: tiers that can't list what they hold, so only what RAM knew was forgotten there."""

    objects: int
    unlisted: tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """What a caller may purge: trust domains, and whether that is all there is."""

    domains: tuple[RamDomain, ...]
    everything: bool


def scope_of(daemon: Daemon, principal: Principal, uid: int | None, tenant: str) -> Scope:
    """The trust domains that a caller may purge. `tenant`: asked for by an operator; "" is the caller's own.

    Raises: Forbidden: another tenant than the caller's own.
    """
    if tenant and tenant != principal.tenant:
        principal.check_operator("purge of another tenant")
    domains = daemon.ram.domains
    if daemon.access.required:
        wanted = f"{tenant or principal.tenant}/"
        return Scope(tuple(each for name, each in domains.items() if name.startswith(wanted)), False)
    if uid in (0, os.getuid()):  # who runs the daemon
        return Scope(tuple(domains.values()), True)
    return Scope((daemon.domain_of(principal.tenant, uid),), False)


async def purge(daemon: Daemon, scope: Scope, namespaces: Collection[bytes] = (), older_than_s: float = 0.0) -> Purged:
    """Forget all objects in scope: of `namespaces` (none given: of all), and created more than `older_than_s` ago.

    Raises: UnknownHandle: a namespace that is not in scope, as far as this daemon knows.
    """
    names = {domain.domain_name for domain in scope.domains}
    known = {number for domain, number in daemon.namespaces if domain in names}
    if not scope.everything and (foreign := set(namespaces) - known):
        raise UnknownHandle(
            f"{len(foreign)} of these namespaces were not opened here since this daemon started: open them"
        )
    wanted = set(namespaces) or (None if scope.everything else known)
    before_ns = time.time_ns() - int(older_than_s * 1e9) if older_than_s else None
    forgotten = 0
    for domain in scope.domains:
        tables = [table for (number, _), table in domain.tables.items() if wanted is None or number in wanted]
        if before_ns is None:
            _stop_writers(daemon, tables)
        for table in tables:
            forgotten += await _purge_table(daemon, domain, table, before_ns)
    unlisted = []
    for channel in daemon.lower:
        if isinstance(channel.tier, SupportsListing):
            forgotten += await _purge_lower(daemon, scope, channel, wanted, before_ns)
        else:
            unlisted.append(channel.name)
    log.info(
        "purged",
        extra={
            "objects": forgotten,
            "namespaces": len(namespaces),
            "older_than_s": older_than_s,
            "unlisted": len(unlisted),
        },
    )
    return Purged(forgotten, tuple(unlisted))


def _stop_writers(daemon: Daemon, tables: Sequence[Table]) -> None:
    """What is being written now belongs to the past that is purged: it is not shown when it is committed."""
    numbers = {table.number for table in tables}
    for session in daemon.registry.sessions.values():
        for allocation in session.allocations.values():
            if allocation.namespace.tables[allocation.group].number in numbers:
                allocation.purged = True
    for receiving in daemon.blocks.receiving:
        if receiving.table.number in numbers:
            receiving.purged = True


async def _purge_table(daemon: Daemon, domain: RamDomain, table: Table, before_ns: int | None) -> int:
    if before_ns is None:
        for row in list(table.hidden.values()):
            domain.drop_unfinished(row)
    forgotten = 0
    keys = list(table)
    for start in range(0, len(keys), _BATCH):
        some = keys[start : start + _BATCH]
        if before_ns is not None:
            some = [key async for key in _older(domain, table, some, before_ns)]
        wanted = [daemon.object_key(table, key) for key in some]
        forgotten += await daemon.delete(domain, wanted) if wanted else 0
        await asyncio.sleep(0)
    return forgotten


async def _older(domain: RamDomain, table: Table, keys: Sequence[bytes], before_ns: int) -> AsyncIterator[bytes]:
    for position, key in enumerate(keys):
        if position % _LOOKS == _LOOKS - 1:
            await asyncio.sleep(0)
        row = table.get(key)
        if row >= 0 and _created_ns(domain.object_view(row)) < before_ns:
            yield key


def _created_ns(view: memoryview) -> int:
    (created,) = struct.unpack_from("<Q", view, CREATED_OFFSET)
    return int(created)


async def _purge_lower(
    daemon: Daemon, scope: Scope, channel: TierChannel, wanted: set[bytes] | None, before_ns: int | None
) -> int:
    """Through every store in scope, since each fences its own loads and copies."""
    stores = [daemon.store_of(domain) for domain in scope.domains]
    if not stores:
        stores = [daemon.store_of(daemon.domain_of("default", None))]
    forgotten = 0
    for _ in range(_PASSES):
        keys = await _listed(channel, wanted)
        gone = 0
        for start in range(0, len(keys), _BATCH):
            some = keys[start : start + _BATCH]
            if before_ns is not None:
                spaces = {number: space for (_, number), space in daemon.namespaces.items()}
                ages = [(key, await _age(channel, key, spaces)) for key in some]
                some = [key for key, created in ages if created is not None and created < before_ns]
            found = 0
            for store in stores if some else ():
                found = max(found, await store.delete(some))
            gone += found
            await asyncio.sleep(0)
        forgotten += gone
        if not gone:
            break
    return forgotten


async def _age(channel: TierChannel, key: ObjectKey, namespaces: Mapping[bytes, Namespace]) -> int | None:
    """When an object was created, in nanoseconds since the epoch. Reads all of it: no tier keeps its header apart."""
    known = namespaces.get(key.namespace)
    size = known.tables[key.group].object_bytes if known is not None else _FIRST_READ_BYTES
    while size <= _MAX_READ_BYTES:
        scratch = memoryview(bytearray(size))
        try:
            found = await channel.get_into(key, scratch, timeout_s=_READ_S)
        except ValueError:
            size *= 8
            continue
        except BlockCorrupt:
            return 0  # damaged: as old as can be
        except TierError:
            return None
        return None if found is None else _created_ns(scratch)
    return None


async def _listed(channel: TierChannel, wanted: set[bytes] | None) -> list[ObjectKey]:
    """What a tier lists, in a thread: an index on disk takes its time."""
    tier = channel.tier
    assert isinstance(tier, SupportsListing)

    def walk() -> list[ObjectKey]:
        listed = tier.keys()
        return [key for key in listed if wanted is None or key.namespace in wanted]

    for _ in range(8):
        try:
            return await asyncio.to_thread(walk)
        except RuntimeError:  # a tier in memory changed under the walk
            await asyncio.sleep(0)
    return walk()
