"""The memory tier keeps the laws, and forgets in the order it says."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from forebay.kvstore.tier import ObjectKey
from forebay.tiers.memory import MemoryTier
from tests.contract.tier_contract import ROOM_FOR, SIZE, TierContract, forge, key_of


class MemoryMedium:
    """The bytearrays inside a MemoryTier."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier

    def flip_bit(self, key: ObjectKey) -> None:
        self._tier._objects[key].data[SIZE // 2] ^= 0x10

    def tear(self, key: ObjectKey) -> None:
        data = self._tier._objects[key].data
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)

    def keys(self) -> Iterable[ObjectKey]:
        return list(self._tier._objects)


class TestMemoryTier(TierContract):
    @pytest.fixture
    def tier(self) -> MemoryTier:
        return MemoryTier("memory", ROOM_FOR * SIZE)

    @pytest.fixture
    def raw(self, tier: MemoryTier) -> MemoryMedium:
        return MemoryMedium(tier)

    async def test_the_least_recently_used_goes_first(self, tier: MemoryTier) -> None:
        for index in range(ROOM_FOR):
            await tier.put(key_of(index), forge(key_of(index)), timeout_s=1.0)
        await tier.get_into(key_of(0), bytearray(SIZE), timeout_s=1.0)
        await tier.put(key_of(99), forge(key_of(99)), timeout_s=1.0)
        held = set(tier.keys())
        assert key_of(0) in held and key_of(1) not in held

    async def test_a_parent_outlives_its_children(self, tier: MemoryTier) -> None:
        parent = None
        for index in range(ROOM_FOR):  # a chain: 0 is the oldest, and everything hangs on it
            room = tier.reserve(key_of(index), SIZE, parent=parent)
            assert room is not None
            room.commit()
            parent = key_of(index).block
        await tier.put(key_of(99), forge(key_of(99)), timeout_s=1.0)
        held = set(tier.keys())
        assert key_of(0) in held and key_of(ROOM_FOR - 1) not in held

    async def test_a_refused_put_evicts_nobody(self, tier: MemoryTier) -> None:
        for index in range(ROOM_FOR):
            await tier.put(key_of(index), forge(key_of(index)), timeout_s=1.0)
        loan = tier.borrow(key_of(0))
        with pytest.raises(Exception, match="wanted"):
            await tier.put(key_of(99), bytes(ROOM_FOR * SIZE), timeout_s=1.0)
        assert len(list(tier.keys())) == ROOM_FOR and loan is not None
