"""How fast the bundled engine computes on a CPU, beside transformers and llama.cpp: one run, rounds interleaved.

Each round takes every subject once: a prompt of random tokens is prefilled, then tokens are decoded at that depth. Forebay runs
as its engine (scheduler, pool and sampler included, no store), transformers by its own forward with a DynamicCache in bf16,
llama.cpp by its llama-bench on the Q4_K_M file that the other weights were made from. Agreement: how often a precision's
likeliest next token is bf16's, along bf16's greedy answers to five prompts; the first difference is where its own text leaves.

    python bench/engine_cpu.py --llama-bench PATH [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fetch_model import FOLDER_NAME, GGUF_NAME, cache_dir

from forebay.bench_support import machine
from forebay.engine.batch import Batch, Span
from forebay.engine.config import EngineConfig, Precision
from forebay.engine.llm import LLM
from forebay.engine.loading import LoadedModel, load_model
from forebay.engine.params import SamplingParams
from forebay.engine.sequence import Request

PRECISIONS: tuple[Precision, ...] = ("bf16", "int8", "int4")
QUESTIONS = (
    "Write a Python function that parses a date like 2024-05-17 and returns the day of the year.",
    "Explain what a B-tree is and when a database uses one.",
    "Write a C function that reverses a singly linked list in place, and explain it.",
    "Translate into SQL: all customers who ordered more than three times in 2023, with their totals.",
    "What is the difference between a process and a thread? Give an example in Rust.",
)
AGREEMENT_TOKENS = 200
Sample = tuple[float, float]  # seconds to prefill the prompt, seconds a decoded token


def forebay_sample(engine: LLM, prompt: list[int], decoded: int) -> Sample:
    core = engine.core
    core.clear_cache()
    params = SamplingParams(max_tokens=decoded + 1, temperature=0.0, ignore_eos=True, load=False, store=False)
    start = time.perf_counter()
    core.add(Request("one", tuple(prompt), params))
    stamps: list[float] = []
    while core.has_work:
        for output in core.step():
            stamps += [time.perf_counter()] * len(output.token_ids)
    return stamps[0] - start, (stamps[-1] - stamps[0]) / decoded


@torch.inference_mode()
def transformers_sample(model: Any, prompt: list[int], decoded: int) -> Sample:
    start = time.perf_counter()
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    token = out.logits[0, -1].argmax()
    first = time.perf_counter()
    for _ in range(decoded):
        out = model(token.view(1, 1), use_cache=True, past_key_values=out.past_key_values)
        token = out.logits[0, -1].argmax()
    return first - start, (time.perf_counter() - first) / decoded


def llama_sample(binary: Path, gguf: Path, prompt_tokens: int, decoded: int, threads: int) -> Sample:
    """llama-bench warms up by itself; one measured repetition each."""

    def tokens_per_s(*what: str) -> float:
        command = [str(binary), "-m", str(gguf), "-t", str(threads), "-r", "1", "-o", "json", *what]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
        return float(json.loads(done.stdout)[0]["avg_ts"])

    prefill = tokens_per_s("-p", str(prompt_tokens), "-n", "0")
    decode = tokens_per_s("-p", "0", "-n", str(decoded), "-d", str(prompt_tokens))
    return prompt_tokens / prefill, 1 / decode


def agreement(models: dict[Precision, LoadedModel], engine: LLM) -> dict[str, Any]:
    tokenizer = models["bf16"].tokenizer
    prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    params = SamplingParams(max_tokens=AGREEMENT_TOKENS, temperature=0.0, ignore_eos=True)
    answers = [list(output.token_ids) for output in engine.generate(prompts, params)]
    found: dict[str, Any] = {}
    for precision, model in models.items():
        same = [_agrees(model, p, a) for p, a in zip(prompts, answers, strict=True)]
        found[precision] = {
            "share": sum(map(sum, same)) / sum(map(len, same)),
            "first_difference": [flags.index(False) if False in flags else None for flags in same],
        }
    return found


def _agrees(model: LoadedModel, prompt: list[int], answer: list[int], block_tokens: int = 64) -> list[bool]:
    ids = torch.tensor(prompt + answer[:-1])
    config, blocks = model.config, -(-len(ids) // block_tokens)
    shape = (blocks, config.kv_heads, config.layers, 2, block_tokens, 1, config.head_dim)
    where = torch.arange(len(ids))
    span = Span(0, len(ids), 0, torch.arange(blocks))
    batch = Batch(ids, where, where, [span], where[len(prompt) - 1 :])
    likeliest = model.model.forward(batch, torch.zeros(shape, dtype=model.model.kv_dtype)).argmax(-1)
    return [a == b for a, b in zip(likeliest.tolist(), answer, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--decoded", type=int, default=32)
    parser.add_argument("--llama-bench", type=Path, default=None, help="llama.cpp's llama-bench; left out without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    folder, gguf = cache_dir() / FOLDER_NAME, cache_dir() / GGUF_NAME
    if not folder.is_dir():
        sys.exit(f"{folder} is not there: run bench/fetch_model.py")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    loaded = {precision: load_model(folder, precision) for precision in PRECISIONS}
    config = EngineConfig(pool_bytes=256 << 20)
    engines = {precision: LLM(model.model, model.tokenizer, config) for precision, model in loaded.items()}
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rng = np.random.default_rng(options.seed)

    def prompt() -> list[int]:
        ids: list[int] = rng.integers(0, 100_000, options.prompt_tokens).tolist()
        return ids

    subjects: dict[str, Callable[[int], Sample]] = {
        f"forebay {precision}": lambda n, engine=engine: forebay_sample(engine, prompt(), n)
        for precision, engine in engines.items()
    }
    subjects["transformers bf16"] = lambda n: transformers_sample(reference, prompt(), n)
    if options.llama_bench is not None:
        subjects["llama.cpp Q4_K_M"] = lambda n: llama_sample(
            options.llama_bench, gguf, options.prompt_tokens, n, options.threads
        )
    samples: dict[str, list[Sample]] = {name: [] for name in subjects}
    for number in range(options.rounds + 1):  # the first round warms up and isn't kept
        for name, measure in subjects.items():
            if number or not name.startswith("llama"):
                sample = measure(options.decoded)
                if number:
                    samples[name].append(sample)
    figures = {
        name: {
            "prefill_tokens_per_s": options.prompt_tokens / statistics.median(s for s, _ in taken),
            "decode_tokens_per_s": 1 / statistics.median(s for _, s in taken),
        }
        for name, taken in samples.items()
    }
    result = {
        "benchmark": "engine_cpu",
        "machine": machine() | {"torch": torch.__version__, "transformers": version("transformers")},
        "options": {name: str(value) for name, value in vars(options).items() if name not in ("out", "llama_bench")},
        "figures": figures,
        "agreement_with_bf16": agreement(loaded, engines["bf16"]),
        "samples_s": samples,
    }
    text = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
