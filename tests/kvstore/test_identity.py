"""Namespaces: one fact apart is another id, and no bytes decode to facts that did not encode to them."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore import identity
from forebay.kvstore.identity import (
    DTYPE_BYTES,
    PUBLIC_SECRET,
    GroupKind,
    GroupSpec,
    NamespaceFacts,
    layer_splits,
    namespace_id,
)

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "keys.json").read_text())["namespaces"]

FACTS = NamespaceFacts(
    weights_digest=b"w" * 32,
    weight_format="bf16",
    compute_dtype="bf16",
    kv_dtype="bf16",
    producer="transformers/sdpa",
    layers=6,
    kv_heads=4,
    head_dim=16,
    rope=b"base=10000",
    groups=(GroupSpec("full"), GroupSpec("window", window_tokens=100)),
)

CHANGES: list[tuple[str, Any]] = [
    ("schema_version", 2),
    ("weights_digest", b"v" * 32),
    ("weights_digest", b"w" * 31),
    ("weight_format", "q4_k_m"),
    ("compute_dtype", "fp16"),
    ("kv_dtype", "fp16"),
    ("kv_scale_format", "per_head"),
    ("producer", "vllm/flash"),
    ("block_tokens", 32),
    ("layers", 7),
    ("kv_heads", 8),
    ("head_dim", 32),
    ("latent_dims", (64,)),
    ("latent_dims", (32, 32)),
    ("rope", b"base=10001"),
    ("groups", (GroupSpec("full"),)),
    ("groups", (GroupSpec("window", window_tokens=100), GroupSpec("full"))),
    ("groups", (GroupSpec("full"), GroupSpec("window", window_tokens=101))),
    ("groups", (GroupSpec("full"), GroupSpec("draft"))),
    ("groups", (GroupSpec("full", head_groups=2), GroupSpec("window", window_tokens=100))),
    ("groups", (GroupSpec("full", layer_ranges=2), GroupSpec("window", window_tokens=100))),
    ("groups", (GroupSpec("full", payload_bytes=4096), GroupSpec("window", window_tokens=100))),
    ("lora_digest", b"x"),
    ("hash_algorithm", "sha256"),
    ("salt", b"x"),
]


def an_id(facts: NamespaceFacts = FACTS, tenant: str = "", secret: bytes = PUBLIC_SECRET) -> bytes:
    return namespace_id(facts, tenant=tenant, secret=secret)


def changed(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> NamespaceFacts:
    if name == "schema_version":  # this Forebay refuses to build facts of another version
        monkeypatch.setattr(identity, "SCHEMA_VERSION", value)
    return replace(FACTS, **{name: value})


# --- the written format, on its own -----------------------------------------------------------------------------------


def spec_fields(facts: dict[str, Any]) -> list[bytes]:
    def u64(number: int) -> bytes:
        return struct.pack("<Q", number)

    def group(spec: dict[str, Any]) -> bytes:
        numbers = [u64(spec[name]) for name in ("window_tokens", "payload_bytes", "head_groups", "layer_ranges")]
        body = spec_join([spec["kind"].encode(), *numbers])
        return struct.pack("<I", len(body)) + body

    return [
        u64(facts["schema_version"]),
        facts["weights_digest"],
        facts["weight_format"].encode(),
        facts["compute_dtype"].encode(),
        facts["kv_dtype"].encode(),
        facts["kv_scale_format"].encode(),
        facts["producer"].encode(),
        u64(facts["block_tokens"]),
        u64(facts["layers"]),
        u64(facts["kv_heads"]),
        u64(facts["head_dim"]),
        b"".join(u64(dim) for dim in facts["latent_dims"]),
        facts["rope"],
        b"".join(group(spec) for spec in facts["groups"]),
        facts["lora_digest"],
        facts["hash_algorithm"].encode(),
        facts["salt"],
    ]


def spec_join(bodies: list[bytes]) -> bytes:
    return b"".join(struct.pack("<BI", tag, len(body)) + body for tag, body in enumerate(bodies, 1))


# --- ids -----------------------------------------------------------------------------------------------------------


def test_the_changes_below_touch_every_fact() -> None:
    assert {name for name, _ in CHANGES} == {field.name for field in fields(NamespaceFacts)}


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_changing_one_fact_gives_another_id(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = an_id()
    facts = changed(monkeypatch, name, value)
    assert getattr(facts, name) != getattr(FACTS, name)
    assert an_id(facts) != before


def test_all_changes_give_different_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {an_id(), an_id(tenant="x"), an_id(secret=b"x" * 16)}
    for name, value in CHANGES:
        with monkeypatch.context() as patch:
            ids.add(an_id(changed(patch, name, value)))
    assert len(ids) == len(CHANGES) + 3  # so a LoRA digest "x", a salt "x" and a tenant "x" are three ids


def test_tenant_and_secret_each_change_the_id() -> None:
    assert len({an_id(), an_id(tenant="a"), an_id(secret=b"s" * 32), an_id(tenant="a", secret=b"s" * 32)}) == 4


def test_a_salt_cannot_imitate_a_tenant() -> None:
    tail = struct.pack("<BI", 255, 1) + b"a"
    assert an_id(replace(FACTS, salt=tail)) != an_id(tenant="a")
    assert an_id(replace(FACTS, salt=b"s"), tenant="t") != an_id(replace(FACTS, salt=b"st"), tenant="")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        an_id(secret=b"guessable")


def test_ids_do_not_depend_on_the_process() -> None:
    program = (
        "from forebay.kvstore.identity import *; import sys;"
        "facts = NamespaceFacts.decode(bytes.fromhex(sys.argv[1]));"
        "print(namespace_id(facts, tenant='t', secret=PUBLIC_SECRET).hex())"
    )
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", program, FACTS.encode().hex()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert out.stdout.strip() == an_id(tenant="t").hex()


# --- encoding ------------------------------------------------------------------------------------------------------


@st.composite
def group_specs(draw: st.DrawFn, kv_heads: int, layers: int, latent: bool) -> GroupSpec:
    kind: GroupKind = draw(st.sampled_from(get_args(GroupKind)))
    sized = kind in ("state", "media")
    return GroupSpec(
        kind,
        window_tokens=draw(st.integers(1, 2**32)) if kind == "window" else 0,
        payload_bytes=kv_heads * layers * draw(st.integers(1, 2**20)) if sized or draw(st.booleans()) else 0,
        head_groups=draw(st.sampled_from([0, 1] if latent and not sized else [0, 1, kv_heads])),
        layer_ranges=draw(st.sampled_from([1, layers])),
    )


@st.composite
def facts_sets(draw: st.DrawFn) -> NamespaceFacts:
    # Small alphabets, so that equal and nearly equal sets are common.
    text, raw = st.text("ab\0é", min_size=1, max_size=3), st.binary(max_size=3)
    kv_heads, layers = draw(st.sampled_from([1, 2, 6])), draw(st.sampled_from([1, 4]))
    latent_dims = tuple(draw(st.lists(st.integers(1, 65536), max_size=3)))
    return NamespaceFacts(
        weights_digest=draw(st.binary(min_size=1, max_size=3)),
        weight_format=draw(text),
        compute_dtype=draw(text),
        kv_dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        kv_scale_format=draw(text),
        producer=draw(text),
        block_tokens=draw(st.sampled_from([1, 64])),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 128])),
        latent_dims=latent_dims,
        rope=draw(raw),
        groups=tuple(draw(st.lists(group_specs(kv_heads, layers, bool(latent_dims)), min_size=1, max_size=3))),
        lora_digest=draw(raw),
        hash_algorithm=draw(st.sampled_from(["xxh3-128", "sha256"])),
        salt=draw(raw),
    )


@given(facts_sets())
def test_facts_survive_the_round_trip(facts: NamespaceFacts) -> None:
    assert NamespaceFacts.decode(facts.encode()) == facts


@given(facts_sets(), facts_sets(), st.data())
def test_no_two_sets_of_facts_encode_alike(one: NamespaceFacts, other: NamespaceFacts, data: st.DataObject) -> None:
    # The second set is the first with some text and bytes of another: neighbours trading bytes is the likely mistake.
    names = ["weight_format", "compute_dtype", "kv_scale_format", "producer", "rope", "lora_digest", "salt"]
    taken = data.draw(st.sets(st.sampled_from(names)))
    mixed = replace(one, **{name: getattr(other, name) for name in taken})
    assert (one.encode() == mixed.encode()) == (one == mixed)
    assert (one.encode() == other.encode()) == (one == other)


@given(facts_sets(), st.data())
def test_damaged_encodings_never_decode_to_the_same_facts(facts: NamespaceFacts, data: st.DataObject) -> None:
    good = facts.encode()
    at = data.draw(st.integers(0, len(good) - 1), label="at")
    patch = data.draw(st.binary(max_size=9), label="patch")
    cut = data.draw(st.integers(0, 9), label="cut")
    bad = good[:at] + patch + good[at + cut :]
    try:
        decoded = NamespaceFacts.decode(bad)
    except ValueError:
        assert bad != good
    else:
        assert decoded.encode() == bad
        assert (decoded == facts) == (bad == good)


@given(st.binary(max_size=200), st.booleans(), st.lists(st.binary(max_size=12), max_size=18))
def test_arbitrary_bytes_decode_or_are_a_value_error(noise: bytes, framed: bool, bodies: list[bytes]) -> None:
    if framed:  # right tags and lengths round random values reach deeper
        noise = b"".join(struct.pack("<BI", tag, len(body)) + body for tag, body in enumerate(bodies, 1)) + noise[:1]
    try:
        facts = NamespaceFacts.decode(b"FBNS" + noise)
    except ValueError:
        return
    assert facts.encode() == b"FBNS" + noise


@given(st.data())
def test_any_value_in_place_of_a_field_decodes_or_is_a_value_error(data: st.DataObject) -> None:
    body = data.draw(
        st.one_of(
            st.binary(max_size=80),
            st.integers(0, 2**64 - 1).map(lambda number: struct.pack("<Q", number)),
            st.lists(st.binary(max_size=60), max_size=3).map(
                lambda groups: b"".join(struct.pack("<I", len(body)) + body for body in groups)
            ),
        )
    )
    encoded = spec_swap(data.draw(st.sampled_from([field.name for field in fields(FACTS)])), body)
    try:
        assert NamespaceFacts.decode(encoded).encode() == encoded
    except ValueError:
        pass


def spec_swap(name: str, body: bytes) -> bytes:
    """FACTS encoded with these bytes as one field's value."""
    bodies = spec_fields(asdict(FACTS))
    bodies[[field.name for field in fields(FACTS)].index(name)] = body
    return b"FBNS" + spec_join(bodies)


