"""What a scrape prints: all numbers of one moment, as families for Prometheus or at once as its text.

A broker with a thousand subscriptions has twenty thousand samples. `text` prints them several times faster than a
general exporter: the labels of a subscription are made into text once and stand in fifteen families.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from pydanube.telemetry.counts import Buckets, CloudMetrics, ClusterNow, SubscriptionMetrics, TopicMetrics

# Attribute, metric without `_total`, help.
COUNTS: Final = (
    ("lag_detected", "danube_subscription_lag_detected", "Heartbeats that found a message waiting with room for it"),
    ("heartbeat_polls", "danube_dispatcher_heartbeat_polls", "Polls by heartbeat: a notification was missed"),
    ("notifier_polls", "danube_dispatcher_notifier_polls", "Polls by notification, the normal way"),
    ("delivered", "danube_consumer_messages_out", "Messages sent to consumers, repeated ones too"),
    ("delivered_bytes", "danube_consumer_bytes_out", "Payload bytes sent to consumers"),
    ("nacks", "danube_subscription_nack", "Messages that a consumer refused"),
    ("redeliveries", "danube_subscription_redelivery", "Messages sent again"),
    ("dropped", "danube_subscription_dropped", "Messages of a non-reliable topic for which a consumer had no room"),
    (
        "skipped",
        "danube_subscription_skipped_by_retention",
        "Messages that retention removed before they were acknowledged",
    ),
)

CLOUD_COUNTS: Final = (
    ("objects", "danube_cloud_upload_objects", "Objects uploaded"),
    ("bytes", "danube_cloud_upload_bytes", "Bytes of uploaded objects"),
    ("upload_errors", "danube_cloud_upload_errors", "Uploads that failed and are tried again"),
    ("merges", "danube_cloud_merges", "Small objects made one"),
    ("objects_read", "danube_durable_history_segments_read", "Objects opened for reading"),
    ("bytes_read", "danube_durable_history_read_bytes", "Bytes read from objects"),
    (
        "errors",
        "danube_durable_history_reader_errors",
        "Objects that are missing or damaged, each time one was asked for",
    ),
)

BROKER_STATES: Final = ("active", "draining", "drained")

Labels: TypeAlias = tuple[str, ...]
Rows: TypeAlias = Iterable[tuple[Labels, float]]

_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Family(NamedTuple):
    """One metric. `samples` are suffix of the name, label values and number."""

    name: str
    kind: str
    text: str
    labels: Labels
    samples: Sequence[tuple[str, Labels, float]]


class TopicNow(NamedTuple):
    topic: tuple[str]
    messages_in: int
    bytes_in: int
    producers: int
    send_latency: Buckets
    send_errors: dict[str, int]

    @classmethod
    def of(cls, name: str, metrics: TopicMetrics) -> TopicNow:
        return cls(
            (name,),
            metrics.messages_in.value,
            metrics.bytes_in.value,
            metrics.producers.value,
            metrics.send_latency.copy(),
            dict(metrics.send_errors),
        )


class SubscriptionNow(NamedTuple):
    labels: tuple[str, str]
    counts: tuple[int, ...]  # as COUNTS lists them
    lag: int | None  # None: non-reliable
    consumers: int
    waiting: int
    blocked: bool
    exhausted: dict[str, int]

    @classmethod
    def of(cls, topic: str, subscription: str, metrics: SubscriptionMetrics) -> SubscriptionNow:
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


class CloudNow(NamedTuple):
    """The cloud tier at one moment; `waiting` is None without one."""

    counts: tuple[int, ...]  # as CLOUD_COUNTS lists them
    upload_latency: Buckets
    waiting: tuple[int, int, float] | None  # topics, offsets, seconds of the oldest

    @classmethod
    def of(cls, metrics: CloudMetrics) -> CloudNow:
        counts = tuple([getattr(metrics, name).value for name, *_ in CLOUD_COUNTS])
        return cls(counts, metrics.upload_latency.copy(), metrics.waiting() if metrics.waiting else None)


class Snapshot(NamedTuple):
    """Nobody changes it, so `collect` and `text` may run in any thread."""

    topics: list[TopicNow]
    subscriptions: list[SubscriptionNow]
    rpcs: list[tuple[str, str, int, int]]
    wal: tuple[int, int, int]
    group_latency: Buckets
    cloud: CloudNow
    moves: tuple[dict[str, int], Buckets, int]
    cluster: ClusterNow | None  # None: a broker that is alone
    process: ProcessCollector  # reads the system's numbers when asked

    def collect(self) -> Iterator[Metric]:
        """As prometheus-client has them."""
        for family in self.families():
            metric = Metric(family.name, family.text, family.kind)
            for suffix, values, number in family.samples:
                names = (*family.labels, "le") if suffix == "_bucket" else family.labels
                metric.add_sample(family.name + suffix, dict(zip(names, values, strict=True)), number)
            yield metric
        yield from self.process.collect()

    def text(self) -> bytes:
        """Prometheus' text format, version 0.0.4."""
        known: dict[tuple[Labels, Labels], str] = {}
        lines: list[str] = []
        for family in self.families():
            total = "_total" if family.kind == "counter" else ""
            lines.append(f"# HELP {family.name}{total} {family.text}\n# TYPE {family.name}{total} {family.kind}\n")
            for suffix, values, number in family.samples:
                names = (*family.labels, "le") if suffix == "_bucket" else family.labels
                labels = known.get((names, values))
                if labels is None:
                    labels = known[names, values] = _print_labels(names, values)
                lines.append(f"{family.name}{suffix}{labels} {number}\n")
        for metric in self.process.collect():
            lines.append(f"# HELP {metric.name} {metric.documentation}\n# TYPE {metric.name} {metric.type}\n")
            lines += [f"{sample.name} {sample.value}\n" for sample in metric.samples]
        return "".join(lines).encode()

    def families(self) -> Iterator[Family]:
        yield from self._of_subscriptions()
        yield from self._of_topics()
        yield from self._of_the_broker()

    def _of_subscriptions(self) -> Iterator[Family]:
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
        blocked = [(each.labels, int(each.blocked)) for each in every]
        yield _gauge("danube_subscription_terminal_blocked", "1 while a poison message blocks it", labels, blocked)
        exhausted = [((*each.labels, policy), n) for each in every for policy, n in each.exhausted.items()]
        by_policy = (*labels, "poison_policy")
        yield _counter("danube_subscription_retry_exhausted", "Messages that failed too often", by_policy, exhausted)

    def _of_topics(self) -> Iterator[Family]:
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
        # A histogram has fifteen lines: an idle topic is spared them.
        latency = [sample for each in every for sample in _buckets(each.topic, each.send_latency, spare_empty=True)]
        text = "Milliseconds from a send to its answer"
        yield Family("danube_producer_send_latency_ms", "histogram", text, labels, latency)

    def _of_the_broker(self) -> Iterator[Family]:
        yield _gauge("danube_broker_topics_owned", "Topics served here", (), [((), len(self.topics))])
        done = [((service, method, "ok"), ok) for service, method, ok, _ in self.rpcs]
        failed = [((service, method, "error"), errors) for service, method, _, errors in self.rpcs]
        yield _counter("danube_broker_rpc", "Calls answered", ("service", "method", "result"), [*done, *failed])
        yield from self._of_the_cloud()
        yield from self._of_the_cluster()
        results, pause, fenced = self.moves
        moved = [((result,), results.get(result, 0)) for result in ("ok", "error")]
        yield _counter("danube_topic_unload", "Topics that were to be moved away from here", ("result",), moved)
        yield _counter("danube_broker_fenced", "Times this broker was declared lost", (), [((), fenced)])
        text = "Milliseconds from the first refused publish of a move to the release of the topic"
        yield Family("danube_topic_unload_pause_ms", "histogram", text, (), list(_buckets((), pause)))
        appends, append_bytes, groups = self.wal
        if not groups:
            return  # nothing was written yet, or nobody counts: no number is better than a wrong one
        yield _counter("danube_wal_append", "Batches appended to the log", (), [((), appends)])
        yield _counter("danube_wal_append_bytes", "Bytes appended to the log", (), [((), append_bytes)])
        yield _counter("danube_wal_flush", "Commit groups: one sync for many batches", (), [((), groups)])
        text = "Milliseconds that a commit group took"
        yield Family("danube_wal_flush_latency_ms", "histogram", text, (), list(_buckets((), self.group_latency)))

    def _of_the_cluster(self) -> Iterator[Family]:
        if self.cluster is None:
            return
        state, is_leader, brokers, lease_age = self.cluster
        states = [((each,), float(each == state)) for each in BROKER_STATES]
        yield _gauge("danube_broker_state", "1 for the state that this broker is in", ("state",), states)
        yield _gauge("danube_leader_election_state", "1 if this broker leads the cluster", (), [((), float(is_leader))])
        yield _gauge("danube_cluster_brokers", "Living brokers, as this one sees them", (), [((), float(brokers))])
        text = "Seconds since the last renewal of this broker's lease that was answered"
        yield _gauge("danube_broker_lease_age_seconds", text, (), [((), lease_age)])

    def _of_the_cloud(self) -> Iterator[Family]:
        if self.cloud.waiting is None:
            return
        for (_, metric, text), number in zip(CLOUD_COUNTS, self.cloud.counts, strict=True):
            yield _counter(metric, text, (), [((), number)])
        topics, offsets, seconds = self.cloud.waiting
        yield _gauge("danube_cloud_upload_topics_waiting", "Topics with messages not uploaded yet", (), [((), topics)])
        yield _gauge("danube_cloud_upload_lag_messages", "Messages not uploaded yet", (), [((), offsets)])
        text = "Seconds since the oldest topic that waits began to wait for its upload"
        yield _gauge("danube_cloud_upload_lag_seconds", text, (), [((), seconds)])
        latency = list(_buckets((), self.cloud.upload_latency))
        text = "Milliseconds that an upload took, until it had its descriptor"
        yield Family("danube_cloud_upload_latency_ms", "histogram", text, (), latency)


def _counter(name: str, text: str, labels: Labels, rows: Rows) -> Family:
    return Family(name, "counter", text, labels, [("_total", values, number) for values, number in rows])


def _gauge(name: str, text: str, labels: Labels, rows: Rows) -> Family:
    return Family(name, "gauge", text, labels, [("", values, number) for values, number in rows])


def _buckets(values: Labels, buckets: Buckets, *, spare_empty: bool = False) -> Iterator[tuple[str, Labels, float]]:
    count = sum(buckets.counts)
    if count or not spare_empty:
        for bound, number in buckets.cumulative():
            yield "_bucket", (*values, bound), number
        yield "_count", values, count
        yield "_sum", values, buckets.sum_ms


def _print_labels(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    return (
        "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)) + "}"
    )
