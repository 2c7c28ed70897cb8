"""The native server: listens, over TCP or TLS, and sweeps out connections that broke a limit of time.

transport ─► Session ─► NativeConnection ─┬─► requests (requests.py), a task each
                                          ├─► produce: Intake parses, appends, answers when it is on disk
                                          └─► flow, ack, nack: synchronously
outbox ─► pump.py, one task per consumer ─► Session ─► transport, as long as the peer takes it
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

from pydanube.api.native.connection import NativeConnection
from pydanube.api.operations import TopicOperations
from pydanube.broker.service import Broker
from pydanube.config import open_files
from pydanube.config.stream import StreamLimits

SWEEP_SECONDS: Final = 2.0
SHUTDOWN_SECONDS: Final = 2.0  # for a TLS peer's goodbye


class NativeServer:
    """Listens, and sweeps out connections that broke a limit of time."""

    def __init__(self, broker: Broker, limits: StreamLimits | None = None) -> None:
        self.broker = broker
        self.operations = TopicOperations(broker)
        self.limits = limits or broker.config.stream.limits
        self.open_files = open_files.current()
        self.connections: dict[NativeConnection, None] = {}  # by age
        self.closing = False
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def change_limits(self, limits: StreamLimits) -> None:
        """Connections that are accepted from now on are told these, and held to them."""
        self.limits = limits

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Returns the port that was bound. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self.accept,
            host,
            port,
            backlog=1024,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.limits.handshake_seconds,
            ssl_shutdown_timeout=None if tls is None else SHUTDOWN_SECONDS,
        )
        self.start()
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def start(self) -> None:
        """As `open`, for connections that come from elsewhere than a socket: they are given to `accept`."""
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep streams")

    def accept(self) -> NativeConnection:
        """The protocol of a new connection."""
        return NativeConnection(self)

    async def close(self, grace_seconds: float) -> None:
        """Takes no more connections, says goodbye to those there are, and lets them end."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.send_goodbye("the broker is shutting down")
        deadline = self.broker.clock.elapsed() + grace_seconds
        while self.connections and self.broker.clock.elapsed() < deadline:
            await self.broker.clock.sleep(0.02)
        for connection in list(self.connections):
            connection.abort("the broker has shut down")
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await self.broker.clock.sleep(SWEEP_SECONDS)
            now = self.broker.clock.elapsed()
            for connection in list(self.connections):
                connection.check_time(now)
