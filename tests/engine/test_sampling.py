"""The sampler against slow, plain definitions, and against the probabilities it is asked for."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine.params import BadParams, SamplingParams
from forebay.engine.sampling import Sampled, SamplerState, sample, uniform

VOCABULARY = 12


def state_of(
    params: SamplingParams, prompt: Sequence[int] = (), seed: int = 0, choice: int = 0, stop: Sequence[int] = ()
) -> SamplerState:
    return SamplerState.of(params, prompt, seed, choice, frozenset(stop))


def draw(logits: Sequence[float], state: SamplerState) -> int:
    (sampled,) = sample(torch.tensor([logits], dtype=torch.float64), [state])
    assert isinstance(sampled, Sampled)
    return sampled.token_id


def plain_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, top-p and min-p, by sorting everything."""
    largest = max(logits)
    weights = [math.exp((value - largest) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total, kept, so_far = sum(weights[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        so_far += weights[i]
        if so_far >= params.top_p * total * (1 - 1e-12):
            break
    kept = [i for i in kept if weights[i] >= params.min_p]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


LOGITS = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=VOCABULARY, max_size=VOCABULARY)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.3, 1.0, 2.5)),
    top_k=st.sampled_from((0, 1, 3, 11, 50)),
    top_p=st.sampled_from((1.0, 0.95, 0.55, 0.01)),
    min_p=st.sampled_from((0.0, 0.03, 0.3, 1.0)),
)


@given(LOGITS, PARAMS, st.integers(0, 1 << 32))
def test_the_draw_is_where_the_plain_definition_puts_it(logits: list[float], params: SamplingParams, seed: int) -> None:
    state = state_of(params, seed=seed)
    wanted = plain_distribution(logits, params)
    u, so_far = uniform(state.seed, 0), 0.0
    token = draw(logits, state)
    assert wanted[token] > 0.0
    so_far = sum(wanted[:token])
    assert so_far - 1e-9 <= u <= so_far + wanted[token] + 1e-9


def test_draws_have_the_probabilities_that_are_asked_for() -> None:
    rng = random.Random(3)
    logits = [rng.gauss(0, 2) for _ in range(VOCABULARY)]
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=8)
    wanted, draws = plain_distribution(logits, params), 20_000
    state = state_of(params, seed=11)
    counts: Counter[int] = Counter()
    for _ in range(draws):
        token = draw(logits, state)
        counts[token] += 1
        state.note(token)
    chi2 = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in enumerate(wanted) if p)
    assert set(counts) <= {i for i, p in enumerate(wanted) if p}
    assert chi2 < 30  # 7 degrees of freedom at most: above it once in 10,000 seeds, and this one is fixed


def test_a_nucleus_over_a_large_flat_vocabulary_is_the_smallest_set() -> None:
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    probabilities = torch.softmax(logits[0], 0)
    ordered, ids = probabilities.sort(descending=True)
    nucleus = set(ids[: int((ordered.cumsum(0) < 0.7).sum()) + 1].tolist())
    state = state_of(SamplingParams(top_p=0.7), seed=5)
    drawn = set()
    for _ in range(300):
        (sampled,) = sample(logits, [state])
        assert sampled is not None
        state.note(sampled.token_id)
        drawn.add(sampled.token_id)
    assert drawn <= nucleus and len(drawn) > 250


def test_seed_place_and_choice_decide_the_draw_and_nothing_else_does() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(1, 1000)

    def tokens(seed: int, choice: int, count: int = 8) -> list[int]:
        state, got = state_of(params, seed=seed, choice=choice), []
        for _ in range(count):
            (sampled,) = sample(logits, [state])
            assert sampled is not None
            got.append(sampled.token_id)
            state.note(sampled.token_id)
        return got

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(tokens(seed, choice)) for seed in (1, 2, -1, (1 << 64) - 2) for choice in (0, 1)}) == 8
    rows = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    states = [state_of(params, seed=i) for i in range(5)]
    together = sample(rows, states)
    assert together == [sample(rows[i : i + 1], [states[i]])[0] for i in range(5)]
    assert together[::-1] == sample(rows.flip(0), states[::-1])


