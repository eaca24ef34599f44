"""Tiers around a tier: slower (`Throttled`), broken on purpose (`Faulty`), measured (`Metered`).

Tests and production stack the same parts. A wrapper has exactly the optional abilities of the tier inside it, so the
store, which looks for them with `isinstance`, treats the stack like the tier. Always true: a wrapper keeps no bytes.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forebay.kvstore.errors import TierFull, TierTimeout, TierUnavailable
from forebay.kvstore.tier import (
    Borrow,
    Buffer,
    ObjectKey,
    Reservation,
    SupportsListing,
    SupportsPresence,
    SupportsProbe,
    SupportsSlots,
    Tier,
    WritableBuffer,
)

T = TypeVar("T")

_ABILITIES: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (SupportsPresence, ("leading_run",)),
    (SupportsProbe, ("probe",)),
    (SupportsListing, ("keys",)),
    (SupportsSlots, ("reserve", "borrow")),
)


class Wrapper:
    """A tier that does what the one inside does. Subclasses change single calls.

    To change an optional call, a subclass defines it with a leading underscore (`_probe`): it then shows as `probe`
    only where the inner tier has that ability. Instance attributes, not `__getattr__`, because `isinstance` on a
    protocol looks at attributes without calling `__getattr__` from Python 3.12 on.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.capacity_bytes = inner.capacity_bytes
        for ability, methods in _ABILITIES:
            if isinstance(inner, ability):
                for method in methods:
                    setattr(self, method, getattr(self, f"_{method}", None) or getattr(inner, method))
        if hasattr(inner, "accounting"):
            self.accounting: Callable[[], dict[str, int]] = inner.accounting

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        await self.inner.put(key, data, timeout_s=timeout_s)

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        return await self.inner.get_into(key, out, timeout_s=timeout_s)

    async def delete(self, key: ObjectKey) -> bool:
        return await self.inner.delete(key)

    async def aclose(self) -> None:
        await self.inner.aclose()


class Throttled(Wrapper):
    """A device that serves one call after the other: `latency_s` each, plus bytes / `bandwidth_bytes_per_s`.

    Latencies overlap, transfers queue, as on a disk or a link. A call that would end after its deadline waits until
    the deadline and raises TierTimeout. Slots (memory in place) are not slowed down.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        latency_s: float = 0.0,
        bandwidth_bytes_per_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._bandwidth = bandwidth_bytes_per_s
        self._clock, self._sleep = clock, sleep
        self._idle_from_s = 0.0

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        # Wait first, store after: cancelled or timed out while it waits, the call has stored nothing.
        left_s = await self._serve(key, memoryview(data).nbytes, timeout_s)
        await self.inner.put(key, data, timeout_s=left_s)

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        size = await self.inner.get_into(key, out, timeout_s=timeout_s)
        await self._serve(key, size or 0, timeout_s)
        return size

    async def delete(self, key: ObjectKey) -> bool:
        await self._serve(key, 0, float("inf"))
        return await self.inner.delete(key)

    async def _probe(self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float) -> int:
        left_s = await self._serve(None, 0, timeout_s)
        assert isinstance(self.inner, SupportsProbe)
        return await self.inner.probe(namespace, group, blocks, timeout_s=left_s)

    async def _serve(self, key: ObjectKey | None, size: int, timeout_s: float) -> float:
        """Wait this call's turn and service time. Returns the seconds left of `timeout_s`."""
        now = self._clock()
        done_s = max(now, self._idle_from_s) + size / self._bandwidth
        wait_s = done_s + self._latency_s - now
        if wait_s > timeout_s:
            await self._sleep(timeout_s)
            raise TierTimeout(f"would take {wait_s:.3f} s", tier=self.name, key=key)
        self._idle_from_s = done_s
        await self._sleep(wait_s)
        return timeout_s - wait_s


class Fault(enum.Enum):
    """What can go wrong in a call."""

    REFUSE = "refuse"
    """TierUnavailable before anything was done."""
    LOSE_ANSWER = "lose_answer"
    """Done, but TierUnavailable all the same: the caller can't know."""
    HANG = "hang"
    """Ignores its timeout and waits until it is cancelled; nothing was done."""
    FULL = "full"
    """TierFull (`put` and `reserve`)."""
    FLIP_BIT = "flip_bit"
    """One bit of what `get_into` returns is wrong, and nobody says so."""
    BREAK = "break"
    """An error that no tier should raise: a bug or a library's own exception (RuntimeError)."""


_FAULTS_OF: dict[str, frozenset[Fault]] = {
    "put": frozenset(Fault) - {Fault.FLIP_BIT},
    "get_into": frozenset(Fault) - {Fault.FULL},
    "delete": frozenset(Fault) - {Fault.FULL, Fault.FLIP_BIT},
    "probe": frozenset(Fault) - {Fault.FULL, Fault.FLIP_BIT},
    "reserve": frozenset({Fault.REFUSE, Fault.FULL, Fault.BREAK}),  # no await, so nothing to hang in
}


