"""The store's random life once more, with the real ram tier and its index as the first tier.

The machine and its oracle are test_store_stateful.py's; what differs is what keeps the objects. After every step the ram tier's
accounts are recomputed from its slots. It must fail, too, on an index that forgets its promises.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from forebay.kvstore.errors import InvariantViolation
from forebay.kvstore.index import ABSENT, Index, State, Table
from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ram import RamTier
from tests.contract.test_ram import AuditedDomain as Domain
from tests.kvstore.test_store_stateful import BLOCKS, StoreMachine, short


class AuditedDomain(Domain):
    gone: list[bytes]  # keys that left, whyever


def ram(name: str, capacity_bytes: int) -> AuditedDomain:
    tier = RamTier(name=name, capacity_bytes=capacity_bytes, extent_bytes=capacity_bytes, available=lambda: 1 << 40)
    domain = tier.domains["d"] = AuditedDomain(tier, "d", read_only=False)
    domain.gone = []
    tier.on_gone = lambda table, keys, why: domain.gone.extend(keys)
    return domain


class RamStoreMachine(StoreMachine):
    first_tier: Any = staticmethod(ram)

    def put_one(self, index: int) -> bool:
        self.first.gone.clear()
        self.extended = BLOCKS[index - 1] if index else None
        return super().put_one(index)

    def was_evicted(self, key: ObjectKey) -> bool:
        """Leaf first, the newest may be all that can go: its older parents can't, while it is here."""
        return key.block in self.first.gone

    def could_evict(self) -> bool:
        """The block that a put extends doesn't count: it isn't evicted to make room for its own child."""
        index = self.first.tier.index
        return any(
            index.evictable(row)
            for table in index.tables
            for row in table.find([key for key in table if key != self.extended]).tolist()
        )

    def teardown(self) -> None:
        try:
            super().teardown()
            if hasattr(self, "store"):
                assert not self.first.tier.index.refs.any(), "references are left"
        finally:
            if hasattr(self, "store"):
                asyncio.run(self.first.aclose())


def test_a_store_over_the_ram_tier_may_forget_but_never_lies() -> None:
    run_state_machine_as_test(RamStoreMachine, settings=short(40))


@pytest.mark.slow
def test_a_store_over_the_ram_tier_may_forget_but_never_lies_for_long() -> None:
    run_state_machine_as_test(RamStoreMachine, settings=short(150))


def _finds_another(self: Table, key: bytes) -> int:
    return next((row for shard in self.shards for row in shard.values()), ABSENT)


def _finds_nothing(self: Table, key: bytes) -> int:
    return ABSENT


def _ignores_references(self: Index, row: int) -> bool:
    return bool(self.children.item(row) == 0 and self.state.item(row) == State.VISIBLE)


def _shows_nothing(self: Index, table: Table, rows: np.ndarray[Any, Any]) -> None:
    """Commits are lost."""


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Table, "get", _finds_another),
        (Table, "get", _finds_nothing),
        (Index, "evictable", _ignores_references),
        (Index, "show", _shows_nothing),
    ],
    ids=["another", "nothing", "evicts-leased", "loses-commits"],
)
def test_the_machine_fails_on_an_index_that_breaks_its_word(
    owner: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    found = settings(short(300), phases=(Phase.generate,), print_blob=False, database=None)
    with pytest.raises((AssertionError, InvariantViolation, KeyError)):
        run_state_machine_as_test(RamStoreMachine, settings=found)
