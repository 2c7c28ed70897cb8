"""What jobs do to rows: functions from DataFrames to DataFrames. The last `select` of each is its promise.

None of them reads a clock, a file or a broker, collects, or keeps anything between batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StringType, StructField, StructType

from pydanube.formats.erasure import ERASED
from pydanube.pipeline.copies import EpochGroup, TimeSpan

# What the raw table keeps of a message: everything that the log knows.
RAW_COLUMNS: Final = (
    "topic",
    "offset",
    "publish_time",
    "append_time",
    "producer_name",
    "producer_id",
    "sequence",
    "epoch",
    "routing_key",
    "schema_id",
    "schema_version",
    "attributes",
    "payload",
)
# What a row of a typed table carries besides its values: where it came from.
ORIGIN: Final = ("_topic", "_offset", "_publish_time", "_append_time", "_key")
QUARANTINE_COLUMNS: Final = (*RAW_COLUMNS, "reason", "date")
ROWS_PER_TASK: Final = 50_000  # what is written by one task, and so one file: fewer are not worth another
DATES_AS_THEY_COME: Final = 2  # each task writes a file of each date
_BROKEN: Final = "__broken"
_END: Final = "__end"
_PARSED: Final = "__parsed"
_VALUE: Final = "__value"
_BAD: Final = "__bad"
OTHER_TYPE: Final = "a value does not have the type that the schema says"


def raw(messages: DataFrame) -> DataFrame:
    """Messages as they are, with the date (UTC) on which they were published."""
    return messages.select(*RAW_COLUMNS, F.to_date("publish_time").alias("date"))


def message_id() -> Column:
    """The same for two copies of one message, and for nothing else.

    After a crash takeover a message whose ack was lost may be in the log twice, under two offsets: sent again by its
    producer, unchanged. Every session counts from 0, so the number alone says little; with the moment at which it was
    first sent, and the payload, it does. A message that was sent without a session has only its offset.
    """
    sent = F.concat_ws("/", "topic", *_sent())
    place = F.concat_ws("@", "topic", F.col("offset").cast("string"))
    return F.when(F.col("sequence").isNull() | (F.col("producer_id") == 0), place).otherwise(sent)


def _sent() -> list[Column]:
    numbers = (F.col("producer_id"), F.col("sequence"), F.unix_micros("publish_time"), F.xxhash64("payload"))
    return [number.cast("string") for number in numbers]


def without_repetitions(rows: DataFrame) -> DataFrame:
    """One row per message: the copy with the smallest offset."""
    return _first_by(rows, [message_id()], ["offset"])


def unseen_messages(rows: DataFrame, table: DataFrame) -> DataFrame:
    """Rows of which the table has no copy, whatever its offset."""
    known = table.select(message_id().alias("__id"))
    return rows.withColumn("__id", message_id()).join(known, "__id", "left_anti").drop("__id")


def once_each(rows: DataFrame, spans: Mapping[str, TimeSpan], table: DataFrame | None) -> DataFrame:
    """Rows without copies of each other, and of rows of the table. Only rows in these spans may be copies."""
    if not spans:
        return rows
    may_be = in_spans(spans)
    fresh = without_repetitions(rows.where(may_be))
    if table is not None:
        fresh = unseen_messages(fresh, table.where(may_be))
    return rows.where(~may_be).unionByName(fresh)


def count_messages(rows: DataFrame, spans: Mapping[str, TimeSpan], table: DataFrame | None) -> int:
    """How many different messages the rows are, without those of which the table has a copy."""
    if not spans:
        return rows.count()
    may_be = in_spans(spans)
    ids = rows.where(may_be).select(message_id().alias("__id")).distinct()
    if table is not None:
        ids = ids.join(table.where(may_be).select(message_id().alias("__id")), "__id", "left_anti")
    return ids.count() + rows.where(~may_be).count()


def in_spans(spans: Mapping[str, TimeSpan]) -> Column:
    """Whether a message is of one of these topics and was published in its span."""
    found = F.lit(False)
    for topic, span in sorted(spans.items()):
        times = F.col("publish_time").between(*(F.timestamp_micros(F.lit(each)) for each in span))
        found = found | ((F.col("topic") == topic) & times)
    return F.coalesce(found, F.lit(False))


def epoch_groups(rows: DataFrame) -> list[EpochGroup]:
    """The rows counted, by topic, epoch and date. Collects a few rows."""
    numbered = F.col("sequence").isNotNull() & (F.col("producer_id") != 0)
    times = F.unix_micros(F.when(numbered, F.col("publish_time")))
    counted = rows.groupBy("topic", "epoch", "date").agg(F.count("*"), F.min(times), F.max(times))
    return [
        EpochGroup(topic, epoch, day, count, None if first is None else TimeSpan(first, last))
        for topic, epoch, day, count, first, last in counted.collect()
    ]


def count_keys(rows: DataFrame, table: DataFrame | None, keys: Sequence[str]) -> int:
    """How many different keys typed rows have, without those that the table has."""
    found = rows.select(*keys).distinct()
    return (found if table is None else unseen(found, table, keys)).count()


def _first_by(rows: DataFrame, keys: Sequence[Column], order: Sequence[str]) -> DataFrame:
    place = Window.partitionBy(*keys).orderBy(*order)
    ranked = rows.withColumn("__place", F.row_number().over(place))
    return ranked.where(F.col("__place") == 1).drop("__place")


def count_dates(rows: DataFrame) -> dict[date, int]:
    """How many rows each date has. Collects one row per date."""
    return {row["date"]: row["count"] for row in rows.groupBy("date").count().collect()}


def spread(rows: DataFrame, dates: Mapping[date, int], *, offset: str, tasks_max: int) -> DataFrame:
    """Rows divided among tasks for writing: a date is in as many as its rows are worth, and in no more.

    So a batch of one date is written by the whole cluster, as it was read, and one of a hundred dates does not become a
    hundred files per task. Rows of neighbouring offsets stay together. Nothing is random: a task that runs again has
    the same rows.
    """
    tasks = _tasks(sum(dates.values()), tasks_max)
    if len(dates) <= DATES_AS_THEY_COME or tasks == 1:
        return rows.coalesce(tasks)  # they were read by as many tasks, or more: no row has to travel
    first, places = 0, []
    for day, count in sorted(dates.items()):
        share = _tasks(count, tasks)
        places += [F.lit(day), F.struct(F.lit(first).alias("first"), F.lit(share).alias("share"))]
        first += share
    place = F.create_map(*places)[F.col("date")]
    block = F.floor(F.col(offset) / 1024)
    task = F.coalesce(F.pmod(place["first"] + F.pmod(block, place["share"]), F.lit(tasks)), F.lit(0)).cast("int")
    if hasattr(rows, "repartitionById"):
        return rows.repartitionById(tasks, task)
    return rows.repartition(tasks, task)  # Spark 4.0: by the number's hash, so two may fall together


def _tasks(rows: int, tasks_max: int) -> int:
    return max(1, min(tasks_max, -(-rows // ROWS_PER_TASK)))


def decoded(rows: DataFrame, schema: StructType, *, key: Sequence[str] = ()) -> DataFrame:
    """Raw rows with their JSON as `__value`, and `reason`: why it cannot be one; null if it can.

    Columns of the key must be there, as those that the schema says are not null: rows without them are not copies.
    """
    parsed = rows.withColumn("__text", text()).withColumn(_PARSED, in_a_list(F.col("__text"), schema))
    value = F.col(f"{_PARSED}.list")[0]
    reason = F.when(F.col("__text").isNull(), F.lit("the payload is not UTF-8"))
    reason = reason.when(~is_whole(F.col(_PARSED)), why_not_whole(F.col("__text")))
    reason = reason.when(value.isNull(), F.lit(OTHER_TYPE))
    for field in schema.fields:
        if not field.nullable or field.name in key:
            reason = reason.when(value[field.name].isNull(), F.lit(f"{field.name} is missing"))
    return parsed.withColumn(_VALUE, value).withColumn("reason", reason).drop("__text", _PARSED)


def text() -> Column:
    """The payload; null if it is no text."""
    return F.when(F.expr("is_valid_utf8(payload)"), F.col("payload").cast("string"))


def in_a_list(payload: Column, item: StructType) -> Column:
    """The payload parsed, once: `list` has its value and a mark behind it, `__broken` is null if all types fit.

    Spark's parsers stop behind the first value and do not say if more follows. In `{"list": [PAYLOAD, MARK]}` the mark
    is the second of two only if the payload is one value: what closes a bracket too many ends the list before it, and
    all else is no JSON. The mark is a hash of the payload, so that no payload brings its own.
    """
    item = StructType([*item.fields, StructField(_END, StringType())])
    whole = StructType([StructField("list", ArrayType(item)), StructField(_BROKEN, StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BROKEN, "allowNonNumericNumbers": "false"}
    listed = F.concat(F.lit('{"list": ['), payload, F.lit(f', {{"{_END}": "'), _mark(), F.lit('"}]}'))
    return F.from_json(listed, whole, options)


def _mark() -> Column:
    return F.xxhash64("payload").cast("string")


def is_whole(parsed: Column) -> Column:
    """Whether `in_a_list` found one value of the right types, or null."""
    found = parsed["list"]
    return parsed[_BROKEN].isNull() & F.size(found).eqNullSafe(2) & found[1][_END].eqNullSafe(_mark())


def why_not_whole(payload: Column) -> Column:
    """Of the few payloads that are not: parsed again, to say it in words."""
    begins_with_json = F.get_json_object(payload, "$").isNotNull()
    longer = F.when(begins_with_json, F.lit("the payload goes on behind its JSON")).otherwise("the payload is not JSON")
    return F.when(~_is_one_json_value(payload), longer).otherwise(OTHER_TYPE)


def _is_one_json_value(text: Column) -> Column:
    """Spark's parsers stop behind the first value, and do not say if more follows.

    In brackets, only what begins with a bracket follows unseen; in braces, only a brace or a comma. In both: nothing.
    """
    in_brackets = F.json_array_length(F.concat(F.lit("["), text, F.lit("]")))
    in_braces = F.json_object_keys(F.concat(F.lit('{"value":'), text, F.lit("}")))
    return in_brackets.eqNullSafe(1) & in_braces.isNotNull()


def typed(rows: DataFrame, schema: StructType, *, time: str | None = None, also: Sequence[str] = ()) -> DataFrame:
    """The good rows of `decoded`: the schema's columns, where each came from, its date, and columns that are there.

    The date is that of the column `time`, however late the row comes, or else of publishing.
    """
    moment = F.col(f"{_VALUE}.{time}") if time is not None else F.col("publish_time")
    return rows.where(F.col("reason").isNull()).select(
        *(F.col(f"{_VALUE}.{field.name}").alias(field.name) for field in schema.fields),
        F.col("topic").alias("_topic"),
        F.col("offset").alias("_offset"),
        F.col("publish_time").alias("_publish_time"),
        F.col("append_time").alias("_append_time"),
        F.col("routing_key").alias("_key"),
        F.coalesce(F.to_date(moment), F.to_date("publish_time")).alias("date"),
        *also,
    )


def slim(rows: DataFrame, also: Sequence[str] = ()) -> DataFrame:
    """`decoded` rows as they are kept in memory: of a good one its value and its origin, of a bad one all of it."""
    bad = F.when(F.col("reason").isNotNull(), F.struct(*QUARANTINE_COLUMNS))
    origin = ("topic", "offset", "publish_time", "append_time", "routing_key")
    return rows.select(*origin, _VALUE, "reason", bad.alias(_BAD), *also)


def quarantined(rows: DataFrame) -> DataFrame:
    """The others of `slim`, with the reason."""
    return rows.where(F.col("reason").isNotNull()).select(*(f"{_BAD}.{name}" for name in QUARANTINE_COLUMNS))


def first_by_key(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """One row per business key: the first that a broker appended. Typed rows in, typed rows out.

    In one topic that is the order of offsets. Offsets of several topics, or partitions, do not compare: there the
    brokers' clocks decide, and of the same moment the smaller name.
    """
    return _first_by(rows, [F.col(name) for name in keys], ["_append_time", "_topic", "_offset"])


def unseen(rows: DataFrame, table: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Rows whose key is not in the table yet."""
    known = table.select(*(F.col(name).alias(f"__{name}") for name in keys)).distinct()
    same = [rows[name].eqNullSafe(known[f"__{name}"]) for name in keys]
    condition = same[0]
    for each in same[1:]:
        condition = condition & each
    return rows.join(known, condition, "left_anti")


