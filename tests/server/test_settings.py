"""Settings: precedence, unknown names, sizes, messages that say what to do."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.address import default_socket_path, private_folder
from forebay.server.settings import (
    GIB,
    KIB,
    MIB,
    BadSettings,
    DomainOptions,
    Settings,
    allowed_memory_bytes,
    default_ram_bytes,
    find_config,
    format_bytes,
    parse_bytes,
)

TABLES = ("domains", "tier_options", "credentials", "tenants")


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith("FOREBAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "forebay.toml"
    path.write_text(text)
    return path


def problems(config: Path | None = None, **flags: Any) -> list[str]:
    with pytest.raises(BadSettings) as caught:
        Settings.load(config, **flags)
    return caught.value.problems


def test_flags_win_over_environment_over_file_over_defaults_and_each_origin_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toml(tmp_path, 'ram_bytes = "1GiB"\nmax_sessions = 3\nhttp_port = 1\n')
    monkeypatch.setenv("FOREBAY_MAX_SESSIONS", "4")
    monkeypatch.setenv("FOREBAY_HTTP_PORT", "2")
    settings = Settings.load(path, http_port=5, socket=None)
    assert (settings.ram_bytes, settings.max_sessions, settings.http_port) == (GIB, 4, 5)
    origins = settings.provenance()
    assert origins["ram_bytes"] == str(path)
    assert origins["max_sessions"] == "FOREBAY_MAX_SESSIONS"
    assert origins["http_port"] == "--http-port"
    assert origins["socket"] == "default"
    assert list(origins) == list(Settings.model_fields)


def test_a_file_can_set_every_kind_of_value(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        """
        socket_mode = "0660"
        http_port = "off"
        tiers = ["disk", "far"]
        write_policy = "write_through"
        log_format = "JSON"
        [tier_options.disk]
        path = "/data"
        [domains."default/1000"]
        read_only = true
        """,
    )
    settings = Settings.load(path)
    assert settings.socket_mode == 0o660
    assert settings.http_port == -1
    assert settings.tiers == ("disk", "far")
    assert settings.tier_options == {"disk": {"path": "/data"}}
    assert settings.log_format == "json"
    assert settings.domain("default", 1000) == DomainOptions(read_only=True)
    assert settings.domain("default", 1001) == DomainOptions(read_only=False)


def test_the_star_domain_stands_for_all_that_are_not_named(tmp_path: Path) -> None:
    path = toml(tmp_path, '[domains."*"]\nread_only = true\n[domains."default/7"]\nread_only = false\n')
    settings = Settings.load(path)
    assert settings.domain("default", 8).read_only
    assert not settings.domain("default", 7).read_only


def test_the_environment_takes_lists_with_commas_and_ignores_empty_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TIERS", "disk, far")
    monkeypatch.setenv("FOREBAY_MAX_SESSIONS", "")
    settings = Settings.load()
    assert settings.tiers == ("disk", "far")
    assert settings.max_sessions == Settings.model_fields["max_sessions"].default
    assert settings.provenance()["max_sessions"] == "default"


def test_an_unknown_name_is_an_error_from_every_source_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = toml(tmp_path, "ram_byte = 1\n")
    monkeypatch.setenv("FOREBAY_MAX_SESION", "4")
    assert problems(path, http_prt=1) == [
        "--http-prt is not a setting: did you mean --http-port?",
        f"{path}: ram_byte is not a setting: did you mean ram_bytes?",
        "FOREBAY_MAX_SESION is not a setting: did you mean FOREBAY_MAX_SESSIONS?",
    ]


def test_an_unknown_name_inside_a_domain_is_an_error(tmp_path: Path) -> None:
    (line,) = problems(toml(tmp_path, '[domains."default/1"]\nreadonly = true\n'))
    assert "did you mean read_only?" in line


def test_variables_that_other_parts_read_are_not_settings_and_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", "/x")
    monkeypatch.setenv("FOREBAY_TEST_SEED", "1")
    assert set(Settings.load().provenance().values()) == {"default"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ram_bytes": "8G"}, "write GiB (powers of 1024) or GB (powers of 1000)"),
        ({"ram_bytes": "lots"}, "is not a size"),
        ({"ram_bytes": "1.0000001KiB"}, "whole number"),
        ({"ram_bytes": "32MiB"}, "less than one extent (64MiB)"),
        ({"ram_bytes": -1}, "greater than 0"),
        ({"max_frame_bytes": 1}, "greater than or equal to 65536"),
        ({"extent_bytes": "3MiB"}, "write 4MiB"),
        ({"extent_bytes": 4096}, "write 1MiB"),
        ({"socket_mode": "rw"}, "write octal digits"),
        ({"socket_mode": "7777"}, "write octal digits"),
        ({"socket_mode": 660}, 'as text: "0600"'),
        ({"socket": Path("/" + "x" * 120)}, "x' (--socket) is 121 bytes long and Linux allows 107"),
        ({"http_host": "0.0.0.0"}, "not a loopback address"),
        ({"http_host": "example.org"}, "not a loopback address"),
        ({"http_port": 70000}, "less than or equal to 65535"),
        ({"log_level": "loud"}, "'debug', 'info', 'warning' or 'error'"),
        ({"lease_deadline_s": 0}, "greater than 0"),
        ({"drain_s": "nan"}, "finite"),
        ({"domains": {"me": {}}}, 'write "tenant/uid"'),
        ({"tier_options": {"ssd": {}}}, "tiers does not name 'ssd'"),
    ],
)
def test_a_bad_value_is_refused_with_a_line_that_says_what_to_do(flags: dict[str, Any], words: str) -> None:
    (line,) = problems(**flags)
    assert words in line


def test_a_problem_names_the_setting_its_value_and_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_RAM_BYTES", "8Gig")
    (line,) = problems()
    assert line.startswith("ram_bytes = '8Gig' (FOREBAY_RAM_BYTES) ")


def test_a_file_that_cannot_be_read_or_parsed_is_named(tmp_path: Path) -> None:
    assert "cannot be read (No such file" in problems(tmp_path / "none.toml")[0]
    assert "is not TOML" in problems(toml(tmp_path, "ram_bytes = "))[0]


def test_a_variable_that_should_hold_json_and_does_not_is_a_settings_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_DOMAINS", "{")
    assert problems() == ["FOREBAY_DOMAINS is not JSON: write JSON, or put it into the TOML file"]


def test_the_config_file_is_the_named_one_then_the_users_then_the_machines(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "me")}
    assert find_config(environ, root=tmp_path) is None
    machine = tmp_path / "etc" / "forebay" / "config.toml"
    machine.parent.mkdir(parents=True)
    machine.touch()
    assert find_config(environ, root=tmp_path) == machine
    own = tmp_path / "me" / "forebay" / "config.toml"
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_config(environ, root=tmp_path) == own
    assert find_config(environ | {"FOREBAY_CONFIG": "/n"}, root=tmp_path) == Path("/n")


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_formatted_size_reads_back_exactly(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("8GiB", 8 * GIB), ("1.5 GiB", 3 * GIB // 2), ("500mb", 500_000_000), (" 64 KiB ", 64 * KIB)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_what_is_shown_can_be_given_back_as_settings() -> None:
    settings = Settings.load(ram_bytes="96MiB", extent_bytes="32MiB", tiers=["a"], http_port="off", socket_mode="0640")
    shown = {name: text for name, text in settings.shown().items() if name not in TABLES}
    assert Settings.load(None, **shown).model_dump() == settings.model_dump()


def test_settings_written_as_toml_read_back_the_same_and_defaults_stay_comments(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "ram_bytes": "96MiB",
        "extent_bytes": "32MiB",
        "tiers": ["disk"],
        "tier_options": {"disk": {"path": 'C:\\odd "name" \x7f é', "depth": [1, 2], "sync": True}},
        "domains": {"default/7": {"read_only": True}},
        "http_port": "off",
        "socket_mode": "0640",
    }
    settings = Settings.load(**given)
    text = settings.as_toml()
    assert set(tomllib.loads(text)) == set(given)
    assert Settings.load(toml(tmp_path, text)).model_dump() == settings.model_dump()
    everything = "".join(line.removeprefix("# ") + "\n" for line in text.splitlines() if " = " in line)
    assert set(tomllib.loads(everything)) == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("allowed", "ram"),
    [(4 * GIB, GIB), (1 << 40, 8 * GIB), (200 * MIB, 64 * MIB), (GIB + 64 * MIB, 256 * MIB)],
)
def test_default_ram_is_a_quarter_of_what_is_allowed_in_whole_extents_and_at_most_8_gib(allowed: int, ram: int) -> None:
    assert default_ram_bytes(64 * MIB, allowed) == ram


def fake_machine(root: Path, cgroup: str, limits: dict[str, str]) -> int:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, limit in limits.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit + "\n")
    return allowed_memory_bytes(root)


def test_allowed_memory_is_all_of_it_without_a_cgroup_limit(tmp_path: Path) -> None:
    assert fake_machine(tmp_path, "0::/a/b\n", {"a/b/memory.max": "max"}) == 8 * GIB


def test_allowed_memory_is_the_least_limit_on_the_way_up_in_cgroup_v2(tmp_path: Path) -> None:
    limits = {"a/b/memory.max": str(3 * GIB), "a/memory.max": str(2 * GIB)}
    assert fake_machine(tmp_path, "0::/a/b\n", limits) == 2 * GIB


def test_allowed_memory_respects_cgroup_v1(tmp_path: Path) -> None:
    cgroup = "5:cpu,cpuacct:/x\n4:memory:/x\n"
    assert fake_machine(tmp_path, cgroup, {"memory/x/memory.limit_in_bytes": str(GIB)}) == GIB


def test_allowed_memory_in_a_container_whose_cgroup_path_is_the_hosts(tmp_path: Path) -> None:
    assert fake_machine(tmp_path, "0::/host/only\n", {"memory.max": str(GIB)}) == GIB


def test_the_default_socket_lies_in_the_first_folder_that_is_ours(tmp_path: Path) -> None:
    uid = os.getuid()
    fallback = tmp_path / "tmp" / f"forebay-{uid}" / "forebay.sock"
    assert default_socket_path({}, root=tmp_path) == fallback
    assert default_socket_path({"XDG_RUNTIME_DIR": "relative"}, root=tmp_path) == fallback
    run = tmp_path / "run" / "user" / str(uid)
    run.mkdir(parents=True)
    assert default_socket_path({}, root=tmp_path) == run / "forebay.sock"
    assert default_socket_path({"XDG_RUNTIME_DIR": str(tmp_path)}, root=tmp_path) == tmp_path / "forebay.sock"
    assert default_socket_path({"FOREBAY_SOCKET": "/x/y"}, root=tmp_path) == Path("/x/y")


def test_the_folder_of_the_default_socket_is_made_private_and_a_planted_one_refused(tmp_path: Path) -> None:
    folder = tmp_path / "forebay-1"
    private_folder(folder)
    private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="others may write"):
        private_folder(folder)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        private_folder(link)
