"""Metrics as a scrape prints them, and log lines as an operator reads them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pydanube.core.dispatch.lag import Standing
from pydanube.telemetry import JsonLines, Telemetry, TextLines, configure_logging
from tests.harness.servers import TOPIC, Calls, served

FOUR = (
    "danube_subscription_lag_messages",
    "danube_subscription_lag_detected_total",
    "danube_dispatcher_heartbeat_polls_total",
    "danube_dispatcher_notifier_polls_total",
)
Sample = tuple[str, tuple[tuple[str, str], ...]]


async def http(address: str, request: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split(" ")[1]), body


async def get(calls: Calls, path: str) -> tuple[int, str]:
    return await http(calls.servers.metrics_addr, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")


async def scrape(calls: Calls) -> dict[Sample, float]:
    code, text = await get(calls, "/metrics")
    assert code == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels.pop("broker", None) for sample in samples} == {str(calls.broker.broker_id)}
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def of_subscription(name: str, subscription: str = "s", topic: str = TOPIC) -> Sample:
    return name, (("subscription", subscription), ("topic", topic))


def of_topic(name: str, topic: str = TOPIC) -> Sample:
    return name, (("topic", topic),)


# --- metrics ------------------------------------------------------------------------------------------


@served()
async def test_the_four_series_of_a_subscription_are_there_at_0_from_its_creation_until_its_end(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe()
    found = await scrape(calls)
    assert [found[of_subscription(name)] for name in FOUR] == [0, 0, 0, 0]
    topic = calls.broker.topics.get(TOPIC)  # type: ignore[arg-type]
    assert topic is not None
    await calls.broker.topics.delete(topic.name)
    found = await scrape(calls)
    assert not [sample for sample in found if ("topic", TOPIC) in sample[1]]


@served()
async def test_lag_is_right_with_no_consumer_and_while_acks_are_pending(calls: Calls) -> None:
    identity = await calls.create_producer()
    consumer = await calls.subscribe()
    stream = calls.receive(consumer)
    await stream.initial_metadata()
    for _ in range(3):
        await calls.send(identity)
    lag = of_subscription("danube_subscription_lag_messages")
    messages = [await stream.read() for _ in range(3)]
    assert (await scrape(calls))[lag] == 3  # all delivered, none acknowledged
    await calls.ack(messages[0])
    assert (await scrape(calls))[lag] == 2
    stream.cancel()
    for _ in range(20):
        await asyncio.sleep(0.005)
    await calls.send(identity)
    assert (await scrape(calls))[lag] == 3


@served()
async def test_what_goes_in_and_out_is_counted(calls: Calls) -> None:
    identity = await calls.create_producer()
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    for _ in range(4):
        await calls.send(identity, b"12345")
        await stream.read()
    found = await scrape(calls)
    assert found[of_topic("danube_topic_messages_in_total")] == 4
    assert found[of_topic("danube_topic_bytes_in_total")] == 20
    assert found[of_topic("danube_topic_active_producers")] == 1
    assert found[of_topic("danube_topic_active_subscriptions")] == 1
    assert found[of_topic("danube_topic_active_consumers")] == 1
    assert found[of_subscription("danube_consumer_messages_out_total")] == 4
    assert found[of_subscription("danube_dispatcher_notifier_polls_total")] >= 1
    assert found[of_topic("danube_producer_send_latency_ms_count")] == 4
    sends = ("danube_producer_send_total", (("error_code", "OK"), ("result", "ok"), ("topic", TOPIC)))
    assert found[sends] == 4
    rpc = ("danube_broker_rpc_total", (("method", "send_message"), ("result", "ok"), ("service", "producer")))
    assert found[rpc] == 4
    assert found[("danube_broker_topics_owned", ())] == 1
    assert found[("process_resident_memory_bytes", ())] > 0
    stream.cancel()


@served()
async def test_a_refused_send_is_counted_by_its_code(calls: Calls) -> None:
    identity = await calls.create_producer()
    with pytest.raises(Exception, match="9999"):
        await calls.send(identity, publish_time=1 << 60)
    labels = (("error_code", "InvalidArgument"), ("result", "error"), ("topic", TOPIC))
    assert (await scrape(calls))[("danube_producer_send_total", labels)] == 1


def test_names_with_quotes_and_line_feeds_make_no_series_of_their_own() -> None:
    telemetry = Telemetry()
    odd = 'x\\"} 7\nforged 1'
    telemetry.subscription("/default/a", odd).lag_detected.inc()
    families = text_string_to_metric_families(telemetry.snapshot().text().decode())
    [family] = [each for each in families if each.name == "danube_subscription_lag_detected"]
    assert [sample.labels["subscription"] for sample in family.samples] == [odd]


@pytest.mark.parametrize("broker", ["", "17"])
def test_the_text_is_what_the_general_exporter_would_print(broker: str) -> None:
    telemetry = Telemetry()
    telemetry.broker = broker
    telemetry.subscription("/default/a", "s", lambda: Standing(head=9, next_unacked=2, lag=7, undispatched=7))
    telemetry.subscription("/default/b", "é").exhausted["Drop"] += 2
    telemetry.subscription("/default/b", '%s {} "\\n').delivered.inc(3)
    telemetry.topic("/default/a").send_latency.observe(0.003)
    telemetry.topic("/default/b").send_errors["InvalidArgument"] += 1
    telemetry.rpc("producer", "send_message").ok.inc()

    def values(text: bytes) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
        return {
            (sample.name, frozenset(sample.labels.items()), 0 if sample.name.startswith("process_") else sample.value)
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }

    assert values(telemetry.snapshot().text()) == values(generate_latest(telemetry.registry))


def test_a_subscription_that_is_made_again_begins_at_0_and_two_brokers_do_not_mix() -> None:
    one, other = Telemetry(), Telemetry()
    one.subscription("/default/a", "s").notifier_polls.inc(5)
    assert other.subscription("/default/a", "s").notifier_polls.value == 0
    one.forget_subscription("/default/a", "s")
    assert one.subscription("/default/a", "s").notifier_polls.value == 0


def test_the_registry_is_the_telemetrys_own() -> None:
    telemetry = Telemetry()
    telemetry.subscription("/default/a", "s", lambda: Standing(head=9, next_unacked=2, lag=7, undispatched=7))
    value = telemetry.registry.get_sample_value(
        "danube_subscription_lag_messages", {"topic": "/default/a", "subscription": "s"}
    )
    assert value == 7


def test_a_latency_is_counted_in_every_bucket_that_holds_it() -> None:
    telemetry = Telemetry()
    for seconds in (0.0001, 0.003, 99.0):
        telemetry.topic("/default/a").send_latency.observe(seconds)
    buckets = dict(telemetry.topic("/default/a").send_latency.copy().cumulative())
    assert (buckets["0.5"], buckets["2.0"], buckets["5.0"], buckets["5000.0"], buckets["+Inf"]) == (1, 1, 2, 2, 3)


# --- the HTTP server ------------------------------------------------------------------------------------


@served()
async def test_health_is_live_and_ready_until_the_servers_close(calls: Calls) -> None:
    assert await get(calls, "/health/live") == (200, "live\n")
    assert await get(calls, "/health/ready?verbose=1") == (200, "ready\n")
    assert (await get(calls, "/"))[0] == 404


@pytest.mark.parametrize(
    ("request_text", "code"),
    [("POST /metrics HTTP/1.1\r\n\r\n", 405), ("nonsense\r\n\r\n", 400), ("GET /metrics SMTP\r\n\r\n", 400)],
)
@served()
async def test_what_is_no_get_is_refused(calls: Calls, request_text: str, code: int) -> None:
    assert (await http(calls.servers.metrics_addr, request_text))[0] == code


@served()
async def test_a_request_that_is_too_long_is_cut_off_and_the_server_stays_open(calls: Calls) -> None:
    host, _, port = calls.servers.metrics_addr.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /" + b"x" * 100_000)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    assert (await get(calls, "/health/live"))[0] == 200


# --- log lines ----------------------------------------------------------------------------------------


@pytest.fixture
def say() -> Iterator[Callable[[logging.Formatter], Callable[..., str]]]:
    stream = io.StringIO()
    logger = logging.getLogger("pydanube.broker.topics")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)

    def choose(formatter: logging.Formatter) -> Callable[..., str]:
        handler.setFormatter(formatter)

        def speak(phrase: str, **fields: object) -> str:
            failed = fields.pop("exc_info", None)
            logger.error(phrase, extra=fields, exc_info=failed)  # type: ignore[arg-type]
            return stream.getvalue()

        return speak

    yield choose
    logger.removeHandler(handler)


def test_a_line_is_a_phrase_and_fields(say: Callable[[logging.Formatter], Callable[..., str]]) -> None:
    line = say(TextLines())("topic opened", topic="/default/orders", epoch=3, why='no "room" left', empty="")
    moment, _, rest = line.partition(" ")
    assert moment.endswith("Z")
    assert rest == (
        'ERROR broker.topics: topic opened topic=/default/orders epoch=3 why="no \\"room\\" left" empty=""\n'
    )


def test_a_value_cannot_forge_a_line(say: Callable[[logging.Formatter], Callable[..., str]]) -> None:
    assert say(TextLines())("x", who="a\n2026 ERROR forged").count("\n") == 1


def test_a_line_may_be_json(say: Callable[[logging.Formatter], Callable[..., str]]) -> None:
    line = json.loads(say(JsonLines())("topic opened", topic="/default/orders", epoch=3, exc_info=ValueError("odd")))
    assert (line["message"], line["level"], line["topic"], line["epoch"]) == (
        "topic opened",
        "ERROR",
        "/default/orders",
        3,
    )
    assert "ValueError: odd" in line["traceback"]


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_no_line_shows_a_secret(
    say: Callable[[logging.Formatter], Callable[..., str]], formatter: logging.Formatter
) -> None:
    line = say(formatter)("store opened", secret_key="hush1", url="s3://me:hush2@host/x", edge_token="hush3", key="k1")
    assert "hush" not in line
    assert line.count("(hidden)") == 3 and "host/x" in line and "k1" in line


def test_logging_is_configured_once_more_without_doubling_lines() -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        stream = io.StringIO()
        for _ in range(2):
            configure_logging(level="info", stream=stream)
        logging.getLogger("pydanube.x").info("hello")
        assert stream.getvalue().count("hello") == 1
    finally:
        root.handlers[:] = before
        root.setLevel(level)
