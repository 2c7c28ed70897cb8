"""Every key of the configuration file and what is allowed for it; and the reading of that file.

Every key is in exactly one of three tables:

    SETTINGS     means something here; the table says what is allowed
    REPLACED     means nothing here; accepted, with a warning that says what does it instead
    refused      security that does not exist yet: never silently ignored

A key in none of them is a mistake, and the nearest known key is named. A value that is not allowed is a
ConfigError that names the key as written, the value (unless it may be a secret) and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import yaml

from pydanube.config.stream import FRAME_BYTES_MAX, FRAME_BYTES_MIN, StreamLimits
from pydanube.core.commit.sessions import IDLE_HOURS_MIN, SESSIONS_LIMIT
from pydanube.core.dispatch.consumer_window import UNACKED_MAX_ALLOWED
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.names import NamespaceName
from pydanube.core.policies import MIB, TopicPolicy
from pydanube.errors import ConfigError, InvalidName

T = TypeVar("T")
HIDDEN: Final = "(hidden)"
STRATEGIES: Final = ("fair", "balanced", "weighted_load")
LEVELS: Final = ("debug", "info", "warning", "error")
LINES: Final = ("text", "json")
AGGRESSIVENESS: Final = ("conservative", "balanced", "aggressive")


class Values(dict[str, object]):
    """Checked settings by dotted key; those not given are absent."""

    def take(self, key: str, default: T) -> T:
        assert key in SETTINGS, key
        return cast(T, self.get(key, default))


def read(file: Path | None) -> tuple[Values, list[str]]:
    """The settings in a file, checked, and what to warn about. No file has no settings."""
    return _check(_flatten({} if file is None else _parse(file)))


# --- what is allowed ----------------------------------------------------------------------------------

Check: TypeAlias = Callable[[str, object], object]


def text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(key, shown(key, value), "a text that is not empty")
    return value.strip()


def path(key: str, value: object) -> Path:
    return Path(text(key, value))


def switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(key, value, "true or false")
    return value


def whole(lowest: int, highest: int = 2**31 - 1, *, times: int = 1) -> Check:
    def check(key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ConfigError(key, value, f"a whole number from {lowest} to {highest}")
        return value * times

    return check


def one_of(*words: str) -> Check:
    def check(key: str, value: object) -> str:
        if value not in words:
            raise ConfigError(key, value, f"one of {', '.join(words)}")
        return str(value)

    return check


def auto_or_off(key: str, value: object) -> str:
    """YAML reads `off` as false."""
    if value is False:
        return "off"
    return str(one_of("auto", "off")(key, value))


def texts(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ConfigError(key, value, "a list of texts")
    return tuple(text(key, element) for element in value)


def namespaces(key: str, value: object) -> tuple[NamespaceName, ...]:
    try:
        return tuple(dict.fromkeys(NamespaceName(name) for name in texts(key, value)))
    except InvalidName as error:
        raise ConfigError(key, error.name, error.rule) from error


def address(key: str, value: object) -> str:
    """host:port; an IPv6 host has brackets."""
    given = text(key, value)
    host, _, port = given.rpartition(":")
    if not _is_host(host) or not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ConfigError(key, value, "host:port, for example 127.0.0.1:6650 or [::1]:6650")
    return given


def address_or_off(key: str, value: object) -> str:
    """Empty for `off`, which YAML reads as false."""
    if value is False or value == "off":
        return ""
    try:
        return address(key, value)
    except ConfigError:
        raise ConfigError(key, value, "host:port, for example 127.0.0.1:8080, or off") from None


def url(key: str, value: object) -> str:
    """What clients dial; a value without scheme is plain http."""
    given = text(key, value)
    given = given if "://" in given else f"http://{given}"
    parts = urlsplit(given)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(key, value, "http://host:port (https comes with TLS, which does not exist yet)")
    return given.rstrip("/")


def storage_url(key: str, value: object) -> str:
    given = text(key, value)
    scheme, separator, rest = given.partition("://")
    if scheme not in ("file", "s3", "gs", "az") or not separator or not rest.strip("/"):
        raise ConfigError(
            key, value, "file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    return given


def heartbeat(key: str, value: object) -> Heartbeat:
    return Heartbeat.parse(str(value), key)


def _is_host(host: str) -> bool:
    bare = host.removeprefix("[").removesuffix("]")
    return (
        bool(bare) and not any(sign.isspace() or sign in "/[]" for sign in bare) and (":" not in bare or bare != host)
    )


PORT: Final = whole(0, 65535)
POSITIVE: Final = whole(1)
OPTIONS: Final = (
    *("region", "endpoint", "access_key", "secret_key", "profile", "role_arn", "session_token", "project"),
    *("credentials_json", "credentials_path", "account_name", "account_key"),
)
SETTINGS: Final[Mapping[str, Check]] = {
    "cluster_name": text,
    "broker.host": text,
    **{f"broker.ports.{name}": PORT for name in ("client", "admin", "stream", "prometheus", "raft")},
    "broker.advertised_listeners.broker_url": url,
    "broker.advertised_listeners.connect_url": url,
    "meta_store.seed_nodes": texts,
    "meta_store.etcd": texts,
    "meta_store.ttl_seconds": POSITIVE,
    "meta_store.compaction": auto_or_off,
    "cluster.rejoin": one_of("drained", "active"),
    "broker.shutdown_seconds": POSITIVE,
    "bootstrap_namespaces": namespaces,
    "auto_create_topics": switch,
    "admin_tls": switch,
    "log.level": one_of(*LEVELS),
    "log.format": one_of(*LINES),
    "web.listen": address_or_off,
    "auth.mode": text,
    "load_manager.assignment_strategy": one_of(*STRATEGIES),
    "load_manager.load_report_interval_seconds": POSITIVE,
    "load_manager.rebalancing.enabled": switch,
    "load_manager.rebalancing.aggressiveness": one_of(*AGGRESSIVENESS),
    "load_manager.rebalancing.check_interval_seconds": POSITIVE,
    "load_manager.rebalancing.max_moves_per_hour": whole(0),
    "load_manager.rebalancing.cooldown_seconds": whole(0),
    "load_manager.rebalancing.min_brokers_for_rebalance": whole(2),
    "load_manager.rebalancing.min_topic_age_seconds": whole(0),
    "load_manager.rebalancing.blacklist_topics": texts,
    "storage.url": storage_url,
    "storage.mode": one_of("local", "shared_fs", "object_store"),
    "storage.local_wal_root": path,
    "storage.durable.root": text,
    "storage.durable.backend": one_of("s3", "gcs", "azblob"),
    **{f"storage.durable.{name}": text for name in OPTIONS},
    "storage.durable.anonymous": switch,
    "storage.durable.virtual_host_style": switch,
    "storage.local_retention.time_minutes": whole(1, times=60),
    "storage.local_retention.size_mb": whole(1, times=MIB),
    "storage.local_retention.check_interval_minutes": whole(1, times=60),
    "storage.upload.interval_seconds": POSITIVE,
    "storage.upload.max_mb": whole(1, 512, times=MIB),
    "storage.wal.rotation.max_bytes": whole(MIB, 2**31 - 8 * MIB),
    "storage.wal.rotation.max_hours": whole(1, times=3600),
    "storage.wal.max_mb": whole(0, times=MIB),
    "storage.wal.pending_mb": whole(1, times=MIB),
    "storage.wal.sessions_max": whole(1, SESSIONS_LIMIT),
    "storage.wal.session_hours": whole(IDLE_HOURS_MIN, times=3600),
    "dispatch.decoded_mb": whole(1, times=MIB),
    "dispatch.outbox_mb": whole(1, times=MIB),
    "dispatch.max_unacked_messages": whole(1, UNACKED_MAX_ALLOWED),
    "dispatch.heartbeat_interval": heartbeat,
    **{f"policies.{name}": whole(0, 2**32 - 1) for name in TopicPolicy.__slots__},
    **{f"stream.limits.{name}": POSITIVE for name in StreamLimits.__slots__},
    "stream.limits.keepalive_seconds": whole(1, 3600),
    "stream.limits.frame_bytes": whole(FRAME_BYTES_MIN, FRAME_BYTES_MAX),
    "stream.limits.unsent_bytes": whole(64 * 1024),
    **{f"stream.tls.{name}": path for name in ("cert_file", "key_file", "ca_file")},
}

# Other names of the same settings, as the reference has them.
ALIASES: Final[Mapping[str, str]] = {
    "storage.root": "storage.local_wal_root",
    "storage.cache_root": "storage.local_wal_root",
    "storage.metadata_root": "storage.metadata_prefix",
    "storage.wal.advanced.rotation.max_bytes": "storage.wal.rotation.max_bytes",
    "storage.wal.advanced.rotation.max_hours": "storage.wal.rotation.max_hours",
}

# Accepted, with everything below them.
REPLACED: Final[Mapping[str, str]] = {
    "meta_store.data_dir": "metadata is in the data directory (--data-dir), or in etcd for a cluster",
    "storage.metadata_prefix": "keys have no common prefix; give each cluster its own metadata store",
    "storage.wal.dir": "logs are in the data directory (--data-dir or storage.local_wal_root)",
    "storage.wal.file_name": "segment files are named by their first offset",
    "storage.wal.advanced.cache_capacity": "the cache of recent messages is bounded by bytes, not by messages",
    "storage.wal.advanced.file_sync": "every message is synced to disk before it is acknowledged, many per sync",
    "storage.write_buffer": "a message is on disk before it is acknowledged; storage.url adds a copy elsewhere",
}


# --- reading the file -----------------------------------------------------------------------------------


def _parse(file: Path) -> object:
    try:
        return yaml.safe_load(file.read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError("--config-file", str(file), f"a file that can be read ({why})") from error
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ConfigError("--config-file", str(file), f"a file in YAML ({why})") from error


def _flatten(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yields dotted keys and their values: None for a key without value, and for an empty section."""
    if isinstance(value, dict) and (value or not key):
        for name, below in value.items():
            yield from _flatten(below, f"{key}.{name}" if key else str(name))
    elif not key:
        raise ConfigError("--config-file", value, "a file in YAML with keys and values")
    else:
        yield key, None if value == {} else value


