"""Runs one dispatch machine: feeds it events, carries out its effects, in order.

    commit ──► notifier task ──┐
    timer  ──► heartbeat ──────┼──► machine.step ──► shipper task ──► outbox ──► stream
    ack, nack, join, leave ────┘         └──► cursor, timer, log lines

Three things may wake it, and each alone is enough: the notifier is fast, the heartbeat cannot be lost. Only the shipper
waits (it reads the log), and it never waits for a consumer: the machine hands out no more than an outbox may hold.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from pydanube.broker.cursors import Cursors
from pydanube.broker.kept import Kept
from pydanube.broker.outbox import (
    CHUNK_BYTES,
    AnyOutbox,
    BatchOutbox,
    Budget,
    Delivered,
    DeliveredBatch,
    MessageOutbox,
    Outbox,
    Recalled,
    Registration,
    cost_bytes,
)
from pydanube.broker.ownership import Ownership
from pydanube.broker.timer import Timer
from pydanube.core import keys
from pydanube.core.delivery import FailurePolicy, dead_letter_attributes
from pydanube.core.events import (
    Acked,
    AckRefused,
    Activated,
    Available,
    Blocked,
    DeadLetter,
    DeadLettered,
    DeadLetterFailed,
    Dropped,
    Event,
    Expired,
    Forgotten,
    Granted,
    Handed,
    HistoryAvailable,
    Joined,
    JoinRefused,
    Keyed,
    Left,
    Nacked,
    NotHeld,
    PolicyChanged,
    Ranges,
    ReadKeys,
    Recall,
    Returned,
    SaveCursor,
    Send,
    Shipped,
    Skipped,
    Sought,
    Stopped,
    Ticked,
    Trimmed,
    Voided,
    WakeAt,
    Withheld,
)
from pydanube.core.lag import Heartbeat, LagInfo, Standing, beat, explain
from pydanube.core.limits import TokenBucket
from pydanube.core.machine import Machine
from pydanube.core.names import ConsumerId, SubscriptionName, TopicName, consumer_id, producer_id
from pydanube.core.policies import SubscriptionKind
from pydanube.core.ranges import OffsetRange
from pydanube.core.roster import DispatchLimits, Permits
from pydanube.core.window import SavedPosition
from pydanube.errors import (
    AckOutdated,
    ConsumerUnknown,
    DanubeError,
    NotServed,
    OffsetOutOfRange,
    Refused,
    SubscriptionBusy,
)
from pydanube.log.batch import Batch, Envelope
from pydanube.log.wal import TopicLog
from pydanube.ports import Clock, Put
from pydanube.telemetry import SubscriptionMetrics

log = logging.getLogger(__name__)

ATTACH_SECONDS: Final = 10.0  # a consumer that subscribed and never opens its stream gives its messages back
POLLING: Final = Heartbeat()
TURN_RANGES: Final = 64  # read for a consumer before others have a turn: what is cached is read without waiting
EXPIRED_NAMED_MAX: Final = 10  # ranges in a log line
MISSED_SECONDS: Final = 10.0  # between two log lines about notifications that one subscription missed
FENCED_SECONDS: Final = 0.1  # how often a broker that may not serve looks whether it may again

Read = TypeVar("Read")


class Source(Protocol):
    """The topic, as its subscriptions read it."""

    @property
    def name(self) -> TopicName: ...
    @property
    def log(self) -> TopicLog: ...
    @property
    def ownership(self) -> Ownership: ...
    @property
    def first_offset(self) -> int: ...
    @property
    def retained_from(self) -> int: ...

    async def rows(self, first: int, end: int, bytes_max: int | None = None) -> list[tuple[int, Envelope]]: ...

    async def batches(self, first: int, end: int, bytes_max: int) -> list[Batch]: ...

    async def row_keys(self, first: int, end: int) -> list[tuple[int, str]]: ...


class Services(NamedTuple):
    """What every subscription of a broker shares."""

    clock: Clock
    timer: Timer
    cursors: Cursors
    dead_letter: Callable[[TopicName, Envelope], Awaitable[None]]
    broker_url: Callable[[], str]  # as bound, which is known only when the doors are open
    kept: Kept
    outboxes: Budget
    may_serve: Callable[[], bool] = lambda: True  # False while the broker's lease may have run out


class Subscription:
    """One subscription of a reliable topic."""

    def __init__(
        self,
        source: Source,
        name: SubscriptionName,
        kind: SubscriptionKind,
        machine: Machine,
        services: Services,
        metrics: SubscriptionMetrics,
        *,
        heartbeat: Heartbeat = POLLING,
        consumers: Iterable[Registration] = (),
        cursor_revision: int | None = None,
        seeks: int = 0,
    ) -> None:
        self.name = name
        self.kind = kind
        self.heartbeat = heartbeat
        self.cursor_revision = cursor_revision
        self.metrics = metrics
        self._source = source
        self._machine = machine
        self._services = services
        self._consumers = {each.consumer_id: each for each in consumers}
        for each in self._consumers.values():
            each.silent_since = services.clock.elapsed()  # those of an earlier process have their time again
        self._work: deque[tuple[Send | Recall | ReadKeys | DeadLetter, AnyOutbox | None]] = deque()
        self._parked: dict[AnyOutbox, deque[Send]] = {}  # for consumers whose outbox has no room, in order
        self._has_work = asyncio.Event()
        self._closed = False
        self.own_heartbeat: Heartbeat | None = None  # what was set for it, if anything was
        self._beat_at = 0.0
        self._missed = 0  # notifications, as heartbeats found, that no log line has told of
        self._missed_said_at: float | None = None
        self._read_error: DanubeError | None = None
        self.seeks = seeks  # how often it was moved, by all its owners
        self._moving = asyncio.Lock()  # held while it is being moved
        self._frozen: DanubeError | None = None
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._notifier: asyncio.Task[None] | None = None
        self._shipper: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._notifier = asyncio.create_task(self._notify(), name=f"notify {self._source.name} {self.name}")
        self._shipper = asyncio.create_task(self._ship(), name=f"ship {self._source.name} {self.name}")
        self._schedule_beat()
        self._step(Available(self._source.log.head))

    async def close(self, error: DanubeError, *, save: bool = True) -> None:
        """Streams end with `error`; the cursor is saved, unless somebody else has the topic already."""
        self._closed = True
        self._frozen = error  # an ack that comes behind this would count nowhere
        for each in self._consumers.values():
            self._disconnect(each, error)
        for task in (self._notifier, self._shipper):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if save:
            await self._services.cursors.flush([self], last=True)
        self._services.cursors.forget(self)

    def freeze(self, error: DanubeError) -> None:
        """The topic is about to leave: nothing is sent and no ack is taken, so that the cursor is final."""
        self._frozen = error
        self._thawed.clear()

    def thaw(self) -> None:
        """It stays after all."""
        self._frozen = None
        self._thawed.set()
        self._step(Available(self._source.log.head))

    def withhold(self, ranges: Ranges) -> None:
        """Offsets that nobody can read now."""
        self._step(Withheld(ranges))

    def reveal(self, rescued: Ranges, voided: Ranges) -> None:
        """Offsets that could not be read: these can now, those never will."""
        if voided:
            self._step(Voided(voided))
        self._step(HistoryAvailable(rescued))
        self._step(Ticked())

    @property
    def ownership(self) -> Ownership:
        return self._source.ownership

    async def save(self) -> None:
        """Stores the cursor for good: the topic is handed over. Raises if the store does not take it."""
        await self._services.cursors.save_one(self)

    @property
    def changes(self) -> int:
        return self._machine.progress.changes

    @property
    def cut(self) -> int:
        """Acknowledged messages that the stored position has no room for: who restores it delivers them again."""
        return self._services.cursors.cut(self)

    def saved(self) -> SavedPosition:
        return self._machine.saved()

    def saving(self, size_max_bytes: int) -> Generator[None, None, SavedPosition]:
        return self._machine.saving(size_max_bytes)

    # --- consumers ----------------------------------------------------------------------------------

    @property
    def consumers(self) -> list[Registration]:
        return list(self._consumers.values())

    @property
    def connected(self) -> int:
        return sum(each.connected for each in self._consumers.values())

    def knows(self, consumer: ConsumerId) -> bool:
        return consumer in self._consumers

    def registration(self, consumer: ConsumerId) -> Registration | None:
        return self._consumers.get(consumer)

    def held_by(self, consumer: ConsumerId) -> int:
        """Messages that it was sent, or is about to be, and has not acknowledged."""
        member = self._machine.roster.get(consumer)
        return member.held if member is not None else 0

    def is_connected(self, consumer: ConsumerId) -> bool:
        registration = self._consumers.get(consumer)
        return registration is not None and registration.connected

    def is_healthy(self, consumer: ConsumerId) -> bool:
        """Whether the consumer has a stream or has just subscribed. Asking counts as a sign of life."""
        registration = self._consumers.get(consumer)
        if registration is None:
            return False
        registration.silent_since = self._services.clock.elapsed()
        return registration.connected

    def join(
        self, name: str, key_filters: tuple[str, ...], *, native: bool = False, hands_over: bool = False
    ) -> ConsumerId:
        """A consumer subscribes: messages are kept for it from now on, its stream follows.

        The same name again is a takeover: the old stream ends, what it held is delivered again, the id is the same.
        A `native` one gets stored batches, as many as it grants permits for. One that `hands_over` says what its
        application takes, and deadlines begin then.
        """
        identity = consumer_id(self._source.name, self.name, name)
        registration = self._consumers.get(identity)
        if registration is None:
            registration = Registration(identity, name, key_filters)
        elif key_filters:
            registration.key_filters = key_filters
        registration.native = native
        registration.hands_over = native and hands_over
        known = identity in self._consumers
        self._consumers[identity] = registration  # first: joining may send to it at once
        try:
            self._connect(registration)
        except SubscriptionBusy:
            if not known:
                del self._consumers[identity]
            raise
        return identity

    def attach(self, consumer: ConsumerId) -> MessageOutbox:
        """The consumer's stream opens. A stream it already had ends cleanly."""
        registration = self._consumers.get(consumer)
        if registration is None or self._closed:
            raise ConsumerUnknown(consumer)
        if registration.outbox is None or registration.attached or registration.native:
            registration.native = registration.hands_over = False
            self._connect(registration)
        registration.attached = True
        assert isinstance(registration.outbox, MessageOutbox)
        return registration.outbox

    def attach_native(self, consumer: ConsumerId) -> BatchOutbox:
        """The outbox of a consumer that has just joined natively."""
        registration = self._consumers[consumer]
        assert registration.native and registration.outbox is not None
        registration.attached = True
        return registration.outbox

    def grant(self, consumer: ConsumerId, permits: Permits) -> None:
        """A native consumer has room for so much more."""
        self._step(Granted(consumer, permits))

    def detach(self, consumer: ConsumerId, outbox: AnyOutbox) -> None:
        """The stream has ended: what it held goes to others, or to the consumer when it comes back."""
        registration = self._consumers.get(consumer)
        if registration is not None and registration.outbox is outbox:
            self._disconnect(registration, None)
            self._services.cursors.left(self)

    def forget(self, consumer: ConsumerId) -> None:
        """The registration itself is removed."""
        registration = self._consumers.pop(consumer, None)
        if registration is not None:
            self._disconnect(registration, None)
            self._step(Forgotten(consumer))

    def _connect(self, registration: Registration) -> None:
        fresh: AnyOutbox = Outbox() if registration.native else MessageOutbox(self._services.outboxes)
        previous, registration.outbox = registration.outbox, fresh
        permits = Permits(0, 0) if registration.native else None
        joined = Joined(registration.consumer_id, permits, registration.key_filters, registration.hands_over)
        refused = self._step(joined)
        if isinstance(refused, JoinRefused):
            registration.outbox = previous
            holder = self._consumers.get(refused.active)
            raise SubscriptionBusy(self._source.name, self.name, holder.name if holder else "another")
        if previous is not None:
            self._parked.pop(previous, None)
            previous.end()
        registration.attached = False
        now = self._services.clock.elapsed()
        registration.silent_since = now
        self._services.timer.call_at(now + ATTACH_SECONDS, lambda _: self._give_up_on(registration, fresh))

    def _give_up_on(self, registration: Registration, outbox: AnyOutbox) -> None:
        if registration.outbox is outbox and not registration.attached:
            self._disconnect(registration, None)

    def _disconnect(self, registration: Registration, error: DanubeError | None) -> None:
        outbox, registration.outbox = registration.outbox, None
        registration.attached = False
        registration.silent_since = self._services.clock.elapsed()
        if outbox is not None:
            self._parked.pop(outbox, None)
            outbox.end(error)
            self._step(Left(registration.consumer_id))

    # --- what clients and administrators say --------------------------------------------------------

    def ack_ranges(self, ranges: Ranges, seeks: int | None = None, consumer: ConsumerId | None = None) -> None:
        """Acknowledges what is committed, whether or not this owner has sent it; twice is as good as once.

        Raises OffsetOutOfRange if some are not committed, and AckOutdated if some were delivered before a seek and not
        since; the others count all the same. With `seeks`, the number that the deliveries had, all of them are judged.
        """
        self._settle(Acked(ranges, consumer), seeks)

    def nack_ranges(
        self,
        ranges: Ranges,
        delay_seconds: float = 0.0,
        reason: str = "",
        seeks: int | None = None,
        consumer: ConsumerId | None = None,
    ) -> None:
        """What is not in flight is delivered (again) anyhow. Raises as `ack_ranges` does."""
        self.metrics.nacks.inc(sum(each.size for each in ranges))
        self._settle(Nacked(ranges, delay_seconds, reason, consumer), seeks)

    def handed(self, consumer: ConsumerId, ranges: Ranges, seeks: int) -> None:
        """A consumer's application has these now. What was delivered before a seek is not its business any more."""
        if seeks == self.seeks and not self._closed:
            self._step(Handed(consumer, ranges))

    def extend(self, consumer: ConsumerId, ranges: Ranges, seeks: int, seconds: float) -> None:
        """A consumer's application needs these for so long, from now. Raises if one of them is not its own any more."""
        self._check_serving()
        if seeks != self.seeks:
            raise AckOutdated(self._source.name, self.name, ranges[0].first)
        refused = self._step(Handed(consumer, ranges, seconds))
        if isinstance(refused, NotHeld):
            raise Refused(
                f"offset {refused.ranges[0].first} of {self._source.name} is not held by this consumer of subscription "
                f"{self.name} any more: its time was over, or it is acknowledged; it cannot be held for longer"
            )

    def give_back(
        self, consumer: ConsumerId, ranges: Ranges, seeks: int, *, stop: bool = False, taken: int = 0
    ) -> None:
        """A consumer's application has not seen these, and will not; with `stop` it wants nothing more at all."""
        if self._closed:
            return  # everything that is not acknowledged is delivered again
        # Also while the topic is about to leave: it may stay after all, and this is said once.
        if stop:
            self._step(Stopped(consumer))
        if ranges and seeks == self.seeks:
            self._step(Returned(consumer, ranges, taken))

    def still_held(self, consumer: ConsumerId, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of these is on its way to the consumer still: not acknowledged meanwhile, say."""
        in_flight = self._machine.in_flight
        return [
            (piece.first, piece.end)
            for first, end in ranges
            for piece in in_flight.overlap(first, end)
            if piece.value.consumer == consumer
        ]

    def is_wanted(self, consumer: ConsumerId, delivered: Delivered) -> bool:
        """What comes again may have been answered while it was on its way to the wire: nobody is to see that."""
        return delivered.attempt == 1 or bool(self.still_held(consumer, [(delivered.offset, delivered.offset + 1)]))

    def _check_serving(self) -> None:
        if self._frozen is not None:
            raise self._frozen
        if not self._services.may_serve():  # what is acknowledged here may count nowhere
            raise NotServed(self._source.name, "this broker's lease was not renewed in time, so another may have it")

    def _settle(self, event: Acked | Nacked, seeks: int | None) -> None:
        self._check_serving()
        if seeks is not None and seeks != self.seeks:
            raise AckOutdated(self._source.name, self.name, event.ranges[0].first)
        head = self._source.log.head
        if self._machine.progress.head < head and any(end > self._machine.progress.head for _, end in event.ranges):
            self._step(Available(head))  # the notifier has not come round yet
        refused = self._step(event)
        if isinstance(refused, AckRefused):
            offset = refused.ranges[0].first
            if offset < head:
                raise AckOutdated(self._source.name, self.name, offset)
            raise OffsetOutOfRange(self._source.name, offset, self._source.first_offset, head)

    def ack(self, offset: int) -> None:
        self.ack_ranges((OffsetRange(offset, offset + 1),))

    def nack(self, offset: int, delay_seconds: float = 0.0, reason: str = "") -> None:
        self.nack_ranges((OffsetRange(offset, offset + 1),), delay_seconds, reason)

    async def move_to(self, offset: int) -> int:
        """As `seek`, and stored when it returns: how often it was moved now. Raises what keeps it from being stored.

        First its number is: consumers may hold acks of earlier deliveries, and bring them to whoever owns the topic
        then. If only the number is stored, such acks are void and their messages come again; nothing else happens.
        """
        async with self._moving:
            self._check_serving()
            number = Put(keys.seeks(self._source.name, self.name), str(self.seeks + 1).encode())
            await self._source.ownership.write([number])
            self._check_serving()  # a move of the topic has perhaps stored the last cursor meanwhile
            self.seek(offset)
            moved = self.seeks
            await self.save()
            return moved

    def seek(self, offset: int) -> None:
        """Delivery goes on at `offset`, whatever was acknowledged.

        What was on its way to consumers is dropped; they never see it, so they get back the permits it took.
        """
        self.seeks += 1
        sends = [effect for effect, _ in self._work if isinstance(effect, Send)]
        self._work.clear()
        self._parked.clear()
        unsent = {each.consumer_id: each.outbox.clear() for each in self._consumers.values() if each.outbox is not None}
        self._step(Sought(offset))
        for send in sends:
            self._take_back(send)
        for consumer, items in unsent.items():
            if self._consumers[consumer].native and items:
                batches = [item for item in items if isinstance(item, DeliveredBatch)]
                rows = sum(end - first for item in batches for first, end in item.ranges)
                size_bytes = sum(item.batch.header.size_bytes for item in batches)
                self._step(Granted(consumer, Permits(rows, size_bytes)))

    def _take_back(self, send: Send) -> None:
        """It will not be sent, and a seek has settled what becomes of its messages."""
        registration = self._consumers.get(send.consumer)
        if registration is not None and registration.native:
            self._step(Shipped(send.consumer, 0, ()))
            self._step(Granted(send.consumer, Permits(sum(each.size for each in send.ranges), 0)))

    def change(self, *, policy: FailurePolicy | None = None, limits: DispatchLimits | None = None) -> None:
        """Takes effect at once, also for what is in flight."""
        self._step(PolicyChanged(policy, limits))

    def change_rate(self, rate: TokenBucket | None) -> None:
        """None: no limit. Takes effect at once."""
        self._step(PolicyChanged(rate=rate or False))

    def change_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self._schedule_beat()

    @property
    def limits(self) -> DispatchLimits:
        return self._machine.roster.limits

    @property
    def policy(self) -> FailurePolicy:
        return self._machine.policy

    def standing(self) -> Standing:
        return self._machine.standing(self._source.log.head)

    def has_lag(self) -> bool:
        return self._machine.has_lag(self._source.log.head)

    def get_lag_info(self) -> LagInfo:
        return self._machine.get_lag_info(self._source.log.head)

    def explain(self) -> str:
        """Why the subscription is, or is not, receiving."""
        sentence = explain(self.standing(), self._services.clock.elapsed(), expired=self.metrics.skipped.value)
        return sentence if self._read_error is None else f"{sentence} The log cannot be read: {self._read_error}."

    # --- what wakes it ------------------------------------------------------------------------------

    async def _notify(self) -> None:
        """The fast path: every commit is a poll."""
        topic_log = self._source.log
        seen = topic_log.head
        while not topic_log.closed:
            await topic_log.wait_beyond(seen)
            seen = topic_log.head
            self.metrics.notifier_polls.inc()
            self._step(Available(seen))

    def _schedule_beat(self) -> None:
        if self.heartbeat.interval_ms is not None and not self._closed:
            self._beat_at = self._services.timer.next_beat(self.heartbeat.interval_ms / 1000)
            self._services.timer.call_at(self._beat_at, self._beat)

    def _beat(self, now: float) -> None:
        """The safety net: trusts the log's head and nothing that it was told."""
        if self._closed or now < self._beat_at or self.heartbeat.interval_ms is None:
            return  # the interval was changed, and another beat is on its way, or none
        head = self._source.log.head
        if self._machine.progress.next_unacked < self._source.retained_from:
            self._step(Trimmed(self._source.retained_from))  # also while nobody is connected to ask for it
        if self._machine.progress.next_unacked < head:
            standing = self._machine.standing(head)
            if beat(standing, POLLING, now).poll:
                self.metrics.lag_detected.inc()
                self._say_missed(now)
                if self.heartbeat.polls:
                    self.metrics.heartbeat_polls.inc()
                    self._step(Available(head))
                    self._step(Ticked())
        self._schedule_beat()

    def _say_missed(self, now: float) -> None:
        """No notification told of what the heartbeat found. It should never be so, and may be so at every beat."""
        self._missed += 1
        if self._missed_said_at is not None and now - self._missed_said_at < MISSED_SECONDS:
            return
        lag = self.get_lag_info()
        does = "Heartbeat detected lag, triggering poll" if self.heartbeat.polls else "Heartbeat detected lag"
        fields = {"lag": lag.lag_messages, "cursor": lag.cursor, "head": lag.head, "times": self._missed}
        self._say(logging.WARNING, does, **fields)
        self._missed, self._missed_said_at = 0, now

    def _wake(self, now: float) -> None:
        if not self._closed:
            self._step(Ticked())

    # --- effects ------------------------------------------------------------------------------------

    def _step(self, event: Event) -> JoinRefused | AckRefused | NotHeld | None:
        """Never waits. Returns the machine's refusal, if `event` was a join, an ack, a nack, or asked for more time."""
        refused: JoinRefused | AckRefused | NotHeld | None = None
        changes = self._machine.progress.changes
        effects = self._machine.step(event, self._services.clock.elapsed())
        if self._machine.progress.changes != changes:
            self._services.cursors.changed(self)  # also an ack above the cursor: it is saved as a hole
        for effect in effects:
            match effect:
                case Send(consumer) | Recall(consumer):
                    if isinstance(effect, Send) and log.isEnabledFor(logging.DEBUG):
                        self._say(logging.DEBUG, "consumer chosen", consumer=consumer, offsets=effect.ranges)
                    # The outbox as it is now: whoever comes back under the same id gets his own Sends.
                    self._queue(effect, self._consumers[consumer].outbox if consumer in self._consumers else None)
                case ReadKeys() | DeadLetter():
                    if isinstance(effect, DeadLetter):
                        self._count_poison(effect.range.size)
                    self._queue(effect, None)
                case SaveCursor():
                    pass  # known already: whatever moves the cursor settles something
                case WakeAt(time):
                    self._services.timer.call_at(time, self._wake)
                case JoinRefused() | AckRefused() | NotHeld():
                    refused = effect
                case Blocked(offset, tries, key):
                    self._count_poison(1)
                    self._say(logging.ERROR, "subscription blocked by poison", offset=offset, key=key, tries=tries)
                case Dropped(dropped, tries):
                    self._count_poison(dropped.size)
                    self._say(logging.WARNING, "messages dropped by policy", offsets=dropped, tries=tries)
                case Expired(expired):
                    messages = sum(each.size for each in expired)
                    self.metrics.skipped.inc(messages)
                    named = expired[:EXPIRED_NAMED_MAX]
                    self._say(logging.WARNING, "retention passed the subscription", offsets=named, messages=messages)
                case Activated(consumer):
                    self._say(logging.INFO, "consumer activated", consumer=consumer)
                case Skipped():
                    pass  # the reference does so; a line each would be one per message
                case _:
                    pass
        return refused

    def _count_poison(self, messages: int) -> None:
        self.metrics.exhausted[self._machine.policy.poison_policy.value] += messages

    def _queue(self, effect: Send | Recall | ReadKeys | DeadLetter, outbox: AnyOutbox | None) -> None:
        self._work.append((effect, outbox))
        self._has_work.set()

    def _say(self, level: int, phrase: str, **fields: object) -> None:
        log.log(level, phrase, extra={"topic": self._source.name, "subscription": self.name, **fields})

    async def _ship(self) -> None:
        """Carries out what needs the log, in order."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._work:
                await asyncio.sleep(0)  # what it needs may be cached, and then nothing below waits
                await self._thawed.wait()
                while not self._services.may_serve():
                    await self._services.clock.sleep(FENCED_SECONDS)
                if not self._work:
                    break  # a seek took everything back meanwhile
                effect, outbox = self._work.popleft()
                match effect:
                    case Send():
                        await self._send(effect, outbox)
                    case Recall(consumer, ranges, taken):
                        registration = self._consumers.get(consumer)
                        if outbox is not None and registration is not None and registration.outbox is outbox:
                            outbox.put([Recalled(ranges, self.seeks, taken)])  # behind what it speaks of
                    case ReadKeys(wanted):
                        await self._read_keys(wanted)
                    case DeadLetter():
                        await self._dead_letter(effect)

    async def _send(self, send: Send, outbox: AnyOutbox | None) -> None:
        registration = self._consumers.get(send.consumer)
        if outbox is None or registration is None or registration.outbox is not outbox:
            return  # it left; what it held has been taken back
        if registration.native:
            await self._send_batches(send, registration, outbox)
            return
        assert isinstance(outbox, MessageOutbox)
        if outbox in self._parked:
            self._parked[outbox].append(send)  # behind what waits already
            return
        unsent: Ranges = ()
        parked: Ranges = ()
        rows: list[tuple[int, Envelope]] = []
        seeks, room_bytes = self.seeks, outbox.room_bytes
        for place, (first, end) in enumerate(send.ranges):
            if place % TURN_RANGES == TURN_RANGES - 1:
                await asyncio.sleep(0)
            if room_bytes <= 0:
                parked = send.ranges[place:]
                break
            got = await self._rows(first, end, room_bytes)
            rows += got
            room_bytes -= sum(cost_bytes(message) for _, message in got)
            reached = got[-1][0] + 1 if got else first
            if reached < end and room_bytes <= 0:
                parked = (OffsetRange(reached, end), *send.ranges[place + 1 :])
                break
            if reached < end:  # what comes behind it waits, or it would come before it
                unsent = (OffsetRange(reached, end), *send.ranges[place + 1 :])
                break
        if registration.outbox is not outbox or self.seeks != seeks:
            return  # it left while we read, or wants something else now
        if rows:
            outbox.put(Delivered(offset, message, send.attempt) for offset, message in rows)
            self._count(send, len(rows), sum(len(message.payload) for _, message in rows))
        if parked and isinstance(outbox, MessageOutbox):
            self._parked[outbox] = deque([replace(send, ranges=parked)])
            outbox.when_room = partial(self._unpark, outbox)
        if unsent:
            self._step(Shipped(send.consumer, 0, unsent))
            self._hold_back(outbox)

    def _unpark(self, outbox: AnyOutbox) -> None:
        """The consumer took something: what waited for room goes first."""
        sends = self._parked.pop(outbox, ())
        self._work.extendleft((send, outbox) for send in reversed(sends))
        self._has_work.set()

    def _hold_back(self, outbox: AnyOutbox) -> None:
        """Something could not be read, or was too large: what is queued behind it for the same consumer waits too, to
        keep the order.
        """
        later = [effect for effect, target in self._work if target is outbox and isinstance(effect, Send)]
        self._work = deque(each for each in self._work if each[1] is not outbox or not isinstance(each[0], Send))
        for send in later:
            self._step(Shipped(send.consumer, 0, send.ranges))

    def _count(self, send: Send, rows: int, size_bytes: int) -> None:
        self.metrics.delivered.inc(rows)
        if (registration := self._consumers.get(send.consumer)) is not None:
            registration.sent += rows
        self.metrics.delivered_bytes.inc(size_bytes)
        if send.attempt > 1:
            self.metrics.redeliveries.inc(rows)

    async def _send_batches(self, send: Send, registration: Registration, outbox: BatchOutbox) -> None:
        """Stored batches as they are; which offsets are meant is said beside them. Stops when the bytes are used up."""
        size_max = send.size_max_bytes or 0
        size_bytes = rows = 0
        unsent: list[OffsetRange] = []
        found: list[tuple[Batch, list[tuple[int, int]]]] = []
        seeks = self.seeks
        known: list[Batch] = []  # what was read last; ranges are often many in one batch
        last = max(each.end for each in send.ranges)
        for place, (first, end) in enumerate(send.ranges):
            if place % TURN_RANGES == TURN_RANGES - 1:
                await asyncio.sleep(0)
            reached = first
            while reached < end and size_bytes < size_max:
                known = known[_holding(known, reached) :]
                if not known or known[0].header.base_offset > reached:
                    known = await self._read(self._source.batches(reached, last, size_max - size_bytes))
                if not known or known[0].header.base_offset >= end:
                    break
                batch = known[0]
                upto = min(end, batch.header.end_offset)
                meant = (max(reached, batch.header.base_offset), upto)
                if found and found[-1][0] is batch:
                    found[-1][1].append(meant)
                else:
                    found.append((batch, [meant]))
                    size_bytes += batch.header.size_bytes
                rows += meant[1] - meant[0]
                reached = upto
            if reached < end:
                unsent = [OffsetRange(reached, end), *send.ranges[place + 1 :]]
                break
        if registration.outbox is not outbox:
            return
        if self.seeks != seeks:
            self._take_back(send)
            return
        outbox.put(DeliveredBatch(batch, tuple(meant), send.attempt, seeks) for batch, meant in found)
        self._count(send, rows, size_bytes)
        self._step(Shipped(send.consumer, size_bytes, tuple(unsent)))
        if unsent:
            self._hold_back(outbox)

    async def _rows(self, first: int, end: int, bytes_max: int) -> list[tuple[int, Envelope]]:
        """What the log has of [first, end) now. A reader with nothing to give is asked again by the heartbeat."""
        return await self._read(self._source.rows(first, end, bytes_max))

    async def _read(self, reading: Awaitable[list[Read]]) -> list[Read]:
        try:
            found = await reading
        except OffsetOutOfRange as error:
            kept_from = self._source.first_offset
            if error.offset < kept_from:
                self._step(Trimmed(kept_from))
            else:  # a gap between epochs: what lies before it is still to be acknowledged
                self._step(Voided((OffsetRange(error.offset, error.first),)))
            self._services.timer.call_at(self._services.clock.elapsed(), self._wake)  # what comes behind can go now
            return []
        except DanubeError as error:
            if str(error) != str(self._read_error):
                self._say(logging.ERROR, "log cannot be read", why=str(error))
            self._read_error = error
            return []
        self._read_error = None
        return found

    async def _read_keys(self, wanted: OffsetRange) -> None:
        self._step(Keyed(tuple(await self._read(self._source.row_keys(wanted.first, wanted.end)))))

    async def _dead_letter(self, effect: DeadLetter) -> None:
        """Copies, then counts them as done. A copy that fails is tried again later."""
        done = effect.range.first
        try:
            while rows := await self._source.rows(done, effect.range.end, CHUNK_BYTES):
                for offset, message in rows:
                    attributes = dead_letter_attributes(
                        message.attributes,
                        topic=self._source.name,
                        subscription=self.name,
                        offset=offset,
                        producer_id=producer_id(self._source.name, message.producer_name or ""),
                        broker_addr=self._services.broker_url(),
                        tries=effect.tries,
                    )
                    await self._services.dead_letter(TopicName(effect.topic), message._replace(attributes=attributes))
                    done = offset + 1
        except DanubeError as error:
            self._say(logging.WARNING, "dead letter not copied", offset=done, why=str(error))
        self.metrics.dead_lettered.inc(done - effect.range.first)
        if done > effect.range.first:
            self._step(DeadLettered((OffsetRange(effect.range.first, done),)))
        if done < effect.range.end:
            self._step(DeadLetterFailed((OffsetRange(done, effect.range.end),)))


def _holding(batches: list[Batch], offset: int) -> int:
    """Which of these, in order, is the first that ends behind `offset`; their number if none does."""
    return bisect_right(batches, offset, key=lambda batch: batch.header.end_offset)


def closing(topic: TopicName, why: str) -> NotServed:
    """How streams end when their topic leaves: clients look it up again."""
    return NotServed(topic, why)
