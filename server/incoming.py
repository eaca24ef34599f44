"""Payload on its way in: between the request that announced it and the memory that was found for it.

Always true: exactly the announced bytes are taken from the stream, into places given by `accept`, or nowhere after `refuse`;
once refused or cut, no place is written any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from forebay.kvstore.payload import Arriving, Sink, Views, skipped


class Incoming:
    """The payload of one request. A `Sink`. Event loop only."""

    def __init__(self, request_id: int, size_bytes: int, resume: Callable[[], None]) -> None:
        """`resume`: called when it becomes known where the bytes go. Until then none may be read."""
        self.request_id = request_id
        self.left = size_bytes
        self._resume = resume
        self._sink: Sink | None = None
        self._whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ready(self) -> bool:
        """Whether it is known where the bytes go."""
        return self._sink is not None

    async def accept(self, objects: Arriving) -> None:
        """Have the bytes put there, and wait until all have come. Cancelled when the connection ends.

        Raises: ValueError: another number of bytes was announced.
        """
        if objects.left != self.left:
            raise ValueError(f"{self.left} bytes of payload were announced, these objects have {objects.left}")
        self._point_to(objects)
        await self._whole

    def refuse(self) -> None:
        """Drop what is still to come."""
        if self.left:
            self._point_to(Views(skipped(self.left), self.left))

    def cut(self) -> None:
        """The connection has ended: nothing more will come."""
        self._whole.cancel()

    def _point_to(self, sink: Sink) -> None:
        self._sink = sink
        self._resume()

    def window(self, limit: int) -> list[memoryview]:
        assert self._sink is not None
        return self._sink.window(limit)

    def advance(self, count: int) -> None:
        assert self._sink is not None
        self._sink.advance(count)
        self.left -= count
        if not self.left and not self._whole.done():
            self._whole.set_result(None)
