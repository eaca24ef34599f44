"""Frames over the session door: order, slow readers, bounds, and a peer that closes with its last frames on the way."""

from __future__ import annotations

import array
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.kvstore import errors, wire
from forebay.kvstore.errors import MalformedFrame, TierFull
from forebay.server.door import as_protocol_error
from tests.daemon_process import DaemonProcess, RawSession, eventually, facts_of, serving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("door"), max_sessions=16)


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    yield running
    running.at_base()


def test_a_burst_of_requests_is_answered_each_under_its_own_number(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as session:
        session.hello()
        asked = {session.send(wire.Stats()) for _ in range(300)}
        answered = set()
        while len(answered) < len(asked):
            frame = session.receive()
            assert frame is not None and frame[0] == wire.Kind.REPLY
            answered.add(frame[1])
        assert answered == asked


def test_a_request_that_comes_byte_by_byte_is_whole_when_it_is_whole(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as session:
        session.hello()
        for byte in wire.encode_frame(wire.Kind.REQUEST, 5, wire.Stats()):
            session.sock.sendall(bytes([byte]))
        assert session.answer(wire.StatsReply).stats


def test_what_a_client_sent_before_it_closed_is_done_though_no_answer_reaches_it(daemon: DaemonProcess) -> None:
    for _ in range(20):
        with RawSession(daemon.socket) as session:
            session.hello()
            handle = session.open(facts_of()).handle
            given = session.call(wire.Allocate(handle, 0, bytes(range(16))))
            session.call(wire.MapExtents([1]))
            session.send(wire.Stats())
            session.send(wire.Abort(given.allocation))
            session.send(wire.Unmapped([1]))
    assert eventually(lambda: daemon.stats()["sessions"]["open"], lambda left: left == 1) == 1
    assert daemon.stats()["sessions"]["orphans"] == 0


def test_a_peer_that_never_reads_is_dropped_in_the_end_and_others_are_served_meanwhile(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as deaf, RawSession(daemon.socket) as other:
        deaf.hello()
        other.hello()
        handle = deaf.open(facts_of()).handle
        deaf.sock.settimeout(0.2)
        keys = bytes(16 * 1024)
        try:
            for _ in range(300):
                deaf.send(wire.Explain(handle, 0, keys))
                other.call(wire.Stats())
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass  # the daemon takes no more of it, or has dropped it: both bound what it costs
        other.call(wire.Stats())


def test_descriptors_that_a_client_sends_are_not_kept(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as session:
        session.hello()
        before = daemon.descriptors()
        frame = wire.encode_frame(wire.Kind.REQUEST, 5, wire.Stats())
        for _ in range(50):
            rights = array.array("i", [session.sock.fileno()] * 8)
            session.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            session.answer(wire.StatsReply)
        assert daemon.descriptors() == before


def test_more_sockets_than_there_could_be_sessions_are_turned_away_and_the_door_stays_open(
    daemon: DaemonProcess,
) -> None:
    silent = []
    try:
        for _ in range(40):
            silent.append(RawSession(daemon.socket))
        assert silent[-1].ended()
    finally:
        for session in silent:
            session.close()
    eventually(lambda: _may_enter(daemon.socket), bool)


def _may_enter(path: Path) -> bool:
    with RawSession(path) as session:
        try:
            session.hello()
        except (AssertionError, OSError):
            return False
        return True


@pytest.mark.parametrize(
    "raised, told",
    [
        (MalformedFrame("x"), errors.MalformedFrame),
        (ValueError("x"), errors.BadRequest),
        (TierFull("x", tier="ram", need_bytes=1, free_bytes=0), errors.ObjectTooLarge),
        (TimeoutError(), errors.RequestTimeout),
        (RuntimeError("with the user's text in it"), errors.DaemonFault),
    ],
)
def test_an_exception_is_told_as_a_typed_error_without_inner_details(raised: Exception, told: type[Exception]) -> None:
    error = as_protocol_error(raised)
    assert type(error) is told and "user's text" not in str(error)
