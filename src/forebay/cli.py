"""The `forebay` command: typed options in, tables or JSON out, exit codes that scripts can trust.

Every command does its work elsewhere (forebay.serving, forebay.clients, forebay.bench_*), imported when it is run, so
that `forebay --help` stays quick. Always true: results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forebay import __version__, cli_engine, cli_token
from forebay.kvstore.errors import DaemonTimeout, DaemonUnavailable, ForebayError

if TYPE_CHECKING:
    from forebay.clients import Client

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NO_DAEMON, EXIT_UNHEALTHY, EXIT_DAMAGED = range(6)
EXPLAIN_BATCH = 1024  # keys, the most that one request may ask for
EXIT_CODES = """[bold]Exit codes[/bold]  0 done · 1 failed · 2 wrong usage or settings · 3 no daemon answers \
· 4 the daemon answers and is not healthy or not ready · 5 fsck found damage · 128+n ended by signal n"""

app = typer.Typer(
    name="forebay",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Holds KV blocks in front of inference engines, so that a prefix computed once is never computed again when
    loading it is cheaper.

    [bold]Start here[/bold]

      forebay serve                 run the daemon in the foreground

      forebay status                is it well?

      forebay stats tiers.ram       what has it done?

      forebay config                which settings hold, and where each came from

      forebay engine --help         the bundled engine: a server, a chat, one answer""",
    epilog=EXIT_CODES,
)
bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Measure this machine. Each command starts its own daemon and stops it again.

    Example:  forebay bench local --json""",
    epilog=EXIT_CODES,
)
app.add_typer(bench_app, name="bench")
app.add_typer(cli_engine.app, name="engine", epilog=EXIT_CODES)
app.add_typer(cli_token.app, name="token", epilog=EXIT_CODES)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
ConfigPath = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with settings.")]
SocketPath = Annotated[
    Path | None, typer.Option("--socket", metavar="PATH", help="The daemon's socket. [dim]FOREBAY_SOCKET[/dim]")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.01, help="Longest wait for an answer.")]


def main() -> None:
    """Entry point of the `forebay` script."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(f"forebay {__version__}")
        raise typer.Exit(EXIT_OK)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def serve(
    config: ConfigPath = None,
    socket: Annotated[Path | None, typer.Option(metavar="PATH", help="Unix socket for engines.")] = None,
    socket_mode: Annotated[str | None, typer.Option(metavar="OCTAL", help="Who may connect, such as 0660.")] = None,
    ram_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Most memory for blocks, such as 8GiB.")] = None,
    ssd_bytes: Annotated[str | None, typer.Option(metavar="SIZE", help="Most disk for blocks; 0 uses none.")] = None,
    ssd_dirs: Annotated[str | None, typer.Option(metavar="DIRS", help="Where, with commas, each a disk.")] = None,
    http_host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address of the HTTP door.")] = None,
    http_port: Annotated[
        str | None, typer.Option(metavar="PORT", help="HTTP port; 0 takes a free one, off closes the door.")
    ] = None,
    tiers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Tiers below ram, fastest first, with commas.")
    ] = None,
    write_policy: Annotated[
        str | None,
        typer.Option(metavar="POLICY", help="When to copy to tiers below: clean_ahead, write_through, write_back."),
    ] = None,
    drain_s: Annotated[float | None, typer.Option(metavar="SECONDS", help="Longest drain on SIGTERM.")] = None,
    log_level: Annotated[str | None, typer.Option(metavar="LEVEL", help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(metavar="FORM", help="text or json, on stderr.")] = None,
) -> None:
    """Run the daemon in the foreground.

    Settings come from these flags, then FOREBAY_... variables, then a TOML file, then defaults; the flags are the
    settings one changes most, and `forebay config` lists all of them.

    [bold]Examples[/bold]

      forebay serve --ram-bytes 8GiB

      forebay serve --config /etc/forebay/config.toml --log-format json

      FOREBAY_RAM_BYTES=2GiB forebay serve --http-port 0

    SIGTERM or SIGINT drains and exits with 0; a second one exits at once.
    """
    flags = {name: value for name, value in locals().items() if name != "config"}
    with _reported(as_json=False):
        from forebay.server.settings import Settings

        settings = Settings.load(config, **flags)
        from forebay import serving

        serving.run(settings)


