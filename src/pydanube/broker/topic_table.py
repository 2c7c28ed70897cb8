"""The topics that this broker serves: opened, found, handed over, closed. The cluster's `TopicHost`.

Every open is a claim with a new epoch (`take_over.py`). What exists is what the metadata store says (`catalog.py`);
what is loaded is what this process serves. Names match exactly: /default/foo never finds /default/foobar.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from pydanube.broker.any_topic import AnySubscription, AnyTopic
from pydanube.broker.deletion import erase
from pydanube.broker.hand_over import LastSnapshots, Phases, release_volatile, remove_released, seal, seal_all
from pydanube.broker.load_meter import LoadMeter
from pydanube.broker.move_log import MoveLog
from pydanube.broker.ownership import Ownership, look
from pydanube.broker.take_over import BrokerContext, DeletionCutOff, Opener, Take
from pydanube.broker.topic_directory import TopicDirectory
from pydanube.cluster.cluster import ClusterNode
from pydanube.core import keys
from pydanube.core.cluster.load import LoadReport, ResourceUsage
from pydanube.core.cluster.placement import BROKER_LOST, MOVES, SHUTDOWN, Marker
from pydanube.core.names import ConsumerId, ProducerId, TopicName
from pydanube.errors import (
    Conflict,
    DanubeError,
    NotServed,
    OwnershipLost,
    TopicUnknown,
    Unavailable,
)
from pydanube.history.homecoming import Homecoming
from pydanube.history.side_by_side import gather_bounded
from pydanube.log.wal import ClosedLog, TopicLog

log = logging.getLogger("pydanube.broker.topics")

SWEEP_SECONDS: Final = 3.0  # how often to look for topics that are open here and another broker's
ARRIVAL_SECONDS: Final = 2.0  # how long a request waits for a topic that is on its way here
ARRIVAL_POLL_SECONDS: Final = 0.05


class _Owned(Collection[TopicName]):
    """What is open here or leaves. Asked for every few milliseconds, mostly for single topics: so it is no copy."""

    def __init__(self, topics: TopicTable) -> None:
        self._topics = topics

    def __contains__(self, name: object) -> bool:
        return isinstance(name, TopicName) and (self._topics.get(name) is not None or name in self._topics.leaving)

    def __iter__(self) -> Iterator[TopicName]:
        return iter({topic.name for topic in self._topics.loaded} | self._topics.leaving)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class TopicTable:
    """Everything this broker serves. `cluster` is None for a broker that is alone; `usage`: see `LoadMeter`."""

    def __init__(
        self,
        context: BrokerContext,
        cluster: ClusterNode | None = None,
        usage: Callable[[float], ResourceUsage] = lambda now: ResourceUsage(),
    ) -> None:
        clock = context.services.clock
        self.context = context
        self._metadata = context.metadata
        self._cluster = cluster
        self._opener = Opener(context, self._ownership_lost)
        self._open: dict[TopicName, AnyTopic] = {}
        self._opening: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()  # held or waited for
        self._closing: str = ""
        self._arrived = asyncio.Event()  # set, and replaced, whenever a topic was claimed and is open
        self._losses = 0  # how often all topics were lost: a claim that began before such a loss is undone
        self._doubting: dict[AnyTopic, asyncio.Task[None]] = {}  # open, and perhaps another broker's
        self._doubted: dict[AnyTopic, None] = {}  # of them, those of which the store did not say whose they are
        self._awaited: Counter[TopicName] = Counter()  # topics on their way, and how many requests wait for each
        self._snapshots = LastSnapshots(context.metadata, clock)
        self._meter = LoadMeter(context.broker_id, clock, usage)
        self._homecoming = Homecoming(context.broker_id, self._open, context.metadata, context.disk)
        self.leaving: set[TopicName] = set()  # being moved away
        self.unopened: dict[TopicName, str] = {}  # topics that could not be opened at the start, and why
        self.moves = MoveLog(clock, context.telemetry)
        self.directory = TopicDirectory(cluster, self.unopened) if cluster is not None else None

    # --- finding -------------------------------------------------------------------------------------

    def get(self, name: TopicName) -> AnyTopic | None:
        """The topic if it is loaded here."""
        return self._open.get(name)

    @property
    def loaded(self) -> Sequence[AnyTopic]:
        return list(self._open.values())

    async def require(self, name: TopicName) -> AnyTopic:
        """The topic, loaded if it exists. Raises TopicUnknown.

        A request for one that is on its way here waits for it: a client that follows a move arrives before the topic.
        """
        topic = self._open.get(name) or await self._arrival(name)
        if topic is not None:
            return topic
        if await self._metadata.get(keys.topic(name)) is None:
            raise TopicUnknown(name)
        if self.directory is not None:
            raise NotServed(name, *self.directory.where(name))
        return await self._load(name)

    async def _arrival(self, name: TopicName) -> AnyTopic | None:
        """The topic as soon as it is open; None if it is not on its way here, or takes too long."""
        if self.directory is None:
            return None
        clock = self.context.services.clock
        until = clock.elapsed() + ARRIVAL_SECONDS
        self._awaited[name] += 1
        try:
            while self.directory.expects(name) and clock.elapsed() < until:
                with contextlib.suppress(TimeoutError):  # to look whether it is still expected
                    async with asyncio.timeout(ARRIVAL_POLL_SECONDS):
                        await self._arrived.wait()
                if (topic := self._open.get(name)) is not None:
                    return topic
            return None
        finally:
            self._awaited[name] -= 1
            self._awaited += Counter()  # forgets those at zero

    def find_consumer(self, consumer: ConsumerId) -> tuple[AnyTopic, AnySubscription] | None:
        """The subscription where this consumer is registered, connected or not."""
        place = self.context.services.clients.consumers.find(consumer)
        topic = self._open.get(place.topic_name) if place is not None else None
        if place is None or topic is None:
            return None
        subscription = topic.subscriptions.get(place.name)
        if subscription is None or subscription is not place or not subscription.knows(consumer):
            return None
        return topic, subscription

    def find_producer(self, producer: ProducerId) -> AnyTopic | None:
        producers = self.context.services.clients.producers.find(producer)
        topic = self._open.get(producers.topic) if producers is not None else None
        return topic if topic is not None and topic.producers is producers and producer in producers else None

    # --- opening and closing -------------------------------------------------------------------------

    async def load_all(self, names: Sequence[TopicName], session: int | None = None) -> None:
        """Opens these. One that cannot be opened is reported and the others are served.

        In a cluster these are what was this broker's in its `session`: the rest of them is not claimed once it was
        declared dead, and what another broker has by now never is.
        """
        results = await gather_bounded([lambda name=name: self._load(name, session) for name in names])
        for name, result in zip(names, results, strict=True):
            if isinstance(result, Conflict) and self.directory is not None:
                # It is another broker's; or if it is ours, it is claimed again like any other that we do not serve.
                log.warning("topic not claimed", extra={"topic": name, "why": str(result)})
            elif isinstance(result, TopicUnknown):
                log.info("topic is gone", extra={"topic": name})  # deleted, or its deletion was finished
            elif isinstance(result, DanubeError):
                self.unopened[name] = str(result)
                log.error("topic not opened", extra={"topic": name, "why": str(result)})
            elif isinstance(result, BaseException):
                raise result

    async def _load(self, name: TopicName, session: int | None = None) -> AnyTopic:
        async with self.lock(name):
            topic = self._open.get(name)
            if topic is None:
                # Alone, everything is ours. In a cluster, what another broker has is given by its leader or not at all.
                take = Take.ANY if self.directory is None else Take.OWN
                topic = await self._take(name, session=session, take=take)
            return topic

    async def close_all(self, why: str) -> None:
        self._closing = why
        topics = list(self._open.values())
        self._open.clear()
        for result in await gather_bounded([lambda topic=topic: topic.close(why) for topic in topics]):
            if isinstance(result, BaseException):
                log.error("topic not closed", extra={"why": str(result)})
        if self._doubting:
            await asyncio.gather(*self._doubting.values(), return_exceptions=True)
        await self._snapshots.finish()

    async def take_over(
        self,
        topic: TopicName,
        marker: Marker,
        *,
        marker_revision: int | None = None,
        owner_revision: int | None = None,
    ) -> None:
        """Opens a topic that the cluster assigned to this broker: see `TopicHost`."""
        if self.directory is not None and self.directory.is_stopping:
            raise NotServed(topic, "this broker is shutting down")
        from_any_owner = owner_revision is not None or marker.reason == BROKER_LOST
        session = self.session
        async with self.lock(topic):
            if topic in self._open:
                raise Conflict(keys.owner(topic))
            await self._take(
                topic,
                owner_revision,
                marker_revision,
                session=session,
                take=Take.ANY if from_any_owner else Take.UNOWNED,
            )
            self._arrived.set()
            self._arrived = asyncio.Event()
        self.context.telemetry.members.assigned.inc()
        self._meter.arrived(topic)

    async def _take(
        self,
        name: TopicName,
        owner_revision: int | None = None,
        marker_revision: int | None = None,
        *,
        session: int | None,
        take: Take,
    ) -> AnyTopic:
        """Claims and opens; with the topic's lock. What ends behind `lose_all` is closed again: others have it."""
        self._check_not_closing(name)
        losses = self._losses
        try:
            topic = await self._opener.open(
                name,
                self._cluster,
                owner_revision,
                marker_revision,
                session=session,
                take=take,
                is_awaited=lambda: name in self._awaited,
            )
        except DeletionCutOff as found:
            log.warning("deletion of a topic was cut off, and is finished", extra={"topic": name})
            await erase(self.context, found.ownership, self.session)
            raise TopicUnknown(name) from None
        if self._closing:
            await topic.close(self._closing)
            self._check_not_closing(name)
        if losses != self._losses or (session is not None and session != self.session):
            await topic.close("this broker was declared lost while it claimed the topic", owned=False)
            raise Conflict(keys.registration(self.context.broker_id))
        self._open[name] = topic
        self.unopened.pop(name, None)
        return topic

    def _check_not_closing(self, name: TopicName) -> None:
        if self._closing:
            raise NotServed(name, self._closing)

    async def hand_over(self, topic: TopicName, marker: Marker) -> None:
        """Moves a topic away: see `TopicHost`. Sealed, released, closed, its files removed. Raises MoveFailed if it
        stays.
        """
        moved_to = self.directory.stream_url_of(marker.to) if self.directory is not None else ""
        with self.moves.recording(topic, marker) as phases:
            async with self.lock(topic):
                found = self._open.get(topic)
                if found is None:
                    raise NotServed(topic, "it is not open here")
                self.leaving.add(topic)
                try:
                    await self._seal(found, marker.as_ready(), moved_to, phases)
                    self._open.pop(topic, None)
                    try:
                        await found.close("it moved to another broker", moved_to=moved_to, owned=False)
                        await remove_released(self.context.disk, found, self.context.broker_id)
                    except DanubeError as error:
                        # It is released, and another broker has it: whatever happens to its files, it does not stay.
                        log.warning("files of a topic that moved are left", extra={"topic": topic, "why": str(error)})
                    phases.enter("done")
                finally:
                    self.leaving.discard(topic)
            if found.reliable and found.storage is not None:
                self._snapshots.publish(found.storage.tier)
            milliseconds = {phase: round(ms, 1) for phase, ms in phases.milliseconds.items()}
            pause_ms = round(phases.pause_ms, 1)
            log.info("topic let go", extra={"topic": topic, "pause_ms": pause_ms, "phases": milliseconds})

    async def _seal(self, topic: AnyTopic, marker: Marker, moved_to: str, phases: Phases) -> None:
        """Raises MoveFailed, and the topic serves on; or OwnershipLost, and it is closed."""
        clock = self.context.services.clock
        try:
            if not topic.reliable:
                phases.enter("seal")
                is_move = marker.reason in MOVES - {SHUTDOWN}
                await release_volatile(topic, clock, marker.to_bytes(), forget=is_move)
                phases.enter("close")
            else:
                await seal(topic, clock, marker.to_bytes(), phases, moved_to)
        except OwnershipLost:
            # If it has no owner, or is ours all the same, it is claimed again like any topic that is not served.
            self._open.pop(topic.name, None)
            await self._close_lost(topic)
            raise

    async def hand_over_all(self, timeout_seconds: float) -> int:
        """Hands over what can be in the time, so that others continue without a gap. How many topics were not."""
        clock, broker_id = self.context.services.clock, self.context.broker_id
        marker = Marker(reason=SHUTDOWN, from_broker=broker_id, ready=True, timestamp=clock.time_us() // 1000)
        if self.directory is not None:
            self.directory.stop()
        names = [topic.name for topic in self.loaded]
        return await seal_all(names, clock, timeout_seconds, partial(self.hand_over, marker=marker))

    # --- what this disk has --------------------------------------------------------------------------

    async def lost_log(self, name: TopicName) -> TopicLog | ClosedLog:
        """What this disk has of a topic, whether it is open here or not. Raises LogClosed while it is being closed."""
        async with self.lock(name):  # so that it is not opened while its files are read
            topic = self._open.get(name)
            return topic.log if topic is not None and topic.reliable else await self.context.wal.lost_log(name)

    async def forget_epochs(self, name: TopicName, last: int) -> bool:
        """Removes what this disk has of a topic up to this epoch, as far as the store has it. False: not yet, for it is
        open or about to be, or what the store has cannot be read.
        """
        async with self.lock(name):
            if name in self._open:
                return False
            return await self._opener.remove_older(name, await look(self._metadata, name, self.context.broker_id), last)

    async def why_not_home(self) -> str:
        return "" if self._cluster is None else await self._homecoming.why_not(self._cluster.session)

    # --- topics that others have ---------------------------------------------------------------------

    async def lost(self, reason: str) -> None:
        self.context.telemetry.moves.fenced.inc()
        self.context.telemetry.members.unassigned.inc(len(self._open))
        await self.lose_all(f"this broker was declared lost ({reason}) and its topics were given to others")

    async def lose_all(self, why: str) -> None:
        """Others have, or will have, our topics: closes them and writes nothing. Their files stay."""
        self._losses += 1  # a claim that is under way closes what it opens
        self.unopened.clear()
        topics = list(self._open.values())
        self._open.clear()
        closing = [lambda topic=topic: topic.close(why, owned=False) for topic in topics]
        for result in await gather_bounded(closing):
            if isinstance(result, BaseException):
                log.error("topic not closed", extra={"why": str(result)})

    async def sweep(self) -> None:
        """Closes topics that are open here and that the store gives to another broker, until cancelled.

        The first write that is refused finds such a topic; this finds those about which nothing is written.
        """
        clock = self.context.services.clock
        before: set[TopicName] = set()
        while True:
            await clock.sleep(SWEEP_SECONDS)
            doubted, self._doubted = self._doubted, {}
            # Twice in a row: of a topic that was just claimed, the assignment may not have been heard of yet.
            strange = {
                name for name in self._open if self.directory is not None and not self.directory.is_assigned_here(name)
            }
            for topic in [*doubted, *(self._open[name] for name in sorted(strange & before))]:
                self._doubt(topic)
            before = strange

    def _ownership_lost(self, ownership: Ownership) -> None:
        topic = self._open.get(ownership.topic)
        if topic is not None and topic.ownership is ownership:
            self._doubt(topic)

    def _doubt(self, topic: AnyTopic) -> None:
        """The topic may be another broker's: looks, and closes it here if it is. Never waits.

        The caller may be one of the topic's own tasks, or hold its lock: so a task of its own closes the topic.
        """
        if self._open.get(topic.name) is topic and topic not in self._doubting:
            task = asyncio.create_task(self._close_if_lost(topic), name=f"is {topic.name} ours")
            self._doubting[topic] = task
            task.add_done_callback(lambda _: self._doubting.pop(topic, None))

    async def _close_if_lost(self, topic: AnyTopic) -> None:
        """The owner key decides. If it cannot be read now, the next sweep looks again."""
        name = topic.name
        async with self.lock(name):  # a move that is under way, say, ends first
            try:
                if self._open.get(name) is not topic or await topic.ownership.is_ours():
                    return
            except Unavailable:
                self._doubted[topic] = None
                return
            if self._open.get(name) is not topic:
                return
            del self._open[name]
            await self._close_lost(topic)

    async def _close_lost(self, topic: AnyTopic) -> None:
        log.warning("topic closed: another broker has it", extra={"topic": topic.name, "epoch": topic.ownership.epoch})
        self.context.telemetry.members.unassigned.inc()
        try:
            await topic.close("another broker has it; look it up again", owned=False)
        except DanubeError as error:
            log.error("topic not closed", extra={"topic": topic.name, "why": str(error)})

    # --- what the cluster asks -----------------------------------------------------------------------

    def owned_topics(self) -> Collection[TopicName]:
        return _Owned(self)

    def load_report(self) -> LoadReport:
        return self._meter.report(self.loaded)

    @property
    def session(self) -> int:
        """Of this broker: in a cluster another one after it was declared dead."""
        return self.context.session if self._cluster is None else self._cluster.session

    def lock(self, name: TopicName) -> asyncio.Lock:
        """One opens, moves or deletes a topic at a time. It is gone when no task holds it or waits for it."""
        return self._opening.setdefault(name, asyncio.Lock())
