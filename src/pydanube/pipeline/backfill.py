"""What a batch of a stream reads, from the objects, by Spark's own Parquet reader: no Python touches a row.

    {checkpoint}/offsets/{batch - 1} ─► first ┐
    {checkpoint}/offsets/{batch}     ─► end   ┴─► pieces ─► all in Parquet objects?  yes: these rows; no: the stream's

Spark writes down where a batch begins and ends before it runs it. The same two places determine the same messages,
with any reader, so the query's batches, their numbers and its checkpoint are what they were: history goes over into
the live end at an offset, and a batch that comes again may be read the other way.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from pydanube.errors import DanubeError
from pydanube.pipeline.copies import EpochGroup
from pydanube.pipeline.settings import local_path, scheme_of
from pydanube.spark.errors import OffsetsWrong
from pydanube.spark.fast import parquet_rows, why_not
from pydanube.spark.options import Everywhere, SourceOptions
from pydanube.spark.plan import Offsets, between, resolve
from pydanube.spark.reach import Reach

log = logging.getLogger(__name__)

OFFSET_LOG = "v1"


@dataclass(frozen=True, slots=True)
class HistoryRows:
    """The rows of a batch, and what they must be: how many of each topic, and the greatest epoch."""

    frame: DataFrame
    rows: Mapping[str, int]
    epochs: Mapping[str, int]

    def fits(self, groups: Collection[EpochGroup]) -> bool:
        counts: dict[str, int] = {}
        for each in groups:
            counts[each.topic] = counts.get(each.topic, 0) + each.rows
            if each.epoch is not None and each.epoch > self.epochs.get(each.topic, each.epoch):
                return False  # of a topic that was made anew under its name
        return counts == dict(self.rows)


def first_offsets(source: Mapping[str, str]) -> dict[str, int] | None:
    """Where a query that has no checkpoint is to begin, as offsets; None if it cannot be said now."""
    options = SourceOptions.parse(source, streaming=True)
    if not isinstance(options.starting, Everywhere):
        return None
    with suppress(DanubeError), Reach(options.connection) as reach:  # what is wrong, the query says itself
        return resolve(options.starting, reach.states(options.topics), {})
    return None


def history_rows(
    spark: SparkSession, source: Mapping[str, str], checkpoint: str, batch: int, begun: Mapping[str, int] | None
) -> HistoryRows | None:
    """None: the stream reads this batch. `begun` is where batch 0 begins, if that is known.

    A Spark Connect server counts what a stream reads, and its clients see nothing else of it: there the stream reads.
    """
    if getattr(spark, "_jvm", None) is None:
        return None
    options = SourceOptions.parse(source, streaming=True)
    try:
        start = _logged(spark, checkpoint, batch - 1) if batch else Offsets(next=begun) if begun is not None else None
        end = _logged(spark, checkpoint, batch)
        if start is None or end is None:
            return None
        with Reach(options.connection) as reach:
            states = reach.states(options.topics)
            pieces = between(states, start, end, fail_on_data_loss=options.fail_on_data_loss)
            why = why_not(spark, states, pieces)
    except (DanubeError, PySparkException, OSError) as error:
        why, pieces, end = str(error), [], None
    if end is None or why or not pieces:
        log.info("the stream reads a batch", extra={"batch": batch, "why": why or "there is nothing in it"})
        return None
    rows: dict[str, int] = {}
    for piece in pieces:
        rows[piece.topic] = rows.get(piece.topic, 0) + piece.rows
    epochs = {topic: mark.epoch for topic, mark in end.marks.items()}
    return HistoryRows(parquet_rows(spark, states, pieces, options.columns), rows, epochs)


def _logged(spark: SparkSession, checkpoint: str, batch: int) -> Offsets | None:
    """Where Spark's checkpoint says that a batch ends; None for a form that is not known here."""
    place = f"{checkpoint}/offsets/{batch}"
    if scheme_of(checkpoint) in ("", "file"):
        text = Path(local_path("checkpoint", place)).read_text()
    else:
        [row] = spark.read.option("wholetext", True).text(place).collect()
        text = str(row["value"])
    version, *lines = text.splitlines()
    if version != OFFSET_LOG or len(lines) != 2:  # the query's own line, and one source
        return None
    try:
        return Offsets.from_json(json.loads(lines[1]))
    except (OffsetsWrong, ValueError):
        return None
