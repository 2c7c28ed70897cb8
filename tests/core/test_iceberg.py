"""Tables derived from descriptors, judged by PyIceberg's own readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.avro.decoder import new_decoder
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import PyArrowFileIO, pyarrow_to_schema
from pyiceberg.manifest import ManifestContent, ManifestEntryStatus, read_manifest_list
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadataUtil, TableMetadataV2
from pyiceberg.types import IntegerType, LongType, TimestamptzType

from pydanube.core.history.tiers import RAW, Descriptor, Objects, TopicHistory
from pydanube.core.iceberg import avro
from pydanube.core.iceberg.manifests import CUT, FOLDER, cut, manifest, schema
from pydanube.core.iceberg.table import Derived, Share, derived, snapshot_id, table
from pydanube.formats.parquet import COLUMNS

TOPIC = "/default/orders"
NOON = 1_704_110_400_000_000


def described(start: int, end: int, epoch: int = 1, **changed: Any) -> Descriptor:
    told = Descriptor(
        start_offset=start,
        end_offset=end - 1,
        object_id=f"data-{start}-{end - 1}-{epoch}.parquet",
        size=100 + start,
        etag="e",
        min_publish_time=NOON - 5 + start,
        max_publish_time=NOON + end,
        epoch=epoch,
        created_at=NOON // 1_000_000,
        max_append_time=NOON + end,
    )
    return replace(told, **changed)


def row_of(count: int, rows: int = 10) -> list[Descriptor]:
    return [described(n * rows, (n + 1) * rows) for n in range(count)]


def share(objects: Sequence[Descriptor], change: int = 1, part: int | None = None, **history: Any) -> Share:
    told = TopicHistory(epoch=3, change=change, changed_at=NOON + change * 1_000_000)
    return Share(part, 1, replace(told, **history), Objects(objects))


class Place:
    """A directory in which a table's files are put."""

    def __init__(self, root: Path) -> None:
        self.location = f"{root}/default/orders"
        self.folder = f"{self.location}/{FOLDER}"
        Path(self.folder).mkdir(parents=True, exist_ok=True)

    def derive(
        self,
        *shares: Share,
        before: Derived | None = None,
        since_ms: int = 0,
        seen_ms: dict[int, int] | None = None,
    ) -> Derived:
        manifests = [
            manifest(
                each.created, f"{self.location}{'' if each.part is None else f'-part-{each.part}'}/", run, each.part
            )
            for each in shares
            for run in cut(each.objects[:])
        ]
        given = table(TOPIC, self.location, self.folder, shares, manifests)
        made = derived(given, before.metadata if before else None, since_ms, seen_ms)
        for name, content in made.files.items():
            Path(self.folder, name).write_bytes(content)
        return made


def entries_of(made: Derived) -> list[Any]:
    """As PyIceberg reads them."""
    io = PyArrowFileIO()
    metadata = TableMetadataUtil.parse_obj(made.metadata)
    snapshot = metadata.current_snapshot()
    assert snapshot is not None
    found = []
    for listed in read_manifest_list(io.new_input(snapshot.manifest_list)):
        assert listed.content is ManifestContent.DATA
        assert listed.manifest_length == Path(listed.manifest_path).stat().st_size
        read = listed.fetch_manifest_entry(io)
        assert listed.existing_files_count == len(read)
        assert listed.existing_rows_count == sum(each.data_file.record_count for each in read)
        found += read
    return found


# --- Avro ---------------------------------------------------------------------------------------------------


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=200), st.text(max_size=50))
def test_numbers_bytes_and_texts_are_read_by_another_reader(value: int, data: bytes, text: str) -> None:
    reader = new_decoder(avro.number(value) + avro.data(data) + avro.text(text))
    assert (reader.read_int(), reader.read_bytes(), reader.read_utf8()) == (value, data, text)


def test_the_same_rows_are_the_same_bytes() -> None:
    files = [avro.container('"long"', {"a": "b"}, [avro.number(n) for n in range(50)]) for _ in range(2)]
    assert files[0] == files[1] != avro.container('"long"', {"a": "b"}, [avro.number(n) for n in range(51)])


