"""Orphans of many objects: adopted one at a time, whoever dies, publishes, sends again or moves the topic meanwhile.

Here every object holds one batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import TopicName
from pydanube.formats.batch import Batch
from pydanube.history.rescue import RESCUED, Rescuer
from pydanube.testing.cluster import Cluster, Node
from tests.cluster.test_moving import orphans
from tests.cluster.test_moving import send as send_plain
from tests.harness.brokers import simulated
from tests.history.test_leftovers import SELDOM, begun, boot_active, flush_to_segments, lose, send, texts, verified


@pytest.fixture(autouse=True)
def one_batch_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Rescuer._read

    async def one(self: Rescuer, *args: Any) -> tuple[list[Batch], int]:
        batches, offset = await read(self, *args)
        return batches[:1], batches[0].header.end_offset if batches else offset

    monkeypatch.setattr(Rescuer, "_read", one)


class Steps:
    """What the rescuers of all brokers do, in order."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.hook: Any = None
        get, describe = cluster.objects.get, Rescuer._describe

        async def got(key: str) -> bytes:
            if "/rescue-" in key:
                self.done.append("get")
            return await get(key)

        async def described(rescuer: Rescuer, *args: Any, **options: Any) -> None:
            await describe(rescuer, *args, **options)
            self.done.append("describe")
            if self.hook is not None:
                await self.hook()

        monkeypatch.setattr(cluster.objects, "get", got)
        monkeypatch.setattr(Rescuer, "_describe", described)


def runs(of: list[str]) -> Iterator[tuple[str, int]]:
    """What was done, and how often in a row."""
    for place, each in enumerate(of):
        if place == 0 or of[place - 1] != each:
            following = next((at for at in range(place, len(of)) if of[at] != each), len(of))
            yield each, following - place


@simulated
async def test_no_more_than_one_object_of_an_orphan_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, topic, session = await begun()
    steps = Steps(cluster, monkeypatch)
    await send(cluster, topic, session, range(10))
    node = await lose(cluster, topic)
    await node.boot()
    await asyncio.sleep(20)
    assert [*runs(steps.done)] == [("get", 1), ("describe", 1)] * 10
    assert await orphans(cluster, topic) == 0 and await verified(cluster, topic) == []
    assert await texts(cluster, topic) == [str(number) for number in range(10)]
    assert [info async for info in cluster.objects.list("default/orders/rescue-")] == []
    assert await cluster.metadata.list(keys.RESCUES) == []


@simulated
async def test_what_is_sent_again_between_two_objects_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, topic, session = await begun()
    steps = Steps(cluster, monkeypatch)
    await send(cluster, topic, session, range(8))
    node = await lose(cluster, topic)
    again: list[int] = []

    async def resend() -> None:
        if len(again) < 6:  # sequence 2, which is adopted by then, and those behind it, which are not all
            again.extend(await send(cluster, topic, session, [2 + len(again)]))

    async def three() -> None:
        if steps.done.count("describe") == 3:
            for _ in range(6):
                await resend()

    steps.hook = three
    await node.boot()
    await asyncio.sleep(20)
    assert again[0] == 2 and all(offset >= 64 for offset in again[1:]), again
    assert await orphans(cluster, topic) == 0 and await verified(cluster, topic) == []
    assert await texts(cluster, topic) == [str(number) for number in range(8)]
    assert await send(cluster, topic, session, [7]) == [again[-1]]


@pytest.mark.parametrize("part", range(1, 6))
@simulated
async def test_an_adopter_that_dies_between_two_objects_leaves_the_rest_to_the_next(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, topic, session = await begun()
    steps = Steps(cluster, monkeypatch)
    await send(cluster, topic, session, range(6))
    node = await lose(cluster, topic)
    adopter = cluster.host(topic)
    assert adopter is not None

    async def kill() -> None:
        if steps.done.count("describe") == part and adopter.alive:
            adopter.kill()

    steps.hook = kill
    await boot_active(node)
    await asyncio.sleep(120)
    assert await orphans(cluster, topic) == 0 or not adopter.alive
    await adopter.boot()
    await asyncio.sleep(60)
    assert await orphans(cluster, topic) == 0 and await verified(cluster, topic) == []
    assert await texts(cluster, topic) == [str(number) for number in range(6)]


@simulated
async def test_a_topic_can_be_moved_and_uploads_go_on_between_two_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(6))
    node = await lose(cluster, topic)
    first = cluster.host(topic)
    assert first is not None
    first.objects.delay_max_seconds = 4.0  # each object takes a while
    await node.boot()
    await cluster.until(lambda: bool(_orphan_start(cluster, first, topic)), 300)
    await send(cluster, topic, session, [6])
    other = next(each.number for each in cluster.nodes if each not in (node, first))
    await flush_to_segments(cluster, topic, other)
    assert await orphans(cluster, topic) == 1
    await asyncio.sleep(30)
    assert await orphans(cluster, topic) == 0 and await verified(cluster, topic) == []
    assert await texts(cluster, topic) == [str(number) for number in range(7)]


