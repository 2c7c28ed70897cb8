"""The promises, one function each, asked of a recorded history (history.py).

    violations = check(History.read(path))

What counts as an exception is what is recorded as one, and nothing else: voids, orphans, rescued messages, what came
when the consumers had left. Each rule says nothing where there is no evidence, so a history may leave out what its
recorder could not see.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from pydanube.testing.history import (
    Acked,
    Claimed,
    Created,
    Cursor,
    Damaged,
    Dead,
    Departed,
    Done,
    Event,
    Fetched,
    Flushed,
    Forgot,
    Given,
    Got,
    Grew,
    Head,
    History,
    Kept,
    Lease,
    Nacked,
    Orphaned,
    Policy,
    Quiet,
    Released,
    Sent,
    Serving,
    Stopped,
    Subscribed,
    Worked,
)

SHARED: Final = "Shared"  # the one kind of subscription that keeps no order
ANSWER_SECONDS: Final = 5.0  # how long an answer may be under way to a client that still waits for it
RANGES_MAX: Final = 5_000  # that one step may touch: a few milliseconds
STOP_SECONDS: Final = 10.0  # a broker that stops does so when its disk fails: it may have several calls to wait for


class Violation(NamedTuple):
    """A broken promise. `offsets` and `messages` are what it is about, so that the history can be shortened to it."""

    rule: str
    topic: str
    what: str
    offsets: tuple[int, ...] = ()
    messages: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.rule}: {self.topic}: {self.what}"


Found = Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...]]]


def check(history: History) -> list[Violation]:
    """Every broken promise. Empty: all was well."""
    return [Violation(rule.__name__, *found) for rule in RULES for found in rule(history)]


# --- what is in the log -------------------------------------------------------------------------------------


def lost_write(history: History) -> Found:
    """An acknowledged message is in the log at the end, at the offset of its receipt."""
    for kept in history.all(Kept):
        damaged = bool(history.of(Damaged, kept.topic))
        for acked in history.of(Acked, kept.topic):
            found = kept.messages.get(acked.offset)
            if acked.offset < kept.first or found == acked.message:
                continue
            if damaged and _inside(kept.voids, acked.offset):
                continue  # bytes went bad on a disk, and it is recorded where
            what = f"{acked.message!r} was acknowledged at {acked.offset} in epoch {acked.epoch}; there is {found!r}"
            yield kept.topic, what, (acked.offset,), (acked.message,)


def duplicate_offset(history: History) -> Found:
    """No offset is given to two messages, by any evidence: a broker's answer, a delivery, the log at the end."""
    for topic in _reliable(history, Acked, Got, Fetched, Kept):
        given: dict[int, str] = {}
        seen: list[tuple[int, str]] = [(acked.offset, acked.message) for acked in history.of(Acked, topic)]
        seen += [(got.offset, got.message) for got in history.of(Got, topic)]
        seen += [(read.offset, read.message) for read in history.of(Fetched, topic)]
        seen += [item for kept in history.of(Kept, topic) for item in kept.messages.items()]
        for offset, message in dict.fromkeys(seen):
            other = given.setdefault(offset, message)
            if other != message:
                yield topic, f"offset {offset} has {other!r} and {message!r}", (offset,), (other, message)


def stored_twice(history: History) -> Found:
    """What an idempotent producer sent in one session, however often, is in the log once, over every move and crash."""
    once: dict[str, bool] = {}
    for event in history.all(Sent):
        once[event.message] = event.once and event.message not in once
    for kept in history.all(Kept):
        counts = Counter(kept.messages.values())
        for message, count in counts.items():
            if count > 1 and once.get(message):
                places = tuple(offset for offset, each in kept.messages.items() if each == message)
                yield kept.topic, f"{message!r} is there {count} times, at {places}", places, (message,)


