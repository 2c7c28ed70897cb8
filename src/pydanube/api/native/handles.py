"""The producers and consumers that a native peer has opened, as its connection knows them.

A producer's answers go out in the order of its batches, whichever is decided first. A consumer's permits are passed
on to its subscription bit by bit, as what it was sent before gets on the wire: so a peer that grants a terabyte and
reads nothing costs the broker `unsent_bytes`, and not a terabyte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.outbox import AnyOutbox, Caller, DeliveredBatch, DeliveredMessage
from pydanube.broker.subscription import Subscription
from pydanube.broker.volatile_topic import VolatileSubscription
from pydanube.core.dispatch.consumer_window import Permits
from pydanube.core.dispatch.events import Ranges
from pydanube.core.names import ConsumerId, ProducerId
from pydanube.errors import DanubeError, InvalidBatch, MessageTooLarge, OutOfSequence, ProtocolViolation
from pydanube.formats.batch import HEADER_SIZE, Batch, cut, encode, payload_size_max, rows_of
from pydanube.log.wal import CommitReceipt
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

Pairs: TypeAlias = tuple[tuple[int, int], ...]

DURABILITIES: Final = {"fsync": pb.FSYNC, "os": pb.OS}
# In addition to the batch: lengths, and a command with as many ranges as there may be.
DELIVER_OVERHEAD_BYTES: Final = 32 * 1024
CUT_BYTES: Final = 8 * 1024  # to cut a batch costs as much as to send so many bytes more


class PendingBatch(NamedTuple):
    """A batch without an answer."""

    request_id: int
    first_sequence: int
    rows: int
    size_bytes: int
    outcome: asyncio.Future[Any]  # a CommitReceipt, or None from a topic that keeps nothing
    came_at: float  # by perf_counter


class ProducerHandle:
    """A producer that the peer has opened."""

    __slots__ = (
        "_idle",
        "_registered",
        "handle",
        "hole",
        "in_flight",
        "name",
        "on_decided",
        "producer_id",
        "session",
        "topic",
    )

    def __init__(
        self,
        handle: int,
        topic: AnyTopic,
        name: str,
        producer_id: ProducerId,
        session: int,
        answer: Callable[[ProducerHandle], None],
    ) -> None:
        self.handle = handle
        self.on_decided = partial(answer, self)  # what is decided
        self.topic = topic
        self.name = name
        self.producer_id = producer_id
        self.session = session
        self.in_flight: deque[PendingBatch] = deque()
        self.hole: int | None = None  # sequence of the first batch that was refused: nothing behind it may pass
        self._idle: asyncio.Event | None = None
        self._registered = topic.producers.get(producer_id)

    def leave(self) -> None:
        """The peer has closed it, or is gone: an exclusive place is free again."""
        self.topic.producers.remove(self.producer_id, self._registered)

    def introduce(self, caller: Caller) -> None:
        if self._registered is not None:
            self._registered.caller = caller

    def count(self, rows: int) -> None:
        if self._registered is not None:
            self._registered.sent += rows

    def check_space(self) -> None:
        if len(self.in_flight) >= frames.IN_FLIGHT_MAX:
            raise ProtocolViolation(f"producer {self.handle} has more than {frames.IN_FLIGHT_MAX} batches in flight")

    def decided(self) -> PendingBatch | None:
        """The oldest batch, if its fate is known."""
        if self.in_flight and self.in_flight[0].outcome.done():
            found = self.in_flight.popleft()
            if not self.in_flight and self._idle is not None:
                self._idle.set()
            return found
        return None

    async def idle(self) -> None:
        """Returns when every batch has its answer."""
        if self.in_flight:
            self._idle = self._idle or asyncio.Event()
            self._idle.clear()
            await self._idle.wait()

    def refused(self, first_sequence: int, error: BaseException) -> bool:
        """Nothing behind a refused batch may pass. False: the peer skipped sequences, and must be disconnected."""
        jumped = isinstance(error, OutOfSequence) and self.hole is None
        if self.session and (self.hole is None or first_sequence < self.hole):
            self.hole = first_sequence
        return not jumped

    def check(self, batch: Batch) -> None:
        """The batch is this producer's, of this session, and no message in it is too large."""
        header = batch.header
        mine = (self.producer_id, self.session) if self.session else (0, 0)
        if (header.producer_id, header.session) != mine:
            raise InvalidBatch(f"it is of producer {header.producer_id}, session {header.session}; opened were {mine}")
        if self.hole is not None:
            if header.first_sequence > self.hole:
                raise OutOfSequence(self.producer_id, header.first_sequence, self.hole)
            self.hole = None
        policy = self.topic.policy
        if not policy.allows_message(header.uncompressed_length):  # then look closer
            largest = payload_size_max(batch)
            if not policy.allows_message(largest):
                raise MessageTooLarge(largest, policy.max_message_size)
        self.topic.touch_producer(self.producer_id)

    @staticmethod
    def receipt(receipt: CommitReceipt | None, rows: int) -> pb.Receipt:
        if receipt is None:
            return pb.Receipt(rows=rows, durability=pb.MEMORY)
        return pb.Receipt(
            offset=receipt.offset,
            rows=rows,
            epoch=receipt.epoch,
            durability=DURABILITIES[receipt.durability],
            duplicate=receipt.duplicate,
        )


