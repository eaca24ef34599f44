"""The daemon as benchmarks run it: `forebay serve` plus answers about itself on standard input.

Run as `python -m forebay.bench_daemon '{"socket": ..., "ram_bytes": ...}'`. Prints one line of JSON when ready and one an
answer. "gc": milliseconds of a full collection; "memory": bytes of private memory; "lag": the event loop's lag since the last
question; "prefault": have all of the budget's memory; "tcp_port": where the TCP door listens.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from forebay.server import logs
from forebay.server.daemon import Daemon
from forebay.server.priority import go_first
from forebay.server.settings import Settings
from forebay.serving import keep_the_heap, spare_the_collector


def _private_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):  # shared memory is none of it
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Anonymous line in /proc/self/smaps_rollup")


def _gc_pause_ms() -> float:
    started_s = time.perf_counter()
    gc.collect()
    return 1e3 * (time.perf_counter() - started_s)


async def _answer(daemon: Daemon, question: str) -> Any:
    if question == "gc":
        return _gc_pause_ms()
    if question == "memory":
        return _private_bytes()
    if question == "tcp_port":
        return daemon.tcp_port
    if question == "lag":
        return daemon.recent_lag()
    if question == "prefault":
        await daemon.ram.pool.grow(daemon.ram.pool.max_extents - daemon.ram.pool.made + len(daemon.ram.pool.ready))
        return daemon.ram.pool.made
    return {"error": f"unknown question {question!r}"}


async def _serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    logs.set_up("warning", "text")
    daemon = Daemon(settings)
    await daemon.start()
    spare_the_collector()
    go_first(settings.nice)
    questions = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(questions), sys.stdin)
    print(json.dumps("ready"), flush=True)

    async def talk() -> None:
        while line := await questions.readline():
            print(json.dumps(await _answer(daemon, line.decode().strip())), flush=True)
        stop.set()  # whoever started us is gone

    talking = asyncio.create_task(talk())
    await stop.wait()
    talking.cancel()
    await daemon.drain()


def main() -> None:
    keep_the_heap()
    uvloop.run(_serve(Settings.load(None, **json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
