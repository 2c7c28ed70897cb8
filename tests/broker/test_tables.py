"""What a broker answers about tables: which there are, who may read them, and when what waits is uploaded for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pydanube.api.http.iceberg import CatalogRequest, CatalogResponse, answer
from pydanube.broker import tables
from pydanube.broker.table_flushes import AT_ONCE
from pydanube.broker.tables import TableDesk
from pydanube.core import keys
from pydanube.core.names import NamespaceName, TopicName
from pydanube.errors import NotATable, NotServed, TopicUnknown, Unreachable
from pydanube.history.snapshots import read_snapshot
from pydanube.ports import Delete, Put
from tests.harness.brokers import ORDERS, make_topic, make_volatile, publish, settle, simulated
from tests.harness.tiers import SMALL, STILL, Teller, TierFixture, tell_and_upload

DEFAULT = NamespaceName("default")
# Nothing is uploaded unless somebody looks.
LAZY = replace(STILL, upload_seconds=3600.0)


class StoreOpener:
    """The other brokers: takes notes, and answers when it may."""

    def __init__(self) -> None:
        self.asked: list[list[TopicName]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.away = False

    async def flush(self, topics: Sequence[TopicName]) -> None:
        self.asked.append(list(topics))
        await self.answers.wait()
        if self.away:
            raise Unreachable("broker 7", "it is away")


async def desk_of(tier: Any = STILL, **named: Any) -> tuple[TierFixture, TableDesk]:
    host = TierFixture(tier)
    broker = await host.boot()
    return host, TableDesk(broker.topics, "s3://bucket/place", **named)


async def head_of(desk: TableDesk, name: str = ORDERS) -> str:
    return str((await desk.load(TopicName(name))).metadata["properties"]["danube.head"])


async def get(desk: TableDesk | None, path: str, method: str = "GET", **headers: str) -> CatalogResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await answer(desk, CatalogRequest(method, f"/iceberg/v1/{path}", named))


def said(reply: CatalogResponse) -> tuple[int, str]:
    assert reply.body is not None
    error = reply.body["error"]
    assert error["code"] == reply.code and len(error["message"]) > 10
    return reply.code, error["type"]


# --- what there is ------------------------------------------------------------------------------------------


@simulated
async def test_only_topics_that_are_kept_are_listed_and_a_partitioned_one_once() -> None:
    host, desk = await desk_of()
    await make_topic(host.broker)
    await make_volatile(host.broker, "/default/ticks")
    for number in (0, 1):
        await make_topic(host.broker, f"/default/clicks-part-{number}")
        await make_volatile(host.broker, f"/default/sparks-part-{number}")
    assert (await desk.tables(DEFAULT)).tables == ["/default/clicks", ORDERS]
    for name, why in (("/default/ticks", "non-reliable"), ("/default/sparks", "non-reliable")):
        with pytest.raises(NotATable, match=why):
            await desk.load(TopicName(name))
    assert not [info.key async for info in host.object_store.list("default/ticks")]
    with pytest.raises(TopicUnknown):
        await desk.load(TopicName("/default/none"))


@simulated
async def test_a_listing_is_given_in_pages_of_the_size_that_is_asked_for() -> None:
    host, desk = await desk_of()
    for number in range(5):
        await make_topic(host.broker, f"/default/topic{number}")
        await make_volatile(host.broker, f"/default/topic{number}x")
    names: list[str] = []
    token: str | None = ""
    pages = 0
    while token is not None:
        reply = await get(desk, f"danube/namespaces/default/tables?pageToken={token}&pageSize=2")
        assert reply.body is not None
        names += [each["name"] for each in reply.body["identifiers"]]
        token, pages = reply.body["next-page-token"], pages + 1
    assert (names, pages) == ([f"topic{number}" for number in range(5)], 3)
    everything = await get(desk, "danube/namespaces/default/tables?pageToken=")
    assert everything.body is not None and len(everything.body["identifiers"]) == 5
    assert said(await get(desk, "danube/namespaces/default/tables?pageSize=none")) == (400, "BadRequestException")


@simulated
async def test_a_topic_that_no_broker_has_opened_yet_is_a_matter_of_time() -> None:
    host, desk = await desk_of()
    await make_topic(host.broker)
    await host.metadata.transact([], [Delete(keys.owner(ORDERS))])
    with pytest.raises(NotServed):
        await desk.load(ORDERS)
    reply = await get(desk, "danube/namespaces/default/tables/orders")
    assert said(reply) == (503, "ServiceUnavailableException") and int(reply.headers["Retry-After"]) > 0


@simulated
async def test_whoever_may_not_read_is_told_that_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function decides, and every route asks it."""
    host, desk = await desk_of()
    await make_topic(host.broker)
    await make_topic(host.broker, "/default/clicks")
    paths = ("config", "danube/namespaces", "danube/namespaces/default", "danube/namespaces/default/tables")
    for denied, wanted in (
        (None, (403, 403, 403, 403, 403)),
        (DEFAULT, (200, 200, 404, 404, 200)),
        (ORDERS, (200, 200, 200, 200, 404)),
    ):
        with monkeypatch.context() as changed:
            for module in ("pydanube.broker.tables", "pydanube.api.http.iceberg"):
                changed.setattr(f"{module}.may_read", lambda name, denied=denied: name != denied)
            replies = [await get(desk, path) for path in (*paths, "danube/namespaces/default/tables/orders")]
            assert tuple(each.code for each in replies) == wanted
            listed = replies[3].body or {}
            if denied == ORDERS:
                assert [each["name"] for each in listed["identifiers"]] == ["clicks"]
            if denied == DEFAULT:
                assert replies[1].body == {"namespaces": [["system"]]}
    assert tables.may_read(ORDERS)


