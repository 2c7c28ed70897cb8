"""A configuration, checked without starting anything: what a broker would run with, and what is against it.

Nothing is created, no port is bound and no store is called: it may run next to the broker it is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydanube.api.process import check_ports
from pydanube.api.tls import server_context
from pydanube.broker.stores import check_places
from pydanube.config import ANY_HOST, Config
from pydanube.config.reload import in_words
from pydanube.errors import ConfigError


class Checked(NamedTuple):
    """`settings` are what a person wants to see first; `file` is what the file sets, by key."""

    settings: dict[str, object]
    file: dict[str, object]
    problems: tuple[str, ...]


def check(config: Config) -> Checked:
    return Checked(_settings(config), in_words(config), tuple(_problems(config)))


def _problems(config: Config) -> Iterator[str]:
    yield from _shared_ports(config)
    yield from check_places(config)
    try:
        if config.mode == "cluster":
            check_ports(config)
    except ConfigError as error:
        yield str(error)
    try:
        server_context(config.stream)
        server_context(config.grpc)
    except ConfigError as error:
        yield str(error)


def _addresses(config: Config) -> dict[str, str]:
    broker = config.broker
    return {
        "--broker-addr": broker.client_addr,
        "--stream-addr": broker.stream_addr,
        "--admin-addr": broker.admin_addr,
        "--prom-exporter": broker.metrics_addr,
        **({"--web-addr": config.web_addr} if config.web_addr else {}),
        **({"--raft-addr": config.cluster.raft_addr} if config.mode == "cluster" and not config.cluster.etcd else {}),
    }


def _shared_ports(config: Config) -> Iterator[str]:
    """Two that listen on one port of one address; an address of all machines' addresses shares with each."""
    seen: list[tuple[str, str, str]] = []
    for flag, address in _addresses(config).items():
        host, _, port = address.rpartition(":")
        for other, other_host, other_port in seen:
            if port == other_port != "0" and (host == other_host or {host, other_host} & {*ANY_HOST}):
                yield str(ConfigError(flag, address, f"a port of its own: {other} has it already"))
                break
        seen.append((flag, host, port))


def _settings(config: Config) -> dict[str, object]:
    broker, cluster = config.broker, config.cluster
    metadata = "SQLite, in the data directory"
    if config.mode == "cluster":
        metadata = (
            f"etcd at {', '.join(cluster.etcd)}" if cluster.etcd else f"etcd beside {', '.join(cluster.seed_nodes)}"
        )
    limits = {name: value for name, value in config.policies.to_json().items() if value}
    return {
        "mode": config.mode,
        "clients": f"{broker.connect_url or f'http://{broker.client_addr}'}   (listening on {broker.client_addr})",
        "native": f"{config.stream.scheme}://{broker.stream_addr}",
        "admin": f"http://{broker.admin_addr}",
        "metrics": f"http://{broker.metrics_addr}/metrics",
        "web": f"http://{config.web_addr}" if config.web_addr else "off",
        "data": str(config.data_dir.absolute()),
        "history": config.objects_url,
        "metadata": metadata,
        "namespaces": ", ".join(broker.bootstrap_namespaces),
        "limits": ", ".join(f"{name} {value}" for name, value in limits.items()) or "none",
        "log": f"{config.lines.level}, {config.lines.format}",
    }
