"""A tier in this process's own memory: the reference that other tiers are compared with.

Covers every ability of the protocol in the simplest way that keeps all laws: one `bytearray` an object, one dict in
order of last use. Leaves speed to `tiers/ram.py` (shared memory, size classes, flat index): eviction here scans, so
keep it to some thousands of objects. Always true: free + cached + reserved + quarantined bytes = capacity; nothing is
visible before it is whole; a borrowed object is neither evicted nor reused. Checks no checksums: what it returns is
what its memory holds, and the store verifies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forebay.kvstore.errors import TierClosed, TierFull
from forebay.kvstore.tier import Borrow, Buffer, ObjectKey, Reservation, WritableBuffer


class MemoryTier:
    """Objects in a dict, least recently used evicted first, objects without a child here before their parents.

    Implements Tier, SupportsPresence, SupportsListing and SupportsSlots. For one thread (the event loop's).
    """

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._objects: dict[ObjectKey, _Object] = {}  # least recently used first
        self._children: Counter[ObjectKey] = Counter()  # visible children by parent; the parent itself may be gone
        self._reserved: dict[ObjectKey, _Room] = {}
        self._free_bytes = capacity_bytes
        self._cached_bytes = 0
        self._reserved_bytes = 0
        self._quarantined_bytes = 0  # deleted while borrowed: no longer found, not yet reusable
        self._closed = False

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        self._check_open(key)
        if key in self._objects:
            self._touch(key)
            return
        size = memoryview(data).nbytes
        self._make_room(key, size)
        copy = bytearray(data)
        self._free_bytes -= size
        self._insert(key, _Object(copy, None))

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        self._check_open(key)
        found = self._objects.get(key)
        if found is None:
            return None
        size = len(found.data)
        if len(out) < size:
            raise ValueError(f"out has {len(out)} bytes, the object {size}")
        self._touch(key)
        memoryview(out)[:size] = found.data
        return size

    async def delete(self, key: ObjectKey) -> bool:
        self._check_open(key)
        found = self._objects.get(key)
        if found is None:
            return False
        self._remove(key, found)
        return True

    async def aclose(self) -> None:
        self._closed = True
        for key, found in list(self._objects.items()):
            self._remove(key, found)

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        for index, block in enumerate(blocks):
            if ObjectKey(namespace, block, group) not in self._objects:
                return index
        return len(blocks)

    def keys(self) -> Iterable[ObjectKey]:
        return list(self._objects)

    def reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        self._check_open(key)
        if key in self._objects or key in self._reserved:
            return None
        self._make_room(key, size_bytes)
        self._free_bytes -= size_bytes
        self._reserved_bytes += size_bytes
        room = _Room(self, key, bytearray(size_bytes), parent)
        self._reserved[key] = room
        return room

    def borrow(self, key: ObjectKey) -> Borrow | None:
        self._check_open(key)
        found = self._objects.get(key)
        if found is None:
            return None
        self._touch(key)
        found.borrowers += 1
        return _Loan(self, found)

    def accounting(self) -> dict[str, int]:
        """Bytes by what they are used for; they add up to `capacity_bytes`."""
        return {
            "free": self._free_bytes,
            "cached": self._cached_bytes,
            "reserved": self._reserved_bytes,
            "quarantined": self._quarantined_bytes,
        }

    # --- inside -------------------------------------------------------------------------------------------------

    def _check_open(self, key: ObjectKey) -> None:
        if self._closed:
            raise TierClosed("the tier is closed", tier=self.name, key=key)

    def _touch(self, key: ObjectKey) -> None:
        self._objects[key] = self._objects.pop(key)

    def _insert(self, key: ObjectKey, new: _Object) -> None:
        """Make visible an object whose bytes are already taken from `free`."""
        self._objects[key] = new
        self._cached_bytes += len(new.data)
        if new.parent is not None:
            self._children[key._replace(block=new.parent)] += 1

    def _remove(self, key: ObjectKey, old: _Object) -> None:
        del self._objects[key]
        size = len(old.data)
        self._cached_bytes -= size
        if old.borrowers:
            old.quarantined = True
            self._quarantined_bytes += size
        else:
            self._free_bytes += size
        if old.parent is not None:
            parent = key._replace(block=old.parent)
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]

    def _make_room(self, key: ObjectKey, size: int) -> None:
        # Count first, evict after: a put that is refused must not have cost anybody's object.
        evictable = sum(len(each.data) for each in self._objects.values() if not each.borrowers)
        if size > self._free_bytes + evictable:
            raise TierFull(
                f"{size} bytes wanted, {self._free_bytes} free, {evictable} evictable",
                tier=self.name,
                key=key,
                need_bytes=size,
                free_bytes=self._free_bytes,
            )
        while self._free_bytes < size:
            unborrowed = [each for each, held in self._objects.items() if not held.borrowers]
            victim = next((each for each in unborrowed if each not in self._children), unborrowed[0])
            self._remove(victim, self._objects[victim])


@dataclass(eq=False, slots=True)
class _Object:
    data: bytearray
    parent: bytes | None
    borrowers: int = 0
    quarantined: bool = False


class _Room:
    """The Reservation of a MemoryTier."""

    def __init__(self, tier: MemoryTier, key: ObjectKey, data: bytearray, parent: bytes | None) -> None:
        self.view = memoryview(data)
        self._tier, self._key, self._data, self._parent = tier, key, data, parent

    def commit(self) -> None:
        if not self._leave():
            return
        if self._tier._closed or self._key in self._tier._objects:  # closed, or a `put` of the same key came first
            self._tier._free_bytes += len(self._data)
        else:
            self._tier._insert(self._key, _Object(self._data, self._parent))

    def abort(self) -> None:
        if self._leave():
            self._tier._free_bytes += len(self._data)

    def _leave(self) -> bool:
        if self._tier._reserved.get(self._key) is not self:
            return False
        del self._tier._reserved[self._key]
        self._tier._reserved_bytes -= len(self._data)
        return True


class _Loan:
    """The Borrow of a MemoryTier."""

    def __init__(self, tier: MemoryTier, borrowed: _Object) -> None:
        self.view = memoryview(borrowed.data)
        self._tier = tier
        self._borrowed: _Object | None = borrowed

    def release(self) -> None:
        borrowed, self._borrowed = self._borrowed, None
        if borrowed is None:
            return
        borrowed.borrowers -= 1
        if borrowed.quarantined and not borrowed.borrowers:
            self._tier._quarantined_bytes -= len(borrowed.data)
            self._tier._free_bytes += len(borrowed.data)
