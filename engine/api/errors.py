"""What clients are told when something can't be done, in OpenAI's shape: a message, a type, a parameter, a code.

Always true: a message names the parameter and the bound, never a value of the request, which is somebody's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

INVALID: Final = "invalid_request_error"


class ApiError(Exception):
    """An answer other than the one hoped for. `headers`: such as Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        return json_response(self.body(), status=self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """`message` reads on from the parameter's name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def context_length_exceeded(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")


def unknown_key() -> ApiError:
    """Never says what was wrong with a key: there are too many ways to be nearly right."""
    message = "no valid API key: send Authorization: Bearer KEY with a key that this server was started with"
    headers = {"WWW-Authenticate": 'Bearer realm="forebay"'}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def unknown_model(known: str) -> ApiError:
    return ApiError(404, f"no such model here: this server runs {known!r}", param="model", code="model_not_found")


def too_slow() -> ApiError:
    return ApiError(408, "the rest of the body did not come in time", code="request_timeout")


def too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is over the limit of {limit_bytes} bytes", code="request_too_large")


def queue_full(retry_after_s: int) -> ApiError:
    message = f"as many requests as may wait are waiting: ask again in {retry_after_s} s"
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def draining() -> ApiError:
    message = "this server is shutting down: ask another, or this one again once it is back"
    headers = {"Retry-After": "5"}
    return ApiError(503, message, kind="server_error", code="draining", headers=headers)


def failed(message: str = "an error inside the server; its log has the details", code: str | None = None) -> ApiError:
    return ApiError(500, message, kind="server_error", code=code)


def json_response(body: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    # msgspec writes NaN and infinities as null; the standard library writes what no JSON parser must accept.
    return web.Response(body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json")
