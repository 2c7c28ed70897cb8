"""Events and effects of a dispatch machine.

Events are facts in the past tense, effects orders. The shell feeds every event to `step(event, now)` and
carries out the effects in order. Times are seconds of `Clock.elapsed()`; ranges are half-open, lowest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pydanube.core.dispatch.consumer_window import DispatchLimits, Permits
from pydanube.core.dispatch.delivery import FailurePolicy, Tries
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.names import ConsumerId

Ranges: TypeAlias = tuple[OffsetRange, ...]


# --- events: consumers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A consumer can be sent messages. Joining again under the same id is a takeover: it keeps its place in
    the line, and what it held is delivered again.

    `permits` None: it goes by the subscription's window. `key_filters` matter to Key-Shared only. `hands_over`: it
    says what its application takes (`Handed`), and deadlines run from then; else they run from sending.
    """

    consumer: ConsumerId
    permits: Permits | None = None
    key_filters: tuple[str, ...] = ()
    hands_over: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """Its stream ended. What it held is delivered again. Its registration, and key filters, stay."""

    consumer: ConsumerId


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Its registration was removed: Key-Shared no longer keeps its keys for it."""

    consumer: ConsumerId


@dataclass(frozen=True, slots=True)
class Granted:
    """A consumer may be sent so much more."""

    consumer: ConsumerId
    permits: Permits


@dataclass(frozen=True, slots=True)
class Handed:
    """A consumer's application has these now. With `seconds`: it needs them for so long, from now on; what it does not
    hold any more is answered with `NotHeld`.
    """

    consumer: ConsumerId
    ranges: Ranges
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Returned:
    """A consumer's application has not seen these, and will not: they are as if they had not been sent."""

    consumer: ConsumerId
    ranges: Ranges
    taken: int = 0  # of the newest `Recall` that it knows


@dataclass(frozen=True, slots=True)
class ConsumerFinished:
    """A consumer wants nothing more; what it holds it may still acknowledge."""

    consumer: ConsumerId


@dataclass(frozen=True, slots=True)
class Shipped:
    """What became of a `SendRanges`: so many bytes went out, `unsent` did not.

    Required after every Send to a consumer with permits; after others only if something was not sent. Unsent
    ranges wait for the next tick or commit (a reader with nothing to give must not become a busy loop). After
    `CursorReset` earlier Sends have nothing unsent; after `Left` and a takeover they are not answered at all.
    """

    consumer: ConsumerId
    size_bytes: int
    unsent: Ranges = ()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """These were read and are not to be delivered yet: first, end, and the time in microseconds since 1970.

    `consumer`: whom they were to be sent to, and were not; before the `Shipped` of that Send. None: only their keys
    were read.
    """

    pieces: tuple[tuple[int, int, int], ...]
    consumer: ConsumerId | None = None


@dataclass(frozen=True, slots=True)
class DateSet:
    """What date it is by the broker's clock, which may have jumped."""

    time_us: int


@dataclass(frozen=True, slots=True)
class AckReceived:
    """`consumer`: who says so, if that is known: a sign of life."""

    ranges: Ranges
    consumer: ConsumerId | None = None


@dataclass(frozen=True, slots=True)
class NackReceived:
    ranges: Ranges
    delay_seconds: float = 0.0
    reason: str = ""
    consumer: ConsumerId | None = None


# --- events: the log -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Available:
    """Everything below `end` is committed. Repeated, coalesced and late ones are normal."""

    end: int


@dataclass(frozen=True, slots=True)
class Withheld:
    """Ranges below the head that cannot be read yet: orphans."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class HistoryAvailable:
    """Withheld ranges can be read now: rescued."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Voided:
    """Offsets that no message has or ever will have."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class LogTrimmed:
    """Retention removed everything below `first_offset`."""

    first_offset: int


@dataclass(frozen=True, slots=True)
class Keyed:
    """Offsets and their keys, by offset: the answer to `ReadKeys`. May be short, or empty.

    `scheduled`: what is not to be delivered yet, as in `Scheduled`. Its keys do not wait for it.
    """

    pairs: tuple[tuple[int, str], ...]
    scheduled: tuple[tuple[int, int, int], ...] = ()


# --- events: time and administration -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: timeouts, due retries, the heartbeat."""


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """None leaves a part as it is. `rate` is a bucket, or False for no limit."""

    policy: FailurePolicy | None = None
    limits: DispatchLimits | None = None
    rate: TokenBucket | bool | None = None


@dataclass(frozen=True, slots=True)
class CursorReset:
    """Deliver from `offset` on, whatever was acknowledged; from the first kept offset if that is higher."""

    offset: int


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """The copies of these are safe in the dead-letter topic."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class DeadLetterFailed:
    """They could not be copied; the machine asks again later."""

    ranges: Ranges


Event: TypeAlias = (
    Joined
    | Left
    | Forgotten
    | Granted
    | Handed
    | Returned
    | ConsumerFinished
    | Shipped
    | Scheduled
    | DateSet
    | AckReceived
    | NackReceived
    | Available
    | Withheld
    | HistoryAvailable
    | Voided
    | LogTrimmed
    | Keyed
    | Ticked
    | PolicyChanged
    | CursorReset
    | DeadLettered
    | DeadLetterFailed
)


# --- effects ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendRanges:
    """`attempt` is 1 the first time.

    Stop after the message that brings the bytes to `size_max_bytes`, counting all Sends of this step to the
    consumer together.
    """

    consumer: ConsumerId
    ranges: Ranges
    attempt: int
    size_max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the consumer to give back what its application has not seen of these. It answers with `Returned`, or not."""

    consumer: ConsumerId
    ranges: Ranges
    taken: int = 0  # how often its whole queue was taken from it


@dataclass(frozen=True, slots=True)
class NotHeld:
    """The consumer does not hold these (any more), so it cannot have them for longer."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Copy these to the dead-letter topic, then say `DeadLettered` or `DeadLetterFailed`."""

    range: OffsetRange
    tries: Tries
    topic: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """Poison: nothing more is delivered (Key-Shared: of this key) until an operator decides."""

    offset: int
    tries: Tries
    key: str | None = None


@dataclass(frozen=True, slots=True)
class PoisonDropped:
    """By the poison policy Drop."""

    range: OffsetRange
    tries: Tries


@dataclass(frozen=True, slots=True)
class Expired:
    """Retention removed these before they were acknowledged."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Activated:
    """Exclusive and Failover: this consumer receives from now on."""

    consumer: ConsumerId


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """Exclusive: another consumer is connected."""

    consumer: ConsumerId
    active: ConsumerId


@dataclass(frozen=True, slots=True)
class AckRefused:
    """These are at or above the head, or a seek moved back over them and they were not sent since."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class ReadKeys:
    """Key-Shared: read the keys of these offsets and answer with `Keyed`."""

    range: OffsetRange


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Ticked` at this time or soon after. A later one replaces no earlier one."""

    time: float


Effect: TypeAlias = (
    SendRanges
    | Recall
    | NotHeld
    | DeadLetter
    | Blocked
    | PoisonDropped
    | Expired
    | Activated
    | JoinRefused
    | AckRefused
    | ReadKeys
    | WakeAt
)


def ranges(*pairs: tuple[int, int]) -> Ranges:
    """`ranges((0, 3), (5, 6))`"""
    return tuple(OffsetRange(first, end) for first, end in pairs)


def offsets(*numbers: int) -> Ranges:
    """`offsets(4, 7)`: single messages."""
    return tuple(OffsetRange(number, number + 1) for number in numbers)