def gap(history: History) -> Found:
    """Every offset from the first to the head has a message, or is recorded as a void or an orphan."""
    for kept in history.all(Kept):
        recorded = sorted([*kept.voids, *kept.orphans])
        at = kept.first
        for offset in [*sorted(kept.messages), kept.head]:
            if at < offset and not _covered(recorded, at, offset):
                yield kept.topic, f"offsets {at} to {offset - 1} are nowhere", (at, offset - 1), ()
            at = max(at, offset + 1)


def phantom(history: History) -> Found:
    """What a consumer received was sent by a producer, and is in the log afterwards; nothing else is in there."""
    sent = {event.message for event in history.all(Sent)}
    for kept in history.all(Kept):
        there = set(kept.messages.values())
        damaged = kept.voids if history.of(Damaged, kept.topic) else ()
        for got in history.of(Got, kept.topic):
            if got.offset >= kept.first and got.message not in there and not _inside(damaged, got.offset):
                what = f"{got.subscription} received {got.message!r} at {got.offset}, which is not in the log"
                yield kept.topic, what, (got.offset,), (got.message,)
        if sent:
            for offset, message in kept.messages.items():
                if message not in sent:
                    yield kept.topic, f"offset {offset} has {message!r}, which nobody sent", (offset,), (message,)


# --- who writes it ------------------------------------------------------------------------------------------


def head_back(history: History) -> Found:
    """A topic only grows: its head, from one epoch to the next, and from one answer to whatever is sent after it."""
    for topic in _reliable(history, Acked, Head):
        heads: dict[int, int] = {}
        for head in history.of(Head, topic):
            if head.head < heads.get(head.epoch, 0):
                what = f"the head of epoch {head.epoch} went from {heads[head.epoch]} back to {head.head}"
                yield topic, what, (head.head,), ()
            heads[head.epoch] = head.head
        for claimed in history.of(Claimed, topic):
            for epoch, reached in heads.items():
                if epoch < claimed.epoch and reached > claimed.start:
                    what = f"epoch {epoch} reached {reached} and epoch {claimed.epoch} begins at {claimed.start}"
                    yield topic, what, (claimed.start, reached), ()
        yield from _overtaken(history, topic)


def _overtaken(history: History, topic: str) -> Found:
    """An offset below one acknowledged before the message was sent. What a lost owner took is late by nature."""
    late = [(orphan.start, orphan.end) for orphan in history.of(Orphaned, topic)]
    sent: dict[str, float] = {}
    for event in history.all(Sent):
        sent.setdefault(event.message, event.at)
    acks = [acked for acked in history.of(Acked, topic) if not _inside(late, acked.offset)]
    acks.sort(key=lambda acked: acked.at)
    times: list[float] = []
    highest: list[int] = []
    for acked in acks:
        before = bisect_right(times, sent.get(acked.message, 0.0) - 1e-9)
        if before and highest[before - 1] > acked.offset:
            what = f"{acked.message!r} got {acked.offset}; {highest[before - 1]} was given before it was sent"
            yield topic, what, (acked.offset, highest[before - 1]), (acked.message,)
        times.append(acked.at)
        highest.append(max(acked.offset, highest[-1] if highest else -1))


