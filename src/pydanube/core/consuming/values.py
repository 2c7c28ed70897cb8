"""Events and effects of the consumer's machine.

Events are facts in the past tense, effects orders. The lane (client/partition_consumer.py) feeds every event to
`step(event, now)` and carries out the effects in order. `now` is in seconds of the event loop's clock; ranges are
half-open, lowest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeAlias, TypeVar

from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.errors import DanubeError

Ranges: TypeAlias = Sequence[tuple[int, int]]

NO_END: Final = -1


class Arrival:
    """Messages that came together. A subclass has them."""

    __slots__ = ("attempt", "count", "epoch", "era", "generation", "is_copy", "ranges", "seeks", "size", "taken")

    def __init__(self, ranges: Ranges, *, attempt: int, size: int, seeks: int, epoch: int, generation: int) -> None:
        self.ranges = ranges
        self.attempt = attempt
        self.size = size
        self.seeks = seeks  # how often the subscription was moved before
        self.epoch = epoch  # 0: of a non-reliable topic
        self.generation = generation  # of the handle that it came on
        self.era = 0  # as the machine says when it is delivered; an answer that counts has the same
        self.is_copy = False  # the same: the application may have some of it already
        self.count = sum(end - first for first, end in ranges)
        self.taken = 0  # of these, the first so many: the application has them, and the machine knows

    def keep(self, ranges: Ranges) -> int:
        """Only these are for the application; returns how many are not."""
        before, self.ranges = self.count, ranges
        self.count = sum(end - first for first, end in ranges)
        return before - self.count

    def part(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The offsets of the messages number `start` to `stop`, as they are handed over."""
        if start == 0 and stop == self.count:
            return list(self.ranges)
        found: list[tuple[int, int]] = []
        for first, end in self.ranges:
            low, high = first + max(0, start), min(end, first + stop)
            if low < high:
                found.append((low, high))
            start, stop = start - (end - first), stop - (end - first)
            if stop <= 0:
                break
        return found


A = TypeVar("A", bound=Arrival)


def in_parts(ranges: Iterable[tuple[int, int]], ranges_max: int) -> list[list[tuple[int, int]]]:
    """As many ranges as a command may have."""
    flat = list(ranges)
    return [flat[at : at + ranges_max] for at in range(0, len(flat), ranges_max)]


class OffsetRun:
    """The newest acks, which follow each other. An ack of `end`, delivered in `era`, may just raise it."""

    __slots__ = ("end", "era", "first")

    def __init__(self) -> None:
        self.first = 0
        self.end = NO_END
        self.era = 0


class Verdict:
    """An ack or a nack on its way: of these offsets, until the broker has applied it."""

    __slots__ = ("asked_at", "delay_ms", "is_ack", "is_void", "ranges", "reason", "seeks")

    def __init__(self, ranges: Ranges, seeks: int, *, is_ack: bool, delay_ms: int = 0, reason: str = "") -> None:
        self.ranges = ranges
        self.seeks = seeks  # of the deliveries
        self.is_ack = is_ack
        self.is_void = False  # a seek has come since it was sent: whatever is answered, it is not sent again
        self.delay_ms = delay_ms
        self.reason = reason
        self.asked_at = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """What may be delivered and not handed over. `adapts`: a subscription that shares begins with few."""

    window_messages: int
    window_bytes: int
    adapts: bool = False


class Why(Enum):
    """Something is taken back that the application has not got."""

    RECALLED = "another consumer has nothing to do"
    COPIES = "it was acknowledged"
    REPLACED = "it has come once more"
    STOPPED = "the application wants no more"


# --- events: the application --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acked:
    ranges: Ranges
    era: int


@dataclass(frozen=True, slots=True)
class Nacked:
    ranges: Ranges
    era: int
    delay_ms: int = 0
    reason: str = ""


@dataclass(slots=True)  # not frozen: one is made for every delivery
class Took(Generic[A]):
    """The application has the first `count` messages of it."""

    arrival: A
    count: int


@dataclass(frozen=True, slots=True)
class TakingBegan:
    """The application takes messages."""


@dataclass(frozen=True, slots=True)
class Hungered:
    """The application waits, and nothing is there."""


@dataclass(frozen=True, slots=True)
class Reviewed:
    """The state is about to be read: what was answered so far is counted."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The same, and answers do not wait for the end of the turn."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The application wants no more. What it has not got is taken back by the lane: `TakenBack`."""


@dataclass(frozen=True, slots=True)
class Closing:
    """Nothing that the application says from now on would count."""


