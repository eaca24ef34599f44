"""What is said: answers and the chunks of a stream, in OpenAI's shapes, for both kinds of completion.

Covers text, logprobs, reasons to finish, usage. Always true: the chunks of a stream, joined, are the answer in one piece.
`usage.forebay` is ours: where the prompt's blocks came from, and what took how long.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from forebay.engine.outputs import RequestOutput, TokenLogprobs
from forebay.engine.tokenizer import Tokenizer


class Choice:
    """What one choice has said so far. `prompt`: its index among the request's prompts."""

    def __init__(self, index: int, prompt: int, prompt_ids: Sequence[int], echo: str = "") -> None:
        self.index, self.prompt, self.prompt_ids = index, prompt, prompt_ids
        self.text = echo
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.logprob_characters = 0  # told of already
        self.last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.last = output


class Answers(Protocol):
    """One kind of completion. All chunks and the answer of a request share its id."""

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The chunk before a choice's first one."""
        ...

    def chunk(self, choice: Choice, output: RequestOutput) -> dict[str, Any] | None:
        """For what is new; None: nothing that a client could see. `choice` doesn't have it yet."""
        ...

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk of a stream whose usage was asked for."""
        ...

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]: ...


class _Common:
    prefix, object, chunk_object = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer, *, logprobs: bool, token_ids: bool, usage: bool) -> None:
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._logprobs, self._token_ids, self._usage = logprobs, token_ids, usage

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        # Where usage was asked for every chunk has the name, null in all but the last.
        return (
            self._head | {"object": self.chunk_object, "choices": choices} | ({"usage": usage} if self._usage else {})
        )

    def closing(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        said = [self._said(choice) for choice in choices]
        return self._head | {"object": self.object, "choices": said, "usage": usage}

    def _said(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _visible(self, output: RequestOutput) -> bool:
        told = self._logprobs or self._token_ids
        return bool(output.text or output.finish_reason or (told and output.token_ids))

    def _ids(self, choice: Choice, token_ids: Sequence[int], *, prompt: bool) -> dict[str, Any]:
        if not self._token_ids:
            return {}
        return {"token_ids": list(token_ids)} | ({"prompt_token_ids": list(choice.prompt_ids)} if prompt else {})

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """Its text, and its bytes. Parts of characters are told apart by their bytes, as OpenAI does it."""
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class ChatAnswers(_Common):
    """/v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunk(self, choice: Choice, output: RequestOutput) -> dict[str, Any] | None:
        if not self._visible(output):
            return None
        told = {
            "index": choice.index,
            "delta": {"content": output.text} if output.text else {},
            "logprobs": self._tokens(output.logprobs or ()),
            "finish_reason": output.finish_reason,
        }
        return self._chunk([told | self._ids(choice, output.token_ids, prompt=not choice.token_ids)])

    def _said(self, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._tokens(choice.logprobs),
            "finish_reason": choice.last.finish_reason,
        } | self._ids(choice, choice.token_ids, prompt=True)

    def _tokens(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            self._one(each.token_id, each.logprob) | {"top_logprobs": [self._one(*other) for other in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._token(token_id)
        told = {"token": text, "logprob": logprob, "bytes": list(data)}
        return told | ({"token_id": token_id} if self._token_ids else {})


class CompletionAnswers(_Common):
    """/v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if not choice.text:
            return None
        echo = {"index": choice.index, "text": choice.text, "logprobs": None, "finish_reason": None}
        return self._chunk([echo])

    def chunk(self, choice: Choice, output: RequestOutput) -> dict[str, Any] | None:
        if not self._visible(output):
            return None
        told = {
            "index": choice.index,
            "text": output.text,
            "logprobs": self._tokens(output.logprobs or (), choice),
            "finish_reason": output.finish_reason,
        }
        return self._chunk([told | self._ids(choice, output.token_ids, prompt=not choice.token_ids)])

    def _said(self, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": self._tokens(choice.logprobs, choice),
            "finish_reason": choice.last.finish_reason,
        } | self._ids(choice, choice.token_ids, prompt=True)

    def _tokens(self, logprobs: Sequence[TokenLogprobs], choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        offsets, tokens = [], []
        for each in logprobs:
            text, data = self._token(each.token_id)
            offsets.append(choice.logprob_characters)
            tokens.append(text)
            choice.logprob_characters += sum(byte & 0xC0 != 0x80 for byte in data)  # that begin a character
        return {
            "tokens": tokens,
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{self._token(i)[0]: value for i, value in each.top} for each in logprobs],
            "text_offset": offsets,
        }


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """A prompt counts once, whatever its n. The seconds are those of the first choice."""
    lasts = [(choice, choice.last) for choice in choices if choice.last is not None]
    firsts = {choice.prompt: last for choice, last in reversed(lasts)}.values()  # each prompt's first choice
    prompt_tokens = sum(last.prompt_tokens for last in firsts)
    answer_tokens = sum(last.output_tokens for _, last in lasts)
    pool, store = (sum(getattr(last.cached_tokens, name) for last in firsts) for name in ("pool", "store"))
    times = lasts[0][1].times
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": pool + store},
        "forebay": {
            "pool_tokens": pool,
            "store_tokens": store,
            "queued_s": times.queued_s,
            "load_s": times.load_s,
            "prefill_s": times.prefill_s,
            "first_token_s": times.first_token_s,
            "total_s": times.total_s,
        },
    }
