"""When a broker that was away is given topics again without a person: see docs/adr/0008-coming-back.md.

    none is active        the leader activates those that are away, one after the other
    `rejoin: active`      the broker activates itself when it is home

How often that happened is part of the broker's state. Each time it takes longer, so that a lease that flaps does not
carry topics to and fro without end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pydanube.core.cluster.lifecycle import NO_ACTIVE_BROKER, BrokerLoss, BrokerMode, BrokerState
from pydanube.core.names import BrokerId

# All in TTLs.
NEXT: Final = 0.125  # from one activation by the leader to the next
TOGETHER: Final = 1.0  # so long those that a leader activated do not count as a cluster that is well
DELAYS: Final = (0.0, 2.0, 4.0, 8.0, 16.0)  # from one return to the next, by how many there were
FORGOTTEN: Final = 32.0  # a return so long ago does not count any more


def returns_of(state: BrokerState, now_ms: int, ttl_seconds: float) -> int:
    """How often the broker came back by itself lately."""
    is_long_ago = now_ms - state.rejoined_at >= FORGOTTEN * ttl_seconds * 1000
    return 0 if is_long_ago else state.rejoins


def delay(state: BrokerState, now_ms: int, ttl_seconds: float) -> float:
    """Seconds that an away broker must still wait by the date alone. A date in the future, which another machine wrote
    or this one before its clock was set, counts as now.
    """
    returns = returns_of(state, now_ms, ttl_seconds)
    since = max(0.0, (now_ms - state.rejoined_at) / 1000)
    return max(0.0, DELAYS[min(returns, len(DELAYS) - 1)] * ttl_seconds - since)


def returned(state: BrokerState, reason: str, now_ms: int, ttl_seconds: float) -> BrokerState:
    """The state of an away broker that is active again."""
    return state.rejoined(reason, returns_of(state, now_ms, ttl_seconds) + 1, now_ms)


def nobody_serves(
    alive: Mapping[BrokerId, int],
    states: Mapping[BrokerId, BrokerState],
    lost: Mapping[BrokerId, BrokerLoss],
    now_ms: int,
    ttl_seconds: float,
) -> bool:
    """Whether there is no cluster to be cautious about: no broker is active, nor may come back as such, but those that
    a leader has just activated for this reason.
    """
    for broker, state in states.items():
        if state.mode is not BrokerMode.ACTIVE or state.has_left:
            continue
        if broker in alive:
            is_recent = abs(now_ms - state.rejoined_at) < TOGETHER * ttl_seconds * 1000
            if state.reason != NO_ACTIVE_BROKER or not is_recent:
                return False
        elif broker not in lost or lost[broker].session != state.session:
            return False  # it restarts, or is about to be declared dead
    return True


def away(alive: Mapping[BrokerId, int], states: Mapping[BrokerId, BrokerState]) -> list[BrokerId]:
    """Registered brokers that are drained only for having been away."""
    found: Iterable[BrokerId] = (
        broker
        for broker, session in alive.items()
        if (state := states.get(broker)) is not None
        and state.is_away
        and not state.has_left
        and state.session == session
    )
    return sorted(found)


class Waiting:
    """Since when brokers have been away, by the monotonic clock of this process: dates may be wrong by hours."""

    def __init__(self) -> None:
        self._since: dict[BrokerId, float] = {}

    def see(self, now: float, brokers: Iterable[BrokerId]) -> None:
        self._since = {broker: self._since.get(broker, now) for broker in brokers}

    def due(self, now: float, broker: BrokerId, state: BrokerState, now_ms: int, ttl_seconds: float) -> float:
        """When it may come back, by that clock; not after `now` if it may already."""
        by_date = now + delay(state, now_ms, ttl_seconds)
        # However the dates are: from when it was first seen here the whole delay is enough.
        whole = DELAYS[min(state.rejoins, len(DELAYS) - 1)] * ttl_seconds
        return min(by_date, self._since.get(broker, now) + whole)
