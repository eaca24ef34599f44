"""The HTTP door's routes for blocks: open, keys, match, get, put, delete.

docs/reference/http.md describes them. What they do to memory is in server/blocks.py. Always true: payload goes between the
socket and its place in shared memory piece by piece, never whole through Python; a body that ends early stores nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import numpy as np
from aiohttp import web

from forebay.kvstore.errors import BadRequest
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import block_keys, token_words
from forebay.kvstore.objects import Header, ObjectLayout
from forebay.kvstore.wire import SlotStatus
from forebay.server.auth import ADMIN, DATA, READ, WRITE, Principal
from forebay.server.blocks import Blocks, Lent, check_header
from forebay.server.expiry import MAX_SECONDS
from forebay.server.http_bodies import (
    JSON,
    MSGPACK,
    OCTETS,
    READ_S,
    Body,
    answer,
    facts_of,
    hex_bytes,
    hex_id,
    keys_of,
    need_type,
    number,
    read_all,
    read_table,
    whole,
)
from forebay.server.http_routes import Route, caller
from forebay.server.sessions import Namespace

MAX_FACTS_BYTES: Final = 64 << 10
MAX_WAIT_MS: Final = 60_000
MAX_OBJECTS: Final = 65_536  # of one request
_TIMED: Final = frozenset({"keys", "group", "seconds"})
_PIECE: Final = 1 << 20  # in one write to the socket
_STATUS_NAMES: Final = {status: status.name.lower() for status in SlotStatus}
_FACT_NAMES: Final = frozenset(NamespaceFacts.__dataclass_fields__)


class BlockRoutes:
    """Handlers over a daemon's blocks."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def routes(self) -> tuple[Route, ...]:
        at = "/v1/namespaces/{namespace}"
        return (
            Route("POST", "/v1/namespaces", DATA, self._open),
            Route("POST", f"{at}/keys", DATA, self._keys),
            Route("POST", f"{at}/match", DATA, self._match),
            Route("POST", f"{at}/get", READ, self._get_run),
            Route("POST", f"{at}/blocks", WRITE, self._put_blocks),
            Route("POST", f"{at}/objects", WRITE, self._put_run),
            Route("GET", f"{at}/objects/{{key}}", READ, self._get),
            Route("PUT", f"{at}/objects/{{key}}", WRITE, self._put),
            Route("DELETE", f"{at}/objects/{{key}}", WRITE, self._delete_one),
            Route("POST", f"{at}/delete", WRITE, self._delete),
            Route("POST", f"{at}/pin", WRITE, self._pin),
            Route("POST", f"{at}/expire", WRITE, self._expire),
            Route("POST", "/v1/purge", ADMIN, self._purge),
        )

    def _named(self, request: web.Request, table: dict[str, Any] | None = None) -> tuple[Principal, Namespace, int]:
        """Who asks, and for which namespace and group."""
        principal = caller()
        namespace = self._blocks.namespace(principal, hex_id("namespace", request.match_info["namespace"]))
        given = request.query.get("group", "0") if table is None else table.get("group", 0)
        group = whole("group", given, 0, 63)
        self._blocks.table(namespace, group)
        return principal, namespace, group

    # --- namespaces, keys, match --------------------------------------------------------------------------------------

    async def _open(self, request: web.Request) -> web.Response:
        if need_type(request, JSON, MSGPACK, OCTETS) == OCTETS:
            facts = NamespaceFacts.decode(await read_all(request, MAX_FACTS_BYTES))
        else:
            facts = facts_of(await read_table(request, _FACT_NAMES))
        namespace = self._blocks.open(caller(), facts)
        groups = [
            {
                "kind": spec.kind,
                "object_bytes": layout.object_bytes,
                "header_bytes": layout.header_bytes,
                "payload_bytes": layout.payload_bytes,
                "parts": len(layout.part_bytes),
            }
            for spec, layout in zip(facts.groups, namespace.layouts, strict=True)
        ]
        return answer(request, {"namespace": namespace.id, "block_tokens": facts.block_tokens, "groups": groups})

    async def _keys(self, request: web.Request) -> web.Response:
        table = await read_table(request, frozenset({"token_ids", "parent"}))
        _, namespace, _ = self._named(request)
        facts, given, parent = namespace.facts, table.get("token_ids"), table.get("parent")
        if isinstance(given, bytes):
            if len(given) % 4:
                raise BadRequest("token_ids as a byte string are u32, little-endian")
            given = np.frombuffer(given, "<u4")
        elif not isinstance(given, list):
            raise BadRequest("give token_ids: a list of integers, or in msgpack a byte string of u32")
        try:
            words = token_words(given)
        except ValueError:
            raise BadRequest("token_ids are integers within 0..4294967295") from None
        keys = block_keys(
            namespace.id,
            words,
            facts.block_tokens,
            algorithm=facts.hash_algorithm,
            parent=None if parent is None else hex_id("parent", parent),
        )
        return answer(request, {"keys": keys})

    async def _match(self, request: web.Request) -> web.Response:
        table = await read_table(request, frozenset({"keys", "group"}))
        principal, namespace, group = self._named(request, table)
        runs = await self._blocks.match(principal, namespace, group, keys_of(table))
        total = sum(count for _, count in runs)
        return answer(request, {"blocks": total, "runs": runs, "estimates": self._blocks.estimates()})

    # --- get ----------------------------------------------------------------------------------------------------------

    async def _get(self, request: web.Request) -> web.StreamResponse:
        principal, namespace, group = self._named(request)
        key = hex_id("key", request.match_info["key"])
        wait_ms = number("wait_ms", request.query.get("wait_ms", "0"), 0, MAX_WAIT_MS)
        only = request.query.get("part", "object")
        if only not in ("object", "payload"):
            raise BadRequest("part is object or payload")
        lent = await self._blocks.lend(principal, namespace, group, [key], wait_ms / 1e3)
        if not lent.blocks:
            raise web.HTTPNotFound(text="not stored here")
        return await self._send(request, lent, namespace.layouts[group].header_bytes if only == "payload" else 0)

    async def _get_run(self, request: web.Request) -> web.StreamResponse:
        table = await read_table(request, frozenset({"keys", "group", "wait_ms"}))
        principal, namespace, group = self._named(request, table)
        wait_ms = number("wait_ms", table.get("wait_ms", 0), 0, MAX_WAIT_MS)
        lent = await self._blocks.lend(principal, namespace, group, keys_of(table), wait_ms / 1e3)
        return await self._send(request, lent, 0)

    async def _send(self, request: web.Request, lent: Lent, start: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Forebay-Blocks": str(lent.blocks), "Forebay-Loaded": str(lent.loaded)})
        response.content_type = OCTETS
        response.content_length = lent.blocks * (lent.object_bytes - start)
        transport = request.transport
        try:
            await response.prepare(request)
            if lent.blocks and transport is not None:
                transport.set_write_buffer_limits(high=0)  # so that a write ends when its bytes are gone
                await response.write(b"")  # the head by itself: aiohttp would join it with the payload, a copy
                for view in lent:
                    for at in range(start, len(view), _PIECE):
                        async with asyncio.timeout(READ_S):
                            await response.write(view[at : at + _PIECE])
            async with asyncio.timeout(READ_S):
                await response.write_eof()
        except TimeoutError:
            # A peer that reads nothing keeps objects from eviction. There is no way to say so in the middle of a body.
            if transport is not None:
                transport.abort()
        finally:
            lent.close()
        return response

    # --- put ----------------------------------------------------------------------------------------------------------

    async def _put(self, request: web.Request) -> web.Response:
        need_type(request, OCTETS)
        principal, namespace, group = self._named(request)
        key = hex_id("key", request.match_info["key"])
        status = await self._put_object(request, Body(request.content), principal, namespace, group, key)
        if status is None:
            raise BadRequest("the body is empty")
        http = {SlotStatus.WRITABLE: 201, SlotStatus.PRESENT: 200, SlotStatus.PENDING: 409, SlotStatus.REFUSED: 507}
        return answer(request, {"key": key, "status": _name(status)}, status=http[status])

    async def _put_run(self, request: web.Request) -> web.Response:
        need_type(request, OCTETS)
        principal, namespace, group = self._named(request)
        body = Body(request.content)
        counts = dict.fromkeys((_name(status) for status in SlotStatus), 0)
        for _ in range(MAX_OBJECTS):
            status = await self._put_object(request, body, principal, namespace, group, None)
            if status is None:
                return answer(request, counts)
            counts[_name(status)] += 1
        raise BadRequest(f"at most {MAX_OBJECTS} objects in one request; those before were stored")

    async def _put_object(
        self,
        request: web.Request,
        body: Body,
        principal: Principal,
        namespace: Namespace,
        group: int,
        key: bytes | None,
    ) -> SlotStatus | None:
        """Take one whole object from the body. None: the body has ended."""
        layout = namespace.layouts[group]
        raw = bytearray(layout.header_bytes)
        got = await body.fill(memoryview(raw))
        if not got:
            return None
        if got < len(raw):
            raise BadRequest(f"the body ends inside a header: objects here have {layout.object_bytes} bytes")
        try:
            header = layout.read_header(raw)
        except ValueError as exc:
            raise BadRequest(str(exc)) from exc
        if key is not None and key != header.key:
            raise BadRequest("the object's header names another key than the path")
        extras = hex_bytes("extras", request.query.get("extras", ""))
        check_header(namespace.facts, namespace.id, header, extras=extras)
        return await self._receive(body, principal, namespace, group, header, raw)

    async def _receive(
        self,
        body: Body,
        principal: Principal,
        namespace: Namespace,
        group: int,
        header: Header,
        raw: bytearray | None,
    ) -> SlotStatus:
        """Take a payload into the place of the object that `header` names, and show it.

        raw: the header as it came; None makes it from the payload's checksums.
        """
        layout = namespace.layouts[group]
        async with self._blocks.in_turn(principal, layout.object_bytes):
            await self._blocks.make_room(principal, namespace, group, 1)
            with self._blocks.place(principal, namespace, group, header.key, header.parent) as place:
                if isinstance(place, SlotStatus):
                    if await body.skip(layout.payload_bytes) < layout.payload_bytes:
                        raise BadRequest("the body ends inside a payload")
                    return place
                payload = place.view[layout.header_bytes :]
                try:
                    if await body.fill(payload) < layout.payload_bytes:
                        raise BadRequest(f"the body ends inside a payload: they have {layout.payload_bytes} bytes here")
                    if raw is None:
                        await _make_header(layout, place.view, payload, header)
                    else:
                        place.view[: layout.header_bytes] = raw
                finally:
                    payload.release()
                await self._blocks.commit(principal, namespace, place, header, seen=raw is None)
        return SlotStatus.WRITABLE

    async def _put_blocks(self, request: web.Request) -> web.Response:
        """Blocks as token ids and payload, one after the other; keys, checksums and headers are made here."""
        need_type(request, OCTETS)
        principal, namespace, group = self._named(request)
        facts = namespace.facts
        start = whole("start_block", request.query.get("start_block", "0"), 0, 1 << 32)
        given = request.query.get("parent")
        if (start == 0) != (given is None):
            raise BadRequest(
                "give parent, the key of the block before, together with start_block, and neither at the root"
            )
        parent = namespace.id if given is None else hex_id("parent", given)
        body, words = Body(request.content), bytearray(4 * facts.block_tokens)
        counts = dict.fromkeys((_name(status) for status in SlotStatus), 0)
        keys: list[bytes] = []
        while (got := await body.fill(memoryview(words))) == len(words):
            tokens = np.frombuffer(bytes(words), "<u4")
            (key,) = block_keys(namespace.id, tokens, facts.block_tokens, algorithm=facts.hash_algorithm, parent=parent)
            header = Header(
                group=group,
                key=key,
                parent=parent,
                namespace=namespace.id,
                position=(start + len(keys)) * facts.block_tokens,
                created_ns=time.time_ns(),
                encryption_key_id=0,
                header_xxh3=0,
                token_ids=tuple(tokens.tolist()),
                checksums=(),
            )
            status = await self._receive(body, principal, namespace, group, header, None)
            counts[_name(status)] += 1
            keys.append(key)
            parent = key
            if len(keys) > MAX_OBJECTS:
                raise BadRequest(f"at most {MAX_OBJECTS} blocks in one request; those before were stored")
        if got:
            raise BadRequest(f"the body ends inside a block's {facts.block_tokens} token ids of 4 bytes each")
        return answer(request, {**counts, "keys": keys})

    # --- delete -------------------------------------------------------------------------------------------------------

    async def _delete_one(self, request: web.Request) -> web.Response:
        principal, namespace, group = self._named(request)
        key = hex_id("key", request.match_info["key"])
        return answer(request, {"deleted": await self._blocks.delete(principal, namespace, group, [key])})

    async def _delete(self, request: web.Request) -> web.Response:
        table = await read_table(request, frozenset({"keys", "group"}))
        principal, namespace, group = self._named(request, table)
        return answer(request, {"deleted": await self._blocks.delete(principal, namespace, group, keys_of(table))})

    async def _pin(self, request: web.Request) -> web.Response:
        table = await read_table(request, _TIMED)
        principal, namespace, group = self._named(request, table)
        seconds = number("seconds", table.get("seconds"), 0, MAX_SECONDS)
        return answer(request, {"pinned": self._blocks.pin(principal, namespace, group, keys_of(table), seconds)})

    async def _expire(self, request: web.Request) -> web.Response:
        table = await read_table(request, _TIMED)
        principal, namespace, group = self._named(request, table)
        seconds = number("seconds", table.get("seconds"), 0, MAX_SECONDS)
        expiring = await self._blocks.expire(principal, namespace, group, keys_of(table), seconds)
        return answer(request, {"expiring": expiring})

    async def _purge(self, request: web.Request) -> web.Response:
        table = await read_table(request, frozenset({"namespaces", "older_than_s", "tenant"}))
        given, tenant = table.get("namespaces", []), table.get("tenant", "")
        if not isinstance(given, list) or not isinstance(tenant, str):
            raise BadRequest("namespaces is a list of 32 hex digits each, tenant is text")
        age_s = number("older_than_s", table.get("older_than_s", 0), 0, 1e9)
        done = await self._blocks.purge(caller(), [hex_id("a namespace", each) for each in given], age_s, tenant)
        return answer(request, {"objects": done.objects, "unlisted": list(done.unlisted)})


def _name(status: SlotStatus) -> str:
    return "stored" if status is SlotStatus.WRITABLE else _STATUS_NAMES[status]


async def _make_header(layout: ObjectLayout, view: memoryview, payload: memoryview, header: Header) -> None:
    if payload.nbytes < 2 << 20:
        checksums = layout.part_checksums(payload)
    else:
        checksums = await asyncio.to_thread(layout.part_checksums, payload)
    layout.write_header(
        view,
        key=header.key,
        parent=header.parent,
        namespace=header.namespace,
        position=header.position,
        token_ids=header.token_ids,
        checksums=checksums,
        created_ns=header.created_ns,
    )
