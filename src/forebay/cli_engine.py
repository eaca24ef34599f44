"""`forebay engine`: the bundled engine behind an OpenAI-compatible server, in a terminal, or for one answer.

The work is done by forebay.engine_wiring, imported when a command is run. Always true: answers go to stdout, everything
else to stderr; what a user can act on is a line and an exit code, never a traceback.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from forebay.kvstore.errors import ForebayError

if TYPE_CHECKING:
    from forebay.engine.config import EngineConfig
    from forebay.engine_wiring import Opened

EXTRA = {"torch", "safetensors", "tokenizers", "gguf", "jinja2", "huggingface_hub"}
EXIT_FAILED = 1
THREADS_A_CORE = 4  # more only wait for each other

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Run the bundled engine: paged KV, continuous batching, prefixes that outlive it in Forebay's tiers.

    MODEL is a folder of safetensors, a GGUF file, or a Hugging Face id.

    [bold]Start here[/bold]

      forebay engine chat ./model                  talk to it

      forebay engine serve ./model                 an OpenAI-compatible server

      forebay engine generate ./model "Once upon"  one answer, for scripts""",
)
_err = Console(stderr=True, highlight=False, soft_wrap=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, GGUF file or Hugging Face id.")]
StoreChoice = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="WHERE",
        help="auto (the daemon if one runs, else embedded), none, embedded, a socket's path, or tcp://host:port.",
    ),
]
PrecisionChoice = Annotated[
    str, typer.Option("--precision", metavar="KIND", help="bf16, fp32, fp64, int8 or int4: how weights are multiplied.")
]
PoolBytes = Annotated[str, typer.Option("--pool-bytes", metavar="SIZE", help="Memory for KV blocks, such as 2GiB.")]
MaxContext = Annotated[
    int | None,
    typer.Option("--max-context", min=16, metavar="TOKENS", help="Longest prompt and answer; default the model's."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="To compute with; default all cores.")
]
BlockTokens = Annotated[
    int,
    typer.Option("--block-tokens", min=1, max=1024, metavar="N", help="Tokens a block, in the pool and in the store."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, metavar="N", help="Longest answer.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token always.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed draws the same answer.")]


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Other than loopback only with API keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--served-model-name", metavar="NAME", help="What requests call the model.")
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="API keys, one a line, in a file of mode 0600. [dim]FOREBAY_ENGINE_API_KEYS_FILE[/dim]"
        ),
    ] = None,
    store: StoreChoice = "auto",
    precision: PrecisionChoice = "bf16",
    pool_bytes: PoolBytes = "1GiB",
    max_context: MaxContext = None,
    threads: Threads = None,
    block_tokens: BlockTokens = 64,
    max_sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Requests computed side by side.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that may wait; further ones are answered with 429.")
    ] = 1024,
    step_tokens: Annotated[int, typer.Option(min=16, metavar="N", help="Most tokens in one forward pass.")] = 512,
    drain_s: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Longest drain on SIGTERM.")] = 30.0,
) -> None:
    """Serve an OpenAI-compatible API.

    Without API keys it answers this machine only. A key comes from FOREBAY_ENGINE_API_KEY, or several from a file; never
    from the command line, which every user of the machine can read.

    [bold]Examples[/bold]

      forebay engine serve ./model

      forebay engine serve ./model.gguf --precision int8 --port 0 --store none

      FOREBAY_ENGINE_API_KEY=$(cat key) forebay engine serve ./model --host 0.0.0.0

      curl localhost:8000/v1/completions -d '{"model": "model", "prompt": "Once upon"}'

    SIGTERM or SIGINT finishes what has begun, for --drain-s seconds; a second one exits at once.
    """
    with _reported():
        from forebay import engine_wiring
        from forebay.engine.api.keys import ApiKeys, is_loopback

        try:
            keys = ApiKeys(engine_wiring.api_keys(api_keys_file))
        except ValueError as exc:
            raise typer.BadParameter(str(exc), param_hint="API keys") from exc
        if not keys and not is_loopback(host):
            message = "other machines can reach that: give API keys (FOREBAY_ENGINE_API_KEY or --api-keys-file)"
            raise typer.BadParameter(message, param_hint="--host")
        config = _config(
            precision, pool_bytes, max_context, threads, block_tokens,
            max_sequences=max_sequences, max_waiting=max_waiting, step_tokens=step_tokens,
        )  # fmt: skip
        with _opened(model, config, store, log_level="info") as ready:
            served = name or ready.loaded.name

            def said(url: str) -> None:
                _err.print(f"[bold]{escape(served)}[/bold] at {escape(url)}/v1, store: {escape(ready.store_name)}")

            engine_wiring.serve(ready, model=served, keys=keys, host=host, port=port, drain_s=drain_s, said=said)


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.7,
    seed: Seed = None,
    store: StoreChoice = "auto",
    precision: PrecisionChoice = "bf16",
    pool_bytes: PoolBytes = "1GiB",
    max_context: MaxContext = None,
    threads: Threads = None,
    block_tokens: BlockTokens = 64,
) -> None:
    """Talk to a model in the terminal. An empty line or Ctrl-D ends it, Ctrl-C cuts an answer short.

    [bold]Example[/bold]  forebay engine chat ./model --precision int8
    """
    with _reported():
        from forebay import engine_talk

        config = _config(precision, pool_bytes, max_context, threads, block_tokens)
        with _opened(model, config, store) as ready:
            engine_talk.chat(ready, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from; - reads it from stdin.")],
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the answer; several times.")] = None,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message, not text to go on from.")
    ] = False,
    store: StoreChoice = "auto",
    precision: PrecisionChoice = "bf16",
    pool_bytes: PoolBytes = "1GiB",
    max_context: MaxContext = None,
    threads: Threads = None,
    block_tokens: BlockTokens = 64,
) -> None:
    """Print one answer as it comes.

    [bold]Examples[/bold]

      forebay engine generate ./model "def fibonacci(n):" --max-tokens 64

      forebay engine generate ./model --chat - < question.txt
    """
    with _reported():
        from forebay import engine_talk

        config = _config(precision, pool_bytes, max_context, threads, block_tokens)
        text = sys.stdin.read() if prompt == "-" else prompt
        with _opened(model, config, store) as ready:
            engine_talk.generate(
                ready, text, as_chat=as_chat, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or []
            )


