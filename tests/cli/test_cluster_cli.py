"""`danube admin` on a cluster: what an operator types, and what is printed."""

from __future__ import annotations

import asyncio
import json
from importlib.metadata import entry_points
from typing import Any

import pytest

from pydanube.broker import cursors
from pydanube.broker.topic import Topic
from pydanube.cli.exits import Exit
from pydanube.core import keys
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.history.ownership import Orphan
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind
from pydanube.formats.batch import Envelope
from pydanube.ports import Put
from tests.e2e.processes import danube_here
from tests.harness.server_cluster import OneMember, ServerCluster, SmallQuorum, clustered, reliable, run_members

pytestmark = pytest.mark.slow  # every command is a program that starts

TOPIC = TopicName("/default/orders")
LARGE_ID = 2**63 - 25  # which a float cannot hold


class Admin:
    """`danube admin` in a thread, asking one of the brokers."""

    def __init__(self, cluster: ServerCluster, number: int) -> None:
        self._endpoint = f"http://{cluster.node(number).servers.admin_addr}"

    async def run(self, *words: object) -> tuple[int, str, str]:
        done = await asyncio.to_thread(danube_here, "admin", "--endpoint", self._endpoint, *words)
        return done.returncode, done.stdout, done.stderr

    async def __call__(self, *words: object) -> str:
        """What it prints. It must succeed."""
        code, output, errors = await self.run(*words)
        assert code == 0, errors
        return output

    async def json(self, *words: object) -> Any:
        return json.loads(await self(*words, "--output", "json"))

    async def refused(self, *words: object) -> str:
        """The one line of a refusal."""
        code, output, errors = await self.run(*words)
        assert code in (Exit.REFUSED, Exit.USAGE, Exit.NOT_FOUND) and output == ""
        [line] = errors.splitlines()
        assert line.startswith("danube: ")
        return line


def test_the_commands_have_the_names_that_the_documents_use() -> None:
    names = {each.name for each in entry_points(group="console_scripts")}
    assert names >= {"danube", "danube-broker", "danube-admin", "danube-admin-cli", "danube-cli"}


@clustered(2)
async def test_topics_are_moved_and_described_from_the_command_line(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    one, two = str(cluster.node(1).id), str(cluster.node(2).id)
    admin = Admin(cluster, 2)
    assert await admin("topics", "unload", TOPIC) == "Topic Unloaded: true\n"
    await cluster.settled(TOPIC, 2)
    code, output, progress = await admin.run("topics", "unload", TOPIC, "--to", one, "--wait")
    assert code == 0 and f"{TOPIC}: the old owner has let go; the new one opens it" in progress
    moved, *lines = output.splitlines()
    assert moved == "Topic Unloaded: true" and len(lines) == 1
    assert f"broker {two} -> broker {one}" in lines[0]
    assert all(f"{phase} " in lines[0] for phase in ("upload", "quiet", "cursors", "rest", "seal", "claim"))
    done = await admin.json("topics", "unload", TOPIC, "--wait")
    [result] = done["results"]
    assert done["success"] and (result["from_broker"], result["to_broker"]) == (
        one,
        two,
    )  # text: JSON readers round numbers above 2^53
    assert {"seal", "claim"} <= {*result["phases_ms"]} and result["failure"] is None
    moves = await admin.json("topics", "moves", TOPIC)
    assert [(each["from_broker"], each["to_broker"]) for each in moves][:3] == [
        (one, two),
        (two, one),
        (one, two),
    ]
    described = await admin.json("topics", "describe", TOPIC)
    assert (described["broker_id"], described["state"], described["orphans"]) == (two, "active", [])
    assert f"active: broker {two} serves it" in await Admin(cluster, 1)("topics", "describe", TOPIC)
    assert await admin("topics", "unload", TOPIC.removeprefix("/default/"), "--namespace", "default") == (
        "Topic Unloaded: true\n"
    )
    await cluster.settled(TOPIC, 1)
    assert await admin("topics", "unload", TOPIC, "--namespace", "default") == "Topic Unloaded: true\n"
    await cluster.settled(TOPIC, 2)
    for words, sentence in (
        (("/default/nothing",), "unable to find the topic /default/nothing"),
        (("nothing", "--namespace", "default"), "unable to find the topic /default/nothing"),
        ((TOPIC, "--namespace", "other"), "names its namespace already"),
        ((TOPIC, "--to", two), "hosts it already"),
        ((TOPIC, "--to", "7"), "no broker 7 in this cluster"),
        ((TOPIC, "--to", "x"), "broker id"),
    ):
        assert sentence in await admin.refused("topics", "unload", *words)


def test_a_move_says_which_acknowledged_messages_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "HOLES_LAST_SIZE_MAX_BYTES", 20)

    @clustered(2)
    async def move(cluster: ServerCluster) -> None:
        await cluster.create(TOPIC, on=1)
        topic = cluster.node(1).broker.topics.get(TopicName(TOPIC))
        assert isinstance(topic, Topic)
        name = SubscriptionName("s")
        await topic.subscribe(name, SubscriptionKind.SHARED, "c")
        producer = await topic.add_producer("p")
        for _ in range(40):
            await topic.publish(producer, Envelope(b"x", 0, None, "p"))
        topic.subscriptions[name].ack_ranges(tuple(OffsetRange(offset, offset + 1) for offset in range(1, 40, 2)))
        admin = Admin(cluster, 2)
        note = "subscription s: 13 acknowledged messages are too scattered to be saved and will be delivered again"
        assert await admin("topics", "unload", TOPIC) == f"Topic Unloaded: true\n  {TOPIC}: {note}\n"
        await cluster.settled(TOPIC, 2)
        moved, *_ = await admin.json("topics", "moves", TOPIC)
        assert moved["notes"] == [note]
        done = await admin.json("topics", "unload", TOPIC, "--wait")
        assert done["results"][0]["notes"] == [], "what was restored fits"

    move()


