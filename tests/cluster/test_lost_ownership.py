"""Topics that another broker took: who learns it closes them here, claims nothing back, acknowledges nothing more.

Whole brokers in one process, on a virtual clock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest

from pydanube.broker import topic_table
from pydanube.broker.ownership import Ownership
from pydanube.broker.take_over import AnyTopic  # type: ignore[attr-defined]
from pydanube.broker.topic import Topic
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.core import keys
from pydanube.core.cluster.placement import BROKER_LOST, Marker
from pydanube.core.commit.sessions import Sessions
from pydanube.core.history.ownership import RESERVE_OFFSETS_MIN
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import Delivery
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import Conflict, DanubeError, NotServed, OwnershipLost, Unreachable
from pydanube.history.tier import TopicTier
from pydanube.history.uploader import Uploader
from pydanube.history.uploads import TopicUploads
from pydanube.ports import Compare, Delete, Item, Put, Revision
from pydanube.testing.cluster import TTL, Cluster, Node
from tests.harness.brokers import SUB, consume, message, numbers, settle, simulated

SELDOM = TierConfig(upload_seconds=3600.0)
SOON = TierConfig(upload_seconds=1.0)


class Same(Random):
    """Dice that always show the most: everything takes equally long."""

    def random(self) -> float:
        return 1.0


async def publish(node: Node, topic: AnyTopic, text: str) -> int:
    async def one() -> int:
        return await topic.publish(await topic.add_producer("producer"), message(text))

    return await node.call(one())


async def rob(cluster: Cluster, topic: TopicName, thief: int) -> AnyTopic:
    """Another broker claims the topic from its owner, which is alive and was not declared dead."""
    node = cluster.node(thief)
    assert node.broker is not None
    await node.call(node.broker.topics.take_over(topic, Marker(reason=BROKER_LOST)))
    found = node.topic(topic)
    assert found is not None
    return found


def open_at(cluster: Cluster, topic: TopicName) -> list[int]:
    return [node.number for node in cluster.living if node.topic(topic) is not None]


# --- a broker that is declared dead while it starts ---------------------------------------------------------


@simulated
async def test_a_broker_that_is_declared_dead_while_it_starts_takes_nothing_from_those_who_have_its_topics_now() -> (
    None
):
    cluster = await Cluster(tier=SELDOM).start(1)
    names = [TopicName(f"/default/t{number}") for number in range(60)]
    broker = cluster.node(1).broker
    assert broker is not None
    for name in names:
        await cluster.node(1).call(broker.topics.make(name, delivery=Delivery.RELIABLE))
    await cluster.until(lambda: all(cluster.host(name) is not None for name in names))
    for number in (2, 3):
        cluster.nodes.append(Node(cluster, number))
        await cluster.node(number).boot()
    await asyncio.sleep(2 * TTL)  # they have seen it live
    node = cluster.node(1)
    node.kill()
    booting = asyncio.ensure_future(node.boot())
    await asyncio.sleep(0)
    node.metadata._rng, node.metadata.delay_max_seconds = Same(), 0.4
    mine = await _claims_of(cluster, node.known_id, names)
    while mine == await _claims_of(cluster, node.known_id, names):  # noqa: ASYNC110  # brokers tell nobody
        await asyncio.sleep(0.01)  # until the first of them are claimed again, and the others are still to be
    node.pause()
    await cluster.until(lambda: all(cluster.host(name) is not None for name in names), seconds=4 * TTL)
    taken = {name: await cluster.owner(name) for name in names}
    assert not any(owner.broker_id == node.known_id for owner in taken.values())
    node.resume()
    await booting
    await asyncio.sleep(2 * TTL)
    assert {name: await cluster.owner(name) for name in names} == taken, "nobody has claimed since"
    assert node.broker is not None and node.broker.topics.loaded == [] and not node.broker.topics.unopened
    for name in names[::10]:
        assert open_at(cluster, name) in ([2], [3])
        assert await publish(cluster.node(*open_at(cluster, name)), await cluster.served(name), "a") == 0


async def _claims_of(cluster: Cluster, broker: int, names: Sequence[TopicName]) -> list[int]:
    owners = [await cluster.owner(name) for name in names]
    return [owner.epoch for owner in owners if owner.broker_id == broker]


@simulated
async def test_a_broker_that_starts_claims_none_of_the_topics_that_it_had_if_others_have_them_now() -> None:
    """Its assignment may still stand when the list is made, and not when the claim is."""
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    broker = cluster.node(1).broker
    assert broker is not None and broker.cluster is not None
    names, session = await cluster.node(1).call(broker.cluster.own_topics()), broker.cluster.session
    await cluster.unload(topic, to=2)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
    before = await cluster.owner(topic)
    await cluster.node(1).call(broker.topics.load_all(names, session))
    assert (await cluster.owner(topic), open_at(cluster, topic)) == (before, [2])


@simulated
async def test_a_list_of_topics_from_before_a_broker_was_declared_dead_is_worth_nothing_afterwards() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    broker = cluster.node(1).broker
    assert broker is not None and broker.cluster is not None
    names, session = await cluster.node(1).call(broker.cluster.own_topics()), broker.cluster.session
    assert names == [topic]
    await cluster.node(1).call(broker.topics.lose_all("for a test"))
    broker.cluster.membership.session += 1
    before = await cluster.owner(topic)
    await cluster.node(1).call(broker.topics.load_all(names, session))
    assert (await cluster.owner(topic), open_at(cluster, topic)) == (before, [])


# --- who learns that a topic was lost closes it ----------------------------------------------------------------


@pytest.mark.parametrize("reliable", [True, False])
@simulated
async def test_a_topic_that_is_open_here_and_another_brokers_is_closed_within_seconds(reliable: bool) -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1, reliable=reliable)
    old = cluster.node(1).topic(topic)
    assert old is not None
    await publish(cluster.node(1), old, "a")
    stream = await consume(old)  # type: ignore[arg-type]
    await rob(cluster, topic, 2)
    await asyncio.sleep(3 * topic_table.SWEEP_SECONDS)
    assert open_at(cluster, topic) == [2] and stream.over
    with pytest.raises(DanubeError) as refused:
        await publish(cluster.node(1), old, "b")
    assert refused.value.retryable
    broker = cluster.node(1).broker
    assert broker is not None
    with pytest.raises(NotServed) as sent_on:
        await cluster.node(1).call(broker.topics.require(topic))
    assert cluster.node(2).broker is not None and sent_on.value.moved_to == cluster.node(2).broker.stream_url


async def _subscribe(cluster: Cluster, old: Topic) -> None:
    with pytest.raises(OwnershipLost):
        await cluster.node(1).call(old.subscribe(SubscriptionName("new"), Kind.SHARED, "consumer"))


async def _unsubscribe(cluster: Cluster, old: Topic) -> None:
    with pytest.raises(OwnershipLost):
        await cluster.node(1).call(old.unsubscribe(SubscriptionName("old")))


async def _ack(cluster: Cluster, old: Topic) -> None:
    old.require(SUB).ack(0)
    await asyncio.sleep(6)


async def _upload(cluster: Cluster, old: Topic) -> None:
    await asyncio.sleep(3)


async def _extend(cluster: Cluster, old: Topic) -> None:
    old.log.reserve(old.head)
    sending = asyncio.ensure_future(publish(cluster.node(1), old, "b"))
    await asyncio.sleep(1)
    assert sending.done() and isinstance(sending.exception(), DanubeError)


async def _move(cluster: Cluster, old: Topic) -> None:
    broker = cluster.node(1).broker
    assert broker is not None
    with pytest.raises(OwnershipLost):
        await cluster.node(1).call(broker.topics.hand_over(old.name, Marker()))


async def _rest(cluster: Cluster, old: Topic) -> None:
    with pytest.raises(OwnershipLost):
        await cluster.node(1).call(old._reservation.release_reservation())


async def _configure(cluster: Cluster, old: Topic) -> None:
    broker = cluster.node(1).broker
    assert broker is not None
    with pytest.raises(OwnershipLost):
        await cluster.node(1).call(broker.topics.set_dispatch_config(old.name, SUB, unacked_max=5))


LEARNERS = [_subscribe, _unsubscribe, _ack, _upload, _extend, _move, _rest, _configure]


@pytest.mark.parametrize("learn", LEARNERS, ids=lambda each: each.__name__.strip("_"))
@simulated
async def test_whoever_learns_that_a_topic_was_lost_has_it_closed_here_at_once(
    learn: Callable[[Cluster, Topic], Awaitable[None]],
) -> None:
    """Also one of the topic's own tasks, or who holds its lock: nobody waits for himself."""
    cluster = await Cluster(tier=SOON if learn is _upload else SELDOM).start(2)
    broker = cluster.node(1).broker
    assert broker is not None
    topic = await cluster.create("/default/orders", on=1)
    old = await cluster.served(topic)
    await cluster.node(1).call(old.subscribe(SubscriptionName("old"), Kind.SHARED, "gone"))
    old.require(SubscriptionName("old")).forget(old.require(SubscriptionName("old")).consumers[0].consumer_id)
    await consume(old)
    await publish(cluster.node(1), old, "a")
    await settle()
    _no_sweep(broker)
    new = await rob(cluster, topic, 2)
    await learn(cluster, old)
    await asyncio.sleep(1)
    assert open_at(cluster, topic) == [2]
    assert isinstance(new, Topic) and await publish(cluster.node(2), new, "c") >= RESERVE_OFFSETS_MIN
    await asyncio.sleep(60)
    assert await cluster.metadata.list(keys.orphans(topic)) == [], "what the robbed broker acknowledged was brought"
    rows = await new.rows(0, 1)
    assert [row.payload for _, row in rows] == [b"a"]


