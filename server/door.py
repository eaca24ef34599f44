"""The session door's sockets: frames in, frames and file descriptors out.

Covers the Unix listener (TCP's is server/netdoor.py) and one `Connection` a peer: requests in, answers out, payload on its way,
bounds and back-pressure. Bytes are cut into frames by kvstore/framing.py; what a request means is decided by the `Handler`.
Always true: no request, however malformed, raises out of here; a peer that doesn't read costs bounded memory and then its
session.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from forebay.kvstore import errors
from forebay.kvstore.address import fallback_folder, private_folder
from forebay.kvstore.errors import ForebayError, MalformedFrame, ProtocolError
from forebay.kvstore.framing import FrameSocket
from forebay.kvstore.payload import Sink, Views, framed, framed_bytes
from forebay.kvstore.tls import Stream
from forebay.kvstore.wire import (
    AnyRequest,
    Fill,
    Kind,
    Put,
    decode_request,
    encode_error,
    encode_frame,
)
from forebay.server.accepting import Accepting
from forebay.server.incoming import Incoming
from forebay.server.rounds import Rounds

log = logging.getLogger("forebay.door")

_MAX_RUNNING: Final = 64  # requests of one peer in work at once; more wait in its socket
_MAX_SENDING: Final = 8  # payloads on their way to one peer; further requests wait in its socket
_SO_PEERPIDFD: Final = 77  # Linux 6.5


class Objects(msgspec.Struct):
    """Payload that follows a reply: `count` objects of `object_bytes`, drawn as they are sent; then `ended` is called once."""

    count: int
    object_bytes: int
    objects: Iterator[memoryview]
    ended: Callable[[], None]


Answer = msgspec.Struct | tuple[msgspec.Struct, Sequence[int] | Objects]


class DaemonAlreadyRunning(ForebayError):
    """Another daemon serves this socket."""


class Handler(Protocol):
    """Decides what requests mean."""

    def handle(self, request: AnyRequest) -> Answer | Coroutine[Any, Any, Answer]:
        """The reply, a reply with descriptors to send, or a coroutine for either. Raises: ProtocolError."""

    def closed(self) -> None:
        """The peer is gone. Called once."""


class Peer(msgspec.Struct, frozen=True):
    """Who connected, as the kernel says. Over TCP it says nothing: all are 0, and `remote` is true."""

    pid: int
    uid: int
    gid: int
    remote: bool = False


class Connection(FrameSocket):
    """One peer's requests: decoded, handed to the handler, answered in whatever order they end."""

    def __init__(self, sock: Stream, *, max_frame_bytes: int, rounds: Rounds, remote: bool = False) -> None:
        """`remote`: over TCP. Such a peer gets no descriptors, and payload travels inline."""
        super().__init__(sock, max_frame_bytes=max_frame_bytes, descriptors=False, payload=remote)
        self._running: set[asyncio.Task[None]] = set()
        self._handler: Handler | None = None
        self._sending = 0
        self._late: asyncio.TimerHandle | None = None
        self.incoming: Incoming | None = (
            None  # the payload of the `put` or `fill` that came last, until all of it is here
        )
        if remote:
            self.peer = Peer(0, 0, 0, remote=True)
        else:
            self.peer = Peer(*struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))
        self.known = False  # whether the peer has introduced itself
        self._rounds, self._owner = rounds, ""  # nobody's until then
        rounds.join(self._owner)

    def open_pidfd(self) -> int | None:
        """A pidfd of the peer's process, or None where the kernel can't name it (another pid namespace).

        Raises: OverLimit: no descriptor is left. A session without one would keep its memory after its process's end.
        """
        try:
            raw = self._sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
            pidfd: int = struct.unpack("i", raw)[0]
            os.set_inheritable(pidfd, False)
            return pidfd
        except OSError as exc:
            _check_descriptors(exc)  # else an older kernel
        try:
            return os.pidfd_open(self.peer.pid) if self.peer.pid > 0 else None
        except OSError as exc:
            _check_descriptors(exc)
            return None

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self.resume()

    def introduce_until(self, deadline_s: float) -> None:
        """Drop the peer at this time of the loop's clock, unless it is `introduced` by then."""
        self._late = self._loop.call_at(deadline_s, self._too_late)

    def introduced(self, tenant: str) -> None:
        """From now on the peer is known, and its frames take its tenant's turns."""
        self.known = True
        if self._late is not None:
            self._late.cancel()
        self._rounds.leave(self._owner)
        self._owner = tenant
        self._rounds.join(tenant)

    def may_begin_turn(self) -> bool:
        return self._rounds.may_begin(self._owner, self.resume)

    def turn_ended(self, seconds: float) -> None:
        self._rounds.spent(self._owner, seconds)

    def _too_late(self) -> None:
        log.warning("dropped a peer that did not introduce itself in time")
        self.close()

    def may_take_more(self) -> bool:
        if self.incoming is not None and not self.incoming.ready:
            return False
        return len(self._running) < _MAX_RUNNING and self._sending < _MAX_SENDING

    def payload_arrives(self, request_id: int, length: int) -> Sink:
        incoming = self.incoming
        if incoming is None or incoming.request_id != request_id or not 0 < length <= incoming.left:
            raise MalformedFrame(
                f"a payload frame of {length} bytes for request {request_id}, which has announced no such"
            )
        return incoming

    def _announced(self, request_id: int, request: AnyRequest) -> None:
        """Note that payload follows a request."""
        if isinstance(request, (Put, Fill)) and self.peer.remote:
            if self.incoming is not None:
                raise MalformedFrame(f"a request with payload while {self.incoming.left} bytes of another are missing")
            if request.payload_bytes > 0:
                self.incoming = Incoming(request_id, request.payload_bytes, self.resume)

    def frame_received(self, kind: int, request_id: int, body: memoryview) -> None:
        assert self._handler is not None
        if kind == Kind.PAYLOAD:
            if self.incoming is not None and not self.incoming.left:
                self.incoming = None
            return
        try:
            if kind != Kind.REQUEST:
                raise MalformedFrame(f"a client sends requests only, not frames of kind {kind}")
            request = decode_request(body)
            self._announced(request_id, request)
            outcome = self._handler.handle(request)
        except Exception as exc:
            self._failed(request_id, exc)
            return
        if asyncio.iscoroutine(outcome):
            task = self._loop.create_task(self._finish(request_id, outcome))
            self._running.add(task)
            task.add_done_callback(self._finished)
        else:
            self._answer(request_id, outcome)

    async def _finish(self, request_id: int, outcome: Coroutine[Any, Any, Answer]) -> None:
        try:
            answer = await outcome
        except Exception as exc:
            self._failed(request_id, exc)
        else:
            self._answer(request_id, answer)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.resume()

    def _answer(self, request_id: int, answer: Answer) -> None:
        descriptors: Sequence[int] | Objects = ()
        if isinstance(answer, tuple):
            answer, descriptors = answer
        if isinstance(descriptors, Objects):
            self.send(encode_frame(Kind.REPLY, request_id, answer))
            self._send_objects(request_id, descriptors)
        else:
            self.send(encode_frame(Kind.REPLY, request_id, answer), descriptors)

    def _send_objects(self, request_id: int, objects: Objects) -> None:
        self._sending += 1

        def ended() -> None:
            self._sending -= 1
            objects.ended()
            self._loop.call_soon(self.resume)

        size = framed_bytes(objects.object_bytes, objects.count)
        views = framed(request_id, objects.object_bytes, objects.count, ((view,) for view in objects.objects))
        self.send_payload(Views(views, size, ended))

    def notice(self, ticket: int, body: msgspec.Struct) -> None:
        self.send(encode_frame(Kind.NOTICE, ticket, body))

    def _failed(self, request_id: int, exc: Exception) -> None:
        # The top of a request: whatever went wrong inside ends as a typed answer, and the daemon goes on.
        error = as_protocol_error(exc)
        if self.incoming is not None and self.incoming.request_id == request_id:
            self.incoming.refuse()
        self.send(encode_error(request_id, error))
        if error.fatal:
            self._end(error)

    def stream_broken(self, error: ProtocolError) -> None:
        self.send(encode_error(0, error))
        self._end(error)

    def _end(self, error: ProtocolError) -> None:
        """The peer was told why; its stream or its manners can't be trusted any more."""
        log.warning("session ended: %s", error.code, extra={"pid": self.peer.pid, "code": error.code})
        self.close_after_sending()

    def connection_ended(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._rounds.leave(self._owner)
        for task in self._running:
            task.cancel()
        if self.incoming is not None:
            self.incoming.cut()
        if self._handler is not None:
            self._handler.closed()


def _check_descriptors(exc: OSError) -> None:
    """Raises: OverLimit if the error is that there are none left."""
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        raise errors.OverLimit("the daemon has no descriptor left: close some sessions, or raise its limit") from exc


def as_protocol_error(exc: Exception) -> ProtocolError:
    """What a peer is told of an exception: typed errors as they are, caller mistakes by their text, the rest by name only."""
    if isinstance(exc, ProtocolError):
        return exc
    if isinstance(exc, ValueError):
        return errors.BadRequest(str(exc))
    if isinstance(exc, errors.TierFull):
        return errors.ObjectTooLarge(str(exc))
    if isinstance(exc, TimeoutError):
        return errors.RequestTimeout("the daemon could not do it in time; nothing is left half done")
    log.error("request failed inside the daemon", exc_info=exc)
    return errors.DaemonFault(f"{type(exc).__name__} inside the daemon; its log has the details")


class UnixListener:
    """Owns the socket's path: one daemon a path, by a lock that the kernel drops however the daemon ends."""

    def __init__(self, path: Path, *, mode: int, accepted: Callable[[socket.socket], None]) -> None:
        self.path = path
        self._mode = mode
        self._accepted = accepted
        self._accepting: Accepting | None = None
        self._lock = -1

    def start(self) -> None:
        """Bind and listen.

        Raises: DaemonAlreadyRunning; OSError when the folder can't be used; ValueError when somebody else could have put
        the folder there, or what lies at the path is no socket.
        """
        folder = self.path.parent
        if folder == fallback_folder() or not folder.exists():
            private_folder(folder)
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DaemonAlreadyRunning(
                f"another daemon serves {self.path}: stop it, or give this one its own --socket"
            ) from None
        self._lock = lock
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._remove_dead_socket()
            previous = os.umask(0o777)  # nobody connects between bind and chmod
            try:
                sock.bind(str(self.path))
            finally:
                os.umask(previous)
            os.chmod(self.path, self._mode)
            self._accepting = Accepting(sock, self._accepted)
        except BaseException:
            sock.close()
            self._unlock()
            raise

    def _remove_dead_socket(self) -> None:
        """Take away what a killed daemon left: we hold the lock. Anything but a socket is someone's file, and stays."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ValueError(f"{self.path} is there and is no socket: move it away, or name another path with --socket")
        self.path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Stop listening and take the path away. Idempotent."""
        if self._accepting is None:
            return
        self._accepting.close()
        self._accepting = None
        self.path.unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        os.close(self._lock)
        self._lock = -1
