"""The engine's thread and those who listen to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest
import torch

from forebay.engine.async_engine import AsyncEngine
from forebay.engine.batch import Batch
from forebay.engine.config import EngineConfig
from forebay.engine.errors import (
    BadLogits,
    DuplicateRequest,
    EngineClosed,
    EngineError,
    InvariantViolation,
    PromptTooLong,
    QueueFull,
    StepFailed,
)
from forebay.engine.outputs import RequestOutput, joined
from forebay.engine.params import SamplingParams
from forebay.engine.scheduler import Scheduler
from tests.engine.dict_store import DictStore, Trouble
from tests.engine.hash_model import FAILING_TOKEN, NAN_TOKEN, HashModel, expected

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
LONG = SamplingParams(max_tokens=10_000, temperature=0.0)
CONFIG = EngineConfig(block_tokens=4, pool_blocks=40, step_tokens=16, max_sequences=8)


class GatedModel(HashModel):
    """Computes only while the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        assert self.gate.wait(30)
        return super().forward(batch, pool)


@asynccontextmanager
async def running(
    model: HashModel | None = None, config: EngineConfig = CONFIG, store: DictStore | None = None
) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(model or HashModel(), None, config, store)
    try:
        yield engine
    finally:
        await engine.close()
        assert not any(thread.name == "forebay-engine" for thread in threading.enumerate())


async def answer(engine: AsyncEngine, prompt: Sequence[int], params: SamplingParams = GREEDY) -> RequestOutput:
    return joined([piece async for piece in engine.generate(prompt, params)])


async def idle(engine: AsyncEngine) -> None:
    """Every block and claim comes back soon."""
    for _ in range(500):
        try:
            await engine.check_idle()
            return
        except InvariantViolation:
            await asyncio.sleep(0.01)
    await engine.check_idle()


async def test_many_listeners_get_their_own_answers_and_the_store_sees_one_thread() -> None:
    store = DictStore(4, Trouble(match_polls=3, load_polls=3, store_polls=3))
    prompts = [[i, i + 1, i + 2] * (i % 7 + 1) for i in range(30)]
    async with running(store=store) as engine:  # DictStore itself fails on a second thread
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
        assert [list(one.token_ids) for one in answers] == [expected(prompt, 12) for prompt in prompts]
        await idle(engine)
        assert engine.stats().counters.finished["length"] == 30 and engine.stats().counters.store_errors == 0
    assert store.closed


async def test_pieces_come_as_they_are_made() -> None:
    async with running() as engine:
        pieces = [piece async for piece in engine.generate([1, 2, 3], GREEDY, "mine")]
        assert [len(piece.token_ids) for piece in pieces] == [1] * 12
        assert [piece.output_tokens for piece in pieces] == list(range(1, 13))
        assert {piece.request_id for piece in pieces} == {"mine"}
        last = pieces[-1].times
        assert last.first_token_s is not None and 0 < last.first_token_s <= last.total_s


@pytest.mark.parametrize("how", ["break", "cancel", "abort"])
async def test_whoever_stops_listening_gives_all_blocks_back(how: str) -> None:
    async with running() as engine:
        started = asyncio.Event()

        async def listen() -> RequestOutput | None:
            last = None
            async with aclosing(
                engine.generate([1, 2, 3], SamplingParams(max_tokens=150, temperature=0), "it")
            ) as pieces:
                async for piece in pieces:
                    last = piece
                    started.set()
                    if how == "break":
                        break
            return last

        task = asyncio.create_task(listen())
        await started.wait()
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "abort":
            engine.abort("it")
            last = await task
            assert last is not None and last.finish_reason in ("abort", "length")
        else:
            await task
        engine.abort("nobody")
        await idle(engine)
        assert engine.stats().running == 0
        assert list((await answer(engine, [5, 6])).token_ids) == expected([5, 6], 12)


async def test_an_error_reaches_its_listener_and_no_other() -> None:
    async with running() as engine:
        results = await asyncio.gather(
            answer(engine, [1, NAN_TOKEN]),
            answer(engine, [1, 2]),
            answer(engine, [FAILING_TOKEN]),
            answer(engine, [1] * 1000),
            return_exceptions=True,
        )
        assert isinstance(results[0], BadLogits) and isinstance(results[2], StepFailed)
        assert isinstance(results[1], RequestOutput) and list(results[1].token_ids) == expected([1, 2], 12)
        assert isinstance(results[3], PromptTooLong)
        await idle(engine)


