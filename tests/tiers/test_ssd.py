"""The ssd tier in trouble: failing calls, damaged files, directories of others; and what it keeps when it makes room."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import random
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import lmdb
import pytest

from forebay.kvstore.errors import BlockCorrupt, TierFull, TierUnavailable
from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd import SsdTier, committer, recovery
from forebay.tiers.ssd.catalog import Catalog
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.layout import PAGE, Place, SegmentHeader, pack_segment
from forebay.tiers.ssd.tier import segment_bytes_for
from tests.contract.tier_contract import NAMESPACE, forge, key_of, read
from tests.tiers.ssd_faults import SEGMENT, FaultyFiles, always, home_of, in_process, once, settled

SIZE = 3000


def tier_of(folder: Path, **options: Any) -> SsdTier:
    given = {"segment_bytes": SEGMENT, "child": in_process, "threads": 2, "retry_s": 0.01}
    return settled(SsdTier(8 * SEGMENT, [folder], **(given | options)))


async def put(tier: SsdTier, *indexes: int) -> None:
    for index in indexes:
        await tier.put(key_of(index), forge(key_of(index), SIZE), timeout_s=5.0)


async def held(tier: SsdTier, *indexes: int) -> list[int]:
    found = []
    for index in indexes:
        data = await read(tier, key_of(index))
        assert data in (None, forge(key_of(index), SIZE))
        found += [index] if data is not None else []
    return found


async def comes_back(tier: SsdTier) -> None:
    async with asyncio.timeout(10.0):
        while tier.health():  # noqa: ASYNC110 - a thread opens it, and tells nobody
            await asyncio.sleep(0.005)


class MovedFiles(FaultyFiles):
    """Tells another filesystem than there is."""

    below = False

    def device(self, path: Path) -> int:
        return super().device(path) + self.below


async def test_a_directory_whose_disk_was_unmounted_is_not_made_anew_on_the_disk_below(tmp_path: Path) -> None:
    files = MovedFiles()
    folder = tmp_path / "mount" / "forebay"
    tier = tier_of(folder, files=files)
    await put(tier, 0, 1)
    folder.parent.rename(tmp_path / "unplugged")
    folder.parent.mkdir()  # the mount point, empty
    files.below = True
    tier._volumes[0].fail(OSError(errno.EIO, "gone"))
    async with asyncio.timeout(10.0):
        while "no longer mounted" not in "".join(tier.health()):  # noqa: ASYNC110 - a thread finds out, and tells nobody
            await asyncio.sleep(0.005)
    assert not folder.exists()
    folder.parent.rmdir()
    (tmp_path / "unplugged").rename(folder.parent)
    files.below = False
    await comes_back(tier)
    assert await held(tier, 0, 1) == [0, 1]
    await tier.aclose()


# --- failing calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [errno.EIO, errno.EROFS, "torn"])
async def test_a_store_that_failed_is_never_visible(tmp_path: Path, fault: str | int) -> None:
    files = FaultyFiles()
    tier = tier_of(tmp_path, files=files)
    await put(tier, 1)
    files.plan = once("pwritev", fault)
    with pytest.raises(TierUnavailable) as raised:
        await put(tier, 2)
    assert isinstance(raised.value.__cause__, OSError)
    assert tier.leading_run(NAMESPACE, 0, [key_of(2).block]) == 0
    assert await held(tier, 1, 2) == [1]
    await put(tier, 2)
    assert await held(tier, 1, 2) == [1, 2]
    await tier.aclose()
    (tmp_path / "index" / "data.mdb").unlink()
    again = tier_of(tmp_path)
    assert await held(again, 1, 2) == [1, 2]
    await again.aclose()


@pytest.mark.parametrize("verb", ["pwritev", "commit", "fallocate"])
async def test_a_full_disk_is_tier_full_and_reads_go_on(tmp_path: Path, verb: str) -> None:
    files = FaultyFiles()
    tier = tier_of(tmp_path, files=files)
    await put(tier, 1, 2)
    files.plan = always(verb, fault=errno.ENOSPC)
    refused = 0
    for index in range(10, 30):
        try:
            await put(tier, index)
        except TierFull as full:
            refused += 1
            assert full.need_bytes == SIZE
    assert refused or verb == "fallocate"  # without new files it goes on in the ones it has
    assert await held(tier, *range(30)) and tier.health() == []
    files.plan = lambda verb, number: None
    await put(tier, 40)
    assert await held(tier, 40) == [40]
    await tier.aclose()


async def test_short_writes_are_carried_on(tmp_path: Path) -> None:
    files = FaultyFiles(lambda verb, number: "short" if verb == "pwritev" and number % 2 else None)
    tier = tier_of(tmp_path, files=files)
    await put(tier, *range(8))
    assert await held(tier, *range(8)) == list(range(8)) and files.injected > 3
    await tier.aclose()


@pytest.mark.parametrize("verb", ["fdatasync", "commit"])
async def test_a_commit_that_failed_takes_the_directory_out_and_it_comes_back(tmp_path: Path, verb: str) -> None:
    files = FaultyFiles()
    tier = tier_of(tmp_path, files=files)
    await put(tier, 1)
    files.plan = once(verb, errno.EIO)
    with pytest.raises(TierUnavailable):
        await put(tier, 2)
    await comes_back(tier)
    assert await held(tier, 1, 2) == [1]
    assert tier.stats()["counters"]["opened"] == 2
    await put(tier, 2)
    assert await held(tier, 2) == [2]
    await tier.aclose()


async def test_a_delete_whose_caller_gives_up_is_done_all_the_same_and_harms_no_other(tmp_path: Path) -> None:
    go = threading.Event()

    class Held(Files):
        def commit(self, commit: Callable[[], None]) -> None:
            go.wait(10.0)
            commit()

    go.set()
    tier = tier_of(tmp_path, files=Held())
    await put(tier, 1, 2)
    go.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(tier.delete(key_of(1)), 0.05)
    go.set()
    assert await tier.delete(key_of(2))
    assert set(tier.keys()) == set()
    await tier.aclose()


async def test_a_directory_whose_reads_fail_is_opened_again_when_they_work(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = tier_of(tmp_path, files=files)
    await put(tier, 1)
    files.plan = always("preadv", "open", fault=errno.EIO)
    for _ in range(10):
        with pytest.raises(TierUnavailable):
            await read(tier, key_of(1))
        if tier.health():
            break
    (reason,) = tier.health()
    assert str(tmp_path) in reason
    assert tier.leading_run(NAMESPACE, 0, [key_of(1).block]) == 0
    files.plan = lambda verb, number: None
    await comes_back(tier)
    assert await held(tier, 1) == [1]
    await tier.aclose()


async def test_a_vanished_directory_costs_its_objects_and_nothing_else(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    tier = SsdTier(16 * SEGMENT, folders, segment_bytes=SEGMENT, child=in_process, threads=2, retry_s=0.01)
    await put(tier, *range(12))
    assert all(list((folder / "segments").iterdir()) for folder in folders), "both directories are used"
    tier._volumes[1].fail(OSError(errno.EIO, "pulled out"))
    left = await held(tier, *range(12))
    assert 0 < len(left) <= 12
    await put(tier, *range(20, 24))
    assert await held(tier, *range(20, 24)) == list(range(20, 24))
    await comes_back(tier)
    assert await held(tier, *range(12)) == list(range(12))
    await tier.aclose()


async def test_a_delete_that_a_directory_missed_is_done_before_it_serves_again(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = tier_of(tmp_path, files=files, retry_s=0.2)
    await put(tier, 1, 2)
    files.plan = always("open", fault=errno.ENODEV)
    tier._volumes[0].fail(OSError(errno.ENODEV, "pulled out"))
    async with asyncio.timeout(5.0):
        while tier._volumes[0].directory is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not await tier.delete(key_of(1))
    files.plan = lambda verb, number: None
    await comes_back(tier)
    assert await held(tier, 1, 2) == [2]
    await tier.aclose()


# --- damage ---------------------------------------------------------------------------------------------------------


def on_disk(folder: Path, index: int) -> tuple[Path, int, int]:
    """(segment file, offset of the object, offset of its record)."""
    home = home_of(folder)
    for number in home.segment_numbers(Files()):
        with home.segment(number).open("rb") as file:
            header = recovery.read_header(Files(), file.fileno(), home.id)
            for record in recovery.walk(Files(), file.fileno(), header, home.id) if header else ():
                if record.key == key_of(index):
                    at = record.place.page * PAGE
                    return home.segment(number), at + record.place.data_offset, at
    raise AssertionError(index)


def scribble(path: Path, at: int, data: bytes = b"\xff" * 8) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


async def test_a_damaged_record_is_reported_then_gone(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, 1, 2)
    path, _, at = on_disk(tmp_path, 1)
    scribble(path, at + 20)
    with pytest.raises(BlockCorrupt):
        await read(tier, key_of(1))
    assert await held(tier, 1, 2) == [2]
    assert tier.stats()["counters"]["records_corrupt"] == 1
    await tier.aclose()


async def test_scrubbing_drops_what_is_damaged_and_counts_it(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(8))
    path, at, _ = on_disk(tmp_path, 1)
    scribble(path, at + 100)
    directory = tier._volumes[0].directory
    assert directory is not None
    await asyncio.to_thread(directory.scrubber.one_pass)
    assert await held(tier, *range(4)) == [0, 2, 3]
    counters = tier.stats()["counters"]
    assert counters["scrub_damaged"] == 1 and counters["scrubbed_bytes"] > 3 * SIZE
    await tier.aclose()


async def test_a_damaged_table_of_contents_loses_no_object(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(9))
    await tier.aclose()
    for path in (tmp_path / "segments").iterdir():
        scribble(path, SEGMENT - PAGE + 40)
    (tmp_path / "index" / "data.mdb").unlink()
    again = tier_of(tmp_path)
    assert await held(again, *range(9)) == list(range(9))
    await again.aclose()


async def test_swapped_segment_files_are_no_ones_objects(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(9))
    await tier.aclose()
    one, two, spare = (tmp_path / "segments" / f"0000000{n}.seg" for n in (0, 1, 9))
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    again = tier_of(tmp_path)
    for index in range(9):
        try:
            assert await read(again, key_of(index)) in (None, forge(key_of(index), SIZE))
        except BlockCorrupt:
            pass
    await put(again, *range(20, 30))
    assert await held(again, *range(20, 30))
    await again.aclose()


@pytest.mark.parametrize("harm", ["truncate", "garbage", "remove"])
async def test_a_damaged_index_is_rebuilt_and_honours_deletes(tmp_path: Path, harm: str) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(9))
    for index in (2, 5):
        assert await tier.delete(key_of(index))
    await tier.aclose()
    index_file = tmp_path / "index" / "data.mdb"
    if harm == "truncate":
        os.truncate(index_file, 3 * 4096)
    elif harm == "garbage":
        scribble(index_file, 0, os.urandom(8192))
    else:
        index_file.unlink()
    again = tier_of(tmp_path)
    assert again.health() == []
    assert await held(again, *range(9)) == [0, 1, 3, 4, 6, 7, 8]
    await again.aclose()


async def test_an_index_that_kills_its_reader_kills_a_child_and_is_rebuilt(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(6))
    await tier.aclose()
    (tmp_path / "state.json").unlink()  # nobody knows how it was left
    asked: list[str] = []

    def child(verb: str, path: Path) -> dict[str, Any]:
        asked.append(verb)
        if verb == "check":
            raise recovery.ChildFailed("check of the index: ended by signal 7")
        return in_process(verb, path)

    again = tier_of(tmp_path, child=child)
    assert asked == ["check", "rebuild"]
    assert await held(again, *range(6)) == list(range(6))
    await again.aclose()


async def test_a_commit_waits_for_records_that_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer, "_LINGER_S", 30.0)
    monkeypatch.setattr(committer, "_ENOUGH_BYTES", 2 * SIZE)
    tier = tier_of(tmp_path)
    directory = tier._volumes[0].serving
    assert directory is not None
    before = directory.committer.commits
    with directory.committer.expecting():
        await asyncio.gather(put(tier, 1), put(tier, 2))
        assert directory.committer.commits == before + 1
        assert await asyncio.wait_for(tier.delete(key_of(1)), 10.0)  # a delete waits for nobody
    await asyncio.wait_for(put(tier, 3), 10.0)  # nothing else is being written
    assert await held(tier, 1, 2, 3) == [2, 3]
    await tier.aclose()


async def test_an_index_that_leads_in_circles_is_not_walked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_of(tmp_path)
    await put(tier, 1, 2)
    await tier.aclose()
    real = Catalog.places

    def in_circles(self: Catalog) -> Iterator[tuple[ObjectKey, Place]]:
        return itertools.cycle(real(self))

    monkeypatch.setattr(Catalog, "places", in_circles)
    assert "more entries" in recovery.check(home_of(tmp_path), Files()).trouble


async def test_damage_that_only_a_transaction_meets_has_the_index_made_anew(tmp_path: Path) -> None:
    asked: list[str] = []

    def child(verb: str, path: Path) -> dict[str, object]:
        asked.append(verb)
        return in_process(verb, path)

    class Damaged(Files):
        commits = 0

        def commit(self, commit: Callable[[], None]) -> None:
            self.commits += 1
            if self.commits == 5:
                raise lmdb.CorruptedError("mdb_del: MDB_CORRUPTED")
            commit()

    tier = tier_of(tmp_path, files=Damaged(), child=child)
    stored = []
    for index in range(6):
        try:
            await put(tier, index)
            stored.append(index)
        except TierUnavailable:
            await comes_back(tier)
    assert asked == ["rebuild"] and len(stored) == 5
    assert await held(tier, *stored) == stored
    await tier.aclose()


async def test_the_child_process_checks_and_rebuilds_for_real(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(6))
    await tier.aclose()
    before = (tmp_path / "index" / "data.mdb").stat().st_ino
    assert recovery.in_child("look", tmp_path)["entries"] == 6
    assert (tmp_path / "index" / "data.mdb").stat().st_ino == before
    assert recovery.in_child("check", tmp_path)["entries"] == 6
    assert (tmp_path / "index" / "data.mdb").stat().st_ino != before
    os.truncate(tmp_path / "index" / "data.mdb", 5 * 4096)
    assert recovery.in_child("rebuild", tmp_path)["entries"] == 6
    with pytest.raises(recovery.ChildFailed):
        recovery.in_child("check", tmp_path / "nowhere")


async def test_a_check_finds_damage_among_the_free_pages_of_an_index(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(6))
    await tier.aclose()
    with (tmp_path / "index" / "data.mdb").open("r+b") as file:
        # LMDB's two meta pages: the transaction's number at 144, the root of the list of free pages at 80.
        metas = [struct.unpack_from("<Q", raw, 144) + struct.unpack_from("<q", raw, 80) for raw in pages(file, 2)]
        free_root = max(metas)[1]
        assert free_root > 1
        file.seek(free_root * 4096)
        file.write(random.Random(1).randbytes(4096))
    assert recovery.in_child("look", tmp_path)["entries"] == 6  # whoever only reads doesn't see it
    with pytest.raises(recovery.ChildFailed):  # the first writer would meet it
        recovery.in_child("check", tmp_path)


def pages(file: BinaryIO, count: int) -> list[bytes]:
    return [file.read(4096) for _ in range(count)]


async def test_where_no_copy_of_an_index_fits_the_index_itself_is_checked(tmp_path: Path) -> None:
    class Full(Files):
        def fdatasync(self, fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = tier_of(tmp_path)
    await put(tier, *range(6))
    await tier.aclose()
    assert recovery.check(home_of(tmp_path), Full()).entries == 6
    assert not (tmp_path / "index.new").exists()
    assert await held(tier_of(tmp_path), *range(6)) == list(range(6))


async def test_without_the_log_of_deletions_nothing_is_rebuilt(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(6))
    await tier.delete(key_of(1))
    await tier.aclose()
    (tmp_path / "deleted.log").unlink()
    (tmp_path / "index" / "data.mdb").unlink()
    again = tier_of(tmp_path)
    assert await held(again, *range(6)) == []
    await put(again, 1)
    assert await held(again, 1) == [1]
    await again.aclose()


async def test_a_clean_or_killed_start_reads_nothing_but_the_index(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(9))
    await tier.aclose()

    def child(verb: str, path: Path) -> dict[str, Any]:
        raise AssertionError(f"{verb} was not needed")

    again = tier_of(tmp_path, child=child)
    assert again.health() == [] and await held(again, 3) == [3]
    again._volumes[0].fail(OSError(errno.EIO, "as a kill leaves it"))
    await asyncio.sleep(0)
    await comes_back(again)
    assert await held(again, 3) == [3]
    await again.aclose()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


# --- directories of others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "elsewhere"}, "belongs to another host"),
        ({"version": 99}, "version 99"),
        ({"format": "other"}, "has format other"),
        ({"segment_bytes": 5}, "impossible values"),
        ({"id": "zz"}, "can't be read"),
    ],
)
async def test_what_is_not_ours_is_refused_and_left_as_it_is(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    tier = tier_of(tmp_path)
    await put(tier, 1)
    await tier.aclose()
    identity = tmp_path / "forebay-ssd.json"
    good = json.loads(identity.read_text())
    identity.write_text(json.dumps(good | change))
    before = contents(tmp_path)
    refused = tier_of(tmp_path)
    (reason,) = refused.health()
    assert message in reason
    with pytest.raises(TierUnavailable, match=message):
        await put(refused, 2)
    await refused.aclose()
    assert contents(tmp_path) == before
    identity.write_text(json.dumps(good))
    again = tier_of(tmp_path)
    assert await held(again, 1) == [1]
    await again.aclose()


async def test_two_tiers_on_one_directory_are_one_too_many(tmp_path: Path) -> None:
    first = tier_of(tmp_path)
    await put(first, 1)
    second = tier_of(tmp_path)
    (reason,) = second.health()
    assert f"in use by process {os.getpid()}" in reason
    await first.aclose()
    await comes_back(second)
    assert await held(second, 1) == [1]
    await second.aclose()


async def test_a_directory_without_its_identity_is_not_formatted_over(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, 1)
    await tier.aclose()
    (tmp_path / "forebay-ssd.json").rename(tmp_path / "away")
    refused = tier_of(tmp_path)
    assert "restore it" in refused.health()[0]
    await refused.aclose()
    (tmp_path / "away").rename(tmp_path / "forebay-ssd.json")
    again = tier_of(tmp_path)
    assert await held(again, 1) == [1]
    await again.aclose()


async def test_files_of_others_beside_ours_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights").write_text("mine")
    tier = tier_of(tmp_path)
    await put(tier, *range(60))
    await tier.aclose()
    assert (tmp_path / "models" / "weights").read_text() == "mine"


# --- room -------------------------------------------------------------------------------------------------------------


async def test_what_is_read_outlives_what_is_not(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, 0)
    for index in range(1, 120):
        await put(tier, index)
        assert await held(tier, 0) == [0], f"lost after {index}"
    assert await held(tier, 1, 2, 3) == []
    stats = tier.stats()
    assert stats["counters"]["kept"] >= 1 and stats["counters"]["evicted"] > 60
    assert stats["write_amplification"] >= 1.0
    await tier.aclose()


async def test_a_smaller_capacity_gives_segments_back(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    await put(tier, *range(40))
    await tier.aclose()
    assert len(list((tmp_path / "segments").iterdir())) > 4
    smaller = SsdTier(4 * SEGMENT, [tmp_path], segment_bytes=SEGMENT, child=in_process, threads=1)
    async with asyncio.timeout(10.0):
        while len(list((tmp_path / "segments").iterdir())) > 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await put(smaller, 50)
    assert await held(smaller, 50) == [50]
    await smaller.aclose()


async def test_no_file_is_made_beyond_the_reserve(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    tier = tier_of(tmp_path, reserve_bytes=2 * free)
    with pytest.raises(TierFull):
        await tier.put(key_of(1), forge(key_of(1), SIZE), timeout_s=0.2)
    assert list((tmp_path / "segments").iterdir()) == []
    await tier.aclose()


@pytest.mark.parametrize("capacity", [1 << 20, 1 << 30, 20 << 30])
def test_a_new_directory_has_at_least_eight_segments(capacity: int) -> None:
    assert capacity // segment_bytes_for(capacity) >= 8


def test_no_directory_or_no_room_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="each named once"):
        SsdTier(1 << 20, [])
    with pytest.raises(ValueError, match="less than two segments"):
        SsdTier(SEGMENT, [tmp_path], segment_bytes=SEGMENT)


def test_a_header_of_another_directory_is_none() -> None:
    from forebay.tiers.ssd.layout import DirectoryId, unpack_segment

    ours, other = DirectoryId.of(b"a" * 16), DirectoryId.of(b"b" * 16)
    page = pack_segment(SegmentHeader(3, 8, 5, empty=False), ours)
    assert unpack_segment(page, ours) == SegmentHeader(3, 8, 5, empty=False)
    assert unpack_segment(page, other) is None
