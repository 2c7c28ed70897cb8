"""Key-Shared: one consumer per key, one message in flight per key, order per key kept whatever happens.

Each key has a queue of its own (`key_backlog.py`). A consumer that joins gets a key only after the message in flight
at the old one is answered; one that leaves gives its messages back to the front of their queues. So no churn reorders
a key, and nothing queued is ever thrown away. A message that retention takes while a consumer has it stays in flight,
although it is settled: its key waits until the consumer answers, leaves or times out, as the application may look at
it yet.

The machine does not know keys: it asks for them (`ReadKeys`) while a consumer has a free window and nothing to do,
and gets them (`Keyed`). Offsets below `progress.next_fresh` have known keys, except those in `backlog.unread`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Final

from pydanube.core.dispatch.consumer_window import ConsumerWindow, DispatchLimits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import (
    AckReceived,
    CursorReset,
    Event,
    Forgotten,
    Joined,
    Keyed,
    NackReceived,
    ReadKeys,
    Scheduled,
    Ticked,
)
from pydanube.core.dispatch.key_backlog import KeyBacklog
from pydanube.core.dispatch.key_owners import KeyOwners
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.machine import DispatchMachine
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId

KEYS_READ_MAX: Final = 1_000  # offsets whose keys are asked for at a time
QUEUED_MAX: Final = 100_000  # offsets in queues: bounds memory, some 15 MB, when a hot key is stuck
LIMITS: Final = DispatchLimits(consumer_unacked_max=1_000)


class Unaccepted(enum.Enum):
    """What happens to a key that no registered consumer accepts."""

    SKIP = "skip"  # counts as acknowledged, as in the reference
    KEEP = "keep"  # waits for a consumer that accepts it


class KeySharedDispatch(DispatchMachine):
    """`away` are registered consumers that are not connected now; their keys are kept for them."""

    shares = True
    backlog: KeyBacklog

    def __init__(
        self,
        progress: SubscriptionProgress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
        unaccepted: Unaccepted = Unaccepted.SKIP,
        away: Mapping[ConsumerId, tuple[str, ...]] | None = None,
        queued_max: int = QUEUED_MAX,
    ) -> None:
        super().__init__(progress, policy=policy, limits=limits or LIMITS, rate=rate)
        self.unaccepted = unaccepted
        self.queued_max = queued_max
        self.owners = KeyOwners(away or {})
        self.backlog = KeyBacklog(self.context, progress, self.in_flight, self.owners)
        self._asked = False  # a ReadKeys is on its way
        self._ask_later = False  # the last answer was empty; wait for the next tick or commit

    def _apply(self, event: Event) -> None:
        match event:
            case Keyed(pairs, scheduled):
                self._read(pairs, scheduled)
            case Forgotten(consumer):
                self.owners.forget(consumer)
                self.backlog.look_for_unaccepted = True
            case Ticked() | CursorReset():
                self._asked = False  # in case the question or its answer was lost; a repeated answer does no harm
            case AckReceived(ranges):
                self._answer_gone(ranges)
            case NackReceived(ranges, consumer=consumer):  # of one that holds it no more it frees nothing
                held = [part for first, end in ranges for part in self.in_flight.held_by(consumer, first, end)]
                self._answer_gone(held)
            case _:
                pass
        super()._apply(event)

    def _has_capacity(self, committed_head: int) -> bool:
        """Could a message be sent that there is, or a key be read?"""
        has_capacity = [window.consumer for window in self.windows.all if self.windows.has_capacity_for(window)]
        if not has_capacity:
            return False
        if self.backlog.unread or self.progress.fresh_count(committed_head) > 0:
            return True
        return any(self.backlog.first_idle(consumer) is not None for consumer in has_capacity)

    # --- assigning --------------------------------------------------------------------------------------

    def _assign(self) -> None:
        backlog, capacity = self.backlog, self.windows.capacity
        # Without any consumer no key has been refused.
        if backlog.look_for_unaccepted and len(self.windows) and self.unaccepted is Unaccepted.SKIP:
            backlog.skip_unaccepted()
        windows = self.windows.all
        # Consumers with a free window, by the lowest message that could go there: a send changes only the receiver's.
        lowest: list[tuple[int, int]] = []
        for at, window in enumerate(windows):
            self._offer_to(lowest, at, window)
        pieces = 0
        while lowest:
            if pieces == self.context.pieces_max:
                self._unfinished = True
                return
            offset, at = heappop(lowest)
            window = windows[at]
            if capacity(window) <= 0:
                continue  # the window that all share is full
            if self.deliveries.allowance() == 0:
                return
            queue = backlog.first_idle(window.consumer)
            assert queue is not None and queue.offsets[0] == offset, "only this consumer's keys have changed"
            offset, tries = backlog.take(queue)
            self.deliveries.send(window, offset, offset + 1, tries)
            self._offer_to(lowest, at, window)
            pieces += 1
        if not self._asked and not self._ask_later and len(backlog.key_of) < self.queued_max:
            self._ask_for_keys(windows)

    def _offer_to(self, lowest: list[tuple[int, int]], at: int, window: ConsumerWindow) -> None:
        """Among consumers with a free window, the key whose next message is the lowest goes first."""
        if self.windows.capacity(window) > 0 and (queue := self.backlog.first_idle(window.consumer)) is not None:
            heappush(lowest, (queue.offsets[0], at))

    # --- reading keys -----------------------------------------------------------------------------------

    def _ask_for_keys(self, windows: Sequence[ConsumerWindow]) -> None:
        """Reads ahead only while a consumer has a free window and nothing to do."""
        if not any(self.windows.capacity(window) > 0 for window in windows):
            return
        wanted = self._next_unknown()
        if wanted is not None:
            self._asked = True
            self.context.effects.append(ReadKeys(wanted))

    def _next_unknown(self) -> OffsetRange | None:
        """Where keys are to be read next: over what is settled or known, whose keys are passed over, so that a
        thousand keys are one question however scattered they are; not over what is missing, where reading ends.
        """
        unread = self.backlog.unread
        lowest = unread.lowest()
        if lowest is not None:
            return OffsetRange(lowest.first, unread.overlap(lowest.first, lowest.first + KEYS_READ_MAX)[-1].end)
        fresh = self.progress.peek_fresh(1)
        if fresh is None:
            return None
        end = min(self.progress.head, fresh.first + KEYS_READ_MAX)
        missing = self.progress.missing.next_first(fresh.first)
        return OffsetRange(fresh.first, end if missing is None else min(end, missing))

    def _read(self, pairs: tuple[tuple[int, str], ...], scheduled: tuple[tuple[int, int, int], ...]) -> None:
        self._asked = False
        backlog, progress = self.backlog, self.progress
        if scheduled:  # first: those behind them follow without a gap
            self.postponement.postpone(Scheduled(scheduled), self.backlog)
        known_before = len(backlog.key_of)
        for offset, key in pairs:
            if backlog.unread.remove(offset, offset + 1):
                backlog.enqueue(offset, key)
                continue
            # In order, without a gap: an offset that the answer left out must be asked for again.
            fresh = progress.peek_fresh(1)
            if fresh is not None and fresh.first == offset:
                progress.take_fresh(1)
                backlog.enqueue(offset, key)
        self._ask_later = len(backlog.key_of) == known_before and not scheduled

    def _resume(self) -> None:
        super()._resume()
        self._ask_later = False

    # --- consumers --------------------------------------------------------------------------------------

    def _join(self, event: Joined) -> None:
        self.windows.join(event.consumer, event.permits, hands_over=event.hands_over)
        self.owners.put(event.consumer, event.key_filters)
        self._reassign()

    def _take_over(self, event: Joined) -> None:
        super()._take_over(event)
        self.owners.put(event.consumer, event.key_filters)
        self._reassign()

    def _leave(self, consumer: ConsumerId) -> None:
        self.owners.set_away(consumer)
        super()._leave(consumer)
        self._reassign()  # once, with what came back: it looks at every key

    def _set_turn(self, window: ConsumerWindow, *, stopped: bool, stalled: bool) -> None:
        """The keys of one that is sent nothing go to others. What it holds of them stays in flight, and the rest of
        those keys behind it.
        """
        super()._set_turn(window, stopped=stopped, stalled=stalled)
        if not (stopped or stalled):
            self.owners.put_again(window.consumer)
            self._reassign()
        elif self.owners.set_away(window.consumer):
            self._reassign()

    def _reassign(self) -> None:
        self.backlog.reassign(window.consumer for window in self.windows.all)

    def _recallable(self, window: ConsumerWindow, idle: Sequence[ConsumerWindow]) -> list[OffsetRange]:
        """What belongs to the idle by now: they joined after it was sent."""
        owners = {each.consumer for each in idle}
        return [
            OffsetRange(offset, offset + 1)
            for piece in self.in_flight.unseen(window.consumer)
            for offset in range(piece.first, piece.end)
            if self.backlog.owner_of(offset) in owners
        ]

    # --- what is in flight, or not any more -----------------------------------------------------------------

    def _lose(self, first: int, end: int) -> None:
        for piece in self.in_flight.overlap(first, end):
            self.backlog.gone.add(piece.first, piece.end)

    def _answer_gone(self, ranges: Sequence[tuple[int, int]]) -> None:
        """A consumer has said something about messages that are settled already: their keys go on."""
        gone = self.backlog.gone
        if not gone:
            return
        for first, end in ranges:
            for part in gone.overlap(first, end):
                self.deliveries.answered(*part, OffsetRanges())
                gone.remove(*part)
                self.backlog.land(*part)

    def _undelivered(self, first: int, end: int) -> list[OffsetRange]:
        return self.backlog.undelivered(first, end)
