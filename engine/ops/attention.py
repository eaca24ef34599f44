"""Attention of a batch's spans over the pages of the block pool, and the writing of its K and V into them.

Covers one `Paged` a forward pass: indices are made once and serve all layers. Always true: a page is read and written as
the contiguous slice it is in the pool, so nothing is done token by token; one token and a few take the same path.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from forebay.engine.batch import Batch, Span
from forebay.engine.config import ModelConfig


class Paged:
    """pool: as in batch.py; its head groups and heads multiply to the model's KV heads."""

    def __init__(self, config: ModelConfig, batch: Batch, pool: torch.Tensor) -> None:
        blocks, groups, layers, _, size, heads, dim = pool.shape
        self._groups, self._heads, self._dim = groups, heads, dim
        self._share = config.heads // config.kv_heads  # query heads that read one KV head
        # Rows for index_select: a page is K or V of one block, layer and head group. A layer's pages lie 2 rows after
        # those of the layer before, so indices of layer 0 serve every layer on a view that starts later.
        self._pages = pool.view(blocks * groups * layers * 2, size * heads * dim)
        self._rows = pool.view(-1, heads * dim)
        self._size = size
        group = torch.arange(groups, device=pool.device)
        block, offset = batch.slots // size, batch.slots % size
        kind = torch.arange(2, device=pool.device)[:, None, None]
        first_page = (block[:, None] * groups + group) * (2 * layers)
        self._slots = ((first_page + kind) * size + offset[:, None]).flatten()  # [2, tokens, groups]
        self._spans = [(span, self._span_pages(span, groups, layers), _mask(span, pool.dtype)) for span in batch.spans]

    def _span_pages(self, span: Span, groups: int, layers: int) -> torch.Tensor:
        group = torch.arange(groups, device=span.blocks.device)[:, None]
        pages = (span.blocks * groups + group) * (2 * layers)  # [groups, blocks]
        return torch.stack((pages, pages + 1)).flatten()

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """kv: [tokens, 2 * kv_heads, head_dim], keys first."""
        tokens = kv.shape[0]
        rows = kv.view(tokens, 2, self._groups, self._heads * self._dim).transpose(0, 1)
        start = layer * 2 * self._size
        self._rows[start:].index_copy_(0, self._slots, rows.reshape(-1, self._heads * self._dim).to(self._rows.dtype))

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q: [tokens, heads, head_dim], of which head h reads KV head h // share. Returns [tokens, heads * head_dim]."""
        out = torch.empty_like(q)
        for span, pages, mask in self._spans:
            kv = self._pages[2 * layer :].index_select(0, pages)
            kv = kv.view(2, self._groups, -1, self._heads, self._dim)[:, :, : span.start + span.count]
            k, v = (half.transpose(1, 2).flatten(0, 1)[:, None] for half in kv.to(q.dtype))
            rows = slice(span.first, span.first + span.count)
            queries = q[rows].view(span.count, k.shape[0], self._share, self._dim).permute(1, 2, 0, 3)
            found = functional.scaled_dot_product_attention(
                queries,
                k.expand(-1, self._share, -1, -1),
                v.expand(-1, self._share, -1, -1),
                attn_mask=mask,
                is_causal=mask is None and span.count > 1,
            )
            out[rows].view(span.count, k.shape[0], self._share, self._dim).copy_(found.permute(2, 0, 1, 3))
        return out.flatten(1)


def _mask(span: Span, dtype: torch.dtype) -> torch.Tensor | None:
    """Additive, [count, start + count]; None where a plain causal mask (or none, for one token) says the same."""
    if span.count == 1 or span.start == 0:
        return None
    visible = torch.ones(span.count, span.start + span.count, dtype=torch.bool, device=span.blocks.device)
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible.tril(span.start), float("-inf"))
