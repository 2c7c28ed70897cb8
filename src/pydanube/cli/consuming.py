"""What `danube consume` does with messages, whichever protocol they come by: until it has had enough.

`native.py` and `over_grpc.py` are the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from pydanube.cli.catching_up import CatchingUp, PartitionProgress
from pydanube.cli.exits import NotThere, UsageError
from pydanube.core.names import TopicName

if TYPE_CHECKING:
    from pydanube.client.messages import Place, SubscriptionType

M = TypeVar("M")


class Received(NamedTuple):
    """A message as it is shown, whichever way it came."""

    topic: str
    offset: int
    payload: bytes
    producer_name: str
    publish_time_ms: int
    routing_key: str | None
    attributes: Mapping[str, str]
    is_reliable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumeOptions:
    topic: TopicName
    consumer: str
    subscription: str
    sub_type: SubscriptionType = "shared"
    key_filters: tuple[str, ...] = ()
    start: Place = "latest"  # of a new subscription
    count: int = 0  # 0: without end
    timeout_seconds: float | None = None  # of silence
    once: bool = False  # until there is nothing more
    ack: bool = True


class MessageSource(Protocol[M]):
    """A consumer of either protocol."""

    async def receive(self, seconds: float) -> M | None:
        """The next message; None if there is none within so many seconds."""

    def shown(self, message: M) -> Received: ...

    async def ack(self, message: M) -> None: ...

    async def progress(self) -> Mapping[str, PartitionProgress]:
        """Of every partition. Raises UsageError if the brokers do not tell."""


async def consume_from(
    source: MessageSource[M], options: ConsumeOptions, show: Callable[[Received], None], note: Callable[[str], None]
) -> bool:
    """Returns whether everything asked for came: False if silence ended it before `count`.

    A message is shown before it is acknowledged: what was printed may come again, what was not is never lost.
    """
    catch_up = CatchingUp(options, note, source.progress)
    await catch_up.begin()
    received = 0
    while not options.count or received < options.count:
        message = await catch_up.next(source.receive)
        if message is None:
            return catch_up.is_over if options.once else not options.count
        shown = source.shown(message)
        show(shown)
        received += 1
        catch_up.shown(shown.topic, shown.offset)
        if options.ack:
            await source.ack(message)
    return True


def nothing_kept(topic: TopicName) -> UsageError:
    return UsageError(f"--once is for reliable topics: {topic} keeps no messages to catch up with")


def no_topic(topic: TopicName) -> NotThere:
    return NotThere(
        f"there is no topic {topic}: consumers create none; `danube produce` does, or `danube admin topics create`"
    )
