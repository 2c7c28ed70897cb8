"""A broker that does what a test tells it: real frames on a real socket, real sessions, nothing stored but in a list.

async with ScriptedBroker() as broker, connect(broker.url) as client:
    broker.hold()                  # produced batches get no answer until `release`
    broker.drop()                  # every connection breaks
    broker.answers["seek"] = ...   # or anything else, by the kind of the request
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Self, cast

from pydanube.core.commit.sessions import Sessions
from pydanube.errors import DanubeError
from pydanube.formats.batch import Batch, Envelope, encode, messages, parse, rows_of, stamp, topic_hash
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire

TOPIC = "/default/orders"
PRODUCER_ID = 77


class Peer(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, broker: ScriptedBroker) -> None:
        self.broker = broker
        self.decoder = frames.FrameDecoder(frames.FRAME_SIZE_LIMIT)
        self.transport: asyncio.Transport
        self.consumers = 0
        self.producers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.broker.is_closed:  # it was on its way when the broker died
            self.transport.abort()
            return
        self.broker.peers.append(self)
        self.broker.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.broker.peers:
            self.broker.peers.remove(self)

    def data_received(self, data: bytes) -> None:
        for frame in self.decoder.feed(data):
            self.broker.heard.append(frame)
            self.broker.changed.set()
            answer = self.broker.answers.get(frame.kind)
            if answer is not None:
                answer(self, frame)

    def send(self, command: pb.Command, *body: Any) -> None:
        data = b"".join(frames.encode(command, *body))
        for at in range(0, len(data), self.broker.piece_bytes or len(data)):
            self.transport.write(data[at : at + (self.broker.piece_bytes or len(data))])

    def answer(self, frame: frames.Frame, **kind: Any) -> None:
        self.send(pb.Command(request_id=frame.command.request_id, **kind))

    def refuse(self, frame: frames.Frame, error: DanubeError) -> None:
        self.answer(frame, error=to_wire(error))


Handler = Callable[[Peer, frames.Frame], None]


class ScriptedBroker:
    """Answers everything a client needs; tests change `answers`."""

    def __init__(self, *, partitions: int = 0, reliable: bool = True) -> None:
        self.partitions = partitions
        self.reliable = reliable
        self.heard: list[frames.Frame] = []
        self.changed = asyncio.Event()
        self.peers: list[Peer] = []
        self.connections = 0
        self.piece_bytes = 0  # frames are written in pieces of so many bytes; 0: whole
        self.keepalive_seconds = 0
        self.frame_size_max = frames.FRAME_SIZE_LIMIT
        self.sessions = Sessions()
        self.stored: dict[str, list[Batch]] = {}
        self.topics: dict[int, str] = {}  # by producer handle
        self.refusals: deque[DanubeError | None] = deque()  # of the next batches; None: take it
        self.held: deque[tuple[Peer, frames.Frame]] = deque()
        self.is_holding = False
        self.loses_receipts = False
        self.answers: dict[str, Handler] = {
            "hello": self.on_hello,
            "lookup": self.on_lookup,
            "open_producer": self.on_open_producer,
            "produce": self.on_produce,
            "close_producer": lambda peer, frame: peer.answer(frame, done=pb.Done()),
            "subscribe": self.on_subscribe,
            "ack": self.on_answered,
            "nack": self.on_answered,
            "get_lag": lambda peer, frame: peer.answer(frame, lag=pb.Lag()),
            "close_consumer": lambda peer, frame: peer.answer(frame, done=pb.Done()),
            "ping": lambda peer, frame: peer.answer(frame, pong=pb.Pong()),
            "goodbye": lambda peer, frame: peer.transport.close(),
        }
        self._server: asyncio.Server
        self.port = 0
        self.is_closed = False

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self.is_closed = False
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """As a broker that dies. `listen` brings it back on the same port."""
        self.is_closed = True
        self._server.close()
        self.drop()
        for _ in range(4):  # a connection that is being accepted is made in a task of its own, and then aborted
            await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"danube://127.0.0.1:{self.port}"

    # --- what tests do with it ----------------------------------------------------------------------

    def drop(self) -> None:
        self.held.clear()
        for peer in list(self.peers):
            peer.transport.abort()

    def hold(self) -> None:
        self.is_holding = True

    def release(self) -> None:
        self.is_holding = False
        while self.held:
            self.judge(*self.held.popleft())

    async def until(self, kind: str, count: int = 1) -> list[frames.Frame]:
        """The first `count` frames of this kind that were heard."""
        async with asyncio.timeout(10):
            while len(found := [frame for frame in self.heard if frame.kind == kind]) < count:
                self.changed.clear()
                await self.changed.wait()
        return found

    def kinds(self) -> list[str]:
        return [frame.kind for frame in self.heard]

    def payloads(self, topic: str = TOPIC) -> list[bytes]:
        return [message.payload for batch in self.stored.get(topic, []) for message in messages(batch)]

    def produced(self) -> list[Batch]:
        """Every batch that came, repetitions too."""
        return [parse(frame.body) for frame in self.heard if frame.kind == "produce"]

    def push(self, **kind: Any) -> None:
        for peer in self.peers:
            peer.send(pb.Command(**kind))

    def deliver(
        self,
        first: int,
        payloads: list[bytes],
        ranges: list[int] | None = None,
        *,
        attempt: int = 1,
        consumer: int = 1,
        epoch: int = 1,
    ) -> None:
        """A batch with these payloads, at offset `first`, to consumer 1 of the newest connection."""
        rows = rows_of([Envelope(payload, routing_key="k", attributes={"a": "b"}) for payload in payloads])
        batch = stamp(encode(rows, topic=TOPIC), base_offset=first, epoch=epoch, append_time=1)
        ranges = ranges or [first, first + len(payloads)]
        deliver = pb.Deliver(consumer=consumer, ranges=ranges, attempt=attempt)
        self.peers[-1].send(pb.Command(deliver=deliver), *batch.buffers)

    # --- what it does by itself ---------------------------------------------------------------------

    def on_hello(self, peer: Peer, frame: frames.Frame) -> None:
        welcome = pb.Welcome(
            version=frames.negotiate(frame.command.hello),
            broker_id=1,
            frame_size_max=self.frame_size_max,
            in_flight_max=frames.IN_FLIGHT_MAX,
            keepalive_seconds=self.keepalive_seconds,
        )
        peer.answer(frame, welcome=welcome)

    def on_lookup(self, peer: Peer, frame: frames.Frame) -> None:
        topic = frame.command.lookup.topic
        partitions = 0 if "-part-" in topic else self.partitions
        located = pb.Located(topic=topic, stream_url=self.url, is_local=True, partitions=partitions)
        peer.answer(frame, located=located)

    def on_open_producer(self, peer: Peer, frame: frames.Frame) -> None:
        request = frame.command.open_producer
        session = request.session
        if not session and self.reliable and not request.without_session:
            session = self.sessions.next_session(PRODUCER_ID, 1)
            self.sessions.opened(PRODUCER_ID, session)
        peer.producers += 1
        self.topics[peer.producers] = request.topic
        opened = pb.ProducerOpened(
            producer=peer.producers,
            producer_id=PRODUCER_ID if session else 0,
            session=session,
            topic_hash=topic_hash(request.topic),
            durability=pb.FSYNC if self.reliable else pb.MEMORY,
        )
        peer.answer(frame, producer_opened=opened)

    def on_produce(self, peer: Peer, frame: frames.Frame) -> None:
        if self.is_holding:
            self.held.append((peer, frame))
        else:
            self.judge(peer, frame)

    def judge(self, peer: Peer, frame: frames.Frame) -> None:
        """As a broker does: in sequence, a repetition, or refused."""
        refusal = self.refusals.popleft() if self.refusals else None
        if refusal is not None:
            peer.refuse(frame, refusal)
            return
        batch = parse(frame.body)
        header = batch.header
        topic = self.topics[frame.command.produce.producer]
        stored = self.stored.setdefault(topic, [])
        mark = (header.producer_id, header.session, header.first_sequence, header.rows, header.body_crc)
        offset = sum(each.header.rows for each in stored)
        duplicate = False
        if header.session:
            try:
                known = self.sessions.check(*mark)
            except DanubeError as error:
                peer.refuse(frame, error)
                return
            duplicate = known is not None
            offset = offset if known is None else known.base_offset
            if known is None:
                self.sessions.accepted(*mark, offset, 1)
        if not duplicate:
            stored.append(batch)
        if not self.loses_receipts:
            durability = pb.FSYNC if self.reliable else pb.MEMORY
            peer.answer(
                frame,
                receipt=pb.Receipt(
                    offset=offset, rows=header.rows, epoch=1, durability=durability, duplicate=duplicate
                ),
            )

    def on_subscribe(self, peer: Peer, frame: frames.Frame) -> None:
        peer.consumers += 1
        peer.answer(frame, subscribed=pb.Subscribed(consumer=peer.consumers, consumer_id=9))

    def on_answered(self, peer: Peer, frame: frames.Frame) -> None:
        if frame.command.request_id:
            peer.answer(frame, done=pb.Done())
