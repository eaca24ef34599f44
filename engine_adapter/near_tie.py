"""Is a warm answer right? The rule that tests and the demo hold every warm output to.

Computing a prompt in other chunks rounds differently. In fp32 and fp64 the tokens must still be identical. In 16-bit
formats a first difference is allowed only at a near tie: where the cold run's two best logits lie closer than twice the
largest change of a logit that chunking alone makes, measured on this very prompt without any cache. What follows a first
difference is another text and not compared. Always true: a difference is shown, allowed or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from forebay.engine.batch import Batch, CausalModel, Span


@dataclass(frozen=True)
class Verdict:
    """ok: the warm output keeps the rule. difference: index of the first different token, None if identical.

    gap: cold's top-two logit gap there; allowed: what it must be below. text: one line for people.
    """

    ok: bool
    difference: int | None
    gap: float
    allowed: float
    text: str

    @property
    def identical(self) -> bool:
        return self.difference is None


def first_difference(cold: Sequence[int], warm: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter length if one is a prefix of the other, None if equal."""
    for index, (a, b) in enumerate(zip(cold, warm, strict=False)):
        if a != b:
            return index
    return None if len(cold) == len(warm) else min(len(cold), len(warm))


def judge(
    cold: Sequence[int], warm: Sequence[int], cold_logits: torch.Tensor, *, exact: bool, logit_change: float = 0.0
) -> Verdict:
    """Hold a warm output to the rule.

    Args:
        cold, warm: new tokens. cold_logits: [tokens of cold, vocabulary], what cold's tokens were chosen from.
        exact: the precision allows no difference (fp32, fp64). logit_change: from `largest_logit_change`, else.
    """
    index = first_difference(cold, warm)
    if index is None:
        return Verdict(True, None, 0.0, 0.0, f"identical ({len(cold)} tokens)")
    if index >= min(len(cold), len(warm)):
        return Verdict(False, index, 0.0, 0.0, f"one output ends at token {index}, the other goes on")
    best = cold_logits[index].float().topk(2).values
    gap, allowed = float(best[0] - best[1]), 0.0 if exact else 2 * logit_change
    # The warm token must be one of the two that nearly tie, or at least as close to the best as the tie allows.
    behind = float(best[0] - cold_logits[index, warm[index]])
    ok = not exact and gap < allowed and behind < allowed
    text = f"token {index}: cold {cold[index]}, warm {warm[index]}; top-two gap {gap:.4g}, "
    text += "none allowed" if exact else f"allowed below {allowed:.4g}"
    return Verdict(ok, index, gap, allowed, f"{text}: {'near tie' if ok else 'NOT a near tie'}")


def largest_logit_change(model: Any, ids: Sequence[int], split: int, keep: int) -> float:
    """The largest change of any logit of the last `keep` tokens when `ids` are computed as [0, split) and the rest
    instead of whole. No cache is involved: this is what chunking alone does.

    Cost: two passes over `ids`. Raises: ValueError: the parts make no sense.
    """
    if not 0 < split <= len(ids) - keep:
        raise ValueError(f"can't split {len(ids)} tokens at {split} and keep {keep}")
    # Imported here, since transformers takes seconds and the engine's rule doesn't need it.
    from forebay.engine_adapter.hf_cache import KVBuffer
    from forebay.engine_adapter.hf_identity import examine

    forward, shape = examine(model)
    tensor = torch.tensor([list(ids)], device=model.device)
    with torch.inference_mode():
        whole = forward(model, tensor, KVBuffer(shape, len(ids), model.device).cache(), 0, keep).float()
        cache = KVBuffer(shape, len(ids), model.device).cache()
        forward(model, tensor[:, :split], cache, 0)
        chunked = forward(model, tensor[:, split:], cache, split, keep).float()
    return float((whole - chunked).abs().max())


def largest_engine_logit_change(
    model: CausalModel, ids: Sequence[int], split: int, keep: int, block_tokens: int
) -> float:
    """The same for a model of the bundled engine. Raises: ValueError: the parts make no sense."""
    if not 0 < split <= len(ids) - keep:
        raise ValueError(f"can't split {len(ids)} tokens at {split} and keep {keep}")
    config, blocks = model.config, -(-len(ids) // block_tokens)
    shape = (blocks, config.kv_heads, config.layers, 2, block_tokens, 1, config.head_dim)
    wanted = torch.arange(len(ids) - keep, len(ids))

    def computed(*bounds: int) -> torch.Tensor:
        pool = torch.zeros(shape, dtype=model.kv_dtype)
        logits = torch.empty(0)
        for start, end in pairwise(bounds):
            rows = torch.arange(start, end)
            span = Span(0, end - start, start, torch.arange(-(-end // block_tokens)))
            tokens = torch.tensor(ids[start:end])
            here = wanted[(wanted >= start) & (wanted < end)] - start
            logits = model.forward(Batch(tokens, rows, rows, [span], here), pool)
        return logits.float()

    with torch.inference_mode():
        return float((computed(0, len(ids)) - computed(0, split, len(ids))).abs().max())
