"""Job *erase*, against a real broker: the bytes of a key go from objects, log and dead letters, nothing else does."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pydanube.broker.registrations import policy_put
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy
from pydanube.core.history.tiers import Descriptor
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.errors import ConfigError, Conflict, InvalidObject
from pydanube.formats.erasure import ERASED
from pydanube.pipeline import audit, erase
from pydanube.pipeline.erase import ObjectFinding
from pydanube.pipeline.report import QueryWatch
from pydanube.pipeline.settings import JobSettings
from pydanube.spark.options import CONNECTION_OPTIONS, BrokerOptions, QueryOptions
from pydanube.spark.plan import TopicState
from pydanube.spark.reach import Reach
from tests.spark.places import Place, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WHEN = "2026-11-18T08:00:00+00:00"


def quiet() -> QueryWatch:
    return QueryWatch("test", as_json=True, stream=io.StringIO())


def reaching(place: Place) -> Reach:
    return Reach(BrokerOptions.of(QueryOptions({"service.url": place.url}, CONNECTION_OPTIONS)))


def objects(place: Place, topic: str) -> list[Descriptor]:
    return list(place.asking(lambda client: client.describe_storage(topic)).objects)


def erased_by_hand(place: Place, topic: str, described: Descriptor, *keys: str) -> ObjectFinding:
    """What a task of the job makes of one object; the owner has not seen it."""
    with reaching(place) as reach:
        found: ObjectFinding = reach.call(erase.erase_in(reach, topic, place.storage_url, described, keys, WHEN))
        return found


def swap(place: Place, topic: str, old: str, new: Descriptor) -> None:
    place.asking(lambda client: client.swap_objects(topic, [old], new))


def bytes_on_disks(place: Place, topic: str, text: bytes) -> list[str]:
    """Described objects of the topic, and files of its log, that have the text."""
    described = {each.object_id for each in objects(place, topic)}
    stored = [path for path in place.objects(topic) if path.name in described]
    log = [path for path in (place.directory / "data" / "wal" / topic[1:]).rglob("*") if path.is_file()]
    return [path.name for path in [*stored, *log] if text in path.read_bytes()]


def with_dead_letters(place: Place, topic: str, letters: str) -> None:
    """A subscription that sends what it cannot handle to `letters`."""

    async def subscribe(client: Any) -> None:
        async with client.consumer(topic, subscription="workers", type="shared"):
            pass

    place.asking(subscribe)
    policy = FailurePolicy(max_redelivery_count=3, poison_policy=PoisonPolicy.DEAD_LETTER, dead_letter_topic=letters)
    put = policy_put(TopicName(topic), SubscriptionName("workers"), policy)

    async def write() -> None:
        await place.carried(topic).tier._metadata.transact([], [put])

    place.run(write())


def test_a_key_goes_from_objects_log_and_dead_letters_and_the_rest_is_proven(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    topic, letters = place.new_topic("people"), place.new_topic("people-dead")
    secret = [b"secret %d" % number for number in range(60)]
    for first in range(0, 40, 20):
        place.send(topic, secret[first : first + 20], keys=["ann", "bob", None, "eve"])
        place.upload(topic)
    place.send(topic, secret[40:], keys=["ann", "bob"])  # in the log alone
    place.send(letters, [b"secret letter"], keys=["ann"])
    with_dead_letters(place, topic, letters)
    before = place.table(topic).to_pylist()
    receipts = tmp_path / "receipts.json"
    receipts.write_text(
        "\n".join(
            json.dumps({"topic": topic, "offset": offset, "sha256": hashlib.sha256(row["payload"]).hexdigest()})
            for offset, row in enumerate(before)
        )
    )
    settings = {"service.url": place.url, "topic": topic, "key": ["ann"]}
    report = erase.run(spark, settings, quiet())
    assert report.problems == []
    told = {name: value for name, value in report.values.items() if name != "not_reached"}
    assert told.pop("old_objects_gone_in_seconds") >= 600, "and when the sweep comes next, seldom in this test"
    assert told == {
        "topics": 2, "objects": 4, "objects_rewritten": 4, "messages_erased": 21,
    }  # fmt: skip
    assert any("bucket" in each for each in report.values["not_reached"])
    after = place.table(topic).to_pylist()
    assert len(after) == 60
    for was, now in zip(before, after, strict=True):
        if was["routing_key"] == "ann":
            assert (now["payload"], now["routing_key"]) == (b"", None)
            assert [name for name, _ in now["attributes"]] == [ERASED]
            assert now["publish_time"] == was["publish_time"]
        else:
            assert now == was
    for name in (topic, letters):
        assert bytes_on_disks(place, name, b"ann") == []
        assert bytes_on_disks(place, name, secret[0]) == bytes_on_disks(place, name, b"secret letter") == []
    # What was acknowledged is there, or says that it was erased.
    audited = audit.run(spark, {"service.url": place.url, "topic": topic, "receipts": str(receipts)}, quiet())
    assert audited.problems == []
    assert (audited.values["receipts"], audited.values["erased"]) == (60, 20)
    # A consumer that comes later gets the offset with an empty payload that says why.
    place.send(topic, [b"after"], keys=["ann"])
    again = erase.run(spark, {**settings, "topic": letters}, quiet())
    assert (again.problems, again.values["messages_erased"]) == ([], 0)
    assert place.payloads(topic)[-1] == b"after"


def test_an_object_that_changed_in_between_is_erased_in_the_next_round(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = place.new_topic("merged")
    for first in range(0, 60, 10):
        place.send(topic, numbers(first, first + 10), keys=["ann", "bob"])
        place.upload(topic)
    place.carried(topic).tier.config = replace(place.carried(topic).tier.config, merge_count_min=3)
    really = erase._erased
    rounds: list[int] = []

    def with_a_merge(*args: Any) -> Iterator[ObjectFinding]:
        found = list(really(*args))
        if not rounds:
            place.upload(topic, merge=True)
        rounds.append(len(found))
        yield from found

    monkeypatch.setattr(erase, "_erased", with_a_merge)
    report = erase.run(spark, {"service.url": place.url, "topic": topic, "key": "ann"}, quiet())
    assert report.problems == []
    assert rounds == [6, 1]
    assert (report.values["objects_rewritten"], report.values["messages_erased"]) == (1, 30)
    assert place.payloads(topic) == [b"" if not number % 2 else b"%d" % number for number in range(60)]


def test_objects_that_were_merged_and_swept_meanwhile_are_looked_for_again_and_one_that_cannot_be_read_is_named(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = place.new_topic("swept")
    for first in range(0, 60, 10):
        place.send(topic, numbers(first, first + 10), keys=["ann", "bob"])
        place.upload(topic)
    place.carried(topic).tier.config = replace(place.carried(topic).tier.config, merge_count_min=3)
    really = erase._erased
    rounds: list[int] = []

    def behind_a_merge(*args: Any) -> Iterator[ObjectFinding]:
        if not rounds:
            place.upload(topic, merge=True)
            described = {each.object_id for each in objects(place, topic)}
            for path in place.objects(topic):
                if path.suffix == ".parquet" and path.name not in described:
                    path.unlink()
        rounds.append(len(args[2]))
        yield from really(*args)

    monkeypatch.setattr(erase, "_erased", behind_a_merge)
    report = erase.run(spark, {"service.url": place.url, "topic": topic, "key": "ann"}, quiet())
    assert report.problems == []
    assert rounds == [6, 1] and report.values["messages_erased"] == 30
    [left] = objects(place, topic)
    [path] = [each for each in place.objects(topic) if each.name == left.object_id]
    data = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(erase, "ROUNDS_MAX", 2)
    report = erase.run(spark, {"service.url": place.url, "topic": topic, "key": "bob"}, quiet())
    path.write_bytes(data)
    assert report.problems == [
        f"{topic}: {left.object_id}: it is not in the store, in the last of 2 rounds; run the job again"
    ]


def test_files_that_were_set_aside_are_a_problem_with_their_names(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("aside")
    place.send(topic, [b"1"], keys=["ann"])
    place.upload(topic)
    [epoch] = (place.directory / "data" / "wal" / topic[1:]).iterdir()
    aside = epoch / "00000000000000000000-482f99a317ad152e.wal.quarantined"
    aside.write_bytes(b"ann")
    report = erase.run(spark, {"service.url": place.url, "topic": topic, "key": "ann"}, quiet())
    [problem] = report.problems
    assert f"wal{topic}/{epoch.name}/{aside.name}; look at them, remove them and run the job again" in problem
    aside.unlink()
    assert erase.run(spark, {"service.url": place.url, "topic": topic, "key": "ann"}, quiet()).problems == []


def test_what_cannot_be_reached_is_a_problem(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("away")
    for first in (0, 10):
        place.send(topic, numbers(first, first + 10), keys=["ann"])
        place.upload(topic)
    place.asking(lambda client: client.flush_log(topic))
    place.orphan(topic, 0)
    report = erase.run(spark, {"service.url": place.url, "topic": topic, "key": "ann"}, quiet())
    [problem] = report.problems
    assert "offsets 0 to 9 are on the disk of a broker that is away" in problem
    assert report.values["messages_erased"] == 10


def test_the_owner_refuses_an_object_that_changes_anything_else(place: Place) -> None:
    topic = place.new_topic("refused")
    for keys in (["ann", "bob"], ["bob", "ann"]):
        place.send(topic, numbers(0, 10), keys=keys)
        place.upload(topic)
    place.asking(lambda client: client.flush_log(topic))  # else the log answers, which has the messages, too
    one, two = objects(place, topic)
    made = erased_by_hand(place, topic, one, "ann").made
    other = erased_by_hand(place, topic, two, "ann").made
    assert made is not None and other is not None
    data = (place.directory / "objects" / topic[1:] / other.object_id).read_bytes()
    forged = replace(made, object_id="data-0-9-1-77.parquet", size=len(data), footer_crc=other.footer_crc)
    (place.directory / "objects" / topic[1:] / forged.object_id).write_bytes(data)
    for old, new in (
        (one, forged),
        (one, replace(made, size=made.size + 1)),
        (one, replace(made, max_append_time=0)),  # retention by time would take it
        (one, other),
        (two, made),
    ):
        with pytest.raises((InvalidObject, Conflict)):
            swap(place, topic, old.object_id, new)
    assert objects(place, topic) == [one, two]
    swap(place, topic, one.object_id, made)
    assert [each.object_id for each in objects(place, topic)] == [made.object_id, two.object_id]
    with pytest.raises(Conflict):
        swap(place, topic, one.object_id, made)
    assert place.payloads(topic)[:4] == [b"", b"1", b"", b"3"]


def test_an_object_that_only_the_manifest_lists_is_replaced(place: Place) -> None:
    topic = place.new_topic("listed")
    for first in range(0, 30, 10):
        place.send(topic, numbers(first, first + 10), keys=["ann", "bob"])
        place.upload(topic)
    place.asking(lambda client: client.flush_log(topic))
    carried = place.carried(topic)
    config = carried.tier.config
    carried.tier.config = replace(config, descriptors_max=0, descriptors_moved=2)
    one, two, _ = objects(place, topic)
    assert place.run(carried.maintenance.move_to_manifest())
    carried.tier.config = config
    assert len(objects(place, topic)) == 1, "the others are in the manifest"
    made = erased_by_hand(place, topic, two, "ann").made
    assert made is not None
    before = place.asking(lambda client: client.describe_storage(topic)).manifest
    swap(place, topic, two.object_id, made)
    assert place.asking(lambda client: client.describe_storage(topic)).manifest != before
    with reaching(place) as reach:
        [state] = reach.states([topic])
        assert [each.object_id for each in state.objects][:2] == [one.object_id, made.object_id]
    # The next owner reads the same.
    place.run(carried.tier.load())
    assert [each.object_id for each in place.run(carried.tier.load_manifest())][:2] == [one.object_id, made.object_id]
    assert place.payloads(topic)[10:14] == [b"", b"11", b"", b"13"]


def test_the_keys_are_taken_exactly_as_they_are_given(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\ufeffann\r\nbob,17\n\na\u2028b\n".encode())

    def keys(**values: object) -> list[str]:
        return erase.keys_of(JobSettings(values, erase.KNOWN), values.get("key"))

    assert keys(key="eve,1", keys_file=str(file)) == sorted(["a\u2028b", "ann", "bob,17", "eve,1"])
    for values in ({}, {"keys_file": str(tmp_path / "absent")}, {"key": 17}, {"key": ["a", True]}, {"key": ""}):
        with pytest.raises(ConfigError):
            keys(**values)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError):
        keys(keys_file=str(file))


def test_what_no_object_has_was_not_looked_at() -> None:
    state = TopicState("/default/t", 5, 50, orphans=[(20, 30)], voids=[(5, 10)])
    assert erase.unseen(state, 40) == [(10, 20), (30, 40)]
    assert erase.unseen(state, 10) == []


def test_objects_of_another_machine_are_a_problem(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = place.new_topic("elsewhere")
    place.send(topic, numbers(0, 10), keys=["ann"])
    monkeypatch.setattr("pydanube.spark.reach._is_here", lambda *_: False)
    report = erase.run(spark, {"service.url": place.url, "topic": topic, "key": "ann"}, quiet())
    assert report.problems and report.values["messages_erased"] == 0
