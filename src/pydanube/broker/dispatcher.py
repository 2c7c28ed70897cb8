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
from collections.abc import Generator, Iterable
from typing import Final, assert_never

from pydanube.broker.base_subscription import BaseSubscription, Services
from pydanube.broker.cursors import StoredCursor
from pydanube.broker.outbox import (
    AnyOutbox,
    ConsumerRegistration,
)
from pydanube.broker.ownership import Ownership
from pydanube.broker.shipper import Shipper, Source
from pydanube.core.dispatch.consumer_window import DispatchLimits, Permits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import (
    AckRefused,
    Activated,
    Available,
    Blocked,
    DateSet,
    DeadLetter,
    Event,
    Expired,
    Forgotten,
    Joined,
    JoinRefused,
    Left,
    LogTrimmed,
    NotHeld,
    PoisonDropped,
    ReadKeys,
    Recall,
    SendRanges,
    Ticked,
    WakeAt,
)
from pydanube.core.dispatch.lag import Heartbeat, LagInfo, Standing, beat, explain
from pydanube.core.dispatch.machine import DispatchMachine
from pydanube.core.dispatch.window import SavedPosition
from pydanube.core.names import ConsumerId, SubscriptionName
from pydanube.core.policies import SubscriptionKind
from pydanube.errors import (
    DanubeError,
    SubscriptionBusy,
)
from pydanube.telemetry import SubscriptionMetrics

log = logging.getLogger("pydanube.broker.subscription")  # one name for all lines about a subscription

POLLING: Final = Heartbeat()
EXPIRED_NAMED_MAX: Final = 10  # ranges in a log line
DRIFT_US: Final = 100_000  # of the date, before what is scheduled is looked at anew
MISSED_SECONDS: Final = 10.0  # between two log lines about notifications that one subscription missed


