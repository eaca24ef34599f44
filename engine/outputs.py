"""What a request gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forebay.engine.errors import EngineError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Of one chosen token, natural logarithms of the model's own distribution (before penalties and temperature).

    top: (token id, logprob) of the likeliest tokens, best first; the chosen one need not be among them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class CachedTokens:
    """Prompt tokens that were not computed for this request: found in the engine's own pool, or loaded from the store."""

    pool: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        return self.pool + self.store


@dataclass(frozen=True)
class RequestTimes:
    """Seconds. queued_s: until it got its blocks. load_s: waiting for the store. prefill_s: in forward passes before the
    first token. first_token_s: from arrival to the first token (None before it). total_s: from arrival to this output."""

    queued_s: float = 0.0
    load_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0


@dataclass(frozen=True)
class RequestOutput:
    """A piece of a stream: text, token_ids and logprobs are what is new in it. The last one has a finish_reason.

    stop_reason: the stop string or the token id that ended it. output_tokens: so far. logprobs: None if not asked for.
    """

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: EngineError | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: CachedTokens
    times: RequestTimes


def joined(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """All pieces of one request, in order, as one."""
    told = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    return replace(
        pieces[-1],
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(one for some in told for one in some) if told else None,
    )
