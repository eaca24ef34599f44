"""The laws have teeth: tiers that break one thing each are caught by the law about it.

Each liar is the memory tier with one lie. All laws are run on it, and the one named with it must be among those that
fail; on the honest tier none fails.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Sequence

import pytest

from forebay.kvstore.errors import TierFull
from forebay.kvstore.tier import Buffer, ObjectKey, Reservation, WritableBuffer
from forebay.tiers.memory import MemoryTier, _Loan, _Object, _Room
from tests.contract.test_memory import MemoryMedium
from tests.contract.tier_contract import ROOM_FOR, SIZE, TierContract


async def broken_laws(liar: type[MemoryTier], *, verifies_itself: bool = False) -> set[str]:
    """The laws that a fresh tier of this class fails, by name."""
    contract = TierContract()
    contract.verifies_itself = verifies_itself
    broken = set()
    for name, law in inspect.getmembers(contract, inspect.iscoroutinefunction):
        if name.startswith("test_"):
            tier = liar("memory", ROOM_FOR * SIZE)
            try:
                await asyncio.wait_for(law(tier, MemoryMedium(tier)), timeout=10)
            except pytest.skip.Exception:
                pass
            except (Exception, pytest.fail.Exception):
                broken.add(name)
    return broken


class AlwaysMissing(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        await super().get_into(key, out, timeout_s=timeout_s)
        return None


class DropsEverything(MemoryTier):
    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        self._check_open(key)


class ReturnsAnotherObject(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        return await super().get_into(next(iter(self._objects), key), out, timeout_s=timeout_s)


class DamagesWhatItReads(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        size = await super().get_into(key, out, timeout_s=timeout_s)
        if size:
            out[size - 1] ^= 1
        return size


class CallsAMissEmpty(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        return await super().get_into(key, out, timeout_s=timeout_s) or 0


class KeepsTheCallersBuffer(MemoryTier):
    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        await super().put(key, data, timeout_s=timeout_s)
        if isinstance(data, bytearray):
            self._objects[key].data = data


class RewritesOnARepeatedPut(MemoryTier):
    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        await super().delete(key)
        await super().put(key, data, timeout_s=timeout_s)


class IgnoresTheNamespace(MemoryTier):
    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        await super().put(key._replace(namespace=b"n" * 16), data, timeout_s=timeout_s)

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        return await super().get_into(key._replace(namespace=b"n" * 16), out, timeout_s=timeout_s)


class IgnoresTheGroup(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        return await super().get_into(key._replace(group=0), out, timeout_s=timeout_s)


class FillsASmallBufferAsFarAsItGoes(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        whole = bytearray(SIZE)
        size = await super().get_into(key, whole, timeout_s=timeout_s)
        if size is None:
            return None
        memoryview(out)[: min(size, len(out))] = whole[: min(size, len(out))]
        return min(size, len(out))


class WritesPastTheObject(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        size = await super().get_into(key, out, timeout_s=timeout_s)
        if size is not None:
            memoryview(out)[size:] = bytes(len(out) - size)
        return size


class NeverForgets(MemoryTier):
    async def delete(self, key: ObjectKey) -> bool:
        self._check_open(key)
        return key in self._objects


class StoresHalfWhenCancelled(MemoryTier):
    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        half = memoryview(data).nbytes // 2
        await super().put(key, bytes(data[:half]), timeout_s=timeout_s)
        await asyncio.sleep(0)
        await super().delete(key)
        await super().put(key, data, timeout_s=timeout_s)


class LeaksWhenCancelled(MemoryTier):
    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        size = memoryview(data).nbytes
        if size <= self._free_bytes:
            self._free_bytes -= size
            await asyncio.sleep(0)
            self._free_bytes += size
        await super().put(key, data, timeout_s=timeout_s)


class WritesIntoAnEndedCallsBuffer(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        copying = asyncio.ensure_future(super().get_into(key, out, timeout_s=timeout_s))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            self._late = asyncio.get_running_loop().create_task(self._go_on(key, out))
            raise

    async def _go_on(self, key: ObjectKey, out: WritableBuffer) -> None:
        await asyncio.sleep(0.0005)
        await super().get_into(key, out, timeout_s=1.0)


class TakesMoreThanItHasRoomFor(MemoryTier):
    def _make_room(self, key: ObjectKey, size: int) -> None:
        pass


class TakesNothingWhenFull(MemoryTier):
    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        try:
            await super().put(key, data, timeout_s=timeout_s)
        except TierFull:
            pass


class ClaimsToHoldAll(MemoryTier):
    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        return len(blocks)


class CountsPastHoles(MemoryTier):
    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        return sum(ObjectKey(namespace, block, group) in self._objects for block in blocks)


class ListsOnlyTheNewest(MemoryTier):
    def keys(self) -> Iterable[ObjectKey]:
        return list(self._objects)[-1:]


class ShowsAReservation(MemoryTier):
    def reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        room = super().reserve(key, size_bytes, parent=parent)
        if isinstance(room, _Room):
            self._objects[key] = _Object(room._data, None)
        return room


class LetsTwoWriteOneKey(MemoryTier):
    def reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        first = self._reserved.pop(key, None)
        room = super().reserve(key, size_bytes, parent=parent)
        return room if first is None else first


class KeepsAbortedRoom(MemoryTier):
    def reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        room = super().reserve(key, size_bytes, parent=parent)
        if room is not None:
            room.abort = lambda: self._reserved.pop(key, None) and None  # type: ignore[method-assign]
        return room


class AbortsWhatWasCommitted(MemoryTier):
    def reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        room = super().reserve(key, size_bytes, parent=parent)
        if room is not None:
            honest = room.abort

            def abort() -> None:
                honest()
                if key in self._objects:
                    self._remove(key, self._objects[key])

            room.abort = abort  # type: ignore[method-assign]
        return room


class EvictsWhatIsBorrowed(MemoryTier):
    def borrow(self, key: ObjectKey) -> _Loan | None:
        return _Loan(self, _Object(self._objects[key].data, None)) if key in self._objects else None


class ReusesWhatIsBorrowed(MemoryTier):
    async def delete(self, key: ObjectKey) -> bool:
        found = self._objects.get(key)
        if found is not None:
            found.data[:] = bytes(len(found.data))
        return await super().delete(key)


class AnswersAfterItsEnd(MemoryTier):
    def _check_open(self, key: ObjectKey) -> None:
        pass


LIES = {
    AlwaysMissing: "test_what_was_put_is_what_is_got",
    DropsEverything: "test_what_was_put_is_what_is_got",
    ReturnsAnotherObject: "test_what_was_put_is_what_is_got",
    DamagesWhatItReads: "test_what_was_put_is_what_is_got",
    CallsAMissEmpty: "test_an_absent_object_is_none",
    KeepsTheCallersBuffer: "test_put_keeps_its_own_copy",
    RewritesOnARepeatedPut: "test_a_repeated_put_keeps_the_first_bytes",
    IgnoresTheNamespace: "test_an_object_is_found_only_under_its_whole_key",
    IgnoresTheGroup: "test_an_object_is_found_only_under_its_whole_key",
    FillsASmallBufferAsFarAsItGoes: "test_a_too_small_out_is_a_value_error_and_costs_nothing",
    WritesPastTheObject: "test_a_longer_out_is_written_only_as_far_as_the_object",
    NeverForgets: "test_a_deleted_object_is_gone",
    StoresHalfWhenCancelled: "test_a_cancelled_put_is_all_or_nothing",
    LeaksWhenCancelled: "test_a_cancelled_put_is_all_or_nothing",
    WritesIntoAnEndedCallsBuffer: "test_a_cancelled_get_costs_nothing_and_leaves_out_alone",
    TakesMoreThanItHasRoomFor: "test_over_capacity_is_tier_full_or_eviction",
    TakesNothingWhenFull: "test_an_object_larger_than_the_tier_is_refused_and_costs_nothing",
    ClaimsToHoldAll: "test_the_leading_run_ends_at_the_first_hole",
    CountsPastHoles: "test_the_leading_run_ends_at_the_first_hole",
    ListsOnlyTheNewest: "test_the_listing_is_what_the_medium_holds",
    ShowsAReservation: "test_a_reservation_is_invisible_until_it_is_committed",
    LetsTwoWriteOneKey: "test_one_writer_a_key",
    KeepsAbortedRoom: "test_an_aborted_reservation_gives_everything_back",
    AbortsWhatWasCommitted: "test_an_abort_after_the_commit_is_harmless",
    EvictsWhatIsBorrowed: "test_a_borrowed_object_is_not_evicted",
    ReusesWhatIsBorrowed: "test_an_object_deleted_while_borrowed_keeps_its_bytes",
    AnswersAfterItsEnd: "test_a_closed_tier_says_so",
}


@pytest.mark.parametrize(("liar", "law"), LIES.items(), ids=[liar.__name__ for liar in LIES])
async def test_a_lie_is_caught_by_the_law_about_it(liar: type[MemoryTier], law: str) -> None:
    assert law in await broken_laws(liar)


async def test_the_honest_tier_breaks_no_law() -> None:
    assert await broken_laws(MemoryTier) == set()


async def test_a_tier_that_only_says_that_it_verifies_is_caught() -> None:
    damage = {"test_a_flipped_bit_is_reported_then_gone", "test_a_lost_half_is_reported_then_gone"}
    assert await broken_laws(MemoryTier, verifies_itself=True) == damage


async def test_every_law_has_caught_a_liar() -> None:
    """A law that no liar breaks may be one that can't fail."""
    laws = {name for name, _ in inspect.getmembers(TierContract, inspect.isfunction) if name.startswith("test_")}
    caught: set[str] = await broken_laws(MemoryTier, verifies_itself=True)
    for liar in LIES:
        caught |= await broken_laws(liar)
    assert laws - caught == set()