class Faulty(Wrapper):
    """Goes wrong on purpose: at random with seeded `rates`, when told to with `arm`, or always while `down`.

    `rates` maps a fault to its chance a call. `injected` counts what was done, by (call, fault).
    """

    def __init__(self, inner: Tier, *, seed: int = 0, rates: Mapping[Fault, float] | None = None) -> None:
        super().__init__(inner)
        self.rates = dict(rates or {})
        self.down = False
        self.injected: Counter[tuple[str, Fault]] = Counter()
        self._random = random.Random(seed)
        self._armed: dict[str, list[Fault]] = {}

    def arm(self, call: str, fault: Fault, times: int = 1) -> None:
        """Let the next `times` calls of `call` go wrong with `fault`.

        Raises: ValueError if that call can't go wrong so.
        """
        if fault not in _FAULTS_OF[call]:
            raise ValueError(f"{call} has no fault {fault.value}")
        self._armed.setdefault(call, []).extend([fault] * times)

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        size = memoryview(data).nbytes
        fault = await self._before("put", key, size)
        await self.inner.put(key, data, timeout_s=timeout_s)
        self._after(fault, key)

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        fault = await self._before("get_into", key)
        size = await self.inner.get_into(key, out, timeout_s=timeout_s)
        self._after(fault, key)
        if fault is Fault.FLIP_BIT and size:
            bit = self._random.randrange(size * 8)
            memoryview(out)[bit // 8] ^= 1 << bit % 8
        return size

    async def delete(self, key: ObjectKey) -> bool:
        fault = await self._before("delete", key)
        found = await self.inner.delete(key)
        self._after(fault, key)
        return found

    async def _probe(self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float) -> int:
        fault = await self._before("probe", None)
        assert isinstance(self.inner, SupportsProbe)
        run = await self.inner.probe(namespace, group, blocks, timeout_s=timeout_s)
        self._after(fault, None)
        return run

    def _reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        assert isinstance(self.inner, SupportsSlots)
        fault = self._next("reserve")
        if fault is not None:
            self._refuse(fault, key, size_bytes)
        return self.inner.reserve(key, size_bytes, parent=parent)

    def _borrow(self, key: ObjectKey) -> Borrow | None:
        assert isinstance(self.inner, SupportsSlots)
        return self.inner.borrow(key)

    def _next(self, call: str) -> Fault | None:
        armed = self._armed.get(call)
        fault = armed.pop(0) if armed else None
        if fault is None and self.down:
            fault = Fault.REFUSE
        if fault is None:
            # One draw a call, whatever the rates, so that a seed replays the same story.
            drawn = self._random.random()
            for candidate, rate in self.rates.items():
                if drawn < rate:
                    fault = candidate if candidate in _FAULTS_OF[call] else None
                    break
                drawn -= rate
        if fault is not None:
            self.injected[call, fault] += 1
        return fault

    async def _before(self, call: str, key: ObjectKey | None, size: int = 0) -> Fault | None:
        fault = self._next(call)
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        if fault is not None:
            self._refuse(fault, key, size)
        return fault

    def _refuse(self, fault: Fault, key: ObjectKey | None, size: int) -> None:
        if fault is Fault.REFUSE:
            raise TierUnavailable("injected: refused", tier=self.name, key=key)
        if fault is Fault.FULL:
            raise TierFull("injected: full", tier=self.name, key=key, need_bytes=size, free_bytes=0)
        if fault is Fault.BREAK:
            raise RuntimeError("injected: not an error of this family")

    def _after(self, fault: Fault | None, key: ObjectKey | None) -> None:
        if fault is Fault.LOSE_ANSWER:
            raise TierUnavailable("injected: answer lost", tier=self.name, key=key)


@dataclass(slots=True)
class CallMeter:
    """What one kind of call did: counts, bytes moved, seconds spent, errors by class name."""

    calls: int = 0
    bytes: int = 0
    misses: int = 0
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)


class Metered(Wrapper):
    """Counts and times every call that moves bytes; `meters` by call name. Cancelled calls count as errors."""

    def __init__(self, inner: Tier, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self.meters = {call: CallMeter() for call in ("put", "get_into", "delete", "probe")}
        self._clock = clock

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        await self._timed("put", self.inner.put(key, data, timeout_s=timeout_s))
        self.meters["put"].bytes += memoryview(data).nbytes

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        size = await self._timed("get_into", self.inner.get_into(key, out, timeout_s=timeout_s))
        self.meters["get_into"].bytes += size or 0
        self.meters["get_into"].misses += size is None
        return size

    async def delete(self, key: ObjectKey) -> bool:
        found = await self._timed("delete", self.inner.delete(key))
        self.meters["delete"].misses += not found
        return found

    async def _probe(self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float) -> int:
        assert isinstance(self.inner, SupportsProbe)
        return await self._timed("probe", self.inner.probe(namespace, group, blocks, timeout_s=timeout_s))

    async def _timed(self, call: str, running: Awaitable[T]) -> T:
        meter = self.meters[call]
        meter.calls += 1
        start_s = self._clock()
        try:
            return await running
        except BaseException as trouble:
            meter.errors[type(trouble).__name__] += 1
            raise
        finally:
            meter.seconds += self._clock() - start_s