GOOD = FACTS.encode()
GROUPS = spec_fields(asdict(replace(FACTS, groups=(GroupSpec("full"),))))[13]


@pytest.mark.parametrize(
    ("encoded", "says"),
    [
        (b"", "not an encoded namespace"),
        (b"FBNT" + GOOD[4:], "not an encoded namespace"),
        (GOOD + bytes(identity.MAX_ENCODED_BYTES), "not an encoded namespace"),
        (GOOD + b"\0", "bytes after its last field"),
        (GOOD[:-1], "ends before salt"),
        (GOOD[:4] + b"\x02" + GOOD[5:], "damaged at schema_version"),  # another tag
        (GOOD[:-5] + struct.pack("<BI", 17, 1), "damaged at salt"),  # longer than what follows
        (spec_swap("schema_version", struct.pack("<Q", 2)), "schema_version 2 is not known"),
        (spec_swap("layers", struct.pack("<QB", 6, 0)), "layers has an impossible length of 9 bytes"),
        (spec_swap("layers", b""), "layers has an impossible length of 0 bytes"),
        (spec_swap("latent_dims", bytes(9)), "latent_dims has an impossible length of 9 bytes"),
        (spec_swap("producer", b"\xff"), "utf-8"),
        (spec_swap("groups", GROUPS[:-1]), "damaged at layer_ranges"),
        (spec_swap("groups", b"\xff" + GROUPS[1:]), "not the canonical encoding"),  # a group longer than what follows
    ],
)
def test_decode_refuses_and_says_why(encoded: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NamespaceFacts.decode(encoded)


# --- vectors -----------------------------------------------------------------------------------------------------------


def from_json(shown: dict[str, Any]) -> dict[str, Any]:
    raw = ("weights_digest", "rope", "lora_digest", "salt")
    return {name: bytes.fromhex(value) if name in raw else value for name, value in shown.items()}


@pytest.mark.parametrize("vector", VECTORS)
def test_golden_vectors_follow_from_the_written_format(vector: dict[str, Any]) -> None:
    encoding = b"FBNS" + spec_join(spec_fields(from_json(vector["facts"])))
    assert encoding.hex() == vector["encoding"]
    tenant = vector["tenant"].encode()
    message = encoding + struct.pack("<BI", 255, len(tenant)) + tenant
    assert hmac.new(bytes.fromhex(vector["secret"]), message, hashlib.sha256).digest()[:16].hex() == vector["id"]


@pytest.mark.parametrize("vector", VECTORS)
def test_forebay_gives_the_golden_vectors(vector: dict[str, Any]) -> None:
    values = from_json(vector["facts"])
    values["latent_dims"] = tuple(values["latent_dims"])
    values["groups"] = tuple(GroupSpec(**spec) for spec in values["groups"])
    facts = NamespaceFacts(**values)
    assert facts.encode().hex() == vector["encoding"]
    assert NamespaceFacts.decode(bytes.fromhex(vector["encoding"])) == facts
    assert an_id(facts, vector["tenant"], bytes.fromhex(vector["secret"])).hex() == vector["id"]


# --- checks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 2}, "schema_version 2 is not known"),
        ({"weights_digest": b""}, "weights_digest is empty"),
        ({"producer": ""}, "producer is empty"),
        ({"kv_dtype": "fp12"}, "unknown kv_dtype 'fp12'.*bf16"),
        ({"hash_algorithm": "md5"}, "unknown hash_algorithm.*sha256"),
        ({"layers": 0}, "layers must be within 1"),
        ({"layers": 2**40}, "layers must be within"),
        ({"layers": True}, "layers must be int, not bool"),
        ({"layers": 6.0}, "layers must be int"),
        ({"block_tokens": -64}, "block_tokens must be within"),
        ({"salt": "text"}, "salt must be bytes"),
        ({"salt": bytes(70000)}, "pass digests"),
        ({"producer": "\ud800"}, "surrogates"),
        ({"latent_dims": [64]}, "latent_dims must be tuple"),
        ({"latent_dims": (0,)}, "latent_dims"),
        ({"latent_dims": (1.5,)}, "latent_dims must hold int"),
        ({"groups": ()}, "declare 1 to"),
        ({"groups": ("full",)}, "groups must hold GroupSpec"),
        ({"groups": (GroupSpec("full", head_groups=3),)}, "head_groups=3 must divide kv_heads=4"),
        ({"groups": (GroupSpec("full", layer_ranges=7),)}, "layer_ranges=7 is more than layers=6"),
        ({"groups": (GroupSpec("full", head_groups=2),), "latent_dims": (64,)}, "shared by all heads"),
        ({"groups": (GroupSpec("state", payload_bytes=10, head_groups=4),)}, "not a multiple of its 4 parts"),
        ({"kv_heads": 4096, "layers": 4096, "groups": (GroupSpec("full", layer_ranges=2),)}, "8192 parts"),
        ({"kv_heads": 4096, "layers": 4096, "head_dim": 65536, "block_tokens": 65536}, "check the geometry"),
    ],
)
def test_facts_that_make_no_sense_say_what_to_do(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(FACTS, **change)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "ring"}, "unknown group kind 'ring'"),
        ({"kind": "window"}, "'window' only"),
        ({"kind": "full", "window_tokens": 5}, "'window' only"),
        ({"kind": "state"}, "'state' needs payload_bytes"),
        ({"kind": "media"}, "'media' needs payload_bytes"),
        ({"kind": "full", "layer_ranges": 0}, "layer_ranges must be within 1"),
        ({"kind": "full", "head_groups": -1}, "head_groups must be within"),
    ],
)
def test_groups_that_make_no_sense_say_what_to_do(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        GroupSpec(**arguments)


# --- geometry ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_dtype", "itemsize"), sorted(DTYPE_BYTES.items()))
def test_a_block_has_keys_and_values_of_every_layer_head_and_token(kv_dtype: str, itemsize: int) -> None:
    parts = replace(FACTS, kv_dtype=kv_dtype).part_bytes()
    assert len(parts) == FACTS.kv_heads  # by default one a KV head, all layers
    assert sum(parts) == FACTS.layers * 2 * FACTS.block_tokens * FACTS.kv_heads * FACTS.head_dim * itemsize


def test_latents_are_one_head_group_without_a_factor_for_keys_and_values() -> None:
    facts = replace(FACTS, latent_dims=(512, 64), groups=(GroupSpec("full", layer_ranges=6),))
    assert facts.part_bytes() == (64 * (512 + 64) * 2,) * 6


def test_parts_go_by_head_group_and_then_by_layer_range() -> None:
    facts = replace(FACTS, layers=7, groups=(GroupSpec("full", head_groups=2, layer_ranges=3),))
    layer = 2 * 64 * 2 * 16 * 2  # k and v, tokens, heads of the group, head_dim, bf16
    assert facts.part_bytes() == (3 * layer, 2 * layer, 2 * layer) * 2


def test_an_explicit_payload_is_cut_into_equal_parts() -> None:
    facts = replace(FACTS, groups=(GroupSpec("state", payload_bytes=96, head_groups=3, layer_ranges=2),))
    assert facts.part_bytes() == (16,) * 6


@given(st.integers(1, 300), st.data())
def test_layers_are_split_in_order_and_as_evenly_as_possible(layers: int, data: st.DataObject) -> None:
    splits = layer_splits(layers, data.draw(st.integers(1, layers)))
    assert [layer for start, end in splits for layer in range(start, end)] == list(range(layers))
    sizes = [end - start for start, end in splits]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
