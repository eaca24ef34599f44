"""The KV of one sequence in one buffer, seen as a transformers cache and as Forebay blocks at the same time.

Covers the copies between blocks and cache: one strided copy a block, no packing in between. Always true: only the first
`length` tokens are ever read, so what an earlier sequence left behind is never seen.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# torch warns, once a process, that it can't protect read-only buffers. We only read them, so spend that warning here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(8), dtype=torch.uint8)


@dataclass(frozen=True)
class KVShape:
    """Geometry of plain attention KV: what one token leaves behind in each layer."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.dim * self.dtype.itemsize


class _Layer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A layer that writes into room it was given instead of concatenating: no copy of the whole cache a token."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """keys, values: [1, heads, capacity, dim], the first `length` tokens filled."""
        super().__init__()
        self._rooms = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        keys, values = self._rooms
        if end > keys.shape[-2]:
            raise ValueError(f"the KV buffer has room for {keys.shape[-2]} tokens, not {end}")
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values


class KVBuffer:
    """KV of up to `capacity` tokens: data[layers, 2, heads, capacity, dim]; 0 is keys, 1 is values."""

    def __init__(self, shape: KVShape, capacity: int, device: torch.device | str) -> None:
        self.shape, self.capacity = shape, capacity
        self.data = torch.empty(shape.layers, 2, shape.heads, capacity, shape.dim, dtype=shape.dtype, device=device)
        self.length = 0

    def cache(self) -> Any:
        """A transformers cache over this buffer that already holds its first `length` tokens and appends in place."""
        cache = DynamicCache()
        cache.layers = [_Layer(layer[0][None], layer[1][None], self.length) for layer in self.data]
        return cache

    def write_block(self, index: int, payload: memoryview, block_tokens: int) -> None:
        """Copy a block's payload ([heads][layers][2][block_tokens][dim]) to its place. Doesn't change `length`."""
        self._place(index, block_tokens).copy_(self._payload(payload, block_tokens))

    def read_block(self, index: int, payload: memoryview, block_tokens: int) -> None:
        """Copy a block's tokens out into `payload`, writable, of the same layout."""
        self._payload(payload, block_tokens).copy_(self._place(index, block_tokens))

    def _place(self, index: int, block_tokens: int) -> torch.Tensor:
        return self.data[:, :, :, index * block_tokens : (index + 1) * block_tokens]

    def _payload(self, payload: memoryview, block_tokens: int) -> torch.Tensor:
        """`payload` as a tensor in this buffer's order of dimensions. Its memory is the caller's: keep no reference."""
        shape = self.shape
        flat = torch.frombuffer(payload, dtype=shape.dtype)
        return flat.view(shape.heads, shape.layers, 2, block_tokens, shape.dim).permute(1, 2, 0, 3, 4)
