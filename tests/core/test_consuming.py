"""What a consumer asks for, shows, gives back and answers: decided without a socket, a clock or a loop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.consuming import answers
from pydanube.core.consuming.machine import SETTLED_SECONDS, TELL_SECONDS, ConsumerMachine, Hold, Mode, State
from pydanube.core.consuming.pacing import FIRST_MESSAGES
from pydanube.core.consuming.values import (
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
    EndTurn,
    Event,
    Flushed,
    GiveBack,
    Grant,
    Hungered,
    LagKnown,
    Lost,
    Nacked,
    NoteRefused,
    Opening,
    Recalled,
    Refuse,
    Reviewed,
    SayIn,
    Send,
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
    Verdict,
    Why,
)
from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.errors import AckOutdated, DanubeError, NotServed, SubscriptionUnknown, Unreachable

GONE = Unreachable("danube://b", "it hung up")
LATER = NotServed("/default/orders", "it is moving")
NEVER = SubscriptionUnknown("/default/orders", "s")
OUTDATED = AckOutdated("/default/orders", "s", 3)


@dataclass
class ConsumerDriver:
    """A machine, and what a lane does about its effects. The application takes message by message."""

    window: int = 8
    window_bytes: int = 10**6
    adapts: bool = False
    ranges_max: int = 100
    machine: ConsumerMachine[Arrival] = field(init=False)
    now: float = 100.0
    effects: list[Effect[Arrival]] = field(default_factory=list)
    line: deque[Arrival] = field(default_factory=deque)
    in_hand: Arrival | None = None
    left: list[int] = field(default_factory=list)  # of what is in hand
    sent: deque[Send] = field(default_factory=deque)
    turn_is_due: bool = False
    timers: list[tuple[float, TellDue | SettledDue]] = field(default_factory=list)
    settled: dict[Verdict, DanubeError | None] = field(default_factory=dict)
    permits: int = 0  # that a broker has
    dropped_times: int = 0

    def __post_init__(self) -> None:
        limits = ConsumerLimits(window_messages=self.window, window_bytes=self.window_bytes, adapts=self.adapts)
        self.machine = ConsumerMachine(limits, ranges_max=self.ranges_max)

    def feed(self, event: Event[Arrival]) -> list[Effect[Arrival]]:
        """Returns what came of it, also later ones; all of it is carried out."""
        before = len(self.effects)
        for effect in self.machine.step(event, self.now):
            self.carry_out(effect)
        return self.effects[before:]

    def carry_out(self, effect: Effect[Arrival]) -> None:
        self.effects.append(effect)
        match effect:
            case Show(arrival):
                self.line.append(arrival)
            case EndTurn():
                assert not self.turn_is_due
                self.turn_is_due = True
            case Send():
                self.sent.append(effect)
            case Grant(messages):
                assert self.machine.state is State.OPEN
                self.permits += messages
            case SayIn(seconds, event):
                self.timers.append((self.now + seconds, event))
            case TakeBack(wanted, why):
                self.take_back(wanted, why)
            case DropAll():
                self.drop_all()
            case Settle(verdict, error):
                assert verdict not in self.settled, "once"
                self.settled[verdict] = error
            case _:
                pass

    # --- the broker ---

    def open(self, **answer: Any) -> ConsumerDriver:
        self.feed(Opening())
        messages, _, first = self.machine.first_permits
        shares = answer.get("shares", False)
        self.permits = first if shares and first else messages
        self.feed(Subscribed(**answer))
        return self

    def deliver(self, *ranges: tuple[int, int], attempt: int = 1, seeks: int | None = None, epoch: int = 1) -> Arrival:
        arrival = Arrival(
            ranges,
            attempt=attempt,
            size=100,
            seeks=self.machine.seeks if seeks is None else seeks,
            epoch=epoch,
            generation=self.machine.generation,
        )
        self.permits -= arrival.count
        if self.machine.repeats.is_copy(arrival):
            self.account()
        self.feed(Delivered(arrival))
        return arrival

    def answer(self, error: DanubeError | None = None) -> list[Effect[Arrival]]:
        send = self.sent.popleft()
        return self.feed(Answered(send.verdict, send.generation, error))

    def lose(self) -> None:
        self.sent.clear()
        self.feed(Lost())

    # --- the application ---

    def take(self, count: int = 1) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            if not self.left:
                self.hand_over()
                if not self.line:
                    break
                self.in_hand = self.line.popleft()
                self.left = [offset for first, end in self.in_hand.ranges for offset in range(first, end)]
            self.feed(TakingBegan())
            taken.append(self.left.pop(0))
        return taken

    def hand_over(self) -> None:
        if self.in_hand is not None and not self.left:
            self.feed(Took(self.in_hand, self.in_hand.count))
            self.in_hand = None

    def ack(self, *offsets: int, era: int | None = None) -> None:
        for offset in offsets:
            of_era = self.machine.era if era is None else era
            run = self.machine.run
            if offset == run.end and of_era == run.era:
                run.end += 1
                continue
            for effect in self.machine.ack(offset, of_era):
                self.carry_out(effect)

    def turn(self) -> list[Effect[Arrival]]:
        self.turn_is_due = False
        return self.feed(TurnEnded())

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due, self.timers = self.timers, []
        for at, event in due:
            if at > self.now:
                self.timers.append((at, event))
                continue
            if isinstance(event, TellDue):
                self.account()
            self.feed(event)

    # --- the inbox ---

    def account(self) -> None:
        if self.in_hand is not None:
            self.feed(Took(self.in_hand, self.in_hand.count - len(self.left)))

    def take_back(self, wanted: OffsetRanges, why: Why) -> OffsetRanges:
        self.account()
        found = OffsetRanges()
        for arrival in list(self.line):
            if not arrival.is_copy and why in (Why.COPIES, Why.REPLACED):
                continue
            mine = [part for first, end in arrival.ranges for part in wanted.overlap(first, end)]
            arrival.keep([gap for first, end in arrival.ranges for gap in wanted.gaps(first, end)])
            for first, end in mine:
                found.add(first, end)
            if not arrival.count:
                self.line.remove(arrival)
                self.feed(Emptied(arrival))
        if self.in_hand is not None and (self.in_hand.is_copy or why not in (Why.COPIES, Why.REPLACED)):
            mine_left = [offset for offset in self.left if offset in wanted]
            self.left = [offset for offset in self.left if offset not in wanted]
            gone = OffsetRanges((offset, offset + 1) for offset in mine_left)
            self.in_hand.keep([gap for first, end in self.in_hand.ranges for gap in gone.gaps(first, end)])
            if gone and self.in_hand.taken == self.in_hand.count:
                self.feed(Emptied(self.in_hand))
            for first, end in gone:
                found.add(first, end)
        self.feed(TakenBack(found, why))
        return found

    def drop_all(self) -> None:
        self.dropped_times += 1
        while self.line:
            self.feed(Dropped(self.line.popleft()))
        if self.in_hand is not None:
            if self.in_hand.taken < self.in_hand.count:
                self.feed(Dropped(self.in_hand))
            self.in_hand, self.left = None, []

    @property
    def unseen(self) -> list[int]:
        in_line = [each for arrival in self.line for each in arrival.ranges]
        return self.left + [offset for first, end in in_line for offset in range(first, end)]

    def verdicts(self) -> list[tuple[bool, list[tuple[int, int]]]]:
        return [(send.verdict.is_ack, list(map(tuple, send.verdict.ranges))) for send in self.sent]


def of(kind: type, effects: list[Any]) -> list[Any]:
    return [each for each in effects if isinstance(each, kind)]


# --- permits ------------------------------------------------------------------------------------------


def test_it_begins_with_the_whole_window() -> None:
    driver = ConsumerDriver(window=8, window_bytes=500)
    driver.feed(Opening())
    assert driver.machine.first_permits == (8, 500, 0)


def test_a_quarter_of_the_window_is_granted_at_a_time() -> None:
    driver = ConsumerDriver(window=8).open()
    driver.deliver((0, 8))
    driver.take(1)
    driver.account()
    assert driver.permits == 0
    driver.take(1)
    driver.account()
    assert driver.permits == 2
    driver.take(6)
    driver.hand_over()
    assert driver.permits == 8 and of(Grant, driver.effects)[-1] == Grant(6, 100), (
        "bytes are free when all of it is taken"
    )


def test_bytes_are_granted_although_few_messages_are_owed() -> None:
    driver = ConsumerDriver(window=1000, window_bytes=400).open()
    driver.deliver((0, 1))
    driver.take()
    driver.hand_over()
    assert of(Grant, driver.effects) == [Grant(1, 100)]


def test_who_waits_is_granted_what_is_owed_however_little() -> None:
    driver = ConsumerDriver(window=8).open()
    driver.deliver((0, 1))
    driver.take()
    driver.hand_over()
    assert driver.permits == 7
    driver.feed(Hungered())
    assert driver.permits == 8
    assert driver.feed(Hungered()) == []


def test_what_was_taken_of_a_lost_connection_makes_no_room_on_the_next() -> None:
    driver = ConsumerDriver(window=8).open()
    arrival = driver.deliver((0, 8))
    driver.lose()
    driver.open()
    assert driver.feed(Took(arrival, 8)) == [] and driver.permits == 8
    assert (
        driver.feed(Emptied(arrival)) == [] and driver.feed(Dropped(arrival)) == [] and driver.machine.owed_bytes == 0
    )


def test_a_shared_subscription_begins_with_few_and_gets_more_if_it_is_fast() -> None:
    driver = ConsumerDriver(window=1000, adapts=True)
    driver.open(shares=True)
    assert driver.permits == FIRST_MESSAGES
    for first in range(0, 40, 8):
        driver.deliver((first, first + 8))
        driver.now += 0.01
        driver.ack(*driver.take(8))
        driver.hand_over()
        driver.turn()
    assert driver.permits > 2 * FIRST_MESSAGES


@pytest.mark.parametrize("answer", [{"shares": False}, {"shares": True, "hands_over": False}])
def test_a_window_adapts_only_if_it_shares_and_the_broker_agrees(answer: dict[str, bool]) -> None:
    driver = ConsumerDriver(window=1000, adapts=True).open(**answer)
    driver.permits = 1000
    driver.deliver((0, 800))
    driver.ack(*driver.take(800))
    driver.hand_over()
    driver.turn()
    driver.feed(Hungered())
    assert driver.permits == 1000


# --- acks ---------------------------------------------------------------------------------------------


def test_acks_of_one_turn_travel_as_ranges() -> None:
    driver = ConsumerDriver(window=100).open()
    driver.deliver((0, 20))
    driver.ack(0, 1, 2, 7, 8, 3)
    assert driver.turn_is_due and driver.sent == deque()
    driver.turn()
    assert driver.verdicts() == [(True, [(0, 4), (7, 9)])]


def test_an_ack_that_continues_the_one_before_costs_nothing() -> None:
    driver = ConsumerDriver().open()
    driver.ack(4)
    effects = len(driver.effects)
    assert driver.machine.run.end == 5
    driver.ack(5, 6)
    assert driver.machine.run.end == 7 and len(driver.effects) == effects
    driver.turn()
    assert driver.verdicts() == [(True, [(4, 7)])] and driver.machine.run.end < 0


def test_nothing_continues_a_run_that_would_have_to_be_looked_at() -> None:
    for event in (Closing(), Ended(GONE), Sought(1)):
        driver = ConsumerDriver().open()
        driver.ack(4)
        driver.feed(event)
        assert driver.machine.run.end < 0
    driver = ConsumerDriver().open()
    driver.ack(4)
    driver.deliver((5, 6), attempt=2)
    assert driver.machine.run.end < 0, "the copy of the next may be there"


def test_a_command_has_so_many_ranges_at_most() -> None:
    driver = ConsumerDriver(ranges_max=2).open()
    driver.feed(Acked([(0, 1), (2, 3), (4, 5)], 0))
    driver.turn()
    assert driver.verdicts() == [(True, [(0, 1), (2, 3)]), (True, [(4, 5)])]


def test_nacks_travel_by_delay_and_reason_and_before_acks() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    driver.feed(Nacked([(1, 2)], 0, 5, "x"))
    driver.feed(Nacked([(3, 4)], 0, 5, "x"))
    driver.feed(Nacked([(5, 6)], 0, 0, "y"))
    driver.turn()
    assert [(send.verdict.delay_ms, send.verdict.reason) for send in driver.sent] == [(5, "x"), (0, "y"), (0, "")]
    assert driver.verdicts()[0] == (False, [(1, 2), (3, 4)])


def test_an_ack_is_done_when_the_broker_says_so() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    [send] = of(Send, driver.turn())
    assert driver.machine.answers.verdicts == [send.verdict]
    assert driver.answer() == [Settle(send.verdict)] and driver.machine.answers.verdicts == []
    assert driver.feed(Answered(send.verdict, send.generation, None)) == [], "a second answer is none"


def test_an_ack_that_is_refused_for_a_while_is_sent_again() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    driver.turn()
    assert driver.answer(LATER) == [EndTurn(is_retry=True)]
    assert of(Send, driver.turn()) and driver.settled == {}


def test_an_ack_that_is_refused_for_good_is_told_of() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    [send] = of(Send, driver.turn())
    assert driver.answer(NEVER) == [NoteRefused(send.verdict, NEVER), Settle(send.verdict, NEVER)]


def test_an_ack_of_before_a_seek_is_done_whatever_the_broker_says() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    [send] = of(Send, driver.turn())
    assert driver.answer(OUTDATED) == [Settle(send.verdict)]


def test_acks_without_an_answer_go_first_on_the_next_connection_in_order() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    driver.turn()
    driver.ack(5)
    driver.turn()
    late = driver.sent[0]
    driver.lose()
    driver.ack(9)
    driver.turn()
    assert driver.verdicts() == []
    driver.open()
    assert [ranges for _, ranges in driver.verdicts()] == [[(0, 1)], [(5, 6)], [(9, 10)]]
    assert driver.feed(Answered(late.verdict, late.generation, None)) == [], "the answer of the old connection"


def test_nacks_are_left_out_only_if_there_is_no_connection_and_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "UNSENT_MAX", 2)
    driver = ConsumerDriver().open()
    for offset in range(4):
        driver.feed(Nacked([(offset, offset + 1)], 0, offset))
    assert len(of(Send, driver.turn())) == 4
    driver.lose()
    driver.machine.answers.unsent.clear()
    for offset in range(4):
        driver.feed(Nacked([(offset, offset + 1)], 0, offset))
    driver.open()
    assert [ranges for _, ranges in driver.verdicts()] == [[(0, 1)], [(1, 2)]]


def test_what_is_said_after_closing_does_not_count() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    driver.feed(Closing())
    assert driver.machine.ack(1, 0) == (Refuse(),)
    assert driver.feed(Acked([(1, 2)], 0)) == [Refuse()] and driver.feed(Nacked([(1, 2)], 0)) == [Refuse()]
    driver.feed(Flushed())
    assert driver.verdicts() == [(True, [(0, 1)])], "what was said before does"


def test_a_flush_does_not_wait_for_the_end_of_the_turn() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    driver.feed(Flushed())
    assert driver.verdicts() == [(True, [(0, 1)])]


def test_a_flush_without_a_connection_knows_what_is_to_be_sent() -> None:
    driver = ConsumerDriver().open()
    driver.lose()
    driver.ack(0)
    driver.feed(Flushed())
    assert len(driver.machine.answers.verdicts) == 1 and driver.verdicts() == []


# --- what is not shown again --------------------------------------------------------------------------


def test_what_was_acknowledged_a_moment_ago_is_not_shown_again() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.take(4)
    driver.hand_over()
    driver.ack(0)
    driver.turn()
    driver.ack(1)
    permits = driver.permits
    driver.deliver((0, 4), attempt=2)
    assert driver.unseen == [2, 3]
    driver.ack(2)
    assert driver.unseen == [3], "a copy that nobody has is not shown any more"
    driver.take(1)
    driver.hand_over()
    driver.feed(Hungered())
    assert driver.permits == permits, "and all of it made room again"


def test_what_comes_once_more_replaces_what_nobody_has_taken() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 3), attempt=2)
    assert driver.take(1) == [0]
    driver.deliver((0, 2), attempt=3)
    assert driver.unseen == [2, 0, 1]
    driver.ack(0)
    assert driver.unseen == [2, 1], "the newest copy is known to be there"
    driver.take(2)
    driver.hand_over()
    driver.feed(Hungered())
    assert driver.permits == 8


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_acknowledged_is_not_shown_from_a_copy_that_the_next_owner_calls_the_first(is_there: bool) -> None:
    """The ack comes when the copy is there, or just before."""
    driver = ConsumerDriver().open()
    driver.deliver((0, 3))
    driver.take(3)
    driver.lose()
    driver.open()
    permits = driver.permits
    if is_there:
        driver.deliver((0, 3))
        driver.ack(1)
    else:
        driver.ack(1)
        driver.turn()
        driver.deliver((0, 3))
    assert not driver.deliver((3, 4)).is_copy
    assert driver.take(4) == [0, 2, 3]
    driver.hand_over()
    driver.feed(Hungered())
    assert driver.permits == permits, "and all of it made room again"


def test_acknowledging_the_copy_itself_takes_nothing_back() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 2), attempt=2)
    assert driver.take(1) == [0]
    driver.ack(0)
    assert driver.unseen == [1]
    driver.turn()
    assert driver.verdicts() == [(True, [(0, 1)])]


def test_what_the_broker_does_not_know_to_be_done_is_acknowledged_again_and_not_shown() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.take(4)
    driver.ack(0, 1)
    driver.turn()
    driver.lose()
    driver.open(next_unacked=0)
    assert of(AskLag, driver.effects) and driver.permits == 8, "the acks go first, then messages are asked for"
    driver.answer()
    driver.deliver((0, 4))
    assert driver.unseen == [2, 3]
    driver.turn()
    assert driver.verdicts()[-1] == (True, [(0, 2)])


def test_only_for_a_while() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 2))
    driver.take(2)
    driver.ack(0, 1)
    driver.lose()
    driver.open()
    driver.answer()
    driver.pass_time(SETTLED_SECONDS)
    driver.deliver((0, 2))
    assert driver.unseen == [0, 1]


def test_a_topic_that_was_made_anew_has_other_messages() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 2), epoch=1)
    driver.take(2)
    driver.ack(0, 1)
    driver.turn()
    driver.lose()
    driver.open(created=2)
    assert driver.verdicts() == [] and len(driver.settled) == 1, "and no ack of the old ones is sent"
    driver.deliver((0, 2), epoch=2)
    assert driver.unseen == [0, 1]


def test_an_answer_to_a_message_of_the_topic_as_it_was_says_nothing_of_the_one_made_anew() -> None:
    driver = ConsumerDriver().open()
    old = driver.deliver((0, 4), epoch=1)
    driver.take(4)
    driver.lose()
    driver.open(created=2)
    assert driver.machine.hold(old) is Hold.OUTDATED
    driver.ack(0, era=old.era)
    new = driver.deliver((0, 4), epoch=2)
    assert not new.is_copy and driver.take(2) == [0, 1]
    driver.ack(0)
    driver.ack(1, 2, era=old.era)
    driver.feed(Acked([(2, 3)], old.era))
    driver.feed(Nacked([(3, 4)], old.era))
    driver.turn()
    assert driver.verdicts() == [(True, [(0, 1)])] and driver.unseen == [2, 3]


@pytest.mark.parametrize("epoch", [0, 2])
def test_messages_of_another_epoch_or_of_none_are_others(epoch: int) -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 2), epoch=1)
    driver.take(2)
    driver.ack(0, 1)
    driver.turn()
    driver.lose()
    driver.open()
    driver.deliver((0, 2), epoch=epoch)
    assert driver.unseen == [0, 1]


def test_what_comes_again_from_below_what_the_broker_knew_was_sought_by_somebody() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.take(4)
    driver.ack(0, 1, 2, 3)
    driver.turn()
    driver.lose()
    driver.open(next_unacked=1)
    driver.answer()
    driver.feed(LagKnown(driver.machine.generation, 3))
    driver.deliver((2, 4))
    assert driver.unseen == [2, 3]


# --- seeking ------------------------------------------------------------------------------------------


def test_after_a_seek_nothing_of_before_counts() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.take(2)
    driver.ack(0)
    driver.feed(Nacked([(1, 2)], 0))
    driver.feed(Sought(1))
    assert driver.unseen == [] and driver.dropped_times == 1
    driver.turn()
    assert driver.verdicts() == [], "acks and nacks that were not sent before are not sent after it"
    driver.ack(1, era=0)
    assert not driver.turn_is_due
    driver.feed(Hungered())
    assert driver.permits == 8, "what was dropped makes room"


def test_an_ack_on_its_way_during_a_seek_is_not_sent_again() -> None:
    driver = ConsumerDriver().open()
    driver.ack(0)
    driver.turn()
    driver.feed(Sought(1))
    assert [type(each) for each in driver.answer(LATER)] == [Settle]
    driver.ack(5)
    driver.turn()
    driver.feed(Sought(2))
    driver.lose()
    assert len(driver.settled) == 2
    driver.open()
    assert driver.verdicts() == []


def test_a_delivery_that_was_on_its_way_during_a_seek_of_ours_is_not_shown() -> None:
    driver = ConsumerDriver().open()
    driver.feed(Sought(1))
    driver.deliver((0, 4), seeks=0)
    assert driver.unseen == [] and driver.permits == 8
    driver.deliver((0, 2), seeks=1)
    assert driver.unseen == [0, 1]


def test_a_delivery_tells_of_a_seek_of_somebody_else() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 2))
    driver.ack(0)
    driver.deliver((4, 5), seeks=1)
    assert driver.unseen == [4] and driver.machine.seeks == 1
    driver.turn()
    assert driver.verdicts() == []


def test_an_answer_that_is_older_than_a_delivery_changes_nothing() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 2), seeks=2)
    driver.feed(Sought(1))
    assert driver.unseen == [0, 1]
    driver.feed(Sought(None))
    assert driver.unseen == [], "a broker that does not count them delivers nothing before it answers"


# --- handing over -------------------------------------------------------------------------------------


def test_the_broker_is_told_what_is_taken_and_not_answered_within_a_moment() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 8))
    driver.take(3)
    driver.ack(1)
    driver.pass_time(TELL_SECONDS)
    assert of(Tell, driver.effects) == [Tell([(0, 1), (2, 3)])]
    driver.pass_time(TELL_SECONDS)
    assert len(of(Tell, driver.effects)) == 1, "once"


def test_nothing_is_told_to_a_broker_that_does_not_want_to_know() -> None:
    driver = ConsumerDriver().open(hands_over=False)
    driver.deliver((0, 8))
    driver.take(3)
    assert driver.timers == [] and not driver.machine.has_out


def test_it_is_known_whether_the_application_has_something() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 2))
    driver.take(2)
    driver.account()
    assert driver.machine.has_out
    driver.pass_time(TELL_SECONDS)
    assert driver.machine.has_out
    driver.ack(0, 1)
    assert AllAnswered() in driver.feed(Reviewed()) and not driver.machine.has_out


def test_a_delivery_can_be_held_for_longer_while_it_is_ours() -> None:
    driver = ConsumerDriver().open()
    arrival = driver.deliver((0, 2))
    assert driver.machine.hold(arrival) is Hold.HELD
    driver.feed(Sought(1))
    assert driver.machine.hold(arrival) is Hold.OUTDATED
    arrival = driver.deliver((0, 2), seeks=1)
    driver.lose()
    assert driver.machine.hold(arrival) is Hold.LOST
    driver.open(hands_over=False)
    assert driver.machine.hold(arrival) is Hold.LOST
    assert driver.machine.hold(driver.deliver((0, 2), seeks=1)) is Hold.UNTOLD


def test_what_is_recalled_and_not_taken_is_given_back() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.deliver((4, 8))
    driver.take(1)
    driver.feed(Recalled([(0, 2), (6, 8)], 0, 3))
    assert of(GiveBack, driver.effects) == [GiveBack([(1, 2), (6, 8)])] and driver.machine.lost_times == 3
    assert driver.unseen == [2, 3, 4, 5]
    driver.pass_time(1)
    assert of(Tell, driver.effects) == [Tell([(0, 1)])]


def test_what_was_given_back_makes_room_when_the_application_wants_something() -> None:
    driver = ConsumerDriver(window=4).open()
    driver.deliver((0, 4))
    driver.feed(Recalled([(0, 4)], 0, 0))
    assert driver.permits == 0 and driver.machine.is_starved
    driver.feed(Hungered())
    assert driver.permits == 4 and not driver.machine.is_starved


def test_a_recalled_consumer_asks_for_one_although_nothing_is_owed() -> None:
    driver = ConsumerDriver().open()
    driver.feed(Recalled([(0, 4)], 0, 0))
    assert driver.feed(Hungered()) == [Grant(1, 0)]
    assert driver.feed(Hungered()) == []


def test_a_recall_of_before_a_seek_takes_nothing_back() -> None:
    driver = ConsumerDriver().open()
    driver.feed(Sought(1))
    driver.deliver((0, 4), seeks=1)
    driver.feed(Recalled([(0, 4)], 0, 0))
    assert driver.unseen == [0, 1, 2, 3]


# --- stopping and ends --------------------------------------------------------------------------------


def test_a_stopped_consumer_gives_back_what_still_comes_and_grants_nothing() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.feed(Stopped())
    assert list(driver.take_back(OffsetRanges([(0, 100)]), Why.STOPPED)) == [(0, 4)]
    driver.deliver((4, 6))
    assert driver.unseen == [] and of(GiveBack, driver.effects) == [GiveBack([(4, 6)])]
    driver.feed(Hungered())
    assert of(Grant, driver.effects) == []


def test_a_stopped_consumer_comes_back_for_its_acks_alone() -> None:
    driver = ConsumerDriver().open()
    driver.feed(Stopped())
    driver.ack(0)
    driver.lose()
    driver.open()
    assert driver.machine.first_permits == (0, 0, 0) and of(Grant, driver.effects) == []
    assert GiveBack((), stop=True) in driver.effects and driver.verdicts() == [(True, [(0, 1)])]


def test_closing_is_more_than_stopping() -> None:
    driver = ConsumerDriver().open()
    driver.feed(Closing())
    driver.feed(Stopped())
    assert driver.machine.mode is Mode.CLOSING


def test_a_lost_connection_drops_what_nobody_has() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.take(1)
    driver.lose()
    assert driver.unseen == [] and not driver.machine.has_out and driver.machine.state is State.AWAY
    driver.open()
    assert driver.permits == 8


def test_an_end_settles_everything_with_its_error() -> None:
    driver = ConsumerDriver().open()
    driver.deliver((0, 4))
    driver.ack(0)
    driver.turn()
    driver.lose()
    driver.feed(Flushed())
    driver.feed(Ended(GONE))
    assert list(driver.settled.values()) == [GONE] and driver.unseen == []
    assert driver.machine.ack(1, 0) == (Refuse(),)
    assert len(driver.machine.answers.verdicts) == 1, "who flushes hears of it"
    assert driver.feed(Ended(GONE)) == [] and driver.feed(Lost()) == [] and driver.feed(Subscribed()) == []


# --- against a broker ---------------------------------------------------------------------------------


@dataclass
class ModelBroker:
    """One subscription: what is acknowledged, and what this consumer has. It never hands out more than is granted."""

    rng: Random
    head: int = 60
    acked: OffsetRanges = field(default_factory=OffsetRanges)
    out: OffsetRanges = field(default_factory=OffsetRanges)
    tries: dict[int, int] = field(default_factory=dict)
    seeks: int = 0

    @property
    def next_unacked(self) -> int:
        return self.acked.first_gap(0)

    def pick(self, most: int) -> tuple[list[tuple[int, int]], int]:
        """Messages that were delivered equally often."""
        free = [offset for offset in range(self.head) if offset not in self.acked and offset not in self.out]
        chosen = [each for each in free if self.tries.get(each, 0) == self.tries.get(free[0], 0)][:most]
        for offset in chosen:
            self.out.add(offset, offset + 1)
            self.tries[offset] = self.tries.get(offset, 0) + 1
        ranges = [(each.first, each.end) for each in OffsetRanges((offset, offset + 1) for offset in chosen)]
        return ranges, self.tries[chosen[0]] if chosen else 1

    def hear(self, send: Send) -> None:
        if send.verdict.seeks == self.seeks:
            for first, end in send.verdict.ranges:
                self.out.remove(first, end)
                if send.verdict.is_ack:
                    self.acked.add(first, end)


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_whatever_a_broker_does_nothing_is_shown_after_its_ack_and_the_window_holds(seed: int) -> None:
    """Connections end, answers are lost, acks refused for a while, messages recalled, the subscription moved."""
    rng = Random(seed)
    broker = ModelBroker(rng)
    driver = ConsumerDriver(window=rng.choice([1, 4, 9]), ranges_max=rng.choice([1, 2, 50]))
    mine: dict[int, int] = {}  # taken and not answered; with the era of its delivery
    done: set[int] = set()  # acknowledged since the last seek
    given_back = recalls = 0

    def check() -> None:
        nonlocal given_back
        for effect in driver.effects[given_back:]:
            if isinstance(effect, GiveBack):
                for first, end in effect.ranges:
                    broker.out.remove(first, end)
        given_back = len(driver.effects)
        if driver.machine.state is State.OPEN:
            waiting = [*driver.line, *filter(None, [driver.in_hand])]
            unseen = sum(arrival.count - arrival.taken for arrival in waiting)
            assert driver.permits >= 0 and driver.permits + unseen + driver.machine.owed_messages == driver.window
            assert driver.machine.owed_messages >= -recalls, "the window is exceeded only by who was recalled, and asks"
        assert not done & set(driver.unseen), "what is acknowledged is not shown again"

    def open_again() -> None:
        broker.out.clear()
        if rng.random() < 0.5:
            broker.tries.clear()  # another broker, which knows nothing of what was delivered
        driver.open(next_unacked=broker.next_unacked)

    def deliver() -> None:
        ranges, attempt = broker.pick(rng.randint(1, max(1, driver.permits))) if driver.permits > 0 else ([], 1)
        if ranges:
            driver.deliver(*ranges, attempt=attempt, seeks=broker.seeks)

    def take(count: int) -> None:
        for offset in driver.take(count):
            assert offset not in done
            mine[offset] = driver.machine.era

    def ack() -> None:
        offset = rng.choice(list(mine))
        era = mine.pop(offset)
        if rng.random() < 0.8:
            driver.ack(offset, era=era)
            if era == driver.machine.era:
                done.add(offset)
        else:
            driver.feed(Nacked([(offset, offset + 1)], era))

    def answer() -> None:
        if rng.random() < 0.1:
            driver.answer(LATER)
        else:
            broker.hear(driver.sent[0])
            driver.answer()

    def lose() -> None:
        for send in list(driver.sent)[: rng.randint(0, len(driver.sent))]:  # they arrive, and their answers do not
            broker.hear(send)
        driver.lose()

    def seek() -> None:
        broker.seeks += 1
        start = rng.randrange(broker.head)
        broker.acked = OffsetRanges([(0, start)]) if start else OffsetRanges()
        broker.out.clear()
        driver.feed(Sought(broker.seeks))
        done.clear()

    open_again()
    for _ in range(rng.randint(30, 200)):
        choice = rng.random()
        if driver.machine.state is State.AWAY:
            if choice < 0.5:
                open_again()
        elif choice < 0.25:
            deliver()
        elif choice < 0.7 and driver.sent:
            answer()
        elif choice < 0.74:
            lose()
        elif choice < 0.76:
            seek()
        elif choice < 0.8:
            first, recalls = rng.randrange(broker.head), recalls + 1
            driver.feed(Recalled([(first, first + 20)], broker.seeks, 0))
        if rng.random() < 0.4:
            take(rng.randint(1, 4))
        if mine and rng.random() < 0.6:
            ack()
        if not driver.unseen and driver.machine.state is State.OPEN and rng.random() < 0.5:
            driver.feed(Hungered())
        if rng.random() < 0.5 and driver.turn_is_due:
            driver.turn()
        driver.pass_time(rng.choice([0.0, TELL_SECONDS]))
        check()
    for _ in range(5000):  # the broker is well from now on
        if driver.machine.state is State.AWAY:
            open_again()
        deliver()
        take(100)
        while mine:
            offset, era = mine.popitem()
            driver.ack(offset, era=era)
            if era == driver.machine.era:
                done.add(offset)
        driver.hand_over()
        driver.feed(Hungered())
        driver.turn()
        while driver.sent:
            broker.hear(driver.sent[0])
            driver.answer()
        check()
        if broker.next_unacked >= broker.head and not driver.machine.answers.verdicts:
            break
    assert broker.next_unacked >= broker.head, "everything is done in the end"
    assert driver.machine.answers.verdicts == [] and not any(driver.settled.values())
