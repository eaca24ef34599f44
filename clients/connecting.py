"""Connections to a daemon: Unix sockets, TCP, TLS; blocking or on the event loop. What travels on them is transport.py's.

Always true: a connection attempt ends by its deadline, and one that fails leaves no socket open.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import time
from pathlib import Path

from forebay.kvstore.address import Address, keep_alive
from forebay.kvstore.errors import DaemonTimeout, DaemonUnavailable
from forebay.kvstore.tls import Stream, TlsSocket


def _connect_error(address: Address, exc: OSError) -> DaemonUnavailable:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return DaemonUnavailable(f"the certificate of {address} is not to be trusted: {exc.verify_message}")
    if isinstance(exc, ssl.SSLError):
        return DaemonUnavailable(f"no TLS with {address}: {exc.reason or exc}; is that door TLS?")
    if isinstance(exc, socket.gaierror):
        return DaemonUnavailable(f"no daemon at {address}: that host has no address")
    hint = (
        "is `forebay serve` running?" if isinstance(exc, (FileNotFoundError, ConnectionRefusedError)) else exc.strerror
    )
    return DaemonUnavailable(f"no daemon answers at {address}: {hint}")


def _too_late(address: Address, timeout_s: float) -> DaemonTimeout:
    return DaemonTimeout(f"the daemon at {address} did not accept a connection in {timeout_s:.3g} s")


def connect(address: Address, tls: ssl.SSLContext | None, *, timeout_s: float) -> Stream:
    """A non-blocking socket, connected. Raises: DaemonUnavailable, DaemonTimeout."""
    deadline_s = time.monotonic() + timeout_s
    sock: socket.socket | None = None
    try:
        if isinstance(address, Path):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            sock.connect(str(address))
            sock.setblocking(False)
            return sock
        sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
        keep_alive(sock)
        sock.setblocking(False)
        if tls is None:
            return sock
        stream = TlsSocket(sock, tls, server_hostname=address.host)
        try:
            while wanted := stream.handshake():
                poller = select.poll()
                poller.register(stream.fileno(), select.POLLIN if wanted == "read" else select.POLLOUT)
                if not poller.poll(max(0.0, 1e3 * (deadline_s - time.monotonic()))):
                    raise TimeoutError
        except BaseException:
            stream.close()
            raise
        return stream
    except OSError as exc:
        if sock is not None:
            sock.close()
        if isinstance(exc, TimeoutError) and isinstance(address, tuple):
            raise _too_late(address, timeout_s) from exc
        raise _connect_error(address, exc) from exc


async def connect_on_loop(address: Address, tls: ssl.SSLContext | None, *, timeout_s: float) -> Stream:
    """A non-blocking socket, connected. Raises: DaemonUnavailable, DaemonTimeout."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _connect_on_loop(address, tls)
    except TimeoutError as exc:
        raise _too_late(address, timeout_s) from exc
    except OSError as exc:
        raise _connect_error(address, exc) from exc


async def _connect_on_loop(address: Address, tls: ssl.SSLContext | None) -> Stream:
    loop = asyncio.get_running_loop()
    if isinstance(address, Path):
        return await _connected(socket.AF_UNIX, str(address))
    failed: OSError | None = None
    for family, _, _, _, where in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        try:
            sock = await _connected(family, where)
        except OSError as exc:
            failed = exc
            continue
        try:
            keep_alive(sock)
            return sock if tls is None else await _shake_hands(TlsSocket(sock, tls, server_hostname=address.host))
        except BaseException:
            sock.close()
            raise
    raise failed or OSError("no address")


async def _connected(family: int, where: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, where)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


def _tell(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _shake_hands(stream: TlsSocket) -> TlsSocket:
    loop = asyncio.get_running_loop()
    try:
        while wanted := stream.handshake():
            ready: asyncio.Future[None] = loop.create_future()
            add, remove = (
                (loop.add_reader, loop.remove_reader) if wanted == "read" else (loop.add_writer, loop.remove_writer)
            )
            add(stream.fileno(), _tell, ready)
            try:
                await ready
            finally:
                remove(stream.fileno())
    except BaseException:
        stream.close()
        raise
    return stream
