"""The topics of this broker: made, opened, found, closed, deleted; and the namespaces they live in.

Every open is a claim with a new epoch (`ownership.py`). What exists is what the metadata store says; what is loaded is
what this process serves. Names match exactly: /default/foo never finds /default/foobar.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol
from weakref import WeakValueDictionary

from pydanube.broker.any_topic import AnySubscription, AnyTopic
from pydanube.broker.hand_over import LastSnapshots, Phases, release_volatile, seal
from pydanube.broker.leftovers import epochs_on, is_damaged, remove_files
from pydanube.broker.members import (
    StoredConfig,
    config_put,
    gather_bounded,
    policy_put,
    read_config,
    read_policy,
    remove_below,
)
from pydanube.broker.ownership import Ownership, look
from pydanube.broker.take_over import DeletionCutOff, Member, Opener, Rooms, Take
from pydanube.broker.topic import Topic
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.core import keys
from pydanube.core.delivery import FailurePolicy
from pydanube.core.lag import Heartbeat
from pydanube.core.names import BrokerId, ConsumerId, NamespaceName, ProducerId, SubscriptionName, TopicName
from pydanube.core.ownership import Owner
from pydanube.core.placement import MOVES, SHUTDOWN, WAIT, Marker
from pydanube.core.policies import UNLIMITED, Delivery, TopicPolicy, configured
from pydanube.core.roster import DispatchLimits
from pydanube.core.tiers import Retention
from pydanube.errors import (
    Conflict,
    DanubeError,
    DiskFull,
    InvalidName,
    NamespaceExists,
    NamespaceNotEmpty,
    NamespaceUnknown,
    NotServed,
    OwnershipLost,
    Refused,
    TopicExists,
    TopicUnknown,
    Unavailable,
)
from pydanube.log.batch import Envelope
from pydanube.log.layout import epoch_directory, topic_directory
from pydanube.log.tier import delete_objects
from pydanube.log.wal import ClosedLog, TopicLog
from pydanube.ports import Compare, Delete, Put

log = logging.getLogger(__name__)

SYSTEM: Final = NamespaceName("system")
PARTITIONS_MAX: Final = 10_000
HOSTED_SECONDS: Final = 5.0  # how long whoever makes a topic waits until a broker has it
REAP_SECONDS: Final = 300.0
REST_SECONDS: Final = 10.0
SWEEP_SECONDS: Final = 3.0  # how often to look for topics that are open here and another broker's
ARRIVAL_SECONDS: Final = 2.0  # how long a request waits for a topic that is on its way here
ARRIVAL_LOOK_SECONDS: Final = 0.05


class DispatchConfig(NamedTuple):
    """What is stored for one subscription; None where nothing is."""

    unacked_max: int | None
    heartbeat: Heartbeat | None


class Elsewhere(Member, Protocol):
    """The cluster, as far as topics are concerned. A broker that is alone has none."""

    def where(self, topic: TopicName) -> tuple[str, str]:
        """Why the topic is not served here, in words, and the native URL of the broker that has it, if one has."""
        ...

    def expects(self, topic: TopicName) -> bool:
        """Whether the topic, which is not open here, is on its way to this broker."""
        ...

    def is_assigned_here(self, topic: TopicName) -> bool:
        """Whether the topic is this broker's, as far as this broker has heard."""
        ...

    async def hosted(self, topic: TopicName, timeout_seconds: float) -> BrokerId:
        """Who serves the topic, as soon as somebody does. Raises DeadlineExceeded."""
        ...


class Live(NamedTuple):
    """What a topic's owner alone knows."""

    first_offset: int
    head: int
    producers: int
    consumers: int  # connected


class Remote(Protocol):
    """The owners of other topics, as far as this broker needs them. Whoever opens the doors knows how to reach them."""

    async def delete(self, topic: TopicName) -> None:
        """Removes exactly this topic. Raises NotServed while nobody has it, Unreachable."""
        ...

    async def append(self, topic: TopicName, message: Envelope) -> None:
        """Returns when the message is safe there. Raises as `delete`, TopicUnknown, and Refused if it keeps nothing."""
        ...

    async def live(self, topic: TopicName) -> Live:
        """Raises as `delete`."""
        ...


