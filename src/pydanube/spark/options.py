"""Options of `format("danube")`: text from Spark becomes values, once, with every contradiction found here. No Spark.

Names are those of Spark's Kafka connector where it has one. Spark does not keep the case of option names, so case does
not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import Any, Final, Literal, TypeAlias

from pydanube.config.checks import HIDDEN
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, InvalidName

LATEST: Final = -1
EARLIEST: Final = -2

# A place where reading begins or ends: one for all topics (EARLIEST, LATEST), one per topic, or a time.
Edge: TypeAlias = Literal["earliest", "latest"]
Orphans: TypeAlias = Literal["wait", "skip"]

# In the order in which they are shown; what a table of messages needs, and then what a job about the log needs.
COLUMNS: Final = (
    "topic",
    "offset",
    "publish_time",
    "producer_name",
    "routing_key",
    "schema_id",
    "schema_version",
    "attributes",
    "payload",
)
EXTRA_COLUMNS: Final = ("request_id", "producer_id", "sequence", "epoch", "append_time", "event_time", "deliver_at")

CONNECTION_OPTIONS: Final = (
    "service.url",
    "storage.url",
    "storage.options",
    "token",
    "token.file",
    "tls.ca",
    "tls.cert",
    "tls.key",
    "timeout",
)
SOURCE_OPTIONS: Final = (
    *CONNECTION_OPTIONS,
    "topic",
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "columns",
    "group.id",
    "orphans",
    "pushFilters",
)
SINK_OPTIONS: Final = (
    *CONNECTION_OPTIONS,
    "topic",
    "keyColumn",
    "attributesColumn",
    "topicColumn",
    "payloadColumn",
    "publishTimeColumn",
    "producerColumn",
    "schemaIdColumn",
    "schemaVersionColumn",
    "staging",
    "writeId",
    "batchRows",
    "rowsPerSecond",
    "compression",
)
# What Spark itself puts among them.
SPARK_OPTIONS: Final = ("path", "checkpointLocation", "queryName", "outputMode", "format")
# Of a table of Spark's catalog: its properties, and its options a second time, with a prefix.
TABLE_PROPERTIES: Final = frozenset(
    {
        "provider",
        "owner",
        "location",
        "comment",
        "external",
        "is_managed_location",
        "collation",
        "transient_lastddltime",
    }
)
TABLE_PREFIX: Final = "option."


class QueryOptions:
    """Options by name, whatever their case. Every unknown one is refused, with the name that was meant."""

    def __init__(self, options: Mapping[str, str], known: Collection[str]) -> None:
        self._values = _without_table({name.lower(): str(value) for name, value in options.items()})
        names = {name.lower(): name for name in (*known, *SPARK_OPTIONS)}
        for name in self._values:
            if name not in names:
                meant = get_close_matches(name, names, 1, 0.7)
                hint = f"did you mean {names[meant[0]]}?" if meant else f"the options are {', '.join(known)}"
                raise ConfigError(name, HIDDEN, hint)  # it may be a secret's, misspelt

    def text(self, name: str) -> str | None:
        return self._values.get(name.lower()) or None

    def required(self, name: str, why: str) -> str:
        value = self.text(name)
        if value is None:
            raise ConfigError(name, None, why)
        return value

    def number(self, name: str, least: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if number < least:
            raise ConfigError(name, value, f"a whole number, {least} or more")
        return number

    def flag(self, name: str, default: bool) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise ConfigError(name, value, "true or false")
        return value.lower() == "true"

    def one_of(self, name: str, default: str, allowed: Collection[str]) -> str:
        value = (self.text(name) or default).lower()
        if value not in allowed:
            raise ConfigError(name, value, " or ".join(allowed))
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.text(name)
        if value is None:
            return {}
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError(name, HIDDEN, "a JSON object")  # of credentials, perhaps
        return found


# What a table must not have: every reader of the catalog, or of a query's schema, would see it.
SECRET: Final = ("token", "storage.options")
PEM: Final = "-----BEGIN "


def table_options(options: Mapping[str, str]) -> dict[str, str] | None:
    """Those that make a table of Spark's catalog; None: it is a query. Raises ConfigError."""
    given = {name.lower(): str(value) for name, value in options.items()}
    if not any(name.startswith(TABLE_PREFIX) for name in given):
        return None
    found = _without_table(given)
    for name in SECRET:
        if name in found:
            hint = "token.file, or the environment of executors: the options of a table are kept in the catalog"
            raise ConfigError(name, "…", hint)
    for name, value in found.items():
        if value.lstrip().startswith(PEM):
            raise ConfigError(name, "text", "a file: the options of a table are kept in the catalog")
    return found


