"""Guards of the client library: deadlines, reconnection, and what ended calls leave behind."""

from __future__ import annotations

from typing import Any

from tests.faults.guards.registry import off, put


@off("late replies")
def late_replies() -> None:
    from forebay.clients import transport

    put(transport, "undo", lambda reply: None)


@off("call deadline")
def call_deadline() -> None:
    from forebay.clients.transport import BlockingTransport, LoopTransport

    blocking, looping = BlockingTransport.wait, LoopTransport.wait
    put(BlockingTransport, "wait", lambda self, pending, deadline_s: blocking(self, pending, deadline_s + 4.0))
    put(LoopTransport, "wait", lambda self, pending, deadline_s: looping(self, pending, deadline_s + 4.0))


@off("process check")
def process_check() -> None:
    from forebay.clients.transport import OwnProcess

    put(OwnProcess, "check", lambda self: None)


@off("cancellation")
def cancellation() -> None:
    from forebay.clients.transport import LoopTransport

    put(LoopTransport, "_abandon", lambda self, pending: None)


@off("abort")
def abort() -> None:
    from forebay.clients.writing import AllocationCore

    def abort(self: Any) -> None:
        life = self._life
        if life is not None:
            self._close_views()
            self._finish(life)

    put(AllocationCore, "abort", abort)


@off("reconnection")
def reconnection() -> None:
    from forebay.clients.session import ClientCore
    from forebay.kvstore.errors import DaemonUnavailable

    real = ClientCore._introduce

    def introduce(self: Any, deadline_s: float) -> Any:
        self.counters["introduced"] += 1
        if self.counters["introduced"] > 1:
            raise DaemonUnavailable("the daemon has gone")
        return (yield from real(self, deadline_s))

    put(ClientCore, "_introduce", introduce)
