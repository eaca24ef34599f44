"""The laws of `Tier`, written once and run on every tier.

A tier's test module subclasses `TierContract` and gives two fixtures: `tier`, a fresh tier with room for `ROOM_FOR`
objects of `SIZE` bytes (a little more or less is fine), and `raw`, a back door that touches the medium without the
tier. Laws about an optional ability are skipped where the tier lacks it. A law takes `tier` and `raw` only, so that
test_lying_tier.py can run all of them on tiers that break them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import Iterable
from typing import Any, Protocol

import pytest
import xxhash

from forebay.kvstore.channel import TierChannel
from forebay.kvstore.errors import BlockCorrupt, TierClosed, TierFull
from forebay.kvstore.store import Store
from forebay.kvstore.tier import ObjectKey, SupportsListing, SupportsPresence, SupportsSlots, Tier
from forebay.tiers.memory import MemoryTier

SIZE = 4096
ROOM_FOR = 8
NAMESPACE = b"n" * 16


class RawMedium(Protocol):
    """The medium under a tier, touched behind its back."""

    def flip_bit(self, key: ObjectKey) -> None:
        """Change one bit of the object's stored bytes."""

    def tear(self, key: ObjectKey) -> None:
        """Lose the second half of the object's stored bytes, as a cut-off write does (a file is cut, memory zeroed)."""

    def keys(self) -> Iterable[ObjectKey]:
        """What the medium really holds."""


def key_of(index: int, *, namespace: bytes = NAMESPACE, group: int = 0) -> ObjectKey:
    return ObjectKey(namespace, index.to_bytes(16, "little"), group)


def forge(key: ObjectKey, size: int = SIZE) -> bytes:
    """An object whose bytes are a function of its key and size: checksum (8 bytes), then noise."""
    body = hashlib.shake_128(b"".join(key[:2]) + bytes([key.group])).digest(size - 8)
    return xxhash.xxh3_64_digest(key.block + body) + body


def verify(key: ObjectKey, view: memoryview) -> str | None:
    """What the store is given to check a forged object with."""
    good = xxhash.xxh3_64_digest(key.block + bytes(view[8:])) == view[:8]
    return None if good else "checksum"


def seal(view: memoryview) -> None:
    """A forged object is born sealed."""


async def read(tier: Tier, key: ObjectKey, size: int = SIZE) -> bytes | None:
    out = bytearray(size)
    length = await tier.get_into(key, out, timeout_s=5.0)
    return None if length is None else bytes(out[:length])


def balanced(tier: Tier) -> bool:
    """Free, cached, reserved and quarantined bytes add up to the tier's memory (where the tier can say so)."""
    accounting: Any = getattr(tier, "accounting", None)
    return accounting is None or sum(accounting().values()) == tier.capacity_bytes


def reserved_bytes(tier: Tier) -> int:
    accounting: Any = getattr(tier, "accounting", None)
    return 0 if accounting is None else accounting()["reserved"] + accounting()["quarantined"]


def with_slots(tier: Tier) -> SupportsSlots:
    if not isinstance(tier, SupportsSlots):
        pytest.skip(f"{tier.name} has no slots to fill in place")
    return tier


def present(tier: Tier, key: ObjectKey) -> bool:
    return isinstance(tier, SupportsPresence) and tier.leading_run(key.namespace, key.group, [key.block]) == 1


