"""SIGKILL, of an engine in every state and of the daemon under its clients: nothing leaks, nobody hangs, no wrong byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore.errors import DaemonUnavailable
from tests.daemon_process import WAIT_S, DaemonProcess, eventually, payload_of, serving, tokens_of
from tests.faults.conftest import Bystander
from tests.faults.engine_process import BLOCKS, FACTS, EngineProcess

STATES = ["hello", "open", "map", "allocate", "write", "commit", "acquire", "asked", "prefetch"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("kill"), lower="slow")


@pytest.mark.parametrize("state", STATES)
def test_an_engine_killed_in_any_state_leaves_nothing_and_harms_nobody(shared: DaemonProcess, state: str) -> None:
    bystander = Bystander(shared.socket)
    with bystander.client:
        before = shared.descriptors()
        with EngineProcess(shared.socket, state) as engine:
            engine.kill()
        shared.at_base(others=1)
        bystander.check()
        # What it left visible, if anything, is whole; what it held is free to be written by another.
        space = bystander.client.open(FACTS)
        tokens = tokens_of(7, BLOCKS)
        keys = space.keys(tokens)
        with space.acquire(keys, tokens) as lease:
            assert lease.verify() == len(lease)
            assert all(
                view == payload_of(space.id, key, len(view)) for key, view in zip(keys, lease.views, strict=False)
            )
        put = space.put(keys, tokens, [payload_of(space.id, key, space.layout().payload_bytes) for key in keys])
        assert put.stored + put.present == BLOCKS
        space.delete(keys)
        grown = 2 * 16  # two for every extent that was made meanwhile, and stays
        assert shared.descriptors() <= before + grown
    shared.at_base()


def test_killed_engines_leave_no_descriptor_in_the_daemon(daemon: DaemonProcess, bystander: Bystander) -> None:
    with EngineProcess(daemon.socket, "write") as first:
        first.kill()
    daemon.at_base(others=1)
    before = daemon.descriptors()
    for state in ("allocate", "write", "map", "acquire"):
        with EngineProcess(daemon.socket, state) as engine:
            engine.kill()
    daemon.at_base(others=1)
    assert daemon.descriptors() <= before + 2  # an extent more


def test_a_process_that_only_its_forked_child_outlives_is_gone(daemon: DaemonProcess, bystander: Bystander) -> None:
    with EngineProcess(daemon.socket, "write") as engine:
        child = int(engine.ask("fork"))  # the child keeps the socket and every mapping it may have inherited
        try:
            engine.kill()
            daemon.at_base(others=1)
            for seed in range(50):
                bystander.store_more(seed)
        finally:
            os.kill(child, 9)


def test_a_daemon_killed_over_and_over_leaves_no_memory_behind(tmp_path: Path) -> None:
    shm = set(os.listdir("/dev/shm"))
    with DaemonProcess(tmp_path) as daemon:
        for _ in range(3):
            Bystander(daemon.socket).client.close()
            daemon.kill()
            daemon.start()
    assert set(os.listdir("/dev/shm")) == shm
    assert set(os.listdir(tmp_path)) <= {"d.sock", "d.sock.lock", "daemon.log"}


def test_two_daemons_on_one_socket_are_one_too_many_and_the_first_goes_on(
    daemon: DaemonProcess, bystander: Bystander
) -> None:
    second = DaemonProcess.__new__(DaemonProcess)
    second.socket, second._log = daemon.socket, daemon.socket.parent / "second.log"
    second._settings, second._lower = daemon._settings, ""
    try:
        with pytest.raises(AssertionError, match="another daemon serves"):
            second.start()
        assert second.process.wait(WAIT_S) != 0
    finally:
        second.kill()
    bystander.check()


def test_a_prompt_cached_before_a_crash_is_a_miss_or_exact_after_it(daemon: DaemonProcess) -> None:
    before = Bystander(daemon.socket)
    with before.client:
        daemon.kill()
        daemon.start()
        again = Bystander(daemon.socket)
        with again.client:
            assert again.stored == len(again.keys)  # none was found
            again.check()
        eventually(lambda: _checked(before), bool)


def _checked(bystander: Bystander) -> bool:
    try:
        bystander.check()
    except DaemonUnavailable:
        return False
    return True
