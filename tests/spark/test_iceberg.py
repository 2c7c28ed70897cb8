"""Commits to an Iceberg table, without Spark: beside other writers, beside expiry, and however many there were."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import DateType, LongType, StructType

from pydanube.pipeline.iceberg import EXPIRED_MIN, MAINTENANCE, SNAPSHOT_AGE, SNAPSHOTS_MIN, IcebergTable
from pydanube.pipeline.partitions import BY_DATE, TableLayout
from pydanube.pipeline.table_files import files_in
from pydanube.pipeline.tables import OlderCheckpoint
from pydanube.pipeline.task_files import WrittenFile

DAY = date(2026, 11, 15)
MERGED = "commit.manifest.min-count-to-merge"


class ArrowData:
    """Writes and reads as Spark does: `rows` are numbers."""

    def write(self, rows: Any, place: str, rows_per_file: int, layout: TableLayout = BY_DATE) -> list[WrittenFile]:
        divided = Path(place) / f"__date={DAY}"
        divided.mkdir(parents=True)
        made = pa.table({"n": pa.array(rows, pa.int64()), "date": pa.array([DAY] * len(rows), pa.date32())})
        pq.write_table(made, divided / "part-0.parquet")
        return self.written(place)

    def written(self, place: str) -> list[WrittenFile]:
        return files_in(place)

    def read(self, files: list[str], schema: StructType) -> Any:
        return sorted(n for file in files for n in pq.read_table(file).column("n").to_pylist())


def opened(directory: Path) -> IcebergTable:
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("danube", type="sql", uri=f"sqlite:///{directory}/c.sqlite", warehouse=f"file://{directory}")
    table = IcebergTable(Mock(), catalog, "danube.t", job="lake-t")
    table.evolve(StructType().add("n", LongType()).add("date", DateType()))
    table._files = ArrowData()
    return table


def add(table: IcebergTable, batch: int, first: int, count: int = 10) -> int:
    rows: Any = range(first, first + count)
    return table.write(rows, batch)


def numbers(directory: Path) -> list[int]:
    return sorted(opened(directory)._table.scan().to_arrow().column("n").to_pylist())


def test_a_batch_that_comes_again_is_known_after_a_delete_by_somebody_else_and_an_expiry(tmp_path: Path) -> None:
    add(opened(tmp_path), 0, 0, 3000)
    table = opened(tmp_path)._table
    table.delete("n = 7")
    newest = table.refresh().current_snapshot()
    others = [each.snapshot_id for each in table.snapshots() if each.snapshot_id != newest.snapshot_id]
    table.maintenance.expire_snapshots().by_ids(others).commit()
    assert add(opened(tmp_path), 0, 0, 3000) == 3000
    assert len(numbers(tmp_path)) == 2999


def test_a_driver_that_wakes_up_beside_its_successor_adds_nothing(tmp_path: Path) -> None:
    asleep, successor = opened(tmp_path), opened(tmp_path)
    add(successor, 0, 0)
    asleep._table.refresh()

    class Overtaken(ArrowData):
        def write(self, rows: Any, place: str, rows_per_file: int, layout: TableLayout = BY_DATE) -> list[WrittenFile]:
            found = super().write(rows, place, rows_per_file, layout)
            for batch in batches:
                add(successor, batch, batch * 10)
            return found

    asleep._files = Overtaken()
    batches = [1]
    assert add(asleep, 1, 10) == 10
    batches = [2, 3]
    with pytest.raises(OlderCheckpoint, match="has batches up to 3, and the checkpoint goes on with 2"):
        add(asleep, 2, 20)
    assert numbers(tmp_path) == list(range(40))


def test_a_batch_that_another_writer_overtakes_is_added_behind_it(tmp_path: Path) -> None:
    table, other = opened(tmp_path), opened(tmp_path)._table

    class Overtaken(ArrowData):
        def write(self, rows: Any, place: str, rows_per_file: int, layout: TableLayout = BY_DATE) -> list[WrittenFile]:
            made = pa.table({"n": pa.array([1000], pa.int64()), "date": pa.array([DAY], pa.date32())})
            other.append(made)
            return super().write(rows, place, rows_per_file, layout)

    table._files = Overtaken()
    assert add(table, 0, 0) == 10
    assert numbers(tmp_path) == [*range(10), 1000]


def test_a_commit_costs_the_same_however_many_there_were(tmp_path: Path) -> None:
    table = opened(tmp_path)
    with table._table.transaction() as change:
        change.set_properties({SNAPSHOT_AGE: "0", SNAPSHOTS_MIN: "2", MERGED: "4"})

    def measured() -> tuple[int, int, int, int]:
        """Snapshots, manifests and bytes that a commit writes or reads, and files of metadata that are left."""
        metadata = Path(table._table.location().removeprefix("file://")) / "metadata"
        newest = Path(table._table.metadata_location.removeprefix("file://"))
        manifests = table._table.current_snapshot().manifests(table._table.io)
        return len(table._table.snapshots()), len(manifests), newest.stat().st_size, len(list(metadata.iterdir()))

    seen = []
    for batch in range(60):
        add(table, batch, batch * 10)
        seen.append(measured())
    early, late = seen[20:40], seen[40:]
    for number, limit in enumerate((2 + EXPIRED_MIN, 4)):
        assert max(each[number] for each in seen) <= limit
    for number in (2, 3):
        assert max(each[number] for each in late) <= 1.1 * max(each[number] for each in early)
    assert numbers(tmp_path) == list(range(600))
    assert add(table, 59, 590) == 10 and len(numbers(tmp_path)) == 600


def test_what_a_tag_names_does_not_expire(tmp_path: Path) -> None:
    table = opened(tmp_path)
    with table._table.transaction() as change:
        change.set_properties({SNAPSHOT_AGE: "0", SNAPSHOTS_MIN: "1"})
    add(table, 0, 0)
    with table._table.manage_snapshots() as manage:
        manage.create_tag(table._table.current_snapshot().snapshot_id, "first")
    for batch in range(1, 20):
        add(table, batch, batch * 10)
    assert len(table._table.snapshots()) < 19, "the others did"
    tagged = opened(tmp_path)._table
    found = tagged.scan(snapshot_id=tagged.snapshot_by_name("first").snapshot_id).to_arrow()
    assert found.num_rows == 10 and len(numbers(tmp_path)) == 200


def test_a_table_of_an_earlier_version_gets_what_keeps_commits_small_unless_somebody_has_said_otherwise(
    tmp_path: Path,
) -> None:
    table = opened(tmp_path)._table
    with table.transaction() as change:
        change.remove_properties(*MAINTENANCE)
        change.set_properties({SNAPSHOT_AGE: "5"})
    properties = opened(tmp_path)._table.properties
    assert {name: properties[name] for name in MAINTENANCE} == {**MAINTENANCE, SNAPSHOT_AGE: "5"}
