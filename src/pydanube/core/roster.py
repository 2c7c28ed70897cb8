"""The consumers of one subscription and how much each has room for.

Two ways to say how much:
- by *window* (official gRPC clients): they say nothing, so all of them together hold at most `unacked_max`, and no more
  than they acknowledge in half of an ack timeout: what they hold has its deadline from sending;
- by *permits* (native protocol): each grants messages and bytes; what is sent is taken from its grant.

Bytes are known only to the room that reads the log. So a consumer with permits gets one step's deliveries at
a time: after `Send` it has no room until the room says with `Shipped` how many bytes went out. They may
overdraw the bytes by the last message, otherwise a message larger than the grant would never be sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

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


class Roster:
    """Consumers in the order in which they joined."""

    __slots__ = ("_answered", "_busy_seconds", "_members", "_now", "_rate", "limits", "timeout_seconds", "window_held")

    def __init__(self, limits: DispatchLimits) -> None:
        self.limits = limits
        self.timeout_seconds: float | None = None  # until what goes by the window has failed
        self._now = 0.0
        self._busy_seconds = 0.0  # in which the window was not empty
        self._answered = 0.0  # of what went by the window
        self._rate: float | None = None  # answers in a second, lately
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
        return sum(
            max(0, member.owed - member.held)
            for member in self._members.values()
            if member.messages is not None and not member.hands_over
        )

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

    def leave(self, consumer: ConsumerId) -> None:
        member = self._members.pop(consumer)
        assert member.held == 0, "what it held is taken back first"

    def grant(self, consumer: ConsumerId, permits: Permits) -> None:
        """A consumer that went by the window goes by permits from now on."""
        member = self._members.get(consumer)
        if member is None:
            return  # it left while its grant was on the way
        if member.messages is None:
            member.messages = 0
            self.window_held -= member.held
        member.messages += max(0, permits.messages)
        member.owed = max(0, member.owed - max(0, permits.messages))
        member.size_bytes += max(0, permits.size_bytes)
        member.paused = False

    @property
    def window(self) -> int:
        """How many messages may be with all consumers that go by the window."""
        most = self.limits.unacked_max
        if self._rate is None or self.timeout_seconds is None:
            return most
        return max(1, min(most, int(self._rate * self.timeout_seconds / 2)))

    def pass_time(self, now: float) -> None:
        if self.window_held:
            self._busy_seconds += now - self._now
        self._now = now

    def answered(self, consumer: ConsumerId, count: int) -> None:
        """Adapts the window, if it is by the window that the consumer has these."""
        member = self._members.get(consumer)
        if member is None or member.messages is not None:
            return
        self._answered += count
        self._rate = self._answered / max(self._busy_seconds, 1e-6)
        if self._answered >= self.window:
            self._answered /= 4  # what was long ago counts less
            self._busy_seconds /= 4

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
            return max(0, min(held_room, self.window - self.window_held))
        if member.size_bytes <= 0:
            return 0
        return max(0, min(held_room, member.messages, self.limits.send_max - member.sending))

    def hold(self, member: Member, count: int, now: float) -> None:
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
