"""What a prefix store that has nothing costs a request: time to first token with Forebay and without.

    python bench/engine_miss.py [--pairs N] [--tokens N] [--threads N] [--embedded] [--json FILE]

The real 0.5B model in bf16, one request at a time. Each pair runs the same fresh prompt once on an engine without a store and
once on one with Forebay (a daemon process, or embedded in this one), in alternating order; nothing of it was ever stored.
What the request stores happens after its first token; the next run begins when that is done, and `--overlap` lets it go on
beside it. Reported: the geometric mean of the ratios with the upper end of its 95 % interval (t distribution, two-sided, so
that the one-sided bound lies below it), and of the runs with Forebay the time spent in its calls on the engine's thread until
the first token, and from the first ask to the answer.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from engine_tools import Traced, engine_of, random_prompt, real_model, store_of

from forebay.bench_support import bench_daemon, collector_off, machine, percentile, rounded, tell
from forebay.embedded import EmbeddedDaemon
from forebay.engine.config import EngineConfig
from forebay.engine.llm import LLM
from forebay.engine.params import SamplingParams

RAM_BYTES: Final = 1 << 30
# Student's t, two-sided 95 %, for degrees of freedom up to these.
_T: Final = ((10, 2.228), (20, 2.086), (30, 2.042), (39, 2.023), (59, 2.001), (99, 1.984), (1 << 30, 1.96))
ONE: Final = SamplingParams(max_tokens=1, temperature=0.0)


@contextmanager
def daemon(embedded: bool) -> Iterator[Path]:
    if embedded:
        with EmbeddedDaemon(ram_bytes=RAM_BYTES, ssd_bytes=0) as inside:
            yield inside.socket
    else:
        with bench_daemon(RAM_BYTES) as outside:
            yield outside.socket


def first_token_s(engine: LLM, prompt: list[int]) -> float:
    (output,) = engine.generate([prompt], ONE)
    if output.error is not None or output.cached_tokens.total:
        raise RuntimeError(f"not a miss: {output}")
    assert output.times.first_token_s is not None
    return output.times.first_token_s


def bound(ratios: list[float]) -> tuple[float, float]:
    """Geometric mean, and the upper end of its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    t = next(value for most, value in _T if len(logs) - 1 <= most)
    mean = statistics.fmean(logs)
    return math.exp(mean), math.exp(mean + t * statistics.stdev(logs) / math.sqrt(len(logs)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = real_model(options.threads)
    config = EngineConfig(precision="bf16", pool_bytes=256 << 20, threads=options.threads)
    rng = np.random.default_rng(options.seed)
    pairs: list[dict[str, float]] = []
    with daemon(options.embedded) as socket, engine_of(model, config, None) as without:
        traced = Traced(store_of(model, socket, config))
        with engine_of(model, config, traced) as beside, collector_off():
            for number in range(-2, options.pairs):  # the first two warm everything up
                prompt = random_prompt(rng, model, options.tokens)
                pair: dict[str, float] = {}
                for name in ("with", "without") if number % 2 else ("without", "with"):
                    traced.reset()
                    pair[name] = first_token_s(beside if name == "with" else without, prompt)
                    if name == "with":
                        # `store` and `report` are called at the first token, and count as if they were before it.
                        pair |= {"spent": traced.spent_s, "waited": traced.waited_s}
                        pair |= {call: sum(took) for call, took in traced.calls.items()}
                        if not options.overlap and not traced.inner.wait_stored(10):
                            raise RuntimeError("a store did not end")
                if number >= 0:
                    pairs.append(pair)
            stats = traced.inner.stats()
    ratio, upper = bound([pair["with"] / pair["without"] for pair in pairs])
    spent = [pair["spent"] for pair in pairs]
    result = {
        "ttft_ratio": ratio,
        "ttft_ratio_upper95": upper,
        "ttft_without_ms_p50": 1e3 * percentile([pair["without"] for pair in pairs], 0.5),
        "ttft_with_ms_p50": 1e3 * percentile([pair["with"] for pair in pairs], 0.5),
        "spent_us_p50": 1e6 * percentile(spent, 0.5),
        "spent_us_p95": 1e6 * percentile(spent, 0.95),
        "spent_share_max": max(pair["spent"] / pair["with"] for pair in pairs),
        "waited_us_p50": 1e6 * percentile([pair["waited"] for pair in pairs], 0.5),
        "waited_us_p95": 1e6 * percentile([pair["waited"] for pair in pairs], 0.95),
    }
    given = {name: getattr(options, name) for name in ("pairs", "tokens", "threads", "embedded", "overlap", "seed")}
    return rounded(result) | given | {"machine": machine(), "details": {"pairs": pairs, "store": stats}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--embedded", action="store_true", help="the store in this process instead of a daemon")
    parser.add_argument("--overlap", action="store_true", help="the next run begins while this one's blocks are stored")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result with raw samples there")
    options = parser.parse_args()
    result = measure(options)
    tell(result, options.json)


if __name__ == "__main__":
    main()
