"""The prefix store that the bundled engine uses: matches, plans, loads, stores and reports over a Forebay client.

Covers what happens on the engine's thread, which only hands work to threads and reads what they have found, and what a match
decides. Always true: the engine's thread never waits for a daemon; whatever goes wrong is a counted miss, and the daemon is
then left alone for a while.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from forebay.clients import Client, HttpClient, Namespace, TierRun
from forebay.engine.prefix import EngineLoad, Load, Match, Store, Timings
from forebay.engine_adapter.bundled import loading
from forebay.engine_adapter.bundled.link import AnyClient, AnyNamespace, Link
from forebay.engine_adapter.bundled.loading import RESIDENT, BlockLoad, Loaded, Wanted
from forebay.engine_adapter.bundled.pool import SlotMemory, open_pool
from forebay.engine_adapter.bundled.storing import Batch, Storer
from forebay.kvstore.cost import PrefillFitter, PrefillModel
from forebay.kvstore.errors import InvariantViolation
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import block_keys, token_words
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.plan import Plan, loadable_blocks, plan

_SALT_TAG: Final = b"cache_salt\x00"
# For the daemon's answer to a match. The engine doesn't wait as long where computing is quicker; later than this the daemon is
# taken to be in trouble and left alone, which a machine that is merely busy shouldn't bring about.
_LEAST_WAIT_S, _MOST_WAIT_S = 0.25, 1.0
_LEAST_LOAD_S: Final = 0.05
_LOAD_THREADS: Final = 4
_MOST_ASKED: Final = 4096  # matches that nobody fetched, of requests that went away
_STALE_S: Final = 10.0  # an answer that was left lying so long says little about now
_ENOUGH_BYTES: Final = 1 << 20  # below, a load's time is its round trips', and says nothing about bandwidth
_QUEUE_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Found:
    """A match (`Match` in engine/prefix.py). tiers: of each block before `load_blocks`, where it was."""

    load_blocks: int = 0
    tiers: Sequence[str] = ()
    keys: Sequence[bytes] = field(default=(), repr=False)
    words: npt.NDArray[np.uint32] | None = field(default=None, repr=False)
    plan: Plan | None = None
    give_up_s: float = 0.0  # after the load has begun, computing is better


_NOTHING: Final = Found()


class _Ask:
    """A match under way."""

    found: Found | None = None
    known_s = 0.0


class ForebayPrefixStore:
    """A `PrefixStore` (engine/prefix.py) that keeps blocks in a Forebay daemon."""

    def __init__(
        self,
        facts: NamespaceFacts,
        make_client: Callable[[], AnyClient],
        *,
        prior: PrefillModel,
        planner: Callable[..., Plan] = plan,
        verify: Literal["loaded", "always"] = "loaded",
        queue_bytes: int = _QUEUE_BYTES,
        backoff_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            facts: as `namespace_facts` gives them.
            make_client: connects; called on another thread when first needed, and again where it failed.
            prior: what computing costs before the engine has reported some.
            planner: decides what to load, called like `kvstore.plan.plan`.
            verify: "loaded" checks part checksums of blocks that came from below RAM or a network; "always" of all.
            queue_bytes: blocks that may wait to be stored; a quarter of the pool if that is less.
            backoff_s: pause after the daemon failed to answer, doubled up to 64 times while it stays away.
        """
        self.facts = facts
        self._layout = ObjectLayout.of(facts)
        self._link = Link(facts, make_client, backoff_s=backoff_s, clock=clock)
        self._planner = planner
        self._verify_all = verify == "always"
        self._fitter = PrefillFitter(prior)
        self._queue_bytes = queue_bytes
        self._asked: OrderedDict[tuple[bytes, int], _Ask] = OrderedDict()
        self._finder = ThreadPoolExecutor(1, thread_name_prefix="forebay-engine-match")
        self._loaders = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="forebay-engine-load")
        self._loads: set[BlockLoad] = set()
        self._key_root: bytes | None = None
        self._pool: SlotMemory | None = None
        self._storer: Storer | None = None
        self._finder.submit(self._meet)

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def attach(self, pool: torch.Tensor) -> None:
        """Raises: ValueError: its slots are no blocks of this namespace."""
        self._pool = open_pool(pool, self._layout)
        most = max(self._pool.block_bytes, self._pool.block_bytes * self._pool.blocks // 4)
        self._storer = Storer(self._link, queue_bytes=min(self._queue_bytes, most))

    def keys(self, token_ids: Sequence[int], extras: bytes = b"") -> list[bytes]:
        if self._key_root is None:
            # For good: a sequence under way must find its blocks and claims under the keys it has.
            self._key_root = self._link.namespace_id
        return block_keys(
            self._key_root,
            token_ids,
            self.facts.block_tokens,
            algorithm=self.facts.hash_algorithm,
            extras={0: _SALT_TAG + extras} if extras and len(token_ids) else None,
        )

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], engine_load: EngineLoad) -> Match | None:
        size = self.facts.block_tokens
        count = min(len(keys), loadable_blocks(engine_load.prompt_tokens, size))
        if count <= engine_load.resident_blocks:
            return _NOTHING
        name = (keys[-1], len(keys))
        ask = self._asked.get(name)
        if ask is None or (ask.found is not None and time.monotonic() - ask.known_s > _STALE_S):
            self._asked.pop(name, None)
            if self._link.away:
                self._link.count("miss_away")
                return _NOTHING
            ask = self._asked[name] = _Ask()
            if len(self._asked) > _MOST_ASKED:
                self._asked.popitem(last=False)
            self._finder.submit(self._find, ask, keys[:count], token_ids[: count * size], engine_load)
            return None
        if ask.found is not None:
            del self._asked[name]
        return ask.found

    def load(self, plan: Match, first: int, slots: Sequence[int]) -> Load:
        end, size = first + len(slots), self.facts.block_tokens
        if not isinstance(plan, Found) or plan.words is None or end > plan.load_blocks:
            raise InvariantViolation(f"blocks {first} to {end} are not in the plan {plan}")
        load = BlockLoad(len(slots), time.monotonic() + plan.give_up_s)
        wanted = Wanted(
            plan.keys[first:end],
            plan.words[first * size : end * size],
            list(slots),
            plan.tiers[first:end],
            self._verify_all,
        )
        self._loads.add(load)
        self._loaders.submit(self._load, load, wanted, plan.plan)
        return load

    def store(self, keys: Sequence[bytes], token_ids: Sequence[int], first: int, slots: Sequence[int]) -> Store:
        if self._storer is None or self._pool is None:
            raise InvariantViolation("store before attach")
        end, size = first + len(slots), self.facts.block_tokens
        if not slots or len(keys) < end or len(token_ids) < end * size:
            raise ValueError(f"blocks {first} to {end} of {len(keys)} keys and {len(token_ids)} tokens")
        parent = keys[first - 1] if first else None
        batch = Batch(keys[first:end], token_ids[first * size : end * size], parent, first, list(slots))
        return self._storer.submit(batch, self._pool)

    def report(self, timings: Timings) -> None:
        if self._storer is not None:
            self._storer.also(lambda: self._report(timings))

    def close(self) -> None:
        """Finish what is to be stored, stop what is being loaded, and close the client. Idempotent."""
        for load in list(self._loads):
            load.cancel()
        self._finder.shutdown(wait=True, cancel_futures=True)
        self._loaders.shutdown(wait=True, cancel_futures=True)
        if self._storer is not None:
            self._storer.close()
        self._link.close()

    # --- for operators ----------------------------------------------------------------------------------------------

    @property
    def prefill(self) -> PrefillModel:
        """What computing costs, as fitted so far."""
        return self._fitter.model

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and what holds now."""
        model = self.prefill
        return {
            "counters": dict(self._link.counters),
            "reasons": dict(self._link.reasons),
            "away": self._link.away,
            "queued_bytes": self._storer.queued_bytes if self._storer is not None else 0,
            "loading": len(self._loads),
            "prefill": {"t0": model.t0, "a": model.a, "b": model.b},
        }

    def wait_stored(self, timeout_s: float) -> bool:
        """Wait until everything handed over so far is visible, dropped or failed. False when time ran out."""
        return self._storer is None or self._storer.wait(timeout_s)

    # --- other threads ----------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Open the namespace before the first request does."""
        try:
            self._link.open(_MOST_WAIT_S)
        except Exception as exc:
            self._link.trouble("open", exc)

    def _find(self, ask: _Ask, keys: Sequence[bytes], token_ids: Sequence[int], engine: EngineLoad) -> None:
        found = _NOTHING
        try:
            found = self._decide(keys, token_ids, engine)
        except Exception as exc:
            self._link.trouble("miss", exc)
        finally:
            ask.known_s = time.monotonic()
            ask.found = found

    def _decide(self, keys: Sequence[bytes], token_ids: Sequence[int], engine: EngineLoad) -> Found:
        size, model, resident = self.facts.block_tokens, self._fitter.model, engine.resident_blocks
        cold_s = model.predict(resident * size, engine.prompt_tokens - resident * size)
        bound_s = min(max(cold_s, _LEAST_WAIT_S), _MOST_WAIT_S)
        namespace = self._link.open(bound_s)
        matched = namespace.match(keys[resident:], timeout_s=bound_s)
        self._link.worked()
        self._link.count("matches")
        if not matched.blocks:
            self._link.count("miss_not_stored")
            return _NOTHING
        busy_s = model.predict(0, engine.waiting_tokens)
        made = self._planner(
            [TierRun(RESIDENT, resident), *matched.runs],
            matched.estimates,
            model,
            block_tokens=size,
            block_bytes=self._layout.payload_bytes,
            prompt_tokens=engine.prompt_tokens,
            resident_blocks=resident,
            busy_s=busy_s,
        )
        if not made.load_blocks:
            self._link.count("miss_planned_none")
            return _NOTHING
        tiers = [part.tier for part in made.ranges for _ in range(part.blocks)]
        end = resident + made.load_blocks
        spared_s = model.predict(resident * size, made.load_blocks * size)
        self._begin_loading(namespace, keys[resident:end], tiers, spared_s)
        words = token_words(token_ids)[: end * size]
        # Blocks that were resident may have gone when the load begins: they can be asked for, too.
        tiers = [RESIDENT] * resident + tiers
        return Found(end, tiers, keys, words, made, busy_s + max(spared_s, _LEAST_LOAD_S))

    def _begin_loading(
        self, namespace: AnyNamespace, keys: Sequence[bytes], tiers: Sequence[str], timeout_s: float
    ) -> None:
        """Have what lies below RAM brought up at once, while the engine finds slots for it."""
        if isinstance(namespace, Namespace) and any(tier != "ram" for tier in tiers):
            namespace.prefetch(keys, timeout_s=max(timeout_s, _LEAST_LOAD_S))
            self._link.count("prefetches")

    def _load(self, load: BlockLoad, wanted: Wanted, made: Plan | None) -> None:
        done = Loaded()
        try:
            if load.stopped or self._pool is None:
                return
            namespace = self._link.open(max(1e-3, load.deadline - time.monotonic()))
            loading.run(load, wanted, namespace, self._pool, done)
            self._link.worked()
            self._tell_daemon(done, namespace)
        except Exception as exc:
            self._link.trouble("load", exc)
        finally:
            load.cancel()
            self._count_load(done, made)
            self._loads.discard(load)

    def _count_load(self, done: Loaded, made: Plan | None) -> None:
        count = self._link.count
        for tier, some in done.blocks.items():
            count(f"loaded_blocks_{tier}", some)
            count(f"loaded_bytes_{tier}", some * self._layout.payload_bytes)
        count("loads")
        count("load_s", done.seconds)
        if made is not None:
            count("predicted_load_s", made.predicted_load_s)
        for name in ("holes", "lost", "corrupt"):
            if some := getattr(done, name):
                count(f"load_{name}_blocks", some)

    def _tell_daemon(self, done: Loaded, namespace: AnyNamespace) -> None:
        blocks = done.blocks.total()
        if blocks and isinstance(namespace, Namespace):
            size = blocks * self._layout.payload_bytes
            # The daemon takes the speed of RAM from "load", so loads that tell something else have another name.
            plain = set(done.blocks) == {"ram"} and not namespace.core.remote and size >= _ENOUGH_BYTES
            namespace.report("load" if plain else "load_mixed", blocks=blocks, bytes=size, seconds=done.seconds)

    def _report(self, timings: Timings) -> None:
        for cached, tokens, seconds in timings.prefill:
            if tokens > 0 and cached >= 0 and seconds > 0:
                self._fitter.observe(cached, tokens, seconds)
        try:
            namespace = self._link.open(_MOST_WAIT_S)
            if isinstance(namespace, Namespace):
                for cached, tokens, seconds in timings.prefill:
                    namespace.report("prefill", cached=cached, tokens=tokens, seconds=seconds)
        except Exception as exc:
            self._link.trouble("report", exc)


def connect(
    where: str | Path | None,
    facts: NamespaceFacts,
    *,
    prior: PrefillModel,
    token: str | None = None,
    tls: bool | str | Path | None = None,
    engine_id: str = "",
    device: str = "cpu",
    **options: Any,
) -> ForebayPrefixStore:
    """A store over the daemon at `where`: a Unix socket's path, "tcp://host:port", "http://..."; None is the default socket.

    Returns at once, whether or not a daemon is there: it is looked for in the background, and again whenever it was away.
    tls: over TCP, as in `Client`. device: where the pool lies; with a GPU the daemon's memory is registered.
    options: as `ForebayPrefixStore` takes them.
    """

    def make() -> AnyClient:
        if isinstance(where, str) and where.startswith(("http://", "https://")):
            return HttpClient(where, token=token, timeout_s=_MOST_WAIT_S)
        watcher = None
        if not device.startswith("cpu"):
            from forebay.engine_adapter.bundled.cuda import RegisteredExtents

            watcher = RegisteredExtents()
        return Client(where, token=token, tls=tls, engine_id=engine_id, timeout_s=_MOST_WAIT_S, watcher=watcher)

    return ForebayPrefixStore(facts, make, prior=prior, **options)
