"""The six ports to the outside: Clock, Disk, ObjectStore, MetadataStore, Work, SchemaParsers.

Layers wait, write and read the clock only through these. `stores/` has a folder per port, in which the memory adapter
stands beside the real ones. A contract suite per port (`tests/contracts`) runs on every adapter, so
what is promised here holds for all of them. The network is not among them: what is said on it is decided without I/O
(`wire/session.py`), and a client's connections come from its connector (`client/connector.py`).

A port never decides. It raises our errors (`errors.py`), never the backend's.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from pydanube.errors import DiskFailed, DiskFull

Buffer: TypeAlias = bytes | bytearray | memoryview
T = TypeVar("T")


# --- Clock ------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Time. Nothing that must be safe may rest on it; it bounds waiting and labels data."""

    def time_us(self) -> int:
        """Microseconds since 1970. May jump in either direction."""
        ...

    def elapsed(self) -> float:
        """Seconds since some fixed moment. Never goes back; counts the time the machine was suspended."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns after at least `seconds`."""
        ...


# --- Disk -------------------------------------------------------------------------------------------


class Write(NamedTuple):
    """Puts `buffers`, one after the other, at byte `position` of the file at `path`."""

    path: str
    position: int
    buffers: Sequence[Buffer]


class Entry(NamedTuple):
    """One name in a directory. A directory's size is 0."""

    name: str
    is_directory: bool
    size_bytes: int


WriteResult: TypeAlias = DiskFull | DiskFailed | None


class Disk(Protocol):
    """Files under one root. Paths are relative to it, with forward slashes, and never start with one.

    Nothing survives a power cut until it is synced: written bytes by `sync` (or `write(..., sync=True)`), a
    new, renamed or removed name by `sync_directory` of its directory. Until then any part of it may be lost
    and any other part kept. Calls from one task take effect in order; calls from several tasks may overlap,
    so each file has one writing task. Errors are `DiskFull` and `DiskFailed`; a path that is not there is
    `FileNotFoundError`.
    """

    async def create(self, path: str) -> None:
        """Makes an empty file. Raises FileExistsError if the name is taken."""
        ...

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        """Writes to existing files, then, if `sync`, syncs each file once. Writing past the end extends it.

        Returns one result per write, None for success. A failure of one file does not stop the others. After
        DiskFull or DiskFailed it is unknown which of that write's bytes are there. A failed sync is reported even if a
        write to that file found the disk full: it may have lost what was written before. A file that is not there is
        DiskFailed here and in `sync`, so that it does not stop the others either.
        """
        ...

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        """Syncs the bytes of these files; one result per path. A failed sync says nothing of a later one."""
        ...

    async def sync_directory(self, path: str) -> None:
        """Makes the names in this directory survive a power cut. The root is ""."""
        ...

    async def read(self, path: str, position: int, length: int) -> bytes:
        """Returns up to `length` bytes; fewer only where the file ends."""
        ...

    async def size(self, path: str) -> int:
        """The file's length in bytes."""
        ...

    async def truncate(self, path: str, length: int) -> None:
        """Cuts the file to `length` bytes. Not synced."""
        ...

    async def list(self, path: str) -> list[Entry]:
        """The directory's names, sorted. A directory that is not there is empty."""
        ...

    async def make_directory(self, path: str) -> None:
        """Makes the directory and its missing parents, and syncs each parent in which a name was made."""
        ...

    async def rename(self, source: str, target: str) -> None:
        """Gives a file another name, replacing what had it. Not synced."""
        ...

    async def rename_new(self, source: str, target: str) -> None:
        """Gives a file a name that is not taken, or raises FileExistsError. Not synced.

        Of several processes that want one name at the same moment, one gets it. A process that dies here may leave
        the file under both names.
        """
        ...

    async def remove(self, path: str) -> None:
        """Removes a file, or an empty directory. Not synced. Removing what is not there is no error."""
        ...

    async def free_bytes(self) -> int:
        """Space left for ordinary processes."""
        ...

    async def lock(self, path: str) -> None:
        """Takes the lock file at `path` for this process, or raises DirectoryInUse with the holder's pid.

        The lock ends with the process, however it ends.
        """
        ...

    async def unlock(self, path: str) -> None:
        """Gives the lock back."""
        ...


# --- ObjectStore ------------------------------------------------------------------------------------


class ObjectInfo(NamedTuple):
    """What a store says of an object without sending it."""

    key: str
    size_bytes: int
    etag: str


