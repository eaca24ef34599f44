"""What the way to the daemon costs a client over TCP, measured by its own transfers.

The daemon's estimates say what its tiers cost on its own machine; a plan for an engine elsewhere must count the network, and
each client has its own link. Always true: a tier seen over the network is never estimated faster than the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from forebay.kvstore.cost import TierEstimate

_GUESS_BYTES_PER_S: Final = 1.25e9  # 10 Gbit/s, until something was moved
_GUESS_S: Final = 2e-4
_WEIGHT: Final = 0.2  # of a new sample: five forget an old speed to a third
_ENOUGH_BYTES: Final = 256 << 10  # below, a transfer's time is its round trip's
IN_MEMORY: Final = "ram"  # the tier that a daemon answers from without moving anything first


class Network:
    """Bandwidth and round trip of one client. Samples may come from any thread: one lost to a race is no loss."""

    def __init__(self) -> None:
        self._bandwidth = _GUESS_BYTES_PER_S
        self._round_trip_s = _GUESS_S
        self._transfers = self._answers = 0

    def moved(self, size_bytes: int, seconds: float) -> None:
        """Payload came out of the daemon's memory in this time."""
        if size_bytes >= _ENOUGH_BYTES and seconds > 0:
            self._transfers += 1
            self._bandwidth += max(_WEIGHT, 1 / self._transfers) * (size_bytes / seconds - self._bandwidth)

    def answered(self, seconds: float) -> None:
        """A small request was answered after this time."""
        self._answers += 1
        self._round_trip_s += max(_WEIGHT, 1 / self._answers) * (seconds - self._round_trip_s)

    def seen_from_here(self, estimates: Mapping[str, TierEstimate]) -> dict[str, TierEstimate]:
        """The daemon's estimates with the network's share: what lies below memory is first loaded and then sent."""
        found = {}
        for name, estimate in estimates.items():
            below_s_a_byte = 0.0 if name == IN_MEMORY else 1 / max(1.0, estimate.bandwidth_bytes_per_s)
            found[name] = dataclasses.replace(
                estimate,
                latency_s=(0.0 if name == IN_MEMORY else estimate.latency_s) + self._round_trip_s,
                bandwidth_bytes_per_s=1 / (below_s_a_byte + 1 / self._bandwidth),
            )
        return found
