"""Linear layers, one class a way of keeping weights. Always true: a layer maps [tokens, in] to [tokens, out] in its dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from forebay.engine.config import Precision


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """Weights in the dtype they are multiplied in."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


def compute_dtype(precision: Precision) -> torch.dtype:
    """Of activations and of the KV cache."""
    return {"fp64": torch.float64, "fp32": torch.float32}.get(precision, torch.bfloat16)


def linear_for(precision: Precision) -> Callable[[torch.Tensor, torch.Tensor | None], Linear]:
    """What packs a weight [out, in] and its bias for this precision."""
    return PlainLinear
