"""From one URL to an object store: a directory for file://, a cloud for s3://, gs:// and az://.

Everything lives below the URL's prefix. `settings.py` says which URLs and options there are.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

from pydanube.errors import DiskFailed
from pydanube.ports import Disk, ObjectStore
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.objects.cloud import Patience, RemoteObjectStore
from pydanube.stores.objects.directory import FileObjectStore
from pydanube.stores.objects.providers import make_store
from pydanube.stores.objects.settings import StoreSettings, StoreUrl, parse_url
from pydanube.stores.objects.upload_rate import UploadRate


class OpenObjectStore(ObjectStore, Protocol):
    async def close(self) -> None:
        """Gives back what opening took. Nothing may be called afterwards, or still be going on."""
        ...


async def open_object_store(
    url: str,
    options: Mapping[str, object] | None = None,
    *,
    key: str = "storage.url",
    environment: Mapping[str, str] = os.environ,
    make_disk: Callable[[str], Disk] | None = None,
    patience: Patience | None = None,
    upload_rate: UploadRate | None = None,
) -> OpenObjectStore:
    """Opens a store without asking the network; `check_store` does that. `key` is what errors call the URL's setting.

    `make_disk` gives the Disk of a file:// URL's directory; without it, that is the real one. `upload_rate` is how
    fast large objects are written. Raises ConfigError, and DiskFull where the directory has no room for the smallest
    file.
    """
    place = parse_url(key, url)
    settings = StoreSettings(place, options or {}, environment)
    if place.scheme == "file":
        return await _open_directory(place, make_disk, upload_rate)
    theirs = None if environment is os.environ else dict(environment)
    opener = _StoreOpener(url, dict(options or {}), key, theirs, patience)
    return RemoteObjectStore(make_store(settings), settings.name, patience, upload_rate, opener)


@dataclass(frozen=True)
class _StoreOpener:
    """Opens the same store, once in a process: it has connections and credentials that last."""

    url: str
    options: Mapping[str, object] = field(repr=False)  # secrets
    key: str
    environment: Mapping[str, str] | None = field(repr=False)
    patience: Patience | None

    def __call__(self) -> AbstractAsyncContextManager[ObjectStore]:
        return self._opened()

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[ObjectStore]:
        store = next((store for known, store in _OPENED if known == self), None)
        if store is None:
            environment = os.environ if self.environment is None else self.environment
            store = await open_object_store(
                self.url, self.options, key=self.key, environment=environment, patience=self.patience
            )
            _OPENED.append((self, store))
        yield store


_OPENED: Final[list[tuple[_StoreOpener, ObjectStore]]] = []  # in the process that stores objects


async def _open_directory(
    place: StoreUrl, make_disk: Callable[[str], Disk] | None, upload_rate: UploadRate | None
) -> FileObjectStore:
    if make_disk is not None:
        return await _open_on(make_disk(place.root), place, lambda: None, upload_rate)
    disk = FileDisk(place.root, descriptors_max=0)
    try:
        return await _open_on(disk, place, disk.close, upload_rate)
    except BaseException:
        disk.close()
        raise


async def _open_on(
    disk: Disk, place: StoreUrl, close_disk: Callable[[], None], upload_rate: UploadRate | None
) -> FileObjectStore:
    try:
        return await FileObjectStore.open(disk, f"file://{place.root}", close_disk=close_disk, upload_rate=upload_rate)
    except FileExistsError as error:
        raise place.refuse("there is a file of that name") from error
    except FileNotFoundError as error:  # a file system in which directories cannot be made
        raise place.refuse("it cannot be made") from error
    except DiskFailed as error:
        raise place.refuse(f"{error.operation}: {error.why}") from error
