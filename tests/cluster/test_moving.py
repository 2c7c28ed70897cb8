"""A move, and what may happen between any two of its steps: whole brokers in one process, on a virtual clock.

The rows are those of the table in docs/adr/0003-the-cluster.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from pydanube.broker.ownership import Ownership
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.cluster.leader import FAILED_SECONDS
from pydanube.core.history.tiers import TierConfig, TopicHistory
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import MoveFailed, NotServed, Unreachable
from pydanube.history.snapshots import read_snapshot
from pydanube.history.tier_state import topic_prefix
from pydanube.ports import Compare, Delete, Put, Revision
from pydanube.testing.cluster import TTL, Cluster, Node
from pydanube.testing.faulty_disk import FaultyDisk
from tests.harness.brokers import consume, message, numbers, simulated
from tools.sim.cluster_recorder import everything

SELDOM = TierConfig(upload_seconds=3600.0)  # what was not uploaded by a move is on one disk alone


async def send(cluster: Cluster, topic: TopicName, *texts: str) -> list[int]:
    async def one(found: Topic, text: str) -> int:
        return await found.publish(await found.add_producer("producer"), message(text))

    return [await cluster.publish(topic, lambda found, text=text: one(found, text)) for text in texts]  # type: ignore[misc]


def phase_of(node: Node, topic: TopicName) -> str:
    assert node.broker is not None
    moving = node.broker.topics.moves.moving.get(topic)
    return moving.name if moving else ""


def is_ready(node: Node, topic: TopicName) -> bool:
    """Whether this broker has heard that the old owner let go."""
    assert node.broker is not None and node.broker.cluster is not None
    marker = node.broker.cluster.marker_of(topic)
    return marker is not None and marker.ready


async def orphans(cluster: Cluster, topic: TopicName) -> int:
    return len(await cluster.metadata.list(keys.orphans(topic)))


def in_background(work: Any) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may be dead
    return task


# --- who comes while a topic moves ------------------------------------------------------------------------


@simulated
async def test_who_is_refused_during_the_pause_waits_at_the_new_owner_and_is_served_as_soon_as_it_can_be() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, *numbers(5))
    old = await cluster.served(topic)
    cluster.node(1).objects.delay_max_seconds = 1.0
    moving = in_background(cluster.unload(topic, to=2, asked=cluster.node(3)))
    await cluster.until(lambda: phase_of(cluster.node(1), topic) in ("cursors", "rest"))
    with pytest.raises(NotServed) as refused:
        await cluster.node(1).call(old.add_producer("producer"))
    new = cluster.node(2).broker
    assert new is not None and refused.value.moved_to == new.stream_url
    found = await cluster.node(2).call(new.topics.require(topic))
    assert isinstance(found, Topic) and cluster.host(topic) is cluster.node(2), (
        "not refused once more, and not too early"
    )
    assert found.head == 5
    await moving


@simulated
async def test_a_broker_that_has_nothing_to_do_with_a_move_names_the_one_that_will_have_the_topic() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a")
    cluster.node(2).metadata.delay_max_seconds = 1.0  # the claim takes a while
    await cluster.unload(topic, to=2, asked=cluster.node(3))
    stranger, new = cluster.node(3).broker, cluster.node(2).broker
    assert stranger is not None and new is not None
    await cluster.until(lambda: is_ready(cluster.node(3), topic))
    with pytest.raises(NotServed) as refused:
        await cluster.node(3).call(stranger.topics.require(topic))
    assert refused.value.moved_to == new.stream_url


@simulated
async def test_who_waits_for_a_topic_that_does_not_come_is_sent_back() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a")
    old, new = cluster.node(1).broker, cluster.node(2).broker
    assert old is not None and new is not None
    cluster.node(1).objects.away, cluster.node(1).objects.delay_max_seconds = True, 1.0
    moving = in_background(cluster.unload(topic, to=2, asked=cluster.node(3)))
    await cluster.until(lambda: phase_of(cluster.node(1), topic) in ("cursors", "rest"))
    with pytest.raises(NotServed) as refused:
        await cluster.node(2).call(new.topics.require(topic))
    assert refused.value.moved_to == old.stream_url
    with pytest.raises(MoveFailed, match="rest"):
        await moving
    assert await send(cluster, topic, "b") == [1]


class Same(Random):
    """Dice that always show the most: everything takes equally long."""

    def random(self) -> float:
        return 1.0


@simulated
async def test_the_pause_is_a_few_ways_to_the_metadata_store_and_no_polling() -> None:
    """Seal, its event (half a way), what the new owner reads, claim."""
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE)
    await send(cluster, topic, *numbers(5))
    way = 0.1
    for node in cluster.nodes:
        node.metadata._rng, node.metadata.delay_max_seconds = Same(), way
    urls = {node.broker.stream_url: node for node in cluster.nodes if node.broker is not None}
    at, answered_by, refused = cluster.node(1), cluster.node(1), 0
    answered = [cluster.clock.elapsed()]
    moving = in_background(cluster.unload(topic, to=2, asked=cluster.node(3)))
    while answered_by is not cluster.node(2):
        try:
            assert at.broker is not None
            found = await at.call(at.broker.topics.require(topic))
            assert isinstance(found, Topic)
            await at.call(found.publish(await found.add_producer("producer"), message("x")))
            answered_by = at
            answered.append(cluster.clock.elapsed())
            await asyncio.sleep(0.01)
        except NotServed as error:
            at, refused = urls[error.moved_to], refused + 1
    await moving
    assert max(after - before for before, after in pairwise(answered)) < 3.6 * way + 0.05
    assert refused == 1, "who is told where to go is not refused there"


# --- a failure between any two steps ----------------------------------------------------------------------


@simulated
async def test_a_move_while_the_object_store_is_away_is_undone_and_may_be_tried_again() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    stream = await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE, acks=True)
    await send(cluster, topic, "a", "b")
    cluster.node(1).objects.away = True
    with pytest.raises(MoveFailed):
        await cluster.unload(topic, asked=cluster.node(2))
    assert cluster.host(topic) is cluster.node(1) and await send(cluster, topic, "c") == [2]
    await asyncio.sleep(1)
    assert stream.texts == ["a", "b", "c"], "it is dispatched on, in the same stream"
    cluster.node(1).objects.away = False
    await asyncio.sleep(FAILED_SECONDS + 1)
    assert await cluster.value(keys.unassigned(topic)) is None
    await cluster.unload(topic, asked=cluster.node(2))
    assert await send(cluster, topic, "d") == [3] and await orphans(cluster, topic) == 0


@simulated
async def test_a_seal_that_is_refused_leaves_the_topic_as_it_was_and_the_next_move_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a descriptor that was given up and came late: what the owner knew of its history was out of date."""
    release = Ownership.release
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")

    async def overtaken(owned: Ownership, *arguments: Any) -> None:
        monkeypatch.setattr(Ownership, "release", release)
        late = Put(keys.history(topic), TopicHistory().to_bytes())
        assert await cluster.metadata.transact([owned.compare], [late]) is not None
        await release(owned, *arguments)

    monkeypatch.setattr(Ownership, "release", overtaken)
    with pytest.raises(MoveFailed, match="seal"):
        await cluster.unload(topic, asked=cluster.node(2))
    assert cluster.host(topic) is cluster.node(1)
    await asyncio.sleep(FAILED_SECONDS + 1)
    await cluster.unload(topic, asked=cluster.node(2))
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    assert await send(cluster, topic, "c") == [2] and await orphans(cluster, topic) == 0
    assert [text for _, text, _ in await everything(await cluster.served(topic))] == ["a", "b", "c"]


