"""Whoever gives up waiting leaves nothing behind: no future, no lock, no place that somebody else wants."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest

from pydanube.broker.topic import Topic
from pydanube.client.producer import Producer
from pydanube.core.names import TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import DeadlineExceeded, TopicUnknown
from pydanube.ports import Compare, Delete, Put, Revision
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.client.test_client_producer import scripted
from tests.harness import brokers, logs
from tests.harness.brokers import ORDERS, BrokerFixture, find_topic, one_topic, publish
from tests.harness.peers import Peer, server_of
from tests.harness.scripted import ScriptedBroker


@logs.simulated
async def test_readers_that_poll_an_idle_log_and_give_up_are_forgotten() -> None:
    machine = logs.LogFixture()
    wal = await machine.boot()
    log = await wal.topic(logs.TOPIC, epoch=1)
    for _ in range(100):
        waiting = asyncio.create_task(log.wait_beyond(0))
        await asyncio.sleep(0)
        assert len(log._news) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(log._news) == 0
    stayed = asyncio.create_task(log.wait_beyond(0))
    await asyncio.sleep(0)
    await logs.fill(log, "a")
    await stayed
    assert len(log._news) == 0


@brokers.simulated
async def test_polls_of_an_idle_topic_that_run_out_of_time_are_forgotten() -> None:
    _, topic = await one_topic(BrokerFixture())
    for _ in range(100):
        await topic.wait_beyond(topic.head, 0.5)
    await brokers.settle()
    assert len(topic.log._news) == 0
    polling = asyncio.create_task(topic.wait_beyond(topic.head, 60))
    await brokers.settle()
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    await brokers.settle()
    assert len(topic.log._news) == 0


@logs.simulated
async def test_who_waits_for_a_group_and_gives_up_is_forgotten_also_if_none_is_ever_written() -> None:
    machine = logs.LogFixture()
    wal = await machine.boot()
    for _ in range(100):
        waiting = asyncio.create_task(wal.committer.next_group())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(wal.committer._decided) == 0


@brokers.simulated
async def test_names_that_somebody_asked_for_are_not_remembered() -> None:
    broker, topic = await one_topic(BrokerFixture())
    for number in range(100):
        with pytest.raises(TopicUnknown):
            await broker.topics.require(TopicName(f"/default/unknown-{number}"))
    gc.collect()
    assert len(broker.topics._opening) == 0
    asked = [asyncio.create_task(broker.topics.require(TopicName("/default/unknown"))) for _ in range(3)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [TopicUnknown] * 3
    assert await publish(topic, "a") == [0]


@brokers.simulated
async def test_a_producer_whose_peer_leaves_while_it_is_opened_keeps_no_exclusive_place() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    server = server_of(host)
    first, second = await Peer.greeted(server), await Peer.greeted(server)
    await second.open_producer("somebody")
    topic = await find_topic(broker)
    lock = topic.log.between_groups()
    await lock.acquire()  # so that the session is not stored yet
    topic.producers._producers.clear()
    first.say(
        request_id=5, open_producer=pb.OpenProducer(topic=ORDERS, producer_name="a", reliable=True, exclusive=True)
    )
    await brokers.settle()
    assert len(topic.producers) == 1
    first.transport.abort()
    await brokers.settle()
    assert len(topic.producers) == 0
    lock.release()
    await brokers.settle()
    assert await second.open_producer("b", exclusive=True)


@scripted(buffer_bytes=100)
async def test_who_waits_for_room_and_gives_up_is_forgotten_also_if_there_is_never_any(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.hold()
    producer.send_nowait(b"x" * 100)
    for _ in range(5):
        with pytest.raises(DeadlineExceeded):
            await producer.send(b"y", timeout=0.01)
    cancelled = [asyncio.ensure_future(producer.send(b"z")) for _ in range(5)]
    await asyncio.sleep(0)
    for each in cancelled:
        each.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
    assert len(producer._room) == 0
    broker.release()
    await producer.send(b"last")


@brokers.simulated
async def test_a_topic_whose_opening_was_given_up_at_any_moment_can_be_opened_by_the_next() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    transact = host.metadata.transact

    async def slow(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        await asyncio.sleep(0.01)
        revision = await transact(compares, operations)
        await asyncio.sleep(0.01)
        return revision

    host.metadata.transact = slow  # type: ignore[method-assign]
    for step in range(100):
        name = TopicName(f"/default/t{step}")
        creating = asyncio.create_task(broker.topics.create(name, delivery=Delivery.RELIABLE))
        await asyncio.sleep(0.005 * step)
        if creating.done():
            assert step > 5
            return
        creating.cancel()
        await asyncio.gather(creating, return_exceptions=True)
        try:
            topic = await broker.topics.require(name)
        except TopicUnknown:
            topic = await broker.topics.create(name, delivery=Delivery.RELIABLE)
        assert isinstance(topic, Topic)
        assert await publish(topic, "a") == [0]
    raise AssertionError("it never ended")


@logs.simulated
async def test_a_log_whose_opening_was_given_up_can_be_opened_again() -> None:
    machine = logs.LogFixture()
    wal = await machine.boot()
    for n in range(7):
        await wal.topic(f"/default/t{n}", epoch=1)
    machine.disk.hold_syncs("spare")  # the eighth makes the file for the journal
    opening = asyncio.create_task(wal.topic(logs.TOPIC, epoch=1))
    await logs.settle()
    assert machine.disk.syncs_waiting == 1
    opening.cancel()
    await logs.settle()
    machine.disk.release_syncs()
    log = await wal.topic(logs.TOPIC, epoch=1)
    await logs.fill(log, "a")
