"""What each page of the web admin says, and what its forms do, on a real broker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pydanube.admin import calls
from pydanube.admin.gateway import Gateway
from pydanube.admin.sampler import Sampler
from pydanube.client.client import Client
from pydanube.errors import TopicUnknown
from pydanube.web.operations import Operations
from pydanube.web.site import Site
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from tests.web.pages import Web, opened

ORDERS = "/default/orders"
EVIL = "<script>alert('x')</script>"
HIDDEN = "&lt;script&gt;alert("


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        web.run(fill(web.client))
        web.sample()
        yield web


async def fill(client: Client) -> None:
    """Forty orders, a subscription that has done ten of them, and one message that wants to be a script."""
    await client.create_topic("/default/evil")
    await client.create_topic("/default/chatter", reliable=False)
    async with client.producer(ORDERS, name="shop") as orders:
        for number in range(40):
            await orders.send(b'{"order": %d, "city": "Ulm"}' % number, key=f"customer-{number % 3}")
    async with client.consumer(ORDERS, subscription="billing", type="exclusive", start="earliest") as billing:
        done = 0
        async for message in billing:
            await message.ack()
            done += 1
            if done == 10:
                break
        await billing.flush()
    async with client.producer("/default/evil", name=EVIL.replace("/", "")) as evil:
        await evil.send(EVIL.encode(), key=EVIL, attributes={EVIL: EVIL})
        await evil.send(bytes(range(256)))
        await evil.send("grüß dich\n".encode())
    async with client.consumer("/default/evil", subscription="<b>bold", start="earliest"):
        pass


# --- looking --------------------------------------------------------------------------------------------


def test_the_cluster_page_shows_brokers_numbers_and_who_is_behind(web: Web) -> None:
    page = web.get("/")
    assert page.status == 200
    assert web.broker.grpc_url.removeprefix("http://") in page.text
    assert "Topics 3" in page.text and "active" in page.text
    assert ORDERS in page.text and "30" in page.text
    assert "Drain" not in page.text and "Rebalance" not in page.text  # it is alone


def test_topics_are_searched_sorted_and_counted(web: Web) -> None:
    assert "3 topics" in web.get("/topics").text
    found = web.get("/topics?q=ORD")
    assert ORDERS in found.text and "evil" not in found.text and "1 of 3 topics" in found.text
    by_lag = web.get("/topics?sort=lag").text
    assert by_lag.index(ORDERS) < by_lag.index("/default/evil") < by_lag.index("/default/chatter")
    assert "No topic matches" in web.get("/topics?q=nothing-like-it").text
    assert "non-reliable" in web.get("/topics?q=chatter").text


def test_a_topic_page_shows_its_subscriptions_with_the_sentence_and_where_its_messages_are(web: Web) -> None:
    page = web.get("/topics/default/orders")
    assert "billing" in page.text and "30 messages" in page.text
    explained = web.run(web.site.gateway.ask(calls.explain(ORDERS, "billing")))
    assert explained.sentence.split(". ")[0] in page.text  # what follows may tell ages
    assert "Disk 40" in page.text and "Memory 40" in page.text and "0…39" in page.text
    assert "It has not moved" in page.text and "alone keeps all its topics" in page.text


def test_a_non_reliable_topic_has_no_lag_no_tiers_and_no_messages_to_look_at(web: Web) -> None:
    page = web.get("/topics/default/chatter")
    assert page.status == 200 and "Where its messages are" not in page.text and "Messages</a>" not in page.body
    refused = web.get("/topics/default/chatter/messages")
    assert refused.status == 409 and "is not reliable" in refused.text


def test_a_subscription_page_shows_window_policy_and_seek(web: Web) -> None:
    page = web.get("/topics/default/orders/subscriptions/billing")
    assert "acknowledged up to 9" in page.text and "exclusive" in page.text
    assert "No failure policy is set" in page.text and "Seek" in page.text
    missing = web.get("/topics/default/orders/subscriptions/nobody")
    assert missing.status == 400 and "one of topic /default/orders: billing" in missing.text


def test_a_broker_page_shows_its_topics_and_addresses(web: Web) -> None:
    [broker] = web.run(web.site.gateway.brokers())
    page = web.get(f"/brokers/{broker.broker_id}")
    assert broker.admin_addr in page.text and ORDERS in page.text
    assert web.get("/brokers/1").status == 404


def test_what_does_not_exist_is_a_sentence_and_not_a_trace(web: Web) -> None:
    for path in ("/topics/default/nothing", "/nowhere", "/topics/a..b/c", "/topics/default/orders/messages/x"):
        page = web.get(path)
        assert page.status in (400, 404), path
        assert "Traceback" not in page.body and ".py" not in page.body
        assert "<h1>" in page.body


@pytest.mark.parametrize("path", ["/topics/default/orders", "/topics", "/ui/v1/topics/default/orders"])
def test_a_mistake_in_a_page_is_a_sentence_for_the_reader_and_a_trace_in_the_log(
    web: Web, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def mistaken(*_: object, **__: object) -> None:
        raise KeyError("secret of the inside")

    monkeypatch.setattr(Gateway, "ask", mistaken)
    monkeypatch.setattr(Gateway, "topics", mistaken)
    for headers in ({}, {"x-fragment": "live"}):
        caplog.clear()
        page = web.get(path, **headers)
        assert page.status == 500
        assert "something went wrong in the web admin itself; its log says what" in page.text
        assert "secret" not in page.body and "KeyError" not in page.body and ".py" not in page.body
        assert ("<h1>" in page.body) == (not headers and not path.startswith("/ui/"))
        [line] = [each for each in caplog.records if each.levelname == "ERROR"]
        assert line.getMessage() == "page failed" and getattr(line, "path", None) == path
        assert line.exc_info is not None and isinstance(line.exc_info[1], KeyError)


def test_a_mistake_in_an_action_is_a_sentence_too(
    web: Web, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def mistaken(*_: object, **__: object) -> None:
        raise KeyError("secret of the inside")

    monkeypatch.setattr(Gateway, "ask", mistaken)
    page = web.post("/namespaces/create", name="later")
    assert page.status == 500 and "its log says what" in page.text and "secret" not in page.body
    assert web.order("/ui/v1/topics/actions", action="delete", topic=ORDERS).status == 500
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == ["page failed"] * 2


def test_without_any_broker_a_page_says_that_nobody_answers(web: Web) -> None:
    async def lonely() -> Site:
        gateway = Gateway("http://127.0.0.1:1", cache_seconds=0.0)
        return Site(gateway, Sampler(gateway.brokers), Operations())

    site = web.run(lonely())
    try:
        alone = Web(web._thread, site, web.broker, web.client)
        page = alone.get("/cluster")
        assert page.status == 503 and "Nobody answers" in page.text and "127.0.0.1:1" in page.text
        assert "danube broker" in page.text  # what to do
        alone.sample()
        assert "nobody answers there" in site.sampler.unreachable
    finally:
        web.run(site.gateway.close())


def test_asked_for_the_part_that_changes_a_page_answers_with_that_part(web: Web) -> None:
    whole, part = web.get("/topics"), web.get("/topics", **{"x-fragment": "live"})
    assert part.status == 200 and ORDERS in part.body
    assert "<html" in whole.body and "<html" not in part.body and part.body.strip() in whole.body
    gone = web.get("/topics/default/nothing", **{"x-fragment": "live"})
    assert gone.status == 404 and gone.headers["content-type"].startswith("text/plain")


def test_charts_have_a_time_range_that_works_without_a_script(web: Web) -> None:
    page = web.get("/topics/default/orders?range=1h&x=%22%3E")
    assert 'href="/topics/default/orders?x=%22%3E&amp;range=6h"' in page.body
    assert re.search(r'range=1h" aria-current="true">1h</a>', page.body)
    assert "<svg" in page.body
    assert re.search(r'range=15m" aria-current="true">', web.get("/cluster?range=nonsense").body)


# --- messages ---------------------------------------------------------------------------------------------


def test_messages_are_found_by_offset_and_turned_over_by_page(web: Web) -> None:
    newest = web.get("/topics/default/orders/messages?count=10")
    assert '"order": 39' in newest.text and '"order": 29' not in newest.text
    assert "offset=20&amp;count=10" in newest.body
    assert "customer-0" in newest.text and "shop" in newest.text
    middle = web.get("/topics/default/orders/messages?count=10&offset=20")
    assert '"order": 20' in middle.text and '"order": 29' in middle.text and '"order": 30' not in middle.text
    refused = web.get("/topics/default/orders/messages?offset=4000")
    assert refused.status == 400 and "4000" in refused.text


def test_messages_are_found_by_time(web: Web) -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat(timespec="seconds").replace("+00:00", "")
    assert "There is no message at these offsets" in web.get(f"/topics/default/orders/messages?time={tomorrow}").text
    assert '"order": 0' in web.get("/topics/default/orders/messages?time=2020-01-01T00:00:00").text
    wrong = web.get("/topics/default/orders/messages?time=yesterday")
    assert wrong.status == 400 and "2026-11-15T09:00:00Z" in wrong.text


def test_a_payload_is_shown_as_what_it_is_or_as_asked(web: Web) -> None:
    assert "{\n  &#34;order&#34;: 7," in web.get("/topics/default/orders/messages/7").body
    assert "as hex" in web.get("/topics/default/orders/messages/7?as=hex").text
    binary = web.get("/topics/default/evil/messages/1")
    assert "as hex" in binary.text and "00000000 00 01 02 03" in binary.text
    assert "grüß dich" in web.get("/topics/default/evil/messages/2").text


def test_a_script_in_a_payload_a_key_a_name_or_an_attribute_stays_text(web: Web) -> None:
    for path in (
        "/topics/default/evil",
        "/topics/default/evil/messages",
        "/topics/default/evil/messages/0",
        "/topics/default/evil/messages/0?as=text",
        "/dead-letters?topic=/default/evil",
        "/topics/default/evil/subscriptions/%3Cb%3Ebold",
        f"/topics?q={EVIL}",
        f"/topics?namespace={EVIL}&state={EVIL}",
        f"/topics/default/{EVIL.replace('/', '')}",
        f"/nowhere/{EVIL}",
    ):
        page = web.get(path)
        assert "<script>alert" not in page.body and "<b>bold" not in page.body, path
    messages = web.get("/topics/default/evil/messages").body
    assert messages.count(HIDDEN) >= 4  # payload, key, attribute, producer
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")


# --- doing ------------------------------------------------------------------------------------------------


def test_a_topic_is_created_and_deleted_only_if_its_name_was_typed(web: Web) -> None:
    page = web.post("/topics/new", namespace="default", name="fresh", dispatch="reliable", partitions="")
    assert "/default/fresh was created." in page.text
    again = web.post("/topics/new", namespace="default", name="fresh", dispatch="reliable")
    assert "exists" in again.text and again.status == 200
    bad = web.post("/topics/new", namespace="default", name="a b", dispatch="reliable")
    assert "letters, digits" in bad.text
    assert "Type /default/fresh to delete it" in web.post("/topics/default/fresh/delete", confirm="fresh").text
    assert "was deleted" in web.post("/topics/default/fresh/delete", confirm="/default/fresh").text
    with pytest.raises(TopicUnknown):
        web.run(web.client.describe_topic("/default/fresh"))
    assert "was deleted" not in web.get("/topics").text  # it is said once


def test_a_partitioned_topic_is_one_thing_with_its_partitions(web: Web) -> None:
    page = web.post("/topics/new", namespace="default", name="wide", dispatch="reliable", partitions="3")
    assert "with 3 partitions" in page.text and "<h1>/default/wide</h1>" in page.body
    web.run(spread(web.client))
    web.sample()
    page = web.get("/topics/default/wide")
    assert page.status == 200 and all(f"/default/wide-part-{number}" in page.text for number in range(3))
    assert "Lag 30 messages" in page.text and "behind 30 messages" in page.text
    assert re.search(r"reader (ok|idle) [\d.,]+ 30 0 1 2", page.text)
    listed = web.get("/topics")
    assert "4 topics" in listed.text
    assert re.search(r"/default/wide 3 partitions (ok|idle) [\d.,]+ [\d.,]+ 30", listed.text)
    assert listed.text.count("/default/wide-part-1") == 1 and "its partitions" in listed.text
    assert "1 of 4 topics" in web.get("/topics?q=wide-part-1").text
    partition = web.get("/topics/default/wide-part-1")
    assert 'href="/topics/default/wide"' in partition.body
    messages = web.get("/topics/default/wide/messages?count=10")
    assert "/default/wide-part-0 ·" in messages.text and 'aria-label="Partitions"' in messages.body
    stored = web.post("/topics/default/wide/publish", payload="by hand", key="k")
    assert re.search(r"stored: offset \d+ of /default/wide-part-\d", stored.text)
    assert "All its 3 partitions go together" in web.get("/topics/default/wide-part-2/delete").text
    assert "was deleted" in web.post("/topics/default/wide/delete", confirm="/default/wide").text
    assert web.get("/topics/default/wide").status == 404


async def spread(client: Client) -> None:
    async with client.producer("/default/wide") as wide:
        for number in range(30):
            await wide.send(b"x", key=f"{number}")
    async with client.consumer("/default/wide", subscription="reader", start="earliest"):
        pass


def test_a_subscription_goes_where_it_is_told(web: Web) -> None:
    here = "/topics/default/orders/subscriptions/billing"
    assert "goes on at offset 0" in web.post(f"{here}/seek", to="earliest").text
    assert "goes on at offset 40" in web.post(f"{here}/seek", to="latest").text
    assert "goes on at offset 0" in web.post(f"{here}/seek", to="time", time="2020-01-01T00:00").text
    beyond = web.post(f"{here}/seek", to="offset", offset="999")
    assert "999" in beyond.text and 'class="flash failed"' in beyond.body
    assert "earliest, latest, offset or time" in web.post(f"{here}/seek", to="").text
    assert "goes on at offset 10" in web.post(f"{here}/seek", to="offset", offset="10").text
    assert web.run(web.client.lag(ORDERS, "billing")).messages == 30


def test_tile_legend_and_state_of_a_page_say_one_number_right_after_a_seek(web: Web) -> None:
    """The samples are older than the seek; nothing on the page may be."""
    here = "/topics/default/orders/subscriptions/billing"
    web.post(f"{here}/seek", to="latest")
    web.sample()
    web.post(f"{here}/seek", to="offset", offset="3")
    page = web.get(here)
    assert "Lag 37 messages" in page.text and "behind 37 messages" in page.text
    topic = web.get("/topics/default/orders")
    assert "Lag 37 messages" in topic.text and "behind 37 messages" in topic.text
    assert "lagging" not in topic.text and re.search(r"billing (ok|idle) [\d.,]+ 37", topic.text)
    web.post(f"{here}/seek", to="offset", offset="10")


def test_a_subscription_is_removed_only_if_its_name_was_typed(web: Web) -> None:
    here = "/topics/default/evil/subscriptions/%3Cb%3Ebold"
    assert "Type <b>bold to remove it" in web.post(f"{here}/delete", confirm="bold").text
    assert "was removed" in web.post(f"{here}/delete", confirm="<b>bold").text


def test_a_move_that_is_refused_says_why(web: Web) -> None:
    web.post("/topics/default/orders/move", to="")
    page = web.until("/topics/default/orders", "failed")
    assert "Move /default/orders" in page.text
    [operation, *_] = web.site.operations.of("move")
    assert operation.failure and operation.failure in page.text


def test_namespaces_are_created_and_deleted(web: Web) -> None:
    assert "Namespace staging was created" in web.post("/namespaces/create", name="staging").text
    assert "staging" in web.get("/namespaces").text
    assert "Namespace staging was deleted" in web.post("/namespaces/delete", name="staging").text
    assert 'class="flash failed"' in web.post("/namespaces/delete", name="default").body


def test_dead_letters_are_shown_tried_and_redriven(web: Web) -> None:
    web.run(poison(web))
    listed = web.get("/dead-letters")
    assert "/default/jobs-dlq" in listed.text
    here = "/dead-letters?topic=%2Fdefault%2Fjobs-dlq"
    page = web.until(here, "2 dead letters kept")
    assert "no stock" in page.text and "From /default/jobs offset 0 , after 1 delivery." in page.text
    web.post("/dead-letters/redrive", topic="/default/jobs-dlq", reason="STOCK", dry_run="1")
    tried = web.until(here, "would be sent")
    assert "2 dead letters would be sent" in tried.text and "to /default/jobs 2" in tried.text
    assert web.run(web.client.describe_topic("/default/jobs")).head == 2
    web.post("/dead-letters/redrive", topic="/default/jobs-dlq", end="0", dry_run="0")
    web.until(here, "1 dead letter sent")
    assert web.run(web.client.describe_topic("/default/jobs")).head == 3


async def poison(web: Web) -> None:
    """Two jobs that fail at once."""
    client = web.client
    await client.create_topic("/default/jobs")
    await client.create_topic("/default/jobs-dlq")
    policy = pb.SubscriptionFailurePolicy(
        max_redelivery_count=0,
        ack_timeout_ms=30_000,
        base_redelivery_delay_ms=1,
        max_redelivery_delay_ms=1,
        dead_letter_topic="/default/jobs-dlq",
        poison_policy=pb.DeadLetter,
    )
    await web.site.gateway.ask(calls.set_failure_policy("/default/jobs", "work", policy))
    async with client.producer("/default/jobs") as jobs:
        await jobs.send(b"one")
        await jobs.send(b"two")
    async with client.consumer("/default/jobs", subscription="work", start="earliest") as work:
        failed = 0
        async for message in work:
            await message.nack(reason="no stock")
            failed += 1
            if failed == 2:
                break
        await work.flush()
