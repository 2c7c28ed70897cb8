"""Dispatch, seen from the consumers of one broker: who gets what, when, and what becomes of what they refuse."""

from __future__ import annotations

import asyncio
from itertools import groupby
from random import Random

import pytest

from pydanube.broker.base_subscription import ATTACH_SECONDS
from pydanube.core.dispatch.consumer_window import Permits
from pydanube.core.dispatch.delivery import BackoffStrategy, FailurePolicy, PoisonPolicy
from pydanube.core.names import SubscriptionName, TopicName, producer_id
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.core.policies import TopicPolicy
from pydanube.errors import LimitReached, NotServed, SubscriptionBusy, SubscriptionUnknown
from tests.harness.brokers import (
    OFF,
    ORDERS,
    SUB,
    BrokerFixture,
    Stream,
    consume,
    find_topic,
    make_topic,
    message,
    now,
    numbers,
    one_topic,
    publish,
    publish_many,
    settle,
    simulated,
)

DEAD = TopicName("/default/dead-letters")
AT_ONCE = FailurePolicy(max_redelivery_count=2, base_redelivery_delay_ms=0, ack_timeout_ms=0)


def policy(poison: PoisonPolicy, *, count: int = 1, topic: str | None = None) -> FailurePolicy:
    return FailurePolicy(
        max_redelivery_count=count, base_redelivery_delay_ms=0, poison_policy=poison, dead_letter_topic=topic
    )


# --- exclusive and failover -------------------------------------------------------------------------------


@simulated
async def test_an_exclusive_subscription_refuses_a_second_consumer_while_the_first_is_connected() -> None:
    _, topic = await one_topic(BrokerFixture())
    first = await consume(topic, kind=Kind.EXCLUSIVE, consumer="first")
    with pytest.raises(SubscriptionBusy, match="first"):
        await topic.subscribe(SUB, Kind.EXCLUSIVE, "second")
    await publish(topic, "a")
    await settle()
    assert first.texts == ["a"]
    first.leave()
    second = await consume(topic, kind=Kind.EXCLUSIVE, consumer="second")
    await settle()
    assert second.texts == ["a"]


@simulated
async def test_the_same_consumer_may_take_over_from_itself() -> None:
    _, topic = await one_topic(BrokerFixture())
    old = await consume(topic, kind=Kind.EXCLUSIVE)
    await publish(topic, "a", "b")
    await settle()
    new = await consume(topic, kind=Kind.EXCLUSIVE)
    await settle()
    assert new.consumer == old.consumer
    assert old.over and old.outbox.ended is None, "the old stream ends cleanly"
    assert new.texts == ["a", "b"]


@simulated
async def test_the_type_of_an_existing_subscription_wins() -> None:
    _, topic = await one_topic(BrokerFixture())
    await consume(topic, kind=Kind.EXCLUSIVE, consumer="a")
    with pytest.raises(SubscriptionBusy):
        await topic.subscribe(SUB, Kind.SHARED, "b")


@simulated
async def test_a_standby_of_a_failover_subscription_is_promoted_with_everything_unacknowledged() -> None:
    """Defect A1."""
    _, topic = await one_topic(BrokerFixture())
    streams = [await consume(topic, kind=Kind.FAILOVER, consumer=f"c{number}") for number in range(3)]
    await publish_many(topic, 15)
    await settle()
    assert [each.texts for each in streams] == [numbers(10), [], []]
    streams[0].ack(0, 1, 2, 3)
    await settle()
    streams[0].leave()
    await settle()
    assert streams[1].texts == numbers(10, first=4)
    assert streams[2].texts == []
    streams[1].acks = True
    streams[1].ack_all()
    streams[1].leave()
    await settle()
    assert streams[2].texts[0] in ("14", "13", "12", "11"), "the third in line goes on"
    back = await streams[0].come_back()
    await publish(topic, "new")
    await settle()
    assert back.texts == [], "who comes back stands at the end of the line"


# --- shared -----------------------------------------------------------------------------------------------


