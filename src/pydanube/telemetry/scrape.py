"""What a scrape prints: all numbers of one moment, as families for Prometheus or directly as its text.

A broker with a thousand busy topics has fifty thousand lines. `text` prints them several times faster than a general
exporter: the labels of a subscription are made into text once, for all families of subscriptions.

Every series has the label `broker`, the id of the broker that counted it. A histogram of a topic where nothing happened
yet is spared its fifteen lines; everything else is there, at 0, from the beginning. `docs/metrics.md` lists it all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from pydanube.telemetry.counts import (
    PHASES,
    ClusterNow,
)
from pydanube.telemetry.families import (
    Family,
    Series,
    by_word,
    counter_family,
    family_of,
    gauge_family,
    histogram_family,
)
from pydanube.telemetry.now import (
    CLOUD_COUNTS,
    COUNTS,
    BrokerNow,
    CloudNow,
    DiskSpace,
    MovesNow,
    SubscriptionNow,
    TopicNow,
    WalNow,
)
from pydanube.telemetry.pipelines import pipeline_families
from pydanube.telemetry.schema_families import schema_families

BROKER_STATES: Final = ("active", "draining", "drained")
ROTATIONS: Final = ("size", "time", "room", "failure")
DELETIONS: Final = ("retention", "adopted")
READS: Final = ("memory", "file", "cloud")
CUTS: Final = ("objects", "seal", "segment")
REBALANCES: Final = ("automatic", "manual")
DRAINED_FOR: Final = (
    "stale_restart",
    "registration_expired",
    "admin_unload",
    "drain_complete",
    "no_topics",
    "join",
)
RETURNS: Final = ("rejoined", "no_active_broker")
DEAD_LETTER: Final = "DeadLetter"


class MetricsSnapshot(NamedTuple):
    """Immutable, so `collect` and `text` may run in any thread."""

    topics: list[TopicNow]
    subscriptions: list[SubscriptionNow]
    rpcs: list[tuple[str, str, int, int]]
    wal: WalNow
    cloud: CloudNow
    moves: MovesNow
    cluster: ClusterNow | None  # None: a broker that is alone
    broker: BrokerNow
    disk_space: Callable[[], DiskSpace] | None  # asks the system, as `process` does
    process: ProcessCollector  # reads the system's numbers when asked

    def collect(self) -> Iterator[Metric]:
        """As prometheus-client has them."""
        whose = {"broker": self.broker.broker} if self.broker.broker else {}
        for family in self.families():
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, number in family.samples():
                metric.add_sample(name, labels | whose, number)
            yield metric
        for metric in self.process.collect():
            metric.samples = [sample._replace(labels=sample.labels | whose) for sample in metric.samples]
            yield metric

    def text(self) -> bytes:
        """Prometheus' text format, version 0.0.4."""
        return b"".join(self.pieces())

    def pieces(self) -> list[bytes]:
        """The same, for a connection that need not have it in one piece."""
        whose = (("broker", self.broker.broker),) if self.broker.broker else ()
        return [piece.encode() for family in self._all_families() for piece in family.lines(whose)]

    def _all_families(self) -> Iterator[Family]:
        yield from self.families()
        for metric in self.process.collect():
            rows = [((), sample.value) for sample in metric.samples]
            yield family_of(metric.type, metric.name, metric.documentation, (), rows)

    def families(self) -> Iterator[Family]:
        yield from self._of_subscriptions()
        yield from self._of_topics()
        yield from self._of_the_broker()
        yield from pipeline_families(self.broker.pipelines)

    def _of_subscriptions(self) -> Iterator[Family]:
        labels = ("topic", "subscription")
        every = self.subscriptions
        series = Series(labels, [each.labels for each in every])

        def counter(name: str, text: str, numbers: Sequence[float]) -> Family:
            return Family(name, "counter", text, series, numbers)

        def gauge(name: str, text: str, numbers: Sequence[float]) -> Family:
            return Family(name, "gauge", text, series, numbers)

        for column, (_, metric, text) in enumerate(COUNTS):
            yield counter(metric, text, [each.counts[column] for each in every])
        lag = [(each.labels, each.lag) for each in every if each.lag is not None]
        text = "Messages committed and not acknowledged"
        if len(lag) == len(every):
            yield gauge("danube_subscription_lag_messages", text, [number for _, number in lag])
        else:
            yield gauge_family("danube_subscription_lag_messages", text, labels, lag)
        text = "Age of the oldest message that was not acknowledged; no line: not known"
        late = [(each.labels, each.lag_seconds) for each in every if each.lag_seconds is not None]
        yield gauge_family("danube_subscription_lag_seconds", text, labels, late)
        text = "Messages that are not to be delivered yet, as far as the subscription has come to them; they are no lag"
        later = [(each.labels, each.scheduled) for each in every if each.scheduled is not None]
        yield gauge_family("danube_subscription_scheduled_messages", text, labels, later)
        text = "Until it has caught up, at the rate of the last minute: +Inf if never; no line: not known"
        hopes = [(each.labels, each.catch_up_seconds) for each in every if each.catch_up_seconds is not None]
        yield gauge_family("danube_subscription_catch_up_seconds", text, labels, hopes)
        consumers = [each.consumers for each in every]
        yield gauge("danube_subscription_active_consumers", "Connected consumers", consumers)
        waiting = [each.waiting for each in every]
        yield gauge("danube_subscription_pending_redelivery", "Failed messages to be sent again", waiting)
        blocked = [int(each.blocked) for each in every]
        yield gauge("danube_subscription_terminal_blocked", "1 while a poison message blocks it", blocked)
        exhausted = [((*each.labels, policy), n) for each in every for policy, n in each.exhausted.items()]
        by_policy = (*labels, "poison_policy")
        yield counter_family(
            "danube_subscription_retry_exhausted", "Messages that failed too often", by_policy, exhausted
        )
        copied = [((*each.labels, DEAD_LETTER), each.dead_lettered) for each in every]
        yield counter_family("danube_subscription_dlq", "Messages copied to the dead-letter topic", by_policy, copied)
        timed_out = [each.timed_out for each in every]
        text = "Messages taken back because no ack came in time"
        yield counter("danube_subscription_ack_timeout", text, timed_out)

    def _of_topics(self) -> Iterator[Family]:
        labels = ("topic",)
        every = self.topics
        series = Series(labels, [each.topic for each in every])
        messages = [each.messages_in for each in every]
        yield Family("danube_topic_messages_in", "counter", "Messages published", series, messages)
        size_bytes = [each.bytes_in for each in every]
        yield Family("danube_topic_bytes_in", "counter", "Payload bytes published", series, size_bytes)
        producers = [each.producers for each in every]
        yield Family("danube_topic_active_producers", "gauge", "Registered producers", series, producers)

        subscriptions, consumers = Counter[str](), Counter[str]()
        for subscription in self.subscriptions:
            subscriptions[subscription.labels[0]] += 1
            consumers[subscription.labels[0]] += subscription.consumers
        present = [subscriptions[each.topic[0]] for each in every]
        yield Family("danube_topic_active_subscriptions", "gauge", "Subscriptions", series, present)
        connected = [consumers[each.topic[0]] for each in every]
        yield Family("danube_topic_active_consumers", "gauge", "Connected consumers", series, connected)

        answered = [((*each.topic, "ok", "OK"), sum(each.send_latency.counts)) for each in every]
        refused = [((*each.topic, "error", code), n) for each in every for code, n in each.send_errors.items()]
        sends = ("topic", "result", "error_code")
        yield counter_family("danube_producer_send", "Sends answered", sends, [*answered, *refused])
        yield from schema_families((*each.topic, *each.schemas) for each in every)
        # A histogram has fifteen lines: an idle topic is spared them.
        latency = [(each.topic, each.send_latency) for each in every if any(each.send_latency.counts)]
        text = "Milliseconds from a send to its answer"
        yield histogram_family("danube_producer_send_latency_ms", text, labels, latency)
        sizes = [(each.topic, each.sizes) for each in every if any(each.sizes.counts)]
        text = "Bytes of a message: its payload, or in a native batch the average of the batch, all columns counted"
        yield histogram_family("danube_topic_message_size_bytes", text, labels, sizes)
        orphaned = [each for each in every if each.orphans[0]]
        text = "Ranges of offsets that only the disk of a lost broker has; topics that have some"
        yield gauge_family(
            "danube_topic_orphan_ranges", text, labels, [(each.topic, each.orphans[0]) for each in orphaned]
        )
        text = "Offsets in those ranges: at most so many messages"
        yield gauge_family(
            "danube_topic_orphan_messages", text, labels, [(each.topic, each.orphans[1]) for each in orphaned]
        )

    def _of_the_broker(self) -> Iterator[Family]:
        about = self.broker.about
        if about:
            text = "1; what this broker is"
            yield gauge_family("danube_broker_info", text, tuple(about), [(tuple(about.values()), 1)])
        yield gauge_family("danube_broker_topics_owned", "Topics served here", (), [((), len(self.topics))])
        text = "Topics that are this broker's and could not be opened"
        yield gauge_family("danube_broker_topics_unopened", text, (), [((), self.broker.unopened)])
        crashes = self.cluster.crashes if self.cluster is not None else self.broker.crashes
        if crashes is not None:
            text = "How often this broker began anew without an orderly stop before, in all its lives; "
            text += "also of one that is alone"
            yield gauge_family("danube_broker_unexpected_starts", text, (), [((), float(crashes))])
        text = "Ranges of offsets of the topics here that only the disk of a lost broker has"
        yield gauge_family(
            "danube_broker_orphan_ranges", text, (), [((), sum(each.orphans[0] for each in self.topics))]
        )
        done = [((service, method, "ok"), ok) for service, method, ok, _ in self.rpcs]
        failed = [((service, method, "error"), errors) for service, method, _, errors in self.rpcs]
        yield counter_family("danube_broker_rpc", "Calls answered", ("service", "method", "result"), [*done, *failed])
        redirects = list(self.broker.redirects.items())
        text = "Clients that were told to go to another broker"
        yield counter_family("danube_client_redirects", text, ("reason", "topic_ns"), redirects)
        text = "Milliseconds by which the event loop was late, looked at ten times a second"
        yield histogram_family("danube_event_loop_lag_ms", text, (), [((), self.broker.loop_lag)])
        if self.broker.dispatch is not None:
            decoded, decoded_max, outboxes, outboxes_max = self.broker.dispatch
            text = "Bytes of messages kept decoded for the next reader of the same place"
            yield gauge_family("danube_dispatch_decoded_bytes", text, (), [((), decoded)])
            text = "How many they may be (dispatch.decoded_mb)"
            yield gauge_family("danube_dispatch_decoded_limit_bytes", text, (), [((), decoded_max)])
            text = "Bytes of messages that gRPC consumers, and those of non-reliable topics, have not been sent yet"
            yield gauge_family("danube_dispatch_outbox_bytes", text, (), [((), outboxes)])
            text = "How many they may be (dispatch.outbox_mb); each consumer may have one message beyond it"
            yield gauge_family("danube_dispatch_outbox_limit_bytes", text, (), [((), outboxes_max)])
        yield from self._of_the_log()
        yield from self._of_the_cloud()
        yield from self._of_the_disk()
        yield from self._of_moves()
        yield from self._of_the_cluster()

    def _of_the_log(self) -> Iterator[Family]:
        wal = self.wal
        appends, append_bytes, groups = wal.counts
        yield counter_family("danube_wal_append", "Batches appended to the log", (), [((), appends)])
        yield counter_family("danube_wal_append_bytes", "Bytes appended to the log", (), [((), append_bytes)])
        yield counter_family("danube_wal_flush", "Commit groups: one sync for many batches", (), [((), groups)])
        text = "Milliseconds that a commit took, from the forming of its group until it was on disk"
        yield histogram_family("danube_wal_flush_latency_ms", text, (), [((), wal.group_latency)])
        rotated = by_word(ROTATIONS, wal.rotations)
        yield counter_family(
            "danube_wal_file_rotate", "Segments that were full or old, or had to go", ("reason",), rotated
        )
        dropped = by_word(DELETIONS, wal.deletions)
        yield counter_family("danube_wal_delete", "Segments dropped from the log", ("reason",), dropped)
        read = by_word(READS, wal.reads)
        yield counter_family("danube_wal_reader_create", "Pieces of topics read, by where they were", ("mode",), read)
        text = "Readers that came from the cloud tier to the log"
        yield counter_family("danube_handoff_durable_history_to_hot", text, (), [((), wal.handoffs)])
        if wal.pressure is not None:
            queued, partial, limit, held, refused = wal.pressure
            text = "Bytes that have come and are not on disk yet, wherever they wait"
            yield gauge_family("danube_wal_pending_bytes", text, (), [((), queued)])
            text = "How many they may be (storage.wal.pending_mb): then producers are not read from, or refused"
            yield gauge_family("danube_wal_pending_limit_bytes", text, (), [((), limit)])
            yield gauge_family(
                "danube_wal_partial_bytes", "Bytes of frames that have come in part", (), [((), partial)]
            )
            text = "Native connections that are not read from because too much waits for the disk"
            yield gauge_family("danube_wal_held_connections", text, (), [((), held)])
            text = "Sends refused because too much waits for the disk"
            yield counter_family("danube_wal_busy", text, (), [((), refused)])
        text = "Sessions of idempotent producers that are remembered, in all topics"
        yield gauge_family("danube_producer_sessions", text, (), [((), wal.sessions)])
        text = "Sessions that ended because they were not used for storage.wal.session_hours"
        yield counter_family("danube_producer_sessions_ended", text, (), [((), wal.sessions_ended)])
        text = "Sessions that did not fit where the next owner looks: it does not know them"
        yield counter_family("danube_producer_sessions_cut", text, ("place",), by_word(CUTS, wal.sessions_cut))
        if wal.size_bytes is not None:
            yield gauge_family("danube_wal_size_bytes", "Bytes of the log's segments", (), [((), wal.size_bytes)])
            text = "How many they may be before publishes are refused (storage.wal.max_mb); 0: the disk is the bound"
            yield gauge_family("danube_wal_limit_bytes", text, (), [((), wal.bytes_max)])

    def _of_the_disk(self) -> Iterator[Family]:
        if self.disk_space is None:
            return
        try:
            used, free = self.disk_space()
        except OSError:
            return  # no number is better than a wrong one, and an alert notices that it is absent
        text = "Room left on the disk of the data directory, for ordinary processes"
        yield gauge_family("danube_disk_free_bytes", text, (), [((), free)])
        yield gauge_family("danube_disk_used_bytes", "What is used of that disk, by whomever", (), [((), used)])

    def _of_moves(self) -> Iterator[Family]:
        moves = self.moves
        moved = by_word(("ok", "error"), moves.results)
        yield counter_family("danube_topic_unload", "Topics that were to be moved away from here", ("result",), moved)
        yield counter_family("danube_broker_fenced", "Times this broker was declared lost", (), [((), moves.fenced)])
        text = "Acknowledged messages that did not fit beside a cursor when its topic left or closed: delivered again"
        yield counter_family("danube_cursor_acks_cut", text, (), [((), moves.acks_cut)])
        text = "Milliseconds from the first refused publish of a move to the release of the topic"
        yield histogram_family("danube_topic_unload_pause_ms", text, (), [((), moves.pause)])
        names = (*PHASES, *(name for name in moves.phases if name not in PHASES))
        phases = [((name,), moves.phases[name]) for name in names]
        text = "Milliseconds that each phase of a move took"
        yield histogram_family("danube_topic_unload_phase_ms", text, ("phase",), phases)

    def _of_the_cluster(self) -> Iterator[Family]:
        now, moves = self.cluster, self.moves
        if now is None:
            return
        states = [((each,), float(each == now.state)) for each in BROKER_STATES]
        yield gauge_family("danube_broker_state", "1 for the state that this broker is in", ("state",), states)
        drained = {now.drained_for: 1} if now.drained_for else {}
        text = "1 for the reason why this broker is drained"
        yield gauge_family("danube_broker_drained", text, ("reason",), by_word(DRAINED_FOR, drained))
        text = "1 if this broker leads the cluster"
        yield gauge_family("danube_leader_election_state", text, (), [((), float(now.is_leader))])
        yield gauge_family(
            "danube_cluster_brokers", "Living brokers, as this one sees them", (), [((), float(now.brokers))]
        )
        text = "Seconds since the last renewal of this broker's lease that was answered"
        yield gauge_family("danube_broker_lease_age_seconds", text, (), [((), now.lease_age_seconds)])
        text = "Seconds after which a lease that is not renewed has run out"
        yield gauge_family("danube_broker_lease_ttl_seconds", text, (), [((), now.lease_ttl_seconds)])
        text = "0 while this broker is fenced: its lease was not renewed in time, and it serves nothing"
        yield gauge_family("danube_broker_may_serve", text, (), [((), float(now.may_serve))])
        size_bytes, quota_bytes = moves.metadata
        text = "Size of the metadata store's database, of the member that this broker asks; 0: not known"
        yield gauge_family("danube_metadata_size_bytes", text, (), [((), float(size_bytes))])
        text = "Size at which the metadata store takes no change any more; 0: not known, or none"
        yield gauge_family("danube_metadata_quota_bytes", text, (), [((), float(quota_bytes))])
        text = "Topics that no broker has, as this one sees it"
        yield gauge_family("danube_cluster_topics_unassigned", text, (), [((), now.unassigned)])
        yield gauge_family(
            "danube_topic_moves_in_progress", "Topics that are leaving this broker", (), [((), now.moving)]
        )
        actions = [
            ((self.broker.broker, action), n) for action, n in zip(("assign", "unassign"), moves.taken, strict=True)
        ]
        text = "Topics that this broker took, and let go or lost"
        yield counter_family("danube_broker_assignments", text, ("broker_id", "action"), actions)
        begun = by_word(REBALANCES, moves.rebalances)
        text = "Moves that this broker began in order to even the cluster out"
        yield counter_family("danube_rebalancing_moves", text, ("reason",), begun)
        back = by_word(RETURNS, moves.returns)
        text = "Brokers that had been away and that this one activated: itself, or as the leader when nobody was active"
        yield counter_family("danube_broker_returns", text, ("reason",), back)
        text = "Such moves of topics of this broker that failed"
        yield counter_family("danube_rebalancing_failures", text, (), [((), moves.rebalance_failures)])
        text = "Seconds that a round of the leader took: a look at the cluster, and writing what it decided"
        yield histogram_family("danube_rebalancing_cycle_duration_seconds", text, (), [((), moves.cycle)])
        if now.imbalance is not None:
            text = "How unevenly the load lies: standard deviation over mean. Only the leader says it"
            yield gauge_family("danube_cluster_imbalance_cv", text, (), [((), now.imbalance)])

    def _of_the_cloud(self) -> Iterator[Family]:
        if self.cloud.waiting is None:
            return
        for (_, metric, text), number in zip(CLOUD_COUNTS, self.cloud.counts, strict=True):
            yield counter_family(metric, text, (), [((), number)])
        topics, offsets, seconds = self.cloud.waiting
        yield gauge_family(
            "danube_cloud_upload_topics_waiting", "Topics with messages not uploaded yet", (), [((), topics)]
        )
        yield gauge_family("danube_cloud_upload_lag_messages", "Messages not uploaded yet", (), [((), offsets)])
        text = "Seconds since the oldest topic that waits began to wait for its upload"
        yield gauge_family("danube_cloud_upload_lag_seconds", text, (), [((), seconds)])
        text = "Milliseconds that an upload took, until it had its descriptor"
        yield histogram_family("danube_cloud_upload_latency_ms", text, (), [((), self.cloud.upload_latency)])