def _without_table(given: Mapping[str, str]) -> dict[str, str]:
    """The options of a table as those of a query: what the query itself says wins."""
    table = {name.removeprefix(TABLE_PREFIX): value for name, value in given.items() if name.startswith(TABLE_PREFIX)}
    ours = {
        name: value
        for name, value in given.items()
        if not name.startswith(TABLE_PREFIX) and not (table and name in TABLE_PROPERTIES)
    }
    return {**table, **ours}


# --- the connection -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """How to reach brokers and objects. Travels to executors, credentials included, so it is never shown."""

    url: str | None
    storage_url: str | None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)
    token_file: str | None = None
    tls_ca: str | None = field(default=None, repr=False)  # these three may be PEM text
    tls_cert: str | None = field(default=None, repr=False)
    tls_key: str | None = field(default=None, repr=False)
    timeout_seconds: float = 60.0  # as the client: longer than a takeover

    @classmethod
    def of(cls, given: QueryOptions) -> BrokerOptions:
        url, storage_url = given.text("service.url"), given.text("storage.url")
        if url is None and storage_url is None:
            raise ConfigError(
                "service.url",
                None,
                "danube://host:6651; or storage.url alone, to read uploaded messages without brokers",
            )
        if (given.text("tls.cert") is None) != (given.text("tls.key") is None):
            raise ConfigError("tls.cert", given.text("tls.cert"), "tls.cert and tls.key together, or neither")
        if given.text("token") is not None and given.text("token.file") is not None:
            raise ConfigError("token.file", given.text("token.file"), "either it or token, not both")
        return cls(
            url=url,
            storage_url=storage_url,
            storage_options=given.mapping("storage.options"),
            token=given.text("token") or "",
            token_file=given.text("token.file"),
            tls_ca=given.text("tls.ca"),
            tls_cert=given.text("tls.cert"),
            tls_key=given.text("tls.key"),
            timeout_seconds=float(given.number("timeout") or 60),
        )


# --- the source -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Everywhere:
    """The same edge in every topic."""

    edge: Edge


