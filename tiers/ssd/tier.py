"""The ssd tier: objects in preallocated segment files of one or several directories.

Covers the Tier protocol: choosing a directory, deadlines, cancelling, errors by their names. Always true: a call that has
ended no longer touches its caller's buffer; a directory that fails costs what it holds and nothing else; a put that raises
has stored nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

import xxhash

from forebay.kvstore.errors import BlockCorrupt, TierClosed, TierFull, TierTimeout, TierUnavailable
from forebay.kvstore.tier import Buffer, ObjectKey, WritableBuffer
from forebay.tiers.ssd import recovery
from forebay.tiers.ssd.directory import Directory, DirectoryDown, DirectoryOptions, TooLarge, leading
from forebay.tiers.ssd.files import Files, is_full
from forebay.tiers.ssd.layout import MIN_SEGMENT_BYTES, Place
from forebay.tiers.ssd.segments import NoRoom
from forebay.tiers.ssd.volume import Volume

T = TypeVar("T")
log = logging.getLogger(__name__)

DEFAULT_SEGMENT_BYTES: Final = 128 << 20
_SEGMENTS_AT_LEAST: Final = 8
_THREADS: Final = 8
_OPEN_S: Final = 10.0


def segment_bytes_for(capacity_bytes: int, largest: int = DEFAULT_SEGMENT_BYTES) -> int:
    """Segment size of a new directory: at least eight segments, so that emptying one loses little."""
    size = largest
    while size > MIN_SEGMENT_BYTES and size * _SEGMENTS_AT_LEAST > capacity_bytes:
        size //= 2
    return size


class SsdTier:
    """Objects on local disks. Implements Tier, SupportsPresence, SupportsListing, SupportsStats.

    Args:
        capacity_bytes: over all directories, in equal parts; less where a disk has no room for its part.
        directories: made if missing; each may be used by one process at a time.
        segment_bytes: of new directories; None chooses by the capacity.
        reserve_bytes: free space that is left to others on each disk.
        threads: at once in system calls, for each directory.
        retry_s: how soon a directory in trouble is tried again; later and later up to a minute.
    Raises:
        ValueError: no directory, or a capacity without room for two segments in each.
    """

    name = "ssd"

    def __init__(
        self,
        capacity_bytes: int,
        directories: Sequence[Path],
        *,
        segment_bytes: int | None = None,
        reserve_bytes: int = 0,
        scrub_bytes_per_s: float = 0.0,
        threads: int = _THREADS,
        retry_s: float = 1.0,
        files: Files | None = None,
        host: str | None = None,
        child: Callable[[str, Path], dict[str, object]] = recovery.in_child,
    ) -> None:
        if not directories or len({path.absolute() for path in directories}) != len(directories):
            raise ValueError("the ssd tier needs directories, each named once")
        part = capacity_bytes // len(directories)
        size = segment_bytes or segment_bytes_for(part)
        if part < 2 * size:
            raise ValueError(
                f"{capacity_bytes} bytes in {len(directories)} directories are less than two segments of {size} bytes each"
            )
        self.capacity_bytes = part // size * size * len(directories)
        options = DirectoryOptions(part, size, reserve_bytes, scrub_bytes_per_s)
        self._volumes = [
            Volume(path, files or Files(), options, threads=threads, retry_s=retry_s, host=host, child=child)
            for path in directories
        ]
        self._closed = False
        self._corrupt = 0
        deadline_s = time.monotonic() + _OPEN_S
        for volume in self._volumes:
            volume.settled(max(deadline_s - time.monotonic(), 0.0))

    # --- presence -------------------------------------------------------------------------------------------------

    def leading_run(self, namespace: bytes, group: int, blocks: Sequence[bytes]) -> int:
        """As SupportsPresence; exact for runs of up to 32 blocks, by bisection beyond."""
        if not blocks:
            return 0
        serving = [each for volume in self._volumes if (each := volume.serving) is not None]
        if len(serving) == 1:
            try:
                return serving[0].leading_run(namespace, group, blocks)
            except DirectoryDown:
                return 0
        return leading(len(blocks), lambda index: self._where(ObjectKey(namespace, blocks[index], group)) is not None)

    def keys(self) -> Iterable[ObjectKey]:
        """As SupportsListing. Walks every index: for tools and tests."""
        found: set[ObjectKey] = set()
        for volume in self._volumes:
            if (directory := volume.serving) is not None:
                found.update(directory.keys())
        return found

    def _where(self, key: ObjectKey) -> tuple[Volume, Directory, Place] | None:
        for volume in self._preferred(key):
            directory = volume.serving
            try:
                place = None if directory is None else directory.find(key)
            except DirectoryDown:
                continue
            if directory is not None and place is not None:
                return volume, directory, place
        return None

    def _preferred(self, key: ObjectKey) -> list[Volume]:
        """The volumes, in an order that depends on the key: the first is where it goes if that works."""
        if len(self._volumes) == 1:
            return self._volumes
        return sorted(self._volumes, key=lambda each: xxhash.xxh3_64_intdigest(key.block + bytes(each.path)))

    # --- the protocol ---------------------------------------------------------------------------------------------

    async def put(self, key: ObjectKey, data: Buffer, *, timeout_s: float) -> None:
        self._check_open(key)
        deadline_s = time.monotonic() + timeout_s
        view = memoryview(data).cast("B")
        found = self._where(key)
        if found is not None:
            found[1].table.hit(found[2])
            return
        full: TierFull | None = None
        broken: TierUnavailable | None = None
        for volume in self._preferred(key):
            if (directory := volume.serving) is None:
                continue
            try:
                await self._put_into(volume, directory, key, view, deadline_s)
            except TierFull as exc:
                full = exc
            except TierUnavailable as exc:
                broken = exc
            else:
                return
        raise full or broken or self._down(key)

    async def _put_into(
        self, volume: Volume, directory: Directory, key: ObjectKey, view: memoryview, deadline_s: float
    ) -> None:
        try:
            job = volume.workers.submit(lambda: directory.write(key, view, deadline_s))
            committing = await self._finish(job, key, deadline_s)
            # From here on the commit may happen also if we are cancelled: before any delete that is asked for later.
            await self._answer(committing, key, deadline_s)
        except (TooLarge, NoRoom) as exc:
            raise self._full(key, view.nbytes, directory) from exc
        except OSError as exc:
            if is_full(exc):
                raise self._full(key, view.nbytes, directory) from exc
            volume.trouble(exc)
            raise TierUnavailable(f"{volume.path}: {exc}", tier=self.name, key=key) from exc
        except (DirectoryDown, RuntimeError) as exc:  # closed while we waited for our turn
            raise self._down(key) from exc
        volume.fine()

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        self._check_open(key)
        deadline_s = time.monotonic() + timeout_s
        for _ in range(3):  # again when it was moved between the look-up and the read
            found = self._where(key)
            if found is None:
                if not any(volume.serving is not None for volume in self._volumes):
                    raise self._down(key)
                return None
            volume, directory, place = found
            if len(out) < place.length:
                raise ValueError(f"out has {len(out)} bytes, the object {place.length}")
            read = await self._read(volume, directory, key, place, out, deadline_s)
            if read is not None:
                return place.length
        return None

    async def _read(
        self,
        volume: Volume,
        directory: Directory,
        key: ObjectKey,
        place: Place,
        out: WritableBuffer,
        deadline_s: float,
    ) -> bool | None:
        try:
            job = volume.workers.submit(lambda: directory.read(key, place, out))
            good = await self._finish(job, key, deadline_s)
        except OSError as exc:
            volume.trouble(exc)
            raise TierUnavailable(f"{volume.path}: {exc}", tier=self.name, key=key) from exc
        except (DirectoryDown, RuntimeError) as exc:
            raise self._down(key) from exc
        if good is False:
            self._corrupt += 1
            log.error("an object's record is damaged: dropped", extra={"segment": place.segment})
            await self._drop(volume, directory, key, place, deadline_s)
            raise BlockCorrupt("another record, or none, lies in its place", tier=self.name, key=key)
        volume.fine()
        return good

    async def _drop(
        self, volume: Volume, directory: Directory, key: ObjectKey, place: Place, deadline_s: float
    ) -> None:
        try:
            await self._answer(directory.committer.delete(key, only_from=place), key, deadline_s)
        except OSError as exc:
            volume.trouble(exc)

    async def delete(self, key: ObjectKey) -> bool:
        """Forget the object now, durably, wherever it lies. Returns whether it was here.

        A directory that is down is told when it is back, before it serves again.
        Raises: TierUnavailable, TierClosed.
        """
        self._check_open(key)
        found = False
        for volume in self._volumes:
            directory = volume.serving
            if directory is None:
                if not volume.miss_delete(key):
                    raise self._down(key)
                continue
            try:
                # Also where the index has nothing: a put whose caller gave up may be about to be committed.
                found |= await asyncio.wrap_future(directory.committer.delete(key))
            except OSError as exc:
                volume.trouble(exc)
                raise TierUnavailable(f"{volume.path}: {exc}", tier=self.name, key=key) from exc
        return found

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, volume.close, 20.0) for volume in self._volumes))

    # --- telling --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sums over the directories, and each directory by its number."""
        each = {str(number): volume.stats() for number, volume in enumerate(self._volumes)}
        names = ("serving", "objects", "capacity_bytes", "deletes_waiting")
        sums: dict[str, Any] = {name: sum(one.get(name, 0) for one in each.values()) for name in names}
        counters: Counter[str] = Counter(records_corrupt=self._corrupt)
        for one in each.values():
            counters.update(one["counters"])
        objects = counters["object_bytes_written"]
        return {
            **sums,
            "write_amplification": counters["device_bytes_written"] / objects if objects else 1.0,
            "counters": dict(counters),
            "directories": each,
        }

    def health(self) -> list[str]:
        """What is wrong, one line each; nothing when all is well."""
        return [f"tier ssd: {volume.reason}" for volume in self._volumes if volume.serving is None]

    # --- inside ---------------------------------------------------------------------------------------------------

    def _check_open(self, key: ObjectKey) -> None:
        if self._closed:
            raise TierClosed("the tier is closed", tier=self.name, key=key)

    def _down(self, key: ObjectKey) -> TierUnavailable:
        reasons = "; ".join(volume.reason for volume in self._volumes if volume.reason)
        return TierUnavailable(reasons or "no directory is in use", tier=self.name, key=key)

    def _full(self, key: ObjectKey, need_bytes: int, directory: Directory) -> TierFull:
        with directory.table.lock:
            free = directory.table.spare() * directory.home.segment_bytes
        return TierFull(
            f"{need_bytes} bytes wanted, {free} in empty segments",
            tier=self.name,
            key=key,
            need_bytes=need_bytes,
            free_bytes=free,
        )

    async def _finish(self, job: Future[T], key: ObjectKey, deadline_s: float) -> T:
        """Wait for a job that touches the caller's buffer: it is over when this returns or raises, whatever happens.

        Raises: TierTimeout, what the job raises.
        """
        waiting = asyncio.wrap_future(job)
        cancelled: asyncio.CancelledError | None = None
        timed_out = False
        while not waiting.done():
            left_s = None if cancelled or timed_out else max(deadline_s - time.monotonic(), 0.0)
            try:
                await asyncio.wait((waiting,), timeout=left_s)
            except asyncio.CancelledError as exc:
                cancelled = exc
                if job.cancel():  # it had not begun
                    break
                continue
            if not waiting.done():
                timed_out = True
                if job.cancel():
                    break
        if cancelled is not None:
            _retrieve(waiting)
            raise cancelled
        if waiting.done() and not waiting.cancelled():
            return waiting.result()
        raise TierTimeout("no turn in time", tier=self.name, key=key)

    async def _answer(self, committing: Future[bool], key: ObjectKey, deadline_s: float) -> bool:
        """Wait for a commit. Raises: TierTimeout, OSError."""
        waiting = asyncio.wrap_future(committing)
        # Not cancelled with us: the change is made or not, but never half.
        waiting.add_done_callback(_retrieve)
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), max(deadline_s - time.monotonic(), 0.0))
        except TimeoutError:
            raise TierTimeout("not committed in time", tier=self.name, key=key) from None


def _retrieve(waiting: asyncio.Future[Any]) -> None:
    """Take an error that nobody waits for any more."""
    if waiting.done() and not waiting.cancelled():
        waiting.exception()
