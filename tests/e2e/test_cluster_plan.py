"""Topics that move, as the plans describe it, with real processes: three brokers, a member of etcd beside each, and a
store that speaks S3. What is promised is read where it is kept: in etcd, in the store, on the brokers' disks.

Of the tests in the plan for unloading, the fifth needs a cursor that cannot be stored while everything else can: these
brokers cannot store any of a subscription whose name begins with `unlucky`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

import pydanube
from pydanube.core import keys
from pydanube.core.names import BrokerId, SubscriptionName, TopicName
from pydanube.stores.metadata.etcd import CLIENT_PORT_OFFSET, EtcdMetadataStore
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as schema_pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours
from tests.e2e.clusters import UNWILLING, ClusterBroker, ClusterProcesses, cluster_in
from tests.e2e.objectstores import S3Server
from tests.e2e.tcp_proxy import Line
from tests.stubs.danube import DanubeAdmin_pb2_grpc as stubs
from tests.stubs.danube import SchemaRegistry_pb2_grpc as schema_stubs
from tests.stubs.pydanube import admin_pb2_grpc as our_stubs
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUMBERS = count()
PATIENCE = 60.0


class Kept:
    """What the cluster keeps about a topic."""

    def __init__(self, store: EtcdMetadataStore, cluster: ClusterProcesses) -> None:
        self._store = store
        self._cluster = cluster

    async def value(self, key: str) -> Any:
        item = await self._store.get(key)
        return json.loads(item.value) if item else None

    async def below(self, prefix: keys.Prefix) -> list[str]:
        return [item.key for item in await self._store.list(prefix)]

    async def cursor(self, topic: TopicName, subscription: str) -> Any:
        return await self.value(keys.cursor(topic, SubscriptionName(subscription)))

    async def descriptors(self, topic: TopicName) -> list[tuple[int, int]]:
        found = [json.loads(item.value) for item in await self._store.list(keys.storage_objects(topic))]
        return [(each["start_offset"], each["end_offset"]) for each in found]

    async def host(self, topic: TopicName, other_than: ClusterBroker | None = None) -> ClusterBroker:
        """Who has it, as soon as somebody (else) has."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for item in await self._store.list(keys.BROKERS):
                    found = keys.assignment_of(item.key)
                    if found is not None and found[1] == topic:
                        broker = self._cluster.by_id(str(found[0]))
                        if broker is not None and broker is not other_than:
                            return broker
                await asyncio.sleep(0.05)

    async def orphans(self, topic: TopicName) -> int:
        return len(await self._store.list(keys.orphans(topic)))


@contextlib.asynccontextmanager
async def looking(cluster: ClusterProcesses) -> AsyncIterator[tuple[pydanube.Client, Kept]]:
    addresses = [broker.raft_addr.rpartition(":") for broker in cluster.brokers]
    store = EtcdMetadataStore([f"{host}:{int(port) + CLIENT_PORT_OFFSET}" for host, _, port in addresses])
    try:
        async with pydanube.connect(cluster.url, timeout=PATIENCE) as client:
            yield client, Kept(store, cluster)
    finally:
        await store.close()


async def unload(cluster: ClusterProcesses, topic: TopicName, asked: ClusterBroker | None = None) -> None:
    """Asked of whichever broker; answered when the old owner has let go."""
    async with grpc.aio.insecure_channel((asked or cluster.living[0]).endpoint.removeprefix("http://")) as channel:
        await stubs.TopicAdminStub(channel).UnloadTopic(pb.TopicRequest(name=topic), timeout=PATIENCE)


async def register(cluster: ClusterProcesses, subject: str) -> None:
    """Of any broker, and at its admin port, too."""
    async with grpc.aio.insecure_channel(cluster.living[0].endpoint.removeprefix("http://")) as channel:
        request = schema_pb.RegisterSchemaRequest(subject=subject, schema_type="string")
        await schema_stubs.SchemaRegistryStub(channel).RegisterSchema(request, timeout=PATIENCE)


