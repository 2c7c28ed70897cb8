"""Runs while this broker leads: carries out what `core/cluster/leader.py` decides.

Every write compares the leader key and the revisions of what it rests on. One that is refused changes nothing; then the
view is made anew and everything decided again. So a leader may die, or be replaced, between any two writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NoReturn, TypeVar

from pydanube.cluster.leadership import Leadership
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.cluster.leader import (
    Abandon,
    Activate,
    Decision,
    Declare,
    Direct,
    FinishDrain,
    Leading,
    NoBroker,
    Remove,
    StartMove,
)
from pydanube.core.cluster.lifecycle import NO_ACTIVE_BROKER, BrokerLoss
from pydanube.core.cluster.placement import BROKER_LOST, WAIT, Marker, Rules, old_entries
from pydanube.core.cluster.returning import away, returned
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import Unavailable
from pydanube.ports import Clock, Compare, Delete, MetadataStore, Put
from pydanube.telemetry import ClusterMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH: Final = 50  # topics in one transaction: two operations each, and the store takes 128
STEP_RETRY_SECONDS: Final = 0.5  # while the metadata store does not answer
REFUSED_SECONDS: Final = 0.02
STEP_SECONDS: Final = 0.02  # between two steps while topics have no owner: then the view changes every few milliseconds
STEP_SHARE: Final = 0.2  # of the time, at most, however many topics there are to look at
STEP_SECONDS_MAX: Final = 0.25  # but no longer: on a busy machine a step takes longer than its work


class LoadManager:
    """Idle until this broker leads."""

    def __init__(
        self,
        store: MetadataStore,
        clock: Clock,
        view: View,
        leadership: Leadership,
        *,
        strategy: str,
        rules: Rules,
        ttl_seconds: float,
        metrics: ClusterMetrics | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._view = view
        self._leadership = leadership
        self._strategy = strategy
        self._rules = rules
        self._ttl_seconds = ttl_seconds
        self._metrics = metrics or ClusterMetrics()

    async def run(self) -> NoReturn:
        while True:
            version = self._view.version
            if self._leadership.leads:
                await self._lead()
            await self._view.changed(version, self._ttl_seconds / 16)

    async def _lead(self) -> None:
        """Until it leads no more. A new leader begins with a look at everything."""
        leading = Leading(self._strategy, self._rules, self._ttl_seconds)
        fresh = False
        refused = 0
        stepped_at, spent = -STEP_SECONDS, 0.0
        while self._leadership.leads:
            try:
                if not fresh:
                    await self._view.refresh()
                    fresh = True
                pause = min(max(STEP_SECONDS, spent / STEP_SHARE), STEP_SECONDS_MAX)
                wait = stepped_at + pause - self._clock.elapsed()
                if self._view.markers and wait > 0:
                    await self._clock.sleep(wait)
                version, now = self._view.version, self._clock.elapsed()
                decisions = leading.step(now, self._clock.time_us() // 1000, self._view.world())
                stepped_at = self._clock.elapsed()
                spent = stepped_at - now
                all_written = await self._carry_out(decisions)
                self._metrics.cycle.add(self._clock.elapsed() - now)
                if not all_written:
                    refused += 1
                    await self._leadership.check()
                    await self._clock.sleep(min(REFUSED_SECONDS * refused, STEP_RETRY_SECONDS))
                    continue
                refused = 0
            except Unavailable as error:
                log.warning("leader waits for the metadata store", extra={"why": str(error)})
                fresh = False
                await self._clock.sleep(STEP_RETRY_SECONDS)
                continue
            # At least a moment, so that a rule that is due again immediately cannot keep the loop busy.
            await self._view.changed(version, max(leading.due - self._clock.elapsed(), 0.05))

    async def _carry_out(self, decisions: Iterable[Decision]) -> bool:
        """Whether all of it was written. What was refused was decided on something that is not so any more."""
        directs: list[Direct] = []
        written = True
        for decision in decisions:
            match decision:
                case Declare(broker, session):
                    written &= await self._declare(broker, session)
                case Abandon(broker, topics):
                    written &= await self._abandon(broker, topics)
                case Direct():
                    directs.append(decision)
                case StartMove():
                    written &= await self._start(decision)
                case Remove(topic):
                    written &= await self._remove(topic)
                case FinishDrain(broker, reason):
                    written &= await self._finish_drain(broker, reason)
                case NoBroker(topics, why, advice):
                    log.error(
                        "no broker can take topics: they are kept and wait",
                        extra={"topics": len(topics), "first": topics[0], "why": why, "do": advice},
                    )
                case Activate(broker):
                    written &= await self._activate(broker)
        return all([written, *await asyncio.gather(*map(self._direct, batches(directs, BATCH)))])

    async def _write(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> bool:
        return await self._view.transact([self._leadership.guard, *compares], operations) is not None

    # --- one decision each ---

    async def _declare(self, broker: BrokerId, session: int) -> bool:
        lost = BrokerLoss(session=session, timestamp=self._clock.time_us() // 1000)
        # Either the broker is registered again, or it is dead: both compare what the other one writes.
        # The state names the session: one that the view missed would not find itself declared, and would go on serving.
        seen = [self._view.compare(key) for key in (keys.lost(broker), keys.broker_state(broker))]
        compares = [Compare(keys.registration(broker), 0), *seen]
        if not await self._write(compares, [Put(keys.lost(broker), lost.to_bytes())]):
            return False
        topics = len(self._view.assigned.get(broker, ()))
        log.warning("broker no longer alive", extra={"broker_id": broker, "session": session, "topics": topics})
        return True

    async def _abandon(self, broker: BrokerId, topics: Sequence[TopicName]) -> bool:
        return all(await asyncio.gather(*(self._abandon_some(broker, batch) for batch in batches(topics, BATCH))))

    async def _abandon_some(self, broker: BrokerId, topics: Sequence[TopicName]) -> bool:
        compares: list[Compare] = []
        operations: list[Put | Delete] = []
        # Before any await: a write of ours that was not answered may be done in the meantime, and the topic have
        # another owner. That the dead broker does not have it, which is revision 0, is no reason to give it away.
        seen = {topic: self._view.compare(keys.assignment(broker, topic)) for topic in topics}
        topics = [topic for topic, compare in seen.items() if compare.revision]
        waits = await asyncio.gather(*map(self._waits, topics))
        for topic, wait in zip(topics, waits, strict=True):
            marker = Marker(reason=BROKER_LOST, from_broker=broker, wait=wait, timestamp=self._clock.time_us() // 1000)
            compares.append(seen[topic])
            operations += [Put(keys.unassigned(topic), marker.to_bytes()), Delete(keys.assignment(broker, topic))]
        return not operations or await self._write(compares, operations)

    async def _waits(self, topic: TopicName) -> bool:
        item = await self._store.get(keys.on_crash(topic))
        return item is not None and item.value == WAIT

    async def _direct(self, batch: Sequence[Direct]) -> bool:
        found = [(direct, self._view.markers[direct.topic]) for direct in batch if direct.topic in self._view.markers]
        written = await self._write(
            [Compare(keys.unassigned(direct.topic), seen.revision) for direct, seen in found],
            [Put(keys.unassigned(direct.topic), seen.value.towards(direct.to).to_bytes()) for direct, seen in found],
        )
        if written:
            for direct, seen in found:
                log.info(
                    "topic gets a broker",
                    extra={
                        "topic": direct.topic,
                        "to": direct.to,
                        "reason": seen.value.reason or "new",
                        "instead_of": seen.value.to,
                    },
                )
        elif len(found) > 1:  # one of them has changed; the others need not wait for it
            for direct, _ in found:
                if self._leadership.leads and direct.topic in self._view.markers:
                    await self._direct([direct])
        return written

    async def _start(self, start: StartMove) -> bool:
        marker = start.marker
        assert marker.from_broker is not None
        assigned = self._view.compare(keys.assignment(marker.from_broker, start.topic))
        if not assigned.revision:
            return False  # it is not there any more
        compares = [Compare(keys.unassigned(start.topic), 0), assigned]
        operations: list[Put | Delete] = [Put(keys.unassigned(start.topic), marker.to_bytes())]
        if start.entry is not None:
            operations.append(Put(keys.rebalancing(start.entry.timestamp), start.entry.to_bytes()))
            operations += [Delete(key) for key in old_entries(self._view.history)]
        if not await self._write(compares, operations):
            return False
        if start.entry is not None:
            self._metrics.rebalances["automatic"] += 1
        log.info(
            "topic is to move",
            extra={"topic": start.topic, "reason": marker.reason, "from": marker.from_broker, "to": marker.to},
        )
        return True

    async def _remove(self, topic: TopicName) -> bool:
        key = keys.unassigned(topic)
        return await self._write([self._view.compare(key)], [Delete(key)])

    async def _finish_drain(self, broker: BrokerId, reason: str) -> bool:
        state = self._view.states[broker]
        key = keys.broker_state(broker)
        if not await self._write([Compare(key, state.revision)], [Put(key, state.value.drained(reason).to_bytes())]):
            return False
        log.info("broker is drained", extra={"broker_id": broker, "reason": reason})
        return True

    async def _activate(self, broker: BrokerId) -> bool:
        # An absent broker has no revision to compare: its key is read once more, for a watch may have missed it.
        await self._view.refresh()
        world, now_ms = self._view.world(), self._clock.time_us() // 1000
        if broker not in away(world.alive, world.states) or not world.nobody_serves(now_ms, self._ttl_seconds):
            return False
        state, key = self._view.states[broker], keys.broker_state(broker)
        value = returned(state.value, NO_ACTIVE_BROKER, now_ms, self._ttl_seconds)
        compares = [Compare(key, state.revision), self._view.compare(keys.registration(broker))]
        if not await self._write(compares, [Put(key, value.to_bytes())]):
            return False
        self._metrics.returns[NO_ACTIVE_BROKER] += 1
        log.warning(
            "no active broker was left: the leader activated one that had been away",
            extra={"broker_id": broker, "was": state.value.reason, "times": value.rejoins},
        )
        return True


def batches(values: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(values)
    while batch := list(islice(rest, size)):
        yield batch
