"""A circuit breaker: stop asking a medium that keeps failing, and find out when it is back.

Pure state over an injected clock: no I/O, no tasks. The channel asks `allow`, reports what happened, and sends the
probes. Always true: while open nobody waits for the medium; half open there is one probe and no other call.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, kw_only=True)
class BreakerPolicy:
    """When to open and how to probe.

    Opens after `open_after_failures` in a row, or when at least `open_at_rate` of the last `window` calls failed
    (judged from half a window on). The first probe comes `probe_after_s` later, then each wait doubles up to
    `probe_max_s`.
    """

    open_after_failures: int = 5
    open_at_rate: float = 0.5
    window: int = 32
    probe_after_s: float = 0.5
    probe_max_s: float = 30.0


class Breaker:
    """One medium's breaker. `opened` counts how often it opened."""

    def __init__(self, policy: BreakerPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._recent: deque[bool] = deque(maxlen=policy.window)  # True: failed
        self._failures_in_row = 0
        self._successes_in_row = 0
        self._backoff_s = policy.probe_after_s
        self.state = BreakerState.CLOSED
        self.probe_at_s = 0.0
        self.opened = 0

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def begin_probe(self) -> bool:
        """Whether a probe may be sent now; if so the breaker is half open until its verdict."""
        if self.state is not BreakerState.OPEN or self._clock() < self.probe_at_s:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def success(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.CLOSED
            self._recent.clear()
            self._failures_in_row = self._successes_in_row = 0
        elif self.closed:
            self._recent.append(False)
            self._failures_in_row = 0
            self._successes_in_row += 1
            # Only real traffic resets the back-off: a medium that answers probes and nothing else must not flap.
            if self._successes_in_row >= self._policy.open_after_failures:
                self._backoff_s = self._policy.probe_after_s

    def failure(self) -> None:
        if self.state is BreakerState.HALF_OPEN:
            self.trip()
        elif self.closed:
            self._recent.append(True)
            self._failures_in_row += 1
            self._successes_in_row = 0
            judged = len(self._recent) * 2 >= self._policy.window
            rate = sum(self._recent) / len(self._recent)
            if self._failures_in_row >= self._policy.open_after_failures or (
                judged and rate >= self._policy.open_at_rate
            ):
                self.trip()

    def abandon(self) -> None:
        """The probe ended without a verdict (cancelled): another one may be sent at once."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN

    def trip(self) -> None:
        """Open now, whatever the counts say."""
        if self.closed:
            self.opened += 1
        self.state = BreakerState.OPEN
        self.probe_at_s = self._clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._policy.probe_max_s)
