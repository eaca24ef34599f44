"""The engine for servers: a thread runs the loop, coroutines of any event loop get their outputs as they come.

Always true: only that thread touches the core, so the pool and the store too; whoever stops listening aborts the request;
every request gets its end, also when the engine itself fails.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from forebay.engine.batch import CausalModel
from forebay.engine.config import EngineConfig, ModelConfig
from forebay.engine.core import EngineCore
from forebay.engine.detokenize import Decoder
from forebay.engine.errors import EngineClosed, EngineError, QueueFull, StepFailed
from forebay.engine.outputs import RequestOutput
from forebay.engine.params import SamplingParams
from forebay.engine.prefix import PrefixStore
from forebay.engine.sequence import Request
from forebay.engine.stats import EngineStats

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class _Listener:
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | EngineError]


class AsyncEngine:
    """Started when it is made.

    Args: as of `EngineCore`. The engine closes the store.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Decoder | None = None,
        config: EngineConfig | None = None,
        store: PrefixStore | None = None,
    ) -> None:
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._unseen = 0  # requests among the commands
        self._listeners: dict[str, _Listener] = {}
        self._closing = False
        self._draining = False
        self._ended = False  # the thread takes no more commands
        self._broken: BaseException | None = None
        made: Future[EngineCore] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(made, lambda: EngineCore(model, tokenizer, config or EngineConfig(), store)),
            name="forebay-engine",
            daemon=True,
        )
        self._thread.start()
        self._core = made.result()

    @property
    def config(self) -> EngineConfig:
        return self._core.config

    @property
    def model_config(self) -> ModelConfig:
        return self._core.model_config

    @property
    def limit_tokens(self) -> int:
        """The most tokens a sequence may have, prompt and output together."""
        return self._core.limit_tokens

    @property
    def closed(self) -> bool:
        return self._closing or not self.healthy

    @property
    def healthy(self) -> bool:
        """Whether the loop runs, or was closed by its owner."""
        return self._broken is None

    def stats(self) -> EngineStats:
        """As of the last step, or what was asked for since."""
        return self._stats

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises: BadPrompt, PromptTooLong."""
        self._core.check_prompt(prompt_ids)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str | None = None, *, choice: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """The answer, piece by piece; the last piece has a finish_reason. Closing the iterator aborts the request.

        choice: for several answers to one prompt, which of them: they differ in what is drawn, also under one seed.
        Raises: at once BadPrompt, PromptTooLong, QueueFull, DuplicateRequest, EngineClosed; later any EngineError.
        """
        self._core.check_prompt(prompt_ids)
        request = Request(request_id or uuid.uuid4().hex, tuple(prompt_ids), params, choice)
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        with self._wake:
            if self.closed:
                raise EngineClosed("the engine is closed") from self._broken
            waiting = self._core.waiting + self._unseen  # as of now; the engine's thread looks again
            if waiting >= self._core.config.max_waiting:
                raise QueueFull(waiting, self._core.config.max_waiting)
            self._unseen += 1
            self._commands.append(lambda: self._add(request, listener))
            self._wake.notify()
        ended = False
        try:
            while not ended:
                output = await listener.queue.get()
                error = output if isinstance(output, EngineError) else output.error
                if error is not None:
                    ended = True
                    raise error
                assert isinstance(output, RequestOutput)
                ended = output.finish_reason is not None
                yield output
        finally:
            if not ended:
                self._command(lambda: self._abort(request.request_id, listener))

    def abort(self, request_id: str) -> None:
        """Whoever listens gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._command(lambda: self._abort(request_id, None))

    async def clear_cache(self) -> int:
        """Forget what the pool keeps of sequences that ended; how many blocks. Raises: EngineClosed."""
        return await self._ask(lambda core: core.clear_cache())

    async def check_idle(self) -> None:
        """Raises: InvariantViolation, if a block or claim did not come back though nothing runs; EngineClosed."""
        await self._ask(lambda core: core.check_idle())

    async def _ask(self, question: Callable[[EngineCore], T]) -> T:
        done: Future[T] = Future()

        def answer() -> None:
            try:
                done.set_result(question(self._core))
            except EngineError as exc:
                done.set_exception(exc)

        if not self._command(answer):
            raise EngineClosed("the engine is closed") from self._broken
        return await asyncio.wrap_future(done)

    async def close(self, *, drain: bool = False, timeout_s: float = 30.0) -> None:
        """Take no more requests; abort those that run, or with `drain` let them end first, for up to `timeout_s`."""
        with self._wake:
            self._closing = True
            self._draining = drain
            self._wake.notify()
        until = time.monotonic() + timeout_s
        await asyncio.to_thread(self._thread.join, timeout_s if drain else None)
        if self._thread.is_alive():
            with self._wake:
                self._draining = False
                self._wake.notify()
            await asyncio.to_thread(self._thread.join, max(1.0, until - time.monotonic()))

    # --- the engine's thread ---

    def _command(self, command: Callable[[], None]) -> bool:
        """Whether it will be carried out."""
        with self._wake:
            if self._ended:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def _run(self, made: Future[EngineCore], make: Callable[[], EngineCore]) -> None:
        try:
            core = make()
        except BaseException as exc:
            made.set_exception(exc)
            return
        self._stats = core.stats()
        made.set_result(core)
        self._core = core
        try:
            while self._next_commands(core):
                try:
                    outputs = core.step()
                except Exception as exc:
                    outputs = self._recover(core, exc)
                self._stats = core.stats()
                self._tell(outputs)
        except Exception as exc:
            self._broken = exc
            _log.exception("the engine stopped")
        finally:
            self._finish(core)

    def _next_commands(self, core: EngineCore) -> bool:
        """Wait while there is nothing to do; carry out what others asked for. Whether to go on."""
        with self._wake:
            pause_s = core.pause_s()
            if not self._commands and not self._closing and pause_s != 0.0:
                self._wake.wait(pause_s)
            commands = list(self._commands)
            self._commands.clear()
            self._unseen = 0
        for command in commands:
            command()
            self._stats = core.stats()
        return not self._closing or (self._draining and core.has_work)

    def _add(self, request: Request, listener: _Listener) -> None:
        try:
            self._core.add(request)
        except EngineError as error:
            self._send(listener, [error])
        else:
            self._listeners[request.request_id] = listener

    def _abort(self, request_id: str, listener: _Listener | None) -> None:
        """listener: only if it is still this one's; another request may have the id by now."""
        if listener is not None and self._listeners.get(request_id) is not listener:
            return
        if (output := self._core.abort(request_id)) is not None:
            self._tell([output])

    def _recover(self, core: EngineCore, exc: Exception) -> list[RequestOutput]:
        """A bug of the engine, or no memory left: all requests end, and if every block came back the engine goes on."""
        _log.error("a step of the engine failed", exc_info=exc)
        error = StepFailed(f"the engine's step failed: {type(exc).__name__}")
        error.__cause__ = exc
        core.count_failed_step()
        outputs = core.fail_all(error)
        core.pool.check()
        return outputs

    def _tell(self, outputs: Sequence[RequestOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, RequestOutput]]] = {}
        for output in outputs:
            listener = self._listeners[output.request_id]
            if output.finish_reason is not None:
                del self._listeners[output.request_id]
            by_loop.setdefault(listener.loop, []).append((listener, output))
        for loop, some in by_loop.items():
            self._hand_over(loop, some)

    def _send(self, listener: _Listener, outputs: Sequence[RequestOutput | EngineError]) -> None:
        self._hand_over(listener.loop, [(listener, output) for output in outputs])

    def _hand_over(
        self, loop: asyncio.AbstractEventLoop, some: Sequence[tuple[_Listener, RequestOutput | EngineError]]
    ) -> None:
        def put() -> None:
            for listener, output in some:
                listener.queue.put_nowait(output)

        try:
            loop.call_soon_threadsafe(put)  # one wake-up a step, however many requests
        except RuntimeError:  # that event loop is closed: nobody listens any more
            for listener, output in some:
                if isinstance(output, RequestOutput) and output.finish_reason is None:
                    self._abort(output.request_id, listener)

    def _finish(self, core: EngineCore) -> None:
        """Every request gets its end, also one that was never looked at."""
        with self._wake:
            self._closing = self._ended = True
            commands = list(self._commands)
            self._commands.clear()
        closed = EngineClosed("the engine was closed")
        closed.__cause__ = self._broken
        for command in commands:
            command()  # an add is refused below, like those that run
        try:
            self._tell(core.fail_all(closed) if self._broken is not None else [])
            core.close()
        except Exception:
            _log.exception("the engine did not close cleanly")
        for listener in self._listeners.values():
            self._send(listener, [closed])
        self._listeners.clear()
        self._stats = core.stats()
