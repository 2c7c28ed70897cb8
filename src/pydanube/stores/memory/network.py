"""Connections between endpoints of one process.

    client end ──write──► pipe ──read──► server end
    client end ◄──read─── pipe ◄──write── server end

Bytes arrive at once and in order; delays and partitions are the business of a wrapper.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context, copy_context

from pydanube.errors import Unreachable
from pydanube.ports import Buffer, Connection
from pydanube.stores.serving import serve_and_close, split_address

# Ports that nobody chose, as on a real host.
PORT_CHOSEN_FIRST = 49152


class _Pipe:
    """Bytes in one direction. Writing queues, then waits until at most `queued_bytes_max` are queued."""

    def __init__(self, queued_bytes_max: int) -> None:
        self.queued = bytearray()
        self.queued_bytes_max = queued_bytes_max
        self.ended = False  # by the writing end; what is queued is still to be read
        self._changed: dict[asyncio.Future[None], None] = {}  # an ordered set

    async def change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed[changed] = None
        try:
            await changed
        finally:
            self._changed.pop(changed, None)

    def wake(self) -> None:
        for changed in self._changed:
            if not changed.done():
                changed.set_result(None)
        self._changed.clear()


class MemoryConnection:
    """One end of a connection. `_broken` says why this end works no more; the other end may not know yet."""

    def __init__(self, peer: str, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._peer = peer
        self._incoming = incoming
        self._outgoing = outgoing
        self._broken: str | None = None
        self._other: MemoryConnection | None = None

    @property
    def peer(self) -> str:
        return self._peer

    async def read(self, length_max: int) -> bytes:
        assert length_max > 0
        pipe = self._incoming
        while not pipe.queued:
            self._check()
            if pipe.ended:
                return b""
            await pipe.change()
        self._check()
        data = bytes(pipe.queued[:length_max])
        del pipe.queued[:length_max]
        pipe.wake()
        return data

    async def write(self, buffers: Sequence[Buffer]) -> None:
        self._check_reader()
        pipe = self._outgoing
        for buffer in buffers:
            pipe.queued += buffer
        pipe.wake()
        while len(pipe.queued) > pipe.queued_bytes_max:
            await pipe.change()
            self._check_reader()

    async def close(self) -> None:
        if self._broken is None:
            self._outgoing.ended = True
            self._incoming.queued.clear()  # nobody will read it
            self._break("the connection was closed here")

    def abort(self, why: str) -> None:
        """Breaks both ends at once, and what is queued is lost: a crashed peer, or a cut cable."""
        for end in (self, self._other):
            if end is not None:
                end._incoming.queued.clear()
                end._break(why)

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        self._incoming.wake()
        self._outgoing.wake()

    def _check_reader(self) -> None:
        """A peer that closed has closed both directions: nobody reads what is written now."""
        if self._incoming.ended:
            self._break("the peer has closed the connection")
        self._check()

    def _check(self) -> None:
        if self._broken is not None:
            raise Unreachable(self._peer, self._broken)


class MemoryListener:
    def __init__(self, network: MemoryNetwork, address: str, serve: Callable[[Connection], Awaitable[None]]) -> None:
        self._network = network
        self._address = address
        self._serve = serve
        # Serving tasks belong to whoever listens, not to whoever connects: a simulator tags tasks by context.
        self._context: Context = copy_context()
        self._tasks: dict[asyncio.Task[None], None] = {}  # the loop itself holds tasks only weakly

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        self._network._forget(self)

    def _take(self, connection: MemoryConnection) -> None:
        task = asyncio.get_running_loop().create_task(
            serve_and_close(self._serve, connection), context=self._context.copy()
        )
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)


class MemoryNetwork:
    """All endpoints that can reach each other. `queued_bytes_max` bounds each direction of a connection."""

    def __init__(self, *, queued_bytes_max: int = 64 * 1024) -> None:
        self._queued_bytes_max = queued_bytes_max
        self._listeners: dict[str, MemoryListener] = {}
        self._port_next = PORT_CHOSEN_FIRST

    async def connect(self, address: str) -> MemoryConnection:
        split_address(address)
        listener = self._listeners.get(address)
        if listener is None:
            raise Unreachable(address, "nobody listens there")
        there = _Pipe(self._queued_bytes_max)
        back = _Pipe(self._queued_bytes_max)
        client = MemoryConnection(address, incoming=back, outgoing=there)
        server = MemoryConnection(self._choose_address("memory"), incoming=there, outgoing=back)
        client._other, server._other = server, client
        listener._take(server)
        return client

    async def listen(self, address: str, serve: Callable[[Connection], Awaitable[None]]) -> MemoryListener:
        host, port = split_address(address)
        if port == 0:
            address = self._choose_address(host)
        if address in self._listeners:
            raise Unreachable(address, "somebody listens there already")
        listener = MemoryListener(self, address, serve)
        self._listeners[address] = listener
        return listener

    def _choose_address(self, host: str) -> str:
        """An address that was never given before. Ports of a long run pass 65535; nothing depends on it."""
        while True:
            address = f"[{host}]:{self._port_next}" if ":" in host else f"{host}:{self._port_next}"
            self._port_next += 1
            if address not in self._listeners:
                return address

    def _forget(self, listener: MemoryListener) -> None:
        if self._listeners.get(listener.address) is listener:
            del self._listeners[listener.address]
