"""docs/wire.md says exactly what kvstore/wire.py does: every verb, field, type, error code, record and example byte."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest

from forebay.clients.transport import _DECODERS, MAX_REPLY_BYTES
from forebay.kvstore import framing, wire
from forebay.kvstore.errors import PROTOCOL_ERRORS
from forebay.kvstore.wire import LOCATION_DTYPE, Kind, SlotStatus
from forebay.server import daemon, door, verbs

PAGE = (Path(__file__).parent.parent / "docs" / "wire.md").read_text()
SECTIONS = {
    title: body for title, body in re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL) if body
}
REQUESTS = {str(cls.__struct_config__.tag): cls for cls in wire.REQUESTS}
FIELD = re.compile(r"^\| ([→←!]) \| `(\w+)` \| (.+?) \| .*\|$", re.MULTILINE)
EXAMPLE = re.compile(
    r"^(Request|Reply|Error|Notice) (\d+), .*?`(\w+)\((.*?)\)`.*?\n```hex\n(.*?)^```$", re.M | re.DOTALL
)


def table(head: str) -> list[list[str]]:
    """The rows of the table whose head line is `head`, cells without their code marks."""
    lines = PAGE.split(f"\n{head}\n")[1].split("\n\n", 1)[0].splitlines()[1:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def wire_type(hint: Any) -> str:
    """A type as the page writes it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is list:
        return f"[{wire_type(args[0])}]"
    if origin is tuple:
        return f"[{', '.join(wire_type(arg) for arg in args)}]"
    if origin is dict:
        return f"{{{wire_type(args[0])}: {wire_type(args[1])}}}"
    return "any" if hint is Any else str(hint.__name__)


def fields_of(struct: Any) -> list[tuple[str, str]]:
    hints = get_type_hints(struct)
    found = []
    for field in msgspec.structs.fields(struct):
        default = field.default if field.default is not msgspec.NODEFAULT else None
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        shown = "" if default is None else f" = {default or ('empty' if default != 0 else 0)}"
        found.append((field.name, wire_type(hints[field.name]) + shown))
    return found


def documented(verb: str, mark: str) -> list[tuple[str, str]]:
    return [(name, kind) for found, name, kind in FIELD.findall(SECTIONS[verb]) if found == mark]


def test_every_verb_has_its_section_and_no_other() -> None:
    assert set(SECTIONS) == set(wire.VERBS)


@pytest.mark.parametrize("verb", sorted(wire.VERBS))
def test_a_verbs_tables_are_its_request_and_its_reply(verb: str) -> None:
    assert documented(verb, "→") == fields_of(REQUESTS[verb])
    assert documented(verb, "←") == fields_of(_DECODERS[REQUESTS[verb]].type)


def test_the_notice_is_documented_with_prefetch() -> None:
    assert documented("prefetch", "!") == fields_of(wire.Loaded)


def test_every_error_code_is_documented_with_its_weight() -> None:
    found = [(row[0], row[1]) for row in table("| code | fatal | meaning |")]
    assert found == [(code, "yes" if cls.fatal else "no") for code, cls in PROTOCOL_ERRORS.items()]


def test_every_code_that_a_verb_names_exists() -> None:
    for verb, body in SECTIONS.items():
        for listed in re.findall(r"Errors: (.*?)(?:\n\n)", body, re.DOTALL):
            without_settings = re.sub(r"\(.*?\)", "", listed, flags=re.DOTALL)
            assert set(re.findall(r"`(\w+)`", without_settings)) <= set(PROTOCOL_ERRORS), verb


def test_header_location_and_status_tables_are_the_code() -> None:
    head = "| offset | bytes | field | meaning |"
    frame, location = (part.split("\n\n", 1)[0] for part in PAGE.split(f"\n{head}\n")[1:3])
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", frame, re.MULTILINE)
    assert [(int(at), int(size)) for at, size, _ in rows] == [(0, 4), (4, 1), (5, 1), (6, 2), (8, 4)]
    assert sum(int(size) for _, size, _ in rows) == wire.HEADER_BYTES
    fields = LOCATION_DTYPE.fields
    assert fields is not None and LOCATION_DTYPE.names is not None
    expected = [(fields[name][1], fields[name][0].itemsize, name) for name in LOCATION_DTYPE.names]
    found = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", location, re.MULTILINE)
    assert [(int(at), int(size), name) for at, size, name in found] == expected
    statuses = [(int(row[0]), row[1]) for row in table("| value | name | meaning |")]
    assert statuses == [(status.value, status.name) for status in SlotStatus]


def test_bounds_that_the_page_names_are_those_of_the_code() -> None:
    assert door._MAX_RUNNING == framing.MAX_DESCRIPTORS == 64
    assert framing._MAX_OUTBOX_BYTES == MAX_REPLY_BYTES == 256 << 20
    assert verbs.MAX_HANDLES == 4096 and daemon._MAX_PINNED_SHARE == 0.5
    for bound in ("64 requests", "at most 64 in a frame", "up to 256 MiB", "4,096 handles", "more than half"):
        assert bound in PAGE.replace("\n", " ")


def example_body(name: str, arguments: str) -> msgspec.Struct:
    record = re.search(r"locations\((.*?)\)", arguments)
    if record:
        values = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", record[1])}
        place = np.array([tuple(values[field] for field in LOCATION_DTYPE.names or ())], LOCATION_DTYPE)
        arguments = arguments.replace(record[0], repr(place.tobytes()))
    made: msgspec.Struct = getattr(wire, name)(*ast.literal_eval(f"({arguments},)"))
    return made


def test_every_block_of_hex_is_an_example_that_is_checked() -> None:
    assert len(EXAMPLE.findall(PAGE)) == PAGE.count("```hex") == 9


@pytest.mark.parametrize("example", EXAMPLE.findall(PAGE), ids=lambda example: f"{example[0]} {example[1]}")
def test_an_example_is_what_the_code_sends(example: tuple[str, str, str, str, str]) -> None:
    kind, number, name, arguments, text = example
    said = bytes.fromhex("".join(line.partition("#")[0] for line in text.splitlines()))
    assert wire.encode_frame(Kind[kind.upper()], int(number), example_body(name, arguments)) == said
    assert wire.parse_header(said, 0, 1 << 20) == (Kind[kind.upper()], int(number), len(said) - wire.HEADER_BYTES)


@pytest.mark.parametrize("verb", sorted(wire.VERBS))
def test_a_receiver_ignores_fields_that_it_does_not_know_yet(verb: str) -> None:
    required = {"int": 1, "str": "x", "bytes": b"x" * 16, "[int]": [1], "[bytes]": [b"x"], "{str: float}": {"x": 1.0}}
    fields = [required[kind.partition(" = ")[0]] for _, kind in fields_of(REQUESTS[verb])]
    decoded = wire.decode_request(msgspec.msgpack.encode([verb, *fields, "a field of a later version", 7]))
    assert type(decoded) is REQUESTS[verb]
    assert list(msgspec.structs.astuple(decoded)) == fields
    short = [value for value, (_, kind) in zip(fields, fields_of(REQUESTS[verb]), strict=True) if " = " not in kind]
    assert type(wire.decode_request(msgspec.msgpack.encode([verb, *short]))) is REQUESTS[verb]
