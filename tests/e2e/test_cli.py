"""The `danube` command as people use it: real processes, a real broker."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pydanube.cli.exits import Exit
from tests.e2e.processes import BrokerProcess, Process, broker_in, danube, danube_here, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUMBERS = count()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_in(tmp_path_factory.mktemp("cli")) as started:
        yield started


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    """A reliable topic of the test's own."""
    name = f"/default/cli{next(NUMBERS)}"
    assert broker.admin("topics", "create", name, "--dispatch-strategy", "reliable") == f"Topic created: {name}\n"
    return name


def produce(broker: BrokerProcess, topic: str, *arguments: object, text: str = "") -> Any:
    done = danube("produce", "-s", broker.url, "-t", topic, "--reliable", *arguments, text=text)
    assert done.returncode == 0, done.stderr
    return done


def consume(broker: BrokerProcess, topic: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return danube("consume", "-s", broker.url, "-t", topic, "-m", "sub", "--timeout", 10, *arguments)


def subscribe(broker: BrokerProcess, topic: str) -> None:
    """Makes the subscription, so that what is published from now on waits for it."""
    assert consume(broker, topic, "--timeout", 0.01).returncode == 0


def payloads(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [json.loads(line)["payload"] for line in done.stdout.splitlines()]


# --- the broker ---------------------------------------------------------------------------------------


def test_help_names_every_flag_of_the_reference_and_how_to_begin() -> None:
    done = danube("broker", "--help")
    assert done.returncode == 0
    flags = "config-file mode broker-addr admin-addr prom-exporter advertised-addr connect-url raft-addr data-dir"
    for flag in (*flags.split(), "seed-nodes", "join", "edge-config", "edge-token", "stream-addr", "log-format"):
        assert f"--{flag}" in done.stdout
    assert "danube broker --mode standalone --data-dir" in done.stdout


def test_no_arguments_are_usage_and_an_error() -> None:
    done = danube("broker")
    assert done.returncode == 2 and "Usage: danube broker" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "edge"], ["--mode", "edge"]),
        (["--mode", "standalone", "--broker-addr", "nonsense"], ["--broker-addr", "nonsense", "host:port"]),
        (["--config-file", "/nowhere.yml"], ["--config-file", "/nowhere.yml"]),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    done = danube("broker", "--data-dir", tmp_path / "data", *flags)
    assert done.returncode == Exit.USAGE
    [line] = done.stderr.splitlines()
    assert line.startswith("danube: ") and all(word in line for word in words)


def test_a_mistake_in_the_file_names_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    file = tmp_path / "broker.yml"
    file.write_text("cluster_name: c\ndispatch:\n  max_unacked_messages: 0\n")
    done = danube("broker", "--mode", "standalone", "--config-file", file)
    assert done.returncode == Exit.USAGE
    [line] = done.stderr.splitlines()
    assert "dispatch.max_unacked_messages = 0" in line and "1 to 10000" in line


def test_security_that_does_not_exist_is_refused_and_settings_without_meaning_are_warned_about(tmp_path: Path) -> None:
    file = tmp_path / "broker.yml"
    file.write_text("storage:\n  wal:\n    advanced:\n      file_sync:\n        interval_ms: 5\nauth:\n  mode: tls\n")
    done = danube("broker", "--mode", "standalone", "--config-file", file)
    assert done.returncode == Exit.USAGE and "auth.mode" in done.stderr
    file.write_text(file.read_text().partition("auth")[0])
    with broker_in(tmp_path, "--config-file", str(file), "--log-format", "json") as broker:
        warnings = [json.loads(line) for line in broker.output.read_text().splitlines() if line.startswith("{")]
    assert any("file_sync" in line.get("warning", "") and line["level"] == "WARNING" for line in warnings)


