"""Real processes: a daemon under load from four engines that is killed and stopped over and over, and engines that are killed.

Always true: while anything is killed, what engines read is right or a miss; afterwards nobody holds anything, and memory, files
and descriptors are what they were.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from forebay.server.door import DaemonAlreadyRunning
from tests.daemon_process import eventually
from tests.faults.campaign.daemon import Daemon
from tests.faults.campaign.engine import Engine, Report
from tests.faults.campaign.tally import Tally

ENGINES = 4
EXPECTED = {"DaemonUnavailable", "DaemonTimeout", "EpochEnded", "Draining", "OverLimit", "UnknownHandle"}
SLOWEST_S = 30.0  # a request that took longer hung
KILLS_IN_ROW = 3  # then one stop in order: a directory left by many kills in a row is checked before it serves


def run(seed: int, kills: int, deaths: int, folder: Path, tally: Tally, *, without: str = "") -> None:
    """So many kills of a daemon under load, among them so many kills of engines and a stop now and then."""
    rng = random.Random(seed)
    shared = set(os.listdir("/dev/shm"))
    with Daemon(folder, without=without) as daemon:
        engines = [Engine(daemon.socket, rng.randrange(1 << 32), share=i % 2, without=without) for i in range(ENGINES)]
        ready_s = [_kill_engines(daemon, rng, deaths, kills, tally, without, number) for number in range(kills)]
        reports = [engine.ask() for engine in engines]
        _judge(reports, ready_s, tally)
        _at_rest(daemon, tally)
    _nothing_left(folder, shared, tally)


def _kill_engines(
    daemon: Daemon, rng: random.Random, deaths: int, kills: int, tally: Tally, without: str, number: int
) -> float:
    """One turn: engines die, then the daemon does, and another serves. Returns when it did."""
    due = deaths * (number + 1) // kills - deaths * number // kills
    victims = [
        Engine(daemon.socket, rng.randrange(1 << 32), share=rng.randrange(2), without=without) for _ in range(due)
    ]
    time.sleep(rng.uniform(0.05, 0.25))
    for victim in victims:
        victim.kill()
        tally.fire("client death")
    if rng.random() < 0.2:
        os.kill(daemon.pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.05, 0.2))
        os.kill(daemon.pid, signal.SIGCONT)
        tally.fire("hang")
    if number % 25 == 0:
        _second_daemon(daemon, tally)
    if number % (KILLS_IN_ROW + 1) == KILLS_IN_ROW:
        daemon.end(signal.SIGTERM)
        daemon.start()
        time.sleep(rng.uniform(0.02, 0.1))
    daemon.end(signal.SIGKILL)
    tally.fire("daemon kill")
    daemon.start()
    return daemon.ready_s


def _second_daemon(daemon: Daemon, tally: Tally) -> None:
    """Another daemon on the same socket ends at once and says why; the first goes on."""
    try:
        Daemon(daemon.folder).end(signal.SIGKILL)
    except AssertionError as exc:
        if DaemonAlreadyRunning.__name__ in str(exc):
            tally.fire("second daemon")
            return
        raise
    tally.break_("two daemons on one socket")


def _judge(reports: list[Report], ready_s: list[float], tally: Tally) -> None:
    for report in reports:
        tally.read("faults", report.hits, report.asked)
        for kind, count in report.fired.items():
            tally.fire(kind, count)
        for line in report.wrong:
            tally.break_(line)
        for kind in set(report.misses) - EXPECTED:
            tally.break_(f"an engine met {report.misses[kind]} times {kind}")
        if report.slowest_s > SLOWEST_S:
            tally.break_(f"a request took {report.slowest_s:.1f} s")
        if not report.reads:
            tally.break_("an engine was never served")
        tally.told.update({f"engines met {kind}": count for kind, count in report.misses.items()})
    waits = resumption(reports, ready_s)
    if waits:
        waits.sort()
        print(
            f"engines were served again {waits[len(waits) // 2]:.3f} s (median), {waits[-1]:.3f} s (most) after a start"
        )


def resumption(reports: list[Report], ready_s: list[float]) -> list[float]:
    """Seconds from each daemon's start to the first request served again, for each engine that had met its absence."""
    waits = []
    for number, since_s in enumerate(ready_s):
        until_s = ready_s[number + 1] if number + 1 < len(ready_s) else float("inf")
        for report in reports:
            waits += [at_s - since_s for at_s in report.resumed_s if since_s <= at_s < until_s][:1]
    return waits


def _at_rest(daemon: Daemon, tally: Tally) -> None:
    """With all engines gone nothing is held for anybody, and every byte is accounted for."""

    def held(stats: dict[str, Any]) -> dict[str, int]:
        names = ("leases", "leased_blocks", "uncommitted_bytes", "orphans", "quarantined_bytes")
        memory = stats["tiers"]["ram"]["bytes"]
        found = {name: stats["sessions"][name] for name in names}
        return found | {"sessions": stats["sessions"]["open"] - 1, "allocated": memory["allocated"]}

    try:
        eventually(daemon.stats, lambda stats: not any(held(stats).values()))
    except AssertionError:
        tally.break_(f"held at rest: {held(daemon.stats())}")
    wrong = daemon.audit()
    if wrong:
        tally.break_(wrong)
    stats = daemon.stats()
    if not stats["tiers"]["ssd"]["serving"] and not stats["health"]["reasons"]:
        tally.break_("the disk does not serve, and health tells nothing")


def _nothing_left(folder: Path, shared: set[str], tally: Tally) -> None:
    if left := set(os.listdir("/dev/shm")) - shared:
        tally.break_(f"left in shared memory: {sorted(left)}")
    if left := {path.name for path in folder.iterdir()} - {"d.sock", "d.sock.lock", "daemon.log", "ssd"}:
        tally.break_(f"left in the folder: {sorted(left)}")
