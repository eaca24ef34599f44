"""Lives of a store in this process: real RAM and SSD tiers under it, a disk that fails, an oracle beside it.

One life: open the directories (damaged since the last one), store, read, delete under faults, come to rest, close. Always true:
what is read has exactly the bytes of its key; what was deleted stays so unless the disk lies; at rest nothing is held, nothing
reserved, and the accounts add up; a disk that fails is told in counters or in health.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forebay.kvstore.breaker import BreakerPolicy
from forebay.kvstore.channel import ChannelPolicy, TierChannel
from forebay.kvstore.errors import TierError
from forebay.kvstore.identity import PUBLIC_SECRET, NamespaceFacts, namespace_id
from forebay.kvstore.keys import block_keys
from forebay.kvstore.objects import ObjectLayout, seal
from forebay.kvstore.store import Store, StorePolicy
from forebay.kvstore.tier import ObjectKey
from forebay.server.door import DaemonAlreadyRunning, UnixListener
from forebay.tiers.ram import RamTier, stride_of
from forebay.tiers.ssd import SsdTier
from tests.daemon_process import facts_of, payload_of, tokens_of
from tests.faults.campaign import disk
from tests.faults.campaign.recovering import in_child
from tests.faults.campaign.tally import Tally

RUN = 8  # blocks of a run
SEGMENT = 128 << 10
DIRECTORIES = 4
CAPACITY = DIRECTORIES * 2 << 20
RAM_OBJECTS = 32  # most reads go to the disk
STUCK_S = 60.0  # a life that waits longer hangs; a check of a damaged index may take 15 s, more than once
FAULT_RATE = 0.2
SMALL = facts_of(layers=1, kv_heads=1, head_dim=128)  # payloads of 8 KiB
LARGE = facts_of(layers=4, kv_heads=2, head_dim=128)  # 64 KiB: page-aligned, past all copies


class Oracle:
    """Runs of blocks, and what belongs to each."""

    def __init__(self, facts: NamespaceFacts, runs: int) -> None:
        self.layout = ObjectLayout.of(facts, 0)
        self.namespace = namespace_id(facts, tenant="default", secret=PUBLIC_SECRET)
        self.tokens = [tokens_of(seed, RUN) for seed in range(runs)]
        self.runs = [block_keys(self.namespace, tokens, facts.block_tokens) for tokens in self.tokens]
        self.all = [(run, i) for run in range(runs) for i in range(RUN)]

    def key(self, run: int, i: int) -> ObjectKey:
        return ObjectKey(self.namespace, self.runs[run][i], 0)

    def parent(self, run: int, i: int) -> bytes:
        return self.runs[run][i - 1] if i else self.namespace

    def object(self, run: int, i: int, created_ns: int) -> bytearray:
        layout, key = self.layout, self.key(run, i)
        payload = payload_of(self.namespace, key.block, layout.payload_bytes)
        view = bytearray(layout.header_bytes) + payload
        layout.write_header(
            view,
            key=key.block,
            parent=self.parent(run, i),
            namespace=self.namespace,
            position=i * layout.block_tokens,
            token_ids=self.tokens[run][i * layout.block_tokens : (i + 1) * layout.block_tokens],
            checksums=layout.part_checksums(payload),
            created_ns=created_ns,
        )
        return view

    def right(self, run: int, i: int, found: memoryview) -> bool:
        return bytes(found[self.layout.header_bytes :]) == payload_of(
            self.namespace, self.key(run, i).block, self.layout.payload_bytes
        )


class Watch:
    """A clock that may jump ahead, as that of a machine that was asleep, and a wall clock that may jump anywhere."""

    def __init__(self, rng: random.Random, tally: Tally) -> None:
        self._rng, self._tally = rng, tally
        self._ahead_s = 0.0
        self.wall_ns = time.time_ns()

    def now_s(self) -> float:
        return time.monotonic() + self._ahead_s

    def step(self) -> None:
        self._tally.fire("clock step")
        if self._rng.random() < 0.3:
            self._ahead_s += self._rng.uniform(0.5, 3600.0)
        else:
            self.wall_ns = self._rng.randrange(1 << 62)


@dataclass
class Place:
    """Directories that one life after another uses. held: on the disk now; deleted: confirmed to be gone for good."""

    folder: Path
    oracle: Oracle
    lies: bool  # the disk does
    held: set[ObjectKey] = field(default_factory=set)
    deleted: set[ObjectKey] = field(default_factory=set)
    lives: int = 0

    def __post_init__(self) -> None:
        self.folders = [self.folder / str(number) for number in range(DIRECTORIES)]

    def damage(self, rng: random.Random, tally: Tally) -> None:
        """What happens to the directories between two lives."""
        for folder in self.folders:
            kept = folder.with_suffix(".index")
            if rng.random() < 0.3:
                disk.save_index(folder, kept)
            if disk.damage(folder, rng, tally, keep_index=kept, lies=self.lies):
                self.deleted.clear()  # an index put back from an earlier time knows what was deleted since


class Life:
    """One life in a place."""

    def __init__(self, place: Place, seed: int, tally: Tally) -> None:
        self.rng = random.Random(seed)
        self.oracle, self.tally, self.folders = place.oracle, tally, place.folders
        self.held, self.deleted, self.lies = place.held, place.deleted, place.lies
        self.files = disk.FailingFiles(seed, tally, lies=place.lies)
        self.watch = Watch(self.rng, tally)
        memory = RAM_OBJECTS * stride_of(self.oracle.layout.object_bytes)
        self.ram = RamTier(capacity_bytes=memory, extent_bytes=memory, available=lambda: 1 << 40)
        self.domain = self.ram.domain("life")
        self.puts: Counter[ObjectKey] = Counter()  # begun and ended
        self.before = sum(tally.fired.values())

    async def open(self) -> None:
        self.ssd = await asyncio.to_thread(
            SsdTier,
            CAPACITY,
            self.folders,
            segment_bytes=SEGMENT,
            threads=4,
            retry_s=0.01,
            files=self.files,
            child=in_child,
        )
        breaker = BreakerPolicy(probe_after_s=0.02, probe_max_s=0.05)
        self.channel = TierChannel(
            self.ssd, policy=ChannelPolicy(breaker=breaker, fair_timeout_s=0.01), clock=self.watch.now_s
        )
        layout = self.oracle.layout
        self.store = Store(
            self.domain,
            [self.channel],
            verify=lambda key, view: layout.verify_object(view, key=key.block, namespace=key.namespace),
            seal=seal,
            settings=StorePolicy(load_timeout_s=0.5, store_timeout_s=0.5, retry_s=0.02, copy_attempts=3),
            clock=self.watch.now_s,
        )
        async with asyncio.timeout(STUCK_S):
            while any("ing the index" in reason for reason in self.ssd.health()):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.002)

    # --- single steps -------------------------------------------------------------------------------------------------

    async def put(self, run: int, i: int) -> None:
        key = self.oracle.key(run, i)
        self.deleted.discard(key)
        self.puts[key] += 1
        try:
            await self.store.put(
                key, self.oracle.object(run, i, self.watch.wall_ns), self.oracle.parent(run, i), timeout_s=1.0
            )
        except TierError:
            pass
        self.puts[key] += 1

    async def get(self, run: int, i: int, phase: str) -> None:
        key = self.oracle.key(run, i)
        out = bytearray(self.oracle.layout.object_bytes)
        expected = key in self.held
        size = await self.store.get_into(key, out, timeout_s=2.0)
        if expected:
            self.tally.read(phase, int(size is not None), 1)
        if size is not None and not self.oracle.right(run, i, memoryview(out)[:size]):
            self.tally.break_(f"wrong bytes for {key}")

    async def load(self, run: int) -> None:
        """A run into RAM, and every block of it looked at in place."""
        blocks = self.oracle.runs[run]
        loaded = await self.store.load(self.oracle.namespace, 0, blocks, self.oracle.layout.object_bytes, 2.0)
        for i in range(loaded):
            loan = self.domain.borrow(self.oracle.key(run, i))
            if loan is not None:
                if not self.oracle.right(run, i, loan.view):
                    self.tally.break_(f"wrong bytes in RAM for {self.oracle.key(run, i)}")
                loan.release()

    async def delete(self, run: int, i: int) -> None:
        key = self.oracle.key(run, i)
        self.held.discard(key)
        puts = self.puts[key]
        try:
            await self.store.delete([key], timeout_s=1.0)
        except TierError:
            return
        # A put beside it may have come after it; and a delete that the disk owes is lost with the process.
        if puts == self.puts[key] and puts % 2 == 0 and not self.store.stats()["deletes_outstanding"]:
            self.deleted.add(key)

    async def second_daemons(self) -> None:
        """Others try to use one of the directories and a socket beside it; both must be refused and say why."""
        number = self.rng.randrange(len(self.folders))
        folder, ours = self.folders[number], self.ssd._volumes[number]
        before = ours.serving
        other = await asyncio.to_thread(SsdTier, CAPACITY, [folder], segment_bytes=SEGMENT, threads=1, retry_s=30.0)
        if "in use by process" in str(other.health()):
            self.tally.fire("second daemon")
        elif before is not None and ours.serving is before:
            self.tally.break_(f"a second daemon got {folder}: {other.health()}")
        await other.aclose()
        path = folder.parent / "s"
        first, second = (UnixListener(path, mode=0o600, accepted=lambda sock: sock.close()) for _ in range(2))
        first.start()
        try:
            second.start()
        except DaemonAlreadyRunning:
            self.tally.fire("second daemon")
        else:
            self.tally.break_("two daemons on one socket")
        first.stop()

    # --- phases -------------------------------------------------------------------------------------------------------

    async def look_for_the_dead(self) -> None:
        """No object whose delete was confirmed in an earlier life is back. (A disk that lies may have lost a deletion.)"""
        for key in () if self.lies else self.deleted:
            if self.channel.leading_run(key.namespace, 0, [key.block]):
                self.tally.break_(f"{key} was deleted and is back")

    async def fill(self) -> None:
        """Store what is not there, and note what is on the disk now."""
        keys = [self.oracle.key(*place) for place in self.oracle.all]
        for place in self.oracle.all:
            await self.put(*place)
        await self.store.flush(keys, timeout_s=20.0)
        self.held.clear()
        self.held.update(key for key in keys if self.channel.leading_run(key.namespace, 0, [key.block]))

    async def read_some(self, count: int, phase: str) -> None:
        for place in self.rng.choices(self.oracle.all, k=count):
            await self.get(*place, phase)

    async def stir(self, steps: int) -> None:
        """Reads, loads, puts and deletes side by side, with faults and clock steps among them."""

        async def one() -> None:
            for _ in range(steps // 8):
                run, i = self.rng.choice(self.oracle.all)
                match self.rng.randrange(20):
                    case 0 | 1 | 2 | 3:
                        await self.delete(run, i)
                    case 4 | 5 | 6 | 7 | 8 | 9:
                        await self.put(run, i)
                    case 10:
                        await self.load(run)
                    case 11 if self.rng.random() < 0.3:
                        self.watch.step()
                        self._look_at_health()
                    case _:
                        await self.get(run, i, "faults")

        await asyncio.gather(*(one() for _ in range(8)))

    async def come_to_rest(self) -> None:
        """No more faults: the tier serves again by itself, and nothing is held for anybody."""
        self.files.rate = 0.0
        async with asyncio.timeout(STUCK_S):
            while self.ssd.health() or not self.channel.healthy or self._busy():
                self._look_at_health()
                await asyncio.sleep(0.005)
        self._tell()
        self.ram.audit()
        account = self.ram.accounting()
        if self.ram.index.refs.any() or account.allocated or account.quarantined:
            self.tally.break_(f"held at rest: {account}")

    def _look_at_health(self) -> None:
        """A directory that doesn't serve is told of."""
        before = self.ssd.stats()["serving"]
        told = self.ssd.health()
        if before == self.ssd.stats()["serving"] < len(self.folders) and not told:
            self.tally.break_("a directory does not serve, and health tells nothing")

    def _busy(self) -> bool:
        stats, store = self.channel.stats(), self.store.stats()
        return bool(
            stats["running"]
            or stats["loads_waiting"]
            or stats["stores_waiting"]
            or stats["outstanding_bytes"]
            or store["copies_waiting"]
            or store["deletes_outstanding"]
        )

    def _tell(self) -> None:
        """What counters say; faults that left no trace in any of them were hidden."""
        channel, store = self.channel.stats(), self.store.stats()
        names = ("timeouts", "queue_timeouts", "unavailable", "full", "corrupt", "stores_dropped", "loads_refused")
        seen: Counter[str] = Counter({f"ssd {name}": int(channel[name]) for name in names})
        names = ("load_corrupt", "load_trouble", "load_deadline", "copy_trouble", "copy_full", "copy_given_up")
        seen.update({name: int(store[name]) for name in names})
        counters = self.ssd.stats()["counters"]
        seen.update({f"ssd {name}": int(counters[name]) for name in ("records_corrupt", "failures")})
        self.tally.told.update(seen)
        errors = store["background_errors"] + channel["unexpected_errors"]
        if errors:
            self.tally.break_(f"{errors:.0f} errors that nothing explains")
        if sum(self.tally.fired.values()) - self.before > 50 and not seen.total():
            self.tally.break_("faults that no counter tells of")

    async def close(self) -> None:
        await self.store.aclose(5.0)
        await self.channel.aclose()
        await self.ram.aclose()


