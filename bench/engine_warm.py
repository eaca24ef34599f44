"""How soon a second turn's first token comes on a CPU, beside llama.cpp's llama-server: rounds interleaved, over HTTP.

Each round makes a prompt of random tokens, computes it once in every server, then asks again with some 30 tokens more. Forebay
(`forebay engine serve` over a daemon, bf16 and int4) has the prefix in its own pool, or in the store (pool emptied before, or
an engine process started for it); llama-server (the Q4_K_M file) in the slot that computed it, or in a file that the slot was
saved to and a server process started for it restores. Times are the client's, from its request to the first token; of the
restored slot the restore and that together. Starting a process and loading weights are in none, and a new process answers
a short unrelated prompt first. Always true: it fails if a server computed more of the second turn than its cache should leave.

    python bench/engine_warm.py --llama-server PATH [--rounds 3] [--block-tokens 64] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from socket import create_server
from typing import Any

import numpy as np
import torch
from demo import EngineProcess
from demo_story import DaemonProcess, DemoFailed, stop, tail
from fetch_model import FOLDER_NAME, GGUF_NAME, cache_dir

from forebay.bench_support import machine

PRECISIONS = ("bf16", "int4")
START_LIMIT_S = 120.0

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: never through a proxy


def _first_token(url: str, body: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds to the first event of a streamed answer, and all its events. Both servers send none before a token."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    first_s, events = 0.0, []
    begun_s = time.perf_counter()
    with _opener.open(request, timeout=START_LIMIT_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - begun_s
                events.append(json.loads(line[6:]))
    return first_s, events


class Forebay(EngineProcess):
    """The engine, asked with token ids."""

    def ask(self, ids: list[int], reused: int, *, pool: bool = False, store: bool = False) -> float:
        """Seconds to the first token. `reused` tokens must come from the pool, or else from the store."""
        body = {"model": "demo", "prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "return_token_ids": True, "cache_store": store}
        first_s, events = _first_token(f"{self._url}/v1/completions", body)
        usage = events[-1]["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"], usage["forebay"]["pool_tokens"]
        if found != (reused, reused if pool else 0):
            raise DemoFailed(f"engine {self.name}: reused {found[0]} tokens, {found[1]} of them from its pool")
        return first_s


class LlamaServer:
    """llama-server with one slot."""

    def __init__(self, binary: Path, gguf: Path, threads: int, saved: Path, log: Path) -> None:
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.log, self._url = log, f"http://127.0.0.1:{port}"
        command = [str(binary), "-m", str(gguf), "-t", str(threads), "-c", "4096", "-np", "1", "--no-webui"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--slot-save-path", str(saved)]
        with log.open("wb") as sink:
            environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)

    def wait_ready(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while True:
            try:
                _opener.open(f"{self._url}/health", timeout=5).close()
                return
            except OSError as exc:  # refused, or 503 while it loads
                if self.process.poll() is not None or time.monotonic() > limit:
                    raise DemoFailed(f"llama-server did not start; its log ends with:\n{tail(self.log)}") from exc
                time.sleep(0.05)

    def ask(self, ids: list[int], reused: int) -> float:
        body = {"prompt": ids, "n_predict": 1, "temperature": 0, "ignore_eos": True, "stream": True}
        first_s, events = _first_token(f"{self._url}/completion", body | {"cache_prompt": True, "id_slot": 0})
        computed = events[-1]["timings"]["prompt_n"]
        if computed != len(ids) - reused:
            raise DemoFailed(f"llama-server computed {computed} of {len(ids)} tokens, of which it had {reused}")
        return first_s

    def slot(self, action: str, filename: str) -> float:
        """Save the slot to a file or restore it. Seconds."""
        body, header = json.dumps({"filename": filename}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/slots/0?action={action}", body, header)
        begun_s = time.perf_counter()
        with _opener.open(request, timeout=START_LIMIT_S) as response:
            response.read()
        return time.perf_counter() - begun_s

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        stop(self.process)


def measure(options: argparse.Namespace, folder: Path, gguf: Path) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    rng = np.random.default_rng(options.seed)

    def tokens(count: int) -> list[int]:
        found: list[int] = rng.integers(0, 100_000, count).tolist()
        return found

    def keep(name: str, took_s: float) -> None:
        samples.setdefault(name, []).append(took_s)

    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-warm-")))
        daemon = DaemonProcess(work / "forebay.sock", work / "disk", work / "daemon.log", "1GiB")
        stack.callback(daemon.stop)
        daemon.start()

        def forebay(precision: str) -> Forebay:
            given = [
                str(folder),
                "--served-model-name",
                "demo",
                "--precision",
                precision,
                "--store",
                str(daemon.socket),
            ]
            given += [
                "--threads",
                str(options.threads),
                "--block-tokens",
                str(options.block_tokens),
                "--pool-bytes",
                "256MiB",
            ]
            server = Forebay(precision, work / f"{precision}.log", given)
            stack.callback(server.stop)
            server.wait_ready()
            server.ask(tokens(50), 0)
            return server

        def llama() -> LlamaServer:
            server = LlamaServer(options.llama_server, gguf, options.threads, work, work / "llama.log")
            stack.callback(server.stop)
            server.wait_ready()
            server.ask(tokens(50), 0)
            return server

        engines = {precision: forebay(precision) for precision in PRECISIONS}
        peer = llama()
        for number in range(options.rounds):
            prompt = tokens(options.prompt_tokens)
            whole = len(prompt) // options.block_tokens * options.block_tokens
            for name, engine in engines.items():
                keep(f"forebay {name}, cold", engine.ask(prompt, 0, store=True))
                engine.wait_stored()
            keep("llama.cpp, cold", peer.ask(prompt, 0))
            keep("llama.cpp, slot save", peer.slot("save", f"slot-{number}"))
            for _ in range(options.turns):
                turn = prompt + tokens(options.added_tokens)
                for name, engine in engines.items():
                    keep(f"forebay {name}, pool", engine.ask(turn, whole, pool=True))
                keep("llama.cpp, prompt cache", peer.ask(turn, len(prompt)))
            for _ in range(options.turns):
                turn = prompt + tokens(options.added_tokens)
                for name, engine in engines.items():
                    engine.empty_pool()
                    keep(f"forebay {name}, store", engine.ask(turn, whole))
            turn = prompt + tokens(options.added_tokens)
            for name in engines:
                other = forebay(name)
                keep(f"forebay {name}, store, new process", other.ask(turn, whole))
                other.stop()
            restored = llama()
            restore_s = restored.slot("restore", f"slot-{number}")
            first_s = restored.ask(turn, len(prompt))
            restored.stop()
            keep("llama.cpp, restore alone", restore_s)
            keep("llama.cpp, slot restore, new process", restore_s + first_s)
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3, help="second turns a round in the processes that stay")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block-tokens", type=int, default=64, help="of Forebay's engines, 64 is their default")
    parser.add_argument("--prompt-tokens", type=int, default=2100)
    parser.add_argument("--added-tokens", type=int, default=30)
    parser.add_argument("--llama-server", type=Path, required=True, help="llama.cpp's llama-server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    folder, gguf = cache_dir() / FOLDER_NAME, cache_dir() / GGUF_NAME
    if not folder.is_dir():
        sys.exit(f"{folder} is not there: run bench/fetch_model.py")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(options.llama_server.parent)}
    told = subprocess.run(
        [str(options.llama_server), "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=60,
    )
    (version,) = (line for line in (told.stdout + told.stderr).splitlines() if line.startswith("version:"))
    samples = measure(options, folder, gguf)
    median = {name: statistics.median(taken) for name, taken in samples.items()}
    ratios = {
        precision: {
            "pool_to_prompt_cache": median[f"forebay {precision}, pool"] / median["llama.cpp, prompt cache"],
            "store_to_prompt_cache": median[f"forebay {precision}, store"] / median["llama.cpp, prompt cache"],
            "store_to_slot_restore_new_process": median[f"forebay {precision}, store, new process"]
            / median["llama.cpp, slot restore, new process"],
        }
        for precision in PRECISIONS
    }
    result = {
        "benchmark": "engine_warm",
        "machine": machine() | {"torch": torch.__version__, "llama.cpp": version.removeprefix("version: ")},
        "options": {name: str(value) for name, value in vars(options).items() if name not in ("out", "llama_server")},
        "median_s": median,
        "ratios": ratios,
        "samples_s": samples,
    }
    text = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