def _orphan_start(cluster: Cluster, node: Node, topic: TopicName) -> int:
    found: Any = node.topic(topic)
    return found.orphans[0].start if found is not None and found.orphans else 0


@simulated
async def test_a_topic_that_moves_back_between_two_objects_reads_what_was_rescued_as_it_is_in_the_store() -> None:
    """Its own disk has it too, but without the mark."""
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(6))
    node = await lose(cluster, topic)
    first = cluster.host(topic)
    assert first is not None
    first.objects.delay_max_seconds = 4.0  # each object takes a while
    await boot_active(node)
    await cluster.until(lambda: _orphan_start(cluster, first, topic) >= 4, 300)
    node.objects.delay_max_seconds = 1_000.0  # the rest is adopted later
    await flush_to_segments(cluster, topic, node.number)
    found = node.topic(topic)
    assert isinstance(found, Topic) and found.log.lost_segments(found.orphans[0].epoch, found.orphans[0].start)
    node.objects.delay_max_seconds = 0.0
    rows = await found.rows(0, 3)
    assert [offset for offset, _ in rows] == [0, 1, 2]
    assert all(RESCUED in row.attributes for _, row in rows)


@simulated
async def test_an_older_orphan_that_waits_for_a_newer_one_is_not_read_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, topic, session = await begun()
    steps = Steps(cluster, monkeypatch)
    await send_plain(cluster, topic, "a", "b")
    await send(cluster, topic, session, range(3))
    first = await lose(cluster, topic)
    await send(cluster, topic, session, range(2, 5))
    second = await lose(cluster, topic)
    await first.boot()
    await asyncio.sleep(120)
    assert await orphans(cluster, topic) == 2
    assert steps.done.count("describe") == 2, "what no session sent need not wait"
    assert steps.done.count("get") <= 3
    await second.boot()
    await asyncio.sleep(30)
    assert await orphans(cluster, topic) == 0 and await verified(cluster, topic) == []
    assert await texts(cluster, topic) == ["a", "b", "0", "1", "2", "3", "4"]


@simulated
async def test_one_orphan_that_takes_long_does_not_keep_the_others_waiting() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    names = [await cluster.create(f"/default/t{number}", on=1) for number in range(6)]
    for name in names:
        await send_plain(cluster, name, "a")
    node = cluster.node(1)
    node.kill()
    await cluster.until(lambda: all(cluster.host(name) is cluster.node(2) for name in names))
    objects = cluster.node(2).objects
    put, gate = objects.put, asyncio.Event()

    async def slow(key: str, *args: Any, **options: Any) -> Any:
        if "/t0/" in f"/{key}":
            await gate.wait()
        return await put(key, *args, **options)

    objects.put = slow  # type: ignore[method-assign]
    await node.boot()
    await asyncio.sleep(20)
    assert [await orphans(cluster, name) for name in names] == [1, 0, 0, 0, 0, 0]
    gate.set()
    await asyncio.sleep(5)
    assert await orphans(cluster, names[0]) == 0


@simulated
async def test_uploads_of_the_topic_have_their_turn_while_an_orphan_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = TierConfig(upload_seconds=1.0, garbage_seconds=60.0, sweep_seconds=60.0)
    cluster = await Cluster(tier=tier).start(2)
    topic = await cluster.create("/default/orders", on=1)
    cluster.node(1).objects.away = True
    await send_plain(cluster, topic, *(str(number) for number in range(20)))
    node = await lose(cluster, topic)
    owner = cluster.node(2)
    owner.objects.delay_max_seconds = 4.0
    await node.boot()
    await cluster.until(lambda: bool(_orphan_start(cluster, owner, topic)), 300)
    offset = (await send_plain(cluster, topic, "new"))[0]
    while (offset, offset) not in await cluster.descriptors(topic):
        assert await orphans(cluster, topic) == 1, "the upload came behind the whole adoption"
        await asyncio.sleep(1)
    owner.objects.delay_max_seconds = 0.0
    await asyncio.sleep(30)
    assert await orphans(cluster, topic) == 0 and await verified(cluster, topic) == []
    assert len(await texts(cluster, topic)) == 21
