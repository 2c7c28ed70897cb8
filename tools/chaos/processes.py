"""The processes of a cluster that is broken on purpose: brokers, etcd members, an object store, and their logs.

Each is a session of its own with its output in a file, killed by the kernel when the harness ends, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydanube.errors import DanubeError
from tools.chaos.net import Network

START_SECONDS: Final = 120.0
STOP_SECONDS: Final = 90.0
ANSWER_SECONDS: Final = 3.0
BUCKET: Final = "chaos"
ACCESS_KEY: Final = "danube-chaos"
SECRET_KEY: Final = "not-a-secret-of-anybody"
DISK_MEGABYTES: Final = 256
NO_PROXY: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ChaosFailed(DanubeError):
    """The harness itself cannot go on: a server that does not start, or is missing."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float) -> None:
    """Raises ChaosFailed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not await condition():
        if loop.time() > deadline:
            raise ChaosFailed(f"{what}: not within {seconds:.0f} s")
        await asyncio.sleep(0.1)


class Server:
    """A program that can be started, stopped, paused and killed, again and again."""

    def __init__(self, name: str, directory: Path, network: Network, broker: int | None = None) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self._network = network
        self._broker = broker
        self._child: subprocess.Popen[bytes] | None = None
        self.paused = False

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        assert not self.running, self.name
        with self.log.open("ab") as log:
            before = "" if self._child is None else f", the one before ended with {self._child.returncode}"
            log.write(f"--- started{before}\n".encode())
            self._child = subprocess.Popen(
                self._network.guarded(self.command(), self._broker),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )
        self.paused = False

    def send_signal(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self.paused = False

    def pause(self) -> None:
        self.paused = True
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.paused = False
        self.send_signal(signal.SIGCONT)

    async def stop(self) -> bool:
        """As an operator does. False: it had to be killed."""
        self.send_signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + STOP_SECONDS
        while self.running:
            if loop.time() > deadline:
                self.kill()
                return False
            await asyncio.sleep(0.05)
        return True

    def tail(self, lines: int = 5) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


async def answers(url: str, wanted: bytes = b"") -> bool:
    """Whether a server answers there as wanted, within a second or two."""
    parts = urlsplit(url)
    request = f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(request.encode())
                answer = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return answer.split(b"\r\n", 1)[0].split()[1:2] == [b"200"] and wanted in answer


# --- etcd -------------------------------------------------------------------------------------------------------


class EtcdMember(Server):
    def __init__(self, number: int, directory: Path, network: Network) -> None:
        super().__init__(f"etcd{number}", directory, network)
        program = shutil.which("etcd")
        if program is None:
            raise ChaosFailed("etcd is missing: install etcd-server (Debian, Ubuntu: apt-get install etcd-server)")
        self._program = program
        host = network.address("back")
        self.client, self.peer = (f"{host}:{port}" for port in network.ports(2))
        self.data = directory / f"{self.name}.data"
        self.initial_cluster = ""

    def command(self) -> Sequence[str]:
        client, peer = f"http://{self.client}", f"http://{self.peer}"
        return [
            *(self._program, "--name", self.name, "--data-dir", str(self.data)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", self.initial_cluster, "--initial-cluster-token", "chaos"),
            *("--heartbeat-interval", "200", "--election-timeout", "2000"),  # a busy machine is not a dead one
            *("--logger", "zap", "--log-outputs", "stderr", "--log-level", "warn"),
        ]

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}

    async def healthy(self) -> bool:
        return self.running and await answers(f"http://{self.client}/health", b'"true"')

    async def leads(self) -> bool:
        return self.running and await answers(f"http://{self.client}/metrics", b"\netcd_server_is_leader 1\n")


def etcd_members(directory: Path, network: Network, count: int = 3) -> list[EtcdMember]:
    members = [EtcdMember(number, directory, network) for number in range(count)]
    for member in members:
        member.initial_cluster = ",".join(f"{each.name}=http://{each.peer}" for each in members)
    return members


# --- the object store -------------------------------------------------------------------------------------------

WEED_PORTS: Final = (
    *("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc"),
)


class ObjectServer(Server):
    """SeaweedFS, which speaks S3."""

    def __init__(self, directory: Path, network: Network) -> None:
        super().__init__("objects", directory, network)
        beside = Path(sys.executable).parent / "weed"
        program = str(beside) if beside.exists() else shutil.which("weed")
        if program is None:
            raise ChaosFailed("SeaweedFS is missing: `make setup-test` installs it")
        self._program = program
        self._host = network.address("back")
        self._ports = dict(zip(WEED_PORTS, network.ports(len(WEED_PORTS)), strict=True))
        self.endpoint = f"http://{self._host}:{self._ports['s3.port']}"
        self._directory = directory / "objects"
        self._directory.mkdir()
        self._keys = directory / "objects.json"
        identity = {
            "name": "chaos",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        self._keys.write_text(json.dumps({"identities": [identity]}))

    def command(self) -> Sequence[str]:
        return [
            *(self._program, "-logtostderr=true", "mini", f"-dir={self._directory}"),
            *(f"-ip={self._host}", f"-ip.bind={self._host}", "-master.telemetry=false"),
            *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-s3.config={self._keys}", "-s3.autoCreateBucket=false"),
            *(f"-s3.localSocket={self._directory}/s3.sock", f"-filer.localSocket={self._directory}/filer.sock"),
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "WEED_"))}
        return {**kept, "TMPDIR": str(self._directory), "HOME": str(self._directory), "GOMEMLIMIT": "300MiB"}

    async def healthy(self) -> bool:
        return self.running and await answers(f"{self.endpoint}/healthz")

    def make_bucket(self) -> None:
        # SeaweedFS keeps a bucket as a directory, and making one needs no signature.
        url = f"http://{self._host}:{self._ports['filer.port']}/buckets/{BUCKET}/"
        with NO_PROXY.open(urllib.request.Request(url, method="POST"), timeout=30):
            pass

    def remove_sockets(self) -> None:
        """It puts some where no option reaches, and leaves them behind."""
        for port in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


# --- brokers ----------------------------------------------------------------------------------------------------


class Broker(Server):
    def __init__(
        self,
        number: int,
        directory: Path,
        network: Network,
        etcd: Sequence[EtcdMember],
        objects: ObjectServer,
        ttl: int,
        rejoin: str,
    ) -> None:
        super().__init__(f"broker{number}", directory, network, number)
        self.number = number
        self.data = directory / f"{self.name}.data"
        self.data.mkdir()
        self.small_disk = network.private
        if self.small_disk:
            network.small_disk(self.data, DISK_MEGABYTES)
        host = network.address("front", number)
        client, stream, admin, metrics = network.ports(4)
        self.url = f"http://{host}:{client}"
        self.stream_url = f"danube://{host}:{stream}"
        self.admin_url = f"http://{host}:{admin}"
        self._health_url = f"http://{host}:{metrics}/health"
        self._settings = directory / f"{self.name}.yml"
        durable = {"endpoint": objects.endpoint, "region": "us-east-1"}
        durable |= {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
        settings = {
            "cluster": {"rejoin": rejoin},
            "storage": {"url": f"s3://{BUCKET}/history", "durable": durable},
        }
        self._settings.write_text(json.dumps(settings))  # JSON is YAML
        self._command = [
            *(sys.executable, "-X", "faulthandler", "-m", "pydanube", "broker", "--mode", "cluster"),
            *("--config-file", str(self._settings), "--data-dir", str(self.data / "data")),
            *("--etcd", ",".join(member.client for member in etcd)),
            *("--broker-addr", f"{host}:{client}", "--stream-addr", f"{host}:{stream}"),
            *("--admin-addr", f"{host}:{admin}", "--prom-exporter", f"{host}:{metrics}", "--web-addr", "off"),
            *("--registration-ttl", str(ttl), "--upload-interval", "2"),
        ]

    def command(self) -> Sequence[str]:
        return self._command

    @property
    def broker_id(self) -> int:
        """0 until it has said so."""
        found = re.findall(r"cluster broker (\d+), is ready", self.log.read_text(errors="replace"))
        return int(found[-1]) if found else 0

    async def alive(self) -> bool:
        return self.running and not self.paused and await answers(f"{self._health_url}/live")

    async def ready(self) -> bool:
        """Clients may come: to one that is active, or that is drained for having been away."""
        return self.running and not self.paused and await answers(f"{self._health_url}/ready")

    def fill(self) -> None:
        """Takes all room that is left on its disk."""
        with (self.data / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(65_536))
            except OSError:
                pass

    def empty(self) -> None:
        (self.data / "filler").unlink(missing_ok=True)
