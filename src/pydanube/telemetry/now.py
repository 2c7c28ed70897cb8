"""All numbers of one moment, copied from the counts: what `scrape` prints, in any thread, while the counts go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from pydanube.core.dispatch.lag import Standing
from pydanube.core.pipelines.conditions import PipelineRow
from pydanube.telemetry.counts import (
    Buckets,
    CloudMetrics,
    ClusterMetrics,
    DispatchNow,
    MoveMetrics,
    PressureNow,
    SubscriptionMetrics,
    TopicMetrics,
    WalMetrics,
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
    ("errors", "danube_durable_history_reader_errors", "Objects missing or damaged, each time one was asked for"),
)

_counts_of: Final = attrgetter(*(f"{name}.value" for name, *_ in COUNTS))
_cloud_counts_of: Final = attrgetter(*(f"{name}.value" for name, *_ in CLOUD_COUNTS))


class TopicNow(NamedTuple):
    topic: tuple[str]
    messages_in: int
    bytes_in: int
    producers: int
    sizes: Buckets
    send_latency: Buckets
    send_errors: dict[str, int]
    schemas: tuple[dict[str, int], dict[str, int]]  # looked at by policy, not fitting by reason
    orphans: tuple[int, int]  # ranges, offsets in them

    @classmethod
    def of(cls, name: str, metrics: TopicMetrics, producers: Callable[[], int] | None) -> TopicNow:
        return cls(
            (name,),
            metrics.messages_in.value,
            metrics.bytes_in.value,
            producers() if producers is not None else 0,
            metrics.sizes.copy(),
            metrics.send_latency.copy(),
            dict(metrics.send_errors),
            (dict(metrics.schema_checks), dict(metrics.schema_failures)),
            (metrics.orphan_ranges.value, metrics.orphan_messages.value),
        )


class SubscriptionNow(NamedTuple):
    labels: tuple[str, str]
    counts: tuple[int, ...]  # as COUNTS lists them
    lag: int | None  # None: non-reliable
    consumers: int
    waiting: int
    blocked: bool
    timed_out: int
    exhausted: dict[str, int]
    dead_lettered: int
    lag_seconds: float | None = None
    catch_up_seconds: float | None = None
    scheduled: int | None = None  # None: non-reliable

    @classmethod
    def of(
        cls, topic: str, subscription: str, metrics: SubscriptionMetrics, ask: Callable[[], Standing] | None
    ) -> SubscriptionNow:
        standing = None if ask is None else ask()
        return cls(
            labels=(topic, subscription),
            counts=_counts_of(metrics),
            lag=standing.lag if standing else None,
            consumers=standing.consumers if standing else metrics.consumers.value,
            waiting=standing.waiting if standing else 0,
            blocked=standing is not None and standing.blocked_offset is not None,
            timed_out=standing.timed_out if standing else 0,
            exhausted=dict(metrics.exhausted),
            dead_lettered=metrics.dead_lettered.value,
            lag_seconds=0.0 if standing and standing.lag == 0 else metrics.lag_seconds,
            catch_up_seconds=0.0 if standing and standing.lag == 0 else metrics.catch_up_seconds,
            scheduled=standing.scheduled if standing else None,
        )


class CloudNow(NamedTuple):
    """The cloud tier at one moment; `waiting` is None without one."""

    counts: tuple[int, ...]  # as CLOUD_COUNTS lists them
    upload_latency: Buckets
    waiting: tuple[int, int, float] | None  # topics, offsets, seconds of the oldest

    @classmethod
    def of(cls, metrics: CloudMetrics, waiting: Callable[[], tuple[int, int, float]] | None) -> CloudNow:
        return cls(_cloud_counts_of(metrics), metrics.upload_latency.copy(), waiting() if waiting else None)


class WalNow(NamedTuple):
    counts: tuple[int, int, int]  # batches, bytes, groups
    group_latency: Buckets
    rotations: dict[str, int]
    deletions: dict[str, int]
    reads: dict[str, int]
    handoffs: int
    size_bytes: int | None
    bytes_max: int
    pressure: PressureNow | None
    sessions: int
    sessions_ended: int
    sessions_cut: dict[str, int]

    @classmethod
    def of(cls, metrics: WalMetrics) -> WalNow:
        return cls(
            (metrics.appends.value, metrics.append_bytes.value, metrics.groups.value),
            metrics.group_latency.copy(),
            dict(metrics.rotations),
            dict(metrics.deletions),
            dict(metrics.reads),
            metrics.handoffs.value,
            metrics.size_bytes() if metrics.size_bytes is not None else None,
            metrics.bytes_max,
            metrics.pressure() if metrics.pressure is not None else None,
            metrics.sessions() if metrics.sessions is not None else 0,
            metrics.sessions_ended.value,
            dict(metrics.sessions_cut),
        )


class MovesNow(NamedTuple):
    results: dict[str, int]
    pause: Buckets
    phases: dict[str, Buckets]
    fenced: int
    acks_cut: int
    taken: tuple[int, int]  # topics taken, topics released or lost
    rebalances: dict[str, int]
    rebalance_failures: int
    cycle: Buckets
    metadata: tuple[int, int]  # bytes that the metadata store has, and may have
    returns: dict[str, int]

    @classmethod
    def of(cls, moves: MoveMetrics, members: ClusterMetrics) -> MovesNow:
        return cls(
            dict(moves.results),
            moves.pause.copy(),
            {name: histogram.copy() for name, histogram in moves.phases.items()},
            moves.fenced.value,
            moves.acks_cut.value,
            (members.assigned.value, members.unassigned.value),
            dict(members.rebalances),
            members.rebalance_failures.value,
            members.cycle.copy(),
            (members.metadata_size_bytes, members.metadata_quota_bytes),
            dict(members.returns),
        )


class BrokerNow(NamedTuple):
    broker: str
    about: dict[str, str]
    loop_lag: Buckets
    redirects: dict[tuple[str, str], int]
    unopened: int
    dispatch: DispatchNow | None = None
    crashes: int | None = None  # of a broker that is alone
    pipelines: Sequence[PipelineRow] = ()


class DiskSpace(NamedTuple):
    """Of the disk that holds the data directory."""

    used_bytes: int
    free_bytes: int  # for ordinary processes