@simulated
async def test_36_messages_for_three_shared_consumers_are_12_each_even_if_their_streams_open_later() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    names = ["a", "b", "c"]
    identities = [await topic.subscribe(SUB, Kind.SHARED, name) for name in names]
    producer = await topic.add_producer("producer")
    streams: list[Stream] = []
    for number in range(36):
        await topic.publish(producer, message(str(number)))
        if number in (3, 6, 9):
            streams.append(Stream(topic, topic.require(SUB), identities[number // 3 - 1], acks=True))
    await settle()
    assert [len(each.texts) for each in streams] == [12, 12, 12]
    assert sorted(streams[0].offsets + streams[1].offsets + streams[2].offsets) == list(range(36))


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.KEY_SHARED, Kind.FAILOVER])
@simulated
async def test_a_consumer_that_never_opens_its_stream_does_not_block_the_others(kind: Kind) -> None:
    """Defect A14."""
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    await topic.subscribe(SUB, kind, "silent")
    other = await consume(topic, kind=kind, consumer="other", acks=True)
    producer = await topic.add_producer("producer")
    await asyncio.gather(*(topic.publish(producer, message(str(n), key=str(n))) for n in range(30)))
    await asyncio.sleep(ATTACH_SECONDS - 1)
    assert len(other.texts) < 30
    await asyncio.sleep(1)
    await settle()
    assert sorted(other.texts, key=int) == numbers(30)
    assert set(other.attempts) <= {1, 2}


@simulated
async def test_a_consumer_that_was_given_up_may_still_open_its_stream() -> None:
    _, topic = await one_topic(BrokerFixture())
    identity = await topic.subscribe(SUB, Kind.EXCLUSIVE, "late")
    await asyncio.sleep(ATTACH_SECONDS + 1)
    assert not topic.require(SUB).is_healthy(identity)
    late = Stream(topic, topic.require(SUB), identity, acks=True)
    await publish(topic, "a")
    await settle()
    assert late.texts == ["a"]
    assert topic.require(SUB).is_healthy(identity)
    await asyncio.sleep(ATTACH_SECONDS * 2)
    await publish(topic, "b")
    await settle()
    assert late.texts == ["a", "b"]


@simulated
async def test_what_a_leaving_consumer_held_goes_to_the_others_first() -> None:
    _, topic = await one_topic(BrokerFixture())
    a = await consume(topic, consumer="a")
    b = await consume(topic, consumer="b")
    await publish_many(topic, 12)
    await settle()
    assert (a.offsets, b.offsets) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    a.leave()
    await settle()
    assert b.offsets == [1, 3, 5, 7, 9, 0, 2, 4, 6, 8]


# --- key-shared -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@simulated
async def test_the_order_of_a_key_survives_nacks_and_churn(seed: int) -> None:
    rng = Random(seed)
    broker, topic = await one_topic(BrokerFixture(unacked_max=20))
    patient = FailurePolicy(
        max_redelivery_count=1000, base_redelivery_delay_ms=100, backoff_strategy=BackoffStrategy.FIXED
    )
    await broker.topics.set_failure_policy(ORDERS, SUB, patient)
    acked: list[tuple[str, int]] = []
    streams = {name: await consume(topic, kind=Kind.KEY_SHARED, consumer=name) for name in "abc"}
    answered = dict.fromkeys(streams, 0)
    producer = await topic.add_producer("producer")
    for number in range(200):
        await topic.publish(producer, message(str(number), key=f"k{rng.randrange(7)}"))
        await asyncio.sleep(0.01)
        for name, stream in list(streams.items()):
            for arrival in stream.arrivals[answered[name] :]:
                answered[name] += 1
                offset = arrival.delivered.offset
                if rng.random() < 0.3:
                    stream.nack(offset)
                else:
                    stream.ack(offset)
                    acked.append((arrival.delivered.message.routing_key or "", offset))
            if rng.random() < 0.05:
                stream.leave()
                streams[name] = await stream.come_back()
                answered[name] = 0
    for stream in streams.values():
        stream.acks = True
        for arrival in stream.arrivals:
            stream.ack(arrival.delivered.offset)
    await asyncio.sleep(10)
    assert not topic.require(SUB).has_lag()
    by_key = sorted(acked)
    for _, group in groupby(by_key, key=lambda pair: pair[0]):
        offsets = [offset for _, offset in group]
        assert offsets == sorted(set(offsets))
    for key in {key for key, _ in acked}:
        in_time = [offset for each, offset in acked if each == key]
        assert in_time == sorted(in_time), f"key {key} was acknowledged out of order"


@simulated
async def test_while_a_key_waits_for_its_retry_other_keys_go_on() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, kind=Kind.KEY_SHARED)
    await publish(topic, "red 1", key="red")
    await publish(topic, "red 2", key="red")
    await publish(topic, "blue", key="blue")
    await settle()
    assert stream.texts == ["red 1", "blue"], "one message in flight per key"
    stream.nack(0)
    stream.ack(2)
    await asyncio.sleep(0.9)
    assert stream.texts == ["red 1", "blue"]
    await asyncio.sleep(0.2)
    assert stream.texts == ["red 1", "blue", "red 1"]
    stream.ack(0)
    await settle()
    assert stream.texts[-1] == "red 2"


