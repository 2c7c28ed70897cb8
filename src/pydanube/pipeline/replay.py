"""Job *replay*: a range of a topic again, all of it or what passes a filter, to another topic or to a file.

Into a topic it is exactly-once: the write has a name, and the same replay made again stores nothing twice. Messages
keep their time, producer, key and schema, and say in attributes where they come from. Into a file it replaces what an
earlier attempt left. `rows_per_second` bounds how fast messages enter the other topic.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pydanube.core.names import TopicName
from pydanube.errors import ConfigError
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import CONNECTION, TOPICS, JobSettings
from pydanube.spark.options import SourceOptions
from pydanube.spark.staging import MARK

KNOWN: Final = (
    *CONNECTION,
    *TOPICS,
    "name",
    "start",
    "end",
    "start_time",
    "end_time",
    "filter",
    "to_topic",
    "to_file",
    "file_format",
    "staging",
    "rows_per_second",
)


def chosen(messages: DataFrame, filter: str | None) -> DataFrame:
    """The messages to replay, in order. The filter is a SQL expression over the source's columns."""
    text = F.when(F.expr("is_valid_utf8(payload)"), F.col("payload").cast("string"))
    found = messages.withColumn("text", text) if filter else messages
    try:
        passed = found.where(filter) if filter else found
    except PySparkException as error:
        why = str(error).partition("\n")[0]
        raise ConfigError("filter", filter, f"a SQL expression over columns and `text`: {why}") from error
    # What a replay said before is replaced: a map has no key twice.
    others = F.map_filter("attributes", lambda name, _: ~name.isin("x-replayed-topic", "x-replayed-offset", MARK))
    place = (F.lit("x-replayed-topic"), F.col("topic"), F.lit("x-replayed-offset"), F.col("offset").cast("string"))
    marked = F.map_concat(others, F.create_map(*place))
    carried = ("publish_time", "producer_name", "routing_key", "schema_id", "schema_version")
    return passed.orderBy("topic", "offset").select("topic", "offset", *carried, marked.alias("attributes"), "payload")


def as_text(messages: DataFrame) -> DataFrame:
    """For JSON: the payload as text, or, where it is none, as base64 in a column of its own."""
    is_text = F.expr("is_valid_utf8(payload)")
    return messages.withColumns(
        {
            "payload": F.when(is_text, F.col("payload").cast("string")),
            "payload_base64": F.when(~is_text, F.base64("payload")),
        }
    )


def check(values: dict[str, Any]) -> tuple[JobSettings, dict[str, str]]:
    """The settings, checked without Spark, and the source's options. Raises ConfigError."""
    settings = JobSettings(values, KNOWN, "replay")
    topics = settings.topics()
    to_topic, to_file = settings.text("to_topic"), settings.place("to_file")
    if (to_topic is None) == (to_file is None):
        raise ConfigError("to_topic", to_topic, "either to_topic or to_file")
    if to_topic is not None and str(TopicName(to_topic)) in topics:
        raise ConfigError("to_topic", to_topic, "another topic: this one would be read and written at once")
    settings.one_of("file_format", "jsonl", ("jsonl", "parquet"))
    settings.number("rows_per_second")
    options = {**settings.connection(), "subscribe": ",".join(topics)}
    names = {
        "start": "startingOffsets",
        "end": "endingOffsets",
        "start_time": "startingTimestamp",
        "end_time": "endingTimestamp",
    }
    for name, option in names.items():
        value = values.get(name)
        if value is not None:
            options[option] = json.dumps(value) if isinstance(value, dict) else str(value)
    SourceOptions.parse(options, streaming=False)
    return settings, options


def run(spark: SparkSession, values: dict[str, Any], watch: QueryWatch) -> JobReport:
    settings, source = check(values)
    to_topic, to_file = settings.text("to_topic"), settings.place("to_file")
    reader = spark.read.format("danube").options(**source)
    frame = chosen(reader.load(), settings.text("filter"))
    watch.says("replaying")
    if to_file is not None:
        form = settings.one_of("file_format", "jsonl", ("jsonl", "parquet"))
        if form == "parquet":
            frame.write.mode("overwrite").parquet(to_file)
        else:
            as_text(frame).write.mode("overwrite").json(to_file)
        return JobReport("replay", {"to": to_file, "messages": _written(spark, form, to_file)})
    assert to_topic is not None
    name = settings.text("name") or hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
    options = {**settings.connection(), "topic": str(TopicName(to_topic)), "writeId": f"replay-{name[:40]}"}
    for setting, option in (("staging", "staging"), ("rows_per_second", "rowsPerSecond")):
        if setting in settings:
            options[option] = str(settings.text(setting))
    frame.drop("topic").write.format("danube").options(**options).mode("append").save()
    return JobReport("replay", {"to": to_topic, "name": name[:40]})


def _written(spark: SparkSession, form: str, path: str) -> int:
    return spark.read.parquet(path).count() if form == "parquet" else spark.read.text(path).count()
