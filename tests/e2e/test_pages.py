"""Pages that need real processes, followed as their readers do: every command, in order, with what it prints.

docs/getting-started.md is for somebody new, docs/operations.md for somebody with a cluster, docs/cli.md for somebody
who looks a command up. The reader has a directory of their own, and the machine's usual ports may be taken; so the
pages' ports become free ones, and that is all that is changed, besides how many messages are sent while a topic moves,
and that the machines a, b and c are this one and their bucket is a directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import pydanube
from pydanube.testing.ports import free_block, free_ports, member_ports
from tests.e2e.processes import READY, Process, danube_here, until
from tests.pages import DOCS, REPOSITORY, Block, blocks, missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = re.sub(r"\b499\b", "149", re.sub(r"\b500\b", "150", (DOCS / "getting-started.md").read_text()))
PARTS = {
    heading.partition(".")[0]: text for heading, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
FOREVER = (
    "consume --topic /default/hello --subscription me",
    "consume -t /default/orders -m my-subscription",
    "consume -t /default/orders -m from-the-first --start earliest",
    "top --sort lag",
    "python moving.py",
)
STANDALONE = "danube broker --mode standalone --data-dir ./danube-data"
OUTPUT_SECONDS = 60.0
WITH_PROGRAMS = {**os.environ, "PATH": f"{REPOSITORY / '.venv/bin'}:{os.environ['PATH']}"}


def until_ready(broker: Process) -> None:
    def is_ready() -> bool:
        assert broker.exit_code is None, broker.text()
        return READY in broker.text()

    until(is_ready, "it is ready", seconds=OUTPUT_SECONDS, say=broker.text)


def shell_blocks(page: str) -> list[Block]:
    return [block for block in blocks((DOCS / page).read_text()) if block.language == "sh"]


class Reader:
    """Somebody with a checkout and three terminals."""

    def __init__(self, directory: Path, ports: Mapping[str, int], environment: Mapping[str, str]) -> None:
        self.directory = directory
        self.ports = ports
        self.environment = {**os.environ, **environment}
        self.environment["PATH"] = WITH_PROGRAMS["PATH"]
        self.running: list[Process] = []
        self.said = ""
        for name in ("Makefile", "scripts", "examples"):
            copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
            copy(REPOSITORY / name, directory / name)
        for name in (".venv", "src"):
            (directory / name).symlink_to(REPOSITORY / name)

    def follow(self, part: str) -> None:
        for block in blocks(self.with_ports(PARTS[part])):
            if "End the consumer with Ctrl-C" in block.before:
                self.interrupt()
            match block.language:
                case "sh":
                    self.run_all(block)
                case "python":
                    (self.directory / block.name).write_text(block.text)
                case "text":
                    self._expect(block.text)

    def interrupt(self) -> Process:
        """Ctrl-C in the terminal that was opened last."""
        newest = self.running.pop()
        newest.send_signal(signal.SIGINT)
        newest.wait()
        newest.kill()  # and its keyboard is gone
        return newest

    def stop_newest(self) -> None:
        """SIGTERM to the broker that was started last."""
        assert self.running.pop().stop() == 0

    def browse(self, path: str) -> bytes:
        """A page of the web admin."""
        with urlopen(f"http://127.0.0.1:{self.ports['8080']}{path}", timeout=OUTPUT_SECONDS) as answer:
            page: bytes = answer.read()
        return page

    def close(self) -> None:
        subprocess.run(["scripts/brokers", "clean"], cwd=self.directory, env=self.environment, timeout=120)
        for each in self.running:
            each.kill()

    def with_ports(self, text: str) -> str:
        return re.sub(r"\b(127\.0\.0\.1):(\d+)", lambda found: f"{found[1]}:{self.ports.get(found[2], found[2])}", text)

    def until_ready(self) -> None:
        until_ready(self.running[-1])

    def until_shown(self, text: str) -> None:
        """In the terminal that was opened last."""
        newest = self.running[-1]
        until(lambda: text in newest.text(), f"it shows {text}", seconds=OUTPUT_SECONDS, say=newest.text)

    def run_all(self, block: Block) -> None:
        self.said = ""
        for command in block.commands:
            if command == "make run":
                self.run_standalone("./danube-data")
            elif command == STANDALONE:
                self.start(f"{command} {self._listening()}")
            elif " admin serve" in command:
                native = f"--service-addr danube://127.0.0.1:{self.ports['6651']}"  # it asks at the usual one
                self.start(f"{command} --listen-addr 127.0.0.1:{self.ports['8080']} {native}")
            elif command.endswith(FOREVER):
                self.start(command.replace("danube top", "env FORCE_COLOR=1 danube top"))  # as on a terminal
            elif command.removeprefix(".venv/bin/").startswith(("danube admin ", "danube top ")):
                words = shlex.split(command)[1:]
                if "redrive" in words:  # it asks at the usual native port
                    words += ["--service-addr", f"danube://127.0.0.1:{self.ports['6651']}"]
                here = danube_here(*words)  # which spares a second of starting
                assert here.returncode == 0, f"{command}\n{here.stdout}{here.stderr}"
                self.said += here.stdout
            else:
                done = subprocess.run(
                    self._command(command),
                    shell=True,
                    cwd=self.directory,
                    env=self.environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=OUTPUT_SECONDS,
                )
                assert done.returncode == 0, f"{command}\n{done.stdout}"
                self.said += done.stdout

    def _command(self, command: str) -> str:
        # What is installed is no business of this test.
        return re.sub(r"^make ", "make --silent --no-print-directory -o setup -o setup-spark ", command)

    def run_standalone(self, data_dir: str) -> None:
        """As `make run` does, on the page's ports."""
        recipe = subprocess.check_output(
            ["make", "--no-print-directory", "-n", "-o", "setup", "run"], cwd=self.directory, text=True
        )
        command = recipe.splitlines()[-1]
        assert STANDALONE in command
        self.start(f"{command.replace('./danube-data', data_dir)} {self._listening()}")

    def _listening(self) -> str:
        flags = {"--broker-addr": "6650", "--stream-addr": "6651", "--admin-addr": "50051"}
        flags |= {"--prom-exporter": "9040", "--web-addr": "8080"}
        return " ".join(f"{flag} 127.0.0.1:{self.ports[port]}" for flag, port in flags.items())

    def start(self, command: str) -> None:
        """In a terminal of its own."""
        output = self.directory / f"terminal-{len(list(self.directory.glob('terminal-*')))}"
        words = ["sh", "-c", re.sub(r"^(exec )?", "exec ", command)]
        started = Process(words, output, cwd=self.directory, env=self.environment)
        self.running.append(started)
        until(started.text, f"{command} says something", seconds=OUTPUT_SECONDS)

    def _expect(self, expected: str) -> None:
        """Some terminal shows this, or will."""

        def nothing_is_missing() -> bool:
            return any(missing(expected, said) is None for said in self._shown())

        until(nothing_is_missing, expected, seconds=OUTPUT_SECONDS, say=lambda: "\n---\n".join(self._shown()))

    def _shown(self) -> list[str]:
        return [self.said, *(each.text() for each in reversed(self.running))]


