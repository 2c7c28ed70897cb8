"""The seeds' scenarios with real processes: three brokers, an etcd member beside each, a shared store, a TTL of 4 s."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import pydanube
from pydanube.testing.ports import member_ports
from tests.e2e.clusters import TTL, ClusterBroker, ClusterProcesses, cluster_in
from tests.e2e.processes import until
from tests.e2e.watched_tables import WatchedTable
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUMBERS = count()


async def produce(url: str, topic: str, *texts: str) -> list[int]:
    """Their offsets, one after the other, on whichever broker has the topic."""
    async with pydanube.connect(url, timeout=60) as client, client.producer(topic, reliable=True) as producer:
        return [(await producer.send(text.encode())).offset for text in texts]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    with cluster_in(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def topic() -> str:
    return f"/default/topic{next(NUMBERS)}"


def test_a_topic_moves_while_its_producer_and_consumer_work_and_nothing_is_lost_or_repeated(
    cluster: ClusterProcesses, topic: str
) -> None:
    async def work() -> tuple[list[int], list[tuple[int, bytes]]]:
        offsets: list[int] = []
        got: list[tuple[int, bytes]] = []
        async with (
            pydanube.connect(cluster.url, timeout=30) as client,
            client.producer(topic, reliable=True) as producer,
            client.consumer(topic, subscription="sub") as consumer,
        ):

            async def consume() -> None:
                async for message in consumer:
                    got.append((message.offset, message.payload))
                    await message.ack()

            consuming = asyncio.create_task(consume())
            moves = []
            for number in range(300):
                offsets.append((await producer.send(str(number).encode())).offset)
                if number in (100, 200):
                    moves.append(asyncio.create_task(asyncio.to_thread(cluster.admin, "topics", "unload", topic)))
                await asyncio.sleep(0.005)
            await asyncio.gather(*moves)
            for _ in range(1000):
                if len(got) >= 300:
                    break
                await asyncio.sleep(0.02)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        return offsets, got

    offsets, got = run(work())
    assert offsets == list(range(300)), "continuous over two moves"
    assert got == [(number, str(number).encode()) for number in range(300)]


def test_an_unload_that_cannot_be_says_why_and_changes_nothing(cluster: ClusterProcesses, topic: str) -> None:
    assert "unable to find the topic" in cluster.refused("topics", "unload", topic)
    assert "there is no broker 42" in cluster.refused("brokers", "activate", "42")


def test_all_brokers_restarted_serve_their_topics_again(cluster: ClusterProcesses) -> None:
    topics = [f"/default/topic{next(NUMBERS)}" for _ in range(3)]
    for topic in topics:
        assert run(produce(cluster.url, topic, "a", "b")) == [0, 1]
    before = {topic: cluster.hosted(topic) for topic in topics}
    for broker in cluster.brokers:
        broker.kill()
    cluster.start()
    for topic in topics:
        assert cluster.hosted(topic) is before[topic]
        assert run(produce(cluster.url, topic, "c")) == [2]
    listed = cluster.json("brokers", "list")
    assert [each["broker_status"] for each in listed] == ["active"] * 3, json.dumps(listed)


def test_a_broker_that_joins_is_drained_until_it_is_activated_and_its_member_may_vote_and_leave(
    cluster: ClusterProcesses, tmp_path: Path
) -> None:
    seed, store = cluster[0].raft_addr, cluster.store.absolute().as_uri()
    before = cluster.json("cluster", "status")["voters"]
    fourth = ClusterBroker(tmp_path, f"127.0.0.1:{member_ports(1)[0]}", [seed], store, "--join")
    with fourth:
        listed = {each["broker_id"]: each["broker_status"] for each in cluster.json("brokers", "list")}
        assert listed[fourth.broker_id] == "drained" and sorted(listed.values()) == ["active"] * 3 + ["drained"]
        status = until(lambda: _with_four_voters(cluster), "its member has caught up and votes")
        [member] = {*status["voters"]} - {*before}
        assert "is already a voter" in cluster.admin("cluster", "promote-node", "--node-id", member)
        cluster.admin("brokers", "activate", fourth.broker_id)
        topics = [f"/default/topic{next(NUMBERS)}" for _ in range(8)]
        for topic in topics:
            assert run(produce(cluster.url, topic, "a")) == [0]
        listed = {each["broker_id"]: each["broker_status"] for each in cluster.json("brokers", "list")}
        assert listed[fourth.broker_id] == "active"
        cluster.admin("brokers", "unload", fourth.broker_id)
        cluster.admin("cluster", "remove-node", "--node-id", member)
        assert cluster.json("cluster", "status")["voters"] == before
    for topic in topics:
        assert cluster.hosted(topic) in cluster.brokers
        assert run(produce(cluster.url, topic, "b")) == [1]


def _with_four_voters(cluster: ClusterProcesses) -> Any:
    status = cluster.json("cluster", "status")
    return status if len(status["voters"]) == 4 else None


def test_a_paused_broker_acknowledges_nothing_after_its_lease_and_comes_back_drained_until_it_is_activated(
    cluster: ClusterProcesses, topic: str
) -> None:
    """A publish waits in its socket when it goes on. The last test: topics are on their way afterwards."""

    async def publish() -> tuple[pydanube.Receipt, pydanube.Receipt, ClusterBroker]:
        async with pydanube.connect(cluster.url, timeout=60) as client, client.producer(topic) as producer:
            first = await producer.send(b"a")
            host = await asyncio.to_thread(cluster.hosted, topic)
            host.pause()
            try:
                sending = asyncio.ensure_future(producer.send(b"b"))
                await asyncio.to_thread(cluster.hosted, topic, other_than=host, seconds=TTL + 30)
                assert not sending.done()
            finally:
                host.resume()
            return first, await sending, host

    first, second, host = run(publish())
    assert second.epoch > first.epoch and second.offset > first.offset, "by its new owner"

    def drained() -> bool:
        listed = {str(each["broker_id"]): each["broker_status"] for each in cluster.json("brokers", "list")}
        return listed.get(host.broker_id) == "drained"

    until(drained, "the broker is drained", say=host.output.read_text)
    assert "declared lost" in host.output.read_text() or "Registered as drained" in host.output.read_text()
    # As seed 004 prescribes it, with every default: inspect, activate, rebalance.
    cluster.admin("brokers", "activate", host.broker_id)
    done = cluster.json("brokers", "rebalance")
    assert done["success"] and 1 <= done["moves_executed"] <= 4, done
    assert {each["to_broker"] for each in done["proposed_moves"]} == {host.broker_id}
    until(lambda: cluster.json("topics", "list", "--broker", host.broker_id), "it has topics again")


def test_the_tables_of_all_brokers_have_what_was_acknowledged_through_a_move_and_a_kill(
    cluster: ClusterProcesses, topic: str
) -> None:
    """The last one here: it leaves a broker drained. Longer, and with retention: test_tables_long.py."""
    with WatchedTable(cluster, topic) as table:
        cluster.admin("topics", "unload", topic, "--wait")
        victim = cluster.hosted(topic)
        victim.kill()
        cluster.hosted(topic, other_than=victim)
        victim.start()
    table.judge()
