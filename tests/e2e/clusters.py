"""Clusters of real brokers: one process each, metadata members beside them, a shared store, on free ports.

with cluster_in(directory) as cluster:        three brokers, a TTL of 4 s
    cluster[0].kill()
    cluster.admin("topics", "unload", "/default/orders")
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydanube.testing.ports import member_ports
from tests.e2e.processes import CLIENTS, BrokerProcess, danube_here, until
from tools.cluster_processes import ProcessesOf

TTL = 4.0
UNWILLING = CLIENTS / "unwilling_broker.py"  # a broker that cannot store some cursors


class ClusterBroker(BrokerProcess):
    def __init__(self, directory: Path, raft_addr: str, seeds: Sequence[str], storage: str, *flags: str) -> None:
        self.raft_addr = raft_addr
        super().__init__(
            directory,
            *("--raft-addr", raft_addr, "--seed-nodes", ",".join(seeds), "--storage-url", storage),
            *("--registration-ttl", str(TTL), "--upload-interval", "2"),
            *flags,
        )

    program: Path | None = None  # that is run instead of the product, with the same arguments

    @property
    def command(self) -> list[str]:
        words = ["cluster" if word == "standalone" else word for word in super().command]
        if self.program is not None:
            product = words.index("-m")
            words[product : product + 2] = [str(self.program)]
        return words

    @property
    def stream_url(self) -> str:
        return f"danube://127.0.0.1:{self.stream_port}"

    @property
    def broker_id(self) -> str:
        found = re.search(r"cluster broker (\d+), is ready", self.output.read_text(errors="replace"))
        assert found, self.output.read_text(errors="replace")
        return found[1]

    paused = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.exit_code is None

    def pause(self) -> None:
        assert self.process is not None
        self.paused = True
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.paused = False
        self.process.send_signal(signal.SIGCONT)


class EtcdBroker(ClusterBroker):
    """A broker that keeps its metadata in an etcd that somebody else runs."""

    def __init__(self, directory: Path, etcd: str, store: Path, *flags: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        where = ("--etcd", etcd, "--storage-url", store.absolute().as_uri())
        BrokerProcess.__init__(self, directory, *where, "--registration-ttl", str(TTL), *flags)


class ClusterProcesses(ProcessesOf[ClusterBroker]):
    def __init__(self, brokers: Sequence[ClusterBroker], store: Path) -> None:
        super().__init__(brokers)
        self.store = store

    def start(self) -> None:
        """All at once: a metadata store needs a majority."""
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(lambda broker: broker.start(), self.brokers))

    def admin(self, *arguments: object, asked: int | None = None) -> str:
        """What `danube admin` of some living broker prints. It must succeed."""
        broker = self.living[0] if asked is None else self.brokers[asked]
        return broker.admin(*arguments)

    def refused(self, *arguments: object, asked: int = 0) -> str:
        """What a command that must fail says."""
        done = danube_here("admin", "--endpoint", self.brokers[asked].endpoint, *arguments)
        assert done.returncode != 0, done.stdout
        return done.stderr

    def json(self, *arguments: object) -> Any:
        return json.loads(self.admin(*arguments, "--output", "json"))

    def host(self, topic: str) -> ClusterBroker | None:
        """Who has the topic now, as the cluster says; None while it does not know, or the one it names is gone."""
        asked = ("admin", "--endpoint", self.living[0].endpoint, "topics", "describe", topic, "--output", "json")
        done = danube_here(*asked)
        if done.returncode != 0:
            return None
        broker_id = str(json.loads(done.stdout).get("broker_id") or "")
        return self.by_id(broker_id) if broker_id else None

    def hosted(self, topic: str, *, other_than: ClusterBroker | None = None, seconds: float = 60.0) -> ClusterBroker:
        """Waits until somebody (else) has the topic."""

        def found() -> ClusterBroker | None:
            host = self.host(topic)
            return None if host is other_than else host

        return until(found, f"{topic} has another broker", seconds=seconds) or self.brokers[0]


@contextlib.contextmanager
def cluster_in(
    directory: Path, *flags: str, count: int = 3, storage: str | None = None, program: Path | None = None
) -> Iterator[ClusterProcesses]:
    seeds = [f"127.0.0.1:{port}" for port in member_ports(count)]
    store = directory / "store"
    brokers = []
    for number, raft_addr in enumerate(seeds):
        place = directory / f"broker{number}"
        place.mkdir(parents=True, exist_ok=True)
        brokers.append(ClusterBroker(place, raft_addr, seeds, storage or store.absolute().as_uri(), *flags))
        brokers[-1].program = program
    cluster = ClusterProcesses(brokers, store)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.kill)
        cluster.start()
        yield cluster