# --- stats ---------------------------------------------------------------------------------------------------


def hourly(messages: DataFrame) -> DataFrame:
    """Per topic and hour: messages, bytes, keys, and how long messages took from their producer to the log."""
    latency = (F.unix_micros("append_time") - F.unix_micros("publish_time")) / 1000.0
    return (
        messages.withColumn("hour", F.date_trunc("hour", "publish_time"))
        .withColumn("latency_ms", latency)
        .groupBy("topic", "hour")
        .agg(
            F.count("*").alias("messages"),
            F.sum(F.length("payload")).alias("bytes"),
            F.approx_count_distinct("routing_key").alias("keys"),
            F.percentile_approx("latency_ms", [0.5, 0.95, 0.99]).alias("latency"),
        )
        .select(
            "topic",
            "hour",
            "messages",
            "bytes",
            "keys",
            F.col("latency")[0].alias("latency_p50_ms"),
            F.col("latency")[1].alias("latency_p95_ms"),
            F.col("latency")[2].alias("latency_p99_ms"),
        )
    )


def top_keys(messages: DataFrame, count: int) -> DataFrame:
    """The keys with the most messages, per topic."""
    totals = messages.where(F.col("routing_key").isNotNull()).groupBy("topic", "routing_key")
    counted = totals.agg(F.count("*").alias("messages"), F.sum(F.length("payload")).alias("bytes"))
    place = Window.partitionBy("topic").orderBy(F.desc("messages"), "routing_key")
    ranked = counted.withColumn("rank", F.row_number().over(place)).where(F.col("rank") <= count)
    return ranked.select("topic", "rank", "routing_key", "messages", "bytes")


