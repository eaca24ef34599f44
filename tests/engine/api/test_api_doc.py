"""docs/reference/engine-api.md says of routes, fields and codes what the code does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from forebay.engine.api import bodies
from forebay.engine.api.keys import ApiKeys
from forebay.engine.api.server import ApiServer
from forebay.engine.tokenizer import load_tokenizer
from forebay.engine.weights import open_weights
from tests.engine.api.fake_engine import FakeEngine

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "engine-api.md").read_text()


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([\w/{}]+)`", text))


def section(heading: str) -> str:
    return PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


async def test_every_route_is_listed(model_folder: Path) -> None:
    tokenizer = load_tokenizer(model_folder, open_weights(model_folder))
    server = ApiServer(FakeEngine(), tokenizer, model="m", keys=ApiKeys())
    await server.start()
    routes = server.routes()
    await server.stop()
    assert set(re.findall(r"^\| (\w+) \| `(\S+)` \|", section("Routes"), re.MULTILINE)) == routes


def test_every_field_is_listed() -> None:
    told = codes(section("What a completion takes"))
    fields = {*bodies.Completion.__struct_fields__, *bodies.Chat.__struct_fields__}
    assert not fields - told
    paragraphs = section("What a completion takes").split("\n\n")
    (ignored,) = (codes(each) for each in paragraphs if each.startswith("Ignored"))
    (refused,) = (codes(each) for each in paragraphs if each.startswith("Refused"))
    assert ignored == bodies.IGNORED and refused == set(bodies.UNSUPPORTED)


def test_every_code_of_an_error_is_listed() -> None:
    used = set()
    for path in (ROOT / "engine" / "api").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
                "bad_request",
                "ApiError",
                "failed",
            ):
                given = [
                    *(keyword.value for keyword in node.keywords if keyword.arg == "code"),
                    *node.args[2:],
                    *node.args[1:2],
                ]
                texts = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                used |= {text for text in texts if re.fullmatch(r"[a-z]+(_[a-z]+)+", text)}
    told = codes(section("Errors")) & {text for text in codes(section("Errors")) if "_" in text} | {"draining"}
    parameters = set(bodies.Chat.__struct_fields__) | set(bodies.Completion.__struct_fields__)
    assert used - parameters - {"invalid_request_error"} <= told
    assert "context_length_exceeded" in used and "max_tokens" in told
