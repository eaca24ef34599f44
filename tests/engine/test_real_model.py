"""The real 0.5B model: logits, greedy text and tokens against transformers, and GGUF against the folder made from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.engine.batch import CausalModel
from forebay.engine.loading import LoadedModel, load_model
from tests.engine.tiny import batch_of, tiny_pool
from tests.engine_adapter.bench_tools import script

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 64
PROMPT = "Write a Python function that parses a date like 2024-05-17 and returns the day of the year."
TEXTS = [
    PROMPT,
    "def f(x):\n\tif x >= 10_000:\r\n        return {'a': [1, 22, 333], \"b\": x**2}  # don't\n\n\n",
    "日本語のテキストと中文混排。한국어도 있다 — ½ “quoted” naïve Ångström",
    "👩‍👩‍👧‍👦 emoji 🏳️‍🌈 and e\u0301 combining, \u00a0 no-break\u2028",
    "<|im_start|>user\nhi<|im_end|>\n<|fim_prefix|>a<|endoftext|><tool_call>",
    "   leading and trailing   ",
    "",
]


@pytest.fixture(scope="module")
def files() -> tuple[Path, Path]:
    fetch = script("fetch_model")
    folder = fetch.cache_dir() / fetch.FOLDER_NAME
    if not folder.exists():
        pytest.skip(f"{fetch.NAME} was not fetched: make model")
    return folder, fetch.cache_dir() / fetch.GGUF_NAME


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(files: tuple[Path, Path]) -> LoadedModel:
    return load_model(files[0], "fp32")


def logits_of(model: CausalModel, ids: list[int], pool: torch.Tensor, start: int = 0) -> torch.Tensor:
    return model.forward(batch_of([(ids, start, list(range(len(pool))))], BLOCK, all_logits=True), pool)


def pool_for(model: CausalModel) -> torch.Tensor:
    return tiny_pool(model.config, 4, BLOCK, model.kv_dtype)


def test_logits_and_64_greedy_tokens_are_those_of_transformers(files: tuple[Path, Path], loaded: LoadedModel) -> None:
    from transformers import AutoModelForCausalLM

    reference: Any = AutoModelForCausalLM.from_pretrained(files[0], dtype=torch.float32).eval()
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    pool = pool_for(loaded.model)
    found = logits_of(loaded.model, ids, pool)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    assert (found - expected).abs().max() < 1e-3
    text = reference.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=None)[0].tolist()
    written = [*ids, int(found[-1].argmax())]
    while len(written) < len(text):
        logits = logits_of(loaded.model, written[-1:], pool, len(written) - 1)
        written.append(int(logits[0].argmax()))
    assert written == text


def test_gguf_and_folder_are_one_model(files: tuple[Path, Path], loaded: LoadedModel) -> None:
    """The folder's weights are the GGUF's, rounded to bf16: logits differ by that and no more, tokens not at all."""
    gguf = load_model(files[1], "fp32")
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    assert gguf.tokenizer.encode_chat([{"role": "user", "content": PROMPT}]) == ids
    one, other = (logits_of(m.model, ids, pool_for(m.model)) for m in (gguf, loaded))
    rounded = load_model(files[1], "bf16")
    same = logits_of(rounded.model, ids, pool_for(rounded.model))
    folder_bf16 = load_model(files[0], "bf16")
    assert torch.equal(same, logits_of(folder_bf16.model, ids, pool_for(folder_bf16.model)))
    assert (one.argmax(-1) == other.argmax(-1)).float().mean() > 0.95
    assert (one - other).norm() / other.norm() < 0.02


def test_tokens_and_chats_are_those_of_transformers(files: tuple[Path, Path], loaded: LoadedModel) -> None:
    from transformers import AutoTokenizer

    from forebay.engine.tokenizer import load_tokenizer
    from forebay.engine.weights import open_weights

    reference: Any = AutoTokenizer.from_pretrained(files[0])
    gguf = load_tokenizer(files[1], open_weights(files[1]))
    for made in (loaded.tokenizer, gguf):
        for text in TEXTS:
            ids = reference(text, add_special_tokens=False).input_ids
            assert made.encode(text, special=True) == ids, text
            assert made.encode_prompt(text) == reference(text).input_ids, text
            assert made.decode(ids, skip_special=False) == reference.decode(ids, skip_special_tokens=False)
            assert b"".join(map(made.token_bytes, ids)).decode() == made.decode(ids, skip_special=False)
        assert 151645 in made.eos_token_ids and 151645 in made.special_ids
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXTS[2]}]
        for more in ({}, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}):
            expected = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **more)
            assert made.render_chat(chat, **more) == expected


@pytest.mark.parametrize(("precision", "least"), [("bf16", 0.9), ("int8", 0.8), ("int4", 0.6)])
def test_lower_precisions_stay_near_fp32(
    files: tuple[Path, Path], loaded: LoadedModel, precision: Any, least: float
) -> None:
    """Share of positions with the same likeliest token."""
    other = load_model(files[0], precision)
    ids = loaded.tokenizer.encode_chat([{"role": "user", "content": TEXTS[0] + TEXTS[1]}])
    expected, found = (logits_of(m.model, ids, pool_for(m.model)) for m in (loaded, other))
    agreement = (expected.argmax(-1) == found.argmax(-1)).float().mean()
    assert agreement > least
