"""docs/tutorial.md works as it stands, against a real daemon in a process of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"(<!-- needs a model -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT = "\n".join(code for needs_model, code in BLOCK.findall(PAGE) if not needs_model)
EXPECTED = re.findall(r"# → (.*)$", SCRIPT, re.MULTILINE)


def answers(path: Path) -> bool:
    """Whether somebody listens: the path alone is there a moment before."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


@pytest.fixture
def daemon_socket(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "forebay.sock"
    command = [sys.executable, "-m", "forebay", "serve", "--socket", str(path), "--http-port", "off"]
    command += ["--ram-bytes", "128MiB"]
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stderr=log)
        try:
            deadline_s = time.monotonic() + 30
            while not answers(path) and daemon.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.02)
            assert daemon.poll() is None, (tmp_path / "log").read_text()
            yield path
        finally:
            daemon.terminate()
            assert daemon.wait(30) == 0, (tmp_path / "log").read_text()


def test_the_tutorial_prints_what_it_says(daemon_socket: Path, tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "FOREBAY_SOCKET": str(daemon_socket)}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == EXPECTED


def test_every_print_says_what_it_prints() -> None:
    assert SCRIPT.count("print(") == len(EXPECTED) > 15


def test_the_block_that_needs_a_model_names_what_is_there() -> None:
    (skipped,) = [code for needs_model, code in BLOCK.findall(PAGE) if needs_model]
    adapter = pytest.importorskip("forebay.engine_adapter.transformers")
    for name in re.findall(r"engine\.(\w+)\(", skipped):
        assert callable(getattr(adapter.PrefixReuse, name))
    for chain in re.findall(r"(?:cold|warm)\.(\w+)\.(\w+)", skipped):
        part = {"reuse": adapter.Reuse, "timings": adapter.Timings}[chain[0]]
        assert chain[0] in adapter.GenerationResult.__annotations__ and chain[1] in part.__annotations__
