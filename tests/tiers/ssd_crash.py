"""A process that works on an ssd directory and ends at system call number n, for test_ssd_crash.py.

Run as `python -m tests.tiers.ssd_crash FOLDER WORK N...`: for each N a child is forked that does the work in FOLDER/N and
appends to FOLDER/N.log what it begins and what was confirmed. N = 0 never ends early and writes its number of calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from forebay.kvstore.errors import TierError
from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd import SsdTier
from tests.contract.tier_contract import forge, key_of
from tests.tiers.ssd_faults import SEGMENT, FaultyFiles, in_process

SIZE = 3000
SEGMENTS = 8


class Journal:
    """What was begun and what was confirmed, one line each, written at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())

    async def put(self, tier: SsdTier, index: int) -> None:
        self.note(f"begin put {index}")
        try:
            await tier.put(key_of(index), forge(key_of(index), SIZE), timeout_s=10.0)
        except TierError:
            return
        self.note(f"done put {index}")

    async def delete(self, tier: SsdTier, index: int) -> None:
        self.note(f"begin delete {index}")
        try:
            await tier.delete(key_of(index))
        except TierError:
            return
        self.note(f"done delete {index}")


async def fits(tier: SsdTier, journal: Journal) -> None:
    """Puts and deletes that need no room made."""
    await asyncio.gather(*(journal.put(tier, index) for index in range(8)))
    await journal.delete(tier, 2)
    await asyncio.gather(*(journal.delete(tier, index) for index in (3, 4, 40)))
    await journal.put(tier, 3)
    await journal.put(tier, 8)
    await journal.delete(tier, 8)


async def evicts(tier: SsdTier, journal: Journal) -> None:
    """More than fits, with hits that are worth keeping and deletes of what is being moved."""
    out = bytearray(SIZE)
    for start in range(0, 60, 6):
        await asyncio.gather(*(journal.put(tier, index) for index in range(start, start + 6)))
        for index in (0, 1, 7):
            key: ObjectKey = key_of(index)
            await tier.get_into(key, out, timeout_s=10.0)
        await journal.delete(tier, start + 3)
        if start == 36:
            await journal.delete(tier, 7)
        if start == 48:
            await asyncio.gather(journal.delete(tier, 0), journal.put(tier, 100))


async def work(name: str, folder: Path, number: int) -> int:
    files = FaultyFiles(lambda verb, call: ("torn-exit" if verb == "pwritev" else "exit") if call == number else None)
    if not number:
        files.plan = lambda verb, call: None
    tier = SsdTier(
        SEGMENTS * SEGMENT, [folder / str(number)], segment_bytes=SEGMENT, files=files, child=in_process, threads=2
    )
    journal = Journal(folder / f"{number}.log")
    await {"fits": fits, "evicts": evicts}[name](tier, journal)
    await tier.aclose()
    journal.note("closed")
    return files.calls


def main(folder: Path, name: str, numbers: list[int]) -> None:
    for number in numbers:
        pid = os.fork()
        if pid == 0:
            calls = asyncio.run(work(name, folder, number))
            if not number:
                (folder / "calls").write_text(str(calls))
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [int(each) for each in sys.argv[3:]])
