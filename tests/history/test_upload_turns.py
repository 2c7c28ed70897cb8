"""Whose turn it is to be uploaded: topics with much to upload, or whose store hangs, leave the others their turns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import TopicName
from pydanube.history import uploads
from pydanube.history.turns import SLOW_AT_ONCE, SLOW_SECONDS, STEPS_AT_ONCE
from pydanube.ports import Buffer, ObjectInfo
from tests.harness.brokers import make_topic, now, publish, settle, simulated
from tests.harness.tiers import KIB, STILL, ObjectStoreFixture, TierFixture, carried

SOON = TierConfig(upload_seconds=5.0, object_bytes=16 * KIB, merge_count_min=1000, descriptors_max=10**6)


class Servers(ObjectStoreFixture):
    """A store that takes long for some topics, or for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}  # of a topic
        self.hanging: set[str] = set()
        self.busy = self.busiest = 0
        self.order: list[str] = []

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        topic = key.split("/")[1]
        if "/data-" in key:
            self.order.append(topic)
        self.busy += 1
        self.busiest = max(self.busy, self.busiest)
        try:
            await asyncio.sleep(self.seconds.get(topic, 0.0))
            while topic in self.hanging:  # noqa: ASYNC110  # it is looked at seldom enough
                await asyncio.sleep(10.0)
        finally:
            self.busy -= 1
        return await super().put(key, data, create=create)


async def begin(count: int, config: TierConfig = SOON) -> tuple[TierFixture, Servers, Broker, list[Topic]]:
    host = TierFixture(config)
    servers = host.objects = Servers()
    broker = await host.boot()
    return host, servers, broker, [await make_topic(broker, f"/default/t{number}") for number in range(count)]


async def described(host: TierFixture, topic: Topic) -> int:
    return len(await host.metadata.list(keys.storage_objects(topic.name)))


@simulated
async def test_a_topic_with_much_to_upload_leaves_the_others_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_READ_BYTES", 1)
    host, servers, _, topics = await begin(4)
    for topic in topics[:STEPS_AT_ONCE]:
        servers.seconds[topic.name.name] = 2.0
        for number in range(30):
            await publish(topic, Random(number).randbytes(5 * KIB).hex())
    for topic in topics[STEPS_AT_ONCE:]:
        await publish(topic, "a")
    began = now()
    while not all([await described(host, topic) for topic in topics[STEPS_AT_ONCE:]]):
        assert now() - began < 15.0, "they had to wait until the large ones were done"
        await asyncio.sleep(0.5)
    assert all(carried(topic).lag_offsets > 5 for topic in topics[:STEPS_AT_ONCE]), "which are not done yet"
    await asyncio.sleep(120)
    assert all(carried(topic).lag_offsets == 0 for topic in topics)
    assert servers.busiest <= STEPS_AT_ONCE


@pytest.mark.parametrize("hanging", [2, 10])
@simulated
async def test_topics_for_which_the_store_hangs_leave_the_others_their_turns_and_memory_is_bounded(
    hanging: int,
) -> None:
    host, servers, _, topics = await begin(hanging + 3)
    servers.hanging = {topic.name.name for topic in topics[:hanging]}
    for _ in range(40):
        for topic in topics:
            await publish(topic, "a")
        await asyncio.sleep(20)
    for topic in topics[hanging:]:
        assert await described(host, topic) > 10 and carried(topic).lag_offsets <= 3
    assert [await described(host, topic) for topic in topics[:hanging]] == [0] * hanging
    assert servers.busiest <= STEPS_AT_ONCE + SLOW_AT_ONCE
    servers.hanging.clear()
    await asyncio.sleep(120)
    assert all(carried(topic).lag_offsets == 0 for topic in topics)
    for topic in topics:
        await publish(topic, "b")
    await asyncio.sleep(30)
    assert all(carried(topic).lag_offsets == 0 and not carried(topic).is_slow for topic in topics)


@simulated
async def test_a_slow_step_is_not_given_up_while_there_is_a_place_for_it() -> None:
    host, servers, _, topics = await begin(SLOW_AT_ONCE)
    for topic in topics:
        servers.seconds[topic.name.name] = 4 * SLOW_SECONDS
        await publish(topic, "a")
    await asyncio.sleep(10 * SLOW_SECONDS)
    assert [await described(host, topic) for topic in topics] == [1] * SLOW_AT_ONCE
    assert len(servers.order) == SLOW_AT_ONCE, "once each"


@simulated
async def test_a_topic_that_waits_for_its_turn_keeps_nobody_else_from_it() -> None:
    """A move, a retention check, an operator: they have the topic to themselves, and do not wait for other topics."""
    _, servers, _, topics = await begin(STEPS_AT_ONCE + SLOW_AT_ONCE + 2)
    servers.hanging = {topic.name.name for topic in topics[:-1]}
    for topic in topics:
        await publish(topic, "a")
    await asyncio.sleep(7)
    assert servers.busy == STEPS_AT_ONCE
    for _ in range(5):
        await asyncio.sleep(1)
        async with asyncio.timeout(0.1):
            async with carried(topics[-1]).working:
                await settle()


@simulated
async def test_a_topic_that_closes_while_its_step_hangs_makes_place_at_once() -> None:
    host, servers, broker, topics = await begin(STEPS_AT_ONCE + 1)
    servers.hanging = {topic.name.name for topic in topics[:STEPS_AT_ONCE]}
    for topic in topics[:STEPS_AT_ONCE]:
        await publish(topic, "a")
    await asyncio.sleep(7)
    await publish(topics[-1], "a")
    await asyncio.sleep(7)
    assert await described(host, topics[-1]) == 0
    await broker.topics.delete(TopicName("/default/t0"))
    await asyncio.sleep(2)
    assert await described(host, topics[-1]) == 1


@simulated
async def test_a_step_that_fails_makes_place_as_one_that_succeeds() -> None:
    host, servers, _, topics = await begin(3, STILL)
    for topic in topics:
        await publish(topic, "a")
    servers.away = True
    await asyncio.sleep(60)
    servers.away = False
    await asyncio.sleep(60)
    assert [await described(host, topic) for topic in topics] == [1, 1, 1]
    storage: Any = topics[0].storage
    turns = storage.uploader._turns
    assert (turns._quick._value, turns._slow._value) == (STEPS_AT_ONCE, SLOW_AT_ONCE)
    assert not turns._turns


class Stuck(Servers):
    """A call that hangs and cannot be given up at once: as a thread in a file system that does not answer."""

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        try:
            return await super().put(key, data, create=create)
        except asyncio.CancelledError:
            await asyncio.sleep(5.0)
            raise


@simulated
async def test_steps_that_take_long_to_be_given_up_do_not_end_the_uploads() -> None:
    host = TierFixture(SOON)
    servers = host.objects = Stuck()
    broker = await host.boot()
    topics = [await make_topic(broker, f"/default/t{number}") for number in range(SLOW_AT_ONCE + STEPS_AT_ONCE + 2)]
    for each in topics:
        servers.hanging.add(each.name.name)
        await publish(each, "a")
    await asyncio.sleep(4 * SLOW_SECONDS)
    [uploader] = [task for task in broker._tasks if task.get_name() == "tiering"]
    assert not uploader.done()
    quick = await make_topic(broker, "/default/quick")  # its step does not wait for those that were given up
    await publish(quick, "a")
    await asyncio.sleep(2 * SLOW_SECONDS)
    assert quick.storage is not None and quick.storage.tier.objects.end == 1
