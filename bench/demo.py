"""The story Forebay exists for, on a real model: a second turn whose prefix outlives the engine that computed it.

A user sends a small web project and asks for a change; the second turn only says where the login button should go. That
second turn runs (a) cold, Forebay off; (b) warm, in the same process, which keeps no KV of its own; (c) warm, in another
engine process; (e) warm, in one that reaches the daemon over TCP. Prints a table, saves a chart and all raw numbers. Always
true: it fails if a warm output breaks the rule (fp32: identical; bf16: a first difference at a near tie only), and no model
loading is in any time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import secrets
import signal
import socket as socketlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fetch_model import FetchError, cache_dir, unpacked_model
from rich.console import Console
from rich.table import Table

from forebay.clients import Client
from forebay.kvstore.errors import ClientError

HERE = Path(__file__).resolve().parent
GOALS = {"bf16": 5.0, "fp32": 12.0}  # times sooner to the first token, on two cores
NETWORK_GOAL = 5.0  # the same for (e), in either precision
START_LIMIT_S = 300.0
REQUEST_LIMIT_S = 900.0
Message = dict[str, str]

SYSTEM = "You are a careful web developer. Change only what is asked, and show the lines that you changed."
SECOND_TURN = "Move the login button to the top right."
UNRELATED = [
    "Say in one sentence what a lighthouse is for.",
    "Explain to a new colleague how a bakery plans its night: when the ovens are lit, why the dough rests, who checks the "
    "flour, how the loaves are counted, and what happens when a machine stops at three in the morning. " * 4,
]


class DemoFailed(RuntimeError):
    """The story could not be told to its end; the message says why."""


def first_turn() -> list[Message]:
    files = [HERE / "demo_site" / name for name in ("index.html", "styles.css", "app.js")]
    project = "\n\n".join(f"{f.name}:\n```{f.suffix[1:]}\n{f.read_text()}```" for f in files)
    ask = f"Here is my web project.\n\n{project}\n\nMake the title a little larger."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}]


class EngineProcess:
    """An engine in a process of its own, spoken to in lines of JSON."""

    def __init__(self, name: str, log: Path, arguments: list[str], environ: dict[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "demo_engine.py"), "--name", name, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", **environ},
            )

    def wait_ready(self) -> None:
        self._read(START_LIMIT_S)

    def ask(self, op: str, **fields: Any) -> Any:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # then the read below says what became of it
            self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self.process.stdin.flush()
        return self._read(REQUEST_LIMIT_S)

    def _read(self, limit_s: float) -> Any:
        assert self.process.stdout is not None
        late = threading.Timer(limit_s, self.process.kill)
        late.start()
        try:
            line = self.process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise DemoFailed(f"engine {self.name} ended or took over {limit_s:.0f} s; its log ends with:\n{tail}")
        return json.loads(line)

    def stop(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        _stop(self.process)


def _stop(process: subprocess.Popen[Any]) -> None:
    """Ask it to end, then make it."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socketlib.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def network_settings(port: int, token: str) -> str:
    """A settings file: TCP for who has the token, the Unix socket for who may open it."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return (
        f'tcp_port = {port}\nunix_rights = ["read", "write"]\n'
        f'[credentials.demo]\ntenant = "default"\nrights = ["read", "write"]\ntoken_sha256 = "{digest}"\n'
    )


@contextmanager
def daemon(socket: Path, log: Path, ram_bytes: str, settings: str) -> Iterator[None]:
    """`forebay serve` on `socket`, with a settings file that says this, until the end of the block."""
    config = socket.with_name("settings.toml")
    config.write_text(settings)
    command = [
        sys.executable,
        "-m",
        "forebay",
        "serve",
        "--socket",
        str(socket),
        "--http-port",
        "off",
        "--ssd-bytes",
        "0",
        "--config",
        str(config),
    ]
    with log.open("ab") as sink:
        process = subprocess.Popen([*command, "--ram-bytes", ram_bytes], stdout=sink, stderr=sink)
    try:
        limit = time.monotonic() + 30
        while True:
            try:
                Client(socket, timeout_s=1.0).close()
                break
            except ClientError as exc:
                if process.poll() is not None or time.monotonic() > limit:
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                    raise DemoFailed(f"the daemon did not start ({exc}); its log ends with:\n{tail}") from exc
                time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        _stop(process)


def tell(precision: str, options: argparse.Namespace, out: Path, console: Console) -> dict[str, Any]:
    """Run the story in one precision. Returns its raw numbers."""
    with ExitStack() as stack:
        socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-demo-"))) / "forebay.sock"
        status = stack.enter_context(console.status(f"{precision}: starting the daemon"))
        port, token = free_port(), secrets.token_urlsafe(32)
        log = out / f"daemon-{precision}.log"
        stack.enter_context(daemon(socket, log, options.ram_bytes, network_settings(port, token)))
        status.update(f"{precision}: three engine processes load the model")
        shared = ["--model", str(options.model), "--precision", precision]
        shared += ["--block-tokens", str(options.block_tokens), "--threads", str(options.threads)]
        over_tcp = f"tcp://127.0.0.1:{port}"
        engines = []
        for name, where in (("A", str(socket)), ("B", str(socket)), ("C", over_tcp)):
            log = out / f"engine-{name}-{precision}.log"
            environ = {"FOREBAY_TOKEN": token} if where == over_tcp else {}
            engine = EngineProcess(name, log, [*shared, "--socket", where], environ)
            stack.callback(engine.stop)
            engines.append(engine)
        for engine in engines:
            engine.wait_ready()
        first, second, remote = engines

        def turn(engine: EngineProcess, messages: list[Message], **how: Any) -> Any:
            fields = {"new": options.new_tokens, "forebay": True, "store": False, "reference": False} | how
            return engine.ask("generate", messages=messages, **fields)

        status.update(f"{precision}: warming the engines with unrelated prompts")
        for engine in engines:
            for text in UNRELATED:
                turn(engine, [{"role": "user", "content": text}], new=2)
        status.update(f"{precision}: first turn, the web project (computed and stored by engine A)")
        messages = first_turn()
        answer = turn(first, messages, store=True)
        messages += [{"role": "assistant", "content": answer["text"]}, {"role": "user", "content": SECOND_TURN}]
        status.update(f"{precision}: (a) second turn, cold, Forebay off")
        cold = turn(first, messages, forebay=False, reference=True)
        status.update(f"{precision}: (b), (c) and (e) second turn, warm, in engines A and B, and in C over TCP")
        runs = {"b": [], "c": [], "e": []}
        for _ in range(options.repeats):
            runs["b"].append(turn(first, messages))
            runs["c"].append(turn(second, messages))
            runs["e"].append(turn(remote, messages))
        verdicts = {}
        for name, results in runs.items():
            split = max(1, results[0]["reuse"]["tokens"])
            verdicts[name] = [first.ask("judge", warm=r["tokens"], split=split) for r in results]
    return {"precision": precision, "first_turn": answer, "cold": cold, "warm": runs, "verdicts": verdicts}


def summarise(story: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a run: medians of times; an output is right only if all repeats were."""
    rows = [_row("a", "cold, Forebay off", [story["cold"]], [])]
    rows.append(_row("b", "warm, same process", story["warm"]["b"], story["verdicts"]["b"]))
    rows.append(_row("c", "warm, other process", story["warm"]["c"], story["verdicts"]["c"]))
    rows.append(_row("e", "warm, over TCP", story["warm"]["e"], story["verdicts"]["e"]))
    for row in rows:
        row["speedup"] = rows[0]["ttft_s"] / row["ttft_s"]
    return rows


