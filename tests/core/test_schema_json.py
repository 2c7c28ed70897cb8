"""JSON Schema, lenient: the table of changes, and that what is called readable is read by the reader that it speaks of.

That reader ignores properties that its schema does not name, and fills in defaults of those that are missing. Its
documents come from a writer that sets properties its schema names.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pydanube.core.schemas.compare import Parsed, compare
from pydanube.core.schemas.json_schema import foreign_reference, unreadable
from pydanube.core.schemas.kinds import Compatibility, CompatibilityMode, Difference, Direction, SchemaType
from pydanube.schema.parsing import covers

BACKWARD, FORWARD = Direction.BACKWARD, Direction.FORWARD


def differences(
    new: Any, old: Any, mode: CompatibilityMode = CompatibilityMode.FULL, *, strict: bool = False
) -> list[Difference]:
    kind = SchemaType.JSON_SCHEMA
    return compare(Parsed(kind, new), Parsed(kind, old), Compatibility(mode, strict), covers=covers)


def both(new: Any, old: Any) -> tuple[bool, bool]:
    """Whether it is compatible, backward and forward."""
    return not unreadable(new, old, BACKWARD), not unreadable(new, old, FORWARD)


# --- the table ------------------------------------------------------------------------------------------


def obj(required: tuple[str, ...] = (), closed: bool = False, **properties: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": ["a", *required]}
    return {**found, "additionalProperties": False} if closed else found


A = {"type": "string"}
INT, NUM = {"type": "integer"}, {"type": "number"}
DEFAULT = {"type": "string", "default": "d"}
X, X_INT, X_NUM = {"$ref": "#/$defs/x"}, {"$defs": {"x": INT}}, {"$defs": {"x": NUM}}


@pytest.mark.parametrize(
    ("old", "new", "backward", "forward"),
    [
        (obj(a=A), obj(a=A, b=A), True, True),  # optional property added
        (obj(a=A), obj(("b",), a=A, b=A), False, False),  # required one, without a default
        (obj(a=A), obj(("b",), a=A, b=DEFAULT), True, True),  # with one
        (obj(a=A, b=A), obj(a=A), True, True),  # optional one removed
        (obj(("b",), a=A, b=A), obj(a=A), False, False),  # required one: stricter than the reference, forward
        (obj(("b",), a=A, b=DEFAULT), obj(a=A), False, True),
        (obj(a=A, b=A), obj(("b",), a=A, b=A), False, True),  # optional became required
        (obj(("b",), a=A, b=A), obj(a=A, b=A), True, False),  # required became optional
        (obj(a=INT), obj(a=NUM), True, False),  # wider type
        (obj(a=A), obj(a={"type": ["string", "null"]}), True, False),
        (obj(a={"enum": ["x"]}), obj(a={"enum": ["x", "y"]}), True, False),
        (obj(a={"const": "x"}), obj(a={"enum": ["x", "y"]}), True, False),
        (obj(a={**INT, "minimum": 3}), obj(a={**INT, "minimum": 1}), True, False),
        (obj(a={**INT, "exclusiveMinimum": 3}), obj(a={**INT, "minimum": 3}), True, False),
        (obj(a={**A, "maxLength": 3}), obj(a={**A, "maxLength": 4}), True, False),
        (obj(a={**A, "pattern": "x"}), obj(a=A), True, False),
        (obj(a={**INT, "multipleOf": 6}), obj(a={**INT, "multipleOf": 3}), True, False),
        (obj(a=A), obj(a=INT), False, False),  # another type
        (obj(a=A), obj(closed=True, a=A), False, True),  # closed
        (obj(closed=True, a=A), obj(a=A), True, False),  # opened
        (obj(a=obj(a=A)), obj(a=obj(a=A, b=A)), True, True),  # the same rows one level down
        (obj(a=obj(a=A)), obj(a=obj(("b",), a=A, b=A)), False, False),
        (obj(a={"type": "array", "items": INT}), obj(a={"type": "array", "items": NUM}), True, False),
        (obj(a={"type": "array", "prefixItems": [INT]}), obj(a={"type": "array", "prefixItems": [NUM]}), True, False),
        (obj(a={"oneOf": [A, INT]}), obj(a={"oneOf": [A, INT, {"type": "null"}]}), True, False),
        (obj(a={"anyOf": [A, INT]}), obj(a={"anyOf": [INT, A]}), True, True),
        (obj(a={"oneOf": [INT, NUM]}), obj(a={"oneOf": [INT, {"type": ["number", "null"]}]}), False, False),
        (obj(a={"allOf": [A, {"minLength": 2}]}), obj(a={**A, "minLength": 2}), True, True),
        (obj(a={"not": A}), obj(a={"not": A}), True, True),
        (obj(a={"not": A}), obj(a={"not": INT}), False, False),
        ({"$defs": {"x": A}, **obj(a={"$ref": "#/$defs/x"})}, obj(a=A), True, True),
        ({**X_INT, **obj(a=X)}, {**X_NUM, **obj(a=X)}, True, False),
        ({**X_INT, **obj(a={"not": X})}, {**X_NUM, **obj(a={"not": X})}, False, False),
        (False, obj(a=A), True, False),
        (obj(a=A), True, True, False),
    ],
)  # fmt: skip
def test_rows_of_the_table(old: Any, new: Any, backward: bool, forward: bool) -> None:
    assert both(new, old) == (backward, forward), [unreadable(new, old, each) for each in (BACKWARD, FORWARD)]


COMBINATIONS = list(product((False, True), (False, True), (True, False), ("required", "default", "optional")))


@pytest.mark.parametrize(("strict", "closed", "adds", "what"), COMBINATIONS)
def test_the_24_combinations(strict: bool, closed: bool, adds: bool, what: str) -> None:
    """Lenient or strict, open or closed content, a property added or removed, required, with a default, or optional."""
    small = obj(closed=closed, a=A)
    large = obj(("b",) if what != "optional" else (), closed=closed, a=A, b=DEFAULT if what == "default" else A)
    old, new = (small, large) if adds else (large, small)
    found = tuple(
        not differences(new, old, mode, strict=strict)
        for mode in (CompatibilityMode.BACKWARD, CompatibilityMode.FORWARD)
    )
    if strict:  # sets of documents: defaults add none
        if closed:
            # What the one names, the other forbids: only an optional property makes a larger set.
            wanted = {"optional": (adds, not adds)}.get(what, (False, False))
        else:
            # b may be anything in the one, and is limited in the other.
            wanted = (not adds, adds)
        assert found == wanted
        return
    expected = {
        (True, "required"): (False, False), (True, "default"): (True, True), (True, "optional"): (True, True),
        (False, "required"): (False, False), (False, "default"): (False, True), (False, "optional"): (True, True),
    }  # fmt: skip
    assert found == expected[adds, what]


def test_a_property_that_comes_back_with_another_type_is_found_by_the_transitive_mode() -> None:
    first, second, third = obj(a=A, b=INT), obj(a=A), obj(a=A, b=A)
    assert not differences(second, first, CompatibilityMode.BACKWARD) and not differences(
        third, second, CompatibilityMode.BACKWARD
    )
    assert differences(third, first, CompatibilityMode.BACKWARD)[0].path == "/b"


def test_a_difference_is_told_as_path_old_new_and_rule() -> None:
    old, new = obj(a=obj(("n",), a=A, n=INT)), obj(a=obj(("n",), a=A, n=A))
    [found, other] = differences(new, old)
    assert found[:4] == ("type", "/a/n", "integer", "string") == other[:4]
    assert found.sentence == "Backward incompatible: changed type of field 'n' from integer to string"
    assert other.sentence == "Forward incompatible: changed type of field 'n' from integer to string"
    assert "made optional field 'b' required" in str(differences(obj(("b",), a=A, b=A), obj(a=A, b=A))[0])
    assert "added new required field 'b'" in str(
        differences(obj(("b",), a=A, b=A), obj(a=A), CompatibilityMode.FORWARD)[0]
    )


def test_a_recursive_schema_is_compared_and_alternatives_have_a_bound() -> None:
    tree = {"type": "object", "properties": {"value": INT, "next": {"$ref": "#"}}}
    wider = {"type": "object", "properties": {"value": NUM, "next": {"$ref": "#"}}}
    assert both(wider, tree) == (True, False)
    bomb = {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(30)]}
    [found] = unreadable({**bomb, "required": ["z"]}, bomb, BACKWARD)
    assert found.rule == "undecided"


@pytest.mark.parametrize("target", ["http://x/y", "file:///etc/passwd", "other.json", "#/$defs/nosuch", "#name"])
def test_a_reference_that_leads_out_of_the_document_is_found(target: str) -> None:
    assert foreign_reference({"properties": {"a": [{"$ref": target}]}}) == target
    assert foreign_reference({"$defs": {"x": {}}, "a": {"$ref": "#/$defs/x"}}) is None


# --- what is called readable is read ---------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 6), st.sampled_from(["", "x", "xy", "d"]), st.sampled_from([0.5, 2.0])
)
KEYWORDS: dict[str, dict[str, Any]] = {
    "integer": {
        "minimum": st.integers(-1, 2), "maximum": st.integers(2, 5), "exclusiveMinimum": st.integers(-1, 1),
        "multipleOf": st.sampled_from([1, 2, 3]),
    },
    "number": {
        "minimum": st.integers(-1, 2), "exclusiveMaximum": st.integers(2, 5), "multipleOf": st.sampled_from([0.5, 1]),
    },
    "string": {"minLength": st.integers(0, 2), "maxLength": st.integers(1, 2), "pattern": st.sampled_from(["x", "^x"])},
    "array": {"minItems": st.integers(0, 1), "maxItems": st.integers(1, 2), "uniqueItems": st.booleans()},
    "object": {"minProperties": st.integers(0, 1), "maxProperties": st.integers(1, 3)},
}  # fmt: skip


@st.composite
def schemas(draw: Any, depth: int = 2) -> Any:
    shape = draw(st.sampled_from(("typed", "typed", "typed", "object", "object", "enum", "any", "joined", "open")))
    if shape == "open":
        return draw(st.sampled_from([True, {}]))
    if shape == "enum":
        return {"enum": draw(st.lists(SCALARS, min_size=1, max_size=3))}
    if shape == "any":
        return {
            "type": draw(st.lists(st.sampled_from(["null", "integer", "string"]), min_size=1, max_size=2, unique=True))
        }
    if shape == "joined" and depth:
        word = draw(st.sampled_from(["anyOf", "oneOf", "allOf"]))
        return {word: draw(st.lists(schemas(depth - 1), min_size=1, max_size=2))}
    if shape == "object" and depth:
        names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
        found: dict[str, Any] = {"type": "object", "properties": {name: draw(schemas(depth - 1)) for name in names}}
        found["required"] = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
        closed = draw(st.sampled_from([None, None, False, True]))
        return found if closed is None else {**found, "additionalProperties": closed}
    kind = draw(st.sampled_from(["null", "boolean", "integer", "number", "string", "array"]))
    found = {"type": kind}
    for word, value in KEYWORDS.get(kind, {}).items():
        if draw(st.integers(0, 3)) == 0:
            found[word] = draw(value)
    if kind == "array" and depth:
        found[draw(st.sampled_from(["items", "items", "prefixItems"]))] = draw(schemas(depth - 1))
        if "prefixItems" in found:
            found["prefixItems"] = [found["prefixItems"]]
    return found


@st.composite
def changed(draw: Any, schema: Any) -> Any:
    """The schema with a change, as people make them."""
    schema = copy.deepcopy(schema)
    if not isinstance(schema, dict) or draw(st.integers(0, 7)) == 0:
        return draw(schemas(1))
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            branches = schema[word]
            match draw(st.sampled_from(("add", "remove", "change", "swap"))):
                case "add":
                    branches.append(draw(schemas(0)))
                case "remove":
                    branches.pop()
                    if not branches:
                        return {}
                case "change":
                    branches[0] = draw(changed(branches[0]))
                case "swap":
                    branches.reverse()
            return schema
    if "properties" in schema:
        names, required = sorted(schema["properties"]), schema["required"]
        name = draw(st.sampled_from(names))
        match draw(st.sampled_from(("add", "remove", "require", "relax", "change", "content", "default"))):
            case "add":
                schema["properties"]["n"] = draw(schemas(0))
            case "remove":
                del schema["properties"][name]
                schema["required"] = [each for each in required if each != name]
            case "require":
                schema["required"] = sorted({*required, name})
            case "relax":
                schema["required"] = []
            case "change":
                schema["properties"][name] = draw(changed(schema["properties"][name]))
            case "content":
                schema["additionalProperties"] = draw(st.booleans())
            case "default":
                schema["properties"]["n"] = {"type": "string", "default": "d"}
                schema["required"] = [*required, "n"]
        return schema
    if "items" in schema:
        schema["items"] = draw(changed(schema["items"]))
        return schema
    kind = schema.get("type")
    words = KEYWORDS.get(kind, {}) if isinstance(kind, str) else {}
    if words:
        word = draw(st.sampled_from(sorted(words)))
        schema[word] = draw(words[word])
        if draw(st.booleans()):
            del schema[word]
    if kind == "integer" and draw(st.booleans()):
        schema["type"] = "number"
    return schema


@st.composite
def documents(draw: Any, schema: Any, depth: int = 3) -> Any:
    """What a writer may write; not always, so it is checked."""
    if not isinstance(schema, dict) or not depth:
        return draw(SCALARS)
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return draw(documents(draw(st.sampled_from(schema[word])), depth - 1))
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = draw(st.sampled_from(kind))
    match kind:
        case "object":
            names = [name for name in schema["properties"] if name in schema["required"] or draw(st.booleans())]
            return {name: draw(documents(schema["properties"][name], depth - 1)) for name in names}
        case "array":
            below = schema.get("items", (schema.get("prefixItems") or [True])[0])
            return draw(st.lists(documents(below, depth - 1), max_size=2))
        case "integer":
            return draw(st.integers(-3, 6))
        case "number":
            return draw(st.integers(-3, 6) | st.sampled_from([0.5, 2.0]))
        case "string":
            return draw(st.sampled_from(["", "x", "xy"]))
        case "boolean":
            return draw(st.booleans())
        case _:
            return draw(SCALARS) if kind is None else None


def as_read(schema: Any, value: Any) -> Any:
    """As the reader that the rules speak of takes it: without properties that it does not know, with its defaults."""
    if isinstance(schema, dict):
        for word in ("allOf", "anyOf", "oneOf"):
            for branch in schema.get(word, ()):
                value = as_read(branch, value)
    if isinstance(value, list) and isinstance(schema, dict):
        first = schema.get("prefixItems", ())
        return [
            as_read(first[n] if n < len(first) else schema.get("items", True), each) for n, each in enumerate(value)
        ]
    if not isinstance(value, dict) or not isinstance(schema, dict) or "properties" not in schema:
        return value
    known = schema["properties"]
    kept = {name: as_read(known[name], each) for name, each in value.items() if name in known} if (
        schema.get("additionalProperties") is False
    ) else {name: as_read(known.get(name, True), each) for name, each in value.items()}  # fmt: skip
    for name, each in known.items():
        if name not in kept and isinstance(each, dict) and "default" in each:
            kept[name] = each["default"]
    return kept


def judge(data: st.DataObject) -> None:
    old = data.draw(schemas())
    new = data.draw(changed(old))
    for direction in Direction:
        reader, writer = (new, old) if direction is BACKWARD else (old, new)
        if unreadable(new, old, direction):
            continue
        document = data.draw(documents(writer))
        assume(jsonschema_rs.validator_for(writer, offline=True).is_valid(document))
        read = as_read(reader, document)
        assert jsonschema_rs.validator_for(reader, offline=True).is_valid(read), (direction, writer, reader, document)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_called_readable_is_read(data: st.DataObject) -> None:
    judge(data)


@pytest.mark.long
@settings(max_examples=30_000, deadline=None)
@given(st.data())
def test_what_is_called_readable_is_read_at_length(data: st.DataObject) -> None:
    judge(data)
