"""Which server listens at an address that is not the wanted one: for a sentence that names the right port.

A broker has four ports, and giving one for another is the commonest mistake. Probed only after a call failed.
"""

from __future__ import annotations

import asyncio
import socket
from enum import StrEnum
from typing import Any, Final
from urllib.parse import urlsplit

import grpc

from pydanube.errors import ProtocolViolation

PROBE_SECONDS: Final = 1.0  # for each step of a probe
ANSWER_BYTES: Final = 4096
HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # preface, empty settings
SETTINGS_TYPE: Final = 4
FRAME_HEADER_BYTES: Final = 9
# Something that only this port has. What is asked is empty: whatever it answers, it knows the method.
_METHODS: Final = {"admin": "/danube_admin.BrokerAdmin/ListBrokers", "client": "/danube.Discovery/TopicLookup"}


class Listener(StrEnum):
    NONE = "none"
    GRPC = "gRPC"
    NATIVE = "native"
    HTTP = "HTTP"
    TLS = "TLS"
    STRANGER = "stranger"


async def listener_at(address: str) -> Listener:
    """What the first answer to an HTTP/2 greeting looks like."""
    parts = urlsplit(f"//{address}")
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except (OSError, TimeoutError):
        return Listener.NONE
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            writer.write(HTTP2)
            answer = await reader.read(ANSWER_BYTES)
    except (OSError, TimeoutError):
        return Listener.STRANGER
    finally:
        writer.close()
    return kind_of(answer)


def kind_of(answer: bytes) -> Listener:
    if answer.startswith(b"HTTP/"):
        return Listener.HTTP
    if answer[:2] in (b"\x15\x03", b"\x16\x03"):
        return Listener.TLS
    if len(answer) >= FRAME_HEADER_BYTES and answer[3] == SETTINGS_TYPE and not any(answer[5:FRAME_HEADER_BYTES]):
        return Listener.GRPC
    return Listener.NATIVE if _is_native(answer) else Listener.STRANGER


def _is_native(answer: bytes) -> bool:
    """A native port says in a frame of its own that a greeting was none."""
    from pydanube.wire import frames  # here: most commands never need it

    decoder = frames.FrameDecoder()
    try:
        found = [frame.kind for frame in decoder.feed(answer)]
    except ProtocolViolation:
        return False
    return "error" in found


async def services_at(channel: Any) -> set[str]:
    """Whether a gRPC port is a broker's `admin` port, its `client` port, or neither."""
    found = set()
    for name, method in _METHODS.items():
        try:
            await channel.unary_unary(method)(b"", timeout=PROBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE):
                continue
        found.add(name)
    return found


def is_known(host: str) -> bool:
    """Whether the host's name has an address."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
