"""The store's first tier, filled and read in place where it has slots and through a scratch buffer where not.

Hides that difference from the loader and the write-behind. Always true: nothing is visible before it is whole, and no
memory goes back to the tier while somebody may still touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.kvstore.tier import (
    Borrow,
    Buffer,
    ObjectKey,
    Reservation,
    SupportsCleanMarks,
    SupportsPresence,
    SupportsSlots,
    Tier,
)


class Held:
    """Memory in use by several calls: freed when it is closed *and* the last of them has left.

    A tier that goes on after its deadline may still write into `view`; it leaves when it is really done, and until then
    the memory must not serve another object.
    """

    def __init__(self, view: memoryview, free: Callable[[], None]) -> None:
        self.view = view
        self._free: Callable[[], None] | None = free
        self._users = 0
        self._closed = False

    @property
    def in_use(self) -> bool:
        return self._users > 0

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        self._free_if_done()

    def close(self) -> None:
        self._closed = True
        self._free_if_done()

    def _free_if_done(self) -> None:
        if self._closed and not self._users and self._free is not None:
            free, self._free = self._free, None
            free()


class Room(Held):
    """Room for one object in the first tier. Closing it without `keep` gives it back."""

    def __init__(self, tier: Tier, key: ObjectKey, reservation: Reservation | None, size: int) -> None:
        view = memoryview(bytearray(size)) if reservation is None else reservation.view
        super().__init__(view, _nothing if reservation is None else reservation.abort)
        self._tier, self._key, self._reservation = tier, key, reservation

    def scratch(self, size: int) -> memoryview | None:
        """The object's bytes if they lie outside the tier, free to use for as long as anybody likes."""
        return self.view[:size] if self._reservation is None else None

    async def keep(self, size: int, *, timeout_s: float) -> None:
        """Make the first `size` bytes of `view` visible as the object. Raises what the tier's `put` raises."""
        if self._reservation is None:
            await self._tier.put(self._key, self.view[:size], timeout_s=timeout_s)
        else:
            self._reservation.commit()


class FastTier:
    """The tier that serves readers. It must answer presence from memory."""

    def __init__(self, tier: Tier) -> None:
        if not isinstance(tier, SupportsPresence):
            raise ValueError(f"the first tier must answer presence from memory; {tier.name} does not")
        self.tier: Tier = tier
        self.name = tier.name
        self._presence: SupportsPresence = tier
        self._slots = tier if isinstance(tier, SupportsSlots) else None
        self._marks = tier if isinstance(tier, SupportsCleanMarks) else None

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        return self._presence.leading_run(namespace, group, blocks)

    def holds(self, key: ObjectKey) -> bool:
        return self._presence.leading_run(key.namespace, key.group, (key.block,)) == 1

    def mark_clean(self, key: ObjectKey) -> None:
        """A lower tier holds the object as well."""
        if self._marks is not None:
            self._marks.mark_clean(key)

    def room(self, key: ObjectKey, size: int, *, parent: bytes | None, exact: bool) -> Room | None:
        """Room for an object of `size` bytes (at most that many if not `exact`). None: present or being written.

        Raises: TierFull, TierClosed.
        """
        if self._slots is None or not exact:
            return None if self.holds(key) else Room(self.tier, key, None, size)
        reservation = self._slots.reserve(key, size, parent=parent)
        return None if reservation is None else Room(self.tier, key, reservation, size)

    def pin(self, key: ObjectKey) -> Borrow | None:
        """Keep an object from eviction until released, as far as the tier can. None: not here."""
        if self._slots is not None:
            return self._slots.borrow(key)
        return _Unpinned() if self.holds(key) else None

    async def read(self, key: ObjectKey, likely_bytes: int, *, timeout_s: float) -> Borrow | None:
        """The object's bytes, in place or as a copy. None: not here. Raises as Tier.get_into."""
        if self._slots is not None:
            return self._slots.borrow(key)
        size = likely_bytes or 2**16
        while True:
            scratch = memoryview(bytearray(size))
            try:
                found = await self.tier.get_into(key, scratch, timeout_s=timeout_s)
            except ValueError:
                if size > self.tier.capacity_bytes:
                    raise
                size *= 2
            else:
                return None if found is None else _Unpinned(scratch[:found])

    async def put(self, key: ObjectKey, data: Buffer, *, parent: bytes | None, timeout_s: float) -> None:
        """As Tier.put, with the parent told to a tier that can use it."""
        source = memoryview(data).cast("B")
        room = self.room(key, source.nbytes, parent=parent, exact=True) if self._slots is not None else None
        if room is None:
            await self.tier.put(key, data, timeout_s=timeout_s)
            return
        try:
            room.view[:] = source
            await room.keep(source.nbytes, timeout_s=timeout_s)
        finally:
            room.close()


class _Unpinned:
    """A Borrow of a tier that can't lend: bytes copied out of it, or none."""

    def __init__(self, view: memoryview | None = None) -> None:
        self.view = memoryview(b"") if view is None else view

    def release(self) -> None:
        """Nothing to give back."""


def _nothing() -> None:
    """A scratch buffer is freed by forgetting it."""