async def live(life: Life, seed: int, tally: Tally, *, steps: int) -> None:
    """One life, from opening damaged directories to closing them. Without steps it has no faults either."""
    await life.open()
    try:
        async with asyncio.timeout(STUCK_S):
            await life.look_for_the_dead()
            await life.read_some(20, "faults")  # whatever the damage has left
            await life.fill()
            if steps:
                await life.second_daemons()
                life.files.rate = FAULT_RATE
                await life.stir(steps)
                await life.second_daemons()
                await life.come_to_rest()
                await life.read_some(20, "faults")
            else:
                await life.read_some(500, "clean")
                await life.come_to_rest()
    except TimeoutError:
        tally.break_(f"a life hangs (seed {seed}): {life.ssd.health()}, {life.channel.stats()}, {life.store.stats()}")
    finally:
        life.files.rate = 0.0
        await life.close()


def run(seed: int, lives: int, folder: Path, tally: Tally, *, steps: int = 800) -> None:
    """So many lives in turn in three places: on a disk that fails, on one that lies, too, and there with large objects."""
    rng = random.Random(seed)
    small, large = Oracle(SMALL, 40), Oracle(LARGE, 3)
    fails, lies, wide = (
        Place(folder / "fails", small, lies=False),
        Place(folder / "lies", small, lies=True),
        Place(folder / "wide", large, lies=True),
    )
    for number in range(lives):
        place = (fails, lies, lies, lies, fails, lies, lies, wide)[number % 8]
        place.folder.mkdir(exist_ok=True)
        if place.lives:
            place.damage(rng, tally)
        life_seed = rng.randrange(1 << 32)
        asyncio.run(live(Life(place, life_seed, tally), life_seed, tally, steps=steps if place.lives else 0))
        place.lives += 1
