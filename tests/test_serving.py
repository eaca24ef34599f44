"""`forebay serve` as a process: it comes up, tells about itself, drains on a signal and refuses what it must."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from forebay import cli

WAIT_S = 30.0
SMALL = ("--http-port", "0", "--ram-bytes", "64MiB", "--log-format", "json", "--log-level", "info")


class Served:
    """One `forebay serve` process and the lines of its log, read by a thread so that a wait has an end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(process.stderr,))
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for text in stream:
            with self._more:
                self.lines.append(json.loads(text) if text.startswith("{") else {"event": text.rstrip()})
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the log line of an event."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if line["event"] == name]

        with self._more:
            self._more.wait_for(lambda: found() or self.process.poll() is not None, WAIT_S)
            assert found(), (name, self.lines)
            return found()[0]

    def exit_code(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def serving(folder: Path, *flags: str, script: str = "") -> Iterator[Served]:
    """`forebay serve` on a socket in `folder`; `script` runs in its process first."""
    program = f"{script}\nimport sys\nfrom forebay.cli import main\nmain()"
    command = [sys.executable, "-c", program, "serve", "--socket", str(folder / "f.sock"), *SMALL, *flags]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    environ |= {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "COLUMNS": "1000"}
    served = Served(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ, cwd=folder))
    try:
        yield served
    finally:
        served.close()


def get(port: int, path: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as response:
        return json.load(response)


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "forebay", *args], capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_then_drains_says_so_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as served:
        ready = served.event("ready")
        assert get(ready["http_port"], "/readyz")["ready"] is True
        served.process.send_signal(number)
        assert served.event("draining")["signal"] == number.name
        assert "0 sessions closed" in served.event("drained")["report"]
        assert served.exit_code() == cli.EXIT_OK
    assert not (tmp_path / "f.sock").exists()


def test_status_and_stats_reach_it_over_its_socket(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.event("ready")
        at = ("--socket", str(tmp_path / "f.sock"))
        status = command("status", "--json", *at)
        assert (status.returncode, json.loads(status.stdout)["ready"]) == (cli.EXIT_OK, True), status.stderr
        stats = command("stats", "tiers.ram.capacity_bytes", "--json", *at)
        assert json.loads(stats.stdout) == 64 << 20
        unknown = command("explain", "ab" * 16, "01" * 16, *at)
        assert unknown.returncode == cli.EXIT_FAILED and "namespace" in unknown.stderr


def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        ready = first.event("ready")
        with serving(tmp_path) as second:
            assert second.exit_code() == cli.EXIT_FAILED
            assert str(tmp_path / "f.sock") in second.lines[-1]["event"]
        assert get(ready["http_port"], "/readyz")["ready"] is True


def test_a_daemon_that_was_killed_is_replaced_on_the_same_socket(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        first.event("ready")
        first.process.kill()
        first.exit_code()
    assert (tmp_path / "f.sock").exists()
    with serving(tmp_path) as second:
        second.event("ready")


def test_a_taken_http_port_is_a_failure_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(tmp_path, "--http-port", str(port)) as served:
            assert served.exit_code() == cli.EXIT_FAILED
            assert str(port) in served.lines[-1]["event"]
    assert not (tmp_path / "f.sock").exists()


def test_a_socket_in_a_missing_folder_is_a_failure_that_names_it(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such"
    with serving(tmp_path, "--socket", str(missing / "f.sock")) as served:
        assert served.exit_code() == cli.EXIT_FAILED
        assert served.lines[-1]["event"] == f"forebay: {missing}: No such file or directory"


def test_a_file_at_the_socket_path_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with serving(tmp_path, "--socket", str(path)) as served:
        assert served.exit_code() == cli.EXIT_USAGE
        assert "is no socket" in served.lines[-1]["event"]
    assert path.read_text() == "precious"


def test_more_ram_than_a_machine_can_index_is_wrong_settings(tmp_path: Path) -> None:
    with serving(tmp_path, "--ram-bytes", "8192TiB") as served:
        assert served.exit_code() == cli.EXIT_USAGE
        assert served.lines[-1]["event"].startswith("forebay: ram_bytes = 8192TiB")


def test_an_unknown_tier_is_wrong_settings(tmp_path: Path) -> None:
    with serving(tmp_path, "--tiers", "floppy") as served:
        assert served.exit_code() == cli.EXIT_USAGE
        assert "floppy" in served.lines[-1]["event"]


def test_a_second_signal_ends_a_drain_that_hangs(tmp_path: Path) -> None:
    hang = """
import asyncio
from forebay.server.daemon import Daemon
async def drain(self):
    await asyncio.sleep(3600)
Daemon.drain = drain
"""
    with serving(tmp_path, script=hang) as served:
        served.event("ready")
        served.process.send_signal(signal.SIGTERM)
        served.event("draining")
        served.process.send_signal(signal.SIGTERM)
        assert served.exit_code() == 128 + signal.SIGTERM
        served.event("exiting at once")
