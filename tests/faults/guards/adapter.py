"""Guards of the engine adapter: what it may use of a load, and when it asks at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.faults.guards.registry import off, put


@off("lease validity")
def lease_validity() -> None:
    from forebay.engine_adapter.transformers import PrefixReuse

    real = PrefixReuse._copy_in

    def copy_in(self: Any, namespace: Any, *args: Any) -> Any:
        acquire = namespace.acquire

        @contextmanager
        def held(*acquire_args: Any, **options: Any) -> Iterator[Any]:
            with acquire(*acquire_args, **options) as lease:
                lease.valid = lambda: True
                yield lease

        namespace.acquire = held
        return real(self, namespace, *args)

    put(PrefixReuse, "_copy_in", copy_in)


@off("positions")
def positions() -> None:
    from forebay.engine_adapter.transformers import PrefixReuse

    real = PrefixReuse._run

    def run(self: Any, ids: Any, cache: Any, kv: Any) -> Any:
        forward = self._forward
        self._forward = lambda model, ids, cache, start: forward(model, ids, cache, 0)
        try:
            return real(self, ids, cache, kv)
        finally:
            self._forward = forward

    put(PrefixReuse, "_run", run)


@off("only what was copied")
def only_what_was_copied() -> None:
    from forebay.engine_adapter.transformers import PrefixReuse

    real = PrefixReuse._load

    def load(self: Any, ids: Any, kv: Any) -> Any:
        reuse, keys = real(self, ids, kv)
        if reuse.plan is not None:
            kv.length = reuse.plan.load_blocks * self.facts.block_tokens  # as if all had come
        return reuse, keys

    put(PrefixReuse, "_load", load)


@off("last token")
def last_token() -> None:
    from forebay.engine_adapter import transformers
    from forebay.kvstore import plan

    for module in (plan, transformers):
        put(module, "loadable_blocks", lambda prompt_tokens, block_tokens: prompt_tokens // block_tokens)


@off("backing off")
def backing_off() -> None:
    from forebay.engine_adapter.transformers import PrefixReuse

    real = PrefixReuse._trouble

    def trouble(self: Any, exc: Exception, *, prefix: str = "") -> str:
        told: str = real(self, exc, prefix=prefix)
        self._retry_at = -float("inf")
        return told

    put(PrefixReuse, "_trouble", trouble)


@off("cost comparison")
def cost_comparison() -> None:
    from forebay.kvstore import plan

    put(plan, "load_time_s", lambda estimate, blocks, block_bytes: 0.0)


@off("cancel waits for its copy", quick=True)
def cancel_waits_for_its_copy() -> None:
    from contextlib import nullcontext

    from forebay.engine_adapter.bundled.loading import BlockLoad

    real = BlockLoad.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._copying = nullcontext()

    put(BlockLoad, "__init__", init)


@off("a load's deadline")
def a_loads_deadline() -> None:
    from forebay.engine_adapter.bundled import loading

    real = loading._ask
    put(loading, "_ask", lambda namespace, keys, words, left_s: real(namespace, keys, words, 30.0))


@off("store queue bound")
def store_queue_bound() -> None:
    from forebay.engine_adapter.bundled.storing import Storer

    real = Storer.__init__
    put(Storer, "__init__", lambda self, link, *, queue_bytes: real(self, link, queue_bytes=1 << 60))


@off("a load's catch-all")
def a_loads_catch_all() -> None:
    from forebay.engine_adapter.bundled import link
    from forebay.kvstore.errors import ClientError

    real = link.Link.trouble

    def trouble(self: Any, doing: str, exc: BaseException) -> None:
        if not isinstance(exc, ClientError):
            raise exc  # as if only what clients raise were caught
        real(self, doing, exc)

    put(link.Link, "trouble", trouble)
