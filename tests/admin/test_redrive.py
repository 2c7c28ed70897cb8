"""Dead letters go back where they came from, each once, wherever a run was interrupted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import Any

import pytest

import pydanube
from pydanube.admin.ledger import RedriveInterrupted, RedriveUncertain, ledger_name
from pydanube.admin.letters import Selection
from pydanube.admin.redrive import CHUNK_MESSAGES, discard, redrive
from pydanube.admin.survey import survey
from pydanube.core.dispatch.delivery import Tries, dead_letter_attributes
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError
from pydanube.testing.brokers import TestBroker
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

ORDERS = "/default/orders"
CLICKS = "/default/clicks"
DEAD = "/default/dead"


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def outside(*given: Any, **named: Any) -> None:
        run(test(*given, **named))

    return outside


class Died(Exception):
    """The process ended here."""


URL: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _broker() -> Iterator[None]:
    with TestBroker(memory=True) as broker:
        URL.append(broker.url)
        yield


@asynccontextmanager
async def running() -> AsyncIterator[pydanube.Client]:
    """Three empty topics, on the broker that all these tests share."""
    async with pydanube.connect(URL[0]) as client:
        for topic in (ORDERS, CLICKS, DEAD):
            await client.create_topic(topic)
        try:
            yield client
        finally:
            for topic in {TopicName(topic).base for topic in await client.list_topics()}:
                await client.delete_topic(topic)


async def die(client: pydanube.Client, count: int = 1, **given: str) -> None:
    """Puts dead letters where a broker would have put them, as it would have."""
    topic = given.get("topic", ORDERS)
    async with client.producer(DEAD) as dead:
        head = (await client.describe_topic(DEAD)).head
        attributes = dead_letter_attributes(
            {"v": given["v"]} if "v" in given else {},
            topic=topic,
            subscription=given.get("subscription", "billing"),
            offset=7,
            producer_id=1,
            broker_addr="http://127.0.0.1:6650",
            tries=Tries(3, 3, given.get("reason", "")),
        )
        for number in range(count):
            await dead.send(b"%d" % (head + number), key=given.get("key"), attributes=attributes)


async def payloads(client: pydanube.Client, topic: str) -> list[bytes]:
    return (await client.fetch(topic).table()).column("payload").to_pylist()


def dies_at(wanted: str, occurrence: int = 1) -> Callable[[str], None]:
    seen: Counter[str] = Counter()

    def step(name: str) -> None:
        seen[name] += 1
        if name == wanted and seen[name] == occurrence:
            raise Died(name)

    return step


@in_loop
async def test_dead_letters_go_back_to_the_topics_they_came_from() -> None:
    async with running() as client:
        await die(client, 2, topic=ORDERS)
        await die(client, 1, topic=CLICKS)
        outcome = await redrive(client, DEAD)
        assert (outcome.looked_at, outcome.selected, outcome.sent) == (3, 3, 3)
        assert outcome.by_target == {ORDERS: 2, CLICKS: 1}
        assert await payloads(client, ORDERS) == [b"0", b"1"]
        assert await payloads(client, CLICKS) == [b"2"]


@in_loop
async def test_a_redriven_message_is_the_message_and_says_that_it_was_redriven() -> None:
    async with running() as client:
        await die(client, key="user-7", v="1", reason="no such user")
        [before] = (await client.fetch(DEAD).table()).to_pylist()
        await redrive(client, DEAD)
        [after] = (await client.fetch(ORDERS).table()).to_pylist()
        same = ("payload", "routing_key", "publish_time", "schema_id", "schema_version")
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
        attributes = dict(after["attributes"])
        assert attributes["v"] == "1"
        assert attributes["x-original-topic-offset"] == "7"
        assert attributes["x-redrive-topic"] == DEAD
        assert attributes["x-redrive-offset"] == "0"
        assert "x-failure-reason" not in attributes


@in_loop
async def test_a_dry_run_sends_nothing_and_writes_nothing() -> None:
    async with running() as client:
        await die(client, 3, reason="Timeout")
        outcome = await redrive(client, DEAD, dry_run=True)
        assert (outcome.selected, outcome.sent) == (3, 0)
        assert outcome.by_reason == {"Timeout": 3}
        assert [letter.offset for letter in outcome.samples] == [0, 1, 2]
        assert await client.list_topics() == [CLICKS, DEAD, ORDERS]
        assert await payloads(client, ORDERS) == []


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(topic=ORDERS), [b"0", b"2", b"3"]),
        (Selection(subscription="audit"), [b"2"]),
        (Selection(reason="TIMED"), [b"0", b"3"]),
        (Selection(first=1, end=3), [b"1", b"2"]),
        (Selection(key="a"), [b"3"]),
        (Selection(attributes={"v": "2"}), [b"3"]),
        (Selection(since=datetime.now(UTC) + timedelta(days=1)), []),
        (Selection(since=datetime.now(UTC) - timedelta(days=1)), [b"0", b"1", b"2", b"3"]),
        (Selection(until=datetime.now(UTC) - timedelta(days=1)), []),
        (Selection(topic=ORDERS, reason="timed", key="a"), [b"3"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else str(value)[:40],
)
@in_loop
async def test_a_selection_takes_what_passes_all_of_it(selection: Selection, expected: list[bytes]) -> None:
    async with running() as client:
        await die(client, topic=ORDERS, reason="timed out")
        await die(client, topic=CLICKS)
        await die(client, topic=ORDERS, subscription="audit")
        await die(client, topic=ORDERS, reason="timed out", key="a", v="2")
        outcome = await redrive(client, DEAD, selection, to=CLICKS)
        assert await payloads(client, CLICKS) == expected
        # What is below and above the offsets asked for is not even looked at.
        assert outcome.looked_at == outcome.sent + outcome.left_out


@in_loop
async def test_what_a_selection_left_out_is_there_for_the_next_one() -> None:
    async with running() as client:
        await die(client, 2, reason="a")
        await die(client, 2, reason="b")
        await die(client, 2, reason="a")
        await redrive(client, DEAD, Selection(reason="b"))
        everything = await redrive(client, DEAD)
        assert (everything.sent, everything.sent_before) == (4, 2)
        assert sorted(await payloads(client, ORDERS)) == [b"0", b"1", b"2", b"3", b"4", b"5"]


@in_loop
async def test_a_second_run_sends_nothing_again() -> None:
    async with running() as client:
        await die(client, 5)
        await redrive(client, DEAD)
        again = await redrive(client, DEAD)
        assert (again.sent, again.sent_before) == (0, 5)
        await die(client, 1)
        assert (await redrive(client, DEAD)).sent == 1
        assert len(await payloads(client, ORDERS)) == 6


@pytest.mark.parametrize("occurrence", [1, 2])
@pytest.mark.parametrize("step", ["write send", "send", "write sent"])
@in_loop
async def test_a_run_that_died_anywhere_is_finished_by_the_next_and_nothing_is_sent_twice(
    step: str, occurrence: int
) -> None:
    count = CHUNK_MESSAGES + 10
    async with running() as client:
        await die_many(client, count)
        with pytest.raises(Died):
            await redrive(client, DEAD, step=dies_at(step, occurrence))
        stored = len(await payloads(client, ORDERS))
        would = await redrive(client, DEAD, dry_run=True)
        assert would.selected == count - stored
        rest = await redrive(client, DEAD)
        assert rest.sent == count - stored
        assert Counter(await payloads(client, ORDERS)) == Counter(b"%d" % number for number in range(count))


async def die_many(client: pydanube.Client, count: int) -> None:
    async with client.producer(DEAD) as dead:
        for number in range(count):
            await dead.room()
            dead.send_nowait(b"%d" % number, attributes={"x-original-topic": ORDERS})


@in_loop
async def test_a_cancelled_run_leaves_nothing_half_done() -> None:
    count = 3 * CHUNK_MESSAGES
    async with running() as client:
        await die_many(client, count)
        halfway = asyncio.Event()
        run = asyncio.create_task(redrive(client, DEAD, progress=lambda _: halfway.set()))
        await halfway.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await redrive(client, DEAD)
        assert Counter(await payloads(client, ORDERS)) == Counter(b"%d" % number for number in range(count))


@in_loop
async def test_while_a_run_has_the_ledger_another_is_refused() -> None:
    async with running() as client:
        await die(client, 2)
        async with client.producer(ledger_name(DEAD), name="redrive-of-somebody", exclusive=True):
            with pytest.raises(RedriveInterrupted, match="another redrive of it is running"):
                await redrive(client, DEAD)
            assert await payloads(client, ORDERS) == []
            assert (await redrive(client, DEAD, dry_run=True)).selected == 2  # looking is allowed
        assert (await redrive(client, DEAD)).sent == 2


@in_loop
async def test_what_another_run_wrote_down_is_not_sent_again() -> None:
    async with running() as client:
        await die(client, 3)
        async with client.producer(ledger_name(DEAD)) as other:
            await other.send(json.dumps({"sent": 99, "offsets": [[0, 2]]}).encode())
        outcome = await redrive(client, DEAD)
        assert (outcome.sent, outcome.sent_before) == (1, 2)


@in_loop
async def test_a_ledger_with_something_else_in_it_stops_everything() -> None:
    async with running() as client:
        await die(client, 1)
        async with client.producer(ledger_name(DEAD)) as other:
            await other.send(b"hello")
        with pytest.raises(RedriveUncertain, match="offset 0 of /default/dead-redriven is no record of a redrive"):
            await redrive(client, DEAD)
        assert await payloads(client, ORDERS) == []


@in_loop
async def test_a_topic_that_is_gone_fails_alone() -> None:
    async with running() as client:
        await die(client, topic=ORDERS)
        await die(client, topic="/default/gone")
        await die(client, topic=ORDERS)
        outcome = await redrive(client, DEAD)
        assert outcome.sent == 2
        assert list(outcome.failures) == ["/default/gone"]
        await client.create_topic("/default/gone")
        assert (await redrive(client, DEAD)).sent == 1


@in_loop
async def test_what_has_no_origin_needs_to() -> None:
    async with running() as client:
        async with client.producer(DEAD) as dead:
            await dead.send(b"who am I")
            await dead.send(b"nor I", attributes={"x-original-topic": "not a topic"})
        outcome = await redrive(client, DEAD)
        assert (outcome.homeless, outcome.sent) == (2, 0)
        assert (await redrive(client, DEAD, to=CLICKS)).sent == 2


@in_loop
async def test_a_partitioned_target_gets_a_key_into_one_partition() -> None:
    async with running() as client:
        await client.create_topic("/default/many", partitions=3)
        await die(client, 4, key="a")
        await die(client, 6)
        outcome = await redrive(client, DEAD, to="/default/many")
        assert outcome.sent == 10
        keyed = [
            dict(
                enumerate((await client.fetch(f"/default/many-part-{part}").table()).column("routing_key").to_pylist())
            )
            for part in range(3)
        ]
        assert sum("a" in rows.values() for rows in keyed) == 1


@in_loop
async def test_dead_letters_do_not_go_round_in_circles() -> None:
    async with running() as client:
        with pytest.raises(ConfigError, match="another topic than the dead letters'"):
            await redrive(client, DEAD, to=DEAD)


@in_loop
async def test_a_dead_letter_topic_that_was_made_anew_is_another_one() -> None:
    async with running() as client:
        await die(client, 3)
        await redrive(client, DEAD)
        await client.delete_topic(DEAD)
        await client.create_topic(DEAD)
        await die(client, 3, v="new")
        assert (await redrive(client, DEAD, dry_run=True)).selected == 3
        assert (await redrive(client, DEAD)).sent == 3
        assert (await redrive(client, DEAD)).sent == 0


@in_loop
async def test_a_limit_is_kept() -> None:
    async with running() as client:
        await die(client, 5)
        assert (await redrive(client, DEAD, limit=2)).sent == 2
        assert (await redrive(client, DEAD, limit=2)).sent == 2
        assert (await redrive(client, DEAD)).sent == 1


# --- discarding ------------------------------------------------------------------------------------------


@in_loop
async def test_what_was_discarded_is_never_sent_and_never_counted_again() -> None:
    async with running() as client:
        await die(client, 4)
        assert await discard(client, DEAD, Selection(first=1, end=3)) == 2
        assert await discard(client, DEAD, Selection(first=2)) == 1
        found = await survey(client, DEAD)
        assert [group.count for group in found.groups] == [1] and found.done.count == found.discarded.count == 3
        outcome = await redrive(client, DEAD)
        assert (outcome.sent, outcome.sent_before) == (1, 3)
        assert await discard(client, DEAD, Selection()) == 0
        assert (await client.describe_topic(ORDERS)).head == 1
        assert (await client.describe_topic(DEAD)).head == 4  # a log loses nothing from its middle


@in_loop
async def test_a_version_that_knows_no_discarding_reads_it_as_sent() -> None:
    async with running() as client:
        await die(client, 2)
        await discard(client, DEAD, Selection(first=0, end=1))
        [record] = [json.loads(each) for each in (await client.fetch(ledger_name(DEAD)).table())["payload"].to_pylist()]
        assert record["sent"] == 0 and record["offsets"] == [[0, 1]]


@in_loop
async def test_another_topic_of_the_same_name_has_nothing_discarded() -> None:
    async with running() as client:
        await die(client, 3)
        await discard(client, DEAD, Selection())
        await client.delete_topic(DEAD)
        await client.create_topic(DEAD)
        await die(client, 3, v="other")
        assert sum(group.count for group in (await survey(client, DEAD)).groups) == 3
        assert (await redrive(client, DEAD)).sent == 3
