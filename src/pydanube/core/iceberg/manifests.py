"""Iceberg's manifests and manifest lists, of descriptors: which objects a table has, without opening one.

    snapshot ─► manifest list ─► manifest ─► data files, with the bounds that engines prune by
                     │               of what the topic's own manifest lists, cut where an object's name says so: neither
                     │               retention at the front nor uploads at the end move a cut, so most are never new
                     └─────────► manifest of the objects that have a key: the one that changes with every upload

Every entry is EXISTING, of snapshot 1 and sequence 1: an entry that named its snapshot could not be used by the next.
Derived snapshots cannot say what was appended since the one before (a merge may lie in between), and do not claim to.

A manifest's name is the hash of its bytes, so every derivation names it alike, and one that exists is the right one.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from zlib import crc32

from pydanube.core.history.tiers import PARQUET, Descriptor
from pydanube.core.iceberg.avro import GIVEN, NULL, array, container, data, number, text

FOLDER: Final = "_iceberg/"
CUT: Final = 512  # objects in a manifest that does not change, on average
FORMAT_VERSION: Final = 2

OFFSET, PUBLISH_TIME, ATTRIBUTES, APPEND_TIME, KEY, VALUE, PART = 1, 2, 6, 13, 15, 16, 17
EVENT_TIME, DELIVER_AT = 18, 19
SCHEMA: Final = 1  # the number of the schema as it is now
PART_FIELD: Final = 1000
LAST_COLUMN: Final = DELIVER_AT

_EXISTING: Final = 0
_ANY: Final = 1  # the snapshot and the sequence of every entry
_DATA: Final = 0
_NAME: Final = re.compile(r"(\d+)-(?:snap-|\d{20}-)?[0-9a-f]{32}\.(?:avro|metadata\.json)")


class Manifest(NamedTuple):
    """`part`: the partition of all its files; None if the topic has none."""

    name: str
    content: bytes
    files: int
    rows: int
    size_bytes: int  # of the files
    part: int | None


def in_table(described: Descriptor) -> bool:
    """What is stored raw, because Arrow does not take it, is no row of a table."""
    return described.format == PARQUET


def cut(descriptors: Sequence[Descriptor]) -> list[Sequence[Descriptor]]:
    """Where manifests end that hold descriptors which no upload changes any more."""
    runs: list[Sequence[Descriptor]] = []
    first = 0
    for place, each in enumerate(descriptors, start=1):
        if crc32(each.object_id.encode()) % CUT == 0:
            runs.append(descriptors[first:place])
            first = place
    if first < len(descriptors):
        runs.append(descriptors[first:])
    return runs


def manifest(created: int, prefix: str, descriptors: Sequence[Descriptor], part: int | None = None) -> Manifest:
    """Of the topic that was made in epoch `created`, and whose objects are below `prefix`."""
    rows = [_entry(prefix + each.object_id, each, part) for each in descriptors]
    keys = {
        "schema": json.dumps(schema(partitioned=part is not None)),
        "schema-id": str(SCHEMA),
        "partition-spec": json.dumps(spec_fields(partitioned=part is not None)),
        "partition-spec-id": "0",
        "format-version": str(FORMAT_VERSION),
        "content": "data",
    }
    content = container(_ENTRY_PARTITIONED if part is not None else _ENTRY, keys, rows)
    return Manifest(
        name=file_name(created, content, "avro"),
        content=content,
        files=len(descriptors),
        rows=sum(each.end - each.start_offset for each in descriptors),
        size_bytes=sum(each.size for each in descriptors),
        part=part,
    )


def manifest_list(folder: str, snapshot: int, manifests: Sequence[Manifest]) -> bytes:
    """Of manifests that are files in `folder`. It names no parent: that depends on who was asked before."""
    keys = {
        "snapshot-id": str(snapshot),
        "parent-snapshot-id": "null",
        "sequence-number": str(snapshot),
        "format-version": str(FORMAT_VERSION),
    }
    return container(_LIST, keys, [_listed(folder, each) for each in manifests])


def file_name(created: int, content: bytes, ending: str, between: str = "") -> str:
    """Says of which topic of this name it is (`created`), and what is in it."""
    return f"{created}-{between}{hashlib.sha256(content).hexdigest()[:32]}.{ending}"


def created_of(name: str) -> int | None:
    """In which epoch the topic was made whose file in the folder this is; None for a name that is not ours."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def _entry(path: str, described: Descriptor, part: int | None) -> bytes:
    lower = [_bound(OFFSET, described.start_offset), _bound(PUBLISH_TIME, described.min_publish_time)]
    upper = [_bound(OFFSET, described.end_offset), _bound(PUBLISH_TIME, described.max_publish_time)]
    if described.max_append_time:  # versions before did not say
        upper.append(_bound(APPEND_TIME, described.max_append_time))
    return b"".join(
        (
            _ENTRY_BEGIN,
            text(path),
            _PARQUET_TEXT,
            b"" if part is None else GIVEN + number(part),
            number(described.end - described.start_offset),
            number(described.size),
            GIVEN,
            array(lower),
            GIVEN,
            array(upper),
        )
    )


def _bound(field: int, value: int) -> bytes:
    return number(field) + data(_I64.pack(value))


def _listed(folder: str, each: Manifest) -> bytes:
    bound = None if each.part is None else GIVEN + data(_I32.pack(each.part))
    partitions = NULL if bound is None else GIVEN + array([_NO_NULLS + bound + bound])
    numbers = (0, _DATA, _ANY, _ANY, _ANY, 0, each.files, 0, 0, each.rows, 0)
    return b"".join(
        (text(folder + each.name), number(len(each.content)), *(number(value) for value in numbers), partitions)
    )


