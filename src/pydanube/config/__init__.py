"""The broker's settings: read once, checked once, frozen, handed down as constructor arguments.

    flags ─┐
           ├─► load(flags) ─► Config: one class per part of a broker, and warnings for the operator
    YAML  ─┘                  flags win over the file, the file wins over the defaults

Keys are the reference's, plus ours: `broker.ports.stream`, `stream`, `dispatch.heartbeat_interval` and `storage.url`.
`settings.py` has them all, and `flags.py` the flags. Only `file.py` reads the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

from pydanube.config import checks
from pydanube.config.checks import HIDDEN
from pydanube.config.file import Values, read
from pydanube.config.flags import Flags as Flags
from pydanube.config.grpc import GrpcConfig
from pydanube.config.stream import StreamConfig, StreamLimits
from pydanube.core.cluster.lifecycle import TTL_SECONDS
from pydanube.core.commit.sessions import IDLE_HOURS_DEFAULT, SESSIONS_DEFAULT
from pydanube.core.dispatch.consumer_window import UNACKED_MAX_DEFAULT
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import NamespaceName
from pydanube.core.policies import UNLIMITED, TopicPolicy
from pydanube.core.units import MIB
from pydanube.errors import ConfigError

Mode: TypeAlias = Literal["cluster", "standalone"]

HEARTBEAT: Final = Heartbeat()
GRPC: Final = GrpcConfig()
STREAM: Final = StreamConfig()
DATA_DIR: Final = Path("danube-data")
ANY_HOST: Final = ("0.0.0.0", "[::]")
DURABLE: Final = "storage.durable."
READERS: Final = "storage.readers."
WEB_ADDR: Final = "127.0.0.1:8080"
OBJECTS: Final = "objects"  # below the data directory: history of a broker that was not told where to keep it
TIER: Final = TierConfig()
SCHEMES: Final = {"s3": "s3", "gcs": "gs", "azblob": "az"}


# --- what the parts of a broker get ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Where the broker listens, host:port; port 0 is one of the system's choice.

    The URLs are advertised to clients; None: `http://` and the client address as bound.
    """

    client_addr: str = "127.0.0.1:6650"
    stream_addr: str = "127.0.0.1:6651"
    admin_addr: str = "127.0.0.1:50051"
    metrics_addr: str = "127.0.0.1:9040"
    broker_url: str | None = None
    connect_url: str | None = None
    bootstrap_namespaces: tuple[NamespaceName, ...] = (NamespaceName("default"),)
    auto_create_topics: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """Defaults of subscriptions that have no configuration of their own."""

    max_unacked_messages: int = UNACKED_MAX_DEFAULT
    heartbeat: Heartbeat = HEARTBEAT
    decoded_bytes: int = 64 * MIB  # of all topics, kept decoded for consumers that read the same place next
    outbox_bytes: int = 256 * MIB  # of all gRPC consumers, decoded and not sent


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """`url` is where the cloud tier keeps objects. None: a directory next to the log, which a cluster cannot have."""

    url: str | None = None
    options: Mapping[str, object] = field(default_factory=dict, repr=False)  # credentials among them
    readers: Mapping[str, object] = field(default_factory=dict, repr=False)  # keys for clients of the tables
    segment_bytes: int = 64 * MIB
    segment_seconds: int = 24 * 3600
    wal_bytes_max: int = 0  # of all topics' segments; 0: the disk is the bound
    pending_bytes: int = 64 * MIB  # that came and are not on disk: then producers wait, or are refused
    sessions_max: int = SESSIONS_DEFAULT  # of one topic
    session_seconds: int = IDLE_HOURS_DEFAULT * 3600
    tier: TierConfig = TIER


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Metadata is in the etcd that `etcd` names, or in members that brokers run themselves (`seed_nodes`)."""

    cluster_name: str = "standalone"
    raft_addr: str = "127.0.0.1:7650"  # where members of the metadata store talk to each other
    seed_nodes: tuple[str, ...] = ()
    join: bool = False
    rejoin: str = "drained"  # or "active": what a broker is that comes back after longer than its lease
    etcd: tuple[str, ...] = ()
    compaction: str = "auto"  # or "off": whether the leader has etcd forget its history
    ttl_seconds: float = TTL_SECONDS
    shutdown_seconds: float = 30.0  # for sealing topics at the end
    shutdown_topic_seconds: float = 0.05  # but at least so long for each of them; 0 if the operator chose the time

    def shutdown_seconds_for(self, topics: int) -> float:
        """How long a stop may take to hand so many topics over."""
        return max(self.shutdown_seconds, self.shutdown_topic_seconds * topics)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadManagerConfig:
    assignment_strategy: str = "balanced"
    load_report_interval_seconds: int = 30
    rebalancing_enabled: bool = False
    aggressiveness: str = "balanced"
    check_interval_seconds: int = 300
    max_moves_per_hour: int = 10
    cooldown_seconds: int = 60
    min_brokers_for_rebalance: int = 2
    min_topic_age_seconds: int = 300
    blacklist_topics: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinesConfig:
    """Log lines: from which level on, and for whom: text for people, json for machines."""

    level: str = "info"
    format: str = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`policies` are the limits of the bootstrap namespaces."""

    mode: Mode = "standalone"
    data_dir: Path = DATA_DIR
    broker: BrokerConfig = BrokerConfig()
    dispatch: DispatchConfig = DispatchConfig()
    policies: TopicPolicy = UNLIMITED
    storage: StorageConfig = StorageConfig()
    cluster: ClusterConfig = ClusterConfig()
    load_manager: LoadManagerConfig = LoadManagerConfig()
    grpc: GrpcConfig = GRPC
    stream: StreamConfig = STREAM
    lines: LinesConfig = LinesConfig()
    web_addr: str = WEB_ADDR  # where the web admin of the broker listens; empty: it does not
    warnings: tuple[str, ...] = ()
    given: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)  # what the file sets, by key

    @property
    def objects_url(self) -> str:
        """Where history is kept: next to the log, unless the configuration says where."""
        return self.storage.url or (Path(self.data_dir).absolute() / OBJECTS).as_uri()


