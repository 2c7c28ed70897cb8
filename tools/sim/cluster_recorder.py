"""Looks at a simulated cluster from outside and writes down what it sees: owners, cursors, heads; at the end, the logs.

The store itself tells what it takes, in the order in which it takes it: owner keys, cursors, policies, orphans.
"""

from __future__ import annotations

import asyncio
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from pydanube.broker.topic import Topic
from pydanube.core import keys, policies
from pydanube.core.cluster.lifecycle import BrokerRegistration
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy
from pydanube.core.history.ownership import Orphan, Owner, Seal, reserve_from_bytes, void_end
from pydanube.core.history.tiers import Descriptor, TopicHistory
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import DataDamaged, OffsetOutOfRange
from pydanube.ports import Clock, Delete, Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.testing.cluster import Cluster
from pydanube.testing.history import (
    Claimed,
    Created,
    Cursor,
    Dead,
    Departed,
    Forgot,
    Given,
    Got,
    Head,
    History,
    Kept,
    Orphaned,
    Policy,
    Released,
    Serving,
    life,
)

RECORD_SECONDS: Final = 5.0


class RecordingStore(MemoryMetadataStore):
    """A metadata store that says what it takes."""

    def __init__(self, clock: Clock, taken: Callable[[str, bytes | None], None]) -> None:
        super().__init__(clock)
        self._taken = taken

    def _change(self, operations: Sequence[Put | Delete]) -> None:
        super()._change(operations)
        for operation in operations:
            self._taken(operation.key, operation.value if isinstance(operation, Put) else None)


