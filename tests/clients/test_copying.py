"""Copies shared by several threads: the same bytes, the same verdicts, and nobody copies on after the call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from forebay.bench_support import facts_for
from forebay.clients import Client
from forebay.clients.copying import CopyThreads
from tests.daemon_process import DaemonProcess, serving

MIB = 1 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with room for blocks that are worth sharing."""
    yield from serving(tmp_path_factory.mktemp("copying"), ram_bytes=64 * MIB, extent_bytes=16 * MIB)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("payload", "count"), [(MIB, 21), (256 << 10, 64), (64 << 10, 70)])
def test_what_several_threads_copy_is_what_was_given(
    daemon: DaemonProcess, threads: int, payload: int, count: int
) -> None:
    rng = np.random.default_rng(threads * count)
    source = rng.integers(0, 256, count * payload, dtype=np.uint8)
    with Client(daemon.socket, copy_threads=threads) as client:
        namespace = client.open(facts_for(payload, block_tokens=16, label=f"copy-{threads}"))
        tokens = rng.integers(0, 1000, 16 * count, dtype=np.uint32)
        keys = namespace.keys(tokens)
        view = memoryview(source)
        stored = namespace.put(keys, tokens, [view[i * payload : (i + 1) * payload] for i in range(count)]).stored
        assert stored == count
        target = bytearray(count * payload)
        assert namespace.get_into(keys, target, tokens) == count  # verified against the checksums that put made
        assert target == source.tobytes()
        namespace.delete(keys)


@pytest.mark.parametrize("damaged", [0, 4, 9, 10, 15, 19])
def test_a_damaged_block_ends_the_run_whichever_thread_finds_it(daemon: DaemonProcess, damaged: int) -> None:
    count = 20
    with Client(daemon.socket, copy_threads=2) as client:
        namespace = client.open(facts_for(MIB, block_tokens=16, label=f"damaged-{damaged}"))
        tokens = np.arange(16 * count, dtype=np.uint32)
        keys = namespace.keys(tokens)
        assert namespace.put(keys, tokens, [bytes([i]) * MIB for i in range(count)]).stored == count
        with namespace.acquire(keys) as lease:
            place = lease.places[damaged]
            life = lease._life
            assert life is not None
            extent = life.memory.extents[int(place["extent"])]
            at = int(place["offset"]) + namespace.layout().header_bytes + 12_345
            extent.writable_memory[at] ^= 1
        assert namespace.get_into(keys, bytearray(count * MIB), tokens) == damaged
        namespace.delete(keys)


def test_a_piece_that_fails_waits_for_the_others() -> None:
    threads = CopyThreads(2)
    ended = threading.Event()

    def work(start: int, end: int) -> None:
        if start == 0:
            raise BufferError("the caller's own piece")
        time.sleep(0.05)
        ended.set()

    with pytest.raises(BufferError):
        threads.share(100, MIB, work)
    assert ended.is_set()
    threads.close()


def test_no_thread_outlives_its_client(daemon: DaemonProcess) -> None:
    before = threading.active_count()
    with Client(daemon.socket, copy_threads=3) as client:
        namespace = client.open(facts_for(MIB, block_tokens=16, label="threads"))
        tokens = np.arange(16 * 16, dtype=np.uint32)
        keys = namespace.keys(tokens)
        namespace.put(keys, tokens, [bytes(MIB)] * 16)
        assert threading.active_count() > before
        namespace.delete(keys)
    for thread in threading.enumerate():
        if thread.name.startswith("forebay-copy"):
            thread.join(10)
    assert threading.active_count() == before


def test_somebody_has_to_copy() -> None:
    with pytest.raises(ValueError, match="copy_threads"):
        CopyThreads(0)
