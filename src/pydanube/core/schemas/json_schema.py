"""Which JSON Schema reads what another one allowed: by the lenient rules, in which people change schemas.

The reader that they speak of ignores properties it does not know, and fills in defaults of those that are missing; the
writer sets the properties that its schema names, and may set others only if it says nothing of them. What is stricter:

    `strict`   every document that the one allows the other allows: decided by a library, in `schema/`

A schema is compared keyword by keyword and level by level. The writer is a *conjunction*: several schemas that all hold
(`allOf`, a `$ref` beside keywords). A keyword of the reader is satisfied if one of them satisfies it. What is not
understood must be the same in both: what this calls readable is, and what it refuses may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, TypeAlias

from pydanube.core.schemas.findings import Mismatch, shown
from pydanube.core.schemas.kinds import Direction

Json: TypeAlias = Any
Conjunction: TypeAlias = tuple[Json, ...]

STEPS_MAX: Final = 2_000  # of one comparison: alternatives multiply
TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# Keywords that only limit values of one type.
OF_TYPE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties", "patternProperties", "propertyNames"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
    **dict.fromkeys(("unevaluatedProperties",), "object"),
    **dict.fromkeys(("unevaluatedItems", "additionalItems"), "array"),
}
AT_MOST: Final = frozenset({"maxLength", "maxItems", "maxProperties"})  # the reader's must not be smaller
AT_LEAST: Final = frozenset({"minLength", "minItems", "minProperties"})
LIMITS: Final = frozenset({"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"})
HERE: Final = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const"}
)
JOINED: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
SAYS_NOTHING: Final = frozenset(
    {"$schema", "$id", "id", "$comment", "$defs", "definitions", "$anchor", "$vocabulary", "title", "description"}
    | {"default", "examples", "deprecated", "readOnly", "writeOnly"}
)


class TooManySteps(Exception):
    pass


def unreadable(new: Json, old: Json, direction: Direction) -> list[Mismatch]:
    """What keeps the reader of this direction from reading every document of the writer."""
    reader, writer = (new, old) if direction is Direction.BACKWARD else (old, new)
    comparison = _Comparison(reader, writer, direction)
    try:
        return comparison.compare(reader, (writer,), "")
    except (TooManySteps, RecursionError):
        text = f"the schemas have more than {STEPS_MAX} combinations of alternatives: it cannot be decided"
        return [Mismatch("undecided", "/", "", "", text)]


def foreign_reference(schema: Json) -> str | None:
    """A `$ref` that leads out of the document, or nowhere; None: there is none."""
    waiting: list[Json] = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                target = each.get(key)
                if isinstance(target, str) and (key != "$ref" or not _resolves(schema, target)):
                    return target
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return None


def _resolves(root: Json, target: str) -> bool:
    try:
        _resolved(root, target)
    except (KeyError, IndexError, ValueError, TypeError):
        return False
    return True


def _resolved(root: Json, target: str) -> Json:
    if not target.startswith("#") or (target != "#" and not target.startswith("#/")):
        raise ValueError(target)
    found = root
    for part in target.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~").replace("%25", "%")
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found


class _Comparison:
    def __init__(self, reader_root: Json, writer_root: Json, direction: Direction) -> None:
        self._reader_root = reader_root
        self._writer_root = writer_root
        self._direction = direction
        self._steps = 0
        self._under_way: set[tuple[int, tuple[int, ...]]] = set()
        self._same_definitions = _definitions(reader_root) == _definitions(writer_root)

    def compare(self, reader: Json, writer: Conjunction, path: str) -> list[Mismatch]:
        """Nothing, if `reader` takes every value that all of `writer` allow."""
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise TooManySteps
        key = (id(reader), tuple(map(id, writer)))
        if key in self._under_way:  # a recursive schema: it is readable if everything else is
            return []
        self._under_way.add(key)
        try:
            return self._compared(reader, writer, path)
        finally:
            self._under_way.discard(key)

    def _compared(self, reader: Json, given: Conjunction, path: str) -> list[Mismatch]:
        writer = self._flat(given)
        if any(each is False for each in writer) or reader is True:
            return []
        if reader is False:
            return [_changed("type", path, "nothing", "something", "allows nothing any more", "allows something now")]
        if not isinstance(reader, Mapping):
            return [Mismatch("undecided", path or "/", shown(reader), "", f"'{path or '/'}' is no schema")]
        found = self._plain(reader, writer, path)
        found += self._joined(reader, writer, path)
        if not found:
            return []
        for each in writer:
            for word in ("anyOf", "oneOf"):
                if isinstance(each, Mapping) and isinstance(each.get(word), list):
                    rest = tuple(one for one in writer if one is not each)
                    plain = {name: value for name, value in each.items() if name != word}
                    tries = [self.compare(reader, (*rest, plain, branch), path) for branch in each[word]]
                    if not any(tries):
                        return []
                    return min([found, *filter(None, tries)], key=len)
        return found

    def _flat(self, writer: Conjunction) -> Conjunction:
        """Without `allOf` and `$ref`."""
        found: list[Json] = []
        waiting = list(writer)
        followed: set[int] = set()
        while waiting:
            each = waiting.pop(0)
            if not isinstance(each, Mapping):
                if each is not True:
                    found.append(each)
                continue
            if "allOf" in each and isinstance(each["allOf"], list):
                waiting += each["allOf"]
            if isinstance(each.get("$ref"), str):
                target = _resolved(self._writer_root, each["$ref"])
                if id(target) not in followed:
                    followed.add(id(target))
                    waiting.append(target)
            if "allOf" in each or "$ref" in each:
                each = _without(each, "allOf", "$ref")
            if each:
                found.append(each)
        return tuple(found)

    def _joined(self, reader: Mapping[str, Json], writer: Conjunction, path: str) -> list[Mismatch]:
        found: list[Mismatch] = []
        if isinstance(reader.get("$ref"), str):
            found += self.compare(_resolved(self._reader_root, reader["$ref"]), writer, path)
        for each in reader.get("allOf", ()):
            found += self.compare(each, writer, path)
        if isinstance(reader.get("anyOf"), list):
            found += self._some(reader["anyOf"], writer, path, "anyOf")
        if isinstance(reader.get("oneOf"), list):
            branches = reader["oneOf"]
            if self._is_apart(branches):
                found += self._some(branches, writer, path, "oneOf")
            elif not any(isinstance(each, Mapping) and self._is_same(each.get("oneOf"), branches) for each in writer):
                text = f"changed oneOf at '{path or '/'}', whose branches may overlap"
                found.append(Mismatch("oneOf", path or "/", shown(branches), shown(_all(writer, "oneOf")), text))
        return found

    def _some(self, branches: Sequence[Json], writer: Conjunction, path: str, word: str) -> list[Mismatch]:
        """One of the branches takes everything. Branches of the writer are looked at one by one: see `_compared`."""
        tries = [self.compare(branch, writer, path) for branch in branches]
        if not all(tries):
            return []
        best = min(tries, key=len, default=[])
        text = f"no branch of {word} at '{path or '/'}' takes what was allowed"
        return best or [Mismatch(word, path or "/", shown(branches), "", text)]

    def _is_apart(self, branches: Sequence[Json]) -> bool:
        """No value is of two branches: by type, or by a required property with its own constant."""
        for number, one in enumerate(branches):
            for other in branches[:number]:
                if not self._are_apart(one, other):
                    return False
        return True

    def _are_apart(self, one: Json, other: Json) -> bool:
        pair = [self._target(each) for each in (one, other)]
        if not all(isinstance(each, Mapping) for each in pair):
            return False
        left, right = _types(pair[0]), _types(pair[1])
        if left is not None and right is not None and not _expanded(left) & _expanded(right):
            return True
        shared = set(pair[0].get("required", ())) & set(pair[1].get("required", ()))
        for name in shared:
            values = [_values(each.get("properties", {}).get(name)) for each in pair]
            if None not in values and not any(_same_value(a, b) for a in values[0] or () for b in values[1] or ()):
                return _types(pair[0]) == _types(pair[1]) == {"object"}
        return False

    def _target(self, schema: Json) -> Json:
        if isinstance(schema, Mapping) and set(schema) - SAYS_NOTHING == {"$ref"}:
            return _resolved(self._reader_root, schema["$ref"])
        return schema

    # --- keywords -----------------------------------------------------------------------------------

    def _plain(self, reader: Mapping[str, Json], writer: Conjunction, path: str) -> list[Mismatch]:
        types = _types_of(writer)
        if (why := _type_finding(reader, types, path)) is not None:
            return [why]
        found: list[Mismatch] = []
        if (allowed := _values(reader)) is not None:
            theirs = next((values for each in writer if (values := _values(each)) is not None), None)
            gone = None if theirs is None else [a for a in theirs if not any(_same_value(a, b) for b in allowed)]
            if gone is None or gone:
                text = f"removed value {shown(gone[0])}" if gone else "limited the values"
                more = f"added value {shown(gone[0])}" if gone else "does not limit the values any more"
                found.append(
                    Mismatch(
                        "enum",
                        path or "/",
                        shown(allowed),
                        shown(theirs),
                        f"{text} at '{path or '/'}'",
                        f"{more} at '{path or '/'}'",
                    )
                )
        for word, value in reader.items():
            if word in HERE or word in JOINED or word in SAYS_NOTHING:
                continue
            kind = OF_TYPE.get(word)
            if kind is not None and not _may_be(kind, types):
                continue
            if not self._holds(word, value, writer):
                theirs = _all(writer, word)
                found.append(
                    _changed(
                        word,
                        path,
                        shown(value),
                        shown(theirs) if theirs else "nothing",
                        f"narrowed {word}",
                        f"widened {word}",
                    )
                )
        if types is None or "object" in types:
            found += self._object(reader, writer, path)
        if types is None or "array" in types:
            found += self._array(reader, writer, path)
        return found

    def _holds(self, word: str, value: Json, writer: Conjunction) -> bool:
        """Whether what the writer allows satisfies this keyword of the reader."""
        theirs = _all(writer, word)
        if word in AT_MOST:
            return any(_is_number(each) and each <= value for each in theirs)
        if word in AT_LEAST:
            return value <= 0 or any(_is_number(each) and each >= value for each in theirs)
        if word in LIMITS:
            return _within(word, value, writer)
        if word == "multipleOf":
            return any(_is_number(each) and _divides(value, each) for each in theirs)
        if word == "uniqueItems" and value is False:
            return True
        if word == "dependentRequired" and isinstance(value, Mapping):
            return all(set(names) <= self._follows(name, writer) for name, names in value.items())
        return any(self._is_same(each, value) for each in theirs)

    @staticmethod
    def _follows(name: str, writer: Conjunction) -> set[str]:
        found = _required(writer)
        for each in _all(writer, "dependentRequired"):
            if isinstance(each, Mapping):
                found |= set(each.get(name, ()))
        return found

    def _is_same(self, one: Json, other: Json) -> bool:
        return _same_value(one, other) and (self._same_definitions or not _refers(one))

    # --- objects ------------------------------------------------------------------------------------

    def _object(self, reader: Mapping[str, Json], writer: Conjunction, path: str) -> list[Mismatch]:
        own: Mapping[str, Json] = reader.get("properties", {})
        theirs = _properties(writer)
        required, own_required = _required(writer), set(reader.get("required", ()))
        found: list[Mismatch] = []
        is_backward = self._direction is Direction.BACKWARD
        if "properties" in reader or ("type" in reader and not reader.keys() & JOINED):
            for name in sorted(required & theirs.keys() - own.keys() - own_required):
                if is_backward:
                    text = f"removed required field '{name}'"
                    found.append(_property("removed", name, path, "", "required", text))
                elif not _has_default(theirs[name]):
                    text = f"added new required field '{name}'"
                    found.append(_property("added", name, path, "", "required", text))
        for name in sorted(own_required - required):
            if name not in theirs and _has_default((own.get(name),)):
                continue
            if name in theirs:
                text, forward = f"made optional field '{name}' required", f"made required field '{name}' optional"
            else:
                text, forward = f"added required field '{name}' without a default", f"removed required field '{name}'"
            found.append(
                _property("required", name, path, "required", "optional" if name in theirs else "", text, forward)
            )
        for name in sorted(own.keys() & theirs.keys()):
            found += self.compare(own[name], theirs[name], f"{path}/{name}")
        found += self._others(reader, writer, path)
        return found

    def _others(self, reader: Mapping[str, Json], writer: Conjunction, path: str) -> list[Mismatch]:
        """Properties that no schema names."""
        own = reader.get("additionalProperties", True)
        if own is True or own == {}:
            return []
        theirs = _all(writer, "additionalProperties")
        found: list[Mismatch] = []
        if isinstance(own, Mapping):
            for name, schemas in sorted(_properties(writer).items()):
                if name not in reader.get("properties", {}):
                    found += self.compare(own, schemas, f"{path}/{name}")
        if any(each is False for each in theirs):
            return found
        if own is not False and theirs:
            return found + self.compare(own, tuple(theirs), f"{path}/*")
        words = ("closed" if own is False else "limited", "open")
        return [*found, _changed("additionalProperties", path, *words, "closed the content", "opened the content")]

    # --- arrays -------------------------------------------------------------------------------------

    def _array(self, reader: Mapping[str, Json], writer: Conjunction, path: str) -> list[Mismatch]:
        first, others = _items(reader)
        if not first and others is True:
            return []
        theirs = [_items(each) for each in writer if isinstance(each, Mapping)]
        length = max([len(first), *(len(each) for each, _ in theirs)])
        found: list[Mismatch] = []
        for number in range(length + 1):
            own = first[number] if number < len(first) else others
            place = str(number) if number < length else "items"
            conjuncts = tuple(each[number] if number < len(each) else rest for each, rest in theirs)
            found += self.compare(own, conjuncts or (True,), f"{path}/{place}")
        return found


# --- parts of schemas ---------------------------------------------------------------------------------


def _without(schema: Mapping[str, Json], *words: str) -> dict[str, Json]:
    return {name: value for name, value in schema.items() if name not in words}


def _all(writer: Conjunction, word: str) -> list[Json]:
    return [each[word] for each in writer if isinstance(each, Mapping) and word in each]


def _properties(writer: Conjunction) -> dict[str, Conjunction]:
    found: dict[str, Conjunction] = {}
    for each in _all(writer, "properties"):
        for name, schema in each.items():
            found[name] = (*found.get(name, ()), schema)
    return found


def _required(writer: Conjunction) -> set[str]:
    return {name for each in _all(writer, "required") if isinstance(each, list) for name in each}


def _has_default(schemas: Iterable[Json]) -> bool:
    return any(isinstance(each, Mapping) and "default" in each for each in schemas)


def _items(schema: Mapping[str, Json]) -> tuple[Sequence[Json], Json]:
    """Schemas of the first items, and of all others; also as drafts before 2020-12 say it."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    return schema.get("prefixItems", ()), items


