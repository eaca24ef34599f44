"""Directories that earlier versions wrote are still read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forebay.tiers.ssd import SsdTier
from forebay.tiers.ssd.layout import FORMAT_VERSION
from tests.contract.tier_contract import forge, key_of, read
from tests.tiers.ssd_faults import SEGMENT, in_process, settled

HERE = Path(__file__).parent
HOST = "fixture"
SIZE = 3000


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
@pytest.mark.parametrize("with_index", [True, False])
async def test_a_directory_of_this_version_is_read(tmp_path: Path, version: int, with_index: bool) -> None:
    """Written by `make_fixture` when the version was new: objects 0 to 9 but 4, one put again after its delete."""
    folder = tmp_path / "old"
    shutil.copytree(HERE / f"ssd-v{version}", folder)
    assert json.loads((folder / "forebay-ssd.json").read_text())["version"] == version
    if not with_index:
        shutil.rmtree(folder / "index")
    tier = settled(SsdTier(8 * SEGMENT, [folder], segment_bytes=SEGMENT, host=HOST, child=child))
    assert tier.health() == []
    for index in range(10):
        assert await read(tier, key_of(index)) == (None if index == 4 else forge(key_of(index), SIZE))
    await tier.put(key_of(4), forge(key_of(4), SIZE), timeout_s=5.0)
    assert await read(tier, key_of(4)) == forge(key_of(4), SIZE)
    await tier.aclose()


def child(verb: str, path: Path) -> dict[str, object]:
    return in_process(verb, path, host=HOST)


async def make_fixture(folder: Path) -> None:
    tier = SsdTier(8 * SEGMENT, [folder], segment_bytes=SEGMENT, host=HOST)
    for index in range(10):
        await tier.put(key_of(index), forge(key_of(index), SIZE), timeout_s=5.0)
    await tier.delete(key_of(4))
    await tier.delete(key_of(5))
    await tier.put(key_of(5), forge(key_of(5), SIZE), timeout_s=5.0)
    await tier.aclose()
    (folder / "lock").unlink()
    (folder / "index" / "lock.mdb").unlink()
