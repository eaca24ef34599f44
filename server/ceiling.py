"""Hits beside those of a cache that never forgets, on a sample of keys.

A cache can be useless without a sign: engines that don't share a namespace store all they have and never hit. Of every
prompt that is asked for, keys whose last byte falls in the sample are remembered; one that was asked for before would have
been a hit in an infinite cache. Always true: memory is bounded, and a key says nothing about its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

_ONE_IN: Final = 256  # a power of two of at most 256; [M] 1 us a sampled key, on the event loop
_MASK: Final = _ONE_IN - 1
_REMEMBERED: Final = 65_536  # sampled keys: about 16 million blocks


class Ceiling:
    """Counts sampled blocks asked for, those that were there, and those an infinite cache would have had."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self.asked = 0
        self.hit = 0
        self.possible = 0

    def asked_for(self, keys: bytes, hits: int) -> None:
        """A prompt's keys side by side, 16 bytes each, of which the first `hits` were there."""
        sampled = np.flatnonzero(np.frombuffer(keys, np.uint8)[15::16] & _MASK == 0)
        for position in sampled.tolist():
            key = keys[16 * position : 16 * position + 16]
            self.asked += 1
            there = position < hits
            self.hit += there
            self.possible += there or key in self._seen
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)

    def stats(self) -> dict[str, float]:
        return {
            "sampled_asked_total": self.asked,
            "sampled_hits_total": self.hit,
            "sampled_possible_hits_total": self.possible,
            "hit_share_of_possible": self.hit / self.possible if self.possible else 1.0,
            "remembered": len(self._seen),
        }
