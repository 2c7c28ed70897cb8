"""The consumers of one subscription and how much each may be sent.

Two ways to say how much:
- by *window* (official gRPC clients): they say nothing, so all of them together hold at most `unacked_max`, and each no
  more than it answers in half of an ack timeout, but one (`window_pace.py`): what they hold has its deadline from
  sending;
- by *permits* (native protocol): each grants messages and bytes; what is sent is taken from its grant.

Bytes are known only to the shipper, which reads the log. So a consumer with permits gets one step's deliveries at
a time: after `Send` its window is closed until the shipper says with `Shipped` how many bytes went out. They may
overdraw the bytes by the last message, otherwise a message larger than the grant would never be sent.
"""

from __future__ import annotations

from pydanube.core.dispatch.consumer_window import ConsumerWindow, DispatchLimits, Permits
from pydanube.core.dispatch.window_pace import WindowPace
from pydanube.core.names import ConsumerId


class ConsumerWindows:
    """The consumers of one subscription in the order in which they joined."""

    __slots__ = ("_windows", "pace", "window_held")

    def __init__(self, limits: DispatchLimits) -> None:
        self.pace = WindowPace(limits)
        self.window_held = 0  # by all consumers that go by the window
        self._windows: dict[ConsumerId, ConsumerWindow] = {}

    @property
    def limits(self) -> DispatchLimits:
        return self.pace.limits

    def __len__(self) -> int:
        return len(self._windows)

    def __contains__(self, consumer: ConsumerId) -> bool:
        return consumer in self._windows

    @property
    def all(self) -> list[ConsumerWindow]:
        return list(self._windows.values())

    @property
    def first(self) -> ConsumerWindow | None:
        """The one that joined before all others."""
        return next(iter(self._windows.values()), None)

    @property
    def unseen(self) -> int:
        """Messages in the queues of consumers that say what they hand over."""
        return sum(window.unseen for window in self._windows.values())

    @property
    def late(self) -> int:
        """Messages that consumers still have in their queues although they are not in flight any more: timed out."""
        owed = sum(
            max(0, window.owed - window.held)
            for window in self._windows.values()
            if window.messages is not None and not window.hands_over
        )
        return owed + self.pace.overdue

    def get(self, consumer: ConsumerId) -> ConsumerWindow | None:
        return self._windows.get(consumer)

    def join(self, consumer: ConsumerId, permits: Permits | None, *, hands_over: bool = False) -> ConsumerWindow:
        assert consumer not in self._windows, "a consumer that joins again leaves first"
        window = ConsumerWindow(consumer, hands_over=hands_over)
        if permits is not None:
            window.messages, window.size_bytes = permits
        self._windows[consumer] = window
        return window

    def rejoin(self, consumer: ConsumerId, permits: Permits | None, *, hands_over: bool = False) -> None:
        """As if new, in its old place."""
        window = self._windows[consumer]
        assert window.held == window.unseen == 0, "what it held is taken back first"
        window.messages, window.size_bytes = permits if permits is not None else (None, 0)
        window.sending = window.shipping = window.owed = window.taken = 0
        window.paused = window.stalled = window.stopped = False
        window.hands_over = hands_over
        window.passed = (-1.0, -1)
        self.pace.forget(window)

    def leave(self, consumer: ConsumerId) -> None:
        window = self._windows.pop(consumer)
        assert window.held == 0, "what it held is taken back first"
        self.pace.forget(window)

    def move_back(self, consumer: ConsumerId) -> None:
        """Behind all others, as if it had joined last."""
        self._windows[consumer] = self._windows.pop(consumer)

    def grant(self, consumer: ConsumerId, permits: Permits) -> None:
        """A consumer that went by the window goes by permits from now on."""
        window = self._windows.get(consumer)
        if window is None:
            return  # it left while its grant was on the way
        if window.messages is None:
            window.messages = 0
            self.window_held -= window.held
            self.pace.forget(window)
        window.messages += max(0, permits.messages)
        window.owed = max(0, window.owed - max(0, permits.messages))
        window.size_bytes += max(0, permits.size_bytes)
        window.paused = False

    @property
    def window_max(self) -> int:
        """How many messages may be with all consumers that go by the window."""
        by_window = [self.pace.window_max(window) for window in self._windows.values() if window.messages is None]
        return min(self.pace.limits.unacked_max, sum(by_window)) if by_window else self.pace.limits.unacked_max

    def capacity(self, window: ConsumerWindow) -> int:
        """How many messages it could be sent now."""
        return 0 if window.paused else self._capacity(window)

    def has_capacity(self) -> bool:
        """Also counts consumers that are paused: a pause ends with the next poll."""
        return any(self._capacity(window) > 0 for window in self._windows.values())

    def has_capacity_for(self, window: ConsumerWindow) -> bool:
        return self._capacity(window) > 0

    def _capacity(self, window: ConsumerWindow) -> int:
        if window.shipping or window.stalled or window.stopped:
            return 0
        held_free = self.pace.limits.consumer_unacked_max - window.held
        if window.messages is None:
            free = self.pace.limits.unacked_max - self.window_held
            if free <= 0:
                return 0
            return max(0, min(held_free, free, self.pace.window_max(window) - window.held - window.overdue.count))
        if window.size_bytes <= 0:
            return 0
        return max(0, min(held_free, window.messages, self.pace.limits.send_max - window.sending))

    def hold(self, window: ConsumerWindow, count: int) -> None:
        if window.messages is None:
            self.pace.count_busy(window)
        window.held += count
        if window.hands_over:
            if not window.unseen:
                window.active_at = self.pace.now  # it had nothing to take before
                window.was_empty = True
            window.unseen += count
        if window.messages is None:
            self.window_held += count
        else:
            window.messages -= count
            window.sending += count
            window.owed += count

    def seen(self, window: ConsumerWindow, count: int) -> None:
        """Its application took `count` of what it holds."""
        window.unseen -= count
        assert window.unseen >= 0, "saw more than it was sent"

    def release(self, consumer: ConsumerId, count: int, *, unseen: bool = False) -> None:
        """It holds `count` fewer; permits are not given back, the consumer grants new ones."""
        window = self._windows[consumer]
        if window.messages is None:
            self.pace.count_busy(window)
        window.held -= count
        assert window.held >= 0, "released more than was held"
        if unseen:
            self.seen(window, count)
        if window.messages is None:
            self.window_held -= count

    def refund(self, window: ConsumerWindow, count: int, *, unseen: bool = False) -> None:
        """`count` were never sent: releases them and gives the permits back."""
        self.release(window.consumer, count, unseen=unseen)
        self.repay(window, count)

    def repay(self, window: ConsumerWindow, count: int) -> None:
        """`count` were never sent and are not held any more: gives the permits back."""
        if window.messages is not None:
            window.messages += count
            window.owed = max(0, window.owed - count)

    def sent(self, window: ConsumerWindow) -> None:
        """The step is over and says one `Send` to this consumer."""
        window.sending = 0
        if window.messages is not None:
            window.shipping += 1

    def shipped(self, window: ConsumerWindow, size_bytes: int) -> None:
        if window.messages is not None:
            window.shipping = max(0, window.shipping - 1)
            window.size_bytes -= size_bytes

    def resume(self) -> None:
        for window in self._windows.values():
            window.paused = False
