"""What a comparison of two schemas finds, before it is known which of them is the older one."""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from pydanube.core.schemas.kinds import Difference, Direction

SHOWN_MAX: Final = 120  # characters of a value


class Mismatch(NamedTuple):
    """Why `reader` cannot read what `writer` wrote, at `path`; `text` says it of the two directions."""

    rule: str
    path: str
    reader: str
    writer: str
    text: str  # of the change from old to new, if the new version reads
    forward_text: str = ""  # if the old one reads; empty: the same


def shown(value: object) -> str:
    """A part of a schema, as short as people want to see it."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 1] + "…"


def differences(found: list[Mismatch], direction: Direction) -> list[Difference]:
    """The same as differences between an old version and a new one."""
    result = []
    for rule, path, reader, writer, text, forward_text in found:
        is_backward = direction is Direction.BACKWARD
        old, new = (writer, reader) if is_backward else (reader, writer)
        said = text if is_backward else forward_text or text
        sentence = f"{'Backward' if is_backward else 'Forward'} incompatible: {said}"
        result.append(Difference(rule, path, old, new, sentence))
    return result
