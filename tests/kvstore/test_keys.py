"""Rolling keys: stable everywhere, one for each prefix, and different for anything that differs."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.kvstore.keys import HASH_ALGORITHMS, KEY_BYTES, block_keys, token_words

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "keys.json").read_text())["keys"]
NAMESPACE = bytes(range(16))

algorithms = st.sampled_from(sorted(HASH_ALGORITHMS))
tokens = st.integers(0, 2**32 - 1) | st.integers(0, 3)
runs = st.lists(tokens, max_size=40)
sizes = st.integers(1, 9)


def spec_keys(
    algorithm: str, previous: bytes, token_ids: list[int], block_tokens: int, extras: dict[int, bytes]
) -> list[bytes]:
    """The written rule, one piece at a time."""
    keys = []
    for index in range(len(token_ids) // block_tokens):
        hasher: Any = hashlib.sha256() if algorithm == "sha256" else xxhash.xxh3_128()
        hasher.update(previous)
        hasher.update(struct.pack("<I", block_tokens))
        for token in token_ids[index * block_tokens : (index + 1) * block_tokens]:
            hasher.update(struct.pack("<I", token))
        extra = extras.get(index, b"")
        hasher.update(struct.pack("<I", len(extra)))
        hasher.update(extra)
        previous = hasher.digest()[:16] if algorithm == "sha256" else hasher.intdigest().to_bytes(16, "big")
        keys.append(previous)
    return keys


@pytest.mark.parametrize("vector", VECTORS)
def test_golden_vectors_follow_from_the_written_rule(vector: dict[str, Any]) -> None:
    first = bytes.fromhex(vector["parent"] or vector["namespace_id"])
    extras = {int(index): bytes.fromhex(extra) for index, extra in vector["extras"].items()}
    keys = spec_keys(vector["algorithm"], first, vector["token_ids"], vector["block_tokens"], extras)
    assert [key.hex() for key in keys] == vector["keys"]


@pytest.mark.parametrize("vector", VECTORS)
def test_forebay_gives_the_golden_vectors(vector: dict[str, Any]) -> None:
    keys = block_keys(
        bytes.fromhex(vector["namespace_id"]),
        vector["token_ids"],
        vector["block_tokens"],
        algorithm=vector["algorithm"],
        extras={int(index): bytes.fromhex(extra) for index, extra in vector["extras"].items()},
        parent=bytes.fromhex(vector["parent"]) if vector["parent"] else None,
    )
    assert [key.hex() for key in keys] == vector["keys"]


@given(algorithms, runs, sizes, st.dictionaries(st.integers(0, 3), st.binary(max_size=5)))
def test_keys_follow_the_written_rule(algorithm: str, run: list[int], size: int, extras: dict[int, bytes]) -> None:
    extras = {index: extra for index, extra in extras.items() if index < len(run) // size}
    keys = block_keys(NAMESPACE, run, size, algorithm=algorithm, extras=extras)
    assert keys == spec_keys(algorithm, NAMESPACE, run, size, extras)
    assert all(len(key) == KEY_BYTES for key in keys)


@given(algorithms, runs, sizes, st.integers(0, 40))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(algorithm: str, run: list[int], size: int, cut: int) -> None:
    prefix = block_keys(NAMESPACE, run[:cut], size, algorithm=algorithm)
    assert prefix == block_keys(NAMESPACE, run, size, algorithm=algorithm)[: min(cut, len(run)) // size]


@given(algorithms, runs, sizes, st.data())
def test_a_run_continued_from_a_parent_gives_the_same_keys(
    algorithm: str, run: list[int], size: int, data: st.DataObject
) -> None:
    whole = block_keys(NAMESPACE, run, size, algorithm=algorithm)
    at = data.draw(st.integers(0, len(whole)))
    parent = whole[at - 1] if at else None
    assert whole[at:] == block_keys(NAMESPACE, run[at * size :], size, algorithm=algorithm, parent=parent)


@given(st.lists(tokens, min_size=1, max_size=40), sizes, st.data())
def test_one_other_token_changes_the_keys_from_its_block_on(run: list[int], size: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(run) - 1))
    other = [*run[:at], run[at] ^ data.draw(st.integers(1, 2**32 - 1)), *run[at + 1 :]]
    assert_equal_up_to(at // size, block_keys(NAMESPACE, run, size), block_keys(NAMESPACE, other, size))


@given(st.lists(tokens, min_size=9, max_size=40), sizes, st.binary(min_size=1, max_size=9), st.data())
def test_extras_change_exactly_the_keys_from_their_block_on(
    run: list[int], size: int, extra: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(run) // size - 1))
    plain = block_keys(NAMESPACE, run, size)
    assert_equal_up_to(at, plain, block_keys(NAMESPACE, run, size, extras={at: extra}))
    assert block_keys(NAMESPACE, run, size, extras={at: b""}) == plain


@given(sizes, runs, st.binary(max_size=4))
def test_tokens_moved_into_the_extras_give_another_key(size: int, run: list[int], extra: bytes) -> None:
    # The same bytes, cut elsewhere: k tokens and extras against k-1 tokens and the last one's bytes in the extras.
    run = (run or [0]) * (size + 1)
    one = block_keys(NAMESPACE, run[: size + 1], size + 1, extras={0: extra})
    moved = struct.pack("<I", run[size]) + extra
    assert one != block_keys(NAMESPACE, run[:size], size, extras={0: moved})


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_extras_moved_to_the_next_block_give_other_keys(one: bytes, two: bytes) -> None:
    def last(first: bytes, second: bytes) -> bytes:
        return block_keys(NAMESPACE, [1, 2], 1, extras={0: first, 1: second})[-1]

    assert (last(one, two) == last(one + two, b"")) == (two == b"")


def test_block_size_namespace_and_algorithm_each_change_the_keys() -> None:
    run = list(range(8))
    firsts = {
        block_keys(NAMESPACE, run, 4)[0],
        block_keys(NAMESPACE, run, 8)[0],
        block_keys(NAMESPACE[::-1], run, 4)[0],
        block_keys(NAMESPACE, run, 4, algorithm="sha256")[0],
    }
    assert len(firsts) == 4


def test_equal_blocks_at_different_places_have_different_keys() -> None:
    assert len(set(block_keys(NAMESPACE, [7] * 400, 4))) == 100


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8"])
def test_every_integer_array_gives_the_keys_of_the_list(dtype: str) -> None:
    run = list(range(100))
    array = np.array(run, dtype=dtype)
    array.flags.writeable = False
    assert block_keys(NAMESPACE, array, 16) == block_keys(NAMESPACE, run, 16)
    assert block_keys(NAMESPACE, array[::2], 16) == block_keys(NAMESPACE, run[::2], 16)
    assert block_keys(NAMESPACE, tuple(run), 16) == block_keys(NAMESPACE, range(100), 16)


def test_token_words_are_little_endian_and_not_copied_when_they_already_are() -> None:
    assert token_words([1, 0xFFFF_FFFF]).tobytes() == b"\1\0\0\0\xff\xff\xff\xff"
    words = np.arange(5, dtype="<u4")
    assert np.shares_memory(token_words(words), words)


@pytest.mark.parametrize(
    "run",
    [
        [-1],
        [2**32],
        [1.0],
        ["1"],
        [None],
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"abcd"),
        "abcd",
        np.array([-1]),
        np.array([2**32]),
        np.array([-1], dtype=np.int8),
        np.array([2**32], dtype=np.uint64),
        np.array([1.0]),
        np.array([True]),
        np.array([[1, 2]]),
        np.array([None]),
    ],
    ids=lambda value: type(value).__name__,  # repr has an address, and workers must agree on names
)
def test_token_ids_that_are_no_u32_are_refused(run: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        block_keys(NAMESPACE, run, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"namespace_id": b"short"}, "namespace_id must be 16"),
        ({"parent": b""}, "parent must be a key of 16"),
        ({"parent": bytes(17)}, "parent must be a key of 16"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": -4}, "block_tokens"),
        ({"algorithm": "md5"}, "unknown hash algorithm 'md5'.*sha256, xxh3-128"),
        ({"extras": {-1: b"x"}}, "extras for block -1"),
        ({"extras": {3: b"x"}}, "extras for block 3, but the tokens make 3 blocks"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(change: dict[str, Any], says: str) -> None:
    arguments: dict[str, Any] = {"namespace_id": NAMESPACE, "token_ids": list(range(10)), "block_tokens": 4, **change}
    with pytest.raises(ValueError, match=says):
        block_keys(**arguments)


def test_extras_of_a_partly_filled_last_block_are_not_used_yet() -> None:
    run = list(range(10))
    assert block_keys(NAMESPACE, run, 4, extras={2: b"media"}) == block_keys(NAMESPACE, run, 4)


def test_no_full_block_means_no_keys() -> None:
    assert block_keys(NAMESPACE, [], 4) == block_keys(NAMESPACE, [1, 2, 3], 4) == []
    assert block_keys(NAMESPACE, np.array([], dtype=np.int64), 4) == []


def test_keys_do_not_depend_on_the_process() -> None:
    program = (
        "from forebay.kvstore.keys import block_keys;"
        "print([block_keys(bytes(range(16)), list(range(64)), 16, algorithm=name, extras={1: b'x', 0: b'y'})"
        " for name in ('xxh3-128', 'sha256')])"
    )
    here = [
        block_keys(NAMESPACE, list(range(64)), 16, algorithm=name, extras={0: b"y", 1: b"x"})
        for name in ("xxh3-128", "sha256")
    ]
    for seed in ("0", "4242"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert out.stdout.strip() == repr(here)


def assert_equal_up_to(block: int, one: list[bytes], other: list[bytes]) -> None:
    assert one[:block] == other[:block]
    assert not set(one[block:]) & set(other[block:])
