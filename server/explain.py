"""Why a block is where it is, or nowhere.

Covers what left RAM and when, tiers that are down, and namespaces that differ in one fact from the one asked for: the usual
reason for a cache that never hits. Always true: bounded memory, no token ids, and no value of a fact (a salt may be a secret),
only its name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.kvstore.errors import BadRequest, UnknownHandle
from forebay.kvstore.index import ABSENT, State, Table
from forebay.server.sessions import Namespace
from forebay.tiers.ram import RamDomain

if TYPE_CHECKING:
    from forebay.server.daemon import Daemon

_GONE_REMEMBERED: Final = 8192
_MAX_NEAR: Final = 4
NEVER_STORED: Final = "never stored, or gone too long ago to remember"


class Explainer:
    """Answers for one daemon."""

    def __init__(self, daemon: Daemon, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._daemon = daemon
        self._clock = clock
        self._gone: deque[tuple[Table, list[bytes], str, float]] = deque()
        self._gone_blocks = 0

    def note_gone(self, table: Table, blocks: list[bytes], why: str) -> None:
        """Blocks left RAM. Whole batches, looked through only when somebody asks: evictions come by thousands."""
        self._gone.append((table, blocks, why, self._clock()))
        self._gone_blocks += len(blocks)
        while self._gone_blocks > _GONE_REMEMBERED:
            self._gone_blocks -= len(self._gone.popleft()[1])

    def _why_gone(self, table: Table, block: bytes) -> tuple[str, int | None]:
        """What took the block from RAM, and seconds since then."""
        for gone_from, blocks, why, when_s in reversed(self._gone):
            if gone_from is table and block in blocks:
                return why, int(self._clock() - when_s)
        return NEVER_STORED, None

    def blocks(self, domain: RamDomain, table: Table, blocks: Sequence[bytes]) -> list[dict[str, Any]]:
        """For each block: which tiers hold it, in what state, or why it is not there."""
        daemon = self._daemon
        index = daemon.ram.index
        down = [channel.name for channel in daemon.lower if not channel.healthy]
        near: list[dict[str, Any]] | None = None
        answers: list[dict[str, Any]] = []
        for block in blocks:
            key = daemon.object_key(table, block)
            row = table.get(block)
            answer: dict[str, Any] = {"key": block.hex(), "tiers": [domain.name] if row != ABSENT else []}
            last = None
            if daemon.lower:
                told = daemon.store_of(domain).explain(key)
                answer.update((name, told[name]) for name in ("tiers", "waits_to_be_copied", "copying", "loading"))
                last = told["gone"]
            if row != ABSENT:
                answer.update(
                    hits=index.hits.item(row),
                    leases=index.refs.item(row),
                    pinned=index.pins.item(row) > 0,
                )
            elif self._is_being_written(table, block):
                answer["why"] = "being written"
            elif not answer["tiers"]:
                why, ago_s = self._why_gone(table, block)
                if why == NEVER_STORED and last not in (None, "never stored", "evicted"):
                    why = str(last)
                answer["why"] = why
                if ago_s is not None:
                    answer["ago_s"] = ago_s
                if down:
                    answer["tiers_down"] = down
                if why == NEVER_STORED:
                    near = self.near(domain, table.namespace) if near is None else near
                    if near:
                        answer["near"] = near
            answers.append(answer)
        return answers

    def _is_being_written(self, table: Table, block: bytes) -> bool:
        row = table.hidden.get(block, ABSENT)
        return row != ABSENT and self._daemon.ram.index.state.item(row) == State.WRITING

    def near(self, domain: RamDomain, number: bytes) -> list[dict[str, Any]]:
        """Namespaces of the same tenant that differ in one fact only and hold blocks, fullest first."""
        tenant = domain.domain_name.partition("/")[0] + "/"
        asked = self._daemon.namespaces.get((domain.domain_name, number))
        if asked is None:
            return []
        found: dict[bytes, dict[str, Any]] = {}
        for (name, other), namespace in self._daemon.namespaces.items():
            if other == number or not name.startswith(tenant):
                continue
            differs = _differences(asked, namespace)
            held = sum(table.visible for table in namespace.tables)
            if len(differs) == 1 and held:
                entry = found.setdefault(
                    other, {"namespace": other.hex(), "differs_in": differs[0], "objects_in_ram": 0}
                )
                entry["objects_in_ram"] += held
        return sorted(found.values(), key=lambda entry: -entry["objects_in_ram"])[:_MAX_NEAR]

    def by_hex(self, namespace_hex: str, key_hexes: Sequence[str], tenant: str | None) -> list[dict[str, Any]]:
        """As `blocks`, over the trust domains (of `tenant`, if given) that know the namespace.

        Raises: UnknownHandle, BadRequest.
        """
        try:
            namespace, keys = bytes.fromhex(namespace_hex), [bytes.fromhex(text) for text in key_hexes]
        except ValueError as exc:
            raise BadRequest("namespace and keys are hex") from exc
        if any(len(key) != 16 for key in keys):
            raise BadRequest("a key is 16 bytes: 32 hex digits")
        answers: list[dict[str, Any]] = []
        for domain in self._daemon.ram.domains.values():
            table = domain.tables.get((namespace, 0))
            if table is not None and tenant in (None, domain.domain_name.partition("/")[0]):
                for answer in self.blocks(domain, table, keys):
                    answers.append({"domain": domain.domain_name, **answer})
        if not answers and keys:
            raise UnknownHandle(f"no session has opened namespace {namespace_hex} since this daemon started")
        return answers


def _differences(one: Namespace, other: Namespace) -> list[str]:
    return [name for name in one.facts.__dataclass_fields__ if getattr(one.facts, name) != getattr(other.facts, name)]
