"""A directory over time: opening, serving, failed, opened again. One thread each keeps it so.

Always true: a directory in trouble takes nobody else down; whoever asks it meanwhile is told why at once; it is tried again
by itself, and deletes that it missed are done before it serves again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from forebay.kvstore.tier import ObjectKey
from forebay.tiers.ssd import recovery
from forebay.tiers.ssd.directory import Directory, DirectoryOptions
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import IDENTITY_NAME, DirectoryRefused
from forebay.tiers.ssd.workers import Workers

log = logging.getLogger(__name__)

_STABLE_S: Final = 10.0
_MISSED_LIMIT: Final = 100_000


class Volume:
    """One configured directory. `directory` is None while it does not serve, and `reason` says why."""

    def __init__(
        self,
        path: Path,
        files: Files,
        options: DirectoryOptions,
        *,
        threads: int,
        retry_s: float,
        retry_limit_s: float = 60.0,
        failures_limit: int = 4,
        host: str | None = None,
        child: Callable[[str, Path], dict[str, object]] = recovery.in_child,
    ) -> None:
        self.path = path
        self._files, self._options, self._host, self._child = files, options, host, child
        self._retry_s, self._retry_limit_s, self._failures_limit = retry_s, retry_limit_s, failures_limit
        self.directory: Directory | None = None
        self.reason = "opening"
        self.workers = Workers(f"ssd-{path.name}", threads)
        self.failures = 0
        self.reopened = 0
        self._failures_in_row = 0
        self._error: BaseException | None = None
        self._hanging: Directory | None = None  # could not be closed, since threads hang in its disk
        self._device: int | None = None  # the filesystem that it served from
        self._missed: set[ObjectKey] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._settled = threading.Event()  # the first attempt to open has ended, or takes long
        self._closing = False
        self._close_timeout_s = 20.0
        self._thread = threading.Thread(target=self._run, name=f"ssd-keeper-{path.name}", daemon=True)
        self._thread.start()

    def settled(self, timeout_s: float) -> bool:
        """Wait until it serves, has failed, or is known to take long."""
        return self._settled.wait(timeout_s)

    # --- health ---------------------------------------------------------------------------------------------------

    def trouble(self, exc: BaseException) -> None:
        """A call met an error of the medium; several in a row, and the directory is opened anew."""
        self.failures += 1
        self._failures_in_row += 1
        if self._failures_in_row >= self._failures_limit:
            self.fail(exc)

    def fine(self) -> None:
        """A call went well."""
        self._failures_in_row = 0

    def fail(self, exc: BaseException) -> None:
        """Take it out of use now; its thread opens it again."""
        self.reason = f"{self.path}: {exc}"
        self._error = exc
        self._wake.set()

    def miss_delete(self, key: ObjectKey) -> bool:
        """Have an object deleted as soon as the directory is back. False: too many wait already, or it serves."""
        with self._lock:
            if self.directory is not None or len(self._missed) >= _MISSED_LIMIT:
                return False
            self._missed.add(key)
            return True

    @property
    def serving(self) -> Directory | None:
        """The directory, if it may be used now."""
        return None if self._error is not None else self.directory

    # --- the keeper's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_s = self._retry_s
        while not self._closing:
            if self._open():
                wait_s = self._retry_s
                self._watch()
            if not self._closing:
                self._wake.wait(wait_s)
                self._wake.clear()
                wait_s = min(2 * wait_s, self._retry_limit_s)

    def _open(self) -> bool:
        if self._hanging is not None and not self._hanging.close(0.1, clean=False):
            self._say(f"{self.path}: the disk does not answer")
            self._settled.set()
            return False
        self._hanging = self._error = None
        self._failures_in_row = 0
        try:
            device = self._check_device()
            directory = Directory.open(
                self.path,
                self._files,
                self._options,
                self.fail,
                host=self._host,
                telling=self._tell,
                child=self._child,
            )
        except DirectoryRefused as exc:
            self._say(str(exc))
        except OSError as exc:
            self._say(f"{self.path}: {exc.strerror or exc}")
        except Exception as exc:
            log.exception("a directory could not be opened", extra={"path": str(self.path)})
            self._say(f"{self.path}: {exc}")
        else:
            self._device = device
            return self._serve(directory)
        self._settled.set()
        return False

    def _check_device(self) -> int:
        """The filesystem that the directory is on.

        Raises: DirectoryRefused: its disk is gone, and the directory would be made on the one below; OSError.
        """
        device = self._files.device(self.path)
        moved = self._device is not None and device != self._device
        if moved and not (self.path.exists() and IDENTITY_NAME in self._files.names(self.path)):
            raise DirectoryRefused(
                f"{self.path}: its filesystem is no longer mounted: mount it again, or restart to use what lies there now"
            )
        return device

    def _say(self, reason: str) -> None:
        if reason != self.reason:
            log.error("a directory is not used", extra={"reason": reason})
        self.reason = reason

    def _tell(self, doing: str) -> None:
        self.reason = f"{self.path}: {doing}"
        self._settled.set()

    def _serve(self, directory: Directory) -> bool:
        try:
            while True:
                with self._lock:
                    if not self._missed:
                        self.directory, self.reason = directory, ""
                        break
                    missed, self._missed = self._missed, set()
                for done in [directory.committer.delete(key) for key in missed]:
                    done.result(timeout=60.0)
        except Exception as exc:
            with self._lock:
                self._missed |= missed
            self._say(f"{self.path}: {exc}")
            if not directory.close(clean=False):
                self._hanging = directory
            return False
        self.reopened += 1
        self._settled.set()
        log.info("directory in use", extra={"path": str(self.path), "objects": directory.stats()["objects"]})
        return True

    def _watch(self) -> None:
        """Until it fails or is to be closed."""
        directory = self.directory
        assert directory is not None
        stable = False
        while not self._closing and self._error is None:
            self._wake.wait(_STABLE_S)
            self._wake.clear()
            if not stable and time.monotonic() - directory.opened_s >= _STABLE_S and self._error is None:
                stable = True
                try:
                    directory.note_stable()
                except OSError as exc:
                    self._error = exc
        if self._error is not None and not self._closing:
            log.error("a directory is taken out of use", extra={"reason": self.reason})
        with self._lock:
            self.directory = None
            if self._error is None:
                self.reason = "closed"
        if self._closing:
            self.workers.close(self._close_timeout_s)
        if not directory.close(self._close_timeout_s, clean=self._error is None):
            self._hanging = directory

    def close(self, timeout_s: float) -> None:
        """Finish what runs and close the directory, waiting at most so long."""
        self._close_timeout_s = timeout_s
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s + 1.0)
        self.workers.close(0.1)

    def stats(self) -> dict[str, Any]:
        directory = self.serving
        found: dict[str, Any] = {} if directory is None else directory.stats()
        counters = {"failures": self.failures, "opened": self.reopened, **found.get("counters", {})}
        return {
            "serving": int(directory is not None),
            "reason": self.reason,
            "deletes_waiting": len(self._missed),
            **found,
            "counters": counters,
        }