@simulated
async def test_key_filters_choose_and_what_nobody_accepts_is_skipped() -> None:
    _, topic = await one_topic(BrokerFixture())
    red = await consume(topic, kind=Kind.KEY_SHARED, consumer="red", key_filters=("red*",), acks=True)
    blue = await consume(topic, kind=Kind.KEY_SHARED, consumer="blue", key_filters=("blu?",), acks=True)
    for key in ("red", "redder", "blue", "green"):
        await publish(topic, key, key=key)
    await settle()
    assert (red.texts, blue.texts) == (["red", "redder"], ["blue"])
    assert not topic.require(SUB).has_lag()


@simulated
async def test_a_poisoned_key_blocks_itself_and_discards_nothing() -> None:
    """Defect A13."""
    broker, topic = await one_topic(BrokerFixture())
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.BLOCK))
    stream = await consume(topic, kind=Kind.KEY_SHARED)
    for text in ("red 1", "red 2", "blue 1"):
        await publish(topic, text, key=text.split()[0])
    await settle()
    stream.nack(0)
    await settle()
    stream.nack(0)
    stream.ack(2)
    await publish(topic, "blue 2", key="blue")
    await settle()
    assert stream.texts == ["red 1", "blue 1", "red 1", "blue 2"]
    stream.ack(3)
    assert "poison blocks 1 of its keys" in stream.subscription.explain() or "blocked" in stream.subscription.explain()
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.DROP))
    await settle()
    assert stream.texts[-1] == "red 2", "what was queued behind the poison is still there"


# --- refusals and failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_a_nacked_message_comes_again_after_the_backoff_or_the_delay_that_was_asked_for(kind: Kind) -> None:
    broker, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    await broker.topics.set_failure_policy(ORDERS, SUB, FailurePolicy(ack_timeout_ms=0, max_redelivery_count=9))
    stream = await consume(topic, kind=kind)
    await publish(topic, "a")
    await settle()
    for asked, waited in [(0.0, 1.0), (0.0, 2.0), (7.5, 7.5), (0.0, 8.0), (100.0, 60.0)]:
        nacked_at = now()
        stream.nack(0, delay_seconds=asked)
        await asyncio.sleep(70)
        assert stream.arrivals[-1].at - nacked_at == pytest.approx(waited, abs=1e-6)
    assert stream.attempts == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_a_message_that_is_not_acknowledged_in_time_comes_again(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic, kind=kind)
    await publish(topic, "a")
    await asyncio.sleep(40)
    first, second = stream.arrivals
    assert second.at - first.at == pytest.approx(31, abs=1e-6), "30 s timeout, then 1 s backoff"
    stream.ack(0)
    assert not stream.subscription.has_lag()


