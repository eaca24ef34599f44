"""The engine's block pool as bytes: each slot one object's payload, side by side in the order of its parts.

Covers a pool in host memory. Always true: views go straight into the pool, so whoever writes one has asked its Load first.
"""

from __future__ import annotations

import ctypes

import torch

from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.pages import address_of
from forebay.kvstore.tier import Buffer


class PoolBytes:
    """A pool [blocks, head_groups, layers, 2, block_tokens, heads_per_group, head_dim]."""

    def __init__(self, pool: torch.Tensor, layout: ObjectLayout) -> None:
        """Raises: ValueError: a slot isn't a payload of this layout."""
        if pool.dim() != 7 or not pool.is_contiguous():
            raise ValueError(f"a pool has seven dimensions and no gaps, not shape {list(pool.shape)}")
        if pool.device.type != "cpu":
            raise ValueError(f"a pool on {pool.device} can't be reached by host copies")
        self.block_bytes = pool[0].numel() * pool.element_size()
        if self.block_bytes != layout.payload_bytes or pool.shape[4] != layout.block_tokens:
            raise ValueError(
                f"a slot of {self.block_bytes} bytes and {pool.shape[4]} tokens is no block of "
                f"{layout.payload_bytes} bytes and {layout.block_tokens} tokens"
            )
        self.blocks = pool.shape[0]
        self._bytes = pool.view(torch.uint8).reshape(-1).numpy().data

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, writable."""
        if not 0 <= slot < self.blocks:
            raise ValueError(f"no slot {slot} in a pool of {self.blocks}")
        return self._bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def fill(self, slot: int, payload: Buffer) -> None:
        """Copy a payload into a slot, without the GIL."""
        ctypes.memmove(address_of(self.view(slot)), address_of(payload), self.block_bytes)
