"""What a Hugging Face model's KV is: whether its cache can be stored, its geometry, and the namespace that follows.

Covers the checks before any block is shared. Always true: a model is accepted only after its own forward pass showed a
plain cache and continued correctly from a copy of it; anything else is refused with `UnsupportedCache`, never guessed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from forebay.engine_adapter.hf_cache import KVBuffer, KVShape
from forebay.kvstore.errors import ForebayError
from forebay.kvstore.identity import NamespaceFacts

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}

# RoPE kinds whose keys depend on nothing but their own position. Others ("dynamic", "longrope", ...) rescale with the
# length of the sequence they were computed in, so a prefix's keys are no function of the prefix.
_POSITIONAL_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}

# Config entries that are labels or that other fields of the namespace hold; all the rest is identity.
_LABELS = {
    "_name_or_path", "transformers_version", "use_cache", "dtype", "torch_dtype", "architectures", "bos_token_id",
    "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
    "problem_type",
}  # fmt: skip


class UnsupportedCache(ForebayError, ValueError):
    """This model's cache can't be represented as blocks of plain attention KV; the message says what was found."""


@dataclass(frozen=True)
class Forward:
    """How this model's forward wants to be called: names differ between models and versions of transformers."""

    cache_name: str
    takes_positions: bool
    takes_logits_to_keep: bool

    @classmethod
    def of(cls, model: Any) -> Forward:
        names = inspect.signature(model.forward).parameters
        cache_name = next((n for n in ("cache", "past_key_values") if n in names), None)
        if cache_name is None or "input_ids" not in names:
            raise UnsupportedCache(
                f"{type(model).__name__}.forward takes no KV cache (parameters: {', '.join(names)}); "
                "only causal language models with an attention cache can reuse prefixes"
            )
        return cls(cache_name, "position_ids" in names, "logits_to_keep" in names)

    def __call__(self, model: Any, ids: torch.Tensor, cache: object, start: int, keep: int = 1) -> torch.Tensor:
        """Run `ids` [1, n] at positions start.. on top of `cache`. Returns the logits of the last `keep` tokens."""
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, self.cache_name: cache}
        if self.takes_positions:
            arguments["position_ids"] = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        if self.takes_logits_to_keep:
            arguments["logits_to_keep"] = keep
        logits: torch.Tensor = model(**arguments).logits
        return logits[0, -keep:]


def examine(model: Any) -> tuple[Forward, KVShape]:
    """Check that this model's prefixes can be reused, and return how to call it and what its KV looks like.

    Runs three forward passes of a few tokens: the model's own cache must consist of plain, unbounded attention layers of
    one shape, and going on from a copy of that cache must give the logits of an unbroken pass (a model with state
    outside its cache would not).
    Raises: UnsupportedCache.
    """
    if getattr(model, "training", False):
        raise UnsupportedCache("the model is in training mode: its KV would contain dropout; call model.eval()")
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedCache("encoder-decoder model: its decoder's KV depends on more than the preceding tokens")
    if getattr(model, "peft_config", None):
        raise UnsupportedCache("the model has PEFT adapters, which can change from call to call; merge them first")
    _check_rope(_text_config(config))

    forward = Forward.of(model)
    vocabulary = _text_config(config).vocab_size
    ids = (torch.arange(8, device=model.device)[None] + 10) % vocabulary
    split = 5
    with torch.inference_mode():
        out = model(input_ids=ids[:, :split], use_cache=True)
        shape, tensors = _plain_layers(getattr(out, "cache", None) or getattr(out, "past_key_values", None), split)
        copied = KVBuffer(shape, 8, model.device)
        copied.data[:, :, :, :split] = tensors
        copied.length = split
        resumed = forward(model, ids[:, split:], copied.cache(), split).float()
        unbroken = forward(model, ids, KVBuffer(shape, 8, model.device).cache(), 0).float()
    # Chunked and whole passes round differently; a lost state changes the logits by about their own size.
    allowed = 0.25 if shape.dtype in (torch.bfloat16, torch.float16) else 0.01
    error = float((resumed - unbroken).norm() / unbroken.norm().clamp_min(1e-6))
    if not error <= allowed:
        raise UnsupportedCache(
            f"going on from a copy of the KV cache changes the logits by {error:.0%}: "
            f"{type(model).__name__} keeps state outside its KV cache"
        )
    return forward, shape


