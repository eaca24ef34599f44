"""Guards of identity: namespaces, keys, and what a reader compares with an object's header."""

from __future__ import annotations

import os
from typing import Any

from tests.faults.guards.registry import off, put


@off("token comparison", quick=True)
def token_comparison() -> None:
    from forebay.clients.memory import SharedMemory

    real = SharedMemory.leading_good

    def leading_good(self: Any, places: Any, keys: Any, namespace: Any, layout: Any, token_words: Any) -> int:
        return real(self, places, keys, namespace, layout, None)

    put(SharedMemory, "leading_good", leading_good)


@off("header comparison")
def header_comparison() -> None:
    from forebay.clients.memory import SharedMemory

    put(SharedMemory, "leading_good", lambda self, places, *rest: len(places))


@off("namespaces")
def namespaces() -> None:
    from forebay.server import daemon

    put(daemon, "namespace_id", lambda facts, **tenant: b"n" * 16)


@off("stable hash")
def stable_hash() -> None:
    from forebay.kvstore import keys

    seed = os.urandom(8)
    hashes = {name: lambda message, real=real: real(seed + message) for name, real in keys._HASHES.items()}
    put(keys, "_HASHES", hashes)


@off("tagged fields")
def tagged_fields() -> None:
    from forebay.kvstore import identity

    put(identity, "_field", lambda tag, body: body)


@off("every fact")
def every_fact() -> None:
    from forebay.kvstore import identity

    real = identity._encode_value
    put(identity, "_encode_value", lambda value, form: b"" if value in ("fp16", "bf16") else real(value, form))


@off("extras in keys")
def extras() -> None:
    from forebay.kvstore import keys

    real = keys._messages
    put(keys, "_messages", lambda words, block_tokens, extras: real(words, block_tokens, {}))


@off("chained keys", quick=True)
def chain() -> None:
    from forebay.kvstore import keys

    hashes = {name: lambda message, real=real: real(message[keys.KEY_BYTES :]) for name, real in keys._HASHES.items()}
    put(keys, "_HASHES", hashes)


@off("weights digest")
def weights_digest() -> None:
    from forebay.engine_adapter import hf_identity

    put(hf_identity, "weights_digest", lambda model: type(model).__name__.encode().ljust(32))
