"""From logits to the next token.

Covers penalties, temperature, top-k, top-p, min-p (in this order), the draw, stop ids that may not come yet, and logprobs.
Always true: a token depends on its own row of logits, its request's parameters, tokens and seed and its place in the output
alone. A row that is not finite is an answer of its own and touches no other row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from forebay.engine.outputs import TokenLogprobs
from forebay.engine.params import SamplingParams

_BINS, _BINS_PER_NAT = 4096, 64.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass
class SamplerState:
    """What one sequence brings to its draws. stop_ids: tokens that end it. Counts are kept only where a penalty asks."""

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    generated: int = 0
    _prompt: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _counts: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: Sequence[int], seed: int, choice: int, stop_ids: frozenset[int]
    ) -> SamplerState:
        state = cls(params, choice_seed(seed, choice), stop_ids)
        if params.repetition_penalty != 1.0:
            state._prompt = np.unique(np.asarray(prompt, np.int64))
        return state

    @property
    def plain(self) -> bool:
        """Whether the likeliest token is the answer."""
        return self.params.temperature == 0.0 and not self._edits

    @property
    def _penalized(self) -> bool:
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    @property
    def _edits(self) -> bool:
        return self._penalized or self._too_early

    @property
    def _too_early(self) -> bool:
        return self.generated < self.params.min_tokens and bool(self.stop_ids)

    def note(self, token_id: int) -> None:
        """This token was chosen."""
        self.generated += 1
        if self._penalized:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def edit(self, logits: Floats) -> None:
        """Apply penalties, and take out what may not come yet. In place."""
        params = self.params
        if self._penalized and (self._counts or self._prompt.size):
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            if params.repetition_penalty != 1.0:
                seen = np.union1d(self._prompt, ids)
                values = logits[seen]
                logits[seen] = np.where(
                    values > 0, values / params.repetition_penalty, values * params.repetition_penalty
                )
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if self._too_early:
            logits[[token for token in self.stop_ids if 0 <= token < logits.size]] = -np.inf


def choice_seed(seed: int, choice: int) -> int:
    """The seed of the choice-th of several answers to one request."""
    return _hash(seed, choice, 0)


def uniform(seed: int, place: int) -> float:
    """The number in [0, 1) that decides the place-th token of an output. A counter hash: no state that order could change."""
    return (_hash(seed, place, 1) >> 11) * 2.0**-53


def _hash(a: int, b: int, use: int) -> int:
    packed = struct.pack("<QQB", a & (1 << 64) - 1, b, use)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[Sampled | None]:
    """One token a row; None where there is none to choose: the row is not finite, or not after its request's own penalties
    and stop ids. logits: [rows, vocabulary], float32 or float64.
    """
    finite = torch.isfinite(logits.sum(-1)).tolist()  # a NaN or an infinity anywhere stays one in the sum
    likeliest = logits.argmax(-1).tolist()
    answers: list[Sampled | None] = []
    for row, state in enumerate(states):
        token_id = None
        if finite[row]:
            token_id = likeliest[row] if state.plain else _choose(logits[row], state)
        told = None if token_id is None else _logprobs(logits[row], token_id, state.params.logprobs)
        answers.append(None if token_id is None else Sampled(token_id, told))
    return answers


def _choose(logits: torch.Tensor, state: SamplerState) -> int | None:
    row: Floats = logits.detach().to("cpu", torch.float64, copy=True).numpy()
    with np.errstate(over="ignore"):
        state.edit(row)
    params = state.params
    if not np.isfinite(row.max()):  # every token ends the answer and none may yet, or a penalty left the numbers' range
        return None
    if params.temperature == 0.0:
        return int(row.argmax())
    row -= row.max()
    with np.errstate(over="ignore"):  # a tiny temperature leaves the likeliest token alone: all others get -inf
        row /= params.temperature
    ids = None
    if 0 < params.top_k < row.size:
        ids = np.sort(_likeliest(row, params.top_k))
        row = row[ids]
    weights = torch.from_numpy(row).exp().numpy()  # torch's is several times quicker than numpy's
    if params.top_p < 1.0:
        kept = _nucleus(row, weights, params.top_p)
        ids, weights = (kept if ids is None else ids[kept]), weights[kept]
    if params.min_p > 0.0:
        weights = np.where(weights >= params.min_p, weights, 0.0)  # the likeliest has weight 1
    sums = weights.cumsum()
    # The draw falls on the first token whose sum is above it; by rounding there may be none, then the last one is meant.
    drawn = int(np.searchsorted(sums, uniform(state.seed, state.generated) * sums[-1], side="right"))
    if drawn == sums.size:
        drawn = int(np.flatnonzero(weights)[-1])
    return drawn if ids is None else int(ids[drawn])


def _nucleus(row: Floats, weights: Floats, top_p: float) -> npt.NDArray[np.int64]:
    """The smallest set of likeliest tokens with the share `top_p`, of equal ones the lower id first; in the order of ids.

    row: logarithms of the weights, at most 0. Little is sorted: what all tokens below some weight have together can't be
    missing for the share, and of the others only those are sorted that lie in one bin with the edge.
    """
    total = weights.sum()
    ids = np.flatnonzero(weights >= (1.0 - top_p) * total / row.size)
    row, weights = row[ids], weights[ids]
    bins = np.minimum(row * -_BINS_PER_NAT, _BINS - 1).astype(np.int64)
    sums = np.bincount(bins, weights, minlength=_BINS).cumsum()
    need = min(top_p * total, sums[-1])
    edge = int(np.searchsorted(sums, need))
    keep = bins < edge
    at_edge = np.flatnonzero(bins == edge)
    at_edge = at_edge[np.lexsort((at_edge, -row[at_edge]))]
    above = sums[edge - 1] if edge else 0.0
    keep[at_edge[: int(np.searchsorted(above + weights[at_edge].cumsum(), need)) + 1]] = True
    return ids[keep]


def _likeliest(row: Floats, count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` largest, largest first, of equal ones the lower id first."""
    if count < row.size:
        edge = np.partition(row, row.size - count)[row.size - count]
        above = np.flatnonzero(row > edge)
        ids = np.concatenate((above, np.flatnonzero(row == edge)[: count - above.size]))
    else:
        ids = np.arange(row.size)
    return ids[np.lexsort((ids, -row[ids]))]


def _logprobs(logits: torch.Tensor, token_id: int, top: int | None) -> TokenLogprobs | None:
    if top is None:
        return None
    row: Floats = logits.detach().to("cpu", torch.float64).numpy()
    largest = row.max()
    row = row - (largest + np.log(np.exp(row - largest).sum()))
    best = _likeliest(row, top) if top else ()
    return TokenLogprobs(token_id, float(row[token_id]), tuple((int(i), float(row[i])) for i in best))
