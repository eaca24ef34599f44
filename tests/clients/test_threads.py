"""Many threads on one client and many processes on one daemon, under eviction: every byte that comes back is the right one.

Payloads are a function of namespace and key, so a wrong block is noticed exactly. A failure prints its seed.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.clients import Client, Namespace
from tests.daemon_process import MIB, ROOT, DaemonProcess, facts_of, payload_of, serving, tokens_of

PROMPTS = 40  # of 8 to 40 blocks: about twice what the daemon's memory holds


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path, ram_bytes=8 * MIB)


class Worker:
    """Random calls whose every answer is checked."""

    def __init__(self, space: Namespace, seed: int) -> None:
        self.space = space
        self.random = random.Random(seed)
        self.seed = seed
        self.size = space.layout().payload_bytes
        self.hits = 0

    def run(self, steps: int) -> None:
        for step in range(steps):
            tokens = tokens_of(self.random.randrange(PROMPTS), 40)[: 16 * self.random.randint(8, 40)]
            verb = self.random.choice(
                [self.put, self.put, self.read, self.lease, self.allocate, self.match, self.delete]
            )
            try:
                verb(tokens, self.space.keys(tokens))
            except BaseException as exc:
                exc.add_note(f"seed {self.seed}, step {step}, {verb.__name__}")
                raise

    def want(self, key: bytes) -> bytes:
        return payload_of(self.space.id, key, self.size)

    def put(self, tokens: list[int], keys: list[bytes]) -> None:
        result = self.space.put(keys, tokens, [self.want(key) for key in keys])
        assert result.stored + result.present + result.pending + result.refused == len(keys)

    def read(self, tokens: list[int], keys: list[bytes]) -> None:
        buffers = [bytearray(self.size) for _ in keys]
        count = self.space.get_into(keys, buffers, tokens)
        self.hits += count
        assert all(buffer == self.want(key) for key, buffer in zip(keys[:count], buffers, strict=False))

    def lease(self, tokens: list[int], keys: list[bytes]) -> None:
        with self.space.acquire(keys, tokens) as lease:
            copies = [bytes(view) for view in lease.views]
            if lease.valid():  # another worker may have deleted some: then the copies don't count
                self.hits += len(copies)
                assert all(copy == self.want(key) for key, copy in zip(keys, copies, strict=False))

    def allocate(self, tokens: list[int], keys: list[bytes]) -> None:
        if self.space.core.remote:
            return  # no shared memory to fill
        with self.space.allocate(keys, tokens) as allocation:
            for slot in allocation.slots:
                if slot.view is not None:
                    slot.view[:] = self.want(keys[slot.index])
            if self.random.random() < 0.8:
                allocation.commit(range(self.random.randint(0, len(keys))))

    def match(self, tokens: list[int], keys: list[bytes]) -> None:
        assert 0 <= self.space.match(keys).blocks <= len(keys)

    def delete(self, tokens: list[int], keys: list[bytes]) -> None:
        if self.random.random() < 0.2:
            self.space.delete(keys[self.random.randrange(len(keys)) :])


def threads_on_one_client(daemon: DaemonProcess, steps: int) -> None:
    with Client(daemon.socket, timeout_s=30.0) as client:
        # Opened once, or by each thread: both must work.
        shared = client.open(facts_of())
        workers = [Worker(shared if seed % 2 else client.open(facts_of()), seed) for seed in range(8)]
        failures: list[BaseException] = []

        def run(worker: Worker) -> None:
            try:
                worker.run(steps)
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in failures:
            raise failure
        assert sum(worker.hits for worker in workers) > 0
        assert client.stats()["tiers"]["ram"]["counters"]["evicted"] > 0
    daemon.at_base()


def processes_on_one_daemon(daemon: DaemonProcess, count: int, steps: int) -> None:
    commands = [
        [sys.executable, "-m", "tests.clients.test_threads", str(daemon.socket), str(seed), str(steps)]
        for seed in range(count)
    ]
    running = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate()[1] for process in running]
    assert not any(process.returncode for process in running), "\n".join(said)
    assert daemon.at_base()["tiers"]["ram"]["counters"]["evicted"] > 0


def test_threads_on_one_client_get_only_right_bytes(daemon: DaemonProcess) -> None:
    threads_on_one_client(daemon, 60)


@pytest.mark.slow
def test_threads_on_one_client_for_thousands_of_calls(daemon: DaemonProcess) -> None:
    threads_on_one_client(daemon, 600)


def test_processes_under_eviction_get_only_right_bytes(daemon: DaemonProcess) -> None:
    processes_on_one_daemon(daemon, 3, 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sixteen_processes_under_eviction(daemon: DaemonProcess) -> None:
    processes_on_one_daemon(daemon, 16, 200)


def main(socket: Path, seed: int, steps: int) -> None:
    with Client(socket, timeout_s=60.0) as client:
        Worker(client.open(facts_of()), 1000 + seed).run(steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
