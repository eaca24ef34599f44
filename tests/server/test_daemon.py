"""A daemon inside the test's own process: what it drains, says and leaves. As a process: tests/faults/test_kill.py."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import AsyncClient
from forebay.kvstore.errors import ClientError, Draining
from forebay.server.daemon import Daemon
from forebay.server.door import DaemonAlreadyRunning
from forebay.server.settings import BadSettings, Settings
from forebay.tiers.memory import MemoryTier
from forebay.tiers.wrappers import Throttled
from tests.daemon_process import MIB, facts_of, payload_of, tokens_of

TOKENS = tokens_of(1, 8)


def settings_of(folder: Path, **changes: Any) -> Settings:
    small = {"ram_bytes": 4 * MIB, "extent_bytes": MIB, "memory_reserve_bytes": 0, "http_port": -1, "drain_s": 2.0}
    return Settings.load(None, **(small | {"socket": str(folder / "d.sock")} | changes))


async def put(client: AsyncClient) -> Any:
    space = await client.open(facts_of())
    keys = space.keys(TOKENS)
    payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
    assert (await space.put(keys, TOKENS, payloads)).stored == len(keys)
    return space


async def test_a_drain_copies_down_what_only_ram_has_and_says_what_it_did(tmp_path: Path) -> None:
    below = MemoryTier("below", 4 * MIB)
    daemon = Daemon(settings_of(tmp_path, write_policy="write_back"), lower=[below])
    await daemon.start()
    async with AsyncClient(daemon.settings.socket) as client:
        await put(client)
        report = await daemon.drain()
        assert (report.sessions_closed, report.objects_copied, report.objects_left) == (1, 8, 0)
        with pytest.raises(ClientError):
            await client.stats()
    assert not daemon.settings.socket.exists()


@pytest.mark.parametrize(
    ("policy", "below_when_answered"), [("write_through", 8), ("clean_ahead", 0), ("write_back", 0)]
)
async def test_only_write_through_answers_after_the_copy(tmp_path: Path, policy: str, below_when_answered: int) -> None:
    below = MemoryTier("below", 4 * MIB)
    daemon = Daemon(settings_of(tmp_path, write_policy=policy), lower=[Throttled(below, latency_s=0.3)])
    await daemon.start()
    async with AsyncClient(daemon.settings.socket) as client:
        await put(client)
        assert len(list(below.keys())) == below_when_answered
    await daemon.drain()


async def test_a_drain_without_a_tier_below_says_what_was_lost(tmp_path: Path) -> None:
    daemon = Daemon(settings_of(tmp_path))
    await daemon.start()
    async with AsyncClient(daemon.settings.socket) as client:
        await put(client)
        assert "8 objects lost with RAM" in str(await daemon.drain())


async def test_a_draining_daemon_lets_holders_finish_and_takes_nothing_new(tmp_path: Path) -> None:
    daemon = Daemon(settings_of(tmp_path, drain_s=20.0))
    await daemon.start()
    async with AsyncClient(daemon.settings.socket) as client:
        space = await put(client)
        keys = space.keys(TOKENS)
        lease = await space.acquire(keys)
        drain = asyncio.create_task(daemon.drain())
        await asyncio.sleep(0)
        assert daemon.draining
        for call in (space.acquire(keys), space.allocate(space.keys(tokens_of(2, 2)), tokens_of(2, 2))):
            with pytest.raises(Draining):
                await call
        assert daemon.health()["reasons"] == ["draining"] and daemon.health()["ready"] is False
        lease.release()
        report = await drain
    assert (report.leases_left, report.allocations_left) == (0, 0)


async def test_a_drained_daemon_leaves_no_descriptor_and_no_task(tmp_path: Path) -> None:
    before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    daemon = Daemon(settings_of(tmp_path, drain_s=0.0))
    await daemon.start()
    client = await AsyncClient(daemon.settings.socket).connect()
    space = await put(client)
    lease = await space.acquire(space.keys(TOKENS))
    assert (await daemon.drain()).leases_left == 1  # and an orphan, since this process lives
    with pytest.raises(ClientError):
        await client.stats()
    lease.release()
    await client.close()
    assert (len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())) == (before, tasks)


async def test_a_start_that_fails_leaves_the_socket_to_whoever_has_it(tmp_path: Path) -> None:
    first = Daemon(settings_of(tmp_path))
    await first.start()
    try:
        with pytest.raises(DaemonAlreadyRunning, match=r"d\.sock"):
            await Daemon(settings_of(tmp_path)).start()
        async with AsyncClient(first.settings.socket) as client:
            await client.stats()
    finally:
        await first.drain()


async def test_a_planted_folder_for_the_default_socket_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.server.door.fallback_folder", lambda: tmp_path)
    os.chmod(tmp_path, 0o777)  # whoever made it so could put a socket of their own there
    with pytest.raises(BadSettings, match="others may write"):
        await Daemon(settings_of(tmp_path)).start()
    os.chmod(tmp_path, 0o700)
    daemon = Daemon(settings_of(tmp_path))
    await daemon.start()
    await daemon.drain()


async def test_a_tier_whose_package_cannot_be_loaded_is_wrong_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint(name="floppy", value="no_such_package:Tier", group="forebay.tiers")
    monkeypatch.setattr("forebay.server.daemon.entry_points", lambda group: [broken])
    with pytest.raises(BadSettings, match=r"floppy is installed and can't be loaded.*no_such_package"):
        await Daemon(settings_of(tmp_path, tiers="floppy")).start()


async def test_a_tier_that_is_not_installed_is_wrong_settings_and_frees_the_socket(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="floppy"):
        await Daemon(settings_of(tmp_path, tiers="floppy")).start()
    daemon = Daemon(settings_of(tmp_path))
    await daemon.start()
    await daemon.drain()
