"""Structured logs on the standard library's logging: JSON lines for machines, text for people, both on stderr.

Covers format and privacy. An event is a constant message with its facts beside it:
`log.info("session closed", extra={"session": 7, "blocks": 12})`. Always true: token ids and prompt text never reach a
line, since only numbers, booleans and short strings pass, under any name; sequences and bytes become their size.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import IO, Any, Literal

LOGGER_NAME = "forebay"
MAX_TEXT = 200  # characters of one fact; a path or a reason fits, a prompt does not
MAX_MESSAGE = 1000

# Facts of a record that logging itself made; every other attribute came in by `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# Names that promise user text. Their values are withheld even when short.
_PRIVATE = re.compile(r"(?:^|_)(?:tokens?|token_ids|prompts?|text|payloads?|content|secret|credentials?)$")
# A run of at least four integers, as str() of any sequence of token ids shows it.
_NUMBER = r"(?:np\.\w+\()?-?\d+\)?(?![\w.:])"
_NUMBER_RUN = re.compile(rf"(?<![\w.]){_NUMBER}(?:[,;\s]+{_NUMBER}){{3,}}")
_BYTES_LITERAL = re.compile(r"""\b(?:b|bytearray\(b)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\)?""")


def set_up(level: str, log_format: Literal["text", "json"], stream: IO[str] | None = None) -> logging.Logger:
    """Send the records of `forebay` and below to `stream` (stderr by default). Replaces an earlier call's set-up."""
    logger = logging.getLogger(LOGGER_NAME)
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(withhold_user_data)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


def withhold_user_data(record: logging.LogRecord) -> bool:
    """A logging filter that cleans a record in place. Lets every record through."""
    if record.args:
        args = record.args
        record.args = (
            {name: _clean(name, value) for name, value in args.items()}
            if isinstance(args, dict)
            else tuple(_clean("", value) for value in args)
        )
    # Formatted here, once, so that no later handler can see anything else than what was cleaned.
    record.msg, record.args = _clean_text(record.getMessage(), MAX_MESSAGE), None
    for name in set(vars(record)) - _OWN:
        setattr(record, name, _clean(name, getattr(record, name)))
    if record.exc_info:
        record.exc_text = _clean_text(logging.Formatter().formatException(record.exc_info), 50 * MAX_MESSAGE)
        record.exc_info = None
    return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, ISO 8601), level, logger, event, then the facts."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record.created, record.msecs),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in _facts(record) if name not in line}
        if record.exc_text:
            line["exception"] = record.exc_text
        return json.dumps(line, default=str, ensure_ascii=True)


class TextFormatter(logging.Formatter):
    """Time, level, event, then facts as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f"  {name}={_quote(value)}" for name, value in _facts(record))
        event = record.getMessage().replace("\n", "\\n")
        line = f"{_utc(record.created, record.msecs)} {record.levelname.lower():7} {event}{facts}"
        return f"{line}\n{record.exc_text}" if record.exc_text else line


def _facts(record: logging.LogRecord) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(record).items() if name not in _OWN]


def _utc(created: float, msecs: float) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(created))}.{int(msecs):03}Z"


def _quote(value: object) -> str:
    text = str(value)
    return json.dumps(text) if not text or any(char.isspace() or char in '"=' for char in text) else text


def _clean(name: str, value: object) -> object:
    if isinstance(value, bool | float) or value is None:
        return value
    if isinstance(value, int):
        return "<withheld>" if _PRIVATE.search(name) and not name.endswith("tokens") else value
    if _PRIVATE.search(name):
        return "<withheld>"
    if isinstance(value, str):
        return _clean_text(value, MAX_TEXT)
    if isinstance(value, BaseException):
        return _clean_text(f"{type(value).__name__}: {value}", MAX_TEXT)
    size = getattr(value, "__len__", None)
    if size is not None:
        return f"<{type(value).__name__} of {size()}>"
    return _clean_text(str(value), MAX_TEXT)


def _clean_text(text: str, limit: int) -> str:
    text = _BYTES_LITERAL.sub("<bytes>", text)
    text = _NUMBER_RUN.sub("<numbers>", text)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