@simulated
async def test_an_ack_that_comes_late_counts_all_the_same() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic)
    await publish(topic, "a")
    await asyncio.sleep(30.5)  # timed out, and waits for its retry
    stream.ack(0)
    await asyncio.sleep(10)
    assert stream.texts == ["a"]


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_a_poison_message_goes_to_the_dead_letter_topic_with_all_it_had(kind: Kind) -> None:
    broker, topic = await one_topic(BrokerFixture())
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.DEAD_LETTER, topic=DEAD))
    stream = await consume(topic, kind=kind, consumer="c")
    producer = await topic.add_producer("producer")
    await topic.publish(
        producer, message("bad", key="k", attributes={"mine": "1"}, schema_id=7, schema_version=3, request_id=5)
    )
    await topic.publish(producer, message("good", key="other"))
    await settle()
    stream.nack(0, reason="first")
    await settle()
    stream.nack(0, reason="cannot parse")
    stream.ack(1)
    await settle()
    assert not stream.subscription.has_lag()
    dead = await find_topic(broker, DEAD)
    ((_, copy),) = await dead.peek(0, 10)
    assert (copy.payload, copy.routing_key, copy.schema_id, copy.schema_version) == (b"bad", "k", 7, 3)
    assert copy.attributes == {
        "mine": "1",
        "x-original-topic": ORDERS,
        "x-original-subscription": SUB,
        "x-original-topic-offset": "0",
        "x-original-producer-id": str(producer_id(ORDERS, "producer")),
        "x-original-broker-addr": broker.broker_url,
        "x-poison-policy": "dead_letter",
        "x-delivery-attempt": "2",
        "x-failure-reason": "cannot parse",
    }


@simulated
async def test_a_dead_letter_that_cannot_be_copied_is_tried_again_and_never_lost() -> None:
    broker, topic = await one_topic(BrokerFixture())
    nowhere = TopicName("/nowhere/dead")
    retry = FailurePolicy(max_redelivery_count=0, poison_policy=PoisonPolicy.DEAD_LETTER, dead_letter_topic=nowhere)
    await broker.topics.set_failure_policy(ORDERS, SUB, retry)
    stream = await consume(topic)
    await publish(topic, "bad", "good")
    await settle()
    stream.nack(0)
    stream.ack(1)
    await asyncio.sleep(5)
    assert stream.subscription.get_lag_info().lag_messages == 1
    await broker.topics.create_namespace(nowhere.namespace)
    await asyncio.sleep(60)
    assert not stream.subscription.has_lag()
    assert [row.payload for _, row in await (await find_topic(broker, nowhere)).peek(0, 9)] == [b"bad"]
    assert stream.texts == ["bad", "good"], "only the copy was tried again"


@pytest.mark.parametrize("kind", [Kind.EXCLUSIVE, Kind.FAILOVER, Kind.SHARED])
@simulated
async def test_poison_that_blocks_stops_the_subscription_until_somebody_decides(kind: Kind) -> None:
    broker, topic = await one_topic(BrokerFixture(unacked_max=2))
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.BLOCK))
    stream = await consume(topic, kind=kind)
    await publish_many(topic, 4)
    await settle()
    stream.nack(0)
    await settle()
    stream.nack(0)
    stream.ack(1)
    await asyncio.sleep(100)
    assert stream.texts == ["0", "1", "0"]
    assert stream.subscription.explain().startswith("blocked by poison at offset 0")
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.DROP))
    await settle()
    assert stream.texts == ["0", "1", "0", "2", "3"]


@simulated
async def test_poison_that_is_dropped_is_skipped_and_not_sent_again() -> None:
    broker, topic = await one_topic(BrokerFixture())
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.DROP, count=0))
    stream = await consume(topic)
    await publish(topic, "bad", "good")
    await settle()
    stream.nack(0)
    stream.ack(1)
    await asyncio.sleep(100)
    assert stream.texts == ["bad", "good"]
    assert not stream.subscription.has_lag()


@simulated
async def test_a_policy_that_is_changed_applies_to_what_is_in_flight() -> None:
    """Defect A15."""
    broker, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic)
    await publish(topic, "a")
    await settle()
    quick = FailurePolicy(ack_timeout_ms=2_000, base_redelivery_delay_ms=500)
    await broker.topics.set_failure_policy(ORDERS, SUB, quick)
    await asyncio.sleep(3)
    assert stream.texts == ["a", "a"]
    assert stream.arrivals[1].at == pytest.approx(2.5, abs=1e-3)


@simulated
async def test_a_window_that_is_changed_applies_at_once() -> None:
    broker, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic)
    await publish_many(topic, 50)
    await settle()
    assert len(stream.texts) == 10
    await broker.topics.set_dispatch_config(ORDERS, SUB, unacked_max=25)
    await settle()
    assert len(stream.texts) == 25


