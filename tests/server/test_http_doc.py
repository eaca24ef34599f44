"""docs/reference/http.md has every route and every error, and its examples work as they stand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.server import http_routes
from forebay.server.blocks import Blocks
from forebay.server.http import HttpDoor
from tests.daemon_process import DaemonProcess, serving

from .fakes import FakeDaemon

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()


def rows(head: str) -> list[list[str]]:
    lines = PAGE.split(f"{head}\n")[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_route_is_there_with_its_rights() -> None:
    expected = []
    for route in HttpDoor(FakeDaemon(), blocks=Blocks.__new__(Blocks)).routes():
        right = (
            "operator"
            if route.operator
            else " or ".join(r for r in ("read", "write", "admin") if r in (route.rights or ()))
        )
        expected.append([route.method, f"`{route.path}`", right or "–"])
    assert [row[:3] for row in rows("| method | path | right | what it does |")] == expected


def test_every_error_is_there_with_its_status() -> None:
    listed = {(int(row[0]), row[1].strip("`")) for row in rows("| status | code | meaning |")}
    assert listed >= {(status, error.code) for error, status in http_routes._STATUS.items()}
    source = "".join(path.read_text() for path in (Path(__file__).parents[2] / "server").glob("http*.py"))
    made = set(re.findall(r'error_response\((\d+), "(\w+)"', source)) - {("400", "cut")}  # nobody gets that one
    made |= {("403", code) for code in re.findall(r'_Foreign\("(\w+)"', source)}
    assert listed >= {(int(status), code) for status, code in made}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path, http_port=0)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_say_what_they_say(daemon: DaemonProcess) -> None:
    names = {"URL": daemon.stats()["http_url"], "PATH": "/usr/bin:/bin"}
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, said = cut(example)
            done = subprocess.run(["bash", "-c", command], env=names, capture_output=True, text=True, timeout=20)
            assert done.returncode == 0, done.stderr
            assert same(done.stdout.strip(), said.strip()), f"{command}\n{done.stdout}\ninstead of\n{said}"
            if done.stdout.startswith("{"):
                found = json.loads(done.stdout)
                names["NS"] = found.get("namespace", names.get("NS", ""))
                names["KEY"] = found.get("keys", [names.get("KEY", "")])[0]


def cut(example: str) -> tuple[str, str]:
    """A command, with its continuation lines, and what it printed."""
    lines = example.splitlines()
    end = 1
    while end < len(lines) and lines[end].startswith("    "):
        end += 1
    return "\n".join(lines[:end]), "\n".join(lines[end:])


def same(found: str, said: str) -> bool:
    """Equal but for ids, which are new with every change of the format, and measured numbers."""
    if not said.startswith("{"):
        return found == said
    return shape(json.loads(found)) == shape(json.loads(said))


def shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value]
    if isinstance(value, float):
        return "a number"
    return "an id" if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) else value
