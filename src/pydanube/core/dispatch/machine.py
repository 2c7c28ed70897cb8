"""One subscription's dispatch: its state, and the step from an event to effects.

    step(event, now) -> effects

    event ──► state ──► timeouts and due retries ──► assign ──► Send …, WakeAt

The machine never waits, reads no clock and raises nothing: what cannot be is answered with an effect
(`AckRefused`, `JoinRefused`) or, if only our own bug can cause it, an assertion. It is made of

    deliveries   what consumers were sent and have not answered, and how much more each may be sent
    queues       what of it their applications have not seen, and taking it from one consumer for another
    backlog      what is neither settled nor in flight: to be sent again, waiting, blocked
    progress     the cursor, what is acknowledged above it, what was never handed out
    schedule     what is not to be delivered before a time; `postponement` keeps it missing until then

and subclasses decide which consumer gets what (`_assign`).

Invariant: every offset in [next_unacked, next_fresh) that is neither settled nor missing is in exactly one
place: in flight, or in the backlog. Nothing is ever skipped. Key-Shared has settled offsets in flight, too:
those that retention took while a consumer has them.

A step is short, whatever the subscription looks like: it hands out, times out and retries at most `PIECES_MAX`
ranges each, and asks to be woken immediately (`WakeAt` now) if there is more to do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, assert_never

from pydanube.core.dispatch.backlog import Backlog
from pydanube.core.dispatch.consumer_queues import ConsumerQueues
from pydanube.core.dispatch.consumer_window import ConsumerWindow, DispatchLimits
from pydanube.core.dispatch.deliveries import Deliveries, StepContext
from pydanube.core.dispatch.delivery import TIMED_OUT, FailurePolicy
from pydanube.core.dispatch.events import (
    AckReceived,
    AckRefused,
    Available,
    ConsumerFinished,
    CursorReset,
    DateSet,
    DeadLettered,
    DeadLetterFailed,
    Effect,
    Event,
    Expired,
    Forgotten,
    Granted,
    Handed,
    HistoryAvailable,
    Joined,
    Keyed,
    Left,
    LogTrimmed,
    NackReceived,
    PolicyChanged,
    Ranges,
    Returned,
    Scheduled,
    Shipped,
    Ticked,
    Voided,
    WakeAt,
    Withheld,
)
from pydanube.core.dispatch.lag import LagInfo, Standing, lag_info
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.postponement import Postponement
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, RangePiece, work
from pydanube.core.dispatch.schedule import Schedule
from pydanube.core.dispatch.window import Flight, SubscriptionProgress
from pydanube.core.names import ConsumerId

PIECES_MAX: Final = 1_024  # ranges that one step sends, takes back because of their age, or retries


class DispatchMachine(ABC):
    """One subscription. `progress` is where it stands; `first_offset` the lowest offset the log still has."""

    shares = False  # several consumers receive at the same time
    backlog: Backlog

    def __init__(
        self,
        progress: SubscriptionProgress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
    ) -> None:
        self.progress = progress
        self.context = StepContext(policy or FailurePolicy(), PIECES_MAX)
        self.deliveries = Deliveries(self.context, limits or DispatchLimits(), rate)
        self.queues = ConsumerQueues(self.context, self.deliveries)
        self.in_flight = self.deliveries.in_flight
        self.windows = self.deliveries.windows
        self.schedule = Schedule()
        self.postponement = Postponement(self.schedule, progress, self.deliveries)
        self.first_offset = 0
        self.touched_max = 0  # ranges, by the costliest step so far
        self._sought = False  # by this owner: what it has not handed out since was delivered before, if ever
        self._unfinished = False  # there is more to send, and a consumer has a free window
        self._wake_at: float | None = None

    def step(self, event: Event, now: float) -> list[Effect]:
        context, windows = self.context, self.windows
        context.now = now = max(now, context.now)  # a clock that went back must not reorder flights
        effects: list[Effect] = []
        context.effects = effects
        windows.pace.now = now
        touched_before = work.ranges
        self._apply(event)
        for first, end, flight in self.deliveries.time_out():
            self.backlog.failed(first, end, flight.tries.failed(TIMED_OUT), 0.0)
        windows.pace.forget_silent()
        self.backlog.retry_due()
        due = self.schedule.take_due(now, context.pieces_max)
        if due:
            self._resume()
            self.postponement.reveal(due, self.backlog)
        self.deliveries.rate_ready_at = None
        self._unfinished = False
        if len(windows) > 1:
            self._take_from_silent()
        self._assign()
        if self.shares:
            self._recall()
        self.deliveries.emit_sends()
        self._emit_wake()
        self.touched_max = max(self.touched_max, work.ranges - touched_before)
        return effects

    # --- seen from outside --------------------------------------------------------------------------------

    @property
    def policy(self) -> FailurePolicy:
        return self.context.policy

    def standing(self, committed_head: int = 0) -> Standing:
        """Everything `core.dispatch.lag` needs to say whether to poll, and why the subscription is quiet.

        `committed_head` is the log's own, which the machine may not have heard of yet.
        """
        windows, progress = self.windows.all, self.progress
        kept = self.backlog.counts(committed_head)
        by_window = any(window.messages is None for window in windows)
        return Standing(
            head=max(progress.head, committed_head),
            next_unacked=progress.next_unacked,
            lag=progress.lag(committed_head),
            undispatched=kept.undispatched,
            consumers=len(windows),
            has_capacity=self._has_capacity(committed_head),
            unacked=self.in_flight.count,
            unseen=self.windows.unseen,
            late=self.windows.late,
            window_held=self.windows.window_held,
            unacked_max=self.windows.window_max if by_window else None,
            waiting=kept.waiting,
            retry_at=self.backlog.next_due(),
            blocked_offset=kept.blocked_offset,
            blocked_key=kept.blocked_key,
            blocked_keys=kept.blocked_keys,
            dead_lettering=kept.dead_lettering,
            rate_ready_at=self.deliveries.rate_ready_at,
            first_offset=self.first_offset,
            missing=progress.missing_count() - self.schedule.count,
            scheduled=self.schedule.count,
            scheduled_full=self.schedule.is_full,
            due_at=self.schedule.next_due(),
            skipped=progress.oldest_open() - progress.next_unacked,
            timed_out=self.deliveries.timed_out,
            unaccepted=kept.unaccepted,
        )

    def get_lag_info(self, committed_head: int) -> LagInfo:
        head = max(committed_head, self.progress.head)
        return lag_info(self.progress.next_unacked, head, self.progress.lag(head))

    # --- what subclasses decide ---------------------------------------------------------------------------

    @abstractmethod
    def _assign(self) -> None:
        """Sends what can be sent, lowest first."""

    @abstractmethod
    def _has_capacity(self, committed_head: int) -> bool:
        """Could a message be sent, if there were one?"""

    @abstractmethod
    def _join(self, event: Joined) -> None:
        """A consumer that was not connected."""

    def _set_turn(self, window: ConsumerWindow, *, stopped: bool, stalled: bool) -> None:
        """A connected consumer is sent nothing from now on, or, with neither, is sent messages again."""
        window.stopped, window.stalled = stopped, stalled

    def _may_take_from(self, window: ConsumerWindow) -> bool:
        """Whether what a silent consumer has not seen can go to others now."""
        return True

    def _idle_and_busy(self) -> tuple[list[ConsumerWindow], list[ConsumerWindow]]:
        """Consumers that have nothing to do, and consumers that could be asked for some of what they have."""
        if len(self.windows) < 2 or self._unfinished or self.deliveries.rate_ready_at is not None:
            return [], []
        return self.queues.idle_and_busy()

    def _recallable(self, window: ConsumerWindow, idle: Sequence[ConsumerWindow]) -> list[OffsetRange]:
        """What to ask a consumer for on behalf of the idle ones."""
        return self.queues.upper_half(window)

    def _undelivered(self, first: int, end: int) -> list[OffsetRange]:
        """What of these is below `next_fresh` and was never sent. Ranges are sent as soon as they are taken."""
        return []

    # --- events -------------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        match event:
            case AckReceived(ranges, consumer):
                self._heard_from(consumer)
                self._ack(ranges)
            case Available(end):
                self.progress.head = max(self.progress.head, end)
                self._resume()
            case Shipped():
                for first, end, tries in self.deliveries.shipped(event):
                    self.backlog.take_back(first, end, tries)
            case Scheduled():
                self.postponement.postpone(event, self.backlog)
            case DateSet(time_us):
                self.schedule.set_date(time_us, self.context.now)
            case Granted(consumer, permits):
                if permits.messages > 0:
                    self._heard_from(consumer)
                self.windows.grant(consumer, permits)
            case Handed(consumer):
                self._heard_from(consumer)
                self.queues.handed(event)
            case Returned():
                for first, end, tries in self.queues.returned(event):
                    self.backlog.take_back(first, end, tries)
            case ConsumerFinished(consumer):
                window = self.windows.get(consumer)
                if window is not None and not window.stopped:
                    self._heard_from(consumer)
                    self._set_turn(window, stopped=True, stalled=False)
            case Ticked():
                self._resume()
            case NackReceived():
                self._heard_from(event.consumer)
                self._nack(event)
            case Joined(consumer):
                if consumer in self.windows:
                    self._take_over(event)
                else:
                    self._join(event)
            case Left(consumer):
                if consumer in self.windows:
                    self._leave(consumer)
            case HistoryAvailable(ranges):
                self._resume()
                for first, end in ranges:
                    for late in self.progress.reveal(first, end):
                        self.backlog.reveal(*late)
            case Withheld(ranges):
                for first, end in ranges:
                    self._withhold(first, end)
            case Voided(ranges):
                for first, end in ranges:
                    self._void(first, end)
            case LogTrimmed(first_offset):
                self._trim(first_offset)
            case PolicyChanged():
                self._change(event)
            case DeadLettered(ranges):
                for first, end in ranges:
                    self.backlog.dead_lettered(first, end)
            case DeadLetterFailed(ranges):
                for first, end in ranges:
                    self.backlog.dead_letter_failed(first, end)
            case CursorReset(offset):
                self._sought = True
                self.deliveries.clear()
                self.backlog.forget_all()
                self.progress.seek(max(offset, self.first_offset))
                self.postponement.forget(0, self.progress.next_unacked)
            case Keyed() | Forgotten():
                pass  # Key-Shared alone reads keys, and keeps something for consumers that are away
            case _:
                assert_never(event)

    def _resume(self) -> None:
        """There may be something to read where there was nothing before."""
        self.windows.resume()

    # --- events: answers ----------------------------------------------------------------------------------

    def _ack(self, ranges: Ranges) -> None:
        """Whatever is committed may be acknowledged: the consumer may have it from an earlier owner of the topic, or
        from the delivery before this one. Acknowledging twice changes nothing.
        """
        late = self.windows.pace.answered_late(ranges)
        committed = self._committed_part(ranges)
        for first, end in committed:
            self.deliveries.answered(first, end, late)
        self.backlog.forget(committed)
        for first, end in committed:
            self.postponement.forget(first, end)
            self.progress.settle(first, end)

    def _nack(self, event: NackReceived) -> None:
        """What is not in flight is about to be delivered (again) anyhow, or done.

        What another consumer holds by now is left to that one: a nack of a consumer that was away would take it from
        under its hands, and another message of the same key could overtake it.
        """
        late = self.windows.pace.answered_late(event.ranges)
        for first, end in self._committed_part(event.ranges):
            for part in self.deliveries.in_flight.held_by(event.consumer, first, end):
                for piece in self.deliveries.answered(*part, late):
                    tries = piece.value.tries.failed(event.reason)
                    self.backlog.failed(piece.first, piece.end, tries, event.delay_seconds)

    def _committed_part(self, ranges: Ranges) -> list[OffsetRange]:
        """What of these is below the head and not settled for good, each offset once. The rest above is refused.

        So is what a seek wants to be delivered again and was not yet: an ack of it is of a delivery before the seek.
        """
        known_end = self.progress.next_fresh if self._sought else self.progress.head
        committed: list[OffsetRange] = []
        refused: list[OffsetRange] = []
        in_order = all(before.end <= after.first for before, after in pairwise(ranges))
        for first, end in ranges if in_order else OffsetRanges(ranges):
            if known_end < min(end, self.progress.head):
                refused += self.progress.settled.gaps(max(first, known_end), min(end, self.progress.head))
            if end > self.progress.head:
                refused.append(OffsetRange(max(first, self.progress.head), end))
            first, end = max(first, self.progress.next_unacked), min(end, known_end)
            if first < end:
                undelivered = OffsetRanges(self._undelivered(first, end)) if self._sought else OffsetRanges()
                refused += undelivered
                committed += undelivered.gaps(first, end)
        if refused:
            refused.sort()
            self.context.effects.append(AckRefused(tuple(refused)))
        return committed

    # --- events: consumers --------------------------------------------------------------------------------

    def _heard_from(self, consumer: ConsumerId | None) -> None:
        """Its application does something."""
        window = None if consumer is None else self.windows.get(consumer)
        if window is None:
            return
        window.active_at = self.context.now
        window.was_empty = False
        if window.stalled:
            self._set_turn(window, stopped=window.stopped, stalled=False)

    def _leave(self, consumer: ConsumerId) -> None:
        pieces = self.deliveries.take_back(consumer)
        self.windows.leave(consumer)
        self._keep(pieces)

    def _take_over(self, event: Joined) -> None:
        """A connected consumer connected anew."""
        pieces = self.deliveries.take_back(event.consumer)
        self.windows.rejoin(event.consumer, event.permits, hands_over=event.hands_over)
        self._keep(pieces)

    def _keep(self, pieces: Iterable[RangePiece[Flight]]) -> None:
        for first, end, flight in pieces:
            self.backlog.take_back(first, end, flight.tries)

    def _take_from_silent(self) -> None:
        """The queues of silent consumers go to those with a free window."""
        for window in self.queues.silent():
            if not self._may_take_from(window):
                continue
            if not any(self.windows.capacity(other) > 0 for other in self.windows.all if other is not window):
                return
            pieces = self.queues.take(window)
            self._keep(pieces)
            self._set_turn(window, stopped=window.stopped, stalled=True)
            # If it resumes, it should not begin with these.
            self.queues.ask(window, [OffsetRange(piece.first, piece.end) for piece in pieces])

    def _recall(self) -> None:
        idle, busy = self._idle_and_busy()
        window = self.queues.next_to_ask(idle, busy)
        if window is not None:
            self.queues.ask(window, self._recallable(window, idle))

    # --- events: the log and the policy -------------------------------------------------------------------

    def _trim(self, first_offset: int) -> None:
        self.first_offset = max(self.first_offset, first_offset)
        lost = self.progress.unsettled(self.first_offset)
        if lost:
            self._void(lost[0].first, lost[-1].end)
        self.progress.missing.remove(0, self.first_offset)
        if lost:
            self.context.effects.append(Expired(tuple(lost)))

    def _void(self, first: int, end: int) -> None:
        self.progress.missing.remove(first, end)
        first = max(first, self.progress.next_unacked)
        if first < end:
            self._lose(first, end)
            self.backlog.forget((OffsetRange(first, end),))
            self.postponement.forget(first, end)
            self.progress.settle(first, end)

    def _lose(self, first: int, end: int) -> None:
        """What of these is in flight is gone from the log: an answer says nothing any more."""
        self.deliveries.release(self.in_flight.cut(first, end))

    def _withhold(self, first: int, end: int) -> None:
        self.backlog.forget((OffsetRange(first, end),))
        held = [(piece.first, piece.end) for piece in self.in_flight.overlap(first, end)]
        at = first
        for held_first, held_end in [*held, (end, end)]:
            if at < held_first:
                self.progress.withhold(at, held_first)
            at = held_end

    def _change(self, event: PolicyChanged) -> None:
        if event.limits is not None:
            self.windows.pace.limits = event.limits
        if event.rate is not None:
            self.deliveries.rate = event.rate if isinstance(event.rate, TokenBucket) else None
        if event.policy is not None:
            self.context.policy = event.policy
            self.context.timeout_seconds = self.windows.pace.timeout_seconds = event.policy.ack_timeout_seconds
            self.backlog.judge_again()

    # --- time ---------------------------------------------------------------------------------------------

    def _emit_wake(self) -> None:
        now = self.context.now
        wanted = now if self._unfinished else self.deliveries.next_deadline()
        for time in (
            self.backlog.next_due(),
            self.deliveries.rate_ready_at,
            self.queues.next_look(),
            self.schedule.next_due(),
            self.windows.pace.silent_at(),
        ):
            if time is not None and (wanted is None or time < wanted):
                wanted = time
        if self._wake_at is not None and self._wake_at <= now:
            self._wake_at = None  # it has rung
        if wanted is not None and (self._wake_at is None or wanted < self._wake_at):
            self._wake_at = wanted
            self.context.effects.append(WakeAt(wanted))
