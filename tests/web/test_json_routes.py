"""/ui/v1 answers tools as the reference's gateway does, with ids as strings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pydanube.admin.metrics_text import Numbers, SubscriptionCounts, TopicCounts
from pydanube.admin.samples import Samples
from pydanube.admin.series import SLOT_SECONDS
from tests.web.pages import Web, opened

ORDERS = "/default/orders"
BROKER = {"broker_id": "str", "broker_addr": "str", "broker_role": "str", "broker_status": "str"}
TOPIC = {
    "name": "str",
    "delivery": "str",
    "producers_connected": "int",
    "consumers_connected": "int",
    "subscriptions": "int",
}
SHAPES: dict[str, Any] = {  # of every answer, as tools know them: a key may be added, none may go or change its type
    "/health": {"status": "str", "leader": "str", "leader_reachable": "bool"},
    "/cluster": {
        "timestamp": "int",
        "brokers": [
            {
                **BROKER,
                "admin_addr": "str",
                "stats": {
                    "topics_owned": "int",
                    "rpc_total": "int",
                    "active_connections": "int",
                    "errors_5xx_total": "int",
                },
            }
        ],
        "totals": {"broker_count": "int", "topics_total": "int", "rpc_total": "int", "active_connections": "int"},
        "errors": [],
    },
    "/topics": {
        "timestamp": "int",
        "brokers": [{"broker": {**BROKER, "admin_addr": "str"}, "topics": [TOPIC]}],
        "errors": [],
    },
    "/topics/default/shaped": {
        "timestamp": "int",
        "topic": {
            "name": "str",
            "schema_subject": "NoneType",
            "schema_id": "NoneType",
            "schema_version": "NoneType",
            "schema_type": "NoneType",
            "compatibility_mode": "NoneType",
            "subscriptions": [
                {
                    "name": "str",
                    "subscription_type": "str",
                    "failure_policy": {
                        "max_redelivery_count": "int",
                        "ack_timeout_ms": "int",
                        "base_redelivery_delay_ms": "int",
                        "max_redelivery_delay_ms": "int",
                        "backoff_strategy": "str",
                        "dead_letter_topic": "NoneType",
                        "poison_policy": "str",
                    },
                }
            ],
        },
        "metrics": {
            "core": {"msg_in_total": "int", "msg_out_total": "int", "bytes_in_total": "int", "bytes_out_total": "int"},
            "active": {"producers": "int", "consumers": "int", "subscriptions": "int"},
            "rates": {"publish_rate_1m": "float", "dispatch_rate_1m": "float"},
            "lag_messages": "int",
            "is_reliable": "bool",
            "quality": {"send_ok_total": "int", "send_error_total": "int", "send_error_by_code": []},
            "latency_size": {
                "send_latency_ms_p50": "float",
                "send_latency_ms_p95": "float",
                "send_latency_ms_p99": "float",
                "msg_size_bytes_avg": "float",
            },
            "reliable": {
                "scope": "str",
                "wal_append_total": "int",
                "wal_append_bytes_total": "int",
                "wal_flush_total": "int",
                "cloud_upload_objects_total": "int",
                "cloud_upload_bytes_total": "int",
                "wal_flush_latency_ms_p50": "float",
                "wal_flush_latency_ms_p95": "float",
                "wal_flush_latency_ms_p99": "float",
            },
        },
        "errors": [],
    },
    "/topics/default/shaped/series": {"series": [{"name": "str", "points": [["float"]]}], "errors": []},
    "/topics/default/shaped/messages?count=2": {
        "messages": [
            {
                "offset": "int",
                "published": "str",
                "appended": "str",
                "producer": "str",
                "key": "str",
                "attributes": {"country": "str"},
                "payload": "str",
            }
        ],
        "looked_at": "int",
        "first_offset": "int",
        "end_offset": "int",
        "next_offset": "int",
        "head": "int",
    },
    "/namespaces": {
        "timestamp": "int",
        "namespaces": [{"name": "str", "topics": ["str"], "policies": "str"}],
        "errors": [],
    },
    "/brokers/{id}": {
        "timestamp": "int",
        "broker": BROKER,
        "metrics": {
            "rpc_total": "int",
            "topics_owned": "int",
            "inbound_bytes_total": "int",
            "outbound_bytes_total": "int",
            "errors_5xx_total": "int",
        },
        "topics": [TOPIC],
        "errors": [],
    },
}


def shape(value: Any) -> Any:
    """Keys and types, of a list those of its first."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        web.run(fill(web))
        web.sample()
        yield web


async def fill(web: Web) -> None:
    async with web.client.producer(ORDERS) as orders:
        for number in range(5):
            await orders.send(b"%d" % number)
    async with web.client.consumer(ORDERS, subscription="billing", type="exclusive", start="earliest"):
        pass


