"""What a producer of one topic sends, when, and what follows from every answer.

    append ─► open ─► full ─► encoding ─► queue ─► sent ─► Resolve
                 cut     one at a time      └── at most 8, oldest first; kept, unchanged, until answered ──┘

                 Opened                an error is answered          all are answered: what the first error means
    AWAY ─────────────────────► OPEN ────────────────────► DRAINING ─┬─ NUMBER, DROP ─────────────────────► OPEN
     ▲                           ▲ ▲                                 ├─ WAIT ──► PAUSED ── Resumed ───────► OPEN
     └── HandleLost, in any ──   │ └─────────────────────────────────┤
         state but ENDED                                             ├─ REOPEN, NEW_SESSION: Reopen ─► HandleLost ► AWAY
                                                                     └─ END: GiveUp ──────────────────────► ENDED

| event             | AWAY                       | OPEN                                 | DRAINING, PAUSED    | ENDED |
|-------------------|----------------------------|--------------------------------------|---------------------|-------|
| appended (first)  | AwaitTurn                  | AwaitTurn; serial: as TurnCame       | AwaitTurn           | -     |
| Overflowed        | cut, AwaitTurn             | cut, AwaitTurn                       | cut, AwaitTurn      | -     |
| FlushRequested    | cut, AwaitTurn             | cut, AwaitTurn                       | cut, AwaitTurn      | -     |
| TurnCame          | -                          | SendParcel of the queue, Encode next | -                   | -     |
| encoded           | queued or halved           | the same, then as TurnCame           | queued or halved    | Fail  |
| NotEncoded        | Fail                       | Fail, then as TurnCame               | Fail                | Fail  |
| OpeningBegan      | too old and in doubt: Fail | -                                    | -                   | -     |
| SessionLost       | in doubt: Fail             | -                                    | -                   | -     |
| Opened            | OPEN, numbered, AwaitTurn  | -                                    | -                   | -     |
| answered: receipt | -                          | Resolve, then as TurnCame            | Resolve (*)         | -     |
| answered: error   | -                          | DRAINING                             | the last: see above | -     |
| answered: neither | -                          | GiveUp, Fail all                     | GiveUp, Fail all    | -     |
| Leaving           | -                          | nothing is sent any more             | the same            | -     |
| HandleLost        | -                          | AWAY; volatile: Fail what was sent   | AWAY, or GiveUp     | -     |
| Resumed           | -                          | -                              | PAUSED: OPEN, as TurnCame | -     |
| TimerFired        | late: TellLate or Expire, SetTimer; AwaitTurn | the same          | the same            | -     |
| ProducerEnded     | ENDED, Fail all            | ENDED, Fail all                      | ENDED, Fail all     | -     |

(*) In a session a receipt behind an error is a mistake, as is one out of turn: GiveUp.

*Natural batching.* While fewer than EAGER batches are in flight, whatever is there goes out at the end of the loop's
turn; otherwise it waits for an answer, or for the open batch to be cut. A busy producer so makes large batches and an
idle one does not wait. Two in flight, not one: the broker has the next batch when it has written the one before. A
producer that sends one message at a time does not even wait for the end of the turn.

*Order.* The rules are docs/protocol.md §5. The broker answers in the order in which it was asked, so the first error
among the answers is the cause, and every later one its consequence. Nothing is sent between that error and the last
answer. Without a session each batch is for itself: one is refused, and the next one stored all the same.

Invariants: every parcel with a row is in one place, `open`, `full`, `encoding` or `queue`, until one `Resolve` or one
`Fail` names it. The first `sent` of the queue were sent on this handle, and the last `unanswered` of those have no
answer; there are never more than `in_flight_max`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, Generic, assert_never

from pydanube.core.producing.values import (
    AwaitTurn,
    D,
    Effect,
    Encode,
    Event,
    Expire,
    Fail,
    FlushRequested,
    GiveUp,
    HandleLost,
    Leaving,
    NotEncoded,
    NoteNumbered,
    Opened,
    OpeningBegan,
    Overflowed,
    Pause,
    ProducerEnded,
    ProducerLimits,
    Reopen,
    Resolve,
    Resumed,
    SendParcel,
    SessionLost,
    SetTimer,
    TellLate,
    TimerFired,
    TurnCame,
)
from pydanube.errors import (
    DanubeError,
    DiskFull,
    InvalidBatch,
    LogBusy,
    LogClosed,
    LogFull,
    LogStopped,
    MessageTooLarge,
    OutOfSequence,
    ProducerFenced,
    ProducerUnknown,
    ProtocolViolation,
    RateLimited,
    Refused,
    SessionUnknown,
)

EAGER: Final = 2
# Brokers remember a session for longer than this after its last batch, whatever their clocks do (log/wal_config.py).
RESEND_SECONDS: Final = 24 * 3600.0
LOOKS: Final = 8  # for late messages, in the time that one may take
# The batch was certainly not stored.
CERTAIN: Final = (Refused, DiskFull, LogBusy, LogClosed, LogFull, ProducerUnknown, RateLimited)


class ProducingState(Enum):
    AWAY = "not open at a broker"
    OPEN = "batches go out"
    DRAINING = "one was refused: nothing goes out until all are answered"
    PAUSED = "until the broker may have recovered"
    ENDED = "for good"


class Meaning(Enum):
    """Of the first error among the answers, for everything that has no receipt."""

    NEW_SESSION = "what may be stored fails, the rest goes under a new session"
    NUMBER = "it is sent again, numbered from what the broker expects, if that can be"
    WAIT = "it is sent again, unchanged, in a while"
    REOPEN = "it is sent again, unchanged, to whichever broker has the topic"
    END = "the broker's idea of this session and ours have nothing in common"
    DROP = "the refused batch fails, and those behind it get its numbers"


def meaning(error: DanubeError) -> Meaning:
    match error:
        case SessionUnknown():
            return Meaning.NEW_SESSION
        case OutOfSequence():
            return Meaning.NUMBER
        case DiskFull() | LogBusy() | LogFull() | RateLimited():
            return Meaning.WAIT
        case InvalidBatch() | ProducerFenced() | ProtocolViolation():
            return Meaning.END
        case LogStopped():  # after which it is not known what is stored
            return Meaning.REOPEN
    return Meaning.REOPEN if error.retryable else Meaning.DROP


class ProducerMachine(Generic[D]):
    """One topic, or one partition. `new` makes an empty parcel for at most so many bytes and rows."""

    def __init__(self, new: Callable[[int, int], D], limits: ProducerLimits) -> None:
        self._new = new
        self._limits = limits
        self.state = ProducingState.AWAY
        self.generation = 0  # of handles: what was sent on an older one is sent again, and its answer not looked at
        self.producer_id = 0
        self.session = 0
        self.next_sequence = 0
        self.open = new(limits.batch_bytes, limits.batch_messages)
        self._full: deque[D] = deque()
        self._encoding: D | None = None
        self._queue: deque[D] = deque()
        self._sent = 0
        self._unanswered = 0
        self._in_flight_max = 0
        self._frame_room_bytes = 0
        self._is_volatile = False
        self._trouble: tuple[DanubeError, D] | None = None  # DRAINING: the first error, and what was refused with it
        self._suspect: D | None = None  # was the oldest when the broker ended the whole connection
        self.end: DanubeError | None = None  # ENDED: why
        self._is_serial = False  # the last batch had one message, and nothing came while it was on its way
        self._is_turn_due = False
        self._look_at: float | None = None  # for late messages; None: there is nothing
        self._wake_at: float | None = None
        self._effects: list[Effect[D]] = []

    # --- what happens to every batch: calls, which cost less than events ----------------------------

    def appended(self, now: float) -> list[Effect[D]]:
        """A message was added to `open`, and it is the first of it, or the last that fits."""
        self._effects = []
        at_once = False
        if self.open.rows == 1:
            self.open.begun_at = now
            if self._look_at is None:
                self._look_at = now + self._limits.timeout / LOOKS
                self._wake_by(self._look_at)
            at_once = self._is_serial and not self._queue and not self._is_turn_due
        if self.open.rows >= self._limits.batch_messages:
            self._cut()
        if at_once:
            self._send_more(now)
        else:
            self._end_turn()
        return self._effects

    def encoded(self, parcel: D, size_bytes: int, now: float) -> list[Effect[D]]:
        """As `Encode` has asked for."""
        self._effects = []
        self._take(parcel, size_bytes)
        self._send_more(now)
        return self._effects

    def answered(self, parcel: D, generation: int, answer: object, now: float) -> list[Effect[D]]:
        """With a receipt, which is opaque; an error; or None: nothing that answers a batch. `generation`: as sent."""
        self._effects = []
        if generation == self.generation:
            self._judge(parcel, answer, now)
        return self._effects

    # --- everything else ----------------------------------------------------------------------------

    def step(self, event: Event[D], now: float) -> list[Effect[D]]:
        effects = self._effects = []
        match event:
            case TurnCame():
                self._is_turn_due = False
                self._send_more(now)
            case Overflowed() | FlushRequested():
                self._cut()
            case TimerFired():
                self._wake_at = None
                if self.end is None:
                    self._look(now)
                    self._end_turn()
            case NotEncoded(parcel, error):
                self._encoding = None
                effects.append(Fail(parcel, error))
                self._send_more(now)
            case OpeningBegan():
                self._leave_old_session(now)
            case SessionLost(error):
                self._leave_session(error)
            case Opened():
                self._opened(event)
            case Leaving():
                self._in_flight_max = 0
            case HandleLost(error):
                self._lost(error)
            case Resumed():
                if self.state is ProducingState.PAUSED:
                    self.state = ProducingState.OPEN
                    self._send_more(now)
            case ProducerEnded(error):
                self._fail_all(error)
            case _:
                assert_never(event)
        return effects

    @property
    def outstanding(self) -> Iterator[D]:
        """Everything that has no end yet, oldest first."""
        yield from self._queue
        if self._encoding is not None:
            yield self._encoding
        yield from (parcel for parcel in (*self._full, self.open) if parcel.rows)

    # --- gathering ----------------------------------------------------------------------------------

    def _cut(self) -> None:
        """The open parcel goes out as soon as there may be one more in flight."""
        if self.open.rows:
            self._full.append(self.open)
            self.open = self._new(self._limits.batch_bytes, self._limits.batch_messages)
            self._end_turn()

    def _next(self, now: float) -> D | None:
        """What is to be sent now."""
        while self._full:
            parcel = self._full.popleft()
            if parcel.rows:  # else they were too late
                return parcel
        parcel = self.open
        if not parcel.rows or self._sent >= EAGER:
            return None
        due = parcel.begun_at + self._limits.linger_seconds
        if due > now:
            self._wake_by(due)
            return None
        self.open = self._new(self._limits.batch_bytes, self._limits.batch_messages)
        return parcel

    def _end_turn(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._effects.append(AwaitTurn())

    # --- sending ------------------------------------------------------------------------------------

    def _send_more(self, now: float) -> None:
        if self.state is not ProducingState.OPEN or self._encoding is not None:
            return
        for place in range(self._sent, min(len(self._queue), self._in_flight_max)):
            self._effects.append(SendParcel(self._queue[place], self.generation))
            self._sent += 1
            self._unanswered += 1
        if self._sent < self._in_flight_max:
            self._encoding = self._next(now)
            if self._encoding is not None:
                self._effects.append(Encode(self._encoding))

    def _take(self, parcel: D, size_bytes: int) -> None:
        self._encoding = None
        if self.end is not None:
            self._effects.append(Fail(parcel, self.end))
        elif size_bytes <= self._frame_room_bytes:
            self._is_serial = parcel.rows == 1 and not self._queue
            self._queue.append(parcel)
            self._number(parcel)
        elif parcel.rows > 1:  # the broker does not take frames so long: half of it goes first
            self._full.extendleft(reversed(parcel.halves()))
        else:
            self._effects.append(Fail(parcel, MessageTooLarge(size_bytes, self._frame_room_bytes)))

    def _number(self, parcel: D) -> None:
        parcel.first_sequence = self.next_sequence
        if self.session:
            self.next_sequence += parcel.rows

    def _number_all(self, first_sequence: int) -> None:
        self.next_sequence = first_sequence
        for parcel in self._queue:
            self._number(parcel)

    # --- answers ------------------------------------------------------------------------------------

    def _judge(self, parcel: D, answer: object, now: float) -> None:
        place = self._sent - self._unanswered  # of the oldest without an answer; those before it were refused
        is_in_turn = self._unanswered > 0 and self._queue[place] is parcel
        self._unanswered -= 1
        if isinstance(answer, DanubeError):
            parcel.is_doubtful |= not isinstance(answer, CERTAIN)
            if self._trouble is None:
                self.state, self._trouble = ProducingState.DRAINING, (answer, parcel)
        elif answer is None or not is_in_turn or (place and self.session):
            self._give_up(ProtocolViolation("a batch was answered out of turn, or with no receipt"))
            return
        else:
            del self._queue[place]
            self._sent -= 1
            self._suspect = None
            self._effects.append(Resolve(parcel, answer))
        if self._trouble is None:
            self._send_more(now)
        elif not self._unanswered:
            self._recover(*self._trouble)
            self._send_more(now)

    def _recover(self, error: DanubeError, refused: D) -> None:
        """Every batch in flight is answered, and the first that was refused says why."""
        self.state, self._trouble = ProducingState.OPEN, None
        self._sent = 0
        match meaning(error):
            case Meaning.NEW_SESSION:
                self._leave_session(error)
                self._reopen(error)
            case Meaning.NUMBER:
                if not self._renumbered(error):
                    self._give_up(error)
            case Meaning.WAIT:
                self.state = ProducingState.PAUSED
                self._effects.append(Pause(error))
            case Meaning.REOPEN:
                self._reopen(error)
            case Meaning.END:
                self._give_up(error)
            case Meaning.DROP:
                self._queue.remove(refused)
                self._effects.append(Fail(refused, error))
                self._number_all(refused.first_sequence)
            case other:
                assert_never(other)

    def _renumbered(self, error: DanubeError) -> bool:
        """Whether the batches that have no receipt continue what the broker has, perhaps under other numbers."""
        assert isinstance(error, OutOfSequence)
        if not self._queue or error.expected > self._queue[0].first_sequence:
            return False
        if error.expected < self._queue[0].first_sequence:
            self._number_all(error.expected)
            self._effects.append(NoteNumbered(error.expected))
        return True

    def _leave_session(self, error: DanubeError) -> None:
        """What comes goes under a new session. What may be stored under the old one is not sent again: that would be
        another message to the broker, and stored twice if it was stored.
        """
        self.session = 0
        doubtful = [parcel for parcel in self._queue if parcel.is_doubtful]
        for parcel in doubtful:
            self._queue.remove(parcel)
        self._effects += [Fail(parcel, error) for parcel in doubtful]

    # --- the handle ---------------------------------------------------------------------------------

    def _leave_old_session(self, now: float) -> None:
        late = now - RESEND_SECONDS
        if self.session and any(parcel.is_doubtful and parcel.begun_at < late for parcel in self._queue):
            self._leave_session(SessionUnknown(self.producer_id, self.session))  # it may have ended in the meantime

    def _opened(self, event: Opened) -> None:
        assert self.state in (ProducingState.AWAY, ProducingState.ENDED)
        if self.state is ProducingState.ENDED:
            return
        self.state = ProducingState.OPEN
        self.generation += 1
        self._in_flight_max = event.in_flight_max
        self._frame_room_bytes = event.frame_room_bytes
        self._is_volatile = event.is_volatile
        if (event.producer_id, event.session) != (self.producer_id, self.session):
            self.producer_id, self.session = event.producer_id, event.session
            self._number_all(0)
        self._end_turn()

    def _reopen(self, error: DanubeError) -> None:
        self.state = ProducingState.AWAY
        self._effects.append(Reopen(error))

    def _lost(self, error: DanubeError) -> None:
        if self.state is ProducingState.ENDED:
            return
        self.state = ProducingState.AWAY
        self.generation += 1
        first, end, trouble = self._sent - self._unanswered, self._sent, self._trouble
        self._sent = self._unanswered = 0
        self._trouble = None
        if trouble is not None:
            why = trouble[0]
            then = meaning(why)
            if then is Meaning.END or (then is Meaning.NUMBER and not self._renumbered(why)):
                self._give_up(why)  # it hung up because of that, and would again
                return
        in_flight = [self._queue[place] for place in range(first, end)]
        for parcel in in_flight:
            parcel.is_doubtful = True
        if self._is_volatile:
            for parcel in in_flight:  # at most once: they may have arrived
                self._queue.remove(parcel)
                self._effects.append(Fail(parcel, error))
        elif in_flight and not (error.retryable or isinstance(error, SessionUnknown)):
            # Because of this batch, or of what another lane sent on this connection. A second time decides it.
            if self._suspect is self._queue[0]:
                self._give_up(error)
            else:
                self._suspect = self._queue[0]

    def _give_up(self, error: DanubeError) -> None:
        self._effects.append(GiveUp(error))
        self._fail_all(error)

    def _fail_all(self, error: DanubeError) -> None:
        """Everything that has no receipt has failed. One that comes all the same is not looked at."""
        if self.state is ProducingState.ENDED:
            return
        self.state, self.end, self._trouble = ProducingState.ENDED, error, None
        self.generation += 1
        self._effects += [Fail(parcel, error) for parcel in self.outstanding if parcel is not self._encoding]
        self._queue.clear()
        self._full.clear()
        self._sent = self._unanswered = 0
        self.open = self._new(-1, 0)  # nothing fits into it

    # --- time ---------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        """Messages that have waited too long fail; one that is not even encoded is not sent any more either."""
        if self._look_at is None:
            return
        if now >= self._look_at:
            late = now - self._limits.timeout
            gathered = [parcel for parcel in (*self._full, self.open) if parcel.rows]
            waiting = list(self.outstanding)
            for parcel in waiting:
                if parcel.begun_at <= late:
                    self._effects.append(Expire(parcel) if parcel in gathered else TellLate(parcel))
            self._look_at = now + self._limits.timeout / LOOKS if waiting else None
        if self._look_at is not None:
            self._wake_by(self._look_at)

    def _wake_by(self, at: float) -> None:
        if self._wake_at is None or at < self._wake_at:
            self._wake_at = at
            self._effects.append(SetTimer(at))
