"""The engine's numbers, as a snapshot that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BlockCounts:
    """free: no content. cached: content, nobody's. used: by sequences. held: only by a store that still reads them."""

    total: int
    free: int
    cached: int
    used: int
    held: int


@dataclass
class Counters:
    """Counted since the start; the engine's thread writes them."""

    steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0  # in forward passes: prompts (again after a preemption) and generated ones
    generated_tokens: int = 0
    cached_pool_tokens: int = 0
    cached_store_tokens: int = 0
    preemptions: int = 0
    evicted_blocks: int = 0
    offered_blocks: int = 0  # to the store
    stores_skipped: int = 0  # blocks not offered to the store, because it already holds as many as it may
    store_errors: int = 0  # calls of the store that raised
    late_matches: int = 0  # answers not waited for any longer
    cancelled_loads: int = 0
    failed_steps: int = 0
    prefill_s: float = 0.0  # in forward passes with any prompt token
    decode_s: float = 0.0  # in the others
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))


@dataclass(frozen=True)
class EngineStats:
    """running: have their blocks. waiting: have none yet, or lost them. loading: running, and waiting for the store."""

    running: int
    waiting: int
    loading: int
    blocks: BlockCounts
    counters: Counters
