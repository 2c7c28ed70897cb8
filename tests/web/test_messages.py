"""Messages in the web admin: searched, followed, downloaded, published by hand; and dead letters one by one."""

from __future__ import annotations

import csv
import functools
import io
import json
import re
from collections.abc import Iterator

import pytest

from pydanube.client.client import Client
from pydanube.client.search import FoundMessage
from pydanube.web import message_pages
from tests.web.pages import Answer, Web, opened
from tests.web.test_pages import poison

ORDERS = "/default/orders"
HERE = "/topics/default/orders/messages"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        web.run(fill(web.client))
        yield web


async def fill(client: Client) -> None:
    async with client.producer(ORDERS, name="shop") as orders:
        for number in range(60):
            await orders.send(
                b'{"order": %d, "city": "%s"}' % (number, b"Ulm" if number % 2 else b"Bonn"),
                key=f"customer-{number % 3}",
                attributes={"kind": "refund"} if number % 20 == 0 else {},
            )
        await orders.send(b"\xff\x00", key="=1+1", attributes={"<b>": "<script>alert('x')</script>"})
    await client.create_topic("/default/chatter", reliable=False)
    await client.create_topic("/default/copies")


def shown(page: Answer) -> list[int]:
    return [int(each) for each in re.findall(r'id="offset-(\d+)"', page.body)]


def test_messages_are_searched_by_key_attribute_and_text(web: Web) -> None:
    assert shown(web.get(f"{HERE}?key=customer-1&count=100"))[:3] == [1, 4, 7]
    assert shown(web.get(f"{HERE}?attribute=kind&text=bonn")) == [0, 20, 40]
    assert shown(web.get(f"{HERE}?attribute=kind%3Drefund&offset=1")) == [20, 40]
    one = web.get(f"{HERE}?text=%22order%22:+33,")
    assert shown(one) == [33] and "1 found in 61 messages" in one.text and "That is all of them" in one.text
    none = web.get(f"{HERE}?key=nobody")
    assert "None of them matches" in none.text and "0 found in 61 messages" in none.text
    assert "None of them" in web.get(f"{HERE}?until=2020-01-01T00:00").text
    wrong = web.get(f"{HERE}?until=tomorrow")
    assert wrong.status == 400 and "until" in wrong.text


def test_a_search_that_is_not_over_says_where_it_goes_on(web: Web) -> None:
    seen: list[int] = []
    path = f"{HERE}?text=ulm&count=10"
    while True:
        page = web.get(path)
        seen += shown(page)
        found = re.search(r'rel="next" href="([^"]+)"', page.body)
        if found is None:
            break
        assert "To be continued at offset" in page.text
        path = found[1].replace("&amp;", "&")
        assert "text=ulm" in path and "count=10" in path
    assert seen == list(range(1, 60, 2))


def test_following_shows_the_newest_first_and_asks_again_by_itself(web: Web) -> None:
    page = web.get(f"{HERE}?tail=1&count=10")
    assert shown(page) == list(range(60, 50, -1)) and " data-live" in page.body
    assert shown(web.get(f"{HERE}?tail=1&key=customer-2&count=2")) == [59, 56]
    assert " data-live" not in web.get(HERE).body
    part = web.get(f"{HERE}?tail=1&count=10", **{"x-fragment": "live"})
    assert shown(part) == shown(page) and "<html" not in part.body


