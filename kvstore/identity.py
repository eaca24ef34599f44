"""Namespaces: every fact that changes what stored bytes mean, and the id made from them.

Covers the facts, their checks, their canonical encoding and the id. Leaves the bytes of an object to kvstore/objects.py
and the model's name to labels: a name is not identity. Always true: two different sets of facts never encode alike, and
`decode` accepts exactly what `encode` gives, so bytes from a peer are either a valid set of facts or a ValueError.

Encoding: `FBNS`, then for each field in the order of `_FACTS` a tag (u8, from 1), a length (u32le) and the value:
integers as u64le, text as UTF-8, bytes as they are, tuples of integers as that many u64le, groups as that many
(u32le length, fields of `_GROUP` in the same form).
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from forebay.kvstore.keys import HASH_ALGORITHMS, KEY_BYTES

GroupKind: TypeAlias = Literal["full", "window", "state", "draft", "media"]

SCHEMA_VERSION = 1

PUBLIC_SECRET = b"forebay: one tenant, public key."
"""The HMAC key where there is one tenant: known to all, so that nodes agree on ids without sharing a secret."""

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes an element, for each KV dtype."""

# Bounds on what a peer may declare, far above any known model: they keep every size computed from facts harmless.
MAX_ENCODED_BYTES = 64 * 1024
MAX_PARTS = 4096
MAX_GROUPS = 64
MAX_PAYLOAD_BYTES = 1 << 40
_BOUNDS = {
    "block_tokens": (1, 65536),
    "layers": (1, 4096),
    "kv_heads": (1, 4096),
    "head_dim": (1, 65536),
    "window_tokens": (0, 1 << 32),
    "payload_bytes": (0, MAX_PAYLOAD_BYTES),
    "head_groups": (0, MAX_PARTS),
    "layer_ranges": (1, MAX_PARTS),
}
_MAX_LATENT_DIMS = 64

_MAGIC = b"FBNS"
_TENANT_TAG = 255
_MIN_SECRET_BYTES = 16

