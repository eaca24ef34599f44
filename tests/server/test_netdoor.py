"""The session door on TCP, by bare sockets against a real daemon: what is malformed, cut, late or forbidden leaves nothing."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from forebay.kvstore import wire
from forebay.kvstore.address import parse_address
from forebay.kvstore.errors import AccessDenied, BadRequest, Forbidden, UnknownHandle, VersionMismatch
from forebay.kvstore.keys import block_keys, token_words
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.wire import HEADER, Kind, SlotStatus
from tests.daemon_process import WAIT_S, DaemonProcess, RawSession, eventually, facts_of, payload_of, serving, tokens_of

FACTS = facts_of()
LAYOUT = ObjectLayout.of(FACTS)
SIZE = LAYOUT.object_bytes
COUNT = 4


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("net"), tcp=True, tcp_handshake_s=1.0)


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    """The module's daemon, which each test must leave with nothing held."""
    yield running
    running.at_base()


class Peer(RawSession):
    """A bare session over TCP with one namespace open, and one run of blocks to talk about."""

    def __init__(self, daemon: DaemonProcess, seed: int) -> None:
        super().__init__(daemon.tcp)
        self.hello(token=daemon.token)
        opened = self.open(FACTS)
        self.handle, self.namespace = opened.handle, opened.namespace
        tokens = tokens_of(seed, COUNT)
        self.keys = block_keys(self.namespace, tokens, FACTS.block_tokens)
        self.objects = [self._object(i, token_words(tokens[i * 16 : (i + 1) * 16]).tobytes()) for i in range(COUNT)]

    def _object(self, i: int, tokens: bytes) -> bytearray:
        payload = payload_of(self.namespace, self.keys[i], LAYOUT.payload_bytes)
        made = bytearray(LAYOUT.header_bytes)
        LAYOUT.write_header(
            made,
            key=self.keys[i],
            parent=self.keys[i - 1] if i else None,
            namespace=self.namespace,
            position=16 * i,
            token_ids=tokens,
            checksums=LAYOUT.part_checksums(payload),
            created_ns=1,
        )
        return made + payload

    def put(self, size: int = COUNT * SIZE) -> int:
        """Send the request alone. Returns its id."""
        return self.send(wire.Put(self.handle, 0, b"".join(self.keys), size))

    def payload(self, number: int, data: bytes | bytearray, length: int | None = None) -> None:
        """One payload frame that says `length`, or how long it is."""
        self.sock.sendall(HEADER.pack(len(data) if length is None else length, 1, Kind.PAYLOAD, 0, number) + data)

    def stored(self) -> int:
        return sum(count for _, count in self.call(wire.Match(self.handle, 0, b"".join(self.keys))).runs)


@pytest.fixture
def peer(daemon: DaemonProcess, request: pytest.FixtureRequest) -> Iterator[Peer]:
    # Blocks of its own for each test: `daemon` lives for all of them.
    with Peer(daemon, sum(request.node.name.encode())) as made:
        yield made


def stored_now(daemon: DaemonProcess, peer: Peer) -> int:
    """How much of the peer's run others can find."""
    with RawSession(daemon.tcp) as other:
        other.hello(token=daemon.token)
        handle = other.open(FACTS).handle
        return sum(count for _, count in other.call(wire.Match(handle, 0, b"".join(peer.keys))).runs)


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [1], [5, 700, SIZE, SIZE + 1, 3 * SIZE - 1], [COUNT * SIZE - 1]])
def test_frames_of_payload_may_be_cut_anywhere(peer: Peer, cuts: list[int]) -> None:
    number = peer.put()
    whole = b"".join(peer.objects)
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        peer.payload(number, whole[start:end])
    reply = peer.answer(wire.PutReply)
    assert reply.count + reply.statuses.count(SlotStatus.PRESENT) == COUNT
    number = peer.send(wire.Get(peer.handle, 0, b"".join(peer.keys)))
    assert peer.answer(wire.GetReply) == wire.GetReply(COUNT, SIZE, [])
    got = b""
    while len(got) < COUNT * SIZE:
        frame = peer.receive()
        assert frame is not None and frame[:2] == (Kind.PAYLOAD, number)
        got += frame[2]
    assert got == whole


