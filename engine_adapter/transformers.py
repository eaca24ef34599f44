"""Prefix reuse for Hugging Face causal language models: load the longest stored prefix, compute the rest, store what is new.

    with Client() as client, PrefixReuse(model, client) as engine:
        result = engine.generate(tokenizer(prompt).input_ids, max_new_tokens=64)

Covers one sequence at a time on one model whose cache is plain attention KV (hf_identity.py decides that). Leaves the
store to the daemon and the tokenizer to the caller. Always true: Forebay can only save time. Whatever goes wrong with the
daemon is a counted miss and the tokens are computed; no KV is used unless its lease still held after the copy; the last
token of a prompt is always computed. The weights must not change while an engine is open: they are part of the identity.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from forebay.engine_adapter.hf_cache import KVBuffer
from forebay.engine_adapter.hf_identity import UnsupportedCache, examine, namespace_facts
from forebay.kvstore.cost import PrefillFitter, PrefillModel
from forebay.kvstore.errors import ClientError, DaemonTimeout, DaemonUnavailable, ProtocolError
from forebay.kvstore.plan import Plan, loadable_blocks, plan

if TYPE_CHECKING:
    from forebay.clients import Client, Namespace, PutResult

__all__ = ["GenerationResult", "PrefixReuse", "Reuse", "Timings", "UnsupportedCache"]

_log = logging.getLogger(__name__)

# What the first plan assumes of prefill, before one was timed: FLOP/s that such work reaches on a few cores or on a GPU.
_PRIOR_FLOPS = {"cpu": 2e11, "cuda": 2e14}
# Blocks filled between one `allocate` and its `commit`: bounds the uncommitted bytes of a session.
_STORE_BATCH_BYTES = 64 << 20
_TROUBLE = (ClientError, ProtocolError, OSError)


@dataclass(frozen=True)
class Reuse:
    """What one request took from Forebay.

    tokens, blocks, payload_bytes: loaded and used. tiers: blocks by the tier they came from. miss: why not more, as one
    word ("" when the plan was fulfilled; the same words count in `PrefixReuse.counters`). plan: what was intended.
    """

    tokens: int = 0
    blocks: int = 0
    payload_bytes: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    miss: str = ""
    plan: Plan | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds. ttft_s: from the call to the first token. load_s: the part of it spent on Forebay, from hashing to the last
    copied block. prefill_s: computing the rest of the prompt. decode_s: all further tokens."""

    ttft_s: float
    load_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class GenerationResult:
    """tokens: the new ones, ending with a stop token if one came. logits: [new tokens, vocabulary] that each was chosen
    from, float32 on the CPU, only when asked for."""

    tokens: list[int]
    prompt_tokens: int
    timings: Timings
    reuse: Reuse
    logits: torch.Tensor | None = None


