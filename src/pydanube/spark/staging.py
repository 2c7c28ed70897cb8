"""Batches of a query become visible in topics exactly once: staged by tasks, named by a manifest, sent behind a fence.

    {query}/rows-{batch:020}-{partition}-{attempt}-{n}.rows   what one task wrote for one topic: encoded batches
    {query}/manifest-{batch:020}.json                          which of them count, their order, where the topics ended
    {query}/done-{batch:020}.json                              everything up to this batch is in the topics

    staged ─► manifest created ─► session opened ─► not done yet? ─► read what arrived ─► send the rest ─► done
              (the first wins)    (the fence)       └───────────── all of it again after any failure ─────┘

A row is known by what it carries: the producer's name says query and batch (or an attribute does, if the row keeps a
producer's name of its own), `request_id` says partition and row of the attempt that the manifest names. Opening a
session refuses whatever an older publisher of this query still has on its way, so what is read behind it is all that
will ever have arrived, and what is not among it was never stored. Nothing rests on who published before, how far it
came, or whether it is still alive. docs/adr/0004-spark.md has the table.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pydanube.client.client import Client
from pydanube.errors import Conflict, DanubeError
from pydanube.formats.batch import ENVELOPE, Batch, decode, encode
from pydanube.formats.envelope import TIMES
from pydanube.formats.parquet import read_raw
from pydanube.ports import ObjectStore
from pydanube.spark.errors import BatchRefused

log = logging.getLogger(__name__)

FORMAT: Final = 1
ATTEMPTS: Final = 8
PAUSE_SECONDS: Final = 0.25
MARK: Final = "x-spark-write"  # the attribute that says query and batch where the producer's name does not
ROW_BITS: Final = 40  # of request_id: so many rows per task, and 2**23 tasks


class StagedFile(NamedTuple):
    """Rows of one task for one topic, or partition."""

    key: str
    topic: str
    partition: int
    rows: int


class BatchManifest(NamedTuple):
    """What a batch is. `heads`: where each topic ended before anything of it was published."""

    query: str
    batch: int
    files: Sequence[StagedFile]
    heads: dict[str, int]

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, **self._asdict(), "files": [list(each) for each in self.files]}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BatchManifest:
        """Raises ValueError."""
        try:
            fields = json.loads(data)
            if fields["format"] != FORMAT:
                raise ValueError(f"format {fields['format']} is not known here")
            files = [StagedFile(*each) for each in fields["files"]]
            return cls(fields["query"], fields["batch"], files, fields["heads"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a manifest: {error}") from error


def producer_name(query: str, batch: int) -> str:
    """What rows of a batch carry."""
    return f"spark.{query}.{batch}"


def fence_name(query: str) -> str:
    """Who publishes: one at a time per query and topic."""
    return f"spark.{query}"


def staged_key(query: str, batch: int, partition: int, attempt: str, number: int) -> str:
    # No directory per batch: a store that is one keeps those that have become empty.
    return f"{query}/rows-{batch:020}-{partition}-{attempt}-{number}.rows"


def _manifest_key(query: str, batch: int) -> str:
    return f"{query}/manifest-{batch:020}.json"


def _done_key(query: str, batch: int) -> str:
    return f"{query}/done-{batch:020}.json"


class Publishing:
    """The driver's side of one query. `step` is told every step before it is made; tests die there."""

    def __init__(
        self,
        query: str,
        store: ObjectStore,
        client: Client,
        step: Callable[[str], None] = lambda name: None,
        *,
        rows_per_second: int | None = None,
    ) -> None:
        self._query = query
        self._store = store
        self._client = client
        self._step = step
        self._rows_per_second = rows_per_second

    async def commit(self, batch: int, files: Sequence[StagedFile]) -> int:
        """Makes the batch visible; returns how many rows this call stored. Raises BatchRefused, or what stopped it."""
        last = await self._last_done()
        if last is not None and batch <= last:
            if batch < last:
                raise BatchRefused(
                    self._query, batch, f"batch {last} is in the topic already: the checkpoint is an old copy; "
                    "use the current one, or a new checkpoint to publish everything again"
                )  # fmt: skip
            await self._clean(batch)
            return 0
        self._step("manifest")
        manifest = await self._manifest(batch, files)
        stored = await self._publish_patiently(manifest)
        self._step("done")
        await self._store.put(_done_key(self._query, batch), [json.dumps({"rows": stored}).encode()])
        self._step("clean")
        await self._clean(batch)
        return stored

    async def _last_done(self) -> int | None:
        prefix = f"{self._query}/done-"
        found = [int(info.key.removeprefix(prefix)[:20]) async for info in self._store.list(prefix)]
        return max(found, default=None)

    async def _manifest(self, batch: int, files: Sequence[StagedFile]) -> BatchManifest:
        """The manifest of the batch: ours, or the one of an earlier attempt."""
        key = _manifest_key(self._query, batch)
        heads = {topic: (await self._client.describe_topic(topic)).head for topic in {each.topic for each in files}}
        manifest = BatchManifest(self._query, batch, sorted(files, key=lambda each: (each.partition, each.key)), heads)
        try:
            await self._store.put(key, [manifest.to_bytes()], create=True)
        except Conflict:
            try:
                found = BatchManifest.from_bytes(await self._store.get(key))
            except ValueError as error:
                raise BatchRefused(self._query, batch, f"{key} cannot be understood: {error}") from error
            rows, ours = sum(each.rows for each in found.files), sum(each.rows for each in files)
            log.warning(
                "an earlier attempt of the batch is published",
                extra={"query": self._query, "batch": batch, "rows": rows, "rows_of_this_attempt": ours},
            )
            return found
        return manifest

    async def _publish_patiently(self, manifest: BatchManifest) -> int:
        stored = 0
        topics = sorted({each.topic for each in manifest.files})
        for topic in topics:
            for attempt in range(ATTEMPTS):
                try:
                    stored += await self._publish(manifest, topic)
                    break
                except DanubeError as error:
                    if not error.retryable or attempt == ATTEMPTS - 1:
                        raise
                    log.warning("publishing goes on", extra={"topic": topic, "why": str(error)})
                    await asyncio.sleep(PAUSE_SECONDS * 2**attempt)
        return stored

    async def _publish(self, manifest: BatchManifest, topic: str) -> int:
        """Sends what is not in the topic yet."""
        self._step("fence")
        stored = 0
        began = asyncio.get_running_loop().time()
        async with self._client.publisher(topic, fence_name(self._query)) as publisher:
            self._step("scan")
            # A successor may have finished the batch, and removed its manifest, while this process slept.
            last = await self._last_done()
            if last is not None and last >= manifest.batch:
                return stored
            arrived = await self._arrived(manifest, topic)
            async for batch in self._missing(manifest, topic, arrived):
                self._step("send")
                await publisher.send(batch)
                stored += batch.header.rows
                if self._rows_per_second is not None:
                    early = began + stored / self._rows_per_second - asyncio.get_running_loop().time()
                    await asyncio.sleep(max(0.0, early))
            await publisher.flush()
        return stored

    async def _arrived(self, manifest: BatchManifest, topic: str) -> np.ndarray:
        """The ids of the batch's rows that are in the topic, in order."""
        info = await self._client.describe_storage(topic)
        first = manifest.heads[topic]
        for orphan_first, orphan_end in info.orphans:
            if orphan_end > first:
                raise BatchRefused(
                    self._query,
                    manifest.batch,
                    f"offsets {orphan_first} to {orphan_end - 1} of {topic} are on a broker that is away, and some of "
                    "its rows may be among them: start it, then start the query again",
                )
        if info.first_offset > first:
            raise BatchRefused(
                self._query, manifest.batch, f"retention removed offsets {first} to {info.first_offset - 1} of {topic} "
                "before the batch was finished, and some of its rows may have been among them"
            )  # fmt: skip
        if info.head < first:
            raise BatchRefused(
                self._query,
                manifest.batch,
                f"{topic} ends at offset {info.head}, and ended at {first} when the batch was staged: it was deleted "
                "and made again, or has lost data; publish to it with a new checkpoint, or writeId",
            )
        found: list[np.ndarray] = [np.empty(0, np.int64)]
        if info.head > first:
            async for rows in self._client.fetch(topic, first, info.head):
                ours = _is_of(rows, producer_name(self._query, manifest.batch))
                found.append(rows.filter(ours).column("request_id").to_numpy())
        ids = np.sort(np.concatenate(found))
        if len(ids) and (np.diff(ids) == 0).any():
            raise BatchRefused(self._query, manifest.batch, f"rows of it are in {topic} twice already")
        return ids

    async def _missing(self, manifest: BatchManifest, topic: str, arrived: np.ndarray) -> AsyncIterator[Batch]:
        for file in manifest.files:
            if file.topic != topic:
                continue
            try:
                data = await self._store.get(file.key)
            except FileNotFoundError:
                raise BatchRefused(
                    self._query,
                    manifest.batch,
                    f"{file.key} is not in the staging place: all executors and the driver must see the same one; "
                    "set the option staging",
                ) from None
            for batch in read_raw(data):
                if not len(arrived):
                    yield batch
                    continue
                rows = decode(batch)
                absent = ~np.isin(rows.column("request_id").to_numpy(), arrived)
                if absent.all():
                    yield batch
                elif absent.any():
                    yield encode(rows.filter(pa.array(absent)), topic=topic)

    async def _clean(self, batch: int) -> None:
        """What is published needs no staging any more. Leftovers are removed by the next batch."""
        with suppress(DanubeError):
            async for info in self._store.list(f"{self._query}/"):
                name = info.key.removeprefix(f"{self._query}/")
                # Without a prefix: the directories of staged files that earlier versions made.
                number = name.removeprefix("rows-").removeprefix("manifest-").removeprefix("done-")[:20]
                old = number.isdecimal() and int(number) <= batch
                if old and info.key != _done_key(self._query, batch):
                    await self._store.delete(info.key)

    async def discard(self, files: Sequence[StagedFile]) -> None:
        """An attempt that will not be used. What is left is removed with the batch."""
        for file in files:
            with suppress(DanubeError):
                await self._store.delete(file.key)


