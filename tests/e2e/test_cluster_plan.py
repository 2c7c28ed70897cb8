"""Topics that move, as the plans describe it, with real processes: three brokers, a member of etcd beside each, and a
store that speaks S3. What is promised is read where it is kept: in etcd, in the store, on the brokers' disks.

Of the tests in the plan for unloading, the fifth needs a cursor that cannot be stored while everything else can: it is
in tests/rooms/cluster/test_moving.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

import pydanube
from pydanube.core import keys
from pydanube.core.names import BrokerId, SubscriptionName, TopicName
from pydanube.stores.etcd import CLIENT_PORT_OFFSET, EtcdMetadataStore
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire._pb.danube import DanubeAdmin_pb2_grpc as stubs
from tests.e2e.clusters import ClusterBroker, ClusterProcesses, cluster_in
from tests.e2e.objectstores import S3Server
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
                        if broker is not other_than:
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


async def unload(cluster: ClusterProcesses, topic: TopicName) -> None:
    """Asked of whichever broker; answered when the old owner has let go."""
    async with grpc.aio.insecure_channel(cluster.living[0].endpoint.removeprefix("http://")) as channel:
        await stubs.TopicAdminStub(channel).UnloadTopic(pb.TopicRequest(name=topic), timeout=PATIENCE)


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
def cluster(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[ClusterProcesses]:
    """Nothing is uploaded but by a move: so it is known which tier a message comes from."""
    directory = tmp_path_factory.mktemp("plan")
    config = directory / "broker.yml"
    config.write_text(yaml.safe_dump({"storage": {"durable": s3_server.options}}))
    flags = ("--config-file", str(config), "--upload-interval", "3600")
    with cluster_in(directory, *flags, storage=s3_server.url()) as started:
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


def test_1_a_non_reliable_topic_goes_to_another_broker_and_its_clients_follow(
    cluster: ClusterProcesses, topic: TopicName
) -> None:
    async def story() -> None:
        async with looking(cluster) as (client, kept):
            async with client.producer(topic, reliable=False) as producer:
                for _ in range(100):
                    await producer.send(b"x")
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
            await client.create_topic(topic, schema_subject="orders-value")
            async with client.producer(topic) as producer:
                await asyncio.gather(*(producer.send(b"%d" % n) for n in range(1000)))
            assert await receive(client, topic, "sub1", 500) == list(range(500))
            old = await kept.host(topic)
            async with never_stopping(client, topic) as offsets:
                await unload(cluster, topic)
                assert await kept.cursor(topic, "sub1") == 499
                assert await kept.value(keys.schema(topic)) == "orders-value"
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


def test_a_topic_that_moved_survives_the_crash_of_its_new_owner(cluster: ClusterProcesses, topic: TopicName) -> None:
    """The old seal does not count: what the new owner has on its disk alone is late, and not lost."""

    async def story() -> None:
        async with looking(cluster) as (client, kept):
            async with client.producer(topic) as producer:
                assert [(await producer.send(b"%d" % n)).offset for n in range(5)] == list(range(5))
                old = await kept.host(topic)
                await unload(cluster, topic)
                new = await kept.host(topic, other_than=old)
                assert [(await producer.send(b"%d" % n)).offset for n in (5, 6)] == [5, 6]
                new.kill()
                third = await kept.host(topic, other_than=new)
                assert third is not new
                after = (await producer.send(b"7")).offset
            assert after > 6 and await kept.orphans(topic) == 1
            await asyncio.to_thread(new.start)
            async with client.consumer(topic, subscription="all", start="earliest") as consumer:
                got = {}
                while len(got) < 8:
                    message = await consumer.receive(timeout=PATIENCE)
                    got[message.offset] = (message.payload, message.attributes.get("x-danube-rescued"))
                    await message.ack()
            marks = {5: "true", 6: "true"}
            assert got == {n: (b"%d" % n, marks.get(n)) for n in range(7)} | {after: (b"7", None)}
            assert await kept.orphans(topic) == 0
            state = await kept.value(keys.broker_state(BrokerId(int(new.broker_id))))
            assert (state["mode"], state["reason"]) == ("drained", "stale_restart")

    run(story())
