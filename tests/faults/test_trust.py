"""A hostile client maps what it was given and tries everything: it reaches its own domain's bytes and nobody else's."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import Client
from forebay.kvstore import wire
from forebay.tiers.ram import RamTier
from tests.daemon_process import MIB, ROOT, WAIT_S, DaemonProcess, RawSession, facts_of, payload_of, serving, tokens_of
from tests.faults.conftest import Bystander

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a client of another user")


def extents_of(session: RawSession, blocks: int = 20) -> tuple[list[int], list[int]]:
    """(numbers, descriptors) of extents that the daemon shares with this session."""
    handle = session.open(facts_of(salt=b"hostile")).handle
    given = session.call(wire.Allocate(handle, 0, os.urandom(16 * blocks)))
    numbers = sorted({place["extent"].item() for place in _places(given.locations)})
    already = len(session.descriptors)
    assert session.call(wire.MapExtents(numbers)).extents == numbers
    return numbers, session.descriptors[already:]


def _places(locations: bytes) -> Any:
    import numpy as np

    return np.frombuffer(locations, wire.LOCATION_DTYPE)


def refusals(descriptor: int, *, writable: bool) -> list[str]:
    """What the kernel let happen of all that must not: changing the size, the seals, or (if not writable) a byte."""
    allowed = []
    size = os.fstat(descriptor).st_size

    def attempt(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except (PermissionError, OSError):
            return
        allowed.append(name)

    attempt("shrink", lambda: os.ftruncate(descriptor, size // 2))
    attempt("grow", lambda: os.ftruncate(descriptor, 2 * size))
    attempt("write past the end", lambda: os.pwrite(descriptor, b"x", size))
    attempt("seal", lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0x10))
    if not writable:
        attempt("map writable", lambda: mmap.mmap(descriptor, mmap.PAGESIZE).close())
        attempt("write", lambda: os.pwrite(descriptor, b"x", 0))
        attempt("punch a hole", lambda: punch(descriptor))
        attempt("reopen and write", lambda: reopened(descriptor))
        with mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ) as mapped:
            import numpy as np

            address = np.frombuffer(mapped, np.uint8).ctypes.data
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0:
                allowed.append("mprotect to writable")
    return allowed


def punch(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)):  # KEEP_SIZE | PUNCH_HOLE
        raise OSError(ctypes.get_errno(), "fallocate")


def reopened(descriptor: int) -> None:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        mmap.mmap(again, mmap.PAGESIZE).close()
    finally:
        os.close(again)


def test_extents_can_be_written_by_their_domain_and_neither_resized_nor_sealed(
    daemon: DaemonProcess, bystander: Bystander
) -> None:
    with RawSession(daemon.socket) as session:
        session.hello()
        for descriptor in extents_of(session)[1]:
            assert refusals(descriptor, writable=True) == []
    bystander.store_more(1)


def test_the_board_of_generations_can_only_be_read(daemon: DaemonProcess) -> None:
    with RawSession(daemon.socket) as session:
        session.hello()
        assert refusals(session.descriptors[0], writable=False) == []


def test_scribbling_over_its_own_domain_harms_bytes_there_and_nothing_of_the_daemon(
    daemon: DaemonProcess, bystander: Bystander
) -> None:
    with RawSession(daemon.socket) as session:
        session.hello()
        for descriptor in extents_of(session)[1]:
            with mmap.mmap(descriptor, os.fstat(descriptor).st_size) as mapped:
                mapped[:] = os.urandom(len(mapped))
        session.call(wire.Stats())
    # Within a domain clients trust each other's bytes; a check still tells damage from data, and never as a hit.
    with bystander.space.acquire(bystander.keys, bystander.tokens) as lease:
        assert len(lease) == 0
    assert bystander.space.get_into(bystander.keys, bytearray(bystander.size * len(bystander.keys))) == 0
    daemon.audit()
    bystander.space.delete(bystander.keys)
    assert bystander.space.put(bystander.keys, bystander.tokens, bystander.payloads).stored == len(bystander.keys)


# --- other users ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def open_to_all() -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="forebay-test-") as folder:  # not below pytest's, which is its user's alone
        Path(folder).chmod(0o755)
        yield from serving(Path(folder), socket_mode="0666")


def as_nobody(script: str, *args: str) -> str:
    """Run a script as another user; returns what it prints."""
    program = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from forebay.kvstore import wire, errors
from tests.daemon_process import RawSession, facts_of
from pathlib import Path
import tests.faults.test_trust as trust
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
{script}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_root
def test_another_users_session_is_another_domain_that_sees_none_of_our_blocks_and_maps_none_of_our_memory(
    open_to_all: DaemonProcess,
) -> None:
    bystander = Bystander(open_to_all.socket)
    with bystander.client, bystander.space.acquire(bystander.keys) as lease:
        numbers = ",".join(str(number) for number in sorted({place["extent"].item() for place in lease.places}))
        said = as_nobody(
            """
