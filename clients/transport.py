"""Requests and replies over one socket: blocking for `Client`, on the event loop for `AsyncClient`.

Covers matching replies to requests, payload that goes with them, deadlines, and what happens to a reply that nobody waits for
any more.
Knows verbs only by their reply types. Always true: a wait ends by its deadline; a lease or an allocation that arrives too late
is given back; when the connection breaks every wait ends with `DaemonUnavailable`.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, Protocol, get_args

import msgspec

from forebay.clients.connecting import connect, connect_on_loop
from forebay.kvstore import wire
from forebay.kvstore.address import Address
from forebay.kvstore.errors import (
    ClientError,
    DaemonTimeout,
    DaemonUnavailable,
    MalformedFrame,
    ProtocolError,
    UsedAfterFork,
)
from forebay.kvstore.framing import FrameBuffer, FrameSocket
from forebay.kvstore.looking import Looking
from forebay.kvstore.payload import PIECE_BYTES, Arriving, Sink, Views
from forebay.kvstore.tls import Stream, pending_bytes
from forebay.kvstore.wire import Kind, Request, encode_frame

MAX_REPLY_BYTES: Final = 256 << 20
_LOOK_S: Final = (
    1e-4 if len(os.sched_getaffinity(0)) > 1 else 0.0
)  # the daemon needs a core of its own to answer meanwhile


def _reply_type(request: type[Request[Any]]) -> Any:
    reply = get_args(request.__orig_bases__[0])[0]  # type: ignore[attr-defined]
    return wire.Done if not isinstance(reply, type) else reply


_DECODERS: Final[dict[type, msgspec.msgpack.Decoder[Any]]] = {
    cls: msgspec.msgpack.Decoder(_reply_type(cls)) for cls in wire.REQUESTS
}
_MAX_NOTICES: Final = 1024  # kept for callers that ask; the oldest go
_LOADED: Final = msgspec.msgpack.Decoder(wire.Loaded)


# Of a reply that payload follows: where that goes. Raises DaemonUnavailable for a reply that can't be true.
Expects = Callable[[Any], Arriving]
# Requests that take about as long as each other: of one verb, with frames of like size.
Alike = tuple[type, int]
# Of a request's id: the payload that follows it.
Payload = Callable[[int], Views]


class Pending:
    """A request that was sent. With `expects` it has ended when the payload that follows its reply is here, too."""

    __slots__ = (
        "abandoned", "alike", "arriving", "decoder", "descriptors", "done", "error", "expects", "future", "reply",
    )  # fmt: skip

    def __init__(
        self, decoder: msgspec.msgpack.Decoder[Any], expects: Expects | None = None, alike: Alike | None = None
    ) -> None:
        self.decoder = decoder
        self.alike = alike
        self.expects = expects
        self.arriving: Arriving | None = None
        self.reply: Any = None
        self.error: Exception | None = None
        self.descriptors: list[int] = []
        self.done = False
        self.abandoned = False
        self.future: asyncio.Future[None] | None = None

    def ended(self) -> bool:
        """Whether the answer, good or bad, is here. Another thread may make it so at any time."""
        return self.done

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.reply


def undo(reply: Any) -> Request[Any] | None:
    """What gives back a reply that came too late to be used."""
    if isinstance(reply, wire.AcquireReply) and reply.lease:
        return wire.Release(reply.lease)
    if isinstance(reply, wire.AllocateReply) and reply.allocation:
        return wire.Abort(reply.allocation)
    return None


class Replies:
    """Requests under way, by id, and their ends. Shared by both transports; the caller keeps threads apart."""

    def __init__(self) -> None:
        self._last_id = 0
        self._pending: dict[int, Pending] = {}
        self.loaded: dict[int, int] = {}  # notices: ticket -> blocks
        self.fault: ProtocolError | None = None  # why the daemon ended the session

    def register(self, request: Request[Any], expects: Expects | None = None) -> tuple[int, bytes, Pending]:
        """Its id, its frame, and what becomes of it."""
        self._last_id = self._last_id % 0xFFFFFFFF + 1
        frame = encode_frame(Kind.REQUEST, self._last_id, request)
        pending = Pending(_DECODERS[type(request)], expects, (type(request), len(frame).bit_length()))
        self._pending[self._last_id] = pending
        return self._last_id, frame, pending

    def payload_arrives(self, request_id: int, length: int) -> Sink:
        """Who takes a payload frame's body. Raises: ProtocolError: nobody."""
        pending = self._pending.get(request_id)
        if pending is None or pending.arriving is None or not 0 < length <= pending.arriving.left:
            raise MalformedFrame(f"the daemon sent a payload frame of {length} bytes that no reply has announced")
        return pending.arriving

    def receive(self, kind: int, request_id: int, body: memoryview, inbox: FrameBuffer) -> tuple[Pending | None, Any]:
        """File one frame. Returns the request that ended by it, and what undoes it when nobody waits.

        Raises: ProtocolError: the daemon sent what can't be understood.
        """
        if kind == Kind.NOTICE:
            self.loaded[request_id] = _LOADED.decode(body).blocks
            if len(self.loaded) > _MAX_NOTICES:
                del self.loaded[next(iter(self.loaded))]
            return None, None
        pending = self._pending.pop(request_id, None)
        if kind == Kind.PAYLOAD:
            if pending is not None and pending.arriving is not None and pending.arriving.left:
                self._pending[request_id] = pending
                return None, None
        elif kind == Kind.ERROR:
            error = wire.decode_error(body)
            if pending is None:
                self.fault = error  # of the session, not of one request
                return None, None
            pending.error = error
        elif pending is not None:
            try:
                pending.reply = pending.decoder.decode(body)
            except (msgspec.DecodeError, msgspec.ValidationError) as exc:
                pending.error = DaemonUnavailable(f"the daemon's answer can't be read: {exc}")
            self._claim(pending, inbox)
            if pending.expects is not None and pending.error is None:
                pending.arriving = pending.expects(pending.reply)
                if pending.arriving.left:
                    self._pending[request_id] = pending
                    return None, None
        if pending is None:
            return None, None
        pending.done = True
        return pending, undo(pending.reply) if pending.abandoned else None

    @staticmethod
    def _claim(pending: Pending, inbox: FrameBuffer) -> None:
        """Descriptors travel with their reply's first byte, so they are at the head of the queue now."""
        count = 0
        if isinstance(pending.reply, wire.HelloReply):
            count = 1
        elif isinstance(pending.reply, wire.MapReply):
            count = len(pending.reply.extents)
        pending.descriptors = [inbox.descriptors.popleft() for _ in range(min(count, len(inbox.descriptors)))]
        if pending.abandoned:
            for descriptor in pending.descriptors:
                os.close(descriptor)
            pending.descriptors = []

    def fail_all(self, error: Exception) -> list[Pending]:
        failed = list(self._pending.values())
        self._pending.clear()
        for pending in failed:
            pending.error = error
            pending.done = True
        return failed