class ConsumerHandle:
    """A consumer that the peer has opened."""

    __slots__ = (
        "_bytes",
        "_lent_bytes",
        "_messages",
        "_unlent_bytes",
        "_unsent_max",
        "consumer_id",
        "handle",
        "outbox",
        "subscription",
        "topic",
    )

    def __init__(
        self,
        handle: int,
        topic: AnyTopic,
        subscription: Subscription | VolatileSubscription,
        consumer_id: ConsumerId,
        outbox: AnyOutbox,
        unsent_bytes_max: int,
    ) -> None:
        self.handle = handle
        self.topic = topic
        self.subscription = subscription
        self.consumer_id = consumer_id
        self.outbox = outbox
        self._messages = self._bytes = 0  # granted and not used yet, as the peer sees it
        self._unlent_bytes = 0  # of these, what was not passed on to the subscription
        self._lent_bytes = 0  # what was passed on, and is not on the wire; below 0: a batch was larger than that
        self._unsent_max = unsent_bytes_max

    @property
    def is_reliable(self) -> bool:
        return self.subscription.reliable

    # --- permits ------------------------------------------------------------------------------------

    def grant(self, messages: int, size_bytes: int) -> None:
        self._messages = frames.granted(self._messages, messages)
        self._bytes = frames.granted(self._bytes, size_bytes)
        self._unlent_bytes += size_bytes
        self._lend(messages)

    def sent(self, item: DeliveredBatch) -> None:
        """On the wire: its bytes are the peer's now, and as many more may be lent."""
        size = item.batch.header.size_bytes
        self._messages -= min(self._messages, sum(end - first for first, end in item.ranges))
        self._bytes -= min(self._bytes, size)
        self._lent_bytes -= size
        self._lend()

    def account(self, item: DeliveredBatch, parts: list[DeliveredBatch]) -> None:
        """The subscription has taken the whole batch's length from the permits, and the peer takes what it gets."""
        spared_bytes = item.batch.header.size_bytes - sum(part.batch.header.size_bytes for part in parts)
        if spared_bytes < 0:
            self.stretched(item, parts)
        elif self.subscription.reliable:
            self.subscription.grant(self.consumer_id, Permits(0, spared_bytes))

    def stretched(self, item: DeliveredBatch, parts: list[DeliveredBatch]) -> None:
        """It goes out in parts, which are longer together: the subscription took less from the permits than the peer
        will, so the difference comes off what was not passed on to it yet.
        """
        more_bytes = sum(part.batch.header.size_bytes for part in parts) - item.batch.header.size_bytes
        self._unlent_bytes -= more_bytes
        self._lent_bytes += more_bytes

    def _lend(self, messages: int = 0) -> None:
        if not self.subscription.reliable:
            return
        more = min(self._unlent_bytes, self._unsent_max - self._lent_bytes)
        if more > 0:
            self._unlent_bytes -= more
            self._lent_bytes += more
        if messages or more > 0:
            self.subscription.grant(self.consumer_id, Permits(messages, max(0, more)))

    # --- what the peer says -------------------------------------------------------------------------

    def ack(self, ranges: Ranges, seeks: int | None) -> None:
        if self.subscription.reliable:
            self.subscription.ack_ranges(ranges, seeks, self.consumer_id)

    def nack(self, ranges: Ranges, delay_seconds: float, reason: str, seeks: int | None) -> None:
        if self.subscription.reliable:
            self.subscription.nack_ranges(ranges, delay_seconds, reason, seeks, self.consumer_id)

    def handed(self, ranges: Ranges, seeks: int, extend_seconds: float) -> None:
        if self.subscription.reliable:
            if extend_seconds:
                self.subscription.extend(self.consumer_id, ranges, seeks, extend_seconds)
            else:
                self.subscription.handed(self.consumer_id, ranges, seeks)

    def returned(self, ranges: Ranges, seeks: int, *, stop: bool, taken: int) -> None:
        if self.subscription.reliable:
            self.subscription.give_back(self.consumer_id, ranges, seeks, stop=stop, taken=taken)

    def wanted(self, item: DeliveredBatch) -> DeliveredBatch | None:
        """What has been answered while it waited here is not sent any more. Also of what was never sent: a peer
        that had it from another owner may acknowledge it.
        """
        if not self.subscription.reliable:
            return item
        still = self.subscription.still_held(self.consumer_id, item.ranges)
        spared = sum(end - first for first, end in item.ranges) - sum(end - first for first, end in still)
        if not spared:
            return item
        self.subscription.grant(self.consumer_id, Permits(spared, 0 if still else item.batch.header.size_bytes))
        return item._replace(ranges=tuple(still)) if still else None

    # --- what it gets -------------------------------------------------------------------------------

    def packed(self, items: list[DeliveredMessage]) -> list[DeliveredBatch]:
        """Messages of a non-reliable topic as one batch: those that the peer has granted permits for."""
        assert not self.subscription.reliable
        wanted = items[: self._messages] if self._bytes > 0 else []
        self.subscription.metrics.dropped.inc(len(items) - len(wanted))
        if not wanted:
            return []
        batch = encode(rows_of([item.message for item in wanted]), topic=self.topic.name)
        return [DeliveredBatch(batch, ((0, len(wanted)),), 1)]


