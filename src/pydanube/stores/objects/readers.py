"""Read-only keys of the object store, that the Iceberg catalog hands to clients which ask for some.

They are options of their own below `storage.readers`, made by the bucket's administrator. The broker's own keys may
write and are never handed out: a configuration that names them here is refused, and so are others that may write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from pydanube.errors import ConfigError, Conflict, StoreRefused, Unreachable
from pydanube.ports import ObjectStore
from pydanube.stores.objects.owned import ID_KEY
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


def readers_options(options: Mapping[str, object], readers: Mapping[str, object]) -> dict[str, object]:
    """Those of the store as the broker reaches it, with the readers' keys."""
    place = {name: options[name] for name in ("endpoint", "region", "virtual_host_style") if name in options}
    return {**place, **{name: readers[name] for name in (*PAIR, "session_token") if name in readers}}


async def check_readers(store: ObjectStore, seconds: float = 10.0) -> Unreachable | None:
    """Whether the keys, with which `store` was opened, may read and may not write; the store is this cluster's already.

    Changes nothing in any case: it asks to create what is there. Returns why it cannot be known just now. Raises
    ConfigError.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _check(store)
    except TimeoutError:
        return Unreachable("the object store", f"no answer within {seconds:g} s")


async def _check(store: ObjectStore) -> Unreachable | None:
    try:
        content = await store.get(ID_KEY)
    except StoreRefused as error:
        raise ConfigError(
            KEY + "access_key", HIDDEN, f"a key that may list and get in the bucket ({error.why})"
        ) from error
    except (Unreachable, FileNotFoundError) as error:
        return error if isinstance(error, Unreachable) else Unreachable("the object store", f"it has no {ID_KEY}")
    try:
        await store.put(ID_KEY, [content], create=True)
    except StoreRefused:
        return None  # as it should be
    except Conflict:
        pass  # it would have been allowed to
    except Unreachable as error:
        return error
    raise ConfigError(KEY + "access_key", HIDDEN, "a key that may only list and get: this one may write")
