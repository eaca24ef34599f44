"""Text from tokens as they come.

Covers characters whose bytes are spread over tokens, and stop strings. Always true: pieces joined are the decoding of all
tokens, up to the first stop string; a character is told once and whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# A character of up to four bytes lacks at most its last one, so at most three bytes at the end may still change their
# meaning; decoders show them as one or as up to three of these.
_UNFINISHED = "\ufffd"
_MAX_UNFINISHED = 3
_WINDOW_TOKENS = 16  # decoded anew with each token; larger saves restarts, smaller saves decoding


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Of one output."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._ids: list[int] = []  # since the window's start
        self._clean = 0  # of them, up to the last place where no character was unfinished
        self._told = 0  # characters of the window that have been given to the stop strings
        self._held = ""  # the start of what may become a stop string
        self.stopped_by: str | None = None

    def add(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that is certain now. Once `stopped_by` is set, this was the last of it."""
        self._ids.append(token_id)
        text = self._decoder.decode(self._ids)
        certain = len(text)
        while certain > 0 and len(text) - certain < _MAX_UNFINISHED and text[certain - 1] == _UNFINISHED:
            certain -= 1
        new, self._told = text[self._told : certain], max(self._told, certain)
        if certain == len(text):
            self._move_window()
        return self._up_to_stop(new, may_stop)

    def flush(self) -> str:
        """The output has ended: what was held back."""
        if self.stopped_by is not None:
            return ""
        text = self._decoder.decode(self._ids) if self._ids else ""
        rest = self._up_to_stop(text[self._told :], may_stop=True)
        if self.stopped_by is None:
            rest, self._held = rest + self._held, ""
        return rest

    def _move_window(self) -> None:
        """Start the window at the last clean place before this one. Some tokens stay in it, since decoders may treat the
        very first token of a text differently."""
        if len(self._ids) >= _WINDOW_TOKENS and self._clean > 0:
            del self._ids[: self._clean]
            self._told = len(self._decoder.decode(self._ids))
        self._clean = len(self._ids)

    def _up_to_stop(self, new: str, may_stop: bool) -> str:
        if not self._stop:
            return new
        text, self._held = self._held + new, ""
        if may_stop:
            found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
            if found:  # the one that was complete first, so that it makes no difference how tokens cut the text
                _, at, self.stopped_by = min(found)
                return text[:at]
        keep = _longest_beginning(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with, and goes on."""
    for length in range(min(len(text), max(map(len, stops)) - 1), 0, -1):
        end = text[len(text) - length :]
        if any(stop.startswith(end) and len(stop) > length for stop in stops):
            return length
    return 0
