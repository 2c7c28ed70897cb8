"""Avro: what is called readable is read, by fastavro; and the avro library's own checker never says more than we do."""

from __future__ import annotations

import copy
import io
import json
import warnings
from typing import Any

import avro.compatibility
import avro.schema
import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.schemas import avro as rules
from pydanube.core.schemas.compare import Parsed, compare
from pydanube.core.schemas.kinds import Compatibility, CompatibilityMode, SchemaType

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
VALUES: dict[str, Any] = {
    "null": st.none(), "boolean": st.booleans(), "int": st.integers(-(2**31), 2**31 - 1),
    "long": st.integers(-(2**63), 2**63 - 1), "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "bytes": st.binary(max_size=5).filter(bytes.isascii), "string": st.text(max_size=5),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "int": 3,
    "long": 4,
    "float": 1.5,
    "double": 2.5,
    "string": "d",
}


@st.composite
def schemas(draw: Any, depth: int = 2, names: list[int] | None = None) -> Any:
    names = names if names is not None else [0]
    kinds = [*PRIMITIVES, *(("record", "enum", "fixed", "array", "map", "union") if depth else ())]
    kind = draw(st.sampled_from(kinds))
    if kind in PRIMITIVES:
        return kind
    names[0] += 1
    name = f"N{names[0]}"
    if kind == "record":
        fields = []
        for number in range(draw(st.integers(1, 3))):
            one: dict[str, Any] = {"name": f"f{number}", "type": draw(schemas(depth - 1, names))}
            if isinstance(one["type"], str) and one["type"] in DEFAULTS and draw(st.booleans()):
                one["default"] = DEFAULTS[one["type"]]
            fields.append(one)
        return {"type": "record", "name": name, "fields": fields}
    if kind == "enum":
        return {"type": "enum", "name": name, "symbols": ["A", "B", "C"][: draw(st.integers(1, 3))]}
    if kind == "fixed":
        return {"type": "fixed", "name": name, "size": draw(st.integers(1, 3))}
    if kind == "array":
        return {"type": "array", "items": draw(schemas(depth - 1, names))}
    if kind == "map":
        return {"type": "map", "values": draw(schemas(depth - 1, names))}
    chosen = draw(st.lists(st.sampled_from(PRIMITIVES), min_size=1, max_size=3, unique=True))
    return chosen


@st.composite
def changed(draw: Any, schema: Any) -> Any:
    """The schema with a change or two, as people make them."""
    schema = copy.deepcopy(schema)
    if isinstance(schema, str):
        return draw(st.sampled_from([schema, *PRIMITIVES, ["null", schema] if schema != "null" else schema]))
    if isinstance(schema, list):
        return draw(
            st.sampled_from([schema, schema[1:] or schema, [*schema, "string"] if "string" not in schema else schema])
        )
    match schema["type"]:
        case "record":
            fields = schema["fields"]
            number = draw(st.integers(0, len(fields) - 1))
            match draw(st.sampled_from(("same", "remove", "add", "add_default", "alias", "change", "default"))):
                case "remove":
                    del fields[number]
                case "add":
                    fields.append({"name": "new", "type": "int"})
                case "add_default":
                    fields.insert(0, {"name": "new", "type": ["null", "int"], "default": None})
                case "alias":
                    fields[number]["aliases"] = [fields[number]["name"]]
                    fields[number]["name"] = "renamed"
                case "change":
                    fields[number]["type"] = draw(changed(fields[number]["type"]))
                    fields[number].pop("default", None)
                case "default":
                    fields[number].pop("default", None)
        case "enum":
            schema["symbols"] = draw(st.sampled_from((["A"], ["A", "B", "C", "D"], ["D", "A"])))
            if draw(st.booleans()):
                schema["default"] = schema["symbols"][0]
        case "fixed":
            schema["size"] = draw(st.integers(1, 3))
        case "array":
            schema["items"] = draw(changed(schema["items"]))
        case "map":
            schema["values"] = draw(changed(schema["values"]))
    return schema


@st.composite
def values(draw: Any, schema: Any) -> Any:
    if isinstance(schema, str):
        return draw(VALUES[schema])
    if isinstance(schema, list):
        return draw(values(draw(st.sampled_from(schema))))
    match schema["type"]:
        case "record":
            return {each["name"]: draw(values(each["type"])) for each in schema["fields"]}
        case "enum":
            return draw(st.sampled_from(schema["symbols"]))
        case "fixed":
            return draw(st.binary(min_size=schema["size"], max_size=schema["size"]))
        case "array":
            return draw(st.lists(values(schema["items"]), max_size=2))
        case _:
            return draw(st.dictionaries(st.text(max_size=3), values(schema["values"]), max_size=2))


def unreadable(reader: Any, writer: Any) -> list[str]:
    return [each.rule for each in rules.unreadable(rules.read(reader), rules.read(writer))]


