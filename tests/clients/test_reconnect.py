"""A daemon killed, stopped or restarted under its clients: no call outlives its deadline, no life is taken for another."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import AsyncClient, Client
from forebay.kvstore.errors import ClientError, DaemonTimeout, DaemonUnavailable, EpochEnded
from tests.clients.conftest import Connect
from tests.daemon_process import WAIT_S, DaemonProcess, eventually, facts_of, payload_of, serving, tokens_of

BLOCKS = 30
TOKENS = tokens_of(1, BLOCKS)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path)


async def stored(client: Any) -> tuple[Any, list[bytes], list[bytes]]:
    space = await client.open(facts_of())
    keys = space.keys(TOKENS)
    payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
    result = await space.put(keys, TOKENS, payloads)
    assert result.stored + result.present == BLOCKS
    return space, keys, payloads


async def until_it_answers(call: Any) -> Any:
    """Repeat a call that may fail by ClientError until the client has found the daemon again."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            return await call()
        except ClientError:
            assert time.monotonic() < deadline_s
            await asyncio.sleep(0.02)


async def nothing_held(client: Any) -> None:
    """Until the client's session holds neither lease nor allocation."""
    deadline_s = time.monotonic() + WAIT_S
    held: Any = None
    while held != (0, 0):
        assert time.monotonic() < deadline_s, held
        sessions = (await client.stats())["sessions"]
        held = sessions["leases"], sessions["uncommitted_bytes"]


