"""A store inside the engine's process: the same blocks, found again on disk by the next process and by `forebay serve`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import Client
from forebay.embedded import EmbeddedDaemon
from forebay.server.settings import BadSettings
from tests.daemon_process import MIB, ROOT, DaemonProcess
from tests.engine_adapter.bundled_tools import engine, prompt

WRITE = """
import sys
from forebay.embedded import EmbeddedDaemon
from tests.engine_adapter.bundled_tools import main
from tests.engine_adapter.test_bundled_embedded import settings
from pathlib import Path
with EmbeddedDaemon(**settings(Path(sys.argv[1]))) as daemon:
    main(str(daemon.socket), 7, 9)
"""


def settings(folder: Path) -> dict[str, Any]:
    small = {"ram_bytes": 16 * MIB, "extent_bytes": MIB, "memory_reserve_bytes": 0, "ssd_reserve_bytes": 0}
    return small | {"ssd_bytes": 256 * MIB, "ssd_dirs": str(folder / "ssd"), "drain_s": 10.0}


def check_all_come_from_disk(where: Path) -> None:
    ids = prompt(7, 9)
    with engine(where) as reader:
        found, keys = reader.match(ids), reader.store.keys(ids)
        assert found.load_blocks == 9 and set(found.tiers) == {"ssd"}
        assert reader.load(found, 0, range(5, 14)) == [True] * 9
        assert all(reader.holds(5 + i, key) for i, key in enumerate(keys))


def test_what_an_embedded_store_kept_is_found_by_the_next_process_and_by_a_daemon(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITE, str(tmp_path)], cwd=ROOT, check=True, timeout=60)
    with EmbeddedDaemon(**settings(tmp_path)) as daemon:
        check_all_come_from_disk(daemon.socket)
    with DaemonProcess(tmp_path, **settings(tmp_path)) as served:
        check_all_come_from_disk(served.socket)


def test_an_embedded_store_is_closed_to_the_network_and_leaves_no_file_behind(tmp_path: Path) -> None:
    with EmbeddedDaemon(**settings(tmp_path)) as daemon:
        assert daemon.socket.parent.stat().st_mode & 0o777 == 0o700
        with Client(daemon.socket) as client:
            stats = client.stats()
        assert not stats.get("http_url") and not stats.get("tcp_url")
    assert not daemon.socket.parent.exists()
    assert daemon.report is not None and daemon.report.leases_left == 0
    daemon.close()


def test_settings_that_are_wrong_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="ram-byte"):
        EmbeddedDaemon(ram_byte=1)
