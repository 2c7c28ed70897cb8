"""Objects in S3, GCS or Azure, through obstore.

obstore makes the requests, on threads of its own. What it does not do is here: our errors, retries that end at a
deadline, proof that what arrived is whole, and a create that can be tried again.

    attempt ─► answer
       │  ▲
       ▼  │ a pause, twice as long each time
     failed ─► Unreachable, once the next attempt would begin after the deadline

An attempt has failed when the network or the server did, when nothing comes for `attempt_seconds`, or when less comes
than was announced. What the server refuses (credentials, bucket) is not tried again: StoreRefused.

**A create whose answer was lost** may have been done; the next attempt then finds the key taken, by ourselves. So every
create carries a random token in the object's metadata, and an attempt that finds its own token there has succeeded.

**Large objects** are put in parts, several at a time. obstore has no condition for those, so a create of a large object
looks first whether the key is there, in every attempt: a create by another client at the same moment is not noticed.
Parts of a put that did not end stay in the bucket, unseen; a lifecycle rule of the bucket should remove them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from random import uniform
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, S3Store

from pydanube.core.history.object_keys import check_key
from pydanube.core.units import MIB
from pydanube.errors import Conflict, StoreRefused, Unreachable
from pydanube.ports import Buffer, ObjectInfo, StoreOpener
from pydanube.stores.objects.listing import ListedObject, Listing
from pydanube.stores.objects.upload_rate import UploadRate

if TYPE_CHECKING:
    from obstore import Attributes, ListResult, ObjectMeta

T = TypeVar("T")
Store: TypeAlias = S3Store | GCSStore | AzureStore

PARTS_FROM_BYTES: Final = 16 * MIB
PART_BYTES: Final = 8 * MIB
PARTS_AT_ONCE: Final = 4
PIECE_BYTES: Final = MIB  # of a part, at a rate
AT_ONCE_BYTES_MAX: Final = 9 * MIB  # up to here it comes as one: a row group does
TOKEN: Final = "danubeput"  # letters alone: Azure allows no hyphen, and proxies drop underscores


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait. Bytes get more time: what they need at `bytes_per_second_min`."""

    attempt_seconds: float = 10.0
    deadline_seconds: float = 60.0
    pause_seconds_first: float = 0.1
    pause_seconds_max: float = 5.0
    bytes_per_second_min: float = 1.0 * MIB


