"""Rolling block keys: which bytes a block of tokens is filed under.

Covers token encoding and the chain, which starts from the namespace id as `key[-1]`:

    key[i] = H(key[i-1] ‖ u32le n ‖ n × u32le token ‖ u32le len(extras) ‖ extras)

Leaves to callers what goes into extras. Always true: a key names the namespace, every token and every extra up to its
block, so equal keys mean equal prefixes, in every process and language (tests/vectors/keys.json). The hash is not the
last word: readers compare the token ids in the object's header too.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

KEY_BYTES = 16

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[Any]

_U32_MAX = 0xFFFF_FFFF


def _sha256_16(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()[:KEY_BYTES]


# xxh3_128_digest gives XXH3's canonical form: the 128-bit value, big-endian.
_HASHES: dict[str, Callable[[bytes], bytes]] = {"xxh3-128": xxhash.xxh3_128_digest, "sha256": _sha256_16}

HASH_ALGORITHMS = frozenset(_HASHES)


def token_words(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    """Token ids as one contiguous array of little-endian u32, shape [tokens]; no copy if they already are one.

    Raises:
        ValueError: not one-dimensional, not integers, or outside 0..2^32-1.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise ValueError(f"token ids must be one row of integers, not {token_ids.dtype} of shape {token_ids.shape}")
        if (
            token_ids.dtype.newbyteorder("=") not in (np.uint8, np.uint16, np.uint32)
            and len(token_ids)
            and (token_ids.min() < 0 or token_ids.max() > _U32_MAX)
        ):
            raise ValueError("token ids must be within 0..4294967295")
        return np.ascontiguousarray(token_ids, dtype="<u4")
    if isinstance(token_ids, bytes | bytearray | memoryview | str):
        # Bytes are a sequence of small integers to Python; taken as such they would give wrong keys without a sound.
        raise ValueError(f"token ids must be a sequence of integers, not {type(token_ids).__name__}")
    try:
        # array() checks every item's range in C; numpy before 2.0 would wrap negative ones around.
        return np.frombuffer(array("I", token_ids), dtype=np.uint32).astype("<u4", copy=False)
    except (OverflowError, TypeError) as exc:
        raise ValueError(f"token ids must be integers within 0..4294967295: {exc}") from exc


def block_keys(
    namespace_id: bytes,
    token_ids: TokenIds,
    block_tokens: int,
    *,
    algorithm: str = "xxh3-128",
    extras: Mapping[int, bytes] | None = None,
    parent: bytes | None = None,
) -> list[bytes]:
    """Keys of the full blocks of `token_ids`, in order; a partly filled last block has none.

    Args:
        namespace_id: 16 bytes.
        token_ids: [tokens], each 0..2^32-1.
        block_tokens: tokens a block, at least 1.
        algorithm: the namespace's hash_algorithm.
        extras: what else the block's bytes depend on (a media digest at its placeholders, ...), by block index counted
            from the start of `token_ids`. Tagged by whoever makes them, so that two sorts never look alike. Empty
            bytes are the same as none; those of a partly filled last block are not used.
        parent: 16-byte key of the block before the first, to continue a chain; None starts one.
    Raises:
        ValueError: a length, range or name above does not hold.
    """
    if len(namespace_id) != KEY_BYTES:
        raise ValueError(f"namespace_id must be {KEY_BYTES} bytes, not {len(namespace_id)}")
    if parent is not None and len(parent) != KEY_BYTES:
        raise ValueError(f"parent must be a key of {KEY_BYTES} bytes, not {len(parent)}")
    if not 1 <= block_tokens <= _U32_MAX:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    digest = _HASHES.get(algorithm)
    if digest is None:
        raise ValueError(f"unknown hash algorithm {algorithm!r}: use one of {', '.join(sorted(_HASHES))}")

    messages = _messages(token_words(token_ids), block_tokens, extras or {})
    key = bytes(namespace_id if parent is None else parent)
    keys = []
    for message in messages:
        key = digest(key + message)
        keys.append(key)
    return keys


def _messages(words: npt.NDArray[np.uint32], block_tokens: int, extras: Mapping[int, bytes]) -> list[bytes]:
    """What is hashed for each full block after the key before it."""
    count, rest = divmod(len(words), block_tokens)
    rows = np.empty((count, block_tokens + 2), dtype="<u4")
    rows[:, 0] = block_tokens
    rows[:, 1:-1] = words[: count * block_tokens].reshape(count, block_tokens)
    rows[:, -1] = 0  # length of the extras
    # Rows seen as opaque items become a list of bytes in C, several times faster than slicing one by one.
    messages: list[bytes] = rows.view(f"V{4 * (block_tokens + 2)}").ravel().tolist()
    for index, extra in extras.items():
        if not 0 <= index < count + bool(rest):
            raise ValueError(f"extras for block {index}, but the tokens make {count + bool(rest)} blocks")
        if index < count:
            messages[index] = messages[index][:-4] + len(extra).to_bytes(4, "little") + extra
    return messages
