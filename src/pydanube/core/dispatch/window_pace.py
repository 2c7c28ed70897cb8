"""How many messages a consumer without permits may hold: what it answers in half of an ack timeout, but one.

How long a consumer needs for a message is measured while it has any. What timed out is in its queue still, and counts
as long as it goes on answering: else it would be sent more and more that has no chance.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydanube.core.dispatch.consumer_window import ConsumerWindow, DispatchLimits
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges
from pydanube.core.names import ConsumerId


class WindowPace:
    """What is known of how fast consumers answer that go by the window.

    `overdue` of a window is what has timed out and is in the consumer's queue still.
    """

    __slots__ = ("_overdue", "_slowest", "limits", "now", "timeout_seconds")

    def __init__(self, limits: DispatchLimits) -> None:
        self.limits = limits
        self.timeout_seconds: float | None = None  # until what goes by the window has failed
        self.now = 0.0
        # The consumer that needed longest for a message, and how long, by the last answers. One that has not answered
        # yet is thought to need as long.
        self._slowest: tuple[ConsumerId, float] | None = None
        self._overdue: dict[ConsumerId, ConsumerWindow] = {}  # those with overdue messages

    @property
    def overdue(self) -> int:
        """Messages that consumers have in their queues although they are not in flight any more: timed out."""
        return sum(window.overdue.count for window in self._overdue.values())

    def window_max(self, window: ConsumerWindow) -> int:
        """How many messages may be with one consumer that goes by the window."""
        most = self.limits.unacked_max
        seconds_each = window.seconds_each or (self._slowest[1] if self._slowest else None)
        if seconds_each is None or self.timeout_seconds is None:
            return most
        if window.held:
            seconds_each = max(seconds_each, self.now - window.answered_at)  # for so long it has been busy with one
        return max(1, int(min(most, self.timeout_seconds / 2 / seconds_each)))

    def count_busy(self, window: ConsumerWindow) -> None:
        """Before what a consumer has changes."""
        if window.held or window.overdue:
            window.busy_seconds += self.now - window.counted_at
        else:
            window.answered_at = self.now  # it had nothing to answer before
        window.counted_at = self.now

    def answered(self, window: ConsumerWindow, count: int, newest: tuple[float, int]) -> None:
        """Adapts the window of a consumer that goes by it. `newest`: when the newest of what it answered was sent, and
        its offset.
        """
        if window.messages is not None:
            return
        window.passed = max(window.passed, newest)
        if window.passed > window.overdue_newest:
            self.forget(window)  # it takes them in turn: these it will not answer
        self._adapt(window, count)

    def _adapt(self, window: ConsumerWindow, count: int) -> None:
        window.answers += count
        last = (self.now - window.answered_at) / count
        window.seconds_each = max(window.busy_seconds / window.answers, last, 1e-9)  # slow counts immediately
        window.answered_at = self.now
        if window.answers >= self.window_max(window):
            window.answers /= 4
            window.busy_seconds /= 4
        if self._slowest is None or self._slowest[0] == window.consumer or self._slowest[1] <= window.seconds_each:
            self._slowest = window.consumer, window.seconds_each

    def keeps(self, window: ConsumerWindow, first: int, end: int, sent_at: float) -> None:
        """A consumer holds these no longer, and has not answered: they may be in its queue still."""
        if window.messages is None and (sent_at, end - 1) > window.passed:
            window.overdue.add(first, end)
            window.overdue_newest = max(window.overdue_newest, (sent_at, end - 1))
            self._overdue[window.consumer] = window

    def answered_late(self, ranges: Iterable[OffsetRange]) -> OffsetRanges:
        """Which of these were overdue somewhere: there they are not any more."""
        late = OffsetRanges()
        for first, end in ranges if self._overdue else ():
            for window in list(self._overdue.values()):
                found = window.overdue.overlap(first, end)
                if found:
                    self.count_busy(window)
                    self._adapt(window, sum(part.size for part in found))
                    window.overdue.remove(first, end)
                    if not window.overdue:
                        self.forget(window)
                for part in found:
                    late.add(*part)
        return late

    def forget_silent(self) -> None:
        """What is overdue at a consumer that has answered nothing for an ack timeout does not count any more."""
        for window in list(self._overdue.values()):
            if self.timeout_seconds is None or window.answered_at + self.timeout_seconds <= self.now:
                self.forget(window)

    def forget_all(self) -> None:
        for window in list(self._overdue.values()):
            self.forget(window)

    def silent_at(self) -> float | None:
        """When the first of them will have been silent for that long."""
        if self.timeout_seconds is None or not self._overdue:
            return None
        return min(window.answered_at for window in self._overdue.values()) + self.timeout_seconds

    def forget(self, window: ConsumerWindow) -> None:
        if self._overdue.pop(window.consumer, None) is not None:
            self.count_busy(window)
            window.overdue.clear()
        window.overdue_newest = (-1.0, -1)
