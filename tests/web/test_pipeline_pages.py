"""The page of pipelines says what is known, what is not, and what went wrong; and lets an operator pause one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pydanube.core.pipelines.status import PipelineState, PipelineStatus, RunOutcome
from tests.web.pages import Web, opened

ORDERS = {"name": "orders", "job": "lake", "follow": "30s", "freshness": "5m", "settings": {"topic": "/default/orders"}}


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        yield web


async def failing(web: Web) -> None:
    broker = web.broker._broker
    assert broker is not None
    desk = broker.pipelines
    await desk.apply(ORDERS)
    await desk.apply({**ORDERS, "name": "new", "job": "stats", "follow": None, "cron": "@daily"})
    lease = await desk.join()
    await desk.claim(lease, "orders", "host-1:77")
    status = PipelineStatus(
        state=PipelineState.WAITING,
        started_us=1_794_000_000_000_000,
        ended_us=1_794_000_100_000_000,
        outcome=RunOutcome.FAILED,
        error="<b>no bucket</b>",
        failures=3,
        restarts=2,
        quarantined_total=12_345,
    )
    await desk.report(lease, "orders", status.to_bytes())


def test_pipelines_stand_on_a_page_with_what_is_known_and_what_is_not(web: Web) -> None:
    assert "No pipeline is declared" in web.get("/pipelines").text
    web.run(failing(web))
    page = web.get("/pipelines")
    assert page.status == 200 and "<b>no bucket" not in page.body
    assert "orders lake follows, every 30s failing unknown" in page.text
    assert "the last run failed: <b>no bucket</b>, 3 times in a row" in page.text
    assert "12,345" in page.text and "host-1:77" in page.text
    assert "new stats cron @daily" in page.text and "waits for a supervisor" in page.text


def test_an_operator_pauses_and_resumes_one(web: Web) -> None:
    page = web.post("/pipelines/orders/pause", paused="yes")
    assert "orders is paused" in page.text and "Resume" in page.text
    assert "orders is resumed" in web.post("/pipelines/orders/pause", paused="no").text
    missing = web.post("/pipelines/nothing/pause", paused="yes")
    assert missing.status == 404 and "there is no pipeline nothing" in missing.text
