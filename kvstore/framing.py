"""Frames over stream sockets: the receive buffer and the non-blocking socket that daemon and async clients share.

Covers cutting a byte stream into frames, sending without blocking, descriptors that travel beside frames, payload that goes
past the buffers. Knows no verbs. Always true: memory is bounded by the frame limit and the outbox limit; a frame is handed on
once and whole.

Own sockets and `add_reader` instead of asyncio streams, because replies carry file descriptors (SCM_RIGHTS), which no
asyncio or uvloop transport can send or receive.
"""

from __future__ import annotations

import array
import asyncio
import errno
import fcntl
import os
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from forebay.kvstore.errors import MalformedFrame, ProtocolError
from forebay.kvstore.payload import PIECE_BYTES, Sink, Views
from forebay.kvstore.tls import Stream, pending_bytes
from forebay.kvstore.wire import HEADER_BYTES, Kind, parse_header

_READ_BYTES: Final = 256 << 10
_TURN_S: Final = 0.0003  # of one socket's frames; then timers and other sockets get theirs
_BEYOND_PAYLOAD_BYTES: Final = 4 << 10  # of what follows a payload frame, read along with its end
_MAX_OUTBOX_BYTES: Final = 256 << 20
MAX_DESCRIPTORS: Final = 64  # in one frame
_LOOK_FOR_END_S: Final = 0.02
_LOOK_AGAIN_S: Final = 0.005  # whether a peer has read its descriptors: no event tells
_RIGHTS_BYTES: Final = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)