@simulated
async def test_a_claim_that_is_not_answered_while_somebody_waits_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first offsets are reserved with it: of this process nobody got one of them."""
    claim = Ownership.claim.__func__  # type: ignore[attr-defined]
    reserved = []

    async def silent(cls: type[Ownership], *args: Any, **options: Any) -> Ownership:
        await claim(cls, *args, **options)
        monkeypatch.setattr(Ownership, "claim", classmethod(claim))
        reserved.append(options["reserve_end"])
        raise Unreachable("the metadata store", "its answer was lost")

    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")
    new = cluster.node(2).broker
    assert new is not None
    monkeypatch.setattr(Ownership, "claim", classmethod(silent))
    cluster.node(2).metadata.delay_max_seconds = 0.5
    in_background(cluster.unload(topic, to=2, asked=cluster.node(1)))
    await cluster.until(lambda: phase_of(cluster.node(1), topic) != "" or is_ready(cluster.node(2), topic))
    waiting = in_background(cluster.node(2).call(new.topics.require(topic)))
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2) and waiting.done())
    assert await send(cluster, topic, "c") == [2]
    assert len(reserved) == 1 and reserved[0] is not None
    assert await orphans(cluster, topic) == 0 and await cluster.metadata.list(keys.voids(topic)) == []


@simulated
async def test_what_a_move_uploaded_is_there_for_readers_without_a_broker() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, *numbers(5))
    await cluster.unload(topic)
    await asyncio.sleep(1)
    snapshot = await read_snapshot(cluster.objects, topic_prefix(topic))
    assert snapshot is not None and snapshot.head_uploaded == 5 and [each.end for each in snapshot.objects] == [5]


@simulated
async def test_a_move_from_a_full_disk_ends_and_its_clients_are_told() -> None:
    """Behind the seal the topic is somebody else's, also if its files cannot be finished here."""
    cluster = await Cluster(faulty_disks=True).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, *numbers(5))
    old = await cluster.served(topic)
    told: list[NotServed] = []
    old.closed.watch(told.append)
    node = cluster.node(1)
    assert isinstance(node.disk, FaultyDisk)
    node.disk.capacity_bytes = node.disk.used_bytes
    await cluster.unload(topic, to=2)
    new = cluster.node(2).broker
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    await cluster.until(lambda: bool(told))
    assert new is not None and [each.moved_to for each in told] == [new.stream_url]
    assert node.topic(topic) is None
    node.disk.capacity_bytes = None
    assert await send(cluster, topic, "6") == [5]
    await cluster.unload(topic, to=1)
    assert await send(cluster, topic, "7") == [6]


