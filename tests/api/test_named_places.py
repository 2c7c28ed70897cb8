"""Names of topics, and the directories, objects, keys and addresses made of them, are one-to-one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import pydanube
import pydanube.testing
from pydanube.broker.stores import STAMP
from pydanube.core import keys
from pydanube.core.history.object_keys import check_key, path_of
from pydanube.core.names import OBJECTS_AT_THE_ROOT, BrokerId, SubscriptionName, TopicName
from pydanube.errors import InvalidName
from pydanube.log.layout import epoch_directory, topic_directory
from pydanube.log.wal import topics_on
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.objects.directory import FileObjectStore
from pydanube.stores.objects.owned import ID_KEY
from pydanube.web.site import topic_url

# Everything that other files, keys and names of ours end or begin with.
PIECES = (
    "a", "B", "é", "_", "__", "-", ".", "%", "part", "-part-0", "-part-1", "1", "wal", "tmp", "torn",
    "ckpt", "parquet", "json", "data-0-4", "manifest-1-2", "_snapshot-", "owner", "state", "topics", "subscriptions",
)  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)


def is_name(text: str) -> bool:
    try:
        TopicName(text)
    except InvalidName:
        return False
    return True


topics = st.builds("/{}/{}".format, texts, texts).filter(is_name).map(TopicName)


def places(topic: TopicName) -> list[str]:
    """Every path, object key, metadata key and address that the name is part of."""
    key = f"{topic[1:]}/data-0-4-1.parquet"
    return [
        topic_directory(topic),
        epoch_directory(topic, 7),
        check_key(key),
        path_of(key),
        keys.topic(topic),
        keys.owner(topic),
        keys.namespace_topic(topic),
        keys.unassigned(topic),
        keys.rescue(topic, 3),
        keys.assignment(BrokerId(1), topic),
        keys.storage_object(topic, 0),
        keys.cursor(topic, SubscriptionName("s")),
        keys.binding(f"topic{topic}", "me"),
        topic_url(topic),
    ]


@given(topics, topics)
@example(TopicName("/a/b.c"), TopicName("/a.b/c"))
@example(TopicName("/a/b.c"), TopicName("/a/b-c"))
@example(TopicName("/a/b"), TopicName("/a/b.wal"))
def test_two_topics_share_no_place_and_neither_is_below_the_other(one: TopicName, other: TopicName) -> None:
    assume(one != other)
    for mine, theirs in zip(places(one), places(other), strict=True):
        assert mine != theirs
        assert not theirs.startswith(f"{mine}/") and not mine.startswith(f"{theirs}/")


@given(topics)
@example(TopicName("/a/b.-part-0"))
@example(TopicName("/__x/a.b-part-3"))
def test_a_topic_is_read_back_from_its_places(topic: TopicName) -> None:
    assert keys.topic_of(keys.topic(topic)) == topic
    assert keys.topic_of_owner(keys.owner(topic)) == topic
    assert keys.topic_of_unassigned(keys.unassigned(topic)) == topic
    assert keys.topic_of_namespace(keys.namespace_topic(topic)) == topic
    assert keys.rescue_of(keys.rescue(topic, 3)) == (topic, 3)
    assert keys.assignment_of(keys.assignment(BrokerId(1), topic)) == (1, topic)
    number = topic.partition_number
    assert topic.base == topic if number is None else topic.base.partition_name(number) == topic


@given(st.sets(topics, min_size=1, max_size=4))
def test_what_is_on_disk_and_in_a_directory_of_objects_is_listed_under_its_name(found: set[TopicName]) -> None:
    async def run() -> None:
        disk = MemoryDisk()
        for topic in found:
            await disk.make_directory(epoch_directory(topic, 1))
        assert set(await topics_on(disk)) == found
        store = await FileObjectStore.open(MemoryDisk(), "file:///objects")
        for topic in found:
            await store.put(f"{topic[1:]}/data-0-4-1.parquet", [b"x"])
        for topic in found:
            assert [info.key async for info in store.list(f"{topic[1:]}/")] == [f"{topic[1:]}/data-0-4-1.parquet"]
        assert {"/" + info.key.rpartition("/")[0] async for info in store.list("")} == found
        await store.close()

    asyncio.run(run())


def test_every_object_at_the_root_of_a_store_is_no_name_of_a_namespace() -> None:
    assert {ID_KEY, STAMP} == OBJECTS_AT_THE_ROOT


@pytest.mark.parametrize("topic", ["/shop.eu/orders.v1", "/a/b.c-part-0"])
def test_the_directory_of_a_dotted_topic_has_its_name(topic: str) -> None:
    assert topic_directory(TopicName(topic)) == f"wal{topic}"
    assert not re.search(r"\.", path_of(f"{topic[1:]}/data.parquet").rpartition("/")[0])


def test_topics_with_dots_keep_their_messages_and_cursors_over_a_restart(tmp_path: Path) -> None:
    async def run() -> None:
        names = ["/default/orders.eu.v1", "/default/orders.eu", "/default/orders"]
        for attempt in range(2):
            async with (
                pydanube.testing.broker(tmp_path) as broker,
                pydanube.connect(broker.url) as client,
            ):
                if attempt == 0:
                    await client.create_topic("/default/clicks.eu", partitions=2)
                for name in names:
                    async with client.producer(name) as producer:
                        await producer.send(f"{name} {attempt}".encode())
                    async with client.consumer(name, subscription="my.work", start="earliest") as consumer:
                        message = await consumer.receive()
                        assert (message.payload, message.offset) == (f"{name} {attempt}".encode(), attempt)
                        await message.ack()
                parts = ["/default/clicks.eu-part-0", "/default/clicks.eu-part-1"]
                assert await client.list_topics("default") == sorted([*names, *parts])
                assert (await client.describe_topic("/default/clicks.eu")).partitions == 2

    asyncio.run(run())
