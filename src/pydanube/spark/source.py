"""`format("danube")`: topics as DataFrames, finished or streaming. Spark asks, `plan` decides, `rows` reads.

    driver      options ─► states ─► offsets ─► shares          one Python process beside the driver, per query
    executors   share ─► record batches                         many Python workers

The reader keeps nothing that a restart would miss: where a stream stands is in Spark's checkpoint, as `plan.Offsets`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from pydanube.errors import ConfigError
from pydanube.spark.options import AtTime, Place, SourceOptions, table_options
from pydanube.spark.plan import (
    Bounds,
    Mark,
    Offsets,
    RangeSource,
    TaskShare,
    TopicState,
    advance,
    between,
    hold_back,
    layout,
    loses,
    resolve,
)
from pydanube.spark.reach import Reach
from pydanube.spark.rows import Wanted, arrow_schema, marks_of, read_share, urls_of, with_marks
from pydanube.spark.shares import shares
from pydanube.spark.versions import (
    DataSourceStreamArrowWriter,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

log = logging.getLogger(__name__)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TABLE = "danube.table"  # in the schema of a table: its options
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
# What Spark's own sources go by: the first that is set.
PARALLELISM = ("spark.sql.files.minPartitionNum", "spark.sql.leafNodeDefaultParallelism", "spark.default.parallelism")


def register(spark: SparkSession) -> None:
    """Spark refuses a reader that takes filters while this setting is off, so the two come together.

    Queries are planned in a process that knows nothing of the session, so how many tasks it runs at once goes with the
    class. It is a class of this function, which Spark sends by value.
    """
    spark.conf.set(PUSHDOWN, "true")

    class SessionSource(FilteringSource):
        """As this session reads."""

        parallelism = parallelism_of(spark)

    try:
        spark.dataSource.register(SessionSource)
    except AnalysisException as error:
        # Spark 4.0 has found the source by itself (pyspark_danube), and does not let it be replaced.
        if "DATA_SOURCE_ALREADY_EXISTS" not in str(error):
            raise
        log.info("this Spark reads without the session's parallelism: minPartitions says how many tasks")


def parallelism_of(spark: SparkSession) -> int:
    """How many tasks the session runs at once now, or is to run when all its executors have come; 1 if not known.

    Spark Connect tells settings only.
    """
    context = getattr(spark, "_sc", None)
    settings = dict(context.getConf().getAll()) if context is not None else {}
    for name in PARALLELISM:
        value = settings.get(name) or spark.conf.get(name, None)
        if value is not None and value.isdigit():
            return max(1, int(value))
    expected = _number(settings, "spark.executor.instances") * _number(settings, "spark.executor.cores")
    return max(1, context.defaultParallelism if context is not None else 1, expected)


def _number(settings: Mapping[str, str], name: str) -> int:
    value = settings.get(name, "")
    return int(value) if value.isdigit() else 0


class DanubeSource(DataSource):
    """Reads and writes topics. This is what Spark finds by itself: it can take no filters, see `register`."""

    parallelism = 1

    @classmethod
    def name(cls) -> str:
        return "danube"

    def schema(self) -> StructType:
        options = SourceOptions.parse(self.options, streaming=not _has_end(self.options))
        found = from_arrow_schema(arrow_schema(options.columns))
        table = table_options(self.options)
        if table is not None:
            found.fields[0].metadata = {TABLE: json.dumps(table)}
        return found

    def given(self, schema: StructType) -> dict[str, str]:
        """The options. Those of `CREATE TABLE … USING danube OPTIONS` are known to Spark when the table is made, and
        not given to who reads it (4.3). What it keeps, and does give, is the schema.
        """
        table: dict[str, str] = json.loads(schema.fields[0].metadata.get(TABLE, "{}")) if schema.fields else {}
        ours = {name.lower(): value for name, value in self.options.items()}
        return {**table, **ours}

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.parse(self.given(schema), streaming=False)
        if options.push_filters:
            raise ConfigError("pushFilters", "true", "only in a session for which pydanube.spark.register was called")
        return DanubeReader(options, self.parallelism)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return DanubeStreamReader(SourceOptions.parse(self.given(schema), streaming=True), self.parallelism)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from pydanube.spark.sink import batch_writer

        return batch_writer(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from pydanube.spark.sink import stream_writer

        return stream_writer(dict(self.options), schema)


class FilteringSource(DanubeSource):
    """As `register` makes it known.

    Filters are taken over only if the query says so: Spark keeps what was left of a source after a filter for every
    later query of the same DataFrame, and for both sides of a join with itself (4.1 to 4.3; tests/spark/test_source.py
    shows it). Those would silently get too few rows.
    """

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.parse(self.given(schema), streaming=False)
        return (FilteringReader if options.push_filters else DanubeReader)(options, self.parallelism)


def _has_end(options: Any) -> bool:
    return any(name.lower().startswith("ending") for name in options)


class SparkPartition(InputPartition):
    """What one task reads."""

    def __init__(self, share: TaskShare, wanted: Wanted) -> None:
        super().__init__(0)
        self.share = share
        self.wanted = wanted


def _read(options: SourceOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, SparkPartition)
    with Reach(options.connection) as reach:
        yield from read_share(reach, partition.share, partition.wanted)


def _offsets(reach: Reach, place: Place, states: Sequence[TopicState], *, ending: bool = False) -> dict[str, int]:
    times = {}
    if isinstance(place, AtTime):
        times = reach.offsets_at({state.topic: place.of(state.topic) for state in states}, states)
    return resolve(place, states, times, ending=ending)


def _shares(pieces: Sequence[RangeSource], options: SourceOptions, parallelism: int) -> list[TaskShare]:
    return shares(
        pieces,
        partitions_min=options.partitions_min,
        rows_max=options.partition_rows_max,
        parallelism=parallelism,
    )


def _epochs(marks: Mapping[str, Mark]) -> dict[str, int]:
    return {topic: mark.epoch for topic, mark in marks.items()}


# --- finished -----------------------------------------------------------------------------------------------


class DanubeReader(DataSourceReader):
    """`spark.read`: what is there when the query begins."""

    def __init__(self, options: SourceOptions, parallelism: int = 1) -> None:
        self.options = options
        self.parallelism = parallelism
        self.bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        with Reach(options.connection) as reach:
            states = reach.states(options.topics, options.pattern)
            start = Offsets(next=_offsets(reach, options.starting, states))
            ends = _offsets(reach, options.ending, states, ending=True)
            upto = {topic: max(end, start.next[topic]) for topic, end in ends.items()}
            advanced = advance(
                states, start, orphans=options.orphans, fail_on_data_loss=options.fail_on_data_loss, upto=upto
            )
            for note in advanced.notes:
                log.warning(note)
            pieces = self.bounds.of(between(states, start, advanced.end, fail_on_data_loss=options.fail_on_data_loss))
            urls = urls_of(states)
            marks = marks_of(reach, pieces, urls)
        chosen = _shares(pieces, options, self.parallelism)
        wanted = Wanted(options.columns, self.bounds, options.fail_on_data_loss, urls, _epochs(marks))
        # Spark refuses a source without partitions.
        return [SparkPartition(share, wanted) for share in chosen or [TaskShare(())]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self.options, partition)


class FilteringReader(DanubeReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Takes filters on offset and topic over; for the others it prunes and lets Spark look at every row."""
        for each in filters:
            found = narrow(self.bounds, each)
            if found is not None:
                self.bounds = found
            if found is None or getattr(each, "attribute", ()) not in (("offset",), ("topic",)):
                yield each


