"""A cluster whose etcd is gone for good goes on with a copy of it, as docs/operations.md says: both ways."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pydanube
from pydanube.testing.ports import free_ports
from tests.e2e.clusters import EtcdBroker
from tests.e2e.etcd import EtcdServer, EtcdServers
from tests.e2e.processes import until

pytestmark = pytest.mark.slow

ORDERS = "/default/orders"
ETCDCTL = shutil.which(os.environ.get("DANUBE_TEST_ETCDCTL", "etcdctl"))


class Copy:
    """The directory of a member, copied while that one is stopped. It needs no other program than etcd."""

    def take(self, etcd: EtcdServers, to: Path) -> None:
        *_, member = etcd.members
        member.stop()
        shutil.copytree(member.directory / f"{member.name}.etcd", to)
        member.start()
        member.until_healthy()

    def restored(self, copy: Path, directory: Path) -> EtcdServer:
        client, peer = free_ports(2)
        directory.mkdir()
        shutil.copytree(copy, directory / "alone.etcd")
        return EtcdServer(directory, "alone", (client, peer), ["--force-new-cluster"])


class Snapshot:
    """etcd's own, taken from a member that runs."""

    def take(self, etcd: EtcdServers, to: Path) -> None:
        self._run("--endpoints", etcd.endpoints[0], "snapshot", "save", to)

    def restored(self, copy: Path, directory: Path) -> EtcdServer:
        client, peer = free_ports(2)
        server = EtcdServer(directory, "alone", (client, peer))
        self._run(
            *("snapshot", "restore", copy, "--data-dir", directory / "alone.etcd", "--name", server.name),
            *("--initial-cluster", server.initial_cluster, "--initial-cluster-token", directory),
            *("--initial-advertise-peer-urls", f"http://{server.peer}"),
        )
        return server

    def _run(self, *words: object) -> None:
        assert ETCDCTL is not None
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run([ETCDCTL, *map(str, words)], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", [Copy(), *([Snapshot()] if ETCDCTL else [])], ids=lambda way: type(way).__name__)
def test_topics_messages_and_subscriptions_are_there_when_etcd_was_restored(
    tmp_path: Path, way: Copy | Snapshot
) -> None:
    copy = tmp_path / "copy"
    with EtcdServers(tmp_path / "etcd", 3) as etcd:
        broker = EtcdBroker(tmp_path, ",".join(etcd.endpoints), tmp_path / "store", "--upload-interval", "1")
        with broker:
            asyncio.run(send(broker.stream_url, range(20)))
            assert asyncio.run(read(broker.stream_url, 10)) == list(range(10))
            until(lambda: is_uploaded(broker), "everything is in the object store")
            # A member may not know yet that its newest change is settled; what came before that one it does know.
            broker.admin("topics", "create", "/default/later", "--dispatch-strategy", "reliable")
            way.take(etcd, copy)
            assert asyncio.run(read(broker.stream_url, 5)) == list(range(10, 15))
            asyncio.run(send(broker.stream_url, range(900, 903)))
            assert broker.stop() == 0
        for member in etcd.members:
            member.kill()
            shutil.rmtree(member.directory / f"{member.name}.etcd")
    with way.restored(copy, tmp_path / "restored") as restored:
        again = EtcdBroker(tmp_path / "again", restored.client, tmp_path / "store", "--upload-interval", "1")
        again.data_dir = broker.data_dir
        with again:
            assert ORDERS in again.admin("topics", "list", "--namespace", "default")
            # Acks since the copy are forgotten, and so is what was uploaded since: as the page says.
            asyncio.run(send(again.stream_url, range(20, 25)))
            assert asyncio.run(read(again.stream_url, 15)) == list(range(10, 25))
            # In one object, or in more if an upload came between them.
            assert re.search(r"data-20-2[0-2]-1\.parquet", again.admin("storage", "verify", ORDERS))
            assert again.stop() == 0


def is_uploaded(broker: EtcdBroker) -> bool:
    found = json.loads(broker.admin("storage", "list", ORDERS, "--output", "json"))
    return bool(found["cloud"] == [{"first": 0, "end": 20}])


async def send(url: str, numbers: range) -> None:
    async with pydanube.connect(url) as client, client.producer(ORDERS) as orders:
        for number in numbers:
            await orders.send(b"%d" % number)


async def read(url: str, count: int) -> list[int]:
    """The next ones of the subscription, acknowledged."""
    found: list[int] = []
    async with (
        pydanube.connect(url) as client,
        client.consumer(ORDERS, subscription="billing", start="earliest") as billing,
    ):
        async with asyncio.timeout(60):
            async for message in billing:
                found.append(int(message.payload))
                await message.ack()
                if len(found) == count:
                    break
        await billing.flush()
    return found
