"""Job *audit*: proves a topic, or says what is wrong with it. A report for people, an exit code for scripts.

    descriptors   in order, no overlap, every offset of [first, head) in an object, a void, an orphan or the log
    objects       checksums of every row group, offsets as the footer says, epochs that never fall
    messages      none twice (same producer, sequence and payload)
    receipts      every acknowledged offset in a given file is there exactly once, with the payload it had

Objects are read by executors, each by one task; nothing is collected but what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pydanube.errors import DanubeError
from pydanube.pipeline import steps
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import CONNECTION, TOPICS, JobSettings
from pydanube.spark.options import BrokerOptions, QueryOptions
from pydanube.spark.plan import RangeSource, TaskShare, TopicState, layout
from pydanube.spark.reach import Reach
from pydanube.spark.rows import Wanted, read_share

KNOWN: Final = (*CONNECTION, *TOPICS, "receipts", "problems_max")
COLUMNS: Final = ("offset", "epoch", "payload")
FOUND: Final = (
    "topic string, object string, first long, end long, rows long, epoch_first long, epoch_last long, problem string"
)


def uncovered(state: TopicState) -> list[str]:
    """Offsets that no object has, as far as descriptors tell; what is left to a broker is read by `check_pieces`."""
    taken = layout(state, state.first_offset, state.head)
    found = [f"offsets {first} to {end - 1} are an orphan: their broker is away" for first, end in taken.orphans]
    return found + [f"offsets {first} to {end - 1} are in no object" for first, end in taken.missing]


def falling_epochs(objects: Sequence[tuple[int, int, int, str]]) -> list[str]:
    """Objects (first offset, first epoch, last epoch, name) in order: an epoch never comes back."""
    found = []
    highest, where = -1, ""
    for _, epoch_first, epoch_last, name in sorted(objects):
        if epoch_first < highest:
            found.append(f"{name} begins in epoch {epoch_first}, behind epoch {highest} in {where}")
        if epoch_last >= highest:
            highest, where = epoch_last, name
    return found


def check_piece(reach: Reach, piece: RangeSource, url: str | None) -> dict[str, Any]:
    """Reads every row of a piece. What is wrong is told, never raised."""
    name = piece.described.object_id if piece.described else "the broker's log"
    found: dict[str, Any] = {
        "topic": piece.topic, "object": name, "first": piece.first, "end": piece.end, "rows": 0,
        "epoch_first": None, "epoch_last": None, "problem": None,
    }  # fmt: skip
    wanted = Wanted(COLUMNS, urls={piece.topic: url or ""})
    at, epoch = piece.first, -1
    try:
        for batch in read_share(reach, TaskShare((piece,)), wanted):
            offsets, epochs = batch.column("offset").to_numpy(), batch.column("epoch").to_numpy()
            count = len(offsets)
            if not count:
                continue
            for row in np.flatnonzero(offsets != np.arange(at, at + count))[:1]:
                found["problem"] = f"offset {offsets[row]} stands where {at + row} must be"
                return found
            before = np.concatenate(([epoch], epochs[:-1]))
            for row in np.flatnonzero(epochs < before)[:1]:
                found["problem"] = f"offset {offsets[row]} is of epoch {epochs[row]}, behind epoch {before[row]}"
                return found
            if found["epoch_first"] is None:
                found["epoch_first"] = int(epochs[0])
            at, epoch = at + count, int(epochs[-1])
            found["rows"] += count
    except DanubeError as error:
        found["problem"] = str(error)
        return found
    found["epoch_last"] = epoch if epoch >= 0 else None
    if at != piece.end:
        found["problem"] = f"offsets {at} to {piece.end - 1} are missing"
    return found


def run(spark: SparkSession, values: dict[str, Any], watch: QueryWatch) -> JobReport:
    settings = JobSettings(values, KNOWN, "audit")
    topics = settings.topics()
    options = settings.connection()
    connection = BrokerOptions.of(QueryOptions(options, CONNECTION))
    problems_max = settings.number("problems_max", 100) or 100
    report = JobReport("audit")
    with Reach(connection) as reach:
        states, broken = _states(reach, topics)
    report.problems += broken
    if not states:
        return report
    pieces: list[tuple[RangeSource, str | None]] = []
    for state in states:
        report.problems += [f"{state.topic}: {problem}" for problem in uncovered(state)]
        pieces += [(piece, state.storage_url) for piece in layout(state, state.first_offset, state.head).pieces]
    watch.says(f"reading {len(pieces)} objects and ranges", 0, len(pieces))
    found = _check(spark, connection, pieces)
    for row in found:
        if row["problem"] is not None:
            report.problems.append(f"{row['topic']}: {row['object']}: {row['problem']}")
    for state in states:
        in_order = [
            (row["first"], row["epoch_first"], row["epoch_last"], row["object"])
            for row in found
            if row["topic"] == state.topic and row["problem"] is None and row["epoch_last"] is not None
        ]
        report.problems += [f"{state.topic}: {problem}" for problem in falling_epochs(in_order)]
    report.values = {
        "topics": len(states),
        "objects": sum(1 for piece, _ in pieces if piece.described is not None),
        "messages": sum(row["rows"] for row in found),
        "voids": sum(end - first for state in states for first, end in state.voids),
    }
    if all(row["problem"] is None for row in found):
        _check_messages(spark, options, topics, settings.place("receipts"), report, problems_max, watch)
    return report


def _states(reach: Reach, topics: Sequence[str]) -> tuple[list[TopicState], list[str]]:
    found: list[TopicState] = []
    broken: list[str] = []
    for topic in topics:
        try:
            found += reach.states([topic])
        except DanubeError as error:
            broken.append(str(error))
    return found, broken


def _check(
    spark: SparkSession, connection: BrokerOptions, pieces: Sequence[tuple[RangeSource, str | None]]
) -> list[Any]:
    """Every piece by a task of its own; one row for each comes back."""
    if not pieces:
        return []
    numbered = list(pieces)

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Reach(connection) as reach:
            for batch in batches:
                rows = [check_piece(reach, *numbered[number]) for number in batch.column("id").to_pylist()]
                if rows:
                    yield pa.RecordBatch.from_pylist(rows, schema=_FOUND)

    schema = StructType.fromDDL(FOUND)
    assert isinstance(schema, StructType)
    frame = spark.range(0, len(numbered), 1, min(len(numbered), 64)).mapInArrow(check, schema)
    return list(frame.collect())


_FOUND: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("object", pa.string()),
        ("first", pa.int64()),
        ("end", pa.int64()),
        ("rows", pa.int64()),
        ("epoch_first", pa.int64()),
        ("epoch_last", pa.int64()),
        ("problem", pa.string()),
    ]
)


def _check_messages(
    spark: SparkSession,
    options: dict[str, str],
    topics: Sequence[str],
    receipts: str | None,
    report: JobReport,
    problems_max: int,
    watch: QueryWatch,
) -> None:
    messages = (
        spark.read.format("danube")
        .options(**options)
        .option("subscribe", ",".join(topics))
        .option("columns", "topic,offset,publish_time,producer_id,sequence,payload,routing_key,attributes")
        .option("orphans", "skip")
        .load()
    )
    watch.says("looking for repetitions")
    for row in steps.repeated(messages).limit(problems_max).collect():
        places = ", ".join(str(offset) for offset in row["offsets"])
        report.problems.append(
            f"{row['topic']}: sequence {row['sequence']} of producer {row['producer_id']} is there "
            f"{row['copies']} times, at offsets {places}"
        )
    if receipts is None:
        return
    watch.says("looking for receipts")
    report.values["erased"] = messages.where(steps.is_erased()).count()
    given = spark.read.schema("topic string, offset long, sha256 string").json(receipts)
    report.values["receipts"] = given.count()
    for row in steps.missing_receipts(given, messages).limit(problems_max).collect():
        if row["copies"] == 0:
            what = "was acknowledged and is not there"
        elif row["copies"] > 1:
            what = f"is there {row['copies']} times"
        else:
            what = "holds another payload than was acknowledged"
        report.problems.append(f"{row['topic']}: offset {row['offset']} {what}")
