"""The web admin in a real browser, on a real cluster: clicked, tabbed through, made dark and narrow."""

from __future__ import annotations

import asyncio
import re
import shlex
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect

import pydanube
from pydanube.testing.ports import free_ports
from tests.e2e.clusters import ClusterProcesses, cluster_in
from tests.e2e.processes import BrokerProcess, danube_here, until
from tests.e2e.web_admin import aside, chromium, web_admin
from tests.pages import DOCS, blocks

pytestmark = pytest.mark.slow

expect.set_options(timeout=30_000)  # a busy machine is late by less

ORDERS = "/default/orders"
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
PAGES = (
    "/cluster",
    "/topics",
    f"/topics{ORDERS}",
    f"/topics{ORDERS}/subscriptions/billing",
    f"/topics{ORDERS}/messages",
    f"/topics{ORDERS}/messages?text=order&count=10",
    f"/topics{ORDERS}/publish",
    "/topics/default/clicks",
    "/subscriptions",
    "/connections",
    "/events",
    "/dead-letters",
    f"/dead-letters?topic={ORDERS}",
    "/namespaces",
    "/topics/new",
)


class WebSetup(NamedTuple):
    cluster: ClusterProcesses
    url: str
    browser: Browser


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebSetup]:
    directory = tmp_path_factory.mktemp("web")
    with cluster_in(directory) as cluster:
        asyncio.run(fill(cluster.url))
        with web_admin(directory, cluster[0].endpoint, cluster.url) as url, chromium() as browser:
            yield WebSetup(cluster, url, browser)


async def fill(url: str) -> None:
    async with pydanube.connect(url) as client:
        async with client.producer(ORDERS) as orders:
            for number in range(30):
                await orders.send(b'{"order": %d}' % number, key="k")
            await orders.send(EVIL.encode(), key=EVIL, attributes={EVIL: EVIL})
        async with client.consumer(ORDERS, subscription="billing", start="earliest"):
            pass
        for number in range(3):
            await client.create_topic(f"/default/topic-{number}")
        await client.create_topic("/default/clicks", partitions=2)


@pytest.fixture
def page(setup: WebSetup) -> Iterator[Page]:
    """Fails the test if a page broke one of its own rules: an exception, or something the policy forbids."""
    page = setup.browser.new_page(viewport={"width": 1200, "height": 900}, base_url=setup.url)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    yield page
    page.close()
    assert [each for each in complaints if "Failed to load resource" not in each] == []


def test_a_move_is_clicked_and_seen_to_finish(setup: WebSetup, page: Page) -> None:
    before = aside(setup.cluster.hosted, ORDERS)
    target = next(each for each in setup.cluster.brokers if each is not before)
    page.goto(f"/topics{ORDERS}")
    owner = page.locator(".owner .big")
    expect(owner).to_have_text(before.url.removeprefix("http://"))
    page.get_by_label("Move to which broker").select_option(target.broker_id)
    page.get_by_role("button", name="Move", exact=True).click()
    expect(page.locator(".operation")).to_have_class(re.compile("done"), timeout=30_000)
    expect(page.locator(".operation .steps .done")).to_have_count(7)
    expect(page.locator(".operation")).to_contain_text("publishers waited")
    expect(owner).to_have_text(target.url.removeprefix("http://"), timeout=15_000)
    history = page.get_by_role("region", name="Owner history")
    expect(history).to_contain_text(target.url.removeprefix("http://"), timeout=15_000)
    assert aside(setup.cluster.host, ORDERS) is target
    page.get_by_label("Move to which broker").select_option(before.broker_id)
    page.get_by_role("button", name="Move", exact=True).click()
    expect(owner).to_have_text(before.url.removeprefix("http://"), timeout=30_000)