# --- frames that a peer takes -----------------------------------------------------------------------


def fits(batch: Batch, frame_size_max: int) -> bool:
    return batch.header.size_bytes + DELIVER_OVERHEAD_BYTES <= frame_size_max


def groups_of(item: DeliveredBatch) -> tuple[list[Pairs], float]:
    """The ranges in groups, each to go with a part of the batch, and what cutting these costs, in bytes. No groups: the
    batch had better go whole.

    A key-shared consumer gets a batch in as many deliveries as there are messages of one key in it.
    """
    header = item.batch.header
    row_bytes = header.uncompressed_length / header.rows
    groups = [[item.ranges[0]]]
    for each in item.ranges[1:]:
        gap_bytes = (each[0] - groups[-1][-1][1]) * row_bytes
        # What is compressed would be decompressed for every group.
        if len(groups[-1]) == frames.RANGES_MAX or (gap_bytes > CUT_BYTES and header.codec == 0):
            groups.append([])
        groups[-1].append(each)
    cost_bytes = sum(group[-1][1] - group[0][0] for group in groups) * row_bytes + len(groups) * CUT_BYTES
    if 2 * cost_bytes > header.size_bytes and len(item.ranges) <= frames.RANGES_MAX:
        return [], 0
    return [tuple(group) for group in groups], cost_bytes


def parts_of(item: DeliveredBatch, groups: list[Pairs], frame_size_max: int) -> list[DeliveredBatch]:
    """A delivery for each group, or more where its part of the batch does not fit into a frame of the peer."""
    found: list[DeliveredBatch] = []
    for ranges in groups or [item.ranges]:
        part = item._replace(batch=cut(item.batch, ranges[0][0], ranges[-1][1]), ranges=ranges)
        found += [part] if fits(part.batch, frame_size_max) else pieces(part, frame_size_max)
    return found


def pieces(item: DeliveredBatch, frame_size_max: int) -> list[DeliveredBatch]:
    """A delivery as several whose batches each fit into a frame of the peer. Raises MessageTooLarge if one row does
    not fit. Only rows that are meant for the peer are sent.
    """
    found: list[DeliveredBatch] = []
    for first, end in item.ranges:
        for part in _halved(item.batch, first, end, frame_size_max):
            found.append(item._replace(batch=part, ranges=((part.header.base_offset, part.header.end_offset),)))
    return found


def _halved(batch: Batch, first: int, end: int, frame_size_max: int) -> list[Batch]:
    part = cut(batch, first, end)
    if fits(part, frame_size_max):
        return [part]
    if end - first == 1:
        size = part.header.uncompressed_length
        raise MessageTooLarge(size, frame_size_max - DELIVER_OVERHEAD_BYTES - HEADER_SIZE)
    middle = (first + end) // 2
    return [*_halved(batch, first, middle, frame_size_max), *_halved(batch, middle, end, frame_size_max)]


def fetched(batches: list[Batch], start: int, frame_size_max: int) -> list[Batch]:
    """As many of these batches, from `start` on, as fit into a frame of the peer; part of one if none does."""
    found: list[Batch] = []
    free_bytes = frame_size_max - DELIVER_OVERHEAD_BYTES
    for batch in batches:
        if batch.header.size_bytes <= free_bytes:
            found.append(batch)
            free_bytes -= batch.header.size_bytes
            continue
        if not found:
            first = max(start, batch.header.base_offset)
            found.append(_halved(batch, first, batch.header.end_offset, frame_size_max)[0])
        break
    return found


def failed(error: DanubeError) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.set_exception(error)
    future.exception()  # retrieved: a connection that is lost leaves it unanswered
    return future