# --- manifests ----------------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[Descriptor]:
    """Objects in order, with gaps, of any size and any time that can be stored."""
    objects, place = [], 0
    times = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
    for _ in range(draw(st.integers(1, 20))):
        start = place + draw(st.integers(0, 2**20))
        place = start + draw(st.integers(1, 2**40))
        earliest, latest = sorted((draw(times), draw(times)))
        objects.append(
            described(
                start,
                place,
                draw(st.integers(1, 10**6)),
                size=draw(st.integers(1, 2**40)),
                min_publish_time=earliest,
                max_publish_time=latest,
                max_append_time=draw(st.integers(0, 2**50)),
            )
        )
    return objects


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(objects=histories(), part=st.one_of(st.none(), st.integers(0, 2**31 - 1)))
def test_what_pyiceberg_reads_of_a_table_is_what_descriptors_say(
    tmp_path: Path, objects: list[Descriptor], part: int | None
) -> None:
    place = Place(tmp_path)
    made = place.derive(share(objects, part=part))
    prefix = place.location + ("" if part is None else f"-part-{part}") + "/"
    read = entries_of(made)
    assert [each.data_file.file_path for each in read] == [prefix + each.object_id for each in objects]
    for entry, told in zip(read, objects, strict=True):
        file = entry.data_file
        assert entry.status == ManifestEntryStatus.EXISTING and entry.sequence_number == entry.snapshot_id == 1
        assert (file.record_count, file.file_size_in_bytes) == (told.end - told.start_offset, told.size)
        assert tuple(file.partition) == (() if part is None else (part,))
        lower = {1: (LongType(), told.start_offset), 2: (TimestamptzType(), told.min_publish_time)}
        upper = {1: (LongType(), told.end_offset), 2: (TimestamptzType(), told.max_publish_time)}
        if told.max_append_time:
            upper[13] = (TimestamptzType(), told.max_append_time)
        for wanted, bounds in ((lower, file.lower_bounds), (upper, file.upper_bounds)):
            assert bounds.keys() == wanted.keys()
            assert all(from_bytes(kind, bounds[number]) == value for number, (kind, value) in wanted.items())


def test_a_cut_stays_where_it_is_whatever_retention_removes_and_uploads_add() -> None:
    objects = row_of(8 * CUT)
    before = {manifest(1, "p/", run).name for run in cut(objects)[:-1]}
    assert len(before) > 3
    after = {manifest(1, "p/", run).name for run in cut([*objects[30:], *row_of(8 * CUT + 40)[8 * CUT :]])}
    assert len(before - after) <= 1  # the one at whose front something went
    assert [each for run in cut(objects) for each in run] == objects


def test_manifests_name_their_part_so_that_others_are_not_opened(tmp_path: Path) -> None:
    made = Place(tmp_path).derive(share(row_of(3), part=0), share(row_of(2), part=7))
    snapshot = TableMetadataUtil.parse_obj(made.metadata).current_snapshot()
    assert snapshot is not None
    listed = list(read_manifest_list(PyArrowFileIO().new_input(snapshot.manifest_list)))
    bounds = [(each.partitions[0].lower_bound, each.partitions[0].upper_bound) for each in listed if each.partitions]
    assert [tuple(from_bytes(IntegerType(), bound) for bound in pair) for pair in bounds] == [(0, 0), (7, 7)]


# --- tables -------------------------------------------------------------------------------------------------


def test_the_schema_is_that_of_the_objects_with_the_same_ids() -> None:
    ours = Schema.model_validate(schema(partitioned=False))
    assert ours.fields == pyarrow_to_schema(COLUMNS).fields
    assert ours.highest_field_id == 19


def test_snapshots_of_before_messages_had_times_of_their_own_name_the_first_schema(tmp_path: Path) -> None:
    table = parsed(Place(tmp_path).derive(share(row_of(1))))
    assert [each.schema_id for each in table.schemas] == [0, 1] and table.current_schema_id == 1
    first, now = table.schemas
    assert now.fields[: len(first.fields)] == first.fields
    assert [field.name for field in now.fields[len(first.fields) :]] == ["event_time", "deliver_at"]


def parsed(made: Derived) -> TableMetadataV2:
    metadata = TableMetadataUtil.parse_obj(made.metadata)
    assert isinstance(metadata, TableMetadataV2)
    return metadata


def test_objects_without_ids_are_mapped_by_name(tmp_path: Path) -> None:
    mapping = parsed(Place(tmp_path).derive(share(row_of(1)))).name_mapping()
    assert mapping is not None
    assert {each.names[0]: each.field_id for each in mapping.root} == {
        field.name: int(field.metadata[b"PARQUET:field_id"]) for field in COLUMNS
    }
    assert [(part.field_id, part.names) for part in mapping.root[5].fields] == [(15, ["key"]), (16, ["value"])]


def test_a_snapshot_is_named_by_epoch_and_change_and_says_when_that_was(tmp_path: Path) -> None:
    metadata = parsed(Place(tmp_path).derive(share(row_of(2), change=5)))
    snapshot = metadata.current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    assert snapshot.snapshot_id == snapshot.sequence_number == metadata.last_sequence_number == 3 << 40 | 5
    assert snapshot.timestamp_ms == metadata.last_updated_ms == NOON // 1000 + 5000
    assert snapshot.summary.operation.value == "overwrite"
    assert snapshot.summary["total-records"] == "20"


