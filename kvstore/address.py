"""Where daemon and clients meet when nobody names a socket.

Both sides compute the same path from the same facts, so that neither needs a setting. Leaves binding to the server
and connecting to the clients. Always true: the folder of a default socket belongs to the caller alone, so that no
other user can put a socket of theirs in its place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

SOCKET_NAME = "forebay.sock"
SOCKET_VARIABLE = "FOREBAY_SOCKET"


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
