"""Settings from flags and a YAML file: what they become, and what is refused with which sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pydanube.config import BrokerConfig, ClusterConfig, Config, Flags, LinesConfig, load
from pydanube.config.file import ALIASES, REPLACED
from pydanube.config.settings import SETTINGS
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.policies import UNLIMITED, TopicPolicy
from pydanube.errors import ConfigError

SHIPPED = """
cluster_name: MY_CLUSTER
broker:
  host: 0.0.0.0
  ports: {client: 6650, admin: 50051, raft: 7650, prometheus: 9040}
  advertised_listeners: {broker_url: broker1.example}
meta_store:
  data_dir: ./danube-data/raft
  seed_nodes: ["10.0.0.1:7650", "http://10.0.0.2:7650"]
bootstrap_namespaces: [default, orders]
auto_create_topics: false
admin_tls: false
auth: {mode: none}
load_manager:
  assignment_strategy: fair
  load_report_interval_seconds: 30
  rebalancing:
    enabled: true
    aggressiveness: aggressive
    blacklist_topics: [/system/*]
storage:
  mode: object_store
  local_wal_root: ./wal
  metadata_prefix: /danube
  durable: {backend: s3, root: "s3://bucket/prefix", endpoint: "http://localhost:9000", secret_key: hush}
  local_retention: {time_minutes: 2880, size_mb: 20480, check_interval_minutes: 5}
  wal:
    file_name: wal.log
    rotation: {max_bytes: 536870912}
    max_mb: 40960
    advanced:
      cache_capacity: 1024
      file_sync: {interval_ms: 5000, max_batch_bytes: 10485760}
  write_buffer: {backend: valkey, endpoints: ["redis://localhost"]}
dispatch: {max_unacked_messages: 50, heartbeat_interval: 250ms}
policies: {max_producers_per_topic: 3}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "danube.yml"


def loaded(file: Path, text: str, mode: str = "standalone", **flags: str | Path | bool) -> Config:
    file.write_text(text)
    return load(Flags(config_file=file, mode=mode, **flags))  # type: ignore[arg-type]


def refusal(file: Path, text: str, mode: str = "standalone", **flags: str | Path | bool) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(file, text, mode, **flags)
    return caught.value


# --- defaults -------------------------------------------------------------------------------------------


def test_a_standalone_broker_needs_no_file_and_no_other_flag() -> None:
    config = load(Flags(mode="standalone"))
    assert config == Config()
    assert config.broker == BrokerConfig(
        client_addr="127.0.0.1:6650",
        stream_addr="127.0.0.1:6651",
        admin_addr="127.0.0.1:50051",
        metrics_addr="127.0.0.1:9040",
    )
    assert (config.policies, config.dispatch.heartbeat, config.storage.url) == (UNLIMITED, Heartbeat(500), None)
    assert config.broker.bootstrap_namespaces == ("default",) and config.warnings == ()


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().mode = "cluster"  # type: ignore[misc]


def test_an_empty_file_is_as_good_as_none(file: Path) -> None:
    assert loaded(file, "") == Config()
    assert loaded(file, "storage:\nbroker:\n  ports:\n") == Config()


# --- the file -------------------------------------------------------------------------------------------


def test_the_references_own_file_is_understood(file: Path) -> None:
    config = loaded(file, SHIPPED, mode="cluster")
    assert config.mode == "cluster" and config.cluster.cluster_name == "MY_CLUSTER"
    assert config.data_dir == Path("wal")
    assert config.broker.client_addr == "0.0.0.0:6650" and config.broker.stream_addr == "0.0.0.0:6651"
    assert config.broker.broker_url == config.broker.connect_url == "http://broker1.example"
    assert config.broker.bootstrap_namespaces == ("default", "orders") and not config.broker.auto_create_topics
    assert config.cluster.seed_nodes == ("10.0.0.1:7650", "10.0.0.2:7650")
    assert config.load_manager.assignment_strategy == "fair" and config.load_manager.rebalancing_enabled
    assert config.load_manager.aggressiveness == "aggressive"
    assert config.load_manager.blacklist_topics == ("/system/*",)
    assert config.storage.url == "s3://bucket/prefix"
    assert config.storage.options == {"endpoint": "http://localhost:9000", "secret_key": "hush"}
    assert config.storage.segment_bytes == 512 * 1024 * 1024
    assert config.storage.wal_bytes_max == 40 * 1024 * 1024 * 1024 and Config().storage.wal_bytes_max == 0
    assert config.storage.tier.local.seconds == 2880 * 60
    assert config.storage.tier.local.size_bytes == 20480 * 1024 * 1024
    assert config.dispatch.max_unacked_messages == 50 and config.dispatch.heartbeat == Heartbeat(250)
    assert config.policies == TopicPolicy(max_producers_per_topic=3)


def test_keys_without_meaning_here_are_warnings_that_say_what_replaces_them(file: Path) -> None:
    warnings = loaded(file, SHIPPED, mode="cluster").warnings
    named = [warning.split(" has no effect: ")[0] for warning in warnings]
    assert named == [
        "meta_store.data_dir",
        "storage.metadata_prefix",
        "storage.wal.file_name",
        "storage.wal.advanced.cache_capacity",
        "storage.wal.advanced.file_sync.interval_ms",
        "storage.wal.advanced.file_sync.max_batch_bytes",
        "storage.write_buffer.backend",
        "storage.write_buffer.endpoints",
    ]
    assert "synced to disk before it is acknowledged" in warnings[4]


def test_raft_keys_are_warnings_for_a_broker_without_peers(file: Path) -> None:
    text = "broker: {ports: {raft: 7650}}\nmeta_store: {seed_nodes: ['a:1']}"
    warnings = loaded(file, text, raft_addr="127.0.0.1:7651", join=True).warnings
    assert [warning.split()[0] for warning in warnings] == [
        "--raft-addr",
        "--join",
        "broker.ports.raft",
        "meta_store.seed_nodes",
    ]
    assert all("SQLite" in warning for warning in warnings)


@pytest.mark.parametrize("name", ["local_wal_root", "root", "cache_root"])
def test_a_setting_has_the_references_other_names_too(file: Path, name: str) -> None:
    assert loaded(file, f"storage: {{{name}: /data}}").data_dir == Path("/data")


def test_a_setting_given_twice_under_two_names_is_refused(file: Path) -> None:
    error = refusal(file, "storage: {root: /a, local_wal_root: /b}")
    assert error.key == "storage.local_wal_root" and "given already" in str(error)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("storage: {url: 's3://bucket'}", "s3://bucket"),
        ("storage: {url: 'file:///data/objects'}", "file:///data/objects"),
        ("storage: {mode: local}", None),
        ("storage: {mode: shared_fs, durable: {root: /shared}}", "file:///shared"),
        ("storage: {mode: object_store, durable: {backend: gcs, root: bucket/prefix}}", "gs://bucket/prefix"),
        ("storage: {mode: object_store, durable: {backend: azblob, root: /box/}}", "az://box"),
    ],
)
def test_the_cloud_tier_has_one_url_however_it_was_written(file: Path, text: str, url: str | None) -> None:
    assert loaded(file, text).storage.url == url


def test_secrets_are_not_shown(file: Path) -> None:
    text = "storage: {mode: object_store, durable: {backend: s3, root: b, secret_key: hush}}"
    assert "hush" not in repr(loaded(file, text))
    assert "hush" not in repr(Flags(edge_token="hush"))
    for mistake in ("storage: {durable: {secret_kye: hush}}", "auth: {jwt: {secret_key: hush}}"):
        assert "hush" not in str(refusal(file, mistake))


# --- flags ----------------------------------------------------------------------------------------------


def test_flags_win_over_the_file(file: Path) -> None:
    text = "broker: {host: 10.0.0.9, ports: {client: 1, stream: 2, admin: 3, prometheus: 4}}\nstorage: {root: /a}"
    config = loaded(file, text, broker_addr="127.0.0.1:0", stream_addr="[::1]:6", data_dir=Path("/b"))
    assert config.broker.client_addr == "127.0.0.1:0" and config.broker.stream_addr == "[::1]:6"
    assert config.broker.admin_addr == "10.0.0.9:3" and config.broker.metrics_addr == "10.0.0.9:4"
    assert config.data_dir == Path("/b")


FROM_FILE = "broker: {advertised_listeners: {broker_url: 'b:1'}}"
BEHIND_PROXY = "broker: {advertised_listeners: {broker_url: 'b:1', connect_url: 'http://proxy:2/'}}"


@pytest.mark.parametrize(
    ("text", "flags", "urls"),
    [
        ("", {}, (None, None)),
        ("", {"advertised_addr": "a:1"}, ("http://a:1", "http://a:1")),
        ("", {"advertised_addr": "a:1", "connect_url": "p:2"}, ("http://a:1", "http://p:2")),
        (FROM_FILE, {}, ("http://b:1", "http://b:1")),
        (FROM_FILE, {"broker_addr": "127.0.0.1:9"}, (None, None)),
        (BEHIND_PROXY, {}, ("http://b:1", "http://proxy:2")),
        (BEHIND_PROXY, {"broker_addr": "127.0.0.1:9"}, ("http://b:1", "http://proxy:2")),
        (BEHIND_PROXY, {"advertised_addr": "a:1"}, ("http://a:1", "http://a:1")),
    ],
)
def test_what_clients_are_told(
    file: Path, text: str, flags: dict[str, str], urls: tuple[str | None, str | None]
) -> None:
    broker = loaded(file, text, **flags).broker
    assert (broker.broker_url, broker.connect_url) == urls


def test_an_address_that_no_other_machine_can_dial_is_a_warning(file: Path) -> None:
    [warning] = loaded(file, "broker: {host: 0.0.0.0}").warnings
    assert "0.0.0.0" in warning and "--advertised-addr" in warning
    assert loaded(file, "broker: {host: 0.0.0.0}", advertised_addr="b:1").warnings == ()


def test_an_ipv6_host_gets_its_brackets(file: Path) -> None:
    assert loaded(file, "broker: {host: '::1'}").broker.client_addr == "[::1]:6650"


# --- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("broker: {ports: {client: 70000}}", "broker.ports.client", "from 0 to 65535"),
        ("broker: {ports: {client: '6650'}}", "broker.ports.client", "whole number"),
        ("broker: {ports: {client: true}}", "broker.ports.client", "whole number"),
        ("broker: {host: 'a b'}", "broker.host", "host:port"),
        (
            "broker: {advertised_listeners: {broker_url: 'https://b:1'}}",
            "broker.advertised_listeners.broker_url",
            "TLS",
        ),
        ("cluster_name: ''", "cluster_name", "not empty"),
        ("auto_create_topics: 'yes'", "auto_create_topics", "true or false"),
        ("bootstrap_namespaces: default", "bootstrap_namespaces", "a list"),
        ("bootstrap_namespaces: ['a/b']", "bootstrap_namespaces", "letters, digits"),
        ("dispatch: {max_unacked_messages: 0}", "dispatch.max_unacked_messages", "from 1 to 10000"),
        ("dispatch: {max_unacked_messages: 10001}", "dispatch.max_unacked_messages", "from 1 to 10000"),
        ("dispatch: {heartbeat_interval: 49ms}", "dispatch.heartbeat_interval", "from 50ms to 1000ms"),
        ("dispatch: {heartbeat_interval: 1001}", "dispatch.heartbeat_interval", "from 50ms to 1000ms"),
        ("policies: {max_message_size: -1}", "policies.max_message_size", "from 0"),
        ("load_manager: {assignment_strategy: best}", "load_manager.assignment_strategy", "one of fair, balanced"),
        ("storage: {mode: cloud}", "storage.mode", "one of local, shared_fs, object_store"),
        ("storage: {mode: shared_fs}", "storage.durable.root", "needs a root"),
        ("storage: {mode: object_store, durable: {root: b}}", "storage.durable.backend", "one of s3, gcs"),
        ("storage: {url: 's3://b', mode: shared_fs}", "storage.url", "not both"),
        ("storage: {url: /data}", "storage.url", "file:///directory"),
        ("storage: {wal: {max_mb: -1}}", "storage.wal.max_mb", "from 0"),
        ("storage: {wal: {rotation: {max_bytes: 4096}}}", "storage.wal.rotation.max_bytes", "from 1048576"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_key_and_value(file: Path, text: str, key: str, says: str) -> None:
    error = refusal(file, text)
    assert error.key == key and says in error.allowed
    assert str(error).startswith((f"{key} = ", f"{key} is not given: "))


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("brokr: {host: a}", "brokr.host", "perhaps broker.host is meant"),
        ("broker: {port: {client: 1}}", "broker.port.client", "perhaps broker.ports.client is meant"),
        ("dispatch: {heartbeat: 500ms}", "dispatch.heartbeat", "perhaps dispatch.heartbeat_interval is meant"),
        ("broker: 5", "broker", "section with the keys advertised_listeners, grpc_server, grpc_tls, host, ports"),
        ("zzz: 1", "zzz", "there is no such key"),
        ("zzz:", "zzz", "there is no such key"),
        ("brokr: {}", "brokr", "there is no such key"),
        ("policies: {max_message_size: {bytes: 1}}", "policies.max_message_size.bytes", "policies.max_message_size"),
    ],
)
def test_a_key_that_nobody_knows_is_refused_with_the_nearest(file: Path, text: str, key: str, says: str) -> None:
    error = refusal(file, text)
    assert error.key == key and says in error.allowed


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("auth: {mode: tls}", "auth.mode"),
        ("auth: {mode: none, jwt: {secret_key: x}}", "auth.jwt.secret_key"),
        ("auth: {super_admins: [me]}", "auth.super_admins"),
        ("auth: tls", "auth"),
        ("admin_tls: true", "admin_tls"),
    ],
)
def test_security_that_does_not_exist_yet_is_never_silently_ignored(file: Path, text: str, key: str) -> None:
    error = refusal(file, text)
    assert error.key == key and "does not exist yet" in str(error)


def test_security_that_is_switched_off_is_fine(file: Path) -> None:
    assert loaded(file, "auth: {mode: none}\nadmin_tls: false") == Config()


@pytest.mark.parametrize(
    ("flags", "key", "says"),
    [
        (Flags(), "--mode", "--mode is not given: standalone, or cluster"),
        (Flags(mode="edge"), "--mode", "edge mode does not exist"),
        (Flags(mode="standalone", edge_token="hush"), "--edge-token", "edge mode does not exist"),
        (Flags(mode="solo"), "--mode", "standalone or cluster"),
        (Flags(mode="cluster"), "--storage-url", "a cluster needs one object store"),
        (Flags(mode="standalone", broker_addr="6650"), "--broker-addr", "host:port"),
        (Flags(mode="standalone", stream_addr="a:99999"), "--stream-addr", "host:port"),
        (Flags(mode="standalone", admin_addr="::1:50051"), "--admin-addr", "[::1]:6650"),
        (Flags(mode="standalone", seed_nodes="a:1,b"), "--seed-nodes", "host:port"),
        (Flags(config_file=Path("missing.yml")), "--config-file", "No such file"),
    ],
)
def test_a_flag_that_is_not_allowed_is_refused_by_name(flags: Flags, key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert caught.value.key == key and says in str(caught.value)


def test_a_cluster_needs_a_store_and_somebody_who_keeps_its_metadata(file: Path) -> None:
    assert refusal(file, "", mode="cluster").key == "--storage-url"
    assert refusal(file, "storage: {url: 's3://b/p'}", mode="cluster").key == "--seed-nodes"
    both = refusal(file, "storage: {url: 's3://b/p'}\nmeta_store: {etcd: ['a:1'], seed_nodes: ['b:2']}", mode="cluster")
    assert both.key == "--etcd"


def test_a_cluster_needs_no_file() -> None:
    flags = Flags(mode="cluster", storage_url="file:///shared", seed_nodes="a:7650,b:7650", raft_addr="a:7650")
    config = load(flags)
    assert config.cluster.seed_nodes == ("a:7650", "b:7650") and config.storage.url == "file:///shared"


@pytest.mark.parametrize("text", ["broker: [", "\t- x", "just a text", "- a\n- b", "5"])
def test_a_file_that_is_no_configuration_is_refused(file: Path, text: str) -> None:
    error = refusal(file, text)
    assert error.key == "--config-file" and "YAML" in str(error)


# --- the tables -----------------------------------------------------------------------------------------


def test_every_key_is_in_one_table_only() -> None:
    assert not SETTINGS.keys() & ALIASES.keys() and not SETTINGS.keys() & REPLACED.keys()
    assert all(target in SETTINGS or target in REPLACED for target in ALIASES.values())


# --- log lines ------------------------------------------------------------------------------------------


def test_log_lines_are_set_by_the_file_and_flags_win(file: Path) -> None:
    assert load(Flags(mode="standalone")).lines == LinesConfig(level="info", format="text")
    text = "log: {level: warning, format: json}"
    assert loaded(file, text).lines == LinesConfig(level="warning", format="json")
    assert loaded(file, text, log_level="debug").lines == LinesConfig(level="debug", format="json")
    assert "one of debug, info, warning, error" in str(refusal(file, "log: {level: loud}"))


def test_a_stop_has_more_time_for_more_topics_unless_somebody_has_set_it(file: Path) -> None:
    assert [ClusterConfig().shutdown_seconds_for(topics) for topics in (0, 600, 3000)] == [30.0, 30.0, 150.0]
    file.write_text("broker: {shutdown_seconds: 12}\n")
    chosen = load(Flags(config_file=file, mode="standalone")).cluster
    assert [chosen.shutdown_seconds_for(topics) for topics in (0, 3000)] == [12.0, 12.0]
    by_flag = load(Flags(shutdown_timeout=0.0, mode="standalone")).cluster
    assert by_flag.shutdown_seconds_for(3000) == 0.0


@pytest.mark.parametrize(
    ("written", "meant"), [("", "auto"), ("auto", "auto"), ("off", "off"), ("'off'", "off"), ("false", "off")]
)
def test_who_compacts_the_metadata_store_may_be_said(file: Path, written: str, meant: str) -> None:
    """YAML reads off as false."""
    file.write_text(f"meta_store: {{compaction: {written}}}\n" if written else "")
    assert load(Flags(config_file=file, mode="standalone")).cluster.compaction == meant


def test_other_words_for_who_compacts_the_metadata_store_are_refused(file: Path) -> None:
    for wrong in ("on", "true", "periodic", "5"):
        with pytest.raises(ConfigError, match=r"meta_store.compaction.*one of auto, off"):
            load(Flags(config_file=config_in(file, wrong), mode="standalone"))


def config_in(file: Path, compaction: str) -> Path:
    file.write_text(f"meta_store: {{compaction: {compaction}}}\n")
    return file
