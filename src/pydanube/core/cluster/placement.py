"""Which broker a topic goes to, and which topic should move.

A `Marker` says that a topic has, or is about to have, no owner. What becomes of it is decided here on values;
`cluster/` writes it.

    null                                              a new topic
    {reason: unload | rebalance | drain, from_broker} a move: `to` is the target, `ready` once the old owner released it
    {reason: broker_lost, from_broker}                its owner was declared dead
    {reason: shutdown, from_broker, ready}            its owner sealed it and stopped

A topic is free, for its target to claim, when it cannot have an owner: it is new, its owner was declared dead, or its
owner released it. Moves never go back to `from_broker`. After a crash it is the first choice: its disk has the end of
the log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, NamedTuple, Self, TypeVar

from pydanube.core.cluster.load import (
    Balance,
    Figures,
    LoadReport,
    TopicLoad,
    balance,
    loads_of_topics,
    move_topic,
    rank,
    weighs,
)
from pydanube.core.names import BrokerId, TopicName

UNLOAD: Final = "unload"
REBALANCE: Final = "rebalance"
DRAIN: Final = "drain"
SHUTDOWN: Final = "shutdown"
BROKER_LOST: Final = "broker_lost"
MOVES: Final = frozenset({UNLOAD, REBALANCE, DRAIN, SHUTDOWN})
WAIT: Final = b'"wait"'  # what a topic has stored that waits for its own broker after a crash
REASONS: Final = MOVES | {BROKER_LOST}

EXACT_BELOW: Final = 10.0  # loads under this are equal or not; above, within a tenth is equal
WORK_SLACK: Final = 5.0  # points of work that make no difference
HOUR_MS: Final = 3_600_000
HISTORY_MAX: Final = 1_000
HISTORY_REMOVED_MAX: Final = 50
THRESHOLDS: Final = {"conservative": 0.40, "balanced": 0.30, "aggressive": 0.20}


# --- the marker -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """`/cluster/unassigned/<ns>/<topic>`. `phase` is how far the old owner got, for people. `error`: it gave up."""

    reason: str | None = None
    from_broker: BrokerId | None = None
    to: BrokerId | None = None
    ready: bool = False
    wait: bool = False  # only `from_broker` may have it: the topic was created with on_crash: wait
    phase: str = ""
    error: str = ""
    timestamp: int = 0  # milliseconds since 1970, when it was made

    def to_bytes(self) -> bytes:
        """Only what says something, so that the marker of a new topic is null."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, False, "", 0)}
        return json.dumps(given or None).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is no marker. Fields of newer versions are ignored."""
        try:
            found = json.loads(value)
        except ValueError:
            return None
        if found is None:
            return cls()
        if not isinstance(found, dict):
            return None
        reason, source, target = found.get("reason"), found.get("from_broker"), found.get("to")
        named = (reason is None and source is None) or (reason in REASONS and _is_broker(source))
        if not named or not (target is None or _is_broker(target)):
            return None
        timestamp = found.get("timestamp")
        return cls(
            reason=reason,
            from_broker=source,
            to=target,
            ready=found.get("ready") is True,
            wait=found.get("wait") is True,
            phase=str(found.get("phase") or ""),
            error=str(found.get("error") or ""),
            timestamp=timestamp if isinstance(timestamp, int) else 0,
        )

    @property
    def is_free(self) -> bool:
        """The topic has no owner: its target may claim it."""
        return not self.error and (self.reason in (None, BROKER_LOST) or self.ready)

    @property
    def is_move(self) -> bool:
        """The old owner lives, and serves the topic until it releases it."""
        return self.reason in MOVES and not self.ready and not self.error

    @property
    def excluded(self) -> BrokerId | None:
        """Who may not have it."""
        return self.from_broker if self.reason in MOVES - {SHUTDOWN} else None

    @property
    def preferred(self) -> BrokerId | None:
        """Whose disk has the end of its log."""
        return self.from_broker if self.reason == BROKER_LOST else None

    @property
    def stage(self) -> str:
        """Where the topic is on its way, in words."""
        if self.error:
            return f"failed: {self.error}"
        if self.wait:
            return f"waiting for broker {self.from_broker} to come back"
        if self.to is None:
            return "waiting for a broker that can take it"
        if self.is_free:
            return f"waiting for broker {self.to} to open it"
        return self.phase or f"waiting for broker {self.from_broker} to let go"

    def as_ready(self) -> Self:
        """The old owner has released it. Written by its seal."""
        return replace(self, ready=True, phase="", error="")

    def as_failed(self, why: str) -> Self:
        """The old owner undid the move."""
        return replace(self, ready=False, error=why[:500] or "unknown")

    def towards(self, broker: BrokerId) -> Self:
        return replace(self, to=broker)


def _is_broker(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 64


# --- a broker for a topic -------------------------------------------------------------------------------


def least_loaded(loads: Mapping[BrokerId, float], topics: Mapping[BrokerId, int] | None = None) -> list[BrokerId]:
    """All that are as little loaded as the least: exactly while loads are small, within a tenth when they are not.

    `topics` is given where loads mean work. They are up to one report old and never quite the same, so within a few
    points all are equal, and of those the ones with the fewest topics are taken: otherwise everything that is created
    until the next report would go to a broker that was idle for a moment.
    """
    if not loads:
        return []
    lowest = min(loads.values())
    limit = lowest if lowest < EXACT_BELOW else lowest * 1.1
    if topics is None:
        return sorted(broker for broker, load in loads.items() if load <= limit)
    equals = [broker for broker, load in loads.items() if load <= max(limit, lowest + WORK_SLACK)]
    fewest = min(topics.get(broker, 0) for broker in equals)
    return sorted(broker for broker in equals if topics.get(broker, 0) == fewest)


def choose(
    marker: Marker,
    loads: Mapping[BrokerId, float],
    *,
    turn: int,
    avoid: Collection[BrokerId] = (),
    topics: Mapping[BrokerId, int] | None = None,
) -> BrokerId | None:
    """The target for a topic among the brokers in `loads`; equals take turns. None: no broker can be given it now.

    Those in `avoid` did not claim it when they were asked to; they are asked again when there is no other.
    """
    open_to = {broker: load for broker, load in loads.items() if broker != marker.excluded}
    if marker.preferred in open_to and marker.preferred not in avoid:
        return marker.preferred
    fresh = {broker: load for broker, load in open_to.items() if broker not in avoid}
    equals = least_loaded(fresh or open_to, topics)
    return equals[turn % len(equals)] if equals else None


# --- rebalancing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What limits rebalancing. `threshold` is the coefficient of variation below which the cluster is even."""

    enabled: bool = False
    threshold: float = THRESHOLDS["balanced"]
    check_interval_seconds: float = 300
    moves_per_hour_max: int = 10
    cooldown_seconds: float = 60
    brokers_min: int = 2
    topic_age_min_seconds: float = 300
    blacklist: Sequence[str] = ()

    def allows(self, topic: TopicName) -> bool:
        """Whether the topic may be moved at all."""
        names = ("/system/*", *self.blacklist)
        return not any(topic == name or (name.endswith("/*") and topic.startswith(name[:-1])) for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One proposed or started rebalancing move: also the entry in the history."""

    topic: TopicName
    from_broker: BrokerId
    to_broker: BrokerId
    estimated_load: float
    reason: str
    timestamp: int = 0  # milliseconds since 1970

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is no entry of the history."""
        try:
            found = json.loads(value)
            return cls(
                topic=TopicName(found["topic"]),
                from_broker=BrokerId(int(found["from_broker"])),
                to_broker=BrokerId(int(found["to_broker"])),
                estimated_load=float(found["estimated_load"]),
                reason=str(found["reason"]),
                timestamp=int(found["timestamp"]),
            )
        except (ValueError, TypeError, KeyError):
            return None


Entry = TypeVar("Entry", bound=str)


def old_entries(history: Collection[Entry]) -> list[Entry]:
    """Entries of the history to remove for one more; a few at a time, as one transaction takes them."""
    return sorted(history)[: 1 - HISTORY_MAX][:HISTORY_REMOVED_MAX]


class Proposal(NamedTuple):
    """The next move, or why there is none; and how even the cluster is."""

    move: Move | None
    why: str
    balance: Balance


class Plan(NamedTuple):
    """Moves that even the cluster out, to be carried out together; or why there are none. `rule` is what stopped it."""

    moves: Sequence[Move]
    why: str
    balance: Balance
    rule: str = ""


GAIN_MIN: Final = 0.01  # of the difference between two brokers: what a move must narrow where the number means work
VARIATION_SLACK: Final = 0.05
EVEN_PART: Final = 1 / 3  # of the threshold: an order by hand does not stop where the leader would
PLAN_MAX: Final = 500  # moves of one order: planning them takes the loop for a tenth of a second
BUSY_RULE: Final = "moving"
BLACKLIST_RULE: Final = "blacklist_topics"
BROKERS_RULE: Final = "min_brokers_for_rebalance"


class _Planning:
    """The cluster as it will be after the moves that were chosen so far."""

    def __init__(
        self,
        strategy: str,
        measured: Mapping[BrokerId, Figures],
        topics_of: Mapping[BrokerId, Collection[TopicName]],
        known: Mapping[TopicName, TopicLoad],
        may_move: Callable[[TopicName], bool],
    ) -> None:
        self._strategy = strategy
        self.figures = dict(measured)
        self._topics_of = topics_of
        self._known = known
        self._may_move = may_move
        self._candidates: dict[BrokerId, tuple[list[TopicName], list[TopicName]]] = {}

    def even(self, strategy: str = "") -> Balance:
        return balance(rank(strategy or self._strategy, self.figures))

    def next(
        self, strategy: str, threshold: float, *, by_hand: bool = False, variation_max: float = math.inf
    ) -> Move | None:
        """The move that evens the cluster out by `strategy`, and by the cluster's own leaves it as even as is asked.

        The leader by itself takes from overloaded brokers alone; an order by hand from any that has more than its part.
        """
        even = self.even(strategy)
        if even.variation < threshold or len(even.loads) < 2:
            return None
        target = min(even.loads, key=lambda broker: (even.loads[broker], broker))
        weigh = weighs(strategy, self.figures)
        crowded = sorted(even.loads, key=lambda broker: (-even.loads[broker], broker))
        for source in [broker for broker in crowded if even.loads[broker] > even.mean] if by_hand else even.overloaded:
            gap = even.loads[source] - even.loads[target]
            if weigh and gap <= WORK_SLACK:
                continue  # on machines that do next to nothing every difference is large by proportion
            for topic in self._of(source, heaviest_first=weigh):
                less, more = move_topic(self._known.get(topic), self.figures[source], self.figures[target])
                figures = {**self.figures, source: less, target: more}
                after = balance(rank(strategy, figures))
                if after.variation >= even.variation or after.loads[target] > after.loads[source]:
                    continue
                narrowed = gap - (after.loads[source] - after.loads[target])
                if weigh and narrowed < GAIN_MIN * gap:
                    continue
                if balance(rank(self._strategy, figures)).variation > variation_max:
                    continue
                # One measure of evenness, whatever a move evens out: that of the cluster's own strategy.
                variation = self.even().variation
                self.figures = figures
                load = self._known.get(topic)
                self._candidates[source][load is None].remove(topic)
                loads = f"{even.loads[source]:.1f} against {even.loads[target]:.1f}"
                return Move(
                    topic=topic,
                    from_broker=source,
                    to_broker=target,
                    estimated_load=load.score if load is not None else 0.0,
                    reason=f"{'load' if weigh else 'topics'} {loads}, CV {variation:.2f}",
                )
        return None

    def _of(self, broker: BrokerId, *, heaviest_first: bool) -> Iterator[TopicName]:
        """What may leave it, in the order in which it is tried. One without a report comes last."""
        if broker not in self._candidates:
            found = sorted(topic for topic in self._topics_of.get(broker, ()) if self._may_move(topic))
            told = sorted((self._known[topic].score, topic) for topic in found if topic in self._known)
            unknown = [topic for topic in found if topic not in self._known]
            self._candidates[broker] = [topic for _, topic in told], unknown
        told_of, unknown = self._candidates[broker]
        yield from reversed(told_of) if heaviest_first else told_of
        yield from unknown


def propose(
    strategy: str,
    measured: Mapping[BrokerId, Figures],
    topics_of: Mapping[BrokerId, Collection[TopicName]],
    reports: Mapping[BrokerId, LoadReport],
    rules: Rules,
    *,
    busy: Collection[TopicName] = (),
) -> Proposal:
    """The one move that the leader makes by itself: a movable topic of the busiest broker to the idlest.

    Where the number of topics counts it is the lightest one, where work is weighed the heaviest that fits. `measured`
    has the active brokers. A topic stays that is unreported, too young, on the blacklist, already moving (`busy`), or
    whose move would not make the cluster more even, or only swap the two brokers' places.
    """
    even = balance(rank(strategy, measured))
    if len(measured) < max(rules.brokers_min, 2):
        return Proposal(None, _too_few(measured, rules), even)
    if even.variation < rules.threshold:
        return Proposal(None, _is_even(even, rules), even)
    known = loads_of_topics(reports.values())

    def may_move(topic: TopicName) -> bool:
        load = known.get(topic)
        is_old = load is not None and load.age_seconds >= rules.topic_age_min_seconds
        return is_old and topic not in busy and rules.allows(topic)

    move = _Planning(strategy, measured, topics_of, known, may_move).next(strategy, rules.threshold)
    return Proposal(move, "" if move else "No suitable topics found for rebalancing", even)


def plan(
    strategy: str,
    measured: Mapping[BrokerId, Figures],
    topics_of: Mapping[BrokerId, Collection[TopicName]],
    known: Mapping[TopicName, TopicLoad],
    rules: Rules,
    *,
    busy: Collection[TopicName] = (),
    moves_max: int = PLAN_MAX,
) -> Plan:
    """All moves that an operator's order makes, best first.

    How long topics have been where they are does not matter, nor whether they have a report. When the work
    is even, the number of topics is evened out as well, as far as the work stays even: a broker that has just been
    activated is to have its part of the topics that do nothing now, too. What the order may not touch: topics on the
    blacklist, and those that are on their way already.
    """

    def planned(may_move: Callable[[TopicName], bool], count_max: int) -> tuple[list[Move], _Planning]:
        planning = _Planning(strategy, measured, topics_of, known, may_move)
        moves: list[Move] = []
        variation_max = math.inf
        for each in dict.fromkeys((strategy, "fair")):
            is_uneven = planning.even(each).variation >= rules.threshold
            while is_uneven and len(moves) < count_max:
                move = planning.next(each, rules.threshold * EVEN_PART, by_hand=True, variation_max=variation_max)
                if move is None:
                    break
                moves.append(move)
            # Topics that do nothing may move to a broker that is busier just now, but not its work.
            variation_max = max(rules.threshold, planning.even().variation) + VARIATION_SLACK
        return moves, planning

    even = balance(rank(strategy, measured))
    if len(measured) < max(rules.brokers_min, 2):
        return Plan((), _too_few(measured, rules), even, BROKERS_RULE)
    moves, after = planned(lambda topic: topic not in busy and rules.allows(topic), min(moves_max, PLAN_MAX))
    if moves:
        more = f"; one order moves {PLAN_MAX} at most, ask again afterwards" if len(moves) == PLAN_MAX else ""
        numbers = ""
        if strategy != "fair":
            before, later = (_numbers(each) for each in (measured, after.figures))
            numbers = f"; topics of a broker: {before}, and {later} afterwards" if before != later else ""
        return Plan(moves, f"CV {even.variation:.2f}, and {after.even().variation:.2f} afterwards{numbers}{more}", even)
    # Nothing moves. Either nothing would help, or what would help may not be touched.
    if planned(lambda topic: rules.allows(topic), 1)[0]:
        count = sum(topic in busy for topics in topics_of.values() for topic in topics)
        why = f"The topics that could move are on their way already ({count}): ask again when they have arrived"
        return Plan((), why, even, BUSY_RULE)
    if planned(lambda topic: topic not in busy, 1)[0] or planned(lambda topic: True, 1)[0]:
        why = (
            "The topics that could move are on the blacklist (load_manager.rebalancing.blacklist_topics; "
            f"/system/* always), CV {even.variation:.2f}: move them with `topics unload`, or change the list"
        )
        return Plan((), why, even, BLACKLIST_RULE)
    if even.variation < rules.threshold:
        return Plan((), _is_even(even, rules), even)
    why = f"Cluster is as even as moving whole topics makes it (CV: {even.variation:.2f})"
    return Plan((), why, even)


def _numbers(figures: Mapping[BrokerId, Figures]) -> str:
    """The fewest and the most topics that a broker has."""
    loads = balance(rank("fair", figures)).loads.values()
    return f"{min(loads):.0f} to {max(loads):.0f}"


def _too_few(measured: Collection[BrokerId], rules: Rules) -> str:
    needed = max(rules.brokers_min, 2)
    return f"Rebalancing needs {needed} active brokers (min_brokers_for_rebalance), there are {len(measured)}"


def _is_even(even: Balance, rules: Rules) -> str:
    return f"Cluster is balanced (CV: {even.variation:.2f}, threshold: {rules.threshold:.2f})"


def too_soon(history: Collection[Move], now_ms: int, rules: Rules) -> str:
    """Why no move may start now; empty if one may."""
    newest = max((move.timestamp for move in history if move.timestamp <= now_ms), default=None)
    if newest is not None and now_ms - newest < rules.cooldown_seconds * 1000:
        return f"the last move was {(now_ms - newest) / 1000:.0f} s ago, cooldown is {rules.cooldown_seconds:g} s"
    last_hour = sum(now_ms - HOUR_MS < move.timestamp <= now_ms for move in history)
    if last_hour >= rules.moves_per_hour_max:
        return f"{last_hour} moves in the last hour, at most {rules.moves_per_hour_max} are allowed"
    return ""
