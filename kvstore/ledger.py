"""What the store did, by name, and what became of an object last.

Two small things that every part of a store writes to: counters, and a bounded memory of each object's last event,
from which `explain` answers "why is it not there". No key material beyond the keys themselves, no token ids.
"""

from __future__ import annotations

from collections import OrderedDict

from forebay.kvstore.tier import ObjectKey

COUNTERS = (
    # asked of the store
    "puts",
    "put_bytes",
    "put_spilled",  # no room in the first tier: written to a lower one
    "gets",
    "get_first_hits",
    "get_misses",
    "deletes",
    "first_trouble",  # errors of the first tier, treated as misses
    "probe_trouble",
    # loads from lower tiers
    "loads_started",
    "loads_joined",  # asked for while the same object was in flight
    "loaded",
    "loaded_bytes",
    "load_missing",  # a tier said it held the object and did not
    "load_corrupt",
    "load_trouble",
    "load_no_room",
    "load_deleted",  # a delete came first
    "load_deadline",  # the caller went on without it
    # copies to lower tiers
    "copied",
    "copied_bytes",
    "copy_corrupt",  # damaged in the first tier: dropped there, written nowhere
    "copy_gone",  # evicted or deleted before it was copied
    "copy_full",
    "copy_busy",  # a lower tier's queue was full: dropped there
    "copy_trouble",
    "copy_retried",
    "copy_given_up",
    "copy_not_tracked",  # more objects waited to be copied than the store keeps track of
    # deletes that a lower tier still owes
    "deletes_owed",
    "deletes_lost",  # more were owed than the store keeps track of
    "background_errors",  # bugs caught at the top of a background task
)


class Ledger:
    """Counters and last events of one store."""

    def __init__(self, remembered: int) -> None:
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._remembered = remembered
        self._last: OrderedDict[ObjectKey, str] = OrderedDict()

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount

    def note(self, key: ObjectKey, event: str) -> None:
        """Remember what happened to `key` last; the oldest note is forgotten first."""
        self._last[key] = event
        self._last.move_to_end(key)
        if len(self._last) > self._remembered:
            self._last.popitem(last=False)

    def last(self, key: ObjectKey) -> str | None:
        return self._last.get(key)
