"""Every architecture against transformers, and in fp64 the same logits however tokens are cut into chunks and batches."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

from forebay.engine.batch import CausalModel
from forebay.engine.config import ModelConfig
from forebay.engine.models import FLAGS
from forebay.engine.models.decoder import Decoder, tensor_shapes
from forebay.engine.ops.linear import PlainLinear
from tests.engine.tiny import UNWRITTEN, batch_of, random_weights, tiny_config, tiny_model, tiny_pool

BLOCK = 8
ARCHITECTURES = sorted(FLAGS)


def reference(config: ModelConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """The same model in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds: dict[str, Any] = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    make_config, make_model = kinds[config.architecture]
    model = make_model(
        make_config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_tokens,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
        )
    )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return model.to(dtype).eval()


def random_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(tiny_config().vocab_size), k=count)


def run_in_pieces(model: CausalModel, ids: list[int], cuts: list[int], table: list[int], pool: torch.Tensor) -> Any:
    """Logits of all tokens, computed in chunks that end at `cuts`."""
    edges = [0, *cuts, len(ids)]
    parts = [
        model.forward(batch_of([(ids[a:b], a, table)], BLOCK, all_logits=True), pool)
        for a, b in itertools.pairwise(edges)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 1e-3)])
def test_logits_are_those_of_transformers(architecture: str, dtype: torch.dtype, tolerance: float) -> None:
    config = tiny_config(architecture)
    weights = random_weights(config, seed=1)
    ids = random_ids(1, 200)
    with torch.inference_mode():
        expected = reference(config, weights, dtype)(torch.tensor([ids])).logits[0]
    pool = tiny_pool(config, 32, BLOCK, dtype)
    found = run_in_pieces(tiny_model(architecture, 1, dtype), ids, [], list(range(31, 0, -1)), pool)
    assert found.dtype == dtype
    # In fp64, too, the reference takes norms and angles in fp32.
    assert (found - expected).abs().max() < tolerance


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_64_greedy_tokens_are_those_of_transformers(architecture: str) -> None:
    config = tiny_config(architecture)
    model, pool = tiny_model(architecture, 2, torch.float32), tiny_pool(config, 16, BLOCK, torch.float32)
    ids, table = random_ids(2, 30), random.Random(2).sample(range(16), 16)
    hf = reference(config, random_weights(config, 2), torch.float32)
    expected = hf.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = list(ids)
    fresh = ids
    for _ in range(64):
        logits = model.forward(batch_of([(fresh, len(found) - len(fresh), table)], BLOCK), pool)
        fresh = [int(logits[0].argmax())]
        found += fresh
    assert found == expected[0].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("seed", range(6))
def test_chunks_and_batches_change_nothing_in_fp64(architecture: str, seed: int) -> None:
    """Sequences of different lengths, cut at random, their pieces run together, in a pool with scattered blocks."""
    rng = random.Random(seed)
    config = tiny_config(architecture)
    model, pool = tiny_model(architecture, seed), tiny_pool(config, 64, BLOCK)
    free = rng.sample(range(64), 64)
    sequences = [random_ids(100 * seed + i, rng.randint(1, 90)) for i in range(5)]
    tables = [[free.pop() for _ in range(-(-len(ids) // BLOCK))] for ids in sequences]
    alone = [run_in_pieces(model, ids, [], list(range(16)), tiny_pool(config, 16, BLOCK)) for ids in sequences]
    done, found = [0] * 5, [list[torch.Tensor]() for _ in sequences]
    while any(done[i] < len(ids) for i, ids in enumerate(sequences)):
        waiting = [i for i, ids in enumerate(sequences) if done[i] < len(ids)]
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        pieces = []
        for i in chosen:
            count = min(rng.choice([1, 1, 2, 5, 17, 40]), len(sequences[i]) - done[i])
            pieces.append((sequences[i][done[i] : done[i] + count], done[i], tables[i]))
            done[i] += count
        logits = model.forward(batch_of(pieces, BLOCK, all_logits=True), pool)
        for i, part in zip(chosen, logits.split([len(ids) for ids, _, _ in pieces]), strict=True):
            found[i].append(part)
    for i, parts in enumerate(found):
        assert torch.allclose(torch.cat(parts), alone[i], rtol=0, atol=1e-9), f"seed {seed}, sequence {i}"


@pytest.mark.parametrize("heads_per_group", [1, 2])
def test_head_groups_of_the_pool_change_nothing(heads_per_group: int) -> None:
    config, ids = tiny_config(), random_ids(3, 50)
    model = tiny_model()
    groups = config.kv_heads // heads_per_group
    shape = (8, groups, config.layers, 2, BLOCK, heads_per_group, config.head_dim)
    pool = torch.full(shape, UNWRITTEN, dtype=torch.float64)
    found = run_in_pieces(model, ids, [13, 14, 15, 33], list(range(8)), pool)
    expected = run_in_pieces(model, ids, [], list(range(8)), tiny_pool(config, 8, BLOCK))
    assert torch.allclose(found, expected, rtol=0, atol=1e-9)


def test_only_the_rows_asked_for_get_logits_and_none_is_fine() -> None:
    model, pool = tiny_model(), tiny_pool(tiny_config(), 8, BLOCK)
    batch = batch_of([(random_ids(4, 20), 0, [3, 1, 2])], BLOCK, all_logits=True)
    everything = model.forward(batch, pool)
    some = model.forward(dataclasses.replace(batch, logit_rows=torch.tensor([19, 0])), pool)
    assert torch.allclose(some, everything[[19, 0]], rtol=0, atol=1e-9)
    none = model.forward(dataclasses.replace(batch, logit_rows=torch.tensor([], dtype=torch.int64)), pool)
    assert none.shape == (0, tiny_config().vocab_size)


def test_only_the_slots_of_the_batch_are_written() -> None:
    config = tiny_config()
    model, pool = tiny_model(), tiny_pool(config, 4, BLOCK)
    model.forward(batch_of([(random_ids(5, 11), 0, [2, 0])], BLOCK), pool)
    written = pool != UNWRITTEN
    assert written[2].all() and written[0, :, :, :, :3].all()
    assert not written[0, :, :, :, 3:].any() and not written[[1, 3]].any()


def test_a_tied_output_layer_has_no_tensor_of_its_own() -> None:
    config = tiny_config("qwen3")
    assert config.tie_embeddings and "lm_head.weight" not in tensor_shapes(config)
    weights = random_weights(config, 0)
    free = dataclasses.replace(config, tie_embeddings=False)
    untied = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    ids = random_ids(6, 9)
    models = [Decoder(c, w.__getitem__, PlainLinear, torch.float64) for c, w in ((config, weights), (free, untied))]
    tied_logits, free_logits = (run_in_pieces(m, ids, [], [0, 1], tiny_pool(config, 2, BLOCK)) for m in models)
    assert torch.equal(tied_logits, free_logits)