def _no_sweep(broker: Any) -> None:
    """The task that looks every few seconds is not there to help."""
    [task] = [each for each in broker._tasks if each.get_name() == "sweep"]
    task.cancel()


@simulated
async def test_a_topic_stays_open_while_the_store_says_that_it_is_ours_or_says_nothing() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    old = await cluster.served(topic)
    cluster.node(1).metadata.drop_every = 1  # it hears of nothing
    await cluster.metadata.transact([], [Delete(keys.assignment(cluster.node(1).broker_id, topic))])
    old.ownership._lost()
    await asyncio.sleep(4 * topic_table.SWEEP_SECONDS)
    assert open_at(cluster, topic) == [1]
    get, asked = cluster.node(1).metadata.get, 0

    async def silent(key: str) -> Item | None:
        nonlocal asked
        if key == keys.owner(topic):
            asked += 1
            raise Unreachable("metadata", "it says nothing")
        return await get(key)

    cluster.node(1).metadata.get = silent  # type: ignore[method-assign]
    await rob(cluster, topic, 2)
    old.ownership._lost()
    await asyncio.sleep(2 * topic_table.SWEEP_SECONDS)
    assert open_at(cluster, topic) == [1, 2] and asked >= 2
    cluster.node(1).metadata.get = get  # type: ignore[method-assign]
    await asyncio.sleep(2 * topic_table.SWEEP_SECONDS)
    assert open_at(cluster, topic) == [2]


