"""Linear layers, one class a way of keeping weights. Always true: a layer maps [tokens, in] to [tokens, out] in its dtype."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class PlainLinear:
    """Weights in the dtype they are multiplied in."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)
