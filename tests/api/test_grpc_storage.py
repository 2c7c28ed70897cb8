"""History over gRPC: the reference's list of segments, and our own calls for operators."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode

from pydanube.broker.topic import Topic
from pydanube.config import StorageConfig
from pydanube.core import keys
from pydanube.core.history.object_keys import path_of
from pydanube.core.history.tiers import Retention, TopicHistory
from pydanube.core.names import TopicName
from pydanube.core.policies import TopicPolicy
from pydanube.errors import Unreachable
from pydanube.history.change import HistoryChange
from pydanube.ports import Delete, Put
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.danube import DanubeApi_pb2 as api_pb
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from tests.harness.servers import TOPIC, Calls, refused, served

BUCKET = {"storage": StorageConfig(url="s3://bucket/some/prefix/"), "make_objects": MemoryObjectStore}
ORDERS = TopicName(TOPIC)


async def topic_of(calls: Calls, name: str = TOPIC) -> Topic:
    topic = await calls.broker.topics.require(TopicName(name))
    assert isinstance(topic, Topic)
    return topic


async def upload(calls: Calls, count: int, objects: int = 1) -> Topic:
    """So many messages in each of so many objects."""
    producer = await calls.create_producer()
    topic = await topic_of(calls)
    for _ in range(objects):
        for number in range(count):
            await calls.send(producer, str(number).encode(), publish_time=1_700_000_000_000 + number)
        await upload_now(topic)
    return topic


async def upload_now(topic: Topic) -> None:
    assert topic.storage is not None
    carried = topic.storage.uploader.get(topic.name)
    assert carried is not None
    async with carried.working:
        await topic.storage.uploader.upload_all(carried)


def store_of(calls: Calls) -> Any:
    assert calls.broker.cloud is not None
    return calls.broker.cloud.store


async def segments(calls: Calls, after: int = 0, topic: str = TOPIC) -> list[api_pb.SegmentDescriptorProto]:
    request = api_pb.ListSegmentDescriptorsRequest(topic=topic, after_offset=after)
    return list((await calls.storage.ListSegmentDescriptors(request)).segments)


# --- the reference's call -------------------------------------------------------------------------------


@served(**BUCKET)
async def test_segments_are_listed_in_order_with_the_one_that_starts_at_0(calls: Calls) -> None:
    await upload(calls, 3, objects=3)
    found = await segments(calls)
    assert [(each.start_offset, each.end_offset) for each in found] == [(0, 2), (3, 5), (6, 8)]
    assert [each.segment_id for each in found] == [f"data-{n}-{n + 2}-1.parquet" for n in (0, 3, 6)]
    for each in found:
        info = await store_of(calls).head(f"default/orders/{each.segment_id}")
        assert (each.size, each.etag) == (info.size_bytes, info.etag)
        assert each.created_at > 1_600_000_000
    assert await segments(calls, topic="default/orders") == found


@served(**BUCKET)
async def test_a_caller_gets_the_segments_that_end_behind_its_offset(calls: Calls) -> None:
    await upload(calls, 3, objects=3)
    starts = {after: [each.start_offset for each in await segments(calls, after)] for after in range(11)}
    assert starts == {
        0: [0, 3, 6],
        **{after: [0, 3, 6] for after in (1,)},
        **{after: [3, 6] for after in (2, 3, 4)},
        **{after: [6] for after in (5, 6, 7)},
        **{after: [] for after in (8, 9, 10)},
    }


@served(**BUCKET)
async def test_a_topic_that_is_not_known_and_a_name_that_is_none_have_no_segments(calls: Calls) -> None:
    for name in ("default/nothing", "/default/nothing", "", "/", "nonsense", "/a/b/c", "/default/a b"):
        assert await segments(calls, topic=name) == []


@served()
async def test_a_broker_without_an_object_store_has_no_segments(calls: Calls) -> None:
    await calls.create_producer()
    assert await segments(calls) == []


@served(**BUCKET)
async def test_segments_of_a_topic_that_is_not_loaded_come_from_metadata_and_manifest(calls: Calls) -> None:
    topic = await upload(calls, 3, objects=3)
    found = await segments(calls)
    metadata, store = calls.broker.topics.context.metadata, store_of(calls)
    items = await metadata.list(keys.storage_objects(ORDERS))
    manifest = json.dumps({"format": 1, "objects": [json.loads(item.value) for item in items[:2]]}).encode()
    await store.put("default/orders/manifest-1-1.json", [manifest])
    await topic.close("it moves")
    calls.broker.topics._open.clear()
    history = Put(keys.history(ORDERS), TopicHistory(manifest="manifest-1-1.json").to_bytes())
    await metadata.transact([], [history, *(Delete(item.key) for item in items[:2])])
    assert await segments(calls) == found
    await store.delete("default/orders/manifest-1-1.json")
    request = api_pb.ListSegmentDescriptorsRequest(topic=TOPIC)
    code, sentence = await refused(calls.storage.ListSegmentDescriptors(request))
    assert code is StatusCode.INTERNAL and "manifest-1-1.json" in sentence


# --- list -----------------------------------------------------------------------------------------------


@served(**BUCKET)
async def test_a_list_says_what_is_in_each_object_and_what_is_only_in_the_log(calls: Calls) -> None:
    topic = await upload(calls, 3, objects=2)
    producer = await calls.create_producer()
    await calls.send(producer)
    listed = await calls.ours.StorageList(pb.StorageListRequest(topic=TOPIC))
    assert [(each.first, each.end, each.format, each.epoch) for each in listed.objects] == [
        (0, 3, "parquet", 1),
        (3, 6, "parquet", 1),
    ]
    first = listed.objects[0]
    assert first.key == "default/orders/data-0-2-1.parquet"
    assert first.url == "s3://bucket/some/prefix/default/orders/data-0-2-1.parquet"
    assert first.size_bytes == (await store_of(calls).head(first.key)).size_bytes
    times = (first.min_publish_time_us, first.max_publish_time_us)
    assert times == (1_700_000_000_000_000, 1_700_000_000_002_000)
    assert listed.size_bytes == sum(each.size_bytes for each in listed.objects) and listed.objects_count == 2
    assert [(each.first, each.end) for each in listed.only_in_log] == [(6, 7)]
    tiers = listed.tiers
    assert tiers.has_cloud and (tiers.first_offset, tiers.head) == (0, 7)
    assert [(each.first, each.end) for each in tiers.cloud] == [(0, 6)]
    assert [(each.first, each.end) for each in tiers.log] == [(0, 7)]
    summary = await calls.ours.StorageList(pb.StorageListRequest(topic=TOPIC, summary=True))
    assert summary.tiers == tiers and not summary.objects
    assert topic.head == 7


@served(storage=StorageConfig(url="file:///var/lib/dan%20ube/"), make_objects=MemoryObjectStore)
async def test_an_object_in_a_directory_is_listed_by_its_path(calls: Calls) -> None:
    await upload(calls, 1)
    [only] = (await calls.ours.StorageList(pb.StorageListRequest(topic=TOPIC))).objects
    assert only.url == "/var/lib/dan ube/default/orders/data-0-0-1.parquet"


@served(storage=StorageConfig(url="file:///var/lib/danube/"), make_objects=MemoryObjectStore)
async def test_an_object_of_a_topic_with_dots_is_listed_by_the_path_that_a_directory_has_it_under(calls: Calls) -> None:
    dotted = "/default/orders.eu.v1"
    await calls.send(await calls.create_producer(dotted), topic=dotted)
    await upload_now(await topic_of(calls, dotted))
    [only] = (await calls.ours.StorageList(pb.StorageListRequest(topic=dotted))).objects
    assert only.url == f"/var/lib/danube/{path_of('default/orders.eu.v1/data-0-0-1.parquet')}"


@served()
async def test_without_an_object_store_everything_is_in_the_log(calls: Calls) -> None:
    producer = await calls.create_producer()
    await calls.send(producer)
    listed = await calls.ours.StorageList(pb.StorageListRequest(topic=TOPIC))
    assert not listed.tiers.has_cloud and not listed.objects
    assert [(each.first, each.end) for each in listed.only_in_log] == [(0, 1)]


@served(**BUCKET)
async def test_what_has_no_history_is_refused_by_name(calls: Calls) -> None:
    await calls.create_topic("/default/fanout", reliable=False)
    for topic, code in (
        ("/default/fanout", StatusCode.FAILED_PRECONDITION),
        ("/default/never", StatusCode.NOT_FOUND),
        ("nonsense", StatusCode.INVALID_ARGUMENT),
    ):
        for call in (
            calls.ours.StorageList(pb.StorageListRequest(topic=topic)),
            calls.ours.StorageVerify(pb.StorageVerifyRequest(topic=topic)).read(),
            calls.ours.GetRetention(pb.GetRetentionRequest(topic=topic)),
            calls.ours.SetRetention(pb.SetRetentionRequest(topic=topic, minutes=1)),
            calls.ours.ApplyRetention(pb.ApplyRetentionRequest(topic=topic)),
        ):
            assert (await refused(call)).code is code


# --- verify ---------------------------------------------------------------------------------------------


async def verify(calls: Calls, *, repair: bool = False) -> tuple[list[pb.VerifyProgress], pb.VerifyReport]:
    answers = [each async for each in calls.ours.StorageVerify(pb.StorageVerifyRequest(topic=TOPIC, repair=repair))]
    assert [each.WhichOneof("what") for each in answers] == ["progress"] * (len(answers) - 1) + ["report"]
    return [each.progress for each in answers[:-1]], answers[-1].report


@served(**BUCKET)
async def test_verify_tells_its_progress_and_reports_at_the_end(calls: Calls) -> None:
    await upload(calls, 3, objects=3)
    progress, report = await verify(calls)
    assert [each.objects_done for each in progress] == [0, 1, 2, 3]
    assert progress[-1].bytes_done == progress[-1].bytes == report.size_bytes
    assert (report.objects, report.messages, report.head, report.not_served) == (3, 9, 9, "")
    assert not report.findings and [(each.first, each.end, each.where) for each in report.places] == [(0, 9, "objects")]


@served(**BUCKET)
async def test_findings_name_object_and_offsets(calls: Calls) -> None:
    await upload(calls, 3, objects=2)
    await store_of(calls).delete("default/orders/data-3-5-1.parquet")
    await store_of(calls).put("default/orders/notes.txt", [b"mine"])
    _, report = await verify(calls, repair=True)
    found = {(each.is_problem, each.kind, each.key): each for each in report.findings}
    missing = found.pop((True, "missing", "default/orders/data-3-5-1.parquet"))
    assert (missing.first, missing.end) == (3, 6)
    foreign = found.pop((False, "foreign", "default/orders/notes.txt"))
    assert not foreign.HasField("first") and not found
    [undescribed] = report.undescribed
    assert undescribed.fate == "foreign" and not undescribed.HasField("epoch") and not report.removed


@served()
async def test_verify_without_an_object_store_says_what_to_set(calls: Calls) -> None:
    await calls.create_producer()
    code, sentence = await refused(calls.ours.StorageVerify(pb.StorageVerifyRequest(topic=TOPIC)).read())
    assert code is StatusCode.FAILED_PRECONDITION and "--storage-url" in sentence


class Away(MemoryObjectStore):
    away = False

    async def get_range(self, key: str, position: int, length: int) -> bytes:
        if self.away:
            raise Unreachable("s3://bucket", "no answer")
        return await super().get_range(key, position, length)


@served(storage=StorageConfig(url="s3://bucket/"), make_objects=Away)
async def test_a_store_that_is_away_is_unavailable_and_not_a_report(calls: Calls) -> None:
    await upload(calls, 3)
    store_of(calls).away = True
    call = calls.ours.StorageVerify(pb.StorageVerifyRequest(topic=TOPIC))
    assert (await call.read()).WhichOneof("what") == "progress"
    code, sentence = await refused(call.read())
    assert code is StatusCode.UNAVAILABLE and "s3://bucket" in sentence


# --- retention ------------------------------------------------------------------------------------------


async def rule(calls: Calls, **of: str) -> tuple[int, int, str]:
    found = await calls.ours.GetRetention(pb.GetRetentionRequest(**of))
    return found.minutes, found.mb, found.set_by


def live(topic: Topic) -> Retention:
    assert topic.storage is not None
    carried = topic.storage.uploader.get(topic.name)
    assert carried is not None
    return carried.retention


@served(policies=TopicPolicy(retention_minutes=60), **BUCKET)
async def test_a_topic_goes_by_its_namespace_until_it_has_a_rule_of_its_own(calls: Calls) -> None:
    topic = await upload(calls, 3)
    assert await rule(calls, topic=TOPIC) == (60, 0, "configuration")
    assert live(topic) == Retention(seconds=3600.0)
    await calls.ours.SetRetention(pb.SetRetentionRequest(namespace="default", mb=7))
    assert await rule(calls, topic=TOPIC) == (60, 7, "namespace")
    assert live(topic) == Retention(seconds=3600.0, size_bytes=7 << 20)
    await calls.ours.SetRetention(pb.SetRetentionRequest(topic=TOPIC, minutes=0))
    assert await rule(calls, topic=TOPIC) == (0, 7, "topic")
    assert live(topic) == Retention(size_bytes=7 << 20)
    assert await rule(calls, namespace="default") == (60, 7, "namespace")
    await calls.ours.SetRetention(pb.SetRetentionRequest(topic=TOPIC, reset=True))
    assert await rule(calls, topic=TOPIC) == (60, 7, "namespace")
    await calls.ours.SetRetention(pb.SetRetentionRequest(namespace="default", reset=True))
    assert await rule(calls, topic=TOPIC) == (60, 0, "configuration")
    assert live(topic) == Retention(seconds=3600.0)


@served(**BUCKET)
async def test_a_rule_is_stored_beside_the_limits_of_the_namespace(calls: Calls) -> None:
    await calls.namespaces.CreateNamespace(admin_pb.NamespaceRequest(name="mine"))
    await calls.ours.SetRetention(pb.SetRetentionRequest(namespace="mine", minutes=5))
    stored = await calls.namespaces.GetNamespacePolicies(admin_pb.NamespaceRequest(name="mine"))
    assert json.loads(stored.policies)["retention_minutes"] == 5
    assert (await refused(calls.ours.GetRetention(pb.GetRetentionRequest(namespace="none")))).code is (
        StatusCode.NOT_FOUND
    )
    assert (await refused(calls.ours.SetRetention(pb.SetRetentionRequest(namespace="none", mb=1)))).code is (
        StatusCode.NOT_FOUND
    )


@pytest.mark.parametrize(
    "request_of", [{"topic": TOPIC}, {"topic": TOPIC, "minutes": 1, "reset": True}, {"namespace": "default"}]
)
def test_a_change_says_what_to_change(request_of: dict[str, Any]) -> None:
    @served(**BUCKET)
    async def asked(calls: Calls) -> None:
        await calls.create_producer()
        code, sentence = await refused(calls.ours.SetRetention(pb.SetRetentionRequest(**request_of)))
        assert code is StatusCode.INVALID_ARGUMENT and "minutes" in sentence

    asked()


@served(**BUCKET)
async def test_setting_a_rule_says_what_it_will_forget_and_applying_it_does(calls: Calls) -> None:
    topic = await upload(calls, 3)
    assert topic.storage is not None
    producer = await calls.create_producer()
    for _ in range(3):
        await calls.send(producer, bytes(3 << 20))
    await upload_now(topic)
    answer = await calls.ours.SetRetention(pb.SetRetentionRequest(topic=TOPIC, mb=1))
    assert (answer.due_objects, answer.HasField("due_first_offset")) == (0, False)  # zeros compress well
    described = (await topic.storage.tier.load_manifest())[:]
    assert [each.end for each in described] == [3, 6]
    tier = topic.storage.tier
    await tier.apply(HistoryChange(replaced=described[1:], added=[replace(described[1], size=2 << 20)]))
    answer = await calls.ours.GetRetention(pb.GetRetentionRequest(topic=TOPIC))
    assert (answer.due_objects, answer.due_first_offset) == (2, 6)
    applied = await calls.ours.ApplyRetention(pb.ApplyRetentionRequest(topic=TOPIC))
    assert (applied.first_offset, applied.removed_objects) == (6, 2)
    assert await segments(calls) == []


# --- where a subscription reads -------------------------------------------------------------------------


@served(**BUCKET)
async def test_explain_and_peek_know_both_tiers(calls: Calls) -> None:
    topic = await upload(calls, 5)
    await calls.subscribe()
    answer = await calls.ours.ExplainSubscription(pb.ExplainSubscriptionRequest(topic=TOPIC, subscription="s"))
    assert [(each.first, each.end) for each in answer.tiers.cloud] == [(0, 5)]
    assert "object store" not in answer.sentence
    topic.log.segments.clear()  # as if local retention had freed them
    await calls.ours.SeekSubscription(
        pb.SeekSubscriptionRequest(topic=TOPIC, subscription="s", earliest=pb.SeekSubscriptionRequest.Earliest())
    )
    answer = await calls.ours.ExplainSubscription(pb.ExplainSubscriptionRequest(topic=TOPIC, subscription="s"))
    assert "Offset 0 is read from the object store: the log begins at 5." in answer.sentence
    peeked = await calls.ours.PeekTopic(pb.PeekTopicRequest(topic=TOPIC, offset=1, count=2))
    assert [(each.offset, each.payload) for each in peeked.messages] == [(1, b"1"), (2, b"2")]
