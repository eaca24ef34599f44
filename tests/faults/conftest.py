"""A daemon a test, and a second client whose blocks must be untouched whatever the first one suffers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.clients import Client, Namespace
from tests.daemon_process import DaemonProcess, facts_of, payload_of, serving, tokens_of


class Bystander:
    """A client with blocks of its own in the same trust domain, whose every byte it can check."""

    def __init__(self, path: Path, blocks: int = 40) -> None:
        self.client = Client(path, engine_id="bystander")
        self.space: Namespace = self.client.open(facts_of(salt=b"bystander"))
        self.size = self.space.layout().payload_bytes
        self.tokens = tokens_of(99, blocks)
        self.keys = self.space.keys(self.tokens)
        self.payloads = [payload_of(self.space.id, key, self.size) for key in self.keys]
        self.stored = self.space.put(self.keys, self.tokens, self.payloads).stored
        self.check()

    def leave(self) -> None:
        self.check()
        self.client.close()

    def store_more(self, seed: int, blocks: int = 40) -> None:
        """Blocks that take whatever room is free."""
        tokens = tokens_of(seed, blocks)
        keys = self.space.keys(tokens)
        payloads = [payload_of(self.space.id, key, self.size) for key in keys]
        self.space.put(keys, tokens, payloads)
        self.check(tokens)

    def check(self, tokens: list[int] | None = None) -> None:
        """Every block of a run that is still there has exactly its bytes."""
        tokens = self.tokens if tokens is None else tokens
        keys = self.space.keys(tokens)
        with self.space.acquire(keys, tokens) as lease:
            assert len(lease) == lease.verify()
            for key, view in zip(keys, lease.views, strict=False):
                assert view == payload_of(self.space.id, key, self.size)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path)


@pytest.fixture
def bystander(daemon: DaemonProcess) -> Iterator[Bystander]:
    found = Bystander(daemon.socket)
    with found.client:
        yield found
        found.check()
