"""A small pool, its blocks' bytes, and an engine's side of a prefix store, for tests of engine_adapter/bundled.

Run as a module it is an engine that stores one prompt through a daemon and ends.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forebay.engine.config import ModelConfig
from forebay.engine.prefix import EngineLoad, Load
from forebay.engine_adapter.bundled import ForebayPrefixStore, connect, namespace_facts
from forebay.engine_adapter.bundled.store import Found
from forebay.kvstore.cost import PrefillModel
from forebay.kvstore.identity import NamespaceFacts
from tests.daemon_process import eventually

BT = 8
CONFIG = ModelConfig(
    architecture="llama", layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab_size=97,
    context_tokens=4096, norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
# An engine that computes 20 tokens a second: any load pays, and is waited for.
SLOW = PrefillModel(t0=0.0, a=0.05, b=0.0)


def facts(**changes: Any) -> NamespaceFacts:
    known: dict[str, Any] = {
        "config": CONFIG, "weights_digest": b"w" * 32, "precision": "fp32", "kv_dtype": torch.float32, "block_tokens": BT,
        "head_groups": 2,
    }  # fmt: skip
    return namespace_facts(**(known | changes))


def new_pool(blocks: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(blocks, 2, CONFIG.layers, 2, BT, 1, CONFIG.head_dim, dtype=dtype)


def prompt(seed: int, blocks: int) -> list[int]:
    """A prompt of that many full blocks and one token."""
    return random.Random(seed).choices(range(97), k=blocks * BT + 1)


def block_of(pool: torch.Tensor, key: bytes) -> torch.Tensor:
    """What the block with this key holds, in a pool's shape and type: other bytes for every key."""
    noise = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.randn(pool.shape[1:], generator=noise).to(pool.dtype)


class Engine:
    """One engine's pool and store."""

    def __init__(self, store: ForebayPrefixStore, pool: torch.Tensor | None = None) -> None:
        self.store, self.pool = store, new_pool() if pool is None else pool
        store.attach(self.pool)

    def keep(self, ids: list[int], salt: bytes = b"", first: int = 0) -> list[bytes]:
        """Compute a prompt's blocks from `first` on, into slots from 0 on, and store them. Returns its keys."""
        keys = self.store.keys(ids, salt)
        for slot, key in enumerate(keys[first:]):
            self.pool[slot] = block_of(self.pool, key)
        stored = self.store.store(keys, ids, first, range(len(keys) - first))
        eventually(lambda: stored.done, bool)
        return keys

    def match(self, ids: list[int], salt: bytes = b"", resident: int = 0, waiting: int = 0) -> Found:
        """Ask until it is known."""
        keys, load = self.store.keys(ids, salt), EngineLoad(waiting, resident, len(ids), 0)
        found = eventually(lambda: self.store.match(keys, ids, load), lambda found: found is not None)
        assert isinstance(found, Found)
        return found

    def load(self, found: Found, first: int, slots: Sequence[int]) -> list[bool]:
        """Load and wait, until it is counted. Returns what became of each block."""
        came = settled(self.store.load(found, first, slots), len(slots))
        eventually(lambda: self.store.stats()["loading"], lambda loading: loading == 0)
        return came

    def holds(self, slot: int, key: bytes) -> bool:
        return torch.equal(self.pool[slot], block_of(self.pool, key))


def settled(load: Load, blocks: int) -> list[bool]:
    answers = eventually(lambda: [load.ready(i) for i in range(blocks)], lambda answers: None not in answers)
    return [bool(answer) for answer in answers]


@contextmanager
def engine(where: Path | str, **options: Any) -> Iterator[Engine]:
    """An engine whose store comes to a daemon by this door."""
    given: dict[str, Any] = {"prior": SLOW, "backoff_s": 0.05} | options
    pool = given.pop("pool", None)
    store = connect(where, given.pop("facts", None) or facts(), **given)
    try:
        yield Engine(store, pool)
    finally:
        store.close()


def main(where: str, seed: int, blocks: int) -> None:
    with engine(where) as writer:
        writer.keep(prompt(seed, blocks))
        assert writer.store.stats()["counters"]["stored_blocks"] == blocks


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
