"""Looking for the next request for a while before the event loop sleeps.

A core that sleeps wakes late ([M] 30 us and more in a virtual machine), and requests come in bursts: an engine that has
matched acquires next. After each request the loop polls without sleeping for `window_s`, then sleeps as usual, so an idle
daemon takes no time.
"""

from __future__ import annotations

import asyncio
import os
import time

from forebay.kvstore.looking import Looking


class BusyPoll:
    """Keeps one event loop awake for a while after a request, as long as that pays."""

    def __init__(self, window_s: float) -> None:
        """`window_s`: 0 switches it off, and so does a machine with a single core, where the peer needs it."""
        self._window_s = window_s if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._loop = asyncio.get_running_loop()
        self._looking = Looking()
        self._until_s = 0.0
        self._awake = False

    def request_came(self) -> None:
        if not self._window_s:
            return
        if self._awake:
            self._looking.paid()
        elif self._looking.worth_it():
            self._awake = True
            self._loop.call_soon(self._look)
        self._until_s = time.perf_counter() + self._window_s

    def _look(self) -> None:
        if time.perf_counter() < self._until_s:
            self._loop.call_soon(self._look)
        else:
            self._awake = False
            self._looking.in_vain()
