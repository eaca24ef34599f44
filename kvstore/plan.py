"""Plans: how many leading blocks to load, from where, and where computing takes over.

Pure functions of what was measured; only the store and the engines move bytes. Always true: a plan is never predicted
to be slower than loading nothing, and never touches a tier that is unhealthy or was never measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from forebay.kvstore.cost import PrefillModel, TierEstimate, load_time_s


class Run(Protocol):
    """A piece of a leading run, as `match` reports it: `blocks` consecutive blocks that `tier` holds."""

    @property
    def tier(self) -> str: ...
    @property
    def blocks(self) -> int: ...


@dataclass(frozen=True)
class LoadRange:
    """Load `blocks` blocks from `tier`, starting at block `first`."""

    tier: str
    first: int
    blocks: int


@dataclass(frozen=True)
class Plan:
    """What to load, and what it is expected to cost.

    ranges: in order, adjoining, from the first block that is not resident. load_blocks: their sum. predicted_load_s:
    until they are in the engine's cache, less what it is busy with others meanwhile. predicted_prefill_s: then, computing
    the rest. predicted_cold_s: computing everything that is not resident. reason: one line for people.
    """

    ranges: tuple[LoadRange, ...]
    load_blocks: int
    predicted_load_s: float
    predicted_prefill_s: float
    predicted_cold_s: float
    reason: str

    @property
    def predicted_s(self) -> float:
        return self.predicted_load_s + self.predicted_prefill_s


def plan(
    runs: Sequence[Run],
    estimates: Mapping[str, TierEstimate],
    prefill: PrefillModel,
    *,
    block_tokens: int,
    block_bytes: int,
    prompt_tokens: int,
    resident_blocks: int = 0,
    margin: float = 0.05,
    busy_s: float = 0.0,
) -> Plan:
    """Choose the leading blocks to load so that the first token is expected soonest: load them, then compute the rest.

    Args:
        runs: the leading present run from block 0 on. estimates: by tier name, up to and including
            the copy into the engine's cache; a tier without one is not used.
        prompt_tokens: tokens of the prompt; its last one is always computed, since its logits are needed.
        resident_blocks: leading blocks already in the engine's own cache.
        margin: share of the cold time that loading must save to be worth a try; estimates are not perfect.
        busy_s: how long the engine computes for others before it could compute this prompt: so much loading costs nothing.
    Raises: ValueError: a count that makes no sense.
    """
    if (
        block_tokens <= 0
        or block_bytes <= 0
        or prompt_tokens <= 0
        or not 0 <= resident_blocks * block_tokens < prompt_tokens
    ):
        raise ValueError(
            f"no plan for {prompt_tokens} tokens in blocks of {block_tokens} tokens, {block_bytes} bytes, "
            f"{resident_blocks} resident"
        )
    resident_tokens = resident_blocks * block_tokens
    cold_s = prefill.predict(resident_tokens, prompt_tokens - resident_tokens)
    best_blocks, best_load_s, best_s = 0, 0.0, cold_s
    pieces, stopped = _usable(runs, estimates, resident_blocks, loadable_blocks(prompt_tokens, block_tokens))
    limit_s = cold_s * (1 - margin)

    by_tier: dict[str, int] = {}
    loaded = 0
    for piece in pieces:
        # Tiers are taken to load one after the other: never too optimistic. Pieces of one tier share its latency.
        others_s = sum(load_time_s(estimates[t], n, block_bytes) for t, n in by_tier.items() if t != piece.tier)
        estimate, earlier = estimates[piece.tier], by_tier.get(piece.tier, 0)
        first_s = load_time_s(estimate, earlier + 1, block_bytes)
        each_s = block_bytes / estimate.bandwidth_bytes_per_s + estimate.overhead_s_per_object
        more = np.arange(piece.blocks, dtype=np.float64)
        cached = (piece.first + more + 1) * block_tokens
        load_s = np.maximum(0.0, others_s + first_s + more * each_s - busy_s)
        total_s = load_s + prefill.predict_many(cached, prompt_tokens - cached)
        i = int(np.argmin(total_s))  # the first of equals: fewer bytes
        if total_s[i] < best_s and total_s[i] <= limit_s:
            best_blocks, best_load_s, best_s = loaded + i + 1, float(load_s[i]), float(total_s[i])
        by_tier[piece.tier] = earlier + piece.blocks
        loaded += piece.blocks

    return Plan(
        ranges=_cut(pieces, best_blocks),
        load_blocks=best_blocks,
        predicted_load_s=best_load_s,
        predicted_prefill_s=best_s - best_load_s,
        predicted_cold_s=cold_s,
        reason=_reason(best_blocks, loaded, best_s, cold_s, stopped),
    )


def loadable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """How many leading blocks of a prompt may be loaded: its last token is always computed, since its logits are needed."""
    return (prompt_tokens - 1) // block_tokens


def _usable(
    runs: Sequence[Run], estimates: Mapping[str, TierEstimate], first: int, end: int
) -> tuple[list[LoadRange], str]:
    """The runs cut to blocks [first, end), up to the first tier that can't be used, and why they stop there."""
    pieces: list[LoadRange] = []
    position = 0
    for run in runs:
        estimate = estimates.get(run.tier)
        start, stop = max(position, first), min(position + run.blocks, end)
        position += run.blocks
        if stop <= start:
            continue
        if estimate is None:
            return pieces, f"{run.tier} was never measured"
        if not estimate.healthy or estimate.bandwidth_bytes_per_s <= 0:
            return pieces, f"{run.tier} is unhealthy"
        pieces.append(LoadRange(run.tier, start, stop - start))
    return pieces, "nothing is stored" if position == 0 else ""


