"""Messages that no consumer could process: copied to a dead-letter topic, wherever that is served."""

from __future__ import annotations

from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.catalog import Catalog
from pydanube.core.names import TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import (
    NotServed,
    TopicUnknown,
)
from pydanube.formats.batch import Envelope


async def send_dead_letter(topics: Catalog, name: TopicName, message: Envelope) -> None:
    """Appends to the dead-letter topic, which is made if it is missing. Returns when the copy is safe."""
    message = message._replace(producer_name=f"broker-replicator-{topics.context.broker_id}")
    try:
        try:
            topic = await topics.require(name)
        except TopicUnknown:
            topic = await topics.create(name, delivery=Delivery.RELIABLE)
    except NotServed:
        if topics.remote is None:
            raise
        await topics.remote.append(name, message)
        return
    await append_to(topic, message)


async def append_to(topic: AnyTopic, message: Envelope) -> None:
    """A dead letter, from here or from another broker."""
    if not topic.reliable:
        raise NotServed(topic.name, "a dead-letter topic must be reliable")
    await topic.append(message)
