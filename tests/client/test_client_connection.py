"""Finding brokers, deadlines, keepalive, and calls that are asked again."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

import pydanube
import pydanube.testing
from pydanube.client import brokers as connection
from pydanube.client.brokers import BACKOFF_MAX_SECONDS, Address, Brokers, RetryDelay, addresses_of
from pydanube.client.client import TIMEOUT_SECONDS, Client
from pydanube.client.connector import P, SystemConnector
from pydanube.client.partition_consumer import PartitionConsumer
from pydanube.config import ClusterConfig
from pydanube.errors import (
    ClientClosed,
    ConfigError,
    DanubeError,
    DeadlineExceeded,
    LimitReached,
    NotServed,
    ProtocolViolation,
    TopicExists,
    Unreachable,
)
from pydanube.formats.batch import Envelope, encode, rows_of, stamp
from pydanube.testing.ports import free_ports
from pydanube.wire import frames, strangers
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire
from tests.harness.scripted import TOPIC, ScriptedBroker
from tests.support import run, settle

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("danube://10.0.0.1:7000", Address("10.0.0.1", 7000, False)),
        ("danube+tls://broker.example", Address("broker.example", 6651, True)),
        ("localhost:1234", Address("localhost", 1234, False)),
        ("danube://[::1]:7000", Address("::1", 7000, False)),
    ],
)
def test_a_url_is_an_address_and_back(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("url", ["", "http://a:1", "danube://", "danube://a:99999", "danube://a/b", "danube://a:1?x=1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        addresses_of(url)


def test_several_brokers_are_a_list_or_a_text_with_commas() -> None:
    assert addresses_of("a:1, b:2,a:1") == addresses_of(["a:1", "b:2"])


def test_waiting_grows_to_a_bound_and_is_never_the_same() -> None:
    backoff = RetryDelay(Random(1))
    waits = [backoff.seconds() for _ in range(50)]
    assert waits[0] <= 0.05 and all(BACKOFF_MAX_SECONDS / 2 <= wait <= BACKOFF_MAX_SECONDS for wait in waits[10:])
    assert len(set(waits)) == 50


def test_a_call_waits_for_longer_than_a_takeover_takes_at_the_default_lease() -> None:
    lease = ClusterConfig().ttl_seconds
    assert (
        1.5 * lease <= TIMEOUT_SECONDS
    )  # from the last renewal; then the leader notices, and somebody opens the topic


def test_one_broker_that_answers_is_enough() -> None:
    async def inside() -> None:
        nobody = [f"danube://127.0.0.1:{port}" for port in free_ports(3)]
        async with ScriptedBroker() as broker, pydanube.connect([*nobody, broker.url], timeout=5) as client:
            assert (await client.lookup(TOPIC)).stream_url == broker.url

    run(inside())


def test_an_order_is_not_told_to_a_broker_that_is_older_than_the_telling() -> None:
    async def story() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            assert not await client.note_order("RedriveLetters", TOPIC, count=1)
            assert "note_order" not in broker.kinds()
            await client.lookup(TOPIC)  # the connection is as it was

    run(story())


def test_nobody_who_answers_is_told_with_every_address() -> None:
    async def inside() -> None:
        [port] = free_ports(1)
        with pytest.raises(DeadlineExceeded, match=str(port)) as caught:
            async with pydanube.connect(f"127.0.0.1:{port}", timeout=0.3):
                pass
        assert caught.value.retryable

    run(inside())


def test_a_broker_that_is_not_there_is_said_once() -> None:
    async def inside() -> None:
        one, other = (f"danube://127.0.0.1:{port}" for port in free_ports(2))
        with pytest.raises(DeadlineExceeded) as caught:
            await pydanube.connect(one, timeout=1).open()
        assert str(caught.value) == f"connecting took longer than 1 s: {one} cannot be reached: Connection refused"
        with pytest.raises(Unreachable) as nobody:
            await Brokers(addresses_of([one, other])).any()
        both = " and ".join(sorted([one, other]))
        assert str(nobody.value) == f"{both} cannot be reached: Connection refused"

    run(inside())


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"\0\0\x18\x04\0\0\0\0\0\0\x04\0@\0\0", "that is a gRPC port .*; the native port is usually 6651"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "that is an HTTP port .*; the native port is usually 6651"),
        (b"\x15\x03\x03\0\x02\x02\x0a", r"that port speaks TLS: use danube\+tls://"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "that is an SSH port"),
    ],
)
def test_a_wrong_port_is_named(answer: bytes, says: str) -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            broker.answers["hello"] = lambda peer, frame: peer.transport.write(answer)
            with pytest.raises(ConfigError, match=says):
                await pydanube.connect(broker.url, timeout=5).open()

    run(inside())


def test_a_port_that_says_nothing_may_be_the_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DIAL_SECONDS", 0.05)

    async def inside() -> None:
        async with ScriptedBroker() as broker:
            del broker.answers["hello"]
            with pytest.raises(DeadlineExceeded, match=r"said nothing within .*: the native port is usually 6651"):
                await pydanube.connect(broker.url, timeout=1).open()

    run(inside())


def test_a_grpc_port_of_a_real_broker_is_named() -> None:
    async def inside() -> None:
        async with pydanube.testing.broker(memory=True) as broker:
            for url in (broker.grpc_url, broker.admin_url):
                with pytest.raises(ConfigError, match="that is a gRPC port"):
                    await pydanube.connect(url.replace("http://", "danube://"), timeout=5).open()

    run(inside())


def test_no_greeting_of_a_broker_is_taken_for_a_stranger() -> None:
    for size in (9, 1024, frames.HANDSHAKE_SIZE_MAX):  # with the length in front, little endian
        assert strangers.advice(size.to_bytes(4, "little") + bytes(8)) is None


def test_a_client_knows_whether_it_is_connected_and_how_often_that_ended() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            client = pydanube.connect(broker.url, timeout=5)
            assert not client.is_connected and client.statistics().connections_opened == 0
            async with client, client.producer(TOPIC), client.consumer(TOPIC, subscription="s"):
                assert client.is_connected and await client.ping() >= 0
                before = client.statistics()
                assert before == pydanube.Statistics([broker.url], 1, 0, 1, 1, "")
                broker.drop()
                await client.ping()  # on a new connection: nobody answers on the old one
                after = client.statistics()
                assert client.is_connected and after.connections_opened >= 2 and after.connections_lost == 1
                assert after.last_error.startswith(f"{broker.url} cannot be reached")
            assert not client.is_connected

    run(inside())


def test_an_application_is_told_when_a_connection_opens_and_when_it_is_lost() -> None:
    told: list[tuple[str, str]] = []

    def tell(url: str, error: pydanube.DanubeError | None) -> None:
        told.append((url, type(error).__name__))
        raise ValueError("an application's mistake")

    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url, timeout=5, on_connection=tell) as client:
            broker.drop()
            await client.ping()
            url = broker.url
        assert told == [(url, "NoneType"), (url, "Unreachable"), (url, "NoneType")]  # closing it is no loss

    run(inside())


def test_a_ping_that_nobody_answers_says_why() -> None:
    async def inside() -> None:
        broker = ScriptedBroker()
        async with broker, pydanube.connect(broker.url, timeout=5) as client:
            await broker.close()
            with pytest.raises(DeadlineExceeded, match=r"a ping took longer than 1 s: .* cannot be reached"):
                await client.ping(timeout=1)
            assert not client.is_connected

    run(inside())


def test_another_broker_takes_over_when_one_is_lost() -> None:
    async def inside() -> None:
        async with (
            ScriptedBroker() as first,
            ScriptedBroker() as second,
            pydanube.connect([first.url, second.url], timeout=5) as client,
            client.producer(TOPIC, idempotent=False) as producer,
        ):
            await producer.send(b"a")
            used, other = (first, second) if first.stored else (second, first)
            await used.close()
            await producer.send(b"b")
            assert other.payloads() == [b"b"]

    run(inside())


def test_a_topic_elsewhere_is_opened_elsewhere() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as asked, ScriptedBroker() as owner, pydanube.connect(asked.url) as client:
            asked.answers["lookup"] = lambda peer, frame: peer.answer(
                frame, located=pb.Located(topic=TOPIC, stream_url=owner.url)
            )
            async with client.producer(TOPIC) as producer:
                await producer.send(b"a")
            assert owner.payloads() == [b"a"] and asked.payloads() == []
            assert client.brokers == [asked.url, owner.url]

    run(inside())


class Tunnel(SystemConnector):
    """Stands for TLS: scripted brokers speak none. Remembers whom the client called, and how."""

    def __init__(self) -> None:
        self.dialed: list[tuple[int, bool]] = []

    async def connect(self, make: Callable[[], P], host: str, port: int, tls: ssl.SSLContext | None) -> P:
        self.dialed.append((port, tls is not None))
        return await super().connect(make, host, port, None)


@pytest.mark.parametrize("way", ["lookup", "moved", "storages"])
def test_a_client_that_speaks_tls_does_not_follow_anyone_to_where_its_token_would_be_read(way: str) -> None:
    async def inside() -> None:
        tunnel = Tunnel()
        async with ScriptedBroker() as asked, ScriptedBroker() as thief:
            named = pb.Located(topic=TOPIC, stream_url=thief.url)
            secure = asked.url.replace("danube", "danube+tls")
            async with Client(secure, token="hunter2", connector=tunnel) as client:
                if way == "moved":
                    async with client.producer(TOPIC) as producer:
                        await producer.send(b"a")
                        asked.peers[0].send(pb.Command(moved=pb.Moved(topic=TOPIC, stream_url=thief.url)))
                        await producer.send(b"b")
                    assert asked.payloads() == [b"a", b"b"], "it asks where the topic is, and is not sent there"
                else:
                    asked.answers["lookup"] = lambda peer, frame: peer.answer(frame, located=named)
                    call = client.describe_storages([TOPIC], timeout=1) if way == "storages" else None
                    with pytest.raises(DanubeError) as caught:
                        if call is None:
                            await client.producer(TOPIC, timeout=1).__aenter__()
                        else:
                            [found] = (await call).values()
                            raise found if isinstance(found, DanubeError) else AssertionError(found)
                    if way == "lookup":
                        assert "without TLS" in str(caught.value) and thief.url in str(caught.value)
        assert thief.connections == 0
        assert set(tunnel.dialed) == {(Address.parse(asked.url).port, True)}

    run(inside())


def test_a_broker_without_tls_that_the_application_names_itself_may_be_used() -> None:
    async def inside() -> None:
        tunnel = Tunnel()
        async with ScriptedBroker() as asked, ScriptedBroker() as owner:
            urls = [asked.url.replace("danube", "danube+tls"), owner.url]
            for each in (asked, owner):
                each.answers["lookup"] = lambda peer, frame: peer.answer(
                    frame, located=pb.Located(topic=TOPIC, stream_url=owner.url)
                )
            async with Client(urls, connector=tunnel) as client, client.producer(TOPIC) as producer:
                await producer.send(b"a")
            assert owner.payloads() == [b"a"]

    run(inside())


@pytest.mark.parametrize("is_sick", [True, False])
def test_a_broker_that_cannot_say_where_topics_are_is_passed_over_for_one_that_can(is_sick: bool) -> None:
    async def inside() -> None:
        [nobody] = free_ports(1)
        async with ScriptedBroker() as cut_off, ScriptedBroker() as other, pydanube.connect(cut_off.url) as client:
            if is_sick:
                cut_off.answers["lookup"] = lambda peer, frame: peer.refuse(frame, Unreachable("etcd", "timed out"))
            else:  # it believes what was true once
                for kind in ("open_producer", "describe_topic"):
                    cut_off.answers[kind] = lambda peer, frame: peer.refuse(frame, NotServed(TOPIC, "no lease"))
            other.answers["describe_topic"] = lambda peer, frame: peer.answer(
                frame, topic_info=pb.TopicInfo(topic=TOPIC, reliable=True, head=7)
            )
            # As if they had been given to `connect`, and the first of them had been the first to answer.
            client._brokers._known.update(dict.fromkeys(addresses_of([f"127.0.0.1:{nobody}", other.url])))
            async with client.producer(TOPIC, timeout=5) as producer:
                await producer.send(b"a")
            assert other.payloads() == [b"a"]
            other.peers[0].transport.abort()
            client._brokers._failed_at.clear()
            assert (await client.describe_topic(TOPIC, timeout=5)).head == 7
            assert (await client.lookup(TOPIC)).stream_url == other.url
            assert other.connections == 2 and cut_off.connections == 1

    run(inside())


def test_a_broker_that_is_away_is_not_dialed_at_every_question_to_one_that_has_recovered() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, ScriptedBroker() as away, pydanube.connect(broker.url) as client:
            away.answers["hello"] = lambda peer, frame: peer.transport.abort()
            client._brokers._known.update(dict.fromkeys(addresses_of(away.url)))
            client._brokers.deprioritize(broker.url)
            await client.lookup(TOPIC)
            await away.until("hello")
            await asyncio.gather(*client._brokers._dialing.values(), return_exceptions=True)
            for _ in range(5):
                await client.lookup(TOPIC)
            assert away.connections == 1 and broker.connections == 1

    run(inside())


def test_whoever_names_the_wrong_broker_is_passed_over_and_not_the_one_he_names() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as asked, ScriptedBroker() as named, ScriptedBroker() as owner:
            for broker, other in ((asked, named), (named, owner)):
                located = pb.Located(topic=TOPIC, stream_url=other.url)
                broker.answers["lookup"] = partial(
                    lambda place, peer, frame: peer.answer(frame, located=place), located
                )
            named.answers["open_producer"] = lambda peer, frame: peer.refuse(frame, NotServed(TOPIC, "it was once"))
            async with pydanube.connect(asked.url) as client, client.producer(TOPIC, timeout=5) as producer:
                await producer.send(b"a")
            assert owner.payloads() == [b"a"]

    run(inside())


def test_a_full_broker_is_tried_again_by_those_who_were_there_before() -> None:
    async def inside() -> None:
        async with (
            ScriptedBroker() as broker,
            pydanube.connect(broker.url) as client,
            client.producer(TOPIC) as producer,
        ):
            hello = broker.answers["hello"]

            def full(peer: Any, frame: Any) -> None:
                peer.send(pb.Command(error=to_wire(LimitReached("connections", 1))))
                peer.transport.close()

            broker.answers["hello"] = full
            broker.drop()
            await broker.until("hello", 3)
            with pytest.raises(LimitReached):  # whoever is new is told at once
                await pydanube.connect(broker.url).open()
            broker.answers["hello"] = hello
            assert (await producer.send(b"a", timeout=5)).offset == 0

    run(inside())


def test_a_call_is_asked_again_while_time_may_help_and_no_longer_than_its_deadline() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            refusals = [NotServed(TOPIC, "moving")] * 2

            def describe(peer: Any, frame: Any) -> None:
                if refusals:
                    peer.refuse(frame, refusals.pop())
                else:
                    peer.answer(frame, topic_info=pb.TopicInfo(topic=TOPIC, reliable=True, head=7))

            broker.answers["describe_topic"] = describe
            assert (await client.describe_topic(TOPIC)).head == 7
            refusals.extend([NotServed(TOPIC, "still moving")] * 100)
            with pytest.raises(DeadlineExceeded, match="still moving"):
                await client.describe_topic(TOPIC, timeout=0.3)
            with pytest.raises(DeadlineExceeded):
                await client.delete_topic(TOPIC, timeout=0.05)  # nobody answers that

    run(inside())


def test_creating_a_topic_whose_answer_was_lost_is_done() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            created: list[str] = []

            def create(peer: Any, frame: Any) -> None:
                if created:
                    peer.refuse(frame, TopicExists(TOPIC, "it is there"))
                else:
                    created.append(TOPIC)
                    peer.transport.abort()

            broker.answers["create_topic"] = create
            await client.create_topic(TOPIC)
            with pytest.raises(TopicExists):
                await client.create_topic(TOPIC)
            await client.create_topic(TOPIC, exist_ok=True)

    run(inside())


def test_a_silent_broker_is_noticed_and_left() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            broker.keepalive_seconds = 1
            async with pydanube.connect(broker.url, timeout=10) as client, client.producer(TOPIC) as producer:
                await broker.until("ping")  # we are idle, and say so
                broker.answers["ping"] = lambda peer, frame: None
                await broker.until("open_producer", 2)
                broker.answers["ping"] = lambda peer, frame: peer.answer(frame, pong=pb.Pong())
                assert (await producer.send(b"a")).offset == 0

    run(inside())


def test_a_peer_of_another_protocol_is_a_violation_and_not_asked_for_ever() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            broker.answers["hello"] = lambda peer, frame: peer.transport.write(b"what is a hello?\r\n")
            with pytest.raises(ProtocolViolation):
                await pydanube.connect(broker.url, timeout=5).open()
            assert broker.connections == 1

    run(inside())


def test_a_closed_client_refuses() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            async with pydanube.connect(broker.url) as client:
                pass
            with pytest.raises(ClientClosed):
                await client.lookup(TOPIC)

    run(inside())


def test_closing_the_client_while_it_connects_ends_every_call_and_every_loop() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            client = await pydanube.connect(broker.url).open()
            consumer = await client.consumer(TOPIC, subscription="s").open()
            producer = await client.producer(TOPIC).open()
            broker.answers["hello"] = lambda peer, frame: None  # it takes connections, and says nothing
            broker.drop()
            await broker.until("hello", 2)
            calls = [anext(aiter(consumer)), producer.send(b"a"), client.list_topics()]
            waiting = [asyncio.ensure_future(call) for call in calls]
            await settle()
            await client.close()
            async with asyncio.timeout(5):
                errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(error) for error in errors] == [ClientClosed] * 3

    run(inside())


@pytest.mark.parametrize("what", ["consumer", "producer", "publisher"])
def test_what_opens_after_its_opener_has_given_up_is_closed(what: str) -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            opening = {
                "consumer": lambda: client.consumer(TOPIC, subscription="s"),
                "producer": lambda: client.producer(TOPIC, exclusive=True),
                "publisher": lambda: client.publisher(TOPIC, "p"),
            }[what]()
            kind, close = ("subscribe", "close_consumer") if what == "consumer" else ("open_producer", "close_producer")
            answer, held = broker.answers[kind], []
            broker.answers[kind] = lambda peer, frame: held.append((peer, frame))
            task = asyncio.ensure_future(opening.__aenter__())  # type: ignore[attr-defined]
            [asked] = await broker.until(kind)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            answer(*held[0])
            [closed] = await broker.until(close)
            assert (closed.command.close_consumer.consumer or closed.command.close_producer.producer) == 1
            assert (await client.lookup(TOPIC)).stream_url == broker.url  # the connection goes on
            assert broker.connections == 1 and asked.command.request_id != closed.command.request_id

    run(inside())


def test_what_opens_in_the_moment_in_which_its_opener_gives_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            connection = await client._brokers.any()
            broker.answers["subscribe"] = lambda peer, frame: None
            asking = asyncio.ensure_future(
                connection.request(pb.Command(subscribe=pb.Subscribe(topic=TOPIC)), "subscribed")
            )
            [asked] = await broker.until("subscribe")
            asking.cancel()  # and before it can notice:
            answer = pb.Command(request_id=asked.command.request_id, subscribed=pb.Subscribed(consumer=7))
            connection.data_received(b"".join(frames.encode(answer)))
            [closed] = await broker.until("close_consumer")
            assert closed.command.close_consumer.consumer == 7

            broker.answers["subscribe"] = broker.on_subscribe
            open_at = PartitionConsumer._open_at

            async def too_late(self: PartitionConsumer, connection: Any) -> None:
                await open_at(self, connection)
                monkeypatch.undo()
                await asyncio.sleep(60)

            monkeypatch.setattr("pydanube.client.partition_handle.OPEN_SECONDS", 0.3)
            monkeypatch.setattr(PartitionConsumer, "_open_at", too_late)
            async with client.consumer(TOPIC, subscription="s", timeout=5):
                closed = (await broker.until("close_consumer", 2))[-1]
                assert closed.command.close_consumer.consumer == 1
                assert list(connection.consumers) == [2]

    run(inside())


def test_opening_what_is_open_opens_nothing() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            producer = await client.producer(TOPIC).open()
            consumer = await client.consumer(TOPIC, subscription="s").open()
            async with producer, consumer:
                await producer.send(b"a")
            assert sorted(kind for kind in broker.kinds() if "open" in kind or "subscribe" in kind) == [
                "open_producer",
                "subscribe",
            ]
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(("producer", "consumer"))]

    run(inside())


def test_fetching_steps_over_gaps_and_cuts_both_ends() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:

            def batch(first: int, number: int) -> bytes:
                rows = rows_of([Envelope(b"%d" % (first + row)) for row in range(number)])
                return stamp(encode(rows, topic=TOPIC), base_offset=first, epoch=1, append_time=1).to_bytes()

            log = {0: batch(0, 4) + batch(4, 4), 8: b"", 20: batch(20, 4)}
            after = {0: 8, 8: 20, 20: 24}

            def fetch(peer: Any, frame: Any) -> None:
                start = next(at for at in (20, 8, 0) if at <= frame.command.fetch.start)
                fetched = pb.Fetched(next_offset=after[start], head=24)
                peer.send(pb.Command(request_id=frame.command.request_id, fetched=fetched), log[start])

            broker.answers["fetch"] = fetch
            table = await client.fetch(TOPIC, 2, 22).table()
            assert table.column("offset").to_pylist() == [2, 3, 4, 5, 6, 7, 20, 21]
            assert table.column("payload").to_pylist()[-1] == b"21"

    run(inside())


def test_importing_the_package_loads_neither_arrow_nor_grpc() -> None:
    code = "import sys, pydanube; print(sorted({'pyarrow', 'grpc', 'asyncio', 'google.protobuf'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert {name for name in pydanube.__all__ if getattr(pydanube, name, None) is None} == set()
