"""The files in deploy/ name what exists: settings, arguments, metrics; and systemd is told when the daemon is ready."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.server.settings import Settings

DEPLOY = Path(__file__).parents[1] / "deploy"
WAIT_S = 30


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bFOREBAY_[A-Z_0-9]+", text))


@pytest.mark.parametrize("name", ["forebay.service", "Dockerfile", "kubernetes.yaml"])
def test_the_environment_names_settings(name: str) -> None:
    named = variables((DEPLOY / name).read_text())
    assert named, "the file sets nothing any more: drop it from this test"
    assert {each.removeprefix("FOREBAY_").lower() for each in named} <= set(Settings.model_fields)


def test_the_config_map_is_a_settings_file(tmp_path: Path) -> None:
    documents: list[Any] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    kinds = {document["kind"]: document for document in documents}
    config = tmp_path / "config.toml"
    config.write_text(kinds["ConfigMap"]["data"]["config.toml"])
    settings = Settings.load(config)
    pod = kinds["DaemonSet"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.drain_s
    (container,) = pod["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert limit > settings.ram_bytes
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"]


def test_the_unit_waits_longer_than_a_drain_takes() -> None:
    unit = (DEPLOY / "forebay.service").read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert int(stop_s) > Settings.model_fields["drain_s"].default
    assert "Type=notify" in unit


@pytest.mark.parametrize("name", ["forebay.service", "kubernetes.yaml"])
def test_the_commands_take_these_arguments(name: str) -> None:
    text = (DEPLOY / name).read_text()
    if name == "forebay.service":
        (line,) = re.findall(r"^ExecStart=\S+/forebay (.*)$", text, re.M)
        arguments = shlex.split(line)
    else:
        (line,) = re.findall(r"args: (\[.*\])", text)
        arguments = json.loads(line)
    known = subprocess.run(
        [sys.executable, "-m", "forebay", arguments[0], "--help"], capture_output=True, text=True, check=True
    ).stdout
    for flag in (each for each in arguments if each.startswith("--")):
        assert flag in known


@pytest.fixture
def notified(tmp_path: Path) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(WAIT_S)
        yield sock


def test_systemd_is_told_and_the_dashboard_asks_for_metrics_that_exist(tmp_path: Path, notified: socket.socket) -> None:
    # ssd on, so that its metrics are there to be asked for.
    settings = {
        "FOREBAY_SOCKET": str(tmp_path / "forebay.sock"),
        "FOREBAY_SSD_DIRS": str(tmp_path / "disk"),
        "FOREBAY_SSD_BYTES": "256MiB",
        "FOREBAY_SSD_RESERVE_BYTES": "0",
        "FOREBAY_RAM_BYTES": "128MiB",
        "FOREBAY_HTTP_PORT": "0",
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
    }
    process = subprocess.Popen([sys.executable, "-m", "forebay", "serve"], env={**os.environ, **settings})
    try:
        assert notified.recv(4096).startswith(b"READY=1\n")
        told = subprocess.run(
            [sys.executable, "-m", "forebay", "stats", "--json"],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        url = json.loads(told)["http_url"]
        with urllib.request.urlopen(f"{url}/metrics", timeout=WAIT_S) as answer:
            exposed = set(re.findall(r"^(forebay_\w+)", answer.read().decode(), re.M))
        process.send_signal(signal.SIGTERM)
        assert notified.recv(4096).startswith(b"STOPPING=1\n")
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            asked.update(re.findall(r"forebay_\w+", target["expr"]))
    assert len(asked) > 20
    assert asked <= exposed


def test_a_supervisor_that_is_gone_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.server.notify import notify

    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    notify("READY=1")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("READY=1")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "forebay.service").read_text()
    unit = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.M)
    path = tmp_path / "forebay.service"
    path.write_text(re.sub(r"^(User|Group)=.*$", r"\1=root", unit, flags=re.M))
    found = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
