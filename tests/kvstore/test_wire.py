"""Frames and verbs take any bytes: what is good comes through unchanged, and all else ends in a ProtocolError."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator
from typing import Any, get_type_hints

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from forebay.kvstore import wire
from forebay.kvstore.errors import (
    PROTOCOL_ERRORS,
    FrameTooLarge,
    MalformedFrame,
    ProtocolError,
    UnknownVerb,
    VersionMismatch,
)
from forebay.kvstore.framing import FrameBuffer
from forebay.kvstore.payload import Views
from forebay.kvstore.wire import HEADER, HEADER_BYTES, PROTOCOL_VERSION, Kind

LIMIT = 1 << 20

u32 = st.integers(0, 2**32 - 1)
wide = st.integers(-(2**63), 2**64 - 1)
texts = st.text(max_size=20)
blobs = st.binary(max_size=64)
FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    int: wide,
    str: texts,
    bytes: blobs,
    list[bytes]: st.lists(blobs, max_size=4),
    list[int]: st.lists(wide, max_size=8),
    dict[str, float]: st.dictionaries(texts, st.floats(allow_nan=False), max_size=4),
}


def _requests_of(kind: type) -> st.SearchStrategy[Any]:
    types = get_type_hints(kind)  # without the bounds that come with them
    return st.builds(kind, *(FIELDS[types[field.name]] for field in msgspec.structs.fields(kind)))


requests = st.one_of([_requests_of(kind) for kind in wire.REQUESTS])


def body_of(request: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(request)


def test_every_verb_is_decodable_and_has_its_own_name() -> None:
    assert len(wire.VERBS) == len(wire.REQUESTS)
    assert set(wire.REQUESTS) == set(wire.AnyRequest.__args__)


@given(request=requests, number=u32)
def test_a_request_comes_through_unchanged(request: wire.AnyRequest, number: int) -> None:
    frame = wire.encode_frame(Kind.REQUEST, number, request)
    kind, told, length = wire.parse_header(frame, 0, LIMIT)
    assert (kind, told, length) == (Kind.REQUEST, number, len(frame) - HEADER_BYTES)
    assert wire.decode_request(frame[HEADER_BYTES:]) == request


@given(error=st.sampled_from(sorted(PROTOCOL_ERRORS)), message=texts)
def test_an_error_comes_through_as_the_same_type(error: str, message: str) -> None:
    frame = wire.encode_error(7, PROTOCOL_ERRORS[error](message))
    found = wire.decode_error(frame[HEADER_BYTES:])
    assert type(found) is PROTOCOL_ERRORS[error] and str(found) == message


def test_an_error_of_a_newer_daemon_is_a_plain_protocol_error() -> None:
    found = wire.decode_error(body_of(wire.ErrorBody("invented_tomorrow", "what it says")))
    assert type(found) is ProtocolError and str(found) == "what it says"


# --- any bytes ----------------------------------------------------------------------------------------------------------


def decode(body: bytes) -> None:
    """Decode as both ends do; the only trouble there may be is a ProtocolError."""
    try:
        assert isinstance(wire.decode_request(body), wire.REQUESTS)
    except ProtocolError as refused:
        assert str(refused) and len(str(refused)) < 500, "the refusal must say something, and not repeat its cause"
    assert isinstance(wire.decode_error(body), ProtocolError)


def mutate(body: bytes, changes: list[tuple[int, int]]) -> bytes:
    changed = bytearray(body)
    for position, value in changes:
        changed[position % len(changed)] = value
    return bytes(changed)


changes = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=6)


@settings(max_examples=500)
@given(body=st.binary(max_size=300))
@example(body=b"")
@example(body=b"\x91\xa5hello" + b"\x91" * 100_000)  # nested deeper than a decoder's stack
@example(body=b"\x92\xa5match" + b"\x81\xa1a" * 50_000)
@example(body=b"\xdd\xff\xff\xff\xff\xa5match")  # an array of 2^32 elements, and nothing behind it
@example(body=b"\xc6\xff\xff\xff\xff")
@example(body=b"\x92\xa5match\xd6\xff\xff\xff\xff\xff")  # a timestamp
@example(body=b"\x92\xa7unknown\xc7\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")  # one out of all range
@example(body=b"\x91\xa4\xff\xfe\xfd\xfc")  # a verb that is no text
@example(body=b"\x92\xa7unknown\x81\x90\x01")  # a map whose key is an array
@example(body=b"\x92\xa7unknown\x81\x81\x01\x02\x03")  # and one whose key is a map
@example(body=b"\xa5match")
@example(body=b"\x91\x93\x01\x02\x03")
def test_no_body_does_more_harm_than_a_protocol_error(body: bytes) -> None:
    decode(body)


@settings(max_examples=500)
@given(request=requests, changes=changes, cut=st.integers(0, 40))
def test_a_damaged_request_does_no_more_harm_than_a_protocol_error(
    request: wire.AnyRequest, changes: list[tuple[int, int]], cut: int
) -> None:
    body = body_of(request)
    decode(mutate(body, changes))
    decode(body[: max(0, len(body) - cut)])
    decode(body + mutate(body, changes))


packable = st.recursive(
    st.none() | st.booleans() | wide | st.floats() | texts | blobs,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | wide, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300)
@given(verb=st.sampled_from(sorted(wire.VERBS)), fields=st.lists(packable, max_size=7))
def test_fields_of_any_shape_do_no_more_harm_than_a_protocol_error(verb: str, fields: list[Any]) -> None:
    decode(msgspec.msgpack.encode([verb, *fields]))


@given(fields=st.lists(packable, max_size=3), verb=texts.filter(lambda text: text not in wire.VERBS))
def test_an_unknown_verb_is_told_from_garbage(verb: str, fields: list[Any]) -> None:
    with pytest.raises(UnknownVerb) as refused:
        wire.decode_request(msgspec.msgpack.encode([verb, *fields]))
    assert not refused.value.fatal


@given(keys=st.binary(max_size=200))
def test_keys_are_split_into_sixteens_or_refused(keys: bytes) -> None:
    if len(keys) % 16:
        with pytest.raises(MalformedFrame, match="16"):
            wire.split_keys(keys)
    else:
        split = wire.split_keys(keys)
        assert b"".join(split) == keys and {len(key) for key in split} <= {16}


# --- the stream -----------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(header=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_is_read_or_refused(header: bytes) -> None:
    length, version, kind, reserved, number = struct.unpack("<IBBHI", header)
    good = version == PROTOCOL_VERSION and 1 <= kind <= 5 and not reserved and (length <= LIMIT or kind == Kind.PAYLOAD)
    if good:
        assert wire.parse_header(header, 0, LIMIT) == (kind, number, length)
    else:
        with pytest.raises(ProtocolError) as refused:
            wire.parse_header(header, 0, LIMIT)
        assert refused.value.fatal, "a stream that can't be resynchronised must end"


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (HEADER.pack(0, PROTOCOL_VERSION + 1, 1, 0, 0), VersionMismatch),
        (HEADER.pack(LIMIT + 1, PROTOCOL_VERSION, 1, 0, 0), FrameTooLarge),
        (HEADER.pack(2**32 - 1, PROTOCOL_VERSION, 1, 0, 0), FrameTooLarge),
        (HEADER.pack(0, PROTOCOL_VERSION, 6, 0, 0), MalformedFrame),
        (HEADER.pack(0, PROTOCOL_VERSION, 1, 1, 0), MalformedFrame),
        (b"GET / HTTP/1.1\r\n"[:HEADER_BYTES], VersionMismatch),
    ],
    ids=["version", "long", "longest", "kind", "reserved", "http"],
)
def test_a_bad_header_is_refused_by_name_before_its_body_is_waited_for(
    header: bytes, error: type[ProtocolError]
) -> None:
    inbox = FrameBuffer(LIMIT)
    for part in feed(inbox, [header]):
        assert part
        with pytest.raises(error):
            inbox.next_frame()


def feed(inbox: FrameBuffer, chunks: list[bytes]) -> Iterator[bool]:
    """Send chunks through a socket pair, one `receive` each; yields after each."""
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(5.0)
        for chunk in chunks:
            left.sendall(chunk)
            had = 0
            while had < len(chunk):
                had += inbox.receive(right, descriptors=False)
            yield True


def frames(inbox: FrameBuffer) -> Iterator[tuple[int, int, bytes]]:
    while (frame := inbox.next_frame()) is not None:
        kind, number, body = frame
        with body:
            yield kind, number, bytes(body)


bodies = st.one_of(
    st.binary(max_size=100),
    st.builds(lambda size, fill: bytes([fill]) * size, st.integers(0, 300_000), st.integers(0, 255)),
)


@settings(max_examples=60)
@given(
    sent=st.lists(st.tuples(st.sampled_from(Kind), u32, bodies), max_size=6),
    cuts=st.lists(st.integers(0, 400_000), max_size=8),
)
def test_a_stream_cut_anywhere_gives_the_same_frames(sent: list[tuple[Kind, int, bytes]], cuts: list[int]) -> None:
    stream = b"".join(HEADER.pack(len(body), PROTOCOL_VERSION, kind, 0, number) + body for kind, number, body in sent)
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    found: list[tuple[int, int, bytes]] = []
    arrived: list[bytearray] = []  # bodies of payload frames

    def payload(number: int, length: int) -> Views:
        arrived.append(bytearray(length))
        view = memoryview(arrived[-1])
        return Views((view[at : at + 1000] for at in range(0, length, 1000)), length)

    inbox = FrameBuffer(LIMIT, payload)
    pieces = [stream[one:other] for one, other in itertools.pairwise(edges)]
    chunks = [piece[start : start + 50_000] for piece in pieces for start in range(0, len(piece), 50_000)]
    for _ in feed(inbox, chunks):
        found.extend(frames(inbox))
    assert found == [(int(kind), number, b"" if kind == Kind.PAYLOAD else body) for kind, number, body in sent]
    assert arrived == [body for kind, _, body in sent if kind == Kind.PAYLOAD]
    assert not inbox.pending


@settings(max_examples=100)
@given(garbage=st.binary(min_size=1, max_size=2000), whole=requests)
def test_a_stream_of_garbage_gives_frames_or_a_protocol_error(garbage: bytes, whole: wire.AnyRequest) -> None:
    inbox = FrameBuffer(LIMIT)
    good = wire.encode_frame(Kind.REQUEST, 9, whole)
    heard = []
    try:
        for _ in feed(inbox, [good, garbage]):
            heard.extend(frames(inbox))
    except ProtocolError as refused:
        assert refused.fatal
    assert heard[0] == (Kind.REQUEST, 9, good[HEADER_BYTES:]), "what came before the garbage was lost"


def test_a_frame_at_the_limit_passes_and_its_memory_is_given_back() -> None:
    inbox, limit = FrameBuffer(3 << 20), 3 << 20
    frame = HEADER.pack(limit, PROTOCOL_VERSION, Kind.REPLY, 0, 1) + bytes(limit)
    small = wire.encode_frame(Kind.REQUEST, 2, wire.Stats())
    before = len(inbox._buffer)
    chunks = [frame[start : start + 60_000] for start in range(0, len(frame), 60_000)]
    found = [each for _ in feed(inbox, [*chunks, small]) for each in frames(inbox)]
    assert [number for _, number, _ in found] == [1, 2] and len(found[0][2]) == limit
    assert len(inbox._buffer) == before, "one huge frame kept its memory"
