"""What HTTP requests carry and answers are made of: tables in JSON or msgpack, ids in hex, payload streams.

Always true: a body is read only as far as its bound; a table is checked value by value before it is used; what is wrong is
said by name, and never by repeating a value that may be somebody's text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from aiohttp import StreamReader, web

from forebay.kvstore.errors import BadRequest, FrameTooLarge, MalformedFrame
from forebay.kvstore.identity import GroupSpec, NamespaceFacts
from forebay.kvstore.keys import KEY_BYTES

MSGPACK: Final = "application/msgpack"
JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
MAX_TABLE_BYTES: Final = 4 << 20
MAX_KEYS: Final = 65_536
READ_S: Final = 10.0  # the longest silence in the middle of a body
MIN_BYTES_PER_S: Final = 1 << 20  # a slower sender may not hold a place

_BYTES_FACTS: Final = ("weights_digest", "rope", "lora_digest", "salt")


def need_type(request: web.Request, *types: str) -> str:
    """The request's content type, one of `types`.

    Asked for on every request with a body, also because a web page can't send these types to another site unasked.
    """
    if request.content_type not in types or "Content-Type" not in request.headers:
        raise web.HTTPUnsupportedMediaType(text=f"send Content-Type: {' or '.join(types)}")
    return request.content_type


async def read_all(request: web.Request, limit: int) -> bytes:
    """The whole body. Raises: FrameTooLarge, TimeoutError."""
    if (request.content_length or 0) > limit:
        raise FrameTooLarge(f"a body of {request.content_length} bytes is over the limit of {limit}")
    found = bytearray()
    while True:
        async with asyncio.timeout(READ_S):
            chunk = await request.content.readany()
        if not chunk:
            return bytes(found)
        found += chunk
        if len(found) > limit:
            raise FrameTooLarge(f"the body is over the limit of {limit} bytes")


async def read_table(request: web.Request, known: frozenset[str]) -> dict[str, Any]:
    """The map in the body, JSON or msgpack, with no other names than `known`. An empty body is an empty map.

    Raises: MalformedFrame, FrameTooLarge, BadRequest.
    """
    kind = need_type(request, JSON, MSGPACK)
    body = await read_all(request, MAX_TABLE_BYTES)
    if not body:
        return {}
    decode = msgspec.msgpack.decode if kind == MSGPACK else msgspec.json.decode
    try:
        found = decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedFrame(f"the body is not {kind}") from exc
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise BadRequest("the body is not a map with text as its names")
    if unknown := found.keys() - known:
        raise BadRequest(f"unknown name {min(unknown)[:40]!r}: there are {', '.join(sorted(known))}")
    return found


def answer(request: web.Request, table: Mapping[str, Any], *, status: int = 200) -> web.Response:
    """The table in the type that the request asks for (Accept) or came in itself: msgpack with bytes, or JSON with hex."""
    accepts = request.headers.get("Accept", "")
    if MSGPACK in accepts or (request.content_type == MSGPACK and JSON not in accepts):
        return web.Response(body=msgspec.msgpack.encode(table), status=status, content_type=MSGPACK)
    return json_response(table, status=status)


def json_response(table: Mapping[str, Any], *, status: int = 200) -> web.Response:
    # msgspec writes NaN and infinities as null; the standard library writes what no JSON parser must accept.
    body = msgspec.json.encode(_with_hex(table)) + b"\n"
    return web.Response(body=body, status=status, content_type=JSON)


def _with_hex(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {name: _with_hex(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_hex(part) for part in value]
    return value


# --- values -----------------------------------------------------------------------------------------------------------


def hex_id(name: str, text: object) -> bytes:
    """An id of 16 bytes from 32 hex digits, or as it is. Raises: BadRequest."""
    if isinstance(text, bytes) and len(text) == KEY_BYTES:
        return text
    if isinstance(text, str) and len(text) == 2 * KEY_BYTES:
        try:
            found = bytes.fromhex(text)
        except ValueError:
            found = b""
        if len(found) == KEY_BYTES:
            return found
    raise BadRequest(f"{name} is not {2 * KEY_BYTES} hex digits")


def hex_bytes(name: str, text: object) -> bytes:
    """Bytes from hex digits, or as they are. Raises: BadRequest."""
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        try:
            return bytes.fromhex(text)
        except ValueError:
            pass
    raise BadRequest(f"{name} is not hex digits")


def keys_of(table: Mapping[str, Any]) -> list[bytes]:
    """`keys`: a list of ids, or all of them side by side in one byte string. Raises: BadRequest."""
    given = table.get("keys")
    if isinstance(given, bytes):
        if len(given) % KEY_BYTES:
            raise BadRequest(f"keys are {len(given)} bytes, not a multiple of {KEY_BYTES}")
        found = [given[at : at + KEY_BYTES] for at in range(0, len(given), KEY_BYTES)]
    elif isinstance(given, list):
        found = [hex_id("a key", key) for key in given[: MAX_KEYS + 1]]
    else:
        raise BadRequest("give keys: a list of 32 hex digits each, or in msgpack one byte string of 16 bytes each")
    if not 1 <= len(found) <= MAX_KEYS:
        raise BadRequest(f"give 1 to {MAX_KEYS} keys")
    return found


def whole(name: str, value: object, low: int, high: int) -> int:
    """An integer within low..high, also from text. Raises: BadRequest."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise BadRequest(f"{name} is not a whole number within {low}..{high}")
    return value


