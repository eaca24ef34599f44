"""What may be asked: the bodies of requests, checked name by name.

Covers types, bounds, and names that aren't ours: those that change nothing about the result are ignored, those that would
change it are refused, since an answer that ignores a wish is a wrong one. Leaves tokens and lengths to the server.
Always true: an error names the parameter and never repeats its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec

from forebay.engine.api.errors import ApiError, bad_request
from forebay.engine.params import BadParams, SamplingParams

MAX_CHOICES: Final = 128  # of one request: prompts times n
MAX_SALT_CHARACTERS: Final = 256
COMPLETION_TOKENS: Final = 16  # OpenAI's default for /v1/completions; a chat goes on to the end of its context

T = TypeVar("T", bound=msgspec.Struct)

# Kept for clients that send them always: the answer is the same with and without.
IGNORED: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Not supported; the values under which a client gets what it asked for nevertheless.
UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_obfuscation: accepted; padding against eavesdroppers on encrypted links is the proxy's, as the link is."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None

    def plain(self, index: int) -> dict[str, str]:
        """As chat templates take it. Raises: ApiError."""
        where = f"messages[{index}]"
        if self.tool_calls:
            raise bad_request("tool calls are not supported by this server", f"{where}.tool_calls")
        text = self.content
        if isinstance(text, list):
            if any(part.type != "text" or part.text is None for part in text):
                raise bad_request("this model takes text only: each part is {type: text, text: …}", f"{where}.content")
            text = "".join(part.text or "" for part in text)
        if text is None:
            raise bad_request("a message without content", f"{where}.content")
        # Models know no developers: what OpenAI calls so now was the system message, and is in their templates.
        found = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return found | ({"name": self.name} if self.name is not None else {})


class Generation(msgspec.Struct, kw_only=True):
    """What both kinds of completion take. Names beyond OpenAI's: from top_k on."""

    model: str
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    cache_load: bool | None = None
    cache_store: bool | None = None
    return_token_ids: bool | None = None

    def check(self) -> None:
        """What types don't say. Raises: ApiError."""
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise bad_request(f"is between 1 and {MAX_CHOICES}", "n")
        if self.best_of not in (None, self.choices):
            raise bad_request("choosing the best of several is not supported: ask for all of them with n", "best_of")
        if self.stream_options is not None and not self.stream:
            raise bad_request("only together with stream", "stream_options")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT_CHARACTERS:
            raise bad_request(f"is 1 to {MAX_SALT_CHARACTERS} characters", "cache_salt")

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        """At the end of a stream; an answer in one piece always has it."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wanted_tokens(self) -> tuple[int | None, str]:
        """Of one choice, and the parameter's name; None: as many as fit."""
        return self.max_tokens, "max_tokens"

    @property
    def top(self) -> tuple[int | None, str]:
        """How many likeliest tokens to tell beside each chosen one, None for no logprobs; and the parameter's name."""
        raise NotImplementedError

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Raises: ApiError."""
        given = {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else None if self.stop is None else tuple(self.stop),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "logprobs": self.top[0],
            "load": self.cache_load,
            "store": self.cache_store,
            "cache_salt": None if self.cache_salt is None else self.cache_salt.encode(),
        }
        known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(max_tokens=max_tokens, **known)
        except BadParams as exc:
            names = {"max_tokens": self.wanted_tokens[1], "logprobs": self.top[1]}
            raise bad_request(str(exc).partition(": ")[2], names.get(exc.name, exc.name)) from exc


class Completion(Generation, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise bad_request("logprobs of the prompt are not supported: leave out echo or logprobs", "echo")

    @property
    def wanted_tokens(self) -> tuple[int | None, str]:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens, "max_tokens"

    @property
    def top(self) -> tuple[int | None, str]:
        return self.logprobs, "logprobs"

    def prompts(self) -> list[str | list[int]]:
        """Each as text or as token ids. Raises: ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad_request("is empty", "prompt")
        if type(self.prompt[0]) is int and _are_ids(self.prompt):
            return [self.prompt]
        if len(self.prompt) * self.choices > MAX_CHOICES:  # before each is looked at
            raise bad_request(f"prompts times n are at most {MAX_CHOICES}", "prompt")
        if all(isinstance(each, str) or (isinstance(each, list) and each and _are_ids(each)) for each in self.prompt):
            return self.prompt
        raise bad_request("is a string, a list of strings, a list of token ids, or a list of such lists", "prompt")


class Chat(Generation, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise bad_request("is empty", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("only together with logprobs", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise bad_request("differs from max_tokens, its older name: send one of them", "max_completion_tokens")

    @property
    def wanted_tokens(self) -> tuple[int | None, str]:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return super().wanted_tokens

    @property
    def top(self) -> tuple[int | None, str]:
        return (self.top_logprobs or 0) if self.logprobs else None, "top_logprobs"


class Tokenize(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either a prompt or messages", "prompt")


class Detokenize(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None

    def check(self) -> None:
        pass


def decode(body: bytes, kind: type[T]) -> T:
    """The body as `kind`. Raises: ApiError that says what is wrong, and with which parameter."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise bad_request("the body is not JSON", code="invalid_json") from exc
    if not isinstance(found, dict):
        raise bad_request("the body is not a JSON object")
    known = set(kind.__struct_fields__)
    for name in found.keys() - known - IGNORED:
        _refuse(name, found[name])
    try:
        decoded = msgspec.convert(found, kind)
    except msgspec.ValidationError as exc:
        raise _named(exc) from exc
    decoded.check()  # type: ignore[attr-defined]
    return decoded


def _refuse(name: str, value: Any) -> None:
    """Raises: ApiError unless `value` asks for nothing that isn't given."""
    if name not in UNSUPPORTED:
        # Cut: a name is what the client made up, and may be a whole prompt by mistake.
        raise bad_request(f"there is no parameter {name[:40]!r}", name[:40], "unknown_parameter")
    if value is not None and value not in UNSUPPORTED[name]:
        raise bad_request(f"{name} is not supported by this server", name, "unsupported_parameter")


def _named(exc: msgspec.ValidationError) -> ApiError:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`", or "missing required field `model`"."""
    what, _, where = str(exc).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if missing := re.search(r"missing required field `(\w+)`", what):
        path = f"{path}.{missing[1]}".lstrip(".")
        return bad_request("is missing", path, "missing_parameter")
    what = re.sub(r"^Invalid enum value.*", "is not one of the values it may have", what)
    return bad_request(what, path or None, "invalid_type")


def _are_ids(value: list[Any]) -> bool:
    return all(type(each) is int for each in value)
