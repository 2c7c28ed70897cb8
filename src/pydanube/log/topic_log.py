"""One topic's log in one epoch: append at the head, read from anywhere, drop from the front, close.

The committer writes it (`SegmentedLog`); log_reading.py reads it, trimmer.py removes what is old, producer_sessions.py
opens and ends sessions of producers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from pydanube.core.commit.sessions import Sessions
from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import InvalidBatch, LogClosed, LogStopped
from pydanube.formats.batch import Batch, topic_hash
from pydanube.log.cache import TailCache
from pydanube.log.catalog import SegmentFile
from pydanube.log.commit_context import Answer, Broadcast, SegmentedLog
from pydanube.log.committer import Committer
from pydanube.log.layout import epoch_directory
from pydanube.log.log_reading import READ_BYTES, LogReading
from pydanube.log.pressure import Pressure
from pydanube.log.producer_sessions import ProducerSessions
from pydanube.log.reader import LogReader
from pydanube.log.recovered import Recovered, RecoveredEpoch
from pydanube.log.trimmer import Trimmer
from pydanube.log.wal_config import WalConfig
from pydanube.ports import Clock, Disk
from pydanube.telemetry import WalMetrics

log = logging.getLogger(__name__)


class HandedOver(NamedTuple):
    """What an owner tells the next: where producers stand, and when it appended last."""

    sessions: Sessions
    append_time: int = 0


class LogResources(NamedTuple):
    """What every log of one data directory works with."""

    disk: Disk
    clock: Clock
    config: WalConfig
    committer: Committer
    cache: TailCache
    metrics: WalMetrics


class TopicLog(LogReading, SegmentedLog):
    """One topic's log in one epoch.

    `head` is the next offset of what is committed, `first_offset` the first that is still kept here. What lies
    between may have holes where another broker owned the topic (`held` tells).
    """

    def __init__(
        self,
        resources: LogResources,
        recovered: Recovered,
        epoch: int,
        head: int,
        durability: str,
        *,
        handed_over: HandedOver | None = None,
        adopts_unknown: bool = False,
        on_closed: Callable[[], None],
    ) -> None:
        newest = recovered.epochs[-1] if recovered.epochs else RecoveredEpoch(0, "")
        known = handed_over or HandedOver(newest.sessions)
        known.sessions.adopts_unknown |= adopts_unknown
        known.sessions.epoch = epoch
        SegmentedLog.__init__(
            self,
            recovered.topic,
            topic_hash=topic_hash(recovered.topic),
            epoch=epoch,
            durability=durability,
            head=head,
            append_time=max(newest.append_time, known.append_time),
            max_publish_time=newest.max_publish_time,
            sessions=known.sessions,
        )
        self.directory = epoch_directory(self.topic, epoch)
        self.recovered = recovered
        self.active = None
        self.segments = recovered.segments
        self.disk = resources.disk
        self.metrics = resources.metrics
        self._config = resources.config
        self._committer = resources.committer
        self._cache = resources.cache
        self.tail = resources.cache.new_tail()
        self._on_closed = on_closed
        self._is_counted = False  # in the size of all logs
        self._ended = asyncio.Event()  # `close` is done
        self._news = Broadcast()  # something was committed, or nothing will be
        self._changing: set[asyncio.Task[None]] = set()  # segments that are being made for `prepare` or `roll`
        self._trimmer = Trimmer(self, resources.disk, resources.metrics, self._dropped)
        self._producers = ProducerSessions(self, self.submit, resources.clock, resources.config, resources.metrics)

    @property
    def pressure(self) -> Pressure:
        """Of all topics' logs together."""
        return self._committer.pressure

    def count(self) -> None:
        """From now on its segments count as the log's, until they are dropped or it is closed."""
        self._is_counted = True
        self._committer.space.size_bytes += self.size_bytes

    # --- appending ----------------------------------------------------------------------------------

    def current_offset(self) -> int:
        """The next offset of what is committed."""
        return self.head

    def submit(self, batch: Batch, on_decided: Callable[[], None] | None = None) -> Answer:
        """Queues a batch that was parsed or encoded here; the future gets its receipt. Never waits.

        `on_decided` may be called before the future calls back: see `Committer.submit`.
        """
        if batch.header.topic_hash != self.topic_hash:
            raise InvalidBatch(f"it was made for another topic than {self.topic}")
        return self._committer.submit(self, batch, on_decided)

    async def append(self, batch: Batch) -> CommitReceipt:
        """Returns once the batch is as safe as `durability` says. Waits first while too much is queued."""
        committer = self._committer
        while committer.pending_bytes > self._config.pending_bytes and not (committer.stopped or self.closed):
            await committer.next_group()
        return await self.submit(batch)

    async def open_session(self, producer_id: int) -> int:
        """A new session for this producer, durably; older ones are refused from now on. Raises LimitReached."""
        return await self._producers.open(producer_id)

    def end_idle_sessions(self, *, is_sure: bool) -> int:
        """Ends sessions that were not used for `session_seconds`, some at a time; how many. Each end is a record.

        Not `is_sure`: a lost owner may have messages that are not known here yet, so no session that would be
        adopted again may end.
        """
        if self.closed or self._committer.stopped is not None:
            return 0
        return len(self._producers.end_idle(is_sure=is_sure))

    async def settled(self) -> None:
        """Returns when the group that is being written now, if any, is decided."""
        await self._committer.barrier()

    def between_groups(self) -> asyncio.Lock:
        """While it is held, everything that was accepted lies below the head, or was never accepted."""
        return self._committer.between_groups()

    async def drain(self) -> None:
        """Returns when nothing that was submitted is undecided. Raises LogStopped if nothing will be any more."""
        while True:
            while self.pending:
                if self._committer.stopped is not None:
                    raise self._committer.stopped
                await self._committer.next_group()
            await self._committer.barrier()
            if not self.pending:
                return

    async def prepare(self) -> None:
        """Makes the first segment now, so that the first append does not wait for its directory.

        Once begun it is finished, as `roll`.
        """
        await self._finish_in_any_case(self._committer.prepare(self))

    def reserve(self, end: int) -> None:
        """Offsets below `end` may be given out; batches beyond it wait."""
        self.reserved_end = end
        self._committer.reservation_grew(self)

    def adopt(self, segment: SegmentFile) -> None:
        """Called by the committer: the next group goes here."""
        self.active = segment
        self.segments.append(segment)
        if self._is_counted:
            self._committer.space.size_bytes += segment.end

    def committed(self, batches: Sequence[Batch], segment: SegmentFile) -> None:
        """Called by the committer: these are safe, so they may be seen."""
        for batch in batches:
            if batch.header.rows:
                self._cache.add(self.tail, batch, segment)
        self._news.fire()

    # --- following ----------------------------------------------------------------------------------

    async def follow(self, offset: int, *, bytes_max: int = READ_BYTES) -> AsyncIterator[Batch]:
        """Committed batches from `offset` on, as they come; ends when the log is closed."""
        reader = LogReader(self, offset)
        while True:
            for batch in await reader.read(bytes_max):
                yield batch
            if reader.offset >= self.head:
                if self.closed:
                    return
                await self.wait_beyond(reader.offset)

    async def wait_beyond(self, offset: int) -> None:
        """Returns when something at or beyond `offset` is committed, or the log is closed."""
        while self.head <= offset and not self.closed:
            await self._news.wait()

    # --- retention and closing ----------------------------------------------------------------------

    async def truncate(self, before: int) -> int:
        """Drops segments that lie wholly below `before`; returns the first offset that is still kept.

        The newest segment always stays: it knows where the log ends. A damaged one is set aside, not removed.
        """
        async with self._trimmer.lock:
            if self.closed:
                raise LogClosed(self.topic)
            await self._trimmer.truncate(before)
        return self.first_offset

    def forget_dropped(self) -> None:
        """Batches of segments that were dropped leave the memory, too: what they hold is not to be read here."""
        self.tail = self._cache.without(self.tail, self.first_offset)

    def _dropped(self, segments: Sequence[SegmentFile]) -> None:
        for segment in segments:
            segment.released = True
        self._uncount(segments)

    def _uncount(self, segments: Sequence[SegmentFile]) -> None:
        if self._is_counted:
            self._committer.space.freed(sum(segment.end for segment in segments))

    async def roll(self) -> None:
        """Ends the newest segment, so that `truncate` may drop it too.

        Once begun it is finished, also if the caller gives up: a segment that the log does not know of would bound the
        one before it.
        """
        await self._finish_in_any_case(self._committer.roll(self))

    async def _finish_in_any_case(self, change: Coroutine[Any, Any, None]) -> None:
        """Also if the caller gives up. `close` waits for it."""
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    def lost_segments(self, epoch: int, start: int) -> list[SegmentFile]:
        """Of the epochs up to this older one, those that reach beyond `start`, as a whole."""
        older = [segment for segment in self.segments if segment.header.epoch <= epoch]
        reaching = {segment.header.epoch for segment in older if segment.end_offset > start}
        return [segment for segment in older if segment.header.epoch in reaching]

    async def forget_lost(self, epoch: int, start: int, damaged: Sequence[tuple[int, int]] = ()) -> None:
        """Drops the `lost_segments`: the history has them now, and has them differently.

        What has `damaged` offsets, found while it was read, is set aside for a person.
        """
        assert epoch < self.epoch
        async with self._trimmer.lock:
            doomed = self.lost_segments(epoch, start)
            if not self.closed and doomed:
                await self._trimmer.drop(doomed, damaged)

    async def close(self) -> None:
        """Commits what is queued, then ends the epoch: nothing is ever added to it."""
        if self.closed:
            await self._ended.wait()  # a caller that closes the directory next must not overtake it
            return
        self.closed = True
        committer = self._committer
        while self.pending and committer.stopped is None and committer.awaits_turn(self):
            await committer.next_group()
        committer.refuse_pending(self)
        try:
            if self._changing:  # what it makes is this log's, and ends with it
                await asyncio.wait(self._changing)
            await committer.made(self)  # a segment that appeared behind the end would be taken for lost
            if self.active is not None:
                await committer.sync_segment(self)
            async with self._trimmer.lock:  # also waits for a truncation that is under way
                if self.active is not None:
                    await self._trimmer.finish(self.active)
            # Only now: until it was settled, memory was the only place to read the newest batches from.
            self._cache.drop(self.tail)
        except LogStopped:
            log.error("log left unfinished", extra={"topic": self.topic})  # the next start recovers it
        finally:
            self._dropped(self.segments)
            self._is_counted = False
            self._on_closed()
            self._news.fire()
            self._ended.set()