async def unload_to(target: ClusterBroker, topic: TopicName, asked: ClusterBroker) -> None:
    """The same, to a broker of our choice."""
    async with grpc.aio.insecure_channel(asked.endpoint.removeprefix("http://")) as channel:
        request = ours.UnloadTopicRequest(topic=topic, to_broker=int(target.broker_id))
        async for _ in our_stubs.AdminStub(channel).UnloadTopic(request, timeout=PATIENCE):
            pass


@contextlib.asynccontextmanager
async def never_stopping(client: pydanube.Client, topic: TopicName, reliable: bool = True) -> AsyncIterator[list[int]]:
    """A producer that sends all the time; the list grows by the offsets of what was acknowledged."""
    offsets: list[int] = []
    async with client.producer(topic, reliable=reliable) as producer:

        async def send() -> None:
            while True:
                with contextlib.suppress(pydanube.errors.Unavailable):
                    offsets.append((await producer.send(b"more")).offset)
                await asyncio.sleep(0.01)

        sending = asyncio.create_task(send())
        try:
            yield offsets
            before = len(offsets)
            async with asyncio.timeout(PATIENCE):
                while len(offsets) < before + 5:  # it goes on afterwards  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def receive(client: pydanube.Client, topic: TopicName, subscription: str, number: int) -> list[int]:
    """So many messages, each acknowledged; their offsets."""
    found = []
    async with client.consumer(topic, subscription=subscription, start="earliest") as consumer:
        for _ in range(number):
            message = await consumer.receive(timeout=PATIENCE)
            found.append(message.offset)
            await message.ack()
        await consumer.flush()
    return found


@pytest.fixture(scope="module")
def line(s3_server: S3Server) -> Iterator[Line]:
    """The brokers' way to the object store."""
    with Line(s3_server.port) as opened:
        yield opened


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server, line: Line) -> Iterator[ClusterProcesses]:
    """Nothing is uploaded but by a move: so it is known which tier a message comes from."""
    directory = tmp_path_factory.mktemp("plan")
    config = directory / "broker.yml"
    config.write_text(yaml.safe_dump({"storage": {"durable": {**s3_server.options, "endpoint": line.endpoint}}}))
    flags = ("--config-file", str(config), "--upload-interval", "3600")
    with cluster_in(directory, *flags, storage=s3_server.url(), program=UNWILLING) as started:
        yield started


@pytest.fixture
def topic() -> TopicName:
    return TopicName(f"/default/plan{next(NUMBERS)}")


def test_the_timeline_of_a_move(cluster: ClusterProcesses, topic: TopicName) -> None:
    """22 messages, cursor 13, moved; six more; 14 to 21 come from the object store, 22 to 27 from the log."""

    async def story() -> None:
        async with looking(cluster) as (client, kept):
            async with client.producer(topic) as producer:
                assert [(await producer.send(b"%d" % n)).offset for n in range(22)] == list(range(22))
            assert await receive(client, topic, "subs_reliable", 14) == list(range(14))
            old = await kept.host(topic)
            await unload(cluster, topic)
            seal = await kept.value(keys.seal(topic))
            assert (seal["sealed"], seal["last_committed_offset"]) == (True, 21)
            assert await kept.cursor(topic, "subs_reliable") == 13
            new = await kept.host(topic, other_than=old)
            async with asyncio.timeout(PATIENCE):
                while (old.data_dir / "wal" / topic[1:]).exists():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            async with client.producer(topic) as producer:
                assert [(await producer.send(b"%d" % n)).offset for n in range(22, 28)] == list(range(22, 28))
            assert await kept.descriptors(topic) == [(0, 21)], "so the rest is in the log alone"
            assert (new.data_dir / "wal" / topic[1:]).exists()
            assert await receive(client, topic, "subs_reliable", 14) == list(range(14, 28))
            await unload(cluster, topic)
            assert await kept.descriptors(topic) == [(0, 21), (22, 27)]
            assert await kept.cursor(topic, "subs_reliable") == 27

    run(story())


