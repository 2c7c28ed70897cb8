"""What this broker's topics do per second, for the cluster's load reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydanube.broker.any_topic import AnyTopic
from pydanube.core.cluster.load import LoadReport, ResourceUsage, TopicLoad
from pydanube.core.names import BrokerId, TopicName
from pydanube.ports import Clock


class LoadMeter:
    """`usage` tells what the machine is busy with since it was last asked."""

    def __init__(self, broker_id: BrokerId, clock: Clock, usage: Callable[[float], ResourceUsage]) -> None:
        self._broker_id = broker_id
        self._clock = clock
        self._usage = usage
        # When, and how many messages and bytes there were; and bytes given out.
        self._seen: dict[TopicName, tuple[float, int, int, int]] = {}
        self._since: dict[TopicName, float] = {}

    def arrived(self, topic: TopicName) -> None:
        """The topic is this broker's from now on."""
        self._since[topic] = self._clock.elapsed()

    def report(self, topics: Sequence[AnyTopic]) -> LoadReport:
        """Of these topics, since the last report. Never waits."""
        now = self._clock.elapsed()
        usage = self._usage(now)
        traffic = 0.0
        loads = []
        for topic in topics:
            metrics = topic.metrics
            messages, size = metrics.messages_in.value, metrics.bytes_in.value
            out = sum(each.metrics.delivered_bytes.value for each in topic.subscriptions.values())
            at, messages_before, size_before, out_before = self._seen.get(topic.name, (now, messages, size, out))
            seconds = max(now - at, 1e-3)
            self._seen[topic.name] = (now, messages, size, out)
            traffic += (size - size_before + max(out - out_before, 0)) / seconds
            loads.append(
                TopicLoad(
                    topic_name=topic.name,
                    message_rate=(messages - messages_before) / seconds,
                    byte_rate=(size - size_before) / seconds,
                    producer_count=len(topic.producers),
                    consumer_count=sum(each.connected for each in topic.subscriptions.values()),
                    subscription_count=len(topic.subscriptions),
                    backlog_messages=topic.backlog_messages,
                    age_seconds=now - self._since.setdefault(topic.name, now),
                )
            )
        served = {topic.name for topic in topics}
        for gone in [name for name in self._seen if name not in served]:
            del self._seen[gone]
            self._since.pop(gone, None)
        return LoadReport(
            broker_id=self._broker_id,
            timestamp=self._clock.time_us() // 1000,
            cpu=usage.cpu,
            memory=usage.memory,
            disk=usage.disk,
            network=traffic * 8 / 1e6,
            topics=tuple(loads),
        )