def test_other_requests_are_answered_between_the_frames_of_payload(peer: Peer) -> None:
    number = peer.put()
    for data in peer.objects:
        assert peer.stored() == 0
        peer.payload(number, data)
    assert peer.answer(wire.PutReply).count == COUNT
    assert peer.stored() == COUNT


def test_places_are_asked_for_first_and_only_what_is_missing_is_sent(peer: Peer) -> None:
    first = peer.send(wire.Put(peer.handle, 0, peer.keys[0], SIZE))
    peer.payload(first, peer.objects[0])
    assert peer.answer(wire.PutReply) == wire.PutReply(1, bytes([SlotStatus.WRITABLE]))
    asked = peer.call(wire.Allocate(peer.handle, 0, b"".join(peer.keys)))
    assert list(asked.statuses) == [SlotStatus.PRESENT, *[SlotStatus.WRITABLE] * 3]
    number = peer.send(wire.Fill(asked.allocation, 3 * SIZE))
    peer.payload(number, b"".join(peer.objects[1:]))
    assert peer.answer(wire.Done).count == 3 and peer.stored() == COUNT


def test_what_is_there_already_is_dropped_and_kept_as_it_was(peer: Peer) -> None:
    for expected in (COUNT, 0):
        number = peer.put()
        peer.payload(number, b"".join(peer.objects))
        assert peer.answer(wire.PutReply).count == expected
    assert peer.stored() == COUNT


# --- what is not what it says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "trouble"),
    [
        (0, "magic"),
        (4, "version"),
        (12, "layout"),
        (16, "key"),
        (32, "parent"),
        (48, "namespace"),
        (80, "encryption"),
        (88, "header checksum"),
        (LAYOUT.checksums_offset, "part 0 checksum"),
        (LAYOUT.header_bytes, "part 0 checksum"),
        (SIZE - 1, "part 1 checksum"),
    ],
)
def test_an_object_that_is_not_what_its_header_and_the_request_say_stores_nothing(
    daemon: DaemonProcess, peer: Peer, at: int, trouble: str
) -> None:
    peer.objects[2][at] ^= 1
    number = peer.put()
    peer.payload(number, b"".join(peer.objects))
    with pytest.raises(BadRequest, match=f"object 2 .*{trouble}"):
        peer.answer(wire.PutReply)
    assert peer.stored() == 0  # and the session goes on
    peer.objects[2][at] ^= 1
    number = peer.put()
    peer.payload(number, b"".join(peer.objects))
    assert peer.answer(wire.PutReply).count == COUNT


def test_a_refused_puts_payload_is_dropped_and_the_session_goes_on(peer: Peer) -> None:
    number = peer.send(wire.Put(99, 0, b"".join(peer.keys), COUNT * SIZE))
    peer.payload(number, b"".join(peer.objects))
    with pytest.raises(UnknownHandle):
        peer.answer(wire.PutReply)
    number = peer.put(COUNT * SIZE - 1)
    peer.payload(number, b"".join(peer.objects)[:-1])
    with pytest.raises(BadRequest, match=f"not {COUNT * SIZE - 1}"):
        peer.answer(wire.PutReply)
    number = peer.send(wire.Fill(12345, SIZE))
    peer.payload(number, peer.objects[0])
    with pytest.raises(UnknownHandle):
        peer.answer(wire.Done)
    assert peer.stored() == 0


def test_an_allocation_whose_payload_is_on_its_way_ends_only_with_it(daemon: DaemonProcess, peer: Peer) -> None:
    allocation = peer.call(wire.Allocate(peer.handle, 0, b"".join(peer.keys))).allocation
    number = peer.send(wire.Fill(allocation, COUNT * SIZE))
    peer.payload(number, peer.objects[0])
    with pytest.raises(BadRequest, match="being filled"):
        peer.call(wire.Abort(allocation))  # else its places would be others' while payload still comes
    peer.payload(number, b"".join(peer.objects[1:]))
    assert peer.answer(wire.Done).count == COUNT


