"""A TCP proxy that breaks what goes through it, on the loop of the test that uses it.

    async with FaultProxy(server.port) as proxy:
        proxy.fault = Cut(after_bytes=1000)      for every connection from now on
        proxy.faults += [Refuse(), Refuse()]     for the next two only, before `fault`
        proxy.fault = None                       all is well again
        proxy.picked.append(Picked(rb"POST .*uploadId=", lost="answer"))     for one request of HTTP

Connections that exist are cut whenever the faults change hands: clients keep them, and would not notice.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self


@dataclass(frozen=True)
class Refuse:
    """A reset at once, as from a machine on which nobody listens."""


@dataclass(frozen=True)
class Silence:
    """Takes everything and says nothing."""


@dataclass(frozen=True)
class Cut:
    """Passes so many bytes of answers, then cuts the connection. With 0 the request arrives, and its answer is lost."""

    after_bytes: int


@dataclass(frozen=True)
class Stall:
    """Passes so many bytes of answers, then nothing more."""

    after_bytes: int


@dataclass(frozen=True)
class Slow:
    """Waits for so long before it passes each 64 KiB of an answer."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """Answers itself, and closes."""

    status: str
    body: bytes = b""

    def encode(self) -> bytes:
        head = f"HTTP/1.1 {self.status}\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + self.body


Fault = Refuse | Silence | Cut | Stall | Slow | Answer


@dataclass(frozen=True)
class Picked:
    """Cuts the connection of the next request whose first line matches: before it arrives, or its answer.

    `instead` is what comes in place of a lost answer.
    """

    line: bytes
    lost: Literal["request", "answer"]
    instead: Answer | None = None


class FaultProxy:
    """In front of a port of 127.0.0.1. `met` has every connection's fault, None for those that pass; `requests` has
    the first line of every request of HTTP that passed, or was to.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._fault: Fault | None = None
        self.faults: deque[Fault] = deque()
        self.met: list[Fault | None] = []
        self.picked: list[Picked] = []
        self.requests: list[bytes] = []
        self._changed = asyncio.Condition()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def fault(self) -> Fault | None:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        self._fault = fault
        self.cut()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Ends every connection, without a goodbye."""
        for writer in self._writers:
            _reset(writer)

    async def have_met(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.met) >= count)

    async def have_seen(self, line: bytes) -> None:
        """A request whose first line matches."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(re.match(line, each) for each in self.requests))

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        fault = self.faults.popleft() if self.faults else self._fault
        try:
            if isinstance(fault, Answer):
                await _read_request(reader)
                writer.write(fault.encode())
                await writer.drain()
            await self._tell(fault)
            if isinstance(fault, Silence):
                while await reader.read(1 << 16):
                    pass
            if fault is None or isinstance(fault, Cut | Stall | Slow):
                await self._pass(reader, writer, fault)
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            if isinstance(fault, Answer):
                writer.close()
            else:
                _reset(writer)

    async def _tell(self, fault: Fault | None) -> None:
        self.met.append(fault)
        async with self._changed:
            self._changed.notify_all()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Cut | Stall | Slow | None
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers.add(far_writer)
        lost: list[Picked] = []
        upward = asyncio.create_task(self._copy(reader, far_writer, writer, lost))
        try:
            left = fault.after_bytes if isinstance(fault, Cut | Stall) else None
            while data := await far_reader.read(1 << 16):
                if lost:
                    if lost[0].instead is not None:
                        writer.write(lost[0].instead.encode())
                        await writer.drain()
                        await upward  # the peer leaves when it has read that
                    return
                if isinstance(fault, Slow):
                    await asyncio.sleep(fault.seconds)
                writer.write(data[:left])
                await writer.drain()
                left = None if left is None else max(0, left - len(data))
                if left == 0 and isinstance(fault, Stall):
                    await upward
                if left == 0:
                    return
        finally:
            upward.cancel()
            self._writers.discard(far_writer)
            _reset(far_writer)

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        lost: list[Picked],
    ) -> None:
        """`lost` gets what becomes of a request's answer before the request is sent on."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                # One request at a time per connection, so its first line is the beginning of what is read.
                line = _FIRST_LINE.match(data)
                if line is not None:
                    self.requests.append(line[1])
                    async with self._changed:
                        self._changed.notify_all()
                    picked = next((each for each in self.picked if re.match(each.line, line[1])), None)
                    if picked is not None:
                        self.picked.remove(picked)
                        if picked.lost == "request":
                            _reset(writer)
                            return
                        lost.append(picked)
                far_writer.write(data)
                await far_writer.drain()


class Line:
    """A proxy in a thread of its own, for tests that are not on a loop: a way that is open or cut."""

    def __init__(self, port: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._proxy = FaultProxy(port)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._proxy.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._proxy.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def endpoint(self) -> str:
        return self._proxy.endpoint

    def cut(self) -> None:
        """What is sent arrives nowhere, and nobody says so."""
        self._do(self._set(Silence()))

    def refuse(self) -> None:
        """As if nobody were there."""
        self._do(self._set(Refuse()))

    def heal(self) -> None:
        self._do(self._set(None))

    async def _set(self, fault: Fault | None) -> None:
        self._proxy.fault = fault

    def _do(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


_FIRST_LINE = re.compile(rb"((?:GET|HEAD|PUT|POST|DELETE) [^\r\n]+) HTTP/1\.1\r\n")


async def _read_request(reader: asyncio.StreamReader) -> None:
    """To its end: whoever answers and leaves before that resets the connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, found, rest = head.partition(b"content-length:")
    if found:
        await reader.readexactly(int(rest.partition(b"\r\n")[0]))


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with suppress(OSError):  # linger for no time: the kernel sends a reset instead of a goodbye
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