@simulated
async def test_a_policy_may_be_set_before_the_subscription_exists_and_survives_a_restart() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.DROP, count=3))
    await consume(topic)
    broker = await host.restart()
    stored = await broker.topics.get_failure_policy(ORDERS, SUB)
    assert stored == policy(PoisonPolicy.DROP, count=3)
    topic = await find_topic(broker)
    assert topic.require(SUB)._machine.policy == stored


# --- rates and limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_a_dispatch_rate_delays_messages_and_loses_none(kind: Kind) -> None:
    """Defect A12."""
    host = BrokerFixture(heartbeat=OFF, unacked_max=1000, policies=TopicPolicy(max_subscription_dispatch_rate=10))
    _, topic = await one_topic(host)
    stream = await consume(topic, kind=kind, acks=True)
    producer = await topic.add_producer("producer")
    await asyncio.gather(*(topic.publish(producer, message(str(n), key=str(n))) for n in range(100)))
    await settle()
    assert 10 <= len(stream.texts) <= 11
    assert "rate limited" in stream.subscription.explain()
    await asyncio.sleep(5)
    assert 58 <= len(stream.texts) <= 62
    await asyncio.sleep(5)
    assert sorted(stream.texts, key=int) == numbers(100)
    assert set(stream.attempts) == {1}


@simulated
async def test_limits_count_only_the_living() -> None:
    """Defect A2."""
    host = BrokerFixture(policies=TopicPolicy(max_consumers_per_subscription=1, max_consumers_per_topic=2))
    _, topic = await one_topic(host)
    for number in range(5):
        stream = await consume(topic, consumer=f"c{number}")
        stream.leave()
    a = await consume(topic, consumer="a")
    with pytest.raises(LimitReached):
        await topic.subscribe(SUB, Kind.SHARED, "b")
    await consume(topic, "other", consumer="b")
    with pytest.raises(LimitReached):
        await topic.subscribe(SubscriptionName("third"), Kind.SHARED, "c")
    a.leave()
    await consume(topic, "third", consumer="c")


@simulated
async def test_a_consumer_that_was_here_before_counts_as_much_as_a_new_one() -> None:
    host = BrokerFixture(policies=TopicPolicy(max_consumers_per_subscription=1))
    _, topic = await one_topic(host)
    a = await consume(topic, consumer="a")
    a.leave()
    await consume(topic, consumer="b")
    with pytest.raises(LimitReached):
        await topic.subscribe(SUB, Kind.SHARED, "a")
    await consume(topic, consumer="b")  # a takeover is nobody new


@simulated
async def test_a_refused_consumer_leaves_nothing_behind() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await consume(topic, kind=Kind.EXCLUSIVE, consumer="holder")
    for number in range(3):
        with pytest.raises(SubscriptionBusy):
            await topic.subscribe(SUB, Kind.EXCLUSIVE, f"refused {number}")
    assert len(await host.metadata.list("/topics/default/orders/subscriptions/sub/consumers/")) == 1


# --- unsubscribe and seek -----------------------------------------------------------------------------------


@simulated
async def test_unsubscribe_is_refused_while_a_consumer_is_connected_and_then_removes_everything() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    stream = await consume(topic)
    await broker.topics.set_failure_policy(ORDERS, SUB, AT_ONCE)
    with pytest.raises(SubscriptionBusy):
        await topic.unsubscribe(SUB)
    stream.leave()
    await topic.unsubscribe(SUB)
    assert await host.metadata.list("/topics/default/orders/subscriptions/") == []
    with pytest.raises(SubscriptionUnknown):
        await topic.unsubscribe(SUB)
    await publish(topic, "a")
    again = await consume(topic)
    await publish(topic, "b")
    await settle()
    assert again.texts == ["b"], "a new subscription begins at the head"


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_seek_delivers_again_from_an_offset_and_forward_skips(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture(unacked_max=100))
    stream = await consume(topic, kind=kind, acks=True)
    producer = await topic.add_producer("producer")
    for number in range(20):
        await topic.publish(producer, message(str(number), key=str(number % 3)))
    await settle()
    assert sorted(stream.offsets) == list(range(20))
    stream.arrivals.clear()
    stream.subscription.seek(15)
    await settle()
    assert sorted(stream.offsets) == list(range(15, 20))
    stream.arrivals.clear()
    stream.subscription.seek(20)
    await publish(topic, "new", key="0")
    await settle()
    assert stream.texts == ["new"]


