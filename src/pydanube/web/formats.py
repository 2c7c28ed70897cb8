"""Numbers, sizes, times and payloads as people read them. Every function returns plain text; templates escape it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pydanube.core.cluster import conditions

UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
HEX_WIDTH: Final = 16
HEX_MAX_BYTES: Final = 4 * 1024
MODES: Final = ("auto", "json", "text", "hex")
UNKNOWN: Final = "–"


def count(value: float | None) -> str:
    """12,345."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def counted(value: float | None, what: str) -> str:
    """1 message, 12,345 messages."""
    return f"{UNKNOWN} {what}s" if value is None else conditions.count(value, what)


def rate(value: float | None) -> str:
    """Per second; small ones with a digit behind the point, so that something is not nothing."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 0.1 else f"{value:.2f}"


def size(value: float | None) -> str:
    """1.2 MB; a kilobyte has a thousand bytes."""
    if value is None:
        return UNKNOWN
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit holds everything")


def duration(seconds: float | None) -> str:
    """820 ms, 3.2 s, 4 min, 2.5 h, 3 d."""
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} d"


def moment(microseconds: int) -> str:
    """2026-11-15 09:41:07.123Z."""
    try:
        time = datetime.fromtimestamp(microseconds / 1_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{microseconds} µs"
    return time.strftime("%Y-%m-%d %H:%M:%S.") + f"{time.microsecond // 1000:03}Z"


def moment_exact(microseconds: int) -> str:
    """2026-11-15T09:41:07.123456Z, for machines."""
    try:
        time = datetime.fromtimestamp(microseconds // 1_000_000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{microseconds} µs"
    return time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{microseconds % 1_000_000:06}Z"


def clock(seconds: float) -> str:
    """09:41:07Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%SZ")


def bare(url: str) -> str:
    """host:port of a URL."""
    return url.rpartition("://")[2]


def offsets(first: int, end: int) -> str:
    """As people count: both are there."""
    return f"{first:,}…{end - 1:,}" if end > first else "none"


# --- payloads -------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """`kind` is json, text or hex: what it turned out to be, or what was asked for."""

    kind: str
    text: str
    is_cut: bool


def payload(data: bytes, size_bytes: int, mode: str = "auto") -> Shown:
    """As JSON if it is a JSON object or list, as text if it is text, else as bytes in hexadecimal."""
    is_cut = len(data) < size_bytes
    if mode in ("auto", "json") and not is_cut:
        pretty = _pretty(data)
        if pretty is not None:
            return Shown("json", pretty, False)
    if mode != "hex":
        text = _text(data, is_cut)
        if text is not None or mode in ("text", "json"):
            return Shown("text", data.decode("utf-8", "replace") if text is None else text, is_cut)
    return Shown("hex", hexadecimal(data[:HEX_MAX_BYTES]), is_cut or len(data) > HEX_MAX_BYTES)


def _pretty(data: bytes) -> str | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict | list):
        return None
    try:
        return json.dumps(value, indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def _text(data: bytes, is_cut: bool) -> str | None:
    for lost in range(4 if is_cut else 1):  # a cut may go through a character
        try:
            text = data[: len(data) - lost].decode()
        except UnicodeDecodeError:
            continue
        return text if all(sign.isprintable() or sign in "\n\r\t" for sign in text) else None
    return None


def hexadecimal(data: bytes) -> str:
    """Place, bytes and what of them is ASCII, sixteen to a line."""
    lines = []
    for start in range(0, len(data), HEX_WIDTH):
        row = data[start : start + HEX_WIDTH]
        left, right = row[:8].hex(" "), row[8:].hex(" ")
        ascii_text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {left:<23}  {right:<23}  {ascii_text}")
    return "\n".join(lines)


# --- what happened ------------------------------------------------------------------------------------------

_CAPITAL: Final = re.compile(r"(?<!^)(?=[A-Z])")
_VALUE: Final = re.compile(r" (?=\w+=)")
_BROKER_ID: Final = re.compile(r"\d{5,20}")


def happening(kind: str, sentence: str) -> str:
    """An order is recorded as a call and its fields, `UnloadTopic topic=/a/b`: here as "Unload topic: topic /a/b"."""
    if kind == "order":
        call, *values = _VALUE.split(sentence)
        told = ", ".join(value.replace("=", " ", 1).replace("_", " ", 1) for value in values)
        sentence = _CAPITAL.sub(" ", call).lower() + (f": {told}" if told else "")
    return sentence[:1].upper() + sentence[1:]


def with_addresses(text: str, addresses: Mapping[str, str]) -> str:
    """The text, with the addresses of brokers in the place of their ids."""
    return _BROKER_ID.sub(lambda found: addresses.get(found[0], found[0]), text)
