"""Payload over TCP: what reading and writing are where no memory is shared.

Covers batches cut into requests that follow each other without a wait, and leases that are copies. Which keys, tokens and
buffers is clients/namespace.py's. Always true: what comes from the network counts only when header, tokens and every part's
checksum are right; at most a few requests' payload is under way; an operation that fails or is given up closes its connection,
and the daemon gives back what was under way on it.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forebay.clients.lease import Lease
from forebay.clients.pieces import growing_pieces
from forebay.clients.results import PutResult, TierRun, tally
from forebay.clients.session import ClientCore, Lane, Op, Sent
from forebay.clients.transport import Pending
from forebay.clients.writing import Run
from forebay.kvstore import wire
from forebay.kvstore.errors import DaemonUnavailable
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.payload import Arriving, Place, Views, framed, framed_bytes
from forebay.kvstore.tier import Buffer
from forebay.kvstore.wire import LOCATION_DTYPE, SlotStatus

if TYPE_CHECKING:
    from forebay.clients.namespace import NamespaceCore

_REQUEST_BYTES: Final = 32 << 20  # of objects in one request
_FIRST_REQUEST_BYTES: Final = 4 << 20  # so that payload is under way soon
_REQUEST_OBJECTS: Final = 1024
_UNDER_WAY: Final = 3  # requests at a time
# A put of so much is sent without asking first what is there already: one round trip instead of two.
_AT_ONCE_BYTES: Final = 256 << 10


class Fetched(NamedTuple):
    """Leading blocks that came whole and right, their headers, and those of them that were loaded from below RAM."""

    blocks: int
    headers: bytearray
    loaded: list[TierRun]


def fetch(
    space: NamespaceCore,
    keys: Sequence[bytes],
    targets: Sequence[memoryview],
    words: npt.NDArray[np.uint32] | None,
    group: int,
    wait_s: float,
    deadline_s: float,
) -> Op[Fetched]:
    """Get payloads of the leading run into `targets`, byte views of layout.payload_bytes each.

    Bytes of targets past the run are undefined.
    """
    layout = space.layout(group)
    size, stride = layout.header_bytes, 4 * layout.block_tokens
    headers = bytearray(len(keys) * size)
    tokens = words[: len(keys) * layout.block_tokens].tobytes() if words is not None else None
    wait_until_s = time.monotonic() + wait_s
    requests = _requests(len(keys), layout.object_bytes)
    header_views = memoryview(headers)

    def ask(lane: Lane, start: int, end: int) -> Pending:
        places = [
            Place(
                header_views[i * size : (i + 1) * size],
                targets[i],
                keys[i],
                tokens=tokens[i * stride : (i + 1) * stride] if tokens is not None else None,
            )
            for i in range(start, end)
        ]

        def expects(reply: wire.GetReply) -> Arriving:
            if not 0 <= reply.count <= end - start or reply.object_bytes != layout.object_bytes:
                raise DaemonUnavailable("the daemon's answer to get doesn't fit the request")
            return Arriving(layout, space.id, places[: reply.count])

        wait_ms = int(1e3 * max(0.0, wait_until_s - time.monotonic()))
        request = wire.Get(lane.handles[space.id], group, b"".join(keys[start:end]), wait_ms)
        return lane.transport.start(request, deadline_s, expects=expects)

    blocks = 0
    loaded: list[TierRun] = []
    began_s = time.perf_counter()
    lane = yield from _lane(space, deadline_s)
    clean = False
    try:
        asked: list[Pending] = []
        whole = True
        for number, (start, end) in enumerate(requests):
            while whole and len(asked) < min(number + _UNDER_WAY, len(requests)):
                asked.append(ask(lane, *requests[len(asked)]))
            if number == len(asked):
                break
            reply: wire.GetReply = yield Sent(lane.transport, asked[number], deadline_s)
            arriving = asked[number].arriving
            assert arriving is not None
            if whole:
                blocks += arriving.good
                loaded += [TierRun(tier, count) for tier, count in reply.loaded]
                whole = arriving.good == end - start
                _count_trouble(space.core, arriving, reply.count)
        clean = True
    finally:
        space.core.give_lane(lane, clean=clean)
    if not loaded:  # else this was a tier's time, too
        space.core.network.moved(blocks * layout.object_bytes, time.perf_counter() - began_s)
    return Fetched(blocks, headers, _first(loaded, blocks))


def _count_trouble(core: ClientCore, arriving: Arriving, count: int) -> None:
    if arriving.trouble is not None:
        in_payload = arriving.trouble.startswith("part")
        core.counters["corrupt" if in_payload else "doubted"] += 1 if in_payload else count - arriving.good


def _first(loaded: Sequence[TierRun], blocks: int) -> list[TierRun]:
    """Runs by tier, without what lies past the leading `blocks`."""
    spare = max(0, sum(run.blocks for run in loaded) - blocks)
    found = list(loaded)
    while spare and found:
        last = found.pop()
        if last.blocks > spare:
            found.append(TierRun(last.tier, last.blocks - spare))
        spare -= min(spare, last.blocks)
    return found


def store(space: NamespaceCore, run: Run, payloads: Sequence[Buffer], group: int, deadline_s: float) -> Op[PutResult]:
    """Send a run of blocks. Of a long one first what is there already is asked, and only the rest is sent."""
    size = run.layout.object_bytes
    lane = yield from _lane(space, deadline_s)
    clean = False
    try:
        if len(run.keys) * size <= _AT_ONCE_BYTES:
            result = yield from _put(space, lane, run, payloads, group, deadline_s)
        else:
            result = yield from _fill(space, lane, run, payloads, group, deadline_s)
        clean = True
        return result
    finally:
        space.core.give_lane(lane, clean=clean)


def _put(
    space: NamespaceCore, lane: Lane, run: Run, payloads: Sequence[Buffer], group: int, deadline_s: float
) -> Op[PutResult]:
    count = len(run.keys)
    request = wire.Put(
        lane.handles[space.id], group, b"".join(run.keys), count * run.layout.object_bytes, run.parent or b""
    )
    pending = lane.transport.start(request, deadline_s, payload=_payload(run, payloads, range(count)))
    reply: wire.PutReply = yield Sent(lane.transport, pending, deadline_s)
    return tally(reply.statuses, reply.count)


def _fill(
    space: NamespaceCore, lane: Lane, run: Run, payloads: Sequence[Buffer], group: int, deadline_s: float
) -> Op[PutResult]:
    requests = _requests(len(run.keys), run.layout.object_bytes)
    asked: list[Pending] = []
    fills: list[Pending] = []
    statuses = b""
    stored = 0
    for number, (start, end) in enumerate(requests):
        # The next requests' places are asked for before this one's payload goes: making room costs no waiting.
        while len(asked) < min(number + _UNDER_WAY, len(requests)):
            part = run.part(*requests[len(asked)])
            ask = wire.Allocate(lane.handles[space.id], group, b"".join(part.keys), part.parent or b"")
            asked.append(lane.transport.start(ask, deadline_s))
        reply: wire.AllocateReply = yield Sent(lane.transport, asked[number], deadline_s)
        statuses += reply.statuses
        if reply.allocation:
            writable = [i for i, status in enumerate(reply.statuses) if status == SlotStatus.WRITABLE]
            request = wire.Fill(reply.allocation, len(writable) * run.layout.object_bytes)
            payload = _payload(run.part(start, end), payloads[start:end], writable)
            fills.append(lane.transport.start(request, deadline_s, payload=payload))
        while len(fills) >= _UNDER_WAY:
            stored += yield from _stored(lane, fills.pop(0), deadline_s)
    for pending in fills:
        stored += yield from _stored(lane, pending, deadline_s)
    return tally(statuses, stored)


def _stored(lane: Lane, fill: Pending, deadline_s: float) -> Op[int]:
    done: wire.Done = yield Sent(lane.transport, fill, deadline_s)
    return done.count


def _payload(run: Run, payloads: Sequence[Buffer], positions: Sequence[int]) -> Any:
    """The objects at these positions of a run: each is checksummed just before it goes, so that its bytes are read once."""

    def make(request_id: int) -> Views:
        size, count = run.layout.object_bytes, len(positions)
        return Views(framed(request_id, size, count, _objects(run, payloads, positions)), framed_bytes(size, count))

    return make


def _objects(run: Run, payloads: Sequence[Buffer], positions: Sequence[int]) -> Iterator[tuple[memoryview, memoryview]]:
    created_ns = time.time_ns()
    for i in positions:
        header = bytearray(run.layout.header_bytes)
        payload = memoryview(payloads[i]).cast("B")
        run.header_into(header, i, run.layout.part_checksums(payload), created_ns)
        yield memoryview(header), payload


def _lane(space: NamespaceCore, deadline_s: float) -> Op[Lane]:
    """A connection on which the namespace is open."""
    life = yield from space.core.live(deadline_s)  # says at once that there is no daemon, as every other call does
    try:
        lane = yield from space.core.take_lane(deadline_s)
    except DaemonUnavailable:
        life.transport.close()  # nobody answers there any more, though this connection may not have noticed
        raise
    try:
        if space.id not in lane.handles:
            request = wire.Open(space.facts.encode())
            reply: wire.OpenReply = yield Sent(lane.transport, lane.transport.start(request, deadline_s), deadline_s)
            space.check_id(reply)
            lane.handles[space.id] = reply.handle
    except BaseException:
        space.core.give_lane(lane, clean=False)
        raise
    return lane


def _requests(count: int, object_bytes: int) -> list[tuple[int, int]]:
    return growing_pieces(
        count,
        object_bytes,
        first_bytes=_FIRST_REQUEST_BYTES,
        most_bytes=_REQUEST_BYTES,
        most_objects=_REQUEST_OBJECTS,
    )


class CopiedLease(Lease):
    """Leading blocks of a run as this client's own copy: verified when they came, and nobody else's to change."""

    def __init__(self, core: ClientCore, layout: ObjectLayout, fetched: Fetched, memory: mmap.mmap | None) -> None:
        super().__init__(core, None, 0, np.zeros(fetched.blocks, LOCATION_DTYPE), layout, fetched.loaded)
        self._headers = fetched.headers
        self._memory = memory

    @property
    def views(self) -> list[memoryview]:
        """Payload of each block, read-only. Raises: ValueError after `release`."""
        if self._views is None:
            if self._memory is None:
                if len(self.places):
                    raise ValueError("this lease was released")
                return []
            size = self._layout.payload_bytes
            whole = memoryview(self._memory).toreadonly()
            self._views = [whole[i * size : (i + 1) * size] for i in range(len(self))]
        return self._views

    def valid(self) -> bool:
        """Whether the blocks can be read: nobody takes this client's own copy."""
        return self._memory is not None or not len(self)

    def checksums(self) -> list[list[int]]:
        layout = self._layout
        rows = np.frombuffer(self._headers, np.uint8).reshape(-1, layout.header_bytes)[: len(self)]
        where = slice(layout.checksums_offset, layout.checksums_offset + 8 * len(layout.part_bytes))
        found: list[list[int]] = np.ascontiguousarray(rows[:, where]).view("<u8").tolist()
        return found

    def release(self) -> None:
        """Drop the copy. Idempotent. Raises: BufferError: something still uses a view's buffer."""
        for view in self._views or ():
            view.release()
        self._views = None
        memory, self._memory = self._memory, None
        if memory is not None:
            self._core.spare.give(memory)


def lease(
    space: NamespaceCore,
    keys: Sequence[bytes],
    words: npt.NDArray[np.uint32] | None,
    group: int,
    wait_s: float,
    deadline_s: float,
) -> Op[Lease]:
    """Get the leading run into memory of this client."""
    layout, spare = space.layout(group), space.core.spare
    size = layout.payload_bytes
    memory = spare.take(len(keys) * size)
    whole = memoryview(memory)
    targets = [whole[i * size : (i + 1) * size] for i in range(len(keys))]
    fetched = yield from fetch(space, keys, targets, words, group, wait_s, deadline_s)
    if not fetched.blocks:
        spare.give(memory)
        return CopiedLease(space.core, layout, fetched, None)
    return CopiedLease(space.core, layout, fetched, memory)