def test_following_large_messages_shows_the_newest_and_not_the_oldest_of_the_last_thousand(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = functools.partial(message_pages.search, bytes_max=15_000)  # type: ignore[attr-defined]
    monkeypatch.setattr(message_pages, "search", bounded)
    page = web.get(f"{HERE}?tail=1&count=5")
    assert shown(page) == list(range(60, 55, -1)) and "not shown" not in page.text


def test_a_download_is_a_file_with_a_safe_name_and_exact_messages(web: Web) -> None:
    answer = web.get(f"{HERE}/download?format=ndjson&attribute=kind")
    assert answer.headers["content-disposition"] == 'attachment; filename="default.orders.0-60.ndjson"'
    assert answer.headers["x-danube-next-offset"] == "" and answer.headers["x-danube-messages"] == "3"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert [line["offset"] for line in lines] == [0, 20, 40]
    assert lines[1]["payload"] == '{"order": 20, "city": "Bonn"}' and lines[1]["attributes"] == {"kind": "refund"}
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", lines[0]["appended"])
    [last] = [json.loads(line) for line in web.get(f"{HERE}/download?offset=60").body.splitlines()]
    assert last["payload_base64"] == "/wA=" and last["key"] == "=1+1"
    rows = list(csv.DictReader(io.StringIO(web.get(f"{HERE}/download?format=csv&offset=59").body)))
    assert [row["offset"] for row in rows] == ["59", "60"]
    assert rows[1]["key"] == "'=1+1" and rows[1]["encoding"] == "base64"
    assert web.get(f"{HERE}/download?format=exe").status == 400


def test_a_download_that_is_bounded_says_where_the_next_one_begins(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_pages, "DOWNLOAD_FOUND_MAX", 25)
    seen, first = [], "0"
    while first:
        answer = web.get(f"{HERE}/download?offset={first}")
        seen += [json.loads(line)["offset"] for line in answer.body.splitlines()]
        first = answer.headers["x-danube-next-offset"]
    assert seen == list(range(61))


def test_a_tool_searches_as_the_page_does_and_goes_on_where_it_stopped(web: Web) -> None:
    path = "/ui/v1/topics/default/orders/messages?text=ulm&count=20"
    first = web.get(path).json
    assert [each["offset"] for each in first["messages"]] == list(range(1, 41, 2)) and first["next_offset"] == 40
    rest = web.get(f"{path}&offset={first['next_offset']}").json
    assert [each["offset"] for each in rest["messages"]] == list(range(41, 60, 2)) and rest["next_offset"] is None
    assert rest["messages"][0]["payload"] == '{"order": 41, "city": "Ulm"}'
    assert web.get("/ui/v1/topics/default/nothing/messages").status == 404
    assert web.get("/ui/v1/topics/default/orders/messages?count=9999").status == 400


def test_a_file_name_never_ends_the_header_or_names_a_folder() -> None:
    assert message_pages.safe_file_name('a"; x=\r\n../b') == "a___x___.._b"
    assert message_pages.safe_file_name("..") == "messages"


def test_only_text_that_could_be_a_formula_is_changed_in_a_csv() -> None:
    found = [FoundMessage(1, b"plain", 0, 0, "@shop", "k", {})]
    assert message_pages.as_csv(found).splitlines()[1].endswith(",'@shop,k,,utf-8,plain")


def test_what_is_searched_for_stays_text(web: Web) -> None:
    evil = "%3Cscript%3Ealert('x')%3C/script%3E"
    for path in (f"{HERE}?text={evil}", f"{HERE}?key={evil}", f"{HERE}?attribute={evil}", f"{HERE}?tail=1"):
        page = web.get(path)
        assert page.status == 200 and "<script>alert" not in page.body, path


def test_a_message_is_published_by_hand_and_shown_where_it_is(web: Web) -> None:
    assert "Publish a message" in web.get("/topics/default/orders/publish").text
    page = web.post(
        "/topics/default/orders/publish", payload="two\r\nlines", key="by-hand", attributes="a=1\n b = x=y "
    )
    assert "It is stored: offset 61 of /default/orders." in page.text and "Offset 61" in page.text
    assert "two\nlines" in page.body and "by-hand" in page.text and "x=y" in page.text
    bytes_page = web.post("/topics/default/orders/publish", payload="/wA=", encoding="base64")
    assert "offset 62" in bytes_page.text and "as hex" in bytes_page.text
    wrong = web.post("/topics/default/orders/publish", payload="???", encoding="base64")
    assert "no base64" in wrong.text and 'class="flash failed"' in wrong.body
    assert "name=value" in web.post("/topics/default/orders/publish", payload="x", attributes="oops").text
    assert "not reliable: only who is connected" in web.post("/topics/default/chatter/publish", payload="x").text
    assert 'class="flash failed"' in web.post("/topics/default/nothing/publish", payload="x").body


def test_publishing_is_refused_from_another_site(web: Web) -> None:
    answer = web.request("POST", "/topics/default/orders/publish", b"payload=x", {"origin": "http://evil.example"})
    assert answer.status == 403


# --- dead letters -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def letters(web: Web) -> str:
    web.run(poison(web))
    here = "/dead-letters?topic=%2Fdefault%2Fjobs-dlq"
    web.until(here, "2 dead letters kept")
    return here


def test_dead_letters_are_grouped_copied_discarded_and_retried_one_by_one(web: Web, letters: str) -> None:
    web.site.gateway.forget()
    page = web.get(letters)
    assert "By reason" in page.text and "no stock from /default/jobs work 2" in page.text
    copied = web.post("/dead-letters/copy", topic="/default/jobs-dlq", offset="1", to="/default/copies")
    assert "Copied to offset 0 of /default/copies" in copied.text and "still open" in copied.text
    copy = web.get("/topics/default/copies/messages/0")
    assert "two" in copy.text and "x-copied-from /default/jobs-dlq 1" in copy.text
    for to in ("/default/jobs-dlq", "nothing", "/default/unknown"):
        refused = web.post("/dead-letters/copy", topic="/default/jobs-dlq", offset="1", to=to)
        assert 'class="flash failed"' in refused.body, to

    gone = web.post("/dead-letters/discard", topic="/default/jobs-dlq", offset="1")
    assert "1 dead letter was discarded" in gone.text and "until retention takes them" in gone.text
    assert shown(gone) == [0] and "no stock from /default/jobs work 1" in gone.text
    every = web.get(f"{letters}&all=1")
    assert shown(every) == [1, 0] and "discarded" in every.text
    again = web.post("/dead-letters/discard", topic="/default/jobs-dlq", offset="1")
    assert "Nothing was discarded" in again.text
    assert web.run(web.client.describe_topic("/default/jobs-dlq")).head == 2  # the log keeps it

    web.post("/dead-letters/redrive", topic="/default/jobs-dlq", dry_run="0", first="0", end="0")
    web.until(letters, "1 dead letter sent")
    web.post("/dead-letters/redrive", topic="/default/jobs-dlq", dry_run="0")
    assert "0 dead letters sent" in web.until(letters, "0 dead letters sent").text  # neither the retried nor the other
    assert web.run(web.client.describe_topic("/default/jobs")).head == 3
    assert "Every letter on this page was redriven or discarded" in web.get(letters).text
    told = "Redrive letters: topic /default/jobs-dlq, count 1"
    for order in (told, "Discard letters: topic /default/jobs-dlq, count 1", "Copy letter: topic /default/jobs-dlq"):
        web.until("/events", order)
    assert web.get("/events").text.count("Redrive letters") == 1  # that which found none sent nothing


def test_a_group_is_discarded_by_its_exact_reason(web: Web) -> None:
    web.run(send_letters(web.client))
    here = "/dead-letters?topic=%2Fdefault%2Fmail-dlq"
    assert "no stock left from /default/mail work 1" in web.get(here).text
    page = web.post(
        "/dead-letters/discard", topic="/default/mail-dlq", reason_is="no stock", subscription="work", before="4"
    )
    assert "2 dead letters were discarded" in page.text and shown(page) == [3, 2]
    assert (
        "the offset of a dead letter, or the reason"
        in web.post("/dead-letters/discard", topic="/default/mail-dlq").text
    )


async def send_letters(client: Client) -> None:
    """As a broker writes them."""
    async with client.producer("/default/mail-dlq") as dead:
        for reason, subscription in (
            ("no stock", "work"),
            ("no stock", "work"),
            ("no stock left", "work"),
            ("no stock", "b"),
        ):
            await dead.send(
                b"x",
                attributes={
                    "x-original-topic": "/default/mail",
                    "x-original-subscription": subscription,
                    "x-original-topic-offset": "0",
                    "x-failure-reason": reason,
                },
            )
