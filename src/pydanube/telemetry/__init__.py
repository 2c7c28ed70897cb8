"""What an operator sees: the names of metrics, and the format of log lines.

    metrics = telemetry.topic("/default/orders")     once, when the topic opens
    metrics.messages_in.inc()                        per message: one addition, no lock, no label lookup
    telemetry.forget_topic("/default/orders")        when it closes

A scrape copies all numbers on the event loop, in short steps, and may print the copy in a thread. What can be computed
is: the lag of a subscription is asked from its dispatch machine at the scrape, so it is right with no consumer and
while acks are pending. Every series of a subscription exists, at 0, from its creation until it is forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from pydanube.core.dispatch.lag import Standing
from pydanube.core.pipelines.conditions import PipelineRow
from pydanube.telemetry.counts import (
    CloudMetrics,
    ClusterMetrics,
    ClusterNow,
    Count,
    DispatchNow,
    GaugeValue,
    Histogram,
    MoveMetrics,
    PressureNow,
    RpcMetrics,
    SubscriptionMetrics,
    TopicMetrics,
    WalMetrics,
)
from pydanube.telemetry.lines import JsonLines, TextLines, configure_logging
from pydanube.telemetry.now import (
    BrokerNow,
    CloudNow,
    DiskSpace,
    MovesNow,
    SubscriptionNow,
    TopicNow,
    WalNow,
)
from pydanube.telemetry.scrape import MetricsSnapshot

__all__ = [
    "CloudMetrics",
    "ClusterMetrics",
    "ClusterNow",
    "Count",
    "DiskSpace",
    "DispatchNow",
    "GaugeValue",
    "Histogram",
    "JsonLines",
    "MetricsSnapshot",
    "MoveMetrics",
    "PressureNow",
    "RpcMetrics",
    "Sources",
    "SubscriptionMetrics",
    "Telemetry",
    "TextLines",
    "TopicMetrics",
    "WalMetrics",
    "configure_logging",
]

STEP: Final = 32  # subscriptions, or topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a broker is asked at each scrape."""

    broker: str  # its id
    about: Mapping[str, str]  # version and mode
    cluster: Callable[[], ClusterNow] | None = None  # None: a broker that is alone
    dispatch: Callable[[], DispatchNow] | None = None
    unopened: Callable[[], int] | None = None  # topics that could not be opened
    crashes: Callable[[], int] | None = None  # starts without an orderly stop before, of a broker that is alone
    disk_space: Callable[[], DiskSpace] | None = None  # of the disk; None: there is none
    # Topics with something to upload, how many offsets, and since how many seconds; None: there is no cloud tier.
    waiting: Callable[[], tuple[int, int, float]] | None = None
    pipelines: Callable[[], Sequence[PipelineRow]] | None = None


