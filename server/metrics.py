"""Prometheus exposition of the daemon's own numbers.

Keeps no numbers: at each scrape it walks what `forebay stats` would print, so a figure cannot differ between the two.
`tiers.ram.hits_total` becomes `forebay_tier_hits_total{tier="ram"}`. Always true: a name that ends in `_total` and a
number in a table named `counters` are counters, every other number is a gauge, and a histogram is a table with the keys
`bounds`, `counts` and `sum`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

PREFIX = "forebay"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Sections whose keys are instances of one thing: the word for it in names, and the label that tells instances apart.
INSTANCES = {
    "tiers": ("tier", "tier"),
    "stores": ("store", "domain"),
    "verbs": ("verb", "verb"),
    "reports": ("report", "kind"),
    "directories": ("directory", "directory"),
}
COUNTERS = "counters"  # a table of counters; it adds nothing to their names but `_total`
MAX_LABEL = 100
HISTOGRAM_KEYS = frozenset({"bounds", "counts", "sum"})


class MetricsSource(Protocol):
    """What a scrape reads."""

    @property
    def loop_lag(self) -> Mapping[str, Any]:
        """How late the event loop ran its timers, in seconds: a histogram table.

        bounds: rising upper bounds. counts: one more than bounds, each of its own bucket (not cumulative), the last
        of everything above. sum: of all samples.
        """

    def stats(self) -> Mapping[str, Any]: ...

    def health(self) -> Mapping[str, Any]: ...


class StatsCollector(Collector):
    """Turns a source's nested numbers into metric families."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        table = {
            **self._source.stats(),
            "health": self._source.health(),
            "loop_lag_s": self._source.loop_lag,
        }
        families: dict[str, Metric] = {}
        for path, labels, value in _leaves(table, (), {}):
            _add(families, path, labels, value)
        return families.values()


class Metrics:
    """A registry of its own, so that nothing another library registers in the process shows up here."""

    def __init__(self, source: MetricsSource) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatsCollector(source))
        ProcessCollector(namespace=PREFIX, registry=self._registry)

    def exposition(self) -> bytes:
        """The body of an answer to GET /metrics, of type CONTENT_TYPE."""
        return generate_latest(self._registry)


def is_histogram(value: object) -> bool:
    return isinstance(value, Mapping) and value.keys() == HISTOGRAM_KEYS


def _leaves(
    table: Mapping[str, Any], path: tuple[str, ...], labels: Mapping[str, str]
) -> Iterable[tuple[tuple[str, ...], Mapping[str, str], Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and not is_histogram(value):
            if key in INSTANCES:
                word, label = INSTANCES[key]
                for name, part in value.items():
                    inner = part if isinstance(part, Mapping) and not is_histogram(part) else {"value": part}
                    yield from _leaves(inner, (*path, word), {**labels, label: str(name)[:MAX_LABEL]})
            elif key == COUNTERS:
                totals = {f"{name.removesuffix('_total')}_total": part for name, part in value.items()}
                yield from _leaves(totals, path, labels)
            else:
                yield from _leaves(value, (*path, key), labels)
        elif isinstance(value, int | float | str) or is_histogram(value):
            yield (*path, key), labels, value


def _add(families: dict[str, Metric], path: tuple[str, ...], labels: Mapping[str, str], value: Any) -> None:
    words = path[:-1] if path[-1] == "total" else path  # the total of parts, such as bytes.total, counts nothing up
    name = re.sub(r"[^a-zA-Z0-9_]", "_", "_".join((PREFIX, *words)))
    name = re.sub(r"_s(_total)?$", r"_seconds\1", re.sub(r"_per_s$", "_per_second", name))
    kind = "histogram" if is_histogram(value) else "counter" if name.endswith("_total") else "gauge"
    if isinstance(value, str):  # a state or a version: worth seeing, but only a number can be a sample
        name, labels, kind, value = f"{name}_info", {**labels, "value": value[:MAX_LABEL]}, "gauge", 1
    family = families.get(name)
    if family is None:
        where = ".".join(path)
        family = families[name] = Metric(name.removesuffix("_total"), f"{where} of `forebay stats`.", kind)
    if kind != "histogram":
        family.add_sample(name, dict(labels), float(value))
        return
    cumulative = list(accumulate(value["counts"]))
    for bound, count in zip((*map(float, value["bounds"]), float("inf")), cumulative, strict=True):
        shown = "+Inf" if bound == float("inf") else repr(bound)
        family.add_sample(f"{name}_bucket", {**labels, "le": shown}, float(count))
    family.add_sample(f"{name}_count", dict(labels), float(cumulative[-1]))
    family.add_sample(f"{name}_sum", dict(labels), float(value["sum"]))
