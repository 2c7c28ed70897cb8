"""A consumer of a subscription: one topic or several, with all of their partitions, or those that fit a pattern.

async for message in consumer     message by message
consumer.receive()                the next one, with a deadline
consumer.batches()                as Arrow, batch by batch
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from pydanube.client.brokers import Brokers, with_deadline
from pydanube.client.inbox import Inbox
from pydanube.client.messages import Message, MessageBatch, Place, ReceivedBatch, place_of
from pydanube.client.partition_consumer import ConsumerSettings, PartitionConsumer
from pydanube.client.topics import TopicDiscovery, is_gone
from pydanube.client.working import Handled, Handler, HandlerWork
from pydanube.core.consuming.values import Closing, Hungered
from pydanube.errors import ClientClosed, ConsumerStopped, DanubeError, DeadlineExceeded, NeverOpened

log = logging.getLogger(__name__)

# A consumer that never has to wait would never let anything else run.
TURN_MESSAGES: Final = 2_000
CLOSE_SECONDS: Final = 5.0  # for the broker to take what is acknowledged
ANSWER_SECONDS: Final = 10.0  # for the application to answer for what it has, when it closes the consumer


class Consumer:
    """Made by `Client.consumer`; subscribed inside its `async with` block.

    >>> async with client.consumer("/default/greetings", subscription="docs", start="earliest") as consumer:
    ...     async for message in consumer:
    ...         print(message.payload.decode(), message.key, message.attributes)
    ...         await message.ack()
    ...         if message.payload == b"goodbye":
    ...             break
    hello me {'lang': 'en'}
    goodbye None {}

    Delivery is at least once: what is not acknowledged when the consumer closes, or its connection breaks, comes again.
    One consumer may be used by several tasks; each message goes to one of them.
    """

    def __init__(
        self,
        brokers: Brokers,
        topic: str,
        settings: ConsumerSettings,
        *,
        partitions: Callable[[], Awaitable[list[str]]],
        timeout: float,
        discover_seconds: float | None = None,
        comes_and_goes: Callable[[str], bool] = lambda _: False,
        prepare: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`discover_seconds`: `partitions` is asked so often, because there are topics for which `comes_and_goes` is
        true. `prepare` is awaited for each topic before it is subscribed to.
        """
        self.topic = topic
        self.subscription = settings.subscription
        self.name = settings.name
        self._brokers = brokers
        self._settings = settings
        self._partitions = partitions
        self._timeout = timeout
        self._lanes: list[PartitionConsumer] = []
        self._inbox = Inbox()
        self._current: deque[Message] = deque()  # of the delivery that is in hand
        self._is_stopped = False
        self._work: HandlerWork | None = None
        self._since_turn = 0
        self._is_open = False
        self._was_opened = False
        self._changing = asyncio.Lock()  # held while it opens or closes, so that no second set of lanes is opened
        self._advancing = asyncio.Lock()
        self._prepare = prepare
        self._comes_and_goes = comes_and_goes
        self._discovery = (
            None if discover_seconds is None else TopicDiscovery(partitions, self._topics_changed, discover_seconds)
        )

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> Self:
        """As entering the `async with` block. Does nothing if it is open; simultaneous calls share one opening."""
        async with self._changing:
            if not self._is_open:
                await self._open()
        return self

    async def _open(self) -> None:
        topics = await self._partitions()
        self._is_stopped = False
        self._lanes = await self._opened(topics, self._settings)
        self._is_open = self._was_opened = True
        if self._discovery is not None:
            self._discovery.start(self.topic)

    async def _opened(self, topics: Sequence[str], settings: ConsumerSettings) -> list[PartitionConsumer]:
        """Lanes for these, which share the windows with those that are there. All or none of them."""
        share = len(self._lanes) + len(topics) if self._is_open else len(topics)
        if share > 1:
            settings = replace(
                settings,
                window_messages=max(1, settings.window_messages // share),
                window_bytes=max(1, settings.window_bytes // share),
            )
        lanes = [PartitionConsumer(self._brokers, topic, settings, self._inbox) for topic in topics]
        opening = [asyncio.ensure_future(self._open_lane(lane)) for lane in lanes]
        try:
            await asyncio.gather(*opening)
        except BaseException:
            for each in opening:
                each.cancel()
            await asyncio.gather(*opening, *(lane.stop() for lane in lanes), return_exceptions=True)
            raise
        return lanes

    async def _open_lane(self, lane: PartitionConsumer) -> None:
        if self._prepare is not None:
            await self._prepare(lane.topic)
        await lane.open(self._timeout)

    async def _topics_changed(self, topics: Sequence[str]) -> None:
        """Of patterns: reads what is new, from its beginning, and leaves what is gone."""
        await self._leave_gone()
        for lane in [each for each in self._lanes if each.topic not in topics]:
            await self._leave(lane)
        known = {lane.topic for lane in self._lanes}
        await asyncio.gather(*(self._join(topic) for topic in topics if topic not in known))

    async def _join(self, topic: str) -> None:
        try:
            lanes = await self._opened([topic], replace(self._settings, start=place_of("earliest")))
        except DanubeError as error:  # it is tried again when the topics are looked at next
            log.warning("topic not joined", extra={"topic": topic, "why": str(error)})
            return
        self._lanes = [*self._lanes, *lanes]
        self._inbox.arrived.set()  # a task that waits looks at all lanes

    async def _leave(self, lane: PartitionConsumer) -> None:
        self._lanes = [each for each in self._lanes if each is not lane]
        await lane.stop()

    async def _leave_gone(self) -> bool:
        """Topics of patterns that were deleted. One that was named is missed instead."""
        gone = [each for each in self._lanes if is_gone(each.failure) and self._comes_and_goes(each.topic)]
        for lane in gone:
            await self._leave(lane)
        return bool(gone)

    async def stop(self, *, timeout: float | None = None) -> None:
        """Receives no more: an `async for` ends, and what was not taken goes to other consumers. Acks still travel.

        >>> async with client.consumer("/default/numbers", subscription="stopped", start="earliest") as consumer:
        ...     message = await consumer.receive()
        ...     await consumer.stop()
        ...     await message.ack()
        """
        if not self._is_open:
            return
        self._is_stopped = True
        if self._discovery is not None:
            await self._discovery.stop()
        seconds = self._timeout if timeout is None else timeout
        try:
            await with_deadline(
                f"stopping the consumer of {self.topic}",
                seconds,
                _together(lane.stop_receiving() for lane in self._lanes),
            )
        except DanubeError as error:
            if not error.retryable:
                raise
            # The connection is gone, and with it everything that was not acknowledged: nothing comes any more.
        finally:
            self._inbox.arrived.set()

    async def close(self, *, timeout: float | None = None) -> None:
        """Receives no more, waits for answers to what the application has, sends them, and gives back the rest.

        After `timeout` seconds (ten, or the client's if that is shorter) it waits no longer; an ack that comes still
        later raises ClientClosed. Leaving the `async with` block waits only if the consumer was stopped before. Waits
        for an `open`.
        """
        async with self._changing:
            if self._is_open:
                await self._wait_for_answers(timeout)
                await self._close(timeout)

    async def _wait_for_answers(self, timeout: float | None) -> None:
        seconds = min(ANSWER_SECONDS, self._timeout) if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                await self.stop()
                while any(lane.has_out for lane in self._lanes):
                    self._inbox.all_answered.clear()
                    await self._inbox.all_answered.wait()
        except (TimeoutError, DeadlineExceeded):
            pass

    async def _close(self, timeout: float | None) -> None:
        self._is_open = False
        self._inbox.arrived.set()
        if self._discovery is not None:
            await self._discovery.stop()
        for lane in self._lanes:
            lane.feed(Closing())
        closing = [asyncio.ensure_future(lane.close()) for lane in self._lanes]
        try:
            if closing:
                await asyncio.wait(closing, timeout=min(CLOSE_SECONDS, self._timeout if timeout is None else timeout))
        finally:
            for each in closing:
                each.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
            for lane in self._lanes:
                await lane.stop()
            self._inbox.clear()
            self._current.clear()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async with self._changing:
            if self._is_open:
                if self._is_stopped and error is None:
                    await self._wait_for_answers(None)
                await self._close(None)

    # --- receiving ----------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Message]:
        current, inbox = self._current, self._inbox
        while await self._advance():
            while current:
                if not inbox.is_telling:
                    inbox.tell()
                yield current.popleft()

    async def receive(self, *, timeout: float | None = None) -> Message:
        """The next message. Raises DeadlineExceeded if none came within `timeout` seconds."""
        while not self._current:
            seconds = self._timeout if timeout is None else timeout
            try:
                async with asyncio.timeout(seconds):
                    is_open = await self._advance()
            except TimeoutError:
                raise DeadlineExceeded(f"receiving from {self.topic}", seconds) from None
            if not is_open:
                raise self.ended
        self._inbox.tell()
        return self._current.popleft()

    async def batches(self) -> AsyncIterator[MessageBatch]:
        """Arrow record batches, as they were stored: the fastest way to receive.

        >>> async with client.consumer("/default/numbers", subscription="sums", start="earliest") as consumer:
        ...     async for batch in consumer.batches():
        ...         print(batch.arrow.column("offset").to_pylist(), batch.arrow.column("payload").to_pylist())
        ...         await batch.ack()
        ...         break
        [0, 1, 2] [b'1', b'2', b'3']
        """
        while (delivery := await self.next_delivery()) is not None:
            yield MessageBatch(delivery)

    async def next_delivery(self, taking: deque[Any] | None = None) -> ReceivedBatch | None:
        """The next batch as it came; None: there will be no more. For facades.

        It counts as handed over; with `taking` its messages do one by one, as they leave that queue, into which the
        caller puts them immediately.
        """
        async with self._advancing:
            return self._inbox.next(taking) if await self._wait() else None

    async def run(
        self,
        handler: Handler,
        *,
        concurrency: int = 8,
        grace: float = 30.0,
        on_sigterm: bool = True,
    ) -> Handled:
        """Gives every message to `handler`, `concurrency` at a time at most, until the consumer is stopped.

        A message is acknowledged when its handler returns, and nacked with the reason when it raises. A handler that is
        a plain function holds up the event loop while it runs. `stop()`, SIGTERM (for every run of the program, unless
        another handler is installed) and cancellation end it in order: nothing more is received, handlers that run have
        `grace` seconds to finish, and their answers arrive. Returns the counts, which are in `handled` while it runs.

        >>> async def handle(message):
        ...     print(message.payload)
        ...     if message.payload == b"3":
        ...         await consumer.stop()
        >>> async with client.consumer("/default/numbers", subscription="worker", start="earliest") as consumer:
        ...     print(await consumer.run(handle, concurrency=1))
        b'1'
        b'2'
        b'3'
        Handled(acked=3, nacked=0, given_up=0)
        """
        self._check_opened()
        self._work = HandlerWork(self, handler, concurrency=concurrency, grace_seconds=grace)
        return await self._work.run(on_sigterm=on_sigterm)

    @property
    def handled(self) -> Handled:
        """What `run` has done so far."""
        return Handled() if self._work is None else self._work.handled

    async def flush(self, *, timeout: float | None = None) -> None:
        """Returns when the broker has applied every ack and nack so far."""
        self._check_opened()
        seconds = self._timeout if timeout is None else timeout
        await with_deadline(f"flushing acks of {self.topic}", seconds, _together(lane.flush() for lane in self._lanes))

    async def seek(self, to: Place, *, timeout: float | None = None) -> None:
        """Moves the subscription, for all of its consumers: to an offset, a time, "earliest" or "latest".

        Messages that were handed over before are not taken back, and acknowledging them does no harm.
        """
        self._check_opened()
        seconds = self._timeout if timeout is None else timeout
        what = f"seeking {self.topic}"
        await _together(self._brokers.retry_until(what, seconds, partial(lane.seek, to)) for lane in self._lanes)

    # --- inside -------------------------------------------------------------------------------------

    async def _advance(self) -> bool:
        """Returns when `_current` has messages; False: there will be no more."""
        async with self._advancing:
            if self._current:
                return True  # another task was faster
            if not await self._wait():
                return False
            delivery = self._inbox.next(self._current)
            self._since_turn += delivery.count
            base = delivery.batch.header.base_offset
            payloads = delivery.column("payload")
            for first, end in delivery.ranges:
                self._current.extend(
                    [Message(delivery, offset - base, offset, payloads[offset - base]) for offset in range(first, end)]
                )
            return True

    async def _wait(self) -> bool:
        """Returns when the inbox has something; False: the consumer is closed. Raises what ended one of its lanes."""
        self._inbox.hand_over()
        self._check_opened()
        for lane in self._lanes:
            if lane.machine.is_starved:  # the others may never be empty
                lane.feed(Hungered())
        if self._since_turn >= TURN_MESSAGES:
            self._since_turn = 0
            await asyncio.sleep(0)
        while not self._inbox:
            if not self._is_open or self._is_stopped:
                return False
            if await self._leave_gone():
                continue
            for lane in self._lanes:
                if lane.failure is not None:
                    raise copy(lane.failure)  # each time its own, or the tracebacks of all would pile up in one
                lane.feed(Hungered())
            self._inbox.arrived.clear()
            await self._inbox.arrived.wait()
            self._since_turn = 0
        return self._is_open

    def _check_opened(self) -> None:
        """An `async for` over a consumer that was not opened would end immediately, as if there were no messages."""
        if not self._was_opened:
            raise NeverOpened(f"the consumer of {self.topic}")

    @property
    def ended(self) -> ClientClosed:
        """Why there are no more messages."""
        return (ConsumerStopped if self._is_open else ClientClosed)(f"the consumer of {self.topic}")

    @property
    def timeout(self) -> float:
        """Of a call that is given none."""
        return self._timeout

    @property
    def failure(self) -> DanubeError | None:
        """Why no more messages come, if it is so."""
        return next((lane.failure for lane in self._lanes if lane.failure is not None), None)


async def _together(work: Iterable[Coroutine[Any, Any, object]]) -> None:
    """Returns when all is done. Raises what fails first, and leaves the rest."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
