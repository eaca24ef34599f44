"""Blocks from Forebay into slots of the pool, piece by piece, on threads of their own.

Covers one load from its first request to its last copy. Always true: a block is ready only when its whole payload lies in
its slot, was what was asked for, and was guarded: by key and generation where memory is shared, by checksums where it came
from below RAM or over a network. After `cancel` has returned, or all blocks are settled, no byte of a slot is written.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from forebay.clients import Namespace
from forebay.engine_adapter.bundled.link import AnyNamespace
from forebay.engine_adapter.bundled.pool import Expected, SlotMemory
from forebay.kvstore.objects import ObjectLayout

_FIRST_PIECE_BYTES: Final = 2 << 20
_MOST_PIECE_BYTES: Final = 32 << 20
_MOST_HOLES: Final = 4  # then the rest is given up: it was most likely evicted, and every question costs a round trip
_WAIT_SHARE: Final = 0.9  # of what is left, for the daemon's wait: its answer must come back in time, too
_UNKNOWN, _READY, _HOLE = range(3)
_RAM: Final = "ram"
RESIDENT: Final = "resident"  # was in the engine's pool when the rest was matched
_ANSWERS: Final = (None, True, False)


class BlockLoad:
    """What the engine holds of a load (`Load` in engine/prefix.py)."""

    def __init__(self, blocks: int, deadline: float) -> None:
        self.deadline = deadline
        self._states = bytearray(blocks)
        self._stopped = False
        self._copying = threading.Lock()

    def ready(self, i: int) -> bool | None:
        return _ANSWERS[self._states[i]]

    def cancel(self) -> None:
        self._stopped = True  # said first: else the copying thread could take the lock again, block after block
        with self._copying:
            for i, state in enumerate(self._states):
                if state == _UNKNOWN:
                    self._states[i] = _HOLE

    @property
    def stopped(self) -> bool:
        return self._stopped

    def write(self, pool: SlotMemory, slot: int, payload: memoryview, expected: Expected | None) -> bool:
        """Copy a payload into its slot. False: it isn't what was expected, or the load is cancelled."""
        with self._copying:
            if self._stopped:
                return False
            return pool.fill(slot, payload, expected)

    def settle(self, i: int, good: bool) -> None:
        with self._copying:
            if not self._stopped:
                self._states[i] = _READY if good else _HOLE


class Piece(Protocol):
    """Leading blocks of what was asked for, readable until the piece ends."""

    @property
    def views(self) -> list[memoryview]: ...
    @property
    def tiers(self) -> list[str]: ...
    def checksums(self) -> list[list[int]]: ...
    def valid(self) -> bool:
        """Whether all of it was there until now. Ask after the copies."""
        ...


@dataclass
class Wanted:
    """Blocks of one load. tiers: where each was when it was matched. verify_all: compare checksums of RAM's too."""

    keys: Sequence[bytes]
    words: npt.NDArray[np.uint32]
    slots: Sequence[int]
    tiers: Sequence[str]
    verify_all: bool


@dataclass
class Loaded:
    """What came of a load. blocks: by the tier they came from. lost: taken from under the copy. corrupt: wrong checksums."""

    blocks: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    holes: int = 0
    lost: int = 0
    corrupt: int = 0


def run(load: BlockLoad, wanted: Wanted, namespace: AnyNamespace, pool: SlotMemory, done: Loaded) -> None:
    """Load what is wanted until all is settled, the deadline passes or it is cancelled. Raises: what the client raises."""
    began_s = time.perf_counter()
    layout = namespace.layout()
    step, most = (max(1, size // layout.payload_bytes) for size in (_FIRST_PIECE_BYTES, _MOST_PIECE_BYTES))
    count, at = len(wanted.keys), 0
    try:
        while at < count and not load.stopped and done.holes < _MOST_HOLES:
            left_s = load.deadline - time.monotonic()
            if left_s <= 0:
                break
            end = min(at + step, count)
            words = wanted.words[at * layout.block_tokens : end * layout.block_tokens]
            with _ask(namespace, wanted.keys[at:end], words, left_s) as piece:
                came = _take(load, wanted, at, piece, layout, pool, done, remote=_verified_on_arrival(namespace))
            at += came
            if at < end and not load.stopped:
                load.settle(at, False)
                done.holes += 1
                at += 1
            step = min(2 * step, most)
    finally:
        load.cancel()
        done.seconds = time.perf_counter() - began_s


def _take(
    load: BlockLoad,
    wanted: Wanted,
    first: int,
    piece: Piece,
    layout: ObjectLayout,
    pool: SlotMemory,
    done: Loaded,
    *,
    remote: bool,
) -> int:
    """Copy a piece's blocks into their slots. Returns how many leading ones are good."""
    views, tiers = piece.views, piece.tiers
    matched = wanted.tiers[first : first + len(views)]
    below = {tier for tier in (*matched, *tiers) if tier not in (_RAM, RESIDENT)}
    checksums = piece.checksums() if (wanted.verify_all or below) and not remote else None
    good = 0
    for i, payload in enumerate(views):
        expected = Expected(layout, checksums[i]) if checksums is not None else None
        if not load.write(pool, wanted.slots[first + i], payload, expected):
            done.corrupt += not load.stopped
            break
        good += 1
    # Only now is it known that nothing was taken from under the copies.
    if good and not piece.valid():
        done.lost += good
        return 0
    for i in range(good):
        load.settle(first + i, True)
        was = wanted.tiers[first + i]
        done.blocks[was if was in below else tiers[i]] += 1
    return good


def _verified_on_arrival(namespace: AnyNamespace) -> bool:
    return not isinstance(namespace, Namespace) or namespace.core.remote


@contextmanager
def _ask(
    namespace: AnyNamespace, keys: Sequence[bytes], words: npt.NDArray[np.uint32], left_s: float
) -> Iterator[Piece]:
    wait_s = _WAIT_SHARE * left_s
    if isinstance(namespace, Namespace):
        with namespace.acquire(keys, words, wait_s=wait_s, timeout_s=left_s) as lease:
            yield lease
        return
    size = namespace.layout().payload_bytes
    memory = memoryview(bytearray(len(keys) * size))
    came = namespace.get_into(keys, memory, words, wait_s=wait_s, timeout_s=left_s)
    yield _Received([memory[i * size : (i + 1) * size] for i in range(came)])


class _Received:
    """Blocks that came by value, verified by the client."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.tiers = [_RAM] * len(views)

    def checksums(self) -> list[list[int]]:
        return []

    def valid(self) -> bool:
        return True
