"""The engine's block pool keeps the laws of a tier."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from forebay.engine.pool import BlockPool
from forebay.engine_adapter.hbm import HbmTier
from forebay.kvstore.errors import TierFull
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.tier import ObjectKey
from tests.contract.tier_contract import NAMESPACE, ROOM_FOR, SIZE, TierContract, forge, key_of, read

BLOCK_TOKENS, PARTS = 8, 2
HEADER_BYTES = ObjectLayout(0, BLOCK_TOKENS, (0,) * PARTS).header_bytes
LAYOUT = ObjectLayout(0, BLOCK_TOKENS, ((SIZE - HEADER_BYTES) // PARTS,) * PARTS)


def small_pool() -> BlockPool:
    # [blocks, head_groups, layers, 2, block_tokens, heads_per_group, head_dim] of one byte an element.
    head_dim = LAYOUT.payload_bytes // (PARTS * 2 * BLOCK_TOKENS)
    tensor = torch.zeros(ROOM_FOR, PARTS, 1, 2, BLOCK_TOKENS, 1, head_dim, dtype=torch.int8)
    return BlockPool(tensor, BLOCK_TOKENS)


class PoolMedium:
    """The slots of the pool."""

    def __init__(self, tier: HbmTier) -> None:
        self._tier = tier

    def flip_bit(self, key: ObjectKey) -> None:
        self._tier._slots[self._tier._headers[key][0]][SIZE // 2] ^= 0x10

    def tear(self, key: ObjectKey) -> None:
        self._tier._slots[self._tier._headers[key][0]][LAYOUT.payload_bytes // 2 :] = 0

    def keys(self) -> Iterable[ObjectKey]:
        names = {self._tier._name(key): key for key in self._tier._headers}
        return [names[name] for name in self._tier._pool._by_key]


class TestHbmTier(TierContract):
    sizes = (SIZE,)

    @pytest.fixture
    def tier(self) -> HbmTier:
        return HbmTier(small_pool(), LAYOUT, NAMESPACE)

    @pytest.fixture
    def raw(self, tier: HbmTier) -> PoolMedium:
        return PoolMedium(tier)

    async def test_a_block_that_a_sequence_uses_is_not_evicted(self, tier: HbmTier) -> None:
        await tier.put(key_of(1), forge(key_of(1)), timeout_s=1.0)
        block = tier._pool.find(key_of(1).block)  # the engine finds it under its own key
        assert block is not None
        tier._pool.take(block)
        for index in range(2, 4 * ROOM_FOR):
            await tier.put(key_of(index), forge(key_of(index)), timeout_s=1.0)
        assert await read(tier, key_of(1)) == forge(key_of(1))
        tier._pool.release([block])
        tier._pool.check_idle()

    async def test_what_is_deleted_while_a_sequence_uses_it_is_free_when_that_has_ended(self, tier: HbmTier) -> None:
        for index in (1, 2):
            await tier.put(key_of(index), forge(key_of(index)), timeout_s=1.0)
        used = [tier._pool.find(key_of(index).block) for index in (1, 2)]
        assert used[0] is not None and used[1] is not None
        tier._pool.take(used[0])
        tier._pool.hold(used[1])
        assert await tier.delete(key_of(1)) and await tier.delete(key_of(2))
        assert await read(tier, key_of(1)) is None and tier._pool.counts().free == ROOM_FOR - 2
        tier._pool.check()
        tier._pool.release([used[0]])
        tier._pool.unhold(used[1])
        tier._pool.check_idle()
        assert tier._pool.counts().free == ROOM_FOR
        assert not tier._pool.forget(key_of(1).block)

    async def test_a_pool_in_use_is_full(self, tier: HbmTier) -> None:
        taken = [tier._pool.allocate() for _ in range(ROOM_FOR)]
        with pytest.raises(TierFull):
            await tier.put(key_of(1), forge(key_of(1)), timeout_s=1.0)
        tier._pool.release(block for block in taken if block is not None)
        tier._pool.check_idle()

    async def test_what_the_engine_computed_again_is_not_taken_for_what_was_put(self, tier: HbmTier) -> None:
        await tier.put(key_of(1), forge(key_of(1)), timeout_s=1.0)
        held = [tier._pool.allocate() for _ in range(ROOM_FOR)]  # evicts it
        last = held.pop()
        assert last is not None
        other = next(block for block in (*held, last) if block != tier._headers[key_of(1)][0])
        tier._pool.register(other or 0, key_of(1).block, None)
        assert await read(tier, key_of(1)) is None