def test_a_broker_is_drained_and_activated_by_clicks(setup: WebSetup, page: Page) -> None:
    broker = setup.cluster[2]
    address = broker.url.removeprefix("http://")
    page.goto("/cluster")
    row = page.get_by_role("region", name="Brokers").locator("tbody tr").filter(has_text=address)
    row.get_by_role("link", name="Drain").click()
    page.get_by_role("button", name="Drain this broker").click()
    page.wait_for_url("**/cluster")
    operation = page.locator(".operation").filter(has_text="Drain broker")
    expect(operation).to_have_class(re.compile("done"), timeout=30_000)
    expect(operation).to_contain_text("topics moved")
    expect(row).to_contain_text("drained", timeout=15_000)
    expect(row.locator("td.num").first).to_have_text("0", timeout=15_000)
    row.get_by_role("button", name="Activate").click()
    expect(page.get_by_role("status").filter(has_text="It is active")).to_be_visible(timeout=15_000)
    page.goto("/cluster")
    expect(row).to_contain_text("active", timeout=15_000)
    page.get_by_role("button", name="What would rebalancing move?").click()
    expect(page.get_by_role("status").filter(has_text=re.compile("would move|Nothing to move"))).to_be_visible(
        timeout=15_000
    )


def test_pages_stay_fresh_without_a_reload(setup: WebSetup, page: Page) -> None:
    page.goto("/topics")
    expect(page.get_by_role("link", name="/default/later")).to_have_count(0)
    search = page.get_by_label("Search topics")
    search.fill("half typed")
    aside(setup.cluster.admin, "topics", "create", "/default/later", "--dispatch-strategy", "reliable")
    expect(page.get_by_role("link", name="/default/later")).to_have_count(1, timeout=20_000)
    expect(search).to_have_value("half typed")
    expect(page.locator("#pulse")).to_have_text("live")


def test_messages_are_searched_followed_and_published_by_clicks(page: Page) -> None:
    page.goto(f"/topics{ORDERS}/messages")
    page.get_by_label("Payload contains").fill('"ORDER": 2')
    page.locator("select[name=count]").select_option("10")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#looked")).to_contain_text(
        "10 found in 29 messages"
    )  # 2, 20 and so on: not all were looked at
    expect(page.locator("details.message")).to_have_count(10)
    page.get_by_role("link", name="Go on").click()
    expect(page.locator("#looked")).to_contain_text("That is all of them")
    page.get_by_role("link", name="Follow").click()
    expect(page.locator("#looked")).to_contain_text("11 of the newest 31 messages match")
    first = page.locator("details.message").first
    first.locator("summary").click()
    with page.expect_response(lambda answer: "tail=1" in answer.url):
        pass
    expect(first).to_have_attribute("open", "")  # what somebody looks at stays open
    with page.expect_download() as started:
        page.goto(f"/topics{ORDERS}/messages?attribute=none")
        page.get_by_role("link", name="NDJSON").click()
    assert started.value.suggested_filename == "default.orders.0-30.ndjson"
    page.goto("/topics/default/topic-0/publish")
    page.get_by_label("Payload", exact=True).fill("by hand")
    page.get_by_role("button", name="Publish").click()
    expect(page.get_by_role("status").filter(has_text="It is stored: offset 0 of /default/topic-0.")).to_be_visible()


def test_charts_have_a_cursor_and_survive_a_refresh(page: Page) -> None:
    page.goto("/cluster?range=5m")
    canvas = page.locator(".plot.drawn .u-over").first
    expect(canvas).to_be_visible()
    with page.expect_response(lambda answer: answer.request.headers.get("x-fragment") == "live"):
        pass
    canvas.hover()
    expect(page.locator(".tip").first).to_contain_text(re.compile(r"\d\d:\d\d:\d\dZ +in "))
    expect(page.locator(".plot.drawn canvas")).to_have_count(1)


