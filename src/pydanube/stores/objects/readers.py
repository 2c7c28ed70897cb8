"""Read-only keys of the object store, that the Iceberg catalog hands to clients which ask for some.

They are options of their own below `storage.readers`, made by whoever keeps the bucket. The broker's own keys may write
and are never handed out: a configuration that names them here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydanube.errors import ConfigError
from pydanube.stores.objects.settings import HIDDEN, StoreSettings, parse_url

KEY: Final = "storage.readers."
PAIR: Final = ("access_key", "secret_key")


def vended_keys(
    url: str, options: Mapping[str, object], readers: Mapping[str, object], environment: Mapping[str, str]
) -> Mapping[str, str]:
    """What Iceberg's clients are told, by Iceberg's names; empty if nothing is set. Raises ConfigError."""
    if not readers:
        return {}
    place = parse_url("storage.url", url)
    given = {name: str(value) for name, value in readers.items()}
    if place.scheme != "s3":
        name = next(iter(given))
        allowed = f"nothing: keys for readers are for s3://, and history is at {place.shown}"
        raise ConfigError(KEY + name, HIDDEN, allowed)
    for name in PAIR:
        if not given.get(name):
            raise ConfigError(KEY + name, None, "a text: readers need both keys, access_key and secret_key")
    store = StoreSettings(place, options, environment)
    own = store.text("access_key") or store.variable("AWS_ACCESS_KEY_ID")
    if given["access_key"] == own:
        allowed = "other keys than the broker's own, which may write: clients would get them"
        raise ConfigError(KEY + "access_key", HIDDEN, allowed)
    endpoint = given.get("endpoint") or store.endpoint
    region = given.get("region") or store.text("region") or store.variable("AWS_REGION", "AWS_DEFAULT_REGION")
    told = {"s3.access-key-id": given["access_key"], "s3.secret-access-key": given["secret_key"]}
    if given.get("session_token"):
        told["s3.session-token"] = given["session_token"]
    if endpoint:
        told["s3.endpoint"] = endpoint
    if region:
        told |= {"s3.region": region, "client.region": region}
    told["s3.path-style-access"] = "false" if store.switch("virtual_host_style") or not endpoint else "true"
    return told