def test_a_consumer_goes_on_behind_its_stored_cursor_through_both_tiers(
    cluster: ClusterProcesses, topic: TopicName
) -> None:
    """The sequence diagram: stored cursor 5, moved; 6 to 21 come from the object store, 22 to 27 from the log."""

    async def story() -> None:
        async with looking(cluster) as (client, kept):
            async with client.producer(topic) as producer:
                assert [(await producer.send(b"%d" % n)).offset for n in range(22)] == list(range(22))
            assert await receive(client, topic, "sub", 6) == list(range(6))
            old = await kept.host(topic)
            await unload(cluster, topic)
            assert await kept.cursor(topic, "sub") == 5
            new = await kept.host(topic, other_than=old)
            async with client.producer(topic) as producer:
                assert [(await producer.send(b"%d" % n)).offset for n in range(22, 28)] == list(range(22, 28))
            assert await kept.descriptors(topic) == [(0, 21)], "so the rest is in the log alone"
            [segment] = (new.data_dir / "wal" / topic[1:]).glob("*/*.wal")
            assert int(segment.name.partition("-")[0]) == 22, "and what was before is not in it"
            async with client.consumer(topic, subscription="sub") as consumer:
                got = [await consumer.receive(timeout=PATIENCE) for _ in range(22)]
            assert [(each.offset, each.payload) for each in got] == [(n, b"%d" % n) for n in range(6, 28)]

    run(story())


def test_1_a_non_reliable_topic_goes_to_another_broker_and_its_clients_follow(
    cluster: ClusterProcesses, topic: TopicName
) -> None:
    async def story() -> None:
        async with looking(cluster) as (client, kept):
            async with (
                client.producer(topic, reliable=False) as producer,
                client.consumer(topic, subscription="s") as heard,
            ):
                for _ in range(100):
                    await producer.send(b"x")
                assert [(await heard.receive(timeout=PATIENCE)).payload for _ in range(100)] == [b"x"] * 100
            old = await kept.host(topic)
            assert await kept.below(keys.subscriptions(topic)), "they are stored, for clients that come back"
            await unload(cluster, topic)
            assert await kept.host(topic, other_than=old) and not await kept.below(keys.subscriptions(topic))
            old = await kept.host(topic)
            async with never_stopping(client, topic, reliable=False), client.consumer(topic, subscription="s") as heard:
                await heard.receive(timeout=PATIENCE)
                await unload(cluster, topic)
                await kept.host(topic, other_than=old)
                while (await heard.receive(timeout=PATIENCE)).payload != b"more":
                    pass
            assert await kept.value(keys.delivery(topic)) == "NonReliable"

    run(story())


def test_2_a_reliable_topic_keeps_its_schema_subscription_cursor_and_history(
    cluster: ClusterProcesses, topic: TopicName
) -> None:
    async def story() -> None:
        async with looking(cluster) as (client, kept):
            await register(cluster, "orders-value")
            await client.create_topic(topic, schema_subject="orders-value")
            async with client.producer(topic) as producer:
                await asyncio.gather(*(producer.send(b"%d" % n) for n in range(1000)))
            assert await receive(client, topic, "sub1", 500) == list(range(500))
            old = await kept.host(topic)
            async with never_stopping(client, topic) as offsets:
                await unload(cluster, topic)
                assert await kept.cursor(topic, "sub1") == 499
                assert (await kept.value(keys.schema_config(topic)))["subject"] == "orders-value"
                assert await kept.value(keys.subscription(topic, SubscriptionName("sub1"))) is not None
                described = await kept.descriptors(topic)
                assert described[0][0] == 0 and described[-1][1] >= 999
                assert await kept.host(topic, other_than=old) is not old
                assert await receive(client, topic, "sub1", 500) == list(range(500, 1000)), "resumes with the 501st"
            assert offsets == list(range(1000, 1000 + len(offsets)))

    run(story())