# --- bad requests -------------------------------------------------------------------------------------------


@simulated
async def test_what_is_wrong_is_said_in_icebergs_words() -> None:
    host, desk = await desk_of()
    orders = await make_topic(host.broker)
    await make_volatile(host.broker, "/default/ticks")
    missing_namespace, missing_table = (404, "NoSuchNamespaceException"), (404, "NoSuchTableException")
    for path, wanted in (
        ("danube/namespaces/none", missing_namespace),
        ("danube/namespaces/none/tables", missing_namespace),
        ("danube/namespaces/a%1Fb", missing_namespace),
        ("danube/namespaces/a%2Fb/tables", missing_namespace),
        ("danube/namespaces/default%1Forders/tables/snapshots", missing_table),  # Spark: orders.snapshots
        ("danube/namespaces/none/tables/orders", missing_table),
        ("danube/namespaces/default/tables/none", missing_table),
        ("danube/namespaces/default/tables/or%20ders", missing_table),
        ("danube/namespaces/default/tables/%FF%FE", missing_table),
        ("danube/namespaces/default/tables/ticks", missing_table),
        ("danube/namespaces/default/tables/orders/plan", (404, "NotFoundException")),
        ("danube/views", (404, "NotFoundException")),
        ("", (404, "NotFoundException")),
    ):
        assert said(await get(desk, path)) == wanted, path
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("danube/namespaces", "danube/namespaces/default/tables/orders", "danube/transactions/commit"):
            reply = await get(desk, path, method)
            assert said(reply) == (406, "UnsupportedOperationException") and reply.headers["Allow"] == "GET, HEAD"
    assert said(await get(None, "config")) == (503, "ServiceUnavailableException")  # the broker is starting
    await tell_and_upload(orders, Teller())
    host.object_store.away = True
    reply = await get(desk, "danube/namespaces/default/tables/orders")
    assert said(reply) == (503, "ServiceUnavailableException") and "Retry-After" in reply.headers
    host.object_store.away = False
    await host.metadata.transact([], [Put(keys.storage_object(ORDERS, 0), b"[]")])
    assert said(await get(desk, "danube/namespaces/default/tables/orders")) == (500, "ObjectDamaged")


@simulated
async def test_only_what_reads_is_offered() -> None:
    _, desk = await desk_of()
    config = (await get(desk, "config?warehouse=danube")).body
    assert config is not None
    assert {each.split()[0] for each in config["endpoints"]} == {"GET", "HEAD"}
    assert not any("plan" in each for each in config["endpoints"])  # a wrong residual filter is a wrong answer
    assert config["overrides"] == {"prefix": "danube"}


@simulated
async def test_a_table_that_is_known_already_is_not_sent_again() -> None:
    host, desk = await desk_of()
    orders = await make_topic(host.broker)
    path = "danube/namespaces/default/tables/orders"
    tag = (await get(desk, path)).headers["ETag"]
    for told in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        reply = await get(desk, path, if_none_match=told)
        assert (reply.code, reply.body, reply.headers["ETag"]) == (304, None, tag)
    assert (await get(desk, path, if_none_match='"other"')).code == 200
    await tell_and_upload(orders, Teller())
    assert (await get(desk, path, if_none_match=tag)).code == 200
    for known in (path, "danube/namespaces/default"):
        assert (await get(desk, known, "HEAD")).code == 204
    assert (await get(desk, path + "s", "HEAD")).code == 404


@simulated
async def test_keys_of_the_store_are_given_to_those_who_ask_for_them_and_to_nobody_else() -> None:
    vended = {"s3.access-key-id": "reader", "s3.secret-access-key": "only reads"}
    host, desk = await desk_of(vended=vended)
    await make_topic(host.broker)
    path = "danube/namespaces/default/tables/orders"
    for header in ({}, {"x_iceberg_access_delegation": "remote-signing"}):
        body = (await get(desk, path, **header)).body
        assert body is not None and body["config"] == {} and "storage-credentials" not in body
    reply = await get(desk, path, x_iceberg_access_delegation="remote-signing, vended-credentials")
    body = reply.body
    assert body is not None and body["config"] == vended and reply.headers["Cache-Control"] == "no-store"
    [told] = body["storage-credentials"]
    assert told["config"] == vended and body["metadata"]["location"].startswith(told["prefix"])
    body = (await get(desk, "config", x_iceberg_access_delegation="vended-credentials")).body
    assert "only reads" not in str(body)


# --- freshness ----------------------------------------------------------------------------------------------


