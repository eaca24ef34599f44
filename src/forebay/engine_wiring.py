"""A bundled engine put together from what a command line says: model, store, engine; and one served from start to exit.

Always true: what was opened is closed again in reverse order, whatever failed; the first SIGTERM or SIGINT drains, a second
one ends the process at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forebay.clients import Client
from forebay.engine.api.keys import ApiKeys
from forebay.engine.api.server import ApiServer
from forebay.engine.async_engine import AsyncEngine
from forebay.engine.config import EngineConfig
from forebay.engine.loading import LoadedModel, load_model
from forebay.engine.model_errors import DamagedModel
from forebay.engine_adapter.bundled import ForebayPrefixStore, connect, namespace_facts, prefill_prior
from forebay.kvstore.errors import ClientError
from forebay.kvstore.secretfile import read_secret_file
from forebay.server.notify import notify
from forebay.serving import allow_descriptors

log = logging.getLogger(__name__)

API_KEY_VARIABLE: Final = "FOREBAY_ENGINE_API_KEY"
API_KEYS_FILE_VARIABLE: Final = "FOREBAY_ENGINE_API_KEYS_FILE"
FIND_DAEMON_S: Final = 1.0


@dataclass(frozen=True)
class Opened:
    """An engine ready to be asked. `store` is None without one; store_name: which it is, for people."""

    engine: AsyncEngine
    loaded: LoadedModel
    store: ForebayPrefixStore | None
    store_name: str


@contextmanager
def opened(
    model: str, config: EngineConfig, store: str, progress: Callable[[int, int], None] | None = None
) -> Iterator[Opened]:
    """Load a model and open an engine on it.

    Args:
        model: a folder, a GGUF file or a Hugging Face id.
        store: auto (a daemon where one answers, else embedded), none, embedded, or a socket's path or a URL.
    Raises: ModelError, OSError, ValueError, ForebayError.
    """
    with ExitStack() as stack:
        where, name = _where(store, stack)
        loaded = load_model(model, config.precision, config.device, config.threads, progress)
        try:
            loaded.tokenizer.check_template()
        except DamagedModel as exc:  # completions need none
            log.warning("chats will be refused", extra={"error": str(exc)})
        prefixes = None
        if where is not None:
            facts = namespace_facts(
                loaded.config,
                weights_digest=loaded.weights_digest,
                precision=config.precision,
                kv_dtype=loaded.model.kv_dtype,
                block_tokens=config.block_tokens,
                head_groups=loaded.config.kv_heads,
            )
            prior = prefill_prior(loaded.config, config.device)
            engine_id = f"forebay-engine-{os.getpid()}"
            prefixes = connect(where, facts, prior=prior, engine_id=engine_id, device=config.device)
            stack.callback(prefixes.close)
        engine = AsyncEngine(loaded.model, loaded.tokenizer, config, prefixes)
        try:
            yield Opened(engine, loaded, prefixes, name)
        finally:
            asyncio.run(engine.close())


def _where(store: str, stack: ExitStack) -> tuple[str | Path | None, str]:
    """Where the daemon is, and the store's name; None for no store."""
    if store == "none":
        return None, "none"
    if store == "auto":
        try:
            with Client(timeout_s=FIND_DAEMON_S) as client:
                return str(client.address), f"the daemon at {client.address}"
        except ClientError:
            store = "embedded"
    if store == "embedded":
        # Imported here, since it brings the whole daemon.
        from forebay.embedded import EmbeddedDaemon

        return stack.enter_context(EmbeddedDaemon()).socket, "embedded in this process"
    if not store.startswith(("http://", "https://")):
        try:
            Client(store, timeout_s=FIND_DAEMON_S).close()
        except ClientError:
            log.warning("nothing answers there yet: computing without a store until it does", extra={"store": store})
    return store, f"the daemon at {store}"


def api_keys(path: Path | None) -> list[str]:
    """Keys from the file at `path`, else the one that FOREBAY_ENGINE_API_KEYS_FILE names, one a line; with it
    FOREBAY_ENGINE_API_KEY. Raises: ValueError: the file can't be read, others may read it, or there is
    no key where one was named."""
    found = []
    if (key := os.environ.get(API_KEY_VARIABLE)) is not None:
        if not key.strip():  # whoever sets it wants keys: serving without would be the opposite
            raise ValueError(f"{API_KEY_VARIABLE} is set and holds no key")
        found.append(key)
    if path is None and os.environ.get(API_KEYS_FILE_VARIABLE):
        path = Path(os.environ[API_KEYS_FILE_VARIABLE])
    if path is not None:
        lines = read_secret_file(path).decode("utf-8", "replace").splitlines()
        listed = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not listed:
            raise ValueError(f"{path} holds no key")
        found += listed
    return found


def serve(
    ready: Opened, *, model: str, keys: ApiKeys, host: str, port: int, drain_s: float, said: Callable[[str], None]
) -> None:
    """Serve until a signal, then drain. `said`: called with the URL once it answers. Raises: OSError."""
    import uvloop

    allow_descriptors()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(ready, model=model, keys=keys, host=host, port=port, drain_s=drain_s, said=said))


async def _serve(
    ready: Opened, *, model: str, keys: ApiKeys, host: str, port: int, drain_s: float, said: Callable[[str], None]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, number, stop)
    server = ApiServer(
        ready.engine,
        ready.loaded.tokenizer,
        model=model,
        keys=keys,
        host=host,
        port=port,
        store_stats=ready.store.stats if ready.store is not None else None,
    )
    await server.start()
    said(server.url)
    notify(f"READY=1\nSTATUS=serving {server.url}")
    await stop.wait()
    notify(f"STOPPING=1\nSTATUS=draining, at most {drain_s:g} s")
    if not await server.drain(drain_s):
        log.warning("requests were cut off by the end of the drain")
    await ready.engine.close()
    await server.stop()


def _on_signal(number: int, stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(128 + number)  # a drain that hangs must not be able to hold this up
    log.info("draining", extra={"signal": signal.Signals(number).name})
    stop.set()
