"""The real 0.5B model in both precisions: warm answers keep the rule that the demo holds them to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.engine_adapter.near_tie import judge, largest_logit_change
from forebay.engine_adapter.transformers import PrefixReuse
from tests.engine_adapter.bench_tools import BENCH, script
from tests.engine_adapter.fake_client import FakeClient

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = (
    "Write a Python function that parses a date like 2024-05-17, checks it, and returns the day of the year. " * 4
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_warm_answer_of_the_real_model_keeps_the_rule(precision: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    fetch, demo_engine = script("fetch_model"), script("demo_transformers_engine")
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


def test_the_story_is_told_through_the_transformers_adapter_too(tmp_path: Path) -> None:
    fetch = script("fetch_model")
    if not (fetch.cache_dir() / fetch.FOLDER_NAME).exists():
        pytest.skip(f"{fetch.NAME} was not fetched: make model")
    command = [sys.executable, str(BENCH / "demo_transformers.py"), "--small", "--precision", "bf16"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "demo.json").read_text())["summary"]["bf16"]
    assert [row["key"] for row in rows] == list("abcde") and all(row["ok"] for row in rows)
    assert all(row["reused_tokens"] > 1500 and row["ttft_s"] < rows[0]["ttft_s"] for row in rows[1:])
