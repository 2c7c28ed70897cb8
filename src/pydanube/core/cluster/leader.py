"""What the leader of a cluster decides, from what it sees.

    world ─► Leading.step ─► Declare    a broker that is gone: its session is dead
                             Abandon    the topics of a dead session lose their owner
                             Direct     a topic without owner gets a target, or another one
                             StartMove  a drain or a rebalancing moves a topic
                             Remove     a failed move is forgotten
                             FinishDrain
                             NoBroker   topics that no broker can be given: for the log
                             Activate   a broker that was away, when none is active

Nothing here is remembered that a new leader would need: it steps through the same world and comes to the same end. What
is remembered is only since when something has been so, and who did not do what it was asked to.

The shell writes each decision guarded by the leader key and by the revision of what it was decided on; one that cannot
be written any more is decided anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from pydanube.core.cluster.lifecycle import DRAIN_COMPLETE, BrokerLoss, BrokerMode, BrokerState, Drain
from pydanube.core.cluster.load import Figures, LoadReport, TopicLoad, loads_of_topics, measure, rank, weighs
from pydanube.core.cluster.placement import (
    DRAIN,
    PLAN_MAX,
    REBALANCE,
    Marker,
    Move,
    Plan,
    Proposal,
    Rules,
    choose,
    plan,
    propose,
    too_soon,
)
from pydanube.core.cluster.returning import NEXT, Waiting, away, nobody_serves, returns_of
from pydanube.core.names import BrokerId, TopicName

CLAIM_SECONDS: Final = 3.0  # a target that has claimed nothing for so long is replaced
CLAIM_SECONDS_MAX: Final = 48.0  # when no broker claims: longer than until the next list finds what the watch missed
ABANDON_MAX: Final = 200  # topics of one broker in one step, so that the first are claimed while others are written
FAILED_SECONDS: Final = 10.0  # a failed move stays visible to the operator who asked for it
HOMELESS_SECONDS: Final = 1.0  # until a topic without a possible owner is logged: at a start there are such
HOMELESS_AGAIN_SECONDS: Final = 30.0  # until more are logged: a takeover has thousands
DRAIN_RETRY_SECONDS: Final = 30.0  # a drain tries a topic again whose move failed


class World(NamedTuple):
    """What one broker knows of its cluster. Numbers next to topics and records are store revisions."""

    alive: Mapping[BrokerId, int]  # registered brokers and their sessions
    witnessed: Mapping[BrokerId, int]  # the last session of each broker that this process certainly saw alive
    states: Mapping[BrokerId, BrokerState]
    lost: Mapping[BrokerId, tuple[BrokerLoss, int]]
    assigned: Mapping[BrokerId, Mapping[TopicName, int]]
    markers: Mapping[TopicName, Marker]
    reports: Mapping[BrokerId, LoadReport]
    history: Sequence[Move]
    # What follows from `assigned` and `reports`, where the caller keeps it up to date: counting anew is a look at every
    # topic of the cluster.
    counted: Mapping[BrokerId, Figures] | None = None
    known: Mapping[TopicName, TopicLoad] | None = None

    def active(self) -> list[BrokerId]:
        """Brokers that may be given topics."""
        return sorted(b for b in self.alive if b in self.states and self.states[b].takes_topics)

    def nobody_serves(self, now_ms: int, ttl_seconds: float) -> bool:
        lost = {broker: record for broker, (record, _) in self.lost.items()}
        return nobody_serves(self.alive, self.states, lost, now_ms, ttl_seconds)

    def topics_of(self, brokers: Sequence[BrokerId]) -> dict[BrokerId, set[TopicName]]:
        """What each of them serves or is assigned."""
        found = {broker: set(self.assigned.get(broker, ())) for broker in brokers}
        for topic, marker in self.markers.items():
            if marker.to in found and not marker.error:
                found[marker.to].add(topic)
        return found

    def topics_to_be(self, brokers: Sequence[BrokerId]) -> dict[BrokerId, set[TopicName]]:
        """What each of them will serve when every move that is under way has come to its end."""
        found = self.topics_of(brokers)
        for topic, marker in self.markers.items():
            if marker.is_move and marker.to in found and marker.from_broker in found:
                found[marker.from_broker].discard(topic)
        return found

    def measured(self) -> dict[BrokerId, Figures]:
        """The figures of the active brokers, with what they are assigned."""
        active = self.active()
        counted, known = self.counted, self.known
        if counted is None or known is None:
            counted = measure({broker: self.assigned.get(broker, ()) for broker in active}, self.reports)
            known = loads_of_topics(self.reports.values())
        found = {broker: counted.get(broker, Figures()) for broker in active}
        told: dict[BrokerId, int] = dict.fromkeys(active, 0)
        for topic, marker in self.markers.items():
            broker = marker.to
            if broker is None or marker.error or broker not in found or topic in self.assigned.get(broker, ()):
                continue
            if (load := known.get(topic)) is None:
                told[broker] += 1
            else:
                found[broker] = found[broker].plus(load)
        return {broker: figures._replace(topics=figures.topics + told[broker]) for broker, figures in found.items()}


# --- decisions ------------------------------------------------------------------------------------------


class Declare(NamedTuple):
    broker: BrokerId
    session: int


class Abandon(NamedTuple):
    broker: BrokerId
    topics: tuple[TopicName, ...]


class Direct(NamedTuple):
    topic: TopicName
    to: BrokerId


class StartMove(NamedTuple):
    """`entry` is for the history, if there is to be one."""

    topic: TopicName
    marker: Marker
    entry: Move | None = None


class Remove(NamedTuple):
    topic: TopicName


class FinishDrain(NamedTuple):
    broker: BrokerId
    reason: str


class NoBroker(NamedTuple):
    """Topics that no broker can be given now. They wait for an operator."""

    topics: tuple[TopicName, ...]
    why: str
    advice: str


class Activate(NamedTuple):
    broker: BrokerId


Decision: TypeAlias = Declare | Abandon | Direct | StartMove | Remove | FinishDrain | NoBroker | Activate


# --- the leader -----------------------------------------------------------------------------------------


class _Scale:
    """The loads of the active brokers, with every topic that this step has assigned so far."""

    def __init__(self, strategy: str, world: World) -> None:
        self._strategy = strategy
        self._measured = world.measured()
        self.loads = rank(strategy, self._measured)

    def choose(self, marker: Marker, turn: int, avoid: Collection[BrokerId] = ()) -> BrokerId | None:
        topics = None
        if weighs(self._strategy, self._measured):
            topics = {broker: figures.topics for broker, figures in self._measured.items()}
        return choose(marker, self.loads, turn=turn, avoid=avoid, topics=topics)

    def put_on(self, broker: BrokerId) -> None:
        if broker in self._measured:
            self._measured[broker] = self._measured[broker].plus(None)
            self.loads = rank(self._strategy, self._measured)


@dataclass(slots=True)
class _Asked:
    """A target was asked to claim a topic.

    A busy target claims its topics one after the other, so the topic's time begins anew whenever the target has claimed
    another one. But only `ahead` times, as many as were waiting there when it was asked: a topic that it cannot open
    does not wait without end because new ones keep coming.
    """

    to: BrokerId
    since: float
    ahead: int = 0
    claims: int = 0  # that the target had made by `since`
    avoid: set[BrokerId] = field(default_factory=set)
    rounds: int = 0  # how often all brokers were asked and none claimed

    @property
    def until(self) -> float:
        return self.since + min(CLAIM_SECONDS * 2.0 ** min(self.rounds, 8), CLAIM_SECONDS_MAX)


class Leading:
    """The memory of one leader, from when it took the office. `due` is when to step again if nothing changes."""

    def __init__(self, strategy: str, rules: Rules, ttl_seconds: float) -> None:
        self._strategy = strategy
        self._rules = rules
        self._ttl_seconds = ttl_seconds
        self._missing: dict[BrokerId, float] = {}
        self._asked: dict[TopicName, _Asked] = {}
        self._claims: Counter[BrokerId] = Counter()  # of topics that this leader asked them to claim
        self._failed: dict[TopicName, float] = {}
        self._retry: dict[TopicName, float] = {}
        self._homeless: dict[TopicName, float] = {}  # no broker can be given it, since when
        self._homeless_said: set[TopicName] = set()
        self._homeless_at = 0.0
        self._checked: float | None = None
        self._turn = 0
        self._away = Waiting()
        self._activated = float("-inf")
        self.due = 0.0

    def step(self, now: float, now_ms: int, world: World) -> list[Decision]:
        """What is to be done now. `now` never goes back; `now_ms` is the date, for the history alone."""
        self.due = now + self._ttl_seconds
        decisions: list[Decision] = [*self._dead(now, world), *_abandoned(world), *self._returns(now, now_ms, world)]
        if world.markers or _draining(world):
            scale = _Scale(self._strategy, world)
            decisions += self._markers(now, world, scale)
            decisions += self._drains(now, now_ms, world, scale)
        else:
            self._homeless.clear()
            self._homeless_said.clear()
        if self._rules.enabled:
            decisions += self._rebalance(now, now_ms, world)
        return decisions

    def _again(self, at: float) -> None:
        self.due = min(self.due, at)

    # --- brokers that are gone ---

    def _dead(self, now: float, world: World) -> Iterator[Declare]:
        for broker in sorted({*world.states, *world.assigned}):
            if broker in world.alive:
                self._missing.pop(broker, None)
                continue
            state = world.states.get(broker)
            session = state.session if state else 0
            if broker in world.lost and world.lost[broker][0].session == session:
                continue
            since = self._missing.setdefault(broker, now)
            # A broker that stopped in order, or was not there when this process came, gets the time of a lease to
            # (re)appear: after a restart of everything each broker is to have its own topics back.
            saw_it_die = world.witnessed.get(broker) == session and not (state and state.has_left)
            if saw_it_die or now - since >= self._ttl_seconds:
                yield Declare(broker, session)
            else:
                self._again(since + self._ttl_seconds)

    # --- brokers that were away, and no other is there ---

    def _returns(self, now: float, now_ms: int, world: World) -> Iterator[Activate]:
        ttl = self._ttl_seconds
        waiting = away(world.alive, world.states)
        self._away.see(now, waiting)
        if not waiting or not world.nobody_serves(now_ms, ttl):
            return
        first = self._activated + NEXT * ttl if world.active() else now  # one after the other
        due = {b: max(first, self._away.due(now, b, world.states[b], now_ms, ttl)) for b in waiting}
        ready = [broker for broker in waiting if due[broker] <= now]
        if ready:
            self._activated = now
            yield Activate(min(ready, key=lambda broker: (returns_of(world.states[broker], now_ms, ttl), broker)))
            self._again(now + NEXT * ttl)
        else:
            self._again(min(due.values()))

    # --- topics without owner ---

    def _markers(self, now: float, world: World, scale: _Scale) -> Iterator[Decision]:
        for gone in [topic for topic in self._asked if topic not in world.markers]:
            broker = self._asked.pop(gone).to
            self._claims[broker] += gone in world.assigned.get(broker, ())
        waiting = Counter(
            marker.to
            for marker in world.markers.values()
            if marker.to is not None and marker.is_free and not marker.wait
        )
        for gone in [topic for topic in self._failed if topic not in world.markers]:
            del self._failed[gone]
        homeless: list[TopicName] = []
        for topic, marker in sorted(world.markers.items()):
            if marker.error:
                since = self._failed.setdefault(topic, now)
                if now - since >= FAILED_SECONDS:
                    self._retry[topic] = now + DRAIN_RETRY_SECONDS
                    yield Remove(topic)
                else:
                    self._again(since + FAILED_SECONDS)
                continue
            self._failed.pop(topic, None)
            target = self._target(now, topic, marker, world, scale, waiting)
            if target is None and not marker.wait:
                homeless.append(topic)
            if target is not None and target != marker.to:
                scale.put_on(target)
                yield Direct(topic, target)
        yield from self._without_broker(now, homeless, scale)

    def _without_broker(self, now: float, homeless: Collection[TopicName], scale: _Scale) -> Iterator[NoBroker]:
        """Said once of every topic that stays so for a moment, together where they come one after the other."""
        self._homeless = {topic: self._homeless.get(topic, now) for topic in homeless}
        self._homeless_said &= self._homeless.keys()
        fresh = sorted(self._homeless.keys() - self._homeless_said)
        if not fresh:
            return
        due = min(self._homeless[topic] for topic in fresh) + HOMELESS_SECONDS
        if self._homeless_said:
            due = max(due, self._homeless_at + HOMELESS_AGAIN_SECONDS)
        if now < due:
            self._again(due)
            return
        self._homeless_said.update(fresh)
        self._homeless_at = now
        if scale.loads:
            why = "the only active broker is the one that they leave"
            advice = "start another broker, or activate one: danube-admin brokers activate BROKER"
        else:
            why = "no broker is active"
            advice = "activate one (danube-admin brokers list, then brokers activate BROKER), or start one"
        yield NoBroker(tuple(fresh), why, advice)

    def _target(
        self,
        now: float,
        topic: TopicName,
        marker: Marker,
        world: World,
        scale: _Scale,
        waiting: Mapping[BrokerId, int],
    ) -> BrokerId | None:
        """The target: the one that was chosen before, as long as it claims. `waiting`: what each is to claim."""
        told = marker.to
        if marker.wait:
            return marker.from_broker if marker.from_broker in world.alive else None
        if told is None or told not in scale.loads or told == marker.excluded:
            return self._choose(marker, scale)
        if not marker.is_free:
            self._asked.pop(topic, None)
            return told
        asked = self._asked.get(topic)
        if asked is None:
            asked = self._asked[topic] = _Asked(told, now, waiting[told] - 1, self._claims[told])
        elif asked.to != told:
            asked.to, asked.since, asked.ahead, asked.claims = told, now, waiting[told] - 1, self._claims[told]
        elif asked.claims != (claims := self._claims[told]):
            if asked.ahead > 0:
                asked.since = now
            asked.ahead, asked.claims = asked.ahead - (claims - asked.claims), claims
        if now < asked.until:
            self._again(asked.until)
            return told
        asked.since = now
        asked.avoid.add(told)
        if {broker for broker in scale.loads if broker != marker.excluded} <= asked.avoid:
            asked.rounds += 1
            asked.avoid = {told}
        self._again(asked.until)
        return self._choose(marker, scale, asked.avoid)

    def _choose(self, marker: Marker, scale: _Scale, avoid: Collection[BrokerId] = ()) -> BrokerId | None:
        self._turn += 1
        return scale.choose(marker, self._turn, avoid)

    # --- moves of the leader's own ---

    def _drains(self, now: float, now_ms: int, world: World, scale: _Scale) -> Iterator[Decision]:
        for broker, state in _draining(world):
            drain = state.drain or Drain()
            topics = [topic for topic in sorted(world.assigned.get(broker, ())) if drain.covers(topic.namespace)]
            moving = [
                m for m in world.markers.values() if m.from_broker == broker and m.reason == DRAIN and not m.error
            ]
            if not topics and not moving:
                yield FinishDrain(broker, DRAIN_COMPLETE)
                continue
            capacity = drain.parallel_max - len(moving)
            for topic in topics:
                if capacity <= 0:
                    break
                if topic in world.markers:
                    continue
                if now < self._retry.get(topic, now):
                    self._again(self._retry[topic])
                    continue
                marker = Marker(reason=DRAIN, from_broker=broker, timestamp=now_ms)
                target = self._choose(marker, scale)
                if target is None:
                    break
                scale.put_on(target)
                capacity -= 1
                yield StartMove(topic, marker.towards(target))

    def _rebalance(self, now: float, now_ms: int, world: World) -> Iterator[Decision]:
        interval = self._rules.check_interval_seconds
        if self._checked is not None and now - self._checked < interval:
            self._again(self._checked + interval)
            return
        self._checked = now
        self._again(now + interval)
        if any(marker.reason == REBALANCE and not marker.error for marker in world.markers.values()):
            return
        if too_soon(world.history, now_ms, self._rules):
            return
        move = next_move(world, self._strategy, self._rules).move
        if move is not None:
            yield start_of(move, now_ms)


def next_move(world: World, strategy: str, rules: Rules) -> Proposal:
    """The move that would even the cluster out, or why there is none."""
    topics_of = world.topics_to_be(world.active())
    return propose(strategy, measure(topics_of, world.reports), topics_of, world.reports, rules, busy=world.markers)


def plan_moves(world: World, strategy: str, rules: Rules, *, moves_max: int = PLAN_MAX) -> Plan:
    """What an operator's order to even the cluster out moves, or why it moves nothing."""
    topics_of = world.topics_to_be(world.active())
    known = world.known if world.known is not None else loads_of_topics(world.reports.values())
    measured = measure(topics_of, world.reports)
    return plan(strategy, measured, topics_of, known, rules, busy=world.markers, moves_max=moves_max)


def start_of(move: Move, now_ms: int) -> StartMove:
    marker = Marker(reason=REBALANCE, from_broker=move.from_broker, to=move.to_broker, timestamp=now_ms)
    return StartMove(move.topic, marker, replace(move, timestamp=now_ms))


def _abandoned(world: World) -> Iterator[Abandon]:
    """Topics that a dead session had: assigned before it was declared dead, and every claim needs a living one."""
    for broker, (_, revision) in sorted(world.lost.items()):
        assigned = world.assigned.get(broker)
        if assigned and min(assigned.values()) < revision:
            topics = sorted(topic for topic, at in assigned.items() if at < revision)
            yield Abandon(broker, tuple(topics[:ABANDON_MAX]))


def _draining(world: World) -> list[tuple[BrokerId, BrokerState]]:
    return [(b, s) for b, s in sorted(world.states.items()) if s.mode is BrokerMode.DRAINING and b in world.alive]
