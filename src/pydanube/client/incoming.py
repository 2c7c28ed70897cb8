"""Messages on their way from one topic: permits out, batches in, acks out.

    Flow ─► broker ─► Deliver ─► inbox ─► application ─► ack ─┐
     ▲                             └── handed over: permits   ├─► ranges, one command per turn of the loop
     └────────────── a quarter of the window at a time        └─► nack

What is delivered and not handed to the application yet is bounded by the permits. When the connection is lost it is
dropped, because the broker delivers it again; acks that were not sent go out first on the next connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pydanube.client.connection import Brokers
from pydanube.client.lane import Lane
from pydanube.client.link import Link
from pydanube.client.messages import Delivery, Place, place_of
from pydanube.core.ranges import OffsetRanges
from pydanube.errors import DanubeError, ProtocolViolation
from pydanube.log.batch import load
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

NACKS_MAX: Final = 10_000  # kept while there is no connection; the rest comes again anyway


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
        self._nacks: list[tuple[Sequence[tuple[int, int]], float | None, str]] = []
        self._is_scheduled = False

    # --- for the application ------------------------------------------------------------------------

    def ack(self, offset: int) -> None:
        if offset == self._ack_end:
            self._ack_end = offset + 1
        else:
            self._acks.add(self._ack_first, self._ack_end)
            self._ack_first, self._ack_end = offset, offset + 1
        if not self._is_scheduled:
            self._schedule()

    def ack_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        for first, end in ranges:
            self._acks.add(first, end)
        self._schedule()

    def nack(self, ranges: Sequence[tuple[int, int]], delay_seconds: float | None, reason: str) -> None:
        if len(self._nacks) < NACKS_MAX:
            self._nacks.append((ranges, delay_seconds, reason))
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
        """Returns when the broker has applied every ack and nack so far."""
        link = self.link
        if link is None:
            return  # they are sent when there is a connection
        last = self._send_answers(link, confirmed=True)
        if last is not None:
            await link.request(last, "done")

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
        frame = await link.request(pb.Command(seek=request), "offset_found", accept=lambda _: self._drop_inbox())
        return frame.command.offset_found.offset

    # --- to the broker ------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        if self.link is not None:
            self._send_answers(self.link)

    def _send_answers(self, link: Link, *, confirmed: bool = False) -> pb.Command | None:
        """Sends acks and nacks. `confirmed`: returns the last command unsent, for who wants its answer."""
        self._acks.add(self._ack_first, self._ack_end)
        self._ack_first = self._ack_end = 0
        commands = []
        if self._acks:
            ranges = list(self._acks)
            self._acks.clear()
            for at in range(0, len(ranges), frames.RANGES_MAX):
                some = frames.flat(ranges[at : at + frames.RANGES_MAX])
                commands.append(pb.Command(ack=pb.Ack(consumer=self.handle, ranges=some)))
        nacks, self._nacks = self._nacks, []
        for nacked, delay, reason in nacks:
            # 0 means "as the policy says", so at once is a millisecond.
            delay_ms = 0 if delay is None else max(1, min(round(delay * 1000), 2**32 - 1))
            nack = pb.Nack(consumer=self.handle, ranges=frames.flat(nacked), delay_ms=delay_ms, reason=reason)
            commands.append(pb.Command(nack=nack))
        last = commands.pop() if confirmed and commands else None
        for command in commands:
            link.say(command)
        return last

    def _grant(self) -> None:
        if self.link is not None:
            flow = pb.Flow(consumer=self.handle, messages=self._owed_messages, bytes=self._owed_bytes)
            self._owed_messages = self._owed_bytes = 0
            self.link.say(pb.Command(flow=flow))

    # --- from the broker ----------------------------------------------------------------------------

    def delivered(self, ranges: tuple[tuple[int, int], ...], attempt: int, body: memoryview) -> None:
        batch = load(body)
        header = batch.header
        if ranges[0][0] < header.base_offset or ranges[-1][1] > header.end_offset:
            raise ProtocolViolation(f"ranges {ranges} are not in the batch delivered with them")
        self._progressed()
        self._inbox.append(Delivery(self, batch, ranges, attempt, len(body)))
        self._arrived()

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
        self._drop_inbox()
        self._owed_messages = self._owed_bytes = 0

    def _on_failed(self, error: DanubeError) -> None:
        self._drop_inbox()
        self._arrived()  # whoever waits for a message is told instead

    def _forget_handle(self, link: Link) -> None:
        if link.consumers.pop(self.handle, None) is not None and link.usable:
            # The connection goes on without it, so the broker is told; nobody waits for the answer.
            link.ask(pb.Command(close_consumer=pb.CloseConsumer(consumer=self.handle)), lambda _: None)

    async def _open_at(self, link: Link) -> None:
        settings = self._settings
        self._acks.add(self._ack_first, self._ack_end)
        self._ack_first = self._ack_end = 0
        # Acks that could not be sent come first, so that these messages are not delivered again.
        is_clean = not self._acks and not self._nacks
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
            self._send_answers(link)
            if not is_clean:
                self._owed_messages, self._owed_bytes = settings.window_messages, settings.window_bytes
                self._grant()

        await link.request(pb.Command(subscribe=request), "subscribed", accept=subscribed)
