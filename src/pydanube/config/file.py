"""The configuration file: its keys, other names of them, and the reading of it.

Every key is in exactly one of three tables:

    SETTINGS     means something here (settings.py)
    REPLACED     means nothing here; accepted, with a warning that says what does it instead
    refused      security that does not exist yet: never silently ignored

A key in none of them is a mistake, and the nearest known key is named. A value that is not allowed is a
ConfigError that names the key as written, the value (unless it may be a secret) and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeVar, cast

from pydanube.config.checks import HIDDEN, shown
from pydanube.config.settings import SETTINGS
from pydanube.config.yaml_text import parse_yaml
from pydanube.errors import ConfigError

T = TypeVar("T")


class Values(dict[str, object]):
    """Checked settings by dotted key; those not given are absent."""

    def take(self, key: str, default: T) -> T:
        assert key in SETTINGS, key
        return cast(T, self.get(key, default))

    def fields_of(self, part: str) -> dict[str, object]:
        """The values whose place is in this part of the `Config`, by the names of its fields."""
        found = {}
        for key, value in self.items():
            section, _, name = SETTINGS[key].field.rpartition(".")
            if name and section == part:
                found[name] = value
        return found


def read(file: Path | None) -> tuple[Values, list[str]]:
    """The settings in a file, checked, and what to warn about. No file has no settings."""
    return _check(_flatten({} if file is None else _parse(file)))


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
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError("--config-file", str(file), f"a file that can be read ({why})") from None
    found = parse_yaml(text, "--config-file", str(file), "a file in YAML") or {}
    if not isinstance(found, dict):
        raise ConfigError("--config-file", str(file), "a file in YAML with keys and values")
    return found


def _flatten(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yields dotted keys and their values: None for a key without value, and for an empty section."""
    if isinstance(value, dict) and (value or not key):
        for name, below in value.items():
            yield from _flatten(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, None if value == {} else value


def _check(given: Iterator[tuple[str, object]]) -> tuple[Values, list[str]]:
    values = Values()
    warnings = []
    for written, value in given:
        if value is None:  # as good as absent, if it is a name that exists
            if not _is_known(written):
                raise ConfigError(written, "", _unknown(written))
            continue
        _refuse(written, value)
        key = ALIASES.get(written, written)
        replaced = next((old for old in REPLACED if key == old or key.startswith(f"{old}.")), None)
        if replaced is not None:
            warnings.append(f"{written} has no effect: {REPLACED[replaced]}")
        elif key not in SETTINGS:
            raise ConfigError(written, HIDDEN, _unknown(written))  # it may be a secret's, misspelt
        elif key in values:
            raise ConfigError(written, shown(written, value), f"{key} was given already, under another name")
        else:
            values[key] = SETTINGS[key].check(written, value)
    return values, warnings


def _refuse(key: str, value: object) -> None:
    """Security that the file asks for and the broker does not have."""
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
