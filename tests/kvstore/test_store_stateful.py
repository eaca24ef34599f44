"""A store's random life against an oracle that may forget but never lie.

The oracle knows what was stored and not deleted since; any of it may be gone (evicted, lost, in a tier in trouble),
but a byte that comes back must be the right one, and what was deleted must never come back. "May forget" alone would
let a store pass that holds nothing, so there is a law of liveness, too: an object that was just stored and can't have
been evicted is found. The machine must fail on a tier that lies and on one that never has anything.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.kvstore.breaker import BreakerPolicy
from forebay.kvstore.channel import ChannelPolicy, TierChannel
from forebay.kvstore.errors import TierFull, TierTimeout
from forebay.kvstore.store import Store, StorePolicy
from forebay.kvstore.tier import ObjectKey, Tier, WritableBuffer
from forebay.tiers.memory import MemoryTier
from forebay.tiers.wrappers import Fault, Faulty
from tests.contract.tier_contract import NAMESPACE, SIZE, balanced, forge, key_of, reserved_bytes, seal, verify

T = TypeVar("T")

KEYS = 8  # more than two of the tiers together hold
BLOCKS = [key_of(index).block for index in range(KEYS)]
FIRST_ROOM, SECOND_ROOM = 3, 4

indexes = st.integers(0, KEYS - 1)


class StoreMachine(RuleBasedStateMachine):
    """Puts, reads, loads, flushes and deletes over a tiny memory tier, a faulty one and a small well one.

    Everything runs on the machine's own event loop; calls may be cancelled after any number of its steps.
    """

    first_tier: ClassVar[type[MemoryTier]] = MemoryTier
    lower_tier: ClassVar[type[MemoryTier]] = MemoryTier

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        policy=st.sampled_from(["clean_ahead", "write_through", "write_back", "off"]),
        trouble=st.sampled_from([0.0, 0.1, 0.3]),
    )
    def begin(self, seed: int, policy: Any, trouble: float) -> None:
        self.loop = asyncio.new_event_loop()
        self.stored: set[ObjectKey] = set()  # stored and not deleted since: may be found
        self.pins: list[Any] = []
        self.calm = trouble == 0.0 and policy != "off"  # nothing has gone wrong in a lower tier, and they are in use
        self.first = self.first_tier("first", FIRST_ROOM * SIZE)
        faults = (Fault.REFUSE, Fault.LOSE_ANSWER, Fault.HANG, Fault.FULL, Fault.FLIP_BIT, Fault.BREAK)
        self.faulty = Faulty(
            self.lower_tier("faulty", SECOND_ROOM * SIZE), seed=seed, rates=dict.fromkeys(faults, trouble / len(faults))
        )
        self.well = self.lower_tier("well", SECOND_ROOM * SIZE)
        quick = ChannelPolicy(settle_s=0.001, breaker=BreakerPolicy(probe_after_s=0.001, probe_max_s=0.002))
        self.run(self._build([self.faulty, self.well], quick, policy))

    async def _build(self, lower: list[Tier], channel: ChannelPolicy, policy: Any) -> None:
        self.channels = [TierChannel(each, policy=channel) for each in lower]
        limits = StorePolicy(write_policy=policy, retry_s=0.001, load_timeout_s=0.005, store_timeout_s=0.005)
        self.store = Store(self.first, self.channels, verify=verify, seal=seal, settings=limits)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    # --- rules ----------------------------------------------------------------------------------------------------

    @rule(some=st.lists(indexes, min_size=1, max_size=FIRST_ROOM))
    def put(self, some: list[int]) -> None:
        for index in some:
            self.put_one(index)

    def put_one(self, index: int) -> bool:
        key = key_of(index)
        self.stored.add(key)  # also when it fails: a lost answer may have been a success
        spilled = self.store.stats().get("put_spilled", 0)
        try:
            self.run(self.store.put(key, forge(key), BLOCKS[index - 1] if index else None, score=index, timeout_s=0.02))
        except TierFull:
            assert not self.could_evict(), "refused, although something could have been evicted"
            return False
        except TierTimeout:
            assert self.store.explain(key)["loading"], "refused as being written, although nobody writes it"
            return False
        found = self.run(self._read(key))
        # What had no room in the first tier went straight to a lower one, where trouble may lose it again.
        lost = self.store.stats().get("put_spilled", 0) > spilled and not self.calm
        assert found == forge(key) or (found is None and (lost or self.was_evicted(key))), (
            "an object just stored was not found"
        )
        return found is not None

    @rule(index=indexes)
    def get(self, index: int) -> None:
        self.check(key_of(index), self.run(self._read(key_of(index))))

    @precondition(lambda self: self.calm and all(channel.healthy for channel in self.channels))
    @rule(index=indexes)
    def flush_and_lose_memory(self, index: int) -> None:
        """The law of liveness for lower tiers: with nothing going wrong, what was flushed is found without memory."""
        if not self.put_one(index):
            return
        assert self.run(self.store.flush([key_of(index)], timeout_s=5.0)).durable == 1, "not found after a flush"
        self.evict({index})
        assert self.run(self._read(key_of(index), timeout_s=5.0)) == forge(key_of(index)), "flushed and not found"

    @rule(start=indexes, count=st.integers(1, KEYS))
    def load(self, start: int, count: int) -> None:
        blocks = BLOCKS[start : start + count]

        async def load_and_look() -> tuple[int, int]:
            loaded = await self.store.load(NAMESPACE, 0, blocks, SIZE, 0.02)
            return loaded, self.first.leading_run(NAMESPACE, 0, blocks)

        loaded, held = self.run(load_and_look())
        assert loaded <= held, "what load promised was not in the first tier"
        for index in range(start, start + loaded):
            out = bytearray(SIZE)
            assert self.run(self.first.get_into(key_of(index), out, timeout_s=1.0)) == SIZE
            self.check(key_of(index), bytes(out))

    @rule(start=indexes, timeout_s=st.sampled_from([0.0, 0.02]))
    def match(self, start: int, timeout_s: float) -> None:
        runs = self.run(self.store.match(NAMESPACE, 0, BLOCKS[start:], timeout_s=timeout_s))
        count = sum(run.blocks for run in runs)
        assert all(key_of(index) in self.stored for index in range(start, start + count)), "a run of unknown objects"
        assert all(one.tier != other.tier for one, other in itertools.pairwise(runs))

    @rule(some=st.sets(indexes, max_size=4))
    def flush(self, some: set[int]) -> None:
        keys = [key_of(index) for index in some]
        result = self.run(self.store.flush(keys, timeout_s=0.01))
        assert sum(result) == len(keys)

    @rule(some=st.sets(indexes, min_size=1, max_size=3))
    def demote(self, some: set[int]) -> None:
        self.run(self.store.demote([key_of(index) for index in some], timeout_s=0.01))

    @rule(some=st.sets(indexes, min_size=1, max_size=4))
    def delete(self, some: set[int]) -> None:
        keys = [key_of(index) for index in some]
        self.run(self.store.delete(keys, timeout_s=0.02))
        self.stored.difference_update(keys)
        for key in keys:
            assert self.run(self._read(key)) is None, "a deleted object came back"

    @rule(
        indexes=st.lists(indexes, min_size=1, max_size=4),
        verbs=st.lists(st.sampled_from(["put", "get", "load", "flush", "delete"]), min_size=2, max_size=4),
        steps=st.integers(0, 30),
        cancelled=st.sets(st.integers(0, 3)),
    )
    def many_at_once(self, indexes: list[int], verbs: list[str], steps: int, cancelled: set[int]) -> None:
        """Calls side by side, some of them cancelled after a number of steps of the loop."""

        async def call(verb: str, index: int) -> None:
            key = key_of(index)
            match verb:
                case "put":
                    self.stored.add(key)
                    await self.store.put(key, forge(key), timeout_s=0.02)
                case "get":
                    found = await self._read(key)
                    assert found in (None, forge(key)), f"{key} has wrong bytes"
                case "load":
                    await self.store.load(NAMESPACE, 0, BLOCKS[index:], SIZE, 0.01)
                case "flush":
                    await self.store.flush([key], timeout_s=0.01)
                case "delete":
                    await self.store.delete([key], timeout_s=0.02)

        async def all_of_them() -> None:
            calls = [
                asyncio.ensure_future(call(verb, indexes[position % len(indexes)]))
                for position, verb in enumerate(verbs)
            ]
            for _ in range(steps):
                await asyncio.sleep(0)
            for position in cancelled:
                if position < len(calls):
                    calls[position].cancel()
            for ended in await asyncio.gather(*calls, return_exceptions=True):
                assert ended is None or isinstance(ended, (asyncio.CancelledError, TierFull)), repr(ended)

        self.run(all_of_them())

    @precondition(lambda self: len(self.pins) < FIRST_ROOM - 1)
    @rule(index=indexes)
    def pin(self, index: int) -> None:
        loan = self.first.borrow(key_of(index))
        if loan is not None:
            self.pins.append((key_of(index), loan))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[1].release()

    @rule(down=st.booleans())
    def take_a_tier_down_or_up(self, down: bool) -> None:
        self.faulty.down = down
        self.calm = False

    @rule(byte=st.integers(0, SIZE - 1), which=st.booleans(), cold=st.booleans())
    def damage_a_medium(self, byte: int, which: bool, cold: bool) -> None:
        """All objects on one medium go bad; `cold`: and the first tier is empty when they are next wanted."""
        tier = self.well if which else self.faulty.inner
        assert isinstance(tier, MemoryTier)
        for damaged in tier._objects.values():
            damaged.data[byte] ^= 0x40
        self.calm = False
        if cold:
            self.evict(set(range(KEYS)))
            for index in range(KEYS):
                self.get(index)

    @rule(some=st.sets(indexes, min_size=1))
    def evict(self, some: set[int]) -> None:
        for index in some:
            self.run(self.first.delete(key_of(index)))

    @rule()
    def let_time_pass(self) -> None:
        self.run(asyncio.sleep(0.003))

    def could_evict(self) -> bool:
        return any(not held.borrowers for held in self.first._objects.values())

    def was_evicted(self, key: ObjectKey) -> bool:
        """Whether the first tier says that it evicted an object since it was last stored."""
        return False  # a memory tier throws out the newest last, and has room for a few

    # --- laws -----------------------------------------------------------------------------------------------------

    def check(self, key: ObjectKey, found: bytes | None) -> None:
        assert found is None or key in self.stored, f"{key} was never stored, or was deleted"
        assert found is None or found == forge(key), f"{key} has wrong bytes"

    async def _read(self, key: ObjectKey, timeout_s: float = 0.02) -> bytes | None:
        out = bytearray(SIZE)
        size = await self.store.get_into(key, out, timeout_s=timeout_s)
        return None if size is None else bytes(out[:size])

    @invariant()
    def pinned_objects_stay_as_they_are(self) -> None:
        if hasattr(self, "store"):
            assert all(loan.view == forge(key) for key, loan in self.pins), "a pinned object has wrong bytes"
            assert balanced(self.first) and balanced(self.well)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            for _, loan in self.pins:
                loan.release()
            self.run(self.store.aclose(0.02))
            for channel in self.channels:
                self.run(channel.aclose())
            self.run(asyncio.sleep(0.002))
            assert balanced(self.first) and not reserved_bytes(self.first), "something was never given back"
            assert self.store.stats()["background_errors"] == 0
            assert not asyncio.all_tasks(self.loop), "background work outlived the store"
        finally:
            self.loop.close()


def short(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None
    )


def test_a_store_may_forget_but_never_lies() -> None:
    run_state_machine_as_test(StoreMachine, settings=short(60))


@pytest.mark.slow
def test_a_store_may_forget_but_never_lies_for_long() -> None:
    run_state_machine_as_test(StoreMachine, settings=short(1000))


# --- the machine has teeth -------------------------------------------------------------------------------------------


class NeverHasAnything(MemoryTier):
    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        await super().get_into(key, out, timeout_s=timeout_s)
        return None


class LyingFirst(MemoryTier):
    """Returns another object's bytes."""

    async def get_into(self, key: ObjectKey, out: WritableBuffer, *, timeout_s: float) -> int | None:
        return await super().get_into(next(iter(self._objects), key), out, timeout_s=timeout_s)


