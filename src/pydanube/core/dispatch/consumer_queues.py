"""The queues of consumers that say what they hand over to their applications: sent, and unseen as yet.

What is unseen has no deadline. Its consumer is asked to give some back (`Recall`) while another has nothing to do, and
if it takes, acknowledges and asks for nothing during a whole ack timeout, its queue is taken from it
(docs/adr/0007-workers.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydanube.core.dispatch.consumer_window import ConsumerWindow
from pydanube.core.dispatch.deliveries import Deliveries, StepContext
from pydanube.core.dispatch.delivery import Tries
from pydanube.core.dispatch.events import Handed, NotHeld, Recall, Returned
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, RangePiece
from pydanube.core.dispatch.window import Flight

# A consumer has nothing to do for so long: then others are asked for what they have not seen.
RECALL_AFTER_SECONDS: Final = 0.1
RECALL_SECONDS: Final = 1.0  # how often one consumer is asked
RECALL_RANGES_MAX: Final = 1_000


class ConsumerQueues:
    """What is unseen, of all consumers of one subscription."""

    __slots__ = ("_context", "_deliveries", "_idle_since", "_in_flight", "_windows")

    def __init__(self, context: StepContext, deliveries: Deliveries) -> None:
        self._context = context
        self._deliveries = deliveries
        self._in_flight = deliveries.in_flight
        self._windows = deliveries.windows
        self._idle_since: float | None = None  # a consumer has nothing to do, while others have unseen messages

    # --- what consumers say of them -----------------------------------------------------------------------

    def handed(self, event: Handed) -> None:
        """An application has taken these: their deadline runs from now, or is as late as it asks for."""
        missing: list[OffsetRange] = []
        for first, end in event.ranges:
            mine = [piece for piece in self._in_flight.overlap(first, end) if piece.value.consumer == event.consumer]
            for piece in mine:
                self._see(piece, event.seconds)
            if event.seconds is not None:
                missing += OffsetRanges((piece.first, piece.end) for piece in mine).gaps(first, end)
        if missing:
            self._context.effects.append(NotHeld(tuple(missing)))

    def _see(self, piece: RangePiece[Flight], seconds: float | None) -> None:
        first, end, flight = piece
        now, timeout = self._context.now, self._context.timeout_seconds
        began = now if flight.unseen else flight.sent_at
        due_at = flight.due_at
        if seconds is not None and timeout is not None:
            due_at = max(now + seconds, began + timeout if due_at is None else due_at)
        if not flight.unseen and due_at == flight.due_at:
            return
        window = self._windows.get(flight.consumer)
        assert window is not None, "what a consumer held is taken back when it leaves"
        if flight.unseen:
            self._windows.seen(window, end - first)
        self._in_flight.cut(first, end)
        self._in_flight.put(first, end, flight.consumer, flight.tries, began, due_at=due_at)

    def returned(self, event: Returned) -> list[RangePiece[Tries]]:
        """What the application has not seen and will not: it is to be sent again."""
        window = self._windows.get(event.consumer)
        if window is None or event.taken != window.taken:
            return []  # it speaks of a queue that was taken from it; what it was sent since it may have shown
        back: list[RangePiece[Tries]] = []
        for first, end in event.ranges:
            for piece in self._in_flight.overlap(first, end):
                flight = piece.value
                if flight.consumer != event.consumer or not flight.unseen:
                    continue  # it was taken back in the meantime
                self._deliveries.release(self._in_flight.cut(piece.first, piece.end))
                back.append(RangePiece(piece.first, piece.end, flight.tries.undelivered()))
        return back

    # --- taking them from one consumer for another ----------------------------------------------------------

    def silent(self) -> list[ConsumerWindow]:
        """Consumers that took, acknowledged and asked for nothing during an ack timeout, and have unseen messages."""
        timeout, now = self._context.timeout_seconds, self._context.now
        if timeout is None:
            return []
        return [
            window
            for window in self._windows.all
            if window.unseen and not window.shipping and window.active_at + timeout <= now
        ]

    def take(self, window: ConsumerWindow) -> list[RangePiece[Flight]]:
        """The whole queue of a consumer."""
        pieces = self._in_flight.cut_unseen(window.consumer)
        self._deliveries.release(pieces)
        window.taken += 1
        return pieces

    def idle_and_busy(self) -> tuple[list[ConsumerWindow], list[ConsumerWindow]]:
        """Consumers that could receive, have nothing to look at and get nothing; and those with unseen messages."""
        windows = self._windows.all
        busy = [window for window in windows if window.unseen and not window.shipping]
        if not busy:
            return [], []
        idle = [
            window
            for window in windows
            if self._windows.capacity(window) > 0 and not (window.unseen if window.hands_over else window.held)
        ]
        return idle, busy

    def next_to_ask(self, idle: Sequence[ConsumerWindow], busy: Sequence[ConsumerWindow]) -> ConsumerWindow | None:
        """The consumer to ask now: one has had nothing to do for a while, and this one more than it can look at."""
        if not idle or not busy:
            self._idle_since = None
            return None
        now = self._context.now
        if self._idle_since is None:
            self._idle_since = now
        if self._ask_at(self._idle_since, busy) > now:
            return None
        window = max(busy, key=lambda each: each.unseen if each.recalled_at + RECALL_SECONDS <= now else -1)
        self._idle_since = window.recalled_at = now
        return window

    @staticmethod
    def _ask_at(idle_since: float, busy: Sequence[ConsumerWindow]) -> float:
        return max(idle_since + RECALL_AFTER_SECONDS, min(window.recalled_at for window in busy) + RECALL_SECONDS)

    def upper_half(self, window: ConsumerWindow) -> list[OffsetRange]:
        """Of what one consumer has not seen: it looks at the lowest first."""
        wanted = window.unseen - window.unseen // 2
        found: list[OffsetRange] = []
        for piece in reversed(self._in_flight.unseen(window.consumer)):
            if wanted <= 0:
                break
            found.append(OffsetRange(max(piece.first, piece.end - wanted), piece.end))
            wanted -= found[-1].size
        return found[::-1]

    def ask(self, window: ConsumerWindow, wanted: Sequence[OffsetRange]) -> None:
        merged = tuple(OffsetRanges(wanted))
        for at in range(0, len(merged), RECALL_RANGES_MAX):
            self._context.effects.append(Recall(window.consumer, merged[at : at + RECALL_RANGES_MAX], window.taken))

    def next_look(self) -> float | None:
        """When a consumer has been silent, or another idle, for too long. A time that has passed waits for permits."""
        if len(self._windows) < 2:
            return None
        now, timeout = self._context.now, self._context.timeout_seconds
        with_unseen = [window for window in self._windows.all if window.unseen]
        times: list[float] = []
        if timeout is not None:
            times += [window.active_at + timeout for window in with_unseen]
        if self._idle_since is not None:
            times.append(self._ask_at(self._idle_since, with_unseen))
        return min((time for time in times if time > now), default=None)
