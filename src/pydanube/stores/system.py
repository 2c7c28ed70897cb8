"""Clock, Work and Network of the machine we run on."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from pydanube.errors import Unreachable
from pydanube.ports import Buffer, Connection
from pydanube.stores.apart import Apart
from pydanube.stores.serving import serve_and_close, split_address
from pydanube.stores.threads import Threads

T = TypeVar("T")

# Counts the time the machine was suspended. Where there is no such clock, the monotonic one has to do.
_ELAPSED_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

# How long `close` waits for a peer to take what is queued before it gives up on it.
CLOSE_SECONDS_MAX = 5.0

PROCESSES_MAX = 2  # most of their time they wait for the store


class SystemClock:
    def time_us(self) -> int:
        return time.time_ns() // 1000

    def elapsed(self) -> float:
        return time.clock_gettime(_ELAPSED_CLOCK)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SystemWork:
    """Threads: the heavy functions (checksums, compression, Arrow) let go of the interpreter lock.

    A cancelled `run` ends when its function has ended.
    """

    def __init__(self, threads_max: int = min(32, (os.cpu_count() or 1) + 4)) -> None:
        self._threads = Threads("work", threads_max)
        self._apart = Apart(PROCESSES_MAX)

    async def run(self, function: Callable[[], T]) -> T:
        return await self._threads.call(function)

    async def run_apart(self, function: Callable[[], T]) -> T:
        return await self._apart.call(function)

    async def await_apart(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._apart.call_once(function)

    def random_u64(self) -> int:
        return 1 + secrets.randbelow(2**63 - 1)

    def close(self) -> None:
        """Ends the threads and processes after what they are doing."""
        self._threads.close()
        self._apart.close()


class TcpConnection:
    """asyncio streams, with our errors, and broken for good once broken."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, queued_bytes_max: int) -> None:
        self._reader = reader
        self._writer = writer
        self._broken: str | None = None
        self._peer = _print_address(writer.get_extra_info("peername"))
        writer.transport.set_write_buffer_limits(high=queued_bytes_max)

    @property
    def peer(self) -> str:
        return self._peer

    async def read(self, length_max: int) -> bytes:
        assert length_max > 0
        self._check()
        try:
            data = await self._reader.read(length_max)
        except OSError as error:
            self._break(error)
        self._check()  # closed here while we waited, which the stream reports as if the peer had closed
        return data

    async def write(self, buffers: Sequence[Buffer]) -> None:
        self._check()
        try:
            self._writer.writelines(buffers)
            await self._writer.drain()
        except OSError as error:
            self._break(error)
        self._check()

    async def close(self) -> None:
        if self._broken is None:
            self._broken = "the connection was closed here"
            self._writer.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    def _break(self, error: OSError) -> None:
        if self._broken is None:
            self._broken = error.strerror or str(error) or type(error).__name__
            self._writer.transport.abort()

    def _check(self) -> None:
        if self._broken is not None:
            raise Unreachable(self._peer, self._broken)


class TcpListener:
    def __init__(self, serve: Callable[[Connection], Awaitable[None]], queued_bytes_max: int) -> None:
        self._serve = serve
        self._queued_bytes_max = queued_bytes_max
        self._server: asyncio.Server | None = None
        self._address = ""
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        # Not wait_closed: since Python 3.12 it waits for the connections, and those go on.
        if self._server is not None:
            self._server.close()

    async def _bind(self, address: str) -> None:
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(self._take, host, port)
        except OSError as error:
            raise Unreachable(address, error.strerror or str(error)) from error
        self._address = _print_address((host, self._server.sockets[0].getsockname()[1]))

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = TcpConnection(reader, writer, self._queued_bytes_max)
        task = asyncio.get_running_loop().create_task(serve_and_close(self._serve, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class TcpNetwork:
    """`queued_bytes_max` is how much one connection holds for a slow peer before `write` waits."""

    def __init__(self, *, queued_bytes_max: int = 1024 * 1024) -> None:
        self._queued_bytes_max = queued_bytes_max

    async def connect(self, address: str) -> TcpConnection:
        try:
            reader, writer = await asyncio.open_connection(*split_address(address))
        except OSError as error:
            raise Unreachable(address, error.strerror or str(error)) from error
        return TcpConnection(reader, writer, self._queued_bytes_max)

    async def listen(self, address: str, serve: Callable[[Connection], Awaitable[None]]) -> TcpListener:
        listener = TcpListener(serve, self._queued_bytes_max)
        await listener._bind(address)
        return listener


def _print_address(address: tuple[object, ...] | None) -> str:
    """host:port of a socket address; IPv6 has brackets, and two more fields that nobody needs."""
    if address is None:  # the peer left before we could ask
        return "unknown:0"
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
