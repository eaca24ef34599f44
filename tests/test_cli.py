"""The command line: what it prints, where, and the exit codes scripts rely on."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from forebay import __version__, cli
from forebay.kvstore.errors import BadRequest, DaemonTimeout, DaemonUnavailable, UnknownHandle
from forebay.server.http import HttpDoor
from forebay.server.settings import Settings

from .server.fakes import FakeDaemon

NAMESPACE, KEY = "ab" * 16, "01" * 16


class FakeClient:
    """What the commands ask of forebay.clients.Client."""

    def __init__(self) -> None:
        self.fail: Exception | None = None
        self.numbers: dict[str, Any] = {
            "version": "0.1.0",
            "uptime_s": 12.5,
            "http_url": "",
            "health": {"ok": True, "ready": True, "reasons": [], "quarantined_bytes": 0},
            "tiers": {"ram": {"hits_total": 12345, "breaker": "closed [probing]"}},
        }

    def stats(self) -> dict[str, Any]:
        if self.fail:
            raise self.fail
        return self.numbers


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()

    @contextmanager
    def connect(socket: Path | None, timeout_s: float) -> Iterator[FakeClient]:
        yield fake

    monkeypatch.setattr(cli, "_client", connect)
    return fake


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(args), input=stdin)


def test_version_and_help_answer_and_every_command_teaches_by_example() -> None:
    assert run("--version").stdout == f"forebay {__version__}\n"
    for command in (
        ["serve"],
        ["status"],
        ["stats"],
        ["explain"],
        ["config"],
        ["bench", "local"],
        ["bench", "index"],
        ["bench", "net"],
        ["bench", "ssd"],
        ["fsck"],
    ):
        shown = run(*command, "--help")
        assert shown.exit_code == 0
        assert "Example" in shown.stdout and "Exit codes" in shown.stdout, command


def test_nothing_heavy_is_loaded_to_show_help() -> None:
    script = (
        "import sys; sys.argv = ['forebay', '--help']\n"
        "from forebay.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'aiohttp', 'pydantic', 'numpy', 'uvloop', 'prometheus_client'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_status_says_well_with_0_and_not_ready_with_4_and_why(client: FakeClient) -> None:
    assert run("status").exit_code == cli.EXIT_OK
    client.numbers["health"] = {"ok": True, "ready": False, "reasons": ["draining"], "quarantined_bytes": 64}
    shown = run("status")
    assert shown.exit_code == cli.EXIT_UNHEALTHY
    assert "NOT READY" in shown.stdout and "draining" in shown.stdout
    shown = run("status", "--json")
    assert shown.exit_code == cli.EXIT_UNHEALTHY
    assert json.loads(shown.stdout)["reasons"] == ["draining"]


def test_stats_print_everything_or_one_section(client: FakeClient) -> None:
    everything = run("stats").stdout
    assert "tiers.ram.hits_total" in everything
    assert "closed [probing]" in everything  # brackets are text, no markup
    section = run("stats", "tiers.ram").stdout
    assert "12,345" in section and "uptime" not in section
    assert json.loads(run("stats", "--json").stdout) == client.numbers
    assert json.loads(run("stats", "tiers.ram.hits_total", "--json").stdout) == 12345
    wrong = run("stats", "tiers.ssd")
    assert wrong.exit_code == cli.EXIT_USAGE and "there is ram" in wrong.stderr
    told = json.loads(run("stats", "tiers.ssd", "--json").stdout)["error"]
    assert told["exit_code"] == cli.EXIT_USAGE and "there is ram" in told["message"]


@pytest.fixture
def door(client: FakeClient) -> Iterator[FakeDaemon]:
    """A real HTTP door over a fake daemon, in a thread of its own; the fake client tells its address."""
    daemon = FakeDaemon()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    door = HttpDoor(daemon)
    asyncio.run_coroutine_threadsafe(door.start(), loop).result(10)
    client.numbers["http_url"] = door.url
    yield daemon
    asyncio.run_coroutine_threadsafe(door.stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_explain_takes_keys_as_arguments_or_from_stdin(door: FakeDaemon) -> None:
    shown = run("explain", NAMESPACE, KEY)
    assert shown.exit_code == 0 and KEY in shown.stdout
    piped = run("explain", NAMESPACE, "-", "--json", stdin=f"{KEY}\n{NAMESPACE}\n")
    assert [row["key"] for row in json.loads(piped.stdout)] == [KEY, NAMESPACE]
    assert door.asked[-1] == (NAMESPACE, [KEY, NAMESPACE])


def test_explain_asks_for_many_keys_in_batches(door: FakeDaemon) -> None:
    keys = [f"{number:032x}" for number in range(2500)]
    piped = run("explain", NAMESPACE, "-", "--json", stdin=" ".join(keys))
    assert [row["key"] for row in json.loads(piped.stdout)] == keys
    assert [len(asked) for _, asked in door.asked] == [1024, 1024, 452]


def test_explain_tells_what_the_daemon_refused_and_when_no_door_is_open(client: FakeClient, door: FakeDaemon) -> None:
    door.fail = UnknownHandle("no session has opened it")
    shown = run("explain", NAMESPACE, KEY)
    assert shown.exit_code == cli.EXIT_FAILED and "no session has opened it" in shown.stderr
    client.numbers["http_url"] = ""
    shown = run("explain", NAMESPACE, KEY)
    assert shown.exit_code == cli.EXIT_FAILED and "http_port = off" in shown.stderr
    client.numbers["http_url"] = "http://127.0.0.1:1"
    assert run("explain", NAMESPACE, KEY).exit_code == cli.EXIT_NO_DAEMON


@pytest.mark.parametrize("args", [("xyz", KEY), (NAMESPACE, KEY[:-2]), (NAMESPACE,)])
def test_explain_refuses_what_is_no_id_before_it_asks(client: FakeClient, args: tuple[str, ...]) -> None:
    client.fail = AssertionError("asked")
    assert run("explain", *args).exit_code == cli.EXIT_USAGE


@pytest.mark.parametrize("command", [("status",), ("stats",), ("explain", NAMESPACE, KEY)])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DaemonUnavailable("nothing answers"), cli.EXIT_NO_DAEMON),
        (DaemonTimeout("no answer in 5 s"), cli.EXIT_NO_DAEMON),
        (BadRequest("no such [thing]"), cli.EXIT_FAILED),
    ],
)
def test_errors_have_their_exit_code_and_a_line_on_stderr_also_as_json(
    client: FakeClient, command: tuple[str, ...], error: Exception, code: int
) -> None:
    client.fail = error
    shown = run(*command)
    assert (shown.exit_code, shown.stdout) == (code, "")
    assert str(error) in shown.stderr
    shown = run(*command, "--json")
    assert shown.exit_code == code
    assert json.loads(shown.stdout)["error"]["exit_code"] == code


def test_no_daemon_is_exit_code_3_with_a_real_client(tmp_path: Path) -> None:
    shown = run("status", "--socket", str(tmp_path / "none.sock"))
    assert shown.exit_code == cli.EXIT_NO_DAEMON
    assert "forebay serve" in shown.stderr


def test_config_shows_values_with_their_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.toml"
    path.write_text('ram_bytes = "1GiB"\n')
    monkeypatch.setenv("FOREBAY_MAX_SESSIONS", "7")
    found = json.loads(run("config", "--config", str(path), "--json").stdout)
    assert list(found) == list(Settings.model_fields)
    assert found["ram_bytes"] == {"value": 1 << 30, "origin": str(path)}
    assert found["max_sessions"] == {"value": 7, "origin": "FOREBAY_MAX_SESSIONS"}
    table = run("config", "--config", str(path)).stdout
    assert "1GiB" in table and "FOREBAY_MAX_SESSIONS" in table
    path.write_text(run("config", "--config", str(path), "--toml").stdout)
    assert json.loads(run("config", "--config", str(path), "--json").stdout)["ram_bytes"]["value"] == 1 << 30


@pytest.mark.parametrize("command", ["config", "serve"])
def test_bad_settings_are_exit_code_2_and_name_each_problem(tmp_path: Path, command: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text('ram_byte = "1GiB"\nhttp_porto = 1\n')
    shown = run(command, "--config", str(path))
    assert shown.exit_code == cli.EXIT_USAGE
    assert "did you mean ram_bytes?" in shown.stderr and "did you mean http_port?" in shown.stderr


def test_every_flag_of_serve_is_a_setting_and_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "socket": "/tmp/x.sock",
        "socket_mode": "0660",
        "ram_bytes": "1GiB",
        "ssd_bytes": "3GiB",
        "ssd_dirs": "/a,/b",
        "http_host": "::1",
        "http_port": "off",
        "tiers": "a,b",
        "write_policy": "write_back",
        "drain_s": "3",
        "log_level": "error",
        "log_format": "json",
    }
    assert {*given, "config"} == set(inspect.signature(cli.serve).parameters)
    served: list[Settings] = []
    monkeypatch.setattr("forebay.serving.run", served.append)
    shown = run("serve", *[part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)])
    assert shown.exit_code == 0, shown.stderr
    (settings,) = served
    assert {name for name, origin in settings.provenance().items() if origin != "default"} == set(given)
    assert settings.tiers == ("a", "b") and settings.socket_mode == 0o660 and settings.http_port == -1


def fake_bench(monkeypatch: pytest.MonkeyPatch, name: str, measure: Callable[..., dict[str, Any]]) -> None:
    module = types.ModuleType(f"forebay.bench_{name}")
    module.run = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_bench_passes_its_options_on_and_prints_json_or_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def measure(**options: Any) -> dict[str, Any]:
        seen.append(options)
        return {"put_ratio_1MiB": 0.81234, "machine": {"cores": 2}}

    fake_bench(monkeypatch, "local", measure)
    fake_bench(monkeypatch, "index", measure)
    assert json.loads(run("bench", "local", "--quick", "--rounds", "3", "--json").stdout)["put_ratio_1MiB"] == 0.81234
    assert seen[-1] == {"quick": True, "rounds": 3, "size_mib": 256}
    assert "machine.cores" in run("bench", "index", "--quick").stdout
    assert seen[-1]["quick"] is True
    fake_bench(monkeypatch, "ssd", measure)
    assert run("bench", "ssd", "--directory", "/d", "--json").exit_code == 0
    assert seen[-1] == {"quick": False, "rounds": 7, "size_gib": 8, "blocks": 1_000_000, "directory": Path("/d")}


def test_a_bug_in_a_command_shows_itself(client: FakeClient) -> None:
    client.fail = ValueError("a bug")
    assert isinstance(run("status").exception, ValueError)


def test_a_token_file_that_cannot_be_read_is_said_and_no_traceback(tmp_path: Path) -> None:
    environ = {**os.environ, "FOREBAY_TOKEN_FILE": str(tmp_path / "nowhere"), "FOREBAY_SOCKET": str(tmp_path / "s")}
    command = [sys.executable, "-m", "forebay", "status"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "nowhere" in done.stderr + done.stdout and "Traceback" not in done.stderr
