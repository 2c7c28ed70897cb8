"""Which Avro schema reads what another one wrote: the specification's schema resolution (1.12), on parsed JSON.

Beyond it: a decimal's scale must be the same and its precision no smaller, and units of times must agree, because
resolution looks at the type below and would read other values. A name may differ if the reader says so by an alias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pydanube.core.schemas.findings import Mismatch, shown

Json: TypeAlias = Any

PRIMITIVES: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
NAMED: Final = frozenset({"record", "error", "enum", "fixed"})
READ_AS: Final[Mapping[str, frozenset[str]]] = {  # what a reader of this type takes beside its own
    "long": frozenset({"int"}),
    "float": frozenset({"int", "long"}),
    "double": frozenset({"int", "long", "float"}),
    "string": frozenset({"bytes"}),
    "bytes": frozenset({"string"}),
}
TIMES: Final = frozenset({"date", "time-millis", "time-micros"}) | {
    f"{kind}-{unit}" for kind in ("timestamp", "local-timestamp") for unit in ("millis", "micros", "nanos")
}
VALUES: Final = frozenset({"decimal", "duration"})  # without the word the bytes mean nothing


@dataclass(slots=True, eq=False)
class AvroType:
    """A type. `parts` are the branches of a union, the items of an array, the values of a map."""

    kind: str
    name: str = ""
    aliases: frozenset[str] = frozenset()
    parts: list[AvroType] = field(default_factory=list)
    fields: list[AvroField] = field(default_factory=list)
    symbols: tuple[str, ...] = ()
    has_default: bool = False  # of an enum
    size: int = 0
    logical: str = ""
    precision: int = 0
    scale: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


@dataclass(slots=True, eq=False)
class AvroField:
    name: str
    aliases: frozenset[str]
    type: AvroType
    has_default: bool


def read(schema: Json) -> AvroType:
    """The schema as nodes. Raises ValueError for what is none: libraries have parsed it before."""
    try:
        return _read(schema, "", {})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an Avro schema: {error!r}") from error


def unreadable(reader: AvroType, writer: AvroType) -> list[Mismatch]:
    """What keeps `reader` from reading every value of `writer`; nothing if it reads them all."""
    return _Comparison().compare(reader, writer, "")


def can_be_empty(node: AvroType, above: frozenset[int] = frozenset()) -> bool:
    """Whether a value may take no byte at all: five bytes then say that an array has millions of them."""
    if id(node) in above:
        return True
    if node.kind in ("record", "error"):
        return all(can_be_empty(each.type, above | {id(node)}) for each in node.fields)
    return node.kind == "null" or (node.kind == "fixed" and node.size == 0)


def arrays_of_nothing(node: AvroType) -> str:
    """The path of an array whose items may take no byte; empty: there is none."""
    waiting, seen = [(node, "")], {id(node)}
    while waiting:
        each, path = waiting.pop()
        if each.kind == "array" and can_be_empty(each.parts[0]):
            return path or "/"
        below = [(part, f"{path}/{each.kind}") for part in each.parts]
        below += [(one.type, f"{path}/{one.name}") for one in each.fields]
        for one in below:
            if id(one[0]) not in seen:
                seen.add(id(one[0]))
                waiting.append(one)
    return ""


def wrong_default(schema: Json) -> str:
    """Why a default is no value of its field's type; empty: all are."""
    names: dict[str, AvroType] = {}
    return _wrong(schema, "", names)


