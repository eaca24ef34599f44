"""What a demo found, for people and for other programs: a table, a chart, all raw numbers, and what it failed at.

A story is {"cold": result, "warm": {key: [results]}, "verdicts": {key: [verdicts]}}; a result has `timings`, `reuse`,
`prompt_tokens` and `tokens`, a verdict is near_tie.py's as a table. Always true: medians of times, and the worst verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from demo_story import HERE, SECOND_TURN, DemoFailed
from fetch_model import FetchError, cache_dir, unpacked_model
from rich.console import Console
from rich.table import Table

FROM_DISK = 0.95  # of what (d) reuses
Tell = Callable[[str, argparse.Namespace, Path, Console], dict[str, Any]]


def summarise(story: dict[str, Any], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row a run, names of runs by key. Medians of times; an output is right only if all repeats were."""
    rows = [_row("a", names["a"], [story["cold"]], [])]
    rows += [_row(key, names[key], story["warm"][key], story["verdicts"][key]) for key in names if key != "a"]
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


def _parse(about: str, out: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, epilog="Results: --out, as PNG and JSON.")
    parser.add_argument("--model", help="path or Hugging Face id (default: the model that fetch_model.py gets)")
    parser.add_argument("--precision", choices=("both", "fp32", "bf16"), default="both")
    parser.add_argument("--small", action="store_true", help="the same story, sooner: short answers, no repeats")
    parser.add_argument("--new-tokens", type=int, help="length of each answer (default 48; 12 with --small)")
    parser.add_argument("--repeats", type=int, help="times each warm run is done, medians count (default 3; 1)")
    parser.add_argument("--block-tokens", type=int, default=16, help="tokens a block (default 16)")
    parser.add_argument("--threads", type=int, default=2, help="threads an engine computes with (default 2)")
    parser.add_argument("--ram-bytes", default="1GiB", help="the daemon's memory for blocks (default 1GiB)")
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / out)
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


def main(about: str, tell: Tell, names: Mapping[str, str], goals: Mapping[str, Mapping[str, float]], out: str) -> int:
    """Parse the command line, tell the story in each precision, report. Returns the exit status.

    goals: times sooner to the first token, by precision and run; printed beside what was found. out: the folder's name.
    """
    options = _parse(about, out)
    console = Console(width=None if sys.stdout.isatty() else 140)
    folder: Path = options.out
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.log"):
        old.unlink()
    try:
        options.model = options.model or unpacked_model(cache_dir(), console)
        wanted = ("bf16", "fp32") if options.precision == "both" else (options.precision,)
        stories = {precision: tell(precision, options, folder, console) for precision in wanted}
    except (DemoFailed, FetchError) as exc:
        console.print(f"[red]The demo failed.[/] {exc}")
        return 1
    summaries = {precision: summarise(story, names) for precision, story in stories.items()}
    failures = []
    for precision, rows in summaries.items():
        show(console, precision, rows)
        speedup = min(row["speedup"] for row in rows[1:])
        for row in rows[1:]:
            goal = goals[precision][row["key"]]
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
    # Without what only says where things lie on this machine.
    settings = {key: str(value) for key, value in vars(options).items() if key != "out"}
    settings["model"] = Path(options.model).name
    document = {"environment": environment(), "options": settings, "summary": summaries, "raw": stories}
    (folder / "demo.json").write_text(json.dumps(document, indent=1))
    draw(folder / "demo.png", summaries)
    console.print(f"Chart: {folder / 'demo.png'}   Numbers: {folder / 'demo.json'}")
    for failure in failures:
        console.print(f"[red]Failed:[/] {failure}")
    return 1 if failures else 0
