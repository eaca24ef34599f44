"""The rows of docs/faults.md, as the tests about that page read them."""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.daemon_process import ROOT

_NAMED = re.compile(r"`(tests/[\w/]+\.py::\w+)`")


class Row(NamedTuple):
    """A fault: `tests` in the row's order, the first of which goes red when `guard` is switched off."""

    guard: str
    tests: list[str]


def read_rows() -> list[Row]:
    """Every row that names tests and a guard, from the page's tables of four columns."""
    rows = []
    for line in (ROOT / "docs/faults.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        tests = _NAMED.findall(line)
        if tests and len(cells) == 4:
            rows.append(Row(cells[-1], tests))
    return rows