def _wrong(schema: Json, namespace: str, names: dict[str, AvroType]) -> str:
    if isinstance(schema, list):
        return next(filter(None, (_wrong(each, namespace, names) for each in schema)), "")
    if not isinstance(schema, Mapping):
        return ""
    kind = schema["type"]
    if isinstance(kind, Mapping | list):
        return _wrong(kind, namespace, names)
    node = _read(schema, namespace, names)
    if kind in NAMED:
        namespace = node.name.rpartition(".")[0]
    if kind == "enum" and node.has_default and schema["default"] not in node.symbols:
        return f"default {shown(schema['default'])} of enum {node.name} is none of its symbols"
    if kind in ("record", "error"):
        for each, own in zip(schema["fields"], node.fields, strict=True):
            if "default" in each and not _fits(own.type, each["default"]):
                return f"default {shown(each['default'])} of field '{own.name}' is no {own.type}"
            if why := _wrong(each["type"], namespace, names):
                return why
    if kind in ("array", "map"):
        return _wrong(schema["items" if kind == "array" else "values"], namespace, names)
    return ""


def _fits(node: AvroType, value: Json) -> bool:
    """As a default: that of a union is of its first branch."""
    match node.kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "int" | "long":
            bits = 31 if node.kind == "int" else 63
            return isinstance(value, int) and not isinstance(value, bool) and -(1 << bits) <= value < 1 << bits
        case "float" | "double":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string" | "bytes" | "fixed":
            return isinstance(value, str) and (node.kind != "fixed" or len(value) == node.size)
        case "enum":
            return value in node.symbols
        case "array":
            return isinstance(value, list) and all(_fits(node.parts[0], each) for each in value)
        case "map":
            return isinstance(value, dict) and all(_fits(node.parts[0], each) for each in value.values())
        case "union":
            return bool(node.parts) and _fits(node.parts[0], value)
        case _:
            return isinstance(value, dict) and all(
                _fits(each.type, value[each.name]) if each.name in value else each.has_default for each in node.fields
            )


# --- comparing ----------------------------------------------------------------------------------------


class _Comparison:
    def __init__(self) -> None:
        self._compared: set[tuple[int, int]] = set()  # of records: a recursive type ends where it began

    def compare(self, reader: AvroType, writer: AvroType, path: str) -> list[Mismatch]:
        if writer.kind == "union":
            found: list[Mismatch] = []
            for branch in writer.parts:
                if (why := self.compare(reader, branch, path)) and reader.kind == "union":
                    text = f"removed {branch} from the union at '{path or '/'}'"
                    forward = f"added {branch} to the union at '{path or '/'}'"
                    found.append(Mismatch("union_branch", path or "/", _union(reader), str(branch), text, forward))
                else:
                    found += why
            return found
        if reader.kind == "union":
            tries = [self.compare(branch, writer, path) for branch in reader.parts]
            if not all(tries):
                return []
            same = [why for why, branch in zip(tries, reader.parts, strict=True) if _alike(branch, writer)]
            if same:
                return min(same, key=len)
            text = f"the union at '{path or '/'}' has no {writer} any more"
            return [
                Mismatch("union_branch", path or "/", _union(reader), str(writer), text, f"added {writer} at '{path}'")
            ]
        if reader.kind != writer.kind:
            if writer.kind not in READ_AS.get(reader.kind, ()):
                return [_changed("type", path, str(reader), str(writer))]
            return self._logical(reader, writer, path)
        return self._same_kind(reader, writer, path)

    def _same_kind(self, reader: AvroType, writer: AvroType, path: str) -> list[Mismatch]:
        kind = reader.kind
        if kind in NAMED and reader.name != writer.name and writer.name not in reader.aliases:
            return [_changed("name", path, reader.name, writer.name, f"renamed {kind}")]
        if kind in ("record", "error"):
            return self._fields(reader, writer, path)
        if kind in ("array", "map"):
            return self.compare(reader.parts[0], writer.parts[0], f"{path}/{kind}")
        if kind == "enum":
            gone = [each for each in writer.symbols if each not in reader.symbols]
            if gone and not reader.has_default:
                text = f"removed symbol '{gone[0]}' of enum {writer.name}"
                more = f"added symbol '{gone[0]}' to enum {writer.name}"
                return [Mismatch("enum_symbol", path or "/", shown(reader.symbols), shown(writer.symbols), text, more)]
        if kind == "fixed" and reader.size != writer.size:
            return [
                _changed("fixed_size", path, str(reader.size), str(writer.size), f"changed size of fixed {reader.name}")
            ]
        return self._logical(reader, writer, path)

    def _fields(self, reader: AvroType, writer: AvroType, path: str) -> list[Mismatch]:
        if (id(reader), id(writer)) in self._compared:
            return []
        self._compared.add((id(reader), id(writer)))
        theirs = {each.name: each for each in writer.fields}
        found: list[Mismatch] = []
        for own in reader.fields:
            names = [own.name, *sorted(own.aliases)]
            other = next((theirs[name] for name in names if name in theirs), None)
            where = f"{path}/{own.name}"
            if other is not None:
                found += self.compare(own.type, other.type, where)
            elif not own.has_default:
                text = f"added field '{own.name}' without a default"
                forward = f"removed field '{own.name}', which has no default in the old version"
                found.append(Mismatch("field_without_default", where, str(own.type), "", text, forward))
        return found

    def _logical(self, reader: AvroType, writer: AvroType, path: str) -> list[Mismatch]:
        one, other = reader.logical, writer.logical
        if one == other == "decimal" and (reader.scale != writer.scale or reader.precision < writer.precision):
            sizes = [f"decimal({each.precision}, {each.scale})" for each in (reader, writer)]
            return [_changed("logical_type", path, *sizes)]
        both_times = one in TIMES and other in TIMES
        if one != other and (both_times or one in VALUES or other in VALUES):
            return [_changed("logical_type", path, one or reader.kind, other or writer.kind)]
        return []


