"""Events and effects of the producer's machine.

Events are facts in the past tense, effects orders. The lane (client/partition_producer.py) feeds every event to
`step(event, now)`, calls the machine for what happens to every batch, and carries out the effects in order. `now` is in
seconds of the event loop's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Self, TypeAlias, TypeVar

from pydanube.errors import DanubeError


class Parcel:
    """Messages that travel together: first gathered, then encoded, and not changed while their fate is unknown.

    A subclass has the messages. Appending one raises `rows` and `size`; the machine is called only when it is full.
    """

    __slots__ = ("begun_at", "first_sequence", "is_doubtful", "rows", "rows_max", "size", "size_max")

    def __init__(self, size_max: int, rows_max: int) -> None:
        self.size_max = size_max
        self.rows_max = rows_max
        self.size = 0
        self.rows = 0
        self.begun_at = 0.0
        self.first_sequence = 0
        self.is_doubtful = False  # it was sent, and no answer said that it was not stored

    def halves(self) -> tuple[Self, Self]:
        """The same messages in two; together they have the same size."""
        raise NotImplementedError


D = TypeVar("D", bound=Parcel)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerLimits:
    """`timeout`: seconds, for a message that has no deadline of its own."""

    batch_bytes: int
    batch_messages: int
    linger_seconds: float
    timeout: float


# --- events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overflowed:
    """The next message does not fit into `open`."""


@dataclass(frozen=True, slots=True)
class FlushRequested:
    """A caller waits for everything that was appended before."""


@dataclass(frozen=True, slots=True)
class TurnCame:
    """As `AwaitTurn` has asked for."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The time that `SetTimer` named has come."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """As much time as `Pause` gives has passed."""


@dataclass(frozen=True, slots=True)
class NotEncoded(Generic[D]):
    parcel: D
    error: DanubeError


@dataclass(frozen=True, slots=True)
class OpeningBegan:
    """A broker is about to be asked, with the session of the machine."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The broker that was asked does not know the session."""

    error: DanubeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """`producer_id` and `session` 0: repetitions are not recognised. `is_volatile`: the topic is non-reliable."""

    producer_id: int
    session: int
    in_flight_max: int
    frame_room_bytes: int
    is_volatile: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """The broker is going away: it takes nothing more, and still answers."""


@dataclass(frozen=True, slots=True)
class HandleLost:
    """The handle cannot be used any more."""

    error: DanubeError


@dataclass(frozen=True, slots=True)
class ProducerEnded:
    """It will never be open again, or is not wanted any more."""

    error: DanubeError


Event: TypeAlias = (
    Overflowed | FlushRequested | TurnCame | TimerFired | Resumed | NotEncoded[D] | OpeningBegan | SessionLost | Opened
    | Leaving | HandleLost | ProducerEnded
)  # fmt: skip


# --- effects ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AwaitTurn:
    """Feed `TurnCame` on a later turn of the loop."""


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Say `TimerFired` then. Replaces what was said before."""

    at: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Say `Resumed` in a while; a little longer each time, until something is stored."""

    error: DanubeError


@dataclass(slots=True)
class Encode(Generic[D]):
    """Call `encoded` or say `NotEncoded`, now or later. Always the last effect but for `AwaitTurn`."""

    parcel: D


@dataclass(slots=True)
class SendParcel(Generic[D]):
    """With the machine's session, and with the parcel's number. Call `answered`, unless the handle is lost."""

    parcel: D
    generation: int


@dataclass(slots=True)
class Resolve(Generic[D]):
    """It is stored."""

    parcel: D
    receipt: Any


@dataclass(frozen=True, slots=True)
class Fail(Generic[D]):
    """It is not stored, or that is not known."""

    parcel: D
    error: DanubeError


@dataclass(frozen=True, slots=True)
class TellLate(Generic[D]):
    """Its messages have waited too long. It goes on all the same."""

    parcel: D


@dataclass(frozen=True, slots=True)
class Expire(Generic[D]):
    """The same, and those of them that have no deadline of their own are taken out: they are not sent any more."""

    parcel: D


@dataclass(frozen=True, slots=True)
class NoteNumbered:
    """The broker has less of the session than it has acknowledged: what follows is numbered from there."""

    expected: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """Find the topic and open it again. Say `HandleLost` first. Always the last effect."""

    error: DanubeError


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The machine has ended, and what it failed with follows."""

    error: DanubeError


Effect: TypeAlias = (
    AwaitTurn | SetTimer | Pause | Encode[D] | SendParcel[D] | Resolve[D] | Fail[D] | TellLate[D] | Expire[D]
    | NoteNumbered | Reopen | GiveUp
)  # fmt: skip
