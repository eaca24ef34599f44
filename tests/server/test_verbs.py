"""What the daemon answers to requests that are wrong: an error that says what, for that call or that session alone.

After each test nothing is held for anyone and the byte accounts add up (`daemon` fixture).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.kvstore import errors, wire
from forebay.kvstore.identity import GroupSpec
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.wire import SlotStatus
from tests.daemon_process import MIB, DaemonProcess, RawSession, facts_of, serving

FACTS = facts_of()
SIZE = ObjectLayout.of(FACTS).object_bytes
LIMITS = {
    "max_frame_bytes": 2 * MIB,
    "max_uncommitted_bytes_per_session": 20 * SIZE,
    "max_leased_blocks_per_session": 300,
    "max_sessions": 8,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("verbs"), **LIMITS)


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    yield running
    running.at_base()


@pytest.fixture
def session(daemon: DaemonProcess) -> Iterator[RawSession]:
    with RawSession(daemon.socket) as session:
        session.hello("engine")
        yield session


@pytest.fixture
def handle(session: RawSession, request: pytest.FixtureRequest) -> int:
    return session.open(facts_of(salt=request.node.name.encode())).handle


def keys_of(count: int, first: int = 0) -> bytes:
    return b"".join(struct.pack("<QQ", 0xABCD, number) for number in range(first, first + count))


def stored(session: RawSession, handle: int, count: int) -> bytes:
    """Keys of that many objects that this session stores."""
    keys = keys_of(count)
    for start in range(0, count, 16):
        part = keys[16 * start : 16 * (start + 16)]
        allocation = session.call(wire.Allocate(handle, 0, part)).allocation
        session.call(wire.Commit(allocation, b"\1" * (len(part) // 16)))
    return keys


def refused(session: RawSession, request: wire.Request[Any], error: type[errors.ProtocolError], says: str) -> None:
    """The request is refused with this error, and the session goes on."""
    with pytest.raises(error, match=says) as caught:
        session.call(request)
    assert not caught.value.fatal
    session.call(wire.Stats())


# --- frames and introductions ------------------------------------------------------------------------------------------


def ends_with(session: RawSession, error: type[errors.ProtocolError], says: str) -> None:
    with pytest.raises(error, match=says):
        session.answer(wire.Done)
    assert session.ended()


def test_a_frame_over_the_limit_is_named_and_ends_the_session_before_its_body_is_read(session: RawSession) -> None:
    session.sock.sendall(wire.HEADER.pack(1 << 30, wire.PROTOCOL_VERSION, wire.Kind.REQUEST, 0, 1))
    ends_with(session, errors.FrameTooLarge, f"limit of {2 * MIB}")


@pytest.mark.parametrize("kind", [0, 9, 255])
def test_a_header_that_is_none_ends_the_session(session: RawSession, kind: int) -> None:
    session.send_body(b"", kind=kind)
    ends_with(session, errors.MalformedFrame, f"kind {kind}")


def test_a_frame_that_only_daemons_send_ends_the_session(session: RawSession) -> None:
    session.send_body(b"\x90", kind=wire.Kind.REPLY)
    ends_with(session, errors.MalformedFrame, "requests only")


def test_a_frame_of_a_future_protocol_version_is_told_both_versions(session: RawSession) -> None:
    session.send_body(b"\x90", version=9)
    ends_with(session, errors.VersionMismatch, f"version 9, this side speaks {wire.PROTOCOL_VERSION}")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x90", b"\x93\xa5match\x01", b"\xdc\xff\xff", b"\x91" * 5000])
def test_a_body_that_is_no_request_ends_the_session(session: RawSession, body: bytes) -> None:
    session.send_body(body)
    ends_with(session, errors.MalformedFrame, "body")


def test_an_unknown_verb_is_named_and_the_session_goes_on(session: RawSession) -> None:
    session.send_body(b"\x92\xa5teleX\x01")
    with pytest.raises(errors.UnknownVerb, match="teleX"):
        session.answer(wire.Done)
    session.call(wire.Stats())


def test_a_socket_cut_in_the_middle_of_a_frame_harms_nobody(daemon: DaemonProcess, session: RawSession) -> None:
    frame = wire.encode_frame(wire.Kind.REQUEST, 1, wire.Stats())
    for cut in range(1, len(frame)):
        with RawSession(daemon.socket) as other:
            other.hello()
            other.sock.sendall(frame[:cut])
    session.call(wire.Stats())


def test_a_socket_cut_with_answers_unread_ends_its_session(daemon: DaemonProcess) -> None:
    for _ in range(20):
        with RawSession(daemon.socket) as session:
            session.hello()
            session.sock.sendall(wire.encode_frame(wire.Kind.REQUEST, 1, wire.Stats())[:-1])
            session.send(wire.Stats())
    daemon.at_base()


def test_a_verb_before_hello_and_a_second_hello_end_the_session(daemon: DaemonProcess, session: RawSession) -> None:
    with RawSession(daemon.socket) as stranger:
        stranger.send(wire.Stats())
        ends_with(stranger, errors.NotIntroduced, "hello, not stats")
    session.send(wire.Hello(1, 1, "", "", 0))
    ends_with(session, errors.NotIntroduced, "already")


def test_a_client_of_other_protocol_versions_is_told_both(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as session:
        session.send(wire.Hello(7, 9, "", "", 0))
        ends_with(session, errors.VersionMismatch, "7 to 9")


def test_a_token_where_there_are_no_credentials_is_refused(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as session:
        session.send(wire.Hello(1, 1, "secret", "", 0))
        ends_with(session, errors.AccessDenied, "without a token")


def test_an_engine_id_of_any_length_is_not_kept(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as session, pytest.raises(errors.BadRequest, match="engine id"):
        session.hello("e" * 10_000)


def test_sessions_over_the_limit_are_refused_and_welcome_later(daemon: DaemonProcess) -> None:
    sessions = [RawSession(daemon.socket) for _ in range(LIMITS["max_sessions"])]
    try:
        for session in sessions:
            session.hello()
        with RawSession(daemon.socket) as one_more, pytest.raises(errors.OverLimit, match="8 sessions"):
            one_more.hello()
    finally:
        for session in sessions:
            session.close()
    daemon.at_base()


# --- handles and namespaces ---------------------------------------------------------------------------------------------


def on_handle(handle: int, group: int = 0) -> list[wire.Request[Any]]:
    key = keys_of(1)
    return [
        wire.Match(handle, group, key),
        wire.Acquire(handle, group, key),
        wire.Prefetch(handle, group, key, 10),
        wire.Allocate(handle, group, key),
        wire.Pin(handle, group, key),
        wire.Unpin(handle, group, key),
        wire.Delete(handle, group, key),
        wire.Flush(handle, group, key, 10),
        wire.Explain(handle, group, key),
    ]


@pytest.mark.parametrize("wrong", [-1, 0, 99, (1 << 63) - 1])
def test_every_verb_on_keys_refuses_a_handle_it_did_not_give(session: RawSession, handle: int, wrong: int) -> None:
    for request in on_handle(wrong):
        refused(session, request, errors.UnknownHandle, f"handle {wrong}")


@pytest.mark.parametrize("wrong", [-1, 1, 1 << 40])
def test_every_verb_on_keys_refuses_a_group_that_is_not_declared(session: RawSession, handle: int, wrong: int) -> None:
    for request in on_handle(handle, wrong):
        refused(session, request, errors.UnknownHandle, f"group {wrong}")


def test_a_handle_belongs_to_its_session_and_ends_when_closed(
    daemon: DaemonProcess, session: RawSession, handle: int
) -> None:
    with RawSession(daemon.socket) as other:
        other.hello()
        refused(other, wire.Match(handle, 0, b""), errors.UnknownHandle, "open the namespace")
    assert session.call(wire.CloseHandle(handle)).count == 1
    refused(session, wire.Match(handle, 0, b""), errors.UnknownHandle, "open the namespace")


@pytest.mark.parametrize("facts", [b"", b"garbage", FACTS.encode()[:-1], FACTS.encode() + b"\0", b"\0" * 100_000])
def test_facts_that_are_none_are_a_bad_request(session: RawSession, facts: bytes) -> None:
    refused(session, wire.Open(facts), errors.BadRequest, "namespace")


def test_handles_of_a_session_are_bounded(session: RawSession) -> None:
    encoded = FACTS.encode()
    with pytest.raises(errors.OverLimit, match="handles"):
        for _ in range(5000):
            session.call(wire.Open(encoded))
    session.call(wire.Stats())


def test_an_object_larger_than_an_extent_is_refused_when_its_namespace_is_opened(session: RawSession) -> None:
    facts = facts_of(groups=(GroupSpec("state", payload_bytes=2 * MIB),))
    refused(session, wire.Open(facts.encode()), errors.ObjectTooLarge, "raise extent_bytes")


# --- keys and numbers -----------------------------------------------------------------------------------------------------


def test_keys_of_another_length_are_named_and_end_the_session(daemon: DaemonProcess) -> None:
    for number, _ in enumerate(on_handle(1)):
        with RawSession(daemon.socket) as session:
            session.hello()
            request = on_handle(session.open(FACTS).handle)[number]
            request.keys = b"x" * 17  # type: ignore[attr-defined]
            session.send(request)
            ends_with(session, errors.MalformedFrame, "17 bytes, not a multiple of 16")


def test_no_keys_at_all_are_an_empty_answer(session: RawSession, handle: int) -> None:
    assert session.call(wire.Match(handle, 0, b"")).runs == []
    assert session.call(wire.Acquire(handle, 0, b"")).lease == 0
    assert session.call(wire.Allocate(handle, 0, b"")).allocation == 0
    assert session.call(wire.Pin(handle, 0, b"")).count == 0
    assert session.call(wire.Delete(handle, 0, b"")).count == 0


def test_a_parent_key_of_another_length_is_a_bad_request(session: RawSession, handle: int) -> None:
    refused(session, wire.Allocate(handle, 0, keys_of(1), b"short"), errors.BadRequest, "parent key has 5 bytes")


def test_a_key_twice_in_one_allocate_is_a_bad_request(session: RawSession, handle: int) -> None:
    for count in (1, 9):
        refused(session, wire.Allocate(handle, 0, keys_of(count) * 2), errors.BadRequest, "twice")


def test_a_key_twice_in_a_long_acquire_leaves_no_reference(
    daemon: DaemonProcess, session: RawSession, handle: int
) -> None:
    keys = stored(session, handle, 140)
    refused(session, wire.Acquire(handle, 0, keys * 2), errors.BadRequest, "twice")
    assert session.call(wire.Delete(handle, 0, keys)).count == 140
    memory = session.call(wire.Stats()).stats["tiers"]["ram"]["bytes"]
    assert memory["quarantined"] == 0  # a deleted object with a reference left would stay here for ever


@pytest.mark.parametrize("parts", [-1, 4, 1 << 60])
def test_a_parts_mask_beyond_the_grid_is_a_bad_request(session: RawSession, handle: int, parts: int) -> None:
    refused(session, wire.Allocate(handle, 0, keys_of(1), b"", parts), errors.BadRequest, "parts beyond the 2")


@pytest.mark.parametrize("shares", [0, -1])
def test_a_lease_of_no_shares_is_a_bad_request(session: RawSession, handle: int, shares: int) -> None:
    refused(session, wire.Acquire(handle, 0, keys_of(1), 0, shares), errors.BadRequest, "share")


def test_negative_waits_are_no_waits(session: RawSession, handle: int) -> None:
    assert session.call(wire.Acquire(handle, 0, keys_of(1), -5)).lease == 0
    assert session.call(wire.Prefetch(handle, 0, keys_of(1), -5)).loading == 0
    assert session.call(wire.Flush(handle, 0, keys_of(1), -5)).missing == 1


@pytest.mark.parametrize(
    "values", [{"bytes": float("nan")}, {"bytes": -1.0}, {"x y": 1.0}, {f"n{i}": 1.0 for i in range(99)}]
)
def test_a_report_of_impossible_numbers_is_a_bad_request(session: RawSession, values: dict[str, float]) -> None:
    refused(session, wire.Report("load", values), errors.BadRequest, "report")


def test_more_keys_than_explain_takes_are_a_bad_request(session: RawSession, handle: int) -> None:
    refused(session, wire.Explain(handle, 0, keys_of(2000)), errors.BadRequest, "at most 1024")


# --- leases ----------------------------------------------------------------------------------------------------------------


def test_a_lease_is_released_once_and_by_who_holds_it(daemon: DaemonProcess, session: RawSession, handle: int) -> None:
    lease = session.call(wire.Acquire(handle, 0, stored(session, handle, 2))).lease
    with RawSession(daemon.socket) as other:
        other.hello("another engine")
        refused(other, wire.Release(lease), errors.UnknownHandle, f"lease {lease}")
        refused(other, wire.Attach(lease), errors.UnknownHandle, "'another engine'")
    assert session.call(wire.Release(lease)).count == 0
    for gone in (lease, 0, -1):
        refused(session, wire.Release(gone), errors.UnknownHandle, f"lease {gone}")


def test_ranks_of_one_engine_share_a_lease_until_all_have_released_it(
    daemon: DaemonProcess, session: RawSession, handle: int
) -> None:
    granted = session.call(wire.Acquire(handle, 0, stored(session, handle, 2), 0, 2))
    with RawSession(daemon.socket) as rank:
        rank.hello("engine")
        assert rank.call(wire.Attach(granted.lease)).locations == granted.locations
        assert rank.call(wire.Release(granted.lease)).count == 1
        refused(rank, wire.Release(granted.lease), errors.UnknownHandle, "share")
    assert session.call(wire.Release(granted.lease)).count == 0


def test_leases_over_the_limit_are_refused_and_those_held_stay(session: RawSession, handle: int) -> None:
    keys = stored(session, handle, 16)
    leases = [session.call(wire.Acquire(handle, 0, keys)).lease for _ in range(18)]
    refused(session, wire.Acquire(handle, 0, keys), errors.OverLimit, "300 blocks")
    refused(session, wire.Acquire(handle, 0, keys_of(301)), errors.OverLimit, "300 blocks")
    for lease in leases:
        session.call(wire.Release(lease))
    session.call(wire.Release(session.call(wire.Acquire(handle, 0, keys)).lease))


# --- allocations -------------------------------------------------------------------------------------------------------------


def test_uncommitted_bytes_over_the_limit_are_refused_and_counted_exactly(session: RawSession, handle: int) -> None:
    def uncommitted() -> int:
        found: int = session.call(wire.Stats()).stats["sessions"]["uncommitted_bytes"]
        return found

    first = session.call(wire.Allocate(handle, 0, keys_of(15)))
    refused(session, wire.Allocate(handle, 0, keys_of(6, 50)), errors.OverLimit, "uncommitted")
    refused(session, wire.Allocate(handle, 0, keys_of(2, 50) * 2), errors.BadRequest, "twice")
    assert uncommitted() == 15 * SIZE
    second = session.call(wire.Allocate(handle, 0, keys_of(5, 13)))
    assert list(second.statuses) == [SlotStatus.PENDING] * 2 + [SlotStatus.WRITABLE] * 3
    assert uncommitted() == 18 * SIZE
    assert session.call(wire.Commit(first.allocation, b"\1" * 10 + b"\0" * 5)).count == 10
    assert uncommitted() == 3 * SIZE
    assert session.call(wire.Abort(second.allocation)).count == 3
    assert uncommitted() == 0


def test_a_commit_of_what_was_not_given_is_refused_and_the_allocation_goes_on(
    daemon: DaemonProcess, session: RawSession, handle: int
) -> None:
    stored(session, handle, 1)
    given = session.call(wire.Allocate(handle, 0, keys_of(3)))
    assert given.statuses[0] == SlotStatus.PRESENT
    refused(session, wire.Commit(given.allocation, b"\1\1\1"), errors.BadRequest, "not given")
    refused(session, wire.Commit(given.allocation, b"\0\1"), errors.BadRequest, "names 2 objects")
    with RawSession(daemon.socket) as other:
        other.hello("engine")
        refused(other, wire.Commit(given.allocation, b"\0\1\1"), errors.UnknownHandle, "allocation")
        refused(other, wire.Abort(given.allocation), errors.UnknownHandle, "allocation")
    assert session.call(wire.Commit(given.allocation, b"\0\1\1")).count == 2
    for request in (wire.Commit(given.allocation, b"\0\1\1"), wire.Abort(given.allocation)):
        refused(session, request, errors.UnknownHandle, "committed, aborted, or never made")


def test_a_write_outside_its_object_is_refused(session: RawSession, handle: int) -> None:
    given = session.call(wire.Allocate(handle, 0, keys_of(1))).allocation
    assert session.call(wire.Write(given, 0, SIZE - 4, b"abcd")).count == 4
    for index, offset, data, says in (
        (0, SIZE - 3, b"abcd", "outside an object"),
        (0, -1, b"abcd", "outside an object"),
        (0, 1 << 62, b"", "outside an object"),
        (1, 0, b"abcd", "not writable"),
        (-1, 0, b"abcd", "not writable"),
    ):
        refused(session, wire.Write(given, index, offset, data), errors.BadRequest, says)
    session.call(wire.Abort(given))
    refused(session, wire.Write(given, 0, 0, b"late"), errors.UnknownHandle, "allocation")


def test_extents_of_nobody_are_not_mapped(session: RawSession, handle: int) -> None:
    assert session.call(wire.MapExtents([-1, 0, 1 << 40])).extents == []
    assert session.descriptors[1:] == []  # the first is the board
    assert session.call(wire.Settle([b"", b"x" * 16])).count == 0
    session.call(wire.Unmapped([-1, 1 << 40]))


# --- objects that several sessions write -----------------------------------------------------------------------------


def test_parts_of_one_object_come_from_two_sessions_and_show_when_all_are_there(
    daemon: DaemonProcess, session: RawSession, handle: int, request: pytest.FixtureRequest
) -> None:
    key = keys_of(1)
    with RawSession(daemon.socket) as rank:
        rank.hello("engine")
        other = rank.open(facts_of(salt=request.node.name.encode())).handle
        mine = session.call(wire.Allocate(handle, 0, key, b"", 1))
        theirs = rank.call(wire.Allocate(other, 0, key, b"", 2))
        assert mine.locations == theirs.locations
        assert session.call(wire.Commit(mine.allocation, b"\1")).count == 0
        assert session.call(wire.Match(handle, 0, key)).runs == []
        assert rank.call(wire.Commit(theirs.allocation, b"\1")).count == 1
    assert session.call(wire.Match(handle, 0, key)).runs == [("ram", 1)]


@pytest.mark.parametrize("then", ["commit", "abort", "vanish"])
def test_a_writer_that_vanishes_takes_the_object_and_not_the_place_from_the_other_writer(
    daemon: DaemonProcess, session: RawSession, handle: int, then: str, request: pytest.FixtureRequest
) -> None:
    key = keys_of(1)
    with RawSession(daemon.socket) as rank:
        rank.hello("engine")
        mine = rank.id
        other = rank.open(facts_of(salt=request.node.name.encode())).handle
        rank.call(wire.Allocate(other, 0, key, b"", 2))
        given = session.call(wire.Allocate(handle, 0, key, b"", 1))
    with RawSession(daemon.socket) as third:
        gone = third.hello("engine")
        assert gone.session != mine
    assert session.call(wire.Match(handle, 0, key)).runs == []
    if then == "commit":
        assert session.call(wire.Commit(given.allocation, b"\1")).count == 0
    elif then == "abort":
        session.call(wire.Abort(given.allocation))
    else:
        session.close()
        with RawSession(daemon.socket) as settler:
            settler.hello("engine")
            daemon.audit()
            settler.call(wire.Settle([mine]))
            daemon.audit()
            settler.call(wire.Settle([session.id]))
        daemon.audit()
        return
    daemon.audit()
    quarantined = session.call(wire.Stats()).stats["sessions"]["quarantined_bytes"]
    assert quarantined > 0  # the vanished writer may still touch it
    session.call(wire.Settle([mine]))
    daemon.audit()


def test_an_object_whose_other_writer_gives_up_is_not_kept_for_ever(session: RawSession, handle: int) -> None:
    for first in range(0, 1200, 20):  # more half-written objects than the memory holds
        given = session.call(wire.Allocate(handle, 0, keys_of(20, first), b"", 1))
        writable = bytes(status == SlotStatus.WRITABLE for status in given.statuses)
        assert any(writable), f"no room after {first} half-written objects"
        session.call(wire.Commit(given.allocation, writable))
    whole = session.open(facts_of(salt=b"whole")).handle
    stored(session, whole, 1200)
    assert session.call(wire.Stats()).stats["tiers"]["ram"]["bytes"]["allocated"] == 0
