"""Writes down what happens to a real cluster: what clients tell, and what the metadata store takes, in one history.

Owners, cursors and orphans come from a watch on etcd, in etcd's order; times are when we heard of them. The rules need
no better ones: what they compare by time are the clients' own events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final

import pydanube
from pydanube.core import keys
from pydanube.core.history.ownership import Orphan, Owner, Seal, void_end
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError, Unreachable
from pydanube.ports import Event as Change
from pydanube.stores.metadata.etcd import EtcdMetadataStore
from pydanube.testing.history import (
    Acked,
    Claimed,
    Created,
    Cursor,
    Done,
    Event,
    Got,
    Head,
    History,
    Kept,
    Orphaned,
    Quiet,
    Released,
    Sent,
)

ALL_OFFSETS: Final = 1 << 62  # beyond it: an acknowledgement that came without an offset and is nowhere in the log
AGAIN_SECONDS: Final = 0.5
READ_SECONDS: Final = 120.0


class Recorder:
    def __init__(self, store: EtcdMetadataStore, topics: Iterable[str]) -> None:
        self.events: list[Event] = []
        self.topics = [TopicName(topic) for topic in topics]
        self.owners: dict[str, Owner] = {}
        self.orphans: dict[str, dict[int, int]] = {topic: {} for topic in self.topics}
        self.clean = False  # whether a seal that comes now has its cursors stored
        self.brokers: dict[int, int] = {}  # numbers by id
        self.told: list[tuple[str, str, float]] = []  # topic, message: acknowledged, without an offset
        self.sent = self.received = 0
        self.got: dict[tuple[str, str], set[int]] = {}  # offsets by topic and subscription
        self.done: dict[tuple[str, str], set[int]] = {}
        self.asked: dict[tuple[str, str], set[int]] = {}  # to be acknowledged, perhaps without an answer
        self.acked: dict[str, set[int]] = {topic: set() for topic in self.topics}
        self.worst_pause = 0.0
        self._store = store
        self._sent_at: dict[str, float] = {}
        self._sealed: dict[str, int] = {}
        self._began = asyncio.get_running_loop().time()

    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    def time(self, told: float) -> float:
        """What another process of this machine read from the same clock."""
        return told - self._began

    # --- clients ------------------------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        self.events.append(event)
        match event:
            case Sent():
                self.sent += 1
                self._sent_at.setdefault(event.message, event.at)
            case Acked():
                self.acked[event.topic].add(event.offset)
                self._waited(event.message, event.at)
            case Got():
                self.received += 1
                self.got.setdefault((event.topic, event.subscription), set()).add(event.offset)

    def acked_somewhere(self, topic: str, message: str, at: float) -> None:
        """The official client does not say where a message was stored."""
        self.told.append((topic, message, at))
        self._waited(message, at)

    def _waited(self, message: str, at: float) -> None:
        self.worst_pause = max(self.worst_pause, at - self._sent_at.get(message, at))

    def settled_by(self, topic: str, subscription: str) -> set[int]:
        """What is acknowledged, or may be: who asked for it and died before the answer came is not asked again."""
        key = (topic, subscription)
        return self.done.get(key, set()) | (self.asked.get(key, set()) & self.got.get(key, set()))

    def epoch_of(self, topic: str, broker: int) -> int:
        """The epoch in which this broker serves the topic, as far as we have heard; 0: we do not know."""
        owner = self.owners.get(topic)
        if owner is None or owner.released or self.brokers.get(owner.broker_id) != broker:
            return 0
        return owner.epoch

    # --- the metadata store -------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Until cancelled. A watch that ends goes on where it was: etcd keeps what happened since."""
        after: int | None = None
        while True:
            try:
                if after is None:
                    after = await self._store.transact([], []) or 0
                    for item in await self._store.list("/"):
                        self._changed(Change(item.key, item.value, item.revision))
                async for changes in self._store.watch("/", after):
                    for change in changes:
                        self._changed(change)
                        after = max(after, change.revision)
            except Unreachable:
                await asyncio.sleep(AGAIN_SECONDS)

    def _changed(self, change: Change) -> None:
        parts = change.key.split("/")
        if change.key.startswith(keys.STORAGE) and len(parts) > 5:
            topic = TopicName(f"/{parts[3]}/{parts[4]}")
            if topic in self.orphans:
                self._storage_changed(topic, parts[5], parts[-1], change.value)
        elif change.key.startswith(keys.TOPICS) and len(parts) == 7 and parts[6] == "cursor" and change.value:
            topic = TopicName(f"/{parts[2]}/{parts[3]}")
            if topic in self.orphans:
                self.add(Cursor(topic, parts[5], int(change.value), self.now()))

    def _storage_changed(self, topic: TopicName, kind: str, last: str, value: bytes | None) -> None:
        match kind:
            case "owner" if value is not None:
                self._owned(topic, Owner.from_bytes(value))
            case "state" if value is not None:
                self._sealed[topic] = Seal.from_bytes(value).next_offset
            case "orphans" if value is not None:
                orphan = Orphan.from_bytes(int(last), value)
                self.orphans[topic][orphan.start] = orphan.end
                self.add(Orphaned(topic, orphan.start, orphan.end, self.now()))
            case "orphans":
                self.orphans[topic].pop(int(last), None)

    def _owned(self, topic: TopicName, owner: Owner) -> None:
        before = self.owners.get(topic)
        self.owners[topic] = owner
        if before is None:
            self.add(Created(topic, True, self.now()))
        number = self.brokers.get(owner.broker_id, 0)
        if owner.released:
            self.add(Released(topic, owner.epoch, self._sealed.get(topic, 0), self.clean, self.now()))
        elif before is None or before.epoch != owner.epoch:  # else its owner wrote it anew
            self.add(Claimed(topic, owner.epoch, number, owner.start_offset, self.now()))

    # --- the end of a round -------------------------------------------------------------------------------------

    async def judged(self, client: pydanube.Client, quiet: Quiet) -> History:
        """Everything so far in the order of time, and the topics as they are now. Raises DanubeError."""
        kept = await asyncio.gather(*(self._kept(client, topic) for topic in self.topics))
        for each in kept:
            owner = self.owners[each.topic]
            broker = self.brokers.get(owner.broker_id, 0)
            self.add(Head(each.topic, owner.epoch, broker, each.head, self.now()))
        events = [*self.events, quiet, *self._found(kept), *self._unanswered(quiet.at)]
        return History([*sorted(events, key=lambda event: event.at), *kept])

    async def _kept(self, client: pydanube.Client, topic: TopicName) -> Kept:
        info = await client.describe_storage(topic, timeout=READ_SECONDS)
        messages: dict[int, str] = {}
        async for batch in client.fetch(topic, info.first_offset, info.head, timeout=READ_SECONDS):
            offsets, payloads = batch.column("offset").to_pylist(), batch.column("payload").to_pylist()
            messages.update(zip(offsets, (payload.decode() for payload in payloads), strict=True))
        items = await self._store.list(keys.voids(topic))
        voids = [(start, void_end(item.value)) for item in items if (start := keys.start_of(item.key)) is not None]
        orphans = sorted(self.orphans[topic].items())
        return Kept(topic, info.first_offset, info.head, messages, voids, orphans, self.now())

    def _found(self, kept: Sequence[Kept]) -> list[Event]:
        """Where what the official client sent is. What was sent again is there twice; then the last counts."""
        places = {each.topic: {message: offset for offset, message in sorted(each.messages.items())} for each in kept}
        found: list[Event] = []
        for number, (topic, message, at) in enumerate(self.told):
            offset = places[topic].get(message, ALL_OFFSETS + number)
            found.append(Acked(topic, message, offset, 0, 0, at))
        return found

    def _unanswered(self, at: float) -> list[Event]:
        """Acknowledgements without an answer that must have arrived: the broker says that nothing is left."""
        return [
            Done(topic, subscription, offset, 0, at)
            for (topic, subscription), asked in self.asked.items()
            for offset in sorted(asked - self.done.get((topic, subscription), set()))
        ]

    async def settled(self) -> str:
        """Empty when every topic is served, and nothing of it waits on the disk of a lost broker; else what is not."""
        for topic in self.topics:
            owner = self.owners.get(topic)
            if owner is None or owner.released:
                return f"{topic} has no owner"
            if self.orphans[topic]:
                return f"{topic} has an orphan at {min(self.orphans[topic])}"
        try:
            markers = await self._store.list(keys.UNASSIGNED)
        except DanubeError as error:
            return f"the metadata store does not answer ({error})"
        return f"{markers[0].key} is still there" if markers else ""
