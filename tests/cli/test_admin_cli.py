"""`danube admin` on one broker: places to seek to, lists, and a broker that is not there, or is somebody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

import pydanube
from pydanube.cli.exits import Exit
from pydanube.client.grpc.connection import target
from pydanube.errors import ConfigError
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
    assert said.startswith("danube: one place: TO (" if words else "danube: say where: TO (")
    assert said.endswith("--earliest, --latest, --offset or --time\n") and "None" not in said


def test_the_heartbeat_of_a_topic_is_that_of_all_its_partitions_and_default_takes_it_back(broker: TestBroker) -> None:
    def admin(*words: object) -> tuple[int, str]:
        done = danube_here("admin", "--endpoint", broker.admin_url, *words)
        return done.returncode, done.stdout or done.stderr

    def heartbeat() -> str:
        code, output = admin("subscriptions", "explain", ORDERS, "billing", "--output", "json")
        assert code == 0
        return str(json.loads(output)["heartbeat"])

    def described() -> tuple[str | None, bool]:
        """As scripts and as people are told."""
        value = json.loads(admin("topics", "describe", ORDERS, "--output", "json")[1])["heartbeat"]
        lines = admin("topics", "describe", ORDERS)[1].splitlines()
        return value, ["heartbeat:", value] in [line.split() for line in lines]

    assert heartbeat() == "normal" and described() == (None, False)
    assert admin("topics", "set-heartbeat", ORDERS, "high_priority") == (0, "Heartbeat: high_priority\n")
    assert heartbeat() == "high_priority" and described() == ("high_priority", True)
    assert admin("subscriptions", "set-heartbeat", ORDERS, "billing", "250ms")[0] == 0 and heartbeat() == "250ms"
    assert admin("subscriptions", "set-heartbeat", ORDERS, "billing", "default") == (0, "Heartbeat: high_priority\n")
    assert admin("topics", "set-heartbeat", ORDERS, "default") == (0, "Heartbeat: normal\n")
    assert heartbeat() == "normal"
    created = ("topics", "create", "/default/wide", "--partitions", 2, "--dispatch-strategy", "reliable")
    assert admin(*created)[0] == 0
    code, output = admin("topics", "set-heartbeat", "/default/wide", "debug", "--output", "json")
    assert code == 0 and json.loads(output)["topics"] == ["/default/wide-part-0", "/default/wide-part-1"]
    assert admin("topics", "delete", "/default/wide")[0] == 0
    assert admin("topics", "set-heartbeat", "/default/nothing", "debug")[0] == Exit.NOT_FOUND
    for words in ((ORDERS, "49ms"), ("no name", "debug")):
        assert admin("topics", "set-heartbeat", *words)[0] == Exit.USAGE


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
    assert (done.returncode, done.stdout) == (Exit.NOT_REACHABLE, "")
    assert done.stderr == (
        "danube: the broker at 127.0.0.1:1 cannot be reached: nobody answers there; `danube broker` starts one, "
        "--endpoint names another\n"
    )


def admin(broker: TestBroker, *words: object) -> str:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_address_that_is_none_is_told_one_with_the_right_port() -> None:
    for flag, port in (("--endpoint", 50051), ("--service-addr", 6650)):
        with pytest.raises(ConfigError, match=f"for example http://127.0.0.1:{port}$"):
            target("danube://127.0.0.1:6651", flag)


def test_all_topics_are_listed_unless_a_namespace_or_a_broker_is_named(broker: TestBroker) -> None:
    admin(broker, "namespaces", "create", "shop")
    admin(broker, "topics", "create", "/shop/carts")
    names = ["/default/orders", "/shop/carts"]
    assert [each["name"] for each in json.loads(admin(broker, "topics", "list", "-o", "json"))] == names
    for words in (("shop",), ("--namespace", "shop")):
        assert [line.split()[1] for line in admin(broker, "topics", "list", *words).splitlines()] == names[1:]
    [one] = json.loads(admin(broker, "brokers", "list", "-o", "json"))
    assert admin(broker, "topics", "list", "--broker", one["broker_id"]).count("Topic: ") == 2
    twice = danube_here("admin", "--endpoint", broker.admin_url, "topics", "list", "shop", "--broker", one["broker_id"])
    assert twice.returncode == Exit.USAGE and "none for all topics" in twice.stderr
    missing = danube_here("admin", "--endpoint", broker.admin_url, "topics", "list", "nowhere")
    assert missing.returncode == Exit.NOT_FOUND and "no namespace nowhere" in missing.stderr
    missing = danube_here("admin", "--endpoint", broker.admin_url, "topics", "list", "--broker", "5")
    assert missing.returncode == Exit.NOT_FOUND and "no broker 5" in missing.stderr


def test_namespaces_are_listed_where_people_look_for_them(broker: TestBroker) -> None:
    listed = admin(broker, "namespaces", "list")
    assert "Namespace: default\n" in listed and listed == admin(broker, "brokers", "namespaces")
    assert "default" in json.loads(admin(broker, "namespaces", "list", "-o", "json"))


def test_a_name_that_cannot_be_is_told_its_format_once(broker: TestBroker) -> None:
    done = danube_here("admin", "--endpoint", broker.admin_url, "topics", "create", "hello")
    assert done.returncode == Exit.USAGE and done.stderr.count("/namespace_name/topic_name") == 1
    told = danube_here("admin", "--endpoint", broker.admin_url, "topics", "describe", "hello")
    assert told.returncode == Exit.USAGE and told.stderr.count("/namespace_name/topic_name") == 1


def test_members_of_a_broker_that_is_alone_are_refused_with_the_reason(broker: TestBroker) -> None:
    done = danube_here("admin", "--endpoint", broker.admin_url, "cluster", "status")
    assert done.returncode == Exit.REFUSED and "standalone" in done.stderr
    assert "implemented" not in done.stderr.lower()


# --- exit codes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("topics create /default/orders", Exit.REFUSED),
        ("topics nonsense", Exit.USAGE),
        ("subscriptions set-heartbeat /default/orders billing 1ms", Exit.USAGE),
        ("topics describe /default/nowhere", Exit.NOT_FOUND),
        ("subscriptions lag /default/orders nobody", Exit.NOT_FOUND),
        ("namespaces topics default", Exit.DONE),
    ],
)
def test_the_exit_code_says_which_kind_of_failure_it_was(broker: TestBroker, words: str, code: Exit) -> None:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words.split())
    assert done.returncode == code, done.stderr


# --- the wrong port -------------------------------------------------------------------------------------


def test_a_port_that_is_another_one_is_named(broker: TestBroker) -> None:
    native = broker.url.replace("danube://", "http://")
    for wrong, what in ((broker.grpc_url, "the client port"), (native, "the native port")):
        done = danube_here("admin", "--endpoint", wrong, "brokers", "list")
        address = wrong.removeprefix("http://")
        assert done.returncode == Exit.USAGE and done.stderr == (
            f"danube: {address} is {what}; the admin port is 50051 unless `danube broker --admin-addr` says otherwise "
            "(--endpoint)\n"
        )
    for wrong, what in ((broker.admin_url, "the admin port"), (native, "the native port")):
        done = danube_here("consume", "-s", wrong, "-t", ORDERS, "-m", "x")
        assert done.returncode == Exit.USAGE and f"is {what}; the client port is 6650" in done.stderr


def test_a_port_of_http_is_told_from_a_broker_that_is_away(broker: TestBroker) -> None:
    assert broker._servers is not None
    done = danube_here("admin", "--endpoint", f"http://{broker._servers.metrics_addr}", "brokers", "list")
    assert done.returncode == Exit.USAGE and "is an HTTP port" in done.stderr
    done = danube_here("produce", "-s", f"danube://{broker._servers.metrics_addr}", "-t", ORDERS, "-m", "x")
    assert done.returncode == Exit.USAGE and "that is an HTTP port" in done.stderr


def test_a_host_that_nobody_knows_is_a_sentence() -> None:
    done = danube_here("admin", "--endpoint", "http://nobody.invalid:50051", "brokers", "list")
    assert done.returncode == Exit.NOT_REACHABLE and done.stderr == (
        "danube: the broker at nobody.invalid:50051 cannot be reached: no host of the name nobody.invalid is known; "
        "check --endpoint\n"
    )


# --- words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("prodce", "produce"),
        ("topics list", "danube admin topics"),
        ("subscription list", "danube admin subscriptions"),
        ("admin topic", "topics"),
    ],
)
def test_a_command_that_does_not_exist_is_told_which_one_may_be_meant(words: str, meant: str) -> None:
    done = danube_here(*words.split())
    assert done.returncode == Exit.USAGE and f"Did you mean '{meant}'?" in done.stderr


def test_jobs_are_listed_for_scripts() -> None:
    assert set(json.loads(danube_here("pipeline", "jobs", "--output", "json").stdout)) == {
        *("lake", "compact", "audit", "erase", "maintain", "replay", "stats")
    }
