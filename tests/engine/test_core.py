"""The loop, with a model that tells at once when it was shown wrong memory."""

from __future__ import annotations

import random

import pytest

from forebay.engine.config import EngineConfig
from forebay.engine.errors import BadLogits, BadPrompt, PromptTooLong, StepFailed
from forebay.engine.llm import LLM
from forebay.engine.params import SamplingParams
from tests.engine.hash_model import FAILING_TOKEN, NAN_TOKEN, SAFE_TOKENS, HashModel, expected, hash_config

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
SMALL = EngineConfig(block_tokens=4, pool_blocks=40, step_tokens=16, max_sequences=8)


def prompts_of(seed: int, count: int, most: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(SAFE_TOKENS) for _ in range(rng.randint(1, most))] for _ in range(count)]


def test_many_requests_in_a_small_pool_are_all_answered_as_if_alone() -> None:
    prompts = prompts_of(1, 20)
    prompts += [prompts[0] + [1, 2, 3], prompts[0] + [4]]
    with LLM(HashModel(), None, SMALL) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert [list(output.token_ids) for output in outputs] == [expected(prompt, 20) for prompt in prompts]
        assert llm.stats().counters.preemptions > 0
        llm.core.check_idle()


@pytest.mark.parametrize("bad", [NAN_TOKEN, FAILING_TOKEN])
@pytest.mark.parametrize("place", ["in a full block", "in the last block"])
def test_an_error_hits_only_its_request_and_its_memory_harms_nobody_later(bad: int, place: str) -> None:
    prompts = prompts_of(2, 8)
    broken = [1, 2, bad, 4, 5, 6, 7] if place == "in a full block" else [1, 2, 3, 4, 5, bad, 7]
    with LLM(HashModel(), None, SMALL) as llm:
        outputs = llm.generate([*prompts[:4], broken, *prompts[4:]], GREEDY)
        failed = outputs.pop(4)
        assert failed.finish_reason == "error"
        assert isinstance(failed.error, BadLogits if bad == NAN_TOKEN else StepFailed)
        assert [list(output.token_ids) for output in outputs] == [expected(prompt, 20) for prompt in prompts]
        llm.core.check_idle()
        again = prompts_of(3, 20)
        assert [list(o.token_ids) for o in llm.generate(again, GREEDY)] == [expected(prompt, 20) for prompt in again]


def test_prompts_that_can_never_run_are_refused_with_the_numbers() -> None:
    with LLM(HashModel(hash_config(context_tokens=100)), None, SMALL) as llm:
        long, empty, foreign, fine = llm.generate([[1] * 100, [], [61], [1] * 99], GREEDY)
        assert isinstance(long.error, PromptTooLong)
        assert (long.error.prompt_tokens, long.error.limit_tokens, long.error.limit) == (100, 99, "context")
        assert isinstance(empty.error, BadPrompt) and isinstance(foreign.error, BadPrompt)
        assert fine.finish_reason == "length" and fine.output_tokens == 1
    with LLM(HashModel(), None, SMALL) as llm:
        long, fine = llm.generate([[1] * 161, [1] * 160], GREEDY)
        assert isinstance(long.error, PromptTooLong)
        assert (long.error.limit_tokens, long.error.limit) == (160, "pool")
        assert list(fine.token_ids) == expected([1] * 160, 1)  # and then the pool is full
        llm.core.check_idle()
