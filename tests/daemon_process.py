"""A real daemon in a process of its own, and a bare session that speaks frames: what process tests stand on.

Run as a module it is that daemon: a `Daemon` with small memory that answers SIGUSR1 with an audit of its byte accounts.
Always true: a daemon started here is dead when its `with` block ends, and its log is shown when the block fails.
"""

from __future__ import annotations

import array
import asyncio
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from forebay.kvstore import wire
from forebay.kvstore.address import parse_address
from forebay.kvstore.errors import ForebayError
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.wire import HEADER, Kind, Request, encode_frame

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
WAIT_S = 10.0  # the longest a test waits for what must come
MIB = 1 << 20
LOWER_BYTES = 64 * MIB


def facts_of(**changes: Any) -> NamespaceFacts:
    """A small namespace: blocks of 16 tokens, 16 KiB of payload in two parts."""
    fields: dict[str, Any] = {
        "weights_digest": b"w" * 32,
        "weight_format": "bf16",
        "compute_dtype": "bf16",
        "kv_dtype": "bf16",
        "producer": "test/none",
        "block_tokens": 16,
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "rope": b"r",
    }
    return NamespaceFacts(**(fields | changes))


def tokens_of(seed: int, blocks: int, block_tokens: int = 16) -> list[int]:
    """The tokens of one made-up prompt."""
    return np.random.default_rng(seed).integers(0, 1 << 31, blocks * block_tokens).tolist()


