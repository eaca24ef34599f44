"""The cost model: what a prefill costs, what a load costs, and how the first is learnt from an engine's reports.

Covers the equations and their online fit; plan.py decides with them. Pure and deterministic: no clock, no I/O, nothing
shared. Always true: a predicted time is never negative, and an unhealthy tier's load takes forever.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TierEstimate:
    """What reading from one tier costs at present, as measured.

    latency_s: until the first byte, without queueing. bandwidth_bytes_per_s: then. queued_bytes: ahead of a new load.
    overhead_s_per_object: fixed cost an object. healthy: False while the tier's breaker keeps loads away.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    queued_bytes: int = 0
    overhead_s_per_object: float = 0.0
    healthy: bool = True


def load_time_s(estimate: TierEstimate, blocks: int, block_bytes: int) -> float:
    """Seconds to load `blocks` objects of `block_bytes` from a tier: latency + (queue + bytes) / bandwidth + overheads.

    No blocks take no time; a tier that is unhealthy or has no bandwidth takes forever (`math.inf`).
    """
    if blocks <= 0:
        return 0.0
    if not estimate.healthy or estimate.bandwidth_bytes_per_s <= 0:
        return math.inf
    moved_s = (estimate.queued_bytes + blocks * block_bytes) / estimate.bandwidth_bytes_per_s
    return estimate.latency_s + moved_s + blocks * estimate.overhead_s_per_object


