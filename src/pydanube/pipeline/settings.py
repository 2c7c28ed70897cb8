"""A job's settings: one YAML or JSON file, with dotted names on the command line on top of it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydanube.config.checks import HIDDEN
from pydanube.config.yaml_text import parse_yaml
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError
from pydanube.spark.options import PEM


class JobSettings:
    """Values by name. Every one that the job does not know is refused."""

    def __init__(self, values: Mapping[str, Any], known: Collection[str], where: str = "the settings") -> None:
        self._values = dict(values)
        for name in self._values:
            if name not in known:
                meant = get_close_matches(name, known, 1)
                hint = f"did you mean {meant[0]}?" if meant else f"{where} may have {', '.join(sorted(known))}"
                raise ConfigError(name, HIDDEN, hint)  # it may be a secret's, misspelt

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._values.get(name)
        return default if value is None else str(value)

    def required(self, name: str, what: str) -> str:
        value = self.text(name)
        if not value:
            raise ConfigError(name, None, what)
        return value

    def place(self, name: str) -> str | None:
        """A path or URL. Spark may run in another directory than the command: a relative path becomes a whole one."""
        value = self.text(name)
        return value if value is None or scheme_of(value) else str(Path(value).absolute())

    def number(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not str(value).isdigit() or int(value) < least:
            raise ConfigError(name, value, f"a whole number, {least} or more")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(name, value, "true or false")
        return value

    def one_of(self, name: str, default: str, allowed: Collection[str]) -> str:
        value = str(self._values.get(name) or default)
        if value not in allowed:
            raise ConfigError(name, value, " or ".join(allowed))
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._values.get(name) or ()
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ConfigError(name, value, "a list")
        return tuple(str(each) for each in value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._values.get(name) or {}
        if not isinstance(value, dict):
            raise ConfigError(name, HIDDEN, "names and values")
        return value

    def topics(self) -> tuple[str, ...]:
        found = self.texts("topics") or self.texts("topic")
        if not found:
            raise ConfigError("topic", None, "the topic to read, or topics: a list of them")
        return tuple(str(TopicName(name)) for name in found)

    def connection(self) -> dict[str, str]:
        """Options of `format("danube")` that say how to reach brokers and objects."""
        names = ("service.url", "storage.url", "token", "token.file", "tls.ca", "tls.cert", "tls.key", "timeout")
        found = {name: str(self._values[name]) for name in names if self._values.get(name) is not None}
        if "service.url" not in found and "storage.url" not in found:
            raise ConfigError("service.url", None, "danube://host:6651, or storage.url to read without brokers")
        if self._values.get("storage.options"):
            found["storage.options"] = json.dumps(self.mapping("storage.options"))
        return found


def scheme_of(place: str) -> str:
    """What stands before the colon of a URL, in small letters; empty for a path."""
    scheme, separator, _ = place.partition(":")
    return scheme.lower() if separator and _SCHEME.fullmatch(scheme) else ""


def local_path(key: str, place: str) -> str:
    """The directory that a path, file:/path or file:///path names. Raises ConfigError, also for any other scheme."""
    scheme = scheme_of(place)
    if not scheme:
        return str(Path(place).absolute())
    parts = urlsplit(place)
    if scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(
            key, place, "a directory that this machine and all executors have, as a path or as file:///path"
        )
    return unquote(parts.path)


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+")  # two letters or more

CONNECTION = (
    "service.url",
    "storage.url",
    "storage.options",
    "token",
    "token.file",
    "tls.ca",
    "tls.cert",
    "tls.key",
    "timeout",
)
TOPICS = ("topic", "topics")


def read_settings(file: Path | None, changes: Collection[str] = ()) -> dict[str, Any]:
    """The file's values, and `name=value` on top. Nested names become dotted ones, but for maps that are values."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError("--conf", str(file), f"a file that can be read: {why}") from None
        found = parse_yaml(text, "--conf", str(file), "YAML or JSON")
        if not isinstance(found, dict):
            raise ConfigError("--conf", str(file), "names and values")
        values.update(dotted(found))
    for change in changes:
        name, separator, value = change.partition("=")
        name = name.strip()
        if not separator or not name:
            raise ConfigError("--set", HIDDEN, "name=value")
        given = parse_yaml(value, f"--set {name}", HIDDEN, "a value in YAML")
        if _is_secret(name, given):
            hint = "a secret belongs in a file (--conf, token.file): all users of the machine see the command line"
            raise ConfigError(f"--set {name}", HIDDEN, hint)
        values[name] = given
    return values


def _is_secret(name: str, value: object) -> bool:
    """Whether it has something that others must not see. A path to it has not."""
    if isinstance(value, dict):
        return any(_is_secret(f"{name}.{inner}", each) for inner, each in value.items())
    if not isinstance(value, str):
        return False
    last = re.split(r"[._-]", name.lower())[-1]
    is_named = any(word in name.lower() for word in _SECRETS) and last not in _PATHS
    return is_named or value.lstrip().startswith(PEM) or _USER.search(value) is not None


_SECRETS = ("secret", "token", "passw", "credential", "access-key", "access_key", "account_key", "account-key")
_PATHS = ("file", "path", "url", "uri", "provider")
_USER = re.compile(r"//[^/@\s]+:[^/@\s]+@")


_NESTED = ("service", "storage", "tls")  # everything else that holds names is a value itself


def dotted(found: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their whole names: `service.url`, also of `{service: {url: …}}`."""
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name in _NESTED and isinstance(value, dict):
            values.update({f"{name}.{inner}": each for inner, each in value.items()})
        else:
            values[str(name)] = value
    return values