def _types(schema: Json) -> set[str] | None:
    """None: any."""
    if not isinstance(schema, Mapping):
        return None
    said = schema.get("type")
    if said is None:
        values = _values(schema)
        return {_type_of(each) for each in values} if values is not None else None
    return {said} if isinstance(said, str) else set(said)


def _types_of(writer: Conjunction) -> set[str] | None:
    found: set[str] | None = None
    for each in writer:
        types = _types(each)
        if types is not None:
            found = _expanded(types) if found is None else found & _expanded(types)
    return found


def _expanded(types: set[str]) -> set[str]:
    """A number may be an integer."""
    return types | {"integer"} if "number" in types else types


def _may_be(kind: str, types: set[str] | None) -> bool:
    return types is None or kind in types or (kind == "number" and "integer" in types)


def _type_finding(reader: Mapping[str, Json], types: set[str] | None, path: str) -> Mismatch | None:
    if "type" not in reader:
        return None
    own = _types(reader) or set()
    if types is not None and types <= _expanded(own):
        return None
    old, new = _type_words(types), _type_words(own)
    return _changed("type", path, new, old)


def _type_words(types: set[str] | None) -> str:
    if types is None:
        return "any"
    left = sorted(types - {"integer"} if "number" in types else types)
    return left[0] if len(left) == 1 else shown(left)


