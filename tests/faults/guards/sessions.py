"""Guards of the daemon: its doors, its sessions, and what they hold."""

from __future__ import annotations

import asyncio
import fcntl
from typing import Any

from tests.faults.guards.registry import off, put


@off("quarantine", quick=True)
def quarantine() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "_process_is_gone", staticmethod(lambda pidfd: True))


@off("exit watch")
def exit_watch() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "_process_exited", lambda self, orphan: self._loop.remove_reader(orphan.pidfd))


@off("session watch")
def session_watch() -> None:
    from forebay.server.sessions import Registry

    def add(self: Any, session: Any) -> None:
        self.sessions[session.id] = session

    put(Registry, "add", add)


@off("deadline sweep")
def deadline_sweep() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "overdue", lambda self, now_s: [])


@off("orphan bound")
def orphan_bound() -> None:
    from forebay.server.sessions import Registry

    put(Registry, "orphans_of", lambda self, pid, besides=(): 0)


@off("trust domains")
def trust_domains() -> None:
    from forebay.server.daemon import Daemon

    put(Daemon, "domain_of", lambda self, *who: self.ram.domain("default/0"))


@off("socket lock")
def socket_lock() -> None:
    put(fcntl, "flock", lambda *args: None)


@off("frame limit")
def frame_limit() -> None:
    from forebay.kvstore import framing

    real = framing.parse_header
    put(framing, "parse_header", lambda buffer, offset, limit: real(buffer, offset, 1 << 40))


@off("dead socket")
def dead_socket() -> None:
    from forebay.server.door import UnixListener

    put(UnixListener, "_remove_dead_socket", lambda self: None)


@off("end of stream")
def end_of_stream() -> None:
    from forebay.kvstore.framing import FrameBuffer

    real = FrameBuffer.receive

    def receive(self: Any, sock: Any, *, descriptors: bool) -> int:
        count = real(self, sock, descriptors=descriptors)
        if not count:
            raise BlockingIOError
        return count

    put(FrameBuffer, "receive", receive)


@off("pending answer")
def pending_answer() -> None:
    from forebay.kvstore.wire import SlotStatus

    _wait_while(SlotStatus.PENDING)


@off("refusal")
def refusal() -> None:
    from forebay.kvstore.wire import SlotStatus

    _wait_while(SlotStatus.REFUSED)


@off("loopback only")
def loopback_only() -> None:
    from forebay.server import settings

    put(settings, "is_loopback", lambda host: True)


def _wait_while(status: int) -> None:
    """Have `allocate` wait until no object has this status, where it answers at once."""
    from forebay.kvstore import wire
    from forebay.server.verbs import SessionVerbs

    real = SessionVerbs._allocate

    async def allocate(self: Any, request: Any) -> Any:
        while True:
            answer = real(self, request)
            reply = await answer if asyncio.iscoroutine(answer) else answer
            if status not in reply.statuses:
                return reply
            if reply.allocation:
                self._abort(wire.Abort(reply.allocation))
            await asyncio.sleep(0.01)

    put(SessionVerbs, "_allocate", allocate)
