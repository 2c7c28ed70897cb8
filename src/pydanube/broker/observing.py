"""Looks at this broker every few seconds: what is wrong (core/cluster/conditions.py), and how late subscriptions are.

In short steps, off the path of messages. What it finds is kept for status requests, and as metrics. The age of the
oldest message that was not acknowledged is that of the batch it is in: a look reads at most LOOKUPS_MAX of them, those
that have waited longest for it, and none twice for the same place.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.outbox import Caller
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.broker.volatile_topic import VolatileSubscription
from pydanube.core.cluster.conditions import (
    BrokerNumbers,
    BrokerWatch,
    Condition,
    LatencyBuckets,
    OrphanedRanges,
    SubscriptionNumbers,
    order,
)
from pydanube.core.dispatch.behind import CatchUp, LagCourse, Trend
from pydanube.core.dispatch.lag import Standing
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError, OffsetOutOfRange
from pydanube.telemetry import ClusterNow, DiskSpace, Histogram

log = logging.getLogger(__name__)

OBSERVE_SECONDS: Final = 10.0
LOOKUPS_MAX: Final = 64  # in one look
STEP: Final = 64  # subscriptions, about a millisecond
ORPHANS_MAX: Final = 50  # topics that are named


@dataclass(slots=True, eq=False)
class _Behind:
    """How late one subscription is, as of the last look."""

    trend: Trend = field(default_factory=Trend)
    offset: int = -1  # of the oldest message that was looked up
    appended_us: int | None = None
    looked_up: int = 0  # in which look
    head: int = 0  # at the last look
    head_us: int | None = None


class Late(NamedTuple):
    """`seconds` None: not known."""

    seconds: float | None
    catch_up: CatchUp


class Connected(NamedTuple):
    kind: str  # producer, consumer
    name: str
    topic: str
    subscription: str
    caller: Caller | None
    unacked: int | None
    rate: float | None


class Observer:
    """`disk_space` asks the system how full the disk is."""

    def __init__(self, broker: Broker, disk_space: Callable[[], DiskSpace] | None = None) -> None:
        self._broker = broker
        self._disk_space = disk_space
        self.watch = BrokerWatch()
        self.numbers = BrokerNumbers()
        self._lags: dict[TopicName, int] = {}  # by topic: of the subscription furthest behind, at the last look
        self.connections = 0
        self._behind: dict[tuple[str, str], _Behind] = {}
        self._sent: dict[int, tuple[object, int]] = {}  # of producers and consumers, at the last look
        self._rates: dict[int, float] = {}
        self._looked_at: float | None = None
        self._looks = 0

    async def run(self) -> None:
        """Until it is cancelled. A look that fails is the broker's trouble only in its log."""
        while True:
            try:
                await self.look()
            except DanubeError as error:
                log.warning("broker not looked at", extra={"why": str(error)})
            except Exception:
                log.exception("broker not looked at")  # a bug here is no reason to know nothing from now on
            await self._broker.clock.sleep(OBSERVE_SECONDS)

    async def look(self) -> None:
        clock = self._broker.clock
        now, now_us = clock.elapsed(), clock.time_us()
        self._looks += 1
        await self._look_at_pipelines()
        disk_space = await self._broker.run(self._disk_space) if self._disk_space is not None else None
        subscriptions = await self._subscriptions(now, now_us)
        await self._look_up()
        await self._tell_metrics(now, now_us)
        await self._count_rates(now)
        self.numbers = self._numbers(disk_space, await self._publishes())
        for _ in self.watch.look_in_steps(now, now_us // 1000, self.numbers, subscriptions, STEP):
            await asyncio.sleep(0)

    @property
    def conditions(self) -> list[Condition]:
        """Of this broker, and of pipelines if it leads; as of the last look."""
        return order([*self.watch.conditions, *self._broker.pipelines.watch.conditions])

    async def _look_at_pipelines(self) -> None:
        cluster = self._broker.cluster
        try:
            await self._broker.pipelines.look(cluster is None or cluster.leader == self._broker.broker_id)
        except DanubeError as error:
            log.warning("pipelines not looked at", extra={"why": str(error)})

    # --- subscriptions --------------------------------------------------------------------------------

    def _all(self) -> Iterator[tuple[Topic, Subscription]]:
        for topic in list(self._broker.topics.loaded):
            if topic.reliable:
                for subscription in list(topic.subscriptions.values()):
                    yield topic, subscription

    async def _subscriptions(self, now: float, now_us: int) -> list[SubscriptionNumbers]:
        found = []
        lags: dict[TopicName, int] = {}
        behind: dict[tuple[str, str], _Behind] = {}
        for number, (topic, subscription) in enumerate(self._all()):
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
            standing, metrics = subscription.standing(), subscription.metrics
            place = (str(topic.name), str(subscription.name))
            each = behind[place] = self._behind.get(place) or _Behind()
            each.trend.look(now, standing.lag)
            each.head, each.head_us = standing.head, now_us
            lags[topic.name] = max(standing.lag, lags.get(topic.name, 0))
            found.append(
                SubscriptionNumbers(
                    *place,
                    lag=standing.lag,
                    consumers=standing.consumers,
                    delivered=metrics.delivered.value,
                    heartbeat_polls=metrics.heartbeat_polls.value,
                    notifier_polls=metrics.notifier_polls.value,
                    timed_out=standing.timed_out,
                    dead_lettered=metrics.dead_lettered.value,
                )
            )
        self._behind, self._lags = behind, lags
        return found

    async def _look_up(self) -> None:
        """When the oldest messages came that are not acknowledged: of those first that have waited longest for it."""
        wanted: list[tuple[int, int, _Behind, Topic, int]] = []
        for number, (topic, subscription) in enumerate(self._all()):
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
            standing = subscription.standing()
            each = self._behind.get((topic.name, subscription.name))
            if each is not None and standing.lag and each.offset != standing.oldest_open:
                wanted.append((each.looked_up, len(wanted), each, topic, standing.oldest_open))
        for _, _, each, topic, offset in sorted(wanted, key=lambda found: found[:2])[:LOOKUPS_MAX]:
            await self._look_up_one(each, topic, offset)

    async def _look_up_one(self, each: _Behind, topic: Topic, offset: int) -> None:
        each.appended_us, each.offset, each.looked_up = await appended_at(topic, offset), offset, self._looks

    async def _tell_metrics(self, now: float, now_us: int) -> None:
        for number, (topic, subscription) in enumerate(self._all()):
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
            late = self._late(topic.name, subscription.name, subscription.standing(), now, now_us)
            subscription.metrics.lag_seconds = late.seconds
            course = late.catch_up.course
            never = course in (LagCourse.FALLING_BEHIND, LagCourse.STANDING)
            hope = 0.0 if course is LagCourse.KEEPING_UP else late.catch_up.seconds
            subscription.metrics.catch_up_seconds = math.inf if never else hope

    def _late(self, topic: str, name: str, standing: Standing, now: float, now_us: int) -> Late:
        if standing.lag == 0:
            return Late(0.0, CatchUp(LagCourse.CAUGHT_UP))
        each = self._behind.get((topic, name))
        if each is None:
            return Late(None, CatchUp(LagCourse.UNKNOWN))
        seconds = _age(each, standing, now_us)
        return Late(seconds, each.trend.catch_up(now, standing.lag, seconds if standing.consumers else None))

    def late(self, topic: Topic, subscription: Subscription) -> Late:
        """As of the last look, without waiting."""
        clock = self._broker.clock
        return self._late(topic.name, subscription.name, subscription.standing(), clock.elapsed(), clock.time_us())

    async def late_now(self, topic: Topic, subscription: Subscription) -> Late:
        """The same, and the oldest message is looked up now."""
        standing = subscription.standing()
        each = self._behind.setdefault((topic.name, subscription.name), _Behind())
        if standing.lag and each.offset != standing.oldest_open:
            await self._look_up_one(each, topic, standing.oldest_open)
        return self.late(topic, subscription)

    # --- the broker -----------------------------------------------------------------------------------

    @property
    def lag_messages(self) -> int:
        """Of the topics that are here now, each by its subscription that is furthest behind: as of the last look, and
        as of now for those that have come since then.
        """
        reliable = (topic for topic in self._broker.topics.loaded if topic.reliable)
        lags = ((topic, self._lags.get(topic.name)) for topic in reliable)
        return sum(topic.backlog_messages if lag is None else lag for topic, lag in lags)

    @property
    def orphans(self) -> list[OrphanedRanges]:
        """As of now, not of the last look: right after a takeover this is the first that an operator wants to know."""
        return [
            OrphanedRanges(
                str(topic.name),
                len(topic.orphans),
                sum(each.end - each.start for each in topic.orphans),
                tuple(sorted({int(each.broker_id) for each in topic.orphans})),
            )
            for topic in self._broker.topics.loaded
            if topic.reliable and topic.orphans
        ]

    async def _publishes(self) -> LatencyBuckets | None:
        """Of all its topics together."""
        counts: Counter[int] = Counter()
        bounds: tuple[float, ...] = ()
        for number, topic in enumerate(list(self._broker.topics.loaded)):
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
            latency = topic.metrics.send_latency
            bounds = latency.bounds
            for place, each in enumerate(latency.counts):
                counts[place] += each
        return LatencyBuckets(bounds, tuple(counts[place] for place in range(len(bounds) + 1))) if bounds else None

    def _numbers(self, disk_space: DiskSpace | None, publishes: LatencyBuckets | None) -> BrokerNumbers:
        broker, telemetry = self._broker, self._broker.telemetry
        cluster: ClusterNow | None = telemetry.cluster() if telemetry.cluster is not None else None
        waiting = telemetry.waiting() if telemetry.waiting is not None else None
        return BrokerNumbers(
            may_serve=cluster.may_serve if cluster is not None else True,
            fenced=telemetry.moves.fenced.value,
            lease_age_seconds=cluster.lease_age_seconds if cluster is not None else None,
            lease_ttl_seconds=cluster.lease_ttl_seconds if cluster is not None else 0.0,
            unopened={str(name): why for name, why in broker.topics.unopened.items()},
            orphans=self.orphans,
            log_size_bytes=telemetry.wal.size_bytes() if telemetry.wal.size_bytes is not None else None,
            log_limit_bytes=telemetry.wal.bytes_max,
            disk_free_bytes=disk_space.free_bytes if disk_space is not None else None,
            disk_used_bytes=disk_space.used_bytes if disk_space is not None else None,
            upload_lag_seconds=waiting[2] if waiting is not None else None,
            object_errors=telemetry.cloud.errors.value,
            metadata_size_bytes=telemetry.members.metadata_size_bytes,
            metadata_quota_bytes=telemetry.members.metadata_quota_bytes,
            loop_lag=_buckets(telemetry.loop_lag),
            commits=_buckets(telemetry.wal.group_latency),
            publishes=publishes,
        )

    # --- who is connected -----------------------------------------------------------------------------

    async def _count_rates(self, now: float) -> None:
        seconds = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        sent: dict[int, tuple[object, int]] = {}
        rates: dict[int, float] = {}
        for number, (who, count) in enumerate(self._senders()):
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
            sent[id(who)] = (who, count)
            before = self._sent.get(id(who))
            if before is not None and before[0] is who and seconds > 0:
                rates[id(who)] = max(count - before[1], 0) / seconds
        self._sent, self._rates = sent, rates
        self.connections = len(sent)

    def _senders(self) -> Iterator[tuple[object, int]]:
        for topic in list(self._broker.topics.loaded):
            for producer in topic.producers.alive():
                yield producer, producer.sent
            for subscription in _subscriptions_of(topic):
                for registration in subscription.consumers:
                    if registration.connected:
                        yield registration, registration.sent

    def connected(self, topic_name: str = "") -> Iterator[Connected]:
        """Producers and consumers, now."""
        for topic in list(self._broker.topics.loaded):
            if not is_wanted(topic.name, topic_name):
                continue
            for producer in topic.producers.alive():
                rate = self._rates.get(id(producer))
                yield Connected("producer", producer.name, str(topic.name), "", producer.caller, None, rate)
            for subscription in _subscriptions_of(topic):
                for each in subscription.consumers:
                    if not each.connected:
                        continue
                    held = subscription.held_by(each.consumer_id) if subscription.reliable else None
                    yield Connected(
                        "consumer",
                        each.name,
                        str(topic.name),
                        str(subscription.name),
                        each.caller,
                        held,
                        self._rates.get(id(each)),
                    )


def is_wanted(name: TopicName, wanted: str) -> bool:
    """Whether the topic is the one that was asked for, or a partition of it. Without a wish all are."""
    return not wanted or name == wanted or name.is_partition_of(wanted)


def _subscriptions_of(topic: AnyTopic) -> list[Subscription | VolatileSubscription]:
    return list(topic.subscriptions.values())


def _buckets(histogram: Histogram) -> LatencyBuckets:
    return LatencyBuckets(histogram.bounds, tuple(histogram.counts))


def _age(each: _Behind, standing: Standing, now_us: int) -> float | None:
    """Seconds that the oldest message waits that was not acknowledged. None: not known."""
    came = standing.head - each.head  # since the last look
    if each.offset != standing.oldest_open and came > 0 and standing.oldest_open >= each.head:
        # All that waits came since then: as evenly as anything else, for all that is known.
        share = (standing.head - standing.oldest_open) / came
        return share * max(now_us - (each.head_us or now_us), 0) / 1e6
    # What was looked up a few seconds ago may be acknowledged by now: then the oldest is younger than this.
    if each.appended_us is None or each.offset > standing.oldest_open:
        return None
    return max(now_us - each.appended_us, 0) / 1e6


async def appended_at(topic: Topic, offset: int) -> int | None:
    """When the message at `offset` came, or the next one, in microseconds since 1970. None: not known.

    From memory or the log. Of what only the object store has it is when the last message of its object came, at the
    latest: this never waits for the object store.
    """
    try:
        batches = await topic.log.read(offset, bytes_max=1)
    except OffsetOutOfRange as gap:
        stored = topic.storage.tier.objects.find(offset) if topic.storage is not None else None
        if stored is not None:
            return stored.max_append_time or None
        if not offset < gap.first < topic.head:
            return None
        try:
            batches = await topic.log.read(gap.first, bytes_max=1)
        except DanubeError:
            return None
    except DanubeError:
        return None
    return batches[0].header.append_time if batches else None
