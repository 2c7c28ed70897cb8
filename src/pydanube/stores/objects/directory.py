"""Durable objects in a directory: the ObjectStore of `file://`, on any Disk.

    {root}/
      default/orders/data-0-4999-3.parquet    an object, under its key
      .uploading~/1/LOCK                      a place for each process that has the store open; locked while it lives
      .uploading~/1/000017                    an object on its way: never read, removed by the next who takes the place

    put:  write and sync it in our place, piece by piece ─► rename it to its key ─► sync the directory ─► return

A rename shows an object whole or not at all, and what is renamed was synced before. `create` renames without replacing
(`Disk.rename_new`), so of several processes that create one key the file system lets one through. Several brokers may
share the directory: none removes what a live process is writing, and nothing is remembered of a file between calls.

What a caller was answered must survive a power cut, also if another process, killed since, put it there: `put`, `head`
and the `Conflict` of a create sync the directory before they say that an object exists. Reading does not.

A key is its path, with two exceptions (`core/history/object_keys.path_of`), because a directory cannot hold a file and
a directory of one name: a file's name has a dot, a directory's has none. Topics with dots in their names need the
second.

    a/b       a/b.%          a last part without a dot
    v1.2/a.b  v1%2/a.b       another part with one

Any other name in the directory is no object. Directories that have become empty stay.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import count
from typing import Final

from pydanube.core.history.object_keys import NO_DOT, is_part, path_of
from pydanube.errors import Conflict, DirectoryInUse, DiskFailed, DiskFull, Unreachable
from pydanube.ports import Buffer, Disk, Entry, ObjectInfo, StoreOpener, Write
from pydanube.stores.disk.paths import parent
from pydanube.stores.objects.listing import ListedObject, Listing
from pydanube.stores.objects.upload_rate import UploadRate

UPLOADING: Final = ".uploading~"  # no key has a tilde
EVERYTHING: Final = 1 << 62  # longer than any file
# Objects may be on the disk of the log, whose syncs wait for what was queued on the disk before them: a fifth of a
# second for an object of 50 MB that is synced as a whole, a millisecond or two for a piece.
PIECE_BYTES: Final = 256 * 1024

# What an etag is made of: all of a small object; of a large one its size, its first bytes and its last. The footer of
# our objects has a checksum of every batch, so another content has another footer.
WHOLE_BYTES_MAX: Final = 64 * 1024
FIRST_BYTES: Final = 4 * 1024
LAST_BYTES: Final = WHOLE_BYTES_MAX - FIRST_BYTES


class FileObjectStore:
    """`name` is what errors call the store. Only `open` makes one."""

    def __init__(
        self, disk: Disk, name: str, place: str, close_disk: Callable[[], None], upload_rate: UploadRate | None
    ) -> None:
        self._disk = disk
        self._name = name
        self._place = place
        self._close_disk = close_disk
        self._upload_rate = upload_rate
        self._numbers = count(1)
        self._named: set[str] = set()  # directories whose names a power cut leaves

    @classmethod
    async def open(
        cls,
        disk: Disk,
        name: str,
        *,
        close_disk: Callable[[], None] = lambda: None,
        upload_rate: UploadRate | None = None,
    ) -> FileObjectStore:
        """Removes what dead processes left half-written. Raises DiskFull or DiskFailed where it cannot write."""
        await disk.make_directory(UPLOADING)
        store = cls(disk, name, await _take_place(disk), close_disk, upload_rate)
        try:
            await store._try_out()
        except BaseException:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Gives the place back. Nothing may be called afterwards, or still be going on."""
        try:
            await self._disk.unlock(f"{self._place}/LOCK")
        finally:
            self._close_disk()

    # --- the port ---

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        path = path_of(key)
        buffers = [memoryview(buffer).cast("B") for buffer in data]
        size_bytes = sum(buffer.nbytes for buffer in buffers)
        tag = _tag(size_bytes, _first(buffers, WHOLE_BYTES_MAX), _last(buffers, size_bytes))
        with self._our_errors():
            if create and await self._exists(path):
                await self._refuse(key, path)
            await self._disk.make_directory(parent(path))
            source = await self._write(buffers)
            try:
                if create:
                    await self._disk.rename_new(source, path)
                else:
                    await self._disk.rename(source, path)
            except FileExistsError:
                await self._forget(source)
                await self._refuse(key, path)
            except BaseException:
                await self._forget(source)
                raise
            await self._sync_names(path)
        return ObjectInfo(key, size_bytes, tag)

    async def get(self, key: str) -> bytes:
        return await self.get_range(key, 0, EVERYTHING)

    async def get_range(self, key: str, position: int, length: int) -> bytes:
        assert position >= 0 and length >= 0
        path = path_of(key)
        with self._our_errors(key):
            return await self._disk.read(path, position, length)  # one call: of one file, also if it is replaced

    async def head(self, key: str) -> ObjectInfo:
        path = path_of(key)
        with self._our_errors(key):
            info = await self._info(key, path)
            await self._sync_names(path)
            return info

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return Listing(prefix, after, self._look, self._info_of)

    async def delete(self, key: str) -> None:
        path = path_of(key)
        with self._our_errors():
            await self._disk.remove(path)
            with suppress(FileNotFoundError):  # not even a directory
                await self._disk.sync_directory(parent(path))

    async def opener(self) -> StoreOpener | None:
        """None: the disk may be the log's, and all its writers share one rate, in this process."""
        return None

    # --- writing ---

    async def _write(self, buffers: Sequence[Buffer]) -> str:
        """A synced file in our place, with these bytes."""
        path = f"{self._place}/{next(self._numbers):06}"
        position = 0
        try:
            await self._disk.create(path)
            for piece in _pieces(buffers):
                for failure in await self._disk.write([Write(path, position, piece)], sync=True):
                    if failure is not None:
                        raise failure
                written = sum(buffer.nbytes for buffer in piece)
                position += written
                if self._upload_rate is not None:
                    await self._upload_rate.wait(written)
        except BaseException:
            await self._forget(path)
            raise
        return path

    async def _forget(self, path: str) -> None:
        with suppress(DiskFailed, DiskFull):  # then the next who takes the place removes it
            await self._disk.remove(path)

    async def _refuse(self, key: str, path: str) -> None:
        """Says that a key is taken, and so that its object is there to stay."""
        await self._sync_names(path)
        raise Conflict(key)

    async def _sync_names(self, path: str) -> None:
        """Makes every name that leads to a file survive a power cut, whichever process made it."""
        directory = parent(path)
        await self._disk.sync_directory(directory)
        named = set()
        while directory and directory not in self._named:
            named.add(directory)
            directory = parent(directory)
            await self._disk.sync_directory(directory)
        self._named |= named

    async def _try_out(self) -> None:
        """Finds out now, and not at the first upload, whether we may write here and names can be taken."""
        path = await self._write([b"PyDanube was here\n"])
        await self._disk.rename_new(path, f"{path}.renamed")
        await self._disk.remove(f"{path}.renamed")

    # --- reading ---

    async def _exists(self, path: str) -> bool:
        try:
            await self._disk.size(path)
        except FileNotFoundError:
            return False
        return True

    async def _info(self, key: str, path: str) -> ObjectInfo:
        first = await self._disk.read(path, 0, WHOLE_BYTES_MAX + 1)
        if len(first) <= WHOLE_BYTES_MAX:
            return ObjectInfo(key, len(first), _tag(len(first), first, b""))
        size_bytes = await self._disk.size(path)
        last = await self._disk.read(path, max(0, size_bytes - LAST_BYTES), LAST_BYTES)
        return ObjectInfo(key, size_bytes, _tag(size_bytes, first, last))

    async def _look(self, directory: str) -> Iterable[ListedObject[str]]:
        path = _directory_of(directory)
        with self._our_errors():
            entries = await self._disk.list(path)
        return filter(None, (_found(directory, path, entry) for entry in entries))

    async def _info_of(self, found: ListedObject[str]) -> ObjectInfo | None:
        with self._our_errors(), suppress(FileNotFoundError):  # deleted since we looked
            return await self._info(found.key, found.what)
        return None

    @contextmanager
    def _our_errors(self, key: str | None = None) -> Iterator[None]:
        """To the caller a disk that fails is a store that does not answer. So is a missing name, without `key`."""
        try:
            yield
        except FileNotFoundError as error:
            if key is not None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from None
            raise Unreachable(self._name, f"{error.filename} has vanished") from error
        except FileExistsError as error:
            raise Unreachable(self._name, f"{error.filename} is a file where a directory should be") from error
        except (DiskFull, DiskFailed) as error:
            raise Unreachable(self._name, str(error)) from error


