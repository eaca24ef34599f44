"""Times to live outlast the daemon that was told of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forebay.clients import Client
from forebay.kvstore.tier import ObjectKey
from forebay.server.expiry import Expiries
from forebay.server.expiry_log import NAME, Entry, ExpiryLog
from forebay.tiers.ram import RamDomain, RamTier
from tests.daemon_process import MIB, DaemonProcess, eventually, facts_of, payload_of, tokens_of

ENTRIES = [Entry(1e9 + i, "tenant/7", [ObjectKey(b"n" * 16, bytes([i, j]) * 8, j) for j in range(i)]) for i in range(4)]


async def test_a_log_that_was_cut_anywhere_gives_the_whole_entries_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / NAME
    log, ends = ExpiryLog(path), [0]
    for entry in ENTRIES:
        await log.append(entry)
        ends.append(path.stat().st_size)
    assert path.stat().st_mode & 0o777 == 0o600
    data = path.read_bytes()
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        assert await log.read() == ENTRIES[: sum(end <= length for end in ends[1:])]
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        whole = sum(end <= at for end in ends[1:])
        assert await log.read() == ENTRIES[:whole]
    await log.rewrite(ENTRIES[2:])
    assert await log.read() == ENTRIES[2:]
    log.close()


async def test_a_disk_in_trouble_stops_no_request(tmp_path: Path) -> None:
    log = ExpiryLog(tmp_path / "missing" / NAME)
    await log.append(ENTRIES[0])
    await log.rewrite(ENTRIES)
    assert await log.read() == []
    log.close()


class Life:
    """An `Expiries` with clocks of its own; `monotonic` starts anew with each, as after a restart."""

    def __init__(self, unix_s: float, path: Path) -> None:
        self.now_s, self.offset_s = 0.0, unix_s
        self.forgotten: list[ObjectKey] = []
        self.tier = RamTier(capacity_bytes=2 * MIB, extent_bytes=MIB)
        self.log = ExpiryLog(path)
        self.expiries = Expiries(self._forget, clock=lambda: self.now_s, unix_clock=lambda: self.now_s + self.offset_s)

    async def _forget(self, domain: RamDomain, keys: object) -> int:
        assert domain.domain_name == "tenant/7"
        self.forgotten += keys  # type: ignore[arg-type]
        return 1

    async def begin(self) -> None:
        await self.expiries.resume(self.log, self.tier.domain)

    async def tick(self, seconds: float) -> list[ObjectKey]:
        self.now_s += seconds
        self.forgotten = []
        await self.expiries.tick()
        return self.forgotten

    async def end(self) -> None:
        self.expiries.close()
        await self.tier.aclose()


async def test_the_next_life_forgets_at_the_same_time_and_what_was_due_meanwhile_at_once(tmp_path: Path) -> None:
    key = {name: ObjectKey(b"n" * 16, name.encode() * 8, 0) for name in ("ab", "cd", "ef")}
    first = Life(5e8, tmp_path / NAME)
    await first.begin()
    domain = first.tier.domain("tenant/7")
    await first.expiries.forget_after(domain, [key["ab"]], 10)
    await first.expiries.forget_after(domain, [key["cd"]], 100)
    await first.expiries.forget_after(domain, [key["ef"]], 1000)
    assert await first.tick(10) == [key["ab"]]
    await first.end()
    second = Life(5e8 + 500, tmp_path / NAME)
    await second.begin()
    assert second.expiries.stats()["waiting_blocks"] == 3  # it is not known whether the first was seen to be forgotten
    assert await second.tick(0) == [key["ab"], key["cd"]]
    assert await second.tick(499) == []
    await second.end()
    third = Life(5e8 + 998, tmp_path / NAME)
    await third.begin()
    assert await third.tick(3) == [key["ab"], key["cd"], key["ef"]]
    await third.end()


async def test_the_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.server.expiry._SPARE_ENTRIES", 4)
    life = Life(5e8, tmp_path / NAME)
    await life.begin()
    domain = life.tier.domain("tenant/7")
    sizes = []
    for number in range(60):
        await life.expiries.forget_after(domain, [ObjectKey(b"n" * 16, number.to_bytes(16, "big"))], 1)
        await life.tick(1)
        sizes.append((tmp_path / NAME).stat().st_size)
    assert max(sizes) <= 8 * sizes[0]
    await life.end()


def test_a_killed_daemon_leaves_nothing_on_disk_beyond_its_time(tmp_path: Path) -> None:
    ssd = {"ssd_bytes": 64 * MIB, "ssd_dirs": [str(tmp_path / "ssd")]}
    with DaemonProcess(tmp_path, **ssd) as daemon, Client(daemon.socket) as client:
        space = client.open(facts_of())
        tokens = tokens_of(1, 4)
        keys = space.keys(tokens)
        space.put(keys, tokens, [payload_of(space.id, key, space.layout().payload_bytes) for key in keys])
        assert space.flush(keys, timeout_s=30).durable == len(keys)
        began_s = time.monotonic()
        space.expire(keys[2:], 3.0)
        daemon.kill()
        daemon.start()
        if time.monotonic() - began_s < 2.5:  # else this machine was too slow to see the blocks before their time
            eventually(lambda: space.match(keys).blocks, lambda blocks: blocks == 4)
        eventually(lambda: space.match(keys).blocks, lambda blocks: blocks == 2)
