"""Every key of the configuration file, once: what is allowed, what it means, which flag wins over it, where it goes.

    Setting(whole(0, times=MIB), "Of all topics' segments: …", field="storage.wal_bytes_max", unit=MIB)

`file.py` reads files by it, `load` fills the `Config` by its fields, `reload` knows by it what a running broker takes
over, and docs/configuration.md is made of it (`python -m tools.docs.configuration`). Defaults are those of the
`Config`; a test loads a file with every default in it, which must change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from pydanube.config.checks import (
    Check,
    address_or_off,
    auto_or_off,
    heartbeat,
    namespaces,
    one_of,
    path,
    storage_url,
    switch,
    text,
    texts,
    url,
    whole,
)
from pydanube.config.stream import FRAME_BYTES_MAX, FRAME_BYTES_MIN
from pydanube.core.cluster.load import STRATEGIES
from pydanube.core.commit.sessions import IDLE_HOURS_MIN, SESSIONS_LIMIT
from pydanube.core.dispatch.consumer_window import UNACKED_MAX_ALLOWED
from pydanube.core.units import MIB

if TYPE_CHECKING:
    from pydanube.config import Config

Default: TypeAlias = str | bool | Callable[["Config"], object] | None

LEVELS: Final = ("debug", "info", "warning", "error")
LINES: Final = ("text", "json")
AGGRESSIVENESS: Final = ("conservative", "balanced", "aggressive")
PORT: Final = whole(0, 65535)
POSITIVE: Final = whole(1)
LIMIT: Final = whole(0, 2**32 - 1)


class Setting(NamedTuple):
    """`flag` sets the same on the command line and wins. `field` is its place in the `Config`, which counts in smaller
    units: one of the file is `unit` of them. `default` is what applies if it is not given, unless that is its field.
    """

    check: Check
    meaning: str
    flag: str = ""
    field: str = ""
    unit: int = 1
    default: Default = None
    reloaded: bool = False  # a running broker takes a change over


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


SETTINGS: Final[Mapping[str, Setting]] = {
    # the broker and its ports
    "broker.host": Setting(
        text,
        "The address on which every port listens. `0.0.0.0` is every address of the machine.",
        default=lambda config: config.broker.client_addr.rpartition(":")[0],
    ),
    "broker.ports.client": Setting(
        PORT,
        "gRPC for the official clients.",
        flag="--broker-addr",
        default=lambda config: _port(config.broker.client_addr),
    ),
    "broker.ports.stream": Setting(
        PORT,
        "The native protocol: the Python client and Spark.",
        flag="--stream-addr",
        default=lambda config: _port(config.broker.stream_addr),
    ),
    "broker.ports.admin": Setting(
        PORT, "gRPC for `danube admin`.", flag="--admin-addr", default=lambda config: _port(config.broker.admin_addr)
    ),
    "broker.ports.prometheus": Setting(
        PORT,
        "HTTP: metrics and health.",
        flag="--prom-exporter",
        default=lambda config: _port(config.broker.metrics_addr),
    ),
    "broker.ports.raft": Setting(
        PORT,
        "The metadata member beside this broker: its peers talk here.",
        flag="--raft-addr",
        default=lambda config: _port(config.cluster.raft_addr),
    ),
    "broker.advertised_listeners.broker_url": Setting(
        url, "What clients are told to connect to. Needed if the broker listens on `0.0.0.0`.", flag="--advertised-addr"
    ),
    "broker.advertised_listeners.connect_url": Setting(
        url, "The proxy in front of this broker, if there is one.", flag="--connect-url"
    ),
    "broker.shutdown_seconds": Setting(
        POSITIVE,
        "How long a stop may take to hand topics over. If it is not given: 30, or 0.05 for each topic if that "
        "is more. Whoever stops the process must wait longer.",
        flag="--shutdown-timeout",
    ),
    "broker.grpc_server": Setting(
        one_of("own", "grpcio"),
        "Which gRPC server listens at the client port: ours, or that of grpcio, which costs about ten times as much "
        "CPU; see [the gRPC port](grpc.md).",
        field="grpc.server",
    ),
    "broker.grpc_tls.cert_file": Setting(
        path, "Certificate chain in PEM. Without it the client port is plain TCP.", field="grpc.cert_file"
    ),
    "broker.grpc_tls.key_file": Setting(path, "Its key in PEM, without a password.", field="grpc.key_file"),
    "broker.grpc_tls.ca_file": Setting(
        path, "In PEM: clients show a certificate that one of these has signed.", field="grpc.ca_file"
    ),
    "broker.grpc_tls.clients": Setting(
        one_of("required", "optional"),
        "With `ca_file`: whether a client without a certificate is let in.",
        field="grpc.clients",
    ),
    # general
    "cluster_name": Setting(
        text, "Part of the store's identity. The same on every broker of a cluster.", field="cluster.cluster_name"
    ),
    "bootstrap_namespaces": Setting(
        namespaces, "Namespaces that are made at the start.", field="broker.bootstrap_namespaces"
    ),
    "auto_create_topics": Setting(
        switch, "A producer may create the topic that it names.", field="broker.auto_create_topics"
    ),
    "admin_tls": Setting(switch, "Only `false` is accepted: TLS on the admin port does not exist.", default=False),
    "auth.mode": Setting(text, "Only `none` is accepted: authentication does not exist.", default="none"),
    "log.level": Setting(
        one_of(*LEVELS),
        "Log lines below this level are not written.",
        flag="--log-level",
        field="lines.level",
        reloaded=True,
    ),
    "log.format": Setting(
        one_of(*LINES),
        "`text` for people, `json` for machines: one object per line.",
        flag="--log-format",
        field="lines.format",
        reloaded=True,
    ),
    "web.listen": Setting(
        address_or_off,
        "Where the [web admin](web-admin.md) of a standalone broker listens, or `off`. A cluster's broker has "
        "none unless this is given.",
        flag="--web-addr",
        default=lambda config: config.web_addr or "off",
    ),
    # metadata
    "meta_store.seed_nodes": Setting(
        texts, "The brokers that keep the metadata, by their raft address.", flag="--seed-nodes"
    ),
    "meta_store.etcd": Setting(texts, "An etcd that runs already, instead of seed nodes.", flag="--etcd"),
    "meta_store.ttl_seconds": Setting(
        POSITIVE,
        "A broker that is silent for so long loses its topics. The same on every broker.",
        flag="--registration-ttl",
        field="cluster.ttl_seconds",
    ),
    "cluster.rejoin": Setting(
        one_of("drained", "active"),
        "What a broker is that comes back after it was away for longer than its lease, while others serve. "
        "`drained`: it gets no topics until somebody has looked why it was away and activates it. `active`: "
        "it activates itself as soon as everything that only its disk had is in the store. See "
        "[operations](operations.md).",
        field="cluster.rejoin",
    ),
    "meta_store.compaction": Setting(
        auto_or_off,
        "`auto`: every 5 minutes the leader has etcd forget how keys were more than 5 minutes ago. `off` "
        "where others use the same etcd: then somebody else must do it, or it is full one day. See "
        "[metadata](metadata.md).",
        field="cluster.compaction",
    ),
    # which broker gets a topic
    "load_manager.assignment_strategy": Setting(
        one_of(*STRATEGIES),
        "How brokers are compared: by number of topics (`fair`), by load (`balanced`), or by the resource "
        "that is scarcest (`weighted_load`). See [operations](operations.md#how-load-is-weighed).",
        field="load_manager.assignment_strategy",
    ),
    "load_manager.load_report_interval_seconds": Setting(
        POSITIVE, "How often a broker reports its load.", field="load_manager.load_report_interval_seconds"
    ),
    "load_manager.rebalancing.enabled": Setting(
        switch, "Topics move by themselves when the load is uneven.", field="load_manager.rebalancing_enabled"
    ),
    "load_manager.rebalancing.aggressiveness": Setting(
        one_of(*AGGRESSIVENESS), "How uneven it must be.", field="load_manager.aggressiveness"
    ),
    "load_manager.rebalancing.check_interval_seconds": Setting(
        POSITIVE, "How often that is looked at.", field="load_manager.check_interval_seconds"
    ),
    "load_manager.rebalancing.max_moves_per_hour": Setting(
        whole(0),
        "At most so many moves by themselves; 0 is none. `brokers rebalance` does not ask.",
        field="load_manager.max_moves_per_hour",
    ),
    "load_manager.rebalancing.cooldown_seconds": Setting(
        whole(0),
        "Between two moves by themselves. `brokers rebalance` does not ask.",
        field="load_manager.cooldown_seconds",
    ),
    "load_manager.rebalancing.min_brokers_for_rebalance": Setting(
        whole(2), "With fewer active brokers nothing moves.", field="load_manager.min_brokers_for_rebalance"
    ),
    "load_manager.rebalancing.min_topic_age_seconds": Setting(
        whole(0),
        "A topic stays at least so long where it is, unless somebody moves it.",
        field="load_manager.min_topic_age_seconds",
    ),
    "load_manager.rebalancing.blacklist_topics": Setting(
        texts,
        "Topics that neither move by themselves nor by `brokers rebalance`; `/system/*` is a glob.",
        field="load_manager.blacklist_topics",
    ),
    # storage
    "storage.url": Setting(
        storage_url, "Where history is kept; see [storage](storage.md). A cluster needs it.", flag="--storage-url"
    ),
    "storage.mode": Setting(
        one_of("local", "shared_fs", "object_store"),
        "The original's way to say the same; use `storage.url`.",
        default="local",
    ),
    "storage.durable.root": Setting(text, "With `storage.mode`: the directory, or the bucket and prefix."),
    "storage.durable.backend": Setting(
        one_of("s3", "gcs", "azblob"), "With `storage.mode: object_store`: which kind of store."
    ),
    "storage.local_wal_root": Setting(
        path, "The data directory: log, node id, metadata of a standalone broker.", flag="--data-dir", field="data_dir"
    ),
    "storage.durable.endpoint": Setting(
        text, "The server, if it is not the provider's own: S3-compatible stores, emulators."
    ),
    "storage.durable.region": Setting(text, "s3: the bucket's."),
    "storage.durable.virtual_host_style": Setting(
        switch, "s3: the bucket's name is part of the host name.", default=False
    ),
    "storage.durable.access_key": Setting(text, "s3: else `AWS_ACCESS_KEY_ID`."),
    "storage.durable.secret_key": Setting(text, "s3: else `AWS_SECRET_ACCESS_KEY`."),
    "storage.durable.session_token": Setting(text, "s3: of temporary credentials."),
    "storage.durable.profile": Setting(text, "s3: of the AWS configuration files."),
    "storage.durable.role_arn": Setting(text, "s3: a role to assume."),
    "storage.durable.project": Setting(text, "gs: the project."),
    "storage.durable.credentials_path": Setting(text, "gs: a file; else `GOOGLE_APPLICATION_CREDENTIALS`."),
    "storage.durable.credentials_json": Setting(text, "gs: the same, as text."),
    "storage.durable.account_name": Setting(text, "az: else `AZURE_STORAGE_ACCOUNT_NAME`."),
    "storage.durable.account_key": Setting(text, "az: else `AZURE_STORAGE_ACCOUNT_KEY`."),
    "storage.durable.anonymous": Setting(switch, "The store asks for no credentials.", default=False),
    "storage.readers.access_key": Setting(
        text,
        "s3: a key that may only list and get, for clients of the [Iceberg catalog]"
        "(storage.md#every-topic-is-an-iceberg-table) that ask for one. Never the broker's own.",
    ),
    "storage.readers.secret_key": Setting(text, "The same key's other half."),
    "storage.readers.session_token": Setting(text, "Of temporary keys; renew them in time."),
    "storage.readers.endpoint": Setting(text, "Where clients find the store, if not at `storage.durable.endpoint`."),
    "storage.readers.region": Setting(text, "If not `storage.durable.region`."),
    "storage.upload.interval_seconds": Setting(
        POSITIVE,
        "How often new messages go to the object store.",
        flag="--upload-interval",
        field="storage.tier.upload_seconds",
    ),
    "storage.upload.max_mb": Setting(
        whole(1, 512, times=MIB),
        "As soon as so much waits it is uploaded.",
        field="storage.tier.object_bytes",
        unit=MIB,
    ),
    "storage.local_retention.time_minutes": Setting(
        whole(1, times=60), "What is uploaded and older leaves the disk.", field="storage.tier.local.seconds", unit=60
    ),
    "storage.local_retention.size_mb": Setting(
        whole(1, times=MIB),
        "Of each topic: what is uploaded and beyond this size leaves the disk.",
        field="storage.tier.local.size_bytes",
        unit=MIB,
    ),
    "storage.local_retention.check_interval_minutes": Setting(
        whole(1, times=60),
        "How often both kinds of retention are looked at.",
        field="storage.tier.retention_check_seconds",
        unit=60,
    ),
    "storage.wal.rotation.max_bytes": Setting(
        whole(MIB, 2**31 - 8 * MIB), "A segment file is closed at this size.", field="storage.segment_bytes"
    ),
    "storage.wal.rotation.max_hours": Setting(
        whole(1, times=3600),
        "Or at this age; each topic up to a fifth earlier, so that they do not all do it at once.",
        field="storage.segment_seconds",
        unit=3600,
    ),
    "storage.wal.max_mb": Setting(
        whole(0, times=MIB),
        "Of all topics' segments: publishes are refused until something was uploaded. 0: the disk is the bound.",
        field="storage.wal_bytes_max",
        unit=MIB,
    ),
    "storage.wal.pending_mb": Setting(
        whole(1, times=MIB),
        "What has come and is not on disk yet, of all topics. Beyond it native connections that send are not "
        "read from, and gRPC sends are refused with RESOURCE_EXHAUSTED, which clients try again; see "
        "[operations](operations.md).",
        field="storage.pending_bytes",
        unit=MIB,
    ),
    "storage.wal.sessions_max": Setting(
        whole(1, SESSIONS_LIMIT),
        "Sessions of idempotent producers that one topic remembers. Beyond it no further producer is opened.",
        field="storage.sessions_max",
    ),
    "storage.wal.session_hours": Setting(
        whole(IDLE_HOURS_MIN, times=3600),
        "A session without a new message for so long ends. What is sent under it afterwards is refused.",
        field="storage.session_seconds",
        unit=3600,
    ),
    # dispatch
    "dispatch.decoded_mb": Setting(
        whole(1, times=MIB),
        "Batches kept decoded for gRPC consumers that read the same place, of all topics.",
        field="dispatch.decoded_bytes",
        unit=MIB,
    ),
    "dispatch.outbox_mb": Setting(
        whole(1, times=MIB),
        "Messages decoded and not sent yet, of all gRPC consumers. Each may have one message beyond it.",
        field="dispatch.outbox_bytes",
        unit=MIB,
    ),
    "dispatch.max_unacked_messages": Setting(
        whole(1, UNACKED_MAX_ALLOWED),
        "How many messages a subscription may have out unacknowledged, over gRPC. Native consumers grant permits.",
        field="dispatch.max_unacked_messages",
    ),
    "dispatch.heartbeat_interval": Setting(
        heartbeat,
        "How often lag is looked for besides notifications; see [operations](operations.md).",
        field="dispatch.heartbeat",
        default=lambda config: str(config.dispatch.heartbeat),
    ),
    # limits of topics
    "policies.max_producers_per_topic": Setting(
        LIMIT, "Producers of one topic.", field="policies.max_producers_per_topic", reloaded=True
    ),
    "policies.max_subscriptions_per_topic": Setting(
        LIMIT, "Subscriptions of one topic.", field="policies.max_subscriptions_per_topic", reloaded=True
    ),
    "policies.max_consumers_per_topic": Setting(
        LIMIT, "Consumers of one topic, in all subscriptions.", field="policies.max_consumers_per_topic", reloaded=True
    ),
    "policies.max_consumers_per_subscription": Setting(
        LIMIT, "Consumers of one subscription.", field="policies.max_consumers_per_subscription", reloaded=True
    ),
    "policies.max_publish_rate": Setting(
        LIMIT, "Messages per second into one topic.", field="policies.max_publish_rate", reloaded=True
    ),
    "policies.max_subscription_dispatch_rate": Setting(
        LIMIT,
        "Messages per second out of one subscription.",
        field="policies.max_subscription_dispatch_rate",
        reloaded=True,
    ),
    "policies.max_message_size": Setting(
        LIMIT, "Bytes of one payload.", field="policies.max_message_size", reloaded=True
    ),
    "policies.retention_minutes": Setting(
        LIMIT, "History that is older is forgotten.", field="policies.retention_minutes", reloaded=True
    ),
    "policies.retention_mb": Setting(
        LIMIT,
        "History of a topic beyond this size is forgotten, oldest first.",
        field="policies.retention_mb",
        reloaded=True,
    ),
    # the native port
    "stream.limits.handshake_seconds": Setting(
        POSITIVE, "From connecting to the end of the greeting.", field="stream.limits.handshake_seconds", reloaded=True
    ),
    "stream.limits.keepalive_seconds": Setting(
        whole(1, 3600),
        "A peer that is silent for twice as long is dropped.",
        field="stream.limits.keepalive_seconds",
        reloaded=True,
    ),
    "stream.limits.frame_seconds": Setting(
        POSITIVE, "A frame that has begun must be complete by then.", field="stream.limits.frame_seconds", reloaded=True
    ),
    "stream.limits.stuck_seconds": Setting(
        POSITIVE,
        "A peer that takes nothing for so long is dropped.",
        field="stream.limits.stuck_seconds",
        reloaded=True,
    ),
    "stream.limits.frame_bytes": Setting(
        whole(FRAME_BYTES_MIN, FRAME_BYTES_MAX),
        "The largest frame that is taken.",
        field="stream.limits.frame_bytes",
        reloaded=True,
    ),
    "stream.limits.unwritten_bytes": Setting(
        POSITIVE,
        "Produced on one connection and not on disk: then it is not read from.",
        field="stream.limits.unwritten_bytes",
        reloaded=True,
    ),
    "stream.limits.unsent_bytes": Setting(
        whole(64 * 1024), "Waiting to be sent to one consumer.", field="stream.limits.unsent_bytes", reloaded=True
    ),
    "stream.limits.requests": Setting(
        POSITIVE,
        "Under way on one connection: then it is not read from.",
        field="stream.limits.requests",
        reloaded=True,
    ),
    "stream.limits.handles": Setting(
        POSITIVE, "Producers and consumers of one connection.", field="stream.limits.handles", reloaded=True
    ),
    "stream.limits.connections": Setting(POSITIVE, "Of all peers.", field="stream.limits.connections", reloaded=True),
    "stream.tls.cert_file": Setting(
        path, "Certificate chain in PEM. Without it the native port is plain TCP.", field="stream.cert_file"
    ),
    "stream.tls.key_file": Setting(path, "Its key in PEM, without a password.", field="stream.key_file"),
    "stream.tls.ca_file": Setting(
        path, "In PEM: clients need a certificate that one of these has signed.", field="stream.ca_file"
    ),
}


def default(config: Config, key: str) -> object | None:
    """What applies if the key is not in the file, as it would stand in the file; None if that is nothing at all.

    `config` is one that was loaded without a file.
    """
    setting = SETTINGS[key]
    if callable(setting.default):
        return setting.default(config)
    if not setting.field:
        return setting.default
    value: object = reduce(getattr, setting.field.split("."), config)
    if isinstance(value, tuple):
        return [str(each) for each in value]
    if setting.unit != 1:
        assert isinstance(value, int | float | None)
        return (value or 0) / setting.unit
    return str(value) if key == "storage.local_wal_root" else value