def two_owners(history: History) -> Found:
    """One owner per epoch, each epoch above the last, and what it gives out lies between its start and the next one's.

    A broker that was replaced and does not know it may go on writing; what it writes must stay in its own place. By a
    clock that tells the truth, no two brokers say at one moment that they may serve the topic.
    """
    for topic in history.topics(Claimed, Serving):
        claims = history.of(Claimed, topic)
        for earlier, later in pairwise(claims):
            if later.epoch <= earlier.epoch:
                what = f"broker {later.broker} claimed epoch {later.epoch} after broker {earlier.broker} had"
                yield topic, f"{what} {earlier.epoch}", (), ()
        starts = {claimed.epoch: (claimed.broker, claimed.start) for claimed in claims}
        ends = {earlier.epoch: later.start for earlier, later in pairwise(claims)}
        for acked in history.of(Acked, topic):
            if acked.epoch not in starts:
                continue
            broker, start = starts[acked.epoch]
            if acked.broker not in (0, broker):
                what = f"broker {acked.broker} acknowledged {acked.offset} in epoch {acked.epoch} of broker {broker}"
                yield topic, what, (acked.offset,), (acked.message,)
            end = ends.get(acked.epoch)
            if acked.offset < start or (end is not None and acked.offset >= end and _is_reliable(history, topic)):
                what = f"epoch {acked.epoch} has {start} up to {end} and gave out {acked.offset}"
                yield topic, what, (acked.offset,), (acked.message,)
        for serving in history.of(Serving, topic):
            if len(serving.brokers) > 1:
                yield topic, f"brokers {list(serving.brokers)} served it at {serving.at:.3f} s", (), ()


def unreserved(history: History) -> Found:
    """No offset is given out that the store has not reserved: the next owner begins behind the reservation."""
    for given in history.all(Given):
        if given.offset >= given.reserved:
            what = f"epoch {given.epoch} gave out {given.offset} when the store had reserved up to {given.reserved}"
            yield given.topic, what, (given.offset,), ()
        elif given.believed > given.reserved:
            what = f"epoch {given.epoch} would give out offsets up to {given.believed}; the store has {given.reserved}"
            yield given.topic, what, (given.offset,), ()


def replaced_owner(history: History) -> Found:
    """A broker whose topic another one has claimed stops acknowledging within a lease, whatever it believes."""
    lease = next(iter(history.all(Lease)), None)
    if lease is None:
        return
    for topic in history.topics(Claimed):
        claims = history.of(Claimed, topic)
        over = {earlier.epoch: later for earlier, later in pairwise(claims)}
        told: set[int] = set()
        for acked in history.of(Acked, topic):
            next_owner = over.get(acked.epoch) if acked.broker else None
            if next_owner is None or acked.epoch in told:
                continue
            late = acked.at - next_owner.at
            if late > lease.seconds + ANSWER_SECONDS:
                told.add(acked.epoch)
                what = f"broker {acked.broker} acknowledged {acked.offset} in epoch {acked.epoch}, {late:.1f} s after"
                what += f" broker {next_owner.broker} had claimed epoch {next_owner.epoch}"
                yield topic, what, (acked.offset,), (acked.message,)


def stray_claim(history: History) -> Found:
    """Only a member of the cluster claims, under the session that it is registered with. One that was declared dead, or
    a claim of its that comes late, takes nothing from the next owner.
    """
    for claimed in history.all(Claimed):
        if not claimed.registered:
            what = f"broker {claimed.broker} claimed epoch {claimed.epoch}, and was not registered"
            yield claimed.topic, what, (), ()


def forgotten(history: History) -> Found:
    """Retention by size takes the oldest objects while there is more than the limit, and not one after that."""
    for event in history.all(Forgot):
        if event.size_bytes <= event.limit_bytes:
            what = f"history begins at {event.first}: its last object went when there were {event.size_bytes} bytes"
            yield event.topic, f"{what}; {event.limit_bytes} are to be kept", (event.first,), ()


# --- the brokers themselves -----------------------------------------------------------------------------------


def needless_stop(history: History) -> Found:
    """A broker that stops has a disk that failed just then. No room, a store that is away, a call that was refused, or
    a file that failed long ago and is of no more use, are no reasons (ADR 0001's table).
    """
    for event in history.all(Stopped):
        if not 0 <= event.failed_seconds <= STOP_SECONDS:
            when = "never" if event.failed_seconds < 0 else f"{event.failed_seconds:.1f} s before"
            yield f"broker {event.broker}", f"it stopped ({event.why}); its disk failed {when}", (), ()


