"""A random life of the ssd tier with faults, restarts and lost indexes, beside a dict that may forget and must not lie."""

from __future__ import annotations

import asyncio
import errno
import shutil
import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.kvstore.errors import BlockCorrupt, TierError
from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd import SsdTier
from forebay.tiers.ssd.catalog import remove_catalog
from tests.contract.tier_contract import forge, key_of
from tests.tiers.ssd_faults import SEGMENT, FaultyFiles, in_process, once, settled

SIZES = (64, 3000, 9000)
FAULTS = st.sampled_from(
    [
        ("pwritev", errno.EIO),
        ("pwritev", errno.ENOSPC),
        ("pwritev", "short"),
        ("pwritev", "torn"),
        ("fdatasync", errno.EIO),
        ("commit", errno.EIO),
        ("commit", errno.ENOSPC),
        ("preadv", errno.EIO),
        ("fallocate", errno.ENOSPC),
        ("open", errno.EMFILE),
        ("fsync_folder", errno.EIO),
    ]
)
INDEXES = st.integers(0, 30)


class SsdLife(RuleBasedStateMachine):
    """`may`: keys that may be found. What is not in it was never put, or its delete was confirmed."""

    directories = 1

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="ssd-life-"))
        self.files = FaultyFiles()
        self.may: set[ObjectKey] = set()
        self.sizes: dict[ObjectKey, int] = {}
        self.open()

    def open(self) -> None:
        self.tier = SsdTier(
            6 * SEGMENT * self.directories,
            [self.folder / str(number) for number in range(self.directories)],
            segment_bytes=SEGMENT,
            files=self.files,
            child=in_process,
            threads=2,
            retry_s=0.001,
        )
        settled(self.tier)

    @rule(index=INDEXES)
    def put(self, index: int) -> None:
        key = key_of(index)
        size = self.sizes.setdefault(key, SIZES[index % len(SIZES)])
        self.may.add(key)  # also if it raises: a timeout says nothing
        try:
            self.loop.run_until_complete(self.tier.put(key, forge(key, size), timeout_s=5.0))
        except TierError:
            return

    @rule(index=INDEXES)
    def delete(self, index: int) -> None:
        key = key_of(index)
        try:
            self.loop.run_until_complete(self.tier.delete(key))
        except TierError:
            return
        self.may.discard(key)

    @rule(index=INDEXES)
    def get(self, index: int) -> None:
        self.look(key_of(index))

    def look(self, key: ObjectKey) -> None:
        out = bytearray(max(SIZES))
        try:
            length = self.loop.run_until_complete(self.tier.get_into(key, out, timeout_s=5.0))
        except BlockCorrupt:
            raise AssertionError(f"{key} is damaged, and nobody damaged it") from None
        except TierError:
            return
        if length is not None:
            assert key in self.may, f"{key} came back from the dead"
            assert out[:length] == forge(key, self.sizes[key])

    @rule(fault=FAULTS, skip=st.integers(0, 4))
    def break_something(self, fault: tuple[str, str | int], skip: int) -> None:
        self.files.plan = once(*fault, skip=skip)

    @rule()
    def stop_breaking(self) -> None:
        self.files.plan = lambda verb, number: None

    @rule(lose_index=st.booleans(), lose_state=st.booleans())
    def restart(self, lose_index: bool, lose_state: bool) -> None:
        waiting = sum(int(each["deletes_waiting"]) for each in self.tier.stats()["directories"].values())
        hypothesis.assume(not waiting)  # they are kept in memory: docs/operations.md
        self.loop.run_until_complete(self.tier.aclose())
        self.files.plan = lambda verb, number: None
        for number in range(self.directories):
            if lose_index:
                remove_catalog(self.folder / str(number) / "index")
            if lose_state:
                (self.folder / str(number) / "state.json").unlink(missing_ok=True)
        self.open()
        assert self.tier.health() == []

    @precondition(lambda self: self.files.plan("", 0) is None)
    @rule()
    def everything_found_is_right(self) -> None:
        for index in range(31):
            self.look(key_of(index))

    @invariant()
    def presence_and_listing_agree(self) -> None:
        if hasattr(self, "tier"):
            assert set(self.tier.keys()) <= self.may

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.loop.run_until_complete(self.tier.aclose())
            self.loop.close()
            shutil.rmtree(self.folder)


class SsdLifeOnTwoDirectories(SsdLife):
    directories = 2


QUICK = hypothesis.settings(max_examples=15, stateful_step_count=30)
TestSsdLife = SsdLife.TestCase
TestSsdLife.settings = QUICK
TestSsdLifeOnTwoDirectories = SsdLifeOnTwoDirectories.TestCase
TestSsdLifeOnTwoDirectories.settings = QUICK
