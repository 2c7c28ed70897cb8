"""A deletion that is cut off in the middle is finished by whoever opens the topic next."""

from __future__ import annotations

from typing import Any

import pytest

from pydanube.broker import registrations
from pydanube.core import keys
from pydanube.core.names import TopicName
from pydanube.errors import TopicUnknown, Unreachable
from tests.harness.brokers import ORDERS, BrokerFixture, consume, make_topic, one_topic, publish_many, settle, simulated

NAME = TopicName(ORDERS)


@pytest.mark.parametrize("answered", range(6))
@simulated
async def test_a_topic_whose_deletion_was_cut_off_is_gone_and_its_name_can_be_used(answered: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registrations, "OPERATIONS_PER_WRITE", 2)
        host = BrokerFixture()
        broker, topic = await one_topic(host)
        await publish_many(topic, 5)
        for number in range(3):
            await consume(topic, f"sub-{number}", start=0, acks=True)
        await settle()
        transact, left = host.metadata.transact, answered

        async def cut_off(compares: Any, operations: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Unreachable("metadata", "cut off")
            return await transact(compares, operations)

        host.metadata.transact = cut_off  # type: ignore[method-assign]
        with pytest.raises(Unreachable):
            await broker.topics.delete(NAME)
        host.metadata.transact = transact  # type: ignore[method-assign]
        host.kill()
        broker = await host.boot()
        if await host.metadata.get(keys.topic(NAME)) is not None:
            assert await host.metadata.get(keys.delivery(NAME)) is not None, (
                "nothing was removed: the topic is as it was"
            )
            topic = await broker.topics.require(NAME)  # type: ignore[assignment]
            assert topic.head == 5 and len(topic.subscriptions) == 3
            await broker.topics.delete(NAME)
        with pytest.raises(TopicUnknown):
            await broker.topics.require(NAME)
        assert broker.topics.unopened == {}
        again = await make_topic(broker)
        assert again.head == 0 and not again.subscriptions
        assert [item.key for item in await host.metadata.list(keys.below_topic(NAME))] == [keys.delivery(NAME)]