def reachable(address: str, url: str) -> str:
    """Where others find what listens on `address`: on the host that `url` names, if it listens on every one."""
    host, _, port = address.rpartition(":")
    if host not in ANY_HOST:
        return address
    named = (url.partition("://")[2] or url).partition("/")[0]
    return f"{named.rpartition(':')[0] or named}:{port}"


def load(flags: Flags) -> Config:
    """Raises ConfigError, which names the key or flag, its value and what is allowed."""
    mode = _mode(flags)
    given, warnings = read(flags.config_file)
    values = Values({**given, **_flagged(flags)})
    broker = _broker(flags, values)
    storage, cluster = _storage(flags, values), _cluster(flags, values)
    if mode == "cluster":
        _check_cluster(storage, cluster)
    return Config(
        mode=mode,
        data_dir=values.take("storage.local_wal_root", DATA_DIR),
        broker=broker,
        dispatch=DispatchConfig(**_part(values, "dispatch")),
        policies=_policies(mode, values),
        storage=storage,
        cluster=cluster,
        load_manager=LoadManagerConfig(**_part(values, "load_manager")),
        grpc=_grpc(values),
        stream=_stream(values),
        lines=LinesConfig(**_part(values, "lines")),
        web_addr=_web_addr(mode, flags, values),
        warnings=(*warnings, *_warnings(mode, flags, given, broker)),
        given=given,
    )


def _flagged(flags: Flags) -> dict[str, object]:
    """Settings whose flag has the very value that the file would have; the others are looked at one by one."""
    found = {
        "storage.local_wal_root": flags.data_dir,
        "storage.upload.interval_seconds": flags.upload_interval,
        "log.level": flags.log_level,
        "log.format": flags.log_format,
    }
    return {key: value for key, value in found.items() if value is not None}


# --- one part after the other ---------------------------------------------------------------------------


def _mode(flags: Flags) -> Mode:
    if flags.mode == "edge":
        raise ConfigError("--mode", flags.mode, "edge mode does not exist; use standalone or cluster")
    for flag, given in (("--edge-config", flags.edge_config), ("--edge-token", flags.edge_token)):
        if given is not None:
            raise ConfigError(flag, HIDDEN, "edge mode does not exist; leave the flag out")
    if flags.mode is None and flags.config_file is None:
        raise ConfigError("--mode", None, "standalone, or cluster")
    if flags.mode not in (None, "cluster", "standalone"):
        raise ConfigError("--mode", flags.mode, "standalone or cluster")
    return "standalone" if flags.mode == "standalone" else "cluster"


