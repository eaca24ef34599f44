"""Objects: what a header says comes back, and any damage or mix-up is named."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.identity import GroupSpec, NamespaceFacts
from forebay.kvstore.keys import block_keys, token_words
from forebay.kvstore.objects import HEADER_DTYPE, XXH3_OFFSET, Header, ObjectLayout

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "keys.json").read_text())["headers"]

FACTS = NamespaceFacts(
    weights_digest=b"w" * 32,
    weight_format="bf16",
    compute_dtype="bf16",
    kv_dtype="bf16",
    producer="transformers/sdpa",
    block_tokens=3,  # odd, so that the gap before the checksums is there
    layers=5,
    kv_heads=2,
    head_dim=4,
    rope=b"base=10000",
    groups=(GroupSpec("full", layer_ranges=2), GroupSpec("state", payload_bytes=40)),
)
LAYOUT = ObjectLayout.of(FACTS)
NAMESPACE = bytes(range(16))
TOKENS = [5, 2**32 - 1, 0]
KEY = block_keys(NAMESPACE, TOKENS, 3)[0]
PARENT = bytes(range(100, 116))

layouts = st.builds(
    ObjectLayout,
    group=st.integers(0, 3),
    block_tokens=st.sampled_from([1, 2, 3, 16, 64]),
    part_bytes=st.lists(st.integers(1, 300), min_size=1, max_size=9).map(tuple),
)
u64 = st.integers(0, 2**64 - 1)
ids = st.binary(min_size=16, max_size=16)


def an_object(layout: ObjectLayout = LAYOUT, *, sealed: bool = True, **change: Any) -> bytearray:
    blob = bytearray(layout.object_bytes)
    payload = memoryview(blob)[layout.header_bytes :]
    payload[:] = bytes(index * index % 251 for index in range(layout.payload_bytes))
    fields: dict[str, Any] = {
        "key": KEY,
        "parent": PARENT,
        "namespace": NAMESPACE,
        "position": 30,
        "token_ids": TOKENS,
        "checksums": layout.part_checksums(payload),
        "created_ns": 1_700_000_000_000_000_000,
    }
    layout.write_header(blob, **{**fields, **change})
    if sealed:
        layout.seal_header(blob)
    return blob


def verify(blob: bytes | bytearray | memoryview, layout: ObjectLayout = LAYOUT, **change: Any) -> str | None:
    expected: dict[str, Any] = {"key": KEY, "namespace": NAMESPACE, "token_ids": TOKENS}
    return layout.verify_object(blob, **{**expected, **change})


# --- layout --------------------------------------------------------------------------------------------------------


@given(layouts)
def test_parts_tile_the_payload_and_the_header_ends_on_a_cache_line(layout: ObjectLayout) -> None:
    position = 0
    for (start, end), size in zip(layout.part_ranges, layout.part_bytes, strict=True):
        assert start == position and end - start == size
        position = end
    assert position == layout.payload_bytes == layout.object_bytes - layout.header_bytes
    assert layout.header_bytes % 64 == 0 and layout.checksums_offset % 8 == 0
    assert layout.tokens_offset + 4 * layout.block_tokens <= layout.checksums_offset
    assert 0 <= layout.header_bytes - layout.checksums_offset - 8 * len(layout.part_bytes) < 64


def test_a_layout_follows_from_the_facts() -> None:
    layer = 2 * 3 * 1 * 4 * 2  # k and v, tokens, one head, head_dim, bf16
    assert LAYOUT.part_bytes == (3 * layer, 2 * layer) * 2
    assert LAYOUT.payload_bytes == 5 * 2 * 3 * 2 * 4 * 2
    assert ObjectLayout.of(FACTS, 1).part_bytes == (40,)
    assert ObjectLayout.of(FACTS) == LAYOUT != ObjectLayout.of(FACTS, 1)


@pytest.mark.parametrize("group", [-1, 2])
def test_a_group_that_is_not_declared_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match="declares 2"):
        ObjectLayout.of(FACTS, group)


def test_the_fixed_fields_lie_where_the_format_says() -> None:
    offsets = {name: HEADER_DTYPE.fields[name][1] for name in HEADER_DTYPE.names or ()} if HEADER_DTYPE.fields else {}
    assert HEADER_DTYPE.itemsize == 96 == LAYOUT.tokens_offset
    assert offsets == {
        "magic": 0,
        "version": 4,
        "group": 6,
        "part_count": 8,
        "token_count": 12,
        "key": 16,
        "parent": 32,
        "namespace": 48,
        "position": 64,
        "created_ns": 72,
        "encryption_key_id": 80,
        "header_xxh3": 88,
    }
    assert XXH3_OFFSET == 88


# --- headers -------------------------------------------------------------------------------------------------------


@given(layouts, ids, ids, ids, u64, u64, st.data())
def test_a_header_survives_the_round_trip(
    layout: ObjectLayout,
    key: bytes,
    parent: bytes,
    namespace: bytes,
    position: int,
    created_ns: int,
    data: st.DataObject,
) -> None:
    tokens = st.integers(0, 2**32 - 1)
    token_ids = data.draw(st.lists(tokens, min_size=layout.block_tokens, max_size=layout.block_tokens))
    parts = len(layout.part_bytes)
    checksums = data.draw(st.lists(u64, min_size=parts, max_size=parts))
    view = bytearray(b"\xaa" * (layout.header_bytes + 7))  # old bytes: padding must not keep them
    layout.write_header(
        view,
        key=key,
        parent=parent,
        namespace=namespace,
        position=position,
        token_ids=token_ids,
        checksums=checksums,
        created_ns=created_ns,
    )
    assert view[layout.header_bytes :] == b"\xaa" * 7
    assert layout.read_header(view) == Header(
        group=layout.group,
        key=key,
        parent=parent,
        namespace=namespace,
        position=position,
        created_ns=created_ns,
        encryption_key_id=0,
        header_xxh3=0,
        token_ids=tuple(token_ids),
        checksums=tuple(checksums),
    )
    row = np.frombuffer(view, HEADER_DTYPE, count=1)[0]
    assert row["key"].tobytes() == key and row["parent"].tobytes() == parent
    assert row["namespace"].tobytes() == namespace and row["position"] == position
    assert (row["part_count"], row["token_count"], row["group"]) == (parts, layout.block_tokens, layout.group)
    assert row.tobytes()[:16] == layout.prefix


@pytest.mark.parametrize("vector", VECTORS)
def test_golden_headers_follow_from_the_written_format(vector: dict[str, Any]) -> None:
    payload = bytes(i * i % 251 for i in range(sum(vector["part_bytes"])))
    checksums, at = [], 0
    for size in vector["part_bytes"]:
        checksums.append(xxhash.xxh3_64(payload[at : at + size]).intdigest())
        at += size
    tokens = vector["token_ids"]

    def header(xxh3: int) -> bytes:
        raw = struct.pack("<4sHHII", b"FBO1", 1, vector["group"], len(checksums), len(tokens))
        raw += bytes.fromhex(vector["key"]) + bytes.fromhex(vector["parent"]) + bytes.fromhex(vector["namespace_id"])
        raw += struct.pack("<QQQQ", vector["position"], vector["created_ns"], 0, xxh3)
        raw += struct.pack(f"<{len(tokens)}I", *tokens)
        raw += bytes(-len(raw) % 8)
        raw += struct.pack(f"<{len(checksums)}Q", *checksums)
        return raw + bytes(-len(raw) % 64)

    assert header(0).hex() == vector["unsealed"]
    assert header(xxhash.xxh3_64(header(0)).intdigest()).hex() == vector["sealed"]


@pytest.mark.parametrize("vector", VECTORS)
def test_forebay_gives_the_golden_headers(vector: dict[str, Any]) -> None:
    layout = ObjectLayout(vector["group"], len(vector["token_ids"]), tuple(vector["part_bytes"]))
    payload = bytes(i * i % 251 for i in range(layout.payload_bytes))
    view = bytearray(layout.header_bytes)
    layout.write_header(
        view,
        key=bytes.fromhex(vector["key"]),
        parent=bytes.fromhex(vector["parent"]),
        namespace=bytes.fromhex(vector["namespace_id"]),
        position=vector["position"],
        token_ids=vector["token_ids"],
        checksums=layout.part_checksums(payload),
        created_ns=vector["created_ns"],
    )
    assert view.hex() == vector["unsealed"]
    layout.seal_header(view)
    assert view.hex() == vector["sealed"]


@given(layouts, st.integers(0, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_headers_written_together_equal_headers_written_one_by_one(
    layout: ObjectLayout, count: int, first: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, 2**32, count * layout.block_tokens)
    keys = block_keys(NAMESPACE, token_ids, layout.block_tokens)
    checksums = rng.integers(0, 2**64, (count, len(layout.part_bytes)), dtype=np.uint64)
    parent = None if first else PARENT
    slots = np.full((count, layout.header_bytes + 64), 0xAA, np.uint8)  # rows apart, as slots in memory are
    layout.write_headers(
        slots[:, : layout.header_bytes],
        keys=keys,
        parent=parent,
        namespace=NAMESPACE,
        position=1000,
        token_ids=token_ids,
        checksums=checksums,
        created_ns=77,
    )
    raw = token_words(token_ids).tobytes()
    stride = 4 * layout.block_tokens
    for index, key in enumerate(keys):
        view = bytearray(layout.header_bytes)
        layout.write_header(
            view,
            key=key,
            parent=parent,
            namespace=NAMESPACE,
            position=1000 + index * layout.block_tokens,
            token_ids=raw[index * stride : (index + 1) * stride],
            checksums=checksums[index].tolist(),
            created_ns=77,
        )
        assert slots[index, : layout.header_bytes].tobytes() == view
        assert (slots[index, layout.header_bytes :] == 0xAA).all()
        parent = key


def test_the_parent_of_the_first_block_is_the_namespace() -> None:
    assert LAYOUT.read_header(an_object(parent=None)).parent == NAMESPACE


def test_token_ids_stay_out_of_a_headers_repr() -> None:
    blob = an_object(token_ids=[987654321, 1, 2])
    assert "987654321" not in repr(LAYOUT.read_header(blob))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"key": b"short"}, "16 bytes each"),
        ({"parent": b""}, "16 bytes each"),
        ({"namespace": bytes(17)}, "16 bytes each"),
        ({"token_ids": [1, 2]}, "3 tokens, not 2"),
        ({"token_ids": [1, 2, 3, 4]}, "3 tokens, not 4"),
        ({"token_ids": [1, 2, -3]}, "token ids"),
        ({"token_ids": bytes(11)}, "3 tokens, not 2.75"),
        ({"checksums": [1, 2, 3]}, "4 parts"),
        ({"checksums": [1, 2, 3, 2**64]}, "4 parts"),
        ({"position": -1}, "header"),
        ({"created_ns": 2**64}, "header"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        an_object(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"out": np.zeros((2, LAYOUT.header_bytes - 1), np.uint8)},
        {"out": np.zeros((1, LAYOUT.header_bytes), np.uint8)},
        {"out": np.zeros((2, LAYOUT.header_bytes), np.int8)},
        {"keys": [KEY, b"short"]},
        {"parent": b""},
        {"namespace": b""},
        {"token_ids": [1, 2, 3]},
        {"checksums": np.zeros((2, 3), np.uint64)},
        {"checksums": np.zeros((2, 4), np.float64)},
        {"position": -1},
        {"created_ns": -1},
    ],
)
def test_headers_that_do_not_fit_are_refused_before_anything_is_written(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "out": np.zeros((2, LAYOUT.header_bytes), np.uint8),
        "keys": [KEY, KEY],
        "parent": None,
        "namespace": NAMESPACE,
        "position": 0,
        "token_ids": [1, 2, 3, 4, 5, 6],
        "checksums": np.zeros((2, 4), np.uint64),
        "created_ns": 1,
        **change,
    }
    with pytest.raises(ValueError):
        LAYOUT.write_headers(**arguments)
    assert not arguments["out"].any()


@given(st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_are_a_value_error_or_a_header_that_writes_back(noise: bytes, prefixed: bool) -> None:
    blob = (LAYOUT.prefix + noise) if prefixed else noise
    try:
        header = LAYOUT.read_header(blob)
    except ValueError:
        return
    assert prefixed and header.key == blob[16:32] and len(header.token_ids) == 3


def test_a_header_cut_short_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=f"{LAYOUT.header_bytes} bytes, not"):
        LAYOUT.read_header(an_object()[: LAYOUT.header_bytes - 1])


# --- checks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [True, False])
def test_a_good_object_verifies_in_any_kind_of_buffer(sealed: bool) -> None:
    blob = an_object(sealed=sealed)
    for view in (blob, bytes(blob), memoryview(blob), memoryview(bytes(blob))):
        assert verify(view) is None
        assert verify(view, token_ids=None) is None
        assert verify(view, token_ids=np.array(TOKENS)) is None
        assert verify(view, token_ids=struct.pack("<3I", *TOKENS)) is None


def test_sealing_twice_changes_nothing_more() -> None:
    blob = an_object(sealed=True)
    once = bytes(blob)
    LAYOUT.seal_header(blob)
    assert blob == once and LAYOUT.read_header(blob).header_xxh3 != 0


def test_an_unsealed_object_is_refused_where_sealed_ones_are_due() -> None:
    assert verify(an_object(sealed=False), sealed=True) == "header checksum"
    assert verify(an_object(sealed=True), sealed=True) is None


@pytest.mark.parametrize("group", [0, 1])
def test_any_changed_byte_of_a_sealed_object_is_reported(group: int) -> None:
    layout = ObjectLayout.of(FACTS, group)
    blob = an_object(layout)
    assert verify(blob, layout) is None
    for at in range(len(blob)):
        for flip in (*(1 << bit for bit in range(8)), 0xFF):
            blob[at] ^= flip
            # Not even the tokens are known here, as when a whole tier is scrubbed.
            assert verify(blob, layout, token_ids=None) is not None, f"byte {at} ^ {flip:#x} went unseen"
            blob[at] ^= flip
    assert verify(blob, layout) is None


def test_a_changed_payload_byte_names_its_part() -> None:
    for sealed in (True, False):
        blob = an_object(sealed=sealed)
        for part, (start, end) in enumerate(LAYOUT.part_ranges):
            for at in (LAYOUT.header_bytes + start, LAYOUT.header_bytes + end - 1):
                blob[at] ^= 1
                assert verify(blob) == f"part {part} checksum"
                blob[at] ^= 1


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        (0, "magic"),
        (3, "magic"),
        (4, "version"),
        (6, "layout"),  # group
        (8, "layout"),  # part count
        (12, "layout"),  # token count
        (16, "key"),
        (31, "key"),
        (32, "header checksum"),  # parent
        (48, "namespace"),
        (63, "namespace"),
        (64, "header checksum"),  # position
        (72, "header checksum"),  # created_ns
        (80, "encryption key"),
        (88, "header checksum"),
        (96, "tokens"),
        (107, "tokens"),
        (108, "header checksum"),  # gap before the checksums
        (112, "header checksum"),  # checksum of part 0
        (LAYOUT.header_bytes - 1, "header checksum"),  # padding
    ],
)
def test_a_changed_header_byte_names_what_it_belongs_to(offset: int, reason: str) -> None:
    blob = an_object()
    blob[offset] ^= 0x40
    assert verify(blob) == reason


@pytest.mark.parametrize(
    ("expected", "reason"),
    [
        ({"key": bytes(16)}, "key"),
        ({"key": NAMESPACE}, "key"),
        ({"namespace": bytes(16)}, "namespace"),
        ({"token_ids": [5, 2**32 - 1, 1]}, "tokens"),
        ({"token_ids": [5, 2**32 - 1]}, "tokens"),
        ({"token_ids": b""}, "tokens"),
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_good_object_in_the_wrong_place_is_named(expected: dict[str, Any], reason: str, sealed: bool) -> None:
    assert verify(an_object(sealed=sealed), **expected) == reason


def test_an_object_of_another_group_or_size_is_named() -> None:
    twin = ObjectLayout(1, LAYOUT.block_tokens, LAYOUT.part_bytes)
    assert verify(an_object(twin)) == "layout"
    assert verify(an_object()[:-1]) == "size"
    assert verify(an_object() + b"\0") == "size"
    assert verify(b"") == "size"
    assert verify(bytes(LAYOUT.object_bytes)) == "magic"


def test_payload_parts_in_the_wrong_order_are_reported() -> None:
    facts = replace(FACTS, groups=(GroupSpec("full"),))
    layout = ObjectLayout.of(facts)
    blob = an_object(layout)
    (start, middle), (_, end) = layout.part_ranges
    payload = bytes(blob[layout.header_bytes :])
    blob[layout.header_bytes :] = payload[middle:end] + payload[start:middle]
    assert verify(blob, layout) == "part 0 checksum"


@given(layouts, st.integers(0, 255))
def test_part_checksums_are_the_hash_of_each_part(layout: ObjectLayout, seed: int) -> None:
    payload = bytes((index * 31 + seed) % 256 for index in range(layout.payload_bytes))
    expected = [xxhash.xxh3_64_intdigest(payload[start:end]) for start, end in layout.part_ranges]
    assert layout.part_checksums(payload) == layout.part_checksums(memoryview(payload)) == expected


def test_part_checksums_take_arrays_of_any_item_size_and_refuse_other_lengths() -> None:
    payload = np.arange(LAYOUT.payload_bytes // 2, dtype=np.uint16)
    assert LAYOUT.part_checksums(payload.data) == LAYOUT.part_checksums(payload.tobytes())
    with pytest.raises(ValueError, match="a payload has"):
        LAYOUT.part_checksums(bytes(LAYOUT.payload_bytes + 1))