class NeverForgets(MemoryTier):
    """Says that it deleted, and did not."""

    async def delete(self, key: ObjectKey) -> bool:
        self._check_open(key)
        return key in self._objects


class Leaks(MemoryTier):
    """Loses count of what was lent."""

    def borrow(self, key: ObjectKey) -> Any:
        loan = super().borrow(key)
        if loan is not None:
            loan.release = lambda: None  # type: ignore[method-assign]
        return loan


@pytest.mark.parametrize(
    "broken",
    [
        {"first_tier": NeverHasAnything},
        {"first_tier": LyingFirst},
        {"first_tier": NeverForgets},
        {"lower_tier": NeverForgets},
        {"lower_tier": NeverHasAnything},
        {"first_tier": Leaks},
    ],
    ids=lambda broken: "-".join(f"{where}-{tier.__name__}" for where, tier in broken.items()),
)
def test_the_machine_fails_on_a_tier_that_breaks_its_word(broken: dict[str, type[MemoryTier]]) -> None:
    machine = type("BrokenMachine", (StoreMachine,), broken)
    # Finding it is enough; making it small takes long and helps nobody here.
    found = settings(short(1000), phases=(Phase.generate,), print_blob=False, database=None)
    with pytest.raises(
        AssertionError, match=r"came back|not found|wrong bytes|never stored|given back|unknown objects"
    ):
        run_state_machine_as_test(machine, settings=found)


@pytest.mark.parametrize("check", ["none", "swapped"])
def test_the_machine_fails_on_a_store_that_does_not_verify(check: str) -> None:
    class Unverified(StoreMachine):
        async def _build(self, lower: list[Tier], channel: ChannelPolicy, policy: Any) -> None:
            await super()._build(lower, channel, policy)
            self.store._loader._verify = lambda key, view: None if check == "none" else verify(key_of(0), view)

    found = settings(short(1000), phases=(Phase.generate,), print_blob=False, database=None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Unverified, settings=found)