def _broker(flags: Flags, values: Values) -> BrokerConfig:
    broker_url, connect_url = _advertised(flags, values)
    return BrokerConfig(
        client_addr=_listen("--broker-addr", flags.broker_addr, "client", 6650, values),
        stream_addr=_listen("--stream-addr", flags.stream_addr, "stream", 6651, values),
        admin_addr=_listen("--admin-addr", flags.admin_addr, "admin", 50051, values),
        metrics_addr=_listen("--prom-exporter", flags.prom_exporter, "prometheus", 9040, values),
        broker_url=broker_url,
        connect_url=connect_url,
        **_part(values, "broker"),
    )


def _listen(flag: str, given: str | None, name: str, port: int, values: Values) -> str:
    if given is not None:
        return checks.address(flag, given)
    host = values.take("broker.host", "127.0.0.1")
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return checks.address("broker.host", f"{bracketed}:{values.take(f'broker.ports.{name}', port)}")


def _advertised(flags: Flags, values: Values) -> tuple[str | None, str | None]:
    """What this broker is called, and what clients dial; they differ behind a proxy."""
    broker_url: str | None = values.take("broker.advertised_listeners.broker_url", None)
    connect_url: str | None = values.take("broker.advertised_listeners.connect_url", None)
    if flags.broker_addr is not None and connect_url in (None, broker_url):
        broker_url = connect_url = None  # the file speaks of an address that this broker does not have
    if flags.advertised_addr is not None:
        broker_url = connect_url = checks.url("--advertised-addr", flags.advertised_addr)
    if flags.connect_url is not None:
        connect_url = checks.url("--connect-url", flags.connect_url)
    return broker_url, connect_url or broker_url


def _policies(mode: Mode, values: Values) -> TopicPolicy:
    given = _part(values, "policies")
    if mode == "standalone" and not given:
        return UNLIMITED
    return TopicPolicy.from_json(given)


def _check_cluster(storage: StorageConfig, cluster: ClusterConfig) -> None:
    if storage.url is None:
        raise ConfigError(
            "--storage-url",
            None,
            "a cluster needs one object store that all its brokers reach, for example s3://bucket/prefix: "
            "history in a directory of one broker would be lost to the others when a topic moves",
        )
    if not cluster.etcd and not cluster.seed_nodes:
        raise ConfigError(
            "--seed-nodes",
            None,
            "name the brokers that keep the metadata, by their --raft-addr, or an etcd with --etcd host:port",
        )
    if cluster.etcd and cluster.seed_nodes:
        raise ConfigError("--etcd", ",".join(cluster.etcd), "either --etcd or --seed-nodes, not both")


def _storage(flags: Flags, values: Values) -> StorageConfig:
    url = _storage_url(values)
    if flags.storage_url is not None:
        url = checks.storage_url("--storage-url", flags.storage_url)
    return StorageConfig(
        url=url,
        options={
            key.removeprefix(DURABLE): value
            for key, value in values.items()
            if key.startswith(DURABLE) and key not in ("storage.durable.root", "storage.durable.backend")
        },
        readers={key.removeprefix(READERS): value for key, value in values.items() if key.startswith(READERS)},
        tier=TierConfig(
            local=replace(TIER.local, **_part(values, "storage.tier.local")), **_part(values, "storage.tier")
        ),
        **_part(values, "storage"),
    )


def _storage_url(values: Values) -> str | None:
    """`storage.url`, or what the reference's mode, backend and root mean as one."""
    url: str | None = values.take("storage.url", None)
    mode = values.take("storage.mode", "local")
    if url is not None:
        if mode != "local" or "storage.durable.root" in values or "storage.durable.backend" in values:
            raise ConfigError("storage.url", url, "either storage.url, or storage.mode with storage.durable, not both")
        return url
    if mode == "local":
        return None
    root: str = values.take("storage.durable.root", "")
    if not root:
        raise ConfigError(
            "storage.durable.root", None, f"storage.mode {mode} needs a root, or give storage.url instead"
        )
    if mode == "shared_fs":
        return f"file://{Path(root).absolute()}"
    backend: str = values.take("storage.durable.backend", "")
    if not backend:
        raise ConfigError("storage.durable.backend", None, "storage.mode object_store needs one of s3, gcs, azblob")
    bare = root.partition("://")[2] or root
    return f"{SCHEMES[backend]}://{bare.strip('/')}"


