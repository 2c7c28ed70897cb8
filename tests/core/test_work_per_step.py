"""What one step costs: bounded, however scattered the acknowledgements of a subscription are.

`ranges.work` counts the ranges that are touched; a step that touches 20,000 takes some 20 ms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pydanube.core.dispatch.consumer_window import DispatchLimits, Permits
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy
from pydanube.core.dispatch.events import (
    AckReceived,
    Available,
    CursorReset,
    Effect,
    Event,
    Expired,
    Joined,
    Keyed,
    Left,
    LogTrimmed,
    NackReceived,
    PolicyChanged,
    ReadKeys,
    SendRanges,
    Shipped,
    Ticked,
    WakeAt,
    offsets,
    ranges,
)
from pydanube.core.dispatch.key_shared import KeySharedDispatch
from pydanube.core.dispatch.machine import PIECES_MAX, DispatchMachine
from pydanube.core.dispatch.range_dispatch import ExclusiveDispatch, FailoverDispatch, SharedDispatch
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, work
from pydanube.core.dispatch.window import HOLES_LAST_SIZE_MAX_BYTES, HOLES_SIZE_MAX_BYTES, SubscriptionProgress
from pydanube.core.names import ConsumerId

A, B, C = ConsumerId(1), ConsumerId(2), ConsumerId(3)
KINDS: dict[str, Callable[..., DispatchMachine]] = {
    "exclusive": ExclusiveDispatch,
    "failover": FailoverDispatch,
    "shared": SharedDispatch,
    "key_shared": KeySharedDispatch,
}
MESSAGES = 16_000
TOUCHED_MAX = 20 * PIECES_MAX


class Subscription:
    """A machine, and a room that does at once what it says."""

    def __init__(self, kind: str, progress: SubscriptionProgress, *, policy: FailurePolicy | None = None) -> None:
        limits = DispatchLimits(unacked_max=10_000, consumer_unacked_max=100_000)
        self.machine = KINDS[kind](progress, policy=policy or FailurePolicy(ack_timeout_ms=0), limits=limits)
        self.now = 0.0
        self.sent: list[int] = []  # since it was last looked at
        self.costliest: tuple[int, str] = (0, "")

    def hear(self, event: Event) -> list[Effect]:
        said: list[Effect] = []
        waiting = [event]
        while waiting:
            before = work.ranges
            effects = self.machine.step(waiting.pop(0), self.now)
            self.costliest = max(self.costliest, (work.ranges - before, type(event).__name__))
            said += effects
            for effect in effects:
                match effect:
                    case SendRanges(consumer, parts):
                        self.sent += [offset for first, end in parts for offset in range(first, end)]
                        waiting.append(Shipped(consumer, 1, ()))
                    case ReadKeys(wanted):
                        waiting.append(Keyed(tuple((offset, f"key {offset}") for offset in range(*wanted))))
                    case WakeAt(time) if time <= self.now:
                        waiting.append(Ticked())
        return said

    def take(self) -> list[int]:
        sent, self.sent = self.sent, []
        return sent


def scattered(messages: int = MESSAGES) -> SubscriptionProgress:
    """Every second message is acknowledged, as the holes of the cursor say."""
    acked = OffsetRanges((offset, offset + 1) for offset in range(1, messages, 2))
    progress, whole = SubscriptionProgress.restore(-1, acked.encode(0, HOLES_LAST_SIZE_MAX_BYTES), head=messages)
    assert whole
    return progress


@pytest.mark.parametrize("by_window", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_no_step_of_a_subscription_with_scattered_acks_touches_many_ranges(kind: str, by_window: bool) -> None:
    subscription = Subscription(kind, scattered())
    for consumer in (A, B, C)[: 1 if kind == "exclusive" else 3]:
        subscription.hear(Joined(consumer, None if by_window else Permits(100_000, 10_000_000)))
    open_offsets = list(range(0, MESSAGES, 2))
    assert sorted(subscription.take()) == open_offsets, "nothing is left behind when a step ends early"
    subscription.hear(NackReceived(offsets(*open_offsets[::4])))
    subscription.now = 2.0
    subscription.hear(Ticked())
    assert sorted(subscription.take()) == open_offsets[::4]
    subscription.hear(Left(A))
    subscription.hear(Joined(A, None if by_window else Permits(100_000, 10_000_000)))
    subscription.take()
    subscription.hear(Available(MESSAGES + 1))
    assert subscription.take() == [MESSAGES]
    for offset in open_offsets[::-1][:50]:
        subscription.hear(AckReceived(offsets(offset)))
    for start in range(0, len(open_offsets), 1024):
        subscription.hear(AckReceived(offsets(*open_offsets[start : start + 1024])))
    assert subscription.machine.progress.next_unacked == MESSAGES
    assert subscription.costliest[0] <= TOUCHED_MAX, subscription.costliest
    assert subscription.machine.touched_max == subscription.costliest[0]


@pytest.mark.parametrize("kind", KINDS)
def test_many_messages_that_time_out_together_do_so_in_several_steps(kind: str) -> None:
    policy = FailurePolicy(ack_timeout_ms=1_000, max_redelivery_count=0, poison_policy=PoisonPolicy.DROP)
    subscription = Subscription(kind, scattered(), policy=policy)
    subscription.hear(Joined(A))
    assert len(subscription.take()) == MESSAGES // 2
    subscription.now = 2.0
    subscription.hear(Ticked())
    assert subscription.machine.progress.next_unacked == MESSAGES
    assert subscription.costliest[0] <= TOUCHED_MAX, subscription.costliest


@pytest.mark.parametrize("kind", KINDS)
def test_asking_how_a_subscription_stands_touches_no_range(kind: str) -> None:
    subscription = Subscription(kind, scattered())
    subscription.machine.progress.withhold(5_000, 9_000)
    machine = subscription.machine
    before = work.ranges
    assert machine.get_lag_info(MESSAGES).lag_messages == (MESSAGES - 4_000) // 2
    standing = machine.standing(MESSAGES + 10)
    assert standing.lag == standing.undispatched == (MESSAGES - 4_000) // 2 + 10
    assert standing.missing == 2_000
    assert work.ranges - before < MESSAGES // 10


@pytest.mark.parametrize("kind", KINDS)
def test_retention_that_passes_a_scattered_subscription_settles_it_as_one_range(kind: str) -> None:
    subscription = Subscription(kind, scattered())
    subscription.hear(Joined(A))
    subscription.take()
    (expired,) = [effect for effect in subscription.hear(LogTrimmed(MESSAGES)) if isinstance(effect, Expired)]
    assert sum(part.size for part in expired.ranges) == MESSAGES // 2
    assert subscription.machine.progress.next_unacked == MESSAGES
    assert subscription.costliest[0] <= 3 * MESSAGES, "once for each range that is there, not once for each pair"


def test_a_hot_key_with_a_long_queue_is_looked_through_once_for_each_event() -> None:
    machine = KeySharedDispatch(SubscriptionProgress(head=50_000), policy=FailurePolicy(ack_timeout_ms=0))
    effects = machine.step(Joined(A), 0.0)
    while wanted := [effect.range for effect in effects if isinstance(effect, ReadKeys)]:
        effects = machine.step(Keyed(tuple((offset, "hot") for offset in range(*wanted[0]))), 0.0)
    before = work.ranges
    machine.step(AckReceived(offsets(*range(1, 2_048, 2))), 0.0)
    assert work.ranges - before < TOUCHED_MAX
    assert machine.progress.settled.count == 1024


def test_an_ack_whose_ranges_overlap_costs_what_their_union_costs() -> None:
    subscription = Subscription("shared", scattered())
    subscription.hear(Joined(A))
    subscription.hear(AckReceived(tuple(OffsetRange(0, MESSAGES - each) for each in range(1024))))
    assert subscription.machine.progress.next_unacked == MESSAGES
    assert subscription.costliest[0] <= TOUCHED_MAX, subscription.costliest


def test_a_policy_change_and_a_seek_are_short_too() -> None:
    subscription = Subscription("shared", scattered())
    subscription.hear(Joined(A))
    subscription.hear(PolicyChanged(policy=FailurePolicy(max_redelivery_count=1)))
    subscription.hear(CursorReset(0))
    assert subscription.costliest[0] <= TOUCHED_MAX, subscription.costliest


def test_saving_is_cut_into_turns_and_says_what_did_not_fit() -> None:
    acked = OffsetRanges((offset, offset + 1) for offset in range(1, 300_000, 2))
    progress = SubscriptionProgress(head=300_000, settled=acked)
    position = progress.saved()
    assert len(position.holes) <= HOLES_SIZE_MAX_BYTES
    restored, whole = SubscriptionProgress.restore(position.cursor, position.holes, head=300_000)
    assert whole and restored.settled.count == 150_000 - position.cut
    turns = 0
    saving = progress.saving(HOLES_LAST_SIZE_MAX_BYTES)
    while True:
        try:
            next(saving)
        except StopIteration as end:
            last = end.value
            break
        turns += 1
        progress.settle(0, turns * 10)  # it goes on meanwhile, and what is being saved stays as it was
    assert turns >= 30
    assert len(last.holes) <= HOLES_LAST_SIZE_MAX_BYTES and last.cursor == -1
    again, whole = SubscriptionProgress.restore(last.cursor, last.holes, head=300_000)
    assert whole and again.settled.count == 150_000 - last.cut and 0 < last.cut < 30_000


def test_holes_are_not_believed_above_the_head_or_beyond_their_bound() -> None:
    acked = OffsetRanges(ranges((3, 5), (8, 12)))
    progress, whole = SubscriptionProgress.restore(-1, acked.encode(0, 4096), head=10)
    assert whole and list(progress.settled) == [(3, 5), (8, 10)]
    too_long = OffsetRanges((offset, offset + 1) for offset in range(1, 300_000, 2)).encode(0, 10**6)
    progress, whole = SubscriptionProgress.restore(-1, too_long, head=300_000)
    assert not whole and not progress.settled
