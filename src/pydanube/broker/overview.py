"""What any broker can say about any topic: from the metadata store and the cluster's view, whichever broker serves it.

    active       a broker serves it
    moving       it is on its way from one broker to another
    unassigned   no broker serves it: it is new, its broker was lost or is away, or it could not be opened

What only its owner knows (the head, the phase of a move) is added by the owner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pydanube.broker.catalog import Live
from pydanube.broker.registrations import read_subscriptions, topic_heartbeat
from pydanube.broker.schema_enforcer import topic_schema
from pydanube.broker.service import Broker
from pydanube.core import keys
from pydanube.core.cluster.placement import MOVES, WAIT
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.history.ownership import Orphan, Owner
from pydanube.core.names import BrokerId, SubscriptionName, TopicName
from pydanube.core.policies import Delivery, SubscriptionKind
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.errors import ConfigError, DataDamaged, TopicUnknown
from pydanube.ports import Item

ACTIVE: Final = "active"
MOVING: Final = "moving"
UNASSIGNED: Final = "unassigned"


class Described(NamedTuple):
    """A topic as the metadata store has it. `broker` serves it, or was the last to; None: no broker does."""

    topic: TopicName
    delivery: Delivery
    schema_subject: str | None
    subscriptions: Mapping[SubscriptionName, SubscriptionKind]
    broker: BrokerId | None


class TopicStanding(NamedTuple):
    """Where a topic is. `sentence` is for people; `phase` is that of a move, empty if it is not known here."""

    topic: TopicName
    state: str
    sentence: str
    phase: str
    broker: BrokerId | None
    to: BrokerId | None
    epoch: int
    orphans: Sequence[tuple[Orphan, str]]  # with what brings it back
    live: Live | None  # None: it is not served here
    waits: bool  # for its own broker, should that be lost
    heartbeat: Heartbeat | None  # of its subscriptions that have none of their own; None: the broker's


class Overview:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics
        self._metadata = broker.topics.context.metadata

    def host_of(self, name: TopicName) -> BrokerId | None:
        """Who has it, by exactly this name."""
        if self._topics.get(name) is not None:
            return self._broker.broker_id
        return self._broker.cluster.host_of(name) if self._broker.cluster is not None else None

    async def delivery(self, name: TopicName) -> Delivery:
        """Raises TopicUnknown."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic.delivery
        item = await self._metadata.get(keys.delivery(name))
        if item is None:
            raise TopicUnknown(name)
        try:
            return Delivery(json.loads(item.value))
        except ValueError:
            raise _foreign(item) from None

    async def describe(self, name: TopicName) -> Described:
        """Raises TopicUnknown."""
        delivery = await self.delivery(name)
        schema = await self.schema(name)
        try:
            stored = await read_subscriptions(self._metadata, name)
        except (ValueError, KeyError, TypeError) as error:
            raise DataDamaged(f"what is stored about {name} is none of ours: {error}") from error
        return Described(name, delivery, schema.subject, {each.name: each.kind for each in stored}, self.host_of(name))

    async def schema(self, name: TopicName) -> TopicSchema:
        """What is stored now, whichever broker wrote it."""
        chosen = await self._metadata.get(keys.schema_config(name))
        label = await self._metadata.get(keys.schema(name)) if chosen is None else None
        return topic_schema(name, chosen, label)

    # --- where it is --------------------------------------------------------------------------------------

    async def state(self, name: TopicName) -> TopicStanding:
        """Raises TopicUnknown."""
        await self.delivery(name)
        item = await self._metadata.get(keys.owner(name))
        try:
            owner = Owner.from_bytes(item.value) if item else None
        except (ValueError, KeyError, TypeError):
            assert item is not None
            raise _foreign(item) from None
        on_crash = await self._metadata.get(keys.on_crash(name))
        waits = on_crash is not None and on_crash.value == WAIT
        config = await self._metadata.get(keys.topic_dispatch_config(name))
        try:
            heartbeat = topic_heartbeat(config)
        except (ValueError, TypeError, AttributeError, ConfigError):
            assert config is not None
            raise _foreign(config) from None
        state, sentence, to = self._where(name, waits)
        moving = self._topics.moves.moving.get(name)
        return TopicStanding(
            name,
            state,
            sentence,
            moving.name if moving is not None else "",
            self.host_of(name),
            to,
            owner.epoch if owner else 0,
            await self._orphans(name),
            self._live_here(name),
            waits,
            heartbeat,
        )

    def _where(self, name: TopicName, waits: bool) -> tuple[str, str, BrokerId | None]:
        cluster = self._broker.cluster
        why_unopened = self._topics.unopened.get(name, "")
        if cluster is None:
            if self._topics.get(name) is not None:
                return ACTIVE, f"this broker serves it{self._refusing()}", None
            return (
                UNASSIGNED,
                f"it could not be opened here: {why_unopened}" if why_unopened else "it is not open",
                None,
            )
        marker, host = cluster.marker_of(name), self.host_of(name)
        if marker is not None and not marker.error:
            state = MOVING if marker.reason in MOVES and marker.to is not None else UNASSIGNED
            return state, marker.stage, marker.to
        if host is None:
            return UNASSIGNED, "no broker has it", None
        if host not in cluster.peers:
            hope = "it waits for that broker" if waits else "when its lease has run out another one takes it"
            return UNASSIGNED, f"broker {host} has it and is away; {hope}", None
        if host == self._broker.broker_id and why_unopened:
            return UNASSIGNED, f"it could not be opened here: {why_unopened}", None
        failed = f"; its last move failed: {marker.error}" if marker is not None else ""
        refusing = self._refusing() if host == self._broker.broker_id else ""
        return ACTIVE, f"broker {host} serves it{failed}{refusing}", None

    def _refusing(self) -> str:
        full = self._broker.wal.full
        return f"; publishes are refused: {full}" if full is not None else ""

    async def _orphans(self, name: TopicName) -> list[tuple[Orphan, str]]:
        found = []
        for item in await self._metadata.list(keys.orphans(name)):
            start = keys.start_of(item.key)
            if start is not None:
                try:
                    orphan = Orphan.from_bytes(start, item.value)
                except (ValueError, KeyError, TypeError):
                    raise _foreign(item) from None
                found.append((orphan, self._rescue_of(orphan)))
        return found

    def _rescue_of(self, orphan: Orphan) -> str:
        cluster = self._broker.cluster
        if cluster is not None and orphan.broker_id in cluster.peers:
            return f"broker {orphan.broker_id} is back and brings it; then the topic's owner takes it in"
        return (
            f"start broker {orphan.broker_id} again on its data directory, which alone has it; "
            "or give it up with `danube admin topics orphan discard`"
        )

    async def live(self, name: TopicName) -> Live:
        """Asks the owner, if it is another broker. Raises TopicUnknown, NotServed, Unreachable."""
        here = self._live_here(name)
        if here is None and self._topics.remote is not None:
            return await self._topics.remote.live(name)
        await self._topics.require(name)
        here = self._live_here(name)
        assert here is not None
        return here

    def _live_here(self, name: TopicName) -> Live | None:
        topic = self._topics.get(name)
        if topic is None:
            return None
        consumers = sum(each.connected for each in topic.subscriptions.values())
        if not topic.reliable:
            return Live(0, 0, len(topic.producers), consumers)
        return Live(topic.first_offset, topic.head, len(topic.producers), consumers)


def _foreign(item: Item) -> DataDamaged:
    return DataDamaged(
        f"{item.key} in the metadata store has a value that is none of ours: bring it back from a backup"
    )
