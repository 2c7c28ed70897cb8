"""What operators ask of a cluster, of whichever broker: unload, drain, activate, rebalance.

Any broker takes them. It writes what is wanted (a marker, or a broker's state), and the leader and the brokers
concerned do it; nothing depends on the asked broker living on, except the rest of a manual rebalancing.

A refusal is decided on the view, and then once more on a fresh one: never because of stale state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from pydanube.cluster.membership import Membership
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.cluster.leader import next_move, plan_moves, start_of
from pydanube.core.cluster.lifecycle import ADMIN_ACTIVATE, NO_TOPICS, BrokerMode, Drain
from pydanube.core.cluster.load import Balance, balance, measure, rank
from pydanube.core.cluster.placement import (
    BUSY_RULE,
    MOVES,
    PLAN_MAX,
    REBALANCE,
    UNLOAD,
    Marker,
    Move,
    Proposal,
    Rules,
    old_entries,
)
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import BrokerUnknown, DeadlineExceeded, MoveFailed, MoveRefused, TopicUnknown
from pydanube.ports import Clock, Compare, Delete, MetadataStore, Put
from pydanube.telemetry import ClusterMetrics

log = logging.getLogger(__name__)

SINGLE: Final = (
    "Cannot unload topic: single broker cluster detected. Unload requires at least 2 brokers. "
    "Use delete if you want to remove the topic."
)
SINGLE_DRAIN: Final = "Cannot unload broker: single broker cluster detected. Unload requires at least 2 brokers."
VIEW_WAIT_SECONDS: Final = 1.0  # then the view is read again: a watch may be behind
DRAINED_SECONDS: Final = 1.0
TRIES: Final = 5
MOVES_AT_ONCE: Final = 4  # of one order, as a drain


class DrainProgress(NamedTuple):
    """How far a drain is. `failed` has what the owner said when it gave a topic up; it is tried again later."""

    started: bool
    topics: Sequence[TopicName]  # all that it concerns
    pending: Sequence[TopicName]
    failed: dict[TopicName, str]

    @property
    def succeeded(self) -> int:
        return len(self.topics) - len(self.pending) - len(self.failed)


class Rebalanced(NamedTuple):
    """What an order to even the cluster out does: `moves` were begun, or would be (dry run); `rest` follows them.

    `why` is for people. `rule` is empty unless a rule stopped it all: then the order was not obeyed.
    """

    moves: Sequence[Move]
    rest: Sequence[Move]
    started: bool
    why: str
    rule: str = ""


class ClusterOperations:
    def __init__(
        self,
        store: MetadataStore,
        clock: Clock,
        view: View,
        membership: Membership,
        *,
        strategy: str,
        rules: Rules,
        metrics: ClusterMetrics,
    ) -> None:
        self._store = store
        self._clock = clock
        self._view = view
        self._membership = membership
        self._strategy = strategy
        self._rules = rules
        self._last_ms = 0
        self._metrics = metrics

    # --- one topic ----------------------------------------------------------------------------------

    async def request_move(self, topic: TopicName, reason: str = UNLOAD, to: BrokerId | None = None) -> BrokerId:
        """Writes the marker of a move; returns the broker that is to release the topic.

        Raises TopicUnknown; MoveRefused if the cluster cannot move it; BrokerUnknown for a `to` that does not live.
        """
        for _ in range(TRIES):
            if await self._store.get(keys.topic(topic)) is None:
                raise TopicUnknown(topic)
            refusal = self._refusal(topic, to)
            if refusal is not None:
                await self._view.refresh()
                refusal = self._refusal(topic, to)
            if refusal is not None:
                raise refusal
            host = self._view.hosts[topic]
            marker = Marker(reason=reason, from_broker=host, to=to, timestamp=self._clock.time_us() // 1000)
            # Create-only; a move that failed leaves a marker, which another try replaces.
            compares = [
                self._view.compare(keys.unassigned(topic)),
                self._view.compare(keys.assignment(host, topic)),
            ]
            if await self._view.transact(compares, [Put(keys.unassigned(topic), marker.to_bytes())]) is not None:
                log.info("move requested", extra={"topic": topic, "reason": reason, "from": host, "to": to})
                return host
        raise MoveRefused(topic, f"topic {topic} cannot be moved: it changes hands too often just now; try again")

    def _refusal(self, topic: TopicName, to: BrokerId | None) -> MoveRefused | BrokerUnknown | None:
        view = self._view
        if len(view.registrations) < 2:
            return MoveRefused(topic, SINGLE)
        marker = view.markers.get(topic)
        host = view.hosts.get(topic)
        key = keys.unassigned(topic)
        if marker is None and view.revision(key):
            return MoveRefused(topic, f"topic {topic} cannot be moved: {key} has a value that is no marker; remove it")
        if marker is not None and marker.value.reason in MOVES and not marker.value.error:
            return MoveRefused(topic, f"topic {topic} is being moved already: {marker.value.stage}")
        if host is None:
            stage = marker.value.stage if marker else "it is not assigned to any broker"
            return MoveRefused(topic, f"topic {topic} cannot be moved: no broker hosts it just now ({stage})")
        if not any(broker != host for broker in view.active()):
            return MoveRefused(
                topic,
                f"topic {topic} cannot be moved: no other broker is active; "
                "activate one with `danube-admin brokers activate`",
            )
        if to is not None and to not in view.registrations:
            return BrokerUnknown(str(to))
        if to is not None and (to == host or to not in view.active()):
            why = "hosts it already" if to == host else "is not active"
            return MoveRefused(topic, f"topic {topic} cannot be moved to broker {to}, which {why}")
        return None

    async def unload(self, topic: TopicName, to: BrokerId | None = None, *, timeout_seconds: float = 60.0) -> BrokerId:
        """Moves a topic; returns the old owner, as soon as it has released it. Raises MoveFailed if the topic stays."""
        host = await self.request_move(topic, UNLOAD, to)
        await self.wait_released(topic, host, timeout_seconds=timeout_seconds)
        return host

    async def wait_released(self, topic: TopicName, host: BrokerId, *, timeout_seconds: float) -> None:
        """Returns when `host`, which was asked to, does not own the topic any more. Raises MoveFailed if it stays."""
        deadline = self._clock.elapsed() + timeout_seconds
        while True:
            version = self._view.version
            seen = self._view.markers.get(topic)
            if seen is not None and seen.value.error:
                raise MoveFailed(topic, seen.value.error)
            if seen is not None and seen.value.is_free:
                return
            if self._view.hosts.get(topic) != host:
                return
            if seen is None:
                await self._view.refresh()
                if topic not in self._view.markers and self._view.hosts.get(topic) == host:
                    raise MoveFailed(topic, f"broker {host} took it back; its log says why")
                continue
            await self._wait(version, deadline, f"letting go of {topic}", timeout_seconds, seen.value.stage)

    async def hosted(self, topic: TopicName, *, timeout_seconds: float) -> BrokerId:
        """Returns the broker that serves the topic, as soon as one does."""
        deadline = self._clock.elapsed() + timeout_seconds
        while True:
            version = self._view.version
            host = self._view.hosts.get(topic)
            marker = self._view.markers.get(topic)
            if host is not None and host in self._view.registrations and marker is None:
                return host
            why = marker.value.stage if marker else "no broker has it"
            await self._wait(version, deadline, f"opening {topic}", timeout_seconds, why)

    async def _wait(self, version: int, deadline: float, what: str, seconds: float, why: str) -> None:
        left = deadline - self._clock.elapsed()
        if left <= 0:
            raise DeadlineExceeded(what, seconds, why)
        await self._view.changed(version, min(left, VIEW_WAIT_SECONDS))
        if self._view.version == version:
            await self._view.refresh()

    # --- brokers ------------------------------------------------------------------------------------

    async def drain(
        self,
        broker: BrokerId,
        *,
        parallel_max: int = 0,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        dry_run: bool = False,
    ) -> DrainProgress:
        """Moves a broker's topics away, at most `parallel_max` at a time (0: four). Returns immediately."""
        drain = Drain(parallel_max=parallel_max or Drain().parallel_max, include=tuple(include), exclude=tuple(exclude))
        for _ in range(TRIES):
            await self._view.refresh()
            state = self._view.states.get(broker)
            if broker not in self._view.registrations or state is None:
                raise BrokerUnknown(str(broker))
            if len(self._view.registrations) < 2:
                raise MoveRefused(str(broker), SINGLE_DRAIN)
            topics = [topic for topic in sorted(self._view.assigned.get(broker, ())) if drain.covers(topic.namespace)]
            # One that is drained for having been away is to stay so: then there is nothing to move.
            stays = state.value.is_away and not topics
            if not stays and not any(other != broker for other in self._view.active()):
                raise MoveRefused(str(broker), f"broker {broker} cannot be unloaded: no other broker is active")
            if dry_run:
                return DrainProgress(False, topics, topics, {})
            value = state.value.draining(drain) if topics else state.value.drained(NO_TOPICS)
            key = keys.broker_state(broker)
            if await self._view.transact([Compare(key, state.revision)], [Put(key, value.to_bytes())]) is not None:
                log.info("broker is to be drained", extra={"broker_id": broker, "topics": len(topics)})
                return DrainProgress(True, topics, topics, {})
        raise MoveRefused(str(broker), f"the state of broker {broker} changes too often just now; try again")

    def drain_progress(self, broker: BrokerId, topics: Sequence[TopicName]) -> DrainProgress:
        """How far the drain of these topics is now."""
        failed = {
            topic: seen.value.error
            for topic in topics
            if (seen := self._view.markers.get(topic)) and seen.value.error and seen.value.from_broker == broker
        }
        still = self._view.assigned.get(broker, {})
        return DrainProgress(True, topics, [t for t in topics if t in still and t not in failed], failed)

    async def drained(self, broker: BrokerId, topics: Sequence[TopicName], timeout_seconds: float) -> DrainProgress:
        """Waits until no topic is pending, `timeout_seconds` at most; then a moment until the broker is called drained,
        which the leader does when another broker serves the last one.
        """
        deadline = self._clock.elapsed() + timeout_seconds
        while True:
            version = self._view.version
            progress = self.drain_progress(broker, topics)
            state = self._view.states.get(broker)
            if not progress.pending:
                if progress.failed or state is None or state.value.mode is not BrokerMode.DRAINING:
                    return progress
                deadline = min(deadline, self._clock.elapsed() + DRAINED_SECONDS)
            left = deadline - self._clock.elapsed()
            if left <= 0:
                return progress
            await self._view.changed(version, min(left, VIEW_WAIT_SECONDS))

    async def activate(self, broker: BrokerId, reason: str = "") -> None:
        """The broker may be given topics again. Raises BrokerUnknown."""
        for _ in range(TRIES):
            await self._view.refresh()
            state = self._view.states.get(broker)
            if state is None:
                raise BrokerUnknown(str(broker))
            key = keys.broker_state(broker)
            value = state.value.activated(reason or ADMIN_ACTIVATE)
            if await self._view.transact([Compare(key, state.revision)], [Put(key, value.to_bytes())]) is not None:
                log.info("broker activated", extra={"broker_id": broker, "reason": value.reason})
                return
        raise MoveRefused(str(broker), f"the state of broker {broker} changes too often just now; try again")

    # --- balance ------------------------------------------------------------------------------------

    def balance(self) -> Balance:
        """How even the load of the active brokers is, by this cluster's strategy."""
        world = self._view.world()
        return balance(rank(self._strategy, measure(world.topics_of(world.active()), world.reports)))

    def propose(self) -> Proposal:
        """The move that the leader would make by itself."""
        return next_move(self._view.world(), self._strategy, self._rules)

    async def rebalance(self, *, dry_run: bool = False, moves_max: int | None = None) -> Rebalanced:
        """What evens the cluster out, begun unless it is a dry run. `rebalance_on` does the `rest`.

        What an operator asks for is done now: how long topics have been where they are, when the last move was and how
        many there were in the last hour hold only the leader's own moves back; so does whether those are enabled. But
        the moves are part of the history, and hold the leader's own back in turn.
        """
        await self._view.refresh()
        plan = plan_moves(self._view.world(), self._strategy, self._rules, moves_max=moves_max or PLAN_MAX)
        if not plan.moves:
            return Rebalanced((), (), False, plan.why, plan.rule)
        if dry_run:
            return Rebalanced(plan.moves, (), False, f"Dry run: nothing was moved ({plan.why})")
        begun: list[Move] = []
        rest = list(plan.moves)
        while rest and len(begun) < MOVES_AT_ONCE:
            move = rest.pop(0)
            if await self._begin(move):
                begun.append(move)
        if not begun:
            return Rebalanced((), (), False, "The topics changed hands meanwhile; try again", BUSY_RULE)
        more = f", {len(rest)} more follow in the background" if rest else ""
        why = f"{len(begun)} begun{more}; `danube admin brokers history` shows them ({plan.why})"
        return Rebalanced(begun, rest, True, why)

    async def rebalance_on(self, begun: Sequence[Move], rest: Sequence[Move]) -> int:
        """Goes on with an operator's order: the `rest` of it, a few at a time. Returns how many of it were begun.

        What does not stand where it stood, or whose target takes no topics any more, is left out.
        """
        waiting, moving, count = list(rest), {move.topic: move for move in begun}, 0
        while waiting:
            version = self._view.version
            for topic in [topic for topic in moving if self._has_arrived(topic)]:
                del moving[topic]
            while waiting and len(moving) < MOVES_AT_ONCE:
                move = waiting.pop(0)
                if await self._begin(move):
                    moving[move.topic] = move
                    count += 1
            if waiting:
                await self._view.changed(version, VIEW_WAIT_SECONDS)
        log.info(
            "rebalancing by hand was begun in full", extra={"moves": count + len(begun), "of": len(begun) + len(rest)}
        )
        return count

    def _has_arrived(self, topic: TopicName) -> bool:
        """At its target, or the move was given up, or another broker has it."""
        seen = self._view.markers.get(topic)
        return seen is None or bool(seen.value.error) or seen.value.reason != REBALANCE

    async def _begin(self, move: Move) -> bool:
        if move.to_broker not in self._view.active() or self._view.hosts.get(move.topic) != move.from_broker:
            return False
        # Entries of the history are named by their time, and several moves begin at the same time.
        now_ms = max(self._clock.time_us() // 1000, self._last_ms + 1)
        self._last_ms = now_ms
        start = start_of(move, now_ms)
        assert start.entry is not None
        operations: list[Put | Delete] = [
            Put(keys.unassigned(start.topic), start.marker.to_bytes()),
            Put(keys.rebalancing(now_ms), start.entry.to_bytes()),
            *(Delete(key) for key in old_entries(self._view.history)),
        ]
        compares = [
            Compare(keys.unassigned(start.topic), 0),
            Compare(keys.rebalancing(now_ms), 0),
            self._view.compare(keys.assignment(start.entry.from_broker, start.topic)),
        ]
        if await self._view.transact(compares, operations) is None:
            return False
        self._metrics.rebalances["manual"] += 1
        log.info("topic is to move", extra={"topic": start.topic, "reason": "rebalance", "to": start.entry.to_broker})
        return True

    def history(self) -> list[Move]:
        """Rebalancing moves, newest first."""
        return sorted(self._view.history.values(), key=lambda move: -move.timestamp)

    def mode_of(self, broker: BrokerId) -> BrokerMode | None:
        state = self._view.states.get(broker)
        return state.value.mode if state else None
