"""Guards of the store over its tiers, and of what shipped code may contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults.guards.registry import off, put


@off("single flight")
def single_flight() -> None:
    from forebay.kvstore.loader import Loader

    real = Loader.start

    def start(self: Any, key: Any, size: int, *, exact: bool, parent: bytes | None = None) -> Any:
        self._flights.pop(key, None)
        return real(self, key, size, exact=exact, parent=parent)

    put(Loader, "start", start)


@off("breaker")
def breaker() -> None:
    from forebay.kvstore.breaker import Breaker

    put(Breaker, "failure", Breaker.success)


@off("delete fence")
def delete_fence() -> None:
    from forebay.kvstore.deletion import Watch

    put(Watch, "__init__", lambda self, owner, key, deleted: None)
    Watch.deleted = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment,misc]
    put(Watch, "close", lambda self: None)


@off("copy queue bound")
def copy_queue_bound() -> None:
    from forebay.kvstore.writebehind import CopyQueue

    real = CopyQueue.__init__
    put(CopyQueue, "__init__", lambda self, limit: real(self, 1 << 40))


@off("counted trouble")
def counted_trouble() -> None:
    from forebay.kvstore.ledger import Ledger

    put(Ledger, "count", lambda self, name, amount=1: None)


@off("copying ahead")
def copying_ahead() -> None:
    from forebay.kvstore.writebehind import WriteBehind

    put(WriteBehind, "start", lambda self, workers: None)


@off("reading below", quick=True)
def reading_below() -> None:
    from forebay.kvstore.loader import Loader

    put(Loader, "_may_hold", lambda self, channel, key: False)


@off("sane answers")
def sane_answers() -> None:
    from forebay.kvstore.channel import TierChannel

    real = TierChannel._judge
    put(TierChannel, "_judge", lambda self, task, key, sane, *, fair: real(self, task, key, lambda _: True, fair=fair))


@off("load deadline")
def load_deadline() -> None:
    from forebay.kvstore.store import Store

    real = Store._landed
    put(Store, "_landed", lambda self, flight, deadline_s: real(self, flight, deadline_s + 30.0))


@off("probe deadline")
def probe_deadline() -> None:
    from forebay.kvstore.channel import TierChannel

    real = TierChannel.probe

    def probe(self: Any, namespace: bytes, group: int, blocks: Any, *, timeout_s: float) -> Any:
        return real(self, namespace, group, blocks, timeout_s=timeout_s + 30.0)

    put(TierChannel, "probe", probe)


@off("write budget", quick=True)
def write_budget() -> None:
    from forebay.kvstore.writebehind import ByteBudget

    async def solvent(self: Any) -> None:
        return None

    put(ByteBudget, "solvent", solvent)


@off("no foreign data")
def no_foreign_data() -> None:
    real = Path.read_text

    def read_text(self: Path, *args: Any, **options: Any) -> str:
        text = real(self, *args, **options)
        return text + "\nimport pickle\n" if self.match("kvstore/keys.py") else text

    put(Path, "read_text", read_text)
