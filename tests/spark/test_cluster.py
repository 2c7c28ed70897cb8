"""Executors in processes of their own, without our package: a local cluster, and a standalone master and worker.

The package is sent to them, and one of them is killed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark
import pytest

from pydanube.spark.java import java_home, packaged, version_of
from tests.e2e.objectstores import S3Server
from tests.spark.places import Place, free_port, numbers, without_us

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("cluster_query.py")
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


def environment(directory: Path) -> dict[str, str]:
    home = java_home()
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **({"JAVA_HOME": home} if home else {}),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "SPARK_WORKER_DIR": str(directory / "worker"),
        "PYSPARK_PYTHON": str(without_us(directory)),
    }


@contextmanager
def standalone(directory: Path) -> Iterator[str]:
    """A master and a worker, on loopback."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    commands = (
        ["master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"],
        ["worker.Worker", "--host", "127.0.0.1", "-c", "2", "-m", "1200m", "--webui-port", "0", url],
    )
    running = []
    try:
        for number, command in enumerate(commands):
            with (directory / f"{number}.log").open("wb") as log:  # the child has a copy of its own
                running.append(
                    subprocess.Popen(
                        [str(SPARK_CLASS), f"org.apache.spark.deploy.{command[0]}", *command[1:]],
                        env=environment(directory),
                        stdout=log,
                        stderr=log,
                    )
                )
            if number == 0:
                wait_for(port)
        yield url
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError(f"nobody listens at port {port}")


def check(place: Place, directory: Path, master: str, s3_server: S3Server) -> None:
    asked = [without_us(directory), "-c", "import pyarrow, obstore, pyspark; import pydanube"]
    answer = subprocess.run(asked, env=environment(directory), capture_output=True, text=True)
    assert answer.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'pydanube'"
    source, target = place.new_topic("from-cluster"), place.new_topic("to-cluster")
    place.send(source, numbers(0, 3000))
    place.upload(source)
    place.send(source, numbers(3000, 4000))
    done = subprocess.run(
        [
            *(sys.executable, str(PROGRAM), master, place.url, source, target),
            *(str(directory), s3_server.url(), json.dumps(s3_server.options)),
        ],
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    read = {"rows": 4000, "distinct": 4000, "last": 3999, "killed": 1}
    assert told == {**read, "stored": 4000, "found": 4000}, "executors write tables to an object store, without a jar"
    assert Counter(place.payloads(target)) == Counter(numbers(0, 4000))


def test_executors_of_a_local_cluster_read_and_write_while_one_is_killed(
    place: Place, tmp_path: Path, s3_server: S3Server
) -> None:
    check(place, tmp_path, "local-cluster[2,1,1024]", s3_server)


def test_a_standalone_master_and_worker_do_the_same(place: Place, tmp_path: Path, s3_server: S3Server) -> None:
    with standalone(tmp_path) as master:
        check(place, tmp_path, master, s3_server)


def test_the_packaged_java_is_enough_for_spark(tmp_path: Path) -> None:
    home = packaged(tmp_path / "java")
    assert version_of(f"{home}/bin/java") >= 17
    asked = [f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run(asked, capture_output=True, timeout=60).returncode == 0
    assert "share" not in str(packaged(tmp_path / "java"))
