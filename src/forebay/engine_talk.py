"""The bundled engine in a terminal: a conversation, or one answer. Always true: answers go to stdout as they come."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

from rich.console import Console

from forebay.engine.outputs import RequestOutput
from forebay.engine.params import SamplingParams
from forebay.engine_wiring import Opened

_err = Console(stderr=True, highlight=False)


def generate(
    ready: Opened,
    text: str,
    *,
    as_chat: bool,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    stop: Sequence[str],
) -> None:
    """Raises: EngineError; NoChatTemplate."""
    tokenizer = ready.loaded.tokenizer
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if as_chat else tokenizer.encode_prompt(text)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop))
    asyncio.run(_say(ready, ids, params))
    print()


def chat(ready: Opened, *, system: str | None, max_tokens: int, temperature: float, seed: int | None) -> None:
    """Until an empty line or the end of stdin. Raises: EngineError; NoChatTemplate."""
    messages = [{"role": "system", "content": system}] if system else []
    _err.print(f"[dim]{ready.loaded.name}, store: {ready.store_name}. An empty line ends the conversation.[/dim]")
    while text := _asked():
        messages.append({"role": "user", "content": text})
        ids = ready.loaded.tokenizer.encode_chat(messages)
        room = ready.engine.limit_tokens - len(ids)
        if room < 1:
            _err.print("[red]The conversation fills the context: start another.[/red]")
            return
        params = SamplingParams(max_tokens=min(max_tokens, room), temperature=temperature, seed=seed)
        said, last = asyncio.run(_say(ready, ids, params))
        print()
        messages.append({"role": "assistant", "content": said})
        if last is not None:
            _err.print(f"[dim]{_figures(last)}[/dim]")


def _asked() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


async def _say(ready: Opened, ids: Sequence[int], params: SamplingParams) -> tuple[str, RequestOutput | None]:
    """Print an answer as it comes; Ctrl-C cuts it short. Returns it, and its last piece."""
    said: list[str] = []
    last: RequestOutput | None = None

    async def follow() -> None:
        nonlocal last
        stream: Any = ready.engine.generate(ids, params)
        async with aclosing(stream):
            async for last in stream:
                print(last.text, end="", flush=True)
                said.append(last.text)

    following = asyncio.create_task(follow())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, following.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await following
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return "".join(said), last


def _figures(last: RequestOutput) -> str:
    first_s = last.times.first_token_s or 0.0
    pace = (last.output_tokens - 1) / (last.times.total_s - first_s) if last.output_tokens > 1 else 0.0
    reused = f"{last.cached_tokens.total:,} of {last.prompt_tokens:,} prompt tokens reused"
    return f"{reused}, first token after {first_s:.2f} s, then {pace:.1f} tokens a second"
