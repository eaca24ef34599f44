"""Offline use from text to text, with a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.engine.config import EngineConfig
from forebay.engine.errors import EngineError, PromptTooLong
from forebay.engine.llm import LLM
from forebay.engine.loading import load_model
from forebay.engine.params import SamplingParams
from tests.engine.api.model_folder import save_tiny_model
from tests.engine.hash_model import HashModel

CONFIG = EngineConfig(precision="fp32", block_tokens=8, pool_blocks=100)
PROMPTS = ["The quick brown fox", "A forebay is é 漢 😀", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_text_goes_in_and_comes_out(folder: Path) -> None:
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    loaded = load_model(folder, "fp32")
    told: list[tuple[int, int]] = []
    with LLM(folder, config=CONFIG) as llm:  # the path alone
        outputs = llm.generate(PROMPTS, greedy, progress=lambda done, of: told.append((done, of)))
        ids = llm.generate([loaded.tokenizer.encode(prompt) for prompt in PROMPTS], greedy)
    assert told[-1] == (3, 3)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in ids]
    for output in outputs:
        assert output.text == loaded.tokenizer.decode(output.token_ids) and len(output.token_ids) == 30


def test_a_stop_string_ends_the_text_before_it(folder: Path) -> None:
    loaded = load_model(folder, "fp32")
    with LLM(loaded.model, loaded.tokenizer, CONFIG) as llm:
        (free,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=40, temperature=0.0))
        stop = free.text[10:13]
        (stopped,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=40, temperature=0.0, stop=("never so", stop)))
        assert stopped.text == free.text[: free.text.index(stop)]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert free.token_ids[: len(stopped.token_ids)] == stopped.token_ids
        token = free.token_ids[5]
        (by_id,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(token,)))
        assert (by_id.finish_reason, by_id.stop_reason) == ("stop", token) and by_id.token_ids[-1] == token
        before = by_id.token_ids[:-1]
        assert token not in before and by_id.text == loaded.tokenizer.decode(before)


def test_one_bad_prompt_among_more_than_may_wait_leaves_the_others_alone() -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    with LLM(HashModel(), None, EngineConfig(block_tokens=4, pool_blocks=20, max_waiting=3, max_sequences=2)) as llm:
        outputs = llm.generate([[i] for i in range(30)] + [[1] * 1000], params)
        assert [output.finish_reason for output in outputs] == ["length"] * 30 + ["error"]
        assert isinstance(outputs[-1].error, PromptTooLong)
        assert llm.generate([], params) == []
        with pytest.raises(ValueError, match="tokenizer"):
            llm.generate(["text"], params)
        with pytest.raises(ValueError, match="1 prompts and 2"):
            llm.generate([[1]], [params, params])


def test_a_tokenizer_that_cannot_decode_costs_its_request_alone() -> None:
    class Broken:
        def decode(self, ids: object) -> str:
            if 13 in list(ids):  # type: ignore[call-overload]
                raise KeyError(13)
            return "x"

        def encode(self, text: str) -> list[int]:
            return [1]

    with LLM(HashModel(), Broken(), EngineConfig(block_tokens=4, pool_blocks=60)) as llm:
        outputs = llm.generate([[i] for i in range(30)], SamplingParams(max_tokens=8, temperature=0.0))
        failed = [output for output in outputs if output.finish_reason == "error"]
        assert failed and all(13 not in output.token_ids for output in outputs)
        assert all(isinstance(output.error, EngineError) for output in failed)
        assert len(failed) < 30
        llm.core.check_idle()


def test_an_interrupt_leaves_nothing_behind() -> None:
    class Interrupted(HashModel):
        def forward(self, *args: object) -> object:  # type: ignore[override]
            if self.passes == 3:
                self.passes += 1
                raise KeyboardInterrupt
            return super().forward(*args)  # type: ignore[arg-type]

    with LLM(Interrupted(), None, EngineConfig(block_tokens=4, pool_blocks=60)) as llm:  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[i] * 9 for i in range(30)], SamplingParams(max_tokens=8))
        llm.core.check_idle()
        assert [o.finish_reason for o in llm.generate([[1]], SamplingParams(max_tokens=2))] == ["length"]
