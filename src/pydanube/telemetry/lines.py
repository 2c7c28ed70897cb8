"""The format of log lines: a constant lowercase phrase and fields.

log.info("topic opened", extra={"topic": topic, "epoch": 3})

2026-11-15T09:41:07.123Z INFO broker.topics: topic opened topic=/default/orders epoch=3
{"topic": "/default/orders", "epoch": 3, "time": "2026-11-15T09:41:07.123Z", "level": "INFO", …}

No line shows a secret: a field that is named like one is hidden, and so is what stands before the host of a URL.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

HIDDEN: Final = "(hidden)"
_SECRET: Final = re.compile(r"secret|token|passw|credential|access_key|account_key", re.IGNORECASE)
_USER_IN_URL: Final = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logging(*, level: str = "INFO", as_json: bool = False, stream: TextIO | None = None) -> None:
    """Sends every line of the process to `stream` (standard error), in one of two forms. Replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextLines(logging.Formatter):
    """time LEVEL layer: phrase key=value …; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        name = record.name.removeprefix("pydanube.")
        line = f"{_time(record)} {record.levelname} {name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, message, and the fields by their names."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            **_fields(record),
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: _harmless(key, value) for key, value in record.__dict__.items() if key not in _STANDARD}


def _harmless(key: str, value: object) -> object:
    if _SECRET.search(key):
        return HIDDEN
    if isinstance(value, (bool, int, float)):
        return value
    text = str(value)
    return _USER_IN_URL.sub(HIDDEN, text) if "://" in text and "@" in text else value


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(value: object) -> str:
    """Quoted where a reader, or a forged line, could make two fields of it."""
    text = str(value)
    plain = text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain and text else json.dumps(text, ensure_ascii=False)
