"""The real client and the native server of a real broker, on virtual time: what takes five minutes costs a second.

    @wired
    async def test_something(wires: Wires) -> None:
        async with wires.connect() as client: ...

Between them are wires with a delay instead of sockets, which can be broken.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pydanube
from pydanube.api.native.server import NativeServer
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.testing import wires
from tests.harness.brokers import BrokerFixture, simulated

URL = "danube://broker:6651"


class Wires(wires.Wires):
    """A broker, and what connects clients with it."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(Random(1))
        self.broker = broker
        self.server = NativeServer(broker)
        self.listen("broker", 6651, self.server.accept)

    def connect(self, **more: Any) -> pydanube.Client:
        return pydanube.Client(URL, connector=self.connector(), **more)

    def cut(self) -> None:
        """All connections break."""
        self.break_all()

    def subscription(self, topic: str, name: str) -> Subscription:
        found = self.broker.topics.get(TopicName(topic))
        assert isinstance(found, Topic)
        return found.require(SubscriptionName(name))


def wired(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test with a broker and wires on the simulator's loop."""

    @functools.wraps(test)
    async def with_wires(*arguments: Any, **named: Any) -> None:
        host = BrokerFixture()
        await test(*arguments, wires=Wires(await host.boot()), **named)

    decorated = simulated(with_wires)
    signature = inspect.signature(test)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "wires"]
    decorated.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return decorated