class Telemetry:
    """One per broker. `registry` is its own, so that two brokers in one process do not mix.

    `broker` is its id, and stands as a label in every series; "" until it is known.
    """

    def __init__(self) -> None:
        self.broker = ""
        self.about: dict[str, str] = {}  # version and mode
        self.wal = WalMetrics()
        self.cloud = CloudMetrics()
        self.moves = MoveMetrics()
        self.members = ClusterMetrics()
        self.loop_lag = Histogram()  # how late the event loop was
        self.redirects = Counter[tuple[str, str]]()  # clients sent elsewhere, by reason and namespace
        # Asked at each scrape.
        self.cluster: Callable[[], ClusterNow] | None = None  # None: a broker that is alone
        self.dispatch: Callable[[], DispatchNow] | None = None
        self.unopened: Callable[[], int] | None = None  # topics that could not be opened
        self.crashes: Callable[[], int] | None = None
        self.disk_space: Callable[[], DiskSpace] | None = None  # of the disk; None: there is none
        self.waiting: Callable[[], tuple[int, int, float]] | None = None  # for the object store
        self.pipelines: Callable[[], Sequence[PipelineRow]] | None = None
        self._topics: dict[str, TopicMetrics] = {}
        self._subscriptions: dict[tuple[str, str], SubscriptionMetrics] = {}
        self._producers: dict[str, Callable[[], int]] = {}
        self._standings: dict[tuple[str, str], Callable[[], Standing]] = {}
        self._rpcs: dict[tuple[str, str], RpcMetrics] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._process = ProcessCollector(registry=None)

    def set_sources(self, sources: Sources) -> None:
        """The broker is made: from now on it is asked at each scrape."""
        self.broker = sources.broker
        self.about = dict(sources.about)
        self.cluster = sources.cluster
        self.dispatch = sources.dispatch
        self.unopened = sources.unopened
        self.crashes = sources.crashes
        self.disk_space = sources.disk_space
        self.waiting = sources.waiting
        self.pipelines = sources.pipelines

    def topic(self, topic: str, producers: Callable[[], int] | None = None) -> TopicMetrics:
        """The same object for the same name, until it is forgotten. `producers` is asked at each scrape: how many are
        registered.
        """
        if topic not in self._topics:
            self._topics[topic] = TopicMetrics()
        if producers is not None:
            self._producers[topic] = producers
        return self._topics[topic]

    def subscription(
        self, topic: str, subscription: str, standing: Callable[[], Standing] | None = None
    ) -> SubscriptionMetrics:
        """The same object for the same names, until it is forgotten. `standing` is asked at each scrape, and may come
        later; a subscription of a non-reliable topic has none, and no lag.
        """
        if standing is not None:
            self._standings[topic, subscription] = standing
        return self._subscriptions.setdefault((topic, subscription), SubscriptionMetrics())

    def rpc(self, service: str, method: str) -> RpcMetrics:
        return self._rpcs.setdefault((service, method), RpcMetrics())

    def forget_topic(self, topic: str) -> None:
        """With all its subscriptions."""
        self._topics.pop(topic, None)
        self._producers.pop(topic, None)
        for key in [key for key in self._subscriptions if key[0] == topic]:
            self.forget_subscription(*key)

    def forget_subscription(self, topic: str, subscription: str) -> None:
        self._subscriptions.pop((topic, subscription), None)
        self._standings.pop((topic, subscription), None)

    def snapshot(self) -> MetricsSnapshot:
        """An immutable copy. To be taken on the event loop."""
        steps = self.snapshot_in_steps()
        while True:
            try:
                next(steps)
            except StopIteration as done:
                snapshot: MetricsSnapshot = done.value
                return snapshot

    def snapshot_in_steps(self) -> Generator[None, None, MetricsSnapshot]:
        """The same, in steps of about a millisecond, for a loop that has other things to do."""
        subscriptions = []
        for number, (key, metrics) in enumerate(list(self._subscriptions.items())):
            subscriptions.append(SubscriptionNow.of(*key, metrics, self._standings.get(key)))
            if number % STEP == STEP - 1:
                yield
        topics = []
        for number, (name, counted) in enumerate(list(self._topics.items())):
            topics.append(TopicNow.of(name, counted, self._producers.get(name)))
            if number % STEP == STEP - 1:
                yield
        return MetricsSnapshot(
            topics=topics,
            subscriptions=subscriptions,
            rpcs=[(*key, metrics.ok.value, metrics.errors.value) for key, metrics in self._rpcs.items()],
            wal=WalNow.of(self.wal),
            cloud=CloudNow.of(self.cloud, self.waiting),
            moves=MovesNow.of(self.moves, self.members),
            cluster=self.cluster() if self.cluster is not None else None,
            broker=BrokerNow(
                self.broker,
                dict(self.about),
                self.loop_lag.copy(),
                dict(self.redirects),
                self.unopened() if self.unopened is not None else 0,
                self.dispatch() if self.dispatch is not None else None,
                self.crashes() if self.crashes is not None else None,
                list(self.pipelines()) if self.pipelines is not None else (),
            ),
            disk_space=self.disk_space,
            process=self._process,
        )

    def collect(self) -> Iterator[Metric]:
        """For the registry, in a program that has its own way to export it."""
        return self.snapshot().collect()
