"""Whether looking for a while before sleeping pays, learned from whether it has paid lately.

Looking saves the time that a sleeping core takes to wake, when what is awaited comes soon; when it doesn't, or when more
processes want to run than there are cores, it takes time from those who would answer. Clients and the daemon both ask this.
"""

from __future__ import annotations

from typing import Final

_MOST: Final = 8
_TRY_AGAIN: Final = 16  # waits until another look, once looking has not paid


class Looking:
    """A score that a look which paid raises and one in vain lowers twice as much."""

    def __init__(self) -> None:
        self._score = _MOST
        self._slept = 0

    def worth_it(self) -> bool:
        """Whether to look this time."""
        if self._score > 0:
            return True
        self._slept += 1
        if self._slept < _TRY_AGAIN:
            return False
        self._slept = 0
        return True

    def paid(self) -> None:
        self._score = min(_MOST, self._score + 1)

    def in_vain(self) -> None:
        self._score = max(0, self._score - 2)
