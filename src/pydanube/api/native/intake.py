"""What one native peer produces: parsed, appended in the order in which it came, answered when it is on disk.

What a peer produced and is not on disk is bounded, and so is what all peers together did (`log/pressure.py`): one that
produces more is *held*, that is, not read from. Its acks and pings wait in the socket, so that lasts a third of the
keepalive at most; then it is read from again and what it produces is refused (LogBusy), until the bound allows it.

    reading ──too much is not on disk──► held ──a third of the keepalive──► refusing
       ▲                                   │ half of the bound is free         │ it is free
       └───────────────────────────────────┴───────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from pydanube.api.native.handle_table import HandleTable
from pydanube.api.native.handles import PendingBatch, ProducerHandle, failed
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.errors import DanubeError, InvalidBatch, LogBusy, ProducerUnknown, ProtocolViolation
from pydanube.formats.batch import Batch, messages, parse, parse_header
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.status import SEND, Code, camel, status

if TYPE_CHECKING:
    from pydanube.api.native.connection import NativeConnection

# Below this a batch is parsed, or cut, on the loop: a hop to a thread and back costs more.
PARSE_ON_LOOP_BYTES: Final = 64 * 1024


class BatchIntake:
    """Batches of one connection that are not on disk. `peers` are all connections of the server."""

    def __init__(self, connection: NativeConnection, handles: HandleTable, peers: Iterable[NativeConnection]) -> None:
        self._connection = connection
        self._handles = handles
        self._peers = peers
        self.unwritten_bytes = 0
        self.held_since: float | None = None  # not read from because of what it, or all, produced
        self._pressure = connection.broker.wal.committer.pressure
        self._refusing = False
        self._pressed = False  # waits to be called by the pressure
        self._partial_bytes = self._parsing_bytes = 0  # as counted in the pressure
        # With those that were refused, in their turn.
        self._to_parse: deque[tuple[int, ProducerHandle, memoryview | PendingBatch]] = deque()
        self._parsing: asyncio.Task[None] | None = None

    def end(self) -> None:
        """The connection is gone."""
        self._pressure.forget(self._relieved)
        self.count_partial(0)
        self._pressure.remove(self._parsing_bytes)
        self._parsing_bytes = 0
        self._to_parse.clear()

    # --- back-pressure ------------------------------------------------------------------------------

    def is_held(self) -> bool:
        """Whether the peer is not to be read from, by what is not on disk now."""
        is_over = self.unwritten_bytes > self._connection.limits.unwritten_bytes
        if self.held_since is None and not self._refusing and is_over:
            self.held_since = self._connection.elapsed()
        elif not self._pressed and not is_over:
            self.held_since, self._refusing = None, False
        return self.held_since is not None

    def check_time(self, now: float) -> None:
        """A peer that was held for long enough is read from again, and refused."""
        if self.held_since is not None and now - self.held_since > self._connection.limits.keepalive_seconds / 3:
            self.held_since, self._refusing = None, True
            self._connection.throttle()

    def received(self, partial_bytes: int) -> None:
        """`partial_bytes` of a frame are here that has begun."""
        if partial_bytes != self._partial_bytes:
            self.count_partial(partial_bytes)
            if partial_bytes > PARSE_ON_LOOP_BYTES:  # only a batch is so long
                self.hold()

    def hold(self) -> None:
        """All peers together may have produced too much: then this one waits, as it would add to it."""
        if not (self._pressed or self._refusing or self._connection.session.end is not None) and self._pressure.holds:
            self._pressed = True
            self.held_since = self.held_since or self._connection.elapsed()
            self._pressure.call_when_relieved(self._relieved)
            self._connection.throttle()
            if self._pressure.held == 1:  # the first: those that produce now would each add a batch before they wait
                for other in self._peers:
                    if other.intake.unwritten_bytes:
                        other.intake.hold()

    def _relieved(self) -> None:
        self._pressed = False
        self._connection.throttle()

    def count_partial(self, partial_bytes: int) -> None:
        self._pressure.partial_bytes += partial_bytes - self._partial_bytes
        self._partial_bytes = partial_bytes

    # --- batches ------------------------------------------------------------------------------------

    def produce(self, request_id: int, handle: int, body: memoryview) -> None:
        """Batches of a connection are appended in the order in which they came, small and large."""
        producing = self._handles.producer(handle)
        if producing is None:
            self._connection.answer_error(request_id, ProducerUnknown(handle))
            return
        if self._refusing and (busy := self._why_busy()) is not None:
            self._refuse(request_id, producing, body, busy)
            return
        self.unwritten_bytes += len(body)
        self._connection.throttle()
        is_small = self._parsing is None and len(body) <= PARSE_ON_LOOP_BYTES
        if not is_small or not self._append(request_id, producing, body, None):
            self._to_parse.append((request_id, producing, body))
            self._parsing_bytes += len(body)
            self._pressure.add(len(body))
            if self._parsing is None:
                self._parsing = self._connection.spawn(self._parse_large())
        self.hold()

    def _why_busy(self) -> LogBusy | None:
        if self._pressure.is_over:
            return LogBusy(self._pressure.queued_bytes, self._pressure.limit_bytes)
        if self.unwritten_bytes > self._connection.limits.unwritten_bytes:
            return LogBusy(self.unwritten_bytes, self._connection.limits.unwritten_bytes)
        return None

    def _refuse(self, request_id: int, producing: ProducerHandle, body: memoryview, error: DanubeError) -> None:
        """Without a look at the batch: it is answered in its turn, also behind what is still being parsed."""
        try:
            header = parse_header(body)
            producing.check_space()
        except (InvalidBatch, ProtocolViolation) as violation:
            self._connection.fail(violation, request_id)
            return
        self._pressure.refused += 1
        sequence, rows = header.first_sequence, header.rows
        refused = PendingBatch(request_id, sequence, rows, 0, failed(error), perf_counter())
        if self._parsing is None:
            self._await_outcome(producing, refused)
        else:
            self._to_parse.append((request_id, producing, refused))

    async def _parse_large(self) -> None:
        try:
            while self._to_parse and self._connection.session.end is None:
                request_id, producing, body = self._to_parse.popleft()
                if isinstance(body, PendingBatch):
                    self._await_outcome(producing, body)
                    continue
                batch: Batch | None = None
                refusal: DanubeError | None = None
                if len(body) > PARSE_ON_LOOP_BYTES:
                    try:
                        batch = await self._connection.broker.run(lambda body=body: parse(body))  # type: ignore[misc]
                    except InvalidBatch as error:
                        self._connection.fail(error, request_id)
                        return
                if not self._append(request_id, producing, body, batch):
                    batch = batch or parse(body)  # as it has done, and found good
                    try:
                        await producing.topic.enforcer.admit_batch(batch)
                    except DanubeError as error:
                        refusal = error
                    if self._connection.session.end is None:
                        self._append(request_id, producing, body, batch, is_admitted=True, refusal=refusal)
                self._parsing_bytes -= len(body)
                self._pressure.remove(len(body))
        finally:
            self._parsing = None

    def _append(
        self,
        request_id: int,
        producing: ProducerHandle,
        body: memoryview,
        batch: Batch | None,
        *,
        is_admitted: bool = False,
        refusal: DanubeError | None = None,
    ) -> bool:
        """False: the topic must first look whether it takes the batch, by its schema; nothing was done.

        `is_admitted`: it has, and refuses it with `refusal`, or takes it.
        """
        outcome: asyncio.Future[Any]
        try:
            batch = batch or parse(body)
            header = batch.header
            producing.check_space()
            producing.check(batch)
            topic = producing.topic
            if refusal is not None:
                raise refusal
            if not is_admitted and not topic.enforcer.lets_batch(batch):
                return False
            if topic.reliable:
                outcome = topic.submit_batch(batch, producing.on_decided)
            else:
                outcome = _fan_out(topic, producing.name, batch)
        except (InvalidBatch, ProtocolViolation) as error:
            self._connection.fail(error, request_id)  # its bytes are not what it says: nothing here can be believed
            return True
        except DanubeError as error:
            outcome = failed(error)
        pending = PendingBatch(request_id, header.first_sequence, header.rows, len(body), outcome, perf_counter())
        self._await_outcome(producing, pending)
        return True

    def _await_outcome(self, producing: ProducerHandle, pending: PendingBatch) -> None:
        producing.in_flight.append(pending)
        if pending.outcome.done():
            self.answer_decided(producing)
        else:
            pending.outcome.add_done_callback(lambda _: producing.on_decided())

    def answer_decided(self, producing: ProducerHandle) -> None:
        """Receipts and refusals, in the order of the batches."""
        while (decided := producing.decided()) is not None:
            self.unwritten_bytes -= decided.size_bytes
            outcome = decided.outcome
            error = ProducerUnknown(producing.handle) if outcome.cancelled() else outcome.exception()
            if error is None:
                receipt = producing.receipt(outcome.result(), decided.rows)
                self._connection.answer(pb.Command(request_id=decided.request_id, receipt=receipt))
                producing.topic.metrics.send_latency.observe(perf_counter() - decided.came_at)
                producing.count(decided.rows)
                continue
            code = status(error, SEND).code if isinstance(error, DanubeError) else Code.UNKNOWN
            producing.topic.metrics.send_errors[camel(code)] += 1
            goes_on = producing.refused(decided.first_sequence, error)
            self._connection.answer_error(decided.request_id, error)
            if not goes_on:
                self._connection.close(error)
        self._connection.throttle()


def _fan_out(topic: VolatileTopic, producer_name: str, batch: Batch) -> asyncio.Future[None]:
    """A batch to a non-reliable topic, message by message, to the consumers that are connected."""
    topic.publish_batch(
        [
            message if message.producer_name is not None else message._replace(producer_name=producer_name)
            for message in messages(batch)
        ]
    )
    handed_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    handed_on.set_result(None)
    return handed_on
