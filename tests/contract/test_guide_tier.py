"""The tier of docs/guides/a-tier-of-your-own.md keeps the laws, as it stands there, and serves a daemon's store again later."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from forebay.kvstore.tier import ObjectKey, SupportsPresence, Tier
from tests.contract.tier_contract import ROOM_FOR, SIZE, TierContract, forge, key_of, read

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "a-tier-of-your-own.md"
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
GUIDE: dict[str, Any] = {}
exec(compile(CODE, str(PAGE), "exec"), GUIDE)


class Folder:
    """The files of a FolderTier."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _file(self, key: ObjectKey) -> Path:
        return self._folder / f"{key.namespace.hex()}-{key.block.hex()}-{key.group}.object"

    def flip_bit(self, key: ObjectKey) -> None:
        data = bytearray(self._file(key).read_bytes())
        data[SIZE // 2] ^= 0x10
        self._file(key).write_bytes(data)

    def tear(self, key: ObjectKey) -> None:
        self._file(key).write_bytes(self._file(key).read_bytes()[: SIZE // 2])

    def keys(self) -> Iterable[ObjectKey]:
        for path in self._folder.glob("*.object"):
            namespace, block, group = path.stem.split("-")
            yield ObjectKey(bytes.fromhex(namespace), bytes.fromhex(block), int(group))


def made(folder: Path) -> Tier:
    tier: Tier = GUIDE["FolderTier"](folder, ROOM_FOR * SIZE)
    return tier


class TestFolderTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return made(tmp_path)

    @pytest.fixture
    def raw(self, tmp_path: Path) -> Folder:
        return Folder(tmp_path)

    async def test_it_is_what_the_guide_says(self, tier: Tier) -> None:
        assert isinstance(tier, Tier) and isinstance(tier, SupportsPresence)

    async def test_a_later_life_finds_what_an_earlier_one_kept(self, tier: Tier, tmp_path: Path) -> None:
        key = key_of(1)
        await tier.put(key, forge(key), timeout_s=5.0)
        await tier.aclose()
        later = made(tmp_path)
        assert await read(later, key) == forge(key)
