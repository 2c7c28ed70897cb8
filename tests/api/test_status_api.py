"""How the cluster is doing, over the admin port: what is wrong, who is connected, what happened, what is unknown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from grpc import StatusCode

import pydanube
from pydanube.broker.events import KEPT_MAX, MINUTE_MAX, Events
from pydanube.core import keys
from pydanube.core.cluster.lifecycle import BrokerMode, BrokerState
from pydanube.core.cluster.placement import BROKER_LOST, Marker
from pydanube.core.cluster.presence import Happening, Presence
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import Refused
from pydanube.ports import Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.work.memory_clock import LoopClock
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.pydanube import status_pb2 as pb
from tests.harness.member_cluster import simulate
from tests.harness.server_cluster import ServerCluster, clustered
from tests.harness.servers import TOPIC, Calls, refused, served


async def status(calls: Calls) -> pb.ClusterStatusResponse:
    found: pb.ClusterStatusResponse = await calls.status.ClusterStatus(pb.ClusterStatusRequest())
    return found


def sentences(found: pb.ClusterStatusResponse) -> dict[str, str]:
    return {each.name: each.sentence for each in found.conditions}


async def told(calls: Calls, count: int) -> Sequence[pb.Happening]:
    """What happened, as soon as so much did: it is written behind the answers."""
    async with asyncio.timeout(10):
        while True:
            found: Sequence[pb.Happening] = (await calls.status.ListEvents(pb.ListEventsRequest())).events
            if len(found) >= count:
                return found
            await asyncio.sleep(0.01)


# --- alone -----------------------------------------------------------------------------------------------


@served()
async def test_a_broker_alone_has_a_status_with_its_numbers_and_no_complaint(calls: Calls) -> None:
    found = await status(calls)
    assert not found.conditions and found.is_standalone
    assert (found.brokers_alive, found.brokers_known) == (1, 1)
    [broker] = found.brokers
    assert broker.life == "answers" and broker.status.version and broker.status.HasField("memory_bytes")
    assert not broker.status.publish.HasField("p99_ms"), "nothing was published, so nobody knows how long it takes"


@served()
async def test_who_is_connected_is_told_with_address_client_and_what_is_not_acknowledged(calls: Calls) -> None:
    await calls.create_topic()
    consumer = await calls.subscribe(consumer="worker")
    stream = calls.receive(consumer)
    producer = await calls.create_producer()
    await calls.send(producer)
    await stream.read()
    async with (
        pydanube.connect(f"danube://{calls.servers.stream_addr}") as client,
        client.producer(TOPIC, name="native") as native,
    ):
        await native.send(b"x")
        found = (await calls.status.ListConnections(pb.ListConnectionsRequest(topic=TOPIC))).connections
        by_name = {each.name: each for each in found}
        assert set(by_name) == {"worker", "p", "native"}
        assert by_name["worker"].kind == "consumer" and by_name["worker"].subscription == "s"
        assert by_name["worker"].protocol == "grpc" and "grpc" in by_name["worker"].client
        assert by_name["worker"].unacked >= 1 and by_name["worker"].since_us > 0
        assert by_name["native"].protocol == "native" and by_name["native"].client
        assert by_name["native"].address.startswith("127.0.0.1:")
        assert not by_name["native"].HasField("unacked")
    stream.cancel()


@served()
async def test_subscriptions_are_listed_furthest_behind_first_with_their_age(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe("old", "a")
    producer = await calls.create_producer()
    await calls.send(producer)
    await calls.subscribe("new", "b")
    await calls.servers._observer.look()
    found = await calls.status.ListSubscriptions(pb.ListSubscriptionsRequest())
    assert [each.name for each in found.subscriptions] == ["old", "new"]
    old, new = found.subscriptions
    assert (
        old.lag_messages == 1 and 0 < old.lag_seconds < 60 and old.course == "keeping_up"
    )  # a consumer has just got it
    assert new.lag_messages == 0 and new.lag_seconds == 0 and new.course == "caught_up"
    assert not found.unknown and not found.left_out
    few = await calls.status.ListSubscriptions(pb.ListSubscriptionsRequest(count_max=1))
    assert len(few.subscriptions) == 1 and few.left_out == 1
    text = calls.broker.telemetry.snapshot().text().decode()
    [line] = [
        each for each in text.splitlines() if each.startswith("danube_subscription_lag_seconds") and "old" in each
    ]
    assert 0 < float(line.rpartition(" ")[2]) < 60


@served()
async def test_the_clusters_lag_is_that_of_each_topics_furthest_subscription_also_before_the_next_look(
    calls: Calls,
) -> None:
    async def lag() -> int:
        return int((await calls.status.ClusterStatus(pb.ClusterStatusRequest())).lag_messages.known)

    await calls.create_topic()
    await calls.subscribe("old", "a")
    await calls.subscribe("new", "b")
    producer = await calls.create_producer()
    await calls.send(producer)
    assert await lag() == 1, "nobody has looked at this topic yet: it is asked, and not taken for nothing"
    await calls.servers._observer.look()
    assert await lag() == 1, "as `danube top` and the page of the cluster have it"
    await calls.send(producer)
    assert await lag() == 1, "of the last look"
    await calls.topics.DeleteTopic(admin_pb.TopicRequest(name=TOPIC))
    assert await lag() == 0, "what has left is not counted"


@served()
async def test_names_that_do_not_exist_are_refused_and_a_partitioned_topic_is_all_its_partitions(calls: Calls) -> None:
    await calls.topics.CreatePartitionedTopic(admin_pb.PartitionedTopicRequest(base_name=TOPIC, partitions=2))
    async with (
        pydanube.connect(f"danube://{calls.servers.stream_addr}") as client,
        client.consumer(TOPIC, subscription="s"),
    ):
        connected = await calls.status.ListConnections(pb.ListConnectionsRequest(topic=TOPIC))
        listed = await calls.status.ListSubscriptions(pb.ListSubscriptionsRequest(topic=TOPIC))
        assert {each.topic for each in connected.connections} == {f"{TOPIC}-part-{each}" for each in (0, 1)}
        assert {each.topic for each in listed.subscriptions} == {f"{TOPIC}-part-{each}" for each in (0, 1)}
    for call in (
        calls.status.ListConnections(pb.ListConnectionsRequest(topic="/default/none")),
        calls.status.ListSubscriptions(pb.ListSubscriptionsRequest(topic="/default/none")),
        calls.status.ListSubscriptions(pb.ListSubscriptionsRequest(namespace="none")),
    ):
        code, sentence = await refused(call)
        assert code is StatusCode.NOT_FOUND and "none" in sentence
    code, _ = await refused(calls.status.ListConnections(pb.ListConnectionsRequest(topic="orders")))
    assert code is StatusCode.INVALID_ARGUMENT


@served()
async def test_orders_are_remembered_with_who_gave_them_and_questions_are_not(calls: Calls) -> None:
    await calls.create_topic()
    await calls.topics.DeleteTopic(admin_pb.TopicRequest(name=TOPIC))
    await calls.topics.DescribeTopic(admin_pb.DescribeTopicRequest(name=TOPIC)).code()
    events = await told(calls, 2)
    assert [each.sentence for each in events] == [f"DeleteTopic name={TOPIC}", f"CreateTopic name={TOPIC}"]
    assert all(each.kind == "order" and each.by.startswith("127.0.0.1:") for each in events)


@served()
async def test_orders_of_the_native_protocol_are_remembered_and_what_workers_do_is_not(calls: Calls) -> None:
    async with pydanube.connect(f"danube://{calls.servers.stream_addr}") as client:
        await client.create_topic(TOPIC)
        async with client.producer(TOPIC) as producer, client.consumer(TOPIC, subscription="s") as consumer:
            await producer.send(b"x")
            await (await consumer.receive()).ack()
            await client.describe_topic(TOPIC)
            await client.seek(TOPIC, "s", "earliest")
        await client.unsubscribe(TOPIC, "s")
        await client.delete_topic(TOPIC)
    events = await told(calls, 4)
    assert [each.sentence for each in events] == [
        f"DeleteTopic topic={TOPIC}",
        f"Unsubscribe topic={TOPIC} subscription=s",
        f"SeekSubscription topic={TOPIC} subscription=s offset=0",
        f"CreateTopic topic={TOPIC}",
    ]
    assert all(each.kind == "order" and each.by.startswith("127.0.0.1:") for each in events)


def test_the_log_of_what_happened_is_bounded_however_much_happens() -> None:
    async def story() -> None:
        clock = LoopClock()
        store = MemoryMetadataStore(clock)
        for number in range(KEPT_MAX + 100):
            old = Happening(time_ms=number, kind="order", sentence="old")
            await store.transact([], [Put(keys.event(clock.time_us() - 10**9 + number, BrokerId(1)), old.to_bytes())])
        events = Events(store, clock, BrokerId(1))
        writing = asyncio.create_task(events.run())
        for number in range(MINUTE_MAX * 3):
            events.record("order", f"number {number}")
        async with asyncio.timeout(10):
            while not any(each.kind == "more" for each in await events.newest(5)):  # noqa: ASYNC110
                await asyncio.sleep(1.0)
        assert len(await store.list(keys.EVENTS)) <= KEPT_MAX + MINUTE_MAX
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing

    simulate(story(), None)


@served()
async def test_what_was_done_through_another_port_is_an_order_when_it_is_noted(calls: Calls) -> None:
    await calls.status.NoteOrder(pb.NoteOrderRequest(order="RedriveLetters", topic=TOPIC, to_topic="/a/b", count=3))
    for wrong in (
        pb.NoteOrderRequest(order="rm -rf", topic=TOPIC),
        pb.NoteOrderRequest(order="RedriveLetters", topic="nothing"),
        pb.NoteOrderRequest(order="RedriveLetters", topic=TOPIC, to_topic="nothing"),
    ):
        assert (await refused(calls.status.NoteOrder(wrong))).code is StatusCode.INVALID_ARGUMENT
    async with pydanube.connect(f"danube://{calls.servers.stream_addr}") as client:
        assert await client.note_order("RedriveLetters", TOPIC, count=5)
        for order, topic in (("rm -rf", TOPIC), ("RedriveLetters", "nothing")):
            with pytest.raises(Refused):
                await client.note_order(order, topic)
    events = await told(calls, 2)
    assert [each.sentence for each in events] == [
        f"RedriveLetters topic={TOPIC} count=5",
        f"RedriveLetters topic={TOPIC} to_topic=/a/b count=3",
    ]
    assert all(each.kind == "order" and each.by.startswith("127.0.0.1:") for each in events)


# --- together --------------------------------------------------------------------------------------------


@clustered(2)
async def test_a_broker_that_does_not_answer_is_named_and_what_it_has_is_unknown(cluster: ServerCluster) -> None:
    await cluster.create("/default/here", on=1)
    await cluster.create("/default/there", on=2)
    first, second = cluster.calls(1), cluster.node(2)
    assert "DanubeBrokerDown" not in sentences(await status(first))
    await second.servers._admin.stop(None)
    found = await status(first)
    said = sentences(found)
    assert (
        "does not answer since" in said["DanubeBrokerDown"] and second.servers.client_addr in said["DanubeBrokerDown"]
    )
    assert "1 topic has no server" in said["DanubeTopicsUnassigned"]
    assert {each.severity for each in found.conditions[:2]} == {"critical"}
    assert (found.brokers_alive, found.brokers_known, found.topics, found.topics_unserved) == (1, 2, 2, 1)
    assert not found.lag_messages.is_complete
    [silent] = [each for each in found.brokers if each.life == "silent"]
    assert silent.broker_id == second.id and not silent.HasField("status")
    listed = await first.status.ListSubscriptions(pb.ListSubscriptionsRequest())
    assert [(each.broker_id, each.topics) for each in listed.unknown] == [(second.id, 1)]
    assert (list(listed.unanswered), listed.unserved) == (["/default/there"], 0)
    free = Marker(reason=BROKER_LOST, from_broker=BrokerId(99), wait=True)
    await cluster.metadata.transact([], [Put(keys.unassigned(TopicName("/other/free")), free.to_bytes())])
    await cluster.until(lambda: TopicName("/other/free") in cluster.node(1).cluster.view.markers)
    connected = await first.status.ListConnections(pb.ListConnectionsRequest())
    assert (list(connected.unanswered), connected.unserved) == (["/default/there", "/other/free"], 1)
    listed = await first.status.ListSubscriptions(pb.ListSubscriptionsRequest(namespace="default"))
    assert (list(listed.unanswered), listed.unserved) == (["/default/there"], 0)


@clustered(2)
async def test_a_silence_begins_with_the_first_question_in_vain_not_with_the_last_answer(
    cluster: ServerCluster,
) -> None:
    first, second = cluster.calls(1), cluster.node(2)
    await status(first)
    await asyncio.sleep(0.5)  # nobody looks
    await second.servers._admin.stop(None)
    asked_us = cluster.clock.time_us()
    since = [[each.since_us for each in (await status(first)).brokers if each.life == "silent"] for _ in range(2)]
    assert since[0] == since[1] and since[0][0] >= asked_us


@clustered(2)
async def test_a_broker_that_is_gone_stays_listed_until_it_is_forgotten(cluster: ServerCluster) -> None:
    first = cluster.node(1)
    await cluster.until(lambda: len(first.cluster.view.seen) == 2)
    gone = Presence(
        address="10.0.0.9:6650", session=1, since_ms=1_000, gone_ms=int(cluster.clock.time_us() / 1000) - 5_000
    )
    await cluster.metadata.transact([], [Put(keys.seen(BrokerId(99)), gone.to_bytes())])
    await cluster.until(lambda: BrokerId(99) in first.cluster.view.seen)
    found = await status(cluster.calls(2))
    left = BrokerState(mode=BrokerMode.ACTIVE, session=1, has_left=True)
    assert found.brokers_known == 3 and "10.0.0.9:6650 is gone since" in sentences(found)["DanubeBrokerDown"]
    await cluster.metadata.transact([], [Put(keys.broker_state(BrokerId(99)), left.to_bytes())])
    await cluster.until(lambda: BrokerId(99) in first.cluster.view.states)
    assert "10.0.0.9:6650 is stopped since" in sentences(await status(first.calls))["DanubeBrokerDown"]
    alive = await refused(first.calls.status.ForgetBroker(pb.ForgetBrokerRequest(broker_id=first.id)))
    assert alive.code is StatusCode.FAILED_PRECONDITION
    await first.calls.status.ForgetBroker(pb.ForgetBrokerRequest(broker_id=99))
    assert "DanubeBrokerDown" not in sentences(await status(first.calls))
    unknown = await refused(first.calls.status.ForgetBroker(pb.ForgetBrokerRequest(broker_id=99)))
    assert unknown.code is StatusCode.NOT_FOUND
