"""How a topic comes to this broker: what the stores say of it, its log, the claim, its part of the cloud tier.

    look ─► old files go ─► log recovered ─► claim ─► history and sessions ─► subscriptions ─► it serves

Nothing before the claim has an effect outside this broker, and everything after it depends on it. A failure closes what
was opened, and the next try begins with another look.
"""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.base_subscription import Services
from pydanube.broker.ownership import Claimable, Ownership, look
from pydanube.broker.registrations import read_policy
from pydanube.broker.reservation import Reservation
from pydanube.broker.schema_enforcer import topic_schema
from pydanube.broker.topic import Defaults, Topic
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.cluster.cluster import ClusterNode
from pydanube.core import keys
from pydanube.core.commit.sessions import Sessions
from pydanube.core.history.ownership import LogStart, Owner, first_reservation
from pydanube.core.history.tiers import Retention
from pydanube.core.names import BrokerId, TopicName
from pydanube.core.policies import Delivery, TopicPolicy, effective
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.errors import Conflict, InvalidObject, LogClosed, ObjectDamaged, TailUnproven, TopicUnknown, Unavailable
from pydanube.history.leftovers import epochs_with_logs, remove_epochs, remove_files, remove_redundant
from pydanube.history.served import Cloud, Storage
from pydanube.history.tier import TopicTier
from pydanube.history.upload_state import UploadState
from pydanube.history.uploads import TopicUploads
from pydanube.log.wal import HandedOver, TopicLog, Wal
from pydanube.ports import Compare, Delete, Disk, Item, MetadataStore, Put, Work
from pydanube.telemetry import Telemetry

log = logging.getLogger(__name__)

KNOW_SECONDS: Final = 1.0  # for the list of all objects, before a topic is opened


class BrokerContext(NamedTuple):
    """What topics are built from."""

    broker_id: BrokerId
    session: int
    metadata: MetadataStore
    disk: Disk
    wal: Wal
    work: Work
    services: Services
    telemetry: Telemetry
    defaults: Defaults
    cloud: Cloud | None = None


class Take(Enum):
    """Whose topic a claim may take."""

    OWN = "own"  # what the store says is this broker's, and nothing else
    UNOWNED = "unowned"  # what was released, or never had an owner
    ANY = "any"  # also what another broker owns: it was declared dead, or there is none


class DeletionCutOff(Exception):
    """The topic was being deleted when its broker, or the store, went away. It is claimed, and must be erased."""

    def __init__(self, ownership: Ownership) -> None:
        super().__init__(ownership.topic)
        self.ownership = ownership


