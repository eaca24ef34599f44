"""A tiny random Qwen2 in a folder, as models are published: weights, config, byte-level BPE tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 384
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINED_ON = [
    "The quick brown fox jumps over the lazy dog, and the login button moves to the top right of the page.",
    "A forebay is the pool of water held in front of a turbine: what the turbine will need is there before it asks.",
    "One two three four five six seven eight nine ten; again: one two three four five six seven eight nine ten.",
]


def save_tiny_model(folder: Path, *, seed: int = 0, context: int = 4096) -> Path:
    """Write the model to `folder` and return it. Its answers are noise, the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, layers, heads, kv_heads, head_dim, inner = 64, 2, 4, 2, 16, 128
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 0.15) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * scale

    weights = {
        "model.embed_tokens.weight": weight(VOCABULARY, hidden, scale=1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(VOCABULARY, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        weights[f"{at}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{at}.post_attention_layernorm.weight"] = torch.ones(hidden)
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = weight(rows * head_dim, hidden)
            weights[f"{at}.self_attn.{name}_proj.bias"] = weight(rows * head_dim)
        weights[f"{at}.self_attn.o_proj.weight"] = weight(hidden, heads * head_dim)
        weights[f"{at}.mlp.gate_proj.weight"] = weight(inner, hidden)
        weights[f"{at}.mlp.up_proj.weight"] = weight(inner, hidden)
        weights[f"{at}.mlp.down_proj.weight"] = weight(hidden, inner)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINED_ON, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": None,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
