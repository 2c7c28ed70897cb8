"""History in the object store: uploaded, read back, merged, forgotten; on memory ports and a virtual clock."""

from __future__ import annotations

import asyncio

from pydanube.core import keys
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.core.tiers import Retention, TierConfig
from tests.rooms.brokers import ORDERS, Host, consume, find_topic, numbers, one_topic, publish_many, settle, simulated

QUICK = TierConfig(upload_seconds=30.0, object_bytes=64 * 1024, local=Retention(seconds=0.0), retention_check_seconds=5.0)


@simulated
async def test_committed_messages_are_in_the_object_store_after_the_interval() -> None:
    host = Host(tier=QUICK)
    _, orders = await one_topic(host)
    await publish_many(orders, 50)
    await asyncio.sleep(29)
    assert await host.metadata.list(keys.storage_objects(ORDERS)) == []
    await asyncio.sleep(3)
    (descriptor,) = await host.metadata.list(keys.storage_objects(ORDERS))
    assert b'"start_offset": 0, "end_offset": 49, "object_id": "data-0-49-1.parquet"' in descriptor.value


@simulated
async def test_a_late_subscriber_reads_everything_after_the_log_is_gone() -> None:
    host = Host(tier=QUICK, segment_bytes=2048, unacked_max=10_000)
    _, orders = await one_topic(host)
    for _ in range(5):
        await publish_many(orders, 200)
        await asyncio.sleep(40)
    assert orders.log.first_offset > 500
    assert orders.first_offset == 0
    stream = await consume(orders, "late", Kind.EXCLUSIVE, start=0, acks=True)
    await asyncio.sleep(10)
    assert stream.texts == numbers(200) * 5
    assert stream.offsets == list(range(1000))


@simulated
async def test_a_broker_without_its_log_goes_on_behind_its_history() -> None:
    host = Host(tier=QUICK, unacked_max=10_000)
    broker, orders = await one_topic(host)
    await publish_many(orders, 100)
    await asyncio.sleep(40)
    await broker.stop()
    for segment in await host.disk.list("wal/default/orders/00000000000000000001"):
        await host.disk.remove(f"wal/default/orders/00000000000000000001/{segment.name}")
    host._process.kill()
    broker = await host.boot()
    orders = await find_topic(broker)
    assert orders.head == 100
    stream = await consume(orders, "late", Kind.EXCLUSIVE, start=0, acks=True)
    await publish_many(orders, 10)
    await settle()
    assert stream.offsets == list(range(110))