class Topics:
    """Everything this broker serves."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._metadata = rooms.metadata
        self._opener = Opener(rooms)
        self._open: dict[TopicName, AnyTopic] = {}
        self._opening: WeakValueDictionary[TopicName, asyncio.Lock] = WeakValueDictionary()  # held or waited for
        self._closing: str = ""
        self._arrived = asyncio.Event()  # set, and replaced, whenever a topic was claimed and is open
        self._losses = 0  # how often everything was lost: what was begun before counts for nothing
        self._doubting: dict[AnyTopic, asyncio.Task[None]] = {}  # open, and perhaps another broker's
        self._doubted: dict[AnyTopic, None] = {}  # of them, those of which the store did not say whose they are
        self._awaited: Counter[TopicName] = Counter()  # topics on their way, and how many requests wait for each
        self.elsewhere: Elsewhere | None = None  # set once, before anything is opened
        self.remote: Remote | None = None  # set once, when there is a way to other brokers
        self._snapshots = LastSnapshots(rooms.metadata, rooms.services.clock)
        self.leaving: set[TopicName] = set()  # being moved away
        self.unopened: dict[TopicName, str] = {}  # topics that could not be opened at the start, and why

    @property
    def rooms(self) -> Rooms:
        return self._rooms

    # --- finding ------------------------------------------------------------------------------------

    def get(self, name: TopicName) -> AnyTopic | None:
        """The topic if it is loaded here."""
        return self._open.get(name)

    @property
    def loaded(self) -> Sequence[AnyTopic]:
        return list(self._open.values())

    async def require(self, name: TopicName) -> AnyTopic:
        """The topic, loaded if it exists. Raises TopicUnknown.

        Who asks for one that is on its way here waits for it: a client that follows a topic is here before it is.
        """
        topic = self._open.get(name) or await self._arrival(name)
        if topic is not None:
            return topic
        if await self._metadata.get(keys.topic(name)) is None:
            raise TopicUnknown(name)
        if self.elsewhere is not None:
            raise NotServed(name, *self.elsewhere.where(name))
        return await self._load(name)

    async def _arrival(self, name: TopicName) -> AnyTopic | None:
        """The topic as soon as it is open; None if it is not on its way here, or takes too long."""
        if self.elsewhere is None:
            return None
        clock = self._rooms.services.clock
        until = clock.elapsed() + ARRIVAL_SECONDS
        self._awaited[name] += 1
        try:
            while self.elsewhere.expects(name) and clock.elapsed() < until:
                with contextlib.suppress(TimeoutError):  # to look whether it is still expected
                    async with asyncio.timeout(ARRIVAL_LOOK_SECONDS):
                        await self._arrived.wait()
                if (topic := self._open.get(name)) is not None:
                    return topic
            return None
        finally:
            self._awaited[name] -= 1
            self._awaited += Counter()  # forgets those at zero

    async def exists(self, name: TopicName) -> bool:
        return name in self._open or await self._metadata.get(keys.topic(name)) is not None

    async def names(self, namespace: NamespaceName | None = None) -> list[TopicName]:
        namespaces = [namespace] if namespace is not None else await self.namespaces()
        found = []
        for each in namespaces:
            items = await self._metadata.list(keys.namespace_topics(each))
            found += [name for item in items if (name := keys.topic_of_namespace(item.key)) is not None]
        return found

    async def partitions(self, name: TopicName) -> list[TopicName]:
        """[name] if there is such a topic, else its partitions in order, else nothing."""
        if await self.exists(name):
            return [name]
        return await self._partitions_of(name)

    async def _partitions_of(self, base: TopicName) -> list[TopicName]:
        items = await self._metadata.list(f"{keys.topic(base)}-part-")
        found = {name for item in items if (name := keys.topic_of(item.key)) and name.is_partition_of(base)}
        return sorted(found, key=lambda name: name.partition_number or 0)

    def find_consumer(self, consumer: ConsumerId) -> tuple[AnyTopic, AnySubscription] | None:
        """Who has this consumer registered, connected or not."""
        for topic in self._open.values():
            for subscription in topic.subscriptions.values():
                if subscription.knows(consumer):
                    return topic, subscription
        return None

    def find_producer(self, producer: ProducerId) -> AnyTopic | None:
        return next((topic for topic in self._open.values() if producer in topic.producers), None)

    # --- making and removing ------------------------------------------------------------------------

    async def create(self, name: TopicName, *, delivery: Delivery, schema_subject: str | None = None) -> AnyTopic:
        """Makes the topic; returns it when it is served here. Raises TopicExists, NamespaceUnknown.

        In a cluster it may be given to another broker: NotServed then says to whom.
        """
        await self.make(name, delivery=delivery, schema_subject=schema_subject)
        if self.elsewhere is None:
            return await self._load(name)
        if await self.elsewhere.hosted(name, HOSTED_SECONDS) == self._rooms.broker_id:
            topic = self._open.get(name) or await self._arrival(name)  # claimed, and perhaps just being opened
            if topic is not None:
                return topic
        raise NotServed(name, *self.elsewhere.where(name))

    async def make(self, name: TopicName, *, delivery: Delivery, schema_subject: str | None = None) -> None:
        """Writes down that the topic exists. In a cluster the leader then finds it a broker."""
        if self._closing:
            raise NotServed(name, self._closing)
        await self._check_free(name)
        policy = await self._metadata.get(keys.namespace_policy(name.namespace))
        if policy is None:
            raise NamespaceUnknown(name.namespace)
        operations: list[Put | Delete] = [
            Put(keys.topic(name), b"null"),
            Put(keys.delivery(name), json.dumps(delivery.value).encode()),
            Put(keys.namespace_topic(name), b"null"),
        ]
        if schema_subject is not None:
            operations.append(Put(keys.schema(name), json.dumps(schema_subject).encode()))
        if self.elsewhere is not None:
            operations.append(Put(keys.unassigned(name), b"null"))
        compares = [Compare(keys.topic(name), 0), Compare(policy.key, policy.revision)]
        if await self._metadata.transact(compares, operations) is None:
            raise TopicExists(name, "somebody else has just created it")
        log.info("topic created", extra={"topic": name, "delivery": delivery.value})

    async def create_partitioned(
        self, base: TopicName, partitions: int, *, delivery: Delivery, schema_subject: str | None = None
    ) -> None:
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidName("number of partitions", str(partitions), f"use 1 to {PARTITIONS_MAX}")
        await self._check_free(base)
        if await self._partitions_of(base):
            raise TopicExists(base, "it has partitions already")
        for name in base.partition_names(partitions):
            if self.elsewhere is None:
                await self.create(name, delivery=delivery, schema_subject=schema_subject)
            else:
                await self.make(name, delivery=delivery, schema_subject=schema_subject)

    async def _check_free(self, name: TopicName) -> None:
        if await self.exists(name):
            raise TopicExists(name, "it already exists")
        if name.partition_number is None:
            if await self._partitions_of(name):
                raise TopicExists(name, "it is the base of a partitioned topic")
        elif await self.exists(name.base):
            raise TopicExists(name, f"{name.base} is a topic without partitions")

    async def delete(self, name: TopicName) -> None:
        """Removes the topic with everything it had; of a base, all partitions."""
        if name.partition_number is not None and await self.exists(name):
            raise InvalidName("topic to delete", name, f"Cannot delete individual partition: delete {name.base}")
        doomed = await self.partitions(name)
        if not doomed:
            raise TopicUnknown(name)
        for each in doomed:
            await self._delete_one(each)

    async def _delete_one(self, name: TopicName) -> None:
        try:
            topic = await self.require(name)
        except NotServed:
            if self.remote is None:
                raise
            await self.remote.delete(name)
            return
        await self.delete_here(topic)

    async def delete_here(self, topic: AnyTopic) -> None:
        """Exactly this topic, which may be a partition."""
        name = topic.name
        async with self._lock(name):
            self._open.pop(name, None)
            try:
                await topic.close("the topic is being deleted")
            except DiskFull as error:  # its log needs no ending, and deleting makes room
                log.warning("log of a deleted topic left unfinished", extra={"topic": name, "why": str(error)})
            await topic.ownership.reassert()  # a descriptor that was given up and comes late must not outlive its topic
            await self._erase(topic.ownership)

    async def _erase(self, ownership: Ownership) -> None:
        """With the topic's lock. Cut off at any point, it is finished by whoever opens the topic next.

        How it delivers goes first: a topic without that is one that is being deleted, whatever else is left of it. That
        it exists goes last, so that no new one of its name finds what the old one had.
        """
        name = ownership.topic
        tombstone = Owner(
            epoch=ownership.epoch,
            session=self._session,
            broker_id=self._rooms.broker_id,
            start_offset=0,
            released=True,
            deleted=True,
        )
        await ownership.write([Delete(keys.delivery(name))])
        await remove_below(
            self._metadata,
            ownership,
            [keys.below_topic(name), keys.below_storage(name)],
            [
                Delete(keys.topic(name)),
                Delete(keys.namespace_topic(name)),
                Delete(keys.assignment(self._rooms.broker_id, name)),
                Put(keys.owner(name), tombstone.to_bytes()),  # epochs go on if the name is used again
            ],
        )
        await remove_files(self._rooms.disk, name)
        await self._remove_objects(name, ownership.epoch)
        log.info("topic deleted", extra={"topic": name})

    # --- opening and closing ------------------------------------------------------------------------

    @property
    def _session(self) -> int:
        return self._rooms.session if self.elsewhere is None else self.elsewhere.session

    async def load_all(self, names: Sequence[TopicName] | None = None, session: int | None = None) -> None:
        """Opens these, or everything that exists. One that cannot be opened is reported and the others are served.

        In a cluster these are what was this broker's in its `session`: the rest of them is not claimed once it was
        declared dead, and what somebody else has by now never is.
        """
        if names is None:
            names = await self.names()
        results = await gather_bounded([lambda name=name: self._load(name, session) for name in names])
        for name, result in zip(names, results, strict=True):
            if isinstance(result, Conflict) and self.elsewhere is not None:
                # It is another broker's; or if it is ours, it is claimed again like any other that we do not serve.
                log.warning("topic not claimed", extra={"topic": name, "why": str(result)})
            elif isinstance(result, TopicUnknown):
                log.info("topic is gone", extra={"topic": name})  # deleted meanwhile, or its deletion was finished
            elif isinstance(result, DanubeError):
                self.unopened[name] = str(result)
                log.error("topic not opened", extra={"topic": name, "why": str(result)})
            elif isinstance(result, BaseException):
                raise result

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

    async def claim(
        self,
        name: TopicName,
        owner_revision: int | None,
        marker_revision: int | None = None,
        *,
        from_anybody: bool = True,
    ) -> None:
        """Opens a topic that the cluster gave to this broker. Raises Conflict if owner or marker is not what it was, or
        if somebody owns the topic and it is not to be taken `from_anybody`.
        """
        session = self._session
        async with self._lock(name):
            if name in self._open:
                raise Conflict(keys.owner(name))
            await self._claim(
                name,
                owner_revision,
                marker_revision,
                session=session,
                take=Take.ANYBODYS if from_anybody else Take.NOBODYS,
            )
            self._arrived.set()
            self._arrived = asyncio.Event()

    async def _claim(
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
                self.elsewhere,
                owner_revision,
                marker_revision,
                session=session,
                take=take,
                is_awaited=lambda: name in self._awaited,
            )
        except DeletionCutOff as found:
            log.warning("deletion of a topic was cut off, and is finished", extra={"topic": name})
            await self._erase(found.ownership)
            raise TopicUnknown(name) from None
        if self._closing:
            await topic.close(self._closing)
            self._check_not_closing(name)
        if losses != self._losses or (session is not None and session != self._session):
            await topic.close("this broker was declared lost while it claimed the topic", owned=False)
            raise Conflict(keys.registration(self._rooms.broker_id))
        self._open[name] = topic
        self.unopened.pop(name, None)
        topic.ownership.when_lost = lambda: self._doubt(topic)
        return topic

    def _check_not_closing(self, name: TopicName) -> None:
        if self._closing:
            raise NotServed(name, self._closing)

    async def let_go(self, name: TopicName, marker: bytes, moved_to: str, phases: Phases | None = None) -> Phases:
        """Moves a topic away: sealed, released, closed, its files removed. Raises MoveFailed if it stays.

        `phases` is kept up to date, for whoever looks on.
        """
        clock = self._rooms.services.clock
        phases = phases or Phases(clock)
        async with self._lock(name):
            topic = self._open.get(name)
            if topic is None:
                raise NotServed(name, "it is not open here")
            self.leaving.add(name)
            try:
                await self._seal(topic, marker, moved_to, phases)
                self._open.pop(name, None)
                try:
                    await topic.close("it moved to another broker", moved_to=moved_to, owned=False)
                    await self._forget_files(name, topic)
                except DanubeError as error:
                    # It is released, and somebody else has it: whatever happens to its files here, it does not stay.
                    log.warning("files of a topic that moved are left", extra={"topic": name, "why": str(error)})
                phases.enter("done")
            finally:
                self.leaving.discard(name)
        if isinstance(topic, Topic) and topic.storage is not None:
            self._snapshots.publish(topic.storage.tier)
        milliseconds = {phase: round(ms, 1) for phase, ms in phases.milliseconds.items()}
        log.info("topic let go", extra={"topic": name, "pause_ms": round(phases.pause_ms, 1), "phases": milliseconds})
        return phases

    async def _seal(self, topic: AnyTopic, marker: bytes, moved_to: str, phases: Phases) -> None:
        """Raises MoveFailed, and the topic serves on; or OwnershipLost, and it is closed."""
        clock = self._rooms.services.clock
        try:
            if isinstance(topic, VolatileTopic):
                phases.enter("seal")
                found = Marker.from_bytes(marker)
                is_move = found is not None and found.reason in MOVES - {SHUTDOWN}
                await release_volatile(topic, clock, marker, forget=is_move)
                phases.enter("close")
            else:
                await seal(topic, clock, marker, phases, moved_to)
        except OwnershipLost:
            # If it is nobody's, or ours all the same, it is claimed again like any topic that nobody serves.
            self._open.pop(topic.name, None)
            await self._close_lost(topic)
            raise

    async def lost_log(self, name: TopicName) -> TopicLog | ClosedLog:
        """What this disk has of a topic, whether it is open here or not. Raises LogClosed while it is being closed."""
        async with self._lock(name):  # nobody opens it while its files are looked through
            topic = self._open.get(name)
            return topic.log if isinstance(topic, Topic) else await self._rooms.wal.lost_log(name)

    async def forget_epochs(self, name: TopicName, last: int) -> bool:
        """Removes what this disk has of a topic up to this epoch, as far as the store has it. False: not yet, for it is
        open or about to be, or nobody can say what the store has.
        """
        async with self._lock(name):
            if name in self._open:
                return False
            return await self._opener.remove_older(name, await look(self._metadata, name, self._rooms.broker_id), last)

    async def _forget_files(self, name: TopicName, topic: AnyTopic) -> None:
        """Everything is in the object store now, unless this disk has what nobody could adopt yet, or read."""
        if not isinstance(topic, Topic) or any(each.broker_id == self._rooms.broker_id for each in topic.orphans):
            return
        directories = [epoch_directory(name, epoch) for epoch in await epochs_on(self._rooms.disk, name)]
        if topic.has_damage or any([await is_damaged(self._rooms.disk, each) for each in directories]):
            log.warning("damaged files are left", extra={"topic": name, "path": topic_directory(name)})
            return
        await remove_files(self._rooms.disk, name)

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

        The first write that is refused finds such a topic at once; this finds those about which nothing is written.
        """
        clock = self._rooms.services.clock
        before: set[TopicName] = set()
        while True:
            await clock.sleep(SWEEP_SECONDS)
            doubted, self._doubted = self._doubted, {}
            # Twice in a row: of a topic that was just claimed, the assignment may not have been heard of yet.
            strange = {name for name in self._open if not self._is_assigned_here(name)}
            for topic in [*doubted, *(self._open[name] for name in sorted(strange & before))]:
                self._doubt(topic)
            before = strange

    def _is_assigned_here(self, name: TopicName) -> bool:
        return self.elsewhere is None or self.elsewhere.is_assigned_here(name)

    def _doubt(self, topic: AnyTopic) -> None:
        """The topic may be another broker's: looks, and closes it here if it is. Never waits.

        Whoever learned it may be one of the topic's own tasks, or hold its lock: so a task of its own does it.
        """
        if self._open.get(topic.name) is topic and topic not in self._doubting:
            task = asyncio.create_task(self._close_if_lost(topic), name=f"is {topic.name} ours")
            self._doubting[topic] = task
            task.add_done_callback(lambda _: self._doubting.pop(topic, None))

    async def _close_if_lost(self, topic: AnyTopic) -> None:
        """The owner key decides. If it cannot be read now, the next sweep looks again."""
        name = topic.name
        async with self._lock(name):  # a move that is under way, say, ends first
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
        self._rooms.telemetry.members.unassigned.inc()
        try:
            await topic.close("another broker has it; look it up again", owned=False)
        except DanubeError as error:
            log.error("topic not closed", extra={"topic": topic.name, "why": str(error)})

    async def reap(self) -> None:
        """Forgets registrations of consumers that are gone, every few minutes, until cancelled."""
        clock = self._rooms.services.clock
        while True:
            await clock.sleep(REAP_SECONDS)
            for topic in list(self._open.values()):
                try:
                    await topic.reap(clock.elapsed())
                except DanubeError as error:
                    log.warning("consumers not reaped", extra={"topic": topic.name, "why": str(error)})

    async def rest(self) -> None:
        """Topics where nothing happens give their reservation back, so that a crash leaves nothing in doubt."""
        clock = self._rooms.services.clock
        heads: dict[TopicName, int] = {}
        while True:
            await clock.sleep(REST_SECONDS)
            before, heads = heads, {}
            for topic in list(self._open.values()):
                if isinstance(topic, Topic) and topic.has_doubt:
                    heads[topic.name] = topic.head
                    if before.get(topic.name) == topic.head and topic.name not in self.leaving:
                        try:
                            await topic.rest()
                        except DanubeError as error:
                            log.warning("reservation not shrunk", extra={"topic": topic.name, "why": str(error)})

    def _lock(self, name: TopicName) -> asyncio.Lock:
        """Of whatever name somebody asks for; it is gone when nobody holds it or waits for it."""
        return self._opening.setdefault(name, asyncio.Lock())

    async def _load(self, name: TopicName, session: int | None = None) -> AnyTopic:
        async with self._lock(name):
            topic = self._open.get(name)
            if topic is None:
                # Alone, everything is ours. In a cluster, what another broker has is given by its leader or not at all.
                take = Take.ANYBODYS if self.elsewhere is None else Take.OWN
                topic = await self._claim(name, session=session, take=take)
            return topic

    async def _remove_objects(self, name: TopicName, epoch: int) -> None:
        """What stays because the store is away is garbage that nobody describes: `storage verify` names it."""
        if self._rooms.cloud is None:
            return
        try:
            await delete_objects(self._rooms.cloud.store, name, epoch)
        except DanubeError as error:
            log.warning("objects of a deleted topic are left", extra={"topic": name, "why": str(error)})

    async def retention(self, name: TopicName) -> Retention:
        """What is stored now, whoever changed it."""
        return (await read_policy(self._metadata, name)).retention

    # --- namespaces ---------------------------------------------------------------------------------

    async def namespaces(self) -> list[NamespaceName]:
        items = await self._metadata.list(keys.NAMESPACES)
        return [name for item in items if (name := keys.namespace_of_policy(item.key)) is not None]

    async def create_namespace(self, name: NamespaceName, policy: TopicPolicy = UNLIMITED) -> None:
        key = keys.namespace_policy(name)
        put = Put(key, json.dumps(policy.to_json()).encode())
        if await self._metadata.transact([Compare(key, 0)], [put]) is None:
            raise NamespaceExists(name)

    async def bootstrap_namespaces(self, names: Sequence[NamespaceName], policy: TopicPolicy) -> None:
        """Those that must be there; existing ones get the configured policy."""
        for name in {*names, SYSTEM}:
            key = keys.namespace_policy(name)
            known = await self._metadata.get(key)
            value = json.dumps(configured(policy, json.loads(known.value) if known else None)).encode()
            if known is None or known.value != value:
                await self._metadata.transact([], [Put(key, value)])

    async def delete_namespace(self, name: NamespaceName) -> None:
        policy = await self._metadata.get(keys.namespace_policy(name))
        if policy is None:
            raise NamespaceUnknown(name)
        topics = await self.names(name)
        if topics:
            raise NamespaceNotEmpty(name, len(topics))
        await self._metadata.transact([Compare(policy.key, policy.revision)], [Delete(policy.key)])

    async def namespace_policy(self, name: NamespaceName) -> TopicPolicy:
        item = await self._metadata.get(keys.namespace_policy(name))
        if item is None:
            raise NamespaceUnknown(name)
        return TopicPolicy.from_json(json.loads(item.value))

    # --- crashes --------------------------------------------------------------------------------------

    async def set_on_crash(self, name: TopicName, *, wait: bool) -> list[TopicName]:
        """Whether it, or each of its partitions, waits for its own broker when that is lost, or is taken over.

        One that waits already, and is not to wait any more, is taken over now.
        """
        names = await self.partitions(name)
        if not names:
            raise TopicUnknown(name)
        for each in names:
            await self._set_on_crash(each, wait)
        return names

    async def _set_on_crash(self, name: TopicName, wait: bool) -> None:
        while True:
            topic = await self._metadata.get(keys.topic(name))
            if topic is None:
                raise TopicUnknown(name)
            delivery = await self._metadata.get(keys.delivery(name))
            if wait and (delivery is None or json.loads(delivery.value) != Delivery.RELIABLE.value):
                raise Refused(f"topic {name} keeps nothing: there is nothing for it to wait for")
            marked = await self._metadata.get(keys.unassigned(name))
            key = keys.on_crash(name)
            compares = [
                Compare(topic.key, topic.revision),
                Compare(keys.unassigned(name), marked.revision if marked else 0),
            ]
            operations: list[Put | Delete] = [Put(key, WAIT) if wait else Delete(key)]
            marker = Marker.from_bytes(marked.value) if marked else None
            if marked is not None and marker is not None and marker.wait and not wait:
                operations.append(Put(marked.key, replace(marker, wait=False).to_bytes()))
            if await self._metadata.transact(compares, operations) is not None:
                log.info("what a crash means was set", extra={"topic": name, "wait": wait})
                return

    # --- subscriptions' settings ----------------------------------------------------------------------

    async def set_failure_policy(self, name: TopicName, subscription: SubscriptionName, policy: FailurePolicy) -> None:
        """Stored, also before the subscription exists, and in effect at once."""
        topic = await self.require(name)
        await topic.ownership.write([policy_put(name, subscription, policy)])
        await self._apply_config(topic, subscription)

    async def change_failure_policy(
        self, name: TopicName, subscription: SubscriptionName, given: Mapping[str, object]
    ) -> tuple[FailurePolicy, FailurePolicy]:
        """The policy before, and with the given fields, which is in effect at once. Raises ConfigError."""
        topic = await self.require(name)
        async with self._lock(name):  # of two changes of different fields both count
            before = await self.get_failure_policy(name, subscription) or FailurePolicy()
            after = FailurePolicy.from_json({**before.to_json(), **given})
            await topic.ownership.write([policy_put(name, subscription, after)])
        await self._apply_config(topic, subscription)
        return before, after

    async def get_failure_policy(self, name: TopicName, subscription: SubscriptionName) -> FailurePolicy | None:
        return (await read_config(self._metadata, name, subscription)).policy

    async def set_dispatch_config(
        self,
        name: TopicName,
        subscription: SubscriptionName,
        *,
        unacked_max: int | None = None,
        heartbeat: Heartbeat | None = None,
        forget_heartbeat: bool = False,
    ) -> None:
        """Only what is given changes; with `forget_heartbeat` the topic's, or else the broker's, is in force again."""
        topic = await self.require(name)
        if unacked_max is not None:
            DispatchLimits(unacked_max=unacked_max)  # raises if it is not allowed
        stored = await read_config(self._metadata, name, subscription)
        changed = StoredConfig(
            stored.policy,
            stored.unacked_max if unacked_max is None else unacked_max,
            None if forget_heartbeat else stored.heartbeat if heartbeat is None else heartbeat,
        )
        await topic.ownership.write([config_put(name, subscription, changed)])
        await self._apply_config(topic, subscription)

    async def get_dispatch_config(self, name: TopicName, subscription: SubscriptionName) -> DispatchConfig:
        stored = await read_config(self._metadata, name, subscription)
        return DispatchConfig(stored.unacked_max, stored.heartbeat)

    async def _apply_config(self, topic: AnyTopic, subscription: SubscriptionName) -> None:
        if isinstance(topic, Topic):
            topic.configure(subscription, await read_config(self._metadata, topic.name, subscription))

    # --- dead letters -------------------------------------------------------------------------------

    async def dead_letter(self, name: TopicName, message: Envelope) -> None:
        """Appends to the dead-letter topic, which is made if it is missing. Returns when the copy is safe."""
        message = message._replace(producer_name=f"broker-replicator-{self._rooms.broker_id}")
        try:
            try:
                topic = await self.require(name)
            except TopicUnknown:
                topic = await self.create(name, delivery=Delivery.RELIABLE)
        except NotServed:
            if self.remote is None:
                raise
            await self.remote.append(name, message)
            return
        await append_to(topic, message)


async def append_to(topic: AnyTopic, message: Envelope) -> None:
    """A dead letter, from here or from another broker."""
    if isinstance(topic, VolatileTopic):
        raise NotServed(topic.name, "a dead-letter topic must be reliable")
    await topic.append(message)
