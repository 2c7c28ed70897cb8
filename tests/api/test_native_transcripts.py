"""What the native protocol's two ends say, byte for byte: `tests/fixtures/transcripts/*.txt`.

    0.000 > 18000000 1600 0801...   hello          bytes that the end under test reads, and the commands in them
    0.000 < 23000000 2100 0801...   welcome        bytes that it writes
    0.000 . closed                                 what it does besides

A broker, or a client's connection, runs on virtual time without a socket. With UPDATE_TRANSCRIPTS=1 in the environment
the files are rewritten; review the diff: a change here is a change of the protocol.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from pydanube.api.native import connection
from pydanube.client import connection as links
from pydanube.client.connection import BrokerConnection
from pydanube.errors import DanubeError
from pydanube.formats.batch import Envelope
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.frames import Frame
from tests.harness import peers
from tests.harness.brokers import ORDERS, BrokerFixture, now, settle, simulated
from tests.harness.peers import Peer, batch_of, greeting, server_of

FOLDER = Path(__file__).parent.parent / "fixtures" / "transcripts"
SHOWN_BYTES = 160  # of a longer line the beginning, the length and a checksum


class Transcript:
    """Lines, as they happen."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def title(self, text: str) -> None:
        self.lines += ["", f"# {text}"]

    def note(self, text: str) -> None:
        self.lines.append(f"{now():.3f} . {text}")

    def writes(self, data: Any) -> None:
        """A line for each frame: how many are written at once says nothing."""
        while data:
            end = 4 + int.from_bytes(data[:4], "little")
            self.bytes("<", data[:end])
            data = data[end:]

    def bytes(self, direction: str, data: Any) -> None:
        data, kinds = _read(data)
        shown = data.hex()
        if len(data) > SHOWN_BYTES:
            shown = f"{data[:SHOWN_BYTES].hex()}... {len(data)} bytes, crc32 {crc32(data):08x}"
        self.lines.append(f"{now():.3f} {direction} {shown}   {kinds}".rstrip())

    def check(self, name: str) -> None:
        path, found = FOLDER / f"{name}.txt", "\n".join(self.lines).strip() + "\n"
        if os.environ.get("UPDATE_TRANSCRIPTS"):
            path.write_text(found)
        assert found == path.read_text()


def _read(data: bytes) -> tuple[bytes, str]:
    """The data, with the fields of errors in one order (protobuf writes maps in any), and the commands in it."""
    decoder = frames.FrameDecoder(frames.FRAME_SIZE_LIMIT)
    try:
        found = decoder.feed(data)
    except frames.ProtocolViolation:  # type: ignore[attr-defined]
        return data, ""
    if [frame.kind for frame in found] == ["error"]:
        data = data[:6] + found[0].command.SerializeToString(deterministic=True)
    return data, " ".join(frame.kind for frame in found)


def packed(*body: Any, **command: Any) -> bytes:
    return b"".join(bytes(part) for part in frames.encode(pb.Command(**command), *body))