class Opener:
    """Opens topics. It does not know which are open: one of a name at a time is up to the caller."""

    def __init__(self, context: BrokerContext, on_lost: Callable[[Ownership], None]) -> None:
        """`on_lost` is called with an ownership that another broker has taken: see `Ownership`."""
        self._context = context
        self._on_lost = on_lost
        self._metadata = context.metadata
        self._preparing: set[asyncio.Task[None]] = set()
        # Epoch and session of every claim of this process since the topic was last open here: whether a claim was made
        # or not, and even if it comes late, no offset of it was given out.
        self._unused: dict[TopicName, set[tuple[int, int]]] = {}

    async def open(
        self,
        name: TopicName,
        cluster: ClusterNode | None,
        owner_revision: int | None = None,
        marker_revision: int | None = None,
        *,
        session: int | None = None,
        take: Take = Take.ANY,
        is_awaited: Callable[[], bool] = lambda: False,
    ) -> AnyTopic:
        """Claims the topic and opens it. Raises Conflict if owner or marker is not what it was, if the topic is not
        one to `take`, or if this broker's `session` is another by the time of the claim; TopicUnknown; DeletionCutOff.
        """
        # Concurrently: clients wait for a topic that moves, and each of these is a round trip to a majority.
        try:
            below, shared, seen = await asyncio.gather(
                self._metadata.list(keys.below_topic(name)),
                self._metadata.get(keys.namespace_policy(name.namespace)),
                look(self._metadata, name, self._context.broker_id),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidObject(f"what the metadata store holds of {name}", str(error)) from error
        seen = self._settled(name, seen)
        items = {item.key: item for item in below}
        kind, own, chosen, label = (
            items.get(key(name)) for key in (keys.delivery, keys.topic_policy, keys.schema_config, keys.schema)
        )
        if kind is None and await self._metadata.get(keys.topic(name)) is None:
            raise TopicUnknown(name)
        own_policy = json.loads(own.value) if own else None
        policy = effective(own_policy, json.loads(shared.value) if shared else None)
        schema = topic_schema(name, chosen, label)
        if (owner_revision is not None and seen.revision != owner_revision) or not self._may_take(seen.owner, take):
            raise Conflict(keys.owner(name))
        # The marker said before this was read that the topic has no owner, and only an owner changes what was read; a
        # claim that came or comes before ours deletes the marker, so that ours is refused. So this need not be read
        # again after the claim. It must be if the owner was lost: it may still be writing.
        is_stable = marker_revision is not None and (seen.owner is None or seen.sealed is not None)
        if kind is None:
            behind = max(seen.covered_end, seen.reserved_end or 0)  # nothing is given out any more
            ownership = await self._own(name, seen, behind, cluster, session, marker_revision)
            if await self._metadata.get(keys.delivery(name)) is not None:
                raise Conflict(keys.delivery(name))  # it was deleted and created anew while this looked
            raise DeletionCutOff(ownership)
        await self.remove_older(name, seen, seen.epoch - 1)
        topic: AnyTopic
        if Delivery(json.loads(kind.value)) is Delivery.NON_RELIABLE:
            ownership = await self._own(name, seen, 0, cluster, session, marker_revision)
            services, telemetry = self._context.services, self._context.telemetry
            topic = VolatileTopic(name, ownership, self._metadata, services, telemetry, policy, schema, own_policy)
        else:
            topic = await self._reliable(
                name,
                seen,
                cluster,
                session,
                marker_revision,
                policy,
                own_policy,
                schema,
                is_stable=is_stable,
                is_awaited=is_awaited,
            )
        try:
            await topic.open(below if is_stable else None)
            if not is_stable:  # the owner that was lost may have changed it until the claim
                chosen = await self._metadata.get(keys.schema_config(name))
                topic.enforcer.change(topic_schema(name, chosen, label))
        except BaseException:  # also if the caller has left: the next try opens everything anew
            await topic.close("it could not be opened", owned=False)
            raise
        self._unused.pop(name, None)
        return topic

    async def _reliable(
        self,
        name: TopicName,
        seen: Claimable,
        cluster: ClusterNode | None,
        session: int | None,
        marker_revision: int | None,
        policy: TopicPolicy,
        own_policy: Mapping[str, object] | None,
        schema: TopicSchema,
        *,
        is_stable: bool,
        is_awaited: Callable[[], bool],
    ) -> Topic:
        context = self._context
        topic_log = await self._open_log(name, seen)
        try:
            unproven_from = topic_log.recovered.head if topic_log.sessions.adopts_unknown else None
            if seen.owner is None or seen.owner.broker_id != context.broker_id or seen.sealed:
                unproven_from = None
            head, reserved = topic_log.head, (seen.reserved_end, seen.reserve_revision)
            more = first_reservation(head, seen.reserved_end or 0) if is_awaited() else None
            ownership = await self._own(name, seen, head, cluster, session, marker_revision, unproven_from, more)
            if more is not None:  # a producer is about to publish
                reserved = more, ownership.revision
                self._prepare(topic_log)
            storage = await self._storage(name, ownership, seen.items if is_stable else None)
        except BaseException:
            await topic_log.close()
            raise
        reservation = Reservation(ownership, topic_log, context.services.clock, *reserved)
        topic = Topic(
            name,
            topic_log,
            ownership,
            reservation,
            self._metadata,
            context.services,
            context.telemetry,
            policy,
            context.defaults,
            schema,
            storage,
            [*seen.orphans, *([seen.leaves] if seen.leaves else [])],
            own_policy,
        )
        if storage is not None:
            self._complete(topic_log.sessions, storage.tier.sessions, seen)

            async def read_retention() -> Retention:
                return (await read_policy(self._metadata, name)).retention

            storage.uploader.add(UploadState(storage.uploads, topic_log, policy.retention, read_retention))
        return topic

    @staticmethod
    def _complete(sessions: Sessions, in_objects: Sessions, seen: Claimable) -> None:
        """Completes the producer sessions that the log knows: what other owners uploaded, or adopted next to the seal,
        is in the store; what a lost owner accepted is an orphan, and while there is one a producer's last sequence is
        not known.
        """
        sessions.learn(in_objects)
        if seen.orphans or seen.leaves:
            sessions.loosen()
        sessions.forget(seen.voids)

    def _prepare(self, topic_log: TopicLog) -> None:
        task = asyncio.create_task(topic_log.prepare(), name=f"prepare {topic_log.topic}")
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _storage(self, name: TopicName, ownership: Ownership, known: Sequence[Item] | None) -> Storage | None:
        cloud = self._context.cloud
        if cloud is None:
            return None
        clock = self._context.services.clock
        tier = TopicTier(
            name,
            ownership.epoch,
            cloud.store,
            clock,
            cloud.work,
            ownership.write_if,
            self._metadata,
            cloud.config,
            self._context.telemetry.wal,
        )
        await tier.load(known)
        return Storage(tier, TopicUploads(tier), cloud.reader, cloud.uploader)

    async def _open_log(self, name: TopicName, seen: Claimable) -> TopicLog:
        start, sealed = seen.start, seen.sealed
        handed_over: HandedOver | None = None
        if sealed is not None:
            handed_over = HandedOver(Sessions.from_bytes(b64decode(sealed.sessions)), sealed.append_time)
        elif seen.owner is not None and not seen.owner.deleted and seen.owner.broker_id != self._context.broker_id:
            handed_over = HandedOver(Sessions(adopts_unknown=True))
        try:
            return await self._context.wal.topic(
                name,
                epoch=seen.epoch,
                start_offset=start.offset,
                known_end=start.known_end,
                handed_over=handed_over,
            )
        except TailUnproven as error:
            beyond = seen.offset_if_unproven
            if beyond is None or beyond < error.head:
                raise
            # Beyond everything that may have been given out: a gap, but no offset twice.
            log.error("log continues behind a gap", extra={"topic": name, "why": str(error), "start_offset": beyond})
            return await self._context.wal.topic(name, epoch=seen.epoch, start_offset=beyond, adopts_unknown=True)

    async def _own(
        self,
        name: TopicName,
        seen: Claimable,
        start: int,
        cluster: ClusterNode | None,
        expected_session: int | None,
        marker_revision: int | None,
        unproven_from: int | None = None,
        reserve_end: int | None = None,
    ) -> Ownership:
        # The registration that is compared is the one of the session that is written, and of no other.
        compares = [] if cluster is None else [cluster.registered]
        session = self._context.session if cluster is None else cluster.session
        if expected_session is not None and session != expected_session:
            raise Conflict(keys.registration(self._context.broker_id))
        if marker_revision is not None:
            compares.append(Compare(keys.unassigned(name), marker_revision))
        self._unused.setdefault(name, set()).add((seen.epoch, session))
        return await Ownership.claim(
            self._metadata,
            name,
            seen,
            broker_id=self._context.broker_id,
            session=session,
            start=start,
            compares=compares,
            unproven_from=unproven_from,
            reserve_end=reserve_end,
            on_lost=self._on_lost,
        )

    def _may_take(self, owner: Owner | None, take: Take) -> bool:
        is_unowned = owner is None or owner.released or owner.deleted
        if take is Take.OWN:
            return owner is not None and not is_unowned and owner.broker_id == self._context.broker_id
        return is_unowned or take is Take.ANY

    def _settled(self, name: TopicName, seen: Claimable) -> Claimable:
        """If this process owns the topic by a claim that came to nothing, it has given out nothing: it begins where
        that claim says, whatever was reserved.
        """
        owner = seen.owner
        if owner is None or owner.released or owner.deleted or owner.broker_id != self._context.broker_id:
            return seen
        if (owner.epoch, owner.session) not in self._unused.get(name, ()):
            return seen
        return seen._replace(start=LogStart(max(owner.start_offset, seen.covered_end), 0))

    async def remove_older(self, name: TopicName, seen: Claimable, last: int) -> bool:
        """Removes what an earlier topic of this name left here (its deletion may have missed this broker, or ended
        half-way), and of the epochs up to `last` what other owners have stored since: reads use the store's copy.

        False: that cannot be decided now, and everything stays.
        """
        context = self._context
        if context.wal.is_open(name):  # it is still being closed
            raise LogClosed(name)
        if seen.owner is not None and seen.owner.deleted:
            await remove_files(context.disk, name)
            return True
        await remove_epochs(context.disk, name, seen.created - 1)
        last = min(last, seen.since(context.broker_id, 0)[0] - 1)  # what comes later is the log
        if context.cloud is None or not any(epoch <= last for epoch in await epochs_with_logs(context.disk, name)):
            return True
        cloud = context.cloud
        tier = TopicTier(
            name, seen.epoch, cloud.store, context.services.clock, cloud.work, _not_ours, self._metadata, cloud.config
        )
        await tier.load(seen.items)
        try:
            async with asyncio.timeout(KNOW_SECONDS):  # clients wait for the topic, and the files can
                objects = await tier.load_manifest()
        except (Unavailable, ObjectDamaged, TimeoutError) as error:
            why = str(error) or "the object store does not answer in time"
            log.warning("files of lost epochs stay", extra={"topic": name, "why": why})
            return False
        closed = await context.wal.lost_log(name, last)
        first_offset = tier.history.first_offset
        await remove_redundant(
            context.disk, name, closed, last, first_offset=first_offset, objects=objects, voids=seen.voids
        )
        return True


async def _not_ours(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
    raise AssertionError("nothing is written before the claim")
