"""Files of a log that is still being closed are nobody else's to remove."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.core import keys
from pydanube.core.history.ownership import Owner
from pydanube.errors import LogClosed
from pydanube.ports import Put
from tests.harness.brokers import BrokerFixture, make_topic, one_topic, publish, settle, simulated


@simulated
async def test_files_of_a_lost_topic_stay_until_its_log_is_closed() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    other = await make_topic(broker, "/default/other")
    await publish(topic, "a")
    await publish(other, "a")
    await asyncio.gather(publish(topic, "b"), publish(other, "b"))  # in the journal only
    # Another broker has it by now, and has deleted it.
    tomb = Owner(epoch=topic.ownership.epoch + 1, session=1, broker_id=99, start_offset=0, released=True, deleted=True)
    await host.metadata.transact([], [Put(keys.owner(topic.name), tomb.to_bytes())])
    await topic._changing.acquire()  # its close takes a moment
    losing = asyncio.create_task(broker.topics.lose_all("declared lost"))
    await settle()
    with pytest.raises(LogClosed):
        await broker.topics.forget_epochs(topic.name, 1)  # as the rescuer does with what it has brought
    topic._changing.release()
    await losing
    await asyncio.sleep(1)
    assert broker.wal.committer.stopped is None
    assert await broker.topics.forget_epochs(topic.name, 1)
