"""Operations on one opened namespace: find, lease, copy, store, keep, forget, explain, report.

Each stands here once, as a generator. Always true: a doubt about bytes is a miss; an operation that fails or is given up
leaves no lease and no allocation behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from forebay.clients import remote
from forebay.clients.copying import copy_in, copy_out, targets_of
from forebay.clients.keying import Keying
from forebay.clients.lease import Lease
from forebay.clients.memory import read_places
from forebay.clients.pieces import growing_pieces
from forebay.clients.results import FlushResult, Match, PutResult, TierRun, tally
from forebay.clients.session import ClientCore, Life, Op, Sent
from forebay.clients.transport import Pending
from forebay.clients.writing import Run
from forebay.kvstore import wire
from forebay.kvstore.cost import TierEstimate
from forebay.kvstore.errors import DaemonUnavailable, EpochEnded
from forebay.kvstore.identity import NamespaceFacts
from forebay.kvstore.keys import KEY_BYTES, TokenIds, token_words
from forebay.kvstore.objects import ObjectLayout
from forebay.kvstore.tier import Buffer, WritableBuffer
from forebay.kvstore.wire import SlotStatus

T = TypeVar("T")
_CHUNK_BYTES: Final = 32 << 20  # of objects in one allocate
_FIRST_CHUNK_BYTES: Final = 1 << 20
_WRITE_BYTES: Final = 8 << 20  # in one frame, where payloads travel by the socket
# Objects in one allocate. A request wakes the daemon, which costs as much as copying some blocks of 64 KiB: [M] put of those
# reached 0.60 of memmove with 128, 0.66 with 512.
_CHUNK_OBJECTS: Final = 512
_ASKED_AHEAD: Final = 3
_LONGEST_S: Final = 1_000_000_000
# Statuses of an allocate -> bytes of its commit: what was writable is written.
_WRITTEN: Final = bytes(status == SlotStatus.WRITABLE for status in range(256))


class NamespaceCore(Keying):
    """Operations on one opened namespace. It survives a restart of the daemon by opening itself again."""

    def __init__(self, core: ClientCore, facts: NamespaceFacts, life: Life, reply: wire.OpenReply) -> None:
        super().__init__(facts, reply.namespace)
        self.core = core
        self._opened: tuple[Life, int] | None = (life, reply.handle)

    def _live(self, deadline_s: float) -> Op[tuple[Life, int]]:
        """The session, and the handle of this namespace in it."""
        life = yield from self.core.live(deadline_s)
        opened = self._opened
        if opened is None or opened[0] is not life:
            life, reply = yield from self.core.open_facts(self.facts, deadline_s)
            self.check_id(reply)
            self._opened = opened = (life, reply.handle)
        return opened

    def check_id(self, reply: wire.OpenReply) -> None:
        """Raises: EpochEnded: another tenant or secret, so that keys made so far mean nothing there."""
        if reply.namespace != self.id:
            raise EpochEnded("the daemon gives this namespace another id now: open it again and make new keys")

    def _call(self, make: Callable[[int], wire.Request[T]], timeout_s: float | None) -> Op[T]:
        """One request on this namespace's handle."""
        deadline_s = self.core.deadline(timeout_s)
        life, handle = yield from self._live(deadline_s)
        reply: T = yield Sent(life.transport, life.transport.start(make(handle), deadline_s), deadline_s)
        return reply

    # --- reading ----------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[Match]:
        """The leading run that any tier holds. May count past a block deleted or damaged in its middle; `acquire` won't."""
        flat = _flat(keys)
        began_s = time.perf_counter()
        reply = yield from self._call(lambda handle: wire.Match(handle, group, flat), timeout_s)
        runs = tuple(TierRun(tier, blocks) for tier, blocks in reply.runs)
        estimates = {name: TierEstimate(*values) for name, values in reply.estimates.items()}
        if self.core.remote:
            self.core.network.answered(time.perf_counter() - began_s)
            estimates = self.core.network.seen_from_here(estimates)
        return Match(sum(run.blocks for run in runs), runs, estimates)

    def lease(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds | None = None,
        group: int = 0,
        *,
        wait_s: float = 0.0,
        shares: int = 1,
        timeout_s: float | None = None,
    ) -> Op[Lease]:
        """Lease the leading run that is in RAM, or gets there from lower tiers within `wait_s`.

        Keys, namespace and (if given) token ids are compared with every block's header: the first that differs ends the run.
        An empty lease is a miss. Over TCP a lease is a copy of this client's own, with the parts' checksums verified.
        """
        flat = _flat(keys)
        layout = self.layout(group)
        words = _words_of(token_ids, len(keys), layout)
        deadline_s = self.core.deadline(timeout_s)
        if self.core.remote:
            return (yield from remote.lease(self, keys, words, group, wait_s, deadline_s))
        life, handle = yield from self._live(deadline_s)
        request = wire.Acquire(handle, group, flat, int(wait_s * 1000), shares)
        reply: wire.AcquireReply = yield Sent(life.transport, life.transport.start(request, deadline_s), deadline_s)
        return (yield from self._open_lease(life, reply, flat, layout, words, deadline_s))

    def _open_lease(
        self,
        life: Life,
        reply: wire.AcquireReply,
        flat: bytes,
        layout: ObjectLayout,
        words: npt.NDArray[np.uint32] | None,
        deadline_s: float,
    ) -> Op[Lease]:
        places = read_places(reply.locations)
        loaded = [TierRun(tier, blocks) for tier, blocks in reply.loaded]
        self.core.drop_retired(life, reply.retired)
        if not reply.lease:
            return Lease(self.core, None, 0, places, layout, loaded)
        lease = Lease(self.core, life, reply.lease, places, layout, loaded)
        try:
            mapped = yield from self.core.map_extents(life, places, deadline_s)
            life.memory.map(places[:mapped], writable=False)
            good = life.memory.leading_good(places[:mapped], flat, self.id, layout, words)
            if good < len(places):
                self.core.counters["doubted"] += len(places) - good
                lease.places = places[:good]
        except BaseException:
            lease.release()
            raise
        return lease

    def copy_payloads(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[WritableBuffer] | WritableBuffer,
        token_ids: TokenIds | None = None,
        group: int = 0,
        *,
        verify: bool = True,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Op[int]:
        """Copy payloads of the leading run into `buffers`: one buffer a block, or one for all, side by side.

        Returns: how many leading blocks were copied, and with `verify` (over TCP always) hold the checksums of their writer.
        Bytes of later buffers are undefined.
        """
        layout = self.layout(group)
        targets = targets_of(buffers, len(keys), layout.payload_bytes)
        if self.core.remote:
            _flat(keys)
            words = _words_of(token_ids, len(keys), layout)
            deadline_s = self.core.deadline(timeout_s)
            return (yield from remote.fetch(self, keys, targets, words, group, wait_s, deadline_s)).blocks
        lease = yield from self.lease(keys, token_ids, group, wait_s=wait_s, timeout_s=timeout_s)
        with lease:
            life = lease._life
            if life is None:
                return 0
            checksums = lease.checksums() if verify else None
            copied = copy_out(self.core.copy_threads, life.memory, layout, lease.places, targets, checksums)
            if copied < len(lease):
                self.core.counters["corrupt"] += 1
            current = life.memory.current(lease.places[:copied])
            if life.transport.closed or not current.all():
                self.core.counters["changed"] += 1
                return 0 if life.transport.closed else int(current.argmin())
            return copied

    def start_loading(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[int]:
        """Ask the daemon to bring the leading run into RAM. Returns how many blocks are to be loaded."""
        flat = _flat(keys)
        wait_ms = int(1000 * (self.core.timeout_s if timeout_s is None else timeout_s))
        reply = yield from self._call(lambda handle: wire.Prefetch(handle, group, flat, wait_ms), timeout_s)
        return reply.loading

    # --- writing ----------------------------------------------------------------------------------------------------

    def _run(
        self, keys: Sequence[bytes], token_ids: TokenIds, parent: bytes | None, start_block: int, group: int
    ) -> Run:
        layout = self.layout(group)
        words = token_words(token_ids)
        if len(words) < len(keys) * layout.block_tokens:
            raise ValueError(f"{len(keys)} blocks have {len(keys) * layout.block_tokens} tokens, not {len(words)}")
        if start_block and (parent is None or len(words) >= (len(keys) + 1) * layout.block_tokens):
            # Tokens of other blocks in a header would make every later reader doubt the block.
            raise ValueError("from start_block on, give the parent's key and the tokens of these blocks only")
        return Run(self.id, layout, keys, parent, start_block, words[: len(keys) * layout.block_tokens].tobytes())

    def _prepare_places(self, life: Life, reply: wire.AllocateReply, deadline_s: float) -> Op[npt.NDArray[np.void]]:
        """Map the places of an allocation for writing."""
        self.core.drop_retired(life, reply.retired)
        places = read_places(reply.locations)
        if len(places):
            writable = places[np.frombuffer(reply.statuses, np.uint8) == SlotStatus.WRITABLE]
            if (yield from self.core.map_extents(life, writable, deadline_s)) < len(writable):
                raise DaemonUnavailable("the daemon gave places that it does not share")
            if not life.memory.read_only:
                life.memory.map(writable, writable=True)
        return places

    def reserve(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Op[tuple[Life, wire.AllocateReply, Run]]:
        """Places for blocks that the caller fills itself."""
        run = self._run(keys, token_ids, parent, start_block, group)
        deadline_s = self.core.deadline(timeout_s)
        if self.core.remote:
            raise PermissionError("over TCP no memory is shared: use put, which sends the blocks")
        life, handle = yield from self._live(deadline_s)
        if life.memory.read_only:
            raise PermissionError("this trust domain is read-only for its clients: use put, which writes by the socket")
        reply: wire.AllocateReply = yield Sent(
            life.transport, _ask_places(life, handle, run, group, deadline_s), deadline_s
        )
        try:
            yield from self._prepare_places(life, reply, deadline_s)
        except BaseException:
            if reply.allocation and not life.transport.closed:
                life.transport.start(wire.Abort(reply.allocation)).abandoned = True
            raise
        return life, reply, run

    def store(
        self,
        keys: Sequence[bytes],
        token_ids: TokenIds,
        payloads: Sequence[Buffer],
        parent: bytes | None = None,
        start_block: int = 0,
        group: int = 0,
        *,
        timeout_s: float | None = None,
    ) -> Op[PutResult]:
        """Store a run of blocks: one copy into shared memory, checksummed while warm.

        Args:
            payloads: one buffer of layout.payload_bytes for each key.
            parent: key of the block before the first (None at the root); start_block: index of the first block.
        """
        run = self._run(keys, token_ids, parent, start_block, group)
        if len(payloads) != len(keys):
            raise ValueError(f"{len(keys)} keys need as many payloads, not {len(payloads)}")
        for payload in payloads:
            size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
            if size != run.layout.payload_bytes:
                raise ValueError(f"a payload of this namespace has {run.layout.payload_bytes} bytes, not {size}")
        deadline_s = self.core.deadline(timeout_s)
        if self.core.remote:
            return (yield from remote.store(self, run, payloads, group, deadline_s))
        life, handle = yield from self._live(deadline_s)
        # Each chunk's places are asked for while those before it are copied; none is more than the daemon answers at once.
        pieces = growing_pieces(
            len(keys),
            run.layout.object_bytes,
            first_bytes=_FIRST_CHUNK_BYTES,
            most_bytes=_CHUNK_BYTES,
            most_objects=_CHUNK_OBJECTS,
        )
        chunks = [(start, run.part(start, end)) for start, end in pieces]
        asked: list[Pending] = []
        commits: list[Pending] = []
        statuses: list[bytes] = []
        life.hold()
        unfinished: dict[int, wire.AllocateReply] = {}
        try:
            for number, (start, chunk) in enumerate(chunks):
                # The next chunks' places are asked for before this one is copied: making room costs no waiting.
                while len(asked) < min(number + _ASKED_AHEAD, len(chunks)):
                    asked.append(_ask_places(life, handle, chunks[len(asked)][1], group, deadline_s))
                reply: wire.AllocateReply = yield Sent(life.transport, asked[number], deadline_s)
                statuses.append(reply.statuses)
                if not reply.allocation:
                    continue
                unfinished[reply.allocation] = reply
                places = yield from self._prepare_places(life, reply, deadline_s)
                written = reply.statuses.translate(_WRITTEN)
                writable = np.flatnonzero(np.frombuffer(written, np.uint8)).tolist()
                if life.memory.read_only:
                    yield from self._write_by_socket(life, reply, chunk, writable, payloads, start, deadline_s)
                else:
                    positions = np.array(writable, np.int64)
                    sources = [payloads[start + i] for i in writable]
                    headers = chunk.headers()[positions]
                    copy_in(self.core.copy_threads, life.memory, chunk.layout, places[positions], sources, headers)
                commits.append(life.transport.start(wire.Commit(reply.allocation, written), deadline_s))
                del unfinished[reply.allocation]
            stored = 0
            for commit in commits:
                done: wire.Done = yield Sent(life.transport, commit, deadline_s)
                stored += done.count
        finally:
            for pending in asked[len(statuses) :]:
                pending.abandoned = True
                if pending.done and pending.error is None and pending.reply.allocation:
                    unfinished[pending.reply.allocation] = pending.reply
            for allocation in unfinished:
                if not life.transport.closed:
                    life.transport.start(wire.Abort(allocation)).abandoned = True
            self.core.let_go(life)
        return tally(b"".join(statuses), stored)

    def _write_by_socket(
        self,
        life: Life,
        reply: wire.AllocateReply,
        chunk: Run,
        writable: Sequence[int],
        payloads: Sequence[Buffer],
        start: int,
        deadline_s: float,
    ) -> Op[None]:
        """For read-only domains: the daemon copies what this client may not map writable."""
        checksums = [chunk.layout.part_checksums(payloads[start + i]) for i in writable]
        created_ns = time.time_ns()
        for i, sums in zip(writable, checksums, strict=True):
            header = bytearray(chunk.layout.header_bytes)
            chunk.header_into(header, i, sums, created_ns)
            data = bytes(header) + bytes(payloads[start + i])
            for at in range(0, len(data), _WRITE_BYTES):
                request = wire.Write(reply.allocation, i, at, data[at : at + _WRITE_BYTES])
                yield Sent(life.transport, life.transport.start(request, deadline_s), deadline_s)

    # --- keeping, forgetting, telling ---------------------------------------------------------------------------------

    def keep(
        self, keys: Sequence[bytes], group: int = 0, *, for_s: float | None = None, timeout_s: float | None = None
    ) -> Op[int]:
        """Keep blocks in RAM until `unpin`, once for each call. Returns how many of the keys are there.

        for_s: seconds after which the pin ends by itself (then don't `unpin` it).
        """
        flat, for_ms = _flat(keys), 0 if for_s is None else _milliseconds(for_s)
        return (yield from self._call(lambda handle: wire.Pin(handle, group, flat, for_ms), timeout_s)).count

    def end_after(
        self, keys: Sequence[bytes], seconds: float, group: int = 0, *, timeout_s: float | None = None
    ) -> Op[int]:
        """Have blocks forgotten on all tiers, `seconds` from now, as long as this daemon lives. Returns how many keys."""
        flat, after_ms = _flat(keys), _milliseconds(seconds)
        return (yield from self._call(lambda handle: wire.Expire(handle, group, flat, after_ms), timeout_s)).count

    def unkeep(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[int]:
        """Undo one `pin`. Returns how many of the keys were pinned."""
        flat = _flat(keys)
        return (yield from self._call(lambda handle: wire.Unpin(handle, group, flat), timeout_s)).count

    def make_durable(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[FlushResult]:
        """Wait until the blocks are in a tier below RAM."""
        flat = _flat(keys)
        wait_ms = int(1000 * (self.core.timeout_s if timeout_s is None else timeout_s))
        reply = yield from self._call(lambda handle: wire.Flush(handle, group, flat, wait_ms), timeout_s)
        return FlushResult(reply.durable, reply.missing, reply.failed)

    def forget(self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None) -> Op[int]:
        """Delete blocks on all tiers. Returns how many were found."""
        flat = _flat(keys)
        return (yield from self._call(lambda handle: wire.Delete(handle, group, flat), timeout_s)).count

    def ask_why(
        self, keys: Sequence[bytes], group: int = 0, *, timeout_s: float | None = None
    ) -> Op[list[dict[str, Any]]]:
        """For each key: which tiers hold the block, or why none does."""
        flat = _flat(keys)
        return (yield from self._call(lambda handle: wire.Explain(handle, group, flat), timeout_s)).blocks

    def tell(self, kind: str, /, *, timeout_s: float | None = None, **values: float) -> Op[None]:
        """Report numbers the engine measured, e.g. tell("load", bytes=..., seconds=...)."""
        deadline_s = self.core.deadline(timeout_s)
        life = yield from self.core.live(deadline_s)
        yield Sent(life.transport, life.transport.start(wire.Report(kind, values), deadline_s), deadline_s)


def _words_of(token_ids: TokenIds | None, count: int, layout: ObjectLayout) -> npt.NDArray[np.uint32] | None:
    """Tokens of `count` blocks. Raises: ValueError: there are fewer."""
    words = token_words(token_ids) if token_ids is not None else None
    if words is not None and len(words) < count * layout.block_tokens:
        raise ValueError(f"{count} blocks have {count * layout.block_tokens} tokens, not {len(words)}")
    return words


def _milliseconds(seconds: float) -> int:
    """Raises: ValueError: no time at all, or less, or more than some thirty years."""
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(f"a time is more than 0 and at most {_LONGEST_S:,} seconds, not {seconds}")
    return max(1, round(1000 * seconds))


def _flat(keys: Sequence[bytes]) -> bytes:
    """Keys as they travel. Raises: ValueError: one is not a key."""
    flat = b"".join(keys)
    if len(flat) != KEY_BYTES * len(keys):
        raise ValueError(f"a key has {KEY_BYTES} bytes: make keys with `keys(token_ids)`")
    return flat


def _ask_places(life: Life, handle: int, run: Run, group: int, deadline_s: float) -> Pending:
    return life.transport.start(wire.Allocate(handle, group, _flat(run.keys), run.parent or b""), deadline_s)
