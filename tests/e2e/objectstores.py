"""A real S3-compatible server for tests: SeaweedFS, from a package, on ports and in a directory of its own.

    def test_something(s3_server: S3Server) -> None:
        store = await open_object_store(s3_server.url(), s3_server.options)

The fixture `s3_server` (in tests/conftest.py) starts it when the first test asks for it, once per test process, which
takes about a second and some hundred MB. It listens on 127.0.0.1 alone, reports to nobody, and is gone afterwards, also
if the tests were killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from pydanube.testing.ports import free_ports
from tests.e2e.processes import Process, until

START_SECONDS = 60.0
STARTS_MAX = 3
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
PORTS = (
    *("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc"),
)


class S3Server:
    """Keys may do everything; `reader_options` may only read. Names of buckets never repeat in one server."""

    region = "us-east-1"
    access_key = "danube-tests"
    secret_key = "not-a-secret-of-anybody"
    reader_access_key = "danube-reader"
    reader_secret_key = "another-one-of-nobody"

    def __init__(self, s3_port: int, filer_port: int) -> None:
        self.port = s3_port
        self.endpoint = f"http://127.0.0.1:{s3_port}"
        self._filer = f"http://127.0.0.1:{filer_port}"
        self._numbers = count(1)
        self._shared = ""

    @property
    def options(self) -> dict[str, object]:
        """For `open_object_store`."""
        return {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
        }

    @property
    def reader_options(self) -> dict[str, object]:
        return {**self.options, "access_key": self.reader_access_key, "secret_key": self.reader_secret_key}

    def bucket(self) -> str:
        """The name of a new bucket."""
        name = f"bucket-{next(self._numbers)}"
        # SeaweedFS keeps a bucket as a directory, and making one needs no signature.
        request = urllib.request.Request(f"{self._filer}/buckets/{name}/", method="POST")
        with NO_PROXY.open(request, timeout=30):
            pass
        return name

    def url(self) -> str:
        """A place where nothing is yet, in a bucket that many share: the first put to a bucket takes longer."""
        self._shared = self._shared or self.bucket()
        return f"s3://{self._shared}/place-{next(self._numbers)}"


@contextmanager
def running_s3_server(place: Path | None = None, *, modest: bool = False) -> Iterator[S3Server]:
    """With its data below `place`, or where temporary files are. A modest one runs when nobody else wants to."""
    # Not pytest's directory: names of sockets must be short.
    directory = Path(tempfile.mkdtemp(prefix="danube-s3-", dir=place))
    try:
        for start in range(STARTS_MAX):
            ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
            with _process(directory, ports, modest=modest) as process:
                server = S3Server(ports["s3.port"], ports["filer.port"])
                try:
                    if _is_up(process, server):
                        yield server
                        return
                finally:
                    process.kill()
                    _remove_sockets(ports)
            assert start + 1 < STARTS_MAX, f"SeaweedFS does not start:\n{process.text()}"  # else somebody took a port
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _process(directory: Path, ports: dict[str, int], *, modest: bool) -> Process:
    data = directory / f"data-{ports['s3.port']}"
    data.mkdir()
    keys = directory / "keys.json"
    keys.write_text(
        json.dumps(
            {
                "identities": [
                    _identity("tests", S3Server.access_key, S3Server.secret_key, "Admin", "Read", "Write", "List"),
                    _identity("reader", S3Server.reader_access_key, S3Server.reader_secret_key, "Read", "List"),
                ]
            }
        )
    )
    command = [
        *(("chrt", "--idle", "0") if modest else ()),
        *(str(Path(sys.executable).parent / "weed"), "-logtostderr=true", "mini", f"-dir={data}"),
        *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *("-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *(f"-s3.config={keys}", "-s3.autoCreateBucket=false"),
        *(f"-s3.localSocket={data}/s3.sock", f"-filer.localSocket={data}/filer.sock"),
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "WEED_"))}
    environment |= {"TMPDIR": str(directory), "HOME": str(directory)}
    if modest:  # memory instead of time: half of its time went into collecting garbage
        environment |= {"GOMEMLIMIT": "2GiB", "GOGC": "800", "GOMAXPROCS": "1"}
    else:
        environment |= {"GOMEMLIMIT": "300MiB"}
    return Process(command, directory / "weed.log", cwd=directory, env=environment, preexec_fn=_die_with_parent)


def _identity(name: str, access_key: str, secret_key: str, *actions: str) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": access_key, "secretKey": secret_key}], "actions": actions}


def _die_with_parent() -> None:
    """Runs in the child. A test run that is killed cannot kill anybody itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _remove_sockets(ports: dict[str, int]) -> None:
    """SeaweedFS puts some where no option reaches, and leaves them behind."""
    for port in ports.values():
        for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            socket.unlink(missing_ok=True)


def _is_up(process: Process, server: S3Server) -> bool:
    def answers() -> bool:
        if process.exit_code is not None:
            return True
        with suppress(urllib.error.URLError, OSError), NO_PROXY.open(f"{server.endpoint}/healthz", timeout=5):
            return True
        return False

    until(answers, "SeaweedFS is ready", seconds=START_SECONDS, say=process.text)
    return process.exit_code is None
