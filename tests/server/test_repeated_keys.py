"""A key that stands twice in one request must not leave a reference or a pin behind (invariant 4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forebay.clients import AsyncClient, AsyncNamespace
from forebay.kvstore.errors import BadRequest
from forebay.kvstore.identity import NamespaceFacts
from forebay.server.daemon import Daemon
from forebay.server.settings import Settings
from forebay.server.verbs import CHUNK

FACTS = NamespaceFacts(
    weights_digest=b"w",
    weight_format="bf16",
    compute_dtype="bf16",
    kv_dtype="bf16",
    producer="test",
    block_tokens=16,
    layers=1,
    kv_heads=1,
    head_dim=8,
    rope=b"",
)
TOKENS = range(32)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Daemon, AsyncNamespace]]:
    daemon = Daemon(Settings(socket=tmp_path / "s", ram_bytes=64 << 20, http_port=-1, memory_reserve_bytes=0))
    await daemon.start()
    try:
        async with AsyncClient(tmp_path / "s") as client:
            namespace = await client.open(FACTS)
            payload = bytes(namespace.layout().payload_bytes)
            await namespace.put(namespace.keys(TOKENS), TOKENS, [payload, payload])
            yield daemon, namespace
    finally:
        await daemon.drain()


def references(daemon: Daemon) -> int:
    index = daemon.ram.index
    return int(index.refs[: index.high_water].sum())


@pytest.mark.parametrize("count", [2, CHUNK, CHUNK + 1, 3 * CHUNK])
async def test_a_lease_on_a_repeated_key_is_refused_and_leaves_nothing(
    served: tuple[Daemon, AsyncNamespace], count: int
) -> None:
    daemon, namespace = served
    with pytest.raises(BadRequest, match="twice"):
        await namespace.acquire(namespace.keys(TOKENS)[:1] * count)
    assert references(daemon) == 0


async def test_one_unpin_undoes_one_pin_of_a_repeated_key(served: tuple[Daemon, AsyncNamespace]) -> None:
    daemon, namespace = served
    keys = namespace.keys(TOKENS)[:1] * 3
    assert await namespace.pin(keys) == await namespace.unpin(keys) == 1
    assert not daemon.ram.index.pins.any()
