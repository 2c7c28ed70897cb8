"""The official Python client, unmodified, each program in a process of its own, against a broker in another.

Every scenario runs on our gRPC server and on grpcio's.
"""

from __future__ import annotations

import contextlib
import signal
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import BrokerProcess, Program, broker_in, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUMBERS = count()


@pytest.fixture(scope="module", params=["own", "grpcio"])
def grpc_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Flags that choose the server of the client port."""
    file = tmp_path_factory.mktemp("grpc") / "broker.yml"
    file.write_text(f"broker: {{grpc_server: {request.param}}}")
    return "--config-file", str(file)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, grpc_server: tuple[str, str]) -> Iterator[BrokerProcess]:
    with broker_in(tmp_path_factory.mktemp("official"), *grpc_server) as started:
        yield started


@pytest.fixture
def topic() -> str:
    return f"/default/topic{next(NUMBERS)}"


@pytest.fixture
def programs() -> Iterator[contextlib.ExitStack]:
    """What is entered here ends with the test."""
    with contextlib.ExitStack() as stack:
        yield stack


def consumers_of(
    programs: contextlib.ExitStack, broker: BrokerProcess, topic: str, number: int, *arguments: object
) -> list[Program]:
    """`number` consumers c0, c1, …, all subscribed, in that order."""
    started = []
    for name in (f"c{each}" for each in range(number)):
        consumer = programs.enter_context(broker.run("consumer", topic, "--name", name, *arguments))
        started.append(consumer)
    for consumer in started:
        consumer.until("subscribed")
    return started


def payloads(lines: list[dict[str, Any]]) -> list[str]:
    return [line["payload"] for line in lines]


def messages(number: int) -> list[str]:
    return [f"message {each}" for each in range(number)]


# --- produce and consume ------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [0, 3], ids=["plain", "partitioned"])
@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non_reliable"])
def test_what_is_sent_arrives_once_and_in_order(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack, reliable: bool, partitions: int
) -> None:
    flags = ["--reliable"] if reliable else []
    producer = programs.enter_context(
        broker.run(
            *("producer", topic, "--count", 30, "--partitions", partitions, "--attribute", "thirty", *flags),
            *("--interval-ms", 0 if reliable else 2),  # a non-reliable topic drops what a consumer is too slow for
        )
    )
    producer.until("created")
    [consumer] = consumers_of(programs, broker, topic, 1)
    producer.go()
    received = consumer.until("received", 30)
    assert sorted(payloads(received)) == sorted(messages(30))
    assert all(line["attributes"] == {"number": "thirty"} for line in received)
    by_topic = defaultdict(list)
    for line in received:
        by_topic[line["topic"]].append(line)
    assert sorted(by_topic) == ([topic] if not partitions else [f"{topic}-part-{n}" for n in range(partitions)])
    for lines in by_topic.values():
        assert [line["number"] for line in lines] == sorted(line["number"] for line in lines)
        assert [line["offset"] for line in lines] == (list(range(len(lines))) if reliable else [0] * len(lines))


@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non_reliable"])
def test_three_shared_consumers_get_twelve_of_thirty_six_each(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack, reliable: bool
) -> None:
    flags = ["--reliable"] if reliable else ["--interval-ms", 2]
    producer = programs.enter_context(broker.run("producer", topic, "--count", 36, *flags))
    producer.until("created")
    consumers = consumers_of(programs, broker, topic, 3, "--type", "shared")
    producer.go()
    producer.until("done")
    until(lambda: sum(len(each.events("received")) for each in consumers) >= 36, "36 messages arrive")
    assert [len(each.events("received")) for each in consumers] == [12, 12, 12]
    everything = [payload for each in consumers for payload in payloads(each.events("received"))]
    assert sorted(everything) == sorted(messages(36))


def test_every_subscription_gets_everything(broker: BrokerProcess, topic: str, programs: contextlib.ExitStack) -> None:
    producer = programs.enter_context(broker.run("producer", topic, "--reliable", "--count", 10))
    producer.until("created")
    [first] = consumers_of(programs, broker, topic, 1, "--subscription", "first")
    [second] = consumers_of(programs, broker, topic, 1, "--subscription", "second")
    producer.go()
    assert payloads(first.until("received", 10)) == messages(10)
    assert payloads(second.until("received", 10)) == messages(10)


def test_an_exclusive_subscription_refuses_a_second_consumer_until_the_first_is_gone(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack
) -> None:
    """The original keeps a dead consumer for ever, and with it the subscription."""
    programs.enter_context(broker.run("producer", topic, "--reliable")).until("created")
    [holder] = consumers_of(programs, broker, topic, 1)
    late = programs.enter_context(broker.run("consumer", topic, "--name", "late"))
    [refusal] = late.until("refused")
    assert refusal["code"] == "PERMISSION_DENIED" and "c0" in refusal["why"]
    holder.kill()
    consumers_of(programs, broker, topic, 1, "--name", "later")


def test_a_producer_of_the_other_kind_is_refused(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack
) -> None:
    programs.enter_context(broker.run("producer", topic, "--reliable")).until("created")
    [refusal] = programs.enter_context(broker.run("producer", topic, "--name", "other")).until("refused")
    assert refusal["code"] == "FAILED_PRECONDITION"


# --- failing messages ---------------------------------------------------------------------------------


def test_a_nacked_message_comes_again_and_the_others_do_not(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack
) -> None:
    producer = programs.enter_context(broker.run("producer", topic, "--reliable", "--count", 10))
    producer.until("created")
    broker.admin("subscriptions", "set-failure-policy", topic, "subscription", "--base-redelivery-delay-ms", 50)
    [consumer] = consumers_of(programs, broker, topic, 1, "--type", "shared", "--nack", "once", "--nack-every", 5)
    producer.go()
    consumer.until("acked", 10)
    received = consumer.events("received")
    times = {payload: payloads(received).count(payload) for payload in messages(10)}
    assert times == {f"message {n}": 2 if n % 5 == 0 else 1 for n in range(10)}


def test_a_message_that_fails_too_often_goes_to_the_dead_letter_topic(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack
) -> None:
    dead_letters = f"{topic}-dead"
    producer = programs.enter_context(broker.run("producer", topic, "--reliable", "--count", 6, "--attribute", "six"))
    producer.until("created")
    broker.admin("topics", "create", dead_letters, "--dispatch-strategy", "reliable")
    broker.admin(
        *("subscriptions", "set-failure-policy", topic, "subscription", "--max-redelivery-count", 2),
        *("--base-redelivery-delay-ms", 20, "--backoff-strategy", "fixed"),
        *("--poison-policy", "dead_letter", "--dead-letter-topic", dead_letters),
    )
    [mortuary] = consumers_of(programs, broker, dead_letters, 1)
    [consumer] = consumers_of(programs, broker, topic, 1, "--type", "shared", "--nack", "always", "--nack-every", 3)
    producer.go()
    dead = mortuary.until("received", 2)
    assert sorted(payloads(dead)) == ["message 0", "message 3"]
    for line in dead:
        attributes = line["attributes"]
        assert attributes["number"] == "six"
        assert attributes["x-original-topic"] == topic
        assert attributes["x-original-subscription"] == "subscription"
        assert attributes["x-original-topic-offset"] == str(line["number"])
        assert attributes["x-poison-policy"] == "dead_letter"
        assert attributes["x-failure-reason"] == "the test wants it again"
    assert sorted(payloads(consumer.until("acked", 4))) == [f"message {n}" for n in (1, 2, 4, 5)]
    assert payloads(consumer.events("received")).count("message 0") == 3  # once, and two redeliveries
    sentence = until(lambda: caught_up(broker, topic), "the subscription is caught up")
    assert "offset 6" in sentence


def caught_up(broker: BrokerProcess, topic: str) -> str:
    sentence = broker.admin("subscriptions", "explain", topic, "subscription")
    return sentence if sentence.startswith("caught up") else ""


# --- who gets what ------------------------------------------------------------------------------------


def test_a_standby_takes_over_with_what_the_active_consumer_left(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack
) -> None:
    """The original never promotes a standby."""
    producer = programs.enter_context(broker.run("producer", topic, "--reliable", "--count", 5))
    producer.until("created")
    # It acknowledges nothing, so that everything it got is left when it dies.
    active = programs.enter_context(broker.run("consumer", topic, "--name", "a", "--type", "failover", "--no-ack"))
    active.until("subscribed")
    standby = programs.enter_context(broker.run("consumer", topic, "--name", "b", "--type", "failover"))
    standby.until("subscribed")
    producer.go()
    assert payloads(active.until("received", 5)) == messages(5)
    assert standby.events("received") == []
    active.kill()
    assert payloads(standby.until("received", 5)) == messages(5)
    producer.go()
    assert payloads(standby.until("received", 10)) == messages(10)


def test_a_key_belongs_to_one_consumer_and_keeps_its_order_also_after_a_nack(
    broker: BrokerProcess, topic: str, programs: contextlib.ExitStack
) -> None:
    keys = 12
    producer = programs.enter_context(broker.run("producer", topic, "--reliable", "--count", keys * 5, "--keys", keys))
    producer.until("created")
    broker.admin("subscriptions", "set-failure-policy", topic, "subscription", "--base-redelivery-delay-ms", 20)
    consumers = consumers_of(programs, broker, topic, 3, "--type", "key-shared", "--nack", "once", "--nack-every", 7)
    producer.go()
    until(lambda: sum(len(each.events("acked")) for each in consumers) >= keys * 5, "every message is acknowledged")
    owners = defaultdict(set)
    order = defaultdict(list)
    for number, consumer in enumerate(consumers):
        for line in consumer.events("received"):
            owners[line["key"]].add(number)
            if not line["nacked"]:
                order[line["key"]].append(line["number"])
    assert len(owners) == keys and all(len(owner) == 1 for owner in owners.values())
    assert len(set.union(*owners.values())) == 3, "every consumer has keys"
    assert order == {f"key-{key}": [key + keys * turn for turn in range(5)] for key in range(keys)}


def test_key_filters_choose_among_consumers(broker: BrokerProcess, topic: str, programs: contextlib.ExitStack) -> None:
    producer = programs.enter_context(broker.run("producer", topic, "--reliable", "--count", 20, "--keys", 2))
    producer.until("created")
    zero = programs.enter_context(
        broker.run("consumer", topic, "--name", "zero", "--type", "key-shared", "--filter", "key-0")
    )
    one = programs.enter_context(
        broker.run("consumer", topic, "--name", "one", "--type", "key-shared", "--filter", "*-1")
    )
    for consumer in (zero, one):
        consumer.until("subscribed")
    producer.go()
    assert {line["key"] for line in zero.until("received", 10)} == {"key-0"}
    assert {line["key"] for line in one.until("received", 10)} == {"key-1"}


# --- the broker goes away -----------------------------------------------------------------------------


def test_clients_carry_on_after_a_clean_restart_and_after_a_crash(
    tmp_path: Path, programs: contextlib.ExitStack, grpc_server: tuple[str, str]
) -> None:
    """In the original every id dies with the process: producers raise and Python consumers never recover."""
    topic, shared = "/default/durable", "/default/shared"
    with broker_in(tmp_path, *grpc_server) as broker:
        retries = ("--retries", 30, "--interval-ms", 5)  # patience, where five tries may be over too soon
        producers = [
            programs.enter_context(broker.run("producer", each, "--reliable", "--count", 300, *retries))
            for each in (topic, shared)
        ]
        for producer in producers:
            producer.until("created")
        consumers = [
            *consumers_of(programs, broker, topic, 1),
            *consumers_of(programs, broker, shared, 2, "--type", "shared"),
        ]
        for producer in producers:
            producer.go()
        producers[0].until("sent", 60)
        assert broker.stop() == 0
        broker.start()
        producers[0].until("sent", 150, seconds=30)
        consumers[0].until("received", 100, seconds=30)
        broker.kill()
        broker.start()
        for producer in producers:
            producer.until("done", seconds=40)
        until(lambda: set(payloads(consumers[0].events("acked"))) == set(messages(300)), "nothing is lost")
        firsts = list(dict.fromkeys(payloads(consumers[0].events("received"))))
        assert firsts == messages(300), "a message may come twice, but none overtakes another"
        until(
            lambda: {line["payload"] for each in consumers[1:] for line in each.events("acked")} == set(messages(300)),
            "nothing is lost among two consumers",
        )
        assert all(each.events("acked") for each in consumers[1:]), "both go on"
        assert "caught up" in until(lambda: broker.admin("subscriptions", "explain", topic, "subscription"), "explain")


def test_messages_acknowledged_to_the_producer_survive_kill_nine_and_wait_for_their_consumer(
    tmp_path: Path, programs: contextlib.ExitStack, grpc_server: tuple[str, str]
) -> None:
    topic = "/default/orders"
    with broker_in(tmp_path, *grpc_server) as broker:
        producer = programs.enter_context(broker.run("producer", topic, "--reliable", "--count", 1000))
        producer.until("created")
        consumers_of(programs, broker, topic, 1)[0].kill()  # a subscription that never acknowledged anything
        producer.go()
        producer.until("sent", 200)
        broker.kill()
        producer.send_signal(signal.SIGKILL)
        producer.wait()
        acknowledged = payloads(producer.events("sent"))
        broker.start()
        [consumer] = consumers_of(programs, broker, topic, 1)
        received = payloads(consumer.until("received", len(acknowledged)))
        assert received[: len(acknowledged)] == acknowledged
        assert len(received) <= len(acknowledged) + 1, "at most the one that was on its way"
