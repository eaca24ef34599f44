"""`forebay`'s daemon killed with SIGKILL over and over under four engines: they are served again, and nothing is left behind.

`FOREBAY_KILLS` says how often; `make test-faults` takes 100.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.daemon_process import MIB, DaemonProcess, eventually
from tests.faults.campaign.engine import Engine
from tests.faults.campaign.processes import ENGINES, EXPECTED, resumption

KILLS = int(os.environ.get("FOREBAY_KILLS", "10"))


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not shared: its heap, not the blocks it keeps."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.slow
def test_a_daemon_killed_under_load_is_met_again_and_leaves_nothing_behind(tmp_path: Path) -> None:
    seed = int(os.environ.get("FOREBAY_SEED", random.SystemRandom().randrange(2**32)))
    print(f"replay with FOREBAY_SEED={seed}")
    rng = random.Random(seed)
    shared = set(os.listdir("/dev/shm"))
    ssd = {"ssd_bytes": 32 * MIB, "ssd_dirs": str(tmp_path / "ssd"), "ssd_reserve_bytes": 0}
    ready_s: list[float] = []
    with DaemonProcess(tmp_path, **ssd) as daemon:
        base = resident_bytes(daemon.pid), daemon.descriptors()
        engines = [Engine(daemon.socket, rng.randrange(1 << 32), share=i % 2, calm=True) for i in range(ENGINES)]
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.1, 0.4))
            daemon.kill()
            daemon.start()
            ready_s.append(time.monotonic())
            wait_until_served(engines)
        reports = [engine.ask() for engine in engines]
        stats = daemon.at_base()
        assert stats["sessions"]["open"] <= 1
        eventually(lambda: daemon.stats()["tiers"]["ssd"]["serving"], bool)
        for report in reports:
            assert report.reads and not report.wrong, report.wrong[:3]
            assert set(report.misses) <= EXPECTED, report.misses
        waits = sorted(resumption(reports, ready_s))
        print(
            f"{KILLS} kills: served again {waits[len(waits) // 2]:.3f} s (median), {waits[-1]:.3f} s (most) after a start"
        )
        memory, descriptors = resident_bytes(daemon.pid), daemon.descriptors()
        print(f"heap {base[0] >> 20} to {memory >> 20} MiB, descriptors {base[1]} to {descriptors}")
        assert memory < base[0] + 64 * MIB
        assert descriptors <= base[1] + 2 * 16 + 16  # two an extent, and one a segment file
    assert set(os.listdir("/dev/shm")) == shared
    assert set(os.listdir(tmp_path)) <= {"d.sock", "d.sock.lock", "daemon.log", "ssd"}
    assert all(
        path.name[-4:] in (".seg", ".mdb", ".log", "json") or path.name == "lock" for path in files(tmp_path / "ssd")
    )


def wait_until_served(engines: list[Engine]) -> None:
    """Until each has had an answer to a request that it began after this call."""
    before = [engine.served for engine in engines]
    eventually(
        lambda: [engine.served for engine in engines],
        lambda now: all(n > b + 1 for n, b in zip(now, before, strict=True)),
    )


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