@given(
    LOGITS, st.lists(st.integers(0, VOCABULARY - 1), max_size=6), st.lists(st.integers(0, VOCABULARY - 1), max_size=6)
)
def test_penalties_are_those_of_their_definition(logits: list[float], prompt: list[int], generated: list[int]) -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    state = state_of(params, prompt)
    for token in generated:
        state.note(token)
    wanted = list(logits)
    for i in set(prompt) | set(generated):
        wanted[i] = wanted[i] / 1.5 if wanted[i] > 0 else wanted[i] * 1.5
    for i, count in Counter(generated).items():
        wanted[i] -= 0.5 + 0.25 * count
    assert wanted[draw(logits, state)] == pytest.approx(max(wanted), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_do_not_come_before_their_time(temperature: float) -> None:
    logits = [0.0] * VOCABULARY
    logits[4] = logits[7] = 50.0
    state = state_of(SamplingParams(temperature=temperature, min_tokens=3), stop=(4, 7, 9999, -5))
    for _ in range(3):
        token = draw(logits, state)
        assert token not in (4, 7)
        state.note(token)
    assert draw(logits, state) in (4, 7)


def test_logprobs_are_the_models_own_and_ties_go_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 0.0]], dtype=torch.float32)
    params = SamplingParams(temperature=0.0, logprobs=3, repetition_penalty=50.0)
    (sampled,) = sample(logits, [state_of(params, prompt=[1])])
    assert sampled is not None and sampled.token_id == 2 and sampled.logprobs is not None
    wanted = torch.log_softmax(logits[0].double(), 0)
    assert sampled.logprobs.logprob == pytest.approx(wanted[2].item())
    assert [token for token, _ in sampled.logprobs.top] == [1, 2, 0]
    assert [value for _, value in sampled.logprobs.top] == pytest.approx([wanted[i].item() for i in (1, 2, 0)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_told_and_hurts_no_other(bad: float) -> None:
    rows = torch.zeros(3, VOCABULARY)
    rows[:, 5] = 1.0
    rows[1, 2] = bad
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)):
        first, second, third = sample(rows, [state_of(params)] * 3)
        assert first is not None and second is None and third is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_a_request_that_leaves_itself_no_token_hurts_no_other(temperature: float, top_p: float) -> None:
    rows = torch.ones(3, VOCABULARY)
    fine = state_of(SamplingParams(temperature=temperature, top_p=top_p, top_k=5))
    none = state_of(SamplingParams(temperature=temperature, top_p=top_p, top_k=5, min_tokens=1), stop=range(VOCABULARY))
    first, second, third = sample(rows, [fine, none, fine])
    assert first is not None and second is None and third is not None


def test_extreme_temperatures_and_logits_draw_something_valid() -> None:
    rows = torch.tensor([[3e38, -3e38, 0.0], [1e-30, 0.0, -1e-30]], dtype=torch.float32)
    for temperature in (1e-300, 1e-5, 100.0):
        for row in rows:
            state = state_of(SamplingParams(temperature=temperature, top_p=0.999999, min_p=1e-12))
            assert draw(row.tolist(), state) in (0, 1, 2)
    assert draw([0.0, 1.0, 0.0], state_of(SamplingParams(temperature=1e-300))) == 1


def test_uniform_numbers_are_spread_evenly() -> None:
    numbers = np.array([uniform(seed, place) for seed in range(100) for place in range(100)])
    counts, _ = np.histogram(numbers, bins=20, range=(0.0, 1.0))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    assert ((counts - 500) ** 2 / 500).sum() < 50  # 19 degrees of freedom


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"max_tokens": 0},
        {"stop": ("",)},
        {"repetition_penalty": 5e-324},
        {"stop_token_ids": tuple(range(257))},
    ],
)
def test_params_that_exist_are_valid(bad: dict[str, object]) -> None:
    with pytest.raises(BadParams) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert caught.value.name in bad
