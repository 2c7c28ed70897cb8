"""What the simulator found, each as one small story: the seeds say that it stays right, these say what was wrong."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history.ownership import void_end
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import DanubeError, LogStopped, Unreachable
from pydanube.log.wal import WalConfig
from pydanube.testing.cluster import TTL, Cluster
from pydanube.testing.faulty_disk import FaultyDisk
from tests.harness.brokers import consume, message, numbers, simulated

RESCUED = {"x-danube-rescued": "true"}
SUB = SubscriptionName("sub")
SELDOM = TierConfig(upload_seconds=3600.0)
SMALL = WalConfig(segment_bytes=1024, ballast_bytes=512, cache_bytes=0)


class Slow(Random):
    """Dice that always show the most."""

    def random(self) -> float:
        return 0.99


async def send(cluster: Cluster, topic: TopicName, *texts: str) -> list[int]:
    offsets = []
    for text in texts:

        async def one(found: Topic, text: str = text) -> int:
            return await found.publish(await found.add_producer("producer"), message(text))

        offsets.append(await cluster.publish(topic, one))
    return offsets


async def voids(cluster: Cluster, topic: TopicName) -> list[tuple[int, int]]:
    items = await cluster.metadata.list(keys.voids(topic))
    return [(start, void_end(item.value)) for item in items if (start := keys.start_of(item.key)) is not None]


@simulated
async def test_a_cursor_that_was_given_up_and_comes_late_does_not_go_back() -> None:
    cluster = await Cluster().start(2)
    topic = await cluster.create("/default/orders", on=1)
    stream = await consume(await cluster.served(topic), SUB, Kind.EXCLUSIVE)
    await send(cluster, topic, *numbers(10))
    await asyncio.sleep(0.1)
    stream.ack(*range(4))
    cluster.node(1).metadata.late = 1.0  # every write is lost, and made eight seconds later
    cluster.node(1).metadata._rng = Slow()
    await asyncio.sleep(5.5)
    cluster.node(1).metadata.late = 0.0
    stream.ack(*range(4, 10))
    stored = []
    for _ in range(200):
        await asyncio.sleep(0.1)
        stored.append(await cluster.value(keys.cursor(topic, SUB)))
    assert stored == sorted(stored) and stored[-1] == 9


@simulated
async def test_a_subscription_that_is_made_late_does_not_put_its_cursor_back() -> None:
    cluster = await Cluster().start(2)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, *numbers(5))
    orders = await cluster.served(topic)
    cluster.node(1).metadata.late = 1.0
    cluster.node(1).metadata._rng = Slow()
    with pytest.raises(Unreachable):
        await cluster.node(1).call(orders.subscribe(SUB, Kind.EXCLUSIVE, "c0", (), 0))
    cluster.node(1).metadata.late = 0.0
    stream = await consume(orders, SUB, Kind.EXCLUSIVE, start=0, acks=True)
    await asyncio.sleep(20)
    assert stream.offsets == list(range(5))
    assert await cluster.value(keys.cursor(topic, SUB)) == 4


@simulated
async def test_a_broker_whose_log_has_stopped_gives_its_topics_to_others() -> None:
    cluster = await Cluster(faulty_disks=True, wal=SMALL).start(2)
    topic = await cluster.create("/default/orders", on=1)
    assert await send(cluster, topic, "a") == [0]
    node = cluster.node(1)
    assert isinstance(node.disk, FaultyDisk) and node.broker is not None and node.broker.cluster is not None
    node.disk.faults.sync_fails = 1.0
    orders = await cluster.served(topic)
    with pytest.raises(LogStopped):
        await node.call(orders.publish(await orders.add_producer("producer"), message("b")))
    ended = node.broker.cluster.ended
    assert ended is not None and isinstance(ended.exception(), LogStopped)
    await node.stop()  # as the process does then
    assert await send(cluster, topic, "c") == [1]
    assert cluster.host(topic) is cluster.node(2)


@simulated
async def test_what_went_bad_on_a_disk_is_recorded_when_the_topic_moves_and_nobody_waits_for_it() -> None:
    cluster = await Cluster(faulty_disks=True, wal=SMALL, tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), SUB, Kind.EXCLUSIVE)
    await send(cluster, topic, *numbers(20))
    node = cluster.node(1)
    node.kill()
    assert isinstance(node.disk, FaultyDisk)
    segments = [path for path in node.disk.paths() if path.endswith(".wal")]
    assert len(segments) > 3
    durable = node.disk.durable(segments[1])
    assert durable is not None
    node.disk.flip(segments[1], 0)  # its header: the whole segment is lost
    await node.boot()
    await cluster.until(lambda: cluster.host(topic) is node)
    await cluster.unload(topic)
    lost = await voids(cluster, topic)
    assert len(lost) == 1 and 0 < lost[0][0] < lost[0][1] < 20
    stream = await consume(await cluster.served(topic), SUB, Kind.EXCLUSIVE, acks=True)
    await asyncio.sleep(3)
    assert stream.offsets == [offset for offset in range(20) if not lost[0][0] <= offset < lost[0][1]]
    assert any(path.startswith("wal/default/orders/") for path in node.disk.paths()), "what is damaged is kept"


@simulated
async def test_what_went_bad_is_not_forgotten_by_a_broker_that_dies_before_it_could_record_it() -> None:
    """The first segment's header: a second recovery took it for removed by retention, and removed it."""
    cluster = await Cluster(faulty_disks=True, wal=SMALL, tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, *numbers(20))
    node = cluster.node(1)
    node.kill()
    assert isinstance(node.disk, FaultyDisk)
    segments = [path for path in node.disk.paths() if path.endswith(".wal")]
    assert len(segments) > 3
    node.disk.flip(segments[0], 0)
    for _ in range(2):
        await node.boot()
        await cluster.until(lambda: cluster.host(topic) is node)
        node.kill()  # nothing was uploaded, so nothing was recorded
    await node.boot()
    await cluster.until(lambda: cluster.host(topic) is node)
    assert segments[0] in node.disk.paths(), "it is kept for a person to look at"
    await cluster.unload(topic)
    lost = await voids(cluster, topic)
    assert len(lost) == 1 and lost[0][0] == 0 < lost[0][1] < 20
    rows = await (await cluster.served(topic)).rows(lost[0][1], 20)
    assert [offset for offset, _ in rows] == list(range(lost[0][1], 20))