def _config(
    precision: str, pool_bytes: str, max_context: int | None, threads: int | None, block_tokens: int, **more: Any
) -> EngineConfig:
    from typing import get_args

    from forebay.engine.config import EngineConfig, Precision
    from forebay.server.settings import parse_bytes

    if precision not in get_args(Precision):
        raise typer.BadParameter(f"there are {', '.join(get_args(Precision))}", param_hint="--precision")
    most = THREADS_A_CORE * (os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise typer.BadParameter(f"this machine has {os.cpu_count()} cores: at most {most}", param_hint="--threads")
    try:
        size = parse_bytes(pool_bytes)
    except ValueError as exc:
        raise typer.BadParameter(f"{pool_bytes!r} {exc}", param_hint="--pool-bytes") from exc
    return EngineConfig(
        precision=precision,  # type: ignore[arg-type]  # checked above
        pool_bytes=size,
        max_context_tokens=max_context,
        threads=threads,
        block_tokens=block_tokens,
        **more,
    )


@contextmanager
def _opened(model: str, config: EngineConfig, store: str, log_level: str = "warning") -> Iterator[Opened]:
    from forebay import engine_wiring
    from forebay.kvstore.address import parse_address
    from forebay.server import logs

    if store not in ("auto", "none", "embedded") and not store.startswith(("http://", "https://")):
        try:
            parse_address(store)
        except ValueError as exc:
            raise typer.BadParameter(str(exc), param_hint="--store") from exc
    logs.set_up(log_level, "text")
    with ExitStack() as stack:
        with _progress(f"loading {Path(model).name}") as progress:
            ready = stack.enter_context(engine_wiring.opened(model, config, store, progress))
        yield ready


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on stderr, where that is a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _reported() -> Iterator[None]:
    """Turn the errors a user can act on into a line and an exit code; let bugs show their traceback."""
    from forebay.engine.errors import EngineError
    from forebay.engine.model_errors import ModelError
    from forebay.engine.params import BadParams

    try:
        yield
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in EXTRA:
            raise
        _fail(f"the engine needs {exc.name}, which its extra brings: pip install 'forebay[engine]'")
    except (ModelError, EngineError, ForebayError, BadParams) as exc:
        _fail(str(exc))
    except ValueError as exc:
        if not hasattr(exc, "problems"):  # forebay.server.settings.BadSettings, of the embedded daemon
            raise
        _fail(str(exc))
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            _fail("that port is taken: choose another with --port, or 0 for any free one")
        where = f"{exc.filename}: " if exc.filename else ""
        _fail(f"{where}{os.strerror(exc.errno) if exc.errno else exc}")


def _fail(message: str) -> None:
    for line in message.splitlines():
        _err.print(f"[red]forebay:[/red] {escape(line)}")
    raise typer.Exit(EXIT_FAILED)
