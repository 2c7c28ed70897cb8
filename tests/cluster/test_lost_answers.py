"""Moves and claims whose answers are lost, or come late, or meet somebody else: no gap, nobody stuck, nothing left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pydanube.broker.ownership import Ownership
from pydanube.core import keys
from pydanube.core.history.tiers import Retention
from pydanube.core.names import TopicName
from pydanube.errors import Unreachable
from pydanube.history.tier import TopicTier
from pydanube.testing.cluster import Cluster
from tests.cluster.test_moving import SELDOM, in_background, is_ready, orphans, phase_of, send
from tests.harness.brokers import numbers, simulated


async def two_with_a_topic(*texts: str) -> tuple[Cluster, TopicName]:
    """Two brokers, and a topic with these messages on the first."""
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, *texts)
    return cluster, topic


async def move_while_somebody_waits(cluster: Cluster, topic: TopicName) -> None:
    new = cluster.node(2).broker
    assert new is not None
    cluster.node(2).metadata.delay_max_seconds = 0.5
    in_background(cluster.unload(topic, to=2, asked=cluster.node(1)))
    await cluster.until(lambda: phase_of(cluster.node(1), topic) != "" or is_ready(cluster.node(2), topic))
    in_background(cluster.node(2).call(new.topics.require(topic)))


@simulated
async def test_a_claim_whose_answer_and_event_were_lost_leaves_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection broke, so the watch did, too: the next try still believes in the marker, and is refused."""
    claim = Ownership.claim.__func__  # type: ignore[attr-defined]
    cluster, topic = await two_with_a_topic("a", "b")

    async def silent(cls: type[Ownership], *args: Any, **options: Any) -> Ownership:
        monkeypatch.setattr(Ownership, "claim", classmethod(claim))
        cluster.node(2).metadata.drop_every = 1
        await claim(cls, *args, **options)
        assert options["reserve_end"] is not None
        raise Unreachable("the metadata store", "its answer was lost")

    monkeypatch.setattr(Ownership, "claim", classmethod(silent))
    await move_while_somebody_waits(cluster, topic)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    assert await send(cluster, topic, "c") == [2]
    assert await orphans(cluster, topic) == 0 and await cluster.metadata.list(keys.voids(topic)) == []