def number(name: str, value: object, low: float, high: float) -> float:
    """A number within low..high, also from text. Raises: BadRequest."""
    try:
        found = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else float("nan")
    except (ValueError, OverflowError):
        found = float("nan")
    if not low <= found <= high:
        raise BadRequest(f"{name} is not a number within {low:g}..{high:g}")
    return found


def facts_of(table: Mapping[str, Any]) -> NamespaceFacts:
    """Facts from a table of their fields, bytes as hex digits. Raises: BadRequest that says which one is wrong."""
    fields = dict(table)
    for name in _BYTES_FACTS:
        if name in fields:
            fields[name] = hex_bytes(name, fields[name])
    try:
        if "latent_dims" in fields:
            fields["latent_dims"] = tuple(fields["latent_dims"])
        if "groups" in fields:
            fields["groups"] = tuple(GroupSpec(**group) for group in fields["groups"])
        return NamespaceFacts(**fields)
    except TypeError as exc:
        raise BadRequest(
            "facts: a field is missing, unknown, or of another type; docs/reference/http.md has them"
        ) from exc
    except ValueError as exc:
        raise BadRequest(f"facts: {exc}") from exc


class Body:
    """A payload stream, read piece by piece into memory that is there already."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._left = memoryview(b"")

    async def fill(self, view: memoryview) -> int:
        """Fill `view`. Returns how many bytes there were: fewer only at the stream's end.

        Raises: TimeoutError: the sender is silent, or far too slow.
        """
        done = 0
        async with asyncio.timeout(READ_S + len(view) / MIN_BYTES_PER_S):
            while done < len(view):
                if not self._left and not await self._more():
                    break
                count = min(len(self._left), len(view) - done)
                view[done : done + count] = self._left[:count]
                self._left = self._left[count:]
                done += count
        return done

    async def skip(self, size: int) -> int:
        """Drop `size` bytes. Returns as `fill`, and raises as it does."""
        done = 0
        async with asyncio.timeout(READ_S + size / MIN_BYTES_PER_S):
            while done < size:
                if not self._left and not await self._more():
                    break
                count = min(len(self._left), size - done)
                self._left = self._left[count:]
                done += count
        return done

    async def _more(self) -> bool:
        self._left = memoryview(await self._content.readany())
        return bool(self._left)