class TierContract:
    """Laws of Tier. A subclass gives `tier` and `raw`.

    `verifies_itself`: the tier checks what it reads and raises BlockCorrupt. A tier that doesn't (memory: the store
    verifies what it loads) must pass the same laws with a store above it.
    """

    verifies_itself = False
    sizes: tuple[int, ...] = (SIZE, SIZE // 4, 64)  # what objects of one namespace and group may have

    # --- bytes ----------------------------------------------------------------------------------------------------

    async def test_what_was_put_is_what_is_got(self, tier: Tier, raw: RawMedium) -> None:
        for index, size in enumerate(self.sizes):
            key = key_of(index)
            await tier.put(key, forge(key, size), timeout_s=5.0)
            assert await read(tier, key) == forge(key, size)
            assert key in set(raw.keys())

    async def test_put_keeps_its_own_copy(self, tier: Tier, raw: RawMedium) -> None:
        key = key_of(1)
        buffer = bytearray(forge(key))
        await tier.put(key, buffer, timeout_s=5.0)
        buffer[:] = bytes(SIZE)  # a caller reusing its buffer must not rewrite a stored object
        assert await read(tier, key) == forge(key)

    async def test_every_kind_of_buffer_is_taken(self, tier: Tier, raw: RawMedium) -> None:
        for index, kind in enumerate((bytes, bytearray, lambda data: memoryview(data)[:], memoryview)):
            key = key_of(index)
            await tier.put(key, kind(forge(key)), timeout_s=5.0)
            out = memoryview(bytearray(SIZE))
            assert await tier.get_into(key, out, timeout_s=5.0) == SIZE
            assert out == forge(key)

    async def test_an_absent_object_is_none(self, tier: Tier, raw: RawMedium) -> None:
        assert await read(tier, key_of(1)) is None
        assert not await tier.delete(key_of(1))

    async def test_a_repeated_put_keeps_the_first_bytes(self, tier: Tier, raw: RawMedium) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        await tier.put(key, forge(key_of(2)), timeout_s=5.0)
        assert await read(tier, key) == forge(key)
        assert balanced(tier)

    async def test_an_object_is_found_only_under_its_whole_key(self, tier: Tier, raw: RawMedium) -> None:
        here, there, group = key_of(1), key_of(1, namespace=b"m" * 16), key_of(1, group=1)
        await tier.put(here, forge(here), timeout_s=5.0)
        assert await read(tier, there) is None
        assert await read(tier, group) is None
        await tier.put(there, forge(there), timeout_s=5.0)
        assert await read(tier, here) == forge(here)
        assert await read(tier, there) == forge(there)

    async def test_a_longer_out_is_written_only_as_far_as_the_object(self, tier: Tier, raw: RawMedium) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        out = bytearray(b"\xaa" * (SIZE + 32))
        assert await tier.get_into(key, out, timeout_s=5.0) == SIZE
        assert out == forge(key) + b"\xaa" * 32

    async def test_a_too_small_out_is_a_value_error_and_costs_nothing(self, tier: Tier, raw: RawMedium) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        out = bytearray(SIZE - 1)
        with pytest.raises(ValueError):
            await tier.get_into(key, out, timeout_s=5.0)
        assert await read(tier, key) == forge(key)

    async def test_a_deleted_object_is_gone(self, tier: Tier, raw: RawMedium) -> None:
        key, other = key_of(1), key_of(2)
        for each in (key, other):
            await tier.put(each, forge(each), timeout_s=5.0)
        assert await tier.delete(key)
        assert await read(tier, key) is None
        assert not await tier.delete(key)
        assert await read(tier, other) == forge(other)
        assert balanced(tier)

    # --- trouble --------------------------------------------------------------------------------------------------

    async def test_a_flipped_bit_is_reported_then_gone(self, tier: Tier, raw: RawMedium) -> None:
        await self._damage(tier, raw.flip_bit)

    async def test_a_lost_half_is_reported_then_gone(self, tier: Tier, raw: RawMedium) -> None:
        await self._damage(tier, raw.tear)

    async def _damage(self, tier: Tier, harm: Any) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        harm(key)
        if self.verifies_itself:
            with pytest.raises(BlockCorrupt):
                await read(tier, key)
        else:
            store = Store(MemoryTier("first", 4 * SIZE), [TierChannel(tier)], verify=verify, seal=seal)
            assert await store.get_into(key, bytearray(SIZE), timeout_s=5.0) is None
            assert store.stats()["load_corrupt"] == 1
            await store.aclose(deadline_s=1.0)
        assert await read(tier, key) is None
        assert balanced(tier)
        await tier.put(key, forge(key), timeout_s=5.0)
        assert await read(tier, key) == forge(key)

    async def test_a_cancelled_put_is_all_or_nothing(self, tier: Tier, raw: RawMedium) -> None:
        for steps in range(6):
            key = key_of(steps)
            putting = asyncio.create_task(tier.put(key, forge(key), timeout_s=5.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            putting.cancel()
            await asyncio.wait((putting,))
            assert await read(tier, key) in (None, forge(key))
            assert balanced(tier) and not reserved_bytes(tier)
            await tier.put(key, forge(key), timeout_s=5.0)
            assert await read(tier, key) == forge(key)

    async def test_a_cancelled_get_costs_nothing_and_leaves_out_alone(self, tier: Tier, raw: RawMedium) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        for steps in range(4):
            out = bytearray(SIZE)
            getting = asyncio.create_task(tier.get_into(key, out, timeout_s=5.0))
            for _ in range(steps):
                await asyncio.sleep(0)
            getting.cancel()
            await asyncio.wait((getting,))
            out[:] = bytes(SIZE)
            await asyncio.sleep(0.002)  # time for a thread or task left behind to do its harm
            assert await read(tier, key) == forge(key)
            assert not any(out), "the tier wrote into a buffer whose call had ended"
            assert balanced(tier) and not reserved_bytes(tier)

    async def test_a_closed_tier_says_so(self, tier: Tier, raw: RawMedium) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        await tier.aclose()
        await tier.aclose()
        with pytest.raises(TierClosed):
            await tier.put(key, forge(key), timeout_s=5.0)
        with pytest.raises(TierClosed):
            await read(tier, key)
        if isinstance(tier, SupportsSlots):
            with pytest.raises(TierClosed):
                tier.reserve(key_of(2), SIZE)

    # --- room -----------------------------------------------------------------------------------------------------

    async def test_over_capacity_is_tier_full_or_eviction(self, tier: Tier, raw: RawMedium) -> None:
        for index in range(4 * ROOM_FOR):
            key = key_of(index)
            try:
                await tier.put(key, forge(key), timeout_s=5.0)
            except TierFull as full:
                assert full.need_bytes >= SIZE
                assert await read(tier, key) is None
            else:
                assert await read(tier, key) == forge(key), "an object is not evicted by its own put"
            assert balanced(tier)
        kept = 0
        for index in range(4 * ROOM_FOR):
            found = await read(tier, key_of(index))
            assert found in (None, forge(key_of(index)))
            kept += found is not None
        assert 0 < kept * SIZE <= tier.capacity_bytes

    async def test_an_object_larger_than_the_tier_is_refused_and_costs_nothing(
        self, tier: Tier, raw: RawMedium
    ) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        with pytest.raises(TierFull):
            await tier.put(key_of(2), bytes(tier.capacity_bytes + 1), timeout_s=5.0)
        assert await read(tier, key_of(2), tier.capacity_bytes + 1) is None
        assert await read(tier, key) == forge(key)
        assert balanced(tier) and not reserved_bytes(tier)

    # --- presence and listing -------------------------------------------------------------------------------------

    async def test_the_leading_run_ends_at_the_first_hole(self, tier: Tier, raw: RawMedium) -> None:
        if not isinstance(tier, SupportsPresence):
            pytest.skip(f"{tier.name} does not answer from memory")
        blocks = [key_of(index).block for index in range(6)]

        def run() -> int:
            return tier.leading_run(NAMESPACE, 0, blocks)

        assert run() == 0 and tier.leading_run(NAMESPACE, 0, []) == 0
        for index in (1, 2, 4):
            await tier.put(key_of(index), forge(key_of(index)), timeout_s=5.0)
        assert run() == 0  # a hole at the start: what follows can't be used
        await tier.put(key_of(0), forge(key_of(0)), timeout_s=5.0)
        assert run() == 3
        await tier.put(key_of(3), forge(key_of(3)), timeout_s=5.0)
        await tier.put(key_of(5), forge(key_of(5)), timeout_s=5.0)
        assert run() == 6
        assert tier.leading_run(NAMESPACE, 1, blocks) == 0 == tier.leading_run(b"m" * 16, 0, blocks)
        await tier.delete(key_of(0))
        assert run() == 0

    async def test_the_listing_is_what_the_medium_holds(self, tier: Tier, raw: RawMedium) -> None:
        if not isinstance(tier, SupportsListing):
            pytest.skip(f"{tier.name} can't list")
        for index in range(4):
            await tier.put(key_of(index), forge(key_of(index)), timeout_s=5.0)
        await tier.delete(key_of(2))
        assert sorted(tier.keys()) == [key_of(0), key_of(1), key_of(3)] == sorted(raw.keys())

    # --- slots ----------------------------------------------------------------------------------------------------

    async def test_a_reservation_is_invisible_until_it_is_committed(self, tier: Tier, raw: RawMedium) -> None:
        slots, key = with_slots(tier), key_of(1)
        room = slots.reserve(key, SIZE)
        assert room is not None and len(room.view) == SIZE
        room.view[:] = forge(key)
        assert await read(tier, key) is None and not present(tier, key) and slots.borrow(key) is None
        assert balanced(tier)
        room.commit()
        assert await read(tier, key) == forge(key)
        assert present(tier, key) or not isinstance(tier, SupportsPresence)
        assert balanced(tier) and not reserved_bytes(tier)

    async def test_an_aborted_reservation_gives_everything_back(self, tier: Tier, raw: RawMedium) -> None:
        slots, key = with_slots(tier), key_of(1)
        for _ in range(3 * ROOM_FOR):  # a leak of one slot a round would run out
            room = slots.reserve(key, SIZE)
            assert room is not None
            room.abort()
            room.abort()
            assert await read(tier, key) is None and not present(tier, key)
            assert balanced(tier) and not reserved_bytes(tier)

    async def test_an_abort_after_the_commit_is_harmless(self, tier: Tier, raw: RawMedium) -> None:
        slots, key = with_slots(tier), key_of(1)
        room = slots.reserve(key, SIZE)
        assert room is not None
        room.view[:] = forge(key)
        room.commit()
        room.abort()
        assert await read(tier, key) == forge(key)
        assert balanced(tier)

    async def test_one_writer_a_key(self, tier: Tier, raw: RawMedium) -> None:
        slots, key = with_slots(tier), key_of(1)
        room = slots.reserve(key, SIZE)
        assert room is not None
        assert slots.reserve(key, SIZE) is None  # being written
        room.view[:] = forge(key)
        room.commit()
        assert slots.reserve(key, SIZE) is None  # present

    async def test_reserving_more_than_there_is_is_tier_full(self, tier: Tier, raw: RawMedium) -> None:
        slots, rooms = with_slots(tier), []
        with pytest.raises(TierFull):
            for index in range(4 * ROOM_FOR):
                rooms.append(slots.reserve(key_of(index), SIZE))
        assert rooms and balanced(tier)
        for room in rooms:
            assert room is not None
            room.abort()
        assert balanced(tier) and not reserved_bytes(tier)

    async def test_a_borrowed_object_is_not_evicted(self, tier: Tier, raw: RawMedium) -> None:
        slots, key = with_slots(tier), key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        loan = slots.borrow(key)
        assert loan is not None and loan.view == forge(key)
        for index in range(2, 4 * ROOM_FOR):
            try:
                await tier.put(key_of(index), forge(key_of(index)), timeout_s=5.0)
            except TierFull:
                pass
        assert loan.view == forge(key)
        assert await read(tier, key) == forge(key)
        loan.release()
        loan.release()
        assert balanced(tier) and not reserved_bytes(tier)

    async def test_an_object_deleted_while_borrowed_keeps_its_bytes(self, tier: Tier, raw: RawMedium) -> None:
        slots, key = with_slots(tier), key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        loan = slots.borrow(key)
        assert loan is not None
        assert await tier.delete(key)
        assert await read(tier, key) is None and not present(tier, key)
        for index in range(2, 4 * ROOM_FOR):
            try:
                await tier.put(key_of(index), forge(key_of(index)), timeout_s=5.0)
            except TierFull:
                pass
        assert loan.view == forge(key)
        assert balanced(tier)
        loan.release()
        assert balanced(tier) and not reserved_bytes(tier)

    # --- many at once ---------------------------------------------------------------------------------------------

    async def test_puts_and_gets_of_one_key_at_once_are_whole_or_nothing(self, tier: Tier, raw: RawMedium) -> None:
        key = key_of(1)
        calls = [tier.put(key, forge(key), timeout_s=5.0) if index % 2 else read(tier, key) for index in range(16)]
        for found in await asyncio.gather(*calls):
            assert found in (None, forge(key))
        assert await read(tier, key) == forge(key)
        assert balanced(tier)

    async def test_a_random_life_is_that_of_a_dict_that_may_forget(self, tier: Tier, raw: RawMedium) -> None:
        seed = int(os.environ.get("FOREBAY_SEED", random.SystemRandom().randrange(2**32)))
        print(f"replay with FOREBAY_SEED={seed}")
        rng = random.Random(seed)
        may_hold: set[ObjectKey] = set()
        loans: list[tuple[Any, bytes]] = []
        for _ in range(300):
            key = key_of(rng.randrange(3 * ROOM_FOR))
            data = forge(key, rng.choice(self.sizes))
            try:
                match rng.choice(("put", "put", "get", "get", "delete", "reserve", "abort", "borrow", "release")):
                    case "put":
                        await tier.put(key, data, timeout_s=5.0)
                        may_hold.add(key)
                    case "get":
                        found = await read(tier, key)
                        assert found is None or key in may_hold, f"{key} came back from the dead"
                        assert found is None or found == forge(key, len(found))
                    case "delete":
                        await tier.delete(key)
                        may_hold.discard(key)
                        assert await read(tier, key) is None
                    case "reserve" | "abort" as end if isinstance(tier, SupportsSlots):
                        room = tier.reserve(key, len(data))
                        if room is not None and end == "abort":
                            room.abort()
                        elif room is not None:
                            room.view[:] = data
                            room.commit()
                            may_hold.add(key)
                            assert await read(tier, key) == data
                    case "borrow" if isinstance(tier, SupportsSlots) and len(loans) < ROOM_FOR // 2:
                        loan = tier.borrow(key)
                        if loan is not None:
                            loans.append((loan, bytes(loan.view)))
                    case "release" if loans:
                        loans.pop(rng.randrange(len(loans)))[0].release()
            except TierFull:
                assert loans or isinstance(tier, SupportsSlots) or tier.capacity_bytes < 2 * SIZE
            assert all(loan.view == data for loan, data in loans), "a borrowed object changed"
            assert balanced(tier)
        for loan, _ in loans:
            loan.release()
        assert balanced(tier) and not reserved_bytes(tier)
