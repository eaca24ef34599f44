"""The way to a pool on a GPU, on the CPU: torch's streams and the CUDA runtime are stand-ins, the copies are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.clients import Client
from forebay.engine_adapter.bundled import cuda
from forebay.engine_adapter.bundled import store as store_module
from forebay.engine_adapter.bundled.cuda import CudaPool, RegisteredExtents
from forebay.engine_adapter.bundled.pool import Expected
from forebay.kvstore.objects import ObjectLayout
from tests.daemon_process import DaemonProcess, eventually, serving
from tests.engine_adapter.bundled_tools import engine, facts, new_pool, prompt

LAYOUT = ObjectLayout.of(facts())


class Stream:
    """A stream that has always done all its work."""

    synchronized = 0

    def __init__(self, device: Any) -> None: ...

    def synchronize(self) -> None:
        Stream.synchronized += 1


class Runtime:
    """The CUDA runtime's registry of host memory, with its rules: no region twice, none left out that isn't there."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.regions: dict[int, int] = {}
        self.most, self._refuse = 0, refuse

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self._refuse or address in self.regions:
            return 712
        self.regions[address] = size
        self.most = max(self.most, len(self.regions))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.regions[address]
        return 0


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(cuda, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("daemon"))


def test_blocks_go_out_and_come_back_through_the_streams(
    running: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "open_pool", CudaPool)
    ids = prompt(1, 6)
    with engine(running.socket, verify="always") as one:
        before = Stream.synchronized
        keys = one.keep(ids)
        one.pool.zero_()
        assert one.load(one.match(ids), 0, range(20, 26)) == [True] * 6
        assert all(one.holds(20 + i, key) for i, key in enumerate(keys))
        assert Stream.synchronized == before + 1 + 6  # one batch out, each block in: none is told before it is there
    running.at_base()


def test_a_payload_with_wrong_checksums_does_not_reach_the_pool() -> None:
    pool = new_pool(2)
    slots = CudaPool(pool, LAYOUT)
    payload = bytearray(range(256)) * (LAYOUT.payload_bytes // 256)
    sums = LAYOUT.part_checksums(payload)
    assert slots.fill(0, memoryview(payload).toreadonly(), Expected(LAYOUT, sums))
    assert bytes(slots.payloads([0])[0]) == bytes(payload)
    payload[0] ^= 1
    assert not slots.fill(1, memoryview(payload), Expected(LAYOUT, sums))
    assert not pool[1].any()


def test_extents_are_registered_while_they_are_mapped(tmp_path: Path) -> None:
    runtime = Runtime()
    with DaemonProcess(tmp_path) as daemon, Client(daemon.socket, watcher=RegisteredExtents(runtime)) as client:
        ids = prompt(2, 6)[:-1]
        for life in range(2):
            if life:
                daemon.kill()
                daemon.start()

            def space() -> Any:
                try:
                    return client.open(facts())
                except Exception:
                    return None

            opened = eventually(space, bool)
            keys = opened.keys(ids)
            opened.put(keys, ids, [bytes(LAYOUT.payload_bytes)] * 6)
            with opened.acquire(keys) as lease:
                assert len(lease) == 6
                assert len(runtime.regions) == 1  # what the ended life had mapped is out
    assert not runtime.regions and runtime.most == 1


def test_memory_that_cannot_be_registered_is_used_all_the_same(running: DaemonProcess) -> None:
    watcher = RegisteredExtents(Runtime(refuse=True))
    ids = prompt(3, 6)[:-1]
    with Client(running.socket, watcher=watcher) as client:
        space = client.open(facts())
        keys = space.keys(ids)
        space.put(keys, ids, [bytes(LAYOUT.payload_bytes)] * 6)
        with space.acquire(keys) as lease:
            assert len(lease) == 6
    assert watcher.refused == 1
