"""What engines report: sums by kind, and from their loads the speed of reading RAM as engines see it.

Numbers only; a report has no text but its kind and the names of its numbers, both bounded. Always true: a hostile
reporter can skew the estimates of its own daemon, and not its memory.
"""

from __future__ import annotations

import math
from typing import Any, Final

from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.errors import BadRequest

_MAX_KINDS: Final = 32
_MAX_VALUES: Final = 16
_MAX_NAME: Final = 40
_WEIGHT: Final = 0.2  # of a new sample: five loads forget an old speed to a third


class Reports:
    """Counters of a daemon's reports and the measured estimate of its RAM tier."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, float]] = {}
        # Before anything was measured: one thread's copy out of shared memory, half of what memcpy reaches.
        self._bandwidth = 5e9
        self._latency_s = 2e-4

    def add(self, kind: str, values: dict[str, float]) -> None:
        """Count one report. A `load` with `bytes` and `seconds` moves the RAM estimate.

        Raises: BadRequest: too many or too long names, or a value that is not a finite, non-negative number.
        """
        names = (kind, *values)
        if len(values) > _MAX_VALUES or any(len(name) > _MAX_NAME or not name.isidentifier() for name in names):
            raise BadRequest(
                f"a report has an identifier of at most {_MAX_NAME} characters and up to {_MAX_VALUES} values"
            )
        if any(not math.isfinite(value) or value < 0 for value in values.values()):
            raise BadRequest("reported values are finite and not negative")
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            raise BadRequest(f"at most {_MAX_KINDS} kinds of reports are kept: {', '.join(self._kinds)}")
        sums = self._kinds.setdefault(kind, {"reports_total": 0.0})
        sums["reports_total"] += 1
        for name, value in values.items():
            if len(sums) <= 2 * _MAX_VALUES or f"{name}_total" in sums:
                sums[f"{name}_total"] = sums.get(f"{name}_total", 0.0) + value
        if kind == "load" and values.get("bytes", 0) > 0 and values.get("seconds", 0) > 0:
            seen = values["bytes"] / values["seconds"]
            # The first sample replaces the guess, the next ones average; then old ones fade.
            weight = max(_WEIGHT, 1 / sums["reports_total"])
            self._bandwidth += weight * (seen - self._bandwidth)

    def ram_estimate(self) -> TierEstimate:
        return TierEstimate(self._latency_s, self._bandwidth, 0, 0.0, True)

    def stats(self) -> dict[str, Any]:
        return {kind: dict(sums) for kind, sums in self._kinds.items()}
