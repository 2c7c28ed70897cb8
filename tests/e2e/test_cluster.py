"""The seeds' scenarios with real processes: three brokers, an etcd member beside each, a shared store, a TTL of 3 s."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

import pydanube
from tests.e2e.clusters import TTL, ClusterProcesses, cluster_in
from tests.e2e.processes import until
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUMBERS = count()


async def produce(url: str, topic: str, *texts: str) -> list[int]:
    """Their offsets, one after the other, on whichever broker has the topic."""
    async with pydanube.connect(url, timeout=60) as client, client.producer(topic, reliable=True) as producer:
        return [(await producer.send(text.encode())).offset for text in texts]


async def consume(url: str, topic: str, number: int) -> list[pydanube.Message]:
    found = []
    async with pydanube.connect(url, timeout=60) as client, client.consumer(topic, subscription="sub") as consumer:
        for _ in range(number):
            message = await consumer.receive(timeout=60)
            found.append(message)
            await message.ack()
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with cluster_in(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def topic() -> str:
    return f"/default/topic{next(NUMBERS)}"


def test_a_topic_moves_while_its_producer_and_consumer_work_and_nothing_is_lost_or_repeated(
    cluster: ClusterProcesses, topic: str
) -> None:
    async def work() -> tuple[list[int], list[tuple[int, bytes]]]:
        offsets: list[int] = []
        got: list[tuple[int, bytes]] = []
        async with (
            pydanube.connect(cluster.url, timeout=30) as client,
            client.producer(topic, reliable=True) as producer,
            client.consumer(topic, subscription="sub") as consumer,
        ):

            async def consume() -> None:
                async for message in consumer:
                    got.append((message.offset, message.payload))
                    await message.ack()

            consuming = asyncio.create_task(consume())
            moves = []
            for number in range(300):
                offsets.append((await producer.send(str(number).encode())).offset)
                if number in (100, 200):
                    moves.append(asyncio.create_task(asyncio.to_thread(cluster.admin, "topics", "unload", topic)))
                await asyncio.sleep(0.005)
            await asyncio.gather(*moves)
            for _ in range(1000):
                if len(got) >= 300:
                    break
                await asyncio.sleep(0.02)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        return offsets, got

    offsets, got = run(work())
    assert offsets == list(range(300)), "continuous over two moves"
    assert got == [(number, str(number).encode()) for number in range(300)]


def test_the_topic_of_a_killed_broker_is_served_by_another_and_comes_back_whole(
    tmp_path: Path,
) -> None:
    with cluster_in(tmp_path) as cluster:
        topic = "/default/orders"

        assert run(produce(cluster.url, topic, "0")) == [0]
        run(consume(cluster.url, topic, 0))
        host = cluster.hosted(topic)
        assert run(produce(cluster.url, topic, "1", "2")) == [1, 2]
        host.kill()
        other = cluster.hosted(topic, other_than=host, seconds=TTL + 30)
        assert other is not host
        (offset,) = run(produce(cluster.url, topic, "3"))
        assert offset > 2
        host.start()
        got = run(consume(cluster.url, topic, 3))
        marked = sorted((each.payload, each.attributes.get("x-danube-rescued")) for each in got)
        assert marked == [(b"1", "true"), (b"2", "true"), (b"3", None)]
        state = next(each for each in cluster.json("brokers", "list") if str(each["broker_id"]) == host.broker_id)
        assert state["broker_status"] == "drained"
        cluster.admin("brokers", "activate", host.broker_id)


def test_an_unload_that_cannot_be_says_why_and_changes_nothing(cluster: ClusterProcesses, topic: str) -> None:
    assert "unable to find the topic" in cluster.refused("topics", "unload", topic)
    assert "there is no broker 42" in cluster.refused("brokers", "activate", "42")


def test_all_brokers_restarted_serve_their_topics_again(tmp_path: Path) -> None:
    with cluster_in(tmp_path) as cluster:
        for number in range(3):
            assert run(produce(cluster.url, f"/default/topic{number}", "a", "b")) == [0, 1]
        before = {number: cluster.hosted(f"/default/topic{number}") for number in range(3)}
        for broker in cluster.brokers:
            broker.kill()
        cluster.start()
        for number in range(3):
            assert cluster.hosted(f"/default/topic{number}") is before[number]
            assert run(produce(cluster.url, f"/default/topic{number}", "c")) == [2]
        listed = cluster.json("brokers", "list")
        assert [each["broker_status"] for each in listed] == ["active"] * 3, json.dumps(listed)


def test_a_paused_broker_acknowledges_nothing_after_its_lease_and_comes_back_drained(tmp_path: Path) -> None:
    with cluster_in(tmp_path) as cluster:
        topic = "/default/orders"

        assert run(produce(cluster.url, topic, "a")) == [0]
        host = cluster.hosted(topic)
        host.pause()
        try:
            other = cluster.hosted(topic, other_than=host, seconds=TTL + 30)
        finally:
            host.resume()
        assert other is not host
        (offset,) = run(produce(cluster.url, topic, "b"))
        assert offset >= 1

        def drained() -> bool:
            listed = {str(each["broker_id"]): each["broker_status"] for each in cluster.json("brokers", "list")}
            return listed.get(host.broker_id) == "drained"

        until(drained, "the broker is drained", say=host.output.read_text)
        assert "declared lost" in host.output.read_text() or "Registered as drained" in host.output.read_text()
