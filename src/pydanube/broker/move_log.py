"""Moves of topics away from this broker: those under way, and the last ones, for operators who ask."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from pydanube.broker.hand_over import Phases
from pydanube.core.cluster.placement import REBALANCE, Marker
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import DanubeError
from pydanube.ports import Clock
from pydanube.telemetry import Telemetry

MOVES_KEPT: Final = 10  # of one topic
MOVED_TOPICS_MAX: Final = 10_000


class PastMove(NamedTuple):
    """A topic that left this broker, or did not: `failure` says why."""

    topic: TopicName
    to_broker: BrokerId | None
    started_at_us: int
    milliseconds: Mapping[str, float]  # of each phase, in order
    failure: str = ""
    notes: Sequence[str] = ()  # what the operator should know: acknowledged messages that come again


class MoveLog:
    """As long as this process lives."""

    def __init__(self, clock: Clock, telemetry: Telemetry) -> None:
        self._clock = clock
        self._telemetry = telemetry
        self._past: OrderedDict[TopicName, deque[PastMove]] = OrderedDict()
        self.moving: dict[TopicName, Phases] = {}  # topics that leave, and how far they are

    @contextlib.contextmanager
    def recording(self, topic: TopicName, marker: Marker) -> Iterator[Phases]:
        """A move, which counts as failed if the block raises. The block enters its phases."""
        started_at_us = self._clock.time_us()
        phases = self.moving[topic] = Phases(self._clock)
        failure = "it was interrupted"
        try:
            yield phases
            failure = ""
            self._telemetry.moves.finished(phases.milliseconds)
            self._telemetry.members.unassigned.inc()
        except DanubeError as error:
            failure = str(error)
            self._telemetry.moves.count("error")
            if marker.reason == REBALANCE:
                self._telemetry.members.rebalance_failures.inc()
            raise
        finally:
            self.moving.pop(topic, None)
            if phases.has_begun:
                milliseconds, notes = dict(phases.milliseconds), tuple(phases.notes)
                self._remember(PastMove(topic, marker.to, started_at_us, milliseconds, failure, notes))

    def _remember(self, move: PastMove) -> None:
        self._past.setdefault(move.topic, deque(maxlen=MOVES_KEPT)).appendleft(move)
        self._past.move_to_end(move.topic)
        if len(self._past) > MOVED_TOPICS_MAX:
            self._past.popitem(last=False)

    def past_moves(self, topic: TopicName) -> Sequence[PastMove]:
        """Newest first."""
        return tuple(self._past.get(topic, ()))
