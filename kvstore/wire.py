"""Frames and verbs of the session protocol. docs/wire.md goes through them byte by byte.

Covers encoding, bounds and typed decoding; knows no sockets. A frame is a 12-byte header and a msgpack body. A request's
body is an array `[verb, field, ...]`; a reply's body is an array of the fields of its verb's reply. Keys, locations and
statuses travel as flat byte strings of fixed-stride records, so a batch of 8,192 keys is one string and not 8,192 objects.
Always true: a decoder raises only `ProtocolError`s, whatever the bytes.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from forebay.kvstore.errors import (
    PROTOCOL_ERRORS,
    FrameTooLarge,
    MalformedFrame,
    ProtocolError,
    UnknownVerb,
    VersionMismatch,
)

PROTOCOL_VERSION: Final = 1
HEADER: Final = struct.Struct("<IBBHI")  # body length, version, kind, reserved (0), request id
HEADER_BYTES: Final = HEADER.size
DEFAULT_MAX_FRAME_BYTES: Final = 64 << 20

KEY_DTYPE: Final = np.dtype("V16")
# Where one object lies: extent id, index of its generation on the board, byte offset in the extent, generation.
LOCATION_DTYPE: Final = np.dtype([("extent", "<u4"), ("board", "<u4"), ("offset", "<u8"), ("generation", "<u8")])


class Kind(IntEnum):
    """What a frame is. A notice answers no request; its id is the ticket it belongs to."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    NOTICE = 4
    PAYLOAD = 5  # whole objects, side by side; the id is that of the request they belong to


class SlotStatus(IntEnum):
    """The daemon's answer for one object of an `allocate`."""

    WRITABLE = 0  # write it, then commit
    PRESENT = 1  # visible already: nothing to do
    PENDING = 2  # another session writes these parts
    REFUSED = 3  # no room that may be taken now


_R = TypeVar("_R")
# Looked at before an array is read: one byte of a frame may stand for an object of fifty, and every item is work for the loop.
_Names = Annotated[list[bytes], msgspec.Meta(max_length=65_536)]
_Numbers = Annotated[list[int], msgspec.Meta(max_length=65_536)]
_Values = Annotated[dict[str, float], msgspec.Meta(max_length=1024)]


class Request(msgspec.Struct, Generic[_R], array_like=True, tag_field="verb"):
    """Base of all requests; the type argument is the reply's type."""


class HelloReply(msgspec.Struct, array_like=True):
    """Sent with one file descriptor: the domain's board of generations, to be mapped read-only."""

    session: bytes
    boot_epoch: bytes
    domain: str
    read_only: bool
    extent_bytes: int
    board_bytes: int
    max_frame_bytes: int


class Hello(Request[HelloReply], array_like=True, tag="hello"):
    """First verb of a session. `previous` lists earlier sessions of this process whose copies have all stopped."""

    version_min: int
    version_max: int
    token: str
    engine_id: str
    rank: int
    previous: _Names = []


class Settle(Request["Done"], array_like=True, tag="settle"):
    """Copies of these ended sessions of this process have all stopped: their memory may be used again."""

    previous: _Names


class OpenReply(msgspec.Struct, array_like=True):
    handle: int
    namespace: bytes


class Open(Request[OpenReply], array_like=True, tag="open"):
    """Open a namespace; `facts` is its canonical encoding."""

    facts: bytes


class Done(msgspec.Struct, array_like=True):
    """Reply of verbs that answer with a count."""

    count: int = 0


class CloseHandle(Request[Done], array_like=True, tag="close_handle"):
    handle: int


class MapReply(msgspec.Struct, array_like=True):
    """Sent with one file descriptor an extent, in the order asked."""

    extents: list[int]


class MapExtents(Request[MapReply], array_like=True, tag="map"):
    extents: _Numbers


class Unmapped(Request[Done], array_like=True, tag="unmapped"):
    """The client no longer maps these retired extents."""

    extents: _Numbers


class MatchReply(msgspec.Struct, array_like=True):
    """`runs`: (tier, blocks) of the leading run in order. `estimates`: tier -> [latency_s, bytes/s, queued, overhead_s, ok]."""

    runs: list[tuple[str, int]]
    estimates: dict[str, tuple[float, float, int, float, bool]]


class Match(Request[MatchReply], array_like=True, tag="match"):
    handle: int
    group: int
    keys: bytes


class AcquireReply(msgspec.Struct, array_like=True):
    """`locations`: LOCATION_DTYPE records of the leading run. `loaded`: (tier, blocks) that had to come from below."""

    lease: int
    locations: bytes
    loaded: list[tuple[str, int]] = []
    retired: list[int] = []


class Acquire(Request[AcquireReply], array_like=True, tag="acquire"):
    """Lease the leading run. Blocks that lie below RAM are loaded first, for `wait_ms` at most (0: only what is in RAM)."""

    handle: int
    group: int
    keys: bytes
    wait_ms: int = 0
    shares: int = 1


