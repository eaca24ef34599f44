"""The block pool against a plain model of it, and its memory."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.engine.errors import InvariantViolation
from forebay.engine.pool import BlockPool, pool_tensor
from tests.engine.hash_model import hash_config

BLOCKS = 7


def small_pool(blocks: int = BLOCKS, dtype: torch.dtype = torch.float32) -> BlockPool:
    return BlockPool(pool_tensor(hash_config(), blocks, 4, dtype), 4)


class PoolLife(RuleBasedStateMachine):
    """The model: what each block is to whom, in plain sets. Sequences are lists of blocks with the keys of a path in a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = small_pool()
        self.refs: dict[int, int] = {}
        self.holds: dict[int, int] = {}
        self.keys: dict[bytes, int] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.last_used: dict[bytes, int] = {}
        self.now = 0
        self.fresh = itertools.count()

    def idle(self) -> list[bytes]:
        return [key for key, block in self.keys.items() if not self.refs.get(block) and not self.holds.get(block)]

    def free(self) -> int:
        touched = [b for counts in (self.refs, self.holds) for b, count in counts.items() if count]
        return BLOCKS - len({*touched, *self.keys.values()})

    @rule()
    def allocate(self) -> None:
        idle, free = self.idle(), self.free()
        assert self.pool.available == len(idle) + free
        block = self.pool.allocate()
        if not idle and not free:
            assert block is None
            return
        assert block is not None and not self.refs.get(block) and not self.holds.get(block)
        gone = [key for key, there in self.keys.items() if there == block]
        assert bool(gone) == (free == 0)
        if gone:
            parents = {self.parents[key] for key in self.keys}
            leaves = [key for key in idle if key not in parents] or idle
            assert self.last_used[gone[0]] == min(self.last_used[key] for key in leaves)
            assert gone[0] in leaves
            del self.keys[gone[0]]
        assert self.pool.is_finite(block)
        self.pool.tensor[block].fill_(float("nan"))
        self.refs[block] = 1

    def _used(self) -> list[int]:
        return sorted(block for block, count in self.refs.items() if count)

    @precondition(lambda self: self._used())
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        named = set(self.keys.values())
        private = [block for block in self._used() if block not in named]
        if not private:
            return
        block = data.draw(st.sampled_from(private))
        parent = data.draw(st.sampled_from([None, *self.keys]))
        repeated = data.draw(st.booleans()) and bool(self.keys)
        key = data.draw(st.sampled_from(sorted(self.keys))) if repeated else b"%d" % next(self.fresh)
        assert self.pool.register(block, key, parent) == (not repeated)
        if not repeated:
            self.pool.tensor[block].fill_(1.0)
            self.keys[key], self.parents[key] = block, parent

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        block = self.pool.find(key)
        assert block == self.keys[key]
        self.pool.take(block)
        self.refs[block] = self.refs.get(block, 0) + 1

    @precondition(lambda self: self._used())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self._used()), min_size=1, unique=True))
        self.pool.release(blocks)
        self.now += 1
        for block in blocks:
            self.refs[block] -= 1
            for key, there in self.keys.items():
                if there == block:
                    self.last_used[key] = self.now

    @precondition(lambda self: self._used())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._used()))
        self.pool.hold(block)
        self.holds[block] = self.holds.get(block, 0) + 1

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(b for b, n in self.holds.items() if n)))
        self.pool.unhold(block)
        self.holds[block] -= 1

    @rule()
    def clear(self) -> None:
        idle = self.idle()
        assert self.pool.clear_cache() == len(idle)
        for key in idle:
            del self.keys[key]

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        used = len(self._used())
        held = sum(n > 0 and not self.refs.get(b) for b, n in self.holds.items())
        assert (counts.free, counts.cached, counts.used, counts.held) == (self.free(), len(self.idle()), used, held)
        assert counts.free + counts.cached + counts.used + counts.held == counts.total == BLOCKS
        for key, block in self.keys.items():
            assert self.pool.find(key) == block

    def teardown(self) -> None:
        for block, count in self.refs.items():
            for _ in range(count):
                self.pool.release([block])
        for block, count in self.holds.items():
            for _ in range(count):
                self.pool.unhold(block)
        self.pool.check_idle()


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=200, stateful_step_count=50)


def test_eviction_takes_the_tail_of_the_run_that_was_used_longest_ago() -> None:
    pool = small_pool(6)
    runs = {}
    for name in (b"a", b"b"):
        runs[name] = blocks = [block for _ in range(3) if (block := pool.allocate()) is not None]
        for i, block in enumerate(blocks):
            pool.register(block, name * (i + 1), name * i or None)
        pool.release(blocks)
    pool.take(runs[b"a"][0])
    pool.release(runs[b"a"][:1])  # used again, but not its tail
    assert [pool.allocate() for _ in range(6)] == [
        runs[b"a"][2],
        runs[b"a"][1],
        runs[b"b"][2],
        runs[b"b"][1],
        runs[b"b"][0],
        runs[b"a"][0],
    ]
    assert pool.allocate() is None


def test_a_claim_belongs_to_one_and_ends_by_its_owner_alone() -> None:
    pool, one, other = small_pool(), object(), object()
    pool.claim(b"k", one)
    with pytest.raises(InvariantViolation):
        pool.claim(b"k", other)
    pool.unclaim(b"k", other)
    assert pool.claimant(b"k") is one
    with pytest.raises(InvariantViolation, match="1 claims"):
        pool.check_idle()
    pool.unclaim(b"k", one)
    pool.check_idle()


def test_what_does_not_come_back_is_noticed() -> None:
    pool = small_pool()
    block = pool.allocate()
    assert block is not None
    with pytest.raises(InvariantViolation, match="1 blocks"):
        pool.check_idle()
    pool.release([block])
    with pytest.raises(InvariantViolation):
        pool.release([block])
    with pytest.raises(InvariantViolation):
        pool.unhold(block)
    with pytest.raises(InvariantViolation):
        pool.register(block, b"k", None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_are_contiguous_bytes_in_page_aligned_memory(dtype: torch.dtype) -> None:
    pool = small_pool(dtype=dtype)
    assert pool.tensor.is_contiguous() and pool.tensor.data_ptr() % 4096 == 0
    view = pool.tensor[3].view(torch.uint8).numpy()
    view[...] = 1
    block_bytes = pool.tensor[3].numel() * dtype.itemsize
    assert memoryview(view).nbytes == block_bytes
    whole = pool.tensor.view(torch.uint8).numpy().reshape(BLOCKS, block_bytes)
    assert np.array_equal(whole.sum(1), [block_bytes if i == 3 else 0 for i in range(BLOCKS)])


def test_a_block_with_one_value_that_is_not_finite_is_noticed() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        pool = small_pool(dtype=dtype)
        pool.tensor[2].fill_(6e4)
        assert pool.is_finite(2)
        for bad in (float("nan"), float("inf"), float("-inf")):
            pool.tensor[2].view(-1)[5] = bad
            assert not pool.is_finite(2)
