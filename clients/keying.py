"""What every client knows of a namespace without asking anybody: its layouts, and the keys of a prompt."""

from __future__ import annotations

from collections.abc import Mapping

from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import TokenIds, block_keys
from forebay.kvstore.objects import ObjectLayout


class Keying:
    """A namespace's facts and its id, as the daemon that opened it gave it."""

    def __init__(self, facts: NamespaceFacts, number: bytes) -> None:
        self.facts = facts
        self.id = number
        self._layouts = tuple(ObjectLayout.of(facts, group) for group in range(len(facts.groups)))

    def layout(self, group: int = 0) -> ObjectLayout:
        """Sizes and offsets of a group's objects."""
        if not 0 <= group < len(self._layouts):
            raise ValueError(f"no group {group}: the namespace declares {len(self._layouts)}")
        return self._layouts[group]

    def keys(
        self, token_ids: TokenIds, extras: Mapping[int, bytes] | None = None, *, parent: bytes | None = None
    ) -> list[bytes]:
        """Keys of the full blocks of a prompt."""
        return block_keys(
            self.id,
            token_ids,
            self.facts.block_tokens,
            algorithm=self.facts.hash_algorithm,
            extras=extras,
            parent=parent,
        )
