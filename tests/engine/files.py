"""Tiny models on disk, as users have them: a safetensors folder, whole or sharded, and a GGUF file of the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from forebay.engine.config import ModelConfig
from forebay.engine.ops.rope import stretch
from forebay.engine.weights.gguf_file import _LAYER_NAMES, _NAMES
from tests.engine.tiny import random_weights, tiny_config

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Printable bytes as far as they fit, one merge, and two special tokens at the end of the vocabulary."""
    space, line_end = "Ġ", "Ċ"
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {space, line_end}, key=ord)
    tokens = [space, line_end, *alphabet[: vocab_size - 5], "th"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|start|>", "<|end|>")])
    return tokenizer


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json as a model of today has it."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling := config.rope_scaling:
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor}
        rope |= {"high_freq_factor": scaling.high_freq_factor}
        rope |= {"original_max_position_embeddings": scaling.original_context}
    return {
        "model_type": config.architecture,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "hidden_act": "silu",
    }


def write_folder(folder: Path, architecture: str = "qwen2", seed: int = 0, *, shards: int = 1) -> ModelConfig:
    config = tiny_config(architecture)
    weights = {name: tensor.float() for name, tensor in random_weights(config, seed).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        place = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(weights)}
        for file in set(place.values()):
            save_file({name: weights[name] for name in weights if place[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    tiny_tokenizer(config.vocab_size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return config


def write_gguf(file: Path, architecture: str = "qwen2", seed: int = 0) -> ModelConfig:
    """The same weights in llama.cpp's names and order, float32."""
    from gguf import GGUFWriter

    config = tiny_config(architecture)
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    tokenizer = tiny_tokenizer(config.vocab_size)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(config.eos_token_ids[0])
    writer.add_chat_template(TEMPLATE)
    names = {hf: gguf for gguf, hf in (_NAMES | _LAYER_NAMES).items()}
    for name, tensor in random_weights(config, seed).items():
        stem, _, kind = name.removeprefix("model.layers.").rpartition(".")
        layer, _, inner = stem.partition(".")
        known = f"blk.{layer}.{names[inner]}" if name.startswith("model.layers.") else names[stem]
        if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.heads if "q_proj" in inner else config.kv_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{known}.{kind}", tensor.float().numpy())
    if config.rope_scaling:
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", stretch(frequencies, config.rope_scaling).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config
