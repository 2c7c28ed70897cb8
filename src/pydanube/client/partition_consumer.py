"""Messages on their way from one topic: permits out, batches in, acks out.

    Flow ─► broker ─► Deliver ─► inbox ─► application ─► ack ─┐
     ▲                  ▲          └── handed over: permits   ├─► ranges, one command per turn of the loop ─► Done
     │               Recall ─► Returned: not handed over yet  └─► nack
     └────────────── a quarter of the window at a time

What is delivered and not handed to the application yet is bounded by the permits: by a fixed window, or by one that
adapts (`pacing.py`). The broker is told what the application has taken and not answered within a moment (`Handed`): the
ack timeout begins then (docs/adr/0007-workers.md). Brokers that do not know this count from sending.

When the connection is lost it is
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
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from pydanube.client.brokers import Brokers
from pydanube.client.connection import Link
from pydanube.client.messages import Delivery, Place, place_of
from pydanube.client.partition_handle import Lane
from pydanube.core.consuming.pacing import Pacing
from pydanube.core.dispatch.ranges import OFFSET_END_MAX, OffsetRange, OffsetRanges
from pydanube.errors import AckOutdated, ClientClosed, ConfigError, DanubeError, ProtocolViolation, Refused
from pydanube.formats.batch import load
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)

TELL_SECONDS: Final = 0.05  # what is answered within it was never worth a word
EXTEND_SECONDS_MAX: Final = 7 * 24 * 3600.0
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
    adapts: bool = False  # the window is the most; a subscription that shares begins with few


class Taker(Protocol):
    """The consumer that a lane receives for: what it is about to hand over, and what it wants to know."""

    def arrived(self) -> None:
        """There is something in the inbox."""

    def account(self, lane: ConsumerLane) -> None:
        """Say (`took`) how much of the lane's delivery the application has by now."""

    def withdraw(self, lane: ConsumerLane, wanted: OffsetRanges, *, copies: bool) -> OffsetRanges:
        """Do not hand over these of the lane's delivery (`copies`: if it is one); returns which had not been."""

    def dropped(self, lane: ConsumerLane) -> None:
        """The lane's connection is gone: what it delivered and nobody has yet comes again."""

    def answered(self) -> None:
        """Nothing that the application has is without an answer."""


