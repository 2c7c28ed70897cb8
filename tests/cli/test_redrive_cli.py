"""`danube admin topics redrive`: what an operator types, what is printed, and a run that is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import pydanube
from pydanube.admin.ledger import ledger_name
from pydanube.admin.letters import Selection
from pydanube.admin.redrive import CHUNK_MESSAGES
from pydanube.cli.exits import Exit
from pydanube.cli.redrive import _redrive
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ORDERS = "/default/orders"
DEAD = "/default/orders-dlq"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Iterator[pydanube.blocking.Client]:
    with pydanube.blocking.connect(broker.url) as found:
        yield found
        for topic in found.list_topics():
            found.delete_topic(topic)


def admin(broker: TestBroker, *words: object) -> str:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def redrive(broker: TestBroker, *words: object) -> str:
    return admin(broker, "topics", "redrive", DEAD, "--service-addr", broker.url, *words)


def payloads(client: pydanube.blocking.Client, topic: str) -> list[bytes]:
    found: list[bytes] = client.fetch(topic).table().column("payload").to_pylist()
    return found


def fail_orders(broker: TestBroker, client: pydanube.blocking.Client, count: int) -> None:
    """Orders that a consumer gives up, until the broker does."""
    client.create_topic(ORDERS)
    with client.consumer(ORDERS, subscription="billing", start="earliest") as consumer:
        policy = ("--max-redelivery-count", 0, "--poison-policy", "dead_letter", "--dead-letter-topic", DEAD)
        admin(broker, "subscriptions", "set-failure-policy", ORDERS, "billing", *policy)
        with client.producer(ORDERS) as orders:
            for number in range(count):
                orders.send(b"order %d" % number, key=f"user-{number % 2}", attributes={"v": "1"})
        for number in range(count):
            consumer.receive(timeout=30).nack(reason="no such user" if number % 2 else "Timeout after 30 s")
        until(lambda: DEAD in client.list_topics() and client.describe_topic(DEAD).head == count, "all are dead")


def test_what_consumers_gave_up_is_looked_at_and_sent_again(
    broker: TestBroker, client: pydanube.blocking.Client
) -> None:
    fail_orders(broker, client, 4)
    lines = redrive(broker, "--dry-run", "--reason", "timeout").splitlines()
    assert lines[0].split() == ["offset", "given_up", "from", "subscription", "reason", "key", "payload"]
    assert [word for line in lines[1:3] for word in line.split() if word.startswith("user-")] == ["user-0", "user-0"]
    assert lines[4:] == [
        "To: /default/orders: 2 messages",
        "Reason: Timeout after 30 s: 2 messages",
        "4 dead letters looked at, 2 left out, 0 sent by earlier runs",
        "Would Redrive: 2",
    ]
    assert redrive(broker, "--reason", "timeout").splitlines()[-1] == "Redriven: 2"
    done: dict[str, Any] = json.loads(redrive(broker, "--output", "json"))
    assert (done["success"], done["sent"], done["sent_before"], done["left_out"]) == (True, 2, 2, 0)
    assert done["by_target"] == {ORDERS: 2}
    assert done["samples"][0]["original_topic"] == ORDERS
    assert done["samples"][0]["subscription"] == "billing"
    assert Counter(payloads(client, ORDERS)) == Counter({b"order %d" % number: 2 for number in range(4)})
    assert noted(broker, 2) == [f"RedriveLetters topic={DEAD} count=2"] * 2  # the dry run was none


def noted(broker: TestBroker, count: int) -> list[str]:
    """The redrives among the events, newest first, as soon as there are so many."""

    def found() -> list[str]:
        events = json.loads(admin(broker, "events", "--output", "json"))
        return [each["sentence"] for each in events if each["sentence"].startswith("RedriveLetters ")]

    until(lambda: len(found()) >= count, "the order is noted")
    return found()


def test_what_a_run_sent_before_it_was_stopped_is_an_event_too(
    broker: TestBroker, client: pydanube.blocking.Client
) -> None:
    to, before = "/default/elsewhere", len(noted(broker, 0))
    client.create_topic(to)
    with client.producer(DEAD) as dead:
        for number in range(4 * CHUNK_MESSAGES):
            dead.room()
            dead.send_nowait(b"%d" % number)

    async def stopped() -> None:
        running = asyncio.create_task(_redrive(broker.url, DEAD, Selection(), to, dry_run=False, limit=None))
        async with pydanube.connect(broker.url) as other:
            while (await other.describe_topic(to)).head <= CHUNK_MESSAGES:
                assert not running.done()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(stopped())
    newest = noted(broker, before + 1)[0]
    assert newest.startswith(f"RedriveLetters topic={DEAD} to_topic={to} count=")
    assert CHUNK_MESSAGES <= int(newest.rpartition("=")[2]) <= len(payloads(client, to))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--offsets", "1-2"), [1, 2]),
        (("--offsets", "3-"), [3]),
        (("--offsets", "-1"), [0, 1]),
        (("--offsets", "2"), [2]),
        (("--since", "1h"), [0, 1, 2, 3]),
        (("--until", "1h"), []),
        (("--since", "2000-01-01T00:00:00Z", "--until", "2001-01-01"), []),
        (("--key", "user-1"), [1, 3]),
        (("--attribute", "v=1", "-a", "n=2"), [2]),
        (("--from-topic", "/default/other"), []),
        (("--subscription", "billing", "--limit", 3), [0, 1, 2]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_options_choose(
    broker: TestBroker, client: pydanube.blocking.Client, words: tuple[object, ...], expected: list[int]
) -> None:
    origin = {"x-original-topic": ORDERS, "x-original-subscription": "billing"}
    with client.producer(DEAD) as dead:
        for number in range(4):
            dead.send(b"", key=f"user-{number % 2}", attributes={**origin, "v": "1", "n": str(number)})
    found = json.loads(redrive(broker, "--dry-run", "--output", "json", *words))
    assert [each["offset"] for each in found["samples"]] == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--offsets", "9-1"), "--offsets"),
        (("--offsets", "x"), "--offsets"),
        (("--since", "yesterday"), "--since"),
        (("--attribute", "novalue"), "--attribute"),
    ],
)
def test_mistakes_are_one_sentence(broker: TestBroker, words: tuple[str, ...], said: str) -> None:
    done = danube_here("admin", "topics", "redrive", DEAD, "--service-addr", broker.url, *words)
    assert done.returncode == Exit.USAGE
    [line] = done.stderr.splitlines()
    assert line.startswith(f"danube: {said}")


def test_a_topic_that_takes_nothing_is_named_and_the_exit_code_says_so(
    broker: TestBroker, client: pydanube.blocking.Client
) -> None:
    with client.producer(DEAD) as dead:
        dead.send(b"1", attributes={"x-original-topic": "/default/gone"})
        dead.send(b"2")
    done = danube_here("admin", "topics", "redrive", DEAD, "--service-addr", broker.url)
    assert done.returncode == Exit.REFUSED
    lines = done.stdout.splitlines()
    assert lines[0].startswith("To: /default/gone: 1 message, REFUSED: ")
    assert "Not sent: 1 do not say where they came from: --to sends them somewhere" in lines
    assert lines[-1] == "Redriven: 0"


def test_a_run_that_is_killed_is_finished_by_the_next_one(broker: TestBroker, client: pydanube.blocking.Client) -> None:
    count = 8 * CHUNK_MESSAGES
    client.create_topic(ORDERS)
    with client.producer(DEAD) as dead:
        for number in range(count):
            dead.room()
            dead.send_nowait(b"%d" % number, attributes={"x-original-topic": ORDERS})
    command = [sys.executable, "-m", "pydanube", "admin", "topics", "redrive", DEAD, "--service-addr", broker.url]
    for records in (1, 5):  # the second time a little further
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as killed:

            def is_there(wanted: int = records) -> bool:
                return (
                    ledger_name(DEAD) in client.list_topics()
                    and client.describe_topic(ledger_name(DEAD)).head >= wanted
                )

            until(is_there, "it sends")
            killed.send_signal(signal.SIGKILL)
    before = len(payloads(client, ORDERS))
    done = json.loads(redrive(broker, "--output", "json"))
    assert done["sent"] == count - before
    assert Counter(payloads(client, ORDERS)) == Counter(b"%d" % number for number in range(count))
