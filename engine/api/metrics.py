"""The engine's numbers for Prometheus: its own counters, the store's, and what the server times itself.

Always true: engine and store are asked at the scrape, so a figure can't differ between two places that show it; names
ending in `_total` only grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay.engine.stats import EngineStats

PREFIX = "forebay_engine"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 400)


class ServerMetrics:
    """A registry of its own, so that nothing another library registers in the process shows up here.

    store: the prefix store's numbers, nested tables; a table named `counters` and names ending in `_total` are counters.
    """

    def __init__(
        self,
        engine: Callable[[], EngineStats],
        store: Callable[[], Mapping[str, Any]] | None,
        in_flight: Callable[[], int],
    ) -> None:
        self._engine, self._store, self._in_flight = engine, store, in_flight
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collected(self._families))
        ProcessCollector(namespace=PREFIX, registry=self._registry)
        self._answers = Counter(
            f"{PREFIX}_http_answers", "Answers by route and status.", ("route", "status"), registry=self._registry
        )
        self._first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "From a request's arrival in the engine to its first token.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._duration = Histogram(
            f"{PREFIX}_request_seconds", "Of answered completions.", buckets=SECONDS, registry=self._registry
        )

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def completed(self, first_token_s: float | None, total_s: float) -> None:
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
        self._duration.observe(total_s)

    def exposition(self) -> bytes:
        """The body of an answer to GET /metrics, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _families(self) -> Iterable[Metric]:
        stats = self._engine()
        table = asdict(stats)
        finished = table["counters"].pop("finished")
        table["pool_blocks"] = table["blocks"].pop("total")  # no counter, as its name would make it
        yield from _families(table, PREFIX)
        requests = Metric(f"{PREFIX}_requests", "Requests by the reason they finished.", "counter")
        for reason, count in finished.items():
            requests.add_sample(f"{PREFIX}_requests_total", {"finish_reason": reason}, float(count))
        yield requests
        in_flight = Metric(f"{PREFIX}_http_in_flight", "Completions being answered.", "gauge")
        in_flight.add_sample(in_flight.name, {}, float(self._in_flight()))
        yield in_flight
        if self._store is not None:
            yield from _families(self._store(), f"{PREFIX}_store")


class _Collected(Collector):
    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def _families(table: Mapping[str, Any], prefix: str, *, counters: bool = False) -> Iterable[Metric]:
    for key, value in table.items():
        name = f"{prefix}_{key}"
        if isinstance(value, Mapping):
            yield from _families(value, prefix if key == "counters" else name, counters=key == "counters")
        elif isinstance(value, int | float):
            counts = counters or name.endswith("_total")
            base = name.removesuffix("_total")
            base = f"{base.removesuffix('_s')}_seconds" if base.endswith("_s") else base
            family = Metric(base, f"{key} of the engine's numbers.", "counter" if counts else "gauge")
            family.add_sample(f"{base}_total" if counts else base, {}, float(value))
            yield family
