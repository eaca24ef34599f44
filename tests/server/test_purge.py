"""Purge, times to live and timed pins: what is meant goes, on all tiers, and nothing in flight brings it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.clients import Client, HttpClient
from forebay.kvstore.errors import BadRequest, Forbidden, OverLimit, UnknownHandle
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.tier import ObjectKey
from forebay.server import auth, expiry
from forebay.server.auth import LOCAL, Principal
from forebay.server.blocks import make_namespace
from forebay.server.daemon import Daemon
from forebay.server.expiry import Expiries
from forebay.server.purge import Scope, purge, scope_of
from forebay.server.sessions import Namespace
from forebay.server.settings import Settings
from forebay.tiers.memory import MemoryTier
from forebay.tiers.ram import RamDomain, RamTier
from forebay.tiers.wrappers import Throttled
from tests.daemon_process import MIB, DaemonProcess, facts_of, payload_of, serving, tokens_of

FACTS = facts_of()
LAYOUT = ObjectLayout.of(FACTS)


class World:
    """A daemon in this process over a tier in memory, whose loads and stores can be held."""

    def __init__(self, folder: Path) -> None:
        self.below = MemoryTier("below", 64 * MIB)
        self.slow = Throttled(self.below, latency_s=0.0)
        settings = Settings.load(
            None, socket=folder / "s", http_port=-1, ram_bytes=16 * MIB, extent_bytes=MIB, memory_reserve_bytes=0,
            ssd_bytes=0, drain_s=0.1,
        )  # fmt: skip
        self.daemon = Daemon(settings, lower=[self.slow])

    def space(self, salt: bytes, uid: int = 0, tenant: str = "default") -> tuple[RamDomain, Namespace]:
        domain, facts = self.daemon.domain_of(tenant, uid), facts_of(salt=salt)
        namespace = make_namespace(domain, self.daemon.namespace_id(facts, tenant), facts)
        self.daemon.note_namespace(domain, namespace)
        return domain, namespace

    async def store(self, domain: RamDomain, namespace: Namespace, seed: int, *, age_s: float = 0.0) -> ObjectKey:
        from forebay.kvstore.keys import block_keys

        tokens = tokens_of(seed, 1)
        (key,) = block_keys(namespace.id, tokens, FACTS.block_tokens)
        data = bytearray(LAYOUT.object_bytes)
        data[LAYOUT.header_bytes :] = payload_of(namespace.id, key, LAYOUT.payload_bytes)
        LAYOUT.write_header(
            data, key=key, parent=None, namespace=namespace.id, position=0, token_ids=tokens,
            checksums=LAYOUT.part_checksums(data[LAYOUT.header_bytes :]), created_ns=time.time_ns() - int(age_s * 1e9),
        )  # fmt: skip
        wanted = ObjectKey(namespace.id, key)
        await self.daemon.store_of(domain).put(wanted, data)
        return wanted

    def everywhere(self, domain: RamDomain, key: ObjectKey) -> tuple[bool, bool]:
        """Whether RAM, and the tier below, hold it."""
        return (
            domain.leading_run(key.namespace, key.group, [key.block]) == 1,
            self.below.leading_run(key.namespace, key.group, [key.block]) == 1,
        )

    async def copied(self, domain: RamDomain, keys: list[ObjectKey]) -> None:
        assert (await self.daemon.flush(domain, keys, 5.0))[0] == len(keys)

    def all(self) -> Scope:
        return scope_of(self.daemon, LOCAL, 0, "")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.daemon.start()
    yield world
    world.daemon.ram.audit()
    await world.daemon.drain()


async def test_a_namespace_is_purged_on_all_tiers_and_no_other(world: World) -> None:
    domain, one = world.space(b"one")
    _, two = world.space(b"two")
    keys = [await world.store(domain, one, seed) for seed in range(5)]
    kept = await world.store(domain, two, 9)
    await world.copied(domain, [*keys, kept])
    below_only = keys[0]
    await domain.delete(below_only)
    assert world.everywhere(domain, below_only) == (False, True)
    done = await purge(world.daemon, world.all(), [one.id])
    assert done.objects >= 5 and done.unlisted == ()
    assert [world.everywhere(domain, key) for key in keys] == [(False, False)] * 5
    assert world.everywhere(domain, kept) == (True, True)


async def test_purge_by_age_takes_the_old_ones_only(world: World) -> None:
    domain, one = world.space(b"age")
    old, young = await world.store(domain, one, 1, age_s=100), await world.store(domain, one, 2)
    old_below = await world.store(domain, one, 3, age_s=100)
    await world.copied(domain, [old, young, old_below])
    await domain.delete(old_below)
    await purge(world.daemon, world.all(), older_than_s=50)
    assert world.everywhere(domain, old) == world.everywhere(domain, old_below) == (False, False)
    assert world.everywhere(domain, young) == (True, True)


async def test_purging_everything_takes_what_no_session_knows_from_lower_tiers(world: World) -> None:
    stranger = ObjectKey(b"s" * 16, b"k" * 16)
    await world.below.put(stranger, b"of an earlier life", timeout_s=1)
    await purge(world.daemon, world.all())
    assert world.below.leading_run(stranger.namespace, 0, [stranger.block]) == 0


async def test_a_copy_under_way_does_not_bring_a_purged_object_back(world: World) -> None:
    domain, one = world.space(b"late write-back")
    world.slow._latency_s = 0.2
    key = await world.store(domain, one, 1)
    flushing = asyncio.create_task(world.daemon.flush(domain, [key], 5.0))
    await asyncio.sleep(0.05)
    await purge(world.daemon, world.all(), [one.id])
    await flushing
    await asyncio.sleep(0.4)
    assert world.everywhere(domain, key) == (False, False)


async def test_a_load_under_way_does_not_bring_a_purged_object_back(world: World) -> None:
    domain, one = world.space(b"late load")
    key = await world.store(domain, one, 1)
    await world.copied(domain, [key])
    await domain.delete(key)
    world.slow._latency_s = 0.2
    loading = asyncio.create_task(
        world.daemon.store_of(domain).load(key.namespace, 0, [key.block], LAYOUT.object_bytes, 5.0)
    )
    await asyncio.sleep(0.05)
    await purge(world.daemon, world.all(), [one.id])
    assert await loading == 0
    assert world.everywhere(domain, key) == (False, False)


async def test_what_was_allocated_before_a_purge_over_http_is_not_shown_after_it(world: World) -> None:
    blocks = world.daemon.blocks
    namespace = blocks.open(LOCAL, FACTS)
    await blocks.make_room(LOCAL, namespace, 0, 1)
    with blocks.place(LOCAL, namespace, 0, b"k" * 16, namespace.id) as place:
        await purge(world.daemon, scope_of(world.daemon, LOCAL, None, ""))
        with pytest.raises(BadRequest, match="purged"):
            await blocks.commit(LOCAL, namespace, place, None, seen=True)  # type: ignore[arg-type]
    assert world.daemon.ram.allocated_bytes == 0


async def test_a_purge_reaches_no_further_than_its_scope(world: World) -> None:
    ours, one = world.space(b"ours", uid=1234)
    theirs, two = world.space(b"theirs", uid=77)
    kept, gone = await world.store(theirs, two, 1), await world.store(ours, one, 1)
    scope = scope_of(world.daemon, LOCAL, 1234, "")
    assert not scope.everything
    await purge(world.daemon, scope)
    assert world.everywhere(ours, gone)[0] is False and world.everywhere(theirs, kept)[0]
    with pytest.raises(UnknownHandle):
        await purge(world.daemon, scope, [two.id])
    tenant = Principal("acme", frozenset({"admin"}))
    with pytest.raises(Forbidden):
        scope_of(world.daemon, tenant, 1234, "globex")
    assert scope_of(world.daemon, tenant, 1234, "acme").domains == (world.daemon.domain_of("acme", 1234),)


# --- through the doors ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("purge"), lower="plain", http_port=0)


def stored(space: Any, seed: int, blocks: int) -> tuple[list[bytes], list[int], list[bytes]]:
    tokens = tokens_of(seed, blocks)
    keys = space.keys(tokens)
    payloads = [payload_of(space.id, key, LAYOUT.payload_bytes) for key in keys]
    assert space.put(keys, tokens, payloads).stored == blocks
    return keys, tokens, payloads


def test_an_allocation_made_before_a_purge_is_not_shown_when_it_is_committed(running: DaemonProcess) -> None:
    with Client(running.socket) as client:
        space = client.open(facts_of(salt=b"alloc"))
        tokens = tokens_of(3, 2)
        keys = space.keys(tokens)
        with space.allocate(keys, tokens) as allocation:
            for slot in allocation.slots:
                assert slot.view is not None
                slot.view[:] = payload_of(space.id, keys[slot.index], LAYOUT.payload_bytes)
            client.purge([space.id])
            assert allocation.commit().stored == 0
        assert space.match(keys).blocks == 0
        stored(space, 3, 2)  # and what comes after it is
        assert client.purge([space.id])[0] >= 2
    running.at_base()


def test_the_doors_purge_pin_and_expire(running: DaemonProcess) -> None:
    with HttpClient(running.stats()["http_url"]) as http, Client(running.socket) as client:
        over_http, local = http.open(FACTS), client.open(FACTS)
        keys, _, _ = stored(over_http, 1, 3)
        stored(local, 1, 3)
        path = f"/v1/namespaces/{over_http.id.hex()}"
        hexes = [key.hex() for key in keys]
        assert http.ask("POST", f"{path}/pin", {"keys": hexes, "seconds": 60})["pinned"] == 3
        assert http.ask("POST", f"{path}/expire", {"keys": hexes[2:], "seconds": 0.01})["expiring"] == 1
        assert local.pin(keys, for_s=0.2) == 3 and local.explain(keys)[0]["pinned"]
        assert local.expire(keys[2:], 0.01) == 1
        deadline_s = time.monotonic() + 10
        while over_http.match(keys).blocks + local.match(keys).blocks > 4 or local.explain(keys)[0]["pinned"]:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        said = http.ask("POST", "/v1/purge", {"namespaces": [over_http.id.hex()]})
        assert said["objects"] >= 2 and said["unlisted"] == []
        assert over_http.match(keys).blocks == 0
        client.purge()
        assert local.match(keys).blocks == 0
        for seconds in (0, -1, expiry.MAX_SECONDS + 1):
            with pytest.raises((BadRequest, ValueError)):
                local.expire(keys, seconds)
    running.at_base()


# --- times, with a clock of their own -------------------------------------------------------------------------------------


class Timed:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.tier = RamTier(capacity_bytes=4 * MIB, extent_bytes=MIB)
        self.domain = self.tier.domain("default/0")
        self.table = self.domain.table(b"n" * 16, 0, 16 << 10)
        self.expiries = Expiries(self.forget, clock=lambda: self.now_s)

    async def forget(self, domain: RamDomain, keys: Any) -> int:
        return sum([await domain.delete(key) for key in keys])

    def store(self, number: int) -> ObjectKey:
        key = number.to_bytes(16, "little")
        got = self.domain.allocate(self.table, [key], b"n" * 16, blocking=True)
        self.domain.commit(self.table, got.rows)
        return ObjectKey(b"n" * 16, key)

    def row(self, key: ObjectKey) -> np.ndarray[Any, Any]:
        return np.array([self.table.get(key.block)])


async def test_a_timed_pin_ends_at_its_time_and_touches_nothing_else() -> None:
    timed = Timed()
    one, two = timed.store(1), timed.store(2)
    rows = timed.row(one)
    timed.expiries.pin(timed.domain, rows, 10)
    timed.domain.pin(timed.row(two))
    timed.now_s += 9.9
    await timed.expiries.tick()
    assert timed.tier.index.pins.item(rows[0]) == 1
    timed.now_s += 0.2
    await timed.expiries.tick()
    assert timed.tier.index.pins.item(rows[0]) == 0 and timed.tier.index.pins.item(timed.row(two)[0]) == 1
    timed.expiries.pin(timed.domain, rows, 10)
    await timed.domain.delete(one)
    for number in range(3, 40):  # somebody else's objects, in rows and places that are used again
        timed.domain.pin(timed.row(timed.store(number)))
    before = timed.tier.pinned_bytes
    timed.now_s += 11
    await timed.expiries.tick()
    assert timed.tier.pinned_bytes == before
    timed.tier.audit()
    await timed.tier.aclose()


async def test_a_time_to_live_ends_at_its_time_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed()
    keys = [timed.store(number) for number in range(4)]
    await timed.expiries.forget_after(timed.domain, keys[2:], 20)
    await timed.expiries.forget_after(timed.domain, keys[:2], 5)
    timed.now_s += 5
    await timed.expiries.tick()
    assert [timed.table.get(key.block) >= 0 for key in keys] == [False, False, True, True]
    timed.now_s += 15
    await timed.expiries.tick()
    assert timed.table.visible == 0 and timed.expiries.stats()["waiting_blocks"] == 0
    monkeypatch.setattr(expiry, "MAX_BLOCKS", 3)
    with pytest.raises(OverLimit):
        await timed.expiries.forget_after(timed.domain, keys, 5)
    for seconds in (0, -1, float("nan"), expiry.MAX_SECONDS * 2):
        with pytest.raises(BadRequest):
            timed.expiries.pin(timed.domain, np.empty(0, np.int64), seconds)
    await timed.tier.aclose()


def test_purge_needs_the_right_to_administer() -> None:
    assert auth.VERB_RIGHTS["purge"] == auth.ADMIN
