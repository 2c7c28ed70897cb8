"""Real brokers with a thousand topics: one is killed, one is stopped, and all topics are served by others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from pydanube.core import keys
from pydanube.core.cluster.placement import Marker
from pydanube.core.names import BrokerId, TopicName
from pydanube.ports import Put
from pydanube.stores.metadata.etcd import EtcdMetadataStore
from tests.e2e.clusters import TTL, EtcdBroker
from tests.e2e.etcd import etcd_in
from tests.support import run

pytestmark = pytest.mark.long

MANY = 1_000
WAIT_SECONDS = 120.0  # the machine may be busy; how long it takes is for bench/takeover.py


async def write(store: EtcdMetadataStore, topics: Sequence[TopicName]) -> None:
    """As creating them does: the leader finds them brokers."""
    for first in range(0, len(topics), 30):
        puts = [
            put
            for topic in topics[first : first + 30]
            for put in (
                Put(keys.topic(topic), b"null"),
                Put(keys.delivery(topic), b'"Reliable"'),
                Put(keys.namespace_topic(topic), b"null"),
                Put(keys.unassigned(topic), b"null"),
            )
        ]
        await store.transact([], puts)


async def topics_of(store: EtcdMetadataStore, broker: EtcdBroker) -> set[TopicName]:
    items = await store.list(keys.assignments(BrokerId(int(broker.broker_id))))
    return {found[1] for item in items if (found := keys.assignment_of(item.key)) is not None}


async def until_served(store: EtcdMetadataStore, brokers: Sequence[EtcdBroker], topics: Sequence[TopicName]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while set().union(*[await topics_of(store, each) for each in brokers]) != set(topics):  # noqa: ASYNC110
            await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def redirects(store: EtcdMetadataStore) -> AsyncIterator[list[TopicName]]:
    """Topics for which another target was named before anybody had claimed them, while the block lasts."""
    after = await store.transact([], [])
    assert after is not None
    targets: dict[TopicName, int] = {}
    found: list[TopicName] = []

    async def follow() -> None:
        async for events in store.watch(keys.UNASSIGNED, after):
            for event in events:
                topic = keys.topic_of_unassigned(event.key)
                assert topic is not None
                marker = Marker.from_bytes(event.value) if event.value is not None else None
                if marker is None:
                    targets.pop(topic, None)
                elif marker.to is not None and targets.setdefault(topic, marker.to) != marker.to:
                    found.append(topic)
                    targets[topic] = marker.to

    following = asyncio.create_task(follow())
    try:
        yield found
        assert not following.done(), "the watch ended, and so did the counting"
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def test_a_thousand_topics_of_a_killed_and_of_a_stopped_broker_are_served_by_others(tmp_path: Path) -> None:
    topics = [TopicName(f"/default/t{number:04}") for number in range(MANY)]
    with etcd_in(tmp_path) as etcd, contextlib.ExitStack() as started:
        brokers = [EtcdBroker(tmp_path / f"broker{number}", etcd.client, tmp_path / "store") for number in range(4)]
        started.enter_context(brokers[0])

        async def story() -> None:
            store = EtcdMetadataStore([etcd.client])
            try:
                await write(store, topics)
                await until_served(store, brokers[:1], topics)
                for each in brokers[1:3]:
                    await asyncio.to_thread(started.enter_context, each)
                await asyncio.sleep(TTL + 1)  # who was there before them is known to live only after a lease
                async with redirects(store) as found:
                    brokers[0].kill()
                    await until_served(store, brokers[1:3], topics)
                    # A target that stands still for three seconds is rightly replaced, and the machine is not ours.
                    assert len(found) < MANY / 100
                had = await topics_of(store, brokers[1])
                await asyncio.to_thread(started.enter_context, brokers[3])
                assert await asyncio.to_thread(brokers[1].stop) == 0
                await until_served(store, brokers[2:4], topics)
                assert len(had) > MANY / 4
            finally:
                await store.close()

        run(story())
        said = brokers[1].output.read_text()
        assert "not handed over" not in said and "ERROR" not in said
        for each in brokers[1:4]:
            assert "cannot be taken or moved yet" not in each.output.read_text()
