"""Columns as SQL writes them, looked at without Spark: `id string not null, amount decimal(10, 2), tags array<string>`.

Spark's own parser has the last word, and needs a JVM to say it. What is wrong for certain is said here, in
milliseconds: a type that there is not, a column without one, brackets that do not close, a name that comes twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final

TYPES: Final = (
    *("string", "boolean", "binary", "date", "timestamp", "timestamp_ntz", "timestamp_ltz", "void", "variant"),
    *("tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long", "float", "real", "double"),
    *("decimal", "dec", "numeric", "char", "character", "varchar", "interval", "time", "array", "map", "struct"),
)
_COLUMN: Final = re.compile(r"(?:`((?:[^`]|``)+)`|([\w]+))(?:\s*:\s*|\s+)(.*)", re.DOTALL)
_TYPE: Final = re.compile(r"(\w+)\s*(?:(<)(.*)>|\(([\d\s,-]*)\))?\s*(.*)", re.DOTALL)
_BEHIND: Final = re.compile(
    r"(not\s+null|comment|default|collate|generated|day|hour|minute|second|year|month|to)\b", re.I
)
_INNER: Final = {"array": 1, "map": 2}


class Unreadable(ValueError):
    """`why` is a sentence without a full stop."""


def column_names(text: str) -> list[str]:
    """The names of the columns. Raises Unreadable for what no SQL means."""
    names = list(_columns(text))
    twice = next((name for number, name in enumerate(names) if name.lower() in map(str.lower, names[:number])), None)
    if twice is not None:
        raise Unreadable(f"the column {twice} is there twice")
    return names


def _columns(text: str) -> Iterator[str]:
    for part in _parts(text):
        found = _COLUMN.fullmatch(part)
        if found is None:
            raise Unreadable(f"`{part}` is no column: a name and a type are" if part else "a column is empty")
        name = (found[1] or found[2]).replace("``", "`")
        _check_type(found[3].strip(), name)
        yield name


def _check_type(text: str, column: str) -> None:
    found = _TYPE.fullmatch(text)
    if found is None:
        raise Unreadable(f"{column} has no type")
    name, opened, inner, _, behind = found.groups()
    if name.lower() not in TYPES:
        meant = get_close_matches(name.lower(), TYPES, 1, 0.6)
        raise Unreadable(f"{column} is of no type that there is: {name}" + (f"; {meant[0]} is one" if meant else ""))
    if name.lower() == "struct" and opened:
        column_names(inner)
    elif name.lower() in _INNER:
        parts = _parts(inner) if inner else []
        if len(parts) != _INNER[name.lower()]:
            raise Unreadable(f"{column} is {text}: {name.lower()} needs {_INNER[name.lower()]} types in angle brackets")
        for part in parts:
            _check_type(part, column)
    elif opened:
        raise Unreadable(f"{column} is {text}: {name} has nothing in angle brackets")
    if behind and not _BEHIND.match(behind):
        raise Unreadable(f"{column}: `{behind}` is not understood; behind a type stands nothing, or NOT NULL")


def _parts(text: str) -> list[str]:
    """What commas divide that are in no brackets and no quotes."""
    parts, depth, quote, first = [], 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "`'\"":
            quote = letter
        elif letter in "<(":
            depth += 1
        elif letter in ">)":
            depth -= 1
            if depth < 0:
                raise Unreadable(f"a bracket closes that none opened, at `{text[max(0, place - 20) : place + 1]}`")
        elif letter == "," and not depth:
            parts.append(text[first:place].strip())
            first = place + 1
    if depth or quote:
        raise Unreadable("a bracket or a quote does not close")
    return [*parts, text[first:].strip()]
