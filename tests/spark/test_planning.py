"""What planning a trigger costs: requests to brokers, and limits in bytes that hold. No Spark is started."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from pydanube.api.native.requests import NativeRequests
from pydanube.spark.options import SourceOptions
from pydanube.spark.plan import Offsets
from pydanube.spark.source import DanubeReader, DanubeStreamReader
from pydanube.wire import frames
from tests.spark.places import Place, numbers

PARTITIONS = 200


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often brokers were asked for what."""
    counted: Counter[str] = Counter()
    take = NativeRequests.take

    def counting(self: NativeRequests, kind: str, *rest: Any) -> None:
        counted[kind] += 1
        take(self, kind, *rest)

    monkeypatch.setattr(NativeRequests, "take", counting)
    yield counted


def taken(asked: Counter[str]) -> dict[str, int]:
    found = dict(asked)
    asked.clear()
    return found


@pytest.fixture(scope="module")
def wide(place: Place) -> str:
    """A topic with many partitions and a few messages in each."""
    topic = place.new_topic("wide", partitions=PARTITIONS)
    place.send(topic, numbers(0, 2 * PARTITIONS))
    return topic


def stream(options: dict[str, str]) -> DanubeStreamReader:
    return DanubeStreamReader(SourceOptions.parse(options, streaming=True))


def test_each_phase_of_a_trigger_over_many_partitions_is_one_request(
    place: Place, wide: str, asked: Counter[str]
) -> None:
    reader = stream(place.options(wide, startingOffsets="earliest"))
    start = reader.initialOffset()
    assert taken(asked) == {"describe_storages": 1}
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert taken(asked) == {"describe_storages": 1}
    found = reader.partitions(start, end)
    assert taken(asked) == {"describe_storages": 1}
    reader.reportLatestOffset()
    assert taken(asked) == {"describe_storages": 1}
    offsets = Offsets.from_json(end)
    assert len(offsets.next) == len(offsets.marks) == PARTITIONS
    assert sum(part.share.rows for part in found) == 2 * PARTITIONS  # type: ignore[attr-defined]
    reader.stop()


def test_a_finished_query_over_many_partitions_is_planned_with_one_request(
    place: Place, wide: str, asked: Counter[str]
) -> None:
    reader = DanubeReader(SourceOptions.parse(place.options(wide), streaming=False))
    assert len(reader.partitions()) == PARTITIONS
    assert taken(asked) == {"describe_storages": 1}


def test_a_broker_that_does_not_know_the_question_is_asked_topic_by_topic(
    place: Place, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = place.new_topic("older", partitions=3)
    place.send(topic, numbers(0, 30))
    place.upload(topic)
    place.send(topic, numbers(30, 60))
    options = place.options(topic, startingOffsets="earliest")
    newer = stream(options)
    expected = newer.latestOffset(newer.initialOffset(), newer.getDefaultReadLimit())
    newer.stop()
    asked.clear()
    monkeypatch.setattr(frames, "ADDED", ())
    older = stream(options)
    found = older.latestOffset(older.initialOffset(), older.getDefaultReadLimit())
    older.stop()
    assert found == expected
    assert "describe_storages" not in asked and asked["describe_storage"] == 6


# --- limits in bytes ------------------------------------------------------------------------------------------


def test_a_limit_in_bytes_is_kept_where_only_the_broker_has_the_messages(place: Place) -> None:
    topic = place.new_topic("large")
    place.send(topic, [os.urandom(50_000) for _ in range(200)])
    reader = stream(place.options(topic, startingOffsets="earliest", maxBytesPerTrigger="1000000"))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert 15 <= Offsets.from_json(end).next[topic] <= 20
    reader.stop()


def test_a_limit_in_bytes_goes_by_the_messages_that_are_next_and_not_by_all_that_wait(place: Place) -> None:
    topic = place.new_topic("mixed")
    place.send(topic, [os.urandom(50_000) for _ in range(60)])
    place.send(topic, [b"small"] * 60_000)
    reader = stream(place.options(topic, startingOffsets="earliest", maxBytesPerTrigger="1000000"))
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert 10 <= Offsets.from_json(end).next[topic] <= 30
    reader.stop()