def _type_of(value: Json) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _values(schema: Json) -> list[Json] | None:
    """All that it allows, if it says so one by one."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _same_value(one: Json, other: Json) -> bool:
    """As JSON: 1 is 1.0, and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if _is_number(one) and _is_number(other):
        return bool(one == other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_value, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same_value(value, other[name]) for name, value in one.items())
    return type(one) is type(other) and bool(one == other)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _divides(part: Json, whole: Json) -> bool:
    return bool(part) and (Fraction(str(whole)) / Fraction(str(part))).denominator == 1


def _within(word: str, value: Json, writer: Conjunction) -> bool:
    """Whether a bound of the writer is at least as tight. Booleans, as draft 4 had them, are not bounds."""
    if not _is_number(value):
        return any(_same_value(each, value) for each in _all(writer, word))
    below = word.lower().endswith("maximum")
    tight, loose = ("maximum", "exclusiveMaximum") if below else ("minimum", "exclusiveMinimum")
    for name in (tight, loose):
        for each in _all(writer, name):
            if _is_number(each):
                inside = each <= value if below else each >= value
                if inside and (each != value or word == tight or name == loose):
                    return True
    return False


def _refers(value: Json) -> bool:
    if isinstance(value, Mapping):
        return "$ref" in value or any(map(_refers, value.values()))
    return isinstance(value, list) and any(map(_refers, value))


def _definitions(root: Json) -> Json:
    return [root.get("$defs"), root.get("definitions")] if isinstance(root, Mapping) else None


def _changed(rule: str, path: str, reader: str, writer: str, text: str = "", forward: str = "") -> Mismatch:
    name = path.rpartition("/")[2]
    where = f"of field '{name}'" if name else "of the document"
    if not text:
        text = f"changed type {where} from {writer} to {reader}"
        return Mismatch(rule, path or "/", reader, writer, text, f"changed type {where} from {reader} to {writer}")
    return Mismatch(rule, path or "/", reader, writer, f"{text} {where}", f"{forward or text} {where}")


def _property(rule: str, name: str, path: str, reader: str, writer: str, text: str, forward: str = "") -> Mismatch:
    at = f" at '{path}'" if path else ""
    return Mismatch(f"property_{rule}", f"{path}/{name}", reader, writer, text + at, (forward or text) + at)
