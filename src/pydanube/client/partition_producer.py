"""Messages on their way to one topic: gathered, encoded, sent, and sent again until there is a receipt.

    append ─► Draft ─► Draft ─► encode ─► Outgoing ─► Outgoing ─► receipt
              (open)   (full)             └── at most 8 in flight, oldest first; kept, unchanged, until answered ──┘

*Natural batching.* While fewer than EAGER batches are in flight, whatever is there goes out at the end of the loop's
turn; otherwise it waits for an answer, or for the draft to be full. A busy producer so makes large batches and an idle
one waits for nobody. Two in flight, not one: the broker has the next batch when it has written the one before. Whoever
sends one message at a time does not even wait for the end of the turn.

*Order.* The rules are docs/protocol.md §5. The broker answers in the order in which it was asked, so the first error
among the answers is the cause, and every later one its consequence. Nothing is sent between that error and the last
answer. Without a session each batch is for itself: one is refused, and the next one stored all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Final

from pydanube.client.brokers import Brokers
from pydanube.client.connection import Link
from pydanube.client.messages import DURABILITIES, Receipt
from pydanube.client.open_batch import Draft, Outgoing, ProducerSettings, Waiter
from pydanube.client.partition_handle import Lane
from pydanube.errors import (
    DanubeError,
    DeadlineExceeded,
    DiskFull,
    InvalidBatch,
    LogBusy,
    LogClosed,
    LogFull,
    LogStopped,
    MessageTooLarge,
    OutOfSequence,
    ProducerFenced,
    ProducerUnknown,
    ProtocolViolation,
    RateLimited,
    Refused,
    SessionUnknown,
    Unavailable,
)
from pydanube.formats.batch import Batch, renumber
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)

EAGER: Final = 2
PRODUCE_OVERHEAD_BYTES: Final = 64  # lengths and command in front of a batch
ENCODE_ON_LOOP_BYTES: Final = 1024 * 1024
COMPRESS_ON_LOOP_BYTES: Final = 128 * 1024

# Brokers remember a session for longer than this after its last batch, whatever their clocks do (log/wal.py).
RESEND_SECONDS: Final = 24 * 3600.0
# The batch was certainly not stored.
CERTAIN: Final = (Refused, DiskFull, LogBusy, LogClosed, LogFull, ProducerUnknown, RateLimited)
# The broker's idea of this session and ours have nothing in common.
HOPELESS: Final = (InvalidBatch, ProducerFenced, ProtocolViolation)


class ProducerLane(Lane):
    """Sends to one topic, or to one partition. `released` is called with the bytes that need no room any more."""

    what = "producer"

    def __init__(
        self, brokers: Brokers, topic: str, settings: ProducerSettings, released: Callable[[int], None]
    ) -> None:
        super().__init__(brokers, topic)
        self.message_size_max = 0
        self._settings = settings
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._time_ns = brokers.connector.time_ns
        self._draft = Draft(0.0)
        self._full: deque[Draft] = deque()
        self._queue: deque[Outgoing] = deque()  # the first `_sent` of them were sent on the current link
        self._sent = 0
        self._unanswered = 0
        self._in_flight_max = frames.IN_FLIGHT_MAX
        self._frame_room_bytes = frames.FRAME_SIZE_LIMIT
        self._produce = pb.Command()  # what goes in front of every batch; the link numbers it
        self._producer_id = 0
        self._session = 0
        self._next_sequence = 0
        self._trouble: tuple[DanubeError, Outgoing] | None = None
        self._suspect: Outgoing | None = None  # was the oldest when the broker said that it can go on with nobody
        self._is_volatile = False  # a non-reliable topic
        self._paused = False  # until the broker may have recovered
        self._encoding: Draft | None = None  # by another thread; nothing is sent meanwhile
        self._is_scheduled = False
        self._is_serial = False  # the last batch had one message, and nothing came while it was on its way
        self._is_forced = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._lost_error: DanubeError | None = None  # of a message that nobody waits for: `flush` tells it

    # --- taking messages ----------------------------------------------------------------------------

    def append(
        self,
        payload: bytes,
        key: str | None,
        attributes: Mapping[str, str] | None,
        size: int,
        waiter: asyncio.Future[Receipt] | None,
        own_deadline: bool = False,
    ) -> None:
        """Never waits. Raises why the lane has failed. A waiter with a deadline of its own is not told of ours."""
        if self.failure is not None:
            raise copy(self.failure)  # ours would keep the traceback of every call, with the messages in it
        draft = self._draft
        row = len(draft.payloads)
        at_once = False
        if row == 0:
            draft.begun_at = self._loop.time()
            at_once = self._is_serial and not self._queue and not self._is_scheduled
            if not at_once:
                self._schedule()
        elif draft.size + size > self._settings.batch_bytes:
            draft = self._rotate()
            row = 0
        draft.payloads.append(payload)
        draft.times.append(self._time_ns() // 1000)
        if draft.keys is not None:
            draft.keys.append(key)
        elif key is not None:
            draft.keys = [*[None] * row, key]
        if draft.attributes is not None:
            draft.attributes.append(attributes)
        elif attributes:
            draft.attributes = [*[None] * row, attributes]
        draft.size += size
        if waiter is not None:
            draft.waiters.append((row, waiter, own_deadline))
            if self._deadline_timer is None:
                self._watch_deadlines()
        if row + 1 >= self._settings.batch_messages:
            self._rotate()
        if at_once:
            self._pump()

    def _rotate(self) -> Draft:
        """The draft is full: it goes out as soon as there may be one more in flight."""
        self._full.append(self._draft)
        self._draft = Draft(self._loop.time())
        self._schedule()
        return self._draft

    async def flush(self) -> None:
        """Returns when everything appended before has been answered."""
        drafts = [*self._full, *filter(None, [self._encoding])]
        if self._draft.payloads:
            drafts.append(self._draft)
            self._is_forced = True
            self._schedule()
        waiting = []
        items: list[Outgoing | Draft] = [*self._queue, *drafts]
        for each in items:
            each.done = each.done or self._loop.create_future()
            waiting.append(each.done)
        if waiting:
            await asyncio.wait(waiting)

    def raise_lost(self) -> None:
        """Raises, once, why a message is lost that nobody waited for."""
        error, self._lost_error = self._lost_error, None
        if error is not None:
            raise error

    async def close(self) -> None:
        """Tells the broker that no more comes. What is not flushed is gone."""
        if self.link is not None and self.link.usable:
            close = pb.Command(close_producer=pb.CloseProducer(producer=self.handle))
            self.link.producers.pop(self.handle, None)
            await self.link.request(close, "done")

    def abandon(self, error: DanubeError) -> None:
        """Everything that has no receipt has failed. One that comes all the same is not looked at."""
        self.generation += 1
        while self._queue:
            self._drop(self._queue.popleft(), error)
        for draft in [*self._full, self._draft]:
            self._drop_draft(draft, error)
        self._full.clear()
        self._draft = Draft(0.0)
        for timer in (self._linger_timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()

    # --- sending ------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_scheduled = False
        link = self.link
        if link is None or link.leaving or self._trouble is not None or self._paused or self._encoding:
            return
        while self._sent < len(self._queue):
            self._send(link, self._queue[self._sent])
        while self._sent < self._in_flight_max:
            draft = self._next_draft()
            if draft is None:
                return
            limit = ENCODE_ON_LOOP_BYTES if self._settings.compression == "none" else COMPRESS_ON_LOOP_BYTES
            if draft.size > limit:
                self._encoding = draft
                encoding = self._brokers.connector.run(partial(self._encode, draft))
                encoding.add_done_callback(partial(self._encoded, draft))
                return
            try:
                batch = self._encode(draft)
            except InvalidBatch as error:
                self._drop_draft(draft, error)
                continue
            if batch.header.size_bytes > self._frame_room_bytes:
                self._split(draft)
                continue
            self._enqueue(draft, batch)
            self._send(link, self._queue[-1])

    def _split(self, draft: Draft) -> None:
        """The broker does not take frames so long: half of it goes first, and what cannot be halved does not go."""
        if len(draft.payloads) == 1:
            self._drop_draft(draft, MessageTooLarge(len(draft.payloads[0]), self._frame_room_bytes))
        else:
            self._full.extendleft(reversed(draft.halves()))

    def _next_draft(self) -> Draft | None:
        """What is to be sent now."""
        if self._full:
            return self._full.popleft()
        draft = self._draft
        if not draft.payloads:
            self._is_forced = False
            return None
        if not self._is_forced:
            if self._sent >= EAGER:
                return None
            linger = self._settings.linger_seconds
            if linger and (due := draft.begun_at + linger) > self._loop.time():
                if self._linger_timer is None:
                    self._linger_timer = self._loop.call_at(due, self._lingered)
                return None
        self._draft = Draft(0.0)
        return draft

    def _lingered(self) -> None:
        self._linger_timer = None
        self._pump()

    def _encode(self, draft: Draft) -> Batch:
        return draft.encode(self.topic, self._settings, self._producer_id, self._session, self._next_sequence)

    def _encoded(self, draft: Draft, encoding: asyncio.Future[Batch]) -> None:
        self._encoding = None
        if encoding.cancelled() or self.failure is not None:
            self._drop_draft(draft, self.failure or Unavailable("encoding was cancelled"))
            return
        error = encoding.exception()
        if error is not None:
            self._drop_draft(draft, error if isinstance(error, DanubeError) else InvalidBatch(str(error)))
        elif encoding.result().header.size_bytes > self._frame_room_bytes:
            self._split(draft)
        else:
            self._enqueue(draft, encoding.result())
        self._pump()

    def _enqueue(self, draft: Draft, batch: Batch) -> None:
        header = batch.header
        if (header.session, header.first_sequence) != (self._session, self._next_sequence):
            # The session changed while another thread was encoding; nobody has seen this batch yet.
            batch = self._renumbered(batch)
        if self._session:
            self._next_sequence += header.rows
        self._is_serial = header.rows == 1 and not self._queue
        self._queue.append(Outgoing(batch, draft))

    def _renumbered(self, batch: Batch) -> Batch:
        return renumber(batch, producer_id=self._producer_id, session=self._session, first_sequence=self._next_sequence)

    def _send(self, link: Link, outgoing: Outgoing) -> None:
        self._sent += 1
        self._unanswered += 1
        link.ask(self._produce, partial(self._answered, self.generation, outgoing), *outgoing.batch.buffers)

    # --- answers ------------------------------------------------------------------------------------

    def _answered(self, generation: int, outgoing: Outgoing, answer: frames.Frame | DanubeError) -> None:
        if generation != self.generation:
            return  # of a handle that has ended: the batch is sent again
        place = self._sent - self._unanswered  # of the oldest without an answer; those before it were refused
        self._unanswered -= 1
        if isinstance(answer, DanubeError):
            outgoing.is_doubtful |= not isinstance(answer, CERTAIN)
            self._trouble = self._trouble or (answer, outgoing)
        elif answer.kind != "receipt" or self._queue[place] is not outgoing or (place and self._session):
            self._give_up(ProtocolViolation("a batch was answered out of turn, or with no receipt"))
            return
        else:
            del self._queue[place]
            self._sent -= 1
            self._store(outgoing, answer.command.receipt)
        if self._trouble is None:
            self._pump()
        elif not self._unanswered:
            self._recover()

    def _store(self, outgoing: Outgoing, receipt: pb.Receipt) -> None:
        self._progressed()
        self._suspect = None
        topic, offset, epoch, duplicate = self.topic, receipt.offset, receipt.epoch, receipt.duplicate
        durability = DURABILITIES.get(receipt.durability, "memory")
        step = 1 if durability != "memory" else 0
        for row, waiter, _ in outgoing.waiters:
            if not waiter.done():
                waiter.set_result(Receipt(topic, offset + row * step, epoch, durability, duplicate))
        self._finish(outgoing.done, outgoing.size)

    def _recover(self) -> None:
        """Every batch in flight is answered, and the first that was refused says why."""
        assert self._trouble is not None
        (error, refused), self._trouble = self._trouble, None
        self._sent = 0
        if isinstance(error, SessionUnknown):
            self._leave_session(error)
            self._reopen(error)
        elif isinstance(error, OutOfSequence) and self._resequence(error):
            self._pump()
        elif isinstance(error, (DiskFull, LogBusy, LogFull, RateLimited)):
            self._last_error = error  # whoever waits in vain is told
            self._paused = True
            self._loop.call_later(self._backoff.seconds(), self._resume)
        elif error.retryable or isinstance(error, LogStopped):  # after which nobody knows what is stored
            self._reopen(error)
        elif isinstance(error, (OutOfSequence, *HOPELESS)):
            self._fail(error)
        else:
            self._forget(refused, error)

    def _leave_session(self, error: DanubeError) -> None:
        """What comes goes under a new session. What may be stored under the old one is not sent again: that would be
        another message to the broker, and stored twice if it was stored. Whoever waits for it is told.
        """
        self._session = 0
        for outgoing in [each for each in self._queue if each.is_doubtful]:
            self._queue.remove(outgoing)
            self._drop(outgoing, error)

    def _resume(self) -> None:
        self._paused = False
        self._pump()

    def _resequence(self, error: OutOfSequence) -> bool:
        """Whether the batches that have no receipt continue what the broker has, perhaps under other numbers."""
        if not self._queue or error.expected > self._queue[0].batch.header.first_sequence:
            return False
        if error.expected < self._queue[0].batch.header.first_sequence:
            log.warning("batches numbered anew", extra={"topic": self.topic, "expected": error.expected})
            self._renumber_all(error.expected)
        return True

    def _forget(self, refused: Outgoing, error: DanubeError) -> None:
        """One batch is refused for good; those behind it were refused for its sake, and get its numbers."""
        first_sequence = refused.batch.header.first_sequence
        self._queue.remove(refused)
        self._drop(refused, error)
        self._renumber_all(first_sequence)
        self._pump()

    def _renumber_all(self, first_sequence: int) -> None:
        self._next_sequence = first_sequence
        for outgoing in self._queue:
            outgoing.batch = self._renumbered(outgoing.batch)
            if self._session:
                self._next_sequence += outgoing.rows

    # --- the ends of messages -----------------------------------------------------------------------

    def _drop(self, outgoing: Outgoing, error: DanubeError) -> None:
        self._refuse(outgoing.waiters, outgoing.rows, error)
        self._finish(outgoing.done, outgoing.size)

    def _drop_draft(self, draft: Draft, error: DanubeError) -> None:
        if draft.payloads:
            self._refuse(draft.waiters, len(draft.payloads), error)
            self._finish(draft.done, draft.size)

    def _refuse(self, waiters: list[Waiter], rows: int, error: DanubeError) -> None:
        self._tell(waiters, error)
        if len(waiters) < rows:
            self._lost_error = self._lost_error or copy(error)

    def _tell(self, waiters: list[Waiter], error: DanubeError) -> None:
        """Each gets one of his own, to which his traceback is added."""
        for _, waiter, _ in waiters:
            if not waiter.done():
                waiter.set_exception(copy(error))

    def _finish(self, done: asyncio.Future[None] | None, size: int) -> None:
        self._released(size)
        if done is not None and not done.done():
            done.set_result(None)

    def _watch_deadlines(self) -> None:
        """Messages that have waited too long fail; one that is not even encoded is not sent any more either."""
        seconds = self._settings.timeout
        error = DeadlineExceeded(f"sending to {self.topic}", seconds, str(self._last_error or ""))
        late = self._loop.time() - seconds
        encoded: list[Outgoing | Draft] = [*self._queue, *filter(None, [self._encoding])]
        for each in encoded:
            if each.begun_at <= late:
                self._tell([waiter for waiter in each.waiters if not waiter[2]], error)
        kept: deque[Draft] = deque()
        for draft in self._full:
            kept.append(self._expire(draft, error) if draft.begun_at <= late else draft)
        self._full = deque(draft for draft in kept if draft.payloads)
        if self._draft.payloads and self._draft.begun_at <= late:
            self._draft = self._expire(self._draft, error)
        waiting = any(each.waiters for each in [*encoded, *self._full, self._draft])
        self._deadline_timer = self._loop.call_later(seconds / 8, self._watch_deadlines) if waiting else None

    def _expire(self, draft: Draft, error: DanubeError) -> Draft:
        gone = [each for each in draft.waiters if each[1].done() or not each[2]]
        if not gone:
            return draft
        rest = draft.without({row for row, _, _ in gone})
        self._tell(gone, error)
        self._finish(None if rest.payloads else draft.done, draft.size - rest.size)
        return rest

    # --- the lane -----------------------------------------------------------------------------------

    def leave(self, link: Link) -> None:
        pass  # `_pump` sends nothing more, and the link ends with the last answer

    def _on_lost(self, error: DanubeError) -> None:
        sent, unanswered, trouble = self._sent, self._unanswered, self._trouble
        self._sent = self._unanswered = 0
        self._trouble = None
        if trouble is not None:
            why = trouble[0]
            if isinstance(why, HOPELESS) or (isinstance(why, OutOfSequence) and not self._resequence(why)):
                self._fail(why)  # it hung up because of that, and would again
                return
        if not unanswered:
            return
        for place in range(sent - unanswered, sent):
            self._queue[place].is_doubtful = True
        if self._is_volatile:
            for _ in range(unanswered):  # at most once: they may have arrived
                place = sent - unanswered
                outgoing = self._queue[place]
                del self._queue[place]
                self._drop(outgoing, error)
        elif not (error.retryable or isinstance(error, SessionUnknown)):
            # Because of what we sent, or of what somebody else did on this connection. Once more, and we know.
            if self._suspect is self._queue[0]:
                self._fail(error)
            else:
                self._suspect = self._queue[0]

    def _on_failed(self, error: DanubeError) -> None:
        self.abandon(error)

    def _forget_handle(self, link: Link) -> None:
        if link.producers.pop(self.handle, None) is not None and link.usable:
            # The connection goes on without it, so the broker is told; nobody waits for the answer.
            link.ask(pb.Command(close_producer=pb.CloseProducer(producer=self.handle)), lambda _: None)

    async def _find(self) -> Link:
        if self._settings.create:
            return await self._brokers.owner_or_any(self.topic)
        return await super()._find()

    async def _open_at(self, link: Link) -> None:
        settings = self._settings
        late = self._loop.time() - RESEND_SECONDS
        if self._session and any(each.is_doubtful and each.begun_at < late for each in self._queue):
            self._leave_session(SessionUnknown(self._producer_id, self._session))  # it may have ended meanwhile
        request = pb.OpenProducer(
            topic=self.topic,
            producer_name=settings.name,
            reliable=settings.reliable,
            create=settings.create,
            exclusive=settings.exclusive,
            schema_subject=settings.schema_subject,
            session=self._session,
            without_session=not settings.idempotent,
        )

        def opened(frame: frames.Frame) -> None:
            answer = frame.command.producer_opened
            self._attach(link, answer.producer)
            self._produce = pb.Command(produce=pb.Produce(producer=answer.producer))
            link.producers[answer.producer] = self
            self.message_size_max = answer.message_size_max
            self._is_volatile = answer.durability == pb.MEMORY
            welcome = link.welcome.result()
            self._in_flight_max = welcome.in_flight_max
            self._frame_room_bytes = welcome.frame_size_max - PRODUCE_OVERHEAD_BYTES
            if (answer.producer_id, answer.session) != (self._producer_id, self._session):
                self._producer_id, self._session = answer.producer_id, answer.session
                self._renumber_all(0)
            self._schedule()

        try:
            await link.request(pb.Command(open_producer=request), "producer_opened", accept=opened)
        except SessionUnknown as error:
            self._leave_session(error)  # whatever that session has stored, this broker does not know it
            await self._open_at(link)
