"""This broker as a member of a cluster: what the cluster asks of it, and what its topics ask of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Final

from pydanube.broker.topic import Topic
from pydanube.broker.topics import Topics
from pydanube.cluster.cluster import Cluster
from pydanube.cluster.host import Offer
from pydanube.core.load import LoadReport, TopicLoad
from pydanube.core.names import BrokerId, TopicName
from pydanube.core.placement import SHUTDOWN, Marker
from pydanube.errors import DanubeError
from pydanube.ports import Clock, Compare
from pydanube.telemetry import Telemetry

log = logging.getLogger(__name__)

SEALS_AT_ONCE: Final = 4


class Hosting:
    """Implements `cluster.Host` and `topics.Elsewhere`."""

    def __init__(self, topics: Topics, clock: Clock, telemetry: Telemetry, broker_id: BrokerId) -> None:
        self._topics = topics
        self._clock = clock
        self._telemetry = telemetry
        self._broker_id = broker_id
        self._seen: dict[TopicName, tuple[float, int, int]] = {}  # when, and how many messages and bytes there were
        self._since: dict[TopicName, float] = {}
        self.cluster: Cluster  # set by whoever makes both

    # --- what the cluster asks ----------------------------------------------------------------------------

    async def claim(self, offer: Offer) -> None:
        await self._topics.claim(offer.topic, offer.owner_revision)
        self._since[offer.topic] = self._clock.elapsed()

    async def let_go(self, topic: TopicName, marker: Marker) -> None:
        target = self.cluster.peers.get(marker.to) if marker.to is not None else None
        try:
            phases = await self._topics.let_go(topic, marker.as_ready().to_bytes(), target.stream_url if target else "")
        except DanubeError:
            self._telemetry.moves.count("error")
            raise
        self._telemetry.moves.finished(phases.milliseconds)

    async def lost(self, reason: str) -> None:
        self._telemetry.moves.fenced.inc()
        await self._topics.lose_all(f"this broker was declared lost ({reason}) and its topics were given to others")

    def owned_topics(self) -> Collection[TopicName]:
        return {topic.name for topic in self._topics.loaded} | self._topics.leaving

    def load_report(self) -> LoadReport:
        now = self._clock.elapsed()
        loads = []
        for topic in self._topics.loaded:
            metrics = topic.metrics
            messages, size = metrics.messages_in.value, metrics.bytes_in.value
            at, messages_before, size_before = self._seen.get(topic.name, (now, messages, size))
            seconds = max(now - at, 1e-3)
            self._seen[topic.name] = (now, messages, size)
            backlog = 0
            if isinstance(topic, Topic):
                backlog = max((each.get_lag_info().lag_messages for each in topic.subscriptions.values()), default=0)
            loads.append(
                TopicLoad(
                    topic_name=topic.name,
                    message_rate=(messages - messages_before) / seconds,
                    byte_rate=(size - size_before) / seconds,
                    producer_count=len(topic.producers),
                    consumer_count=sum(each.connected for each in topic.subscriptions.values()),
                    subscription_count=len(topic.subscriptions),
                    backlog_messages=backlog,
                    age_seconds=now - self._since.setdefault(topic.name, now),
                )
            )
        served = {topic.name for topic in self._topics.loaded}
        for gone in [name for name in self._seen if name not in served]:
            del self._seen[gone]
            self._since.pop(gone, None)
        return LoadReport(broker_id=self._broker_id, timestamp=self._clock.time_us() // 1000, topics=tuple(loads))

    # --- what topics ask ------------------------------------------------------------------------------------

    @property
    def session(self) -> int:
        return self.cluster.session

    @property
    def registered(self) -> Compare:
        return self.cluster.registered

    def where(self, topic: TopicName) -> tuple[str, str]:
        marker = self.cluster.marker_of(topic)
        host = self.cluster.host_of(topic)
        peer = self.cluster.peers.get(host) if host is not None else None
        if host == self._broker_id:
            return "it is being opened here", ""
        if peer is not None:
            return f"broker {host} has it; look it up again", peer.stream_url
        return (marker.stage if marker else "no broker has it yet; look it up again in a moment"), ""

    async def hosted(self, topic: TopicName, timeout_seconds: float) -> BrokerId:
        return await self.cluster.requests.hosted(topic, timeout_seconds=timeout_seconds)

    # --- the end ----------------------------------------------------------------------------------------------

    async def seal_all(self, timeout_seconds: float) -> int:
        """Seals what can be sealed in the time, so that others continue without a gap. How many were not."""
        marker = Marker(
            reason=SHUTDOWN, from_broker=self._broker_id, ready=True, timestamp=self._clock.time_us() // 1000
        )
        room = asyncio.Semaphore(SEALS_AT_ONCE)
        names = [topic.name for topic in self._topics.loaded]
        left = set(names)

        async def one(name: TopicName) -> None:
            async with room:
                try:
                    await self._topics.let_go(name, marker.to_bytes(), "")
                    left.discard(name)
                except DanubeError as error:
                    log.warning("topic not sealed at the end", extra={"topic": name, "why": str(error)})

        async def all_of_them() -> None:
            await asyncio.gather(*(one(name) for name in names))

        sealing = asyncio.create_task(all_of_them(), name="seal all topics")
        sleeping = asyncio.create_task(self._clock.sleep(timeout_seconds), name="time to seal")
        try:
            await asyncio.wait({sealing, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sleeping, sealing):
                task.cancel()
            await asyncio.gather(sleeping, sealing, return_exceptions=True)
        return len(left)
