"""`forebay fsck`: what it finds, what it repairs, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay import cli
from forebay.tiers.ssd import SsdTier
from tests.contract.tier_contract import forge, key_of, read
from tests.tiers.ssd_faults import SEGMENT, in_process, settled
from tests.tiers.test_ssd import SIZE, on_disk, scribble


def made(folder: Path) -> SsdTier:
    return settled(SsdTier(8 * SEGMENT, [folder], segment_bytes=SEGMENT, child=in_process, threads=1))


async def fill(folder: Path) -> None:
    tier = made(folder)
    for index in range(9):
        await tier.put(key_of(index), forge(key_of(index), SIZE), timeout_s=5.0)
    await tier.delete(key_of(3))
    await tier.aclose()


async def held(folder: Path) -> list[int]:
    tier = made(folder)
    found = [index for index in range(9) if await read(tier, key_of(index)) == forge(key_of(index), SIZE)]
    await tier.aclose()
    return found


def fsck(folder: Path, *options: str) -> tuple[int, Any]:
    done = CliRunner().invoke(cli.app, ["fsck", str(folder), "--json", *options])
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    asyncio.run(fill(tmp_path))
    return tmp_path


def test_a_sound_directory_is_told_so_and_left_as_it_is(folder: Path) -> None:
    code, (report,) = fsck(folder)
    assert code == cli.EXIT_OK and report["problems"] == [] and report["sound"]
    assert (report["records"], report["index_entries"], report["damaged_records"]) == (8, 8, 0)
    assert asyncio.run(held(folder)) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_damaged_object_is_told_and_dropped_by_a_repair_alone(folder: Path) -> None:
    path, at, _ = on_disk(folder, 5)
    scribble(path, at + 50)
    for _ in range(2):  # looking changes nothing
        code, (report,) = fsck(folder)
        assert code == cli.EXIT_DAMAGED and report["damaged_records"] == 1
    code, (report,) = fsck(folder, "--repair")
    assert code == cli.EXIT_OK and report["repaired"]
    assert fsck(folder)[0] == cli.EXIT_OK
    assert asyncio.run(held(folder)) == [0, 1, 2, 4, 6, 7, 8]


@pytest.mark.parametrize("size", [100, 3 * 4096])
def test_a_damaged_index_is_made_anew_by_a_repair_and_deleted_objects_stay_away(folder: Path, size: int) -> None:
    os.truncate(folder / "index" / "data.mdb", size)
    assert fsck(folder)[0] == cli.EXIT_DAMAGED
    assert fsck(folder, "--repair")[0] == cli.EXIT_OK
    assert fsck(folder)[0] == cli.EXIT_OK
    assert asyncio.run(held(folder)) == [0, 1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("killed", [False, True])
def test_segment_files_that_changed_places_get_their_names_again(tmp_path: Path, killed: bool) -> None:
    async def much() -> int:
        tier, count = made(tmp_path), 3 * SEGMENT // SIZE // 2
        for index in range(count):
            await tier.put(key_of(index), forge(key_of(index), SIZE), timeout_s=5.0)
        await tier.aclose()
        return count

    count = asyncio.run(much())
    first, second, *_ = sorted((tmp_path / "segments").iterdir())
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second.with_suffix(".moving") if killed else second)
    code, (report,) = fsck(tmp_path)
    assert code == cli.EXIT_DAMAGED and report["problems"] and not report["sound"]
    code, (report,) = fsck(tmp_path, "--repair")
    assert code == cli.EXIT_OK and report["sound"] and report["left"] == []
    code, (report,) = fsck(tmp_path)
    assert code == cli.EXIT_OK and report["records"] == count


def test_a_lost_log_of_deletions_costs_everything_but_only_by_a_repair(folder: Path) -> None:
    (folder / "deleted.log").unlink()
    code, (report,) = fsck(folder)
    assert code == cli.EXIT_DAMAGED and "drops all objects" in report["problems"][0]
    assert fsck(folder, "--repair")[0] == cli.EXIT_OK
    assert fsck(folder)[0] == cli.EXIT_OK
    assert asyncio.run(held(folder)) == []


def test_a_directory_in_use_or_none_of_ours_is_not_touched(folder: Path, tmp_path: Path) -> None:
    tier = made(folder)
    code, answer = fsck(folder, "--repair")
    assert code == cli.EXIT_FAILED and f"in use by process {os.getpid()}" in answer["error"]["message"]
    asyncio.run(tier.aclose())
    (tmp_path / "empty").mkdir()
    code, answer = fsck(tmp_path / "empty")
    assert code == cli.EXIT_FAILED and "no ssd directory" in answer["error"]["message"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_another_hosts_directory_is_refused_until_it_is_taken_over(folder: Path) -> None:
    identity = folder / "forebay-ssd.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"host": "elsewhere"}))
    assert fsck(folder)[0] == cli.EXIT_FAILED
    assert fsck(folder, "--adopt")[0] == cli.EXIT_OK
    assert asyncio.run(held(folder)) == [0, 1, 2, 4, 5, 6, 7, 8]
