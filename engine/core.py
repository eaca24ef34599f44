"""The engine's loop, one step at a time, for `LLM` and `AsyncEngine` alike.

A step takes in what stores and other sequences brought, plans a forward pass, runs it, publishes full blocks and chooses
tokens. docs/engine.md shows a request's life. Always true: one thread calls all of it; an error ends the request it belongs
to and no other; with nothing running, free + cached = all blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from forebay.engine.answer import Answer
from forebay.engine.batch import CausalModel
from forebay.engine.config import EngineConfig
from forebay.engine.detokenize import Decoder
from forebay.engine.errors import (
    BadLogits,
    BadPrompt,
    DuplicateRequest,
    EngineClosed,
    EngineError,
    PoolTooSmall,
    PromptTooLong,
    QueueFull,
    StepFailed,
)
from forebay.engine.exchange import Exchange
from forebay.engine.forward import Forward
from forebay.engine.outputs import FinishReason, RequestOutput
from forebay.engine.pool import BlockPool, block_shape, pool_tensor
from forebay.engine.prefix import NullPrefixStore, PrefixStore
from forebay.engine.sampling import sample
from forebay.engine.scheduler import Chunk, Scheduler
from forebay.engine.sequence import Request, SequenceState
from forebay.engine.stats import Counters, EngineStats

_LOADING_PAUSE_S = 0.0002  # how often loads and matches are looked at while there is nothing to compute
_READING_PAUSE_S = 0.005
_NEW_SHARE = 0.2  # of a pass in the running mean of prefill speed


class EngineCore:
    """
    Args:
        tokenizer: None gives no text, and no stop strings.
        store: where prefixes are kept beyond the pool; None keeps none. The core closes it.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Decoder | None,
        config: EngineConfig,
        store: PrefixStore | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.config = config
        self.model_config = model.config
        self.pool = _make_pool(model, config)
        self._tokenizer = tokenizer
        self._clock = clock
        self._counters = Counters()
        store = NullPrefixStore(config.block_tokens) if store is None else store
        store.attach(self.pool.tensor)
        self._exchange = Exchange(
            store,
            self.pool,
            self._counters,
            clock,
            match_wait_s=config.match_wait_s,
            store_generated=config.store_generated,
        )
        self._scheduler = Scheduler(self.pool, self._exchange, config, self._counters, clock)
        self._forward = Forward(model, self.pool, config.device)
        self._answers: dict[str, Answer] = {}
        self._computed = False
        self.closed = False
        context = config.max_context_tokens or model.config.context_tokens
        self._context_tokens = min(context, model.config.context_tokens)
        self._pool_tokens = self.pool.total * config.block_tokens
        # The last token of a sequence needs no place in the pool: it is never fed back.
        self.limit_tokens = min(self._context_tokens, self._pool_tokens + 1)

    # --- requests ---

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Any thread may ask. Raises: BadPrompt, PromptTooLong."""
        if not prompt_ids:
            raise BadPrompt("the prompt has no tokens")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.model_config.vocab_size:
            raise BadPrompt(f"token ids are 0 to {self.model_config.vocab_size - 1}")
        if len(prompt_ids) >= self._context_tokens:
            raise PromptTooLong(len(prompt_ids), self._context_tokens - 1, "context")
        if len(prompt_ids) > self._pool_tokens:
            raise PromptTooLong(len(prompt_ids), self._pool_tokens, "pool")

    def add(self, request: Request) -> None:
        """Raises: EngineClosed, BadPrompt, PromptTooLong, QueueFull, DuplicateRequest."""
        if self.closed:
            raise EngineClosed("the engine is closed")
        if request.request_id in self._answers:
            raise DuplicateRequest("a request with this id is running")
        self.check_prompt(request.prompt_ids)
        if self.waiting >= self.config.max_waiting:
            raise QueueFull(self.waiting, self.config.max_waiting)
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=secrets.randbits(64)))
        keys = self._exchange.keys(request.prompt_ids, request.params.cache_salt)
        seq = SequenceState(request, keys, self.config.block_tokens, self._clock())
        eos = () if request.params.ignore_eos else self.model_config.eos_token_ids
        self._answers[request.request_id] = Answer(seq, self._tokenizer, eos, self.limit_tokens)
        self._counters.prompt_tokens += len(request.prompt_ids)
        self._scheduler.add(seq)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Its last output, or None if it isn't running."""
        answer = self._answers.get(request_id)
        return None if answer is None else self._end(answer, "abort")

    @property
    def has_work(self) -> bool:
        return bool(self._answers)

    @property
    def waiting(self) -> int:
        """Requests that have no blocks."""
        return len(self._scheduler.waiting)

    def pause_s(self) -> float | None:
        """How long the next step may be put off; None: until there is a request."""
        if self._answers:
            return 0.0 if self._computed else _LOADING_PAUSE_S
        return _READING_PAUSE_S if self._exchange.reading else None

    # --- a step ---

    def step(self) -> list[RequestOutput]:
        """One forward pass at most. Never waits for a store."""
        with torch.inference_mode():
            chunks, stuck = self._scheduler.plan()
            outputs = [self._end(self._answer(seq), "error", error) for seq, error in stuck]
            chunks = [chunk for chunk in chunks if chunk.seq.blocks]
            self._computed = bool(chunks)
            if chunks:
                outputs += self._compute(chunks)
            return outputs

    def _compute(self, chunks: Sequence[Chunk]) -> list[RequestOutput]:
        started = self._clock()
        done, logits, failed = self._forward.run(chunks)
        self._note_time(chunks, self._clock() - started)
        errors: dict[SequenceState, EngineError] = dict(failed)
        self._counters.failed_steps += bool(failed)
        errors.update(self._publish(done))
        ended = [chunk.seq for chunk in done if chunk.last]
        states = [self._answer(seq).sampler for seq in ended]
        outputs = []
        for seq, sampled in zip(ended, sample(logits, states) if ended else (), strict=True):
            if seq in errors:
                continue
            if sampled is None:
                errors[seq] = BadLogits(len(seq.tokens) - 1)
                continue
            answer = self._answer(seq)
            if seq.first_token is None:
                seq.first_token = self._clock()
                self._exchange.report(seq)
                self._counters.cached_pool_tokens += answer.cached.pool
                self._counters.cached_store_tokens += answer.cached.store
            self._counters.generated_tokens += 1
            try:
                outputs.append(answer.accept(sampled, self._clock()))
            except Exception as exc:  # a tokenizer that can't decode what the model chose
                errors[seq] = StepFailed(f"the token could not be told: {type(exc).__name__}")
                errors[seq].__cause__ = exc
                continue
            if outputs[-1].finish_reason is not None:
                self._forget(answer, outputs[-1].finish_reason)
        return outputs + [self._end(self._answer(seq), "error", error) for seq, error in errors.items()]

    def _publish(self, done: Sequence[Chunk]) -> dict[SequenceState, EngineError]:
        """Blocks that got full are found and stored from now on, if they are finite: nobody else may meet a NaN."""
        size = self.pool.block_tokens
        errors: dict[SequenceState, EngineError] = {}
        for chunk in done:
            full = chunk.seq.advance(chunk.count, size)
            if not full:
                continue
            bad = next((i for i in full if not self.pool.is_finite(chunk.seq.blocks[i])), None)
            if bad is not None:
                errors[chunk.seq] = BadLogits((bad + 1) * size - 1)
                full = [i for i in full if i < bad]
            if full:
                self._exchange.full(chunk.seq, full)
        return errors

    def _note_time(self, chunks: Sequence[Chunk], took_s: float) -> None:
        counters = self._counters
        tokens = sum(chunk.count for chunk in chunks)
        counters.steps += 1
        counters.computed_tokens += tokens
        prefills = [chunk for chunk in chunks if chunk.seq.first_token is None or chunk.count > 1]
        for chunk in prefills:
            if chunk.seq.first_token is None:
                chunk.seq.prefill_s += took_s
        if not prefills:
            counters.decode_s += took_s
            return
        counters.prefill_s += took_s
        if len(prefills) == len(chunks) and took_s > 0:
            speed = tokens / took_s
            before = self._exchange.tokens_per_s
            self._exchange.tokens_per_s = speed if before is None else before + _NEW_SHARE * (speed - before)
        chunk = chunks[0]
        if len(chunks) == 1 and chunk.seq.first_token is None:  # among others it wouldn't be this request's time
            chunk.seq.prefill_passes.append((chunk.start, chunk.count, took_s))

    # --- ends ---

    def _answer(self, seq: SequenceState) -> Answer:
        return self._answers[seq.request.request_id]

    def _end(self, answer: Answer, reason: FinishReason, error: EngineError | None = None) -> RequestOutput:
        output = answer.end(reason, self._clock(), error)
        self._forget(answer, reason)
        return output

    def _forget(self, answer: Answer, reason: FinishReason | None) -> None:
        self._scheduler.remove(answer.seq)
        del self._answers[answer.seq.request.request_id]
        if reason is not None:
            self._counters.finished[reason] += 1

    def count_failed_step(self) -> None:
        """A step raised."""
        self._counters.failed_steps += 1

    def fail_all(self, error: EngineError) -> list[RequestOutput]:
        """End every request with this error."""
        return [self._end(answer, "error", error) for answer in list(self._answers.values())]

    def clear_cache(self) -> int:
        """Forget what the pool keeps of sequences that ended; how many blocks."""
        return self.pool.clear_cache()

    def check_idle(self) -> None:
        """Nothing runs and no store reads: free + cached = all blocks. Raises: InvariantViolation."""
        self.pool.check_idle()

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Abort what runs, wait up to `timeout_s` for the store to let go of the blocks it reads, and close it."""
        if self.closed:
            return
        self.closed = True
        for request_id in list(self._answers):
            self.abort(request_id)
        until = time.monotonic() + timeout_s
        while self._exchange.reading and time.monotonic() < until:
            self._exchange.poll_reading()
            time.sleep(_LOADING_PAUSE_S)
        self._exchange.close()

    def stats(self) -> EngineStats:
        counters = replace(self._counters, evicted_blocks=self.pool.evicted, finished=dict(self._counters.finished))
        loading = sum(seq.fetch is not None for seq in self._scheduler.running)
        return EngineStats(
            len(self._scheduler.running), len(self._scheduler.waiting), loading, self.pool.counts(), counters
        )


def _make_pool(model: CausalModel, config: EngineConfig) -> BlockPool:
    shape = block_shape(model.config, config.block_tokens)
    block_bytes = torch.Size(shape).numel() * model.kv_dtype.itemsize
    blocks = config.pool_bytes // block_bytes if config.pool_blocks is None else config.pool_blocks
    if blocks < 1:
        raise PoolTooSmall(block_bytes)
    tensor = pool_tensor(model.config, blocks, config.block_tokens, model.kv_dtype, config.device)
    return BlockPool(tensor, config.block_tokens)