def _row(key: str, name: str, results: list[Any], verdicts: list[Any]) -> dict[str, Any]:
    def median(*path: str) -> float:
        values = []
        for result in results:
            value = result
            for part in path:
                value = value[part]
            values.append(value)
        return float(statistics.median(values))

    worst = min(verdicts, key=lambda v: (v["ok"], v["difference"] is None), default=None)
    return {
        "key": key,
        "name": name,
        "ttft_s": median("timings", "ttft_s"),
        "prefill_s": median("timings", "prefill_s"),
        "load_s": median("timings", "load_s"),
        "predicted_load_s": median("reuse", "predicted_load_s"),
        "reused_tokens": int(median("reuse", "tokens")),
        "prompt_tokens": results[0]["prompt_tokens"],
        "bytes": int(median("reuse", "payload_bytes")),
        "tiers": results[0]["reuse"]["tiers"],
        "miss": results[0]["reuse"]["miss"],
        "ok": all(v["ok"] for v in verdicts),
        "output": worst["text"] if worst else "the reference",
        "identical": bool(verdicts) and all(v["difference"] is None for v in verdicts),
    }


def show(console: Console, precision: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"Second turn in {precision}: {SECOND_TURN!r}", title_justify="left")
    for column in ("run", "first token", "sooner", "tokens reused", "bytes, tier", "load", "predicted", "output equal"):
        table.add_column(column, justify="left" if column in ("run", "output equal") else "right")
    for row in rows:
        warm = row["key"] != "a"
        tiers = ", ".join(f"{tier}" for tier in row["tiers"]) or row["miss"]
        equal = "-" if not warm else "yes" if row["identical"] else "near tie" if row["ok"] else "NO"
        table.add_row(
            f"({row['key']}) {row['name']}",
            f"{row['ttft_s'] * 1e3:,.0f} ms",
            f"{row['speedup']:.1f}x" if warm else "",
            f"{row['reused_tokens']:,} of {row['prompt_tokens']:,}",
            f"{row['bytes'] / 2**20:.1f} MiB, {tiers}" if warm else "",
            f"{row['load_s'] * 1e3:.1f} ms" if warm else "",
            f"{row['predicted_load_s'] * 1e3:.1f} ms" if warm else "",
            equal,
        )
    console.print(table)
    for row in rows[1:]:
        if not row["identical"]:
            console.print(f"  ({row['key']}) first difference: {row['output']}")


