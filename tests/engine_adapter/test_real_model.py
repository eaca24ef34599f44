"""The real 0.5B model in both precisions: warm answers keep the rule that the demo holds them to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forebay.engine_adapter.near_tie import judge, largest_logit_change
from forebay.engine_adapter.transformers import PrefixReuse
from tests.engine_adapter.bench_tools import script
from tests.engine_adapter.fake_client import FakeClient

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = (
    "Write a Python function that parses a date like 2024-05-17, checks it, and returns the day of the year. " * 4
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_warm_answer_of_the_real_model_keeps_the_rule(precision: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    fetch, demo_engine = script("fetch_model"), script("demo_engine")
    folder = fetch.cache_dir() / fetch.FOLDER_NAME
    if not folder.exists():
        pytest.skip(f"{fetch.NAME} was not fetched: make model")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=demo_engine.DTYPES[precision]).eval()
    demo_engine.widen_bf16(model)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    client: Any = FakeClient()
    options = {"model_digest": b"known", "block_tokens": 16}
    with PrefixReuse(model, None, **options) as off, PrefixReuse(model, client, **options) as engine:
        cold = off.generate(ids, 12, keep_logits=True)
        engine.generate(ids, 1)
        assert engine.wait_stored(60)
        warm = engine.generate(ids, 12)
    assert warm.reuse.tokens == (len(ids) - 1) // 16 * 16
    assert cold.logits is not None
    exact, change = precision == "fp32", 0.0
    if not exact and warm.tokens != cold.tokens:
        change = largest_logit_change(model, ids + cold.tokens[:-1], warm.reuse.tokens, len(cold.tokens))
    verdict = judge(cold.tokens, warm.tokens, cold.logits, exact=exact, logit_change=change)
    assert verdict.ok, verdict.text
    assert torch.isfinite(cold.logits).all()
