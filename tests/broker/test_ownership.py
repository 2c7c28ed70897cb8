"""Claims, epochs and reservations: every open is a new epoch, and no offset is ever given out twice."""

from __future__ import annotations

import asyncio
import json

import pytest

from pydanube.api.grpc.extensions import peek, peek_newest
from pydanube.broker.ownership import Ownership, look
from pydanube.core import keys
from pydanube.core.history.ownership import RESERVE_OFFSETS_MIN, Owner, reserve_to_bytes
from pydanube.core.history.tiers import TopicHistory
from pydanube.core.names import BrokerId
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import Conflict, LogClosed, NotServed, OwnershipLost
from pydanube.ports import Put
from tests.harness.brokers import (
    ORDERS,
    SUB,
    BrokerFixture,
    consume,
    find_topic,
    make_topic,
    make_volatile,
    message,
    one_topic,
    publish,
    publish_many,
    settle,
    simulated,
)

WAL = "wal/default/orders"


async def owner(host: BrokerFixture) -> Owner:
    value = await host.metadata.value(keys.owner(ORDERS))
    assert value is not None
    return Owner.from_bytes(value)


async def reserved(host: BrokerFixture) -> int | None:
    value = await host.metadata.value(keys.reserve(ORDERS))
    return None if value is None else int(json.loads(value)["end"])


async def steal(host: BrokerFixture) -> None:
    """Another broker takes the topic, as far as the store is concerned."""
    taken = Owner(epoch=(await owner(host)).epoch + 1, session=9, broker_id=9, start_offset=0)
    await host.metadata.transact([], [Put(keys.owner(ORDERS), taken.to_bytes())])


# --- epochs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_topic, make_volatile])
@simulated
async def test_every_open_is_a_claim_with_a_new_epoch(make: object) -> None:
    host = BrokerFixture()
    await make(await host.boot())  # type: ignore[operator]
    for epoch in range(1, 5):
        assert (await owner(host)).epoch == epoch
        if epoch % 2:
            host.kill()
            await host.boot()
        else:
            await host.restart()
    sessions = {(await owner(host)).session}
    host.kill()
    await host.boot()
    assert (await owner(host)).session not in sessions, "every process has its own"


@simulated
async def test_offsets_go_on_after_a_restart_and_after_a_crash() -> None:
    """Defect A7."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    assert await publish(topic, "a", "b") == [0, 1]
    topic = await find_topic(await host.restart())
    assert await publish(topic, "c") == [2]
    host.kill()
    topic = await find_topic(await host.boot())
    assert await publish(topic, "d") == [3]
    assert [row.payload for _, row in await topic.rows(0, 9)] == [b"a", b"b", b"c", b"d"]


@simulated
async def test_a_claim_fails_if_somebody_else_was_faster() -> None:
    host = BrokerFixture()
    broker, _ = await one_topic(host)
    seen = await look(host.metadata, ORDERS, broker.broker_id)
    await steal(host)
    with pytest.raises(Conflict):
        await Ownership.claim(host.metadata, ORDERS, seen, broker_id=BrokerId(1), session=1, start=0)


@simulated
async def test_a_claim_fails_if_the_owner_reserved_or_described_more_after_the_look() -> None:
    """It believes that it is one; where we would begin, and what we would leave to it, is not what we saw."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    for key, value in (
        (keys.reserve(ORDERS), reserve_to_bytes(40_000)),
        (keys.history(ORDERS), TopicHistory().to_bytes()),
    ):
        seen = await look(host.metadata, ORDERS, BrokerId(1))
        await topic.ownership.write([Put(key, value)])
        with pytest.raises(Conflict):
            await Ownership.claim(host.metadata, ORDERS, seen, broker_id=BrokerId(1), session=1, start=20_000)
    seen = await look(host.metadata, ORDERS, BrokerId(1))
    claimed = await Ownership.claim(host.metadata, ORDERS, seen, broker_id=BrokerId(1), session=1, start=20_000)
    assert claimed.epoch == topic.ownership.epoch + 1


# --- losing it ------------------------------------------------------------------------------------------------


