"""Killed at any system call of a put, commit, reclaim or delete: what was confirmed holds, with its index and without."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.tiers.ssd import SsdTier
from forebay.tiers.ssd.catalog import remove_catalog
from tests.contract.tier_contract import forge, key_of, read
from tests.tiers.ssd_crash import SEGMENTS, SIZE
from tests.tiers.ssd_faults import SEGMENT, in_process, settled

ROOT = Path(__file__).parents[2]


def run(folder: Path, work: str, numbers: list[int]) -> None:
    command = [sys.executable, "-m", "tests.tiers.ssd_crash", str(folder), work, *map(str, numbers)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)


def told(log: Path) -> tuple[set[int], set[int], set[int]]:
    """Keys that must be there (unless evicted), that must not, and that may have been there at any time."""
    present: set[int] = set()
    absent: set[int] = set()
    ever: set[int] = set()
    for line in log.read_text().splitlines() if log.exists() else ():
        if line == "closed":
            continue
        when, verb, number = line.split()
        key = int(number)
        if when == "begin":
            present.discard(key)
            absent.discard(key)
            if verb == "put":
                ever.add(key)
        else:
            (present if verb == "put" else absent).add(key)
    return present, absent, ever


async def check(folder: Path, log: Path, *, may_forget: bool) -> None:
    present, absent, ever = told(log)
    tier = settled(SsdTier(SEGMENTS * SEGMENT, [folder], segment_bytes=SEGMENT, child=in_process, threads=1))
    assert tier.health() == []
    for index in range(101):
        found = await read(tier, key_of(index), SIZE)
        assert found in (None, forge(key_of(index), SIZE)), f"{index} has wrong bytes"
        assert found is None or index in ever
        assert found is None or index not in absent, f"{index} came back from the dead"
        assert found is not None or index not in present or may_forget, f"{index} was confirmed and is gone"
    # It goes on as if nothing had been.
    await tier.put(key_of(500), forge(key_of(500), SIZE), timeout_s=5.0)
    assert await tier.delete(key_of(500)) or may_forget
    assert await read(tier, key_of(500), SIZE) is None
    await tier.aclose()


async def crash_and_check(folder: Path, work: str, count: int) -> None:
    seed = int(os.environ.get("FOREBAY_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"replay with FOREBAY_TEST_SEED={seed}")
    run(folder, work, [0])
    calls = int((folder / "calls").read_text())
    points = sorted(random.Random(seed).sample(range(1, calls), min(count, calls - 1)))
    run(folder, work, points)
    for number in points:
        home, log = folder / str(number), folder / f"{number}.log"
        print(f"killed at call {number} of {calls}")
        await check(home, log, may_forget=work == "evicts")
        remove_catalog(home / "index")
        await check(home, log, may_forget=work == "evicts")


@pytest.mark.parametrize("work", ["fits", "evicts"])
async def test_what_was_confirmed_before_a_kill_holds_after_it(tmp_path: Path, work: str) -> None:
    await crash_and_check(tmp_path, work, 12)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["fits", "evicts"])
async def test_what_was_confirmed_before_a_kill_holds_whatever_the_call(tmp_path: Path, work: str) -> None:
    await crash_and_check(tmp_path, work, 120)