def test_numbers_and_units_never_break(setup: WebSetup) -> None:
    """Wherever they stand, and however narrow it is there: a number is one line high, and nothing of it is cut."""
    for width in (390, 1440):
        page = setup.browser.new_page(viewport={"width": width, "height": 900}, base_url=setup.url)
        try:
            for path in ("/cluster", f"/topics{ORDERS}", "/namespaces"):
                page.goto(path)
                broken = page.evaluate(
                    """() => {
                        const found = [];
                        const where = ".kpi dd:not(.note), .facts.tight dd, td.num:not(.pair)";
                        for (const each of document.querySelectorAll(where)) {
                            const first = each.firstChild;
                            if (first && first.nodeType === Node.TEXT_NODE && each.closest(".kpi, .facts"))
                                first.nodeValue = "10,485,760,000";
                            const range = document.createRange();
                            range.selectNodeContents(each);
                            const outer = each.parentElement.getBoundingClientRect();
                            const inner = range.getBoundingClientRect();
                            const line = parseFloat(getComputedStyle(each).lineHeight);
                            if (inner.height > 1.7 * line || (each.closest(".kpi") && inner.right > outer.right + 1))
                                found.push(each.textContent);
                        }
                        return found;
                    }"""
                )
                assert broken == [], (width, path)
        finally:
            page.close()


def test_a_script_in_a_message_stays_text(page: Page) -> None:
    for path in (f"/topics{ORDERS}/messages", f"/topics{ORDERS}/messages/30", f"/dead-letters?topic={ORDERS}"):
        page.goto(path)
        for details in page.locator("details.message").all():
            details.locator("summary").click()
        expect(page.locator("main")).to_contain_text("<script>document.title")
        assert page.locator("main script, main img").count() == 0
        assert "owned" not in page.title()


def test_a_topic_is_created_with_the_keyboard_alone(page: Page) -> None:
    page.goto("/cluster")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    topics = page.get_by_role("link", name="Topics", exact=True)
    expect(topics).to_be_focused()
    assert topics.evaluate("each => getComputedStyle(each).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**/topics")
    page.get_by_role("link", name="Create a topic").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/topics/new")
    expect(page.get_by_label("Name", exact=True)).to_be_focused()
    page.keyboard.type("typed")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="/default/typed was created.")).to_be_visible(timeout=15_000)


def test_no_page_scrolls_sideways_on_a_phone(setup: WebSetup) -> None:
    phone = setup.browser.new_page(viewport={"width": 390, "height": 844}, base_url=setup.url)
    try:
        for path in PAGES:
            phone.goto(path)
            wide = phone.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{path} is {wide} px too wide"
            cut = phone.evaluate(
                "Math.max(0, ...[...document.querySelectorAll('.table')].map(e => e.scrollWidth - e.clientWidth))"
            )
            assert cut <= 0, f"a table of {path} is {cut} px too wide: numbers are cut off"
            expect(phone.get_by_role("navigation", name="Main")).to_be_visible()
    finally:
        phone.close()


def test_dark_follows_the_system_and_the_switch_is_remembered(setup: WebSetup) -> None:
    def background(page: Page) -> str:
        found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    page = setup.browser.new_page(base_url=setup.url, color_scheme="dark")
    try:
        page.goto("/cluster")
        dark = background(page)
        page.get_by_role("button", name="Switch between light and dark").click()
        light = background(page)
        assert dark != light
        page.goto("/topics")
        assert background(page) == light
    finally:
        page.close()