@pytest.mark.parametrize("wrong", ["unannounced", "other id", "longer", "empty", "second put"])
def test_payload_that_was_not_announced_ends_the_session(daemon: DaemonProcess, peer: Peer, wrong: str) -> None:
    if wrong != "unannounced":
        number = peer.put()
    if wrong == "unannounced":
        peer.payload(7, b"x")
    elif wrong == "other id":
        peer.payload(number + 1, peer.objects[0])
    elif wrong == "longer":
        peer.payload(number, b"", COUNT * SIZE + 1)
    elif wrong == "empty":
        peer.payload(number, b"")
    else:
        peer.put()
    assert peer.ended()
    assert stored_now(daemon, peer) == 0


@pytest.mark.parametrize("sent", [0, 1, LAYOUT.header_bytes, SIZE, COUNT * SIZE - 1])
@pytest.mark.parametrize("how", ["put", "fill"])
def test_a_connection_cut_in_the_middle_of_a_put_leaves_nothing(
    daemon: DaemonProcess, peer: Peer, sent: int, how: str
) -> None:
    if how == "put":
        number = peer.put()
    else:
        allocation = peer.call(wire.Allocate(peer.handle, 0, b"".join(peer.keys))).allocation
        number = peer.send(wire.Fill(allocation, COUNT * SIZE))
    peer.payload(number, b"".join(peer.objects)[:sent], COUNT * SIZE)
    eventually(lambda: daemon.stats()["sessions"]["uncommitted_bytes"], bool)
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))  # a reset, not a goodbye
    peer.close()
    daemon.at_base()  # nothing is quarantined: nobody else can touch the memory
    assert stored_now(daemon, peer) == 0


def test_a_reader_that_reads_nothing_holds_up_nobody_and_leaves_nothing(daemon: DaemonProcess, peer: Peer) -> None:
    number = peer.put()
    peer.payload(number, b"".join(peer.objects))
    peer.answer(wire.PutReply)
    for _ in range(300):
        peer.send(wire.Get(peer.handle, 0, b"".join(peer.keys)))  # some 20 MB of answers that nobody takes
    eventually(lambda: daemon.stats()["sessions"]["leases"], bool)
    assert daemon.stats()["sessions"]["leases"] <= 8  # further requests wait in its socket
    with Peer(daemon, 77) as other:
        assert other.stored() == 0
    peer.close()


# --- who comes in -----------------------------------------------------------------------------------------------------


def test_a_token_is_asked_for_and_a_wrong_one_refused(daemon: DaemonProcess) -> None:
    for token in ("", "fby_wrong", daemon.token + "x", "x" * 100_000):
        with RawSession(daemon.tcp) as session:
            with pytest.raises(AccessDenied) as refused:
                session.hello(token=token)
            assert session.ended()
            assert not token or token not in str(refused.value)
    assert daemon.token not in daemon.log and "fby_wrong" not in daemon.log


def test_a_right_that_is_missing_is_refused_and_its_payload_dropped(tmp_path: Path) -> None:
    reader = {"tenant": "default", "rights": ["read"], "token_sha256": "0" * 64}
    with DaemonProcess(tmp_path, tcp=True) as full:
        reader["token_sha256"] = full._credentials()["credentials"]["tests"]["token_sha256"]
    with DaemonProcess(tmp_path, tcp=True, credentials={"r": reader}) as daemon, Peer(daemon, 1) as peer:
        number = peer.put()
        peer.payload(number, b"".join(peer.objects))
        with pytest.raises(Forbidden):
            peer.answer(wire.PutReply)
        assert peer.stored() == 0


def test_a_version_of_the_future_is_refused_by_name(daemon: DaemonProcess) -> None:
    with RawSession(daemon.tcp) as session, pytest.raises(VersionMismatch):
        session.call(wire.Hello(2, 3, daemon.token, "", 0))
    with RawSession(daemon.tcp) as session:
        session.send_body(b"\xc0", version=2)
        with pytest.raises(VersionMismatch):
            session.answer(wire.HelloReply)
        assert session.ended()


