"""An engine that says what a test wants, when it wants: for what a real one does rarely."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from forebay.engine.errors import EngineError
from forebay.engine.outputs import CachedTokens, RequestOutput, RequestTimes
from forebay.engine.params import SamplingParams
from forebay.engine.stats import BlockCounts, Counters, EngineStats


@dataclass
class FakeEngine:
    """Answers with the prompt's ids, one by one, `pace_s` apart. fail: raised after `fail_after` tokens."""

    limit_tokens: int = 1000
    healthy: bool = True
    pace_s: float = 0.0
    fail: EngineError | None = None
    fail_after: int = 0
    open: int = 0
    asked: list[SamplingParams] = field(default_factory=list)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None, *, choice: int = 0
    ) -> AsyncIterator[RequestOutput]:
        self.asked.append(params)
        self.open += 1
        try:
            for number in range(params.max_tokens):
                if self.fail is not None and number == self.fail_after:
                    raise self.fail
                await asyncio.sleep(self.pace_s)
                last = number == params.max_tokens - 1
                yield RequestOutput(
                    request_id or "r",
                    choice,
                    text="x" if number else "ü",
                    token_ids=(prompt_ids[number % len(prompt_ids)],),
                    logprobs=None,
                    finish_reason="length" if last else None,
                    stop_reason=None,
                    error=None,
                    prompt_tokens=len(prompt_ids),
                    output_tokens=number + 1,
                    cached_tokens=CachedTokens(pool=16, store=32),
                    times=RequestTimes(first_token_s=0.25, total_s=0.5),
                )
        finally:
            self.open -= 1

    def stats(self) -> EngineStats:
        counters = Counters(steps=7, prefill_s=1.5)
        counters.finished["stop"] = 3
        return EngineStats(self.open, 0, 0, BlockCounts(total=10, free=6, cached=4, used=0, held=0), counters)

    async def clear_cache(self) -> int:
        return 4