@clustered(2)
async def test_a_topic_is_told_from_the_command_line_what_to_do_when_its_broker_is_lost(cluster: ServerCluster) -> None:
    admin = Admin(cluster, 2)
    await admin("topics", "create", TOPIC, "--dispatch-strategy", "reliable", "--on-crash", "wait")
    await cluster.until(lambda: cluster.host(TOPIC) is not None)
    assert (await admin.json("topics", "describe", TOPIC))["on_crash"] == "wait"
    assert "wait: for its own broker" in await admin("topics", "describe", TOPIC)
    assert await admin("topics", "on-crash", TOPIC, "take-over") == "On crash: take-over\n"
    assert (await admin.json("topics", "describe", TOPIC))["on_crash"] == "take-over"
    done = await admin.json("topics", "on-crash", TOPIC, "wait")
    assert (done["topics"], done["on_crash"]) == ([TOPIC], "wait")
    assert "unable to find the topic /default/nothing" in await admin.refused(
        "topics", "on-crash", "/default/nothing", "wait"
    )


@clustered(2)
async def test_every_partition_has_its_line_and_one_that_stays_is_an_exit_code(cluster: ServerCluster) -> None:
    admin = Admin(cluster, 1)
    await admin("topics", "create", TOPIC, "--partitions", 2, "--dispatch-strategy", "reliable")
    parts = TOPIC.partition_names(2)
    await cluster.until(lambda: {cluster.host(part) for part in parts} == {*cluster.nodes})
    first = cluster.host(parts[0])
    assert first is not None
    code, output, _ = await admin.run("topics", "unload", TOPIC, "--to", first.id)  # one is there already
    moved, *lines = output.splitlines()
    assert (code, moved, len(lines)) == (Exit.NOT_GOOD, "Topic Unloaded: false", 2)
    assert "hosts it already" in lines[0] and f"{parts[1]}: broker" in lines[1]


@clustered(2)
async def test_brokers_are_listed_drained_and_activated_from_the_command_line(cluster: ServerCluster) -> None:
    topics = [await cluster.create(f"/default/t{number}", on=1) for number in range(2)]
    admin, one, two = Admin(cluster, 2), str(cluster.node(1).id), str(cluster.node(2).id)
    listed = {each["broker_id"]: each for each in await admin.json("brokers", "list")}
    assert {*listed} == {one, two} and {each["broker_status"] for each in listed.values()} == {"active"}
    assert await admin("brokers", "leader-broker") == f'Leader Broker: "{cluster.node(1).cluster.leader}"\n'
    dry = await admin("brokers", "unload", "--broker-id", one, "--dry-run")
    assert dry == "UnloadBroker started=false total=2 succeeded=0 failed=0 pending=2\n"
    done = await admin("brokers", "unload", "--broker-id", one, "--max-parallel", 2)
    assert done == "UnloadBroker started=true total=2 succeeded=2 failed=0 pending=0\n"
    await cluster.until(lambda: all(cluster.host(topic) is cluster.node(2) for topic in topics))
    await cluster.until(
        lambda: cluster.node(2).cluster.requests.mode_of(cluster.node(1).broker.broker_id).value == "drained"
    )  # type: ignore[union-attr]
    listed = {each["broker_id"]: each for each in await admin.json("brokers", "list")}
    assert listed[one]["broker_status"] == "drained"
    assert "no other broker is active" in await admin.refused("brokers", "unload", "--broker-id", two)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORCE_COLOR", "1")  # as on a terminal
        code, output, progress = await admin.run("brokers", "unload", one)
    assert (code, output) == (0, "UnloadBroker started=true total=0 succeeded=0 failed=0 pending=0\n")
    assert "moving topics" in progress
    assert await admin("brokers", "activate", one) == "ActivateBroker success=true\n"
    for command in ("unload", "activate"):
        assert "no broker 7 in this cluster" in await admin.refused("brokers", command, "--broker-id", 7)
        assert "the id of one broker" in await admin.refused("brokers", command)
    balance = await admin.json("brokers", "balance")
    assert balance["assignment_strategy"] == "Fair" and balance["broker_count"] == 2
    assert "coefficient_of_variation" in await admin("brokers", "balance")
    await cluster.until(lambda: len(cluster.node(2).cluster.view.reports[cluster.node(2).broker.broker_id].topics) == 2)
    assert await admin.json("brokers", "history") == []


