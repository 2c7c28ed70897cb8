"""A bound for the log: what happens when all segments together have the size they may have, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import grpc
import pytest

import pydanube
from pydanube.broker.overview import Overview
from pydanube.broker.topic import Topic
from pydanube.config import StorageConfig
from pydanube.core.history.tiers import Retention, TierConfig
from pydanube.errors import LogFull
from pydanube.log.wal import Wal
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.brokers import (
    ORDERS,
    BrokerFixture,
    consume,
    find_topic,
    make_topic,
    one_topic,
    publish,
    settle,
    simulated,
)
from tests.harness.peers import Peer, server_of
from tests.harness.servers import TOPIC, refused, serving
from tests.harness.tiers import (
    KIB,
    SMALL,
    ObjectStoreFixture,
    Teller,
    TierFixture,
    all_uploaded,
    carried,
    check_stored,
    covered,
    read_everything,
    recovered,
)
from tests.support import run

BOUND = 256 * KIB
GAUGES = "danube_wal_size_bytes", "danube_wal_limit_bytes"
# Local retention never frees anything by itself, and uploads are far apart.
LASTING = replace(SMALL, upload_seconds=100.0, local=Retention(), retention_check_seconds=60.0)


def bounded(tier: TierConfig = LASTING, bound: int = BOUND, **named: Any) -> TierFixture:
    host = TierFixture(tier, **named)
    host.config = replace(host.config, storage=replace(host.config.storage, wal_bytes_max=bound))
    return host


async def fill(topic: Topic, teller: Teller) -> LogFull:
    """Publishes until that is refused."""
    for _ in range(1000):
        try:
            await teller.tell(topic)
        except LogFull as full:
            return full
    raise AssertionError("it was never refused")


def segment_bytes(wal: Wal) -> int:
    return sum(segment.end for each in wal._logs.values() for segment in each.segments)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.message in ("log full", "log has room again")]


# --- full ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [4 * KIB, 4 * KIB * KIB])
@simulated
async def test_while_the_store_is_away_publishes_are_refused_at_the_bound_and_go_on_when_it_is_back(
    segment: int, caplog: pytest.LogCaptureFixture
) -> None:
    """With segments much smaller than the bound, and with one that is larger."""
    host = bounded(segment_bytes=segment)
    broker, orders = await one_topic(host)
    stream = await consume(orders, "meanwhile", acks=True, start=0)
    teller = Teller(size=4 * KIB)
    await teller.tell(orders)
    host.object_store.away = True
    full = await fill(orders, teller)
    assert full.retryable and full.limit_bytes == BOUND <= full.size_bytes < BOUND + 16 * KIB
    await asyncio.sleep(312)
    for _ in range(3):
        with pytest.raises(LogFull) as refusal:
            await publish(orders, "still full")
    said = str(refusal.value)
    assert "0.2 MB" in said or "0.3 MB" in said
    assert "storage.wal.max_mb" in said and "object store cannot be reached: it is away" in said
    assert 300 <= int(said.partition("Uploads have failed for ")[2].partition(" s ")[0]) <= 313
    assert "publishes are refused: the log of this broker is full" in (await Overview(broker).state(ORDERS)).sentence
    assert stream.texts == list(teller.told.values()), "what is stored is delivered all the same"
    assert segment_bytes(broker.wal) == broker.wal.size_bytes() < BOUND + 16 * KIB
    gauges = {
        name: broker.telemetry.registry.get_sample_value(name, {"broker": str(broker.broker_id)}) for name in GAUGES
    }
    assert gauges == {GAUGES[0]: broker.wal.size_bytes(), GAUGES[1]: BOUND}
    assert lines(caplog) == ["log full"]
    host.object_store.away = False
    await asyncio.sleep(31)  # the longest pause between two attempts
    assert lines(caplog) == ["log full", "log has room again"]
    await teller.tell(orders, 3)
    assert (await Overview(broker).state(ORDERS)).sentence == "this broker serves it"
    await settle()
    assert stream.texts == list(teller.told.values())
    assert segment_bytes(broker.wal) == broker.wal.size_bytes() < BOUND
    assert await read_everything(orders) == teller.told
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_the_first_object_that_frees_something_lets_publishes_go_on() -> None:
    """Not the last of many."""
    bound = 8 * BOUND
    host = bounded(replace(LASTING, object_bytes=BOUND, merged_bytes=KIB), bound)
    broker, orders = await one_topic(host)
    host.object_store.away = True
    teller = Teller(size=16 * KIB)
    await fill(orders, teller)
    puts: list[int] = []
    put = host.object_store.put

    async def counted(key: str, data: Sequence[Any], *, create: bool = False) -> Any:
        puts.append(broker.wal.size_bytes())
        return await put(key, data, create=create)

    host.object_store.put = counted  # type: ignore[method-assign]
    host.object_store.away = False
    await asyncio.sleep(60)
    assert carried(orders).lag_offsets == 0 and len(puts) >= 8
    assert puts[0] >= bound > puts[1], "one object was enough"
    assert await read_everything(orders) == teller.told, "what waited for the others stayed"


@simulated
async def test_a_producer_that_numbers_its_batches_sends_again_what_was_refused_and_nothing_is_stored_twice() -> None:
    host = bounded()
    _, orders = await one_topic(host)
    peer = await Peer.greeted(server_of(host))
    opened = await peer.open_producer()
    host.object_store.away = True
    await fill(orders, Teller(size=4 * KIB))
    head = orders.head
    for sequence in range(3):
        peer.produce(opened, sequence, b"%d" % sequence, request_id=40 + sequence)
    await settle()
    errors = [command.error for command in peer.heard("error")]
    assert [error.code for error in errors] == [pb.LOG_FULL] * 3 and all(error.retryable for error in errors)
    assert "Uploads" in errors[0].sentence or "on their way" in errors[0].sentence
    assert not peer.is_closed and orders.head == head
    host.object_store.away = False
    await asyncio.sleep(40)
    for sequence in range(3):
        peer.produce(opened, sequence, b"%d" % sequence, request_id=50 + sequence)
    await settle()
    assert [command.request_id for command in peer.heard("receipt")] == [50, 51, 52] and orders.head == head + 3


@simulated
async def test_what_an_earlier_process_left_counts_too() -> None:
    host = TierFixture(LASTING)
    _, orders = await one_topic(host)
    teller = Teller(size=4 * KIB)
    await teller.tell(orders, 40)
    host.object_store.away = True
    host.kill()
    host.config = replace(host.config, storage=replace(host.config.storage, wal_bytes_max=BOUND))
    broker = await host.boot()
    orders = await find_topic(broker)
    assert segment_bytes(broker.wal) == broker.wal.size_bytes() > BOUND
    with pytest.raises(LogFull):
        await teller.tell(orders)
    host.object_store.away = False
    await asyncio.sleep(60)
    await teller.tell(orders)
    assert await read_everything(orders) == teller.told


@simulated
async def test_a_log_without_a_bound_or_without_a_store_says_so() -> None:
    host = TierFixture(LASTING)
    host.object_store.away = True
    broker, orders = await one_topic(host)
    await Teller().tell(orders, 40)
    assert broker.wal.excess_bytes() < 0 and broker.wal.full is None

    alone = BrokerFixture()
    alone.config = replace(alone.config, storage=replace(alone.config.storage, wal_bytes_max=BOUND))
    broker, orders = await one_topic(alone)
    assert "Nothing uploads what is in it" in str(await fill(orders, Teller()))


# --- early enough ---------------------------------------------------------------------------------------


@simulated
async def test_near_the_bound_what_is_uploaded_leaves_the_disk_before_its_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = bounded()
    broker, orders = await one_topic(host)
    teller = Teller(size=4 * KIB)
    for _ in range(30):
        await teller.tell(orders, 4)  # 32 KiB, every two seconds
        await asyncio.sleep(2)
        assert broker.wal.size_bytes() < BOUND
    assert lines(caplog) == []
    assert orders.log.first_offset > 80 and orders.log.held(), "and no more of it than necessary"
    assert broker.wal.size_bytes() > BOUND // 2
    assert await read_everything(orders) == teller.told


@simulated
async def test_below_four_fifths_of_the_bound_local_retention_alone_decides() -> None:
    host = bounded()
    broker, orders = await one_topic(host)
    teller = Teller(size=4 * KIB)
    while broker.wal.size_bytes() < 190 * KIB:
        await teller.tell(orders)
    await asyncio.sleep(1000)
    await all_uploaded(orders)
    assert orders.log.first_offset == 0


@simulated
async def test_an_idle_topic_gives_up_its_newest_segment_for_others() -> None:
    host = bounded(segment_bytes=4 * KIB * KIB)
    broker, orders = await one_topic(host)
    idle = await make_topic(broker, "/default/idle")
    told, other = Teller(seed=1, size=4 * KIB), Teller(seed=2, size=4 * KIB)
    await told.tell(idle, 20)  # 160 KiB in one segment, which nothing ends
    await asyncio.sleep(400)
    assert covered(await check_stored(host, "/default/idle")) == [(0, 20)] and idle.log.first_offset == 0
    for _ in range(20):
        await other.tell(orders, 2)
        await asyncio.sleep(2)
    assert idle.log.first_offset == 20
    await told.tell(idle, 2)
    assert await read_everything(idle) == told.told and await read_everything(orders) == other.told
    host.kill()
    broker = await host.boot()
    assert segment_bytes(broker.wal) == broker.wal.size_bytes()
    idle = await find_topic(broker, "/default/idle")
    assert await read_everything(idle, name="again") == told.told


@simulated
async def test_what_is_not_uploaded_never_leaves_the_disk_however_full_it_is() -> None:
    host = bounded()
    _, orders = await one_topic(host)
    teller = Teller(size=4 * KIB)
    host.object_store.away = True
    await fill(orders, teller)
    await asyncio.sleep(250)
    assert orders.log.held() == [(0, orders.head)]
    host.kill()
    host.object_store.away = False
    await recovered(host, teller.told)


@simulated
async def test_bytes_are_counted_whatever_becomes_of_topics() -> None:
    host = bounded(bound=0)
    broker = await host.boot()
    teller = Teller(size=KIB)
    for number in range(12):  # so many share the commit journal
        await teller.tell(await make_topic(broker, f"/default/t{number}"), number)
        assert segment_bytes(broker.wal) == broker.wal.size_bytes()
    for number in range(4):
        topic = await find_topic(broker, f"/default/t{number + 4}")
        await topic.log.truncate(topic.head)
        await topic.log.roll()
        assert segment_bytes(broker.wal) == broker.wal.size_bytes()
        await broker.topics.delete(topic.name)
        assert segment_bytes(broker.wal) == broker.wal.size_bytes()
    broker = await host.restart()
    assert segment_bytes(broker.wal) == broker.wal.size_bytes() > 0


# --- clients --------------------------------------------------------------------------------------------


def test_clients_are_told_to_wait_and_ours_goes_on_by_itself() -> None:
    object_store = ObjectStoreFixture()
    storage = StorageConfig(wal_bytes_max=BOUND, segment_bytes=32 * KIB, tier=replace(LASTING, upload_seconds=1.0))

    async def main() -> None:
        async with serving(storage=storage, make_objects=lambda: object_store) as calls:
            producer = await calls.create_producer()
            async with pydanube.connect(f"danube://{calls.servers.stream_addr}") as client:
                native = await client.producer(TOPIC, name="native").open()
                object_store.away = True
                for number in count():
                    try:
                        await calls.send(producer, bytes(16 * KIB))
                    except grpc.aio.AioRpcError:
                        break
                    assert number < 100
                code, sentence = await refused(calls.send(producer))
                assert code is grpc.StatusCode.UNAVAILABLE
                assert sentence.startswith("the log of this broker is full: 0.3 MB, and storage.wal.max_mb allows 0")
                sending = asyncio.create_task(native.send(b"native"))
                await asyncio.sleep(0.3)
                assert not sending.done()
                object_store.away = False
                assert (await asyncio.wait_for(sending, 20)).offset == number
                await calls.send(producer)

    run(main())