async def test_a_full_queue_and_a_used_id_are_refused_at_once() -> None:
    model = GatedModel()
    config = EngineConfig(block_tokens=4, pool_blocks=40, max_sequences=1, max_waiting=2)
    async with running(model, config) as engine:
        model.gate.clear()
        tasks = [asyncio.create_task(answer(engine, [i])) for i in range(2)]
        await asyncio.sleep(0.05)
        started = time.monotonic()
        tasks.append(asyncio.create_task(answer(engine, [7])))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await answer(engine, [9])
        assert time.monotonic() - started < 5 and caught.value.limit == 2
        model.gate.set()
        for task, prompt in zip(tasks, ([0], [1], [7]), strict=True):
            assert list((await task).token_ids) == expected(prompt, 12)
        again = asyncio.create_task(answer_as(engine, "same", LONG))
        await asyncio.sleep(0.02)
        with pytest.raises(DuplicateRequest):
            await answer_as(engine, "same", GREEDY)
        again.cancel()


async def answer_as(engine: AsyncEngine, request_id: str, params: SamplingParams) -> None:
    async for _ in engine.generate([1], params, request_id):
        pass


async def test_closing_ends_what_runs_and_refuses_what_comes() -> None:
    async with running(config=EngineConfig(block_tokens=4, pool_blocks=2000)) as engine:
        task = asyncio.create_task(answer(engine, [1, 2], SamplingParams(max_tokens=3000, temperature=0)))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineClosed):
            await task
        with pytest.raises(EngineClosed):
            await answer(engine, [1])
        with pytest.raises(EngineClosed):
            await engine.clear_cache()
        assert engine.closed and engine.healthy


async def test_draining_lets_what_runs_end() -> None:
    async with running() as engine:
        task = asyncio.create_task(answer(engine, [1, 2]))
        await asyncio.sleep(0)
        await engine.close(drain=True)
        assert list((await task).token_ids) == expected([1, 2], 12)


async def test_a_failure_of_the_loop_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Scheduler.plan
    failing = threading.Event()

    def plan(self: Scheduler) -> object:
        if failing.is_set():
            failing.clear()
            raise MemoryError("no room for a list")
        return planned(self)

    monkeypatch.setattr(Scheduler, "plan", plan)
    async with running() as engine:
        tasks = [
            asyncio.create_task(answer(engine, [i], SamplingParams(max_tokens=150, temperature=0))) for i in range(3)
        ]
        await asyncio.sleep(0.02)
        failing.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert any(isinstance(result, StepFailed) and isinstance(result.__cause__, MemoryError) for result in results)
        await idle(engine)
        assert engine.healthy and list((await answer(engine, [3])).token_ids) == expected([3], 12)


async def test_a_broken_invariant_stops_the_engine_and_everybody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Scheduler.plan

    def plan(self: Scheduler) -> object:
        if self.running:
            self._pool._free.append(self.running[0].blocks[0])
            raise InvariantViolation("found")
        return planned(self)

    monkeypatch.setattr(Scheduler, "plan", plan)
    async with running() as engine:
        with pytest.raises(EngineError):
            await answer(engine, [1, 2, 3])
        for _ in range(200):
            if not engine.healthy:
                break
            await asyncio.sleep(0.01)
        assert not engine.healthy and engine.closed
        with pytest.raises(EngineClosed) as caught:
            await answer(engine, [1])
        assert isinstance(caught.value.__cause__, InvariantViolation)


async def test_an_engine_that_cannot_be_made_raises_where_it_was_asked_for() -> None:
    with pytest.raises(ValueError, match="smaller than one block"):
        AsyncEngine(HashModel(), None, EngineConfig(pool_bytes=10))


def test_listeners_may_live_on_several_event_loops_and_end_with_them() -> None:
    engine = AsyncEngine(HashModel(), None, CONFIG)
    results: dict[int, list[int]] = {}

    def serve(i: int) -> None:
        async def main() -> None:
            results[i] = list((await answer(engine, [i, i])).token_ids)
            if i == 0:  # a loop that ends while its request runs
                asyncio.get_running_loop().create_task(answer(engine, [9], SamplingParams(max_tokens=150)))
                await asyncio.sleep(0.01)

        asyncio.run(main())

    threads = [threading.Thread(target=serve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: expected([i, i], 12) for i in range(4)}

    async def end() -> None:
        await idle(engine)
        await engine.close()

    asyncio.run(end())
