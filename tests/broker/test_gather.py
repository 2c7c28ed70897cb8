"""Unary sends that come together are committed together, and one bad message is refused alone."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.broker.gather import ROWS_MAX
from pydanube.broker.topic import Topic
from pydanube.errors import DanubeError, InvalidBatch, LogClosed, NotServed
from pydanube.formats.batch import Envelope
from tests.harness.brokers import BrokerFixture, message, one_topic, publish, publish_many, settle, simulated


async def batch_sizes(topic: Topic) -> list[int]:
    sizes, offset = [], 0
    while offset < topic.head:
        for batch in await topic.log.read(offset):
            sizes.append(batch.header.rows)
            offset = batch.header.end_offset
    return sizes


@simulated
async def test_concurrent_sends_share_one_batch_and_keep_their_order() -> None:
    _, topic = await one_topic(BrokerFixture())
    offsets = await publish(topic, *map(str, range(100)))
    assert offsets == list(range(100))
    assert await batch_sizes(topic) == [100]
    assert [row.payload for _, row in await topic.rows(0, 100)] == [str(n).encode() for n in range(100)]


@simulated
async def test_a_send_alone_does_not_wait_for_company() -> None:
    _, topic = await one_topic(BrokerFixture())
    for text in "abc":
        await publish(topic, text)
    assert await batch_sizes(topic) == [1, 1, 1]


@simulated
async def test_what_comes_while_a_commit_is_under_way_travels_together_in_the_next() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await publish(topic, "first")
    host.metadata.away = True
    topic.log.reserve(topic.head)  # commits are held back until the store confirms a reservation
    producer = await topic.add_producer("producer")
    sends = []
    for number in range(20):
        sends.append(asyncio.create_task(topic.publish(producer, message(str(number)))))
        await asyncio.sleep(0.01)
    assert not any(send.done() for send in sends)
    host.metadata.away = False
    assert await asyncio.gather(*sends) == list(range(1, 21))
    assert await batch_sizes(topic) == [1, 1, 19]
    assert broker.wal.committer.stopped is None


@simulated
async def test_a_batch_has_a_bounded_number_of_rows() -> None:
    _, topic = await one_topic(BrokerFixture())
    await publish_many(topic, ROWS_MAX * 2 + 10, at_once=ROWS_MAX * 2 + 10)
    assert await batch_sizes(topic) == [ROWS_MAX, ROWS_MAX, 10]


def broken_messages() -> list[Envelope]:
    return [
        message("x", attributes={"k": "\ud800"}),  # not Unicode
        Envelope(b"x", 10**30, None, "producer"),  # no such time
        message("x", schema_id=2**70),
        message("x", attributes={"k": 1}),
    ]


@pytest.mark.parametrize("which", range(len(broken_messages())))
@simulated
async def test_one_bad_message_is_refused_alone(which: int) -> None:
    _, topic = await one_topic(BrokerFixture())
    producer = await topic.add_producer("producer")
    bad = broken_messages()[which]
    sends = [message("a"), bad, message("b"), bad, message("c")]
    results = await asyncio.gather(*(topic.publish(producer, each) for each in sends), return_exceptions=True)
    assert [results[0], results[2], results[4]] == [0, 1, 2]
    assert isinstance(results[1], InvalidBatch) and isinstance(results[3], InvalidBatch)
    assert await publish(topic, "d") == [3]


@simulated
async def test_messages_that_fit_one_by_one_but_not_together_all_get_through() -> None:
    """Large attributes are not counted when messages are gathered; the batch is over its limit all the same."""
    _, topic = await one_topic(BrokerFixture())
    producer = await topic.add_producer("producer")
    large = {"k": "x" * (24 * 1024 * 1024)}
    sends = [topic.publish(producer, message(text, attributes=large)) for text in "abc"]
    async with asyncio.timeout(10):
        assert sorted(await asyncio.gather(*sends)) == [0, 1, 2]


@simulated
async def test_a_sender_that_gives_up_does_not_disturb_the_others() -> None:
    _, topic = await one_topic(BrokerFixture())
    producer = await topic.add_producer("producer")
    sends = [asyncio.create_task(topic.publish(producer, message(text))) for text in "abc"]
    await asyncio.sleep(0)
    sends[1].cancel()
    await settle()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert (results[0], results[2]) == (0, 2)
    assert [row.payload for _, row in await topic.rows(0, 3)] == [b"a", b"b", b"c"], "it was on its way already"


@simulated
async def test_every_send_is_answered_when_the_topic_closes() -> None:
    broker, topic = await one_topic(BrokerFixture())
    producer = await topic.add_producer("producer")
    sends: list[asyncio.Task[int]] = []

    async def sending() -> None:
        for number in range(100):
            sends.append(asyncio.create_task(topic.publish(producer, message(str(number)))))
            await asyncio.sleep(0)

    busy = asyncio.create_task(sending())
    for _ in range(30):
        await asyncio.sleep(0)
    await broker.stop()
    await busy
    async with asyncio.timeout(10):
        results = await asyncio.gather(*sends, return_exceptions=True)
    acknowledged = [each for each in results if isinstance(each, int)]
    assert acknowledged == list(range(len(acknowledged)))
    assert topic.head == len(acknowledged)
    refused = [each for each in results if not isinstance(each, int)]
    assert refused and all(isinstance(each, DanubeError) for each in refused)
    assert all(isinstance(each, NotServed | LogClosed) for each in refused)
