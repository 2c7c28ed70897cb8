"""Carries out what a dispatch machine decided and needs the log for, in order.

    Send, Recall, ReadKeys, DeadLetter ─► queue ─► one task: reads the topic ─► outbox, machine, dead-letter topic

The only part that waits, and never for a consumer: what does not fit into an outbox is parked until it does.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar

from pydanube.broker.base_subscription import Services
from pydanube.broker.outbox import (
    CHUNK_BYTES,
    AnyOutbox,
    BatchOutbox,
    ConsumerRegistration,
    DeliveredBatch,
    DeliveredMessage,
    MessageOutbox,
    RecalledRanges,
    cost_bytes,
)
from pydanube.broker.ownership import Ownership
from pydanube.core.dispatch.consumer_window import Permits
from pydanube.core.dispatch.delivery import dead_letter_attributes
from pydanube.core.dispatch.events import (
    DateSet,
    DeadLetter,
    DeadLettered,
    DeadLetterFailed,
    Event,
    Granted,
    Keyed,
    LogTrimmed,
    Ranges,
    ReadKeys,
    Recall,
    Scheduled,
    SendRanges,
    Shipped,
    Voided,
)
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges
from pydanube.core.names import ConsumerId, SubscriptionName, TopicName, producer_id
from pydanube.errors import (
    DanubeError,
    OffsetOutOfRange,
)
from pydanube.formats.batch import Batch, Envelope, delivery_times
from pydanube.log.wal import TopicLog
from pydanube.telemetry import SubscriptionMetrics

log = logging.getLogger("pydanube.broker.subscription")  # one name for all lines about a subscription

TURN_RANGES: Final = 64  # read for a consumer before others have a turn: what is cached is read without waiting
FENCED_SECONDS: Final = 0.1  # how often a broker that may not serve looks whether it may again

Read = TypeVar("Read")
Work: TypeAlias = SendRanges | Recall | ReadKeys | DeadLetter


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

    async def row_keys(self, first: int, end: int) -> list[tuple[int, str, int | None]]: ...


class Shipper:
    """One subscription's queue of work on the log, and the task that does it."""

    def __init__(
        self,
        source: Source,
        subscription: SubscriptionName,
        services: Services,
        metrics: SubscriptionMetrics,
        consumers: Mapping[ConsumerId, ConsumerRegistration],
        step: Callable[[Event], object],
        wake: Callable[[float], None],
        seeks: int,
        *,
        schedules: bool = False,
    ) -> None:
        """`step` is the machine's; `wake` lets it tick. `schedules`: nothing is sent before its time."""
        self._schedules = schedules
        self._source = source
        self._subscription = subscription
        self._services = services
        self._metrics = metrics
        self._consumers = consumers
        self._step = step
        self._wake = wake
        self._work: deque[tuple[Work, AnyOutbox | None]] = deque()
        self._parked: dict[AnyOutbox, deque[SendRanges]] = {}  # for consumers whose outbox is full, in order
        self._has_work = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.read_error: DanubeError | None = None
        self.seeks = seeks  # how often the subscription was moved, by all its owners

    def queue(self, effect: Work, outbox: AnyOutbox | None) -> None:
        self._work.append((effect, outbox))
        self._has_work.set()

    def pause(self) -> None:
        """Nothing more is begun."""
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def drop_parked(self, outbox: AnyOutbox) -> None:
        """The outbox ends: what waited for its consumer has been taken back."""
        self._parked.pop(outbox, None)

    def seek(self) -> list[SendRanges]:
        """Everything that is queued is void; returns what was to be sent."""
        self.seeks += 1
        sends = [effect for effect, _ in self._work if isinstance(effect, SendRanges)]
        self._work.clear()
        self._parked.clear()
        return sends

    def take_back(self, send: SendRanges) -> None:
        """It will not be sent, and a seek has settled what becomes of its messages."""
        registration = self._consumers.get(send.consumer)
        if registration is not None and registration.native:
            self._step(Shipped(send.consumer, 0, ()))
            self._step(Granted(send.consumer, Permits(sum(each.size for each in send.ranges), 0)))

    async def run(self) -> None:
        """Carries out what needs the log, in order."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._work:
                await asyncio.sleep(0)  # what it needs may be cached, and then nothing below waits
                await self._resumed.wait()
                while not self._services.may_serve():
                    await self._services.clock.sleep(FENCED_SECONDS)
                if not self._work:
                    break  # a seek took everything back in the meantime
                effect, outbox = self._work.popleft()
                match effect:
                    case SendRanges():
                        await self._send(effect, outbox)
                    case Recall(consumer, ranges, taken):
                        registration = self._consumers.get(consumer)
                        if outbox is not None and registration is not None and registration.outbox is outbox:
                            outbox.put([RecalledRanges(ranges, self.seeks, taken)])  # behind what it speaks of
                    case ReadKeys(wanted):
                        await self._read_keys(wanted)
                    case DeadLetter():
                        await self._dead_letter(effect)

    async def _send(self, send: SendRanges, outbox: AnyOutbox | None) -> None:
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
        later: list[tuple[int, int, int]] = []
        seeks, free_bytes = self.seeks, outbox.free_bytes
        for place, (first, end) in enumerate(send.ranges):
            if place % TURN_RANGES == TURN_RANGES - 1:
                await asyncio.sleep(0)
            if free_bytes <= 0:
                parked = send.ranges[place:]
                break
            got = await self._rows(first, end, free_bytes)
            due, early = self._by_time(got)
            later += early
            rows += due
            free_bytes -= sum(cost_bytes(message) for _, message in got)
            reached = got[-1][0] + 1 if got else first
            if reached < end and free_bytes <= 0:
                parked = (OffsetRange(reached, end), *send.ranges[place + 1 :])
                break
            if reached < end:  # what comes behind it waits, or it would come before it
                unsent = (OffsetRange(reached, end), *send.ranges[place + 1 :])
                break
        if registration.outbox is not outbox or self.seeks != seeks:
            return  # it left while we read, or wants something else now
        self._postpone(later, send.consumer)
        if rows:
            outbox.put(DeliveredMessage(offset, message, send.attempt) for offset, message in rows)
            self._count(send, len(rows), sum(len(message.payload) for _, message in rows))
        if parked and isinstance(outbox, MessageOutbox):
            self._parked[outbox] = deque([replace(send, ranges=parked)])
            outbox.call_when_free(partial(self._unpark, outbox))
        if unsent:
            self._step(Shipped(send.consumer, 0, unsent))
            self._hold_back(outbox)

    def _unpark(self, outbox: AnyOutbox) -> None:
        """The consumer took something: what was parked goes first."""
        sends = self._parked.pop(outbox, ())
        self._work.extendleft((send, outbox) for send in reversed(sends))
        self._has_work.set()

    def _hold_back(self, outbox: AnyOutbox) -> None:
        """Something could not be read, or was too large: what is queued behind it for the same consumer waits too, to
        keep the order.
        """
        later = [effect for effect, target in self._work if target is outbox and isinstance(effect, SendRanges)]
        self._work = deque(each for each in self._work if each[1] is not outbox or not isinstance(each[0], SendRanges))
        for send in later:
            self._step(Shipped(send.consumer, 0, send.ranges))

    def _count(self, send: SendRanges, rows: int, size_bytes: int) -> None:
        self._metrics.delivered.inc(rows)
        if (registration := self._consumers.get(send.consumer)) is not None:
            registration.sent += rows
        self._metrics.delivered_bytes.inc(size_bytes)
        if send.attempt > 1:
            self._metrics.redeliveries.inc(rows)

    async def _send_batches(self, send: SendRanges, registration: ConsumerRegistration, outbox: BatchOutbox) -> None:
        """Stored batches as they are; each with the offsets that are meant. Stops when the bytes are used up."""
        size_max = send.size_max_bytes or 0
        size_bytes = rows = 0
        unsent: list[OffsetRange] = []
        found: list[tuple[Batch, list[tuple[int, int]]]] = []
        later: list[tuple[int, int, int]] = []
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
                meant = [(max(reached, batch.header.base_offset), upto)]
                if self._schedules and batch.header.envelope > 1:
                    meant, early = self._due_in(batch, *meant[0])
                    later += early
                reached = upto
                if not meant:
                    continue
                if found and found[-1][0] is batch:
                    found[-1][1].extend(meant)
                else:
                    found.append((batch, meant))
                    size_bytes += batch.header.size_bytes
                rows += sum(after - before for before, after in meant)
            if reached < end:
                unsent = [OffsetRange(reached, end), *send.ranges[place + 1 :]]
                break
        if registration.outbox is not outbox:
            return
        if self.seeks != seeks:
            self.take_back(send)
            return
        self._postpone(later, send.consumer)
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
                self._step(LogTrimmed(kept_from))
            else:  # a gap between epochs: what lies before it is still to be acknowledged
                self._step(Voided((OffsetRange(error.offset, error.first),)))
            self._services.timer.call_at(self._services.clock.elapsed(), self._wake)  # what comes behind can go now
            return []
        except DanubeError as error:
            if str(error) != str(self.read_error):
                self._log(logging.ERROR, "log cannot be read", why=str(error))
            self.read_error = error
            return []
        self.read_error = None
        return found

    async def _read_keys(self, wanted: OffsetRange) -> None:
        found = await self._read(self._source.row_keys(wanted.first, wanted.end))
        date = self._services.clock.time_us()
        pairs = tuple((offset, key) for offset, key, time in found if time is None or time <= date)
        later = joined((offset, time) for offset, _, time in found if time is not None and time > date)
        if later:
            self._step(DateSet(date))
        self._step(Keyed(pairs, tuple(later)))

    # --- not before a time ------------------------------------------------------------------------------

    def _by_time(
        self, rows: list[tuple[int, Envelope]]
    ) -> tuple[list[tuple[int, Envelope]], list[tuple[int, int, int]]]:
        """What is due, and what is not."""
        if not self._schedules or all(message.deliver_at is None for _, message in rows):
            return rows, []
        date = self._services.clock.time_us()
        due = [each for each in rows if each[1].deliver_at is None or each[1].deliver_at <= date]
        return due, joined(
            (offset, message.deliver_at)
            for offset, message in rows
            if message.deliver_at is not None and message.deliver_at > date
        )

    def _due_in(self, batch: Batch, first: int, end: int) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """Of some rows of a batch: ranges of those that are due, and those that are not."""
        times = delivery_times(batch)
        if times is None:
            return [(first, end)], []
        date, base = self._services.clock.time_us(), batch.header.base_offset
        waits = [(offset, time) for offset in range(first, end) if (time := times[offset - base]) and time > date]
        later = joined(waits)
        due = OffsetRanges((at, upto) for at, upto, _ in later).gaps(first, end)
        return [(at, upto) for at, upto in due], later

    def _postpone(self, later: list[tuple[int, int, int]], consumer: ConsumerId) -> None:
        if later:
            self._step(DateSet(self._services.clock.time_us()))
            self._step(Scheduled(tuple(later), consumer))

    async def _dead_letter(self, effect: DeadLetter) -> None:
        """Copies, then counts them as done. A copy that fails is tried again later."""
        done = effect.range.first
        try:
            while rows := await self._source.rows(done, effect.range.end, CHUNK_BYTES):
                for offset, message in rows:
                    attributes = dead_letter_attributes(
                        message.attributes,
                        topic=self._source.name,
                        subscription=self._subscription,
                        offset=offset,
                        producer_id=producer_id(self._source.name, message.producer_name or ""),
                        broker_addr=self._services.broker_url(),
                        tries=effect.tries,
                    )
                    await self._services.dead_letter(TopicName(effect.topic), message._replace(attributes=attributes))
                    done = offset + 1
        except DanubeError as error:
            self._log(logging.WARNING, "dead letter not copied", offset=done, why=str(error))
        self._metrics.dead_lettered.inc(done - effect.range.first)
        if done > effect.range.first:
            self._step(DeadLettered((OffsetRange(effect.range.first, done),)))
        if done < effect.range.end:
            self._step(DeadLetterFailed((OffsetRange(done, effect.range.end),)))

    def _log(self, level: int, phrase: str, **fields: object) -> None:
        log.log(level, phrase, extra={"topic": self._source.name, "subscription": self._subscription, **fields})


def joined(times: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Offsets, ascending, and their times, as ranges of one time: first, end, time."""
    found: list[tuple[int, int, int]] = []
    for offset, time in times:
        if found and found[-1][1:] == (offset, time):
            found[-1] = (found[-1][0], offset + 1, time)
        else:
            found.append((offset, offset + 1, time))
    return found


def _holding(batches: list[Batch], offset: int) -> int:
    """Which of these, in order, is the first that ends behind `offset`; their number if none does."""
    return bisect_right(batches, offset, key=lambda batch: batch.header.end_offset)