def growth(history: History) -> Found:
    """What clients did and gave up leaves nothing behind: no task, waiter, session, consumer, handle or open file."""
    for event in history.all(Grew):
        what = f"{event.what}: {event.before} before clients came and went, {event.after} afterwards"
        yield f"broker {event.broker}", what, (), ()


def long_step(history: History) -> Found:
    """No step of the loop does so much that all other tasks, and the lease, have to wait for it."""
    for event in history.all(Worked):
        if event.ranges > RANGES_MAX:
            yield "the loop", f"one step touched {event.ranges} ranges; {RANGES_MAX} are too many already", (), ()


# --- who reads it -------------------------------------------------------------------------------------------


def cursor_back(history: History) -> Found:
    """A stored cursor never goes back."""
    for topic in history.topics(Cursor):
        stored: dict[str, int] = {}
        for cursor in history.of(Cursor, topic):
            before = stored.get(cursor.subscription, cursor.cursor)
            if cursor.cursor < before:
                what = f"the cursor of {cursor.subscription} went from {before} back to {cursor.cursor}"
                yield topic, what, (cursor.cursor, before), ()
            stored[cursor.subscription] = cursor.cursor


def repeated_after_move(history: History) -> Found:
    """After a clean move nothing comes again that the old owner had an acknowledgement for."""
    for topic in history.topics(Released):
        clean = {released.epoch for released in history.of(Released, topic) if released.clean}
        epochs = [claimed.epoch for claimed in history.of(Claimed, topic)]
        done: dict[int, set[tuple[str, int]]] = defaultdict(set)
        for event in history.of(Done, topic):
            done[event.epoch].add((event.subscription, event.offset))
        known: dict[int, set[tuple[str, int]]] = {}  # what each owner knows of its predecessors' acknowledgements
        for before, after in pairwise(epochs):
            known[after] = known.get(before, set()) | done[before] if before in clean else set()
        for got in history.of(Got, topic):
            if (got.subscription, got.offset) in known.get(got.epoch, ()):
                what = f"{got.subscription} had acknowledged {got.offset} and got it again in epoch {got.epoch}"
                yield topic, what, (got.offset,), (got.message,)


def shown_again(history: History) -> Found:
    """What a consumer has acknowledged is not shown to it again by the owner that took the acknowledgement."""
    done: set[tuple[str, str, str, int, int]] = set()
    for event in history.events:
        if isinstance(event, Done) and event.consumer:
            done.add((event.topic, event.subscription, event.consumer, event.offset, event.epoch))
        elif isinstance(event, Got):
            got = event
            if (got.topic, got.subscription, got.consumer, got.offset, got.epoch) in done:
                what = f"{got.consumer} of {got.subscription} had acknowledged {got.offset} and got it again"
                yield got.topic, what, (got.offset,), (got.message,)


def flushed_in_vain(history: History) -> Found:
    """An acknowledgement that a client reports as taken was taken by a broker, unless its topic is gone since."""
    done: set[tuple[str, str, int]] = set()
    newest: dict[str, str] = {}  # by plain name
    reliable = set(_reliable(history, Flushed))
    for event in history.events:
        if isinstance(event, Done):
            done.add((event.topic, event.subscription, event.offset))
        elif isinstance(event, Created):
            newest[event.topic.partition("@")[0]] = event.topic
        elif isinstance(event, Flushed):
            plain = event.topic.partition("@")[0]
            known = (event.topic, event.subscription, event.offset) in done
            if not known and event.topic in reliable and newest.get(plain, event.topic) == event.topic:
                what = f"{event.consumer} of {event.subscription} was told that its ack of {event.offset} was taken"
                yield event.topic, what, (event.offset,), ()