@simulated
async def test_an_owner_that_dies_before_the_seal_leaves_an_orphan_which_it_brings_back() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")
    cluster.node(1).objects.delay_max_seconds = 5.0
    in_background(cluster.unload(topic, asked=cluster.node(2)))
    await cluster.until(lambda: phase_of(cluster.node(1), topic) == "rest")
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    assert await orphans(cluster, topic) == 1
    assert (await send(cluster, topic, "c"))[0] > 1
    await cluster.node(1).boot()
    await asyncio.sleep(20)
    assert await orphans(cluster, topic) == 0


@simulated
async def test_an_owner_that_dies_right_after_the_seal_was_not_needed_any_more() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")
    for node in (cluster.node(2), cluster.node(3)):
        node.metadata.delay_max_seconds = 0.5
    in_background(cluster.unload(topic, asked=cluster.node(1)))
    await cluster.until(lambda: is_ready(cluster.node(1), topic))
    cluster.node(1).kill()
    assert await send(cluster, topic, "c") == [2]
    assert await orphans(cluster, topic) == 0


@simulated
async def test_a_target_that_dies_before_its_claim_is_replaced_and_the_offsets_go_on_at_the_seal() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")
    cluster.node(2).metadata.delay_max_seconds = 2.0
    in_background(cluster.unload(topic, to=2, asked=cluster.node(3)))
    await cluster.until(lambda: is_ready(cluster.node(3), topic))
    cluster.node(2).kill()
    took = await cluster.until(lambda: cluster.host(topic) is not None)
    assert took < TTL / 2, "long before its lease runs out"
    assert await send(cluster, topic, "c") == [2]
    assert await orphans(cluster, topic) == 0


@simulated
async def test_a_target_that_dies_after_its_claim_and_before_an_append_leaves_no_orphan() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")
    await cluster.unload(topic, to=2)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    cluster.node(2).kill()
    assert await send(cluster, topic, "c") == [2]
    assert await orphans(cluster, topic) == 0


@simulated
async def test_a_target_that_dies_after_an_append_is_taken_over_and_the_old_seal_does_not_count() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")
    await cluster.unload(topic, to=2)
    assert await send(cluster, topic, "c") == [2]
    cluster.node(2).kill()
    (after,) = await send(cluster, topic, "d")
    assert after > 2 and await orphans(cluster, topic) == 1
    stream = await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE, start=0, acks=True)
    await cluster.node(2).boot()
    await asyncio.sleep(20)
    assert sorted(stream.offsets) == [0, 1, 2, after] and sorted(stream.texts) == ["a", "b", "c", "d"]


# --- what moves -------------------------------------------------------------------------------------------


@simulated
async def test_a_consumer_goes_on_behind_its_stored_cursor_through_both_tiers() -> None:
    """Cursor 5 of 22: then 6 to 21 from the object store, and 22 to 27, which were published after the move."""
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    stream = await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE)
    await send(cluster, topic, *numbers(22))
    await asyncio.sleep(0.1)
    stream.ack(*range(6))
    await cluster.unload(topic, to=2)
    assert await cluster.value(keys.cursor(topic, SubscriptionName("sub"))) == 5
    assert await send(cluster, topic, *numbers(6, 22)) == list(range(22, 28))
    assert await cluster.descriptors(topic) == [(0, 21)]
    again = await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE, acks=True)
    await asyncio.sleep(1)
    assert again.offsets == list(range(6, 28)) and again.texts == numbers(22, 6)


@simulated
async def test_a_topic_without_a_message_moves_and_begins_at_0() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await cluster.unload(topic, to=2)
    sealed = await cluster.value(keys.seal(topic))
    assert (sealed["last_committed_offset"], sealed["next_offset"]) == (-1, 0)
    assert abs(sealed["timestamp"] - cluster.clock.time_us() / 1000) < 60_000, "milliseconds since 1970"
    assert await send(cluster, topic, "a") == [0]