def test_a_taken_port_is_one_line_and_leaves_the_directory_usable(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        other = BrokerProcess(tmp_path)
        other.client_port = holder.getsockname()[1]
        done = subprocess.run(other.command, capture_output=True, text=True, timeout=60)
        assert done.returncode == Exit.USAGE
        assert f"127.0.0.1:{other.client_port}" in done.stderr and "taken" in done.stderr
        assert "Traceback" not in done.stderr
    with other:
        assert "is ready" in other.output.read_text()


def test_a_directory_in_use_is_one_line_that_names_it(broker: BrokerProcess) -> None:
    # The very command that started the first one: its ports are taken too, and the directory is what matters.
    done = subprocess.run(broker.command, capture_output=True, text=True, timeout=60)
    assert done.returncode == Exit.REFUSED and len(done.stderr.splitlines()) == 1
    assert str(broker.data_dir) in done.stderr and str(broker.process and broker.process.pid) in done.stderr


def test_the_banner_says_where_everything_is(broker: BrokerProcess) -> None:
    text = broker.output.read_text()
    for place in (broker.url, broker.endpoint, f"http://127.0.0.1:{broker.metrics_port}/metrics", broker.data_dir):
        assert str(place) in text


def test_a_broker_does_not_load_pandas_although_arrow_would(broker: BrokerProcess, topic: str) -> None:
    produce(broker, topic, "-c", 20, "-i", 1, "-m", "hello")
    assert broker.process is not None
    mapped = Path(f"/proc/{broker.process.pid}/maps").read_text()
    assert "pyarrow" in mapped and "pandas" not in mapped


def test_a_second_start_serves_the_same_topics_subscriptions_and_cursors(tmp_path: Path) -> None:
    with broker_in(tmp_path) as broker:
        for name in ("/default/a", "/default/b"):
            broker.admin("topics", "create", name, "--dispatch-strategy", "reliable")
        broker.admin("namespaces", "create", "mine")
        subscribe(broker, "/default/a")
        produce(broker, "/default/a", text="".join(f"{n}\n" for n in range(10)))
        assert len(consume(broker, "/default/a", "-c", 4).stdout.splitlines()) > 4
        broker.admin("subscriptions", "set-heartbeat", "/default/a", "sub", "high_priority")
        brokers = broker.admin("brokers", "list", "-o", "json")
        assert broker.stop() == 0
        broker.start()
        assert broker.admin("brokers", "list", "-o", "json") == brokers
        assert "Namespace: mine" in broker.admin("brokers", "namespaces")
        listed = json.loads(broker.admin("topics", "list", "--namespace", "default", "-o", "json"))
        assert [(topic["name"], topic["delivery"]) for topic in listed] == [
            ("/default/a", "Reliable"),
            ("/default/b", "Reliable"),
        ]
        lag = json.loads(broker.admin("subscriptions", "lag", "/default/a", "sub", "-o", "json"))
        assert {**lag, "lag_seconds": 0} == {
            "cursor": 3,
            "head": 10,
            "lag_messages": 6,
            "has_lag": True,
            "lag_seconds": 0,
            "catch_up_seconds": None,
            "course": "standing",
        }
        explained = json.loads(broker.admin("subscriptions", "explain", "/default/a", "sub", "-o", "json"))
        assert explained["heartbeat"] == "high_priority"
        assert payloads(consume(broker, "/default/a", "-c", 6, "-o", "json")) == [str(n) for n in range(4, 10)]


def test_a_signal_that_comes_twice_at_once_is_one_wish(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        process = broker.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)  # so that both are there when it goes on, however busy we are
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        process = broker.process
        assert process is not None
        # A client that never finishes its request: the broker is patient with it for some seconds.
        with socket.create_connection(("127.0.0.1", broker.client_port)) as client:
            client.sendall(unfinished_request("/danube.ProducerService/SendMessage"))
            until(lambda: client.recv(1), "the broker speaks HTTP/2")
            process.send_signal(signal.SIGINT)
            until(lambda: "broker stopping" in process.text(), "it heard", say=process.text)
            time.sleep(0.5)
            assert process.exit_code is None, "it waits for the request"
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130


def unfinished_request(path: str) -> bytes:
    """The start of a call in HTTP/2: preface, settings, and headers without END_STREAM."""

    def literal(name: str, value: str) -> bytes:
        return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    block = b"".join(literal(name, value) for name, value in {**headers, "content-type": "application/grpc"}.items())
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 0x4, 1, block)


# --- produce and consume ------------------------------------------------------------------------------


def test_lines_of_standard_input_arrive_in_order_as_json(broker: BrokerProcess, topic: str) -> None:
    subscribe(broker, topic)
    lines = [f"line {n}" for n in range(100)] + ["", "ünïcödé"]
    sent = produce(broker, topic, text="\n".join(lines) + "\n")
    assert sent.stdout == "Success: 102\nErrors: 0\n"
    assert payloads(consume(broker, topic, "-c", 102, "-o", "json")) == lines