class ConsumerLane(Lane):
    """Receives from one topic, or from one partition, into an inbox that all lanes of a consumer share."""

    what = "consumer"

    def __init__(
        self,
        brokers: Brokers,
        topic: str,
        settings: ConsumerSettings,
        inbox: deque[Delivery],
        taker: Taker,
    ) -> None:
        super().__init__(brokers, topic)
        self._settings = settings
        self._inbox = inbox
        self._taker = taker
        self._arrived = taker.arrived
        self._loop = asyncio.get_running_loop()
        self._window = settings.window_messages
        self._pacing = Pacing(settings.window_messages) if settings.adapts else None
        self._adapts = False  # the broker has agreed, and the subscription shares
        self._hands_over = False  # the broker wants to know
        self._owed_messages = self._owed_bytes = 0  # permits to be granted again; below 0: the window has shrunk
        self._open = 0  # messages that came and are not answered
        self._taken = OffsetRanges()  # by the application, since we told
        self._answers = OffsetRanges()  # of the application, since we told
        self._out = OffsetRanges()  # told, and not answered
        self._copies = OffsetRanges()  # in the inbox, or about to be handed over: what came before
        self.is_telling = False  # a timer runs
        self._is_recalled = False  # since the application last waited: perhaps it was silent for too long
        self._lost_times = 0  # how often the broker gave our whole queue to others, as far as we know
        self._is_stopped = False  # the application wants no more
        self._is_closing = False  # nothing that it answers would count
        self._is_careful = False  # an ack is more than a number: it may not count, or there may be copies
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

    def check(self) -> None:
        """Raises if an answer could not count any more."""
        if self.failure is not None:
            raise copy(self.failure)
        if self._is_closing:
            raise ClientClosed(f"the consumer of {self.topic}")

    def ack(self, offset: int, seeks: int) -> None:
        if seeks != self._seeks:
            return  # delivered before a seek: it comes again, or the subscription is beyond it
        if self._is_careful:
            self.check()
            self._drop_copies(((offset, offset + 1),))
        if offset == self._ack_end:
            self._ack_end = offset + 1
        else:
            self._acks.add(self._ack_first, self._ack_end)
            self._ack_first, self._ack_end = offset, offset + 1
        if not self._is_scheduled:
            self._schedule()

    def ack_ranges(self, ranges: Sequence[tuple[int, int]], seeks: int) -> None:
        self.check()
        if seeks != self._seeks:
            return
        if self._copies:
            self._drop_copies(ranges)
        for first, end in ranges:
            self._acks.add(first, end)
        self._schedule()

    def nack(self, ranges: Sequence[tuple[int, int]], delay_seconds: float | None, reason: str, seeks: int) -> None:
        self.check()
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

    async def extend(self, ranges: Sequence[tuple[int, int]], seconds: float, delivery: Delivery) -> None:
        """Returns when the broker has taken note. Raises if it has not."""
        if not 0 < seconds <= EXTEND_SECONDS_MAX:
            raise ConfigError("seconds", seconds, f"more than 0, and at most {EXTEND_SECONDS_MAX:g}")
        self.check()
        offset = ranges[0][0]
        if delivery.seeks != self._seeks:
            raise AckOutdated(self.topic, self._settings.subscription, offset)
        link = self.link
        if link is None or delivery.generation != self.generation:
            raise Refused(
                f"offset {offset} of {self.topic} cannot be held for longer: the connection it came on is lost, so it "
                "is delivered again"
            )
        if not self._hands_over:
            raise Refused(f"the broker of {self.topic} is too old to give a message more time; raise the ack timeout")
        extend_ms = max(1, round(seconds * 1000))
        for at in range(0, len(ranges), frames.RANGES_MAX):
            part = frames.flat(ranges[at : at + frames.RANGES_MAX])
            handed = pb.Handed(consumer=self.handle, ranges=part, seeks=delivery.seeks, extend_ms=extend_ms)
            await link.request(pb.Command(handed=handed), "done")

    def took(self, delivery: Delivery, count: int) -> None:
        """The application has the first `count` of its messages: there is room for as many again."""
        more = count - delivery.taken
        if more <= 0 or delivery.generation != self.generation:
            return  # the permits of that connection ended with it
        if self._hands_over or self._copies:
            for first, end in delivery.part(delivery.taken, count):
                self._copies.remove(first, end)
                if self._hands_over:
                    self._taken.add(first, end)
        delivery.taken = count
        self._owed_messages += more
        if count == delivery.count:
            self._owed_bytes += delivery.size
        self._consider_grant()

    def emptied(self, delivery: Delivery) -> None:
        """The rest of it was withdrawn, and nothing more will be taken: there is room for its bytes."""
        if delivery.generation == self.generation:
            self._owed_bytes += delivery.size

    def _consider_grant(self) -> None:
        wanted = self._owed_messages > 0 and 4 * self._owed_messages >= self._window
        if wanted or 4 * self._owed_bytes >= self._settings.window_bytes:
            self._grant()

    @property
    def is_starved(self) -> bool:
        """Everything was taken from it: while the application does not ask, the broker may send nothing more."""
        return self._is_recalled and not self._open

    def hungry(self) -> None:
        """The application waits, and nothing is there."""
        if self._is_recalled:
            self._is_recalled = False
            self._grant(1)  # also if the window has shrunk below what is granted: a stalled consumer must ask
        elif self._owed_messages > 0:
            self._grant()

    def tell_soon(self) -> None:
        """The application takes messages: the broker is told of what is not answered by then."""
        if not self.is_telling and self._hands_over:
            self.is_telling = True
            self._loop.call_later(TELL_SECONDS, self._tell)

    def _tell(self) -> None:
        self.is_telling = False
        self._taker.account(self)
        self._collect()
        fresh = self._taken
        for first, end in self._answers:
            fresh.remove(first, end)
        self._taken, self._answers = OffsetRanges(), OffsetRanges()
        if not fresh or self.link is None or not self._hands_over:
            return
        for ranges in _in_parts(fresh):
            handed = pb.Handed(consumer=self.handle, ranges=frames.flat(ranges), seeks=self._seeks)
            self.link.say(pb.Command(handed=handed))
        for first, end in fresh:
            self._out.add(first, end)

    @property
    def has_out(self) -> bool:
        """Whether the application has something that it has not answered. Only known if the broker wants to know."""
        self._taker.account(self)
        self._collect()
        unanswered = any(gap for first, end in self._taken for gap in self._answers.gaps(first, end))
        return unanswered or bool(self._out)

    async def stop_receiving(self) -> None:
        """Nothing more is handed over; what was not goes to others. Acks go on."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._taker.account(self)
        everything = OffsetRanges(((0, OFFSET_END_MAX),))
        unseen = self._withdraw(everything)
        link = self.link
        if link is None or not link.usable or not self._hands_over:
            return
        parts = _in_parts(unseen) or [[]]
        for ranges in parts:
            await link.request(pb.Command(returned=self._returned(ranges, stop=True)), "done")

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

    def refuse_answers(self) -> None:
        """What the application says from now on would not count, and raises."""
        self._is_closing = self._is_careful = True

    async def close(self) -> None:
        """Gives back what is not acknowledged, to be delivered to others."""
        self.refuse_answers()
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
        self._forget_taken()

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
        answered = 0
        if self._nacks:
            nacks, self._nacks = self._nacks, {}
            for (delay_ms, reason), offsets in nacks.items():
                answered += self._note(offsets)
                for ranges in _in_parts(offsets):
                    self._unsent.append(_Verdict(ranges, self._seeks, is_ack=False, delay_ms=delay_ms, reason=reason))
        self._acks.add(self._ack_first, self._ack_end)
        self._ack_first = self._ack_end = 0
        if self._acks:
            answered += self._note(self._acks)
            self._unsent.extend(_Verdict(ranges, self._seeks, is_ack=True) for ranges in _in_parts(self._acks))
            self._acks.clear()
        if answered:
            self._open = max(0, self._open - answered)
            self._pace(answered)
            if not self._open:
                self._taker.answered()

    def _note(self, offsets: OffsetRanges) -> int:
        """The application has answered these; returns how many."""
        if self._hands_over:
            for first, end in offsets:
                if self._out:
                    self._out.remove(first, end)
                self._answers.add(first, end)
            self.tell_soon()  # and forget them then
            if not self._out:
                self._taker.answered()
        return offsets.count

    def _pace(self, answered: int = 0) -> None:
        if self._adapts and self._pacing is not None:
            change = self._pacing.tick(self._loop.time(), is_busy=self._open > 0, answered=answered)
            if change:
                self._window += change
                self._owed_messages += change
                self._consider_grant()

    def _send_answers(self, link: Link) -> None:
        """Sends acks and nacks."""
        self._collect()
        while self._unsent:
            verdict = self._unsent.popleft()
            self._unconfirmed[verdict] = None
            answered = partial(self._answered, self.generation, verdict, self._loop.time())
            link.ask(verdict.command(self.handle), answered)

    def _answered(
        self, generation: int, verdict: _Verdict, asked_at: float, answer: frames.Frame | DanubeError
    ) -> None:
        if generation != self.generation:
            return  # of a handle that has ended: it is sent again
        if self._pacing is not None:
            self._pacing.round_trip(self._loop.time() - asked_at)
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

    def _grant(self, messages_min: int = 0) -> None:
        if self.link is not None and not self._is_stopped:
            messages = max(messages_min, self._owed_messages)
            flow = pb.Flow(consumer=self.handle, messages=messages, bytes=self._owed_bytes)
            self._owed_messages -= messages
            self._owed_bytes = 0
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
            self.unwanted(delivery)  # it was on its way when we sought, and nobody wants it any more
            return
        if seeks != self._seeks:
            self._sought()
            self._seeks = seeks
        self._epoch = max(self._epoch, header.epoch)
        if self._settled and not self._keep(delivery, self._without_settled(ranges, header.epoch)):
            return
        if attempt > 1:
            if not self._keep(delivery, self._without_pending(delivery.ranges)):
                return
            self._is_careful = True
            for first, end in delivery.ranges:
                self._copies.add(first, end)
        if self._is_stopped:
            if self._hands_over:
                self._say_returned(OffsetRanges(delivery.ranges))
            return  # else it goes to others when we close
        if not self._open and self._adapts:
            self._open = delivery.count
            self._pace()
        else:
            self._open += delivery.count
        self._inbox.append(delivery)
        self._arrived()

    def unwanted(self, delivery: Delivery) -> None:
        """It is not handed over, and makes room for as much."""
        if delivery.generation == self.generation:
            self._owed_messages += delivery.count - delivery.taken
            self._owed_bytes += delivery.size
            self._consider_grant()

    def _keep(self, delivery: Delivery, rest: Sequence[tuple[int, int]]) -> bool:
        """Only these of it are handed over; False: none."""
        if not rest:
            self.unwanted(delivery)
            return False
        self._owed_messages += delivery.keep(rest)
        return True

    def _without_pending(self, ranges: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """What the application has not acknowledged a moment ago: the broker had not heard of it when it sent this."""
        acked = OffsetRanges(self._acks)
        acked.add(self._ack_first, self._ack_end)
        for verdict in (*self._unconfirmed, *self._unsent):
            if verdict.is_ack and not verdict.is_void:
                for first, end in verdict.ranges:
                    acked.add(first, end)
        return [gap for first, end in ranges for gap in acked.gaps(first, end)]

    def recalled(self, ranges: tuple[tuple[int, int], ...], seeks: int, taken: int) -> None:
        """Somebody else has nothing to do: what the application has not got of these is given back."""
        self._is_recalled, self._lost_times = True, taken
        if seeks != self._seeks or not self._hands_over:
            return
        self._taker.account(self)
        unseen = self._withdraw(OffsetRanges(ranges))
        self._open = max(0, self._open - unseen.count)
        # Room that is granted when the application takes or wants something: until then it has enough.
        self._owed_messages += unseen.count
        self._say_returned(unseen)

    def _say_returned(self, unseen: OffsetRanges) -> None:
        if self.link is not None:
            for ranges in _in_parts(unseen):
                self.link.say(pb.Command(returned=self._returned(ranges)))

    def _returned(self, ranges: Sequence[tuple[int, int]], *, stop: bool = False) -> pb.Returned:
        flat = frames.flat(ranges)
        return pb.Returned(consumer=self.handle, ranges=flat, seeks=self._seeks, stop=stop, taken=self._lost_times)

    def _withdraw(self, wanted: OffsetRanges, *, copies: bool = False) -> OffsetRanges:
        """Takes these out of the inbox, and of what is about to be handed over; returns what was there.

        `copies`: only what came before.
        """
        found = OffsetRanges()
        for delivery in [each for each in self._inbox if each.lane is self and (each.attempt > 1 or not copies)]:
            mine = [part for first, end in delivery.ranges for part in wanted.overlap(first, end)]
            if not mine:
                continue
            rest = [gap for first, end in delivery.ranges for gap in wanted.gaps(first, end)]
            for first, end in mine:
                found.add(first, end)
            delivery.keep(rest)
            if not rest:
                self._inbox.remove(delivery)
                self._owed_bytes += delivery.size
        for first, end in self._taker.withdraw(self, wanted, copies=copies):
            found.add(first, end)
        for first, end in found:
            self._copies.remove(first, end)
        return found

    def _drop_copies(self, ranges: Sequence[tuple[int, int]]) -> None:
        """What is acknowledged is not shown again."""
        self._is_careful = bool(self._copies) or self._is_closing or self.failure is not None
        if not any(self._copies.overlap(first, end) for first, end in ranges):
            return
        self._taker.account(self)  # mostly it is the copy that is acknowledged
        if not any(self._copies.overlap(first, end) for first, end in ranges):
            return
        dropped = self._withdraw(OffsetRanges(ranges), copies=True)
        if dropped:
            self._open = max(0, self._open - dropped.count)
            self._owed_messages += dropped.count
            self._consider_grant()

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
            self.unwanted(delivery)
        self._taker.dropped(self)
        self._open = 0
        self._copies.clear()

    def _forget_taken(self) -> None:
        """Nobody waits for an answer to what the application has."""
        self._taken, self._answers, self._out = OffsetRanges(), OffsetRanges(), OffsetRanges()
        self._taker.answered()

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
        self._forget_taken()
        self._owed_messages = self._owed_bytes = 0

    def _on_failed(self, error: DanubeError) -> None:
        self._is_careful = True
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
        is_clean = not self._unsent and not self._is_stopped
        first = 0 if self._pacing is None else self._pacing.window
        request = pb.Subscribe(
            topic=self.topic,
            subscription=settings.subscription,
            type=settings.type,
            consumer_name=settings.name,
            key_filters=settings.key_filters,
            start=settings.start,
            messages=settings.window_messages if is_clean else 0,
            bytes=settings.window_bytes if is_clean else 0,
            hands_over=True,
            first_messages=first if is_clean else 0,
        )

        def subscribed(frame: frames.Frame) -> None:
            answer = frame.command.subscribed
            self._attach(link, answer.consumer)
            link.consumers[answer.consumer] = self
            self._owed_messages = self._owed_bytes = self._lost_times = 0
            self._hands_over = answer.hands_over
            self._adapts = answer.hands_over and self._pacing is not None and answer.type in (pb.SHARED, pb.KEY_SHARED)
            self._window = first if self._adapts else settings.window_messages
            self._sought_to = 0  # nothing of the connection before comes here, and the topic may have been made anew
            self._collect()
            if 0 < self._epoch < answer.created:
                self._forget_unsent()
            if self._epoch:
                self._remember_acks(answer.next_unacked)
            self._send_answers(link)
            if self._is_stopped and self._hands_over:  # it came back for its acks alone
                link.say(pb.Command(returned=self._returned((), stop=True)))
            if not is_clean:
                if self._settled:  # and nothing is under way to us, which the answer could overtake
                    self._ask_what_is_known(link)
                self._owed_messages, self._owed_bytes = self._window, settings.window_bytes
                self._grant()

        await link.request(pb.Command(subscribe=request), "subscribed", accept=subscribed)


def _in_parts(offsets: OffsetRanges) -> list[list[OffsetRange]]:
    """As many ranges as a command may have."""
    ranges = list(offsets)
    return [ranges[at : at + frames.RANGES_MAX] for at in range(0, len(ranges), frames.RANGES_MAX)]
