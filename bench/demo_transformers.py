"""The demo's story through the adapter for Hugging Face transformers (bench/demo.py tells it with the bundled engine).

That second turn runs (a) cold, Forebay off; (b) warm, in the same process, which keeps no KV of its own; (c) warm, in another
engine process; (d) warm from the disk, after a flush and a kill -9 of the daemon and of both engines; (e) warm, in an engine
that reaches the daemon over TCP, as from another host. Always true: it fails if a warm output breaks the rule (fp32:
identical; bf16: a first difference at a near tie only) or if what (d) reused did not come from the disk, and no model
loading is in any time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import demo_report
from demo_story import HERE, SECOND_TURN, UNRELATED, DaemonProcess, DemoFailed, Message, first_turn, stop, tail
from rich.console import Console

NAMES = {
    "a": "cold, Forebay off",
    "b": "warm, same process",
    "c": "warm, other process",
    "d": "warm, after kill -9",
    "e": "warm, over TCP",
}
# Times sooner to the first token, on two cores.
GOALS = {
    "bf16": {"b": 5.0, "c": 5.0, "d": 5.0, "e": 5.0},
    "fp32": {"b": 12.0, "c": 12.0, "d": 10.0, "e": 5.0},
}
START_LIMIT_S = 300.0
REQUEST_LIMIT_S = 900.0


class EngineProcess:
    """An engine in a process of its own, spoken to in lines of JSON."""

    def __init__(self, name: str, log: Path, arguments: list[str], token: str = "") -> None:
        self.name, self.log = name, log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "demo_transformers_engine.py"), "--name", name, *arguments],
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
            why = f"engine {self.name} ended or took over {limit_s:.0f} s; its log ends with:\n{tail(self.log)}"
            raise DemoFailed(why)
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        stop(self.process)


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


if __name__ == "__main__":
    about = __doc__.splitlines()[0]
    sys.exit(demo_report.main(about, tell, NAMES, GOALS, "demo-transformers"))
