"""All subscriptions by lag, who is connected, and what happened, on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from pydanube.admin import calls
from pydanube.admin.gateway import Gateway
from pydanube.client.client import Client
from pydanube.client.grpc.connection import GrpcCall
from pydanube.wire._pb.pydanube import status_pb2
from tests.web.pages import Web, opened

ORDERS = "/default/orders"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        web.run(fill(web.client))
        yield web


async def fill(client: Client) -> None:
    await client.create_topic("/default/quiet")
    async with client.producer(ORDERS, name="shop") as orders:
        for number in range(12):
            await orders.send(b"%d" % number)
    for name in ("near", "far"):
        async with client.consumer(ORDERS, subscription=name, start="earliest"):
            pass
    await client.seek(ORDERS, "near", 10)


def test_all_subscriptions_stand_on_one_page_furthest_behind_first(web: Web) -> None:
    page = web.get("/subscriptions")
    assert page.status == 200 and page.text.index("far shared") < page.text.index("near shared")
    assert "/default/orders" in page.text and " 12 " in page.text
    assert "Nobody subscribed yet" in web.get("/subscriptions?namespace=system").text


def test_who_is_connected_is_named(web: Web) -> None:
    async def connected() -> str:
        async with (
            web.client.producer(ORDERS, name="<b>shop") as orders,
            web.client.consumer(ORDERS, subscription="far", name="worker-1"),
        ):
            await orders.send(b"x")
            found = await web.site.gateway.ask(calls.list_connections(ORDERS, 100))
            return " ".join(sorted(each.name for each in found.connections))

    assert web.run(connected()) == "<b>shop worker-1"
    page = web.get("/connections?topic=/default/orders")
    assert page.status == 200 and "<b>shop" not in page.body
    assert "Nobody is connected" in web.get("/connections?topic=/default/quiet").text
    missing = web.get("/connections?topic=/default/nothing")
    assert missing.status == 404 and "/default/nothing" in missing.text


def test_the_page_of_connections_has_one_line_for_a_producer_of_all_partitions(web: Web) -> None:
    clicks = web.client.producer("/default/clicks", name="clicker", partitions=3)
    web.run(clicks.open())
    try:
        text = web.get("/connections?topic=/default/clicks").text
    finally:
        web.run(clicks.close())
    assert text.count("clicker") == 1 and "3 partitions" in text and "/default/clicks-part" not in text


def test_an_order_of_the_web_admin_says_for_whom_it_was(web: Web) -> None:
    async def order_told() -> str:
        async with asyncio.timeout(10):
            while True:
                for each in (await web.site.gateway.ask(calls.list_events(100))).events:
                    if each.sentence == "CreateTopic name=/default/made-here":
                        return each.by
                await asyncio.sleep(0.01)

    web.post("/topics/new", namespace="default", name="made-here", dispatch="reliable")
    by = web.run(order_told())
    assert by.startswith("127.0.0.1:") and by.endswith("(web admin, for 127.0.0.1)")


def test_a_message_that_was_published_by_hand_is_an_order(web: Web) -> None:
    async def order_told(words: str) -> str:
        async with asyncio.timeout(10):
            while True:
                for each in (await web.site.gateway.ask(calls.list_events(100))).events:
                    if each.sentence.startswith(words):
                        return f"{each.sentence} by {each.by}"
                await asyncio.sleep(0.01)

    web.post(f"/topics{ORDERS}/publish", payload="by hand", encoding="text", key="", attributes="")
    offset = web.run(web.client.describe_topic(ORDERS)).head - 1
    told = web.run(order_told("PublishMessage"))
    assert told.startswith(f"PublishMessage topic={ORDERS} offset={offset} by 127.0.0.1:")
    assert told.endswith("(web admin, for 127.0.0.1)")
    assert f"Publish message: topic {ORDERS}, offset {offset}" in web.get("/events").text


def test_what_happened_is_listed(web: Web) -> None:
    page = web.get("/events")
    assert page.status == 200 and "newest first" in page.text


def test_a_broker_that_does_not_answer_is_named_and_nothing_is_said_to_be_zero(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = status_pb2.Unknown(broker_id=7, address="http://10.0.0.7:6650", why="it did not answer in time", topics=5)

    ask = type(web.site.gateway).ask

    async def without_it(gateway: Gateway, call: GrpcCall[Any], **more: Any) -> Any:
        if call.method.endswith(("/ListSubscriptions", "/ListConnections")):
            return call.answer(unknown=[silent])
        return await ask(gateway, call, **more)

    monkeypatch.setattr(type(web.site.gateway), "ask", without_it)
    for path, what in (("/subscriptions", "subscriptions"), ("/connections", "connections")):
        page = web.get(path)
        assert f"Broker 10.0.0.7:6650 does not answer: the {what} of its 5 topics are not known" in page.text
        assert "brokers that answer" in page.text and 'class="flash failed"' in page.body
