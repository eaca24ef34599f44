"""Every guard switched off in turn: the first test of its row in docs/faults.md goes red, so it can."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.daemon_process import ROOT
from tests.faults.guards import OFF, VARIABLE
from tests.faults.rows import read_rows


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if off.quick else pytest.mark.slow) for name, off in OFF.items()]
)
def test_with_its_guard_switched_off_a_test_goes_red(name: str) -> None:
    (test,) = [row.tests[0] for row in read_rows() if row.guard == name]
    command = [sys.executable, "-m", "pytest", "-p", "tests.faults.guards", "-p", "no:cacheprovider", "-x", "-q"]
    done = subprocess.run(
        [*command, "--timeout=60", "--no-header", test],
        cwd=ROOT,
        env={**os.environ, VARIABLE: name},
        capture_output=True,
        text=True,
        timeout=110,
    )
    # 1: tests ran and failed. Anything else, such as 2 or 4, is a broken test or a name that has gone.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout or "1 error" in done.stdout, done.stdout
