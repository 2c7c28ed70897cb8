"""Job *erase*: the bytes of a key's messages go from history; offsets stay. docs/adr/0011-erasure.md has the reasons.

    owner       flush_log: everything that is committed leaves the log for objects
    executors   object ─► holds the key? ─► the same object with those rows erased, put, read back and compared
    owner       compares both, row by row, and swaps the descriptor
    driver      looks again, until no object below the head of the beginning holds the key

Dead-letter topics that subscriptions of the topics name are erased with them. What cannot be reached is in the report;
if it may hold the key, that is a problem, and the job fails.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from secrets import randbelow
from time import sleep, time
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from pydanube.client.messages import LogFlushed
from pydanube.core.history.tiers import PARQUET, RAW, Descriptor, object_name
from pydanube.errors import ConfigError, Conflict, DanubeError, InvalidObject, TopicUnknown, Unavailable
from pydanube.formats.erasure import Erased, check_erasure, check_raw_erasure, erase_object, erase_raw, rows_with_keys
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import CONNECTION, TOPICS, JobSettings
from pydanube.ports import Buffer, ObjectStore
from pydanube.spark.errors import StoreNotHere
from pydanube.spark.options import BrokerOptions, QueryOptions
from pydanube.spark.plan import TopicState
from pydanube.spark.reach import Reach

KNOWN: Final = (*CONNECTION, *TOPICS, "key", "keys_file")
ROUNDS_MAX: Final = 10  # a busy owner merges, and a topic may move: then descriptors are read anew
FLUSH_SECONDS: Final = 600.0
PAUSE_SECONDS_MAX: Final = 10.0  # between rounds: a store that is away comes back
NOT_REACHED: Final = (
    "older versions of objects, if the bucket keeps versions",
    "tables, files and topics that were made of these messages (lake, replay), and what consumers have received",
    "objects that were replaced, until their owner removes them: readers may be at them. That takes "
    "old_objects_gone_in_seconds at most, and as long anew from each move or restart in between",
    "blocks of segments and of the commit journal on brokers' disks, until they are used again; files that brokers "
    "which had the topic before have not removed yet, or have set aside as damaged",
)


class ObjectFinding(NamedTuple):
    """What a task found in one object, or made of it."""

    topic: str
    object_id: str
    made: Descriptor | None  # None: no row of it has one of the keys
    rows: int
    problem: str | None
    again: str | None = None  # why it was not read to its end, if another round may: it was swept, or the store is away


def keys_of(settings: JobSettings, given: object) -> list[str]:
    """The routing keys to erase: exactly as given, because what is erased does not come back. Raises ConfigError."""
    listed = [] if given is None else given if isinstance(given, list | tuple) else [given]
    for key in listed:
        if not isinstance(key, str) or not key:
            raise ConfigError("key", key, "a text, in quotes: YAML reads 0123, 1_000, yes and 1.10 as something else")
    keys = set(listed)
    file = settings.text("keys_file")
    if file is not None:
        try:
            lines = Path(file).read_bytes().decode("utf-8-sig").split("\n")
        except OSError as error:
            raise ConfigError("keys_file", file, f"a file with a key a line: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError("keys_file", file, f"a file in UTF-8: {error}") from error
        keys |= {key for line in lines if (key := line.removesuffix("\r"))}
    if not keys:
        raise ConfigError("key", None, "the routing key to erase, or several; or keys_file: one a line")
    return sorted(keys)


def check(values: dict[str, Any]) -> tuple[JobSettings, BrokerOptions, list[str]]:
    """The settings, checked without Spark: how to reach brokers, and the keys. Raises ConfigError."""
    settings = JobSettings(values, KNOWN, "erase")
    settings.topics()
    connection = BrokerOptions.of(QueryOptions(settings.connection(), CONNECTION))
    return settings, connection, keys_of(settings, values.get("key"))


def run(spark: SparkSession, values: dict[str, Any], watch: QueryWatch) -> JobReport:
    settings, connection, keys = check(values)
    wanted = settings.topics()
    report = JobReport(
        "erase",
        {"topics": 0, "objects": 0, "objects_rewritten": 0, "messages_erased": 0, "old_objects_gone_in_seconds": 0},
    )
    flushed: dict[str, LogFlushed] = {}
    erased: Counter[str] = Counter()
    with Reach(connection) as reach:
        names = list(wanted)
        while names:
            # A message may become a dead letter until it is erased where it was: those topics come behind, with their
            # heads of then.
            level = _flush(reach, names, flushed, wanted, report, watch)
            todo = {topic: log.head for topic, log in level.items()}
            why: dict[str, str] = {}
            for number in range(ROUNDS_MAX):
                why = _round(spark, reach, connection, todo, keys, report, erased, watch, is_first=number == 0)
                todo = {topic: todo[topic] for topic in why}
                if not todo:
                    break
                if number:
                    sleep(min(2.0 ** (number - 1), PAUSE_SECONDS_MAX))
            report.problems += [
                f"{topic}: {why[topic]}, in the last of {ROUNDS_MAX} rounds; run the job again"
                for topic in sorted(todo)
            ]
            flushed |= level
            names = sorted({name for log in level.values() for name in log.dead_letter_topics} - set(flushed))
        for topic, count in sorted(erased.items()):  # an operator's order, and no small one; the key stays out of it
            reach.call(_note(reach, topic, count))
    report.values["topics"] = len(flushed)
    report.values["messages_erased"] = sum(erased.values())
    report.values["old_objects_gone_in_seconds"] = max((log.garbage_seconds for log in flushed.values()), default=0)
    report.values["not_reached"] = list(NOT_REACHED)
    return report


def _flush(
    reach: Reach,
    names: Sequence[str],
    known: Collection[str],
    wanted: Sequence[str],
    report: JobReport,
    watch: QueryWatch,
) -> dict[str, LogFlushed]:
    """The log of every topic that is not `known` yet is in objects then."""
    flushed: dict[str, LogFlushed] = {}
    for name in names:
        try:
            parts = [state.topic for state in reach.states([name])]
        except TopicUnknown:
            if name in wanted:
                raise
            continue  # a dead-letter topic is made with its first letter
        for topic in parts:
            if topic in known or topic in flushed:
                continue
            watch.says(f"emptying the log of {topic} into objects")
            flushed[topic] = log = reach.call(_flush_log(reach, topic))
            if log.set_aside:
                report.problems.append(
                    f"{topic}: its broker has files set aside that may hold the key, and that nothing reads again: "
                    f"{', '.join(log.set_aside)}; look at them, remove them and run the job again"
                )
            if log.first_on_disk < log.head:
                report.problems.append(
                    f"{topic}: offsets {log.first_on_disk} to {log.head - 1} are still on the disk of its broker; "
                    "danube admin storage verify says why"
                )
    return flushed


async def _flush_log(reach: Reach, topic: str) -> LogFlushed:
    return await (await reach.client()).flush_log(topic, timeout=FLUSH_SECONDS)


def _round(
    spark: SparkSession,
    reach: Reach,
    connection: BrokerOptions,
    todo: dict[str, int],
    keys: Sequence[str],
    report: JobReport,
    erased: Counter[str],
    watch: QueryWatch,
    *,
    is_first: bool,
) -> dict[str, str]:
    """Erases in all objects that there are now. Returns the topics that must be looked at again, and why."""
    work: list[tuple[str, str, Descriptor]] = []
    for topic, head in todo.items():
        [state] = reach.states([topic])
        if state.storage_url is None and head > state.first_offset:
            report.problems.append(str(StoreNotHere(topic, reach.not_here.get(topic, "an object store"))))
            continue
        if is_first:
            report.problems += [
                f"{topic}: offsets {first} to {end - 1} are in no object, and were not looked at"
                for first, end in unseen(state, head)
            ]
            report.values["objects"] += len(state.objects)
            report.problems += [
                f"{topic}: offsets {first} to {end - 1} are on the disk of a broker that is away, "
                "and may hold the key; run the job again when it is back, or discard them"
                for first, end in state.orphans
                if first < head
            ]
        work += [(topic, state.storage_url or "", each) for each in state.objects if each.start_offset < head]
    again: dict[str, str] = {}
    for done, found in enumerate(_erased(spark, connection, work, keys), 1):
        watch.says("erasing", done, len(work))
        if found.problem is not None:
            problem = f"{found.topic}: {found.object_id}: {found.problem}"
            if problem not in report.problems:
                report.problems.append(problem)
        if found.again is not None:
            again[found.topic] = f"{found.object_id}: {found.again}"
        if found.made is not None and not _swap(reach, found, work, report, erased):
            again[found.topic] = "its objects were changed by others"
    return again


def unseen(state: TopicState, head: int) -> list[tuple[int, int]]:
    """What of [first offset, head) is in no object, and neither a void nor an orphan."""
    known = sorted([*((each.start_offset, each.end) for each in state.objects), *state.voids, *state.orphans])
    missing: list[tuple[int, int]] = []
    at = state.first_offset
    for first, end in known:
        if at < min(first, head):
            missing.append((at, min(first, head)))
        at = max(at, end)
    return [*missing, (at, head)] if at < head else missing


async def _note(reach: Reach, topic: str, count: int) -> None:
    await (await reach.client()).note_order("EraseKeys", topic, count=count)


def _swap(
    reach: Reach,
    found: ObjectFinding,
    work: Sequence[tuple[str, str, Descriptor]],
    report: JobReport,
    erased: Counter[str],
) -> bool:
    """Whether the owner took the new object; if not, what it has is looked at again."""
    made = found.made
    assert made is not None

    async def ask() -> None:
        await (await reach.client()).swap_objects(found.topic, [found.object_id], made)

    async def forget() -> None:
        url = next(url for topic, url, _ in work if topic == found.topic)
        await (await reach.store(url)).delete(f"{found.topic[1:]}/{made.object_id}")

    try:
        reach.call(ask())
    except Conflict:
        reach.call(forget())
        return False
    except DanubeError as error:
        # The answer may have been lost: the next round finds out.
        if error.__class__ is InvalidObject:
            report.problems.append(f"{found.topic}: {made.object_id}: {error}")
            return True
        return False
    report.values["objects_rewritten"] += 1
    erased[found.topic] += found.rows
    return True


# --- executors -----------------------------------------------------------------------------------------------


async def erase_in(
    reach: Reach, topic: str, url: str, described: Descriptor, keys: Collection[str], when: str
) -> ObjectFinding:
    """The object with the keys' rows erased, in the store and compared with the old one; no descriptor names it yet."""
    store = await reach.store(url)
    data = await store.get(f"{topic[1:]}/{described.object_id}")
    problem = None
    if described.format == PARQUET:
        if not rows_with_keys(data, described.footer_crc, keys):
            return ObjectFinding(topic, described.object_id, None, 0, None)
        erased = erase_object(data, described.footer_crc, keys, when)
    else:
        erased, unreadable = erase_raw(data, keys, when)
        if unreadable:
            places = ", ".join(f"{each.first} to {each.end - 1} ({each.why})" for each in unreadable)
            problem = f"cannot be searched for the key at offsets {places}"
        if not erased.rows:
            return ObjectFinding(topic, described.object_id, None, 0, problem)
    made = await _put(store, topic, described, erased, data)
    return ObjectFinding(topic, described.object_id, made, erased.rows, problem)


