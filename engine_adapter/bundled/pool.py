"""The engine's block pool as bytes: each slot one object's payload, side by side in the order of its parts.

Covers what loads and stores need of a pool wherever it lies, and a pool in host memory; cuda.py has one on a GPU. Always true:
when `fill` returns, its copy has ended; whoever calls it has asked the load whether it may still write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import xxhash

from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.pages import address_of

_digest: Final = xxhash.xxh3_64_intdigest


@dataclass(frozen=True)
class Expected:
    """Checksums that a payload's parts must have."""

    layout: ObjectLayout
    checksums: Sequence[int]

    def hold(self, payload: memoryview) -> bool:
        ranges = self.layout.part_ranges
        return all(_digest(payload[a:b]) == sum_ for (a, b), sum_ in zip(ranges, self.checksums, strict=True))


class SlotMemory(Protocol):
    """Slots of a pool."""

    blocks: int
    block_bytes: int

    def fill(self, slot: int, payload: memoryview, expected: Expected | None) -> bool:
        """Copy a payload into a slot. False: it has other checksums than expected, and the slot's bytes are undefined."""
        ...

    def payloads(self, slots: Sequence[int]) -> list[memoryview]:
        """Bytes of these slots, to be read until the next call; one thread calls it."""
        ...


class HostPool:
    """A pool [blocks, head_groups, layers, 2, block_tokens, heads_per_group, head_dim] in host memory."""

    def __init__(self, pool: torch.Tensor, layout: ObjectLayout) -> None:
        """Raises: ValueError: a slot isn't a payload of this layout."""
        self.blocks, self.block_bytes = checked(pool, layout)
        self._bytes = pool.view(torch.uint8).reshape(-1).numpy().data

    def view(self, slot: int) -> memoryview:
        """A slot's bytes, writable."""
        if not 0 <= slot < self.blocks:
            raise ValueError(f"no slot {slot} in a pool of {self.blocks}")
        return self._bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def fill(self, slot: int, payload: memoryview, expected: Expected | None) -> bool:
        target = self.view(slot)
        ctypes.memmove(address_of(target), address_of(payload), self.block_bytes)  # without the GIL
        # What lies in the slot is checked, so that nothing can change between the check and the copy.
        return expected is None or expected.hold(target)

    def payloads(self, slots: Sequence[int]) -> list[memoryview]:
        return [self.view(slot) for slot in slots]


def checked(pool: torch.Tensor, layout: ObjectLayout) -> tuple[int, int]:
    """(blocks, bytes a block). Raises: ValueError: a slot isn't a payload of this layout."""
    if pool.dim() != 7 or not pool.is_contiguous():
        raise ValueError(f"a pool has seven dimensions and no gaps, not shape {list(pool.shape)}")
    block_bytes = pool[0].numel() * pool.element_size()
    if block_bytes != layout.payload_bytes or pool.shape[4] != layout.block_tokens:
        raise ValueError(
            f"a slot of {block_bytes} bytes and {pool.shape[4]} tokens is no block of "
            f"{layout.payload_bytes} bytes and {layout.block_tokens} tokens"
        )
    return pool.shape[0], block_bytes


def open_pool(pool: torch.Tensor, layout: ObjectLayout) -> SlotMemory:
    """The slots of a pool on its device. Raises: ValueError: they are no blocks of this layout."""
    if pool.device.type == "cpu":
        return HostPool(pool, layout)
    from forebay.engine_adapter.bundled.cuda import CudaPool

    return CudaPool(pool, layout)