def test_a_file_is_one_message_and_bytes_survive(broker: BrokerProcess, topic: str, tmp_path: Path) -> None:
    subscribe(broker, topic)
    content = bytes(range(256)) * 10
    (tmp_path / "blob").write_bytes(content)
    sent = produce(broker, topic, "-f", tmp_path / "blob", "-a", "kind:blob,size:2560", "-c", 2, "-i", 1, "-o", "json")
    assert [json.loads(line)["error"] for line in sent.stdout.splitlines()[:2]] == [None, None]
    assert json.loads(sent.stdout.splitlines()[2])["success"] == 2
    got = consume(broker, topic, "-c", 2, "-o", "json")
    for line in map(json.loads, got.stdout.splitlines()):
        assert bytes.fromhex(line["payload_hex"]) == content
        assert line["attributes"] == {"kind": "blob", "size": "2560"}


def test_lines_of_a_file_with_keys_go_to_partitions_by_key(broker: BrokerProcess, tmp_path: Path) -> None:
    name = f"/default/cli{next(NUMBERS)}"
    file = tmp_path / "lines"
    file.write_text("".join(f"k{n % 5}|value {n}\n" for n in range(20)))
    created = broker.admin("topics", "create", name, "--partitions", 3, "--dispatch-strategy", "reliable")
    assert created == f"Partitioned topic created: {name}\n"
    subscribe(broker, name)
    produce(broker, name, "-f", file, "--lines", "--key-separator", "|", "-p", 3)
    got = [json.loads(line) for line in consume(broker, name, "-c", 20, "-o", "json").stdout.splitlines()]
    assert sorted(line["payload"] for line in got) == sorted(f"value {n}" for n in range(20))
    places: dict[str, set[str]] = {}
    for line in got:
        places.setdefault(line["routing_key"], set()).add(line["topic"])
    assert len(places) == 5 and all(len(topics) == 1 for topics in places.values())


def test_text_output_is_the_reference_s(broker: BrokerProcess, topic: str) -> None:
    subscribe(broker, topic)
    sent = produce(broker, topic, "-m", "hello", "-a", "a:b", "-c", 2, "-i", 0)
    assert "Success: 2\nErrors: 0\n" in sent.stdout
    produce(broker, topic, "-m", "x" * 2000)
    got = consume(broker, topic, "-c", 3)
    assert "Received message: hello\n" in got.stdout  # offset 0
    assert "Received reliable message: hello\n" in got.stdout
    assert "Attributes: a: b" in got.stdout and "Total received: 3" in got.stdout
    assert "xxx" not in got.stdout and "2000 bytes" in got.stdout


def test_what_is_not_acknowledged_comes_again(broker: BrokerProcess, topic: str) -> None:
    subscribe(broker, topic)
    produce(broker, topic, text="1\n2\n")
    for flags in (["--no-ack"], ["--no-ack"], []):
        assert payloads(consume(broker, topic, "-c", 2, "-o", "json", *flags)) == ["1", "2"]
    done = consume(broker, topic, "-c", 1, "--timeout", 0.3, "-o", "json")
    assert done.returncode == Exit.NOT_GOOD and payloads(done) == []


def test_a_new_subscription_begins_where_it_is_told_and_an_old_one_goes_on(broker: BrokerProcess, topic: str) -> None:
    def got(start: str, subscription: str = "", count: int = 1) -> list[str]:
        of = ("-s", broker.url, "-t", topic, "-m", subscription or f"from-{start}", "-c", count, "--timeout", 10)
        done = danube_here("consume", *of, "--start", start, "-o", "json")
        assert done.returncode == 0, done.stderr
        return payloads(done)

    produce(broker, topic, text="0\n1\n2\n")
    assert got("earliest", count=3) == ["0", "1", "2"]
    assert got("2") == ["2"]
    assert got("1999-01-01T00:00:00Z") == ["0"]
    assert got("1999-01-01", "old", count=2) == ["0", "1"] and got("earliest", "old") == ["2"]
    late = danube_here(
        "consume", "-s", broker.url, "-t", topic, "-m", "late", "--start", "2100-01-01", "--timeout", 0.1
    )
    assert "Total received: 0 messages" in late.stdout
    for wrong in ("yesterday", "-1", "18446744073709551616"):
        bad = danube_here("consume", "-s", broker.url, "-t", topic, "-m", "bad", f"--start={wrong}")
        assert bad.returncode == Exit.USAGE and bad.stderr == (
            f"danube: --start = {wrong!r} is not allowed: earliest, latest, an offset, or a time as "
            "2026-11-15T09:00:00Z\n"
        )


