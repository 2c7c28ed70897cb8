"""What is known of one consumer of a subscription: what it may be sent, holds, and has in its own queue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.core.names import ConsumerId
from pydanube.errors import ConfigError

UNACKED_MAX_DEFAULT: Final = 10
UNACKED_MAX_ALLOWED: Final = 10_000


class Permits(NamedTuple):
    """How much a consumer may be sent, as it grants it."""

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
class ConsumerWindow:
    """One consumer and how much it may be sent. `messages` None: it goes by the subscription's window."""

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
