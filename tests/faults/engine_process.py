"""An engine in a process of its own that does one thing as told, says so, and waits: what gets stopped, killed and forked.

`python -m tests.faults.engine_process SOCKET STATE` prints "there" once it has reached STATE, then obeys single words on
its standard input. Always true: it never cleans up by itself, as an engine that is killed doesn't.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay.clients import Client
from forebay.kvstore import wire
from forebay.kvstore.errors import ForebayError
from tests.daemon_process import ROOT, WAIT_S, RawSession, facts_of, payload_of, tokens_of
from tests.faults.guards import switch_off

BLOCKS = 20
FACTS = facts_of(salt=b"engine")
GARBAGE = b"\xee"


class EngineProcess:
    """Starts one and speaks with it."""

    def __init__(self, socket: Path, state: str) -> None:
        command = [sys.executable, "-m", "tests.faults.engine_process", str(socket), state]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.hear() == "there"

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "the engine says nothing"
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ask(self, word: str) -> str:
        self.tell(word)
        return self.hear()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.stdout.close()


class Engine:
    """What runs in the process: a client brought into some state."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.client = Client(socket, engine_id="engine")
        self.held: Any = None

    def _space(self) -> tuple[Any, list[int], list[bytes], list[bytes]]:
        space = self.client.open(FACTS)
        tokens = tokens_of(7, BLOCKS)
        self.namespace, self.keys = space.id, space.keys(tokens)
        keys = self.keys
        return space, tokens, keys, [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]

    def hello(self) -> None:
        pass

    def open(self) -> None:
        self._space()

    def map(self) -> None:
        space, tokens, keys, payloads = self._space()
        space.put(keys, tokens, payloads)

    def allocate(self) -> None:
        space, tokens, keys, _ = self._space()
        self.held = space.allocate(keys, tokens)

    def write(self) -> None:
        self.allocate()
        self.scribble()

    def commit(self) -> None:
        """A commit is sent and its answer not waited for."""
        space, tokens, keys, payloads = self._space()
        self.held = space.allocate(keys, tokens)
        for slot in self.held.slots:
            slot.view[:] = payloads[slot.index]
        step = self.held.commit_slots()
        next(step)
        self.step = step

    def acquire(self) -> None:
        self.map()
        space, tokens, keys, _ = self._space()
        self.held = space.acquire(keys, tokens)
        assert len(self.held) == BLOCKS

    def asked(self) -> None:
        """An allocate and an acquire are sent, and their answers never read."""
        self.raw = RawSession(self.socket)
        self.raw.hello()
        keys = self._space()[2]
        handle = self.raw.open(FACTS).handle
        for _ in range(20):
            self.raw.send(wire.Allocate(handle, 0, b"".join(keys)))
            self.raw.send(wire.Acquire(handle, 0, b"".join(keys)))

    def prefetch(self) -> None:
        """Loads from a tier below RAM are under way."""
        space, tokens, keys, payloads = self._space()
        space.put(keys, tokens, payloads)
        space.flush(keys, timeout_s=WAIT_S)
        for seed in range(100, 130):  # push them out of RAM
            more = tokens_of(seed, 40)
            space.put(space.keys(more), more, payloads * 2)
        assert space.prefetch(keys, timeout_s=WAIT_S) > 0

    # --- what it does when told ---------------------------------------------------------------------------------------

    def scribble(self) -> str:
        """Write into all places it was given, as a copy that goes on does."""
        for slot in self.held.slots:
            slot.view[:] = GARBAGE * len(slot.view)
        return "scribbled"

    def cut(self) -> str:
        """Its session ends, as by a broken socket, while it goes on."""
        life = self.client._life
        assert life is not None
        life.transport.close()
        return "cut"

    def finish(self) -> str:
        """Ends what it holds; its next call opens a new session and says that the old one's copies have stopped."""
        try:
            if hasattr(self.held, "commit"):
                self.held.commit()
            else:
                self.held.release()
        except ForebayError as exc:
            return type(exc).__name__
        return "finished"

    def call(self) -> str:
        try:
            self.client.stats()
        except ForebayError as exc:
            return type(exc).__name__
        return "called"

    def more(self) -> str:
        """Tries to hold more on a new session, without a word about the old one."""
        with RawSession(self.socket) as session:
            session.hello("engine")
            handle = session.open(facts_of(salt=b"more")).handle
            try:
                session.call(wire.Acquire(handle, 0, bytes(16)))
            except ForebayError as exc:
                acquire = type(exc).__name__
            try:
                session.call(wire.Allocate(handle, 0, bytes(16)))
            except ForebayError as exc:
                assert type(exc).__name__ == acquire
                return acquire
        return "given"

    def abandon_many(self) -> str:
        """Opens sessions that map memory and closes them, one after the other."""
        for _ in range(1000):
            with RawSession(self.socket) as session:
                try:
                    session.hello()
                except ForebayError as exc:
                    return type(exc).__name__
                assert session.call(wire.MapExtents([1])).extents == [1]
        return "all"

    def fork(self) -> str:
        """A child that keeps all it inherited and sleeps."""
        child = os.fork()
        if not child:
            signal.pause()
        return str(child)

    def read(self) -> str:
        """Whether every byte of what it leased is still right."""
        pairs = zip(self.keys, self.held.views, strict=True)
        good = all(view == payload_of(self.namespace, key, len(view)) for key, view in pairs)
        return "good" if good else "damaged"


def main(socket: Path, state: str) -> None:
    switch_off()
    engine = Engine(socket)
    getattr(engine, state)()
    print("there", flush=True)
    for line in sys.stdin:
        act: Callable[[], str] = getattr(engine, line.strip())
        print(act(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
