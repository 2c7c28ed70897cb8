"""What the pages and the JSON routes do to a cluster: drain, activate, rebalance; and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest

from pydanube.core.names import TopicName
from tests.harness.server_cluster import OneMember, ServerCluster, SmallQuorum, run_members
from tests.web.pages import HOST, Browser, opened_cluster

TOPICS = [TopicName(f"/default/t{number}") for number in range(4)]
ACTIONS = "/ui/v1/cluster/actions"


class WebSetup(NamedTuple):
    browser: Browser
    cluster: ServerCluster
    ids: tuple[str, str]

    @property
    def topics(self) -> tuple[int, ...]:
        """How many each broker serves."""
        return tuple(len(node.broker.topics.loaded) for node in self.cluster.nodes)

    def until(self, *counts: int) -> None:
        """They serve so many, and every broker knows."""

        def is_so() -> bool:
            seen = [[node.cluster.host_of(topic) for topic in TOPICS] for node in self.cluster.nodes]
            known = all(tuple(hosts.count(node.id) for node in self.cluster.nodes) == counts for hosts in seen)
            return known and self.topics == counts

        self.browser.run(self.cluster.until(is_so))

    def until_reported(self) -> None:
        """Every broker knows the load of every other one: what a rebalancing goes by."""

        def is_so() -> bool:
            return all(
                len(seer.cluster.view.reports[node.broker.broker_id].topics) == len(node.broker.topics.loaded)
                for seer in self.cluster.nodes
                for node in self.cluster.nodes
            )

        self.browser.run(self.cluster.until(is_so))

    def states(self) -> list[str]:
        return [each["broker_status"] for each in self.browser.get("/ui/v1/cluster").json["brokers"]]

    def begin(self) -> None:
        """Both brokers are active, and the first one has all topics."""
        self.browser.run(self._begin())
        self.until(len(TOPICS), 0)

    async def _begin(self) -> None:
        for node in self.cluster.nodes:
            if node.id not in self.cluster.node(1).cluster.view.active():
                await node.cluster.requests.activate(node.broker.broker_id, "for the next test")
        await self.cluster.until(lambda: all(len(node.cluster.view.active()) == 2 for node in self.cluster.nodes))
        for topic in TOPICS:
            if self.cluster.host(topic) is None:
                await self.cluster.create(topic, on=1)
            elif self.cluster.host(topic) is not self.cluster.node(1):
                await self.cluster.node(1).cluster.requests.unload(topic, self.cluster.node(1).id)
                await self.cluster.settled(topic, 1)


@pytest.fixture(scope="module")
def running() -> Iterator[WebSetup]:
    with opened_cluster(2, min_topic_age_seconds=0, cooldown_seconds=0) as (browser, cluster):
        yield WebSetup(browser, cluster, (str(cluster.node(1).id), str(cluster.node(2).id)))


@pytest.fixture
def setup(running: WebSetup) -> WebSetup:
    running.begin()
    return running


# --- pages ----------------------------------------------------------------------------------------------


def test_a_broker_is_drained_and_activated_by_its_buttons(setup: WebSetup) -> None:
    browser, (first, _) = setup.browser, setup.ids
    page = browser.get(f"/brokers/{first}")
    assert "Drain this broker" in page.body and f'action="/brokers/{first}/drain"' in page.body
    page = browser.post(f"/brokers/{first}/drain")
    assert f"Broker {first} hands its topics over." in page.text
    page = browser.until("/cluster", "4 of 4 topics moved")
    assert "Drain broker" in page.text and "failed 0" in page.text
    setup.until(0, 4)
    assert "drained" in setup.states()
    assert f'action="/brokers/{first}/activate"' in browser.get("/cluster").body
    page = browser.get(f"/brokers/{first}")
    assert "Activate this broker" in page.body and "Drain this broker" not in page.body
    page = browser.post(f"/brokers/{first}/activate")
    assert "It is active: topics may be given to it again." in page.text and "Drain this broker" in page.body
    assert setup.states() == ["active", "active"]


def test_what_the_cluster_refuses_is_a_sentence_on_the_page(setup: WebSetup) -> None:
    browser = setup.browser
    page = browser.post("/brokers/nonsense/drain")
    assert "nonsense" in page.text and "failed" in page.body
    browser.post("/brokers/7/drain")
    assert "broker 7" in browser.until("/cluster", "Drain broker 7").text
    page = browser.post("/brokers/7/activate")
    assert page.status == 404 and "there is no broker 7 in this cluster" in page.text
    assert setup.topics == (4, 0) and setup.states() == ["active", "active"]


# --- JSON -----------------------------------------------------------------------------------------------


def test_a_tool_drains_and_activates_a_broker(setup: WebSetup) -> None:
    browser, (first, _) = setup.browser, setup.ids
    tried = browser.order(ACTIONS, action="unload", broker_id=first, dry_run=True)
    assert tried.json == {"success": True, "message": "started=false total=4 succeeded=0 failed=0 pending=4"}
    assert setup.topics == (4, 0) and setup.states() == ["active", "active"]
    some = browser.order(ACTIONS, action="unload", broker_id=first, dry_run=True, namespaces_exclude=["default"])
    assert "total=0" in some.json["message"]
    done = browser.order(ACTIONS, action="unload", broker_id=first, max_parallel=2, timeout_seconds=20)
    assert done.json == {"success": True, "message": "started=true total=4 succeeded=4 failed=0 pending=0"}
    setup.until(0, 4)
    assert sorted(setup.states()) == ["active", "drained"]
    done = browser.order(ACTIONS, action="activate", broker_id=first, reason="it is back")
    assert done.json == {"success": True, "message": f"broker {first} is active"}
    assert setup.states() == ["active", "active"]


def test_a_tool_rebalances_and_ids_are_texts(setup: WebSetup) -> None:
    browser, (first, second) = setup.browser, setup.ids
    setup.until_reported()
    found = browser.get("/ui/v1/cluster/balance").json
    assert {each["broker_id"]: each["topic_count"] for each in found["brokers"]} == {first: 4, second: 0}
    assert (found["coefficient_of_variation"], found["broker_count"]) == (1.0, 2)
    loads = dict.fromkeys(("coefficient_of_variation", "mean_load", "max_load", "min_load", "std_deviation"), float)
    assert {key: type(value) for key, value in found.items()} == {
        **loads, "broker_count": int, "brokers": list, "assignment_strategy": str,
    }  # fmt: skip
    assert {key: type(value) for key, value in found["brokers"][0].items()} == {
        "broker_id": str, "load": float, "topic_count": int, "is_overloaded": bool, "is_underloaded": bool,
    }  # fmt: skip
    tried = browser.order("/ui/v1/cluster/rebalance", dry_run=True).json
    move = tried["proposed_moves"][0]
    assert tried["success"] and tried["moves_executed"] == 0 and tried["error_message"].startswith("Dry run")
    assert set(tried) == {"success", "moves_executed", "proposed_moves", "error_message"}
    assert set(move) == {"topic_name", "from_broker", "to_broker", "estimated_load", "reason"}
    assert (move["from_broker"], move["to_broker"]) == (first, second) and move["topic_name"] in TOPICS
    assert setup.topics == (4, 0)
    done = browser.order("/ui/v1/cluster/rebalance", max_moves=1).json
    assert done["success"] and done["moves_executed"] == 1
    setup.until(3, 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        (ACTIONS, {"action": "paint", "broker_id": "1"}, 400, "action = 'paint' is not allowed: unload or activate"),
        (ACTIONS, {"action": "unload"}, 400, "broker_id is missing"),
        (ACTIONS, {"action": "unload", "broker_id": 7}, 400, "broker_id = 7 is not allowed: a text in quotes"),
        (ACTIONS, {"action": "unload", "broker_id": "7"}, 404, "7"),
        (ACTIONS, {"action": "activate", "broker_id": "7"}, 404, "7"),
        (ACTIONS, {"action": "unload", "broker_id": "7", "namespaces_include": "a"}, 400, "a list of texts"),
        ("/ui/v1/cluster/rebalance", {"max_moves": "many"}, 400, "max_moves = 'many' is not allowed"),
        ("/ui/v1/cluster/rebalance", {"max_moves": 0}, 400, "max_moves"),
        ("/ui/v1/cluster/raft/actions", {"action": "promote_node"}, 400, "node_id is missing"),
    ],
)
def test_what_a_tool_asks_wrongly_is_refused_with_a_sentence(
    setup: WebSetup, path: str, body: dict[str, object], status: int, sentence: str
) -> None:
    refused = setup.browser.order(path, **body)
    assert refused.status == status and not refused.json["success"] and sentence in refused.json["message"]
    assert setup.topics == (4, 0) and setup.states() == ["active", "active"]


def test_a_tool_sees_promotes_and_removes_members_of_the_metadata_store(setup: WebSetup) -> None:
    browser, broker = setup.browser, setup.cluster.node(1).broker
    mine = f"http://{broker.config.cluster.raft_addr}"
    quorum = SmallQuorum(
        OneMember(11, (mine,)), OneMember(22, ("http://b:1",)), OneMember(33, ("http://c:1",), is_learner=True)
    )
    run_members(broker, quorum)
    try:
        found = browser.get("/ui/v1/cluster/raft").json
        assert (found["voters"], found["learners"], found["leader_id"]) == (["11", "22"], ["33"], "11")
        assert {key: type(value) for key, value in found.items()} == {
            "leader_id": str, "current_term": int, "last_applied": int, "voters": list, "learners": list,
            "self_node_id": str, "raft_addr": str,
        }  # fmt: skip
        promoted = browser.order("/ui/v1/cluster/raft/actions", action="promote_node", node_id="33")
        assert promoted.json["success"] and promoted.json["message"]
        assert browser.get("/ui/v1/cluster/raft").json["voters"] == ["11", "22", "33"]
        assert browser.order("/ui/v1/cluster/raft/actions", action="remove_node", node_id="33").json["success"]
        assert browser.get("/ui/v1/cluster/raft").json["voters"] == ["11", "22"]
        wrong = browser.order("/ui/v1/cluster/raft/actions", action="paint_node", node_id="33")
        assert wrong.status == 400 and "promote_node or remove_node" in wrong.json["message"]
    finally:
        run_members(broker, None)


# --- who may not ----------------------------------------------------------------------------------------


def test_neither_another_site_nor_a_read_only_web_admin_drains_activates_or_rebalances(setup: WebSetup) -> None:
    browser, (first, _) = setup.browser, setup.ids
    reader = Browser(browser._thread, replace(browser.site, read_only=True), read_only=True)
    setup.until_reported()
    orders = (
        (f"/brokers/{first}/drain", b""),
        (f"/brokers/{first}/activate", b""),
        ("/cluster/rebalance", b"dry_run=0"),
        (ACTIONS, b'{"action": "unload", "broker_id": "%s"}' % first.encode()),
        (ACTIONS, b'{"action": "activate", "broker_id": "%s"}' % first.encode()),
        ("/ui/v1/cluster/rebalance", b"{}"),
        ("/ui/v1/cluster/raft/actions", b'{"action": "remove_node", "node_id": "1"}'),
    )
    for path, body in orders:
        refused = browser.request("POST", path, body, {"origin": "https://evil.example"})
        assert refused.status == 403 and "another site" in refused.body, path
        refused = reader.request("POST", path, body, {"origin": f"http://{HOST}"})
        assert refused.status == 403 and "read-only" in refused.body, path
    assert setup.topics == (4, 0) and setup.states() == ["active", "active"]
    for path in ("/cluster", f"/brokers/{first}"):
        page = reader.get(path)
        assert page.status == 200 and 'method="post"' not in page.body and "read-only" in page.text


def test_rebalancing_tells_what_it_would_move_and_then_moves_it(setup: WebSetup) -> None:
    """The last one: what it began goes on in the background."""
    browser, (first, second) = setup.browser, setup.ids
    setup.until_reported()
    page = browser.post("/cluster/rebalance", dry_run="1")
    assert f"would move from broker {first} to {second}" in page.text
    assert setup.topics == (4, 0)
    page = browser.post("/cluster/rebalance", dry_run="0")
    assert f"moves from broker {first} to {second}" in page.text
    browser.run(setup.cluster.until(lambda: setup.topics[1] >= 1))
    assert "Moved by rebalancing" in browser.until("/cluster", "Moved by rebalancing").text
