"""What a tier's calls have cost lately: latency quantiles and bandwidth by object size.

Fed by the channel after each load; read by its estimates. Keeps a few hundred floats a tier. Always true: without a
measurement it answers with the prior it was given.
"""

from __future__ import annotations

from collections import deque

SMALL_BYTES = 4096  # at most this much is all latency: 4 KiB at 1 GB/s is 4 us, below any tier's round trip


class LoadMeter:
    """Latency from calls that moved (next to) nothing, bandwidth from the others, by power-of-two size bucket.

    With objects of a single size and no misses, latency can't be told from transfer: all of it then counts as
    transfer, which predicts exactly that size right.
    """

    def __init__(self, *, prior_latency_s: float, prior_bandwidth_bytes_per_s: float, weight: float = 0.1) -> None:
        self._prior_latency_s = prior_latency_s
        self._prior_bandwidth = prior_bandwidth_bytes_per_s
        self._weight = weight  # of a new sample in the moving averages
        self._latencies_s: deque[float] = deque(maxlen=128)
        self._bandwidths: dict[int, float] = {}  # bytes/s by bit length of the size
        self._usual_bucket = 0

    def record(self, size_bytes: int, service_s: float, concurrent: float) -> None:
        """A call moved `size_bytes` in `service_s` seconds (without its time in our queue), `concurrent` at once."""
        if size_bytes <= SMALL_BYTES:
            self._latencies_s.append(service_s)
            return
        # Calls that run side by side share the device: what it moves in all is n times what one of them sees.
        # A latency near the whole service time says nothing about bandwidth, hence the floor.
        latency_s = self.latency_s(0.5) if self._latencies_s else 0.0
        transfer_s = max(service_s - latency_s, service_s / 4, 1e-9)
        sample = size_bytes * concurrent / transfer_s
        bucket = size_bytes.bit_length()
        known = self._bandwidths.get(bucket)
        self._bandwidths[bucket] = sample if known is None else known + self._weight * (sample - known)
        self._usual_bucket = bucket

    def latency_s(self, quantile: float) -> float:
        """Seconds before the first byte, at `quantile` of the last 128 small calls."""
        if not self._latencies_s:
            return 0.0 if self._bandwidths else self._prior_latency_s
        ordered = sorted(self._latencies_s)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]

    def bandwidth_bytes_per_s(self, size_bytes: int | None = None) -> float:
        """For objects of `size_bytes` (None: the size loaded last), from the nearest size measured."""
        if not self._bandwidths:
            return self._prior_bandwidth
        wanted = self._usual_bucket if size_bytes is None else size_bytes.bit_length()
        return self._bandwidths[min(self._bandwidths, key=lambda bucket: abs(bucket - wanted))]