@contextlib.contextmanager
def reader_in(directory: Path, ports: Mapping[str, int], environment: Mapping[str, str]) -> Iterator[Reader]:
    reader = Reader(directory, ports, environment)
    try:
        yield reader
    finally:
        reader.close()


def addresses(stream: int, admin: int) -> dict[str, str]:
    url, endpoint = f"danube://127.0.0.1:{stream}", f"http://127.0.0.1:{admin}"
    return {"DANUBE_SERVICE_ADDR": url, "DANUBE_ADMIN_ENDPOINT": endpoint}


def operate(reader: Reader) -> None:
    """Follows docs/operations.md, with the cluster that the reader has."""
    page = reader.with_ports((DOCS / "operations.md").read_text())
    with pydanube.blocking.connect(f"danube://127.0.0.1:{reader.ports['6651']}") as client:
        client.create_topic("/default/orders")
        client.create_topic("/default/ledger")
        with client.consumer("/default/orders", subscription="billing"), client.producer("/default/orders") as orders:
            orders.send(b"2 coffees")
    broker, node = ids_of(reader, 1)
    for block in blocks(page):
        if block.language != "sh" or "danube-backup" in block.text:
            continue
        if block.heading == "Add or remove a broker" and "--join" not in block.text:
            broker, node = ids_of(reader, 3)
        for command in block.commands:
            said = (
                command.replace("STORE", f"file://{reader.directory}/danube-data/cluster/store")
                .replace("--to BROKER", f"--to {elsewhere(reader)}" if "--to" in command else "")
                .replace("BROKER", broker)
                .replace("NODE", node)
                .replace("START", "0")
            )
            # Nobody is here to press Enter, and no other machine to restart.
            said = re.sub(r"( maintenance \d+).*", r"\1 --command true", said)
            if " remove-node " in said:
                reader.stop_newest()
            if " broker " in said:
                reader.start(f".venv/bin/{said}")
                reader.until_ready()
            else:
                done = danube_here(*shlex.split(said)[1:])
                refused = "discard" in said  # nobody has died here; tests/cli/test_cluster_cli.py has those
                assert (done.returncode != 0) == refused, f"{said}\n{done.stdout}{done.stderr}"


