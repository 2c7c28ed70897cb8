"""Steps of the jobs on a few rows each: what goes in, what comes out."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DateType, FloatType, IntegerType, LongType, StringType, StructType

from pydanube.core.history.tiers import PARQUET, Descriptor
from pydanube.errors import ConfigError
from pydanube.pipeline import audit, replay, steps
from pydanube.pipeline.audit import falling_epochs
from pydanube.pipeline.compact import groups
from pydanube.pipeline.iceberg import QUERY, IcebergTable
from pydanube.pipeline.lake import Lake
from pydanube.pipeline.run import reason
from pydanube.pipeline.settings import JobSettings, read_settings
from pydanube.pipeline.table_files import LocalFiles
from pydanube.pipeline.tables import OlderCheckpoint, OtherCheckpoint, ParquetTable, widened
from pydanube.spark.plan import RangeSource

SCHEMA = (
    "topic string, offset long, publish_time timestamp, append_time timestamp, producer_name string, producer_id long, "
    "sequence long, epoch long, routing_key string, schema_id long, schema_version int, attributes map<string,string>, "
    "payload binary"
)
DAY = date(2026, 11, 15)
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def message(
    offset: int, payload: bytes, *, producer: int = 7, sequence: int | None = None, **more: Any
) -> tuple[Any, ...]:
    row = {
        "topic": "/default/t", "offset": offset, "publish_time": NOON, "append_time": NOON, "producer_name": "p",
        "producer_id": producer, "sequence": sequence, "epoch": 1, "routing_key": None, "schema_id": None,
        "schema_version": None, "attributes": {}, "payload": payload, **more,
    }  # fmt: skip
    return tuple(row.values())


def messages(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame(list(rows), SCHEMA)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_copies_of_one_message_are_one_row(spark: SparkSession) -> None:
    rows = messages(
        spark,
        message(0, b"a", sequence=0),
        message(5, b"a", sequence=0),  # sent again, unchanged
        message(
            6, b"a", sequence=0, publish_time=datetime(2026, 11, 15, 13, tzinfo=UTC)
        ),  # a new session of the producer
        message(7, b"b", sequence=0),
        message(8, b"a", sequence=0, producer=8),
        message(9, b"a", sequence=None, producer=0),  # sent without a session: each is a message
        message(10, b"a", sequence=None, producer=0),
    )
    kept = steps.without_repetitions(steps.raw(rows)).select("offset").collect()
    assert sorted(row[0] for row in kept) == [0, 6, 7, 8, 9, 10]
    fresh = steps.unseen_messages(steps.raw(rows), steps.raw(rows).where("offset in (0, 9)")).select("offset").collect()
    assert sorted(row[0] for row in fresh) == [6, 7, 8, 10]
    with pytest.raises(ConfigError, match="columns as in SQL"):
        Lake.parse({"service.url": "danube://h:1", "topic": "/default/t", "target": "lake", "schema": "id strin"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_of_a_key_is_the_one_that_was_appended_first_in_whatever_topic(spark: SparkSession) -> None:
    schema = StructType().add("id", StringType())
    later = datetime(2026, 11, 15, 13, tzinfo=UTC)
    rows = messages(
        spark,
        message(3, b'{"id": "a"}', topic="/default/t-part-0", append_time=later),
        message(9, b'{"id": "a"}', topic="/default/t-part-1"),  # a larger offset, and an earlier moment
        message(8, b'{"id": "b"}', topic="/default/t-part-1"),
        message(
            7, b'{"id": "b"}', topic="/default/t-part-1", publish_time=later
        ),  # the producer's clock does not count
        message(5, b'{"id": "c"}', topic="/default/t-part-1"),
        message(6, b'{"id": "c"}', topic="/default/t-part-0"),
    )
    typed = steps.typed(steps.decoded(steps.raw(rows), schema), schema)
    found = steps.first_by_key(typed, ["id"]).orderBy("id").select("id", "_topic", "_offset").collect()
    expected = [("a", "/default/t-part-1", 9), ("b", "/default/t-part-1", 7), ("c", "/default/t-part-0", 6)]
    assert [tuple(row) for row in found] == expected


def plan_of(frame: DataFrame) -> str:
    query: Any = frame._jdf  # type: ignore[operator]
    return str(query.queryExecution().executedPlan())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_batch_of_one_date_is_written_by_many_tasks_and_a_small_date_by_one(spark: SparkSession) -> None:
    rows = spark.range(200_000).selectExpr(
        "id as offset", "if(id % 1000 < 2, date_sub(date'2026-11-14', int(id % 2)), date'2026-11-15') as date"
    )
    dates = steps.count_dates(rows)
    divided = steps.spread(rows, dates, offset="offset", tasks_max=3)
    found = divided.groupBy(F.spark_partition_id().alias("task"), "date").count().collect()
    large = sorted(row["count"] for row in found if row["date"].day == 15)
    assert len(large) == 3 and large[0] > 60_000 and sum(large) == 199_600
    assert [row["count"] for row in found if row["date"].day == 14] == [200]
    assert steps.spread(rows, {DAY: 10}, offset="offset", tasks_max=3).rdd.getNumPartitions() == 1
    as_it_comes = steps.spread(rows, {DAY: 200_000}, offset="offset", tasks_max=3)
    assert as_it_comes.rdd.getNumPartitions() == 2 and "Exchange" not in plan_of(as_it_comes), "no row travels"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_that_is_not_one_json_value_with_its_key_has_a_reason(spark: SparkSession) -> None:
    good = [b'{"id": "a"}', b' {"id": "b", "n": 1}\r\n', b'{"id": "c", "n": null}']
    without_key = [b'{"n": 1}', b'{"n": 2}', b'{"id": null}']
    longer = [
        b'{"id": "a"} {"id": "b"}',
        b'{"id": "a"} garbage',
        b'{"id": "a"}] garbage',
        b'{"id": "a"}} garbage',
        b'{"id": "a"}, {"id": "b"}',
        b'{"id": "a"}, "n": 1',
        b'{"id": "a"}\0',
    ]
    broken = [b"", b" ", b'{"id": "a"', b"{id: 1}"]
    not_an_object = [b"null", b"1", b'[{"id": "a"}]']
    payloads = [*good, *without_key, *longer, *broken, *not_an_object]
    rows = messages(spark, *(message(number, payload) for number, payload in enumerate(payloads)))
    expected = {
        **dict.fromkeys(good),
        **dict.fromkeys(without_key, "id is missing"),
        **dict.fromkeys(longer, "the payload goes on behind its JSON"),
        **dict.fromkeys(broken, "the payload is not JSON"),
        **dict.fromkeys(not_an_object, "a value does not have the type that the schema says"),
    }
    for nullable, key in ((True, ["id"]), (False, [])):  # both say that it must be there
        schema = StructType().add("id", StringType(), nullable).add("n", LongType())
        decoded = steps.decoded(steps.raw(rows), schema, key=key).select("payload", "reason")
        assert {bytes(row["payload"]): row["reason"] for row in decoded.collect()} == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_lines_of_json_a_payload_that_is_no_text_is_not_lost(spark: SparkSession) -> None:
    texts = replay.as_text(messages(spark, message(0, "ä".encode()), message(1, b"\xff\x00"))).orderBy("offset")
    assert [tuple(row) for row in texts.select("payload", "payload_base64").collect()] == [("ä", None), (None, "/wA=")]


def test_columns_are_added_and_types_widened_but_never_changed() -> None:
    old = StructType().add("a", IntegerType()).add("b", FloatType())
    both = widened(old, StructType().add("a", LongType()).add("c", StringType()), "t")
    assert both.simpleString() == "struct<a:bigint,b:float,c:string>"
    assert widened(both, old, "t") == both
    with pytest.raises(ConfigError, match="add a column of another name"):
        widened(StructType().add("a", StringType()), old, "t")


def iceberg(directory: Path) -> IcebergTable:
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("t", type="sql", uri=f"sqlite:///{directory}/c.sqlite", warehouse=f"file://{directory}")
    table = IcebergTable(Mock(), catalog, "danube.t", job="lake-t")
    table.evolve(StructType().add("a", IntegerType()).add("date", DateType()))
    return table


def test_an_iceberg_table_says_which_column_cannot_become_what_is_asked_for(tmp_path: Path) -> None:
    table = iceberg(tmp_path)
    table.evolve(StructType().add("a", LongType()).add("b", StringType()))
    with pytest.raises(ConfigError, match=r"a string.* in danube.t .* add a column of another name") as caught:
        table.evolve(StructType().add("c", LongType()).add("a", StringType()))
    assert caught.value.value == "a string"
    assert iceberg(tmp_path).schema().simpleString() == "struct<a:bigint,date:date,b:string>"


@pytest.mark.parametrize("form", ["parquet", "iceberg"])
def test_a_table_goes_on_with_the_checkpoint_that_wrote_it_and_with_no_other(tmp_path: Path, form: str) -> None:
    def opened() -> ParquetTable | IcebergTable:
        return ParquetTable(LocalFiles(Mock(), str(tmp_path / "t"))) if form == "parquet" else iceberg(tmp_path)

    def add(batch: int) -> None:
        """As `write` does, without Spark."""
        table = opened()
        if isinstance(table, ParquetTable):
            Path(table.path, f"batch={batch:012}").mkdir(parents=True)
        else:
            said = {"danube.job": "lake-t", "danube.batch": str(batch)}
            table._table.append(table._table.scan().to_arrow(), snapshot_properties=said)

    def forget() -> None:
        """As the version before left it."""
        table = opened()
        if isinstance(table, ParquetTable):
            Path(table.path, "_query").unlink(missing_ok=True)
        else:
            with table._table.transaction() as change:
                change.remove_properties(QUERY)

    opened().claim("query-0", 0)
    opened().claim("query-1", 0)  # there was nothing yet
    for batch in range(3):
        add(batch)
    with pytest.raises(OlderCheckpoint, match="has batches up to 2, and the checkpoint goes on with 1: it is an older"):
        opened().claim("query-1", 1)
    for batch in (2, 3):
        opened().claim("query-1", batch)
        with pytest.raises(
            OtherCheckpoint, match=r"\(query query-1\) than this one \(query query-2\).*nothing was written"
        ):
            opened().claim("query-2", batch)
    for batch in (2, 3):
        forget()
        opened().claim("query-3", batch)
        with pytest.raises(OtherCheckpoint):
            opened().claim("query-4", batch)
    forget()
    with pytest.raises(OtherCheckpoint, match="another checkpoint than this one"):
        opened().claim("query-3", 1)


def test_settings_that_cannot_be_meant_are_refused() -> None:
    good = {"service.url": "danube://h:1", "topic": "/default/orders", "target": "lake"}
    assert Lake.parse(good).name == "orders"
    assert Lake.parse(good).target == str(Path("lake").absolute()), "Spark may run in another directory"
    for wrong, said in (
        ({"target": None}, "where the tables are to be"),
        ({"topik": "x"}, "did you mean topic"),
        ({"key": ["id"]}, "a column of the schema"),
        ({"format": "csv"}, "parquet or iceberg"),
        ({"batch_rows": 0}, "a whole number"),
        ({"service.url": None}, "storage.url"),
    ):
        with pytest.raises(ConfigError) as caught:
            Lake.parse({**good, **wrong})
        assert said in str(caught.value)


def test_a_file_and_the_command_line_make_settings(tmp_path: Any) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("service: {url: 'danube://h:1'}\ntopic: /default/a\ncatalog: {type: sql}\n")
    values = read_settings(file, ["topic=/default/b", "batch_rows=5"])
    assert values == {
        "service.url": "danube://h:1",
        "topic": "/default/b",
        "catalog": {"type": "sql"},
        "batch_rows": 5,
    }
    assert JobSettings(values, values).topics() == ("/default/b",)
    with pytest.raises(ConfigError, match="name=value"):
        read_settings(None, ["topic"])


def test_of_a_page_of_traces_people_see_our_sentence() -> None:
    lines = (
        "[STREAM_FAILED] Query terminated",
        "Traceback",
        "pydanube.spark.errors.MessagesLost: offsets 0 to 9",
        " at x",
    )
    page = "\n".join(lines)
    assert reason(page) == "offsets 0 to 9"
    assert reason("[X] one line") == "[X] one line"


# --- what needs no Spark --------------------------------------------------------------------------------------


def described(first: int, end: int, *, size: int = 1000, form: str = PARQUET) -> Descriptor:
    return Descriptor(
        start_offset=first, end_offset=end - 1, object_id=f"data-{first}", size=size, etag="", min_publish_time=0,
        max_publish_time=0, epoch=1, created_at=0, max_append_time=0, footer_crc=0, format=form,
    )  # fmt: skip


def test_objects_are_compacted_in_groups_that_one_transaction_can_swap() -> None:
    many = [described(first, first + 10) for first in range(0, 2500, 10)]
    found = groups(many, 1 << 30)
    assert [len(group) for group in found] == [100, 100, 50], "with the new one, and what is asked before: below 128"
    assert [each for group in found for each in group] == many


def test_a_group_has_neighbours_only_and_is_no_larger_than_asked_for() -> None:
    objects = [described(0, 10), described(10, 20), described(25, 30), described(30, 40, size=9000), described(40, 50)]
    assert [[each.start_offset for each in group] for group in groups(objects, 2000)] == [[0, 10]]
    small = [described(first, first + 1) for first in range(5)]
    assert [len(group) for group in groups(small, 2000)] == [2, 2]
    assert groups([described(0, 1), described(1, 2, form="raw"), described(2, 3)], 2000) == []


def test_an_epoch_that_comes_back_is_named() -> None:
    good = [(0, 1, 1, "a"), (10, 1, 3, "b"), (20, 3, 3, "c")]
    assert falling_epochs(good) == []
    assert falling_epochs([*good, (30, 2, 4, "d")]) == ["d begins in epoch 2, behind epoch 3 in c"]


class Rows:
    """Stands for what is read of a piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *batches: tuple[list[int], list[int]]) -> None:
        schema = pa.schema([("offset", pa.int64()), ("epoch", pa.int64())])
        made = [pa.record_batch(list(columns), schema=schema) for columns in batches]
        monkeypatch.setattr(audit, "read_share", lambda *asked: iter(made))

    def checked(self, first: int, end: int) -> dict[str, Any]:
        return audit.check_piece(Mock(), RangeSource("/default/t", first, end, described(first, end)), None)


def test_every_offset_and_epoch_of_a_piece_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Rows(monkeypatch, ([3, 4], [1, 1]), ([], []), ([5], [2])).checked(3, 6)
    assert (found["problem"], found["rows"], found["epoch_first"], found["epoch_last"]) == (None, 3, 1, 2)
    for batches, problem in (
        ([([3, 5], [1, 1])], "offset 5 stands where 4 must be"),
        ([([3, 4], [1, 1]), ([4], [1])], "offset 4 stands where 5 must be"),
        ([([3, 4], [2, 2]), ([5], [1])], "offset 5 is of epoch 1, behind epoch 2"),
        ([([3, 4, 5], [1, 2, 1])], "offset 5 is of epoch 1, behind epoch 2"),
        ([([3, 4], [1, 1])], "offsets 5 to 5 are missing"),
    ):
        assert Rows(monkeypatch, *batches).checked(3, 6)["problem"] == problem
