"""How the driver and executors reach brokers and objects: blocking calls, each side opened when it is first needed.

    Reach.states()      what is where, from a broker, or from the object store alone
    Reach.fetched()     messages that only a broker has
    Reach.store(url)    objects

One event loop in a thread of its own does the waiting, so that the next answer is on its way while Spark works on the
last one. Nothing here survives the `with` block: a Python worker of Spark may be used for another query next.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from crc32c import crc32c

from pydanube.client.thread import LoopThread
from pydanube.core.history.object_keys import path_of
from pydanube.core.history.tiers import Descriptor, LogRun, Objects, manifest_from_bytes
from pydanube.errors import (
    ConfigError,
    DanubeError,
    DeadlineExceeded,
    DeliveryMismatch,
    NotServed,
    ObjectDamaged,
    SubscriptionUnknown,
    TopicUnknown,
    Unreachable,
)
from pydanube.spark.credentials import tls_of, token_of
from pydanube.spark.options import BrokerOptions
from pydanube.spark.plan import TopicState
from pydanube.stores.objects.settings import parse_url

if TYPE_CHECKING:  # imported when they are needed: a task that reads files alone starts sooner without
    from pydanube.client.client import Client
    from pydanube.client.messages import StorageInfo
    from pydanube.formats.batch import Batch
    from pydanube.stores.objects.urls import OpenObjectStore

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

# How long brokers may be silent before objects are read without them, if that was allowed.
OFFLINE_SECONDS: Final = 5.0
AT_ONCE: Final = 32  # requests about single topics, or objects, that are under way
_SNAPSHOT: Final = re.compile(r"(.+)/_snapshot-\d{20}-\d{20}\.json")
_PART: Final = re.compile(r"-part-\d+$")


class Reach:
    """Brokers and objects of one connection, for one `with` block."""

    def __init__(self, connection: BrokerOptions) -> None:
        self.connection = connection
        self._thread: LoopThread | None = None
        self._client: Client | None = None
        self._stores: dict[str, OpenObjectStore] = {}
        self._offline = connection.url is None
        self._known: dict[str, tuple[str, TopicState]] = {}  # by topic, with the tag of what was told
        self.not_here: dict[str, str] = {}  # by topic: the directory of another machine that has its objects

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.call(self._close())
        finally:
            thread.stop()

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()
        for store in self._stores.values():
            await store.close()
        self._client = None
        self._stores.clear()

    def call(self, coroutine: Any) -> Any:
        """Runs it on the loop; returns or raises what it does."""
        if self._thread is None:
            self._thread = LoopThread("danube spark")
        return self._thread.call(coroutine)

    def iterate(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """What an async iterator yields, the next one under way while this one is used."""
        ahead = _Ahead(make)
        try:
            while (found := self.call(ahead.next())) is not _END:
                yield found
        finally:
            if self._thread is not None:
                self.call(ahead.close())

    async def client(self) -> Client:
        if self._client is None:
            connection = self.connection
            if connection.url is None:
                raise ConfigError("service.url", None, "danube://host:6651: only a broker has these messages")
            from pydanube.client.client import Client

            seconds = connection.timeout_seconds
            self._client = Client(connection.url, token=token_of(connection), tls=tls_of(connection), timeout=seconds)
        return self._client

    async def store(self, url: str) -> OpenObjectStore:
        store = self._stores.get(url)
        if store is None:
            from pydanube.stores.objects.urls import open_object_store

            options = dict(self.connection.storage_options)
            store = self._stores[url] = await open_object_store(url, options)
        return store

    # --- what is where --------------------------------------------------------------------------------

    def states(self, topics: Sequence[str], pattern: str | None = None) -> list[TopicState]:
        """Topics, or all whose name matches, partitions one by one. Raises TopicUnknown."""
        return list(self.call(self.states_now(topics, pattern)))

    async def states_now(self, topics: Sequence[str], pattern: str | None = None) -> list[TopicState]:
        """The same, on the loop."""
        if not self._offline:
            try:
                # With objects to fall back on, a dead broker costs seconds and not the whole timeout.
                has_objects = self.connection.storage_url is not None
                return await self._online(topics, pattern, OFFLINE_SECONDS if has_objects else None)
            except (Unreachable, DeadlineExceeded) as error:
                if self.connection.storage_url is None:
                    raise
                log.warning("no broker answers: reading what is uploaded", extra={"why": str(error)})
                with suppress(TopicUnknown):
                    if found := await self._from_objects(topics, pattern):
                        return found
                return await self._online(topics, pattern, None)  # nothing is uploaded: only a broker can tell
        return await self._from_objects(topics, pattern)

    async def _online(self, topics: Sequence[str], pattern: str | None, seconds: float | None) -> list[TopicState]:
        client = await self.client()
        names = list(topics)
        if pattern is not None:
            names = [name for name in await client.list_topics(timeout=seconds) if re.fullmatch(pattern, name)]
        found = [each async for each in self._described(client, names, pattern, seconds)]
        return list(await self.all_of(found, self._state))

    async def _described(
        self, client: Client, names: Sequence[str], pattern: str | None, seconds: float | None
    ) -> AsyncIterator[StorageInfo]:
        for info in (await client.describe_storages(names, timeout=seconds)).values():
            if not isinstance(info, DanubeError):
                yield info
            elif pattern is None or not isinstance(info, DeliveryMismatch | TopicUnknown):
                raise info
            # else it has no messages to read, or was deleted since it was listed

    async def all_of(self, items: Iterable[T], make: Callable[[T], Awaitable[R]]) -> list[R]:
        """In order; some are waited for at once."""
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(item: T) -> R:
            async with turn:
                return await make(item)

        return list(await asyncio.gather(*map(one, items)))

    async def _state(self, info: StorageInfo) -> TopicState:
        tag, before = self._known.get(info.topic, ("", None))
        if before is not None and tag and tag == info.tag and before.first_offset == info.first_offset:
            return replace(before, head=info.head, log=_log_of(info, before.storage_url))
        url = self.store_of(info)
        older = await self._manifest(info.topic, url, info.manifest, info.manifest_crc) if info.manifest and url else []
        made = _state_of(info.topic, info.first_offset, info.head, url, older, info.objects, info, live=True)
        made = replace(made, log=_log_of(info, url))
        self._known[info.topic] = (info.tag, made)
        return made

    def store_of(self, info: StorageInfo) -> str | None:
        """Where this machine reads a topic's objects; None: nowhere, they come through the broker.

        A broker without a setting keeps history in a directory of its own machine, and names that: it counts only
        where it is there, on the driver and on each executor.
        """
        url = self.connection.storage_url
        if url is not None or info.url is None:
            return url
        place = parse_url("storage.url", info.url)
        if place.scheme != "file" or _is_here(place.root, info):
            return info.url
        if info.topic not in self.not_here:
            self.not_here[info.topic] = info.url
            log.warning("history comes through the broker", extra={"topic": info.topic, "not_here": info.url})
        return None

    async def _manifest(self, topic: str, url: str, name: str, crc: int) -> list[Descriptor]:
        key = f"{topic[1:]}/{name}"
        store = await self.store(url)
        try:
            data = await store.get(key)
            if crc and crc32c(data) != crc:
                raise ValueError(f"checksum is {crc32c(data):#010x}, {crc:#010x} was written")
            return manifest_from_bytes(data)
        except (FileNotFoundError, ValueError) as error:
            raise ObjectDamaged(topic, key, 0, 0, str(error)) from error

    async def _from_objects(self, topics: Sequence[str], pattern: str | None) -> list[TopicState]:
        from pydanube.history.snapshots import read_snapshot

        url = self.connection.storage_url
        assert url is not None
        store = await self.store(url)
        if pattern is not None:
            names = {f"/{match[1]}" async for info in store.list("") if (match := _SNAPSHOT.fullmatch(info.key))}
            chosen = sorted(name for name in names if re.fullmatch(pattern, name))
        else:
            chosen = []
            for topic in topics:
                parts = {
                    f"/{match[1]}"
                    async for info in store.list(f"{topic[1:]}-part-")
                    if (match := _SNAPSHOT.fullmatch(info.key)) and _PART.sub("", f"/{match[1]}") == topic
                }
                chosen += sorted(parts, key=lambda name: int(name.rpartition("-")[2])) or [topic]
        found = []
        for name in chosen:
            try:
                snapshot = await read_snapshot(store, f"{name[1:]}/")
            except ValueError as error:
                raise ObjectDamaged(name, f"{name[1:]}/_snapshot", 0, 0, str(error)) from error
            if snapshot is None:
                raise TopicUnknown(name)
            named = snapshot.manifest
            older = await self._manifest(name, url, named, snapshot.manifest_crc) if named else []
            first, head = snapshot.first_offset, snapshot.head_uploaded
            state = _state_of(name, first, head, url, older, snapshot.objects, snapshot, live=False)
            # What lies below the oldest object was never uploaded, or is gone: history begins there.
            begins = state.objects[0].start_offset if state.objects else head
            found.append(replace(state, first_offset=max(first, begins)))
        return found

    # --- times ----------------------------------------------------------------------------------------

    def offset_at(self, state: TopicState, time_us: int) -> int:
        """The first message that was published at this time or later; the head if there is none."""
        return self.offsets_at({state.topic: time_us}, [state])[state.topic]

    def offsets_at(self, times_us: Mapping[str, int], states: Sequence[TopicState]) -> dict[str, int]:
        """The same of many topics."""
        from pydanube.spark.rows import first_since

        live = [state.topic for state in states if state.live]
        asked = self.call(self.all_of(live, lambda topic: self._ask_offset(topic, times_us[topic])))
        found = dict(zip(live, asked, strict=True))
        stored = {each.topic: first_since(self, each, times_us[each.topic]) for each in states if not each.live}
        return {**found, **stored}

    async def _ask_offset(self, topic: str, time_us: int) -> int:
        client = await self.client()
        return await client.find_offset(topic, datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us))

    # --- messages -------------------------------------------------------------------------------------

    def fetched(self, topic: str, first: int, end: int) -> Iterator[tuple[int, int, list[Batch]]]:
        """Batches of a broker, with the part of them that is meant."""

        async def batches() -> AsyncIterator[tuple[int, int, list[Batch]]]:
            client = await self.client()
            async for each in client.fetch(topic, first, end).stored():
                yield each

        return self.iterate(batches)

    # --- the query as a subscription ------------------------------------------------------------------

    def show_progress(self, group: str, offsets: dict[str, int]) -> None:
        """Moves the cursor of subscription `group`, so that the broker shows how far the query is behind.

        Best effort: a query does not fail because its lag cannot be shown.
        """
        self.call(self.all_of(offsets.items(), lambda each: self._show(group, *each)))

    async def _show(self, group: str, topic: str, offset: int) -> None:
        client = await self.client()
        with suppress(Unreachable, DeadlineExceeded, NotServed):
            try:
                await client.seek(topic, group, offset, timeout=OFFLINE_SECONDS)
            except SubscriptionUnknown:
                async with client.consumer(
                    topic, subscription=group, type="exclusive", start=offset, window_messages=1, window_bytes=1
                ):
                    pass


def _state_of(
    topic: str,
    first_offset: int,
    head: int,
    url: str | None,
    older: Sequence[Descriptor],
    keyed: Sequence[Descriptor],
    gaps: Any,
    *,
    live: bool,
) -> TopicState:
    starts = {each.start_offset for each in keyed}
    try:
        objects = Objects([*(each for each in older if each.start_offset not in starts), *keyed])
    except ValueError as error:
        raise ObjectDamaged(topic, "its descriptors", first_offset, head, str(error)) from error
    described = tuple(objects.from_offset(first_offset)) if url is not None else ()
    return TopicState(
        topic,
        first_offset,
        head,
        described,
        tuple(gaps.orphans),
        tuple(gaps.voids),
        live,
        url,
        gaps.history_version,
    )


def _log_of(info: StorageInfo, url: str | None) -> tuple[LogRun, ...]:
    """Sizes and epochs of what the broker serves; of its objects too, if it serves these."""
    log = tuple(info.log)
    if url is not None:
        return log
    begins = log[0].first if log else info.head
    return (*(LogRun(each.start_offset, each.end, each.size, 0) for each in info.objects if each.end <= begins), *log)


def _is_here(root: str, info: StorageInfo) -> bool:
    """Whether the directory that a broker named is on this machine: it has one for the topic, if there is an object."""
    if not info.objects and not info.manifest:
        return True
    return Path(root, path_of(f"{info.topic[1:]}/object")).parent.is_dir()


class _Ahead:
    """One step ahead of an async iterator. Made and used on one loop."""

    def __init__(self, make: Callable[[], AsyncIterator[Any]]) -> None:
        self._make = make
        self._iterator: AsyncIterator[Any] | None = None
        self._next: asyncio.Task[Any] | None = None

    async def next(self) -> Any:
        if self._iterator is None:
            self._iterator = aiter(self._make())
        task = self._next or asyncio.ensure_future(self._step())
        self._next = None
        found = await task
        if found is not _END:
            self._next = asyncio.ensure_future(self._step())
        return found

    async def _step(self) -> Any:
        assert self._iterator is not None
        return await anext(self._iterator, _END)

    async def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        close = getattr(self._iterator, "aclose", None)
        if close is not None:
            await close()


_END: Final = object()
