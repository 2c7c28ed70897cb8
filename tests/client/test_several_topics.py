"""Consumers of several topics and of patterns, which come and go; cumulative acks; failure policies from code."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import pydanube
from pydanube.broker.dispatcher import Dispatcher
from pydanube.client.client import Client
from pydanube.client.topics import TopicSelection
from pydanube.core.dispatch.events import HistoryAvailable, Withheld, ranges
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.errors import ConfigError, DanubeError, InvalidName, Refused, TopicUnknown
from tests.harness.wired import Wires, wired


async def put(client: Client, topic: str, *payloads: bytes, **options: Any) -> None:
    async with client.producer(topic, **options) as producer:
        for payload in payloads:
            await producer.send(payload)


async def take(consumer: pydanube.Consumer, count: int) -> list[tuple[str, bytes]]:
    found = []
    for _ in range(count):
        message = await consumer.receive(timeout=20)
        found.append((message.topic, message.payload))
        await message.ack()
    return found


# --- which topics -------------------------------------------------------------------------------------


def test_a_pattern_fits_a_topic_and_the_topic_that_a_partition_is_of() -> None:
    chosen = TopicSelection.of(["/default/orders.*", "/eu-?/a", "/default/mail"])
    assert chosen.names == ("/default/mail",)
    assert chosen.namespaces == [None]
    assert TopicSelection.of("/default/orders*").namespaces == ["default"]
    for fits in ("/default/orders.eu", "/default/orders.eu-part-3", "/eu-1/a", "/eu-1/a-part-0"):
        assert chosen.matches(fits), fits
    for other in ("/default/orders", "/other/orders.eu", "/eu-12/a", "/eu-1/ab", "/default/mail"):
        assert not chosen.matches(other), other


@pytest.mark.parametrize("wrong", [[], [7], b"/default/a", 7, "/default/*/x", "*", "/default/a b*"])
def test_what_is_no_topic_and_no_pattern_is_refused_with_a_sentence(wrong: Any) -> None:
    with pytest.raises((ConfigError, InvalidName), match="name"):
        TopicSelection.of(wrong)


@wired
async def test_one_consumer_reads_several_topics_with_their_partitions(wires: Wires) -> None:
    async with wires.connect() as client:
        await client.create_topic("/default/parts", partitions=2)
        for topic in ("/default/a", "/default/b", "/default/parts"):
            await put(client, topic, b"1", b"2")
        topics = ["/default/a", "/default/b", "/default/parts", "/default/a"]
        async with client.consumer(topics, subscription="s", start="earliest") as consumer:
            assert consumer.topic == "/default/a, /default/b, /default/parts"
            found = await take(consumer, 6)
            assert {topic for topic, _ in found} == {
                "/default/a", "/default/b", "/default/parts-part-0", "/default/parts-part-1",
            }  # fmt: skip
            await consumer.flush()
        assert (await client.lag("/default/a", "s")).messages == (await client.lag("/default/b", "s")).messages == 0


@wired
async def test_a_named_topic_that_is_missing_is_said_and_nothing_stays_open(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/a", b"1")
        with pytest.raises(TopicUnknown, match="/default/none"):
            await client.consumer(["/default/a", "/default/none"], subscription="s").open()
        assert client.statistics().consumers == 0


@wired
async def test_topics_of_a_pattern_are_found_while_it_runs_from_their_first_message_and_left_when_they_go(
    wires: Wires,
) -> None:
    async with wires.connect() as client:
        await put(client, "/default/orders.eu", b"old")
        await put(client, "/default/mail", b"not meant")
        async with client.consumer("/default/orders.*", subscription="s", start="latest") as consumer:
            await put(client, "/default/orders.eu", b"1")
            assert await take(consumer, 1) == [("/default/orders.eu", b"1")]
            await put(client, "/default/orders.us", b"first", b"second")  # before anybody has subscribed
            assert await take(consumer, 2) == [("/default/orders.us", b"first"), ("/default/orders.us", b"second")]
            await client.delete_topic("/default/orders.eu")
            receiving = asyncio.create_task(take(consumer, 1))
            await asyncio.sleep(10)
            assert client.statistics().consumers == 1
            await put(client, "/default/orders.us", b"third")
            assert await receiving == [("/default/orders.us", b"third")]
            await put(client, "/default/orders.eu", b"made anew")
            assert await take(consumer, 1) == [("/default/orders.eu", b"made anew")]
        assert client.statistics().consumers == 0


@wired
async def test_a_pattern_that_fits_nothing_yet_waits(wires: Wires) -> None:
    async with (
        wires.connect() as client,
        client.consumer("/default/later*", subscription="s", discover_seconds=1) as consumer,
    ):
        receiving = asyncio.create_task(consumer.receive(timeout=20))
        await asyncio.sleep(5)
        await put(client, "/default/later1", b"there")
        assert (await receiving).payload == b"there"


@wired
async def test_a_topic_that_was_named_beside_a_pattern_is_missed_when_it_is_deleted(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/named", b"1")
        async with client.consumer(["/default/named", "/default/x*"], subscription="s", start="earliest") as consumer:
            await take(consumer, 1)
            await client.delete_topic("/default/named")
            with pytest.raises(TopicUnknown):
                await consumer.receive(timeout=20)


@wired
async def test_a_stopped_consumer_of_a_pattern_joins_no_more_topics(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/x1", b"1")
        async with client.consumer("/default/x*", subscription="s", start="earliest") as consumer:
            await take(consumer, 1)
            await consumer.stop()
            await put(client, "/default/x2", b"1")
            await asyncio.sleep(20)
            assert client.statistics().consumers == 1


# --- cumulative acks ----------------------------------------------------------------------------------


@wired
async def test_a_cumulative_ack_settles_everything_before_it_and_nothing_behind(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/t", *(b"%d" % number for number in range(6)))
        async with client.consumer("/default/t", subscription="s", type="exclusive", start="earliest") as consumer:
            messages = [await consumer.receive() for _ in range(6)]
            await messages[1].nack(delay=50)  # waits for its retry, and is done all the same
            await messages[3].ack_cumulative()
            await consumer.flush()
            assert wires.subscription("/default/t", "s").get_lag_info().lag_messages == 2
            await asyncio.sleep(100)  # and 4 and 5 come again, 1 does not
            again = [await consumer.receive(timeout=1) for _ in range(2)]
            assert [message.offset for message in again] == [4, 5]
            await again[-1].ack_cumulative()
        assert (await client.lag("/default/t", "s")).messages == 0


@wired
async def test_a_cumulative_ack_counts_again_after_a_seek_back(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/t", b"0", b"1", b"2")
        async with client.consumer("/default/t", subscription="s", type="failover", start="earliest") as consumer:
            old = [await consumer.receive() for _ in range(3)]
            await old[-1].ack_cumulative()
            await consumer.flush()
            await consumer.seek("earliest")
            await old[-1].ack_cumulative()  # of before the seek: says nothing
            new = [await consumer.receive() for _ in range(3)]
            assert wires.subscription("/default/t", "s").get_lag_info().lag_messages == 3
            await new[1].ack_cumulative()
            await consumer.flush()
            assert wires.subscription("/default/t", "s").get_lag_info().lag_messages == 1


@wired
async def test_a_cumulative_ack_says_nothing_of_what_could_not_be_read_yet(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/t", *(b"%d" % number for number in range(4)))
        async with client.consumer("/default/t", subscription="s", type="exclusive", start="earliest") as consumer:
            subscription = wires.subscription("/default/t", "s")
            assert isinstance(subscription, Dispatcher)
            first = [await consumer.receive() for _ in range(4)]
            await first[0].ack_cumulative()
            await consumer.flush()
        subscription._step(Withheld(ranges((1, 2))))  # only a lost broker has it
        async with client.consumer("/default/t", subscription="s", type="exclusive") as consumer:
            later = [await consumer.receive() for _ in range(2)]
            assert [message.offset for message in later] == [2, 3]
            await later[-1].ack_cumulative()
            await consumer.flush()
            subscription._step(HistoryAvailable(ranges((1, 2))))
            rescued = await consumer.receive(timeout=20)
            assert rescued.offset == 1
            await rescued.ack_cumulative()
        assert (await client.lag("/default/t", "s")).messages == 0


@wired
async def test_a_cumulative_ack_says_nothing_of_what_another_consumer_is_to_try_again(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/t", b"0", b"1")
        async with client.consumer("/default/t", subscription="s", type="failover", start="earliest") as consumer:
            await (await consumer.receive()).nack(delay=50)
            await consumer.flush()
        async with client.consumer("/default/t", subscription="s", type="failover") as consumer:
            message = await consumer.receive()
            assert message.offset == 1
            await message.ack_cumulative()
            await consumer.flush()
            assert (await consumer.receive(timeout=100)).offset == 0


@pytest.mark.parametrize("kind", ["shared", "key_shared"])
@wired
async def test_a_cumulative_ack_is_refused_where_others_have_some_of_it(kind: Any, wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, "/default/t", b"0")
        async with client.consumer("/default/t", subscription="s", type=kind, start="earliest") as consumer:
            message = await consumer.receive()
            with pytest.raises(Refused, match="is shared"):
                await message.ack_cumulative()


# --- failure policies ---------------------------------------------------------------------------------


@wired
async def test_a_consumer_sets_what_it_says_of_the_failure_policy_and_leaves_the_rest(wires: Wires) -> None:
    async with wires.connect() as client:
        await client.create_topic("/default/dead")
        await client.create_topic("/default/t", partitions=2)
        name = SubscriptionName("s")
        await wires.broker.topics.change_failure_policy(
            TopicName("/default/t-part-1"), name, {"ack_timeout_ms": 7_000}
        )  # fmt: skip
        policy: Any = {"max_redelivery_count": 1, "base_redelivery_delay_ms": 1, "dead_letter_topic": "/default/dead"}
        await put(client, "/default/t", b"poison")
        async with (
            client.consumer("/default/t", subscription="s", start="earliest", failure_policy=policy) as consumer,
            client.consumer("/default/dead", subscription="d", start="earliest") as letters,
        ):
            for part in (0, 1):
                found = await wires.broker.topics.get_failure_policy(TopicName(f"/default/t-part-{part}"), name)
                assert found is not None and found.dead_letter_topic == "/default/dead"
                assert found.poison_policy.name == "DEAD_LETTER"
                assert found.ack_timeout_ms == (30_000, 7_000)[part]
            for _ in range(2):
                await (await consumer.receive(timeout=5)).nack(reason="no")
            assert (await letters.receive(timeout=5)).payload == b"poison"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        7,
        {"nonsense": 1},
        {"max_redelivery_count": -1},
        {"max_redelivery_count": "3"},
        {"poison_policy": "Explode"},
        {"backoff_strategy": "never"},
        {"dead_letter_topic": "/default/t"},
        {"poison_policy": "dead_letter"},
        {"base_redelivery_delay_ms": 100_000},
    ],
)
@wired
async def test_a_failure_policy_that_cannot_be_is_refused_with_a_sentence_and_changes_nothing(
    wrong: Any, wires: Wires
) -> None:
    async with wires.connect() as client:
        await client.create_topic("/default/t")
        with pytest.raises(ConfigError, match="failure_policy"):
            await client.consumer("/default/t", subscription="s", failure_policy=wrong).open()
        assert await wires.broker.topics.get_failure_policy(TopicName("/default/t"), SubscriptionName("s")) is None
        with pytest.raises(DanubeError):
            await client.lag("/default/t", "s")