class Attach(Request[AcquireReply], array_like=True, tag="attach"):
    """Locations of a lease that another session of the same engine took; release it as one share."""

    lease: int


class Release(Request[Done], array_like=True, tag="release"):
    lease: int


class PrefetchReply(msgspec.Struct, array_like=True):
    ticket: int
    loading: int


class Prefetch(Request[PrefetchReply], array_like=True, tag="prefetch"):
    """Start loading the leading run into RAM. A `Loaded` notice follows unless `loading` is 0."""

    handle: int
    group: int
    keys: bytes
    timeout_ms: int


class Loaded(msgspec.Struct, array_like=True):
    """Notice: the prefetch named by the frame's id has ended with this many leading blocks in RAM."""

    blocks: int


class AllocateReply(msgspec.Struct, array_like=True):
    """`statuses`: one SlotStatus byte an object. `locations`: one record an object, zeros where it is not writable."""

    allocation: int
    statuses: bytes
    locations: bytes
    retired: list[int] = []


class Allocate(Request[AllocateReply], array_like=True, tag="allocate"):
    """Room for objects of a run. `parent`: key before the first (b"" = the namespace id). `parts`: bit mask, 0 = all."""

    handle: int
    group: int
    keys: bytes
    parent: bytes = b""
    parts: int = 0


class Write(Request[Done], array_like=True, tag="write"):
    """Copy `data` into the `index`-th object of an allocation, for clients that may not map it writable."""

    allocation: int
    index: int
    offset: int
    data: bytes


class Commit(Request[Done], array_like=True, tag="commit"):
    """Objects of an allocation are whole: `written` holds one byte an object, 1 = commit it, 0 = abort it."""

    allocation: int
    written: bytes


class Abort(Request[Done], array_like=True, tag="abort"):
    allocation: int


class GetReply(msgspec.Struct, array_like=True):
    """`count` objects of the leading run, each `object_bytes` long, follow in payload frames with this reply's id."""

    count: int
    object_bytes: int
    loaded: list[tuple[str, int]] = []


class Get(Request[GetReply], array_like=True, tag="get"):
    """Acquire, payload and release in one, for clients that share no memory. `wait_ms` as for `acquire`."""

    handle: int
    group: int
    keys: bytes
    wait_ms: int = 0


class PutReply(msgspec.Struct, array_like=True):
    """`count`: objects that became visible. `statuses`: one SlotStatus byte an object; WRITABLE ones were written."""

    count: int
    statuses: bytes


class Put(Request[PutReply], array_like=True, tag="put"):
    """Allocate, payload and commit in one. `payload_bytes` of objects, all of them, follow in payload frames with this id."""

    handle: int
    group: int
    keys: bytes
    payload_bytes: int
    parent: bytes = b""


class Fill(Request[Done], array_like=True, tag="fill"):
    """Payload of the writable objects of an allocation, and its commit. `payload_bytes` follow as for `put`."""

    allocation: int
    payload_bytes: int


class Pin(Request[Done], array_like=True, tag="pin"):
    """Keep blocks in RAM until `unpin`, or for `for_ms` if that is given: then the pin ends by itself."""

    handle: int
    group: int
    keys: bytes
    for_ms: int = 0


class Unpin(Request[Done], array_like=True, tag="unpin"):
    handle: int
    group: int
    keys: bytes


class Expire(Request[Done], array_like=True, tag="expire"):
    """Forget blocks that are here now, on all tiers, `after_ms` from now."""

    handle: int
    group: int
    keys: bytes
    after_ms: int


class PurgeReply(msgspec.Struct, array_like=True):
    """`unlisted`: tiers that can't list what they hold; there only what RAM knew was forgotten."""

    objects: int
    unlisted: list[str]


class Purge(Request[PurgeReply], array_like=True, tag="purge"):
    """Forget whole namespaces (none given: all of the tenant), or what in them is older than `older_than_ms`."""

    namespaces: _Names = []
    older_than_ms: int = 0
    tenant: str = ""


class Delete(Request[Done], array_like=True, tag="delete"):
    handle: int
    group: int
    keys: bytes


class FlushReply(msgspec.Struct, array_like=True):
    durable: int
    missing: int
    failed: int


class Flush(Request[FlushReply], array_like=True, tag="flush"):
    handle: int
    group: int
    keys: bytes
    timeout_ms: int


class Report(Request[Done], array_like=True, tag="report"):
    """Numbers an engine measured (prefill and load timings, tokens reused); never text from a prompt."""

    kind: str
    values: _Values


class StatsReply(msgspec.Struct, array_like=True):
    stats: dict[str, Any]


class Stats(Request[StatsReply], array_like=True, tag="stats"):
    pass


class ExplainReply(msgspec.Struct, array_like=True):
    blocks: list[dict[str, Any]]


class Explain(Request[ExplainReply], array_like=True, tag="explain"):
    handle: int
    group: int
    keys: bytes


