"""What an operator sees: the names of metrics, and the format of log lines.

    metrics = telemetry.topic("/default/orders")     once, when the topic opens
    metrics.messages_in.inc()                        per message: one addition, no lock, no label lookup
    telemetry.forget_topic("/default/orders")        when it closes

Counts are plain numbers, changed by the event loop alone. A scrape copies them on the loop (`snapshot`, some
microseconds per topic) and may print the copy in a thread. What can be computed is: the lag of a subscription
is asked from its dispatch machine at the scrape, so it is right with no consumer and while acks are pending.
Every series of a subscription exists, at 0, from its creation until it is forgotten.

A log line is a constant lowercase phrase and fields, `log.info("topic opened", extra={"topic": topic})`:

    2026-11-15T09:41:07.123Z INFO broker.topics: topic opened topic=/default/orders epoch=3
"""

from __future__ import annotations

import json
import logging
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple, TextIO, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from pydanube.core.lag import Standing

LATENCY_BOUNDS_MS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)
STEP: Final = 32  # subscriptions


# --- what the rooms count -------------------------------------------------------------------------------


class Count:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class Level:
    """Goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def set(self, value: int) -> None:
        self.value = value


class Histogram:
    """Counts of milliseconds between bounds. `observe` costs a search among twelve numbers."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self.sum_ms = 0.0

    def observe(self, seconds: float) -> None:
        milliseconds = seconds * 1000
        self.counts[bisect_left(LATENCY_BOUNDS_MS, milliseconds)] += 1
        self.sum_ms += milliseconds

    def copy(self) -> Buckets:
        return Buckets(tuple(self.counts), self.sum_ms)


class Buckets(NamedTuple):
    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_MS) + 1)
    sum_ms: float = 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants them."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, LATENCY_BOUNDS_MS), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


@dataclass(slots=True, eq=False)
class TopicMetrics:
    messages_in: Count = field(default_factory=Count)
    bytes_in: Count = field(default_factory=Count)  # payloads
    producers: Level = field(default_factory=Level)  # registered
    send_latency: Histogram = field(default_factory=Histogram)  # from the request to the answer
    send_errors: Counter[str] = field(default_factory=Counter)  # by status code


@dataclass(slots=True, eq=False)
class SubscriptionMetrics:
    """`standing` is asked at each scrape; a subscription of a non-reliable topic has none, and no lag."""

    standing: Callable[[], Standing] | None = None
    lag_detected: Count = field(default_factory=Count)  # heartbeats that found lag
    heartbeat_polls: Count = field(default_factory=Count)
    notifier_polls: Count = field(default_factory=Count)
    delivered: Count = field(default_factory=Count)  # messages, repeated ones too
    delivered_bytes: Count = field(default_factory=Count)  # payloads
    nacks: Count = field(default_factory=Count)
    redeliveries: Count = field(default_factory=Count)
    ack_timeouts: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)  # non-reliable: the consumer's queue was full
    consumers: Level = field(default_factory=Level)  # non-reliable; of a reliable one its standing says it
    exhausted: Counter[str] = field(default_factory=Counter)  # failed too often, by poison policy


@dataclass(slots=True, eq=False)
class RpcMetrics:
    ok: Count = field(default_factory=Count)
    errors: Count = field(default_factory=Count)


@dataclass(slots=True, eq=False)
class WalMetrics:
    """The log of all topics: commit groups and what was in them."""

    appends: Count = field(default_factory=Count)
    append_bytes: Count = field(default_factory=Count)
    groups: Count = field(default_factory=Count)
    group_latency: Histogram = field(default_factory=Histogram)


