"""A peer of the native server without a socket: frames in, frames out, on the simulator's clock.

    host = BrokerFixture()
    await host.boot()
    peer = await Peer.greeted(server(host))
    opened = await peer.ask(open_producer=pb.OpenProducer(...))
    peer.say(produce=..., body=batch)
    await settle()
    assert peer.heard("receipt")

Its transport does what a socket's does: it stops when it is told not to read, fills up when the peer does not read
(`takes_nothing`), and ends once.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydanube.api.native.connection import NativeConnection
from pydanube.api.native.server import NativeServer
from pydanube.config.stream import StreamLimits
from pydanube.formats.batch import Batch, Envelope, encode, rows_of
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.brokers import ORDERS, BrokerFixture, settle


class Transport(asyncio.Transport):
    """The broker's end."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self._peer = peer
        self._high = 64 * 1024
        self._is_paused = False
        self.unread = bytearray()  # written, and not taken by the peer
        self.reads = True
        self.is_closing_ = False
        self.aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("peer", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high if high is not None else self._high

    def write(self, data: Any) -> None:
        assert not self.is_closing_, "nothing is written after the end"
        self.unread += data
        if not self._peer.takes_nothing:
            self.flush()
        elif len(self.unread) > self._high and not self._is_paused:
            self._is_paused = True
            self._peer.connection.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def flush(self) -> None:
        data, self.unread = bytes(self.unread), bytearray()
        self._peer.received(data)
        if self._is_paused:
            self._is_paused = False
            self._peer.connection.resume_writing()
        if self.is_closing_:
            self._end()

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True
        asyncio.get_running_loop().call_soon(self._peer.push)

    def is_closing(self) -> bool:
        return self.is_closing_

    def close(self) -> None:
        if not self.is_closing_:
            self.is_closing_ = True
            if not self.unread:
                self._end()

    def abort(self) -> None:
        self.is_closing_ = self.aborted = True
        self._end()

    def _end(self) -> None:
        if not self._peer.is_closed:
            self._peer.is_closed = True
            asyncio.get_running_loop().call_soon(self._peer.connection.connection_lost, None)


class Peer:
    """Says whatever a test wants it to say."""

    def __init__(self, server: NativeServer) -> None:
        self.is_closed = False
        self.takes_nothing = False
        self.frames: list[frames.Frame] = []
        self._decoder = frames.FrameDecoder(frames.FRAME_SIZE_LIMIT)
        self._unsaid = bytearray()
        self._ids = 100
        self.connection = NativeConnection(server)
        self.transport = Transport(self)
        self.connection.connection_made(self.transport)

    @classmethod
    async def greeted(cls, server: NativeServer, **hello: Any) -> Peer:
        peer = cls(server)
        peer.say(request_id=1, hello=greeting(**hello))
        assert peer.heard("welcome"), peer.frames
        return peer

    # --- saying -------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Any bytes at all."""
        self._unsaid += data
        self.push()

    def push(self) -> None:
        if self.transport.reads and not self.is_closed and self._unsaid:
            data, self._unsaid = bytes(self._unsaid), bytearray()
            self.connection.data_received(data)

    def say(self, *, body: Batch | None = None, **command: Any) -> None:
        self.write(b"".join(frames.encode(pb.Command(**command), *(body.buffers if body else ()))))

    async def ask(self, **command: Any) -> frames.Frame:
        """The answer: of whatever kind, an error too."""
        self._ids += 1
        self.say(request_id=self._ids, **command)
        for _ in range(100):
            found = [frame for frame in self.frames if frame.command.request_id == self._ids]
            if found:
                return found[0]
            await settle()
        raise AssertionError(f"{command} got no answer; heard: {self.frames}")

    async def open_producer(self, name: str = "p", topic: str = ORDERS, **more: Any) -> pb.ProducerOpened:
        request = pb.OpenProducer(topic=topic, producer_name=name, reliable=True, create=True, **more)
        answer = await self.ask(open_producer=request)
        assert answer.kind == "producer_opened", answer
        return answer.command.producer_opened

    def produce(self, opened: pb.ProducerOpened, sequence: int, *payloads: bytes, request_id: int = 0) -> Batch:
        batch = batch_of(opened, sequence, *payloads)
        request_id = request_id or 10_000 + sequence
        self.say(request_id=request_id, produce=pb.Produce(producer=opened.producer), body=batch)
        return batch

    async def subscribe(self, messages: int = 1000, size_bytes: int = 1 << 20, **more: Any) -> pb.Subscribed:
        fields = {"topic": ORDERS, "subscription": "s", "consumer_name": "c", **more}
        fields.setdefault("start", pb.Place(edge=pb.EARLIEST))
        answer = await self.ask(subscribe=pb.Subscribe(messages=messages, bytes=size_bytes, **fields))
        assert answer.kind == "subscribed", answer
        return answer.command.subscribed

    # --- hearing ------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        self.frames += self._decoder.feed(data)

    def take(self) -> None:
        """Reads what has piled up, and goes on reading."""
        self.takes_nothing = False
        self.transport.flush()

    def heard(self, kind: str) -> list[pb.Command]:
        return [frame.command for frame in self.frames if frame.kind == kind]

    @property
    def error(self) -> pb.Error:
        """The one clear error before the end."""
        errors = self.heard("error")
        assert len(errors) == 1 and self.frames[-1].kind == "error", self.frames
        return errors[0].error

    @property
    def offsets(self) -> list[int]:
        """Everything that was delivered, in order."""
        found: list[int] = []
        for command in self.heard("deliver"):
            for first, end in frames.ranges_of(command.deliver.ranges):
                found += range(first, end)
        return found


def greeting(**fields: Any) -> pb.Hello:
    return pb.Hello(**{"magic": frames.MAGIC, "version_min": 1, "version_max": 1, "client": "test", **fields})


def batch_of(opened: pb.ProducerOpened, sequence: int, *payloads: bytes, topic: str = ORDERS) -> Batch:
    rows = rows_of([Envelope(payload, producer_name="p") for payload in payloads or (b"x",)])
    return encode(
        rows, topic=topic, producer_id=opened.producer_id, session=opened.session, first_sequence=sequence
    )  # fmt: skip


def server_of(host: BrokerFixture, **limits: Any) -> NativeServer:
    """The native server of a booted broker, without a socket."""
    return NativeServer(host.broker, StreamLimits(**limits))


async def bystander(server: NativeServer) -> Peer:
    """Somebody who publishes and consumes beside a peer that misbehaves."""
    peer = await Peer.greeted(server)
    topic = "/default/elsewhere"
    peer.opened = await peer.open_producer("bystander", topic)  # type: ignore[attr-defined]
    await peer.subscribe(topic=topic)
    return peer


async def notices_nothing(peer: Peer) -> bool:
    """It still gets what it publishes."""
    opened, sequence = peer.opened, len(peer.heard("receipt"))  # type: ignore[attr-defined]
    batch = batch_of(opened, sequence, b"still here", topic="/default/elsewhere")
    answer = await peer.ask(produce=pb.Produce(producer=opened.producer), body=batch)
    await settle()
    return answer.kind == "receipt" and peer.offsets[-1:] == [sequence] and not peer.is_closed
