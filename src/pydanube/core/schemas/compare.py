"""Two parsed schemas, and whether the one may follow the other. What parses them is `schema/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, TypeAlias

from pydanube.core.schemas import avro, json_schema, protobuf
from pydanube.core.schemas.findings import Mismatch, differences
from pydanube.core.schemas.kinds import Compatibility, Difference, Direction, SchemaType

DIFFERENCES_MAX: Final = 50  # told of one comparison


class Parsed(NamedTuple):
    """A definition that was understood. `plain`: parsed JSON, or what `protobuf.File.of` takes; None of plain types."""

    type: SchemaType
    plain: Any = None


# Whether every document of the second schema is one of the first: None, if it cannot be decided.
Covers: TypeAlias = Callable[[Any, Any], bool | None]


def compare(
    new: Parsed, old: Parsed, asked: Compatibility, version: int = 0, covers: Covers | None = None
) -> list[Difference]:
    """Why `new` may not follow `old`; nothing if it may. `covers` decides strict JSON Schema."""
    if not asked.mode.directions:
        return []
    if new.type is not old.type:
        text = f"changed the schema's type from {old.type} to {new.type}"
        return [Difference("schema_type", "/", old.type, new.type, f"Incompatible: {text}", version)]
    found: list[Difference] = []
    for direction in asked.mode.directions:
        found += differences(_unreadable(new, old, direction, asked, covers), direction)
    return [each._replace(version=version) for each in _once(found)[:DIFFERENCES_MAX]]


def _unreadable(
    new: Parsed, old: Parsed, direction: Direction, asked: Compatibility, covers: Covers | None
) -> list[Mismatch]:
    reader, writer = (new, old) if direction is Direction.BACKWARD else (old, new)
    match new.type:
        case SchemaType.AVRO:
            return avro.unreadable(avro.read(reader.plain), avro.read(writer.plain))
        case SchemaType.PROTOBUF:
            one, other = protobuf.File.of(reader.plain), protobuf.File.of(writer.plain)
            found = protobuf.unreadable(one, other)
            directions = asked.mode.directions
            if direction is directions[0]:  # once: it is wrong whoever reads
                before, after = (other, one) if direction is Direction.BACKWARD else (one, other)
                found += protobuf.misused(before, after, must_reserve=len(directions) > 1)
            return found
        case SchemaType.JSON_SCHEMA:
            if asked.strict:
                return _strict(reader.plain, writer.plain, covers)
            return json_schema.unreadable(new.plain, old.plain, direction)
        case _:
            return []


def _strict(reader: Any, writer: Any, covers: Covers | None) -> list[Mismatch]:
    answer = covers(reader, writer) if covers is not None else None
    if answer:
        return []
    if answer is None:
        text = "whether every document of the one schema is one of the other cannot be decided, and strict means no"
        return [Mismatch("undecided", "/", "", "", text)]
    text = "a document that the old schema allows is none of the new one"
    return [Mismatch("not_covered", "/", "", "", text, "a document that the new schema allows is none of the old one")]


def _once(found: Iterable[Difference]) -> list[Difference]:
    return list(dict.fromkeys(found))
