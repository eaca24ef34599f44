"""The decoder that the Llama family shares: its tensors, and its forward pass over a batch of spans.

Covers what is common; what sets one architecture apart is a handful of flags in `ModelConfig`. Always true: all weights were
checked against `tensor_shapes` before a model exists; a forward pass reads the pool only through `ops.attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from forebay.engine.batch import Batch
from forebay.engine.config import ModelConfig
from forebay.engine.ops.attention import Paged
from forebay.engine.ops.linear import Linear, MakeLinear
from forebay.engine.ops.norm import rms_norm
from forebay.engine.ops.rope import Rope, rotate

TakeTensor = Callable[[str], torch.Tensor]  # by name, in the model's dtype

_ROW_STEP = 16
EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name; a tied output layer has none of its own."""
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, config.hidden), FINAL_NORM: (config.hidden,)}
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden)
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config)}
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config.hidden, config.intermediate
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        yield f"self_attn.{name}_proj.weight", (heads * config.head_dim, hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (heads * config.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, config.heads * config.head_dim)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


@dataclass(frozen=True)
class _Layer:
    """q, k and v are one matrix, and so are gate and up: two reads of the input and two calls fewer."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A `CausalModel`."""

    def __init__(
        self, config: ModelConfig, take: TakeTensor, linear: MakeLinear, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self.config = config
        self.kv_dtype = dtype
        self._embed = take(EMBED)
        self._layers = [self._load_layer(f"model.layers.{i}.", take, linear) for i in range(config.layers)]
        self._final_norm = take(FINAL_NORM)
        self._head = linear(self._embed if config.tie_embeddings else take(HEAD), None)
        self._rope = Rope(config, dtype, device)

    def _load_layer(self, prefix: str, take: TakeTensor, linear: MakeLinear) -> _Layer:
        def fused(*names: str) -> Linear:
            weight = torch.cat([take(f"{prefix}{name}.weight") for name in names])
            biased = self.config.qkv_bias and "self_attn.q_proj" in names
            return linear(weight, torch.cat([take(f"{prefix}{name}.bias") for name in names]) if biased else None)

        normed = self.config.qk_norm
        return _Layer(
            attention_norm=take(prefix + "input_layernorm.weight"),
            qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            q_norm=take(prefix + "self_attn.q_norm.weight") if normed else None,
            k_norm=take(prefix + "self_attn.k_norm.weight") if normed else None,
            out=fused("self_attn.o_proj"),
            mlp_norm=take(prefix + "post_attention_layernorm.weight"),
            gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
            down=fused("mlp.down_proj"),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: torch.Tensor) -> torch.Tensor:
        config, eps = self.config, self.config.norm_eps
        paged = Paged(config, batch, pool)
        spare = self._spare_rows(len(batch.token_ids))
        cos, sin = self._rope.angles(functional.pad(batch.positions, (0, spare)))
        x = self._embed[functional.pad(batch.token_ids, (0, spare))]
        for index, layer in enumerate(self._layers):
            h = layer.qkv(rms_norm(x, layer.attention_norm, eps))
            h = self._attention(index, layer, h, cos, sin, paged)
            x = layer.out(h).add_(x)
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, eps)).chunk(2, -1)
            x = layer.down(functional.silu(gate).mul_(up)).add_(x)
        logits = self._head(rms_norm(x[batch.logit_rows], self._final_norm, eps))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _spare_rows(self, rows: int) -> int:
        """Rows to add, so that long batches have a multiple of `_ROW_STEP`: oneDNN keeps a kernel and its buffers for every
        number of rows that it has met. [M] 1,000 mixed requests: 0.8 GB more memory, and since then 0.1.
        """
        return -rows % _ROW_STEP if self.kv_dtype is torch.bfloat16 and rows > _ROW_STEP else 0

    def _attention(
        self, index: int, layer: _Layer, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, paged: Paged
    ) -> torch.Tensor:
        config = self.config
        rows = paged.rows
        qkv = qkv.view(-1, config.heads + 2 * config.kv_heads, config.head_dim)
        qk = qkv[:, : config.heads + config.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk[:, : config.heads], qk[:, config.heads :]
            qk = torch.cat(
                (rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)), dim=1
            )
        qk = rotate(qk, cos, sin)
        kv = torch.cat((qk[:rows, config.heads :], qkv[:rows, config.heads + config.kv_heads :]), dim=1)
        paged.write(index, kv)
        found = paged.attend(index, qk[:rows, : config.heads])
        return functional.pad(found, (0, 0, 0, qkv.shape[0] - rows)) if qkv.shape[0] > rows else found
