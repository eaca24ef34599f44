"""The event loop's thread goes before engines where that is permitted, and no other thread does."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from forebay.server import priority


def nice_of_this_thread() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


async def _served(nice: int) -> tuple[bool, int, int]:
    done = priority.go_first(nice)
    return done, nice_of_this_thread(), await asyncio.to_thread(nice_of_this_thread)


def in_a_thread(nice: int) -> tuple[bool, int, int]:
    """What `_served` found, in a thread whose priority nobody needs afterwards."""
    found: list[tuple[bool, int, int]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(_served(nice))))
    thread.start()
    thread.join()
    return found[0]


def may_raise() -> bool:
    def try_it() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice_of_this_thread() - 1)
            allowed.append(True)
        except PermissionError:
            allowed.append(False)

    allowed: list[bool] = []
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    return allowed[0]


def test_the_loop_goes_first_and_its_workers_do_not() -> None:
    usual = nice_of_this_thread()
    raised = may_raise()
    assert in_a_thread(usual - 3) == (raised, usual - 3 if raised else usual, usual)
    assert nice_of_this_thread() == usual


def test_a_daemon_without_the_right_serves_at_the_usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, nice: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    usual = nice_of_this_thread()
    assert in_a_thread(usual - 3) == (False, usual, usual)


def test_a_daemon_that_was_started_with_a_higher_priority_keeps_it() -> None:
    usual = nice_of_this_thread()
    assert in_a_thread(usual + 1) == (False, usual, usual)
