"""One engine process of the demo: a model, a connection to the daemon, and requests as lines of JSON on stdin.

Covers loading, generating and judging; demo.py starts it and tells the story. Always true: one line out for each line in;
with Forebay off the very same code runs, only without a client. The engine keeps no KV from one request to the next.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from forebay.clients import Client
from forebay.engine_adapter.hf_identity import weights_digest
from forebay.engine_adapter.near_tie import judge, largest_logit_change
from forebay.engine_adapter.transformers import GenerationResult, PrefixReuse

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FEW_ROWS = 4  # below, a product is bound by reading the weights and widening them would only add to that


class WideLinear(nn.Linear):
    """bf16 weights and activations, multiplied in fp32: products and sums as a bf16 unit makes them, then rounded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() < FEW_ROWS * x.shape[-1]:
            return super().forward(x)
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(x.float(), self.weight.float(), bias).to(x.dtype)


def widen_bf16(model: nn.Module) -> bool:
    """Speed up bf16 where the CPU has no instructions for it. Returns whether that was so.

    [M] Without AVX-512, torch multiplies bf16 matrices 4-5 times slower than it widens and multiplies them. Leaving that
    in would make the cold run slow and Forebay look good for the wrong reason.
    """
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.bfloat16:
            module.__class__ = WideLinear
    return True


class Engine:
    """The model with Forebay on and off. `cold` is the last cold result, which warm ones are judged by."""

    def __init__(self, options: argparse.Namespace) -> None:
        logging.disable_progress_bar()
        torch.set_num_threads(options.threads)
        dtype = DTYPES[options.precision]
        self.exact = dtype is torch.float32
        self.tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        widened = widen_bf16(self.model)
        shared: dict[str, Any] = {
            "block_tokens": options.block_tokens,
            "reserve_tokens": 4096,
            "model_digest": weights_digest(self.model),
            # Two ways to multiply are two producers: machines of both sorts must not mix their blocks unasked.
            "producer": f"transformers/{self.model.config._attn_implementation}{'+wide' if widened else ''}",
        }
        self.client = Client(options.daemon, engine_id=options.name)
        self.warm = PrefixReuse(self.model, self.client, **shared)
        self.off = PrefixReuse(self.model, None, **shared)
        self.cold: GenerationResult | None = None
        self.cold_ids: list[int] = []

    def ids(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def generate(self, messages: list[dict[str, str]], new: int, forebay: bool, store: bool, reference: bool) -> Any:
        ids = self.ids(messages)
        engine = self.warm if forebay else self.off
        result = engine.generate(ids, new, store=store, keep_logits=reference)
        if not engine.wait_stored(60):
            raise TimeoutError("blocks were not stored within 60 s")
        if reference:
            self.cold, self.cold_ids = result, ids
        reuse = asdict(result.reuse)
        reuse["predicted_load_s"] = result.reuse.plan.predicted_load_s if result.reuse.plan else 0.0
        reuse["reason"] = result.reuse.plan.reason if result.reuse.plan else ""
        del reuse["plan"]
        return {
            "tokens": result.tokens,
            "text": self.tokenizer.decode(result.tokens, skip_special_tokens=True),
            "prompt_tokens": result.prompt_tokens,
            "timings": asdict(result.timings),
            "reuse": reuse,
            "counters": dict(engine.counters),
        }

    def flush(self, messages: list[dict[str, str]]) -> Any:
        """Wait until what is stored of the prompt's prefix is in a tier below RAM."""
        namespace = self.client.open(self.warm.facts)
        keys = namespace.keys(self.ids(messages))
        return asdict(namespace.flush(keys[: namespace.match(keys).blocks], timeout_s=120))

    def judge(self, warm: list[int], split: int) -> Any:
        if self.cold is None or self.cold.logits is None:
            raise ValueError("nothing to judge by: make the reference first")
        change = 0.0
        if not self.exact and warm != self.cold.tokens:
            keep = len(self.cold.tokens)
            change = largest_logit_change(self.model, self.cold_ids + self.cold.tokens[:-1], split, keep)
        return asdict(judge(self.cold.tokens, warm, self.cold.logits, exact=self.exact, logit_change=change))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--daemon", required=True, help="its socket, or tcp://host:port")
    parser.add_argument("--precision", choices=DTYPES, required=True)
    parser.add_argument("--block-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    engine = Engine(options)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(engine, request.pop("op"))(**request)), flush=True)
    engine.warm.close()
    engine.client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