def payload_of(namespace: bytes, key: bytes, size: int) -> bytes:
    """A payload that is a function of its namespace and key, every word different: any other block's bytes are noticed."""
    seed = xxhash.xxh3_64_intdigest(namespace + key)
    words = np.arange(size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    return words.tobytes()


def eventually(read: Callable[[], T], good: Callable[[T], bool]) -> T:
    """Read until it is good, and return that; fail with the last reading after WAIT_S."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        found = read()
        if good(found):
            return found
        assert time.monotonic() < deadline_s, f"still {found!r}"
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port that nobody listens on now. Kept over restarts of a daemon, unlike one that it would choose."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class DaemonProcess:
    """One daemon process on a socket in `folder`. `lower`: with a tier in its own memory below RAM, `slow` for a slow one.

    `tcp`: with the session door on TCP, too, for those who have `token`; `tls`: with a certificate that `authority`, a PEM
    file, has signed. Who comes by TCP shares blocks with who comes by the Unix socket.
    """

    token = "fby_of_the_tests"

    def __init__(self, folder: Path, *, lower: str = "", tcp: bool = False, tls: bool = False, **settings: Any) -> None:
        self.socket = folder / "d.sock"
        self.authority = folder / "authority.pem"
        self._log = folder / "daemon.log"
        if tcp or tls:
            settings = {"tcp_port": free_port(), **self._credentials()} | settings
            self.tcp = f"tcp://127.0.0.1:{settings['tcp_port']}"
        if tls:
            settings |= make_certificate(folder, self.authority)
        small = {"ram_bytes": 16 * MIB, "extent_bytes": MIB, "memory_reserve_bytes": 0, "http_port": -1, "ssd_bytes": 0}
        self._settings = small | {"socket": str(self.socket), "drain_s": 0.2} | settings
        self._lower = lower
        self.process: subprocess.Popen[str]
        self.start()

    def _credentials(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.token.encode()).hexdigest()
        rights = ["read", "write", "admin"]
        return {
            "credentials": {"tests": {"tenant": "default", "rights": rights, "token_sha256": digest}},
            "unix_rights": rights,
        }

    def start(self) -> None:
        """Start, or start again after `kill`; returns once it serves."""
        command = [sys.executable, "-m", "tests.daemon_process", json.dumps(self._settings), self._lower]
        keep = "FOREBAY_TEST_GUARD_OFF"
        environ = {name: os.environ[name] for name in os.environ if name == keep or not name.startswith("FOREBAY_")}
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._expect("ready")

    def _expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], f"no {word!r} from the daemon\n{self.log}"
        said = self.process.stdout.readline().strip()
        assert said == word, f"{said!r} instead of {word!r}\n{self.log}"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def audit(self) -> None:
        """Recompute the accounts of memory and index from the slots. Fails on any difference."""
        self.signal(signal.SIGUSR1)
        self._expect("audited")

    def stats(self) -> dict[str, Any]:
        with RawSession(self.socket) as session:
            session.hello()
            found: dict[str, Any] = session.call(wire.Stats()).stats
        return found

    def at_base(self, *, others: int = 0) -> dict[str, Any]:
        """Wait until no session is left but the asking one and `others`, and nothing is held for any; audit.

        Returns the stats.
        """

        def held(stats: dict[str, Any]) -> dict[str, int]:
            names = ("leases", "leased_blocks", "uncommitted_bytes", "orphans", "quarantined_bytes")
            found = {name: stats["sessions"][name] for name in names}
            memory = stats["tiers"]["ram"]["bytes"]
            found |= {f"ram {name}": memory[name] for name in ("allocated", "quarantined")}
            return found | {"sessions": stats["sessions"]["open"] - 1 - others}

        stats = eventually(self.stats, lambda stats: not any(held(stats).values()))
        self.audit()
        return stats

    def descriptors(self) -> int:
        """How many descriptors the daemon has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        self.kill()
        if exc is not None:
            exc.add_note(f"daemon's log:\n{self.log[-4000:]}")


def make_certificate(folder: Path, authority: Path) -> dict[str, str]:
    """A certificate for 127.0.0.1 in `folder`, by an authority made for it. Returns the settings that name it."""
    import trustme

    signer = trustme.CA()
    signer.cert_pem.write_to_path(str(authority))
    issued = signer.issue_cert("127.0.0.1")
    certificate, key = folder / "server.pem", folder / "server.key"
    for pem in issued.cert_chain_pems:
        pem.write_to_path(str(certificate), append=True)
    issued.private_key_pem.write_to_path(str(key))
    return {"tcp_tls_cert": str(certificate), "tcp_tls_key": str(key)}


class RawSession:
    """A socket to the daemon that says what it is told to, right or wrong. `where`: a Unix socket, or "tcp://host:port"."""

    def __init__(self, where: Path | str) -> None:
        address = parse_address(where)
        family = socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.settimeout(WAIT_S)
        self.sock.connect(str(address) if isinstance(address, Path) else address)
        self.id = b""
        self.descriptors: list[int] = []
        self._bytes = b""
        self._last_id = 0

    def send(self, request: Request[Any]) -> int:
        self._last_id += 1
        self.sock.sendall(encode_frame(Kind.REQUEST, self._last_id, request))
        return self._last_id

    def send_body(self, body: bytes, *, kind: int = Kind.REQUEST, version: int = wire.PROTOCOL_VERSION) -> None:
        self.sock.sendall(HEADER.pack(len(body), version, kind, 0, 7) + body)

    def receive(self) -> tuple[int, int, bytes] | None:
        """(kind, id, body) of the next frame; None when the daemon has closed the connection."""
        while True:
            if len(self._bytes) >= HEADER.size:
                length, _, kind, _, number = HEADER.unpack_from(self._bytes)
                end = HEADER.size + length
                if len(self._bytes) >= end:
                    body, self._bytes = self._bytes[HEADER.size : end], self._bytes[end:]
                    return kind, number, body
            try:
                data, ancillary, _, _ = self.sock.recvmsg(1 << 20, socket.CMSG_SPACE(4 * 64))
            except ConnectionResetError:
                return None
            for _, _, rights in ancillary:
                received = array.array("i")
                received.frombytes(rights[: len(rights) - len(rights) % received.itemsize])
                self.descriptors.extend(received)
            if not data:
                return None
            self._bytes += data

    def answer(self, reply: type[T]) -> T:
        """The next answer. Raises: the ProtocolError that it stands for."""
        frame = self.receive()
        assert frame is not None, "the daemon closed the connection"
        kind, _, body = frame
        if kind == Kind.ERROR:
            raise wire.decode_error(body)
        assert kind == Kind.REPLY
        return msgspec.msgpack.decode(body, type=reply)

    def call(self, request: Request[T]) -> T:
        self.send(request)
        return self.answer(reply_type(request))

    def hello(self, engine_id: str = "", previous: Sequence[bytes] = (), token: str = "") -> wire.HelloReply:
        version = wire.PROTOCOL_VERSION
        reply = self.call(wire.Hello(version, version, token, engine_id, 0, list(previous)))
        self.id = reply.session
        return reply

    def open(self, facts: NamespaceFacts) -> wire.OpenReply:
        return self.call(wire.Open(facts.encode()))

    def ended(self) -> bool:
        """Whether the daemon closes the connection, after what it has still to say."""
        while self.receive() is not None:
            pass
        return True

    def close(self) -> None:
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> RawSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def reply_type(request: Request[T]) -> type[T]:
    """The reply's type that a request's class names."""
    from forebay.clients.transport import _reply_type

    found: type[T] = _reply_type(type(request))
    return found


def serving(folder: Path, **options: Any) -> Iterator[DaemonProcess]:
    """For fixtures: a daemon for as long as the fixture lives."""
    with DaemonProcess(folder, **options) as daemon:
        yield daemon


async def _serve(settings: dict[str, Any], lower: str) -> None:
    from forebay.server import logs
    from forebay.server.daemon import Daemon
    from forebay.server.settings import Settings
    from forebay.tiers.memory import MemoryTier
    from forebay.tiers.wrappers import Throttled
    from tests.faults.guards import switch_off

    switch_off()
    tiers: list[Any] = [MemoryTier("below", LOWER_BYTES)] if lower else []
    if lower == "slow":
        tiers = [Throttled(tiers[0], latency_s=0.3)]
    logs.set_up("info", "text")
    daemon = Daemon(Settings.load(None, **settings), lower=tiers)
    await daemon.start()

    def audit() -> None:
        try:
            daemon.ram.audit()
            print("audited", flush=True)
        except ForebayError as exc:
            print(f"audit failed: {exc}", flush=True)

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, audit)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    await stop.wait()
    await daemon.drain()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(json.loads(sys.argv[1]), sys.argv[2]))
