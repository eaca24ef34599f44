"""Documents that repeat what code says must repeat it exactly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from forebay import cli
from forebay.server.settings import Settings

ROOT = Path(__file__).parent.parent
COMPUTED = {
    "socket": "see above",
    "ram_bytes": "see its meaning",
    "max_quarantine_bytes": "see its meaning",
    "ssd_dirs": "see its meaning",
    "domains": "none",
    "tier_options": "none",
    "credentials": "none",
    "tenants": "none",
    "unix_rights": "none",
    "tiers": "none",
    "tcp_tls_cert": "none",
    "tcp_tls_key": "none",
    "network_uid": "the daemon's",
}


def settings_table() -> list[str]:
    """The rows of the settings table, from the model itself."""
    shown = Settings.model_construct().shown()
    rows = []
    for name, field in Settings.model_fields.items():
        default = COMPUTED[name] if name in COMPUTED else f"`{shown[name]}`"
        assert name in COMPUTED or field.default is not PydanticUndefined
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return rows


def test_operations_lists_every_setting_with_its_default_and_meaning() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    found = [line for line in text.splitlines() if re.match(r"\| `\w+` \| (?:`|none|see|the)", line)]
    assert found == settings_table()


def test_operations_lists_every_exit_code() -> None:
    text = (ROOT / "docs" / "operations.md").read_text().partition("## Exit codes")[2]
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert codes == {value for name, value in vars(cli).items() if name.startswith("EXIT_") and isinstance(value, int)}


def mentioned_files() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    pattern = r"`((?:docs|tests|bench|server|kvstore|tiers|clients|engine_adapter|src)/[\w/.-]+\.\w+)`"
    return [(page.name, path) for page in pages for path in re.findall(pattern, page.read_text())]


@pytest.mark.parametrize(("page", "path"), mentioned_files())
def test_every_file_that_a_page_names_is_there(page: str, path: str) -> None:
    assert (ROOT / path).exists()
