"""In fp64 nothing that the engine is free to choose changes an answer: batches, chunks, caches, preemption.

Each configuration draws a tiny model, requests (seeds, penalties and logprobs included) and a way to run them, and compares
with each request alone, computed whole, in an engine that has seen nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from forebay.engine.batch import CausalModel
from forebay.engine.config import EngineConfig
from forebay.engine.llm import LLM
from forebay.engine.outputs import RequestOutput
from forebay.engine.params import SamplingParams
from forebay.engine.prefix import PrefixStore
from tests.engine.dict_store import DictStore, Trouble
from tests.engine.tiny import tiny_model

ARCHITECTURES = ("qwen2", "qwen3", "llama")
WAYS = ("batched", "chunked", "warm pool", "warm store", "troubled store", "preempted")
CONFIGURATIONS = 900
QUICK = 60


@cache
def model_of(architecture: str, seed: int) -> CausalModel:
    return tiny_model(architecture, seed)


@dataclass(frozen=True)
class Case:
    model: CausalModel
    prompts: list[list[int]]
    params: list[SamplingParams]
    size: int  # of blocks

    @property
    def longest(self) -> int:
        return max(len(prompt) + params.max_tokens for prompt, params in zip(self.prompts, self.params, strict=True))

    def run(self, store: PrefixStore | None = None, **options: int) -> tuple[list[RequestOutput], LLM]:
        options = {"pool_blocks": 400, "step_tokens": 1024, "max_sequences": 16} | options
        config = EngineConfig(block_tokens=self.size, **options)  # type: ignore[arg-type]
        llm = LLM(self.model, None, config, store)
        return llm.generate(self.prompts, self.params), llm


def case_of(rng: random.Random) -> Case:
    model = model_of(rng.choice(ARCHITECTURES), rng.randrange(3))
    vocabulary = model.config.vocab_size
    shared = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 60))]
    prompts, params = [], []
    for _ in range(rng.choice((1, 2, 4, 16))):
        own = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 30))]
        prompts.append(shared[: rng.choice((0, rng.randint(0, len(shared)), len(shared)))] + own)
        params.append(
            SamplingParams(
                max_tokens=rng.randint(1, 8),
                temperature=rng.choice((0.0, 0.5, 1.0)),
                top_k=rng.choice((0, 3, 20)),
                top_p=rng.choice((1.0, 0.9, 0.5)),
                min_p=rng.choice((0.0, 0.1)),
                presence_penalty=rng.choice((0.0, 1.0)),
                frequency_penalty=rng.choice((0.0, 0.5)),
                repetition_penalty=rng.choice((1.0, 1.2)),
                seed=rng.randrange(1 << 40),
                ignore_eos=rng.random() < 0.5,
                min_tokens=rng.choice((0, 4)),
                logprobs=rng.choice((None, 0, 3)),
            )
        )
    return Case(model, prompts, params, rng.choice((1, 4, 16)))


def alone(case: Case) -> list[RequestOutput]:
    outputs = []
    for prompt, params in zip(case.prompts, case.params, strict=True):
        outputs += Case(case.model, [prompt], [params], case.size).run()[0]
    return outputs


def compare(got: Sequence[RequestOutput], want: Sequence[RequestOutput]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.error is None and other.error is None
        assert (one.token_ids, one.finish_reason, one.stop_reason) == (
            other.token_ids,
            other.finish_reason,
            other.stop_reason,
        )
        assert (one.logprobs is None) == (other.logprobs is None)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert a.token_id == b.token_id and a.logprob == pytest.approx(b.logprob, abs=1e-9)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def check(seed: int) -> str:
    rng = random.Random(seed)
    case, way = case_of(rng), WAYS[seed % len(WAYS)]
    want = alone(case)
    chunk = rng.choice((1024, 64, rng.randint(1, 16)))
    if way == "batched":
        got, llm = case.run()
    elif way == "chunked":
        got, llm = case.run(step_tokens=rng.randint(1, 16))
    elif way == "warm pool":
        _, llm = case.run(step_tokens=chunk)
        before = llm.stats().counters.cached_pool_tokens
        got = llm.generate(case.prompts, case.params)
        usable = sum((len(prompt) - 1) // case.size for prompt in case.prompts) * case.size
        assert llm.stats().counters.cached_pool_tokens - before == usable
    elif way == "preempted":
        # Room for the longest alone, and hardly for two.
        blocks = -(-case.longest // case.size) + rng.randint(0, 2)
        got, llm = case.run(pool_blocks=blocks, step_tokens=chunk)
    else:
        trouble = Trouble()
        if way == "troubled store":
            trouble = Trouble(match_polls=2, load_polls=5, store_polls=5, hole=0.2, damaged=0.1, never=0.05)
            trouble.raises, trouble.overstates = rng.choice(((0.0, 0.0), (0.02, 0.5)))
        store = DictStore(case.size, seed=seed)
        case.run(store, step_tokens=chunk)[1].close()
        got, llm = case.run(store.fork(trouble, seed), step_tokens=chunk)
        usable = max((len(prompt) - 1) // case.size for prompt in case.prompts)
        assert way != "warm store" or not usable or llm.stats().counters.cached_store_tokens >= usable * case.size
    try:
        compare(got, want)
        if "store" not in way:
            llm.core.check_idle()
    except BaseException:
        print(f"replay: check({seed})  # {way}")
        raise
    return f"{way}, preempted" if llm.stats().counters.preemptions else way


@pytest.mark.parametrize("seed", range(QUICK))
def test_an_answer_does_not_depend_on_how_it_is_run(seed: int) -> None:
    check(seed)


@pytest.mark.slow
def test_900_random_configurations_answer_as_each_request_alone() -> None:
    ways = [check(seed) for seed in range(CONFIGURATIONS)]
    # Otherwise "preempted" would not say much.
    assert sum("preempted" in way for way in ways) > CONFIGURATIONS // 20
    assert ways.count("preempted, preempted") > 10