class Transport(Protocol):
    """What the client core needs of either transport."""

    closed: bool

    def start(
        self,
        request: Request[Any],
        deadline_s: float | None = None,
        *,
        payload: Payload | None = None,
        expects: Expects | None = None,
    ) -> Pending:
        """Send a request, and its payload. Raises: DaemonUnavailable; DaemonTimeout (the daemon stopped reading);
        UsedAfterFork."""

    def hung_up(self) -> bool:
        """Whether the connection has ended. Asked before a call, so that a daemon that was restarted costs no failed one."""

    def close(self) -> None: ...


def _gone(replies: Replies, address: Address) -> ClientError:
    if replies.fault is not None:
        return DaemonUnavailable(f"the daemon ended the session: {replies.fault}")
    return DaemonUnavailable(f"the connection to the daemon at {address} broke")


class OwnProcess:
    """The process that made it. A child's frames would mix with its parent's on one socket, and release what that holds."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def check(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork("this client was made before fork(): open a new one in the child")


class BlockingTransport:
    """Any number of threads over one socket, without a thread of its own.

    Whoever waits first reads for all: a lone caller gets its answer without a hand-over between threads, which would cost
    more than the round trip itself.
    """

    def __init__(self, address: Address, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self.closed = False
        self._replies = Replies()
        self._inbox = FrameBuffer(MAX_REPLY_BYTES, self._replies.payload_arrives)
        self._sending = threading.Lock()
        self._turn = threading.Condition()
        self._reading = False
        self._timeout_s = timeout_s
        self._process = OwnProcess()
        self._sock: Stream = connect(address, tls, timeout_s=timeout_s)
        self._descriptors = not isinstance(address, tuple)
        self._lookings: defaultdict[Alike | None, Looking] = defaultdict(Looking)
        self._arrivals = select.poll()
        self._arrivals.register(self._sock.fileno(), select.POLLIN)

    def start(
        self,
        request: Request[Any],
        deadline_s: float | None = None,
        *,
        payload: Payload | None = None,
        expects: Expects | None = None,
    ) -> Pending:
        self._process.check()
        if deadline_s is None:
            deadline_s = time.monotonic() + self._timeout_s
        if not self._sending.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise DaemonTimeout("other calls wait for the daemon to read; it may be overloaded or stopped")
        try:
            if self.closed:
                raise _gone(self._replies, self.address)
            request_id, frame, pending = self._replies.register(request, expects)
            try:
                self._send(frame, deadline_s)
                if payload is not None:
                    self._send_payload(payload(request_id), deadline_s)
            except TimeoutError as exc:
                self._break()
                raise DaemonTimeout("the daemon stopped reading; it may be overloaded or stopped") from exc
            except (OSError, ValueError) as exc:
                # A frame may have gone out in part: nothing that follows it could be understood.
                self._break()
                raise _gone(self._replies, self.address) from exc
        finally:
            self._sending.release()
        return pending

    def _send(self, frame: bytes, deadline_s: float) -> None:
        left: bytes | memoryview = frame
        while True:
            try:
                sent = self._sock.send(left)
            except BlockingIOError:
                sent = 0
            if sent == len(left):
                return
            left = memoryview(left)[sent:]
            self._await_room(deadline_s)

    def _send_payload(self, payload: Views, deadline_s: float) -> None:
        while payload.left:
            try:
                payload.advance(self._sock.sendmsg(payload.window(PIECE_BYTES)))
            except BlockingIOError:
                self._await_room(deadline_s)

    def _await_room(self, deadline_s: float) -> None:
        poller = select.poll()
        poller.register(self._sock.fileno(), select.POLLOUT)
        if not poller.poll(max(0.0, 1e3 * (deadline_s - time.monotonic()))):
            raise TimeoutError

    def wait(self, pending: Pending, deadline_s: float) -> Any:
        """The reply. Raises: DaemonTimeout, DaemonUnavailable, or what the daemon answered (ProtocolError)."""
        turn = self._turn
        if pending.ended():
            return pending.result()
        with turn:
            while self._reading and not pending.ended():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not turn.wait(left_s):
                    return self._give_up(pending)
            if pending.ended():
                return pending.result()
            self._reading = True
        try:
            while not pending.ended():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._read(left_s, self._lookings[pending.alike]):
                    return self._give_up(pending)
        finally:
            with turn:
                self._reading = False
                turn.notify_all()
        return pending.result()

    def _give_up(self, pending: Pending) -> Any:
        with self._turn:
            pending.abandoned = True
            if pending.ended():
                return pending.result()
        raise DaemonTimeout("the daemon did not answer within the call's deadline; it may be overloaded or stopped")

    def _read(self, timeout_s: float, looking: Looking) -> bool:
        """Receive once and file what is whole. False: nothing came in time."""
        if not self._await_arrival(timeout_s, looking):
            return False
        try:
            count = self._inbox.receive(self._sock, descriptors=self._descriptors)
            if count == 0:
                self._break()
                return True
            while (frame := self._inbox.next_frame()) is not None:
                kind, request_id, body = frame
                # Under the lock, so that a reply is either used by its waiter or given back, never both.
                with body, self._turn:
                    ended, undoing = self._replies.receive(kind, request_id, body, self._inbox)
                    if ended is not None:
                        self._turn.notify_all()
                if undoing is not None:
                    self.start(undoing).abandoned = True
        except BlockingIOError:
            pass  # woken for nothing
        except (OSError, ProtocolError, DaemonUnavailable):
            self._break()
        return True

    def _await_arrival(self, timeout_s: float, looking: Looking) -> bool:
        """Look for a short while before sleeping: most answers come sooner than a sleeping core wakes.

        [M] in a virtual machine a round trip of two sleepers takes 64 us, of two that look 8 us. The GIL is free meanwhile.
        """
        if pending_bytes(self._sock):
            return True
        if _LOOK_S and looking.worth_it():
            look_until_s = time.perf_counter() + min(_LOOK_S, timeout_s)
            while time.perf_counter() < look_until_s:
                if self._arrivals.poll(0):
                    looking.paid()
                    return True
            looking.in_vain()
        return bool(self._arrivals.poll(1e3 * timeout_s))

    def hung_up(self) -> bool:
        if self.closed:
            return True
        end = select.poll()  # one a call: two threads may not ask the same one at once
        try:
            end.register(self._sock.fileno(), select.POLLRDHUP)
        except ValueError:
            return True  # another thread closed it just now
        return bool(end.poll(0))

    def _break(self) -> None:
        self.closed = True
        self._sock.close()
        self._replies.fail_all(_gone(self._replies, self.address))
        with self._turn:
            self._turn.notify_all()

    def close(self) -> None:
        """Idempotent."""
        with self._sending:
            if not self.closed:
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
                except OSError:
                    pass
                self._break()
        self._inbox.close()


class LoopTransport(FrameSocket):
    """One socket on the running event loop."""

    def __init__(self, sock: Stream, address: Address) -> None:
        local = not isinstance(address, tuple)
        super().__init__(sock, max_frame_bytes=MAX_REPLY_BYTES, descriptors=local, payload=not local)
        self.address = address
        self._process = OwnProcess()
        self._replies = Replies()
        self.resume()

    @classmethod
    async def connect(cls, address: Address, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> LoopTransport:
        """Raises: DaemonUnavailable, DaemonTimeout."""
        return cls(await connect_on_loop(address, tls, timeout_s=timeout_s), address)

    def start(
        self,
        request: Request[Any],
        deadline_s: float | None = None,
        *,
        payload: Payload | None = None,
        expects: Expects | None = None,
    ) -> Pending:
        self._process.check()
        if self.closed:
            raise _gone(self._replies, self.address)
        request_id, frame, pending = self._replies.register(request, expects)
        self.send(frame)
        if payload is not None:
            self.send_payload(payload(request_id))
        return pending

    def payload_arrives(self, request_id: int, length: int) -> Sink:
        return self._replies.payload_arrives(request_id, length)

    def hung_up(self) -> bool:
        return self.closed  # the loop tells

    async def wait(self, pending: Pending, deadline_s: float) -> Any:
        """The reply. Raises: DaemonTimeout, DaemonUnavailable, or what the daemon answered (ProtocolError)."""
        if not pending.ended():
            pending.future = self._loop.create_future()
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await pending.future
            except TimeoutError as exc:
                self._abandon(pending)
                raise DaemonTimeout("the daemon did not answer within the call's deadline") from exc
            except asyncio.CancelledError:
                self._abandon(pending)
                raise
        return pending.result()

    def _abandon(self, pending: Pending) -> None:
        pending.abandoned = True
        while pending.descriptors:
            os.close(pending.descriptors.pop())
        if pending.ended() and (undoing := undo(pending.reply)) is not None and not self.closed:
            self.start(undoing).abandoned = True

    def frame_received(self, kind: int, request_id: int, body: memoryview) -> None:
        try:
            ended, undoing = self._replies.receive(kind, request_id, body, self.inbox)
        except (ProtocolError, DaemonUnavailable, msgspec.DecodeError, msgspec.ValidationError):
            self.close()
            return
        if undoing is not None and not self.closed:
            self.start(undoing).abandoned = True
        if ended is not None and ended.future is not None and not ended.future.done():
            ended.future.set_result(None)

    def stream_broken(self, error: ProtocolError) -> None:
        self.close()

    def connection_ended(self) -> None:
        for pending in self._replies.fail_all(_gone(self._replies, self.address)):
            if pending.future is not None and not pending.future.done():
                pending.future.set_result(None)
