"""A daemon that only answers questions, with numbers a test can change."""

from __future__ import annotations

from typing import Any

from forebay.server.auth import Access


class FakeDaemon:
    """The DaemonView of server/http.py. `fail` is raised by stats and explain when set."""

    def __init__(self) -> None:
        self.fail: Exception | None = None
        self.access = Access()
        self.asked: list[tuple[str, list[str]]] = []
        self.state: dict[str, Any] = {"ok": True, "ready": True, "reasons": [], "quarantined_bytes": 0}
        self.loop_lag: dict[str, Any] = {"bounds": [0.001, 0.01], "counts": [5, 2, 1], "sum": 0.25}
        self.numbers: dict[str, Any] = {
            "version": "0.1.0",
            "uptime_s": 12.5,
            "sessions": {"open": 2, "opened_total": 9},
            "tiers": {
                "ram": {"hits_total": 7, "used_bytes": 4096, "breaker": "closed", "counters": {"evicted": 5}},
                "ssd": {"hits_total": 3, "load_s": {"bounds": [0.1], "counts": [1, 0], "sum": 0.05}},
            },
        }

    def stats(self) -> dict[str, Any]:
        if self.fail:
            raise self.fail
        return self.numbers

    def health(self) -> dict[str, Any]:
        return self.state

    async def explain(
        self, namespace_hex: str, key_hexes: list[str], tenant: str | None = None
    ) -> list[dict[str, Any]]:
        if self.fail:
            raise self.fail
        self.asked.append((namespace_hex, key_hexes))
        return [{"key": key, "state": "absent"} for key in key_hexes]
