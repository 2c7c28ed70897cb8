"""Searching messages: what is found, and that every look is bounded and goes on where it stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

import pydanube
import pydanube.testing
from pydanube.client.client import Client
from pydanube.client.search import Query, SearchResult, search
from pydanube.client.thread import LoopThread
from pydanube.errors import ConfigError, TopicUnknown

TOPIC = "/default/orders"


@asynccontextmanager
async def _filled() -> AsyncIterator[Client]:
    async with pydanube.testing.broker(memory=True) as broker, pydanube.connect(broker.url) as client:
        async with client.producer(TOPIC, name="shop") as orders:
            for number in range(100):
                await orders.send(
                    b'{"order": %d, "city": "%s"}' % (number, b"Ulm" if number % 2 else "Köln".encode()),
                    key=f"c-{number % 10}",
                    attributes={"kind": "refund", "by": f"{number}"} if number % 25 == 0 else {},
                )
            await orders.send(bytes(range(256)))
        yield client


@pytest.fixture(scope="module")
def looked() -> Iterator[object]:
    thread = LoopThread("search under test")
    around = _filled()
    client = thread.call(around.__aenter__())

    def look(query: Query, topic: str = TOPIC, **bounds: int) -> SearchResult:
        return thread.call(search(client, topic, query, **bounds))

    try:
        yield look
    finally:
        thread.call(around.__aexit__(None, None, None))
        thread.stop()


def offsets(found: SearchResult) -> list[int]:
    return [message.offset for message in found.messages]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(key="c-3"), [3 + 10 * each for each in range(10)]),
        (Query(key="c"), []),
        (Query(text='"ORDER": 42,'), [42]),
        (Query(text="köln", key="c-8"), [8 + 10 * each for each in range(10)]),
        (Query(text="\x01\x02"), [100]),
        (Query(text="c.ty"), []),  # no pattern, a text
        (Query(attribute="kind"), [0, 25, 50, 75]),
        (Query(attribute="by", value="50"), [50]),
        (Query(attribute="kind", value="refund", key="c-5"), [25, 75]),
        (Query(attribute="nothing"), []),
        (Query(until=datetime(2020, 1, 1, tzinfo=UTC)), []),
        (Query(since=datetime.now(UTC) + timedelta(days=1)), []),
    ],
)
def test_messages_are_found_by_key_text_attribute_and_time(looked, query: Query, expected: list[int]) -> None:  # type: ignore[no-untyped-def]
    found = looked(query)
    assert offsets(found) == expected and found.next_offset is None


def test_a_found_message_is_whole(looked) -> None:  # type: ignore[no-untyped-def]
    [message] = looked(Query(attribute="by", value="25")).messages
    assert message.payload == b'{"order": 25, "city": "Ulm"}' and message.routing_key == "c-5"
    assert message.attributes == {"kind": "refund", "by": "25"}
    assert message.producer_name == "shop"
    now = datetime.now(UTC).timestamp() * 1_000_000
    assert 0 <= now - message.append_time_us < 600_000_000 and 0 <= now - message.publish_time_us < 600_000_000


@pytest.mark.parametrize("bounds", [{"found_max": 3}, {"messages_max": 7}, {"bytes_max": 1}, {"messages_max": 1}])
def test_a_look_is_bounded_and_the_next_one_misses_nothing_and_repeats_nothing(looked, bounds) -> None:  # type: ignore[no-untyped-def]
    query = Query(text="ulm")
    seen: list[int] = []
    first, looks = 0, 0
    while True:
        found = looked(query, first=first, **bounds)
        assert found.looked_at <= bounds.get("messages_max", 1_000)
        assert len(found.messages) <= bounds.get("found_max", 100)
        seen += offsets(found)
        looks += 1
        if found.next_offset is None:
            break
        assert found.next_offset > first
        first = found.next_offset
    assert seen == [number for number in range(100) if number % 2] and looks > 1
    assert found.end == 101


def test_a_range_may_be_named(looked) -> None:  # type: ignore[no-untyped-def]
    found = looked(Query(), first=10, end=13)
    assert offsets(found) == [10, 11, 12] and found.next_offset is None and (found.first, found.end) == (10, 13)
    assert offsets(looked(Query(), first=4_000)) == []


def test_what_does_not_exist_and_what_makes_no_sense_is_refused(looked) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TopicUnknown):
        looked(Query(), "/default/nothing")
    with pytest.raises(ConfigError, match="together with the attribute"):
        Query(value="x")
    with pytest.raises(ConfigError, match="zone"):
        Query(since=datetime(2026, 1, 1))
