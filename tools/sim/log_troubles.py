"""What happens to an open log in addition to producers: everything that a broker asks of it, at any moment.

Retention, readers that follow or poll, segments made ahead, rolled and dropped, topics that are closed and opened again
also when the disk let neither end well, old epochs read and given up, leases that run out, room that goes and comes.
Each is a method of `Troubles`; a history draws from them as long as a boot lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from pydanube.errors import (
    DataDamaged,
    DiskFailed,
    DiskFull,
    LogClosed,
    LogDamaged,
    LogStopped,
    OffsetOutOfRange,
)
from pydanube.log.wal import TopicLog, Wal
from pydanube.testing.loop import ProcessDied
from tools.sim.log_checks import check_sizes, check_waiters
from tools.sim.log_model import Audit, Broken, TopicModel

if TYPE_CHECKING:
    from tools.sim.log_history import Boot, History

POLLS = 15


class Troubles:
    """Draws what happens next in one history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._rng = history.rng
        self._disk = history.disk
        self._counts = history.outcome.counts
        self._all = (
            *(self._retain, self._retain, self._read, self._room, self._reopen, self._roll, self._prepare),
            *(self._forget, self._poll, self._lose_lease, self._look, self._reopen_full),
        )

    async def disturb(self, boot: Boot) -> None:
        """Goes on until it is cancelled or the process ends."""
        rng, history = self._rng, self._history
        assert boot.wal is not None
        for model in history.models:
            log = boot.logs[model.topic]
            for _ in range(rng.choice((0, 1, 2)) if len(history.models) < 10 else 0):
                boot.process.spawn(self._follow(log, model)).add_done_callback(self._ended)
        if history.together and len(history.models) > 1:
            self._beside(boot, self._pile_up(boot))
        try:
            while True:
                await asyncio.sleep(rng.random() * history.boot_seconds / 6)
                model = rng.choice(history.models)
                log = boot.logs[model.topic]
                check_sizes(boot.wal)
                if model.reserves and not log.closed:
                    boot.process.run(history.reserve, log, model)
                if history.sessions_end:
                    self._counts["sessions ended"] += boot.process.run(partial(log.end_idle_sessions, is_sure=True))
                await rng.choice(self._all)(boot, log, model)
                if boot.wal.full is not None and rng.random() < 0.5:
                    await self.make_room(boot)
        except ProcessDied:
            return

    async def make_room(self, boot: Boot) -> None:
        """The bound of bytes is met: everything goes that may go, and that must be enough."""
        wal = boot.wal
        assert wal is not None
        self._counts["limit: bytes_max met"] += 1
        for model in self._history.models:
            log = boot.logs[model.topic]
            if log.closed:
                continue
            try:
                await boot.process.call(log.roll())
                before = log.head
                model.truncated_before = max(model.truncated_before, before)
                await boot.process.call(log.truncate(before))
            except (DiskFull, DiskFailed, LogClosed, LogStopped) as error:
                self._history.excuse(boot, error)
                return

    def prepare_soon(self, boot: Boot, log: TopicLog) -> None:
        """Its first segment is made before it is needed."""
        self._beside(boot, log.prepare())

    def _beside(self, boot: Boot, coroutine: Coroutine[Any, Any, Any]) -> None:
        """In the background; the disk's failures are its caller's business."""
        boot.process.spawn(coroutine).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, DiskFull | DiskFailed | LogClosed | LogStopped):
            self._history.fail(error)

    # --- retention ---

    async def _retain(self, boot: Boot, log: TopicLog, model: TopicModel, *, everything: bool = False) -> None:
        before = log.head if everything else self._rng.randint(log.first_offset, log.head)
        model.truncated_before = max(model.truncated_before, before)
        try:
            first = await boot.process.call(log.truncate(before))
        except (DiskFull, DiskFailed, LogClosed) as error:
            self._history.excuse(boot, error)
            self._history.say(f"not truncated: {error!r}")
            return
        self._history.say(f"truncate {model.topic} before {before} keeps {first}")
        self._counts["truncations"] += 1

    async def _roll(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        if self._rng.random() < 0.2:
            self._beside(boot, log.roll())
            return
        try:
            rolling = boot.process.call(log.roll())
            if self._rng.random() < 0.2:  # its caller gives up
                # Not wait_for, which in Python 3.11 takes no notice of a cancel that comes with the answer.
                async with asyncio.timeout(self._rng.random() * 0.002):
                    await rolling
            else:
                await rolling
        except (TimeoutError, DiskFailed, LogClosed, LogStopped):
            return
        self._history.say(f"roll {model.topic}")
        if self._rng.random() < 0.5:
            await self._retain(boot, log, model)

    async def _prepare(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        self._beside(boot, log.prepare())
        if self._rng.random() < 0.5:  # it may end behind a close
            await self._reopen(boot, log, model)

    async def _forget(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        """Another store keeps what older epochs hold from some offset on."""
        if self._rng.random() < 0.5 or log.closed or log.active is None:
            return  # without a segment of its own, nothing here would know where the log goes on
        start = self._rng.randint(log.first_offset, log.head)
        lost = boot.process.run(log.lost_segments, log.epoch - 1, start)
        if not lost:
            return
        model.drop(lost[0].first_offset, lost[-1].end_offset)
        damaged = [(lost[0].first_offset, lost[0].first_offset + 1)] if self._rng.random() < 0.1 else []
        try:
            await boot.process.call(log.forget_lost(log.epoch - 1, start, damaged))
        except (DiskFull, DiskFailed) as error:
            self._history.excuse(boot, error)
        self._counts["epochs given up"] += 1

    # --- reading ---

    async def _read(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        offset = self._rng.randint(log.first_offset, log.head)
        try:
            batches = await boot.process.call(log.read(offset, bytes_max=self._rng.choice((1, 5000))))
        except (OffsetOutOfRange, DiskFailed, DiskFull):
            return
        except LogDamaged as error:
            if model.durability == "os" and self._disk.counts["failed syncs"]:
                return
            raise Broken(f"a read met damage where none was done: {error}") from error
        for batch in batches:
            model.read(batch)
        if batches and not batches[0].header.base_offset <= offset < batches[0].header.end_offset:
            raise Broken(f"a read at {offset} of {model.topic} gives {batches[0].header.base_offset}")

    async def _follow(self, log: TopicLog, model: TopicModel) -> None:
        """A reader that starts anywhere and follows the tail."""
        offset = self._rng.randint(log.first_offset, log.head)
        bytes_max = self._rng.choice((1, 3000, 1 << 20))
        while not log.closed:
            try:
                async for batch in log.follow(offset, bytes_max=bytes_max):
                    model.read(batch)
                    if batch.header.base_offset > offset:
                        raise Broken(f"a reader at {offset} of {model.topic} got {batch.header.base_offset}")
                    offset = batch.header.end_offset
                    self._history.say(f"read {model.topic} {batch.header.base_offset}")
            except OffsetOutOfRange as error:
                # Overtaken by retention, or at a hole.
                offset = max(log.first_offset, error.first)
                await asyncio.sleep(0)
            except LogDamaged as error:
                if model.durability == "os":
                    return
                raise Broken(f"a reader met damage where none was done: {error}") from error
            except (DiskFailed, DiskFull, LogClosed):
                return

    async def _poll(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        """A reader that waits for news for a moment, again and again."""

        async def poll() -> None:
            for _ in range(POLLS):
                try:
                    async with asyncio.timeout(0.00001):
                        await log.wait_beyond(log.head)
                except TimeoutError:
                    continue
            check_waiters(log)

        if self._rng.random() < 0.3:
            await boot.process.call(poll())

    async def _look(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        """Questions that change nothing."""
        rng = self._rng
        kind = rng.choice(("ranges", "time", "between", "settled", "quiet"))
        wal = boot.wal
        assert wal is not None
        if kind == "ranges":
            ranges = log.held()
            ends = [end for held in ranges for end in held]
            if ends != sorted(ends) or (ends and (ends[0] != log.first_offset or ends[-1] > log.head)):
                raise Broken(f"{model.topic} says that it holds {ranges}, from {log.first_offset} to {log.head}")
            wal.excess_bytes()
            for run in log.runs(log.first_offset):
                if not 0 <= run.first < run.end <= log.head:
                    raise Broken(f"{model.topic} counts {run}, from {log.first_offset} to {log.head}")
            if wal.pressure_now().queued_bytes < 0 or wal.sessions() < len(log.sessions):
                raise Broken(f"the log counts {wal.pressure_now()} and {wal.sessions()} sessions")
            if not log.closed and not wal.is_open(model.topic):
                raise Broken(f"{model.topic} is open and not known")
        elif kind == "time":
            try:
                first = log.first_offset
                found = await boot.process.call(log.offset_at(rng.randint(0, max(0, log.max_publish_time) + 1), first))
            except (OffsetOutOfRange, DiskFailed, DiskFull, LogDamaged):
                return
            if not first <= found <= log.current_offset():
                raise Broken(f"{model.topic} has a time at offset {found}, and offsets from {first} to {log.head}")
        elif kind == "between":
            await boot.process.call(self._between(log, rng.random() * 0.001))
        elif kind == "settled":
            await boot.process.call(log.settled())
            if not log.closed:
                boot.process.run(log.forget_dropped)  # as after an operator has emptied it
        elif not model.reserves:
            try:
                await boot.process.call(log.drain())
            except LogStopped:
                return

    async def _pile_up(self, boot: Boot) -> None:
        """Nothing is committed around the moments at which producers wake up: the next group has many topics."""
        loop, tick, before = asyncio.get_running_loop(), self._history.tick_seconds, 0.0002
        while not boot.ended.is_set() and not all(log.closed for log in boot.logs.values()):
            await asyncio.sleep((-before - loop.time()) % tick)
            await self._between(self._rng.choice(list(boot.logs.values())), 2 * before)

    async def _between(self, log: TopicLog, seconds: float) -> None:
        async with log.between_groups():
            head = log.head
            await asyncio.sleep(seconds)
            if log.head != head:
                raise Broken(f"{log.topic} goes on from {head} to {log.head} between two groups")

    # --- the world ---

    async def _lose_lease(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        """For a moment no receipt may be given."""
        if self._rng.random() < 0.5:
            return
        self._history.leased = False
        self._counts["leases lost"] += 1
        try:
            await asyncio.sleep(self._rng.random() * 0.005)
        finally:
            self._history.leased = True

    async def _room(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        if self._history.flips or self._rng.random() < 0.5:
            return
        if self._disk.capacity_bytes is None:
            room = self._rng.randrange(self._rng.choice((500, 5_000, 20_000)))
            self._disk.capacity_bytes = self._disk.used_bytes + room
        else:
            self._disk.capacity_bytes = None

    async def _reopen(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        """The topic is closed and opened again, as when it moves away and back. Either may fail at first."""
        if self._rng.random() < 0.4:
            await self._close_and_open(boot, log, model, self._disk.capacity_bytes)

    async def _reopen_full(self, boot: Boot, log: TopicLog, model: TopicModel) -> None:
        """The same, while there is no room for a copy of what only the journal has; until it is opened again."""
        assert boot.wal is not None
        away = [
            each
            for each in self._history.models
            if boot.logs[each.topic].active in boot.wal.committer._journal.uncopied
        ]
        if not away or self._history.flips:
            return
        capacity_bytes = self._disk.capacity_bytes
        model = self._rng.choice(away)
        self._disk.capacity_bytes = self._disk.used_bytes
        await self._close_and_open(boot, boot.logs[model.topic], model, capacity_bytes)

    async def _close_and_open(self, boot: Boot, log: TopicLog, model: TopicModel, capacity_bytes: int | None) -> None:
        assert boot.wal is not None
        for attempt in range(4):
            try:
                if self._rng.random() < 0.2 and not log.closed:
                    await self._refused_while_open(boot, boot.wal, model)
                await boot.process.call(log.close())
            except (DiskFull, DataDamaged) as error:
                self._history.excuse(boot, error)
                self._counts["closes that failed"] += 1
                self._history.say(f"not closed: {error!r}")
            if self._rng.random() < 0.7:
                self._disk.capacity_bytes = capacity_bytes  # as it was before
            try:
                if self._rng.random() < 0.3:
                    await boot.process.call(self._read_closed(boot.wal, model))
                opening = boot.opening = boot.process.spawn(self._history.open_topic(boot.wal, model))
                boot.logs[model.topic] = await boot.process.wait(opening)
            except (DiskFull, DiskFailed, LogStopped) as error:
                self._history.excuse(boot, error)
                self._history.say(f"not reopened: {error!r}")
                log = boot.wal._logs.get(model.topic, log)  # it may be open, and not readable
                if self._disk.capacity_bytes is not None and self._rng.random() < 0.5:
                    self._disk.capacity_bytes += self._rng.randrange(20_000)
                await asyncio.sleep(self._rng.random() * 0.01)
                continue
            self._counts["topics reopened" if attempt == 0 else "topics reopened at last"] += 1
            if self._rng.random() < 0.5:
                await self._retain(boot, boot.logs[model.topic], model, everything=True)
            return
        boot.ended.set()  # only a restart makes it whole again

    async def _refused_while_open(self, boot: Boot, wal: Wal, model: TopicModel) -> None:
        try:
            await boot.process.call(wal.lost_log(model.topic))
        except (LogClosed, DiskFailed, DiskFull):
            return
        raise Broken(f"{model.topic} is open, and was given as if it were lost")

    async def _read_closed(self, wal: Wal, model: TopicModel) -> None:
        """Between the two: what this disk has, to be read alone."""
        closed = await wal.lost_log(model.topic)
        if model.durability == "os":
            return
        first = next(
            (each.first_offset for each in closed.segments if each.end_offset > each.first_offset), closed.head
        )
        audit = Audit(model, first, closed.head)
        reader = closed.reader(first)
        while audit.next < closed.head:
            try:
                audit.take(await reader.read(1 << 20))
            except OffsetOutOfRange as error:
                audit.hole(min(error.first, closed.head))
                reader = closed.reader(audit.next)
            except LogDamaged as error:
                raise Broken(f"damage where none was done: {error}") from error
        audit.done()
        self._counts["closed logs read"] += 1
