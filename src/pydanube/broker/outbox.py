"""What is on its way to one consumer's stream, and the consumer's registration.

The dispatch machine bounds what an outbox can hold: a window, or the consumer's permits. So putting never waits, and
one slow consumer delays no other. A window counts messages, so what gRPC streams have not sent is bounded in bytes
too: each outbox by CONSUMER_BYTES_MAX and all together by the `Budget`. An empty one takes a message in any case.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

from pydanube.core.names import ConsumerId
from pydanube.errors import DanubeError
from pydanube.formats.batch import Batch, Envelope

CONSUMER_BYTES_MAX: Final = 16 * 1024 * 1024
CHUNK_BYTES: Final = 1024 * 1024  # that a stream takes at a time
MESSAGE_OVERHEAD_BYTES: Final = 512


class DeliveredMessage(NamedTuple):
    """One message as a consumer gets it. `attempt` is 1 the first time."""

    offset: int
    message: Envelope
    attempt: int


class DeliveredBatch(NamedTuple):
    """A stored batch, untouched, and which of its offsets are meant for the consumer."""

    batch: Batch
    ranges: tuple[tuple[int, int], ...]
    attempt: int
    seeks: int = 0  # how often the subscription was moved before


class RecalledRanges(NamedTuple):
    """Between batches: the consumer should give back what its application has not seen of these offsets."""

    ranges: tuple[tuple[int, int], ...]
    seeks: int
    taken: int = 0  # how often its whole queue was taken from it


Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """One stream's queue. It ends once: taken over (`ended` None) or because the topic is not served any more."""

    __slots__ = ("_is_over", "_queue", "_waiter", "ended")

    def __init__(self) -> None:
        self._queue: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self.ended: DanubeError | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def is_over(self) -> bool:
        return self._is_over

    def put(self, items: Iterable[Item]) -> None:
        if not self._is_over:
            self._queue.extend(items)
            self._wake()

    def clear(self) -> list[Item]:
        """Drops what no stream has taken yet, and returns it."""
        dropped = list(self._queue)
        self._queue.clear()
        return dropped

    def end(self, error: DanubeError | None = None) -> None:
        """Nothing more comes. What is queued is dropped: the caller has it sent again."""
        if not self._is_over:
            self._is_over = True
            self.ended = error
            self._queue.clear()
            self._wake()

    async def get(self) -> list[Item]:
        """Everything that is queued; waits for something. Empty: it has ended."""
        await self._something()
        items = list(self._queue)
        self._queue.clear()
        return items

    async def _something(self) -> None:
        while not self._queue and not self._is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Budget:
    """Bytes in the outboxes of all gRPC streams."""

    __slots__ = ("limit_bytes", "size_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0


def cost_bytes(message: Envelope) -> int:
    return len(message.payload) + MESSAGE_OVERHEAD_BYTES


class MessageOutbox(Outbox[DeliveredMessage]):
    """Of a gRPC stream, which goes by the subscription's window. What it has taken counts until it asks for more."""

    __slots__ = ("_budget", "_size_bytes", "_taken_bytes", "_when_free")

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget
        self._size_bytes = self._taken_bytes = 0
        self._when_free: Callable[[], None] | None = None

    @property
    def free_bytes(self) -> int:
        """How much may be put now; more than 0 if nothing is here."""
        free = min(CONSUMER_BYTES_MAX - self._size_bytes, self._budget.limit_bytes - self._budget.size_bytes)
        return max(free, 0 if self._size_bytes else 1)

    def call_when_free(self, call: Callable[[], None]) -> None:
        """Once, when the consumer has taken so much that more may be put."""
        self._when_free = call

    def put(self, items: Iterable[DeliveredMessage]) -> None:
        if not self._is_over:
            added = list(items)
            self._count(sum(cost_bytes(each.message) for each in added))
            super().put(added)

    def clear(self) -> list[DeliveredMessage]:
        dropped = super().clear()
        self._count(-sum(cost_bytes(each.message) for each in dropped))
        return dropped

    def end(self, error: DanubeError | None = None) -> None:
        self._count(-self._size_bytes)
        self._taken_bytes = 0
        self._when_free = None
        super().end(error)

    async def get(self) -> list[DeliveredMessage]:
        """About CHUNK_BYTES of what is queued, at least one; waits for something. Empty: it has ended."""
        self._count(-self._taken_bytes)
        self._taken_bytes = 0
        if self._when_free is not None and (not self._size_bytes or self.free_bytes >= CONSUMER_BYTES_MAX // 2):
            when_free, self._when_free = self._when_free, None
            when_free()
        await self._something()
        items: list[DeliveredMessage] = []
        while self._queue and self._taken_bytes < CHUNK_BYTES:
            items.append(self._queue.popleft())
            self._taken_bytes += cost_bytes(items[-1].message)
        return items

    def _count(self, more_bytes: int) -> None:
        self._size_bytes += more_bytes
        self._budget.size_bytes += more_bytes


BatchOutbox: TypeAlias = Outbox[DeliveredBatch | RecalledRanges]  # of native streams, which grant permits
AnyOutbox: TypeAlias = Outbox[Any]


class Caller(NamedTuple):
    """Who is at the other end of a producer or consumer. Empty: it did not say."""

    address: str
    client: str  # name and version
    protocol: str  # native, grpc
    since_us: int


@dataclass(slots=True)
class ConsumerRegistration:
    """A consumer as the subscription knows it, connected or not.

    It counts as connected from Subscribe on: clients poll their health before they open the stream, and round robin
    must not skip one merely because its stream comes some milliseconds later.
    """

    consumer_id: ConsumerId
    name: str
    key_filters: tuple[str, ...] = ()
    outbox: AnyOutbox | None = None
    native: bool = False  # its outbox takes batches
    hands_over: bool = False  # it says what its application takes
    attached: bool = False  # a stream reads the outbox
    silent_since: float = 0.0  # when it was last heard of without a stream
    caller: Caller | None = None  # of its stream
    sent: int = 0  # messages, to all its streams

    @property
    def connected(self) -> bool:
        return self.outbox is not None