@dataclass(frozen=True)
class PrefillModel:
    """T(c, n) = t0 + a n + b (n c + n^2 / 2) + k ceil(n / chunk): seconds to compute n tokens after c cached ones.

    t0: fixed cost of a forward pass. a: the weights' work a token. b: attention's work a pair of tokens. k: cost of one
    more chunk; chunk: tokens an engine computes at once, 0 when it never splits a prompt (k then has no effect).
    """

    t0: float
    a: float
    b: float
    k: float = 0.0
    chunk: int = 0

    def predict(self, cached: int, tokens: int) -> float:
        """Seconds to compute `tokens` new tokens after `cached` ones; 0 for no tokens."""
        if tokens <= 0:
            return 0.0
        chunks = -(-tokens // self.chunk) if self.chunk else 0
        return self.t0 + self.a * tokens + self.b * (tokens * cached + tokens * tokens / 2) + self.k * chunks

    def predict_many(self, cached: npt.NDArray[np.float64], tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """`predict` for whole numbers in two arrays of one shape, all `tokens` above 0."""
        chunks = np.ceil(tokens / self.chunk) if self.chunk else 0.0
        return self.t0 + self.a * tokens + self.b * (tokens * cached + tokens * tokens / 2) + self.k * chunks

    @classmethod
    def from_hardware(
        cls, *, parameters: int, layers: int, attention_width: int, flops: float, pass_s: float = 0.0
    ) -> PrefillModel:
        """A first guess before any measurement: 2 FLOPs a parameter and token, 4 a layer, channel and token pair.

        flops: what the device reaches on such work, a second. attention_width: heads x head dim. pass_s: fixed cost.
        """
        return cls(t0=pass_s, a=2 * parameters / flops, b=4 * layers * attention_width / flops)


def _features(cached: int, tokens: int, chunk: int) -> npt.NDArray[np.float64]:
    chunks = -(-tokens // chunk) if chunk else 0
    return np.array([1.0, tokens, tokens * cached + tokens * tokens / 2, chunks])


class PrefillFitter:
    """Fits a PrefillModel to an engine's reports, one at a time (recursive least squares on the relative error).

    Parameters are kept as multiples of the prior's, so that one covariance fits all four in size. The prior counts as
    pseudo-observations: terms that the data can't tell apart stay near it. An outlier (a request that met a page fault
    or a busy machine) is clipped at three scaled median deviations. When the median itself is off, the machine has
    changed, or the prior was wrong: then the past is forgotten faster.
    """

    FORGETTING = 0.995  # half of an observation's weight is gone after ~140 later ones
    FORGETTING_ADRIFT = 0.9  # ... after ~7 later ones
    PRIOR_VARIANCE = 25.0  # a prior that is wrong by a factor of five is within 1 sigma
    LEAST_VARIANCE = 1e-30  # what rounding may leave of a term that is known for certain
    NOISE_VARIANCE = 0.03**2  # relative error of one timing on a quiet machine
    FLOOR_S = 1e-3  # below this, a timing's error is absolute (timers, scheduling), not relative
    WINDOW = 32  # residuals that the outlier scale is taken from
    CLIP = 3.0

    def __init__(self, prior: PrefillModel) -> None:
        """Raises: ValueError if a parameter of the prior is negative, or if none is positive."""
        scale = np.array([prior.t0, prior.a, prior.b, prior.k if prior.chunk else 0.0], dtype=np.float64)
        if (scale < 0).any() or not scale.any():
            raise ValueError(f"a prior needs parameters >= 0 and one above 0, got {prior}")
        self._chunk = prior.chunk
        self._scale = scale  # a parameter that the prior puts at 0 stays there
        self._multiple = np.ones(4)
        self._covariance = np.eye(4) * self.PRIOR_VARIANCE
        self._residuals: deque[float] = deque(maxlen=self.WINDOW)
        self.observations = 0

    @property
    def model(self) -> PrefillModel:
        t0, a, b, k = (float(v) for v in self._scale * self._multiple)
        return PrefillModel(t0=t0, a=a, b=b, k=k, chunk=self._chunk)

    def observe(self, cached: int, tokens: int, seconds: float) -> None:
        """Take in one report: `tokens` computed after `cached` ones took `seconds`.

        Raises: ValueError for no tokens, negative counts or a time that is not positive and finite.
        """
        if tokens <= 0 or cached < 0 or not (0 < seconds < math.inf):
            raise ValueError(f"not a prefill report: cached={cached}, tokens={tokens}, seconds={seconds}")
        weight = 1.0 / max(seconds, self.FLOOR_S)
        x = _features(cached, tokens, self._chunk) * self._scale * weight
        residual = seconds * weight - float(x @ self._multiple)
        step, forgetting = self._judge(residual)
        p = self._covariance / forgetting
        gain = p @ x / (self.NOISE_VARIANCE + float(x @ p @ x))
        self._multiple = self._multiple + gain * step
        # In Joseph's form, which rounding can't make negative: (I - g x') P (I - g x')' + g R g'.
        left = np.eye(4) - np.outer(gain, x)
        p = left @ p @ left.T + self.NOISE_VARIANCE * np.outer(gain, gain)
        p = (p + p.T) / 2  # nor may it lose its symmetry over millions of updates
        # Forgetting without new evidence must not inflate what is unknown: no parameter gets vaguer than the prior.
        # Parameter by parameter: a cap on the trace would let an idle term take the others' variance away.
        shrink = np.sqrt(np.minimum(1.0, self.PRIOR_VARIANCE / np.maximum(np.diag(p), self.LEAST_VARIANCE)))
        self._covariance = p * np.outer(shrink, shrink)
        self._project()
        self.observations += 1

    def _judge(self, residual: float) -> tuple[float, float]:
        """The residual as it may act (clipped once there are enough to know the usual size), and how fast to forget."""
        self._residuals.append(residual)
        if len(self._residuals) < self.WINDOW // 4:
            return residual, self.FORGETTING
        noise = math.sqrt(self.NOISE_VARIANCE)
        recent = np.array(self._residuals)
        bound = self.CLIP * max(1.4826 * float(np.median(np.abs(recent))), noise)
        adrift = abs(float(np.median(recent))) > noise
        return min(max(residual, -bound), bound), self.FORGETTING_ADRIFT if adrift else self.FORGETTING

    def _project(self) -> None:
        """Move to the nearest point without a negative parameter, near in the covariance's own measure."""
        for _ in range(4):
            worst = int(np.argmin(self._multiple))
            if self._multiple[worst] >= 0:
                return
            column = self._covariance[:, worst]
            self._multiple = self._multiple - column * (self._multiple[worst] / max(column[worst], self.LEAST_VARIANCE))
            self._multiple[worst] = 0.0
        np.maximum(self._multiple, 0.0, out=self._multiple)
