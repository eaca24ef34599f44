"""The ssd tier keeps the laws: in one directory, in two, and through the page cache."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd import SsdTier, recovery, tombstones
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import Home, host_id, read_identity
from forebay.tiers.ssd.layout import PAGE
from forebay.tiers.ssd.tombstones import Tombstone
from tests.contract.tier_contract import SIZE, TierContract

SEGMENT = 8 * PAGE  # three records of SIZE bytes


class SsdMedium:
    """The segment files under a tier, read by their own structures alone: no index, no tier."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def _records(self) -> Iterable[tuple[Path, recovery.Record]]:
        files = Files()
        for folder in self._folders:
            id_, size = read_identity(folder, files, host_id())
            home = Home(folder, id_, size, -1)
            stones, _ = tombstones.read(home.tombstones, id_, files)
            for number in home.segment_numbers(files):
                fd = os.open(home.segment(number), os.O_RDONLY)
                try:
                    header = recovery.read_header(files, fd, id_)
                    if header is None or header.empty:
                        continue
                    for record in recovery.walk(files, fd, header, id_):
                        if Tombstone(*record.place[:3]) not in stones:
                            yield home.segment(number), record
                finally:
                    os.close(fd)

    def _find(self, key: ObjectKey) -> tuple[Path, int, int]:
        for path, record in self._records():
            if record.key == key:
                return path, record.place.page * PAGE + record.place.data_offset, record.place.length
        raise AssertionError(f"{key} is not on the disk")

    def flip_bit(self, key: ObjectKey) -> None:
        path, at, length = self._find(key)
        with path.open("r+b") as file:
            file.seek(at + length // 2)
            byte = file.read(1)[0]
            file.seek(at + length // 2)
            file.write(bytes([byte ^ 0x10]))

    def tear(self, key: ObjectKey) -> None:
        path, at, length = self._find(key)
        with path.open("r+b") as file:
            file.seek(at + length // 2)
            file.write(bytes(length - length // 2))

    def keys(self) -> Iterable[ObjectKey]:
        return [record.key for _, record in self._records()]


class SsdContract(TierContract):
    directories = 1
    segments = 8
    files: type[Files] = Files

    @pytest.fixture
    def folders(self, tmp_path: Path) -> list[Path]:
        return [tmp_path / f"disk{number}" for number in range(self.directories)]

    @pytest.fixture
    async def tier(self, folders: list[Path]) -> AsyncIterator[SsdTier]:
        capacity = self.segments * SEGMENT * self.directories
        tier = SsdTier(capacity, folders, segment_bytes=SEGMENT, files=self.files())
        yield tier
        await tier.aclose()

    @pytest.fixture
    def raw(self, tier: SsdTier, folders: list[Path]) -> SsdMedium:
        return SsdMedium(folders)


class TestSsdTier(SsdContract):
    async def test_it_writes_past_the_page_cache_here_or_says_that_it_does_not(self, tier: SsdTier) -> None:
        await tier.put(ObjectKey(b"n" * 16, b"k" * 16), b"x" * SIZE, timeout_s=5.0)
        assert tier.stats()["directories"]["0"]["direct_io"] in (0, 1)


class TestSsdTierOnTwoDirectories(SsdContract):
    directories = 2


class BufferedFiles(Files):
    def open_direct(self, path: Path, flags: int) -> tuple[int, bool]:
        return self.open(path, flags), False


class TestSsdTierWithoutDirectIo(SsdContract):
    files = BufferedFiles

    async def test_it_says_so(self, tier: SsdTier) -> None:
        await tier.put(ObjectKey(b"n" * 16, b"k" * 16), b"x" * SIZE, timeout_s=5.0)
        assert tier.stats()["directories"]["0"]["direct_io"] == 0
