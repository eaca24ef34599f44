"""Random lives of an engine against an oracle: the answers of each request alone, computed without any pool.

Requests share prefixes and come and go, the pool is small, the store is slow, lies and breaks, prompts are broken. Whatever
happens: every answer is right or its own error, every block returns, and nobody waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from forebay.engine.config import EngineConfig
from forebay.engine.core import EngineCore
from forebay.engine.errors import BadLogits, QueueFull, StepFailed
from forebay.engine.outputs import RequestOutput
from forebay.engine.params import SamplingParams
from forebay.engine.sampling import Sampled, SamplerState, sample
from forebay.engine.sequence import Request
from tests.engine.dict_store import DictStore, Trouble
from tests.engine.hash_model import FAILING_TOKEN, NAN_TOKEN, SAFE_TOKENS, HashModel, expected_logits

QUICK_SEEDS = range(60)
SLOW_SEEDS = range(1000, 1200)


def answer_alone(prompt: Sequence[int], params: SamplingParams, choice: int, most: int) -> list[int]:
    state = SamplerState.of(params, prompt, params.seed or 0, choice, frozenset(params.stop_token_ids))
    tokens = list(prompt)
    while len(tokens) - len(prompt) < most:
        sampled = sample(expected_logits(tokens).unsqueeze(0), [state])[0]
        assert isinstance(sampled, Sampled)
        tokens.append(sampled.token_id)
        state.note(sampled.token_id)
        if sampled.token_id in state.stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Asked:
    request: Request
    pieces: list[RequestOutput] = field(default_factory=list)
    aborted: bool = False


class Life:
    def __init__(self, seed: int, trouble: Trouble, store: DictStore | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.size = rng.choice((1, 2, 3, 4, 8)) if store is None else store.block_tokens
        self.config = EngineConfig(
            block_tokens=self.size,
            pool_blocks=rng.randint(4, 60),
            step_tokens=rng.choice((1, 2, 5, 16, 64)),
            max_sequences=rng.randint(1, 16),
            max_waiting=rng.choice((2, 100)),
            match_wait_s=rng.choice((0.0, 0.05, 1.0)),
            stall_s=1e9,
            store_generated=rng.random() < 0.8,
        )
        self.store = DictStore(self.size, trouble, seed) if store is None else store.fork(trouble, seed)
        self.core = EngineCore(HashModel(), None, self.config, self.store, clock=self.store.clock)
        self.asked: dict[str, Asked] = {}

    def prompt(self) -> list[int]:
        rng = self.rng
        most = min(self.core.limit_tokens - 1, 40)
        earlier = [list(a.request.prompt_ids) for a in self.asked.values()]
        prompt: list[int] = []
        if earlier and rng.random() < 0.7:
            shared = rng.choice(earlier)
            prompt = shared[: rng.choice((len(shared), rng.randint(0, len(shared))))]
        prompt += [rng.randrange(SAFE_TOKENS) for _ in range(rng.randint(0 if prompt else 1, 12))]
        if rng.random() < 0.05:
            prompt[rng.randrange(len(prompt))] = rng.choice((NAN_TOKEN, FAILING_TOKEN))
        return prompt[:most]

    def params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            max_tokens=rng.randint(1, 20),
            temperature=rng.choice((0.0, 0.0, 0.7, 2.0)),
            top_k=rng.choice((0, 5)),
            top_p=rng.choice((1.0, 0.8)),
            seed=rng.randrange(4),
            frequency_penalty=rng.choice((0.0, 0.5)),
            stop_token_ids=rng.choice(((), (1, 2, 3, 4, 5))),
            min_tokens=rng.choice((0, 3)),
            load=rng.random() < 0.9,
            store=rng.random() < 0.9,
            cache_salt=rng.choice((b"", b"", b"salt")),
        )

    def add(self) -> None:
        request = Request(str(len(self.asked)), tuple(self.prompt()), self.params(), self.rng.choice((0, 0, 1)))
        try:
            self.core.add(request)
        except QueueFull:
            assert self.config.max_waiting == 2
            return
        self.asked[request.request_id] = Asked(request)

    def run(self, requests: int) -> None:
        rng, steps = self.rng, 0
        while len(self.asked) < requests or self.core.has_work:
            if len(self.asked) < requests and rng.random() < 0.4:
                self.add()
            if self.asked and rng.random() < 0.02:
                self.abort(rng.choice(list(self.asked)))
            for output in self.core.step():
                self.asked[output.request_id].pieces.append(output)
            self.core.pool.check()
            steps += 1
            assert steps < 20_000, "somebody waits for ever"
        for _ in range(100):
            self.core.step()  # the store lets go
        self.core.check_idle()
        for asked in self.asked.values():
            self.check(asked)

    def abort(self, request_id: str) -> None:
        output = self.core.abort(request_id)
        if output is not None:
            assert output.finish_reason == "abort"
            self.asked[request_id].aborted = True

    def check(self, asked: Asked) -> None:
        request = asked.request
        got = [token for piece in asked.pieces for token in piece.token_ids]
        most = min(request.params.max_tokens, self.core.limit_tokens - len(request.prompt_ids))
        broken = set(request.prompt_ids) & {NAN_TOKEN, FAILING_TOKEN}
        if asked.aborted:
            assert not (broken and got)
            assert got == answer_alone(request.prompt_ids, request.params, request.choice, len(got))
            return
        last = asked.pieces[-1]
        if broken:
            assert last.finish_reason == "error" and got == []
            assert isinstance(last.error, BadLogits | StepFailed)
            return
        assert last.error is None, last.error
        assert got == answer_alone(request.prompt_ids, request.params, request.choice, most)
        assert last.output_tokens == len(got)
        assert last.cached_tokens.total < len(request.prompt_ids)
        assert all(piece.finish_reason is None for piece in asked.pieces[:-1])


def trouble_of(rng: random.Random) -> Trouble:
    if rng.random() < 0.25:
        return Trouble()

    def some(most: float) -> float:
        return rng.choice((0.0, 0.0, most * rng.random()))

    return Trouble(
        match_polls=rng.choice((0, 3, 200)),
        load_polls=rng.choice((0, 5, 300)),
        store_polls=rng.choice((0, 5, 40)),
        hole=some(0.5),
        damaged=some(0.3),
        never=some(0.2),
        raises=some(0.05),
        overstates=some(1.0),
        worth=rng.choice((1.0, 1.0, 0.5)),
    )


def live(seed: int, requests: int) -> None:
    rng = random.Random(seed)
    first = Life(seed, trouble_of(rng))
    first.run(requests)
    second = Life(seed, trouble_of(rng), first.store)  # the same prompts again, on an empty pool
    second.run(requests)
    first.core.close()
    second.core.close()
    assert first.store.closed and second.store.closed


@pytest.mark.parametrize("seed", QUICK_SEEDS)
def test_a_random_life_answers_right_and_gives_every_block_back(seed: int) -> None:
    live(seed, 15)


@pytest.mark.slow
def test_many_random_lives_answer_right_and_give_every_block_back() -> None:
    for seed in SLOW_SEEDS:
        try:
            live(seed, 25)
        except BaseException:
            print(f"replay: live({seed}, 25)")
            raise


def test_the_oracle_notices_a_block_that_is_somebody_elses() -> None:
    """The canary: with two blocks' contents exchanged the same request is answered wrongly."""
    life = Life(5, Trouble())
    params = SamplingParams(max_tokens=3, temperature=0.0)
    prompt = list(range(1, 3 * life.size + 2))
    pool = life.core.pool
    answers: list[list[int]] = []
    for request_id in ("before", "after"):
        life.core.add(Request(request_id, tuple(prompt), params))
        answers.append([])
        while life.core.has_work:
            answers[-1] += [token for output in life.core.step() for token in output.token_ids]
        first, second = (block for key in life.store.keys(prompt)[:2] if (block := pool.find(key)) is not None)
        kept = pool.tensor[first].clone()
        pool.tensor[first] = pool.tensor[second]
        pool.tensor[second] = kept
    assert answers[0] == answer_alone(prompt, params, 0, 3) != answers[1]
