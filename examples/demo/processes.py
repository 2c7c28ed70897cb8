"""What the demo starts: an S3-compatible store, three brokers, the web admin. All of it ends with the demo.

Everything listens on free ports of 127.0.0.1 and writes to the demo's own directory. A child is killed when the demo
is gone, however it went.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

BROKERS = 3
TTL_SECONDS = 3
OUTAGE_TTL_SECONDS = 45  # with pictures: twenty seconds after a kill -9 nobody has taken the topics yet
UPLOAD_SECONDS = 2
START_SECONDS = 90.0
METADATA_CLIENT_OFFSET = 1000  # a member's port for its broker is the one for its peers and this
WEED_PORTS = (
    *("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc"),
)
ACCESS_KEY, SECRET_KEY, BUCKET = "danube-demo", "a-secret-of-nobody", "danube"
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
ROOT = Path(__file__).parents[2]


class DemoFailed(Exception):
    """Something did not start, or a command did not do what it says."""


def free_ports(count: int) -> list[int]:
    """None of those that the kernel gives to whoever connects somewhere: they may be taken before they are used."""
    found: list[int] = []
    with ExitStack() as held:  # together, so that they differ
        while len(found) < count:
            port, probe = random.randrange(10_000, 20_000), held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
    return found


def metadata_ports(count: int) -> list[int]:
    """Each with its neighbour for the broker free as well."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        with suppress(OSError), socket.socket() as peers, socket.socket() as clients:
            peers.bind(("127.0.0.1", port))
            clients.bind(("127.0.0.1", port + METADATA_CLIENT_OFFSET))
            found.append(port)
    return found


def _die_with_parent() -> None:
    """Runs in the child: a demo that is killed cannot clean up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Child:
    """A process with its output in a file, out of reach of the terminal's Ctrl-C: the demo ends it."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=env,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """With whatever it started."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


async def until(condition: Callable[[], bool], what: str, child: Child, seconds: float = START_SECONDS) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not await asyncio.to_thread(condition):
                if child.exit_code is not None:
                    raise DemoFailed(f"{what} ended with exit code {child.exit_code}: {_last_line(child)}")
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise DemoFailed(f"{what} is not ready after {seconds:.0f} s: {_last_line(child)}") from None


def _last_line(child: Child) -> str:
    return (child.text().strip().splitlines() or ["it said nothing"])[-1]


# --- the object store ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store:
    """Where history goes: its URL, and the options that brokers and Spark need for it."""

    url: str
    options: Mapping[str, str]
    name: str


def store_in_directory(directory: Path) -> Store:
    place = directory / "objects"
    place.mkdir()
    return Store(place.as_uri(), {}, "a directory")


def weed() -> Path | None:
    """SeaweedFS, if `make setup-test` or `make setup-spark` installed it."""
    found = Path(sys.executable).parent / "weed"
    return found if found.exists() else None


