"""Imports point one way, towards kvstore; light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT: dict[str, set[str]] = {
    "kvstore": set(),
    "tiers": {"kvstore"},
    "clients": {"kvstore"},
    "server": {"kvstore", "tiers"},
    "engine": set(),
    "engine_adapter": {"engine", "clients", "kvstore", "tiers"},
}
HEAVY = ("torch", "lmdb", "aiohttp")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(source: str, module: str) -> Iterator[str]:
    """Every absolute name that `source` imports, also inside functions. `module` is its own dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def wrong_imports(source: str, module: str) -> list[str]:
    """Imports that `module` (forebay.<package>...) must not have: a forbidden package, or a folder by its bare name."""
    package = module.split(".")[1]
    allowed = MAY_IMPORT[package] | {package}
    wrong = []
    for name in imported(source, module):
        first, _, rest = name.partition(".")
        if first in MAY_IMPORT or (first == "forebay" and rest.split(".")[0] not in allowed | {"__version__"}):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_towards_kvstore(package: str) -> None:
    assert modules(package)
    for path in modules(package):
        module = ".".join(("forebay", *path.relative_to(ROOT).with_suffix("").parts))
        assert wrong_imports(path.read_text(), module) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "from forebay.server import http",
        "import forebay.clients.local",
        "from forebay import serving",
        "def f():\n    from forebay.tiers.ram import Ram",
        "from ..clients import Client",
        "from kvstore.keys import block_keys",
    ],
)
def test_the_check_sees_a_wrong_import_in_every_spelling(source: str) -> None:
    assert wrong_imports(source, "forebay.kvstore.keys")


def test_the_check_lets_right_imports_pass() -> None:
    source = (
        "import os\nfrom .errors import TierError\nfrom forebay.kvstore import tier\nfrom forebay import __version__"
    )
    assert wrong_imports(source, "forebay.kvstore.keys") == []


@pytest.mark.parametrize("package", ["kvstore", "clients"])
def test_importing_kvstore_or_clients_loads_nothing_heavy(package: str) -> None:
    script = f"""
import importlib, pkgutil, sys
import forebay.{package} as package
for found in pkgutil.walk_packages(package.__path__, "forebay.{package}."):
    importlib.import_module(found.name)
heavy = sorted(set({HEAVY!r}) & set(sys.modules))
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_each_folder_is_a_sub_package_by_a_relative_link(package: str) -> None:
    link = ROOT / "src" / "forebay" / package
    assert link.is_symlink() and str(link.readlink()) == f"../../{package}"
