"""One forward pass: the batch that a plan makes, run once; or, if it fails, each sequence of it alone, to find whose it is."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from forebay.engine.batch import Batch, CausalModel, Span
from forebay.engine.errors import StepFailed
from forebay.engine.pool import BlockPool
from forebay.engine.scheduler import Chunk
from forebay.engine.sequence import SequenceState

_log = logging.getLogger(__name__)


def build_batch(chunks: Sequence[Chunk], block_tokens: int, device: str) -> Batch:
    """Rows in the order of `chunks`; logits are wanted of the last row of each chunk that ends its sequence."""
    total = sum(chunk.count for chunk in chunks)
    token_ids, positions, slots = np.empty((3, total), np.int64)
    spans, wanted, row = [], [], 0
    for chunk in chunks:
        seq, start, count = chunk.seq, chunk.start, chunk.count
        end = start + count
        if count == 1:
            index, offset = divmod(start, block_tokens)
            token_ids[row], positions[row], slots[row] = (
                seq.tokens[start],
                start,
                seq.blocks[index] * block_tokens + offset,
            )
        else:
            token_ids[row : row + count] = seq.tokens[start:end]
            positions[row : row + count] = np.arange(start, end)
            slots[row : row + count] = seq.slots(start, count, block_tokens)
        table = seq.table(-(-end // block_tokens))
        spans.append(Span(row, count, start, table if device == "cpu" else table.to(device)))
        row += count
        if chunk.last:
            wanted.append(row - 1)
    tensors = (torch.from_numpy(array) for array in (token_ids, positions, slots, np.array(wanted, np.int64)))
    on_device = [tensor if device == "cpu" else tensor.to(device) for tensor in tensors]
    return Batch(on_device[0], on_device[1], on_device[2], spans, on_device[3])


class Forward:
    def __init__(self, model: CausalModel, pool: BlockPool, device: str) -> None:
        self._model = model
        self._pool = pool
        self._device = device

    def run(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], torch.Tensor, dict[SequenceState, StepFailed]]:
        """What was computed, the logits [rows, vocabulary] of those of it that end their sequence, and what failed."""
        try:
            return list(chunks), self._once(chunks), {}
        except Exception as exc:
            if len(chunks) == 1:
                return [], torch.empty(0, 0), {chunks[0].seq: _failed(exc)}
        done, logits, failed = [], [], {}
        for chunk in chunks:  # computing the same tokens again writes the same slots
            try:
                logits.append(self._once([chunk]))
                done.append(chunk)
            except Exception as exc:
                failed[chunk.seq] = _failed(exc)
        return done, torch.cat(logits) if logits else torch.empty(0, 0), failed

    def _once(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        logits = self._model.forward(build_batch(chunks, self._pool.block_tokens, self._device), self._pool.tensor)
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)  # so that failures and times are this pass's own
        return logits


def _failed(exc: Exception) -> StepFailed:
    _log.error("a forward pass failed", exc_info=exc)
    failed = StepFailed(f"the forward pass failed: {type(exc).__name__}")
    failed.__cause__ = exc
    return failed