def _alike(branch: AvroType, writer: AvroType) -> bool:
    return branch.kind == writer.kind and (branch.kind not in NAMED or branch.name == writer.name)


def _union(node: AvroType) -> str:
    return shown([str(each) for each in node.parts])


def _changed(rule: str, path: str, reader: str, writer: str, said: str = "") -> Mismatch:
    field_name = path.rpartition("/")[2]
    words = said or (f"changed type of field '{field_name}'" if field_name else "changed the type")
    return Mismatch(
        rule, path or "/", reader, writer, f"{words} from {writer} to {reader}", f"{words} from {reader} to {writer}"
    )


# --- reading ------------------------------------------------------------------------------------------


def _read(schema: Json, namespace: str, names: dict[str, AvroType]) -> AvroType:
    if isinstance(schema, str):
        if schema in PRIMITIVES:
            return AvroType(schema)
        full = _full(schema, namespace)
        return names[full] if full in names else names[schema]
    if isinstance(schema, Sequence):
        return AvroType("union", parts=[_read(each, namespace, names) for each in schema])
    kind = schema["type"]
    if isinstance(kind, dict | list) or (kind not in PRIMITIVES | NAMED | {"array", "map"}):
        return _read(kind, namespace, names)
    node = AvroType(kind)
    if kind in NAMED:
        node.name = _full(schema["name"], schema.get("namespace", namespace) or "")
        namespace = node.name.rpartition(".")[0]
        node.aliases = frozenset(_full(each, namespace) for each in schema.get("aliases", ()))
        names[node.name] = node
    if kind in ("record", "error"):
        node.fields = [
            AvroField(
                each["name"],
                frozenset(each.get("aliases", ())),
                _read(each["type"], namespace, names),
                "default" in each,
            )
            for each in schema["fields"]
        ]
    elif kind == "enum":
        node.symbols, node.has_default = tuple(schema["symbols"]), "default" in schema
    elif kind == "fixed":
        node.size = int(schema["size"])
    elif kind in ("array", "map"):
        node.parts = [_read(schema["items" if kind == "array" else "values"], namespace, names)]
    logical = schema.get("logicalType")
    if isinstance(logical, str):
        node.logical = logical
        if logical == "decimal":
            node.precision, node.scale = int(schema["precision"]), int(schema.get("scale", 0))
    return node


def _full(name: str, namespace: str) -> str:
    return name if "." in name or not namespace else f"{namespace}.{name}"