def test_every_page_has_one_heading_labels_and_no_empty_names(setup: WebSetup, page: Page) -> None:
    """A little of what a screen reader needs."""
    for path in PAGES:
        page.goto(path)
        assert page.locator("h1").count() == 1, path
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, a, input:not([type=hidden]), select")].filter((each) =>
                !(each.textContent.trim() || each.getAttribute("aria-label") || (each.labels && each.labels.length
                && [...each.labels].some((label) => label.textContent.trim())))).map((each) => each.outerHTML)"""
        )
        assert nameless == [], path


def test_a_page_whose_broker_is_gone_goes_on_with_another_and_says_so_first(setup: WebSetup, page: Page) -> None:
    """The last one: the broker that the web admin was started with does not come back."""
    page.goto("/cluster")
    setup.cluster[0].kill()
    gone = setup.cluster[0].url.removeprefix("http://")
    banner = page.get_by_role("alert", name="What is wrong")
    expect(banner).to_contain_text(gone, timeout=20_000)
    expect(banner).to_have_class("banner bad")
    expect(page.get_by_role("definition").filter(has_text="2 of 3")).to_be_visible(timeout=20_000)
    status = aside(danube_here, "admin", "--endpoint", setup.cluster[1].endpoint, "status")
    assert status.returncode == 9 and "CRITICAL" in status.stdout and gone in status.stdout, status
    # Its lease runs out, others have its topics, and it is still listed.
    row = page.get_by_role("region", name="Brokers").locator("tbody tr").filter(has_text=gone)
    expect(row).to_contain_text("gone since", timeout=40_000)
    expect(row).to_contain_text("unknown")
    expect(banner).to_contain_text("is gone")

    def is_told() -> bool:
        return (
            "its lease ran out" in aside(danube_here, "admin", "--endpoint", setup.cluster[1].endpoint, "events").stdout
        )

    until(is_told, "event of the broker that is gone")  # the leader, perhaps a new one, writes it down


# --- beside a standalone broker -----------------------------------------------------------------------------


class Standalone(BrokerProcess):
    """With its pages, as somebody who tries it for the first time has it."""

    def __init__(self, directory: Path, web_addr: str) -> None:
        super().__init__(directory)
        self.web_addr = web_addr

    @property
    def command(self) -> list[str]:
        found = super().command
        return [self.web_addr if word == "off" else word for word in found]


def serve_as_the_page_says(directory: Path, broker: BrokerProcess) -> None:
    """Every `danube admin serve` of docs/web-admin.md, with this broker's address and a free port."""
    found = [command for block in blocks((DOCS / "web-admin.md").read_text()) for command in block.commands]
    commands = [shlex.split(each)[3:] for each in found if each.startswith("danube admin serve")]
    assert len(commands) == 3
    for words in commands:
        port = {"0.0.0.0:8080": "0.0.0.0:0", "127.0.0.1:8080": "127.0.0.1:0"}
        own = {"http://127.0.0.1:50051": broker.endpoint}
        flags = [port.get(word, own.get(word, word)) for word in words]
        with web_admin(directory, broker.endpoint, f"danube://127.0.0.1:{broker.stream_port}", *flags) as url:
            address = f"http://127.0.0.1:{url.rpartition(':')[2].strip('/')}"
            host = {"Host": "danube.example.com"} if "--allow-host" in words else {}
            with urllib.request.urlopen(urllib.request.Request(f"{address}/cluster", headers=host), timeout=20) as page:
                assert page.status == 200
            order = urllib.request.Request(f"{address}/namespaces/create", b"name=made-by-a-page", host)
            if "--read-only" in words:
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(order, timeout=20)


def test_a_standalone_broker_has_pages_and_runs_without_them_if_the_port_is_taken(tmp_path: Path) -> None:
    [port] = free_ports(1)
    with Standalone(tmp_path, f"127.0.0.1:{port}") as broker:
        text = broker.output.read_text()
        assert f"web      http://127.0.0.1:{port}" in text
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster", timeout=20) as answer:
            assert b"<h1>Cluster</h1>" in answer.read()
        serve_as_the_page_says(tmp_path, broker)
        assert broker.stop() == 0
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen()
            broker.start()
            said = [line for line in broker.output.read_text().splitlines() if "web admin not started" in line]
            assert len(said) == 1 and "WARNING" in said[0] and "taken" in said[0] and "--web-addr" in said[0]
            assert aside(broker.admin, "brokers", "list")
            assert broker.errors() == []
