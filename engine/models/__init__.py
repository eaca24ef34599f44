"""The architectures. Each is the shared decoder with its flags; a new one of the family is one entry here."""

from __future__ import annotations

from typing import Any

# What an architecture fixes by its name alone. Everything else is read from the model's own config.
FLAGS: dict[str, dict[str, Any]] = {
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "llama": {"qkv_bias": False, "qk_norm": False},
}
