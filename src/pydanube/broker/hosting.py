"""This broker as a member of a cluster: what the cluster asks of it, and what its topics ask of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from pydanube.broker.hand_over import Phases
from pydanube.broker.homecoming import Homecoming
from pydanube.broker.topics import Topics
from pydanube.cluster.cluster import Cluster
from pydanube.cluster.host import Offer
from pydanube.core.load import LoadReport, TopicLoad, Usage
from pydanube.core.names import BrokerId, TopicName
from pydanube.core.placement import BROKER_LOST, REBALANCE, SHUTDOWN, Marker
from pydanube.errors import DanubeError, NotServed
from pydanube.ports import Clock, Compare
from pydanube.telemetry import Telemetry

log = logging.getLogger(__name__)

SEALS_AT_ONCE: Final = 16
MOVES_KEPT: Final = 10  # of one topic
MOVED_TOPICS_MAX: Final = 10_000


class PastMove(NamedTuple):
    """A topic that left this broker, or did not: `failure` says why."""

    topic: TopicName
    to_broker: BrokerId | None
    started_at_us: int
    milliseconds: Mapping[str, float]  # of each phase, in order
    failure: str = ""
    notes: Sequence[str] = ()  # what the operator should know: acknowledged messages that come again


class _Owned(Collection[TopicName]):
    """What is open here or leaves. Asked for every few milliseconds, mostly for single topics: so it is no copy."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    def __contains__(self, name: object) -> bool:
        return isinstance(name, TopicName) and (self._topics.get(name) is not None or name in self._topics.leaving)

    def __iter__(self) -> Iterator[TopicName]:
        return iter({topic.name for topic in self._topics.loaded} | self._topics.leaving)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Hosting:
    """Implements `cluster.Host` and `topics.Elsewhere`."""

    def __init__(
        self,
        topics: Topics,
        clock: Clock,
        telemetry: Telemetry,
        broker_id: BrokerId,
        usage: Callable[[float], Usage] = lambda now: Usage(),
    ) -> None:
        """`usage` tells what the machine is busy with since it was last asked."""
        self._usage = usage
        self._topics = topics
        self._clock = clock
        self._telemetry = telemetry
        self._broker_id = broker_id
        # When, and how many messages and bytes there were; and bytes given out.
        self._seen: dict[TopicName, tuple[float, int, int, int]] = {}
        self._since: dict[TopicName, float] = {}
        self._past: OrderedDict[TopicName, deque[PastMove]] = OrderedDict()
        self._stopping = False
        self.moving: dict[TopicName, Phases] = {}  # topics that leave, and how far they are
        self.cluster: Cluster  # set by whoever makes both
        self.homecoming: Homecoming | None = None  # likewise

    # --- what the cluster asks ----------------------------------------------------------------------------

    async def claim(self, offer: Offer) -> None:
        if self._stopping:
            raise NotServed(offer.topic, "this broker is shutting down")
        await self._topics.claim(
            offer.topic,
            offer.owner_revision,
            offer.marker_revision,
            from_anybody=offer.owner_revision is not None or offer.marker.reason == BROKER_LOST,
        )
        self._telemetry.members.assigned.inc()
        self._since[offer.topic] = self._clock.elapsed()

    async def let_go(self, topic: TopicName, marker: Marker) -> None:
        target = self.cluster.peers.get(marker.to) if marker.to is not None else None
        await self._let_go(topic, marker.as_ready(), target.stream_url if target else "")

    async def _let_go(self, topic: TopicName, marker: Marker, moved_to: str) -> None:
        started_at_us = self._clock.time_us()
        phases = self.moving[topic] = Phases(self._clock)
        failure = "it was interrupted"
        try:
            await self._topics.let_go(topic, marker.to_bytes(), moved_to, phases)
            failure = ""
            self._telemetry.moves.finished(phases.milliseconds)
            self._telemetry.members.unassigned.inc()
        except DanubeError as error:
            failure = str(error)
            self._telemetry.moves.count("error")
            if marker.reason == REBALANCE:
                self._telemetry.members.rebalance_failures.inc()
            raise
        finally:
            self.moving.pop(topic, None)
            if phases.has_begun:
                milliseconds, notes = dict(phases.milliseconds), tuple(phases.notes)
                self._remember(PastMove(topic, marker.to, started_at_us, milliseconds, failure, notes))

    def _remember(self, move: PastMove) -> None:
        self._past.setdefault(move.topic, deque(maxlen=MOVES_KEPT)).appendleft(move)
        self._past.move_to_end(move.topic)
        if len(self._past) > MOVED_TOPICS_MAX:
            self._past.popitem(last=False)

    def past_moves(self, topic: TopicName) -> Sequence[PastMove]:
        """Newest first, as long as this process lives."""
        return tuple(self._past.get(topic, ()))

    async def lost(self, reason: str) -> None:
        self._telemetry.moves.fenced.inc()
        self._telemetry.members.unassigned.inc(len(self._topics.loaded))
        await self._topics.lose_all(f"this broker was declared lost ({reason}) and its topics were given to others")

    async def why_not_home(self) -> str:
        return "" if self.homecoming is None else await self.homecoming.why_not(self.cluster.session)

    def owned_topics(self) -> Collection[TopicName]:
        return _Owned(self._topics)

    def load_report(self) -> LoadReport:
        now = self._clock.elapsed()
        usage = self._usage(now)
        traffic = 0.0
        loads = []
        for topic in self._topics.loaded:
            metrics = topic.metrics
            messages, size = metrics.messages_in.value, metrics.bytes_in.value
            out = sum(each.metrics.delivered_bytes.value for each in topic.subscriptions.values())
            at, messages_before, size_before, out_before = self._seen.get(topic.name, (now, messages, size, out))
            seconds = max(now - at, 1e-3)
            self._seen[topic.name] = (now, messages, size, out)
            traffic += (size - size_before + max(out - out_before, 0)) / seconds
            backlog = 0
            if topic.reliable:
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
        return LoadReport(
            broker_id=self._broker_id,
            timestamp=self._clock.time_us() // 1000,
            cpu=usage.cpu,
            memory=usage.memory,
            disk=usage.disk,
            network=traffic * 8 / 1e6,
            topics=tuple(loads),
        )

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
            why = self._topics.unopened.get(topic)
            return (f"it could not be opened here: {why}" if why else "it is being opened here"), ""
        if peer is not None:
            return f"broker {host} has it; look it up again", peer.stream_url
        if marker is None:
            return "no broker has it yet; look it up again in a moment", ""
        target = self.cluster.peers.get(marker.to) if marker.to is not None and not marker.error else None
        return marker.stage, target.stream_url if target is not None and marker.to != self._broker_id else ""

    def expects(self, topic: TopicName) -> bool:
        if self._stopping or not self.cluster.may_serve():
            return False
        marker = self.cluster.marker_of(topic)
        if marker is not None:
            return marker.to == self._broker_id and not marker.error
        return self.cluster.host_of(topic) == self._broker_id and topic not in self._topics.unopened

    def is_assigned_here(self, topic: TopicName) -> bool:
        return self.cluster.host_of(topic) == self._broker_id

    async def hosted(self, topic: TopicName, timeout_seconds: float) -> BrokerId:
        return await self.cluster.requests.hosted(topic, timeout_seconds=timeout_seconds)

    # --- the end ----------------------------------------------------------------------------------------------

    async def seal_all(self, timeout_seconds: float) -> int:
        """Seals what can be sealed in the time, so that others continue without a gap. How many were not."""
        marker = Marker(
            reason=SHUTDOWN, from_broker=self._broker_id, ready=True, timestamp=self._clock.time_us() // 1000
        )
        self._stopping = True
        room = asyncio.Semaphore(SEALS_AT_ONCE)
        names = [topic.name for topic in self._topics.loaded]
        left = set(names)

        async def one(name: TopicName) -> None:
            async with room:
                try:
                    await self._let_go(name, marker, "")
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