class FrameBuffer:
    """Bytes received and not yet taken as frames.

    A payload frame's body is not kept here: it goes where `payload` says, and `next_frame` gives the frame, with an empty body,
    once all of it has come.
    """

    def __init__(self, max_frame_bytes: int, payload: Callable[[int, int], Sink] | None = None) -> None:
        """`payload`: of a frame's request id and length, who takes it; it raises ProtocolError for one not awaited."""
        self._max_frame_bytes = max_frame_bytes
        self._payload = payload
        self._sink: Sink | None = None
        self._sink_id = self._sink_left = 0
        self._buffer = bytearray(_READ_BYTES)
        self._start = self._end = 0
        self.descriptors: deque[int] = deque()

    def receive(self, sock: Stream, *, descriptors: bool) -> int:
        """One `recv` into the buffer, with descriptors that come along if wanted. Returns its count, 0 at the end.

        Raises: BlockingIOError, TimeoutError, OSError as the socket does.
        """
        if self._sink is not None and self._sink_left:
            return self._receive_payload(self._sink, sock)
        self._make_room()
        with memoryview(self._buffer) as view, view[self._end :] as room:
            if descriptors:
                count, ancillary, _, _ = sock.recvmsg_into([room], _RIGHTS_BYTES)
                for level, kind, data in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        received = array.array("i")
                        received.frombytes(data[: len(data) - len(data) % received.itemsize])
                        for descriptor in received:
                            os.set_inheritable(descriptor, False)
                        self.descriptors.extend(received)
            else:
                count = sock.recv_into(room)
        self._end += count
        return count

    def _receive_payload(self, sink: Sink, sock: Stream) -> int:
        """One `recv` straight into the sink. No byte is left in the buffer while payload is awaited."""
        window = sink.window(min(PIECE_BYTES, self._sink_left))
        room = sum(map(len, window))
        self._start = self._end = 0
        with memoryview(self._buffer) as view, view[:_BEYOND_PAYLOAD_BYTES] as beyond:
            count = sock.recvmsg_into([*window, beyond] if room == self._sink_left else window)[0]
        here = min(count, room)
        sink.advance(here)
        self._sink_left -= here
        self._end = count - here
        return count

    def _take_payload(self, sink: Sink) -> None:
        """Hand on what came into the buffer together with the frames before."""
        while self._sink_left and self._end > self._start:
            for part in sink.window(min(self._end - self._start, self._sink_left)):
                part[:] = memoryview(self._buffer)[self._start : self._start + len(part)]
                self._start += len(part)
                self._sink_left -= len(part)
                sink.advance(len(part))

    def next_frame(self) -> tuple[int, int, memoryview] | None:
        """(kind, request id, body) of the next whole frame, or None. Release the body before the next `receive`.

        Raises: ProtocolError: the stream is no longer to be trusted.
        """
        if self._sink is not None:
            self._take_payload(self._sink)
            if self._sink_left:
                return None
            self._sink = None
            return Kind.PAYLOAD, self._sink_id, memoryview(b"")
        have = self._end - self._start
        if have < HEADER_BYTES:
            return None
        kind, request_id, length = parse_header(self._buffer, self._start, self._max_frame_bytes)
        if kind == Kind.PAYLOAD:
            if self._payload is None:
                raise MalformedFrame("payload frames travel over TCP only: local clients write to shared memory")
            self._sink = self._payload(request_id, length)
            self._sink_id, self._sink_left = request_id, length
            self._start += HEADER_BYTES
            return self.next_frame()
        if have < HEADER_BYTES + length:
            return None
        body = self._start + HEADER_BYTES
        self._start = body + length
        return kind, request_id, memoryview(self._buffer)[body : self._start]

    @property
    def pending(self) -> bool:
        """Whether bytes are left that may hold a frame."""
        return self._end - self._start >= HEADER_BYTES or (self._sink is not None and not self._sink_left)

    @property
    def partial(self) -> bool:
        """Whether a frame has begun to come."""
        return self._end > self._start or self._sink is not None

    def _make_room(self) -> None:
        have = self._end - self._start
        need = _READ_BYTES // 4
        if have >= HEADER_BYTES:
            kind, _, length = parse_header(self._buffer, self._start, self._max_frame_bytes)
            length = 0 if kind == Kind.PAYLOAD else length
            # At most twice what has come: a header alone, sent on many sockets, must not take a frame's memory on each.
            need = max(need, min(HEADER_BYTES + length - have, have))
        if not have:
            self._start = self._end = 0
            if len(self._buffer) > 4 * _READ_BYTES:
                self._buffer = bytearray(_READ_BYTES)  # one huge frame doesn't keep its memory for the session's life
        if len(self._buffer) - self._end >= need:
            return
        fresh = self._buffer if len(self._buffer) - have >= need else bytearray(have + need)
        fresh[:have] = self._buffer[self._start : self._end]
        self._buffer, self._start, self._end = fresh, 0, have

    def close(self) -> None:
        """Close descriptors that no frame has claimed."""
        while self.descriptors:
            os.close(self.descriptors.popleft())


