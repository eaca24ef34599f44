"""Memory asked for ahead is there when it is used, and what was in it stays."""

from __future__ import annotations

import mmap
import resource

from forebay.kvstore.pages import back_ahead

PAGE = mmap.PAGESIZE
PAGES = 256


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_pages_backed_ahead_cost_no_fault_and_others_keep_their_bytes() -> None:
    memory = mmap.mmap(-1, PAGES * PAGE)
    memory[:5] = b"first"
    back_ahead(memory, 1, (PAGES - 1) * PAGE + 1)
    before = faults()
    for page in range(1, PAGES - 1):
        memory[page * PAGE] = 1
    assert faults() - before < PAGES // 4
    assert memory[:5] == b"first" and memory[5] == 0
    memory.close()
