"""The consumers of one subscription and how much each has room for.

Two ways to say how much:
- by *window* (official gRPC clients): they say nothing, so all of them together hold at most `unacked_max`, and each no
  more than it answers in half of an ack timeout, but one: what they hold has its deadline from sending. How long one
  needs for a message is measured while it has any. What timed out is in its queue still, and counts as long as it goes
  on answering: else it would be sent more and more that has no chance;
- by *permits* (native protocol): each grants messages and bytes; what is sent is taken from its grant.

Bytes are known only to the room that reads the log. So a consumer with permits gets one step's deliveries at
a time: after `Send` it has no room until the room says with `Shipped` how many bytes went out. They may
overdraw the bytes by the last message, otherwise a message larger than the grant would never be sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges
from pydanube.core.names import ConsumerId
from pydanube.errors import ConfigError

UNACKED_MAX_DEFAULT: Final = 10
UNACKED_MAX_ALLOWED: Final = 10_000


class Permits(NamedTuple):
    """Room that a consumer grants."""

    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchLimits:
    """`unacked_max` is the subscription's window (`max_unacked_messages`)."""

    unacked_max: int = UNACKED_MAX_DEFAULT
    consumer_unacked_max: int = 100_000  # held by one consumer, whatever it grants
    send_max: int = 100_000  # handed to one consumer in one step, if it grants permits; its bytes bound it before

    def __post_init__(self) -> None:
        if not 1 <= self.unacked_max <= UNACKED_MAX_ALLOWED:
            raise ConfigError(
                "dispatch.max_unacked_messages",
                self.unacked_max,
                f"a whole number from 1 to {UNACKED_MAX_ALLOWED}",
            )


@dataclass(slots=True, eq=False)
class Member:
    """One consumer. `messages` None: it goes by the subscription's window."""

    consumer: ConsumerId
    messages: int | None = None
    size_bytes: int = 0
    held: int = 0
    sending: int = 0  # handed to it in this step
    shipping: int = 0  # Sends on their way to the wire; their bytes are not known yet
    paused: bool = False  # the last delivery came back unsent; wait for the next tick or commit
    hands_over: bool = False  # it says what its application takes
    unseen: int = 0  # of what it holds: in its own queue
    owed: int = 0  # sent, and no permits granted for it since: with permits, what its application has not taken
    active_at: float = 0.0  # it took, acknowledged or asked for something, or had nothing to take
    was_empty: bool = False  # the first for its empty queue is on its way
    recalled_at: float = -1e9  # it was asked to give back what is unseen
    stalled: bool = False  # it was silent for so long that its queue was given to others
    stopped: bool = False  # it wants nothing more
    taken: int = 0  # how often its queue was given to others
    # Of those that go by the window:
    answers: float = 0.0  # lately; what was long ago counts less
    busy_seconds: float = 0.0  # that it needed for these
    counted_at: float = 0.0  # up to when
    answered_at: float = 0.0  # its last answer, or the first message that it got when it had none
    seconds_each: float | None = None  # that it needs for a message; kept when it comes anew
    passed: tuple[float, int] = (-1.0, -1)  # the newest message that it has answered: when it was sent, and its offset
    overdue: OffsetRanges = field(default_factory=OffsetRanges)  # timed out, and in its queue still
    overdue_newest: tuple[float, int] = (-1.0, -1)