def key_order(history: History) -> Found:
    """Messages of one key come in the order of the log, the first time; only what was rescued may come late."""
    for topic in _reliable(history, Got):
        ordered = {event.subscription for event in history.of(Subscribed, topic) if event.kind != SHARED}
        newest: dict[tuple[str, str], int] = {}
        seen: set[tuple[str, int]] = set()
        for got in history.of(Got, topic):
            if got.subscription not in ordered or (got.subscription, got.offset) in seen:
                continue
            seen.add((got.subscription, got.offset))  # also if it was rescued: what comes again need not be marked
            if got.rescued:
                continue
            before = newest.get((got.subscription, got.key), -1)
            if got.offset < before:
                what = f"{got.subscription} received {got.offset} of key {got.key!r} after {before}"
                yield topic, what, (got.offset, before), (got.message,)
            newest[got.subscription, got.key] = max(before, got.offset)


def never_delivered(history: History) -> Found:
    """At least once: every message from a subscription's start on reached one of its consumers, while it had any.

    Once everything has come to rest it was also acknowledged, or is a dead letter: what a consumer received and never
    answered for was not delivered.
    """
    at_rest = bool(history.all(Quiet))
    for kept in history.all(Kept):
        received: dict[str, set[int]] = defaultdict(set)
        for got in history.of(Got, kept.topic):
            received[got.subscription].add(got.offset)
        for event in history.of(Subscribed, kept.topic):
            meant = _meant_for(history, event, kept)
            missing = sorted(meant - received[event.subscription])
            if missing:
                what = f"{event.subscription} never received {len(missing)} messages, the first at {missing[0]}"
                yield kept.topic, what, tuple(missing[:3]), (kept.messages[missing[0]],)
            settled = {each.offset for each in history.of(Done, kept.topic) if each.subscription == event.subscription}
            settled |= {each.offset for each in history.of(Dead, kept.topic) if each.subscription == event.subscription}
            skipped = sorted(meant - settled - set(missing))
            if skipped and at_rest:
                what = f"{event.subscription} acknowledged everything but {len(skipped)}, the first at {skipped[0]}"
                yield kept.topic, what, tuple(skipped[:3]), (kept.messages[skipped[0]],)


def delivered_twice(history: History) -> Found:
    """At most once, in a topic that keeps nothing: each subscription gets a message once or not at all."""
    for topic in history.topics(Got):
        if not _is_reliable(history, topic):
            counts = Counter((got.subscription, got.message) for got in history.of(Got, topic))
            for (subscription, message), count in counts.items():
                if count > 1:
                    yield topic, f"{subscription} received {message!r} {count} times", (), (message,)


def dead_letter(history: History) -> Found:
    """A message is a dead letter when its policy says so: not before its last try, and then always.

    Tries are counted by the owner, so a new one may begin again; but no owner tries more often than it may.
    """
    for topic in history.topics(Policy):
        policies: dict[str, list[Policy]] = defaultdict(list)
        for policy in history.of(Policy, topic):
            policies[policy.subscription].append(policy)
        nacks = Counter((event.subscription, event.offset) for event in history.of(Nacked, topic))
        by_epoch = Counter((event.subscription, event.offset, event.epoch) for event in history.of(Nacked, topic))
        dead = {(event.subscription, event.offset): event for event in history.of(Dead, topic)}
        for (subscription, offset), event in dead.items():
            allowed = [each.redeliveries for each in policies[subscription] if each.dead_letter]
            if not allowed or nacks[subscription, offset] <= min(allowed):
                count = nacks[subscription, offset]
                what = f"{offset} of {subscription} is a dead letter after {count} failures; policies {allowed}"
                yield topic, what, (offset,), (event.message,)
        for (subscription, offset, epoch), count in by_epoch.items():
            tries = [each.redeliveries for each in policies[subscription]]
            if all(each.dead_letter for each in policies[subscription]) and tries and count > max(tries) + 1:
                what = f"{subscription} tried {offset} {count} times in epoch {epoch}; its policy says {max(tries) + 1}"
                yield topic, what, (offset,), ()
        yield from _unsettled(history, topic, set(policies), dead)