def draw(path: Path, summaries: dict[str, list[dict[str, Any]]]) -> None:
    """Bars of the time to the first token, loading and computing stacked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(summaries), figsize=(5.2 * len(summaries), 4), squeeze=False)
    for axis, (precision, rows) in zip(axes[0], summaries.items(), strict=True):
        names = [f"({row['key']}) {row['name'].replace(', ', chr(10))}" for row in rows]
        loads, prefills = [row["load_s"] for row in rows], [row["prefill_s"] for row in rows]
        axis.bar(names, loads, label="load from Forebay", color="#0b6e99")
        axis.bar(names, prefills, bottom=loads, label="compute the rest", color="#c9d8e2")
        for i, row in enumerate(rows):
            text = f"{row['ttft_s']:.2f} s" + (f"\n{row['speedup']:.1f}x sooner" if i else "")
            axis.annotate(text, (i, row["ttft_s"]), ha="center", va="bottom")
        axis.set_title(f"{precision}, {rows[0]['prompt_tokens']:,} prompt tokens")
        axis.set_ylabel("seconds to the first token")
        axis.margins(y=0.2)
        axis.legend(loc="upper right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def environment() -> dict[str, Any]:
    """What a reader needs to compare these numbers with others."""
    commit = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    cpu = next((x.split(":")[1].strip() for x in _lines("/proc/cpuinfo") if x.startswith("model name")), "")
    packages = ("forebay", "torch", "transformers", "numpy")
    return {
        "commit": commit.stdout.strip() or None,
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="Results: --out, as PNG and JSON.")
    parser.add_argument("--model", help="path or Hugging Face id (default: the model that fetch_model.py gets)")
    parser.add_argument("--precision", choices=("both", "fp32", "bf16"), default="both")
    parser.add_argument("--small", action="store_true", help="the same story, sooner: short answers, no repeats")
    parser.add_argument("--new-tokens", type=int, help="length of each answer (default 48; 12 with --small)")
    parser.add_argument("--repeats", type=int, help="times each warm run is done, medians count (default 3; 1)")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens a block (default 16)")
    parser.add_argument("--threads", type=int, default=2, help="threads an engine computes with (default 2)")
    parser.add_argument("--ram-bytes", default="1GiB", help="the daemon's memory for blocks (default 1GiB)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "demo")
    parser.add_argument(
        "--min-speedup", nargs="*", default=[], metavar="PRECISION=X", help="fail below, such as bf16=5 fp32=12"
    )
    options = parser.parse_args()
    options.new_tokens = options.new_tokens or (12 if options.small else 48)
    options.repeats = options.repeats or (1 if options.small else 3)
    try:
        options.floors = {name: float(x) for name, x in (text.split("=") for text in options.min_speedup)}
    except ValueError:
        parser.error("--min-speedup takes PRECISION=NUMBER, such as bf16=5 fp32=12")
    return options


def main() -> int:
    options = parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.log"):
        old.unlink()
    try:
        options.model = options.model or unpacked_model(cache_dir(), console)
        wanted = ("bf16", "fp32") if options.precision == "both" else (options.precision,)
        stories = {precision: tell(precision, options, out, console) for precision in wanted}
    except (DemoFailed, FetchError) as exc:
        console.print(f"[red]The demo failed.[/] {exc}")
        return 1
    summaries = {precision: summarise(story) for precision, story in stories.items()}
    failures = []
    for precision, rows in summaries.items():
        show(console, precision, rows)
        speedup = min(row["speedup"] for row in rows[1:] if row["key"] != "e")
        network = min(row["speedup"] for row in rows if row["key"] == "e")
        for name, goal, found in (("", GOALS[precision], speedup), (", over TCP", NETWORK_GOAL, network)):
            reached = "reached" if found >= goal else "NOT reached"
            console.print(f"  goal of {goal:g}x sooner in {precision}{name}: {reached} ({found:.1f}x)")
        console.print()
        failures += [f"{precision} ({r['key']}): {r['output']}" for r in rows[1:] if not r["ok"]]
        floor = options.floors.get(precision, 0.0)
        if speedup < floor:
            failures.append(f"{precision}: {speedup:.1f}x sooner, below {floor:g}x")
    settings = {key: str(value) for key, value in vars(options).items()}
    document = {"environment": environment(), "options": settings, "summary": summaries, "raw": stories}
    (out / "demo.json").write_text(json.dumps(document, indent=1))
    draw(out / "demo.png", summaries)
    console.print(f"Chart: {out / 'demo.png'}   Numbers: {out / 'demo.json'}")
    for failure in failures:
        console.print(f"[red]Failed:[/] {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