def test_the_cluster_has_brokers_with_stats_and_totals(web: Web) -> None:
    found = web.get("/ui/v1/cluster").json
    [broker] = found["brokers"]
    assert isinstance(broker["broker_id"], str) and broker["broker_id"].isdecimal()
    assert broker["stats"]["topics_owned"] == 1
    assert found["totals"]["broker_count"] == 1 and found["totals"]["topics_total"] == 1
    assert found["errors"] == [] and isinstance(found["timestamp"], int)


def test_answers_keep_their_keys_and_types() -> None:
    async def fill(web: Web) -> None:
        async with web.client.producer("/default/shaped") as shaped:
            for _ in range(3):
                await shaped.send(b"order", key="k", attributes={"country": "AT"})
        async with web.client.consumer("/default/shaped", subscription="billing", start="earliest"):
            pass

    with opened() as web:
        web.run(fill(web))
        web.sample()
        web.sample()
        web.post("/topics/default/shaped/subscriptions/billing/failure-policy", ack_timeout_ms="5000")
        broker_id = web.get("/ui/v1/cluster").json["brokers"][0]["broker_id"]
        for path, expected in SHAPES.items():
            assert shape(web.get(f"/ui/v1{path}".replace("{id}", broker_id)).json) == expected, path


def test_topics_are_grouped_by_broker(web: Web) -> None:
    [group] = web.get("/ui/v1/topics").json["brokers"]
    assert [topic["name"] for topic in group["topics"]] == [ORDERS]
    assert group["topics"][0]["delivery"] == "Reliable" and group["topics"][0]["subscriptions"] == 1


@pytest.mark.parametrize("name", ["%2Fdefault%2Forders", "default/orders", "/default/orders"])
def test_a_topic_has_metrics_and_subscriptions(web: Web, name: str) -> None:
    found = web.get(f"/ui/v1/topics/{name}").json
    assert found["topic"]["name"] == ORDERS
    assert found["topic"]["subscriptions"] == [
        {"name": "billing", "subscription_type": "exclusive", "failure_policy": None}
    ]
    assert found["metrics"]["core"]["msg_in_total"] == 5
    assert found["metrics"]["lag_messages"] == 5
    assert found["metrics"]["quality"]["send_ok_total"] > 0 and found["metrics"]["quality"]["send_error_by_code"] == []
    assert (
        found["metrics"]["latency_size"]["send_latency_ms_p99"]
        >= found["metrics"]["latency_size"]["send_latency_ms_p50"]
    )
    assert found["metrics"]["latency_size"]["msg_size_bytes_avg"] > 0


def test_a_reliable_topic_tells_of_the_log_and_the_cloud_tier_behind_it(web: Web) -> None:
    web.run(web.client.create_topic("/default/chatter", reliable=False))
    try:
        assert "reliable" not in web.get("/ui/v1/topics/default/chatter").json["metrics"]
    finally:
        web.order("/ui/v1/topics/actions", action="delete", topic="/default/chatter")
    found = web.get("/ui/v1/topics/default/orders").json["metrics"]["reliable"]
    assert found["scope"] == "broker"
    assert found["wal_append_total"] >= 5 and found["wal_append_bytes_total"] > 0 and found["wal_flush_total"] >= 1
    assert 0 <= found["wal_flush_latency_ms_p50"] <= found["wal_flush_latency_ms_p95"]
    assert found["wal_flush_latency_ms_p95"] <= found["wal_flush_latency_ms_p99"]
    assert (found["cloud_upload_objects_total"], found["cloud_upload_bytes_total"]) == (0, 0)


def test_a_series_has_points_of_time_and_value(web: Web) -> None:
    found = web.get("/ui/v1/topics/default/orders/series?step=5s").json["series"]
    assert {each["name"] for each in found} >= {"publish_rate_1m", "dispatch_rate_1m", "bytes_in_rate_1m"}
    [lag] = [each for each in found if each["name"] == "lag_messages"]
    assert lag["points"][-1][1] == 5
    refused = web.get("/ui/v1/topics/default/orders/series?step=soon")
    assert refused.status == 400 and refused.json["message"].startswith("step = 'soon' is not allowed")


