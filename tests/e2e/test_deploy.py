"""The unit, the image and the compose file start a broker that becomes ready: their own commands, their own files.

Only addresses, paths and keys are exchanged for those of this machine. systemd and Docker are not run, but read, and
the commands by which the image installs the product are run here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from pydanube.api.server import GRACE_SECONDS
from pydanube.config import ClusterConfig, Flags, load
from pydanube.testing.ports import free_ports
from tests.e2e.etcd import etcd_in
from tests.e2e.objectstores import running_s3_server
from tests.e2e.processes import START_SECONDS, Process, until

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
SOURCES = REPOSITORY / "src" / "pydanube"
CONFIG = "/etc/danube/danube.yml"
CLUSTER_CONFIG = "/etc/danube/cluster.yml"
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def unit() -> dict[str, str]:
    """Settings of the unit; the last of a name wins."""
    text = (DEPLOY / "systemd" / "danube-broker.service").read_text()
    lines = [line for line in text.splitlines() if line and line[0] not in "#["]
    return dict(line.split("=", 1) for line in lines)


def dockerfile() -> list[tuple[str, str]]:
    """Instructions in order, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def last(instruction: str) -> str:
    return [rest for word, rest in dockerfile() if word == instruction][-1]


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return found


class Place:
    """Where a broker listens here, instead of where its file says."""

    def __init__(self, directory: Path, name: str) -> None:
        self.client, self.stream, self.admin, self.metrics = free_ports(4)
        self.data_dir = directory / "data"
        self.file = directory / name
        self.settings: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
        broker = self.settings["broker"]
        assert broker.pop("ports") == {"client": 6650, "stream": 6651, "admin": 50051, "prometheus": 9040}
        broker["ports"] = {
            "client": self.client,
            "stream": self.stream,
            "admin": self.admin,
            "prometheus": self.metrics,
        }
        broker["host"] = "127.0.0.1"
        self.settings["storage"]["local_wal_root"] = str(self.data_dir)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with NO_PROXY.open(f"http://127.0.0.1:{self.metrics}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    @contextmanager
    def running(self, words: list[str], **environment: str) -> Iterator[Process]:
        """The command `danube broker …`, until it is ready; at the end it stops as its supervisor stops it."""
        self.file.write_text(yaml.safe_dump(self.settings))
        assert words[0].rpartition("/")[2] == "danube", words
        command = [sys.executable, "-m", "pydanube", *words[1:]]
        with Process(command, self.file.with_suffix(".log"), env={**os.environ, **environment}) as process:

            def is_ready() -> bool:
                assert process.exit_code is None, process.text()
                return self.get("/health/ready") == (200, "ready\n")

            until(is_ready, "the broker is ready", seconds=START_SECONDS, say=process.text)
            yield process
            assert process.stop() == 0


def exchanged(words: list[str], **places: Path) -> list[str]:
    """The same words with paths of this machine. Every place must have been in them."""
    for path in (CONFIG, CLUSTER_CONFIG):
        if path in words:
            words = [str(places["file"]) if word == path else word for word in words]
            return words
    raise AssertionError(f"{words} name no configuration")


# --- they start ---------------------------------------------------------------------------------------------


def test_the_unit_and_the_image_start_a_broker_that_becomes_ready_and_logs_json(tmp_path: Path) -> None:
    by_systemd = shlex.split(unit()["ExecStart"])
    by_docker = [*json.loads(last("ENTRYPOINT")), *json.loads(last("CMD"))]
    assert [Path(by_systemd[0]).name, *by_systemd[1:]] == by_docker, "one test may stand for both"
    place = Place(tmp_path, "danube.yml")
    place.settings["broker"]["advertised_listeners"]["broker_url"] = f"http://127.0.0.1:{place.client}"
    with place.running(exchanged(by_systemd, file=place.file)) as process:
        assert place.get("/health/live") == (200, "live\n")
        assert place.get("/metrics")[0] == 200
        assert (place.data_dir / "node_id").exists()
    lines = [line for line in process.text().splitlines() if line.startswith("{")]
    phrases = [json.loads(line)["message"] for line in lines]
    assert "broker started" in phrases and "broker stopped" in phrases
    assert all({"time", "level", "logger"} <= set(json.loads(line)) for line in lines)
    others = [line for line in process.text().splitlines() if line and not line.startswith("{")]
    assert not [line for line in others if re.match(r"\d{4}-", line)], "no line is in the other form"


def test_the_brokers_of_the_compose_file_start_on_their_etcd_and_their_store(tmp_path: Path) -> None:
    services = compose()["services"]
    brokers = {name: each for name, each in services.items() if name.startswith("broker")}
    assert len(brokers) == 3
    for name, each in brokers.items():  # so one may stand for all
        words = [word.replace(name, "broker1") for word in each["command"]]
        assert words == brokers["broker1"]["command"]
        assert each["volumes"] == [f"./cluster.yml:{CLUSTER_CONFIG}:ro", f"{name}:/var/lib/danube"]
        assert set(each["environment"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    place = Place(tmp_path, "cluster.yml")
    with etcd_in(tmp_path / "etcd") as etcd, running_s3_server() as store:
        request = urllib.request.Request(f"{store._filer}/buckets/danube/", method="POST")
        NO_PROXY.open(request, timeout=30).close()
        assert place.settings["meta_store"]["etcd"] == ["etcd:2379"]
        assert place.settings["storage"]["durable"]["endpoint"] == "http://store:8333"
        place.settings["meta_store"]["etcd"] = [etcd.client]
        place.settings["storage"]["durable"]["endpoint"] = store.endpoint
        words = [*json.loads(last("ENTRYPOINT")), *brokers["broker1"]["command"]]
        words = exchanged(words, file=place.file)
        words = [f"127.0.0.1:{place.client}" if word == "broker1:6650" else word for word in words]
        keys = {"AWS_ACCESS_KEY_ID": store.access_key, "AWS_SECRET_ACCESS_KEY": store.secret_key}
        with place.running(words, **keys):
            assert 'mode="cluster"' in place.get("/metrics")[1]


# --- they say what they should --------------------------------------------------------------------------------


def test_the_example_configurations_are_accepted_without_a_warning() -> None:
    alone = load(Flags(config_file=DEPLOY / "danube.yml", mode="standalone"))
    member = load(Flags(config_file=DEPLOY / "cluster.yml", mode="cluster", advertised_addr="broker1:6650"))
    assert (alone.warnings, member.warnings) == ((), ())
    assert alone.data_dir == member.data_dir == Path("/var/lib/danube")
    assert alone.lines.format == member.lines.format == "json"


def test_whoever_stops_a_broker_waits_until_it_has_handed_its_topics_over() -> None:
    needed = ClusterConfig().shutdown_seconds + 2 * GRACE_SECONDS
    assert int(unit()["TimeoutStopSec"]) > needed
    for name, each in compose()["services"].items():
        if name.startswith("broker"):
            assert int(each["stop_grace_period"].removesuffix("s")) > needed
    assert (unit()["KillSignal"], last("STOPSIGNAL")) == ("SIGTERM", "SIGTERM")


def test_the_unit_confines_the_broker_and_restarts_it_when_it_fails() -> None:
    settings = unit()
    assert settings["User"] == "danube" and settings["Restart"] == "on-failure"
    assert int(settings["LimitNOFILE"]) >= 65536
    assert f"/var/lib/{settings['StateDirectory']}" == settings["WorkingDirectory"] == "/var/lib/danube"
    assert settings["ProtectSystem"] == "strict" and settings["NoNewPrivileges"] == "yes"
    assert settings["Type"] == "exec", "the broker does not tell systemd that it is ready"


def test_every_line_of_the_unit_stands_in_a_section_and_says_something_once() -> None:
    """What systemd would complain of, as far as a reader can tell."""
    sections: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd" / "danube-broker.service").read_text().splitlines():
        if line.startswith("["):
            sections[line] = []
        elif line and not line.startswith("#"):
            name, equals, _ = line.partition("=")
            assert equals and re.fullmatch(r"[A-Z][A-Za-z]+", name), line
            list(sections.values())[-1].append(name)
    assert list(sections) == ["[Unit]", "[Service]", "[Install]"]
    for names in sections.values():
        assert names and len(names) == len(set(names))
    assert {"ExecStart", "User", "Restart", "TimeoutStopSec", "LimitNOFILE"} <= set(sections["[Service]"])
    assert sections["[Install]"] == ["WantedBy"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_itself_has_nothing_to_say_against_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    assert analyze is not None
    text = (DEPLOY / "systemd" / "danube-broker.service").read_text()
    copy = tmp_path / "danube-broker.service"
    copy.write_text(text.replace("/opt/danube/bin/danube", "/bin/true"))
    done = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, timeout=30)
    assert "danube-broker.service" not in done.stderr, done.stderr


def test_the_image_is_pinned_runs_as_nobody_special_and_asks_whether_it_is_ready() -> None:
    bases = [rest.split()[0] for word, rest in dockerfile() if word == "FROM"]
    assert len(bases) == 2 and all(re.fullmatch(r"python:3\.\d+-slim-\w+", base) for base in bases)
    assert last("USER") == "danube"
    assert "/health/ready" in last("HEALTHCHECK") and ":9040" in last("HEALTHCHECK")
    assert last("EXPOSE").split() == ["6650", "6651", "50051", "9040"]
    assert last("VOLUME") == "/var/lib/danube"
    for word, rest in dockerfile():
        if word == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (REPOSITORY / source).exists(), source


@pytest.mark.slow
def test_the_commands_of_the_image_install_a_product_with_all_its_parts_from_the_files_it_copies(
    tmp_path: Path,
) -> None:
    """Its packages stand for those of the lock file, which are the same: they are not fetched once more."""
    source, opt = tmp_path / "src", tmp_path / "opt"
    run = [rest for word, rest in dockerfile() if word == "RUN"]
    assert run[0] == "python -m venv /opt/danube"
    assert run[1] == "pip install --require-hashes --only-binary :all: -r requirements/core.lock"
    venv.create(opt, symlinks=True)
    [packages] = opt.glob("lib/python3.*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    source.mkdir()
    for word, rest in dockerfile():
        if word == "COPY" and rest.startswith(("pyproject.toml", "src")):
            *names, target = rest.split()
            for name in names:
                copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
                copy(REPOSITORY / name, source / (name if target == "./" else target))
    pip = shlex.split(run[2])
    assert pip[:2] == ["pip", "install"] and pip[-1] == "."
    python = str(opt / "bin" / "python")
    environment = {**os.environ, "PIP_IGNORE_INSTALLED": "1"}
    command = [python, "-m", *pip]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    said = subprocess.run([opt / "bin" / "danube", "--version"], capture_output=True, text=True, timeout=60)
    assert said.stdout.startswith("danube ")
    installed = {each.relative_to(packages).as_posix() for each in (packages / "pydanube").rglob("*") if each.is_file()}
    written = {each.relative_to(REPOSITORY / "src").as_posix() for each in SOURCES.rglob("*") if each.is_file()}
    assert {each for each in written if "__pycache__" not in each} <= installed


def test_only_what_the_image_copies_is_sent_to_its_builder() -> None:
    lines = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source for word, rest in dockerfile() if word == "COPY" and "--from" not in rest for source in rest.split()[:-1]
    }
    assert kept == copied


def test_images_have_a_version_and_no_registry() -> None:
    for name, each in compose()["services"].items():
        image, _, tag = each["image"].partition(":")
        assert tag and tag != "latest", name
        assert "." not in image.partition("/")[0], f"{name}: the registry is for whoever runs it to choose"
    for each in compose()["services"].values():
        for volume in each.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in compose()["volumes"] or (DEPLOY / source).exists(), volume
