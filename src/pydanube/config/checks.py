"""What is allowed for a setting: functions from a key and a value to the value as the broker uses it.

Each raises ConfigError, which names the key as written, the value (unless it may be a secret) and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.hidden import HIDDEN
from pydanube.core.names import NamespaceName
from pydanube.errors import ConfigError, InvalidName

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


def shown(key: str, value: object) -> object:
    """A value for an error message; never a secret, not even under a misspelt key."""
    last = key.rpartition(".")[2].lower()
    return HIDDEN if any(word in last for word in ("secret", "key", "token", "passw", "cred")) else value
