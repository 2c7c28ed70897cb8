"""What `danube produce` sends, and how: options, results, and where messages come from.

`native.py` and `over_grpc.py` send them.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydanube.client.grpc.producer import SchemaReference
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, DanubeError

CHUNK_BYTES: Final = 64 * 1024
CHUNKS_MAX: Final = 4


class KeyedPayload(NamedTuple):
    """One message to send."""

    payload: bytes
    key: str | None = None


class SendResult(NamedTuple):
    """What became of one message. `error` is None for an acknowledged one."""

    topic: str
    request_id: int
    size_bytes: int
    error: DanubeError | None = None
    offset: int | None = None  # gRPC does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceOptions:
    """How to send; what to send comes separately."""

    topic: TopicName
    producer: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    partitions: int = 0
    reliable: bool | None = None  # None: as the topic is; a new one is reliable
    interval_seconds: float = 0.0
    in_flight: int = 1
    schema: SchemaReference | None = None


# --- where messages come from -------------------------------------------------------------------------


async def repeated(message: KeyedPayload, count: int) -> AsyncIterator[KeyedPayload]:
    for _ in range(count):
        yield message


async def by_line(file: int, key: str | None, separator: str | None) -> AsyncIterator[KeyedPayload]:
    """One message per line, without its line end. With a separator, what stands before it is the key."""
    rest = b""
    async for chunk in _chunks(file):
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield _message(line, key, separator)
    if rest:
        yield _message(rest, key, separator)


def _message(line: bytes, key: str | None, separator: str | None) -> KeyedPayload:
    payload = line.removesuffix(b"\r")
    if separator is None:
        return KeyedPayload(payload, key)
    before, found, after = payload.partition(separator.encode())
    if not found:
        raise ConfigError("--key-separator", separator, f"every line has it, but {payload[:60]!r} does not")
    return KeyedPayload(after, before.decode("utf-8", "replace"))


async def _chunks(file: int) -> AsyncIterator[bytes]:
    """What is read from an open file descriptor, which may be a keyboard.

    A daemon thread reads, without a buffer whose lock it could hold: Ctrl-C does not wait for it.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(CHUNKS_MAX)

    def read() -> None:
        chunk: bytes | OSError = b"more"
        while chunk and isinstance(chunk, bytes):
            try:
                chunk = os.read(file, CHUNK_BYTES)
            except OSError as error:
                chunk = error
            try:
                asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result()
            except (RuntimeError, CancelledError):
                return  # the command is over

    threading.Thread(target=read, daemon=True, name="input").start()
    while chunk := await queue.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk
