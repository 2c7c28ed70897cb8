"""Real etcd servers for tests: one that many tests share, and clusters of several members that can be broken.

The program is `etcd` on the PATH, or what DANUBE_TEST_ETCD names. Everything is on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from pydanube.stores.metadata.etcd import Tls
from pydanube.stores.metadata.etcd.calls import Calls
from pydanube.stores.metadata.etcd.endpoint import COMPACT, DELETE_RANGE, STATUS, Endpoint
from pydanube.testing.ports import free_ports, member_ports
from pydanube.wire._pb.pydanube import etcd_pb2 as pb
from tests.e2e.processes import START_SECONDS, STOP_SECONDS, Process, until

T = TypeVar("T")

MISSING = "these tests need etcd 3.4 or newer: install etcd-server (Debian, Ubuntu: apt-get install etcd-server)"


def etcd_program() -> str:
    found = shutil.which(os.environ.get("DANUBE_TEST_ETCD", "etcd"))
    assert found, MISSING
    return found


class EtcdServer:
    """One member with its ports and its data, which outlive the process."""

    def __init__(
        self, directory: Path, name: str, ports: tuple[int, int], flags: Sequence[str] = (), tls: Tls | None = None
    ) -> None:
        self.name = name
        self.directory = directory
        self.client, self.peer = (f"127.0.0.1:{port}" for port in ports)
        self.initial_cluster = f"{name}=http://{self.peer}"
        self._flags = flags
        self._tls = tls
        self.url = f"{'https' if tls else 'http'}://{self.client}"
        self.process: Process | None = None

    def __enter__(self) -> Self:
        self.start()
        self.until_healthy()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.process.kill()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Returns at once: a member of a cluster is ready when the others are."""
        assert self.process is None or self.process.exit_code is not None, "it runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        command = [
            etcd_program(),
            *("--name", self.name, "--data-dir", str(self.directory / f"{self.name}.etcd")),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", f"http://{self.peer}", "--initial-advertise-peer-urls", f"http://{self.peer}"),
            *("--initial-cluster", self.initial_cluster, "--initial-cluster-token", str(self.directory)),
            *("--logger", "zap", "--log-outputs", "stderr", "--log-level", "warn"),
            *self._flags,
        ]
        self.process = Process(command, self.directory / f"{self.name}.log", env=environment)

    def stop(self) -> int:
        assert self.process is not None
        return self.process.stop(STOP_SECONDS)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        until(self._is_paused, f"{self.name} is paused")

    def resume(self) -> None:
        """Also of one that was killed meanwhile."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _is_paused(self) -> bool:
        """Its threads stop one after the other, and the last may still answer."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/stat")
        try:
            return all(thread.read_text().rpartition(")")[2].split()[0] == "T" for thread in threads)
        except OSError:  # one ended meanwhile
            return False

    def is_healthy(self) -> bool:
        """Whether it can read through a majority."""
        assert self.process is not None
        assert self.process.exit_code is None, f"etcd ended with {self.process.exit_code}\n{self.process.text()}"
        try:
            return b'"true"' in self._get("/health")
        except OSError:  # of which URLError is one
            return False

    def until_healthy(self) -> None:
        assert self.process is not None
        until(self.is_healthy, f"{self.name} is healthy", seconds=START_SECONDS, say=self.process.text)

    def metric(self, name: str) -> float:
        for line in self._get("/metrics", seconds=30).decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"etcd has no metric {name}")

    def _get(self, path: str, *, seconds: float = 2) -> bytes:
        context = None
        if self._tls is not None:
            assert self._tls.cert is not None
            context = ssl.create_default_context(cafile=self._tls.ca)
            context.load_cert_chain(self._tls.cert, self._tls.key)
        with urllib.request.urlopen(f"{self.url}{path}", timeout=seconds, context=context) as answer:
            found: bytes = answer.read()
            return found


