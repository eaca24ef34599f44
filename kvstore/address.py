"""Where daemon and clients meet: addresses as users write them, and the socket when nobody names one.

Both sides compute the same path from the same facts, so that neither needs a setting. Leaves binding to the server
and connecting to the clients. Always true: the folder of a default socket belongs to the caller alone, so that no
other user can put a socket of theirs in its place.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

SOCKET_NAME = "forebay.sock"
SOCKET_VARIABLE = "FOREBAY_SOCKET"
TCP_SCHEME = "tcp://"
# A host that vanished is noticed within some 25 s, whether data is under way (user timeout) or not (keepalive).
_KEEPALIVE_IDLE_S: Final = 10
_KEEPALIVE_EVERY_S: Final = 5
_KEEPALIVE_COUNT: Final = 3
_USER_TIMEOUT_MS: Final = 25_000


class TcpAddress(NamedTuple):
    """A daemon on another host, or on this one by way of TCP."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{TCP_SCHEME}[{self.host}]:{self.port}" if ":" in self.host else f"{TCP_SCHEME}{self.host}:{self.port}"


Address = Path | TcpAddress


def parse_address(text: str | Path) -> Address:
    """A path of a Unix socket, or "tcp://host:port". Raises: ValueError that says what to write instead."""
    if isinstance(text, Path):
        return text
    if "://" not in text:
        return Path(text)
    advice = f"{text!r} is no address of a daemon: write a path, or {TCP_SCHEME}HOST:PORT"
    if not text.startswith(TCP_SCHEME):
        raise ValueError(advice)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ValueError(advice) from exc
    if not host or not port or parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(advice)  # a token in an address would end up in logs
    return TcpAddress(host, port)


def keep_alive(sock: socket.socket) -> None:
    """Set up a TCP socket: no waiting for more to send, and an end when the other host has vanished."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_EVERY_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def default_socket_path(environ: Mapping[str, str] | None = None, *, root: Path = Path("/")) -> Path:
    """FOREBAY_SOCKET, else forebay.sock in the first of $XDG_RUNTIME_DIR, /run/user/UID, /tmp/forebay-UID.

    A folder counts when it exists and belongs to this user; the last one is made on demand by `private_folder`.
    `root` is where /run and /tmp hang, for tests.
    """
    environ = os.environ if environ is None else environ
    if named := environ.get(SOCKET_VARIABLE):
        return Path(named)
    uid = os.getuid()
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(runtime)] if runtime.startswith("/") else []
    candidates.append(root / "run" / "user" / str(uid))
    for folder in candidates:
        if folder.is_dir() and folder.stat().st_uid == uid:
            return folder / SOCKET_NAME
    return fallback_folder(root) / SOCKET_NAME


def fallback_folder(root: Path = Path("/")) -> Path:
    """Where the default socket lies when this user has no runtime folder. Others may write beside it: see `private_folder`."""
    return root / "tmp" / f"forebay-{os.getuid()}"


def private_folder(folder: Path) -> None:
    """Make `folder` with mode 0700 if it is missing, and refuse one that another user could have put there.

    Raises:
        ValueError: it is a link, no folder, belongs to someone else, or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    found = folder.lstat()  # lstat: a link planted in /tmp must not be followed
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{folder} is not a folder: remove it, or name another socket with --socket")
    if found.st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to uid {found.st_uid}, not to you: name another socket with --socket")
    if found.st_mode & 0o022:
        raise ValueError(f"others may write to {folder}: run `chmod 700 {folder}`, or name another socket")
