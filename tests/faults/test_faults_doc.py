"""docs/faults.md is true: every test it names exists, and every row has a guard that can be switched off (test_guards.py)."""

from __future__ import annotations

import ast
from functools import lru_cache

from forebay.kvstore.identity import PUBLIC_SECRET, namespace_id
from tests.daemon_process import ROOT, facts_of
from tests.faults.guards import OFF
from tests.faults.rows import read_rows


@lru_cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    found = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(name for name in found if name.startswith("test_"))


def test_every_test_that_is_named_exists() -> None:
    named = [test.split("::") for row in read_rows() for test in row.tests]
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(path)]
    assert not missing


def test_every_row_has_a_guard_of_its_own_that_can_be_switched_off() -> None:
    assert sorted(row.guard for row in read_rows()) == sorted(OFF)


def test_a_value_moved_to_a_neighbouring_fact_gives_another_namespace() -> None:
    def id_of(**facts: object) -> bytes:
        return namespace_id(facts_of(**facts), tenant="default", secret=PUBLIC_SECRET)

    # Equal texts side by side: without tags and lengths their encodings would be the same.
    assert id_of(weight_format="bf16b", compute_dtype="f16") != id_of(weight_format="bf16", compute_dtype="bf16")
    assert id_of(salt=b"x") != id_of(lora_digest=b"x")
