"""What a model is (read from its folder or file) and how an engine is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["fp64", "fp32", "bf16", "int8", "int4"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's: wave lengths above original_context / low_freq_factor are stretched by `factor`, with a smooth passage."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family. architecture: "qwen2", "qwen3" or "llama". context_tokens: what it was made for.

    Raises: ValueError, when its sizes don't fit each other.
    """

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden",
            "intermediate",
            "heads",
            "kv_heads",
            "head_dim",
            "vocab_size",
            "context_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"{self.heads} heads over {self.kv_heads} KV heads of {self.head_dim}")


@dataclass(frozen=True)
class EngineConfig:
    """
    block_tokens: tokens a block of the pool, and of the store. pool_blocks: None takes what `pool_bytes` holds.
    step_tokens: most tokens computed in one forward pass; long prompts are cut into chunks of what is left of it.
    max_sequences: run at once, not more than step_tokens. max_context_tokens: None takes the model's own limit.
    match_wait_s: longest wait for what the store advises; shorter where computing would be. stall_s: a request that gets no
    block for so long, though nothing else runs, fails.
    """

    precision: Precision = "bf16"
    block_tokens: int = 64
    pool_bytes: int = 1 << 30
    pool_blocks: int | None = None
    step_tokens: int = 512
    max_sequences: int = 64
    max_context_tokens: int | None = None
    max_waiting: int = 1024
    match_wait_s: float = 1.0
    stall_s: float = 30.0
    device: str = "cpu"
    threads: int | None = None
    store_generated: bool = True
