"""Many requests at once that share a prefix which only the store holds: is it loaded once, and what does it cost?

    python bench/engine_shared_prefix.py [--requests N] [--prefix N] [--rounds N] [--tier ram|ssd] [--json FILE]

The real 0.5B model in bf16. One engine computes and stores the prefix. Another one, whose pool is emptied before each
measurement, is timed three times a round: one request that loads the prefix and computes one token (`one`), all requests with
the prefix in the pool already (`own`, their own work), all with it in the store alone (`shared`). `total_ratio` is shared /
(one load + own), where one load is `one` less the same request with the prefix resident; `bytes_ratio` is what was loaded in
`shared` to the prefix's bytes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from engine_tools import engine_of, random_prompt, real_model, store_of

from forebay.bench_support import BenchDaemon, machine, percentile, rounded, tell
from forebay.engine.config import EngineConfig
from forebay.engine.llm import LLM
from forebay.engine.params import SamplingParams

RAM_BYTES: Final = 1 << 30
ANSWER: Final = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, store=False)
ONE: Final = SamplingParams(max_tokens=1, temperature=0.0, store=False)


def timed(engine: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[float, int]:
    """Seconds for all of them, and tokens that came from the store."""
    began_s = time.perf_counter()
    outputs = engine.generate(prompts, params)
    took_s = time.perf_counter() - began_s
    for output in outputs:
        if output.error is not None:
            raise output.error
    return took_s, sum(output.cached_tokens.store for output in outputs)


def loaded_bytes(store: Any) -> int:
    while store.stats()["loading"]:  # counted when it has ended, just after its last block was told
        time.sleep(1e-3)
    return sum(some for name, some in store.stats()["counters"].items() if name.startswith("loaded_bytes_"))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = real_model(options.threads)
    config = EngineConfig(precision="bf16", pool_bytes=768 << 20, threads=options.threads)
    rng = np.random.default_rng(options.seed)
    prefix = random_prompt(rng, model, options.prefix)
    samples: list[dict[str, float]] = []

    def prompts(count: int) -> list[list[int]]:
        return [prefix + random_prompt(rng, model, options.suffix) for _ in range(count)]

    with tempfile.TemporaryDirectory(prefix="forebay-shared-") as folder:
        ssd: dict[str, Any] = (
            {"ssd_bytes": 4 << 30, "ssd_dirs": str(Path(folder) / "ssd")} if options.tier == "ssd" else {}
        )
        daemon = BenchDaemon(Path(folder), RAM_BYTES, **ssd)
        try:
            writing = store_of(model, daemon.socket, config)
            with engine_of(model, config, writing) as writer:
                writer.generate([prefix], SamplingParams(max_tokens=1))
                if not writing.wait_stored(30):
                    raise RuntimeError("the prefix was not stored")
                keys = writing.keys(prefix)
            store = store_of(model, daemon.socket, config)
            with engine_of(model, config, store) as engine:
                timed(engine, prompts(2), ANSWER)
                for _ in range(options.rounds):
                    sample: dict[str, float] = {}
                    for name, asked, params in (
                        ("one", prompts(1), ONE),
                        ("one_resident", prompts(1), ONE),
                        ("own", prompts(options.requests), ANSWER),
                        ("shared", prompts(options.requests), ANSWER),
                    ):
                        if name in ("one", "shared"):
                            engine.core.clear_cache()
                            if options.tier == "ssd":
                                daemon = _only_on_disk(daemon, Path(folder), ssd, store.facts, keys)
                                while store.stats()["away"]:
                                    time.sleep(0.05)
                        before = loaded_bytes(store)
                        sample[name], tokens = timed(engine, asked, params)
                        sample[f"{name}_bytes"] = loaded_bytes(store) - before
                        if (tokens == 0) != (name in ("one_resident", "own")):
                            raise RuntimeError(f"{name}: {tokens} tokens came from the store")
                    sample["load"] = sample["one"] - sample["one_resident"]
                    samples.append(sample)
                stats = store.stats()
        finally:
            daemon.stop()
    prefix_bytes = len(keys) * store._layout.payload_bytes
    total = [each["shared"] / (each["load"] + each["own"]) for each in samples]
    result = {
        "total_ratio": percentile(total, 0.5),
        "total_ratio_worst": max(total),
        "bytes_ratio": max(each["shared_bytes"] for each in samples) / prefix_bytes,
        "prefix_bytes": prefix_bytes,
        "load_ms": 1e3 * percentile([each["load"] for each in samples], 0.5),
        "own_s": percentile([each["own"] for each in samples], 0.5),
        "shared_s": percentile([each["shared"] for each in samples], 0.5),
    }
    given = {
        name: getattr(options, name) for name in ("requests", "prefix", "suffix", "rounds", "tier", "threads", "seed")
    }
    return rounded(result) | given | {"machine": machine(), "details": {"samples": samples, "store": stats}}


def _only_on_disk(daemon: BenchDaemon, folder: Path, ssd: dict[str, Any], facts: Any, keys: list[bytes]) -> BenchDaemon:
    """Flush, kill and start again: RAM is empty then."""
    with daemon.client() as client:
        if client.open(facts).flush(keys, timeout_s=30).failed:
            raise RuntimeError("the prefix did not get to disk")
    daemon.kill()
    started = BenchDaemon(folder, RAM_BYTES, **ssd)
    with started.client():
        return started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--prefix", type=int, default=1500, help="tokens that all share")
    parser.add_argument("--suffix", type=int, default=16, help="tokens of each prompt's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tier", choices=("ram", "ssd"), default="ram", help="where the store holds the prefix")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result with raw samples there")
    options = parser.parse_args()
    result = measure(options)
    tell(result, options.json)


if __name__ == "__main__":
    main()