@pytest.fixture(params=["native", "grpc"])
def address(request: pytest.FixtureRequest, broker: BrokerProcess) -> str:
    return broker.url if request.param == "grpc" else f"danube://127.0.0.1:{broker.stream_port}"


def test_ctrl_c_ends_consume_with_its_summary_and_130(
    broker: BrokerProcess, address: str, topic: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "pydanube", "consume", "-s", address, "-t", topic, "-m", "sub"]
    with Process(command, tmp_path / "consume.out") as process:
        until(lambda: "subscribed" in process.text(), "it subscribes", say=process.text)
        produce(broker, topic, "-m", "one")
        until(lambda: "message: one\n" in process.text(), "it receives", say=process.text)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert "Total received: 1" in process.text() and "Traceback" not in process.text()


def test_ctrl_c_ends_produce_while_it_waits_for_input(address: str, topic: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pydanube", "produce", "-s", address, "-t", topic, "-o", "json"]
    with Process(command, tmp_path / "produce.out") as process:
        process.write("one\n")
        until(lambda: '"error": null' in process.text(), "the first line is sent", say=process.text)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert '{"success": 1, "errors": 0' in process.text() and "Traceback" not in process.text()


def test_refusals_are_one_sentence_and_a_code(broker: BrokerProcess, topic: str) -> None:
    unknown = consume(broker, "/default/nowhere")
    assert unknown.returncode == Exit.NOT_FOUND and "there is no topic /default/nowhere" in unknown.stderr
    mismatch = danube("produce", "-s", broker.url, "-t", topic, "--non-reliable", "-m", "x")
    assert mismatch.returncode == Exit.REFUSED and "FAILED_PRECONDITION" in mismatch.stderr
    nobody = danube("admin", "--endpoint", "http://127.0.0.1:1", "brokers", "list")
    assert (
        nobody.returncode == Exit.NOT_REACHABLE
        and "nobody answers" in nobody.stderr
        and len(nobody.stderr.splitlines()) == 1
    )
    tls = danube("consume", "-s", "https://127.0.0.1:1", "-m", "sub")
    assert tls.returncode == Exit.USAGE and "TLS" in tls.stderr
    bad = danube("produce", "-s", broker.url, "-t", "no slash", "-m", "x")
    assert bad.returncode == Exit.USAGE and "/namespace_name/topic_name" in bad.stderr


def test_a_message_that_is_too_large_is_counted_and_the_rest_goes_on(broker: BrokerProcess, topic: str) -> None:
    text = f"small\n{'x' * 5_000_000}\nsmall too\n"
    done = danube("produce", "-s", broker.url, "-t", topic, "--reliable", text=text)
    assert done.returncode == Exit.NOT_GOOD and done.stdout == "Success: 2\nErrors: 1\n"
    assert "INVALID_ARGUMENT" in done.stderr


# --- admin --------------------------------------------------------------------------------------------


def test_admin_prints_the_reference_s_lines(broker: BrokerProcess, topic: str) -> None:
    [listed] = json.loads(danube("admin", "--endpoint", broker.endpoint, "brokers", "list", "-o", "json").stdout)
    keys = "broker_id broker_status broker_addr broker_role admin_addr metrics_addr"
    assert list(listed) == keys.split() and listed["broker_status"] == "active"
    assert broker.admin("brokers", "leader-broker") == f'Leader Broker: "{listed["broker_id"]}"\n'
    assert broker.admin("namespaces", "create", "shop") == "Namespace Created: true\n"
    assert "Namespace: shop\n" in broker.admin("brokers", "namespaces")
    assert json.loads(broker.admin("namespaces", "policies", "shop", "-o", "json"))["max_message_size"] == 0
    broker.admin("topics", "create", "orders", "--namespace", "shop")
    assert broker.admin("namespaces", "topics", "shop") == "Topic: /shop/orders\n"
    assert broker.admin("topics", "list", "--namespace", "shop") == "Topic: /shop/orders (Reliable)\n"
    served = json.loads(broker.admin("topics", "list", "--broker", listed["broker_id"], "-o", "json"))
    assert {"/shop/orders", topic} <= {each["name"] for each in served}
    assert broker.admin("topics", "delete", "/shop/orders") == "Topic Deleted: true\n"
    assert broker.admin("namespaces", "delete", "shop") == "Namespace Deleted: true\n"
    described = json.loads(broker.admin("topics", "describe", topic, "-o", "json"))
    assert described["topic"] == topic and described["delivery"] == "Reliable" and described["subscriptions"] == []


def test_what_admin_refuses_says_why(broker: BrokerProcess, topic: str) -> None:
    def refusal(*arguments: object) -> str:
        done = danube_here("admin", "--endpoint", broker.endpoint, *arguments)
        assert done.returncode in (Exit.REFUSED, Exit.USAGE, Exit.NOT_FOUND) and len(done.stderr.splitlines()) == 1
        return done.stderr

    assert "/default/nowhere" in refusal("topics", "describe", "/default/nowhere")
    assert "exists" in refusal("topics", "create", topic)
    assert "single broker" in refusal("topics", "unload", topic)
    subscribe(broker, topic)
    range_ = refusal("subscriptions", "set-heartbeat", topic, "sub", "10ms")
    assert "50ms to 1000ms" in range_ and "high_priority" in range_
    assert "1 to 10000" in refusal("subscriptions", "set-dispatch-config", topic, "sub", "--max-unacked-messages", 0)
    assert "dead" in refusal("subscriptions", "set-failure-policy", topic, "sub", "--poison-policy", "dead_letter")


def test_a_subscription_explains_itself_and_can_be_moved(broker: BrokerProcess, topic: str) -> None:
    subscribe(broker, topic)
    explain = ("subscriptions", "explain", topic, "sub")
    assert broker.admin(*explain) == "caught up: everything below offset 0 is acknowledged.\n"
    produce(broker, topic, text="a\nb\nc\n")
    # The broker may hear of the end of the command's consumer a moment after us.
    sentence = until(
        lambda: (said := broker.admin(*explain)).startswith("no consumer") and said, "the consumer is gone"
    )
    assert sentence.startswith("no consumer is connected; 3 messages behind") and sentence.count("\n") == 1
    assert broker.admin("subscriptions", "seek", topic, "sub", "latest") == "Goes on at offset 3\n"
    assert broker.admin(*explain) == "caught up: everything below offset 3 is acknowledged.\n"
    assert broker.admin("subscriptions", "seek", topic, "sub", "1") == "Goes on at offset 1\n"
    assert broker.admin("subscriptions", "seek", topic, "sub", "1999-01-01T00:00:00Z") == "Goes on at offset 0\n"
    assert payloads(consume(broker, topic, "-c", 3, "-o", "json")) == ["a", "b", "c"]
    peeked = json.loads(broker.admin("topics", "peek", topic, "-c", 2, "-o", "json"))
    assert [(each["offset"], each["payload"]) for each in peeked["messages"]] == [(1, "b"), (2, "c")]
    assert broker.admin("topics", "subscriptions", topic) == "Subscription: sub\n"
    assert broker.admin("topics", "unsubscribe", topic, "-s", "sub") == "Unsubscribed: true\n"
    assert broker.admin("topics", "subscriptions", topic) == ""


def test_policies_are_kept_as_they_were_set(broker: BrokerProcess, topic: str) -> None:
    subscribe(broker, topic)
    assert "defaults" in broker.admin("subscriptions", "get-failure-policy", topic, "sub")
    broker.admin(
        *("topics", "set-failure-policy", topic, "-s", "sub", "--max-redelivery-count", 3, "--ack-timeout-ms", 90_000),
        *("--base-redelivery-delay-ms", 10, "--max-redelivery-delay-ms", 100, "--poison-policy", "drop"),
    )
    policy = json.loads(broker.admin("topics", "get-failure-policy", topic, "-s", "sub", "-o", "json"))
    assert policy == {
        "max_redelivery_count": 3,
        "ack_timeout_ms": 90_000,
        "base_redelivery_delay_ms": 10,
        "max_redelivery_delay_ms": 100,
        "backoff_strategy": "fixed",
        "poison_policy": "drop",
        "dead_letter_topic": None,
    }
    broker.admin("subscriptions", "set-dispatch-config", topic, "sub", "--max-unacked-messages", 3)
    assert "3" in broker.admin("subscriptions", "get-dispatch-config", topic, "sub")
    produce(broker, topic, text="1\n2\n3\n4\n5\n")
    done = consume(broker, topic, "--no-ack", "--timeout", 2, "-o", "json")
    assert payloads(done) == ["1", "2", "3"]
