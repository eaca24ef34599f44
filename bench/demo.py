"""The story Forebay exists for, on a real model: a second turn whose prefix outlives the engine that computed it.

A user sends a small web project and asks for a change; the second turn only says where the login button should go. That
second turn runs (a) cold, Forebay off; (b) warm, in the same process, which keeps no KV of its own; (c) warm, in another
engine process; (d) warm from the disk, after a flush and a kill -9 of the daemon and of both engines; (e) warm, in an engine
that reaches the daemon over TCP, as from another host. Prints a table, saves a chart and all raw numbers. Always true: it fails
if a warm output breaks the rule (fp32: identical; bf16: a first difference at a near tie only) or if what (d) reused did not
come from the disk, and no model loading is in any time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from socket import create_server
from typing import Any

from fetch_model import FetchError, cache_dir, unpacked_model
from rich.console import Console
from rich.table import Table

from forebay.clients import Client
from forebay.kvstore.errors import ClientError

HERE = Path(__file__).resolve().parent
# Times sooner to the first token, on two cores.
GOALS = {
    "bf16": {"b": 5.0, "c": 5.0, "d": 5.0, "e": 5.0},
    "fp32": {"b": 12.0, "c": 12.0, "d": 10.0, "e": 5.0},
}
FROM_DISK = 0.95  # of what (d) reuses
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

    def __init__(self, name: str, log: Path, arguments: list[str], token: str = "") -> None:
        self.name, self.log = name, log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "demo_engine.py"), "--name", name, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env={**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "FOREBAY_TOKEN": token},
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

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

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


def _network_settings(port: int, token: str) -> str:
    """A settings file: TCP for who has the token, the Unix socket for who may open it."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return (
        f'tcp_port = {port}\nunix_rights = ["read", "write"]\n'
        f'[credentials.demo]\ntenant = "default"\nrights = ["read", "write"]\ntoken_sha256 = "{digest}"\n'
    )


class DaemonProcess:
    """`forebay serve` on a socket, with a directory for its ssd tier."""

    def __init__(self, socket: Path, disk: Path, log: Path, ram_bytes: str) -> None:
        self.socket, self.log = socket, log
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.token = f"tcp://127.0.0.1:{port}", secrets.token_urlsafe(32)
        config = socket.with_name("settings.toml")
        config.write_text(_network_settings(port, self.token))
        self._command = [sys.executable, "-m", "forebay", "serve", "--http-port", "off", "--socket", str(socket)]
        self._command += ["--config", str(config), "--ram-bytes", ram_bytes]
        self._command += ["--ssd-dirs", str(disk), "--ssd-bytes", "2GiB"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self.log.open("ab") as sink:
            process = self._process = subprocess.Popen(self._command, stdout=sink, stderr=sink)
        limit = time.monotonic() + 30
        while True:
            try:
                Client(self.socket, timeout_s=1.0).close()
                return
            except ClientError as exc:
                if process.poll() is not None or time.monotonic() > limit:
                    tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                    raise DemoFailed(f"the daemon did not start ({exc}); its log ends with:\n{tail}") from exc
                time.sleep(0.05)

    def kill(self) -> None:
        """As a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            _stop(self._process)


def tell(precision: str, options: argparse.Namespace, out: Path, console: Console) -> dict[str, Any]:
    """Run the story in one precision. Returns its raw numbers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-demo-")))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disk-", dir=out)))
        status = stack.enter_context(console.status(f"{precision}: starting the daemon"))
        daemon = DaemonProcess(folder / "forebay.sock", disk, out / f"daemon-{precision}.log", options.ram_bytes)
        stack.callback(daemon.stop)
        daemon.start()
        shared = ["--model", str(options.model), "--precision", precision]
        shared += ["--block-tokens", str(options.block_tokens), "--threads", str(options.threads)]

        def engines(*names: str, at: str = str(daemon.socket), token: str = "") -> list[EngineProcess]:
            """Start engines side by side and warm each with unrelated prompts."""
            status.update(f"{precision}: {len(names)} engine process(es) load the model")
            started = []
            for name in names:
                engine = EngineProcess(name, out / f"engine-{name}-{precision}.log", [*shared, "--daemon", at], token)
                stack.callback(engine.stop)
                started.append(engine)
            for engine in started:
                engine.wait_ready()
            status.update(f"{precision}: warming with unrelated prompts")
            for engine in started:
                for text in UNRELATED:
                    turn(engine, [{"role": "user", "content": text}], new=2)
            return started

        def turn(engine: EngineProcess, messages: list[Message], **how: Any) -> Any:
            fields = {"new": options.new_tokens, "forebay": True, "store": False, "reference": False} | how
            return engine.ask("generate", messages=messages, **fields)

        first, second = engines("A", "B")
        status.update(f"{precision}: first turn, the web project (computed and stored by engine A)")
        messages = first_turn()
        answer = turn(first, messages, store=True)
        messages += [{"role": "assistant", "content": answer["text"]}, {"role": "user", "content": SECOND_TURN}]
        status.update(f"{precision}: (a) second turn, cold, Forebay off")
        cold = turn(first, messages, forebay=False, reference=True)
        status.update(f"{precision}: (b) and (c) second turn, warm, in engines A and B")
        runs: dict[str, list[Any]] = {"b": [], "c": [], "d": []}
        for _ in range(options.repeats):
            runs["b"].append(turn(first, messages))
            runs["c"].append(turn(second, messages))
        verdicts = {name: _verdicts(first, runs[name]) for name in ("b", "c")}
        status.update(f"{precision}: (d) flush, then kill -9 of the daemon and both engines")
        flushed = first.ask("flush", messages=messages)
        if flushed["failed"] or flushed["missing"] or not flushed["durable"]:
            raise DemoFailed(f"flush did not make the prefix durable: {flushed}")
        for process in (daemon, first, second):
            process.kill()
        daemon.start()
        (third,) = engines("C")
        for number in range(options.repeats):
            if number:  # what the last turn loaded is in RAM now: only another crash makes it come from the disk again
                daemon.kill()
                daemon.start()
            status.update(f"{precision}: (d) second turn, warm from the disk")
            runs["d"].append(turn(third, messages))
        (fourth,) = engines("D", at=daemon.url, token=daemon.token)
        status.update(f"{precision}: (e) second turn, warm over TCP")
        runs["e"] = [turn(fourth, messages) for _ in range(options.repeats)]
        for name, engine in (("d", third), ("e", fourth)):
            if all(result["tokens"] == cold["tokens"] for result in runs[name]):
                same = {"ok": True, "difference": None, "text": "identical"}
                verdicts[name] = [same] * len(runs[name])
                continue
            status.update(f"{precision}: ({name}) differs from the cold output: computing that again to judge it")
            turn(engine, messages, forebay=False, reference=True)
            verdicts[name] = _verdicts(engine, runs[name])
    return {"precision": precision, "first_turn": answer, "cold": cold, "warm": runs, "verdicts": verdicts}


