"""`danube admin` on one broker: places to seek to, and a broker that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

import pydanube
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

ORDERS = "/default/orders"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running, pydanube.blocking.connect(running.url) as client:
        with client.producer(ORDERS) as orders:
            for number in range(5):
                orders.send(b"%d" % number)
        with client.consumer(ORDERS, subscription="billing"):
            pass
        yield running


def seek(broker: TestBroker, *words: object) -> str:
    done = danube_here("admin", "--endpoint", broker.admin_url, "subscriptions", "seek", ORDERS, "billing", *words)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.parametrize(
    ("words", "offset"),
    [
        (("--earliest",), 0),
        (("--latest",), 5),
        (("--offset", 3), 3),
        (("--time", "2000-01-01T00:00:00Z"), 0),
        (("--time", datetime(2100, 1, 1, tzinfo=UTC).isoformat()), 5),
        (("earliest",), 0),
        (("4",), 4),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_subscription_goes_on_where_it_is_told(broker: TestBroker, words: tuple[object, ...], offset: int) -> None:
    assert seek(broker, *words) == f"Goes on at offset {offset}\n"


@pytest.mark.parametrize("words", [(), ("earliest", "--latest"), ("--offset", 1, "--time", "2000-01-01")])
def test_one_place_is_asked_for(broker: TestBroker, words: tuple[object, ...]) -> None:
    said = seek(broker, *words)
    assert said.startswith("danube: TO") and "--earliest, --latest, --offset or --time" in said


@pytest.mark.parametrize("time", ["yesterday", "earliest", "7"])
def test_what_is_no_time_is_refused_by_the_option_that_asked_for_one(broker: TestBroker, time: str) -> None:
    assert seek(broker, "--time", time) == (
        f"danube: --time = {time!r} is not allowed: a time as 2026-11-15T09:00:00Z\n"
    )
    assert seek(broker, "yesterday").startswith("danube: TO = 'yesterday' is not allowed: earliest, latest, an offset")


@pytest.mark.parametrize(
    "words",
    ["brokers list", "topics describe /default/orders", "cluster status", "storage list /default/orders"],
)
def test_a_broker_that_is_not_there_is_one_sentence_that_says_what_to_do(words: str) -> None:
    done = danube_here("admin", "--endpoint", "http://127.0.0.1:1", *words.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "danube: the broker at 127.0.0.1:1 cannot be reached: nobody answers there; `danube broker` starts one, "
        "--endpoint names another\n"
    )


def test_jobs_are_listed_for_scripts() -> None:
    assert set(json.loads(danube_here("pipeline", "jobs", "--output", "json").stdout)) == {
        *("lake", "compact", "audit", "replay", "stats")
    }