# --- events: what was asked for -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnEnded:
    pass


@dataclass(frozen=True, slots=True)
class TellDue:
    """The lane has said (`Took`) how much the application has by now."""


@dataclass(frozen=True, slots=True)
class SettledDue:
    generation: int


@dataclass(frozen=True, slots=True)
class TakenBack:
    found: OffsetRanges
    why: Why


@dataclass(frozen=True, slots=True)
class Dropped(Generic[A]):
    """It is not handed over, or not to the end."""

    arrival: A


@dataclass(frozen=True, slots=True)
class Emptied(Generic[A]):
    """All that was left of it was taken back."""

    arrival: A


# --- events: the broker -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Opening:
    """A broker is about to be asked, for what `first_permits` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribed:
    """`hands_over`: the broker wants to know what the application has. `created`: the topic's first epoch."""

    hands_over: bool = True
    shares: bool = False
    created: int = 0
    next_unacked: int = 0


@dataclass(slots=True)
class Delivered(Generic[A]):
    """If it is a copy the lane has said (`Took`) how much the application has by now."""

    arrival: A


@dataclass(frozen=True, slots=True)
class Recalled:
    """Others have nothing to do. `taken`: how often the broker gave everything that was here to others."""

    ranges: Ranges
    seeks: int
    taken: int


@dataclass(slots=True)
class Answered:
    """`generation`: as sent."""

    verdict: Verdict
    generation: int
    error: DanubeError | None


@dataclass(frozen=True, slots=True)
class LagKnown:
    generation: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Sought:
    """The answer to a seek. `seeks` None: of a broker that does not count them."""

    seeks: int | None


@dataclass(frozen=True, slots=True)
class Lost:
    """The handle cannot be used any more."""


@dataclass(frozen=True, slots=True)
class Ended:
    """It will never be open again."""

    error: DanubeError


Event: TypeAlias = (
    Acked | Nacked | Took[A] | TakingBegan | Hungered | Reviewed | Flushed | Stopped | Closing | TurnEnded | TellDue
    | SettledDue | TakenBack | Dropped[A] | Emptied[A] | Opening | Subscribed | Delivered[A] | Recalled | Answered
    | LagKnown | Sought | Lost | Ended
)  # fmt: skip


# --- effects ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Show(Generic[A]):
    """Put it into the inbox, and wake the caller that waits."""

    arrival: A


@dataclass(slots=True)
class Send:
    """Say `Answered`, unless the handle is lost."""

    verdict: Verdict
    generation: int


@dataclass(slots=True)
class Grant:
    messages: int
    size: int


@dataclass(frozen=True, slots=True)
class EndTurn:
    """Feed `TurnEnded` on a later turn of the loop; with `is_retry` after a pause, longer each time."""

    is_retry: bool = False


@dataclass(frozen=True, slots=True)
class SayIn:
    """Say this, after so many seconds."""

    seconds: float
    event: TellDue | SettledDue


@dataclass(frozen=True, slots=True)
class Tell:
    """The application has these, and has not answered."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The application has not got these, and will not. `stop`: and nothing more is wanted."""

    ranges: Ranges
    stop: bool = False


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Say `Took`, take these from the application's inbox, and say `TakenBack`. `COPIES`, `REPLACED`: only what is
    there for the second time, or more.
    """

    wanted: OffsetRanges
    why: Why


@dataclass(frozen=True, slots=True)
class DropAll:
    """Nothing that is in the inbox is handed over. Say `Dropped` of each."""


@dataclass(frozen=True, slots=True)
class AllAnswered:
    """The application has answered everything that a caller waits for."""


@dataclass(frozen=True, slots=True)
class AskLag:
    """How far the broker has taken the acks before this. Say `LagKnown`."""

    generation: int


@dataclass(frozen=True, slots=True)
class Settle:
    """It is applied, or never will be."""

    verdict: Verdict
    error: DanubeError | None = None


@dataclass(frozen=True, slots=True)
class NoteRefused:
    """Log it: the application goes on, so this is the only sign that an answer was not applied."""

    verdict: Verdict
    error: DanubeError


@dataclass(frozen=True, slots=True)
class Refuse:
    """The answer does not count: raise why."""


Effect: TypeAlias = (
    Show[A] | Send | Grant | EndTurn | SayIn | Tell | GiveBack | TakeBack | DropAll | AllAnswered | AskLag | Settle
    | NoteRefused | Refuse
)  # fmt: skip
