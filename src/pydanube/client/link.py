"""One connection to one broker: requests out, answers and pushes in.

    Link.ask(command) ──► frame ──► broker ──► frame ──► the answer's callback, by its request id
                                          └──► Deliver, Moved, Error ──► the lane that has the handle

A link ends once, with one error, and is never used again: everything that waited for an answer gets that error, and
every lane is told. Who opens the next link, and what is sent on it again, is for the lanes to decide.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Protocol, TypeAlias, cast

from pydanube.errors import ConfigError, DanubeError, InvalidBatch, NotServed, ProtocolViolation, Unreachable
from pydanube.ports import Buffer
from pydanube.wire import frames, strangers
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import from_wire

log = logging.getLogger(__name__)

Answer: TypeAlias = Callable[[frames.Frame | DanubeError], None]

GREETING_ID: Final = 1
PING_ID: Final = 2
FIRST_ID: Final = 3


@lru_cache
def _client_name() -> str:
    """For the broker's log."""
    try:
        return f"pydanube {version('pydanube')}"
    except PackageNotFoundError:  # run from its sources
        return "pydanube"


def tls_refusal(url: str, error: ssl.SSLError) -> DanubeError:
    """What is wrong with the TLS between us and a broker. Time does not help: somebody must change something."""
    if isinstance(error, ssl.SSLCertVerificationError):
        allowed = f"a broker whose certificate we trust ({error.verify_message}); give its authority with tls="
        return ConfigError("tls", url, allowed)
    reason = error.reason or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return ConfigError("url", url, "the broker does not speak TLS on that port; use danube://")
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return ConfigError("tls", url, "the broker wants a certificate of ours; give tls= a context with one")
    return ConfigError("tls", url, f"the broker and we cannot agree on TLS ({reason})")


class Attached(Protocol):
    """A producer or consumer of one topic, as its link knows it. The methods never wait."""

    topic: str

    def ended(self, link: Link, error: DanubeError) -> None:
        """Its handle on `link` is not valid any more. A NotServed may say which broker has the topic now."""

    def leave(self, link: Link) -> None:
        """The broker is going away; what was asked is still answered."""


class Receiving(Attached, Protocol):
    """A consumer."""

    def delivered(self, ranges: tuple[tuple[int, int], ...], attempt: int, seeks: int, body: memoryview) -> None: ...

    def recalled(self, ranges: tuple[tuple[int, int], ...], seeks: int, taken: int) -> None: ...