@simulated
async def test_seek_while_messages_are_in_flight_and_blocked_starts_clean() -> None:
    broker, topic = await one_topic(BrokerFixture(unacked_max=3))
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.BLOCK, count=0))
    stream = await consume(topic, kind=Kind.EXCLUSIVE)
    await publish_many(topic, 9)
    await settle()
    stream.nack(0)
    await settle()
    assert "blocked" in stream.subscription.explain()
    stream.subscription.seek(6)
    await settle()
    assert stream.texts[-3:] == ["6", "7", "8"]
    stream.ack(6, 7, 8)
    assert not stream.subscription.has_lag()


@simulated
async def test_a_subscription_may_start_at_an_offset() -> None:
    _, topic = await one_topic(BrokerFixture())
    await publish_many(topic, 5)
    assert (await settled(await consume(topic, "all", start=0))).texts == numbers(5)
    assert (await settled(await consume(topic, "some", start=3))).texts == ["3", "4"]
    assert (await settled(await consume(topic, "latest"))).texts == []
    assert (await settled(await consume(topic, "beyond", start=99))).texts == []


async def settled(stream: Stream) -> Stream:
    await settle()
    return stream


# --- one slow consumer ----------------------------------------------------------------------------------------


@simulated
async def test_a_consumer_that_reads_nothing_delays_neither_publishers_nor_other_subscriptions() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    identity = await topic.subscribe(SubscriptionName("stuck"), Kind.EXCLUSIVE, "stuck")
    stuck = topic.require(SubscriptionName("stuck")).attach(identity)  # and never reads
    brisk = await consume(topic, "brisk", acks=True)
    began = now()
    await publish_many(topic, 2000)
    await settle()
    assert now() - began < 0.01
    assert brisk.texts == numbers(2000)
    assert len(stuck) == 10, "bounded by the window"


@simulated
async def test_a_reader_that_hangs_for_one_subscription_delays_no_other() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    first = await consume(topic, "first", acks=True)
    second = await consume(topic, "second", acks=True)
    assert first.subscription._shipping is not None
    first.subscription._shipping.cancel()  # as good as a read that never returns
    await publish_many(topic, 100)
    await settle()
    assert second.texts == numbers(100)


# --- the end of a stream ------------------------------------------------------------------------------------


@simulated
async def test_when_the_topic_closes_streams_end_with_a_reason_to_look_it_up_again() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    stream = await consume(topic)
    await broker.stop()
    await settle()
    assert stream.over
    assert isinstance(stream.outbox.ended, NotServed)
    with pytest.raises(NotServed):
        await topic.subscribe(SUB, Kind.SHARED, "new")


