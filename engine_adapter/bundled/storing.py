"""Blocks from slots of the pool into Forebay, one batch after the other on one thread.

Always true: what waits is bounded, and what finds no room is dropped and counted; slots of a batch are read until its `done`
is true and never after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final

from forebay.clients import PutResult
from forebay.engine_adapter.bundled.link import Away, Link
from forebay.engine_adapter.bundled.pool import SlotMemory
from forebay.kvstore.keys import token_words

_TIMEOUT_S: Final = 5.0


class BlockStore:
    """What the engine holds of a store (`Store` in engine/prefix.py)."""

    done = False


@dataclass(frozen=True)
class Batch:
    """Adjoining blocks of one sequence. parent: key of the block before the first, None at the root."""

    keys: Sequence[bytes]
    token_ids: Sequence[int]
    parent: bytes | None
    first: int
    slots: Sequence[int]


class Storer:
    """`submit` is for the engine's thread."""

    def __init__(self, link: Link, *, queue_bytes: int) -> None:
        self._link, self._queue_bytes = link, queue_bytes
        self._queued = 0
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forebay-engine-store")
        self._pending: set[Future[None]] = set()

    @property
    def queued_bytes(self) -> int:
        return self._queued

    def submit(self, batch: Batch, pool: SlotMemory) -> BlockStore:
        """Store a batch soon, unless the queue is full or there is no daemon now."""
        handle = BlockStore()
        size = len(batch.slots) * pool.block_bytes
        dropped = self._link.away
        with self._lock:
            # A batch larger than the whole queue is taken when nothing else waits.
            dropped |= bool(self._queued) and self._queued + size > self._queue_bytes
            if not dropped:
                self._queued += size
        if dropped:
            handle.done = True
            self._link.count("store_dropped_blocks", len(batch.slots))
            return handle
        self.also(lambda: self._store(batch, pool, handle, size))
        return handle

    def also(self, work: Callable[[], None]) -> None:
        """Do something on the same thread after all that waits."""
        future = self._thread.submit(work)
        with self._lock:
            self._pending.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._pending.discard(future)

    def wait(self, timeout_s: float) -> bool:
        """Wait until what waits now is stored or given up. False when time ran out."""
        with self._lock:
            pending = set(self._pending)
        return not wait(pending, timeout=timeout_s).not_done

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _store(self, batch: Batch, pool: SlotMemory, handle: BlockStore, size: int) -> None:
        try:
            result = self._put(batch, pool)
            self._link.worked()
            self._link.count("stored_blocks", result.stored)
            self._link.count("stored_bytes", result.stored * pool.block_bytes)
            self._link.count("already_present_blocks", result.present + result.pending)
            self._link.count("store_refused_blocks", result.refused)
        except Away:
            self._link.count("store_dropped_blocks", len(batch.slots))
        except Exception as exc:
            self._link.trouble("store", exc)
        finally:
            handle.done = True
            with self._lock:
                self._queued -= size

    def _put(self, batch: Batch, pool: SlotMemory) -> PutResult:
        namespace = self._link.open(_TIMEOUT_S)
        payloads = pool.payloads(batch.slots)
        words = token_words(batch.token_ids)
        return namespace.put(batch.keys, words, payloads, batch.parent, batch.first, timeout_s=_TIMEOUT_S)
