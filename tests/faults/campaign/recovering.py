"""`recovery.in_child` by a process that has its modules loaded already: a check of an index costs 20 ms and not 400.

The child is a process of its own all the same, for a damaged index can end the process that reads it.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb

from forebay.tiers.ssd import recovery
from forebay.tiers.ssd.catalog import BadCatalog
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import Home, host_id, read_identity

NURSERY = multiprocessing.get_context("forkserver")
_PATIENCE_S = 5.0
PRELOADED = ["tests.faults.campaign.nursery"]


def in_child(verb: str, path: Path) -> dict[str, object]:
    """Run `check` or `rebuild` on a locked directory. Raises: ChildFailed."""
    NURSERY.set_forkserver_preload(PRELOADED)
    here, there = NURSERY.Pipe(duplex=False)
    child = NURSERY.Process(target=_run, args=(verb, path, there), daemon=True)
    child.start()
    there.close()
    try:
        found: dict[str, object] | str = here.recv() if here.poll(_PATIENCE_S) else "no answer"
    except EOFError:
        found = "no answer"
    here.close()
    child.kill()  # it has said what it had to say, or a damaged index holds it for ever
    child.join(1.0)
    if isinstance(found, str):
        raise recovery.ChildFailed(f"{verb} of the index: {found}")
    return found


def _run(verb: str, path: Path, answer: Connection) -> None:
    files = Files()
    id_, segment_bytes = read_identity(path, files, host_id())
    home = Home(path, id_, segment_bytes, -1)
    try:
        if verb == "rebuild":
            answer.send(asdict(recovery.rebuild(home, files)))
            return
        checked = recovery.check(home, files)
        answer.send(checked.trouble or asdict(checked))
    except (BadCatalog, OSError, lmdb.Error) as exc:
        answer.send(f"{type(exc).__name__}: {exc}")
