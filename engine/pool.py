"""The engine's KV memory: one tensor of blocks, who uses each of them, and the prefixes it still holds.

A block is *free* (no content), *used* (sequences have references), *held* (only a store still reads it) or *cached* (full,
found by its prefix key, nobody's). Computing and loading are the business of others; here is only who may touch what. A
key can be *claimed* before its block is full: who needs the same one waits for the claimant instead of doing it twice.
Always true: free + cached + used + held = all blocks, a block under a key never changes, free blocks are finite, and what is
evicted is the block used longest ago among those that no block here continues.
"""

from __future__ import annotations

import heapq
import mmap
from collections.abc import Iterable

import torch

from forebay.engine.config import ModelConfig
from forebay.engine.errors import InvariantViolation
from forebay.engine.stats import BlockCounts


def block_shape(config: ModelConfig, block_tokens: int, heads_per_group: int = 1) -> tuple[int, ...]:
    """[head_groups, layers, 2, block_tokens, heads_per_group, head_dim]: what one block is, see batch.py."""
    groups, rest = divmod(config.kv_heads, heads_per_group)
    if rest:
        raise ValueError(f"{config.kv_heads} KV heads don't make groups of {heads_per_group}")
    return (groups, config.layers, 2, block_tokens, heads_per_group, config.head_dim)


