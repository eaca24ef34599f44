"""Tiny random models: real architectures, no download, a few milliseconds a pass."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,  # so that logits are far apart and the greedy text is no constant
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def qwen(dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | more)).to(dtype).eval()


def llama(dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES | more)).to(dtype).eval()
