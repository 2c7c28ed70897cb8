"""`danube produce` and `danube consume` on a cluster: they find a topic wherever it is, and follow it when it moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from pydanube.cli.consuming import ConsumeOptions
from pydanube.cli.over_grpc import consume, produce
from pydanube.cli.producing import KeyedPayload, ProduceOptions, SendResult
from pydanube.client.grpc.connection import GrpcConnection
from pydanube.core.names import TopicName
from tests.e2e.processes import danube_here
from tests.harness.server_cluster import ServerCluster, clustered

pytestmark = pytest.mark.slow  # a move takes its time

TOPIC = TopicName("/default/orders")


async def messages(payloads: Iterable[bytes]) -> AsyncIterator[KeyedPayload]:
    for payload in payloads:
        yield KeyedPayload(payload)


async def send(connection: GrpcConnection, *payloads: bytes) -> list[SendResult]:
    sent: list[SendResult] = []
    order = ProduceOptions(topic=TOPIC, producer="p", reliable=True)
    await produce(connection, order, messages(payloads), sent.append)
    return sent


@clustered(2)
async def test_a_topic_is_found_and_followed_from_a_broker_that_does_not_have_it(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    asked, endpoint = (f"http://{getattr(cluster.node(2).servers, name)}" for name in ("client_addr", "admin_addr"))
    async with GrpcConnection(asked) as connection:
        received: list[bytes] = []
        subscribed, arrived = asyncio.Event(), asyncio.Event()

        def show(message: object) -> None:
            received.append(message.payload)  # type: ignore[attr-defined]
            arrived.set()

        wish = ConsumeOptions(topic=TOPIC, consumer="c", subscription="s", count=2, timeout_seconds=30.0)
        consuming = asyncio.create_task(consume(connection, wish, show, lambda _: subscribed.set()))
        await subscribed.wait()
        assert [each.error for each in await send(connection, b"before")] == [None]
        await arrived.wait()
        moved = await asyncio.to_thread(danube_here, "admin", "--endpoint", endpoint, "topics", "unload", TOPIC)
        assert moved.returncode == 0, moved.stderr
        assert [each.error for each in await send(connection, b"after")] == [None]
        assert await consuming
        assert received == [b"before", b"after"]


@clustered(2)
async def test_a_new_topic_is_made_by_whoever_is_asked_and_served_by_whoever_gets_it(cluster: ServerCluster) -> None:
    for number in (1, 2):
        async with GrpcConnection(f"http://{cluster.node(number).servers.client_addr}") as connection:
            assert [each.error for each in await send(connection, b"%d" % number)] == [None]
