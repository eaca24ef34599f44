"""Errors the engine raises on purpose. Each one hits the request it names and no other; callers branch on type and fields."""

from __future__ import annotations

from typing import Literal


class EngineError(Exception):
    """Root of the family."""


class InvariantViolation(EngineError):
    """A rule of docs/engine.md was found broken: a bug in the engine."""


class BadPrompt(EngineError):
    """Empty, or with an id that the model's vocabulary doesn't have."""


class PromptTooLong(EngineError):
    """limit: what is too small, the model's context or the block pool. limit_tokens: the longest prompt that would do."""

    def __init__(self, prompt_tokens: int, limit_tokens: int, limit: Literal["context", "pool"]) -> None:
        where = "the model's context" if limit == "context" else "the block pool"
        super().__init__(f"{where} takes prompts of up to {limit_tokens} tokens, this one has {prompt_tokens}")
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens
        self.limit = limit


class QueueFull(EngineError):
    """More requests wait than the engine lets wait. Safe to repeat later."""

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests are waiting, the limit is {limit}")
        self.waiting = waiting
        self.limit = limit


class DuplicateRequest(EngineError):
    """A request with this id is still running."""


class BadLogits(EngineError):
    """The model computed a value that is not finite. position: of the token whose successor was to be chosen, or of the
    last token of the block where it was found."""

    def __init__(self, position: int) -> None:
        super().__init__(f"the model's values at position {position} are not finite")
        self.position = position


class StepFailed(EngineError):
    """The forward pass of this request failed, also alone. `__cause__` has the model's error."""


class PoolExhausted(EngineError):
    """No block came free in time, though nothing else runs: a store doesn't let go of the blocks it reads."""


class PoolTooSmall(EngineError, ValueError):
    """The memory set aside for blocks doesn't take one, of `block_bytes`."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(f"the pool is smaller than one block of {block_bytes} bytes")
        self.block_bytes = block_bytes


class EngineClosed(EngineError):
    """The engine was closed, by its owner or by an error of its own (then `__cause__`)."""