class EtcdServers:
    """Members of one cluster."""

    def __init__(self, directory: Path, count: int, flags: Sequence[str] = ()) -> None:
        ports = free_ports(2 * count)
        self.members = [EtcdServer(directory, f"m{i}", (ports[2 * i], ports[2 * i + 1]), flags) for i in range(count)]
        initial = ",".join(member.initial_cluster for member in self.members)
        for member in self.members:
            member.initial_cluster = initial

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as started:
            for member in self.members:
                started.push(member)
                member.start()
            for member in self.members:
                member.until_healthy()
            self._started = started.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._started.close()

    @property
    def endpoints(self) -> list[str]:
        return [member.client for member in self.members]

    async def leader(self) -> EtcdServer:
        """The member that leads, asked of the others too: an old leader may not know yet."""
        while True:
            opinions = [await self._leader_according_to(member) for member in self.members]
            named = [each for each in opinions if each is not None]
            if named and len(set(named)) == 1:
                return next(m for m, id_ in zip(self.members, await self._ids(), strict=True) if id_ == named[0])
            await asyncio.sleep(0.05)

    async def followers(self) -> list[EtcdServer]:
        leader = await self.leader()
        return [member for member in self.members if member is not leader]

    async def _leader_according_to(self, member: EtcdServer) -> int | None:
        status = await status_of(member)
        return status.leader or None

    async def _ids(self) -> list[int]:
        return [(await status_of(member)).header.member_id for member in self.members]


async def status_of(member: EtcdServer) -> pb.StatusResponse:
    endpoint = Endpoint(member.client, None)
    try:
        return await endpoint.ask(STATUS, pb.StatusRequest(), 5.0, require_leader=False)
    finally:
        await endpoint.close()


async def with_calls(endpoints: Sequence[str], use: Callable[[Calls], Awaitable[T]]) -> T:
    calls = Calls(endpoints)
    try:
        return await use(calls)
    finally:
        await calls.close()


async def compact(endpoints: Sequence[str], revision: int) -> None:
    """Forgets what happened before this revision, as etcd does by itself after a while."""
    request = pb.CompactionRequest(revision=revision, physical=True)
    await with_calls(endpoints, lambda calls: calls.once(COMPACT, request))


async def clear(endpoints: Sequence[str]) -> None:
    """Removes every key, so that the leases of one test change nothing in the next."""
    request = pb.DeleteRangeRequest(key=b"\0", range_end=b"\0")
    await with_calls(endpoints, lambda calls: calls.once(DELETE_RANGE, request))


@contextlib.contextmanager
def etcd_in(directory: Path, flags: Sequence[str] = (), tls: Tls | None = None) -> Iterator[EtcdServer]:
    client, peer = free_ports(2)
    with EtcdServer(directory, "single", (client, peer), flags, tls) as server:
        yield server


def member_addresses(count: int) -> list[str]:
    """Raft addresses, for each of which the client port is free too."""
    return [f"127.0.0.1:{port}" for port in member_ports(count)]


def certificates(directory: Path) -> tuple[Tls, Tls]:
    """An authority, and with it a certificate for a server on 127.0.0.1 and one for its client."""
    names = directory / "names.cnf"
    names.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)

    def key(name: str) -> Path:
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", directory / f"{name}.key")
        return directory / f"{name}.key"

    ca = directory / "ca.pem"
    openssl("req", "-x509", "-new", "-key", key("ca"), "-days", 30, "-subj", "/CN=test authority", "-out", ca)
    made = []
    for name in ("server", "client"):
        request, cert, own = directory / f"{name}.csr", directory / f"{name}.pem", key(name)
        openssl("req", "-new", "-key", own, "-subj", f"/CN={name}", "-out", request)
        signing = ("-CA", ca, "-CAkey", directory / "ca.key", "-CAcreateserial", "-days", 30, "-extfile", names)
        openssl("x509", "-req", "-in", request, *signing, "-out", cert)
        made.append(Tls(ca, cert, own))
    return made[0], made[1]
