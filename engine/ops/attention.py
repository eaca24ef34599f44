"""Attention of a batch's spans over the pages of the block pool, and the writing of their K and V into it.

Covers one `Paged` a forward pass: indices are made once and serve all layers. Always true: a page is read and written as
the contiguous slice it is in the pool, nothing is done token by token; one token, a few and a long chunk take the same path.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from forebay.engine.batch import Batch, Span
from forebay.engine.config import ModelConfig

# Tokens whose scores are held at once: [M] at 2,048 keys 64 and 128 are level, and 3 times as fast as torch's fused attention
# on a CPU with bf16 products; with 256 the scores leave the caches.
_ROWS = 64
# Products are made in multiples of these: oneDNN keeps a kernel and its buffers for every shape that it has met. [M] 1,500
# products of any shape take 0.9 GB.
_ROW_STEP, _SEEN_STEP = 16, 64


class Paged:
    """pool: as in batch.py; its head groups and heads multiply to the model's KV heads."""

    def __init__(self, config: ModelConfig, batch: Batch, pool: torch.Tensor) -> None:
        blocks, groups, layers, _, size, heads, dim = pool.shape
        self._groups, self._heads, self._dim, self._size = groups, heads, dim, size
        self.rows = len(batch.slots)
        self._share = config.heads // config.kv_heads  # query heads that read one KV head
        self._scale = dim**-0.5
        # Rows for index_select: a page is K or V of one block, layer and head group. A layer's pages lie 2 rows after
        # those of the layer before, so indices of layer 0 serve every layer on a view that starts later.
        self._pages = pool.view(blocks * groups * layers * 2, size * heads * dim)
        self._rows = pool.view(-1, heads * dim)
        group = torch.arange(groups, device=pool.device)
        block, offset = batch.slots // size, batch.slots % size
        kind = torch.arange(2, device=pool.device)[:, None, None]
        first_page = (block[:, None] * groups + group) * (2 * layers)
        self._slots = ((first_page + kind) * size + offset[:, None]).flatten()  # [2, tokens, groups]
        self._spans = [(span, self._span_pages(span, groups, layers)) for span in batch.spans]
        # Within the rows computed together, a token doesn't see later ones.
        longest = min(_ROWS, max((span.count for span in batch.spans), default=0))
        later = torch.ones(longest, longest, dtype=torch.bool, device=pool.device).triu(1)
        self._later = torch.zeros(longest, 1, longest, dtype=pool.dtype, device=pool.device)
        self._later.masked_fill_(later[:, None], float("-inf"))

    def _span_pages(self, span: Span, groups: int, layers: int) -> torch.Tensor:
        group = torch.arange(groups, device=span.blocks.device)[:, None]
        pages = (span.blocks * groups + group) * (2 * layers)  # [groups, blocks]
        return torch.stack((pages, pages + 1)).flatten()

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """kv: [tokens, 2 * kv_heads, head_dim], keys first."""
        rows = kv.view(-1, 2, self._groups, self._heads * self._dim).transpose(0, 1)
        self._rows[layer * 2 * self._size :].index_copy_(0, self._slots, rows.reshape(-1, self._heads * self._dim))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [tokens, heads, head_dim], of which head h reads KV head h // share. Returns [tokens, heads * head_dim]."""
        tokens = q.shape[0]
        q = functional.pad(q * self._scale, (0, 0, 0, 0, 0, _ROW_STEP)).view(
            tokens + _ROW_STEP, -1, self._share, self._dim
        )
        q = q.transpose(0, 1)
        out = torch.empty((tokens, q.shape[0], self._share, self._dim), dtype=q.dtype, device=q.device)
        for span, pages in self._spans:
            kv = self._pages[2 * layer :].index_select(0, pages)
            kv = kv.view(2, self._groups, -1, self._heads, self._dim).transpose(2, 3).flatten(1, 2)
            k, v = kv[0].transpose(1, 2), kv[1]
            for first in range(0, span.count, _ROWS):
                count = min(_ROWS, span.count - first)
                row, seen = span.first + first, span.start + first + count
                # Rows and columns beyond are other tokens' or nobody's, all finite: nobody looks at the ones, and the
                # others weigh nothing.
                computed = 1 if count == 1 else _up(count, _ROW_STEP)
                width = min(_up(seen, _SEEN_STEP), k.shape[2])
                scores = torch.bmm(q[:, row : row + computed].reshape(len(k), -1, self._dim), k[:, :, :width])
                if width > seen:
                    scores[..., seen:] = float("-inf")
                if count > 1:
                    own = scores.view(len(k), computed, self._share, width)[:, :count, :, seen - count : seen]
                    own.add_(self._later[:count, :, :count])
                found = torch.bmm(scores.softmax(-1), v[:, :width]).view(len(k), computed, self._share, self._dim)
                out[row : row + count] = found[:, :count].transpose(0, 1)
        return out.view(tokens, -1)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
