"""What all dispatch machines share: one `step`, and the life of a delivery that is in flight.

    step(event, now) -> effects

    event ──► state ──► timeouts and due retries ──► assign ──► Send …, SaveCursor, WakeAt

The machine never waits, reads no clock and raises nothing: what cannot be is answered with an effect
(`AckRefused`, `JoinRefused`) or, if only our own bug can cause it, an assertion. Subclasses decide who gets
what (`_assign`) and keep what is waiting to be sent again.

A consumer that says what it hands over has a queue of its own: what waits there is *unseen* and has no deadline, until
its application takes it. If others have nothing to do it is asked to give some back, and if it takes, acknowledges
and asks for nothing during a whole ack timeout, its unseen messages are taken from it (docs/adr/0007-workers.md).

Invariant: every offset in [next_unacked, next_fresh) that is neither settled nor missing is in exactly one
place: in flight, or in the subclass's keeping. Nothing is ever skipped. Key-Shared has settled offsets in flight, too:
those that retention took while a consumer has them.

A step is short, whatever the subscription looks like: it hands out, times out and retries at most `PIECES_MAX`
ranges each, and asks to be woken at once (`WakeAt` now) if there is more to do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from itertools import pairwise
from typing import Final

from pydanube.core.dispatch.consumer_windows import DispatchLimits, Member, Roster
from pydanube.core.dispatch.delivery import TIMED_OUT, FailurePolicy, Tries
from pydanube.core.dispatch.events import (
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
    Handed,
    HistoryAvailable,
    Joined,
    Keyed,
    Left,
    Nacked,
    NotHeld,
    PolicyChanged,
    Ranges,
    Recall,
    Returned,
    SaveCursor,
    Send,
    Shipped,
    Sought,
    Stopped,
    Ticked,
    Trimmed,
    Voided,
    WakeAt,
    Withheld,
)
from pydanube.core.dispatch.lag import Beat, Heartbeat, LagInfo, Standing, beat, lag_info
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, Piece, work
from pydanube.core.dispatch.window import Flight, InFlight, Progress, SavedPosition
from pydanube.core.names import ConsumerId

PIECES_MAX: Final = 1_024  # ranges that one step sends, takes back because of their age, or retries
IDLE_SECONDS: Final = 0.1  # somebody has nothing to do for so long, and others are asked for what they have not seen
RECALL_SECONDS: Final = 1.0  # how often one consumer is asked
RECALL_RANGES_MAX: Final = 1_000


class _Outgoing:
    """A Send while its ranges are still being collected."""

    __slots__ = ("attempt", "consumer", "ranges")

    def __init__(self, consumer: ConsumerId, attempt: int, first: int, end: int) -> None:
        self.consumer = consumer
        self.attempt = attempt
        self.ranges = [OffsetRange(first, end)]


class Machine(ABC):
    """One subscription. `progress` is where it stands; `first_offset` the lowest offset the log still has."""

    shares = False  # several consumers receive at the same time

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
        self._idle_since: float | None = None  # somebody has nothing to do, while others have unseen messages
        self._now = 0.0
        self._wake_at: float | None = None
        self._rate_ready_at: float | None = None
        self._effects: list[Effect] = []
        self._outgoing: list[_Outgoing] = []
        self._outgoing_to: dict[ConsumerId, _Outgoing] = {}

    def step(self, event: Event, now: float) -> list[Effect]:
        self._now = max(now, self._now)  # a clock that went back must not reorder flights
        self._effects = []
        self.roster.timeout_seconds = self.policy.ack_timeout_seconds
        self.roster.pass_time(self._now)
        touched_before = work.ranges
        cursor_before = self.progress.next_unacked
        self._hear(event)
        self._time_out()
        self.roster.forget_silent()
        self._retry_due()
        self._rate_ready_at = None
        self._unfinished = False
        if len(self.roster) > 1:
            self._take_from_silent()
        self._assign()
        self._recall()
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
            case Acked(ranges, consumer):
                self._heard_from(consumer)
                self._answered(ranges)
                self._acked(ranges)
            case Available(end):
                self.progress.head = max(self.progress.head, end)
                self._resume()
            case Shipped():
                self._shipped(event)
            case Granted(consumer, permits):
                if permits.messages > 0:
                    self._heard_from(consumer)
                self.roster.grant(consumer, permits)
            case Handed():
                self._handed(event)
            case Returned():
                self._returned(event)
            case Stopped(consumer):
                member = self.roster.get(consumer)
                if member is not None and not member.stopped:
                    self._heard_from(consumer)
                    member.stopped = True
                    self._out_of_turn(consumer)
            case Ticked():
                self._resume()
                self._ticked()
            case Keyed(pairs):
                self._keyed(pairs)
            case Nacked():
                self._heard_from(event.consumer)
                self._answered(event.ranges)
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
                self.roster.forget_overdue()
                self._forget_all()
                self.progress.seek(max(offset, self.first_offset))

    def _acked(self, ranges: Ranges) -> None:
        """Whatever is committed may be acknowledged: the consumer may have it from an earlier owner of the topic, or
        from the delivery before this one. Acknowledging twice changes nothing.
        """
        late = self.roster.answered_late(ranges)
        committed = self._committed_part(ranges)
        for first, end in committed:
            pieces = self.in_flight.cut(first, end)
            self._release(pieces)
            self._count_answers(pieces, late)
            for piece in pieces:
                self._landed(piece.first, piece.end)
        self._forget(committed)
        for first, end in committed:
            self.progress.settle(first, end)

    def _nacked(self, event: Nacked) -> None:
        """What is not in flight is about to be delivered (again) anyhow, or done."""
        late = self.roster.answered_late(event.ranges)
        for first, end in self._committed_part(event.ranges):
            pieces = self.in_flight.cut(first, end)
            self._release(pieces)
            self._count_answers(pieces, late)
            for piece in pieces:
                tries = piece.value.tries.failed(event.reason)
                self._failed(piece.first, piece.end, tries, event.delay_seconds)

    def _count_answers(self, pieces: Iterable[Piece[Flight]], late: OffsetRanges) -> None:
        """`late`: what was overdue at a consumer. It is this one that has answered, and who has the copy will yet."""
        for first, end, flight in pieces:
            for part in late.overlap(first, end) if late else ():
                self.roster.keeps(flight.consumer, *part, flight.sent_at)
            for part in late.gaps(first, end) if late else (OffsetRange(first, end),):
                self.roster.answered(flight.consumer, part.size, (flight.sent_at, part.end - 1))

    # --- what consumers have seen -----------------------------------------------------------------------

    def _heard_from(self, consumer: ConsumerId | None) -> None:
        """Its application does something."""
        member = None if consumer is None else self.roster.get(consumer)
        if member is None:
            return
        member.active_at = self._now
        member.was_empty = False
        if member.stalled:
            member.stalled = False
            if not member.stopped:
                self._in_turn_again(member.consumer)

    def _handed(self, event: Handed) -> None:
        member = self.roster.get(event.consumer)
        missing: list[OffsetRange] = []
        if member is not None:
            self._heard_from(event.consumer)
        for first, end in event.ranges:
            mine = [piece for piece in self.in_flight.overlap(first, end) if piece.value.consumer == event.consumer]
            for piece in mine:
                self._see(piece, event.seconds)
            if event.seconds is not None:
                missing += OffsetRanges((piece.first, piece.end) for piece in mine).gaps(first, end)
        if missing:
            self._effects.append(NotHeld(tuple(missing)))

    def _see(self, piece: Piece[Flight], seconds: float | None) -> None:
        first, end, flight = piece
        timeout = self.policy.ack_timeout_seconds
        due_at = flight.due_at
        if seconds is not None and timeout is not None:
            began = self._now if flight.unseen else flight.sent_at
            due_at = max(self._now + seconds, began + timeout if due_at is None else due_at)
        if not flight.unseen and due_at == flight.due_at:
            return
        member = self.roster.get(flight.consumer)
        assert member is not None, "what a consumer held is taken back when it leaves"
        if flight.unseen:
            self.roster.seen(member, end - first)
        self.in_flight.cut(first, end)
        began = self._now if flight.unseen else flight.sent_at
        self.in_flight.put(first, end, flight.consumer, flight.tries, began, due_at=due_at)

    def _returned(self, event: Returned) -> None:
        member = self.roster.get(event.consumer)
        if member is None or event.taken != member.taken:
            return  # it speaks of a queue that was taken from it; what it was sent since it may have shown
        for first, end in event.ranges:
            for piece in self.in_flight.overlap(first, end):
                flight = piece.value
                if flight.consumer != event.consumer or not flight.unseen:
                    continue  # it was taken back meanwhile
                self._release(self.in_flight.cut(piece.first, piece.end))
                self._take_back(piece.first, piece.end, flight.tries.undelivered())

    def _take_from_silent(self) -> None:
        """Whoever took, acknowledged and asked for nothing during an ack timeout gives its queue to those with room."""
        timeout = self.policy.ack_timeout_seconds
        if timeout is None:
            return
        for member in self.roster.members:
            if not member.unseen or member.shipping or member.active_at + timeout > self._now:
                continue
            if not self._may_take_from(member):
                continue
            if not any(self.roster.room(other) > 0 for other in self.roster.members if other is not member):
                return
            pieces = self.in_flight.cut_unseen(member.consumer)
            self._release(pieces)
            member.stalled = True
            member.taken += 1
            for piece in pieces:
                self._take_back(piece.first, piece.end, piece.value.tries)
            self._out_of_turn(member.consumer)
            # If it goes on some day, it should not begin with these.
            self._say_recall(member, [OffsetRange(piece.first, piece.end) for piece in pieces])

    def _recall(self) -> None:
        """Somebody has had nothing to do for a while, and another more than it can look at: that one is asked."""
        idle, busy = self._idle_and_busy()
        if not idle or not busy:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = self._now
        if self._recall_at(busy) > self._now:
            return
        member = max(busy, key=lambda each: each.unseen if each.recalled_at + RECALL_SECONDS <= self._now else -1)
        self._idle_since = member.recalled_at = self._now
        wanted = self._recallable(member, idle)
        if wanted:
            self._say_recall(member, wanted)

    def _idle_and_busy(self) -> tuple[list[Member], list[Member]]:
        """Who could receive, has nothing to look at and gets nothing; and who has unseen messages."""
        if not self.shares or len(self.roster) < 2 or self._unfinished or self._rate_ready_at is not None:
            return [], []
        members = self.roster.members
        busy = [member for member in members if member.unseen and not member.shipping]
        if not busy:
            return [], []
        idle = [
            member
            for member in members
            if self.roster.room(member) > 0 and not (member.unseen if member.hands_over else member.held)
        ]
        return idle, busy

    def _recall_at(self, busy: Sequence[Member]) -> float:
        assert self._idle_since is not None
        return max(self._idle_since + IDLE_SECONDS, min(member.recalled_at for member in busy) + RECALL_SECONDS)

    def _recallable(self, member: Member, idle: Sequence[Member]) -> list[OffsetRange]:
        """What to ask this member for: the upper half, as it looks at the lowest first."""
        wanted = member.unseen - member.unseen // 2
        found: list[OffsetRange] = []
        for piece in reversed(self.in_flight.unseen(member.consumer)):
            if wanted <= 0:
                break
            found.append(OffsetRange(max(piece.first, piece.end - wanted), piece.end))
            wanted -= found[-1].size
        return found[::-1]

    def _say_recall(self, member: Member, wanted: Sequence[OffsetRange]) -> None:
        merged = tuple(OffsetRanges(wanted))
        for at in range(0, len(merged), RECALL_RANGES_MAX):
            self._effects.append(Recall(member.consumer, merged[at : at + RECALL_RANGES_MAX], member.taken))

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
        if member.was_empty:
            member.was_empty = False
            member.active_at = self._now  # it could not take before what was not sent
        for first, end in event.unsent:
            member.paused = True
            settled = end - first  # voided, trimmed or timed out while it was read: not sent either
            for piece in self.in_flight.overlap(first, end):
                if piece.value.consumer != event.consumer:
                    continue  # it timed out and somebody else has it now
                self.in_flight.cut(piece.first, piece.end)
                self.roster.refund(event.consumer, piece.end - piece.first, unseen=piece.value.unseen)
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
            self._lose(first, end)
            self._forget((OffsetRange(first, end),))
            self.progress.settle(first, end)

    def _lose(self, first: int, end: int) -> None:
        """What of these is in flight is gone from the log: an answer says nothing any more."""
        self._release(self.in_flight.cut(first, end))

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
        deadline = self._next_deadline()
        if timeout is None or deadline is None or deadline > self._now:
            return
        # The same sum as in the wake time, so that waking exactly then finds what it woke for.
        pieces = self.in_flight.cut_sent(lambda sent_at: sent_at + timeout <= self._now, self.pieces_max)
        pieces += self.in_flight.cut_due(self._now, self.pieces_max)
        self._release(pieces)
        for piece in pieces:
            self.timed_out += piece.end - piece.first
            self.roster.keeps(piece.value.consumer, piece.first, piece.end, piece.value.sent_at)
            self._failed(piece.first, piece.end, piece.value.tries.failed(TIMED_OUT), 0.0)

    def _next_deadline(self) -> float | None:
        timeout = self.policy.ack_timeout_seconds
        if timeout is None:
            return None
        oldest, extended = self.in_flight.oldest_sent_at(), self.in_flight.next_due_at()
        if oldest is None:
            return extended
        return oldest + timeout if extended is None else min(oldest + timeout, extended)

    def _next_look(self) -> float | None:
        """When a consumer has been silent, or another idle, for too long. What has passed waits for room, not time."""
        if len(self.roster) < 2:
            return None
        times: list[float] = []
        timeout = self.policy.ack_timeout_seconds
        if timeout is not None:
            times += [member.active_at + timeout for member in self.roster.members if member.unseen]
        if self._idle_since is not None:
            times.append(self._recall_at([member for member in self.roster.members if member.unseen]))
        return min((time for time in times if time > self._now), default=None)

    def _say_wake(self) -> None:
        wanted = self._next_deadline()
        if self._unfinished:
            wanted = self._now
        for time in (self._next_due(), self._rate_ready_at, self._next_look(), self.roster.silent_at()):
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
        self.in_flight.put(first, end, member.consumer, tries, self._now, unseen=member.hands_over)
        self.roster.hold(member, end - first, self._now)
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
            self.roster.release(piece.value.consumer, piece.end - piece.first, unseen=piece.value.unseen)

    def _resume(self) -> None:
        """There may be something to read where there was nothing before."""
        self.roster.resume()

    def _cut_all_of(self, consumer: ConsumerId) -> list[Piece[Flight]]:
        """Takes back all that it holds, released at once: it may be thousands of pieces."""
        pieces = self.in_flight.cut_consumer(consumer)
        held = sum([piece.end - piece.first for piece in pieces])
        unseen = sum([piece.end - piece.first for piece in pieces if piece.value.unseen])
        if held > unseen:
            self.roster.release(consumer, held - unseen)
        if unseen:
            self.roster.release(consumer, unseen, unseen=True)
        return pieces

    def _left(self, consumer: ConsumerId) -> None:
        pieces = self._cut_all_of(consumer)
        self.roster.leave(consumer)
        for piece in pieces:
            self._take_back(piece.first, piece.end, piece.value.tries)

    def _taken_over(self, event: Joined) -> None:
        pieces = self._cut_all_of(event.consumer)
        self.roster.rejoin(event.consumer, event.permits, hands_over=event.hands_over)
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

    def _may_take_from(self, member: Member) -> bool:
        """Whether what a silent consumer has not seen can go to others now."""
        return True

    @abstractmethod
    def _out_of_turn(self, consumer: ConsumerId) -> None:
        """It is connected, and is sent nothing."""

    @abstractmethod
    def _in_turn_again(self, consumer: ConsumerId) -> None:
        """It is sent messages again."""

    @abstractmethod
    def _keyed(self, pairs: tuple[tuple[int, str], ...]) -> None: ...

    @abstractmethod
    def _ticked(self) -> None: ...

    @abstractmethod
    def _answered(self, ranges: Ranges) -> None:
        """A consumer has said something about these, whether or not they are settled already."""

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
