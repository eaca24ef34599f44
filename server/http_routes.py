"""Routes of the HTTP door, each with the rights it needs, and the answers to requests that get no further.

Covers authentication, rights, browsers that act for foreign pages, errors as JSON. Always true: every route has its rights,
because there is no other way to add one; every error is JSON of one form, and none repeats what a request carried.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from forebay.kvstore import errors
from forebay.kvstore.errors import ProtocolError, TierFull
from forebay.server.auth import Access, Principal, Right
from forebay.server.http_bodies import json_response

log = logging.getLogger("forebay.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Not in the request's own storage, whose keys differ between versions of aiohttp.
_principal: Final[ContextVar[Principal]] = ContextVar("forebay principal")


@dataclass(frozen=True)
class Route:
    """One method on one path.

    rights: one of them is needed; None asks for no credentials at all (liveness probes have none).
    operator: only for the operator, an admin of the default tenant, since the answer is about all tenants.
    """

    method: str
    path: str
    rights: frozenset[Right] | None
    handler: Handler
    operator: bool = False


_STATUS: Final[Mapping[type[Exception], int]] = {
    errors.AccessDenied: 401,
    errors.Forbidden: 403,
    errors.UnknownHandle: 404,
    errors.FrameTooLarge: 413,
    errors.ObjectTooLarge: 413,
    errors.OverLimit: 429,
    errors.DaemonFault: 500,
    errors.Draining: 503,
    errors.RequestTimeout: 504,
}


def error_response(status: int, code: str, message: str) -> web.Response:
    return json_response({"error": {"code": code, "message": message}}, status=status)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception of a handler as a typed answer."""
    try:
        response = await handler(request)
    except web.HTTPMethodNotAllowed as exc:
        allowed = ", ".join(sorted(exc.allowed_methods))
        response = error_response(405, "method_not_allowed", f"{_path(request)} takes {allowed}")
        response.headers["Allow"] = exc.headers["Allow"]
    except web.HTTPNotFound as exc:
        if request.match_info.http_exception is None:
            response = error_response(404, "not_stored", exc.text or "not stored")
        else:
            paths = sorted({route.resource.canonical for route in request.app.router.routes() if route.resource})
            response = error_response(404, "not_found", f"no such path; there are {', '.join(paths)}")
    except web.HTTPException as exc:
        response = error_response(exc.status, exc.reason.lower().replace(" ", "_"), exc.text or exc.reason)
    except ValueError as exc:
        response = error_response(400, "bad_request", str(exc))
    except TimeoutError:
        response = error_response(504, errors.RequestTimeout.code, "not done in time; ask again, or for less")
    except TierFull as exc:
        response = error_response(507, "refused", str(exc))
    except ProtocolError as exc:
        status = 403 if isinstance(exc, _Foreign) else _STATUS.get(type(exc), 400)
        response = error_response(status, exc.code, str(exc))
        if isinstance(exc, errors.AccessDenied):
            response.headers["WWW-Authenticate"] = 'Bearer realm="forebay"'
    except ConnectionError:
        response = error_response(400, "cut", "the connection ended inside the body")  # nobody is left to read it
    except Exception:
        log.exception("http request failed", extra={"path": _path(request)})
        response = error_response(500, "daemon_fault", "an error inside the daemon; its log has the details")
    if not response.prepared:
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-store"
    return response


def _path(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else request.path[:200]


def admission(routes: Mapping[tuple[str, str], Route], access: Access) -> Middleware:
    """The middleware that finds out who asks, and whether they may."""

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None:
            return await handler(request)  # no such route: nothing to protect
        route = routes[("GET" if request.method == "HEAD" else request.method, _path(request))]
        if not access.required:
            _refuse_foreign_pages(request)
        if route.rights is None:
            return await handler(request)
        who = access.authenticate(_bearer(request), unix=False)
        what = f"{route.method} {route.path}"
        who.check(what, route.rights)
        if route.operator:
            who.check_operator(what)
        asks = _principal.set(who)
        try:
            return await handler(request)
        finally:
            _principal.reset(asks)

    return admit


def caller() -> Principal:
    """Who asks, in the handler of a route that needs rights."""
    return _principal.get()


def _bearer(request: web.Request) -> str:
    """The token of the Authorization header, "" without one. Raises: AccessDenied for another scheme."""
    given = request.headers.get("Authorization", "")
    scheme, _, token = given.partition(" ")
    if given and scheme.lower() != "bearer":
        raise errors.AccessDenied("send Authorization: Bearer TOKEN")
    return token.strip()


def _refuse_foreign_pages(request: web.Request) -> None:
    """Without tokens, a web page could make a browser on this machine ask for it.

    By a name of its own that leads to 127.0.0.1 (DNS rebinding): its requests carry that name as Host. Or across sites,
    blindly: those carry its origin.
    """
    host = request.headers.get("Host", "localhost").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not _is_local_name(name):
        raise _Foreign("foreign_host", "the Host header must name localhost or a loopback address")
    origin = request.headers.get("Origin")
    if origin is not None and not _is_local_name((urlsplit(origin).hostname or "") if origin != "null" else ""):
        raise _Foreign("foreign_origin", "requests of web pages from elsewhere are refused")


class _Foreign(ProtocolError):
    """A request made by a browser for a page of somebody else."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _is_local_name(name: str) -> bool:
    try:
        return name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
