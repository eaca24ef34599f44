"""The ram tier keeps the laws of Tier, alone and wrapped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest

from forebay.kvstore.index import State
from forebay.kvstore.tier import ObjectKey, Tier
from forebay.tiers.ram import RamDomain, RamTier
from forebay.tiers.wrappers import Metered, Throttled, Wrapper
from tests.contract.tier_contract import ROOM_FOR, SIZE, TierContract


class AuditedDomain(RamDomain):
    """A trust domain whose accounts are recomputed from its slots whenever a law asks for them."""

    def accounting(self) -> dict[str, int]:
        if self.tier.closed:
            return {"free": self.capacity_bytes, "reserved": 0, "quarantined": 0}
        self.tier.audit()
        account = self.tier.accounting()
        return {
            "free": account.free + self.capacity_bytes - account.total,  # extents are made as they are needed
            "cached": account.cached,
            "reserved": account.allocated,
            "quarantined": account.quarantined,
        }


class RamMedium:
    """The extents' memory, and the rows that say what lies where."""

    def __init__(self, domain: RamDomain) -> None:
        self._domain = domain

    def _bytes(self, key: ObjectKey) -> memoryview:
        return self._domain.object_view(self._domain.tables[key.namespace, key.group].get(key.block))

    def flip_bit(self, key: ObjectKey) -> None:
        self._bytes(key)[SIZE // 2] ^= 0x10

    def tear(self, key: ObjectKey) -> None:
        data = self._bytes(key)
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)

    def keys(self) -> Iterable[ObjectKey]:
        index = self._domain.tier.index
        for extent in self._domain.extents.values():
            held = extent.rows()
            for row in held[held >= 0].tolist():
                if index.state.item(row) == State.VISIBLE:
                    table = index.tables[index.table.item(row)]
                    yield ObjectKey(table.namespace, index.key_of(row), table.group)


class RamContract(TierContract):
    sizes = (SIZE,)  # a namespace's group has objects of one size

    @pytest.fixture
    async def domain(self) -> AsyncIterator[AuditedDomain]:
        tier = RamTier(capacity_bytes=ROOM_FOR * SIZE, extent_bytes=ROOM_FOR // 2 * SIZE, available=lambda: 1 << 40)
        domain = tier.domains["d"] = AuditedDomain(tier, "d", read_only=False)
        yield domain
        await tier.aclose()

    @pytest.fixture
    def raw(self, domain: RamDomain) -> RamMedium:
        return RamMedium(domain)


class TestRamDomain(RamContract):
    @pytest.fixture
    def tier(self, domain: AuditedDomain) -> Tier:
        return domain


class TestWrappedRamDomain(RamContract):
    @pytest.fixture
    def tier(self, domain: AuditedDomain) -> Tier:
        wrapped: Wrapper = Metered(Throttled(domain, latency_s=1e-5, bandwidth_bytes_per_s=1e9))
        return wrapped
