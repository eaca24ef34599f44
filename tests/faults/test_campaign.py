"""The campaign has teeth: without any one of the checks that keep wrong bytes away it goes red."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.daemon_process import ROOT
from tests.faults.campaign.checks import CHECKS

SEEN = {
    "key": "wrong bytes",
    "token ids": "wrong bytes",
    "checksum": "wrong bytes",
    "generation": "a lease on deleted blocks is good",
    "epoch": "a lease of an ended daemon is good",
}


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_a_campaign_without_one_of_the_checks_goes_red(check: str) -> None:
    command = [sys.executable, "-m", "tests.faults.campaign", "--share", "0.03", "--without", check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert SEEN[check] in done.stdout, done.stdout + done.stderr