class PrefixReuse:
    """A model that finds its prefixes in Forebay. Calls to `generate` come one at a time; storing runs beside them."""

    def __init__(
        self,
        model: Any,
        client: Client | None,
        *,
        block_tokens: int = 64,
        reserve_tokens: int = 0,
        model_digest: bytes | None = None,
        producer: str | None = None,
        salt: bytes = b"",
        verify: Literal["loaded", "always"] = "loaded",
        planner: Callable[..., Plan] = plan,
        backoff_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            model: a causal language model in eval mode, on one device.
            client: None switches Forebay off; everything else stays the same, which is what comparisons need.
            block_tokens: tokens a block; smaller blocks leave less of a prompt's end to compute again, and cost more keys.
            reserve_tokens: set memory for the KV of so many tokens aside now; the first longer request pays for its own.
            model_digest: see hf_identity.namespace_facts, like `producer` and `salt`.
            verify: "loaded" checks part checksums of blocks that came from below RAM; "always" of all.
            planner: decides what to load, called like `kvstore.plan.plan`.
            backoff_s: pause after the daemon failed to answer, doubled up to 64 times while it stays away.
        Raises: UnsupportedCache: the model's cache can't be represented.
        """
        self._model, self._client, self._clock = model, client, clock
        self._forward, self._shape = examine(model)
        self.facts = namespace_facts(
            model, self._shape, block_tokens=block_tokens, model_digest=model_digest, producer=producer, salt=salt
        )
        self._block_bytes = self._shape.token_bytes * block_tokens
        self._planner = planner
        self._verify_all = verify == "always"
        self._fitter = PrefillFitter(_prior(model, self._shape.layers))
        self._stop_tokens = _stop_tokens(model)

        self._namespace: Namespace | None = None
        self._backoff_s, self._failures, self._retry_at = backoff_s, 0, -float("inf")
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()  # counters, namespace, spare buffer and pending stores: two threads use them
        self._spare: KVBuffer | None = None
        if reserve_tokens:
            self._spare = self._rent(reserve_tokens)
            self._spare.data.zero_()  # touched now: page faults in the first load would cost more than its copies
        self._storer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forebay-store")
        self._pending: set[Future[None]] = set()

    def __enter__(self) -> PrefixReuse:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def prefill(self) -> PrefillModel:
        """The prefill model as fitted so far."""
        return self._fitter.model

    def generate(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        max_new_tokens: int,
        *,
        choose: Callable[[torch.Tensor], int] | None = None,
        stop_tokens: Collection[int] | None = None,
        keep_logits: bool = False,
        load: bool = True,
        store: bool = True,
        keep_s: float | None = None,
        forget_after_s: float | None = None,
    ) -> GenerationResult:
        """Continue a prompt.

        Args:
            input_ids: token ids of one sequence, [n] or [1, n].
            choose: picks a token from logits [vocabulary]; None is greedy.
            stop_tokens: end after one of these; None uses the model's own.
            load: False computes the whole prompt. store: False leaves the daemon's content as it is.
            keep_s: keep the prompt's blocks from eviction for that many seconds (a system prompt, say).
            forget_after_s: have what is stored by this request forgotten that many seconds later.
        Raises: ValueError: an empty prompt, more than one sequence, or no token to generate.
        """
        ids = _as_list(input_ids)
        if not ids or max_new_tokens < 1:
            raise ValueError(f"a prompt and at least one new token are needed, got {len(ids)} and {max_new_tokens}")
        stops = self._stop_tokens if stop_tokens is None else frozenset(stop_tokens)
        pick = choose or (lambda logits: int(logits.argmax()))
        kv = self._rent(len(ids) + max_new_tokens)
        stores: list[Future[None]] = []
        kept: list[torch.Tensor] = []
        with torch.inference_mode(), torch.autocast(self._model.device.type, enabled=False):
            begin = time.perf_counter()
            reuse, keys = self._load(ids, kv) if load else (Reuse(miss=self._count("load_off")), None)
            loaded = time.perf_counter()
            cache = kv.cache()
            logits = self._run(ids[kv.length :], cache, kv)
            token = pick(logits)
            first = time.perf_counter()
            tokens = [token]
            if store:
                stores += self._store_soon(kv, ids, reuse.blocks, keys, forget_after_s)
            while True:
                if keep_logits:
                    kept.append(logits.float().cpu())
                if token in stops or len(tokens) == max_new_tokens:
                    break
                logits = self._run([token], cache, kv)
                token = pick(logits)
                tokens.append(token)
            end = time.perf_counter()

        computed = len(ids) - reuse.tokens
        self._fitter.observe(reuse.tokens, computed, first - loaded)
        timings = Timings(first - begin, loaded - begin, first - loaded, end - first)
        if store:
            # The last token was chosen but never computed: it has no KV yet.
            first_new = len(ids) // self.facts.block_tokens
            stores += self._store_soon(kv, ids + tokens[:-1], first_new, None, forget_after_s)
        if keep_s is not None:
            self._submit(lambda: self._keep_blocks(ids, keep_s))
        self._submit(lambda: self._report(reuse, computed, timings))
        self._return_after(kv, stores)
        return GenerationResult(tokens, len(ids), timings, reuse, torch.stack(kept) if keep_logits else None)

    def wait_stored(self, timeout_s: float) -> bool:
        """Wait until everything handed over for storing is visible, refused or failed. False when time ran out."""
        with self._lock:
            pending = set(self._pending)
        return not wait(pending, timeout=timeout_s).not_done

    def close(self) -> None:
        """Finish pending stores. The client stays open: it belongs to the caller."""
        self._storer.shutdown(wait=True)

    # --- loading ------------------------------------------------------------------------------------------------------

    def _load(self, ids: list[int], kv: KVBuffer) -> tuple[Reuse, list[bytes] | None]:
        """Fill the beginning of `kv` with what is worth loading. Returns that, and the prompt's keys if there was a daemon."""
        kv.length = 0
        keys: list[bytes] | None = None
        made: Plan | None = None
        try:
            # Waiting longer than computing would take can't pay.
            bound_s = max(self._fitter.model.predict(0, len(ids)), 0.1)
            namespace = self._open(bound_s)
            if namespace is None:
                return Reuse(miss="off" if self._client is None else self._count("backing_off")), None
            block_tokens = self.facts.block_tokens
            keys = namespace.keys(ids)
            found = namespace.match(keys[: loadable_blocks(len(ids), block_tokens)], timeout_s=bound_s)
            self._failures = 0  # it answers
            made = self._planner(
                found.runs,
                found.estimates,
                self._fitter.model,
                block_tokens=block_tokens,
                block_bytes=self._block_bytes,
                prompt_tokens=len(ids),
            )
            if not made.load_blocks:
                return Reuse(miss=self._count("planned_none" if found.blocks else "not_stored"), plan=made), keys
            return self._copy_in(namespace, keys[: made.load_blocks], ids, kv, made, bound_s), keys
        except _TROUBLE as exc:
            kv.length = 0
            return Reuse(miss=self._trouble(exc), plan=made), keys

    def _copy_in(
        self, namespace: Namespace, keys: list[bytes], ids: list[int], kv: KVBuffer, made: Plan, bound_s: float
    ) -> Reuse:
        block_tokens = self.facts.block_tokens
        tokens = ids[: len(keys) * block_tokens]
        with namespace.acquire(keys, tokens, wait_s=bound_s, timeout_s=bound_s) as lease:
            leased, tiers, views = len(lease), lease.tiers, lease.views
            blocks = leased
            if self._verify_all or any(tier != "ram" for tier in tiers):
                blocks = min(blocks, lease.verify())
            for index in range(blocks):
                kv.write_block(index, views[index], block_tokens)
            # Only now is it known that nothing was taken from under the copy.
            held = lease.valid()
        if not held:
            return Reuse(miss=self._count("lease_lost"), plan=made)
        miss = ""
        if blocks < len(keys):
            miss = self._count("damaged" if blocks < leased else "gone")
        if blocks:
            self._count("hits")
        kv.length = blocks * block_tokens
        used = dict(Counter(tiers[:blocks]))
        return Reuse(kv.length, blocks, blocks * self._block_bytes, used, miss, made)

    def _run(self, ids: list[int], cache: Any, kv: KVBuffer) -> torch.Tensor:
        """Compute `ids` on top of the cache. Returns the last token's logits, [vocabulary]."""
        logits = self._forward(self._model, torch.tensor([ids], device=self._model.device), cache, kv.length)
        kv.length += len(ids)
        return logits[0]

    # --- storing ------------------------------------------------------------------------------------------------------

    def _store_soon(
        self, kv: KVBuffer, ids: list[int], first: int, keys: list[bytes] | None, forget_after_s: float | None
    ) -> list[Future[None]]:
        """Store the full blocks of `ids` from block `first` on, on the storing thread. Their KV must not change again."""
        last = len(ids) // self.facts.block_tokens
        if self._client is None or last <= first:
            return []
        return self._submit(lambda: self._store(kv, ids, first, last, keys, forget_after_s))

    def _submit(self, work: Callable[[], None]) -> list[Future[None]]:
        if self._client is None:
            return []
        future = self._storer.submit(work)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return [future]

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._pending.discard(future)
        if (error := future.exception()) is not None:
            self._count("store_failed")
            _log.error("storing KV failed unexpectedly", exc_info=error)

    def _keep_blocks(self, ids: list[int], seconds: float) -> None:
        try:
            namespace = self._open()
            if namespace is not None:
                kept = namespace.pin(namespace.keys(ids), for_s=seconds)
                with self._lock:
                    self.counters["kept"] += kept
        except _TROUBLE as exc:
            self._trouble(exc, prefix="keep_")

    def _store(
        self,
        kv: KVBuffer,
        ids: list[int],
        first: int,
        last: int,
        keys: list[bytes] | None,
        forget_after_s: float | None,
    ) -> None:
        block_tokens = self.facts.block_tokens
        batch = max(1, _STORE_BATCH_BYTES // self._block_bytes)
        try:
            namespace = self._open()
            if namespace is None:
                self._count("store_skipped")
                return
            if keys is None or len(keys) < last:
                keys = namespace.keys(ids[: last * block_tokens])
            for start in range(first, last, batch):
                end = min(start + batch, last)
                parent = keys[start - 1] if start else None
                tokens = ids[start * block_tokens : end * block_tokens]
                result = self._put(namespace, kv, keys[start:end], tokens, parent, start)
                with self._lock:
                    self.counters.update(stored=result.stored, already_present=result.present + result.pending)
                    self.counters.update(store_refused=result.refused)
                if forget_after_s is not None and result.stored:
                    namespace.expire(keys[start:end], forget_after_s)
                if result.refused:
                    return  # later blocks are of no use without these
        except _TROUBLE as exc:
            self._trouble(exc, prefix="store_")

    def _put(
        self, namespace: Namespace, kv: KVBuffer, keys: list[bytes], tokens: list[int], parent: bytes | None, start: int
    ) -> PutResult:
        """Store one batch: straight into shared memory, or through the socket where that is read-only for us."""
        block_tokens = self.facts.block_tokens
        try:
            with namespace.allocate(keys, tokens, parent, start) as allocation:
                for slot in allocation.slots:
                    if slot.view is not None:
                        kv.read_block(start + slot.index, slot.view, block_tokens)
                return allocation.commit()
        except PermissionError:
            payloads = [bytearray(self._block_bytes) for _ in keys]
            for index, payload in enumerate(payloads, start):
                kv.read_block(index, memoryview(payload), block_tokens)
            return namespace.put(keys, tokens, payloads, parent, start)

    def _report(self, reuse: Reuse, computed: int, timings: Timings) -> None:
        try:
            namespace = self._open()
            if namespace is None:
                return
            namespace.report("prefill", cached=reuse.tokens, tokens=computed, seconds=timings.prefill_s)
            if reuse.blocks:
                # The daemon takes the speed of RAM from "load", so loads with a slower part in them have another name.
                kind = "load" if set(reuse.tiers) == {"ram"} else "load_mixed"
                namespace.report(kind, blocks=reuse.blocks, bytes=reuse.payload_bytes, seconds=timings.load_s)
        except _TROUBLE as exc:
            self._trouble(exc, prefix="report_")

    # --- the daemon's absence -----------------------------------------------------------------------------------------

    def _open(self, timeout_s: float | None = None) -> Namespace | None:
        """The namespace's handle, opened again when the daemon was restarted; None while Forebay is off or backing off."""
        if self._client is None or self._clock() < self._retry_at:
            return None
        with self._lock:
            if self._namespace is None:
                self._namespace = self._client.open(self.facts, timeout_s=timeout_s)
            return self._namespace

    def _trouble(self, exc: Exception, *, prefix: str = "") -> str:
        """Count trouble under its name, and keep away for a while from a daemon that doesn't answer."""
        with self._lock:
            self._namespace = None
            if isinstance(exc, DaemonUnavailable | DaemonTimeout):
                self._retry_at = self._clock() + self._backoff_s * 2 ** min(self._failures, 6)
                self._failures += 1
        _log.warning("computing instead: trouble with the daemon", extra={"error": type(exc).__name__, "why": str(exc)})
        return self._count(prefix + type(exc).__name__)

    def _count(self, what: str) -> str:
        with self._lock:
            self.counters[what] += 1
        return what

    # --- buffers ------------------------------------------------------------------------------------------------------

    def _rent(self, tokens: int) -> KVBuffer:
        """A buffer for `tokens` tokens: the last request's if it is free and large enough, since fresh memory is slow."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare.capacity >= tokens:
            return spare
        return KVBuffer(self._shape, -(-tokens // 1024) * 1024, self._model.device)

    def _return_after(self, kv: KVBuffer, stores: list[Future[None]]) -> None:
        """Keep the buffer for the next request once no store reads it any more."""
        if any(not future.done() for future in stores):
            stores[-1].add_done_callback(lambda _: self._keep(kv))  # one thread: the last ends last
        else:
            self._keep(kv)

    def _keep(self, kv: KVBuffer) -> None:
        with self._lock:
            if self._spare is None or self._spare.capacity <= kv.capacity:
                self._spare = kv


def _as_list(input_ids: Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and input_ids.shape[0] != 1:
            raise ValueError(f"one sequence at a time, got a batch of {input_ids.shape[0]}")
        return [int(token) for token in input_ids.reshape(-1).tolist()]
    return [int(token) for token in input_ids]


def _stop_tokens(model: Any) -> frozenset[int]:
    config = getattr(model, "generation_config", None)
    stop = getattr(config, "eos_token_id", None)
    if stop is None:
        return frozenset()
    return frozenset([stop] if isinstance(stop, int) else stop)


def _prior(model: Any, layers: int) -> PrefillModel:
    config = model.config.get_text_config(decoder=True)
    flops = _PRIOR_FLOPS.get(model.device.type, _PRIOR_FLOPS["cuda"])
    return PrefillModel.from_hardware(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=layers,
        attention_width=config.hidden_size,
        flops=flops,
        pass_s=0.01,
    )
