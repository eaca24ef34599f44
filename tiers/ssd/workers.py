"""Threads that a stuck disk may keep: they never hold up the process's exit.

`concurrent.futures` joins its threads when the interpreter ends; a thread in a read that never returns would keep a daemon
from exiting. Always true: a job that has not begun can be cancelled; one that runs is never abandoned in silence.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """`count` threads that run jobs in order."""

    def __init__(self, name: str, count: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Raises: RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("no more jobs are taken")
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float) -> bool:
        """Take no more, do what is queued. Returns whether all threads ended in time."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._jobs.get()) is not None:
            future, job = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = job()
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(result)
            del work, future, job  # or this thread would keep the last job's buffers while it waits
