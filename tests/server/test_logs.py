"""Logs: their two forms, and that user data never reaches a line."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.server import logs

TOKENS = [9707, 11, 1879, 0, 151644, 872, 198]
PROMPT = "Move the login button to the top right. " * 8


@pytest.fixture(autouse=True)
def restored_logger() -> Iterator[None]:
    logger = logging.getLogger(logs.LOGGER_NAME)
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def written(log_format: Literal["text", "json"], act: Callable[[logging.Logger], object]) -> str:
    stream = io.StringIO()
    logs.set_up("debug", log_format, stream)
    act(logging.getLogger("forebay.server.test"))
    return stream.getvalue()


def test_a_json_line_holds_time_level_event_and_facts() -> None:
    text = written("json", lambda log: log.info("session closed", extra={"session": 7, "why": "eof", "load_s": 0.5}))
    line = json.loads(text)
    assert text.count("\n") == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "info",
        "logger": "forebay.server.test",
        "event": "session closed",
        "session": 7,
        "why": "eof",
        "load_s": 0.5,
    }


def test_a_text_line_is_one_line_with_facts_that_can_be_told_apart() -> None:
    text = written("text", lambda log: log.warning("tier\ndown", extra={"tier": "ssd", "reason": 'no "room" left'}))
    assert text.count("\n") == 1
    assert text.endswith('warning tier\\ndown  tier=ssd  reason="no \\"room\\" left"\n')


def test_the_level_is_kept() -> None:
    stream = io.StringIO()
    logs.set_up("warning", "text", stream)
    logging.getLogger("forebay.x").info("quiet")
    logging.getLogger("forebay.x").warning("loud")
    assert "quiet" not in stream.getvalue() and "loud" in stream.getvalue()


def test_setting_up_twice_writes_each_record_once() -> None:
    written("text", lambda log: None)
    assert written("text", lambda log: log.info("once")).count("once") == 1


def leak(log: logging.Logger, how: str) -> None:
    array = np.array(TOKENS, dtype=np.uint32)
    if how == "extra list":
        log.info("put", extra={"blocks": TOKENS})
    elif how == "extra array":
        log.info("put", extra={"blocks": array})
    elif how == "extra dict":
        log.info("put", extra={"request": {"ids": TOKENS}})
    elif how == "argument":
        log.info("put %s", TOKENS)
    elif how == "named argument":
        log.info("put %(ids)s", {"ids": tuple(TOKENS)})
    elif how == "bytes argument":
        log.info("put %r", array.tobytes())
    elif how == "memoryview":
        log.info("put", extra={"view": memoryview(array.tobytes())})
    elif how == "message":
        log.info("put " + str(TOKENS))
    elif how == "bytes in message":
        log.info("put " + repr(array.tobytes()))
    elif how == "array in message":
        log.info("put " + repr(array))
    elif how == "numpy scalars in message":
        log.info("put " + str(list(array)))
    elif how == "prompt as fact":
        log.info("put", extra={"prompt": "hello"})
    elif how == "long text under another name":
        log.info("put", extra={"why": PROMPT})
    else:
        try:
            raise ValueError(f"token mismatch: {TOKENS} {array!r}", TOKENS)
        except ValueError as exc:
            if how == "exception":
                log.exception("put failed")
            else:
                log.info("put failed", extra={"error": exc})


WAYS = [
    "extra list",
    "extra array",
    "extra dict",
    "argument",
    "named argument",
    "bytes argument",
    "memoryview",
    "message",
    "bytes in message",
    "array in message",
    "numpy scalars in message",
    "prompt as fact",
    "long text under another name",
    "exception",
    "exception as fact",
]


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("how", WAYS)
def test_token_ids_and_prompt_text_never_reach_a_line(log_format: Literal["text", "json"], how: str) -> None:
    text = written(log_format, lambda log: leak(log, how))
    assert "put" in text
    assert not re.search(r"9707|1879|151644|\\\\?xeb|hello", text), text
    assert PROMPT not in text


@given(st.lists(st.integers(min_value=0, max_value=2**32 - 1), min_size=4, max_size=64))
def test_no_rendering_of_a_token_sequence_survives(tokens: list[int]) -> None:
    for form in (str(tokens), str(tuple(tokens)), " ".join(map(str, tokens)), str(list(np.array(tokens)))):
        record = logging.makeLogRecord({"msg": "block " + form})
        logs.withhold_user_data(record)
        assert not re.search(r"\d", record.getMessage().replace("int64", "")), record.getMessage()


def test_plain_facts_pass_unchanged() -> None:
    facts: dict[str, Any] = {"tokens": 128, "bytes": 1 << 30, "ok": True, "socket": "/run/user/1000/forebay.sock"}
    line = json.loads(written("json", lambda log: log.info("stored in %.3f s", 0.25, extra=facts)))
    assert line["event"] == "stored in 0.250 s"
    assert {name: line[name] for name in facts} == facts


def test_an_exception_is_logged_with_its_place() -> None:
    def act(log: logging.Logger) -> None:
        try:
            raise RuntimeError("disk on fire")
        except RuntimeError:
            log.exception("tier failed", extra={"tier": "ssd"})

    line = json.loads(written("json", act))
    assert "RuntimeError: disk on fire" in line["exception"] and "test_logs.py" in line["exception"]
