"""The store's way to one shared tier: deadlines, breaker, bounded queues, health, counters and measured costs.

One channel a tier, shared by all stores of the process. It moves no bytes itself and keeps none. Always true: a call
ends by its deadline whatever the tier does; loads go before stores; owners of waiting calls (tenants) take turns; nothing
waits in a queue without bound; an error
that leaves here is of the TierError family (or ValueError, a caller's mistake). Verification is the store's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from forebay.kvstore.breaker import Breaker, BreakerPolicy
from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.errors import (
    BlockCorrupt,
    TierClosed,
    TierError,
    TierFull,
    TierTimeout,
    TierUnavailable,
)
from forebay.kvstore.gate import Gate, Lane, Owner
from forebay.kvstore.measure import LoadMeter
from forebay.kvstore.tier import (
    Buffer,
    ObjectKey,
    SupportsPresence,
    SupportsProbe,
    Tier,
    WritableBuffer,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Nobody can store under it (a namespace id is an HMAC), so a miss is the answer of a medium that works.
_CANARY = ObjectKey(bytes(16), b"forebay: a probe")


class TierBusy(TierError):
    """The channel's queue is full, so nothing was sent. Not a fault of the medium."""


@dataclass(frozen=True, kw_only=True)
class ChannelPolicy:
    """Bounds of one channel.

    concurrency, store_concurrency: calls in the tier at once, and how many of them may be stores.
    load_queue, store_queue: calls that may wait; one more is refused with TierBusy.
    settle_s: how long after its deadline a call may take to stop, before its buffer is given up as in use.
    fair_timeout_s: a timeout shorter than this says more about the caller than about the medium, and is not held
        against it.
    prior_latency_s, prior_bandwidth_bytes_per_s: estimates before anything was measured.
    """

    concurrency: int = 8
    store_concurrency: int = 2
    load_queue: int = 4096
    store_queue: int = 256
    settle_s: float = 0.05
    fair_timeout_s: float = 0.1
    probe_timeout_s: float = 1.0
    prior_latency_s: float = 1e-3
    prior_bandwidth_bytes_per_s: float = 1e9
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)


