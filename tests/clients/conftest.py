"""Both clients behind one face, so that each case stands once: an `AsyncClient`, and a `Client` called as if it were one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import Allocation, AsyncClient, Client, Namespace
from tests.daemon_process import DaemonProcess, serving


class Awaited:
    """A blocking client or namespace with awaitable methods. Blocking the loop is harmless: the daemon is another process."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value) or name in ("keys", "layout", "domain"):
            return value
        return lambda *args, **kwargs: Result(lambda: value(*args, **kwargs))


class Result:
    """What a method gives: awaited, or entered with `async with`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._entered: Any = None

    def __await__(self) -> Iterator[Any]:
        yield from ()
        made = self._make()
        return Awaited(made) if isinstance(made, (Namespace, Allocation)) else made

    async def __aenter__(self) -> Any:
        self._entered = await self
        return self._entered

    async def __aexit__(self, *exc: Any) -> None:
        if isinstance(self._entered, Awaited):
            self._entered._inner.__exit__(*exc)
        else:
            self._entered.__exit__(*exc)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for the tests of a module."""
    yield from serving(tmp_path_factory.mktemp("daemon"))


@pytest.fixture
def daemon(running: DaemonProcess) -> Iterator[DaemonProcess]:
    """The module's daemon, which each test must leave with nothing held."""
    yield running
    running.at_base()


Connect = Callable[..., Any]


@pytest.fixture(params=["blocking", "async"])
async def connect(request: pytest.FixtureRequest, daemon: DaemonProcess) -> AsyncIterator[Connect]:
    """Makes clients of either kind: `await connect(path, **options)`. They are closed at the end."""
    made: list[Any] = []

    async def make(path: Path, **options: Any) -> Any:
        if request.param == "async":
            client: Any = await AsyncClient(path, **options).connect()
        else:
            client = Awaited(Client(path, **options))
        made.append(client)
        return client

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def client(connect: Connect, daemon: DaemonProcess) -> Any:
    return await connect(daemon.socket)
