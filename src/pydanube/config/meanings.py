"""What every key of the configuration file means, in a sentence, and what applies if it is not given.

The page docs/configuration.md is made of this (`python -m tools.docs.configuration`). A test keeps it complete, and
loads a file with every default in it, which must change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from pydanube.config import Config
from pydanube.core.policies import MIB


class Meaning(NamedTuple):
    """`flag` sets the same on the command line and wins."""

    text: str
    flag: str = ""


MEANINGS: Final[Mapping[str, Meaning]] = {
    # broker
    "broker.host": Meaning("The address on which every port listens. `0.0.0.0` is every address of the machine."),
    "broker.ports.client": Meaning("gRPC for the official clients.", "--broker-addr"),
    "broker.ports.stream": Meaning("The native protocol: the Python client and Spark.", "--stream-addr"),
    "broker.ports.admin": Meaning("gRPC for `danube admin`.", "--admin-addr"),
    "broker.ports.prometheus": Meaning("HTTP: metrics and health.", "--prom-exporter"),
    "broker.ports.raft": Meaning("The metadata member beside this broker: its peers talk here.", "--raft-addr"),
    "broker.advertised_listeners.broker_url": Meaning(
        "What clients are told to connect to. Needed if the broker listens on `0.0.0.0`.", "--advertised-addr"
    ),
    "broker.advertised_listeners.connect_url": Meaning(
        "The proxy in front of this broker, if there is one.", "--connect-url"
    ),
    "broker.shutdown_seconds": Meaning(
        "How long a stop may take to hand topics over. If it is not given: 30, or 0.05 for each topic if that is more. "
        "Whoever stops the process must wait longer.",
        "--shutdown-timeout",
    ),
    # general
    "cluster_name": Meaning("Part of the store's identity. The same on every broker of a cluster."),
    "bootstrap_namespaces": Meaning("Namespaces that are made at the start."),
    "auto_create_topics": Meaning("A producer may create the topic that it names."),
    "admin_tls": Meaning("Only `false` is accepted: TLS on the admin port does not exist."),
    "auth.mode": Meaning("Only `none` is accepted: authentication does not exist."),
    "log.level": Meaning("Log lines below this level are not written.", "--log-level"),
    "log.format": Meaning("`text` for people, `json` for machines: one object per line.", "--log-format"),
    "web.listen": Meaning(
        "Where the [web admin](web-admin.md) of a standalone broker listens, or `off`. A cluster's broker has none "
        "unless this is given.",
        "--web-addr",
    ),
    # metadata
    "meta_store.seed_nodes": Meaning("The brokers that keep the metadata, by their raft address.", "--seed-nodes"),
    "meta_store.etcd": Meaning("An etcd that runs already, instead of seed nodes.", "--etcd"),
    "meta_store.ttl_seconds": Meaning(
        "A broker that is silent for so long loses its topics. The same on every broker.", "--registration-ttl"
    ),
    "cluster.rejoin": Meaning(
        "What a broker is that comes back after it was away for longer than its lease, while others serve. `drained`: "
        "it gets no topics until somebody has looked why it was away and activates it. `active`: it activates itself "
        "as soon as everything that only its disk had is in the store. See [operations](operations.md)."
    ),
    "meta_store.compaction": Meaning(
        "`auto`: every 5 minutes the leader has etcd forget how keys were more than 5 minutes ago. `off` where others "
        "use the same etcd: then somebody else must do it, or it is full one day. See [metadata](metadata.md)."
    ),
    # who gets a topic
    "load_manager.assignment_strategy": Meaning(
        "How brokers are compared: by number of topics (`fair`), by load (`balanced`), or by the resource that is "
        "scarcest (`weighted_load`). See [operations](operations.md#how-load-is-weighed)."
    ),
    "load_manager.load_report_interval_seconds": Meaning("How often a broker reports its load."),
    "load_manager.rebalancing.enabled": Meaning("Topics move by themselves when the load is uneven."),
    "load_manager.rebalancing.aggressiveness": Meaning("How uneven it must be."),
    "load_manager.rebalancing.check_interval_seconds": Meaning("How often that is looked at."),
    "load_manager.rebalancing.max_moves_per_hour": Meaning(
        "At most so many moves by themselves; 0 is none. `brokers rebalance` does not ask."
    ),
    "load_manager.rebalancing.cooldown_seconds": Meaning(
        "Between two moves by themselves. `brokers rebalance` does not ask."
    ),
    "load_manager.rebalancing.min_brokers_for_rebalance": Meaning("With fewer active brokers nothing moves."),
    "load_manager.rebalancing.min_topic_age_seconds": Meaning(
        "A topic stays at least so long where it is, unless somebody moves it."
    ),
    "load_manager.rebalancing.blacklist_topics": Meaning(
        "Topics that neither move by themselves nor by `brokers rebalance`; `/system/*` is a glob."
    ),
    # storage
    "storage.url": Meaning("Where history is kept; see [storage](storage.md). A cluster needs it.", "--storage-url"),
    "storage.mode": Meaning("The original's way to say the same; use `storage.url`."),
    "storage.durable.root": Meaning("With `storage.mode`: the directory, or the bucket and prefix."),
    "storage.durable.backend": Meaning("With `storage.mode: object_store`: which kind of store."),
    "storage.local_wal_root": Meaning(
        "The data directory: log, node id, metadata of a standalone broker.", "--data-dir"
    ),
    "storage.durable.endpoint": Meaning(
        "The server, if it is not the provider's own: S3-compatible stores, emulators."
    ),
    "storage.durable.region": Meaning("s3: the bucket's."),
    "storage.durable.virtual_host_style": Meaning("s3: the bucket's name is part of the host name."),
    "storage.durable.access_key": Meaning("s3: else `AWS_ACCESS_KEY_ID`."),
    "storage.durable.secret_key": Meaning("s3: else `AWS_SECRET_ACCESS_KEY`."),
    "storage.durable.session_token": Meaning("s3: of temporary credentials."),
    "storage.durable.profile": Meaning("s3: of the AWS configuration files."),
    "storage.durable.role_arn": Meaning("s3: a role to assume."),
    "storage.durable.project": Meaning("gs: the project."),
    "storage.durable.credentials_path": Meaning("gs: a file; else `GOOGLE_APPLICATION_CREDENTIALS`."),
    "storage.durable.credentials_json": Meaning("gs: the same, as text."),
    "storage.durable.account_name": Meaning("az: else `AZURE_STORAGE_ACCOUNT_NAME`."),
    "storage.durable.account_key": Meaning("az: else `AZURE_STORAGE_ACCOUNT_KEY`."),
    "storage.durable.anonymous": Meaning("The store asks for no credentials."),
    "storage.upload.interval_seconds": Meaning("How often new messages go to the object store.", "--upload-interval"),
    "storage.upload.max_mb": Meaning("As soon as so much waits it is uploaded."),
    "storage.local_retention.time_minutes": Meaning("What is uploaded and older leaves the disk."),
    "storage.local_retention.size_mb": Meaning("Of each topic: what is uploaded and beyond this size leaves the disk."),
    "storage.local_retention.check_interval_minutes": Meaning("How often both kinds of retention are looked at."),
    "storage.wal.rotation.max_bytes": Meaning("A segment file is closed at this size."),
    "storage.wal.rotation.max_hours": Meaning(
        "Or at this age; each topic up to a fifth earlier, so that they do not all do it at once."
    ),
    "storage.wal.max_mb": Meaning(
        "Of all topics' segments: publishes are refused until something was uploaded. 0: the disk is the bound."
    ),
    "storage.wal.pending_mb": Meaning(
        "What has come and is not on disk yet, of all topics. Beyond it native connections that send are not read "
        "from, and gRPC sends are refused with RESOURCE_EXHAUSTED, which clients try again; see "
        "[operations](operations.md)."
    ),
    "storage.wal.sessions_max": Meaning(
        "Sessions of idempotent producers that one topic remembers. Beyond it no further producer is opened."
    ),
    "storage.wal.session_hours": Meaning(
        "A session without a new message for so long ends. What is sent under it afterwards is refused."
    ),
    # dispatch
    "dispatch.decoded_mb": Meaning("Batches kept decoded for gRPC consumers that read the same place, of all topics."),
    "dispatch.outbox_mb": Meaning(
        "Messages decoded and not sent yet, of all gRPC consumers. Each may have one message beyond it."
    ),
    "dispatch.max_unacked_messages": Meaning(
        "How many messages a subscription may have out unacknowledged, over gRPC. Native consumers grant permits."
    ),
    "dispatch.heartbeat_interval": Meaning(
        "How often lag is looked for besides notifications; see [operations](operations.md)."
    ),
    # policies
    "policies.max_producers_per_topic": Meaning("Producers of one topic."),
    "policies.max_subscriptions_per_topic": Meaning("Subscriptions of one topic."),
    "policies.max_consumers_per_topic": Meaning("Consumers of one topic, in all subscriptions."),
    "policies.max_consumers_per_subscription": Meaning("Consumers of one subscription."),
    "policies.max_publish_rate": Meaning("Messages per second into one topic."),
    "policies.max_subscription_dispatch_rate": Meaning("Messages per second out of one subscription."),
    "policies.max_message_size": Meaning("Bytes of one payload."),
    "policies.retention_minutes": Meaning("History that is older is forgotten."),
    "policies.retention_mb": Meaning("History of a topic beyond this size is forgotten, oldest first."),
    # the native port
    "stream.limits.handshake_seconds": Meaning("From connecting to the end of the greeting."),
    "stream.limits.keepalive_seconds": Meaning("A peer that is silent for twice as long is dropped."),
    "stream.limits.frame_seconds": Meaning("A frame that has begun must be complete by then."),
    "stream.limits.stuck_seconds": Meaning("A peer that takes nothing for so long is dropped."),
    "stream.limits.frame_bytes": Meaning("The largest frame that is taken."),
    "stream.limits.unwritten_bytes": Meaning("Produced on one connection and not on disk: then it is not read from."),
    "stream.limits.unsent_bytes": Meaning("Waiting to be sent to one consumer."),
    "stream.limits.requests": Meaning("Under way on one connection: then it is not read from."),
    "stream.limits.handles": Meaning("Producers and consumers of one connection."),
    "stream.limits.connections": Meaning("Of all peers."),
    "stream.tls.cert_file": Meaning("Certificate chain in PEM. Without it the native port is plain TCP."),
    "stream.tls.key_file": Meaning("Its key in PEM, without a password."),
    "stream.tls.ca_file": Meaning("In PEM: clients need a certificate that one of these has signed."),
}


def default(config: Config, key: str) -> object | None:
    """What applies if the key is not in the file, as it would stand in the file; None if that is nothing at all.

    `config` is one that was loaded without a file.
    """
    section, _, name = key.rpartition(".")
    match section:
        case "broker.ports":
            return _port(config, name)
        case "policies":
            limit: int = getattr(config.policies, name)
            return limit
        case "load_manager" | "load_manager.rebalancing":
            found = getattr(config.load_manager, "rebalancing_enabled" if name == "enabled" else name)
            return list(found) if isinstance(found, tuple) else found
        case "stream.limits":
            bound: float = getattr(config.stream.limits, name)
            return bound
    tier, storage = config.storage.tier, config.storage
    return {
        "broker.host": config.broker.client_addr.rpartition(":")[0],
        "cluster_name": config.cluster.cluster_name,
        "bootstrap_namespaces": [str(each) for each in config.broker.bootstrap_namespaces],
        "auto_create_topics": config.broker.auto_create_topics,
        "admin_tls": False,
        "auth.mode": "none",
        "log.level": config.lines.level,
        "log.format": config.lines.format,
        "web.listen": config.web_addr or "off",
        "meta_store.ttl_seconds": config.cluster.ttl_seconds,
        "meta_store.compaction": config.cluster.compaction,
        "cluster.rejoin": config.cluster.rejoin,
        "storage.mode": "local",
        "storage.local_wal_root": str(config.data_dir),
        "storage.durable.anonymous": False,
        "storage.durable.virtual_host_style": False,
        "storage.upload.interval_seconds": tier.upload_seconds,
        "storage.upload.max_mb": tier.object_bytes / MIB,
        "storage.local_retention.time_minutes": (tier.local.seconds or 0) / 60,
        "storage.local_retention.size_mb": (tier.local.size_bytes or 0) / MIB,
        "storage.local_retention.check_interval_minutes": tier.retention_check_seconds / 60,
        "storage.wal.rotation.max_bytes": storage.segment_bytes,
        "storage.wal.rotation.max_hours": storage.segment_seconds / 3600,
        "storage.wal.max_mb": storage.wal_bytes_max / MIB,
        "storage.wal.pending_mb": storage.pending_bytes / MIB,
        "storage.wal.sessions_max": storage.sessions_max,
        "storage.wal.session_hours": storage.session_seconds / 3600,
        "dispatch.decoded_mb": config.dispatch.decoded_bytes / MIB,
        "dispatch.outbox_mb": config.dispatch.outbox_bytes / MIB,
        "dispatch.max_unacked_messages": config.dispatch.max_unacked_messages,
        "dispatch.heartbeat_interval": str(config.dispatch.heartbeat),
    }.get(key)


def _port(config: Config, name: str) -> int:
    address = {
        "client": config.broker.client_addr,
        "stream": config.broker.stream_addr,
        "admin": config.broker.admin_addr,
        "prometheus": config.broker.metrics_addr,
        "raft": config.cluster.raft_addr,
    }[name]
    return int(address.rpartition(":")[2])
