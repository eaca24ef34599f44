"""Doubles that the store's tests share: a clock that stands still, and tiers whose calls wait to be let go."""

from __future__ import annotations

import asyncio

from forebay.kvstore.tier import Buffer, ObjectKey, WritableBuffer
from forebay.tiers.memory import MemoryTier


class FakeTime:
    """A clock that only `pass_by` moves; sleepers wake when it reaches them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        wake = asyncio.Event()
        self._sleepers.append((self.now_s + seconds, wake))
        await wake.wait()

    async def pass_by(self, seconds: float) -> None:
        await settle()
        self.now_s += seconds
        for at_s, wake in list(self._sleepers):
            if at_s <= self.now_s:
                wake.set()
                self._sleepers.remove((at_s, wake))
        await settle()


async def settle() -> None:
    """Let all tasks run until they wait for something that is not going to happen by itself."""
    for _ in range(20):
        await asyncio.sleep(0)


class GatedTier(MemoryTier):
    """A tier whose calls wait until they are let go, one by one, and that notes the order in which they began."""

    def __init__(self) -> None:
        super().__init__("gated", 1 << 20)
        self.began: list[str] = []
        self.go = asyncio.Semaphore(0)

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        self.began.append(f"put {key.block[0]}")
        await self.go.acquire()
        await super().put(key, data, timeout_s=timeout_s)

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        self.began.append(f"get {key.block[0]}")
        size = await super().get_into(key, out, timeout_s=timeout_s)  # read first: what happens later comes too late
        await self.go.acquire()
        return size


class DeafTier(MemoryTier):
    """Ignores cancellation, and does what it was asked to when it is let go, however late."""

    def __init__(self) -> None:
        super().__init__("deaf", 1 << 20)
        self.go = asyncio.Event()

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        await self._wait()
        await super().put(key, data, timeout_s=timeout_s)

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        await self._wait()
        return await super().get_into(key, out, timeout_s=timeout_s)

    async def _wait(self) -> None:
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                pass
