"""One topic's consumer as a lane: it moves deliveries to the application, and carries out what its machine decides.

    Deliver, Recall, answers ─┐                              ┌─► Flow, Handed, Returned, Ack, Nack
    ack, nack, taken ─────────┼─► core/consuming ─► effects ─┼─► the inbox of the consumer
    lost, opened, timers ─────┘                              └─► those who flush

What is granted, shown, given back and sent again is decided in `core/consuming/machine.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Final, assert_never

from pydanube.client.brokers import Brokers
from pydanube.client.connection import BrokerConnection
from pydanube.client.inbox import Inbox
from pydanube.client.messages import Place, ReceivedBatch, place_of
from pydanube.client.partition_handle import PartitionHandle
from pydanube.core.consuming import values
from pydanube.core.consuming.machine import ConsumerMachine, Hold, Mode
from pydanube.core.consuming.values import ConsumerLimits, Verdict, Why
from pydanube.core.dispatch.ranges import OFFSET_END_MAX, OffsetRanges
from pydanube.errors import AckOutdated, ClientClosed, ConfigError, DanubeError, ProtocolViolation, Refused
from pydanube.formats.batch import load
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)

EXTEND_SECONDS_MAX: Final = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings(ConsumerLimits):
    """As `Client.consumer` describes them; the windows are those of one lane."""

    subscription: str
    name: str
    type: pb.SubscriptionType
    start: pb.Place
    key_filters: tuple[str, ...]


class PartitionConsumer(PartitionHandle):
    """Receives from one topic, or from one partition, into an inbox that all lanes of a consumer share."""

    what = "consumer"

    def __init__(self, brokers: Brokers, topic: str, settings: ConsumerSettings, inbox: Inbox) -> None:
        super().__init__(brokers, topic)
        self.machine: ConsumerMachine[ReceivedBatch] = ConsumerMachine(settings, ranges_max=frames.RANGES_MAX)
        self._run = self.machine.run
        self._settings = settings
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._flushing: dict[Verdict, asyncio.Future[None]] = {}
        self._shares = False
        self._received = OffsetRanges()  # and not acknowledged cumulatively since; of nobody who shares
        self._received_era = 0

    # --- for the application ------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if an answer could not count any more."""
        if self.failure is not None:
            raise copy(self.failure)
        if self.machine.mode is Mode.CLOSING:
            raise ClientClosed(f"the consumer of {self.topic}")

    def ack(self, offset: int, era: int) -> None:
        run = self._run
        if offset == run.end and era == run.era:
            run.end = offset + 1
        else:
            for effect in self.machine.ack(offset, era):
                self._carry_out(effect)

    def ack_cumulative(self, offset: int, era: int) -> None:
        """Everything that came up to this one: what could not be read yet, or waits for its retry and came to another
        consumer, is to be delivered still. Raises Refused if others may be at work on some of it.
        """
        if self._shares:
            raise Refused(
                f"subscription {self._settings.subscription} of {self.topic} is shared: an ack of everything up to "
                f"offset {offset} would be one of what other consumers have; acknowledge each message"
            )
        upto = OffsetRanges(((offset, offset + 1),))
        if era == self._received_era:
            upto = upto.union(self._received.overlap(0, offset + 1))
            self._received.remove(0, offset + 1)
        self.feed(values.Acked(tuple(upto), era))

    def ack_ranges(self, ranges: Sequence[tuple[int, int]], era: int) -> None:
        self.feed(values.Acked(ranges, era))

    def nack(self, ranges: Sequence[tuple[int, int]], delay_seconds: float | None, reason: str, era: int) -> None:
        # 0 means "as the policy says", so "immediately" is a millisecond.
        delay_ms = 0 if delay_seconds is None else max(1, min(round(delay_seconds * 1000), 2**32 - 1))
        self.feed(values.Nacked(ranges, era, delay_ms, reason))

    async def extend(self, ranges: Sequence[tuple[int, int]], seconds: float, delivery: ReceivedBatch) -> None:
        """Returns when the broker has taken note. Raises if it has not."""
        if not 0 < seconds <= EXTEND_SECONDS_MAX:
            raise ConfigError("seconds", seconds, f"more than 0, and at most {EXTEND_SECONDS_MAX:g}")
        self.check()
        offset = ranges[0][0]
        match self.machine.hold(delivery):
            case Hold.OUTDATED:
                raise AckOutdated(self.topic, self._settings.subscription, offset)
            case Hold.LOST:
                raise Refused(
                    f"offset {offset} of {self.topic} cannot be held for longer: the connection it came on is lost, so "
                    "it is delivered again"
                )
            case Hold.UNTOLD:
                why = "is too old to give a message more time; raise the ack timeout"
                raise Refused(f"the broker of {self.topic} {why}")
        extend_ms = max(1, round(seconds * 1000))
        connection = self._connection_in_use()
        for part in values.in_parts(ranges, frames.RANGES_MAX):
            flat = frames.flat(part)
            handed = pb.Handed(consumer=self.handle, ranges=flat, seeks=delivery.seeks, extend_ms=extend_ms)
            await connection.request(pb.Command(handed=handed), "done")

    @property
    def has_out(self) -> bool:
        """Whether the application has something that it has not answered. Only known if the broker wants to know."""
        self._inbox.account(self)
        self.feed(values.Reviewed())
        return self.machine.has_out

    async def stop_receiving(self) -> None:
        """Nothing more is handed over; what was not goes to others. Acks go on."""
        if self.machine.mode is not Mode.RECEIVING:
            return
        self.feed(values.Stopped())
        unseen = self._take_back(OffsetRanges(((0, OFFSET_END_MAX),)), Why.STOPPED)
        connection = self.connection
        if connection is None or not connection.usable or not self.machine.hands_over:
            return
        for ranges in values.in_parts(unseen, frames.RANGES_MAX) or [[]]:
            await connection.request(self._returned(ranges, stop=True), "done")

    async def flush(self) -> None:
        """Returns when the broker has applied every ack and nack so far. Raises if it will not."""
        self.feed(values.Flushed())
        waiting = [
            self._flushing.setdefault(verdict, self._loop.create_future()) for verdict in self.machine.answers.verdicts
        ]
        if waiting and self.failure is not None:
            raise copy(self.failure)
        if waiting:
            # Others may wait for the same answers, now or later: giving up here is not the end of them.
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for error in filter(None, (each.exception() for each in done)):
                raise copy(error)

    async def close(self) -> None:
        """Gives back what is not acknowledged, to be delivered to others."""
        self.feed(values.Closing())
        connection = self.connection
        if connection is None or not connection.usable:
            return
        await self.flush()
        if connection is self.connection:
            connection.consumers.pop(self.handle, None)
            await connection.request(pb.Command(close_consumer=pb.CloseConsumer(consumer=self.handle)), "done")

    async def seek(self, to: Place) -> int:
        """Delivers from another place on; what was delivered before and not handed over is dropped."""

        def answered(frame: frames.Frame) -> None:
            found = frame.command.offset_found  # a broker that does not count them delivers nothing before it answers
            self.feed(values.Sought(found.seeks if found.HasField("seeks") else None))

        connection = self.connection or await self._find()
        request = pb.Seek(topic=self.topic, subscription=self._settings.subscription, to=place_of(to))
        frame = await connection.request(pb.Command(seek=request), "offset_found", accept=answered)
        return frame.command.offset_found.offset

    # --- the machine --------------------------------------------------------------------------------

    def feed(self, event: values.Event[ReceivedBatch]) -> None:
        for effect in self.machine.step(event, self._loop.time()):
            self._carry_out(effect)

    def _carry_out(self, effect: values.Effect[ReceivedBatch]) -> None:
        match effect:
            case values.Show(delivery):
                self._inbox.put(delivery)
            case values.EndTurn(is_retry):
                if is_retry:
                    self._loop.call_later(self._backoff.seconds(), self.feed, values.TurnEnded())
                else:
                    self._loop.call_soon(self.feed, values.TurnEnded())
            case values.Send(verdict, generation):
                self._connection_in_use().ask(self._command(verdict), partial(self._on_answer, verdict, generation))
            case values.Grant(messages, size):
                flow = pb.Flow(consumer=self.handle, messages=messages, bytes=size)
                self._connection_in_use().say(pb.Command(flow=flow))
            case values.SayIn(seconds, event):
                self._loop.call_later(seconds, self._on_timer, event)
            case values.Tell(ranges):
                handed = pb.Handed(consumer=self.handle, ranges=frames.flat(ranges), seeks=self.machine.seeks)
                self._connection_in_use().say(pb.Command(handed=handed))
            case values.GiveBack(ranges, stop):
                self._connection_in_use().say(self._returned(ranges, stop=stop))
            case values.TakeBack(wanted, why):
                self._take_back(wanted, why)
            case values.DropAll():
                self._inbox.drop(self)
            case values.AllAnswered():
                self._inbox.all_answered.set()
            case values.AskLag(generation):
                request = pb.GetLag(topic=self.topic, subscription=self._settings.subscription)
                self._connection_in_use().ask(pb.Command(get_lag=request), partial(self._on_lag, generation))
            case values.Settle(verdict, error):
                self._settle(verdict, error)
            case values.NoteRefused(verdict, error):
                log.warning(
                    "ack refused" if verdict.is_ack else "nack refused",
                    extra={"topic": self.topic, "subscription": self._settings.subscription, "why": str(error)},
                )
            case values.Refuse():
                self.check()
            case _:
                assert_never(effect)

    def _connection_in_use(self) -> BrokerConnection:
        assert self.connection is not None, "the machine says nothing while it is away"
        return self.connection

    def _command(self, verdict: Verdict) -> pb.Command:
        ranges = frames.flat(verdict.ranges)
        if verdict.is_ack:
            return pb.Command(ack=pb.Ack(consumer=self.handle, ranges=ranges, seeks=verdict.seeks))
        nack = pb.Nack(
            consumer=self.handle,
            ranges=ranges,
            delay_ms=verdict.delay_ms,
            reason=verdict.reason,
            seeks=verdict.seeks,
        )
        return pb.Command(nack=nack)

    def _returned(self, ranges: Iterable[tuple[int, int]], *, stop: bool) -> pb.Command:
        machine, flat = self.machine, frames.flat(ranges)
        returned = pb.Returned(
            consumer=self.handle, ranges=flat, seeks=machine.seeks, stop=stop, taken=machine.lost_times
        )
        return pb.Command(returned=returned)

    def _on_answer(self, verdict: Verdict, generation: int, answer: frames.Frame | DanubeError) -> None:
        self.feed(values.Answered(verdict, generation, answer if isinstance(answer, DanubeError) else None))

    def _on_lag(self, generation: int, answer: frames.Frame | DanubeError) -> None:
        if not isinstance(answer, DanubeError) and answer.command.lag.HasField("cursor"):
            self.feed(values.LagKnown(generation, answer.command.lag.cursor))

    def _on_timer(self, event: values.TellDue | values.SettledDue) -> None:
        if isinstance(event, values.TellDue):
            self._inbox.account(self)
        self.feed(event)

    def _settle(self, verdict: Verdict, error: DanubeError | None) -> None:
        done = self._flushing.pop(verdict, None)
        if done is not None and not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
                done.exception()  # the caller of `flush` may have given up

    def _take_back(self, wanted: OffsetRanges, why: Why) -> OffsetRanges:
        found = self._inbox.take_back(self, wanted, copies=why in (Why.COPIES, Why.REPLACED))
        self.feed(values.TakenBack(found, why))
        return found

    # --- the lane -----------------------------------------------------------------------------------

    def delivered(self, ranges: tuple[tuple[int, int], ...], attempt: int, seeks: int, body: memoryview) -> None:
        batch = load(body)
        header = batch.header
        if ranges[0][0] < header.base_offset or ranges[-1][1] > header.end_offset:
            raise ProtocolViolation(f"ranges {ranges} are not in the batch delivered with them")
        self._progressed()
        delivery = ReceivedBatch(self, batch, ranges, attempt, len(body), seeks)
        if self.machine.repeats.is_copy(delivery):
            self._inbox.account(self)
        self.feed(values.Delivered(delivery))
        if not self._shares:
            if self._received_era != self.machine.era:
                self._received.clear()  # of before a seek: it comes again, or the subscription is beyond it
                self._received_era = self.machine.era
            for first, end in ranges:
                self._received.add(first, end)

    def recalled(self, ranges: tuple[tuple[int, int], ...], seeks: int, taken: int) -> None:
        self.feed(values.Recalled(ranges, seeks, taken))

    def leave(self, connection: BrokerConnection) -> None:
        if connection is self.connection:
            self.feed(values.Flushed())

    def _on_lost(self, error: DanubeError) -> None:
        self.feed(values.Lost())

    def _on_failed(self, error: DanubeError) -> None:
        self.feed(values.Ended(error))
        self._inbox.arrived.set()  # a caller that waits for a message gets the error instead

    def _forget_handle(self, connection: BrokerConnection) -> None:
        if connection.consumers.pop(self.handle, None) is not None and connection.usable:
            # The connection goes on without it, so the broker must know; the answer is not awaited.
            connection.ask(pb.Command(close_consumer=pb.CloseConsumer(consumer=self.handle)), lambda _: None)

    async def _open_at(self, connection: BrokerConnection) -> None:
        settings = self._settings
        self.feed(values.Opening())
        messages, size, first_messages = self.machine.first_permits
        request = pb.Subscribe(
            topic=self.topic,
            subscription=settings.subscription,
            type=settings.type,
            consumer_name=settings.name,
            key_filters=settings.key_filters,
            start=settings.start,
            messages=messages,
            bytes=size,
            hands_over=True,
            first_messages=first_messages,
            seen_epoch=self.machine.repeats.epoch,
        )
        await connection.request(
            pb.Command(subscribe=request), "subscribed", accept=partial(self._subscribed, connection)
        )

    def _subscribed(self, connection: BrokerConnection, frame: frames.Frame) -> None:
        answer = frame.command.subscribed
        self._shares = answer.type in (pb.SHARED, pb.KEY_SHARED)
        self._received.remove(0, answer.next_unacked)
        self._attach(connection, answer.consumer)
        connection.consumers[answer.consumer] = self
        subscribed = values.Subscribed(
            hands_over=answer.hands_over,
            shares=self._shares,
            created=answer.created,
            next_unacked=answer.next_unacked,
        )
        self.feed(subscribed)
