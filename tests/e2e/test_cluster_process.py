"""Brokers of a cluster as processes: how they start, how they are told to stop, and who is refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pydanube
from pydanube.client.brokers import PORT
from pydanube.stores.metadata.etcd import CLIENT_PORT_OFFSET
from pydanube.testing.ports import free_block
from tests.e2e.clusters import ClusterBroker, cluster_in
from tests.e2e.processes import Process, danube_here, until
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[2]
TOPIC = "/default/orders"


async def produce(url: str, topic: str, *texts: str) -> list[int]:
    async with pydanube.connect(url, timeout=60) as client, client.producer(topic, reliable=True) as producer:
        return [(await producer.send(text.encode())).offset for text in texts]


def test_a_broker_that_waits_for_the_others_stops_when_it_is_told_to(tmp_path: Path) -> None:
    base = free_block(60, members=3)
    seeds = [f"127.0.0.1:{base + number}" for number in range(3)]
    broker = ClusterBroker(tmp_path, seeds[0], seeds, (tmp_path / "store").as_uri())
    with Process(broker.command, tmp_path / "broker.log") as process:
        until(lambda: "waiting for the metadata store" in process.text(), "it waits", say=process.text)
        assert process.stop() == 0
        assert "Traceback" not in process.text()
    with socket.socket() as probe:  # nobody is left behind
        probe.bind(("127.0.0.1", base + CLIENT_PORT_OFFSET))


def test_a_broker_that_is_told_to_stop_hands_its_topics_over(tmp_path: Path) -> None:
    with cluster_in(tmp_path) as cluster:
        topics = [f"/default/t{number}" for number in range(6)]
        for topic in topics:
            assert run(produce(cluster.url, topic, "a", "b")) == [0, 1]
        host = cluster.hosted(topics[0])
        assert host.stop() == 0
        assert "not handed over" not in host.output.read_text()
        for topic in topics:
            assert cluster.hosted(topic) is not host
            assert run(produce(",".join(each.stream_url for each in cluster.living), topic, "c")) == [2]
            described = cluster.json("topics", "describe", topic)
            assert (described["state"], described["orphans"]) == ("active", [])


def test_official_clients_find_a_topic_wherever_it_is_and_follow_it_when_it_moves(tmp_path: Path) -> None:
    with cluster_in(tmp_path) as cluster, contextlib.ExitStack() as programs:
        # The producer makes the topic through one broker, the consumer asks another; neither need have it.
        flags = ("--reliable", "--count", 60, "--interval-ms", 100)
        producer = programs.enter_context(cluster[0].run("producer", TOPIC, *flags))
        producer.until("created")
        consumer = programs.enter_context(cluster[1].run("consumer", TOPIC))
        consumer.until("subscribed")
        producer.go()
        for sent in (10, 35):
            producer.until("sent", sent)
            host = cluster.hosted(TOPIC)
            cluster.admin("topics", "unload", TOPIC, "--wait")
            assert cluster.hosted(TOPIC) is not host
        producer.until("done", seconds=90)
        expected = {(number, f"message {number}") for number in range(60)}

        def received() -> set[tuple[int, str]]:
            return {(line["offset"], line["payload"]) for line in consumer.events("received")}

        until(lambda: received() >= expected, "everything arrives", seconds=90, say=consumer.text)
        assert received() == expected  # each under one offset, in the order of sending


# --- the commands that people type --------------------------------------------------------------------------


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    base = free_block(60, members=3)
    numbers = {"CLIENT": 10, "STREAM": 11, "ADMIN": 12, "METRICS": 15, "RAFT": 0}  # the first two in steps of ten
    settings = {
        **os.environ,
        **{name: str(base + offset) for name, offset in numbers.items()},
        "DANUBE_CLUSTER_DIR": str(tmp_path / "cluster"),
        "TMPDIR": str(tmp_path),
    }
    yield settings
    subprocess.run(["scripts/brokers", "clean"], cwd=REPOSITORY, env=settings, check=True, timeout=120)


def test_the_first_broker_has_the_port_that_clients_ask_by_themselves() -> None:
    script = (REPOSITORY / "scripts" / "brokers").read_text()
    assert f"${{STREAM:-{PORT}}}" in script and "client + 10 * n" in script and "stream + 10 * n" in script


def test_make_brokers_starts_a_cluster_that_goes_on_with_its_topics(environment: dict[str, str]) -> None:
    def brokers(verb: str, *flags: str) -> str:
        command = ["scripts/brokers", verb, *flags]
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def admin(*words: object) -> Any:
        done = danube_here("admin", "--endpoint", f"http://127.0.0.1:{environment['ADMIN']}", *words, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    url = f"danube://127.0.0.1:{environment['STREAM']}"
    assert brokers("start", "--registration-ttl", "6").count("broker ") == 3
    for number in range(4):
        assert run(produce(url, f"/default/t{number}", "a")) == [0]
    assert len(admin("cluster", "status")["voters"]) == 3
    assert brokers("start") == brokers("start")  # they run: nothing happens
    brokers("stop")
    brokers("start", "--registration-ttl", "6")
    assert [each["broker_status"] for each in admin("brokers", "list")] == ["active"] * 3
    for number in range(4):
        assert run(produce(url, f"/default/t{number}", "b")) == [1]
    brokers("clean")
    assert not Path(environment["DANUBE_CLUSTER_DIR"]).exists()


def test_the_example_moves_a_topic_under_load_and_loses_nothing(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["examples/cluster.sh"], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Topic Unloaded: true") == 3
    assert "sent 2000, offsets 0 to 1999, no gap" in done.stdout
    assert "received 2000, every one as it was sent" in done.stdout
    assert "everything verifies" in done.stdout
