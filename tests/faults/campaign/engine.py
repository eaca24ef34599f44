"""An engine process under load: stores, reads and checks blocks, whatever happens to its daemon; what gets killed itself, too.

Some of its keys stand for two prompts, as after a hash collision: their payloads differ, and so do their tokens. Always true:
it never takes a block for good without having compared every byte after its copy was seen to be valid.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forebay.clients import Client, Lease, Namespace
from forebay.kvstore.errors import ClientError, ProtocolError
from tests.daemon_process import facts_of, payload_of, tokens_of
from tests.faults.campaign.checks import switch_off
from tests.faults.campaign.recovering import NURSERY, PRELOADED

BLOCKS = 12
PROMPTS = 24
COLLIDING = 4  # of these, the first have a twin with the same keys
CALL_S = 3.0


@dataclass
class Report:
    """What one engine saw. resumed_s: when it was served again, each time after it had not been."""

    reads: int = 0
    hits: int = 0
    asked: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)
    resumed_s: list[float] = field(default_factory=list)
    slowest_s: float = 0.0


class Engine:
    """Starts an engine and ends it."""

    def __init__(self, path: Path, seed: int, *, share: int = 0, without: str = "", calm: bool = False) -> None:
        """`share`: engines with the same number use the same prompts. `calm`: nothing of its own doing goes wrong."""
        NURSERY.set_forkserver_preload(PRELOADED)
        self._pipe, there = NURSERY.Pipe()
        self._served = NURSERY.Value("q", 0, lock=False)
        work = (path, seed, share, without, calm, there, self._served)
        self._process: BaseProcess = NURSERY.Process(target=_work, args=work)
        self._process.start()
        there.close()

    @property
    def served(self) -> int:
        """Requests of its that were served so far."""
        return int(self._served.value)

    def ask(self) -> Report:
        """End it in order, and have its report."""
        self._pipe.send("end")
        assert self._pipe.poll(60.0), "an engine hangs"
        report: Report = self._pipe.recv()
        self._process.join(10.0)
        self._process.close()
        self._pipe.close()
        return report

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10.0)
        self._process.close()
        self._pipe.close()


def _work(path: Path, seed: int, share: int, without: str, calm: bool, pipe: Connection, served: Any) -> None:
    switch_off(without)
    work = _Work(path, random.Random(seed), share, calm)
    try:
        while not pipe.poll(0):
            work.step()
            served.value += work.served
        work.close()
        pipe.send(work.report)
    except EOFError:
        os._exit(1)  # whoever started it has gone


class _Work:
    def __init__(self, path: Path, rng: random.Random, share: int, calm: bool) -> None:
        self.rng, self.calm = rng, calm
        self.report = Report()
        self.path, self.share = path, share
        self._client: Client | None = None
        self.facts = facts_of(salt=b"campaign %d" % share)
        self.space: Namespace | None = None
        self.served = True
        self.stored: set[tuple[int, int]] = set()  # (prompt, twin) that this engine has stored
        self.kept: tuple[bytes, Lease] | None = None  # a lease that outlives its daemon, with that daemon's epoch

    @property
    def client(self) -> Client:
        if self._client is None:  # it connects at once, and there may be no daemon just now
            self._client = Client(self.path, engine_id=f"engine {self.share}", timeout_s=CALL_S)
        return self._client

    def step(self) -> None:
        """One request, and what it ended in."""
        began_s = time.monotonic()
        try:
            if self.space is None:
                self.space = self.client.open(self.facts)
            self._request(self.space)
        except (ClientError, ProtocolError) as exc:
            self.report.misses[type(exc).__name__] += 1
            self.served = False
            time.sleep(0.005)
        except Exception as exc:
            self.report.wrong.append(f"an engine failed: {exc!r}")
        else:
            if not self.served:
                self.served = True
                self.report.resumed_s.append(time.monotonic())
        self.report.slowest_s = max(self.report.slowest_s, time.monotonic() - began_s)

    def _request(self, space: Namespace) -> None:
        prompt = self.rng.randrange(PROMPTS)
        twin = self.rng.randrange(2) if prompt < COLLIDING else 0
        keys = space.keys(tokens_of(1000 + prompt, BLOCKS))
        tokens = tokens_of(1000 + prompt + 100 * twin, BLOCKS)
        found = self._read(space, prompt, twin, keys, tokens)
        if found < BLOCKS:
            payloads = [self._payload(space, key, twin) for key in keys]
            space.put(keys, tokens, payloads)
            self.stored.add((prompt, twin))
        act = self.rng.random()
        if act < 0.03:
            self._delete_under_a_lease(space, prompt, keys, tokens)
        elif act < 0.06 and not self.calm:
            self._cut()
        self._keep_one(space, keys, tokens)

    def _keep_one(self, space: Namespace, keys: list[bytes], tokens: list[int]) -> None:
        """Hold a lease until its daemon has ended: then it is good no longer, though its memory is still there."""
        if self.kept is None:
            lease = space.acquire(keys, tokens, timeout_s=CALL_S)
            self.kept = self.client.boot_epoch, lease  # whose it is: a daemon that was restarted is met by the call
            return
        epoch, lease = self.kept
        if self.client.boot_epoch not in (b"", epoch):
            if len(lease) and lease.valid():
                self.report.wrong.append("a lease of an ended daemon is good")
            self._let_go()

    def _let_go(self) -> None:
        if self.kept is not None:
            self.kept[1].release()
            self.kept = None

    def _payload(self, space: Namespace, key: bytes, twin: int) -> bytes:
        return payload_of(space.id + bytes([twin]), key, space.layout().payload_bytes)

    def _read(self, space: Namespace, prompt: int, twin: int, keys: list[bytes], tokens: list[int]) -> int:
        """Lease a run, copy it, see that the lease is good, and only then believe the bytes."""
        with space.acquire(keys, tokens, wait_s=0.5, timeout_s=CALL_S) as lease:
            copies = [bytes(view) for view in lease.views]
            if self.rng.random() < 0.1:
                time.sleep(self.rng.uniform(0.0, 0.3))  # an engine that is slow with its copies
                copies = [bytes(view) for view in lease.views]
            good = lease.valid()
        return self._judge(space, prompt, twin, keys, copies) if good else 0

    def _judge(self, space: Namespace, prompt: int, twin: int, keys: list[bytes], copies: list[bytes]) -> int:
        self.report.reads += 1
        if (prompt, twin) in self.stored and prompt >= COLLIDING:
            self.report.hits += len(copies)
            self.report.asked += BLOCKS
        for key, copy in zip(keys, copies, strict=False):
            if copy != self._payload(space, key, twin):
                self.report.wrong.append(f"wrong bytes for prompt {prompt}, twin {twin}")
        return len(copies)

    def _delete_under_a_lease(self, space: Namespace, prompt: int, keys: list[bytes], tokens: list[int]) -> None:
        """What was deleted is no longer good, for whoever holds it."""
        with space.acquire(keys, tokens, timeout_s=CALL_S) as lease:
            if not len(lease):
                return
            space.delete(keys)
            self.stored.discard((prompt, 0))
            self.stored.discard((prompt, 1))
            self.report.fired["delete under a lease"] += 1
            if lease.valid():
                self.report.wrong.append("a lease on deleted blocks is good")

    def _cut(self) -> None:
        """The connection breaks."""
        life: Any = self.client._life
        if life is not None and not life.transport.closed:
            self.report.fired["cut connection"] += 1
            life.transport._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._let_go()
        if self._client is not None:
            self._client.close()
