"""The way to a daemon that may be absent: opened when first needed, left alone for a while after it failed, found again.

Covers clients of all doors behind one look, counters and the last reason of each trouble. Always true: while it backs off
nothing is sent; keys can be made before any daemon was seen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, TypeAlias

from forebay.clients import Client, HttpClient, HttpNamespace, Namespace
from forebay.kvstore.errors import ClientError, DaemonTimeout, DaemonUnavailable, ProtocolError
from forebay.kvstore.identity import PUBLIC_SECRET, NamespaceFacts, namespace_id

AnyClient: TypeAlias = Client | HttpClient
AnyNamespace: TypeAlias = Namespace | HttpNamespace

TROUBLE: Final = (ClientError, ProtocolError, OSError)
_DEFAULT_TENANT: Final = "default"
_MOST_DOUBLINGS: Final = 6
_LAST_ANSWERS_S: Final = 0.5
_log = logging.getLogger(__name__)


class Away(ClientError):
    """The daemon failed a moment ago: nothing is asked of it now."""


class Link:
    """Any thread may use one; only `away`, `namespace_id` and `count` are for the engine's."""

    def __init__(
        self,
        facts: NamespaceFacts,
        make: Callable[[], AnyClient],
        *,
        backoff_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        # What a daemon with one tenant says, until the daemon says otherwise. Keys made from another id are sound, too: they
        # stand for the same facts, tokens and salt, and are looked up in the daemon's own namespace.
        self.namespace_id = namespace_id(facts, tenant=_DEFAULT_TENANT, secret=PUBLIC_SECRET)
        self.counters: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self._make, self._clock, self._backoff_s = make, clock, backoff_s
        self._client: AnyClient | None = None
        self._namespace: AnyNamespace | None = None
        self._failures, self._retry_at_s = 0, -float("inf")
        self._opening = threading.Lock()
        self._counting = threading.Lock()

    @property
    def away(self) -> bool:
        """Whether the daemon is left alone now."""
        return self._clock() < self._retry_at_s

    def open(self, timeout_s: float) -> AnyNamespace:
        """The namespace, opened if it isn't. Raises: Away, or what the client raises (TROUBLE)."""
        if self.away:
            raise Away("the daemon failed a moment ago and is left alone for now")
        with self._opening:
            if self._namespace is None:
                if self._client is None:
                    self._client = self._make()
                self._namespace = self._client.open(self.facts, timeout_s=timeout_s)
                self.namespace_id = self._namespace.id
            return self._namespace

    def worked(self) -> None:
        """The daemon has answered."""
        self._failures = 0

    def trouble(self, doing: str, exc: BaseException) -> None:
        """Count it as `doing`_`its type`, keep its words, and leave a daemon alone that doesn't answer."""
        name = f"{doing}_{type(exc).__name__}"
        self.count(name)
        if isinstance(exc, Away):
            return
        self.reasons[name] = str(exc)
        with self._opening:
            self._namespace = None
        if isinstance(exc, DaemonUnavailable | DaemonTimeout | OSError):
            now_s = self._clock()
            with self._counting:
                if now_s >= self._retry_at_s:  # of several calls that fail together one counts
                    self._retry_at_s = now_s + self._backoff_s * 2 ** min(self._failures, _MOST_DOUBLINGS)
                    self._failures += 1
        if isinstance(exc, TROUBLE):
            _log.warning("computing instead: trouble with the daemon", extra={"error": name, "why": str(exc)})
        else:
            _log.error("computing instead: unexpected trouble in the prefix store", exc_info=exc)

    def count(self, name: str, by: float = 1) -> None:
        with self._counting:
            self.counters[name] += by  # type: ignore[assignment]

    def close(self) -> None:
        with self._opening:
            client, self._client, self._namespace = self._client, None, None
        if client is None:
            return
        if isinstance(client, Client) and any(name.endswith(DaemonTimeout.__name__) for name in self.counters):
            # Answers that came too late granted leases and places, which the client gives back as it meets them.
            try:
                client.stats(timeout_s=_LAST_ANSWERS_S)
            except TROUBLE:
                pass
        client.close()
