"""Moves of topics whose subscriptions have acknowledged out of order: nothing of it comes again, or it is said."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from pydanube.api.moves import Moves
from pydanube.broker import cursors
from pydanube.broker.move_log import MoveLog
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.testing.cluster import Cluster, Node
from tests.harness.brokers import Stream, consume, message, numbers, simulated

SUB = SubscriptionName("sub")


async def publish(node: Node, topic: Topic, count: int) -> None:
    producer = await node.call(topic.add_producer("producer"))

    async def all_of_them() -> None:
        await asyncio.gather(*(topic.publish(producer, message(text)) for text in numbers(count)))

    await node.call(all_of_them())


def every_second(count: int) -> tuple[OffsetRange, ...]:
    return tuple(OffsetRange(offset, offset + 1) for offset in range(1, count, 2))


async def scattered(cluster: Cluster, topic: TopicName, count: int, names: Sequence[str] = (SUB,)) -> Topic:
    """Every second message is acknowledged; whoever did so has left."""
    served = await cluster.served(topic)
    for name in names:
        stream = await consume(served, name, Kind.SHARED)
        stream.leave()
    await publish(cluster.node(1), served, count)
    for name in names:
        served.subscriptions[SubscriptionName(name)].ack_ranges(every_second(count))
    return served


async def delivered(topic: Topic, name: str = SUB) -> Stream:
    stream = await consume(topic, name, Kind.SHARED, acks=True)
    await asyncio.sleep(5)
    return stream


@simulated
async def test_nothing_acknowledged_comes_again_after_a_move_however_scattered() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await scattered(cluster, topic, 5_000)
    await asyncio.sleep(10)  # an ordinary save has cut it at 4 KiB meanwhile
    await cluster.unload(topic, to=2)
    assert (await delivered(await cluster.served(topic))).offsets == list(range(0, 5_000, 2))
    (move,) = _moves(cluster.node(1)).past_moves(topic)
    assert not move.failure and not move.notes


@simulated
async def test_nothing_acknowledged_comes_again_after_a_broker_was_told_to_stop() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await scattered(cluster, topic, 5_000)
    await asyncio.sleep(10)
    await cluster.node(1).stop()
    await cluster.until(lambda: cluster.host(topic) not in (None, cluster.node(1)))
    assert (await delivered(await cluster.served(topic))).offsets == list(range(0, 5_000, 2))


def test_a_move_that_cuts_acknowledgements_says_so_in_its_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cursors, "HOLES_LAST_SIZE_MAX_BYTES", 100)

    @simulated
    async def move() -> None:
        cluster = await Cluster().start(3)
        topic = await cluster.create("/default/orders", on=1)
        await scattered(cluster, topic, 200)
        old = cluster.node(1).broker
        assert old is not None
        await cluster.unload(topic, to=2)
        again = await delivered(await cluster.served(topic))
        assert len(again.offsets) == 100 + 53 and len(set(again.offsets)) == 153
        [answer] = Moves(old, None).past_here(topic)  # type: ignore[arg-type]
        [note] = answer.notes
        assert note.startswith("subscription sub: 53 acknowledged messages") and "delivered again" in note
        assert old.telemetry.moves.acks_cut.value == 53

    with caplog.at_level(logging.WARNING):
        move()
    assert [record.message for record in caplog.records if "delivered again" in record.message] == [
        "acknowledged messages will be delivered again: too scattered to be saved"
    ]


@pytest.mark.parametrize("saved", [False, True])
@simulated
async def test_an_owner_that_dies_between_its_cursors_and_its_seal_has_saved_only_what_is_true(saved: bool) -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    served = await scattered(cluster, topic, 5_000, ["a", "b"])
    await asyncio.sleep(10)
    if saved:
        await cluster.node(1).call(served.save_cursors())
    cluster.node(1).kill()
    for name in ("a", "b"):
        holes = await cluster.metadata.get(keys.ack_holes(topic, SubscriptionName(name)))
        assert holes is not None and (len(holes.value) > 4096) == saved
    await cluster.until(lambda: cluster.host(topic) not in (None, cluster.node(1)))
    await cluster.node(1).boot()
    for name in ("a", "b"):
        stream = await consume(await cluster.served(topic), name, Kind.SHARED, acks=True)
        await asyncio.sleep(30)  # what was on the disk of the dead is brought back
        unacked = set(range(0, 5_000, 2))
        assert set(stream.offsets) >= unacked, "nothing is lost"
        assert (set(stream.offsets) == unacked) == saved


@simulated
async def test_an_ack_that_could_not_be_taken_before_a_move_counts_at_the_next_owner_before_it_is_sent() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    served = await cluster.served(topic)
    stream = await consume(served, SUB, Kind.SHARED)
    await publish(cluster.node(1), served, 10)
    await asyncio.sleep(0.1)
    assert stream.offsets == list(range(10))
    await cluster.unload(topic, to=2)
    new = await cluster.served(topic)
    new.subscriptions[SUB].ack_ranges((OffsetRange(2, 9),))
    assert (await delivered(new)).offsets == [0, 1, 9]


def _moves(node: Node) -> MoveLog:
    assert node.broker is not None
    return node.broker.topics.moves
