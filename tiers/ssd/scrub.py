"""Reading what lies on the disk, slowly and all the time, so that damage is found before somebody needs the object.

Always true: it reads at most its rate, a damaged object is dropped durably and counted, and a segment that is being emptied
is left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from forebay.tiers.ssd.catalog import SegmentState
from forebay.tiers.ssd.committer import Committer
from forebay.tiers.ssd.files import Files
from forebay.tiers.ssd.home import Home
from forebay.tiers.ssd.layout import Record, SegmentHeader
from forebay.tiers.ssd.recovery import read_toc, sound
from forebay.tiers.ssd.segments import Segment, SegmentTable

log = logging.getLogger(__name__)


class Scrubber:
    """One directory's thread that verifies. bytes_per_s: 0 never reads."""

    def __init__(
        self,
        home: Home,
        files: Files,
        table: SegmentTable,
        committer: Committer,
        bytes_per_s: float,
        failed: Callable[[BaseException], None],
        *,
        pause_s: float = 600.0,
    ) -> None:
        self._home, self._files, self._table, self._committer = home, files, table, committer
        self._rate, self._pause_s, self._failed = bytes_per_s, pause_s, failed
        self._stop = threading.Event()
        self.scrubbed_bytes = 0
        self.passes = 0
        self.damaged = 0
        self._thread = threading.Thread(target=self._run, name="ssd-scrub", daemon=True)

    def start(self) -> None:
        if self._rate > 0:
            self._thread.start()

    def close(self, timeout_s: float) -> bool:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            # Not at once: a start has better things to read.
            while not self._stop.wait(min(self._pause_s, 30.0) if not self.passes else self._pause_s):
                self.one_pass()
        except OSError as exc:
            self._failed(exc)
        except Exception as exc:
            log.exception("scrubbing failed in a way that no error of the disk explains")
            self._failed(exc)

    def one_pass(self) -> None:
        """Verify all that is sealed now. Raises: OSError."""
        with self._table.lock:
            sealed = [each for each in self._table.segments.values() if each.state is SegmentState.SEALED]
        for segment in sealed:
            self._scrub(segment)
        self.passes += 1

    def _scrub(self, segment: Segment) -> None:
        generation = segment.generation
        header = SegmentHeader(segment.number, self._table.pages, generation, empty=False)
        for record in read_toc(self._files, self._table.fd_of(segment), header, self._home.id) or ():
            if self._stop.is_set() or segment.generation != generation:
                return
            if record.place.page not in segment.dead:
                started_s = time.monotonic()
                self._verify(record)
                size = record.place.length
                self.scrubbed_bytes += size
                if self._rate > 0:
                    self._stop.wait(max(size / self._rate - (time.monotonic() - started_s), 0.0))

    def _verify(self, record: Record) -> None:
        with self._table.reading(record.place, hit=False) as fd:
            good = fd is None or sound(self._files, fd, record)
        if not good:
            dropped = self._committer.delete(record.key, only_from=record.place).result(timeout=60.0)
            self.damaged += dropped
            if dropped:
                log.error("scrubbing found a damaged object: dropped", extra={"segment": record.place.segment})
