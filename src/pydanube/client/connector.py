"""What a client takes from the machine that it runs on: connections, the date, random numbers, a thread for long work.

Everything else happens on its event loop, by the loop's time. So a client with another connector, on a virtual loop,
runs without a socket and from a seed (`pydanube.testing.wires`).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from random import Random, SystemRandom
from time import time_ns
from typing import Final, Protocol, TypeVar

P = TypeVar("P", bound=asyncio.Protocol)
T = TypeVar("T")


class Connector(Protocol):
    @property
    def rng(self) -> Random:
        """For the order of attempts, pauses between them, and unique names."""
        ...

    @property
    def time_ns(self) -> Callable[[], int]:
        """Nanoseconds since 1970: the publish time of messages. Called for each of them."""
        ...

    async def connect(self, make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None) -> P:
        """The protocol that `make` made, with a transport. Raises OSError and ssl.SSLError."""
        ...

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Calls `function` away from the event loop."""
        ...


class SystemConnector:
    """Sockets of the running loop, the machine's clock, its default threads."""

    rng: Final = SystemRandom()  # nothing to seed, and nothing that a fork would repeat
    time_ns: Final = staticmethod(time_ns)

    async def connect(self, make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None) -> P:
        _, protocol = await asyncio.get_running_loop().create_connection(make, host, port, ssl=tls)
        return protocol

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(None, function)


SYSTEM: Final = SystemConnector()
