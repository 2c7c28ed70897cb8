"""A configuration that is read again while the broker runs, and one that is only checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pydanube.config import Config, Flags, load
from pydanube.config.reload import RELOADED, Reload, in_words, reloaded
from pydanube.config.stream import StreamLimits
from pydanube.core.policies import TopicPolicy
from tests.e2e.processes import danube_here
from tests.harness.brokers import BrokerFixture, message, one_topic, simulated


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "danube.yml"


def read(file: Path, text: str, **flags: str) -> Config:
    file.write_text(text)
    return load(Flags(config_file=file, mode="standalone", **flags))  # type: ignore[arg-type]


def between(file: Path, before: str, after: str, **flags: str) -> Reload:
    return reloaded(read(file, before, **flags), read(file, after, **flags))


# --- what changes ---------------------------------------------------------------------------------------


def test_the_log_level_and_limits_hold_from_now_on(file: Path) -> None:
    found = between(
        file,
        "policies: {max_publish_rate: 5}",
        "log: {level: debug}\npolicies: {max_publish_rate: 9}\nstream: {limits: {connections: 7}}",
    )
    assert [str(each) for each in found.changed] == [
        "log.level: info -> debug",
        "policies.max_publish_rate: 5 -> 9",
        "stream.limits.connections: 10000 -> 7",
    ]
    assert (found.restart, found.overruled) == ((), ())
    assert found.config.lines.level == "debug" and found.config.stream.limits == StreamLimits(connections=7)
    assert found.config.policies == TopicPolicy(max_publish_rate=9)


def test_what_needs_a_restart_is_named_until_there_was_one_and_is_not_taken_over(file: Path) -> None:
    running = read(file, "storage: {upload: {interval_seconds: 30}}")
    asked = read(file, "storage: {upload: {interval_seconds: 5}}\ncluster_name: other")
    found = reloaded(running, asked)
    assert found.restart == ("cluster_name", "storage.upload.interval_seconds")
    assert found.changed == () and found.config == running
    assert reloaded(found.config, asked).restart == found.restart


def test_a_flag_wins_over_a_file_that_was_changed_and_that_is_said(file: Path) -> None:
    found = between(file, "", "log: {level: debug}", log_level="error")
    assert found.changed == () and found.overruled == ("log.level: --log-level wins",)
    assert found.config.lines.level == "error"


def test_a_file_that_says_the_same_changes_nothing(file: Path) -> None:
    found = between(file, "log: {level: info}", "policies:\nlog: {level: info}")
    assert found[1:] == ((), (), ())


def test_a_first_limit_brings_the_defaults_of_the_others_and_both_are_said(file: Path) -> None:
    """Without any limit in the file a standalone broker has none, not even for the size of a message."""
    found = between(file, "", "policies: {max_publish_rate: 9}")
    assert {each.key for each in found.changed} == {"policies.max_publish_rate", "policies.max_message_size"}


def test_everything_that_can_be_reloaded_is_part_of_what_is_taken_over(file: Path) -> None:
    text = "log: {level: error, format: json}\nstream: {limits: {requests: 3}}\npolicies: {retention_mb: 4}"
    found = between(file, "", text)
    assert found.config == replace(read(file, text), data_dir=found.config.data_dir)
    assert {each.key for each in found.changed} <= set(RELOADED)


def test_no_secret_is_shown(file: Path) -> None:
    config = read(file, "storage: {url: s3://bucket, durable: {secret_key: hush, region: here}, wal: {pending_mb: 8}}")
    assert in_words(config) == {
        "storage.url": "s3://bucket",
        "storage.durable.secret_key": "(hidden)",
        "storage.durable.region": "here",
        "storage.wal.pending_mb": 8,
    }


@simulated
async def test_limits_of_a_broker_that_runs_follow_its_configuration() -> None:
    broker, topic = await one_topic(BrokerFixture())
    await broker.reload(replace(broker.config, policies=TopicPolicy(max_publish_rate=1)))
    producer = await topic.add_producer("producer")
    await topic.publish(producer, message("x"))
    assert topic.policy == TopicPolicy(max_publish_rate=1)
    await broker.namespace_limits.set(topic.name.namespace, {"max_publish_rate": 50})
    await broker.reload(replace(broker.config, policies=TopicPolicy(max_publish_rate=2, max_producers_per_topic=3)))
    assert topic.policy == TopicPolicy(max_publish_rate=50, max_producers_per_topic=3), "an operator's word stays"


# --- only checked ---------------------------------------------------------------------------------------


def check(*words: object) -> tuple[int, str, str]:
    done = danube_here("broker", "--check", "--mode", "standalone", *words)
    return done.returncode, done.stdout, done.stderr


def test_a_good_configuration_is_said_to_be_good_and_nothing_is_made(tmp_path: Path, file: Path) -> None:
    file.write_text("log: {level: warning}\n")
    code, said, errors = check("--data-dir", tmp_path / "data", "--config-file", file)
    assert (code, errors) == (0, "")
    assert "danube://127.0.0.1:6651" in said and "log.level = warning" in said
    assert said.endswith("The configuration is good. Nothing was started.\n")
    assert not (tmp_path / "data").exists()


def test_a_check_for_machines_is_one_object(tmp_path: Path) -> None:
    code, said, _ = check("--data-dir", tmp_path, "--log-format", "json", "--broker-addr", "0.0.0.0:6650")
    found = json.loads(said)
    assert code == 0 and found["ok"] and found["settings"]["mode"] == "standalone"
    assert found["problems"] == [] and "--advertised-addr" in found["warnings"][0]


def test_every_problem_is_named_at_once(tmp_path: Path, file: Path) -> None:
    (tmp_path / "taken").write_text("")
    file.write_text(
        "storage: {url: s3://bucket, durable: {account_name: me}}\n"
        f"stream: {{tls: {{cert_file: {tmp_path}/none.pem, key_file: {tmp_path}/none.pem}}}}\n"
    )
    code, said, errors = check(
        *("--config-file", file, "--data-dir", tmp_path / "taken", "--admin-addr", "0.0.0.0:6650")
    )
    assert code == 2 and "is good" not in said
    for word in ("--data-dir", "storage.durable.account_name", "--broker-addr has it already", "stream.tls.cert_file"):
        assert word in errors, word


@pytest.mark.parametrize(
    ("text", "word"),
    [("log: {level: loud}", "log.level"), ("logs: {level: info}", "logs.level"), ("a: [", "a file in YAML")],
)
def test_a_file_with_a_mistake_is_refused_in_one_line(file: Path, text: str, word: str) -> None:
    file.write_text(text)
    code, said, errors = check("--config-file", file)
    assert code == 2 and said == "" and word in errors and errors.count("\n") == 1


def test_a_cluster_needs_ports_that_stay() -> None:
    words = ("--storage-url", "s3://bucket", "--etcd", "127.0.0.1:2379", "--broker-addr", "127.0.0.1:0")
    done = danube_here("broker", "--check", "--mode", "cluster", *words)
    assert done.returncode == 2 and "a port that does not change" in done.stderr
