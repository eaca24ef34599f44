"""Text piece by piece equals text at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from forebay.engine.detokenize import Detokenizer

ALPHABET = "ab \n.é€漢😀"


class ByteTokens:
    """Token i is the i-th byte string. Bytes that are no UTF-8 are shown as U+FFFD, as byte-level decoders do."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")


@st.composite
def cut_texts(draw: st.DrawFn, *, broken: bool = False) -> list[bytes]:
    """A text's bytes, cut anywhere."""
    data = draw(st.text(ALPHABET, max_size=80)).encode()
    if broken:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=20)) + data[at:]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=60)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def told(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(ByteTokens(pieces), stop)
    texts = []
    for i in range(len(pieces)):
        texts.append(detokenizer.add(i))
        if detokenizer.stopped_by is not None:
            break
    return [*texts, detokenizer.flush()], detokenizer.stopped_by


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Reading character by character: the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(cut_texts())
def test_a_text_cut_anywhere_comes_whole_and_without_half_characters(pieces: list[bytes]) -> None:
    texts, _ = told(pieces)
    assert "".join(texts) == b"".join(pieces).decode()
    assert "\ufffd" not in "".join(texts)


@given(cut_texts(broken=True))
def test_bytes_that_are_no_text_come_as_the_decoder_shows_them(pieces: list[bytes]) -> None:
    assert "".join(told(pieces)[0]) == b"".join(pieces).decode("utf-8", errors="replace")


@given(cut_texts(), st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_stop_string_that_is_complete_first(pieces: list[bytes], stop: list[str]) -> None:
    texts, stopped_by = told(pieces, stop)
    assert ("".join(texts), stopped_by) == first_stop(b"".join(pieces).decode(), stop)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(ByteTokens([b"one", b" EN", b"t", b" EN", b"D", b"x"]), ["END"])
    assert [detokenizer.add(i) for i in range(5)] == ["one", " ", "ENt", " ", ""]
    assert detokenizer.stopped_by == "END" and detokenizer.flush() == ""


def test_a_character_is_told_with_its_last_byte() -> None:
    detokenizer = Detokenizer(ByteTokens([bytes([b]) for b in "😀é".encode()]))
    assert [detokenizer.add(i) for i in range(6)] == ["", "", "", "😀", "", "é"]


def test_what_was_held_back_is_told_at_the_end() -> None:
    detokenizer = Detokenizer(ByteTokens([b"a<|", b"\xe2\x82"]), ["<|end|>"])
    assert [detokenizer.add(0), detokenizer.add(1), detokenizer.flush()] == ["a", "", "<|\ufffd"]


def test_stop_strings_do_not_count_before_their_time() -> None:
    detokenizer = Detokenizer(ByteTokens([b"STOP", b" ST", b"OP"]), ["STOP"])
    assert detokenizer.add(0, may_stop=False) == "STOP" and detokenizer.stopped_by is None
    assert [detokenizer.add(1), detokenizer.add(2)] == [" ", ""] and detokenizer.stopped_by == "STOP"


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    decoded: list[int] = []

    class Counting(ByteTokens):
        def decode(self, ids: Sequence[int]) -> str:
            decoded.append(len(ids))
            return super().decode(ids)

    detokenizer = Detokenizer(Counting([b"ab"]))
    assert "".join(detokenizer.add(0) for _ in range(1000)) + detokenizer.flush() == "ab" * 1000
    assert max(decoded) <= 32 and sum(decoded) < 40_000
