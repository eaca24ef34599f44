"""Guards, and how to switch each one off: the proof that a test of docs/faults.md can fail.

A guard is named in docs/faults.md beside the test that must go red without it; `OFF` has the patch that takes it out. As a
pytest plugin (`-p tests.faults.guards`) and in every daemon and engine process started by tests, `FOREBAY_TEST_GUARD_OFF`
names the guard to switch off. Always true: without that variable nothing here does anything, and no module of Forebay is
imported.
"""

from __future__ import annotations

import os

from tests.faults.guards import adapter, clients, identity, memory, sessions, ssd, store
from tests.faults.guards.registry import OFF, VARIABLE, Off

__all__ = ["OFF", "VARIABLE", "Off", "pytest_configure", "switch_off"]

_AREAS = (adapter, clients, identity, memory, sessions, ssd, store)  # importing them filled OFF


def switch_off() -> None:
    """Switch off what the environment names."""
    name = os.environ.get(VARIABLE)
    if name:
        OFF[name].patch()


def pytest_configure() -> None:
    switch_off()
