"""The SchemaRegistry service over gRPC, on both ports, and topics that hold their producers to a schema."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from grpc import StatusCode

from pydanube.client.client import connect
from pydanube.core import keys
from pydanube.core.names import TopicName
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.core.schemas.kinds import SchemaPolicy
from pydanube.core.schemas.refusals import SchemaRefused
from pydanube.errors import DanubeError, Unreachable
from pydanube.ports import SchemaAnswer, SchemaLane
from pydanube.schema.answering import Answering
from pydanube.stores.schemas.memory import MemorySchemaParsers, NoSchemaParsers
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.danube import DanubeApi_pb2 as api_pb
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as pb
from tests.harness.servers import TOPIC, Calls, refused, served

USER = b'{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
USER_2 = (
    b'{"type": "object", "properties": {"name": {"type": "string"}, "mail": {"type": "string"}}, "required": ["name"]}'
)
NAMELESS = b'{"type": "object", "properties": {"mail": {"type": "string"}}}'
AVRO = b'{"type": "record", "name": "User", "fields": [{"name": "name", "type": "string"}]}'
PROTO = b'syntax = "proto3"; message User { string name = 1; }'


def text(value: object) -> bytes:
    return json.dumps(value).encode()


# --- the eleven calls -----------------------------------------------------------------------------------


@served()
async def test_every_type_is_registered_and_comes_back_as_it_was_given_from_both_ports(calls: Calls) -> None:
    kinds = {
        "json": ("json_schema", USER), "avro": ("avro", AVRO), "proto": ("protobuf", PROTO),
        "string": ("string", b""), "bytes": ("bytes", b""), "int64": ("number", b""),
    }  # fmt: skip
    for number, (alias, (kind, definition)) in enumerate(kinds.items(), start=1):
        done = await calls.register(
            f"s-{alias}", alias.upper(), definition, description="d", tags=["t"], created_by="me"
        )
        assert (done.schema_id, done.version, done.is_new_version) == (number, 1, True)
        for stub in (calls.schemas, calls.admin_schemas):
            found = await stub.GetLatestSchema(pb.GetLatestSchemaRequest(subject=f"s-{alias}"))
            assert (found.schema_type, found.schema_definition) == (kind, definition)
            assert (found.description, found.tags, found.created_by) == ("d", ["t"], "me")
            assert (found.compatibility_mode, found.fingerprint) == ("backward", done.fingerprint)
            assert await stub.GetSchema(pb.GetSchemaRequest(schema_id=number)) == found
            assert await stub.GetSchema(pb.GetSchemaRequest(schema_id=number, version=1)) == found
    listed = await calls.schemas.ListSubjects(pb.ListSubjectsRequest())
    assert sorted(each.schema_id for each in listed.subjects) == [1, 2, 3, 4, 5, 6]


@served()
async def test_versions_count_up_and_the_same_text_is_the_same_version_however_it_is_written(calls: Calls) -> None:
    assert (await calls.register("user", "json", USER)).version == 1
    assert (await calls.register("user", "json", USER_2)).version == 2
    again = await calls.register("user", "json", text(json.loads(USER)))
    assert (again.schema_id, again.version, again.is_new_version) == (1, 1, False)
    versions = (await calls.schemas.ListVersions(pb.ListVersionsRequest(subject="user"))).versions
    assert [(each.version, each.schema_id) for each in versions] == [(1, 1), (2, 1)]


@served()
async def test_an_incompatible_version_is_refused_with_every_difference_and_none_allows_it(calls: Calls) -> None:
    await calls.register("user", "json", USER)
    code, sentence = await refused(calls.register("user", "json", NAMELESS))
    assert code is StatusCode.FAILED_PRECONDITION
    assert "Backward incompatible: removed required field 'name'" in sentence and "version 1" in sentence
    check = pb.CheckCompatibilityRequest(subject="user", new_schema_definition=NAMELESS, schema_type="json_schema")
    answer = await calls.schemas.CheckCompatibility(check)
    assert not answer.is_compatible and answer.errors[0].startswith("Backward incompatible: removed required")
    check.compatibility_mode = "none"
    assert (await calls.schemas.CheckCompatibility(check)).is_compatible
    mode = pb.SetCompatibilityModeRequest(subject="user", compatibility_mode="NONE")
    assert (await calls.schemas.SetCompatibilityMode(mode)).message == "Set compatibility mode to none for subject user"
    assert (await calls.register("user", "json", NAMELESS)).version == 2
    assert (await calls.register("user", "avro", AVRO)).version == 3, "under none even the type may change"
    found = await calls.schemas.GetSchema(pb.GetSchemaRequest(schema_id=1, version=1))
    assert found.schema_type == "json_schema"


@served()
async def test_a_deleted_version_is_still_read_by_its_number_and_never_given_again(calls: Calls) -> None:
    await calls.register("user", "json", USER)
    code, sentence = await refused(
        calls.schemas.DeleteSchemaVersion(pb.DeleteSchemaVersionRequest(subject="user", version=1))
    )
    assert code is StatusCode.FAILED_PRECONDITION and "only one" in sentence
    await calls.register("user", "json", USER_2)
    request = pb.DeleteSchemaVersionRequest(subject="user", version=2)
    assert (await calls.schemas.DeleteSchemaVersion(request)).message == "Deleted version 2 for subject user"
    assert (await calls.schemas.DeleteSchemaVersion(request)).success, "twice is no error"
    assert (await calls.schemas.GetLatestSchema(pb.GetLatestSchemaRequest(subject="user"))).version == 1
    found = await calls.schemas.GetSchema(pb.GetSchemaRequest(schema_id=1, version=2))
    assert found.schema_definition == USER_2
    other = text({"type": "object", "properties": {"name": {"type": "string"}, "x": {}}, "required": ["name"]})
    assert (await calls.register("user", "json", other)).version == 3
    back = await calls.register("user", "json", USER_2)
    assert (back.version, back.is_new_version) == (2, False)
    versions = (await calls.schemas.ListVersions(pb.ListVersionsRequest(subject="user"))).versions
    assert [each.version for each in versions] == [1, 2, 3]


@served()
async def test_a_deleted_version_does_not_come_back_below_one_that_may_not_follow_it(calls: Calls) -> None:
    await calls.register("user", "json", text({"type": "object", "properties": {"a": {"type": "string"}}}))
    await calls.register("user", "json", text({"type": "object", "properties": {"a": {"type": ["string", "null"]}}}))
    await calls.schemas.DeleteSchemaVersion(pb.DeleteSchemaVersionRequest(subject="user", version=2))
    third = text({"type": "object", "properties": {"a": {"type": ["string", "integer"]}}})
    assert (await calls.register("user", "json", third)).version == 3
    second = text({"type": "object", "properties": {"a": {"type": ["string", "null"]}}})
    code, sentence = await refused(calls.register("user", "json", second))
    assert code is StatusCode.FAILED_PRECONDITION and "version 2" in sentence


@served()
async def test_a_deleted_version_does_not_come_back_behind_one_that_it_may_not_follow(calls: Calls) -> None:
    await calls.register("user", "json", USER)
    for mode, kind, definition in (("none", "json", NAMELESS), ("none", "bytes", b"")):
        await calls.schemas.SetCompatibilityMode(
            pb.SetCompatibilityModeRequest(subject="user", compatibility_mode=mode)
        )
        number = (await calls.register("user", kind, definition)).version
        await calls.schemas.DeleteSchemaVersion(pb.DeleteSchemaVersionRequest(subject="user", version=number))
        await calls.schemas.SetCompatibilityMode(
            pb.SetCompatibilityModeRequest(subject="user", compatibility_mode="backward")
        )
        code, sentence = await refused(calls.register("user", kind, definition))
        assert code is StatusCode.FAILED_PRECONDITION and "version 1" in sentence
        assert (await calls.schemas.GetLatestSchema(pb.GetLatestSchemaRequest(subject="user"))).version == 1


@served()
async def test_a_text_that_is_a_schema_of_two_types_is_never_taken_for_the_other(calls: Calls) -> None:
    await calls.register("user", "avro", b'{"type": "string"}')
    code, sentence = await refused(calls.register("user", "json", b'{"type": "string"}'))
    assert code is StatusCode.FAILED_PRECONDITION and "type" in sentence
    mode = pb.SetCompatibilityModeRequest(subject="user", compatibility_mode="none")
    await calls.schemas.SetCompatibilityMode(mode)
    assert (await calls.register("user", "json", b'{"type": "string"}')).version == 2
    assert (await calls.register("user", "json", b'{"type": "string"}')).is_new_version is False
    found = await calls.schemas.GetSchema(pb.GetSchemaRequest(schema_id=1, version=2))
    assert found.schema_type == "json_schema"


WRONG, ABSENT, STATE = StatusCode.INVALID_ARGUMENT, StatusCode.NOT_FOUND, StatusCode.FAILED_PRECONDITION


def registering(kind: str, definition: bytes, subject: str = "s") -> pb.RegisterSchemaRequest:
    return pb.RegisterSchemaRequest(subject=subject, schema_type=kind, schema_definition=definition)


def checking(mode: str) -> pb.CheckCompatibilityRequest:
    return pb.CheckCompatibilityRequest(
        subject="known", schema_type="json", new_schema_definition=USER, compatibility_mode=mode
    )


def configuring(subject: str = "known", policy: str = "warn", topic: str = TOPIC) -> pb.ConfigureTopicSchemaRequest:
    return pb.ConfigureTopicSchemaRequest(topic_name=topic, schema_subject=subject, validation_policy=policy)


def updating(topic: str) -> pb.UpdateTopicValidationPolicyRequest:
    return pb.UpdateTopicValidationPolicyRequest(topic_name=topic, validation_policy="warn")


WRONG_CALLS: list[tuple[str, Any, StatusCode, str]] = [
    ("GetSchema", pb.GetSchemaRequest(schema_id=9), ABSENT, "schema id 9"),
    ("GetSchema", pb.GetSchemaRequest(schema_id=1, version=9), ABSENT, "version 9"),
    ("GetLatestSchema", pb.GetLatestSchemaRequest(subject="nosuch"), ABSENT, "nosuch"),
    ("GetLatestSchema", pb.GetLatestSchemaRequest(subject="a/b"), WRONG, "a/b"),
    ("ListVersions", pb.ListVersionsRequest(subject="nosuch"), ABSENT, "nosuch"),
    ("RegisterSchema", registering("string", b"", subject="_index"), WRONG, "_index"),
    ("RegisterSchema", registering("xml", b""), WRONG, "xml"),
    ("RegisterSchema", registering("json", b"{"), WRONG, "not JSON"),
    ("RegisterSchema", registering("json", b"\xff"), WRONG, "UTF-8"),
    ("RegisterSchema", registering("avro", b'{"type": "recrd"}'), WRONG, "avro"),
    ("RegisterSchema", registering("proto", b"message {"), WRONG, "schema.proto"),
    ("RegisterSchema", registering("json", b" " * 300_000), WRONG, "262144"),
    (
        "SetCompatibilityMode",
        pb.SetCompatibilityModeRequest(subject="known", compatibility_mode="sideways"),
        WRONG,
        "sideways",
    ),
    (
        "SetCompatibilityMode",
        pb.SetCompatibilityModeRequest(subject="nosuch", compatibility_mode="none"),
        ABSENT,
        "nosuch",
    ),
    ("CheckCompatibility", checking("odd"), WRONG, "odd"),
    ("CheckCompatibility", checking(""), WRONG, "empty"),
    ("DeleteSchemaVersion", pb.DeleteSchemaVersionRequest(subject="known", version=7), ABSENT, "version 7"),
    ("ConfigureTopicSchema", configuring("nosuch"), ABSENT, "nosuch"),
    ("ConfigureTopicSchema", configuring(policy="maybe"), WRONG, "maybe"),
    ("ConfigureTopicSchema", configuring(topic="/default/nosuch"), ABSENT, "/default/nosuch"),
    ("UpdateTopicValidationPolicy", updating(TOPIC), STATE, "no schema subject"),
    ("UpdateTopicValidationPolicy", updating("/default/nosuch"), ABSENT, "nosuch"),
    ("GetTopicSchemaConfig", pb.GetTopicSchemaConfigRequest(topic_name="/default/nosuch"), ABSENT, "nosuch"),
]


@served()
async def test_what_is_wrong_with_a_call_is_said_and_nothing_is_left_behind(calls: Calls) -> None:
    await calls.register("known", "json", USER)
    await calls.create_topic()
    for call, request, code, word in WRONG_CALLS:
        found = await refused(getattr(calls.schemas, call)(request))
        assert found.code is code, (call, found)
        assert word in found.sentence
    listed = (await calls.schemas.ListSubjects(pb.ListSubjectsRequest())).subjects
    assert [(each.subject, each.latest_version) for each in listed] == [("known", 1)]


@served(parsers=NoSchemaParsers())
async def test_a_broker_without_parsers_says_so_and_serves_the_plain_types(calls: Calls) -> None:
    code, sentence = await refused(calls.register("user", "json", USER))
    assert code is StatusCode.FAILED_PRECONDITION and "pydanube[schemas]" in sentence
    await calls.register("words", "string")
    await calls.create_topic(schema_subject="words")
    await calls.configure("words", "enforce", payloads=True)
    producer = await calls.create_producer()
    await calls.send(producer, "grüße".encode(), schema_id=1, schema_version=1)
    code, sentence = await refused(calls.send(producer, b"\xff", schema_id=1, schema_version=1))
    assert code is StatusCode.INVALID_ARGUMENT and "not UTF-8 at byte 0" in sentence


@served()
async def test_fifty_registrations_at_once_have_distinct_ids_and_versions_without_a_gap(calls: Calls) -> None:
    done = await asyncio.gather(*(calls.register(f"s{number}") for number in range(50)))
    assert sorted(each.schema_id for each in done) == list(range(1, 51))
    texts = [text({"properties": {f"p{number}": {"type": "string"}}}) for number in range(20)]
    done = await asyncio.gather(*(calls.register("one", "json", each) for each in texts))
    assert sorted(each.version for each in done) == list(range(1, 21))
    assert {each.schema_id for each in done} == {51}


# --- a topic's schema -----------------------------------------------------------------------------------


@served()
async def test_the_first_producer_binds_the_topic_and_the_binding_is_stored(calls: Calls) -> None:
    await calls.register("user", "json", USER)
    await calls.register("other", "json", USER)
    await calls.create_topic()
    mine = api_pb.SchemaReference(subject="user", use_latest=True)
    await calls.create_producer(schema_ref=mine)
    stored = await calls.broker.topics.context.metadata.get(keys.schema_config(TopicName(TOPIC)))
    assert stored is not None and json.loads(stored.value)["subject"] == "user"
    found = await calls.admin_schemas.GetTopicSchemaConfig(pb.GetTopicSchemaConfigRequest(topic_name=TOPIC))
    assert found == pb.GetTopicSchemaConfigResponse(schema_subject="user", validation_policy="warn", schema_id=1)
    code, sentence = await refused(calls.create_producer(schema_ref=api_pb.SchemaReference(subject="other")))
    assert code is StatusCode.FAILED_PRECONDITION and "cannot use" in sentence


@served()
async def test_deleting_a_topic_removes_its_subject_and_its_policy(calls: Calls) -> None:
    await calls.register("user", "json", USER)
    await calls.create_topic(schema_subject="user")
    await calls.configure("user", "enforce")
    await calls.topics.DeleteTopic(admin_pb.TopicRequest(name=TOPIC))
    assert await calls.broker.topics.context.metadata.get(keys.schema_config(TopicName(TOPIC))) is None
    await calls.create_topic()
    found = await calls.schemas.GetTopicSchemaConfig(pb.GetTopicSchemaConfigRequest(topic_name=TOPIC))
    assert found.schema_subject == ""


# --- messages that are published --------------------------------------------------------------------

FITS = {"schema_id": 1, "schema_version": 1}
REASONS: list[tuple[str, dict[str, int], bytes]] = [
    ("missing_schema_id", {}, b'{"name": "a"}'),
    ("unknown_schema", {"schema_id": 1, "schema_version": 9}, b'{"name": "a"}'),
    ("subject_mismatch", {"schema_id": 2, "schema_version": 1}, b'{"name": "a"}'),
    ("payload_invalid", FITS, b'{"name": 7}'),
]


@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non_reliable"])
def test_each_reason_refuses_under_enforce_and_only_counts_under_warn(reliable: bool) -> None:
    @served()
    async def story(calls: Calls) -> None:
        await calls.register("user", "json", USER)
        await calls.register("other", "json", USER)
        await calls.create_topic(schema_subject="user", reliable=reliable)
        producer = await calls.create_producer(reliable=reliable)
        counted = calls.broker.telemetry.topic(TOPIC).schema_failures
        for reason, fields, payload in REASONS:
            await calls.configure("user", "enforce", payloads=True)
            counted.clear()
            await calls.send(producer, b'{"name": "a"}', **FITS)
            assert not counted
            code, sentence = await refused(calls.send(producer, payload, **fields))
            assert code is StatusCode.INVALID_ARGUMENT, "a client must not send it again without end"
            assert TOPIC in sentence
            assert counted == {reason: 1}
            await calls.configure("user", "warn", payloads=True)
            await calls.send(producer, payload, **fields)
            assert counted == {reason: 2}, "the producer was open: the change holds for its next message"
            await calls.configure("user", "none", payloads=True)
            await calls.send(producer, payload, **fields)
            assert counted == {reason: 2}

    story()


@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non_reliable"])
@pytest.mark.parametrize("rows", [1, 100])
def test_native_producers_are_held_to_the_policy_too(rows: int, reliable: bool) -> None:
    @served()
    async def story(calls: Calls) -> None:
        await calls.register("user", "json", USER)
        await calls.create_topic(schema_subject="user", reliable=reliable)
        await calls.configure("user", "enforce", payloads=True)
        counted = calls.broker.telemetry.topic(TOPIC).schema_failures
        async with connect(f"danube://{calls.servers.stream_addr}") as client:
            async with client.producer(TOPIC, name="bare", reliable=reliable, idempotent=reliable) as bare:
                with pytest.raises(SchemaRefused) as raised:
                    await bare.send(b'{"name": "a"}')
                assert raised.value.reason == "missing_schema_id"
            async with client.producer(
                TOPIC, name="typed", schema_subject="user", reliable=reliable, idempotent=reliable
            ) as typed:
                await asyncio.gather(*(typed.send(b'{"name": "a"}') for _ in range(rows)))
                sent = [typed.send(b'{"name": "a"}') for _ in range(rows - 1)]
                done = await asyncio.gather(*sent, typed.send(b'{"name": 7}'), return_exceptions=True)
                assert isinstance(done[-1], SchemaRefused), done[-1]
                assert "/name" in str(done[-1]) and "row" in str(done[-1])
                await calls.configure("user", "warn", payloads=True)
                await typed.send(b'{"name": 7}')
                before = dict(counted)
                await calls.configure("user", "none")
                await typed.send(b"anything")
        assert before == {"missing_schema_id": 1, "payload_invalid": 2}
        assert counted == before

    story()


@served()
async def test_a_version_that_was_registered_a_moment_ago_is_known_when_it_is_used(calls: Calls) -> None:
    await calls.register("user", "json", USER)
    await calls.create_topic(schema_subject="user")
    await calls.configure("user", "enforce")
    producer = await calls.create_producer()
    await calls.send(producer, **FITS)
    await calls.register("user", "json", USER_2)
    calls.broker.schemas._known.clear()  # as on a broker that has not heard of it
    await calls.send(producer, schema_id=1, schema_version=2)
    await calls.schemas.DeleteSchemaVersion(pb.DeleteSchemaVersionRequest(subject="user", version=1))
    code, sentence = await refused(calls.send(producer, **FITS))
    assert code is StatusCode.INVALID_ARGUMENT and "no version 1 in use (its latest is 2)" in sentence


class Away(MemorySchemaParsers):
    """Parsers that do not answer."""

    def __init__(self) -> None:
        super().__init__(Answering().answer)
        self.away = False

    async def ask(self, *question: Any, **more: Any) -> SchemaAnswer:
        if self.away:
            raise Unreachable("the process for schemas", "it ended")
        return await super().ask(*question, **more)


def test_a_registry_that_cannot_be_asked_refuses_for_now_under_enforce_and_nothing_under_warn() -> None:
    parsers = Away()

    @served(parsers=parsers)
    async def story(calls: Calls) -> None:
        await calls.register("user", "json", USER)
        await calls.create_topic(schema_subject="user")
        await calls.configure("user", "enforce", payloads=True)
        producer = await calls.create_producer()
        parsers.away = True
        code, sentence = await refused(calls.send(producer, b'{"name": "a"}', **FITS))
        assert code is StatusCode.UNAVAILABLE and "process for schemas" in sentence, "clients send it again"
        assert (await refused(calls.register("late", "json", USER))).code is StatusCode.UNAVAILABLE
        await calls.configure("user", "warn", payloads=True)
        await calls.send(producer, b'{"name": "a"}', **FITS)
        parsers.away = False
        await calls.configure("user", "enforce", payloads=True)
        await calls.send(producer, b'{"name": "a"}', **FITS)

    story()


class Slow(MemorySchemaParsers):
    """Parsers that hold payloads back until they are let go."""

    def __init__(self) -> None:
        super().__init__(Answering().answer)
        self.came, self.go = asyncio.Event(), asyncio.Event()

    async def ask(self, *question: Any, **more: Any) -> SchemaAnswer:
        if question[0] is SchemaLane.PAYLOADS:
            self.came.set()
            await self.go.wait()
        return await super().ask(*question, **more)


def test_a_policy_that_changes_while_a_message_is_checked_holds_for_that_message() -> None:
    for before, after in (("warn", "enforce"), ("enforce", "warn")):
        parsers = Slow()

        @served(parsers=parsers)
        async def story(calls: Calls, before: str = before, after: str = after, parsers: Slow = parsers) -> None:
            await calls.register("user", "json", USER)
            await calls.create_topic(schema_subject="user")
            await calls.configure("user", before, payloads=True)
            producer = await calls.create_producer()
            sending = asyncio.ensure_future(calls.send(producer, b'{"name": 7}', **FITS))
            await parsers.came.wait()
            await calls.configure("user", after, payloads=True)
            parsers.go.set()
            if after == "enforce":
                assert (await refused(sending)).code is StatusCode.INVALID_ARGUMENT
            else:
                await sending

        story()


@served()
async def test_a_policy_that_is_set_beside_another_subject_keeps_that_subject(calls: Calls) -> None:
    await calls.register("one", "json", USER)
    await calls.register("two", "json", USER)
    await calls.create_topic(schema_subject="one")
    topic = await calls.broker.topics.require(TopicName(TOPIC))
    two = TopicSchema("two", SchemaPolicy.WARN, checks_payloads=False)
    await asyncio.gather(topic.set_schema(two), topic.set_schema_policy(SchemaPolicy.ENFORCE, checks_payloads=True))
    assert topic.enforcer.config == TopicSchema("two", SchemaPolicy.ENFORCE, checks_payloads=True)


@served()
async def test_a_payload_that_the_library_cannot_look_at_is_refused_for_good_and_not_for_now(calls: Calls) -> None:
    await calls.register("user", "json", b'{"type": "object", "properties": {"name": {}}}')
    await calls.create_topic(schema_subject="user")
    await calls.configure("user", "enforce", payloads=True)
    producer = await calls.create_producer()
    half = b'{"' + b"\\" + b'ud800": 1}'
    code, _ = await refused(calls.send(producer, half, **FITS))
    assert code is StatusCode.INVALID_ARGUMENT
    await calls.send(producer, b'{"name": "a"}', **FITS)


@served()
async def test_a_native_producer_says_which_version_it_writes(calls: Calls) -> None:
    await calls.register("user", "json", USER)
    await calls.register("user", "json", USER_2)
    await calls.create_topic(schema_subject="user")
    consumer = await calls.subscribe()
    async with (
        connect(f"danube://{calls.servers.stream_addr}") as client,
        client.producer(TOPIC, schema_subject="user") as producer,
    ):
        await producer.send(b"{}")
        stream = calls.receive(consumer)
        message = await anext(aiter(stream))
        assert (message.schema_id, message.schema_version) == (1, 2)
        stream.cancel()
        with pytest.raises(DanubeError, match="nosuch"):
            async with client.producer("/default/other", schema_subject="nosuch"):
                pass
