"""Where a model's weights come from: a safetensors folder or a GGUF file, both read by mmap, under Hugging Face's names.

Covers finding the model and opening it. Always true: an open source has a checked config, and shapes of all its tensors are
known before the first one is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from forebay.engine.config import ModelConfig
from forebay.engine.model_errors import ModelNotFound

# What a Hugging Face repository has beside what an engine needs is not downloaded.
_HF_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]
_HF_FILES += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


class Weights(Protocol):
    """An open model. files: those that hold the weights."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @property
    def files(self) -> tuple[Path, ...]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in a float dtype that holds what is stored. It may be the mapped file itself: copy before keeping."""
        ...


def open_weights(path: Path) -> Weights:
    """path: what `find_model` returned. Raises: ModelError."""
    # Imported here: an engine on one kind of file needs no reader of the other.
    if path.is_dir():
        from forebay.engine.weights.folder import Folder

        return Folder(path)
    from forebay.engine.weights.gguf_file import GgufFile

    return GgufFile(path)


def find_model(name: str | os.PathLike[str]) -> Path:
    """A folder with config.json, a .gguf file, or a Hugging Face id (downloaded, or from its cache when offline).

    Raises: ModelNotFound.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{path} holds no config.json, so it is no model folder")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is neither a folder with config.json nor a .gguf file")
        return path
    text = os.fspath(name)
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise ModelNotFound(f"{text}: no such folder or file, and it is no Hugging Face id (owner/name)")
    return _from_hub(text)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    options: dict[str, Any] = {"allow_patterns": _HF_FILES}
    try:
        folder = Path(snapshot_download(name, **options))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as exc:
        raise ModelNotFound(f"{name}: no such folder or file, and it can't be had as a Hugging Face id: {exc}") from exc
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{name} on Hugging Face holds no config.json")
    return folder
