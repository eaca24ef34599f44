"""What a campaign has seen: faults that fired, what readers got, and what must never happen."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

# Demanded of a whole campaign; a part of one must reach its share.
WANTED = {
    "bit flip": 1000,
    "truncation": 1000,
    "swapped file": 1000,
    "short write": 1000,
    "torn write": 1000,
    "no space": 1000,
    "I/O error": 1000,
    "damaged index": 1000,
    "hang": 1000,
    "second daemon": 1000,
    "clock step": 1000,
    "client death": 200,
    "daemon kill": 300,
}
WANTED_IN_ALL = 20_000
HIT_RATE_CLEAN = 0.95
HIT_RATE_WITH_FAULTS = 0.50


@dataclass
class Tally:
    """Counts of one campaign. `violations`: what must not happen, one line each."""

    fired: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)  # reads of what should be there, "clean" and "faults"
    hits: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)  # what health and metrics said
    violations: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fire(self, kind: str, count: int = 1) -> None:
        """A fault has fired. For any thread."""
        with self._lock:
            self.fired[kind] += count

    def read(self, phase: str, hits: int, asked: int) -> None:
        self.hits[phase] += hits
        self.asked[phase] += asked

    def break_(self, what: str) -> None:
        """Something happened that must not."""
        self.violations.append(what)

    def rate(self, phase: str) -> float:
        return self.hits[phase] / self.asked[phase] if self.asked[phase] else 1.0

    def shortfalls(self, share: float) -> list[str]:
        """What this campaign, the given share of a whole one, did not reach."""
        missing = [
            f"{kind}: {self.fired[kind]} of {wanted * share:.0f} fired"
            for kind, wanted in WANTED.items()
            if self.fired[kind] < int(wanted * share)
        ]
        if (total := sum(self.fired.values())) < int(WANTED_IN_ALL * share):
            missing.append(f"{total} of {WANTED_IN_ALL * share:.0f} faults fired")
        for phase, wanted_rate in (("clean", HIT_RATE_CLEAN), ("faults", HIT_RATE_WITH_FAULTS)):
            if self.rate(phase) < wanted_rate:
                missing.append(f"hit rate ({phase}) {self.rate(phase):.3f}, wanted {wanted_rate}")
        return missing

    def table(self) -> str:
        lines = [f"{kind:<16} {count:>8}" for kind, count in sorted(self.fired.items())]
        lines.append(f"{'all faults':<16} {sum(self.fired.values()):>8}")
        for phase in ("clean", "faults"):
            lines.append(f"hit rate, {phase:<6} {self.rate(phase):>8.3f} of {self.asked[phase]} reads")
        lines.append("told: " + ", ".join(f"{name} {count}" for name, count in sorted(self.told.items()) if count))
        lines.append(f"violations: {len(self.violations)}")
        lines += self.violations[:20]
        return "\n".join(lines)
