"""The engine's block pool as a tier: objects whose payloads lie in slots of the pool, on whatever device that is.

Covers what a Tier must do over an `engine.pool.BlockPool`, so that the laws of all tiers are checked on the engine's memory,
too. The engine itself doesn't come this way: it uses its pool directly. Always true: a block that sequences use isn't given to
another; a header is answered only with the very block it came with. Checks no checksums: the store above verifies.
For the one thread that owns the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from forebay.engine.pool import BlockPool
from forebay.kvstore.errors import TierClosed, TierFull
from forebay.kvstore.objects import PARENT_OFFSET, ObjectLayout
from forebay.kvstore.tier import Buffer, ObjectKey, WritableBuffer

_KEY_BYTES = 16


class HbmTier:
    """Implements Tier, SupportsPresence and SupportsListing. Headers stay in host memory."""

    def __init__(self, pool: BlockPool, layout: ObjectLayout, namespace: bytes, *, name: str = "hbm") -> None:
        """namespace: the engine's own, whose blocks of group 0 are filed under the keys that the engine uses.

        Raises: ValueError: a slot of the pool is no payload of this layout.
        """
        self.name = name
        self._pool, self._layout, self._namespace = pool, layout, namespace
        slot_bytes = pool.tensor[0].numel() * pool.tensor.element_size()
        if slot_bytes != layout.payload_bytes:
            raise ValueError(f"a slot has {slot_bytes} bytes, a payload {layout.payload_bytes}")
        self._slots = pool.tensor.view(torch.uint8).reshape(pool.total, slot_bytes)
        self.capacity_bytes = pool.total * layout.object_bytes
        self._headers: dict[ObjectKey, tuple[int, bytes]] = {}  # with the block they came with
        self._closed = False

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        self._check_open(key)
        found = self._find(key)
        if found is not None:
            self._touch(found)
            return
        view = memoryview(data).cast("B")
        head = self._layout.header_bytes
        # A slot holds a payload of this layout and nothing else.
        block = self._pool.allocate() if view.nbytes == self._layout.object_bytes else None
        if block is None:
            free = self._pool.available * self._layout.object_bytes
            raise TierFull("no slot for it", tier=self.name, key=key, need_bytes=view.nbytes, free_bytes=free)
        self._slots[block].copy_(torch.frombuffer(bytearray(view[head:]), dtype=torch.uint8))
        parent = bytes(view[PARENT_OFFSET : PARENT_OFFSET + _KEY_BYTES])
        self._pool.register(block, self._name(key), self._name(key._replace(block=parent)))
        self._pool.release([block])
        self._remember(key, block, bytes(view[:head]))

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        self._check_open(key)
        block = self._find(key)
        if block is None:
            return None
        size, head = self._layout.object_bytes, self._layout.header_bytes
        if len(out) < size:
            raise ValueError(f"out has {len(out)} bytes, the object {size}")
        target = memoryview(out).cast("B")
        target[:head] = self._headers[key][1]
        torch.frombuffer(target[head:size], dtype=torch.uint8).copy_(self._slots[block])
        self._touch(block)
        return size

    async def delete(self, key: ObjectKey) -> bool:
        self._check_open(key)
        block = self._find(key)
        if block is None:
            return False
        self._headers.pop(key)
        self._pool.forget(self._name(key))
        return True

    async def aclose(self) -> None:
        """The pool stays the engine's."""
        for key in [key for key in self._headers if self._find(key) is not None]:
            await self.delete(key)
        self._headers.clear()
        self._closed = True

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        for index, block in enumerate(blocks):
            if self._find(ObjectKey(namespace, block, group)) is None:
                return index
        return len(blocks)

    def keys(self) -> Iterable[ObjectKey]:
        return [key for key in self._headers if self._find(key) is not None]

    def accounting(self) -> dict[str, int]:
        """Bytes by what they are used for; they add up to `capacity_bytes`."""
        counts, size = self._pool.counts(), self._layout.object_bytes
        return {
            "free": counts.free * size,
            "cached": counts.cached * size,
            "reserved": (counts.used + counts.held) * size,
            "quarantined": 0,
        }

    def _name(self, key: ObjectKey) -> bytes:
        """What the pool knows an object by."""
        if (key.namespace, key.group) == (self._namespace, 0):
            return key.block
        return key.namespace + key.block + key.group.to_bytes(4, "little")

    def _find(self, key: ObjectKey) -> int | None:
        """The block of an object that came by `put` and is still the one under its key."""
        block, _ = self._headers.get(key, (None, b""))
        return block if block is not None and self._pool.find(self._name(key)) == block else None

    def _touch(self, block: int) -> None:
        self._pool.take(block)
        self._pool.release([block])

    def _remember(self, key: ObjectKey, block: int, header: bytes) -> None:
        self._headers[key] = (block, header)
        if len(self._headers) > 2 * self._pool.total:  # the pool evicts by itself and tells nobody
            self._headers = {key: each for key, each in self._headers.items() if self._find(key) is not None}

    def _check_open(self, key: ObjectKey) -> None:
        if self._closed:
            raise TierClosed("the tier is closed", tier=self.name, key=key)
