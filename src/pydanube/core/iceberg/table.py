"""A topic as an Iceberg table of version 2: its metadata as values, derived from what the metadata store says.

Nothing is committed here: the descriptor is. The history key has a unique (epoch, change) for every set of descriptors,
so the two, packed, name the snapshot and order it; every derivation gives the same. Partitions of one topic are one
table: the sum of theirs grows with each change of any of them, and they are read at one moment, so it is unique too.

A table says which of its offsets it does not have: `danube.missing` (an orphan's, a void's, or stored raw), and up to
where it goes: `danube.head`. Snapshots before are kept as long as their objects are: for the garbage time after they
were replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple

from pydanube.core.history.tiers import Descriptor, Objects, TopicHistory
from pydanube.core.iceberg.manifests import (
    FORMAT_VERSION,
    LAST_COLUMN,
    PART_FIELD,
    SCHEMA,
    Manifest,
    file_name,
    in_table,
    manifest_list,
    name_mapping,
    schema,
    spec_fields,
)

CHANGE_BITS: Final = 40
MISSING_MAX: Final = 100  # ranges that a property names; beyond that their number tells


class Share(NamedTuple):
    """What one topic gives to a table: all of it, or partition `part`. `created`: the epoch in which it was made."""

    part: int | None
    created: int
    history: TopicHistory
    objects: Objects


class Table(NamedTuple):
    """All of one moment. `manifests` are of all shares; `folder` is where they are."""

    topic: str
    location: str
    folder: str
    created: int
    partitioned: bool
    snapshot: int
    changed_ms: int
    properties: Mapping[str, str]
    manifests: Sequence[Manifest]


class Derived(NamedTuple):
    """`files` are to be put before anybody is told of the metadata: names in the folder, and their bytes."""

    metadata: Mapping[str, Any]
    files: Mapping[str, bytes]
    metadata_name: str


def snapshot_id(histories: Sequence[TopicHistory]) -> int:
    return sum(each.epoch << CHANGE_BITS | each.change for each in histories)


def table(
    topic: str,
    location: str,
    folder: str,
    shares: Sequence[Share],
    manifests: Sequence[Manifest],
    upload_seconds: float = 0.0,
) -> Table:
    """`upload_seconds`: how long a message may wait in the log before it is a row, unless the table is loaded."""
    changed_ms = max(_changed_ms(each) for each in shares)
    return Table(
        topic=topic,
        location=location,
        folder=folder,
        created=shares[0].created,
        partitioned=shares[0].part is not None,
        snapshot=snapshot_id([each.history for each in shares]),
        changed_ms=changed_ms,
        properties=_properties(topic, shares, changed_ms, upload_seconds),
        manifests=manifests,
    )


def derived(
    given: Table, before: Mapping[str, Any] | None, since_ms: int, seen_ms: Mapping[int, int] | None = None
) -> Derived:
    """The table's metadata and files. `before` is the metadata that was derived last; its snapshots that were replaced
    since `since_ms` can still be read. `seen_ms`: when snapshots were last found to be the current one.
    """
    files = {each.name: each.content for each in given.manifests}
    identity = table_uuid(given)
    snapshots: list[Mapping[str, Any]] = []
    if before is not None and before.get("table-uuid") == identity:
        snapshots = [each for each in before["snapshots"] if each["snapshot-id"] < given.snapshot]
    newest = {"snapshot-id": given.snapshot, "timestamp-ms": given.changed_ms}
    snapshots = readable([*snapshots, newest], since_ms, seen_ms or {})[:-1]
    listed = manifest_list(given.folder, given.snapshot, given.manifests)
    list_name = file_name(given.created, listed, "avro", "snap-")
    files[list_name] = listed
    parent = {"parent-snapshot-id": snapshots[-1]["snapshot-id"]} if snapshots else {}
    snapshots.append(
        {
            "snapshot-id": given.snapshot,
            **parent,
            "sequence-number": given.snapshot,
            "timestamp-ms": given.changed_ms,
            "manifest-list": given.folder + list_name,
            "summary": {
                "operation": "overwrite",
                "total-records": str(sum(each.rows for each in given.manifests)),
                "total-data-files": str(sum(each.files for each in given.manifests)),
                "total-files-size": str(sum(each.size_bytes for each in given.manifests)),
            },
            "schema-id": SCHEMA,
        }
    )
    metadata = {
        "format-version": FORMAT_VERSION,
        "table-uuid": identity,
        "location": given.location,
        "last-sequence-number": given.snapshot,
        "last-updated-ms": given.changed_ms,
        "last-column-id": LAST_COLUMN,
        "schemas": [schema(partitioned=given.partitioned, version=each) for each in range(SCHEMA + 1)],
        "current-schema-id": SCHEMA,
        "partition-specs": [{"spec-id": 0, "fields": spec_fields(partitioned=given.partitioned)}],
        "default-spec-id": 0,
        "last-partition-id": PART_FIELD,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "default-sort-order-id": 0,
        "properties": dict(given.properties),
        "current-snapshot-id": given.snapshot,
        "refs": {"main": {"snapshot-id": given.snapshot, "type": "branch"}},
        "snapshots": snapshots,
        "snapshot-log": [{"snapshot-id": s["snapshot-id"], "timestamp-ms": s["timestamp-ms"]} for s in snapshots],
        "metadata-log": [],
    }
    content = json.dumps(metadata).encode()
    name = file_name(given.created, content, "metadata.json", f"{given.snapshot:020}-")
    files[name] = content
    return Derived(metadata, files, name)


def table_uuid(given: Table) -> str:
    """Another one for a topic that was deleted and made anew: clients that remember the old one notice."""
    digits = hashlib.sha256(f"{given.location}#{given.created}".encode()).hexdigest()
    return (
        f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-8{digits[17:20]}-{digits[20:32]}"  # version 8: of our own making
    )


def readable(
    snapshots: Sequence[Mapping[str, Any]], since_ms: int, seen_ms: Mapping[int, int]
) -> list[Mapping[str, Any]]:
    """Those of a chain whose objects are all there still: the newest, and what was replaced since `since_ms`.

    One was current at least until it was last seen to be, and until the next one if that is the very next change.
    Between two that are further apart it is not known: then it counts as replaced when it was made.
    """
    kept = []
    for each, after in pairwise(snapshots):
        is_next = after["snapshot-id"] == each["snapshot-id"] + 1
        last_ms = after["timestamp-ms"] if is_next else each["timestamp-ms"]
        if max(last_ms, seen_ms.get(each["snapshot-id"], 0)) >= since_ms:
            kept.append(each)
    return [*kept, *snapshots[-1:]]


def _changed_ms(share: Share) -> int:
    if share.history.changed_at:
        return share.history.changed_at // 1000
    newest: Descriptor | None = max(share.objects, key=lambda each: each.created_at, default=None)
    return newest.created_at * 1000 if newest else 0  # an older version wrote the history key


def _properties(topic: str, shares: Sequence[Share], changed_ms: int, upload_seconds: float) -> dict[str, str]:
    heads = {each.part: max(each.objects.end, each.history.first_offset) for each in shares}
    firsts = {each.part: each.history.first_offset for each in shares}
    gaps = {each.part: missing(each) for each in shares}
    return {
        "schema.name-mapping.default": json.dumps(name_mapping()),
        "danube.topic": topic,
        "danube.head": _by_part(heads),
        "danube.first-offset": _by_part(firsts),
        "danube.missing": _by_part({part: ranges[:MISSING_MAX] for part, ranges in gaps.items()}),
        "danube.missing-offsets": _by_part({p: sum(end - first for first, end in each) for p, each in gaps.items()}),
        "danube.changed-at": _iso(changed_ms),
        "danube.upload-seconds": f"{upload_seconds:g}",
    }


def _iso(time_ms: int) -> str:
    return f"{datetime.fromtimestamp(time_ms // 1000, UTC):%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03}Z"


def missing(share: Share) -> list[tuple[int, int]]:
    """The ranges below the head that no row has, as [first, end)."""
    rows = Objects(filter(in_table, share.objects))
    return rows.missing(share.history.first_offset, share.objects.end)


def _by_part(values: Mapping[int | None, Any]) -> str:
    """The value itself, or the partitions' as an object."""
    return json.dumps(values.get(None, values))
