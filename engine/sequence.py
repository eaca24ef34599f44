"""A request on its way through the engine: its tokens so far, and the state of each of its blocks.

Always true: blocks before `frontier` are READY; `offset` tokens of the block at `frontier` are computed; a block that is
TODO, LOADING or READY has a reference in the pool, an AWAITED one has none.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from forebay.engine.params import SamplingParams
from forebay.engine.prefix import Load

NO_BLOCK = -1


@dataclass(frozen=True)
class Request:
    """choice: which of several answers to one request; it only changes what is drawn."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    choice: int = 0


class BlockState(enum.Enum):
    TODO = enum.auto()  # to be computed here
    LOADING = enum.auto()  # the store may write it
    AWAITED = enum.auto()  # another sequence computes or loads it
    READY = enum.auto()  # its K and V are in the pool


@dataclass
class Fetch:
    """What a sequence has to do with the store while it starts. loads: with each, index of its first block, and how many."""

    started: float
    loading_since: float | None = field(default=None, init=False)
    ask_until: float
    asking: bool = True
    loads: list[tuple[Load, int, int]] = field(default_factory=list)


class SequenceState:
    def __init__(self, request: Request, keys: list[bytes], block_tokens: int, arrived: float) -> None:
        self.request = request
        self.block_tokens = block_tokens
        self.keys = keys
        self.tokens = list(request.prompt_ids)
        self.prompt_tokens = len(self.tokens)
        self.blocks: list[int] = []
        self.states: list[BlockState] = []
        self.frontier = 0
        self.offset = 0
        self.fetch: Fetch | None = None
        self.awaits = False  # any block AWAITED
        self.admissions = 0
        self.stalled_since: float | None = None
        self._table = np.empty(16, np.int64)
        # For the report and the output.
        self.arrived = arrived
        self.admitted = arrived
        self.first_token: float | None = None
        self.pool_blocks = 0
        self.store_blocks = 0
        self.store_wait_s = 0.0
        self.load_s = 0.0
        self.prefill_s = 0.0
        self.prefill_passes: list[tuple[int, int, float]] = []

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def asking(self) -> bool:
        return self.fetch is not None and self.fetch.asking

    def reset_blocks(self) -> None:
        """It has none any more."""
        self.blocks.clear()
        self.states.clear()
        self.frontier = self.offset = 0
        self.awaits = False
        self.stalled_since = None

    def append_block(self, block: int, state: BlockState) -> None:
        index = len(self.blocks)
        if index == len(self._table):
            self._table = np.concatenate((self._table, np.empty_like(self._table)))
        self.blocks.append(block)
        self.states.append(state)
        self._table[index] = block

    def set_block(self, index: int, block: int, state: BlockState) -> None:
        self.blocks[index] = block
        self.states[index] = state
        self._table[index] = block

    def lose_block(self, index: int) -> None:
        """Its memory can't be used any more; the block is to be had anew."""
        self.set_block(index, NO_BLOCK, BlockState.AWAITED)
        self.awaits = True

    def table(self, blocks: int) -> torch.Tensor:
        """The first `blocks` of them, int64; shares memory with this sequence."""
        return torch.from_numpy(self._table[:blocks])

    def slots(self, start: int, count: int, block_tokens: int) -> npt.NDArray[np.int64]:
        """Where in the pool tokens start .. start + count go."""
        positions = np.arange(start, start + count)
        return self._table[positions // block_tokens] * block_tokens + positions % block_tokens

    def owned(self) -> Iterator[int]:
        """Blocks it has a reference to."""
        return (block for block in self.blocks if block != NO_BLOCK)

    def skip_ready(self) -> None:
        """Move the frontier to the first block that isn't READY."""
        while self.frontier < len(self.states) and self.states[self.frontier] is BlockState.READY:
            self.frontier += 1

    def next_run(self, block_tokens: int) -> tuple[int, int]:
        """(start, count): the tokens that can be computed now, up to the first block that somebody else fills; or count 0."""
        states, first = self.states, self.frontier
        start = first * block_tokens + self.offset
        if first == len(states) - 1:  # the common case, a decode step
            return start, len(self.tokens) - start if states[first] is BlockState.TODO else 0
        last = first
        while last < len(states) and states[last] is BlockState.TODO:
            last += 1
        return start, max(0, min(last * block_tokens, len(self.tokens)) - start)

    def advance(self, count: int, block_tokens: int) -> list[int]:
        """`count` tokens more are computed. Returns indices of the blocks that got full."""
        full = []
        self.offset += count
        while self.offset >= block_tokens:
            self.states[self.frontier] = BlockState.READY
            full.append(self.frontier)
            self.frontier += 1
            self.offset -= block_tokens
        if full:
            self.skip_ready()
        return full


def runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of adjoining, ascending numbers."""
    first = 0
    for i in range(1, len(indices) + 1):
        if i == len(indices) or indices[i] != indices[i - 1] + 1:
            yield indices[first], i - first
            first = i