@asynccontextmanager
async def running_s3(directory: Path, program: Path) -> AsyncIterator[Store]:
    ports = dict(zip(WEED_PORTS, free_ports(len(WEED_PORTS)), strict=True))
    data = directory / "s3"
    data.mkdir()
    keys = directory / "s3-keys.json"
    identity = {"name": "demo", "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]}
    keys.write_text(json.dumps({"identities": [{**identity, "actions": ["Admin", "Read", "Write", "List"]}]}))
    command = [
        *(str(program), "-logtostderr=true", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-master.telemetry=false", "-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-s3.config={keys}", "-s3.autoCreateBucket=false"),
        *(f"-s3.localSocket={data}/s3.sock", f"-filer.localSocket={data}/filer.sock"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "WEED_"))}
    env |= {"TMPDIR": str(directory), "HOME": str(directory), "GOMEMLIMIT": "300MiB"}
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    child = Child(command, directory / "s3.log", env)
    try:
        await until(lambda: _answers(f"{endpoint}/healthz"), "the S3 store", child)
        # SeaweedFS keeps a bucket as a directory, and making one needs no signature.
        filer = f"http://127.0.0.1:{ports['filer.port']}/buckets/{BUCKET}/"
        with NO_PROXY.open(urllib.request.Request(filer, method="POST"), timeout=30):
            pass
        options = {
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key": ACCESS_KEY,
            "secret_key": SECRET_KEY,
        }
        yield Store(f"s3://{BUCKET}/demo", options, f"S3 (SeaweedFS at {endpoint})")
    finally:
        child.kill()
        _remove_sockets(ports)


def _remove_sockets(ports: Mapping[str, int]) -> None:
    """SeaweedFS puts some where no option reaches, and leaves them behind."""
    for port in ports.values():
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink(missing_ok=True)


def _answers(url: str) -> bool:
    with suppress(urllib.error.URLError, OSError), NO_PROXY.open(url, timeout=5):
        return True
    return False


# --- brokers ------------------------------------------------------------------------------------------


class Broker:
    """One of three. It can be killed and started again: ports and data stay."""

    def __init__(self, number: int, directory: Path, seeds: Sequence[str], store: Store, ttl_seconds: int) -> None:
        self.number = number
        self._directory = directory / f"broker-{number}"
        self._directory.mkdir()
        client, admin, metrics, stream = free_ports(4)
        self.url = f"danube://127.0.0.1:{stream}"
        self.endpoint = f"http://127.0.0.1:{admin}"
        config = self._directory / "config.yml"
        config.write_text(yaml.safe_dump({"storage": {"durable": dict(store.options)}}) if store.options else "{}")
        self._command = [
            *(sys.executable, "-m", "pydanube", "broker", "--mode", "cluster", "--config-file", str(config)),
            *("--data-dir", str(self._directory / "data"), "--storage-url", store.url),
            *("--seed-nodes", ",".join(seeds), "--raft-addr", seeds[number]),
            *("--broker-addr", f"127.0.0.1:{client}", "--admin-addr", f"127.0.0.1:{admin}"),
            *("--prom-exporter", f"127.0.0.1:{metrics}", "--stream-addr", f"127.0.0.1:{stream}"),
            *("--registration-ttl", str(ttl_seconds), "--upload-interval", str(UPLOAD_SECONDS)),
        ]
        self._starts = 0
        self._child: Child | None = None
        self.broker_id = ""

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.exit_code is None

    def start(self) -> None:
        self._starts += 1
        self._child = Child(self._command, self._directory / f"log-{self._starts}")

    async def ready(self) -> None:
        child = self._child
        assert child is not None, "it was started"
        await until(lambda: "is ready." in child.text(), f"broker {self.number}", child)
        found = re.search(r"cluster broker (\d+), is ready", child.text())
        self.broker_id = found[1] if found else ""

    def kill(self) -> None:
        """SIGKILL: it saves nothing and tells nobody."""
        if self._child is not None:
            self._child.kill()

    def pause(self) -> None:
        """It stands still until `resume`; others notice if that takes long."""
        assert self._child is not None, "it was started"
        os.kill(self._child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None, "it was started"
        os.kill(self._child.pid, signal.SIGCONT)


@asynccontextmanager
async def running_brokers(directory: Path, store: Store, ttl_seconds: int = TTL_SECONDS) -> AsyncIterator[list[Broker]]:
    seeds = [f"127.0.0.1:{port}" for port in metadata_ports(BROKERS)]
    brokers = [Broker(number, directory, seeds, store, ttl_seconds) for number in range(BROKERS)]
    try:
        for broker in brokers:
            broker.start()
        await asyncio.gather(*(broker.ready() for broker in brokers))
        yield brokers
    finally:
        for broker in brokers:
            broker.kill()


# --- commands -----------------------------------------------------------------------------------------


async def admin(broker: Broker, *words: str) -> str:
    """What `danube admin` prints. Raises DemoFailed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pydanube", "admin", "--endpoint", broker.endpoint, *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode:
        raise DemoFailed(f"danube admin {' '.join(words)}: {errors.decode().strip()}")
    return output.decode()


@asynccontextmanager
async def running_web(directory: Path, broker: Broker) -> AsyncIterator[str | None]:
    """The address of the web admin; None if this version has none."""
    async with AsyncExitStack() as stack:
        [port] = free_ports(1)
        address = f"127.0.0.1:{port}"
        at = ("--listen-addr", address, "--broker-endpoint", broker.endpoint, "--service-addr", broker.url)
        child = Child([sys.executable, "-m", "pydanube", "admin", "serve", *at], directory / "web.log")
        stack.callback(child.kill)
        try:
            await until(lambda: _answers(f"http://{address}/ui/v1/health"), "the web admin", child, 30)
        except DemoFailed:
            yield None
        else:
            yield f"http://{address}"