@clustered(2)
async def test_activate_and_rebalance_bring_topics_back_at_once_and_the_exit_code_says_what_came_of_it(
    cluster: ServerCluster,
) -> None:
    """With every limit as it is by default: the topics are seconds old."""
    admin, (one, two) = Admin(cluster, 1), [str(node.id) for node in cluster.nodes]
    for number in range(6):
        await cluster.create(f"/default/t{number}", on=1)
    await cluster.drained(2)
    stopped, output, _ = await admin.run("brokers", "rebalance", "--output", "json")
    assert stopped == 5 and json.loads(output)["success"] is False
    assert "min_brokers_for_rebalance" in json.loads(output)["message"]
    await admin("brokers", "activate", two)
    dry = await admin("brokers", "rebalance", "--dry-run")
    assert dry.startswith("Rebalance success=true moves_executed=0\n") and dry.count("Move: ") == 3
    done = await admin.json("brokers", "rebalance", "--max-moves", 2)
    assert done["success"] and done["moves_executed"] == 2
    assert {(each["from_broker"], each["to_broker"]) for each in done["proposed_moves"]} == {(one, two)}
    await cluster.until(lambda: len(cluster.node(2).broker.topics.loaded) == 2)
    await cluster.until(lambda: not cluster.node(1).cluster.view.markers)
    await admin("brokers", "rebalance")
    await cluster.until(lambda: len(cluster.node(2).broker.topics.loaded) == 3)
    await cluster.until(lambda: not cluster.node(1).cluster.view.markers)
    code, output, _ = await admin.run("brokers", "rebalance")
    assert code == 0 and "Cluster is balanced (CV: 0.00" in output
    assert len(await admin.json("brokers", "history")) == 3


@clustered(1)
async def test_members_of_the_metadata_store_are_managed_from_the_command_line(cluster: ServerCluster) -> None:
    admin, broker = Admin(cluster, 1), cluster.node(1).broker
    assert "run by somebody else" in await admin.refused("cluster", "status")
    raft_addr = broker.config.cluster.raft_addr
    quorum = SmallQuorum(
        OneMember(11, ("http://other:7650",)),
        OneMember(22, (f"http://{raft_addr}",)),
        OneMember(33, ("http://third:1",)),
    )
    run_members(broker, quorum)
    assert (await admin("cluster", "status")).splitlines() == [
        "Self Node ID: 22",
        f"Raft Address: {raft_addr}",
        "Leader: 11",
        "Term: 4",
        "Last Applied: 100",
        "Voters: [11, 22, 33]",
        "Learners: []",
    ]
    assert (await admin.json("cluster", "status"))["voters"] == ["11", "22", "33"]
    endpoint = f"http://{cluster.node(1).servers.admin_addr}"
    assert await admin("cluster", "add-node", "--node-addr", endpoint) == "Success: node 22: it is a member already\n"
    assert "start it with --join" in await admin.refused("cluster", "add-node", "--node-addr", "http://127.0.0.1:1")
    promoted = await admin("cluster", "promote-node", "--node-id", 33)
    assert promoted == "Success: node 33 is already a voter\n"
    assert await admin("cluster", "remove-node", "--node-id", 33) == "Success: node 33 is removed\n"
    assert "there is no node 33" in await admin.refused("cluster", "remove-node", "--node-id", 33)


@clustered(2)
async def test_an_orphan_is_listed_and_given_up_only_when_it_is_confirmed(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    await cluster.calls(1).send(await cluster.calls(1).create_producer(TOPIC), topic=TOPIC)
    topic = reliable(cluster.node(1), TOPIC)
    lost = Orphan(start=1, end=5, broker_id=LARGE_ID, epoch=topic.ownership.epoch - 1)
    await topic.ownership.write([Put(keys.orphan(TOPIC, 1), lost.to_bytes())])
    topic.adopted([lost], rescued=(), voided=())
    admin = Admin(cluster, 2)
    [listed] = await admin.json("topics", "orphan", "list", TOPIC)
    assert (listed["first"], listed["end"], listed["broker_id"]) == (1, 5, str(LARGE_ID))
    [stored] = (await admin.json("storage", "list", TOPIC))["orphans"]
    assert stored["broker_id"] == str(LARGE_ID)
    described = await admin("topics", "describe", TOPIC)
    assert f"offsets 1 up to 5: start broker {LARGE_ID} again on its data directory" in described
    code, _, _ = await admin.run("topics", "orphan", "discard", TOPIC, 1)  # nobody is there to say yes
    assert code == 1 and topic.orphans == [lost]
    assert await admin("topics", "orphan", "discard", TOPIC, 1, "--yes") == "Orphan Discarded: 1 up to 5\n"
    assert topic.orphans == [] and await admin.json("topics", "orphan", "list", TOPIC) == []
    assert "has no orphan that begins at 1" in await admin.refused("topics", "orphan", "discard", TOPIC, 1, "-y")
