"""A Hugging Face folder: config.json, and safetensors in one file or several with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from forebay.engine.config import ModelConfig, RopeScaling
from forebay.engine.model_errors import DamagedModel, ModelNotFound, UnsupportedModel
from forebay.engine.models import FLAGS

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Folder:
    """`Weights` of a folder."""

    def __init__(self, path: Path) -> None:
        self.config = config_of(path)
        self.files = _weight_files(path)
        self._in_file: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            try:
                opened: Any = safe_open(file, framework="pt")
                for name in opened.keys():  # noqa: SIM118  (not a dict)
                    if not name.endswith("rotary_emb.inv_freq"):  # old checkpoints carry what the config says
                        self._in_file[name] = opened
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
            except (SafetensorError, OSError) as exc:
                raise DamagedModel(f"{file} is no whole safetensors file: {exc}") from exc
        if self.config.tie_embeddings:
            self.shapes.pop("lm_head.weight", None)  # some folders hold it twice

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._in_file[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise UnsupportedModel("quantization", f"{name} is {tensor.dtype}: quantised folders aren't supported")
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    """Raises: DamagedModel, when it is no JSON object."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise DamagedModel(f"{path} can't be read as JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise DamagedModel(f"{path} is no JSON object")
    return found


def config_of(path: Path) -> ModelConfig:
    """Raises: UnsupportedModel, DamagedModel."""
    entries = read_json(path / "config.json")
    architecture = entries.get("model_type")
    if architecture not in FLAGS:
        raise UnsupportedModel("model_type", f"model_type {architecture!r} is none of {', '.join(FLAGS)}")
    _refuse_variants(entries)
    try:
        heads, hidden = int(entries["num_attention_heads"]), int(entries["hidden_size"])
        rope = entries.get("rope_parameters") or {
            "rope_theta": entries.get("rope_theta", 10_000.0),
            **(entries.get("rope_scaling") or {}),
        }
        return ModelConfig(
            architecture=architecture,
            layers=int(entries["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(entries["intermediate_size"]),
            heads=heads,
            kv_heads=int(entries.get("num_key_value_heads") or heads),
            head_dim=int(entries.get("head_dim") or hidden // heads),
            vocab_size=int(entries["vocab_size"]),
            context_tokens=int(entries["max_position_embeddings"]),
            norm_eps=float(entries["rms_norm_eps"]),
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_scaling(rope),
            tie_embeddings=bool(entries.get("tie_word_embeddings", False)),
            eos_token_ids=_eos(path, entries),
            **FLAGS[architecture],
        )
    except KeyError as exc:
        raise DamagedModel(f"{path / 'config.json'} has no {exc}") from exc
    except (TypeError, ValueError) as exc:
        raise DamagedModel(f"{path / 'config.json'} has a value that makes no sense: {exc}") from exc


def _refuse_variants(entries: dict[str, Any]) -> None:
    """What the decoder doesn't compute must not be computed wrongly in silence."""
    for name, plain in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1.0),
        ("quantization_config", None),
    ):
        if entries.get(name, plain) not in (plain, None):
            raise UnsupportedModel(name, f"{name} = {entries[name]!r} in config.json isn't supported, only {plain!r}")
    if kinds := set(entries.get("layer_types") or ()) - {"full_attention"}:
        raise UnsupportedModel("layer_types", f"layers of {', '.join(sorted(kinds))} aren't supported")


def _scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModel("rope_type", f"rope_type {kind!r} isn't supported, only default and llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(rope["original_max_position_embeddings"]),
    )


def _eos(path: Path, entries: dict[str, Any]) -> tuple[int, ...]:
    """Of generation_config.json, which lists all that end a chat's turn; config.json often names only one."""
    generation = path / "generation_config.json"
    found = (read_json(generation) if generation.is_file() else {}).get("eos_token_id", entries.get("eos_token_id"))
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def _weight_files(path: Path) -> tuple[Path, ...]:
    if (path / _INDEX).is_file():
        names = read_json(path / _INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise DamagedModel(f"{path / _INDEX} has no weight_map")
        files = tuple(path / name for name in sorted(set(names.values())))
    elif (path / _SINGLE).is_file():
        files = (path / _SINGLE,)
    else:
        files = tuple(sorted(path.glob("*.safetensors")))
        if not files:
            raise ModelNotFound(f"{path} holds no safetensors file")
    for file in files:
        if not file.is_file():
            raise DamagedModel(f"{file} is named in {_INDEX} but isn't there")
        if file.resolve().parent != path.resolve() and ".." in file.relative_to(path).parts:
            raise DamagedModel(f"{_INDEX} names a file outside its folder")
    return files
