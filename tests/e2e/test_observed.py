"""What an operator sees of a live cluster: every panel has data, every rule is healthy, the pages say what is there.

One cluster of two brokers, watched by Prometheus, does a little of everything: messages over both protocols, refusals,
dead letters, uploads, a redirect and a move.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pydanube.client import blocking
from pydanube.testing.ports import free_ports
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from tests.e2e.clusters import ClusterBroker, ClusterProcesses, cluster_in
from tests.e2e.processes import Process, danube_here, until
from tests.stubs.danube import DanubeApi_pb2_grpc as api

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
RUNBOOKS = REPOSITORY / "docs" / "runbooks"
TOPIC, SUBSCRIPTION = "/default/orders", "billing"
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Observed(NamedTuple):
    cluster: ClusterProcesses
    prometheus: str

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with NO_PROXY.open(url, timeout=10) as answer:
            found = json.loads(answer.read())
        assert found["status"] == "success", found
        return found["data"]

    def numbers(self, expression: str) -> list[float]:
        """What it evaluates to now; without those that are no numbers."""
        found = [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]
        return [number for number in found if not math.isnan(number)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    directory = tmp_path_factory.mktemp("observed")
    with cluster_in(directory, count=2) as cluster, watching(directory, cluster) as prometheus:
        found = Observed(cluster, prometheus)
        until(lambda: found.numbers('sum(up{job="danube"})') == [2], "both brokers are scraped")
        use(cluster)
        yield found


@contextmanager
def watching(directory: Path, cluster: ClusterProcesses) -> Iterator[str]:
    """Prometheus with our own configuration and rules, in a hurry."""
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: run `make setup-test`, or install it (Debian, Ubuntu: apt-get)"
    settings = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(DEPLOY / name) for name in settings["rule_files"]]
    [job] = settings["scrape_configs"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{broker.metrics_port}" for broker in cluster.brokers]}]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    [port] = free_ports(1)
    command = [
        *(program, f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    with Process(command, directory / "prometheus.log") as process:

        def is_ready() -> bool:
            assert process.exit_code is None, process.text()
            try:
                with NO_PROXY.open(f"http://127.0.0.1:{port}/-/ready", timeout=2):
                    return True
            except OSError:
                return False

        until(is_ready, "Prometheus is ready", say=process.text)
        yield f"http://127.0.0.1:{port}"


def use(cluster: ClusterProcesses) -> None:
    """A little of everything that is counted."""
    cluster.admin("topics", "create", TOPIC, "--dispatch-strategy", "reliable")
    owner = cluster.hosted(TOPIC)
    other = next(broker for broker in cluster.brokers if broker is not owner)
    policy = ("--max-redelivery-count", "0", "--poison-policy", "dead_letter", "--dead-letter-topic", "/default/dead")
    with blocking.connect(cluster.url) as client, client.producer(TOPIC) as producer:
        with client.consumer(TOPIC, subscription=SUBSCRIPTION) as consumer:
            cluster.admin("subscriptions", "set-failure-policy", TOPIC, SUBSCRIPTION, *policy)
            for number in range(20):
                producer.send(b"%d" % number)
                message = consumer.receive(timeout=20)
                assert message is not None
                if number == 15:
                    message.nack()
                else:
                    message.ack()
                if number == 10:
                    look_up(other)
                    cluster.admin("topics", "unload", TOPIC)
        ask_in_vain(cluster.hosted(TOPIC, other_than=owner))
        for number in range(5):
            producer.send(b"%d" % number)  # lag


def ask_in_vain(owner: ClusterBroker) -> None:
    """A message that is refused, over gRPC."""
    with grpc.insecure_channel(f"127.0.0.1:{owner.client_port}") as channel:
        stub = api.ProducerServiceStub(channel)
        request = pb.ProducerRequest(topic_name=TOPIC, producer_name="odd", dispatch_strategy=1)
        identity = stub.CreateProducer(request, timeout=20).producer_id
        place = pb.MsgID(producer_id=identity, topic_name=TOPIC)
        with pytest.raises(grpc.RpcError, match="publish_time"):
            stub.SendMessage(pb.StreamMessage(msg_id=place, payload=b"x", publish_time=1 << 60), timeout=20)


def look_up(other: ClusterBroker) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{other.client_port}") as channel:
        api.DiscoveryStub(channel).TopicLookup(pb.TopicLookupRequest(topic=TOPIC), timeout=20)


# --- the dashboard ------------------------------------------------------------------------------------------


def expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana" / "danube.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def filled_in(expression: str) -> str:
    for variable, text in (("$__rate_interval", "1m"), ("$broker", ".*"), ("$topic", ".*")):
        expression = expression.replace(variable, text)
    assert "$" not in expression, expression
    return expression


def test_every_expression_of_the_dashboard_returns_data(observed: Observed) -> None:
    missing = [filled_in(each) for each in expressions()]
    assert len(missing) > 50

    with blocking.connect(observed.cluster.url) as client, client.producer(TOPIC) as producer:

        def none_left() -> bool:
            producer.send(b"more")  # a rate needs something that goes on
            missing[:] = [each for each in missing if not observed.numbers(each)]
            return not missing

        until(none_left, "every expression has data", seconds=60, say=lambda: "\n".join(missing))


def test_the_dashboard_has_every_metric_of_subscriptions_and_no_unknown_one(observed: Observed) -> None:
    used = {word for each in expressions() for word in re.findall(r"(?:danube|process)_\w+", each)}
    known: set[str] = set()

    def none_is_unknown() -> bool:
        known.update(observed.ask("label/__name__/values"))
        return used <= known

    # Some are known only after a broker has looked, which it does from time to time.
    until(none_is_unknown, "every metric is known", seconds=60, say=lambda: str(used - known))
    assert {each for each in known if each.startswith("danube_subscription_")} <= used


# --- the rules ------------------------------------------------------------------------------------------------


def test_every_rule_is_evaluated_and_nothing_is_wrong_with_a_healthy_cluster(observed: Observed) -> None:
    def rules() -> list[dict[str, Any]]:
        return [rule for group in observed.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] == "ok" for rule in rules()), "every rule was evaluated")
    assert {rule["name"] for rule in rules() if rule["state"] == "firing"} == set()


# --- the pages ------------------------------------------------------------------------------------------------

ROW = re.compile(r"\| `(\w+)` \| (\w+) \| ([^|]*) \| ([^|]*) \|")


def test_the_page_about_metrics_lists_what_a_live_broker_exports_and_nothing_else(observed: Observed) -> None:
    listed = {}
    for line in (REPOSITORY / "docs" / "metrics.md").read_text().splitlines():
        if row := ROW.fullmatch(line):
            name, kind, labels, text = row.groups()
            listed[name] = (kind, frozenset(re.findall(r"`(\w+)`", labels)), text)
    exported: dict[str, tuple[str, str]] = {}
    labels_of: dict[str, set[str]] = {}
    for broker in observed.cluster.brokers:
        for family in text_string_to_metric_families(fetch(broker, "/metrics")):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            exported[name] = (family.type, family.documentation)
            own = {label for sample in family.samples for label in sample.labels} - {"le", "broker"}
            labels_of.setdefault(name, set()).update(own)
            assert all(sample.labels["broker"] == broker.broker_id for sample in family.samples)
    assert set(listed) == set(exported)
    for name, (kind, told, text) in listed.items():
        assert (kind, text) == exported[name], name
        assert labels_of[name] <= told, name


def commands() -> list[list[str]]:
    """Every command in the runbooks that `danube` is to carry out, once."""
    found: dict[str, None] = {}
    for page in sorted(RUNBOOKS.glob("*.md")):
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip():
                    found[" ".join(line.split())] = None
    return [shlex.split(line) for line in found]


def fetch(broker: ClusterBroker, url: str) -> str:
    path = urllib.parse.urlsplit(url).path
    with NO_PROXY.open(f"http://127.0.0.1:{broker.metrics_port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_every_command_in_the_runbooks_can_be_given(observed: Observed) -> None:
    cluster = observed.cluster
    spare = cluster.brokers[0]
    words = {"BROKER_ID": spare.broker_id, "OFFSET": "3", "FIRST_OFFSET": "3"}
    for command in commands():
        command = [words.get(word, word) for word in command]
        match command:
            case ["danube", "admin", *rest]:
                if rest[:3] == ["topics", "orphan", "discard"]:  # there is none, and it says so
                    done = danube_here("admin", "--endpoint", spare.endpoint, *rest, "--yes")
                    assert done.returncode != 0 and "has no orphan" in done.stderr, done
                    continue
                done = danube_here("admin", "--endpoint", spare.endpoint, *rest)
                assert done.returncode == 0, (command, done.stderr)
            case ["danube", "pipeline", *_]:
                pass  # tests/pipeline/test_page.py does it
            case ["danube", "log", "verify", "./danube-data"]:
                pass  # for a broker that is stopped: tests/e2e/test_pages.py does it
            case ["curl", *_, url, "|", "grep", word]:
                assert word in fetch(spare, url)
            case ["curl", *_, url]:
                assert fetch(spare, url)
            case ["promtool" | "df", *_]:
                subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=60)
            case _:
                raise AssertionError(f"what is {command}?")


def test_metrics_named_in_the_runbooks_exist() -> None:
    named = {word for page in RUNBOOKS.glob("*.md") for word in re.findall(r"danube_\w+", page.read_text())}
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    assert {each for each in named if f"`{each}" not in page} == set()