class Telemetry:
    """One per broker. `registry` is its own, so that two brokers in one process do not mix."""

    def __init__(self) -> None:
        self.wal = WalMetrics()
        self._topics: dict[str, TopicMetrics] = {}
        self._subscriptions: dict[tuple[str, str], SubscriptionMetrics] = {}
        self._rpcs: dict[tuple[str, str], RpcMetrics] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._process = ProcessCollector(registry=None)

    def topic(self, topic: str) -> TopicMetrics:
        """The same object for the same name, until it is forgotten."""
        if topic not in self._topics:
            self._topics[topic] = TopicMetrics()
        return self._topics[topic]

    def subscription(
        self, topic: str, subscription: str, standing: Callable[[], Standing] | None = None
    ) -> SubscriptionMetrics:
        """The same object for the same names, until it is forgotten. `standing` may follow as its attribute."""
        metrics = self._subscriptions.setdefault((topic, subscription), SubscriptionMetrics())
        metrics.standing = standing or metrics.standing
        return metrics

    def rpc(self, service: str, method: str) -> RpcMetrics:
        return self._rpcs.setdefault((service, method), RpcMetrics())

    def forget_topic(self, topic: str) -> None:
        """With all its subscriptions."""
        self._topics.pop(topic, None)
        for key in [key for key in self._subscriptions if key[0] == topic]:
            del self._subscriptions[key]

    def forget_subscription(self, topic: str, subscription: str) -> None:
        self._subscriptions.pop((topic, subscription), None)

    def snapshot(self) -> Snapshot:
        """A copy that nobody changes. To be taken on the event loop."""
        steps = self.snapshot_in_steps()
        while True:
            try:
                next(steps)
            except StopIteration as done:
                snapshot: Snapshot = done.value
                return snapshot

    def snapshot_in_steps(self) -> Generator[None, None, Snapshot]:
        """The same, in steps of about a millisecond, for a loop that has other things to do."""
        subscriptions = []
        for number, (key, metrics) in enumerate(list(self._subscriptions.items())):
            subscriptions.append(_SubscriptionNow.of(*key, metrics))
            if number % STEP == STEP - 1:
                yield
        wal = self.wal
        return Snapshot(
            topics=[_TopicNow.of(name, metrics) for name, metrics in self._topics.items()],
            subscriptions=subscriptions,
            rpcs=[(*key, metrics.ok.value, metrics.errors.value) for key, metrics in self._rpcs.items()],
            wal=(wal.appends.value, wal.append_bytes.value, wal.groups.value),
            group_latency=wal.group_latency.copy(),
            process=self._process,
        )

    def collect(self) -> Iterator[Metric]:
        """For the registry, in a program that has its own way to export it."""
        return self.snapshot().collect()


# --- what a scrape prints -------------------------------------------------------------------------------


class _TopicNow(NamedTuple):
    topic: tuple[str]
    messages_in: int
    bytes_in: int
    producers: int
    send_latency: Buckets
    send_errors: dict[str, int]

    @classmethod
    def of(cls, name: str, metrics: TopicMetrics) -> _TopicNow:
        return cls(
            (name,),
            metrics.messages_in.value,
            metrics.bytes_in.value,
            metrics.producers.value,
            metrics.send_latency.copy(),
            dict(metrics.send_errors),
        )


class _SubscriptionNow(NamedTuple):
    labels: tuple[str, str]
    counts: tuple[int, ...]  # as COUNTS lists them
    lag: int | None  # None: non-reliable
    consumers: int
    waiting: int
    blocked: bool
    exhausted: dict[str, int]

    @classmethod
    def of(cls, topic: str, subscription: str, metrics: SubscriptionMetrics) -> _SubscriptionNow:
        standing = None if metrics.standing is None else metrics.standing()
        return cls(
            labels=(topic, subscription),
            counts=tuple([getattr(metrics, name).value for name, *_ in COUNTS]),
            lag=standing.lag if standing else None,
            consumers=standing.consumers if standing else metrics.consumers.value,
            waiting=standing.waiting if standing else 0,
            blocked=standing is not None and standing.blocked_offset is not None,
            exhausted=dict(metrics.exhausted),
        )


# Attribute, metric without `_total`, help.
COUNTS: Final = (
    ("lag_detected", "danube_subscription_lag_detected", "Heartbeats that found a message waiting with room for it"),
    ("heartbeat_polls", "danube_dispatcher_heartbeat_polls", "Polls by heartbeat: a notification was missed"),
    ("notifier_polls", "danube_dispatcher_notifier_polls", "Polls by notification, the normal way"),
    ("delivered", "danube_consumer_messages_out", "Messages sent to consumers, repeated ones too"),
    ("delivered_bytes", "danube_consumer_bytes_out", "Payload bytes sent to consumers"),
    ("nacks", "danube_subscription_nack", "Messages that a consumer refused"),
    ("redeliveries", "danube_subscription_redelivery", "Messages sent again"),
    ("ack_timeouts", "danube_subscription_ack_timeout", "Messages not acknowledged in time"),
    ("dropped", "danube_subscription_dropped", "Messages of a non-reliable topic for which a consumer had no room"),
)

Rows: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


