"""The daemon: one process that owns the index and serves every engine on the node.

Wires the ram tier, the stores, the session door and the HTTP door together and runs them on one event loop. What a verb does
is in server/verbs.py. Always true: what a daemon holds can be told by `stats` and `health`; after `drain` nothing of it is
left but what lower tiers keep.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar

from forebay import __version__
from forebay.kvstore.channel import ChannelPolicy, TierChannel
from forebay.kvstore.errors import OverLimit, ProtocolError
from forebay.kvstore.identity import NamespaceFacts, namespace_id
from forebay.kvstore.index import RowArray, Table
from forebay.kvstore.objects import seal
from forebay.kvstore.store import Store, StorePolicy
from forebay.kvstore.tier import ObjectKey, SupportsStats, Tier
from forebay.kvstore.tls import Stream
from forebay.kvstore.wire import VERBS
from forebay.kvstore.writebehind import ByteBudget
from forebay.server.auth import check_verbs
from forebay.server.blocks import Blocks
from forebay.server.busypoll import BusyPoll
from forebay.server.ceiling import Ceiling
from forebay.server.door import Connection, UnixListener
from forebay.server.expiry import Expiries
from forebay.server.expiry_log import NAME as EXPIRY_LOG
from forebay.server.expiry_log import ExpiryLog
from forebay.server.explain import Explainer
from forebay.server.http import HttpDoor
from forebay.server.lag import LoopLag
from forebay.server.netdoor import TcpListener
from forebay.server.reports import Reports
from forebay.server.right_of_way import RightOfWay
from forebay.server.rounds import Rounds
from forebay.server.sessions import Namespace, Registry
from forebay.server.settings import BadSettings, Settings, format_bytes
from forebay.server.verbs import SessionVerbs
from forebay.tiers.ram import Quota, RamDomain, RamTier
from forebay.tiers.ssd import SsdTier

T = TypeVar("T")
log = logging.getLogger("forebay.daemon")

NET: Final = "net"  # stands for a user id in the trust domain of those who come over the network
_SWEEP_S: Final = 0.25
_KEYS_A_TURN: Final = 256  # of a batch that needs no waiting: some 2 ms, then others get their turn
_MAX_PINNED_SHARE: Final = 0.5
# Disks are fast only with several requests under way, and a commit is shared by all that wait for one.
_SSD_POLICY: Final = ChannelPolicy(concurrency=48, store_concurrency=32, prior_latency_s=3e-4)
_COPY_WORKERS: Final = 32


@dataclass(frozen=True)
class DrainReport:
    """What a shutdown did."""

    seconds: float
    sessions_closed: int
    leases_left: int  # still held when time was up
    allocations_left: int
    objects_copied: int  # to lower tiers while draining
    objects_left: int  # that only RAM had

    def __str__(self) -> str:
        return (
            f"drained in {self.seconds:.1f} s: {self.sessions_closed} sessions closed, {self.leases_left} leases and "
            f"{self.allocations_left} allocations cut short, {self.objects_copied} objects copied down, "
            f"{self.objects_left} objects lost with RAM"
        )


class Daemon:
    """Serves until `drain`. `lower`: tiers below RAM, fastest first, beside those that the settings name."""

    def __init__(self, settings: Settings, *, lower: Sequence[Tier] = ()) -> None:
        """Raises: BadSettings: a tenant's secret can't be read, or others may read it."""
        self.settings = settings
        check_verbs(VERBS)
        self.access = settings.access()
        self.boot_epoch = os.urandom(16)
        self.draining = False
        self.max_explain_keys = 1024
        self.probe_timeout_s = 0.05  # a match that waits longer on a slow tier costs more than it can tell
        self.verb_counts: Counter[str] = Counter()
        self.hits = 0
        self.stored = 0
        self.reports = Reports()
        self._given_lower = tuple(lower)
        self.lower: tuple[TierChannel, ...] = ()
        self._stores: dict[str, Store] = {}
        self._copy_budget = ByteBudget(  # of all stores together: tenants take turns in it
            settings.copy_bytes_per_s, StorePolicy().copy_burst_bytes, time.monotonic, asyncio.sleep
        )
        self.namespaces: dict[tuple[str, bytes], Namespace] = {}  # by trust domain and id
        self._explainer = Explainer(self)
        self._quotas: dict[str, Quota] = {}
        self.expiries = Expiries(self.delete)
        self.ceiling = Ceiling()
        self._connections: set[Connection] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._started_s = time.monotonic()
        self._ready = False
        self.ram: RamTier
        self.registry: Registry
        self._lag: LoopLag
        self.busy_poll: BusyPoll
        self.rounds: Rounds
        self.right_of_way: RightOfWay
        self._listener: UnixListener
        self._tcp: TcpListener | None = None
        self._http: HttpDoor | None = None
        self.blocks = Blocks(self)

    # --- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the doors.

        Raises: DaemonAlreadyRunning, BadSettings (an unknown tier), OSError (an address that is taken).
        """
        settings = self.settings
        self.registry = Registry()
        self._lag = LoopLag()
        self.rounds = Rounds()
        self.right_of_way = RightOfWay()
        self.busy_poll = BusyPoll(settings.busy_poll_us / 1e6)
        try:
            self.ram = RamTier(
                capacity_bytes=settings.ram_bytes,
                extent_bytes=settings.extent_bytes,
                reserve_bytes=settings.memory_reserve_bytes,
                on_gone=self._explainer.note_gone,
            )
        except MemoryError as exc:
            size = format_bytes(settings.ram_bytes)
            raise BadSettings(
                [f"ram_bytes = {size}: not even its index fits into this machine's memory: lower it"]
            ) from exc
        await asyncio.to_thread(self.ram.index.back_ahead)  # the first prompt shall not pay for it
        self._listener = UnixListener(settings.socket, mode=settings.socket_mode, accepted=self._accepted)
        try:
            self._listener.start()
        except ValueError as exc:
            raise BadSettings([f"socket: {exc}"]) from exc
        try:
            named = _named_tiers(settings)
            self.lower = tuple(
                TierChannel(tier, policy=_SSD_POLICY if isinstance(tier, SsdTier) else None)
                for tier in (*self._given_lower, *_ssd_tier(settings), *named)
            )
            if settings.tcp_port >= 0:
                self._tcp = self._listen_on_tcp()
            if settings.http_port >= 0:
                self._http = HttpDoor(self, host=settings.http_host, port=settings.http_port, blocks=self.blocks)
                await self._http.start()
        except BaseException:
            self._listener.stop()
            if self._tcp is not None:
                self._tcp.stop()
            for channel in self.lower:
                await channel.aclose()
            await self.ram.aclose()
            raise
        if settings.ssd_bytes:
            await self.expiries.resume(ExpiryLog(settings.ssd_dirs[0] / EXPIRY_LOG), self._domain_named)
        self._lag.start()
        self.background(self._sweep())
        self._ready = True
        log.info(
            "ready",
            extra={
                "socket": str(settings.socket),
                "tcp_port": self.tcp_port,
                "http_port": self.http_port,
                "ram_bytes": self.ram.capacity_bytes,
            },
        )

    @property
    def http_port(self) -> int:
        return self._http.port if self._http is not None else -1

    @property
    def tcp_port(self) -> int:
        return self._tcp.port if self._tcp is not None else -1

    def _listen_on_tcp(self) -> TcpListener:
        """Raises: BadSettings: certificate or key can't be used; OSError: the address is taken."""
        settings = self.settings
        try:
            listener = TcpListener(
                settings.tcp_host,
                settings.tcp_port,
                certificate=settings.tcp_tls_cert,
                key=settings.tcp_tls_key,
                handshake_s=settings.tcp_handshake_s,
                may_accept=self._has_room_for_strangers,
                accepted=self._accepted_from_network,
            )
        except OSError as exc:
            raise BadSettings(
                [
                    f"tcp_tls_cert, tcp_tls_key: can't be used ({exc.strerror or exc}): give a PEM certificate and its key"
                ]
            ) from exc
        listener.start()
        return listener

    def _strangers(self) -> int:
        """Peers from the network that have not said who they are."""
        return sum(connection.peer.remote and not connection.known for connection in self._connections)

    def _has_room_for_strangers(self, shaking_hands: int) -> bool:
        """They have a bound of their own: whoever connects and says nothing shuts out others like it, and no session."""
        return self._strangers() + shaking_hands < max(16, self.settings.max_sessions // 4)

    def _accepted(self, sock: socket.socket) -> None:
        connection = Connection(sock, max_frame_bytes=self.settings.max_frame_bytes, rounds=self.rounds)
        # More sockets than sessions could ever be: not even a hello is read.
        if len(self._connections) - self._strangers() >= 2 * self.settings.max_sessions:
            connection.close()
            return
        self._begin(connection)

    def _accepted_from_network(self, sock: Stream, deadline_s: float) -> None:
        connection = Connection(sock, max_frame_bytes=self.settings.max_frame_bytes, rounds=self.rounds, remote=True)
        connection.introduce_until(deadline_s)
        self._begin(connection)

    def _begin(self, connection: Connection) -> None:
        self._connections.add(connection)
        connection.start(SessionVerbs(self, connection))

    def disconnected(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Have work done beside requests, at the latest until the drain ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)
        return task

    def _background_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None and not isinstance(exc, ProtocolError):
            log.error("background task failed", exc_info=exc)

    async def _sweep(self) -> None:
        """End what is due: pins, times to live, and sessions that hold memory past the deadline: they may be stopped."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self.expiries.tick()
            for session in self.registry.overdue(time.monotonic()):
                self.registry.counters.ended_by_deadline += 1
                log.warning(
                    "session ended: it held a lease or an allocation past its deadline", extra={"pid": session.pid}
                )
                session.close()

    async def drain(self) -> DrainReport:
        """Take nothing new, let what runs finish for `drain_s`, copy down what only RAM has, close. Says what it did."""
        started_s = time.monotonic()
        self.draining = True
        self._ready = False
        self._listener.stop()
        if self._tcp is not None:
            self._tcp.stop()
        deadline_s = started_s + self.settings.drain_s
        # A look now and then, instead of an event that every release would have to tell.
        while time.monotonic() < deadline_s and self._busy():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        sessions = list(self.registry.sessions.values())
        leases = sum(len(session.leases) for session in sessions)
        allocations = sum(len(session.allocations) for session in sessions)
        for connection in list(self._connections):
            connection.close()
        copied = left = 0
        for store in self._stores.values():
            ended = await store.aclose(max(0.0, deadline_s - time.monotonic()))
            copied += ended.copied
            left += ended.left
        if not self.lower:
            left = sum(table.visible for table in self.ram.index.tables)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for channel in self.lower:
            await channel.aclose()
        if self._http is not None:
            await self._http.stop()
        self._lag.stop()
        self.expiries.close()
        self.registry.close()
        await self.ram.aclose()
        report = DrainReport(time.monotonic() - started_s, len(sessions), leases, allocations, copied, left)
        log.info("drained", extra={"report": str(report)})
        return report

    def _busy(self) -> bool:
        return any(session.leases or session.allocations for session in self.registry.sessions.values())

    # --- what verbs ask for -----------------------------------------------------------------------------------------

    def domain_of(self, tenant: str, uid: int | None) -> RamDomain:
        """The trust domain of a peer: tenant and uid. Within it clients trust each other, as ranks of one engine do.

        `uid` is None for those who come over the network: they map no memory, and what they send is verified. With a token they
        share blocks with the engines of `network_uid`; without a table nobody knows who they are, and they have a domain of
        their own.
        """
        user: int | str
        if uid is not None:
            user = uid
        elif not self.access.required:
            user = NET
        else:
            user = os.getuid() if self.settings.network_uid is None else self.settings.network_uid
        return self._domain(tenant, user)

    def _domain(self, tenant: str, user: int | str) -> RamDomain:
        options = self.settings.domain(tenant, user)
        limit = self.settings.tenant(tenant).ram_bytes
        if limit is not None and tenant not in self._quotas:
            self._quotas[tenant] = Quota(limit // self.settings.extent_bytes)
        return self.ram.domain(f"{tenant}/{user}", read_only=options.read_only, quota=self._quotas.get(tenant))

    def _domain_named(self, name: str) -> RamDomain:
        tenant, _, user = name.rpartition("/")
        return self._domain(tenant, int(user) if user.isdigit() else user)

    def namespace_id(self, facts: NamespaceFacts, tenant: str) -> bytes:
        return namespace_id(facts, tenant=tenant, secret=self.access.secret_of(tenant))

    def note_namespace(self, domain: RamDomain, namespace: Namespace) -> None:
        self.namespaces[(domain.domain_name, namespace.id)] = namespace

    def store_of(self, domain: RamDomain) -> Store:
        """The domain's store: its RAM in front of the tiers that all domains share."""
        store = self._stores.get(domain.domain_name)
        if store is None:

            def verify(key: ObjectKey, view: memoryview) -> str | None:
                layout = self.namespaces[(domain.domain_name, key.namespace)].layouts[key.group]
                return layout.verify_object(view, key=key.block, namespace=key.namespace)

            store = self._stores[domain.domain_name] = Store(
                domain,
                self.lower,
                verify=verify,
                seal=seal,
                settings=StorePolicy(write_policy=self.settings.write_policy, copy_workers=_COPY_WORKERS),
                owner=domain.domain_name.partition("/")[0],
                copy_budget=self._copy_budget,
            )
        return store

    @staticmethod
    def object_key(table: Table, block: bytes) -> ObjectKey:
        return ObjectKey(table.namespace, block, table.group)

    def hold_deadline_s(self) -> float:
        return time.monotonic() + self.settings.lease_deadline_s

    @property
    def quarantine_is_full(self) -> bool:
        return self.registry.quarantined_bytes() >= self.settings.max_quarantine_bytes

    def check_pins(self, rows: RowArray) -> None:
        """Raises: OverLimit if pins of these rows, too, would keep more than half of the tier."""
        held = self.ram.pinned_bytes + self.ram.bytes_of(rows[self.ram.index.pins[rows] == 0])
        if held > _MAX_PINNED_SHARE * self.ram.capacity_bytes:
            raise OverLimit(f"pins would keep {held} bytes, more than half of the ram tier: unpin some first")

    def estimates(self) -> dict[str, tuple[float, float, int, float, bool]]:
        found = {self.ram.name: self.reports.ram_estimate()}
        found.update((channel.name, channel.estimate()) for channel in self.lower)
        return {
            name: (e.latency_s, e.bandwidth_bytes_per_s, e.queued_bytes, e.overhead_s_per_object, e.healthy)
            for name, e in found.items()
        }

    async def delete(self, domain: RamDomain, keys: Sequence[ObjectKey]) -> int:
        if self.lower:
            return await self.store_of(domain).delete(keys)
        found = 0
        for start in range(0, len(keys), _KEYS_A_TURN):
            found += sum([await domain.delete(key) for key in keys[start : start + _KEYS_A_TURN]])
            await asyncio.sleep(0)
        return found

    async def flush(self, domain: RamDomain, keys: Sequence[ObjectKey], timeout_s: float) -> tuple[int, int, int]:
        """(durable, missing, failed); without a lower tier nothing can be durable."""
        if self.lower:
            result = await self.store_of(domain).flush(keys, timeout_s=timeout_s)
            return result.durable, result.missing, result.failed
        present = 0
        for start in range(0, len(keys), _KEYS_A_TURN):
            some = keys[start : start + _KEYS_A_TURN]
            present += sum(domain.leading_run(key.namespace, key.group, [key.block]) for key in some)
            await asyncio.sleep(0)
        return 0, len(keys) - present, present

    # --- telling ----------------------------------------------------------------------------------------------------

    def explain_blocks(self, domain: RamDomain, table: Table, blocks: Sequence[bytes]) -> list[dict[str, Any]]:
        """For each block: which tiers hold it, in what state, or why it is not there. No token ids."""
        return self._explainer.blocks(domain, table, blocks)

    async def explain(
        self, namespace_hex: str, key_hexes: list[str], tenant: str | None = None
    ) -> list[dict[str, Any]]:
        """As `explain_blocks`, by hex, over the trust domains (of `tenant`, if given) that know the namespace.

        Raises: UnknownHandle, BadRequest.
        """
        return self._explainer.by_hex(namespace_hex, key_hexes, tenant)

    @property
    def loop_lag(self) -> Mapping[str, Any]:
        return self._lag.histogram()

    def recent_lag(self) -> dict[str, float]:
        """Percentiles of the event loop's lag since this was last asked, at most a minute back."""
        found = self._lag.recent()
        self._lag.forget_recent()
        return found

    def stats(self) -> dict[str, Any]:
        tiers: dict[str, Any] = {self.ram.name: self.ram.stats()}
        for channel in self.lower:
            own = channel.tier.stats() if isinstance(channel.tier, SupportsStats) else {}
            tiers[channel.name] = {**own, **channel.stats()}
        return {
            "version": __version__,
            "uptime_s": time.monotonic() - self._started_s,
            "boot_epoch": self.boot_epoch.hex(),
            "blocks": {"hits_total": self.hits, "stored_total": self.stored},
            "ceiling": self.ceiling.stats(),
            "expiry": self.expiries.stats(),
            "sessions": self.registry.stats(),
            "http": self.blocks.stats(),
            "tiers": tiers,
            "stores": {name: store.stats() for name, store in self._stores.items()},
            "verbs": {f"{verb}": {"requests_total": count} for verb, count in self.verb_counts.items()},
            "reports": self.reports.stats(),
            "loop_lag": self._lag.recent(),
            "right_of_way": self.right_of_way.stats(),
            "health": self.health(),
            "http_url": self._http.url if self._http is not None else "",
        }

    def health(self) -> dict[str, Any]:
        quarantined = self.registry.quarantined_bytes()
        reasons: list[str] = []
        if self.draining:
            reasons.append("draining")
        if self.quarantine_is_full:
            reasons.append(
                f"{quarantined} bytes are quarantined for processes that neither ended nor settled: look for stopped engines"
            )
        for channel in self.lower:
            told = channel.tier.health() if isinstance(channel.tier, SupportsStats) else []
            if not channel.healthy and not told:
                told = [f"tier {channel.name} is down"]
            reasons.extend(told)
        return {
            "ok": not self.quarantine_is_full,
            "ready": self._ready,
            "reasons": reasons,
            "quarantined_bytes": quarantined,
            "orphans": len(self.registry.orphans),
        }


def _ssd_tier(settings: Settings) -> list[Tier]:
    """The ssd tier, unless it is turned off. A directory in trouble doesn't keep the daemon from starting: health tells.

    Raises: BadSettings.
    """
    if not settings.ssd_bytes:
        return []
    try:
        tier = SsdTier(
            settings.ssd_bytes,
            settings.ssd_dirs,
            reserve_bytes=settings.ssd_reserve_bytes,
            scrub_bytes_per_s=settings.ssd_scrub_bytes_per_s,
        )
    except ValueError as exc:
        raise BadSettings(
            [f"ssd_bytes = {format_bytes(settings.ssd_bytes)}: {exc}: raise it, or 0 turns it off"]
        ) from exc
    return [tier]


def _named_tiers(settings: Settings) -> list[Tier]:
    """Tiers below RAM that the settings name, made by their `forebay.tiers` entry points.

    Raises: BadSettings: no such tier is installed, or it can't be loaded or refuses its options.
    """
    known = {point.name: point for point in entry_points(group="forebay.tiers")}
    missing = [name for name in settings.tiers if name not in known]
    if missing:
        installed = ", ".join(sorted(known)) or "none"
        raise BadSettings(
            [f"tiers: {', '.join(missing)} not installed (entry points of forebay.tiers here: {installed})"]
        )
    tiers: list[Tier] = []
    for name in settings.tiers:
        try:
            tier = known[name].load()(**settings.tier_options.get(name, {}))
        except (ImportError, AttributeError) as exc:
            raise BadSettings([f"tiers: {name} is installed and can't be loaded: {exc}"]) from exc
        except (TypeError, ValueError) as exc:
            raise BadSettings([f"tier_options.{name}: {exc}"]) from exc
        if not isinstance(tier, Tier):
            raise BadSettings([f"tiers: {name} makes a {type(tier).__name__}, which is no Tier"])
        tiers.append(tier)
    return tiers