def _unsettled(history: History, topic: str, judged: set[str], dead: dict[tuple[str, int], Dead]) -> Found:
    """What was refused and neither acknowledged nor copied."""
    done = {(event.subscription, event.offset) for event in history.of(Done, topic)}
    refused = {(event.subscription, event.offset) for event in history.of(Nacked, topic)}
    for kept in history.of(Kept, topic):
        for subscription, offset in sorted(refused - done - set(dead)):
            if subscription in judged and offset in kept.messages:
                what = f"{subscription} refused {offset} for good, and it is nowhere"
                yield topic, what, (offset,), (kept.messages[offset],)


def stuck(history: History) -> Found:
    """When nothing fails any more, a subscription that has something to get goes on getting it."""
    quiet = next(iter(history.all(Quiet)), None)
    if quiet is None:
        return
    for kept in history.all(Kept):
        for event in history.of(Subscribed, kept.topic):
            deliveries = [got for got in history.of(Got, kept.topic) if got.subscription == event.subscription]
            waiting = _meant_for(history, event, kept)
            waiting -= {got.offset for got in deliveries if got.at <= quiet.at}
            waiting -= {acked.offset for acked in history.of(Acked, kept.topic) if acked.at > quiet.at}
            last = quiet.at
            for got in (got for got in deliveries if got.at > quiet.at):
                if waiting and got.at - last > quiet.patience_seconds:
                    what = f"{event.subscription} got nothing for {got.at - last:.1f} s; {min(waiting)} was waiting"
                    yield kept.topic, what, (min(waiting),), ()
                waiting.discard(got.offset)
                last = got.at


# --- help ---------------------------------------------------------------------------------------------------


RULES: Final[Sequence[Callable[[History], Found]]] = (
    lost_write,
    duplicate_offset,
    stored_twice,
    gap,
    phantom,
    head_back,
    two_owners,
    unreserved,
    replaced_owner,
    stray_claim,
    forgotten,
    needless_stop,
    growth,
    long_step,
    cursor_back,
    repeated_after_move,
    shown_again,
    flushed_in_vain,
    key_order,
    never_delivered,
    delivered_twice,
    dead_letter,
    stuck,
)


def shortened(history: History, violations: Sequence[Violation], *, events_max: int = 60) -> list[Event]:
    """The events that the violations are about, and who owned the topic at the time."""
    topics = {violation.topic for violation in violations}
    offsets = {(each.topic, offset) for each in violations for offset in each.offsets}
    messages = {message for violation in violations for message in violation.messages}

    def matters(event: Event) -> bool:
        if isinstance(event, Kept | Serving | Head):
            return False
        if isinstance(event, Claimed | Released | Orphaned | Created | Subscribed):
            return event.topic in topics
        if getattr(event, "message", None) in messages:
            return True
        return (getattr(event, "topic", None), getattr(event, "offset", None)) in offsets

    return [event for event in history.events if matters(event)][:events_max]


def _meant_for(history: History, subscribed: Subscribed, kept: Kept) -> set[int]:
    """The messages that are there at the end, and that a consumer of the subscription was to get."""
    first = max(subscribed.start, kept.first)
    ends = [departed.head for departed in history.of(Departed, kept.topic)]
    return {at for at in kept.messages if at >= first and all(at < end for end in ends)}


def _is_reliable(history: History, topic: str) -> bool:
    return all(event.reliable for event in history.of(Created, topic))


def _reliable(history: History, *kinds: type[Event]) -> list[str]:
    return [topic for topic in history.topics(*kinds) if _is_reliable(history, topic)]


def _inside(ranges: Sequence[tuple[int, int]], offset: int) -> bool:
    return any(first <= offset < end for first, end in ranges)


def _covered(ranges: Sequence[tuple[int, int]], first: int, end: int) -> bool:
    """Whether `ranges`, sorted, cover [first, end) together."""
    for start, stop in ranges:
        if start <= first < stop:
            first = stop
    return first >= end