@simulated
async def test_whoever_lost_the_topic_writes_nothing_about_it() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    stream = await consume(topic, acks=True)
    await publish(topic, "a")
    await settle()
    await steal(host)
    before = {item.key: item.value for item in await host.metadata.list("/")}
    with pytest.raises(OwnershipLost):
        await topic.subscribe(SUB, Kind.SHARED, "new")
    with pytest.raises(OwnershipLost):
        await broker.topics.set_dispatch_config(ORDERS, SUB, unacked_max=5)
    stream.leave()
    with pytest.raises(OwnershipLost):
        await topic.unsubscribe(SUB)
    await asyncio.sleep(20)  # cursors are due
    assert {item.key: item.value for item in await host.metadata.list("/")} == before
    assert not any(each.name == "new" for each in stream.subscription.consumers)


@simulated
async def test_one_lost_topic_does_not_keep_the_cursors_of_others_from_being_saved() -> None:
    host = BrokerFixture()
    broker, orders = await one_topic(host)
    payments = await make_topic(broker, "/default/payments")
    for topic in (orders, payments):
        await consume(topic, acks=True)
        await publish(topic, "a")
    await settle()
    await steal(host)
    await asyncio.sleep(6)
    assert await host.metadata.value(keys.cursor(payments.name, SUB)) == b"0"
    assert await host.metadata.value(keys.cursor(ORDERS, SUB)) == b"-1"


@simulated
async def test_a_lost_topic_acknowledges_nothing_beyond_its_reservation() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish(topic, "a")
    topic.log.reserve(topic.head)
    await steal(host)
    producer = await topic.add_producer("producer")
    send = asyncio.create_task(topic.publish(producer, message("b")))
    await asyncio.sleep(1)
    assert send.done() and isinstance(send.exception(), NotServed | OwnershipLost | LogClosed), "nor does it hang"


# --- reservations ---------------------------------------------------------------------------------------------


@simulated
async def test_a_reservation_is_written_before_the_first_append_is_acknowledged() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    assert await reserved(host) is None
    await publish(topic, "a")
    assert await reserved(host) == RESERVE_OFFSETS_MIN + 1


@simulated
async def test_an_append_waits_for_its_reservation_and_goes_on_when_the_store_is_back() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    host.metadata.away = True
    producer = await topic.add_producer("producer")
    send = asyncio.create_task(topic.publish(producer, message("a")))
    await asyncio.sleep(5)
    assert not send.done()
    host.metadata.away = False
    await asyncio.sleep(0.3)
    assert send.done() and send.result() == 0


@simulated
async def test_a_reservation_is_extended_ahead_so_that_a_steady_stream_never_waits_for_it() -> None:
    """500 at once, ten times a second: it has grown with the traffic after a moment, and is then extended seldom."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    ends = []
    for number in range(100):
        await publish_many(topic, 500, at_once=500)
        end = await reserved(host)
        assert end is not None and (number < 10 or end >= topic.head + 5_000)
        ends.append(end)
        await asyncio.sleep(0.1)
    assert len(set(ends[:10])) <= 8
    assert len(set(ends[10:])) <= 4, "seldom, not with every append"
    assert host.metadata.writes_of("/reserve") <= 12


@simulated
async def test_a_slow_topic_reserves_little_and_asks_the_store_seldom() -> None:
    """One message every five seconds: what a crash would skip is what comes in a few minutes."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    producer = await topic.add_producer("producer")
    for number in range(200):
        await topic.publish(producer, message(str(number)))
        assert topic.confirmed_end - topic.head <= RESERVE_OFFSETS_MIN
        await asyncio.sleep(5)
    assert host.metadata.writes_of("/reserve") <= 8


@simulated
async def test_an_orderly_close_leaves_no_offset_in_doubt() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await publish_many(topic, 10)
    await broker.stop()
    assert await reserved(host) == 10