class Recorder:
    """Gives `cluster` a store that tells, and keeps the record. Topics below `reliable_below` are reliable."""

    def __init__(self, cluster: Cluster, history: History, *, reliable_below: int) -> None:
        self._cluster = cluster
        self._history = history
        self._reliable_below = reliable_below
        self._lives: dict[TopicName, str] = {}
        self._made: dict[TopicName, list[int]] = {}  # in which epochs
        self._epochs: dict[TopicName, int] = {}  # of the last claim
        self._sealed: dict[TopicName, int] = {}  # next offset of the last seal
        self._owners: dict[TopicName, Owner] = {}
        self._reserved: dict[TopicName, int] = {}
        self._objects: dict[TopicName, dict[int, Descriptor]] = {}  # what describes each, by its first offset
        self._begins: dict[TopicName, int] = {}
        self._limits: dict[TopicName, list[tuple[float, int]]] = {}  # of size, and since when
        cluster.metadata = RecordingStore(cluster.clock, self._stored)

    # --- the store --------------------------------------------------------------------------------------------

    def _stored(self, key: str, value: bytes | None) -> None:
        """The store took this; None: it was deleted."""
        parts = key.split("/")
        if value is None:
            if key.startswith(keys.STORAGE) and parts[5:] == ["reserve"]:
                self._reserved.pop(TopicName(f"/{parts[3]}/{parts[4]}"), None)
            return
        if key.startswith(keys.STORAGE) and len(parts) > 5:
            topic = TopicName(f"/{parts[3]}/{parts[4]}")
            match parts[5]:
                case "owner":
                    self._owner(topic, Owner.from_bytes(value))
                case "reserve":
                    self._reserved[topic] = reserve_from_bytes(value)
                case "objects":
                    self._described(topic, Descriptor.from_bytes(value))
                case "history":
                    self._moved_first(topic, TopicHistory.from_bytes(value).first_offset)
                case "state":
                    self._sealed[topic] = Seal.from_bytes(value).next_offset
                case "orphans":
                    orphan = Orphan.from_bytes(int(parts[6]), value)
                    self._history.add(Orphaned(self._life(topic), orphan.start, orphan.end, self._now()))
        elif key.startswith(keys.TOPICS) and parts[4:] == ["policy"]:
            limit = int(json.loads(value).get("retention_mb") or 0) * policies.RETENTION_UNIT_BYTES
            self._limits.setdefault(TopicName(f"/{parts[2]}/{parts[3]}"), []).append((self._now(), limit))
        elif key.startswith(keys.TOPICS) and len(parts) == 7:
            topic, name = TopicName(f"/{parts[2]}/{parts[3]}"), parts[5]
            if parts[6] == "cursor" and name.startswith("sub-"):
                self._history.add(Cursor(self._life(topic), name, int(value), self._now()))
            elif parts[6] == "failure_policy":
                policy = FailurePolicy.from_json(json.loads(value))
                letters = policy.poison_policy is PoisonPolicy.DEAD_LETTER
                told = Policy(self._life(topic), name, policy.max_redelivery_count, letters, self._now())
                self._history.add(told)

    def _described(self, topic: TopicName, new: Descriptor) -> None:
        """It holds what those in its place held."""
        known = self._objects.setdefault(topic, {})
        for start in [start for start, each in known.items() if start < new.end and new.start_offset < each.end]:
            del known[start]
        known[new.start_offset] = new

    def _moved_first(self, topic: TopicName, first: int) -> None:
        """Only retention moves where a topic begins. A rule that was replaced stays in force for an unknown time: until
        its owner has looked again.
        """
        before, self._begins[topic] = self._begins.get(topic, 0), first
        if first <= before:
            return
        known = self._objects.setdefault(topic, {})
        gone = [known.pop(start) for start in sorted(known) if known[start].end <= first]
        changes = self._limits.get(topic, [])
        limits = [limit for (_, limit), (until, _) in pairwise([*changes, (math.inf, 0)]) if until > self._now() - 120]
        limits = [limit for limit in limits if limit]
        if gone and limits:
            size_bytes = sum(each.size for each in known.values()) + gone[-1].size
            self._history.add(Forgot(self._life(topic), first, size_bytes, min(limits), self._now()))

    def given(self, topic: Topic, offset: int, epoch: int) -> None:
        """A broker has just given out this offset: the store must have it reserved, if the topic is still its own."""
        owner = self._owners.get(topic.name)
        if owner is None or owner.epoch != epoch or owner.released or owner.deleted:
            return
        reserved, believed = self._reserved.get(topic.name, 0), topic.log.reserved_end or 0
        if offset >= reserved or believed > max(reserved, topic.head):
            label = life(topic.name, owner.created)
            self._history.add(Given(label, offset, epoch, reserved, believed, self._now()))

    def _owner(self, topic: TopicName, owner: Owner) -> None:
        self._owners[topic] = owner
        if owner.deleted:
            for known in (self._objects, self._begins, self._reserved, self._limits):
                known.pop(topic, None)
            return
        label = life(topic, owner.created)
        if self._lives.get(topic) != label:
            self._lives[topic] = label
            self._made.setdefault(topic, []).append(owner.created)
            reliable = not topic[-1].isdecimal() or int(topic[-1]) < self._reliable_below
            self._history.add(Created(label, reliable, self._now()))
        number = next((node.number for node in self._cluster.nodes if node.known_id == owner.broker_id), 0)
        if owner.released:
            clean = self._is_clean(topic, number)
            self._history.add(Released(label, owner.epoch, self._sealed.get(topic, 0), clean, self._now()))
        elif self._epochs.get(topic) != owner.epoch:  # else its owner wrote it anew
            self._epochs[topic] = owner.epoch
            if keys.delivery(topic) not in self._cluster.metadata._items:
                return  # claimed to finish its deletion: nothing is given out in that epoch
            item = self._cluster.metadata._items.get(keys.registration(BrokerId(owner.broker_id)))
            member = BrokerRegistration.from_bytes(item.value) if item else None
            is_member = member is not None and member.session == owner.session
            self._history.add(Claimed(label, owner.epoch, number, owner.start_offset, self._now(), is_member))

    def _is_clean(self, topic: TopicName, number: int) -> bool:
        """Whether nothing can have kept the owner from storing its cursors after it took its last acknowledgement."""
        node = self._cluster.node(number)
        broker = node.broker
        phases = broker.topics.moves.moving.get(topic) if broker is not None else None
        if phases is None:
            return False
        frozen_at = phases._began - phases.pause_ms / 1000
        return max(node.metadata.failed_at, node.paused_at) < frozen_at

    def _life(self, topic: TopicName) -> str:
        return self._lives.get(topic, topic)

    def life_of(self, topic: TopicName, epoch: int) -> str:
        """The name under which the topic is recorded that had this epoch."""
        made = self._made.get(topic, [])
        return life(topic, made[max(0, bisect_right(made, epoch) - 1)] if made else 0)

    def is_replaced(self, topic: TopicName, epoch: int) -> bool:
        """Whether the topic was claimed again since."""
        return epoch < self._epochs.get(topic, 0)

    def _now(self) -> float:
        return self._cluster.clock.elapsed()

    # --- brokers ----------------------------------------------------------------------------------------------

    async def look_on(self, topics: Sequence[TopicName]) -> None:
        """Notes now and then what brokers say of the topics they have, until cancelled."""
        while True:
            await asyncio.sleep(RECORD_SECONDS)
            for topic in topics:
                self._look(topic)

    def _look(self, topic: TopicName) -> None:
        serving = []
        for node in self._cluster.living:
            found = node.topic(topic)
            if found is None:
                continue
            ownership = found.ownership
            if found.reliable:
                label = life(topic, ownership.created)
                self._history.add(Head(label, ownership.epoch, node.number, found.head, self._now()))
            if node.serves(topic) and not node.cannot_know:
                serving.append(node.number)
        if len(serving) > 1:
            self._history.add(Serving(self._life(topic), serving, self._now()))

    # --- the end ----------------------------------------------------------------------------------------------

    def departed(self, topics: Sequence[TopicName]) -> None:
        """The consumers of these topics are about to leave. Somebody may still send, or a broker still store it."""
        for topic in topics:
            node = self._cluster.any_host(topic)
            found = node.topic(topic) if node is not None else None
            if found is not None and found.reliable:
                self._history.add(Departed(life(topic, found.ownership.created), found.head, self._now()))

    async def read(self, topics: Sequence[TopicName], dead_letters: TopicName) -> None:
        """Every topic that is served, as it is now, and what was given up."""
        for topic in topics:
            node = self._cluster.any_host(topic)
            found = node.topic(topic) if node is not None else None
            if found is None or not found.reliable:
                continue
            messages = {offset: text for offset, text, _ in await everything(found)}
            items = await self._cluster.metadata.list(keys.voids(topic))
            voids = [(start, void_end(item.value)) for item in items if (start := keys.start_of(item.key)) is not None]
            orphans = [(each.start, each.end) for each in found.orphans]
            label = life(topic, found.ownership.created)
            self._history.add(Kept(label, found.first_offset, found.head, messages, voids, orphans, self._now()))
        node = self._cluster.any_host(dead_letters)
        letters = node.topic(dead_letters) if node is not None else None
        if letters is not None and letters.reliable:
            # The copy names its topic, not which one of that name it was.
            lives = {(got.subscription, got.message): got.topic for got in self._history.all(Got)}
            for _, text, attributes in await everything(letters):
                topic, name = TopicName(attributes["x-original-topic"]), attributes["x-original-subscription"]
                offset = int(attributes["x-original-topic-offset"])
                label = lives.get((name, text), self._life(topic))
                self._history.add(Dead(label, name, text, offset, self._now()))


async def everything(topic: Topic) -> list[tuple[int, str, dict[str, str]]]:
    """Every message that can be read: its offset, its text, its attributes."""
    found: list[tuple[int, str, dict[str, str]]] = []
    offset = topic.first_offset
    while offset < topic.head:
        try:
            rows = await topic.rows(offset, topic.head)
        except OffsetOutOfRange as gap:
            offset = max(gap.first, offset + 1)
            continue
        except DataDamaged:
            offset += 1  # one at a time: what is missing in the end is what could not be read
            continue
        if not rows:
            break
        found += [(at, each.payload.decode(), dict(each.attributes)) for at, each in rows]
        offset = rows[-1][0] + 1
    return found
