"""Rules for all tests: reproducible examples, and in CI no silent skip of a real component."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

# No deadline: test machines are shared, and a slow example is no wrong one. A failure prints how to replay it.
hypothesis.settings.register_profile(
    "forebay",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("forebay")

# A daemon that a test starts writes nothing to the disk of whoever runs the tests, unless the test says where.
os.environ.setdefault("FOREBAY_SSD_BYTES", "0")

IN_CI = os.environ.get("CI") == "true"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longer suites need longer than the limit that stops a hang in the quick ones.
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
    report: pytest.TestReport = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("real_model"):
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, pytest.CollectReport]:
    report: pytest.CollectReport = yield
    if IN_CI and report.skipped:  # a module that skipped itself: an extra that CI should have installed
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    # A skip's longrepr is (path, line, reason).
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{reason}\nCI=true: a real component must be there, so this skip is a failure."