class RemoteObjectStore:
    """`name` is what errors call the store; no secret is in it. What is put in parts is sent at its `upload_rate`.

    `opener` opens the same store in another process.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        patience: Patience | None = None,
        upload_rate: UploadRate | None = None,
        opener: StoreOpener | None = None,
    ) -> None:
        self._opener = opener
        self._store = store
        self._name = name
        self._patience = patience or Patience()
        self._upload_rate = upload_rate

    async def close(self) -> None:
        """Connections end by themselves."""

    # --- the port ---

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        check_key(key)
        buffers = [memoryview(buffer).cast("B") for buffer in data] or [memoryview(b"")]
        size_bytes = sum(buffer.nbytes for buffer in buffers)
        if not create:
            attempt = self._replacing(key, buffers, size_bytes)
        elif size_bytes < PARTS_FROM_BYTES:
            attempt = self._creating(key, buffers)
        else:
            attempt = self._creating_in_parts(key, buffers)
        try:
            etag = await self._try(key, attempt, size_bytes)
        except FileNotFoundError as error:  # not the bucket, so perhaps an upload in parts that the server forgot
            raise Unreachable(self._name, "it answers 404 to a put") from error
        return ObjectInfo(key, size_bytes, etag)

    async def get(self, key: str) -> bytes:
        check_key(key)
        data = await self._try(key, lambda limit: self._read(limit, key))
        return data if isinstance(data, bytes) else bytes(data)

    async def get_range(self, key: str, position: int, length: int) -> Buffer:
        assert position >= 0 and length >= 0
        check_key(key)
        if length == 0:
            await self.head(key)
            return b""
        while True:
            try:
                return await self._try(key, lambda limit: self._read(limit, key, (position, position + length)))
            except _OutOfRange:
                if (await self.head(key)).size_bytes <= position:
                    return b""
                # Else it was replaced by a larger one just now.

    async def head(self, key: str) -> ObjectInfo:
        check_key(key)
        return _info(key, await self._try(key, lambda limit: obstore.head_async(self._store, key)))

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return Listing(prefix, after, self._look, self._info_of)

    async def delete(self, key: str) -> None:
        check_key(key)
        with suppress(FileNotFoundError):  # some stores say so, others do not
            await self._try(key, lambda limit: obstore.delete_async(self._store, key))

    async def opener(self) -> StoreOpener | None:
        return self._opener

    # --- beyond the port ---

    async def copy(self, source: str, target: str) -> None:
        """Makes `target` a copy of `source`, inside the store, whatever it was before. For objects up to 5 GB."""
        check_key(source)
        check_key(target)
        await self._try(source, lambda limit: obstore.copy_async(self._store, source, target))

    # --- one attempt ---

    def _replacing(self, key: str, buffers: Sequence[memoryview], size_bytes: int) -> _Attempt[str]:
        async def attempt(limit: _Limit) -> str:
            if size_bytes >= PARTS_FROM_BYTES:
                return await self._put_in_parts(key, buffers, {})
            result = await obstore.put_async(self._store, key, buffers, use_multipart=False)
            return _etag(result["e_tag"])

        return attempt

    def _creating(self, key: str, buffers: Sequence[memoryview]) -> _Attempt[str]:
        token = secrets.token_hex(8)
        tried = False  # an earlier attempt may have succeeded without our hearing of it

        async def attempt(limit: _Limit) -> str:
            nonlocal tried
            again, tried = tried, True
            try:
                result = await obstore.put_async(
                    self._store, key, buffers, attributes={TOKEN: token}, mode="create", use_multipart=False
                )
            except AlreadyExistsError as error:
                if "ConditionalRequestConflict" in str(error):  # S3: another request changes it at this moment
                    raise _Failed("another request for the same key was going on") from error
                etag = await self._etag_if_ours(key, token) if again else None
                if etag is None:
                    raise Conflict(key) from None
                return etag
            return _etag(result["e_tag"])

        return attempt

    def _creating_in_parts(self, key: str, buffers: Sequence[memoryview]) -> _Attempt[str]:
        """The key is looked for before the parts are sent. An attempt whose answer was lost is found there, too."""
        token = secrets.token_hex(8)
        tried = False

        async def attempt(limit: _Limit) -> str:
            nonlocal tried
            with suppress(FileNotFoundError):
                found = await obstore.get_async(self._store, key, options={"head": True})
                if tried and found.attributes.get(TOKEN) == token:
                    return _etag(found.meta["e_tag"])
                raise Conflict(key)
            tried = True
            try:
                return await self._put_in_parts(key, buffers, {TOKEN: token})
            except FileNotFoundError as error:
                if _NO_BUCKET.search(str(error)):
                    raise
                # An upload that ended, too, is one that the server does not know any more. The next look tells.
                raise _Failed("it does not know the upload in parts any more") from error

        return attempt

    async def _put_in_parts(self, key: str, buffers: Sequence[memoryview], attributes: Attributes) -> str:
        result = await obstore.put_async(
            self._store,
            key,
            buffers if self._upload_rate is None else _paced(buffers, self._upload_rate),
            attributes=attributes,
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=PARTS_AT_ONCE,
        )
        return _etag(result["e_tag"])

    async def _etag_if_ours(self, key: str, token: str) -> str | None:
        try:
            found = await obstore.get_async(self._store, key, options={"head": True})
        except FileNotFoundError as error:
            raise _Failed("it was there, and was deleted") from error
        return _etag(found.meta["e_tag"]) if found.attributes.get(TOKEN) == token else None

    async def _read(self, limit: _Limit, key: str, asked: tuple[int, int] | None = None) -> Buffer:
        result = await obstore.get_async(self._store, key, options={} if asked is None else {"range": asked})
        size_bytes = result.meta["size"]
        first, end = (0, size_bytes) if asked is None else (asked[0], min(asked[1], size_bytes))
        limit.expect(end - first)
        data: Buffer
        if end - first <= AT_ONCE_BYTES_MAX:
            data = memoryview(await result.bytes_async())  # obstore's own memory, and no copy
        else:
            whole = BytesIO()
            async for chunk in result.stream(min_chunk_size=MIB):
                whole.write(chunk)
                limit.progress()
            data = whole.getvalue()  # not a copy: the buffer itself, since it is not written to any more
        if result.range != (first, end) or len(data) != end - first:
            raise _Failed(f"{len(data)} bytes came of {end - first}")
        return data

    async def _look(self, directory: str) -> Iterable[ListedObject[ObjectInfo | None]]:
        async def attempt(limit: _Limit) -> ListResult[Sequence[ObjectMeta]]:
            limit.expect_pages()
            return await obstore.list_with_delimiter_async(self._store, directory.removesuffix("/"))

        result = await self._try(directory, attempt)
        found: list[ListedObject[ObjectInfo | None]] = [
            ListedObject(f"{name}/", None) for name in result["common_prefixes"]
        ]
        # Some servers show a directory in itself, as an empty object.
        metas = (meta for meta in result["objects"] if meta["path"].startswith(directory))
        return found + [ListedObject(meta["path"], _info(meta["path"], meta)) for meta in metas]

    async def _info_of(self, found: ListedObject[ObjectInfo | None]) -> ObjectInfo | None:
        return found.what

    # --- one after the other ---

    async def _try(self, key: str, attempt: _Attempt[T], size_bytes: int = 0) -> T:
        """Returns what an attempt returned; raises what no other attempt can change, or Unreachable after the last."""
        limit = _Limit(self._patience, size_bytes)
        pause_seconds = self._patience.pause_seconds_first
        why = ""
        while True:
            try:
                async with limit.next_attempt():
                    return await attempt(limit)
            except TimeoutError:
                why = why or "it does not answer in time"  # what it said before tells more
            except (BaseError, FileNotFoundError) as error:
                why = self._judge(error, key)
            except _Failed as error:
                why = str(error)
            # Jitter: many that failed together would come back together.
            wait_seconds = pause_seconds * uniform(0.5, 1.0)
            if wait_seconds >= limit.left_seconds:
                raise Unreachable(self._name, why)
            await asyncio.sleep(wait_seconds)
            pause_seconds = min(2 * pause_seconds, self._patience.pause_seconds_max)

    def _judge(self, error: BaseError | FileNotFoundError, key: str) -> str:
        """Returns why an attempt failed, if another one may succeed; else raises our error."""
        text = str(error)
        status, why = _explain(text)
        if isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(text):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from None
        if status == 416:
            raise _OutOfRange from None
        if _METADATA_SERVICE.search(text):
            why = f"no credentials were given, and this machine has none of its own ({why})"
            raise StoreRefused(self._name, why) from error
        refused = (
            PermissionDeniedError | UnauthenticatedError | FileNotFoundError | InvalidPathError | NotSupportedError
        )
        if isinstance(error, refused) or _REDIRECT in text or (300 <= status < 500 and status not in _TRY_AGAIN):
            raise StoreRefused(self._name, f"it refuses us ({why})") from error
        return why


async def _paced(buffers: Sequence[memoryview], upload_rate: UploadRate) -> AsyncIterator[memoryview]:
    for buffer in buffers:
        for position in range(0, buffer.nbytes, PIECE_BYTES):
            piece = buffer[position : position + PIECE_BYTES]
            yield piece
            await upload_rate.wait(piece.nbytes)


# --- time -------------------------------------------------------------------------------------------


class _Limit:
    """Until when one call may take, and one attempt of it."""

    def __init__(self, patience: Patience, size_bytes: int) -> None:
        self._patience = patience
        self._began = _now()
        self._size_bytes = size_bytes
        self._timeout = asyncio.timeout(None)

    @property
    def left_seconds(self) -> float:
        return self._began + self._patience.deadline_seconds + self._transfer_seconds - _now()

    @property
    def _transfer_seconds(self) -> float:
        return self._size_bytes / self._patience.bytes_per_second_min

    def next_attempt(self) -> asyncio.Timeout:
        self._timeout = asyncio.timeout(min(self.left_seconds, self._patience.attempt_seconds + self._transfer_seconds))
        return self._timeout

    def expect(self, size_bytes: int) -> None:
        """So many bytes are coming. What an earlier attempt had announced gives no time to this one."""
        self._size_bytes = size_bytes
        small = min(size_bytes, AT_ONCE_BYTES_MAX)  # it comes as one; of a large one we hear by and by
        self._reschedule(self._patience.attempt_seconds + small / self._patience.bytes_per_second_min)

    def expect_pages(self) -> None:
        """A directory comes page by page, and we hear of it when the last one has come."""
        self._reschedule(self._patience.deadline_seconds)

    def progress(self) -> None:
        """Some of them have come."""
        self._reschedule(self._patience.attempt_seconds)

    def _reschedule(self, seconds: float) -> None:
        self._timeout.reschedule(_now() + min(self.left_seconds, seconds))


def _now() -> float:
    return asyncio.get_running_loop().time()


_Attempt: TypeAlias = Callable[[_Limit], Awaitable[T]]


# --- what answers mean ------------------------------------------------------------------------------


class _Failed(Exception):
    """An attempt that obstore did not take for a failure."""


class _OutOfRange(Exception):
    """The object ends before the range begins."""


_TRY_AGAIN: Final = (408, 409, 425, 429)
_METADATA_SERVICE: Final = re.compile(
    r"169\.254\.169\.254|metadata\.google\.internal"
)  # has a machine's own credentials
_NO_BUCKET: Final = re.compile("NoSuchBucket|ContainerNotFound|bucket does not exist")
_REDIRECT: Final = "redirect without LOCATION"  # S3's answer in a bucket's wrong region
_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r'<Code>([^<]{1,80})<|"error": ?"([^"]{1,80})"')
_MESSAGE: Final = re.compile(r"<Message>([^<]{1,300})<")
_SYSTEM_MESSAGE: Final = re.compile(r'message: "([^"]{1,200})"')
_ADDRESS: Final = re.compile(r"\w+://\S+")


def _explain(text: str) -> tuple[int, str]:
    """The status that a server answered with, 0 for none, and what is said of it.

    Only parts of the text are taken that never contain a signature, a token or a key.
    """
    status = _STATUS.search(text)
    if status is not None:
        code, message = _CODE.search(text), _MESSAGE.search(text)
        named = (code[1] or code[2]) if code is not None else ""
        words = [f"{status[1]} {named}".strip(), *([message[1].strip()] if message is not None else [])]
        return int(status[1]), ": ".join(words)
    system = _SYSTEM_MESSAGE.findall(text)
    if system:
        return 0, str(system[-1])
    first_line = text.partition("\n")[0]
    return 0, _ADDRESS.sub("(address)", first_line.rpartition(" - ")[2])[:200]


def _info(key: str, meta: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(key, meta["size"], _etag(meta["e_tag"]))


def _etag(given: str | None) -> str:
    """Without quotes, which some answers have and others of the same store have not."""
    return (given or "").removeprefix("W/").strip('"')