# --- a claim that ends too late ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reliable", [True, False])
@simulated
async def test_a_claim_that_ends_after_everything_was_lost_leaves_nothing_open(
    reliable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1, reliable=reliable)
    broker = cluster.node(2).broker
    assert broker is not None
    gate, waiting = asyncio.Event(), asyncio.Event()
    kind: Any = Topic if reliable else VolatileTopic
    opened = kind.open

    async def late(self: Any, known: Any = None) -> None:
        waiting.set()
        await gate.wait()
        await opened(self, known)

    monkeypatch.setattr(kind, "open", late)
    claiming = asyncio.ensure_future(cluster.node(2).call(broker.topics.take_over(topic, Marker(reason=BROKER_LOST))))
    await waiting.wait()
    await cluster.node(2).call(broker.topics.lose_all("it was declared dead"))
    monkeypatch.undo()
    await rob(cluster, topic, 1) if cluster.node(1).topic(topic) is None else None
    gate.set()
    with pytest.raises(Conflict):
        await claiming
    assert broker.topics.loaded == [] and topic not in broker.wal._logs
    assert broker.cloud is not None and broker.cloud.uploader.get(topic) is None


@simulated
async def test_a_claim_that_ends_while_the_broker_stops_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    broker = cluster.node(2).broker
    assert broker is not None
    gate, waiting = asyncio.Event(), asyncio.Event()
    load = TopicTier.load

    async def late(self: Any, known: Any = None) -> None:
        waiting.set()
        await gate.wait()
        await load(self, known)

    monkeypatch.setattr(TopicTier, "load", late)
    claiming = asyncio.ensure_future(cluster.node(2).call(broker.topics.take_over(topic, Marker(reason=BROKER_LOST))))
    await waiting.wait()
    await cluster.node(2).call(broker.topics.close_all("it is shutting down"))
    gate.set()
    with pytest.raises(NotServed):
        await claiming
    assert broker.topics.loaded == [] and topic not in broker.wal._logs


