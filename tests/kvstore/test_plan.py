"""Plans against brute force: the best prefix to load, never slower than cold, never from a tier it can't trust."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.cost import PrefillModel, TierEstimate, load_time_s
from forebay.kvstore.plan import Plan, plan, split_point

TOKENS, BYTES = 64, 768 * 1024
PREFILL = PrefillModel(t0=0.02, a=2.4e-3, b=4e-7)
RAM = TierEstimate(latency_s=1e-4, bandwidth_bytes_per_s=8e9)
DISK = TierEstimate(latency_s=2e-3, bandwidth_bytes_per_s=2e9, overhead_s_per_object=1e-5)


@dataclass(frozen=True)
class Held:
    tier: str
    blocks: int


def make(runs: list[Held], estimates: dict[str, TierEstimate], prompt: int, **more: float) -> Plan:
    return plan(runs, estimates, PREFILL, block_tokens=TOKENS, block_bytes=BYTES, prompt_tokens=prompt, **more)  # type: ignore[arg-type]


tier_estimates = st.builds(
    TierEstimate,
    latency_s=st.floats(0, 2),
    bandwidth_bytes_per_s=st.floats(1e5, 1e11),
    queued_bytes=st.integers(0, 10**9),
    overhead_s_per_object=st.floats(0, 0.05),
    healthy=st.booleans(),
)
prefills = st.builds(
    PrefillModel,
    t0=st.floats(0, 0.1),
    a=st.floats(1e-7, 1e-2),
    b=st.floats(0, 1e-5),
    k=st.floats(0, 0.1),
    chunk=st.sampled_from([0, 100, 512]),
)
runs_lists = st.lists(st.builds(Held, st.sampled_from(["ram", "ssd", "s3"]), st.integers(1, 12)), max_size=5)


def brute_force(
    runs: list[Held], estimates: dict[str, TierEstimate], prefill: PrefillModel, prompt: int, resident: int
) -> float:
    """The least time over all prefixes, block by block, sharing no code with the plan."""
    holders = [run.tier for run in runs for _ in range(run.blocks)]
    times = []
    for end in range(resident, (prompt - 1) // TOKENS + 1):
        wanted = holders[resident:end]
        if len(wanted) < end - resident or any(t not in estimates or not estimates[t].healthy for t in wanted):
            break
        load = sum(load_time_s(estimates[t], wanted.count(t), BYTES) for t in set(wanted))
        times.append(load + prefill.predict(end * TOKENS, prompt - end * TOKENS))
    return min(times)


@given(runs_lists, st.fixed_dictionaries({"ram": tier_estimates, "ssd": tier_estimates}), prefills, st.data())
def test_a_plan_is_as_good_as_trying_every_prefix_and_never_slower_than_cold(
    runs: list[Held], estimates: dict[str, TierEstimate], prefill: PrefillModel, data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(1, 40 * TOKENS))
    resident = data.draw(st.integers(0, (prompt - 1) // TOKENS))
    made = plan(
        runs,
        estimates,
        prefill,
        block_tokens=TOKENS,
        block_bytes=BYTES,
        prompt_tokens=prompt,
        resident_blocks=resident,
        margin=0.0,
    )
    assert made.predicted_s == pytest.approx(brute_force(runs, estimates, prefill, prompt, resident), rel=1e-9)
    assert made.predicted_s <= made.predicted_cold_s
    assert made.load_blocks == sum(r.blocks for r in made.ranges)
    assert all(estimates[r.tier].healthy for r in made.ranges)
    position = resident
    holders = [run.tier for run in runs for _ in range(run.blocks)]
    for piece in made.ranges:
        assert piece.first == position
        assert holders[position : position + piece.blocks] == [piece.tier] * piece.blocks
        position += piece.blocks
    assert position * TOKENS < prompt  # the last token is computed


@given(runs_lists, tier_estimates, st.integers(1, 40 * TOKENS), st.floats(1, 100))
def test_a_faster_tier_never_makes_the_first_token_later(
    runs: list[Held], slow: TierEstimate, prompt: int, factor: float
) -> None:
    fast = replace(slow, bandwidth_bytes_per_s=slow.bandwidth_bytes_per_s * factor)
    before = make(runs, {"ram": RAM, "ssd": slow}, prompt, margin=0.0)
    after = make(runs, {"ram": RAM, "ssd": fast}, prompt, margin=0.0)
    assert after.predicted_s <= before.predicted_s * (1 + 1e-12)


def test_a_fast_tier_is_used_to_the_last_full_block_before_the_last_token() -> None:
    assert make([Held("ram", 30)], {"ram": RAM}, 10 * TOKENS).load_blocks == 9
    assert make([Held("ram", 30)], {"ram": RAM}, 10 * TOKENS + 1).load_blocks == 10


def test_a_run_ends_at_an_unhealthy_or_unmeasured_tier_and_the_reason_says_so() -> None:
    runs = [Held("ram", 4), Held("ssd", 4), Held("ram", 4)]
    sick = make(runs, {"ram": RAM, "ssd": replace(DISK, healthy=False)}, 2000)
    assert sick.load_blocks == 4 and "ssd is unhealthy" in sick.reason
    unknown = make(runs, {"ram": RAM}, 2000)
    assert unknown.load_blocks == 4 and "ssd was never measured" in unknown.reason


def test_a_tier_that_is_slower_than_computing_is_left_alone() -> None:
    made = make([Held("s3", 20)], {"s3": TierEstimate(latency_s=30.0, bandwidth_bytes_per_s=1e6)}, 2000)
    assert made.ranges == () and made.predicted_load_s == 0.0 and made.reason.startswith("compute")


def test_a_saving_below_the_margin_is_not_worth_a_try() -> None:
    cold = PREFILL.predict(0, 2000)
    nearly = {"s3": TierEstimate(latency_s=cold * 0.6, bandwidth_bytes_per_s=1e12)}
    assert make([Held("s3", 20)], nearly, 2000, margin=0.0).load_blocks == 20
    assert make([Held("s3", 20)], nearly, 2000, margin=0.5).load_blocks == 0


def test_resident_blocks_are_neither_loaded_nor_computed() -> None:
    made = make([Held("ram", 20)], {"ram": RAM}, 2000, resident_blocks=5)
    assert made.ranges[0].first == 5 and made.load_blocks == 15
    assert made.predicted_cold_s == pytest.approx(PREFILL.predict(5 * TOKENS, 2000 - 5 * TOKENS))


@pytest.mark.parametrize("prompt, resident", [(0, 0), (64, 1), (10, -1)])
def test_counts_that_make_no_sense_are_refused(prompt: int, resident: int) -> None:
    with pytest.raises(ValueError, match="no plan"):
        make([], {}, prompt, resident_blocks=resident)


@given(
    st.integers(1, 600),
    st.builds(PrefillModel, t0=st.floats(0, 0.1), a=st.floats(1e-6, 1e-2), b=st.floats(0, 1e-4)),
    st.floats(0, 1),
    st.floats(0, 0.05),
)
def test_the_split_point_is_the_best_of_all_points(
    tokens: int, prefill: PrefillModel, latency: float, each: float
) -> None:
    def cost(s: int) -> float:
        return max(prefill.predict(0, s), latency + each * (tokens - s) if s < tokens else 0.0)

    s = split_point(prefill, tokens=tokens, latency_s=latency, seconds_per_token=each)
    assert 0 <= s <= tokens
    assert cost(s) == pytest.approx(min(cost(i) for i in range(tokens + 1)), rel=1e-6, abs=1e-12)


def test_what_loads_while_others_are_computed_costs_nothing() -> None:
    slow = TierEstimate(latency_s=30.0, bandwidth_bytes_per_s=1e9)
    alone = make([Held("far", 10)], {"far": slow}, 641)
    behind = make([Held("far", 10)], {"far": slow}, 641, busy_s=40.0)
    assert alone.load_blocks == 0 and behind.load_blocks == 10
    assert behind.predicted_load_s == 0.0 and behind.predicted_s < behind.predicted_cold_s
