"""What a request asks for: how to sample, when to stop, what to tell. Always true: a `SamplingParams` that exists is valid."""

from __future__ import annotations

from dataclasses import dataclass


class BadParams(ValueError):
    """A sampling value that makes no sense. `name`: which, so that a server can point at it."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


@dataclass(frozen=True)
class SamplingParams:
    """
    temperature: 0 is greedy. top_k: 0 keeps all. top_p: the smallest set of likeliest tokens with this probability.
    min_p: tokens less likely than this share of the likeliest one are dropped.
    presence_penalty, frequency_penalty: subtracted once, and per occurrence, from logits of tokens generated so far.
    repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or generated so far.
    seed: with the same seed a request draws the same tokens, however it is batched. None: the engine picks one.
    stop: strings that end the text, which ends before them. stop_token_ids: tokens that end it (the model's own do,
    too, unless `ignore_eos`). logprobs: how many likeliest tokens to report beside each chosen one; None reports nothing.
    load, store: whether the prefix may come from the store, and may go there. cache_salt: requests share blocks only under
    the same salt.
    Raises: BadParams.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    load: bool = True
    store: bool = True
    cache_salt: bytes = b""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:  # false for NaN as well
                raise BadParams(name, f"is between {low:g} and {high:g}, not {value}")
        if not 0.0 < self.top_p <= 1.0:
            raise BadParams("top_p", f"is above 0 and at most 1, not {self.top_p}")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise BadParams("repetition_penalty", f"is between 0.01 and 100, not {self.repetition_penalty}")
        for name, least in (("max_tokens", 1), ("top_k", 0), ("min_tokens", 0)):
            if getattr(self, name) < least:
                raise BadParams(name, f"is at least {least}, not {getattr(self, name)}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise BadParams("logprobs", f"is between 0 and 20, not {self.logprobs}")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise BadParams("seed", "is an integer of 64 bits")
        if len(self.stop_token_ids) > 256:
            raise BadParams("stop_token_ids", "is at most 256 tokens")
        if len(self.stop) > 16 or not all(self.stop):
            raise BadParams("stop", "is at most 16 strings, none of them empty")
