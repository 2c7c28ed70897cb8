"""The configuration of a broker's own etcd member: addresses, directory, command line, and which etcd will do."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydanube.errors import ConfigError
from pydanube.stores.environment import ETCD, child_environment
from pydanube.stores.metadata.etcd.endpoint import Tls, target

log = logging.getLogger(__name__)

CLIENT_PORT_OFFSET: Final = 1000
PORT_MAX: Final = 65535
VERSION_SECONDS: Final = 10.0
OLDEST: Final = (3, 4, 0)
# Before these, watches may lose events after a compaction and leases may be ended wrongly.
SOUND: Final = {(3, 4): 32, (3, 5): 14}

FLAGS: Final = (
    *("--logger", "zap", "--log-outputs", "stderr", "--log-level", "info"),
    # Watches are never minutes behind, and one that is lists again.
    *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "5m"),
    *("--quota-backend-bytes", str(8 * 1024**3)),
    *("--snapshot-count", "10000"),  # less memory, and less to read at a start
    "--pre-vote=true",  # a member that was cut off does not depose the leader when it is back
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """`directory` is the member's own, `{data_dir}/etcd`. `client_port_offset` is the same on every broker.

    `listen_host` is an address of this machine where the raft address is not one, as behind an address translation.
    With `tls` all three files are needed, and members and clients present certificates of the same authority.
    """

    directory: Path
    raft_addr: str
    seed_nodes: tuple[str, ...]
    cluster_name: str = "danube"
    join: bool = False
    program: str = "etcd"
    client_port_offset: int = CLIENT_PORT_OFFSET
    listen_host: str | None = None
    tls: Tls | None = None

    def __post_init__(self) -> None:
        for key, address in (("--raft-addr", self.raft_addr), *(("--seed-nodes", each) for each in self.seed_nodes)):
            try:
                target(address)
                port = self._client_port(address)
            except ConfigError:
                raise ConfigError(key, address, "host:port") from None
            if port > PORT_MAX:
                raise ConfigError(
                    key, address, f"the port + {self.client_port_offset} is for clients, so at most {PORT_MAX} in sum"
                )
        if not self.seed_nodes:
            raise ConfigError("--seed-nodes", "", "the raft addresses of the brokers that begin the cluster")
        if len(set(self.seed_nodes)) < len(self.seed_nodes):
            raise ConfigError("--seed-nodes", ",".join(self.seed_nodes), "every address once")
        if not self.join and self.raft_addr not in self.seed_nodes:
            raise ConfigError(
                "--raft-addr",
                self.raft_addr,
                f"it must be one of --seed-nodes ({', '.join(self.seed_nodes)}), written the same way; "
                "to add a broker to a cluster that runs, use --join",
            )
        if self.tls is not None and not (self.tls.ca and self.tls.cert and self.tls.key):
            raise ConfigError("etcd tls", "", "an authority, a certificate and its key")

    def client_addr(self, raft_addr: str) -> str:
        """Where clients ask the member with this raft address."""
        return f"{raft_addr.rpartition(':')[0]}:{self._client_port(raft_addr)}"

    def url(self, address: str) -> str:
        return f"{'http' if self.tls is None else 'https'}://{address}"

    @property
    def data_directory(self) -> Path:
        """etcd's own."""
        return self.directory.absolute() / "data"

    @property
    def data_argument(self) -> str:
        """By which a process is known to be this member."""
        return f"--data-dir={self.data_directory}"

    def arguments(self, listen_host: str, initial: Mapping[str, str], *, state: str) -> list[str]:
        """etcd's command line. `initial` has the peer URL of every member by its name."""
        client_addr = self.client_addr(self.raft_addr)
        arguments = [
            *("--name", self.raft_addr, self.data_argument),
            *("--initial-advertise-peer-urls", self.url(self.raft_addr)),
            *("--advertise-client-urls", self.url(client_addr)),
            *("--listen-peer-urls", self.url(f"{listen_host}:{split_address(self.raft_addr)[1]}")),
            *("--listen-client-urls", self.url(f"{listen_host}:{split_address(client_addr)[1]}")),
            *("--initial-cluster", ",".join(f"{name}={url}" for name, url in initial.items())),
            *("--initial-cluster-state", state),
            *("--initial-cluster-token", f"danube-{self.cluster_name}"),
            *FLAGS,
        ]
        if self.tls is not None:
            for prefix in ("", "peer-"):
                arguments += [f"--{prefix}cert-file", str(self.tls.cert), f"--{prefix}key-file", str(self.tls.key)]
                arguments += [f"--{prefix}trusted-ca-file", str(self.tls.ca), f"--{prefix}client-cert-auth"]
        return arguments

    def _client_port(self, raft_addr: str) -> int:
        return int(raft_addr.rpartition(":")[2]) + self.client_port_offset


def found_program(name: str) -> str:
    """The program's path. Blocks. Raises ConfigError if it is missing or too old; warns of one with known errors."""
    program = shutil.which(name)
    if program is None:
        raise ConfigError(
            "etcd",
            name,
            "there is no such program; install etcd 3.4 or newer (Debian, Ubuntu: apt-get install etcd-server)",
        )
    version = _version(program)
    if version < OLDEST:
        raise ConfigError("etcd", program, f"version {_dotted(*version)} is too old; install 3.4 or newer")
    if version[2] < SOUND.get(version[:2], 0):
        advised = ", ".join(_dotted(*line, patch) for line, patch in SOUND.items())
        log.warning("etcd has known errors", extra={"version": _dotted(*version), "advised": f"{advised} or newer"})
    return program


def _version(program: str) -> tuple[int, int, int]:
    """Raises ConfigError if the program does not say that it is etcd."""
    output = b""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        output = subprocess.run(
            [program, "--version"], capture_output=True, timeout=VERSION_SECONDS, env=child_environment(ETCD)
        ).stdout
    found = re.search(rb"etcd Version: (\d+)\.(\d+)\.(\d+)", output)
    if found is None:
        raise ConfigError("etcd", program, "it does not say that it is etcd")
    return int(found[1]), int(found[2]), int(found[3])


def _dotted(*numbers: int) -> str:
    return ".".join(map(str, numbers))


def split_address(address: str) -> tuple[str, int]:
    """Splits host:port. The host of [::1]:80 is ::1."""
    host, colon, port = address.rpartition(":")
    assert colon and port.isdecimal(), f"not host:port: {address!r}"
    return host.removeprefix("[").removesuffix("]"), int(port)
