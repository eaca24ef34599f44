"""Linear layers, one class a way of keeping weights; `linear_for` packs a weight once, when the model is loaded.

Always true: a layer maps [tokens, in] to [tokens, out] in the dtype of its input, and a token's row depends on that token
alone (so activations are quantised row by row, never by a scale of the whole batch).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional

from forebay.engine.config import Precision
from forebay.engine.model_errors import UnsupportedModel


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # weight [out, in] and bias


class PlainLinear:
    """Weights in the dtype they are multiplied in, as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """bf16 in oneDNN's own order. [M] one token through a 0.5B model's layers takes 20 ms, 27 ms from the plain order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class Int8Linear:
    """W8A8: weights of 8 bits with a scale a row, activations rounded to 8 bits with a scale a token."""

    _ZERO = 128  # oneDNN is fast for unsigned activations: they are kept 128 higher

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        scale = weight.float().abs().amax(1).clamp_min_(_TINY) / 127
        rounded = (weight.float() / scale[:, None]).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scale, self._bias = scale, bias
        self._zeros = torch.zeros(len(scale), dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(1, keepdim=True).float().clamp_min_(_TINY) / 127
        rounded = torch.mul(x, scale.reciprocal()).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(self._ZERO)
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, self._ZERO, self._weight, self._scale, self._zeros, None, 1.0, 0, x.dtype, "none", [], ""
        )
        y.mul_(scale)
        return y if self._bias is None else y.add_(self._bias)


class Int4Linear:
    """Weights of 4 bits, with a scale and an offset for every 32 of a row; activations stay bf16."""

    GROUP = 32
    _OUT = 16  # rows that the kernel packs together

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        out, width = weight.shape
        if width % self.GROUP or out % self._OUT:
            raise UnsupportedModel("int4", f"a weight of {out} x {width} doesn't divide into groups of {self.GROUP}")
        groups = weight.float().view(out, width // self.GROUP, self.GROUP)
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min_(_TINY)
        codes = ((groups - low) / scale).round_().clamp_(0, 15)
        # The kernel computes (code - 8) * scale + offset.
        self._scales = torch.stack((scale, low + 8 * scale), -1).squeeze(2).transpose(0, 1).contiguous().bfloat16()
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.view(out, width).int(), 1)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._weight, self.GROUP, self._scales)
        return y if self._bias is None else y.add_(self._bias)


_TINY = 1e-12  # keeps a row of zeros from a division by zero


def compute_dtype(precision: Precision) -> torch.dtype:
    """Of activations and of the KV cache."""
    return {"fp64": torch.float64, "fp32": torch.float32}.get(precision, torch.bfloat16)


def linear_for(precision: Precision, device: str) -> MakeLinear:
    """What packs a weight and its bias.

    Raises: ValueError, for a precision that this device has no kernel for.
    """
    kinds: dict[Precision, MakeLinear] = {"int8": Int8Linear, "int4": Int4Linear}
    packed = kinds.get(precision)
    if packed is None:
        plain: MakeLinear = PackedLinear if precision == "bf16" and device == "cpu" and _has_onednn() else PlainLinear
        return plain
    if device != "cpu" or not _has_onednn():
        raise ValueError(f"precision {precision} runs on a CPU with oneDNN, not on {device}")
    return packed


def _has_onednn() -> bool:
    onednn: Any = torch.backends.mkldnn
    return bool(onednn.is_available())
