"""Steps of the jobs on a few rows each: what goes in, what comes out."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import FloatType, IntegerType, LongType, StringType, StructType

from pydanube.errors import ConfigError
from pydanube.pipeline import steps
from pydanube.pipeline.lake import Lake
from pydanube.pipeline.run import reason
from pydanube.pipeline.settings import Settings, read_settings
from pydanube.pipeline.tables import widened

SCHEMA = (
    "topic string, offset long, publish_time timestamp, append_time timestamp, producer_name string, producer_id long, "
    "sequence long, epoch long, routing_key string, schema_id long, schema_version int, attributes map<string,string>, "
    "payload binary"
)
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


def test_columns_are_added_and_types_widened_but_never_changed() -> None:
    old = StructType().add("a", IntegerType()).add("b", FloatType())
    both = widened(old, StructType().add("a", LongType()).add("c", StringType()), "t")
    assert both.simpleString() == "struct<a:bigint,b:float,c:string>"
    assert widened(both, old, "t") == both
    with pytest.raises(ConfigError, match="add a column of another name"):
        widened(StructType().add("a", StringType()), old, "t")


def test_settings_that_cannot_be_meant_are_refused() -> None:
    good = {"service.url": "danube://h:1", "topic": "/default/orders", "target": "lake"}
    assert Lake.parse(good).name == "orders"
    assert Lake.parse(good).target == str(Path("lake").absolute()), "Spark may run in another directory"
    for wrong, said in (
        ({"target": None}, "the directory for the tables"),
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
    assert Settings(values, values).topics() == ("/default/b",)
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