@pytest.fixture(autouse=True)
def fixed_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of both ends are part of their greetings, and times of batches."""
    monkeypatch.setattr(peers, "Envelope", partial(Envelope, publish_time=1_700_000_000_000_000))
    monkeypatch.setattr(connection, "_name", lambda: "PyDanube test")
    monkeypatch.setattr(links, "_client_name", lambda: "pydanube test")


# --- the broker's end -------------------------------------------------------------------------------


class Recorded(Peer):
    """A peer whose bytes are written down, both ways."""

    def __init__(self, server: Any, transcript: Transcript) -> None:
        self.transcript = transcript
        super().__init__(server)

    def write(self, data: bytes) -> None:
        self.transcript.bytes(">", data)
        super().write(data)

    def received(self, data: bytes) -> None:
        self.transcript.writes(data)
        super().received(data)

    async def end(self) -> None:
        await settle()
        how = "aborted" if self.transport.aborted else "closed" if self.is_closed else "open"
        self.transcript.note(how)


HELLO = packed(request_id=1, hello=greeting())
PING = packed(request_id=2, ping=pb.Ping())


@simulated
async def test_a_broker_serves_a_producer_and_a_consumer() -> None:
    host, transcript = BrokerFixture(), Transcript()
    await host.boot()
    peer = Recorded(server_of(host), transcript)
    transcript.title("greeting, looking up, producing")
    peer.write(HELLO)
    await peer.ask(lookup=pb.Lookup(topic=ORDERS))
    opened = await peer.open_producer()
    await peer.ask(lookup=pb.Lookup(topic=ORDERS))
    await peer.ask(open_producer=pb.OpenProducer(topic=ORDERS, producer_name="q", reliable=False))
    peer.produce(opened, 0, b"one", b"two")
    peer.produce(opened, 2, b"three")
    await settle()
    peer.produce(opened, 2, b"three")  # again
    await settle()
    transcript.title("consuming: acks and a ping in one read are answered in their order")
    subscribed = await peer.subscribe(messages=2)
    await settle()
    consumer = subscribed.consumer
    peer.write(
        packed(ack=pb.Ack(consumer=consumer, ranges=[0, 1], seeks=0))
        + packed(request_id=21, ack=pb.Ack(consumer=consumer, ranges=[1, 2], seeks=0))
        + PING
        + packed(request_id=22, ack=pb.Ack(consumer=consumer, ranges=[2, 9]))
        + packed(flow=pb.Flow(consumer=consumer, messages=5, bytes=5000))
    )
    await settle()
    await peer.ask(nack=pb.Nack(consumer=consumer, ranges=[2, 3], delay_ms=50))
    await asyncio.sleep(0.1)
    await peer.ask(get_lag=pb.GetLag(topic=ORDERS, subscription="s"))
    await peer.ask(seek=pb.Seek(topic=ORDERS, subscription="s", to=pb.Place(offset=0)))
    await settle()
    await peer.ask(fetch=pb.Fetch(topic=ORDERS, start=1))
    await peer.ask(close_consumer=pb.CloseConsumer(consumer=consumer))
    await peer.ask(ack=pb.Ack(consumer=consumer, ranges=[0, 1]))
    await peer.ask(close_producer=pb.CloseProducer(producer=opened.producer))
    peer.produce(opened, 3, b"late")
    transcript.title("goodbye: what was asked is still answered")
    peer.write(packed(request_id=31, fetch=pb.Fetch(topic=ORDERS, start=3, wait_ms=500)) + packed(goodbye=pb.Goodbye()))
    await asyncio.sleep(0.1)
    transcript.note("still open" if not peer.is_closed else "closed too early")
    await asyncio.sleep(1)
    await peer.end()
    transcript.check("broker-serves")


async def _answered(transcript: Transcript, server: Any, title: str, *reads: bytes) -> None:
    transcript.title(title)
    peer = Recorded(server, transcript)
    for data in reads:
        peer.write(data)
    await peer.end()
    if not peer.is_closed:
        peer.transport.abort()
        await settle()


@simulated
async def test_a_broker_answers_violations_with_one_error_and_the_end() -> None:
    host, transcript = BrokerFixture(), Transcript()
    await host.boot()
    server = server_of(host, frame_bytes=128 * 1024)
    lookup = packed(request_id=9, lookup=pb.Lookup(topic=ORDERS))
    cases: dict[str, tuple[bytes, ...]] = {
        "HTTP": (b"GET / HTTP/1.1\r\n\r\n",),
        "a wrong magic": (packed(request_id=1, hello=greeting(magic=7)),),
        "versions that this broker does not have": (
            packed(request_id=1, hello=greeting(version_min=2, version_max=9)),
        ),
        "versions that are none": (packed(request_id=1, hello=greeting(version_min=3, version_max=1)),),
        "versions of which it has one": (packed(request_id=1, hello=greeting(version_min=0, version_max=7)),),
        "frames that are too small": (packed(request_id=1, hello=greeting(frame_size_max=9)),),
        "a greeting without a request id": (packed(hello=greeting()),),
        "a command in front of the greeting": (lookup,),
        "a greeting that is too long": (struct.pack("<IH", 70_000, 10),),
        "a greeting byte by byte": tuple(HELLO[at : at + 1] for at in range(len(HELLO))),
        "a second greeting": (HELLO, HELLO),
        "a broker's command": (HELLO, packed(request_id=9, done=pb.Done())),
        "a request without an id": (HELLO, packed(lookup=pb.Lookup(topic=ORDERS))),
        "a batch without an id": (HELLO, packed(b"x", produce=pb.Produce(producer=1))),
        "a frame over the limit, behind a ping": (HELLO, PING + struct.pack("<IH", 128 * 1024 + 1, 10)),
        "an unknown kind": (HELLO, struct.pack("<IH", 2 + 3, 3) + b"\xa0\x3f\x01"),
        "no protobuf": (HELLO, struct.pack("<IH", 2 + 3, 3) + b"\xff\xff\xff"),
        "a body where none may be": (HELLO, packed(b"body", ping=pb.Ping())),
        "no body where one must be": (HELLO, packed(request_id=3, produce=pb.Produce(producer=1))),
        "a handle that never was": (HELLO, packed(ack=pb.Ack(consumer=9, ranges=[0, 1]))),
        "nothing is read behind a violation": (HELLO + packed(request_id=9, done=pb.Done()) + PING,),
        "pings with and without an id, and pongs": (HELLO + packed(ping=pb.Ping()) + PING + packed(pong=pb.Pong()),),
        "a goodbye": (HELLO, packed(goodbye=pb.Goodbye())),
    }
    for title, reads in cases.items():
        await _answered(transcript, server, title, *reads)
    transcript.title("too many in flight, in one read")
    peer = Recorded(server, transcript)
    peer.write(HELLO)
    opened = await peer.open_producer()
    batch = batch_of(opened, 0, b"x").to_bytes()
    peer.write(b"".join(packed(batch, request_id=50 + n, produce=pb.Produce(producer=1)) for n in range(9)))
    await peer.end()
    transcript.title("a connection too many")
    crowded = server_of(host, connections=0)
    await Recorded(crowded, transcript).end()
    transcript.check("broker-violations")


@simulated
async def test_a_broker_drops_peers_that_are_late() -> None:
    host, transcript = BrokerFixture(), Transcript()
    await host.boot()
    server = server_of(host, handshake_seconds=10, keepalive_seconds=15, frame_seconds=20, stuck_seconds=12)
    sweeping = asyncio.create_task(server._sweep())

    async def watch(title: str, *reads: bytes, takes_nothing: bool = False) -> Peer:
        transcript.title(title)
        await asyncio.sleep(0.3)  # so that no limit ends at the very moment of a sweep
        peer, began = Recorded(server, transcript), now()
        peer.transport.set_write_buffer_limits(high=100)
        for data in reads:
            peer.write(data)
            peer.takes_nothing = takes_nothing
        for _ in range(120):
            if peer.is_closed:
                break
            await asyncio.sleep(0.5)
        transcript.note(f"after {now() - began:.1f} s")
        await peer.end()
        return peer

    await watch("no greeting")
    await watch("half a greeting", HELLO[:9])
    await watch("silence", HELLO)
    await watch("half a frame", HELLO, PING[:5])
    await watch("an end that it does not take", HELLO, packed(ping=pb.Ping()) + HELLO, takes_nothing=True)
    await watch("answers that it does not take", HELLO, PING * 30, takes_nothing=True)
    transcript.title("a sign of life now and then, and the broker's goodbye")
    peer = Recorded(server, transcript)
    peer.write(HELLO)
    for _ in range(3):
        await asyncio.sleep(20)
        peer.write(packed(ping=pb.Ping()))
    closing = asyncio.create_task(server.close(grace_seconds=1))
    await settle()
    peer.write(packed(request_id=9, lookup=pb.Lookup(topic="/default/none")))
    await closing
    await peer.end()
    sweeping.cancel()
    transcript.check("broker-times")


# --- the client's end -------------------------------------------------------------------------------


class Wire(asyncio.Transport):
    """The client's end of a wire, which only writes down."""

    def __init__(self, transcript: Transcript, link: BrokerConnection) -> None:
        super().__init__()
        self._transcript, self._link, self._over = transcript, link, False

    def write(self, data: Any) -> None:
        assert not self._over, "nothing is written after the end"
        self._transcript.writes(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        self._end("close")

    def abort(self) -> None:
        self._end("abort")

    def _end(self, how: str) -> None:
        if not self._over:
            self._over = True
            self._transcript.note(how)
            asyncio.get_running_loop().call_soon(self._link.connection_lost, None)


class PartitionStub:
    """A producer or consumer that writes down what it is told."""

    def __init__(self, transcript: Transcript, name: str, topic: str = ORDERS) -> None:
        self.topic, self._name, self._transcript = topic, name, transcript

    def ended(self, link: BrokerConnection, error: DanubeError) -> None:
        self._transcript.note(f"{self._name} ended: {error}")

    def leave(self, link: BrokerConnection) -> None:
        self._transcript.note(f"{self._name} leaves")

    def delivered(self, ranges: Any, attempt: int, seeks: int, body: memoryview) -> None:
        pairs = [tuple(each) for each in ranges]
        self._transcript.note(f"{self._name} got {pairs} attempt {attempt} seeks {seeks} {bytes(body)!r}")

    def recalled(self, ranges: Any, seeks: int, taken: int) -> None:
        self._transcript.note(f"{self._name} recalled {[tuple(each) for each in ranges]} {seeks} {taken}")


class Client:
    """A link whose broker is the test."""

    def __init__(self, transcript: Transcript, title: str, url: str = "danube://there:6651") -> None:
        transcript.title(title)
        self.transcript = transcript
        self.link = BrokerConnection(url, "secret")
        self.wire = Wire(transcript, self.link)
        self.link.connection_made(self.wire)

    def hear(self, *data: bytes) -> None:
        for each in data:
            self.transcript.bytes(">", each)
            self.link.data_received(each)

    def hears(self, *body: Any, **command: Any) -> None:
        self.hear(packed(*body, **command))

    def greet(self, **fields: Any) -> Client:
        self.hears(request_id=1, welcome=welcome(**fields))
        return self

    def ask(self, name: str, *body: Any, **command: Any) -> None:
        def answered(answer: Frame | DanubeError) -> None:
            told = answer.kind if isinstance(answer, Frame) else f"{type(answer).__name__}: {answer}"
            self.transcript.note(f"{name} is answered: {told}")

        self.transcript.note(f"{name} has request id {self.link.ask(pb.Command(**command), answered, *body)}")

    def attach(self) -> None:
        self.link.producers[1] = PartitionStub(self.transcript, "producer 1")
        self.link.consumers[2] = PartitionStub(self.transcript, "consumer 2")
        self.link.consumers[3] = PartitionStub(self.transcript, "consumer 3", "/default/other")

    async def end(self) -> None:
        await settle()
        ended, link = self.link.ended, self.link
        told = "open" if ended is None else f"ended with {type(ended).__name__}: {ended}"
        self.transcript.note(f"{told}; usable {link.usable}, gone {link.closed.done()}")
        link.connection_lost(None)


def welcome(**fields: Any) -> pb.Welcome:
    known = {"version": 1, "broker_id": 7, "frame_size_max": 1 << 20, "in_flight_max": 8, "keepalive_seconds": 0}
    return pb.Welcome(**{**known, **fields})


LOOKUP = pb.Lookup(topic=ORDERS)
ERROR = pb.Error(code=pb.NOT_SERVED, sentence="it moves", retryable=True)


@simulated
async def test_a_client_asks_and_is_told() -> None:
    transcript = Transcript()
    client = Client(transcript, "greeting; answers in any order, and cut anywhere").greet()
    client.ask("first", lookup=LOOKUP)
    client.ask("second", b"batch", produce=pb.Produce(producer=1))
    client.ask("third", lookup=LOOKUP)
    client.link.say(pb.Command(flow=pb.Flow(consumer=2, messages=1)))
    answers = packed(request_id=5, error=ERROR) + packed(request_id=4, receipt=pb.Receipt(offset=9, rows=1))
    client.hear(answers[:7], answers[7:30], answers[30:])
    client.hears(request_id=3, located=pb.Located(topic=ORDERS))
    client.hears(request_id=3, located=pb.Located(topic=ORDERS))  # nothing waits for it
    client.hears(request_id=77, error=ERROR)
    client.hears(request_id=78, subscribed=pb.Subscribed(consumer=9))
    client.hears(request_id=79, producer_opened=pb.ProducerOpened(producer=8))
    client.hears(request_id=6, done=pb.Done())
    client.hears(request_id=5, ping=pb.Ping())
    client.hears(request_id=2, pong=pb.Pong())
    transcript.title("deliveries and news of handles")
    client.attach()
    client.hears(b"body", deliver=pb.Deliver(consumer=2, ranges=[1, 3], attempt=2, seeks=1))
    client.hears(b"body", deliver=pb.Deliver(consumer=9, ranges=[1, 3]))
    client.hears(recall=pb.Recall(consumer=2, ranges=[1, 2], seeks=1, taken=4))
    client.hears(error=pb.Error(code=pb.SUBSCRIPTION_BUSY, sentence="taken", consumer=2))
    client.hears(error=pb.Error(code=pb.SUBSCRIPTION_BUSY, sentence="taken", consumer=2))
    client.hears(moved=pb.Moved(topic=ORDERS, stream_url="danube://elsewhere:1"))
    client.ask("last", lookup=LOOKUP)
    client.hears(error=pb.Error(code=pb.UNAVAILABLE, sentence="everything ends", retryable=True))
    await client.end()
    client.ask("too late", lookup=LOOKUP)
    await settle()
    client.link.say(pb.Command(flow=pb.Flow(consumer=2, messages=1)))
    transcript.title("an answer of another kind")
    client = Client(transcript, "an answer of another kind").greet()
    asking = asyncio.ensure_future(client.link.request(pb.Command(lookup=LOOKUP), "located"))
    await settle()
    client.hears(request_id=3, done=pb.Done())
    [refusal] = await asyncio.gather(asking, return_exceptions=True)
    transcript.note(f"raised {refusal}")
    await client.end()
    client = Client(transcript, "an answer that comes after its caller has given up").greet()
    asking = asyncio.ensure_future(client.link.request(pb.Command(subscribe=pb.Subscribe(topic=ORDERS)), "subscribed"))
    await settle()
    client.hears(request_id=3, subscribed=pb.Subscribed(consumer=4))
    asking.cancel()
    asking = asyncio.ensure_future(client.link.request(pb.Command(subscribe=pb.Subscribe(topic=ORDERS)), "subscribed"))
    await settle()
    asking.cancel()
    await settle()
    client.hears(request_id=4, subscribed=pb.Subscribed(consumer=5))
    client.link.close()
    await client.end()
    transcript.check("client-asks")


@simulated
async def test_a_client_leaves_a_broker_that_says_goodbye() -> None:
    transcript = Transcript()
    client = Client(transcript, "goodbye while answers are missing").greet()
    client.attach()
    client.ask("first", lookup=LOOKUP)
    client.ask("second", lookup=LOOKUP)
    client.hears(goodbye=pb.Goodbye(reason="shutting down"))
    client.hears(request_id=4, error=ERROR)
    client.hears(request_id=7, pong=pb.Pong())
    client.hear(packed(request_id=3, located=pb.Located(topic=ORDERS)) + packed(request_id=5, ping=pb.Ping()))
    await client.end()
    client = Client(transcript, "goodbye while nothing is missing").greet()
    client.hears(goodbye=pb.Goodbye(reason="shutting down"))
    await client.end()
    client = Client(transcript, "goodbye while a caller waits that gives up").greet()
    asking = asyncio.ensure_future(client.link.request(pb.Command(lookup=LOOKUP), "located"))
    await settle()
    client.hears(goodbye=pb.Goodbye(reason="shutting down"))
    asking.cancel()
    await client.end()
    client = Client(transcript, "the client's own goodbye").greet()
    client.attach()
    client.ask("first", lookup=LOOKUP)
    client.link.close()
    client.hears(request_id=3, located=pb.Located(topic=ORDERS))
    await client.end()
    transcript.check("client-goodbye")


@simulated
async def test_a_client_that_meets_something_else_says_what_it_met() -> None:
    transcript = Transcript()

    async def met(title: str, *data: bytes, greeted: bool = False, url: str = "danube://there:6651") -> None:
        client = Client(transcript, title, url)
        if greeted:
            client.greet()
        client.ask("first", lookup=LOOKUP)
        client.hear(*data)
        if client.link.ended is None:
            client.link.connection_lost(ConnectionResetError(104, "Connection reset by peer"))
        await client.end()

    await met("HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n")
    await met("TLS", b"\x15\x03\x03\x00\x02\x02\x46")
    await met("nothing, and the end")
    await met("nothing, and the end, with TLS", url="danube+tls://there:6651")
    await met("another version", packed(request_id=1, welcome=welcome(version=2)))
    await met("absurd frames", packed(request_id=1, welcome=welcome(frame_size_max=9)))
    await met("absurd batches in flight", packed(request_id=1, welcome=welcome(in_flight_max=9)))
    await met("a refusal", packed(request_id=1, error=pb.Error(code=pb.LIMIT_REACHED, sentence="too many")))
    await met("no greeting", packed(request_id=1, done=pb.Done()))
    await met("a greeting that is too long", struct.pack("<IH", 70_000, 10))
    await met("the end", greeted=True)
    await met("no protobuf", struct.pack("<IH", 2 + 3, 3) + b"\xff\xff\xff", greeted=True)
    await met("an unknown kind", struct.pack("<IH", 2 + 3, 3) + b"\xa0\x3f\x01", greeted=True)
    await met("a frame that nobody may send", struct.pack("<IH", frames.FRAME_SIZE_LIMIT + 1, 3), greeted=True)
    await met("half a frame", packed(request_id=3, located=pb.Located(topic=ORDERS))[:-1], greeted=True)
    transcript.check("client-meets")


@simulated
async def test_a_client_notices_a_silent_broker() -> None:
    transcript = Transcript()

    async def silence(title: str, act: Callable[[Client], Awaitable[None]]) -> None:
        client = Client(transcript, title).greet(keepalive_seconds=15)
        await act(client)
        await asyncio.sleep(40)
        await client.end()

    async def nothing(client: Client) -> None: ...

    async def talks(client: Client) -> None:
        for _ in range(10):
            await asyncio.sleep(4)
            client.link.say(pb.Command(flow=pb.Flow(consumer=2, messages=1)))
            client.hears(request_id=2, pong=pb.Pong())

    async def only_listens(client: Client) -> None:
        for _ in range(10):
            await asyncio.sleep(4)
            client.hears(request_id=2, pong=pb.Pong())

    async def only_says(client: Client) -> None:
        for _ in range(10):
            await asyncio.sleep(2)
            client.link.say(pb.Command(flow=pb.Flow(consumer=2, messages=1)))

    await silence("silence on both sides", nothing)
    await silence("both talk", talks)
    await silence("only the broker talks", only_listens)
    await silence("only the client talks", only_says)
    transcript.check("client-times")