def test_an_older_history_key_that_does_not_say_when_is_as_old_as_its_newest_object(tmp_path: Path) -> None:
    metadata = parsed(Place(tmp_path).derive(share(row_of(2), changed_at=0)))
    assert metadata.last_updated_ms == NOON // 1000


def test_a_change_of_any_partition_makes_a_greater_snapshot() -> None:
    def of(*changes: tuple[int, int]) -> int:
        return snapshot_id([TopicHistory(epoch=epoch, change=change) for epoch, change in changes])

    assert of((1, 1)) < of((1, 2)) < of((2, 1))
    assert of((1, 9), (1, 1)) < of((1, 9), (1, 2)) < of((2, 1), (1, 2)) < of((2, 1), (1, 2), (1, 1))


def chain(place: Place, *changes: int, since: int, seen: dict[int, int] | None = None) -> TableMetadataV2:
    """Derived one after the other; `since` and `seen` in seconds after noon, as changes are."""
    made: Derived | None = None
    seen_ms = {3 << 40 | change: NOON // 1000 + second * 1000 for change, second in (seen or {}).items()}
    for change in changes:
        made = place.derive(
            share(row_of(change), change), before=made, since_ms=NOON // 1000 + since * 1000, seen_ms=seen_ms
        )
    assert made is not None
    return parsed(made)


def ids_of(metadata: TableMetadataV2) -> list[int]:
    return [each.snapshot_id & 0xFFFF for each in metadata.snapshots]


def test_snapshots_that_were_replaced_in_the_last_minutes_are_kept_and_older_ones_are_not(tmp_path: Path) -> None:
    metadata = chain(Place(tmp_path), 1, 2, 3, 4, 5, since=3)
    assert ids_of(metadata) == [2, 3, 4, 5]  # 2 was the current one until second 3
    ids = [each.snapshot_id for each in metadata.snapshots]
    assert [each.snapshot_id for each in metadata.snapshot_log] == ids
    assert [each.parent_snapshot_id for each in metadata.snapshots] == [None, *ids[:-1]]
    assert metadata.refs["main"].snapshot_id == ids[-1]


def test_a_snapshot_whose_end_nobody_saw_counts_as_replaced_when_it_was_made(tmp_path: Path) -> None:
    """Its objects may have been merged right after it, by a change that no load has seen."""
    assert ids_of(chain(Place(tmp_path), 1, 2, 9, since=3)) == [9]
    assert ids_of(chain(Place(tmp_path), 1, 2, 9, since=2)) == [1, 2, 9]
    assert ids_of(chain(Place(tmp_path), 1, 2, 9, since=5, seen={2: 6})) == [2, 9]


def test_whoever_derives_the_same_change_writes_the_same_files(tmp_path: Path) -> None:
    place = Place(tmp_path)
    first, second = (place.derive(share(row_of(700), 2)) for _ in range(2))
    assert first == second
    later = place.derive(share(row_of(701), 3))
    assert len([name for name in first.files if name in later.files]) >= len(cut(row_of(700))) - 1


def test_a_topic_made_anew_is_another_table_without_the_snapshots_of_the_old_one(tmp_path: Path) -> None:
    place = Place(tmp_path)
    old = place.derive(share(row_of(2), 2))
    new = place.derive(share(row_of(1), 1, epoch=9)._replace(created=9), before=old)
    assert parsed(old).table_uuid != parsed(new).table_uuid
    assert len(parsed(new).snapshots) == 1 and not old.files.keys() & new.files.keys()


def test_what_a_table_does_not_have_is_said(tmp_path: Path) -> None:
    objects = [described(10, 20), described(30, 40), described(40, 50, format=RAW), described(50, 60)]
    rows = [each for each in objects if each.format != RAW]
    told = share(objects, first_offset=5)
    properties = derived(table(TOPIC, "l", "l/f/", [told], [manifest(1, "l/", rows)]), None, 0).metadata["properties"]
    assert properties["danube.topic"] == TOPIC
    assert json.loads(properties["danube.missing"]) == [[5, 10], [20, 30], [40, 50]]
    assert (properties["danube.missing-offsets"], properties["danube.head"]) == ("25", "60")
    assert properties["danube.first-offset"] == "5"
    assert properties["danube.changed-at"] == "2024-01-01T12:00:01.000Z"
    parts = [share([described(0, 9)], part=0), share([], part=1, first_offset=4)]
    properties = derived(table(TOPIC, "l", "l/f/", parts, []), None, 0).metadata["properties"]
    assert json.loads(properties["danube.head"]) == {"0": 9, "1": 4}
    assert all(isinstance(value, str) for value in properties.values())


@pytest.mark.parametrize("part", [None, 0])
def test_a_table_without_objects_is_empty(tmp_path: Path, part: int | None) -> None:
    assert entries_of(Place(tmp_path).derive(share([], part=part))) == []
