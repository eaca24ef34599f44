"""A prefix store in a dict, on a clock of its own, that can be slow, late, full of holes or broken, as a seed says."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from forebay.engine.prefix import EngineLoad, Load, Match, NullPrefixStore, Store, Timings


class Clock:
    """Time that passes by being looked at, so that nothing waits in tests and deadlines still come."""

    def __init__(self, step_s: float = 0.001) -> None:
        self.now = 0.0
        self._step_s = step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now


@dataclass
class Trouble:
    """Probabilities, each drawn anew at each chance. *_polls: the most polls until something is known or done."""

    match_polls: int = 0
    load_polls: int = 0
    store_polls: int = 0
    hole: float = 0.0
    damaged: float = 0.0  # a hole that leaves NaN in the slot
    never: float = 0.0  # a block that is never ready; the deadline ends the wait
    raises: float = 0.0
    overstates: float = 0.0  # match promises more than there is
    worth: float = 1.0  # share of what is there that match advises to load


@dataclass
class _Match:
    load_blocks: int
    keys: list[bytes]


@dataclass
class _Load:
    owner: DictStore
    keys: list[bytes]
    slots: list[int]
    deadline: float
    left: list[int]  # polls until it is ready, -1: never
    state: list[bool | None] = field(default_factory=list)
    over: bool = False

    def ready(self, i: int) -> bool | None:
        self.owner.enter("ready")
        if self.state[i] is None and not self.over:
            if self.left[i] == 0:
                self.state[i] = self.owner.copy_in(self.keys[i], self.slots[i])
            else:
                self.left[i] -= 1
                self.owner.scribble(self.slots[i])
        return self.state[i]

    def cancel(self) -> None:
        self.owner.enter("cancel", may_raise=False)
        self.over = True
        self.owner.writing.difference_update(self.slots)
        self.owner.cancels += 1


@dataclass
class _Store:
    owner: DictStore
    keys: list[bytes]
    slots: list[int]
    polls: int
    copied: bool = False

    @property
    def done(self) -> bool:
        self.owner.enter("done", may_raise=False)
        if self.polls > 0:
            self.polls -= 1
            return False
        if not self.copied:  # read as late as possible: a slot given back too early would be stored with wrong bytes
            self.copied = True
            self.owner.copy_out(self.keys, self.slots)
        return True


class DictStore(NullPrefixStore):
    def __init__(self, block_tokens: int, trouble: Trouble | None = None, seed: int = 0) -> None:
        super().__init__(block_tokens)
        self.block_tokens = block_tokens
        self.blocks: dict[bytes, torch.Tensor] = {}
        self.trouble = trouble or Trouble()
        self.clock = Clock()
        self.deadline_s = 0.5
        self.timings: list[Timings] = []
        self.loads = self.loaded_blocks = self.cancels = self.matches = 0
        self.stored: list[bytes] = []
        self.writing: set[int] = set()
        self.closed = False
        self._random = random.Random(seed)
        self._thread: int | None = None
        self._pool = torch.empty(0)
        self._asked: dict[tuple[bytes, ...], int] = {}

    def fork(self, trouble: Trouble | None = None, seed: int = 0) -> DictStore:
        """Another engine's store over the same blocks."""
        other = DictStore(self.block_tokens, trouble, seed)
        other.blocks = self.blocks
        return other

    def enter(self, call: str, *, may_raise: bool = True) -> None:
        self._thread = self._thread or threading.get_ident()
        assert self._thread == threading.get_ident(), f"{call} on another thread"
        if may_raise and self._random.random() < self.trouble.raises:
            raise OSError("the store is broken")

    def attach(self, pool: torch.Tensor) -> None:
        self.enter("attach", may_raise=False)
        self._pool = pool

    def keys(self, token_ids: Sequence[int], extras: bytes = b"") -> list[bytes]:
        self.enter("keys")
        return super().keys(token_ids, extras)

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], engine_load: EngineLoad) -> Match | None:
        self.enter("match")
        asked = tuple(keys)
        left = self._asked.setdefault(asked, self._random.randint(0, self.trouble.match_polls))
        if left > 0:
            self._asked[asked] = left - 1
            return None
        del self._asked[asked]
        self.matches += 1
        there = 0
        while there < len(keys) and keys[there] in self.blocks:
            there += 1
        there = int(there * self.trouble.worth)
        if self._random.random() < self.trouble.overstates:
            there += 2
        return _Match(there, list(keys))

    def load(self, plan: Match, first: int, slots: Sequence[int]) -> Load:
        self.enter("load")
        assert isinstance(plan, _Match)
        self.loads += 1
        keys = plan.keys[first : first + len(slots)]
        assert len(keys) == len(slots) and first + len(slots) <= plan.load_blocks
        assert not self.writing & set(slots)
        self.writing.update(slots)
        left = [
            -1 if self._random.random() < self.trouble.never else self._random.randint(0, self.trouble.load_polls)
            for _ in slots
        ]
        deadline = self.clock.now + self.deadline_s * self._random.random()
        return _Load(self, keys, list(slots), deadline, left, [None] * len(slots))

    def store(self, keys: Sequence[bytes], token_ids: Sequence[int], first: int, slots: Sequence[int]) -> Store:
        self.enter("store")
        mine = list(keys[first : first + len(slots)])
        assert len(mine) == len(slots)
        polls = self._random.randint(0, self.trouble.store_polls)
        return _Store(self, mine, list(slots), polls)

    def report(self, timings: Timings) -> None:
        self.enter("report")
        self.timings.append(timings)

    def close(self) -> None:
        self.enter("close", may_raise=False)
        self.closed = True

    # --- bytes ---

    def scribble(self, slot: int) -> None:
        """A copy in progress: whoever looks before it is ready sees it."""
        self._pool[slot].fill_(float("nan"))

    def copy_in(self, key: bytes, slot: int) -> bool:
        self.writing.discard(slot)
        if self._random.random() < self.trouble.damaged:
            self.scribble(slot)
            return False
        if key not in self.blocks or self._random.random() < self.trouble.hole:
            return False
        self._pool[slot].copy_(self.blocks[key])
        self.loaded_blocks += 1
        return True

    def copy_out(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            held = self._pool[slot].clone()
            if key in self.blocks:
                assert torch.equal(self.blocks[key], held), "one key, two contents"
            self.blocks[key] = held
            self.stored.append(key)
