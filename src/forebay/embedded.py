"""A daemon on a thread of this process, for an engine that runs where no daemon does.

It is the daemon of `forebay serve` with its network doors closed, on a private socket: its client comes by that socket as to
any other, so there is one way to a store and not two. Always true: when `close` returns, what RAM had is copied down as far as
the drain's time allowed, and its ssd directory is free for the next one, which finds the content again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Final

from forebay.server.daemon import Daemon, DrainReport
from forebay.server.settings import Settings

_START_S: Final = 60.0


class EmbeddedDaemon:
    """Serves from its making until `close`. Use as a context manager."""

    def __init__(self, config: Path | str | None = None, **flags: object) -> None:
        """Arguments as `Settings.load`; socket and doors are this daemon's own. Raises: BadSettings, OSError, ForebayError."""
        self._folder = Path(tempfile.mkdtemp(prefix="forebay-"))
        self.socket = self._folder / "embedded.sock"
        self.report: DrainReport | None = None
        try:
            settings = Settings.load(
                config, **(flags | {"socket": str(self.socket), "http_port": "off", "tcp_port": "off"})
            )
            self._loop: asyncio.AbstractEventLoop
            self._stop: asyncio.Event
            self._started = threading.Event()
            self._failure: BaseException | None = None
            # Not awaited at the interpreter's exit: a disk that never answers must not hold that up.
            self._thread = threading.Thread(target=self._run, args=(settings,), name="forebay-embedded", daemon=True)
            self._thread.start()
            if not self._started.wait(_START_S):
                raise TimeoutError(f"the embedded daemon did not start within {_START_S:g} s")
            if self._failure is not None:
                raise self._failure
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _run(self, settings: Settings) -> None:
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.report = runner.run(self._serve(settings))
        except BaseException as exc:
            self._failure = exc
        finally:
            self._started.set()

    async def _serve(self, settings: Settings) -> DrainReport:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        daemon = Daemon(settings)
        await daemon.start()
        self._started.set()
        await self._stop.wait()
        return await daemon.drain()

    def close(self) -> None:
        """Drain and end. Idempotent. Close its clients first, or the drain waits for what they hold."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedDaemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
