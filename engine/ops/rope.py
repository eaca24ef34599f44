"""Rotary positions, in the half-split form, with Llama 3's stretching of long waves.

Source: Su et al., arXiv 2104.09864, section 3.4; the stretching: Llama 3.1's model card (`rope_type: llama3`).
"""

from __future__ import annotations

import math

import torch

from forebay.engine.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2], radians per position. In float32, whatever the model's dtype: what models were trained with."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**steps
    return frequencies if config.rope_scaling is None else frequencies / stretch(frequencies, config.rope_scaling)


def stretch(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """By how much each wave is stretched: 1 for short waves, `factor` for long ones, smooth between."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # of this wave within the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling.factor + smooth)


class Rope:
    """Angles for any position, computed when asked: a table up to the model's context would be larger than it is worth."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        self._dtype = dtype
        frequencies = inverse_frequencies(config).to(device)
        self._frequencies = torch.cat((frequencies, frequencies))
        self._half = config.head_dim // 2

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, each [tokens, 1, head_dim], for `rotate`."""
        turned = positions.float()[:, None, None] * self._frequencies
        sin = turned.sin()
        sin[..., : self._half].neg_()
        return turned.cos().to(self._dtype), sin.to(self._dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; cos and sin from `Rope.angles`: the minus of the first half is in `sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
