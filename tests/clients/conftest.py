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
    """One daemon for the tests of a module, on a Unix socket and on TCP."""
    yield from serving(tmp_path_factory.mktemp("daemon"), tcp=True)


@pytest.fixture(scope="module")
def running_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One whose TCP door is TLS."""
    yield from serving(tmp_path_factory.mktemp("tls"), tls=True)


@pytest.fixture(params=["unix", "tcp", "tls"])
def door(request: pytest.FixtureRequest) -> str:
    """By which door the test's client comes. `shares_memory` leaves the Unix socket only."""
    kind: str = request.param
    return kind


# For tests of what needs memory that client and daemon share.
shares_memory = pytest.mark.parametrize("door", ["unix"], indirect=True)


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    """The module's daemon, which each test must leave with nothing held."""
    tls = "door" in request.fixturenames and request.getfixturevalue("door") == "tls"
    running: DaemonProcess = request.getfixturevalue("running_tls" if tls else "running")
    yield running
    running.at_base()


def where(daemon: DaemonProcess, door: str) -> tuple[Path | str, dict[str, Any]]:
    """What a client by this door is made with."""
    if door == "unix":
        return daemon.socket, {}
    return daemon.tcp, {"token": daemon.token} | ({"tls": daemon.authority} if door == "tls" else {})


Connect = Callable[..., Any]


@pytest.fixture(params=["blocking", "async"])
async def connect(request: pytest.FixtureRequest, daemon: DaemonProcess) -> AsyncIterator[Connect]:
    """Makes clients of either kind: `await connect(path, **options)`. They are closed at the end."""
    made: list[Any] = []

    async def make(path: Path | str, **options: Any) -> Any:
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
async def client(connect: Connect, daemon: DaemonProcess, door: str) -> Any:
    address, options = where(daemon, door)
    return await connect(address, **options)
