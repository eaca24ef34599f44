"""The cost model: its equations, and a fit that finds them again from noisy and lying reports."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.cost import PrefillFitter, PrefillModel, TierEstimate, load_time_s

TRUE = PrefillModel(t0=0.02, a=2.4e-3, b=4e-7)
PRIOR = PrefillModel(t0=0.01, a=1e-3, b=1e-6)


def reports(seed: int, count: int, truth: PrefillModel = TRUE, noise: float = 0.03) -> list[tuple[int, int, float]]:
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        cached, tokens = rng.choice([0, 0, 512, 1024, 4096]), rng.randint(1, 4096)
        out.append((cached, tokens, truth.predict(cached, tokens) * (1 + rng.gauss(0, noise))))
    return out


def fitted(observations: list[tuple[int, int, float]], prior: PrefillModel = PRIOR) -> PrefillFitter:
    fitter = PrefillFitter(prior)
    for cached, tokens, seconds in observations:
        fitter.observe(cached, tokens, seconds)
    return fitter


def worst_error(model: PrefillModel, truth: PrefillModel = TRUE) -> float:
    grid = [(c, n) for c in (0, 500, 3000) for n in (30, 200, 1000, 4000)]
    return max(abs(model.predict(c, n) / truth.predict(c, n) - 1) for c, n in grid)


def test_a_prefill_costs_its_pass_its_tokens_its_pairs_and_its_chunks() -> None:
    model = PrefillModel(t0=1.0, a=0.1, b=0.01, k=2.0, chunk=4)
    assert model.predict(cached=10, tokens=5) == pytest.approx(1.0 + 0.5 + 0.01 * (50 + 12.5) + 2 * 2.0)
    assert model.predict(10, 0) == 0.0


def test_loading_nothing_is_free_and_an_unhealthy_tier_takes_forever() -> None:
    estimate = TierEstimate(latency_s=1e-3, bandwidth_bytes_per_s=1e9, queued_bytes=10**8, overhead_s_per_object=1e-5)
    assert load_time_s(estimate, 0, 10**6) == 0.0
    assert load_time_s(estimate, 100, 10**6) == pytest.approx(1e-3 + 0.1 + 0.1 + 1e-3)
    assert load_time_s(TierEstimate(1e-3, 1e9, healthy=False), 1, 1) == math.inf
    assert load_time_s(TierEstimate(1e-3, 0.0), 1, 1) == math.inf


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_recovers_the_parameters_within_five_percent(seed: int) -> None:
    model = fitted(reports(seed, 400)).model
    assert model.a == pytest.approx(TRUE.a, rel=0.05), f"seed {seed}"
    assert model.b == pytest.approx(TRUE.b, rel=0.05), f"seed {seed}"
    assert worst_error(model) < 0.05, f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_one_report_in_ten_that_is_far_off_hardly_moves_the_fit(seed: int) -> None:
    rng = random.Random(seed)
    lying = [(c, n, s * (20 if rng.random() < 0.1 else 1)) for c, n, s in reports(seed, 400)]
    assert worst_error(fitted(lying).model) < 0.1, f"seed {seed}"


def test_chunk_cost_is_found_when_prompts_tell_it_apart_from_the_token_cost() -> None:
    truth = PrefillModel(t0=0.01, a=1e-4, b=1e-8, k=0.05, chunk=512)
    model = fitted(reports(3, 600, truth, noise=0.01), PrefillModel(0.01, 2e-4, 1e-8, 0.02, 512)).model
    assert model.k == pytest.approx(truth.k, rel=0.1)


def test_a_machine_that_became_twice_as_slow_is_followed() -> None:
    slow = PrefillModel(2 * TRUE.t0, 2 * TRUE.a, 2 * TRUE.b)
    model = fitted(reports(1, 300) + reports(2, 300, slow)).model
    assert worst_error(model, slow) < 0.1


def test_after_one_report_a_similar_prefill_is_predicted_well_whatever_the_prior() -> None:
    fitter = PrefillFitter(PrefillModel(0.01, 1e-4, 1e-8))  # 24 times too fast
    fitter.observe(0, 1000, TRUE.predict(0, 1000))
    assert fitter.model.predict(0, 1000) == pytest.approx(TRUE.predict(0, 1000), rel=0.05)


def test_terms_without_evidence_stay_near_the_prior_however_long_it_runs() -> None:
    fitter = fitted([(0, 256, 0.5)] * 5000)  # one shape only: a, b and t0 can't be told apart
    assert fitter.model.predict(0, 256) == pytest.approx(0.5, rel=0.01)
    assert worst_error(fitter.model, PRIOR) < 10


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.floats(1e-6, 1e4)), max_size=40))
def test_no_sequence_of_reports_makes_a_parameter_negative_or_infinite(
    observations: list[tuple[int, int, float]],
) -> None:
    model = fitted(observations, PrefillModel(0.01, 1e-3, 1e-6, 0.01, 512)).model
    assert all(0 <= value < math.inf for value in (model.t0, model.a, model.b, model.k))


@pytest.mark.parametrize("report", [(0, 0, 1.0), (-1, 5, 1.0), (0, 5, 0.0), (0, 5, -1.0), (0, 5, math.nan)])
def test_a_report_that_makes_no_sense_is_refused(report: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="not a prefill report"):
        PrefillFitter(PRIOR).observe(*report)


def test_a_prior_without_any_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="prior"):
        PrefillFitter(PrefillModel(0, 0, 0))
