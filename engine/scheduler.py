"""Who computes what in the next forward pass.

Covers the waiting queue, admission, sharing of prefixes, room for new tokens, preemption, and the token budget. Leaves what a
prefix store does to exchange.py and all arithmetic to core.py. Always true: requests start in the order they came; the oldest
that runs can always go on, since newer ones lose their blocks to it; whoever leaves gives all blocks and claims back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from forebay.engine.config import EngineConfig
from forebay.engine.errors import PoolExhausted
from forebay.engine.exchange import Exchange
from forebay.engine.pool import BlockPool
from forebay.engine.sequence import NO_BLOCK, BlockState, SequenceState
from forebay.engine.stats import Counters


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count of a sequence, to be computed in the next pass. last: then its next token can be chosen."""

    seq: SequenceState
    start: int
    count: int

    @property
    def last(self) -> bool:
        return self.start + self.count == len(self.seq.tokens)


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        exchange: Exchange,
        config: EngineConfig,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._exchange = exchange
        self._counters = counters
        self._clock = clock
        self._step_tokens = config.step_tokens
        self._max_running = min(config.max_sequences, config.step_tokens)
        self._stall_s = config.stall_s
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # oldest first

    def add(self, seq: SequenceState) -> None:
        self.waiting.append(seq)

    def remove(self, seq: SequenceState) -> None:
        """It has ended, well or not."""
        if seq in self.running:
            self.running.remove(seq)
            self._give_back(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def plan(self) -> tuple[list[Chunk], list[tuple[SequenceState, PoolExhausted]]]:
        """The next pass, decoding sequences first; and who can't go on at all, and is still to be removed."""
        self._exchange.poll_reading()
        for seq in list(self.running):
            if seq.blocks:  # not preempted by one before it
                self._follow(seq)
            if seq.blocks:
                self._room(seq)
        # Only now: who starts must not get the room that those who run need, and lose it at once.
        old = len(self.running)
        self._admit()
        for seq in self.running[old:]:
            if seq.blocks:
                self._follow(seq)
        now = self._clock()
        # Only one that is alone stalls: the one that runs, or the first that waits.
        failed = [
            (seq, PoolExhausted(f"no block came free in {self._stall_s:g} s"))
            for seq in (*self.running[:1], *islice(self.waiting, 1))
            if seq.stalled_since is not None and now - seq.stalled_since >= self._stall_s
        ]
        return self._chunks(), failed

    def _chunks(self) -> list[Chunk]:
        size = self._pool.block_tokens
        decodes: list[Chunk] = []
        prefills: list[Chunk] = []
        for seq in self.running:
            if seq.asking or len(seq.tokens) > len(seq.blocks) * size:
                continue
            start, count = seq.next_run(size)
            if count:
                (decodes if count == 1 and start >= seq.prompt_tokens else prefills).append(Chunk(seq, start, count))
        budget = self._step_tokens - len(decodes)  # never negative: not more run than step_tokens
        chunks = decodes
        for chunk in prefills:
            if budget <= 0:
                break
            if chunk.count > budget:
                chunk = Chunk(chunk.seq, chunk.start, budget)
            chunks.append(chunk)
            budget -= chunk.count
        return chunks

    # --- admission ---

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_running:
            seq = self.waiting[0]
            if not self._start(seq):
                if not self.running:
                    seq.stalled_since = seq.stalled_since or self._clock()
                return
            seq.stalled_since = None
            self.running.append(self.waiting.popleft())

    def _start(self, seq: SequenceState) -> bool:
        """Give it all blocks that its tokens so far need, shared ones first. False, and nothing is changed: no room yet."""
        pool, size = self._pool, self._pool.block_tokens
        usable = min((len(seq.tokens) - 1) // size, len(seq.keys))  # the last token is always computed
        found = [pool.find(key) for key in seq.keys[:usable]]
        claimed = [
            block is None and pool.claimant(key) is not None for block, key in zip(found, seq.keys, strict=False)
        ]
        total = -(-len(seq.tokens) // size)
        idle = sum(block is not None and pool.is_idle(block) for block in found)
        fresh = total - sum(block is not None for block in found) - sum(claimed)
        # Some blocks are left to those who run, or they would soon preempt the one that starts now.
        spare = pool.total // 100 if self.running else 0
        if fresh + idle + spare > pool.available:
            return False
        for block in found:
            if block is not None:
                pool.take(block)
        todo = 0
        for i in range(total):
            shared = found[i] if i < usable else None
            if shared is not None:
                seq.append_block(shared, BlockState.READY)
            elif i < usable and claimed[i]:
                seq.append_block(NO_BLOCK, BlockState.AWAITED)
                seq.awaits = True
            else:
                block = pool.allocate()
                assert block is not None
                seq.append_block(block, BlockState.TODO)
                self._claim(seq, i)
                todo += i < usable
        seq.skip_ready()
        seq.admissions += 1
        if seq.admissions == 1:
            seq.admitted = self._clock()
        if seq.first_token is None:
            seq.pool_blocks = sum(block is not None for block in found)
            seq.store_blocks = 0
        if todo and seq.params.load:
            self._exchange.ask(seq, todo * size)
        return True

    def _claim(self, seq: SequenceState, index: int) -> None:
        if index < len(seq.keys):
            key = seq.keys[index]
            if self._pool.find(key) is None and self._pool.claimant(key) is None:
                self._pool.claim(key, seq)

    # --- going on ---

    def _follow(self, seq: SequenceState) -> None:
        """Take what others and the store have brought since the last step."""
        if seq.awaits:
            self._take_shared(seq)
        if seq.fetch is not None:
            self._exchange.poll(seq, self._tokens_before(seq) if seq.asking else 0, len(self.running) - 1)

    def _tokens_before(self, seq: SequenceState) -> int:
        """To be computed for older ones."""
        size = self._pool.block_tokens
        older = self.running[: self.running.index(seq)]
        return sum(len(other.tokens) - other.frontier * size - other.offset for other in older)

    def _take_shared(self, seq: SequenceState) -> None:
        """Awaited blocks, in order, up to the first that is still on its way. What nobody brings any more is ours to bring."""
        taken_over = 0
        seq.awaits = False
        for i in range(seq.frontier, len(seq.states)):
            if seq.states[i] is not BlockState.AWAITED:
                continue
            key = seq.keys[i]
            block = self._pool.find(key)
            if block is not None:
                self._pool.take(block)
                seq.set_block(i, block, BlockState.READY)
                seq.pool_blocks += seq.first_token is None
                continue
            if self._pool.claimant(key) not in (None, seq) or (block := self._allocate(seq)) is None:
                seq.awaits = bool(seq.blocks)
                break
            seq.set_block(i, block, BlockState.TODO)
            self._claim(seq, i)
            taken_over += 1
        seq.skip_ready()
        if taken_over and seq.blocks and seq.params.load:
            self._exchange.ask(seq, taken_over * self._pool.block_tokens)

    def _room(self, seq: SequenceState) -> None:
        """See that its tokens have blocks."""
        if len(seq.tokens) > len(seq.blocks) * self._pool.block_tokens:
            block = self._allocate(seq)
            if block is not None:
                seq.append_block(block, BlockState.TODO)

    def _allocate(self, seq: SequenceState) -> int | None:
        """A block for a sequence that runs, if need be from the newest that runs; that may be the sequence itself."""
        while (block := self._pool.allocate()) is None:
            newest = self.running[-1]
            if newest is seq and len(self.running) == 1:
                # All others are held by the store, which lets go of them soon.
                seq.stalled_since = seq.stalled_since or self._clock()
                return None
            self._preempt(newest)
            if newest is seq:
                return None
        seq.stalled_since = None
        return block

    def _preempt(self, seq: SequenceState) -> None:
        """It starts again later, before all others that wait; its full blocks stay cached as long as nobody needs the room."""
        self._counters.preemptions += 1
        self.running.remove(seq)
        self._give_back(seq)
        self.waiting.appendleft(seq)

    def _give_back(self, seq: SequenceState) -> None:
        self._exchange.cancel(seq)
        for key in seq.keys:
            self._pool.unclaim(key, seq)
        self._pool.release(seq.owned())
        seq.reset_blocks()
