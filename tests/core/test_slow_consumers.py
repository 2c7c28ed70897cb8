"""Consumers that cannot say what they hand over: their deadlines run from sending, and each has a window of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import pytest

from pydanube.core.dispatch.consumer_window import DispatchLimits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import (
    AckReceived,
    Available,
    Effect,
    Event,
    Joined,
    NackReceived,
    SendRanges,
    Ticked,
    WakeAt,
    offsets,
)
from pydanube.core.dispatch.lag import explain
from pydanube.core.dispatch.range_dispatch import SharedDispatch
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId

TIMEOUT = 30.0
POLICY = FailurePolicy(ack_timeout_ms=30_000, base_redelivery_delay_ms=0)
A = ConsumerId(1)


class Workers:
    """A shared subscription with everything waiting, on virtual time. Each worker has a queue, as gRPC clients do, and
    works on `at_once` messages; `seconds` says for how long on which, `answers` whether it says anything then.
    """

    def __init__(
        self,
        count: int,
        messages: int,
        seconds: Callable[[int, float], float],
        *,
        window: int = 10,
        at_once: int = 1,
        answers: Callable[[int], bool] = lambda offset: True,
        acks: bool = True,
    ) -> None:
        self.machine = SharedDispatch(SubscriptionProgress(), policy=POLICY, limits=DispatchLimits(unacked_max=window))
        self.messages = messages
        self.seconds = seconds
        self.at_once = at_once
        self.answers = answers
        self.acks = acks
        self.queues: dict[ConsumerId, deque[int]] = {ConsumerId(1 + number): deque() for number in range(count)}
        self.working = dict.fromkeys(self.queues, 0)
        self.idle_since: dict[ConsumerId, float] = dict.fromkeys(self.queues, 0.0)
        self.idle_seconds = 0.0  # of all workers, while messages were waiting
        self.handled = 0
        self.held_max = 0
        self.timeouts: list[float] = []
        self.now = 0.0
        self._agenda: list[tuple[float, int, ConsumerId | None, int]] = []
        self._number = 0
        for consumer in self.queues:
            self._tell(Joined(consumer))
        self._tell(Available(messages))

    def work(self, until: float = 1e9) -> None:
        while self.machine.progress.next_unacked < self.messages and self._agenda[0][0] <= until:
            self.now, _, consumer, offset = heappop(self._agenda)
            if consumer is None:
                self._tell(Ticked())
                continue
            self.working[consumer] -= 1
            self.handled += 1
            self.idle_since[consumer] = self.now
            self._begin(consumer)
            if self.answers(offset):
                self._tell(AckReceived(offsets(offset)) if self.acks else NackReceived(offsets(offset)))

    def _tell(self, event: Event) -> None:
        before = self.machine.deliveries.timed_out
        effects: list[Effect] = self.machine.step(event, self.now)
        self.timeouts += [self.now] * (self.machine.deliveries.timed_out - before)
        self.held_max = max(self.held_max, self.machine.in_flight.count)
        for effect in effects:
            if isinstance(effect, WakeAt):
                self._plan(effect.time, None, 0)
            elif isinstance(effect, SendRanges):
                self.queues[effect.consumer].extend(at for first, end in effect.ranges for at in range(first, end))
                self._begin(effect.consumer)

    def _begin(self, consumer: ConsumerId) -> None:
        while self.queues[consumer] and self.working[consumer] < self.at_once:
            if not self.working[consumer]:
                self.idle_seconds += self.now - self.idle_since[consumer]
            self.working[consumer] += 1
            offset = self.queues[consumer].popleft()
            self._plan(self.now + self.seconds(offset, self.now), consumer, offset)

    def _plan(self, time: float, consumer: ConsumerId | None, offset: int) -> None:
        self._number += 1
        heappush(self._agenda, (time, self._number, consumer, offset))


@pytest.mark.parametrize("consumers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "seconds", [0.001, 0.1, 1.0, 2.9, 3.1, 5.0, 7.4, 7.6, 10.0, 12.0, 14.9, 15.1, 20.0, 25.0, 27.0]
)
def test_whatever_handlers_take_nothing_times_out_and_nobody_waits_once_the_first_window_is_answered(
    seconds: float, consumers: int
) -> None:
    each = min(60, 20 + int(8 * TIMEOUT / seconds))
    workers = Workers(consumers, each * consumers, lambda offset, now: seconds)
    workers.work()
    first_window = -(-10 // consumers)  # that one consumer is sent before anything is known of it
    if first_window * seconds < TIMEOUT:
        assert workers.timeouts == []
    else:
        assert len(workers.timeouts) <= 10 - consumers and set(workers.timeouts) == {TIMEOUT}
    assert workers.idle_seconds == 0
    assert workers.handled - each * consumers <= 4, "hardly anything is done twice"


def test_fast_consumers_have_all_of_a_large_window() -> None:
    workers = Workers(2, 11_000, lambda offset, now: 0.001, window=10_000)
    workers.work()
    assert workers.held_max == 10_000 and workers.idle_seconds == 0
    assert workers.machine.windows.window_max == 10_000


def test_a_slow_and_a_fast_consumer_have_windows_of_their_own() -> None:
    machine = SharedDispatch(SubscriptionProgress(), policy=POLICY)
    slow, fast = ConsumerId(1), ConsumerId(2)
    for event in (Joined(slow), Joined(fast), Available(1_000)):
        machine.step(event, 0.0)
    theirs = {
        consumer: [at for at in range(10) if machine.in_flight.holder(at) == consumer] for consumer in (slow, fast)
    }
    now = 0.0
    for offset in theirs[slow]:
        now += 5.0
        machine.step(AckReceived(offsets(offset)), now)
    members = {member.consumer: member for member in machine.windows.all}
    assert members[slow].held == 3, "five seconds each, half of an ack timeout"
    for _ in range(3):
        now += 0.001
        mine = [piece.first for piece in machine.in_flight if piece.value.consumer == fast]
        machine.step(AckReceived(offsets(*mine)), now)
    assert members[fast].held == 7 and members[slow].held == 3


def test_consumers_that_become_slow_are_sent_nothing_behind_what_has_no_chance() -> None:
    workers = Workers(2, 400, lambda offset, now: 0.1 if now < 10.0 else 20.0)
    workers.work()
    assert len(workers.timeouts) <= 8 and max(workers.timeouts) <= 10.0 + TIMEOUT + 1
    assert workers.idle_seconds == 0


def test_consumers_that_become_fast_have_the_whole_window_again() -> None:
    workers = Workers(1, 400, lambda offset, now: 5.0 if now < 300.0 else 0.01)
    workers.work()
    assert workers.machine.windows.window_max == 10


def test_one_that_works_on_several_messages_at_once_is_sent_several() -> None:
    workers = Workers(1, 200, lambda offset, now: 20.0, at_once=10)
    workers.work()
    assert workers.timeouts == [] and workers.now <= 1.5 * 200 * 20.0 / 10


def test_what_a_consumer_does_not_answer_at_all_keeps_nothing_from_it() -> None:
    workers = Workers(1, 60, lambda offset, now: 1.0, answers=lambda offset: offset % 10 != 3)
    workers.work(until=65.0)
    assert workers.machine.progress.settled.count + workers.machine.progress.next_unacked >= 54 - 6
    silent = Workers(1, 60, lambda offset, now: 1.0, answers=lambda offset: False)
    silent.work(until=31.0)
    assert silent.machine.in_flight.count == 10, "all of it timed out, and comes again at once"


def test_a_nack_is_an_answer() -> None:
    workers = Workers(1, 60, lambda offset, now: 0.1, acks=False)
    workers.work(until=20.0)
    assert workers.machine.windows.window_max == 10


def test_one_that_joins_is_thought_to_be_as_slow_as_the_others_until_it_answers() -> None:
    workers = Workers(1, 100, lambda offset, now: 20.0)
    workers.work(until=400.0)
    effects = workers.machine.step(Joined(ConsumerId(2)), 400.0)
    assert [effect.ranges[0].size for effect in effects if isinstance(effect, SendRanges)] == [1]


def test_explain_counts_what_timed_out_and_is_in_the_queues_of_slow_consumers_still() -> None:
    workers = Workers(1, 100, lambda offset, now: 20.0)
    workers.work(until=35.0)
    sentence = explain(workers.machine.standing(), 35.0)
    assert "0 messages wait for an ack, and consumers still have 9 messages that timed out" in sentence
