"""What a consumer of one topic asks for, shows, gives back and answers.

    Grant ─► broker ─► Delivered ─► Show: unseen ─► Took: handed over ─► ack, nack ─► Verdict ─► Send ─► Settle
      ▲                   │            │                 │ Tell                          ▲         │
      │                   └ acked      └ Recalled,       └─ not answered                 └─ Lost ──┘
      │                     before       stopped: GiveBack  within TELL_SECONDS            or to be tried again
      └── a quarter of the window at a time: what was taken, given back or dropped

           Subscribed                          Stopped              Closing
    AWAY ─────────────► OPEN         RECEIVING ───────► STOPPED ───────────► CLOSING
      ▲ └────── Lost ────┘               └────────────────────────────────────┘
      └─ Ended, from both ─► ENDED

| event              | AWAY                         | OPEN                                                  | ENDED  |
|--------------------|------------------------------|-------------------------------------------------------|--------|
| Acked, Nacked      | kept, EndTurn                | EndTurn; a copy of it is there: TakeBack              | Refuse |
| TurnEnded, Flushed | -                            | Send what was answered                                | -      |
| Answered           | -                            | Settle, NoteRefused; or again: EndTurn(is_retry)      | -      |
| Opening            | what was answered is counted | -                                                     | -      |
| Subscribed         | OPEN; Send, AskLag, Grant    | -                                                     | -      |
| Delivered          | -                            | Show, or: not shown, Grant; GiveBack if it is stopped | -      |
| Took               | -                            | Grant                                                 | -      |
| TakingBegan        | -                            | SayIn(TellDue)                                        | -      |
| TellDue            | -                            | Tell                                                  | -      |
| Hungered           | -                            | Grant                                                 | -      |
| Recalled           | -                            | TakeBack                                              | -      |
| TakenBack          | -                            | GiveBack, Grant                                       | -      |
| Sought             | nothing is sent of before    | the same; DropAll                                     | -      |
| Lost               | -                            | AWAY, DropAll                                         | -      |
| Ended              | ENDED; DropAll, Settle all   | ENDED; DropAll, Settle all                            | -      |

What is delivered and not handed to the application yet is bounded by the permits: by a fixed window, or by one that
adapts (`pacing.py`). The broker learns what the application has taken and not answered within a moment: the ack
timeout begins then (docs/adr/0007-workers.md). Brokers that do not know this count from sending.

When the connection is lost it is dropped, because the broker delivers it again. Acks are kept until the broker says
that it has applied them (`answers.py`); and if their messages come again all the same, the application does not see
them twice (`repeats.py`). Every delivery says how often the subscription was moved before it, and every ack the same
number: what was delivered before a seek, by whomever, is void. So is what was delivered of a topic that was deleted,
when the consumer is at another one of its name: each is an era of its own.

Invariant: on one handle, what was granted is what was delivered plus what may still come; everything delivered is
taken, given back or dropped once, and owed to the broker as permits once. So the broker never has more permits than the
window.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Final, Generic, assert_never

from pydanube.core.consuming.answers import Answers
from pydanube.core.consuming.pacing import Pacing
from pydanube.core.consuming.repeats import Repeats
from pydanube.core.consuming.unanswered import Unanswered
from pydanube.core.consuming.values import (
    A,
    Acked,
    AllAnswered,
    Answered,
    Arrival,
    AskLag,
    Closing,
    ConsumerLimits,
    Delivered,
    DropAll,
    Dropped,
    Effect,
    Emptied,
    Ended,
    Event,
    Flushed,
    GiveBack,
    Grant,
    Hungered,
    LagKnown,
    Lost,
    Nacked,
    Opening,
    Ranges,
    Recalled,
    Refuse,
    Reviewed,
    SayIn,
    Settle,
    SettledDue,
    Show,
    Sought,
    Stopped,
    Subscribed,
    TakeBack,
    TakenBack,
    TakingBegan,
    Tell,
    TellDue,
    Took,
    TurnEnded,
    Why,
    in_parts,
)
from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.errors import DanubeError

TELL_SECONDS: Final = 0.05  # what is answered within it was never worth a word
SETTLED_SECONDS: Final = 30.0


class State(Enum):
    AWAY = "not open at a broker"
    OPEN = "open"
    ENDED = "for good"


class Mode(IntEnum):
    """What the application wants."""

    RECEIVING = 0
    STOPPED = 1  # no more messages; its answers count
    CLOSING = 2  # its answers count no more


class Hold(Enum):
    """Whether the application may ask for more time for a delivery."""

    HELD = "it may"
    OUTDATED = "it was delivered before a seek"
    LOST = "the connection that it came on is lost"
    UNTOLD = "the broker does not know what the application has"


class ConsumerMachine(Generic[A]):
    """One topic, or one partition. A command has `ranges_max` ranges at most."""

    def __init__(self, limits: ConsumerLimits, *, ranges_max: int) -> None:
        self._limits = limits
        self._ranges_max = ranges_max
        self.state = State.AWAY
        self.mode = Mode.RECEIVING
        self.generation = 0  # of handles: what came on an older one frees no permits, and its answers are ignored
        self.hands_over = False  # the broker wants to know
        self._is_clean = False  # it was opened with nothing to be said before the first messages come
        self._first_messages = 0  # and with this window, if it adapts
        # Permits.
        self._window = limits.window_messages
        self._pacing = Pacing(limits.window_messages) if limits.adapts else None
        self._adapts = False  # the broker has agreed, and the subscription shares
        self.owed_messages = 0  # permits to be granted again; below 0: the window has shrunk
        self.owed_bytes = 0
        self._open = 0  # messages that came and are not answered
        self._is_recalled = False  # since the application last waited: perhaps it was silent for too long
        self.lost_times = 0  # how often the broker gave our whole queue to others, as far as we know
        # What the application has.
        self.is_telling = False  # a timer runs
        self._unanswered = Unanswered()
        self._copies = OffsetRanges()  # in the inbox, or about to be handed over: what came before
        # What it has said.
        self.answers = Answers(ranges_max)
        self.run = self.answers.run
        # What was delivered before.
        self.repeats = Repeats()
        self.seeks = 0  # how often the subscription was moved before the newest delivery
        self._sought_to = 0  # the answer to a seek of ours on this connection had this number
        self.era = 0  # began with a seek, or with another topic of the name: only what was delivered in it counts
        self._effects: list[Effect[A]] = []

    def ack(self, offset: int, era: int) -> Sequence[Effect[A]]:
        """One message, which does not continue the run."""
        if era != self.era:
            return ()  # delivered before a seek: it comes again, or the subscription is beyond it
        if self._refuses:
            return (Refuse(),)
        if not self._copies:
            return self.answers.begin_run(offset, era)
        self._effects = []
        self._acked(((offset, offset + 1),))
        return self._effects

    def step(self, event: Event[A], now: float) -> list[Effect[A]]:
        effects = self._effects = []
        match event:
            case Took(arrival, count):
                self._took(arrival, count)
            case Delivered(arrival):
                self._delivered(arrival, now)
            case TakingBegan():
                self._tell_soon()
            case TurnEnded():
                self.answers.turn_ended()
                self._send_answers(now)
            case Answered(verdict, generation, error):
                if generation == self.generation and verdict in self.answers.unconfirmed:
                    if self._pacing is not None:
                        self._pacing.round_trip(now - verdict.asked_at)
                    effects += self.answers.confirmed(verdict, error)
            case Acked() | Nacked() if self._refuses:
                effects.append(Refuse())
            case Acked(ranges, era):
                if era == self.era:
                    self._acked(ranges)
            case Nacked():
                if event.era == self.era:
                    effects += self.answers.nack(event, is_open=self.state is State.OPEN)
            case Hungered():
                self._hungered()
            case TellDue():
                self.is_telling = False
                self._tell(now)
            case Reviewed():
                self._collect(now)
            case Flushed():
                self._collect(now)
                self._send_answers(now)
            case Opening():
                self._collect(now)
                self._first_messages = 0 if self._pacing is None else self._pacing.window
                # Acks that could not be sent come first, so that these messages are not delivered again.
                self._is_clean = not self.answers.unsent and self.mode is Mode.RECEIVING
            case Recalled():
                self._recalled(event)
            case TakenBack(found, why):
                self._taken_back(found, why)
            case Dropped(arrival):
                self._dropped(arrival)
            case Emptied(arrival):
                if arrival.generation == self.generation:
                    self.owed_bytes += arrival.size
            case Stopped():
                self.mode = max(self.mode, Mode.STOPPED)
            case Closing():
                self.mode = Mode.CLOSING
                self.answers.end_run()
            case Subscribed():
                self._subscribed(event, now)
            case LagKnown(generation, cursor):
                if generation == self.generation:
                    self.repeats.known(cursor + 1)
            case SettledDue(generation):
                if generation == self.generation:
                    self.repeats.settled.clear()
            case Sought(seeks):
                if seeks is None or seeks > self.seeks:
                    if seeks is not None:
                        self._sought_to = seeks
                    self._sought(seeks, now)
            case Lost():
                if self.state is State.OPEN:
                    self._lost()
            case Ended(error):
                self._ended(error)
            case _:
                assert_never(event)
        return effects

    # --- for the lane -------------------------------------------------------------------------------

    @property
    def first_permits(self) -> tuple[int, int, int]:
        """Messages and bytes to begin with, and with how many messages if the broker lets the window adapt."""
        if not self._is_clean:
            return 0, 0, 0
        return self._limits.window_messages, self._limits.window_bytes, self._first_messages

    @property
    def is_starved(self) -> bool:
        """Everything was taken from it: while the application does not ask, the broker may send nothing more."""
        return self._is_recalled and not self._open

    @property
    def has_out(self) -> bool:
        """Whether the application has something that it has not answered. Only known if the broker wants to know."""
        return bool(self._unanswered)

    def hold(self, arrival: Arrival) -> Hold:
        if arrival.era != self.era:
            return Hold.OUTDATED
        if self.state is not State.OPEN or arrival.generation != self.generation:
            return Hold.LOST
        return Hold.HELD if self.hands_over else Hold.UNTOLD

    # --- permits ------------------------------------------------------------------------------------

    def _took(self, arrival: A, count: int) -> None:
        """Frees permits for as many again."""
        more = count - arrival.taken
        if more <= 0 or arrival.generation != self.generation:
            return  # the permits of that connection ended with it
        if self.hands_over or self._copies:
            for first, end in arrival.part(arrival.taken, count):
                self._copies.remove(first, end)
                if self.hands_over:
                    self._unanswered.taken.add(first, end)
        arrival.taken = count
        self._owe(more, arrival.size if count == arrival.count else 0)

    def _dropped(self, arrival: A) -> None:
        if arrival.generation == self.generation:
            self._owe(arrival.count - arrival.taken, arrival.size)

    def _owe(self, messages: int, size: int = 0) -> None:
        self.owed_messages += messages
        self.owed_bytes += size
        wanted = self.owed_messages > 0 and 4 * self.owed_messages >= self._window
        if wanted or 4 * self.owed_bytes >= self._limits.window_bytes:
            self._grant()

    def _grant(self, messages_min: int = 0) -> None:
        if self.state is State.OPEN and self.mode is Mode.RECEIVING:
            messages = max(messages_min, self.owed_messages)
            self._effects.append(Grant(messages, self.owed_bytes))
            self.owed_messages -= messages
            self.owed_bytes = 0

    def _hungered(self) -> None:
        if self._is_recalled:
            self._is_recalled = False
            self._grant(1)  # also if the window has shrunk below what is granted: a stalled consumer must ask
        elif self.owed_messages > 0:
            self._grant()

    def _pace(self, now: float, answered: int = 0) -> None:
        if self._adapts and self._pacing is not None:
            change = self._pacing.tick(now, is_busy=self._open > 0, answered=answered)
            if change:
                self._window += change
                self._owe(change)

    # --- what comes ---------------------------------------------------------------------------------

    def _delivered(self, arrival: A, now: float) -> None:
        if arrival.seeks < self._sought_to:
            self._dropped(arrival)  # it was in flight when the seek was sent, and is not wanted any more
            return
        if arrival.seeks != self.seeks:
            self._sought(arrival.seeks, now)
        repeats = self.repeats
        arrival.era, arrival.is_copy = self.era, repeats.is_copy(arrival)
        repeats.epoch = max(repeats.epoch, arrival.epoch)
        if repeats.settled:
            rest, settled = repeats.without_settled(arrival)
            for each in settled:
                self._acked((each,))
            if not self._keep(arrival, rest):
                return
        repeats.delivered_end = max(repeats.delivered_end, arrival.ranges[-1][1])
        if arrival.is_copy:
            if not self._keep(arrival, self.answers.without_acked(arrival.ranges)):
                return
            self.answers.end_run()  # from now on an ack may be of something that is there twice
            older = [part for first, end in arrival.ranges for part in self._copies.overlap(first, end)]
            if older:
                self._effects.append(TakeBack(OffsetRanges(older), Why.REPLACED))
            for first, end in arrival.ranges:
                self._copies.add(first, end)
        if self.mode is not Mode.RECEIVING:
            if self.hands_over:
                self._give_back(OffsetRanges(arrival.ranges))
            return  # else it goes to others when we close
        was_idle, self._open = not self._open, self._open + arrival.count
        if was_idle:
            self._pace(now)
        self._effects.append(Show(arrival))

    def _keep(self, arrival: A, rest: Ranges) -> bool:
        """Only these of it are handed over; False: none."""
        if not rest:
            self._dropped(arrival)
            return False
        self.owed_messages += arrival.keep(rest)
        return True

    def _recalled(self, event: Recalled) -> None:
        """What the application has not got of these is given back."""
        self._is_recalled, self.lost_times = True, event.taken
        if event.seeks == self.seeks and self.hands_over:
            self._effects.append(TakeBack(OffsetRanges(event.ranges), Why.RECALLED))

    def _taken_back(self, found: OffsetRanges, why: Why) -> None:
        if why is not Why.REPLACED:
            for first, end in found:
                self._copies.remove(first, end)
        if why is Why.STOPPED or not found:
            return
        self._open = max(0, self._open - found.count)
        if why is not Why.RECALLED:
            self._owe(found.count)
        else:
            # Permits that are granted when the application takes or wants something: until then it has enough.
            self.owed_messages += found.count
            self._give_back(found)

    def _give_back(self, unseen: OffsetRanges) -> None:
        if self.state is State.OPEN:
            self._effects += [GiveBack(ranges) for ranges in in_parts(unseen, self._ranges_max)]

    # --- what the application has -------------------------------------------------------------------

    def _tell_soon(self) -> None:
        """Reports to the broker, after a moment, what is not answered by then."""
        if not self.is_telling and self.hands_over:
            self.is_telling = True
            self._effects.append(SayIn(TELL_SECONDS, TellDue()))

    def _tell(self, now: float) -> None:
        self._collect(now)
        fresh = self._unanswered.take_untold()
        if self.state is State.OPEN and self.hands_over:
            self._effects += [Tell(ranges) for ranges in in_parts(fresh, self._ranges_max)]
            for first, end in fresh:
                self._unanswered.out.add(first, end)

    def _forget_taken(self) -> None:
        self._unanswered.forget()
        self._effects.append(AllAnswered())

    # --- what it says -------------------------------------------------------------------------------

    @property
    def _refuses(self) -> bool:
        return self.mode is Mode.CLOSING or self.state is State.ENDED

    def _acked(self, ranges: Ranges) -> None:
        if self._copies and any(self._copies.overlap(first, end) for first, end in ranges):
            self._effects.append(TakeBack(OffsetRanges(ranges), Why.COPIES))  # what is acknowledged is not shown again
        self._effects += self.answers.ack(ranges)

    def _collect(self, now: float) -> None:
        """Nacks and acks so far, as commands may have them."""
        answered = 0
        for offsets in self.answers.collect(self.seeks):
            answered += offsets.count
            if self.hands_over:
                self._unanswered.answer(offsets)
                self._tell_soon()  # and forget them then
                if not self._unanswered.out:
                    self._effects.append(AllAnswered())
        if answered:
            self._open = max(0, self._open - answered)
            self._pace(now, answered)
            if not self._open:
                self._effects.append(AllAnswered())

    def _send_answers(self, now: float) -> None:
        if self.state is State.OPEN:
            self._collect(now)
            self._effects += self.answers.send(self.generation, now)

    # --- the handle ---------------------------------------------------------------------------------

    def _subscribed(self, event: Subscribed, now: float) -> None:
        if self.state is State.ENDED:
            return
        self.state = State.OPEN
        self.generation += 1
        self.owed_messages = self.owed_bytes = self.lost_times = 0
        self.hands_over = event.hands_over
        self._adapts = event.hands_over and event.shares and self._pacing is not None
        self._window = self._first_messages if self._adapts else self._limits.window_messages
        self._sought_to = 0  # nothing of the connection before comes here, and the topic may have been made anew
        self._collect(now)
        repeats = self.repeats
        if 0 < repeats.epoch < event.created:
            self._effects += self.answers.forget_unsent()
            self.era += 1
        if repeats.epoch:
            repeats.remember(self.answers.unsent, event.next_unacked)
            if repeats.settled:
                self._effects.append(SayIn(SETTLED_SECONDS, SettledDue(self.generation)))
        self._send_answers(now)
        if self.mode is not Mode.RECEIVING and self.hands_over:  # it came back for its acks alone
            self._effects.append(GiveBack((), stop=True))
        if not self._is_clean:
            if repeats.settled:  # and nothing is under way to us, which the answer could overtake
                self._effects.append(AskLag(self.generation))
            self.owed_messages, self.owed_bytes = self._window, self._limits.window_bytes
            self._grant()

    def _sought(self, seeks: int | None, now: float) -> None:
        """Nothing of what was delivered before counts any more, and no ack of it may be sent again.

        `seeks` is None if the broker does not count them.
        """
        self._collect(now)
        self._effects += self.answers.void()
        self.repeats.settled.clear()
        self._drop_all()
        self._forget_taken()
        if seeks is not None:
            self.seeks = seeks
            self.era += 1

    def _drop_all(self) -> None:
        self._effects.append(DropAll())
        self._open = 0
        self._copies.clear()

    def _lost(self) -> None:
        self.state = State.AWAY
        self.generation += 1
        self._effects += self.answers.lost()
        self._drop_all()
        self._forget_taken()
        self.repeats.lost()

    def _ended(self, error: DanubeError) -> None:
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        self.generation += 1
        self.answers.end_run()
        self._drop_all()
        self._effects += [Settle(verdict, error) for verdict in self.answers.verdicts]
