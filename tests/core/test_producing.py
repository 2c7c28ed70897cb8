"""What a producer sends, when, and what follows from every answer: decided without a socket, a clock or a loop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.commit.sessions import Sessions
from pydanube.core.producing.machine import (
    EAGER,
    LOOKS,
    RESEND_SECONDS,
    Meaning,
    ProducerMachine,
    ProducingState,
    meaning,
)
from pydanube.core.producing.values import (
    AwaitTurn,
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
    Parcel,
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
    ClientClosed,
    DanubeError,
    DiskFull,
    InvalidBatch,
    LogBusy,
    LogClosed,
    LogFull,
    LogStopped,
    MessageTooLarge,
    NotServed,
    OutOfSequence,
    ProducerFenced,
    ProducerUnknown,
    ProtocolViolation,
    RateLimited,
    Refused,
    SessionUnknown,
    TopicUnknown,
    Unreachable,
)

TOPIC, P, S = "/default/orders", 7, (1 << 32) + 1
SLOW, FULL, AWAY = RateLimited(TOPIC, 1), DiskFull("wal"), Unreachable("danube://b", "it hung up")
LARGE, FENCED = MessageTooLarge(9, 8), ProducerFenced(P, S, S + 1)


class Box(Parcel):
    """Messages are numbers."""

    __slots__ = ("numbers",)

    def __init__(self, size_max: int, rows_max: int) -> None:
        super().__init__(size_max, rows_max)
        self.numbers: list[int] = []

    def halves(self) -> tuple[Box, Box]:
        middle = self.rows // 2
        return self._part(self.numbers[:middle]), self._part(self.numbers[middle:])

    def _part(self, numbers: list[int]) -> Box:
        part = Box(self.size_max, self.rows_max)
        part.numbers, part.rows, part.begun_at = numbers, len(numbers), self.begun_at
        part.size = self.size * len(numbers) // self.rows
        return part

    def __repr__(self) -> str:
        return f"Box{self.numbers}"


@dataclass
class ProducerDriver:
    """A machine, and what a lane does about its effects: all of it, in order."""

    batch_messages: int = 100
    batch_bytes: int = 1000
    linger: float = 0.0
    timeout: float = 8.0
    in_flight_max: int = 8
    frame_room: int = 10**6
    encodes_at_once: bool = True
    machine: ProducerMachine[Box] = field(init=False)
    now: float = 100.0
    sent: deque[SendParcel[Box]] = field(default_factory=deque)  # without an answer, on this handle
    effects: list[Effect[Box]] = field(default_factory=list)  # all but AwaitTurn, since the last look
    stored: list[int] = field(default_factory=list)
    failed: dict[int, DanubeError] = field(default_factory=dict)
    encoding: Box | None = None
    turn_is_due: bool = False
    wake_at: float | None = None
    numbered: int = 0

    def __post_init__(self) -> None:
        limits = ProducerLimits(
            batch_bytes=self.batch_bytes,
            batch_messages=self.batch_messages,
            linger_seconds=self.linger,
            timeout=self.timeout,
        )
        self.machine = ProducerMachine(Box, limits)

    def feed(self, event: Event[Box]) -> None:
        self.carry_out(self.machine.step(event, self.now))

    def answered(self, box: Box, generation: int, answer: object) -> None:
        self.carry_out(self.machine.answered(box, generation, answer, self.now))

    def carry_out(self, effects: list[Effect[Box]]) -> None:
        for effect in effects:
            if not isinstance(effect, AwaitTurn):
                self.effects.append(effect)
            match effect:
                case AwaitTurn():
                    assert not self.turn_is_due, "a turn ends once"
                    self.turn_is_due = True
                case Encode(box):
                    assert self.encoding is None, "one at a time"
                    self.encoding = box
                    if self.encodes_at_once:
                        self.encode()
                case SendParcel():
                    self.sent.append(effect)
                    assert len(self.sent) <= self.in_flight_max
                case Resolve(box):
                    self.end(box.numbers, None)
                case Fail(box, error):
                    self.end(box.numbers, error)
                case Reopen(error):
                    self.lose(error)
                case GiveUp(error):
                    self.feed(ProducerEnded(error))
                case SetTimer(at):
                    self.wake_at = at
                case _:
                    pass

    def encode(self) -> None:
        if self.encoding is not None:
            box, self.encoding = self.encoding, None
            self.carry_out(self.machine.encoded(box, box.size, self.now))

    def end(self, numbers: list[int], error: DanubeError | None) -> None:
        for number in numbers:
            assert number not in self.stored and number not in self.failed, "every message ends once"
            if error is None:
                self.stored.append(number)
            else:
                self.failed[number] = error

    def append(self, count: int = 1, size: int = 10) -> None:
        """As a lane does it: the machine hears of the first and of the last of a batch."""
        for _ in range(count):
            box = self.machine.open
            if box.size + size > box.size_max:
                assert self.machine.end is None
                self.feed(Overflowed())
                box = self.machine.open
            box.numbers.append(self.numbered)
            self.numbered += 1
            box.size += size
            box.rows += 1
            if box.rows == 1 or box.rows >= box.rows_max:
                self.carry_out(self.machine.appended(self.now))

    def turn(self) -> None:
        while self.turn_is_due:
            self.turn_is_due = False
            self.feed(TurnCame())

    def send(self, *sizes: int) -> None:
        """Batches of so many messages, each at the end of a turn; the machine sends what it may."""
        for size in sizes:
            self.append(size)
            self.feed(FlushRequested())
            self.turn()

    def open(self, session: int = S, **changes: Any) -> ProducerDriver:
        self.feed(OpeningBegan())
        event = Opened(
            producer_id=P if session else 0,
            session=session,
            in_flight_max=self.in_flight_max,
            frame_room_bytes=self.frame_room,
            **changes,
        )
        self.feed(event)
        self.turn()
        return self

    def lose(self, error: DanubeError = AWAY) -> None:
        self.sent.clear()
        self.feed(HandleLost(error))

    def answer(self, *answers: object) -> None:
        for answer in answers:
            send = self.sent.popleft()
            self.answered(send.parcel, send.generation, answer)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wake_at is not None and self.wake_at <= until:
            self.now, self.wake_at = self.wake_at, None
            self.feed(TimerFired())
            self.turn()
        self.now = until

    def look(self) -> list[Effect[Box]]:
        effects, self.effects = self.effects, []
        return effects

    @property
    def in_flight(self) -> list[list[int]]:
        return [send.parcel.numbers for send in self.sent]

    @property
    def sequences(self) -> list[int]:
        return [send.parcel.first_sequence for send in self.sent]


# --- gathering ----------------------------------------------------------------------------------------


def test_what_is_appended_in_one_turn_travels_together() -> None:
    driver = ProducerDriver().open()
    driver.append(3)
    assert driver.in_flight == [] and driver.turn_is_due
    driver.turn()
    assert driver.in_flight == [[0, 1, 2]]


def test_beyond_two_in_flight_a_batch_waits_for_an_answer_and_grows() -> None:
    driver = ProducerDriver().open()
    for _ in range(5):
        driver.append()
        driver.turn()
    assert driver.in_flight == [[0], [1]] and len(driver.sent) == EAGER
    driver.answer("receipt")
    assert driver.in_flight == [[1], [2, 3, 4]]


def test_a_batch_that_is_full_does_not_wait_until_eight_are_in_flight() -> None:
    driver = ProducerDriver(batch_messages=2).open()
    driver.append(20)
    driver.turn()
    assert driver.in_flight == [[n, n + 1] for n in range(0, 16, 2)]
    driver.answer("receipt")
    assert driver.in_flight[-1] == [16, 17] and len(driver.sent) == 8


def test_what_cannot_be_sent_yet_is_not_encoded_yet() -> None:
    driver = ProducerDriver(batch_messages=1, in_flight_max=3).open()
    driver.append(5)
    driver.turn()
    assert sum(isinstance(each, Encode) for each in driver.effects) == 3


def test_a_batch_is_cut_before_the_message_that_does_not_fit() -> None:
    driver = ProducerDriver(batch_bytes=100).open()
    driver.append(1, size=60)
    driver.append(1, size=41)
    driver.append(1, size=59)
    driver.append(1, size=1)
    driver.feed(FlushRequested())
    driver.turn()
    assert driver.in_flight == [[0], [1, 2], [3]], "two messages of 100 bytes fit exactly"


def test_a_message_larger_than_a_batch_goes_alone() -> None:
    driver = ProducerDriver(batch_bytes=100).open()
    driver.append(1, size=10)
    driver.append(1, size=500)
    driver.append(1, size=10)
    driver.feed(FlushRequested())
    driver.turn()
    assert driver.in_flight == [[0], [1], [2]]


def test_one_that_sends_message_by_message_does_not_wait_for_the_end_of_the_turn() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.answer("receipt")
    driver.append()
    assert driver.in_flight == [[1]]
    driver.append()
    driver.turn()
    driver.answer("receipt", "receipt")
    driver.append(2)
    assert driver.in_flight == [], "two were on their way at the same time: it is no such producer"


def test_a_batch_lingers_and_flush_does_not_wait_for_it() -> None:
    driver = ProducerDriver(linger=0.5).open()
    driver.append()
    driver.turn()
    assert driver.in_flight == [] and driver.wake_at == 100.5
    driver.pass_time(0.4)
    assert driver.in_flight == []
    driver.pass_time(0.1)
    assert driver.in_flight == [[0]]
    driver.append()
    driver.feed(FlushRequested())
    driver.turn()
    assert driver.in_flight == [[0], [1]]


def test_a_flush_sends_what_is_there_although_two_are_in_flight() -> None:
    driver = ProducerDriver().open()
    driver.send(1, 1, 1)
    assert driver.in_flight == [[0], [1], [2]]


def test_a_batch_too_long_for_a_frame_goes_in_halves_and_in_order() -> None:
    driver = ProducerDriver(frame_room=20).open()
    driver.append(5)
    driver.turn()
    assert driver.in_flight == [[0, 1], [2], [3, 4]] and driver.sequences == [0, 2, 3]


def test_one_message_too_long_for_a_frame_fails_and_those_behind_it_go() -> None:
    driver = ProducerDriver(frame_room=20, batch_messages=1).open()
    driver.append(1, size=30)
    driver.append(1)
    driver.turn()
    assert isinstance(driver.failed[0], MessageTooLarge) and driver.in_flight == [[1]] and driver.sequences == [0]


def test_what_cannot_be_encoded_fails_alone() -> None:
    driver = ProducerDriver(encodes_at_once=False, batch_messages=1).open()
    driver.append(2)
    driver.turn()
    assert driver.encoding is not None
    box, driver.encoding, driver.encodes_at_once = driver.encoding, None, True
    driver.feed(NotEncoded(box, InvalidBatch("a surrogate")))
    assert isinstance(driver.failed[0], InvalidBatch) and driver.in_flight == [[1]]


def test_nothing_is_sent_or_encoded_while_a_batch_is_being_encoded_elsewhere() -> None:
    driver = ProducerDriver(encodes_at_once=False, batch_messages=2).open()
    driver.append(4)
    driver.turn()
    driver.look()
    driver.append(2)
    driver.turn()
    assert driver.look() == []
    driver.encode()
    assert driver.in_flight == [[0, 1]] and [type(each) for each in driver.look()] == [SendParcel, Encode]


def test_a_batch_that_was_encoded_before_a_new_session_gets_its_number_there() -> None:
    driver = ProducerDriver(encodes_at_once=False).open()
    driver.machine.next_sequence = 40
    driver.send(2)
    driver.lose()
    driver.feed(SessionLost(SessionUnknown(P, S)))
    driver.open(session=S + 1)
    driver.encode()
    assert driver.in_flight == [[0, 1]] and driver.sequences == [0] and driver.machine.session == S + 1


# --- answers ------------------------------------------------------------------------------------------


def test_receipts_end_messages_in_order() -> None:
    driver = ProducerDriver().open()
    driver.send(2, 1)
    driver.answer("a", "b")
    assert driver.stored == [0, 1, 2]
    assert [each.receipt for each in driver.effects if isinstance(each, Resolve)] == ["a", "b"]


def test_sequences_count_messages() -> None:
    driver = ProducerDriver().open()
    driver.send(3, 1, 2)
    assert driver.sequences == [0, 3, 4] and driver.machine.next_sequence == 6


def test_without_a_session_nothing_is_numbered() -> None:
    driver = ProducerDriver().open(session=0)
    driver.send(3, 1)
    assert driver.sequences == [0, 0]


@pytest.mark.parametrize(
    "error", [SLOW, FULL, LogBusy(2, 1), LogFull(2, 1, "no upload")], ids=lambda error: type(error).__name__
)
def test_what_passes_is_waited_for_and_then_everything_is_sent_again_unchanged(error: DanubeError) -> None:
    driver = ProducerDriver().open()
    driver.send(2, 1)
    driver.look()
    driver.answer(error)
    driver.append()
    driver.turn()
    assert driver.look()[1:] == [] and driver.machine.state is ProducingState.DRAINING, (
        "nothing is sent before the last answer"
    )
    driver.answer(OutOfSequence(P, 2, 0))
    assert driver.look() == [Pause(error)] and driver.in_flight == []
    driver.turn()
    assert driver.in_flight == []
    driver.feed(Resumed())
    assert driver.in_flight == [[0, 1], [2]] and driver.sequences == [0, 2], "two in flight: the third waits"


def test_a_refusal_for_good_fails_one_batch_and_those_behind_it_get_its_numbers() -> None:
    driver = ProducerDriver().open()
    driver.send(1, 2, 3)
    driver.answer("receipt", LARGE, OutOfSequence(P, 3, 1))
    assert driver.failed == {1: LARGE, 2: LARGE}
    assert driver.in_flight == [[3, 4, 5]] and driver.sequences == [1] and driver.machine.next_sequence == 4


def test_the_first_error_is_the_cause() -> None:
    driver = ProducerDriver().open()
    driver.send(1, 1, 1)
    driver.answer(LARGE, FENCED, SLOW)
    assert driver.failed == {0: LARGE} and driver.in_flight == [[1], [2]]


@pytest.mark.parametrize("error", [FENCED, InvalidBatch("x"), ProtocolViolation("x")])
def test_after_some_errors_there_is_nothing_left_to_say(error: DanubeError) -> None:
    driver = ProducerDriver().open()
    driver.send(1, 1)
    driver.append()
    driver.answer(error, OutOfSequence(P, 1, 0))
    assert driver.failed == {0: error, 1: error, 2: error}
    assert GiveUp(error) in driver.effects and driver.machine.end is error
    assert driver.machine.open.size_max < 0, "whoever appends has to ask, and hears why not"


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (SessionUnknown(P, S), Meaning.NEW_SESSION),
        (OutOfSequence(P, 4, 2), Meaning.NUMBER),
        (LogStopped("twice"), Meaning.REOPEN),
        (LogClosed(TOPIC), Meaning.REOPEN),
        (NotServed(TOPIC, "moved"), Meaning.REOPEN),
        (ProducerUnknown(P), Meaning.REOPEN),
        (AWAY, Meaning.REOPEN),
        (LARGE, Meaning.DROP),
        (TopicUnknown(TOPIC), Meaning.DROP),
        (Refused("no"), Meaning.DROP),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, DanubeError) else value.name,
)
def test_every_error_means_one_thing(error: DanubeError, then: Meaning) -> None:
    assert meaning(error) is then


def test_without_a_session_one_is_refused_and_the_next_one_stored() -> None:
    driver = ProducerDriver(batch_messages=1).open(session=0)
    driver.append(4)
    driver.turn()
    driver.answer(SLOW, "receipt", LARGE, "receipt")
    assert driver.stored == [1, 3] and driver.look()[-1] == Pause(SLOW)
    driver.feed(Resumed())
    assert driver.in_flight == [[0], [2]]
    driver.answer("receipt", LARGE)
    assert driver.stored == [1, 3, 0] and driver.failed == {2: LARGE}


def test_in_a_session_a_receipt_behind_a_refusal_is_a_mistake() -> None:
    driver = ProducerDriver().open()
    driver.send(1, 1)
    driver.answer(SLOW, "receipt")
    assert isinstance(driver.machine.end, ProtocolViolation) and sorted(driver.failed) == [0, 1]


@pytest.mark.parametrize("session", [S, 0])
def test_an_answer_out_of_turn_or_without_a_receipt_is_a_mistake(session: int) -> None:
    driver = ProducerDriver().open(session)
    driver.send(1, 1)
    driver.sent.rotate(1)
    driver.answer("receipt")
    assert isinstance(driver.machine.end, ProtocolViolation)
    driver = ProducerDriver().open(session)
    driver.send(1)
    driver.answer(None)
    assert isinstance(driver.machine.end, ProtocolViolation)


def test_a_second_answer_to_a_batch_is_a_mistake() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    [send] = driver.sent
    driver.answer("receipt")
    driver.answered(send.parcel, send.generation, "receipt")
    assert isinstance(driver.machine.end, ProtocolViolation) and driver.stored == [0]


def test_a_broker_that_has_less_than_it_acknowledged_is_given_the_numbers_it_expects() -> None:
    driver = ProducerDriver().open()
    driver.send(2)
    driver.answer("receipt")
    driver.send(1, 1)
    driver.answer(OutOfSequence(P, 2, 1), OutOfSequence(P, 3, 1))
    assert NoteNumbered(1) in driver.effects
    assert driver.in_flight == [[2], [3]] and driver.sequences == [1, 2]


def test_a_broker_that_has_more_than_was_sent_is_somebody_elses() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.answer(OutOfSequence(P, 0, 500))
    assert isinstance(driver.machine.end, OutOfSequence)


# --- handles and sessions -----------------------------------------------------------------------------


def test_what_has_no_answer_is_sent_again_first_unchanged_and_in_order() -> None:
    driver = ProducerDriver().open()
    driver.send(1, 2, 1)
    driver.answer("receipt")
    late = driver.sent[0]
    driver.lose()
    driver.append()
    assert driver.in_flight == [] and driver.machine.state is ProducingState.AWAY
    driver.turn()
    driver.open()
    assert driver.in_flight == [[1, 2], [3]] and driver.sequences == [1, 3]
    driver.answered(late.parcel, late.generation, "receipt of the old handle")
    assert driver.stored == [0] and driver.machine.end is None
    driver.answer("duplicate", "receipt")
    assert driver.stored == [0, 1, 2, 3] and driver.in_flight == [[4]]


def test_a_broker_that_takes_fewer_at_a_time_is_sent_fewer_again() -> None:
    driver = ProducerDriver(batch_messages=1).open()
    driver.append(8)
    driver.turn()
    driver.lose()
    driver.in_flight_max = 3
    driver.open()
    assert driver.in_flight == [[0], [1], [2]]
    driver.answer("receipt")
    assert driver.in_flight == [[1], [2], [3]]


def test_a_broker_that_leaves_is_sent_nothing_more_and_still_heard() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.feed(Leaving())
    driver.append()
    driver.turn()
    assert driver.in_flight == [[0]]
    driver.answer("receipt")
    assert driver.stored == [0] and driver.in_flight == []
    driver.lose()
    driver.open()
    assert driver.in_flight == [[1]]


def test_a_stopped_log_is_left_and_everything_sent_again_elsewhere() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.answer(LogStopped("twice"))
    assert isinstance(driver.look()[-1], Reopen)
    assert driver.machine.state is ProducingState.AWAY and driver.failed == {}
    driver.open()
    assert driver.in_flight == [[0]] and driver.sequences == [0]


def test_under_a_new_session_only_goes_what_was_certainly_not_stored() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.answer("receipt")
    driver.send(1)
    driver.lose()  # nobody knows
    driver.send(1)
    driver.open()
    driver.answer(SessionUnknown(P, S), SessionUnknown(P, S))
    assert list(driver.failed) == [1] and driver.machine.session == 0
    driver.open(session=S + 1)
    assert driver.in_flight == [[2]] and driver.sequences == [0]


@pytest.mark.parametrize("error", [LogStopped("twice"), NotServed(TOPIC, "moved")])
def test_an_answer_that_leaves_it_open_makes_a_batch_doubtful(error: DanubeError) -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.answer(error)
    driver.feed(SessionLost(SessionUnknown(P, S)))
    assert list(driver.failed) == [0]


@pytest.mark.parametrize("error", [LogClosed(TOPIC), ProducerUnknown(P)])
def test_an_answer_that_says_no_does_not_make_a_batch_doubtful(error: DanubeError) -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.answer(error)
    driver.feed(SessionLost(SessionUnknown(P, S)))
    driver.open(session=S + 1)
    assert driver.failed == {} and driver.in_flight == [[0]]


def test_what_is_in_doubt_is_not_sent_again_after_a_day() -> None:
    driver = ProducerDriver(timeout=10**6).open()
    driver.send(1)
    driver.lose()
    driver.now += RESEND_SECONDS + 1
    driver.append()
    driver.feed(OpeningBegan())
    assert isinstance(driver.failed[0], SessionUnknown) and driver.machine.session == 0
    driver.open(session=S + 1)
    assert driver.in_flight == [[1]]


def test_what_is_in_doubt_for_less_than_a_day_is_sent_again() -> None:
    driver = ProducerDriver(timeout=10**6).open()
    driver.send(1)
    driver.lose()
    driver.now += RESEND_SECONDS - 1
    driver.open()
    assert driver.in_flight == [[0]]


def test_to_a_non_reliable_topic_nothing_is_sent_twice() -> None:
    driver = ProducerDriver().open(session=0, is_volatile=True)
    driver.send(1, 1)
    driver.append()
    driver.lose()
    assert driver.failed == {0: AWAY, 1: AWAY}
    driver.open(session=0, is_volatile=True)
    assert driver.in_flight == [[2]]


def test_a_broker_that_hangs_up_twice_because_of_the_same_batch_is_not_asked_a_third_time() -> None:
    driver, why = ProducerDriver().open(), ProtocolViolation("too much")
    driver.send(1)
    driver.lose(why)
    driver.open()
    assert driver.in_flight == [[0]]
    driver.lose(why)
    assert driver.failed == {0: why} and driver.machine.end is why


def test_one_that_got_further_in_between_is_asked_again() -> None:
    driver, why = ProducerDriver().open(), ProtocolViolation("too much")
    driver.send(1, 1)
    driver.lose(why)
    driver.open()
    driver.answer("receipt")
    driver.lose(why)
    assert driver.machine.end is None


def test_another_batch_is_not_to_blame_for_the_one_before() -> None:
    driver, why = ProducerDriver().open(), ProtocolViolation("too much")
    driver.send(1, 1)
    driver.lose(why)
    driver.open()
    driver.answer(LARGE, OutOfSequence(P, 1, 0))
    driver.lose(why)
    assert driver.machine.end is None


def test_without_a_session_any_receipt_shows_that_the_broker_goes_on() -> None:
    driver, why = ProducerDriver().open(session=0), ProtocolViolation("too much")
    driver.send(1, 1)
    driver.lose(why)
    driver.open(session=0)
    driver.answer(SLOW, "receipt")
    driver.feed(Resumed())
    driver.lose(why)
    assert driver.machine.end is None


def test_a_broker_that_refuses_for_good_and_hangs_up_means_it() -> None:
    driver = ProducerDriver().open()
    driver.send(1, 1)
    driver.answer(FENCED)
    driver.lose()
    assert driver.failed == {0: FENCED, 1: FENCED}


def test_a_broker_that_hangs_up_on_a_number_is_given_the_one_it_wants() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    driver.answer("receipt")
    driver.send(1, 1)
    driver.answer(OutOfSequence(P, 1, 0))
    driver.lose()
    driver.open()
    assert driver.in_flight == [[1], [2]] and driver.sequences == [0, 1]


def test_an_error_that_passes_is_forgotten_with_its_connection() -> None:
    driver = ProducerDriver().open()
    driver.send(1, 1)
    driver.answer(SLOW)
    driver.lose()
    driver.open()
    assert driver.in_flight == [[0], [1]] and driver.machine.state is ProducingState.OPEN


# --- ends ---------------------------------------------------------------------------------------------


def test_everything_fails_when_it_ends_wherever_it_is() -> None:
    driver, closed = ProducerDriver(encodes_at_once=False, batch_messages=2).open(), ClientClosed("it")
    driver.append(5)
    driver.turn()
    driver.encode()
    [send] = driver.sent
    driver.feed(ProducerEnded(closed))
    assert sorted(driver.failed) == [0, 1, 4], "the second is being encoded"
    driver.encode()
    assert sorted(driver.failed) == [0, 1, 2, 3, 4] and list(driver.machine.outstanding) == []
    driver.answered(send.parcel, send.generation, "receipt")
    assert driver.stored == []


def test_after_the_end_nothing_happens_any_more() -> None:
    driver = ProducerDriver().open()
    driver.feed(ProducerEnded(ClientClosed("it")))
    driver.look()
    for event in (
        FlushRequested(),
        TurnCame(),
        TimerFired(),
        Resumed(),
        HandleLost(AWAY),
        OpeningBegan(),
        Leaving(),
        ProducerEnded(AWAY),
    ):
        driver.feed(event)
    assert driver.look() == [] and not driver.turn_is_due


def test_outstanding_is_everything_without_an_end_oldest_first() -> None:
    driver = ProducerDriver(encodes_at_once=False, batch_messages=2).open()
    driver.append(5)
    driver.turn()
    assert [box.numbers for box in driver.machine.outstanding] == [[0, 1], [2, 3], [4]]


# --- deadlines ----------------------------------------------------------------------------------------


def test_who_waits_too_long_is_told_and_what_was_not_sent_is_not_sent_any_more() -> None:
    driver = ProducerDriver(timeout=8.0).open()
    driver.send(1)
    driver.lose()
    driver.append()
    driver.look()
    driver.pass_time(8.0 - 8.0 / LOOKS)
    assert not any(isinstance(each, TellLate | Expire) for each in driver.look())
    driver.pass_time(2 * 8.0 / LOOKS)
    late = [each for each in driver.look() if isinstance(each, TellLate | Expire)]
    sent, open_ = driver.machine.outstanding
    assert late[:2] == [TellLate(sent), Expire(open_)]


def test_who_goes_on_sending_is_told_in_time_all_the_same() -> None:
    driver = ProducerDriver(timeout=8.0)
    for _ in range(20):
        driver.append()
        driver.feed(FlushRequested())
        driver.pass_time(0.5)
    assert any(isinstance(each, Expire) for each in driver.effects)


def test_what_was_taken_out_entirely_is_nothing() -> None:
    driver = ProducerDriver(batch_messages=1)
    driver.append(2)
    for box in list(driver.machine.outstanding)[:1]:
        box.rows, box.numbers, box.size = 0, [], 0
    assert [box.numbers for box in driver.machine.outstanding] == [[1]]
    driver.open()
    assert driver.in_flight == [[1]]


def test_nobody_is_woken_when_nothing_is_outstanding() -> None:
    driver = ProducerDriver().open()
    driver.send(1)
    assert driver.wake_at is not None
    driver.answer("receipt")
    driver.pass_time(10.0)
    assert driver.wake_at is None
    driver.append()
    assert driver.wake_at == driver.now + 8.0 / LOOKS


# --- against a broker ---------------------------------------------------------------------------------


@dataclass
class ModelBroker:
    """Judges batches with the sessions of a real log (core/commit), and loses, refuses and forgets."""

    rng: Random
    idempotent: bool
    sessions: Sessions = field(default_factory=Sessions)
    session: int = 0
    stored: list[tuple[int, ...]] = field(default_factory=list)
    asked: deque[tuple[SendParcel[Box], int]] = field(default_factory=deque)  # with the number that it has
    is_well: bool = False
    hole: int | None = None  # was refused on this connection: what is behind it is not looked at

    def judge(self, box: Box, first_sequence: int) -> object:
        if self.idempotent and self.hole not in (None, first_sequence):
            return OutOfSequence(P, first_sequence, self.hole or 0)
        self.hole = None
        numbers = tuple(box.numbers)
        if 7 in [number % 11 for number in numbers]:  # whenever it comes
            self.hole = first_sequence
            return LARGE
        if not self.is_well and self.rng.random() < 0.1:
            self.hole = first_sequence
            return self.rng.choice([SLOW, FULL, LogClosed(TOPIC)])
        if not self.idempotent:
            self.stored.append(numbers)
            return len(self.stored)
        crc = hash(numbers) & 0xFFFFFFFF
        try:
            before = self.sessions.check(P, self.session, first_sequence, box.rows, crc)
        except Refused as error:
            return error
        if before is not None:
            return before.base_offset + 1
        self.sessions.accepted(P, self.session, first_sequence, box.rows, crc, len(self.stored), 1, 0)
        self.stored.append(numbers)
        return len(self.stored)


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=200, deadline=None)
def test_whatever_a_broker_does_messages_end_once_and_in_order(seed: int, idempotent: bool) -> None:
    """Answers are lost, batches are refused, connections end, sessions are forgotten; nothing is stored twice."""
    rng = Random(seed)
    driver = ProducerDriver(batch_messages=3, in_flight_max=rng.choice([1, 3, 8]), encodes_at_once=rng.random() < 0.5)
    broker = ModelBroker(rng, idempotent)
    seen: dict[Box, tuple[int, int]] = {}  # the number that a batch went out with, and in which session
    unknown: set[Box] = set()  # batches that went out, and of which nobody has said since what became of them
    receipts: dict[int, object] = {}

    def open_again() -> None:
        broker.hole = None
        driver.feed(OpeningBegan())
        if idempotent and (
            not driver.machine.session or not broker.session or (rng.random() < 0.1 and not broker.is_well)
        ):
            if driver.machine.session:
                driver.feed(SessionLost(SessionUnknown(P, driver.machine.session)))
            broker.session += 1 << 32
            broker.sessions.opened(P, broker.session, 0)
        driver.open(broker.session if idempotent else 0)

    def collect() -> None:
        while driver.sent:
            send = driver.sent.popleft()
            box = send.parcel
            before = seen.get(box)
            if before is not None and box in unknown and idempotent:
                assert before == (driver.machine.session, box.first_sequence), "what may be stored is not changed"
            seen[box] = (driver.machine.session, box.first_sequence)
            broker.asked.append((send, box.first_sequence))
        assert len(broker.asked) <= driver.in_flight_max
        unsent = [box.numbers for box in driver.machine.outstanding]
        if idempotent:
            flat = [number for numbers in unsent for number in numbers]
            assert flat == sorted(flat), "order is kept"

    def answer() -> None:
        send, sequence = broker.asked.popleft()
        result = broker.judge(send.parcel, sequence)
        unknown.discard(send.parcel)
        for number in send.parcel.numbers:
            if not isinstance(result, DanubeError):
                assert receipts.setdefault(number, result) == result or not idempotent, "one receipt"
        generation = driver.machine.generation
        driver.sent.clear()
        driver.answered(send.parcel, send.generation, result)
        if driver.machine.generation != generation:
            broker.asked.clear()

    def lose() -> None:
        unknown.update(send.parcel for send, _ in broker.asked)
        for _ in range(rng.randint(0, len(broker.asked))):  # they arrive, and their answers do not
            send, sequence = broker.asked.popleft()
            broker.judge(send.parcel, sequence)
        broker.asked.clear()
        driver.lose(AWAY)

    for _ in range(rng.randint(20, 120)):
        choice = rng.random()
        if choice < 0.4:
            driver.append(rng.randint(1, 5), size=rng.choice([1, 10, 400]))
        elif choice < 0.5:
            driver.feed(FlushRequested())
        elif choice < 0.8 and broker.asked:
            answer()
        elif choice < 0.85 and driver.machine.state is not ProducingState.AWAY:
            lose()
        elif choice < 0.9:
            driver.encode()
        elif driver.machine.state is ProducingState.AWAY:
            open_again()
        elif driver.machine.state is ProducingState.PAUSED:
            driver.feed(Resumed())
        driver.turn()
        collect()
    broker.is_well = True
    while list(driver.machine.outstanding):
        if driver.machine.state is ProducingState.AWAY:
            open_again()
        driver.feed(Resumed())
        driver.feed(FlushRequested())
        driver.turn()
        driver.encode()
        collect()
        if broker.asked:
            answer()
            collect()
    assert list(driver.machine.outstanding) == [] and driver.machine.end is None
    assert len(driver.stored) + len(driver.failed) == driver.numbered, "every message has ended"
    assert set(driver.stored) <= {number for batch in broker.stored for number in batch}, "what has a receipt is stored"
    if idempotent:
        flat = [number for batch in broker.stored for number in batch]
        assert flat == sorted(set(flat)), "once, and in order"
        assert driver.stored == sorted(driver.stored)
