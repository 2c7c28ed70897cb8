"""What `make fuzz-rpc` found, each as a test of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from pydanube.broker.ownership import Ownership
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import Delivery
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import NotServed
from pydanube.ports import Delete, Put
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from tests.harness.brokers import ORDERS, SUB, BrokerFixture, consume, make_topic, publish, settle, simulated
from tests.harness.servers import TOPIC, Calls, refused, served

DEAD = TopicName("/default/dead")


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.KEY_SHARED])
@simulated
async def test_a_dead_letter_topic_that_refuses_at_once_does_not_keep_the_broker_busy(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing in that circle waits for anything: a real broker did nothing else any more."""
    broker = await BrokerFixture().boot()
    topic = await make_topic(broker)
    await broker.topics.create(DEAD, delivery=Delivery.NON_RELIABLE)  # keeps nothing, so it takes no dead letters
    policy = FailurePolicy(
        max_redelivery_count=0,
        base_redelivery_delay_ms=0,
        max_redelivery_delay_ms=0,
        poison_policy=PoisonPolicy.DEAD_LETTER,
        dead_letter_topic=DEAD,
    )
    await broker.topics.set_failure_policy(ORDERS, SUB, policy)
    await consume(topic, SUB, kind)
    await publish(topic, "poison")
    await settle()
    topic.require(SUB).nack(0)
    await asyncio.sleep(3.5)
    tries = [record for record in caplog.records if record.getMessage() == "dead letter not copied"]
    assert len(tries) == 4, "at once, and every second"
    assert topic.require(SUB).get_lag_info().lag_messages == 1, "it is not lost either"


@simulated
async def test_a_topic_can_be_closed_while_subscriptions_of_it_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await BrokerFixture().boot()
    topic = await make_topic(broker)
    write = Ownership.write

    async def write_slowly(self: Ownership, operations: Sequence[Put | Delete]) -> None:
        await asyncio.sleep(0.01)
        await write(self, operations)

    async def subscribe(number: int) -> None:
        await topic.subscribe(SubscriptionName(f"sub{number}"), Kind.SHARED, "consumer")

    for number in range(5):
        await subscribe(number)
    monkeypatch.setattr(Ownership, "write", write_slowly)
    subscribing = [asyncio.create_task(subscribe(number)) for number in range(5, 25)]
    await asyncio.sleep(0)
    await topic.close("the test wants it")
    outcomes = await asyncio.gather(*subscribing, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, NotServed) for outcome in outcomes)
    assert not topic.subscriptions, "none was made behind its back"


@simulated
async def test_a_time_before_all_time_is_the_head_of_an_empty_topic() -> None:
    topic = await make_topic(await BrokerFixture().boot())
    assert await topic.offset_at(-(2**63)) == topic.head == 0


@served()
async def test_a_topic_is_not_its_own_dead_letter_topic(calls: Calls) -> None:
    await calls.create_producer(TOPIC)
    request = admin_pb.SetSubscriptionFailurePolicyRequest(
        topic=TOPIC,
        subscription="sub",
        failure_policy=admin_pb.SubscriptionFailurePolicy(
            max_redelivery_delay_ms=1, poison_policy=admin_pb.DeadLetter, dead_letter_topic=TOPIC
        ),
    )
    code, sentence = await refused(calls.topics.SetSubscriptionFailurePolicy(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "for ever" in sentence