class Link(asyncio.Protocol):
    """Made by `loop.create_connection`; usable when `welcome` is done."""

    def __init__(self, url: str, token: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.url = url
        self.welcome: asyncio.Future[pb.Welcome] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()  # the socket is gone
        self.ended: DanubeError | None = None
        self.leaving = False
        self.producers: dict[int, Attached] = {}
        self.consumers: dict[int, Receiving] = {}
        self._loop = loop
        self._token = token
        self._decoder = frames.FrameDecoder()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, Answer] = {}
        self._next_id = FIRST_ID
        self._keepalive_seconds = 0.0
        self._said_at = self._heard_at = loop.time()
        self._pinged_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self.ended is None and not self.leaving

    # --- asking -------------------------------------------------------------------------------------

    def say(self, command: pb.Command, *body: Buffer) -> None:
        """Sends what gets no answer. After the end it goes nowhere: the lanes know already."""
        if self._transport is not None and self.ended is None:
            self._said_at = self._loop.time()
            self._transport.writelines(frames.encode(command, *body))

    def ask(self, command: pb.Command, answer: Answer, *body: Buffer) -> int:
        """Sends a request; `answer` is called once, with the frame or with why there is none. Never waits."""
        if self.ended is not None:
            self._loop.call_soon(answer, self.ended)
            return 0
        number = self._next_id
        self._next_id = number + 1
        command.request_id = number
        self._waiting[number] = answer
        self.say(command, *body)
        return number

    async def request(
        self, command: pb.Command, kind: str, accept: Callable[[frames.Frame], None] | None = None
    ) -> frames.Frame:
        """The answer, which is of this kind. `accept` sees it before any later frame of the connection is looked at."""
        future: asyncio.Future[frames.Frame] = self._loop.create_future()

        def answered(answer: frames.Frame | DanubeError) -> None:
            if future.done():  # cancelled in this turn of the loop
                self._unwanted(answer)
            elif isinstance(answer, DanubeError):
                future.set_exception(answer)
            elif answer.kind != kind:
                violation = ProtocolViolation(f"the answer is {answer.kind}, not {kind}")
                future.set_exception(violation)
                self.end(violation)
            else:
                if accept is not None:
                    accept(answer)
                future.set_result(answer)

        number = self.ask(command, answered)
        try:
            return await future
        finally:
            self._waiting.pop(number, None)
            self._rest()

    def _unwanted(self, answer: frames.Frame | DanubeError) -> None:
        """Its asker has given up. What it opened is closed, or the broker would serve somebody who is not there."""
        if isinstance(answer, DanubeError):
            return
        if answer.kind == "subscribed":
            consumer = answer.command.subscribed.consumer
            self.ask(pb.Command(close_consumer=pb.CloseConsumer(consumer=consumer)), lambda _: None)
        elif answer.kind == "producer_opened":
            producer = answer.command.producer_opened.producer
            self.ask(pb.Command(close_producer=pb.CloseProducer(producer=producer)), lambda _: None)

    # --- ending -------------------------------------------------------------------------------------

    def end(self, error: DanubeError, *, gently: bool = False) -> None:
        """Everybody who waits is told, once. `gently`: what was written still goes out."""
        if self.ended is not None:
            return
        self.ended = error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            if gently:
                self._transport.close()
            else:
                self._transport.abort()
        if not self.welcome.done():
            self.welcome.set_exception(error)
            self.welcome.exception()  # whoever dialed may have given up
        waiting, self._waiting = self._waiting, {}
        lanes: list[Attached] = [*self.producers.values(), *self.consumers.values()]
        self.producers.clear()
        self.consumers.clear()
        for lane in lanes:  # first, so that a batch without an answer is known to be sent again
            lane.ended(self, error)
        for answer in waiting.values():
            answer(error)

    def close(self) -> None:
        """Says goodbye: the application is done with the broker."""
        self.say(pb.Command(goodbye=pb.Goodbye()))
        self.end(Unreachable(self.url, "the client closed the connection"), gently=True)

    def _rest(self) -> None:
        """A broker that said goodbye waits for us to go, as soon as it owes us nothing."""
        if self.leaving and not self._waiting:
            self.end(Unreachable(self.url, "the broker is going away"), gently=True)

    # --- the transport's side -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of asyncio's classes
        hello = pb.Hello(
            magic=frames.MAGIC,
            version_min=frames.VERSION_MIN,
            version_max=frames.VERSION_MAX,
            client=_client_name(),
            token=self._token,
        )
        self.say(pb.Command(request_id=GREETING_ID, hello=hello))

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(self._why_lost(exc))
        if not self.closed.done():
            self.closed.set_result(None)

    def _why_lost(self, error: Exception | None) -> DanubeError:
        if isinstance(error, ssl.SSLError):
            return tls_refusal(self.url, error)
        why = str(error) if error else "the broker closed the connection"
        if not self.welcome.done():  # a broker hangs up on strangers without a word that would get through to us
            is_tls = self.url.startswith("danube+tls")
            why += " before it answered; " + (
                "perhaps it wants a certificate of ours (tls=)" if is_tls else "if it speaks TLS, use danube+tls://"
            )
        return Unreachable(self.url, why)

    def data_received(self, data: bytes) -> None:
        if self.ended is not None:
            return
        self._heard_at = self._loop.time()
        self._pinged_at = None
        if not self.welcome.done() and (advice := strangers.advice(data)) is not None:
            self.end(ConfigError("url", self.url, advice))
            return
        try:
            for frame in self._decoder.feed(data):
                if self.ended is None:
                    self._handle(frame)
            if self._decoder.violation is not None:
                raise self._decoder.violation
        except (ProtocolViolation, InvalidBatch) as error:
            log.error("broker sent nonsense", extra={"broker": self.url, "why": str(error)})
            self.end(error)

    def _handle(self, frame: frames.Frame) -> None:
        kind, command = frame.kind, frame.command
        if kind == "deliver":
            deliver = command.deliver
            consumer = self.consumers.get(deliver.consumer)
            if consumer is not None:  # it may have been closed a moment ago
                consumer.delivered(frames.ranges_of(deliver.ranges), deliver.attempt, deliver.seeks, frame.body)
        elif not self.welcome.done():
            self._greeted(frame)
        elif kind == "recall":
            consumer = self.consumers.get(command.recall.consumer)
            if consumer is not None:
                recall = command.recall
                consumer.recalled(frames.ranges_of(recall.ranges), recall.seeks, recall.taken)
        elif kind == "error":
            self._error(command)
        elif kind == "moved":
            self._moved(command.moved)
        elif kind == "ping":
            self.say(pb.Command(request_id=command.request_id, pong=pb.Pong()))
        elif kind == "pong":
            answer = self._waiting.pop(command.request_id, None)  # none: being heard is all it is for
            if answer is not None:
                answer(frame)
        elif kind == "goodbye":
            self._goodbye()
        else:
            answer = self._waiting.pop(command.request_id, None)
            if answer is not None:
                answer(frame)
            else:
                self._unwanted(frame)
            self._rest()

    def _greeted(self, frame: frames.Frame) -> None:
        if frame.kind == "error":
            self.end(from_wire(frame.command.error))
            return
        if frame.kind != "welcome":
            raise ProtocolViolation(f"the greeting was answered with {frame.kind}")
        welcome = frame.command.welcome
        frames.check_welcome(welcome)
        self._decoder.frame_size_max = frames.FRAME_SIZE_LIMIT
        self._keepalive_seconds = float(welcome.keepalive_seconds)
        self.welcome.set_result(welcome)
        self._watch()

    def _error(self, command: pb.Command) -> None:
        error = from_wire(command.error)
        if command.request_id:
            answer = self._waiting.pop(command.request_id, None)
            if answer is not None:
                answer(error)
            self._rest()
        elif command.error.producer:
            lane = self.producers.pop(command.error.producer, None)
            if lane is not None:
                lane.ended(self, error)
        elif command.error.consumer:
            consumer = self.consumers.pop(command.error.consumer, None)
            if consumer is not None:
                consumer.ended(self, error)
        else:
            self.end(error)

    def _moved(self, moved: pb.Moved) -> None:
        error = NotServed(moved.topic, f"it moved to {moved.stream_url or 'another broker'}", moved.stream_url)
        for handles in (self.producers, self.consumers):
            lanes: list[tuple[int, Attached]] = [
                (handle, lane) for handle, lane in handles.items() if lane.topic == moved.topic
            ]
            for handle, lane in lanes:
                del handles[handle]
                lane.ended(self, error)

    def _goodbye(self) -> None:
        self.leaving = True
        for lane in [*self.producers.values(), *self.consumers.values()]:
            lane.leave(self)
        self._rest()

    # --- keepalive ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Notices a broker that is silent, and keeps it from thinking so of us."""
        if not self._keepalive_seconds or self.ended is not None:
            return
        now = self._loop.time()
        if self._pinged_at is not None and now - self._pinged_at > self._keepalive_seconds:
            self.end(Unreachable(self.url, f"silent for {now - self._heard_at:.0f} s"))
            return
        period = self._keepalive_seconds / 3
        quiet_at = min(self._said_at, self._heard_at)
        if self._pinged_at is None and now - quiet_at > self._keepalive_seconds - 1.5 * period:
            self._pinged_at = now
            self.say(pb.Command(request_id=PING_ID, ping=pb.Ping()))
        self._timer = self._loop.call_later(period, self._watch)