class Snapshot(NamedTuple):
    """All numbers of one moment. `collect` makes them families for Prometheus and may run in any thread."""

    topics: list[_TopicNow]
    subscriptions: list[_SubscriptionNow]
    rpcs: list[tuple[str, str, int, int]]
    wal: tuple[int, int, int]
    group_latency: Buckets
    process: ProcessCollector  # reads the system's numbers when asked

    def collect(self) -> Iterator[Metric]:
        yield from self._of_subscriptions()
        yield from self._of_topics()
        yield from self._of_the_broker()
        yield from self.process.collect()

    def _of_subscriptions(self) -> Iterator[Metric]:
        labels = ("topic", "subscription")
        every = self.subscriptions
        for column, (_, metric, text) in enumerate(COUNTS):
            yield _counter(metric, text, labels, [(each.labels, each.counts[column]) for each in every])
        lag = [(each.labels, each.lag) for each in every if each.lag is not None]
        yield _gauge("danube_subscription_lag_messages", "Messages committed and not acknowledged", labels, lag)
        consumers = [(each.labels, each.consumers) for each in every]
        yield _gauge("danube_subscription_active_consumers", "Connected consumers", labels, consumers)
        waiting = [(each.labels, each.waiting) for each in every]
        yield _gauge("danube_subscription_pending_redelivery", "Failed messages to be sent again", labels, waiting)
        blocked = [(each.labels, each.blocked) for each in every]
        yield _gauge("danube_subscription_terminal_blocked", "1 while a poison message blocks it", labels, blocked)
        exhausted = [((*each.labels, policy), n) for each in every for policy, n in each.exhausted.items()]
        yield _counter(
            "danube_subscription_retry_exhausted",
            "Messages that failed too often",
            (*labels, "poison_policy"),
            exhausted,
        )

    def _of_topics(self) -> Iterator[Metric]:
        labels = ("topic",)
        every = self.topics
        messages = [(each.topic, each.messages_in) for each in every]
        yield _counter("danube_topic_messages_in", "Messages published", labels, messages)
        size_bytes = [(each.topic, each.bytes_in) for each in every]
        yield _counter("danube_topic_bytes_in", "Payload bytes published", labels, size_bytes)
        producers = [(each.topic, each.producers) for each in every]
        yield _gauge("danube_topic_active_producers", "Registered producers", labels, producers)

        subscriptions, consumers = Counter[str](), Counter[str]()
        for subscription in self.subscriptions:
            subscriptions[subscription.labels[0]] += 1
            consumers[subscription.labels[0]] += subscription.consumers
        present = [(each.topic, subscriptions[each.topic[0]]) for each in every]
        yield _gauge("danube_topic_active_subscriptions", "Subscriptions", labels, present)
        connected = [(each.topic, consumers[each.topic[0]]) for each in every]
        yield _gauge("danube_topic_active_consumers", "Connected consumers", labels, connected)

        answered = [((*each.topic, "ok", "OK"), sum(each.send_latency.counts)) for each in every]
        refused = [((*each.topic, "error", code), n) for each in every for code, n in each.send_errors.items()]
        sends = ("topic", "result", "error_code")
        yield _counter("danube_producer_send", "Sends answered", sends, [*answered, *refused])
        latency = HistogramMetricFamily(
            "danube_producer_send_latency_ms", "Milliseconds from a send to its answer", labels=labels
        )
        for each in every:
            if any(each.send_latency.counts):  # a histogram has fifteen lines: an idle topic is spared them
                latency.add_metric(each.topic, each.send_latency.cumulative(), each.send_latency.sum_ms)
        yield latency

    def _of_the_broker(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("danube_broker_topics_owned", "Topics served here", value=len(self.topics))
        done = [((service, method, "ok"), ok) for service, method, ok, _ in self.rpcs]
        failed = [((service, method, "error"), errors) for service, method, _, errors in self.rpcs]
        yield _counter("danube_broker_rpc", "Calls answered", ("service", "method", "result"), [*done, *failed])
        appends, append_bytes, groups = self.wal
        yield CounterMetricFamily("danube_wal_append", "Batches appended to the log", value=appends)
        yield CounterMetricFamily("danube_wal_append_bytes", "Bytes appended to the log", value=append_bytes)
        yield CounterMetricFamily("danube_wal_flush", "Commit groups: one sync for many batches", value=groups)
        yield HistogramMetricFamily(
            "danube_wal_flush_latency_ms",
            "Milliseconds that a commit group took",
            buckets=self.group_latency.cumulative(),
            sum_value=self.group_latency.sum_ms,
        )


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


# --- log lines ------------------------------------------------------------------------------------------

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logging(*, level: str = "INFO", as_json: bool = False, stream: TextIO | None = None) -> None:
    """Sends every line of the process to `stream` (standard error), in one of two forms. Replaces earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextLines(logging.Formatter):
    """time LEVEL room: phrase key=value …; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        name = record.name.removeprefix("pydanube.")
        line = f"{_time(record)} {record.levelname} {name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One object per line: time, level, logger, message, and the fields by their names."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            **_fields(record),
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _value(value: object) -> str:
    """Quoted where a reader, or a forged line, could make two fields of it."""
    text = str(value)
    plain = text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain and text else json.dumps(text, ensure_ascii=False)
