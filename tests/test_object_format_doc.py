"""docs/reference/object-format.md says exactly what the code does, down to the last byte of its examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from forebay.kvstore import identity
from forebay.kvstore.identity import PUBLIC_SECRET, NamespaceFacts, namespace_id
from forebay.kvstore.keys import block_keys
from forebay.kvstore.objects import HEADER_DTYPE, MAGIC, VERSION, ObjectLayout

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "object-format.md").read_text()
EXAMPLE: dict[str, Any] = {
    "weights_digest": b"weights",
    "weight_format": "bf16",
    "compute_dtype": "bf16",
    "kv_dtype": "bf16",
    "producer": "example",
    "block_tokens": 4,
    "layers": 1,
    "kv_heads": 2,
    "head_dim": 1,
    "rope": b"",
}
FACTS = NamespaceFacts(**EXAMPLE)
NAMESPACE = namespace_id(FACTS, tenant="default", secret=PUBLIC_SECRET)
KEYS = block_keys(NAMESPACE, range(1, 9), 4)
PAYLOAD = bytes(range(32))


def fenced(kind: str) -> str:
    found = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, kind
    return str(found[0])


def hex_bytes(text: str) -> bytes:
    return bytes.fromhex("".join(line.partition("#")[0] for line in text.splitlines()))


def rows(head: str) -> list[tuple[str, ...]]:
    """The rows of the table whose head line is `head`, cells without their code marks."""
    table = PAGE.split(f"\n{head}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    return [tuple(cell.strip().strip("`") for cell in line.strip("|").split("|")) for line in table]


def example() -> bytearray:
    layout = ObjectLayout.of(FACTS)
    view = bytearray(layout.object_bytes)
    layout.write_header(
        view,
        key=KEYS[1],
        parent=KEYS[0],
        namespace=NAMESPACE,
        position=4,
        token_ids=[5, 6, 7, 8],
        checksums=layout.part_checksums(PAYLOAD),
        created_ns=10**9,
    )
    view[layout.header_bytes :] = PAYLOAD
    layout.seal_header(view)
    return view


def test_the_table_of_fixed_fields_is_the_header() -> None:
    found = [(int(row[0]), int(row[1]), row[2]) for row in rows("| offset | bytes | field | meaning |")]
    fields = HEADER_DTYPE.fields
    assert fields is not None and HEADER_DTYPE.names is not None
    assert found == [(fields[name][1], fields[name][0].itemsize, name) for name in HEADER_DTYPE.names]
    meaning = {row[2]: row[3] for row in rows("| offset | bytes | field | meaning |")}
    assert meaning["magic"] == MAGIC.decode() and meaning["version"] == str(VERSION)


def test_the_tables_of_facts_are_the_encoding() -> None:
    for head, fields in (
        ("| tag | field | form |", identity._FACTS),
        ("| tag | group field | form |", identity._GROUP),
    ):
        assert rows(head) == [(str(tag), name, form) for tag, (name, form) in enumerate(fields, 1)]


def test_the_stated_offsets_hold_for_any_counts() -> None:
    for tokens in (1, 2, 3, 16, 63, 64):
        for parts in (1, 2, 7, 8, 64):
            layout = ObjectLayout(0, tokens, (64,) * parts)
            checksums_offset = -(-(96 + 4 * tokens) // 8) * 8
            assert layout.checksums_offset == checksums_offset
            assert layout.header_bytes == -(-(checksums_offset + 8 * parts) // 64) * 64


def test_the_example_facts_are_those_that_are_encoded() -> None:
    said = fenced("facts").split()
    assert said == [f"{name}={value!r}".replace("'", '"') for name, value in EXAMPLE.items()]
    assert hex_bytes(fenced("hex facts")) == FACTS.encode()
    assert f"{len(FACTS.encode())} bytes" in PAGE


def test_the_example_ids_and_keys_are_right() -> None:
    assert f"| namespace id | `{NAMESPACE.hex()}` |" in PAGE
    for index, key in enumerate(KEYS):
        assert re.search(rf"\| key of block {index}, tokens .* \| `{key.hex()}` \|", PAGE)


def test_the_example_object_is_right_byte_by_byte() -> None:
    stored = hex_bytes(fenced("hex object"))
    assert stored == example()
    layout = ObjectLayout.of(FACTS)
    assert layout.verify_object(stored, key=KEYS[1], namespace=NAMESPACE, token_ids=[5, 6, 7, 8], sealed=True) is None


def test_the_public_secret_and_tenant_are_those_of_the_daemon() -> None:
    from forebay.server.auth import DEFAULT_TENANT

    assert f"`{PUBLIC_SECRET.decode()}`" in PAGE and f"`{DEFAULT_TENANT}`" in PAGE
