"""Exclusive, Failover, Shared: who gets which range. Works on ranges, lowest first, never on single messages
where it can hand out many.

An offset that is neither settled nor in flight is in one of three keepings:

    ready     to be sent as soon as somebody has room     taken back, rescued, due again
    waiting   to be sent, or dead-lettered, again later   failed, with the time it is due
    held      not to be sent                              poison: blocked, or being dead-lettered

- Exclusive: one consumer; a second is refused while the first is connected.
- Failover: the first to join receives, the others stand by and are promoted in the order of their joining: when it
  leaves, when it wants nothing more, and when it is silent and has messages that it has not seen. Then it is the last
  in the line, and the next one begins when nothing is in flight at another: order is kept.
- Shared: round robin. Consumers that go by the window get one message each in turn, consumers with permits
  equal shares of what there is, so that a turn costs one range and not one message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from pydanube.core.dispatch.consumer_windows import DispatchLimits, Member
from pydanube.core.dispatch.delivery import UNTRIED, FailurePolicy, Poison, RetryAt, Tries, copy_delay_seconds, judge
from pydanube.core.dispatch.events import (
    Activated,
    Blocked,
    DeadLetter,
    Dropped,
    Joined,
    JoinRefused,
    Ranges,
)
from pydanube.core.dispatch.lag import Standing
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.machine import Machine
from pydanube.core.dispatch.ranges import OffsetRange, Piece, RangeMap
from pydanube.core.dispatch.window import Progress
from pydanube.core.names import ConsumerId


class Wait(NamedTuple):
    """Until `due`. A dead letter that could not be copied is not sent again, only copied again."""

    due: float
    tries: Tries
    dead_letter: bool = False


class Hold(NamedTuple):
    """Poison. `blocks` False: the room is copying it to the dead-letter topic."""

    blocks: bool
    tries: Tries


class RangeDispatch(Machine):
    """What Exclusive, Failover and Shared have in common: everything but the choice of the consumer."""

    def __init__(
        self,
        progress: Progress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
    ) -> None:
        super().__init__(progress, policy=policy, limits=limits, rate=rate)
        self._ready: RangeMap[Tries] = RangeMap()
        self._waiting: RangeMap[Wait] = RangeMap()
        self._held: RangeMap[Hold] = RangeMap()
        self._due: list[tuple[float, int, int]] = []  # heap of (due, first, end); acked ones are found stale
        self._blocking = 0  # offsets that block

    def standing(self, committed_head: int = 0) -> Standing:
        blocked = next((piece.first for piece in self._held if piece.value.blocks), None) if self._blocking else None
        members = self.roster.members
        by_window = any(member.messages is None for member in members)
        return Standing(
            head=max(self.progress.head, committed_head),
            next_unacked=self.progress.next_unacked,
            lag=self.progress.lag(committed_head),
            undispatched=self._ready.count + self.progress.fresh_count(committed_head),
            consumers=len(members),
            has_room=self._has_room(),
            unacked=self.in_flight.count,
            unseen=self.roster.unseen,
            late=self.roster.late,
            window_held=self.roster.window_held,
            unacked_max=self.roster.window if by_window else None,
            waiting=self._waiting.count,
            retry_at=self._next_due(),
            blocked_offset=blocked,
            dead_lettering=self._held.count - self._blocking,
            rate_ready_at=self._rate_ready_at,
            first_offset=self.first_offset,
            missing=self.progress.missing_count(),
            timed_out=self.timed_out,
        )

    @abstractmethod
    def _has_room(self) -> bool:
        """Could a message be sent to somebody, if there were one?"""

    # --- taking -----------------------------------------------------------------------------------------

    def _take(self, count_max: int) -> Piece[Tries] | None:
        """The lowest unbroken range to send, at most `count_max` long. Ready ones are below fresh ones."""
        lowest = self._ready.lowest()
        if lowest is not None:
            (piece,) = self._ready.cut(lowest.first, min(lowest.end, lowest.first + count_max))
            return piece
        fresh = self.progress.take_fresh(count_max)
        return None if fresh is None else Piece(fresh.first, fresh.end, UNTRIED)

    # --- keeping ----------------------------------------------------------------------------------------

    def _take_back(self, first: int, end: int, tries: Tries) -> None:
        self._ready.put(first, end, tries)

    def _revealed(self, first: int, end: int) -> None:
        for kept in (self._ready, self._waiting, self._held):
            assert not kept.overlap(first, end), "what is missing is in nobody's keeping"
        self._ready.put(first, end, UNTRIED)

    def _failed(self, first: int, end: int, tries: Tries, asked_seconds: float) -> None:
        match judge(self.policy, tries, self._now, asked_seconds):
            case RetryAt(due):
                self._wait(first, end, Wait(due, tries))
            case Poison.DROP:
                self.progress.settle(first, end)
                self._effects.append(Dropped(OffsetRange(first, end), tries))
            case Poison.DEAD_LETTER:
                self._hold(first, end, Hold(False, tries))
                self._effects.append(DeadLetter(OffsetRange(first, end), tries, self._dead_letter_topic()))
            case Poison.BLOCK:
                self._hold(first, end, Hold(True, tries))
                self._effects.append(Blocked(first, tries))

    def _dead_letter_topic(self) -> str:
        assert self.policy.dead_letter_topic is not None, "the policy was checked when it was made"
        return self.policy.dead_letter_topic

    def _wait(self, first: int, end: int, wait: Wait) -> None:
        self._waiting.put(first, end, wait)
        heappush(self._due, (wait.due, first, end))

    def _hold(self, first: int, end: int, hold: Hold) -> None:
        self._held.put(first, end, hold)
        self._blocking += (end - first) * hold.blocks

    def _unhold(self, first: int, end: int) -> list[Piece[Hold]]:
        pieces = self._held.cut(first, end)
        freed = sum(piece.end - piece.first for piece in pieces if piece.value.blocks)
        self._blocking -= freed
        return pieces

    def _forget(self, ranges: Sequence[OffsetRange]) -> None:
        for first, end in ranges:
            if self._ready:
                self._ready.cut(first, end)
            if self._waiting:
                self._waiting.cut(first, end)
            if self._held:
                self._unhold(first, end)

    def _forget_all(self) -> None:
        for kept in (self._ready, self._waiting, self._held):
            kept.clear()
        self._due.clear()
        self._blocking = 0

    # --- time and policy ----------------------------------------------------------------------------------

    def _can_send(self) -> bool:
        return bool(self._ready) or self.progress.has_fresh()

    def _retry_due(self) -> None:
        retried = 0
        while retried < self.pieces_max and self._due and self._due[0][0] <= self._now:
            due, first, end = heappop(self._due)
            for piece in self._waiting.overlap(first, end):
                retried += 1
                if piece.value.due != due:
                    continue
                self._waiting.cut(piece.first, piece.end)
                if piece.value.dead_letter:
                    self._failed(piece.first, piece.end, piece.value.tries, 0.0)  # by the policy of today
                else:
                    self._ready.put(piece.first, piece.end, piece.value.tries)

    def _next_due(self) -> float | None:
        while self._due:
            due, first, end = self._due[0]
            if any(piece.value.due == due for piece in self._waiting.overlap(first, end)):
                return due
            heappop(self._due)
        return None

    def _judge_again(self) -> None:
        for piece in self._held:
            if not piece.value.blocks:
                continue  # on its way to the dead-letter topic; the answer decides
            match judge(self.policy, piece.value.tries, self._now):
                case Poison.BLOCK:
                    pass
                case RetryAt():
                    self._unhold(piece.first, piece.end)
                    self._ready.put(piece.first, piece.end, piece.value.tries)
                case _:
                    self._unhold(piece.first, piece.end)
                    self._failed(piece.first, piece.end, piece.value.tries, 0.0)

    def _dead_lettered(self, first: int, end: int) -> None:
        for piece in self._held.overlap(first, end):
            if not piece.value.blocks:
                self._unhold(piece.first, piece.end)
                self.progress.settle(piece.first, piece.end)

    def _dead_letter_failed(self, first: int, end: int) -> None:
        for piece in self._held.overlap(first, end):
            if not piece.value.blocks:
                self._unhold(piece.first, piece.end)
                due = self._now + copy_delay_seconds(self.policy, piece.value.tries.failures)
                self._wait(piece.first, piece.end, Wait(due, piece.value.tries, dead_letter=True))

    # --- Key-Shared only ------------------------------------------------------------------------------------

    def _rejoined(self, event: Joined) -> None:
        """It keeps its place in the line."""

    def _forgotten(self, consumer: ConsumerId) -> None:
        """Nothing is kept for a consumer that is away."""

    def _out_of_turn(self, consumer: ConsumerId) -> None:
        """It has no room, and that is all."""

    def _in_turn_again(self, consumer: ConsumerId) -> None:
        """It has room again."""

    def _keyed(self, pairs: tuple[tuple[int, str], ...]) -> None:
        """Keys do not matter here."""

    def _answered(self, ranges: Ranges) -> None:
        """What is settled is not in flight."""

    def _landed(self, first: int, end: int) -> None:
        """Nothing waits for it."""

    def _ticked(self) -> None:
        """No question can have been lost."""


class FailoverDispatch(RangeDispatch):
    """One consumer receives; the next in line follows it."""

    @property
    def active(self) -> ConsumerId | None:
        first = self.roster.first
        return None if first is None else first.consumer

    def _joined(self, event: Joined) -> None:
        before = self.active
        self.roster.join(event.consumer, event.permits, hands_over=event.hands_over)
        self._promote(before)

    def _left(self, consumer: ConsumerId) -> None:
        before = self.active
        super()._left(consumer)
        self._promote(before)

    def _out_of_turn(self, consumer: ConsumerId) -> None:
        """The next in line follows it. If it goes on some day, it stands by."""
        self._promote(self.active)

    def _promote(self, before: ConsumerId | None) -> None:
        """The first in line is one that takes messages, if there is any. `before`: who was the first."""
        for member in self.roster.members:
            if not (member.stopped or member.stalled):
                break
            self.roster.move_back(member.consumer)
        if self.active is not None and self.active != before:
            self._effects.append(Activated(self.active))

    def _may_take_from(self, member: Member) -> bool:
        """What its application has it may still finish, as long as it has time: what comes behind waits for that."""
        return member.held == member.unseen

    def _is_held_elsewhere(self) -> bool:
        return any(member.held for member in self.roster.members[1:])

    def _has_room(self) -> bool:
        first = self.roster.first
        return first is not None and self.roster.has_room_for(first) and not self._is_held_elsewhere()

    def _assign(self) -> None:
        member = self.roster.first
        if self._blocking or member is None or self._is_held_elsewhere():
            return
        pieces = 0
        while (room := self.roster.room(member)) > 0 and self._can_send():
            if pieces == self.pieces_max:
                self._unfinished = True
                return
            pieces += 1
            allowed = self._allowance()
            if allowed == 0:
                return
            piece = self._take(room if allowed is None else min(room, allowed))
            if piece is None:
                return
            self._send(member, piece.first, piece.end, piece.value)


class ExclusiveDispatch(FailoverDispatch):
    """One consumer. The same one may take over from itself."""

    def _joined(self, event: Joined) -> None:
        if self.active is not None:
            self._effects.append(JoinRefused(event.consumer, self.active))
        else:
            super()._joined(event)


class SharedDispatch(RangeDispatch):
    """Everybody in turn; who has no room is passed over."""

    shares = True

    def __init__(
        self,
        progress: Progress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
    ) -> None:
        super().__init__(progress, policy=policy, limits=limits, rate=rate)
        self._turns: list[Member] = []
        self._turn = 0  # whose turn is next

    def _joined(self, event: Joined) -> None:
        self._turns.append(self.roster.join(event.consumer, event.permits, hands_over=event.hands_over))

    def _left(self, consumer: ConsumerId) -> None:
        at = next(at for at, member in enumerate(self._turns) if member.consumer == consumer)
        del self._turns[at]
        self._turn -= at < self._turn
        super()._left(consumer)

    def _has_room(self) -> bool:
        return self.roster.has_room()

    def _assign(self) -> None:
        if self._blocking or not self._turns or not self._can_send():
            return
        # Room only shrinks in a step: whoever has none when his turn comes has none in this step.
        turns = [(self._turn + step) % len(self._turns) for step in range(len(self._turns))]
        line = deque(at for at in turns if self.roster.room(self._turns[at]) > 0)
        share = pieces = 0
        while line and self._can_send():
            at = line.popleft()
            member = self._turns[at]
            if self.roster.room(member) <= 0:
                continue
            if pieces == self.pieces_max:
                self._unfinished = True
                return
            pieces += 1
            allowed = self._allowance()
            if allowed == 0:
                return
            if member.messages is None:
                count_max = 1
            else:
                share = share or self._share()
                count_max = min(share, self.roster.room(member), allowed or share)
            piece = self._take(count_max)
            if piece is None:
                return
            self._send(member, piece.first, piece.end, piece.value)
            self._turn = at + 1
            line.append(at)

    def _idle_and_busy(self) -> tuple[list[Member], list[Member]]:
        if self._blocking or self._can_send():
            return [], []
        return super()._idle_and_busy()

    def _share(self) -> int:
        """Equal parts of what can be sent now, for those with room."""
        takers = sum(self.roster.room(member) > 0 for member in self._turns)
        return max(1, -(-(self._ready.count + self.progress.fresh_count()) // takers))
