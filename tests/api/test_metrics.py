"""What a broker counts, as a scrape shows it: delivery and its failures, the log and its tiers, the cluster; health."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from time import thread_time
from typing import Any

import pydanube
from pydanube.api.process import serve
from pydanube.broker.service import Broker
from pydanube.config import BrokerConfig, ClusterConfig, Config, StorageConfig
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy
from pydanube.core.dispatch.lag import Standing
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.history.ownership import Orphan
from pydanube.core.names import BrokerId, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.telemetry import Telemetry
from pydanube.testing.cluster import Cluster
from pydanube.testing.ports import free_ports
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from tests.harness.brokers import (
    KIB,
    ORDERS,
    SUB,
    BrokerFixture,
    consume,
    find_topic,
    message,
    one_topic,
    publish,
    publish_many,
    settle,
    simulated,
)
from tests.harness.server_cluster import ServerCluster, clustered
from tests.harness.servers import Calls, served
from tests.harness.tiers import STILL, TierFixture
from tests.support import run
from tests.telemetry.test_telemetry import get, http, of_topic, scrape


def value(broker: Broker, metric: str, **labels: Any) -> float | None:
    """One number of a scrape, by the registry; None if there is no such series."""
    found: float | None = broker.telemetry.registry.get_sample_value(
        metric, {**{name: str(each) for name, each in labels.items()}, "broker": str(broker.broker_id)}
    )
    return found


def of_sub(broker: Broker, metric: str, **labels: str) -> float | None:
    return value(broker, metric, topic=ORDERS, subscription=SUB, **labels)


# --- lag ------------------------------------------------------------------------------------------------


@simulated
async def test_lag_counts_messages_behind_holes_and_not_offsets_that_hold_none() -> None:
    broker, topic = await one_topic(BrokerFixture(unacked_max=100))
    stream = await consume(topic)
    await publish_many(topic, 10)
    await settle()
    lag = "danube_subscription_lag_messages"
    stream.ack(3, 4, 9)  # holes: the cursor stays where it was
    assert of_sub(broker, lag) == 7
    stream.subscription.reveal((), (OffsetRange(5, 8),))  # a gap: nobody will ever find a message there
    assert of_sub(broker, lag) == 4
    stream.ack(0, 1, 2)
    assert of_sub(broker, lag) == 1
    stream.ack(8)
    assert of_sub(broker, lag) == 0


@simulated
async def test_lag_follows_a_seek_in_both_directions() -> None:
    broker, topic = await one_topic(BrokerFixture(unacked_max=100))
    stream = await consume(topic, acks=True)
    await publish_many(topic, 10)
    await settle()
    lag = "danube_subscription_lag_messages"
    assert of_sub(broker, lag) == 0
    stream.acks = False
    stream.subscription.seek(4)
    assert of_sub(broker, lag) == 6
    stream.subscription.seek(10)
    assert of_sub(broker, lag) == 0
    topic.orphans = [Orphan(start=2, end=5, broker_id=BrokerId(7), epoch=1)]
    await consume(topic, "late", start=0)
    late = value(broker, lag, topic=ORDERS, subscription="late")
    assert late == 7, "what only a lost broker has cannot be delivered, so nobody is behind with it"


# --- delivery that fails --------------------------------------------------------------------------------


@simulated
async def test_acks_that_do_not_come_and_messages_that_are_given_up_are_counted() -> None:
    broker, topic = await one_topic(BrokerFixture())
    dead = TopicName("/default/dead")
    policy = FailurePolicy(
        max_redelivery_count=1,
        ack_timeout_ms=1000,
        base_redelivery_delay_ms=0,
        poison_policy=PoisonPolicy.DEAD_LETTER,
        dead_letter_topic=dead,
    )
    await broker.topics.set_failure_policy(ORDERS, SUB, policy)
    await consume(topic, kind=Kind.EXCLUSIVE)
    assert of_sub(broker, "danube_subscription_ack_timeout_total") == 0
    assert of_sub(broker, "danube_subscription_dlq_total", poison_policy="DeadLetter") == 0
    await publish(topic, "a", "b")
    await asyncio.sleep(0.9)
    assert of_sub(broker, "danube_subscription_ack_timeout_total") == 0
    await asyncio.sleep(5)
    assert of_sub(broker, "danube_subscription_ack_timeout_total") == 4, "two messages, twice each"
    assert of_sub(broker, "danube_subscription_redelivery_total") == 2
    assert of_sub(broker, "danube_subscription_retry_exhausted_total", poison_policy="DeadLetter") == 2
    assert of_sub(broker, "danube_subscription_dlq_total", poison_policy="DeadLetter") == 2
    assert of_sub(broker, "danube_subscription_lag_messages") == 0


# --- topics ---------------------------------------------------------------------------------------------


@simulated
async def test_sizes_of_messages_are_a_histogram_of_their_topic() -> None:
    broker, topic = await one_topic(BrokerFixture())
    bucket = "danube_topic_message_size_bytes_bucket"
    assert value(broker, bucket, topic=ORDERS, le="+Inf") is None, "an idle topic has no such lines"
    await publish(topic, "x" * 64, "x" * 65, "x" * 300_000)
    found = [value(broker, bucket, topic=ORDERS, le=le) for le in ("64.0", "256.0", "262144.0", "1048576.0", "+Inf")]
    assert found == [1, 2, 2, 3, 3]
    assert value(broker, "danube_topic_message_size_bytes_sum", topic=ORDERS) == 300_129
    assert value(broker, "danube_topic_bytes_in_total", topic=ORDERS) == 300_129


@served()
async def test_native_producers_are_counted_while_they_are_there_and_so_is_what_they_send(calls: Calls) -> None:
    await calls.create_topic()
    producers = of_topic("danube_topic_active_producers")
    async with pydanube.connect(f"danube://{calls.servers.stream_addr}") as client:
        async with client.producer("/default/orders") as producer:
            await producer.send(b"x" * 100)
            found = await scrape(calls)
            assert found[producers] == 1
            assert found[of_topic("danube_topic_messages_in_total")] == 1
            sends = (
                "danube_producer_send_total",
                (("error_code", "OK"), ("result", "ok"), ("topic", "/default/orders")),
            )
            assert found[sends] == 1
            assert found[of_topic("danube_producer_send_latency_ms_count")] == 1
            assert found[of_topic("danube_topic_message_size_bytes_count")] == 1
        assert (await scrape(calls))[producers] == 0


# --- the log and its tiers ------------------------------------------------------------------------------


@simulated
async def test_rotation_retention_and_where_messages_are_read_are_counted() -> None:
    host = TierFixture(STILL, segment_bytes=4 * KIB)
    broker, topic = await one_topic(host)
    for name in ("danube_wal_append_total", "danube_wal_flush_total", "danube_wal_flush_latency_ms_count"):
        assert value(broker, name) == 0, "they are there before anything is written"
    producer = await topic.add_producer("producer")
    for number in range(30):
        await topic.publish(producer, message(f"{number} {'x' * KIB}"))
    rolled = value(broker, "danube_wal_file_rotate_total", reason="size")
    assert rolled and value(broker, "danube_wal_file_rotate_total", reason="time") == 0
    await topic.rows(29, 30)
    reads = "danube_wal_reader_create_total"
    assert [value(broker, reads, mode=mode) for mode in ("memory", "file", "cloud")] == [1, 0, 0]

    broker = await host.restart()  # with nothing in memory
    topic = await find_topic(broker)
    await topic.rows(29, 30)
    assert [value(broker, reads, mode=mode) for mode in ("memory", "file", "cloud")] == [0, 1, 0]
    before = value(broker, "danube_wal_size_bytes")
    await asyncio.sleep(5)  # everything is uploaded
    assert value(broker, "danube_cloud_upload_objects_total")
    await topic.log.truncate(topic.head)
    assert value(broker, "danube_wal_delete_total", reason="retention") == rolled
    after = value(broker, "danube_wal_size_bytes")
    assert before and after and after < before

    await consume(topic, acks=True, start=0)
    await asyncio.sleep(3)
    assert value(broker, reads, mode="cloud")
    assert value(broker, "danube_handoff_durable_history_to_hot_total") == 0
    await publish(topic, "more")
    await settle()
    assert value(broker, "danube_handoff_durable_history_to_hot_total") == 1


@simulated
async def test_offsets_that_only_a_lost_brokers_disk_has_are_counted_until_they_are_back() -> None:
    cluster = await Cluster().start(2)
    topic = await cluster.create("/default/orders", on=1)
    orders = await cluster.served(topic)
    await cluster.node(1).call(orders.publish(await orders.add_producer("producer"), message("a")))
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    second = cluster.host(topic)
    assert second is not None and second.broker is not None
    assert value(second.broker, "danube_broker_orphan_ranges") == 1
    assert value(second.broker, "danube_topic_orphan_ranges", topic=topic) == 1
    assert (value(second.broker, "danube_topic_orphan_messages", topic=topic) or 0) >= 1
    await cluster.node(1).boot()
    await asyncio.sleep(60)
    assert value(second.broker, "danube_broker_orphan_ranges") == 0
    assert value(second.broker, "danube_topic_orphan_ranges", topic=topic) is None


def test_the_room_on_the_disk_of_the_data_directory_is_told(tmp_path: Path) -> None:
    async def body() -> None:
        broker = await Broker.start(Config(data_dir=tmp_path))
        try:
            free, used = (value(broker, f"danube_disk_{name}_bytes") for name in ("free", "used"))
            assert free and used and free + used > 1e6
        finally:
            await broker.stop()

    run(body())


# --- what it costs --------------------------------------------------------------------------------------


def test_a_scrape_of_a_thousand_busy_topics_costs_far_less_than_100_ms() -> None:
    telemetry = Telemetry()
    telemetry.broker = "17"
    for number in range(1000):
        topic = telemetry.topic(f"/default/orders-{number}")
        topic.send_latency.observe(0.001)
        topic.sizes.add(100)
        standing = Standing(head=9, next_unacked=2, lag=7, undispatched=7)
        telemetry.subscription(f"/default/orders-{number}", "billing", lambda standing=standing: standing)  # type: ignore[misc]

    def cost() -> float:
        began = thread_time()  # of this thread alone, whatever else the machine does
        assert len(telemetry.snapshot().text()) > 1_000_000
        return thread_time() - began

    assert min(cost() for _ in range(5)) < 0.06, "asking the subscriptions, and sending it, come on top"


# --- the cluster ----------------------------------------------------------------------------------------


@clustered(2)
async def test_moves_redirects_and_the_state_of_the_cluster_are_counted(cluster: ServerCluster) -> None:
    topic = await cluster.create("/default/orders", on=1)
    one, two = cluster.node(1), cluster.node(2)
    leader = next(node for node in cluster.nodes if node.id == node.cluster.leader)
    taken = value(one.broker, "danube_broker_assignments_total", broker_id=one.id, action="assign")
    assert taken and taken >= 1
    await two.calls.discovery.TopicLookup(pb.TopicLookupRequest(topic=topic))
    redirects = "danube_client_redirects_total"
    assert value(two.broker, redirects, reason="not_local", topic_ns="default") == 1
    assert value(one.broker, redirects, reason="not_local", topic_ns="default") is None

    let_go = value(one.broker, "danube_broker_assignments_total", broker_id=one.id, action="unassign") or 0
    await one.cluster.requests.unload(topic, two.id)
    await cluster.settled(topic, 2)
    assert value(one.broker, "danube_broker_assignments_total", broker_id=one.id, action="unassign") == let_go + 1
    for phase in ("upload", "quiet", "cursors", "rest", "seal", "close"):
        assert value(one.broker, "danube_topic_unload_phase_ms_count", phase=phase) == let_go + 1
    assert value(one.broker, "danube_topic_moves_in_progress") == 0
    assert value(leader.broker, "danube_cluster_imbalance_cv") is not None
    follower = two if leader is one else one
    assert value(follower.broker, "danube_cluster_imbalance_cv") is None, "the leader alone says it"
    assert value(leader.broker, "danube_rebalancing_cycle_duration_seconds_count")
    assert value(one.broker, "danube_rebalancing_moves_total", reason="automatic") == 0
    assert value(one.broker, "danube_cluster_topics_unassigned") == 0
    assert value(one.broker, "danube_broker_may_serve") == 1


# --- health ---------------------------------------------------------------------------------------------


@clustered(2)
async def test_a_broker_that_drains_or_is_fenced_is_live_and_not_ready(cluster: ServerCluster) -> None:
    one, two = cluster.node(1), cluster.node(2)
    for node in cluster.nodes:
        assert await get(node.calls, "/health/ready") == (200, "ready\n")
    await cluster.drained(1)
    assert await get(one.calls, "/health/ready") == (503, "the broker is drained: drain_complete\n")
    assert value(one.broker, "danube_broker_drained", reason="drain_complete") == 1
    assert value(two.broker, "danube_broker_drained", reason="drain_complete") == 0
    for reason in ("stale_restart", "registration_expired"):  # nobody wanted that: a roll-out goes on
        await cluster.drained(1, reason=reason)
        await cluster.until(lambda reason=reason: one.cluster.state_of(one.id).reason == reason)  # type: ignore[misc, union-attr]
        assert await get(one.calls, "/health/ready") == (200, f"ready, and drained: {reason}\n")
    two.cluster.membership.lease._sent -= 1000  # as if no renewal had been answered for long
    code, why = await get(two.calls, "/health/ready")
    assert code == 503 and why.startswith("the broker is fenced")
    assert value(two.broker, "danube_broker_may_serve") == 0
    assert (value(two.broker, "danube_broker_lease_age_seconds") or 0) > 900
    for node in cluster.nodes:
        assert await get(node.calls, "/health/live") == (200, "live\n")


@served()
async def test_a_broker_that_stops_is_not_ready_while_it_finishes_its_work(calls: Calls) -> None:
    calls.servers.stop_being_ready()
    assert await get(calls, "/health/ready") == (503, "the broker is shutting down\n")
    assert (await get(calls, "/health/live"))[0] == 200


def test_a_broker_that_waits_for_its_metadata_store_is_live_and_not_ready(tmp_path: Path) -> None:
    async def body() -> None:
        ports = free_ports(5)
        client, stream, admin, metrics, nobody = (f"127.0.0.1:{port}" for port in ports)
        config = Config(
            mode="cluster",
            data_dir=tmp_path / "data",
            broker=BrokerConfig(client_addr=client, stream_addr=stream, admin_addr=admin, metrics_addr=metrics),
            cluster=ClusterConfig(etcd=(nobody,)),
            storage=StorageConfig(url=(tmp_path / "store").as_uri()),
        )
        serving = asyncio.create_task(serve(config, lambda listening: None))
        try:
            answers = {}
            for path in ("/health/live", "/health/ready", "/metrics", "/iceberg/v1/config"):
                request = f"GET {path} HTTP/1.1\r\n\r\n"
                while path not in answers:
                    assert not serving.done(), serving.result()
                    with contextlib.suppress(OSError):
                        answers[path] = await http(metrics, request)
                    await asyncio.sleep(0.01)
            starting = (503, "the broker is starting\n")
            assert answers["/health/live"] == (200, "live\n")
            assert answers["/health/ready"] == starting
            # Its id is known early, so there may be numbers already.
            assert answers["/metrics"] == starting or answers["/metrics"][0] == 200
            code, catalog = answers["/iceberg/v1/config"]
            assert (code, json.loads(catalog)["error"]["message"]) == (503, "the broker is starting")
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    run(body())
