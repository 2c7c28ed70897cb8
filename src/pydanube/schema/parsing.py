"""From a definition's text to what can be compared: with the libraries of the field, and never in a broker's process.

    parse(AVRO, text)      both libraries accept it; defaults fit their types; no array whose items take no byte
    parse(JSON_SCHEMA, …)  its draft's meta-schema accepts it; every reference is local; it compiles
    parse(PROTOBUF, …)     protoc compiles it; of other files it imports google/protobuf/ alone

A library that is not installed raises `Missing`. Nothing here follows a reference to a file or an address.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import resource
import warnings
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pydanube.core.schemas import avro as avro_rules
from pydanube.core.schemas.compare import Parsed
from pydanube.core.schemas.json_schema import foreign_reference
from pydanube.core.schemas.kinds import SchemaType

DEPTH_MAX: Final = 64
NAMES_MAX: Final = 10_000  # keys and items of a definition
SAID_MAX: Final = 600  # characters of what a library says
OUTPUT_MAX: Final = 8 * 1024 * 1024
FILE: Final = "schema.proto"
DRAFTS: Final = {
    "http://json-schema.org/draft-04/schema": "Draft4Validator",
    "http://json-schema.org/draft-06/schema": "Draft6Validator",
    "http://json-schema.org/draft-07/schema": "Draft7Validator",
    "https://json-schema.org/draft/2019-09/schema": "Draft201909Validator",
    "https://json-schema.org/draft/2020-12/schema": "Draft202012Validator",
}
NEWEST: Final = "Draft202012Validator"
# By the numbers of FieldDescriptorProto.Type.
PROTO_TYPES: Final = (
    "", "double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group", "message",
    "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64",
)  # fmt: skip
PROTO_LABELS: Final = ("", "optional", "required", "repeated")


class Invalid(Exception):
    """The definition is none; the text says why."""


class Missing(Exception):
    """The library that would parse it is not installed."""


class Understood(NamedTuple):
    fingerprint: str
    parsed: Parsed
    compiled: bytes = b""  # a FileDescriptorSet


def parse(kind: SchemaType, text: str, message: str = "") -> Understood:
    """`message` is the Protobuf message that payloads are; empty: the first of the file. Raises Invalid, Missing."""
    if kind.is_plain:
        return Understood(kind.value, Parsed(kind))
    try:
        if kind is SchemaType.PROTOBUF:
            return _parse_protobuf(text, message)
        return _parse_avro(text) if kind is SchemaType.AVRO else _parse_json_schema(text)
    except ModuleNotFoundError as error:
        raise Missing(kind.value) from error


def _hash(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def said(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= SAID_MAX else text[: SAID_MAX - 1] + "…"


# --- JSON -----------------------------------------------------------------------------------------------


def read_json(text: str | bytes) -> Any:
    """Raises Invalid for what is no JSON, is too deep or too large, or names a key twice."""
    try:
        found = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_pairs)
    except RecursionError:
        raise Invalid(f"it is nested deeper than {DEPTH_MAX} levels") from None
    except ValueError as error:
        raise Invalid(f"it is not JSON: {said(error)}") from None
    waiting, count = [(found, 1)], 0
    while waiting:
        each, depth = waiting.pop()
        if depth > DEPTH_MAX:
            raise Invalid(f"it is nested deeper than {DEPTH_MAX} levels")
        if isinstance(each, dict | list):
            below = each.values() if isinstance(each, dict) else each
            count += len(each)
            if count > NAMES_MAX:
                raise Invalid(f"it has more than {NAMES_MAX} keys and items")
            waiting += [(one, depth + 1) for one in below]
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice in one object")
    return found


def _sorted(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


# --- Avro -----------------------------------------------------------------------------------------------


def _parse_avro(text: str) -> Understood:
    import avro.errors
    import avro.schema
    import fastavro.schema

    plain = read_json(text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown logical type is ignored, as the specification says
            avro.schema.parse(json.dumps(plain))
            fastavro.schema.parse_schema(plain, named_schemas={})
    except RecursionError:
        raise Invalid("it is nested too deeply") from None
    except Exception as error:  # both raise what they like: AttributeError, KeyError
        raise Invalid(said(error)) from None
    try:
        node = avro_rules.read(plain)
    except (ValueError, RecursionError) as error:
        raise Invalid(said(error)) from None
    if path := avro_rules.arrays_of_nothing(node):
        raise Invalid(f"items of the array at '{path}' take no byte: five bytes would be an array of millions")
    if why := avro_rules.wrong_default(plain):
        raise Invalid(why)
    return Understood(_hash(_sorted(plain)), Parsed(SchemaType.AVRO, plain))


# --- JSON Schema ----------------------------------------------------------------------------------------


def _parse_json_schema(text: str) -> Understood:
    plain = read_json(text)
    json_validator(plain)
    return Understood(_hash(_sorted(plain)), Parsed(SchemaType.JSON_SCHEMA, plain))


def json_validator(plain: Any) -> Any:
    """Compiled, for payloads. Raises Invalid."""
    import jsonschema_rs

    if not isinstance(plain, dict | bool):
        raise Invalid("a JSON Schema is an object, true or false")
    name = plain.get("$schema") if isinstance(plain, dict) else None
    if name is not None and (not isinstance(name, str) or name.rstrip("#") not in DRAFTS):
        raise Invalid(f"$schema {str(name)[:100]!r} is no draft that is known here: {', '.join(DRAFTS)}")
    target = foreign_reference(plain)
    if target is not None:
        raise Invalid(
            f"$ref {target[:100]!r} does not lead to a place in the document: what it refers to must be in it"
        )
    maker = getattr(jsonschema_rs, DRAFTS[name.rstrip("#")] if name else NEWEST)
    try:
        return maker(plain, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise Invalid(said(error)) from None


def covers(wide: Any, narrow: Any) -> bool | None:
    """Whether every document of `narrow` is one of `wide`; None: it cannot be decided."""
    import jsonschema_rs

    try:
        one, other = (jsonschema_rs.canonicalize(each, offline=True) for each in (wide, narrow))
        answer = str(one.covers(other)).rpartition(".")[2].upper()
    except Exception:  # whatever it cannot do is not decided
        return None
    return {"YES": True, "TRUE": True, "NO": False, "FALSE": False}.get(answer)


# --- Protobuf -------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _well_known() -> str:
    import grpc_tools

    return os.path.join(os.path.dirname(grpc_tools.__file__), "_proto")


def _parse_protobuf(text: str, message: str) -> Understood:
    from google.protobuf import descriptor_pb2

    compiled = _compile(text)
    found = descriptor_pb2.FileDescriptorSet.FromString(compiled)
    file = next(each for each in found.file if each.name == FILE)
    file.ClearField("source_code_info")
    names = [f".{file.package}.{each.name}" if file.package else f".{each.name}" for each in file.message_type]
    if not names:
        raise Invalid("it has no message")
    root = f".{message.lstrip('.')}" if message else names[0]
    messages: dict[str, Any] = {}
    enums: dict[str, Any] = {}
    for each in found.file:
        prefix = f".{each.package}" if each.package else ""
        closed = each.syntax in ("", "proto2")
        _collect(prefix, each.message_type, each.enum_type, closed, messages, enums)
    if root not in messages:
        raise Invalid(f"it has no message {root[1:]}")
    plain = {"messages": messages, "enums": enums, "root": root}
    fingerprint = _hash(file.SerializeToString(deterministic=True) + root.encode())
    return Understood(fingerprint, Parsed(SchemaType.PROTOBUF, plain), compiled)


@contextlib.contextmanager
def descriptors() -> Iterator[None]:
    """This process may open files, as far as it may have it allowed: `child.py` gave that up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _compile(text: str) -> bytes:
    """A FileDescriptorSet with what it imports. Nothing but memory is written, and what goes with protoc is read."""
    from grpc_tools import protoc

    with descriptors():
        return _compiled(protoc, text)