def _check(given: Iterator[tuple[str, object]]) -> tuple[Values, list[str]]:
    values = Values()
    warnings = []
    for written, value in given:
        if value is None:  # as good as absent, if it is a name that exists
            if not _is_known(written):
                raise ConfigError(written, value, _unknown(written))
            continue
        _refuse(written, value)
        key = ALIASES.get(written, written)
        replaced = next((old for old in REPLACED if key == old or key.startswith(f"{old}.")), None)
        if replaced is not None:
            warnings.append(f"{written} has no effect: {REPLACED[replaced]}")
        elif key not in SETTINGS:
            raise ConfigError(written, shown(written, value), _unknown(written))
        elif key in values:
            raise ConfigError(written, shown(written, value), f"{key} was given already, under another name")
        else:
            values[key] = SETTINGS[key](written, value)
    return values, warnings


def _refuse(key: str, value: object) -> None:
    """Security that somebody asked for and would not get."""
    if key == "auth.mode" and value == "none":
        return
    if key == "auth" or key.startswith("auth."):
        shown = value if key == "auth.mode" else HIDDEN
        raise ConfigError(
            key, shown, "authentication does not exist yet; remove the auth section, or set auth.mode: none alone"
        )
    if key == "admin_tls" and value is True:
        raise ConfigError(key, value, "TLS on the admin port does not exist yet; set it to false")


def _is_known(key: str) -> bool:
    """Whether it is a key, a section, or in one that has no effect."""
    known = [*SETTINGS, *ALIASES, *REPLACED, "auth", "admin_tls"]
    return any(f"{each}.".startswith(f"{key}.") or key.startswith(f"{each}.") for each in known)


def _unknown(key: str) -> str:
    below = sorted(
        {known.removeprefix(f"{key}.").partition(".")[0] for known in SETTINGS if known.startswith(f"{key}.")}
    )
    if below:
        return f"it is a section with the keys {', '.join(below)}"
    near = difflib.get_close_matches(key, [*SETTINGS, *ALIASES, *REPLACED], n=1, cutoff=0.5)
    return "there is no such key" + (f"; perhaps {near[0]} is meant" if near else "")


def shown(key: str, value: object) -> object:
    """A value for an error message; never a secret, not even under a misspelt key."""
    last = key.rpartition(".")[2].lower()
    return HIDDEN if any(word in last for word in ("secret", "key", "token", "passw", "cred")) else value
