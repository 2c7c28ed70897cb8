"""What is physically there: the frames of a batched publish through a socket and fdatasync, and nothing else.

The server of this file takes frames as they come, writes whatever has arrived and syncs it, and answers each frame with
four bytes. No parsing, no checksum, no offset. The client sends the very frames that our producer would send, eight in
flight. `native.py` says how much of that the whole broker reaches.
"""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from pydanube.formats.batch import encode_columns
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

IN_FLIGHT = 8
LENGTH = struct.Struct("<I")


def frame_of(messages: int, size: int) -> bytes:
    """A Produce with a batch of `messages` payloads of `size` bytes."""
    times = memoryview(array("q", range(messages))).cast("B")
    payloads = [os.urandom(size)] * messages
    batch = encode_columns(payloads, times, producer_name="raw", topic="/default/raw", producer_id=1, session=1)
    return b"".join(frames.encode(pb.Command(request_id=1, produce=pb.Produce(producer=1)), *batch.buffers))


class Raw(asyncio.Protocol):
    """Writes and syncs in a thread, one group at a time, as the log does."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._buffer = bytearray()
        self._pending: list[bytes] = []
        self._is_writing = False
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 4:
            end = 4 + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            self._pending.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
        self._go_on()

    def _go_on(self) -> None:
        if self._pending and not self._is_writing:
            self._is_writing = True
            group, self._pending = self._pending, []
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, self._write, group).add_done_callback(lambda _: self._written(len(group)))

    def _write(self, group: list[bytes]) -> None:
        os.writev(self._file, group)
        os.fdatasync(self._file)

    def _written(self, count: int) -> None:
        self._is_writing = False
        self._transport.write(b"done" * count)
        self._go_on()


async def serve(place: Path) -> None:
    """Prints its port, and serves until its input ends."""
    file = os.open(place / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Raw(file), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    server.close()
    os.close(file)


async def publish(port: int, count: int, messages: int = 1000, size: int = 100) -> dict[str, float]:
    """Messages per second, of `count` in frames of `messages` each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    frame = frame_of(messages, size)
    number = count // messages
    began = time.perf_counter()
    for sent in range(number):
        writer.write(frame)
        if sent >= IN_FLIGHT:
            await reader.readexactly(4)
    await reader.readexactly(4 * min(number, IN_FLIGHT))
    seconds = time.perf_counter() - began
    writer.close()
    return {"rate": number * messages / seconds}
