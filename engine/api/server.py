"""The HTTP server: who may ask, what about, and what becomes of a request from its body to its answer.

Covers routes, admission, lengths, draining, clients that go away. Leaves computing to the engine. Always true: every
error has OpenAI's shape; a request that ends, however it ends, leaves nothing running in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, Protocol, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestPayloadError

from forebay.engine import errors as engine_errors
from forebay.engine.api import errors
from forebay.engine.api.answers import Answers, ChatAnswers, Choice, CompletionAnswers, usage
from forebay.engine.api.bodies import Chat, Completion, Detokenize, Generation, Message, Tokenize, decode
from forebay.engine.api.errors import ApiError, bad_request, json_response
from forebay.engine.api.keys import ApiKeys
from forebay.engine.api.metrics import CONTENT_TYPE, ServerMetrics
from forebay.engine.api.streaming import EventStream
from forebay.engine.model_errors import DamagedModel, NoChatTemplate
from forebay.engine.outputs import RequestOutput
from forebay.engine.params import SamplingParams
from forebay.engine.stats import EngineStats
from forebay.engine.tokenizer import BadChat, Tokenizer

log = logging.getLogger(__name__)
_peers = logging.getLogger("forebay.engine.peers")  # what aiohttp has to say; its own logger no one set up

MAX_BODY_BYTES: Final = 16 << 20
BODY_SILENCE_S: Final = 10.0  # the longest in the middle of a body
CLOSE_S: Final = 1.0
LONG_TEXT: Final = 1 << 14  # characters, from which on the tokenizer works beside the event loop
CHARACTERS_A_TOKEN: Final = 32  # of the context: longer texts aren't tokenized; languages and code have 2 to 5
MESSAGE_CHARACTERS: Final = 16  # what a message weighs beside its text
LONG_TEXTS: Final = 2  # tokenized at a time, since each may take hundreds of MB
MAX_RETRY_AFTER_S: Final = 60

T = TypeVar("T", bound=msgspec.Struct)


class Engine(Protocol):
    """What the server asks of an AsyncEngine."""

    @property
    def limit_tokens(self) -> int: ...

    @property
    def healthy(self) -> bool: ...

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None, *, choice: int = 0
    ) -> AsyncIterator[RequestOutput]: ...

    def stats(self) -> EngineStats: ...

    async def clear_cache(self) -> int: ...


class ApiServer:
    """Serves an engine until stopped.

    Args:
        model: the name that requests call it by. keys: none serves this machine only, so `host` must be a loopback address.
        store_stats: the prefix store's numbers, for /metrics.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        model: str,
        keys: ApiKeys,
        host: str = "127.0.0.1",
        port: int = 0,
        store_stats: Callable[[], Mapping[str, Any]] | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._engine, self._tokenizer, self._model, self._keys = engine, tokenizer, model, keys
        self._host, self._port = host, port
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._metrics = ServerMetrics(engine.stats, store_stats, lambda: self._in_flight)
        self._runner: web.AppRunner | None = None
        self._draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._long_texts = asyncio.Semaphore(LONG_TEXTS)
        self._ends: deque[float] = deque(maxlen=32)  # when completions ended, for Retry-After

    async def start(self) -> None:
        """Bind and serve. Raises: OSError: the address can't be had."""
        app = web.Application(middlewares=[self._guarded], client_max_size=self._max_body_bytes)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._one_model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/reset_prefix_cache", self._reset_prefix_cache)
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_peers,
            handle_signals=False,
            shutdown_timeout=CLOSE_S,
            lingering_time=CLOSE_S,
            handler_cancellation=True,  # whoever is gone needs no answer
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port, backlog=1024)
            await site.start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner = runner
        self._port = runner.addresses[0][1]  # the one the system chose, when asked for 0

    @property
    def url(self) -> str:
        return f"http://[{self._host}]:{self._port}" if ":" in self._host else f"http://{self._host}:{self._port}"

    def routes(self) -> set[tuple[str, str]]:
        """(method, path) of all of them, while it serves."""
        assert self._runner is not None
        routes = self._runner.app.router.routes()
        return {
            (route.method, route.resource.canonical) for route in routes if route.resource and route.method != "HEAD"
        }

    async def drain(self, timeout_s: float) -> bool:
        """Refuse what is new, and wait for what has begun. Returns whether all of it ended in time."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._in_flight == 0

    async def stop(self) -> None:
        """Stop listening and end what is open. Idempotent."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    # --- routes -------------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        if self._draining:
            return json_response({"status": "draining"}, status=503)
        if not self._engine.healthy:
            return json_response({"status": "failed"}, status=503)
        return json_response({"status": "ok"})

    async def _metrics_text(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return json_response(self._described())

    def _described(self) -> dict[str, Any]:
        about = {"id": self._model, "object": "model", "created": self._created, "owned_by": "forebay"}
        return about | {"max_model_len": self._engine.limit_tokens}

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request, Tokenize)
        self._check_model(body.model)
        if body.messages is not None:
            ids = await self._chat_ids(body.messages)
        else:
            ids = await self._text_ids(body.prompt or "", "prompt")
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": self._engine.limit_tokens})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request, Detokenize)
        self._check_model(body.model)
        self._check_ids(body.tokens, "tokens")
        return json_response({"prompt": self._tokenizer.decode(body.tokens, skip_special=False)})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        """Forget the prefixes in the engine's own pool, as far as no request uses them. The store keeps its own."""
        return json_response({"blocks": await self._engine.clear_cache()})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, Completion)
        self._check_model(body.model)
        prompts = body.prompts()
        choices: list[Choice] = []
        for number, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                ids, echo = await self._text_ids(prompt, "prompt"), prompt
            else:
                self._check_ids(prompt, "prompt")
                ids, echo = prompt, self._tokenizer.decode(prompt, skip_special=False) if body.echo else ""
            if not ids:
                raise bad_request("is empty", "prompt")
            self._new_tokens(body, len(ids))  # before the next one is looked at
            for _ in range(body.choices):
                choices.append(Choice(len(choices), number, ids, echo if body.echo else ""))
        answers = CompletionAnswers(
            self._model,
            self._tokenizer,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            usage=body.wants_usage,
        )
        return await self._complete(request, body, choices, answers)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, Chat)
        self._check_model(body.model)
        ids = await self._chat_ids(body.messages)
        answers = ChatAnswers(
            self._model,
            self._tokenizer,
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            usage=body.wants_usage,
        )
        return await self._complete(request, body, [Choice(i, 0, ids) for i in range(body.choices)], answers)

    # --- a completion -------------------------------------------------------------------------------------------------

    async def _complete(
        self, request: web.Request, body: Generation, choices: list[Choice], answers: Answers
    ) -> web.StreamResponse:
        if self._draining:
            raise errors.draining()
        longest = max(len(choice.prompt_ids) for choice in choices)
        params = body.sampling(self._new_tokens(body, longest))
        self._in_flight += 1
        self._idle.clear()
        started = time.monotonic()
        try:
            if body.stream:
                response = await self._stream(request, choices, params, answers, body.wants_usage)
            else:

                async def keep(choice: Choice, output: RequestOutput) -> None:
                    choice.add(output)

                await self._follow_all(choices, params, keep)
                response = json_response(answers.whole(choices, usage(choices)))
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        self._ends.append(time.monotonic())
        if (first := choices[0].last) is not None:
            self._metrics.completed(first.times.first_token_s, time.monotonic() - started)
        return response

    def _new_tokens(self, body: Generation, prompt_tokens: int) -> int:
        """How many tokens a choice may have. Raises: ApiError: they don't fit beside the prompt."""
        limit = self._engine.limit_tokens
        wanted, name = body.wanted_tokens
        if prompt_tokens >= limit:
            raise errors.context_length_exceeded(
                f"the context takes {limit} tokens, and the prompt has {prompt_tokens}",
                "messages" if isinstance(body, Chat) else "prompt",
            )
        if wanted is None:
            return limit - prompt_tokens
        if wanted > 0 and prompt_tokens + wanted > limit:
            raise errors.context_length_exceeded(
                f"the context takes {limit} tokens, and the prompt has {prompt_tokens}: {wanted} more don't fit", name
            )
        return wanted

    async def _stream(
        self,
        request: web.Request,
        choices: list[Choice],
        params: SamplingParams,
        answers: Answers,
        wants_usage: bool,
    ) -> web.StreamResponse:
        events = EventStream(request)

        async def tell(choice: Choice, output: RequestOutput) -> None:
            said = [answers.opening(choice) if choice.last is None else None, answers.chunk(choice, output)]
            choice.add(output)
            for chunk in said:
                if chunk is not None:
                    await events.send(chunk)

        keeping_alive = asyncio.create_task(events.keep_alive())
        try:
            await self._follow_all(choices, params, tell)
            if wants_usage:
                await events.send(answers.closing(usage(choices)))
            await events.end()
        except (ApiError, engine_errors.EngineError) as exc:
            if not events.begun:
                raise
            await events.end(self._translated(exc))
        except (ConnectionError, TimeoutError):
            log.info("a client stopped reading its stream")
        finally:
            keeping_alive.cancel()
        return events.response

    async def _follow_all(
        self, choices: Sequence[Choice], params: SamplingParams, sink: Callable[[Choice, RequestOutput], Any]
    ) -> None:
        """All choices side by side. The first that fails ends the others. Raises: ApiError, EngineError, ConnectionError."""
        try:
            async with asyncio.TaskGroup() as group:
                numbers: dict[int, int] = {}
                for choice in choices:
                    number = numbers[choice.prompt] = numbers.get(choice.prompt, -1) + 1
                    group.create_task(self._follow(choice, number, params, sink))
        except ExceptionGroup as failed:  # not except*: what is raised in one becomes a group again
            raise failed.exceptions[0] from None

    async def _follow(
        self, choice: Choice, number: int, params: SamplingParams, sink: Callable[[Choice, RequestOutput], Any]
    ) -> None:
        stream: Any = self._engine.generate(choice.prompt_ids, params, choice=number)
        async with aclosing(stream):  # whatever ends this, the engine hears of it
            async for output in stream:
                if output.finish_reason in ("abort", "error"):
                    raise output.error or engine_errors.EngineClosed("aborted")
                await sink(choice, output)

    # --- checks -------------------------------------------------------------------------------------------------------

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        if (request.content_length or 0) > self._max_body_bytes:
            raise errors.too_large(self._max_body_bytes)
        found = bytearray()
        while True:
            try:
                async with asyncio.timeout(BODY_SILENCE_S):
                    chunk = await request.content.readany()
            except TimeoutError:
                raise errors.too_slow() from None
            except (RequestPayloadError, HttpProcessingError) as exc:
                raise bad_request("the body is not what its headers say", code="invalid_body") from exc
            if not chunk:
                return decode(bytes(found), kind)
            found += chunk
            if len(found) > self._max_body_bytes:
                raise errors.too_large(self._max_body_bytes)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._model):
            raise errors.unknown_model(self._model)

    def _check_ids(self, ids: Sequence[int], param: str) -> None:
        if len(ids) > self._engine.limit_tokens:
            raise errors.context_length_exceeded(
                f"the context takes {self._engine.limit_tokens} tokens, and here are {len(ids)}", param
            )
        if not all(0 <= each < self._tokenizer.vocab_size for each in ids):
            raise bad_request(f"token ids are 0 to {self._tokenizer.vocab_size - 1}", param)

    async def _text_ids(self, text: str, param: str) -> list[int]:
        return await self._tokenized(lambda: self._tokenizer.encode_prompt(text), len(text), param)

    async def _tokenized(self, encode: Callable[[], list[int]], characters: int, param: str) -> list[int]:
        """`encode` of a text of that length. Raises: ApiError: there is no point in trying."""
        limit = self._engine.limit_tokens
        if characters > limit * CHARACTERS_A_TOKEN:
            raise errors.context_length_exceeded(
                f"the context takes {limit} tokens, so texts of up to {limit * CHARACTERS_A_TOKEN} characters are read: "
                f"this one has {characters}",
                param,
            )
        if characters < LONG_TEXT:
            return encode()
        async with self._long_texts:
            return await asyncio.to_thread(encode)

    async def _chat_ids(self, messages: list[Message]) -> list[int]:
        if len(messages) > self._engine.limit_tokens:
            raise errors.context_length_exceeded("there are more messages than the context takes tokens", "messages")
        plain = [message.plain(index) for index, message in enumerate(messages)]
        characters = sum(MESSAGE_CHARACTERS + sum(map(len, message.values())) for message in plain)
        try:
            return await self._tokenized(lambda: self._tokenizer.encode_chat(plain), characters, "messages")
        except NoChatTemplate as exc:
            message = "this model has no chat template: ask /v1/completions"
            raise bad_request(message, "messages", "no_chat_template") from exc
        except DamagedModel as exc:
            message = "this model's chat template can't be read: ask /v1/completions"
            raise bad_request(message, "messages", "no_chat_template") from exc
        except BadChat as exc:
            raise bad_request("the model's chat template refuses these messages", "messages", "bad_chat") from exc

    # --- errors -------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keys first, then the handler, and every exception of it as an answer."""
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "none"
        try:
            if route != "/health":
                self._keys.check(request)
            response = await handler(request)
        except (ApiError, engine_errors.EngineError) as exc:
            response = self._translated(exc).response()
        except web.HTTPException as exc:
            response = _http_error(request, exc).response()
        except ConnectionError:
            response = bad_request("the connection ended inside the body").response()  # nobody is left to read it
        except Exception:
            log.exception("request failed", extra={"route": route})
            response = errors.failed().response()
        if not response.prepared:
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.headers["Cache-Control"] = "no-store"
        self._metrics.answered(route, response.status)
        return response

    def _translated(self, exc: ApiError | engine_errors.EngineError) -> ApiError:
        if isinstance(exc, ApiError):
            return exc
        if isinstance(exc, engine_errors.PromptTooLong):
            return errors.context_length_exceeded(str(exc))
        if isinstance(exc, engine_errors.BadPrompt):
            return bad_request(str(exc), "prompt")
        if isinstance(exc, engine_errors.QueueFull):
            return errors.queue_full(self._retry_after_s())
        if isinstance(exc, engine_errors.EngineClosed):
            return errors.draining() if self._draining else errors.failed("the engine has stopped", "engine_stopped")
        if isinstance(exc, engine_errors.BadLogits):
            return errors.failed("the model computed a value that is not finite", "bad_logits")
        log.error("the engine failed a request", extra={"error": type(exc).__name__})
        return errors.failed()

    def _retry_after_s(self) -> int:
        """About when the next place in the queue gets free, by how quickly completions ended lately."""
        if len(self._ends) < 2:
            return 1
        each_s = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(each_s)))


def _http_error(request: web.Request, exc: web.HTTPException) -> ApiError:
    if isinstance(exc, web.HTTPMethodNotAllowed):
        message = f"this path takes {', '.join(sorted(exc.allowed_methods))}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": exc.headers["Allow"]})
    if isinstance(exc, web.HTTPNotFound):
        paths = sorted({route.resource.canonical for route in request.app.router.routes() if route.resource})
        return ApiError(404, f"no such path; there are {', '.join(paths)}", code="not_found")
    return ApiError(exc.status, exc.reason, code=exc.reason.lower().replace(" ", "_"))


def _no_fault_of_ours(record: logging.LogRecord) -> bool:
    """A logging filter: bytes that are no HTTP are answered with 400 and are no event; aiohttp would log them, too."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ConnectionError)


_peers.addFilter(_no_fault_of_ours)
