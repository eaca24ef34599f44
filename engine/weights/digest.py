"""A model's weights digest: what the store's namespace knows a model by.

    digest = SHA-256("forebay weights 1" and a line end ‖ config ‖ for each weight file by name: its SHA-256)

config: the `ModelConfig` fields that change what K and V are, as sorted "name=value" lines; its context length and end
tokens are not among them. Names and places of files are not part of it. Always true: a file's SHA-256 is taken of its whole
content, and remembered under its size and mtime_ns beside it (`NAME.forebay-digest`), or in the cache folder where the file
is a link or its folder can't be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from forebay.engine.config import ModelConfig

_LABELS = {"context_tokens", "eos_token_ids"}
_CHUNK_BYTES = 8 << 20


def weights_digest(config: ModelConfig, files: Sequence[Path], advance: Callable[[int], None] | None = None) -> bytes:
    """32 bytes. advance: told of bytes hashed, or known already."""
    digest = hashlib.sha256(b"forebay weights 1\n")
    facts = {name: value for name, value in asdict(config).items() if name not in _LABELS}
    digest.update("".join(f"{name}={json.dumps(facts[name], sort_keys=True)}\n" for name in sorted(facts)).encode())
    for file in sorted(files, key=lambda f: f.name):
        digest.update(_file_digest(file, advance or (lambda count: None)))
    return digest.digest()


def _file_digest(file: Path, advance: Callable[[int], None]) -> bytes:
    before = file.stat()
    state = {"size": before.st_size, "mtime_ns": before.st_mtime_ns}
    notes = _note_places(file)
    for note in notes:
        try:
            known = json.loads(note.read_bytes())
            if {name: known[name] for name in state} == state:
                advance(before.st_size)
                return bytes.fromhex(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
        after = os.fstat(source.fileno())
    # Only what stood still while it was read is remembered.
    if (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
        for note in notes:
            if _remember(note, state | {"sha256": digest.hexdigest()}):
                break
    return digest.digest()


def _note_places(file: Path) -> list[Path]:
    """Beside the file, unless it is a link (a hub cache holds blobs and links that are not ours to add to); the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay" / "digests"
    place = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    beside = [] if file.is_symlink() else [file.with_name(file.name + ".forebay-digest")]
    return [*beside, cache / f"{place}.json"]


def _remember(note: Path, facts: dict[str, object]) -> bool:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        handle, staged = tempfile.mkstemp(dir=note.parent, prefix=".forebay-digest-")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "w") as sink:
            json.dump(facts, sink)
        os.replace(staged, note)
    except OSError:
        Path(staged).unlink(missing_ok=True)
        return False
    return True
