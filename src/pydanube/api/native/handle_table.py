"""The producers and consumers that one native peer has opened, by the number that it calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pydanube.api.native.handles import ConsumerHandle, ProducerHandle
from pydanube.broker.any_topic import AnyTopic
from pydanube.errors import LimitReached, NotServed, ProtocolViolation
from pydanube.wire._pb.pydanube import stream_pb2 as pb

if TYPE_CHECKING:
    from pydanube.api.native.connection import NativeConnection


class HandleTable:
    """Handles end when the peer closes them, when their topic is not served here any more, and with the connection."""

    def __init__(self, connection: NativeConnection) -> None:
        self._connection = connection
        self.producers: dict[int, ProducerHandle] = {}
        self.consumers: dict[int, ConsumerHandle] = {}
        self._watched: dict[AnyTopic, Callable[[NotServed], None]] = {}  # topics that handles are of
        self._newest = 0

    def new_handle(self) -> int:
        limit = self._connection.limits.handles
        if len(self.producers) + len(self.consumers) >= limit:
            raise LimitReached("producers and consumers of a connection", limit)
        self._newest += 1
        return self._newest

    def producer(self, handle: int) -> ProducerHandle | None:
        """None for one that has ended: its topic closed a moment ago, and a message to the peer is under way."""
        self._check_handle("producer", handle)
        return self.producers.get(handle)

    def consumer(self, handle: int) -> ConsumerHandle | None:
        """None for one that has ended: what the peer says of it came too late."""
        self._check_handle("consumer", handle)
        return self.consumers.get(handle)

    def _check_handle(self, what: str, handle: int) -> None:
        if not 0 < handle <= self._newest:
            raise ProtocolViolation(f"{what} {handle} was never opened on this connection")

    def forget(self, consuming: ConsumerHandle) -> None:
        self.consumers.pop(consuming.handle, None)
        self.unwatch(consuming.topic)

    def touch(self) -> None:
        """The peer lives, so its producers do."""
        for producing in self.producers.values():
            producing.topic.touch_producer(producing.producer_id)

    def end(self) -> None:
        """The connection is gone: what its consumers held goes to others."""
        for consuming in self.consumers.values():
            consuming.subscription.detach(consuming.consumer_id, consuming.outbox)
        for producing in self.producers.values():
            producing.leave()
        self.consumers.clear()
        self.producers.clear()
        for topic, watcher in self._watched.items():
            topic.closed.forget(watcher)
        self._watched.clear()

    # --- topics that close --------------------------------------------------------------------------

    def watch(self, topic: AnyTopic) -> None:
        if topic not in self._watched:
            self._watched[topic] = partial(self._closed, topic)
            topic.closed.watch(self._watched[topic])

    def unwatch(self, topic: AnyTopic) -> None:
        """Watches the topic no longer, unless another handle of the peer is of it."""
        handles: list[ProducerHandle | ConsumerHandle] = [*self.producers.values(), *self.consumers.values()]
        if topic in self._watched and not any(each.topic is topic for each in handles):
            topic.closed.forget(self._watched.pop(topic))

    def _closed(self, topic: AnyTopic, why: NotServed) -> None:
        """The topic is not served here any more: all its handles end, and one message tells the peer."""
        del self._watched[topic]
        for producing in [each for each in self.producers.values() if each.topic is topic]:
            del self.producers[producing.handle]
        for consuming in [each for each in self.consumers.values() if each.topic is topic]:
            del self.consumers[consuming.handle]
        moved = pb.Command(moved=pb.Moved(topic=topic.name, stream_url=why.moved_to))
        # Soon: receipts of what the topic stored last are on their way to be written.
        asyncio.get_running_loop().call_soon(self._connection.send, moved)
