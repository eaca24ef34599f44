"""API keys, and whom a server without any still answers.

Always true: keys are kept as digests only and compared in constant time, all of them; without keys only this machine is
answered, and not a browser that acts for somebody else's page.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from aiohttp import web

from forebay.engine.api.errors import ApiError, unknown_key

MAX_KEY_CHARACTERS = 512
MIN_KEY_CHARACTERS = 16


class ApiKeys:
    """Raises: ValueError: a key is too short to be a secret, too long, or could not stand in a header."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        found = list(keys)
        for key in found:
            if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
                raise ValueError(f"an API key has {MIN_KEY_CHARACTERS} to {MAX_KEY_CHARACTERS} characters")
            if not (key.isascii() and key.isprintable() and " " not in key):
                raise ValueError("an API key has printable ASCII characters and no space")
        self._digests = [_digest(key) for key in found]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, request: web.Request) -> None:
        """Raises: ApiError: this request is not to be answered."""
        if not self._digests:
            _refuse_foreign_pages(request)
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # Far too long is not worth hashing, and the empty key is nobody's.
        digest = _digest(key.strip() if scheme.lower() == "bearer" and len(key) <= 2 * MAX_KEY_CHARACTERS else "")
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise unknown_key()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    try:
        return host == "localhost" or host.endswith(".localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _refuse_foreign_pages(request: web.Request) -> None:
    """A web page could make a browser on this machine ask: by a name of its own that leads here (its requests carry that
    name as Host), or across sites (those carry its origin)."""
    host, origin = f"//{request.headers.get('Host', 'localhost')}", request.headers.get("Origin")
    if not all(is_loopback(_host_of(url)) for url in (host, origin) if url is not None):
        message = "without API keys only this machine is answered, and no web page from elsewhere"
        raise ApiError(403, message, code="foreign_request")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # a bracket that isn't closed
        return ""