def mapped() -> int:
    """Mappings of daemons' memory in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:forebay")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_killed_daemon_is_unavailable_at_once_and_found_again_when_it_is_back(
    connect: Connect, daemon: DaemonProcess
) -> None:
    client = await connect(daemon.socket)
    space, keys, payloads = await stored(client)
    epoch = client.boot_epoch
    lease = await space.acquire(keys, TOKENS)
    assert epoch and lease.valid()
    daemon.kill()
    for _ in range(3):
        with pytest.raises(DaemonUnavailable):
            await space.match(keys)
    assert client.boot_epoch == b""
    daemon.start()
    match = await until_it_answers(lambda: space.match(keys))  # the namespace opened itself again
    assert match.blocks == 0 and client.boot_epoch not in (b"", epoch)
    assert not lease.valid()
    assert [bytes(view) for view in lease.views] == payloads  # an ended life's bytes stay until its last reader ends
    lease.release()
    assert (await space.put(keys, TOKENS, payloads)).stored == BLOCKS
    out = bytearray(len(payloads[0]) * BLOCKS)
    assert await space.get_into(keys, out, TOKENS) == BLOCKS and bytes(out) == b"".join(payloads)


def test_a_restart_between_two_calls_costs_none_of_them(daemon: DaemonProcess) -> None:
    with Client(daemon.socket) as client:
        before = client.boot_epoch
        client.open(facts_of())
        daemon.kill()
        daemon.start()
        client.open(facts_of())
        assert client.boot_epoch != before


async def test_places_of_an_ended_life_cannot_be_committed(connect: Connect, daemon: DaemonProcess) -> None:
    client = await connect(daemon.socket)
    space, keys, payloads = await stored(client)
    other = tokens_of(2, BLOCKS)
    allocation = await space.allocate(space.keys(other), other)
    allocation.slots[0].view[:] = payloads[0]
    daemon.kill()
    daemon.start()
    await until_it_answers(lambda: space.match(keys))
    with pytest.raises(EpochEnded):
        await allocation.commit()
    assert (await space.match(space.keys(other))).blocks == 0


@pytest.mark.parametrize("restarts", [2, pytest.param(10, marks=pytest.mark.slow)])
async def test_restarts_leave_no_mapping_and_no_descriptor(
    connect: Connect, daemon: DaemonProcess, restarts: int
) -> None:
    client = await connect(daemon.socket)
    space, keys, _ = await stored(client)
    (await space.acquire(keys)).release()
    before = mapped(), descriptors()
    for _ in range(restarts):
        lease = await space.acquire(keys)
        assert len(lease) == BLOCKS
        daemon.kill()
        daemon.start()
        await until_it_answers(lambda: client.stats())
        lease.release()
        await stored(client)
        (await space.acquire(keys)).release()
    assert (mapped(), descriptors()) == before


async def test_an_ended_life_is_unmapped_with_its_last_reader_without_another_call(
    connect: Connect, daemon: DaemonProcess
) -> None:
    client = await connect(daemon.socket)
    space, keys, _ = await stored(client)
    lease = await space.acquire(keys)
    daemon.kill()
    with pytest.raises(DaemonUnavailable):
        await client.stats()
    held = mapped()
    lease.release()
    assert mapped() < held


async def test_a_stopped_daemon_is_a_timeout_within_the_calls_deadline(connect: Connect, daemon: DaemonProcess) -> None:
    client = await connect(daemon.socket)
    space, keys, _ = await stored(client)
    daemon.signal(signal.SIGSTOP)
    started_s = time.monotonic()
    for _ in range(3):
        with pytest.raises(DaemonTimeout):
            await space.match(keys, timeout_s=0.1)
    assert time.monotonic() - started_s < WAIT_S / 2
    daemon.signal(signal.SIGCONT)
    assert (await space.match(keys)).blocks == BLOCKS


async def test_a_stopped_daemons_full_socket_does_not_hold_a_call_past_its_deadline(
    connect: Connect, daemon: DaemonProcess
) -> None:
    client = await connect(daemon.socket, timeout_s=60.0)
    space = await client.open(facts_of())
    many = space.keys(tokens_of(3, 20_000))  # 320 kB a request: more than a socket's buffer
    daemon.signal(signal.SIGSTOP)
    started_s = time.monotonic()
    for _ in range(4):
        with pytest.raises(ClientError):
            await space.match(many, timeout_s=0.1)
    assert time.monotonic() - started_s < 30.0
    daemon.signal(signal.SIGCONT)
    assert (await until_it_answers(lambda: space.match(many))).blocks == 0


async def test_replies_that_come_too_late_give_back_what_they_granted(connect: Connect, daemon: DaemonProcess) -> None:
    client = await connect(daemon.socket)
    space, keys, payloads = await stored(client)
    other = tokens_of(4, BLOCKS)
    daemon.signal(signal.SIGSTOP)
    for _ in range(3):
        with pytest.raises(DaemonTimeout):
            await space.acquire(keys, timeout_s=0.05)
        with pytest.raises(DaemonTimeout):
            await space.allocate(space.keys(other), other, timeout_s=0.05)
        with pytest.raises(DaemonTimeout):
            await space.put(space.keys(other), other, payloads, timeout_s=0.05)
    daemon.signal(signal.SIGCONT)
    await nothing_held(client)
    assert (await space.put(space.keys(other), other, payloads)).stored == BLOCKS
    daemon.audit()


async def test_a_session_that_the_daemon_ends_is_opened_anew_and_its_memory_given_back(
    connect: Connect, tmp_path: Path
) -> None:
    with DaemonProcess(tmp_path, lease_deadline_s=0.5, socket=str(tmp_path / "e.sock")) as daemon:
        client = await connect(tmp_path / "e.sock")
        space, keys, payloads = await stored(client)
        lease = await space.acquire(keys)
        daemon.socket = tmp_path / "e.sock"
        eventually(lambda: daemon.stats()["sessions"]["quarantined_bytes"], bool)
        assert (await until_it_answers(lambda: space.match(keys))).blocks == BLOCKS
        assert not lease.valid()  # of an ended session: copies may be kept, a new look may not
        assert [bytes(view) for view in lease.views] == payloads
        lease.release()
        await client.stats()
        assert eventually(lambda: daemon.stats()["sessions"]["orphans"], lambda left: left == 0) == 0


async def test_cancelled_calls_hold_nothing(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.socket) as client:
        space, keys, payloads = await stored(client)
        for round_number in range(60):
            tokens = tokens_of(100 + round_number, BLOCKS)
            calls = [
                space.acquire(keys).__await__,
                lambda tokens=tokens: space.put(space.keys(tokens), tokens, payloads).__await__(),
                space.allocate(space.keys(tokens), tokens).__await__,
            ]

            async def one(call: Any) -> Any:
                class Step:
                    __await__ = staticmethod(call)

                return await Step()

            task = asyncio.create_task(one(calls[round_number % 3]))
            for _ in range(round_number % 7):
                await asyncio.sleep(0)
            task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            if hasattr(result, "release"):
                result.release()
            elif hasattr(result, "abort"):
                result.abort()
        await nothing_held(client)
        assert (await space.match(keys)).blocks == BLOCKS
    daemon.at_base()


def test_a_waiting_thread_is_woken_when_another_closes_the_client(daemon: DaemonProcess) -> None:
    client = Client(daemon.socket, timeout_s=WAIT_S)
    daemon.signal(signal.SIGSTOP)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            client.stats()
        except ClientError as exc:
            failures.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: client._life and client._life.transport._reading, bool)  # type: ignore[attr-defined]
    client.close()
    thread.join(WAIT_S)
    daemon.signal(signal.SIGCONT)
    assert not thread.is_alive() and len(failures) == 1