def _cluster(flags: Flags, values: Values) -> ClusterConfig:
    key = "meta_store.seed_nodes"
    nodes: tuple[str, ...] = values.take(key, ())
    if flags.seed_nodes is not None:
        key = "--seed-nodes"
        nodes = tuple(node.strip() for node in flags.seed_nodes.split(",") if node.strip())
    etcd: tuple[str, ...] = values.take("meta_store.etcd", ())
    if flags.etcd is not None:
        etcd = tuple(node.strip() for node in flags.etcd.split(",") if node.strip())
    defaults = ClusterConfig()
    shutdown = _seconds("--shutdown-timeout", flags.shutdown_timeout, 0.0, values, "broker.shutdown_seconds")
    return ClusterConfig(
        etcd=tuple(checks.address("--etcd", node.partition("://")[2] or node) for node in etcd),
        ttl_seconds=_seconds("--registration-ttl", flags.registration_ttl, 1.0, values, "meta_store.ttl_seconds")
        or defaults.ttl_seconds,
        shutdown_seconds=defaults.shutdown_seconds if shutdown is None else shutdown,
        shutdown_topic_seconds=defaults.shutdown_topic_seconds if shutdown is None else 0.0,
        raft_addr=_listen("--raft-addr", flags.raft_addr, "raft", 7650, values),
        seed_nodes=tuple(checks.address(key, node.partition("://")[2] or node) for node in nodes),
        join=flags.join,
        **{name: value for name, value in _part(values, "cluster").items() if name != "ttl_seconds"},
    )


def _seconds(flag: str, given: float | None, lowest: float, values: Values, key: str) -> float | None:
    if given is None:
        found: int | None = values.take(key, None)
        return None if found is None else float(found)
    if given < lowest:
        raise ConfigError(flag, given, f"{lowest:g} seconds or more")
    return given


def _stream(values: Values) -> StreamConfig:
    files = _part(values, "stream")
    _check_tls("stream.tls", files)
    return StreamConfig(limits=StreamLimits(**_part(values, "stream.limits")), **files)


def _grpc(values: Values) -> GrpcConfig:
    files = _part(values, "grpc")
    _check_tls("broker.grpc_tls", files)
    return GrpcConfig(**files)


def _check_tls(section: str, files: Mapping[str, object]) -> None:
    for name, needed in (
        ("key_file", "cert_file"),
        ("cert_file", "key_file"),
        ("ca_file", "cert_file"),
    ):
        if name in files and needed not in files:
            raise ConfigError(f"{section}.{needed}", None, f"{section}.{name} needs it")


def _web_addr(mode: Mode, flags: Flags, values: Values) -> str:
    """A broker that is alone has one unless told otherwise; a cluster needs only one, and not in a broker."""
    if flags.web_addr is not None:
        return checks.address_or_off("--web-addr", flags.web_addr)
    return values.take("web.listen", WEB_ADDR if mode == "standalone" else "")


def _part(values: Values, name: str) -> dict[str, Any]:
    """The fields of one part of the `Config` that are set; the others have their defaults."""
    return cast(dict[str, Any], values.fields_of(name))


def _warnings(mode: Mode, flags: Flags, values: Values, broker: BrokerConfig) -> Iterator[str]:
    if mode == "standalone":
        raft = {
            "--raft-addr": flags.raft_addr is not None,
            "--seed-nodes": flags.seed_nodes is not None,
            "--join": flags.join,
            "broker.ports.raft": "broker.ports.raft" in values,
            "meta_store.seed_nodes": bool(values.get("meta_store.seed_nodes")),
            "cluster.rejoin": "cluster.rejoin" in values,
        }
        for name in (name for name, given in raft.items() if given):
            yield f"{name} has no effect: a standalone broker keeps its metadata in SQLite and has no peers"
    host = broker.client_addr.rpartition(":")[0]
    if host in ANY_HOST and broker.connect_url is None:
        yield (
            f"clients will be told to connect to {host}, which works on this machine only: "
            "set broker.advertised_listeners.broker_url or --advertised-addr"
        )
