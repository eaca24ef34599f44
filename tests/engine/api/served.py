"""`forebay engine serve` in a process of its own. Always true: it is gone when its `with` block ends, and its log is shown
when the block fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

START_S = 60.0
WAIT_S = 20.0
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: never through a proxy


class Served:
    """Options go to the command line. `url`: where it answers, without /v1."""

    def __init__(self, model: Path, folder: Path, *options: str, environ: dict[str, str] | None = None) -> None:
        self._log = folder / "engine.log"
        command = [sys.executable, "-m", "forebay", "engine", "serve", str(model), "--port", "0", "--threads", "1"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        kept |= {"FOREBAY_SSD_BYTES": "0", "OMP_NUM_THREADS": "1"} | (environ or {})
        with self._log.open("w") as sink:
            self.process = subprocess.Popen([*command, *options], stdout=sink, stderr=sink, env=kept)
        self.url = eventually(self._said, bool, START_S, self.log)

    def _said(self) -> str:
        assert self.process.poll() is None, self.log()
        found = re.search(r"at (http://\S+?)/v1", self.log())
        return found[1] if found else ""

    def log(self) -> str:
        return self._log.read_text()

    def ask(self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """Status, JSON and headers of the answer, whatever it is."""
        request = urllib.request.Request(f"{self.url}{path}", body, headers or {})
        try:
            with _opener.open(request, timeout=WAIT_S) as response:
                return response.status, json.load(response), response.headers
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, json.load(exc), exc.headers

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, found, _ = self.ask(path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        return status, found

    def metrics(self) -> dict[str, float]:
        """Samples by name with labels."""
        with _opener.open(f"{self.url}/metrics", timeout=WAIT_S) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    def at_rest(self) -> dict[str, float]:
        """Wait until no sequence is left and every block is free or cached. Returns the metrics."""

        def busy(found: dict[str, float]) -> float:
            names = ("running", "waiting", "blocks_used", "blocks_held", "http_in_flight")
            return sum(found[f"forebay_engine_{name}"] for name in names)

        found = eventually(self.metrics, lambda found: not busy(found), WAIT_S, self.log)
        blocks = {name: found[f"forebay_engine_{name}"] for name in ("blocks_free", "blocks_cached", "pool_blocks")}
        assert blocks["blocks_free"] + blocks["blocks_cached"] == blocks["pool_blocks"], blocks
        return found

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        if exc is not None:
            exc.add_note(f"the engine's log:\n{self.log()[-4000:]}")


def eventually(ask: Callable[[], Any], good: Callable[[Any], Any], limit_s: float, log: Callable[[], str]) -> Any:
    """What `ask` says once it is good."""
    limit = time.monotonic() + limit_s
    while not good(found := ask()):
        assert time.monotonic() < limit, f"still {found}\n{log()}"
        time.sleep(0.02)
    return found
