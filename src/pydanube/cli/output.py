"""What commands print: tables for people, the reference's lines in a pipe, JSON for scripts; progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pydanube.core.cluster.conditions import count, noun

PAYLOAD_SHOWN_MAX_BYTES: Final = 1024
PROGRESS_SECONDS: Final = 1.0  # a run that is over before then needs none
PIPE_WIDTH: Final = 10_000  # a table in a pipe never wraps: programs read it by lines

Row: TypeAlias = Mapping[str, Any]


class Output(StrEnum):
    table = "table"
    json = "json"


OutputOption: TypeAlias = Annotated[Output, typer.Option("--output", "-o", help="table for people, json for scripts.")]


def print_json(value: object) -> None:
    """One line per value, so that a stream of them can be read line by line."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def id_text(number: int) -> str | None:
    """A broker's or node's id as commands print it: text, since JSON readers round numbers above 2^53. None for 0."""
    return str(number) if number else None


def print_rows(
    rows: Sequence[Row], columns: Sequence[str], output: Output, *, line: Callable[[Row], str] | None = None
) -> None:
    """A table on a terminal; in a pipe, a `line` for each row, or the same table without colours."""
    if output is Output.json:
        print(json.dumps([{name: row[name] for name in columns} for row in rows], indent=2, ensure_ascii=False))
    elif line is not None and not sys.stdout.isatty():
        for row in rows:
            print(line(row))
    else:
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH, no_color=True)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            table.add_column(name)
        for row in rows:
            table.add_row(*(Text(_cell(row[name])) for name in columns))
        console.print(table)


def print_fields(fields: Row, output: Output) -> None:
    """One thing: `name: value` a line, or one object."""
    if output is Output.json:
        print(json.dumps(fields, indent=2, ensure_ascii=False))
        return
    width = max(map(len, fields), default=0) + 2
    for name, value in fields.items():
        print(f"{name + ':':<{width}}{_cell(value)}")


def print_done(sentence: str, output: Output, **fields: object) -> None:
    """An action succeeded: its line, or `{"success": true}` with what is worth knowing."""
    if output is Output.json:
        print_json({"success": True, **fields})
    else:
        print(sentence)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, Iterable):
        return ", ".join(map(str, value)) or "-"
    return str(value)


# --- payloads -----------------------------------------------------------------------------------------


def payload_fields(payload: bytes) -> dict[str, object]:
    """`payload` as text, or `payload_hex` if it is none."""
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_hex": payload.hex()}


def payload_text(payload: bytes) -> str:
    """For a terminal: no more than one screen, and no control characters that would change it."""
    size = f"{len(payload)} {noun(len(payload), 'byte')}"
    if len(payload) > PAYLOAD_SHOWN_MAX_BYTES:
        return f"<{size}>"
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f"<binary, {size}> {payload[:32].hex()}{'...' if len(payload) > 32 else ''}"
    return "".join(sign if sign.isprintable() or sign in "\t\n" else repr(sign)[1:-1] for sign in text)


# --- progress -----------------------------------------------------------------------------------------


class ProgressLine:
    """One line on stderr that is written over, on long runs at a terminal only.

    Never more than ten times a second: a fast run is not slowed down by its own progress.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._started = time.monotonic()
        self._shown_at = 0.0
        self._enabled = sys.stderr.isatty() and not sys.stdout.isatty()
        self.count = 0
        self.size_bytes = 0

    def also_on_a_terminal(self) -> None:
        """For runs that print nothing else."""
        self._enabled = sys.stderr.isatty()

    def add(self, size_bytes: int) -> None:
        self.count += 1
        self.size_bytes += size_bytes
        now = time.monotonic()
        if self._enabled and now - self._started > PROGRESS_SECONDS and now - self._shown_at > 0.1:
            self._shown_at = now
            rate = self.count / (now - self._started)
            text = f"{self._doing} {count(self.count, 'message')}, {self.size_bytes / 1e6:,.1f} MB, {rate:,.0f}/s"
            print(f"\r{text:<72}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown_at:
            print(f"\r{'':<72}\r", end="", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started
