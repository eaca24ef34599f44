"""The HTTP part of `forebay bench net`: the daemon's HTTP door beside a bare aiohttp server that moves the same bytes.

Both are other processes on uvloop, both are asked with the standard library's client in the same batches of the same object
size, and whoever receives verifies each object with the same hash.
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from forebay.bench_local import Buffers

_PIECE = 1 << 20
_digest = xxhash.xxh3_64_intdigest


def _serve_bare(port: Any, size: int, range_bytes: int) -> None:
    """The serving process: GET sends a range of memory, PUT fills one, each object hashed where it is received."""
    import uvloop
    from aiohttp import web

    buffers = Buffers(range_bytes)

    async def get(request: web.Request) -> web.StreamResponse:
        start, count = int(request.query["start"]), int(request.query["count"])
        response = web.StreamResponse()
        response.content_length = count * size
        await response.prepare(request)
        for at in range(start, start + count * size, size):
            await response.write(buffers.view[at : at + size])
        await response.write_eof()
        return response

    async def put(request: web.Request) -> web.Response:
        at = first = int(request.query["start"])
        async for chunk in request.content.iter_any():
            buffers.target_view[at : at + len(chunk)] = chunk
            at += len(chunk)
            while at - first >= size:
                _digest(buffers.target_view[first : first + size])
                first += size
        return web.Response(text="done")

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 40)
        app.add_routes([web.get("/", get, allow_head=False), web.put("/", put)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(runner.addresses[0][1])
        while not port.poll(0):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        await runner.cleanup()

    uvloop.run(serve())


@contextmanager
def bare_http(buffers: Buffers, size: int) -> Iterator[tuple[Callable[[int, int], float], Callable[[int, int], float]]]:
    """Seconds of a get and of a put of `count` objects from byte `start` on, through a bare aiohttp server."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_bare, args=(there, size, buffers.size), daemon=True)
    process.start()
    connection = http.client.HTTPConnection("127.0.0.1", here.recv(), timeout=60)
    digests = [_digest(buffers.view[at : at + size]) for at in range(0, size, size)]

    def get_s(start: int, count: int) -> float:
        began_s = time.perf_counter()
        connection.request("GET", f"/?start={start}&count={count}")
        response = connection.getresponse()
        for at in range(start, start + count * size, size):
            target, done = buffers.target_view[at : at + size], 0
            while done < size:
                got = response.readinto(target[done : done + _PIECE])
                if not got:
                    raise RuntimeError("the bare server's answer ended early")
                done += got
            digests[0] = _digest(target)
        response.read()
        return time.perf_counter() - began_s

    def put_s(start: int, count: int) -> float:
        began_s = time.perf_counter()
        connection.putrequest("PUT", f"/?start={start}", skip_accept_encoding=True)
        connection.putheader("Content-Length", str(count * size))
        connection.endheaders()
        for at in range(start, start + count * size, size):
            digests[0] = _digest(buffers.view[at : at + size])
            connection.send(buffers.view[at : at + size])
        connection.getresponse().read()
        return time.perf_counter() - began_s

    try:
        yield get_s, put_s
    finally:
        connection.close()
        here.send("stop")
        process.join(10)
