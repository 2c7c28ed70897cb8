"""Brokers whose lease is over, topics that leave, brokers that come back: what they do not do any more, and not yet.

Whole brokers in one process, on a virtual clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from pydanube.broker.overview import Overview
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.dispatch.consumer_window import DispatchLimits
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import NamespaceName, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import DanubeError, NotServed
from pydanube.history.storage import StorageDesk
from pydanube.history.verify import VerifyProgress
from pydanube.ports import Disk, Put, Write, WriteResult
from pydanube.testing.cluster import Cluster, Node
from tests.harness.brokers import consume, message, numbers, simulated

SELDOM = TierConfig(upload_seconds=3600.0)


class Slow:
    """A disk that takes its time for a sync, while `held`."""

    def __init__(self, under: Disk) -> None:
        self._under = under
        self.free = asyncio.Event()
        self.free.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        results = await self._under.write(writes, sync=sync)
        await self.free.wait()
        return results


async def publish(node: Node, topic: Topic, text: str) -> int:
    async def one() -> int:
        return await topic.publish(await topic.add_producer("producer"), message(text))

    return await node.call(one())


def carried(node: Node, topic: TopicName) -> Any:
    found = node.topic(topic)
    assert isinstance(found, Topic) and found.storage is not None
    return found.storage.uploader.get(topic)


def phase_of(node: Node, topic: TopicName) -> str:
    assert node.broker is not None
    moving = node.broker.topics.moves.moving.get(topic)
    return moving.name if moving else ""


def may_serve(node: Node) -> bool:
    assert node.broker is not None and node.broker.cluster is not None
    return node.broker.cluster.may_serve()


# --- a lease that is over -----------------------------------------------------------------------------------


@simulated
async def test_a_message_that_is_on_disk_when_the_lease_is_over_is_not_acknowledged() -> None:
    """The lease is looked at again between the sync and the receipt."""
    cluster = Cluster(tier=SELDOM)
    disks: list[Slow] = []

    def wrap(disk: Disk) -> Disk:
        disks.append(Slow(disk))
        found: Any = disks[-1]
        return found  # type: ignore[no-any-return]

    cluster.wrap_disk = wrap
    await cluster.start(2)
    topic = await cluster.create("/default/orders", on=1)
    node, served = cluster.node(1), await cluster.served(topic)
    assert await publish(node, served, "a") == 0
    disks[0].free.clear()
    sending = asyncio.ensure_future(publish(node, served, "b"))
    await asyncio.sleep(0.1)
    assert may_serve(node) and not sending.done()
    node.metadata.cut = True
    await cluster.until(lambda: not may_serve(node))
    disks[0].free.set()
    with pytest.raises(DanubeError) as refused:
        await sending
    assert refused.value.retryable


@simulated
async def test_a_broker_whose_lease_is_over_delivers_nothing_until_it_has_one_again() -> None:
    cluster = await Cluster(tier=SELDOM, unacked_max=2).start(2)
    topic = await cluster.create("/default/orders", on=1)
    node, served = cluster.node(1), await cluster.served(topic)
    stream = await consume(served, "sub", Kind.SHARED)
    for text in numbers(5):
        await publish(node, served, text)
    await asyncio.sleep(0.1)
    assert stream.offsets == [0, 1]
    for each in cluster.nodes:
        each.metadata.cut = True  # from everybody, so that nobody takes it over
    await cluster.until(lambda: not may_serve(node))
    with pytest.raises(NotServed, match="lease"):
        stream.ack(0)  # which may count nowhere
    stream.subscription.change(limits=DispatchLimits(unacked_max=4))  # there is room
    await asyncio.sleep(10)
    assert stream.offsets == [0, 1]
    for each in cluster.nodes:
        each.metadata.cut = False
    await cluster.until(lambda: len(stream.offsets) == 4)
    assert cluster.host(topic) is node


@simulated
async def test_who_loses_a_topic_keeps_the_files_until_the_object_store_has_what_is_in_them() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    node = cluster.node(1)
    await publish(node, await cluster.served(topic), "a")
    node.partition()
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    node.metadata.cut = False  # it hears of its loss, and cannot rescue yet
    await asyncio.sleep(100)
    assert node.topic(topic) is None
    assert await node.disk.list("wal/default/orders") != []
    node.objects.away = False
    await asyncio.sleep(100)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    rows = await (await cluster.served(topic)).rows(0, 1)
    assert [(offset, found.payload) for offset, found in rows] == [(0, b"a")]
    assert await node.disk.list("wal/default/orders") == []


@simulated
async def test_an_object_of_a_lost_epoch_gets_no_descriptor_is_not_read_and_is_named_by_verify() -> None:
    cluster = await Cluster(tier=TierConfig(upload_seconds=1.0)).start(2)
    topic = await cluster.create("/default/orders", on=1)
    node = cluster.node(1)
    await publish(node, await cluster.served(topic), "a")
    node.metadata.cut = True
    await asyncio.sleep(3)  # it is put, and cannot be described
    [name] = [found.key async for found in cluster.objects.list("default/orders/data-")]
    found = await _taken_over(cluster, topic)
    node.kill()
    assert await cluster.descriptors(topic) == [] and found.first_offset == 0
    stream = await consume(found, "sub", Kind.SHARED, start=0, acks=True)
    after = await publish(cluster.node(2), found, "b")
    await asyncio.sleep(10)
    assert (stream.texts, stream.offsets) == (["b"], [after])
    assert await cluster.descriptors(topic) == [(after, after)]
    assert cluster.node(2).broker is not None

    async def tell(progress: VerifyProgress) -> None:
        pass

    desk = StorageDesk(cluster.node(2).broker.topics, "memory:")
    report = (await cluster.node(2).call(desk.verify(topic, repair=False, on_progress=tell))).report
    assert [(each.key, each.verdict.fate.value) for each in report.undescribed] == [(name, "orphaned")]


async def _taken_over(cluster: Cluster, topic: TopicName) -> Topic:
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    return await cluster.served(topic)


# --- a topic that leaves ------------------------------------------------------------------------------------


@simulated
async def test_what_is_long_to_upload_is_uploaded_while_publishes_go_on() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    node, served = cluster.node(1), await cluster.served(topic)
    for number in range(4):
        await publish(node, served, f"{number}" * 60_000)
    node.objects.delay_max_seconds = 2.0
    moving = asyncio.ensure_future(cluster.unload(topic, to=2))
    await cluster.until(lambda: phase_of(node, topic) == "upload")
    during = 0
    while phase_of(node, topic) == "upload":
        during += 1
        assert await publish(node, served, "more") == 3 + during
        await asyncio.sleep(0.05)
    assert during > 5
    await moving
    assert await cluster.value(keys.seal(topic)) is not None
    assert (await cluster.served(topic)).head == 4 + during


@simulated
async def test_nothing_is_forgotten_or_merged_once_a_topic_is_about_to_be_sealed() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    node = cluster.node(1)
    await publish(node, await cluster.served(topic), "a")
    assert carried(node, topic) is not None
    node.metadata.delay_max_seconds = 0.5
    moving = asyncio.ensure_future(cluster.unload(topic, to=2))
    await cluster.until(lambda: phase_of(node, topic) == "seal")
    assert carried(node, topic) is None, "uploads, merges and retention of it have ended"
    await moving


# --- a restart ----------------------------------------------------------------------------------------------


@simulated
async def test_a_topic_that_cannot_be_opened_is_reported_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cluster = await Cluster(tier=SELDOM).start(2)
    broker = cluster.node(1).broker
    assert broker is not None
    await cluster.node(1).call(broker.topics.create_namespace(NamespaceName("state")))
    names = ("/default/bad", "/default/state", "/state/orders", "/state/state")
    bad, *good = [await cluster.create(name, on=1) for name in names]
    for topic in (bad, *good):
        await publish(cluster.node(1), await cluster.served(topic), "a")
    cluster.node(1).kill()
    await cluster.metadata.transact([], [Put(keys.storage_object(bad, 0), b"none of ours")])
    began = cluster.clock.elapsed()
    await cluster.node(1).boot()
    assert cluster.clock.elapsed() - began < 1.0
    for topic in good:
        assert cluster.host(topic) is cluster.node(1)
        assert await publish(cluster.node(1), await cluster.served(topic), "b") == 1
    restarted = cluster.node(1).broker
    assert restarted is not None and list(restarted.topics.unopened) == [bad]
    state = await cluster.node(1).call(Overview(restarted).state(bad))
    assert state.state == "unassigned" and "it could not be opened here: " in state.sentence
    said = [(record.getMessage(), getattr(record, "topic", "")) for record in caplog.records]
    assert ("failed to reconcile topic", bad) in said
    assert {topic for sentence, topic in said if sentence == "reconciled topic on startup"} == {*good}
    assert ("startup reconciliation complete", "") in said
