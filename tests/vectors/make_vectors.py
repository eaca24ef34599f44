"""Write keys.json: golden vectors of namespace ids, block keys and object headers, for implementations in any language.

Run it only when a format gets a new version: a changed vector means that stored objects are no longer found. The tests
in tests/kvstore recompute every vector from the written format alone.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from forebay.kvstore.identity import PUBLIC_SECRET, GroupSpec, NamespaceFacts, namespace_id
from forebay.kvstore.keys import block_keys
from forebay.kvstore.objects import ObjectLayout

PLAIN = NamespaceFacts(
    weights_digest=bytes(range(32)),
    weight_format="bf16",
    compute_dtype="bf16",
    kv_dtype="bf16",
    producer="transformers/sdpa",
    layers=24,
    kv_heads=2,
    head_dim=64,
    rope=b"base=1000000.0",
)
RICH = NamespaceFacts(
    weights_digest=b"\xff" * 32,
    weight_format="q4_k_m",
    compute_dtype="fp16",
    kv_dtype="fp8_e4m3",
    kv_scale_format="per_tensor_static",
    producer="forebay/triton é",
    block_tokens=4,
    layers=7,
    kv_heads=8,
    head_dim=128,
    rope=b"",
    groups=(
        GroupSpec("full", head_groups=2, layer_ranges=3),
        GroupSpec("window", window_tokens=4096),
        GroupSpec("state", payload_bytes=12288, head_groups=4),
    ),
    lora_digest=b"lora",
    hash_algorithm="sha256",
    salt=b"salt",
)
LATENT = dataclasses.replace(PLAIN, latent_dims=(512, 64), kv_heads=16)


def _namespace(facts: NamespaceFacts, tenant: str, secret: bytes) -> dict[str, Any]:
    shown: dict[str, Any] = {
        name: value.hex() if isinstance(value, bytes) else value for name, value in dataclasses.asdict(facts).items()
    }
    return {
        "facts": shown,
        "tenant": tenant,
        "secret": secret.hex(),
        "encoding": facts.encode().hex(),
        "id": namespace_id(facts, tenant=tenant, secret=secret).hex(),
    }


def _keys(
    algorithm: str,
    block_tokens: int,
    token_ids: list[int],
    extras: dict[int, bytes] | None = None,
    parent: bytes | None = None,
) -> dict[str, Any]:
    namespace = bytes(range(16))
    keys = block_keys(namespace, token_ids, block_tokens, algorithm=algorithm, extras=extras, parent=parent)
    return {
        "algorithm": algorithm,
        "namespace_id": namespace.hex(),
        "parent": parent.hex() if parent else None,
        "block_tokens": block_tokens,
        "token_ids": token_ids,
        "extras": {str(index): extra.hex() for index, extra in (extras or {}).items()},
        "keys": [key.hex() for key in keys],
    }


def _header(facts: NamespaceFacts, group: int, first: bool) -> dict[str, Any]:
    layout = ObjectLayout.of(facts, group)
    namespace = namespace_id(facts, tenant="", secret=PUBLIC_SECRET)
    token_ids = [token * 7919 for token in range(facts.block_tokens * 2)]
    parent, key = block_keys(namespace, token_ids, facts.block_tokens, algorithm=facts.hash_algorithm)
    if first:
        parent, key, position = namespace, parent, 0
    else:
        position = facts.block_tokens
    own_tokens = token_ids[position : position + facts.block_tokens]
    # The payload is a rule, not a listing: byte i is i*i mod 251.
    payload = (np.arange(layout.payload_bytes, dtype=np.int64) ** 2 % 251).astype(np.uint8).tobytes()
    header = bytearray(layout.header_bytes)
    created_ns = 1_700_000_000_000_000_001
    layout.write_header(
        header,
        key=key,
        parent=None if first else parent,
        namespace=namespace,
        position=position,
        token_ids=own_tokens,
        checksums=layout.part_checksums(payload),
        created_ns=created_ns,
    )
    unsealed = bytes(header)
    layout.seal_header(header)
    return {
        "group": group,
        "part_bytes": layout.part_bytes,
        "key": key.hex(),
        "parent": parent.hex(),
        "namespace_id": namespace.hex(),
        "position": position,
        "created_ns": created_ns,
        "token_ids": own_tokens,
        "unsealed": unsealed.hex(),
        "sealed": header.hex(),
    }


def vectors() -> dict[str, Any]:
    """All vectors, as written to keys.json."""
    tokens = [0, 1, 2, 151643, 0xFFFF_FFFF, 0x8000_0000, 65536, 255, 256, 42, 7]
    cases: tuple[dict[str, Any], ...] = (
        {"block_tokens": 4, "token_ids": tokens},
        {"block_tokens": 1, "token_ids": tokens[:3]},
        {"block_tokens": 4, "token_ids": tokens, "extras": {1: b"\x01media digest"}},
        {"block_tokens": 4, "token_ids": tokens[4:], "parent": bytes(range(100, 116))},
        {"block_tokens": 64, "token_ids": [(i * 2654435761) % 2**32 for i in range(200)]},
        {"block_tokens": 16, "token_ids": [5] * 15},
    )
    return {
        "about": [
            "All bytes are hex. Formats: the module docstrings of kvstore/identity.py, keys.py and objects.py.",
            "xxh3-128 digests are in canonical (big-endian) form. In headers, payload byte i is i*i mod 251.",
        ],
        "namespaces": [
            _namespace(PLAIN, "", PUBLIC_SECRET),
            _namespace(PLAIN, "tenant-a", PUBLIC_SECRET),
            _namespace(RICH, "Zoë", b"0123456789abcdef" * 5),
            _namespace(LATENT, "", PUBLIC_SECRET),
        ],
        "keys": [_keys(algorithm, **case) for algorithm in ("xxh3-128", "sha256") for case in cases],
        "headers": [_header(RICH, 0, True), _header(RICH, 2, False), _header(PLAIN, 0, False)],
    }


if __name__ == "__main__":
    path = Path(__file__).with_name("keys.json")
    path.write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {path}")