# Field names and value types in the order of the encoding. A field's tag is its place here, so only append.
_GROUP = (
    ("kind", "str"),
    ("window_tokens", "int"),
    ("payload_bytes", "int"),
    ("head_groups", "int"),
    ("layer_ranges", "int"),
)
_FACTS = (
    ("schema_version", "int"),
    ("weights_digest", "bytes"),
    ("weight_format", "str"),
    ("compute_dtype", "str"),
    ("kv_dtype", "str"),
    ("kv_scale_format", "str"),
    ("producer", "str"),
    ("block_tokens", "int"),
    ("layers", "int"),
    ("kv_heads", "int"),
    ("head_dim", "int"),
    ("latent_dims", "ints"),
    ("rope", "bytes"),
    ("groups", "groups"),
    ("lora_digest", "bytes"),
    ("hash_algorithm", "str"),
    ("salt", "bytes"),
)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of objects: what a block has of one kind, and how its payload is cut into parts.

    kind: `full` attention KV or latents; `window` attention over the last `window_tokens`; recurrent `state` at block
        ends; `draft` model KV; `media` encodings.
    window_tokens: for `window` only.
    payload_bytes: bytes a block; 0 derives them from the namespace's geometry, which `state` and `media` cannot.
    head_groups: how many parts share the heads; 0 is one a KV head (one in all for latents, `state` and `media`).
    layer_ranges: how many parts share the layers.
    """

    kind: GroupKind
    window_tokens: int = 0
    payload_bytes: int = 0
    head_groups: int = 0
    layer_ranges: int = 1

    def __post_init__(self) -> None:
        _check_types(self, _GROUP)
        if self.kind not in ("full", "window", "state", "draft", "media"):
            raise ValueError(f"unknown group kind {self.kind!r}: use full, window, state, draft or media")
        if (self.kind == "window") != (self.window_tokens > 0):
            raise ValueError(f"group {self.kind!r} with window_tokens={self.window_tokens}: set it for 'window' only")
        if self.kind in ("state", "media") and not self.payload_bytes:
            raise ValueError(f"group {self.kind!r} needs payload_bytes: it does not follow from the attention geometry")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespaceFacts:
    """Every fact that changes what the stored bytes mean. The tenant is added by the server (`namespace_id`).

    weights_digest: digest of the weights' content. weight_format: as they run, such as "bf16" or "q4_k_m".
    compute_dtype: of activations. kv_dtype: a name in DTYPE_BYTES. kv_scale_format: how KV scales are kept.
    producer: engine and attention backend, such as "transformers/sdpa".
    latent_dims: widths of what an MLA layer keeps a token, such as (512, 64); empty for keys and values by head.
    rope: canonical bytes of the RoPE parameters, empty without RoPE. lora_digest: of the adapter's content, empty
    without one. salt: the caller's, to keep apart what would otherwise be shared.

    Raises:
        ValueError: a fact is missing, out of range, or does not fit another.
    """

    schema_version: int = SCHEMA_VERSION
    weights_digest: bytes
    weight_format: str
    compute_dtype: str
    kv_dtype: str
    kv_scale_format: str = "none"
    producer: str
    block_tokens: int = 64
    layers: int
    kv_heads: int
    head_dim: int
    latent_dims: tuple[int, ...] = ()
    rope: bytes
    groups: tuple[GroupSpec, ...] = field(default_factory=lambda: (GroupSpec("full"),))
    lora_digest: bytes = b""
    hash_algorithm: str = "xxh3-128"
    salt: bytes = b""

    def __post_init__(self) -> None:
        _check_types(self, _FACTS)
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"schema_version {self.schema_version} is not known here; this Forebay speaks {SCHEMA_VERSION}"
            )
        for name in ("weights_digest", "weight_format", "compute_dtype", "kv_scale_format", "producer"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: without it different bytes would share an id")
        if self.kv_dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown kv_dtype {self.kv_dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        if self.hash_algorithm not in HASH_ALGORITHMS:
            raise ValueError(
                f"unknown hash_algorithm {self.hash_algorithm!r}: use one of {', '.join(sorted(HASH_ALGORITHMS))}"
            )
        if len(self.latent_dims) > _MAX_LATENT_DIMS or not all(1 <= dim <= 65536 for dim in self.latent_dims):
            raise ValueError(f"latent_dims: at most {_MAX_LATENT_DIMS} widths of 1..65536 each")
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ValueError(f"groups: declare 1 to {MAX_GROUPS}, not {len(self.groups)}")
        if len(self.encode()) > MAX_ENCODED_BYTES:
            raise ValueError(f"facts encode to more than {MAX_ENCODED_BYTES} bytes: pass digests, not contents")
        for index in range(len(self.groups)):
            self.part_bytes(index)

    def part_bytes(self, group: int = 0) -> tuple[int, ...]:
        """Sizes of a block's parts in one group, in payload order: head group major, then layer range.

        Layers are shared out as evenly as whole layers go, the larger ranges first (7 layers in 3: 3, 2, 2). An
        explicit payload_bytes is cut into equal parts.
        """
        spec = self.groups[group]
        of_heads = spec.kind in ("full", "window", "draft") and not self.latent_dims
        head_groups = spec.head_groups or (self.kv_heads if of_heads else 1)
        parts = head_groups * spec.layer_ranges
        where = f"group {group} ({spec.kind})"
        if of_heads and self.kv_heads % head_groups:
            raise ValueError(f"{where}: head_groups={head_groups} must divide kv_heads={self.kv_heads}")
        if self.latent_dims and spec.kind in ("full", "window", "draft") and head_groups != 1:
            raise ValueError(f"{where}: latents are shared by all heads; leave head_groups at 0, not {head_groups}")
        if spec.layer_ranges > self.layers:
            raise ValueError(f"{where}: layer_ranges={spec.layer_ranges} is more than layers={self.layers}")
        if parts > MAX_PARTS:
            raise ValueError(f"{where}: {parts} parts a block; at most {MAX_PARTS}, so choose fewer groups or ranges")
        if spec.payload_bytes:
            if spec.payload_bytes % parts:
                raise ValueError(f"{where}: payload_bytes={spec.payload_bytes} is not a multiple of its {parts} parts")
            return (spec.payload_bytes // parts,) * parts
        elements = sum(self.latent_dims) if self.latent_dims else 2 * (self.kv_heads // head_groups) * self.head_dim
        layer_bytes = elements * self.block_tokens * DTYPE_BYTES[self.kv_dtype]
        if layer_bytes * self.layers * head_groups > MAX_PAYLOAD_BYTES:
            raise ValueError(f"{where}: a block of more than {MAX_PAYLOAD_BYTES} bytes; check the geometry")
        return (
            tuple((end - start) * layer_bytes for start, end in layer_splits(self.layers, spec.layer_ranges))
            * head_groups
        )

    def encode(self) -> bytes:
        """The canonical encoding."""
        return _MAGIC + _encode_fields(self, _FACTS)

    @classmethod
    def decode(cls, data: bytes) -> NamespaceFacts:
        """The facts that encode to exactly `data`. Raises: ValueError for anything else."""
        data = bytes(data)
        if len(data) > MAX_ENCODED_BYTES or not data.startswith(_MAGIC):
            raise ValueError("not an encoded namespace")
        facts = cls(**_decode_fields(data[len(_MAGIC) :], _FACTS))
        if facts.encode() != data:
            raise ValueError("not the canonical encoding of these facts")
        return facts


def namespace_id(facts: NamespaceFacts, *, tenant: str, secret: bytes) -> bytes:
    """16 bytes: HMAC-SHA-256 under `secret` of the facts' encoding followed by the tenant (tag 255), cut short.

    `tenant` and `secret` come from the caller's credentials on the server; PUBLIC_SECRET where there is one tenant.
    Raises: ValueError if the secret is shorter than 16 bytes.
    """
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(f"a tenant's secret must have at least {_MIN_SECRET_BYTES} bytes, not {len(secret)}")
    message = facts.encode() + _field(_TENANT_TAG, tenant.encode())
    return hmac.digest(secret, message, hashlib.sha256)[:KEY_BYTES]


def layer_splits(layers: int, ranges: int) -> list[tuple[int, int]]:
    """`layers` cut into `ranges` (start, end) pairs as even as whole layers go, the larger ones first."""
    size, larger = divmod(layers, ranges)
    starts = [index * size + min(index, larger) for index in range(ranges + 1)]
    return list(pairwise(starts))


# --- encoding ------------------------------------------------------------------------------------------------------

_Fields: TypeAlias = tuple[tuple[str, str], ...]
_PYTHON_TYPES: dict[str, type] = {"int": int, "str": str, "bytes": bytes, "ints": tuple, "groups": tuple}
_ITEM_TYPES: dict[str, type] = {"ints": int, "groups": GroupSpec}


def _check_types(instance: object, fields: _Fields) -> None:
    # Types first: a list or a float that slipped in would make equal facts encode differently, or not at all.
    for name, form in fields:
        value: Any = getattr(instance, name)
        if not _is(value, _PYTHON_TYPES[form]):
            raise ValueError(f"{name} must be {_PYTHON_TYPES[form].__name__}, not {type(value).__name__}")
        if form in _ITEM_TYPES and not all(_is(item, _ITEM_TYPES[form]) for item in value):
            raise ValueError(f"{name} must hold {_ITEM_TYPES[form].__name__} only")
        low, high = _BOUNDS.get(name, (0, (1 << 64) - 1))
        if form == "int" and not low <= value <= high:
            raise ValueError(f"{name} must be within {low}..{high}, not {value}")


def _is(value: Any, exact: type) -> bool:
    return type(value) is exact  # not isinstance: True is no layer count


def _field(tag: int, body: bytes) -> bytes:
    return struct.pack("<BI", tag, len(body)) + body


def _encode_fields(instance: object, fields: _Fields) -> bytes:
    return b"".join(
        _field(tag, _encode_value(getattr(instance, name), form)) for tag, (name, form) in enumerate(fields, 1)
    )


def _encode_value(value: Any, form: str) -> bytes:
    match form:
        case "int":
            return struct.pack("<Q", value)
        case "str":
            return str(value).encode()
        case "bytes":
            return bytes(value)
        case "ints":
            return struct.pack(f"<{len(value)}Q", *value)
        case _:
            encoded = [_encode_fields(spec, _GROUP) for spec in value]
            return b"".join(struct.pack("<I", len(body)) + body for body in encoded)


def _decode_fields(data: bytes, fields: _Fields) -> dict[str, Any]:
    values: dict[str, Any] = {}
    offset = 0
    for expected_tag, (name, form) in enumerate(fields, 1):
        if offset + 5 > len(data):
            raise ValueError(f"encoded namespace ends before {name}")
        tag, length = struct.unpack_from("<BI", data, offset)
        body = data[offset + 5 : offset + 5 + length]
        if tag != expected_tag or len(body) != length:
            raise ValueError(f"encoded namespace is damaged at {name}")
        values[name] = _decode_value(body, form, name)
        offset += 5 + length
    if offset != len(data):
        raise ValueError("encoded namespace has bytes after its last field")
    return values


def _decode_value(body: bytes, form: str, name: str) -> Any:
    match form:
        case "int" if len(body) == 8:
            return int.from_bytes(body, "little")
        case "str":
            return body.decode()
        case "bytes":
            return body
        case "ints" if len(body) % 8 == 0:
            return struct.unpack(f"<{len(body) // 8}Q", body)
        case "groups":
            return _decode_groups(body)
        case _:
            raise ValueError(f"encoded namespace: {name} has an impossible length of {len(body)} bytes")


def _decode_groups(body: bytes) -> tuple[GroupSpec, ...]:
    groups = []
    while body:
        length = int.from_bytes(body[:4], "little")
        groups.append(GroupSpec(**_decode_fields(body[4 : 4 + length], _GROUP)))
        body = body[4 + length :]
    return tuple(groups)
