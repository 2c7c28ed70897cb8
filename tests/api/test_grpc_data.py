"""The message path over gRPC, row by row of the contract: what is answered, and with which code what is refused."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from grpc import StatusCode

from pydanube.api.grpc.data import MESSAGE_SIZE_MAX_BYTES
from pydanube.broker.subscription import Subscription
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.names import ConsumerId, SubscriptionName, TopicName, producer_id
from pydanube.core.policies import TopicPolicy
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours_pb
from pydanube.wire._pb.pydanube import stream_pb2 as stream_pb
from pydanube.wire.convert import START_HEADER
from tests.harness.servers import TOPIC, Calls, refused, served

BAD_NAMES = [
    "",
    "orders",
    "/default",
    "/default/",
    "//orders",
    "/a/b/c",
    "x/default/a",
    "/default/a..b",
    "/default/a b",
]
UNKNOWN_ID = 12345


# --- CreateProducer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BAD_NAMES)
@served()
async def test_a_malformed_topic_name_is_refused_in_the_words_of_the_reference(calls: Calls, name: str) -> None:
    code, sentence = await refused(calls.create_producer(name))
    assert code is StatusCode.INVALID_ARGUMENT
    assert sentence.startswith(f"The topic: {name} has an invalid format, should be: /namespace_name/topic_name")


@served()
async def test_a_producer_creates_the_topic_and_the_same_name_has_the_same_id(calls: Calls) -> None:
    first = await calls.create_producer()
    assert 1 <= first < 1 << 63
    assert await calls.create_producer() == first
    assert await calls.create_producer(name="other") != first


@served()
async def test_producers_that_create_one_topic_at_the_same_time_all_succeed(calls: Calls) -> None:
    names = [f"p{number}" for number in range(20)]
    assert len({*await asyncio.gather(*(calls.create_producer(name=name) for name in names))}) == 20


@served()
async def test_the_dispatch_strategy_of_a_topic_is_fixed(calls: Calls) -> None:
    await calls.create_producer(reliable=True)
    code, sentence = await refused(calls.create_producer(reliable=False))
    assert code is StatusCode.FAILED_PRECONDITION
    assert "requested dispatch strategy does not match topic strategy" in sentence


@pytest.mark.parametrize("field", ["dispatch_strategy", "producer_access_mode"])
@served()
async def test_an_enum_value_that_nobody_knows_is_refused(calls: Calls, field: str) -> None:
    request = pb.ProducerRequest(topic_name=TOPIC, producer_name="p", **{field: 9})  # type: ignore[arg-type]
    code, sentence = await refused(calls.producers.CreateProducer(request))
    assert code is StatusCode.INVALID_ARGUMENT and field in sentence


@served()
async def test_a_topic_is_bound_to_the_schema_subject_it_was_created_with(calls: Calls) -> None:
    mine, other = pb.SchemaReference(subject="mine", use_latest=True), pb.SchemaReference(subject="other")
    code, sentence = await refused(calls.create_producer(schema_ref=mine))
    assert code is StatusCode.FAILED_PRECONDITION and "not found" in sentence
    await calls.register("mine")
    identity = await calls.create_producer(schema_ref=mine)
    assert await calls.create_producer(schema_ref=mine) == identity
    assert await calls.create_producer() == identity
    code, sentence = await refused(calls.create_producer(schema_ref=other))
    assert code is StatusCode.FAILED_PRECONDITION
    assert "mine" in sentence and "cannot use" in sentence


@served()
async def test_a_topic_without_a_subject_cannot_be_bound_to_one_that_is_not_registered(calls: Calls) -> None:
    await calls.create_producer()
    code, sentence = await refused(calls.create_producer(schema_ref=pb.SchemaReference(subject="mine")))
    assert code is StatusCode.FAILED_PRECONDITION and "not found" in sentence


@served(auto_create_topics=False)
async def test_without_auto_create_an_unknown_topic_is_not_found(calls: Calls) -> None:
    assert (await refused(calls.create_producer())).code is StatusCode.NOT_FOUND
    await calls.create_topic()
    assert await calls.create_producer()


@served()
async def test_a_topic_of_a_namespace_that_is_missing_may_be_tried_again(calls: Calls) -> None:
    assert (await refused(calls.create_producer("/nowhere/a"))).code is StatusCode.UNAVAILABLE


@served()
async def test_a_name_is_a_topic_or_the_base_of_partitions(calls: Calls) -> None:
    await calls.create_producer(f"{TOPIC}-part-0")
    assert (await refused(calls.create_producer(TOPIC))).code is StatusCode.ALREADY_EXISTS
    await calls.create_producer("/default/plain")
    assert (await refused(calls.create_producer("/default/plain-part-0"))).code is StatusCode.ALREADY_EXISTS
    assert await calls.create_producer("/default/ordersandmore")  # begins alike, and is another


@served(policies=TopicPolicy(max_producers_per_topic=1))
async def test_one_producer_too_many_may_be_tried_again(calls: Calls) -> None:
    await calls.create_producer(name="a")
    await calls.create_producer(name="a")
    assert (await refused(calls.create_producer(name="b"))).code is StatusCode.RESOURCE_EXHAUSTED


@served()
async def test_an_exclusive_producer_is_alone(calls: Calls) -> None:
    await calls.create_producer(name="a", producer_access_mode=1)
    code, sentence = await refused(calls.create_producer(name="b"))
    assert code is StatusCode.PERMISSION_DENIED and "a" in sentence


@served()
async def test_a_name_of_a_megabyte_is_refused(calls: Calls) -> None:
    assert (await refused(calls.create_producer(name="p" * 1_000_000))).code is StatusCode.INVALID_ARGUMENT


# --- SendMessage --------------------------------------------------------------------------------------


@served()
async def test_the_answer_to_a_send_has_its_request_id(calls: Calls) -> None:
    identity = await calls.create_producer()
    assert await calls.send(identity, request_id=41) == 41


@served()
async def test_an_id_that_is_the_hash_of_the_names_is_accepted_without_creating_the_producer(calls: Calls) -> None:
    await calls.create_topic()
    await calls.send(producer_id(TopicName(TOPIC), "p"))


@served()
async def test_any_other_unknown_id_makes_the_client_create_its_producer_again(calls: Calls) -> None:
    await calls.create_topic()
    assert (await refused(calls.send(UNKNOWN_ID))).code is StatusCode.UNAVAILABLE


@served()
async def test_a_send_to_an_unknown_topic_makes_the_client_create_it_again(calls: Calls) -> None:
    assert (await refused(calls.send(UNKNOWN_ID))).code is StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", BAD_NAMES)
@served()
async def test_a_send_to_a_malformed_name_is_final(calls: Calls, name: str) -> None:
    assert (await refused(calls.send(UNKNOWN_ID, topic=name))).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_a_send_without_msg_id_is_final(calls: Calls) -> None:
    code, sentence = await refused(calls.producers.SendMessage(pb.StreamMessage(payload=b"x")))
    assert code is StatusCode.INVALID_ARGUMENT and "msg_id" in sentence


@served(policies=TopicPolicy(max_message_size=1000))
async def test_a_message_over_the_policys_size_is_final(calls: Calls) -> None:
    identity = await calls.create_producer()
    await calls.send(identity, bytes(1000))
    code, sentence = await refused(calls.send(identity, bytes(1001)))
    assert code is StatusCode.INVALID_ARGUMENT and "1000" in sentence


@pytest.mark.parametrize("size_mib", [4, 5, 20])
@served()
async def test_a_message_that_no_consumer_could_receive_is_final(calls: Calls, size_mib: int) -> None:
    identity = await calls.create_producer()
    code, sentence = await refused(calls.send(identity, bytes(size_mib << 20)))
    assert code is StatusCode.INVALID_ARGUMENT and str(MESSAGE_SIZE_MAX_BYTES) in sentence


@served()
async def test_the_largest_message_that_is_taken_reaches_a_client_with_its_default_limit(calls: Calls) -> None:
    identity = await calls.create_producer()
    consumer = await calls.subscribe()
    size_bytes = MESSAGE_SIZE_MAX_BYTES - 100
    await calls.send(identity, bytes(size_bytes), routing_key="k")
    stream = calls.receive(consumer)
    assert len((await stream.read()).payload) == size_bytes
    stream.cancel()


@served()
async def test_a_publish_time_beyond_the_year_9999_is_final(calls: Calls) -> None:
    identity = await calls.create_producer()
    assert (await refused(calls.send(identity, publish_time=1 << 63))).code is StatusCode.INVALID_ARGUMENT


@served(policies=TopicPolicy(max_publish_rate=3))
async def test_a_producer_that_is_too_fast_may_try_again(calls: Calls) -> None:
    identity = await calls.create_producer()
    codes = []
    for _ in range(20):
        try:
            await calls.send(identity)
        except grpc.aio.AioRpcError as error:
            codes.append(error.code())
    assert codes and {*codes} == {StatusCode.RESOURCE_EXHAUSTED}


@pytest.mark.parametrize("reliable", [True, False])
@served()
async def test_a_send_to_a_topic_that_is_closing_may_be_tried_again(calls: Calls, reliable: bool) -> None:
    identity = await calls.create_producer(reliable=reliable)
    topic = calls.broker.topics.get(TopicName(TOPIC))
    assert topic is not None
    await topic.close("it moves")
    code, sentence = await refused(calls.send(identity))
    assert code is StatusCode.UNAVAILABLE and "it moves" in sentence


@served()
async def test_bytes_that_are_no_message_are_final_and_leave_no_traceback(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for method in ("ProducerService/SendMessage", "ConsumerService/Subscribe", "Discovery/TopicLookup"):
            call = calls.channel.unary_unary(f"/danube.{method}")
            assert (await refused(call(b"\xff\xff\xff"))).code is StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.exc_info]


# --- Subscribe ----------------------------------------------------------------------------------------


@served()
async def test_a_consumer_never_creates_a_topic(calls: Calls) -> None:
    assert (await refused(calls.subscribe())).code is StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", BAD_NAMES)
@served()
async def test_subscribing_to_a_malformed_name_is_refused(calls: Calls, name: str) -> None:
    assert (await refused(calls.subscribe(topic=name))).code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["", "a/b", "..", "line\nfeed", "s" * 300])
@served()
async def test_a_malformed_subscription_name_is_refused(calls: Calls, name: str) -> None:
    await calls.create_topic()
    assert (await refused(calls.subscribe(name))).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_a_new_subscription_begins_at_the_place_in_a_header_and_one_that_exists_does_not(calls: Calls) -> None:
    producer = await calls.create_producer()
    for number in range(3):
        await calls.send(producer, b"%d" % number)

    async def first(subscription: str, place: stream_pb.Place) -> int:
        request = pb.ConsumerRequest(
            topic_name=TOPIC, consumer_name=f"c-{subscription}", subscription=subscription, subscription_type=1
        )
        header = ((START_HEADER, place.SerializeToString()),)
        await calls.consumers.Subscribe(request, metadata=header)
        lag = ours_pb.GetSubscriptionLagRequest(topic=TOPIC, subscription=subscription)
        return 3 - (await calls.ours.GetSubscriptionLag(lag)).lag.lag_messages

    assert await first("all", stream_pb.Place(edge=stream_pb.EARLIEST)) == 0
    assert await first("now", stream_pb.Place(edge=stream_pb.LATEST)) == 3
    assert await first("two", stream_pb.Place(offset=2)) == 2
    assert await first("far", stream_pb.Place(offset=99)) == 3
    assert await first("old", stream_pb.Place(time_us=0)) == 0
    assert await first("now", stream_pb.Place(edge=stream_pb.EARLIEST)) == 3
    request = pb.ConsumerRequest(topic_name=TOPIC, consumer_name="c", subscription="s", subscription_type=1)
    code, sentence = await refused(calls.consumers.Subscribe(request, metadata=((START_HEADER, b"\xff"),)))
    assert code is StatusCode.INVALID_ARGUMENT and sentence.startswith(f"{START_HEADER} is no Place")


@pytest.mark.parametrize("kind", [4, -1, 1 << 30])
@served()
async def test_a_subscription_type_that_nobody_knows_is_denied(calls: Calls, kind: int) -> None:
    await calls.create_topic()
    code, sentence = await refused(calls.subscribe(kind=kind))
    assert code is StatusCode.PERMISSION_DENIED and "Not able to subscribe" in sentence


@pytest.mark.parametrize("reliable", [True, False])
@served()
async def test_an_exclusive_subscription_is_denied_to_a_second_consumer_while_the_first_is_there(
    calls: Calls, reliable: bool
) -> None:
    await calls.create_topic(reliable=reliable)
    stream = calls.receive(await calls.subscribe(consumer="a", kind=0))
    await stream.initial_metadata()
    code, sentence = await refused(calls.subscribe(consumer="b", kind=0))
    assert code is StatusCode.PERMISSION_DENIED and "can't be shared" in sentence
    stream.cancel()
    await eventually_connected(calls, 0)
    await calls.subscribe(consumer="b", kind=0)


@served(policies=TopicPolicy(max_subscriptions_per_topic=1))
async def test_one_subscription_too_many_is_denied_and_joining_one_is_not(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe("s", "a")
    await calls.subscribe("s", "b")
    assert (await refused(calls.subscribe("other", "a"))).code is StatusCode.PERMISSION_DENIED


@served(policies=TopicPolicy(max_consumers_per_topic=1))
async def test_one_consumer_too_many_of_a_topic_may_try_again(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe("s", "a")
    await calls.subscribe("s", "a")
    assert (await refused(calls.subscribe("s", "b"))).code is StatusCode.RESOURCE_EXHAUSTED


@served(policies=TopicPolicy(max_consumers_per_subscription=1))
async def test_one_consumer_too_many_of_a_subscription_is_denied(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe("s", "a")
    assert (await refused(calls.subscribe("s", "b"))).code is StatusCode.PERMISSION_DENIED


@served()
async def test_the_same_consumer_name_has_the_same_id(calls: Calls) -> None:
    await calls.create_topic()
    first = await calls.subscribe()
    assert 1 <= first < 1 << 63
    assert await calls.subscribe() == first


# --- ReceiveMessages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reliable", [True, False])
@served()
async def test_a_message_arrives_as_it_was_sent(calls: Calls, reliable: bool) -> None:
    identity = await calls.create_producer(reliable=reliable)
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    sent = {
        "request_id": 5,
        "publish_time": 1_700_000_000_123,
        "producer_name": "p",
        "attributes": {"a": "b", "": "é"},
        "schema_id": (1 << 64) - 1,
        "schema_version": (1 << 32) - 1,
        "routing_key": "",
    }
    await calls.send(identity, b"\x00\xff", **sent)
    message = await stream.read()
    assert message == pb.StreamMessage(
        payload=b"\x00\xff",
        msg_id=pb.MsgID(producer_id=identity, topic_name=TOPIC, broker_addr=calls.broker.broker_url, topic_offset=0),
        **sent,
    )
    stream.cancel()


@served()
async def test_the_headers_of_an_idle_stream_arrive_at_once(calls: Calls) -> None:
    await calls.create_topic()
    stream = calls.receive(await calls.subscribe())
    async with asyncio.timeout(1):
        await stream.initial_metadata()
    stream.cancel()


@served()
async def test_a_stream_of_an_unknown_id_fails_slowly_and_before_its_headers(calls: Calls) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    stream = calls.receive(UNKNOWN_ID)
    code, sentence = await refused(stream.read())
    assert code is StatusCode.UNAVAILABLE and str(UNKNOWN_ID) in sentence
    assert 0.1 <= loop.time() - began < 1
    assert not await stream.initial_metadata()


@served()
async def test_a_stream_that_is_taken_over_ends_cleanly_and_the_new_one_gets_the_messages(calls: Calls) -> None:
    identity = await calls.create_producer()
    consumer = await calls.subscribe()
    old = calls.receive(consumer)
    await old.initial_metadata()
    await calls.send(identity, b"first")
    assert (await old.read()).payload == b"first"
    new = calls.receive(consumer)
    assert await old.read() is grpc.aio.EOF
    assert await old.code() is StatusCode.OK
    assert (await new.read()).payload == b"first"  # not acknowledged, so it comes again
    new.cancel()


@pytest.mark.parametrize("reliable", [True, False])
@served()
async def test_when_its_topic_goes_a_stream_makes_the_client_look_it_up_again(calls: Calls, reliable: bool) -> None:
    await calls.create_topic(reliable=reliable)
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    await calls.broker.topics.delete(TopicName(TOPIC))
    assert (await refused(stream.read())).code is StatusCode.UNAVAILABLE


@served()
async def test_when_the_servers_close_streams_end_with_unavailable(calls: Calls) -> None:
    await calls.create_topic()
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    await calls.servers.close()
    assert (await refused(stream.read())).code is StatusCode.UNAVAILABLE


@served()
async def test_what_a_client_held_that_left_goes_to_another(calls: Calls) -> None:
    identity = await calls.create_producer()
    gone = calls.receive(await calls.subscribe(consumer="a"))
    await gone.initial_metadata()
    await calls.send(identity, b"held")
    assert (await gone.read()).payload == b"held"
    gone.cancel()
    await eventually_connected(calls, 0)
    other = calls.receive(await calls.subscribe(consumer="b"))
    async with asyncio.timeout(5):  # at once, and not when the ack times out
        assert (await other.read()).payload == b"held"
    other.cancel()


# --- Ack and Nack ---------------------------------------------------------------------------------------


@served()
async def test_an_acknowledged_message_is_behind_the_subscription(calls: Calls) -> None:
    identity = await calls.create_producer()
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    await calls.send(identity)
    await calls.ack(await stream.read())
    topic = calls.broker.topics.get(TopicName(TOPIC))
    assert topic is not None
    [subscription] = topic.subscriptions.values()
    assert not subscription.has_lag()  # type: ignore[union-attr]
    stream.cancel()


@served()
async def test_a_refused_message_comes_again(calls: Calls) -> None:
    identity = await calls.create_producer()
    stream = calls.receive(await calls.subscribe())
    await calls.send(identity, b"again")
    message = await stream.read()
    await calls.consumers.Nack(pb.NackRequest(msg_id=message.msg_id, subscription_name="s", delay_ms=1, reason="no"))
    async with asyncio.timeout(5):
        assert (await stream.read()).payload == b"again"
    stream.cancel()


@served()
async def test_what_was_acknowledged_while_it_waited_for_the_wire_is_not_sent(calls: Calls) -> None:
    """Neither the copy nor the first: whoever had it from another owner may have acknowledged it here."""
    identity = await calls.create_producer()
    consumer = await calls.subscribe()
    await calls.send(identity, b"once")
    topic = calls.broker.topics.get(TopicName(TOPIC))
    assert topic is not None
    subscription = topic.require(SubscriptionName("s"))
    registration = subscription.registration(ConsumerId(consumer))
    assert isinstance(subscription, Subscription) and registration is not None and registration.outbox is not None
    subscription.change(policy=FailurePolicy(base_redelivery_delay_ms=0))
    outbox = registration.outbox
    async with asyncio.timeout(5):
        for copies in (1, 2):  # nobody takes them yet
            while len(outbox) < copies:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if copies == 1:
                subscription.nack(0)
        subscription.ack(0)
        stream = calls.receive(consumer)
        await calls.send(identity, b"next")
        assert (await stream.read()).payload == b"next"
    stream.cancel()


@pytest.mark.parametrize("offset", [0, 5, (1 << 63) - 1, (1 << 64) - 1])
@served()
async def test_acks_of_what_is_not_committed_are_refused_and_change_nothing(calls: Calls, offset: int) -> None:
    identity = await calls.create_producer()
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    place = pb.MsgID(topic_name=TOPIC, topic_offset=offset)
    ack = await refused(calls.consumers.Ack(pb.AckRequest(request_id=3, msg_id=place, subscription_name="s")))
    assert ack.code is StatusCode.OUT_OF_RANGE and f"offset {offset} of {TOPIC}" in ack.sentence
    nack = pb.NackRequest(msg_id=place, subscription_name="s", delay_ms=(1 << 64) - 1)
    assert (await refused(calls.consumers.Nack(nack))).code is StatusCode.OUT_OF_RANGE
    await calls.send(identity, b"still")
    async with asyncio.timeout(5):
        assert (await stream.read()).payload == b"still"
    stream.cancel()


@pytest.mark.parametrize("offset", [0, 5, (1 << 64) - 1])
@served()
async def test_acks_on_a_non_reliable_topic_are_answered_for_delivering_has_settled_everything(
    calls: Calls, offset: int
) -> None:
    identity = await calls.create_producer(reliable=False)
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    place = pb.MsgID(topic_name=TOPIC, topic_offset=offset)
    await calls.consumers.Ack(pb.AckRequest(request_id=3, msg_id=place, subscription_name="s"))
    await calls.consumers.Nack(pb.NackRequest(msg_id=place, subscription_name="s", delay_ms=(1 << 64) - 1))
    await calls.send(identity, b"still")
    async with asyncio.timeout(5):
        assert (await stream.read()).payload == b"still"
    stream.cancel()


@served()
async def test_an_ack_without_msg_id_is_refused(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe()
    assert (await refused(calls.consumers.Ack(pb.AckRequest(subscription_name="s")))).code is (
        StatusCode.INVALID_ARGUMENT
    )
    assert (await refused(calls.consumers.Nack(pb.NackRequest(subscription_name="s")))).code is (
        StatusCode.INVALID_ARGUMENT
    )


@served()
async def test_an_ack_of_an_unknown_topic_or_subscription_is_final(calls: Calls) -> None:
    place = pb.MsgID(topic_name=TOPIC)
    request = pb.AckRequest(msg_id=place, subscription_name="s")
    assert (await refused(calls.consumers.Ack(request))).code is StatusCode.NOT_FOUND
    await calls.create_topic()
    assert (await refused(calls.consumers.Ack(request))).code is StatusCode.NOT_FOUND


# --- Discovery ----------------------------------------------------------------------------------------


@served()
async def test_a_lookup_names_this_broker(calls: Calls) -> None:
    await calls.create_topic()
    response = await calls.discovery.TopicLookup(pb.TopicLookupRequest(request_id=3, topic=TOPIC))
    url = f"http://{calls.servers.client_addr}"
    assert response == pb.TopicLookupResponse(
        request_id=3, response_type=pb.TopicLookupResponse.Connect, connect_url=url, broker_url=url
    )


@served()
async def test_a_lookup_of_what_is_no_topic_is_not_found(calls: Calls) -> None:
    await calls.create_topic(f"{TOPIC}-part-0")
    for name in (TOPIC, "/default/none"):
        assert (await refused(calls.discovery.TopicLookup(pb.TopicLookupRequest(topic=name)))).code is (
            StatusCode.NOT_FOUND
        )


@pytest.mark.parametrize("name", BAD_NAMES)
@served()
async def test_a_malformed_name_is_refused_by_both_lookups(calls: Calls, name: str) -> None:
    request = pb.TopicLookupRequest(topic=name)
    assert (await refused(calls.discovery.TopicLookup(request))).code is StatusCode.INVALID_ARGUMENT
    assert (await refused(calls.discovery.TopicPartitions(request))).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_a_name_that_does_not_exist_has_no_partitions(calls: Calls) -> None:
    response = await calls.discovery.TopicPartitions(pb.TopicLookupRequest(topic="/default/none", request_id=4))
    assert response.request_id == 4 and not response.partitions


@served()
async def test_partitions_match_exactly_and_come_in_the_order_of_their_numbers(calls: Calls) -> None:
    for number in (10, 0, 2):
        await calls.create_topic(f"{TOPIC}-part-{number}")
    await calls.create_topic("/default/ordersbar")

    async def partitions(name: str) -> list[str]:
        return list((await calls.discovery.TopicPartitions(pb.TopicLookupRequest(topic=name))).partitions)

    assert await partitions(TOPIC) == [f"{TOPIC}-part-0", f"{TOPIC}-part-2", f"{TOPIC}-part-10"]
    assert await partitions("/default/ordersbar") == ["/default/ordersbar"]
    assert await partitions("/default/order") == []


# --- HealthCheck --------------------------------------------------------------------------------------


async def health(calls: Calls, identity: int, *, producer: bool = False) -> int:
    request = pb.HealthCheckRequest(client=pb.HealthCheckRequest.ClientType.Value("Consumer"), id=identity)
    if producer:
        request.client = pb.HealthCheckRequest.Producer
    return int((await calls.health.HealthCheck(request)).status)


OK, CLOSE = pb.HealthCheckResponse.OK, pb.HealthCheckResponse.CLOSE


@pytest.mark.parametrize("reliable", [True, False])
@served()
async def test_a_consumer_is_healthy_from_subscribe_on_until_its_stream_is_gone(calls: Calls, reliable: bool) -> None:
    await calls.create_topic(reliable=reliable)
    consumer = await calls.subscribe()
    assert await health(calls, consumer) == OK
    stream = calls.receive(consumer)
    await stream.initial_metadata()
    assert await health(calls, consumer) == OK
    stream.cancel()
    await eventually_connected(calls, 0)
    assert await health(calls, consumer) == CLOSE
    assert await calls.subscribe() == consumer
    assert await health(calls, consumer) == OK


@pytest.mark.parametrize("producer", [True, False])
@served()
async def test_a_dead_id_is_told_twice_to_close_and_then_nothing_more(calls: Calls, producer: bool) -> None:
    assert await health(calls, UNKNOWN_ID, producer=producer) == CLOSE
    assert await health(calls, UNKNOWN_ID, producer=producer) == CLOSE
    assert (await refused(health(calls, UNKNOWN_ID, producer=producer))).code is StatusCode.NOT_FOUND


@served()
async def test_a_producer_is_healthy(calls: Calls) -> None:
    assert await health(calls, await calls.create_producer(), producer=True) == OK


@served()
async def test_the_health_of_neither_producer_nor_consumer_is_refused(calls: Calls) -> None:
    request = pb.HealthCheckRequest(client=7, id=1)  # type: ignore[arg-type]
    assert (await refused(calls.health.HealthCheck(request))).code is StatusCode.INVALID_ARGUMENT


# --- what is not there yet, and what must never happen ------------------------------------------------


@served()
async def test_a_bug_is_logged_once_and_told_without_its_inside(
    calls: Calls, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: TopicName) -> None:
        raise KeyError("/secret/path")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(calls.broker.topics, "get", broken)
        code, sentence = await refused(calls.send(UNKNOWN_ID))
    assert code is StatusCode.INTERNAL and "KeyError" in sentence and "secret" not in sentence
    [record] = [record for record in caplog.records if record.exc_info]
    assert record.getMessage() == "call failed"


async def eventually_connected(calls: Calls, count: int) -> None:
    """A client's leaving is noticed at once: within a few turns of the loop and of the network's."""
    topic = calls.broker.topics.get(TopicName(TOPIC))
    assert topic is not None
    for _ in range(2000):
        if sum(each.connected for each in topic.subscriptions.values()) == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"after ten seconds there are still others than {count} consumers connected")