@simulated
async def test_a_load_has_what_waits_uploaded_and_the_next_one_sees_it_without_waiting() -> None:
    host, desk = await desk_of(LAZY)
    orders = await make_topic(host.broker)
    await publish(orders, "a", "b")
    began = asyncio.get_running_loop().time()
    assert await head_of(desk) == "0"
    assert asyncio.get_running_loop().time() == began  # what it has begun it does not wait for
    await settle()
    assert await head_of(desk) == "2"


@simulated
async def test_one_topic_is_uploaded_once_a_second_however_many_load_it() -> None:
    host, desk = await desk_of(LAZY)
    orders = await make_topic(host.broker)
    for _ in range(50):
        await publish(orders, "a")
        await asyncio.gather(*(desk.load(ORDERS) for _ in range(3)))
        await asyncio.sleep(0.1)
    loaded = await desk.load(ORDERS)
    total = int(loaded.metadata["snapshots"][-1]["summary"]["total-data-files"])
    assert 4 <= total <= 6  # five seconds


@simulated
async def test_what_is_uploaded_for_loads_is_merged_as_ever() -> None:
    """Who polls a table makes an object a second: none of them ever waits as long as the interval."""
    host, desk = await desk_of(replace(SMALL, upload_seconds=3600.0, descriptors_max=2))
    orders = await make_topic(host.broker)
    most = 0
    for _ in range(60):
        await publish(orders, "a")
        await desk.load(ORDERS)
        await asyncio.sleep(1)
        most = max(most, len(await host.metadata.list(keys.storage_objects(ORDERS))))
    assert await head_of(desk) == "60" and most <= 5
    loaded = await desk.load(ORDERS)
    assert int(loaded.metadata["snapshots"][-1]["summary"]["total-data-files"]) < 20


@simulated
async def test_readers_without_a_broker_learn_of_what_loads_uploaded_after_an_interval() -> None:
    host, desk = await desk_of(replace(STILL, upload_seconds=10.0))
    orders = await make_topic(host.broker)
    for number in range(1, 40):
        await publish(orders, "a")
        await desk.load(ORDERS)
        await asyncio.sleep(1)
        if number > 12:
            told = await read_snapshot(host.object_store, "default/orders/")
            assert told is not None and told.objects[-1].end >= number - 12


@simulated
async def test_few_topics_are_uploaded_at_once_and_all_in_turn() -> None:
    host, desk = await desk_of(LAZY)
    names = [f"/default/topic{number}" for number in range(10)]
    for name in names:
        await publish(await make_topic(host.broker, name), "a")
    gate, inside, most = asyncio.Event(), 0, 0
    put = host.object_store.put

    async def slow(key: str, *given: Any, **named: Any) -> Any:
        nonlocal inside, most
        if not key.endswith(".parquet"):
            return await put(key, *given, **named)
        inside += 1
        most = max(most, inside)
        await gate.wait()
        inside -= 1
        return await put(key, *given, **named)

    host.object_store.put = slow  # type: ignore[method-assign]
    for name in names:
        await desk.load(TopicName(name))
    await settle()
    assert (inside, most) == (AT_ONCE, AT_ONCE)
    gate.set()
    await asyncio.sleep(0.5)
    assert most == AT_ONCE and [await head_of(desk, name) for name in names] == ["1"] * 10


@simulated
async def test_a_topic_that_is_deleted_while_a_load_uploads_it_leaves_nothing() -> None:
    host, desk = await desk_of(LAZY)
    await publish(await make_topic(host.broker), "a")
    gate = asyncio.Event()
    put = host.object_store.put

    async def slow(key: str, *given: Any, **named: Any) -> Any:
        if key.endswith(".parquet"):
            await gate.wait()
        return await put(key, *given, **named)

    host.object_store.put = slow  # type: ignore[method-assign]
    await desk.load(ORDERS)
    await settle()
    deleting = asyncio.create_task(host.broker.topics.delete(ORDERS))
    await settle()
    gate.set()
    await deleting
    await asyncio.sleep(5)
    assert [info.key async for info in host.object_store.list("default/")] == []


@simulated
async def test_owners_elsewhere_are_asked_together_one_round_at_a_time() -> None:
    _, desk = await desk_of(LAZY)
    remote = StoreOpener()
    desk._topics.remote = remote  # type: ignore[assignment]
    parts = [TopicName(f"/default/clicks-part-{number}") for number in range(3)]  # none of them is served here
    desk.flushes.begin(parts)
    await settle()
    assert remote.asked == [parts]
    desk.flushes.begin(parts)
    await settle()
    assert remote.asked == [parts]  # not again within the second
    desk.flushes.begin([TopicName("/default/asked")], only_here=True)
    await settle()
    assert remote.asked == [parts]  # who is asked by another broker asks nobody
    remote.answers.clear()
    remote.away = True
    for _ in range(3):
        await asyncio.sleep(1)
        desk.flushes.begin(parts)  # an owner that does not answer holds nobody
    assert remote.asked == [parts] * 2
    remote.answers.set()
    await settle()
    assert remote.asked == [parts] * 3
    await desk.close()
