"""Pages name only what is there: files, tests, dependencies. tests/test_docs.py holds what operations.md repeats."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("folder", ["kvstore", "tiers", "tiers/ssd", "server", "clients"])
def test_the_module_map_names_every_module(folder: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (row,) = re.findall(rf"^\| `{folder}` \| (.*) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {path.stem for path in (ROOT / folder).glob("[!_]*.py")}


def test_each_dependency_has_its_line_and_each_line_its_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {("base", _name(each)) for each in project["dependencies"]}
    for extra, needs in project["optional-dependencies"].items():
        wanted |= {(extra, _name(each)) for each in needs if not each.startswith("forebay[")}
    base, extras = (ROOT / "docs" / "dependencies.md").read_text().split("## Extras")
    found = {
        ("base", name) for names in re.findall(r"^\| ([\w, -]+) \| .* \| .* \|$", base, re.M) for name in _each(names)
    }
    for extra, names in re.findall(r"^\| `(\w+)` \| ([\w, -]+) \|", extras, re.MULTILINE):
        found |= {(extra, name) for name in _each(names)}
    assert found - {("base", "package")} == wanted


def _name(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0]


def _each(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip(" -")]


def test_the_picture_is_well_formed_and_stays_in_its_frame() -> None:
    from xml.etree import ElementTree

    picture = ElementTree.parse(ROOT / "docs" / "data-path.svg").getroot()
    _, _, width, height = (float(number) for number in picture.attrib["viewBox"].split())
    svg = "{http://www.w3.org/2000/svg}"
    assert picture.find(f"{svg}title") is not None and picture.find(f"{svg}desc") is not None
    for box in picture.iter(f"{svg}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width
        assert float(box.get("y", 0)) + float(box.get("height", 0)) <= height
