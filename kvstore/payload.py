"""Payload frames: objects that travel inline, straight from memory to the socket and from the socket to memory.

Covers queues of views that are sent or filled piece by piece, and the check of objects while their bytes arrive and are still
warm. Knows no sockets. Always true: a piece is small enough that no event loop is held for long, and an object counts as good
only when its header is the expected one and every part has the checksum that the header gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import xxhash

from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.tier import WritableBuffer
from forebay.kvstore.wire import HEADER, PROTOCOL_VERSION, Kind

PIECE_BYTES: Final = 1 << 20  # in one system call: [M] 0.2 to 0.5 ms on loopback
FRAME_BYTES: Final = 8 << 20  # of whole objects in one frame; a larger object has a frame of its own
_MAX_VIEWS: Final = 256  # in one system call, of the 1,024 that Linux takes
_digest = xxhash.xxh3_64_intdigest
_scratch: Final = memoryview(bytearray(256 << 10))


class Sink(Protocol):
    """Takes the bytes of payload frames, in order."""

    def window(self, limit: int) -> list[memoryview]:
        """Where the next bytes go: at most `limit` of them, at least one."""

    def advance(self, count: int) -> None:
        """So many bytes of the window have been filled."""


class Views:
    """A queue of views that is sent, or filled, from its front. `views` is drawn from as they are needed."""

    def __init__(self, views: Iterable[memoryview], size_bytes: int, ended: Callable[[], None] | None = None) -> None:
        """`size_bytes`: of all views together. `ended` is called once, by `close`."""
        self._source = iter(views)
        self._front: deque[memoryview] = deque()
        self._front_bytes = 0
        self._ended = ended
        self.left = size_bytes

    def window(self, limit: int) -> list[memoryview]:
        """The next views: at most `limit` bytes, at least one unless nothing is left."""
        front = self._front
        while self._front_bytes < limit and len(front) < _MAX_VIEWS:
            view = next(self._source, None)
            if view is None:
                break
            if view.nbytes:
                front.append(view)
                self._front_bytes += view.nbytes
        if self._front_bytes <= limit:
            return list(front)
        found: list[memoryview] = []
        for view in front:
            if view.nbytes >= limit:
                found.append(view[:limit])
                break
            found.append(view)
            limit -= view.nbytes
        return found

    def advance(self, count: int) -> None:
        """So many bytes of the last window are done."""
        self.left -= count
        self._front_bytes -= count
        front = self._front
        while count:
            head = front[0]
            if count < head.nbytes:
                front[0] = head[count:]
                return
            count -= head.nbytes
            front.popleft()

    def close(self) -> None:
        """No byte of the views is touched any more. Idempotent."""
        self._front.clear()
        self._source = iter(())
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


def skipped(size_bytes: int) -> Iterator[memoryview]:
    """Views for `size_bytes` that nobody wants."""
    while size_bytes > 0:
        yield _scratch[:size_bytes]
        size_bytes -= len(_scratch)


def framed(
    request_id: int, object_bytes: int, count: int, objects: Iterator[Sequence[memoryview]]
) -> Iterator[memoryview]:
    """Views of payload frames that carry `count` objects, each given as views of `object_bytes` together."""
    a_frame = max(1, FRAME_BYTES // object_bytes)
    for start in range(0, count, a_frame):
        here = min(a_frame, count - start)
        yield memoryview(HEADER.pack(here * object_bytes, PROTOCOL_VERSION, Kind.PAYLOAD, 0, request_id))
        for _ in range(here):
            yield from next(objects)


def framed_bytes(object_bytes: int, count: int) -> int:
    """Bytes of what `framed` gives."""
    frames = -(-count // max(1, FRAME_BYTES // object_bytes))
    return frames * HEADER.size + count * object_bytes


class Place(NamedTuple):
    """Where an arriving object goes, and what its header must say. `parent` and `tokens` are compared where given."""

    header: WritableBuffer
    payload: memoryview
    key: bytes
    parent: bytes | None = None
    tokens: bytes | None = None


class Arriving:
    """Objects of one layout that arrive one after the other, checked as they come. A `Sink`.

    `places`: one an object, None where its bytes are dropped. `good`: leading objects that are whole and right (dropped ones
    count); `trouble`: what is wrong with the next one, if anything is.
    """

    def __init__(self, layout: ObjectLayout, namespace: bytes, places: Sequence[Place | None]) -> None:
        self._layout = layout
        self._namespace = namespace
        self._places = places
        self._views = Views(self._draw(), len(places) * layout.object_bytes)
        self._object = self._at = self._part = 0
        self._hasher: Any = None
        self._checksums: Sequence[int] = ()
        self.good = 0
        self.trouble: str | None = None

    def _draw(self) -> Iterator[memoryview]:
        for place in self._places:
            if place is None:
                yield from skipped(self._layout.object_bytes)
            else:
                yield memoryview(place.header)
                yield place.payload

    @property
    def left(self) -> int:
        """Bytes that are still to come."""
        return self._views.left

    def window(self, limit: int) -> list[memoryview]:
        return self._views.window(limit)

    def advance(self, count: int) -> None:
        self._views.advance(count)
        size, layout = self._layout.object_bytes, self._layout
        while count:
            place = self._places[self._object]
            if place is None or self.trouble is not None:
                step = min(count, size - self._at)
            elif self._at < layout.header_bytes:
                step = min(count, layout.header_bytes - self._at)
                if self._at + step == layout.header_bytes:
                    self.trouble, self._checksums = layout.check_header(
                        place.header,
                        key=place.key,
                        namespace=self._namespace,
                        parent=place.parent,
                        token_ids=place.tokens,
                    )
            else:
                step = self._check_part(place.payload, count)
            count -= step
            self._at += step
            if self._at == size:
                self.good += self.trouble is None
                self._object, self._at, self._part = self._object + 1, 0, 0

    def _check_part(self, payload: memoryview, count: int) -> int:
        """Take what has come of the part that bytes arrive for now. Returns how many bytes that is."""
        start, end = self._layout.part_ranges[self._part]
        at = self._at - self._layout.header_bytes
        step = min(count, end - at)
        if step == end - start:
            found = _digest(payload[start:end])
        else:
            if self._hasher is None:
                self._hasher = xxhash.xxh3_64()
            self._hasher.update(payload[at : at + step])
            if at + step < end:
                return step
            found, self._hasher = self._hasher.intdigest(), None
        if found != self._checksums[self._part]:
            self.trouble = f"part {self._part} checksum"
        self._part += 1
        return step
