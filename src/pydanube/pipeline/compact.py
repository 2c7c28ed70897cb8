"""Job *compact*: many small objects of a topic become few large ones, unnoticed by readers.

    driver      neighbours ─► groups                       at most 100 objects each: what one transaction can swap
    executors   group ─► one object, put under a new name
    driver      the owner looks at it and swaps the descriptors of the group, all or none

A group that the owner describes differently by now is left alone. The old objects stay until the owner sweeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from secrets import randbelow
from time import time
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import SparkSession

from pydanube.core.history.tiers import PARQUET, Descriptor, object_name
from pydanube.errors import Conflict, DanubeError, InvalidObject
from pydanube.formats.parquet_write import merge_objects
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import CONNECTION, TOPICS, JobSettings
from pydanube.spark.errors import StoreNotHere
from pydanube.spark.options import BrokerOptions, QueryOptions
from pydanube.spark.reach import Reach

MIB: Final = 1 << 20
KNOWN: Final = (*CONNECTION, *TOPICS, "object_mb")
GROUP_MAX: Final = 100


def groups(descriptors: Sequence[Descriptor], object_bytes: int) -> list[list[Descriptor]]:
    """Neighbours that become one object of about that size. A gap, a raw object and a large one end a group."""
    found: list[list[Descriptor]] = []
    run: list[Descriptor] = []
    for each in sorted(descriptors, key=lambda each: each.start_offset):
        joins = each.format == PARQUET and each.size < object_bytes
        size = sum(member.size for member in run)
        if run and (
            not joins or each.start_offset != run[-1].end or size + each.size > object_bytes or len(run) == GROUP_MAX
        ):
            found.append(run)
            run = []
        if joins:
            run.append(each)
    found.append(run)
    return [group for group in found if len(group) > 1]


async def write_group(reach: Reach, topic: str, url: str, group: Sequence[Descriptor]) -> Descriptor:
    """The group as one object in the store, which no descriptor names yet. Raises InvalidObject."""
    store = await reach.store(url)
    parts = [(await store.get(f"{topic[1:]}/{each.object_id}"), each.footer_crc) for each in group]
    epoch = group[-1].epoch
    encoded = merge_objects(topic, epoch, parts)
    # A number never used before: two jobs at once must not want the same name.
    name = object_name(encoded.start_offset, encoded.end - 1, epoch, attempt=10**9 + randbelow(10**15))
    info = await store.put(f"{topic[1:]}/{name}", [encoded.data], create=True)
    return Descriptor(
        start_offset=encoded.start_offset,
        end_offset=encoded.end - 1,
        object_id=name,
        size=info.size_bytes,
        etag=info.etag,
        min_publish_time=encoded.min_publish_time,
        max_publish_time=encoded.max_publish_time,
        epoch=epoch,
        created_at=int(time()),
        max_append_time=encoded.max_append_time,
        footer_crc=encoded.footer_crc,
    )


def check(values: dict[str, Any]) -> tuple[JobSettings, BrokerOptions, int]:
    """The settings, checked without Spark: how to reach brokers, and bytes per object. Raises ConfigError."""
    settings = JobSettings(values, KNOWN, "compact")
    settings.topics()
    connection = BrokerOptions.of(QueryOptions(settings.connection(), CONNECTION))
    return settings, connection, (settings.number("object_mb", 256) or 256) * MIB


def run(spark: SparkSession, values: dict[str, Any], watch: QueryWatch) -> JobReport:
    settings, connection, object_bytes = check(values)
    report = JobReport("compact", {"objects_before": 0, "objects_after": 0, "swapped": 0, "left_alone": 0})
    work: list[tuple[str, str, list[Descriptor]]] = []
    with Reach(connection) as reach:
        for state in reach.states(settings.topics()):
            info = reach.call(_describe(reach, state.topic))
            url = reach.store_of(info)
            report.values["objects_before"] += len(info.objects)
            if url is None and info.objects:
                report.problems.append(str(StoreNotHere(state.topic, info.url or "an object store")))
            elif url is not None:
                work += [(state.topic, url, group) for group in groups(info.objects, object_bytes)]
        watch.says("writing", 0, len(work))
        for done, (topic, group, made, problem) in enumerate(_written(spark, connection, work), 1):
            if problem is not None:
                report.problems.append(f"{topic}: {problem}")
            else:
                _swap(reach, topic, work[group], made, report)
            watch.says("swapping", done, len(work))
        report.values["objects_after"] = sum(
            len(reach.call(_describe(reach, state.topic)).objects) for state in reach.states(settings.topics())
        )
    return report


async def _describe(reach: Reach, topic: str) -> Any:
    return await (await reach.client()).describe_storage(topic)


def _swap(
    reach: Reach, topic: str, item: tuple[str, str, list[Descriptor]], made: Descriptor, report: JobReport
) -> None:
    _, url, group = item

    async def ask() -> None:
        await (await reach.client()).swap_objects(topic, [each.object_id for each in group], made)

    async def forget() -> None:
        await (await reach.store(url)).delete(f"{topic[1:]}/{made.object_id}")

    try:
        reach.call(ask())
        report.values["swapped"] += len(group)
    except Conflict:
        reach.call(forget())
        report.values["left_alone"] += len(group)
    except DanubeError as error:
        # The answer may have been lost: the owner knows, and sweeps what it does not describe.
        report.problems.append(f"{topic}: {made.object_id}: {error}")


def _written(
    spark: SparkSession, connection: BrokerOptions, work: Sequence[tuple[str, str, list[Descriptor]]]
) -> Iterator[tuple[str, int, Descriptor, str | None]]:
    """Topic, number of the group, the new object, and what went wrong instead."""
    if not work:
        return
    chosen = list(work)

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Reach(connection) as reach:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    topic, url, group = chosen[number]
                    made, problem = None, None
                    try:
                        made = reach.call(write_group(reach, topic, url, group)).to_bytes().decode()
                    except (FileNotFoundError, InvalidObject) as error:
                        problem = f"offsets {group[0].start_offset} to {group[-1].end_offset}: {error}"
                    row = {"topic": topic, "number": number, "made": made, "problem": problem}
                    yield pa.RecordBatch.from_pylist([row], schema=_ROWS)

    frame = spark.range(0, len(chosen), 1, min(len(chosen), 64)).mapInArrow(
        write, "topic string, number long, made string, problem string"
    )
    for row in frame.toLocalIterator():
        made = Descriptor.from_json(json.loads(row["made"])) if row["made"] else chosen[row["number"]][2][0]
        yield row["topic"], row["number"], made, row["problem"]


_ROWS: Final = pa.schema(
    [("topic", pa.string()), ("number", pa.int64()), ("made", pa.string()), ("problem", pa.string())]
)