def _plain_layers(cache: Any, tokens: int) -> tuple[KVShape, torch.Tensor]:
    """Geometry and contents [layers, 2, heads, tokens, dim] of a cache made of plain layers; else UnsupportedCache."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if type(cache) is not DynamicCache:
        raise UnsupportedCache(
            f"the model's cache is {type(cache).__name__}; only DynamicCache can be stored as blocks"
        )
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedCache(
                f"layer {index} caches a {type(layer).__name__}, not plain full-attention KV (sliding windows, "
                "recurrent state and quantised layers can't be represented yet)"
            )
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    if not pairs or any(not isinstance(t, torch.Tensor) for pair in pairs for t in pair):
        raise UnsupportedCache("some layers cache nothing of their own (shared or absent attention)")
    kinds = {(tuple(t.shape), t.dtype) for pair in pairs for t in pair}
    if len(kinds) > 1:
        shown = ", ".join(sorted(f"{list(s)} {d}" for s, d in kinds))
        raise UnsupportedCache(f"keys and values of all layers must have one shape and dtype; found {shown}")
    ((batch, heads, length, dim), dtype) = kinds.pop()
    if (batch, length) != (1, tokens) or dtype not in DTYPE_NAMES:
        raise UnsupportedCache(
            f"{tokens} tokens left {length} cache entries of {dtype}; expected one a token, in floats"
        )
    return KVShape(len(pairs), heads, dim, dtype), torch.stack([torch.stack((k[0], v[0])) for k, v in pairs])


def namespace_facts(
    model: Any,
    shape: KVShape,
    *,
    block_tokens: int = 64,
    model_digest: bytes | None = None,
    producer: str | None = None,
    hash_algorithm: str = "xxh3-128",
    salt: bytes = b"",
) -> NamespaceFacts:
    """The namespace that this model's blocks live in.

    model_digest: stands for the weights' content, when the caller knows it (then the weights aren't read).
    producer: overrides "transformers/<attention backend>" when two producers are declared equal, or differ.
    """
    config = _text_config(model.config)
    attention = getattr(model.config, "_attn_implementation", None) or "eager"
    digest = hashlib.sha256(b"forebay model v1")
    digest.update(model_digest if model_digest is not None else weights_digest(model))
    digest.update(_canonical(_architecture(model)))
    quantization = getattr(model.config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    # "high" and "medium" let fp32 products run in TF32 or bf16: other numbers, so another namespace.
    matmul = torch.get_float32_matmul_precision()
    name = DTYPE_NAMES[shape.dtype]
    return NamespaceFacts(
        weights_digest=digest.digest(),
        weight_format=_canonical(quantization).decode() if quantization else name,
        compute_dtype=name if matmul == "highest" else f"{name}/{matmul}",
        kv_dtype=name,
        producer=producer or f"transformers/{attention}",
        block_tokens=block_tokens,
        layers=shape.layers,
        kv_heads=shape.heads,
        head_dim=shape.dim,
        rope=_rope(config),
        hash_algorithm=hash_algorithm,
        salt=salt,
    )


def weights_digest(model: Any) -> bytes:
    """SHA-256 over every tensor of the model's state, in the order of their names: name, dtype, shape, bytes.

    Taken from the weights as they are in memory: a file's name or date says nothing about a model changed after loading.
    Cost: 1.0 to 1.8 GB/s a thread where the CPU has SHA instructions, on up to four threads.
    """

    def one(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        digest = hashlib.sha256(_canonical([name, str(tensor.dtype), list(tensor.shape)]))
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
        return digest.digest()

    state = sorted((n, t) for n, t in model.state_dict().items() if isinstance(t, torch.Tensor))
    with ThreadPoolExecutor(max_workers=4) as pool:
        return hashlib.sha256(b"".join(pool.map(one, state))).digest()


def _architecture(model: Any) -> dict[str, Any]:
    config = {k: v for k, v in model.config.to_dict().items() if k not in _LABELS}
    return {"class": type(model).__name__, "config": config}


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _rope_entries(config: Any) -> dict[str, Any]:
    names = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _rope(config: Any) -> bytes:
    return _canonical(_rope_entries(config))


def _check_rope(config: Any) -> None:
    for entry in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        if not isinstance(entry, Mapping):
            continue
        for part in (entry, *(v for v in entry.values() if isinstance(v, Mapping))):
            kind = part.get("rope_type", part.get("type", "default"))
            if kind not in _POSITIONAL_ROPE:
                raise UnsupportedCache(
                    f"RoPE of type {kind!r} may rescale with the sequence's length, so keys of a prefix are not "
                    "the same in every prompt"
                )


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
