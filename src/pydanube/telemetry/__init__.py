"""What an operator sees: the names of metrics, and the format of log lines.

    metrics = telemetry.topic("/default/orders")     once, when the topic opens
    metrics.messages_in.inc()                        per message: one addition, no lock, no label lookup
    telemetry.forget_topic("/default/orders")        when it closes

A scrape copies all numbers on the event loop, in short steps, and may print the copy in a thread. What can be computed
is: the lag of a subscription is asked from its dispatch machine at the scrape, so it is right with no consumer and
while acks are pending. Every series of a subscription exists, at 0, from its creation until it is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from pydanube.core.lag import Standing
from pydanube.telemetry.counts import (
    CloudMetrics,
    ClusterNow,
    Count,
    Histogram,
    Level,
    MoveMetrics,
    RpcMetrics,
    SubscriptionMetrics,
    TopicMetrics,
    WalMetrics,
)
from pydanube.telemetry.lines import JsonLines, TextLines, configure_logging
from pydanube.telemetry.scrape import CloudNow, Snapshot, SubscriptionNow, TopicNow

__all__ = [
    "CloudMetrics",
    "ClusterNow",
    "Count",
    "Histogram",
    "JsonLines",
    "Level",
    "MoveMetrics",
    "RpcMetrics",
    "Snapshot",
    "SubscriptionMetrics",
    "Telemetry",
    "TextLines",
    "TopicMetrics",
    "WalMetrics",
    "configure_logging",
]

STEP: Final = 32  # subscriptions


class Telemetry:
    """One per broker. `registry` is its own, so that two brokers in one process do not mix."""

    def __init__(self) -> None:
        self.wal = WalMetrics()
        self.cloud = CloudMetrics()
        self.moves = MoveMetrics()
        self.cluster: Callable[[], ClusterNow] | None = None  # asked at each scrape; None: a broker that is alone
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
            subscriptions.append(SubscriptionNow.of(*key, metrics))
            if number % STEP == STEP - 1:
                yield
        wal = self.wal
        return Snapshot(
            topics=[TopicNow.of(name, metrics) for name, metrics in self._topics.items()],
            subscriptions=subscriptions,
            rpcs=[(*key, metrics.ok.value, metrics.errors.value) for key, metrics in self._rpcs.items()],
            wal=(wal.appends.value, wal.append_bytes.value, wal.groups.value),
            group_latency=wal.group_latency.copy(),
            cloud=CloudNow.of(self.cloud),
            moves=(dict(self.moves.results), self.moves.pause.copy(), self.moves.fenced.value),
            cluster=self.cluster() if self.cluster is not None else None,
            process=self._process,
        )

    def collect(self) -> Iterator[Metric]:
        """For the registry, in a program that has its own way to export it."""
        return self.snapshot().collect()