def admin_json(*words: str) -> Any:
    done = danube_here("admin", *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ids_of(reader: Reader, number: int) -> tuple[str, str]:
    """Of the cluster's broker with this number: its own id, and that of its metadata member."""
    endpoint = f"http://127.0.0.1:{reader.ports['50051'] + number}"
    [broker] = [each["broker_id"] for each in admin_json("brokers", "list") if each["admin_addr"] == endpoint]
    return broker, str(admin_json("--endpoint", endpoint, "cluster", "status")["self_node_id"])


def elsewhere(reader: Reader) -> str:
    """A broker that does not have the topic."""
    owner = admin_json("topics", "describe", "/default/orders")["broker_id"]
    return next(each["broker_id"] for each in admin_json("brokers", "list") if each["broker_id"] != owner)


def check_backup(reader: Reader) -> None:
    """The copy of a stopped broker's data directory is whole, and a broker that starts on it has everything."""
    (command,) = [
        each for block in blocks((DOCS / "operations.md").read_text()) for each in block.commands if "backup" in each
    ]
    reader.stop_newest()
    verify = "danube log verify ./danube-data"
    assert verify in (DOCS / "runbooks" / "DanubeTopicNotOpen.md").read_text()
    with contextlib.chdir(reader.directory):
        done = danube_here(*verify.split()[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(reader.directory / "danube-data", reader.directory / "danube-backup")
    done = danube_here(*shlex.split(command)[1:-1], reader.directory / "danube-backup")
    assert done.returncode == 0, done.stdout + done.stderr
    reader.run_standalone("./danube-backup")
    reader.until_ready()
    assert admin_json("topics", "describe", "/default/hello")["head"] == 4
    assert admin_json("subscriptions", "lag", "/default/hello", "me")["cursor"] == 3


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """Somebody with the ports of one broker."""
    client, stream, admin, metrics, web = free_ports(5)
    ports = {"6650": client, "6651": stream, "50051": admin, "9040": metrics, "8080": web}
    environment = {**addresses(stream, admin), "DANUBE_CONFIG_DIR": str(tmp_path / "config")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with reader_in(tmp_path, ports, environment) as reader:
        yield reader


def test_a_broker_runs_the_first_message_arrives_and_a_backup_is_whole(newcomer: Reader) -> None:
    newcomer.follow("1")
    newcomer.follow("2")
    assert b"/default/hello" in newcomer.browse("/topics")
    check_backup(newcomer)


def fail_an_order(reader: Reader) -> None:
    """One is given up by its consumer, and is a dead letter."""
    orders, dead = "/default/orders", "/default/orders-dlq"
    policy = ("--max-redelivery-count", 0, "--poison-policy", "dead_letter", "--dead-letter-topic", dead)
    with pydanube.blocking.connect(f"danube://127.0.0.1:{reader.ports['6651']}") as client:
        client.create_topic(orders)
        with client.consumer(orders, subscription="billing") as consumer, client.producer(orders) as producer:
            done = danube_here("admin", "subscriptions", "set-failure-policy", orders, "billing", *policy)
            assert done.returncode == 0, done.stderr
            producer.send(b"2 coffees")
            consumer.receive(timeout=OUTPUT_SECONDS).nack(reason="timeout of the printer")
            until(lambda: dead in client.list_topics() and client.describe_topic(dead).head == 1, "it is dead")


def test_the_examples_of_the_commands_run(newcomer: Reader) -> None:
    broker, *examples = shell_blocks("cli.md")
    assert broker.commands == shell_blocks("web-admin.md")[0].commands == [STANDALONE]
    newcomer.run_all(broker)
    newcomer.until_ready()
    fail_an_order(newcomer)
    for block in (*examples, *shell_blocks("concepts.md")):
        if block.heading == "danube pipeline run" or "--mode cluster" in block.text:
            continue  # tests/spark/test_page.py, and the test below
        newcomer.run_all(block)
        match block.heading, block.commands:
            case "danube consume", [command] if command.endswith(FOREVER):
                assert danube_here("produce", "-t", "/default/orders", "-m", "tea").returncode == 0
                newcomer.until_shown("Received reliable message: tea")
                assert newcomer.interrupt().exit_code == 130
            case "danube top", [command] if command.endswith(FOREVER):
                newcomer.until_shown("/default/orders")
                assert newcomer.interrupt().exit_code == 0
            case "danube admin topics redrive", _:
                assert "Redrive: 1" in newcomer.said or "Redriven: 1" in newcomer.said
            case _:
                assert newcomer.said, block.text


def test_the_example_of_a_cluster_is_a_cluster(tmp_path: Path) -> None:
    [example] = [block.commands[0] for block in shell_blocks("cli.md") if "--mode cluster" in block.text]
    places = [(machine, port) for machine in "abc" for port in ("6650", "6651", "50051", "9040")]
    ports = dict(zip(places, free_ports(len(places)), strict=True))
    ports |= zip((("a", "7650"), ("b", "7650"), ("c", "7650")), member_ports(3), strict=True)

    def here(address: re.Match[str]) -> str:
        return f"127.0.0.1:{ports[address[1], address[2]]}"

    with contextlib.ExitStack() as stack:
        brokers = []
        for machine in "abc":
            command = re.sub(r" a:(\d+)(?= )", rf" {machine}:\1", f"exec {example} --prom-exporter {machine}:9040")
            command = re.sub(r"\b([abc]):(\d+)", here, command)
            command = command.replace("s3://", f"{tmp_path.as_uri()}/")
            (tmp_path / machine).mkdir()
            started = Process(
                ["sh", "-c", command], tmp_path / f"{machine}.log", cwd=tmp_path / machine, env=WITH_PROGRAMS
            )
            brokers.append(stack.enter_context(started))
        for broker in brokers:
            until_ready(broker)
        listed = admin_json("--endpoint", f"http://127.0.0.1:{ports['b', '50051']}", "brokers", "list")
    assert {each["admin_addr"] for each in listed} == {f"http://127.0.0.1:{ports[name, '50051']}" for name in "abc"}


def test_no_part_of_getting_started_is_without_a_test() -> None:
    assert list(PARTS) == ["1", "2", "3", "4", "5", "6", "Where to go on"]
    assert blocks(PARTS["Where to go on"]) == []


def test_the_first_commands_of_the_readme_are_those_of_getting_started() -> None:
    followed = {command for block in shell_blocks("getting-started.md") for command in block.commands}
    first = [command for block in shell_blocks("../README.md") for command in block.commands]
    assert len(first) == 9
    assert set(first) - followed == {"make test", "make demo"}  # tests/docs/test_examples.py says why


def test_a_cluster_runs_a_topic_moves_an_operator_works_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the page says, in which steps the brokers have them, and where they are in a block that is free.
    used = {
        "CLIENT": (6650, 10, 0),
        "STREAM": (6651, 10, 1),
        "ADMIN": (50051, 1, 2),
        "METRICS": (9040, 1, 6),
        "RAFT": (7650, 1, 12),
    }
    first = free_block(40)
    bases = {name: first + place for name, (_, _, place) in used.items()}
    ports = {str(port + step * n): bases[name] + step * n for name, (port, step, _) in used.items() for n in range(4)}
    ports["8080"] = free_ports(1)[0]
    environment = {**{name: str(base) for name, base in bases.items()}, **addresses(bases["STREAM"], bases["ADMIN"])}
    monkeypatch.setenv("DANUBE_ADMIN_ENDPOINT", environment["DANUBE_ADMIN_ENDPOINT"])
    with reader_in(tmp_path, ports, environment) as reader:
        reader.follow("3")
        reader.follow("4")
        assert b"/default/moving" in reader.browse("/topics")
        reader.interrupt()
        operate(reader)
        (tmp_path / "spark_read.py").touch()  # part 5 has a test where Spark is
        reader.follow("6")
        assert not (tmp_path / "danube-data").exists()
