"""Tiny random models of every architecture, and the smallest driver that runs one: a forward pass in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forebay.engine.batch import Batch, CausalModel, Span
from forebay.engine.config import ModelConfig, RopeScaling
from forebay.engine.models import FLAGS
from forebay.engine.models.decoder import Decoder, tensor_shapes
from forebay.engine.ops.linear import PlainLinear


def tiny_config(architecture: str = "qwen2") -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        layers=2,
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab_size=128,
        context_tokens=1024,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192) if architecture == "llama" else None,
        tie_embeddings=architecture == "qwen3",
        eos_token_ids=(2,),
        **FLAGS[architecture],
    )


def random_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """float64; large enough for logits that lie apart and a greedy text that is no constant."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = 1.0 + 0.1 * drawn if "norm" in name else drawn * (0.1 if "bias" in name else 0.2)
    return weights


def tiny_model(architecture: str = "qwen2", seed: int = 0, dtype: torch.dtype = torch.float64) -> CausalModel:
    config = tiny_config(architecture)
    weights = random_weights(config, seed)
    return Decoder(config, lambda name: weights[name].to(dtype), PlainLinear, dtype)


UNWRITTEN = 1e4


def tiny_pool(config: ModelConfig, blocks: int, block_tokens: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """One head group a KV head. Filled with large numbers: what counts before it was written shows."""
    shape = (blocks, config.kv_heads, config.layers, 2, block_tokens, 1, config.head_dim)
    return torch.full(shape, UNWRITTEN, dtype=dtype)


def batch_of(
    pieces: Sequence[tuple[Sequence[int], int, Sequence[int]]], block_tokens: int, *, all_logits: bool = False
) -> Batch:
    """pieces: (token ids, position of the first, block table of the sequence). Logits of each piece's last token, or all."""
    ids, positions, slots, spans, last = [], [], [], [], []
    for tokens, start, table in pieces:
        where = range(start, start + len(tokens))
        used = -(-where.stop // block_tokens)
        spans.append(Span(len(ids), len(tokens), start, torch.tensor(table[:used])))
        ids += tokens
        positions += where
        slots += [table[i // block_tokens] * block_tokens + i % block_tokens for i in where]
        last.append(len(ids) - 1)
    rows = list(range(len(ids))) if all_logits else last
    return Batch(*(torch.tensor(values) for values in (ids, positions, slots)), spans, torch.tensor(rows))
