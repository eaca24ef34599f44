"""fork() in a client's process: the child is refused clearly, the parent goes on, and no child speaks or writes for it."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.clients import Client, Namespace
from forebay.kvstore.errors import UsedAfterFork
from tests.daemon_process import DaemonProcess, facts_of, payload_of, serving, tokens_of

TOKENS = tokens_of(1, 20)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path)


@pytest.fixture
def space(daemon: DaemonProcess) -> Iterator[Namespace]:
    with Client(daemon.socket) as client:
        space = client.open(facts_of())
        put(space, TOKENS)
        yield space
    daemon.at_base()


def put(space: Namespace, tokens: list[int]) -> None:
    keys = space.keys(tokens)
    space.put(keys, tokens, [payload_of(space.id, key, space.layout().payload_bytes) for key in keys])


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child. Returns its exit status: 0 when it ended well, -signal when it was killed."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_is_told_to_open_its_own_client_and_can(daemon: DaemonProcess, space: Namespace) -> None:
    keys = space.keys(TOKENS)

    def child() -> None:
        for call in (space.client.stats, lambda: space.match(keys), lambda: space.acquire(keys)):
            with pytest.raises(UsedAfterFork, match="open a new one in the child"):
                call()
        space.client.close()  # not its parent's session
        with Client(daemon.socket) as own:
            assert own.open(facts_of()).match(keys).blocks == 20

    assert in_child(child) == 0
    assert space.match(keys).blocks == 20


def test_a_child_that_leaves_its_parents_blocks_gives_back_nothing_of_its_parents(space: Namespace) -> None:
    keys = space.keys(TOKENS)
    other = tokens_of(2, 5)
    with space.acquire(keys, TOKENS) as lease, space.allocate(space.keys(other), other) as allocation:

        def child() -> None:
            lease.release()
            with pytest.raises(UsedAfterFork):
                allocation.commit()
            allocation.abort()

        assert in_child(child) == 0
        sessions = space.client.stats()["sessions"]
        assert sessions["leases"] == 1 and sessions["uncommitted_bytes"] > 0
        assert lease.valid() and lease.verify() == 20
        for slot in allocation.slots:
            assert slot.view is not None
            slot.view[:] = payload_of(space.id, space.keys(other)[slot.index], len(slot.view))
        assert allocation.commit().stored == 5


def test_a_child_cannot_write_through_its_parents_mapping(space: Namespace) -> None:
    other = tokens_of(3, 5)
    with space.allocate(space.keys(other), other) as allocation:

        def child() -> None:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            view = allocation.slots[0].view
            assert view is not None
            view[:8] = b"late!!!!"

        import faulthandler

        was_on = faulthandler.is_enabled()
        faulthandler.disable()
        try:
            assert in_child(child) == -signal.SIGSEGV  # the mapping does not exist there
        finally:
            if was_on:
                faulthandler.enable()
        view = allocation.slots[0].view
        assert view is not None and bytes(view[:8]) != b"late!!!!"