def test_3_every_subscription_keeps_its_own_cursor(cluster: ClusterProcesses, topic: TopicName) -> None:
    async def story() -> None:
        wanted = {"slow": 10, "middle": 50, "fast": 100}
        async with looking(cluster) as (client, kept):
            async with client.producer(topic) as producer:
                await asyncio.gather(*(producer.send(b"%d" % n) for n in range(100)))
            for subscription, number in wanted.items():
                await receive(client, topic, subscription, number)
            async with never_stopping(client, topic) as offsets:
                await unload(cluster, topic)
                for subscription, number in wanted.items():
                    assert await kept.cursor(topic, subscription) == number - 1
                for subscription, number in wanted.items():
                    assert await receive(client, topic, subscription, 3) == [number, number + 1, number + 2]
            assert offsets == list(range(100, 100 + len(offsets)))

    run(story())


def test_4_in_a_cluster_of_one_broker_an_unload_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def story(alone: ClusterProcesses) -> None:
        topic = TopicName("/default/alone")
        async with looking(alone) as (client, kept), client.producer(topic) as producer:
            await producer.send(b"a")
            host = await kept.host(topic)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await unload(alone, topic)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "Cannot unload topic: single broker cluster detected" in (refused.value.details() or "")
            assert await kept.host(topic) is host and await kept.value(keys.unassigned(topic)) is None
            assert (await producer.send(b"b")).offset == 1

    with cluster_in(tmp_path, count=1) as alone:
        run(story(alone))


@pytest.mark.parametrize("subscriptions", [("s0", "unlucky1", "s2"), ("unlucky0", "unlucky1", "unlucky2")])
def test_5_a_move_goes_on_when_cursors_cannot_be_stored_and_names_them(
    cluster: ClusterProcesses, topic: TopicName, subscriptions: Sequence[str]
) -> None:
    unlucky = [name for name in subscriptions if name.startswith("unlucky")]

    async def story() -> ClusterBroker:
        async with looking(cluster) as (client, kept):
            async with client.producer(topic) as producer:
                await asyncio.gather(*(producer.send(b"%d" % n) for n in range(10)))
            for number, name in enumerate(subscriptions, start=3):
                await receive(client, topic, name, number)
            old = await kept.host(topic)
            await unload(cluster, topic)
            await kept.host(topic, other_than=old)
            for number, name in enumerate(subscriptions, start=3):
                assert await kept.cursor(topic, name) == (-1 if name in unlucky else number - 1)
                again = 0 if name in unlucky else number
                assert await receive(client, topic, name, 2) == [again, again + 1], "repeated, not lost"
            async with client.producer(topic) as producer:
                assert (await producer.send(b"more")).offset == 10
            return old

    old = run(story())
    lines = [line for line in old.output.read_text().splitlines() if f"topic={topic} " in f"{line} "]
    warned = [line for line in lines if "Failed to flush cursor for subscription" in line]
    for name, line in zip(unlucky, sorted(warned), strict=True):
        assert " WARNING " in line and f"subscription={name} " in line
    total = [line for line in lines if "All subscription cursor flushes failed" in line]
    assert [" ERROR " in line for line in total] == ([True] if len(unlucky) == len(subscriptions) else [])


# --- a failure between two steps: the first rows of the table in docs/adr/0003-the-cluster.md ---------------


async def drain_begun(kept: Kept, topic: TopicName) -> None:
    """Whoever has it has been told, and uploads what nobody else has."""
    async with asyncio.timeout(PATIENCE):
        while await kept.value(keys.unassigned(topic)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)


def test_a_move_fails_while_the_object_store_is_away_and_the_topic_is_served_where_it_was(
    cluster: ClusterProcesses, topic: TopicName, line: Line
) -> None:
    """A second unload meanwhile is refused, and told how far the first is."""

    async def story() -> None:
        async with looking(cluster) as (client, kept), client.producer(topic) as producer:
            await producer.send(b"a")
            old = await kept.host(topic)
            line.cut()
            try:
                first = asyncio.ensure_future(unload(cluster, topic))
                await drain_begun(kept, topic)
                with pytest.raises(grpc.aio.AioRpcError) as second:
                    await unload(cluster, topic)
                assert second.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                sentence = second.value.details() or ""
                assert "is being moved already" in sentence and "(phase: rest)" in sentence
                line.refuse()
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await first
            finally:
                line.heal()
            assert failed.value.code() is grpc.StatusCode.INTERNAL
            assert "is served where it was" in (failed.value.details() or "")
            receipt = await producer.send(b"b")
            assert (receipt.offset, receipt.epoch) == (1, 1) and await kept.host(topic) is old

    run(story())