@app.command(epilog=EXIT_CODES)
def status(socket: SocketPath = None, timeout: Timeout = 5.0, as_json: AsJson = False) -> None:
    """Say whether the daemon is well, and if not, why.

    [bold]Example[/bold]  forebay status && start-my-engine
    """
    with _reported(as_json), _client(socket, timeout) as client:
        found = client.stats()
        health = found["health"]
        if as_json:
            _print_json(health)
        else:
            state = "well" if health["ok"] and health["ready"] else "NOT READY" if health["ok"] else "NOT WELL"
            facts = {"state": state} | {f"reason {at}": why for at, why in enumerate(health["reasons"], 1)}
            facts |= {name: value for name, value in found.items() if isinstance(value, str | int | float)}
            facts |= {name: value for name, value in health.items() if name not in ("ok", "ready", "reasons")}
            _print_table(facts.items())
        if not (health["ok"] and health["ready"]):
            raise typer.Exit(EXIT_UNHEALTHY)


@app.command(epilog=EXIT_CODES)
def stats(
    section: Annotated[str, typer.Argument(help="Only this part, such as tiers.ram.")] = "",
    socket: SocketPath = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Print the daemon's counters and gauges; /metrics has the same ones.

    [bold]Examples[/bold]

      forebay stats tiers.ram

      forebay stats --json | jq .sessions
    """
    with _reported(as_json), _client(socket, timeout) as client:
        found: Any = client.stats()
        for part in filter(None, section.split(".")):
            if not isinstance(found, Mapping) or part not in found:
                there = ", ".join(found) if isinstance(found, Mapping) else "a single value"
                raise typer.BadParameter(f"no section {part!r} in {section!r}: there is {there}")
            found = found[part]
        if as_json:
            _print_json(found)
        else:
            _print_table(flatten(found, section))


@app.command(epilog=EXIT_CODES)
def explain(
    namespace: Annotated[str, typer.Argument(help="Namespace id, 32 hex digits.")],
    keys: Annotated[list[str], typer.Argument(help="Block keys, 32 hex digits each; - reads them from stdin.")],
    socket: SocketPath = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Say for each block where it is, or why it isn't anywhere.

    Token ids are user text and are never shown.

    [bold]Example[/bold]  forebay explain 5f0c…e1 91ab…07 22d4…c9
    """
    with _reported(as_json):
        if keys == ["-"]:
            keys = sys.stdin.read().split()
        wanted = [_hex_id("KEYS", key) for key in keys]
        space = _hex_id("NAMESPACE", namespace)
        with _client(socket, timeout) as client:
            url = client.stats()["http_url"]
        found = _ask_explain(url, space, wanted, timeout)
        if as_json:
            _print_json(found)
        else:
            _print_rows(found)


@app.command(epilog=EXIT_CODES)
def purge(
    namespace: Annotated[
        list[str] | None, typer.Argument(help="Namespace ids, 32 hex digits each; none: all of the tenant.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only what was stored longer ago, such as 90s, 12h or 7d.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Another tenant's blocks, for operators.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="Yes, everything: needed where neither id nor age is given.")
    ] = False,
    socket: SocketPath = None,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Forget blocks on all tiers, for good: what is being loaded, copied or written meanwhile doesn't bring them back.

    Needs the right admin where the daemon has credentials. Single blocks are deleted by the client library or over HTTP.

    [bold]Examples[/bold]

      forebay purge 5f0c…e1

      forebay purge --older-than 7d

      forebay purge --all
    """
    with _reported(as_json):
        wanted = [_hex_id("NAMESPACE", each) for each in namespace or []]
        if not (wanted or older_than or every):
            raise typer.BadParameter("name namespaces or an age, or say --all")
        age_s = 0.0 if older_than is None else _seconds(older_than)
        with _client(socket, timeout) as client:
            objects, unlisted = client.purge(wanted, older_than_s=age_s, tenant=tenant)
        if as_json:
            _print_json({"objects": objects, "unlisted": unlisted})
        else:
            _print_table([("objects forgotten", objects)])
            for tier in unlisted:
                print(f"forebay: {tier} can't list what it holds: only what ram knew is gone there", file=sys.stderr)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is not an age: write 90s, 12h or 7d", param_hint="--older-than")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


@app.command(epilog=EXIT_CODES)
def config(
    config: ConfigPath = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print a TOML file to start from.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the settings and show which hold, and where each came from.

    [bold]Examples[/bold]

      forebay config --config forebay.toml      check a file before a restart

      forebay config --toml > forebay.toml      start a file of your own
    """
    with _reported(as_json):
        from forebay.server.settings import Settings

        settings = Settings.load(config)
        shown, origins = settings.shown(), settings.provenance()
        if toml:
            print(settings.as_toml(), end="")
        elif as_json:
            values = settings.model_dump(mode="json")
            _print_json({name: {"value": values[name], "origin": origins[name]} for name in values})
        else:
            rows = (
                {"setting": name, "value": shown[name], "from": origins[name], "meaning": field.description}
                for name, field in Settings.model_fields.items()
            )
            _print_rows(list(rows))


@app.command(epilog=EXIT_CODES)
def fsck(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Directories of the ssd tier.")],
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged and make the index anew.")] = False,
    adopt: Annotated[bool, typer.Option("--adopt", help="Take over a directory of another host first.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read everything in directories of the ssd tier and say what is damaged.

    No daemon may be using them. Without --repair nothing is changed. Exit code 5: damage was found and is still there.

    [bold]Example[/bold]  forebay fsck --repair ~/.cache/forebay
    """
    with _reported(as_json):
        from forebay import fsck as module

        reports = []
        for path in directories:
            with _progress(f"reading {path}") as progress:
                reports.append(module.check(path, repair=repair, take_over=adopt, progress=progress))
        if as_json:
            _print_json([report.as_dict() for report in reports])
        else:
            for report in reports:
                facts = report.as_dict()
                problems, repaired, left = facts.pop("problems"), facts.pop("repaired"), facts.pop("left")
                _print_table(
                    [
                        *facts.items(),
                        *(("problem", p) for p in problems),
                        *(("repaired", r) for r in repaired),
                        *(("left", p) for p in left),
                    ]
                )
        if not all(report.sound for report in reports):
            raise typer.Exit(EXIT_DAMAGED)


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, where that is a terminal."""
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


Quick = Annotated[bool, typer.Option("--quick", help="Few and small rounds: does it work, not how fast.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; figures are medians over them.")]


@bench_app.command(epilog=EXIT_CODES)
def local(
    quick: Quick = False,
    rounds: Rounds = 15,
    size_mib: Annotated[int, typer.Option(min=1, help="Bytes moved in a round, in MiB.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Put, get, acquire and round trips through a daemon, beside a plain memory copy.

    [bold]Example[/bold]  forebay bench local --json > local.json
    """
    _bench("local", as_json, quick=quick, rounds=rounds, size_mib=size_mib)


@bench_app.command(epilog=EXIT_CODES)
def index(
    quick: Quick = False,
    rounds: Rounds = 1000,
    as_json: AsJson = False,
) -> None:
    """Match, acquire and eviction times, memory and pauses at 10^4, 10^5 and 10^6 blocks.

    [bold]Example[/bold]  forebay bench index --quick
    """
    _bench("index", as_json, quick=quick, rounds=rounds)


@bench_app.command(epilog=EXIT_CODES)
def net(
    quick: Quick = False,
    rounds: Rounds = 15,
    size_mib: Annotated[int, typer.Option(min=1, help="Bytes moved in a round, in MiB.")] = 128,
    as_json: AsJson = False,
) -> None:
    """Put and get over TCP on this machine, in ratio to bare sockets.

    [bold]Example[/bold]  forebay bench net --json > net.json
    """
    _bench("net", as_json, quick=quick, rounds=rounds, size_mib=size_mib)


@bench_app.command(epilog=EXIT_CODES)
def ssd(
    quick: Quick = False,
    rounds: Rounds = 7,
    size_gib: Annotated[int, typer.Option(min=1, help="Size of the set that is read and written, in GiB.")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks on disk when a killed daemon starts again.")] = 1_000_000,
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder on the disk to measure; default the cache folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The ssd tier beside fio, alone and through a daemon, and the first hit after a kill.

    Needs fio, and three times --size-gib of free disk.

    [bold]Example[/bold]  forebay bench ssd --directory /mnt/nvme --json > ssd.json
    """
    _bench("ssd", as_json, quick=quick, rounds=rounds, size_gib=size_gib, blocks=blocks, directory=directory)


def _bench(name: str, as_json: bool, **options: object) -> None:
    with _reported(as_json):
        found = importlib.import_module(f"forebay.bench_{name}").run(**options)
        if as_json:
            _print_json(found)
        else:
            _print_table(flatten(found))


@contextmanager
def _client(socket: Path | None, timeout_s: float) -> Iterator[Client]:
    from forebay.clients import Client

    try:
        client = Client(socket, timeout_s=timeout_s)
    except ValueError as exc:  # the file that FOREBAY_TOKEN_FILE names
        raise ForebayError(str(exc)) from exc
    with client:
        yield client


def _ask_explain(url: str, namespace: bytes, keys: list[bytes], timeout_s: float) -> list[dict[str, Any]]:
    """Ask the HTTP door: on the session door a namespace is named by its facts, which no operator can type.

    Raises: ForebayError.
    """
    if not url:
        raise ForebayError("explain asks the HTTP door, and this daemon runs with http_port = off")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: never through a proxy
    found: list[dict[str, Any]] = []
    for at in range(0, len(keys), EXPLAIN_BATCH):
        query = f"namespace={namespace.hex()}&keys={','.join(key.hex() for key in keys[at : at + EXPLAIN_BATCH])}"
        try:
            with opener.open(f"{url}/v1/explain?{query}", timeout=timeout_s) as response:
                found += json.load(response)["objects"]
        except urllib.error.HTTPError as exc:
            with exc:
                raise ForebayError(json.load(exc)["error"]["message"]) from exc
        except OSError as exc:  # urllib.error.URLError, TimeoutError
            raise DaemonUnavailable(f"nothing answers at {url}") from exc
    return found


@contextmanager
def _reported(as_json: bool) -> Iterator[None]:
    """Turn the errors a user can act on into a line and an exit code; let bugs show their traceback."""
    try:
        yield
    except (DaemonUnavailable, DaemonTimeout) as exc:
        _fail(as_json, EXIT_NO_DAEMON, f"{exc} (--socket or FOREBAY_SOCKET names its socket)")
    except typer.BadParameter as exc:
        if as_json:
            _print_json({"error": {"exit_code": EXIT_USAGE, "message": exc.message}})
        raise
    except ForebayError as exc:
        _fail(as_json, EXIT_FAILED, str(exc))
    except ValueError as exc:
        if not hasattr(exc, "problems"):  # forebay.server.settings.BadSettings, not imported for every command
            raise
        _fail(as_json, EXIT_USAGE, str(exc))
    except OSError as exc:
        where = f"{exc.filename}: " if exc.filename else ""
        _fail(as_json, EXIT_FAILED, f"{where}{exc.strerror or exc}")


def _fail(as_json: bool, code: int, message: str) -> None:
    if as_json:
        _print_json({"error": {"exit_code": code, "message": message}})
    for line in message.splitlines():
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]forebay:[/red] {escape(line)}")
    raise typer.Exit(code)


def _hex_id(name: str, text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 16:
        raise typer.BadParameter(f"{text!r} is not 32 hex digits", param_hint=name)
    return found


def flatten(value: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted paths."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from flatten(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _console() -> Console:
    # Piped, a table as wide as its content: a cut-off key is of no use to the next program.
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=10_000)


def _print_table(rows: Iterable[tuple[str, Any]]) -> None:
    table = Table.grid(padding=(0, 3))
    for name, value in rows:
        table.add_row(escape(name), escape(_text(value)))
    _console().print(table)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns, box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*(escape(_text(row.get(name, ""))) for name in columns))
    _console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return value if isinstance(value, str) else json.dumps(value)
