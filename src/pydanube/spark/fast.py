"""History at the speed of Spark's own Parquet reader: no Python between the objects and the DataFrame."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from pydanube.core.history.object_keys import path_of
from pydanube.core.history.tiers import PARQUET
from pydanube.spark.errors import NotUploaded, StoreNotHere
from pydanube.spark.options import Everywhere, PerTopic, SourceOptions
from pydanube.spark.plan import Offsets, RangeSource, TopicState, advance, between, resolve
from pydanube.spark.reach import Reach
from pydanube.spark.rows import arrow_schema
from pydanube.stores.objects.settings import parse_url

log = logging.getLogger(__name__)

S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
HADOOP = {"s3": ("s3a", S3A), "gs": ("gs", "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem")}


def history(spark: SparkSession, topic: str, **options: Any) -> DataFrame:
    """See `pydanube.spark.history`.

    The rows are those of the objects that the topic has now: later uploads change nothing, and what is on a broker's
    disk only is not among them. Where Spark cannot read the store by itself (no s3a jar, an object that is not Parquet)
    the rows come through the Python source, and a warning says so.
    """
    given = {name.replace("_", "."): str(value) for name, value in options.items()}
    chosen = SourceOptions.parse({**given, "topic": topic}, streaming=False)
    with Reach(chosen.connection) as reach:
        states = [_uploaded(state, reach.not_here.get(state.topic)) for state in reach.states(chosen.topics)]
        start = Offsets(next=_places(reach, chosen.starting, states, ending=False))
        ends = _places(reach, chosen.ending, states, ending=True)
    upto = {name: max(end, start.next[name]) for name, end in ends.items()}
    fails = chosen.fail_on_data_loss
    advanced = advance(states, start, orphans=chosen.orphans, fail_on_data_loss=fails, upto=upto)
    for note in advanced.notes:
        log.warning(note)
    pieces = between(states, start, advanced.end, fail_on_data_loss=fails)
    why = why_not(spark, states, pieces)
    if why:
        log.warning("history comes through the Python source", extra={"topic": topic, "why": why})
        ended = {name: min(end, advanced.end.next[name]) for name, end in ends.items()}
        return _through_python(spark, chosen, given, dict(start.next), ended)
    return parquet_rows(spark, states, pieces, chosen.columns)


def parquet_rows(
    spark: SparkSession, states: Sequence[TopicState], pieces: Sequence[RangeSource], columns: Sequence[str]
) -> DataFrame:
    """The rows of pieces that `why_not` has nothing against."""
    urls = {state.topic: state.storage_url or "" for state in states}
    frames = [
        _frame(spark, name, urls[name], [piece for piece in pieces if piece.topic == name], columns)
        for name in sorted({piece.topic for piece in pieces})
    ]
    if not frames:
        return spark.createDataFrame([], from_arrow_schema(arrow_schema(columns)))
    return reduce(DataFrame.unionByName, frames)


def _uploaded(state: TopicState, not_here: str | None) -> TopicState:
    """The topic as if it had no broker. `not_here`: the directory of another machine that has its objects."""
    if not_here is not None and state.storage_url is None:
        raise StoreNotHere(state.topic, not_here)
    if state.storage_url is None:
        raise NotUploaded(state.topic, state.first_offset, state.head)
    head = state.objects[-1].end if state.objects else state.first_offset
    return TopicState(
        state.topic, state.first_offset, head, state.objects, state.orphans, state.voids, False, state.storage_url
    )


def _places(reach: Reach, place: Any, states: Sequence[TopicState], *, ending: bool) -> dict[str, int]:
    times = {}
    if not isinstance(place, Everywhere | PerTopic):
        times = reach.offsets_at({state.topic: place.of(state.topic) for state in states}, states)
    return resolve(place, states, times, ending=ending)


def why_not(spark: SparkSession, states: Sequence[TopicState], pieces: Sequence[RangeSource]) -> str:
    """Why Spark cannot read the pieces by itself; empty if it can."""
    if any(piece.described is None for piece in pieces):
        return "some of it is on a broker's disk only"
    if any(piece.described is not None and piece.described.format != PARQUET for piece in pieces):
        return "an object is stored raw"
    for scheme in {parse_url("storage.url", state.storage_url or "").scheme for state in states}:
        if scheme == "file":
            continue
        known = HADOOP.get(scheme)
        if known is None or not _has_class(spark, known[1]):
            return f"this Spark has no file system for {scheme}://"
    return ""


def _has_class(spark: SparkSession, name: str) -> bool:
    jvm: Any = getattr(spark, "_jvm", None)
    if jvm is None:
        return False
    try:
        jvm.java.lang.Class.forName(name, False, jvm.java.lang.Thread.currentThread().getContextClassLoader())
    except Exception as error:  # py4j's own class is not for us to import, and any failure means no
        log.debug("class not found", extra={"name": name, "why": type(error).__name__})
        return False
    return True


def _through_python(
    spark: SparkSession, chosen: SourceOptions, given: dict[str, str], start: dict[str, int], end: dict[str, int]
) -> DataFrame:
    import json

    options = {name: value for name, value in given.items() if not name.lower().startswith(("starting", "ending"))}
    return (
        spark.read.format("danube")
        .options(**options)
        .option("subscribe", ",".join(sorted(start)))
        .option("startingOffsets", json.dumps(start))
        .option("endingOffsets", json.dumps(end))
        .option("columns", ",".join(chosen.columns))
        .load()
    )


def _frame(
    spark: SparkSession, topic: str, url: str, pieces: Sequence[RangeSource], columns: Sequence[str]
) -> DataFrame:
    place = parse_url("storage.url", url)
    paths = []
    cut = False
    for piece in pieces:
        assert piece.described is not None
        key = f"{topic[1:]}/{piece.described.object_id}"
        if place.scheme == "file":
            paths.append(f"file://{place.root}/{path_of(key)}")
        else:
            paths.append(f"{HADOOP[place.scheme][0]}://{url.partition('://')[2].rstrip('/')}/{key}")
        cut = cut or (piece.first, piece.end) != (piece.described.start_offset, piece.described.end)
    # The schema is known: else Spark would read a footer to find one, and take an old object's for all.
    schema = from_arrow_schema(arrow_schema([name for name in columns if name != "topic"]))
    if "offset" not in columns:
        schema = schema.add("offset", "long")
    frame = spark.read.schema(schema).parquet(*paths)
    if cut:
        # Ranges, not objects, are what was asked for; neighbours count as one.
        ranges: list[tuple[int, int]] = []
        for piece in pieces:
            if ranges and ranges[-1][1] == piece.first:
                ranges[-1] = (ranges[-1][0], piece.end)
            else:
                ranges.append((piece.first, piece.end))
        conditions = [(F.col("offset") >= first) & (F.col("offset") < end) for first, end in ranges]
        frame = frame.where(reduce(lambda one, other: one | other, conditions))
    return frame.withColumn("topic", F.lit(topic)).select(*columns)
