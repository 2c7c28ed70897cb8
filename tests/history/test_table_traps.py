"""Traps of Iceberg's metadata, measured with real engines: each of them gave wrong rows, or none, in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable

from pydanube.core.history.tiers import Descriptor
from pydanube.core.iceberg.table import Derived
from pydanube.formats.parquet import COLUMNS, FIRST_COLUMNS
from tests.core.test_iceberg import NOON, Place, described, entries_of, share
from tests.harness.engines import duckdb_alone


def rows(first: int, end: int) -> pa.Table:
    count = end - first
    columns: dict[str, list[Any]] = {
        "offset": list(range(first, end)),
        "publish_time": [NOON + n for n in range(first, end)],
        "payload": [f"order {n}".encode() for n in range(first, end)],
        "routing_key": [None if n % 2 else "eu" for n in range(first, end)],
        "producer_name": ["shop"] * count,
        "attributes": [[("a", "b")]] * count,
        "schema_id": [None] * count,
        "schema_version": [None] * count,
        "request_id": [n for n in range(count)],
        "producer_id": [1] * count,
        "sequence": list(range(first, end)),
        "epoch": [1] * count,
        "append_time": [NOON + n for n in range(first, end)],
        "event_time": [None] * count,
        "deliver_at": [None] * count,
    }
    arrays = [pa.array(columns[each.name], each.type) for each in COLUMNS]
    return pa.table(arrays, schema=COLUMNS)


def put(place: Place, first: int, end: int, *, with_ids: bool = True) -> Descriptor:
    table = rows(first, end)
    if not with_ids:  # as objects of earlier versions are
        plain = [pa.field(each.name, _plain(each.type), each.nullable) for each in FIRST_COLUMNS]
        first_columns = table.columns[: len(plain)]
        table = pa.table(
            [each.cast(field.type) for each, field in zip(first_columns, plain, strict=True)], pa.schema(plain)
        )
    told = described(first, end, min_publish_time=NOON + first, max_publish_time=NOON + end - 1)
    path = Path(place.location, told.object_id)
    pq.write_table(table, path)
    found = {each.metadata.get(b"PARQUET:field_id") if each.metadata else None for each in pq.read_schema(path)}
    assert (found == {None}) is not with_ids
    return described(
        first, end, size=path.stat().st_size, min_publish_time=NOON + first, max_publish_time=NOON + end - 1
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    return pa.map_(pa.string(), pa.string()) if pa.types.is_map(kind) else kind


def stored(place: Place, made: Derived) -> str:
    return place.folder + made.metadata_name


@pytest.fixture(scope="module")
def duck() -> Any:
    return duckdb_alone()


def scanned(duck: duckdb.DuckDBPyConnection, location: str, what: str, where: str = "") -> list[tuple[Any, ...]]:
    return duck.execute(f"SELECT {what} FROM iceberg_scan('{location}') {where}").fetchall()


WHAT = """count(*), count(payload), sum("offset")::BIGINT, count(attributes['a']), max(producer_name)"""


def test_objects_with_and_without_field_ids_are_rows_of_one_table_to_both_engines(tmp_path: Path, duck: Any) -> None:
    place = Place(tmp_path)
    objects = [put(place, 0, 10, with_ids=False), put(place, 10, 30)]
    location = stored(place, place.derive(share(objects)))
    assert scanned(duck, location, WHAT) == [(30, 30, 435, 30, "shop")]
    read = StaticTable.from_metadata(location).scan().to_arrow().sort_by("offset")
    assert read.column("payload").to_pylist() == [f"order {n}".encode() for n in range(30)]
    assert read.column("attributes").to_pylist() == [[("a", "b")]] * 30


def test_without_the_name_mapping_an_object_without_ids_is_read_as_nothing_and_nobody_says_so(
    tmp_path: Path, duck: Any
) -> None:
    """Why the mapping stays for ever. If this begins to fail the engine has learned to say so."""
    place = Place(tmp_path)
    made = place.derive(share([put(place, 0, 10, with_ids=False)]))
    metadata = json.loads(json.dumps(made.metadata))
    del metadata["properties"]["schema.name-mapping.default"]
    location = Path(place.folder, "unmapped.metadata.json")
    location.write_text(json.dumps(metadata))
    assert scanned(duck, str(location), "count(*), count(payload)") == [(10, 0)]


def test_everything_that_a_table_names_is_below_its_location(tmp_path: Path) -> None:
    """Keys that are vended for a location reach nothing else: DuckDB asked the provider's own host for a manifest."""
    place = Place(tmp_path)
    made = place.derive(share([put(place, 0, 10)]))
    below = place.location + "/"
    assert made.metadata["location"] == place.location
    assert all(each["manifest-list"].startswith(below) for each in made.metadata["snapshots"])
    assert all(each.data_file.file_path.startswith(below) for each in entries_of(made))


def test_no_snapshot_says_what_was_appended_because_incremental_readers_would_read_it_twice(tmp_path: Path) -> None:
    """Entries that were ADDED in every snapshot gave a Spark stream 110,000 rows of 60,000."""
    place = Place(tmp_path)
    first = place.derive(share([put(place, 0, 10)], 1))
    objects = [put(place, 0, 10), put(place, 10, 20)]
    second = place.derive(share(objects, 2), before=first)
    assert [each["summary"]["operation"] for each in second.metadata["snapshots"]] == ["overwrite"] * 2
    assert {each.status.name for each in entries_of(second)} == {"EXISTING"}


def test_a_filter_on_offsets_or_times_opens_only_the_objects_that_have_them(tmp_path: Path, duck: Any) -> None:
    place = Place(tmp_path)
    made = place.derive(share([put(place, n, n + 10) for n in range(0, 50, 10)]))
    table = StaticTable.from_metadata(stored(place, made))
    assert len(list(table.scan("offset >= 12 and offset < 15").plan_files())) == 1
    assert len(list(table.scan("publish_time >= '2024-01-01T12:00:00.000041+00:00'").plan_files())) == 1
    Path(place.location, described(0, 10).object_id).unlink()  # DuckDB does not look at it
    assert scanned(duck, stored(place, made), "count(*)", 'WHERE "offset" >= 12 AND "offset" < 15') == [(3,)]


def test_metadata_names_files_that_exist_and_the_length_they_have(tmp_path: Path, duck: Any) -> None:
    """DuckDB's iceberg_snapshots() and Spark's table.snapshots open what metadata-location names."""
    place = Place(tmp_path)
    made = place.derive(share([put(place, 0, 10)]))
    found = duck.execute(f"SELECT snapshot_id FROM iceberg_snapshots('{stored(place, made)}')").fetchall()
    assert found == [(made.metadata["current-snapshot-id"],)]
    assert entries_of(made)  # asserts lengths