def _cut(pieces: Sequence[LoadRange], blocks: int) -> tuple[LoadRange, ...]:
    ranges: list[LoadRange] = []
    for piece in pieces:
        take = min(piece.blocks, blocks)
        if take <= 0:
            break
        ranges.append(LoadRange(piece.tier, piece.first, take))
        blocks -= take
    return tuple(ranges)


def _reason(blocks: int, usable: int, total_s: float, cold_s: float, stopped: str) -> str:
    if blocks:
        text = f"load {blocks} of {usable} usable blocks: {total_s * 1e3:.0f} ms against {cold_s * 1e3:.0f} ms computed"
    elif usable:
        text = f"compute: loading any of {usable} blocks is not expected to save enough of {cold_s * 1e3:.0f} ms"
    else:
        text = "compute: no usable block"
    return f"{text}; {stopped}" if stopped else text


def split_point(prefill: PrefillModel, *, tokens: int, latency_s: float, seconds_per_token: float) -> int:
    """Where two ends meet: compute tokens [0, s) from the front while [s, tokens) load from the back.

    Returns the s in [0, tokens] that makes the later of both end soonest; 0 is "load all", `tokens` is "compute all".
    The closed form is the positive root of (b/2) s^2 + (a + kappa) s + (t0 - latency - kappa tokens) = 0, rounded to
    the better neighbour; the per-chunk term, a staircase, enters as its slope. Loading nothing costs no latency and
    computing nothing no t0, so both ends are candidates.
    Cost: a few predictions, whatever the length.
    """

    def cost(s: int) -> float:
        return max(prefill.predict(0, s), latency_s + seconds_per_token * (tokens - s) if s < tokens else 0.0)

    slope = prefill.a + seconds_per_token + (prefill.k / prefill.chunk if prefill.chunk else 0.0)
    offset = prefill.t0 - latency_s - seconds_per_token * tokens
    candidates = {0, tokens}
    if math.isfinite(offset) and offset < 0 and slope > 0:
        # The stable form of the root: no cancellation when b is tiny.
        root = -2 * offset / (slope + math.sqrt(slope * slope - 2 * prefill.b * offset))
        candidates |= {min(max(s, 0), tokens) for s in (math.floor(root), math.ceil(root))}
    return min(sorted(candidates), key=cost)
