"""The HTTP door: blocks by value for other languages and curl; health, metrics, stats and explain for operators.

Covers listening, bounds, and the operators' routes. Blocks are in server/http_blocks.py, who may do what in http_routes.py.
Always true: without a credentials table only this machine is served; every error is JSON; a failing handler fails one request,
never the daemon.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from forebay.server import metrics
from forebay.server.auth import ADMIN, READ, Access
from forebay.server.blocks import Blocks
from forebay.server.http_blocks import BlockRoutes
from forebay.server.http_bodies import hex_id, json_response
from forebay.server.http_routes import Route, admission, caller, json_errors

_peers = logging.getLogger("forebay.http.peers")  # what aiohttp has to say; its own logger no one set up

MAX_EXPLAIN_KEYS = 1024
MAX_CONNECTIONS = 64  # at a time
MAX_LINE_BYTES = (
    64 * 1024
)  # holds MAX_EXPLAIN_KEYS keys; aiohttp's 8190 would refuse them before a handler could say why
EXPLAIN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
READ_BUFFER_BYTES = 1 << 20


class DaemonView(metrics.MetricsSource, Protocol):
    """What this door asks of the daemon."""

    access: Access

    async def explain(self, namespace_hex: str, key_hexes: list[str], tenant: str | None) -> list[dict[str, Any]]:
        """For each key, where it is or why it isn't, as far as `tenant` (None: every one) has the namespace.

        Raises: ProtocolError, ValueError.
        """


class HttpDoor:
    """Serves a DaemonView until stopped. `blocks`: its objects; None serves the operators' routes only."""

    def __init__(
        self, daemon: DaemonView, *, host: str = "127.0.0.1", port: int = 0, blocks: Blocks | None = None
    ) -> None:
        self._daemon = daemon
        self._metrics = metrics.Metrics(daemon)
        self._host, self._port = host, port
        self._blocks = blocks
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    def routes(self) -> tuple[Route, ...]:
        """Every route of this door."""
        own: tuple[Route, ...] = (
            Route("GET", "/healthz", None, self._healthz),
            Route("GET", "/readyz", None, self._readyz),
            Route("GET", "/metrics", ADMIN, self._metrics_text, operator=True),
            Route("GET", "/v1/stats", ADMIN, self._stats, operator=True),
            Route("GET", "/v1/explain", READ | ADMIN, self._explain),
        )
        return own + (BlockRoutes(self._blocks).routes() if self._blocks is not None else ())

    async def start(self) -> None:
        """Bind and serve. Raises: OSError, that says what to do, when the address cannot be had."""
        routes = {(route.method, route.path): route for route in self.routes()}
        app = web.Application(
            middlewares=[json_errors, admission(routes, self._daemon.access)], client_max_size=MAX_LINE_BYTES
        )
        for route in routes.values():
            # A HEAD of payload would have to be told apart in the handler, and `match` answers that question anyway.
            if route.method == "GET" and "{" not in route.path:
                app.router.add_get(route.path, route.handler)
            else:
                app.router.add_route(route.method, route.path, route.handler)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_peers,
            handle_signals=False,
            shutdown_timeout=CLOSE_TIMEOUT_S,
            max_line_size=MAX_LINE_BYTES,
            read_bufsize=READ_BUFFER_BYTES,
            lingering_time=CLOSE_TIMEOUT_S,
            handler_cancellation=True,  # whoever is gone needs no lease and no place
        )
        await runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                functools.partial(_protocol, runner), self._host, self._port, backlog=MAX_CONNECTIONS
            )
        except OSError as exc:
            await runner.cleanup()
            advice = "choose another with --http-port, 0 for any free one, or off"
            raise OSError(exc.errno, f"the HTTP door cannot listen on {self.url}: {advice}") from exc
        self._runner = runner
        self._port = self._server.sockets[0].getsockname()[1]  # the one the system chose, when asked for 0

    async def stop(self) -> None:
        """Stop listening and end open connections. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @property
    def port(self) -> int:
        """The port it listens on; before `start`, the one asked for."""
        return self._port

    @property
    def url(self) -> str:
        """Where the door listens, such as http://127.0.0.1:7090."""
        return f"http://[{self._host}]:{self._port}" if ":" in self._host else f"http://{self._host}:{self._port}"

    async def _healthz(self, _: web.Request) -> web.Response:
        health = self._daemon.health()
        return json_response(health, status=200 if health["ok"] else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        health = self._daemon.health()
        return json_response(health, status=200 if health["ready"] else 503)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _stats(self, _: web.Request) -> web.Response:
        return json_response(self._daemon.stats())

    async def _explain(self, request: web.Request) -> web.Response:
        if unknown := request.query.keys() - {"namespace", "keys"}:
            raise ValueError(f"unknown parameter {min(unknown)!r}: give namespace and keys")
        namespace = hex_id("namespace", request.query.get("namespace", "")).hex()
        keys = [hex_id("keys", key).hex() for key in request.query.get("keys", "").split(",")]
        if len(keys) > MAX_EXPLAIN_KEYS:
            raise ValueError(f"{len(keys)} keys in one request: ask for at most {MAX_EXPLAIN_KEYS}")
        principal = caller()
        async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
            found = await self._daemon.explain(namespace, keys, None if principal.operator else principal.tenant)
        return json_response({"namespace": namespace, "objects": found})


def _no_fault_of_ours(record: logging.LogRecord) -> bool:
    """A logging filter: bytes that are no HTTP are answered with 400 and are no event; aiohttp would log them, too."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


_peers.addFilter(_no_fault_of_ours)


def _protocol(runner: web.AppRunner) -> asyncio.Protocol:
    """For a new connection. Anyone on the machine may come, and each takes a descriptor that engines need: the oldest goes."""
    server = runner.server
    assert server is not None
    connected = [each for each in server.connections if each.transport is not None]
    if len(connected) >= MAX_CONNECTIONS:
        connected[0].force_close()
    return server()
