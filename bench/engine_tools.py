"""What the engine's benchmarks share: the real model over a store, and a store that is timed from the engine's side."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fetch_model import FOLDER_NAME, cache_dir

from forebay.engine.config import EngineConfig
from forebay.engine.llm import LLM
from forebay.engine.loading import LoadedModel, load_model
from forebay.engine.prefix import EngineLoad, Load, Match, PrefixStore, Store, Timings
from forebay.engine_adapter.bundled import ForebayPrefixStore, connect, namespace_facts, prefill_prior


def real_model(threads: int) -> LoadedModel:
    """The 0.5B model in bf16. Exits where it was not fetched."""
    folder = cache_dir() / FOLDER_NAME
    if not folder.is_dir():
        sys.exit(f"{folder} is not there: run bench/fetch_model.py")
    return load_model(folder, "bf16", threads=threads)


def store_of(model: LoadedModel, where: Path | str, config: EngineConfig) -> ForebayPrefixStore:
    facts = namespace_facts(
        model.config,
        weights_digest=model.weights_digest,
        precision=model.precision,
        kv_dtype=model.model.kv_dtype,
        block_tokens=config.block_tokens,
        head_groups=model.config.kv_heads,
    )
    return connect(where, facts, prior=prefill_prior(model.config))


def engine_of(model: LoadedModel, config: EngineConfig, store: PrefixStore | None) -> LLM:
    return LLM(model.model, model.tokenizer, config, store)


def random_prompt(rng: np.random.Generator, model: LoadedModel, tokens: int) -> list[int]:
    found: list[int] = rng.integers(0, min(100_000, model.config.vocab_size), tokens).tolist()
    return found


class Traced:
    """A store whose calls are timed on the engine's thread."""

    def __init__(self, inner: ForebayPrefixStore) -> None:
        self.inner = inner
        self.reset()

    def reset(self) -> None:
        self.calls: dict[str, list[float]] = {}
        self.asked_s = self.known_s = 0.0

    @property
    def spent_s(self) -> float:
        return sum(sum(took) for took in self.calls.values())

    @property
    def waited_s(self) -> float:
        """From the first ask to the answer."""
        return max(0.0, self.known_s - self.asked_s)

    def _timed(self, name: str, *given: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return getattr(self.inner, name)(*given)
        finally:
            ended_s = time.perf_counter()
            self.calls.setdefault(name, []).append(ended_s - began_s)

    def attach(self, pool: torch.Tensor) -> None:
        self.inner.attach(pool)

    def keys(self, token_ids: Sequence[int], extras: bytes = b"") -> list[bytes]:
        found: list[bytes] = self._timed("keys", token_ids, extras)
        return found

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], engine_load: EngineLoad) -> Match | None:
        self.asked_s = self.asked_s or time.perf_counter()
        found: Match | None = self._timed("match", keys, token_ids, engine_load)
        if found is not None:
            self.known_s = time.perf_counter()
        return found

    def load(self, plan: Match, first: int, slots: Sequence[int]) -> Load:
        found: Load = self._timed("load", plan, first, slots)
        return found

    def store(self, keys: Sequence[bytes], token_ids: Sequence[int], first: int, slots: Sequence[int]) -> Store:
        found: Store = self._timed("store", keys, token_ids, first, slots)
        return found

    def report(self, timings: Timings) -> None:
        self._timed("report", timings)

    def close(self) -> None:
        self.inner.close()
