"""What operations of a client return: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.wire import SlotStatus


class TierRun(NamedTuple):
    """`blocks` blocks in a row that `tier` holds."""

    tier: str
    blocks: int


@dataclass(frozen=True)
class Match:
    """The leading present run of a batch of keys, and what loading from each tier costs now."""

    blocks: int
    runs: tuple[TierRun, ...]
    estimates: Mapping[str, TierEstimate]


@dataclass(frozen=True)
class PutResult:
    """Objects stored by this call; there already; being written by another session; refused for lack of room."""

    stored: int = 0
    present: int = 0
    pending: int = 0
    refused: int = 0


@dataclass(frozen=True)
class FlushResult:
    """Objects that a lower tier has; that no tier has; that only RAM has."""

    durable: int
    missing: int
    failed: int


@dataclass
class Slot:
    """One object of an allocation. `view`: its payload, writable, or None where the status is not WRITABLE."""

    index: int
    status: SlotStatus
    view: memoryview | None


def tally(statuses: bytes, stored: int) -> PutResult:
    return PutResult(
        stored,
        statuses.count(SlotStatus.PRESENT),
        statuses.count(SlotStatus.PENDING),
        statuses.count(SlotStatus.REFUSED),
    )
