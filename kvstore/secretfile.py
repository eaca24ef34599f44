"""Files that hold a secret: read only if nobody else can read them, made so that nobody ever could.

Used for tenants' secrets by the daemon and for tokens by clients. Always true: what was read is in no error and no repr.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

TOKEN_VARIABLE = "FOREBAY_TOKEN"
TOKEN_FILE_VARIABLE = "FOREBAY_TOKEN_FILE"
_MAX_BYTES = 4096


def token_from_environment(environ: Mapping[str, str] | None = None) -> str:
    """FOREBAY_TOKEN, else the content of the file that FOREBAY_TOKEN_FILE names, else "".

    Raises: ValueError: that file can't be read, or others may read it.
    """
    environ = os.environ if environ is None else environ
    if token := environ.get(TOKEN_VARIABLE):
        return token
    path = environ.get(TOKEN_FILE_VARIABLE)
    return read_secret_file(Path(path)).decode("ascii", "replace") if path else ""


def read_secret_file(path: Path) -> bytes:
    """The file's content without surrounding white space.

    Raises:
        ValueError: it can't be read, is empty or too long, or others may read or write it. The text says what to do.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe there must not hold us
    except OSError as exc:
        raise ValueError(f"{path} cannot be read ({exc.strerror}): check the path and its owner") from exc
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a regular file: name a file that holds the secret")
        if found.st_mode & 0o077:
            raise ValueError(f"others may read or write {path}: run `chmod 600 {path}`")
        if found.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"{path} belongs to uid {found.st_uid}: a secret must belong to this user or to root")
        content = os.read(descriptor, _MAX_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if not content or len(content) > _MAX_BYTES:
        raise ValueError(f"{path} holds {'nothing' if not content else 'too much'}: write one secret into it")
    return content


def write_secret_file(path: Path, secret: bytes) -> None:
    """Make a file of mode 0600 with `secret` and a line end. Raises: FileExistsError; OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret + b"\n")
