"""The story Forebay exists for, on a real model: a second turn whose prefix outlives the engine that computed it.

A user sends a small web project and asks for a change; the second turn only says where the login button should go. Two
processes of `forebay engine serve` and one daemon hear it through the OpenAI-compatible API. That second turn runs (a) cold:
nothing of it may come from anywhere; (p) warm in the same process, from the engine's own pool; (b) warm in the same process,
whose pool was emptied first, so from Forebay; (c) warm, in the other engine process; (d) warm from the disk, after a flush
and a kill -9 of the daemon and of both engines; (e) warm, in an engine that reaches the daemon over TCP, as from another
host. From (b) on the pool is emptied before each run. Always true: it fails if a warm output breaks the rule (fp32:
identical; bf16: a first difference at a near tie only), if the pool had a share in (b) to (e), or if what (d) reused did not
come from the disk; no model loading is in any time, which the client takes from its request to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import demo_report
import torch
from demo_story import SECOND_TURN, UNRELATED, DaemonProcess, DemoFailed, Message, first_turn, stop, tail
from rich.console import Console

from forebay.clients import Client
from forebay.engine.loading import load_model
from forebay.engine.ops.linear import compute_dtype
from forebay.engine.weights import find_model, open_weights
from forebay.engine.weights.digest import weights_digest
from forebay.engine_adapter.bundled import namespace_facts
from forebay.engine_adapter.near_tie import judge, largest_engine_logit_change
from forebay.kvstore.identity import NamespaceFacts

NAMES = {
    "a": "cold, nothing reused",
    "p": "warm, engine's own pool",
    "b": "warm, same process",
    "c": "warm, other process",
    "d": "warm, after kill -9",
    "e": "warm, over TCP",
}
GOALS = {precision: dict.fromkeys("pbcde", 10.0) for precision in ("bf16", "fp32")}  # times sooner to the first token
START_LIMIT_S = 300.0
REQUEST_LIMIT_S = 900.0
STORED_LIMIT_S = 60.0
TOP = 20  # logprobs beside each token, the most the API gives

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: never through a proxy


class EngineProcess:
    """`forebay engine serve` in a process of its own, spoken to as any client would."""

    def __init__(self, name: str, log: Path, arguments: list[str], token: str = "") -> None:
        self.name, self.log = name, log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "forebay", "engine", "serve", *arguments, "--port", "0"],
                stdout=sink,
                stderr=sink,
                env={**os.environ, "FOREBAY_TOKEN": token},
            )
        self._url = ""

    def wait_ready(self) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not (found := re.search(r"at (http://\S+)/v1", self.log.read_text())):
            if self.process.poll() is not None or time.monotonic() > limit:
                raise DemoFailed(f"engine {self.name} did not start; its log ends with:\n{tail(self.log)}")
            time.sleep(0.05)
        self._url = found[1]

    def chat(self, messages: list[Message], new: int, **more: Any) -> dict[str, Any]:
        """One answer, with the time to its first token as the client sees it, and what the store did for it."""
        about = {"model": "demo", "messages": messages, "max_tokens": new, "temperature": 0, "stream": True}
        about |= {
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": TOP,
            "return_token_ids": True,
        }
        before = self._store_numbers()
        first_s, token_ids, told, prompt_ids, usage, text = 0.0, [], [], [], {}, ""
        request = self._request("/v1/chat/completions", about | more)
        begun = time.perf_counter()
        with _opener.open(request, timeout=REQUEST_LIMIT_S) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise DemoFailed(f"engine {self.name}: {event['error']['message']}")
                usage = event["usage"] or usage
                for choice in event["choices"]:
                    ids = choice.get("token_ids", ())
                    if ids and not token_ids:
                        first_s = time.perf_counter() - begun
                    token_ids += ids
                    prompt_ids = choice.get("prompt_token_ids", prompt_ids)
                    told += (choice["logprobs"] or {"content": []})["content"]
                    text += choice["delta"].get("content", "")
        after = self._store_numbers()
        return {
            "tokens": token_ids,
            "text": text,
            "prompt_ids": prompt_ids,
            "logprobs": told,
            "prompt_tokens": usage["prompt_tokens"],
            "timings": {"ttft_s": first_s, **usage["forebay"]},
            "reuse": _reuse(usage, {name: after[name] - before.get(name, 0.0) for name in after}),
        }

    def empty_pool(self) -> None:
        """So that the next answer's prefix can come from the store only."""
        self.wait_stored()
        with _opener.open(self._request("/reset_prefix_cache", {}), timeout=REQUEST_LIMIT_S):
            pass

    def wait_stored(self) -> None:
        """Until the store has taken what it was given."""
        limit = time.monotonic() + STORED_LIMIT_S
        while (found := self._metrics()) and found["blocks_held"] + found["store_queued_bytes"] + found["running"]:
            if time.monotonic() > limit:
                raise DemoFailed(f"engine {self.name}: blocks were not stored within {STORED_LIMIT_S:g} s")
            time.sleep(0.02)

    def _request(self, path: str, body: dict[str, Any]) -> urllib.request.Request:
        return urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode())

    def _metrics(self) -> dict[str, float]:
        with _opener.open(f"{self._url}/metrics", timeout=REQUEST_LIMIT_S) as response:
            lines = response.read().decode().splitlines()
        samples = (line.removeprefix("forebay_engine_").rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def _store_numbers(self) -> dict[str, float]:
        found = self._metrics()
        return {name.removeprefix("store_"): found[name] for name in found if name.startswith("store_")}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        stop(self.process)


def _reuse(usage: dict[str, Any], store: dict[str, float]) -> dict[str, Any]:
    """What was reused, and from which tiers: of the pool as of the store in tokens, by what the store counted meanwhile."""
    tiers = {m[1]: int(n) for name, n in store.items() if n and (m := re.fullmatch(r"loaded_blocks_(\w+)_total", name))}
    missed = [m[1] for name, n in store.items() if n and (m := re.fullmatch(r"miss_(\w+)_total", name))]
    if usage["forebay"]["pool_tokens"]:
        tiers = {"pool": usage["forebay"]["pool_tokens"], **tiers}
    return {
        "tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "pool_tokens": usage["forebay"]["pool_tokens"],
        "tiers": tiers,
        "payload_bytes": int(sum(n for name, n in store.items() if re.fullmatch(r"loaded_bytes_\w+_total", name))),
        "predicted_load_s": store.get("predicted_load_seconds_total", 0.0),
        "miss": ", ".join(missed),
    }


def tell(precision: str, options: argparse.Namespace, out: Path, console: Console) -> dict[str, Any]:
    """Run the story in one precision. Returns its raw numbers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forebay-demo-")))
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disk-", dir=out)))
        status = stack.enter_context(console.status(f"{precision}: starting the daemon"))
        daemon = DaemonProcess(folder / "forebay.sock", disk, out / f"daemon-{precision}.log", options.ram_bytes)
        stack.callback(daemon.stop)
        daemon.start()
        shared = [str(options.model), "--served-model-name", "demo", "--precision", precision]
        shared += ["--block-tokens", str(options.block_tokens), "--threads", str(options.threads)]

        def engines(*names: str, at: str = str(daemon.socket), token: str = "") -> list[EngineProcess]:
            """Start engines side by side and warm each with unrelated prompts."""
            status.update(f"{precision}: {len(names)} engine process(es) load the model")
            started = []
            for name in names:
                engine = EngineProcess(name, out / f"engine-{name}-{precision}.log", [*shared, "--store", at], token)
                stack.callback(engine.stop)
                started.append(engine)
            for engine in started:
                engine.wait_ready()
            status.update(f"{precision}: warming with unrelated prompts")
            for engine in started:
                for text in UNRELATED:
                    engine.chat([{"role": "user", "content": text}], 2, cache_store=False)
            return started

        def second_turn(engine: EngineProcess) -> dict[str, Any]:
            engine.empty_pool()
            return engine.chat(messages, options.new_tokens, cache_store=False)

        first, second = engines("A", "B")
        status.update(f"{precision}: first turn, the web project (computed and stored by engine A)")
        messages = first_turn()
        answer = first.chat(messages, options.new_tokens)
        messages += [{"role": "assistant", "content": answer["text"]}, {"role": "user", "content": SECOND_TURN}]
        status.update(f"{precision}: (a) second turn, cold")
        # A salt of its own: neither the pool nor the store can know this prefix.
        nothing = {"cache_load": False, "cache_store": False, "cache_salt": secrets.token_hex(8)}
        cold = first.chat(messages, options.new_tokens, **nothing)
        status.update(f"{precision}: (p), (b) and (c) second turn, warm, in engines A and B")
        runs: dict[str, list[Any]] = {key: [] for key in NAMES if key != "a"}
        # Once only: a second time the pool would hold this very prompt to its end.
        runs["p"] = [first.chat(messages, options.new_tokens, cache_store=False)]
        for _ in range(options.repeats):
            runs["b"].append(second_turn(first))
            runs["c"].append(second_turn(second))
        status.update(f"{precision}: (d) flush, then kill -9 of the daemon and both engines")
        _flush(daemon, _facts(precision, options), cold["prompt_ids"])
        for process in (daemon, first, second):
            process.kill()
        daemon.start()
        (third,) = engines("C")
        for number in range(options.repeats):
            if number:  # what the last turn loaded is in RAM now: only another crash makes it come from the disk again
                daemon.kill()
                daemon.start()
            status.update(f"{precision}: (d) second turn, warm from the disk")
            runs["d"].append(second_turn(third))
        third.stop()
        (fourth,) = engines("D", at=daemon.url, token=daemon.token)
        status.update(f"{precision}: (e) second turn, warm over TCP")
        runs["e"] = [second_turn(fourth) for _ in range(options.repeats)]
        fourth.stop()
        status.update(f"{precision}: judging the outputs")
        verdicts = {key: _verdicts(cold, runs[key], precision, options) for key in runs}
    best = _told_logits(cold).topk(2).values
    cold["top_two_gaps"] = [round(float(one - other), 6) for one, other in best]
    for result in (answer, cold, *(run for some in runs.values() for run in some)):
        del result["logprobs"], result["prompt_ids"]  # megabytes that no reader of the results misses
    for key in "bcde":
        if any(run["reuse"]["pool_tokens"] for run in runs[key]):
            raise DemoFailed(f"({key}): the engine's own pool had a share in it")
    return {"precision": precision, "first_turn": answer, "cold": cold, "warm": runs, "verdicts": verdicts}


def _facts(precision: str, options: argparse.Namespace) -> NamespaceFacts:
    """The namespace of the engines' blocks."""
    weights = open_weights(find_model(options.model))
    return namespace_facts(
        weights.config,
        weights_digest=weights_digest(weights.config, weights.files),
        precision=precision,
        kv_dtype=compute_dtype(precision),
        block_tokens=options.block_tokens,
        head_groups=weights.config.kv_heads,
    )


def _flush(daemon: DaemonProcess, facts: NamespaceFacts, ids: list[int]) -> None:
    """Wait until what is stored of the prompt's prefix is in a tier below RAM."""
    with Client(daemon.socket) as client:
        namespace = client.open(facts)
        keys = namespace.keys(ids)
        flushed = namespace.flush(keys[: namespace.match(keys).blocks], timeout_s=120)
    if flushed.failed or flushed.missing or not flushed.durable:
        raise DemoFailed(f"flush did not make the prefix durable: {flushed}")


def _verdicts(cold: dict[str, Any], runs: list[Any], precision: str, options: argparse.Namespace) -> list[Any]:
    """Hold each warm output to the rule."""
    exact, found = precision == "fp32", []
    for run in runs:
        change = 0.0
        if not exact and run["tokens"] != cold["tokens"]:
            change = _logit_change(cold, run["reuse"]["tokens"], precision, options)
        verdict = judge(cold["tokens"], run["tokens"], _told_logits(cold), exact=exact, logit_change=change)
        found.append(asdict(verdict))
    return found


def _told_logits(cold: dict[str, Any]) -> torch.Tensor:
    """Logits up to a constant of each row, as far as the API tells them: of the likeliest tokens. No other can nearly tie."""
    top = [[(other["token_id"], other["logprob"]) for other in one["top_logprobs"]] for one in cold["logprobs"]]
    width = 1 + max(cold["tokens"] + [token for row in top for token, _ in row])
    logits = torch.full((len(top), max(width, TOP)), -torch.inf)
    for row, others in zip(logits, top, strict=True):
        for token, logprob in others:
            row[token] = logprob
    return logits


def _logit_change(cold: dict[str, Any], split: int, precision: str, options: argparse.Namespace) -> float:
    """The largest change of any logit of cold's answer when its tokens are computed in two parts instead of whole."""
    loaded = load_model(options.model, precision, threads=options.threads)
    return largest_engine_logit_change(
        loaded.model, cold["prompt_ids"] + cold["tokens"][:-1], split, len(cold["tokens"]), options.block_tokens
    )


if __name__ == "__main__":
    about = __doc__.splitlines()[0]
    sys.exit(demo_report.main(about, tell, NAMES, GOALS, "demo"))
