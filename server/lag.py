"""How late the event loop runs its timers: the figure behind "nothing holds the interpreter for more than 2 ms"."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from typing import Any, Final

BOUNDS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_PERIOD_S: Final = 0.01


class LoopLag:
    """Sets a timer again and again and notes by how much it was late.

    By a clock of its own: uvloop's tells whole milliseconds, of the moment when the present turn of the loop began. Its timers
    tick in them, so a sample may be up to 1 ms too high.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._recent: deque[float] = deque(maxlen=6000)  # the last minute
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._due_s = time.perf_counter() + _PERIOD_S
        self._timer = self._loop.call_later(_PERIOD_S, self._fired)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _fired(self) -> None:
        lag_s = max(0.0, time.perf_counter() - self._due_s)
        self._counts[bisect_left(BOUNDS_S, lag_s)] += 1
        self._sum_s += lag_s
        self._recent.append(lag_s)
        self.start()

    def histogram(self) -> dict[str, Any]:
        """Since start: rising bounds, counts of each bucket and one above, sum in seconds."""
        return {"bounds": list(BOUNDS_S), "counts": list(self._counts), "sum": self._sum_s}

    def recent(self) -> dict[str, float]:
        """Percentiles of the last minute, in milliseconds."""
        ordered = sorted(self._recent) or [0.0]
        return {
            "p50_ms": 1e3 * ordered[len(ordered) // 2],
            "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
            "max_ms": 1e3 * ordered[-1],
            "samples": len(self._recent),
        }

    def forget_recent(self) -> None:
        self._recent.clear()
