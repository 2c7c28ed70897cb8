"""What is on its way to one consumer's stream, and the consumer's registration.

The dispatch machine bounds what an outbox can hold: a window, or the consumer's permits. So putting never waits, and
one slow consumer delays nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from pydanube.core.names import ConsumerId
from pydanube.errors import DanubeError
from pydanube.log.batch import Batch, Envelope


class Delivered(NamedTuple):
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
        """Nothing more comes. What is queued is dropped: whoever ended it has it sent again."""
        if not self._is_over:
            self._is_over = True
            self.ended = error
            self._queue.clear()
            self._wake()

    async def get(self) -> list[Item]:
        """Everything that is queued; waits for something. Empty: it has ended."""
        while not self._queue and not self._is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = list(self._queue)
        self._queue.clear()
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


MessageOutbox: TypeAlias = Outbox[Delivered]  # of gRPC streams, which go by the subscription's window
BatchOutbox: TypeAlias = Outbox[DeliveredBatch]  # of native streams, which grant permits
AnyOutbox: TypeAlias = Outbox[Any]


@dataclass(slots=True)
class Registration:
    """A consumer as the subscription knows it, connected or not.

    It counts as connected from Subscribe on: clients poll their health before they open the stream, and round robin
    must not skip one merely because its stream comes some milliseconds later.
    """

    consumer_id: ConsumerId
    name: str
    key_filters: tuple[str, ...] = ()
    outbox: AnyOutbox | None = None
    native: bool = False  # its outbox takes batches
    attached: bool = False  # a stream reads the outbox
    silent_since: float = 0.0  # when it was last heard of without a stream

    @property
    def connected(self) -> bool:
        return self.outbox is not None
