"""One daemon process from start to exit: tiers, doors, signals, drain.

Wires what forebay.server and forebay.tiers offer; decides nothing about blocks. Always true: the HTTP door opens after
the daemon works and closes after it has drained, so /readyz tells the truth all the way.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import logging
import os
import signal
from importlib.metadata import entry_points

from forebay import __version__
from forebay.kvstore.address import private_folder
from forebay.kvstore.tier import Tier
from forebay.server import logs
from forebay.server.daemon import Daemon
from forebay.server.http import HttpDoor
from forebay.server.settings import BadSettings, Settings

log = logging.getLogger(__name__)

TIER_GROUP = "forebay.tiers"


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal exits at once with 128 + its number.

    Raises: OSError, ForebayError or BadSettings when it cannot start.
    """
    import uvloop

    logs.set_up(settings.log_level, settings.log_format)
    lower = load_tiers(settings)
    if settings.provenance()["socket"] == "default":
        try:
            private_folder(settings.socket.parent)
        except ValueError as exc:
            raise BadSettings([str(exc)]) from exc
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, lower))


async def serve(settings: Settings, lower: list[Tier]) -> None:
    """The same, inside a running loop whose signals it takes over."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, number, stop)
    daemon = Daemon(settings, lower=lower)
    await daemon.start()
    door = None
    try:
        if settings.http_port >= 0:
            door = HttpDoor(daemon, host=settings.http_host, port=settings.http_port)
            await door.start()
        facts = {"version": __version__, "socket": str(settings.socket), "http": door.url if door else "off"}
        log.info("serving", extra={**facts, "ram_bytes": settings.ram_bytes, "pid": os.getpid()})
        await stop.wait()
    finally:
        report = await daemon.drain()
        if door is not None:
            await door.stop()
        log.info("drained", extra=dataclasses.asdict(report))


def load_tiers(settings: Settings) -> list[Tier]:
    """The tiers that settings name, made by their `forebay.tiers` entry points, which are called with the keyword
    arguments of `tier_options` and return a Tier.

    Raises: BadSettings when a name is unknown, its options don't fit, or it makes no Tier.
    """
    found = {point.name: point for point in entry_points(group=TIER_GROUP)}
    tiers = []
    for name in settings.tiers:
        if name not in found:
            close = difflib.get_close_matches(name, found, n=1)
            known = f"did you mean {close[0]}?" if close else f"installed are: {', '.join(sorted(found)) or 'none'}"
            raise BadSettings([f"tiers names {name!r}, which no installed package provides; {known}"])
        try:
            tier = found[name].load()(**settings.tier_options.get(name, {}))
        except (TypeError, ValueError) as exc:
            raise BadSettings([f"tier_options.{name}: {exc}"]) from exc
        if not isinstance(tier, Tier):
            raise BadSettings([f"tiers names {name!r}, whose entry point made a {type(tier).__name__} and no Tier"])
        tiers.append(tier)
    return tiers


def _on_signal(number: int, stop: asyncio.Event) -> None:
    name = signal.Signals(number).name
    if stop.is_set():
        log.warning("exiting at once", extra={"signal": name})
        os._exit(128 + number)  # a drain that hangs must not be able to hold this up
    log.info("draining", extra={"signal": name})
    stop.set()