def _is_of(rows: pa.RecordBatch, name: str) -> pa.Array:
    """Which rows a batch of this name has published. Both signs outlive a merge of objects; batches' headers do not."""
    named = pc.equal(rows.column("producer_name"), pa.scalar(name, pa.string()))
    marks = pc.map_lookup(rows.column("attributes"), pa.scalar(MARK, pa.string()), "last")
    marked = pc.equal(marks, pa.scalar(name, pa.string()))
    return pc.or_(pc.fill_null(named, False), pc.fill_null(marked, False))


# --- the task's side ----------------------------------------------------------------------------------------


class Staging:
    """One attempt of one task: rows in, staged files out."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        query: str,
        batch: int,
        partition: int,
        attempt: str,
        file_bytes: int,
        batch_rows: int,
        compression: str,
    ) -> None:
        self._store = store
        self._query = query
        self._batch = batch
        self._partition = partition
        self._attempt = attempt
        self._file_bytes = file_bytes
        self._batch_rows = batch_rows
        self._compression = compression
        self._name = producer_name(query, batch)
        self._row = 0
        self._number = 0
        self._waiting: dict[str, list[Batch]] = {}
        self._waiting_bytes: dict[str, int] = {}
        self.files: list[StagedFile] = []

    async def add(self, topic: str, rows: pa.RecordBatch) -> None:
        """Rows with the envelope's columns but the id, which is ours to give, as is a producer's name that is null."""
        for first in range(0, rows.num_rows, self._batch_rows):
            part = rows.slice(first, self._batch_rows)
            batch = encode(self._named(part), topic=topic, codec=self._compression)
            self._waiting.setdefault(topic, []).append(batch)
            size = self._waiting_bytes[topic] = self._waiting_bytes.get(topic, 0) + batch.header.size_bytes
            if size >= self._file_bytes:
                await self._write(topic)

    def _named(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        count = rows.num_rows
        base = self._partition << ROW_BITS | self._row
        self._row += count
        columns = {name: rows.column(name) for name in rows.schema.names}
        if columns["producer_name"].null_count < count:
            columns["attributes"] = _marked(columns["attributes"], self._name)
        columns["producer_name"] = pc.fill_null(columns["producer_name"], self._name)
        columns["request_id"] = pa.array(np.arange(base, base + count, dtype=np.int64))
        for field in TIMES:
            columns.setdefault(field.name, pa.nulls(count, field.type))
        return pa.RecordBatch.from_arrays([columns[field.name] for field in ENVELOPE], schema=ENVELOPE)

    async def finish(self) -> list[StagedFile]:
        for topic in list(self._waiting):
            await self._write(topic)
        return self.files

    async def _write(self, topic: str) -> None:
        batches = self._waiting.pop(topic)
        self._waiting_bytes.pop(topic)
        key = staged_key(self._query, self._batch, self._partition, self._attempt, self._number)
        self._number += 1
        await self._store.put(key, [buffer for batch in batches for buffer in batch.buffers])
        self.files.append(StagedFile(key, topic, self._partition, sum(batch.header.rows for batch in batches)))


def _marked(attributes: pa.MapArray, name: str) -> pa.MapArray:
    """With the attribute that says query and batch, as the last of each row, and none of another query."""
    bounds = attributes.offsets.to_numpy()
    first, count = int(bounds[0]), len(attributes)
    keys, items = (each.slice(first, int(bounds[-1]) - first) for each in (attributes.keys, attributes.items))
    kept = np.flatnonzero(pc.not_equal(keys, MARK).to_numpy(zero_copy_only=False))
    per_row = np.bincount(np.repeat(np.arange(count), np.diff(bounds))[kept], minlength=count)
    ends = np.cumsum(per_row + 1)
    taken = np.full(len(kept) + count, len(keys))  # the mark, which stands behind all others
    taken[np.setdiff1d(np.arange(len(taken)), ends - 1, assume_unique=True)] = kept
    new_keys = pa.concat_arrays([keys, pa.array([MARK])]).take(pa.array(taken))
    new_items = pa.concat_arrays([items, pa.array([name])]).take(pa.array(taken))
    return pa.MapArray.from_arrays(pa.array(np.concatenate([[0], ends]).astype(np.int32)), new_keys, new_items)
