"""Offline use: many prompts in, all answers out.

Always true: results come in the order of the prompts; one that fails is an output with its error, the others go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from forebay.engine.batch import CausalModel
from forebay.engine.config import EngineConfig
from forebay.engine.core import EngineCore
from forebay.engine.detokenize import Decoder
from forebay.engine.errors import EngineError
from forebay.engine.loading import load_model
from forebay.engine.outputs import CachedTokens, RequestOutput, RequestTimes, joined
from forebay.engine.params import SamplingParams
from forebay.engine.prefix import PrefixStore
from forebay.engine.sequence import Request
from forebay.engine.stats import EngineStats


class TextTokenizer(Decoder, Protocol):
    def encode(self, text: str) -> list[int]: ...


class LLM:
    """A model with its engine, in the caller's thread. A context manager; `close` gives the store back.

    Args:
        model: or what `load_model` finds it by: a folder, a GGUF file, a Hugging Face id; then its own tokenizer is used.
        tokenizer: needed for text prompts, texts and stop strings. store: the engine closes it.
    Raises: ModelError, where the model is loaded here.
    """

    def __init__(
        self,
        model: CausalModel | str | os.PathLike[str],
        tokenizer: TextTokenizer | None = None,
        config: EngineConfig | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        config = config or EngineConfig()
        if isinstance(model, str | os.PathLike):
            loaded = load_model(model, config.precision, config.device, config.threads)
            model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
        self._tokenizer = tokenizer
        self.core = EngineCore(model, tokenizer, config, store)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """One whole output a prompt.

        Args:
            prompts: texts or token ids. params: for all of them, or one each.
            progress: called with (requests done, requests) as they end.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling parameters")
        requests = [
            Request(str(i), tuple(self._ids(prompt)), param)
            for i, (prompt, param) in enumerate(zip(prompts, each, strict=True))
        ]
        pieces: list[list[RequestOutput]] = [[] for _ in prompts]
        try:
            self._run(requests, pieces, progress)
        finally:
            for request in requests:  # after an interrupt; all others have ended
                self.core.abort(request.request_id)
        return [joined(some) for some in pieces]

    def _run(
        self,
        requests: Sequence[Request],
        pieces: list[list[RequestOutput]],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        core, added, done = self.core, 0, 0
        while added < len(requests) or core.has_work:
            while added < len(requests) and core.waiting < core.config.max_waiting:
                try:
                    core.add(requests[added])
                except EngineError as error:
                    pieces[added].append(_refused(requests[added], error))
                    done += 1
                added += 1
            outputs = core.step()
            for output in outputs:
                pieces[int(output.request_id)].append(output)
                done += output.finish_reason is not None
            if progress is not None:
                progress(done, len(requests))
            if pause_s := core.pause_s():
                time.sleep(pause_s)

    def _ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer")
        return self._tokenizer.encode(prompt)

    def stats(self) -> EngineStats:
        return self.core.stats()

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _refused(request: Request, error: EngineError) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        choice=request.choice,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason="error",
        stop_reason=None,
        error=error,
        prompt_tokens=len(request.prompt_ids),
        output_tokens=0,
        cached_tokens=CachedTokens(),
        times=RequestTimes(),
    )
