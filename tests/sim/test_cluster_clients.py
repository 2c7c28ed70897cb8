"""Real clients of simulated clusters: they find topics, follow them, and outlive brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pydanube.core.names import TopicName
from pydanube.testing.cluster import Cluster
from pydanube.testing.loop import run
from pydanube.testing.wires import WireFaults
from tools.sim.real_clients import wire_faults

TOPIC = TopicName("/default/orders")


async def send(cluster: Cluster, topic: str, first: int, count: int) -> list[int]:
    async with cluster.client() as client, client.producer(topic, name="p") as producer:
        receipts = await asyncio.gather(*[producer.send_soon(b"%d" % number) for number in range(first, first + count)])
        return [receipt.offset for receipt in receipts]


async def receive(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    async with cluster.client() as client, client.consumer(topic, subscription="s", start="earliest") as consumer:
        found = []
        for _ in range(count):
            message = await consumer.receive()
            found.append(message.payload)
            await message.ack()
        await consumer.flush()
        return found


def simulated(test: Callable[[Cluster], Coroutine[Any, Any, None]], *, seed: int = 3) -> None:
    async def main() -> None:
        cluster = await Cluster(seed, faulty_disks=True).start(3)
        await cluster.create(TOPIC, on=1)
        await test(cluster)

    run(main(), seed)


def test_a_client_finds_a_topic_on_whichever_node_it_is() -> None:
    async def test(cluster: Cluster) -> None:
        for node in (1, 2, 3):
            if cluster.host(TOPIC) is not cluster.node(node):
                await cluster.unload(TOPIC, to=node)
            assert await send(cluster, TOPIC, 5 * node, 5) == [*range(5 * node - 5, 5 * node)]
        assert await receive(cluster, TOPIC, 15) == [b"%d" % number for number in range(5, 20)]

    simulated(test)


@pytest.mark.parametrize("end", ["kill", "power_cut", "stop", "pause", "cut"])
def test_a_producer_outlives_the_broker_of_its_topic(end: str) -> None:
    async def test(cluster: Cluster) -> None:
        node = cluster.node(1)
        async with cluster.client() as client, client.producer(TOPIC, name="p") as producer:
            await producer.send(b"before")
            sending = asyncio.create_task(producer.send(b"after", timeout=600))
            if end == "stop":
                await node.stop()
            elif end == "cut":
                node.partition()
                node.wire.requests_lost = node.wire.answers_lost = True
            else:
                getattr(node, end)()
            await sending
        if not node.alive:
            await node.boot()
        node.heal()
        assert sorted(await receive(cluster, TOPIC, 2)) == [b"after", b"before"], "what it had alone is rescued"

    simulated(test)


def test_a_message_whose_answer_was_lost_is_stored_once() -> None:
    async def test(cluster: Cluster) -> None:
        async with cluster.client() as client, client.producer(TOPIC, name="p") as producer:
            await producer.send(b"before")
            cluster.node(1).wire.answers_lost = True
            sending = asyncio.create_task(producer.send(b"once", timeout=600))
            await asyncio.sleep(1)
            assert not sending.done()
            await asyncio.sleep(40)  # the client has given the connection up
            cluster.node(1).wire.heal()
            receipt = await sending
            assert receipt.duplicate and receipt.offset == 1
        assert await receive(cluster, TOPIC, 2) == [b"before", b"once"]

    simulated(test)


def test_seeds_have_wires_of_their_own() -> None:
    found = [wire_faults(seed) for seed in range(200)]
    quiet = [each for each in found if not (each.drop or each.cut or each.refuse or each.lose)]
    assert 0.15 <= len(quiet) / 200 <= 0.35
    for name in WireFaults.__dataclass_fields__:
        assert len({getattr(each, name) for each in found}) > (name != "delay_seconds")