@simulated
async def test_a_claim_that_comes_between_the_next_look_and_the_next_claim_leaves_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = Ownership.claim.__func__  # type: ignore[attr-defined]
    cluster, topic = await two_with_a_topic("a", "b")
    first: list[Any] = []

    async def late(cls: type[Ownership], *args: Any, **options: Any) -> Ownership:
        if not first:
            first.extend((args, options))
            raise Unreachable("the metadata store", "it does not answer in time")
        monkeypatch.setattr(Ownership, "claim", classmethod(claim))
        await claim(cls, *first[0], **first[1])  # only now it arrives
        return await claim(cls, *args, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(Ownership, "claim", classmethod(late))
    await move_while_somebody_waits(cluster, topic)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    assert first[1]["reserve_end"] is not None
    assert await send(cluster, topic, "c") == [2]
    assert await orphans(cluster, topic) == 0 and await cluster.metadata.list(keys.voids(topic)) == []


@simulated
async def test_of_two_claims_without_an_answer_it_may_be_the_first_that_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claim = Ownership.claim.__func__  # type: ignore[attr-defined]
    cluster, topic = await two_with_a_topic("a", "b")
    tries: list[int | None] = []

    async def silent(cls: type[Ownership], *args: Any, **options: Any) -> Ownership:
        tries.append(options["reserve_end"])
        if len(tries) == 1:
            await claim(cls, *args, **options)
        else:
            monkeypatch.setattr(Ownership, "claim", classmethod(claim))
        raise Unreachable("the metadata store", "it does not answer in time")

    monkeypatch.setattr(Ownership, "claim", classmethod(silent))
    await move_while_somebody_waits(cluster, topic)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    assert len(tries) == 2 and tries[0] is not None
    assert await send(cluster, topic, "c") == [2]


@simulated
async def test_a_topic_that_was_claimed_and_could_not_be_opened_then_leaves_no_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a lost owner's topic what the store has is read behind the claim: an answer may be missing there."""
    load = TopicTier.load
    cluster, topic = await two_with_a_topic("a", "b")
    reserved: list[int] = []

    async def away(tier: TopicTier, known: Any = None) -> None:
        found = await cluster.value(keys.reserve(topic))
        reserved.append(found["end"])
        monkeypatch.setattr(TopicTier, "load", load)
        raise Unreachable("the metadata store", "it does not answer in time")

    claim = Ownership.claim.__func__  # type: ignore[attr-defined]
    starts: list[int] = []

    async def noted(cls: type[Ownership], *args: Any, **options: Any) -> Ownership:
        starts.append(options["start"])
        return await claim(cls, *args, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(Ownership, "claim", classmethod(noted))
    new = cluster.node(2).broker
    assert new is not None and new.cluster is not None
    member = new.cluster
    monkeypatch.setattr(TopicTier, "load", away)
    cluster.node(1).kill()

    def expected() -> bool:
        marker = member.marker_of(topic)
        return marker is not None and marker.to == new.broker_id

    cluster.node(2).metadata.delay_max_seconds = 0.5
    await cluster.until(expected)
    in_background(cluster.node(2).call(new.topics.require(topic)))
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    assert reserved[0] > starts[0], "it was reserved with the claim"
    assert starts == [starts[0]] * 2, "nothing was given out in between"
    assert await cluster.metadata.list(keys.voids(topic)) == []


@simulated
async def test_a_seal_that_is_given_up_by_a_write_whose_answer_is_lost_leaves_the_topic_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reassert = Ownership.reassert
    cluster, topic = await two_with_a_topic("a")
    release = Ownership.release

    async def unheard(owned: Ownership, *arguments: Any) -> None:
        raise Unreachable("the metadata store", "it does not answer in time")

    async def silent(owned: Ownership) -> bool:
        monkeypatch.setattr(Ownership, "release", release)
        monkeypatch.setattr(Ownership, "reassert", reassert)
        before = owned.revision
        await reassert(owned)
        owned.revision = before
        raise Unreachable("the metadata store", "its answer was lost")

    monkeypatch.setattr(Ownership, "release", unheard)
    monkeypatch.setattr(Ownership, "reassert", silent)
    moving = in_background(cluster.unload(topic, to=2, asked=cluster.node(1)))
    await cluster.until(moving.done, 300.0)
    found = await cluster.served(topic)
    assert found.ownership.revision == (await cluster.metadata.list(keys.owner(topic)))[0].revision
    assert found._closing is None, str(found._closing)


def slow_behind_the_seal(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, seconds: float) -> None:
    """The object store answers the old owner slowly from then on."""
    release = Ownership.release

    async def slow(owned: Ownership, *arguments: Any) -> None:
        monkeypatch.setattr(Ownership, "release", release)
        await release(owned, *arguments)
        cluster.node(1).objects.delay_max_seconds = seconds

    monkeypatch.setattr(Ownership, "release", slow)


@simulated
async def test_a_topic_can_come_back_while_its_last_snapshot_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, topic = await two_with_a_topic(*numbers(5))
    slow_behind_the_seal(monkeypatch, cluster, 100.0)
    in_background(cluster.unload(topic, to=2, asked=cluster.node(2)))
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    in_background(cluster.unload(topic, to=1, asked=cluster.node(2)))
    await cluster.until(lambda: cluster.host(topic) is cluster.node(1), 5.0)


@simulated
async def test_a_topic_that_is_deleted_right_after_a_move_leaves_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, topic = await two_with_a_topic(*numbers(5))
    slow_behind_the_seal(monkeypatch, cluster, 5.0)
    in_background(cluster.unload(topic, to=2, asked=cluster.node(1)))
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    new = cluster.node(2).broker
    assert new is not None
    await cluster.node(2).call(new.topics.delete(topic))
    await asyncio.sleep(60)
    assert [each.key async for each in cluster.objects.list("default/orders/")] == []


@simulated
async def test_who_reads_the_history_anew_behind_a_seal_without_an_answer_does_not_stop_the_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an operator who asks for retention, or a rescue, at the wrong moment: both waited for the upload to end."""
    cluster, topic = await two_with_a_topic("a", "b")
    storage = (await cluster.served(topic)).storage
    assert storage is not None
    uploader, carried = storage.uploader, storage.uploader.get(topic)
    assert carried is not None
    release = Ownership.release

    async def silent(owned: Ownership, *arguments: Any) -> None:
        monkeypatch.setattr(Ownership, "release", release)
        await release(owned, *arguments)
        await asyncio.sleep(1)
        raise Unreachable("the metadata store", "its answer was lost")

    async def retain() -> None:
        await uploader.retain_now(carried)

    read_retention = carried.read_retention
    assert read_retention is not None

    async def slowly() -> Retention:
        await asyncio.sleep(0.5)
        return await read_retention()

    carried.read_retention = slowly
    monkeypatch.setattr(Ownership, "release", silent)
    cluster.node(1).objects.delay_max_seconds = 0.5
    moving = in_background(cluster.unload(topic, to=2, asked=cluster.node(2)))
    await cluster.until(lambda: phase_of(cluster.node(1), topic) in ("cursors", "rest") and carried.working.locked())
    in_background(cluster.node(1).call(retain()))
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    await asyncio.sleep(5)
    assert moving.done() and cluster.node(1).topic(topic) is None, "it is closed where it was"
