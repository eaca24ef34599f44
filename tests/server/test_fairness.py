"""A tenant that stores as fast as it can beside another one that loads: nobody is turned away, and nothing is lost."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.clients import Client, Namespace
from forebay.kvstore.secretfile import write_secret_file
from forebay.server import auth
from tests.daemon_process import MIB, DaemonProcess, eventually, facts_of, payload_of, serving, tokens_of

TOKENS = {tenant: auth.new_token() for tenant in ("calm", "flood")}
BLOCKS = 32
LOADS = 300


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    rights = ["read", "write"]
    for tenant in TOKENS:
        write_secret_file(tmp_path / tenant, auth.new_secret())
    yield from serving(
        tmp_path,
        tcp=True,
        ram_bytes=8 * MIB,
        network_uid=os.getuid(),
        unix_rights=["admin"],
        credentials={
            tenant: {"tenant": tenant, "token_sha256": auth.token_digest(token).hex(), "rights": rights}
            for tenant, token in TOKENS.items()
        },
        tenants={
            "calm": {"secret_file": str(tmp_path / "calm")},
            "flood": {"secret_file": str(tmp_path / "flood"), "ram_bytes": "2MiB"},
        },
    )


def store(space: Namespace, seed: int) -> tuple[list[int], list[bytes], bytes]:
    tokens = tokens_of(seed, BLOCKS)
    keys = space.keys(tokens)
    payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
    space.put(keys, tokens, payloads)
    return tokens, keys, b"".join(payloads)


class Flood:
    """Sessions that store in a loop, each in a thread of its own, half of them over TCP."""

    def __init__(self, daemon: DaemonProcess, sessions: int) -> None:
        self.stores: Counter[int] = Counter()
        self.failed: list[BaseException] = []
        self._stop = threading.Event()
        places = [str(daemon.socket) if number % 2 else daemon.tcp for number in range(sessions)]
        self._threads = [threading.Thread(target=self._run, args=pair) for pair in enumerate(places)]

    def _run(self, number: int, place: str) -> None:
        try:
            with Client(place, token=TOKENS["flood"]) as client:
                space = client.open(facts_of())
                while not self._stop.is_set():
                    store(space, 1_000_000 * number + self.stores[number])
                    self.stores[number] += 1
        except BaseException as exc:
            self.failed.append(exc)

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_a_flood_of_stores_costs_another_tenant_none_of_its_blocks_and_none_of_its_loads(
    daemon: DaemonProcess, door: str
) -> None:
    with Client(daemon.socket if door == "unix" else daemon.tcp, token=TOKENS["calm"]) as client:
        space = client.open(facts_of())
        kept = [store(space, seed) for seed in range(6)]  # 3 MiB
        untouched = store(space, 99)[1]
        out = bytearray(BLOCKS * space.layout().payload_bytes)
        with Flood(daemon, 4) as flood:
            eventually(lambda: len(flood.stores) + len(flood.failed), lambda seen: seen == 4)
            before = flood.stores.total()
            for number in range(LOADS):
                tokens, keys, payload = kept[number % len(kept)]
                assert space.get_into(keys, out, tokens) == BLOCKS
                assert out == payload
            during = flood.stores.total() - before
        assert not flood.failed
        assert len(flood.stores) == 4 and during > 0, "the loads had the daemon to themselves"
        assert space.match(untouched).blocks == BLOCKS
        assert daemon.stats()["right_of_way"]["waits_total"] > 0, "the flood never gave way"
        classes = daemon.stats()["tiers"]["ram"]["classes"]
        assert sum(row["extents"] for row in classes if row["domain"].startswith("flood/")) == 2
    daemon.at_base()
