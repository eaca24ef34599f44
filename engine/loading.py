"""From a name to a model that runs: `load_model`.

Covers the order of things: find, open, check all tensors against the config, read and pack them, tokenizer, digest. Always
true: a model is returned whole or not at all, and keeps no tie to its files afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from forebay.engine.batch import CausalModel
from forebay.engine.config import ModelConfig, Precision
from forebay.engine.model_errors import DamagedModel, TensorMismatch
from forebay.engine.models.decoder import Decoder, tensor_shapes
from forebay.engine.ops.linear import compute_dtype, linear_for
from forebay.engine.tokenizer import Tokenizer, load_tokenizer
from forebay.engine.weights import find_model, open_weights
from forebay.engine.weights.digest import weights_digest

ShowProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class LoadedModel:
    """weights_digest: 32 bytes, of the files as they are (weights/digest.py); precision is no part of it. name: a label."""

    model: CausalModel
    tokenizer: Tokenizer
    config: ModelConfig
    weights_digest: bytes
    precision: Precision
    name: str


def load_model(
    path: str | os.PathLike[str],
    precision: Precision = "bf16",
    device: str = "cpu",
    threads: int | None = None,
    progress: ShowProgress | None = None,
) -> LoadedModel:
    """
    path: a safetensors folder, a GGUF file or a Hugging Face id. threads: of torch, for the whole process.
    progress: called with bytes done and bytes in all.
    Raises: ModelError.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    found = find_model(path)
    weights = open_weights(found)
    if weights.config.layers > len(weights.shapes):  # a damaged count must not be believed: it sizes what follows
        raise DamagedModel(f"{found} says {weights.config.layers} layers and holds {len(weights.shapes)} tensors")
    needed = tensor_shapes(weights.config)
    check_shapes(weights.shapes, needed)
    tokenizer = load_tokenizer(found, weights)
    linear = linear_for(precision, device)
    dtype = compute_dtype(precision)
    elements = sum(torch.Size(shape).numel() for shape in needed.values())
    file_bytes = sum(file.stat().st_size for file in weights.files)
    done, total = 0, file_bytes * 2  # once for the tensors, once for the digest

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total)

    def take(name: str) -> torch.Tensor:
        # A copy always: what the file does later must not reach a running model.
        tensor = weights.read(name).to(device=device, dtype=dtype, copy=True)
        advance(file_bytes * tensor.numel() // elements)
        return tensor

    model = Decoder(weights.config, take, linear, dtype, device)
    digest = weights_digest(weights.config, weights.files, advance)
    if progress is not None:
        progress(total, total)
    return LoadedModel(model, tokenizer, weights.config, digest, precision, _label(found, path))


def check_shapes(found: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]]) -> None:
    """Raises: TensorMismatch."""
    missing = tuple(sorted(needed.keys() - found.keys()))
    unexpected = tuple(sorted(found.keys() - needed.keys()))
    wrong = tuple((n, found[n], needed[n]) for n in sorted(found.keys() & needed.keys()) if found[n] != needed[n])
    if missing or unexpected or wrong:
        raise TensorMismatch(missing, unexpected, wrong)


def _label(found: Path, asked: str | os.PathLike[str]) -> str:
    """The id that was asked for, or the name of the folder or file."""
    return found.stem if found.is_file() else found.name if Path(asked).expanduser().is_dir() else os.fspath(asked)
