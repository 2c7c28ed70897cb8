"""Unary sends that arrive while a commit is in flight become one batch.

Building an Arrow batch costs about as much for one message as for a hundred, and so does a sync. So a topic has one
batch of gathered messages in flight at a time; messages that arrive in the meantime form the next.
"""

from __future__ import annotations

import asyncio
from typing import Final

from pydanube.broker.reservation import Reservation
from pydanube.errors import DanubeError, InvalidBatch
from pydanube.formats.batch import Batch, Envelope, encode_messages
from pydanube.log.wal import CommitReceipt, TopicLog

ROWS_MAX: Final = 2_000
SIZE_MAX_BYTES: Final = 4 * 1024 * 1024
# Of a payload until its call is answered: gRPC keeps the request as it came and as it was decoded, we the message.
COPIES: Final = 3
CALL_OVERHEAD_BYTES: Final = 1024


class Gatherer:
    """One topic's. `send` never waits; its future gets the message's offset."""

    def __init__(self, topic_log: TopicLog, reservation: Reservation) -> None:
        self._log = topic_log
        self._reservation = reservation
        self._waiting: list[tuple[Envelope, asyncio.Future[int]]] = []
        self._busy = False  # a batch is on its way, or about to be
        self._rows_max = ROWS_MAX
        self._pressure = topic_log.pressure

    @property
    def busy(self) -> bool:
        """Whether messages wait for their receipt."""
        return self._busy

    def send(self, message: Envelope) -> asyncio.Future[int]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()
        self._pressure.add(COPIES * len(message.payload) + CALL_OVERHEAD_BYTES)
        self._waiting.append((message, done))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._go)  # whatever else this turn of the loop brings comes along
        return done

    def _go(self) -> None:
        while taken := self._take():
            try:
                batch = self._encode([message for message, _ in taken])
            except InvalidBatch as error:
                if len(taken) == 1:
                    self._fail(taken, error)
                    continue
                good = self._only_good(taken)
                if len(good) == len(taken):
                    self._rows_max = len(taken) // 2  # each fits, but all together are too large
                self._waiting[:0] = good
                continue
            self._rows_max = ROWS_MAX
            self._submit(batch, taken)
            return
        self._busy = False

    def _only_good(
        self, taken: list[tuple[Envelope, asyncio.Future[int]]]
    ) -> list[tuple[Envelope, asyncio.Future[int]]]:
        """One message does not fit the envelope: each is tried for itself, so that it alone is refused."""
        good = []
        for message, done in taken:
            try:
                self._encode([message])
                good.append((message, done))
            except InvalidBatch as error:
                self._fail([(message, done)], error)
        return good

    def _take(self) -> list[tuple[Envelope, asyncio.Future[int]]]:
        size = count = 0
        for message, _ in self._waiting[: self._rows_max]:
            size += len(message.payload)
            count += 1
            if size >= SIZE_MAX_BYTES:
                break
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _encode(self, messages: list[Envelope]) -> Batch:
        return encode_messages(messages, topic=self._log.topic)

    def _submit(self, batch: Batch, taken: list[tuple[Envelope, asyncio.Future[int]]]) -> None:
        self._reservation.need(len(taken))

        def decided(receipt: asyncio.Future[CommitReceipt]) -> None:
            if receipt.cancelled():
                self._fail(taken, InvalidBatch("it was cancelled"))
            elif error := receipt.exception():
                self._fail(taken, error if isinstance(error, DanubeError) else InvalidBatch(str(error)))
            else:
                self._release(taken)
                offset = receipt.result().offset
                for row, (_, done) in enumerate(taken):
                    if not done.done():
                        done.set_result(offset + row)
            self._go()

        self._log.submit(batch).add_done_callback(decided)

    def _fail(self, taken: list[tuple[Envelope, asyncio.Future[int]]], error: DanubeError) -> None:
        self._release(taken)
        for _, done in taken:
            if not done.done():
                done.set_exception(error)

    def _release(self, taken: list[tuple[Envelope, asyncio.Future[int]]]) -> None:
        """They need no memory any more."""
        size_bytes = sum(len(message.payload) for message, _ in taken)
        self._pressure.remove(COPIES * size_bytes + CALL_OVERHEAD_BYTES * len(taken))
