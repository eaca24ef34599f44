"""Prefix reuse on tiny real models: warm equals cold, everything new is stored, and any trouble is a counted miss."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from forebay.engine_adapter.transformers import PrefixReuse
from forebay.kvstore.cost import PrefillModel, TierEstimate
from forebay.kvstore.errors import DaemonFault, DaemonUnavailable, EpochEnded
from forebay.kvstore.plan import Plan, plan
from tests.engine_adapter.fake_client import FakeClient
from tests.engine_adapter.models import llama, qwen

BT = 8
ENDLESS: tuple[int, ...] = ()  # no stop tokens


def eager(runs: Any, estimates: Any, prefill: PrefillModel, **facts: Any) -> Plan:
    """The real planner on a slow engine: a pass over a tiny model is all fixed cost, so it would rightly load nothing."""
    return plan(runs, estimates, PrefillModel(t0=0.0, a=1.0, b=0.0), **facts)


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen()


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


Engine = Callable[..., PrefixReuse]


@pytest.fixture
def engine(model: Any) -> Iterator[Engine]:
    opened: list[PrefixReuse] = []

    def make(client: Any, use: Any = None, **options: Any) -> PrefixReuse:
        opened.append(PrefixReuse(use or model, client, **{"block_tokens": BT, "planner": eager} | options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 97), k=tokens)


def run(engine: PrefixReuse, ids: list[int], new: int = 12, **options: Any) -> Any:
    result = engine.generate(ids, new, stop_tokens=ENDLESS, keep_logits=True, **options)
    assert engine.wait_stored(10)
    return result


@pytest.mark.parametrize("build", [qwen, llama])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_warm_answer_equals_the_cold_one(
    build: Callable[..., Any], dtype: torch.dtype, client: FakeClient, engine: Engine
) -> None:
    model = build(dtype)
    ids = prompt(1, 101)
    cold = run(engine(None, model), ids)
    first = run(engine(client, model), ids)
    again = run(engine(client, model), ids)  # another engine: only the daemon is common
    assert first.reuse.tokens == 0 and first.reuse.miss == "not_stored"
    assert again.reuse.tokens == 96 and again.reuse.tiers == {"ram": 12} and again.reuse.miss == ""
    assert cold.tokens == first.tokens == again.tokens
    torch.testing.assert_close(again.logits, cold.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_kv_comes_back_bit_for_bit(dtype: torch.dtype, client: FakeClient, engine: Engine) -> None:
    model = qwen(dtype)
    ids = prompt(2, 40)
    run(engine(client, model), ids)
    reader = engine(client, model)
    warm = run(reader, ids)
    assert warm.reuse.blocks == 4
    kv = reader._spare
    assert kv is not None
    writer = engine(FakeClient(), model)
    run(writer, ids)
    assert writer._spare is not None
    torch.testing.assert_close(kv.data[:, :, :, :32], writer._spare.data[:, :, :, :32], rtol=0, atol=0)


def test_the_same_answer_as_generate_of_transformers(model: Any, client: FakeClient, engine: Engine) -> None:
    ids = prompt(3, 50)
    theirs = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=None)[0, 50:].tolist()
    assert run(engine(None), ids, 10).tokens == theirs
    run(engine(client), ids, 10)
    assert run(engine(client), ids, 10).tokens == theirs


def test_generated_tokens_are_stored_and_serve_the_next_turn(client: FakeClient, engine: Engine) -> None:
    ids = prompt(4, 21)
    first = run(engine(client), ids, new=30)
    turn = ids + first.tokens + prompt(5, 5)
    # 21 + 30 tokens, the last one without KV: 50 tokens, 6 full blocks
    warm = run(engine(client), turn)
    assert warm.reuse.tokens == 48
    assert warm.tokens == run(engine(None), turn).tokens


def test_the_last_new_token_has_no_kv_yet_and_its_block_is_not_stored(client: FakeClient, engine: Engine) -> None:
    run(engine(client), prompt(27, 21), new=11)  # 32 tokens would be 4 blocks; 31 have KV
    assert len(client.blocks) == 3
    run(engine(client), prompt(28, 21), new=12)
    assert len(client.blocks) == 3 + 4


def test_the_last_prompt_token_is_computed_even_when_all_blocks_are_stored(client: FakeClient, engine: Engine) -> None:
    ids = prompt(6, 4 * BT)
    cold = run(engine(client), ids)
    warm = run(engine(client), ids)
    assert warm.reuse.tokens == 3 * BT and warm.tokens == cold.tokens


def test_a_prompt_shorter_than_a_block_stores_and_loads_nothing(client: FakeClient, engine: Engine) -> None:
    assert run(engine(client), prompt(7, 3), new=2).reuse.tokens == 0
    assert client.blocks == {}


def test_a_shared_prefix_is_reused_up_to_the_block_where_prompts_part(client: FakeClient, engine: Engine) -> None:
    head = prompt(8, 30)
    run(engine(client), head + prompt(9, 30))
    other = head + prompt(10, 30)
    warm = run(engine(client), other)
    assert warm.reuse.tokens == 24
    assert warm.tokens == run(engine(None), other).tokens


def test_one_engine_reuses_its_buffer_without_seeing_what_was_left_in_it(client: FakeClient, engine: Engine) -> None:
    one = engine(client)
    run(one, prompt(11, 200))
    buffer = one._spare
    ids = prompt(12, 60)
    again = run(one, ids)
    assert one._spare is buffer
    assert again.tokens == run(engine(None), ids).tokens


def test_store_false_leaves_the_daemon_as_it_is(client: FakeClient, engine: Engine) -> None:
    run(engine(client), prompt(13, 40), store=False)
    assert client.blocks == {}


def test_stop_tokens_end_the_text_and_choose_replaces_greedy(engine: Engine) -> None:
    one = engine(None)
    full = one.generate(prompt(14, 20), 12, stop_tokens=ENDLESS).tokens
    stop = full[5]
    assert one.generate(prompt(14, 20), 12, stop_tokens=[stop]).tokens == full[: full.index(stop) + 1]
    assert one.generate(prompt(14, 20), 3, stop_tokens=ENDLESS, choose=lambda logits: 7).tokens == [7, 7, 7]


def test_timings_are_reported_and_the_prefill_model_learns(client: FakeClient, engine: Engine) -> None:
    one = engine(client)
    before = one.prefill
    run(one, prompt(15, 50))
    run(one, prompt(15, 50))
    assert one.prefill != before
    kinds = [kind for kind, _ in client.reports]
    assert kinds == ["prefill", "prefill", "load"]
    assert client.reports[1][1]["cached"] == 48 and client.reports[1][1]["tokens"] == 2
    assert client.reports[2][1]["bytes"] == 6 * BT * one._shape.token_bytes


def test_blocks_that_cost_more_than_computing_are_not_loaded(client: FakeClient, engine: Engine) -> None:
    ids = prompt(16, 60)
    run(engine(client), ids)
    client.estimate = TierEstimate(latency_s=1e6, bandwidth_bytes_per_s=1e9)
    warm = run(engine(client), ids)
    assert warm.reuse.tokens == 0 and warm.reuse.miss == "planned_none"
    assert "acquire" not in client.calls


# --- trouble is a miss ---------------------------------------------------------------------------------------------

TROUBLE = [DaemonUnavailable("gone"), EpochEnded("old life"), DaemonFault("oops"), ConnectionResetError("reset")]


@pytest.mark.parametrize("verb", ["open", "match", "acquire", "release", "allocate", "commit", "report"])
@pytest.mark.parametrize("error", TROUBLE, ids=lambda e: type(e).__name__)
def test_trouble_in_any_call_is_a_counted_miss_and_the_answer_stays_right(
    verb: str, error: Exception, client: FakeClient, engine: Engine
) -> None:
    ids = prompt(17, 60)
    expected = run(engine(None), ids).tokens
    run(engine(client), ids[:40])  # something to hit and something to store
    client.fail = {verb: error}
    one = engine(client, clock=lambda: 0.0)
    result = run(one, ids)
    assert client.calls.count(verb) > 0
    assert result.tokens == expected
    assert any(type(error).__name__ in name for name in one.counters), one.counters
    if verb in ("open", "match", "acquire", "release"):
        assert result.reuse.tokens == 0 and result.reuse.miss == type(error).__name__


def test_a_lease_that_turns_invalid_during_the_copy_is_a_miss(client: FakeClient, engine: Engine) -> None:
    ids = prompt(18, 60)
    cold = run(engine(client), ids)
    client.lease_breaks = True
    for key, (tokens, payload) in client.blocks.items():
        client.blocks[key] = (tokens, b"\x11" * len(payload))  # what a torn copy would have seen
    one = engine(client)
    warm = run(one, ids)
    assert warm.reuse.tokens == 0 and warm.reuse.miss == "lease_lost" and one.counters["lease_lost"] == 1
    assert warm.tokens == cold.tokens


def test_blocks_evicted_between_match_and_acquire_shorten_the_hit(client: FakeClient, engine: Engine) -> None:
    ids = prompt(19, 60)
    cold = run(engine(client), ids)
    client.lease_loses = 3
    warm = run(engine(client), ids)
    assert warm.reuse.blocks == 4 and warm.reuse.miss == "gone" and warm.tokens == cold.tokens


@pytest.mark.parametrize("tier, verify", [("ram", "always"), ("ssd", "loaded")])
def test_blocks_whose_checksums_fail_are_not_used(tier: str, verify: str, client: FakeClient, engine: Engine) -> None:
    ids = prompt(20, 60)
    cold = run(engine(client), ids)
    for key, (tokens, payload) in list(client.blocks.items())[2:]:
        client.blocks[key] = (tokens, b"\x11" * len(payload))
    client.tier, client.sound = tier, 2
    warm = run(engine(client, verify=verify), ids)
    assert warm.reuse.blocks == 2 and warm.reuse.tiers == {tier: 2} and warm.reuse.miss == "damaged"
    assert warm.tokens == cold.tokens


def test_a_full_store_refuses_and_generation_goes_on(client: FakeClient, engine: Engine) -> None:
    client.room = 2
    one = engine(client)
    ids = prompt(21, 60)
    result = run(one, ids)
    assert len(client.blocks) == 2 and one.counters["store_refused"] > 0
    assert result.tokens == run(engine(None), ids).tokens


def test_memory_that_may_not_be_written_is_filled_through_the_socket(client: FakeClient, engine: Engine) -> None:
    client.read_only = True
    ids = prompt(26, 60)
    cold = run(engine(client), ids)
    assert "put" in client.calls
    warm = run(engine(client), ids)
    assert warm.reuse.tokens == 56 and warm.tokens == cold.tokens


def test_a_daemon_that_stays_away_is_asked_less_and_less_often(client: FakeClient, engine: Engine) -> None:
    now = [0.0]
    one = engine(client, clock=lambda: now[0], backoff_s=1.0)
    client.fail = {"open": DaemonUnavailable("gone")}

    def asked(at: float) -> int:
        now[0] = at
        client.calls.clear()
        run(one, prompt(22, 20), new=1)
        return client.calls.count("open")

    assert [asked(t) for t in (0.0, 0.5, 1.5, 2.5, 3.6, 5.0, 7.7)] == [1, 0, 1, 0, 1, 0, 1]
    client.fail = {}
    assert asked(100.0) == 1 and one._failures == 0


def test_a_restarted_daemon_is_opened_again_and_its_empty_store_filled(client: FakeClient, engine: Engine) -> None:
    one = engine(client)
    ids = prompt(23, 60)
    run(one, ids)
    client.blocks.clear()
    client.fail = {"match": EpochEnded("old life")}
    assert run(one, ids).reuse.miss == "EpochEnded"
    client.fail = {}
    assert run(one, ids).reuse.tokens == 56  # stored again by the request that missed


# --- identity ------------------------------------------------------------------------------------------------------


def test_an_engine_with_other_weights_finds_nothing(client: FakeClient, engine: Engine) -> None:
    ids = prompt(24, 40)
    run(engine(client, qwen(seed=0)), ids)
    assert run(engine(client, qwen(seed=0)), ids).reuse.blocks == 4
    assert run(engine(client, qwen(seed=1)), ids).reuse.miss == "not_stored"


def test_a_salt_keeps_prefixes_apart(client: FakeClient, engine: Engine) -> None:
    ids = prompt(25, 40)
    run(engine(client, salt=b"one"), ids)
    assert run(engine(client, salt=b"two"), ids).reuse.miss == "not_stored"


@pytest.mark.parametrize("ids", [[], torch.zeros(2, 5, dtype=torch.long)])
def test_a_prompt_that_is_none_or_two_is_refused(ids: Any, engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"one sequence|prompt"):
        engine(None).generate(ids, 1)
