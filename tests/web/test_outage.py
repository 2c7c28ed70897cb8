"""The cluster page during an outage: what is wrong stands first, and nothing that is not known looks like a number."""

from __future__ import annotations

import asyncio
import html
import json
import re
import time
from collections.abc import Awaitable, Callable

import pydanube
from pydanube.admin.metrics_text import Numbers, SubscriptionCounts, TopicCounts
from pydanube.core.cluster.conditions import Severity
from pydanube.core.names import TopicName
from pydanube.errors import Unreachable
from pydanube.web import pages
from pydanube.web.conditions import Banner
from pydanube.web.operations import Operation
from pydanube.web.site import Site
from pydanube.wire._pb.pydanube import status_pb2 as pb
from tests.harness.server_cluster import ServerCluster
from tests.support import settle
from tests.web.pages import Answer, opened, opened_cluster


def test_a_broker_that_does_not_answer_is_said_in_red_and_its_share_is_unknown() -> None:
    with opened_cluster(2) as (browser, cluster):
        browser.run(cluster.create("/default/here", on=1))
        browser.run(cluster.create("/default/there", on=2))
        browser.run(_subscribe(cluster, "/default/there"))
        browser.sample()
        healthy = browser.until("/cluster", "Topics 2")
        assert "does not answer" not in healthy.text and "nobody lags" in healthy.text
        silent = cluster.node(2)
        browser.run(silent.servers._admin.stop(None))
        browser.run(silent.servers._metrics.close())
        browser.site.gateway.forget()
        browser.sample()
        page = browser.until("/cluster", "does not answer since")
        assert 'class="banner bad" role="alert"' in page.body
        assert page.body.index('class="banner bad"') < page.body.index("<h1>")
        assert silent.servers.client_addr in page.text and "1 topic has no server" in page.text
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


def test_the_lag_of_a_partitioned_topic_is_unknown_while_a_partition_has_no_broker_that_answers() -> None:
    with opened_cluster(2) as (browser, cluster):
        browser.run(_subscribe_to_partitions(cluster, "/default/clicks"))
        healthy = browser.get("/subscriptions")
        assert "2 partitions" in healthy.text and "unknown" not in healthy.text
        browser.run(cluster.node(2).servers._admin.stop(None))
        page = browser.get("/subscriptions")
        assert "1 of 2 partitions" in page.text and "unknown at least 0" in page.text
        assert page.text.count("caught up") == 1  # the partition that answers


async def _subscribe_to_partitions(cluster: ServerCluster, topic: str) -> None:
    """One partition at each of two brokers."""
    async with pydanube.connect(f"danube://{cluster.node(1).servers.stream_addr}") as client:
        await client.create_topic(topic, partitions=2)
    for on, part in enumerate(TopicName(topic).partition_names(2), 1):
        await _host(cluster, part, on)
    await _subscribe(cluster, topic)


async def _host(cluster: ServerCluster, topic: TopicName, on: int) -> None:
    await cluster.until(lambda: cluster.host(topic) is not None)
    if cluster.host(topic) is not cluster.node(on):
        await cluster.node(on).cluster.requests.unload(topic, cluster.node(on).broker.broker_id)
    await cluster.settled(topic, on)


def test_the_chart_of_all_topics_does_not_draw_what_is_known_as_if_it_were_all() -> None:
    with opened_cluster(2) as (browser, cluster):
        samples = browser.site.sampler.samples
        brokers = [str(cluster.node(number).id) for number in (1, 2)]
        now = time.time()

        def listen(ago: int, *heard: str) -> None:
            for broker in heard:
                counts = TopicCounts(messages_in=1_000.0 - ago)
                samples.add(broker, Numbers({f"/default/of-{broker}": counts}, {}, {}), now - ago)
            for broker in {*brokers} - {*heard}:
                samples.failed(broker, "nobody answers")
            samples.end_round(brokers, now - ago)

        for ago in range(100, 50, -5):
            listen(ago, *brokers)
        healthy = browser.get("/cluster")
        assert "at least so much" not in healthy.text and 'class="line part' not in healthy.body
        for ago in range(50, -1, -5):
            listen(ago, brokers[0])
        page = browser.get("/cluster")
        assert "in unknown , at least 1.0" in page.text and "not all brokers answered: at least so much" in page.text
        assert page.body.count('class="line part c1"') == 1
        [lines] = re.findall(r'data-lines="([^"]*)"', page.body)
        into, _ = json.loads(html.unescape(lines))
        assert into["values"][-1] is None and into["known"][-1] == 1.0
        assert 2.0 in into["values"] and 1.0 not in into["values"]


