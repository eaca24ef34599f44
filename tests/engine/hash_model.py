"""A model without arithmetic: exact in every dtype that holds integers below 2^20, so any difference is the engine's.

Layer 0 of a token's K and V is a hash of the token; layer 1 is a hash of all that layer 0 of the pool says about this and
all earlier positions; logits are a hash of all that layer 1 says. So one wrong slot, one block that isn't there yet or is
somebody else's, and the answer changes. `expected` computes the same without any pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forebay.engine.batch import Batch, Span
from forebay.engine.config import ModelConfig

PRIME = 1048573  # below 2^20
VOCABULARY = 61
NAN_TOKEN = 59  # the model's K and V for it are NaN
FAILING_TOKEN = 60  # the forward pass raises for it
SAFE_TOKENS = 59


def hash_config(context_tokens: int = 4096, eos: tuple[int, ...] = ()) -> ModelConfig:
    return ModelConfig(
        architecture="qwen2",
        layers=2,
        hidden=8,
        intermediate=8,
        heads=2,
        kv_heads=2,
        head_dim=2,
        vocab_size=VOCABULARY,
        context_tokens=context_tokens,
        norm_eps=1e-6,
        rope_theta=1e4,
        eos_token_ids=eos,
    )


def _rolling(values: np.ndarray) -> np.ndarray:
    """h[i] = (31 h[i-1] + v[i] + 7) mod PRIME, for all i."""
    out = np.empty(len(values), np.int64)
    h = 1
    for i, value in enumerate(values.tolist()):
        h = (31 * h + value + 7) % PRIME
        out[i] = h
    return out


def _first_layer(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return (token_ids * 7919 + positions * 104729 + 13) % PRIME


def _logits(h: int, dtype: torch.dtype) -> torch.Tensor:
    ids = np.arange(VOCABULARY, dtype=np.int64)
    values = ((h + ids * 7001) * 48271 % PRIME * 31 % 1009) / 100.0
    values[SAFE_TOKENS:] = -5.0  # greedy and most draws stay among harmless tokens
    return torch.from_numpy(values).to(dtype)


class HashModel:
    def __init__(
        self,
        config: ModelConfig | None = None,
        kv_dtype: torch.dtype = torch.float64,
        logit_dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config = config or hash_config()
        self.kv_dtype = kv_dtype
        self.logit_dtype = logit_dtype
        self.passes = 0
        self.tokens = 0
        self.seen: list[tuple[int, ...]] = []  # counts of each pass's spans

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.tokens += len(batch.token_ids)
        self.seen.append(tuple(span.count for span in batch.spans))
        if (batch.token_ids == FAILING_TOKEN).any():
            raise RuntimeError("a failing token")
        block_tokens = pool.shape[4]
        wanted = set(batch.logit_rows.tolist())
        logits = {}
        covered = 0
        for span in batch.spans:
            assert span.first == covered
            covered += span.count
            for row, h in self._span(batch, span, pool, block_tokens).items():
                if row in wanted:
                    logits[row] = h
        assert covered == len(batch.token_ids)
        rows = [logits[row] for row in batch.logit_rows.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY, dtype=self.logit_dtype)

    def _span(self, batch: Batch, span: Span, pool: torch.Tensor, block_tokens: int) -> dict[int, torch.Tensor]:
        rows = slice(span.first, span.first + span.count)
        end = span.start + span.count
        positions = np.arange(span.start, end)
        assert batch.positions[rows].tolist() == positions.tolist()
        assert len(span.blocks) == -(-end // block_tokens)
        slots = span.blocks.numpy()[positions // block_tokens] * block_tokens + positions % block_tokens
        assert batch.slots[rows].tolist() == slots.tolist()
        token_ids = batch.token_ids[rows].numpy()
        self._write(pool, batch.slots[rows], 0, _first_layer(token_ids, positions), token_ids)
        below = _rolling(self._read(pool, span.blocks, 0, end))[span.start :]
        self._write(pool, batch.slots[rows], 1, below, token_ids)
        # Masked positions are read, too, with weight 0, as attention over whole pages does.
        pages = pool[span.blocks].to(torch.float64)
        poison = float((pages * 0.0).sum())
        top = _rolling(self._read(pool, span.blocks, 1, end))[span.start :]
        return {span.first + i: _logits(int(h), self.logit_dtype) + poison for i, h in enumerate(top)}

    def _write(
        self, pool: torch.Tensor, slots: torch.Tensor, layer: int, values: np.ndarray, token_ids: np.ndarray
    ) -> None:
        block_tokens = pool.shape[4]
        tensor = torch.from_numpy(values).to(torch.float64)
        tensor[torch.from_numpy(token_ids == NAN_TOKEN)] = float("nan")
        block, offset = slots // block_tokens, slots % block_tokens
        # Every head, k and v, and dimension gets a value of its own.
        for head in range(pool.shape[1]):
            for kv in range(2):
                for dim in range(pool.shape[6]):
                    pool[block, head, layer, kv, offset, 0, dim] = ((tensor + 3 * head + 5 * kv + dim) % PRIME).to(
                        pool.dtype
                    )

    def _read(self, pool: torch.Tensor, blocks: torch.Tensor, layer: int, end: int) -> np.ndarray:
        """The values at positions 0 .. end, of which all heads, k and v and dimensions must tell the same."""
        pages = pool[blocks, :, layer, :, :, 0, :].to(torch.float64)  # [blocks, head, 2, token, dim]
        flat = pages.permute(0, 3, 1, 2, 4).reshape(-1, pool.shape[1], 2, pool.shape[6])[:end]
        heads = torch.arange(pool.shape[1]).view(1, -1, 1, 1)
        kvs = torch.arange(2).view(1, 1, -1, 1)
        dims = torch.arange(pool.shape[6]).view(1, 1, 1, -1)
        values = (flat - 3 * heads - 5 * kvs - dims) % PRIME
        first = values[:, :1, :1, :1]
        # Where they disagree (memory of somebody else, torn copies), the answer depends on all of it.
        mixed = torch.where((values == first).all(dim=(1, 2, 3)), first[:, 0, 0, 0], values.sum(dim=(1, 2, 3)) + 1)
        return torch.nan_to_num(mixed, nan=0.0).to(torch.int64).numpy()


def expected_logits(token_ids: Sequence[int]) -> torch.Tensor:
    """Of the last token, from the token ids alone."""
    tokens = np.asarray(token_ids, np.int64)
    return _logits(int(_rolling(_rolling(_first_layer(tokens, np.arange(len(tokens)))))[-1]), torch.float64)


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(expected_logits(tokens).argmax()))
    return tokens[len(prompt) :]
