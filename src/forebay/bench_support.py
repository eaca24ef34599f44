"""What the measuring commands share: a daemon of their own, the machine's description, percentiles.

Always true: a benchmark starts its daemon on a private socket and stops it again; results carry raw samples, versions and
the hardware, so that a figure can be judged later.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay import __version__
from forebay.clients import Client
from forebay.kvstore.errors import ClientError
from forebay.kvstore.identity import NamespaceFacts

START_S: Final = 60.0
_PACKAGES: Final = ("numpy", "msgspec", "uvloop", "xxhash", "lmdb")


def facts_for(payload_bytes: int, *, block_tokens: int = 16, label: str = "bench") -> NamespaceFacts:
    """A namespace whose objects carry `payload_bytes` in one part: one layer, one head, bf16.

    payload = 2 * block_tokens * head_dim * 2 bytes, so it must be a multiple of 4 * block_tokens.
    """
    head_dim, rest = divmod(payload_bytes, 4 * block_tokens)
    if rest or not head_dim:
        raise ValueError(f"payload of {payload_bytes} bytes is not a multiple of {4 * block_tokens}")
    return NamespaceFacts(
        weights_digest=b"forebay bench".ljust(32),
        weight_format="none",
        compute_dtype="bf16",
        kv_dtype="bf16",
        producer=label,
        block_tokens=block_tokens,
        layers=1,
        kv_heads=1,
        head_dim=head_dim,
        rope=b"none",
    )


class BenchDaemon:
    """A daemon process that also answers on its standard input: "gc", "memory", "lag"."""

    def __init__(self, folder: Path, ram_bytes: int, **settings: object) -> None:
        self.socket = folder / "bench.sock"
        request = {"socket": str(self.socket), "ram_bytes": ram_bytes, "http_port": -1, "ssd_bytes": 0, **settings}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay.bench_daemon", json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._line()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the benchmark's daemon ended; its log is above")
        return json.loads(line)

    def ask(self, what: str) -> Any:
        """Have the daemon measure something of itself."""
        assert self._process.stdin is not None
        print(what, file=self._process.stdin, flush=True)
        return self._line()

    def client(self, **options: Any) -> Client:
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                return Client(self.socket, timeout_s=60.0, **options)
            except ClientError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(30)
        self._close_pipes()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def bench_daemon(ram_bytes: int, **settings: object) -> Iterator[BenchDaemon]:
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        daemon = BenchDaemon(Path(folder), ram_bytes, **settings)
        try:
            yield daemon
        finally:
            daemon.stop()


def percentile(samples: Sequence[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def fill_index(
    client: Client, facts: NamespaceFacts, blocks: int, chain_blocks: int, seed: int
) -> list[tuple[np.ndarray[Any, np.dtype[np.uint32]], list[bytes]]]:
    """Store `blocks` small objects as chains of `chain_blocks`. Returns each chain's tokens and keys."""
    namespace = client.open(facts)
    rng = np.random.default_rng(seed)
    payload = bytes(namespace.layout().payload_bytes)
    chains = []
    left = blocks
    while left:
        count = min(left, chain_blocks)
        tokens = rng.integers(0, 150_000, count * facts.block_tokens, dtype=np.uint32)
        keys = namespace.keys(tokens)
        result = namespace.put(keys, tokens, [payload] * count)
        if result.stored != count:
            raise RuntimeError(f"filling the index stored {result.stored} of {count} blocks")
        chains.append((tokens, keys))
        left -= count
    return chains


def machine() -> dict[str, Any]:
    """Where a result was measured."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "missing"
    return {
        "forebay": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": model,
        "cores": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "packages": packages,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=5,
        )
    except OSError:
        return ""
    return found.stdout.strip()


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with four significant digits, for reading."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection while samples of microseconds are taken in this process."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tell(result: dict[str, Any], file: Path | None) -> None:
    """Print a result without its raw samples, and write the whole of it to `file`, if one is given."""
    print(json.dumps({name: value for name, value in result.items() if name not in ("details", "machine")}, indent=2))
    if file is not None:
        file.write_text(json.dumps(result) + "\n")
