"""`Client`: the blocking client. Any number of threads may use one."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from forebay.clients.namespace import NamespaceCore
from forebay.clients.session import MAX_LANES, ClientCore, Connect, Op, Turn
from forebay.clients.transport import BlockingTransport
from forebay.clients.writing import AllocationCore
from forebay.kvstore.errors import DaemonTimeout
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import TokenIds

P = ParamSpec("P")
T = TypeVar("T")


def run(core: ClientCore, operation: Op[T]) -> T:
    """Drive an operation to its end on the calling thread."""
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = operation.throw(error) if error is not None else operation.send(value)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        value, error = None, None
        try:
            if isinstance(step, Connect):
                value = BlockingTransport(core.address, timeout_s=step.timeout_s, tls=core.tls)
            elif isinstance(step, Turn):
                _await_turn(core, step.deadline_s)
            else:
                assert isinstance(step.transport, BlockingTransport)
                value = step.transport.wait(step.pending, step.deadline_s)
        except BaseException as exc:
            error = exc


def _await_turn(core: ClientCore, deadline_s: float) -> None:
    assert isinstance(core, Client)
    if not core._turns.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
        raise DaemonTimeout("all connections for payload were busy until the call's deadline")


def blocking(operation: Callable[Concatenate[Any, P], Op[T]]) -> Callable[Concatenate[Any, P], T]:
    """The blocking form of an operation."""

    @functools.wraps(operation)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        core = self if isinstance(self, Client) else self.client
        return run(core, operation(self, *args, **kwargs))

    return call


class Allocation(AllocationCore):
    """See AllocationCore. `with ns.allocate(...) as allocation: fill; allocation.commit()`."""

    client: Client
    commit = blocking(AllocationCore.commit_slots)

    def __enter__(self) -> Allocation:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()


class Namespace(NamespaceCore):
    """See NamespaceCore."""

    client: Client
    match = blocking(NamespaceCore.find)
    acquire = blocking(NamespaceCore.lease)
    get_into = blocking(NamespaceCore.copy_payloads)
    put = blocking(NamespaceCore.store)
    prefetch = blocking(NamespaceCore.start_loading)
    pin = blocking(NamespaceCore.keep)
    unpin = blocking(NamespaceCore.unkeep)
    expire = blocking(NamespaceCore.end_after)
    flush = blocking(NamespaceCore.make_durable)
    delete = blocking(NamespaceCore.forget)
    explain = blocking(NamespaceCore.ask_why)
    report = blocking(NamespaceCore.tell)

    def allocate(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Allocation:
        """Places for blocks that the caller fills in shared memory itself, with no copy by Forebay."""
        operation = self.reserve(keys, token_ids, parent, start_block, group, timeout_s=timeout_s)
        allocation = Allocation(self.core, *run(self.client, operation))
        allocation.client = self.client
        return allocation


class Client(ClientCore):
    """A blocking client of one daemon.

    Every call has a deadline (`timeout_s`) and raises ClientError when the daemon is gone, too slow or was restarted in
    between; the next call connects again by itself.
    """

    stats = blocking(ClientCore.read_stats)
    purge = blocking(ClientCore.forget_all)

    def __init__(self, socket_path: Any = None, **options: Any) -> None:
        """Connect. Arguments as ClientCore. Raises: DaemonUnavailable, DaemonTimeout."""
        super().__init__(socket_path, **options)
        self._turns: threading.Semaphore = threading.Semaphore(MAX_LANES)
        run(self, self.live(self.deadline(None)))

    def open(self, facts: NamespaceFacts, *, timeout_s: float | None = None) -> Namespace:
        """Open a namespace. The daemon gives it its id, from the facts and this client's tenant."""
        life, reply = run(self, self.open_facts(facts, self.deadline(timeout_s)))
        namespace = Namespace(self, facts, life, reply)
        namespace.client = self
        return namespace

    def close(self) -> None:
        """Idempotent. Leases and views end with it."""
        self.shut()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