def test_what_needs_shared_memory_is_refused_over_tcp_and_the_other_way_round(
    daemon: DaemonProcess, peer: Peer
) -> None:
    keys = b"".join(peer.keys)
    for request in (
        wire.MapExtents([1]),
        wire.Acquire(peer.handle, 0, keys),
        wire.Attach(1),
        wire.Write(1, 0, 0, b"x"),
        wire.Commit(1, b"\x01"),
    ):
        with pytest.raises(BadRequest, match="over TCP"):
            peer.call(request)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="parts"):
        peer.call(wire.Allocate(peer.handle, 0, keys, parts=1))
    with RawSession(daemon.socket) as local:
        local.hello()
        handle = local.open(FACTS).handle
        with pytest.raises(BadRequest, match="for TCP"):
            local.call(wire.Get(handle, 0, keys))


def test_a_peer_that_does_not_introduce_itself_is_dropped(daemon: DaemonProcess) -> None:
    quiet, slow = RawSession(daemon.tcp), RawSession(daemon.tcp)
    with quiet, slow:
        slow.sock.sendall(b"\x20\x00\x00\x00\x01\x01")  # the beginning of a header, and then nothing
        assert quiet.ended() and slow.ended()
    with RawSession(daemon.tcp) as session:
        session.hello(token=daemon.token)
        with pytest.raises(TimeoutError):
            session.sock.settimeout(1.5)
            session.sock.recv(1)  # who has, stays


def introduced(daemon: DaemonProcess) -> bool:
    """Whether a new peer is let in."""
    with RawSession(daemon.tcp) as session:
        try:
            return bool(session.hello(token=daemon.token).session)
        except (AssertionError, OSError):
            return False


def test_connections_are_bounded_and_silent_ones_shut_no_local_session_out(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, tcp=True, max_sessions=4, tcp_handshake_s=60.0) as daemon, ExitStack() as stack:
        assert introduced(daemon)
        silent = [stack.enter_context(RawSession(daemon.tcp)) for _ in range(20)]
        eventually(lambda: introduced(daemon), lambda let_in: not let_in)
        with RawSession(daemon.socket) as local:
            assert local.hello().session
        for session in silent:
            session.close()
        eventually(lambda: introduced(daemon), bool)


def test_tls_that_never_shakes_hands_is_dropped_and_plain_words_are_not_understood(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, tls=True, tcp_handshake_s=0.5) as daemon:
        with RawSession(daemon.tcp) as quiet:
            assert quiet.ended()
        with RawSession(daemon.tcp) as plain:
            plain.send(wire.Hello(1, 1, daemon.token, "", 0))
            assert plain.ended()
        assert daemon.stats()["sessions"]["open"] == 1
        assert daemon.token not in daemon.log


@pytest.mark.parametrize("seed", range(6))
def test_garbage_ends_its_own_session_and_no_other(daemon: DaemonProcess, peer: Peer, seed: int) -> None:
    rng = random.Random(seed)
    whole = b"".join(peer.objects)
    for _ in range(15):
        with Peer(daemon, seed) as bad:
            number = bad.put()
            frames = bytearray(HEADER.pack(len(whole), 1, Kind.PAYLOAD, 0, number) + whole)
            frames += wire.encode_frame(Kind.REQUEST, 99, wire.Stats())
            for _ in range(rng.randint(1, 4)):
                frames[rng.choice([rng.randrange(12), rng.randrange(len(frames))])] = rng.randrange(256)
            cut = rng.randrange(len(frames)) if rng.random() < 0.5 else len(frames)
            try:
                bad.sock.sendall(frames[:cut])
            except OSError:
                pass
    assert peer.stored() == 0


def test_a_killed_daemon_ends_its_peers(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, tcp=True) as daemon:
        with Peer(daemon, 3) as peer:
            number = peer.put()
            peer.payload(number, peer.objects[0])
            daemon.kill()
            assert peer.ended()
        daemon.start()
        with Peer(daemon, 3) as peer:
            assert peer.stored() == 0


def test_a_drain_ends_what_is_under_way_by_its_deadline(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, tcp=True) as daemon, Peer(daemon, 3) as peer:
        peer.put()
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(WAIT_S) == 0
        assert peer.ended()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(parse_address(daemon.tcp)).close()  # type: ignore[arg-type]
