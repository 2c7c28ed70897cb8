"""What this broker knows of its cluster: a copy of everything below `/cluster/`.

The copy is kept fresh by a watch, and made anew from a list every 30 s, when the watch breaks, and when a write was
refused because the copy was old. A lost event costs time, never correctness: every write that rests on the copy
compares the revisions of what it rests on.

Values that are none of ours are left alone and not seen; the log names them once.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeVar

from pydanube.core import keys
from pydanube.core.cluster.leader import World
from pydanube.core.cluster.lifecycle import BrokerLoss, BrokerRegistration, BrokerState, silent_before_end
from pydanube.core.cluster.load import LoadReport, LoadTally
from pydanube.core.cluster.placement import Marker, Move
from pydanube.core.cluster.presence import Presence
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import Unavailable
from pydanube.ports import Clock, Compare, Delete, Event, Item, MetadataStore, Put, Revision

log = logging.getLogger(__name__)

T = TypeVar("T")

RELIST_SECONDS: Final = 30.0
VIEW_WATCH_RETRY_SECONDS: Final = 0.2  # doubled with every failure
VIEW_WATCH_RETRY_SECONDS_MAX: Final = 5.0


class Seen(NamedTuple, Generic[T]):
    """A value and the revision that last changed it."""

    value: T
    revision: Revision


@dataclass(slots=True)
class _Life:
    """How long a session of a broker has been registered, as far as this process can tell."""

    session: int
    since: float
    is_old: bool  # it was there before this process looked, or looked again: perhaps a lease of the dead
    until: float | None = None


class View:
    """Read it without waiting; wait with `changed`. `version` counts changes."""

    def __init__(
        self, store: MetadataStore, clock: Clock, *, ttl_seconds: float, relist_seconds: float = RELIST_SECONDS
    ) -> None:
        self._store = store
        self._clock = clock
        self._ttl_seconds = ttl_seconds
        self._relist_seconds = relist_seconds
        self.version = 0
        self.registrations: dict[BrokerId, Seen[BrokerRegistration]] = {}
        self.states: dict[BrokerId, Seen[BrokerState]] = {}
        self.lost: dict[BrokerId, Seen[BrokerLoss]] = {}
        self.seen: dict[BrokerId, Seen[Presence]] = {}  # who was there in the last day
        self.assigned: dict[BrokerId, dict[TopicName, Revision]] = {}
        self.hosts: dict[TopicName, BrokerId] = {}
        self.markers: dict[TopicName, Seen[Marker]] = {}
        self.reports: dict[BrokerId, LoadReport] = {}
        self.history: dict[str, Move] = {}
        self.leader: Seen[BrokerId] | None = None
        self._spoken: dict[BrokerId, LoadReport] = {}  # as it was written, without topics that are as they were
        self._quiet: dict[BrokerId, LoadReport] = {}
        self._tally = LoadTally()
        self._revisions: dict[str, Revision] = {}
        self._gone: dict[str, Revision] = {}  # what this process has deleted, until the watch reports it
        self._lives: dict[BrokerId, _Life] = {}
        self._listed = False
        self._complained: dict[str, Revision] = {}
        self._waiting: list[asyncio.Future[None]] = []

    # --- reading ------------------------------------------------------------------------------------

    def world(self) -> World:
        """What the leader decides on."""
        return World(
            alive={broker: seen.value.session for broker, seen in self.registrations.items()},
            witnessed=self._witnessed(),
            states={broker: seen.value for broker, seen in self.states.items()},
            lost={broker: (seen.value, seen.revision) for broker, seen in self.lost.items()},
            assigned=self.assigned,
            markers={topic: seen.value for topic, seen in self.markers.items()},
            reports=self.reports,
            history=list(self.history.values()),
            counted=self._tally.figures,
            known=self._tally.known,
        )

    def active(self) -> list[BrokerId]:
        """Living brokers that may be given topics."""
        return sorted(b for b in self.registrations if b in self.states and self.states[b].value.takes_topics)

    def revision(self, key: str) -> Revision:
        """Of a key as it was last seen; 0: not there."""
        return self._revisions.get(key, 0)

    def compare(self, key: str) -> Compare:
        """Holds if the key still is what was last seen."""
        return Compare(key, self.revision(key))

    async def changed(self, since: int, seconds: float) -> None:
        """Returns when `version` is not `since` any more, after `seconds` at the latest."""
        if self.version != since or seconds <= 0:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        patience = loop.call_later(seconds, _wake, waiter)  # cheaper than a timeout: several tasks wait all the time
        try:
            await waiter
        finally:
            patience.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _witnessed(self) -> dict[BrokerId, int]:
        """Sessions that certainly lived while this process looked.

        One that was there from the first look may have died before: only if it outlived a whole lease was it renewed.
        """
        now = self._clock.elapsed()
        return {
            broker: life.session
            for broker, life in self._lives.items()
            if not life.is_old or (now if life.until is None else life.until) - life.since >= self._ttl_seconds
        }

    def gone_for(self, broker: BrokerId) -> float | None:
        """Since how many seconds it is not registered any more; None: it is, or this process never saw it."""
        life = self._lives.get(broker)
        return None if life is None or life.until is None else self._clock.elapsed() - life.until

    @property
    def silent_before_end(self) -> float:
        """For how many seconds a broker had said nothing, at least, when its lease ran out."""
        return silent_before_end(self._ttl_seconds)

    def doubt(self) -> None:
        """This process lost its own lease: no death it saw counts, perhaps the store was unreachable for all."""
        now = self._clock.elapsed()
        for broker, life in self._lives.items():
            life.is_old, life.since = True, now
            life.until = None if broker in self.registrations else now

    # --- writing ------------------------------------------------------------------------------------

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        """As the store's; its changes are in the view immediately. After a refusal what was compared is read again."""
        revision = await self._store.transact(compares, operations)
        if revision is None:
            await self.look_again([compare.key for compare in compares if compare.key.startswith(keys.CLUSTER)])
            return None
        self.notice(operations, revision)
        return revision

    def notice(self, operations: Sequence[Put | Delete], revision: Revision) -> None:
        """This process has written that: what concerns the cluster is in the view before the watch reports it."""
        self._apply(
            Event(operation.key, operation.value if isinstance(operation, Put) else None, revision)
            for operation in operations
            if operation.key.startswith(keys.CLUSTER)
        )
        self._gone |= {
            operation.key: revision
            for operation in operations
            if isinstance(operation, Delete) and operation.key.startswith(keys.CLUSTER)
        }

    # --- keeping it fresh ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Watches and lists until cancelled."""
        failures = 0
        while True:
            begun = self._clock.elapsed()
            try:
                after = await self.refresh()
                failures = 0
                await self._follow(after)
            except Unavailable as error:
                failures += 1
                log.warning("cluster view is not fresh", extra={"why": str(error), "failures": failures})
                pause = min(VIEW_WATCH_RETRY_SECONDS * 2.0 ** min(failures, 10), VIEW_WATCH_RETRY_SECONDS_MAX)
                await self._clock.sleep(pause)
            if self._clock.elapsed() - begun < VIEW_WATCH_RETRY_SECONDS:
                await self._clock.sleep(VIEW_WATCH_RETRY_SECONDS)  # no busy loop over a watch that ends immediately

    async def refresh(self) -> Revision:
        """Makes the copy anew; returns a revision after which to watch."""
        after = await self._store.transact([], [])
        assert after is not None, "nothing was compared"
        self._replace(await self._store.list(keys.CLUSTER), after)
        return after

    async def look_again(self, doubtful: Sequence[str]) -> None:
        """Reads a few keys that may be stale: much cheaper than making the whole copy anew."""
        base = await self._store.transact([], [])
        assert base is not None, "nothing was compared"
        items = await asyncio.gather(*map(self._store.get, doubtful))
        found = [Event(*item) for item in items if item is not None]
        gone = [
            Event(key, None, base + 1)
            for key, item in zip(doubtful, items, strict=True)
            if item is None and self._revisions.get(key, base + 1) <= base
        ]
        self._apply([*gone, *found])

    async def _follow(self, after: Revision) -> None:
        try:
            async with asyncio.timeout(self._relist_seconds):
                async for events in self._store.watch(keys.CLUSTER, after):
                    self._apply(events)
        except TimeoutError:
            pass  # time to list again

    def _replace(self, items: Sequence[Item], base: Revision) -> None:
        """`items` are all that exist, at some revision from `base` on. What was seen beyond `base` is left as it is."""
        listed = {item.key for item in items}
        gone = [key for key, revision in self._revisions.items() if key not in listed and revision <= base]
        self._apply(
            [*(Event(key, None, base + 1) for key in gone), *(Event(key, value, at) for key, value, at in items)]
        )
        self._listed = True
        self._gone = {key: revision for key, revision in self._gone.items() if revision > base}

    def _apply(self, events: Iterable[Event]) -> None:
        changed = False
        for event in events:
            if event.revision <= self._revisions.get(event.key, 0) or event.revision <= self._gone.get(event.key, 0):
                continue  # told before, or from before what this process did
            self._gone.pop(event.key, None)
            if event.value is None:
                changed |= self._revisions.pop(event.key, None) is not None
            else:
                self._revisions[event.key] = event.revision
                changed = True
            self._sort(event)
        if changed:
            self.version += 1
            for waiter in self._waiting:
                _wake(waiter)
            self._waiting.clear()

    # --- one key ------------------------------------------------------------------------------------

    def _sort(self, event: Event) -> None:
        key, value, revision = event.key, event.value, event.revision
        if (assignment := keys.assignment_of(key)) is not None:
            self._assign(*assignment, None if value is None else revision)
        elif (topic := keys.topic_of_unassigned(key)) is not None:
            _put(self.markers, topic, self._read(event, Marker.from_bytes(value) if value else None))
        elif (broker := keys.broker_of_registration(key)) is not None:
            _put(self.registrations, broker, self._read(event, BrokerRegistration.from_bytes(value) if value else None))
            self._track(broker)
        elif (broker := keys.broker_of_state(key)) is not None:
            _put(self.states, broker, self._read(event, BrokerState.from_bytes(value) if value else None))
        elif (broker := keys.broker_of_lost(key)) is not None:
            _put(self.lost, broker, self._read(event, BrokerLoss.from_bytes(value) if value else None))
        elif (broker := keys.broker_of_seen(key)) is not None:
            _put(self.seen, broker, self._read(event, Presence.from_bytes(value) if value else None))
        elif (broker := keys.broker_of_load(key)) is not None:
            report = self._read(event, LoadReport.from_bytes(value) if value else None)
            _put(self._spoken, broker, report.value if report else None)
            self._report(broker)
        elif (broker := keys.broker_of_quiet_load(key)) is not None:
            report = self._read(event, LoadReport.from_bytes(value) if value else None)
            _put(self._quiet, broker, report.value if report else None)
            self._report(broker)
        elif keys.time_of_rebalancing(key) is not None:
            move = self._read(event, Move.from_bytes(value) if value else None)
            _put(self.history, key, move.value if move else None)
        elif key == keys.LEADER:
            self.leader = self._read(event, leader_from_bytes(value) if value else None)

    def _read(self, event: Event, value: T | None) -> Seen[T] | None:
        if value is not None:
            return Seen(value, event.revision)
        if event.value is not None and self._complained.get(event.key) != event.revision:
            self._complained[event.key] = event.revision
            log.warning("value is none of ours and left alone", extra={"key": event.key, "revision": event.revision})
        return None

    def _assign(self, broker: BrokerId, topic: TopicName, revision: Revision | None) -> None:
        """Two may seem to have a topic for a while, as single keys are read out of turn: the newest word counts."""
        if revision is not None:
            self.assigned.setdefault(broker, {})[topic] = revision
            self._tally.assign(broker, topic)
            host = self.hosts.get(topic, broker)
            if self.assigned[host][topic] <= revision:
                self.hosts[topic] = broker
            return
        self._tally.unassign(broker, topic)
        self.assigned.get(broker, {}).pop(topic, None)
        if self.hosts.get(topic) == broker:
            del self.hosts[topic]
            others = [(topics[topic], other) for other, topics in self.assigned.items() if topic in topics]
            if others:
                self.hosts[topic] = max(others)[1]
        if not self.assigned.get(broker, True):
            del self.assigned[broker]

    def _report(self, broker: BrokerId) -> None:
        spoken = self._spoken.get(broker)
        _put(self.reports, broker, spoken.with_quiet(self._quiet.get(broker)) if spoken is not None else None)
        self._tally.report(broker, self.reports.get(broker))

    def _track(self, broker: BrokerId) -> None:
        now = self._clock.elapsed()
        seen, life = self.registrations.get(broker), self._lives.get(broker)
        if seen is None:
            if life is not None and life.until is None:
                life.until = now
        elif life is None or life.session != seen.value.session:
            self._lives[broker] = _Life(seen.value.session, now, is_old=not self._listed)
        else:
            life.until = None


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


K = TypeVar("K")


def _put(where: dict[K, T], key: K, value: T | None) -> None:
    if value is None:
        where.pop(key, None)
    else:
        where[key] = value


def leader_to_bytes(broker: BrokerId) -> bytes:
    return json.dumps(broker).encode()


@lru_cache(maxsize=64)  # asked for every second, and hardly ever another
def leader_from_bytes(value: bytes) -> BrokerId | None:
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return BrokerId(found) if isinstance(found, int) and found > 0 else None