async def _put(store: ObjectStore, topic: str, old: Descriptor, erased: Erased, before: Buffer) -> Descriptor:
    encoded, is_raw = erased.encoded, old.format != PARQUET
    # A number never used before: two jobs at once must not want the same name.
    number = 10**9 + randbelow(10**15)
    name = object_name(old.start_offset, old.end - 1, old.epoch, attempt=number, raw=is_raw)
    key = f"{topic[1:]}/{name}"
    info = await store.put(key, [encoded.data], create=True)
    stored = await store.get(key)
    footer_crc = 0 if is_raw else encoded.footer_crc
    checked = check_raw_erasure(before, stored) if is_raw else check_erasure(before, old.footer_crc, stored, footer_crc)
    if checked != erased.rows:
        raise InvalidObject(key, f"{checked} rows are erased instead of {erased.rows}")
    return Descriptor(
        start_offset=old.start_offset,
        end_offset=old.end_offset,
        object_id=name,
        size=info.size_bytes,
        etag=info.etag,
        min_publish_time=old.min_publish_time,
        max_publish_time=old.max_publish_time,
        epoch=old.epoch,
        created_at=int(time()),
        max_append_time=old.max_append_time,
        footer_crc=footer_crc,
        format=RAW if is_raw else PARQUET,
    )