def test_rates_are_those_of_the_last_minute_and_refused_sends_have_a_series_by_their_code(web: Web) -> None:
    samples, before = Samples(), web.site.sampler.samples
    [broker] = [each.broker_id for each in web.run(web.site.gateway.brokers())]
    now = time.time() // SLOT_SECONDS * SLOT_SECONDS
    for slot in range(30):  # nothing for long, then a burst, then nothing again
        sent = 600.0 if slot >= 24 else 0.0
        topic, subscription = TopicCounts(sent, sent * 100), SubscriptionCounts(sent / 2)
        refused = {(ORDERS, "InvalidArgument"): 6.0 if slot >= 20 else 0.0}
        numbers = Numbers({ORDERS: topic}, {(ORDERS, "billing"): subscription}, {}, refused)
        at = now - (29 - slot) * SLOT_SECONDS
        samples.add(broker, numbers, at)
        samples.end_round([broker], at)
    web.site.sampler.samples = samples
    try:
        rates = web.get("/ui/v1/topics/default/orders").json["metrics"]["rates"]
        found = web.get("/ui/v1/topics/default/orders/series?step=5s").json["series"]
    finally:
        web.site.sampler.samples = before
    assert rates == {"publish_rate_1m": 10.0, "dispatch_rate_1m": 5.0}
    series = {each["name"]: [value for _, value in each["points"]] for each in found}
    assert series["publish_rate_1m"][-6:] == [10.0] * 6 and set(series["publish_rate_1m"][:-6]) == {0.0}
    assert series["bytes_in_rate_1m"][-1] == 1000.0 and series["dispatch_rate_1m"][-1] == 5.0
    [errors] = [each for each in found if each["name"] == "producer_send_errors"]
    assert errors["labels"] == {"error_code": "InvalidArgument"}
    assert series["producer_send_errors"][-1] == pytest.approx(0.1)


def test_a_broker_is_found_by_its_id_as_text(web: Web) -> None:
    broker_id = web.get("/ui/v1/cluster").json["brokers"][0]["broker_id"]
    found = web.get(f"/ui/v1/brokers/{broker_id}").json
    assert found["broker"]["broker_id"] == broker_id and found["topics"][0]["name"] == ORDERS
    assert web.get("/ui/v1/brokers/1").status == 404


def test_namespaces_have_topics_and_policies_as_text(web: Web) -> None:
    [found] = [each for each in web.get("/ui/v1/namespaces").json["namespaces"] if each["name"] == "default"]
    assert found["topics"] == [ORDERS]
    assert json.loads(found["policies"])["max_publish_rate"] == 0


def test_topics_are_created_and_deleted_by_a_tool(web: Web) -> None:
    made = web.order(
        "/ui/v1/topics/actions", action="create", topic="t", namespace="default", dispatch_strategy="Reliable"
    )
    assert made.status == 200 and made.json["success"]
    again = web.order("/ui/v1/topics/actions", action="create", topic="/default/t", dispatch_strategy="Reliable")
    assert again.status == 409 and not again.json["success"] and "exists" in again.json["message"]
    assert web.order("/ui/v1/topics/actions", action="delete", topic="/default/t").json["success"]
    assert web.order("/ui/v1/topics/actions", action="delete", topic="/default/t").status == 404
    assert web.order("/ui/v1/topics/actions", action="paint", topic="/default/t").status == 400


def test_what_needs_a_cluster_says_so(web: Web) -> None:
    for answer in (
        web.get("/ui/v1/cluster/balance"),
        web.get("/ui/v1/cluster/raft"),
        web.order("/ui/v1/cluster/rebalance", dry_run=True),
    ):
        assert answer.status == 501 and answer.json["message"]
    moved = web.order("/ui/v1/topics/actions", action="unload", topic=ORDERS)
    assert moved.status == 409 and not moved.json["success"]


def test_what_does_not_exist_here_is_501_with_a_sentence(web: Web) -> None:
    for path in ("/schemas", "/schemas/orders", "/security/roles", "/security/bindings"):
        answer = web.get(f"/ui/v1{path}")
        assert answer.status == 501 and answer.json["message"].startswith("this broker has no"), path
    for path in ("/schemas/actions", "/security/roles/actions", "/security/bindings/actions"):
        assert web.order(f"/ui/v1{path}", action="create").status == 501


def test_a_body_that_is_no_object_and_a_path_that_is_none_are_refused_as_json(web: Web) -> None:
    for body, sentence in (
        (b"[1", "the body is no JSON: expecting ',' delimiter, at line 1, column 3"),
        (b'{"action": delete}', "the body is no JSON: expecting value, at line 1, column 12"),
        (b'{"topic": "\xff"}', "the body is no JSON: byte 11 is no UTF-8"),
        (b"[" * 100_000, "the body is no JSON that can be read: a number is too long, or it is nested too deep"),
        (b"[]", "the body must be a JSON object, and is a list"),
        (b'"unload"', "the body must be a JSON object, and is a text"),
        (b"{}", "topic is missing"),
        (b'{"topic": 7}', "topic = 7 is not allowed: a text in quotes"),
    ):
        refused = web.request("POST", "/ui/v1/topics/actions", body)
        assert (refused.status, refused.json) == (400, {"success": False, "message": sentence})
    missing = web.get("/ui/v1/nothing")
    assert missing.status == 404 and not missing.json["success"]


def test_health_names_the_leader(web: Web) -> None:
    found = web.get("/ui/v1/health").json
    assert found["status"] == "ok" and found["leader"].isdecimal()