def pool_tensor(
    config: ModelConfig,
    blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: str = "cpu",
    heads_per_group: int = 1,
) -> torch.Tensor:
    """Zeroed memory for a pool, page-aligned on the CPU. It takes real memory only as blocks are first written."""
    shape = (blocks, *block_shape(config, block_tokens, heads_per_group))
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, torch.Size(shape).numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class BlockPool:
    """Host-side records of the blocks of `tensor`. One thread."""

    def __init__(self, tensor: torch.Tensor, block_tokens: int) -> None:
        self.tensor = tensor
        self.block_tokens = block_tokens
        self.total = tensor.shape[0]
        self.evicted = 0
        self._free = list(range(self.total - 1, -1, -1))
        self._refs = [0] * self.total
        self._holds = [0] * self.total
        self._keys: list[bytes | None] = [None] * self.total
        self._parents: list[bytes | None] = [None] * self.total
        self._stamps = [0] * self.total
        self._clock = 0
        self._idle = 0  # blocks under a key that nobody uses or holds
        self._only_held = 0
        self._by_key: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}  # key -> blocks here that continue it
        self._leaves: list[
            tuple[int, int]
        ] = []  # heap of (stamp, block); an entry that is no idle leaf any more is stale
        self._claims: dict[bytes, object] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._free) + self._idle

    def allocate(self) -> int | None:
        """A block with one reference and finite content, evicting if need be; None when all are used or held."""
        if not self._free:
            victim = self._oldest_leaf()
            if victim is None:
                return None
            self._forget(victim)
            self.evicted += 1
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def find(self, key: bytes) -> int | None:
        """The block under this key."""
        return self._by_key.get(key)

    def is_idle(self, block: int) -> bool:
        return self._refs[block] == 0 and self._holds[block] == 0 and self._keys[block] is not None

    def take(self, block: int) -> None:
        """One more reference."""
        if self.is_idle(block):
            self._idle -= 1
        elif not self._refs[block]:
            self._only_held -= 1
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less on each. What was released together has the same age."""
        self._clock += 1
        for block in blocks:
            if self._refs[block] <= 0:
                raise InvariantViolation(f"block {block} has no reference to release")
            self._refs[block] -= 1
            self._stamps[block] = self._clock
            if not self._refs[block] and self._holds[block]:
                self._only_held += 1
            self._settle(block)

    def hold(self, block: int) -> None:
        """A store reads it from now on."""
        if self.is_idle(block):
            self._idle -= 1
            self._only_held += 1
        self._holds[block] += 1

    def unhold(self, block: int) -> None:
        if self._holds[block] <= 0:
            raise InvariantViolation(f"block {block} is not held")
        self._holds[block] -= 1
        if not self._holds[block] and not self._refs[block]:
            self._only_held -= 1
        self._settle(block)

    def register(self, block: int, key: bytes, parent: bytes | None) -> bool:
        """The used block is full and verified: find it under `key` from now on. False if another one is there already."""
        if self._refs[block] <= 0 or self._keys[block] is not None:
            raise InvariantViolation(f"block {block} can't be registered")
        if key in self._by_key:
            return False
        self._by_key[key] = block
        self._keys[block] = key
        self._parents[block] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        return True

    def claim(self, key: bytes, owner: object) -> None:
        """`owner` is going to fill a block for this key."""
        if key in self._claims or key in self._by_key:
            raise InvariantViolation("a key is claimed twice")
        self._claims[key] = owner

    def claimant(self, key: bytes) -> object | None:
        return self._claims.get(key)

    def unclaim(self, key: bytes, owner: object) -> None:
        """Give the claim up, if it is this owner's: the block is there, or won't come."""
        if self._claims.get(key) is owner:
            del self._claims[key]

    def scrub(self, block: int) -> None:
        """Zero a block that nobody else sees."""
        self.tensor[block].zero_()

    def is_finite(self, block: int) -> bool:
        """Whether all values of the block are: a NaN or an infinity anywhere stays one in the sum."""
        # Summed in their own type, [M] 25 us for 0.8 MB of bf16; half floats alone would overflow.
        wide = torch.float32 if self.tensor.dtype is torch.float16 else None
        return bool(torch.isfinite(self.tensor[block].sum(dtype=wide)))

    def forget(self, key: bytes) -> bool:
        """Find nothing under this key any more; the block is free once nobody uses it. False if nothing was there."""
        block = self._by_key.get(key)
        if block is None:
            return False
        if self.is_idle(block):
            self._forget(block)
        else:
            self._unfile(block)
        return True

    def clear_cache(self) -> int:
        """Forget all blocks that nobody uses or holds; how many."""
        idle = [block for block in range(self.total) if self.is_idle(block)]
        for block in idle:
            self._forget(block)
        return len(idle)

    def counts(self) -> BlockCounts:
        used = self.total - len(self._free) - self._idle - self._only_held
        return BlockCounts(self.total, len(self._free), self._idle, used, self._only_held)

    def check(self) -> None:
        """Compute all accounts again from the blocks. Raises: InvariantViolation."""
        free = set(self._free)
        children: dict[bytes, int] = {}
        for block in range(self.total):
            key, parent = self._keys[block], self._parents[block]
            touched = self._refs[block] > 0 or self._holds[block] > 0
            if block in free and (touched or key is not None):
                raise InvariantViolation(f"block {block} is free and in use")
            if block not in free and not touched and key is None:
                raise InvariantViolation(f"block {block} is lost")
            if key is not None and self._by_key.get(key) != block:
                raise InvariantViolation(f"block {block} is not found under its key")
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        if len(free) != len(self._free) or children != self._children:
            raise InvariantViolation("the free list or the children disagree with the blocks")
        if len(self._by_key) != sum(key is not None for key in self._keys):
            raise InvariantViolation("a key leads to no block")
        if self._idle != sum(self.is_idle(block) for block in range(self.total)):
            raise InvariantViolation("the number of cached blocks is wrong")
        if self._only_held != sum(h > 0 and r == 0 for h, r in zip(self._holds, self._refs, strict=True)):
            raise InvariantViolation("the number of held blocks is wrong")

    def check_idle(self) -> None:
        """Nothing runs: free + cached = all blocks, and nothing is claimed. Raises: InvariantViolation."""
        self.check()
        if len(self._free) + self._idle != self.total or self._claims:
            raise InvariantViolation(
                f"{self.total - len(self._free) - self._idle} blocks and {len(self._claims)} claims did not come back"
            )

    def _settle(self, block: int) -> None:
        """After a reference or hold went: is the block anybody's?"""
        if self._refs[block] or self._holds[block]:
            return
        key = self._keys[block]
        if key is None:
            # Attention reads the unwritten rest of a block, too, and weighs it with 0; but 0 * NaN is NaN, and what
            # nobody verified may hold one.
            self.scrub(block)
            self._free.append(block)
            return
        self._idle += 1
        if key not in self._children:
            self._push(block)

    def _push(self, block: int) -> None:
        if len(self._leaves) > 4 * self.total:  # mostly stale entries of blocks used again and again
            self._leaves = [entry for entry in set(self._leaves) if self._is_leaf(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (self._stamps[block], block))

    def _is_leaf(self, stamp: int, block: int) -> bool:
        return self._stamps[block] == stamp and self.is_idle(block) and self._keys[block] not in self._children

    def _oldest_leaf(self) -> int | None:
        while self._leaves:
            stamp, block = heapq.heappop(self._leaves)
            if self._is_leaf(stamp, block):
                return block
        # What is left is continued by blocks in use, whose sequences have a block of their own for the same tokens.
        return min(filter(self.is_idle, range(self.total)), key=lambda b: self._stamps[b], default=None)

    def _forget(self, block: int) -> None:
        """From cached to free."""
        self._unfile(block)
        self._idle -= 1
        self._free.append(block)

    def _unfile(self, block: int) -> None:
        """Take its key away."""
        key, parent = self._keys[block], self._parents[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = self._parents[block] = None
        if parent is None:
            return
        left = self._children.pop(parent) - 1
        if left:
            self._children[parent] = left
        elif (above := self._by_key.get(parent)) is not None and self.is_idle(above):
            self._push(above)
