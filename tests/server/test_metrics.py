"""Metrics: the same numbers as stats, in Prometheus' form."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from forebay.server.metrics import Metrics

from .fakes import FakeDaemon


def scrape(daemon: FakeDaemon) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(Metrics(daemon).exposition().decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def test_nested_numbers_become_metrics_and_instances_become_labels() -> None:
    samples = scrape(FakeDaemon())
    assert samples["forebay_sessions_open"] == {(): 2}
    assert samples["forebay_sessions_opened_total"] == {(): 9}
    assert samples["forebay_tier_hits_total"] == {(("tier", "ram"),): 7, (("tier", "ssd"),): 3}
    assert samples["forebay_uptime_seconds"] == {(): 12.5}
    assert samples["forebay_tier_evicted_total"] == {(("tier", "ram"),): 5}


def test_names_ending_in_total_are_counters_and_the_rest_gauges() -> None:
    text = Metrics(FakeDaemon()).exposition().decode()
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert kinds["forebay_tier_hits"] == "counter"
    assert kinds["forebay_tier_evicted"] == "counter"
    assert kinds["forebay_tier_used_bytes"] == "gauge"
    assert kinds["forebay_loop_lag_seconds"] == "histogram"
    assert text.count("# TYPE forebay_tier_hits_total ") == 1


def test_the_total_of_parts_is_a_gauge_under_the_name_of_the_whole() -> None:
    daemon = FakeDaemon()
    daemon.numbers = {"tiers": {"ram": {"bytes": {"total": 3, "free": 1}}}}
    samples = scrape(daemon)
    assert samples["forebay_tier_bytes"] == {(("tier", "ram"),): 3}
    assert samples["forebay_tier_bytes_free"] == {(("tier", "ram"),): 1}
    assert "# TYPE forebay_tier_bytes gauge" in Metrics(daemon).exposition().decode()


def test_a_rate_is_told_a_second() -> None:
    daemon = FakeDaemon()
    daemon.numbers = {"tiers": {"ssd": {"bandwidth_bytes_per_s": 7.0, "busy_s_total": 2.0}}}
    samples = scrape(daemon)
    assert samples["forebay_tier_bandwidth_bytes_per_second"] == {(("tier", "ssd"),): 7}
    assert samples["forebay_tier_busy_seconds_total"] == {(("tier", "ssd"),): 2}


def test_a_histogram_is_cumulative_and_ends_in_infinity() -> None:
    samples = scrape(FakeDaemon())
    assert samples["forebay_loop_lag_seconds_bucket"] == {
        (("le", "0.001"),): 5,
        (("le", "0.01"),): 7,
        (("le", "+Inf"),): 8,
    }
    assert samples["forebay_loop_lag_seconds_count"] == {(): 8}
    assert samples["forebay_loop_lag_seconds_sum"] == {(): 0.25}
    assert samples["forebay_tier_load_seconds_sum"] == {(("tier", "ssd"),): 0.05}


def test_text_becomes_an_info_label_and_health_a_number() -> None:
    daemon = FakeDaemon()
    daemon.state = {"ok": True, "ready": False, "reasons": ["draining"], "quarantined_bytes": 64}
    samples = scrape(daemon)
    assert samples["forebay_version_info"] == {(("value", "0.1.0"),): 1}
    assert samples["forebay_tier_breaker_info"] == {(("tier", "ram"), ("value", "closed")): 1}
    assert samples["forebay_health_ok"] == {(): 1}
    assert samples["forebay_health_ready"] == {(): 0}
    assert samples["forebay_health_quarantined_bytes"] == {(): 64}


def test_each_scrape_reads_the_numbers_of_that_moment() -> None:
    daemon = FakeDaemon()
    metrics = Metrics(daemon)
    assert b"forebay_sessions_open 2.0" in metrics.exposition()
    daemon.numbers["sessions"]["open"] = 3
    assert b"forebay_sessions_open 3.0" in metrics.exposition()


def test_odd_names_and_values_still_give_a_text_that_parses() -> None:
    daemon = FakeDaemon()
    daemon.numbers = {"a-b": 1, "tiers": {'we"ird\n': {"x.y": float("nan")}, "flat": 5}, "none": None, "list": [1, 2]}
    samples = scrape(daemon)
    assert samples["forebay_a_b"] == {(): 1}
    assert samples["forebay_tier_value"] == {(("tier", "flat"),): 5}
    assert (("tier", 'we"ird\n'),) in samples["forebay_tier_x_y"]
    assert not any(name.startswith(("forebay_none", "forebay_list")) for name in samples)


def test_everything_is_named_forebay() -> None:
    assert all(name.startswith("forebay_") for name in scrape(FakeDaemon()))
