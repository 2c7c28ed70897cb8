"""Protobuf: the table of changes, and that unchanged fields have the values that were written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.schemas.compare import compare
from pydanube.core.schemas.kinds import Compatibility, CompatibilityMode, Direction, SchemaType
from pydanube.schema.parsing import Invalid, Understood, message_class, parse

PROTO = SchemaType.PROTOBUF


def understood(body: str, *, syntax: str = "proto3", message: str = "", head: str = "") -> Understood:
    return parse(PROTO, f'syntax = "{syntax}"; {head} {body}', message)


def rules(new: Understood, old: Understood, mode: CompatibilityMode) -> list[str]:
    return [each.rule for each in compare(new.parsed, old.parsed, Compatibility(mode))]


def message(fields: str) -> str:
    return f"message M {{ {fields} }}"


@pytest.mark.parametrize(
    ("old", "new", "backward", "forward"),
    [
        ("int32 a = 1;", "int32 a = 1; string b = 2;", True, True),
        ("int32 a = 1; string b = 2;", "int32 a = 1;", True, True),
        ("int32 a = 1;", "int32 renamed = 1;", True, True),
        *((f"{one} a = 1;", f"{other} a = 1;", True, True) for one, other in (("int32", "int64"), ("uint32", "bool"))),
        ("sint32 a = 1;", "sint64 a = 1;", True, True),
        ("fixed32 a = 1;", "sfixed32 a = 1;", True, True),
        ("fixed64 a = 1;", "sfixed64 a = 1;", True, True),
        ("string a = 1;", "bytes a = 1;", True, False),
        ("E a = 1; enum E { X = 0; }", "int32 a = 1;", True, True),
        ("int32 a = 1;", "sint32 a = 1;", False, False),
        ("int32 a = 1;", "string a = 1;", False, False),
        ("int32 a = 1;", "fixed32 a = 1;", False, False),
        ("float a = 1;", "double a = 1;", False, False),
        ("string a = 1;", "repeated string a = 1;", True, True),
        ("int32 a = 1;", "repeated int32 a = 1;", False, False),
        ("int32 a = 1;", "oneof o { int32 a = 1; }", True, True),
        ("int32 a = 1; int32 b = 2;", "oneof o { int32 a = 1; int32 b = 2; }", False, True),
        ("N a = 1; message N { int32 x = 1; }", "O a = 1; message O { int32 y = 1; }", True, True),
        ("N a = 1; message N { int32 x = 1; }", "O a = 1; message O { string y = 1; }", False, False),
        ("E a = 1; enum E { X = 0; Y = 1; }", "E a = 1; enum E { X = 0; }", True, True),
        ("reserved 2; int32 a = 1;", "int32 a = 1; int32 b = 2;", False, False),
        ("map<string, int32> a = 1;", "map<string, int64> a = 1;", True, True),
        ("map<string, int32> a = 1;", "map<string, string> a = 1;", False, False),
        ("M a = 1; int32 b = 2;", "M a = 1; int64 b = 2;", True, True),
    ],
)
def test_rows_of_the_table(old: str, new: str, backward: bool, forward: bool) -> None:
    before, after = understood(message(old)), understood(message(new))
    found = [rules(after, before, mode) for mode in (CompatibilityMode.BACKWARD, CompatibilityMode.FORWARD)]
    assert [not each for each in found] == [backward, forward], found


@pytest.mark.parametrize(
    ("old", "new", "backward", "forward"),
    [
        ("optional int32 a = 1;", "optional int32 a = 1; required int32 b = 2;", False, True),
        ("required int32 a = 1;", "optional int32 a = 1;", True, False),
        ("optional E a = 1; enum E { X = 0; Y = 1; }", "optional E a = 1; enum E { X = 0; }", False, True),
        ("optional E a = 1; enum E { X = 0; }", "optional int32 a = 1;", True, False),
    ],
)
def test_rows_of_the_table_that_only_proto2_has(old: str, new: str, backward: bool, forward: bool) -> None:
    before, after = understood(message(old), syntax="proto2"), understood(message(new), syntax="proto2")
    found = [not rules(after, before, mode) for mode in (CompatibilityMode.BACKWARD, CompatibilityMode.FORWARD)]
    assert found == [backward, forward]


def test_under_full_the_number_of_a_removed_field_must_be_reserved() -> None:
    old = understood(message("int32 a = 1; int32 b = 2;"))
    assert rules(understood(message("int32 a = 1;")), old, CompatibilityMode.FULL) == ["not_reserved"]
    assert rules(understood(message("reserved 2; int32 a = 1;")), old, CompatibilityMode.FULL) == []


def test_a_difference_is_told_as_path_old_new_and_rule() -> None:
    old, new = understood("message M { N n = 1; } message N { int32 x = 1; }"), understood(
        "message M { N n = 1; } message N { string x = 1; }"
    )  # fmt: skip
    [found] = compare(new.parsed, old.parsed, Compatibility(CompatibilityMode.BACKWARD), 4)
    assert found[:4] == ("type", "/n/x", "int32", "string")
    assert str(found) == "Backward incompatible: changed type of field 'x' from int32 to string (version 4)"


def test_comments_and_spaces_make_no_version_and_another_root_does() -> None:
    one = understood("message M { int32 a = 1; } message N {}")
    assert understood("/* why */ message M {\n  int32 a = 1;\n}\nmessage N {}").fingerprint == one.fingerprint
    other = understood("message M { int32 a = 1; } message N {}", message="N")
    assert other.fingerprint != one.fingerprint
    with pytest.raises(Invalid, match="no message X"):
        understood("message M {}", message="X")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('syntax = "proto3"; import "other.proto"; message M {}', "cannot be imported"),
        ('syntax = "proto3"; import "/etc/passwd"; message M {}', "schema.proto"),
        ('syntax = "proto3"; message M { Nosuch a = 1; }', "Nosuch"),
        ('syntax = "proto3";', "no message"),
        ("{", "schema.proto"),
    ],
)
def test_what_is_no_protobuf_schema_is_refused_with_the_compilers_words(text: str, word: str) -> None:
    with pytest.raises(Invalid, match=word):
        parse(PROTO, text)


# --- what is called readable is read ---------------------------------------------------------------------

SCALARS = (
    "int32",
    "int64",
    "uint32",
    "uint64",
    "sint32",
    "sint64",
    "bool",
    "fixed32",
    "fixed64",
    "string",
    "bytes",
    "E",
    "N",
)
VALUES: dict[str, Any] = {
    **dict.fromkeys(("int32", "int64", "sint32", "sint64"), st.integers(-(2**31), 2**31 - 1)),
    **dict.fromkeys(("uint32", "uint64", "fixed32", "fixed64"), st.integers(0, 2**32 - 1)),
    "bool": st.booleans(), "string": st.text(max_size=4), "bytes": st.binary(max_size=4), "E": st.integers(0, 2),
}  # fmt: skip
REST = " enum E { X = 0; Y = 1; Z = 2; } message N { int32 x = 1; string y = 2; }"
Fields = dict[int, tuple[str, bool]]  # number -> type, repeated


@st.composite
def some_fields(draw: Any) -> Fields:
    numbers = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True))
    return {number: (draw(st.sampled_from(SCALARS)), draw(st.booleans())) for number in numbers}


@st.composite
def changed_fields(draw: Any, fields: Fields) -> Fields:
    after = dict(fields)
    for _ in range(draw(st.integers(1, 2))):
        number = draw(st.integers(1, 6))
        match draw(st.sampled_from(("remove", "add", "type", "label"))):
            case "remove":
                after.pop(number, None)
            case "add" | "type":
                after[number] = draw(st.sampled_from(SCALARS)), after.get(number, (None, draw(st.booleans())))[1]
            case "label" if number in after:
                after[number] = after[number][0], not after[number][1]
            case _:
                pass
    return after


def text_of(fields: Fields) -> str:
    lines = [f"{'repeated ' if many else ''}{kind} f{number} = {number};" for number, (kind, many) in fields.items()]
    return message(" ".join(lines) + REST)


def fill(data: st.DataObject, target: Any, fields: Fields) -> None:
    for number, (kind, many) in fields.items():
        for _ in range(data.draw(st.integers(0, 2)) if many else 1):
            if kind == "N":
                one = getattr(target, f"f{number}").add() if many else getattr(target, f"f{number}")
                one.x, one.y = data.draw(st.integers(-5, 5)), data.draw(st.text(max_size=3))
            elif many:
                getattr(target, f"f{number}").append(data.draw(VALUES[kind]))
            else:
                setattr(target, f"f{number}", data.draw(VALUES[kind]))


def judge(data: st.DataObject) -> None:
    before = data.draw(some_fields())
    after = data.draw(changed_fields(before))
    old, new = understood(text_of(before)), understood(text_of(after))
    for direction in Direction:
        if rules(new, old, CompatibilityMode(direction.value)):
            continue
        sides = (before, old, after, new) if direction is Direction.BACKWARD else (after, new, before, old)
        fields, writer, theirs, reader = sides
        written = message_class(writer)()
        fill(data, written, fields)
        read = message_class(reader).FromString(written.SerializeToString())
        for number in fields.keys() & theirs.keys():
            if fields[number] == theirs[number]:
                one, other = getattr(written, f"f{number}"), getattr(read, f"f{number}")
                same = str(one) == str(other)
                assert same, (number, fields, theirs)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fields_that_did_not_change_have_the_values_that_were_written(data: st.DataObject) -> None:
    judge(data)


@pytest.mark.long
@settings(max_examples=5_000, deadline=None)
@given(st.data())
def test_fields_that_did_not_change_have_the_values_that_were_written_at_length(data: st.DataObject) -> None:
    judge(data)