class Dispatcher(BaseSubscription):
    """A subscription that delivers by a dispatch machine."""

    def __init__(
        self,
        source: Source,
        name: SubscriptionName,
        kind: SubscriptionKind,
        machine: DispatchMachine,
        services: Services,
        metrics: SubscriptionMetrics,
        *,
        heartbeat: Heartbeat = POLLING,
        own_heartbeat: Heartbeat | None = None,
        consumers: Iterable[ConsumerRegistration] = (),
        cursor_revision: int | None = None,
        seeks: int = 0,
    ) -> None:
        super().__init__(source.name, name, kind, services, metrics, consumers)
        self.heartbeat = heartbeat
        self.stored_cursor = StoredCursor(cursor_revision)
        self._source = source
        self._machine = machine
        self.own_heartbeat = own_heartbeat  # what was set for it, if anything was
        self._beat_at = 0.0
        self._missed = 0  # notifications missed, as heartbeats found, since the last log line about them
        self._missed_said_at: float | None = None
        self._paused_for: DanubeError | None = None
        self._notifier: asyncio.Task[None] | None = None
        self._shipper = Shipper(
            source, name, services, metrics, self._consumers, self._step, self._wake, seeks, schedules=machine.shares
        )
        self._date_ahead_us = 0  # of the time that never goes back, when the machine was last told
        self._shipping: asyncio.Task[None] | None = None
        self._moving = asyncio.Lock()  # held while it is being moved

    # --- life ---------------------------------------------------------------------------------------

    def start(self) -> None:
        self._notifier = asyncio.create_task(self._notify(), name=f"notify {self._source.name} {self.name}")
        self._shipping = asyncio.create_task(self._shipper.run(), name=f"ship {self._source.name} {self.name}")
        self._schedule_beat()
        self._step(Available(self._source.log.head))

    async def close(self, error: DanubeError, *, save: bool = True) -> None:
        """Streams end with `error`; the cursor is saved, unless another broker has the topic already."""
        self._paused_for = error  # an ack behind this would be lost: refuse it
        await super().close(error)
        for task in (self._notifier, self._shipping):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if save:
            await self._services.cursors.flush([self], last=True)
        self._services.cursors.forget(self)

    # --- consumers ----------------------------------------------------------------------------------

    def _joined(self, registration: ConsumerRegistration) -> None:
        permits = Permits(0, 0) if registration.native else None
        joined = Joined(registration.consumer_id, permits, registration.key_filters, registration.hands_over)
        refused = self._step(joined)
        if isinstance(refused, JoinRefused):
            holder = self._consumers.get(refused.active)
            raise SubscriptionBusy(self._topic, self.name, holder.name if holder else "another")

    def _left(self, registration: ConsumerRegistration, outbox: AnyOutbox) -> None:
        self._step(Left(registration.consumer_id))

    def _ending(self, outbox: AnyOutbox) -> None:
        self._shipper.drop_parked(outbox)

    def _detached(self) -> None:
        self._services.cursors.left(self)

    def _forgotten(self, consumer: ConsumerId) -> None:
        self._step(Forgotten(consumer))

    # --- what is saved of it ------------------------------------------------------------------------

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
        """Acknowledged messages that did not fit into the stored position: delivered again after it is restored."""
        return self._services.cursors.cut(self)

    def saved(self) -> SavedPosition:
        return self._machine.progress.saved()

    def saving(self, size_max_bytes: int) -> Generator[None, None, SavedPosition]:
        return self._machine.progress.saving(size_max_bytes)

    # --- how it is ----------------------------------------------------------------------------------

    @property
    def limits(self) -> DispatchLimits:
        return self._machine.windows.limits

    @property
    def policy(self) -> FailurePolicy:
        return self._machine.policy

    def standing(self) -> Standing:
        return self._machine.standing(self._source.log.head)

    @property
    def scheduled(self) -> int:
        """Messages that are not to be delivered yet, as far as it has come to them."""
        return self._machine.schedule.count

    def has_lag(self) -> bool:
        return self._machine.progress.lag(self._source.log.head) > 0

    def get_lag_info(self) -> LagInfo:
        return self._machine.get_lag_info(self._source.log.head)

    def explain(self) -> str:
        """Why the subscription is, or is not, receiving."""
        sentence = explain(self.standing(), self._services.clock.elapsed(), expired=self.metrics.skipped.value)
        return (
            sentence
            if self._shipper.read_error is None
            else f"{sentence} The log cannot be read: {self._shipper.read_error}."
        )

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
        """The safety net: compares with the log's head and relies on no notification."""
        if self._closed or now < self._beat_at or self.heartbeat.interval_ms is None:
            return  # the interval was changed, and another beat is on its way, or none
        head = self._source.log.head
        if self._machine.schedule.count:
            self._tell_date()
        if self._machine.progress.next_unacked < self._source.retained_from:
            self._step(LogTrimmed(self._source.retained_from))  # also while no consumer is connected
        if self._machine.progress.next_unacked < head:
            standing = self._machine.standing(head)
            if beat(standing, POLLING, now).poll:
                self.metrics.lag_detected.inc()
                self._log_missed(now)
                if self.heartbeat.polls:
                    self.metrics.heartbeat_polls.inc()
                    self._step(Available(head))
                    self._step(Ticked())
        self._schedule_beat()

    def _tell_date(self) -> None:
        """The machine learns that the clock has jumped."""
        date = self._services.clock.time_us()
        ahead_us = date - round(self._services.clock.elapsed() * 1_000_000)
        if abs(ahead_us - self._date_ahead_us) > DRIFT_US:
            self._date_ahead_us = ahead_us
            self._step(DateSet(date))

    def _log_missed(self, now: float) -> None:
        """Logs that the heartbeat found commits without a notification: a defect, which may repeat at every beat."""
        self._missed += 1
        if self._missed_said_at is not None and now - self._missed_said_at < MISSED_SECONDS:
            return
        lag = self.get_lag_info()
        does = "Heartbeat detected lag, triggering poll" if self.heartbeat.polls else "Heartbeat detected lag"
        fields = {"lag": lag.lag_messages, "cursor": lag.cursor, "head": lag.head, "times": self._missed}
        self._log(logging.WARNING, does, **fields)
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
                case SendRanges(consumer) | Recall(consumer):
                    if isinstance(effect, SendRanges) and log.isEnabledFor(logging.DEBUG):
                        self._log(logging.DEBUG, "consumer chosen", consumer=consumer, offsets=effect.ranges)
                    # The outbox as it is now: a consumer that comes back under the same id gets Sends of its own.
                    self._shipper.queue(
                        effect, self._consumers[consumer].outbox if consumer in self._consumers else None
                    )
                case ReadKeys() | DeadLetter():
                    if isinstance(effect, DeadLetter):
                        self._count_poison(effect.range.size)
                    self._shipper.queue(effect, None)
                case WakeAt(time):
                    self._services.timer.call_at(time, self._wake)
                case JoinRefused() | AckRefused() | NotHeld():
                    refused = effect
                case Blocked(offset, tries, key):
                    self._count_poison(1)
                    self._log(logging.ERROR, "subscription blocked by poison", offset=offset, key=key, tries=tries)
                case PoisonDropped(dropped, tries):
                    self._count_poison(dropped.size)
                    self._log(logging.WARNING, "messages dropped by policy", offsets=dropped, tries=tries)
                case Expired(expired):
                    messages = sum(each.size for each in expired)
                    self.metrics.skipped.inc(messages)
                    named = expired[:EXPIRED_NAMED_MAX]
                    self._log(logging.WARNING, "retention passed the subscription", offsets=named, messages=messages)
                case Activated(consumer):
                    self._log(logging.INFO, "consumer activated", consumer=consumer)
                case _:
                    assert_never(effect)
        return refused

    def _count_poison(self, messages: int) -> None:
        self.metrics.exhausted[self._machine.policy.poison_policy.value] += messages

    def _log(self, level: int, phrase: str, **fields: object) -> None:
        log.log(level, phrase, extra={"topic": self._source.name, "subscription": self.name, **fields})