def encoded(schema: Any, value: Any) -> bytes:
    target = io.BytesIO()
    fastavro.schemaless_writer(target, schema, value)
    return target.getvalue()


def by_library(reader: Any, writer: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parsed = [avro.schema.parse(json.dumps(each)) for each in (reader, writer)]
        found = avro.compatibility.ReaderWriterCompatibilityChecker().get_compatibility(*parsed)
    return found.compatibility is avro.compatibility.SchemaCompatibilityType.compatible


def judge(data: st.DataObject) -> None:
    writer = data.draw(schemas())
    reader = data.draw(changed(writer))
    found = unreadable(reader, writer)
    assert bool(found) != by_library(reader, writer), (found, reader, writer)
    if not found:
        value = data.draw(values(writer))
        fastavro.schemaless_reader(io.BytesIO(encoded(writer, value)), writer, reader)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_called_readable_is_read_and_the_library_agrees(data: st.DataObject) -> None:
    judge(data)


@pytest.mark.long
@settings(max_examples=20_000, deadline=None)
@given(st.data())
def test_what_is_called_readable_is_read_and_the_library_agrees_at_length(data: st.DataObject) -> None:
    judge(data)


def record(*fields: dict[str, Any], name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def decimal(precision: int, scale: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def long_(logical: str) -> dict[str, str]:
    return {"type": "long", "logicalType": logical}


RECURSIVE = record({"name": "next", "type": ["null", "R"], "default": None}, {"name": "x", "type": "int"})
WIDER = record({"name": "next", "type": ["null", "R"], "default": None}, {"name": "x", "type": "long"})


@pytest.mark.parametrize(
    ("reader", "writer", "rules_found"),
    [
        (decimal(9, 2), decimal(9, 2), []),
        (decimal(12, 2), decimal(9, 2), []),
        (decimal(9, 3), decimal(9, 2), ["logical_type"]),
        (decimal(8, 2), decimal(9, 2), ["logical_type"]),
        ("bytes", decimal(9, 2), ["logical_type"]),
        (long_("timestamp-millis"), long_("timestamp-micros"), ["logical_type"]),
        (long_("timestamp-millis"), "long", []),
        ({"type": "string", "logicalType": "uuid"}, "string", []),
        (WIDER, RECURSIVE, []),
        (RECURSIVE, WIDER, ["type"]),
        (record(name="a.R", aliases=["b.R"]), record(name="b.R"), []),
        (record(name="a.R"), record(name="b.R"), ["name"]),
        (["null", "int"], ["null", "int", "string"], ["union_branch"]),
        ("int", ["int", "string"], ["type"]),
        (["null", "long"], "int", []),
    ],
)
def test_rows_of_the_table(reader: Any, writer: Any, rules_found: list[str]) -> None:
    assert unreadable(reader, writer) == rules_found


def test_a_difference_says_where_what_was_what_is_and_by_which_rule() -> None:
    old, new = (record({"name": "a", "type": kind}) for kind in ("string", "int"))
    [found] = compare(
        Parsed(SchemaType.AVRO, new), Parsed(SchemaType.AVRO, old), Compatibility(CompatibilityMode.BACKWARD), 3
    )
    assert found[:4] == ("type", "/a", "string", "int")
    assert str(found) == "Backward incompatible: changed type of field 'a' from string to int (version 3)"
    [found] = compare(
        Parsed(SchemaType.AVRO, new), Parsed(SchemaType.AVRO, old), Compatibility(CompatibilityMode.FORWARD)
    )
    assert found.sentence == "Forward incompatible: changed type of field 'a' from string to int"


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "items": "null"}, "/"),
        ({"type": "array", "items": record()}, "/"),
        ({"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}, "/"),
        (
            record({"name": "a", "type": {"type": "array", "items": record({"name": "n", "type": "null"}, name="E")}}),
            "/a",
        ),
        ({"type": "array", "items": "int"}, ""),
        ({"type": "array", "items": ["null", "int"]}, ""),
        ({"type": "map", "values": "null"}, ""),
        (RECURSIVE, ""),
    ],
)
def test_an_array_whose_items_take_no_byte_is_found(schema: Any, path: str) -> None:
    assert rules.arrays_of_nothing(rules.read(schema)) == path


@pytest.mark.parametrize(
    ("kind", "default", "is_wrong"),
    [
        ("int", "x", True),
        ("int", 2**31, True),
        ("int", 1, False),
        (["null", "int"], 1, True),
        (["int", "null"], 1, False),
    ],
)
def test_a_default_that_is_no_value_of_its_type_is_found(kind: Any, default: Any, is_wrong: bool) -> None:
    assert bool(rules.wrong_default(record({"name": "a", "type": kind, "default": default}))) == is_wrong