def _compiled(protoc: Any, text: str) -> bytes:
    source, output, errors = (os.memfd_create(each) for each in ("source", "output", "errors"))
    kept = os.dup(2)
    try:
        os.write(source, text.encode())
        os.dup2(errors, 2)
        try:
            code = protoc.main(
                [
                    "protoc",
                    f"-I{FILE}=/proc/self/fd/{source}",
                    f"-I{_well_known()}",
                    "--include_imports",
                    f"--descriptor_set_out=/proc/self/fd/{output}",
                    FILE,
                ]
            )
        finally:
            os.dup2(kept, 2)
        if code:
            os.lseek(errors, 0, os.SEEK_SET)
            complaint = os.read(errors, 4096).decode(errors="replace").replace(f"/proc/self/fd/{source}", FILE)
            lines = [line for line in complaint.splitlines() if "warning" not in line]
            hint = "; files other than google/protobuf/ cannot be imported" if "was not found" in complaint else ""
            raise Invalid(said(ValueError("; ".join(lines[:3]) or "protoc refuses it")) + hint)
        os.lseek(output, 0, os.SEEK_SET)
        return os.read(output, OUTPUT_MAX)
    finally:
        for each in (source, output, errors, kept):
            os.close(each)


def _collect(
    prefix: str, found: Any, own_enums: Any, closed: bool, messages: dict[str, Any], enums: dict[str, Any]
) -> None:
    for each in own_enums:
        enums[f"{prefix}.{each.name}"] = {"numbers": sorted({one.number for one in each.value}), "closed": closed}
    for each in found:
        name = f"{prefix}.{each.name}"
        messages[name] = {
            "fields": [
                {
                    "number": one.number,
                    "name": one.name,
                    "type": PROTO_TYPES[one.type],
                    "type_name": one.type_name,
                    "repeated": PROTO_LABELS[one.label] == "repeated",
                    "required": PROTO_LABELS[one.label] == "required",
                    "oneof": each.oneof_decl[one.oneof_index].name
                    if one.HasField("oneof_index") and not one.proto3_optional
                    else "",
                }
                for one in each.field
            ],
            "reserved": [[one.start, one.end] for one in each.reserved_range],
        }
        _collect(name, each.nested_type, each.enum_type, closed, messages, enums)


def message_class(understood: Understood) -> Any:
    """What decodes payloads of a Protobuf schema."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(understood.compiled).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(understood.parsed.plain["root"][1:]))


def avro_schema(plain: Any) -> Any:
    """For payloads."""
    import fastavro.schema

    return fastavro.schema.parse_schema(plain, named_schemas={})


def read_avro(schema: Any, payload: bytes) -> None:
    """Raises if the payload is neither one value of the schema, to its last byte, nor a container of such values."""
    import fastavro

    if payload[:4] == b"Obj\x01":
        for _ in fastavro.reader(io.BytesIO(payload), reader_schema=schema):
            pass
        return
    source = io.BytesIO(payload)
    fastavro.schemaless_reader(source, schema)
    if source.tell() != len(payload):
        raise ValueError(f"{len(payload) - source.tell()} bytes follow the value")