@pytest.mark.parametrize("moment", range(10))
def test_what_a_replaced_owner_takes_before_it_knows_is_not_lost(moment: int) -> None:
    """The store forgot the lease and the broker believes in it: it goes on, and must bring nothing back yet."""

    @simulated
    async def story() -> None:
        cluster = await Cluster(tier=SELDOM).start(3)
        topic = await cluster.create("/default/orders", on=1)
        await consume(await cluster.served(topic), SUB, Kind.EXCLUSIVE)
        await send(cluster, topic, "a")
        cluster.node(1).kill()  # its orphan stays: it does not come back for a long time
        await cluster.until(lambda: cluster.host(topic) is not None)
        node = cluster.host(topic)
        assert node is not None and node.broker is not None and node.broker.cluster is not None
        old = await cluster.served(topic)
        await send(cluster, topic, "b")
        await asyncio.sleep(2 * TTL + 0.5 * moment)
        await cluster.metadata.revoke(node.broker.cluster.membership.lease.id)
        taken: list[tuple[int, str]] = []
        while node.topic(topic) is old:
            try:
                offset = await node.call(old.publish(await old.add_producer("producer"), message(f"c{len(taken)}")))
            except DanubeError:
                break
            taken.append((offset, f"c{len(taken)}"))
            await asyncio.sleep(0.2)
        assert taken, "it was not the owner any more, and did not know"
        await asyncio.sleep(2 * TTL)
        rows = await (await cluster.served(topic)).rows(taken[0][0], taken[-1][0] + 1)
        assert [(offset, each.payload.decode()) for offset, each in rows] == taken

    story()


@simulated
async def test_who_steps_over_a_void_does_not_step_over_an_orphan_behind_it() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), SUB, Kind.KEY_SHARED)
    await send(cluster, topic, "a")
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    second = cluster.host(topic)
    assert second is not None
    await send(cluster, topic, "b")
    await asyncio.sleep(TTL)
    second.kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    third = cluster.host(topic)
    assert third is not None
    await send(cluster, topic, "c")
    await cluster.node(1).boot()
    for _ in range(600):
        if await voids(cluster, topic):
            break
        await asyncio.sleep(0.05)
    void, orphan = (await voids(cluster, topic))[0], (await cluster.metadata.list(keys.orphans(topic)))[0]
    assert void[1] == keys.start_of(orphan.key), "they touch"
    third.kill()  # before any cursor was stored that says so
    await third.boot()  # it knows the orphan from the store; the void it finds when it reads
    await cluster.until(lambda: cluster.host(topic) is third)
    stream = await consume(await cluster.served(topic), SUB, Kind.KEY_SHARED, acks=True)
    await asyncio.sleep(3)
    assert stream.texts == ["a", "c"]
    await second.boot()
    await asyncio.sleep(20)
    assert stream.texts == ["a", "c", "b"]


@simulated
async def test_rescued_messages_are_marked_also_where_they_lay_on_the_owners_own_disk() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), SUB, Kind.EXCLUSIVE)
    await send(cluster, topic, "a", "b")
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    after = (await send(cluster, topic, "c"))[0]
    await cluster.node(1).boot()
    assert cluster.node(1).broker is not None and cluster.node(1).broker.cluster is not None
    await cluster.node(1).call(cluster.node(1).broker.cluster.requests.activate(cluster.node(1).broker_id))
    await cluster.unload(topic, to=1)  # before anybody has adopted what its disk has
    assert len(await cluster.metadata.list(keys.orphans(topic))) == 1
    stream = await consume(await cluster.served(topic), SUB, Kind.EXCLUSIVE, acks=True)
    await asyncio.sleep(20)
    assert stream.offsets == [after, 0, 1]
    assert [each.delivered.message.attributes for each in stream.arrivals] == [{}, RESCUED, RESCUED]


@simulated
async def test_a_topic_that_keeps_nothing_is_released_or_stays_and_never_both() -> None:
    cluster = await Cluster().start(2)
    topic = await cluster.create("/default/news", reliable=False, on=1)
    cluster.node(1).metadata.late = 0.5
    cluster.node(1).metadata._rng = Random(3)
    with contextlib.suppress(DanubeError):
        await cluster.unload(topic, asked=cluster.node(2))
    cluster.node(1).metadata.late = 0.0
    for _ in range(300):
        cluster.host(topic)  # fails if there are two
        await asyncio.sleep(0.1)
    assert cluster.host(topic) is not None
