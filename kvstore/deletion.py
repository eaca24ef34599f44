"""Deletes that win: against loads and copies in flight, and against tiers that can't be reached just now.

A load or copy opens a `Watch` on its object and looks at `deleted` before it makes anything visible. A delete that a
lower tier has not confirmed is *owed*: that tier's copy is treated as absent, and a background task asks again until
it is gone. What is owed lives in memory only: a copy that survives a restart of both is found again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from forebay.kvstore.channel import TierChannel
from forebay.kvstore.errors import TierError
from forebay.kvstore.gate import Owner
from forebay.kvstore.ledger import Ledger
from forebay.kvstore.tier import ObjectKey

logger = logging.getLogger(__name__)


class Watch:
    """Opened by whoever may make an object visible; `deleted` turns True when a delete comes. Close it in the end."""

    def __init__(self, owner: Deletions, key: ObjectKey, deleted: bool) -> None:
        self.key = key
        self.deleted = deleted
        self._owner = owner

    def close(self) -> None:
        self._owner._forget(self)


class Deletions:
    """The deletes of one store: under way and owed."""

    def __init__(
        self,
        lower: Sequence[TierChannel],
        ledger: Ledger,
        *,
        retry_s: float,
        owed_limit: int,
        timeout_s: float,
        sleep: Callable[[float], Awaitable[None]],
        owner: Owner,
    ) -> None:
        self._ledger, self._owner = ledger, owner
        self._retry_s, self._owed_limit, self._timeout_s = retry_s, owed_limit, timeout_s
        self._sleep = sleep
        self._watches: dict[ObjectKey, set[Watch]] = {}
        self._under_way: Counter[ObjectKey] = Counter()
        self._owed: dict[TierChannel, set[ObjectKey]] = {channel: set() for channel in lower}
        self._sweeper: asyncio.Task[None] | None = None
        self._closed = False

    def watch(self, key: ObjectKey) -> Watch:
        watch = Watch(self, key, key in self._under_way)
        self._watches.setdefault(key, set()).add(watch)
        return watch

    def _forget(self, watch: Watch) -> None:
        watches = self._watches.get(watch.key)
        if watches is not None:
            watches.discard(watch)
            if not watches:
                del self._watches[watch.key]

    @contextmanager
    def under_way(self, keys: Sequence[ObjectKey]) -> Iterator[None]:
        """While it lasts, every watch on `keys`, old or new, says deleted."""
        for key in keys:
            self._under_way[key] += 1
            for watch in self._watches.get(key, ()):
                watch.deleted = True
        try:
            yield
        finally:
            self._under_way.subtract(keys)
            for key in set(keys):
                if not self._under_way[key]:
                    del self._under_way[key]

    async def erase(self, channel: TierChannel, key: ObjectKey, *, timeout_s: float) -> bool:
        """Delete from a lower tier, owing it if that fails. Returns whether the tier says that it was there."""
        try:
            return await channel.delete(key, timeout_s=timeout_s, owner=self._owner)
        except TierError:
            self.owe(channel, key)
            return False
        except asyncio.CancelledError:
            self.owe(channel, key)
            raise

    def owe(self, channel: TierChannel, key: ObjectKey) -> None:
        """From now on `channel` does not hold `key`, and it is told so until it agrees."""
        owed = self._owed[channel]
        if key in owed:
            return
        if self.owed >= self._owed_limit:
            self._ledger.count("deletes_lost")
            logger.error("tier %s: too many deletes owed, one is lost", channel.name)
            return
        owed.add(key)
        self._ledger.count("deletes_owed")
        if not self._closed and (self._sweeper is None or self._sweeper.done()):
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    @property
    def owed(self) -> int:
        return sum(map(len, self._owed.values()))

    def owes(self, channel: TierChannel, key: ObjectKey) -> bool:
        return key in self._owed[channel]

    def cut(self, channel: TierChannel, namespace: bytes, group: int, blocks: Sequence[bytes], run: int) -> int:
        """`run`, ended before the first block whose delete `channel` owes."""
        owed = self._owed[channel]
        if not owed:
            return run
        return next((i for i in range(run) if ObjectKey(namespace, blocks[i], group) in owed), run)

    async def _sweep(self) -> None:
        try:
            while self.owed:
                for channel, owed in self._owed.items():
                    for key in list(owed):
                        if not channel.healthy:
                            break
                        try:
                            await channel.delete(key, timeout_s=self._timeout_s, owner=self._owner)
                        except TierError:
                            break
                        owed.discard(key)
                if self.owed:
                    await self._sleep(self._retry_s)
        except Exception:
            self._ledger.count("background_errors")
            logger.exception("deletes owed are no longer asked for")

    async def aclose(self) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait((self._sweeper,))
        if self.owed:
            logger.warning("%d deletes are still owed by lower tiers", self.owed)
