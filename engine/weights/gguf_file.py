"""A GGUF file: config from its metadata, tensors dequantised when read.

Covers llama.cpp's names and its order of Llama's q and k rows; the tokenizer is tokenizer.py's. Source: GGUF's specification
in ggml's docs/gguf.md, and gguf-py's constants.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forebay.engine.config import ModelConfig, RopeScaling
from forebay.engine.model_errors import DamagedModel, UnsupportedModel
from forebay.engine.models import FLAGS
from forebay.engine.ops.rope import stretch

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; an unknown one stays as it is, and is then reported as unexpected."""
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
    return name


class GgufFile:
    """`Weights` of one GGUF file; `metadata` serves the tokenizer."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.files: tuple[Path, ...] = (path,)
        try:
            reader = GGUFReader(path)
        except Exception as exc:  # the reader fails with whatever its parsing stumbled on
            raise DamagedModel(f"{path} is no whole GGUF file: {exc}") from exc
        self._tensors = {hf_name(t.name): t for t in reader.tensors}
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}
        self.metadata = Metadata(reader, path)
        try:
            self.config: ModelConfig = _config(self.metadata, tied="lm_head.weight" not in self._tensors)
        except (TypeError, ValueError, ArithmeticError) as exc:
            raise DamagedModel(f"{path} has metadata that makes no sense: {exc}") from exc
        self._turned = (
            {"q_proj": self.config.heads, "k_proj": self.config.kv_heads} if self.config.architecture == "llama" else {}
        )
        self._check_rope_factors()

    def read(self, name: str) -> torch.Tensor:
        from gguf import dequantize

        found = self._tensors[name]
        try:
            values = torch.from_numpy(np.array(dequantize(found.data, found.tensor_type)))
        except NotImplementedError as exc:
            raise UnsupportedModel("tensor_type", f"{name} is quantised as {found.tensor_type.name}") from exc
        except ValueError as exc:
            raise DamagedModel(f"{name} can't be dequantised: {exc}") from exc
        if heads := self._turned.get(name.split(".")[-2]):
            # llama.cpp keeps Llama's rows in interleaved rotary order: undo it, since `rotate` splits in halves.
            values = values.view(heads, -1, 2, values.shape[-1]).transpose(1, 2).reshape(values.shape)
        return values

    def _check_rope_factors(self) -> None:
        """Llama 3's stretching comes as a tensor of factors: find the parameters that make it, or refuse.

        Always the published low and high factors (1, 4), so only `factor` and the original context are looked for.
        """
        if _ROPE_FACTORS not in self._tensors:
            return
        del self.shapes[_ROPE_FACTORS]
        factors = self.read(_ROPE_FACTORS).float().flatten()
        steps = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        frequencies = 1.0 / self.config.rope_theta**steps
        scaling = RopeScaling(float(factors.max()), 1.0, 4.0, 8192)
        if len(factors) != len(frequencies) or not torch.allclose(stretch(frequencies, scaling), factors, rtol=1e-3):
            raise UnsupportedModel(_ROPE_FACTORS, "the file's rotary factors are not Llama 3's")
        if not math.isclose(scaling.factor, 1.0):
            self.config = ModelConfig(**{**vars(self.config), "rope_scaling": scaling})


class Metadata:
    """A GGUF file's key-value pairs, read when asked for: the vocabulary alone is 10^5 strings."""

    def __init__(self, reader: Any, path: Path) -> None:
        self._fields = reader.fields
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        """Raises: DamagedModel."""
        field = self._fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except Exception as exc:  # as above
            raise DamagedModel(f"{self._path}: {key} can't be read: {exc}") from exc

    def need(self, key: str) -> Any:
        """Raises: DamagedModel."""
        found = self.get(key)
        if found is None:
            raise DamagedModel(f"{self._path} has no {key}")
        return found


def _config(metadata: Metadata, *, tied: bool) -> ModelConfig:
    architecture = metadata.need("general.architecture")
    if architecture not in FLAGS:
        raise UnsupportedModel("general.architecture", f"architecture {architecture!r} is none of {', '.join(FLAGS)}")
    if (kind := metadata.get(f"{architecture}.rope.scaling.type", "none")) != "none":
        raise UnsupportedModel("rope.scaling.type", f"rope scaling {kind!r} in GGUF metadata isn't supported")

    def number(key: str) -> int:
        return int(metadata.need(f"{architecture}.{key}"))

    heads, hidden = number("attention.head_count"), number("embedding_length")
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=architecture,
        layers=number("block_count"),
        hidden=hidden,
        intermediate=number("feed_forward_length"),
        heads=heads,
        kv_heads=int(metadata.get(f"{architecture}.attention.head_count_kv", heads)),
        head_dim=int(metadata.get(f"{architecture}.attention.key_length", hidden // heads)),
        vocab_size=len(metadata.need("tokenizer.ggml.tokens")),
        context_tokens=number("context_length"),
        norm_eps=_shortest(metadata.need(f"{architecture}.attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(metadata.get(f"{architecture}.rope.freq_base", 10_000.0)),
        tie_embeddings=tied,
        eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        **FLAGS[architecture],
    )


def _shortest(value: float) -> float:
    """GGUF keeps float32: the number meant is the shortest one that rounds to it, 1e-06 and not 9.99999997e-07."""
    return float(str(np.float32(value)))