class FrameSocket:
    """A connected stream socket on the running event loop. A subclass says what frames mean."""

    def __init__(self, sock: Stream, *, max_frame_bytes: int, descriptors: bool, payload: bool = False) -> None:
        """`descriptors`: those that come along are taken. `payload`: `payload_arrives` is asked about payload frames."""
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._take_descriptors = descriptors
        self.inbox = FrameBuffer(max_frame_bytes, self.payload_arrives if payload else None)
        self._outbox: deque[tuple[memoryview, Sequence[int]] | Views] = deque()
        self._outbox_bytes = 0
        self._unread_descriptors = 0  # sent, and perhaps not read by the peer
        self._holding = False  # the outbox begins with descriptors that wait until it has read others
        self._reading = False
        self._closing = False  # after the outbox has gone
        self._mute = False  # the peer takes nothing more; what it sent before still counts
        self.closed = False

    # --- for the subclass -----------------------------------------------------------------------------------------

    def frame_received(self, kind: int, request_id: int, body: memoryview) -> None:
        """One frame; `body` is valid during the call. Of a payload frame it is empty: its bytes are where they belong."""
        raise NotImplementedError

    def payload_arrives(self, request_id: int, length: int) -> Sink:
        """Who takes a payload frame's body. Raises: ProtocolError: it was not announced."""
        raise NotImplementedError

    def stream_broken(self, error: ProtocolError) -> None:
        """The peer sent what is no frame."""
        raise NotImplementedError

    def connection_ended(self) -> None:
        """The socket is closed, by whichever side. Called once."""
        raise NotImplementedError

    def may_take_more(self) -> bool:
        """Whether the next frame may be handed on now. If not, call `resume` later."""
        return True

    def may_begin_turn(self) -> bool:
        """Whether it is this socket's turn to be read. If not, `resume` is called later."""
        return True

    def turn_ended(self, seconds: float) -> None:
        """Reading, and handling what was read, took so long."""

    # --- reading --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Read, and hand on what is there already."""
        if not self._reading and not self.closed and not self._closing and self.may_begin_turn():
            began_s = time.perf_counter()
            self._reading = True
            self._hand_on()
            self.turn_ended(time.perf_counter() - began_s)
            # Only now: were the socket watched before, its next bytes would be a second turn before any timer gets one.
            if self._reading:
                self._loop.add_reader(self._sock.fileno(), self._readable)
            self._read_pending()

    def pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    def _readable(self) -> None:
        if not self.may_begin_turn():
            self.pause()
            return
        began_s = time.perf_counter()
        self._receive()
        self.turn_ended(time.perf_counter() - began_s)

    def _receive(self) -> None:
        try:
            count = self.inbox.receive(self._sock, descriptors=self._take_descriptors)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        except ProtocolError as exc:
            self.stream_broken(exc)
            return
        if count == 0:
            self.close()
            return
        self._hand_on()
        if self.inbox.partial:
            self._watch_again()
        if pending_bytes(self._sock):
            self._loop.call_soon(self._read_pending)

    def _read_pending(self) -> None:
        if self._reading and pending_bytes(self._sock):
            self._readable()

    def _watch_again(self) -> None:
        # libuv stops watching a socket with an error pending, such as that of a peer that closed with answers unread. The one
        # event it gave then brought data; the next, which brings the end, comes only if asked for anew.
        if self._reading:
            fd = self._sock.fileno()
            self._loop.remove_reader(fd)
            self._loop.add_reader(fd, self._readable)

    def _await_end(self) -> None:
        # No event can be relied on for the end of such a peer (see `_watch_again`), so it is looked for.
        if self.closed:
            return
        if self._reading:
            self._readable()
        else:
            self.resume()
        if not self.closed:
            self._loop.call_later(_LOOK_FOR_END_S, self._await_end)

    def _hand_on(self) -> None:
        for kind, request_id, body in self._frames():
            with body:
                self.frame_received(kind, request_id, body)

    def _frames(self) -> Iterator[tuple[int, int, memoryview]]:
        """Whole frames of this turn."""
        until_s = time.perf_counter() + _TURN_S
        while True:
            if not self._reading:
                return
            if self._holding or not self.may_take_more():
                self.pause()
                return
            try:
                frame = self.inbox.next_frame()
            except ProtocolError as exc:
                self.stream_broken(exc)
                return
            if frame is None:
                return
            yield frame
            if time.perf_counter() >= until_s:
                break
        if self._reading and self.inbox.pending:
            self.pause()  # turns alternate with other sockets'
            self._loop.call_soon(self.resume)

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send now or as soon as the peer reads. Never blocks; a peer that doesn't read is dropped at the limit."""
        if self.closed or self._mute:
            return
        view = memoryview(data)
        if not self._outbox:
            sent = self._push(view, descriptors)
            if self._mute or sent == len(view):
                return
            view, descriptors = view[sent:], () if sent else descriptors
            self._await_room()
        try:
            # Copies: what waits here may be closed by its owner, and its number then names something else.
            descriptors = [os.dup(descriptor) for descriptor in descriptors]
        except OSError:
            self.close()
            return
        self._outbox.append((view, descriptors))
        self._outbox_bytes += len(view)
        if self._outbox_bytes > _MAX_OUTBOX_BYTES:
            self.close()

    def send_payload(self, payload: Views) -> None:
        """Send what lies in these views, as the peer takes it, and close them then, or when the connection ends.

        Nothing is copied, so nothing of it counts against the outbox's limit: bound how much is asked for at a time.
        """
        if self.closed or self._mute:
            payload.close()
            return
        self._outbox.append(payload)
        if len(self._outbox) == 1:
            self._writable()
            if self._outbox and not self._mute:
                self._await_room()

    def _push_payload(self, payload: Views) -> bool:
        """One piece. Whether that was all of it."""
        views = payload.window(PIECE_BYTES)
        try:
            payload.advance(self._sock.sendmsg(views))
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._end_sending()
            return False
        except OSError:
            self._mute = True
            self.close()
            return False
        if payload.left:
            return False
        payload.close()
        return True

    def _end_sending(self) -> None:
        # A client releases what it holds and closes: its last frames are read though no answer reaches it any more.
        self._mute = True
        self._holding = False
        self._loop.call_soon(self._await_end)

    def _push(self, data: memoryview, descriptors: Sequence[int]) -> int:
        """How many bytes the kernel took. A peer that is gone ends the connection from the reading side."""
        try:
            if not descriptors:
                return self._sock.send(data)
            self._holding = self._has_unread(len(descriptors))
            if self._holding:
                return 0
            rights = array.array("i", descriptors)
            sent = self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            self._unread_descriptors += len(descriptors)
            return sent
        except BlockingIOError:
            return 0
        except (BrokenPipeError, ConnectionResetError):
            self._end_sending()
            return 0
        except OSError as exc:
            if exc.errno == errno.ETOOMANYREFS:  # of all our peers together
                self._holding = True
                return 0
            self._mute = True
            self.close()
            return 0

    def _has_unread(self, more: int) -> bool:
        """Whether `more` descriptors beside those that the peer has not read would be too many.

        The kernel counts descriptors on their way, of all our sockets together, and refuses more than RLIMIT_NOFILE: a peer
        that reads none must not use them up for the others.
        """
        if self._unread_descriptors + more > MAX_DESCRIPTORS:
            unread = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, bytes(4))
            if struct.unpack("i", unread)[0] == 0:
                self._unread_descriptors = 0
        return self._unread_descriptors + more > MAX_DESCRIPTORS

    def _await_room(self) -> None:
        if self._holding:
            self._loop.remove_writer(self._sock.fileno())
            self._loop.call_later(_LOOK_AGAIN_S, self._look_again)
        else:
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _look_again(self) -> None:
        if not self.closed:
            self._writable()

    def _writable(self) -> None:
        held = self._holding
        while self._outbox:
            head = self._outbox[0]
            if isinstance(head, Views):
                whole = self._push_payload(head)  # may close the connection, and the outbox with it
                if self.closed:
                    return
                if self._mute:
                    self._empty_outbox()
                    break
                if not whole:
                    return  # called again once there is room, and others had their turn
                self._outbox.popleft()
                continue
            data, descriptors = head
            sent = self._push(data, descriptors)
            if self.closed:
                return
            if self._mute:
                self._empty_outbox()
                break
            self._outbox_bytes -= sent
            if sent < len(data):
                if sent:
                    self._outbox[0] = (data[sent:], ())
                    _close_all(descriptors)
                self._await_room()
                break
            self._outbox.popleft()
            _close_all(descriptors)
        if held and not self._holding:
            self._loop.call_soon(self.resume)
        if self._outbox:
            return
        self._loop.remove_writer(self._sock.fileno())
        if self._closing:
            self.close()

    def _empty_outbox(self) -> None:
        while self._outbox:
            waiting = self._outbox.popleft()
            if isinstance(waiting, Views):
                waiting.close()
            else:
                _close_all(waiting[1])
        self._outbox_bytes = 0

    def close_after_sending(self) -> None:
        """Read nothing more; close once what was sent has gone."""
        self._closing = True
        self.pause()
        if not self._outbox:
            self.close()

    def close(self) -> None:
        """Close now. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.pause()
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._empty_outbox()
        self.inbox.close()
        self.connection_ended()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
