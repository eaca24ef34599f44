"""Quotas of tenants: one that floods the daemon evicts its own blocks and nobody else's. Counts, no times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.clients import Client, Namespace
from forebay.kvstore.errors import OverLimit
from forebay.kvstore.secretfile import write_secret_file
from forebay.server import auth
from tests.daemon_process import MIB, DaemonProcess, facts_of, payload_of, serving, tokens_of

TOKENS = {"acme": auth.new_token(), "globex": auth.new_token(), "default": auth.new_token()}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    for tenant in ("acme", "globex"):
        write_secret_file(tmp_path / tenant, auth.new_secret())
    rights = {"default": ["admin"]}
    yield from serving(
        tmp_path,
        ram_bytes=8 * MIB,
        unix_rights=["admin"],
        credentials={
            tenant: {
                "tenant": tenant,
                "token_sha256": auth.token_digest(token).hex(),
                "rights": rights.get(tenant, ["read", "write"]),
            }
            for tenant, token in TOKENS.items()
        },
        tenants={
            "acme": {"secret_file": str(tmp_path / "acme"), "ram_bytes": "2MiB", "uncommitted_bytes": "1MiB"},
            "globex": {"secret_file": str(tmp_path / "globex")},
        },
    )


def store(space: Namespace, seed: int, blocks: int) -> list[bytes]:
    tokens = tokens_of(seed, blocks)
    keys = space.keys(tokens)
    space.put(keys, tokens, [payload_of(space.id, key, space.layout().payload_bytes) for key in keys])
    return keys


def extents(daemon: DaemonProcess, tenant: str) -> int:
    classes = daemon.stats()["tiers"]["ram"]["classes"]
    return sum(row["extents"] for row in classes if row["domain"].startswith(f"{tenant}/"))


def test_a_tenant_that_floods_evicts_its_own_and_nobody_elses(daemon: DaemonProcess) -> None:
    with Client(daemon.socket, token=TOKENS["globex"]) as calm, Client(daemon.socket, token=TOKENS["acme"]) as flood:
        quiet, loud = calm.open(facts_of()), flood.open(facts_of())
        kept = [store(quiet, seed, 32) for seed in range(6)]  # 3 MiB, and never looked at again
        for seed in range(40):
            last = store(loud, 100 + seed, 32)  # 20 MiB through 2
        assert extents(daemon, "acme") == 2
        assert [quiet.match(keys).blocks for keys in kept] == [32] * 6
        assert loud.match(last).blocks == 32
        # Another size of objects finds its place within the same quota.
        wide = flood.open(facts_of(layers=4))
        assert wide.match(store(wide, 1, 4)).blocks == 4
        assert extents(daemon, "acme") == 2
        assert [quiet.match(keys).blocks for keys in kept] == [32] * 6
    daemon.audit()


def test_uncommitted_bytes_are_bounded_over_all_sessions_of_a_tenant(daemon: DaemonProcess) -> None:
    with Client(daemon.socket, token=TOKENS["acme"]) as one, Client(daemon.socket, token=TOKENS["acme"]) as two:
        first, second = one.open(facts_of()), two.open(facts_of())
        tokens = tokens_of(1, 40)
        with first.allocate(first.keys(tokens), tokens):
            other = tokens_of(2, 40)
            with pytest.raises(OverLimit, match="tenant acme"), second.allocate(second.keys(other), other):
                pass
        first.match(first.keys(tokens))  # behind the abort on the same socket, which nobody waits for
        assert len(store(second, 3, 40)) == 40
