"""Who computes what and when, seen from the passes that the model is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forebay.engine.config import EngineConfig
from forebay.engine.core import EngineCore
from forebay.engine.errors import PoolExhausted
from forebay.engine.outputs import RequestOutput, joined
from forebay.engine.params import SamplingParams
from forebay.engine.prefix import EngineLoad, Match, Store
from forebay.engine.sequence import Request
from tests.engine.dict_store import DictStore, Trouble
from tests.engine.hash_model import SAFE_TOKENS, HashModel, expected

SIZE = 4
PREFIX = [(7 * i + 3) % SAFE_TOKENS for i in range(30 * SIZE)]


class Engine:
    """A core that is stepped by hand."""

    def __init__(self, store: DictStore | None = None, **options: int | float) -> None:
        self.model = HashModel()
        self.store = store or DictStore(SIZE)
        options = {"pool_blocks": 200, "step_tokens": 64, "max_sequences": 64} | options
        self.config = EngineConfig(block_tokens=SIZE, **options)  # type: ignore[arg-type]
        self.core = EngineCore(self.model, None, self.config, self.store, clock=self.store.clock)
        self.pieces: dict[str, list[RequestOutput]] = {}
        self.first: list[str] = []  # request ids in the order of their first tokens

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 4) -> None:
        self.core.add(Request(request_id, tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0)))
        self.pieces[request_id] = []

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            for piece in self.core.step():
                if not self.pieces[piece.request_id]:
                    self.first.append(piece.request_id)
                self.pieces[piece.request_id].append(piece)

    def run(self) -> None:
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        self.step(50)
        self.core.check_idle()

    def answer(self, request_id: str) -> list[int]:
        return list(joined(self.pieces[request_id]).token_ids)

    @property
    def running(self) -> list[str]:
        return [seq.request.request_id for seq in self.core._scheduler.running]


def filled_store(prompt: Sequence[int] = PREFIX) -> DictStore:
    engine = Engine()
    engine.add("a", [*prompt, 1])
    engine.run()
    return engine.store


def test_fifty_requests_compute_a_shared_prefix_once() -> None:
    engine = Engine(pool_blocks=400)
    for i in range(50):
        engine.add(str(i), [*PREFIX, i])
    engine.run()
    assert all(engine.answer(str(i)) == expected([*PREFIX, i], 4) for i in range(50))
    assert engine.model.tokens == len(PREFIX) + 50 * 4  # the prefix once, and for each its own token and three more
    assert [engine.pieces[str(i)][-1].cached_tokens.pool for i in (0, 1, 49)] == [0, len(PREFIX), len(PREFIX)]


def test_fifty_requests_load_a_shared_prefix_once() -> None:
    engine = Engine(filled_store().fork(Trouble(match_polls=5, load_polls=9)), pool_blocks=400)
    engine.store.deadline_s = 1e6
    for i in range(50):
        engine.add(str(i), [*PREFIX, i])
    engine.run()
    assert all(engine.answer(str(i)) == expected([*PREFIX, i], 4) for i in range(50))
    assert engine.store.loaded_blocks == len(PREFIX) // SIZE
    assert engine.model.tokens == 50 * 4
    (cached,) = {engine.pieces[str(i)][-1].cached_tokens.total for i in range(50)}
    assert cached == len(PREFIX) and engine.pieces["0"][-1].cached_tokens.store == len(PREFIX)


@pytest.mark.parametrize("source", ["computed", "loaded"])
def test_a_sharer_takes_over_from_one_who_leaves(source: str) -> None:
    store = filled_store().fork(Trouble(load_polls=40)) if source == "loaded" else None
    engine = Engine(store, step_tokens=16)
    engine.add("first", [*PREFIX, 1])
    engine.add("second", [*PREFIX, 2])
    engine.step(3)
    assert engine.running == ["first", "second"]
    engine.core.abort("first")
    engine.run()
    assert engine.answer("second") == expected([*PREFIX, 2], 4)
    if source == "computed":  # what the first had computed is not done again
        assert engine.model.tokens <= len(PREFIX) + 4 + SIZE
    else:
        assert engine.pieces["second"][-1].cached_tokens.total == len(PREFIX) and engine.model.tokens == 4


def test_holes_are_computed_and_blocks_behind_them_are_kept() -> None:
    store = filled_store()
    keys = store.keys(PREFIX)
    for hole in (3, 4, 17):
        del store.blocks[keys[hole]]

    class Promising(DictStore):
        def match(self, keys: Sequence[bytes], token_ids: Sequence[int], engine_load: EngineLoad) -> Match | None:
            match = super().match(keys, token_ids, engine_load)
            assert match is not None
            match.load_blocks = len(keys)  # type: ignore[misc]
            return match

    promising = Promising(SIZE)
    promising.blocks = store.blocks
    engine = Engine(promising)
    engine.add("a", [*PREFIX, 1], max_tokens=1)
    engine.run()
    assert engine.answer("a") == expected([*PREFIX, 1], 1)
    assert engine.model.seen == [(2 * SIZE,), (SIZE,), (1,)]
    assert engine.pieces["a"][-1].cached_tokens.store == len(PREFIX) - 3 * SIZE


def test_others_go_on_while_one_waits_for_the_store() -> None:
    engine = Engine(filled_store().fork(Trouble(match_polls=30, load_polls=60), seed=3))
    engine.add("loads", [*PREFIX, 1])
    engine.step(2)
    engine.add("computes", [5] * 9, max_tokens=8)
    engine.run()
    assert engine.first == ["computes", "loads"]
    assert engine.pieces["loads"][-1].cached_tokens.store == len(PREFIX)


def test_at_its_deadline_a_load_is_stopped_and_the_rest_computed() -> None:
    engine = Engine(filled_store().fork(Trouble(never=0.4), seed=1))
    engine.add("a", [*PREFIX, 1])
    engine.run()
    assert engine.answer("a") == expected([*PREFIX, 1], 4)
    cached = engine.pieces["a"][-1].cached_tokens.store
    assert engine.store.cancels == 1 and 0 < cached < len(PREFIX)
    assert engine.model.tokens == len(PREFIX) - cached + 4
    assert engine.core.stats().counters.cancelled_loads == 1


def test_an_answer_that_does_not_come_is_not_waited_for() -> None:
    store = filled_store().fork()
    engine = Engine(store, match_wait_s=0.1)
    store.match = lambda *args: None  # type: ignore[method-assign]
    engine.add("a", [*PREFIX, 1])
    engine.run()
    assert engine.answer("a") == expected([*PREFIX, 1], 4)
    assert engine.core.stats().counters.late_matches == 1 and store.clock.now < 1.0


def test_every_pass_keeps_the_budget_and_serves_all_that_decode_first() -> None:
    engine = Engine(step_tokens=8)
    for i in range(3):
        engine.add(str(i), [i], max_tokens=40)
    engine.step()
    engine.add("long", PREFIX[:50])
    engine.step(8)
    assert engine.model.seen[1:9] == [(1, 1, 1, 5)] * 8
    engine.run()
    assert max(map(sum, engine.model.seen)) <= 8


def test_nobody_overtakes_a_prompt_that_waits_for_room() -> None:
    engine = Engine(pool_blocks=12)
    engine.add("a", PREFIX[:20], max_tokens=12)
    engine.step()
    engine.add("large", PREFIX[40:80], max_tokens=2)
    for i in range(5):
        engine.add(str(i), [i], max_tokens=2)
    engine.run()
    assert engine.first == ["a", "large", "0", "1", "2", "3", "4"]


def test_the_newest_gives_way_and_comes_back_first() -> None:
    engine = Engine(pool_blocks=12)
    for name, start in (("a", 0), ("b", 20), ("c", 40)):
        engine.add(name, PREFIX[start : start + 14], max_tokens=12)
    engine.add("d", [1], max_tokens=2)
    engine.step()
    assert engine.running == ["a", "b", "c"]
    while engine.running == ["a", "b", "c"]:
        engine.step()
    assert engine.running == ["a", "b"]
    assert [seq.request.request_id for seq in engine.core._scheduler.waiting] == ["c", "d"]
    engine.run()
    assert engine.first == ["a", "b", "c", "d"]
    for name, start in (("a", 0), ("b", 20), ("c", 40)):
        assert engine.answer(name) == expected(PREFIX[start : start + 14], 12)
    assert engine.core.stats().counters.preemptions >= 1


def test_a_store_that_never_lets_go_takes_half_of_the_pool_and_what_does_not_fit_fails() -> None:
    store = DictStore(SIZE, Trouble())
    engine = Engine(store, pool_blocks=20, stall_s=0.5)

    class Stuck:
        done = False

    def never(keys: Sequence[bytes], token_ids: Sequence[int], first: int, slots: Sequence[int]) -> Store:
        return Stuck()

    store.store = never  # type: ignore[method-assign]
    for i in range(4):
        engine.add(str(i), PREFIX[i * 20 : i * 20 + 20], max_tokens=2)
    engine.add("large", PREFIX[:78], max_tokens=2)
    engine.add("after", [1, 2], max_tokens=2)
    for _ in range(2000):
        engine.step()
    assert not engine.core.has_work
    assert engine.core.stats().blocks.held == 10 and engine.core.stats().counters.stores_skipped > 0
    assert all(engine.answer(str(i)) == expected(PREFIX[i * 20 : i * 20 + 20], 2) for i in range(4))
    assert isinstance(engine.pieces["large"][-1].error, PoolExhausted)
    assert engine.answer("after") == expected([1, 2], 2)


def test_blocks_of_a_load_that_cannot_be_stopped_are_never_used_again() -> None:
    store = filled_store().fork(Trouble(never=0.5), seed=2)
    engine = Engine(store)
    load = store.load

    def unstoppable(plan: Match, first: int, slots: Sequence[int]) -> object:
        def cancel() -> None:
            raise OSError("no")

        made = load(plan, first, slots)
        made.cancel = cancel  # type: ignore[method-assign]
        return made

    store.load = unstoppable  # type: ignore[method-assign, assignment]
    engine.add("a", [*PREFIX, 1])
    for _ in range(2000):
        engine.step()
    assert engine.answer("a") == expected([*PREFIX, 1], 4)
    lost = engine.core.stats().blocks.held
    assert 0 < lost < len(PREFIX) // SIZE
    assert engine.core.pool.available == 200 - lost


def test_what_a_request_cost_is_reported_with_its_first_token() -> None:
    engine = Engine(filled_store(PREFIX[:40]).fork(Trouble(load_polls=4), seed=1), step_tokens=16)
    engine.add("a", PREFIX[:70])
    engine.run()
    (timings,) = engine.store.timings
    assert timings.loaded_blocks == 10 and timings.load_s > 0
    assert [(cached, count) for cached, count, _ in timings.prefill] == [(40, 16), (56, 14)]
    assert all(seconds > 0 for _, _, seconds in timings.prefill)
    times = engine.pieces["a"][0].times
    assert times.first_token_s is not None and times.load_s + times.prefill_s < times.first_token_s


def test_requests_that_may_not_touch_the_store_do_not() -> None:
    store = filled_store().fork()
    engine = Engine(store)
    before = dict(store.blocks)
    params = SamplingParams(max_tokens=9, temperature=0.0, load=False, store=False)
    engine.core.add(Request("a", (*PREFIX, 1), params))
    engine.pieces["a"] = []
    engine.run()
    assert (store.matches, store.loads) == (0, 0) and store.blocks == before
    assert engine.pieces["a"][-1].cached_tokens.total == 0


def test_a_salt_keeps_requests_apart_in_the_pool_and_in_the_store() -> None:
    engine = Engine()
    for name, salt in (("a", b""), ("b", b"salt"), ("c", b"salt")):
        engine.core.add(Request(name, (*PREFIX, 1), SamplingParams(max_tokens=1, temperature=0.0, cache_salt=salt)))
        engine.pieces[name] = []
        engine.run()
    cached = [engine.pieces[name][-1].cached_tokens.total for name in "abc"]
    assert cached == [0, 0, len(PREFIX)]


def test_generated_blocks_are_kept_for_the_next_turn() -> None:
    for store_generated in (True, False):
        engine = Engine(store_generated=store_generated)
        engine.add("a", PREFIX[:10], max_tokens=20)
        engine.run()
        turn = [*PREFIX[:10], *engine.answer("a"), 1, 2]
        engine.add("b", turn)
        engine.run()
        assert engine.pieces["b"][-1].cached_tokens.pool == 28  # its last token was never computed
        other = Engine(engine.store.fork())
        other.add("b", turn)
        other.run()
        assert other.pieces["b"][-1].cached_tokens.store == (28 if store_generated else 8)
        assert other.answer("b") == expected(turn, 4)
