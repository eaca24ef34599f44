"""What the engine asks of its prefix store and gives to it, step by step.

Covers keys, the match that isn't known yet, loads until their deadline, blocks that a store reads, and reports. Leaves who
runs to scheduler.py. Always true: nothing here waits, save a load's cancel(); whatever a store does wrong is a miss that is
counted; a slot that a store may still write or read isn't given back to the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from forebay.engine.pool import BlockPool
from forebay.engine.prefix import EngineLoad, Load, PrefixStore, Store, Timings
from forebay.engine.sequence import BlockState, Fetch, SequenceState, runs
from forebay.engine.stats import Counters

_log = logging.getLogger(__name__)

_LEAST_MATCH_WAIT_S = 0.02  # a match takes a round trip between threads and a daemon, however short the prompt


class Exchange:
    def __init__(
        self,
        store: PrefixStore,
        pool: BlockPool,
        counters: Counters,
        clock: Callable[[], float],
        *,
        match_wait_s: float,
        store_generated: bool,
    ) -> None:
        self._store = store
        self._pool = pool
        self._counters = counters
        self._clock = clock
        self._match_wait_s = match_wait_s
        self._store_generated = store_generated
        self._reading: list[tuple[Store, list[int]]] = []
        self._held = 0
        # A store that never lets go must not take the whole pool.
        self._max_held = pool.total // 2
        self.tokens_per_s: float | None = None  # of prefill, measured

    @property
    def held(self) -> int:
        """Blocks that the store reads, once for each time it was given one."""
        return self._held

    def keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """One for each full block; none if the store can't say, and then nothing of this sequence is shared."""
        try:
            return self._store.keys(tokens, salt)
        except Exception as exc:
            self._failed(exc)
            return []

    # --- in ---

    def ask(self, seq: SequenceState, todo_tokens: int) -> None:
        """Begin to ask what of this sequence's prompt the store has."""
        now = self._clock()
        wait_s = self._match_wait_s
        if self.tokens_per_s:
            wait_s = min(wait_s, max(_LEAST_MATCH_WAIT_S, todo_tokens / self.tokens_per_s))
        if seq.fetch is None:
            seq.fetch = Fetch(now, now + wait_s)
        else:
            seq.fetch.asking, seq.fetch.ask_until = True, now + wait_s

    def poll(self, seq: SequenceState, waiting_tokens: int, running: int) -> None:
        """Take what has come since the last time."""
        fetch = seq.fetch
        if fetch is None:
            return
        if fetch.asking:
            self._poll_match(seq, fetch, waiting_tokens, running)
        if fetch.loads:
            now = self._clock()
            fetch.loads = [load for load in fetch.loads if self._poll_load(seq, *load, now)]
            seq.skip_ready()
        if not fetch.loads and not fetch.asking:
            self._end(seq, fetch)

    def cancel(self, seq: SequenceState) -> None:
        """The sequence gives up its blocks: afterwards none of them is LOADING."""
        fetch = seq.fetch
        if fetch is None:
            return
        for load, first, count in fetch.loads:
            self._stop_load(seq, load, first, count)
        fetch.loads.clear()
        self._end(seq, fetch)

    def _end(self, seq: SequenceState, fetch: Fetch) -> None:
        now = self._clock()
        seq.store_wait_s += now - fetch.started
        if fetch.loading_since is not None:
            seq.load_s += now - fetch.loading_since
        seq.fetch = None

    def _poll_match(self, seq: SequenceState, fetch: Fetch, waiting_tokens: int, running: int) -> None:
        size = self._pool.block_tokens
        usable = (len(seq.tokens) - 1) // size  # the last token is always computed: its logits are needed
        resident = seq.frontier
        while resident < usable and seq.states[resident] is BlockState.AWAITED:
            resident += 1
        load = EngineLoad(waiting_tokens, resident, len(seq.tokens), running)
        try:
            plan = self._store.match(seq.keys[:usable], seq.tokens, load)
            if plan is None:
                if self._clock() >= fetch.ask_until:
                    self._counters.late_matches += 1
                    fetch.asking = False
                return
            fetch.asking = False
            worth = min(plan.load_blocks, usable)
            wanted = [i for i in range(seq.frontier, worth) if seq.states[i] is BlockState.TODO]
            for first, count in runs(wanted):
                fetch.loading_since = fetch.loading_since or self._clock()
                load_ = self._store.load(plan, first, seq.blocks[first : first + count])
                fetch.loads.append((load_, first, count))
                seq.states[first : first + count] = [BlockState.LOADING] * count
        except Exception as exc:
            fetch.asking = False
            self._failed(exc)

    def _poll_load(self, seq: SequenceState, load: Load, first: int, count: int, now: float) -> bool:
        """Whether there is anything left to wait for."""
        try:
            left = self._take_ready(seq, load, first, count)
            late = left and now >= load.deadline
        except Exception as exc:
            self._failed(exc)
            left = late = True
        if late:
            self._counters.cancelled_loads += 1
            self._stop_load(seq, load, first, count)
            return False
        return left

    def _take_ready(self, seq: SequenceState, load: Load, first: int, count: int) -> bool:
        """Note what has come and what won't. Whether any is still unknown."""
        unknown = False
        for i in range(first, first + count):
            if seq.states[i] is not BlockState.LOADING:
                continue
            ready = load.ready(i - first)
            if ready is None:
                unknown = True
            elif ready:
                seq.states[i] = BlockState.READY
                seq.store_blocks += seq.first_token is None
                self.publish(seq, i)
            else:
                self._hole(seq, i)
        return unknown

    def _stop_load(self, seq: SequenceState, load: Load, first: int, count: int) -> None:
        """Afterwards none of these blocks is LOADING."""
        mine = range(first, first + count)
        try:
            load.cancel()
        except Exception as exc:
            self._failed(exc)
            for i in mine:
                if seq.states[i] is BlockState.LOADING:
                    # A copy may still be on its way: the block stays out of the pool for good, and another is to be had.
                    self._pool.hold(seq.blocks[i])
                    self._pool.release([seq.blocks[i]])
                    seq.lose_block(i)
        try:
            self._take_ready(seq, load, first, count)
        except Exception as exc:
            self._failed(exc)
        for i in mine:
            if seq.states[i] is BlockState.LOADING:
                self._hole(seq, i)

    def _hole(self, seq: SequenceState, index: int) -> None:
        """This block didn't come: it is computed, in memory that has no half-written or damaged bytes."""
        self._pool.scrub(seq.blocks[index])
        seq.states[index] = BlockState.TODO

    # --- out ---

    def publish(self, seq: SequenceState, index: int) -> bool:
        """A block of the sequence is whole: others find it from now on. False if they find another one with its key."""
        if index >= len(seq.keys):
            return False
        key = seq.keys[index]
        self._pool.unclaim(key, seq)
        return self._pool.register(seq.blocks[index], key, seq.keys[index - 1] if index else None)

    def full(self, seq: SequenceState, indices: Sequence[int]) -> None:
        """These blocks were computed: publish and store them."""
        size = self._pool.block_tokens
        if indices[-1] >= len(seq.keys):
            # It keeps those it has if the store can't say: its claims are under them.
            seq.keys = self.keys(seq.tokens, seq.params.cache_salt) or seq.keys
        new = [i for i in indices if self.publish(seq, i)]
        if not seq.params.store:
            return
        if not self._store_generated:
            new = [i for i in new if (i + 1) * size <= seq.prompt_tokens]
        for first, count in runs(new):
            self._offer(seq, first, count)

    def _offer(self, seq: SequenceState, first: int, count: int) -> None:
        if self._held + count > self._max_held:
            self._counters.stores_skipped += count
            return
        blocks = seq.blocks[first : first + count]
        try:
            reading = self._store.store(seq.keys, seq.tokens, first, blocks)
        except Exception as exc:
            self._failed(exc)
            return
        for block in blocks:
            self._pool.hold(block)
        self._held += count
        self._counters.offered_blocks += count
        if self._reads(reading, blocks):
            self._reading.append((reading, blocks))

    def poll_reading(self) -> None:
        """Give back what the store doesn't read any more."""
        if self._reading:
            self._reading = [(reading, blocks) for reading, blocks in self._reading if self._reads(reading, blocks)]

    def _reads(self, reading: Store, blocks: Sequence[int]) -> bool:
        """Whether to ask again; if not, the blocks are given back."""
        try:
            if not reading.done:
                return True
        except Exception as exc:
            self._failed(exc)  # it may still read: these blocks stay out of the pool for good
            return False
        for block in blocks:
            self._pool.unhold(block)
        self._held -= len(blocks)
        return False

    @property
    def reading(self) -> bool:
        return bool(self._reading)

    def report(self, seq: SequenceState) -> None:
        """Its first token is there."""
        try:
            self._store.report(Timings(tuple(seq.prefill_passes), seq.store_blocks, seq.load_s))
        except Exception as exc:
            self._failed(exc)

    def close(self) -> None:
        try:
            self._store.close()
        except Exception as exc:
            self._failed(exc)

    def _failed(self, exc: Exception) -> None:
        self._counters.store_errors += 1
        _log.warning("the prefix store failed, which counts as a miss", extra={"error": type(exc).__name__})