# --- audit ---------------------------------------------------------------------------------------------------


def repeated(messages: DataFrame) -> DataFrame:
    """Messages that are in the log more than once, under several offsets. See `message_id`."""
    numbered = messages.where(F.col("sequence").isNotNull() & (F.col("producer_id") != 0))
    offsets = F.sort_array(F.collect_list("offset")).alias("offsets")
    found = (
        numbered.withColumn("__id", message_id())
        .groupBy("topic", "producer_id", "sequence", "__id")
        .agg(F.count("*").alias("copies"), offsets)
    )
    return found.where(F.col("copies") > 1).select("topic", "producer_id", "sequence", "copies", "offsets")


def missing_receipts(receipts: DataFrame, messages: DataFrame) -> DataFrame:
    """Receipts whose offset is not in the log exactly once, or holds another payload, if the receipt says which.

    An erased message has no payload to compare: its offset is there, and says so.
    """
    stored = messages.select("topic", "offset", F.sha2("payload", 256).alias("stored"), is_erased().alias("erased"))
    joined = receipts.join(stored, ["topic", "offset"], "left")
    counted = joined.groupBy("topic", "offset", "sha256").agg(
        F.count("stored").alias("copies"), F.first("stored").alias("stored"), F.first("erased").alias("erased")
    )
    differs = F.col("sha256").isNotNull() & (F.col("sha256") != F.col("stored")) & ~F.col("erased")
    wrong = (F.col("copies") != 1) | differs
    return counted.where(wrong).select("topic", "offset", "copies", "sha256", "stored")


def is_erased() -> Column:
    """Whether a message was erased (`erase`): nothing of it is left but its place."""
    return F.map_contains_key("attributes", F.lit(ERASED)) & (F.length("payload") == 0) & F.col("routing_key").isNull()