def test_a_broker_dies_as_leader_as_target_as_draining_owner_and_as_new_owner_and_nothing_is_lost(
    cluster: ClusterProcesses, line: Line
) -> None:
    """With three topics, all at once: starting a broker again takes long.

    One is on its way to it: the next leader finds the marker, and somebody else gets the topic. One is about to leave
    it, and is taken over in front of an orphan. One has moved there and was written to: the old seal does not count.
    """
    victim = cluster.by_id(cluster.admin("brokers", "leader-broker").split('"')[1])
    coming, leaving, moved = (TopicName(f"/default/{name}") for name in ("coming", "leaving", "moved"))

    async def put_on(kept: Kept, topic: TopicName, wanted: bool) -> None:
        host = await kept.host(topic)
        if (host is victim) is not wanted:
            await (unload_to(victim, topic, victim) if wanted else unload(cluster, topic))
            await kept.host(topic, other_than=host)

    async def story() -> None:
        async with looking(cluster) as (client, kept):
            for topic, wanted in ((coming, False), (leaving, True), (moved, True)):
                assert await produce(client, topic, *"abc") == [0, 1, 2]
                await put_on(kept, topic, wanted)
                assert await produce(client, topic, "d") == [3]
            old = await kept.host(coming)
            third = next(each for each in cluster.brokers if each not in (victim, old))
            line.cut()
            try:
                moves = [
                    asyncio.create_task(unload_to(victim, coming, third)),
                    asyncio.create_task(unload(cluster, leaving, third)),
                ]
                await drain_begun(kept, coming)
                await drain_begun(kept, leaving)
                assert (await kept.value(keys.unassigned(coming)))["to"] == int(victim.broker_id)
                victim.kill()
            finally:
                line.heal()
            answers = await asyncio.gather(*moves, return_exceptions=True)
            if isinstance(failure := answers[0], grpc.aio.AioRpcError):  # etcd has lost its leader too, perhaps
                assert "is served where it was" in (failure.details() or "")
                assert await kept.host(coming) is old
            else:
                assert await kept.host(coming, other_than=old) is third
            assert await produce(client, coming, "e") == [4] and await kept.orphans(coming) == 0
            after = {}
            for topic in (leaving, moved):
                await kept.host(topic, other_than=victim)
                [after[topic]] = await produce(client, topic, "e")
                assert after[topic] > 4 and await kept.orphans(topic) == 1
            await asyncio.to_thread(victim.start)
            for topic, last in after.items():
                got = await deliveries(client, topic, 5)
                texts = dict(zip((0, 1, 2, 3, last), (b"a", b"b", b"c", b"d", b"e"), strict=True))
                assert {offset: payload for offset, payload, _ in got} == texts
                assert all(is_rescued or offset in (last, 0, 1, 2) for offset, _, is_rescued in got)
                assert (3, b"d", True) in got and await kept.orphans(topic) == 0
            state = await kept.value(keys.broker_state(BrokerId(int(victim.broker_id))))
            assert (state["mode"], state["reason"]) == ("drained", "stale_restart")
            sentence = "Broker registration was expired (unavailable > TTL). Registered as drained."
            assert sentence in victim.output.read_text()

    run(story())


async def produce(client: pydanube.Client, topic: TopicName, *texts: str) -> list[int]:
    async with client.producer(topic) as producer:
        return [(await producer.send(text.encode())).offset for text in texts]


async def deliveries(client: pydanube.Client, topic: TopicName, number: int) -> set[tuple[int, bytes, bool]]:
    """Offset, payload, and whether a lost broker's disk had it."""
    found: set[tuple[int, bytes, bool]] = set()
    async with client.consumer(topic, subscription="all", start="earliest") as consumer:
        while len({offset for offset, _, _ in found}) < number:
            message = await consumer.receive(timeout=PATIENCE)
            found.add((message.offset, message.payload, message.attributes.get("x-danube-rescued") == "true"))
            await message.ack()
    return found