class Roster:
    """Consumers in the order in which they joined."""

    __slots__ = ("_members", "_now", "_overdue", "_slowest", "limits", "timeout_seconds", "window_held")

    def __init__(self, limits: DispatchLimits) -> None:
        self.limits = limits
        self.timeout_seconds: float | None = None  # until what goes by the window has failed
        self._now = 0.0
        # Who needed longest for a message, and how long, by the last answers. Who has not answered yet is thought to
        # need as long.
        self._slowest: tuple[ConsumerId, float] | None = None
        self._overdue: dict[ConsumerId, Member] = {}  # who has overdue messages
        self.window_held = 0  # by all consumers that go by the window
        self._members: dict[ConsumerId, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, consumer: ConsumerId) -> bool:
        return consumer in self._members

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    @property
    def first(self) -> Member | None:
        """Who joined before all others."""
        return next(iter(self._members.values()), None)

    @property
    def unseen(self) -> int:
        """Messages in the queues of consumers that say what they hand over."""
        return sum(member.unseen for member in self._members.values())

    @property
    def late(self) -> int:
        """Messages that consumers still have in their queues although they are not in flight any more: timed out."""
        owed = sum(
            max(0, member.owed - member.held)
            for member in self._members.values()
            if member.messages is not None and not member.hands_over
        )
        return owed + sum(member.overdue.count for member in self._overdue.values())

    def get(self, consumer: ConsumerId) -> Member | None:
        return self._members.get(consumer)

    def join(self, consumer: ConsumerId, permits: Permits | None, *, hands_over: bool = False) -> Member:
        assert consumer not in self._members, "a consumer that joins again leaves first"
        member = Member(consumer, hands_over=hands_over)
        if permits is not None:
            member.messages, member.size_bytes = permits
        self._members[consumer] = member
        return member

    def rejoin(self, consumer: ConsumerId, permits: Permits | None, *, hands_over: bool = False) -> None:
        """As if new, in its old place."""
        member = self._members[consumer]
        assert member.held == member.unseen == 0, "what it held is taken back first"
        member.messages, member.size_bytes = permits if permits is not None else (None, 0)
        member.sending = member.shipping = member.owed = member.taken = 0
        member.paused = member.stalled = member.stopped = False
        member.hands_over = hands_over
        member.passed = (-1.0, -1)
        self._forget_overdue(member)

    def leave(self, consumer: ConsumerId) -> None:
        member = self._members.pop(consumer)
        assert member.held == 0, "what it held is taken back first"
        self._forget_overdue(member)

    def move_back(self, consumer: ConsumerId) -> None:
        """Behind all others, as if it had joined last."""
        self._members[consumer] = self._members.pop(consumer)

    def grant(self, consumer: ConsumerId, permits: Permits) -> None:
        """A consumer that went by the window goes by permits from now on."""
        member = self._members.get(consumer)
        if member is None:
            return  # it left while its grant was on the way
        if member.messages is None:
            member.messages = 0
            self.window_held -= member.held
            self._forget_overdue(member)
        member.messages += max(0, permits.messages)
        member.owed = max(0, member.owed - max(0, permits.messages))
        member.size_bytes += max(0, permits.size_bytes)
        member.paused = False

    @property
    def window(self) -> int:
        """How many messages may be with all consumers that go by the window."""
        by_window = [self._window_of(member) for member in self._members.values() if member.messages is None]
        return min(self.limits.unacked_max, sum(by_window)) if by_window else self.limits.unacked_max

    def _window_of(self, member: Member) -> int:
        """How many messages may be with one consumer that goes by the window."""
        most = self.limits.unacked_max
        seconds_each = member.seconds_each or (self._slowest[1] if self._slowest else None)
        if seconds_each is None or self.timeout_seconds is None:
            return most
        if member.held:
            seconds_each = max(seconds_each, self._now - member.answered_at)  # for so long it has been busy with one
        return max(1, int(min(most, self.timeout_seconds / 2 / seconds_each)))

    def pass_time(self, now: float) -> None:
        self._now = now

    def _count_busy(self, member: Member) -> None:
        """Before what a consumer has changes."""
        if member.held or member.overdue:
            member.busy_seconds += self._now - member.counted_at
        else:
            member.answered_at = self._now  # it had nothing to answer before
        member.counted_at = self._now

    def answered(self, consumer: ConsumerId, count: int, newest: tuple[float, int]) -> None:
        """Adapts its window, if it is by the window that the consumer has these. `newest`: when the newest of them was
        sent, and its offset.
        """
        member = self._members.get(consumer)
        if member is None or member.messages is not None:
            return
        member.passed = max(member.passed, newest)
        if member.passed > member.overdue_newest:
            self._forget_overdue(member)  # it takes them in turn: these it will not answer
        self._adapt(member, count)

    def _adapt(self, member: Member, count: int) -> None:
        member.answers += count
        last = (self._now - member.answered_at) / count
        member.seconds_each = max(member.busy_seconds / member.answers, last, 1e-9)  # who has become slow is at once
        member.answered_at = self._now
        if member.answers >= self._window_of(member):
            member.answers /= 4
            member.busy_seconds /= 4
        if self._slowest is None or self._slowest[0] == member.consumer or self._slowest[1] <= member.seconds_each:
            self._slowest = member.consumer, member.seconds_each

    def keeps(self, consumer: ConsumerId, first: int, end: int, sent_at: float) -> None:
        """A consumer holds these no longer, and has not answered: they may be in its queue still."""
        member = self._members[consumer]
        if member.messages is None and (sent_at, end - 1) > member.passed:
            member.overdue.add(first, end)
            member.overdue_newest = max(member.overdue_newest, (sent_at, end - 1))
            self._overdue[consumer] = member

    def answered_late(self, ranges: Iterable[OffsetRange]) -> OffsetRanges:
        """Which of these were overdue somewhere: there they are not any more."""
        late = OffsetRanges()
        for first, end in ranges if self._overdue else ():
            for member in list(self._overdue.values()):
                found = member.overdue.overlap(first, end)
                if found:
                    self._count_busy(member)
                    self._adapt(member, sum(part.size for part in found))
                    member.overdue.remove(first, end)
                    if not member.overdue:
                        self._forget_overdue(member)
                for part in found:
                    late.add(*part)
        return late

    def forget_silent(self) -> None:
        """What is overdue at a consumer that has answered nothing for an ack timeout does not count any more."""
        for member in list(self._overdue.values()):
            if self.timeout_seconds is None or member.answered_at + self.timeout_seconds <= self._now:
                self._forget_overdue(member)

    def forget_overdue(self) -> None:
        for member in list(self._overdue.values()):
            self._forget_overdue(member)

    def silent_at(self) -> float | None:
        """When the first of them will have been silent for that long."""
        if self.timeout_seconds is None or not self._overdue:
            return None
        return min(member.answered_at for member in self._overdue.values()) + self.timeout_seconds

    def _forget_overdue(self, member: Member) -> None:
        if self._overdue.pop(member.consumer, None) is not None:
            self._count_busy(member)
            member.overdue.clear()
        member.overdue_newest = (-1.0, -1)

    def room(self, member: Member) -> int:
        """How many messages it could be sent now."""
        return 0 if member.paused else self._room(member)

    def has_room(self) -> bool:
        """Also counts consumers that are paused: a pause ends with the next poll."""
        return any(self._room(member) > 0 for member in self._members.values())

    def has_room_for(self, member: Member) -> bool:
        return self._room(member) > 0

    def _room(self, member: Member) -> int:
        if member.shipping or member.stalled or member.stopped:
            return 0
        held_room = self.limits.consumer_unacked_max - member.held
        if member.messages is None:
            free = self.limits.unacked_max - self.window_held
            if free <= 0:
                return 0
            return max(0, min(held_room, free, self._window_of(member) - member.held - member.overdue.count))
        if member.size_bytes <= 0:
            return 0
        return max(0, min(held_room, member.messages, self.limits.send_max - member.sending))

    def hold(self, member: Member, count: int, now: float) -> None:
        if member.messages is None:
            self._count_busy(member)
        member.held += count
        if member.hands_over:
            if not member.unseen:
                member.active_at = now  # it had nothing to take before
                member.was_empty = True
            member.unseen += count
        if member.messages is None:
            self.window_held += count
        else:
            member.messages -= count
            member.sending += count
            member.owed += count

    def seen(self, member: Member, count: int) -> None:
        """Its application took `count` of what it holds."""
        member.unseen -= count
        assert member.unseen >= 0, "saw more than it was sent"

    def release(self, consumer: ConsumerId, count: int, *, unseen: bool = False) -> None:
        """It holds `count` fewer; permits are not given back, the consumer grants new ones."""
        member = self._members[consumer]
        if member.messages is None:
            self._count_busy(member)
        member.held -= count
        assert member.held >= 0, "released more than was held"
        if unseen:
            self.seen(member, count)
        if member.messages is None:
            self.window_held -= count

    def refund(self, consumer: ConsumerId, count: int, *, unseen: bool = False) -> None:
        """`count` were never sent: releases them and gives the permits back."""
        self.release(consumer, count, unseen=unseen)
        self.repay(self._members[consumer], count)

    def repay(self, member: Member, count: int) -> None:
        """`count` were never sent and are not held any more: gives the permits back."""
        if member.messages is not None:
            member.messages += count
            member.owed = max(0, member.owed - count)

    def sent(self, consumer: ConsumerId) -> None:
        """The step is over and says one `Send` to this consumer."""
        member = self._members[consumer]
        member.sending = 0
        if member.messages is not None:
            member.shipping += 1

    def shipped(self, member: Member, size_bytes: int) -> None:
        if member.messages is not None:
            member.shipping = max(0, member.shipping - 1)
            member.size_bytes -= size_bytes

    def resume(self) -> None:
        for member in self._members.values():
            member.paused = False
