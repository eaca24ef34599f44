"""The table of guards, and what their patches are made with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

VARIABLE = "FOREBAY_TEST_GUARD_OFF"

Patch = Callable[[], None]


class Off(NamedTuple):
    """`patch` switches the guard off; the first test of its row must then fail. `quick`: worth running each time."""

    patch: Patch
    quick: bool


OFF: dict[str, Off] = {}


def off(name: str, *, quick: bool = False) -> Callable[[Patch], Patch]:
    """Enter the decorated patch under a guard's name. The patch imports what it needs when it is called."""

    def enter(patch: Patch) -> Patch:
        assert name not in OFF, name
        OFF[name] = Off(patch, quick)
        return patch

    return enter


def put(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute. Fails if it has gone, so that a patch can't switch off nothing."""
    assert hasattr(owner, name), f"the guard {owner}.{name} has gone: switch off what replaced it"
    setattr(owner, name, value)
