"""What all dispatch machines share: one `step`, and the life of a delivery that is in flight.

    step(event, now) -> effects

    event ──► state ──► timeouts and due retries ──► assign ──► Send …, SaveCursor, WakeAt

The machine never waits, reads no clock and raises nothing: what cannot be is answered with an effect
(`AckRefused`, `JoinRefused`) or, if only our own bug can cause it, an assertion. Subclasses decide who gets
what (`_assign`) and keep what is waiting to be sent again.

Invariant: every offset in [next_unacked, next_fresh) that is neither settled nor missing is in exactly one
place: in flight, or in the subclass's keeping. Nothing is ever skipped.

A step is short, whatever the subscription looks like: it hands out, times out and retries at most `PIECES_MAX`
ranges each, and asks to be woken at once (`WakeAt` now) if there is more to do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from itertools import pairwise
from typing import Final

from pydanube.core.delivery import TIMED_OUT, FailurePolicy, Tries
from pydanube.core.events import (
    Acked,
    AckRefused,
    Available,
    DeadLettered,
    DeadLetterFailed,
    Effect,
    Event,
    Expired,
    Forgotten,
    Granted,
    HistoryAvailable,
    Joined,
    Keyed,
    Left,
    Nacked,
    PolicyChanged,
    Ranges,
    SaveCursor,
    Send,
    Shipped,
    Sought,
    Ticked,
    Trimmed,
    Voided,
    WakeAt,
    Withheld,
)
from pydanube.core.lag import Beat, Heartbeat, LagInfo, Standing, beat, lag_info
from pydanube.core.limits import TokenBucket
from pydanube.core.names import ConsumerId
from pydanube.core.ranges import OffsetRange, OffsetRanges, Piece, work
from pydanube.core.roster import DispatchLimits, Member, Roster
from pydanube.core.window import Flight, InFlight, Progress, SavedPosition

PIECES_MAX: Final = 1_024  # ranges that one step sends, takes back because of their age, or retries


class _Outgoing:
    """A Send while its ranges are still being collected."""

    __slots__ = ("attempt", "consumer", "ranges")

    def __init__(self, consumer: ConsumerId, attempt: int, first: int, end: int) -> None:
        self.consumer = consumer
        self.attempt = attempt
        self.ranges = [OffsetRange(first, end)]


class Machine(ABC):
    """One subscription. `progress` is where it stands; `first_offset` the lowest offset the log still has."""

    def __init__(
        self,
        progress: Progress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
    ) -> None:
        self.progress = progress
        self.policy = policy or FailurePolicy()
        self.roster = Roster(limits or DispatchLimits())
        self.rate = rate
        self.in_flight = InFlight()
        self.first_offset = 0
        self.timed_out = 0  # messages, in all
        self._sought = False  # since this owner has it: what it has not handed out was delivered before, if ever
        self.pieces_max = PIECES_MAX
        self.touched_max = 0  # ranges, by the costliest step so far
        self._unfinished = False  # there is more to send, and somebody has room
        self._now = 0.0
        self._wake_at: float | None = None
        self._rate_ready_at: float | None = None
        self._effects: list[Effect] = []
        self._outgoing: list[_Outgoing] = []
        self._outgoing_to: dict[ConsumerId, _Outgoing] = {}

    def step(self, event: Event, now: float) -> list[Effect]:
        self._now = max(now, self._now)  # a clock that went back must not reorder flights
        self._effects = []
        touched_before = work.ranges
        cursor_before = self.progress.next_unacked
        self._hear(event)
        self._time_out()
        self._retry_due()
        self._rate_ready_at = None
        self._unfinished = False
        self._assign()
        self._say_sends()
        if self.progress.next_unacked != cursor_before or isinstance(event, Sought):
            self._effects.append(SaveCursor(self.progress.next_unacked))
        self._say_wake()
        self.touched_max = max(self.touched_max, work.ranges - touched_before)
        return self._effects

    def saved(self) -> SavedPosition:
        """What to store. Unchanged as long as its `changes` is."""
        return self.progress.saved()

    def saving(self, size_max_bytes: int) -> Generator[None, None, SavedPosition]:
        """What to store now, in so many bytes, with pauses."""
        return self.progress.saving(size_max_bytes)

    def has_lag(self, committed_head: int) -> bool:
        """Is something committed and deliverable, but not acknowledged?"""
        return self.progress.lag(committed_head) > 0

    def get_lag_info(self, committed_head: int) -> LagInfo:
        head = max(committed_head, self.progress.head)
        return lag_info(self.progress.next_unacked, head, self.progress.lag(head))

    def beat(self, heartbeat: Heartbeat, now: float, committed_head: int, *, new_history: bool = False) -> Beat:
        """One heartbeat. Most find nothing: a subscription without lag costs a subtraction."""
        lag = self.get_lag_info(committed_head)
        if not lag.has_lag and not new_history:
            return Beat(False, lag)
        return beat(self.standing(committed_head), heartbeat, now, new_history=new_history)

    # --- hearing ----------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        match event:
            case Acked(ranges):
                self._acked(ranges)
            case Available(end):
                self.progress.head = max(self.progress.head, end)
                self._resume()
            case Shipped():
                self._shipped(event)
            case Granted(consumer, permits):
                self.roster.grant(consumer, permits)
            case Ticked():
                self._resume()
                self._ticked()
            case Keyed(pairs):
                self._keyed(pairs)
            case Nacked():
                self._nacked(event)
            case Joined(consumer):
                if consumer in self.roster:
                    self._taken_over(event)
                else:
                    self._joined(event)
            case Left(consumer):
                if consumer in self.roster:
                    self._left(consumer)
            case Forgotten(consumer):
                self._forgotten(consumer)
            case HistoryAvailable(ranges):
                self._resume()
                for first, end in ranges:
                    for late in self.progress.reveal(first, end):
                        self._revealed(*late)
            case Withheld(ranges):
                for first, end in ranges:
                    self._withhold(first, end)
            case Voided(ranges):
                for first, end in ranges:
                    self._void(first, end)
            case Trimmed(first_offset):
                self._trimmed(first_offset)
            case PolicyChanged():
                self._change(event)
            case DeadLettered(ranges):
                for first, end in ranges:
                    self._dead_lettered(first, end)
            case DeadLetterFailed(ranges):
                for first, end in ranges:
                    self._dead_letter_failed(first, end)
            case Sought(offset):
                self._sought = True
                self._release(self.in_flight)
                self.in_flight.clear()
                self._forget_all()
                self.progress.seek(max(offset, self.first_offset))

    def _acked(self, ranges: Ranges) -> None:
        """Whatever is committed may be acknowledged: the consumer may have it from an earlier owner of the topic, or
        from the delivery before this one. Acknowledging twice changes nothing.
        """
        committed = self._committed_part(ranges)
        for first, end in committed:
            pieces = self.in_flight.cut(first, end)
            self._release(pieces)
            for piece in pieces:
                self._landed(piece.first, piece.end)
        self._forget(committed)
        for first, end in committed:
            self.progress.settle(first, end)

    def _nacked(self, event: Nacked) -> None:
        """What is not in flight is about to be delivered (again) anyhow, or done."""
        for first, end in self._committed_part(event.ranges):
            pieces = self.in_flight.cut(first, end)
            self._release(pieces)
            for piece in pieces:
                tries = piece.value.tries.failed(event.reason)
                self._failed(piece.first, piece.end, tries, event.delay_seconds)

    def _committed_part(self, ranges: Ranges) -> list[OffsetRange]:
        """What of these is below the head and not settled for good, each offset once. The rest above is refused.

        So is what a seek wants to be delivered again and was not yet: whoever acknowledges it has it from before.
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
        refused.sort()
        self._refuse(refused)
        return committed

    def _refuse(self, refused: list[OffsetRange]) -> None:
        if refused:
            self._effects.append(AckRefused(tuple(refused)))

    def _shipped(self, event: Shipped) -> None:
        member = self.roster.get(event.consumer)
        if member is None:
            return  # it left meanwhile, and what it held was taken back then
        self.roster.shipped(member, event.size_bytes)
        for first, end in event.unsent:
            member.paused = True
            settled = end - first  # voided, trimmed or timed out while it was read: not sent either
            for piece in self.in_flight.overlap(first, end):
                if piece.value.consumer != event.consumer:
                    continue  # it timed out and somebody else has it now
                self.in_flight.cut(piece.first, piece.end)
                self.roster.refund(event.consumer, piece.end - piece.first)
                self._take_back(piece.first, piece.end, piece.value.tries.undelivered())
                settled -= piece.end - piece.first
            self.roster.repay(member, settled)

    def _trimmed(self, first_offset: int) -> None:
        self.first_offset = max(self.first_offset, first_offset)
        lost = self.progress.unsettled(self.first_offset)
        if lost:
            self._void(lost[0].first, lost[-1].end)
        self.progress.missing.remove(0, self.first_offset)
        if lost:
            self._effects.append(Expired(tuple(lost)))

    def _void(self, first: int, end: int) -> None:
        self.progress.missing.remove(first, end)
        first = max(first, self.progress.next_unacked)
        if first < end:
            self._release(self.in_flight.cut(first, end))
            self._forget((OffsetRange(first, end),))
            self.progress.settle(first, end)

    def _withhold(self, first: int, end: int) -> None:
        self._forget((OffsetRange(first, end),))
        held = [(piece.first, piece.end) for piece in self.in_flight.overlap(first, end)]
        at = first
        for held_first, held_end in [*held, (end, end)]:
            if at < held_first:
                self.progress.withhold(at, held_first)
            at = held_end

    def _change(self, event: PolicyChanged) -> None:
        if event.limits is not None:
            self.roster.limits = event.limits
        if event.rate is not None:
            self.rate = event.rate if isinstance(event.rate, TokenBucket) else None
        if event.policy is not None:
            self.policy = event.policy
            self._judge_again()

    # --- time -------------------------------------------------------------------------------------------

    def _time_out(self) -> None:
        timeout = self.policy.ack_timeout_seconds
        oldest = self.in_flight.oldest_sent_at()
        if timeout is None or oldest is None or oldest + timeout > self._now:
            return
        # The same sum as in the wake time, so that waking exactly then finds what it woke for.
        pieces = self.in_flight.cut_sent(lambda sent_at: sent_at + timeout <= self._now, self.pieces_max)
        self._release(pieces)
        for piece in pieces:
            self.timed_out += piece.end - piece.first
            self._failed(piece.first, piece.end, piece.value.tries.failed(TIMED_OUT), 0.0)

    def _say_wake(self) -> None:
        timeout, oldest = self.policy.ack_timeout_seconds, self.in_flight.oldest_sent_at()
        wanted = None if timeout is None or oldest is None else oldest + timeout
        if self._unfinished:
            wanted = self._now
        for time in (self._next_due(), self._rate_ready_at):
            if time is not None and (wanted is None or time < wanted):
                wanted = time
        if self._wake_at is not None and self._wake_at <= self._now:
            self._wake_at = None  # it has rung
        if wanted is not None and (self._wake_at is None or wanted < self._wake_at):
            self._wake_at = wanted
            self._effects.append(WakeAt(wanted))

    # --- sending ----------------------------------------------------------------------------------------

    def _allowance(self) -> int | None:
        """How many messages the rate limit allows now; None without a limit."""
        if self.rate is None:
            return None
        allowed = self.rate.available(self._now)
        if allowed == 0:
            self._rate_ready_at = self.rate.ready_at(1, self._now)
        return allowed

    def _send(self, member: Member, first: int, end: int, tries: Tries) -> None:
        tries = tries.delivered()
        self.in_flight.put(first, end, member.consumer, tries, self._now)
        self.roster.hold(member, end - first)
        if self.rate is not None:
            self.rate.force(end - first, self._now)
        last = self._outgoing_to.get(member.consumer)
        if last is None or last.attempt != tries.deliveries:
            last = _Outgoing(member.consumer, tries.deliveries, first, end)
            self._outgoing_to[member.consumer] = last
            self._outgoing.append(last)
        elif last.ranges[-1].end == first:
            last.ranges[-1] = OffsetRange(last.ranges[-1].first, end)
        else:
            last.ranges.append(OffsetRange(first, end))

    def _say_sends(self) -> None:
        for send in self._outgoing:
            member = self.roster.get(send.consumer)
            assert member is not None, "nobody leaves while messages are assigned"
            size_max = None if member.messages is None else member.size_bytes
            self.roster.sent(send.consumer)
            self._effects.append(Send(send.consumer, tuple(send.ranges), send.attempt, size_max))
        self._outgoing.clear()
        self._outgoing_to.clear()

    def _release(self, pieces: Iterable[Piece[Flight]]) -> None:
        for piece in pieces:
            self.roster.release(piece.value.consumer, piece.end - piece.first)

    def _resume(self) -> None:
        """There may be something to read where there was nothing before."""
        self.roster.resume()

    def _left(self, consumer: ConsumerId) -> None:
        pieces = self.in_flight.cut_consumer(consumer)
        self._release(pieces)
        self.roster.leave(consumer)
        for piece in pieces:
            self._take_back(piece.first, piece.end, piece.value.tries)

    def _taken_over(self, event: Joined) -> None:
        pieces = self.in_flight.cut_consumer(event.consumer)
        self._release(pieces)
        self.roster.rejoin(event.consumer, event.permits)
        for piece in pieces:
            self._take_back(piece.first, piece.end, piece.value.tries)
        self._rejoined(event)

    # --- what subclasses decide and keep ------------------------------------------------------------------

    @abstractmethod
    def standing(self, committed_head: int = 0) -> Standing:
        """Everything `core.lag` needs to say whether to poll, and why the subscription is quiet.

        `committed_head` is the log's own, which the machine may not have heard of yet.
        """

    @abstractmethod
    def _assign(self) -> None:
        """Sends what can be sent, lowest first."""

    @abstractmethod
    def _joined(self, event: Joined) -> None: ...

    @abstractmethod
    def _rejoined(self, event: Joined) -> None:
        """A connected consumer connected anew: a takeover."""

    @abstractmethod
    def _forgotten(self, consumer: ConsumerId) -> None: ...

    @abstractmethod
    def _keyed(self, pairs: tuple[tuple[int, str], ...]) -> None: ...

    @abstractmethod
    def _ticked(self) -> None: ...

    @abstractmethod
    def _landed(self, first: int, end: int) -> None:
        """A delivery was acknowledged."""

    @abstractmethod
    def _take_back(self, first: int, end: int, tries: Tries) -> None:
        """A delivery ended without an answer; send it again as soon as possible."""

    @abstractmethod
    def _failed(self, first: int, end: int, tries: Tries, asked_seconds: float) -> None:
        """A delivery failed; keep the message until its verdict is carried out."""

    def _undelivered(self, first: int, end: int) -> list[OffsetRange]:
        """What of these is below `next_fresh` and was never sent."""
        return []

    @abstractmethod
    def _revealed(self, first: int, end: int) -> None:
        """Keep these: they became readable after fresh messages above them were handed out."""

    @abstractmethod
    def _forget(self, ranges: Sequence[OffsetRange]) -> None:
        """Keep these no longer. They are not in flight."""

    @abstractmethod
    def _forget_all(self) -> None: ...

    @abstractmethod
    def _retry_due(self) -> None:
        """Moves what is due at `_now` to what can be sent."""

    @abstractmethod
    def _next_due(self) -> float | None: ...

    @abstractmethod
    def _judge_again(self) -> None:
        """The policy changed: what is blocked may have another fate now."""

    @abstractmethod
    def _dead_lettered(self, first: int, end: int) -> None: ...

    @abstractmethod
    def _dead_letter_failed(self, first: int, end: int) -> None: ...