session = RawSession(Path(sys.argv[1]))
print(session.hello("bystander").domain, end=" ")
handle = session.open(facts_of(salt=b"bystander")).handle
keys = bytes.fromhex(sys.argv[2])
print(session.call(wire.Match(handle, 0, keys)).runs, session.call(wire.Acquire(handle, 0, keys)).lease, end=" ")
print(session.call(wire.MapExtents([int(n) for n in sys.argv[3].split(",")])).extents, end=" ")
print(session.call(wire.Pin(handle, 0, keys)).count, session.call(wire.Delete(handle, 0, keys)).count, end=" ")
for request in (wire.Attach(int(sys.argv[4])), wire.Release(int(sys.argv[4]))):
    try:
        session.call(request)
    except errors.UnknownHandle:
        print("refused", end=" ")
print(session.call(wire.Settle([bytes.fromhex(sys.argv[5])])).count)
""",
            str(open_to_all.socket),
            b"".join(bystander.keys).hex(),
            numbers,
            str(lease._number),
            bystander.client._life.session.hex(),  # type: ignore[union-attr]
        )
        assert said == f"default/{NOBODY} [] 0 [] 0 0 refused refused 0"
        bystander.check()


@needs_root
def test_a_socket_is_its_owners_alone_unless_told_otherwise(daemon: DaemonProcess) -> None:
    daemon.socket.parent.chmod(0o777)
    said = as_nobody(
        """
try:
    RawSession(Path(sys.argv[1]))
except PermissionError:
    print("refused")
""",
        str(daemon.socket),
    )
    assert said == "refused"


def test_memory_that_held_one_domains_bytes_never_holds_anothers() -> None:
    tier = RamTier(capacity_bytes=2 * MIB, extent_bytes=MIB)
    try:
        first, second = tier.domain("a/1"), tier.domain("b/2")
        table = first.table(b"n" * 16, 0, 64 << 10)
        keys = [bytes([i]) * 16 for i in range(60)]
        given = first.allocate(table, keys, b"n" * 16, blocking=True)
        rows = given.rows[given.rows >= 0]
        secret = b"secret!!" * 100
        for row in rows.tolist():
            first.object_view(row)[: len(secret)] = secret
        first.commit(table, rows)
        seen = {extent.number for extent in first.extents.values()}
        theirs = second.table(b"n" * 16, 0, 64 << 10)
        got = second.allocate(theirs, keys[:20], b"n" * 16, blocking=True)
        assert (got.rows >= 0).any(), "the second domain got no memory"
        for row in got.rows[got.rows >= 0].tolist():
            assert not any(second.object_view(row))
        assert not seen & {extent.number for extent in second.extents.values()}
        tier.audit()
    finally:
        for domain in tier.domains.values():
            domain.close_memory()


# --- read-only domains --------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path, domains={"*": {"read_only": True}})


def test_a_read_only_domain_is_written_through_the_socket_and_cannot_be_mapped_writable(
    read_only: DaemonProcess,
) -> None:
    with Client(read_only.socket) as client:
        space = client.open(facts_of())
        tokens = tokens_of(1, 20)
        keys = space.keys(tokens)
        payloads = [payload_of(space.id, key, space.layout().payload_bytes) for key in keys]
        assert space.put(keys, tokens, payloads).stored == 20
        with space.acquire(keys, tokens) as lease:
            assert [bytes(view) for view in lease.views] == payloads and lease.verify() == 20
        with pytest.raises(PermissionError, match="read-only"):
            space.allocate(space.keys(tokens_of(2, 2)), tokens_of(2, 2))
        with RawSession(read_only.socket) as session:
            assert session.hello().read_only
            for descriptor in extents_of(session)[1]:
                assert refusals(descriptor, writable=False) == []
        with space.acquire(keys, tokens) as lease:
            assert lease.verify() == 20
