"""The Tier protocol: what the store asks of every place that keeps objects.

One small async protocol that every tier passes the same contract tests for (tests/contract/), and a few optional
abilities, each its own protocol, found once at start with `isinstance`. Moves no bytes itself. Always true: a visible
object never changes, only its location does; `None` is a miss and an exception is trouble.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

Buffer: TypeAlias = bytes | bytearray | memoryview
WritableBuffer: TypeAlias = bytearray | memoryview


class ObjectKey(NamedTuple):
    """What a tier files an object under. The namespace is part of it, so a key asked for under another namespace misses.

    namespace: 16 bytes. block: 16 bytes (the rolling key). group: index of the group in the namespace's facts.
    """

    namespace: bytes
    block: bytes
    group: int = 0

    def __repr__(self) -> str:
        return f"{self.namespace.hex()[:8]}/{self.block.hex()}/{self.group}"


@runtime_checkable
class Tier(Protocol):
    """Keeps immutable objects by key. It may forget an object; it may not return wrong bytes.

    The bytes are an object as kvstore/objects.py lays it out: header, then payload.
    """

    name: str
    capacity_bytes: int

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        """Store a copy of `data`. If this raises or is cancelled, the key holds all of it or none. A key already here is
        kept as it is (objects never change) and refreshed.

        Raises:
            TierFull: no room, even after eviction. Safe to try a slower tier.
            TierTimeout: not confirmed in `timeout_s` seconds. Safe to repeat.
            TierUnavailable: the medium refused; `__cause__` has the original error.
            TierClosed: after `aclose`.
        """

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        """Read the object into `out` (the caller's memory, so no copy is made for it).

        Returns: its length in bytes, or None if it is not here.
        Raises:
            ValueError: `out` is shorter than the object.
            BlockCorrupt: the medium's bytes failed a check. Already dropped, so the next call returns None.
            TierTimeout, TierUnavailable, TierClosed: as for `put`.
        """

    async def delete(self, key: ObjectKey) -> bool:
        """Forget the object now. Returns whether it was here."""

    async def aclose(self) -> None:
        """Finish what runs and release the medium. Idempotent."""


@runtime_checkable
class SupportsPresence(Protocol):
    """Answers from memory, at once, how many leading keys of a run it holds. Others are asked with `probe`."""

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int: ...


@runtime_checkable
class SupportsProbe(Protocol):
    """Answers with I/O how many leading keys of a run it holds."""

    async def probe(self, namespace: bytes, group: int, blocks: Sequence[bytes], *, timeout_s: float) -> int: ...


@runtime_checkable
class SupportsListing(Protocol):
    """Lists what it holds, in no order."""

    def keys(self) -> Iterable[ObjectKey]: ...


@runtime_checkable
class SupportsStats(Protocol):
    """Tells about itself."""

    def stats(self) -> dict[str, Any]:
        """Gauges by name, counters in a table named `counters`, tables of the same kind."""

    def health(self) -> list[str]:
        """What is wrong and what to do about it, a line each; empty when all is well."""


class Reservation(Protocol):
    """Room in a tier for one object, writable in place, invisible until committed."""

    view: memoryview

    def commit(self) -> None:
        """Make the object visible. Its header and payload must be whole in `view`."""

    def abort(self) -> None:
        """Give the room back. Idempotent, and harmless after `commit`."""


class Borrow(Protocol):
    """A visible object's bytes in place, kept from eviction until released."""

    view: memoryview

    def release(self) -> None:
        """Let the object be evicted again. Idempotent."""


@runtime_checkable
class SupportsSlots(Protocol):
    """Memory that can be filled and read in place, so that moving an object costs one copy and not two."""

    def reserve(self, key: ObjectKey, size_bytes: int, *, parent: bytes | None = None) -> Reservation | None:
        """Room for an object of `size_bytes`. None: the key is already here or being written.

        `parent` is the parent block's key, for leaf-first eviction; None when unknown or the first block.
        Raises: TierFull, TierClosed.
        """

    def borrow(self, key: ObjectKey) -> Borrow | None:
        """The visible object's bytes in place, or None if it is not here."""


@runtime_checkable
class SupportsCleanMarks(Protocol):
    """Wants to know which of its objects a lower tier holds too, since losing those costs a load and not a recompute."""

    def mark_clean(self, key: ObjectKey) -> None:
        """A lower tier holds the object as well. Without effect if it is not here."""
