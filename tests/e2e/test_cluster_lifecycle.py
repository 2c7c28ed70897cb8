"""Brokers that are cut off, restarted and lost, with real processes and a TTL of 4 s, as the plan for it tells it.

The plan counts in a TTL of 32 s; its times are shortened with the TTL. One broker reaches etcd through a line that can
be cut. Restarts that come later than a TTL are in test_cluster_plan.py, restarts of everything in test_cluster.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pydanube
from pydanube.core import keys
from pydanube.core.names import BrokerId
from pydanube.stores.metadata.etcd import EtcdMetadataStore
from pydanube.testing.ports import free_ports
from tests.e2e.clusters import TTL, ClusterProcesses, EtcdBroker
from tests.e2e.etcd import EtcdServer
from tests.e2e.processes import CLIENTS, START_SECONDS, Process, danube_here, until
from tests.e2e.tcp_proxy import Line
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUMBERS = count()
SECOND = TTL / 32.0  # of the plan's
NOWHERE = "http://127.0.0.1:1"


class PreparedBroker(EtcdBroker):
    """One that can be restarted as quickly as it takes to open its topics."""

    program = CLIENTS / "prepared_broker.py"
    next: Process | None = None

    def prepare(self) -> None:
        prepared = self.next = Process(self.command, self.directory / f"broker-{self._starts + 1}.log")
        until(lambda: "prepared" in prepared.text(), "it is loaded", seconds=START_SECONDS, say=prepared.text)

    def start(self) -> None:
        if self.next is None:
            self.prepare()
        assert self.next is not None
        process, self.process, self.next = self.next, self.next, None
        self._starts += 1
        process.write("go\n")
        until(lambda: "is ready." in process.text(), "it is ready", seconds=START_SECONDS, say=process.text)

    @property
    def lease_age(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics") as answer:
            text = answer.read().decode()
        found = re.search(r"^danube_broker_lease_age_seconds(?:{.*})? (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def until_renewed(self) -> None:
        """So that a busy machine has all the time that a lease gives."""
        until(lambda: self.lease_age < 0.2 * TTL / 3, "its lease was renewed just now")


class Pair(NamedTuple):
    etcd: EtcdServer
    line: Line
    steady: EtcdBroker
    broker: PreparedBroker  # behind the line
    cluster: ClusterProcesses

    def value(self, key: str) -> Any:
        async def read() -> Any:
            store = EtcdMetadataStore([self.etcd.client])
            try:
                item = await store.get(key)
                return json.loads(item.value) if item else None
            finally:
                await store.close()

        return run(read())

    def state(self) -> tuple[str, str]:
        """Of the broker behind the line."""
        found = self.value(keys.broker_state(BrokerId(int(self.broker.broker_id))))
        return found["mode"], found["reason"]

    def says(self, *sentences: str, who: EtcdBroker | None = None) -> None:
        """It says this sooner or later, one after the other."""
        speaker = who or self.broker
        pattern = re.compile(".*".join(map(re.escape, sentences)), re.DOTALL)
        until(lambda: pattern.search(speaker.output.read_text()), str(sentences), say=speaker.output.read_text)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("lifecycle")
    ports = client, _ = free_ports(2)
    with contextlib.ExitStack() as stack:
        # It does not tell where it is, so that nobody finds a way beside the line.
        flags = ("--advertise-client-urls", NOWHERE)
        etcd = stack.enter_context(EtcdServer(directory / "etcd", "only", (ports[0], ports[1]), flags))
        line = stack.enter_context(Line(client))
        store = directory / "store"
        steady = EtcdBroker(directory / "steady", etcd.client, store, "--upload-interval", "3600")
        behind = line.endpoint.removeprefix("http://")
        broker = PreparedBroker(directory / "cut", behind, store, "--upload-interval", "3600")
        for each in (steady, broker):
            stack.callback(lambda each=each: each.process.kill() if each.process else None)  # type: ignore[misc]
        stack.callback(lambda: broker.next.kill() if broker.next else None)
        cluster = ClusterProcesses([steady, broker], store)
        cluster.start()
        yield Pair(etcd, line, steady, broker, cluster)


@pytest.fixture
def topic(pair: Pair) -> str:
    """On the broker behind the line, which is active and not to be confused with what it was before."""
    name = f"/default/lifecycle{next(NUMBERS)}"
    assert run(produce(pair.cluster.url, name, "a")) == [(0, 1)]
    if pair.cluster.hosted(name) is not pair.broker:
        pair.cluster.admin("topics", "unload", name, "--wait")
    assert pair.cluster.hosted(name) is pair.broker
    return name


async def produce(url: str, topic: str, *texts: str) -> list[tuple[int, int]]:
    """Their offsets and epochs."""
    async with pydanube.connect(url, timeout=60) as client, client.producer(topic, reliable=True) as producer:
        receipts = [await producer.send(text.encode()) for text in texts]
        return [(receipt.offset, receipt.epoch) for receipt in receipts]


def test_scenario_1_a_glitch_shorter_than_the_ttl_heals_by_itself(pair: Pair, topic: str) -> None:
    """15 s of 32: a renewal is tried until it is answered, and nobody else gets the topic, also after that TTL."""
    registered = pair.value(keys.registration(BrokerId(int(pair.broker.broker_id))))

    async def story() -> list[pydanube.Receipt]:
        receipts = []
        async with pydanube.connect(pair.cluster.url, timeout=60) as client, client.producer(topic) as producer:
            receipts.append(await producer.send(b"b"))
            await asyncio.to_thread(pair.broker.until_renewed)
            began = time.monotonic()
            await asyncio.to_thread(pair.line.cut)
            await asyncio.sleep(15 * SECOND)
            await asyncio.to_thread(pair.line.heal)
            while time.monotonic() < began + 47 * SECOND:
                receipts.append(await producer.send(b"c"))
                await asyncio.sleep(0.1)
        return receipts

    receipts = run(story())
    assert [receipt.offset for receipt in receipts] == list(range(1, 1 + len(receipts)))
    assert len({receipt.epoch for receipt in receipts}) == 1, "nobody claimed it"
    pair.says("cannot be reached")
    assert pair.state()[0] == "active" and "drained" not in pair.broker.output.read_text()
    assert pair.value(keys.registration(BrokerId(int(pair.broker.broker_id)))) == registered
    assert "broker no longer alive" not in pair.steady.output.read_text()


def test_scenario_3a_restarted_within_its_ttl_it_has_its_topics_when_it_is_ready(pair: Pair, topic: str) -> None:
    [(offset, epoch)] = run(produce(pair.cluster.url, topic, "b"))
    pair.broker.prepare()
    pair.broker.until_renewed()
    pair.broker.kill()
    time.sleep(5 * SECOND)
    pair.broker.start()
    pair.says(f"reconciled topic on startup topic={topic}", "startup reconciliation complete", "is ready.")
    assert pair.state() == ("active", "fast_restart")
    assert run(produce(pair.broker.stream_url, topic, "c")) == [(offset + 1, epoch + 1)]
    assert pair.cluster.json("topics", "describe", topic)["orphans"] == []
    assert "broker no longer alive" not in pair.steady.output.read_text()


def test_scenario_2_cut_off_for_longer_than_its_ttl_it_comes_back_drained_and_lives_on(pair: Pair, topic: str) -> None:
    """The last of the scenarios: the log of the other broker says that this one was lost."""
    began = time.monotonic()
    pair.broker.until_renewed()  # after that, or just before
    pair.line.cut()
    assert pair.cluster.hosted(topic, other_than=pair.broker) is pair.steady
    assert time.monotonic() - began > 0.8 * TTL, "not before its lease has run out"
    pair.says("broker no longer alive", who=pair.steady)
    [(after, epoch)] = run(produce(pair.steady.stream_url, topic, "b"))
    assert after > 0 and epoch > 1
    pair.says("Failed to renew broker registration", "Registration likely expired (failures > TTL)")
    pair.line.heal()
    pair.says(
        "Registration recovered after expiry. Setting broker to drained.",
        "Broker registration expired. Registered as drained. Use `danube-admin brokers activate` to resume.",
    )
    assert pair.state() == ("drained", "registration_expired")

    async def first() -> list[tuple[int, bytes]]:
        async with (
            pydanube.connect(pair.cluster.url, timeout=60) as client,
            client.consumer(topic, subscription="all", start="earliest") as consumer,
        ):
            got = [await consumer.receive(timeout=60) for _ in range(2)]
            return sorted((each.offset, each.payload) for each in got)

    assert run(first()) == [(0, b"a"), (after, b"b")], "a drained broker brings back what only its disk has"
    pair.cluster.admin("brokers", "activate", pair.broker.broker_id)
    assert pair.state() == ("active", "admin_activate")
    pair.cluster.admin("topics", "unload", topic, "--wait")
    assert pair.cluster.hosted(topic) is pair.broker
    assert run(produce(pair.cluster.url, topic, "c"))[0][0] == after + 1
    assert pair.broker.process is not None and pair.broker.process.exit_code is None


def test_while_etcd_is_away_nobody_serves_and_all_go_on_active_where_they_were(pair: Pair, topic: str) -> None:
    """As without a majority, for longer than a TTL: every lease has run out, and nobody was there to declare a loss."""
    other = f"/default/lifecycle{next(NUMBERS)}"
    assert run(produce(pair.cluster.url, other, "a")) == [(0, 1)]
    if pair.cluster.hosted(other) is not pair.steady:
        pair.cluster.admin("topics", "unload", other, "--wait")
    before = [run(produce(pair.cluster.url, name, "b")) for name in (topic, other)]

    async def story() -> list[pydanube.Receipt]:
        async with (
            pydanube.connect(pair.cluster.url, timeout=60) as client,
            client.producer(topic) as first,
            client.producer(other) as second,
        ):
            await asyncio.to_thread(pair.etcd.pause)
            try:
                await asyncio.sleep(1.2 * TTL)
                sending = [asyncio.ensure_future(producer.send(b"c")) for producer in (first, second)]
                await asyncio.sleep(0.3)
                assert not any(each.done() for each in sending), "fenced"
            finally:
                pair.etcd.resume()
            return await asyncio.gather(*sending)

    receipts = run(story())
    assert pair.cluster.hosted(topic) is pair.broker and pair.cluster.hosted(other) is pair.steady
    for [(offset, _)], receipt in zip(before, receipts, strict=True):
        assert receipt.offset == offset + 1
    assert {each["broker_status"] for each in pair.cluster.json("brokers", "list")} == {"active"}
    for name in (topic, other):
        assert pair.cluster.json("topics", "describe", name)["orphans"] == []


def test_scenario_4_killed_together_and_back_after_their_leases_all_are_active_each_with_its_topics(
    pair: Pair, topic: str
) -> None:
    other = f"/default/lifecycle{next(NUMBERS)}"
    run(produce(pair.cluster.url, other, "a"))
    if pair.cluster.hosted(other) is not pair.steady:
        pair.cluster.admin("topics", "unload", other, "--wait")
    before = [run(produce(pair.cluster.url, name, "b")) for name in (topic, other)]
    pair.broker.prepare()
    for each in (pair.broker, pair.steady):
        each.kill()
    leases = [keys.registration(BrokerId(int(each.broker_id))) for each in (pair.broker, pair.steady)]
    until(lambda: all(pair.value(lease) is None for lease in leases), "their leases have run out")
    pair.cluster.start()
    for each in (pair.broker, pair.steady):
        pair.says("Full cluster restart detected. Registering as active.", "is ready.", who=each)
        state = pair.value(keys.broker_state(BrokerId(int(each.broker_id))))
        assert (state["mode"], state["reason"]) == ("active", "full_cluster_restart")
    for name, owner, [(offset, epoch)] in zip((topic, other), (pair.broker, pair.steady), before, strict=True):
        assert pair.cluster.hosted(name) is owner
        assert run(produce(pair.cluster.url, name, "c")) == [(offset + 1, epoch + 1)]
        assert pair.cluster.json("topics", "describe", name)["orphans"] == []


def test_a_copy_of_a_brokers_directory_is_refused_and_the_etcd_of_others_is_left_alone(
    pair: Pair, tmp_path: Path
) -> None:
    broker = pair.steady
    for command in (("status",), ("promote-node", "--node-id", "1"), ("remove-node", "--node-id", "1")):
        done = danube_here("admin", "--endpoint", broker.endpoint, "cluster", *command)
        assert done.returncode == 5 and "run by somebody else" in done.stderr
    other = EtcdBroker(tmp_path / "copy", pair.etcd.client, pair.cluster.store)
    other.data_dir.mkdir()
    shutil.copy(broker.data_dir / "node_id", other.data_dir / "node_id")
    with Process(other.command, tmp_path / "copy.log") as copy:
        assert copy.wait(60) == 1
        [said] = [line for line in copy.text().splitlines() if line.startswith("danube: ")]
        assert "is running already" in said and broker.url in said
    assert run(produce(broker.stream_url, "/default/beside", "a")) == [(0, 1)]
