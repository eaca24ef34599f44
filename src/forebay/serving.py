"""One daemon process from start to exit: event loop, logs, signals, drain.

The daemon itself opens its doors and tiers. Always true: the first SIGTERM or SIGINT drains, whenever it comes; a second
one ends the process at once, whatever hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
from typing import Final

from forebay.server import logs
from forebay.server.daemon import Daemon, DrainReport
from forebay.server.notify import notify
from forebay.server.priority import go_first
from forebay.server.settings import Settings

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD: Final = -1  # of mallopt(3)
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3


def run(settings: Settings) -> DrainReport:
    """Serve until a signal, then drain.

    Raises: OSError, ForebayError or BadSettings when the daemon cannot start.
    """
    import uvloop

    logs.set_up(settings.log_level, settings.log_format)
    allow_descriptors()
    keep_the_heap()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(settings))


async def serve(settings: Settings) -> DrainReport:
    """The same, inside a running loop whose signals it takes over."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stop)
    daemon = Daemon(settings)
    await daemon.start()
    spare_the_collector()
    go_first(settings.nice)  # after the tiers have started their threads, which keep the usual priority
    notify(f"READY=1\nSTATUS=serving {settings.socket}")
    await stop.wait()
    notify(f"STOPPING=1\nSTATUS=draining, at most {settings.drain_s:g} s")
    return await daemon.drain()


def allow_descriptors() -> None:
    """Raise the soft limit on descriptors to the hard one: extents, sessions and their processes take some each.

    The usual soft limit of 1,024 is for programs that use select(); 64 GiB of extents pass it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def spare_the_collector() -> None:
    """Take what start-up made, modules above all, out of garbage collection: it lives as long as the process.

    A full collection would walk it each time ([M] 40 ms with nothing stored, 1 ms without it).
    """
    gc.collect()
    gc.freeze()


def keep_the_heap() -> None:
    """Have glibc keep memory that arrays of some 100 KiB come and go in, instead of mapping and unmapping it for each request.

    Mapping waits for whoever fills new memory, and each new page is a fault of 15 us: [M] beside a client that stores without
    a pause, the 99th percentile of the loop's lag went from 2.1 to 1.1 ms. Other C libraries are left as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    for parameter, size_bytes in ((_M_MMAP_THRESHOLD, 64 << 20), (_M_TRIM_THRESHOLD, 128 << 20), (_M_TOP_PAD, 4 << 20)):
        mallopt(parameter, size_bytes)


def _on_signal(number: int, stop: asyncio.Event) -> None:
    name = signal.Signals(number).name
    if stop.is_set():
        log.warning("exiting at once", extra={"signal": name})
        os._exit(128 + number)  # not sys.exit: a drain that hangs must not be able to hold this up
    log.info("draining", extra={"signal": name})
    stop.set()