class TierChannel:
    """All that stores do with one tier goes through here. A call's `owner` is on whose behalf it is: owners take turns.

    `release`, where a call takes it, is called exactly once: when the tier can no longer touch the call's buffer. That
    is before the call ends, except for a tier that goes on after it was cancelled: then it is later, and the buffer
    must not be reused until then.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        policy: ChannelPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.tier = tier
        self.name = tier.name
        self.capacity_bytes = tier.capacity_bytes
        self._policy = policy or ChannelPolicy()
        self._clock, self._sleep = clock, sleep
        self._presence = tier if isinstance(tier, SupportsPresence) else None
        self._probe = tier if isinstance(tier, SupportsProbe) else None
        self._breaker = Breaker(self._policy.breaker, clock)
        self._gate = Gate(self._policy.concurrency, self._policy.store_concurrency)
        self._meter = LoadMeter(
            prior_latency_s=self._policy.prior_latency_s,
            prior_bandwidth_bytes_per_s=self._policy.prior_bandwidth_bytes_per_s,
        )
        self._counters: Counter[str] = Counter()
        self._outstanding_bytes = 0
        self._corrupt_in_row = 0
        self._prober: asyncio.Task[None] | None = None
        self._closed = False

    # --- health and costs -----------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether calls are let through."""
        return self._breaker.closed and not self._closed

    @property
    def answers_from_memory(self) -> bool:
        return self._presence is not None

    @property
    def answers_probes(self) -> bool:
        return self._probe is not None

    def estimate(self, object_bytes: int | None = None) -> TierEstimate:
        """Present costs of loading objects of about `object_bytes` (None: the size loaded last)."""
        latency_s = self._meter.latency_s(0.5)
        return TierEstimate(
            latency_s=latency_s,
            bandwidth_bytes_per_s=self._meter.bandwidth_bytes_per_s(object_bytes),
            queued_bytes=self._outstanding_bytes,
            overhead_s_per_object=latency_s / self._policy.concurrency,  # latencies of a batch overlap this deep
            healthy=self.healthy,
        )

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges: state of breaker and queues, measured costs."""
        return {
            **dict.fromkeys(_COUNTERS, 0),
            **self._counters,
            "healthy": int(self.healthy),
            "breaker_opened": self._breaker.opened,
            "running": self._gate.running,
            "loads_waiting": self._gate.waiting(Lane.LOAD),
            "stores_waiting": self._gate.waiting(Lane.STORE),
            "outstanding_bytes": self._outstanding_bytes,
            "latency_s_p50": self._meter.latency_s(0.5),
            "latency_s_p95": self._meter.latency_s(0.95),
            "bandwidth_bytes_per_s": self._meter.bandwidth_bytes_per_s(),
        }

    def report_corrupt(self) -> None:
        """The store found bytes from this tier to be wrong: a medium that keeps damaging data is as good as down.

        Judged apart from the breaker's other failures, because to the channel each of these calls was a success.
        """
        self._counters["corrupt"] += 1
        self._corrupt_in_row += 1
        if self._corrupt_in_row >= self._policy.breaker.open_after_failures:
            self._corrupt_in_row = 0
            self.trip("object after object from it is damaged")

    def report_sound(self) -> None:
        """The store found bytes from this tier to be right."""
        self._corrupt_in_row = 0

    def trip(self, reason: str) -> None:
        """Take the tier out of use until a probe passes."""
        logger.warning("tier %s taken out of use: %s", self.name, reason)
        self._breaker.trip()
        self._start_prober()

    # --- calls ----------------------------------------------------------------------------------------------------

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        """How many leading blocks the tier says it holds; 0 while it is down or if it must be asked with `probe`."""
        if self._presence is None or not self.healthy or not blocks:
            return 0
        try:
            run = self._presence.leading_run(namespace, group, blocks)
            if not isinstance(run, int) or not 0 <= run <= len(blocks):
                raise TypeError(f"leading_run answered {run!r} for {len(blocks)} blocks")
        except Exception:
            logger.exception("tier %s: leading_run failed", self.name)
            self._counters["unexpected_errors"] += 1
            self._fail("leading_run failed")
            return 0
        return run

    async def probe(
        self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float, owner: Owner = None
    ) -> int:
        """As SupportsProbe. Raises: TierTimeout, TierUnavailable, TierBusy, TierClosed."""
        probing = self._probe
        if probing is None or not blocks:
            return 0

        def start(left_s: float) -> Coroutine[Any, Any, int]:
            return probing.probe(namespace, group, blocks, timeout_s=left_s)

        return await self._call(
            "probes", owner, None, 0, timeout_s, start, lambda run: 0 <= run <= len(blocks), _nothing
        )

    async def get_into(
        self,
        key: ObjectKey,
        out: WritableBuffer,
        *,
        timeout_s: float,
        release: Callable[[], None] | None = None,
        owner: Owner = None,
    ) -> int | None:
        """As Tier.get_into, by the deadline. Raises as it does, and TierBusy."""

        def start(left_s: float) -> Coroutine[Any, Any, int | None]:
            return self.tier.get_into(key, out, timeout_s=left_s)

        def sane(size: int | None) -> bool:
            return size is None or 0 <= size <= len(out)

        size = await self._call("loads", owner, key, len(out), timeout_s, start, sane, release or _nothing)
        self._counters["load_misses"] += size is None
        self._counters["load_bytes"] += size or 0
        return size

    async def put(
        self,
        key: ObjectKey,
        data: Buffer,
        *,
        timeout_s: float,
        release: Callable[[], None] | None = None,
        owner: Owner = None,
    ) -> None:
        """As Tier.put, by the deadline. Raises as it does, and TierBusy when it was dropped for a full queue."""

        def start(left_s: float) -> Coroutine[Any, Any, None]:
            return self.tier.put(key, data, timeout_s=left_s)

        size = memoryview(data).nbytes
        await self._call("stores", owner, key, size, timeout_s, start, lambda _: True, release or _nothing)
        self._counters["store_bytes"] += size

    async def delete(self, key: ObjectKey, *, timeout_s: float, owner: Owner = None) -> bool:
        """As Tier.delete, by the deadline. Raises: TierTimeout, TierUnavailable, TierBusy, TierClosed."""

        def start(_: float) -> Coroutine[Any, Any, bool]:
            return self.tier.delete(key)

        return bool(await self._call("deletes", owner, key, 0, timeout_s, start, lambda _: True, _nothing))

    async def aclose(self) -> None:
        """Refuse new calls and close the tier. Idempotent."""
        self._closed = True
        if self._prober is not None:
            self._prober.cancel()
        await self.tier.aclose()

    # --- one bounded call -----------------------------------------------------------------------------------------

    async def _call(
        self,
        verb: str,
        owner: Owner,
        key: ObjectKey | None,
        size: int,
        timeout_s: float,
        start: Callable[[float], Coroutine[Any, Any, T]],
        sane: Callable[[T], bool],
        release: Callable[[], None],
    ) -> T:
        lane = Lane.STORE if verb == "stores" else Lane.LOAD
        deadline_s = self._clock() + timeout_s
        self._outstanding_bytes += size
        try:
            await self._enter(lane, owner, key, timeout_s)
        except BaseException:
            self._outstanding_bytes -= size
            release()
            raise
        start_s = self._clock()
        running_before = self._gate.running
        left_s = max(deadline_s - start_s, 0.0)
        task = asyncio.ensure_future(start(left_s))

        def ended(task: asyncio.Future[T]) -> None:
            # Runs before anyone who waits for the task goes on, and also if nobody waits any more.
            if not task.cancelled():
                task.exception()
            self._gate.leave(lane)
            self._outstanding_bytes -= size
            release()

        task.add_done_callback(ended)
        self._counters[verb] += 1
        try:
            await asyncio.wait((task,), timeout=left_s)
        except asyncio.CancelledError:
            task.cancel()
            self._counters["cancelled"] += 1
            raise
        if not task.done():
            await self._stop(task, key, timeout_s)
        answer = self._judge(task, key, sane, fair=timeout_s >= self._policy.fair_timeout_s)
        if verb in ("loads", "probes"):
            moved = answer if verb == "loads" and isinstance(answer, int) else 0
            self._meter.record(moved, self._clock() - start_s, (running_before + self._gate.running + 1) / 2)
        return answer

    async def _enter(self, lane: Lane, owner: Owner, key: ObjectKey | None, timeout_s: float) -> None:
        """Wait for a place in the tier. Raises as `_call`; on success the caller must let `_gate.leave` be called."""
        self._check_usable(key)
        bound = self._policy.store_queue if lane is Lane.STORE else self._policy.load_queue
        if self._gate.try_enter(lane):
            return
        try:
            async with asyncio.timeout(timeout_s):
                may_wait = self._gate.waiting(lane) < bound or self._gate.make_way(lane, owner)
                entered = may_wait and await self._gate.enter(lane, owner)
        except TimeoutError:
            self._counters["queue_timeouts"] += 1
            raise TierTimeout(f"no turn within {timeout_s:.3f} s", tier=self.name, key=key) from None
        if not entered:
            self._counters["stores_dropped" if lane is Lane.STORE else "loads_refused"] += 1
            raise TierBusy(f"{bound} calls wait already", tier=self.name, key=key)
        try:
            self._check_usable(key)  # it may have gone down while we waited
        except TierError:
            self._gate.leave(lane)
            raise

    def _check_usable(self, key: ObjectKey | None) -> None:
        if self._closed:
            raise TierClosed("the tier is closed", tier=self.name, key=key)
        if not self._breaker.closed:
            self._counters["refused_open"] += 1
            raise TierUnavailable("out of use until a probe passes", tier=self.name, key=key)

    async def _stop(self, task: asyncio.Future[T], key: ObjectKey | None, timeout_s: float) -> None:
        """End a call whose deadline has passed. Returns only if it has an answer after all."""
        task.cancel()
        await asyncio.wait((task,), timeout=self._policy.settle_s)
        if task.done() and not task.cancelled():
            return
        self._counters["timeouts"] += 1
        self._counters["stuck"] += not task.done()
        if timeout_s >= self._policy.fair_timeout_s:
            self._fail(f"no answer within {timeout_s:.3f} s")
        raise TierTimeout(f"no answer within {timeout_s:.3f} s", tier=self.name, key=key)

    def _judge(self, task: asyncio.Future[T], key: ObjectKey | None, sane: Callable[[T], bool], *, fair: bool) -> T:
        """The ended call's answer or error, and what it says about the medium."""
        try:
            answer = task.result()
            if not sane(answer):
                raise TypeError(f"answered {answer!r}")
        except (TierFull, ValueError) as fact:
            self._breaker.success()  # the medium answered; what it said is the caller's business
            self._counters["full"] += isinstance(fact, TierFull)
            raise
        except TierClosed:
            raise
        except BlockCorrupt:
            self.report_corrupt()
            raise
        except TierTimeout as timeout:
            self._counters["timeouts"] += 1
            if fair:
                self._fail(timeout)
            raise
        except TierError as trouble:
            self._counters["unavailable"] += 1
            self._fail(trouble)
            raise
        except (Exception, asyncio.CancelledError) as exc:
            # Not ours: the task is over, so this CancelledError was raised inside the tier, not sent to this call.
            logger.exception("tier %s raised what no tier may", self.name)
            self._counters["unexpected_errors"] += 1
            self._fail(exc)
            raise TierUnavailable(f"unexpected {type(exc).__name__}", tier=self.name, key=key) from exc
        self._breaker.success()
        return answer

    # --- breaker and probes -----------------------------------------------------------------------------------------

    def _fail(self, reason: object) -> None:
        was_closed = self._breaker.closed
        self._breaker.failure()
        if was_closed and not self._breaker.closed:
            logger.warning("tier %s: breaker open: %s", self.name, reason)
            self._start_prober()

    def _start_prober(self) -> None:
        if (self._prober is None or self._prober.done()) and not self._closed:
            self._prober = asyncio.get_running_loop().create_task(self._probe_until_closed())

    async def _probe_until_closed(self) -> None:
        """Ask for an object that can't exist until the medium answers. No caller ever pays for finding out."""
        while not self._breaker.closed:
            await self._sleep(max(self._breaker.probe_at_s - self._clock(), 0.0))
            if not self._breaker.begin_probe():
                continue
            self._counters["breaker_probes"] += 1
            asking = asyncio.ensure_future(
                self.tier.get_into(_CANARY, bytearray(1), timeout_s=self._policy.probe_timeout_s)
            )
            asking.add_done_callback(_retrieve)
            try:
                await asyncio.wait((asking,), timeout=self._policy.probe_timeout_s)
            except asyncio.CancelledError:
                asking.cancel()
                self._breaker.abandon()
                raise
            if asking.done() and not asking.cancelled() and asking.exception() is None and asking.result() is None:
                self._breaker.success()
                logger.info("tier %s: back in use", self.name)
            else:
                asking.cancel()
                self._breaker.failure()


_COUNTERS = (
    "loads",
    "load_bytes",
    "load_misses",
    "stores",
    "store_bytes",
    "deletes",
    "probes",
    "timeouts",
    "queue_timeouts",
    "unavailable",
    "full",
    "corrupt",
    "unexpected_errors",
    "refused_open",
    "loads_refused",
    "stores_dropped",
    "stuck",
    "cancelled",
    "breaker_probes",
)


def _nothing() -> None:
    """For calls without a buffer to give back."""


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Take a task's exception, so that one nobody waits for is not reported as lost."""
    if not task.cancelled():
        task.exception()