class ErrorBody(msgspec.Struct, array_like=True):
    code: str
    message: str


REQUESTS: Final = (
    Hello,
    Settle,
    Open,
    CloseHandle,
    MapExtents,
    Unmapped,
    Match,
    Acquire,
    Attach,
    Release,
    Prefetch,
    Allocate,
    Write,
    Commit,
    Abort,
    Get,
    Put,
    Fill,
    Pin,
    Unpin,
    Expire,
    Delete,
    Purge,
    Flush,
    Report,
    Stats,
    Explain,
)
AnyRequest = (
    Hello
    | Settle
    | Open
    | CloseHandle
    | MapExtents
    | Unmapped
    | Match
    | Acquire
    | Attach
    | Release
    | Prefetch
    | Allocate
    | Write
    | Commit
    | Abort
    | Get
    | Put
    | Fill
    | Pin
    | Unpin
    | Expire
    | Delete
    | Purge
    | Flush
    | Report
    | Stats
    | Explain
)
VERBS: Final = frozenset(str(cls.__struct_config__.tag) for cls in REQUESTS)


class _Tag(msgspec.Struct, array_like=True):
    """The verb of any request. What follows it is skipped without making objects of it."""

    verb: str


_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_error_decoder = msgspec.msgpack.Decoder(ErrorBody)
_tag_decoder = msgspec.msgpack.Decoder(_Tag)


def encode_frame(kind: Kind, request_id: int, body: msgspec.Struct) -> bytes:
    """One whole frame. `request_id` is a u32 chosen by the asker and repeated in the answer."""
    payload = _encoder.encode(body)
    return HEADER.pack(len(payload), PROTOCOL_VERSION, kind, 0, request_id) + payload


def encode_error(request_id: int, error: ProtocolError) -> bytes:
    return encode_frame(Kind.ERROR, request_id, ErrorBody(error.code, str(error)))


def parse_header(buffer: bytes | bytearray | memoryview, offset: int, max_frame_bytes: int) -> tuple[int, int, int]:
    """Read a frame header. Returns (kind, request id, body length).

    Raises: VersionMismatch, FrameTooLarge, MalformedFrame. All end the session, since the stream can't be resynchronised.
    """
    length, version, kind, reserved, request_id = HEADER.unpack_from(buffer, offset)
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"frame has protocol version {version}, this side speaks {PROTOCOL_VERSION}; upgrade the older side"
        )
    if not 1 <= kind <= 5 or reserved:
        raise MalformedFrame(f"frame header has kind {kind} and reserved bits {reserved}: not a Forebay frame")
    if length > max_frame_bytes and kind != Kind.PAYLOAD:  # whose bytes are not kept, and announced beforehand
        raise FrameTooLarge(f"frame of {length} bytes is over the limit of {max_frame_bytes}; send smaller batches")
    return kind, request_id, length


def decode_request(body: bytes | bytearray | memoryview) -> AnyRequest:
    """Decode a request's body.

    Raises: UnknownVerb (the session goes on), MalformedFrame.
    """
    try:
        return _request_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as exc:
        raise _explain_bad_request(body, exc) from exc


def _explain_bad_request(body: bytes | bytearray | memoryview, cause: Exception) -> ProtocolError:
    """An unknown verb is worth a softer error than garbage, so that a newer client can fall back."""
    try:
        verb = _tag_decoder.decode(body).verb
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return MalformedFrame("body is no msgpack array that begins with a verb")
    if verb not in VERBS:
        return UnknownVerb(f"unknown verb {verb[:40]!r}; this daemon speaks protocol version {PROTOCOL_VERSION}")
    return MalformedFrame(f"body does not match its verb: {cause}")


def decode_error(body: bytes | bytearray | memoryview) -> ProtocolError:
    """The exception that an error frame stands for; an unknown code becomes a plain ProtocolError."""
    try:
        error = _error_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as exc:
        return MalformedFrame(f"error frame can't be read: {exc}")
    return PROTOCOL_ERRORS.get(error.code, ProtocolError)(error.message)


def split_keys(keys: bytes) -> list[bytes]:
    """The 16-byte keys of a flat string. [M] 25 ns a key this way, 185 ns by slicing. Raises: MalformedFrame."""
    count_keys(keys)
    return np.frombuffer(keys, KEY_DTYPE).tolist()  # type: ignore[no-any-return]


def count_keys(keys: bytes) -> int:
    """How many keys a flat string holds. Raises: MalformedFrame."""
    if len(keys) % 16:
        raise MalformedFrame(f"keys are {len(keys)} bytes, not a multiple of 16: each key has 16 bytes")
    return len(keys) // 16


class FlatKeys:
    """Keys side by side, for whoever looks at few of them. Raises: MalformedFrame."""

    __slots__ = ("_count", "_keys")

    def __init__(self, keys: bytes) -> None:
        self._keys, self._count = keys, count_keys(keys)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> bytes:
        return self._keys[16 * position : 16 * position + 16]
