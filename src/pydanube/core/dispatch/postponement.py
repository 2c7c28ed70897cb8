"""What a subscription does with messages that are not to be delivered yet: missing until then, as if unreadable.

    postpone ─► in the schedule, and missing ─► reveal ─► in the backlog, or ahead of what is fresh
                  └─ forget: acknowledged, void, removed by retention

Invariant: `progress.holds_fresh` exactly when the schedule is full. `schedule` keeps the dates and knows nothing else.
"""

from __future__ import annotations

from pydanube.core.dispatch.backlog import Backlog
from pydanube.core.dispatch.deliveries import Deliveries
from pydanube.core.dispatch.events import Scheduled
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges
from pydanube.core.dispatch.schedule import Schedule
from pydanube.core.dispatch.window import SubscriptionProgress


class Postponement:
    """Of one subscription. The backlog is the machine's, which its kind of dispatch chooses."""

    __slots__ = ("_deliveries", "_progress", "_schedule")

    def __init__(self, schedule: Schedule, progress: SubscriptionProgress, deliveries: Deliveries) -> None:
        self._schedule = schedule
        self._progress = progress
        self._deliveries = deliveries

    def postpone(self, event: Scheduled, backlog: Backlog) -> None:
        progress, schedule = self._progress, self._schedule
        for first, end, time_us in event.pieces:
            if event.consumer is None:
                in_flight = self._deliveries.in_flight.overlap(first, end)
                waiting = OffsetRanges((piece.first, piece.end) for piece in in_flight).gaps(first, end)
            else:
                taken = self._deliveries.postponed(event.consumer, first, end)
                waiting = [OffsetRange(piece.first, piece.end) for piece in taken]
            for part in waiting:
                backlog.forget((part,))
                for open_part in progress.settled.gaps(max(part.first, progress.next_unacked), part.end):
                    progress.withhold(*open_part)
                    schedule.put(*open_part, time_us)
        progress.holds_fresh = schedule.is_full

    def reveal(self, due: list[OffsetRange], backlog: Backlog) -> None:
        """What was due, and taken from the schedule, can be read; it is compared with the date once more when it is."""
        self._progress.holds_fresh = self._schedule.is_full
        for first, end in due:
            for late in self._progress.reveal(first, end):
                backlog.reveal(*late)

    def forget(self, first: int, end: int) -> None:
        """These are answered, or gone: they wait for no date any more."""
        for part in self._schedule.forget(first, end):
            self._progress.missing.remove(*part)
        self._progress.holds_fresh = self._schedule.is_full