@simulated
async def test_a_consumer_keeps_its_id_over_a_restart_of_the_broker() -> None:
    """Defect A4."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic, kind=Kind.EXCLUSIVE)
    await publish(topic, "a")
    host.kill()
    topic = await find_topic(await host.boot())
    again = Stream(topic, topic.require(SUB), stream.consumer, acks=True)
    await settle()
    assert again.texts == ["a"]


# --- explain --------------------------------------------------------------------------------------------------


@simulated
async def test_explain_says_in_one_sentence_why_a_subscription_is_drain() -> None:
    _, topic = await one_topic(BrokerFixture(unacked_max=2))
    stream = await consume(topic)
    explain = stream.subscription.explain
    assert explain() == "caught up: everything below offset 0 is acknowledged."
    await publish_many(topic, 3)
    await settle()
    assert explain().startswith("window full: 2 of 2 messages wait for an ack; 3 messages behind")
    stream.ack(0)
    await settle()
    stream.ack(1)
    assert explain().startswith("waiting for the ack of 1 message already sent; 1 message behind")
    stream.nack(2)
    assert explain().startswith("waiting for retry: 1 message failed and will be tried again, the first in 1.0 s")
    stream.leave()
    assert explain().startswith("no consumer is connected; 1 message behind: acknowledged below offset 2")


@simulated
async def test_explain_says_that_the_log_cannot_be_read() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic)

    async def broken(first: int, end: int, bytes_max: int) -> list[object]:
        raise NotServed(ORDERS, "the disk is on fire")

    topic.rows = broken  # type: ignore[method-assign,assignment]
    await publish(topic, "a")
    await settle()
    assert "The log cannot be read" in stream.subscription.explain()
    assert "on fire" in stream.subscription.explain()


@simulated
async def test_two_topics_do_not_hear_of_each_other() -> None:
    broker, orders = await one_topic(BrokerFixture())
    payments = await make_topic(broker, "/default/payments")
    a, b = await consume(orders, acks=True), await consume(payments, acks=True)
    await publish(orders, "order")
    await publish(payments, "payment")
    await settle()
    assert (a.texts, b.texts) == (["order"], ["payment"])


# --- registrations --------------------------------------------------------------------------------------


@simulated
async def test_a_consumer_that_is_silent_for_an_hour_is_forgotten_and_one_that_is_there_is_not() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stays = await consume(topic, kind=Kind.SHARED, consumer="stays")
    leaves = await consume(topic, kind=Kind.SHARED, consumer="leaves")
    leaves.leave()
    await asyncio.sleep(3000)
    assert len(topic.subscriptions[SUB].consumers) == 2  # a client may still come back with its old id
    host.kill()
    topic = await find_topic(await host.boot())
    stays = await consume(topic, kind=Kind.SHARED, consumer="stays")
    await asyncio.sleep(3000)
    assert len(topic.subscriptions[SUB].consumers) == 2  # and a restart gives it its time again
    await asyncio.sleep(1000)
    assert [each.name for each in topic.subscriptions[SUB].consumers] == ["stays"]
    assert not await host.metadata.list(f"/topics{ORDERS}/subscriptions/{SUB}/consumers/{leaves.consumer}")
    await publish(topic, "a")
    await settle()
    assert stays.texts == ["a"]


# --- counters ---------------------------------------------------------------------------------------------


@simulated
async def test_what_is_delivered_refused_repeated_and_given_up_is_counted() -> None:
    """Defect A22: counters that are exported and stay at zero."""
    broker, topic = await one_topic(BrokerFixture())
    await broker.topics.set_failure_policy(ORDERS, SUB, policy(PoisonPolicy.DROP, count=1))
    stream = await consume(topic, acks=False)
    await publish(topic, "abc")
    await settle()
    for _ in range(2):  # the first delivery and its one repetition
        stream.subscription.nack(0)
        await settle()
    metrics = stream.subscription.metrics
    assert (metrics.delivered.value, metrics.delivered_bytes.value) == (2, 6)
    assert (metrics.nacks.value, metrics.redeliveries.value) == (2, 1)
    assert metrics.exhausted == {PoisonPolicy.DROP.value: 1}
    wal = broker.telemetry.wal
    assert wal.appends.value == 1 and wal.groups.value == 1 and wal.append_bytes.value > 0


@simulated
async def test_what_a_native_consumer_has_no_bytes_for_is_not_overtaken_by_what_comes_behind_it() -> None:
    _, topic = await one_topic(BrokerFixture())
    await publish_many(topic, 12, at_once=1)
    name = SubscriptionName(SUB)
    identity = await topic.subscribe(name, Kind.EXCLUSIVE, "consumer", (), 0, native=True)
    subscription = topic.require(name)
    outbox = subscription.attach_native(identity)
    subscription.grant(identity, Permits(6, 1 << 20))
    await settle()
    subscription.detach(identity, outbox)  # it had six of them, which come as their second attempt
    identity = await topic.subscribe(name, Kind.EXCLUSIVE, "consumer", (), 0, native=True)
    outbox = subscription.attach_native(identity)
    subscription.grant(identity, Permits(12, 1_000))
    got: list[int] = []
    while len(got) < 12:
        items = await outbox.get()
        got += [at for each in items for first, end in each.ranges for at in range(first, end)]
        size_bytes = sum(each.batch.header.size_bytes for each in items)  # type: ignore[misc]
        subscription.grant(identity, Permits(12, size_bytes))
    assert got == list(range(12))