@dataclass(frozen=True, slots=True)
class PerTopic:
    """An offset per topic; EARLIEST and LATEST are allowed among them."""

    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message that was published at this time or later, in microseconds since 1970; per topic, or one."""

    time_us: int | None
    per_topic: Mapping[str, int] = field(default_factory=dict)

    def of(self, topic: str) -> int:
        found = self.per_topic.get(topic, self.time_us)
        if found is None:
            raise ConfigError("startingTimestamp", dict(self.per_topic), f"it names no time for {topic}")
        return found


Place: TypeAlias = Everywhere | PerTopic | AtTime


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """All that a query says about what to read."""

    connection: BrokerOptions
    topics: tuple[str, ...]  # empty if there is a pattern
    pattern: str | None
    starting: Place
    ending: Place
    rows_max: int | None
    bytes_max: int | None
    rows_min: int | None
    delay_seconds_max: float
    partitions_min: int | None  # None: as the cluster is
    partition_rows_max: int | None
    fail_on_data_loss: bool
    columns: tuple[str, ...]
    group: str | None
    orphans: Orphans
    push_filters: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
        """Raises ConfigError, InvalidName."""
        given = QueryOptions(options, SOURCE_OPTIONS)
        topics, pattern = _topics(given)
        rows_min, rows_max = given.number("minOffsetsPerTrigger"), given.number("maxOffsetsPerTrigger")
        if rows_min is not None and rows_max is not None and rows_min > rows_max:
            raise ConfigError("minOffsetsPerTrigger", rows_min, f"at most maxOffsetsPerTrigger, which is {rows_max}")
        if streaming:
            for name in ("endingOffsets", "endingTimestamp"):
                if given.text(name) is not None:
                    raise ConfigError(name, given.text(name), "only for spark.read: a stream has no end")
        return cls(
            connection=BrokerOptions.of(given),
            topics=topics,
            pattern=pattern,
            starting=_place(given, "starting", "latest" if streaming else "earliest"),
            ending=_place(given, "ending", "latest"),
            rows_max=rows_max,
            bytes_max=given.number("maxBytesPerTrigger"),
            rows_min=rows_min,
            delay_seconds_max=_seconds(given.text("maxTriggerDelay") or "15m"),
            partitions_min=given.number("minPartitions"),
            partition_rows_max=given.number("maxRecordsPerPartition"),
            fail_on_data_loss=given.flag("failOnDataLoss", True),
            columns=_columns(given),
            group=given.text("group.id"),
            orphans="skip" if given.one_of("orphans", "wait", ("wait", "skip")) == "skip" else "wait",
            push_filters=given.flag("pushFilters", False),
        )


def _topics(given: QueryOptions) -> tuple[tuple[str, ...], str | None]:
    names = [name for name in ("topic", "subscribe", "subscribePattern") if given.text(name) is not None]
    if len(names) != 1:
        found = " and ".join(names) or None
        raise ConfigError("topic", found, "one of topic, subscribe (names with commas) and subscribePattern")
    value = given.required(names[0], "")
    if names[0] == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError("subscribePattern", value, f"a regular expression: {error}") from error
        return (), value
    listed = [value] if names[0] == "topic" else [part.strip() for part in value.split(",") if part.strip()]
    topics = tuple(str(TopicName(name)) for name in listed)
    if not topics or len(set(topics)) < len(topics):
        raise ConfigError(names[0], value, "one topic or more, each once")
    return topics, None


def _columns(given: QueryOptions) -> tuple[str, ...]:
    text = given.text("columns")
    headers = given.flag("includeHeaders", True)
    if text is None:
        return tuple(name for name in COLUMNS if headers or name != "attributes")
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    allowed = (*COLUMNS, *EXTRA_COLUMNS)
    if not names or len(set(names)) < len(names) or not set(names) <= set(allowed):
        raise ConfigError("columns", text, f"some of {', '.join(allowed)}, each once")
    if not headers and "attributes" in names:
        raise ConfigError("includeHeaders", "false", "columns without attributes, or includeHeaders true")
    return names


def _place(given: QueryOptions, which: str, default: Edge) -> Place:
    offsets, time = given.text(f"{which}Offsets"), given.text(f"{which}Timestamp")
    if offsets is not None and time is not None:
        raise ConfigError(f"{which}Timestamp", time, f"either it or {which}Offsets, not both")
    if time is not None:
        return _time(f"{which}Timestamp", time)
    if offsets is None or offsets.lower() in ("earliest", "latest"):
        edge = (offsets or default).lower()
        if which == "ending" and edge == "earliest":
            raise ConfigError("endingOffsets", offsets, "latest, or offsets per topic: nothing ends where it begins")
        return Everywhere("earliest" if edge == "earliest" else "latest")
    allowed = '"earliest", "latest", or JSON: {"/default/orders": 42}, with -2 for earliest and -1 for latest'
    try:
        found = json.loads(offsets)
        per_topic = {str(TopicName(name)): int(offset) for name, offset in found.items()}
    except (ValueError, TypeError, AttributeError, InvalidName) as error:
        raise ConfigError(f"{which}Offsets", offsets, allowed) from error
    if any(offset < EARLIEST for offset in per_topic.values()):
        raise ConfigError(f"{which}Offsets", offsets, allowed)
    if which == "ending" and EARLIEST in per_topic.values():
        raise ConfigError("endingOffsets", offsets, "-2 (earliest) is only for startingOffsets")
    return PerTopic(per_topic)


def _time(key: str, text: str) -> AtTime:
    allowed = "milliseconds since 1970, an ISO time, or JSON with one of them per topic"
    try:
        if text.lstrip().startswith("{"):
            found = json.loads(text)
            return AtTime(None, {str(TopicName(name)): _micros(str(time)) for name, time in found.items()})
        return AtTime(_micros(text))
    except (ValueError, AttributeError, InvalidName) as error:
        raise ConfigError(key, text, allowed) from error


def _micros(text: str) -> int:
    """Milliseconds, as the Kafka connector has them, or an ISO time; without a zone it is UTC."""
    if text.strip().isdigit():
        return int(text) * 1000
    time = datetime.fromisoformat(text.strip())
    time = time.replace(tzinfo=UTC) if time.tzinfo is None else time
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)\s*(ms|s|m|h|)", text.strip())
    if found is None:
        raise ConfigError("maxTriggerDelay", text, "a number with ms, s, m or h")
    return int(found[1]) * {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}[found[2]]