# --- places to write in -----------------------------------------------------------------------------


async def _take_place(disk: Disk) -> str:
    """Locks a place for this process. Every place that no live process holds is cleared."""
    taken = ""
    for entry in await disk.list(UPLOADING):
        place = f"{UPLOADING}/{entry.name}"
        if not entry.is_directory or not await _lock(disk, place):
            continue
        for left in await disk.list(place):
            if left.name != "LOCK":
                await disk.remove(f"{place}/{left.name}")
        if taken:
            await disk.unlock(f"{place}/LOCK")
        else:
            taken = place
    numbers = count(1)
    while not taken:
        place = f"{UPLOADING}/{next(numbers)}"
        await disk.make_directory(place)
        taken = place if await _lock(disk, place) else ""
    return taken


async def _lock(disk: Disk, place: str) -> bool:
    try:
        await disk.lock(f"{place}/LOCK")
    except DirectoryInUse:
        return False
    return True


def _pieces(buffers: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """The same bytes, PIECE_BYTES at a time; one empty piece if there are none, because that file is synced too."""
    piece: list[memoryview] = []
    free_bytes = PIECE_BYTES
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while view.nbytes > free_bytes:
            yield [*piece, view[:free_bytes]]
            view, piece, free_bytes = view[free_bytes:], [], PIECE_BYTES
        piece.append(view)
        free_bytes -= view.nbytes
    yield piece


# --- keys and paths ---------------------------------------------------------------------------------


def _directory_of(key: str) -> str:
    """Where the directory with the key "" or "a/b/" is."""
    return key.removesuffix("/").replace(".", "%")


def _found(directory: str, path: str, entry: Entry) -> ListedObject[str] | None:
    """What a name in a directory means; None for what is no object of ours."""
    path = f"{path}/{entry.name}" if path else entry.name
    if entry.is_directory:
        return None if "." in entry.name else ListedObject(f"{directory}{entry.name.replace('%', '.')}/", path)
    part = entry.name.removesuffix(NO_DOT)
    return ListedObject(directory + part, path) if is_part(part) and path_of(part) == entry.name else None


# --- etags ------------------------------------------------------------------------------------------


def _tag(size_bytes: int, first: Buffer, last: Buffer) -> str:
    """`first` is at least what is needed of it; `last` is not looked at for a small object."""
    made = blake2b(size_bytes.to_bytes(8, "little"), digest_size=16)
    if size_bytes <= WHOLE_BYTES_MAX:
        made.update(memoryview(first)[:size_bytes])
    else:
        made.update(memoryview(first)[:FIRST_BYTES])
        made.update(last)
    return made.hexdigest()


def _first(buffers: Sequence[memoryview], length: int) -> bytes:
    found = b""
    for buffer in buffers:
        found += buffer[: length - len(found)]
        if len(found) == length:
            break
    return found


def _last(buffers: Sequence[memoryview], size_bytes: int) -> bytes:
    found = b""
    for buffer in reversed(buffers):
        found = bytes(buffer[max(0, buffer.nbytes - (LAST_BYTES - len(found))) :]) + found
        if len(found) == min(LAST_BYTES, size_bytes):
            break
    return found
