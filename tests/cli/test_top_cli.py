"""`danube top`: what it shows of brokers and topics, in 80 columns, and of a broker that is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

import pydanube
from pydanube.admin.gateway import KnownBroker, TopicRow
from pydanube.admin.metrics_text import Numbers, SubscriptionCounts, TopicCounts
from pydanube.admin.samples import Samples
from pydanube.cli.exits import Exit
from pydanube.cli.top import Look, Sort
from pydanube.testing.brokers import TestBroker
from pydanube.wire._pb.pydanube.status_pb2 import BrokerState, ClusterStatusResponse, Condition, Total
from tests.e2e.processes import danube_here

ORDERS, CLICKS, LONG = "/default/orders", "/shop/clicks", f"/default/{'x' * 190}"
BROKERS = [
    KnownBroker("1774639264912345678", "http://10.20.30.41:6650", "Cluster_Leader", "", "", "active"),
    KnownBroker("2774639264912345678", "http://10.20.30.42:6650", "Cluster_Follower", "", "", "drained"),
]
TOPICS = [
    TopicRow(ORDERS, BROKERS[0].broker_id, "Reliable"),
    TopicRow(CLICKS, BROKERS[1].broker_id, "NonReliable"),
    TopicRow(LONG, "", "Reliable"),
]


def numbers(topic: str, messages: float, *, out: float = 0.0, lag: float = 0.0) -> Numbers:
    subscription = SubscriptionCounts(messages_out=out, bytes_out=out * 100, lag=lag, consumers=1.0)
    return Numbers({topic: TopicCounts(messages, messages * 100, 2.0)}, {(topic, "s"): subscription}, {})


def seen(sort: Sort = Sort.in_, **given: object) -> Look:
    """Two looks, ten seconds apart."""
    samples = Samples()
    for at, orders, clicks in ((100.0, 0.0, 0.0), (110.0, 50_000.0, 200.0)):
        samples.add(BROKERS[0].broker_id, numbers(ORDERS, orders, out=orders / 10, lag=1_234_567.0), at)
        samples.add(BROKERS[1].broker_id, numbers(CLICKS, clicks, out=clicks * 100), at)
        samples.end_round([each.broker_id for each in BROKERS], at)
    look = Look(sort, **given)  # type: ignore[arg-type]
    look.update(BROKERS, TOPICS, samples)
    return look


def drawn(look: Look, height: int | None = 24) -> list[str]:
    console = Console(width=80, height=24, no_color=True)
    with console.capture() as said:
        console.print(look.draw(80, height))
    return said.get().rstrip().splitlines()


def test_everything_fits_into_80_columns() -> None:
    lines = drawn(seen())
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("danube top  ")
    assert "in 5,020/s" in lines[0] and "lag 1,234,567" in lines[0]
    assert lines[3].split() == ["1", "1774639264912345678", "10.20.30.41:6650", "active,", "leads", "1", "5,000", "500"]
    assert lines[7].split() == [ORDERS, "1", "5,000", "500", "500", "kB", "1,234,567", "1"]
    assert lines[9].startswith("/default/xxx") and "…" in lines[9] and lines[9].split()[1] == "?"


@pytest.mark.parametrize(
    ("sort", "first"),
    [(Sort.in_, ORDERS), (Sort.out, CLICKS), (Sort.lag, ORDERS), (Sort.name, ORDERS), (Sort.broker, LONG)],
)
def test_topics_are_sorted(sort: Sort, first: str) -> None:
    topics = seen(sort).fields()["topics"]
    assert isinstance(topics, list)
    expected = min(each.name for each in TOPICS) if sort is Sort.name else first
    assert topics[0]["topic"] == expected


def test_what_does_not_fit_is_counted() -> None:
    look = seen()
    samples, many = look._samples, [TopicRow(f"/default/t{n:03}", "", "Reliable") for n in range(100)]
    assert samples is not None
    look.update(BROKERS, many, samples)
    lines = drawn(look, 24)
    assert len(lines) <= 24
    assert lines[-1] == "… and 85 more topics"


def test_one_namespace_and_a_count() -> None:
    fields = seen(namespace="shop").fields()
    assert [each["topic"] for each in fields["topics"]] == [CLICKS]  # type: ignore[attr-defined]
    fields = seen(count=1).fields()
    assert (len(fields["topics"]), fields["topics_total"]) == (1, 3)  # type: ignore[arg-type]


def partitioned(**given: object) -> Look:
    """Of three partitions two are at the first broker."""
    homes = [BROKERS[0], BROKERS[0], BROKERS[1]]
    rows = [TopicRow(f"{CLICKS}-part-{number}", home.broker_id, "Reliable") for number, home in enumerate(homes)]
    samples = Samples()
    for at, sent in ((100.0, 0.0), (110.0, 100.0)):
        for broker in BROKERS:
            every = [numbers(row.name, sent, lag=7.0) for row in rows if row.broker_id == broker.broker_id]
            topics = {name: counts for each in every for name, counts in each.topics.items()}
            subscriptions = {name: counts for each in every for name, counts in each.subscriptions.items()}
            samples.add(broker.broker_id, Numbers(topics, subscriptions, {}), at)
        samples.end_round([each.broker_id for each in BROKERS], at)
    look = Look(Sort.in_, **given)  # type: ignore[arg-type]
    look.update(BROKERS, rows, samples)
    return look


def test_a_partitioned_topic_is_one_line_with_its_partitions_added_up() -> None:
    lines = drawn(partitioned())
    [clicks] = [line for line in lines if CLICKS in line]
    assert clicks.split() == [CLICKS, "(3)", "*", "30", "0", "3.0", "kB", "21", "1"]


def test_partitions_are_lines_of_their_own_when_asked_for_and_in_json() -> None:
    lines = drawn(partitioned(partitions=True))
    assert [line.split()[:2] for line in lines if CLICKS in line] == [
        [f"{CLICKS}-part-0", "1"],
        [f"{CLICKS}-part-1", "1"],
        [f"{CLICKS}-part-2", "2"],
    ]
    assert partitioned().fields()["topics_total"] == 3


def test_the_sum_of_partitions_is_unknown_while_the_broker_of_one_is_silent() -> None:
    look = partitioned()
    assert look._samples is not None
    look._samples.failed(BROKERS[1].broker_id, "nobody answers there")
    [clicks] = [line for line in drawn(look) if CLICKS in line]
    assert clicks.split() == [CLICKS, "(3)", "*", *"?????"]


def test_a_broker_that_does_not_answer_is_shown_as_such_and_the_others_go_on() -> None:
    look = seen()
    assert look._samples is not None
    look._samples.failed(BROKERS[1].broker_id, "nobody answers there")
    lines = drawn(look)
    assert "does not answer" in lines[4]
    assert "5,000" in lines[3]
    brokers = look.fields()["brokers"]
    assert brokers[1]["failure"] == "nobody answers there"  # type: ignore[index]
    [clicks] = [line for line in lines if line.startswith(CLICKS)]
    assert clicks.split() == [CLICKS, "2", *"?????"]
    topics: Any = look.fields()["topics"]
    known = {each["topic"]: (each["is_known"], each["lag"], each["messages_in_per_second"]) for each in topics}
    assert known[CLICKS] == (False, None, None) and known[ORDERS][0] is True


def test_what_is_wrong_stands_first_and_sums_without_a_silent_broker_are_unknown() -> None:
    look = seen()
    assert look._samples is not None
    down = Condition(name="DanubeBrokerDown", severity="critical", sentence="broker 10.20.30.43:6650 is gone since 9 s")
    gone = BrokerState(broker_id=3, address="10.20.30.43:6650", life="gone", topics=4)
    status = ClusterStatusResponse(conditions=[down], brokers=[gone], lag_messages=Total(known=5))
    look.update(BROKERS, TOPICS, look._samples, status)
    lines = drawn(look)
    assert "lag unknown, ≥ 1,234,567" in lines[0] and max(map(len, lines)) <= 80
    assert lines[2].startswith("critical: broker 10.20.30.43:6650 is gone since 9 s")
    assert lines[6].split() == ["3", "10.20.30.43:6650", "gone", "4", "?", "?"]
    fields = look.fields()
    assert fields["is_complete"] is False and fields["conditions"][0]["name"] == "DanubeBrokerDown"  # type: ignore[index]


def test_if_nobody_answers_what_was_seen_last_stays_with_the_reason() -> None:
    look = seen()
    look.failure = "nobody answers"
    assert "nobody answers" in " ".join(drawn(look)[:2])
    assert look.fields()["failure"] == "nobody answers"


# --- on a broker --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running, pydanube.blocking.connect(running.url) as client:
        client.create_topic(ORDERS)
        yield running


@pytest.mark.slow
def test_one_look_as_json_has_brokers_and_topics(broker: TestBroker) -> None:
    done = danube_here("top", "--endpoint", broker.admin_url, "--once", "--interval", "0.5", "--output", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [one] = found["brokers"]
    assert (one["topics"], one["failure"]) == (1, None)
    [topic] = found["topics"]
    assert topic["topic"] == ORDERS and topic["broker_id"] == one["broker_id"] and topic["messages_in_per_second"] == 0


@pytest.mark.slow
def test_one_look_in_a_pipe_is_a_table_that_does_not_wrap(broker: TestBroker) -> None:
    done = danube_here("top", "--endpoint", broker.admin_url, "--once", "--interval", "0.5")
    assert any(line.startswith(ORDERS) and len(line) < 200 for line in done.stdout.splitlines())


@pytest.mark.slow
def test_a_broker_that_is_not_there_is_one_sentence() -> None:
    done = danube_here("top", "--endpoint", "http://127.0.0.1:1", "--once")
    assert done.returncode == Exit.NOT_REACHABLE
    assert done.stderr == (
        "danube: the broker at 127.0.0.1:1 cannot be reached: nobody answers there; `danube broker` starts one, "
        "--endpoint names another\n"
    )