def _verdicts(engine: EngineProcess, results: list[Any]) -> list[Any]:
    """Judge warm results by the last cold one of that engine."""
    split = max(1, results[0]["reuse"]["tokens"])
    return [engine.ask("judge", warm=result["tokens"], split=split) for result in results]


def summarise(story: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a run: medians of times; an output is right only if all repeats were."""
    rows = [_row("a", "cold, Forebay off", [story["cold"]], [])]
    rows.append(_row("b", "warm, same process", story["warm"]["b"], story["verdicts"]["b"]))
    rows.append(_row("c", "warm, other process", story["warm"]["c"], story["verdicts"]["c"]))
    rows.append(_row("d", "warm, after kill -9", story["warm"]["d"], story["verdicts"]["d"]))
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
        "below_ram": min(_share_below_ram(result["reuse"]["tiers"]) for result in results),
        "miss": results[0]["reuse"]["miss"],
        "ok": all(v["ok"] for v in verdicts),
        "output": worst["text"] if worst else "the reference",
        "identical": bool(verdicts) and all(v["difference"] is None for v in verdicts),
    }


def _share_below_ram(tiers: dict[str, int]) -> float:
    """Of the reused blocks, which all have one size."""
    return 1 - tiers.get("ram", 0) / max(1, sum(tiers.values())) if tiers else 0.0


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
        speedup = min(row["speedup"] for row in rows[1:])
        for row in rows[1:]:
            goal = GOALS[precision][row["key"]]
            reached = "reached" if row["speedup"] >= goal else "NOT reached"
            console.print(
                f"  ({row['key']}) goal of {goal:g}x sooner in {precision}: {reached} ({row['speedup']:.1f}x)"
            )
        console.print()
        failures += [
            f"{precision} (d): only {row['below_ram']:.0%} of what it reused came from the disk"
            for row in rows
            if row["key"] == "d" and row["below_ram"] < FROM_DISK
        ]
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