@simulated
async def test_a_log_that_lost_its_end_continues_behind_the_reservation() -> None:
    """A gap, but no offset twice."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish_many(topic, 10)
    topic = await find_topic(await host.restart())
    given = await publish(topic, "x", "y")
    end = await reserved(host)
    assert end is not None and end > RESERVE_OFFSETS_MIN
    host.kill()
    for path in [path for path in host.disk._contents.files if path.startswith(WAL)]:
        await host.disk.remove(path)
    topic = await find_topic(await host.boot())
    assert (await owner(host)).start_offset == topic.head == end
    new = await publish(topic, "z")
    assert new == [end] and not set(new) & set(given)


@simulated
async def test_a_look_at_messages_steps_over_offsets_that_nobody_used() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    for number in range(30):
        await publish(topic, str(number))
    host.kill()
    void = Put(keys.void(ORDERS, 30), b'{"end": 10000}')
    await host.metadata.transact([], [void, Put(keys.reserve(ORDERS), b'{"end": 10000}')])
    topic = await find_topic(await host.boot())

    async def newest(count: int) -> list[int]:
        return [each.offset for each in await peek_newest(topic, count, 100)]

    async def looked(first: int, count: int) -> list[int]:
        return [each.offset for each in await peek(topic, first, count, 100)]

    assert topic.head == 10_000
    assert await newest(3) == [27, 28, 29]
    assert await newest(100) == list(range(30))
    assert await looked(29, 5) == [29]
    assert await looked(5_000, 5) == []
    await publish(topic, "behind")
    assert await newest(1) == [10_000]
    assert await looked(29, 5) == [29, 10_000]
    assert await looked(5_000, 5) == [10_000]


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_a_subscription_crosses_a_gap_and_loses_nothing_that_is_in_flight_before_it(kind: Kind) -> None:
    """Between two of our epochs there was one that used none of the offsets it had reserved."""
    host = BrokerFixture(unacked_max=5)
    _, topic = await one_topic(host)
    await consume(topic, kind=kind)
    for number in range(3):
        await publish(topic, str(number), key=str(number))
    host.kill()
    void = Put(keys.void(ORDERS, 3), b'{"end": 10000}')
    await host.metadata.transact([], [void, Put(keys.reserve(ORDERS), b'{"end": 10000}')])
    topic = await find_topic(await host.boot())
    assert topic.head == 10_000
    stream = await consume(topic, kind=kind)
    assert await publish(topic, "behind", key="behind") == [10_000]
    await asyncio.sleep(2)
    assert stream.texts == ["0", "1", "2", "behind"]
    assert stream.subscription.get_lag_info().lag_messages == 4
    stream.leave()
    again = await stream.come_back()
    await settle()
    assert again.texts == ["0", "1", "2", "behind"], "what was not acknowledged comes again"
    again.ack_all()
    assert not again.subscription.has_lag()


# --- deleting and making again --------------------------------------------------------------------------------


@simulated
async def test_a_topic_made_again_goes_on_with_its_epochs_and_shows_nothing_of_the_old_one() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await consume(topic)
    await publish_many(topic, 5)
    await broker.topics.delete(ORDERS)
    assert (await owner(host)).deleted
    assert await host.disk.list(WAL) == []
    left = [item.key for item in await host.metadata.list("/") if "orders" in item.key]
    assert left == [keys.owner(ORDERS)]
    topic = await make_topic(broker)
    assert (topic.ownership.epoch, topic.head, topic.subscriptions) == (2, 0, {})
    stream = await consume(topic, start=0)
    assert await publish(topic, "new") == [0]
    await settle()
    assert stream.texts == ["new"]
    host.kill()
    topic = await find_topic(await host.boot())
    assert [row.payload for _, row in await topic.rows(0, 9)] == [b"new"]


@simulated
async def test_a_crash_in_the_middle_of_a_deletion_leaves_nothing_of_the_old_topic_for_the_new_one() -> None:
    """The tombstone is written, the files are still there."""
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await publish_many(topic, 5)
    remove = host._access.remove

    async def dies(path: str) -> None:
        if (await owner(host)).deleted:
            host.kill()
            await asyncio.get_running_loop().create_future()
        await remove(path)

    host._access.remove = dies  # type: ignore[method-assign]
    deleting = asyncio.create_task(broker.topics.delete(ORDERS))
    await settle()
    assert (await owner(host)).deleted and await host.disk.list(WAL) != []
    deleting.cancel()
    broker = await host.boot()
    assert not await broker.topics.exists(ORDERS)
    topic = await make_topic(broker)
    assert (topic.head, topic.first_offset) == (0, 0)
    stream = await consume(topic, start=0)
    assert await publish(topic, "new") == [0]
    await settle()
    assert stream.texts == ["new"]
