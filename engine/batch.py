"""What one forward pass computes, and what a model is to the engine.

Layout of the block pool, everywhere: [blocks, head_groups, layers, 2, block_tokens, heads_per_group, head_dim], 0 is k and 1
is v; so a block, and each head group of it, is one contiguous slice: the object that goes to the store, nothing is packed.
What of a block isn't written yet is finite: attention may multiply it with 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from forebay.engine.config import ModelConfig


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence in a batch: `count` adjoining ones, at rows first .. first + count of the batch.

    start: position of the first in its sequence, so they attend to positions 0 .. start + their own index. blocks: int64,
    [ceil((start + count) / block_tokens)], indices into the pool. All K and V before `start` are in the pool already.
    """

    first: int
    count: int
    start: int
    blocks: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """One forward pass. `logit_rows`: rows of the batch whose logits are wanted, any number of them.

    token_ids, positions, slots: [tokens] int64; slot = block_index * block_tokens + offset, where the token's K and V go.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    spans: list[Span]
    logit_rows: torch.Tensor


class CausalModel(Protocol):
    """A model with its weights. One thread calls it."""

    config: ModelConfig
    kv_dtype: torch.dtype

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        """Compute the batch: write its K and V into the pool and return logits [len(logit_rows), vocab_size], float32 (float64
        for a model run in it)."""
        ...
