"""The rules in conftest.py, each seen at work in a pytest of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SAMPLES = {
    "marked": "import pytest\n@pytest.mark.real_model\ndef test_it(): pytest.skip('no model')\n",
    "fixture": (
        "import pytest\n@pytest.fixture\ndef model(): pytest.skip('no model')\n"
        "@pytest.mark.real_model\ndef test_it(model): pass\n"
    ),
    "module": "import pytest\npytest.skip('no extra', allow_module_level=True)\n",
    "unmarked": "import pytest\ndef test_it(): pytest.skip('no such kernel feature')\n",
    "broken": "def test_it(): assert 0\n",
    "xfail": "import pytest\n@pytest.mark.real_model\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert 0\n",
}


def failing(folder: Path, ci: str) -> set[str]:
    """The samples that a pytest under CI=`ci` reports as failed or as errors."""
    folder.mkdir()
    (folder / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = real_model\n")
    for name, source in SAMPLES.items():
        (folder / f"test_{name}.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"CI": ci}, capture_output=True, text=True, timeout=100)
    return set(re.findall(r"^(?:FAILED|ERROR) test_(\w+)\.py", done.stdout, re.MULTILINE))


def test_in_ci_a_skipped_real_component_is_a_failure_and_other_skips_stay_skips(tmp_path: Path) -> None:
    assert failing(tmp_path / "ci", "true") == {"marked", "fixture", "module", "broken"}


def test_outside_ci_every_skip_stays_a_skip(tmp_path: Path) -> None:
    assert failing(tmp_path / "here", "") == {"broken"}
