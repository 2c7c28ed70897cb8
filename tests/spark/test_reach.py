"""What the driver learns of topics: from a broker, and from the object store alone. No Spark is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from pydanube.errors import DeadlineExceeded, InvalidObject, ObjectDamaged, TopicUnknown, Unreachable
from pydanube.history import object_builder
from pydanube.spark.options import CONNECTION_OPTIONS, BrokerOptions, QueryOptions
from pydanube.spark.plan import TaskShare, TopicState, layout
from pydanube.spark.reach import Reach
from pydanube.spark.rows import Wanted, read_share
from tests.e2e.objectstores import S3Server
from tests.spark.places import Place, free_port, numbers, place_in


def reach(**options: str) -> Reach:
    return Reach(BrokerOptions.of(QueryOptions(options, CONNECTION_OPTIONS)))


def payloads(through: Reach, state: TopicState) -> list[bytes]:
    share = TaskShare(tuple(layout(state, state.first_offset, state.head).pieces))
    wanted = Wanted(("payload",), urls={state.topic: state.storage_url or ""})
    return [text for batch in read_share(through, share, wanted) for text in batch.column("payload").to_pylist()]


def test_a_broker_and_the_store_say_the_same_of_what_is_uploaded(place: Place) -> None:
    topic = place.new_topic("known")
    place.send(topic, numbers(0, 30))
    place.upload(topic)
    place.send(topic, numbers(30, 40))
    with reach(**{"service.url": place.url}) as online, reach(**{"storage.url": place.storage_url}) as offline:
        [live], [stored] = online.states([topic]), offline.states([topic])
        assert (live.head, stored.head) == (40, 30)
        assert live.objects == stored.objects
        assert (live.live, stored.live) == (True, False)
        assert payloads(online, live) == numbers(0, 40)
        assert payloads(offline, stored) == numbers(0, 30)
        with pytest.raises(TopicUnknown):
            online.states(["/default/nobody"])
        with pytest.raises(TopicUnknown):
            offline.states(["/default/nobody"])


def test_partitions_and_patterns_are_found_without_a_broker_too(place: Place) -> None:
    topic = place.new_topic("many", partitions=2)
    place.send(topic, numbers(0, 20))
    place.upload(topic)
    with reach(**{"service.url": place.url}) as online, reach(**{"storage.url": place.storage_url}) as offline:
        parts = [f"{topic}-part-0", f"{topic}-part-1"]
        for each in (online, offline):
            assert [state.topic for state in each.states([topic])] == parts
            assert [state.topic for state in each.states([], f"{topic}-part-1")] == parts[1:]


def test_times_become_offsets_with_and_without_a_broker(place: Place) -> None:
    topic = place.new_topic("timed")
    place.send(topic, numbers(0, 50))
    place.upload(topic)
    times = place.table(topic).column("publish_time").cast("int64").to_pylist()
    with reach(**{"service.url": place.url}) as online, reach(**{"storage.url": place.storage_url}) as offline:
        for each in (online, offline):
            [state] = each.states([topic])
            found = each.offset_at(state, times[20])
            assert times[found] >= times[20] and all(time < times[20] for time in times[:found])
            assert each.offset_at(state, times[-1] + 1) == 50


def test_a_time_may_lie_in_an_object_that_is_stored_raw(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> NoReturn:
        raise InvalidObject("batch", "Arrow refuses")

    topic = place.new_topic("raw")
    for first in (0, 10, 20):
        with monkeypatch.context() as patch:
            if first == 10:
                patch.setattr(object_builder, "encode_object", refuses)
            place.send(topic, numbers(first, first + 10))
            place.upload(topic)
    times = place.table(topic).column("publish_time").cast("int64").to_pylist()
    with reach(**{"storage.url": place.storage_url}) as offline:
        [state] = offline.states([topic])
        assert [each.format for each in state.objects] == ["parquet", "raw", "parquet"]
        assert offline.offset_at(state, times[9] + 1) == 10


def test_topics_of_which_nothing_is_uploaded_are_waited_for_while_no_broker_answers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pydanube.spark.reach.OFFLINE_SECONDS", 0.1)
    nobody = f"danube://127.0.0.1:{free_port()}"
    with reach(**{"service.url": nobody, "storage.url": place.storage_url}) as through:
        through.connection = replace(through.connection, timeout_seconds=0.2)
        for topics, pattern in ((["/default/only-with-a-broker"], None), ([], "/default/only-with-.*")):
            with pytest.raises((Unreachable, DeadlineExceeded)):
                through.states(topics, pattern)


def test_a_range_that_changes_its_place_while_it_is_read_comes_once_and_in_order(place: Place) -> None:
    topic = place.new_topic("moving")
    for first in range(0, 90, 10):
        place.send(topic, numbers(first, first + 10))
        place.upload(topic)
    place.send(topic, numbers(90, 100))
    with reach(**{"service.url": place.url}) as through:
        [state] = through.states([topic])
        share = TaskShare(tuple(layout(state, 0, 100).pieces))
        seen: list[bytes] = []
        for batch in read_share(through, share, Wanted(("payload",), urls={topic: place.storage_url})):
            seen += batch.column("payload").to_pylist()
            if len(seen) == 30:
                place.upload(topic, merge=True)  # the plan's objects are replaced by one, and then removed
                for path in place.objects(topic):
                    if not place.is_described(topic, path.name):
                        path.unlink()
        assert seen == numbers(0, 100)


def test_history_in_s3_is_read_from_there_with_the_keys_that_the_query_was_given(
    tmp_path: Path, s3_server: S3Server
) -> None:
    with place_in(tmp_path, s3_server.url(), s3_server.options) as far:
        topic = far.new_topic("remote")
        for first in (0, 20):
            far.send(topic, numbers(first, first + 20))
            far.upload(topic)
        far.send(topic, numbers(40, 50))
        options = {"storage.options": json.dumps(s3_server.options)}
        with reach(**{"service.url": far.url, **options}) as online:
            [state] = online.states([topic])
            assert len(state.objects) == 2
            assert payloads(online, state) == numbers(0, 50)
        with reach(**{"storage.url": far.storage_url, **options}) as offline:
            [state] = offline.states([topic])
            assert payloads(offline, state) == numbers(0, 40)
            some = TaskShare(tuple(layout(state, 15, 25).pieces))
            wanted = Wanted(("offset",), urls={topic: far.storage_url})
            found = [
                offset for batch in read_share(offline, some, wanted) for offset in batch.column("offset").to_pylist()
            ]
            assert found == list(range(15, 25))


def test_an_object_that_is_gone_is_an_error_and_not_a_hole(place: Place) -> None:
    topic = place.new_topic("gone")
    place.send(topic, numbers(0, 10))
    place.upload(topic)
    [path] = place.objects(topic)
    path.rename(path.with_name("elsewhere"))
    with reach(**{"service.url": place.url}) as through:
        [state] = through.states([topic])
        with pytest.raises(ObjectDamaged, match="it is missing"):
            payloads(through, state)
