"""Which models are accepted, and that every fact about one gives another namespace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from forebay.engine_adapter.hf_cache import KVShape
from forebay.engine_adapter.hf_identity import UnsupportedCache, examine, namespace_facts, weights_digest
from tests.engine_adapter.models import SIZES, llama, qwen


def test_plain_attention_models_are_accepted_with_their_geometry() -> None:
    assert examine(qwen())[1] == KVShape(3, 2, 8, torch.float32)
    assert examine(llama(torch.bfloat16))[1] == KVShape(3, 2, 8, torch.bfloat16)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=97, bos_token_id=1, eos_token_id=2)
    ).eval()
    assert examine(gpt2)[1] == KVShape(2, 2, 8, torch.float32)


def test_a_sliding_window_is_refused_and_named() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": 16})).eval()
    with pytest.raises(UnsupportedCache, match="layer 0 caches a DynamicSlidingWindowLayer"):
        examine(model)


def test_alternating_window_layers_are_refused() -> None:
    layers = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(UnsupportedCache, match="layer 1 caches a DynamicSlidingWindowLayer"):
        examine(qwen(use_sliding_window=True, sliding_window=16, layer_types=layers))


def test_a_state_space_model_is_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    with pytest.raises(UnsupportedCache):
        examine(model)


def test_an_encoder_decoder_is_refused() -> None:
    model = T5ForConditionalGeneration(T5Config(vocab_size=97, d_model=16, d_ff=16, num_layers=1, num_heads=2)).eval()
    with pytest.raises(UnsupportedCache, match="encoder-decoder"):
        examine(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_prompts_length_is_refused(kind: str) -> None:
    model = qwen()
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedCache, match=kind):
        examine(model)


def test_keys_and_values_of_different_widths_are_refused() -> None:
    model = qwen()
    original = model.model.layers[0].self_attn

    class Narrow(torch.nn.Module):
        def forward(self, *args: Any, cache: Any, **kwargs: Any) -> Any:
            wide = torch.zeros(1, 2, args[0].shape[1] if args else kwargs["hidden_states"].shape[1], 8)
            cache.update(wide, wide[..., :4], 0)
            return torch.zeros_like(kwargs["hidden_states"]), None

    model.model.layers[0].self_attn = Narrow()
    with pytest.raises(UnsupportedCache, match="one shape"):
        examine(model)
    model.model.layers[0].self_attn = original


class RunningMean(torch.nn.Module):
    """Attends plainly, but also carries a state from call to call that no cache holds."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = self.inner(*args, **kwargs)
        self.calls += 1.0
        return out + 5 * self.calls, weights


def test_state_outside_the_cache_is_noticed() -> None:
    model = qwen()
    model.model.layers[1].self_attn = RunningMean(model.model.layers[1].self_attn)
    with pytest.raises(UnsupportedCache, match="state outside its KV cache"):
        examine(model)


def test_a_cache_of_another_class_is_refused() -> None:
    class Odd(DynamicCache): ...  # type: ignore[misc]

    model = qwen()
    forward = model.forward

    def with_odd_cache(input_ids: Any, cache: Any = None, use_cache: bool = True, **rest: Any) -> Any:
        return forward(input_ids=input_ids, cache=cache if cache is not None else Odd(), use_cache=True, **rest)

    model.forward = with_odd_cache
    with pytest.raises(UnsupportedCache, match="Odd"):
        examine(model)


def test_training_mode_is_refused() -> None:
    with pytest.raises(UnsupportedCache, match="eval"):
        examine(qwen().train())


def facts(model: Any, **options: Any) -> bytes:
    return namespace_facts(model, examine(model)[1], **options).encode()


def test_equal_models_agree_on_the_namespace_whatever_they_are_called() -> None:
    other = qwen()
    other.config._name_or_path = "another/name"
    assert facts(qwen()) == facts(other)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"dtype": torch.bfloat16},
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"hidden_act": "gelu"},
    ],
    ids=lambda c: next(iter(c)),
)
def test_a_change_of_any_fact_of_the_model_changes_the_namespace(change: dict[str, Any]) -> None:
    assert facts(qwen()) != facts(qwen(**change))


def test_the_attention_backend_the_matmul_precision_and_the_options_are_identity() -> None:
    base = qwen()
    eager = qwen()
    eager.set_attn_implementation("eager")
    seen = [facts(base), facts(eager), facts(base, salt=b"x"), facts(base, block_tokens=16), facts(base, producer="p")]
    torch.set_float32_matmul_precision("medium")
    try:
        seen.append(facts(base))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(set(seen)) == len(seen)


def test_one_changed_weight_changes_the_digest_and_a_given_digest_replaces_it() -> None:
    model = qwen()
    before, named = weights_digest(model), facts(model, model_digest=b"v1")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 4] += 1
    assert weights_digest(model) != before
    assert facts(model, model_digest=b"v1") == named


def test_an_architecture_is_identity_even_under_a_given_digest() -> None:
    assert facts(qwen(), model_digest=b"v1") != facts(qwen(rms_norm_eps=1e-3), model_digest=b"v1")
