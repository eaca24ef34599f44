"""Times to live that outlast the daemon: a log beside the ssd tier's data, for what it keeps must be forgotten all the same.

Covers the file alone; server/expiry.py knows what is due. Always true: an entry that was cut off or damaged ends the reading
and costs only itself and what follows; trouble with the file is told once and stops no request.

An entry is `u32le length, u64le XXH3-64 of the rest, msgpack (unix time, domain, [[namespace, block, group], …])`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from forebay.kvstore.tier import ObjectKey

log = logging.getLogger("forebay.expiry")

NAME: Final = "expiries.log"
_HEAD: Final = struct.Struct("<IQ")
_LONGEST_WAIT_S: Final = 2.0  # for the disk, before the request is answered all the same
_MAX_ENTRY_BYTES: Final = 64 << 20


class Entry(NamedTuple):
    """Objects of a trust domain that end at a unix time."""

    at_s: float
    domain: str
    keys: list[ObjectKey]


_DECODER: Final = msgspec.msgpack.Decoder(tuple[float, str, list[tuple[bytes, bytes, int]]])


def _encoded(entry: Entry) -> bytes:
    body = msgspec.msgpack.encode((entry.at_s, entry.domain, [tuple(key) for key in entry.keys]))
    return _HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _decoded(data: bytes) -> Iterable[Entry]:
    at = 0
    while at + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, at)
        body = data[at + _HEAD.size : at + _HEAD.size + size]
        if size > _MAX_ENTRY_BYTES or len(body) < size or xxhash.xxh3_64_intdigest(body) != checksum:
            log.warning("a log of times to live ends in the middle of an entry", extra={"offset": at})
            return
        try:
            when_s, domain, keys = _DECODER.decode(body)
        except msgspec.MsgspecError:
            log.warning("a log of times to live has an entry that can't be read", extra={"offset": at})
            return
        yield Entry(when_s, domain, [ObjectKey(*key) for key in keys])
        at += _HEAD.size + size


def _write(path: Path, data: bytes, how: int) -> None:
    """Raises: OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
    try:
        if os.write(fd, data) < len(data):
            raise OSError(errno.ENOSPC, "the disk took a part only")
        os.fdatasync(fd)
    finally:
        os.close(fd)


class ExpiryLog:
    """One file. Its disk work runs on a thread of its own; the methods are the event loop's."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forebay-expiry")
        self._failed = False

    async def read(self) -> list[Entry]:
        """All entries, oldest first; none where there is no file yet."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._read)

    async def append(self, entry: Entry) -> None:
        """Note an entry; on disk when this returns, unless the disk is in trouble or takes too long."""
        await self._bounded(asyncio.get_running_loop().run_in_executor(self._thread, self._append, _encoded(entry)))

    async def rewrite(self, entries: Iterable[Entry]) -> None:
        """Keep these only."""
        data = b"".join(map(_encoded, entries))
        await self._bounded(asyncio.get_running_loop().run_in_executor(self._thread, self._rewrite, data))

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _bounded(self, work: asyncio.Future[None]) -> None:
        await asyncio.wait([work], timeout=_LONGEST_WAIT_S)

    def _read(self) -> list[Entry]:
        try:
            return list(_decoded(self._path.read_bytes()))
        except FileNotFoundError:
            return []
        except OSError as exc:
            self._trouble(exc)
            return []

    def _append(self, data: bytes) -> None:
        try:
            _write(self._path, data, os.O_APPEND)
            self._failed = False
        except OSError as exc:
            self._trouble(exc)

    def _rewrite(self, data: bytes) -> None:
        staged = self._path.with_suffix(".new")
        try:
            _write(staged, data, os.O_TRUNC)
            staged.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # without it a power cut can bring the old file back
            finally:
                os.close(folder)
        except OSError as exc:
            self._trouble(exc)

    def _trouble(self, exc: OSError) -> None:
        if not self._failed:
            log.error("times to live would not outlast a restart", extra={"path": str(self._path), "errno": exc.errno})
        self._failed = True
