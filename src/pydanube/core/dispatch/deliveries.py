"""What consumers were sent and have not answered: put in flight, taken back, timed out.

A delivery belongs to one consumer until it is acknowledged, fails, times out or is taken back. What becomes of the
message then is decided by the machine and kept by its backlog.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydanube.core.dispatch.consumer_window import ConsumerWindow, DispatchLimits
from pydanube.core.dispatch.consumer_windows import ConsumerWindows
from pydanube.core.dispatch.delivery import FailurePolicy, Tries
from pydanube.core.dispatch.events import Effect, SendRanges, Shipped
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, RangePiece
from pydanube.core.dispatch.window import Flight, InFlight
from pydanube.core.names import ConsumerId


class StepContext:
    """What the parts of one machine share: the time and the effects of this step, and the policy of today."""

    __slots__ = ("effects", "now", "pieces_max", "policy", "timeout_seconds")

    def __init__(self, policy: FailurePolicy, pieces_max: int) -> None:
        self.now = 0.0
        self.effects: list[Effect] = []
        self.policy = policy
        self.timeout_seconds = policy.ack_timeout_seconds
        self.pieces_max = pieces_max  # ranges that one step sends, times out or retries


class _Outgoing:
    """A Send while its ranges are still being collected."""

    __slots__ = ("attempt", "ranges", "window")

    def __init__(self, window: ConsumerWindow, attempt: int, first: int, end: int) -> None:
        self.window = window
        self.attempt = attempt
        self.ranges = [OffsetRange(first, end)]


class Deliveries:
    """Flights, the windows they count in, and the rate at which there may be new ones."""

    __slots__ = ("_context", "_outgoing", "_outgoing_to", "in_flight", "rate", "rate_ready_at", "timed_out", "windows")

    def __init__(self, context: StepContext, limits: DispatchLimits, rate: TokenBucket | None) -> None:
        self._context = context
        self.windows = ConsumerWindows(limits)
        self.windows.pace.timeout_seconds = context.timeout_seconds
        self.in_flight = InFlight()
        self.rate = rate
        self.rate_ready_at: float | None = None  # the rate let nothing more go in this step, and will then
        self.timed_out = 0  # messages, in all
        self._outgoing: list[_Outgoing] = []
        self._outgoing_to: dict[ConsumerId, _Outgoing] = {}

    # --- sending ----------------------------------------------------------------------------------------

    def allowance(self) -> int | None:
        """How many messages the rate limit allows now; None without a limit."""
        if self.rate is None:
            return None
        allowed = self.rate.available(self._context.now)
        if allowed == 0:
            self.rate_ready_at = self.rate.ready_at(1, self._context.now)
        return allowed

    def send(self, window: ConsumerWindow, first: int, end: int, tries: Tries) -> None:
        tries = tries.delivered()
        self.in_flight.put(first, end, window.consumer, tries, self._context.now, unseen=window.hands_over)
        self.windows.hold(window, end - first)
        if self.rate is not None:
            self.rate.force(end - first, self._context.now)
        last = self._outgoing_to.get(window.consumer)
        if last is None or last.attempt != tries.deliveries:
            last = _Outgoing(window, tries.deliveries, first, end)
            self._outgoing_to[window.consumer] = last
            self._outgoing.append(last)
        elif last.ranges[-1].end == first:
            last.ranges[-1] = OffsetRange(last.ranges[-1].first, end)
        else:
            last.ranges.append(OffsetRange(first, end))

    def emit_sends(self) -> None:
        if not self._outgoing:
            return
        for send in self._outgoing:
            window = send.window
            size_max = None if window.messages is None else window.size_bytes
            self.windows.sent(window)
            self._context.effects.append(SendRanges(window.consumer, tuple(send.ranges), send.attempt, size_max))
        self._outgoing.clear()
        self._outgoing_to.clear()

    def shipped(self, event: Shipped) -> list[RangePiece[Tries]]:
        """Counts the bytes that went out. Returns what did not go and is to be sent again."""
        window = self.windows.get(event.consumer)
        if window is None:
            return []  # it left in the meantime, and what it held was taken back then
        self.windows.shipped(window, event.size_bytes)
        if window.was_empty:
            window.was_empty = False
            window.active_at = self._context.now  # it could not take before what was not sent
        unsent: list[RangePiece[Tries]] = []
        for first, end in event.unsent:
            window.paused = True
            settled = end - first  # voided, trimmed or timed out while it was read: not sent either
            for piece in self.in_flight.overlap(first, end):
                if piece.value.consumer != event.consumer:
                    continue  # it timed out, and another consumer has it now
                self.in_flight.cut(piece.first, piece.end)
                self.windows.refund(window, piece.end - piece.first, unseen=piece.value.unseen)
                unsent.append(RangePiece(piece.first, piece.end, piece.value.tries.undelivered()))
                settled -= piece.end - piece.first
            self.windows.repay(window, settled)
        return unsent

    def postponed(self, consumer: ConsumerId, first: int, end: int) -> list[RangePiece[Flight]]:
        """Takes back what was to be sent of [first, end) and was not, because it is not due."""
        window = self.windows.get(consumer)
        if window is None:
            return []  # it left in the meantime, and what it held was taken back then
        settled = end - first
        taken: list[RangePiece[Flight]] = []
        for piece in self.in_flight.overlap(first, end):
            if piece.value.consumer != consumer:
                continue
            self.in_flight.cut(piece.first, piece.end)
            self.windows.refund(window, piece.end - piece.first, unseen=piece.value.unseen)
            settled -= piece.end - piece.first
            taken.append(piece)
        self.windows.repay(window, settled)
        return taken

    # --- ending -----------------------------------------------------------------------------------------

    def release(self, pieces: Iterable[RangePiece[Flight]]) -> None:
        for piece in pieces:
            self.windows.release(piece.value.consumer, piece.end - piece.first, unseen=piece.value.unseen)

    def answered(self, first: int, end: int, late: OffsetRanges) -> list[RangePiece[Flight]]:
        """Takes back what is in flight of [first, end): its consumer has answered. `late`: what was overdue at a
        consumer. It is that one that has answered, and the consumer with the copy has it still.
        """
        pieces = self.in_flight.cut(first, end)
        self.release(pieces)
        pace = self.windows.pace
        for at, upto, flight in pieces:
            window = self.windows.get(flight.consumer)
            assert window is not None, "what a consumer held is taken back when it leaves"
            if window.messages is not None:
                continue  # its window is what it grants
            for part in late.overlap(at, upto) if late else ():
                pace.keeps(window, *part, flight.sent_at)
            for part in late.gaps(at, upto) if late else (OffsetRange(at, upto),):
                pace.answered(window, part.size, (flight.sent_at, part.end - 1))
        return pieces

    def take_back(self, consumer: ConsumerId) -> list[RangePiece[Flight]]:
        """Everything that a consumer holds, lowest first. Released together: it may be thousands of pieces."""
        pieces = self.in_flight.cut_consumer(consumer)
        held = sum([piece.end - piece.first for piece in pieces])
        unseen = sum([piece.end - piece.first for piece in pieces if piece.value.unseen])
        if held > unseen:
            self.windows.release(consumer, held - unseen)
        if unseen:
            self.windows.release(consumer, unseen, unseen=True)
        return pieces

    def time_out(self) -> list[RangePiece[Flight]]:
        """Takes back what was not answered in time."""
        timeout, now = self._context.timeout_seconds, self._context.now
        deadline = self.next_deadline()
        if timeout is None or deadline is None or deadline > now:
            return []
        # The same sum as in the wake time, so that waking exactly then finds what it woke for.
        pieces = self.in_flight.cut_sent(lambda sent_at: sent_at + timeout <= now, self._context.pieces_max)
        pieces += self.in_flight.cut_due(now, self._context.pieces_max)
        self.release(pieces)
        for first, end, flight in pieces:
            self.timed_out += end - first
            window = self.windows.get(flight.consumer)
            assert window is not None, "what a consumer held is taken back when it leaves"
            self.windows.pace.keeps(window, first, end, flight.sent_at)
        return pieces

    def next_deadline(self) -> float | None:
        timeout = self._context.timeout_seconds
        if timeout is None:
            return None
        oldest, extended = self.in_flight.oldest_sent_at(), self.in_flight.next_due_at()
        if oldest is None:
            return extended
        return oldest + timeout if extended is None else min(oldest + timeout, extended)

    def clear(self) -> None:
        self.release(self.in_flight)
        self.in_flight.clear()
        self.windows.pace.forget_all()