@simulated
async def test_a_backlog_that_is_only_in_the_object_store_moves_with_its_topic() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), "sub", Kind.SHARED)
    await send(cluster, topic, *numbers(10))
    for target in (2, 3, 1):
        await cluster.unload(topic, to=target)
        await cluster.until(lambda target=target: cluster.host(topic) is cluster.node(target))  # type: ignore[misc]
    stream = await consume(await cluster.served(topic), "sub", Kind.SHARED, acks=True)
    await asyncio.sleep(1)
    assert stream.offsets == list(range(10)) and not stream.subscription.has_lag()


@simulated
async def test_the_second_owner_may_crash_before_the_first_has_returned() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), "sub", Kind.SHARED)
    await send(cluster, topic, "a")
    for text in ("b", "c"):
        host = cluster.host(topic)
        assert host is not None
        host.kill()
        await send(cluster, topic, text)
    assert await orphans(cluster, topic) == 2
    stream = await consume(await cluster.served(topic), "sub", Kind.SHARED, acks=True)
    for node in [each for each in cluster.nodes if not each.alive]:
        await node.boot()
    await asyncio.sleep(30)
    assert sorted(stream.texts) == ["a", "b", "c"] and await orphans(cluster, topic) == 0


@simulated
async def test_nothing_of_a_topic_comes_back_that_was_deleted_and_made_again_while_its_broker_was_away() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "old")
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    host = cluster.host(topic)
    assert host is not None and host.broker is not None
    await host.call(host.broker.topics.delete(topic))
    await cluster.create("/default/orders")
    assert await send(cluster, topic, "new") == [0]
    await cluster.node(1).boot()
    await asyncio.sleep(30)
    stream = await consume(await cluster.served(topic), "sub", Kind.SHARED, start=0, acks=True)
    await asyncio.sleep(5)
    assert (stream.texts, stream.offsets) == (["new"], [0]) and await orphans(cluster, topic) == 0
    assert cluster.node(1).broker is not None and cluster.node(1).broker.cluster is not None
    await cluster.node(1).call(cluster.node(1).broker.cluster.requests.activate(cluster.node(1).broker_id))
    await cluster.unload(topic, to=1)  # to the very disk that has files of the old one
    again = await consume(await cluster.served(topic), "again", Kind.SHARED, start=0, acks=True)
    await asyncio.sleep(5)
    assert (again.texts, again.offsets) == (["new"], [0])


# --- cursors that cannot be saved -------------------------------------------------------------------------


class Unwilling:
    """A metadata store that takes no change of some keys."""

    def __init__(self, under: Any, refused: Collection[str]) -> None:
        self._under = under
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        if any(operation.key in self._refused for operation in operations):
            raise Unreachable("metadata", "it does not take this one")
        return await self._under.transact(compares, operations)


@pytest.mark.parametrize("failing", [["s1"], ["s0", "s1", "s2"]])
def test_a_move_goes_on_when_cursors_cannot_be_saved_and_names_them(
    failing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The plan's fifth test: three subscriptions, and one cursor, or none, can be stored."""
    subscriptions = ["s0", "s1", "s2"]

    @simulated
    async def move() -> None:
        cluster = await Cluster().start(3)
        topic = await cluster.create("/default/orders", on=1)
        cursors = {name: keys.cursor(topic, SubscriptionName(name)) for name in subscriptions}
        streams = [await consume(await cluster.served(topic), name, Kind.EXCLUSIVE) for name in subscriptions]
        await send(cluster, topic, *numbers(10))
        await asyncio.sleep(0.1)
        node = cluster.node(1)
        node.metadata._under = Unwilling(node.metadata._under, [cursors[name] for name in failing])
        for count, stream in enumerate(streams, start=5):
            stream.ack(*range(count))
        await cluster.unload(topic, asked=cluster.node(2))
        await cluster.until(lambda: cluster.host(topic) not in (None, node))
        for count, name in enumerate(subscriptions, start=5):
            assert await cluster.value(cursors[name]) == (-1 if name in failing else count - 1)
        assert await send(cluster, topic, "more") == [10]
        again = await consume(await cluster.served(topic), failing[0], Kind.EXCLUSIVE, acks=True)
        await asyncio.sleep(1)
        assert again.offsets == list(range(11)), "repeated, not lost"

    with caplog.at_level(logging.WARNING):
        move()
    warned = [record for record in caplog.records if "Failed to flush cursor" in record.message]
    assert sorted(getattr(record, "subscription", "") for record in warned) == failing
    assert {record.levelname for record in warned} == {"WARNING"}
    total = [record for record in caplog.records if "All subscription cursor flushes failed" in record.message]
    assert [record.levelname for record in total] == (["ERROR"] if len(failing) == len(subscriptions) else [])
