"""What one request has been answered so far: text, when it ends, and the outputs that tell it."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.engine.detokenize import Decoder, Detokenizer
from forebay.engine.errors import EngineError
from forebay.engine.outputs import CachedTokens, FinishReason, RequestOutput, RequestTimes, TokenLogprobs
from forebay.engine.sampling import Sampled, SamplerState
from forebay.engine.sequence import SequenceState


class Answer:
    """limit_tokens: most tokens that this engine gives a sequence, prompt included."""

    def __init__(
        self, seq: SequenceState, tokenizer: Decoder | None, eos_token_ids: Sequence[int], limit_tokens: int
    ) -> None:
        params, request = seq.params, seq.request
        self.seq = seq
        self.sampler = SamplerState.of(
            params,
            request.prompt_ids,
            params.seed or 0,
            request.choice,
            frozenset(eos_token_ids) | frozenset(params.stop_token_ids),
        )
        self._most = min(params.max_tokens, limit_tokens - seq.prompt_tokens)
        self._text = None if tokenizer is None else Detokenizer(tokenizer, params.stop)

    @property
    def cached(self) -> CachedTokens:
        size = self.seq.block_tokens
        return CachedTokens(self.seq.pool_blocks * size, self.seq.store_blocks * size)

    def accept(self, sampled: Sampled, now: float) -> RequestOutput:
        """The next token. The output has a finish_reason if it is the last one."""
        token_id = sampled.token_id
        self.seq.tokens.append(token_id)
        self.sampler.note(token_id)
        text = ""
        reason: FinishReason | None = None
        stop_reason: str | int | None = None
        if token_id in self.sampler.stop_ids:
            reason, stop_reason = "stop", token_id  # the text ends before it
        elif self._text is not None:
            text = self._text.add(token_id, may_stop=self.sampler.generated >= self.seq.params.min_tokens)
            if self._text.stopped_by is not None:
                reason, stop_reason = "stop", self._text.stopped_by
        if reason is None and self.sampler.generated >= self._most:
            reason = "length"
        if reason is not None and self._text is not None:
            text += self._text.flush()
        logprobs = None if sampled.logprobs is None else (sampled.logprobs,)
        return self._output(text, (token_id,), logprobs, reason, stop_reason, None, now)

    def end(self, reason: FinishReason, now: float, error: EngineError | None = None) -> RequestOutput:
        """It ends before its time."""
        text = "" if self._text is None or error is not None else self._text.flush()
        logprobs = None if self.seq.params.logprobs is None else ()
        return self._output(text, (), logprobs, reason, None, error, now)

    def _output(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        reason: FinishReason | None,
        stop_reason: str | int | None,
        error: EngineError | None,
        now: float,
    ) -> RequestOutput:
        seq = self.seq
        return RequestOutput(
            request_id=seq.request.request_id,
            choice=seq.request.choice,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
            prompt_tokens=seq.prompt_tokens,
            output_tokens=self.sampler.generated,
            cached_tokens=self.cached,
            times=RequestTimes(
                queued_s=(now if seq.admissions == 0 else seq.admitted) - seq.arrived,
                load_s=seq.store_wait_s,
                prefill_s=seq.prefill_s,
                first_token_s=None if seq.first_token is None else seq.first_token - seq.arrived,
                total_s=now - seq.arrived,
            ),
        )
