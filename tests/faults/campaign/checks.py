"""The checks that keep wrong bytes away, each to be switched off: a campaign without one of them must go red.

A check here may be made in several places; all of them are switched off together.
"""

from __future__ import annotations

from typing import Any

from tests.faults.guards import OFF
from tests.faults.guards.registry import Patch, put


def _key() -> None:
    """Nobody compares whose object lies where he reads."""
    from forebay.kvstore.objects import ObjectLayout
    from forebay.tiers.ssd import recordio

    real, unpack = ObjectLayout.verify_object, recordio.unpack_record

    def verify_object(self: Any, view: Any, *, key: bytes, namespace: bytes, **rest: Any) -> str | None:
        try:
            found = self.read_header(view)
        except ValueError as exc:
            return str(exc)
        return real(self, view, key=found.key, namespace=found.namespace, **rest)

    def read(self: Any, fd: int, key: Any, place: Any, out: Any) -> Any:
        view = memoryview(out)[: place.length]
        head = self._read_copied(fd, view, place)
        return None if head is None else unpack(head, self._directory, self._segment_pages)

    put(ObjectLayout, "verify_object", verify_object)
    put(recordio.RecordIo, "read", read)


def _checksum() -> None:
    """Nobody compares an object's bytes with its checksums."""
    from forebay.kvstore.objects import ObjectLayout

    def verify_object(self: Any, view: Any, *, key: bytes, namespace: bytes, **rest: Any) -> str | None:
        trouble: str | None = self.check_header(view, key=key, namespace=namespace, **rest)[0]
        return trouble

    put(ObjectLayout, "verify_object", verify_object)


CHECKS: dict[str, Patch] = {
    "key": _key,
    "token ids": OFF["token comparison"].patch,
    "checksum": _checksum,
    "generation": OFF["generations"].patch,
    "epoch": OFF["boot epoch"].patch,
}


def switch_off(name: str) -> None:
    """Switch off the check of that name; "" switches off none."""
    if name:
        CHECKS[name]()
