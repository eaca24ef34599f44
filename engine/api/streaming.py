"""Server-sent events: an answer while it is being made.

Always true: nothing is sent before there is something to say, so that what fails at once still fails with its status; a
silence is filled with comments, so that no proxy takes it for a dead connection; a reader who doesn't read is given up.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
from aiohttp import web

from forebay.engine.api.errors import ApiError

KEEP_ALIVE_S = 15.0
WRITE_S = 60.0  # the longest that a client may leave its receive buffer full

_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
    "X-Content-Type-Options": "nosniff",
}


class EventStream:
    """The response to one request. Several tasks may send."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._lock = asyncio.Lock()
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: object) -> None:
        """Raises: ConnectionError, TimeoutError: nobody reads any more."""
        await self._write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def end(self, error: ApiError | None = None) -> None:
        if error is not None:
            await self.send(error.body())
        await self._write(b"data: [DONE]\n\n")
        await self.response.write_eof()

    async def keep_alive(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await self._write(b": still working\n\n")

    async def _write(self, data: bytes) -> None:
        async with self._lock, asyncio.timeout(WRITE_S):
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)
