"""What the bundled engine does around the model, each step: planning, batches, sampling, telling.

    python bench/engine_step.py [--sequences N] [--steps N] [--json FILE]

Sequences decode greedily on a model that answers at once, so a step's time is the engine's own.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from forebay.bench_support import machine, percentile, rounded, tell
from forebay.engine.batch import Batch
from forebay.engine.config import EngineConfig, ModelConfig
from forebay.engine.core import EngineCore
from forebay.engine.params import SamplingParams
from forebay.engine.sequence import Request

_PROMPT_TOKENS = 200


class Instant:
    """A model that takes no time to speak of."""

    config = ModelConfig("llama", 2, 64, 128, 4, 2, 16, 32_000, 8192, 1e-6, 1e4)
    kv_dtype = torch.float32
    _logits = torch.zeros(256, 32_000)

    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(batch.logit_rows)]


def measure(sequences: int, steps: int) -> dict[str, Any]:
    core = EngineCore(Instant(), None, EngineConfig(pool_blocks=40 * sequences, max_sequences=sequences))
    for i in range(sequences):
        prompt = tuple((7 * i + 3 * j) % 32_000 for j in range(_PROMPT_TOKENS))
        core.add(Request(str(i), prompt, SamplingParams(max_tokens=steps + 50, temperature=0.0, ignore_eos=True)))
    while core.stats().counters.generated_tokens < sequences:
        core.step()
    took: list[float] = []
    for _ in range(steps):
        began_s = time.perf_counter()
        core.step()
        took.append(time.perf_counter() - began_s)
    result = {"step_us_p50": 1e6 * percentile(took, 0.5), "step_us_p99": 1e6 * percentile(took, 0.99)}
    return rounded(result) | {"sequences": sequences, "machine": machine(), "details": {"took_s": took}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the result with raw samples there")
    options = parser.parse_args()
    result = measure(options.sequences, options.steps)
    tell(result, options.json)


if __name__ == "__main__":
    main()
