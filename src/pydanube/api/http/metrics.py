"""GET /metrics for Prometheus, /health/live and /health/ready for supervisors, /iceberg/v1/ for tables.

A small HTTP/1.1 responder: one request per connection, bounded in size and time. The numbers are copied on the event
loop and printed in a thread, so that a scrape of thousands of topics does not delay messages.

It opens before everything else, so that a broker that recovers a large log, or waits for its metadata store, is known
to live and not to be ready: live 200, ready 503, metrics 503 until there is a broker to speak of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pydanube.api.http import iceberg
from pydanube.broker.tables import TableDesk
from pydanube.config import open_files
from pydanube.errors import TooManyConnections
from pydanube.telemetry import Histogram, MetricsSnapshot, Telemetry

log = logging.getLogger(__name__)

REQUEST_SIZE_MAX_BYTES: Final = 16 * 1024
BODY_SIZE_MAX_BYTES: Final = 1024 * 1024  # of requests that have one: none is used
REQUEST_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 60.0
REFUSED_SECONDS: Final = 0.5  # for one too many to say what it wants, so that it hears why not
LOOP_LAG_SECONDS: Final = 0.1  # between two measurements of how late the event loop is
STARTING: Final = iceberg.STARTING
REASONS: Final = {
    200: "OK",
    204: "No Content",
    304: "Not Modified",
    400: "Bad Request",
    404: "Not Found",
    403: "Forbidden",
    405: "Method Not Allowed",
    406: "Not Acceptable",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
TEXT: Final = "text/plain; charset=utf-8"


class HttpAnswer(NamedTuple):
    code: int
    body: Sequence[bytes]  # in pieces
    content_type: str = TEXT
    headers: Mapping[str, str] = {}

    @classmethod
    def saying(cls, code: int, sentence: str) -> HttpAnswer:
        return cls(code, [f"{sentence}\n".encode()])


class Readiness(Protocol):
    """Whether the broker can be used just now, for what sends clients to it."""

    def not_ready(self) -> str | None:
        """Why not; None if it can."""
        ...

    def ready_as(self) -> str:
        """What is said when it can."""
        ...


class MetricsServer:
    """Open before the broker is there, which can take long: until `follow` it says that the broker starts."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._readiness: Readiness | None = None
        self._tables: TableDesk | None = None
        self.address = ""  # as bound
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None
        self._printing = asyncio.Lock()  # scrapes take turns
        self._open_files = open_files.current()
        self._connections = 0

    async def open(self, address: str) -> None:
        """Raises OSError."""
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(
            self._serve, host.strip("[]"), int(port), limit=REQUEST_SIZE_MAX_BYTES
        )
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"
        self._watching = asyncio.create_task(watch_loop(self._telemetry.loop_lag), name="watch the event loop")

    def follow(self, readiness: Readiness, tables: TableDesk) -> None:
        """The other servers are open, and know whether the broker can be used."""
        self._readiness = readiness
        self._tables = tables

    async def close(self) -> None:
        """A second time is no error."""
        if self._server is not None:
            self._server.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        too_many = self._connections > self._open_files.http
        try:
            async with asyncio.timeout(REQUEST_SECONDS if not too_many else REFUSED_SECONDS):
                beginning = await reader.readexactly(4)
                if beginning.replace(b" ", b"").isalpha():
                    request = beginning + await reader.readuntil(b"\r\n\r\n")
                else:  # a native client that took this port for another: it would wait for an answer
                    request = b""
                method, path = _request_line(request)
                await _pass_over_body(reader, request)
            async with asyncio.timeout(ANSWER_SECONDS):
                if too_many:
                    sentence = str(TooManyConnections(self._open_files.http, self._open_files.limit))
                    answer = HttpAnswer.saying(503, sentence)
                else:
                    answer = await self._answer(method, path, request)
                writer.write(_head(answer))
                for piece in answer.body if method != "HEAD" else ():
                    writer.write(piece)
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it is gone, or never said anything sensible
        except Exception as error:
            log.error("scrape failed", exc_info=error)
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, method: str, path: str, request: bytes) -> HttpAnswer:
        if not method:
            return HttpAnswer.saying(400, "this is no HTTP request")
        if path.startswith(iceberg.ROOT):
            return await self._table(request)
        if method not in ("GET", "HEAD"):
            return HttpAnswer.saying(405, "only GET is served here")
        match path:
            case "/metrics" if not self._telemetry.broker:
                return HttpAnswer.saying(503, STARTING)
            case "/metrics":
                async with self._printing:
                    pieces = await asyncio.to_thread((await self._snapshot()).pieces)
                return HttpAnswer(200, pieces, CONTENT_TYPE_PLAIN_0_0_4)
            case "/health/live":
                return HttpAnswer.saying(200, "live")
            case "/health/ready":
                if self._readiness is None:
                    return HttpAnswer.saying(503, STARTING)
                why = self._readiness.not_ready()
                return (
                    HttpAnswer.saying(200, self._readiness.ready_as()) if why is None else HttpAnswer.saying(503, why)
                )
        return HttpAnswer.saying(404, "try /metrics, /health/live or /health/ready")

    async def _table(self, request: bytes) -> HttpAnswer:
        method, target, _ = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        reply = await iceberg.answer(self._tables, iceberg.CatalogRequest(method, target, _headers(request)))
        return HttpAnswer(reply.code, [reply.encoded()], iceberg.JSON, reply.headers)

    async def _snapshot(self) -> MetricsSnapshot:
        steps = self._telemetry.snapshot_in_steps()
        while True:
            try:
                next(steps)
            except StopIteration as done:
                snapshot: MetricsSnapshot = done.value
                return snapshot
            await asyncio.sleep(0)


async def watch_loop(lag: Histogram) -> None:
    """Sleeps, and counts how much later than asked it was woken, until cancelled.

    Whatever holds the loop for so long holds every message.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOP_LAG_SECONDS
        await asyncio.sleep(LOOP_LAG_SECONDS)
        lag.observe(max(0.0, loop.time() - due))


def _request_line(request: bytes) -> tuple[str, str]:
    """Method and path without its query; two empty strings for anything that is no request."""
    parts = request.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        return "", ""
    return parts[0], parts[1].partition("?")[0]


def _headers(request: bytes) -> dict[str, str]:
    """By their names in lower case."""
    lines = request.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _pass_over_body(reader: asyncio.StreamReader, request: bytes) -> None:
    """A connection that is closed with something unread is reset, and the answer with it."""
    length = _headers(request).get("content-length", "0")
    left = min(int(length), BODY_SIZE_MAX_BYTES) if length.isdecimal() else 0
    while left > 0 and (piece := await reader.read(left)):
        left -= len(piece)


def _head(answer: HttpAnswer) -> bytes:
    size = sum(map(len, answer.body))
    content = (
        (f"Content-Type: {answer.content_type}", f"Content-Length: {size}") if answer.code not in (204, 304) else ()
    )
    lines = (
        f"HTTP/1.1 {answer.code} {REASONS[answer.code]}",
        *content,
        *(f"{name}: {value}" for name, value in answer.headers.items()),
        "Connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode()