class ObjectStore(Protocol):
    """Whole objects by key. An object is there completely or not at all, and survives once `put` returned.

    A key is parts joined by slashes, without one at either end; a part is letters, digits, `_`, `-`, `.` and `=`, and
    neither `.` nor `..`. Any other key raises InvalidName (`core/history/object_keys.py`). A key that is not there
    raises FileNotFoundError. A store that does not answer, or does not let us, raises Unreachable.
    """

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        """Stores the buffers, joined, as one object. With `create`, raises Conflict if the key exists.

        Of several who create one key at the same moment exactly one succeeds, if the object is smaller than 16 MiB. A
        store may put a larger one in parts, after a look whether the key is there: names of large objects carry epoch
        and attempt (or are random), and the one owner of an epoch uses each of them once, so no other process creates
        that key. There `create` is only the second fence; a caller that lets a create decide a race makes small
        objects.
        """
        ...

    async def get(self, key: str) -> bytes: ...

    async def get_range(self, key: str, position: int, length: int) -> Buffer:
        """Returns up to `length` bytes from `position`; fewer only where the object ends."""
        ...

    async def head(self, key: str) -> ObjectInfo: ...

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose key starts with `prefix` and is greater than `after`, by key."""
        ...

    async def delete(self, key: str) -> None:
        """Removing what is not there is no error."""
        ...

    async def opener(self) -> StoreOpener | None:
        """What opens this store in another process, for as long as that uses it; None if only this process can."""
        ...


StoreOpener: TypeAlias = Callable[[], AbstractAsyncContextManager[ObjectStore]]  # can be pickled


# --- MetadataStore ----------------------------------------------------------------------------------

Revision: TypeAlias = int
LeaseId: TypeAlias = int
COMPARES_MAX: Final = 128  # of one transaction
OPERATIONS_MAX: Final = 128


class Item(NamedTuple):
    """A key with its value and the store revision that last changed it."""

    key: str
    value: bytes
    revision: Revision


@dataclass(frozen=True, slots=True)
class Compare:
    """Holds if the key's last change has exactly this revision; 0 means the key does not exist."""

    key: str
    revision: Revision


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: LeaseId = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class Event:
    """`value` is None for a deletion."""

    key: str
    value: bytes | None
    revision: Revision


class Usage(NamedTuple):
    """How far a metadata store is filled, and its revision at that moment. 0: not known, or without a bound."""

    revision: Revision
    size_bytes: int = 0
    quota_bytes: int = 0


class MetadataStore(Protocol):
    """Small values by key, in one order of revisions for the whole store.

    A transaction has at most COMPARES_MAX and OPERATIONS_MAX, never two operations on one key. Every
    transaction that changes something gets the next revision. A store that does not answer raises
    Unreachable; then it is unknown whether a change was made.
    """

    async def get(self, key: str) -> Item | None: ...

    async def list(self, prefix: str) -> list[Item]:
        """Items whose key starts with `prefix`, by key, all of one revision."""
        ...

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        """Applies all operations if all compares hold, and returns the revision; else changes nothing and
        returns None. A put under a lease that has run out raises LeaseLost and changes nothing.

        A transaction that changes nothing, having no operations or only deletions of what is not there,
        returns the store's revision.
        """
        ...

    def watch(self, prefix: str, after: Revision) -> AsyncIterator[Sequence[Event]]:
        """Changes under `prefix` with a revision greater than `after`, in order, without end.

        To miss nothing, take the store's revision with an empty transaction, list, then watch after that
        revision: the newest revision in a list may be older than the history a store keeps for watches.
        A fast path, not a promise: it may end (raise Unreachable) at any time; then the caller lists again.
        """
        ...

    async def compact(self, revision: Revision) -> None:
        """Gives up what was before this revision: the store need not keep it for watches that begin earlier.

        What is stored now stays. To ask for what was given up already is no error.
        """
        ...

    async def usage(self) -> Usage: ...

    async def grant(self, ttl_seconds: float) -> LeaseId:
        """A new lease. Keys put under it vanish, as one change, when it runs out or is revoked."""
        ...

    async def renew(self, lease: LeaseId) -> None:
        """Gives the lease its full time again, or raises LeaseLost."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """Ends the lease now. Revoking one that has ended is no error."""
        ...


# --- Work -------------------------------------------------------------------------------------------


class Work(Protocol):
    """CPU-bound and blocking functions, ids and randomness."""

    async def run(self, function: Callable[[], T]) -> T:
        """Calls `function` away from the event loop and returns what it returns or raises what it raises."""
        ...

    async def run_in_worker(self, function: Callable[[], T]) -> T:
        """The same for what takes long and may wait: in a process of low priority, where there is one.

        So the function, what it returns and what it raises can be pickled, and it changes nothing.
        """
        ...

    async def await_in_worker(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same for what waits itself, and may change something: it is never called a second time.

        Raises ProcessEnded if that process ended first: then it is not known what was done.
        """
        ...

    def random_u64(self) -> int:
        """An unpredictable whole number in [1, 2**63): an id that never repeats in practice."""
        ...


# --- SchemaParsers ----------------------------------------------------------------------------------


class SchemaLane(enum.Enum):
    """Whose questions wait for each other: a definition that takes long delays no message."""

    DEFINITIONS = "definitions"
    PAYLOADS = "payloads"


SchemaAnswer: TypeAlias = dict[str, Any]


class SchemaParsers(Protocol):
    """What understands schemas and payloads that come from anywhere, away from the process that serves messages."""

    async def ask(self, lane: SchemaLane, question: Mapping[str, Any], payloads: Sequence[Buffer] = ()) -> SchemaAnswer:
        """The answer to a question (`schema/answering.py` has all of them), in the order of the questions of a lane.

        Raises SchemaTooCostly for one that takes too long or too much memory, Unreachable if there is no answer.
        """
        ...

    async def close(self) -> None: ...
