"""A session that ends while its process may still touch shared memory: no byte of others changes, and nothing is lost.

The vanished writer really writes: into its own mapping, after its session has ended, while others store as much as they can.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forebay.kvstore.objects import ObjectLayout
from tests.daemon_process import DaemonProcess, eventually
from tests.faults.conftest import Bystander
from tests.faults.engine_process import BLOCKS, FACTS, EngineProcess

HELD_BYTES = BLOCKS * ObjectLayout.of(FACTS).object_bytes


def quarantined(daemon: DaemonProcess) -> int:
    stats = daemon.stats()
    assert stats["health"]["quarantined_bytes"] == stats["sessions"]["quarantined_bytes"]
    found: int = stats["health"]["quarantined_bytes"]
    return found


def fill(bystander: Bystander) -> None:
    """Twice as many blocks as the memory holds, so that every slot that may be reused is."""
    for seed in range(50):
        bystander.store_more(seed)


def test_a_copy_that_goes_on_after_its_session_ended_touches_nobodys_block(
    daemon: DaemonProcess, bystander: Bystander
) -> None:
    with EngineProcess(daemon.socket, "write") as engine:
        engine.ask("cut")
        assert eventually(lambda: quarantined(daemon), bool) >= HELD_BYTES
        fill(bystander)
        engine.ask("scribble")
        fill(bystander)
        daemon.audit()
        assert quarantined(daemon) >= HELD_BYTES
        # Only its word, given on a new session once its copies have stopped, frees the memory while it lives.
        assert engine.ask("finish") == "EpochEnded"
        assert engine.ask("call") == "called"
        assert eventually(lambda: quarantined(daemon), lambda held: held == 0) == 0
        fill(bystander)
    stats = daemon.at_base(others=1)
    assert stats["sessions"]["settled_by_client_total"] == 1


def test_a_readers_bytes_stay_after_its_session_ended_until_it_says_it_has_stopped(
    daemon: DaemonProcess, bystander: Bystander
) -> None:
    with EngineProcess(daemon.socket, "acquire") as engine:
        engine.ask("cut")
        assert eventually(lambda: quarantined(daemon), bool) >= HELD_BYTES
        fill(bystander)
        assert engine.ask("read") == "good"
        engine.ask("finish")
        engine.ask("call")
        assert eventually(lambda: quarantined(daemon), lambda held: held == 0) == 0


@pytest.mark.parametrize("state", ["write", "acquire"])
def test_what_a_vanished_session_held_comes_back_when_its_process_ends(
    daemon: DaemonProcess, bystander: Bystander, state: str
) -> None:
    with EngineProcess(daemon.socket, state) as engine:
        engine.ask("cut")
        eventually(lambda: quarantined(daemon), bool)
        engine.kill()
    assert daemon.at_base(others=1)["sessions"]["settled_by_exit_total"] == 1


@pytest.mark.parametrize("state", ["write", "acquire"])
def test_a_process_stopped_past_its_deadline_wakes_up_and_harms_nobody(tmp_path: Path, state: str) -> None:
    with DaemonProcess(tmp_path, lease_deadline_s=1.0) as daemon:
        bystander = Bystander(daemon.socket)
        with bystander.client, EngineProcess(daemon.socket, state) as engine:
            engine.signal(signal.SIGSTOP)
            assert eventually(lambda: quarantined(daemon), bool) >= HELD_BYTES
            assert daemon.stats()["sessions"]["ended_by_deadline_total"] == 1
            fill(bystander)
            engine.signal(signal.SIGCONT)
            if state == "write":
                engine.ask("scribble")
            else:
                assert engine.ask("read") == "good"
            fill(bystander)
            assert quarantined(daemon) >= HELD_BYTES
            engine.ask("finish")  # what it finds out now is its own affair
            eventually(lambda: engine.ask("call"), lambda said: said == "called")
            assert eventually(lambda: quarantined(daemon), lambda held: held == 0) == 0
            bystander.check()


def test_a_full_quarantine_is_told_by_health_and_its_owner_gets_nothing_more(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path, max_quarantine_bytes=HELD_BYTES) as daemon,
        EngineProcess(daemon.socket, "write") as engine,
    ):
        engine.ask("cut")
        eventually(lambda: quarantined(daemon), bool)
        health = daemon.stats()["health"]
        assert health["ok"] is False and "quarantined" in health["reasons"][0] and health["orphans"] == 1
        assert engine.ask("more") == "OverLimit"
        Bystander(daemon.socket).client.close()  # others go on
        engine.kill()
        assert eventually(lambda: daemon.stats()["health"], lambda health: health["ok"])["reasons"] == []


def test_sessions_left_behind_by_one_process_are_bounded(daemon: DaemonProcess) -> None:
    with EngineProcess(daemon.socket, "map") as engine:
        before = daemon.descriptors()
        assert engine.ask("abandon_many") == "OverLimit"
        assert daemon.descriptors() < before + 100
    daemon.at_base()
    eventually(daemon.descriptors, lambda count: count <= before)
