"""Pictures of the web admin for docs/pictures, taken while the demo's orders flow: its brokers, its topics, its lag.

    make screenshots                 the demo without Spark, with --pictures docs/pictures

After the demo's moves some orders are given up, so that there are dead letters, and charts get the time to have
something to show. One more move is held up for the moment of its picture. An outage is shown twenty seconds after the
demo's kill -9. It needs Debian's Chromium.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import pydanube
from examples.demo.load import REPORTS
from examples.demo.processes import Broker, admin

WARM_UP_SECONDS = 150
OUTAGE_SECONDS = 20
ORDERS, DEAD_LETTERS, INVOICES = "/default/orders", "/default/orders-dlq", "invoices"
REASONS = ("card declined: insufficient funds", "address not found", "warehouse timed out after 5 s")
FAILURES = 32


async def give_up_orders(brokers: Sequence[Broker]) -> None:
    policy = ("--max-redelivery-count", "0", "--poison-policy", "dead_letter", "--dead-letter-topic", DEAD_LETTERS)
    await admin(brokers[0], "subscriptions", "set-failure-policy", ORDERS, INVOICES, *policy)
    failed = 0
    async with (
        pydanube.connect(brokers[0].url) as client,
        client.consumer(ORDERS, subscription=INVOICES, type="shared", start="earliest") as consumer,
    ):
        async for message in consumer:
            if message.offset % 40 == 7:
                failed += 1
                await message.nack(reason=REASONS[failed % len(REASONS)])
            else:
                await message.ack()
            if failed == FAILURES:
                break
        await consumer.flush()


async def take(web: str, brokers: Sequence[Broker], directory: Path) -> None:
    # Of these neither the leader nor the one that the web admin asks: the others go on while it is stopped.
    leader = json.loads(await admin(brokers[0], "brokers", "leader-broker", "--output", "json"))["leader"]
    target = next(each for each in brokers[1:] if each.broker_id != str(leader))
    listed = json.loads(await admin(brokers[0], "topics", "list", "--namespace", "default", "--output", "json"))
    elsewhere = (each["name"] for each in listed if str(each["broker_id"]) != target.broker_id)
    moved = next(name for name in elsewhere if name not in (ORDERS, DEAD_LETTERS))
    await asyncio.to_thread(_take, web, target, moved, directory)


async def take_outage(web: str, directory: Path) -> None:
    """To be called right after the kill: the page is open all the time, as on a wall."""
    await asyncio.to_thread(_take_outage, web, directory)


def _take_outage(web: str, directory: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        light = browser.new_page(viewport={"width": 1240, "height": 1040}, color_scheme="light")
        light.goto(f"{web}/cluster")
        light.wait_for_timeout(OUTAGE_SECONDS * 1000)
        _shoot(light, directory / "outage.png")
        light.goto(f"{web}/topics")
        _shoot(light, directory / "outage-topics.png")
        browser.close()


def _take(web: str, target: Broker, moved: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        light = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme="light")
        dark = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme="dark")
        phone = browser.new_page(viewport={"width": 390, "height": 844}, device_scale_factor=2, is_mobile=True)
        light.goto(f"{web}/cluster")  # charts begin when somebody looks
        light.wait_for_timeout(WARM_UP_SECONDS * 1000)
        _shoot(light, directory / "cluster.png")
        dark.goto(f"{web}/cluster")
        dark.wait_for_timeout(2_500)
        _shoot(dark, directory / "cluster-dark.png")
        dark.goto(f"{web}/topics")
        _shoot(dark, directory / "topics-dark.png")
        light.goto(f"{web}/topics{ORDERS}")
        _shoot(light, directory / "topic.png", whole=True)
        phone.goto(f"{web}/topics{ORDERS}")
        _shoot(phone, directory / "phone.png")
        light.goto(f"{web}/topics{ORDERS}/subscriptions/{REPORTS}")
        _shoot(light, directory / "subscription.png", whole=True)
        light.goto(f"{web}/topics{ORDERS}/messages?count=25&offset=4000")
        light.locator("details.message").nth(3).locator("summary").click()
        _shoot(light, directory / "messages.png")
        light.goto(f"{web}/dead-letters?topic={DEAD_LETTERS}")
        light.get_by_role("button", name="Try it").click()
        light.get_by_text("would be sent").wait_for(timeout=30_000)
        light.locator("details.message").first.locator("summary").click()
        light.evaluate("scrollTo(0, 0)")
        light.set_viewport_size({"width": 1240, "height": 1500})
        _shoot(light, directory / "dead-letters.png")
        light.set_viewport_size({"width": 1240, "height": 900})
        light.goto(f"{web}/topics{moved}")
        light.get_by_label("Move to which broker").select_option(target.broker_id)
        with _stopped(target):
            light.get_by_role("button", name="Move", exact=True).click()
            light.locator(".steps .now").wait_for(timeout=15_000)
            _shoot(light, directory / "move.png")
        light.locator(".steps .now").wait_for(state="detached", timeout=60_000)
        browser.close()


def _shoot(page: Page, path: Path, *, whole: bool = False) -> None:
    page.wait_for_timeout(300)
    page.screenshot(path=path, full_page=whole)


@contextmanager
def _stopped(broker: Broker) -> Iterator[None]:
    """The move waits for its new owner; not for long: soon another one would get the topic."""
    broker.pause()
    try:
        yield
    finally:
        broker.resume()
