"""Clients over TCP: networks that cut, stall and change bytes, daemons that die or lie, and many callers at a time.

Payloads are a function of namespace and key, so a wrong block is noticed exactly.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.clients import AsyncClient, Client, PutResult
from forebay.clients.network import Network
from forebay.kvstore import wire
from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.errors import ClientError, DaemonTimeout, DaemonUnavailable, ForebayError
from forebay.kvstore.identity import PUBLIC_SECRET, namespace_id
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.wire import HEADER, Kind, encode_frame
from tests.clients.conftest import Connect
from tests.clients.crooked import Proxy, lying_daemon, truthful
from tests.clients.test_reconnect import descriptors, mapped, until_it_answers
from tests.daemon_process import WAIT_S, DaemonProcess, eventually, facts_of, payload_of, serving, tokens_of

BLOCKS = 200  # 3.3 MB: several requests' worth would be more, see LARGE
FACTS = facts_of()
LARGE = facts_of(block_tokens=128, layers=8)  # blocks of 512 KiB
SIZE = ObjectLayout.of(FACTS).payload_bytes


class Story:
    """One prompt's blocks."""

    def __init__(self, space: Any, seed: int, blocks: int = BLOCKS) -> None:
        self.space = space
        self.tokens = tokens_of(seed, blocks, space.facts.block_tokens)
        self.keys = space.keys(self.tokens)
        self.size = space.layout().payload_bytes
        self.payloads = [payload_of(space.id, key, self.size) for key in self.keys]

    def put(self, **how: Any) -> Any:
        return self.space.put(self.keys, self.tokens, self.payloads, **how)

    async def right_blocks(self, **how: Any) -> int:
        """How many blocks a get gives. Fails on a wrong byte."""
        buffers = [bytearray(self.size) for _ in self.keys]
        count: int = await self.space.get_into(self.keys, buffers, self.tokens, **how)
        assert buffers[:count] == self.payloads[:count]
        return count


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    yield from serving(tmp_path_factory.mktemp("daemon"), tcp=True, ram_bytes=64 << 20)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon that this test alone may kill or stop."""
    yield from serving(tmp_path, tcp=True)


@pytest.fixture
async def space(connect: Connect, daemon: DaemonProcess, request: pytest.FixtureRequest) -> Any:
    client = await connect(daemon.tcp, token=daemon.token)
    return await client.open(facts_of(salt=request.node.name.encode()))


async def through(connect: Connect, proxy: Proxy, daemon: DaemonProcess, space: Any, **options: Any) -> Any:
    """The namespace of `space`, by way of the proxy."""
    return await (await connect(proxy.address, token=daemon.token, **options)).open(space.facts)


# --- daemons that go away ---------------------------------------------------------------------------------------------


async def test_a_killed_daemon_is_unavailable_at_once_and_found_again_when_it_is_back(
    connect: Connect, own: DaemonProcess
) -> None:
    client = await connect(own.tcp, token=own.token)
    story = Story(await client.open(FACTS), 1)
    assert (await story.put()).stored == BLOCKS
    epoch = client.boot_epoch
    lease = await story.space.acquire(story.keys, story.tokens)
    before = mapped(), descriptors()
    own.kill()
    for _ in range(3):
        with pytest.raises(DaemonUnavailable):
            await story.right_blocks()
    assert client.boot_epoch == b""
    own.start()
    assert await until_it_answers(story.right_blocks) == 0
    assert client.boot_epoch not in (b"", epoch)
    assert lease.valid() and [bytes(view) for view in lease.views] == story.payloads  # a copy of this client's own
    lease.release()
    assert (await story.put()).stored == BLOCKS
    assert await story.right_blocks() == BLOCKS
    assert (mapped(), descriptors()) == before


async def test_a_stopped_daemon_is_a_timeout_within_the_calls_deadline(connect: Connect, own: DaemonProcess) -> None:
    import signal

    client = await connect(own.tcp, token=own.token)
    story = Story(await client.open(FACTS), 1)
    await story.put()
    own.signal(signal.SIGSTOP)
    for call in (story.right_blocks, story.put):
        with pytest.raises(DaemonTimeout):
            await call(timeout_s=0.2)
    own.signal(signal.SIGCONT)
    assert await until_it_answers(story.right_blocks) == BLOCKS
    own.at_base(others=2)  # the client's session, and one for payload


async def test_nothing_listening_is_unavailable_not_a_hang(connect: Connect, own: DaemonProcess) -> None:
    own.kill()
    with pytest.raises(DaemonUnavailable, match="forebay serve"):
        await connect(own.tcp)


# --- networks that do what they like ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 40, 700, 20_000, 1_000_000, 3_000_000])
@pytest.mark.parametrize("fault", ["cut", "stall"])
async def test_a_get_cut_or_stalled_anywhere_fails_and_the_next_one_works(
    connect: Connect, daemon: DaemonProcess, space: Any, fault: str, at: int
) -> None:
    story = Story(space, 1)
    await story.put()
    with Proxy(daemon.tcp) as proxy:
        story.space = await through(connect, proxy, daemon, space)
        assert await story.space.match(story.keys[:1])
        proxy.fault, proxy.at = fault, at
        with pytest.raises(ClientError):
            await story.right_blocks(timeout_s=0.5)
        assert proxy.happened.is_set()
        assert await until_it_answers(lambda: story.right_blocks(timeout_s=WAIT_S)) == BLOCKS


@pytest.mark.parametrize("at", [0, 40, 700, 20_000, 1_000_000, 3_000_000])
@pytest.mark.parametrize("fault", ["cut", "stall"])
async def test_a_put_cut_or_stalled_anywhere_fails_leaves_nothing_and_the_next_one_works(
    connect: Connect, daemon: DaemonProcess, space: Any, fault: str, at: int
) -> None:
    story = Story(space, 2)
    with Proxy(daemon.tcp, to_client=False) as proxy:
        story.space = await through(connect, proxy, daemon, space)
        assert await story.space.match(story.keys[:1])
        proxy.fault, proxy.at = fault, at
        with pytest.raises(ClientError):
            await story.put(timeout_s=0.5)
        assert proxy.happened.is_set()
        # The daemon can't know yet that nothing more will come: until the connection ends these blocks are being written.
        story.space = space
    eventually(daemon.stats, lambda stats: not stats["sessions"]["uncommitted_bytes"])
    assert await story.right_blocks() == 0
    assert await story.put() == PutResult(stored=BLOCKS)
    assert await story.right_blocks() == BLOCKS


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("to_client", [True, False])
async def test_a_flipped_bit_is_a_miss_or_an_error_and_never_a_wrong_byte(
    connect: Connect, daemon: DaemonProcess, space: Any, seed: int, to_client: bool
) -> None:
    rng = random.Random(seed)
    story = Story(space, 3 + seed)
    direct = Story(space, 3 + seed)
    if to_client:
        await direct.put()
    for _ in range(4):
        with Proxy(daemon.tcp, to_client=to_client) as proxy:
            story.space = await through(connect, proxy, daemon, space)
            proxy.fault, proxy.at = "flip", rng.choice([rng.randrange(2000), rng.randrange(BLOCKS * SIZE)])
            try:
                if to_client:
                    await story.right_blocks(timeout_s=0.5)
                else:
                    await story.put(timeout_s=0.5)
            except ForebayError:
                pass
            assert await direct.right_blocks() >= 0  # what was stored is right, whoever reads it
            await space.delete(story.keys)
            if to_client:
                await direct.put()


# --- daemons that lie -------------------------------------------------------------------------------------------------

NAMESPACE = namespace_id(FACTS, tenant="default", secret=PUBLIC_SECRET)


def payload_frame(number: int, data: bytes, length: int | None = None) -> bytes:
    return HEADER.pack(len(data) if length is None else length, 1, Kind.PAYLOAD, 0, number) + data


LIES: dict[str, Callable[[int, bytes], bytes]] = {
    "more objects than were asked for": lambda n, o: encode_frame(Kind.REPLY, n, wire.GetReply(3, len(o))),
    "objects of another size": lambda n, o: encode_frame(Kind.REPLY, n, wire.GetReply(1, len(o) + 64)),
    "a negative count": lambda n, o: encode_frame(Kind.REPLY, n, wire.GetReply(-1, len(o))),
    "payload without a reply": lambda n, o: payload_frame(n, o),
    "payload of another request": lambda n, o: (
        encode_frame(Kind.REPLY, n, wire.GetReply(1, len(o))) + payload_frame(n + 1, o)
    ),
    "more payload than announced": lambda n, o: (
        encode_frame(Kind.REPLY, n, wire.GetReply(1, len(o))) + payload_frame(n, o, len(o) + 1)
    ),
    "an answer of another verb": lambda n, o: encode_frame(Kind.REPLY, n, wire.Done(3)),
    "no frame": lambda n, o: b"HTTP/1.1 200 OK\r\n\r\n" * 4,
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_answer_that_cannot_be_true_is_an_error(connect: Connect, lie: str) -> None:
    whole = bytes(ObjectLayout.of(FACTS).object_bytes)

    def answer(number: int, request: Any) -> bytes:
        if isinstance(request, wire.Get):
            return LIES[lie](number, whole)
        return truthful(number, request, NAMESPACE)

    with lying_daemon(answer) as address:
        space = await (await connect(address)).open(FACTS)
        story = Story(space, 1, blocks=2)
        with pytest.raises(ClientError):
            await story.right_blocks(timeout_s=1.0)


@pytest.mark.parametrize("at", [0, 16, 48, 96, ObjectLayout.of(FACTS).header_bytes, -1])
async def test_objects_that_are_not_those_asked_for_are_a_miss(connect: Connect, at: int) -> None:
    layout = ObjectLayout.of(FACTS)

    def answer(number: int, request: Any) -> bytes:
        if not isinstance(request, wire.Get):
            return truthful(number, request, NAMESPACE)
        objects = b""
        for i, key in enumerate(wire.split_keys(request.keys)):
            payload = payload_of(NAMESPACE, key, SIZE)
            made = bytearray(layout.header_bytes) + payload
            layout.write_header(
                made,
                key=key,
                parent=None,
                namespace=NAMESPACE,
                position=0,
                token_ids=tokens_of(1, 4)[16 * i : 16 * i + 16],
                checksums=layout.part_checksums(payload),
                created_ns=1,
            )
            if i == 2:
                made[at] ^= 1
            objects += made
        return encode_frame(Kind.REPLY, number, wire.GetReply(4, layout.object_bytes)) + payload_frame(number, objects)

    with lying_daemon(answer) as address:
        client = await connect(address)
        story = Story(await client.open(FACTS), 1, blocks=4)
        assert await story.right_blocks() == 2
        async with story.space.acquire(story.keys, story.tokens) as lease:
            assert [bytes(view) for view in lease.views] == story.payloads[:2] and lease.verify() == 2
        assert client.counters["corrupt"] + client.counters["doubted"] > 0


# --- who may come in --------------------------------------------------------------------------------------------------


async def test_a_wrong_token_is_told_and_appears_nowhere(connect: Connect, daemon: DaemonProcess) -> None:
    with pytest.raises(ForebayError, match="token") as refused:
        await connect(daemon.tcp, token="fby_not_this_one")
    assert "not_this_one" not in str(refused.value) and "not_this_one" not in daemon.log


async def test_a_certificate_of_an_unknown_authority_is_refused(
    connect: Connect, running_tls: DaemonProcess, tmp_path: Path
) -> None:
    with pytest.raises(DaemonUnavailable, match="not to be trusted"):
        await connect(running_tls.tcp, token=running_tls.token, tls=True)
    with pytest.raises(DaemonUnavailable, match="not to be trusted"):
        await connect(running_tls.tcp.replace("127.0.0.1", "localhost"), tls=running_tls.authority)


async def test_tls_and_plain_do_not_mix(connect: Connect, daemon: DaemonProcess, running_tls: DaemonProcess) -> None:
    with pytest.raises(ClientError):
        await connect(daemon.tcp, token=daemon.token, tls=running_tls.authority, timeout_s=2.0)
    with pytest.raises(ClientError):
        await connect(running_tls.tcp, token=running_tls.token, timeout_s=2.0)


async def test_a_context_of_the_callers_own_is_taken(connect: Connect, running_tls: DaemonProcess) -> None:
    context = ssl.create_default_context(cafile=str(running_tls.authority))
    client = await connect(running_tls.tcp, token=running_tls.token, tls=context)
    assert (await client.stats())["sessions"]["open"] >= 1


@pytest.mark.parametrize(
    "address", ["udp://127.0.0.1:1", "tcp://", "tcp://host", "tcp://h:x", "tcp://t@h:1", "tcp://h:1/x"]
)
async def test_an_address_that_is_none_says_what_to_write(connect: Connect, address: str) -> None:
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        await connect(address)


async def test_without_a_table_peers_share_no_blocks_with_local_engines(connect: Connect, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, tcp=True, credentials={}, unix_rights=[]) as open_to_all:
        local = Story(await (await connect(open_to_all.socket)).open(FACTS), 1)
        await local.put()
        remote = Story(await (await connect(open_to_all.tcp)).open(FACTS), 1)
        assert await remote.right_blocks() == 0
        assert (await remote.put()).stored == BLOCKS


# --- what it costs ----------------------------------------------------------------------------------------------------


async def test_estimates_count_the_clients_own_network(connect: Connect, daemon: DaemonProcess, space: Any) -> None:
    local = await (await connect(daemon.socket)).open(space.facts)
    before = (await local.match([])).estimates["ram"]
    story = Story(space, 40)
    await story.put()
    guessed = (await space.match(story.keys)).estimates["ram"]
    assert await story.right_blocks() == BLOCKS
    measured = (await space.match(story.keys)).estimates["ram"]
    assert guessed.bandwidth_bytes_per_s != measured.bandwidth_bytes_per_s
    await space.report("load", bytes=1000, seconds=1000.0)  # a slow link is no slow memory
    assert (await local.match([])).estimates["ram"] == before
    assert "load_over_network" in daemon.stats()["reports"]


def test_a_tier_is_never_seen_faster_than_the_network() -> None:
    network = Network()
    network.moved(10_000_000, 1.0)
    network.answered(0.25)
    near = {"ram": TierEstimate(1e-4, 8e9), "disk": TierEstimate(0.5, 10_000_000.0, 7, 0.1, False)}
    seen = network.seen_from_here(near)
    assert seen["ram"] == TierEstimate(0.25, 10_000_000.0)
    assert seen["disk"] == TierEstimate(0.75, 5_000_000.0, 7, 0.1, False)  # first loaded, then sent
    for _ in range(50):
        network.moved(100, 1e-9)  # too small to tell
    assert network.seen_from_here(near)["ram"].bandwidth_bytes_per_s == 10_000_000.0


# --- many at a time ---------------------------------------------------------------------------------------------------


async def test_a_long_transfer_holds_up_no_other_call(connect: Connect, daemon: DaemonProcess, space: Any) -> None:
    story = Story(space, 20)
    await story.put()
    with Proxy(daemon.tcp) as proxy:
        async with AsyncClient(proxy.address, token=daemon.token) as client:
            other = Story(await client.open(space.facts), 20)
            assert await other.right_blocks() == BLOCKS  # its connection for payload is open
            proxy.fault, proxy.at = "stall", 1_000_000
            slow = asyncio.create_task(other.right_blocks(timeout_s=WAIT_S))
            assert await asyncio.to_thread(proxy.happened.wait, WAIT_S)
            assert (await other.space.match(other.keys)).blocks == BLOCKS
            assert await other.right_blocks() == BLOCKS
            assert not slow.done()
            slow.cancel()
            assert (await asyncio.gather(slow, return_exceptions=True))[0].__class__ is asyncio.CancelledError


async def test_more_callers_than_connections_take_turns(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.tcp, token=daemon.token, timeout_s=30.0) as client:
        space = await client.open(facts_of(salt=b"turns"))
        stories = [Story(space, 100 + i, blocks=40) for i in range(20)]
        assert {(await each) for each in [story.put() for story in stories]} == {PutResult(stored=40)}
        assert await asyncio.gather(*[story.right_blocks() for story in stories]) == [40] * 20
        assert (await client.stats())["sessions"]["open"] <= 1 + 4 + 1


async def test_cancelled_calls_hold_nothing(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.tcp, token=daemon.token) as client:
        space = await client.open(facts_of(salt=b"cancelled"))
        story = Story(space, 1)
        await story.put()
        for number in range(40):
            other = Story(space, 200 + number, blocks=60)
            task = asyncio.ensure_future([story.right_blocks, other.put][number % 2]())
            for _ in range(number % 9):
                await asyncio.sleep(0 if number % 3 else 0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await story.right_blocks() == BLOCKS


@pytest.mark.parametrize("tls", [False, True])
async def test_large_blocks_over_several_requests_come_whole(connect: Connect, tmp_path: Path, tls: bool) -> None:
    with DaemonProcess(tmp_path, tcp=True, tls=tls, ram_bytes=128 << 20) as daemon:
        options = {"tls": daemon.authority} if tls else {}
        client = await connect(daemon.tcp, token=daemon.token, timeout_s=30.0, **options)
        story = Story(await client.open(LARGE), 5, blocks=90)
        assert await story.put() == PutResult(stored=90)
        assert await story.right_blocks() == 90
        assert await story.put() == PutResult(present=90)
        await client.close()
        daemon.at_base()


def test_threads_on_one_client_get_only_right_bytes(tmp_path: Path) -> None:
    from tests.clients.test_threads import Worker

    with (
        DaemonProcess(tmp_path, tcp=True, ram_bytes=8 << 20) as daemon,
        Client(daemon.tcp, token=daemon.token, timeout_s=30.0) as client,
    ):
        workers = [Worker(client.open(FACTS), seed) for seed in range(8)]
        failures: list[BaseException] = []

        def run(worker: Worker) -> None:
            try:
                worker.run(40)
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for failure in failures:
            raise failure
        assert sum(worker.hits for worker in workers) > 0
        assert client.stats()["tiers"]["ram"]["counters"]["evicted"] > 0
        client.close()
        daemon.at_base()
