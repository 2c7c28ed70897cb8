"""An object store's URL and options, checked.

    file:///var/lib/danube/objects   a directory, of this machine or mounted
    s3://bucket/prefix               S3, and what speaks its protocol
    gs://bucket/prefix               Google Cloud Storage
    az://container/prefix            Azure Blob Storage

Options are the keys below `storage.durable` of the configuration file. One that the URL's store does not know is
refused, not ignored. Every refusal is a ConfigError that names the key and what to set; no secret is part of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from pydanube.core.history.object_keys import is_key
from pydanube.errors import ConfigError

HIDDEN: Final = "(hidden)"
FORMS: Final = "file:///directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
SECRETS: Final = frozenset({"secret_key", "session_token", "credentials_json", "account_key"})
SWITCHES: Final = frozenset({"anonymous", "virtual_host_style"})
OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "file": (),
    "s3": (
        *("region", "endpoint", "virtual_host_style"),
        *("access_key", "secret_key", "session_token", "profile", "role_arn", "anonymous"),
    ),
    "gs": ("endpoint", "project", "credentials_path", "credentials_json", "anonymous"),
    "az": ("endpoint", "account_name", "account_key", "anonymous"),
}
WHAT_TO_SET: Final[Mapping[str, str]] = {
    "file": "a directory in which this process may write",
    "s3": (
        "a bucket that exists, and storage.durable.access_key and secret_key (or AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY) that may list, get, put and delete in it; region and endpoint must be the bucket's"
    ),
    "gs": (
        "a bucket that exists, and storage.durable.credentials_path or credentials_json (or "
        "GOOGLE_APPLICATION_CREDENTIALS) of an account that may list, get, put and delete in it"
    ),
    "az": (
        "a container that exists, and storage.durable.account_name and account_key (or AZURE_STORAGE_ACCOUNT_NAME "
        "and AZURE_STORAGE_ACCOUNT_KEY) that may list, get, put and delete in it"
    ),
}


# --- the URL ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """`root` is a bucket, a container or a directory. `shown` is the URL, and `key` the setting it came from."""

    key: str
    shown: str
    scheme: str
    root: str
    prefix: str = ""

    def refuse(self, why: str = "") -> ConfigError:
        """What to set, and why what is set does not do."""
        return ConfigError(self.key, self.shown, WHAT_TO_SET[self.scheme] + (f" ({why})" if why else ""))


def parse_url(key: str, url: str) -> StoreUrl:
    """Raises ConfigError."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a bracket that begins no IPv6 address
        raise ConfigError(key, url, FORMS) from None
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://{HIDDEN}@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ConfigError(key, shown, "a URL without credentials; they are options of their own below storage.durable")
    shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
    if parts.scheme not in OPTIONS or "://" not in url:
        raise ConfigError(key, url if "://" not in url else shown, FORMS)
    if parts.query or parts.fragment:
        raise ConfigError(key, shown, f"{FORMS}, without a question mark or a hash sign")
    if parts.scheme == "file":
        return _directory(key, shown, parts.netloc, unquote(parts.path))
    return _bucket(key, shown, parts.scheme, parts.netloc, parts.path.strip("/"))


def _directory(key: str, shown: str, host: str, path: str) -> StoreUrl:
    if host not in ("", "localhost") or not path.startswith("/"):
        raise ConfigError(key, shown, "an absolute path, with three slashes: file:///directory")
    if not path.strip("/") or "\0" in path:
        raise ConfigError(key, shown, "a directory of its own: file:///directory")
    return StoreUrl(key, shown, "file", os.path.normpath(path))


def _bucket(key: str, shown: str, scheme: str, bucket: str, prefix: str) -> StoreUrl:
    thing = "container" if scheme == "az" else "bucket"
    if not is_key(bucket):
        raise ConfigError(key, shown, f"the name of a {thing} behind the slashes: {scheme}://{thing}/prefix")
    if prefix and not is_key(prefix):
        raise ConfigError(key, shown, "a prefix of letters, digits, '_', '-', '.' and '=', in parts joined by '/'")
    return StoreUrl(key, shown, scheme, bucket, prefix)


# --- the options ------------------------------------------------------------------------------------


class StoreSettings:
    """Options of a place, and the environment behind them."""

    def __init__(self, place: StoreUrl, options: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self.place = place
        self.environment = environment
        self._options = options
        for name, value in options.items():
            if name not in OPTIONS[place.scheme]:
                known = ", ".join(OPTIONS[place.scheme]) or "no options"
                raise self.refuse(name, f"{place.scheme}:// has {known}")
            if name in SWITCHES and not isinstance(value, bool):
                raise self.refuse(name, "true or false")
            if name not in SWITCHES and not (isinstance(value, str) and value):
                raise self.refuse(name, "a text that is not empty")
        self.endpoint = self._endpoint()

    @property
    def name(self) -> str:
        """What errors call the store."""
        shown = self.place.shown.rstrip("/")
        return f"{shown} at {self.endpoint}" if self.endpoint else shown

    def text(self, name: str) -> str:
        return str(self._options.get(name, ""))

    def switch(self, name: str) -> bool:
        return self._options.get(name) is True

    def variable(self, *names: str) -> str:
        """The first of these that the environment has."""
        return next((self.environment[name] for name in names if self.environment.get(name)), "")

    def refuse(self, name: str, allowed: str) -> ConfigError:
        value = self._options.get(name)
        hidden = value is not None and name not in OPTIONS[self.place.scheme]  # it may be a secret that is misspelt
        return ConfigError(f"storage.durable.{name}", HIDDEN if hidden or name in SECRETS else value, allowed)

    def only_one_of(self, *names: str) -> None:
        given = [name for name in names if self._options.get(name)]
        if len(given) > 1:
            raise self.refuse(given[1], f"either {given[0]} or {given[1]}, not both")

    def needs(self, name: str, other: str) -> None:
        if self.text(name) and not self.text(other):
            raise ConfigError(f"storage.durable.{other}", None, f"a text, because {name} was given")

    def without_secrets(self, text: str) -> str:
        """The first line of a foreign error, which may quote what it was given."""
        for name in SECRETS:
            if self.text(name):
                text = text.replace(self.text(name), HIDDEN)
        return text.partition("\n")[0][:300]

    def _endpoint(self) -> str:
        endpoint = self.text("endpoint")
        if not endpoint:
            return ""
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            shown = HIDDEN if "@" in endpoint or "?" in endpoint else endpoint
            allowed = "the URL of a server, for example https://storage.example.com:9000"
            raise ConfigError("storage.durable.endpoint", shown, allowed)
        return endpoint.rstrip("/")
