"""Messages on their way from one topic: permits out, batches in, acks out.

    Flow ─► broker ─► Deliver ─► inbox ─► application ─► ack ─┐
     ▲                             └── handed over: permits   ├─► ranges, one command per turn of the loop ─► Done
     └────────────── a quarter of the window at a time        └─► nack

What is delivered and not handed to the application yet is bounded by the permits. When the connection is lost it is
dropped, because the broker delivers it again. Acks are kept until the broker says that it has applied them. Those
without an answer go out first on the next connection; and if their messages come again all the same, from a broker that
knows nothing of their delivery, the application does not see them twice: it has said that they are done. What only has
the same offsets is not held back: messages of a newer epoch than any that came before (the topic was made anew), those
of a non-reliable topic, and what comes again because somebody has sought back. Every delivery says how often the
subscription was moved before it, and every ack the same number: what was delivered before a seek, by whomever, is void.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Final

from pydanube.client.connection import Brokers
from pydanube.client.lane import Lane
from pydanube.client.link import Link
from pydanube.client.messages import Delivery, Place, place_of
from pydanube.core.ranges import OffsetRange, OffsetRanges
from pydanube.errors import AckOutdated, DanubeError, ProtocolViolation
from pydanube.log.batch import load
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)

UNSENT_MAX: Final = 10_000  # commands kept while there is no connection; what is nacked beyond comes again anyway
SETTLED_SECONDS: Final = 30.0


class _Verdict:
    """An ack or a nack on its way: of these offsets, until the broker has applied it."""

    __slots__ = ("delay_ms", "done", "is_ack", "is_void", "ranges", "reason", "seeks")

    def __init__(
        self, ranges: Sequence[tuple[int, int]], seeks: int, *, is_ack: bool, delay_ms: int = 0, reason: str = ""
    ) -> None:
        self.ranges = ranges
        self.seeks = seeks  # of the deliveries
        self.is_ack = is_ack
        self.is_void = False  # a seek has come since it was sent: whatever is answered, it is not sent again
        self.delay_ms = delay_ms
        self.reason = reason
        self.done: asyncio.Future[None] | None = None  # for `flush`

    def command(self, consumer: int) -> pb.Command:
        ranges = frames.flat(self.ranges)
        if self.is_ack:
            return pb.Command(ack=pb.Ack(consumer=consumer, ranges=ranges, seeks=self.seeks))
        nack = pb.Nack(consumer=consumer, ranges=ranges, delay_ms=self.delay_ms, reason=self.reason, seeks=self.seeks)
        return pb.Command(nack=nack)

    def settle(self, error: DanubeError | None = None) -> None:
        if self.done is not None and not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
                self.done.exception()  # whoever flushed may have given up


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """As `Client.consumer` describes them; the windows are those of one lane."""

    subscription: str
    name: str
    type: pb.SubscriptionType
    start: pb.Place
    key_filters: tuple[str, ...]
    window_messages: int
    window_bytes: int


class ConsumerLane(Lane):
    """Receives from one topic, or from one partition, into an inbox that all lanes of a consumer share."""

    what = "consumer"

    def __init__(
        self,
        brokers: Brokers,
        topic: str,
        settings: ConsumerSettings,
        inbox: deque[Delivery],
        arrived: Callable[[], None],
        dropped: Callable[[ConsumerLane], None],
    ) -> None:
        super().__init__(brokers, topic)
        self._settings = settings
        self._inbox = inbox
        self._arrived = arrived
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._owed_messages = self._owed_bytes = 0  # permits to be granted again
        self._acks = OffsetRanges()
        self._ack_first = self._ack_end = 0  # the newest range, which mostly grows
        self._nacks: dict[tuple[int, str], OffsetRanges] = {}  # by delay and reason
        self._unsent: deque[_Verdict] = deque()
        self._unconfirmed: dict[_Verdict, None] = {}
        self._epoch = 0  # the newest of all batches so far; those of non-reliable topics have 0
        self._settled = OffsetRanges()  # acknowledged, and perhaps nobody knows of it
        self._settled_epoch = 0  # their batches are not newer
        self._known_end = 0  # the broker knew everything below to be acknowledged
        self._seeks = 0  # how often the subscription was moved before the newest delivery
        self._sought_to = 0  # the answer to a seek of ours on this connection had this number
        self._is_scheduled = False

    # --- for the application ------------------------------------------------------------------------

    def ack(self, offset: int, seeks: int) -> None:
        if seeks != self._seeks:
            return  # delivered before a seek: it comes again, or the subscription is beyond it
        if offset == self._ack_end:
            self._ack_end = offset + 1
        else:
            self._acks.add(self._ack_first, self._ack_end)
            self._ack_first, self._ack_end = offset, offset + 1
        if not self._is_scheduled:
            self._schedule()

    def ack_ranges(self, ranges: Sequence[tuple[int, int]], seeks: int) -> None:
        if seeks != self._seeks:
            return
        for first, end in ranges:
            self._acks.add(first, end)
        self._schedule()

    def nack(self, ranges: Sequence[tuple[int, int]], delay_seconds: float | None, reason: str, seeks: int) -> None:
        if seeks != self._seeks:
            return
        if self.link is None and len(self._unsent) + len(self._nacks) >= UNSENT_MAX:
            return
        # 0 means "as the policy says", so at once is a millisecond.
        delay_ms = 0 if delay_seconds is None else max(1, min(round(delay_seconds * 1000), 2**32 - 1))
        nacks = self._nacks.setdefault((delay_ms, reason), OffsetRanges())
        for first, end in ranges:
            nacks.add(first, end)
        self._schedule()

    def consumed(self, delivery: Delivery) -> None:
        """The application has all of it: there is room for as much again."""
        if delivery.generation != self.generation:
            return  # the permits of that connection ended with it
        self._owed_messages += delivery.count
        self._owed_bytes += delivery.size
        settings = self._settings
        if 4 * self._owed_messages >= settings.window_messages or 4 * self._owed_bytes >= settings.window_bytes:
            self._grant()

    async def flush(self) -> None:
        """Returns when the broker has applied every ack and nack so far. Raises if it will not."""
        self._collect()
        waiting = []
        for verdict in (*self._unconfirmed, *self._unsent):
            verdict.done = verdict.done or self._loop.create_future()
            waiting.append(verdict.done)
        if self.failure is not None and waiting:
            raise copy(self.failure)
        self._turn()
        if waiting:
            # Others may wait for the same answers, now or later: giving up here is not the end of them.
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for error in filter(None, (each.exception() for each in done)):
                raise copy(error)

    async def close(self) -> None:
        """Gives back what is not acknowledged, to be delivered to others."""
        link = self.link
        if link is None or not link.usable:
            return
        await self.flush()
        if link is self.link:
            link.consumers.pop(self.handle, None)
            await link.request(pb.Command(close_consumer=pb.CloseConsumer(consumer=self.handle)), "done")

    async def seek(self, to: Place) -> int:
        """Delivers from another place on; what was delivered before and not handed over is dropped."""
        link = self.link or await self._find()
        request = pb.Seek(topic=self.topic, subscription=self._settings.subscription, to=place_of(to))
        frame = await link.request(pb.Command(seek=request), "offset_found", accept=self._seek_answered)
        return frame.command.offset_found.offset

    def _seek_answered(self, frame: frames.Frame) -> None:
        found = frame.command.offset_found
        if not found.HasField("seeks"):  # a broker that does not count them delivers nothing before it answers
            self._sought()
        elif found.seeks > self._seeks:
            self._sought()
            self._seeks = self._sought_to = found.seeks

    def _sought(self) -> None:
        """Nothing of what was delivered before counts any more, and no ack of it may be sent again."""
        self._collect()
        self._forget_unsent()
        for verdict in self._unconfirmed:
            verdict.is_void = True
        self._settled.clear()
        self._drop_inbox()

    def _forget_unsent(self) -> None:
        """What these are about is not there any more: the topic was made anew, and its offsets are other messages."""
        for verdict in self._unsent:
            verdict.settle()
        self._unsent.clear()

    # --- to the broker ------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self.link is not None:
            self._send_answers(self.link)

    def _collect(self) -> None:
        """Nacks and acks so far, as commands may have them."""
        if self._nacks:
            nacks, self._nacks = self._nacks, {}
            for (delay_ms, reason), offsets in nacks.items():
                for ranges in _in_parts(offsets):
                    self._unsent.append(_Verdict(ranges, self._seeks, is_ack=False, delay_ms=delay_ms, reason=reason))
        self._acks.add(self._ack_first, self._ack_end)
        self._ack_first = self._ack_end = 0
        if self._acks:
            self._unsent.extend(_Verdict(ranges, self._seeks, is_ack=True) for ranges in _in_parts(self._acks))
            self._acks.clear()

    def _send_answers(self, link: Link) -> None:
        """Sends acks and nacks."""
        self._collect()
        while self._unsent:
            verdict = self._unsent.popleft()
            self._unconfirmed[verdict] = None
            answered = partial(self._answered, self.generation, verdict)
            link.ask(verdict.command(self.handle), answered)

    def _answered(self, generation: int, verdict: _Verdict, answer: frames.Frame | DanubeError) -> None:
        if generation != self.generation:
            return  # of a handle that has ended: it is sent again
        del self._unconfirmed[verdict]
        if not isinstance(answer, DanubeError) or isinstance(answer, AckOutdated) or verdict.is_void:
            verdict.settle()
        elif not answer.retryable:
            # Nobody may ever ask: the application goes on, so this is the only sign that something was not applied.
            log.warning(
                "ack refused" if verdict.is_ack else "nack refused",
                extra={"topic": self.topic, "subscription": self._settings.subscription, "why": str(answer)},
            )
            verdict.settle(answer)
        else:
            self._unsent.append(verdict)
            if not self._is_scheduled:
                self._is_scheduled = True
                self._loop.call_later(self._backoff.seconds(), self._turn)

    def _grant(self) -> None:
        if self.link is not None:
            flow = pb.Flow(consumer=self.handle, messages=self._owed_messages, bytes=self._owed_bytes)
            self._owed_messages = self._owed_bytes = 0
            self.link.say(pb.Command(flow=flow))

    # --- from the broker ----------------------------------------------------------------------------

    def delivered(self, ranges: tuple[tuple[int, int], ...], attempt: int, seeks: int, body: memoryview) -> None:
        batch = load(body)
        header = batch.header
        if ranges[0][0] < header.base_offset or ranges[-1][1] > header.end_offset:
            raise ProtocolViolation(f"ranges {ranges} are not in the batch delivered with them")
        self._progressed()
        delivery = Delivery(self, batch, ranges, attempt, len(body), seeks)
        if seeks < self._sought_to:
            self.consumed(delivery)  # it was on its way when we sought, and nobody wants it any more
            return
        if seeks != self._seeks:
            self._sought()
            self._seeks = seeks
        self._epoch = max(self._epoch, header.epoch)
        if self._settled:
            rest = self._without_settled(ranges, header.epoch)
            if not rest:
                self.consumed(delivery)
                return
            self._owed_messages += delivery.keep(rest)
        self._inbox.append(delivery)
        self._arrived()

    def _without_settled(self, ranges: Sequence[tuple[int, int]], epoch: int) -> Sequence[tuple[int, int]]:
        """What the application has not acknowledged; the rest is acknowledged again."""
        if ranges[0][0] < self._known_end:
            self._settled.clear()  # somebody has sought back, and wants what is done to be done again
        if not 0 < epoch <= self._settled_epoch:
            return ranges  # other messages, which have the same offsets
        rest: list[tuple[int, int]] = []
        for first, end in ranges:
            rest += self._settled.gaps(first, end)
            for settled in self._settled.overlap(first, end):
                self._settled.remove(*settled)
                self.ack_ranges((settled,), self._seeks)
        return rest

    def leave(self, link: Link) -> None:
        if link is self.link:
            self._send_answers(link)

    def _drop_inbox(self) -> None:
        mine = [delivery for delivery in self._inbox if delivery.lane is self]
        for delivery in mine:
            self._inbox.remove(delivery)
            self.consumed(delivery)
        self._dropped(self)

    # --- the lane -----------------------------------------------------------------------------------

    def _on_lost(self, error: DanubeError) -> None:
        for verdict in reversed(self._unconfirmed):
            if verdict.is_void:
                verdict.settle()
            else:
                self._unsent.appendleft(verdict)
        self._unconfirmed.clear()
        self._settled.clear()
        self._drop_inbox()
        self._owed_messages = self._owed_bytes = 0

    def _on_failed(self, error: DanubeError) -> None:
        self._drop_inbox()
        self._arrived()  # whoever waits for a message is told instead
        for verdict in (*self._unconfirmed, *self._unsent):
            verdict.settle(error)

    def _forget_handle(self, link: Link) -> None:
        if link.consumers.pop(self.handle, None) is not None and link.usable:
            # The connection goes on without it, so the broker is told; nobody waits for the answer.
            link.ask(pb.Command(close_consumer=pb.CloseConsumer(consumer=self.handle)), lambda _: None)

    def _remember_acks(self, next_unacked: int) -> None:
        """For as long as a broker may take to deliver again what it does not know to be done."""
        self._settled_epoch = self._epoch
        self._known_end = next_unacked
        for verdict in self._unsent:
            if verdict.is_ack:
                for first, end in verdict.ranges:
                    self._settled.add(max(first, next_unacked), end)
        if self._settled:
            generation = self.generation
            self._loop.call_later(SETTLED_SECONDS, lambda: self._forget_acks(generation))

    def _ask_what_is_known(self, link: Link) -> None:
        """The answer tells how far the broker has taken the acks before it; what it has not may come again."""
        request = pb.GetLag(topic=self.topic, subscription=self._settings.subscription)
        link.ask(pb.Command(get_lag=request), partial(self._known, self.generation))

    def _known(self, generation: int, answer: frames.Frame | DanubeError) -> None:
        if generation == self.generation and not isinstance(answer, DanubeError):
            lag = answer.command.lag
            if lag.HasField("cursor"):
                self._known_end = max(self._known_end, lag.cursor + 1)

    def _forget_acks(self, generation: int) -> None:
        if generation == self.generation:
            self._settled.clear()

    async def _open_at(self, link: Link) -> None:
        settings = self._settings
        self._collect()
        # Acks that could not be sent come first, so that these messages are not delivered again.
        is_clean = not self._unsent
        request = pb.Subscribe(
            topic=self.topic,
            subscription=settings.subscription,
            type=settings.type,
            consumer_name=settings.name,
            key_filters=settings.key_filters,
            start=settings.start,
            messages=settings.window_messages if is_clean else 0,
            bytes=settings.window_bytes if is_clean else 0,
        )

        def subscribed(frame: frames.Frame) -> None:
            answer = frame.command.subscribed
            self._attach(link, answer.consumer)
            link.consumers[answer.consumer] = self
            self._owed_messages = self._owed_bytes = 0
            self._sought_to = 0  # nothing of the connection before comes here, and the topic may have been made anew
            self._collect()
            if 0 < self._epoch < answer.created:
                self._forget_unsent()
            if self._epoch:
                self._remember_acks(answer.next_unacked)
            self._send_answers(link)
            if not is_clean:
                if self._settled:  # and nothing is under way to us, which the answer could overtake
                    self._ask_what_is_known(link)
                self._owed_messages, self._owed_bytes = settings.window_messages, settings.window_bytes
                self._grant()

        await link.request(pb.Command(subscribe=request), "subscribed", accept=subscribed)


def _in_parts(offsets: OffsetRanges) -> list[list[OffsetRange]]:
    """As many ranges as a command may have."""
    ranges = list(offsets)
    return [ranges[at : at + frames.RANGES_MAX] for at in range(0, len(ranges), frames.RANGES_MAX)]
