"""The cluster page during an outage: what is wrong stands first, and nothing that is not known looks like a number."""

from __future__ import annotations

import re

import pydanube
from tests.rooms.clustered import Town
from tests.rooms.web.pages import Answer, opened_town


def test_a_broker_that_does_not_answer_is_said_in_red_and_its_share_is_unknown() -> None:
    with opened_town(2) as (browser, town):
        browser.run(town.create("/default/here", on=1))
        browser.run(town.create("/default/there", on=2))
        browser.run(_subscribe(town, "/default/there"))
        browser.sample()
        healthy = browser.until("/cluster", "Topics 2")
        assert "does not answer" not in healthy.text and "nobody lags" in healthy.text
        silent = town.node(2)
        browser.run(silent.doors._admin.stop(None))
        browser.run(silent.doors._metrics.close())
        browser.site.gateway.forget()
        browser.sample()
        page = browser.until("/cluster", "does not answer since")
        assert 'class="banner bad" role="alert"' in page.body
        assert page.body.index('class="banner bad"') < page.body.index("<h1>")
        assert silent.doors.client_addr in page.text and "1 topic has no server" in page.text
        assert "Brokers 1 of 2" in page.text and "1 without a server" in page.text
        assert "nobody lags" not in page.text and "Lag unknown at least 0 messages" in page.text
        assert "Every subscription has caught up" not in page.text
        assert "docs/runbooks/DanubeBrokerDown.md" in page.text
        listed = browser.get("/topics")
        assert _row(listed, "/default/there").startswith("/default/there unknown – – –")
        assert _row(listed, "/default/here").startswith("/default/here idle 0 0")
        assert "/default/there" in browser.get("/topics?state=unknown").text
        assert "/default/there" not in browser.get("/topics?state=idle").text
        one = browser.get("/topics/default/there")
        assert "/default/there unknown" in one.text and "In unknown its broker does not answer" in one.text
        assert "Lag unknown" in one.text and "Connected unknown" in one.text
        assert "audit unknown – – –" in one.text
        subscription = browser.get("/topics/default/there/subscriptions/audit")
        assert "audit unknown" in subscription.text and "Out unknown" in subscription.text
        broker = browser.get(f"/brokers/{silent.id}")
        assert "In unknown" in broker.text and "Memory unknown" in broker.text


async def _subscribe(town: Town, topic: str) -> None:
    async with (
        pydanube.connect(f"danube://{town.node(1).doors.stream_addr}") as client,
        client.consumer(topic, subscription="audit"),
    ):
        pass


def _row(page: Answer, topic: str) -> str:
    [found] = [row for row in re.findall(r"<tr data-key=.*?</tr>", page.body, re.DOTALL) if f">{topic}</a>" in row]
    return " ".join(re.sub(r"<[^>]*>", " ", found).split())
