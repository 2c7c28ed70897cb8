"""Which broker a topic goes to, and which topic should move.

A `Marker` says that a topic has, or is about to have, no owner. What becomes of it is decided here on values;
`cluster/` writes it.

    null                                              a new topic
    {reason: unload | rebalance | drain, from_broker} a move: `to` is the target, `ready` once the old owner let go
    {reason: broker_lost, from_broker}                its owner was declared dead
    {reason: shutdown, from_broker, ready}            its owner sealed it and stopped

A topic is free, for its target to claim, when nobody can own it: it is new, its owner was declared dead, or its owner
let go. Moves never go back to `from_broker`. After a crash it is the first choice: its disk has the end of the log.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final, NamedTuple, Self

from pydanube.core.load import Balance, Figures, LoadReport, balance, loads_of_topics, rank
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
HOUR_MS: Final = 3_600_000
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
        """Nobody owns the topic: its target may claim it."""
        return not self.error and (self.reason in (None, BROKER_LOST) or self.ready)

    @property
    def is_move(self) -> bool:
        """The old owner lives, and serves the topic until it has let go."""
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
        """The old owner has let go. Written by its seal."""
        return replace(self, ready=True, phase="", error="")

    def as_failed(self, why: str) -> Self:
        """The old owner undid the move."""
        return replace(self, ready=False, error=why[:500] or "unknown")

    def towards(self, broker: BrokerId) -> Self:
        return replace(self, to=broker)


def _is_broker(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 64


# --- a broker for a topic -------------------------------------------------------------------------------


def least_loaded(loads: Mapping[BrokerId, float]) -> list[BrokerId]:
    """All that are as little loaded as the least: exactly while loads are small, within a tenth when they are not."""
    if not loads:
        return []
    lowest = min(loads.values())
    limit = lowest if lowest < EXACT_BELOW else lowest * 1.1
    return sorted(broker for broker, load in loads.items() if load <= limit)


def choose(
    marker: Marker, loads: Mapping[BrokerId, float], *, turn: int, avoid: Collection[BrokerId] = ()
) -> BrokerId | None:
    """The target for a topic among the brokers in `loads`; equals take turns. None: nobody can have it now.

    Those in `avoid` did not claim it when they were asked to; they are asked again when there is nobody else.
    """
    open_to = {broker: load for broker, load in loads.items() if broker != marker.excluded}
    if marker.preferred in open_to and marker.preferred not in avoid:
        return marker.preferred
    fresh = {broker: load for broker, load in open_to.items() if broker not in avoid}
    equals = least_loaded(fresh or open_to)
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


class Proposal(NamedTuple):
    """The next move, or why there is none; and how even the cluster is."""

    move: Move | None
    why: str
    balance: Balance


def propose(
    strategy: str,
    measured: Mapping[BrokerId, Figures],
    topics_of: Mapping[BrokerId, Collection[TopicName]],
    reports: Mapping[BrokerId, LoadReport],
    rules: Rules,
    *,
    busy: Collection[TopicName] = (),
) -> Proposal:
    """The one move that evens the cluster out: the lightest movable topic of the busiest broker to the idlest.

    `measured` has the active brokers. A topic stays that is too young, on the blacklist, already moving (`busy`), or
    whose move would not make the cluster more even, or only swap the two brokers' places.
    """
    even = balance(rank(strategy, measured))
    if len(measured) < rules.brokers_min or len(measured) < 2:
        needed = max(rules.brokers_min, 2)
        return Proposal(None, f"Rebalancing needs {needed} active brokers, there are {len(measured)}", even)
    if even.variation < rules.threshold:
        return Proposal(None, f"Cluster is balanced (CV: {even.variation:.2f}, threshold: {rules.threshold:.2f})", even)
    known = loads_of_topics(reports.values())
    target = min(even.loads, key=lambda broker: (even.loads[broker], broker))
    for source in even.overloaded:
        movable = [
            (known[topic].score, topic)
            for topic in topics_of.get(source, ())
            if topic in known
            and topic not in busy
            and rules.allows(topic)
            and known[topic].age_seconds >= rules.topic_age_min_seconds
        ]
        for score, topic in sorted(movable):
            moved = {
                **measured,
                source: measured[source].plus(known[topic], -1),
                target: measured[target].plus(known[topic]),
            }
            after = balance(rank(strategy, moved))
            if after.variation < even.variation and after.loads[target] <= after.loads[source]:
                reason = f"load {even.loads[source]:.1f} against {even.loads[target]:.1f}, CV {even.variation:.2f}"
                move = Move(topic=topic, from_broker=source, to_broker=target, estimated_load=score, reason=reason)
                return Proposal(move, "", even)
    return Proposal(None, "No suitable topics found for rebalancing", even)


def too_soon(history: Collection[Move], now_ms: int, rules: Rules) -> str:
    """Why no move may start now; empty if one may."""
    newest = max((move.timestamp for move in history if move.timestamp <= now_ms), default=None)
    if newest is not None and now_ms - newest < rules.cooldown_seconds * 1000:
        return f"the last move was {(now_ms - newest) / 1000:.0f} s ago, cooldown is {rules.cooldown_seconds:g} s"
    last_hour = sum(now_ms - HOUR_MS < move.timestamp <= now_ms for move in history)
    if last_hour >= rules.moves_per_hour_max:
        return f"{last_hour} moves in the last hour, at most {rules.moves_per_hour_max} are allowed"
    return ""
