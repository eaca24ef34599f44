"""The HTTP door: health, metrics, stats and explain for operators and curl. Loopback only, since it asks no token.

Covers routes, bounds and JSON errors; the answers are the daemon's. No payload passes here. Always true: every answer,
also an error, is JSON of the form its route names, and a failing handler fails one request, never the daemon.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
from aiohttp import web

from forebay.kvstore.errors import Draining, ProtocolError, RequestTimeout, UnknownHandle
from forebay.server import metrics

log = logging.getLogger(__name__)

ID_BYTES = 16  # of a namespace id and of a block key
MAX_EXPLAIN_KEYS = 1024
MAX_CONNECTIONS = 64  # at a time
MAX_LINE_BYTES = (
    64 * 1024
)  # holds MAX_EXPLAIN_KEYS keys; aiohttp's 8190 would refuse them before a handler could say why
EXPLAIN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DaemonView(metrics.MetricsSource, Protocol):
    """What this door asks of the daemon."""

    async def explain(self, namespace_hex: str, key_hexes: list[str]) -> list[dict[str, Any]]:
        """For each key, where it is or why it isn't. Raises: ProtocolError, ValueError."""


class HttpDoor:
    """Serves a DaemonView until stopped."""

    def __init__(self, daemon: DaemonView, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._daemon = daemon
        self._metrics = metrics.Metrics(daemon)
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Bind and serve. Raises: OSError, that says what to do, when the address cannot be had."""
        app = web.Application(middlewares=[_json_errors, _loopback_names_only], client_max_size=MAX_LINE_BYTES)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics_text),
                web.get("/v1/stats", self._stats),
                web.get("/v1/explain", self._explain),
            ]
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=log,  # not aiohttp.server, which no one set up
            handle_signals=False,
            shutdown_timeout=CLOSE_TIMEOUT_S,
            max_line_size=MAX_LINE_BYTES,
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
        return _json(health, status=200 if health["ok"] else 503)

    async def _readyz(self, _: web.Request) -> web.Response:
        health = self._daemon.health()
        return _json(health, status=200 if health["ready"] else 503)

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _stats(self, _: web.Request) -> web.Response:
        return _json(self._daemon.stats())

    async def _explain(self, request: web.Request) -> web.Response:
        if unknown := request.query.keys() - {"namespace", "keys"}:
            raise ValueError(f"unknown parameter {min(unknown)!r}: give namespace and keys")
        namespace = _hex_id("namespace", request.query.get("namespace", ""))
        keys = [_hex_id("keys", key) for key in request.query.get("keys", "").split(",")]
        if len(keys) > MAX_EXPLAIN_KEYS:
            raise ValueError(f"{len(keys)} keys in one request: ask for at most {MAX_EXPLAIN_KEYS}")
        async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
            found = await self._daemon.explain(namespace, keys)
        return _json({"namespace": namespace, "objects": found})


def _protocol(runner: web.AppRunner) -> asyncio.Protocol:
    """For a new connection. Anyone on the machine may come, and each takes a descriptor that engines need: the oldest goes."""
    server = runner.server
    assert server is not None
    connected = [each for each in server.connections if each.transport is not None]
    if len(connected) >= MAX_CONNECTIONS:
        connected[0].force_close()
    return server()


def _hex_id(name: str, text: str) -> str:
    try:
        if len(bytes.fromhex(text)) == ID_BYTES and len(text) == 2 * ID_BYTES:
            return text.lower()
    except ValueError:
        pass
    raise ValueError(f"{name}: {text[:64]!r} is not {2 * ID_BYTES} hex digits")


def _json(body: Mapping[str, Any], *, status: int = 200) -> web.Response:
    # msgspec writes NaN and infinities as null; the standard library writes what no JSON parser must accept.
    return web.Response(body=msgspec.json.encode(body) + b"\n", status=status, content_type="application/json")


def _error(status: int, code: str, message: str) -> web.Response:
    return _json({"error": {"code": code, "message": message}}, status=status)


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        response = await handler(request)
    except web.HTTPMethodNotAllowed as exc:
        response = _error(405, "method_not_allowed", f"{request.path} takes {', '.join(sorted(exc.allowed_methods))}")
        response.headers["Allow"] = exc.headers["Allow"]
    except web.HTTPNotFound:
        paths = sorted({route.resource.canonical for route in request.app.router.routes() if route.resource})
        response = _error(404, "not_found", f"no such path; there are {', '.join(paths)}")
    except web.HTTPException as exc:
        response = _error(exc.status, exc.reason.lower().replace(" ", "_"), exc.text or exc.reason)
    except ValueError as exc:
        response = _error(400, "bad_request", str(exc))
    except TimeoutError:
        response = _error(504, RequestTimeout.code, "the daemon did not answer in time; ask again, or for less")
    except ProtocolError as exc:
        response = _error(_STATUS.get(type(exc), 400), exc.code, str(exc))
    except Exception:
        log.exception("http request failed", extra={"path": request.path})
        response = _error(500, "daemon_fault", "an error inside the daemon; its log has the details")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Cache-Control"] = "no-store"
    return response


_STATUS: Mapping[type[ProtocolError], int] = {UnknownHandle: 404, RequestTimeout: 504, Draining: 503}


@web.middleware
async def _loopback_names_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    # A web page can make a browser ask 127.0.0.1 under a name of its own (DNS rebinding) and read the answer.
    # Its requests carry that name as Host; ours carry a loopback address or localhost.
    host = request.headers.get("Host", "localhost").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        known = name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        known = False
    if not known:
        return _error(403, "foreign_host", "the Host header must name localhost or a loopback address")
    return await handler(request)
