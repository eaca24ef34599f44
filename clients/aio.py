"""`AsyncClient`: the client for an event loop. One client belongs to one loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from forebay.clients.lease import Lease
from forebay.clients.namespace import NamespaceCore
from forebay.clients.session import MAX_LANES, ClientCore, Connect, Op, Turn
from forebay.clients.transport import LoopTransport
from forebay.clients.writing import AllocationCore
from forebay.kvstore.errors import DaemonTimeout
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import TokenIds

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=AbstractAsyncContextManager[Any])


async def run(core: ClientCore, operation: Op[T]) -> T:
    """Drive an operation to its end on the running loop."""
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
                value = await LoopTransport.connect(core.address, timeout_s=step.timeout_s, tls=core.tls)
            elif isinstance(step, Turn):
                await _await_turn(core, step.deadline_s)
            else:
                assert isinstance(step.transport, LoopTransport)
                value = await step.transport.wait(step.pending, step.deadline_s)
        except BaseException as exc:
            error = exc


async def _await_turn(core: ClientCore, deadline_s: float) -> None:
    assert isinstance(core, AsyncClient)
    try:
        async with asyncio.timeout(deadline_s - time.monotonic()):
            await core._turns.acquire()
    except TimeoutError as exc:
        raise DaemonTimeout("all connections for payload were busy until the call's deadline") from exc


def awaitable(operation: Callable[Concatenate[Any, P], Op[T]]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The awaitable form of an operation."""

    @functools.wraps(operation)
    async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        core = self if isinstance(self, AsyncClient) else self.client
        return await run(core, operation(self, *args, **kwargs))

    return call


class Opening(Generic[M]):
    """What `acquire` and `allocate` return: await it, or use it in `async with`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: M | None = None

    def __await__(self) -> Generator[Any, None, M]:
        made: M = yield from self._make().__await__()
        return made

    async def __aenter__(self) -> M:
        self._made = await self
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, exc, tb)


class AsyncAllocation(AllocationCore):
    """See AllocationCore. `async with ns.allocate(...) as allocation: fill; await allocation.commit()`."""

    client: AsyncClient
    commit = awaitable(AllocationCore.commit_slots)

    async def __aenter__(self) -> AsyncAllocation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.abort()


class AsyncNamespace(NamespaceCore):
    """See NamespaceCore."""

    client: AsyncClient
    match = awaitable(NamespaceCore.find)
    get_into = awaitable(NamespaceCore.copy_payloads)
    put = awaitable(NamespaceCore.store)
    prefetch = awaitable(NamespaceCore.start_loading)
    pin = awaitable(NamespaceCore.keep)
    unpin = awaitable(NamespaceCore.unkeep)
    expire = awaitable(NamespaceCore.end_after)
    flush = awaitable(NamespaceCore.make_durable)
    delete = awaitable(NamespaceCore.forget)
    explain = awaitable(NamespaceCore.ask_why)
    report = awaitable(NamespaceCore.tell)

    def acquire(self, *args: Any, **kwargs: Any) -> Opening[Lease]:
        """See NamespaceCore.lease."""
        return Opening(lambda: run(self.client, self.lease(*args, **kwargs)))

    def allocate(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Opening[AsyncAllocation]:
        """Places for blocks that the caller fills in shared memory itself, with no copy by Forebay."""

        async def make() -> AsyncAllocation:
            operation = self.reserve(keys, token_ids, parent, start_block, group, timeout_s=timeout_s)
            allocation = AsyncAllocation(self.core, *await run(self.client, operation))
            allocation.client = self.client
            return allocation

        return Opening(make)


class AsyncClient(ClientCore):
    """A client of one daemon for one event loop. `async with AsyncClient(...) as client` connects and closes it.

    Every call has a deadline (`timeout_s`) and raises ClientError when the daemon is gone, too slow or was restarted in
    between; the next call connects again by itself.
    """

    stats = awaitable(ClientCore.read_stats)
    purge = awaitable(ClientCore.forget_all)

    def __init__(self, socket_path: Any = None, **options: Any) -> None:
        """Arguments as ClientCore."""
        super().__init__(socket_path, **options)
        self._turns: asyncio.Semaphore = asyncio.Semaphore(MAX_LANES)

    async def connect(self) -> AsyncClient:
        """Connect now; otherwise the first call does. Raises: DaemonUnavailable, DaemonTimeout."""
        await run(self, self.live(self.deadline(None)))
        return self

    async def open(self, facts: NamespaceFacts, *, timeout_s: float | None = None) -> AsyncNamespace:
        """Open a namespace. The daemon gives it its id, from the facts and this client's tenant."""
        life, reply = await run(self, self.open_facts(facts, self.deadline(timeout_s)))
        namespace = AsyncNamespace(self, facts, life, reply)
        namespace.client = self
        return namespace

    async def close(self) -> None:
        """Idempotent. Leases and views end with it."""
        self.shut()

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()