# --- a rest beside a move ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("undone", [False, True])
@simulated
async def test_a_rest_beside_a_seal_writes_nothing_behind_it(undone: bool) -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    node, old = cluster.node(1), await cluster.served(topic)
    for text in numbers(3):
        await publish(node, old, text)
    broker = node.broker
    assert broker is not None and old.storage is not None
    await node.call(old.storage.uploader.upload_all(old.storage.uploader.get(topic)))  # type: ignore[arg-type]
    transact, gate = node.metadata.transact, asyncio.Event()

    async def held(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        if any(isinstance(each, Put) and each.key == keys.reserve(topic) for each in operations):
            await gate.wait()
        elif undone and any(each.key == keys.seal(topic) for each in operations):
            raise Unreachable("metadata", "no answer")
        return await transact(compares, operations)

    node.metadata.transact = held  # type: ignore[method-assign]
    resting = asyncio.ensure_future(node.call(old.release_reservation()))
    await settle()
    moving = asyncio.ensure_future(cluster.unload(topic, to=2))
    if undone:
        with pytest.raises(DanubeError):
            await moving
        gate.set()
        await resting
        assert (await cluster.value(keys.reserve(topic)))["end"] == 3
        assert await publish(node, old, "d") == 3
    else:
        await cluster.until(lambda: cluster.host(topic) is cluster.node(2))
        gate.set()
        with pytest.raises(OwnershipLost):
            await resting
        await moving
        assert await cluster.value(keys.reserve(topic)) is None
        assert await publish(cluster.node(2), await cluster.served(topic), "d") == 3
    await asyncio.sleep(1)
    item = await cluster.metadata.get(keys.reserve(topic))
    assert item is not None and json.loads(item.value)["end"] > 3
    assert open_at(cluster, topic) == [1 if undone else 2]


# --- a move that meets an error of another kind --------------------------------------------------------------------


def _break(cluster: Cluster, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has a defect there."""

    async def defect(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("nobody thought of that")

    def defect_at_once(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("nobody thought of that")

    if where == "upload":
        monkeypatch.setattr(TopicUploads, "upload", defect)
    elif where == "quiet":
        monkeypatch.setattr(Topic, "drain", defect)
    elif where == "rest":
        monkeypatch.setattr(Uploader, "upload_rest", defect)
    elif where == "seal":
        monkeypatch.setattr(Ownership, "release", defect)
    elif where == "behind the seal":
        release = Ownership.release

        async def sealed(self: Any, *arguments: Any) -> None:
            await release(self, *arguments)
            raise RuntimeError("nobody thought of that")

        monkeypatch.setattr(Ownership, "release", sealed)
    else:
        monkeypatch.setattr(Sessions, "newest", defect_at_once)


@pytest.mark.parametrize("reliable", [True, False])
@pytest.mark.parametrize("where", ["upload", "quiet", "rest", "sessions", "seal", "behind the seal"])
@simulated
async def test_a_move_that_meets_a_defect_ends_with_a_topic_that_serves(
    where: str, reliable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1, reliable=reliable)
    old = cluster.node(1).topic(topic)
    assert old is not None
    for _ in range(3):
        await publish(cluster.node(1), old, "x" * 60_000)
    _break(cluster, where, monkeypatch)
    if where == "seal" or (reliable and where != "behind the seal"):
        with pytest.raises(DanubeError, match="nobody thought of that"):
            await cluster.unload(topic, to=2)
    else:
        await cluster.unload(topic, to=2)
    monkeypatch.undo()
    await cluster.until(lambda: cluster.host(topic) is not None)
    host = cluster.host(topic)
    assert host is not None
    found = host.topic(topic)
    assert found is not None
    assert await publish(host, found, "b") == (3 if reliable else 0)
    await cluster.unload(topic, to=2 if host is cluster.node(1) else 1)
    await cluster.until(lambda: cluster.host(topic) not in (None, host))
    now = cluster.host(topic)
    assert now is not None
    found = now.topic(topic)
    assert found is not None and await publish(now, found, "c") == (4 if reliable else 0)


@simulated
async def test_a_move_that_fails_after_everything_was_lost_does_not_bring_the_topic_back_to_life() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    node, old = cluster.node(1), await cluster.served(topic)
    await publish(node, old, "a")
    broker = node.broker
    assert broker is not None and broker.cloud is not None
    transact = node.metadata.transact

    async def unanswered(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        if any(each.key == keys.seal(topic) for each in operations):
            await broker.topics.lose_all("it was declared dead")
            raise Conflict(keys.seal(topic))
        return await transact(compares, operations)

    node.metadata.transact = unanswered  # type: ignore[method-assign]
    with pytest.raises(DanubeError):
        await node.call(broker.topics.hand_over(topic, Marker()))
    assert broker.topics.loaded == [] and broker.cloud.uploader.get(topic) is None
    with pytest.raises(NotServed):
        await publish(node, old, "b")
