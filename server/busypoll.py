"""Looking for the next request for a while before the event loop sleeps.

A core that sleeps wakes late ([M] 30 us and more in a virtual machine), and requests come in bursts: an engine that has
matched acquires next. After each request the loop polls without sleeping for `window_s`, then sleeps as usual, so an idle
daemon takes no time.
"""

from __future__ import annotations

import asyncio
import os
import time


class BusyPoll:
    """Keeps one event loop awake for a while after each request."""

    def __init__(self, window_s: float) -> None:
        """`window_s`: 0 switches it off, and so does a machine with a single core, where the peer needs it."""
        self._window_s = window_s if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._loop = asyncio.get_running_loop()
        self._until_s = 0.0
        self._awake = False

    def request_came(self) -> None:
        if self._window_s:
            self._until_s = time.perf_counter() + self._window_s
            if not self._awake:
                self._awake = True
                self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._awake = time.perf_counter() < self._until_s
        if self._awake:
            self._loop.call_soon(self._look)
