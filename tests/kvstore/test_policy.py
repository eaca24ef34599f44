"""Leaf-first LRU is exact, takes runs from their tail, and its memory follows what is live."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from forebay.kvstore import policy as policy_module
from forebay.kvstore.policy import Clock, LeafFirstLru

ROWS = 24


def make(rows: int = ROWS, clock: Clock | None = None) -> LeafFirstLru:
    return LeafFirstLru(np.zeros(rows, np.uint64), np.zeros(rows, np.uint8), clock or Clock())


def drain(policy: LeafFirstLru) -> list[int]:
    return list(iter(policy.pop, -1))


def touch(policy: LeafFirstLru, *rows: int) -> None:
    policy.touch(np.array(rows, np.int64))


def test_of_a_run_the_tail_goes_first_and_the_head_last() -> None:
    policy = make()
    touch(policy, 0, 1, 2, 3)
    touch(policy, 7, 8)
    assert drain(policy) == [3, 2, 1, 0, 8, 7]


def test_a_touched_run_goes_after_what_was_not_touched() -> None:
    policy = make()
    touch(policy, 0, 1, 2)
    touch(policy, 5)
    touch(policy, 0, 1)
    assert drain(policy) == [2, 5, 1, 0]


def test_a_parked_row_keeps_its_rank() -> None:
    policy = make()
    for row in (3, 1, 2):
        touch(policy, row)
    assert policy.pop() == 3
    policy.park(3)
    assert policy.pop() == 1
    policy.park(1)
    policy.unpark(1)
    policy.unpark(3)
    policy.unpark(3)
    assert drain(policy) == [3, 1, 2]


def test_a_forgotten_row_never_comes_back_and_its_number_may() -> None:
    policy = make()
    touch(policy, 1, 2)
    policy.forget(2)
    assert policy.pop() == 1
    policy.park(1)
    policy.forget(1)
    policy.unpark(1)
    touch(policy, 2)
    assert drain(policy) == [2]


def test_a_row_repeated_in_one_touch_counts_by_its_head_most_place() -> None:
    policy = make()
    touch(policy, 4, 5, 4, 6)
    assert drain(policy) == [6, 5, 4]


def test_the_oldest_stamp_is_that_of_the_next_victim_and_compares_between_policies() -> None:
    clock = Clock()
    one, other = make(clock=clock), make(clock=clock)
    assert one.oldest_stamp() == clock.now
    touch(one, 1, 2)
    touch(other, 3)
    assert one.oldest_stamp() < other.oldest_stamp()
    touch(one, 1, 2)  # its old entries are dead, and must not make it look old
    assert one.oldest_stamp() > other.oldest_stamp()
    assert one.pop() == 2


class Naive:
    """What the policy promises, in the plainest way: rows in order of last use, and which may go."""

    def __init__(self) -> None:
        self.order: list[int] = []  # least recently used first
        self.parked: set[int] = set()

    def touch(self, rows: list[int]) -> None:
        for row in reversed(rows):
            if row in self.order:
                self.order.remove(row)
            self.order.append(row)
            self.parked.discard(row)

    def oldest(self) -> int:
        return next((row for row in self.order if row not in self.parked), -1)


rows = st.integers(0, ROWS - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.lists(rows, min_size=1, max_size=6)),
        st.tuples(st.sampled_from(["evict", "park", "age"]), st.just([])),
        st.tuples(st.sampled_from(["unpark", "forget"]), st.lists(rows, min_size=1, max_size=1)),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(story=steps, segment=st.sampled_from([1, 2, 5, 4096]))
def test_the_order_is_that_of_a_plain_list(story: list[tuple[str, list[int]]], segment: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "_SEGMENT_ROWS", segment)
        clock = Clock()
        stamps = np.zeros(ROWS, np.uint64)
        policy, naive = LeafFirstLru(stamps, np.zeros(ROWS, np.uint8), clock), Naive()
        for verb, arguments in story:
            match verb:
                case "touch":
                    policy.touch(np.array(arguments, np.int64))
                    naive.touch(arguments)
                case "age":
                    oldest = naive.oldest()
                    assert policy.oldest_stamp() == (stamps[oldest] if oldest >= 0 else clock.now)
                case "evict" | "park":
                    row = policy.pop()
                    assert row == naive.oldest()
                    if row < 0:
                        continue
                    if verb == "park":
                        policy.park(row)
                        naive.parked.add(row)
                    else:
                        policy.forget(row)
                        naive.order.remove(row)
                case "unpark":
                    policy.unpark(arguments[0])
                    naive.parked.discard(arguments[0])
                case "forget" if arguments[0] in naive.order:
                    policy.forget(arguments[0])
                    naive.order.remove(arguments[0])
                    naive.parked.discard(arguments[0])
        for row in sorted(naive.parked):
            policy.unpark(row)
        assert drain(policy) == naive.order


@pytest.mark.parametrize("pattern", ["same", "random", "cyclic"])
def test_memory_follows_the_live_rows_however_often_they_are_touched(pattern: str) -> None:
    live, segment = 5000, policy_module._SEGMENT_ROWS
    policy = make(live)
    rng = np.random.default_rng(7)
    largest = 0
    for turn in range(2000):
        match pattern:
            case "same":
                chosen = np.arange(64)
            case "random":
                chosen = rng.integers(0, live, 200)
            case _:
                chosen = np.arange(turn * 100, turn * 100 + 100) % live
        policy.touch(chosen)
        sizes: dict[str, Any] = policy.debug()
        assert sizes["live"] <= live + 200
        largest = max(largest, sizes["logged"])
    assert largest <= 2 * live + 8 * segment
    assert policy.debug()["segments"] < 500
    left = drain(policy)
    assert len(left) == len(set(left))


def test_forgetting_all_and_starting_over_leaves_nothing_behind() -> None:
    policy = make(20_000)
    for _ in range(20):
        policy.touch(np.arange(20_000))
        for row in drain(policy):
            policy.forget(row)
    sizes = policy.debug()
    assert sizes["live"] == 0 and sizes["logged"] == 0 and sizes["segments"] <= 130


@given(
    story=st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=8), max_size=12),
    parts=st.lists(st.integers(1, 7), min_size=1, max_size=ROWS),
)
def test_rows_taken_in_parts_come_in_the_order_of_single_ones(story: list[list[int]], parts: list[int]) -> None:
    one, many = make(), make()
    for rows in story:
        touch(one, *rows)
        touch(many, *rows)
    parked = one.pop()
    if parked >= 0:
        assert many.take(1).tolist() == [parked]
        for policy in (one, many):
            policy.park(parked)
            policy.unpark(parked)
    taken: list[int] = []
    for part in parts * ROWS:
        rows = many.take(part).tolist()
        assert len(rows) <= part
        taken += rows
        if not rows:
            break
    assert taken == drain(one)