# --- schemas ------------------------------------------------------------------------------------------


def schema(*, partitioned: bool, version: int = SCHEMA) -> dict[str, Any]:
    """Of the table: what objects hold (`formats.parquet.COLUMNS`), and the partition, which no object holds. Version 0
    is of before messages had times of their own; snapshots of then name it.
    """
    fields = [
        _column(1, "offset", "long", required=True),
        _column(2, "publish_time", "timestamptz", required=True),
        _column(3, "payload", "binary", required=True),
        _column(4, "routing_key", "string"),
        _column(5, "producer_name", "string"),
        _column(6, "attributes", _ATTRIBUTES, required=True),
        _column(7, "schema_id", "long"),
        _column(8, "schema_version", "int"),
        _column(9, "request_id", "long", required=True),
        _column(10, "producer_id", "long", required=True),
        _column(11, "sequence", "long"),
        _column(12, "epoch", "long", required=True),
        _column(13, "append_time", "timestamptz", required=True),
    ]
    if version > 0:
        fields += [_column(EVENT_TIME, "event_time", "timestamptz"), _column(DELIVER_AT, "deliver_at", "timestamptz")]
    if partitioned:
        fields.append(_column(PART, "part", "int"))
    return {"type": "struct", "schema-id": version, "fields": fields}


def spec_fields(*, partitioned: bool) -> list[dict[str, Any]]:
    if not partitioned:
        return []
    return [{"name": "part", "transform": "identity", "source-id": PART, "field-id": PART_FIELD}]


def name_mapping() -> list[dict[str, Any]]:
    """For objects without field ids. Without it DuckDB reads NULLs and says nothing."""
    names: list[dict[str, Any]] = []
    for column in schema(partitioned=False)["fields"]:
        names.append({"field-id": column["id"], "names": [column["name"]]})
        if column["id"] == ATTRIBUTES:
            names[-1]["fields"] = [{"field-id": KEY, "names": ["key"]}, {"field-id": VALUE, "names": ["value"]}]
    return names


def _column(number_: int, name: str, kind: str | Mapping[str, Any], *, required: bool = False) -> dict[str, Any]:
    return {"id": number_, "name": name, "required": required, "type": kind}


def _field(number_: int, name: str, kind: Any, *, optional: bool = False) -> dict[str, Any]:
    if not optional:
        return {"name": name, "type": kind, "field-id": number_}
    return {"name": name, "type": ["null", kind], "default": None, "field-id": number_}


def _record(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields)}


def _bounds(key: int, value: int) -> dict[str, Any]:
    """A map of ints to bytes, as Iceberg writes it in Avro, whose own maps have text for keys."""
    pair = _record(f"k{key}_v{value}", _field(key, "key", "int"), _field(value, "value", "bytes"))
    return {"type": "array", "logicalType": "map", "items": pair}


def _entry_schema(*, partitioned: bool) -> str:
    partition = _record("r102", *([_field(PART_FIELD, "part", "int", optional=True)] if partitioned else []))
    file = _record(
        "r2",
        _field(134, "content", "int"),
        _field(100, "file_path", "string"),
        _field(101, "file_format", "string"),
        _field(102, "partition", partition),
        _field(103, "record_count", "long"),
        _field(104, "file_size_in_bytes", "long"),
        _field(125, "lower_bounds", _bounds(126, 127), optional=True),
        _field(128, "upper_bounds", _bounds(129, 130), optional=True),
    )
    return json.dumps(
        _record(
            "manifest_entry",
            _field(0, "status", "int"),
            _field(1, "snapshot_id", "long", optional=True),
            _field(3, "sequence_number", "long", optional=True),
            _field(4, "file_sequence_number", "long", optional=True),
            _field(2, "data_file", file),
        )
    )


_ATTRIBUTES: Final = {
    "type": "map", "key-id": KEY, "key": "string", "value-id": VALUE, "value": "string", "value-required": False,
}  # fmt: skip
_I64: Final = struct.Struct("<q")
_I32: Final = struct.Struct("<i")
_NO_NULLS: Final = b"\x00" + GIVEN + b"\x00"  # contains_null, contains_nan
_PARQUET_TEXT: Final = text("PARQUET")
_ENTRY_BEGIN: Final = number(_EXISTING) + 3 * (GIVEN + number(_ANY)) + number(_DATA)
_ENTRY: Final = _entry_schema(partitioned=False)
_ENTRY_PARTITIONED: Final = _entry_schema(partitioned=True)
_SUMMARY: Final = _record(
    "r508",
    _field(509, "contains_null", "boolean"),
    _field(518, "contains_nan", "boolean", optional=True),
    _field(510, "lower_bound", "bytes", optional=True),
    _field(511, "upper_bound", "bytes", optional=True),
)
_LIST: Final = json.dumps(
    _record(
        "manifest_file",
        _field(500, "manifest_path", "string"),
        _field(501, "manifest_length", "long"),
        _field(502, "partition_spec_id", "int"),
        _field(517, "content", "int"),
        _field(515, "sequence_number", "long"),
        _field(516, "min_sequence_number", "long"),
        _field(503, "added_snapshot_id", "long"),
        _field(504, "added_files_count", "int"),
        _field(505, "existing_files_count", "int"),
        _field(506, "deleted_files_count", "int"),
        _field(512, "added_rows_count", "long"),
        _field(513, "existing_rows_count", "long"),
        _field(514, "deleted_rows_count", "long"),
        _field(507, "partitions", {"type": "array", "items": _SUMMARY, "element-id": 508}, optional=True),
    )
)
