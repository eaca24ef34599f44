"""Loads from lower tiers into the first one: once per object however many ask, verified whole, then visible.

Covers single flight, tier order, holes and promotion. Which objects to load is decided by the store. Always true: a
caller that gives up does not end the load for the others; an object becomes visible only after it was verified in
memory and if no delete came in between; a failed load gives its room back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay.kvstore.channel import TierChannel
from forebay.kvstore.deletion import Deletions
from forebay.kvstore.errors import BlockCorrupt, TierError, TierFull
from forebay.kvstore.fasttier import FastTier, Room
from forebay.kvstore.gate import Owner
from forebay.kvstore.ledger import Ledger
from forebay.kvstore.tier import ObjectKey

logger = logging.getLogger(__name__)

Verify = Callable[[ObjectKey, memoryview], str | None]  # None: good; else what is wrong


class Loaded(NamedTuple):
    """A load that found its object.

    data: its bytes, where they were loaded through a scratch buffer. too_small: it is longer than the caller allowed.
    """

    tier: str
    data: memoryview | None = None
    too_small: bool = False


class Flight:
    """One object's load under way. `task` never raises but when cancelled; its None is a miss.

    `when_visible` callbacks run in the very step that makes the object visible, so that whoever needs it can pin it
    before anything evicts it again.
    """

    task: asyncio.Task[Loaded | None]

    def __init__(self, key: ObjectKey) -> None:
        self.key = key
        self.when_visible: list[Callable[[], object]] = []


class Loader:
    """The loads of one store."""

    def __init__(
        self,
        fast: FastTier,
        lower: Sequence[TierChannel],
        deletions: Deletions,
        ledger: Ledger,
        verify: Verify,
        *,
        in_flight_limit: int,
        timeout_s: float,
        thread_bytes: int,
        owner: Owner,
    ) -> None:
        self._fast, self._lower, self._deletions, self._ledger = fast, lower, deletions, ledger
        self._verify, self._owner = verify, owner
        self._timeout_s, self._thread_bytes = timeout_s, thread_bytes
        self._turns = asyncio.Semaphore(in_flight_limit)
        self._flights: dict[ObjectKey, Flight] = {}

    def start(self, key: ObjectKey, size: int, *, exact: bool, parent: bytes | None = None) -> tuple[Flight, bool]:
        """Load an object of `size` bytes (at most that many if not `exact`), or join the load under way.

        Returns: the load, and whether it was started here.
        """
        flight = self._flights.get(key)
        if flight is not None:
            self._ledger.count("loads_joined")
            return flight, False
        self._ledger.count("loads_started")
        flight = self._flights[key] = Flight(key)
        flight.task = asyncio.get_running_loop().create_task(self._fly(flight, size, exact, parent))
        flight.task.add_done_callback(lambda _: self._flights.pop(key, None))
        return flight, True

    def flight(self, key: ObjectKey) -> Flight | None:
        """The load of an object that is under way."""
        return self._flights.get(key)

    def loading(self, key: ObjectKey) -> bool:
        return key in self._flights

    async def verify(self, key: ObjectKey, view: memoryview) -> str | None:
        """What is wrong with an object's bytes, None if nothing. Large ones are checked in a thread."""
        if view.nbytes >= self._thread_bytes:
            return await asyncio.to_thread(self._verify, key, view)
        return self._verify(key, view)

    async def aclose(self) -> None:
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _fly(self, flight: Flight, size: int, exact: bool, parent: bytes | None) -> Loaded | None:
        tried: list[TierChannel] = []
        try:
            async with self._turns:
                return await self._load(flight, size, exact, parent, tried)
        except Exception:
            self._ledger.count("background_errors")
            logger.exception("a load failed in a way that no tier's error explains")
            if tried:
                tried[-1].trip("a load from it failed unexpectedly")
            return None

    async def _load(
        self, flight: Flight, size: int, exact: bool, parent: bytes | None, tried: list[TierChannel]
    ) -> Loaded | None:
        key = flight.key
        room: Room | None = None
        watch = self._deletions.watch(key)
        try:
            for channel in self._lower:
                if watch.deleted or (room is not None and room.in_use):
                    break
                if not self._may_hold(channel, key):
                    continue
                if room is None:
                    room = self._fast.room(key, size, parent=parent, exact=exact)
                    if room is None:  # here by now, or a session is writing it: then it is no hit yet
                        return Loaded(self._fast.name) if self._fast.holds(key) else None
                tried.append(channel)
                try:
                    found = await self._read(channel, key, room, exact=exact)
                except ValueError:
                    return Loaded(channel.name, too_small=True)
                if found is not None and not watch.deleted:
                    return await self._keep(channel, flight, room, found, lambda: watch.deleted)
            if watch.deleted:
                self._ledger.count("load_deleted")
            return None
        except TierFull:
            self._ledger.count("load_no_room")
            self._ledger.note(key, "not loaded: no room in the first tier")
            return None
        except TierError:
            self._ledger.count("first_trouble")
            return None
        finally:
            watch.close()
            if room is not None:
                room.close()

    def _may_hold(self, channel: TierChannel, key: ObjectKey) -> bool:
        if not channel.healthy or self._deletions.owes(channel, key):
            return False
        return not channel.answers_from_memory or channel.leading_run(key.namespace, key.group, (key.block,)) == 1

    async def _read(self, channel: TierChannel, key: ObjectKey, room: Room, *, exact: bool) -> int | None:
        """Verified bytes from one tier into the room. None: not there, damaged or in trouble, and counted.

        Raises: ValueError if the object is longer than the room and its size was not known (`exact`) beforehand.
        """
        room.enter()
        try:
            size = await channel.get_into(
                key, room.view, timeout_s=self._timeout_s, release=room.leave, owner=self._owner
            )
        except BlockCorrupt:  # counted by the channel, dropped by the tier
            self._ledger.count("load_corrupt")
            self._ledger.note(key, f"corrupt in {channel.name}")
            return None
        except TierError:
            self._ledger.count("load_trouble")
            return None
        except ValueError:
            if not exact:
                raise
            reason: str | None = "size"  # an object of another size than its namespace's can't be right
        else:
            if size is None:
                if channel.answers_from_memory:  # it said that it had it: let it correct its index
                    self._ledger.count("load_missing")
                    await self._deletions.erase(channel, key, timeout_s=self._timeout_s)
                return None
            reason = await self.verify(key, room.view[:size])
            if reason is None:
                channel.report_sound()
                return size
        self._ledger.count("load_corrupt")
        self._ledger.note(key, f"corrupt in {channel.name}: {reason}")
        channel.report_corrupt()
        await self._deletions.erase(channel, key, timeout_s=self._timeout_s)
        return None

    async def _keep(
        self, channel: TierChannel, flight: Flight, room: Room, size: int, deleted: Callable[[], bool]
    ) -> Loaded | None:
        key, data = flight.key, room.scratch(size)
        try:
            await room.keep(size, timeout_s=self._timeout_s)
        except TierError:
            self._ledger.count("load_no_room")  # to promote it; the reader still gets its bytes
            return Loaded(channel.name, data)
        if deleted():
            self._ledger.count("load_deleted")
            await self._fast.tier.delete(key)
            return None
        for visible in flight.when_visible:
            visible()
        self._fast.mark_clean(key)
        self._ledger.count("loaded")
        self._ledger.count("loaded_bytes", size)
        self._ledger.note(key, "loaded")
        return Loaded(channel.name, data)
