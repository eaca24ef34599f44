"""A daemon in a dict: the client's API in this process, with the real keys and layouts, and a switch for every fault.

It keeps what the adapter relies on: only whole, committed payloads are seen; views are read-only; `valid` turns False
when a block was taken away. `fail` maps a verb's name to the exception that it raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.identity import PUBLIC_SECRET, NamespaceFacts, namespace_id
from forebay.kvstore.keys import block_keys
from forebay.kvstore.objects import ObjectLayout

RAM = TierEstimate(latency_s=1e-6, bandwidth_bytes_per_s=1e12)


@dataclass
class Run:
    tier: str
    blocks: int


@dataclass
class Match:
    blocks: int
    runs: tuple[Run, ...]
    estimates: dict[str, TierEstimate]


@dataclass
class PutResult:
    stored: int = 0
    present: int = 0
    pending: int = 0
    refused: int = 0


@dataclass
class Slot:
    index: int
    view: memoryview | None
    status: str


@dataclass
class Lease:
    views: list[memoryview]
    tiers: list[str]
    held: bool = True
    sound: int | None = None  # leading blocks whose checksums hold; None is all

    def __len__(self) -> int:
        return len(self.views)

    def valid(self) -> bool:
        return self.held

    def verify(self) -> int:
        return len(self.views) if self.sound is None else self.sound


@dataclass
class FakeClient:
    """One client; `blocks` may be shared between several, as a daemon is."""

    blocks: dict[tuple[bytes, bytes], tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
    fail: dict[str, Exception] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    reports: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    tier: str = "ram"
    estimate: TierEstimate = RAM
    lease_breaks: bool = False  # valid() says so after the copy
    lease_loses: int = 0  # blocks evicted between match and acquire
    sound: int | None = None
    room: int = 10**9  # blocks it takes before it refuses
    read_only: bool = False  # memory may not be mapped writable: payloads go through `put`

    def call(self, verb: str) -> None:
        self.calls.append(verb)
        if verb in self.fail:
            raise self.fail[verb]

    def open(self, facts: NamespaceFacts, timeout_s: float | None = None) -> FakeNamespace:
        self.call("open")
        return FakeNamespace(self, facts)

    def close(self) -> None: ...


class FakeNamespace:
    def __init__(self, client: FakeClient, facts: NamespaceFacts) -> None:
        self.client, self.facts = client, facts
        self.id = namespace_id(facts, tenant="default", secret=PUBLIC_SECRET)
        self._layout = ObjectLayout.of(facts)

    def layout(self, group: int = 0) -> ObjectLayout:
        return self._layout

    def keys(self, token_ids: Sequence[int], extras: object = None) -> list[bytes]:
        return block_keys(self.id, token_ids, self.facts.block_tokens, algorithm=self.facts.hash_algorithm)

    def match(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Match:
        self.client.call("match")
        n = self._leading(keys)
        runs = (Run(self.client.tier, n),) if n else ()
        return Match(n, runs, {self.client.tier: self.client.estimate})

    @contextmanager
    def acquire(
        self,
        keys: Sequence[bytes],
        token_ids: Any = None,
        group: int = 0,
        *,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Iterator[Lease]:
        self.client.call("acquire")
        n = max(0, self._leading(keys) - self.client.lease_loses)
        stored = [self.client.blocks[self.id, key] for key in keys[:n]]
        if token_ids is not None:
            bt = self.facts.block_tokens
            n = next((i for i, (t, _) in enumerate(stored) if t != tuple(token_ids[i * bt : (i + 1) * bt])), n)
        payloads = [payload for _, payload in stored[:n]]
        yield Lease(
            [memoryview(p).toreadonly() for p in payloads],
            [self.client.tier] * n,
            held=not self.client.lease_breaks,
            sound=self.client.sound,
        )
        self.client.call("release")

    @contextmanager
    def allocate(
        self,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
    ) -> Iterator[FakeAllocation]:
        self.client.call("allocate")
        if self.client.read_only:
            raise PermissionError("read-only domain")
        assert len(token_ids) == len(keys) * self.facts.block_tokens
        assert (parent is None) == (start_block == 0)
        yield FakeAllocation(self, keys, token_ids)

    def put(
        self,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        payloads: Sequence[bytearray],
        parent: bytes | None = None,
        start_block: int = 0,
    ) -> PutResult:
        self.client.call("put")
        bt = self.facts.block_tokens
        for i, (key, payload) in enumerate(zip(keys, payloads, strict=True)):
            self.client.blocks[self.id, key] = (tuple(token_ids[i * bt : (i + 1) * bt]), bytes(payload))
        return PutResult(stored=len(keys))

    def report(self, kind: str, **numbers: float) -> None:
        self.client.call("report")
        self.client.reports.append((kind, numbers))

    def _leading(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if (self.id, key) not in self.client.blocks), len(keys))


class FakeAllocation:
    def __init__(self, namespace: FakeNamespace, keys: Sequence[bytes], token_ids: Sequence[int]) -> None:
        self._namespace, self._keys, self._tokens = namespace, keys, token_ids
        client, size = namespace.client, namespace.layout().payload_bytes
        self.slots: list[Slot] = []
        for index, key in enumerate(keys):
            if (namespace.id, key) in client.blocks:
                self.slots.append(Slot(index, None, "present"))
            elif len(client.blocks) + index >= client.room:
                self.slots.append(Slot(index, None, "refused"))
            else:
                self.slots.append(Slot(index, memoryview(bytearray(b"\xff" * size)), "writable"))

    def commit(self) -> PutResult:
        namespace, bt = self._namespace, self._namespace.facts.block_tokens
        namespace.client.call("commit")
        result = PutResult()
        for slot in self.slots:
            if slot.view is not None:
                tokens = tuple(self._tokens[slot.index * bt : (slot.index + 1) * bt])
                namespace.client.blocks[namespace.id, self._keys[slot.index]] = (tokens, bytes(slot.view))
                result.stored += 1
            elif slot.status == "present":
                result.present += 1
            else:
                result.refused += 1
        return result
