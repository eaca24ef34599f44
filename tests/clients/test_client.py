"""What every verb does, over the real socket and real shared memory, for both clients by the same cases."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from forebay.clients import PutResult, TierRun
from forebay.kvstore import errors
from forebay.kvstore.identity import GroupSpec
from tests.clients.conftest import Connect, shares_memory, where
from tests.daemon_process import DaemonProcess, facts_of, payload_of, tokens_of

BLOCKS = 12


class Prompt:
    """One made-up prompt in one namespace: tokens, keys and the payloads that belong to them."""

    def __init__(self, space: Any, seed: int, blocks: int = BLOCKS) -> None:
        self.tokens = tokens_of(seed, blocks, space.facts.block_tokens)
        self.keys = space.keys(self.tokens)
        self.size = space.layout().payload_bytes
        self.payloads = [payload_of(space.id, key, self.size) for key in self.keys]


@pytest.fixture
async def space(client: Any, request: pytest.FixtureRequest) -> Any:
    # A salt a test keeps one test's blocks out of the next one's way.
    return await client.open(facts_of(salt=request.node.name.encode()))


@pytest.fixture
def prompt(space: Any) -> Prompt:
    return Prompt(space, 1)


async def test_what_was_put_is_matched_and_read_back_byte_for_byte(space: Any, prompt: Prompt) -> None:
    assert (await space.match(prompt.keys)).blocks == 0
    assert await space.put(prompt.keys, prompt.tokens, prompt.payloads) == PutResult(stored=BLOCKS)
    match = await space.match(prompt.keys)
    assert match.runs == (TierRun("ram", BLOCKS),) and match.estimates["ram"].healthy
    one = bytearray(BLOCKS * prompt.size)
    assert await space.get_into(prompt.keys, one, prompt.tokens) == BLOCKS
    assert bytes(one) == b"".join(prompt.payloads)
    many = [bytearray(prompt.size) for _ in prompt.keys]
    assert await space.get_into(prompt.keys, many, verify=False) == BLOCKS
    assert many == prompt.payloads


async def test_putting_again_stores_nothing_and_changes_nothing(space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    other = [bytes(prompt.size)] * BLOCKS
    assert await space.put(prompt.keys, prompt.tokens, other) == PutResult(present=BLOCKS)
    out = bytearray(BLOCKS * prompt.size)
    assert await space.get_into(prompt.keys, out) == BLOCKS and bytes(out) == b"".join(prompt.payloads)


async def test_a_lease_reads_in_place_without_a_copy_and_only_while_it_is_held(space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    async with space.acquire(prompt.keys, prompt.tokens) as lease:
        assert len(lease) == BLOCKS and lease.tiers == ["ram"] * BLOCKS
        assert [bytes(view) for view in lease.views] == prompt.payloads
        assert lease.valid() and lease.verify() == BLOCKS
        view = lease.views[0]
        assert view.readonly
    with pytest.raises(ValueError):
        view[0]
    with pytest.raises(ValueError, match="released"):
        lease.views  # noqa: B018
    assert not lease.valid()


async def test_a_run_ends_at_the_first_block_that_is_not_there(space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys[:5], prompt.tokens, prompt.payloads[:5])
    await space.put(prompt.keys[7:], prompt.tokens[7 * 16 :], prompt.payloads[7:], parent=prompt.keys[6], start_block=7)
    async with space.acquire(prompt.keys) as lease:
        assert len(lease) == 5
    out = bytearray(BLOCKS * prompt.size)
    assert await space.get_into(prompt.keys, out) == 5
    async with space.acquire(prompt.keys[5:]) as lease:
        assert len(lease) == 0 and lease.views == []


async def test_other_tokens_than_those_stored_are_a_miss_whatever_the_key(space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    wrong = list(prompt.tokens)
    wrong[3 * 16] += 1  # as after a hash collision: the key is right, a token of block 3 is not
    async with space.acquire(prompt.keys, wrong) as lease:
        assert len(lease) == 3
    assert await space.get_into(prompt.keys, bytearray(BLOCKS * prompt.size), wrong) == 3


async def test_a_block_is_found_only_under_the_namespace_it_was_stored_in(
    client: Any, space: Any, prompt: Prompt
) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    other = await client.open(facts_of(salt=b"somebody else"))
    assert other.id != space.id and (await other.match(prompt.keys)).blocks == 0
    async with other.acquire(prompt.keys) as lease:
        assert len(lease) == 0
    assert await other.pin(prompt.keys) == await other.delete(prompt.keys) == 0
    assert (await space.match(prompt.keys)).blocks == BLOCKS


@shares_memory
async def test_an_allocation_is_filled_in_place_and_visible_only_after_its_commit(space: Any, prompt: Prompt) -> None:
    async with space.allocate(prompt.keys, prompt.tokens) as allocation:
        for slot in allocation.slots:
            slot.view[:] = prompt.payloads[slot.index]
        assert (await space.match(prompt.keys)).blocks == 0
        assert await space.put(prompt.keys, prompt.tokens, prompt.payloads) == PutResult(pending=BLOCKS)
        assert await allocation.commit() == PutResult(stored=BLOCKS)
    async with space.acquire(prompt.keys, prompt.tokens) as lease:
        assert [bytes(view) for view in lease.views] == prompt.payloads and lease.verify() == BLOCKS


@shares_memory
async def test_a_commit_of_some_slots_gives_the_others_back(space: Any, prompt: Prompt) -> None:
    async with space.allocate(prompt.keys, prompt.tokens) as allocation:
        for slot in allocation.slots[:4]:
            slot.view[:] = prompt.payloads[slot.index]
        assert await allocation.commit(range(4)) == PutResult(stored=4)
        with pytest.raises(ValueError, match="ended"):
            await allocation.commit()
    assert (await space.match(prompt.keys)).blocks == 4


@shares_memory
async def test_an_allocation_that_is_not_committed_leaves_nothing(
    daemon: DaemonProcess, space: Any, prompt: Prompt
) -> None:
    with pytest.raises(RuntimeError):
        async with space.allocate(prompt.keys, prompt.tokens) as allocation:
            allocation.slots[0].view[:] = prompt.payloads[0]
            raise RuntimeError("the engine failed")
    assert (await space.match(prompt.keys)).blocks == 0
    assert (await space.put(prompt.keys, prompt.tokens, prompt.payloads)).stored == BLOCKS


async def test_a_long_run_is_stored_leased_and_read_whole(space: Any) -> None:
    prompt = Prompt(space, 2, blocks=600)  # more than one chunk of every long verb
    assert (await space.put(prompt.keys, prompt.tokens, prompt.payloads)).stored == 600
    async with space.acquire(prompt.keys, prompt.tokens) as lease:
        assert len(lease) == 600 and all(view == want for view, want in zip(lease.views, prompt.payloads, strict=True))


async def test_pinned_blocks_outlive_traffic_that_evicts_all_others(space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    assert await space.pin(prompt.keys) == BLOCKS
    try:
        for seed in range(10, 14):
            flood = Prompt(space, seed, blocks=300)
            await space.put(flood.keys, flood.tokens, flood.payloads)
        assert (await space.match(prompt.keys)).blocks == BLOCKS
        assert await space.unpin(prompt.keys) == BLOCKS
        assert await space.unpin(prompt.keys) == 0
    finally:
        await space.delete(prompt.keys)


@pytest.mark.parametrize("seconds", [0, -1.0, 1e99, float("inf"), float("nan")])
async def test_a_pin_for_no_time_or_for_ever_is_refused(space: Any, prompt: Prompt, seconds: float) -> None:
    with pytest.raises(ValueError, match="more than 0 and at most"):
        await space.pin(prompt.keys, for_s=seconds)


async def test_a_key_named_twice_in_a_pin_counts_once(daemon: DaemonProcess, space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    twice = [prompt.keys[0], prompt.keys[0]]
    await space.pin(twice)
    await space.unpin(twice)
    assert (await space.explain(prompt.keys[:1]))[0]["pinned"] is False


@shares_memory
async def test_bytes_changed_after_their_commit_are_told_by_verify(client: Any, space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    async with space.acquire(prompt.keys) as lease:
        place = lease.places[4]
        extent = client._life.memory.extents[place["extent"].item()]
        at = place["offset"].item() + space.layout().header_bytes
        extent.writable_memory[at] ^= 1  # a stray write of another process of this trust domain
        assert lease.verify() == 4
    assert await space.get_into(prompt.keys, bytearray(BLOCKS * prompt.size)) == 4
    await space.delete(prompt.keys)


@shares_memory
async def test_deleted_blocks_are_gone_also_while_a_lease_still_reads_them(space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    async with space.acquire(prompt.keys) as lease:
        assert await space.delete(prompt.keys[4:]) == BLOCKS - 4
        assert (await space.match(prompt.keys)).blocks == 4
        assert not lease.valid()  # told at the next check, and yet no byte changes under the reader
        assert [bytes(view) for view in lease.views] == prompt.payloads
    assert (await space.explain(prompt.keys[4:5]))[0]["why"] == "deleted"


async def test_explain_says_where_a_block_is_or_why_not(space: Any, prompt: Prompt, door: str) -> None:
    await space.put(prompt.keys[:1], prompt.tokens, prompt.payloads[:1])
    async with space.acquire(prompt.keys[:1]):
        there, absent = await space.explain(prompt.keys[:2])
    assert there["tiers"] == ["ram"] and there["leases"] == (door == "unix") and there["pinned"] is False
    assert absent["tiers"] == [] and "never stored" in absent["why"]


async def test_flush_without_a_tier_below_says_that_nothing_is_durable(space: Any, prompt: Prompt) -> None:
    await space.put(prompt.keys[:3], prompt.tokens, prompt.payloads[:3])
    result = await space.flush(prompt.keys[:5])
    assert (result.durable, result.missing, result.failed) == (0, 2, 3)
    assert await space.prefetch(prompt.keys) == 0


async def test_reports_are_summed_and_stats_tell_them(client: Any, space: Any, door: str) -> None:
    await space.report("load", bytes=4096, seconds=0.5)
    stats = await client.stats()
    assert stats["reports"]["load" if door == "unix" else "load_over_network"]["reports_total"] >= 1
    with pytest.raises(errors.BadRequest, match="finite"):
        await space.report("load", bytes=-1)


async def test_groups_of_one_namespace_keep_their_own_objects(client: Any, request: pytest.FixtureRequest) -> None:
    groups = (GroupSpec("full"), GroupSpec("state", payload_bytes=4096))
    space = await client.open(facts_of(groups=groups, salt=request.node.name.encode()))
    prompt = Prompt(space, 3)
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    state = payload_of(b"state", prompt.keys[-1], 4096)
    last = prompt.tokens[-16:]
    parent, start = prompt.keys[-2], BLOCKS - 1
    stored = await space.put(prompt.keys[-1:], last, [state], parent=parent, start_block=start, group=1)
    assert stored == PutResult(stored=1)
    assert (await space.match(prompt.keys[:1], group=1)).blocks == 0
    out = bytearray(4096)
    assert await space.get_into(prompt.keys[-1:], out, last, group=1) == 1 and out == state
    with pytest.raises(ValueError, match="declares 2"):
        await space.acquire(prompt.keys, group=2)


async def test_callers_mistakes_are_value_errors_before_anything_is_sent(space: Any, prompt: Prompt) -> None:
    with pytest.raises(ValueError, match="as many payloads"):
        await space.put(prompt.keys, prompt.tokens, prompt.payloads[:-1])
    with pytest.raises(ValueError, match=f"{prompt.size} bytes"):
        await space.put(prompt.keys[:1], prompt.tokens, [b"short"])
    with pytest.raises(ValueError, match="tokens"):
        await space.put(prompt.keys, prompt.tokens[:-1], prompt.payloads)
    with pytest.raises(ValueError, match="buffer"):
        await space.get_into(prompt.keys, bytearray(prompt.size))
    with pytest.raises(ValueError, match="writable"):
        await space.get_into(prompt.keys[:1], [bytes(prompt.size)])


@shares_memory
async def test_a_commit_while_something_still_uses_a_slot_is_refused_and_can_be_repeated(
    space: Any, prompt: Prompt
) -> None:
    async with space.allocate(prompt.keys, prompt.tokens) as allocation:
        for slot in allocation.slots:
            slot.view[:] = prompt.payloads[slot.index]
        user = pickle.PickleBuffer(allocation.slots[2].view)
        with pytest.raises(BufferError):
            await allocation.commit()
        assert (await space.match(prompt.keys)).blocks == 0
        del user
        assert await allocation.commit() == PutResult(stored=BLOCKS)
    async with space.acquire(prompt.keys, prompt.tokens) as lease:
        assert lease.verify() == BLOCKS


async def test_two_clients_share_what_one_of_them_stored(
    connect: Connect, daemon: DaemonProcess, space: Any, prompt: Prompt, door: str
) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    address, options = where(daemon, door)
    second = await connect(address, **options)
    other = await second.open(space.facts)
    out = bytearray(BLOCKS * prompt.size)
    assert await other.get_into(prompt.keys, out, prompt.tokens) == BLOCKS and bytes(out) == b"".join(prompt.payloads)


@shares_memory
async def test_a_view_that_something_still_uses_keeps_its_lease(
    daemon: DaemonProcess, client: Any, space: Any, prompt: Prompt
) -> None:
    await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    lease = await space.acquire(prompt.keys)
    user = pickle.PickleBuffer(lease.views[1])
    with pytest.raises(BufferError):
        lease.release()
    assert (await client.stats())["sessions"]["leases"] == 1  # its bytes are kept, not reused
    assert bytes(user) == prompt.payloads[1]
    del user
    lease.release()
    assert (await client.stats())["sessions"]["leases"] == 0


async def test_a_closed_client_says_so(connect: Connect, daemon: DaemonProcess) -> None:
    client = await connect(daemon.socket)
    await client.close()
    await client.close()
    with pytest.raises(errors.ClientClosed):
        await client.stats()


async def test_nothing_listening_is_unavailable_not_a_hang(connect: Connect, tmp_path: Any) -> None:
    with pytest.raises(errors.DaemonUnavailable, match="forebay serve"):
        await connect(tmp_path / "none.sock")


async def test_what_came_by_one_door_is_found_by_the_other(
    connect: Connect, daemon: DaemonProcess, space: Any, prompt: Prompt, door: str
) -> None:
    local = await (await connect(daemon.socket)).open(space.facts)
    await local.put(prompt.keys[:5], prompt.tokens, prompt.payloads[:5])
    stored = await space.put(prompt.keys, prompt.tokens, prompt.payloads)
    assert stored == PutResult(stored=BLOCKS - 5, present=5)
    for reader in (local, space):
        async with reader.acquire(prompt.keys, prompt.tokens) as lease:
            assert [bytes(view) for view in lease.views] == prompt.payloads and lease.verify() == BLOCKS


@pytest.mark.parametrize("door", ["tcp", "tls"], indirect=True)
async def test_places_to_fill_are_refused_over_the_network(space: Any, prompt: Prompt) -> None:
    with pytest.raises(PermissionError, match="use put"):
        await space.allocate(prompt.keys, prompt.tokens)