def narrow(bounds: Bounds, filter: Filter) -> Bounds | None:
    """The bounds with this filter; None for one that says nothing to us."""
    match filter:
        case EqualTo(("offset",), int() as value) | EqualNullSafe(("offset",), int() as value):
            return bounds.narrowed(first=value, end=value + 1)
        case GreaterThan(("offset",), int() as value):
            return bounds.narrowed(first=value + 1)
        case GreaterThanOrEqual(("offset",), int() as value):
            return bounds.narrowed(first=value)
        case LessThan(("offset",), int() as value):
            return bounds.narrowed(end=value)
        case LessThanOrEqual(("offset",), int() as value):
            return bounds.narrowed(end=value + 1)
        case EqualTo(("topic",), str() as value) | EqualNullSafe(("topic",), str() as value):
            return bounds.narrowed(topics=frozenset({value}))
        case In(("topic",), values):
            return bounds.narrowed(topics=frozenset(values))
        case GreaterThan(("publish_time",), datetime() as value) | GreaterThanOrEqual(
            ("publish_time",), datetime() as value
        ):
            return bounds.narrowed(time_first=_micros(value))
        case LessThan(("publish_time",), datetime() as value) | LessThanOrEqual(("publish_time",), datetime() as value):
            return bounds.narrowed(time_end=_micros(value) + 1)
        case EqualTo(("routing_key",), str() as value) | EqualNullSafe(("routing_key",), str() as value):
            return bounds.narrowed(key=value)
    return None


def _micros(time: datetime) -> int:
    return (time.astimezone(UTC) - EPOCH) // timedelta(microseconds=1)


# --- streaming ----------------------------------------------------------------------------------------------


class DanubeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`: everything, then what comes. Offsets never go back."""

    def __init__(self, options: SourceOptions, parallelism: int = 1) -> None:
        self.options = options
        self.parallelism = parallelism
        self._at: Offsets | None = None  # up to where Spark has planned, as far as this reader was told
        self._blind: Offsets | None = None  # an end that was decided without knowing the start
        self._reach: Reach | None = None
        self._upto: dict[str, int] | None = None
        self._small_since: float | None = None  # since when a trigger waits for more messages
        self._said: set[str] = set()
        self._shown: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Executors get the options; connections are the driver's own."""
        return {**self.__dict__, "_reach": None}

    @property
    def _open(self) -> Reach:
        if self._reach is None:
            self._reach = Reach(self.options.connection)
        return self._reach

    def _states(self) -> list[TopicState]:
        return self._open.states(self.options.topics, self.options.pattern)

    def initialOffset(self) -> dict[str, Any]:
        states = self._states()
        begin = _offsets(self._open, self.options.starting, states)
        below = [
            piece
            for state in states
            if begin[state.topic] > state.first_offset
            for piece in layout(state, begin[state.topic] - 1, begin[state.topic]).pieces
        ]
        self._at = Offsets(next=begin, marks=marks_of(self._open, below, urls_of(states)))
        return self._at.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.rows_max) if self.options.rows_max is not None else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._upto = {state.topic: state.head for state in self._states()}

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Spark before 4.2 gives no arguments: see `_latest_of_all`."""
        if start is None:
            return self._latest_of_all().to_json()
        options = self.options
        begin = Offsets.from_json(start)
        states = self._states()
        advanced = advance(
            states,
            begin,
            rows_max=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            bytes_max=options.bytes_max,
            orphans=options.orphans,
            fail_on_data_loss=options.fail_on_data_loss,
            upto=self._upto,
        )
        self._say(advanced.notes)
        if self._upto is None and options.rows_min is not None:
            now = monotonic()
            if self._small_since is None:
                self._small_since = now
            waited = now - self._small_since
            if hold_back(
                advanced, begin, rows_min=options.rows_min, waited=waited, delay_max=options.delay_seconds_max
            ):
                return begin.to_json()
            self._small_since = None
        end, notes = with_marks(self._open, states, begin, advanced.end, fail_on_data_loss=options.fail_on_data_loss)
        self._say(notes)
        return end.to_json()

    def _latest_of_all(self) -> Offsets:
        """Everything that is there, for a Spark that cannot limit a trigger and does not say where it stands.

        This reader knows that from its last call. When a query was started again it does not: then the trigger goes up
        to the heads, and what cannot be read on the way there (orphans, what retention removed) is an error of
        `partitions` instead of a stop in front of it.
        """
        options = self.options
        if options.rows_max or options.bytes_max or options.rows_min:
            self._say(["this Spark cannot limit a trigger (4.2 can): max- and minOffsetsPerTrigger are not applied"])
        states = self._states()
        if self._at is not None:
            fails = options.fail_on_data_loss
            advanced = advance(states, self._at, orphans=options.orphans, fail_on_data_loss=fails)
            self._say(advanced.notes)
            end, notes = with_marks(self._open, states, self._at, advanced.end, fail_on_data_loss=fails)
            self._say(notes)
            return end
        last = [
            piece
            for state in states
            if state.head > state.first_offset
            for piece in layout(state, state.head - 1, state.head).pieces
        ]
        heads = {state.topic: state.head for state in states}
        self._blind = Offsets(next=heads, marks=marks_of(self._open, last, urls_of(states)))
        return self._blind

    def _check_blind(self, states: Sequence[TopicState], start: Offsets, end: Offsets) -> None:
        """What `latestOffset` looks at when it knows the start. Raises MessagesLost, if that is wanted."""
        fails, notes = self.options.fail_on_data_loss, list[str]()
        for topic, offset in start.next.items():
            if topic not in end.next:
                loses(topic, offset, offset + 1, "the topic is gone", fails, notes)
            elif end.next[topic] < offset:
                why = f"the topic ends at offset {end.next[topic]}: it was made anew, or has lost data"
                loses(topic, end.next[topic], offset, why, fails, notes)
        _, said = with_marks(self._open, states, start, end, fail_on_data_loss=fails)
        self._say([*notes, *said])

    def reportLatestOffset(self) -> dict[str, Any]:
        """The heads: what Spark shows as the backlog."""
        return Offsets(next={state.topic: state.head for state in self._states()}).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        options = self.options
        states = self._states()
        fails = options.fail_on_data_loss
        begin = Offsets.from_json(start)
        self._at = upto = Offsets.from_json(end)
        if self._blind == upto:
            self._check_blind(states, begin, upto)
        pieces = between(states, begin, upto, fail_on_data_loss=fails)
        wanted = Wanted(options.columns, Bounds(), fails, urls_of(states), _epochs(upto.marks))
        chosen = _shares(pieces, options, self.parallelism)
        return [SparkPartition(share, wanted) for share in chosen]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self.options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark has done with everything below: the broker may show it. It comes one batch late."""
        if self.options.group is not None:
            offsets = Offsets.from_json(end).next
            changed = {topic: offset for topic, offset in offsets.items() if self._shown.get(topic) != offset}
            self._open.show_progress(self.options.group, changed)
            self._shown.update(changed)

    def stop(self) -> None:
        if self._reach is not None:
            self._reach.close()
            self._reach = None

    def _say(self, notes: Sequence[str]) -> None:
        for note in notes:
            if note not in self._said:
                self._said.add(note)
                log.warning(note)
