"""Models from a folder, shards, a GGUF file: the same logits; and whatever is wrong with one is said by type."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.engine.loading import LoadedModel, load_model
from forebay.engine.model_errors import (
    DamagedModel,
    ModelError,
    ModelNotFound,
    TensorMismatch,
    TokenizerMissing,
    UnsupportedModel,
)
from forebay.engine.models import FLAGS
from forebay.engine.weights import find_model
from tests.engine.files import write_folder, write_gguf
from tests.engine.tiny import batch_of, tiny_config, tiny_model, tiny_pool

ARCHITECTURES = sorted(FLAGS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def logits_of(model: Any) -> torch.Tensor:
    ids = random.Random(1).choices(range(128), k=40)
    pool = tiny_pool(model.config, 8, 8, model.kv_dtype)
    found: torch.Tensor = model.forward(batch_of([(ids, 0, list(range(8)))], 8, all_logits=True), pool)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_folder_shards_and_gguf_load_to_the_same_model(tmp_path: Path, architecture: str) -> None:
    config = write_folder(tmp_path / "one", architecture, 3)
    write_folder(tmp_path / "three", architecture, 3, shards=3)
    write_gguf(tmp_path / "model.gguf", architecture, 3)
    expected = logits_of(tiny_model(architecture, 3, torch.float32))
    for name in ("one", "three", "model.gguf"):
        loaded = load_model(tmp_path / name, "fp32")
        assert dataclasses.replace(loaded.config, rope_scaling=None) == dataclasses.replace(config, rope_scaling=None)
        assert (loaded.config.rope_scaling is None) == (config.rope_scaling is None)
        assert (logits_of(loaded.model) - expected).abs().max() < 1e-5, name
    assert loaded.name == "model"


def test_progress_rises_to_the_end(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    seen: list[tuple[int, int]] = []
    load_model(tmp_path / "m", "fp32", progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 10 and len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == seen[-1][1]


def test_a_loaded_model_keeps_no_tie_to_its_files(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    loaded = load_model(tmp_path / "m", "fp32")
    before = logits_of(loaded.model)
    with (tmp_path / "m" / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * os.fstat(file.fileno()).st_size)
    assert torch.equal(logits_of(loaded.model), before)


def edit_json(file: Path, **entries: Any) -> None:
    found = json.loads(file.read_text()) | entries
    file.write_text(json.dumps({name: value for name, value in found.items() if value != "<gone>"}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("entries", "error", "what"),
    [
        ({"model_type": "mamba"}, UnsupportedModel, "mamba"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ({"attention_bias": True}, UnsupportedModel, "attention_bias"),
        ({"use_sliding_window": True}, UnsupportedModel, "use_sliding_window"),
        ({"layer_types": ["full_attention", "linear_attention"]}, UnsupportedModel, "linear_attention"),
        ({"quantization_config": {"bits": 4}}, UnsupportedModel, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, UnsupportedModel, "yarn"),
        ({"hidden_size": "<gone>"}, DamagedModel, "hidden_size"),
        ({"hidden_size": "wide"}, DamagedModel, "wide"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused(
    tmp_path: Path, entries: dict[str, Any], error: type[ModelError], what: str
) -> None:
    write_folder(tmp_path / "m")
    edit_json(tmp_path / "m" / "config.json", **entries)
    with pytest.raises(error, match=what):
        load_model(tmp_path / "m")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder)

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["model.extra.weight"] = weights.pop("model.norm.weight")
        weights["lm_head.weight"] = weights["lm_head.weight"][:-1].clone()

    edit_tensors(folder, change)
    with pytest.raises(TensorMismatch) as caught:
        load_model(folder)
    assert caught.value.missing == ("model.norm.weight",)
    assert caught.value.unexpected == ("model.extra.weight",)
    assert caught.value.wrong_shape == (("lm_head.weight", (127, 64), (128, 64)),)


def test_an_old_config_and_old_extras_are_read(tmp_path: Path) -> None:
    """rope_theta at the top, as before transformers 5, and the frequencies that old checkpoints carry."""
    folder = tmp_path / "m"
    config = write_folder(folder, "llama")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_json(folder / "config.json", rope_parameters="<gone>", rope_theta=theta, rope_scaling=rope)
    edit_tensors(
        folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    )
    assert load_model(folder, "fp32").config == config


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_file_cut_short_is_damage(tmp_path: Path, kind: str, kept: int) -> None:
    if kind == "folder":
        write_folder(tmp_path / "m")
        path, file = tmp_path / "m", tmp_path / "m" / "model.safetensors"
    else:
        path = file = tmp_path / "m.gguf"
        write_gguf(file)
    os.truncate(file, kept if kept >= 0 else file.stat().st_size - 1)
    with pytest.raises(DamagedModel):
        load_model(path)


def test_bytes_turned_in_a_gguf_header_end_in_a_model_error_or_a_model(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file)
    whole = file.read_bytes()
    for seed in range(150):
        rng = random.Random(seed)
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.randrange(4000)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            load_model(file, "fp32")
        except ModelError:
            continue
        except Exception as exc:
            raise AssertionError(f"seed {seed}") from exc


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        load_model(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound):
        load_model(tmp_path / "empty")
    write_folder(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(TokenizerMissing):
        load_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound):
        load_model(tmp_path / "m")
    write_folder(tmp_path / "s", shards=2)
    next((tmp_path / "s").glob("model-00002*")).unlink()
    with pytest.raises(DamagedModel):
        load_model(tmp_path / "s")


def test_a_hugging_face_id_comes_from_the_offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--some--model"
    config = write_folder(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    loaded = load_model("some/model", "fp32")
    assert loaded.config == config and loaded.name == "some/model"
    with pytest.raises(ModelNotFound):
        find_model("other/model")


def digest(path: Path) -> bytes:
    loaded: LoadedModel = load_model(path, "fp32")
    return loaded.weights_digest


def test_the_digest_follows_content_not_names_and_is_remembered(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder)
    first = digest(folder)
    note = folder / "model.safetensors.forebay-digest"
    assert len(first) == 32 and note.is_file()
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.forebay-digest"))
    assert digest(tmp_path / "copy") == first
    # The note is believed while size and time are the file's, and not a moment longer.
    kept = json.loads(note.read_text())
    note.write_text(json.dumps(kept | {"sha256": "00" * 32}))
    assert digest(folder) != first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert digest(folder) == first
    for damage in ("{", "[]", '{"size": 1}', json.dumps(kept | {"sha256": 5})):
        note.write_text(damage)
        assert digest(folder) == first
    write_folder(folder, seed=1)
    assert digest(folder) != first


def test_the_digest_follows_what_the_config_computes(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write_folder(folder)
    first = digest(folder)
    edit_json(folder / "config.json", max_position_embeddings=77, eos_token_id=5)
    assert digest(folder) == first
    edit_json(folder / "config.json", rms_norm_eps=1e-5)
    assert digest(folder) != first


def test_a_linked_file_is_remembered_in_the_cache_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "blobs")
    (tmp_path / "m").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "m" / file.name).symlink_to(file)
    first = digest(tmp_path / "m")
    assert not list(tmp_path.glob("*/*.forebay-digest"))
    (note,) = (tmp_path / "cache" / "forebay" / "digests").iterdir()
    assert digest(tmp_path / "m") == first
    note.write_text(json.dumps(json.loads(note.read_text()) | {"sha256": "00" * 32}))
    assert digest(tmp_path / "m") != first


def test_precisions_have_the_dtypes_they_say(tmp_path: Path) -> None:
    write_folder(tmp_path / "m")
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    for precision, dtype in dtypes.items():
        model = load_model(tmp_path / "m", precision).model  # type: ignore[arg-type]
        assert model.kv_dtype == dtype and model.config == tiny_config()
