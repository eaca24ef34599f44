"""A daemon with RAM and SSD in a process of its own, made in milliseconds: what the campaign kills."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay.clients import Client
from tests.daemon_process import MIB, WAIT_S
from tests.faults.campaign.checks import switch_off
from tests.faults.campaign.recovering import NURSERY, PRELOADED

SETTINGS: dict[str, Any] = {
    "ram_bytes": 8 * MIB,
    "extent_bytes": MIB,
    "memory_reserve_bytes": 0,
    "http_port": -1,
    "ssd_bytes": 64 * MIB,
    "ssd_reserve_bytes": 0,
    "drain_s": 1.0,
    "lease_deadline_s": 30.0,
}


class Daemon:
    """One daemon process after another on one socket and one directory. `ready_s`: when the present one began to serve."""

    def __init__(self, folder: Path, *, without: str = "") -> None:
        NURSERY.set_forkserver_preload(PRELOADED)
        self.folder, self.socket, self._without = folder, folder / "d.sock", without
        self.settings = SETTINGS | {"socket": str(self.socket), "ssd_dirs": str(folder / "ssd")}
        self.ready_s = 0.0
        self.start()

    def start(self) -> None:
        """Returns once it serves."""
        self._pipe, there = NURSERY.Pipe()
        self._process = NURSERY.Process(target=_serve, args=(self.settings, there, self.folder, self._without))
        self._process.start()
        there.close()
        self.ready_s = float(self._hear())

    def _hear(self) -> Any:
        assert self._pipe.poll(WAIT_S), f"the daemon says nothing; its log: {self.log()[-2000:]}"
        try:
            return self._pipe.recv()
        except EOFError:
            raise AssertionError(f"the daemon has ended; its log: {self.log()[-2000:]}") from None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def log(self) -> str:
        return (self.folder / "daemon.log").read_text()

    def end(self, number: signal.Signals) -> None:
        """Send a signal that ends it, and wait until it is gone."""
        os.kill(self.pid, number)
        self._process.join(WAIT_S)
        assert self._process.exitcode is not None, "the daemon does not end"
        self._process.close()
        self._pipe.close()

    def audit(self) -> str:
        """Accounts of memory and index, computed again from the slots. Returns what is wrong with them, or nothing."""
        self._pipe.send("audit")
        return str(self._hear())

    def stats(self) -> dict[str, Any]:
        with Client(self.socket, timeout_s=WAIT_S) as client:
            return client.stats()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        try:
            os.kill(self.pid, signal.SIGCONT)
            self.end(signal.SIGKILL)
        except ValueError:
            pass  # it was ended already


def _serve(settings: dict[str, Any], pipe: Connection, folder: Path, without: str) -> None:
    import uvloop

    log = os.open(folder / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    switch_off(without)
    uvloop.run(_until_told(settings, pipe))


async def _until_told(settings: dict[str, Any], pipe: Connection) -> None:
    from forebay.kvstore.errors import ForebayError
    from forebay.server import daemon, logs
    from forebay.server.settings import Settings

    logs.set_up("warning", "text")
    served = daemon.Daemon(Settings.load(None, **settings))
    await served.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard() -> None:
        try:
            pipe.recv()
        except EOFError:  # whoever started it has gone
            stop.set()
            return
        try:
            served.ram.audit()
            pipe.send("")
        except ForebayError as exc:
            pipe.send(str(exc))

    loop.add_reader(pipe.fileno(), heard)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    pipe.send(time.monotonic())
    await stop.wait()
    loop.remove_reader(pipe.fileno())
    await served.drain()