def _erased(
    spark: SparkSession,
    connection: BrokerOptions,
    work: Sequence[tuple[str, str, Descriptor]],
    keys: Collection[str],
) -> Iterator[ObjectFinding]:
    """One finding for every object, each by one task."""
    if not work:
        return
    chosen, wanted = list(work), frozenset(keys)
    when = datetime.now(UTC).isoformat(timespec="seconds")

    def erase(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Reach(connection) as reach:
            for batch in batches:
                for number in batch.column("id").to_pylist():
                    topic, url, described = chosen[number]
                    try:
                        found = reach.call(erase_in(reach, topic, url, described, wanted, when))
                    except (FileNotFoundError, Unavailable) as error:  # merged and swept since; or the store is away
                        why = "it is not in the store" if isinstance(error, FileNotFoundError) else str(error)
                        found = ObjectFinding(topic, described.object_id, None, 0, None, why)
                    except InvalidObject as error:
                        found = ObjectFinding(topic, described.object_id, None, 0, str(error))
                    made = found.made.to_bytes().decode() if found.made is not None else None
                    yield pa.RecordBatch.from_pylist([{**found._asdict(), "made": made}], schema=_ROWS)

    frame = spark.range(0, len(chosen), 1, min(len(chosen), 64)).mapInArrow(
        erase, "topic string, object_id string, made string, rows long, problem string, again string"
    )
    for row in frame.toLocalIterator():
        made = Descriptor.from_json(json.loads(row["made"])) if row["made"] else None
        yield ObjectFinding(row["topic"], row["object_id"], made, row["rows"], row["problem"], row["again"])


_ROWS: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("object_id", pa.string()),
        ("made", pa.string()),
        ("rows", pa.int64()),
        ("problem", pa.string()),
        ("again", pa.string()),
    ]
)
