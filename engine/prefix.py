"""Where prefixes are kept beyond the engine's own pool, as the engine sees it.

Covers the boundary and its default, a store that keeps nothing. Always true: all of it is called from the engine's one
thread and never blocks; a store can only save time, and whatever goes wrong inside it is a miss.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class EngineLoad:
    """What the engine has to do now, for a plan: loading pays only as far as it is sooner than computing.

    waiting_tokens: prompt tokens to be computed before this request's. resident_blocks: leading blocks already in the pool.
    prompt_tokens: of this request. running: sequences that decode.
    """

    waiting_tokens: int
    resident_blocks: int
    prompt_tokens: int
    running: int


@dataclass(frozen=True)
class Timings:
    """What a request cost, for the store's cost model. Seconds.

    prefill: (cached tokens before, tokens computed, seconds), one for each forward pass that only prefilled.
    loaded_blocks, load_s: brought in by the store and how long the request waited for them.
    """

    prefill: tuple[tuple[int, int, float], ...] = ()
    loaded_blocks: int = 0
    load_s: float = 0.0


class Match(Protocol):
    """What the store advises for one prompt."""

    @property
    def load_blocks(self) -> int:
        """Leading blocks worth loading, counted from the prompt's first block; not more than `resident_blocks` if none is."""
        ...


class Load(Protocol):
    """Blocks on their way into slots of the pool."""

    @property
    def deadline(self) -> float:
        """time.monotonic() from which on computing what isn't there is better than waiting."""
        ...

    def ready(self, i: int) -> bool | None:
        """Of the i-th block asked for: True, its slot holds verified bytes; False, it won't come (a hole); None, unknown."""
        ...

    def cancel(self) -> None:
        """Stop. Returns only when no copy can still write the slots, which takes at most one block's copy. Idempotent."""
        ...


class Store(Protocol):
    """Blocks on their way out of the pool."""

    @property
    def done(self) -> bool:
        """The slots are not read any more, whether or not the store kept them."""
        ...


class PrefixStore(Protocol):
    """Keeps full blocks by rolling prefix key."""

    def attach(self, pool: torch.Tensor) -> None:
        """Called once, first: slots below are indices of this tensor's first dimension (batch.py has its layout)."""
        ...

    def keys(self, token_ids: Sequence[int], extras: bytes = b"") -> list[bytes]:
        """One key for each full block; a key stands for its block and all before it. extras: the request's cache salt.

        May be called with growing prefixes of the same sequence.
        """
        ...

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], engine_load: EngineLoad) -> Match | None:
        """None: not known yet, ask again with the same keys. Once known it is the answer to one ask, and then forgotten."""
        ...

    def load(self, plan: Match, first: int, slots: Sequence[int]) -> Load:
        """Start copying the plan's blocks first .. first + len(slots) into these slots of the pool, in order."""
        ...

    def store(self, keys: Sequence[bytes], token_ids: Sequence[int], first: int, slots: Sequence[int]) -> Store:
        """Start storing: slots hold the blocks first .. first + len(slots) of the sequence with these keys and token ids."""
        ...

    def report(self, timings: Timings) -> None: ...

    def close(self) -> None: ...


class _Nothing:
    load_blocks = 0
    deadline = 0.0
    done = True

    def ready(self, i: int) -> bool | None:
        return False

    def cancel(self) -> None:
        pass


class NullPrefixStore:
    """Keeps nothing. The default, and the baseline of every comparison; its keys serve the pool's own prefix cache."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens

    def attach(self, pool: torch.Tensor) -> None:
        pass

    def keys(self, token_ids: Sequence[int], extras: bytes = b"") -> list[bytes]:
        size = self._block_tokens
        above = hashlib.sha256(extras).digest()[:16]
        keys = []
        for start in range(0, len(token_ids) - size + 1, size):
            tokens = struct.pack(f"<{size}I", *token_ids[start : start + size])
            above = hashlib.sha256(above + tokens).digest()[:16]
            keys.append(above)
        return keys

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], engine_load: EngineLoad) -> Match | None:
        return _Nothing()

    def load(self, plan: Match, first: int, slots: Sequence[int]) -> Load:
        return _Nothing()

    def store(self, keys: Sequence[bytes], token_ids: Sequence[int], first: int, slots: Sequence[int]) -> Store:
        return _Nothing()

    def report(self, timings: Timings) -> None:
        pass

    def close(self) -> None:
        pass
