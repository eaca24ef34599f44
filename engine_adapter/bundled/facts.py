"""What the KV of a model in the bundled engine is: its namespace, and a first guess of what computing it costs.

Always true: two engines share blocks only where every fact that changes a bit of them is equal; the cache salt of a request
is no part of this, it goes into its keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Final

import torch

from forebay.engine.config import ModelConfig, Precision
from forebay.kvstore.cost import PrefillModel
from forebay.kvstore.identity import GroupSpec, NamespaceFacts

DTYPE_NAMES: Final = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}

# Of a ModelConfig: what other facts hold, and what says nothing about a block's bytes.
_NOT_IDENTITY: Final = {"context_tokens", "eos_token_ids", "rope_theta", "rope_scaling"}
# What the first plan assumes before a prefill was timed: FLOP/s that such work reaches on a few cores or on a GPU.
_PRIOR_FLOPS: Final = {"cpu": 4e11, "cuda": 2e14}


def namespace_facts(
    config: ModelConfig,
    *,
    weights_digest: bytes,
    precision: Precision,
    kv_dtype: torch.dtype,
    block_tokens: int,
    head_groups: int,
    attention: str = "torch",
    producer: str | None = None,
    hash_algorithm: str = "xxh3-128",
    salt: bytes = b"",
) -> NamespaceFacts:
    """The namespace of this model's blocks as this engine computes them.

    weights_digest: of the weights' content. attention: the backend, since others round differently. head_groups: of the
    pool, one part each. producer: overrides "forebay-engine/<attention>" when an operator declares two producers equal.
    Raises: ValueError: a KV dtype that no namespace can name, or facts that don't fit each other.
    """
    if kv_dtype not in DTYPE_NAMES:
        raise ValueError(f"KV of {kv_dtype} can't be stored: use one of {', '.join(map(str, DTYPE_NAMES))}")
    kv_name = DTYPE_NAMES[kv_dtype]
    # "high" and "medium" let fp32 products run in TF32 or bf16: other numbers, so another namespace.
    matmul = torch.get_float32_matmul_precision()
    shape = {name: value for name, value in dataclasses.asdict(config).items() if name not in _NOT_IDENTITY}
    rope = {
        "theta": config.rope_theta,
        "scaling": dataclasses.asdict(config.rope_scaling) if config.rope_scaling else None,
    }
    # The number goes up when a release computes other bits from the same weights.
    digest = hashlib.sha256(b"forebay engine model v1" + _canonical([weights_digest.hex(), shape])).digest()
    return NamespaceFacts(
        weights_digest=digest,
        weight_format=precision,
        compute_dtype=kv_name if matmul == "highest" else f"{kv_name}/{matmul}",
        kv_dtype=kv_name,
        producer=producer or f"forebay-engine/{attention}",
        block_tokens=block_tokens,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=_canonical(rope),
        groups=(GroupSpec("full", head_groups=head_groups),),
        hash_algorithm=hash_algorithm,
        salt=salt,
    )


def prefill_prior(config: ModelConfig, device: str = "cpu") -> PrefillModel:
    """What computing a prompt is taken to cost until the engine has reported some."""
    heads = config.heads + 2 * config.kv_heads
    a_layer = config.hidden * config.head_dim * (heads + config.heads) + 3 * config.hidden * config.intermediate
    return PrefillModel.from_hardware(
        parameters=config.layers * a_layer + config.hidden * config.vocab_size,
        layers=config.layers,
        attention_width=config.heads * config.head_dim,
        flops=_PRIOR_FLOPS.get(device.partition(":")[0], _PRIOR_FLOPS["cuda"]),
        pass_s=0.01,
    )


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
