"""docs/faults.md is true: every test it names exists, and each guard's test goes red without it (test_guards.py)."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

from forebay.kvstore.identity import PUBLIC_SECRET, namespace_id
from tests.daemon_process import ROOT, facts_of
from tests.faults.guards import OFF

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [line for line in (ROOT / "docs/faults.md").read_text().splitlines() if NAMED.search(line)]


@lru_cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


def test_every_test_that_is_named_exists() -> None:
    named = [match.groups() for row in ROWS for match in NAMED.finditer(row)]
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert not missing


def test_every_guard_stands_in_the_table_beside_the_test_that_it_turns_red() -> None:
    in_table = {}
    for row in ROWS:
        guard = row.rstrip(" |").rsplit("|", 1)[1].strip()
        if guard != "—":
            in_table[guard] = [f"{path}::{name}" for path, name in NAMED.findall(row)]
    assert set(in_table) == set(OFF)
    for guard, off in OFF.items():
        assert off.test in in_table[guard], guard


def test_a_value_moved_to_a_neighbouring_fact_gives_another_namespace() -> None:
    def id_of(**facts: object) -> bytes:
        return namespace_id(facts_of(**facts), tenant="default", secret=PUBLIC_SECRET)

    # Equal texts side by side: without tags and lengths their encodings would be the same.
    assert id_of(weight_format="bf16b", compute_dtype="f16") != id_of(weight_format="bf16", compute_dtype="bf16")
    assert id_of(salt=b"x") != id_of(lora_digest=b"x")
