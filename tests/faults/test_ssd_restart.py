"""Blocks on the disk outlive the daemon: killed, stopped, or started again on a directory that somebody else holds."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import Client
from tests.daemon_process import MIB, WAIT_S, DaemonProcess, eventually, facts_of, payload_of, tokens_of

BLOCKS = 40


def with_ssd(folder: Path, **changes: Any) -> DaemonProcess:
    settings = {"ssd_bytes": 16 * MIB, "ssd_dirs": str(folder / "ssd"), "ssd_reserve_bytes": 0, "drain_s": 5.0}
    return DaemonProcess(folder, **(settings | changes))


def fill(daemon: DaemonProcess, seed: int = 1) -> None:
    with Client(daemon.socket) as client:
        space = client.open(facts_of())
        tokens = tokens_of(seed, BLOCKS)
        keys = space.keys(tokens)
        payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
        assert space.put(keys, tokens, payloads).stored == BLOCKS
        assert space.flush(keys).durable == BLOCKS


def found_from_ssd(daemon: DaemonProcess, seed: int = 1) -> int:
    """How many blocks are found again; each must have its bytes, and none can come from RAM."""
    with Client(daemon.socket) as client:
        space = client.open(facts_of())
        tokens = tokens_of(seed, BLOCKS)
        keys = space.keys(tokens)
        tiers = {run.tier for run in space.match(keys).runs}
        assert tiers <= {"ssd"}, tiers
        with space.acquire(keys, tokens, wait_s=5.0) as lease:
            assert lease.verify() == len(lease)
            for key, view in zip(keys, lease.views, strict=False):
                assert view == payload_of(space.id, key, len(view))
            return len(lease)


def test_what_was_flushed_is_found_after_a_kill_byte_by_byte(tmp_path: Path) -> None:
    with with_ssd(tmp_path) as daemon:
        fill(daemon)
        for _ in range(2):
            daemon.kill()
            daemon.start()
            assert found_from_ssd(daemon) == BLOCKS
        stats = daemon.stats()
        assert stats["tiers"]["ssd"]["objects"] == BLOCKS and stats["health"]["reasons"] == []


def test_a_drain_puts_on_the_disk_what_only_ram_has(tmp_path: Path) -> None:
    with with_ssd(tmp_path, write_policy="write_back") as daemon:
        with Client(daemon.socket) as client:
            space = client.open(facts_of())
            tokens = tokens_of(1, BLOCKS)
            keys = space.keys(tokens)
            space.put(keys, tokens, [payload_of(space.id, key, space.layout().payload_bytes) for key in keys])
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(WAIT_S) == 0
        daemon.kill()
        daemon.start()
        assert found_from_ssd(daemon) == BLOCKS


def test_what_was_deleted_does_not_come_back_after_a_kill(tmp_path: Path) -> None:
    with with_ssd(tmp_path) as daemon:
        fill(daemon)
        with Client(daemon.socket) as client:
            space = client.open(facts_of())
            keys = space.keys(tokens_of(1, BLOCKS))
            assert space.delete(keys[10:]) == BLOCKS - 10
        daemon.kill()
        (tmp_path / "ssd" / "index" / "data.mdb").unlink()  # nor if the index has to be made anew
        daemon.start()
        eventually(lambda: daemon.stats()["tiers"]["ssd"]["serving"], bool)
        assert found_from_ssd(daemon) == 10


@pytest.mark.parametrize("size", [0, 5000, 40_000])
def test_a_truncated_index_costs_no_block_and_no_daemon(tmp_path: Path, size: int) -> None:
    with with_ssd(tmp_path) as daemon:
        fill(daemon)
        daemon.kill()
        with (tmp_path / "ssd" / "index" / "data.mdb").open("r+b") as index:
            index.truncate(size)
        daemon.start()
        eventually(lambda: daemon.stats()["tiers"]["ssd"]["serving"], bool)
        assert found_from_ssd(daemon) == BLOCKS


def test_a_second_daemon_on_a_directory_says_so_serves_without_it_and_takes_over_when_it_can(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with with_ssd(tmp_path) as first:
        fill(first)
        with with_ssd(tmp_path / "other", ssd_dirs=str(tmp_path / "ssd")) as second:
            (reason,) = second.stats()["health"]["reasons"]
            assert f"in use by process {first.pid}" in reason
            assert found_from_ssd(second) == 0
            first.kill()
            eventually(lambda: second.stats()["tiers"]["ssd"]["serving"], bool)
            eventually(lambda: second.stats()["tiers"]["ssd"]["healthy"], bool)
            assert found_from_ssd(second) == BLOCKS
