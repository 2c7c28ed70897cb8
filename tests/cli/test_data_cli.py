"""`danube produce` and `danube consume` on one broker: the way they take, kinds of topics, and when they end."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

import pydanube
from pydanube.cli import catching_up, data, native
from pydanube.cli.catching_up import PartitionProgress
from pydanube.cli.consuming import ConsumeOptions, Received
from pydanube.cli.exits import Exit
from pydanube.core.names import TopicName
from pydanube.core.policies import TYPE_NAMES, type_name
from pydanube.testing.brokers import TestBroker
from pydanube.testing.ports import free_ports
from tests.e2e.processes import danube_here
from tools.docs.commands import commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUMBERS = count()
NATIVE, GRPC = "native", "grpc"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(broker: TestBroker) -> Iterator[pydanube.blocking.Client]:
    with pydanube.blocking.connect(broker.url) as found:
        yield found


@pytest.fixture
def topic() -> str:
    return f"/default/data{next(NUMBERS)}"


def url(broker: TestBroker, way: str) -> str:
    return broker.url if way == NATIVE else broker.grpc_url


def produce(address: str, topic: str, *words: object) -> Any:
    return danube_here("produce", "-s", address, "-t", topic, "-i", 0, *words)


def consume(address: str, topic: str, *words: object) -> Any:
    return danube_here("consume", "-s", address, "-t", topic, "-o", "json", *words)


def payloads(done: Any) -> list[str]:
    return [json.loads(line)["payload"] for line in done.stdout.splitlines()]


# --- which way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "protocol", "expected"),
    [
        ("danube://127.0.0.1:6651", None, (NATIVE, "danube://127.0.0.1:6651")),
        ("broker:6651", None, (NATIVE, "broker:6651")),
        ("http://broker:6650", None, (GRPC, "http://broker:6650")),
        ("danube://127.0.0.1:6651", "grpc", (GRPC, "http://127.0.0.1:6650")),
        ("broker:6650", "grpc", (GRPC, "broker:6650")),
    ],
)
def test_the_address_says_which_protocol_and_without_one_it_is_the_native(
    address: str, protocol: str | None, expected: tuple[str, str]
) -> None:
    way, found = data.address_of(address, data.Protocol(protocol) if protocol else None)
    assert (way.value, found) == expected


def test_a_protocol_that_does_not_fit_the_address_is_refused() -> None:
    done = danube_here("produce", "-s", "http://127.0.0.1:1", "--protocol", "native", "-m", "x")
    assert done.returncode == Exit.USAGE and "does not fit" in done.stderr


@pytest.mark.parametrize("way", [NATIVE, GRPC])
def test_messages_arrive_with_key_and_attributes_either_way(broker: TestBroker, topic: str, way: str) -> None:
    sent = produce(url(broker, way), topic, "-m", "hello", "-c", 2, "-k", "eu", "-a", "a:b", "-o", "json")
    assert sent.returncode == 0, sent.stderr
    *each, total = map(json.loads, sent.stdout.splitlines())
    assert [line["error"] for line in each] == [None, None] and total["success"] == 2 and total["error"] is None
    assert [line["offset"] for line in each] == ([0, 1] if way == NATIVE else [None, None])
    got = consume(url(broker, way), topic, "-m", "s", "--start", "earliest", "-c", 2, "--timeout", 30)
    lines = [json.loads(line) for line in got.stdout.splitlines()]
    assert [(line["payload"], line["offset"]) for line in lines] == [("hello", 0), ("hello", 1)]
    assert lines[0]["routing_key"] == "eu" and lines[0]["attributes"] == {"a": "b"}
    assert lines[0]["producer_name"] and lines[0]["publish_time_ms"] > 1_700_000_000_000


def test_lines_keep_their_order_though_many_are_on_their_way(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str, tmp_path: Any
) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(f"{number}\n" for number in range(3_000)))
    done = danube_here("produce", "-s", broker.url, "-t", topic, "-f", file, "--lines")
    assert done.stdout == "Success: 3000\nErrors: 0\n"
    stored = client.fetch(topic).table().column("payload").to_pylist()
    assert stored == [b"%d" % number for number in range(3_000)]


def test_a_message_that_is_too_large_is_counted_and_the_rest_goes_on(
    broker: TestBroker, topic: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pydanube.client.producer.PAYLOAD_SIZE_MAX_BYTES", 1_000)
    file = tmp_path / "lines"
    file.write_text(f"small\n{'x' * 2_000}\nsmall too\n")
    done = danube_here("produce", "-s", broker.url, "-t", topic, "-f", file, "--lines")
    assert done.returncode == Exit.NOT_GOOD and done.stdout == "Success: 2\nErrors: 1\n"
    assert "over the limit" in done.stderr


# --- kinds of topics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [NATIVE, GRPC])
def test_a_new_topic_is_reliable_and_an_old_one_is_taken_as_it_is(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str, way: str
) -> None:
    address = url(broker, way)
    assert produce(address, topic, "-m", "kept").returncode == 0
    assert client.describe_topic(topic).reliable
    other = f"{topic}-fast"
    assert produce(address, other, "--non-reliable", "-m", "fast").returncode == 0
    assert not client.describe_topic(other).reliable
    again = produce(address, other, "-m", "fast")
    assert again.returncode == 0, again.stderr
    for name, flag in ((topic, "--non-reliable"), (other, "--reliable")):
        refused = produce(address, name, flag, "-m", "x")
        assert refused.returncode == Exit.REFUSED and "does not match topic strategy" in refused.stderr
        assert refused.stdout == "", "nothing was tried, so nothing is counted"


def test_topics_are_created_reliable_unless_told_otherwise(broker: TestBroker, topic: str) -> None:
    def admin(*words: object) -> Any:
        done = danube_here("admin", "--endpoint", broker.admin_url, "topics", *words, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    admin("create", topic)
    assert admin("describe", topic)["delivery"] == "Reliable"
    admin("create", f"{topic}-fast", "--dispatch-strategy", "non_reliable")
    assert admin("describe", f"{topic}-fast")["delivery"] == "NonReliable"


def test_partitions_that_the_topic_does_not_have_are_refused(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str
) -> None:
    assert produce(broker.url, topic, "-p", 2, "-m", "x", "-c", 4).returncode == 0
    assert client.describe_topic(topic).partitions == 2
    assert produce(broker.url, topic, "-m", "x").returncode == 0
    wrong = produce(broker.url, topic, "-p", 3, "-m", "x")
    assert wrong.returncode == Exit.USAGE and "has 2 partitions" in wrong.stderr


# --- refusals -------------------------------------------------------------------------------------------


def test_a_broker_that_is_away_is_an_error_in_the_summary_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "DIAL_SECONDS", 0.2)
    [port] = free_ports(1)
    done = danube_here("produce", "-s", f"danube://127.0.0.1:{port}", "-m", "x", "-o", "json")
    assert done.returncode == Exit.NOT_REACHABLE
    summary = json.loads(done.stdout)
    assert (summary["success"], summary["errors"]) == (0, 0) and "nobody answers there" in summary["error"]
    assert done.stderr == f"danube: {summary['error']}\n"
    nobody = danube_here("consume", "-s", "danube://nobody.invalid:1", "-m", "x")
    assert nobody.returncode == Exit.NOT_REACHABLE and "no host of the name nobody.invalid" in nobody.stderr
    assert nobody.stdout == ""


def test_a_grpc_port_is_told_from_the_native_one(broker: TestBroker) -> None:
    for wrong in (broker.grpc_url, broker.admin_url):
        done = danube_here("produce", "-s", wrong.replace("http", "danube"), "-m", "x")
        assert done.returncode == Exit.USAGE and "that is a gRPC port" in done.stderr and "6651" in done.stderr


def test_a_topic_that_does_not_exist_is_not_found(broker: TestBroker) -> None:
    for way in (NATIVE, GRPC):
        done = consume(url(broker, way), "/default/nowhere", "-m", "x")
        assert done.returncode == Exit.NOT_FOUND and "there is no topic /default/nowhere" in done.stderr


# --- until it is caught up ------------------------------------------------------------------------------


def test_once_ends_when_nothing_waits_and_goes_on_there_the_next_time(broker: TestBroker, topic: str) -> None:
    assert produce(broker.url, topic, "-m", "a", "-c", 3).returncode == 0
    first = consume(broker.url, topic, "-m", "s", "--start", "earliest", "--once")
    assert first.returncode == 0 and payloads(first) == ["a", "a", "a"]
    assert payloads(consume(broker.url, topic, "-m", "s", "--once")) == []
    assert produce(broker.url, topic, "-m", "b").returncode == 0
    assert payloads(consume(broker.url, topic, "-m", "s", "--once")) == ["b"]


def test_once_ends_though_somebody_goes_on_sending_and_in_every_partition(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str
) -> None:
    client.create_topic(topic, partitions=3)
    stopping = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        with client.producer(topic) as producer:
            while not stopping.is_set():
                producer.send(b"%d" % sent)
                sent += 1
                stopping.wait(0.02)

    with client.producer(topic) as producer:
        for _ in range(30):
            producer.send(b"before")
    sender = threading.Thread(target=send)
    sender.start()
    try:
        for words in ((), ("--no-ack",)):
            done = consume(broker.url, topic, "-m", f"s{len(words)}", "--start", "earliest", "--once", *words)
            assert done.returncode == 0 and payloads(done).count("before") == 30
    finally:
        stopping.set()
        sender.join()
    assert sent > 10


def test_once_counts_what_it_was_told_to_keep_as_seen(broker: TestBroker, topic: str) -> None:
    assert produce(broker.url, topic, "-m", "a", "-c", 2).returncode == 0
    for _ in range(2):
        looked = consume(broker.url, topic, "-m", "s", "--start", "earliest", "--once", "--no-ack")
        assert looked.returncode == 0 and payloads(looked) == ["a", "a"]


def test_once_says_why_it_waits_and_a_timeout_ends_it_incomplete(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str
) -> None:
    assert produce(broker.url, topic, "-m", "a").returncode == 0
    with client.consumer(topic, subscription="s", type="shared", start="earliest") as other:
        held = other.receive(timeout=30)
        waited = consume(broker.url, topic, "-m", "s", "--once", "--timeout", 0.5)
        assert waited.returncode == Exit.NOT_GOOD and "not caught up yet: " in waited.stderr
        held.ack()
        other.flush()
    assert consume(broker.url, topic, "-m", "s", "--once").returncode == 0


def test_once_says_that_a_new_subscription_begins_behind_what_is_there(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str
) -> None:
    client.create_topic(topic, partitions=2)
    assert produce(broker.url, topic, "-m", "a", "-c", 3).returncode == 0
    new = consume(broker.url, topic, "-m", "s", "--once")
    assert new.returncode == 0 and payloads(new) == []
    assert "s is new and begins behind the 3 messages that are there; with --start earliest" in new.stderr
    for words in (("s",), ("t", "--start", "earliest")):
        assert "is new" not in consume(broker.url, topic, "-m", *words, "--once").stderr


def test_once_says_why_it_waits_only_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching_up, "QUIET_SECONDS", 1e-9)
    notes: list[str] = []
    waiting = [3, 3, 2, 1, 1, 0]

    async def progress() -> dict[str, PartitionProgress]:
        left = waiting.pop(0)
        return {"/a/b": PartitionProgress(2 - left, 3, left, "somebody holds it")}

    async def receive(seconds: float) -> int | None:
        return left if (left := waiting[0]) > 1 else None

    async def main() -> None:
        options = ConsumeOptions(topic=TopicName("/a/b"), consumer="c", subscription="s", once=True)
        catch_up = catching_up.CatchingUp(options, notes.append, progress)
        await catch_up.begin()
        assert await catch_up.next(receive) == 2 and notes == [], "messages come"
        assert await catch_up.next(receive) is None and catch_up.is_over

    asyncio.run(main())
    assert notes == ["not caught up yet: somebody holds it"]


def test_once_is_refused_where_nobody_could_tell(broker: TestBroker, topic: str) -> None:
    assert produce(broker.url, topic, "--non-reliable", "-m", "x").returncode == 0
    fast = consume(broker.url, topic, "-m", "s", "--once")
    assert fast.returncode == Exit.USAGE and "keeps no messages" in fast.stderr
    grpc = consume(broker.grpc_url, topic, "-m", "s", "--once")
    assert grpc.returncode == Exit.USAGE and "keeps no messages" in grpc.stderr


def test_once_ends_through_grpc_as_well_in_every_partition(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str
) -> None:
    client.create_topic(topic, partitions=2)
    with client.producer(topic) as producer:
        for _ in range(6):
            producer.send(b"a")
    kept = consume(broker.grpc_url, topic, "-m", "k", "--start", "earliest", "--once", "--no-ack")
    assert kept.returncode == 0 and payloads(kept) == ["a"] * 6
    first = consume(broker.grpc_url, topic, "-m", "s", "--start", "earliest", "--once")
    assert first.returncode == 0 and payloads(first) == ["a"] * 6
    again = consume(broker.grpc_url, topic, "-m", "s", "--once")
    assert again.returncode == 0 and payloads(again) == []
    with client.consumer(topic, subscription="h", type="shared", start="earliest") as other:
        held = [other.receive(timeout=30) for _ in range(6)]
        waited = consume(broker.grpc_url, topic, "-m", "h", "--once", "--timeout", 0.5)
        assert waited.returncode == Exit.NOT_GOOD and "not caught up yet: " in waited.stderr
        assert len(held) == 6


# --- several consumers ----------------------------------------------------------------------------------


def test_two_consumers_of_a_subscription_have_names_of_their_own(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes: list[ConsumeOptions] = []

    async def wished(_: object, __: str, wish: ConsumeOptions, ___: object) -> bool:
        wishes.append(wish)
        return True

    monkeypatch.setattr(data, "_consume", wished)
    for _ in range(2):
        words = ("-m", "s", "--start", "earliest", "-c", 1, "--timeout", 30)
        assert consume(broker.url, topic, *words).returncode == 0
    assert wishes[0].consumer != wishes[1].consumer and wishes[0].sub_type == "shared"
    client.create_topic(topic)
    with client.producer(topic) as producer:
        producer.send(b"1")
        producer.send(b"2")
    shown: list[Received] = []

    async def both() -> list[bool]:
        return await asyncio.gather(
            *(native.consume(broker.url, each, shown.append, lambda _: None) for each in wishes)
        )

    assert asyncio.run(both()) == [True, True]
    assert sorted(each.payload for each in shown) == [b"1", b"2"]


# --- types ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((name, name) for name in TYPE_NAMES),
        *(
            ("key-shared", "key_shared"),
            ("fail-over", "failover"),
            ("KeyShared", "key_shared"),
            ("Exclusive", "exclusive"),
        ),
        *(("", None), ("sharde", None)),
    ],
)
def test_a_type_of_subscriptions_has_one_name_and_the_other_spellings_are_understood(
    text: str, name: str | None
) -> None:
    assert type_name(text) == name


def test_command_and_client_make_the_same_kind_unless_told_otherwise() -> None:
    [made] = [each for words, each in commands() if words == "danube consume"]
    [option] = [each for each in made.params if each.name == "sub_type"]
    assert option.default == inspect.signature(pydanube.Client.consumer).parameters["type"].default == "shared"
    assert inspect.signature(pydanube.Client.producer).parameters["reliable"].default is True


def test_command_and_client_take_the_same_names(
    broker: TestBroker, client: pydanube.blocking.Client, topic: str
) -> None:
    client.create_topic(TopicName(topic))
    for spelling in ("key-shared", "key_shared", "fail-over", "failover"):
        assert consume(broker.url, topic, "-m", f"c-{spelling}", "--sub-type", spelling, "--once").returncode == 0
        with client.consumer(topic, subscription=f"p-{spelling}", type=spelling):
            pass
    wrong = consume(broker.url, topic, "-m", "s", "--sub-type", "sharde")
    assert wrong.returncode == Exit.USAGE and "key_shared" in wrong.stderr
    with pytest.raises(pydanube.errors.ConfigError, match="key_shared"):
        client.consumer(topic, subscription="s", type="sharde")  # type: ignore[arg-type]
