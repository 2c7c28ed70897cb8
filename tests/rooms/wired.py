"""The real client and the native door of a real broker, on virtual time: what takes five minutes costs a second.

    @wired
    async def test_something(wires: Wires) -> None:
        async with wires.connect() as client: ...

Between them are wires with a delay instead of sockets, which can be cut.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pydanube
from pydanube.api.stream import Connection, StreamDoor
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.core.names import SubscriptionName, TopicName
from tests.rooms.brokers import Host, simulated

URL = "danube://broker:6651"
DELAY_SECONDS = 0.0005


class End(asyncio.Transport):
    """One end of a wire."""

    def __init__(self, delay_seconds: float) -> None:
        super().__init__()
        self.protocol: asyncio.Protocol
        self.other: End
        self._delay = delay_seconds
        self._came = bytearray()
        self._is_reading = True
        self._is_over = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("peer", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: Any) -> None:
        if not self._is_over:
            asyncio.get_running_loop().call_later(self._delay, self.other._arrive, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _arrive(self, data: bytes) -> None:
        self._came += data
        self._push()

    def _push(self) -> None:
        if self._is_reading and not self._is_over and self._came:
            data, self._came = bytes(self._came), bytearray()
            self.protocol.data_received(data)

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        asyncio.get_running_loop().call_soon(self._push)

    def is_closing(self) -> bool:
        return self._is_over

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._end)
        loop.call_later(self._delay, self.other._end)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.protocol.connection_lost(None)


class Wires:
    """A broker, and what connects clients with it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.door = StreamDoor(broker)
        self.ends: list[End] = []

    async def dial(self, make: Callable[[], Any], *_: Any, **__: Any) -> tuple[End, Any]:
        """Instead of the loop's `create_connection`."""
        ours, theirs = End(DELAY_SECONDS), End(DELAY_SECONDS)
        ours.other, theirs.other = theirs, ours
        ours.protocol, theirs.protocol = make(), Connection(self.door)
        self.ends.append(ours)
        theirs.protocol.connection_made(theirs)
        ours.protocol.connection_made(ours)
        return ours, ours.protocol

    def connect(self, **more: Any) -> pydanube.Client:
        return pydanube.connect(URL, **more)

    def cut(self) -> None:
        """All connections break."""
        for end in self.ends:
            end.abort()
        self.ends.clear()

    def subscription(self, topic: str, name: str) -> Subscription:
        found = self.broker.topics.get(TopicName(topic))
        assert isinstance(found, Topic)
        return found.require(SubscriptionName(name))


def wired(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test with a broker and wires on the simulator's loop."""

    @functools.wraps(test)
    async def with_wires(*arguments: Any, **named: Any) -> None:
        host = Host()
        wires = Wires(await host.boot())
        asyncio.get_running_loop().create_connection = wires.dial  # type: ignore[method-assign,assignment]
        await test(*arguments, wires=wires, **named)

    decorated = simulated(with_wires)
    signature = inspect.signature(test)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "wires"]
    decorated.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return decorated
