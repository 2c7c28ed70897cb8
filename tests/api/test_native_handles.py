"""What a native consumer is sent, of what waits for it."""

from __future__ import annotations

import pytest

from pydanube.api.native.handles import ConsumerHandle
from pydanube.broker.outbox import DeliveredBatch
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind
from tests.harness.brokers import BrokerFixture, one_topic, publish_many, settle, simulated

NAME = SubscriptionName("s")


@pytest.mark.parametrize("kind", SubscriptionKind)
@simulated
async def test_what_was_acknowledged_while_it_waited_for_the_wire_is_not_sent(kind: SubscriptionKind) -> None:
    """Also if it was not sent before: whoever had it from another owner may have acknowledged it here."""
    _, topic = await one_topic(BrokerFixture())
    await publish_many(topic, 4, at_once=4)
    identity = await topic.subscribe(NAME, kind, "consumer", (), 0, native=True)
    subscription = topic.require(NAME)
    outbox = subscription.attach_native(identity)
    consuming = ConsumerHandle(1, topic, subscription, identity, outbox, 1 << 20)
    consuming.grant(4, 1 << 20)
    await settle()
    subscription.ack(0)
    subscription.ack(2)
    sent: list[int] = []
    while len(outbox):
        for each in await outbox.get():
            if isinstance(each, DeliveredBatch) and (wanted := consuming.wanted(each)) is not None:
                for offset in (offset for first, end in wanted.ranges for offset in range(first, end)):
                    sent.append(offset)
                    subscription.ack(offset)  # of one key, the next one comes then
        await settle()
    assert sent == [1, 3]
    await publish_many(topic, 6, at_once=6)
    await settle()
    again = [each for each in await outbox.get() if isinstance(each, DeliveredBatch)]
    assert again and sum(end - first for each in again for first, end in each.ranges) <= 2, (
        "what was not sent is granted again"
    )