def test_a_silence_begins_when_the_broker_falls_silent_and_not_when_somebody_opens_a_page() -> None:
    with opened_cluster(2) as (browser, cluster):
        browser.run(cluster.node(2).servers._admin.stop(None))
        browser.sample()  # nobody looks
        looked_us = browser.run(_later_us(cluster))
        found = browser.run(browser.site.gateway.status())
        [since_us] = [each.since_us for each in found.brokers if each.life == "silent"]
        assert since_us < looked_us


def test_lag_beside_messages_that_wait_for_rescue_is_lag_all_the_same() -> None:
    with opened() as web:
        web.run(web.client.create_topic("/default/orders"))
        samples = web.site.sampler.samples
        [broker] = [each.broker_id for each in web.run(web.site.gateway.brokers())]
        numbers = Numbers(
            {"/default/orders": TopicCounts(orphans=1.0)},
            {("/default/orders", "billing"): SubscriptionCounts(lag=5_000.0)},
            {},
        )
        samples.add(broker, numbers, time.time())
        samples.end_round([broker], time.time())
        page = web.get("/cluster")
        assert "Lag 5,000 messages 1 topic is lagging" in page.text and "nobody lags" not in page.text
        assert "/default/orders orphan" in page.text


def test_a_partitioned_topic_is_one_line_among_those_furthest_behind() -> None:
    with opened() as web:
        web.run(web.client.create_topic("/default/clicks", partitions=2))
        samples = web.site.sampler.samples
        [broker] = [each.broker_id for each in web.run(web.site.gateway.brokers())]
        parts = [f"/default/clicks-part-{number}" for number in (0, 1)]
        numbers = Numbers(
            {part: TopicCounts() for part in parts},
            {(part, "billing"): SubscriptionCounts(lag=700.0) for part in parts},
            {},
        )
        samples.add(broker, numbers, time.time())
        samples.end_round([broker], time.time())
        page = web.get("/cluster")
        assert "Lag 1,400 messages 1 topic is lagging" in page.text
        assert page.text.index("/default/clicks 2 partitions lagging") < page.text.index("/default/clicks-part-0")


def test_what_went_well_is_not_shown_above_an_outage() -> None:
    async def succeed(_: Operation) -> None:
        pass

    async def fail(_: Operation) -> None:
        raise Unreachable("the broker", "it is away")

    with opened() as web:
        web.run(_begin(web.site, "/default/a", succeed))
        web.run(_begin(web.site, "/default/b", fail))
        well = Banner([pb.Condition(severity=Severity.WARNING)])
        outage = Banner([pb.Condition(severity=Severity.CRITICAL)])
        assert [each.subject for each in pages._operations(web.site, well)] == ["/default/b", "/default/a"]
        assert [each.subject for each in pages._operations(web.site, outage)] == ["/default/b"]
        assert len(pages._operations(web.site, Banner())) == 2


async def _begin(site: Site, subject: str, act: Callable[[Operation], Awaitable[None]]) -> None:
    site.operations.begin("move", subject, "Move", act)
    await settle()


async def _later_us(cluster: ServerCluster) -> int:
    """The time, as soon as it is not what it was: the event loop's clock counts milliseconds."""
    now = cluster.clock.time_us()
    while cluster.clock.time_us() == now:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return cluster.clock.time_us()


async def _subscribe(cluster: ServerCluster, topic: str) -> None:
    async with (
        pydanube.connect(f"danube://{cluster.node(1).servers.stream_addr}") as client,
        client.consumer(topic, subscription="audit"),
    ):
        pass


def _row(page: Answer, topic: str) -> str:
    [found] = [row for row in re.findall(r"<tr data-key=.*?</tr>", page.body, re.DOTALL) if f">{topic}</a>" in row]
    return " ".join(re.sub(r"<[^>]*>", " ", found).split())
